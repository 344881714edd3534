//! An engine's error -> one that clients know. Pure.

use std::time::Duration;

use hyper::header::RETRY_AFTER;
use hyper::{HeaderMap, StatusCode};

use super::members::Members;
use crate::openai::error::ApiError;

/// The code of a prompt that is longer than its model takes.
pub(super) const TOO_LONG: &str = "context_length_exceeded";

/// What an engine says in place of an answer. What it says of itself is not passed on word for word.
pub(super) fn of_engine(status: StatusCode, body: &[u8]) -> ApiError {
    let text = std::str::from_utf8(body).unwrap_or_default();
    let body = Members::parse(text).unwrap_or_default();
    // FastAPI's own errors have a detail, older engines no wrapping.
    let error = body.get("error").and_then(|it| Members::parse(it).ok());
    let error = error.unwrap_or(body);
    let message = error.text("message").or_else(|| error.text("detail"));
    let message = message.map_or_else(
        || format!("the engine answered {status}"),
        |message| message.into_owned(),
    );
    let param = error.text("param").unwrap_or_default();
    let is_too_long =
        message.contains("maximum context length") || message.contains("context length of");
    let (code, param) = match status {
        StatusCode::BAD_REQUEST if is_too_long => (TOO_LONG, "input"),
        StatusCode::NOT_FOUND if param == "model" => ("model_not_found", "model"),
        StatusCode::TOO_MANY_REQUESTS => ("rate_limit_exceeded", ""),
        _ => ("", &*param),
    };
    ApiError::of_engine(status, code, param, message)
}

/// How long an engine asks to be left alone.
pub(super) fn pause(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(RETRY_AFTER)?.to_str().ok()?;
    seconds.trim().parse().ok().map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(status: u16, body: &str, expected: (&str, &str, &str)) {
        let error = of_engine(StatusCode::from_u16(status).unwrap(), body.as_bytes());
        assert_eq!(error.status.as_u16(), status);
        let said = (error.code, error.param_or_empty(), error.message.as_str());
        assert_eq!(said, expected, "{body}");
    }

    #[test]
    fn a_prompt_that_is_too_long_is_told_as_openai_tells_it() {
        let body = include_str!("../../tests/fixtures/vllm-0.32/responses_too_long.json");
        let error = of_engine(StatusCode::BAD_REQUEST, body.as_bytes());
        assert_eq!(
            (error.code, error.param_or_empty()),
            ("context_length_exceeded", "input")
        );
    }

    #[test]
    fn numbers_for_codes_do_not_pass() {
        check(
            400,
            r#"{"error":{"message":"max_tokens must be at least 1, got 0.","type":"BadRequestError","param":"max_tokens","code":400}}"#,
            ("", "max_tokens", "max_tokens must be at least 1, got 0."),
        );
        check(
            404,
            r#"{"error":{"message":"The model `nope` does not exist.","type":"NotFoundError","param":"model","code":404}}"#,
            (
                "model_not_found",
                "model",
                "The model `nope` does not exist.",
            ),
        );
    }

    #[test]
    fn what_is_no_error_of_openais_shape_has_a_message_too() {
        check(
            500,
            "Internal Server Error",
            ("", "", "the engine answered 500 Internal Server Error"),
        );
        check(404, r#"{"detail":"Not Found"}"#, ("", "", "Not Found"));
    }
}
