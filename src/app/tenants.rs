//! What requests need to know of their tenants, from the configuration.

use std::io;
use std::sync::Arc;

use crate::config::Config;
use crate::observe::line_log::LineLog;
use crate::observe::metrics::Registry;
use crate::relay::usage::Usage;
use crate::relay::{TenantProfile, TenantTable};

pub(super) fn table(config: &Config) -> TenantTable {
    TenantTable::new(config.tenants.iter().map(|tenant| TenantProfile {
        name: tenant.name.as_str().into(),
        priority: tenant.priority,
        max_priority: tenant.max_priority.unwrap_or(tenant.priority),
    }))
}

/// What counts and writes down what they use.
pub(super) fn usage(config: &Config, metrics: &Registry) -> io::Result<Arc<Usage>> {
    let settings = &config.usage;
    let place = &settings.log;
    let open = || {
        let queue = usize::try_from(settings.max_queued_size).unwrap_or(usize::MAX);
        LineLog::open(place, queue).map_err(|error| {
            let message =
                format!("cannot write the usage log: {place}: {error}; change `usage.log`");
            io::Error::new(error.kind(), message)
        })
    };
    let log = (!place.is_empty()).then(open).transpose()?;
    Ok(Usage::new(log, metrics))
}
