//! Headers of the answers that the router writes itself.

use hyper::header::{self, HeaderName, HeaderValue};
use hyper::{HeaderMap, Response};

use crate::http;

/// Set to `degraded` if a response is not stored though the client asked for it.
const STORE: HeaderName = HeaderName::from_static("x-warmroute-store");
/// Set to `left-out` if the state token that the client asked for was too large.
const STATE: HeaderName = HeaderName::from_static("x-warmroute-state");
/// Types of tools that the worker could not be sent.
const TOOLS: HeaderName = HeaderName::from_static("x-warmroute-tools-left-out");
/// Bytes of that header.
const TOOLS_BYTES_MAX: usize = 256;
const BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// An answer of 200 with a stream of events.
pub(super) fn events_response(body: http::Body) -> Response<http::Body> {
    let mut response = Response::new(body);
    set_body_headers(response.headers_mut(), true);
    response
}

/// Replaces the headers that describe the engine's body; the engine's other headers pass.
pub(super) fn set_body_headers(headers: &mut HeaderMap, is_stream: bool) {
    headers.remove(header::CONTENT_LENGTH);
    headers.remove(header::CONTENT_ENCODING);
    headers.remove(header::ETAG);
    let kind = if is_stream {
        "text/event-stream; charset=utf-8"
    } else {
        "application/json"
    };
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    if is_stream {
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        headers.insert(BUFFERING, HeaderValue::from_static("no"));
    }
}

/// Marks an answer that is not stored though it should be.
pub(super) fn mark_degraded(response: &mut Response<http::Body>, is_degraded: bool) {
    if is_degraded {
        let headers = response.headers_mut();
        headers.insert(STORE, HeaderValue::from_static("degraded"));
    }
}

/// Marks an answer whose state token was too large.
pub(super) fn mark_state_left_out(response: &mut Response<http::Body>) {
    let headers = response.headers_mut();
    headers.insert(STATE, HeaderValue::from_static("left-out"));
}

/// Names the types of tools that no worker was sent.
pub(super) fn mark_tools_left_out(headers: &mut HeaderMap, types: &[String]) {
    let mut names = types.join(", ");
    names.retain(|sign| sign.is_ascii_graphic() || sign == ' ');
    names.truncate(TOOLS_BYTES_MAX);
    if let Ok(value) = HeaderValue::from_str(&names) {
        headers.insert(TOOLS, value);
    }
}
