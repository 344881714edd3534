//! One background run as its owner sees it: given the store's answers, what to do next. Pure.
//!
//! ```text
//! Generating ─▶ Finalizing ─▶ Over        the engine finished: store the end
//!   │ ├───────▶ Failing ────▶ Finalizing  time limit, store refuses, or draining with output already read
//!   │ ├───────▶ ReadingCancelled ─▶ (ReadingStored) ─▶ StoringPartial ─▶ Over   cancelled
//!   │ ├───────▶ Releasing ──▶ Over        draining before any output: any replica may start it again
//!   │ └───────▶ Over                      another replica has taken it over
//! Finalizing ─▶ Generating                another response came into its conversation first: again, if nobody read any of it
//!   └──────────▶ FailingInstead ─▶ FinalizingInstead ─▶ Over   the end is refused: a failure instead
//! ReadingStored ─▶ Failing                taken over after output was read: those events become the output
//! ReadingToGoOn ─▶ SettingUp ─▶ Generating  taken over, and the engine's tokens are stored: it goes on after them
//!                  └──────────▶ Failing   some of that is missing
//! ```
//!
//! Cancelling decides in the record first; the owner hears of it later. It then *finalises after the cancel*:
//! reads the record back (`ReadingCancelled`) and stores as output what readers had received
//! (`StoringPartial`), reading another replica's events first if it does not have them (`ReadingStored`).

use super::log::Log;
use super::run_phase::{Phase, REFUSED, STOPPED, TOO_LARGE, TOO_LONG};
use super::run_step::{FIRST_EVENTS, Step, StopReason, Tail, Then};
use crate::responses::fail_reason::{FailReason, HISTORIES_MAX};
use crate::store::{self, CommitRefusal, EventBatch, Status, WriteOutcome};

/// See the module.
#[derive(Debug)]
pub struct RunState {
    pub streams: bool,
    phase: Phase,
    pub has_engine_started: bool,
    /// Whether the record's status is in progress.
    is_started: bool,
    /// Whether events of another replica become part of the output.
    has_stored_output: bool,
    pub log: Log,
    /// Whether another replica could go on after the stored events.
    may_go_on: bool,
    /// The final event of a response that fails because its end was refused.
    short: Option<EventBatch>,
    refused_end: FailReason,
    /// Whether the history that it was to continue is outdated.
    has_old_history: bool,
    /// How often its history was outdated.
    old_histories: u32,
    /// Why the run stopped early, if it did.
    pub stop_reason: Option<StopReason>,
    /// Whether another replica has the response now, or any may take it.
    pub is_given_up: bool,
}

impl RunState {
    /// A response that is to be generated, of which `stored` events are in the store already.
    pub fn new(streams: bool, stored: u64) -> Self {
        Self {
            streams,
            phase: Phase::Generating,
            has_engine_started: false,
            is_started: false,
            has_stored_output: false,
            log: Log::after(stored),
            may_go_on: false,
            short: None,
            refused_end: REFUSED,
            has_old_history: false,
            old_histories: 0,
            stop_reason: None,
            is_given_up: false,
        }
    }

    /// A response taken over from another replica that cannot be generated again.
    pub fn failing(streams: bool, stored: u64, reason: FailReason) -> Self {
        let has_stored_output = streams && stored > 0;
        let phase = if has_stored_output {
            Phase::ReadingStored {
                reason: Some(reason),
            }
        } else {
            Phase::Failing { reason }
        };
        Self {
            phase,
            has_stored_output,
            ..Self::new(streams, stored)
        }
    }

    /// A response taken over from another replica, which may have stored all that is needed to go on after its events.
    pub fn continuing(streams: bool, stored: u64) -> Self {
        Self {
            phase: Phase::ReadingToGoOn,
            has_stored_output: true,
            ..Self::new(streams, stored)
        }
    }

    /// A cancelled response taken over from another replica, which did not store the output.
    pub fn cancelled(streams: bool, stored: u64) -> Self {
        Self {
            phase: Phase::ReadingCancelled,
            ..Self::new(streams, stored)
        }
    }

    pub fn next(&self) -> Step {
        match self.phase {
            Phase::Generating | Phase::Finalizing
                if self.has_engine_started && !self.is_started =>
            {
                Step::MarkStarted
            }
            Phase::Generating => self.batch().map_or(Step::ReadEngine, Step::Append),
            Phase::ReadingStored { .. } | Phase::ReadingToGoOn => Step::ReadStored {
                after: self.log.made().checked_sub(1),
            },
            Phase::SettingUp => Step::GoOn,
            Phase::Failing { reason } => Step::Fail {
                reason,
                has_stored_output: self.has_stored_output,
            },
            Phase::Finalizing => Step::Finalize(self.batch()),
            Phase::FinalizingInstead { .. } => Step::Finalize(self.short.clone()),
            Phase::FailingInstead {
                reason,
                keeps_output,
            } => Step::FailInstead {
                number: self.log.stored(),
                reason,
                keeps_output,
            },
            Phase::ReadingCancelled => Step::ReadCancelled,
            Phase::CancellingAgain => Step::CancelAgain,
            Phase::StoringPartial => Step::StorePartial,
            Phase::Releasing => Step::Release,
            Phase::Over { .. } => Step::Done,
        }
    }

    fn batch(&self) -> Option<EventBatch> {
        self.log.batch().filter(|_| self.streams)
    }

    pub fn on_engine_started(&mut self) {
        self.has_engine_started = true;
    }

    /// The engine was lost. True if another may begin again, because readers have received nothing that it would not
    /// write again: then the events that are not stored are dropped.
    pub fn restart(&mut self) -> bool {
        let may_restart = self.phase == Phase::Generating && self.is_unseen();
        if may_restart {
            self.begin_again();
        }
        may_restart
    }

    fn begin_again(&mut self) {
        self.log = Log::after(self.log.stored());
        self.may_go_on = false;
        self.has_engine_started = false;
    }

    pub fn on_events(&mut self, text: &[u8]) {
        if self.streams {
            self.log.push(text);
        }
    }

    /// The token ids of these events: a part, or empty, and whether a replica could go on after them.
    pub fn on_tokens(&mut self, part: Vec<u8>, may_go_on: bool) {
        if self.streams {
            self.may_go_on = may_go_on;
            self.log.push_tokens(part.into());
        }
    }

    /// The final event was written.
    pub fn on_last_event(&mut self, text: &[u8]) {
        match self.phase {
            Phase::Generating | Phase::Failing { .. } => {
                self.on_events(text);
                self.phase = Phase::Finalizing;
            }
            Phase::FailingInstead { keeps_output, .. } => {
                let number = self.log.stored();
                let batch = || EventBatch::new(number, number, text.to_vec());
                self.short = self.streams.then(batch);
                self.phase = Phase::FinalizingInstead { keeps_output };
            }
            // The run was stopped meanwhile.
            _ => {}
        }
    }

    /// The run must stop generating.
    pub fn on_stop(&mut self, reason: StopReason) {
        self.phase = match (self.phase, reason) {
            (Phase::Over { .. }, _) => return,
            (_, StopReason::LeaseLost) => {
                self.is_given_up = true;
                Phase::Over { is_complete: false }
            }
            (
                Phase::Generating
                | Phase::ReadingStored { reason: Some(_) }
                | Phase::ReadingToGoOn
                | Phase::SettingUp,
                StopReason::Cancelled,
            ) => Phase::ReadingCancelled,
            // The replica that takes it over can fail it, or go on with it, just as well.
            (
                Phase::ReadingStored { reason: Some(_) } | Phase::ReadingToGoOn | Phase::SettingUp,
                StopReason::Draining,
            ) => Phase::Releasing,
            (Phase::ReadingToGoOn | Phase::SettingUp, StopReason::TimeLimit) => {
                Phase::ReadingStored {
                    reason: Some(TOO_LONG),
                }
            }
            (Phase::Generating, StopReason::Draining) if self.may_move() => Phase::Releasing,
            (Phase::Generating, StopReason::Draining) => Phase::Failing { reason: STOPPED },
            (Phase::Generating, StopReason::TimeLimit) => Phase::Failing { reason: TOO_LONG },
            (Phase::Generating, StopReason::StoreRefused) => Phase::Failing { reason: REFUSED },
            // A run that is storing its end goes on; the store's answer decides.
            _ => return,
        };
        self.stop_reason = Some(reason);
    }

    /// Whether another replica may go on with it, or begin again.
    fn may_move(&self) -> bool {
        self.is_unseen() || self.may_go_on && !self.log.is_cut()
    }

    /// Whether readers have received nothing that another replica would not write again.
    fn is_unseen(&self) -> bool {
        !self.streams || self.log.stored() <= FIRST_EVENTS
    }

    pub fn on_started(&mut self, result: &Result<WriteOutcome, store::Error>) -> Then {
        match result {
            Ok(WriteOutcome::Gone | WriteOutcome::Terminal(_)) => self.on_ended_elsewhere(),
            Ok(WriteOutcome::Fenced) => self.on_lost(),
            Ok(_) => self.is_started = true,
            Err(error) if error.retry_after().is_some() => return Then::RetryLater,
            Err(_) => {
                // Go on to store the end; the store decides there.
                self.is_started = true;
                self.on_stop(StopReason::StoreRefused);
            }
        }
        Then::Continue
    }

    /// The store answered an append of events up to `last`.
    pub fn on_appended(&mut self, last: u64, result: &Result<WriteOutcome, store::Error>) -> Then {
        match result {
            Ok(WriteOutcome::Done | WriteOutcome::Duplicate { .. }) => self.log.on_stored(last),
            Ok(WriteOutcome::Overflow) => {
                self.log.on_overflow();
                self.log.on_stored(last);
            }
            Ok(WriteOutcome::Gap { last }) => self.on_gap(*last),
            Ok(WriteOutcome::Gone | WriteOutcome::Terminal(_)) => self.on_ended_elsewhere(),
            Ok(WriteOutcome::Fenced) => self.on_lost(),
            Err(error) if error.retry_after().is_some() => return Then::RetryLater,
            // Of these, no append has the first.
            Ok(WriteOutcome::NotAdded(_)) | Err(_) => self.on_stop(StopReason::StoreRefused),
        }
        Then::Continue
    }

    /// The store answered the write of the end.
    pub fn on_finalized(&mut self, result: &Result<WriteOutcome, store::Error>) -> Then {
        let (is_short, keeps_output) = match self.phase {
            Phase::Finalizing => (false, true),
            Phase::FinalizingInstead { keeps_output } => (true, keeps_output),
            _ => return Then::Continue,
        };
        match result {
            Ok(WriteOutcome::Done) if is_short => self.leave(),
            Ok(WriteOutcome::NotAdded(refusal)) => self.on_not_added(*refusal),
            Ok(WriteOutcome::Done) => {
                if let Some(batch) = self.batch() {
                    self.log.on_stored(batch.last);
                }
                self.phase = Phase::Over { is_complete: true };
            }
            Ok(WriteOutcome::Terminal(Status::Cancelled)) => self.phase = Phase::ReadingCancelled,
            Ok(WriteOutcome::Terminal(_) | WriteOutcome::Gone) => self.leave(),
            Ok(WriteOutcome::Fenced) => self.on_lost(),
            // The rejected end was stored in part after all: the replacement gets a later number.
            Ok(WriteOutcome::Gap { last: Some(last) } | WriteOutcome::Duplicate { last })
                if is_short =>
            {
                self.log.on_stored(*last);
                self.fail_instead(self.refused_end, keeps_output);
            }
            Ok(WriteOutcome::Gap { last }) => self.on_gap(*last),
            Ok(WriteOutcome::Duplicate { last }) => self.log.on_stored(*last),
            Ok(WriteOutcome::Overflow) => self.log.on_overflow(),
            Err(store::Error::TooLarge { .. }) if keeps_output => {
                self.fail_instead(TOO_LARGE, false);
            }
            // If the store never accepts this end, there is no smaller one.
            Err(error) => return self.later(error),
        }
        Then::Continue
    }

    /// Its conversation did not accept its items.
    fn on_not_added(&mut self, refusal: CommitRefusal) {
        let is_outdated = refusal == CommitRefusal::Unlocked;
        let is_first_end = self.phase == Phase::Finalizing;
        if is_outdated && is_first_end && self.is_unseen() && self.on_old_history() {
            self.phase = Phase::Generating;
            return self.begin_again();
        }
        self.fail_instead(FailReason::of_conversation(refusal), true);
    }

    /// True if it may be generated again, on another history.
    fn on_old_history(&mut self) -> bool {
        self.old_histories += 1;
        self.has_old_history = self.old_histories <= HISTORIES_MAX;
        self.has_old_history
    }

    fn fail_instead(&mut self, reason: FailReason, keeps_output: bool) {
        self.refused_end = reason;
        self.phase = Phase::FailingInstead {
            reason,
            keeps_output,
        };
    }

    /// Whether its history must be read anew before an engine is asked.
    pub fn has_old_history(&self) -> bool {
        self.phase == Phase::Generating && self.has_old_history
    }

    /// The history of now is read.
    pub fn on_new_history(&mut self) {
        self.has_old_history = false;
    }

    /// Retries a step if a retry can help. The driver bounds the retries.
    fn later(&mut self, error: &store::Error) -> Then {
        if error.retry_after().is_some() {
            return Then::RetryLater;
        }
        self.leave();
        Then::Continue
    }

    /// The task of the run has ended.
    pub fn on_left(&mut self) {
        if !self.is_over() {
            self.leave();
        }
    }

    fn on_gap(&mut self, last: Option<u64>) {
        if !self.log.rewind(last) {
            // Another replica wrote the missing events. The replica that takes over reads what is stored.
            self.stop_reason = Some(StopReason::LeaseLost);
            self.phase = Phase::Releasing;
        }
    }

    fn on_ended_elsewhere(&mut self) {
        self.stop_reason = Some(StopReason::Cancelled);
        self.phase = Phase::ReadingCancelled;
    }

    fn on_lost(&mut self) {
        self.stop_reason = Some(StopReason::LeaseLost);
        self.is_given_up = true;
        self.leave();
    }

    fn leave(&mut self) {
        self.phase = Phase::Over { is_complete: false };
    }

    /// Stored events after `after` that were written here, up to about `bytes_max` bytes.
    pub fn tail(&self, after: Option<u64>, bytes_max: usize) -> Tail<'_> {
        let is_end = self.phase == Phase::Over { is_complete: true };
        match self.log.tail(after, bytes_max) {
            Some((text, last)) if is_end || !self.is_over() => Tail::InMemory {
                text,
                last: if text.is_empty() {
                    self.log.stored().checked_sub(1)
                } else {
                    last
                },
                is_end,
            },
            _ if self.is_over() => Tail::NotRunning,
            _ => Tail::InStore,
        }
    }

    /// Whether an engine works on it, or one is to be found.
    pub fn is_generating(&self) -> bool {
        matches!(
            self.phase,
            Phase::Generating | Phase::ReadingToGoOn | Phase::SettingUp
        )
    }

    /// After a take-over: its conversation is not locked for it any more. Another response may have continued it, or it
    /// is deleted.
    pub fn on_conversation_lost(&mut self, refusal: CommitRefusal) {
        let reason = FailReason::of_conversation(refusal);
        let is_outdated = refusal == CommitRefusal::Unlocked && self.phase == Phase::Generating;
        if is_outdated && self.is_unseen() && self.on_old_history() {
            return;
        }
        self.phase = match self.phase {
            Phase::Generating => Phase::Failing { reason },
            Phase::ReadingToGoOn => Phase::ReadingStored {
                reason: Some(reason),
            },
            other => other,
        };
    }

    /// Whether nothing is left to do.
    pub fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over { .. })
    }
}

mod after_cancel;
mod taken_over;
#[cfg(test)]
mod tests;
