//! A simulation of several replicas that share one response store, in virtual time and with injected faults.
//!
//! The deciding parts of background runs are the real ones: the lease, an owner's run table, a run's state, the
//! decision what to do with an orphan, a reader's position, and the memory store. Network, clients, engines and
//! faults are drawn from a seed. After each write, and each event that a reader receives, the invariants that
//! `src/ARCHITECTURE.md` lists are checked; at the end, every acknowledged response must have ended.

mod checks;
mod clients;
mod counts;
mod encoder;
mod failover;
mod faults;
mod network;
mod on_time;
mod outbox;
mod owner;
mod readers;
mod run;
mod store_harness;
mod store_request;
mod turns;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::{Duration, Instant};

use fastrand::Rng;
use tracing::trace;

use self::checks::PromisedEnd;
pub(crate) use self::counts::Counts;
use self::faults::{Fault, Faults};
use self::readers::{Ledger, Reader};
use self::run::{Run, Word};
use self::store_harness::StoreHarness;
use self::store_request::{StoreReply, StoreRequest};
use self::turns::PlainTurn;
use warmroute::ids::{ResponseId, Root, Tenant};
use warmroute::responses::background::recent_ends::RecentEnds;
use warmroute::responses::background::run_table::{Bounds, RunTable};
use warmroute::sim::world::World;
use warmroute::store::{
    IdempotencyToken, NoticeCursor, Orphan, Owner, ResponseKey, RetentionSettings, lease,
};

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

/// How the reasons of violations begin, or what they contain, that are about a text.
const TEXT: &str = "its text is";
const IN_PLACE_OF: &str = "was received in place of";

/// What is simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scenario {
    /// Replicas, network and store fail at random.
    Faults,
    /// As `Faults`; then the store fails over to a copy without its last writes, and nothing fails from there on.
    Failover,
    /// One replica after the other is killed and notices are lost, nothing else: there are limits to how long cancels
    /// and take-overs take.
    OnTime,
    /// As `Faults`, with a store of three nodes that are down at different times, and responses that are kept for some
    /// seconds after their end.
    Nodes,
    /// As `Faults`, with responses that are turns of one conversation, and clients whose plain turns come between them.
    Turns,
}

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

    /// Whether a text is not that of an unbroken run.
    pub(crate) fn is_of_text(&self) -> bool {
        self.reason.starts_with(TEXT) || self.reason.contains(IN_PLACE_OF)
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let own = self.key.map_or(0, |key| key.id.own());
        write!(f, "at {:?}, response {own}: {}", self.at, self.reason)
    }
}

/// Runs the simulation of this seed, with clocks that start at `started`.
pub(crate) fn run(scenario: Scenario, seed: u64, started: Instant) -> Result<Counts, Violation> {
    Fleet::new(scenario, seed, started).run()
}

/// As [`run`], with replicas that go on with the streams of lost ones, token for token.
pub(crate) fn run_continued(
    scenario: Scenario,
    seed: u64,
    started: Instant,
) -> Result<Counts, Violation> {
    let mut fleet = Fleet::new(scenario, seed, started);
    fleet.is_continued = true;
    fleet.run()
}

/// As [`run`], with a store that grants a lock that was lost to whoever renews it: that must be found.
pub(crate) fn run_with_lost_locks_granted(
    seed: u64,
    started: Instant,
) -> Result<Counts, Violation> {
    let mut fleet = Fleet::new(Scenario::Turns, seed, started);
    fleet.store.grants_lost_locks = true;
    fleet.run()
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
    /// The store fails over without its last writes.
    Failover(usize),
    Start(usize),
    /// A client sends the plain turn of this number.
    Turn(usize),
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
    RepeatEnds,
    /// The lock of a run's conversation is renewed.
    RenewLock(ResponseKey, u64),
    /// The next step of a plain turn.
    Turn(usize),
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
    /// A run sets up its turn in the conversation.
    SetUp {
        key: ResponseKey,
        serial: u64,
        asked: u64,
    },
    RenewLock {
        key: ResponseKey,
        serial: u64,
    },
    /// What comes before the record of a turn: the lock, and the history.
    CreateTurn(u128, IdempotencyToken),
    Turn(usize),
    NoReceiver,
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
    recent_ends: RecentEnds,
}

struct Fleet {
    scenario: Scenario,
    /// Whether replicas go on with the streams of others.
    is_continued: bool,
    /// No faults happen after this time.
    quiet_from: Duration,
    world: World<Event>,
    random: Rng,
    started: Instant,
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
    /// The ends that clients were informed of, as long as they must stay.
    promised: BTreeMap<ResponseKey, PromisedEnd>,
    /// Responses of which a failover lost writes.
    rolled_back: BTreeSet<ResponseKey>,
    /// Whether each response can be run by any replica.
    portable: BTreeMap<ResponseKey, bool>,
    /// When each response was cancelled, and when its owner was killed.
    cancelled_at: BTreeMap<ResponseKey, Duration>,
    lost_at: BTreeMap<ResponseKey, Duration>,
    names: u64,
    /// Turns of the shared conversation whose client waits for the whole answer.
    plain_turns: Vec<PlainTurn>,
    /// The response of each run of a turn.
    turn_names: BTreeMap<u64, ResponseKey>,
    counts: Counts,
}

/// Numbers of responses from here on are turns of one conversation.
const TURNS: u128 = 100;

fn key(number: u128) -> ResponseKey {
    if number > TURNS {
        // A response has the root and the tenant of its conversation.
        return ResponseKey {
            tenant: Tenant::tagged(0),
            id: ResponseId::new(Root(TURNS as u64), number),
        };
    }
    ResponseKey {
        tenant: Tenant::tagged(number as u64 % 2),
        id: ResponseId::new(Root(number as u64), number),
    }
}

impl Fleet {
    fn new(scenario: Scenario, seed: u64, started: Instant) -> Self {
        let mut random = Rng::with_seed(seed);
        let mut keep = RetentionSettings::default();
        if random.u8(..4) == 0 {
            // Some readers come after the log has expired.
            keep.event_logs = Duration::from_secs(2);
        }
        let leases = lease::Settings::default();
        let faults = Faults::new(&mut random);
        if scenario == Scenario::Nodes {
            keep.ephemeral = Duration::from_secs(4);
        }
        let mut fleet = Self {
            scenario,
            is_continued: false,
            quiet_from: CALM,
            promised: BTreeMap::new(),
            rolled_back: BTreeSet::new(),
            portable: BTreeMap::new(),
            cancelled_at: BTreeMap::new(),
            lost_at: BTreeMap::new(),
            world: World::default(),
            store: StoreHarness::new(started, keep, scenario),
            started,
            faults,
            replicas: Vec::new(),
            readers: Vec::new(),
            ledger: Ledger::default(),
            acknowledged: BTreeSet::new(),
            doubled: BTreeMap::new(),
            streams: BTreeMap::new(),
            names: 0,
            plain_turns: Vec::new(),
            turn_names: BTreeMap::new(),
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
        if scenario == Scenario::Failover {
            let mut random = Rng::with_seed(!seed);
            let at = Duration::from_millis(random.u64(3_000..20_000));
            let lost = random.usize(1..10);
            fleet.world.set(at, Event::Failover(lost));
        }
        if seed % 8 == 1 && scenario == Scenario::Faults {
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
        let first = self.first_number();
        for number in first..first + self.random.u128(1..=NUMBERS) {
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
            if self.scenario != Scenario::OnTime {
                self.world.set(at, Event::Fault(fault));
            }
        }
        self.plan_turns();
        self.plan_kills();
        self.plan_nodes();
    }

    /// The least number of a response.
    fn first_number(&self) -> u128 {
        match self.scenario {
            Scenario::Turns => TURNS + 1,
            _ => 1,
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
            recent_ends: RecentEnds::default(),
        }
    }

    fn start(&mut self, at: usize) {
        let incarnation = self.replicas[at].incarnation + 1;
        self.replicas[at] = self.replica(incarnation);
        self.replicas[at].is_up = true;
        self.later(at, 0..50, ReplicaEvent::Lease);
        self.later(at, 0..500, ReplicaEvent::Notices);
        self.later(at, 1_500..2_500, ReplicaEvent::Scan);
        if self.scenario == Scenario::Failover {
            self.later(at, 1_000..1_001, ReplicaEvent::RepeatEnds);
        }
    }

    fn owner(&mut self) -> Owner {
        self.names += 1;
        Owner(self.names)
    }

    fn now(&self) -> Duration {
        self.world.now()
    }

    fn instant(&self) -> Instant {
        self.started + self.world.now()
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
            Event::Cancel(_) | Event::Delete(_) if self.has_failed_over() => {
                // The promise is about the first end.
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
                    self.send(at, ReplyTo::NoReceiver, StoreRequest::Delete(key(number)));
                }
                Ok(())
            }
            Event::Read(reader) => self.on_read(reader),
            Event::Failover(lost) => self.on_failover(lost),
            Event::Fault(fault) => self.on_fault(fault),
            Event::Start(at) => {
                self.start(at);
                Ok(())
            }
            Event::Turn(turn) => {
                self.begin_turn(turn);
                Ok(())
            }
        }
    }
}
