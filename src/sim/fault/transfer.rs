//! Faults of KV transfers between simulated engines.

use serde::{Deserialize, Serialize};

/// In JSON, an absent fault is off.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TransferFaults {
    /// Answer prefill legs without kv_transfer_params, and keep no blocks for a decode engine.
    pub no_params: bool,

    /// Fail the transfer of every decode leg after this long, with an engine error.
    pub transfer_fails_ms: Option<u64>,

    /// Never finish the transfer of any decode leg.
    pub transfer_hangs: bool,

    /// Exit when a prefill leg or a decode leg arrives, without answering it.
    pub die_at_leg: bool,

    /// Exit as soon as the answer to a prefill leg is sent.
    pub die_after_answer: bool,
}
