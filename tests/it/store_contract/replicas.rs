//! Redis with replicas: writes that wait for them, and a cluster that lost a node for good.

use std::time::Duration;

use warmroute::observe::metrics::Registry;
use warmroute::store::redis::{Mode, Settings, Wait};
use warmroute::store::{CancelOutcome, Error, OwnershipLoss, Takeover, WriteOutcome};

use super::*;
use crate::cluster::eventually;
use crate::redis_server;

async fn replica_of(master: &Server) -> Server {
    let port = master.port.to_string();
    let replica = Server::with(&["--replicaof", "127.0.0.1", &port], &[]).await;
    eventually("the replica follows", async || {
        let replication = replica.cli(&["info", "replication"]);
        replication.contains("master_link_status:up")
    })
    .await;
    replica
}

fn waiting(timeout: Duration, settings: Settings) -> Settings {
    Settings {
        wait: Wait {
            replicas: 1,
            timeout,
        },
        ..settings
    }
}

/// The store, and the value of a series of its metrics.
fn measured(settings: &Settings) -> (Store, impl Fn(&str) -> u64) {
    let registry = Registry::default();
    let store = Redis::open(settings, &keep(), CARRIERS, &registry).unwrap();
    let value = move |series: &str| {
        let name = format!("warmroute_store_{series} ");
        let text = registry.text();
        let value = text.lines().find_map(|line| line.strip_prefix(&name));
        value.map_or(0, |value| value.parse().unwrap())
    };
    (Arc::new(store), value)
}

/// The store, and how many of its writes ended with this result of `WAIT`.
fn counted(settings: &Settings) -> (Store, impl Fn(&str) -> u64) {
    let (store, value) = measured(settings);
    let count = move |result: &str| value(&format!("replica_waits_total{{result=\"{result}\"}}"));
    (store, count)
}

#[tokio::test]
async fn a_write_that_waits_is_acknowledged_when_a_replica_has_it_and_survives_a_failover() {
    let mut master = Server::start().await;
    let replica = replica_of(&master).await;
    let settings = waiting(Duration::from_secs(9), at(&master));
    let (store, count) = counted(&settings);
    let (running, cancelled) = (new_key(), new_key());
    for key in [running, cancelled] {
        store.create(key, queued()).await.unwrap();
    }
    assert_eq!(count("acknowledged"), 2);

    replica.pause();
    let ending = ending(Status::Completed);
    let mut end = store.finalize(running, FENCE, ending);
    let early = tokio::time::timeout(Duration::from_millis(300), &mut end).await;
    assert!(early.is_err(), "no replica has it: {early:?}");
    // Reads and writes that do not wait have another connection.
    assert!(store.get(cancelled).await.unwrap().is_some());
    assert_eq!(store.start(cancelled, FENCE).await, Ok(WriteOutcome::Done));
    replica.wake();
    assert_eq!(end.await, Ok(WriteOutcome::Done));
    let cancel = store.cancel(cancelled, cancelling()).await;
    assert!(matches!(cancel, Ok(CancelOutcome::Done { .. })));
    let others = [(); 20].map(|()| new_key());
    let creates = others.map(|key| {
        let store = store.clone();
        tokio::spawn(async move { store.create(key, finished()).await })
    });
    for create in creates {
        create.await.unwrap().unwrap();
    }
    assert_eq!((count("acknowledged"), count("timed_out")), (24, 0));

    master.kill();
    replica.cli(&["replicaof", "no", "one"]);
    let store = open(&at(&replica), &keep());
    let status = async |key| store.get(key).await.unwrap().map(|found| found.status);
    assert_eq!(status(running).await, Some(Status::Completed));
    assert_eq!(status(cancelled).await, Some(Status::Cancelled));
    for key in others {
        assert_eq!(status(key).await, Some(Status::Completed));
    }
}

#[tokio::test]
async fn a_write_stands_when_no_replica_answers_in_time_and_the_next_ones_do_not_wait() {
    let master = Server::start().await;
    let replica = replica_of(&master).await;
    let settings = waiting(Duration::from_millis(200), at(&master));
    let (store, count) = counted(&settings);
    replica.pause();
    let keys = [(); 10].map(|()| new_key());
    for key in keys {
        store.create(key, finished()).await.unwrap();
    }
    assert!(count("timed_out") >= 1 && count("acknowledged") == 0);
    assert_eq!(count("timed_out") + count("not_asked"), 10);
    for key in keys {
        assert!(store.get(key).await.unwrap().is_some());
    }
    assert!(store.health().is_up);
    replica.wake();
    eventually("replicas are asked again", async || {
        store.create(new_key(), finished()).await.unwrap();
        count("acknowledged") > 0
    })
    .await;
}

/// A cluster whose nodes have no replicas loses a node for good.
#[tokio::test]
async fn a_dead_node_of_a_cluster_ends_only_what_lies_on_it() {
    let mut nodes = redis_server::cluster_with_replicas(0).await;
    let settings = Settings {
        mode: Mode::Cluster,
        urls: nodes.iter().map(Server::url).collect(),
        advanced: redis::Advanced {
            read_timeout: Duration::from_millis(1_000),
            write_timeout: Duration::from_millis(1_000),
            ..redis::Advanced::default()
        },
        ..at(&nodes[0])
    };
    let (a, value) = measured(&settings);
    let b = open(&settings, &keep());
    // Other nodes refuse.
    let has_slot = |node: &Server, name: &str| {
        let exists = node.cli(&["exists", name]);
        ["0", "1"].contains(&exists.trim())
    };
    let dead = nodes.iter().position(|node| !has_slot(node, "wr:owners"));
    let dead = nodes.remove(dead.unwrap());
    let lives = |name: String| nodes.iter().any(|node| has_slot(node, &name));
    // Owners with their keys on nodes that live.
    let mut owners = (1..).map(Owner).filter(|owner| {
        let keys = ["q", "o", "n"].map(|kind| format!("wr:{kind}:{owner}"));
        keys.into_iter().all(lives)
    });
    let (owner, other) = (owners.next().unwrap(), owners.next().unwrap());
    let fence = FencingToken::first(owner);
    let lease = Duration::from_secs(6);
    a.heartbeat(owner, "a", lease).await.unwrap();
    let mut keys = Vec::new();
    for _ in 0..24 {
        let key = new_key();
        let new = record(InitialState::Background {
            fence,
            retention: Retention::Stored,
            streams: true,
            request: Bytes::from_static(b"{}"),
        });
        a.create(key, new).await.unwrap();
        keys.push(key);
    }
    let has_record = |key: &ResponseKey| {
        let pattern = format!("*{:032x}*", key.id.own());
        !dead
            .cli(&["--scan", "--pattern", &pattern])
            .trim()
            .is_empty()
    };
    let (lost, left): (Vec<_>, Vec<_>) = keys.into_iter().partition(has_record);
    assert!(!lost.is_empty() && left.len() > 4, "{lost:?} {left:?}");
    drop(dead);

    let is_unavailable = |error| matches!(error, Error::Unavailable { .. } | Error::Unknown { .. });
    eventually("what lies on the dead node is unavailable", async || {
        let mut all = true;
        for key in &lost {
            all &= a.get(*key).await.is_err_and(is_unavailable);
        }
        all
    })
    .await;
    // Whatever is asked of the dead node, however often: the others answer, over the connections that they have.
    let opened = value("connections_opened_total");
    assert!(opened > 0);
    for _ in 0..3 {
        for (key, other) in left.iter().zip(lost.iter().cycle()) {
            let _ = a.get(*other).await;
            assert!(a.get(*key).await.unwrap().is_some());
        }
    }
    assert_eq!(value("connections_opened_total"), opened);
    assert!(a.health().is_up && b.health().is_up);
    let (runs, cancelled) = (left[0], left[1]);
    a.heartbeat(owner, "a", lease).await.unwrap();
    assert_eq!(a.start(runs, fence).await, Ok(WriteOutcome::Done));
    let cancel = b.cancel(cancelled, cancelling()).await;
    let done = CancelOutcome::Done {
        was: Status::Queued,
        owner: Some(owner),
    };
    assert_eq!(cancel, Ok(done));
    // An owner learns what it has lost elsewhere; nothing is said of what lies on the dead node.
    let checked = [runs, cancelled, lost[0]].map(|key| (key, fence)).to_vec();
    let gone = vec![(cancelled, OwnershipLoss::Terminal(Status::Cancelled))];
    assert_eq!(a.check_ownership(checked).await, Ok(gone));
    let ended = a.finalize(runs, fence, ending(Status::Completed)).await;
    assert_eq!(ended, Ok(WriteOutcome::Done));

    // The owner dies: what lies elsewhere is found and taken over.
    a.end_lease(owner).await.unwrap();
    b.heartbeat(other, "b", LEASE).await.unwrap();
    let orphans = b.orphans(99).await.unwrap();
    let mut found: Vec<_> = orphans.iter().map(|orphan| orphan.key).collect();
    let mut expected = left[2..].to_vec();
    found.sort();
    expected.sort();
    assert_eq!(found, expected);
    let taken = b.take_over(orphans[0], other).await;
    assert!(matches!(taken, Ok(Takeover::Done(_))), "{taken:?}");
}
