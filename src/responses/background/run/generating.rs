//! The answer of a run's engine: asked for, read, and stored as it arrives.

use tracing::{debug, warn};

use super::Runner;
use super::engine_stream::{EngineStream, PACE};
use crate::relay::ServedBy;
use crate::responses::background::run_step::Then;
use crate::responses::client_request::EngineCall;
use crate::responses::outcome::Outcome;
use crate::store::{EventBatch, Status, WriteOutcome};

impl Runner<'_, '_> {
    /// Asks an engine, or reads on from its answer. Dropping this future while it asks closes the connection to the
    /// engine.
    pub(super) async fn read_engine(&mut self) -> Then {
        let (background, run) = (&self.responses.background, &self.guard.run);
        if !self.encoder.is_announced() {
            run.state.lock().on_events(&self.encoder.announce());
            return Then::Continue;
        }
        let Some(stream) = &mut self.engine else {
            self.ask_engine().await;
            return Then::Continue;
        };
        let updates = &run.updates;
        let is_over = stream.read(PACE, || updates.receiver_count() > 0).await;
        let (events, outcome) = self.encoder.push(&stream.take());
        run.state.lock().on_engine_started();
        let is_lost = outcome.as_ref().map_or(is_over, Outcome::is_engine_lost);
        // If no reader has received any of it, another engine may do better.
        let may_ask_again = is_lost && self.attempts < background.settings.max_attempts;
        if may_ask_again && run.state.lock().restart() {
            let attempts = self.attempts;
            debug!(response_id = %self.guard.key.id, attempts, "engine lost before any output was seen; trying another");
            self.attempts += 1;
            self.restart();
            return Then::RetryLater;
        }
        let (events, outcome) = match outcome {
            Some(outcome) => (events, outcome),
            None if !is_over => {
                self.on_output(&events);
                return Then::Continue;
            }
            None => self.encoder.finish(events),
        };
        let is_failed = outcome.status == Status::Failed;
        self.conclude(&events, outcome).await;
        if let Some(stream) = self.engine.take().filter(|_| !is_failed) {
            stream.drain().await;
        }
        Then::Continue
    }

    async fn ask_engine(&mut self) {
        let call = EngineCall {
            progress: self.progress.as_ref(),
            resumed: self.resumed.as_ref(),
            ..EngineCall::new(self.context.clone(), self.headers, self.request.input())
        };
        let answer = self
            .responses
            .wait_for_engine(self.create, &self.request, self.name, &call)
            .await;
        if let Some(resumed) = &self.resumed {
            self.on_resumed(resumed, answer.as_ref().err());
        }
        match answer {
            Ok(answer) => {
                let served_by = answer.extensions().get::<ServedBy>();
                self.finisher.worker = served_by.map(|worker| worker.0.clone());
                self.engine = Some(EngineStream::new(answer.into_body()));
            }
            Err(error) => {
                let (events, outcome) = self.encoder.fail_refused(&error);
                self.conclude(&events, outcome).await;
            }
        }
    }

    /// Stores events.
    pub(super) async fn append(&mut self, batch: EventBatch) -> Then {
        let (key, run) = (self.guard.key, &self.guard.run);
        let metrics = &self.responses.background.metrics;
        let (last, bytes) = (batch.last, batch.bytes.len() as u64);
        let result = self.responses.store.append(key, run.fence, batch).await;
        if let Err(error) = &result
            && error.retry_after().is_none()
        {
            warn!(response_id = %key.id, %error, "events of a background response not stored; the response fails");
        }
        if let Ok(WriteOutcome::Done | WriteOutcome::Overflow) = result {
            metrics.event_bytes.inc_by(bytes);
        }
        if result == Ok(WriteOutcome::Overflow) && !run.state.lock().log().is_cut() {
            metrics.logs_cut.inc();
        }
        let then = run.state.lock().on_appended(last, &result);
        run.updates.send_modify(|count| *count += 1);
        then
    }

    /// The end was refused, and nobody has read any of it.
    pub(super) fn begin_on_new_history(&mut self) {
        debug!(response_id = %self.guard.key.id, "another response was added to the conversation first; generating again");
        self.attempts = 1;
        self.resumed = None;
        self.restart();
    }

    /// Begins again, for another engine.
    fn restart(&mut self) {
        self.responses.background.metrics.restarted.inc();
        self.engine = None;
        self.encoder.restart();
        if let Some(progress) = &self.progress {
            progress.restart();
        }
    }
}
