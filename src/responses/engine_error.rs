//! Converts an engine's error into one of the API. Pure.

use std::time::Duration;

use hyper::header::RETRY_AFTER;
use hyper::{HeaderMap, StatusCode};

use super::members::Members;
use crate::openai::error::ApiError;

/// The error code for a prompt that exceeds the context length of its model.
pub(super) const TOO_LONG: &str = "context_length_exceeded";

/// The error code for a model that does not exist.
pub(super) const UNKNOWN_MODEL: &str = "model_not_found";

/// The codes of failed responses: as OpenAI's.
pub(super) const INVALID_PROMPT: &str = "invalid_prompt";
const RATE_LIMITED: &str = "rate_limit_exceeded";
const SERVER_ERROR: &str = "server_error";

/// The error for a client. Type and code are the router's own; only the message is the engine's.
pub(super) fn of_engine(status: StatusCode, body: &[u8]) -> ApiError {
    of_members(status, body, |param| param)
}

/// As [`of_engine`], of an engine that was sent a chat completion: the client knows other names.
pub(super) fn of_chat(status: StatusCode, body: &[u8]) -> ApiError {
    of_members(status, body, |param| {
        let field = param.split(['.', '[']).next().unwrap_or_default();
        match field {
            "messages" => "input",
            "max_completion_tokens" | "max_tokens" => "max_output_tokens",
            "response_format" => "text.format",
            "reasoning_effort" => "reasoning.effort",
            _ => param,
        }
    })
}

/// The HTTP status that an error within a stream has as its code.
pub(super) fn status_within(data: &str) -> Option<StatusCode> {
    let data = Members::parse(data).ok()?;
    status_of(&Members::parse(data.get("error")?).ok()?)
}

/// The HTTP status that an engine's error object has as its code.
pub(super) fn status_of(error: &Members<'_>) -> Option<StatusCode> {
    let status = StatusCode::from_u16(error.get("code")?.parse().ok()?).ok()?;
    (status.is_client_error() || status.is_server_error()).then_some(status)
}

/// The code of a response that fails because an engine answered with this status, or reported it within a stream.
/// `None`: it gave none.
pub(super) fn failure_code(status: Option<StatusCode>) -> &'static str {
    match status {
        Some(StatusCode::TOO_MANY_REQUESTS) => RATE_LIMITED,
        // What the router sent as its key was refused, or the engine was not ready: no other prompt would help.
        Some(
            StatusCode::UNAUTHORIZED
            | StatusCode::FORBIDDEN
            | StatusCode::PROXY_AUTHENTICATION_REQUIRED
            | StatusCode::REQUEST_TIMEOUT
            | StatusCode::CONFLICT
            | StatusCode::TOO_EARLY,
        ) => SERVER_ERROR,
        Some(status) if status.is_client_error() => INVALID_PROMPT,
        Some(_) | None => SERVER_ERROR,
    }
}

/// The code that a failed response of an engine has, if clients know it.
pub(super) fn known_failure_code(code: &str) -> &'static str {
    let known = [RATE_LIMITED, INVALID_PROMPT];
    let found = known.into_iter().find(|known| *known == code);
    found.unwrap_or(SERVER_ERROR)
}

fn of_members(status: StatusCode, body: &[u8], rename: fn(&str) -> &str) -> ApiError {
    let body = Members::of_bytes(body).unwrap_or_default();
    // FastAPI's own errors have `detail`; older engines do not wrap the error in `error`.
    let error = body
        .get("error")
        .and_then(|error| Members::parse(error).ok());
    let error = error.unwrap_or(body);
    let message = error.text("message").or_else(|| error.text("detail"));
    let message = message.map_or_else(
        || format!("the engine answered {status}"),
        |message| message.into_owned(),
    );
    let param = error.text("param").unwrap_or_default();
    let too_long = [
        "maximum context length",
        "context length of",
        // An older vLLM's words.
        "context length is only",
        // vLLM counts the tokens of images and other media last.
        "The decoder prompt (length",
        // SGLang's words.
        "longer than the model's context length",
        // llama.cpp's words.
        "exceeds the available context size",
    ];
    let is_too_long = too_long.iter().any(|phrase| message.contains(phrase));
    let (code, param) = match status {
        StatusCode::BAD_REQUEST if is_too_long => (TOO_LONG, "input"),
        StatusCode::NOT_FOUND if param == "model" => (UNKNOWN_MODEL, "model"),
        StatusCode::TOO_MANY_REQUESTS => (RATE_LIMITED, ""),
        _ => ("", rename(&param)),
    };
    ApiError::of_engine(status, code, param, message)
}

/// The engine's `Retry-After` in seconds.
pub(super) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(RETRY_AFTER)?.to_str().ok()?;
    seconds.trim().parse().ok().map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(status: u16, body: &str, expected: (&str, &str, &str)) {
        let error = of_engine(StatusCode::from_u16(status).unwrap(), body.as_bytes());
        assert_eq!(error.status.as_u16(), status);
        let found = (error.code, error.param_or_empty(), error.message.as_str());
        assert_eq!(found, expected, "{body}");
    }

    #[test]
    fn a_too_long_prompt_gets_openais_error_code() {
        let body = include_str!("../../tests/fixtures/vllm-0.32/responses_too_long.json");
        let error = of_engine(StatusCode::BAD_REQUEST, body.as_bytes());
        assert_eq!(
            (error.code, error.param_or_empty()),
            ("context_length_exceeded", "input")
        );
    }

    #[test]
    fn a_prompt_is_too_long_in_the_words_of_each_engine() {
        for message in [
            "You passed 98305 input tokens and requested 32768 output tokens. However, the model's context length is only 131072 tokens, resulting in a maximum input length of 98304 tokens.",
            "The decoder prompt (length 15983) is longer than the maximum model length of 8192. Make sure that `max_model_len` is no smaller than the number of text tokens plus multimodal tokens.",
            "The decoder prompt (length 8192) plus the number of requested output tokens (at least 1) is longer than the maximum model length of 8192.",
            "The input (9 tokens) is longer than the model's context length (8 tokens).",
            "request (9 tokens) exceeds the available context size (8 tokens), try increasing it",
        ] {
            let body = format!(r#"{{"error":{{"message":"{message}","param":null,"code":400}}}}"#);
            check(400, &body, (TOO_LONG, "input", message));
        }
        let message = "The decoder prompt cannot be empty";
        let body = format!(r#"{{"error":{{"message":"{message}","param":null,"code":400}}}}"#);
        check(400, &body, ("", "", message));
    }

    #[test]
    fn only_a_status_that_blames_the_prompt_makes_a_failed_response_one_of_the_prompt() {
        for (statuses, expected) in [
            (&[400, 404, 405, 413, 415, 422][..], INVALID_PROMPT),
            (&[429], RATE_LIMITED),
            (&[401, 403, 407, 408, 409, 425], SERVER_ERROR),
            (&[500, 501, 502, 503, 504, 529], SERVER_ERROR),
        ] {
            for status in statuses {
                let code = failure_code(StatusCode::from_u16(*status).ok());
                assert_eq!(code, expected, "{status}");
            }
        }
        assert_eq!(failure_code(None), SERVER_ERROR);
        for code in [INVALID_PROMPT, RATE_LIMITED, SERVER_ERROR] {
            assert_eq!(known_failure_code(code), code);
        }
        assert_eq!(known_failure_code("400"), SERVER_ERROR);
    }

    #[test]
    fn numeric_error_codes_do_not_pass() {
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
    fn errors_of_other_forms_have_a_message_too() {
        check(
            500,
            "Internal Server Error",
            ("", "", "the engine answered 500 Internal Server Error"),
        );
        check(404, r#"{"detail":"Not Found"}"#, ("", "", "Not Found"));
    }
}
