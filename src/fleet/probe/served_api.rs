//! Asks an engine whether it serves an API.

use std::time::Duration;

use hyper::StatusCode;
use tracing::{debug, info};

use crate::fleet::Worker;

/// More than any error.
const MAX_RESPONSE_BYTES: usize = 64 << 10;

/// An API that not every engine serves.
pub(super) struct OptionalApi {
    pub(super) path: &'static str,
    /// What follows if it is not served, for the log.
    pub(super) otherwise: &'static str,
}

/// Whether the worker answers a POST with 404, 405 or 501. Asked with a body that every engine refuses, so that nothing is
/// generated. `known` if it does not answer.
pub(super) async fn is_lacking(
    worker: &Worker,
    api: &OptionalApi,
    known: bool,
    limit: Duration,
) -> bool {
    let OptionalApi { path, otherwise } = api;
    let authorization = worker.authorization.as_ref();
    let post = worker
        .pool
        .post(path, authorization, "{}", MAX_RESPONSE_BYTES);
    match tokio::time::timeout(limit, post).await {
        Ok(Ok((status, _))) => {
            let is_lacking = matches!(
                status,
                StatusCode::NOT_FOUND
                    | StatusCode::METHOD_NOT_ALLOWED
                    | StatusCode::NOT_IMPLEMENTED
            );
            if is_lacking {
                info!(worker = %worker.name, %status, path, "worker does not serve the path; {otherwise}");
            }
            is_lacking
        }
        Ok(Err(error)) => {
            debug!(worker = %worker.name, error, path, "cannot ask whether the path is served");
            known
        }
        Err(_) => known,
    }
}
