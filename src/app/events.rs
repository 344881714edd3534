//! Joins fleet and cache knowledge: whose events are followed, from where, and for how long.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::sync::Arc;

use tokio::sync::watch;
use tracing::warn;

use crate::config::Events;
use crate::fleet::Snapshot;
use crate::fleet::events::Endpoint;
use crate::fleet::registry::Registry;
use crate::http::drain::Tasks;
use crate::http::drain::keyed::Keyed;
use crate::ids::Model;
use crate::ids::WorkerId;
use crate::kv::grpc::Grpc;
use crate::kv::subscriber;
use crate::kv::subscriber::Shared;
use crate::kv::subscriber::Subject;
use crate::kv::zmq;
use crate::kv::zmq::Zmq;

/// One subscriber. When any of this changes, it starts over with an empty tree.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Wanted {
    worker: WorkerId,
    rank: u32,
    model: Model,
    endpoint: Endpoint,
}

/// Keeps one subscriber for each rank of each worker that tells its events.
pub(super) async fn follow(
    fleet: Arc<Registry>,
    shared: Shared,
    settings: Events,
    zmq: zmq::Metrics,
    tasks: Tasks,
) {
    let mut changes = fleet.changes();
    let mut subscribers = Keyed::new(tasks);
    let mut lives: BTreeMap<WorkerId, watch::Sender<u64>> = BTreeMap::new();
    loop {
        let snapshot = fleet.snapshot().clone();
        lives.retain(|worker, _| snapshot.workers.iter().any(|at| at.worker.id == *worker));
        for status in &snapshot.workers {
            let life = lives.entry(status.worker.id).or_default();
            life.send_if_modified(|known| std::mem::replace(known, status.life) != status.life);
        }
        let wanted = wanted(&snapshot);
        subscribers.keep(&wanted, |wanted| {
            let name = snapshot.workers.iter();
            let mut name = name.filter(|status| status.worker.id == wanted.worker);
            let subject = Subject {
                worker: wanted.worker,
                name: name
                    .next()
                    .map_or_else(|| "".into(), |at| at.worker.name.clone()),
                rank: wanted.rank,
                model: wanted.model.clone(),
            };
            let life = lives.get(&wanted.worker).map(watch::Sender::subscribe);
            subscribe(
                wanted.clone(),
                subject,
                shared.clone(),
                settings.clone(),
                zmq.clone(),
                life,
            )
        });
        if changes.changed().await.is_err() {
            return;
        }
    }
}

/// A worker whose models are not known yet is not followed: its blocks would belong to nothing.
fn wanted(snapshot: &Snapshot) -> BTreeSet<Wanted> {
    let of_worker = |status: &crate::fleet::Status| {
        let (worker, base) = (status.worker.id, status.facts.base.clone());
        let endpoints = match base {
            Some(_) => status.event_endpoints(),
            None => Vec::new(),
        };
        let model = base.unwrap_or_default();
        let of_rank = move |(rank, endpoint)| Wanted {
            worker,
            rank,
            model: model.clone(),
            endpoint,
        };
        endpoints.into_iter().map(of_rank)
    };
    snapshot.workers.iter().flat_map(of_worker).collect()
}

async fn subscribe(
    wanted: Wanted,
    subject: Subject,
    shared: Shared,
    settings: Events,
    zmq: zmq::Metrics,
    life: Option<watch::Receiver<u64>>,
) {
    let Some(life) = life else {
        return;
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
                    let source = Zmq::new(target, settings.zmq, zmq);
                    subscriber::run(source, subject, shared, life).await;
                }
                (Err(error), _) | (_, Err(error)) => {
                    warn!(worker = %subject.name, %error, "cache events cannot be followed");
                }
            }
        }
        Endpoint::Grpc { address } => {
            let source = Grpc::new(address, wanted.rank, settings.grpc);
            subscriber::run(source, subject, shared, life).await;
        }
    }
}
