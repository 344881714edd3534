//! Probes every worker: `/health`, `/v1/models`, `/version`, `/metrics`, `/kv_event_sources`, and the Mooncake
//! bootstrap server of a prefill worker; of SGLang `/ready`, `/server_info` and `/v1/loads`.

mod engine;
mod get;
mod health_check;
pub mod lookup;
mod models;
mod schedule;
mod served_api;
mod sglang;
mod sleep;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tracing::{debug, info, warn};

use self::engine::EngineMetrics;
use self::get::{MAX_RESPONSE_BYTES, ProbeError, get};
use self::health_check::HealthCheck;
pub use self::health_check::OnConnected;
use self::schedule::{ListedModels, LoggedState, ProbeSchedule, Step, WorkerUse};
use self::sleep::SleepPage;
use super::engine::Capabilities;
use super::health::{self, Health};
use super::kv_transfer::{BootstrapInfo, Connector};
use super::load::{Load, LoadReport};
use super::registry::{CHANGES_APART, Registry};
use super::{Facts, Role, Worker};
use crate::http::client;
use crate::http::drain::Tasks;
use crate::http::keyed_tasks::KeyedTasks;
use crate::ids::WorkerId;
use crate::observe;
use crate::observe::log_once::LogOnce;

/// Short, because the probes of the worker itself wait for its bootstrap server.
const BOOTSTRAP_TIMEOUT: Duration = Duration::from_secs(3);

/// Between the first probes of two workers that joined together: so the first of a thousand workers is known at once, where all
/// of them would be known at the end.
const FIRST_PROBE_SPACING: Duration = Duration::from_millis(1);

/// The default port of bootstrap servers, if the connector needs them, and the connector.
pub type BootstrapPort = Option<(Connector, u16)>;

/// Runs one probe task for each worker of the fleet.
pub async fn run(
    registry: Arc<Registry>,
    bootstrap: BootstrapPort,
    on_connected: OnConnected,
    tasks: Tasks,
) {
    let mut changes = registry.changes();
    let mut probes = KeyedTasks::new("probe", tasks);
    loop {
        let snapshot = registry.snapshot().clone();
        let listed: BTreeMap<WorkerId, &Arc<Worker>> = snapshot
            .workers
            .iter()
            .map(|status| (status.worker.id, &status.worker))
            .collect();
        let mut joined = 0;
        probes.set_keys(&listed.keys().copied().collect(), |id| {
            let on_connected = on_connected.clone();
            let probe = probe(
                listed[id].clone(),
                registry.clone(),
                bootstrap,
                on_connected,
            );
            let wait = FIRST_PROBE_SPACING * joined;
            joined += 1;
            async move {
                tokio::time::sleep(wait).await;
                probe.await;
            }
        });
        tokio::time::sleep(CHANGES_APART).await;
        tokio::select! {
            changed = changes.changed() => {
                if changed.is_err() {
                    return;
                }
            }
            () = probes.restart_due() => {}
        }
    }
}

async fn probe(
    worker: Arc<Worker>,
    registry: Arc<Registry>,
    bootstrap: BootstrapPort,
    on_connected: OnConnected,
) {
    let mut prober = Prober {
        schedule: ProbeSchedule::default(),
        settings: health::Settings::default(),
        worker,
        registry,
        bootstrap,
        on_connected,
        facts: None,
        bootstrap_log: LogOnce::default(),
    };
    let mut step = prober.begin();
    loop {
        step = prober.take(step).await;
    }
}

struct Prober {
    schedule: ProbeSchedule,
    /// Those of this round.
    settings: health::Settings,
    worker: Arc<Worker>,
    registry: Arc<Registry>,
    bootstrap: BootstrapPort,
    on_connected: OnConnected,
    /// What the engine said about itself last.
    facts: Option<Facts>,
    bootstrap_log: LogOnce,
}

impl Prober {
    fn begin(&mut self) -> Step {
        self.settings = self.registry.settings().health.clone();
        // As it is listed now: its key may have changed.
        if let Some(worker) = self.registry.worker(self.worker.id) {
            self.worker = worker;
        }
        let has_bootstrap = self.bootstrap().is_some();
        let (settings, responses) = (self.settings.clone(), self.worker.responses);
        self.schedule.begin(settings, responses, has_bootstrap)
    }

    /// The worker's bootstrap server, if it has one.
    fn bootstrap(&self) -> BootstrapPort {
        self.bootstrap.filter(|_| self.worker.role != Role::Decode)
    }

    fn health_check(&self) -> HealthCheck<'_> {
        HealthCheck {
            worker: &self.worker,
            engine: self.facts.as_ref().map(|facts| facts.engine),
            limit: self.settings.timeout,
            on_connected: &self.on_connected,
        }
    }

    async fn take(&mut self, step: Step) -> Step {
        let (worker, limit) = (&self.worker, self.settings.timeout);
        match step {
            Step::CheckHealth => {
                let checked = self.health_check().run().await;
                if let Err(error) = &checked
                    && error.is_local
                {
                    debug!(worker = %worker.name, %error, "no health check for lack of the router's own resources");
                    worker.pool.close_idle();
                }
                self.schedule.on_health(checked)
            }
            Step::AskIfAsleep => {
                let page = sleep::ask(worker, limit).await;
                self.schedule.on_sleep_page(page)
            }
            Step::Record { error, is_failure } => {
                worker
                    .health_failures
                    .fetch_add(u64::from(is_failure), Relaxed);
                worker.last_probe_error.store(error.map(Arc::new));
                self.schedule.on_recorded()
            }
            Step::ListModels {
                asks_messages,
                asks_responses,
            } => {
                let listed = self.list_models(asks_messages, asks_responses).await;
                self.schedule.on_models(listed)
            }
            Step::ReadUse => {
                let used = worker_use(&worker.load);
                self.schedule.on_use(observe::now(), used)
            }
            Step::FetchLoad => {
                self.fetch_load().await;
                self.schedule.on_load()
            }
            Step::ExpireReport => {
                worker.load.expire_report();
                self.schedule.on_probed()
            }
            Step::AskBootstrap => {
                if let Some(bootstrap) = self.bootstrap() {
                    let log = &mut self.bootstrap_log;
                    update_bootstrap_info(worker, &self.registry, bootstrap, limit, log).await;
                }
                self.schedule.on_probed()
            }
            Step::Settle { health, log } => {
                if let Some(health) = health {
                    self.registry.set_health(worker.id, health);
                }
                if let Some(state) = log {
                    log_state(&state, worker, self.facts.as_ref());
                }
                self.schedule.on_settled(0.9 + 0.2 * fastrand::f64())
            }
            Step::Wait(pause) => {
                worker.pool.close_expired(observe::now());
                let check = self.health_check();
                tokio::select! {
                    biased;
                    () = tokio::time::sleep(pause) => {}
                    () = check.connected() => {}
                }
                self.begin()
            }
        }
    }

    /// What the engine lists. What it says about itself is published.
    async fn list_models(
        &mut self,
        asks_messages: bool,
        asks_responses: bool,
    ) -> Result<ListedModels, String> {
        let (worker, limit) = (&self.worker, self.settings.timeout);
        let mut found = match models::fetch(worker, limit).await {
            Ok(found) => found,
            Err(error) => {
                debug!(worker = %worker.name, error, "cannot list models");
                return Err(error);
            }
        };
        let before = self.facts.take().unwrap_or_default();
        found.block_size = before.block_size;
        found.prefix_caching = before.prefix_caching;
        models::complete(worker, limit, &mut found, &before).await;
        // Another release may be there although no health check has failed.
        let is_other = (&found.version, found.engine) != (&before.version, before.engine);
        let messages = async {
            if !asks_messages && !is_other {
                return Some(before.lacks_messages);
            }
            served_api::lacks_messages(worker, limit).await
        };
        let responses = async {
            if !asks_responses && !is_other {
                return Some(before.lacks_responses);
            }
            served_api::lacks_responses(worker, &found, limit).await
        };
        // At the same time: a proxy may hold both until the time-out, and the worker's health is not checked meanwhile.
        let (lacks_messages, lacks_responses) = tokio::join!(messages, responses);
        let has_said_apis = lacks_messages.is_some() && lacks_responses.is_some();
        found.lacks_messages = lacks_messages.unwrap_or(before.lacks_messages);
        found.lacks_responses = lacks_responses.unwrap_or(before.lacks_responses);
        self.registry.set_facts(worker.id, found.clone());
        let has_any = !found.models.is_empty();
        self.facts = Some(found);
        Ok(ListedModels {
            has_any,
            has_said_apis,
        })
    }

    /// Asks for the engine's load, and for what its metrics say of its cache.
    async fn fetch_load(&mut self) {
        let (worker, registry) = (&self.worker, &self.registry);
        let engine = self.facts.as_ref().map(|facts| facts.engine);
        let capabilities = engine.unwrap_or_default().capabilities();
        let Ok(seen) = fetch_load(worker, capabilities, self.settings.timeout).await else {
            return expire_report(worker, self.settings.interval);
        };
        if self.schedule.on_start_time(seen.started) {
            info!(worker = %worker.name, "engine restarted; its cache is treated as empty");
            registry.restarted(worker.id);
        }
        if let Some(facts) = &mut self.facts
            && seen.block_size.is_some()
            && (seen.block_size, seen.prefix_caching) != (facts.block_size, facts.prefix_caching)
        {
            if let Some(known) = registry.facts(worker.id) {
                // A request may have found other models since.
                *facts = (*known).clone();
            }
            facts.block_size = seen.block_size;
            facts.prefix_caching = seen.prefix_caching;
            registry.set_facts(worker.id, facts.clone());
        }
        if seen.has_load {
            worker.load.report(LoadReport {
                at: observe::now(),
                running: seen.running,
                waiting: seen.waiting,
                deferred: seen.deferred,
                kv_usage: seen.kv_usage,
            });
        } else {
            expire_report(worker, self.settings.interval);
        }
        worker
            .cache_tokens
            .store(seen.cache_tokens.unwrap_or(0), Relaxed);
    }
}

fn log_state(state: &LoggedState, worker: &Worker, facts: Option<&Facts>) {
    let address = worker.pool.address();
    match state {
        LoggedState::Up => {
            let facts = facts.into_iter();
            let models = facts.flat_map(|facts| facts.models.keys());
            let models: Vec<&str> = models.map(|model| &**model).collect();
            info!(worker = %worker.name, ?models, "worker is up");
        }
        LoggedState::WithoutModels(reason) => warn!(
            worker = %worker.name,
            address,
            reason,
            "worker is up but lists no models, so it gets no requests"
        ),
        LoggedState::Down => {
            let error = worker.last_probe_error.load();
            let reason = error.as_deref().map_or("unknown", String::as_str);
            warn!(worker = %worker.name, address, reason, "worker is down");
        }
    }
}

fn worker_use(load: &Load) -> WorkerUse {
    WorkerUse {
        total: load.total(),
        is_shared: load.foreign_requests() > 0,
        is_idle: is_idle(load),
    }
}

/// A report that came with KV events since the last probe stays valid.
fn expire_report(worker: &Worker, interval: Duration) {
    if let Some(then) = observe::now().checked_sub(interval / 2) {
        worker.load.expire_report_before(then);
    }
}

/// Whether nothing runs at a worker, as far as this router, the other replicas and the engine's last report say.
fn is_idle(load: &Load) -> bool {
    let is_quiet = |report: LoadReport| report.running == 0 && report.waiting == 0;
    // Of an engine that never reports anything, this router and the others know all there is.
    load.requests() == 0 && load.reported().map_or(!load.has_reported(), is_quiet)
}

/// The engine's load and the size of its cache. SGLang has metrics only if started with `--enable-metrics`.
async fn fetch_load(
    worker: &Worker,
    capabilities: &Capabilities,
    limit: Duration,
) -> Result<EngineMetrics, ProbeError> {
    if capabilities.has_load_page
        && let Ok(page) = get(worker, "/v1/loads?include=core", limit).await
        && let Some(loads) = sglang::loads(&page)
    {
        return Ok(loads);
    }
    let page = get(worker, "/metrics", limit).await?;
    let page = String::from_utf8_lossy(&page);
    if let Some(adapters) = engine::adapters(&page) {
        worker.adapters.set_slots(adapters.slots);
        worker.adapters.on_running(&adapters.running);
    }
    Ok(engine::metrics(&page))
}

/// Asks the bootstrap server with each probe: a restarted engine has other engine ids, and a decode leg with old ids
/// waits for minutes.
async fn update_bootstrap_info(
    worker: &Worker,
    registry: &Registry,
    bootstrap: (Connector, u16),
    limit: Duration,
    log: &mut LogOnce,
) {
    match fetch_bootstrap_info(worker, bootstrap, limit.min(BOOTSTRAP_TIMEOUT)).await {
        Ok(info) => {
            log.reset();
            if worker.bootstrap_info.load().as_deref() != Some(&info) {
                let ranks = info.ranks().len();
                info!(worker = %worker.name, bootstrap = %info.url, ranks, "bootstrap server reported new engine ids");
                registry.set_bootstrap_info(worker.id, Some(info));
            }
        }
        // One failed request does not mean that the engine restarted, so the last info stays.
        Err(error) => {
            worker.bootstrap_failures.fetch_add(1, Relaxed);
            if log.should_log(observe::now(), &error) {
                warn!(worker = %worker.name, error, "bootstrap server does not answer; what it said last counts");
            }
        }
    }
}

async fn fetch_bootstrap_info(
    worker: &Worker,
    (connector, port): (Connector, u16),
    limit: Duration,
) -> Result<BootstrapInfo, String> {
    let (path, parse): (_, fn(&[u8], &str) -> _) = match connector {
        Connector::Sglang => (sglang::ROUTE, BootstrapInfo::of_route),
        Connector::Mooncake | Connector::Nixl | Connector::Moriio => {
            ("/query", BootstrapInfo::parse)
        }
    };
    let bootstrap = worker.bootstrap_url(port);
    let (address, tls) = match bootstrap.strip_prefix("https://") {
        Some(address) => (address, worker.pool.tls().cloned()),
        None => (bootstrap.trim_start_matches("http://"), None),
    };
    // It is not the engine, so it does not get the engine's API key.
    let pool = client::Pool::with_tls(
        address.to_owned(),
        client::Settings {
            max_idle_connections: 0,
            ..client::Settings::default()
        },
        tls,
    );
    let get = pool.get(path, None, MAX_RESPONSE_BYTES);
    match tokio::time::timeout(limit, get).await {
        Err(_) => Err(format!("{bootstrap}: no response within {limit:?}")),
        Ok(Err(error)) => Err(format!("{bootstrap}: {error}")),
        Ok(Ok((status, _))) if !status.is_success() => {
            Err(format!("{bootstrap}{path} answered {status}"))
        }
        Ok(Ok((_, page))) => {
            parse(&page, &bootstrap).ok_or_else(|| format!("{bootstrap}{path} lists no engine ids"))
        }
    }
}

/// Probes one worker once and updates the registry. An error is the reason why the worker is down.
pub async fn once(
    worker: &Worker,
    registry: &Registry,
    limit: Duration,
    bootstrap: BootstrapPort,
) -> Result<(), String> {
    let probe = async {
        health_check::check(worker, None, limit).await?;
        if sleep::ask(worker, limit).await == SleepPage::Asleep {
            return Err(sleep::REASON.to_owned());
        }
        let mut facts = models::fetch(worker, limit).await?;
        models::complete(worker, limit, &mut facts, &Facts::default()).await;
        let (lacks_responses, lacks_messages) = tokio::join!(
            served_api::lacks_responses(worker, &facts, limit),
            served_api::lacks_messages(worker, limit),
        );
        facts.lacks_responses = lacks_responses.unwrap_or_default();
        facts.lacks_messages = lacks_messages.unwrap_or_default();
        if let Ok(seen) = fetch_load(worker, facts.capabilities(), limit).await {
            facts.block_size = seen.block_size.or(facts.block_size);
            facts.prefix_caching = seen.prefix_caching.or(facts.prefix_caching);
        }
        if let Some(bootstrap) = bootstrap.filter(|_| worker.role != Role::Decode) {
            let mut log = LogOnce::default();
            update_bootstrap_info(worker, registry, bootstrap, limit, &mut log).await;
        }
        Ok(facts)
    };
    let probed: Result<Facts, String> = probe.await;
    let facts = probed.inspect_err(|_| registry.set_health(worker.id, Health::Down))?;
    registry.set_facts(worker.id, facts);
    registry.set_health(worker.id, Health::Up);
    Ok(())
}

/// Prompt tokens whose KV blocks the worker received from others since its start, if its metrics have the number.
pub async fn received_tokens(worker: &Worker, limit: Duration) -> Option<u64> {
    let page = get(worker, "/metrics", limit).await.ok()?;
    engine::metrics(&String::from_utf8_lossy(&page)).received_tokens
}

#[cfg(test)]
mod tests;
