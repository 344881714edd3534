//! The start of a replica that has others: what they know is taken over before this one says that it is ready, for as
//! long as `peers.warm_start_timeout` allows.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{info, warn};

use crate::fleet::Snapshot;
use crate::fleet::health::Health;
use crate::fleet::registry::Registry;
use crate::http::supervisor::Supervisor;
use crate::kv::predicted::PredictedIndex;
use crate::kv::subscriber::StatusBoard;
use crate::kv::tree_copies::TreeSource;
use crate::observe;
use crate::observe::metrics::{self, metric_table};
use crate::peers::give_trees::TreeGiver;
use crate::peers::take_trees::TreeTaker;
use crate::peers::warm_start::{Progress, WarmStartStatus, Warmth};
use crate::peers::{self, Peers, TreeMetrics};

/// How often it is looked how far the start has come.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

metric_table! {
    /// The metrics of the start.
    #[derive(Clone, Debug)]
    struct Metrics {
        state: gauges "warmroute_warm_start_state" ["state"]
            "1 for how this router started: alone (no other replicas), warming (not ready yet), warm (knows what other replicas \
             know), none_ready, sources_lost or timed_out (serves cold).",
        seconds: real_gauges "warmroute_warm_start_seconds" []
            "Time until this router knew what other replicas know, or waited no longer for it.",
    }
}

impl Metrics {
    fn set(&self, warmth: Warmth) {
        for other in Warmth::ALL {
            let gauge = self.state.with_label_values(&[other.as_str()]);
            gauge.set(i64::from(other == warmth));
        }
    }
}

/// What the start takes over, and from whom.
#[derive(Clone, Debug)]
pub(super) struct Start {
    fleet: Arc<Registry>,
    board: Arc<StatusBoard>,
    predicted: Arc<PredictedIndex>,
    peers: Peers,
    taker: TreeTaker,
    pub(super) status: Arc<WarmStartStatus>,
    metrics: Metrics,
    timeout: Duration,
}

impl Start {
    /// With other replicas, the router is not ready from now on until [`Start::run`] has ended.
    pub(super) fn new(
        settings: &peers::Settings,
        peers: &Peers,
        fleet: &Arc<Registry>,
        board: &Arc<StatusBoard>,
        predicted: &Arc<PredictedIndex>,
        registry: &metrics::Registry,
    ) -> Self {
        let trees = TreeMetrics::new(registry);
        let giver = TreeGiver::new(
            fleet.clone(),
            board.clone(),
            predicted.clone(),
            trees.clone(),
        );
        peers.serve_trees(giver.handler());
        let timeout = settings.warm_start_timeout;
        let start = Self {
            fleet: fleet.clone(),
            board: board.clone(),
            predicted: predicted.clone(),
            peers: peers.clone(),
            taker: TreeTaker::new(peers.clone(), timeout, trees),
            status: Arc::default(),
            metrics: Metrics::new(registry),
            timeout,
        };
        start.set(if peers.is_on() {
            Warmth::Warming
        } else {
            Warmth::Alone
        });
        start
    }

    /// Where subscribers get other replicas' trees.
    pub(super) fn trees(&self) -> Option<Arc<dyn TreeSource>> {
        let taker = || Arc::new(self.taker.clone()) as Arc<dyn TreeSource>;
        self.peers.is_on().then(taker)
    }

    fn set(&self, warmth: Warmth) {
        self.status.set(warmth);
        self.metrics.set(warmth);
    }

    /// Runs until the start has ended, and then until the predicted blocks have come.
    pub(super) async fn run(self, supervisor: Supervisor) {
        if !self.peers.is_on() {
            return;
        }
        let began = observe::now();
        let mut progress = Progress::default();
        // After a panic the start goes on without: what another replica sends must not end each one that starts beside it.
        let mut predicted = pin!(supervisor.attempt("warm_start", self.take_predicted()));
        loop {
            tokio::select! {
                _ = &mut predicted, if !progress.has_predicted => progress.has_predicted = true,
                () = tokio::time::sleep(LOOK_INTERVAL) => {}
            }
            self.look(&mut progress);
            let is_late = observe::now() >= began + self.timeout;
            if let Some(warmth) = progress.end(is_late) {
                self.on_end(began, warmth, &progress);
                break;
            }
        }
        if !progress.has_predicted {
            predicted.await;
        }
    }

    async fn take_predicted(&self) {
        let mut changes = self.fleet.changes();
        while !is_known(&self.fleet.snapshot()) {
            if changes.changed().await.is_err() {
                return;
            }
        }
        let fleet = self.fleet.snapshot().clone();
        self.taker.take_predicted(&fleet, &self.predicted).await;
    }

    fn look(&self, progress: &mut Progress) {
        let sources = self.peers.tree_sources();
        let has_ready = !sources.ready.is_empty();
        progress.has_peers = has_ready || sources.may_grow;
        progress.had_ready_peer |= has_ready;
        let fleet = self.fleet.snapshot();
        progress.is_fleet_known = is_known(&fleet);
        // An engine that is down may be gone for good, so nothing of it is waited for.
        let down = fleet.workers.iter();
        let down = down.filter(|status| status.health == Health::Down);
        let down: BTreeSet<_> = down.map(|status| status.worker.id).collect();
        let followed = fleet.workers.iter();
        let followed =
            followed.filter(|status| status.health != Health::Down && status.facts.base.is_some());
        let expected: usize = followed.map(|status| status.event_endpoints().len()).sum();
        let (ranks, settled) = self.board.settled(|worker| !down.contains(&worker));
        // A rank that was just found has no subscriber yet.
        progress.ranks = ranks.max(expected);
        progress.settled_ranks = settled;
        progress.are_sources_lost = self.taker.are_sources_lost();
    }

    fn on_end(&self, began: Instant, warmth: Warmth, progress: &Progress) {
        let took = observe::now().saturating_duration_since(began);
        let seconds = self.metrics.seconds.with_label_values::<&str>(&[]);
        seconds.set(took.as_secs_f64());
        self.set(warmth);
        let Progress {
            ranks,
            settled_ranks,
            ..
        } = *progress;
        if matches!(warmth, Warmth::SourcesLost | Warmth::TimedOut) {
            warn!(?took, ranks, settled_ranks, "serving cold: {warmth}");
        } else {
            info!(?took, ranks, state = warmth.as_str(), "start: {warmth}");
        }
    }
}

/// Whether every worker was asked what it serves.
fn is_known(fleet: &Snapshot) -> bool {
    !fleet.workers.is_empty() && !fleet.has_unprobed_workers()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::events::{Endpoint, Events};
    use crate::fleet::registry::tests::{facts, member, registry};
    use crate::fleet::{Facts, Member};
    use crate::kv::predicted;

    #[test]
    fn a_start_waits_for_no_rank_of_a_worker_that_is_down() {
        let metrics = metrics::Registry::default();
        let fleet = registry(&[]);
        let endpoint = Endpoint::Zmq {
            publisher: "tcp://*:5557".to_owned(),
            replay: None,
            topic: String::new(),
        };
        let members = [("a", 2), ("b", 3)].map(|(name, ranks)| Member {
            events: Events::At(vec![endpoint.clone(); ranks]),
            ..member(name)
        });
        fleet.set_members("static", members.into());
        let predicted = PredictedIndex::new(
            predicted::Settings::default(),
            predicted::Metrics::new(&metrics),
            observe::now(),
        );
        let start = Start::new(
            &peers::Settings::default(),
            &Peers::off(&metrics),
            &fleet,
            &Arc::default(),
            &Arc::new(predicted),
            &metrics,
        );
        let found = || {
            let mut progress = Progress::default();
            start.look(&mut progress);
            (progress.is_fleet_known, progress.ranks)
        };
        assert_eq!(found(), (false, 0));
        let workers: Vec<_> = fleet.snapshot().workers.clone();
        for status in &workers {
            let known = Facts {
                base: Some("m".into()),
                ..facts(&["m"])
            };
            fleet.set_facts(status.worker.id, known);
            fleet.set_health(status.worker.id, Health::Up);
        }
        assert_eq!(found(), (true, 5));
        let other = workers.iter().find(|status| &*status.worker.name == "b");
        let other = other.unwrap().worker.id;
        // Its ranks have subscribers, more than the other worker has ranks.
        let ranks = (0..3).map(|rank| start.board.begin_rank(other, rank));
        let _followed: Vec<_> = ranks.collect();
        assert_eq!(found(), (true, 5));
        fleet.set_health(other, Health::Down);
        assert_eq!(found(), (true, 2));
    }
}
