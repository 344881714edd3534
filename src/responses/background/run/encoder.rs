//! What a background response says: its events, and its end in each of the ways it may end. Pure but for
//! the date.

use bytes::Bytes;

use crate::observe;
use crate::openai::error::ApiError;
use crate::responses::background::log::{self, Log};
use crate::responses::background::run_state::RunState;
use crate::responses::client_state::StateSigner;
use crate::responses::events::{EventOptions, EventRewriter};
use crate::responses::finish::{FinalResponse, Finisher};
use crate::responses::object::{Outcome, ResponseTemplate};
use crate::store::record::Content;
use crate::store::{CancelledOutput, EventBatch, Finalization, IdempotencyToken, RoutingHint};

/// It ends each reader's stream, and is no event.
const MARK: &[u8] = b"data: [DONE]\n\n";
const TOO_LARGE: &str = "The response is larger than the store allows.";

pub(super) struct EventEncoder {
    template: ResponseTemplate,
    limits: EventOptions,
    state_signer: Option<StateSigner>,
    events: EventRewriter,
    is_announced: bool,
}

/// How it ended, to be stored.
pub(super) struct End {
    token: IdempotencyToken,
    pub(super) outcome: Outcome,
    response: Bytes,
    cut: Bytes,
}

impl EventEncoder {
    pub(super) fn new(
        template: ResponseTemplate,
        limits: EventOptions,
        state_signer: Option<StateSigner>,
    ) -> Self {
        let events = EventRewriter::new(template.clone(), limits, state_signer.clone());
        Self {
            template,
            limits,
            state_signer,
            events: events.in_background(),
            is_announced: false,
        }
    }

    pub(super) fn is_announced(&self) -> bool {
        self.is_announced
    }

    /// Says that it waits.
    pub(super) fn announce(&mut self) -> Vec<u8> {
        self.is_announced = true;
        let mut out = Vec::new();
        self.events.announce(&mut out);
        out
    }

    /// What an engine said, and how it ended once it has.
    pub(super) fn push(&mut self, heard: &[u8], is_over: bool) -> (Vec<u8>, Option<Outcome>) {
        let mut out = Vec::with_capacity(heard.len() + heard.len() / 4);
        let mut outcome = self.events.push(heard, &mut out);
        if is_over && outcome.is_none() {
            outcome = self.events.finish(&mut out);
        }
        (out, outcome)
    }

    /// No engine took it.
    pub(super) fn refuse(&mut self, error: &ApiError) -> (Vec<u8>, Outcome) {
        let (out, mut outcome) = self.fail(&error.message);
        if let Some(failure) = &mut outcome.error
            && error.status.is_client_error()
        {
            failure.code = "invalid_prompt";
        }
        (out, outcome)
    }

    pub(super) fn fail(&mut self, why: &str) -> (Vec<u8>, Outcome) {
        let mut out = Vec::new();
        let outcome = self.events.refuse(why, &mut out);
        (out, outcome)
    }

    /// It fails after what another replica told of it: that is its output.
    pub(super) fn fail_after(&mut self, log: &Log, why: &str) -> (Vec<u8>, Outcome) {
        let partial = self
            .again()
            .cut_again(log.stored_text().unwrap_or_default());
        self.events.go_on_at(log.stored());
        let outcome = Outcome {
            output: partial.output,
            told: partial.told,
            ..Outcome::failed("server_error", why)
        };
        (Vec::new(), outcome)
    }

    fn again(&self) -> EventRewriter {
        let events = EventRewriter::new(
            self.template.clone(),
            self.limits,
            self.state_signer.clone(),
        );
        events.in_background()
    }

    /// The object that it ends as, and an item of the router's own.
    pub(super) async fn compose(&self, finish: &Finisher, outcome: &mut Outcome) -> FinalResponse {
        let (template, place) = (self.events.template(), self.events.place());
        finish.compose(template, outcome, place).await
    }

    /// Its last events.
    pub(super) fn conclude(
        &mut self,
        state: &mut RunState,
        (response, state_item): FinalResponse,
        outcome: Outcome,
    ) -> End {
        let mut out = Vec::new();
        if let Some((added, done)) = &state_item {
            self.events.add_item(added, done, &mut out);
        }
        state.on_events(&out);
        let text = state.log().text().filter(|_| state.streams());
        let cut = text.map(log::sealed).unwrap_or_default();
        self.last(state, &response, &outcome);
        End {
            token: IdempotencyToken(fastrand::u64(..)),
            outcome,
            response: response.into(),
            cut,
        }
    }

    /// Its end without its output, which the store would not keep.
    pub(super) fn shorten(&mut self, state: &mut RunState, number: u64) -> End {
        let outcome = Outcome::failed("server_error", TOO_LARGE);
        let response = self
            .template
            .ended(&outcome, observe::unix_s().unsigned_abs());
        self.events.go_on_at(number);
        self.last(state, &response, &outcome);
        End {
            token: IdempotencyToken(fastrand::u64(..)),
            outcome,
            response: response.into(),
            cut: Bytes::new(),
        }
    }

    fn last(&mut self, state: &mut RunState, response: &[u8], outcome: &Outcome) {
        let mut out = Vec::new();
        self.events.end(response, outcome, &mut out);
        state.on_last_event(out.strip_suffix(MARK).unwrap_or(&out));
    }

    /// What there is of a cancelled response: what its readers were told, and no more.
    pub(super) fn cut(&mut self, state: &RunState, response: Bytes) -> CancelledOutput {
        let told = state.log().stored_text().filter(|_| state.streams());
        let outcome = match told {
            Some(told) => self.again().cut_again(told),
            None => {
                let again = self.again();
                std::mem::replace(&mut self.events, again).cut()
            }
        };
        CancelledOutput {
            content: Content {
                response,
                output: outcome.output.into(),
            },
            delta_table: told.map(log::sealed).unwrap_or_default(),
        }
    }
}

impl End {
    pub(super) fn with(&self, batch: Option<EventBatch>, finish: &Finisher) -> Finalization {
        Finalization {
            token: self.token,
            status: self.outcome.status,
            content: Content {
                response: self.response.clone(),
                output: Bytes::copy_from_slice(&self.outcome.output),
            },
            hint: RoutingHint {
                model: finish.model.clone(),
                worker: finish.worker.clone(),
            },
            batch,
            delta_table: self.cut.clone(),
        }
    }
}
