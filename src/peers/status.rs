//! What pages show of other replicas.

use serde::Serialize;

/// This replica and the others.
#[derive(Debug, Serialize)]
pub struct Status {
    pub replica: ReplicaRow,
    pub peers: Vec<PeerRow>,
}

/// This replica.
#[derive(Debug, Serialize)]
pub struct ReplicaRow {
    pub name: String,
    pub instance_id: String,
    /// Other replicas are expected, and none is heard.
    pub is_alone: bool,
}

/// Another replica, or an address at which one is expected.
#[derive(Debug, Default, Serialize)]
pub struct PeerRow {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instance_id: Option<String>,
    pub address: Option<String>,
    /// `connected`, `stale`, `unreachable` or `refused`.
    pub state: &'static str,
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LoadRow {
    pub replica: String,
    pub requests: u64,
    pub queued_tokens: u64,
    pub decode_tokens: u64,
}
