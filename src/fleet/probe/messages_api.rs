//! Finds out whether an engine serves Anthropic's Messages.

use std::time::Duration;

use hyper::StatusCode;
use tracing::{debug, info};

use crate::fleet::{Facts, Worker};

const PATH: &str = "/v1/messages";
/// More than any error.
const MAX_RESPONSE_BYTES: usize = 64 << 10;

/// Whether the worker answers `POST /v1/messages` with 404, 405 or 501. Asked with a body that every engine refuses, so that
/// nothing is generated. As before (`facts`) if it does not answer.
pub(super) async fn is_lacking(worker: &Worker, facts: &Facts, limit: Duration) -> bool {
    let authorization = worker.authorization.as_ref();
    let post = worker
        .pool
        .post(PATH, authorization, "{}", MAX_RESPONSE_BYTES);
    match tokio::time::timeout(limit, post).await {
        Ok(Ok((status, _))) => {
            let is_lacking = matches!(
                status,
                StatusCode::NOT_FOUND
                    | StatusCode::METHOD_NOT_ALLOWED
                    | StatusCode::NOT_IMPLEMENTED
            );
            if is_lacking {
                info!(worker = %worker.name, %status, "worker does not serve the Messages API; it gets no such requests");
            }
            is_lacking
        }
        Ok(Err(error)) => {
            debug!(worker = %worker.name, error, "cannot ask for the Messages API");
            facts.lacks_messages
        }
        Err(_) => facts.lacks_messages,
    }
}
