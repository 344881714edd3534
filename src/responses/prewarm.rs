//! A turn with `generate: false` over a WebSocket, for which no model is asked: its input becomes a response that can be
//! continued, and the prompt is sent ahead: an engine computes it and one token, so that its prefix cache has it when the
//! client goes on.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::Response;
use tracing::debug;

use super::additional_tools;
use super::client_request::{ClientRequest, EngineCall};
use super::engine_body;
use super::engine_call::collect;
use super::events::EventRewriter;
use super::finish::Finisher;
use super::http_response::events_response;
use super::outcome::{Outcome, Usage};
use super::request::CreateRequest;
use super::service::Responses;
use super::template::ResponseTemplate;
use crate::ids::ResponseId;
use crate::openai::body_budget::Reservation;
use crate::openai::error::ApiError;
use crate::relay::{RequestContext, RequestKind};
use crate::store::Status;
use crate::{http, observe};

/// The answer has a token or two, and is not used.
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// For the wait for a worker and the prompt together. A client goes on sooner, or has left: a prompt that is computed
/// later serves nobody, and meanwhile others wait for its memory.
const TIME_MAX: Duration = Duration::from_secs(30);

impl Responses {
    /// Sends the prompt ahead, unless as many prompts are being sent as may, or as many bodies of its client are kept.
    /// The client waits for none of it, and learns nothing if it fails. The prompt keeps the memory of the turn, for
    /// [`TIME_MAX`]. It counts in the limits of its tenant, as what it is: a prompt and a token, or two.
    pub(super) fn prewarm(
        self: &Arc<Self>,
        request: &ClientRequest<'_>,
        create: &CreateRequest<'_>,
        input: &[u8],
        id: ResponseId,
        salt: Option<&str>,
        reserved: &mut Reservation<'_>,
    ) {
        if additional_tools::has_no_prompt(input) {
            return;
        }
        let max = i64::from(self.settings.websocket.max_prewarms);
        let Some(in_flight) = self.metrics.begin_prewarm(max) else {
            return;
        };
        let Some(memory) = reserved.try_keep() else {
            return self.metrics.on_prewarm_skipped();
        };
        // An answer of one token has nothing for a decode worker, which would have to compute the prompt itself. A tenant that
        // may ask for one only would be refused two.
        let wanted = if self.relay.is_disaggregated() { 2 } else { 1 };
        let allowed = self
            .relay
            .max_output_tokens(request.admitted.tenant, &create.model);
        let tokens = allowed.unwrap_or(wanted).min(wanted);
        let body = engine_body::summary_body(create, input, &id.to_string(), salt, tokens);
        let (headers, original) = (request.headers.clone(), request.body.clone());
        let context = RequestContext {
            response: Some(id),
            kind: RequestKind::Background,
            deadline: Some(observe::now() + TIME_MAX),
            summary: None,
            ..request.context.clone()
        };
        let (responses, is_salted) = (self.clone(), salt.is_some());
        self.tasks.spawn(async move {
            let call = EngineCall {
                is_salted,
                ..EngineCall::new(context, &headers, &original)
            };
            let answer = responses.send_ahead(&call, body).await;
            if let Err(error) = &answer {
                debug!(id = %call.context.id, message = error.message, "prompt not sent ahead");
            }
            responses.metrics.on_prewarm(answer.is_ok());
            drop((in_flight, memory));
        });
    }

    async fn send_ahead(&self, call: &EngineCall<'_>, body: Bytes) -> Result<(), ApiError> {
        let answer = self.ask_response(call, body).await?;
        collect(answer.into_body(), ANSWER_BYTES_MAX, None).await?;
        Ok(())
    }

    /// The stream of a completed response without output.
    pub(super) async fn without_output(
        self: &Arc<Self>,
        template: ResponseTemplate,
        finisher: Finisher,
    ) -> Response<http::Body> {
        let mut events = EventRewriter::new(template, self.event_options(), None);
        let mut out = Vec::new();
        events.open(&mut out);
        let outcome = Outcome {
            usage: Some(Usage::default()),
            ..Outcome::empty(Status::Completed)
        };
        let template = events.template().clone();
        let finished = finisher.run(template, outcome, 0).await;
        if let Some(item) = &finished.state_item {
            events.add_state_item(item, &mut out);
        }
        events.end(&finished.response, &finished.outcome, &mut out);
        events_response(http::full(out))
    }
}
