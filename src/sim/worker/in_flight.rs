//! Counts an inference request while it is answered, and how it ends.

use std::sync::Arc;

use super::shared::Shared;
use super::transfer::params::Leg;

/// Counts an inference request as running until it is dropped. It counts as aborted unless `finish` or `refuse` was
/// called.
#[must_use = "dropping the guard counts the request as aborted"]
#[derive(Debug)]
pub(crate) struct InFlight {
    shared: Arc<Shared>,
    leg: Leg,
    outcome: Outcome,
}

#[derive(Clone, Copy, Debug)]
enum Outcome {
    Finished,
    Refused,
    Aborted,
}

impl InFlight {
    pub(crate) fn begin(shared: &Arc<Shared>, leg: Leg) -> Self {
        shared.recorder.count(|stats| stats.running += 1);
        let is_wrong_role = !leg.is_for(shared.settings.transfer.role());
        shared.transfers.count(|stats| {
            stats.wrong_role += u64::from(is_wrong_role);
            match leg {
                Leg::Whole => {}
                Leg::Prefill => stats.prefill_legs += 1,
                Leg::Decode => stats.decode_legs += 1,
            }
        });
        Self {
            shared: Arc::clone(shared),
            leg,
            outcome: Outcome::Aborted,
        }
    }

    pub(crate) fn finish(mut self) {
        self.outcome = Outcome::Finished;
    }

    pub(crate) fn refuse(mut self) {
        self.outcome = Outcome::Refused;
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.shared.recorder.count(|stats| {
            stats.running -= 1;
            match self.outcome {
                Outcome::Finished => stats.finished += 1,
                Outcome::Refused => stats.refused += 1,
                Outcome::Aborted => stats.aborted += 1,
            }
        });
        if let Outcome::Aborted = self.outcome {
            self.shared.transfers.count(|stats| match self.leg {
                Leg::Whole => {}
                Leg::Prefill => stats.aborted_prefill_legs += 1,
                Leg::Decode => stats.aborted_decode_legs += 1,
            });
        }
    }
}
