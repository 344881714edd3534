//! Asks an engine whether it serves the APIs that not every one has: Messages and the Responses API.

use std::time::Duration;

use hyper::StatusCode;
use tracing::{debug, info};

use crate::fleet::{Facts, ResponsesApi, Worker};

/// More than any error.
const MAX_RESPONSE_BYTES: usize = 64 << 10;

/// Whether the worker does not serve Anthropic's Messages. As before (`facts`) if it does not answer.
pub(super) async fn lacks_messages(worker: &Worker, facts: &Facts, limit: Duration) -> bool {
    let (path, otherwise) = ("/v1/messages", "it gets no such requests");
    is_lacking(worker, path, otherwise, facts.lacks_messages, limit).await
}

/// Whether the worker needs chat completions: an engine without the Responses API, or one whose answers to chat completions
/// are better than those of its own Responses API (SGLang). Asked only where the configuration does not say.
pub(super) async fn lacks_responses(worker: &Worker, facts: &Facts, limit: Duration) -> bool {
    if worker.responses != ResponsesApi::Auto {
        return false;
    }
    if facts.capabilities().prefers_chat {
        return true;
    }
    let (path, otherwise) = ("/v1/responses", "it is sent chat completions");
    is_lacking(worker, path, otherwise, facts.lacks_responses, limit).await
}

/// Whether the worker answers a POST with 404, 405 or 501. Asked with a body that every engine refuses, so that nothing is
/// generated. `otherwise`: what follows if it does, for the log. `known` if it does not answer.
async fn is_lacking(
    worker: &Worker,
    path: &'static str,
    otherwise: &'static str,
    known: bool,
    limit: Duration,
) -> bool {
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
