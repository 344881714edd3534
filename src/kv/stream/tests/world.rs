//! An engine that fails in every way it can, a source that notices late, and what must hold all along.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use crate::kv::source::SnapshotChunk;
use crate::kv::stream::digests::DigestWindow;
use crate::kv::stream::*;

/// What a batch carries here: what it does to the cache of one process.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Payload {
    process: usize,
    /// As of this batch.
    index: u64,
    stored: BTreeSet<u8>,
    removed: BTreeSet<u8>,
}

/// One life of the engine.
#[derive(Debug, Default)]
struct Process {
    frames: Vec<Sequenced<Payload>>,
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
    Live(Sequenced<Payload>),
    Replayed(Sequenced<Payload>),
    End,
    Failed,
}

/// How the engine and the source are made; fixed for one run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Make {
    pub(super) can_replay: bool,
    /// Questions are never answered.
    pub(super) is_deaf: bool,
    /// Now and then, none is for a while.
    pub(super) has_deaf_spells: bool,
    /// Batches kept for replays.
    pub(super) kept: u64,
    /// An answer has no more batches than this, and then no end; or all but some, and then no end.
    pub(super) answer_max: Option<usize>,
    /// An answer is the start of a new live stream.
    pub(super) is_one_stream: bool,
    pub(super) has_snapshots: bool,
    pub(super) has_epoch: bool,
    /// Half an old answer may come before a new one.
    pub(super) is_sloppy: bool,
    /// Other replicas give their trees, asked or not.
    pub(super) has_peers: bool,
    /// Of a hundred: batches lost, repeated, swapped, unreadable; answers spoilt.
    pub(super) lost: u8,
    pub(super) repeated: u8,
    pub(super) swapped: u8,
    pub(super) unreadable: u8,
    pub(super) spoilt: u8,
    pub(super) held_max: usize,
    pub(super) digests_max: usize,
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
    /// or in part; or nobody has anything.
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
        // Otherwise nothing was heard, and so nothing can be known better than before.
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
            stored,
            removed,
        };
        let frame = Sequenced {
            sequence: index,
            digest: (process as u128) << 64 | u128::from(index),
            bytes: 10,
            snapshot: None,
            payload: (!is_unreadable).then_some(payload),
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
        if let Some(said) = self.connection.as_mut().and_then(|it| it.live.pop_front()) {
            self.say(said);
        }
    }

    fn say_answer(&mut self) {
        if let Some(said) = self
            .connection
            .as_mut()
            .and_then(|it| it.answers.pop_front())
        {
            self.say(said);
        }
    }

    fn say(&mut self, said: SourceEvent) {
        let name = |frame: &Sequenced<Payload>| {
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

    /// Whoever is alive now answers, which need not be whom the connection is to.
    fn response(&mut self) {
        let alive = self.alive();
        let spoils = self.hits(self.make.spoilt);
        let how = self.random.u8(..5);
        let make = self.make;
        let is_deaf = make.is_deaf || self.in_deaf_spell;
        let Some(line) = &mut self.connection else {
            return;
        };
        let Some(first) = line.request.take() else {
            return;
        };
        let process = &self.processes[alive];
        if is_deaf && !make.is_one_stream {
            return;
        }
        let oldest = process.count().saturating_sub(make.kept);
        if make.is_one_stream {
            self.log.push(format!("stream of {alive} from {first}"));
            line.live.clear();
            line.process = alive;
            line.is_dead = false;
            line.is_open = true;
            line.awaits_first = false;
            if first == 0 && make.has_snapshots && process.count() > 0 {
                for (place, chunk) in snapshot(process, alive).into_iter().enumerate() {
                    if place == 0 {
                        line.live.push_back(SourceEvent::Replayed(chunk));
                        line.live.push_back(SourceEvent::End);
                    } else {
                        line.live.push_back(SourceEvent::Live(chunk));
                    }
                }
            } else if first == 0 {
                line.awaits_first = true;
            } else if is_deaf || first < oldest || first > process.count() || spoils {
                line.is_open = false;
                line.live.push_back(SourceEvent::Failed);
            } else {
                let mut frames = process.frames[first as usize..].iter().cloned();
                match frames.next() {
                    Some(frame) => {
                        line.live.push_back(SourceEvent::Replayed(frame));
                        line.live.push_back(SourceEvent::End);
                        line.live.extend(frames.map(SourceEvent::Live));
                    }
                    None => line.awaits_first = true,
                }
            }
            return;
        }
        let mut said: Vec<SourceEvent> = process.frames
            [(first.max(oldest).min(process.count())) as usize..]
            .iter()
            .cloned()
            .map(SourceEvent::Replayed)
            .collect();
        match make.answer_max {
            Some(max) if said.len() > max => {
                // What did not fit into the socket's queue, or some of it, and the end.
                let until = [said.len(), max + 2][usize::from(how % 2)].min(said.len());
                said.drain(max..until);
            }
            Some(_) | None => said.push(SourceEvent::End),
        }
        if spoils && !said.is_empty() {
            let place = self.random.usize(..said.len());
            match how {
                0 => said.truncate(place),
                1 => {
                    said.truncate(place);
                    said.push(SourceEvent::End);
                }
                2 => {
                    said.truncate(place);
                    said.push(SourceEvent::Failed);
                }
                3 if said.len() > 2 => {
                    said.remove(place.min(said.len() - 2));
                }
                _ => said.clear(),
            }
        }
        line.answers.extend(said);
        self.log.push(format!("{alive} answers from {first}"));
    }

    fn done(&mut self, steps: Steps<Payload>) {
        for step in steps {
            match step {
                Step::Apply { payload, .. } => {
                    let held = self.tree.entry(payload.process).or_default();
                    held.retain(|block| !payload.removed.contains(block));
                    held.extend(&payload.stored);
                    self.applied.insert(payload.process, payload.index);
                    self.last_applied = Some((payload.process, payload.index));
                }
                Step::RequestPeerTree => {
                    self.log.push("  ask for a tree".to_owned());
                    self.tree_requested = true;
                }
                Step::TakePeerTree => {
                    let (process, index, held) = self.offered.clone().expect("one was offered");
                    self.tree = BTreeMap::from([(process, held)]);
                    self.applied = BTreeMap::from([(process, index)]);
                    self.last_applied = Some((process, index));
                }
                Step::Clear(reason) => {
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
        self.log.push(format!(
            "  {} last {:?} tree {:?}",
            self.stream.state().as_str(),
            self.stream.last_sequence(),
            self.tree
        ));
        self.check();
    }

    fn check(&self) {
        for (process, held) in &self.tree {
            let last = self.applied[process];
            let truth = self.processes[*process].held_after(last);
            self.assert(
                held.is_subset(truth),
                "holds what the engine did not hold after the last batch applied",
            );
        }
        let (held, _) = self.stream.buffered();
        self.assert(held <= self.make.held_max.max(1), "holds back too many");
        if !self.stream.state().counts_in_routing() {
            return;
        }
        let Some(line) = &self.connection else {
            self.assert(false, "scores without a connection");
            return;
        };
        let blocks = self.tree.iter().filter(|(_, held)| !held.is_empty());
        for (process, _) in blocks {
            self.assert(
                *process >= line.process,
                "scores blocks of a process that the connection has seen the end of",
            );
        }
        if self.stream.state() == State::Live
            && let Some((process, index)) = self.last_applied
        {
            let is_alone = self.tree.keys().all(|it| *it == process);
            let truth = self.processes[process].held_after(index);
            self.assert(
                !is_alone || self.tree.get(&process) == Some(truth),
                "claims to know all and does not",
            );
        }
    }

    /// No more faults: it must come to what the engine holds; after one more restart to all of it, where
    /// the source tells it.
    pub(super) fn settle(&mut self) {
        self.faults = false;
        self.in_deaf_spell = false;
        self.log.push("no more faults".to_owned());
        self.calm_down();
        self.restart();
        self.calm_down();
        let make = self.make;
        let tells_all = if make.is_one_stream {
            make.has_snapshots
        } else {
            !make.is_deaf && make.kept > 100
        };
        self.assert(
            !(tells_all && make.can_replay && !make.is_sloppy)
                || self.stream.state() == State::Live,
            "does not come to know all",
        );
    }

    fn calm_down(&mut self) {
        for _ in 0..12 {
            self.publish();
            for _ in 0..8 {
                self.calm();
            }
        }
        let process = self.alive();
        let newest = self.processes[process].count() - 1;
        self.assert(
            self.stream.last_sequence() == Some(newest),
            "is not up to date",
        );
        self.assert(self.stream.state().counts_in_routing(), "does not score");
        let truth = self.processes[process].held_after(newest);
        let empty = BTreeSet::new();
        let known = self.tree.get(&process).unwrap_or(&empty);
        self.assert(known.is_subset(truth), "holds too much in the end");
        self.assert(
            self.tree.keys().all(|it| *it == process),
            "holds a dead process's blocks in the end",
        );
        if self.stream.state() == State::Live {
            self.assert(known == truth, "claims to know all in the end");
        }
    }

    fn calm(&mut self) {
        if self.connection.as_ref().is_some_and(|line| line.is_dead) {
            while self
                .connection
                .as_ref()
                .is_some_and(|it| !it.live.is_empty())
            {
                self.say_live();
            }
            self.notice();
        }
        self.connect();
        for _ in 0..4 {
            self.response();
            while self
                .connection
                .as_ref()
                .is_some_and(|it| !it.answers.is_empty())
            {
                self.say_answer();
            }
            while self
                .connection
                .as_ref()
                .is_some_and(|it| !it.live.is_empty())
            {
                self.say_live();
            }
        }
        self.witness();
        if std::mem::take(&mut self.tree_requested) {
            self.no_tree();
        }
        self.tick();
    }

    #[track_caller]
    fn assert(&self, holds: bool, what: &str) {
        if !holds {
            let start = self.log.len().saturating_sub(120);
            panic!("{what}\n{}\n{}", self.log[0], self.log[start..].join("\n"));
        }
    }
}

/// Two chunks that end at the number of the newest batch, where there is room for two numbers.
fn snapshot(process: &Process, number: usize) -> Vec<Sequenced<Payload>> {
    let newest = process.count() - 1;
    let held: Vec<u8> = process.held_after(newest).iter().copied().collect();
    let count = if newest > 0 { 2 } else { 1 };
    let parts = [&held[..held.len() / 2], &held[held.len() / 2..]];
    (0..count)
        .map(|index| {
            let stored = if count == 1 { &held[..] } else { parts[index] };
            Sequenced {
                sequence: newest + 1 + index as u64 - count as u64,
                digest: u128::MAX - index as u128,
                bytes: 10,
                snapshot: Some(SnapshotChunk {
                    index: index as u32,
                    count: count as u32,
                    unknown_before: 0,
                }),
                payload: Some(Payload {
                    process: number,
                    index: newest,
                    stored: stored.iter().copied().collect(),
                    removed: BTreeSet::new(),
                }),
            }
        })
        .collect()
}
