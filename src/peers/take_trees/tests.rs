//! Trees of other replicas over real sockets, some of which are lost in the middle.

use super::*;
use crate::http::grpc;
use crate::observe::metrics::Registry;
use crate::peers::handle::tests::{Replica, eventually, replica};
use crate::peers::link::TreeHandler;
use crate::peers::tree_wire::{chunks, tests::copy};

/// A replica that sends as many chunks of a tree as `cut` leaves of them, and closes the stream.
async fn giving(cut: fn(Vec<TreeChunk>) -> Vec<TreeChunk>) -> Replica {
    let giver = replica(&[]).await;
    giver.peers.set_ready(true);
    giver.peers.serve_trees(TreeHandler::new(move |mut link| {
        Box::pin(async move {
            while let Ok(Some(_)) = link.receive().await {
                let all = chunks(&copy(&[(16, true, 0); 3_000]));
                assert!(all.len() > 1);
                let sent = cut(all);
                let is_whole = sent.last().is_some_and(|chunk| chunk.is_last);
                for chunk in sent {
                    let _ = link.send(framed(Kind::TreeChunk(chunk))).await;
                }
                if !is_whole {
                    return;
                }
            }
        })
    }));
    giver
}

/// A replica that gives one tree a stream, and closes the stream when it is asked for another one.
async fn giving_one_a_stream() -> Replica {
    let giver = replica(&[]).await;
    giver.peers.set_ready(true);
    giver.peers.serve_trees(TreeHandler::new(|mut link| {
        Box::pin(async move {
            let _ = link.receive().await;
            for chunk in chunks(&copy(&[(16, true, 0); 3_000])) {
                let _ = link.send(framed(Kind::TreeChunk(chunk))).await;
            }
            let _ = link.receive().await;
        })
    }));
    giver
}

/// A replica that closes the first stream in the middle of a tree.
async fn giving_at_the_second_time() -> Replica {
    let giver = replica(&[]).await;
    giver.peers.set_ready(true);
    let has_begun = Arc::new(AtomicBool::new(false));
    giver.peers.serve_trees(TreeHandler::new(move |mut link| {
        let is_first = !has_begun.swap(true, Relaxed);
        Box::pin(async move {
            while let Ok(Some(_)) = link.receive().await {
                let all = chunks(&copy(&[(16, true, 0); 3_000]));
                let sent = if is_first { first_chunk(all) } else { all };
                for chunk in sent {
                    let _ = link.send(framed(Kind::TreeChunk(chunk))).await;
                }
                if is_first {
                    return;
                }
            }
        })
    }));
    giver
}

/// A replica that answers nothing, and how many streams were opened to it.
async fn silent() -> (Replica, Arc<AtomicUsize>) {
    let giver = replica(&[]).await;
    giver.peers.set_ready(true);
    let streams = Arc::new(AtomicUsize::new(0));
    let opened = streams.clone();
    giver.peers.serve_trees(TreeHandler::new(move |mut link| {
        opened.fetch_add(1, Relaxed);
        Box::pin(async move { while let Ok(Some(_)) = link.receive().await {} })
    }));
    (giver, streams)
}

/// A replica that sends `count` chunks of a tree and then bytes that are no message, and how many streams were opened
/// to it.
async fn malformed_after(count: usize) -> (Replica, Arc<AtomicUsize>) {
    let giver = replica(&[]).await;
    giver.peers.set_ready(true);
    let streams = Arc::new(AtomicUsize::new(0));
    let opened = streams.clone();
    giver.peers.serve_trees(TreeHandler::new(move |mut link| {
        opened.fetch_add(1, Relaxed);
        Box::pin(async move {
            while let Ok(Some(_)) = link.receive().await {
                let all = chunks(&copy(&[(16, true, 0); 3_000]));
                for chunk in all.into_iter().take(count) {
                    let _ = link.send(framed(Kind::TreeChunk(chunk))).await;
                }
                let _ = link.send(grpc::frame(&[0xff; 3])).await;
            }
        })
    }));
    (giver, streams)
}

fn first_chunk(mut all: Vec<TreeChunk>) -> Vec<TreeChunk> {
    all.truncate(1);
    all
}

fn wanted() -> WantedTree {
    WantedTree {
        worker: "a".into(),
        address: "a.test:8000".into(),
        rank: 0,
        model: "m".into(),
        shape: None,
        known_blocks: 0,
        refused: Vec::new(),
    }
}

async fn taker(sources: &[&Replica]) -> (TreeTaker, Replica) {
    let late = replica(sources).await;
    eventually("the sources are ready", || {
        late.peers.tree_sources().ready.len() == sources.len()
    })
    .await;
    let metrics = TreeMetrics::new(&Registry::default());
    let mut taker = TreeTaker::new(late.peers.clone(), Duration::from_secs(10), metrics);
    // However busy the machine is.
    Arc::get_mut(&mut taker.0).unwrap().ask_again_within = Duration::from_secs(3_600);
    (taker, late)
}

/// Opens a stream to a replica, which the next tree uses.
async fn keep_stream(taker: &TreeTaker, late: &Replica, giver: &Replica) {
    let source: Arc<str> = giver.address.as_str().into();
    let link = late.peers.call_for_trees(&source).await.unwrap();
    *taker.slot(&source).link.lock() = Some(link);
}

fn lost(taker: &TreeTaker) -> u64 {
    let taken = &taker.0.metrics.taken;
    taken.with_label_values(&["unreachable"]).get()
}

#[tokio::test]
async fn after_a_source_that_is_lost_in_the_middle_of_a_tree_the_next_one_is_asked() {
    let (dying, good) = (giving(first_chunk).await, giving(|all| all).await);
    let (taker, _late) = taker(&[&dying, &good]).await;
    // The order is random.
    for _ in 0..200 {
        let tree = taker.fetch(wanted()).await.unwrap();
        assert_eq!(*tree.source, *good.address);
        assert_eq!(tree.copy.blocks.len(), 48_000);
        if lost(&taker) > 0 {
            break;
        }
    }
    assert!(lost(&taker) > 0);
    assert!(!taker.are_sources_lost());
}

#[tokio::test]
async fn a_stream_that_is_lost_once_in_the_middle_of_a_tree_costs_no_tree() {
    let giver = giving_at_the_second_time().await;
    let (taker, _late) = taker(&[&giver]).await;
    let tree = taker.fetch(wanted()).await.unwrap();
    assert_eq!(tree.copy.blocks.len(), 48_000);
    assert_eq!(lost(&taker), 0);
}

#[tokio::test]
async fn a_tree_is_not_asked_for_again_once_its_giver_may_have_given_up_this_replica() {
    let giver = giving_at_the_second_time().await;
    let (mut taker, _late) = taker(&[&giver]).await;
    Arc::get_mut(&mut taker.0).unwrap().ask_again_within = Duration::ZERO;
    assert!(taker.fetch(wanted()).await.is_none());
    assert_eq!(lost(&taker), 1);
}

#[tokio::test]
async fn a_replica_that_sends_what_is_no_message_is_not_asked_again() {
    let (giver, streams) = malformed_after(1).await;
    let (taker, _late) = taker(&[&giver]).await;
    assert!(taker.fetch(wanted()).await.is_none());
    assert_eq!((streams.load(Relaxed), lost(&taker)), (1, 1));
}

#[tokio::test]
async fn a_replica_that_sends_what_is_no_message_on_a_kept_stream_is_not_asked_again() {
    let (giver, streams) = malformed_after(0).await;
    let (taker, late) = taker(&[&giver]).await;
    keep_stream(&taker, &late, &giver).await;
    assert!(taker.fetch(wanted()).await.is_none());
    assert_eq!((streams.load(Relaxed), lost(&taker)), (1, 1));
}

#[tokio::test]
async fn with_each_source_lost_in_the_middle_there_is_no_tree_and_it_is_known_why() {
    let (one, other) = (giving(first_chunk).await, giving(first_chunk).await);
    let (taker, _late) = taker(&[&one, &other]).await;
    assert!(!taker.are_sources_lost());
    assert!(taker.fetch(wanted()).await.is_none());
    assert_eq!(lost(&taker), 2);
    assert!(taker.are_sources_lost());
}

#[tokio::test]
async fn a_stream_that_was_kept_and_has_ended_is_replaced_and_costs_no_tree() {
    let giver = giving_one_a_stream().await;
    let (taker, _late) = taker(&[&giver]).await;
    // The second one waits for its turn, so the stream of the first one is kept.
    let (one, other) = tokio::join!(taker.fetch(wanted()), taker.fetch(wanted()));
    for tree in [one, other] {
        assert_eq!(tree.unwrap().copy.blocks.len(), 48_000);
    }
    assert_eq!(lost(&taker), 0);
    assert!(!taker.are_sources_lost());
}

#[tokio::test]
async fn a_replica_that_is_silent_on_a_kept_stream_is_not_asked_again_on_another_one() {
    let (giver, streams) = silent().await;
    let (mut taker, late) = taker(&[&giver]).await;
    Arc::get_mut(&mut taker.0).unwrap().patience = Duration::from_millis(100);
    keep_stream(&taker, &late, &giver).await;
    assert!(taker.fetch(wanted()).await.is_none());
    eventually("the kept stream is served", || streams.load(Relaxed) > 0).await;
    assert_eq!((streams.load(Relaxed), lost(&taker)), (1, 1));
    assert!(taker.are_sources_lost());
}
