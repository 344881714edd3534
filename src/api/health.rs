//! Pages that need no key: `/health`, which load balancers ask for, and `/`.

use hyper::body::Body as _;
use hyper::header::CONTENT_LENGTH;
use hyper::{Response, StatusCode};
use serde_json::json;

use crate::http;

pub(super) const HEALTH_PATH: &str = "/health";
/// What people open and monitors ask for when they know nothing but the address.
pub(super) const ROOT_PATH: &str = "/";

/// Says what this is, and where its API is.
pub(super) fn root() -> Response<http::Body> {
    let body =
        json!({"name": "warmroute", "api": "/v1", "models": "/v1/models", "health": HEALTH_PATH});
    http::json(body.to_string())
}

/// The answer to a load balancer's health check.
pub(super) fn health(readiness: Result<(), &'static str>) -> Response<http::Body> {
    let (status, body) = match readiness {
        Ok(()) => (StatusCode::OK, json!({"status": "ready"})),
        Err(missing) => (
            StatusCode::SERVICE_UNAVAILABLE,
            json!({"status": "not_ready", "reason": missing}),
        ),
    };
    let mut response = http::json(body.to_string());
    *response.status_mut() = status;
    response
}

/// The answer to `HEAD`: that to `GET` without its body. Over HTTP/2 nothing else leaves it out.
pub(super) fn without_body(response: Response<http::Body>) -> Response<http::Body> {
    let (mut head, body) = response.into_parts();
    if let Some(length) = body.size_hint().exact() {
        head.headers.insert(CONTENT_LENGTH, length.into());
    }
    Response::from_parts(head, http::full(""))
}
