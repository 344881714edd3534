//! A simulation of several replicas that share one response store, in virtual time and with injected faults.
//!
//! The deciding parts of background runs are the real ones: the lease, an owner's run table, a run's state, the
//! decision what to do with an orphan, a reader's position, and the memory store. Network, clients, engines and
//! faults are drawn from a seed. After each write, and each event that a reader receives, the invariants that
//! `src/ARCHITECTURE.md` lists are checked; at the end, every acknowledged response must have ended.

mod checks;
mod clients;
mod encoder;
mod faults;
mod network;
mod owner;
mod readers;
mod run;
mod store_harness;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::{Duration, Instant};

use fastrand::Rng;
use tracing::trace;

use self::faults::{Fault, Faults};
use self::readers::{Ledger, Reader};
use self::run::{Run, Word};
use self::store_harness::{StoreHarness, StoreReply, StoreRequest};
use warmroute::ids::{ResponseId, Root, Tenant};
use warmroute::responses::background::run_table::{Bounds, RunTable};
use warmroute::sim::world::World;
use warmroute::store::{NoticeCursor, Orphan, Owner, ResponseKey, RetentionSettings, lease};

const REPLICAS: usize = 3;
/// The most responses in one simulation.
const NUMBERS: u128 = 3;
/// How often a lost response is run, at most.
const ATTEMPTS_MAX: u32 = 3;
/// No faults happen after this time.
const CALM: Duration = Duration::from_secs(25);
/// Every response must have ended by then.
const END: Duration = Duration::from_secs(150);
/// Delay before a request without a reply is retried.
const PAUSE: Duration = Duration::from_millis(200);

/// A violated invariant.
#[derive(Debug)]
pub(crate) struct Violation {
    at: Duration,
    key: Option<ResponseKey>,
    reason: String,
}

impl Violation {
    fn new(at: Duration, key: ResponseKey, reason: impl Into<String>) -> Self {
        Self {
            at,
            key: Some(key),
            reason: reason.into(),
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let own = self.key.map_or(0, |key| key.id.own());
        write!(f, "at {:?}, response {own}: {}", self.at, self.reason)
    }
}

/// How often each situation occurred: a simulation in which nothing happens proves nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub acknowledged: u64,
    pub completed: u64,
    pub failed: u64,
    pub cancelled: u64,
    /// Deleted, or lost by a store that restarted empty.
    pub gone: u64,
    /// Leases lost.
    pub lost: u64,
    /// Taken over and run again.
    pub rerun: u64,
    pub given_up: u64,
    /// Cancelled responses whose output another replica stored.
    pub outputs_kept: u64,
    /// Released by a draining replica.
    pub released: u64,
    /// Events that readers received.
    pub told: u64,
    /// Events that readers received from a replica's memory instead of the store.
    pub told_from_memory: u64,
    /// Readers that resumed on another replica.
    pub resumed: u64,
    /// Runs that stopped without a terminal event.
    pub broken: u64,
    pub steps: u64,
}

impl Counts {
    pub(crate) fn add(&mut self, other: &Self) {
        self.acknowledged += other.acknowledged;
        self.completed += other.completed;
        self.failed += other.failed;
        self.cancelled += other.cancelled;
        self.gone += other.gone;
        self.lost += other.lost;
        self.rerun += other.rerun;
        self.given_up += other.given_up;
        self.outputs_kept += other.outputs_kept;
        self.released += other.released;
        self.told += other.told;
        self.told_from_memory += other.told_from_memory;
        self.resumed += other.resumed;
        self.broken += other.broken;
        self.steps += other.steps;
    }
}

/// Runs the simulation of this seed, with clocks that start at `begun`.
pub(crate) fn run(seed: u64, begun: Instant) -> Result<Counts, Violation> {
    Fleet::new(seed, begun).run()
}

#[derive(Debug)]
enum Event {
    /// An event at a replica, dropped if the replica has restarted since.
    At(usize, u64, ReplicaEvent),
    /// A request reaches the store.
    Arrive(usize, u64, ReplyTo, Box<StoreRequest>),
    /// A client creates, cancels or deletes the response of this number.
    Create(u128),
    Cancel(u128),
    Delete(u128),
    /// The reader of this number connects or reads on.
    Read(usize),
    Fault(Fault),
    Start(usize),
}

#[derive(Debug)]
enum ReplicaEvent {
    Lease,
    Notices,
    Scan,
    Word(ResponseKey, u64, Word),
    /// A run retries after a delay.
    Again(ResponseKey, u64, u64),
    Create(u128),
    Retry(ReplyTo, Box<StoreRequest>),
    Abort,
    Exit,
    StoreReply(ReplyTo, Box<(StoreRequest, StoreReply)>),
}

/// Who waits for a reply.
#[derive(Clone, Copy, Debug)]
enum ReplyTo {
    Heartbeat(Owner),
    Run {
        key: ResponseKey,
        serial: u64,
        asked: u64,
    },
    Notices(Owner),
    Check,
    Scan,
    TakeOver(Orphan, Owner),
    Request(ResponseKey),
    HandBack(ResponseKey),
    Create {
        number: u128,
        tries: u32,
        is_unknown: bool,
    },
    /// Deletes a response whose creation may have succeeded without a reply.
    Forget,
    Cancel {
        number: u128,
        tries: u32,
    },
    Reader {
        reader: usize,
        asked: u64,
    },
    Nobody,
}

struct Replica {
    incarnation: u64,
    is_up: bool,
    paused_until: Duration,
    is_draining: bool,
    is_aborted: bool,
    table: RunTable<Run>,
    /// Finished runs that readers still read.
    left: BTreeMap<u64, Run>,
    cursor: (Owner, NoticeCursor),
    /// Takeovers without a reply yet.
    adopting: BTreeSet<ResponseKey>,
    looks: u32,
}

struct Fleet {
    world: World<Event>,
    random: Rng,
    begun: Instant,
    leases: lease::Settings,
    store: StoreHarness,
    faults: Faults,
    replicas: Vec<Replica>,
    readers: Vec<Reader>,
    ledger: Ledger,
    /// Whether each created response streams.
    streams: BTreeMap<ResponseKey, bool>,
    /// Responses whose creation a client got confirmed.
    acknowledged: BTreeSet<ResponseKey>,
    /// Responses that two replicas run, and since when.
    doubled: BTreeMap<ResponseKey, Duration>,
    names: u64,
    counts: Counts,
}

fn key(number: u128) -> ResponseKey {
    ResponseKey {
        tenant: Tenant::tagged(number as u64 % 2),
        id: ResponseId::new(Root(number as u64), number),
    }
}

impl Fleet {
    fn new(seed: u64, begun: Instant) -> Self {
        let mut random = Rng::with_seed(seed);
        let mut keep = RetentionSettings::default();
        if random.u8(..4) == 0 {
            // Some readers come after the log has expired.
            keep.event_logs = Duration::from_secs(2);
        }
        let leases = lease::Settings::default();
        let faults = Faults::new(&mut random);
        let mut fleet = Self {
            world: World::default(),
            store: StoreHarness::new(begun, keep),
            begun,
            faults,
            replicas: Vec::new(),
            readers: Vec::new(),
            ledger: Ledger::default(),
            acknowledged: BTreeSet::new(),
            doubled: BTreeMap::new(),
            streams: BTreeMap::new(),
            names: 0,
            counts: Counts::default(),
            random,
            leases,
        };
        for at in 0..REPLICAS {
            let replica = fleet.replica(0);
            fleet.replicas.push(replica);
            fleet.start(at);
        }
        fleet.plan();
        if seed % 8 == 1 {
            // A random generator of its own, so that known seeds keep their meaning.
            let mut random = Rng::with_seed(!seed);
            for _ in 0..3 {
                let at = Duration::from_millis(random.u64(1_000..20_000));
                let fault = Fault::Break(random.usize(..REPLICAS));
                fleet.world.set(at, Event::Fault(fault));
            }
        }
        fleet
    }

    /// Schedules the clients and the faults.
    fn plan(&mut self) {
        for number in 1..=self.random.u128(1..=NUMBERS) {
            let at = self.ms(500..6_000);
            self.world.set(at, Event::Create(number));
            if self.random.u8(..3) == 0 {
                let at = at + self.ms(1..12_000);
                self.world.set(at, Event::Cancel(number));
                if self.random.bool() {
                    let again = at + self.ms(0..2_000);
                    self.world.set(again, Event::Cancel(number));
                }
            }
            if self.random.u8(..12) == 0 {
                let at = at + self.ms(1..12_000);
                self.world.set(at, Event::Delete(number));
            }
            for _ in 0..self.random.u8(0..3) {
                let at = at + self.ms(100..15_000);
                let reader = self.readers.len();
                let after = (self.random.u8(..5) == 0).then(|| self.random.u64(0..8));
                self.readers.push(Reader::new(key(number), after));
                self.world.set(at, Event::Read(reader));
            }
        }
        for (at, fault) in self.faults.timed(&mut self.random) {
            self.world.set(at, Event::Fault(fault));
        }
    }

    fn replica(&mut self, incarnation: u64) -> Replica {
        let bounds = Bounds {
            running_max: 2,
            running_per_tenant_max: 1,
        };
        let owner = self.owner();
        let now = self.instant();
        Replica {
            incarnation,
            is_up: false,
            paused_until: Duration::ZERO,
            is_draining: false,
            is_aborted: false,
            table: RunTable::new(now, bounds, &self.leases, owner),
            left: BTreeMap::new(),
            cursor: (owner, NoticeCursor::default()),
            adopting: BTreeSet::new(),
            looks: 0,
        }
    }

    fn start(&mut self, at: usize) {
        let incarnation = self.replicas[at].incarnation + 1;
        self.replicas[at] = self.replica(incarnation);
        self.replicas[at].is_up = true;
        self.later(at, 0..50, ReplicaEvent::Lease);
        self.later(at, 0..500, ReplicaEvent::Notices);
        self.later(at, 1_500..2_500, ReplicaEvent::Scan);
    }

    fn owner(&mut self) -> Owner {
        self.names += 1;
        Owner(self.names)
    }

    fn now(&self) -> Duration {
        self.world.now()
    }

    fn instant(&self) -> Instant {
        self.begun + self.world.now()
    }

    fn ms(&mut self, range: std::ops::Range<u64>) -> Duration {
        Duration::from_micros(self.random.u64(range.start * 1_000..range.end * 1_000))
    }

    /// Schedules an event at a replica after a random number of milliseconds.
    fn later(&mut self, at: usize, after: std::ops::Range<u64>, what: ReplicaEvent) {
        let when = self.now() + self.ms(after);
        let incarnation = self.replicas[at].incarnation;
        self.world.set(when, Event::At(at, incarnation, what));
    }

    fn run(mut self) -> Result<Counts, Violation> {
        let mut looked = CALM;
        while let Some(event) = self.world.next_event() {
            self.counts.steps += 1;
            trace!(now = ?self.now(), ?event);
            if self.now() > END {
                break;
            }
            self.on_event(event)?;
            if self.now() > looked {
                looked = self.now() + Duration::from_secs(1);
                if self.has_settled() {
                    break;
                }
            }
        }
        self.check_end()?;
        Ok(self.counts)
    }

    fn on_event(&mut self, event: Event) -> Result<(), Violation> {
        match event {
            Event::At(at, incarnation, what) => {
                let replica = &self.replicas[at];
                if replica.incarnation != incarnation || !replica.is_up {
                    return Ok(());
                }
                if replica.paused_until > self.now() {
                    // Delayed events arrive together, in random order.
                    let when = replica.paused_until + self.ms(0..5);
                    self.world.set(when, Event::At(at, incarnation, what));
                    return Ok(());
                }
                self.on_replica(at, what)
            }
            Event::Arrive(at, incarnation, to, ask) => self.on_arrival(at, incarnation, to, *ask),
            Event::Create(number) => {
                if let Some(at) = self.open() {
                    self.later(at, 0..10, ReplicaEvent::Create(number));
                } else {
                    let when = self.now() + Duration::from_secs(1);
                    self.world.set(when, Event::Create(number));
                }
                Ok(())
            }
            Event::Cancel(number) | Event::Delete(number)
                if !self.acknowledged.contains(&key(number)) =>
            {
                // No client knows its id yet.
                let when = self.now() + self.ms(100..900);
                if when < CALM {
                    self.world.set(when, event);
                }
                Ok(())
            }
            Event::Cancel(number) => {
                if let Some(at) = self.open() {
                    self.cancel(at, number);
                }
                Ok(())
            }
            Event::Delete(number) => {
                if let Some(at) = self.open() {
                    self.send(at, ReplyTo::Nobody, StoreRequest::Delete(key(number)));
                }
                Ok(())
            }
            Event::Read(reader) => self.on_read(reader),
            Event::Fault(fault) => self.on_fault(fault),
            Event::Start(at) => {
                self.start(at);
                Ok(())
            }
        }
    }
}
