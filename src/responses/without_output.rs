//! A response for which no model is asked (`generate: false` over a WebSocket): its input becomes a response that can be
//! continued.

use std::sync::Arc;

use hyper::{HeaderMap, Response};

use super::events::EventRewriter;
use super::finish::Finisher;
use super::http_response::set_body_headers;
use super::outcome::{Outcome, Usage};
use super::service::Responses;
use super::template::ResponseTemplate;
use crate::http;
use crate::store::Status;

impl Responses {
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
            status: Status::Completed,
            output: b"[]".to_vec(),
            client_output: None,
            usage: Some(Usage::default()),
            incomplete_reason: None,
            error: None,
        };
        let template = events.template().clone();
        let finished = finisher.run(template, outcome, 0).await;
        if let Some(item) = &finished.state_item {
            events.add_state_item(item, &mut out);
        }
        events.end(&finished.response, &finished.outcome, &mut out);
        let mut headers = HeaderMap::new();
        set_body_headers(&mut headers, true);
        let mut response = Response::new(http::full(out));
        *response.headers_mut() = headers;
        response
    }
}
