//! Faults of KV transfers between simulated engines.

use serde::{Deserialize, Serialize};

use crate::units::parse_milliseconds;

/// Set by command-line arguments, or by `POST /sim/faults` in JSON, where a fault that is left out is off.
#[derive(clap::Args, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TransferFaults {
    /// Answer prefill legs without kv_transfer_params, and keep no blocks for a decode engine.
    #[arg(long = "fault-no-params")]
    pub no_params: bool,

    /// Fail the transfer of every decode leg after this long, with an engine error.
    #[arg(
        long = "fault-transfer-fails-after",
        value_name = "DURATION",
        value_parser = parse_milliseconds
    )]
    pub transfer_fails_ms: Option<u64>,

    /// Never finish the transfer of any decode leg.
    #[arg(long = "fault-transfer-hangs")]
    pub transfer_hangs: bool,

    /// Exit when a prefill leg or a decode leg arrives, without answering it.
    #[arg(long = "fault-die-at-leg")]
    pub die_at_leg: bool,

    /// Exit as soon as the answer to a prefill leg is sent.
    #[arg(long = "fault-die-after-answer")]
    pub die_after_answer: bool,
}
