//! What the store answers after a cancel or a release. Pure.

use super::RunState;
use crate::responses::background::run_phase::Phase;
use crate::responses::background::run_step::Then;
use crate::store::{self, CancelOutcome, Status, WriteOutcome};

impl RunState {
    /// The record of a response that should be cancelled: its status and the number of its last event.
    pub fn on_record(
        &mut self,
        result: &Result<Option<(Status, Option<u64>)>, store::Error>,
    ) -> Then {
        if self.phase != Phase::ReadingCancelled {
            return Then::Continue;
        }
        match result {
            Ok(Some((Status::Cancelled, last))) => {
                // The last number is the cancel's own.
                let is_here = self.log.rewind(last.and_then(|last| last.checked_sub(1)));
                self.phase = if is_here || !self.streams {
                    Phase::StoringPartial
                } else {
                    // Another replica stored the events.
                    Phase::ReadingStored { reason: None }
                };
            }
            // The store lost the cancel, which a client got confirmed.
            Ok(Some((Status::Queued | Status::InProgress, _))) => {
                self.phase = Phase::CancellingAgain;
            }
            Ok(_) => self.leave(),
            Err(error) => return self.later(error),
        }
        Then::Continue
    }

    pub fn on_cancelled_again(&mut self, result: &Result<CancelOutcome, store::Error>) -> Then {
        match result {
            Ok(_) => self.phase = Phase::ReadingCancelled,
            Err(error) => return self.later(error),
        }
        Then::Continue
    }

    pub fn on_partial_stored(&mut self, result: &Result<WriteOutcome, store::Error>) -> Then {
        match result {
            Ok(_) => self.leave(),
            Err(error) => return self.later(error),
        }
        Then::Continue
    }

    pub fn on_released(&mut self, result: &Result<WriteOutcome, store::Error>) -> Then {
        match result {
            // It was cancelled before the release.
            Ok(WriteOutcome::Terminal(Status::Cancelled)) => self.phase = Phase::ReadingCancelled,
            Ok(outcome) => {
                self.is_given_up = matches!(outcome, WriteOutcome::Done | WriteOutcome::Fenced);
                self.leave();
            }
            Err(error) => return self.later(error),
        }
        Then::Continue
    }
}
