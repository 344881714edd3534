//! Connects the fleet to KV events: starts and stops a subscriber for each rank that publishes events.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tracing::warn;

use crate::config::KvEventsAdvanced;
use crate::fleet::events::{Endpoint, Transport};
use crate::fleet::load::LoadReport;
use crate::fleet::load::ranks::{RankLoad, RankLoads};
use crate::fleet::registry::{CHANGES_APART, Registry};
use crate::fleet::{Snapshot, Worker};
use crate::http::drain::Tasks;
use crate::http::keyed_tasks::KeyedTasks;
use crate::http::tls;
use crate::ids::{Model, WorkerId};
use crate::kv::event;
use crate::kv::grpc::{self, Grpc};
use crate::kv::subscriber::{self, Shared, Subject};
use crate::kv::zmq::{self, Zmq};
use crate::observe;

/// A rank to follow. If any of this changes, its subscriber starts over with an empty tree.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct FollowedRank {
    worker: WorkerId,
    rank: u32,
    is_only_rank: bool,
    model: Model,
    endpoint: Endpoint,
    caches_pages: bool,
}

/// The metrics of all sources.
#[derive(Clone)]
pub(super) struct Metrics {
    pub(super) zmq: zmq::Metrics,
    pub(super) grpc: grpc::Metrics,
}

/// Runs one subscriber for each rank of each worker that publishes KV events.
pub(super) async fn follow(
    fleet: Arc<Registry>,
    shared: Shared,
    settings: KvEventsAdvanced,
    metrics: Metrics,
    tasks: Tasks,
) {
    let mut changes = fleet.changes();
    let mut subscribers = KeyedTasks::new("kv_subscriber", tasks);
    let mut restarts: BTreeMap<WorkerId, watch::Sender<u64>> = BTreeMap::new();
    let mut loads: BTreeMap<WorkerId, Arc<RankLoads>> = BTreeMap::new();
    loop {
        let snapshot = fleet.snapshot().clone();
        let workers: BTreeMap<WorkerId, &Worker> = snapshot
            .workers
            .iter()
            .map(|status| (status.worker.id, &*status.worker))
            .collect();
        restarts.retain(|worker, _| workers.contains_key(worker));
        for status in &snapshot.workers {
            let restart_signal = restarts.entry(status.worker.id).or_default();
            restart_signal.send_if_modified(|known| {
                std::mem::replace(known, status.incarnation) != status.incarnation
            });
        }
        let wanted = wanted(&snapshot);
        loads.retain(|worker, _| restarts.contains_key(worker));
        let mut ranks: BTreeMap<WorkerId, usize> = BTreeMap::new();
        for wanted in &wanted {
            *ranks.entry(wanted.worker).or_default() += 1;
        }
        for status in &snapshot.workers {
            let load = loads.entry(status.worker.id);
            let load = load.or_insert_with(|| RankLoads::new(status.worker.clone()));
            load.set_rank_count(ranks.get(&status.worker.id).copied().unwrap_or(0));
        }
        subscribers.set_keys(&wanted, |wanted| {
            let subject = Subject {
                worker: wanted.worker,
                name: workers
                    .get(&wanted.worker)
                    .map_or_else(|| "".into(), |worker| worker.name.clone()),
                address: workers
                    .get(&wanted.worker)
                    .map_or_else(|| "".into(), |worker| worker.pool.address().into()),
                rank: wanted.rank,
                is_only_rank: wanted.is_only_rank,
                model: wanted.model.clone(),
                caches_pages: wanted.caches_pages,
            };
            let restart_signal = restarts.get(&wanted.worker).map(watch::Sender::subscribe);
            let load = loads.get(&wanted.worker);
            let load = load.map(|ranks| ranks.rank(wanted.rank));
            let tls = workers
                .get(&wanted.worker)
                .and_then(|worker| worker.pool.tls().cloned());
            subscribe(
                wanted.clone(),
                tls,
                subject,
                shared.clone(),
                settings.clone(),
                metrics.clone(),
                restart_signal.zip(load),
            )
        });
        tokio::time::sleep(CHANGES_APART).await;
        tokio::select! {
            changed = changes.changed() => {
                if changed.is_err() {
                    return;
                }
            }
            () = subscribers.restart_due() => {}
        }
    }
}

/// A worker whose model is not known yet is not followed: its blocks would belong to no index.
fn wanted(snapshot: &Snapshot) -> BTreeSet<FollowedRank> {
    let of_worker = |status: &crate::fleet::Status| {
        let (worker, base) = (status.worker.id, status.facts.base.clone());
        let caches_pages = status.facts.capabilities().caches_pages;
        let endpoints = match base {
            Some(_) => status.event_endpoints(),
            None => Vec::new(),
        };
        let model = base.unwrap_or_default();
        let is_only_rank = endpoints.len() == 1;
        let of_rank = move |(rank, endpoint)| FollowedRank {
            worker,
            rank,
            is_only_rank,
            model: model.clone(),
            endpoint,
            caches_pages,
        };
        endpoints.into_iter().map(of_rank)
    };
    snapshot.workers.iter().flat_map(of_worker).collect()
}

async fn subscribe(
    wanted: FollowedRank,
    tls: Option<Arc<tls::Client>>,
    subject: Subject,
    shared: Shared,
    settings: KvEventsAdvanced,
    metrics: Metrics,
    of_worker: Option<(watch::Receiver<u64>, RankLoad)>,
) {
    let Some((restart_signal, load)) = of_worker else {
        // The worker was just removed; this task is about to be stopped.
        return std::future::pending().await;
    };
    match &wanted.endpoint {
        Endpoint::Zmq {
            publisher,
            replay,
            topic,
        } => {
            let replay = replay.as_deref().map(str::parse).transpose();
            match (publisher.parse(), replay) {
                (Ok(endpoint), Ok(replay)) => {
                    let target = zmq::Target {
                        endpoint,
                        topic: topic.clone(),
                        replay,
                    };
                    let source = Zmq::new(target, settings.zmq, metrics.zmq);
                    subscriber::run(source, subject, shared, restart_signal).await;
                }
                (Err(error), _) | (_, Err(error)) => {
                    warn!(worker = %subject.name, %error, "KV events of this worker cannot be used: invalid endpoint; routing predicts its cache instead");
                    // Retrying cannot help; another endpoint starts another task.
                    std::future::pending().await
                }
            }
        }
        Endpoint::Grpc { address, transport } => {
            let source = Grpc::new(address, wanted.rank, settings.grpc, metrics.grpc)
                .with_only_rank(wanted.is_only_rank);
            let source = match (transport, tls) {
                (Transport::Tls, None) => {
                    warn!(worker = %subject.name, "KV events of this worker cannot be used: its endpoint is https:// and its URL is not; routing predicts its cache instead");
                    // Retrying cannot help; another endpoint starts another task.
                    return std::future::pending().await;
                }
                (Transport::Clear, _) => source,
                (Transport::OfWorker | Transport::Tls, tls) => source.with_tls(tls),
            };
            let source = source.with_load(move |load_report| {
                let now = observe::now();
                load.report(now, reported(now, &load_report));
            });
            subscriber::run(source, subject, shared, restart_signal).await;
        }
    }
}

pub(super) fn reported(now: Instant, load: &event::Load) -> LoadReport {
    let age = Duration::from_millis(load.age_ms.into());
    LoadReport {
        at: now.checked_sub(age).unwrap_or(now),
        running: load.running_requests,
        waiting: load.waiting_requests,
        // The transports do not have it.
        deferred: 0,
        kv_usage: load.token_usage,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::fleet::events;
    use crate::fleet::registry::tests::{facts, member, registry};
    use crate::kv::grpc::tests::{Servicer, load_of};
    use crate::kv::indexes::{self, PrefixIndexes};
    use crate::kv::stream;
    use crate::kv::subscriber::StatusBoard;
    use crate::kv::subscriber::joins::{self, Joins};
    use crate::observe::metrics;

    #[tokio::test]
    async fn a_load_report_beside_kv_events_reaches_the_worker() {
        let servicer = Servicer::start(|_| load_of(3)).await;
        let fleet = registry(&[]);
        let mut member = member("a");
        member.events = events::Events::At(vec![Endpoint::Grpc {
            address: servicer.address.to_string(),
            transport: Transport::default(),
        }]);
        fleet.set_members("static", vec![member]);
        let worker = fleet.snapshot().workers[0].worker.clone();
        let mut known = facts(&["m"]);
        known.base = Some("m".into());
        fleet.set_facts(worker.id, known);
        let registry = metrics::Registry::default();
        let shared = Shared {
            indexes: PrefixIndexes::new(indexes::Settings::default(), &registry),
            board: Arc::new(StatusBoard::default()),
            metrics: subscriber::Metrics::new(&registry),
            settings: stream::Settings::default(),
            on_cache_lost: Arc::new(|_| {}),
            joins: Joins::new(&joins::Settings::default(), &registry),
            trees: None,
        };
        let metrics = Metrics {
            zmq: zmq::Metrics::new(&registry),
            grpc: grpc::Metrics::new(&registry),
        };
        let following = follow(
            fleet,
            shared,
            KvEventsAdvanced::default(),
            metrics,
            Tasks::default(),
        );
        let reported = async {
            while worker.load.reported().is_none() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let limit = Duration::from_secs(10);
        tokio::select! {
            () = following => unreachable!("the fleet is there"),
            reported = tokio::time::timeout(limit, reported) => reported.unwrap(),
        }
        assert_eq!(worker.load.reported().unwrap().running, 3);
    }
}
