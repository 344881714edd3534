//! What pages show of other replicas. Pure.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::addresses::AddressState;
use super::load_table::LoadTable;
use super::roster::{Freshness, Peer, Roster};

/// This replica and the others.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    #[serde(skip_deserializing)]
    pub replica: ReplicaRow,
    pub peers: Vec<PeerRow>,
}

/// This replica.
#[derive(Debug, Default, Serialize)]
pub struct ReplicaRow {
    pub name: String,
    pub instance_id: String,
    /// Other replicas are expected, and none is connected.
    pub is_alone: bool,
}

/// Another replica, or an address at which one is expected.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PeerRow {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instance_id: Option<String>,
    pub address: Option<String>,
    /// `connected`, `stale`, `unreachable` or `refused`.
    pub state: Cow<'static, str>,
    /// Why it is not connected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub release: Option<String>,
    pub is_ready: bool,
    pub is_draining: bool,
    /// Time since its last message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub age_ms: Option<u64>,
    /// Age of its newest state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lag_ms: Option<u64>,
    /// Workers that it reports and this replica does not have.
    pub unknown_workers: usize,
}

/// What one replica has at a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LoadRow {
    pub replica: String,
    pub requests: u64,
    pub queued_tokens: u64,
    pub context_tokens: u64,
    /// Requests that wait in the replica for the worker.
    pub waiting_requests: u32,
}

/// The other replicas: those that are connected, then the addresses at which one is expected and not connected.
pub(super) fn rows(
    now: Instant,
    roster: &Roster,
    table: &LoadTable,
    addresses: &BTreeMap<Arc<str>, AddressState>,
    is_listed: impl Fn(&str) -> bool,
) -> Vec<PeerRow> {
    let connected = roster.peers().map(|peer| {
        let id = peer.identity.id;
        let silent = now.saturating_duration_since(peer.received_at);
        PeerRow {
            name: Some(peer.identity.name.to_string()),
            instance_id: Some(id.to_string()),
            address: peer.address.as_deref().map(str::to_owned),
            state: Cow::Borrowed(match roster.freshness(now, peer) {
                Freshness::Connected => "connected",
                Freshness::Stale => "stale",
            }),
            error: None,
            release: Some(peer.identity.release.to_string()),
            is_ready: peer.condition.is_ready,
            is_draining: peer.condition.is_draining,
            age_ms: Some(millis(silent)),
            lag_ms: Some(millis(silent + table.age(id))),
            unknown_workers: table.unknown_workers(id, &is_listed),
        }
    });
    let expected = addresses.iter().filter_map(|(address, state)| {
        let (state, error) = state.shown()?;
        Some(PeerRow {
            address: Some(address.to_string()),
            state: Cow::Borrowed(state),
            error,
            ..PeerRow::default()
        })
    });
    connected.chain(expected).collect()
}

/// What each other replica has at a worker.
pub(super) fn load_rows(roster: &Roster, table: &LoadTable, address: &str) -> Vec<LoadRow> {
    let row = |peer: &Peer| {
        let load = table.load(peer.identity.id, address);
        (!load.is_zero()).then(|| LoadRow {
            replica: peer.identity.name.to_string(),
            requests: load.requests,
            queued_tokens: load.queued_tokens,
            context_tokens: load.context_tokens,
            waiting_requests: load.waiting.requests,
        })
    };
    roster.peers().filter_map(row).collect()
}

fn millis(duration: Duration) -> u64 {
    duration.as_millis() as u64
}
