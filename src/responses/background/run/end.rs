//! The end of a run: it is stored, a cancelled response gets its output, or the response is released.

use bytes::Bytes;
use tokio::time::sleep;
use tracing::{debug, warn};

use super::{READ_BYTES, Runner, STORE_PAUSE, in_conversation};
use crate::observe;
use crate::responses::background::cancel::cancellation;
use crate::responses::background::recent_ends::EndWrite;
use crate::responses::background::run_step::{Step, Then};
use crate::store::{self, CancelledOutput, WriteOutcome};

impl Runner<'_> {
    /// Stores the end, finalises after a cancel, or releases the response.
    pub(super) async fn store_end(&mut self) {
        let (store, key, fence) = (&self.responses.store, self.guard.key, self.guard.run.fence);
        let state = &self.guard.run.state;
        let mut response = Bytes::new();
        let mut partial: Option<CancelledOutput> = None;
        loop {
            let then = match self.next() {
                Step::Done => return,
                // The run stopped before this was stored.
                Step::MarkStarted => {
                    let result = store.start(key, fence).await;
                    state.lock().on_started(&result)
                }
                Step::Fail {
                    reason,
                    has_stored_output,
                } => {
                    let (events, outcome) = if has_stored_output {
                        self.encoder.fail_taken_over(&state.lock().log, reason)
                    } else {
                        self.encoder.fail_because(reason)
                    };
                    self.conclude(&events, outcome).await;
                    Then::Continue
                }
                Step::FailInstead {
                    number,
                    reason,
                    keeps_output,
                } => {
                    // A failed response leaves nothing in its conversation.
                    let commit = self.commit.take();
                    in_conversation::unlock(self.responses, commit).await;
                    let kept = self.end.take().filter(|_| keeps_output);
                    let kept = kept.map(|end| end.outcome);
                    let mut state = state.lock();
                    let end = self.encoder.fail_instead(&mut state, number, reason, kept);
                    self.end = Some(end);
                    Then::Continue
                }
                Step::Finalize(batch) => {
                    if let Some(end) = self.end.as_ref().filter(|_| self.commit.is_none()) {
                        let outcome = &end.outcome;
                        self.commit = in_conversation::commit(&mut self.finisher, outcome).await;
                    }
                    let Some(end) = &self.end else {
                        warn!(response_id = %key.id, "background response has no end to store; another replica takes it over");
                        return;
                    };
                    let end = end.finalization(batch, self.commit.clone(), &self.finisher);
                    let result = store.finalize(key, fence, end.clone()).await;
                    if result == Ok(WriteOutcome::Done) {
                        self.responses.background.failures.lock().reset();
                        let write = EndWrite::Finalized(fence, end);
                        self.responses.background.on_end_written(key, write);
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
                Step::ReadCancelled => {
                    let result = store.get(key).await.map(|found| {
                        let found = found?;
                        let last = found
                            .background
                            .and_then(|background| background.last_event);
                        response = found.content.response;
                        Some((found.status, last))
                    });
                    state.lock().on_record(&result)
                }
                Step::CancelAgain => {
                    let result = store.cancel(key, cancellation(&response)).await;
                    state.lock().on_cancelled_again(&result)
                }
                Step::StorePartial => {
                    let partial = partial.get_or_insert_with(|| {
                        let response = std::mem::take(&mut response);
                        self.encoder.partial_output(&state.lock(), response)
                    });
                    let result = store.finalize_cancelled(key, fence, partial.clone()).await;
                    match &result {
                        Ok(WriteOutcome::Done) => self.on_cancelled_stored(partial.clone()),
                        Ok(_) => {}
                        Err(error) => {
                            self.say(error, "partial output of a cancelled response not stored");
                        }
                    }
                    state.lock().on_partial_stored(&result)
                }
                Step::Release => {
                    let result = store.release(key, fence).await;
                    if let Err(error) = &result {
                        self.say(error, "background response not released; others take it over when the lease ends");
                    }
                    state.lock().on_released(&result)
                }
                Step::ReadStored { after } => {
                    let result = store.events(key, after, READ_BYTES).await;
                    state.lock().on_stored_events(&result)
                }
                Step::ReadEngine | Step::Append(_) | Step::GoOn => return,
            };
            if then == Then::RetryLater {
                sleep(STORE_PAUSE).await;
            }
        }
    }

    /// A write failed, which is tried again: says it when the failure is another one than before, of whatever run. Hundreds
    /// of runs end while a store is away.
    pub(super) fn say(&self, error: &store::Error, what: &str) {
        let mut failures = self.responses.background.failures.lock();
        let is_new = failures.should_log(observe::now(), error.as_str());
        drop(failures);
        if is_new {
            warn!(response_id = %self.guard.key.id, %error, "{what}; more runs may have this");
        } else {
            debug!(response_id = %self.guard.key.id, %error, "{what}");
        }
    }

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
