//! What the Responses API says of bad requests, in OpenAI's own words where clients look at them.

use std::fmt::Display;
use std::time::Duration;

use hyper::StatusCode;

use super::ApiError;
use crate::state_token::Rejected;
use crate::store;

impl ApiError {
    fn bad(code: &'static str, param: &str, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::BAD_REQUEST, code, message);
        if param.is_empty() {
            return error;
        }
        error.param(param)
    }

    pub fn bad_json(error: &dyn Display) -> Self {
        let message = format!("the request body is not valid JSON: {error}");
        Self::bad("invalid_json", "", message)
    }

    pub fn missing_parameter(param: &str) -> Self {
        let message = format!("Missing required parameter: '{param}'.");
        Self::bad("missing_required_parameter", param, message)
    }

    pub fn wrong_type(param: &str, expected: &str) -> Self {
        let message = format!("Invalid type for '{param}': expected {expected}.");
        Self::bad("invalid_type", param, message)
    }

    pub fn wrong_value(param: &str, why: impl Display) -> Self {
        let message = format!("Invalid '{param}': {why}.");
        Self::bad("invalid_value", param, message)
    }

    pub fn unsupported(param: &str, why: impl Display) -> Self {
        let message = format!("Unsupported parameter: '{param}' {why}.");
        Self::bad("unsupported_parameter", param, message)
    }

    pub fn routers_own(param: &str) -> Self {
        let message = format!("`{param}` is set by the router and cannot be part of a request");
        Self::bad("unsupported_parameter", param, message)
    }

    pub fn mutually_exclusive(param: &str, other: &str) -> Self {
        let message = format!(
            "Mutually exclusive parameters: '{param}' and '{other}'. Ensure you are only providing one of them."
        );
        Self::bad("mutually_exclusive_parameters", param, message)
    }

    pub fn malformed_id(param: &str, id: &str) -> Self {
        let mut shown: String = id.chars().take(64).collect();
        if shown.len() < id.len() {
            shown.push_str("...");
        }
        let message = format!(
            "Invalid '{param}': '{shown}'. Expected an ID that contains letters, numbers, underscores, or dashes, but this value contained additional characters."
        );
        Self::bad("invalid_value", param, message)
    }

    /// For what is asked for by its path.
    pub fn unknown_response(id: &str) -> Self {
        let message = format!("Response with id '{id}' not found.");
        Self::new(StatusCode::NOT_FOUND, "", message)
    }

    pub fn unknown_previous(id: &str) -> Self {
        let message = format!("Previous response with id '{id}' not found.");
        Self::bad(
            "previous_response_not_found",
            "previous_response_id",
            message,
        )
    }

    pub fn unfinished_previous(id: &str, status: &str) -> Self {
        let message = match status {
            "queued" | "in_progress" => format!("Response '{id}' is still in progress."),
            _ => format!("Response '{id}' cannot be continued: it is {status}."),
        };
        Self::bad("", "previous_response_id", message)
    }

    pub fn unknown_conversation(id: &str) -> Self {
        let message = format!("Conversation with id '{id}' not found.");
        Self::new(StatusCode::NOT_FOUND, "", message)
    }

    pub fn locked_conversation() -> Self {
        Self::bad(
            "conversation_locked",
            "conversation",
            "Another process is currently operating on this conversation. Please retry in a few seconds.",
        )
    }

    pub fn output_without_call(kind: &str, call_id: &str) -> Self {
        let message = format!("No tool call found for {kind} with call_id {call_id}.");
        Self::bad("", "input", message)
    }

    pub fn call_without_output(kind: &str, call_id: &str) -> Self {
        let message = format!("No tool output found for {kind} {call_id}.");
        Self::bad("", "input", message)
    }

    pub fn unknown_item(id: &str) -> Self {
        let message = format!(
            "Item with id '{id}' not found. Items are not persisted when `store` is set to false. Try again with `store` set to true, or remove this item from your input."
        );
        Self::new(StatusCode::NOT_FOUND, "", message).param("input")
    }

    /// For an item that is asked for by its path.
    pub fn unknown_conversation_item(id: &str) -> Self {
        let message = format!("Item with id '{id}' not found in this conversation.");
        Self::new(StatusCode::NOT_FOUND, "", message)
    }

    pub fn unreadable_content(content: &str) -> Self {
        let start: String = content.chars().take(8).collect();
        let mut end: Vec<char> = content.chars().rev().take(4).collect();
        end.reverse();
        let end: String = end.into_iter().collect();
        let message = format!("The encrypted content {start}...{end} could not be verified.");
        Self::bad("invalid_encrypted_content", "", message)
    }

    pub fn rejected_state_token(rejected: &Rejected) -> Self {
        Self::bad("invalid_encrypted_content", "", rejected.to_string())
    }

    pub fn too_large_to_carry(why: &dyn Display) -> Self {
        Self::bad("", "input", why.to_string())
    }

    pub fn foreground_cancel() -> Self {
        Self::bad("", "response_id", "Cannot cancel a synchronous response.")
    }

    pub fn not_streamable() -> Self {
        Self::bad(
            "",
            "stream",
            "Only responses that were created with `background` and `stream` set to true can be streamed again.",
        )
    }

    pub fn too_long_history(what: &str, max: u64) -> Self {
        let message = format!("the conversation has more than {max} {what}");
        Self::bad("context_length_exceeded", "input", message)
    }

    /// An input refers to items of so many other responses.
    pub fn too_many_referred_to(max: u64) -> Self {
        let message = format!("the input refers to items of more than {max} other responses");
        Self::bad("context_length_exceeded", "input", message)
    }

    /// More than the store takes of one response or conversation, whatever its answer will be.
    pub fn too_large_to_store(max: u64) -> Self {
        let message =
            format!("the input is larger than the {max} bytes that can be stored with a response");
        Self::bad("context_length_exceeded", "input", message)
    }

    /// The store cannot be asked now: nothing is said of what it holds.
    pub fn store_unavailable(pause: Duration) -> Self {
        let mut error = Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "store_unavailable",
            "the store of responses cannot be reached now; try again",
        );
        error.retry_after = Some(pause);
        error
    }

    /// What the store says of itself, before anything was begun.
    pub fn of_store(error: &store::Error) -> Self {
        match error {
            store::Error::Unavailable { retry_after, .. }
            | store::Error::Unknown { retry_after, .. } => Self::store_unavailable(*retry_after),
            store::Error::Full { retry_after } => Self::store_full(*retry_after),
            store::Error::TooLarge { bytes, max } => {
                let message = format!("{bytes} bytes are more than the {max} that can be stored");
                Self::bad("", "input", message)
            }
            store::Error::Exists | store::Error::Unreadable(_) => {
                let message = error.to_string();
                let status = StatusCode::INTERNAL_SERVER_ERROR;
                let mut error = Self::new(status, "store_error", message);
                // It will be so the next time as well.
                error.should_retry = Some(false);
                error
            }
        }
    }

    /// This replica runs as much as it may.
    pub fn background_full(pause: Duration) -> Self {
        let mut error = Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "background_full",
            "the router runs as many background responses as it may; try again",
        );
        error.retry_after = Some(pause);
        error
    }

    /// The tenant has as much running as it may.
    pub fn too_much_background(max: u64, pause: Duration) -> Self {
        let mut error = Self::new(
            StatusCode::TOO_MANY_REQUESTS,
            "rate_limit_exceeded",
            format!("{max} background responses run already, which is as many as may"),
        );
        error.retry_after = Some(pause);
        error
    }

    /// It may be stored or not: asking again could store it twice.
    pub fn unknown_outcome() -> Self {
        let mut error = Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "store_unavailable",
            "the store did not say whether it took this; look before you send it again",
        );
        error.should_retry = Some(false);
        error
    }

    /// The answer was made, and could not be stored: asking again would make it again.
    pub fn not_stored() -> Self {
        let mut error = Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "store_unavailable",
            "the response was generated, but could not be stored",
        );
        error.should_retry = Some(false);
        error
    }

    fn store_full(pause: Duration) -> Self {
        let mut error = Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "store_full",
            "the store of responses has no room now; try again",
        );
        error.retry_after = Some(pause);
        error
    }

    /// What works beside the carriers has ended, as all else will.
    pub fn stopping() -> Self {
        let mut error = Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "stopping",
            "the router is stopping; try again",
        );
        error.retry_after = Some(Duration::from_secs(1));
        error
    }

    pub fn no_randomness(error: &dyn Display) -> Self {
        let message = format!("the system gives no randomness: {error}");
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
    }

    /// Counting is the engine's, and it does not offer it.
    pub fn cannot_count() -> Self {
        let mut error = Self::new(
            StatusCode::NOT_IMPLEMENTED,
            "cannot_count_tokens",
            "the model's engine does not count tokens (vLLM does with --enable-scale-out)",
        );
        error.should_retry = Some(false);
        error
    }

    /// An engine's own error.
    pub fn of_engine(status: StatusCode, code: &'static str, param: &str, message: String) -> Self {
        let mut error = Self::new(status, code, message);
        error.param = Some(param.to_owned()).filter(|param| !param.is_empty());
        // An engine that fails on a request would fail on it again; a busy one would not.
        let is_fault = status.is_server_error() && status != StatusCode::SERVICE_UNAVAILABLE;
        error.should_retry = is_fault.then_some(false);
        error.is_engines = true;
        error
    }

    pub fn pause(&mut self, pause: Option<Duration>) {
        self.retry_after = pause;
    }

    /// An engine's answer that makes no sense, or none at all.
    pub fn engine_broken(message: impl Into<String>) -> Self {
        let mut error = Self::new(StatusCode::BAD_GATEWAY, "engine_answer_broken", message);
        // The engine has done the work; who asks again should know that.
        error.should_retry = Some(false);
        error
    }
}
