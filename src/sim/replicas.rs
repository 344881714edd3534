//! Replicas over one store in virtual time, with what goes wrong between them: what decides about
//! background work is the real thing (the lease, an owner's table, a run's course, the plan for what was
//! lost, a reader's place, and the store in memory); network, clients, engines and faults are drawn from a
//! seed. After each write and each word that a reader is told it is looked whether what must always be true
//! still is (`src/ARCHITECTURE.md` lists it), and at the end whether all that was acknowledged has ended.

mod checks;
mod clients;
mod faults;
mod network;
mod owner;
mod readers;
mod run;
mod shop;
mod voice;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::{Duration, Instant};

use fastrand::Rng;
use tracing::trace;

use self::faults::{Fault, Faults};
use self::readers::{Ledger, Reader};
use self::run::{Run, Word};
use self::shop::{Ask, Said, Shop};
use super::world::World;
use crate::ids::{ResponseId, Root, Tenant};
use crate::responses::background::run_table::{Bounds, RunTable};
use crate::store::{Keep, NoticeCursor, Orphan, Owner, ResponseKey, lease};

const REPLICAS: usize = 3;
/// Responses at most.
const NUMBERS: u128 = 3;
/// A lost response is begun again so often.
const ATTEMPTS_MAX: u32 = 3;
/// Nothing goes wrong any more from here on.
const CALM: Duration = Duration::from_secs(25);
/// By then all must have ended.
const END: Duration = Duration::from_secs(150);
/// Before what the store did not answer is asked again.
const PAUSE: Duration = Duration::from_millis(200);

/// What a seed has broken.
#[derive(Debug)]
pub struct Broken {
    at: Duration,
    key: Option<ResponseKey>,
    reason: String,
}

impl Broken {
    fn new(at: Duration, key: ResponseKey, reason: impl Into<String>) -> Self {
        Self {
            at,
            key: Some(key),
            reason: reason.into(),
        }
    }
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let own = self.key.map_or(0, |key| key.id.own());
        write!(f, "at {:?}, response {own}: {}", self.at, self.reason)
    }
}

/// What a seed has met: a simulation in which nothing happens proves nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Met {
    pub acknowledged: u64,
    pub completed: u64,
    pub failed: u64,
    pub cancelled: u64,
    /// Forgotten by a store that restarted empty, or deleted.
    pub gone: u64,
    /// Leases that were lost.
    pub lost: u64,
    /// Taken over and begun again, or failed.
    pub rerun: u64,
    pub given_up: u64,
    /// Handed back by a replica that stopped.
    pub released: u64,
    /// Events that readers were told.
    pub told: u64,
    /// Of them from a replica's memory.
    pub told_from_memory: u64,
    /// Readers that went on elsewhere.
    pub resumed: u64,
    /// Runs that ended without an end.
    pub broken: u64,
    pub steps: u64,
}

impl Met {
    pub fn add(&mut self, other: &Self) {
        self.acknowledged += other.acknowledged;
        self.completed += other.completed;
        self.failed += other.failed;
        self.cancelled += other.cancelled;
        self.gone += other.gone;
        self.lost += other.lost;
        self.rerun += other.rerun;
        self.given_up += other.given_up;
        self.released += other.released;
        self.told += other.told;
        self.told_from_memory += other.told_from_memory;
        self.resumed += other.resumed;
        self.broken += other.broken;
        self.steps += other.steps;
    }
}

/// One run of the world that `seed` makes, by clocks that begin at `begun`.
pub fn run(seed: u64, begun: Instant) -> Result<Met, Broken> {
    Fleet::new(seed, begun).run()
}

#[derive(Debug)]
enum Event {
    /// Something at a replica, if it still lives that life.
    At(usize, u64, What),
    /// A question reaches the store.
    Arrive(usize, u64, To, Box<Ask>),
    /// A client begins, cancels or deletes the response of this number.
    Create(u128),
    Cancel(u128),
    Delete(u128),
    /// A reader of this number.
    Read(usize),
    Fault(Fault),
    Start(usize),
}

#[derive(Debug)]
enum What {
    Lease,
    Notices,
    Sweep,
    Word(ResponseKey, u64, Word),
    /// A run goes on after a pause.
    Again(ResponseKey, u64, u64),
    Create(u128),
    Retry(To, Box<Ask>),
    Abort,
    Exit,
    Said(To, Box<(Ask, Said)>),
}

/// Who waits for an answer.
#[derive(Clone, Copy, Debug)]
enum To {
    Beat(Owner),
    Run {
        key: ResponseKey,
        serial: u64,
        asked: u64,
    },
    Notices(Owner),
    Check,
    Sweep,
    Adopt(Orphan, Owner),
    HandBack(ResponseKey),
    Create {
        number: u128,
        tries: u32,
        is_unknown: bool,
    },
    /// What may have been begun, and nobody was told of.
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
    life: u64,
    is_up: bool,
    paused_until: Duration,
    is_draining: bool,
    is_aborted: bool,
    table: RunTable<Run>,
    /// Runs that are over, for readers that came before.
    left: BTreeMap<u64, Run>,
    cursor: (Owner, NoticeCursor),
    /// Asked to be adopted, and not answered.
    adopting: BTreeSet<ResponseKey>,
    looks: u32,
}

struct Fleet {
    world: World<Event>,
    random: Rng,
    begun: Instant,
    leases: lease::Settings,
    shop: Shop,
    faults: Faults,
    replicas: Vec<Replica>,
    readers: Vec<Reader>,
    ledger: Ledger,
    /// Whether each response that was begun streams.
    streams: BTreeMap<ResponseKey, bool>,
    /// Whose clients were told.
    acknowledged: BTreeSet<ResponseKey>,
    names: u64,
    met: Met,
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
        let mut keep = Keep::default();
        if random.u8(..4) == 0 {
            // Readers come after the log is gone.
            keep.log_ttl_s = 2;
        }
        let leases = lease::Settings::default();
        let faults = Faults::new(&mut random);
        let mut fleet = Self {
            world: World::new(),
            shop: Shop::new(begun, keep),
            begun,
            faults,
            replicas: Vec::new(),
            readers: Vec::new(),
            ledger: Ledger::default(),
            acknowledged: BTreeSet::new(),
            streams: BTreeMap::new(),
            names: 0,
            met: Met::default(),
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
            // Drawn from elsewhere: seeds that have found something find it still.
            let mut random = Rng::with_seed(!seed);
            for _ in 0..3 {
                let at = Duration::from_millis(random.u64(1_000..20_000));
                let fault = Fault::Break(random.usize(..REPLICAS));
                fleet.world.set(at, Event::Fault(fault));
            }
        }
        fleet
    }

    /// What clients and faults will do.
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

    fn replica(&mut self, life: u64) -> Replica {
        let bounds = Bounds {
            running_max: 2,
            running_per_tenant_max: 2,
        };
        let owner = self.owner();
        let now = self.instant();
        Replica {
            life,
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
        let life = self.replicas[at].life + 1;
        self.replicas[at] = self.replica(life);
        self.replicas[at].is_up = true;
        self.later(at, 0..50, What::Lease);
        self.later(at, 0..500, What::Notices);
        self.later(at, 1_500..2_500, What::Sweep);
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

    /// Something at this life of a replica, after so many milliseconds.
    fn later(&mut self, at: usize, after: std::ops::Range<u64>, what: What) {
        let when = self.now() + self.ms(after);
        let life = self.replicas[at].life;
        self.world.set(when, Event::At(at, life, what));
    }

    fn run(mut self) -> Result<Met, Broken> {
        let mut looked = CALM;
        while let Some(event) = self.world.next() {
            self.met.steps += 1;
            trace!(now = ?self.now(), ?event);
            if self.now() > END {
                break;
            }
            self.on_event(event)?;
            if self.now() > looked {
                looked = self.now() + Duration::from_secs(1);
                if self.is_settled() {
                    break;
                }
            }
        }
        self.settled()?;
        Ok(self.met)
    }

    fn on_event(&mut self, event: Event) -> Result<(), Broken> {
        match event {
            Event::At(at, life, what) => {
                let replica = &self.replicas[at];
                if replica.life != life || !replica.is_up {
                    return Ok(());
                }
                if replica.paused_until > self.now() {
                    // All that waited comes at once, in no order.
                    let when = replica.paused_until + self.ms(0..5);
                    self.world.set(when, Event::At(at, life, what));
                    return Ok(());
                }
                self.on_replica(at, what)
            }
            Event::Arrive(at, life, to, ask) => self.on_arrival(at, life, to, *ask),
            Event::Create(number) => {
                if let Some(at) = self.open() {
                    self.later(at, 0..10, What::Create(number));
                } else {
                    let when = self.now() + Duration::from_secs(1);
                    self.world.set(when, Event::Create(number));
                }
                Ok(())
            }
            Event::Cancel(number) | Event::Delete(number)
                if !self.acknowledged.contains(&key(number)) =>
            {
                // Nobody knows its name yet.
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
                    self.send(at, To::Nobody, Ask::Delete(key(number)));
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
