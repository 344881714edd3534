//! The command-line arguments of the demo.

use super::{deployment, workload};

#[derive(clap::Args, Clone, Debug)]
pub struct Settings {
    /// Compare engines that do everything with disaggregated prefill/decode: as many engines, half of which
    /// compute prompts and half of which generate the answers, over conversations about documents.
    #[arg(long)]
    pub(super) disaggregated: bool,

    /// Compare one router with this many replicas of it, from 2 to 8, in front of a fleet each: replicas that share
    /// what they know, and replicas that do not. Each request goes to a replica drawn at random.
    #[arg(
        long,
        value_name = "ROUTERS",
        conflicts_with = "disaggregated",
        value_parser = clap::value_parser!(u32).range(2..=8),
    )]
    pub(super) replicas: Option<u32>,

    #[command(flatten)]
    pub(super) deployment: deployment::Settings,

    #[command(flatten)]
    pub(super) workload: workload::Settings,

    /// Exit after the table instead of leaving a router running.
    #[arg(long)]
    pub(super) exit: bool,
}
