//! The command-line arguments of the demo.

use super::{deployment, workload};

#[derive(clap::Args, Clone, Debug)]
pub struct Settings {
    /// Compare engines that do everything with disaggregated prefill/decode: as many engines, half of which
    /// compute prompts and half of which generate the answers, over conversations about documents.
    #[arg(long)]
    pub(super) disaggregated: bool,

    #[command(flatten)]
    pub(super) deployment: deployment::Settings,

    #[command(flatten)]
    pub(super) workload: workload::Settings,

    /// Exit after the table instead of leaving the last router running.
    #[arg(long)]
    pub(super) exit: bool,
}
