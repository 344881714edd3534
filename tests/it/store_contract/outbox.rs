//! What every outbox must do: one event for one end, one claim at a time, and nothing lost with a replica.

use std::sync::Arc;
use std::time::{Duration, Instant};

use prometheus::IntCounter;
use warmroute::store::memory::Memory;
use warmroute::store::outbox::{
    AddCounters, BatchKey, Bounds, Claim, Claimed, ClaimedEvent, EndEvent, EventKey, EventType,
    Outbox, Settlement, Subscriber, Subscriptions,
};
use warmroute::store::redis::{Mode, Settings};
use warmroute::store::{CancelOutcome, WriteOutcome};

use super::*;
use crate::cluster::eventually;
use crate::redis_server;

const HOOK: &str = "hook";
const CLAIM_LEASE: Duration = Duration::from_secs(60);

/// A store as one replica sees it. In memory, events are counted by the replica that was made last.
struct Replica {
    store: Store,
    outbox: Arc<dyn Outbox>,
    counters: AddCounters,
}

fn counters() -> AddCounters {
    let counter = |name| IntCounter::new(name, "-").unwrap();
    AddCounters {
        added: counter("added"),
        dropped_full: counter("full"),
        dropped_disabled: counter("disabled"),
    }
}

fn subscriber(name: &str, of: Option<Tenant>, events: &[EventType]) -> Subscriber {
    Subscriber {
        name: name.into(),
        fingerprint: "f".into(),
        tenant: of,
        events: events.to_vec(),
        added: Arc::default(),
        counters: counters(),
    }
}

impl Replica {
    fn new(store: Store, outbox: Arc<dyn Outbox>, bounds: Bounds) -> Self {
        let counters = counters();
        let hook = Subscriber {
            counters: counters.clone(),
            ..subscriber(HOOK, Some(tenant()), &EventType::ALL)
        };
        outbox.subscribe(Arc::new(Subscriptions {
            subscribers: vec![
                hook,
                subscriber("failures", Some(tenant()), &[EventType::ResponseFailed]),
                subscriber("all", None, &[EventType::ResponseCompleted]),
                subscriber("stranger", Some(Tenant::tagged(7)), &EventType::ALL),
            ],
            bounds,
        }));
        Self {
            store,
            outbox,
            counters,
        }
    }

    fn in_redis(settings: &Settings, bounds: Bounds) -> Self {
        let redis = Redis::open(settings, &keep(), CARRIERS, &Registry::default()).unwrap();
        let redis = Arc::new(redis);
        Self::new(redis.clone(), redis, bounds)
    }

    async fn run(&self) -> ResponseKey {
        let key = new_key();
        self.store.create(key, queued()).await.unwrap();
        key
    }

    async fn end(&self, status: Status) -> (ResponseKey, Finalization) {
        let (key, end) = (self.run().await, ending(status));
        let ended = self.store.finalize(key, FENCE, end.clone()).await;
        assert_eq!(ended, Ok(WriteOutcome::Done));
        (key, end)
    }

    async fn claim(&self, endpoint: &str, max: usize, lease: Duration) -> Claimed {
        let claim = Claim {
            max,
            lease,
            fingerprint: "f".to_owned(),
            is_new_address: false,
        };
        self.outbox.claim(endpoint, claim).await.unwrap()
    }

    /// Claims five events of the endpoint at an address.
    async fn claim_at(&self, fingerprint: &str, is_new_address: bool) -> Claimed {
        let claim = Claim {
            max: 5,
            lease: CLAIM_LEASE,
            fingerprint: fingerprint.to_owned(),
            is_new_address,
        };
        self.outbox.claim(HOOK, claim).await.unwrap()
    }

    /// Claims all that is due.
    async fn due(&self, endpoint: &str) -> Vec<(ResponseKey, Status, u32)> {
        let claimed = self.claim(endpoint, 1_000, CLAIM_LEASE).await.events;
        let of = |claimed: ClaimedEvent| match claimed.event.key {
            EventKey::Response(key) => {
                let status = Status::parse(claimed.event.event_type.status())?;
                Some((key, status, claimed.attempt))
            }
            EventKey::Batch(_) => None,
        };
        claimed.into_iter().filter_map(of).collect()
    }

    async fn settle(&self, key: ResponseKey, attempt: u32, retry_in: Option<Duration>) -> bool {
        let settlement = Settlement {
            key: EventKey::Response(key),
            attempt,
            retry_in,
        };
        self.outbox.settle(HOOK, settlement).await.unwrap()
    }
}

/// Makes a check with each kind of store, as two replicas see it.
async fn on_each(bounds: Bounds, check: impl AsyncFn(&Replica, &Replica)) {
    eprintln!("in memory");
    let memory = Memory::new(&Default::default(), &keep(), &Registry::default());
    let memory = Arc::new(memory);
    let replica = || Replica::new(memory.clone(), memory.clone(), bounds);
    check(&replica(), &replica()).await;
    eprintln!("in Redis");
    let server = Server::start().await;
    let replica = || Replica::in_redis(&at(&server), bounds);
    check(&replica(), &replica()).await;
    eprintln!("in a cluster");
    let nodes = redis_server::cluster().await;
    let settings = Settings {
        mode: Mode::Cluster,
        urls: nodes.iter().map(Server::url).collect(),
        ..at(&nodes[0])
    };
    let replica = || Replica::in_redis(&settings, bounds);
    check(&replica(), &replica()).await;
}

#[tokio::test]
async fn one_end_is_one_event_for_each_endpoint_that_is_to_learn_it() {
    on_each(Bounds::default(), async |a, b| {
        let (completed, end) = a.end(Status::Completed).await;
        // The reply to the first write may have been lost.
        let again = a.store.finalize(completed, FENCE, end.clone()).await;
        assert_eq!(again, Ok(WriteOutcome::Done));
        assert_eq!(b.due("hook").await, [(completed, Status::Completed, 1)]);
        assert_eq!(b.due("all").await, [(completed, Status::Completed, 1)]);
        assert!(a.due("failures").await.is_empty() && a.due("stranger").await.is_empty());
        assert!(b.settle(completed, 1, None).await);
        // Repeated when it is delivered already.
        let _ = a.store.finalize(completed, FENCE, end).await;
        let (failed, _) = a.end(Status::Failed).await;
        assert_eq!(a.due("hook").await, [(failed, Status::Failed, 1)]);
        assert_eq!(a.due("failures").await, [(failed, Status::Failed, 1)]);
        // A foreground response is stored with its end, and is no event.
        a.store.create(new_key(), finished()).await.unwrap();
        assert!(b.due("hook").await.is_empty());
        // Two events of three endpoints; the one for all tenants was not asked again.
        assert_eq!(a.counters.added.get() + b.counters.added.get(), 2);
    })
    .await;
}

#[tokio::test]
async fn the_end_of_a_batch_is_an_event_like_others() {
    on_each(Bounds::default(), async |a, b| {
        let key = EventKey::Batch(BatchKey {
            tenant: tenant(),
            number: fastrand::u128(..),
        });
        let event = EndEvent::of(key, "expired", 7).unwrap();
        a.outbox.add(event).await.unwrap();
        // The reply may have been lost.
        b.outbox.add(event).await.unwrap();
        let claimed = b.claim(HOOK, 5, CLAIM_LEASE).await.events;
        assert_eq!(claimed.len(), 1);
        assert_eq!((claimed[0].event, claimed[0].attempt), (event, 1));
        for other in ["failures", "all", "stranger"] {
            let claimed = a.claim(other, 5, CLAIM_LEASE).await;
            assert_eq!(claimed.events, [], "{other}");
        }
        let settlement = Settlement {
            key,
            attempt: 1,
            retry_in: None,
        };
        assert_eq!(b.outbox.settle(HOOK, settlement).await, Ok(true));
        assert_eq!(a.claim(HOOK, 5, CLAIM_LEASE).await.waiting, 0);
    })
    .await;
}

#[tokio::test]
async fn a_cancel_and_an_end_at_once_are_one_event() {
    on_each(Bounds::default(), async |a, b| {
        for _ in 0..20 {
            let (key, cancel) = (a.run().await, cancelling());
            let ended = a.store.finalize(key, FENCE, ending(Status::Completed));
            let cancelled = b.store.cancel(key, cancel.clone());
            let (ended, cancelled) = tokio::join!(ended, cancelled);
            let won = match ended.unwrap() {
                WriteOutcome::Done => Status::Completed,
                _ => Status::Cancelled,
            };
            let is_cancelled = matches!(cancelled, Ok(CancelOutcome::Done { .. }));
            assert_eq!(is_cancelled, won == Status::Cancelled);
            if is_cancelled {
                // As after a lost reply.
                let again = b.store.cancel(key, cancel).await;
                assert!(matches!(again, Ok(CancelOutcome::Done { .. })));
            }
            assert_eq!(b.due("hook").await, [(key, won, 1)]);
            assert!(b.settle(key, 1, None).await);
        }
    })
    .await;
}

#[tokio::test]
async fn what_a_lost_replica_claimed_is_claimed_by_another() {
    on_each(Bounds::default(), async |a, b| {
        let (key, _) = a.end(Status::Completed).await;
        let (lease, asked) = (Duration::from_millis(300), Instant::now());
        let claimed = a.claim(HOOK, 5, lease).await;
        assert_eq!((claimed.events.len(), claimed.waiting), (1, 1));
        assert!(claimed.next_due.is_some_and(|due| due <= lease));
        let mut taken_over = b.due("hook").await;
        // A busy machine may stand still for as long as the lease.
        assert!(taken_over.is_empty() || asked.elapsed() >= lease);
        eventually("the lease ends", async || {
            if taken_over.is_empty() {
                taken_over = b.due("hook").await;
            }
            !taken_over.is_empty()
        })
        .await;
        assert_eq!(taken_over, [(key, Status::Completed, 2)]);
        assert!(!a.settle(key, 1, None).await);
        assert!(b.settle(key, 2, Some(Duration::from_millis(50))).await);
        eventually("the pause is over", async || {
            taken_over = a.due("hook").await;
            !taken_over.is_empty()
        })
        .await;
        assert_eq!(taken_over, [(key, Status::Completed, 3)]);
        assert!(a.settle(key, 3, None).await && !a.settle(key, 3, None).await);
        assert_eq!(b.claim(HOOK, 5, CLAIM_LEASE).await.waiting, 0);
    })
    .await;
}

#[tokio::test]
async fn replicas_that_claim_at_once_share_the_events() {
    on_each(Bounds::default(), async |a, b| {
        let mut ends = Vec::new();
        for _ in 0..30 {
            ends.push(EventKey::Response(a.end(Status::Incomplete).await.0));
        }
        let mut claimed = Vec::new();
        while claimed.len() < ends.len() {
            let (first, second) =
                tokio::join!(a.claim(HOOK, 3, CLAIM_LEASE), b.claim(HOOK, 2, CLAIM_LEASE));
            let events = first.events.iter().chain(&second.events);
            claimed.extend(events.map(|claimed_event| claimed_event.event.key));
        }
        claimed.sort();
        ends.sort();
        assert_eq!(claimed, ends);
    })
    .await;
}

#[tokio::test]
async fn a_full_queue_drops_its_oldest() {
    let bounds = Bounds {
        max_events: 2,
        ..Bounds::default()
    };
    on_each(bounds, async |a, b| {
        let mut ends = Vec::new();
        for _ in 0..4 {
            ends.push(a.end(Status::Completed).await.0);
            // Their order in time, in whole milliseconds.
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
        let dropped = [a, b].map(|replica| replica.counters.dropped_full.get());
        assert_eq!(dropped.iter().sum::<u64>(), 2);
        let mut kept: Vec<_> = b.due("hook").await.iter().map(|due| due.0).collect();
        kept.sort_by_key(|key| ends.iter().position(|end| end == key));
        assert_eq!(kept, ends[2..]);
    })
    .await;
}

#[tokio::test]
async fn old_events_are_dropped() {
    let bounds = Bounds {
        max_age: Duration::from_millis(700),
        ..Bounds::default()
    };
    on_each(bounds, async |a, b| {
        let (key, _) = a.end(Status::Completed).await;
        a.end(Status::Completed).await;
        let mut expired = 0;
        eventually("they are old", async || {
            expired += b.claim(HOOK, 5, CLAIM_LEASE).await.expired;
            expired == 2
        })
        .await;
        assert!(!b.settle(key, 1, None).await);
    })
    .await;
}

#[tokio::test]
async fn a_disabled_endpoint_drops_events_until_it_is_enabled_or_moves() {
    on_each(Bounds::default(), async |a, b| {
        a.end(Status::Completed).await;
        assert_eq!(a.outbox.disable(HOOK, "f").await, Ok(1));
        a.end(Status::Completed).await;
        let dropped = [a, b].map(|replica| replica.counters.dropped_disabled.get());
        assert_eq!(dropped.iter().sum::<u64>(), 1);
        assert!(b.claim(HOOK, 5, CLAIM_LEASE).await.is_disabled);
        // At another address it is another endpoint.
        let claimed = b.claim_at("g", true).await;
        assert!(!claimed.is_disabled && claimed.events.is_empty());
        assert_eq!(b.outbox.enable(HOOK).await, Ok(true));
        assert_eq!(b.outbox.enable(HOOK).await, Ok(false));
        let (key, _) = a.end(Status::Completed).await;
        assert_eq!(b.due("hook").await, [(key, Status::Completed, 1)]);
    })
    .await;
}

/// One replica has not read the configuration with another address yet.
#[tokio::test]
async fn a_disabled_address_drops_no_events_of_a_newer_one() {
    on_each(Bounds::default(), async |a, b| {
        let (first, _) = a.end(Status::Completed).await;
        assert_eq!(a.due(HOOK).await, [(first, Status::Completed, 1)]);
        assert_eq!(b.claim_at("g", false).await.waiting, 1);
        assert_eq!(a.outbox.disable(HOOK, "f").await, Ok(0));
        assert!(a.settle(first, 1, Some(Duration::ZERO)).await);
        // What ends at the late replica is for the newer address, and that replica delivers nothing.
        a.end(Status::Completed).await;
        assert!(a.claim(HOOK, 5, CLAIM_LEASE).await.is_disabled);
        let claimed = b.claim_at("g", false).await;
        assert_eq!((claimed.events.len(), claimed.is_disabled), (2, false));
        let dropped = [a, b].map(|replica| replica.counters.dropped_disabled.get());
        assert_eq!(dropped, [0, 0]);
        assert_eq!(b.outbox.disable(HOOK, "g").await, Ok(2));
    })
    .await;
}

/// This is so after a restart with the former configuration: nobody says that its address is a new one.
#[tokio::test]
async fn a_former_address_that_an_operator_enables_has_events_again() {
    on_each(Bounds::default(), async |a, b| {
        a.end(Status::Completed).await;
        assert_eq!(a.claim_at("f", false).await.events.len(), 1);
        b.claim_at("g", true).await;
        assert_eq!(a.outbox.disable(HOOK, "f").await, Ok(0));
        a.end(Status::Completed).await;
        assert!(a.claim_at("f", false).await.is_disabled);
        assert_eq!(a.outbox.enable(HOOK).await, Ok(true));
        assert_eq!(a.outbox.enable(HOOK).await, Ok(false));
        let claimed = a.claim_at("f", false).await;
        assert_eq!((claimed.is_disabled, claimed.events.len()), (false, 1));
        // It is no newer than it was.
        assert_eq!(a.outbox.disable(HOOK, "f").await, Ok(0));
        assert_eq!(b.claim_at("g", false).await.waiting, 2);
    })
    .await;
}

/// Another replica is late: it has read that the endpoint moved, not that it moved back.
#[tokio::test]
async fn an_endpoint_that_moves_back_has_its_former_address_as_the_newest() {
    on_each(Bounds::default(), async |a, b| {
        a.end(Status::Completed).await;
        for (fingerprint, is_new_address) in [("f", false), ("g", true), ("f", true), ("g", false)]
        {
            let claimed = a.claim_at(fingerprint, is_new_address).await;
            assert!(!claimed.is_disabled, "{fingerprint}");
        }
        assert_eq!(b.outbox.disable(HOOK, "g").await, Ok(0));
        assert!(b.claim_at("g", false).await.is_disabled);
        assert_eq!(a.claim_at("f", false).await.waiting, 1);
        assert_eq!(a.outbox.disable(HOOK, "f").await, Ok(1));
        a.end(Status::Completed).await;
        let dropped = [a, b].map(|replica| replica.counters.dropped_disabled.get());
        assert_eq!(dropped.iter().sum::<u64>(), 1);
    })
    .await;
}

/// What a late replica has added goes to nobody.
#[tokio::test]
async fn the_newest_address_stays_disabled_and_drops_what_waits() {
    on_each(Bounds::default(), async |a, b| {
        a.end(Status::Completed).await;
        a.claim_at("f", false).await;
        b.claim_at("g", true).await;
        assert_eq!(b.outbox.disable(HOOK, "g").await, Ok(1));
        // Ends are for the first address here.
        a.end(Status::Completed).await;
        assert_eq!(a.claim_at("f", false).await.events.len(), 1);
        assert_eq!(a.outbox.disable(HOOK, "f").await, Ok(0));
        assert!(a.claim_at("f", false).await.is_disabled);
        let claimed = b.claim_at("g", false).await;
        assert_eq!((claimed.is_disabled, claimed.dropped_disabled), (true, 1));
        assert_eq!((claimed.expired, claimed.waiting), (0, 0));
        assert_eq!(b.claim_at("g", false).await.dropped_disabled, 0);
        assert_eq!(b.outbox.enable(HOOK).await, Ok(true));
        assert!(!b.claim_at("g", false).await.is_disabled);
        // Brought back, the first one has events, too.
        assert!(!a.claim_at("f", true).await.is_disabled);
    })
    .await;
}

/// A newer release has added it: both run in a rollout, and the older one runs again after a rollback.
#[tokio::test]
async fn an_event_that_a_release_does_not_know_keeps_no_others_from_delivery() {
    let server = Server::start().await;
    let replica = Replica::in_redis(&at(&server), Bounds::default());
    replica.end(Status::Completed).await;
    let entries = format!("{}he:{{{HOOK}}}", Settings::default().prefix);
    let unknown = server.cli(&["hkeys", &entries]).trim().to_owned();
    server.cli(&["hset", &entries, &unknown, "paused 5 0"]);
    let (known, _) = replica.end(Status::Completed).await;
    assert_eq!(replica.due(HOOK).await, [(known, Status::Completed, 1)]);
    // It is kept, for those who know it.
    assert_eq!(replica.claim(HOOK, 5, CLAIM_LEASE).await.waiting, 2);
    let entry = server.cli(&["hget", &entries, &unknown]);
    assert_eq!(entry.trim(), "paused 5 1");
}

/// A replica that is lost between the end of a response and its queue leaves the event to a scan.
#[tokio::test]
async fn an_end_whose_event_could_not_be_queued_is_found_by_a_scan() {
    let server = Server::start().await;
    let replica = || Replica::in_redis(&at(&server), Bounds::default());
    let (a, b) = (replica(), replica());
    a.store.heartbeat(OWNER, "a", LEASE).await.unwrap();
    let prefix = Settings::default().prefix;
    let queue = format!("{prefix}he:{{{HOOK}}}");
    let block = || server.cli(&["set", &queue, "no hash"]);
    let unblock = || server.cli(&["del", &queue]);
    // Its owner lives, and finds that it is not running.
    block();
    let (completed, _) = a.end(Status::Completed).await;
    unblock();
    assert!(b.due("hook").await.is_empty());
    let untracked = a.store.untracked(OWNER, Vec::new(), 10).await;
    assert_eq!(untracked, Ok(Vec::new()));
    assert_eq!(b.due("hook").await, [(completed, Status::Completed, 1)]);
    // Cancelled through another replica.
    let cancelled = a.run().await;
    block();
    let _ = b.store.cancel(cancelled, cancelling()).await.unwrap();
    unblock();
    a.store.untracked(OWNER, Vec::new(), 10).await.unwrap();
    assert_eq!(b.due("hook").await, [(cancelled, Status::Cancelled, 1)]);
    // Its owner is lost.
    block();
    let (orphaned, _) = a.end(Status::Completed).await;
    unblock();
    a.store.end_lease(OWNER).await.unwrap();
    eventually("a scan queues it", async || {
        assert_eq!(b.store.orphans(10).await, Ok(Vec::new()));
        b.due("hook").await == [(orphaned, Status::Completed, 1)]
    })
    .await;
    // Nothing is left to do.
    a.store.orphans(10).await.unwrap();
    assert_eq!(b.claim(HOOK, 10, CLAIM_LEASE).await.waiting, 3);
    eventually("the sets are empty", async || {
        b.store.orphans(10).await.unwrap();
        let sets = server.cli(&["keys", &format!("{prefix}q:*")]);
        sets.trim().is_empty()
    })
    .await;
}
