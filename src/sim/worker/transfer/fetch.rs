//! The start of a decode leg: the prompt's blocks are fetched from the engine that has computed them.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Request, header};
use serde::Deserialize;
use serde_json::Value;

use super::blocks::{BLOCKS, RELEASE, Wanted};
use super::{Asked, Connector, fingerprint};
use crate::http::client::{self, Pool};
use crate::sim::fault::Faults;
use crate::sim::worker::Shared;
use crate::sim::worker::ask::Ask;
use crate::sim::worker::problem::Problem;

/// What engines say to each other is short.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// A prompt that another engine has computed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Received {
    /// It is some other prompt's, which a real engine would not know.
    pub(crate) is_wrong: bool,
    /// What the answer's usage says of the cache.
    pub(crate) told_cached_tokens: usize,
}

/// Blocks of the first prompt of `ask`. What cannot be fetched is an engine error, but a Mooncake engine waits
/// for it first, for minutes.
pub(crate) async fn receive(
    shared: &Shared,
    connector: Connector,
    asked: &Asked,
    ask: &Ask,
    faults: &Faults,
) -> Result<Received, Problem> {
    let lease = shared.settings.transfer.lease();
    let fetched = async {
        if faults.transfer.transfer_hangs {
            // Ends when the client does.
            std::future::pending::<()>().await;
        }
        if let Some(after_ms) = faults.transfer.transfer_fails_ms {
            tokio::time::sleep(Duration::from_millis(after_ms)).await;
            return Err(Problem::internal());
        }
        match connector {
            Connector::Nixl => nixl(shared, asked, ask).await,
            Connector::Mooncake => match mooncake(shared, asked, ask).await {
                Some(received) => Ok(received),
                None => std::future::pending().await,
            },
        }
    };
    let fetched = match connector {
        Connector::Nixl => fetched.await,
        Connector::Mooncake => tokio::time::timeout(lease, fetched)
            .await
            .unwrap_or_else(|_| Err(Problem::internal())),
    };
    shared.transfers.count(|counts| match &fetched {
        Ok(received) => {
            counts.received += 1;
            counts.wrong_uses += u64::from(received.is_wrong);
        }
        Err(_) => counts.failed_transfers += 1,
    });
    fetched
}

/// A NIXL decode engine that refuses its request tells the prefill engine to free the blocks.
pub(crate) async fn give_up(asked: &Asked) {
    let wanted = Wanted {
        engine_id: String::new(),
        name: asked.remote_request_id.clone().unwrap_or_default(),
        fingerprint: 0,
        missing_tokens: 0,
    };
    if let Some(address) = nixl_address(asked) {
        // If it is gone, so are its blocks.
        let _ = exchange(address, RELEASE, &wanted).await;
    }
}

async fn nixl(shared: &Shared, asked: &Asked, ask: &Ask) -> Result<Received, Problem> {
    let started = tokio::time::Instant::now();
    let fetched = match nixl_address(asked) {
        Some(address) => {
            let name = asked.remote_request_id.as_deref();
            fetch(shared, address, name, asked, ask).await
        }
        None => Err(io::Error::other("no address")),
    };
    match fetched {
        Ok(is_right) => Ok(Received {
            is_wrong: !is_right,
            told_cached_tokens: asked.remote_prefill_cached_tokens.unwrap_or(0),
        }),
        Err(_) => {
            let limit = Duration::from_millis(shared.settings.transfer.connect_ms);
            tokio::time::sleep_until(started + limit).await;
            Err(Problem::internal())
        }
    }
}

fn nixl_address(asked: &Asked) -> Option<String> {
    let (host, port) = (asked.remote_host.as_deref()?, asked.remote_port?);
    Some(match host.contains(':') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    })
}

/// None where a real engine waits and says nothing.
async fn mooncake(shared: &Shared, asked: &Asked, ask: &Ask) -> Option<Received> {
    let bootstrap = asked.remote_bootstrap_addr.as_deref()?;
    let bootstrap = Pool::new(
        bootstrap.strip_prefix("http://")?.to_owned(),
        client::Settings::default(),
    );
    let (_, page) = bootstrap.get("/query", None, ANSWER_BYTES_MAX).await.ok()?;
    let page: Value = serde_json::from_slice(&page).ok()?;
    let engine_id = asked.remote_engine_id.as_deref()?;
    let mut ranks = page.as_object()?.values();
    let rank = ranks.find(|rank| rank["engine_id"] == engine_id)?;
    let address = rank["worker_addr"]["0"]["0"].as_str()?;
    let address = address.strip_prefix("tcp://")?.to_owned();
    let name = asked.transfer_id.as_deref();
    let is_right = fetch(shared, address, name, asked, ask).await.ok()?;
    Some(Received {
        is_wrong: !is_right,
        told_cached_tokens: ask.prompt_tokens(),
    })
}

/// Whether the blocks were this prompt's.
async fn fetch(
    shared: &Shared,
    address: String,
    name: Option<&str>,
    asked: &Asked,
    ask: &Ask,
) -> io::Result<bool> {
    #[derive(Deserialize)]
    struct Answer {
        right: bool,
    }
    let prompt = ask.prompts.first().map_or(&[][..], Vec::as_slice);
    let wanted = Wanted {
        engine_id: asked.remote_engine_id.clone().unwrap_or_default(),
        name: name.unwrap_or_default().to_owned(),
        fingerprint: fingerprint(prompt, ask.salt),
        missing_tokens: shared.ranks.missing_tokens(prompt, ask.salt),
    };
    let answer = exchange(address, BLOCKS, &wanted).await?;
    let answer: Answer = serde_json::from_slice(&answer).map_err(io::Error::other)?;
    Ok(answer.right)
}

async fn exchange(address: String, path: &str, wanted: &Wanted) -> io::Result<Bytes> {
    let pool: Arc<Pool> = Pool::new(address, client::Settings::default());
    let body = serde_json::to_vec(wanted).map_err(io::Error::other)?;
    let request = Request::post(path)
        .header(header::HOST, pool.address())
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::from(body))
        .map_err(io::Error::other)?;
    let answer = pool.send_anew(request).await.map_err(io::Error::other)?;
    let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX);
    Ok(body.collect().await.map_err(io::Error::other)?.to_bytes())
}
