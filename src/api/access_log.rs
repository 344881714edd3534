//! The access log: one line for each request, written when its response has been sent or the client has
//! disconnected. The trace of a request that is traced ends there, too.

use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::header::HeaderValue;
use hyper::{HeaderMap, Method, Response, StatusCode, Uri};
use tracing::{Level, enabled, info};

use super::route_name;
use crate::http::drain::Tasks;
use crate::http::{self, BodyError};
use crate::ids::RequestId;
use crate::observe::{self, ACCESS_LOG};
use crate::relay::SummaryCell;
use crate::traces::{RequestEnd, RequestTrace, TraceContext};

/// Collects the fields of one request's line. Dropping the value writes the line, so that every request is
/// logged, however it ends: with an error, by a client that disconnects, or in a drain.
#[derive(Debug)]
pub(super) struct AccessLine {
    began: Instant,
    method: Method,
    uri: Uri,
    client: IpAddr,
    /// The router's id of the request; engines receive it, and the other log lines contain it.
    id: RequestId,
    /// The id in the client's `x-request-id`, if it sent one.
    pub(super) client_request_id: Option<HeaderValue>,
    /// The client's, or that of the request's own trace.
    trace_id: Option<u128>,
    pub(super) tenant: Option<Arc<str>>,
    status: Option<StatusCode>,
    /// The code of the error response, if the router itself made it.
    pub(super) error_code: Option<&'static str>,
    /// Bytes of the response body so far.
    bytes: u64,
    /// Whether the whole response was sent.
    is_sent: bool,
    /// The request waits, and is tried again with a line of its own.
    pub(super) is_unlogged: bool,
    tasks: Tasks,
    /// Worker, model, tokens and times, which the relay fills in while it forwards the request.
    pub(super) summary: SummaryCell,
}

impl AccessLine {
    /// `None` if the request is neither logged nor traced.
    pub(super) fn begin(
        (method, uri, headers): (&Method, &Uri, &HeaderMap),
        id: RequestId,
        client: IpAddr,
        tasks: &Tasks,
        trace: Option<Arc<RequestTrace>>,
    ) -> Option<Box<Self>> {
        if trace.is_none() && !enabled!(target: ACCESS_LOG, Level::INFO) {
            return None;
        }
        let context = match &trace {
            Some(trace) => Some(trace.context()),
            None => TraceContext::of_headers(headers),
        };
        Some(Box::new(Self {
            began: observe::now(),
            method: method.clone(),
            uri: uri.clone(),
            client,
            id,
            client_request_id: None,
            trace_id: context.map(|context| context.trace_id),
            tenant: None,
            status: None,
            error_code: None,
            bytes: 0,
            is_sent: false,
            is_unlogged: false,
            tasks: tasks.clone(),
            summary: SummaryCell::traced(trace),
        }))
    }

    fn end_trace(&self, trace: &RequestTrace, ended: Instant, outcome: &'static str) {
        let error = match outcome {
            COMPLETE => None,
            ERROR => self.error_code,
            outcome => Some(outcome),
        };
        let status = self.status.map(|status| status.as_u16());
        let end = RequestEnd {
            method: Some(self.method.clone()),
            path: Some(shortened(self.uri.path()).to_owned()),
            route: route_name::of(self.uri.path()),
            status,
            client: Some(self.client),
            error,
            tenant: self.tenant.clone(),
            id: Some(self.id),
            response: None,
        };
        trace.end(ended, end);
    }
}

impl Drop for AccessLine {
    fn drop(&mut self) {
        let summary = self.summary.read();
        // Both counts are 0 if the engine reported no usage; the line then has no token fields.
        let has_tokens = summary.prompt_tokens > 0 || summary.generation_tokens > 0;
        let tokens = |count: u64| has_tokens.then_some(count);
        // A failure that the relay recorded comes first; then an error response; then whether all was sent.
        let outcome = match (summary.outcome, self.error_code) {
            (Some(outcome), _) if outcome != COMPLETE => outcome,
            (_, Some(_)) => ERROR,
            _ if self.is_sent => COMPLETE,
            _ => DISCONNECTED,
        };
        // A connection that the drain closed looks like one that the client closed. Most answers got their end before.
        let is_drained = self.error_code.is_none() && self.tasks.last_part().has_begun();
        let outcome = match outcome {
            DISCONNECTED if self.tasks.is_aborted() => DRAINED,
            ROUTER_FAILED if is_drained => DRAINED,
            outcome => outcome,
        };
        let ended = observe::now();
        if let Some(trace) = self.summary.trace() {
            self.end_trace(trace, ended, outcome);
        }
        let is_well = outcome == COMPLETE && self.status.is_some_and(|status| status.is_success());
        if self.is_unlogged || (is_well && !observe::is_access_sampled()) {
            return;
        }
        let client_request_id = self.client_request_id.as_ref();
        let client_request_id = client_request_id
            .and_then(|id| id.to_str().ok())
            .map(shortened);
        info!(
            target: ACCESS_LOG,
            method = self.method.as_str(),
            path = shortened(self.uri.path()),
            model = summary.model.as_deref(),
            requested_model = summary.requested_model.as_deref(),
            tenant = self.tenant.as_deref(),
            worker = summary.worker.as_deref(),
            rank = summary.rank,
            prefill_worker = summary.prefill_worker.as_deref(),
            prefill_rank = summary.prefill_rank,
            reason = summary.reason,
            status = self.status.map(|status| status.as_u16()),
            outcome,
            error_code = self.error_code,
            prompt_tokens = tokens(summary.prompt_tokens),
            cached_tokens = tokens(summary.cached_tokens),
            generation_tokens = tokens(summary.generation_tokens),
            queue_ms = summary.queued.map(milliseconds),
            ttft_ms = summary.time_to_first_token.map(milliseconds),
            duration_ms = milliseconds(ended - self.began),
            bytes = self.bytes,
            retries = summary.attempts.saturating_sub(1),
            continued = (summary.continued > 0).then_some(summary.continued),
            client = %self.client,
            id = self.id.as_str(),
            client_request_id,
            trace_id = self.trace_id.map(|id| format!("{id:032x}")),
            "request"
        );
    }
}

/// Bounds what a client can write into a line: paths and ids of requests are at most some tens of bytes.
const MAX_TEXT_BYTES: usize = 2_048;
/// The outcome of a response that was sent completely.
const COMPLETE: &str = "complete";
const DISCONNECTED: &str = "client_disconnected";
/// The router itself failed in the middle of a response.
const ROUTER_FAILED: &str = "router_failed";
/// The drain was over before the response.
const DRAINED: &str = "drain_timeout";
/// The outcome of an error response that the router itself made.
const ERROR: &str = "error";

/// A text of the client's, up to [`MAX_TEXT_BYTES`].
fn shortened(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_TEXT_BYTES)]
}

/// In milliseconds, rounded down to microseconds.
fn milliseconds(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1e3
}

/// A response body that writes the request's access log line when it is dropped.
#[derive(Debug)]
pub struct LoggedBody {
    /// Declared before `line`, so dropped first: the relay records its last figures when this body is dropped.
    body: http::Body,
    line: Option<Box<AccessLine>>,
}

impl LoggedBody {
    /// The response with such a body. `line` gets its status.
    pub(super) fn of(
        response: Response<http::Body>,
        mut line: Option<Box<AccessLine>>,
    ) -> Response<Self> {
        if let Some(line) = &mut line {
            line.status = Some(response.status());
        }
        response.map(|body| Self { body, line })
    }
}

impl Body for LoggedBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        if let Some(line) = &mut self.line {
            match &polled {
                Poll::Ready(Some(Ok(frame))) => {
                    line.bytes += frame.data_ref().map_or(0, |data| data.len() as u64);
                }
                Poll::Ready(None) => line.is_sent = true,
                _ => {}
            }
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for LoggedBody {
    fn drop(&mut self) {
        // A server stops polling once `is_end_stream` is true, so `poll_frame` may never have returned `None`.
        let is_sent = self.body.is_end_stream();
        let Some(line) = &mut self.line else {
            return;
        };
        line.is_sent |= is_sent;
        if !line.is_sent && line.summary.outcome().is_none() {
            // A client that had the last event does not wait for the end of the body: the body knows, once it is dropped.
            drop(std::mem::replace(&mut self.body, http::full("")));
            line.is_sent = line.summary.outcome() == Some(COMPLETE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_path_is_cut_between_characters() {
        assert_eq!(shortened("/v1/models"), "/v1/models");
        let long = format!("/{}", "\u{e9}".repeat(MAX_TEXT_BYTES));
        assert_eq!(shortened(&long).len(), MAX_TEXT_BYTES - 1);
    }
}
