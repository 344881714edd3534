//! Trees and predicted blocks that are given over real sockets: to those who leave, of an engine that this replica has
//! lost, and of single ranks.

use tokio::sync::{mpsc, watch};

use super::*;
use crate::fleet::Member;
use crate::fleet::events::{Endpoint, Events};
use crate::fleet::registry::tests::{member, registry};
use crate::kv::event::{Batch, EngineHash, Event, Stored};
use crate::kv::indexes::{self, PrefixIndexes};
use crate::kv::source::{Source, SourceBatch, SourceEvent};
use crate::kv::subscriber::joins::{self, Joins};
use crate::kv::subscriber::{self, Shared, Subject};
use crate::kv::{predicted, stream, text_block};
use crate::observe::metrics;
use crate::peers::handle::tests::{Replica, eventually, replica};
use crate::peers::take_trees::TreeTaker;
use crate::peers::wire::TreeChunk;

fn index(metrics: &metrics::Registry) -> PredictedIndex {
    let metrics = predicted::Metrics::new(metrics);
    PredictedIndex::new(predicted::Settings::default(), metrics, observe::now())
}

fn giver(max_stale: Duration) -> TreeGiver {
    let metrics = metrics::Registry::default();
    let predicted = index(&metrics);
    let trees = TreeMetrics::new(&metrics);
    let giver = TreeGiver::new(registry(&["a"]), Arc::default(), Arc::new(predicted), trees);
    TreeGiver { max_stale, ..giver }
}

fn worker(giver: &TreeGiver) -> Arc<Worker> {
    giver.fleet.snapshot().workers[0].worker.clone()
}

/// The replica that gives, the one that asks, and a stream between them.
async fn served(giver: &TreeGiver) -> (Replica, Replica, Link) {
    let (giving, asking) = (replica(&[]).await, replica(&[]).await);
    giving.peers.serve_trees(giver.clone().handler());
    let calling = asking.peers.call_for_trees(&giving.address);
    let link = calling.await.unwrap();
    (giving, asking, link)
}

/// The events of an engine that a test plays.
struct Script(mpsc::UnboundedReceiver<SourceEvent>);

impl Source for Script {
    async fn next(&mut self) -> SourceEvent {
        match self.0.recv().await {
            Some(event) => event,
            None => std::future::pending().await,
        }
    }

    fn replay(&mut self, _first: u64) {}

    fn can_replay(&self) -> bool {
        true
    }
}

/// Follows the engine for the giver.
async fn follow(giver: &TreeGiver, events: mpsc::UnboundedReceiver<SourceEvent>) {
    let (metrics, worker) = (metrics::Registry::default(), worker(giver));
    let subject = Subject {
        worker: worker.id,
        name: "a".into(),
        address: worker.pool.address().into(),
        rank: 0,
        is_only_rank: true,
        model: "m".into(),
        caches_pages: false,
    };
    let shared = Shared {
        indexes: PrefixIndexes::new(indexes::Settings::default(), &metrics),
        board: giver.board.clone(),
        metrics: subscriber::Metrics::new(&metrics),
        settings: stream::Settings::default(),
        on_cache_lost: Arc::new(|_| {}),
        joins: Joins::new(&joins::Settings::default(), &metrics),
        trees: None,
    };
    let (_restart, restarts) = watch::channel(0);
    subscriber::run(Script(events), subject, shared, restarts).await;
}

/// A connection on which the engine replays the only batch that it has published.
fn connection() -> [SourceEvent; 3] {
    let stored = Stored {
        hashes: vec![EngineHash(100)],
        token_ids: (0..4).collect(),
        block_size: 4,
        ..Stored::default()
    };
    let batch = SourceBatch {
        sequence: 0,
        digest: 7,
        bytes: 100,
        batch: Ok(Batch {
            events: vec![Event::Stored(stored)],
            ..Batch::default()
        }),
        snapshot: None,
    };
    [
        SourceEvent::Connected { incarnation: None },
        SourceEvent::Replayed(batch),
        SourceEvent::ReplayEnd,
    ]
}

/// Has the giver follow the engine and lose it.
async fn lose_engine(giver: &TreeGiver, say: &mpsc::UnboundedSender<SourceEvent>) {
    for event in connection() {
        say.send(event).unwrap();
    }
    let reason = "closed".to_owned();
    say.send(SourceEvent::Disconnected { reason }).unwrap();
    let worker = worker(giver).id;
    eventually("the engine is lost", || {
        giver.board.stale_since(worker, 0).is_some()
    })
    .await;
}

async fn ask(giver: &TreeGiver, link: &Link) {
    let request = TreeRequest {
        worker: worker(giver).pool.address().to_owned(),
        rank: 0,
        model: "m".to_owned(),
    };
    link.send(framed(Kind::TreeRequest(request))).await.unwrap();
}

async fn answer(link: &mut Link) -> TreeChunk {
    match link.receive().await {
        Ok(Some((Some(Kind::TreeChunk(chunk)), _))) => chunk,
        other => panic!("no chunk: {other:?}"),
    }
}

#[tokio::test]
async fn a_replica_that_leaves_before_its_turn_is_not_waited_for() {
    let giver = giver(MAX_STALE);
    let _turn = giver.turn.acquire().await.unwrap();
    let (_giving, _asking, link) = served(&giver).await;
    ask(&giver, &link).await;
    // What was sent arrives before the end.
    let (outgoing, _receiving) = link.split();
    drop(outgoing);
    let failed = giver.metrics.given.with_label_values(&["failed"]);
    eventually("it is noticed", || failed.get() == 1).await;
}

#[tokio::test]
async fn a_tree_that_this_replica_verifies_soon_is_given_then() {
    let giver = giver(Duration::from_secs(600));
    let (say, events) = mpsc::unbounded_channel();
    let test = async {
        lose_engine(&giver, &say).await;
        let (_giving, _asking, mut link) = served(&giver).await;
        ask(&giver, &link).await;
        let early = timeout(Duration::from_millis(100), link.receive()).await;
        assert!(early.is_err(), "it does not count yet");
        for event in connection() {
            say.send(event).unwrap();
        }
        let chunk = answer(&mut link).await;
        assert_eq!((&*chunk.refusal, &*chunk.names), ("", &[100][..]));
        assert_eq!(giver.board.stale_since(worker(&giver).id, 0), None);
    };
    tokio::select! {
        () = follow(&giver, events) => unreachable!("it never ends"),
        () = test => {}
    }
}

#[tokio::test]
async fn a_tree_that_is_not_verified_in_time_is_refused_as_cold() {
    let max_stale = Duration::from_millis(50);
    let giver = giver(max_stale);
    let (say, events) = mpsc::unbounded_channel();
    let test = async {
        // Connected first, so that the request comes before the time is over.
        let (_giving, _asking, mut link) = served(&giver).await;
        lose_engine(&giver, &say).await;
        let since = giver.board.stale_since(worker(&giver).id, 0).unwrap();
        ask(&giver, &link).await;
        assert_eq!(answer(&mut link).await.refusal, "cold");
        assert!(observe::now() >= since + max_stale, "it was waited for");
    };
    tokio::select! {
        () = follow(&giver, events) => unreachable!("it never ends"),
        () = test => {}
    }
}

/// A worker with so many dp ranks.
fn ranked(ranks: usize) -> Member {
    let endpoint = Endpoint::Zmq {
        publisher: "tcp://a.test:5557".to_owned(),
        replay: None,
        topic: String::new(),
    };
    Member {
        events: Events::At(vec![endpoint; ranks]),
        ..member("a")
    }
}

#[tokio::test]
async fn what_is_predicted_of_a_rank_counts_for_that_rank_where_it_is_taken() {
    let giver = giver(MAX_STALE);
    giver.fleet.set_members("static", vec![ranked(2)]);
    let root = text_block::chain_root("m", None);
    let prompt = text_block::chain(root, [(1, 10), (2, 10)].into_iter());
    let (now, own) = (observe::now(), worker(&giver).id);
    giver.predicted.record(now, own, 0, &prompt[..1]);
    let rank = own.at_rank(1).unwrap();
    giver.predicted.record(now, rank, 0, &prompt);
    let giving = replica(&[]).await;
    giving.peers.set_ready(true);
    giving.peers.serve_trees(giver.handler());
    let late = replica(&[&giving]).await;
    eventually("the giver is ready", || {
        !late.peers.tree_sources().ready.is_empty()
    })
    .await;
    let trees = TreeMetrics::new(&metrics::Registry::default());
    let taker = TreeTaker::new(late.peers.clone(), Duration::from_secs(10), trees);
    // A rank that the taker's worker has not is left out.
    for (ranks, expected) in [(2, [1, 0, 2]), (1, [1, 0, 0])] {
        let fleet = registry(&["b"]);
        fleet.set_members("static", vec![member("b"), ranked(ranks)]);
        let snapshot = fleet.snapshot().clone();
        let predicted = index(&metrics::Registry::default());
        let source = taker.take_predicted(&snapshot, &predicted).await;
        assert!(source.is_some());
        let mut workers = snapshot.workers.iter().map(|status| &status.worker);
        let worker = workers.find(|worker| *worker.name == *"a").unwrap();
        let owners = [None, Some(0), Some(1)].map(|rank| worker.id.cache_owner(rank));
        let known = owners.map(|owner| predicted.depth(owner, &prompt));
        assert_eq!(known, expected, "{ranks} ranks");
    }
}
