//! A replica over a real socket, and what others may send it.

use std::time::Duration;

use bytes::Bytes;
use prost::Message;

use super::*;
use crate::fleet::events::{Endpoint, Events};
use crate::fleet::load::LoadShare;
use crate::fleet::registry::tests::{member, registry};
use crate::fleet::waiting::{DueTime, WaitingAt, WaitingByOwner};
use crate::fleet::{Member, Worker};
use crate::http::grpc::frame;
use crate::ids::WorkerId;
use crate::kv::predicted::{self, PredictedIndex};
use crate::kv::unconfirmed::{self, UnconfirmedBlocks};
use crate::peers::framed;
use crate::peers::wire::peer_message::Kind;
use crate::secret::Secret;

pub(in crate::peers) struct Replica {
    pub(in crate::peers) peers: Peers,
    pub(in crate::peers) address: String,
    fleet: Arc<Registry>,
    worker: Arc<Worker>,
    metrics: metrics::Registry,
    tasks: Tasks,
}

pub(in crate::peers) async fn replica(others: &[&Replica]) -> Replica {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let fleet = registry(&["a", "b"]);
    let worker = fleet.snapshot().workers[0].worker.clone();
    let metrics = metrics::Registry::default();
    let listed = others.iter().map(|other| other.address.clone()).collect();
    let settings = Settings {
        listen: address.to_string(),
        discovery: vec![super::super::settings::PeerDiscovery::Static(listed)],
        ..Settings::default()
    };
    let peers = Peers::new(&settings, address, None, fleet.clone(), routed(), &metrics).unwrap();
    let tasks = Tasks::default();
    tasks.spawn(peers.clone().run(settings, listener, tasks.clone()));
    Replica {
        peers,
        address: address.to_string(),
        fleet,
        worker,
        metrics,
        tasks,
    }
}

fn routed() -> Arc<RoutedPrompts> {
    let (metrics, now) = (metrics::Registry::default(), observe::now());
    let predicted = PredictedIndex::new(
        predicted::Settings::default(),
        predicted::Metrics::new(&metrics),
        now,
    );
    let unconfirmed = UnconfirmedBlocks::new(
        unconfirmed::Settings::default(),
        unconfirmed::Metrics::new(&metrics),
    );
    let routed = RoutedPrompts::new(100, Arc::new(predicted), unconfirmed, &metrics);
    Arc::new(routed)
}

/// A client that speaks the protocol.
fn stranger(id: u128) -> Identity {
    Identity {
        id: InstanceId::new(id),
        name: "stranger".into(),
        release: "9.9.9".into(),
        port: 0,
        secret: Secret::default(),
    }
}

async fn dial(replica: &Replica, id: u128) -> Link {
    let settings = Settings::default().advanced;
    let identity = stranger(id);
    let link = client::connect(&replica.address, wire::SYNC, &identity, None, &settings);
    link.await.unwrap()
}

pub(in crate::peers) async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..2_000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("not within 10 s: {what}");
}

fn names() -> Bytes {
    let name = |number, address: &str| wire::WorkerName {
        number,
        address: address.to_owned(),
        rank: None,
    };
    framed(Kind::Workers(wire::WorkerNames {
        workers: vec![name(0, "a.test:8000"), name(1, "elsewhere:8000")],
    }))
}

fn report(sequence: u64, requests: u32) -> wire::LoadReport {
    let load = |number| wire::WorkerLoad {
        number,
        requests,
        queued_tokens: 100,
        ..wire::WorkerLoad::default()
    };
    wire::LoadReport {
        sequence,
        is_whole: true,
        workers: vec![load(0), load(1)],
        is_ready: true,
        ..wire::LoadReport::default()
    }
}

#[tokio::test]
async fn a_later_release_and_another_fleet_are_no_error() {
    let replica = replica(&[]).await;
    let link = dial(&replica, 1).await;
    link.send(names()).await.unwrap();
    // A field that this release does not know, inside the report and beside it.
    let next = framed(Kind::Load(report(2, 4)));
    let mut report = report(1, 3).encode_to_vec();
    report.extend([0x98, 0x06, 0x01]);
    let mut message = vec![0x22, report.len() as u8];
    message.extend(&report);
    message.extend([0x98, 0x06, 0x01]);
    link.send(frame(&message)).await.unwrap();
    // A kind of message that it does not know.
    link.send(frame(&[0x92, 0x03, 0x01, 0x00])).await.unwrap();
    link.send(frame(&[0x92, 0x03, 0x01, 0x00])).await.unwrap();
    eventually("the load is seen", || replica.worker.load.requests() == 3).await;
    assert_eq!(replica.worker.load.queued_tokens(), 100);
    eventually("both are counted", || {
        let ignored = "warmroute_peer_ignored_total 2";
        replica.metrics.text().contains(ignored)
    })
    .await;
    // The stream goes on.
    link.send(next).await.unwrap();
    eventually("the next report", || replica.worker.load.requests() == 4).await;
    let status = replica.peers.status(observe::now()).unwrap();
    let peer = &status.peers[0];
    assert_eq!((&*peer.state, peer.unknown_workers), ("connected", 1));
    assert_eq!(peer.release.as_deref(), Some("9.9.9"));
    let text = replica.metrics.text();
    assert!(text.contains("warmroute_peer_unknown_workers 1"), "{text}");
    assert!(text.contains("warmroute_peers{state=\"connected\"} 1"));
    // One without a port of its own is asked for nothing.
    assert_eq!(replica.peers.tree_sources().ready, [""; 0].map(Arc::from));
    drop(link);
    eventually("its load is gone", || replica.worker.load.requests() == 0).await;
}

#[tokio::test]
async fn replicas_know_what_waits_in_each_other_for_a_worker_and_its_ranks() {
    let first = replica(&[]).await;
    let second = replica(&[&first]).await;
    for replica in [&first, &second] {
        let endpoint = Endpoint::Zmq {
            publisher: "tcp://a.test:5557".to_owned(),
            replay: None,
            topic: String::new(),
        };
        let ranked = Member {
            events: Events::At(vec![endpoint; 2]),
            ..member("a")
        };
        replica
            .fleet
            .set_members("static", vec![ranked, member("b")]);
    }
    let share = |requests| LoadShare {
        requests,
        queued_tokens: 100,
        context_tokens: 300,
    };
    // For the worker, and of that for its second rank.
    let waits = |of_worker, of_rank| {
        let rank = first.worker.id.cache_owner(Some(1));
        let waiting = [(first.worker.id, share(of_worker)), (rank, share(of_rank))];
        first.fleet.waiting().set_own(waiting.into_iter().collect());
    };
    let heard = |replica: &Replica| {
        let (waiting, worker) = (replica.fleet.waiting().peers(), replica.worker.id);
        let of = |owner: WorkerId| waiting.as_ref()?.get(&owner).copied();
        [None, Some(0), Some(1)].map(|rank| of(worker.cache_owner(rank)))
    };
    waits(2, 1);
    eventually("it is heard of", || {
        heard(&second) == [Some(share(2)), None, Some(share(1))]
    })
    .await;
    // One that is due in a minute.
    let due = DueTime {
        priority: 3,
        at: observe::now() + Duration::from_secs(60),
    };
    let rank = first.worker.id.cache_owner(Some(1));
    let mut own = WaitingByOwner::default();
    for (owner, requests) in [(first.worker.id, 2), (rank, 1)] {
        let waiting = WaitingAt {
            load: share(requests),
            first: [due].into_iter().collect(),
        };
        own.set(owner, waiting);
    }
    first.fleet.waiting().set_own(own);
    let first_at_peers = |replica: &Replica| {
        let (waiting, worker) = (replica.fleet.waiting().peers(), replica.worker.id);
        let of = |owner: WorkerId| Some(waiting.as_ref()?.first(owner).to_vec());
        [None, Some(0), Some(1)].map(|rank| of(worker.cache_owner(rank)).unwrap_or_default())
    };
    eventually("the first one is heard of", || {
        first_at_peers(&second)[2].len() == 1
    })
    .await;
    let [of_worker, of_other_rank, of_rank] = first_at_peers(&second);
    assert_eq!((&of_worker, of_other_rank.len()), (&of_rank, 0));
    assert!(of_rank[0].priority == 3 && of_rank[0].at >= due.at);
    // It runs nothing, and nothing of its own comes back.
    assert_eq!(second.worker.load.requests(), 0);
    assert!(first.fleet.waiting().peers().is_none());
    waits(5, 4);
    eventually("more waits", || {
        heard(&second) == [Some(share(5)), None, Some(share(4))]
    })
    .await;
    first.fleet.waiting().set_own(WaitingByOwner::default());
    eventually("nothing waits", || second.fleet.waiting().peers().is_none()).await;
    waits(1, 1);
    eventually("something waits", || heard(&second)[0].is_some()).await;
    first.tasks.stop();
    eventually("it is gone", || second.fleet.waiting().peers().is_none()).await;
}

#[tokio::test]
async fn a_malformed_message_ends_the_stream_and_nothing_else() {
    let replica = replica(&[]).await;
    let good = dial(&replica, 1).await;
    good.send(names()).await.unwrap();
    good.send(framed(Kind::Load(report(1, 1)))).await.unwrap();
    let bad = dial(&replica, 2).await;
    bad.send(names()).await.unwrap();
    bad.send(framed(Kind::Load(report(1, 5)))).await.unwrap();
    eventually("both are seen", || replica.worker.load.requests() == 6).await;
    bad.send(frame(&[0x22, 0xff, 0xff])).await.unwrap();
    eventually("its load is gone", || replica.worker.load.requests() == 1).await;
    drop(good);
}

#[tokio::test]
async fn replicas_that_dial_each_other_keep_one_stream() {
    let first = replica(&[]).await;
    let second = replica(&[&first]).await;
    // The first learns the second's address later, and dials it too.
    let settings = Settings::default().advanced;
    let _request = crate::fleet::in_flight::InFlight::new(second.worker.clone(), 70, 0);
    eventually("the load is seen", || first.worker.load.requests() == 1).await;
    let Some(state) = first.peers.0.clone() else {
        unreachable!()
    };
    let identity = &state.identity;
    for _ in 0..3 {
        let link = client::connect(&second.address, wire::SYNC, identity, None, &settings);
        let address = Some(Arc::from(&*second.address));
        let session = session::run(
            state.clone(),
            link.await.unwrap(),
            address,
            first.tasks.clone(),
        );
        first.tasks.spawn(session);
        tokio::time::sleep(Duration::from_millis(50)).await;
        let count = |replica: &Replica| {
            let status = replica.peers.status(observe::now()).unwrap();
            status
                .peers
                .iter()
                .filter(|peer| peer.state == "connected")
                .count()
        };
        eventually("one stream", || {
            count(&first) == 1 && count(&second) == 1 && first.worker.load.requests() == 1
        })
        .await;
    }
    assert_eq!(first.peers.status(observe::now()).unwrap().peers.len(), 1);
}

#[tokio::test]
async fn a_ready_replica_can_be_asked_for_trees() {
    let first = replica(&[]).await;
    let second = replica(&[&first]).await;
    second.peers.set_ready(true);
    eventually("it is ready", || {
        *first.peers.tree_sources().ready == [Arc::from(&*second.address)]
    })
    .await;
    let address = first.peers.tree_sources().ready.remove(0);
    // Trees are not served there yet.
    let mut link = first.peers.call_for_trees(&address).await.unwrap();
    assert!(matches!(
        link.receive().await,
        Err(Failure::RefusedByPeer(_))
    ));
    second.peers.serve_trees(TreeHandler::new(|link| {
        Box::pin(async move {
            let _ = link.send(names()).await;
        })
    }));
    let mut link = first.peers.call_for_trees(&address).await.unwrap();
    assert!(matches!(
        link.receive().await,
        Ok(Some((Some(Kind::Workers(_)), _)))
    ));
    assert!(matches!(link.receive().await, Ok(None)));
}
