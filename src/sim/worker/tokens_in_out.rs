//! vLLM's `/inference/v1/generate`, as far as a router sees it: a completion whose prompt is token ids, with its parameters in an
//! object of their own. The answer has the ids beside the text.

use bytes::Bytes;
use serde_json::{Map, Value, json};

use super::error::ApiError;

/// The body of the completion that computes the same.
pub(crate) fn as_completion(body: &[u8]) -> Result<Bytes, ApiError> {
    let wrong = |param: &str| {
        ApiError::bad_param(param, format!("`{param}` is missing or of another type"))
    };
    let mut body: Map<String, Value> =
        serde_json::from_slice(body).map_err(|error| ApiError::unreadable(body, &error))?;
    let Some(Value::Object(params)) = body.remove("sampling_params") else {
        return Err(wrong("sampling_params"));
    };
    let Some(ids @ Value::Array(_)) = body.remove("token_ids") else {
        return Err(wrong("token_ids"));
    };
    body.extend(params);
    body.insert("prompt".to_owned(), ids);
    body.insert("return_token_ids".to_owned(), json!(true));
    Ok(Value::Object(body).to_string().into())
}
