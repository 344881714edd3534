//! An engine that fails in every way it can, a source that notices late, and what must hold all along.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use crate::kv::source::DecodeError;
use crate::kv::stream::digests::DigestWindow;
use crate::kv::stream::*;

mod checks;
mod make;
mod response;

pub(super) use make::Make;

/// What a batch carries here: what it does to the cache of one process.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Payload {
    process: usize,
    /// As of this batch.
    index: u64,
    /// All blocks are removed before others are stored.
    clears: bool,
    stored: BTreeSet<u8>,
    removed: BTreeSet<u8>,
}

/// One life of the engine.
#[derive(Debug, Default)]
struct Process {
    frames: Vec<SourceBatch<Payload>>,
    /// What it held after each batch.
    held: Vec<BTreeSet<u8>>,
    has_unreadable: bool,
}

impl Process {
    fn count(&self) -> u64 {
        self.frames.len() as u64
    }

    fn held_after(&self, index: u64) -> &BTreeSet<u8> {
        &self.held[index as usize]
    }
}

#[derive(Clone, Debug)]
enum SourceEvent {
    Live(SourceBatch<Payload>),
    Replayed(SourceBatch<Payload>),
    End,
    Failed,
}

#[derive(Debug)]
struct Connection {
    process: usize,
    live: VecDeque<SourceEvent>,
    answers: VecDeque<SourceEvent>,
    request: Option<u64>,
    /// The other end is gone, or the line; the source does not know yet.
    is_dead: bool,
    /// One stream: a call is open.
    is_open: bool,
    /// One stream, without snapshots: the next live batch is the first of an answer.
    awaits_first: bool,
}

pub(super) struct World {
    make: Make,
    random: fastrand::Rng,
    now: Instant,
    processes: Vec<Process>,
    connection: Option<Connection>,
    witness_due: bool,
    faults: bool,
    in_deaf_spell: bool,
    pub(super) stream: EventStream<Payload>,
    tree_requested: bool,
    /// Another replica's tree: of which process, after which batch, and what is in it.
    offered: Option<(usize, u64, BTreeSet<u8>)>,
    tree: BTreeMap<usize, BTreeSet<u8>>,
    /// The last batch applied of each process since all was forgotten.
    applied: BTreeMap<usize, u64>,
    last_applied: Option<(usize, u64)>,
    pub(super) log: Vec<String>,
}

impl World {
    pub(super) fn new(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let rates = [0, 0, 3, 15];
        let mut rate = || rates[random.usize(..rates.len())];
        let (lost, repeated, swapped, spoilt) = (rate(), rate(), rate(), rate());
        let is_one_stream = random.u8(..3) == 0;
        let make = Make {
            can_replay: random.u8(..5) != 0,
            is_deaf: random.u8(..8) == 0,
            has_deaf_spells: random.u8(..4) == 0,
            kept: [3, 10, 1_000, 1_000][random.usize(..4)],
            answer_max: [None, None, Some(3), Some(20)][random.usize(..4)],
            is_one_stream,
            has_snapshots: random.bool(),
            has_epoch: is_one_stream && random.bool(),
            is_sloppy: random.u8(..4) == 0,
            has_peers: random.bool(),
            lost,
            repeated,
            swapped: if is_one_stream { 0 } else { swapped },
            unreadable: [0, 0, 0, 3][random.usize(..4)],
            spoilt,
            held_max: [2, 8, 1_000][random.usize(..3)],
            digests_max: [2, 8, 500][random.usize(..3)],
        };
        Self::made(make, random)
    }

    pub(super) fn made(make: Make, random: fastrand::Rng) -> Self {
        let now = crate::observe::now();
        let settings = Settings {
            max_queued_batches: make.held_max,
            ..Settings::default()
        };
        let mut stream = EventStream::new(settings, now);
        stream.digests = DigestWindow::new(make.digests_max);
        if make.has_peers {
            stream = stream.with_peer_trees(Duration::from_secs(10));
        }
        Self {
            make,
            random,
            now,
            processes: vec![Process::default()],
            connection: None,
            witness_due: false,
            faults: true,
            in_deaf_spell: false,
            stream,
            tree_requested: false,
            offered: None,
            tree: BTreeMap::new(),
            applied: BTreeMap::new(),
            last_applied: None,
            log: vec![format!("{make:?}")],
        }
    }

    fn hits(&mut self, percent: u8) -> bool {
        self.faults && self.random.u8(..100) < percent
    }

    fn alive(&self) -> usize {
        self.processes.len() - 1
    }

    /// Another replica gives what it has: of this process or one before, newer or older than what is known here, whole
    /// or in part; or none of them has anything.
    fn offer(&mut self) {
        self.tree_requested = false;
        let alive = self.alive();
        let process = match self.random.u8(..3) {
            0 => self.random.usize(..=alive),
            _ => alive,
        };
        let count = self.processes[process].count();
        if count == 0 || self.random.u8(..5) == 0 {
            self.log.push("no tree".to_owned());
            return self.no_tree();
        }
        let index = count - 1 - self.random.u64(..count.min(12));
        let frame = &self.processes[process].frames[index as usize];
        let mut held = self.processes[process].held_after(index).clone();
        let is_complete = self.random.bool();
        if !is_complete {
            held.pop_first();
        }
        let tree = PeerTree {
            sequence: index,
            digest: frame.digest,
            is_complete,
            incarnation: self.make.has_epoch.then(|| process.to_string()),
        };
        self.log
            .push(format!("tree of {process}:{index}, whole: {is_complete}"));
        self.offered = Some((process, index, held));
        match self.stream.on_peer_tree(self.now, &tree) {
            Ok(steps) => self.done(steps),
            Err(refusal) => {
                self.log.push(format!("  refused: {}", refusal.as_str()));
                // The next replica's may come.
                self.tree_requested = self.random.bool();
                if !self.tree_requested {
                    self.no_tree();
                }
            }
        }
    }

    fn no_tree(&mut self) {
        let steps = self.stream.on_no_peer_tree(self.now);
        // Otherwise nothing was received, and so nothing can be known better than before.
        if !steps.is_empty() {
            self.done(steps);
        }
    }

    /// Anything that can happen, happens.
    pub(super) fn step(&mut self) {
        match self.random.u8(..100) {
            0..30 => self.publish(),
            30..60 => self.say_live(),
            60..75 => self.say_answer(),
            75..84 => self.response(),
            84..90 => self.connect(),
            90..93 => self.tick(),
            93..95 => self.witness(),
            95..97 => self.notice(),
            97 if self.make.has_deaf_spells => {
                self.in_deaf_spell = !self.in_deaf_spell;
                self.log.push(format!("deaf: {}", self.in_deaf_spell));
            }
            97 => self.cut(),
            98 => self.restart(),
            99 if self.make.has_peers => self.offer(),
            _ if self.make.has_peers && self.tree_requested => self.offer(),
            _ => self.now += Duration::from_millis(self.random.u64(..2_000)),
        }
    }

    fn publish(&mut self) {
        let process = self.alive();
        let index = self.processes[process].count();
        let before = self.processes[process].held.last().cloned();
        let mut held = before.unwrap_or_default();
        let clears = self.hits(4);
        if clears {
            held.clear();
        }
        let (mut stored, mut removed) = (BTreeSet::new(), BTreeSet::new());
        for _ in 0..self.random.u8(1..4) {
            let block = self.random.u8(..6);
            if held.contains(&block) {
                if stored.contains(&block) {
                    continue;
                }
                held.remove(&block);
                removed.insert(block);
            } else if !removed.contains(&block) {
                held.insert(block);
                stored.insert(block);
            }
        }
        let is_unreadable = self.hits(self.make.unreadable);
        let payload = Payload {
            process,
            index,
            clears,
            stored,
            removed,
        };
        let frame = SourceBatch {
            sequence: index,
            digest: (process as u128) << 64 | u128::from(index),
            bytes: 10,
            snapshot: None,
            batch: if is_unreadable {
                Err(DecodeError("no map".to_owned()))
            } else {
                Ok(payload)
            },
        };
        self.processes[process].has_unreadable |= is_unreadable;
        self.processes[process].frames.push(frame.clone());
        self.processes[process].held.push(held);
        self.log.push(format!("publish {process}:{index}"));
        let (is_lost, is_repeated, is_swapped) = (
            self.hits(self.make.lost),
            self.hits(self.make.repeated),
            self.hits(self.make.swapped),
        );
        let is_one_stream = self.make.is_one_stream;
        let Some(line) = &mut self.connection else {
            return;
        };
        if line.process != process || line.is_dead || is_lost || (is_one_stream && !line.is_open) {
            return;
        }
        if std::mem::take(&mut line.awaits_first) {
            line.live.push_back(SourceEvent::Replayed(frame));
            line.live.push_back(SourceEvent::End);
            return;
        }
        line.live.push_back(SourceEvent::Live(frame.clone()));
        if is_repeated {
            line.live.push_back(SourceEvent::Live(frame));
        }
        if is_swapped && line.live.len() > 1 {
            let last = line.live.len() - 1;
            line.live.swap(last, last - 1);
        }
    }

    fn restart(&mut self) {
        let before = self.processes[self.alive()].count();
        self.processes.push(Process::default());
        if let Some(line) = &mut self.connection {
            line.is_dead = true;
        }
        self.witness_due = true;
        self.log.push(format!("restart as {}", self.alive()));
        // Below, at or above the old counter, before anyone notices.
        let target = match self.random.u8(..4) {
            0 => 0,
            1 => before,
            2 => before + self.random.u64(..3),
            _ => self.random.u64(..=before),
        };
        for _ in 0..target {
            self.publish();
        }
    }

    fn cut(&mut self) {
        if let Some(line) = &mut self.connection {
            self.log.push("cut".to_owned());
            line.is_dead = true;
        }
    }

    /// The source notices that its connection ended; what was not said yet may be lost.
    fn notice(&mut self) {
        let drops = self.random.bool();
        let Some(line) = &self.connection else {
            return;
        };
        if line.is_dead && (line.live.is_empty() || drops) {
            self.connection = None;
            self.log.push("lost".to_owned());
            let steps = self.stream.on_disconnected(self.now);
            self.done(steps);
        }
    }

    fn connect(&mut self) {
        if self.connection.is_some() {
            return;
        }
        let process = self.alive();
        self.connection = Some(Connection {
            process,
            live: VecDeque::new(),
            answers: VecDeque::new(),
            request: None,
            is_dead: false,
            is_open: !self.make.can_replay,
            awaits_first: false,
        });
        let incarnation = self.make.has_epoch.then(|| process.to_string());
        self.log.push(format!("connected to {process}"));
        let steps =
            self.stream
                .on_connected(self.now, incarnation.as_deref(), self.make.can_replay);
        self.done(steps);
    }

    fn witness(&mut self) {
        if std::mem::take(&mut self.witness_due) {
            self.log.push("restart_signal".to_owned());
            let steps = self.stream.on_restart_signal(self.now);
            self.done(steps);
        }
    }

    fn tick(&mut self) {
        if let Some(at) = self.stream.next_timeout() {
            self.now = self.now.max(at);
            self.log.push("timeout".to_owned());
            let steps = self.stream.on_timeout(self.now);
            self.done(steps);
        }
    }

    fn say_live(&mut self) {
        if let Some(said) = self
            .connection
            .as_mut()
            .and_then(|line| line.live.pop_front())
        {
            self.say(said);
        }
    }

    fn say_answer(&mut self) {
        if let Some(said) = self
            .connection
            .as_mut()
            .and_then(|line| line.answers.pop_front())
        {
            self.say(said);
        }
    }

    fn say(&mut self, said: SourceEvent) {
        let name = |frame: &SourceBatch<Payload>| {
            let process = frame.digest >> 64;
            format!("{process}:{} {:?}", frame.sequence, frame.snapshot)
        };
        let steps = match said {
            SourceEvent::Live(frame) => {
                self.log.push(format!("live {}", name(&frame)));
                self.stream.on_live(self.now, frame)
            }
            SourceEvent::Replayed(frame) => {
                self.log.push(format!("replayed {}", name(&frame)));
                self.stream.on_replayed(self.now, frame)
            }
            SourceEvent::End => {
                self.log.push("replay end".to_owned());
                self.stream.on_replay_end(self.now)
            }
            SourceEvent::Failed => {
                self.log.push("replay failed".to_owned());
                self.stream.on_replay_failed(self.now)
            }
        };
        self.done(steps);
    }

    fn done(&mut self, steps: Steps<Payload>) {
        let mut is_whole = false;
        for step in steps {
            match step {
                Step::Apply {
                    payload,
                    is_snapshot,
                    ..
                } => {
                    is_whole |= payload.clears && !is_snapshot;
                    let held = self.tree.entry(payload.process).or_default();
                    held.retain(|block| !payload.clears && !payload.removed.contains(block));
                    held.extend(&payload.stored);
                    self.applied.insert(payload.process, payload.index);
                    self.last_applied = Some((payload.process, payload.index));
                }
                Step::RequestPeerTree => {
                    self.log.push("  ask for a tree".to_owned());
                    self.tree_requested = true;
                }
                Step::TakePeerTree => {
                    is_whole = false;
                    let (process, index, held) = self.offered.clone().expect("one was offered");
                    self.tree = BTreeMap::from([(process, held)]);
                    self.applied = BTreeMap::from([(process, index)]);
                    self.last_applied = Some((process, index));
                }
                Step::Clear(reason) => {
                    is_whole = false;
                    self.log.push(format!("  clear: {}", reason.as_str()));
                    self.tree.clear();
                    self.applied.clear();
                }
                Step::RequestReplay { first } => {
                    self.log.push(format!("  ask {first}"));
                    let line = self
                        .connection
                        .as_mut()
                        .expect("asked only while connected");
                    line.request = Some(first);
                    if !self.make.is_sloppy {
                        line.answers.clear();
                    }
                    if self.make.is_one_stream {
                        line.live.clear();
                        line.is_open = false;
                    }
                }
            }
        }
        if is_whole {
            self.stream.on_engine_cleared();
        }
        self.log.push(format!(
            "  {} last {:?} tree {:?}",
            self.stream.state().as_str(),
            self.stream.last_sequence(),
            self.tree
        ));
        self.check();
    }
}
