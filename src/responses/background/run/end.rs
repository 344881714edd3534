//! The end of a run: it is stored, a cancelled response gets its output, or the response is released.

use tracing::{debug, warn};

use super::{Runner, in_conversation};
use crate::observe;
use crate::responses::background::log::CANCELLED;
use crate::responses::background::recent_ends::EndWrite;
use crate::responses::background::run_step::Then;
use crate::responses::fail_reason::FailReason;
use crate::responses::object::with_member;
use crate::store::{
    self, Cancellation, CancelledOutput, EventBatch, IdempotencyToken, WriteOutcome,
};

impl Runner<'_, '_> {
    /// Builds the end of a failed response. `has_stored_output`: its output is what another replica stored.
    pub(super) async fn fail(&mut self, reason: FailReason, has_stored_output: bool) -> Then {
        let (events, outcome) = if has_stored_output {
            let state = self.guard.run.state.lock();
            self.encoder.fail_taken_over(state.log(), reason)
        } else {
            self.encoder.fail_because(reason)
        };
        self.conclude(&events, outcome).await;
        Then::Continue
    }

    /// Builds a failed response in place of an end that the store rejects; its final event gets this number.
    pub(super) async fn fail_instead(
        &mut self,
        number: u64,
        reason: FailReason,
        keeps_output: bool,
    ) -> Then {
        // A failed response leaves nothing in its conversation.
        let commit = self.commit.take();
        in_conversation::unlock(self.responses, commit).await;
        let kept = self.end.take().filter(|_| keeps_output);
        let kept = kept.map(|end| end.outcome);
        let mut state = self.guard.run.state.lock();
        let end = self.encoder.fail_instead(&mut state, number, reason, kept);
        self.end = Some(end);
        Then::Continue
    }

    /// Stores the end, with these last events.
    pub(super) async fn finalize(&mut self, batch: Option<EventBatch>) -> Then {
        let (key, fence) = (self.guard.key, self.guard.run.fence);
        let (store, background) = (&self.responses.store, &self.responses.background);
        let state = &self.guard.run.state;
        if let Some(end) = self.end.as_ref().filter(|_| self.commit.is_none()) {
            let outcome = &end.outcome;
            self.commit = in_conversation::commit(&mut self.finisher, outcome).await;
        }
        let Some(end) = &self.end else {
            warn!(response_id = %key.id, "background response has no end to store; another replica takes it over");
            state.lock().on_left();
            return Then::Continue;
        };
        let end = end.finalization(batch, self.commit.clone(), &self.finisher);
        let result = store.finalize(key, fence, end.clone()).await;
        if result == Ok(WriteOutcome::Done) {
            background.failures.lock().reset();
            background.on_end_written(key, EndWrite::Finalized(fence, end));
        }
        if let Err(error) = &result {
            self.say(error, "end of a background response not stored");
        }
        if let Ok(WriteOutcome::NotAdded(refusal)) = result {
            let commit = self.commit.take();
            in_conversation::on_not_added(self.responses, key, refusal, commit).await;
        }
        let then = state.lock().on_finalized(&result);
        self.on_finalized(&result);
        then
    }

    /// Reads the record, whose status should be cancelled.
    pub(super) async fn read_cancelled(&mut self) -> Then {
        let read = self.responses.store.get(self.guard.key).await;
        let result = read.map(|found| {
            let found = found?;
            let last = found
                .background
                .and_then(|background| background.last_event);
            self.cancelled = found.content.response;
            Some((found.status, last))
        });
        self.guard.run.state.lock().on_record(&result)
    }

    /// Cancels the response again, whose cancel the store has lost.
    pub(super) async fn cancel_again(&mut self) -> Then {
        let cancel = cancellation(&self.cancelled);
        let result = self.responses.store.cancel(self.guard.key, cancel).await;
        self.guard.run.state.lock().on_cancelled_again(&result)
    }

    /// Stores the output of a cancelled response.
    pub(super) async fn store_partial(&mut self) -> Then {
        let (key, fence) = (self.guard.key, self.guard.run.fence);
        let (store, state) = (&self.responses.store, &self.guard.run.state);
        let partial = self
            .partial
            .get_or_insert_with(|| {
                let response = std::mem::take(&mut self.cancelled);
                self.encoder.partial_output(&state.lock(), response)
            })
            .clone();
        let result = store.finalize_cancelled(key, fence, partial.clone()).await;
        match &result {
            Ok(WriteOutcome::Done) => self.on_cancelled_stored(partial),
            Ok(_) => {}
            Err(error) => self.say(error, "partial output of a cancelled response not stored"),
        }
        state.lock().on_partial_stored(&result)
    }

    /// Gives the response up, so that any replica may take it over.
    pub(super) async fn release(&mut self) -> Then {
        let (key, run) = (self.guard.key, &self.guard.run);
        let result = self.responses.store.release(key, run.fence).await;
        if let Err(error) = &result {
            self.say(
                error,
                "background response not released; others take it over when the lease ends",
            );
        }
        run.state.lock().on_released(&result)
    }

    /// A write failed, which is tried again: says it when the failure is another one than before, of whatever run. Hundreds
    /// of runs end while a store is away.
    fn say(&self, error: &store::Error, what: &str) {
        let mut failures = self.responses.background.failures.lock();
        let is_new = failures.should_log(observe::now(), error.as_str());
        drop(failures);
        if is_new {
            warn!(response_id = %self.guard.key.id, %error, "{what}; more runs may have this");
        } else {
            debug!(response_id = %self.guard.key.id, %error, "{what}");
        }
    }

    /// The output of a cancelled response is stored.
    fn on_cancelled_stored(&self, output: CancelledOutput) {
        let write = EndWrite::Cancelled {
            cancel: cancellation(&output.content.response),
            output: Some((self.guard.run.fence, output)),
        };
        let background = &self.responses.background;
        background.on_end_written(self.guard.key, write);
    }

    /// The end is stored: wakes the readers here.
    fn on_finalized(&mut self, result: &Result<WriteOutcome, store::Error>) {
        if *result != Ok(WriteOutcome::Done) {
            return;
        }
        self.commit = None;
        self.guard.run.updates.send_modify(|count| *count += 1);
        if let Some(end) = self.end.take() {
            self.responses.metrics.on_end(end.outcome.status);
        }
    }
}

/// A cancel of a response whose cancel was lost. `response`: its object, without output.
fn cancellation(response: &[u8]) -> Cancellation {
    Cancellation {
        token: IdempotencyToken(fastrand::u64(..)),
        response: with_member(response, "status", "\"cancelled\"").into(),
        event: CANCELLED.into(),
    }
}
