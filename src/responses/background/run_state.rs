//! One background response in its owner's hands: what to do next, whatever the store answers. Pure.
//!
//! ```text
//! making ──▶ ending ──▶ over           all was said: its end is stored, and what comes before it
//!   │ ├────▶ failing ─▶ ending         it took too long, or there is no time left
//!   │ ├────▶ cutting ─▶ (recalling) ─▶ amending ─▶ over    it was cancelled: its output is what was told of it
//!   │ ├────▶ releasing ▶ over          nobody was told anything: any replica may begin it again
//!   │ └────▶ over                      another replica has it, or may have it
//! recalling ─▶ failing                 another replica told events of it: read first, they are its output
//! ```

use bytes::Bytes;

use super::log::{self, Log};
use crate::store::{self, EventBatch, LoggedEvents, Status, WriteOutcome};

/// The events that are made before an engine has said anything of an answer: whoever begins a response
/// again tells the same.
pub const FIRST_EVENTS: u64 = 3;

const STOPPED: &str = "The router that ran this response was stopped.";
const TOO_LONG: &str = "The response took too long.";
const REFUSED: &str = "The response could not be stored.";

/// Why a response stops before its engine has said all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// It was cancelled or deleted.
    Cancelled,
    /// Another replica has it, or may have it.
    LeaseLost,
    /// This replica is stopping.
    Draining,
    /// It ran for too long.
    TimeLimit,
    /// The store will not take its events.
    StoreRefused,
}

impl StopReason {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cancelled => "cancelled",
            Self::LeaseLost => "lease_lost",
            Self::Draining => "draining",
            Self::TimeLimit => "time_limit",
            Self::StoreRefused => "store_refused",
        }
    }
}

/// What to do now.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Step {
    /// Has an engine make it, and hears it.
    ReadEngine,
    /// Tells the store that an engine has begun it.
    MarkStarted,
    Append(EventBatch),
    /// Reads events that another replica stored, beyond this number.
    ReadStored {
        after: Option<u64>,
    },
    /// Makes the end of a response that failed, for this reason. `is_recalled`: after the events that were
    /// read, which are another replica's.
    Fail {
        why: &'static str,
        is_recalled: bool,
    },
    /// Makes the end of a response of which nothing can be kept, with this number.
    FailWithoutOutput {
        number: u64,
    },
    /// Stores its end, with these events.
    Finalize(Option<EventBatch>),
    /// Reads the record of a response that should have been cancelled.
    ReadCancelled,
    /// Leaves in it what was told.
    StorePartial,
    /// Hands it back.
    Release,
    /// Nothing more.
    Done,
}

/// When to take the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Then {
    Continue,
    /// The store could not be asked: after a while.
    RetryLater,
}

/// What a reader where it runs is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tail<'a> {
    /// Stored events up to `last`. `is_end`: it has ended, and there are no more.
    InMemory {
        text: &'a [u8],
        last: Option<u64>,
        is_end: bool,
    },
    /// These are to be read from the store.
    InStore,
    /// All is to be read from the store from now on.
    NotRunning,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Generating,
    /// `why` it fails afterwards; `None`: it was cancelled.
    ReadingStored {
        why: Option<&'static str>,
    },
    Failing {
        why: &'static str,
    },
    /// Its last event is made.
    Finalizing,
    DroppingOutput,
    /// Its last event is made again, without what the store would not take.
    FinalizingWithoutOutput,
    ReadingCancelled,
    StoringPartial,
    Releasing,
    Over {
        is_told: bool,
    },
}

/// One response's way.
#[derive(Debug)]
pub struct RunState {
    streams: bool,
    phase: Phase,
    /// Whether an engine has begun it, and whether the store was told so.
    is_begun: bool,
    is_started: bool,
    is_recalled: bool,
    log: Log,
    /// The event that ends it in place of all that is not stored.
    short: Option<EventBatch>,
    why: Option<StopReason>,
}

impl RunState {
    /// Of a response of which `stored` events are in the store.
    pub fn new(streams: bool, stored: u64) -> Self {
        Self {
            streams,
            phase: Phase::Generating,
            is_begun: false,
            is_started: false,
            is_recalled: false,
            log: Log::after(stored),
            short: None,
            why: None,
        }
    }

    /// Of one that another replica began, and nobody can go on with.
    pub fn failing(streams: bool, stored: u64, why: &'static str) -> Self {
        let is_recalled = streams && stored > 0;
        let phase = match is_recalled {
            true => Phase::ReadingStored { why: Some(why) },
            false => Phase::Failing { why },
        };
        Self {
            phase,
            is_recalled,
            ..Self::new(streams, stored)
        }
    }

    pub fn next(&self) -> Step {
        match self.phase {
            Phase::Generating | Phase::Finalizing if self.is_begun && !self.is_started => {
                Step::MarkStarted
            }
            Phase::Generating => self.batch().map_or(Step::ReadEngine, Step::Append),
            Phase::ReadingStored { .. } => Step::ReadStored {
                after: self.log.made().checked_sub(1),
            },
            Phase::Failing { why } => Step::Fail {
                why,
                is_recalled: self.is_recalled,
            },
            Phase::Finalizing => Step::Finalize(self.batch()),
            Phase::FinalizingWithoutOutput => Step::Finalize(self.short.clone()),
            Phase::DroppingOutput => Step::FailWithoutOutput {
                number: self.log.stored(),
            },
            Phase::ReadingCancelled => Step::ReadCancelled,
            Phase::StoringPartial => Step::StorePartial,
            Phase::Releasing => Step::Release,
            Phase::Over { .. } => Step::Done,
        }
    }

    fn batch(&self) -> Option<EventBatch> {
        self.log.batch().filter(|_| self.streams)
    }

    /// An engine has begun to answer.
    pub fn on_begun(&mut self) {
        self.is_begun = true;
    }

    pub fn is_begun(&self) -> bool {
        self.is_begun
    }

    /// Events were made.
    pub fn on_events(&mut self, text: &[u8]) {
        if self.streams {
            self.log.push(text);
        }
    }

    /// The last event was made.
    pub fn on_last_event(&mut self, text: &[u8]) {
        match self.phase {
            Phase::Generating | Phase::Failing { .. } => {
                self.on_events(text);
                self.phase = Phase::Finalizing;
            }
            Phase::DroppingOutput => {
                let number = self.log.stored();
                self.short = self.streams.then(|| EventBatch {
                    first: number,
                    last: number,
                    bytes: Bytes::copy_from_slice(text),
                });
                self.phase = Phase::FinalizingWithoutOutput;
            }
            // It was stopped in between.
            _ => {}
        }
    }

    /// It must not go on as it does.
    pub fn on_stop(&mut self, why: StopReason) {
        self.phase = match (self.phase, why) {
            (Phase::Over { .. }, _) => return,
            (_, StopReason::LeaseLost) => Phase::Over { is_told: false },
            (Phase::Generating | Phase::ReadingStored { why: Some(_) }, StopReason::Cancelled) => {
                Phase::ReadingCancelled
            }
            // Whoever takes it over fails it just as well.
            (Phase::ReadingStored { why: Some(_) }, StopReason::Draining) => Phase::Releasing,
            (Phase::Generating, StopReason::Draining) if self.is_unseen() => Phase::Releasing,
            (Phase::Generating, StopReason::Draining) => Phase::Failing { why: STOPPED },
            (Phase::Generating, StopReason::TimeLimit) => Phase::Failing { why: TOO_LONG },
            (Phase::Generating, StopReason::StoreRefused) => Phase::Failing { why: REFUSED },
            // What ends already is stopped by the store's word alone.
            _ => return,
        };
        self.why = Some(why);
    }

    /// Whether nobody was told anything that another replica would not tell as well.
    fn is_unseen(&self) -> bool {
        !self.streams || self.log.stored() <= FIRST_EVENTS
    }

    pub fn on_started(&mut self, said: &Result<WriteOutcome, store::Error>) -> Then {
        match said {
            Ok(WriteOutcome::Gone | WriteOutcome::Terminal(_)) => self.on_ended_elsewhere(),
            Ok(WriteOutcome::Fenced) => self.on_lost(),
            Ok(_) => self.is_started = true,
            Err(error) if error.retry_after().is_some() => return Then::RetryLater,
            Err(_) => {
                // Its end says more than this, and the store has its last word there.
                self.is_started = true;
                self.on_stop(StopReason::StoreRefused);
            }
        }
        Then::Continue
    }

    /// What the store says to events up to `last`.
    pub fn on_appended(&mut self, last: u64, said: &Result<WriteOutcome, store::Error>) -> Then {
        match said {
            Ok(WriteOutcome::Done | WriteOutcome::Duplicate { .. }) => self.log.on_stored(last),
            Ok(WriteOutcome::Overflow) => {
                self.log.on_overflow();
                self.log.on_stored(last);
            }
            Ok(WriteOutcome::Gap { last }) => self.on_gap(*last),
            Ok(WriteOutcome::Gone | WriteOutcome::Terminal(_)) => self.on_ended_elsewhere(),
            Ok(WriteOutcome::Fenced) => self.on_lost(),
            Err(error) if error.retry_after().is_some() => return Then::RetryLater,
            Err(_) => self.on_stop(StopReason::StoreRefused),
        }
        Then::Continue
    }

    /// Events of another replica; `None`: there is no such response any more.
    pub fn on_stored_events(&mut self, said: &Result<Option<LoggedEvents>, store::Error>) -> Then {
        let Phase::ReadingStored { why } = self.phase else {
            return Then::Continue;
        };
        let read = match said {
            Ok(Some(read)) => read,
            Ok(None) => {
                self.leave();
                return Then::Continue;
            }
            Err(error) if error.retry_after().is_some() => return Then::RetryLater,
            Err(_) => {
                // What cannot be read is not part of its output.
                self.on_all_recalled(why);
                return Then::Continue;
            }
        };
        let told = read.batches.iter();
        for batch in told.filter(|batch| &*batch.bytes != log::CANCELLED) {
            let after = self.log.made().checked_sub(1);
            self.log
                .push(log::beyond(&batch.bytes, batch.first, after).0);
        }
        if read.batches.is_empty() || self.log.made() >= self.log.stored() {
            self.on_all_recalled(why);
        }
        Then::Continue
    }

    fn on_all_recalled(&mut self, why: Option<&'static str>) {
        if self.log.stored_text().is_none() {
            self.log.on_overflow_at(self.log.stored());
        }
        self.phase = match why {
            Some(why) => Phase::Failing { why },
            None => Phase::StoringPartial,
        };
    }

    /// What the store says to the end.
    pub fn on_finalized(&mut self, said: &Result<WriteOutcome, store::Error>) -> Then {
        let is_short = match self.phase {
            Phase::Finalizing => false,
            Phase::FinalizingWithoutOutput => true,
            _ => return Then::Continue,
        };
        match said {
            Ok(WriteOutcome::Done) if is_short => self.leave(),
            Ok(WriteOutcome::Done) => {
                if let Some(batch) = self.batch() {
                    self.log.on_stored(batch.last);
                }
                self.phase = Phase::Over { is_told: true };
            }
            Ok(WriteOutcome::Terminal(Status::Cancelled)) => self.phase = Phase::ReadingCancelled,
            Ok(WriteOutcome::Terminal(_) | WriteOutcome::Gone) => self.leave(),
            Ok(WriteOutcome::Fenced) => self.on_lost(),
            // It was about to be stored when it was given up: what stands for it has a later number.
            Ok(WriteOutcome::Gap { last: Some(last) } | WriteOutcome::Duplicate { last })
                if is_short =>
            {
                self.log.on_stored(*last);
                self.phase = Phase::DroppingOutput;
            }
            Ok(WriteOutcome::Gap { last }) => self.on_gap(*last),
            Ok(WriteOutcome::Duplicate { last }) => self.log.on_stored(*last),
            Ok(WriteOutcome::Overflow) => self.log.on_overflow(),
            Err(store::Error::TooLarge { .. }) if !is_short => self.phase = Phase::DroppingOutput,
            // Where it will not take this end at any time, there is no shorter one.
            Err(error) => return self.later(error),
        }
        Then::Continue
    }

    /// The record of a response that should have been cancelled: its status, and its last event's number.
    pub fn on_record(
        &mut self,
        said: &Result<Option<(Status, Option<u64>)>, store::Error>,
    ) -> Then {
        if self.phase != Phase::ReadingCancelled {
            return Then::Continue;
        }
        match said {
            Ok(Some((Status::Cancelled, last))) => {
                // The last event is the cancel's.
                let is_here = self.log.rewind(last.and_then(|last| last.checked_sub(1)));
                self.phase = match is_here || !self.streams {
                    true => Phase::StoringPartial,
                    // Another replica told them.
                    false => Phase::ReadingStored { why: None },
                };
            }
            // The store has lost the cancel, and this replica has ended what it ran.
            Ok(Some((Status::Queued | Status::InProgress, _))) => self.phase = Phase::Releasing,
            Ok(_) => self.leave(),
            Err(error) => return self.later(error),
        }
        Then::Continue
    }

    pub fn on_partial_stored(&mut self, said: &Result<WriteOutcome, store::Error>) -> Then {
        match said {
            Ok(_) => self.leave(),
            Err(error) => return self.later(error),
        }
        Then::Continue
    }

    pub fn on_released(&mut self, said: &Result<WriteOutcome, store::Error>) -> Then {
        match said {
            // It was cancelled before it was handed back.
            Ok(WriteOutcome::Terminal(Status::Cancelled)) => self.phase = Phase::ReadingCancelled,
            Ok(_) => self.leave(),
            Err(error) => return self.later(error),
        }
        Then::Continue
    }

    /// The store is asked again, unless that could not help. The end of the lease ends it.
    fn later(&mut self, error: &store::Error) -> Then {
        if error.retry_after().is_some() {
            return Then::RetryLater;
        }
        self.leave();
        Then::Continue
    }

    /// Nobody does anything for it here any more.
    pub fn on_left(&mut self) {
        if !self.is_over() {
            self.leave();
        }
    }

    fn on_gap(&mut self, last: Option<u64>) {
        if !self.log.rewind(last) {
            // What is missing was another replica's to tell. Whoever takes it over reads what there is.
            self.why = Some(StopReason::LeaseLost);
            self.phase = Phase::Releasing;
        }
    }

    fn on_ended_elsewhere(&mut self) {
        self.why = Some(StopReason::Cancelled);
        self.phase = Phase::ReadingCancelled;
    }

    fn on_lost(&mut self) {
        self.why = Some(StopReason::LeaseLost);
        self.leave();
    }

    fn leave(&mut self) {
        self.phase = Phase::Over { is_told: false };
    }

    /// What is stored beyond `after`, as far as it was made here, up to about `bytes_max`.
    pub fn tail(&self, after: Option<u64>, bytes_max: usize) -> Tail<'_> {
        let is_end = self.phase == Phase::Over { is_told: true };
        match self.log.tail(after, bytes_max) {
            Some((text, last)) if is_end || !self.is_over() => Tail::InMemory {
                text,
                last: match text.is_empty() {
                    true => self.log.stored().checked_sub(1),
                    false => last,
                },
                is_end,
            },
            _ if self.is_over() => Tail::NotRunning,
            _ => Tail::InStore,
        }
    }

    /// Whether an engine makes it, or is to.
    pub fn is_generating(&self) -> bool {
        self.phase == Phase::Generating
    }

    pub fn streams(&self) -> bool {
        self.streams
    }

    /// Why it stopped, if it did.
    pub fn why(&self) -> Option<StopReason> {
        self.why
    }

    pub fn log(&self) -> &Log {
        &self.log
    }

    /// Whether its owner does nothing more.
    pub fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over { .. })
    }
}

#[cfg(test)]
mod tests;
