//! Checks that all kinds of requests share. Pure.

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::sim::worker::error::ApiError;

/// `context_tokens`: of the model, for a prompt and its answer.
pub(crate) fn check_prompts(
    prompts: &[Vec<u32>],
    context_tokens: usize,
    answer_tokens: usize,
) -> Result<(), ApiError> {
    if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
        return Err(ApiError::bad_request("The decoder prompt cannot be empty"));
    }
    match prompts.iter().map(Vec::len).max() {
        Some(longest) if longest + answer_tokens > context_tokens => {
            Err(ApiError::too_long(longest, context_tokens))
        }
        Some(_) | None => Ok(()),
    }
}

/// The requested model; the first one if the request has none.
pub(crate) fn check_model(name: Option<String>, known: &[String]) -> Result<String, ApiError> {
    match name {
        Some(name) if !known.contains(&name) => Err(ApiError::unknown_model(&name, known)),
        Some(name) => Ok(name),
        None => Ok(known.first().cloned().unwrap_or_default()),
    }
}

pub(crate) fn from_json<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    serde_json::from_slice(body).map_err(|error| ApiError::unreadable(body, &error))
}

pub(crate) fn missing_field(name: &str, body: &[u8]) -> ApiError {
    let fields = serde_json::from_slice::<serde_json::Map<String, Value>>(body);
    ApiError::missing_field(name, fields.map_or(0, |fields| fields.len()))
}
