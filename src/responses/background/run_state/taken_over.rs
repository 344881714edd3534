//! What another replica stored, read by the one that has taken the response over. Pure.

use super::RunState;
use crate::responses::background::log;
use crate::responses::background::run_phase::{LOST, Phase};
use crate::responses::background::run_step::Then;
use crate::store::{self, LoggedEvents};

impl RunState {
    /// LoggedEvents that another replica stored; `None`: the response is gone.
    pub fn on_stored_events(
        &mut self,
        result: &Result<Option<LoggedEvents>, store::Error>,
    ) -> Then {
        if !matches!(
            self.phase,
            Phase::ReadingStored { .. } | Phase::ReadingToGoOn
        ) {
            return Then::Continue;
        }
        let read = match result {
            Ok(Some(read)) => read,
            Ok(None) => {
                self.leave();
                return Then::Continue;
            }
            Err(error) if error.retry_after().is_some() => return Then::RetryLater,
            Err(_) => {
                // LoggedEvents that cannot be read are left out of the output.
                self.on_all_stored_read();
                return Then::Continue;
            }
        };
        let batches = read.batches.iter();
        for batch in batches.filter(|batch| &*batch.bytes != log::CANCELLED) {
            self.log.push_stored(batch);
        }
        if read.batches.is_empty() || self.log.made() >= self.log.stored() {
            self.on_all_stored_read();
        }
        Then::Continue
    }

    fn on_all_stored_read(&mut self) {
        if self.log.stored_text().is_none() {
            self.log.on_overflow_at(self.log.stored());
        }
        self.phase = match self.phase {
            Phase::ReadingStored {
                reason: Some(reason),
            } => Phase::Failing { reason },
            Phase::ReadingStored { reason: None } => Phase::StoringPartial,
            Phase::ReadingToGoOn => Phase::SettingUp,
            other => other,
        };
    }

    /// The run is set up to go on after the stored events, or cannot.
    pub fn on_set_up(&mut self, may_go_on: bool) {
        if self.phase != Phase::SettingUp {
            return;
        }
        self.phase = if may_go_on {
            // What the run writes from here on is all that it has.
            self.has_stored_output = false;
            self.may_go_on = true;
            Phase::Generating
        } else {
            Phase::Failing { reason: LOST }
        };
    }
}
