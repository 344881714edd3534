//! The order and the identity of one rank's batches: what may be applied, and until when it may be
//! believed.
//!
//! Numbers alone cannot tell a restarted engine from one that went on, so whenever there is a doubt the
//! source is asked for the last batch that was applied: only the process that published it can repeat
//! it to the byte. Every question, also the one after a gap, begins with that batch, so that no answer
//! of another process is ever put on top of what is known of this one.
//!
//! This file reads no clock, knows no wire and does not look into what batches carry.

mod held;
mod memory;
mod words;

use std::time::Duration;
use std::time::Instant;

use super::source::Chunk;
use held::Held;
use memory::Known;
use memory::Memory;
pub use words::Counts;
pub use words::Doubt;
pub use words::Numbered;
pub use words::Reason;
pub use words::Reset;
pub use words::Settings;
pub use words::State;
pub use words::Step;
pub use words::Steps;

/// A question is put twice before it counts as not answered.
const QUESTIONS_MAX: u32 = 2;
/// So often live batches and answers of one connection may be of different processes (an old
/// connection's last words do that) before its answers count for nothing.
const CONTRADICTIONS_MAX: u32 = 3;
/// So many proofs in a row were refused: the source keeps no history, and asking only disturbs it.
const REFUSALS_MAX: u32 = 2;

/// One rank's stream.
#[derive(Debug)]
pub struct Stream<T> {
    settings: Settings,
    phase: Phase,
    /// The last number that counts as seen; none where nothing was since all was forgotten.
    last: Option<u64>,
    /// Whether all that the process holds is known.
    is_whole: bool,
    reason: Reason,
    memory: Memory,
    held: Held<T>,
    /// A full list of which not all has come.
    listing: Option<Listing>,
    answer: Answer,
    /// Whether this connection's source can be asked.
    can_ask: bool,
    /// A question on this connection was given up, and none was ever answered.
    is_mute: bool,
    has_answered: bool,
    contradictions: u32,
    refusals: u32,
    /// Number and digest of a live batch that ran backwards.
    backwards: Option<(u64, u128)>,
    /// The process that the tree is of, where the source names it.
    epoch: Option<String>,
    /// The process that this connection is to.
    connected_epoch: Option<String>,
    heard: Instant,
    counts: Counts,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    /// No connection stands.
    Lost { since: Instant },
    /// All from the first batch on was asked for. Nothing counts until the answer has ended.
    Joining { question: Question },
    /// Batches are applied as they come.
    Following,
    /// The last applied batch was asked for, and all after it.
    Proving {
        doubt: Doubt,
        since: Instant,
        question: Question,
    },
}

#[derive(Clone, Copy, Debug)]
struct Question {
    deadline: Instant,
    /// How often it was put.
    times: u32,
}

/// What is known of the answer that is coming.
#[derive(Clone, Copy, Debug, Default)]
struct Answer {
    /// It is of the process that the tree is of.
    is_linked: bool,
    /// `last` when the question was put.
    last_then: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Listing {
    next: u32,
    count: u32,
    is_whole: bool,
}

impl<T> Stream<T> {
    pub fn new(settings: Settings, now: Instant) -> Self {
        let held = Held::new(&settings);
        Self {
            settings,
            phase: Phase::Lost { since: now },
            last: None,
            is_whole: false,
            reason: Reason::Starting,
            memory: Memory::new(memory::DIGESTS_MAX),
            held,
            listing: None,
            answer: Answer::default(),
            can_ask: false,
            is_mute: false,
            has_answered: false,
            contradictions: 0,
            refusals: 0,
            backwards: None,
            epoch: None,
            connected_epoch: None,
            heard: now,
            counts: Counts::default(),
        }
    }

    pub fn state(&self) -> State {
        match self.phase {
            _ if self.last.is_none() => State::Cold,
            Phase::Lost { since } => State::Stale { since },
            Phase::Joining { .. } => State::Cold,
            Phase::Proving {
                doubt,
                since,
                question,
            } if doubt.is_of_the_process() || question.times > 1 => State::Stale { since },
            Phase::Following | Phase::Proving { .. } => {
                if self.is_whole && self.listing.is_none() {
                    State::Live
                } else {
                    State::Partial
                }
            }
        }
    }

    /// Whether the answer that tells what the process holds is still awaited.
    pub fn is_joining(&self) -> bool {
        matches!(self.phase, Phase::Joining { .. })
    }

    pub fn reason(&self) -> Reason {
        match (self.state(), self.phase) {
            (State::Stale { .. }, Phase::Proving { doubt, .. }) => Reason::Doubt(doubt),
            (State::Stale { .. }, _) => Reason::Disconnected,
            _ => self.reason,
        }
    }

    pub fn last(&self) -> Option<u64> {
        self.last
    }

    pub fn epoch(&self) -> Option<&str> {
        self.epoch.as_deref()
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Batches that wait, and their bytes.
    pub fn held(&self) -> (usize, usize) {
        (self.held.len(), self.held.bytes())
    }

    /// A connection stands. `can_ask`: its source has replays.
    pub fn on_connected(&mut self, now: Instant, epoch: Option<&str>, can_ask: bool) -> Steps<T> {
        let mut steps = Steps::new();
        if !matches!(self.phase, Phase::Lost { .. }) {
            // A source that did not say that the connection before ended.
            steps.extend(self.on_lost(now));
        }
        let since = self.doubted_since(now);
        let same_epoch = self
            .epoch
            .as_deref()
            .zip(epoch)
            .map(|(before, now)| before == now);
        self.connected_epoch = epoch.map(str::to_owned);
        self.can_ask = can_ask;
        self.is_mute = false;
        self.has_answered = false;
        self.contradictions = 0;
        self.heard = now;
        match (self.last, same_epoch) {
            (None, _) => self.join(now, 1, &mut steps),
            (Some(_), _) if !can_ask => {
                self.clear(Reset::Disconnected, &mut steps);
                self.settle(now, false, &mut steps);
            }
            (Some(_), Some(false)) => self.start_over(now, Reset::Restarted, 1, &mut steps),
            (Some(_), Some(true)) => self.prove(now, Doubt::SameEpoch, since, &mut steps),
            (Some(_), None) => self.prove(now, Doubt::Reconnected, since, &mut steps),
        }
        steps
    }

    pub fn on_lost(&mut self, now: Instant) -> Steps<T> {
        let mut steps = Steps::new();
        if matches!(self.phase, Phase::Joining { .. }) {
            // Half of what was told may have been taken back by the other half, so the same epoch would
            // not be enough to believe it.
            self.epoch = None;
        }
        let since = self.doubted_since(now);
        self.phase = Phase::Lost { since };
        // What came on it and was not applied cannot be told from another process's batches.
        self.held.clear();
        self.backwards = None;
        self.answer = Answer::default();
        if self.listing.take().is_some() {
            self.is_whole = false;
        }
        if !self.can_ask && self.last.is_some() {
            self.clear(Reset::Disconnected, &mut steps);
        }
        if self.last.is_none() {
            self.reason = Reason::Disconnected;
        }
        steps
    }

    /// Someone else saw the worker go down or its process begin: what is known may be of a process that
    /// is gone, whatever the connection says.
    pub fn on_witness(&mut self, now: Instant) -> Steps<T> {
        let mut steps = Steps::new();
        // The other side may not have noticed yet.
        self.epoch = None;
        self.connected_epoch = None;
        match self.phase {
            // It will be proved anyway.
            Phase::Lost { .. } => {}
            Phase::Joining { .. } if self.last.is_none() => {
                self.join(now, 1, &mut steps);
            }
            _ if self.last.is_none() => {}
            Phase::Joining { .. } | Phase::Following | Phase::Proving { .. } if self.can_ask => {
                let since = self.doubted_since(now);
                self.prove(now, Doubt::Witness, since, &mut steps);
            }
            Phase::Joining { .. } | Phase::Following | Phase::Proving { .. } => {
                self.clear_but_number(Reset::Witness, &mut steps);
            }
        }
        steps
    }

    pub fn on_live(&mut self, now: Instant, frame: Numbered<T>) -> Steps<T> {
        let mut steps = Steps::new();
        self.heard = now;
        // A full list is of this connection's process, and needs nothing that came before it.
        let begins_list = frame.snapshot.is_some_and(|chunk| chunk.index == 0);
        match self.phase {
            Phase::Lost { .. } => self.counts.stray += 1,
            _ if begins_list => {
                self.held.clear();
                self.answer = Answer::default();
                self.settle(now, false, &mut steps);
                self.accept(frame, true, &mut steps);
            }
            Phase::Joining { .. } => self.hold(frame),
            Phase::Proving { doubt, .. } if doubt.is_of_the_process() => self.hold(frame),
            Phase::Following | Phase::Proving { .. } => self.follow(now, frame, &mut steps),
        }
        steps
    }

    pub fn on_replayed(&mut self, now: Instant, frame: Numbered<T>) -> Steps<T> {
        let mut steps = Steps::new();
        self.heard = now;
        self.extend(now);
        if matches!(self.phase, Phase::Lost { .. }) {
            self.counts.stray += 1;
            return steps;
        }
        self.is_answered();
        let told_live = match self.backwards {
            Some((sequence, digest)) if sequence == frame.sequence => Some(digest),
            _ => self.held.digest(frame.sequence),
        };
        if frame.snapshot.is_none() && told_live.is_some_and(|digest| digest != frame.digest) {
            self.contradict(now, &mut steps);
            return steps;
        }
        if let Some(chunk) = frame.snapshot {
            if chunk.index == 0 {
                self.wait_for_the_end();
                self.answer.is_linked = true;
            }
            self.accept(frame, false, &mut steps);
            return steps;
        }
        let Some(last) = self.last else {
            if matches!(self.phase, Phase::Following) {
                // Late, but the best there is.
                let question = Question {
                    deadline: now + self.timeout(),
                    times: QUESTIONS_MAX,
                };
                self.phase = Phase::Joining { question };
            }
            self.answer.is_linked = true;
            self.accept(frame, false, &mut steps);
            return steps;
        };
        let has_anchor = self.memory.ends_with(last);
        if frame.sequence <= last && has_anchor {
            match self.memory.compare(frame.sequence, frame.digest) {
                Known::Same => self.answer.is_linked = true,
                Known::Different => self.disprove(now, &mut steps),
                // Older than what is remembered, and so than what is asked for.
                Known::Unknown => {}
            }
        } else if self.answer.is_linked {
            if !follows(last, frame.sequence) {
                self.counts.gaps += 1;
                self.clear(Reset::Gap, &mut steps);
                self.wait_for_the_end();
            }
            self.accept(frame, false, &mut steps);
        } else {
            match self.phase {
                // An answer that was given up. It may be of any process.
                Phase::Following | Phase::Lost { .. } => self.counts.stray += 1,
                // It begins after the last known one: what lies between cannot be had, and whether it
                // is the same process cannot be known. But it is all that this one still tells.
                Phase::Joining { .. } | Phase::Proving { .. } => {
                    let reset = self.reset_by_doubt();
                    self.counts.proofs_failed += 1;
                    self.clear(reset, &mut steps);
                    self.wait_for_the_end();
                    self.answer.is_linked = true;
                    self.accept(frame, false, &mut steps);
                }
            }
        }
        steps
    }

    pub fn on_replay_end(&mut self, now: Instant) -> Steps<T> {
        let mut steps = Steps::new();
        self.heard = now;
        if !matches!(self.phase, Phase::Lost { .. }) {
            self.is_answered();
        }
        let answer = std::mem::take(&mut self.answer);
        let has_more = answer.is_linked && self.last != answer.last_then;
        match self.phase {
            Phase::Lost { .. } | Phase::Following => {}
            // Half an answer came before, and this one does not know its end.
            Phase::Joining { .. } if self.last.is_some() && !answer.is_linked => {
                self.start_over(now, Reset::Unproved, QUESTIONS_MAX, &mut steps);
            }
            Phase::Joining { .. } => self.settle(now, has_more, &mut steps),
            Phase::Proving { .. } if answer.is_linked || self.last.is_none() => {
                self.counts.proofs_kept += 1;
                self.refusals = 0;
                self.settle(now, has_more, &mut steps);
            }
            // The last batch that was applied is not this process's.
            Phase::Proving { .. } => self.disprove(now, &mut steps),
        }
        steps
    }

    pub fn on_replay_failed(&mut self, now: Instant) -> Steps<T> {
        let mut steps = Steps::new();
        self.heard = now;
        if matches!(self.phase, Phase::Proving { .. }) {
            self.refusals += 1;
        }
        self.give_up(now, &mut steps);
        steps
    }

    /// When [`Stream::on_timeout`] has something to do.
    pub fn next_timeout(&self) -> Option<Instant> {
        match self.phase {
            Phase::Joining { question } | Phase::Proving { question, .. } => {
                Some(question.deadline)
            }
            Phase::Following if self.can_ask && (self.last.is_none() || !self.is_mute()) => {
                Some(self.heard + Duration::from_millis(self.settings.silence_ms))
            }
            Phase::Following | Phase::Lost { .. } => None,
        }
    }

    pub fn on_timeout(&mut self, now: Instant) -> Steps<T> {
        let mut steps = Steps::new();
        if self.next_timeout().is_none_or(|at| now < at) {
            return steps;
        }
        match self.phase {
            Phase::Lost { .. } => {}
            Phase::Following if self.last.is_none() => self.join(now, 1, &mut steps),
            Phase::Following => self.prove(now, Doubt::Silence, now, &mut steps),
            Phase::Joining { mut question } if question.times < QUESTIONS_MAX => {
                self.ask(now, &mut question, &mut steps);
                self.phase = Phase::Joining { question };
            }
            Phase::Proving {
                doubt,
                since,
                mut question,
            } if question.times < QUESTIONS_MAX => {
                self.ask(now, &mut question, &mut steps);
                self.phase = Phase::Proving {
                    doubt,
                    since,
                    question,
                };
            }
            Phase::Joining { .. } | Phase::Proving { .. } => self.give_up(now, &mut steps),
        }
        steps
    }

    /// Something was removed and it cannot be known what, so nothing that was known may stay.
    pub fn on_unknown_removal(&mut self) -> Steps<T> {
        let mut steps = Steps::new();
        self.clear_but_number(Reset::UnknownRemoval, &mut steps);
        steps
    }

    /// Something is held that could not be placed, or is no longer remembered.
    pub fn on_incomplete(&mut self) {
        if let Some(listing) = &mut self.listing {
            listing.is_whole = false;
        }
        if self.is_whole {
            self.is_whole = false;
            self.reason = Reason::Incomplete;
        }
    }
}

/// The moves that the inputs above are made of.
impl<T> Stream<T> {
    /// A live batch while nothing speaks against the process.
    fn follow(&mut self, now: Instant, frame: Numbered<T>, steps: &mut Steps<T>) {
        let Some(last) = self.last else {
            if frame.sequence > 0 && frame.snapshot.is_none() && !self.is_mute() {
                // The first ones were missed while the connection was made.
                self.join(now, 1, steps);
            } else {
                self.accept(frame, true, steps);
            }
            return;
        };
        if follows(last, frame.sequence) {
            self.accept(frame, true, steps);
            self.drain(now, true, steps);
        } else if frame.sequence > last {
            self.hold(frame);
            self.drain(now, true, steps);
        } else {
            match self.memory.compare(frame.sequence, frame.digest) {
                Known::Same => self.counts.duplicates += 1,
                Known::Different if !self.is_mute() => self.contradict(now, steps),
                Known::Different => {
                    self.clear(Reset::Restarted, steps);
                    self.accept(frame, true, steps);
                }
                Known::Unknown if !self.is_mute() => {
                    self.backwards = Some((frame.sequence, frame.digest));
                    self.prove(now, Doubt::Backwards, now, steps);
                }
                // Not applied: if it is an old one come late, what removed its blocks came already.
                Known::Unknown => {
                    self.clear(Reset::Backwards, steps);
                    self.memory.remember(frame.sequence, frame.digest);
                    self.last = Some(frame.sequence);
                }
            }
        }
    }

    /// The answer has ended: on with what waits.
    fn settle(&mut self, now: Instant, may_ask: bool, steps: &mut Steps<T>) {
        self.backwards = None;
        // Not before: a connection that was never proved must not vouch for the next one.
        self.epoch.clone_from(&self.connected_epoch);
        self.phase = Phase::Following;
        self.drain(now, may_ask, steps);
    }

    /// Applies what waits, as far as it is in sequence. Where it is not, asks for what is missing, if
    /// asking may help, else goes on without.
    fn drain(&mut self, now: Instant, mut may_ask: bool, steps: &mut Steps<T>) {
        while let Some((sequence, digest)) = self.held.first().map(|it| (it.sequence, it.digest)) {
            let is_chunk = self.held.first().is_some_and(|it| it.snapshot.is_some());
            match self.last {
                Some(last) if sequence <= last && !is_chunk => {
                    if self.memory.compare(sequence, digest) == Known::Different {
                        self.contradict(now, steps);
                        return;
                    }
                    self.counts.duplicates += 1;
                    self.held.take_first();
                    continue;
                }
                Some(last) if !follows(last, sequence) && !is_chunk => {
                    if let Phase::Proving { doubt, .. } = &mut self.phase {
                        // The question that was put brings the missing ones too.
                        if *doubt == Doubt::Silence {
                            *doubt = Doubt::Gap;
                        }
                        return;
                    }
                    self.counts.gaps += 1;
                    if may_ask && !self.is_mute() {
                        self.prove(now, Doubt::Gap, now, steps);
                        return;
                    }
                    self.clear(Reset::Gap, steps);
                    may_ask = true;
                }
                Some(_) | None => {}
            }
            if let Some(frame) = self.held.take_first() {
                self.accept(frame, true, steps);
            }
        }
        // Nothing is missing, so nothing is asked for any more.
        self.phase = Phase::Following;
    }

    /// Takes a batch that is next, or the first.
    fn accept(&mut self, frame: Numbered<T>, is_live: bool, steps: &mut Steps<T>) {
        if is_live {
            // Whose answer it is must show by this batch, too.
            self.answer.is_linked = false;
        }
        if let Some(chunk) = frame.snapshot {
            if !self.list(chunk, frame.sequence, steps) {
                return;
            }
        } else {
            if self.listing.take().is_some() {
                self.is_whole = false;
            }
            if self.last.is_none() {
                self.is_whole = frame.sequence == 0;
                self.reason = match (self.is_whole, self.reason) {
                    (true, _) => Reason::FromTheFirst,
                    (false, reason @ Reason::Reset(_)) => reason,
                    (false, _) => Reason::BeganLate,
                };
            }
            self.memory.remember(frame.sequence, frame.digest);
        }
        self.last = Some(frame.sequence);
        match frame.carried {
            Some(carried) => steps.push(Step::Apply {
                sequence: frame.sequence,
                carried,
                is_live,
            }),
            None => self.clear_but_number(Reset::Undecodable, steps),
        }
    }

    /// Takes a part of a full list into account. Gives false where it does not continue the list.
    fn list(&mut self, chunk: Chunk, sequence: u64, steps: &mut Steps<T>) -> bool {
        let is_whole = chunk.unknown_before == 0;
        let listing = match self.listing {
            _ if chunk.index == 0 => {
                self.clear(Reset::Snapshot, steps);
                Listing {
                    next: 1,
                    count: chunk.count,
                    is_whole,
                }
            }
            Some(listing)
                if listing.next == chunk.index
                    && listing.count == chunk.count
                    && self.last.is_some_and(|last| follows(last, sequence)) =>
            {
                Listing {
                    next: listing.next + 1,
                    count: listing.count,
                    is_whole: listing.is_whole && is_whole,
                }
            }
            Some(listing) if chunk.index < listing.next => {
                self.counts.duplicates += 1;
                return false;
            }
            // What it continues is not known, and half a list is worth little.
            _ => {
                self.clear(Reset::Gap, steps);
                return false;
            }
        };
        // The number is its own, but the bytes are not those of the batch of that number.
        self.memory.clear();
        let is_done = listing.next >= listing.count;
        self.is_whole = is_done && listing.is_whole;
        self.reason = if self.is_whole {
            Reason::Snapshot
        } else {
            Reason::SnapshotPart
        };
        self.listing = (!is_done).then_some(listing);
        true
    }

    fn hold(&mut self, frame: Numbered<T>) {
        if !self.held.keep(frame) {
            self.counts.held_dropped += 1;
        }
    }

    /// Begins anew, from the process's first batch.
    fn join(&mut self, now: Instant, times: u32, steps: &mut Steps<T>) {
        if !self.can_ask {
            self.settle(now, false, steps);
            return;
        }
        let mut question = Question {
            deadline: now,
            times: times - 1,
        };
        self.ask(now, &mut question, steps);
        self.phase = Phase::Joining { question };
    }

    fn prove(&mut self, now: Instant, doubt: Doubt, since: Instant, steps: &mut Steps<T>) {
        let mut question = Question {
            deadline: now,
            times: 0,
        };
        self.counts.proofs_asked += 1;
        self.ask(now, &mut question, steps);
        self.phase = Phase::Proving {
            doubt,
            since,
            question,
        };
    }

    /// Asks from the last applied batch on, so that the answer shows whose it is; or from an earlier one
    /// that ran backwards, so that it shows that too. What waits is dropped: it is part of the answer,
    /// and where the answer is a new stream, what the old one said does not belong to it.
    fn ask(&mut self, now: Instant, question: &mut Question, steps: &mut Steps<T>) {
        let known = self.last.filter(|last| self.memory.ends_with(*last));
        let back = self.backwards.map(|(sequence, _)| sequence);
        let first = known.map_or(0, |last| back.map_or(last, |back| last.min(back)));
        self.held.clear();
        self.answer = Answer {
            is_linked: false,
            last_then: self.last,
        };
        self.counts.asked += 1;
        question.times += 1;
        question.deadline = now + self.timeout();
        steps.push(Step::AskReplay { first });
    }

    /// The answer shows another process than the one that is known.
    fn disprove(&mut self, now: Instant, steps: &mut Steps<T>) {
        self.counts.proofs_failed += 1;
        self.start_over(now, Reset::Restarted, 1, steps);
    }

    /// Live batches and answers are of different processes. One of the two will be seen to end.
    fn contradict(&mut self, now: Instant, steps: &mut Steps<T>) {
        self.counts.contradictions += 1;
        self.contradictions += 1;
        if self.contradictions >= CONTRADICTIONS_MAX {
            self.can_ask = false;
        }
        self.held.clear();
        self.start_over(now, Reset::Restarted, 1, steps);
    }

    fn start_over(&mut self, now: Instant, reset: Reset, times: u32, steps: &mut Steps<T>) {
        self.clear(reset, steps);
        self.join(now, times, steps);
    }

    /// The question has no answer, or not all of it.
    fn give_up(&mut self, now: Instant, steps: &mut Steps<T>) {
        self.answer = Answer::default();
        self.is_mute = !self.has_answered;
        match self.phase {
            Phase::Lost { .. } | Phase::Following => {}
            Phase::Joining { .. } => {
                // What half an answer told may have been removed by its other half.
                if self.last.is_some() {
                    self.clear(Reset::Unproved, steps);
                }
                self.settle(now, false, steps);
            }
            Phase::Proving { .. } => {
                self.counts.proofs_failed += 1;
                let reset = self.reset_by_doubt();
                // It did not answer just now, so it is asked once only.
                self.start_over(now, reset, QUESTIONS_MAX, steps);
            }
        }
    }

    /// Until the answer has ended nothing of it counts: later batches remove what earlier ones stored.
    fn wait_for_the_end(&mut self) {
        if let Phase::Proving { question, .. } = self.phase {
            self.phase = Phase::Joining { question };
        }
    }

    /// An answer that goes on has its time anew.
    fn extend(&mut self, now: Instant) {
        let deadline = now + self.timeout();
        if let Phase::Joining { question } | Phase::Proving { question, .. } = &mut self.phase {
            question.deadline = deadline;
        }
    }

    /// Since when it is not known whether the process is still the same.
    fn doubted_since(&self, now: Instant) -> Instant {
        match (self.state(), self.phase) {
            (_, Phase::Lost { since }) | (State::Stale { since }, _) => since,
            _ => now,
        }
    }

    fn reset_by_doubt(&self) -> Reset {
        match self.phase {
            Phase::Proving {
                doubt: Doubt::Gap, ..
            } => Reset::Gap,
            Phase::Proving { .. } | Phase::Joining { .. } | Phase::Following => Reset::Unproved,
            Phase::Lost { .. } => Reset::Unproved,
        }
    }

    /// Forgets all, also which numbers were seen.
    fn clear(&mut self, reset: Reset, steps: &mut Steps<T>) {
        self.clear_but_number(reset, steps);
        self.last = None;
        self.listing = None;
        self.backwards = None;
        self.memory.clear();
    }

    /// Forgets what was applied. What comes next is still next.
    fn clear_but_number(&mut self, reset: Reset, steps: &mut Steps<T>) {
        if self.last.is_some() {
            steps.push(Step::Clear(reset));
        }
        self.is_whole = false;
        if let Some(listing) = &mut self.listing {
            listing.is_whole = false;
        }
        self.reason = Reason::Reset(reset);
    }

    /// Whether there is no use in asking.
    fn is_mute(&self) -> bool {
        !self.can_ask || self.is_mute || self.refusals >= REFUSALS_MAX
    }

    fn is_answered(&mut self) {
        self.has_answered = true;
        self.is_mute = false;
    }

    fn timeout(&self) -> Duration {
        Duration::from_millis(self.settings.replay_timeout_ms)
    }
}

fn follows(last: u64, sequence: u64) -> bool {
    sequence.checked_sub(last) == Some(1)
}

#[cfg(test)]
mod tests;
