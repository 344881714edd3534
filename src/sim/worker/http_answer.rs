//! HTTP answers with the headers of a vLLM server.

use std::io;

use bytes::Bytes;
use hyper::header::{self, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Method, Response, StatusCode};
use serde::Serialize;

use super::body::AnswerBody;
use super::error::ApiError;
use super::json::json;

pub(crate) type Answer = Response<AnswerBody>;

/// An error closes the connection without an answer.
pub(crate) type Result<T> = std::result::Result<T, io::Error>;

/// Marks an answer after which the process ends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LastAnswer;

/// Checks that the body is JSON. A request without a content type passes.
pub(crate) fn check_content_type(parts: &Parts) -> std::result::Result<(), ApiError> {
    match parts.headers.get(header::CONTENT_TYPE) {
        Some(kind) if !kind.as_bytes().starts_with(b"application/json") => {
            Err(ApiError::media_type())
        }
        Some(_) | None => Ok(()),
    }
}

/// Status 200 with a JSON text.
pub(crate) fn ok(json: impl Into<Bytes>) -> Answer {
    typed(StatusCode::OK, "application/json", AnswerBody::whole(json))
}

/// Status 200 with a value as JSON.
pub(crate) fn ok_json(value: &impl Serialize) -> Answer {
    ok(json(value))
}

/// Status 200 with a value as JSON, or the error.
pub(crate) fn json_or_error(result: std::result::Result<impl Serialize, ApiError>) -> Answer {
    match result {
        Ok(value) => ok_json(&value),
        Err(found) => error(&found),
    }
}

pub(crate) fn error(error: &ApiError) -> Answer {
    let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    typed(status, "application/json", AnswerBody::whole(error.body()))
}

pub(crate) fn typed(status: StatusCode, kind: &'static str, body: AnswerBody) -> Answer {
    let mut answer = plain(status, body);
    let kind = HeaderValue::from_static(kind);
    answer.headers_mut().insert(header::CONTENT_TYPE, kind);
    answer
}

pub(crate) fn empty(status: StatusCode) -> Answer {
    plain(status, AnswerBody::whole(Bytes::new()))
}

fn plain(status: StatusCode, body: AnswerBody) -> Answer {
    let mut answer = Response::new(body);
    *answer.status_mut() = status;
    let headers = answer.headers_mut();
    headers.insert(header::SERVER, HeaderValue::from_static("uvicorn"));
    headers.insert(header::VARY, HeaderValue::from_static("Origin"));
    answer
}

pub(crate) fn detail(status: StatusCode, text: &str) -> Answer {
    let body = format!("{{\"detail\":\"{text}\"}}");
    typed(status, "application/json", AnswerBody::whole(body))
}

pub(crate) fn wrong_method(allowed: &Method) -> Answer {
    let mut answer = detail(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed");
    let allowed = HeaderValue::from_str(allowed.as_str()).expect("a method is a token");
    answer.headers_mut().insert(header::ALLOW, allowed);
    answer
}
