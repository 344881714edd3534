//! The ways in which a handoff between engines can go wrong. Plain data, as the other faults.

use serde::{Deserialize, Serialize};

/// In JSON, a switch that is not named is off.
#[derive(clap::Args, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HandoffFaults {
    /// Answer prefill legs without saying where the blocks are, and keep none.
    #[arg(long = "fault-no-params")]
    pub no_params: bool,

    /// Let the transfer of every decode leg fail after this many milliseconds, as an engine error.
    #[arg(long = "fault-transfer-fails-ms", value_name = "MILLISECONDS")]
    pub transfer_fails_ms: Option<u64>,

    /// Let the transfer of every decode leg take for ever.
    #[arg(long = "fault-transfer-hangs")]
    pub transfer_hangs: bool,

    /// End the process when a prefill leg or a decode leg comes, before any of its answer.
    #[arg(long = "fault-die-at-leg")]
    pub die_at_leg: bool,

    /// End the process once a prefill leg's answer is out.
    #[arg(long = "fault-die-after-answer")]
    pub die_after_answer: bool,
}
