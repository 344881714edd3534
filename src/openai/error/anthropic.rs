//! Errors as clients of Anthropic's Messages see them.

use hyper::{Response, StatusCode};
use serde_json::json;

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
    use serde_json::Value;

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

    #[tokio::test]
    async fn every_error_has_the_type_of_its_status() {
        check(ApiError::no_key(), 401, "authentication_error").await;
        check(ApiError::foreign_origin(), 403, "permission_error").await;
        check(ApiError::unknown_model("m"), 404, "not_found_error").await;
        check(ApiError::too_large(1), 413, "request_too_large").await;
        check(ApiError::bodies_full(), 503, "overloaded_error").await;
        check(ApiError::cannot_count("m"), 501, "api_error").await;
        check(ApiError::salted_already(), 400, "invalid_request_error").await;
        let late = relay::Error::TimedOut { attempts: 1 };
        check(late.into(), 504, "timeout_error").await;
        let none = relay::Error::NoWorker {
            model: "m".to_owned(),
            retry_after: Duration::from_secs(1),
        };
        let response = ApiError::from(none).shaped(ErrorShape::Anthropic);
        assert_eq!(response.headers()["retry-after"], "1");
    }
}
