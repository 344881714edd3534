//! Follows the load that engines publish (SGLang's `--load-publish-endpoint`): each change at once, beside what the probes read.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use prometheus::IntCounterVec;
use tracing::warn;

use super::events::reported;
use crate::fleet::Worker;
use crate::fleet::events::Endpoint;
use crate::fleet::load::ranks::{RankLoad, RankLoads};
use crate::fleet::registry::{CHANGES_APART, Registry};
use crate::http::drain::Tasks;
use crate::http::keyed_tasks::KeyedTasks;
use crate::ids::WorkerId;
use crate::kv::zmq;
use crate::observe;
use crate::observe::log_once::LogOnce;
use crate::observe::metrics::remove_series;

/// A rank whose load is followed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct LoadSocket {
    worker: WorkerId,
    rank: u32,
    endpoint: Endpoint,
}

pub(super) fn failures(registry: &observe::metrics::Registry) -> IntCounterVec {
    registry.counters(
        "warmroute_load_stream_failures_total",
        "Attempts to receive the load that a worker publishes which failed, and reports that could not be read. Its load is asked \
         for instead.",
        &["worker"],
    )
}

/// Runs one subscription for each rank that publishes its load.
pub(super) async fn follow(
    fleet: Arc<Registry>,
    settings: zmq::Settings,
    failures: IntCounterVec,
    tasks: Tasks,
) {
    let mut changes = fleet.changes();
    let mut running = KeyedTasks::new("load_subscription", tasks);
    let mut loads: BTreeMap<WorkerId, Arc<RankLoads>> = BTreeMap::new();
    loop {
        let snapshot = fleet.snapshot().clone();
        let mut wanted = BTreeSet::new();
        let mut workers: BTreeMap<WorkerId, &Arc<Worker>> = BTreeMap::new();
        for status in &snapshot.workers {
            let worker = status.worker.id;
            let endpoints = status.load_endpoints();
            if endpoints.is_empty() {
                continue;
            }
            workers.insert(worker, &status.worker);
            let load = loads.entry(worker);
            load.or_insert_with(|| RankLoads::new(status.worker.clone()))
                .set_rank_count(endpoints.len());
            let socket = |(rank, endpoint)| LoadSocket {
                worker,
                rank,
                endpoint,
            };
            wanted.extend(endpoints.into_iter().map(socket));
        }
        loads.retain(|worker, _| workers.contains_key(worker));
        running.set_keys(&wanted, |wanted| {
            let name = workers
                .get(&wanted.worker)
                .map(|worker| worker.name.clone());
            let load = loads.get(&wanted.worker);
            let load = load.map(|ranks| ranks.rank(wanted.rank));
            let (endpoint, settings) = (wanted.endpoint.clone(), settings.clone());
            subscribe(name, endpoint, settings, failures.clone(), load)
        });
        let names: BTreeSet<&str> = workers.values().map(|worker| &*worker.name).collect();
        remove_series(&failures, "worker", |worker| !names.contains(worker));
        tokio::time::sleep(CHANGES_APART).await;
        tokio::select! {
            changed = changes.changed() => {
                if changed.is_err() {
                    return;
                }
            }
            () = running.restart_due() => {}
        }
    }
}

async fn subscribe(
    name: Option<Arc<str>>,
    endpoint: Endpoint,
    settings: zmq::Settings,
    failures: IntCounterVec,
    load: Option<RankLoad>,
) {
    let (Some(name), Some(load)) = (name, load) else {
        // The worker was just removed; this task is about to be stopped.
        return std::future::pending().await;
    };
    let target = match &endpoint {
        Endpoint::Zmq {
            publisher, topic, ..
        } => publisher.parse().map(|endpoint| (endpoint, topic)),
        Endpoint::Grpc { .. } => Err("engines publish their load over ZeroMQ only".to_owned()),
    };
    let (endpoint, topic) = match target {
        Ok(target) => target,
        Err(error) => {
            warn!(worker = %name, error, "the load that this worker publishes cannot be read; it is asked for it");
            // Another endpoint starts another task.
            return std::future::pending().await;
        }
    };
    let mut socket = zmq::LoadSocket::new(endpoint, topic, settings);
    let mut log = LogOnce::default();
    loop {
        match socket.next().await {
            Ok(stat) => {
                log.reset();
                let now = observe::now();
                load.report(now, reported(now, &stat));
            }
            Err(error) => {
                failures.with_label_values(&[&*name]).inc();
                if log.should_log(observe::now(), &error) {
                    warn!(worker = %name, error, "the load that this worker publishes is not received; it is asked for it");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;
    use zeromq::{PubSocket, Socket, SocketSend, ZmqMessage};

    use super::*;
    use crate::fleet::registry::tests::{facts, member, registry};

    async fn publish(socket: &mut PubSocket, running: u8) {
        let payload = [b"\x95\xa8LoadStat".as_slice(), &[running, 1, 1, 4]].concat();
        let frames = ["load".into(), vec![0; 8].into(), Bytes::from(payload)];
        let message = ZmqMessage::try_from(frames.to_vec()).unwrap();
        socket.send(message).await.unwrap();
    }

    #[tokio::test]
    async fn the_sum_of_what_the_ranks_publish_is_the_workers_load() {
        let mut sockets = Vec::new();
        let fleet = registry(&[]);
        fleet.set_members("static", vec![member("a")]);
        let worker = fleet.snapshot().workers[0].worker.clone();
        let mut known = facts(&["m"]);
        for rank in 0..2 {
            let mut socket = PubSocket::new();
            let bound = socket.bind("tcp://127.0.0.1:0").await.unwrap();
            let endpoint = Endpoint::Zmq {
                publisher: bound.to_string(),
                replay: None,
                topic: "load".to_owned(),
            };
            known.load_endpoints.insert(rank, endpoint);
            sockets.push(socket);
        }
        fleet.set_facts(worker.id, known);
        let failures = failures(&observe::metrics::Registry::default());
        let settings = zmq::Settings::default();
        let following = follow(fleet, settings, failures, Tasks::default());
        let reported = async {
            for _ in 0..3_000 {
                for (socket, running) in sockets.iter_mut().zip([2, 3]) {
                    publish(socket, running).await;
                }
                if let Some(load) = worker.load.reported() {
                    return load;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            panic!("nothing was received");
        };
        tokio::select! {
            () = following => unreachable!("the fleet is there"),
            load = reported => assert_eq!((load.running, load.waiting, load.kv_usage), (5, 2, 0.25)),
        }
    }

    #[tokio::test]
    async fn the_failures_of_workers_that_left_are_removed() {
        let fleet = registry(&["a"]);
        let worker = fleet.snapshot().workers[0].worker.id;
        let mut known = facts(&["m"]);
        let endpoint = Endpoint::Zmq {
            publisher: "tcp://127.0.0.1:1".to_owned(),
            replay: None,
            topic: "load".to_owned(),
        };
        known.load_endpoints.insert(0, endpoint);
        fleet.set_facts(worker, known);
        let counts = observe::metrics::Registry::default();
        let failures = failures(&counts);
        for name in ["a", "gone"] {
            failures.with_label_values(&[name]).inc();
        }
        let settings = zmq::Settings::default();
        let following = follow(fleet.clone(), settings, failures, Tasks::default());
        let is_shown = |name: &str| counts.text().contains(&format!("worker=\"{name}\""));
        let removed = async |name: &str| {
            for _ in 0..3_000 {
                if !is_shown(name) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            panic!("the failures of {name} are still shown");
        };
        let both_leave = async {
            removed("gone").await;
            assert!(is_shown("a"));
            fleet.set_members("static", Vec::new());
            removed("a").await;
        };
        tokio::select! {
            () = following => unreachable!("the fleet is there"),
            () = both_leave => {}
        }
    }
}
