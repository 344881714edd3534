//! Faults of KV transfers between simulated engines. Pure.

use serde::{Deserialize, Serialize};

/// In JSON, an absent fault is off.
#[derive(clap::Args, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TransferFaults {
    /// Answer prefill legs without kv_transfer_params, and keep no blocks for a decode engine.
    #[arg(long = "fault-no-params")]
    pub no_params: bool,

    /// Fail the transfer of every decode leg after this many milliseconds, with an engine error.
    #[arg(long = "fault-transfer-fails-ms", value_name = "MILLISECONDS")]
    pub transfer_fails_ms: Option<u64>,

    /// Never finish the transfer of any decode leg.
    #[arg(long = "fault-transfer-hangs")]
    pub transfer_hangs: bool,

    /// End the process when a prefill leg or a decode leg arrives, before any of its answer is sent.
    #[arg(long = "fault-die-at-leg")]
    pub die_at_leg: bool,

    /// End the process as soon as the answer of a prefill leg is sent.
    #[arg(long = "fault-die-after-answer")]
    pub die_after_answer: bool,
}
