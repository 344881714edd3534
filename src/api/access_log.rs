//! The access log: one line for each request, written when its response has been sent or the client has
//! disconnected.

use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::header::HeaderValue;
use hyper::{Method, StatusCode, Uri};
use tracing::{Level, enabled, info};

use crate::http::drain::Tasks;
use crate::http::{self, BodyError};
use crate::ids::RequestId;
use crate::observe::{self, ACCESS_LOG};
use crate::relay::SummaryCell;

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
    traceparent: Option<HeaderValue>,
    pub(super) tenant: Option<Arc<str>>,
    pub(super) status: Option<StatusCode>,
    /// The code of the error response, if the router itself made it.
    pub(super) error_code: Option<&'static str>,
    /// Bytes of the response body so far.
    bytes: u64,
    /// Whether the whole response was sent.
    is_sent: bool,
    tasks: Tasks,
    /// Worker, model, tokens and times, which the relay fills in while it forwards the request.
    pub(super) summary: SummaryCell,
}

/// Whether access log lines are written at all; if not, no [`AccessLine`] is made.
pub(super) fn is_on() -> bool {
    enabled!(target: ACCESS_LOG, Level::INFO)
}

impl AccessLine {
    pub(super) fn begin<B>(
        request: &hyper::Request<B>,
        id: RequestId,
        client: IpAddr,
        tasks: Tasks,
    ) -> Self {
        Self {
            began: observe::now(),
            method: request.method().clone(),
            uri: request.uri().clone(),
            client,
            id,
            client_request_id: None,
            traceparent: request.headers().get("traceparent").cloned(),
            tenant: None,
            status: None,
            error_code: None,
            bytes: 0,
            is_sent: false,
            tasks,
            summary: SummaryCell::default(),
        }
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
            (_, Some(_)) => "error",
            _ if self.is_sent => COMPLETE,
            _ => DISCONNECTED,
        };
        // A connection that the drain closed looks like one that the client closed.
        let outcome = match outcome {
            DISCONNECTED if self.tasks.is_aborted() => "drain_timeout",
            outcome => outcome,
        };
        info!(
            target: ACCESS_LOG,
            method = self.method.as_str(),
            path = shortened(self.uri.path()),
            model = summary.model.as_deref(),
            requested_model = summary.requested_model.as_deref(),
            tenant = self.tenant.as_deref(),
            worker = summary.worker.as_deref(),
            prefill_worker = summary.prefill_worker.as_deref(),
            reason = summary.reason,
            status = self.status.map(|status| status.as_u16()),
            outcome,
            error_code = self.error_code,
            prompt_tokens = tokens(summary.prompt_tokens),
            cached_tokens = tokens(summary.cached_tokens),
            generation_tokens = tokens(summary.generation_tokens),
            queue_ms = summary.queued.map(milliseconds),
            ttft_ms = summary.time_to_first_token.map(milliseconds),
            duration_ms = milliseconds(observe::now() - self.began),
            bytes = self.bytes,
            retries = summary.attempts.saturating_sub(1),
            client = %self.client,
            id = self.id.as_str(),
            client_request_id = self.client_request_id.as_ref().and_then(text).map(shortened),
            trace_id = self.traceparent.as_ref().and_then(text).and_then(trace_id),
            "request"
        );
    }
}

/// Bounds what a client can write into a line: paths and ids of requests are at most some tens of bytes.
const MAX_TEXT_BYTES: usize = 2_048;
/// The outcome of a response that was sent completely.
const COMPLETE: &str = "complete";
const DISCONNECTED: &str = "client_disconnected";

/// A text of the client's, up to [`MAX_TEXT_BYTES`].
fn shortened(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_TEXT_BYTES)]
}

fn text(value: &HeaderValue) -> Option<&str> {
    value.to_str().ok()
}

/// In milliseconds, rounded down to microseconds.
fn milliseconds(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1e3
}

/// The trace id of a W3C `traceparent` (version, trace id, parent id and flags, in hex).
fn trace_id(traceparent: &str) -> Option<&str> {
    let mut parts = traceparent.split('-');
    let (version, trace, parent, flags) =
        (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let is_hex = |text: &str, length| {
        let is_digit = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        text.len() == length && text.bytes().all(is_digit)
    };
    let is_zero = |text: &str| text.bytes().all(|byte| byte == b'0');
    // Later versions may append fields; version ff is invalid.
    let is_valid = is_hex(version, 2)
        && version != "ff"
        && (version != "00" || parts.next().is_none())
        && is_hex(trace, 32)
        && !is_zero(trace)
        && is_hex(parent, 16)
        && !is_zero(parent)
        && is_hex(flags, 2);
    is_valid.then_some(trace)
}

/// A response body that writes the request's access log line when it is dropped.
#[derive(Debug)]
pub struct LoggedBody {
    /// Declared before `line`, so dropped first: the relay records its last figures when this body is dropped.
    body: http::Body,
    line: Option<Box<AccessLine>>,
}

impl LoggedBody {
    pub(super) fn new(body: http::Body, line: Option<Box<AccessLine>>) -> Self {
        Self { body, line }
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
        if let Some(line) = &mut self.line {
            line.is_sent |= is_sent;
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

    #[test]
    fn a_traceparent_that_is_not_valid_has_no_trace_id() {
        let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
        let check = |text: String, expected: Option<&str>| {
            assert_eq!(trace_id(&text), expected, "{text}");
        };
        check(format!("00-{trace}-00f067aa0ba902b7-01"), Some(trace));
        check(format!("cc-{trace}-00f067aa0ba902b7-01-more"), Some(trace));
        check(format!("00-{trace}-00f067aa0ba902b7-01-more"), None);
        check(format!("ff-{trace}-00f067aa0ba902b7-01"), None);
        check(format!("00-{trace}-0000000000000000-01"), None);
        check(format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32)), None);
        check(
            format!("00-{}-00f067aa0ba902b7-01", trace.to_uppercase()),
            None,
        );
        check(trace.to_owned(), None);
        check(String::new(), None);
    }
}
