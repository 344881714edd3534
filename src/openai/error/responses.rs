//! Errors of the Responses API. Codes and messages are OpenAI's own where OpenAI has such an error.

use std::fmt::Display;
use std::time::Duration;

use hyper::StatusCode;

use super::{ApiError, INVALID_ENGINE_RESPONSE};
use crate::observe::shortened;
use crate::state_token::Rejected;
use crate::store;

const CONVERSATION_LOCKED: &str = "conversation_locked";

impl ApiError {
    pub fn bad_json(error: &dyn Display) -> Self {
        let message = format!("the request body is not valid JSON: {error}");
        Self::bad("invalid_json", message)
    }

    pub fn missing_parameter(param: &str) -> Self {
        let message = format!("Missing required parameter: '{param}'.");
        Self::bad("missing_required_parameter", message).param(param)
    }

    pub fn wrong_type(param: &str, expected: &str) -> Self {
        let message = format!("Invalid type for '{param}': expected {expected}.");
        Self::bad("invalid_type", message).param(param)
    }

    pub fn wrong_value(param: &str, why: impl Display) -> Self {
        let message = format!("Invalid '{param}': {why}.");
        Self::bad("invalid_value", message).param(param)
    }

    pub fn unsupported(param: &str, why: impl Display) -> Self {
        let message = format!("Unsupported parameter: '{param}' {why}.");
        Self::bad("unsupported_parameter", message).param(param)
    }

    pub fn reserved_parameter(param: &str) -> Self {
        let message = format!("`{param}` is set by the router and cannot be part of a request");
        Self::bad("unsupported_parameter", message).param(param)
    }

    pub fn mutually_exclusive(param: &str, other: &str) -> Self {
        let message = format!(
            "Mutually exclusive parameters: '{param}' and '{other}'. Ensure you are only providing one of them."
        );
        Self::bad("mutually_exclusive_parameters", message).param(param)
    }

    pub fn malformed_id(param: &str, id: &str) -> Self {
        let mut shown: String = id.chars().take(64).collect();
        if shown.len() < id.len() {
            shown.push_str("...");
        }
        let message = format!(
            "Invalid '{param}': '{shown}'. Expected an ID that contains letters, numbers, underscores, or dashes, but this value contained additional characters."
        );
        Self::bad("invalid_value", message).param(param)
    }

    /// For an id in the path.
    pub fn unknown_response(id: &str) -> Self {
        let message = format!("Response with id '{id}' not found.");
        Self::new(StatusCode::NOT_FOUND, "", message)
    }

    pub fn unknown_previous(id: &str) -> Self {
        let message = format!("Previous response with id '{id}' not found.");
        Self::bad("previous_response_not_found", message).param("previous_response_id")
    }

    pub fn unfinished_previous(id: &str, status: &str) -> Self {
        let message = match status {
            "queued" | "in_progress" => format!("Response '{id}' is still in progress."),
            _ => format!("Response '{id}' cannot be continued: it is {status}."),
        };
        Self::bad("", message).param("previous_response_id")
    }

    pub fn unknown_conversation(id: &str) -> Self {
        let message = format!("Conversation with id '{id}' not found.");
        Self::new(StatusCode::NOT_FOUND, "", message)
    }

    pub fn is_locked_conversation(&self) -> bool {
        self.code == CONVERSATION_LOCKED
    }

    pub fn locked_conversation() -> Self {
        let message = "Another process is currently operating on this conversation. Please retry in a few seconds.";
        Self::bad(CONVERSATION_LOCKED, message).param("conversation")
    }

    /// Its conversation did not accept the turn: so nothing of it is stored, and its client gets none of it.
    pub fn refused_turn(code: &'static str, message: &str) -> Self {
        Self::bad(code, message).param("conversation")
    }

    /// A turn was refused because its conversation is not there any more: nothing of the turn is stored, and its client gets
    /// none of it.
    pub fn deleted_conversation(code: &'static str, message: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, code, message.to_owned())
    }

    pub fn output_without_call(kind: &str, call_id: &str) -> Self {
        let message = format!("No tool call found for {kind} with call_id {call_id}.");
        Self::bad("", message).param("input")
    }

    pub fn call_without_output(kind: &str, call_id: &str) -> Self {
        let message = format!("No tool output found for {kind} {call_id}.");
        Self::bad("", message).param("input")
    }

    /// An item of the history that the request continues is in its input again.
    pub fn duplicate_item(id: &str) -> Self {
        let message = format!(
            "Duplicate item found with id {id}. Remove duplicate items from your input and try again."
        );
        Self::bad("", message).param("input")
    }

    pub fn unknown_item(id: &str) -> Self {
        let message = format!(
            "Item with id '{id}' not found. Items are not persisted when `store` is set to false. Try again with `store` set to true, or remove this item from your input."
        );
        Self::new(StatusCode::NOT_FOUND, "", message).param("input")
    }

    /// For an item id in the path.
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
        Self::bad("invalid_encrypted_content", message)
    }

    pub fn rejected_state_token(rejected: &Rejected) -> Self {
        Self::bad("invalid_encrypted_content", rejected.to_string())
    }

    pub fn state_token_too_large(why: &dyn Display) -> Self {
        Self::bad("", why.to_string()).param("input")
    }

    pub fn foreground_cancel() -> Self {
        Self::bad("", "Cannot cancel a synchronous response.").param("response_id")
    }

    pub fn not_streamable() -> Self {
        let message = "Only responses that were created with `background` and `stream` set to true can be streamed again.";
        Self::bad("", message).param("stream")
    }

    pub fn too_long_history(what: &str, max: u64) -> Self {
        let message = format!("the conversation has more than {max} {what}");
        Self::bad("context_length_exceeded", message).param("input")
    }

    pub fn too_many_turns(max: u64) -> Self {
        let message = format!(
            "the conversation has more than {max} turns; compact it with POST /v1/responses/compact and continue from that"
        );
        Self::bad("context_length_exceeded", message).param("input")
    }

    /// `item_reference`s name items of too many other responses.
    pub fn too_many_references(max: u64) -> Self {
        let message = format!("the input refers to items of more than {max} other responses");
        Self::bad("context_length_exceeded", message).param("input")
    }

    /// The input alone exceeds what the store accepts for one response or conversation.
    pub fn too_large_to_store(max: u64) -> Self {
        let message =
            format!("the input is larger than {max} bytes, the limit for a stored response");
        Self::bad("context_length_exceeded", message).param("input")
    }

    /// The store is unreachable. Says nothing about what is stored.
    pub fn store_unavailable(pause: Duration) -> Self {
        let message = "the response store is unreachable; try again";
        Self::unavailable("store_unavailable", message).retry_after(pause)
    }

    /// An error of the store before any work was started.
    pub fn of_store(error: &store::Error) -> Self {
        match error {
            store::Error::Unavailable { retry_after, .. }
            | store::Error::Unknown { retry_after, .. } => Self::store_unavailable(*retry_after),
            store::Error::Full { retry_after } => Self::store_full(*retry_after),
            store::Error::TooLarge { bytes, max } => {
                let message =
                    format!("{bytes} bytes exceed the limit of {max} for a stored response");
                Self::bad("", message).param("input")
            }
            store::Error::BrokenChain(missing) => Self::unknown_previous(&missing.to_string()),
            store::Error::Exists
            | store::Error::Unreadable(_)
            | store::Error::DamagedConversation => {
                let message = error.to_string();
                let status = StatusCode::INTERNAL_SERVER_ERROR;
                let code = match error {
                    store::Error::DamagedConversation => "conversation_damaged",
                    _ => "store_error",
                };
                // A retry would meet the same record.
                Self::new(status, code, message).not_retried()
            }
        }
    }

    /// This replica is at its limit of background runs.
    pub fn background_full(pause: Duration) -> Self {
        let message = "Too many background responses are running on this router. Retry later.";
        Self::unavailable("background_full", message).retry_after(pause)
    }

    /// The client's background responses have as much of the memory of bodies as they may.
    pub fn background_bodies_full(pause: Duration) -> Self {
        let message = "The requests of this client's background responses take as much memory as they may. Run fewer at a \
                       time, or raise api.max_total_body.";
        Self::unavailable("router_overloaded", message).retry_after(pause)
    }

    /// The tenant is at its limit of background runs.
    pub fn too_many_background(max: u64, pause: Duration) -> Self {
        let message = format!(
            "Too many background responses are running for this tenant (limit {max}). Retry after {} s.",
            pause.as_secs()
        );
        let status = StatusCode::TOO_MANY_REQUESTS;
        Self::new(status, "rate_limit_exceeded", message).retry_after(pause)
    }

    /// The write may or may not have happened: a retry could store it twice.
    pub fn unknown_outcome() -> Self {
        let message = "the response store did not confirm the write; check whether it happened before you retry";
        Self::unavailable("store_unavailable", message).not_retried()
    }

    /// The response was generated but not stored. A retry would generate it again.
    pub fn not_stored() -> Self {
        let message = "the response was generated but could not be stored";
        Self::unavailable("store_unavailable", message).not_retried()
    }

    fn store_full(pause: Duration) -> Self {
        let message = "the response store is full; try again later";
        Self::unavailable("store_full", message).retry_after(pause)
    }

    /// The offload threads have ended: the process is stopping.
    pub fn stopping() -> Self {
        let message = "the router is stopping; try again";
        Self::unavailable("stopping", message).retry_after(Duration::from_secs(1))
    }

    pub fn no_randomness(error: &dyn Display) -> Self {
        let message = format!("the operating system returned no random bytes: {error}");
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
    }

    /// Neither the router nor the engine can count tokens for this model.
    pub fn cannot_count(model: &str) -> Self {
        let message = format!(
            "the router has no tokenizer for the model `{}` (models[].tokenizer), and its engine does not count tokens (vLLM does with --enable-scale-out)",
            shortened(model)
        );
        Self::new(StatusCode::NOT_IMPLEMENTED, "cannot_count_tokens", message).not_retried()
    }

    /// An error that an engine answered.
    pub fn of_engine(status: StatusCode, code: &'static str, param: &str, message: String) -> Self {
        let mut error = Self::new(status, code, message).param(param);
        error.should_retry = is_permanent(status).then_some(false);
        error.is_from_engine = true;
        error
    }

    /// An engine's answer that cannot be decoded, is too long, or ended early.
    pub fn invalid_engine_response(message: impl Into<String>) -> Self {
        let status = StatusCode::BAD_GATEWAY;
        Self {
            is_counted: true,
            // A retry would make an engine do all the work again.
            ..Self::new(status, INVALID_ENGINE_RESPONSE, message).not_retried()
        }
    }
}

/// Whether an engine's status that SDKs retry says that no engine can do what the request asks for. Another 5xx may be
/// the fault of its worker: 502, 503 and 504 were tried elsewhere by then, and 500 does not say whose fault it is.
pub fn is_permanent(status: StatusCode) -> bool {
    status == StatusCode::NOT_IMPLEMENTED
}

/// As [`ApiError::of_store`], so not for writes that must not be repeated blindly: their outcome may be unknown.
impl From<store::Error> for ApiError {
    fn from(error: store::Error) -> Self {
        Self::of_store(&error)
    }
}
