//! Answers of the operators' pages, and what they read of requests.

use hyper::header::{self, HeaderMap};
use hyper::{Response, StatusCode};
use serde::Serialize;
use serde_json::json;

use crate::http;

/// True for a browser that opens a page.
pub(super) fn wants_html(headers: &HeaderMap) -> bool {
    let accept = headers.get(header::ACCEPT);
    let accept = accept.and_then(|accept| accept.to_str().ok());
    accept.is_some_and(|accept| accept.contains("text/html"))
}

pub(super) fn refuse_unknown_worker(name: &str) -> Response<http::Body> {
    let message = format!("no worker is called `{name}`; GET /fleet lists them");
    refuse(StatusCode::NOT_FOUND, &message)
}

pub(super) fn parameter(query: &str, name: &str) -> Option<String> {
    let mut pairs = form_urlencoded::parse(query.as_bytes());
    pairs
        .find(|(key, _)| key == name)
        .map(|(_, value)| value.into_owned())
}

pub(super) fn answer(status: StatusCode, value: &impl Serialize) -> Response<http::Body> {
    let body = serde_json::to_string_pretty(value)
        .unwrap_or_else(|error| format!("{{\"error\":\"{error}\"}}"));
    let mut response = http::json(body + "\n");
    *response.status_mut() = status;
    response
}

pub(super) fn refuse(status: StatusCode, message: &str) -> Response<http::Body> {
    answer(status, &json!({"error": message}))
}
