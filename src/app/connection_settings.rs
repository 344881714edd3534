//! How many connections of clients are accepted, for the file descriptors that the process may open.

use tracing::{info, warn};

use crate::config::Config;
use crate::http::descriptors::DescriptorPlan;
use crate::http::server;
use crate::observe::process;

/// Fewer connections than this are worth a warning: a busy fleet has more clients.
const FEW_CONNECTIONS: u32 = 4_096;

/// The settings of clients' connections, with no more of them than leave file descriptors for engines.
pub(super) fn new(config: &Config, io_threads: usize) -> server::Settings {
    let settings = config.api.advanced.clone();
    let limit = process::descriptor_limit();
    let workers = config.members().len();
    let plan = DescriptorPlan::new(
        limit,
        settings.max_connections,
        workers,
        io_threads,
        settings.engine_descriptors,
    );
    // The default is no wish of the operator, and a few thousand connections are usually enough.
    let is_default = settings.max_connections == server::Settings::default().max_connections;
    if plan.is_short && is_default && plan.max_connections >= FEW_CONNECTIONS {
        info!(
            limit,
            needed = plan.needed,
            accepted = plan.max_connections,
            "as many connections are accepted as the limit of open files allows"
        );
    } else if plan.is_short {
        warn!(
            limit,
            needed = plan.needed,
            max_connections = settings.max_connections,
            accepted = plan.max_connections,
            fix = "raise the limit of open files (ulimit -n, LimitNOFILE), lower api.advanced.max_connections, or set api.advanced.engine_descriptors if most connections are idle",
            "too few file descriptors for max_connections; fewer connections are accepted, so that engines can be reached"
        );
    }
    server::Settings {
        max_connections: plan.max_connections,
        ..settings
    }
}
