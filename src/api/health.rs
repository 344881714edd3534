//! `/health`, the page that load balancers ask for.

use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Response, StatusCode};
use serde_json::json;

use crate::http;

pub(super) const HEALTH_PATH: &str = "/health";

/// The answer to a load balancer's health check.
pub(super) fn health(readiness: Result<(), &'static str>) -> Response<http::Body> {
    let (status, body) = match readiness {
        Ok(()) => (StatusCode::OK, json!({"status": "ready"})),
        Err(missing) => (
            StatusCode::SERVICE_UNAVAILABLE,
            json!({"status": "not_ready", "reason": missing}),
        ),
    };
    let mut response = Response::new(http::full(body.to_string()));
    *response.status_mut() = status;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    response
}
