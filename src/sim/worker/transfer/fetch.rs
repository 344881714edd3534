//! The start of a decode leg: fetches the prompt's blocks from the prefill engine.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Request, header};
use serde::Deserialize;
use serde_json::Value;

use super::blocks::{BLOCKS, BlockRequest, RELEASE};
use super::params::TransferParams;
use super::settings::Connector;
use super::state::fingerprint;
use crate::http::client::{self, Pool};
use crate::sim::fault::Faults;
use crate::sim::worker::error::ApiError;
use crate::sim::worker::request::GenerationRequest;
use crate::sim::worker::shared::Shared;

/// Answers between engines are short.
const MAX_ANSWER_BYTES: usize = 64 << 10;

/// A prompt that a prefill engine has computed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Received {
    /// The blocks are not those of the prompt, which a real engine would not notice.
    pub(crate) is_wrong: bool,
    /// The cached tokens in the reported usage.
    pub(crate) reported_cached_tokens: usize,
}

/// Fetches the blocks of the first prompt. If that fails, the result is an engine error, which a Mooncake engine reports
/// only after minutes of waiting.
pub(crate) async fn receive(
    shared: &Shared,
    connector: Connector,
    params: &TransferParams,
    request: &GenerationRequest,
    faults: &Faults,
) -> Result<Received, ApiError> {
    let lease = shared.settings.transfer.lease();
    let fetched = async {
        if faults.transfer.transfer_hangs {
            // Ends when the client disconnects.
            std::future::pending::<()>().await;
        }
        if let Some(after_ms) = faults.transfer.transfer_fails_ms {
            tokio::time::sleep(Duration::from_millis(after_ms)).await;
            return Err(ApiError::internal());
        }
        match connector {
            Connector::Nixl | Connector::Moriio => nixl(shared, params, request).await,
            Connector::Mooncake => match mooncake(shared, params, request).await {
                Some(received) => Ok(received),
                None => std::future::pending().await,
            },
        }
    };
    let fetched = match connector {
        Connector::Nixl | Connector::Moriio => fetched.await,
        Connector::Mooncake => tokio::time::timeout(lease, fetched)
            .await
            .unwrap_or_else(|_| Err(ApiError::internal())),
    };
    shared.transfers.count(|stats| match &fetched {
        Ok(received) => {
            stats.received += 1;
            stats.wrong_uses += u64::from(received.is_wrong);
        }
        Err(_) => stats.failed_transfers += 1,
    });
    fetched
}

/// Asks the prefill engine to free the blocks, as a NIXL decode engine does when it rejects the request.
pub(crate) async fn release(params: &TransferParams) {
    let wanted = BlockRequest {
        engine_id: String::new(),
        name: params.remote_request_id.clone().unwrap_or_default(),
        fingerprint: 0,
        missing_tokens: 0,
    };
    if let Some(address) = nixl_address(params) {
        // If the prefill engine is gone, so are its blocks.
        let _ = exchange(address, RELEASE, &wanted).await;
    }
}

async fn nixl(
    shared: &Shared,
    params: &TransferParams,
    request: &GenerationRequest,
) -> Result<Received, ApiError> {
    let started = tokio::time::Instant::now();
    let fetched = match nixl_address(params) {
        Some(address) => {
            let name = params.remote_request_id.as_deref();
            let name = name.or(params.transfer_id.as_deref());
            fetch(shared, address, name, params, request).await
        }
        None => Err(io::Error::other("no address")),
    };
    match fetched {
        Ok(is_right) => Ok(Received {
            is_wrong: !is_right,
            reported_cached_tokens: params.remote_prefill_cached_tokens.unwrap_or(0),
        }),
        Err(_) => {
            let timeout = Duration::from_millis(shared.settings.transfer.connect_ms);
            tokio::time::sleep_until(started + timeout).await;
            Err(ApiError::internal())
        }
    }
}

fn nixl_address(params: &TransferParams) -> Option<String> {
    let (host, port) = (
        params.remote_host.as_deref()?,
        params.remote_port.or(params.remote_handshake_port)?,
    );
    Some(if host.contains(':') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    })
}

/// `None` where a real engine would wait silently.
async fn mooncake(
    shared: &Shared,
    params: &TransferParams,
    request: &GenerationRequest,
) -> Option<Received> {
    let bootstrap = params.remote_bootstrap_addr.as_deref()?;
    let bootstrap = Pool::new(
        bootstrap.strip_prefix("http://")?.to_owned(),
        client::Settings::default(),
    );
    let (_, page) = bootstrap.get("/query", None, MAX_ANSWER_BYTES).await.ok()?;
    let page: Value = serde_json::from_slice(&page).ok()?;
    let engine_id = params.remote_engine_id.as_deref()?;
    let mut ranks = page.as_object()?.values();
    let rank = ranks.find(|rank| rank["engine_id"] == engine_id)?;
    let address = rank["worker_addr"]["0"]["0"].as_str()?;
    let address = address.strip_prefix("tcp://")?.to_owned();
    let name = params.transfer_id.as_deref();
    let is_right = fetch(shared, address, name, params, request).await.ok()?;
    Some(Received {
        is_wrong: !is_right,
        reported_cached_tokens: request.prompt_tokens(),
    })
}

/// Transfers the blocks. False if they were not those of the prompt.
async fn fetch(
    shared: &Shared,
    address: String,
    name: Option<&str>,
    params: &TransferParams,
    request: &GenerationRequest,
) -> io::Result<bool> {
    #[derive(Deserialize)]
    struct Answer {
        right: bool,
    }
    let prompt = request.prompts.first().map_or(&[][..], Vec::as_slice);
    let wanted = BlockRequest {
        engine_id: params.remote_engine_id.clone().unwrap_or_default(),
        name: name.unwrap_or_default().to_owned(),
        fingerprint: fingerprint(prompt, request.salt),
        missing_tokens: shared.ranks.missing_tokens(prompt, request.salt),
    };
    let answer = exchange(address, BLOCKS, &wanted).await?;
    let answer: Answer = serde_json::from_slice(&answer).map_err(io::Error::other)?;
    Ok(answer.right)
}

async fn exchange(address: String, path: &str, wanted: &BlockRequest) -> io::Result<Bytes> {
    let pool: Arc<Pool> = Pool::new(address, client::Settings::default());
    let body = serde_json::to_vec(wanted).map_err(io::Error::other)?;
    let request = Request::post(path)
        .header(header::HOST, pool.address())
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::from(body))
        .map_err(io::Error::other)?;
    let answer = pool.send_anew(request).await.map_err(io::Error::other)?;
    let body = Limited::new(answer.into_body(), MAX_ANSWER_BYTES);
    Ok(body.collect().await.map_err(io::Error::other)?.to_bytes())
}
