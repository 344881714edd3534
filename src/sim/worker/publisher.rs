//! Publishes the KV events of one dp rank over ZeroMQ and answers replay requests, as vLLM 0.32 does.
//!
//! It differs from vLLM in two ways: replays are answered concurrently with publishing, so a slow client delays
//! nothing; and a batch gets its number, and can be replayed, before it is sent.

pub mod encode;
mod events;
mod gate;
mod log;
pub(super) mod outlet;
pub(super) mod settings;
pub(super) mod sockets;

use std::io;
use std::sync::Arc;

use tokio::net::TcpListener;

pub use self::outlet::BoundEndpoints;
use self::outlet::Outlet;
pub use self::settings::{Endpoint, Hashes, Layout, Settings};
use self::sockets::{Guarded, Publisher};
use crate::sim::fault::kv::KvFaults;

/// Binds the endpoints. `None` if events are off.
pub(super) async fn bind(
    settings: &Settings,
    rank: u16,
    block_tokens: u32,
    faults: &KvFaults,
) -> io::Result<Option<Publisher>> {
    let Some(endpoint) = &settings.events else {
        return Ok(None);
    };
    let events = Guarded::bind(listen(endpoint, rank).await?).await?;
    let replay = match &settings.replay {
        Some(endpoint) => Some(Guarded::bind(listen(endpoint, rank).await?).await?),
        None => None,
    };
    let replay_gate = replay.as_ref().map(|replay| &replay.gate);
    let replay_address = replay_gate.map(|gate| gate.listener.local_addr());
    let bound = BoundEndpoints {
        events: events.gate.listener.local_addr()?,
        replay: replay_address.transpose()?,
    };
    let mut cutters = vec![events.gate.cutter.clone()];
    cutters.extend(replay_gate.map(|gate| gate.cutter.clone()));
    let (outlet, commands) = Outlet::new(settings, rank, block_tokens, faults, bound, cutters);
    Ok(Some(Publisher {
        outlet: Arc::new(outlet),
        commands,
        events,
        replay,
    }))
}

async fn listen(endpoint: &Endpoint, rank: u16) -> io::Result<TcpListener> {
    let of_rank = endpoint.of_rank(rank);
    let no_port = || io::Error::other(format!("{endpoint}: no port for rank {rank}"));
    let endpoint = of_rank.ok_or_else(no_port)?;
    TcpListener::bind(endpoint.address())
        .await
        .map_err(|error| io::Error::new(error.kind(), format!("{endpoint}: {error}")))
}
