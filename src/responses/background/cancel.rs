//! Cancelling from any replica: sets the status in the record first; the owner gets a notice and stops its run.

use super::log::CANCELLED;
use super::recent_ends::EndWrite;
use crate::observe;
use crate::openai::error::ApiError;
use crate::responses::object::with_member;
use crate::responses::retry;
use crate::responses::service::Responses;
use crate::store::{CancelOutcome, Cancellation, IdempotencyToken, Record, ResponseKey, Status};

impl Responses {
    /// Cancels a running response. One that has ended stays as it is.
    pub(in crate::responses) async fn cancel_in_background(
        &self,
        key: ResponseKey,
        record: &Record,
    ) -> Result<(), ApiError> {
        let requested = observe::now();
        let cancel = cancellation(&record.content.response);
        match retry::until_known(|| self.store.cancel(key, cancel.clone())).await? {
            CancelOutcome::Done { .. } => {
                self.metrics.on_end(Status::Cancelled);
                self.background.on_cancelled(key, requested);
                let output = None;
                let write = EndWrite::Cancelled { cancel, output };
                self.background.on_end_written(key, write);
                let took = observe::now().saturating_duration_since(requested);
                let seconds = &self.background.metrics.cancel_seconds;
                seconds.observe(took.as_secs_f64());
                Ok(())
            }
            CancelOutcome::Terminal(_) => Ok(()),
            CancelOutcome::NotBackground => Err(ApiError::foreground_cancel()),
            CancelOutcome::Gone => Err(ApiError::unknown_response(&key.id.to_string())),
        }
    }
}

/// A cancel of a response. `response`: its object, without output.
pub(super) fn cancellation(response: &[u8]) -> Cancellation {
    Cancellation {
        token: IdempotencyToken(fastrand::u64(..)),
        response: with_member(response, "status", "\"cancelled\"").into(),
        event: CANCELLED.into(),
    }
}
