//! What requests need to know of their tenants, from the configuration, and where their limits are counted.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::config::Config;
use crate::http::drain::Tasks;
use crate::http::tls::Clients;
use crate::ids::Tenant;
use crate::jwt;
use crate::limits::{Limiter, Store, TenantLimits};
use crate::observe;
use crate::observe::line_log::LineLog;
use crate::observe::metrics::Registry;
use crate::openai::tenant::Tenants;
use crate::peers::Peers;
use crate::peers::status::PeerRow;
use crate::relay::account::usage::Usage;
use crate::relay::{TenantProfile, TenantTable};
use crate::store::OpenStore;
use crate::store::redis::Redis;

/// How often the replicas that share limits are counted.
const COUNT_INTERVAL: Duration = Duration::from_secs(1);

/// Who may send requests.
pub(super) fn callers(
    config: &Config,
    clients: &Arc<Clients>,
    tasks: &Tasks,
    metrics: &Registry,
) -> io::Result<Tenants> {
    let verifier = jwt::Verifier::new(clients.clone(), tasks.clone(), metrics);
    let verifier = verifier.successor(config.jwt.as_ref());
    let verifier = verifier.map_err(io::Error::other)?;
    let listed = config.salted_tenants();
    Ok(Tenants::new(
        &listed,
        config.jwt.as_ref(),
        verifier,
        metrics,
    ))
}

pub(super) fn table(config: &Config, limiter: &Arc<Limiter>) -> TenantTable {
    let tokens = config.jwt.as_ref();
    let default = tokens.map_or("", |settings| &settings.default_tenant);
    let listed = config.tenants.iter().map(|tenant| TenantProfile {
        id: Tenant::default(),
        name: tenant.name.as_str().into(),
        priority: tenant.priority,
        max_priority: tenant.max_priority.unwrap_or(tenant.priority),
        limits: tenant
            .limits
            .as_ref()
            .map(|limits| TenantLimits::new(limiter, &tenant.name, limits, &config.limits)),
    });
    let table = TenantTable::new(listed).with_default(default);
    // The check allows it only where no tenants are listed.
    let Some(everybody) = &config.limits.everybody else {
        return table;
    };
    table.with_limits(TenantLimits::new(
        limiter,
        Tenant::DEFAULT,
        everybody,
        &config.limits,
    ))
}

/// What limits are counted with.
pub(super) fn limiter(
    config: &Config,
    store: &OpenStore,
    io_threads: usize,
    metrics: &Registry,
) -> io::Result<Arc<Limiter>> {
    let redis = match &config.limits.store {
        Store::Local => None,
        Store::Responses => store.redis.clone(),
        Store::Redis(settings) => {
            let keep = &config.responses.store.retention;
            // Its metrics would be those of the response store.
            let registry = Registry::default();
            Some(Arc::new(Redis::open(
                settings, keep, io_threads, &registry,
            )?))
        }
    };
    Ok(Limiter::new(&config.limits, redis, metrics))
}

/// Starts what settles charges, and what counts the replicas that share limits while Redis is away.
pub(super) fn start_limiter(limiter: &Arc<Limiter>, peers: &Peers, tasks: &Tasks) {
    let supervisor = tasks.supervisor();
    let state = (limiter.clone(), tasks.clone());
    let settle = |(limiter, tasks)| Limiter::run(limiter, tasks);
    tasks.spawn(supervisor.restarts("charges", state, settle));
    let shared = (limiter.clone(), peers.clone());
    let count = |(limiter, peers)| count_replicas(limiter, peers);
    tasks.spawn_until_stopped(supervisor.restarts("limit_shares", shared, count));
}

async fn count_replicas(limiter: Arc<Limiter>, peers: Peers) {
    loop {
        let Some(status) = peers.status(observe::now()) else {
            return;
        };
        let is_connected = |peer: &&PeerRow| peer.state == "connected";
        let others = status.peers.iter().filter(is_connected).count();
        limiter.set_replicas(u32::try_from(others).unwrap_or(u32::MAX).saturating_add(1));
        tokio::time::sleep(COUNT_INTERVAL).await;
    }
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
