//! One GET of a probe.

use std::time::Duration;

use bytes::Bytes;
use hyper::StatusCode;

use crate::fleet::Worker;
use crate::http::client;

/// `/v1/models` of an engine with 10,000 LoRA adapters, each with some 500 bytes, is the largest response to a probe. A worker
/// whose list is larger gets no requests.
pub(super) const MAX_RESPONSE_BYTES: usize = 8 << 20;

#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub(super) struct ProbeError {
    pub(super) text: String,
    /// The router itself had no file descriptor, port or memory.
    pub(super) is_local: bool,
    /// The worker took longer than the limit.
    pub(super) is_timeout: bool,
    /// The worker answered with a status that is no success: it does not have the page, or does not give it.
    pub(super) is_status: bool,
    /// The status says that there is no such page.
    pub(super) is_missing: bool,
}

impl From<ProbeError> for String {
    fn from(error: ProbeError) -> Self {
        error.text
    }
}

/// One GET with a time-out; any status but 2xx is an error.
pub(super) async fn get(worker: &Worker, path: &str, limit: Duration) -> Result<Bytes, ProbeError> {
    let failed = |text| ProbeError {
        text,
        is_local: false,
        is_timeout: false,
        is_status: false,
        is_missing: false,
    };
    let get = worker
        .pool
        .get(path, worker.authorization.as_ref(), MAX_RESPONSE_BYTES);
    match tokio::time::timeout(limit, get).await {
        Err(_) => Err(ProbeError {
            is_timeout: true,
            ..failed(format!("no response to {path} within {limit:?}"))
        }),
        Ok(Err(error)) => Err(ProbeError {
            is_local: error
                .downcast_ref::<client::Error>()
                .is_some_and(client::Error::is_local),
            ..failed(error.to_string())
        }),
        Ok(Ok((status, _))) if !status.is_success() => Err(ProbeError {
            is_status: true,
            is_missing: status == StatusCode::NOT_FOUND,
            ..failed(format!("{path} answered {status}"))
        }),
        Ok(Ok((_, body))) => Ok(body),
    }
}
