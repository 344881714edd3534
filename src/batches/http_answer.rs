//! Answers that the router writes itself.

use bytes::Bytes;
use hyper::Response;
use hyper::header::{CONTENT_TYPE, HeaderValue};

use crate::http;

/// An answer of 200 with a JSON body.
pub fn json(body: impl Into<Bytes>) -> Response<http::Body> {
    let mut answer = Response::new(http::full(body));
    let kind = HeaderValue::from_static("application/json");
    answer.headers_mut().insert(CONTENT_TYPE, kind);
    answer
}
