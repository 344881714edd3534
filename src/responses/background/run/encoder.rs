//! Makes the events of a background run and its stored end: finished, failed, cancelled or too large. Reads the
//! clock and draws idempotency tokens, but does no I/O of its own.

use bytes::Bytes;
use hyper::StatusCode;

use crate::observe;
use crate::openai::error::ApiError;
use crate::responses::background::log::{self, Log};
use crate::responses::background::run_state::RunState;
use crate::responses::client_state::StateSigner;
use crate::responses::engine_error;
use crate::responses::events::{DONE, EventOptions, EventRewriter};
use crate::responses::fail_reason::FailReason;
use crate::responses::finish::{FinalResponse, Finisher};
use crate::responses::outcome::Outcome;
use crate::responses::template::ResponseTemplate;
use crate::store::record::{Content, Retention};
use crate::store::{
    CancelledOutput, Commit, EventBatch, Finalization, IdempotencyToken, RoutingHint,
};

/// The error message of a response whose engine's stream broke off.
const ENGINE_LOST: &str = "The connection to the engine was lost.";

pub(super) struct EventEncoder {
    template: ResponseTemplate,
    options: EventOptions,
    signer: Option<StateSigner>,
    events: EventRewriter,
    /// Whether [`EventEncoder::announce`] was called.
    pub(super) is_announced: bool,
    /// Written before the next event: how often the answer was continued.
    mark: Option<String>,
}

/// The end of a run, as it is stored.
pub(super) struct EndOfRun {
    token: IdempotencyToken,
    pub(super) outcome: Outcome,
    response: Bytes,
    retention: Retention,
    /// The text of all events, compressed. Empty if this replica does not have all of them.
    compressed_log: Bytes,
}

impl EventEncoder {
    pub(super) fn new(
        template: ResponseTemplate,
        options: EventOptions,
        signer: Option<StateSigner>,
    ) -> Self {
        let events = EventRewriter::new(template.clone(), options, signer.clone());
        Self {
            template,
            options,
            signer,
            events: events.in_background(),
            is_announced: false,
            mark: None,
        }
    }

    /// The events before an engine has answered: `response.created` and `response.queued`.
    pub(super) fn announce(&mut self) -> Vec<u8> {
        self.is_announced = true;
        let mut out = Vec::new();
        self.events.announce(&mut out);
        out
    }

    /// Turns bytes of the engine's stream into events, and returns the outcome once there is one.
    pub(super) fn push(&mut self, piece: &[u8]) -> (Vec<u8>, Option<Outcome>) {
        let mut out = Vec::with_capacity(piece.len() + piece.len() / 4);
        let mark = self.mark.take().unwrap_or_default();
        out.extend_from_slice(mark.as_bytes());
        let outcome = self.events.push(piece, &mut out);
        if out.len() == mark.len() {
            out.clear();
            self.mark = Some(mark).filter(|mark| !mark.is_empty());
        }
        (out, outcome)
    }

    /// The engine's stream ended without an outcome, after these `events`.
    pub(super) fn finish(&mut self, mut events: Vec<u8>) -> (Vec<u8>, Outcome) {
        let outcome = match self.events.finish(&mut events) {
            Some(outcome) => outcome,
            None => self.events.fail(ENGINE_LOST, &mut events),
        };
        (events, outcome)
    }

    /// Begins again, for another engine.
    pub(super) fn restart(&mut self) {
        self.events = self.new_rewriter();
        self.is_announced = false;
    }

    /// Goes on after the `count` events that another replica stored; `times`: how often that has happened. False if it
    /// cannot.
    pub(super) fn go_on_after(&mut self, stored: &[u8], count: u64, times: u32) -> bool {
        self.events = self.new_rewriter();
        self.is_announced = true;
        // A comment, which is no event of its own.
        self.mark = Some(format!(": x-warmroute-continued: {times}\n"));
        self.events.go_on_after(stored, count)
    }

    /// Whether reasoning items have a token of their own.
    pub(super) fn signs(&self) -> bool {
        self.signer.is_some()
    }

    /// The response fails because no engine accepted the request: with the code that the status stands for. A 429 means
    /// that it may be accepted later, unless clients are asked not to send it again.
    pub(super) fn fail_refused(&mut self, error: &ApiError) -> (Vec<u8>, Outcome) {
        let (out, mut outcome) = self.fail(&error.message);
        if let Some(failure) = &mut outcome.error {
            failure.code = match error.status {
                StatusCode::TOO_MANY_REQUESTS if error.is_not_retried() => {
                    engine_error::INVALID_PROMPT
                }
                status => engine_error::failure_code(Some(status)),
            };
        }
        (out, outcome)
    }

    /// As [`Self::fail`], for a reason of the router's own.
    pub(super) fn fail_because(&mut self, reason: FailReason) -> (Vec<u8>, Outcome) {
        let (out, mut outcome) = self.fail(reason.message);
        if let Some(failure) = &mut outcome.error {
            failure.code = reason.code;
        }
        (out, outcome)
    }

    /// The response fails with the output that this replica has read so far.
    fn fail(&mut self, reason: &str) -> (Vec<u8>, Outcome) {
        let mut out = Vec::new();
        let outcome = self.events.fail(reason, &mut out);
        (out, outcome)
    }

    /// The response fails after it was taken over. Its output is what the previous owner stored, from `log`.
    pub(super) fn fail_taken_over(&mut self, log: &Log, reason: FailReason) -> (Vec<u8>, Outcome) {
        let stored = log.stored_text().unwrap_or_default();
        let partial = self.new_rewriter().cancel_from(stored);
        self.events.continue_at(log.stored());
        let outcome = Outcome {
            output: partial.output,
            client_output: partial.client_output,
            ..Outcome::failed(reason.code, reason.message)
        };
        (Vec::new(), outcome)
    }

    fn new_rewriter(&self) -> EventRewriter {
        let events = EventRewriter::new(self.template.clone(), self.options, self.signer.clone());
        events.in_background()
    }

    pub(super) async fn compose(
        &self,
        finisher: &Finisher,
        outcome: &mut Outcome,
    ) -> FinalResponse {
        let (template, item_count) = (self.events.template(), self.events.item_count());
        finisher.compose(template, outcome, item_count).await
    }

    /// Writes the final events, and returns the end of the run to be stored.
    pub(super) fn conclude(
        &mut self,
        state: &mut RunState,
        final_response: FinalResponse,
        outcome: Outcome,
        retention: Retention,
    ) -> EndOfRun {
        let mut out = Vec::new();
        if let Some(item) = &final_response.state_item {
            self.events.add_state_item(item, &mut out);
        }
        state.on_events(&out);
        // Only a response with `stream: true` keeps its events.
        let compressed_log = if state.streams {
            state.log.compressed()
        } else {
            Bytes::new()
        };
        self.write_final_event(state, &final_response.response, &outcome);
        EndOfRun {
            token: IdempotencyToken(fastrand::u64(..)),
            outcome,
            response: final_response.response.into(),
            retention,
            compressed_log,
        }
    }

    /// Ends the response as failed, after the store rejected its end; with the output of that end, `kept`, if there is
    /// one. The final event gets the number `event_number`.
    pub(super) fn fail_instead(
        &mut self,
        state: &mut RunState,
        event_number: u64,
        reason: FailReason,
        kept: Option<Outcome>,
    ) -> EndOfRun {
        // What was not stored, no reader has received.
        let is_kept = kept.is_some() && state.streams;
        let stored = state.log.stored_text().filter(|_| is_kept);
        let compressed_log = stored.map(log::compressed).unwrap_or_default();
        let mut outcome = kept.unwrap_or_else(|| Outcome::failed(reason.code, reason.message));
        outcome.refuse(reason);
        let now_s = observe::unix_s().unsigned_abs();
        let response = self.template.ended(&outcome, now_s);
        self.events.continue_at(event_number);
        self.write_final_event(state, &response, &outcome);
        EndOfRun {
            token: IdempotencyToken(fastrand::u64(..)),
            outcome,
            response: response.into(),
            retention: Retention::Stored,
            compressed_log,
        }
    }

    fn write_final_event(&mut self, state: &mut RunState, response: &[u8], outcome: &Outcome) {
        let mut out = Vec::new();
        self.events.end(response, outcome, &mut out);
        // The marker is not stored.
        state.on_last_event(out.strip_suffix(DONE).unwrap_or(&out));
    }

    /// The output of a cancelled response. Built from the stored events, because readers may have received those and
    /// no others.
    pub(super) fn partial_output(&mut self, state: &RunState, response: Bytes) -> CancelledOutput {
        let stored = state.log.stored_text().filter(|_| state.streams);
        let new = self.new_rewriter();
        let outcome = match stored {
            Some(stored) => new.cancel_from(stored),
            None => std::mem::replace(&mut self.events, new).cancel(),
        };
        CancelledOutput {
            content: Content {
                response,
                output: outcome.output.into(),
            },
            delta_table: stored.map(log::compressed).unwrap_or_default(),
        }
    }
}

impl EndOfRun {
    /// The arguments of the store's finalize call; `batch`: events that are not stored yet.
    pub(super) fn finalization(
        &self,
        batch: Option<EventBatch>,
        commit: Option<Commit>,
        finisher: &Finisher,
    ) -> Finalization {
        Finalization {
            commit,
            retention: self.retention,
            token: self.token,
            status: self.outcome.status,
            content: Content {
                response: self.response.clone(),
                // One with a state token is not continued by its id, so its output is read by its client alone.
                output: Bytes::copy_from_slice(match finisher.client_state {
                    Some(_) => self.outcome.client_output(),
                    None => &self.outcome.output,
                }),
            },
            hint: RoutingHint {
                model: finisher.model.clone(),
                worker: finisher.worker.clone(),
            },
            batch,
            delta_table: self.compressed_log.clone(),
        }
    }
}
