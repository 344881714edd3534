//! The order and the identity of one rank's batches: what may be applied, and until when it may be
//! believed.
//!
//! Numbers alone cannot tell a restarted engine from one that went on, so whenever there is a doubt the
//! source is asked for the last batch that was applied: only the process that published it can repeat
//! it to the byte. Every question, also the one after a gap, begins with that batch, so that no answer
//! of another process is ever put on top of what is known of this one.
//!
//! This file reads no clock, knows no wire and does not look into what batches carry.

mod answers;
mod held;
mod memory;
mod moves;
mod words;

use std::time::{Duration, Instant};

use held::Held;
use memory::Memory;
pub use words::{Counts, Doubt, Numbered, Reason, Reset, Settings, State, Step, Steps};

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
    frames: u64,
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
            } if doubt.is_of_the_process()
                // It is the same one, and what it removed meanwhile is on its way.
                || doubt == Doubt::SameEpoch
                || question.times > 1 && !self.is_mute() =>
            {
                State::Stale { since }
            }
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

    /// When [`Stream::on_timeout`] has something to do.
    pub fn next_timeout(&self) -> Option<Instant> {
        match self.phase {
            Phase::Joining { question } | Phase::Proving { question, .. } => {
                Some(question.deadline)
            }
            Phase::Following if self.asks_at_silence() => {
                Some(self.heard + Duration::from_millis(self.settings.silence_ms))
            }
            Phase::Following | Phase::Lost { .. } => None,
        }
    }

    fn asks_at_silence(&self) -> bool {
        let Some(last) = self.last else {
            return self.can_ask;
        };
        // Of a list there is no batch that only its process could repeat: asked again, it would tell all
        // of it once more, at every silence of an idle engine. The connection's end is the witness then.
        // (Half a list is another thing: the rest is missing.)
        let can_prove = self.memory.ends_with(last) || self.listing.is_some();
        self.can_ask && self.refusals < REFUSALS_MAX && can_prove
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
            // It never answers, so that it does not now says nothing.
            Phase::Proving {
                doubt: Doubt::Silence,
                ..
            } if self.is_mute() => {
                self.heard = now;
                self.answer = Answer::default();
                self.settle(now, false, &mut steps);
            }
            Phase::Joining { .. } | Phase::Proving { .. } => {
                // A whole silence passes again before the next question, as after an answer.
                self.heard = now;
                self.give_up(now, &mut steps);
            }
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

fn follows(last: u64, sequence: u64) -> bool {
    sequence.checked_sub(last) == Some(1)
}

#[cfg(test)]
mod tests;
