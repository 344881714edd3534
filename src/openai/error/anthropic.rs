//! Errors as clients of Anthropic's Messages see them.

use hyper::{Response, StatusCode};
use serde_json::{Value, json};

use super::ApiError;
use super::shape::ErrorShape;
use crate::http;

impl ApiError {
    /// The response in the shape of the path that was asked for: the same status and headers.
    pub fn shaped(self, shape: ErrorShape) -> Response<http::Body> {
        if shape == ErrorShape::OpenAi {
            return self.into_response();
        }
        let body =
            json!({"type": "error", "error": {"type": kind(self.status), "message": self.message}});
        self.into_text().map(|_| http::full(body.to_string()))
    }
}

/// What Anthropic's SDKs know.
const KINDS: [&str; 11] = [
    "api_error",
    "authentication_error",
    "billing_error",
    "conflict_error",
    "invalid_request_error",
    "not_found_error",
    "overloaded_error",
    "permission_error",
    "rate_limit_error",
    "request_too_large",
    "timeout_error",
];

/// The body of an engine's error in Anthropic's shape, with the type of its status and the engine's message. `None` if it
/// has that shape and a type that clients know.
pub fn of_engine(status: StatusCode, body: &[u8]) -> Option<String> {
    let body: Value = serde_json::from_slice(body).unwrap_or_default();
    let error = body.get("error").unwrap_or(&body);
    let is_known = error["type"]
        .as_str()
        .is_some_and(|kind| KINDS.contains(&kind));
    if body["type"] == "error" && is_known && error["message"].is_string() {
        return None;
    }
    // FastAPI's own errors have `detail`; some engines do not wrap the error in `error`.
    let texts = [&error["message"], &error["detail"], error];
    let message = texts.into_iter().find_map(Value::as_str);
    let message = message.map_or_else(|| format!("the engine answered {status}"), str::to_owned);
    let error = json!({"type": "error", "error": {"type": kind(status), "message": message}});
    Some(error.to_string())
}

fn kind(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        StatusCode::GATEWAY_TIMEOUT => "timeout_error",
        status if status.is_server_error() => "api_error",
        _ => "invalid_request_error",
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http_body_util::BodyExt;

    use super::*;
    use crate::relay;

    async fn check(error: ApiError, status: u16, expected: &str) {
        let response = error.shaped(ErrorShape::Anthropic);
        assert_eq!(response.status(), status);
        let body = response.into_body().collect().await.unwrap().to_bytes();
        let body: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(body["type"], "error");
        assert_eq!(body["error"]["type"], expected);
        assert!(body["error"]["message"].is_string(), "{body}");
        assert_eq!(body["error"].get("code"), None);
    }

    #[test]
    fn an_engines_error_gets_the_envelope_and_the_type_of_its_status() {
        let check = |status: u16, body: &str, kind: &str, message: &str| {
            let found = of_engine(StatusCode::from_u16(status).unwrap(), body.as_bytes());
            let found: Value = serde_json::from_str(&found.unwrap()).unwrap();
            let expected = json!({"type": "error", "error": {"type": kind, "message": message}});
            assert_eq!(found, expected, "{body}");
        };
        let invalid = "invalid_request_error";
        let vllm = r#"{"type":"error","error":{"type":"BadRequestError","message":"too long"}}"#;
        check(400, vllm, invalid, "too long");
        let checked = r#"{"error":{"message":"1 error","type":"Bad Request","param":"body.messages","code":400}}"#;
        check(400, checked, invalid, "1 error");
        let flat =
            r#"{"object":"error","message":"no","type":"BadRequestError","param":null,"code":404}"#;
        check(404, flat, "not_found_error", "no");
        check(
            401,
            r#"{"error":"Unauthorized"}"#,
            "authentication_error",
            "Unauthorized",
        );
        check(503, r#"{"detail":"busy"}"#, "overloaded_error", "busy");
        check(
            422,
            "{}",
            invalid,
            "the engine answered 422 Unprocessable Entity",
        );
        check(
            500,
            "Internal Server Error",
            "api_error",
            "the engine answered 500 Internal Server Error",
        );
        check(
            500,
            r#"["x"]"#,
            "api_error",
            "the engine answered 500 Internal Server Error",
        );
        let right = br#"{"type":"error","error":{"type":"overloaded_error","message":"later"}}"#;
        assert_eq!(of_engine(StatusCode::from_u16(529).unwrap(), right), None);
    }

    #[tokio::test]
    async fn every_error_has_the_type_of_its_status() {
        check(ApiError::no_key(), 401, "authentication_error").await;
        check(ApiError::foreign_origin(), 403, "permission_error").await;
        let unknown = relay::Error::UnknownModel {
            model: "m".to_owned(),
            known: Vec::new(),
        };
        check(unknown.into(), 404, "not_found_error").await;
        check(ApiError::too_large(1), 413, "request_too_large").await;
        check(ApiError::bodies_full(), 503, "overloaded_error").await;
        check(ApiError::cannot_count("m"), 501, "api_error").await;
        check(ApiError::salted_already(), 400, "invalid_request_error").await;
        let late = relay::Error::TimedOut { attempts: 1 };
        check(late.into(), 504, "timeout_error").await;
        let none = relay::Error::NoWorker {
            model: "m".to_owned(),
            is_known: true,
            retry_after: Duration::from_secs(1),
        };
        let response = ApiError::from(none).shaped(ErrorShape::Anthropic);
        assert_eq!(response.headers()["retry-after"], "1");
    }
}
