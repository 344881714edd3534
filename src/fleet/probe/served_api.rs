//! Asks an engine whether it serves the APIs that not every one has: Messages and the Responses API.

use std::time::Duration;

use tracing::{debug, info};

use crate::fleet::{Facts, ResponsesApi, Worker};

/// More than any error.
const MAX_RESPONSE_BYTES: usize = 64 << 10;

/// Whether the worker does not serve Anthropic's Messages. `None` if it has not said so.
pub(super) async fn lacks_messages(worker: &Worker, limit: Duration) -> Option<bool> {
    let (path, otherwise) = ("/v1/messages", "it gets no such requests");
    is_lacking(worker, path, otherwise, limit).await
}

/// Whether the worker needs chat completions: an engine without the Responses API, or one whose answers to chat completions
/// are better than those of its own Responses API (SGLang). Asked only where the configuration does not say. `None` if it has
/// not said so.
pub(super) async fn lacks_responses(
    worker: &Worker,
    facts: &Facts,
    limit: Duration,
) -> Option<bool> {
    if worker.responses != ResponsesApi::Auto {
        return Some(false);
    }
    if facts.capabilities().prefers_chat {
        return Some(true);
    }
    let (path, otherwise) = ("/v1/responses", "it is sent chat completions");
    is_lacking(worker, path, otherwise, limit).await
}

/// Whether the worker answers a POST with 404, 405 or 501. Asked with a body that every engine refuses, so that nothing is
/// generated. `otherwise`: what follows if it does, for the log. `None` if it does not answer, or a proxy answers that does
/// not reach it.
async fn is_lacking(
    worker: &Worker,
    path: &'static str,
    otherwise: &'static str,
    limit: Duration,
) -> Option<bool> {
    let authorization = worker.authorization.as_ref();
    let post = worker
        .pool
        .post(path, authorization, "{}", MAX_RESPONSE_BYTES);
    let status = match tokio::time::timeout(limit, post).await {
        Ok(Ok((status, _))) => status,
        Ok(Err(error)) => {
            debug!(worker = %worker.name, error, path, "cannot ask whether the path is served");
            return None;
        }
        Err(_) => return None,
    };
    match status.as_u16() {
        404 | 405 | 501 => {
            info!(worker = %worker.name, %status, path, "worker does not serve the path; {otherwise}");
            Some(true)
        }
        502..=504 => None,
        _ => Some(false),
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;
    use crate::fleet::probe::models::tests::{give, worker_at};

    /// Asks a worker that gives this answer; `None`: it gives none.
    async fn check(status: Option<&str>, expected: Option<bool>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let worker = worker_at(&listener);
        let limit = match status {
            Some(_) => Duration::from_secs(60),
            None => Duration::from_millis(20),
        };
        let engine = async {
            if let Some(status) = status {
                let answer =
                    format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
                give(&listener, &answer).await;
            }
        };
        let (lacks, ()) = tokio::join!(lacks_messages(&worker, limit), engine);
        assert_eq!(lacks, expected, "{status:?}");
    }

    #[tokio::test]
    async fn a_worker_that_is_not_reached_has_not_said_which_apis_it_serves() {
        check(Some("400 Bad Request"), Some(false)).await;
        check(Some("404 Not Found"), Some(true)).await;
        check(Some("503 Service Unavailable"), None).await;
        check(None, None).await;
    }
}
