//! Probes every worker: `/health`, `/v1/models`, `/version`, `/metrics`, `/kv_event_sources`, and the Mooncake
//! bootstrap server of a prefill worker; of SGLang `/ready`, `/server_info` and `/v1/loads`.

mod engine;
mod get;
mod logged_state;
pub mod lookup;
mod messages_api;
mod models;
mod responses_api;
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
use self::logged_state::LoggedState;
use super::engine::{Capabilities, Engine, READY_PATH};
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
/// Models and version change only with a restart or a new adapter, so not every probe asks for them.
const PROBES_PER_FACTS: u32 = 8;
/// An idle worker is asked for its load with every fifth probe. Its cache changes only with a restart, which health checks
/// and KV events also show.
const PROBES_PER_IDLE_LOAD: u32 = 5;
/// A worker that had requests of other clients is asked with each probe for so long.
const SHARED_FOR: Duration = Duration::from_secs(60);

/// Between the first probes of two workers that joined together: so the first of a thousand workers is known at once, where all
/// of them would be known at the end.
const FIRST_PROBE_SPACING: Duration = Duration::from_millis(1);

/// The default port of bootstrap servers, if the connector needs them, and the connector.
pub type BootstrapPort = Option<(Connector, u16)>;

const NO_MODELS: &str = "/v1/models lists none";

/// Runs one probe task for each worker of the fleet.
pub async fn run(registry: Arc<Registry>, bootstrap: BootstrapPort, tasks: Tasks) {
    let mut changes = registry.changes();
    let mut probes = KeyedTasks::new(tasks);
    loop {
        let snapshot = registry.snapshot().clone();
        let listed: BTreeMap<WorkerId, &Arc<Worker>> = snapshot
            .workers
            .iter()
            .map(|status| (status.worker.id, &status.worker))
            .collect();
        let mut joined = 0;
        probes.set_keys(&listed.keys().copied().collect(), |id| {
            let probe = probe(listed[id].clone(), registry.clone(), bootstrap);
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

async fn probe(worker: Arc<Worker>, registry: Arc<Registry>, bootstrap: BootstrapPort) {
    let mut machine = health::Machine::new(&registry.settings().health);
    let mut facts: Option<Facts> = None;
    let mut started = None;
    // The worker's requests when its load was last asked for.
    let mut asked_at_total = 0;
    // When the worker last had requests of other clients.
    let mut foreign_at = None;
    // The setting with which it was found out whether the worker serves the Responses API.
    let mut asked_for = None;
    // Why a worker that is up has no models.
    let mut no_models = None;
    let mut failures = 0_u32;
    let mut logged = None;
    let mut bootstrap_log = LogOnce::default();
    // Whether the engine has the page that says so.
    let mut may_sleep = false;
    let mut worker = worker;
    for round in 0u32.. {
        let settings = registry.settings().health.clone();
        machine.set(&settings);
        let (limit, interval) = (settings.timeout, settings.interval);
        // As it is listed now: its key may have changed.
        worker = registry.worker(worker.id).unwrap_or(worker);
        let engine = facts.as_ref().map(|facts| facts.engine);
        let probed = check_health(&worker, engine, limit).await;
        if let Err(error) = &probed
            && error.is_local
        {
            // Says nothing about the worker.
            debug!(worker = %worker.name, %error, "no health check for lack of the router's own resources");
            worker.pool.close_idle();
            tokio::time::sleep(interval).await;
            continue;
        }
        let mut error = probed.err().map(|error| error.text);
        let mut is_asleep = false;
        let is_up = machine.health() == Health::Up;
        if error.is_none() && (may_sleep || !is_up || round % PROBES_PER_FACTS == 0) {
            let answer = sleep::is_sleeping(&worker, limit).await;
            may_sleep = answer.is_some();
            is_asleep = answer == Some(true);
            error = is_asleep.then(|| sleep::REASON.to_owned());
        }
        let is_good = error.is_none();
        worker
            .health_failures
            .fetch_add(u64::from(!is_good && !is_asleep), Relaxed);
        let error = error.map(Arc::new);
        worker.last_probe_error.store(error);
        let turned_up = is_good && machine.health() != Health::Up;
        if turned_up || (is_good && (facts.is_none() || round % PROBES_PER_FACTS == 0)) {
            // Before the worker is up: without its models it gets no requests.
            match models::fetch(&worker, limit).await {
                Ok(mut found) => {
                    no_models = found.models.is_empty().then(|| NO_MODELS.to_owned());
                    let before = facts.take().unwrap_or_default();
                    found.block_size = before.block_size;
                    found.prefix_caching = before.prefix_caching;
                    models::complete(&worker, limit, &mut found, &before).await;
                    found.lacks_responses = before.lacks_responses;
                    found.lacks_messages = before.lacks_messages;
                    if turned_up {
                        found.lacks_messages =
                            messages_api::is_lacking(&worker, &found, limit).await;
                    }
                    if turned_up || asked_for != Some(worker.responses) {
                        asked_for = Some(worker.responses);
                        found.lacks_responses =
                            responses_api::is_lacking(&worker, &found, limit).await;
                    }
                    registry.set_facts(worker.id, found.clone());
                    facts = Some(found);
                }
                Err(error) => {
                    debug!(worker = %worker.name, error, "cannot list models");
                    // Models that were listed before stay.
                    no_models = facts.is_none().then_some(error);
                }
            }
        }
        let total = worker.load.total();
        if worker.load.foreign_requests() > 0 {
            foreign_at = Some(observe::now());
        }
        let is_shared = foreign_at.is_some_and(|at| at.elapsed() < SHARED_FOR);
        let may_have_changed =
            turned_up || is_shared || total != asked_at_total || !is_idle(&worker.load);
        if is_good && (may_have_changed || round % PROBES_PER_IDLE_LOAD == 0) {
            asked_at_total = total;
            let engine = facts.as_ref().map(|facts| facts.engine);
            let capabilities = engine.unwrap_or_default().capabilities();
            match fetch_load(&worker, capabilities, limit).await {
                Ok(seen) => {
                    if let (Some(before), Some(now)) = (started, seen.started)
                        && before != now
                    {
                        info!(worker = %worker.name, "engine restarted; its cache is treated as empty");
                        registry.restarted(worker.id);
                    }
                    started = seen.started.or(started);
                    if let Some(facts) = &mut facts
                        && seen.block_size.is_some()
                        && (seen.block_size, seen.prefix_caching)
                            != (facts.block_size, facts.prefix_caching)
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
                            kv_usage: seen.kv_usage,
                        });
                    } else {
                        expire_report(&worker, interval);
                    }
                    worker
                        .cache_tokens
                        .store(seen.cache_tokens.unwrap_or(0), Relaxed);
                }
                Err(_) => expire_report(&worker, interval),
            }
        }
        if !is_good {
            worker.load.expire_report();
        } else if let Some(bootstrap) = bootstrap.filter(|_| worker.role != Role::Decode) {
            // After the check for a restart, which clears the bootstrap info.
            let log = &mut bootstrap_log;
            update_bootstrap_info(&worker, &registry, bootstrap, limit, log).await;
        }
        let changed = if is_asleep {
            machine.on_sleep()
        } else {
            machine.on_probe(is_good)
        };
        if let Some(health) = changed {
            registry.set_health(worker.id, health);
        }
        failures = if is_good {
            0
        } else {
            failures.saturating_add(1)
        };
        let state = match (machine.health(), &no_models) {
            (Health::Up, None) => Some(LoggedState::Up),
            (Health::Up, Some(reason)) => Some(LoggedState::WithoutModels(reason.clone())),
            // A worker that never was up gets no requests from its first failed check on, but it may be starting.
            (Health::Unknown | Health::Down, _) => {
                (is_asleep || failures >= settings.unhealthy_threshold).then_some(LoggedState::Down)
            }
        };
        if let Some(state) = state.filter(|state| logged.as_ref() != Some(state)) {
            state.log(&worker, facts.as_ref());
            logged = Some(state);
        }
        worker.pool.close_expired(observe::now());
        // Jitter, so that a thousand workers are not probed in one burst.
        tokio::time::sleep(interval.mul_f64(0.9 + 0.2 * fastrand::f64())).await;
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

/// One health check. The `/health` of an engine that is not known yet may take longer than the limit.
async fn check_health(
    worker: &Worker,
    engine: Option<Engine>,
    limit: Duration,
) -> Result<(), ProbeError> {
    let path = engine.unwrap_or_default().capabilities().health_path;
    let failed = match get(worker, path, limit).await {
        Ok(_) => return Ok(()),
        Err(error) => error,
    };
    if engine.is_none() && !failed.is_local && failed.is_timeout {
        let ready = get(worker, READY_PATH, limit).await;
        return ready.map(|_| ()).map_err(|_| failed);
    }
    Err(failed)
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
        check_health(worker, None, limit).await?;
        if sleep::is_sleeping(worker, limit).await == Some(true) {
            return Err(sleep::REASON.to_owned());
        }
        let mut facts = models::fetch(worker, limit).await?;
        models::complete(worker, limit, &mut facts, &Facts::default()).await;
        facts.lacks_responses = responses_api::is_lacking(worker, &facts, limit).await;
        facts.lacks_messages = messages_api::is_lacking(worker, &facts, limit).await;
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
