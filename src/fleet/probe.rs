//! Tasks that ask each worker how it is: `/health`, `/v1/models`, `/metrics`; and where its blocks are fetched.

mod engine;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;
use tracing::{debug, info, warn};

use super::events::{self, Endpoint, Events};
use super::handoff::{self, Peer};
use super::health::{self, Health};
use super::load::Reported;
use super::registry::Registry;
use super::{Facts, Role, Worker};
use crate::http::client;
use crate::http::drain::Tasks;
use crate::http::keyed_tasks::KeyedTasks;
use crate::ids::{Model, WorkerId};
use crate::observe;

/// Answers to a probe are small; `/metrics` of an engine with many models is the longest.
const ANSWER_BYTES_MAX: usize = 4 << 20;
/// A bootstrap server answers at once or is none; what the worker itself is asked must not wait for it.
const BOOTSTRAP_LIMIT: Duration = Duration::from_secs(3);
/// Models and version change only with a restart or a new adapter: every so many probes is enough.
const FACTS_EVERY: u32 = 8;

/// What prefill workers are asked beside, where the connector needs it: the usual port of their bootstrap
/// servers.
pub type BootstrapPort = Option<u16>;

/// Keeps one probing task for each worker of the fleet.
pub async fn run(
    registry: Arc<Registry>,
    settings: health::Settings,
    bootstrap: BootstrapPort,
    tasks: Tasks,
) {
    let mut changes = registry.changes();
    let mut probes = KeyedTasks::new(tasks);
    loop {
        let snapshot = registry.snapshot().clone();
        let listed: BTreeMap<WorkerId, &Arc<Worker>> = snapshot
            .workers
            .iter()
            .map(|status| (status.worker.id, &status.worker))
            .collect();
        probes.set_keys(&listed.keys().copied().collect(), |id| {
            let registry = registry.clone();
            probe(listed[id].clone(), registry, settings.clone(), bootstrap)
        });
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
    settings: health::Settings,
    bootstrap: BootstrapPort,
) {
    let mut machine = health::Machine::new(&settings);
    let limit = settings.timeout;
    let interval = settings.interval;
    let mut facts: Option<Facts> = None;
    let mut started = None;
    let mut unusable = Vec::new();
    for round in 0u32.. {
        let is_good = ask(&worker, "/health", limit).await.is_ok();
        let turned_up = is_good && machine.health() != Health::Up;
        if turned_up || (is_good && (facts.is_none() || round % FACTS_EVERY == 0)) {
            // Before the worker takes requests: a worker whose models are unknown serves nothing.
            match ask_models(&worker, limit).await {
                Ok(mut found) => {
                    found.version = ask_version(&worker, limit).await;
                    let known = facts.take().unwrap_or_default();
                    found.block_size = known.block_size;
                    if worker.events == Events::Auto {
                        let known = known.event_endpoints;
                        found.event_endpoints =
                            ask_events(&worker, limit, known, &mut unusable).await;
                    }
                    registry.set_facts(worker.id, found.clone());
                    facts = Some(found);
                }
                Err(error) => debug!(worker = %worker.name, error, "cannot list models"),
            }
        }
        if is_good {
            match ask(&worker, "/metrics", limit).await {
                Ok(body) => {
                    let seen = engine::metrics(&String::from_utf8_lossy(&body));
                    if let (Some(before), Some(now)) = (started, seen.started)
                        && before != now
                    {
                        info!(worker = %worker.name, "engine was restarted; its cache is empty");
                        registry.restarted(worker.id);
                    }
                    started = seen.started.or(started);
                    if let Some(facts) = &mut facts
                        && seen.block_size.is_some()
                        && seen.block_size != facts.block_size
                    {
                        facts.block_size = seen.block_size;
                        registry.set_facts(worker.id, facts.clone());
                    }
                    worker.load.report(Reported {
                        at: observe::now(),
                        running: seen.running,
                        waiting: seen.waiting,
                        kv_usage: seen.kv_usage,
                    });
                    worker
                        .cache_tokens
                        .store(seen.cache_tokens.unwrap_or(0), Relaxed);
                }
                Err(_) => {
                    // What it told beside its cache events since the last time is as good.
                    if let Some(then) = observe::now().checked_sub(interval / 2) {
                        worker.load.expire_report_before(then);
                    }
                }
            }
            // After a restart was seen: what a process told before is forgotten then.
            if let Some(port) = bootstrap.filter(|_| worker.role != Role::Decode) {
                learn_peer(&worker, &registry, port, limit).await;
            }
        } else {
            worker.load.expire_report();
        }
        match machine.on_probe(is_good) {
            Some(Health::Down) => {
                warn!(worker = %worker.name, address = worker.pool.address(), "worker is down");
                registry.set_health(worker.id, Health::Down);
            }
            Some(health) => {
                let models: Vec<&str> = facts
                    .iter()
                    .flat_map(|facts| facts.models.keys())
                    .map(|model| &**model)
                    .collect();
                info!(worker = %worker.name, ?models, "worker is up");
                registry.set_health(worker.id, health);
            }
            None => {}
        }
        worker.pool.close_expired(observe::now());
        // Jitter, so that a thousand workers are not asked in one burst.
        tokio::time::sleep(interval.mul_f64(0.9 + 0.2 * fastrand::f64())).await;
    }
}

/// One GET with a deadline; anything but 2xx is an error.
async fn ask(worker: &Worker, path: &str, limit: Duration) -> Result<Bytes, String> {
    let get = worker
        .pool
        .get(path, worker.authorization.as_ref(), ANSWER_BYTES_MAX);
    match tokio::time::timeout(limit, get).await {
        Err(_) => Err(format!("no answer to {path} within {limit:?}")),
        Ok(Err(error)) => Err(error.to_string()),
        Ok(Ok((status, _))) if !status.is_success() => Err(format!("{path} answered {status}")),
        Ok(Ok((_, body))) => Ok(body),
    }
}

async fn ask_version(worker: &Worker, limit: Duration) -> Option<String> {
    let page = ask(worker, "/version", limit).await.ok()?;
    engine::version(&page)
}

/// Asks a prefill worker's bootstrap server, with each probe: a process that took another's place has
/// other names, and whoever is sent to with the old ones waits for minutes.
async fn learn_peer(worker: &Worker, registry: &Registry, port: u16, limit: Duration) {
    match ask_peer(worker, port, limit.min(BOOTSTRAP_LIMIT)).await {
        Ok(peer) => {
            if worker.peer.load().as_deref() != Some(&peer) {
                let ranks = peer.ranks().len();
                info!(worker = %worker.name, bootstrap = %peer.bootstrap, ranks, "learnt where its blocks are fetched");
                registry.set_peer(worker.id, Some(peer));
            }
        }
        // An answer that was lost does not make another process of it.
        Err(error) => debug!(worker = %worker.name, error, "its bootstrap server does not answer"),
    }
}

async fn ask_peer(worker: &Worker, port: u16, limit: Duration) -> Result<Peer, String> {
    let bootstrap = handoff::bootstrap(worker, port);
    let address = bootstrap.trim_start_matches("http://").to_owned();
    // It is no engine, and knows no engine's key.
    let pool = client::Pool::new(
        address,
        client::Settings {
            max_idle_connections: 0,
            ..client::Settings::default()
        },
    );
    let get = pool.get("/query", None, ANSWER_BYTES_MAX);
    match tokio::time::timeout(limit, get).await {
        Err(_) => Err(format!("{bootstrap} gave no answer within {limit:?}")),
        Ok(Err(error)) => Err(format!("{bootstrap}: {error}")),
        Ok(Ok((status, _))) if !status.is_success() => {
            Err(format!("{bootstrap}/query answered {status}"))
        }
        Ok(Ok((_, page))) => Peer::read(&page, &bootstrap)
            .ok_or_else(|| format!("{bootstrap}/query names no engine")),
    }
}

/// Asks one worker once, and has the registry know. Says what is wrong with it.
pub async fn once(
    worker: &Worker,
    registry: &Registry,
    limit: Duration,
    bootstrap: BootstrapPort,
) -> Result<(), String> {
    let told = async {
        ask(worker, "/health", limit).await?;
        let mut facts = ask_models(worker, limit).await?;
        facts.version = ask_version(worker, limit).await;
        if let Ok(page) = ask(worker, "/metrics", limit).await {
            facts.block_size = engine::metrics(&String::from_utf8_lossy(&page)).block_size;
        }
        if let Some(port) = bootstrap.filter(|_| worker.role != Role::Decode) {
            learn_peer(worker, registry, port, limit).await;
        }
        Ok(facts)
    };
    let told: Result<Facts, String> = told.await;
    let facts = told.inspect_err(|_| registry.set_health(worker.id, Health::Down))?;
    registry.set_facts(worker.id, facts);
    registry.set_health(worker.id, Health::Up);
    Ok(())
}

/// Prompt tokens, ever, whose blocks a worker got from another. None where it does not say.
pub async fn received_tokens(worker: &Worker, limit: Duration) -> Option<u64> {
    let page = ask(worker, "/metrics", limit).await.ok()?;
    engine::metrics(&String::from_utf8_lossy(&page)).received_tokens
}

async fn ask_models(worker: &Worker, limit: Duration) -> Result<Facts, String> {
    #[derive(Deserialize)]
    struct List {
        data: Vec<Box<RawValue>>,
    }
    #[derive(Deserialize)]
    struct Entry {
        id: String,
        /// The base model's name, in an adapter's entry.
        #[serde(default)]
        parent: Option<String>,
    }
    let body = ask(worker, "/v1/models", limit).await?;
    let list: List =
        serde_json::from_slice(&body).map_err(|error| format!("/v1/models: {error}"))?;
    let mut facts = Facts::default();
    for card in list.data {
        let entry: Entry =
            serde_json::from_str(card.get()).map_err(|error| format!("/v1/models: {error}"))?;
        let model: Model = entry.id.into();
        if entry.parent.is_some() {
            facts.adapters.insert(model.clone());
        } else if facts.base.is_none() {
            facts.base = Some(model.clone());
        }
        facts.models.insert(model, card);
    }
    Ok(facts)
}

/// Where an engine says that it publishes its cache events. `known` where it cannot be asked now: an
/// answer that was lost is no reason to stop listening. `unusable` is what was told of those that cannot
/// be followed: it is told again when it changes.
async fn ask_events(
    worker: &Worker,
    limit: Duration,
    known: BTreeMap<u32, Endpoint>,
    unusable: &mut Vec<String>,
) -> BTreeMap<u32, Endpoint> {
    let told = match ask(worker, "/kv_event_sources", limit).await {
        Ok(page) => events::told(&page),
        // Other engines, and older ones, have no such page.
        Err(error) => Err(error),
    };
    match told {
        Ok((endpoints, now_unusable)) => {
            let before = std::mem::replace(unusable, now_unusable);
            for why in unusable.iter().filter(|why| !before.contains(why)) {
                info!(worker = %worker.name, why, "cache events that cannot be followed");
            }
            endpoints
        }
        Err(error) => {
            debug!(worker = %worker.name, error, "tells no sources of cache events");
            known
        }
    }
}
