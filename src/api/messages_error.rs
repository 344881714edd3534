//! Engines' errors on Anthropic's Messages, in the shape that its SDKs read.

use http_body_util::BodyExt;
use hyper::Response;
use hyper::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderValue};

use crate::http;
use crate::openai::error::anthropic_of_engine;

/// How much of an engine's error is read: enough for its message.
const ERROR_BYTES_MAX: usize = 64 << 10;

/// An engine's error in the shape that Anthropic's SDKs read; other answers as they are.
pub(super) async fn with_shaped_error(answer: Response<http::Body>) -> Response<http::Body> {
    let status = answer.status();
    let is_error = status.is_client_error() || status.is_server_error();
    if !is_error || answer.headers().contains_key(CONTENT_ENCODING) {
        return answer;
    }
    let (mut head, mut body) = answer.into_parts();
    let mut read = Vec::new();
    while let Some(Ok(frame)) = body.frame().await {
        let data = frame.into_data().unwrap_or_default();
        if read.len() + data.len() > ERROR_BYTES_MAX {
            // Not a JSON object any more: its message is the status.
            read.clear();
            break;
        }
        read.extend_from_slice(&data);
    }
    let Some(shaped) = anthropic_of_engine(status, &read) else {
        return Response::from_parts(head, http::full(read));
    };
    head.headers.remove(CONTENT_LENGTH);
    let json = HeaderValue::from_static("application/json");
    head.headers.insert(CONTENT_TYPE, json);
    Response::from_parts(head, http::full(shaped))
}
