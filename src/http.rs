//! Transport: bodies, listeners, connections. Knows nothing of models, workers or routing.

pub mod accept;
pub mod circuit_breaker;
pub mod client;
pub mod client_address;
pub mod connection_tasks;
pub mod descriptors;
pub mod drain;
pub mod file_thread;
pub mod grpc;
pub mod io_threads;
pub mod keyed_tasks;
pub mod listen_address;
pub mod proxy_protocol;
pub mod server;
pub mod sse;
pub mod supervisor;
pub mod tls;

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Response, StatusCode};

/// Why a body broke off. Opaque, because no caller acts on the difference.
pub type BodyError = Box<dyn std::error::Error + Send + Sync>;

/// A response body: complete, or frames as they come from an engine.
pub type Body = UnsyncBoxBody<Bytes, BodyError>;

/// A body that is already complete.
pub fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into())
        .map_err(|never| match never {})
        .boxed_unsync()
}

/// A response of 200 with a JSON body.
pub fn json(body: impl Into<Bytes>) -> Response<Body> {
    let mut response = Response::new(full(body));
    let kind = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

/// A response that people read.
pub fn text(status: StatusCode, text: impl Into<Bytes>) -> Response<Body> {
    let mut response = Response::new(full(text));
    *response.status_mut() = status;
    let kind = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

/// Headers that describe one connection and are never forwarded (RFC 9110, section 7.6.1), and two
/// obsolete ones that some clients still send.
pub const HOP_BY_HOP: [hyper::header::HeaderName; 9] = [
    hyper::header::CONNECTION,
    hyper::header::PROXY_AUTHENTICATE,
    hyper::header::PROXY_AUTHORIZATION,
    hyper::header::TE,
    hyper::header::TRAILER,
    hyper::header::TRANSFER_ENCODING,
    hyper::header::UPGRADE,
    hyper::header::HeaderName::from_static("keep-alive"),
    hyper::header::HeaderName::from_static("proxy-connection"),
];
