//! How many connections of clients are accepted, for the file descriptors that the process may open.

use tracing::warn;

use crate::config::Config;
use crate::http::descriptors::DescriptorPlan;
use crate::http::server;
use crate::observe::process;

/// The settings of clients' connections, with no more of them than leave file descriptors for engines.
pub(super) fn new(config: &Config) -> server::Settings {
    let settings = config.api.advanced.clone();
    let limit = process::descriptor_limit();
    let workers = config.members().len();
    let plan = DescriptorPlan::new(limit, settings.max_connections, workers);
    if plan.is_short {
        warn!(
            limit,
            needed = plan.needed,
            max_connections = settings.max_connections,
            accepted = plan.max_connections,
            fix = "raise the limit of open files (ulimit -n, LimitNOFILE) or lower api.advanced.max_connections",
            "too few file descriptors for max_connections; fewer connections are accepted, so that engines can be reached"
        );
    }
    server::Settings {
        max_connections: plan.max_connections,
        ..settings
    }
}
