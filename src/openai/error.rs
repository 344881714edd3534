//! Errors as clients see them: HTTP status and a body in OpenAI's format. The only place that knows both.

mod anthropic;
mod batches;
mod files;
mod responses;
mod shape;
#[cfg(feature = "jwt")]
mod tokens;
mod websocket;

use std::fmt::Write as _;
use std::time::Duration;

use hyper::header::{self, HeaderName, HeaderValue};
use hyper::{Method, Response, StatusCode};
use serde_json::json;

pub use self::anthropic::of_engine as anthropic_of_engine;
pub use self::responses::is_permanent;
pub use self::shape::ErrorShape;
use crate::limits::Refusal;
use crate::observe::shortened;
use crate::queue::RefusalReason;
use crate::relay::failure::types::Failure;
use crate::{http, prompt, queue, relay};

/// Makes OpenAI's SDKs retry or not to retry; they check it before the status.
pub const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// The code of an error for a request after which engines cut the connection. Sent once more, it may end another one.
pub const CUTS_CONNECTIONS: &str = "engine_connection_cut";

/// The code of an error for an engine's answer that is none: sent once more, the request would be computed once more.
pub const INVALID_ENGINE_RESPONSE: &str = "invalid_engine_response";

/// The code of an error for an engine that refuses the key which the router has for it.
pub const ENGINE_KEY_REFUSED: &str = "engine_key_refused";

/// Milliseconds; OpenAI's SDKs read it before `retry-after`.
const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");

/// What a client gets: an answer, or an error that the router writes.
pub type Answer = Result<Response<http::Body>, ApiError>;

/// An error response that the router itself writes.
#[derive(Debug)]
pub struct ApiError {
    pub status: StatusCode,
    pub message: String,
    param: Option<String>,
    /// OpenAI's `code`; empty for `null`.
    pub code: &'static str,
    pub retry_after: Option<Duration>,
    /// Where a limit was reached: what it counts, OpenAI's `type` of such errors.
    counted: Option<&'static str>,
    /// Sent as [`SHOULD_RETRY`].
    should_retry: Option<bool>,
    /// The methods that are allowed, where another one was used.
    allow: Option<&'static str>,
    /// Whether it reports an engine's error response, not an error of the router.
    pub is_from_engine: bool,
    /// Whether the relay has counted the request that ends with it.
    pub is_counted: bool,
}

impl ApiError {
    fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            param: None,
            code,
            retry_after: None,
            counted: None,
            should_retry: None,
            allow: None,
            is_from_engine: false,
            is_counted: false,
        }
    }

    fn bad(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, code, message)
    }

    fn unavailable(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, code, message)
    }

    /// An empty name is none.
    fn param(mut self, param: &str) -> Self {
        self.param = Some(param.to_owned()).filter(|param| !param.is_empty());
        self
    }

    fn retry_after(mut self, pause: Duration) -> Self {
        self.retry_after = Some(pause);
        self
    }

    /// SDKs do not send the request again.
    fn not_retried(mut self) -> Self {
        self.should_retry = Some(false);
        self
    }

    /// Whether clients are asked not to send the request again.
    pub fn is_not_retried(&self) -> bool {
        self.should_retry == Some(false)
    }

    /// Whether a limit of the tenant has no room.
    pub fn is_of_limit(&self) -> bool {
        self.counted.is_some()
    }

    #[cfg(test)]
    pub fn param_or_empty(&self) -> &str {
        self.param.as_deref().unwrap_or_default()
    }

    /// `meant`: the path that the client probably meant.
    pub fn not_found_path(method: &Method, path: &str, meant: Option<&str>) -> Self {
        let mut message = format!("unknown request URL: {method} {}", shortened(path));
        if let Some(meant) = meant {
            // Anthropic's clients have the `/v1` in their paths, most of OpenAI's in their base URL. Paths of engines have
            // none.
            let hint = match ErrorShape::of_path(meant) {
                ErrorShape::Anthropic => " (a client's base URL has no /v1 at its end)",
                ErrorShape::OpenAi if meant.starts_with("/v1/") => {
                    " (a client's base URL ends in /v1)"
                }
                ErrorShape::OpenAi => "",
            };
            let _ = write!(message, "; did you mean {}?{hint}", shortened(meant));
        }
        Self::new(StatusCode::NOT_FOUND, "unknown_url", message)
    }

    /// A page of the admin listener, which the API's listener does not have.
    pub fn admin_path(method: &Method, path: &str) -> Self {
        let message = format!(
            "unknown request URL: {method} {}; it is a page of the router's admin listener (`admin.listen`)",
            shortened(path)
        );
        Self::new(StatusCode::NOT_FOUND, "unknown_url", message)
    }

    /// A page of stored responses or conversations, where the Responses API is passed through.
    pub fn path_of_store(method: &Method, path: &str) -> Self {
        let message = format!(
            "unknown request URL: {method} {}; no responses or conversations are stored here, because `responses.mode` \
             is `pass_through`, or a gateway sends the request",
            shortened(path)
        );
        Self::new(StatusCode::NOT_FOUND, "unknown_url", message)
    }

    pub fn wrong_method(method: &Method, allow: &'static str) -> Self {
        let message = format!("{method} is not allowed here; use {allow}");
        Self {
            allow: Some(allow),
            ..Self::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "method_not_allowed",
                message,
            )
        }
    }

    /// A request to open a WebSocket. Clients that would prefer one then use HTTP at once; after 404 or 405 some try for
    /// seconds to connect.
    pub fn no_websocket() -> Self {
        let message = "WebSocket mode is not available here: send `POST /v1/responses`, with `stream` for events";
        Self::new(
            StatusCode::UPGRADE_REQUIRED,
            "websocket_not_available",
            message,
        )
    }

    /// A request to open a WebSocket that lost its `upgrade` header on the way, as proxies drop it by default.
    pub fn upgrade_lost() -> Self {
        let message = "a WebSocket's `upgrade` header did not arrive: the proxy before the router has to pass it on \
                       (nginx: `proxy_set_header Upgrade $http_upgrade`, and `Connection` with it); without WebSocket \
                       send `POST /v1/responses`";
        Self::new(
            StatusCode::UPGRADE_REQUIRED,
            "websocket_upgrade_missing",
            message,
        )
    }

    pub fn too_large(max: u64) -> Self {
        let message = format!("the request body is larger than {max} bytes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message)
    }

    /// A body with what it refers to is larger than the memory for the bodies of all clients.
    pub fn too_large_with_history(max: u64) -> Self {
        let message = format!(
            "the request body and the history that it continues are larger than {max} bytes"
        );
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message)
    }

    /// The bodies of all clients have used up their memory.
    pub fn bodies_full() -> Self {
        let message =
            "the router holds as many request bodies as its memory allows; try again later";
        Self::unavailable("router_overloaded", message).retry_after(Duration::from_secs(1))
    }

    /// A request head that hyper cannot parse.
    pub fn malformed(status: StatusCode) -> Self {
        let (code, message) = match status {
            StatusCode::URI_TOO_LONG => ("url_too_long", "the request's URL is too long"),
            StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE => (
                "headers_too_large",
                "the request's headers are too large or too many",
            ),
            _ => (
                "malformed_request",
                "the request is not valid HTTP: its request line or a header cannot be parsed",
            ),
        };
        Self::new(status, code, message)
    }

    pub fn foreign_origin() -> Self {
        let message = "pages of this origin may not use the API (api.cors.allowed_origins)";
        Self::new(StatusCode::FORBIDDEN, "origin_not_allowed", message)
    }

    pub fn transfer_coding() -> Self {
        let message = "the only transfer coding of a request body may be `chunked`";
        Self::new(
            StatusCode::NOT_IMPLEMENTED,
            "unsupported_transfer_coding",
            message,
        )
        .not_retried()
    }

    pub fn content_encoding(encoding: &str) -> Self {
        let message = format!(
            "a request body cannot be compressed (`{}`)",
            shortened(encoding)
        );
        Self::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "unsupported_content_encoding",
            message,
        )
    }

    /// Not 408: SDKs would retry, and send the same body as slowly again.
    pub fn slow_body(least_bytes: u64, limit: Duration) -> Self {
        let message = format!(
            "fewer than {least_bytes} bytes of the request body arrived in {} ms",
            limit.as_millis()
        );
        Self::bad("request_body_timeout", message)
    }

    pub fn endless_body(limit: Duration) -> Self {
        let message = format!("the request body took longer than {} ms", limit.as_millis());
        Self::bad("request_body_timeout", message)
    }

    pub fn broken_body(error: &hyper::Error) -> Self {
        let message = format!("the request body is incomplete: {error}");
        Self::bad("request_body_broken", message)
    }

    pub fn bad_header(name: &str, message: &str) -> Self {
        Self::bad("invalid_header", message).param(name)
    }

    /// A gateway that asks for a worker sends bodies in a way in which none can be chosen.
    pub fn wrong_body_mode() -> Self {
        let message = "the gateway is not set up for this endpoint picker: its ext_proc filter must send bodies in the mode \
                       FULL_DUPLEX_STREAMED";
        Self::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "gateway_misconfigured",
            message,
        )
        .not_retried()
    }

    pub fn no_key() -> Self {
        let message =
            "no API key was given; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`";
        Self::new(StatusCode::UNAUTHORIZED, "invalid_api_key", message)
    }

    pub fn unknown_key() -> Self {
        let message = "incorrect API key";
        Self::new(StatusCode::UNAUTHORIZED, "invalid_api_key", message)
    }

    pub fn salted_already() -> Self {
        let message =
            "`cache_salt` is set by the router for this API key and cannot be part of a request";
        Self::bad("unsupported_parameter", message).param("cache_salt")
    }

    /// A salt does not separate what engines keep under names that clients give.
    pub fn media_named() -> Self {
        let message = "a name of an image or another medium (`uuid` in a message, or `features`) cannot be part of a \
                       request with this API key: engines keep media under such names for all tenants together";
        Self::bad("unsupported_parameter", message).param("uuid")
    }

    pub fn into_response(self) -> Response<http::Body> {
        self.into_text().map(http::full)
    }

    pub fn into_text(self) -> Response<String> {
        let kind = match self.status {
            _ if self.counted.is_some() => self.counted.unwrap_or_default(),
            status if status.is_server_error() => "server_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            _ => "invalid_request_error",
        };
        let code = Some(self.code).filter(|code| !code.is_empty());
        let body = json!({"error": {
            "message": self.message, "type": kind, "param": self.param, "code": code}});
        let mut response = Response::new(body.to_string());
        *response.status_mut() = self.status;
        response.headers_mut().insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/json"),
        );
        if self.status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer");
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, scheme);
        }
        if let Some(delay) = self.retry_after {
            let seconds = delay.as_millis().div_ceil(1_000).max(1);
            let headers = response.headers_mut();
            let seconds = HeaderValue::from(u64::try_from(seconds).unwrap_or(u64::MAX));
            headers.insert(header::RETRY_AFTER, seconds);
            if self.counted.is_some() {
                let millis = u64::try_from(delay.as_nanos().div_ceil(1_000_000));
                let millis = HeaderValue::from(millis.unwrap_or(u64::MAX).max(1));
                headers.insert(RETRY_AFTER_MS, millis);
            }
        }
        if let Some(allow) = self.allow {
            let allow = HeaderValue::from_static(allow);
            response.headers_mut().insert(header::ALLOW, allow);
        }
        if let Some(should) = self.should_retry {
            response.headers_mut().insert(
                SHOULD_RETRY,
                HeaderValue::from_static(if should { "true" } else { "false" }),
            );
        }
        response
    }
}

impl From<prompt::Error> for ApiError {
    fn from(error: prompt::Error) -> Self {
        let message = error.to_string();
        let bad = |code| Self::bad(code, message);
        match error {
            prompt::Error::Json(_) => bad("invalid_json"),
            prompt::Error::Form(_) => bad("invalid_form"),
            prompt::Error::Type { param, .. } => bad("invalid_type").param(param),
            prompt::Error::TooDeep(param) => bad("nested_too_deeply").param(&param),
            prompt::Error::Forbidden(param) => bad("unsupported_parameter").param(param),
        }
    }
}

impl ApiError {
    /// The drain has ended an answer of which the client has nothing, and which the relay has counted.
    pub fn draining() -> Self {
        Self::of_run(relay::Error::NotQueued(queue::Refusal::DRAINING))
    }

    /// The error of a request that the relay has run, and has counted.
    pub fn of_run(error: relay::Error) -> Self {
        Self {
            is_counted: true,
            ..Self::from(error)
        }
    }

    /// The limits of a tenant refuse a request.
    pub fn limited(refusal: &Refusal) -> Self {
        let message = refusal.to_string();
        let retry_after = refusal.retry_after();
        match refusal {
            Refusal::Rate { .. } | Refusal::TooLarge { .. } | Refusal::Concurrent { .. } => Self {
                retry_after,
                counted: Some(refusal.counted()),
                should_retry: retry_after.is_none().then_some(false),
                ..Self::new(
                    StatusCode::TOO_MANY_REQUESTS,
                    "rate_limit_exceeded",
                    message,
                )
            },
            Refusal::Model { .. } => {
                Self::new(StatusCode::NOT_FOUND, "model_not_found", message).param("model")
            }
            Refusal::MaxTokens { param, .. } => Self::bad("invalid_value", message).param(param),
            Refusal::Type { param } => Self::bad("invalid_type", message).param(param),
            Refusal::Store { .. } => Self {
                retry_after,
                ..Self::unavailable("limits_unavailable", message)
            },
        }
    }
}

impl From<relay::Error> for ApiError {
    fn from(error: relay::Error) -> Self {
        let message = error.to_string();
        match error {
            relay::Error::UnknownModel { .. } => {
                Self::new(StatusCode::NOT_FOUND, "model_not_found", message).param("model")
            }
            relay::Error::NoModel { .. } => {
                Self::bad("missing_required_parameter", message).param("model")
            }
            relay::Error::NoWorker { retry_after, .. }
            | relay::Error::NoPrefill { retry_after, .. } => {
                Self::unavailable("no_healthy_worker", message).retry_after(retry_after)
            }
            relay::Error::NotSplit { .. } => Self::bad("not_disaggregated", message),
            relay::Error::Unreachable {
                may_have_computed,
                last,
                ..
            } => {
                let code = match last {
                    Failure::NoAnswer => INVALID_ENGINE_RESPONSE,
                    _ => "engine_unreachable",
                };
                Self {
                    // The router has tried again already. SDKs would make engines compute the answer three times as often.
                    should_retry: may_have_computed.then_some(false),
                    ..Self::new(StatusCode::BAD_GATEWAY, code, message)
                }
            }
            relay::Error::TimedOut { .. } => {
                Self::new(StatusCode::GATEWAY_TIMEOUT, "engine_timeout", message).not_retried()
            }
            relay::Error::Deadline { .. } => {
                Self::new(StatusCode::GATEWAY_TIMEOUT, "request_timeout", message).not_retried()
            }
            relay::Error::OutOfResources { retry_after, .. } => {
                Self::unavailable("router_out_of_resources", message).retry_after(retry_after)
            }
            relay::Error::NotQueued(refusal) => {
                let code = refusal.reason.code();
                let status = match refusal.reason {
                    RefusalReason::NoWorker { .. } | RefusalReason::Draining => {
                        StatusCode::SERVICE_UNAVAILABLE
                    }
                    _ => StatusCode::TOO_MANY_REQUESTS,
                };
                Self::new(status, code, message).retry_after(refusal.retry_after)
            }
            relay::Error::NotServed { .. } => {
                Self::new(StatusCode::NOT_FOUND, "endpoint_not_served", message).param("model")
            }
            relay::Error::NotConvertible(what) => Self::unsupported(&what.param, what.message),
            relay::Error::NotContinued { reason } => {
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, reason, message)
            }
            relay::Error::BadHeader { name, .. } => Self::bad_header(name.as_str(), &message),
            relay::Error::Limited(refusal) => Self::limited(&refusal),
            relay::Error::KeyRefused => {
                Self::new(StatusCode::BAD_GATEWAY, ENGINE_KEY_REFUSED, message).not_retried()
            }
            relay::Error::CutsConnections => {
                Self::new(StatusCode::BAD_GATEWAY, CUTS_CONNECTIONS, message).not_retried()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_retry_would_change_is_not_retried() {
        for error in [
            ApiError::transfer_coding(),
            ApiError::wrong_body_mode(),
            ApiError::cannot_count("m"),
        ] {
            assert!(error.is_not_retried(), "{error:?}");
        }
    }
}
