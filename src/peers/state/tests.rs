//! Hours of replicas that come and go, in simulated time.

use std::collections::VecDeque;
use std::pin::pin;
use std::task::{Context, Waker};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;

use super::*;
use crate::fleet::in_flight::InFlight;
use crate::fleet::load::LoadShare;
use crate::fleet::registry::tests::{member, registry};
use crate::fleet::waiting::DueTime;
use crate::ids::{Block, BlockHash};
use crate::kv::predicted::{self, PredictedIndex};
use crate::kv::unconfirmed::{self, UnconfirmedBlocks};
use crate::observe;
use crate::observe::metrics;
use crate::peers::gauges::WorkerLoad;
use crate::peers::numbers::WorkerKey;
use crate::peers::{framed, wire};
use crate::secret::Secret;

const STEPS: u64 = 100_000;
/// The steps are an hour.
const STEP: Duration = Duration::from_millis(36);
const MAX_REPLICAS: usize = 16;
const WORKERS: [&str; 3] = ["a", "b", "elsewhere"];
const BLOCKS_PER_PROMPT: u64 = 4;

struct Other {
    id: InstanceId,
    stream: StreamId,
    sequence: u64,
    received: mpsc::Receiver<Result<Bytes, tonic::Status>>,
}

struct World {
    state: Arc<State>,
    predicted: Arc<PredictedIndex>,
    unconfirmed: Arc<UnconfirmedBlocks>,
    others: VecDeque<Other>,
    random: fastrand::Rng,
    last_id: u128,
}

fn other(id: u128) -> PeerIdentity {
    PeerIdentity {
        id: InstanceId::new(id),
        name: "other".into(),
        release: "1".into(),
        port: 1,
    }
}

impl World {
    fn new(now: Instant) -> Self {
        let registered = metrics::Registry::default();
        let metrics = predicted::Metrics::new(&registered);
        let predicted = PredictedIndex::new(predicted::Settings::default(), metrics, now);
        let predicted = Arc::new(predicted);
        let metrics = unconfirmed::Metrics::new(&registered);
        let unconfirmed = UnconfirmedBlocks::new(unconfirmed::Settings::default(), metrics);
        let routed = RoutedPrompts::new(1_000, predicted.clone(), unconfirmed.clone(), &registered);
        let identity = Identity {
            id: InstanceId::new(1),
            name: "this".into(),
            release: "1".into(),
            port: 1,
            secret: Secret::default(),
        };
        let state = State::new(
            now,
            identity,
            None,
            &Settings::default(),
            registry(&["a", "b"]),
            Arc::new(routed),
            Metrics::new(&registered),
        );
        Self {
            state,
            predicted,
            unconfirmed,
            others: VecDeque::new(),
            random: fastrand::Rng::with_seed(7),
            last_id: 1,
        }
    }

    fn connect(&mut self, now: Instant) {
        self.last_id += 1;
        let peer = other(self.last_id);
        let (outgoing, received) = mpsc::channel(4);
        let opened = self.state.open(now, &peer, Side::Acceptor, None, &outgoing);
        let (stream, _end) = opened.unwrap();
        let name = |(number, worker): (u32, &str)| wire::WorkerName {
            number,
            address: format!("{worker}.test:8000"),
            rank: None,
        };
        let names = (0..).zip(WORKERS).map(name).collect();
        let names = Kind::Workers(wire::WorkerNames { workers: names });
        self.state.on_message(now, peer.id, stream, Some(names), 1);
        self.others.push_back(Other {
            id: peer.id,
            stream,
            sequence: 0,
            received,
        });
    }

    /// One of the others reports its load and a prompt.
    fn report(&mut self, now: Instant) {
        let position = self.random.usize(..self.others.len());
        let other = &mut self.others[position];
        other.sequence += 1;
        let random = &mut self.random;
        let workers = (0..WORKERS.len() as u32).map(|number| wire::WorkerLoad {
            number,
            requests: random.u32(..4),
            queued_tokens: random.u64(..100),
            waiting_requests: random.u32(..4),
            ..wire::WorkerLoad::default()
        });
        let report = wire::LoadReport {
            sequence: other.sequence,
            is_whole: true,
            workers: workers.collect(),
            ..wire::LoadReport::default()
        };
        let blocks: Vec<u64> = (0..BLOCKS_PER_PROMPT).map(|_| random.u64(..)).collect();
        let number = random.u32(..2);
        let routed = wire::RoutedPrompts {
            unconfirmed: vec![wire::UnconfirmedPrompt {
                number,
                prefixes: blocks.clone(),
            }],
            prompts: vec![wire::RoutedPrompt {
                number,
                tokens: vec![16; blocks.len()],
                blocks,
                ..wire::RoutedPrompt::default()
            }],
        };
        let (id, stream) = (other.id, other.stream);
        for kind in [Kind::Load(report), Kind::Routed(routed)] {
            self.state.on_message(now, id, stream, Some(kind), 1);
        }
    }

    fn route(&mut self, now: Instant) {
        let snapshot = self.state.fleet.snapshot();
        let worker = snapshot.workers[self.random.usize(..2)].worker.id;
        let block = |end_tokens| Block {
            path: BlockHash(self.random.u64(..)),
            end_tokens,
        };
        let prompt: Vec<Block> = [16, 32].map(block).to_vec();
        self.state.routed.push(now, worker, &prompt, 0..2);
    }

    fn step(&mut self, number: u64, now: Instant) {
        match self.random.u32(..10) {
            0 if self.others.len() < MAX_REPLICAS => self.connect(now),
            1 => {
                if let Some(other) = self.others.pop_front() {
                    let (id, stream) = (other.id, other.stream);
                    self.state
                        .close(now, id, stream, "the connection is closed");
                }
            }
            _ if !self.others.is_empty() => self.report(now),
            _ => {}
        }
        self.route(now);
        self.state.tick(now);
        for other in &mut self.others {
            // Some are slow.
            if other.id != InstanceId::new(self.last_id) {
                while other.received.try_recv().is_ok() {}
            }
        }
        if number.is_multiple_of(100) {
            self.predicted.remove_expired(now, |_| true);
            self.unconfirmed.remove_ended(now, |_| None);
        }
    }

    /// Entries of everything that replicas make this one keep, but for prompts.
    fn entries(&self) -> usize {
        let inner = self.state.inner.lock();
        inner.table.entries() + inner.roster.peers().count() + inner.gauges.numbers.len()
    }

    fn blocks(&self) -> usize {
        let snapshot = self.state.fleet.snapshot();
        let workers = snapshot.workers.iter();
        workers
            .map(|status| self.predicted.size(status.worker.id).0)
            .sum()
    }
}

#[test]
fn an_hour_of_replicas_that_come_and_go_takes_no_memory_for_those_that_left() {
    let start = observe::now();
    let mut world = World::new(start);
    let (mut entries, mut blocks) = (0, 0);
    for number in 0..STEPS {
        let now = start + STEP * u32::try_from(number).unwrap();
        world.step(number, now);
        if number.is_multiple_of(1_000) {
            entries = entries.max(world.entries());
            blocks = blocks.max(world.blocks());
        }
    }
    assert!(world.last_id > 5_000, "{}", world.last_id);
    // For each replica its workers with their addresses, and itself; and the sums.
    assert!(entries <= MAX_REPLICAS * 8 + 12, "{entries}");
    // As many as fit into the two workers' caches, after far more were routed.
    let fitting = predicted::Settings::default().tokens_per_worker as usize / 16;
    assert!(blocks > fitting && blocks <= 2 * fitting, "{blocks}");
    // All have left.
    let end = start + STEP * u32::try_from(STEPS).unwrap();
    while let Some(other) = world.others.pop_front() {
        world.state.close(end, other.id, other.stream, "the end");
    }
    assert!(world.entries() <= WORKERS.len(), "{}", world.entries());
    let snapshot = world.state.fleet.snapshot();
    for status in &snapshot.workers {
        assert_eq!(status.worker.load.peers_requests(), 0);
    }
    world
        .predicted
        .remove_expired(end + Duration::from_secs(3_700), |_| true);
    assert_eq!(world.blocks(), 0);
}

/// A replica that starts asks the ones that are ready, and waits while one may be.
#[test]
fn a_replica_that_connects_may_be_ready_soon_until_it_says_whether_it_is() {
    for is_ready in [true, false] {
        let now = observe::now();
        let world = World::new(now);
        let state = &world.state;
        let address: Arc<str> = "other.test:1".into();
        let sources = || state.tree_sources(now);
        let soon = TreeSources {
            ready: Vec::new(),
            may_grow: true,
        };
        assert_eq!(sources(), TreeSources::default());
        state.set_address(now, &address, AddressState::Connecting);
        assert_eq!(sources(), soon);
        let peer = other(2);
        // Connected, and its stream is not open yet.
        state.set_address(now, &address, AddressState::Connected(peer.id));
        assert_eq!(sources(), soon);
        let (outgoing, _received) = mpsc::channel(4);
        let opened = state.open(now, &peer, Side::Dialer, Some(address.clone()), &outgoing);
        let (stream, _end) = opened.unwrap();
        assert_eq!(sources(), soon);
        let report = Kind::Load(wire::LoadReport {
            sequence: 1,
            is_whole: true,
            is_ready,
            ..wire::LoadReport::default()
        });
        state.on_message(now, peer.id, stream, Some(report), 1);
        let known = TreeSources {
            ready: is_ready.then_some(address).into_iter().collect(),
            may_grow: false,
        };
        assert_eq!(sources(), known);
    }
}

#[test]
fn reports_wake_who_waits_here_but_not_by_the_hundred_a_second() {
    let start = observe::now();
    let mut world = World::new(start);
    world.connect(start);
    let (peer, stream) = (world.others[0].id, world.others[0].stream);
    let freed = world.state.fleet.freed().clone();
    let is_woken = || {
        let notified = pin!(freed.notified());
        let mut context = Context::from_waker(Waker::noop());
        notified.poll(&mut context).is_ready()
    };
    let mut sequence = 0;
    let mut is_woken_by = |ms: u64, requests: u32| {
        sequence += 1;
        let worker = wire::WorkerLoad {
            number: 0,
            requests,
            ..wire::WorkerLoad::default()
        };
        let report = Kind::Load(wire::LoadReport {
            sequence,
            is_whole: true,
            workers: vec![worker],
            ..wire::LoadReport::default()
        });
        let now = start + Duration::from_millis(ms);
        let state = &world.state;
        state.on_message(now, peer, stream, Some(report), 1);
        is_woken()
    };
    // None waits.
    assert!(!is_woken_by(0, 1));
    freed.add_waiting(1);
    assert!(is_woken());
    assert!(is_woken_by(1, 2));
    // The report says nothing new.
    assert!(!is_woken_by(10, 2));
    let woken = (100..200).filter(|ms| is_woken_by(*ms, 3 + *ms as u32));
    assert_eq!(woken.count(), 20);
}

/// Nothing is reported while no other replica is there, so the first that comes must not get what was so before.
#[test]
fn the_first_replica_that_comes_is_told_at_once_that_this_one_is_ready() {
    let now = observe::now();
    let mut world = World::new(now);
    world.state.set_ready(true);
    world.connect(now);
    let received = &mut world.others[0].received;
    let sent: Vec<Bytes> = std::iter::from_fn(|| received.try_recv().ok()?.ok()).collect();
    let ready = framed(Kind::Load(wire::LoadReport {
        sequence: 1,
        is_whole: true,
        is_ready: true,
        ..wire::LoadReport::default()
    }));
    // After the workers' names.
    assert_eq!(sent[1..], [ready]);
}

#[test]
fn a_replica_that_ends_its_own_drain_says_of_no_other_that_it_is_lost() {
    let now = observe::now();
    let lost = |is_draining: bool| {
        let mut world = World::new(now);
        world.connect(now);
        world
            .state
            .set_address(now, &"c:1".into(), AddressState::Connecting);
        if is_draining {
            world.state.set_draining();
        }
        let Other { id, stream, .. } = world.others[0];
        world.state.close(now, id, stream, "this side ended it");
        let inner = world.state.inner.lock();
        (
            inner.replicas_said.is_bad(&id),
            inner.alone_said.is_bad(&()),
        )
    };
    assert_eq!(lost(false), (true, true));
    assert_eq!(lost(true), (false, false));
}

#[test]
fn a_worker_that_left_the_list_counts_for_the_others_while_requests_run_there() {
    let now = observe::now();
    let world = World::new(now);
    let fleet = world.state.fleet.clone();
    let worker = fleet.snapshot().workers[0].worker.clone();
    let running = InFlight::new(worker, 10, 0);
    let reported = || {
        world.state.tick(now);
        let inner = world.state.inner.lock();
        let mut loads = inner.workers.own_loads(None);
        let found = loads.find(|(key, _)| &*key.address == "a.test:8000");
        found.map(|(_, load)| load.requests)
    };
    assert_eq!(reported(), Some(1));
    fleet.set_members("static", vec![member("b")]);
    assert_eq!(reported(), Some(1));
    drop(running);
    assert_eq!(reported(), None);
    fleet.set_members("static", vec![member("a"), member("b")]);
    assert_eq!(reported(), Some(0));
}

#[test]
fn the_ranks_of_the_largest_fleet_may_be_reported_and_fit_into_a_message() {
    let (settings, now) = (Advanced::default(), observe::now());
    let fleet = crate::fleet::registry::Settings::default();
    let with_ranks = fleet.max_workers * 16;
    assert!(settings.max_workers as usize >= with_ranks);
    let share = LoadShare {
        requests: 500,
        queued_tokens: 4_000_000,
        context_tokens: 40_000_000,
    };
    let first = DueTime {
        priority: 10,
        at: now + Duration::from_secs(60),
    };
    let load = WorkerLoad {
        uncomputed_prompts: 500_000_000,
        ..WorkerLoad::new(share, share, Some(first))
    };
    let loads = (0..settings.max_workers).map(|number| {
        let worker = number / 16;
        let address = format!("vllm-llama-70b-{worker:04}.inference.svc.cluster.local:8000");
        (WorkerKey::rank(&address.into(), number % 16), load)
    });
    let mut gauges = Gauges::new(now, settings.heartbeat_interval);
    let _ = gauges.report(now, Condition::default(), loads);
    for message in gauges.whole() {
        let bytes = message.len();
        assert!(bytes < settings.max_message, "{bytes}");
    }
}
