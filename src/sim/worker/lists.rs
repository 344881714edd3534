//! Small answers: models, version, tokens. Pure.

use serde::Deserialize;
use serde_json::{Value, json};

use super::error::ApiError;
use super::request::{self, Api, GenerationRequest};
use super::settings::Settings;

pub(crate) const VERSION: &str = r#"{"version":"0.32.0"}"#;

/// The first model is the base model, the others are its adapters.
pub(crate) fn models(settings: &Settings, models: &[String], created: u64) -> Value {
    let base = settings.first_model();
    let model = |id: &String| {
        let is_base = id == base;
        json!({
            "id": id,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            "root": id,
            "parent": (!is_base).then_some(base),
            "max_model_len": is_base.then(|| settings.context_tokens()),
        })
    };
    let data: Vec<Value> = models.iter().map(model).collect();
    json!({"object": "list", "data": data})
}

/// The answer of `/tokenize`.
pub(crate) fn tokens(tokens: &[u32], max_model_len: usize) -> Value {
    json!({
        "count": tokens.len(),
        "max_model_len": max_model_len,
        "tokens": tokens,
        "token_strs": null,
    })
}

/// The tokens in the body of `/detokenize`.
pub(crate) fn read_detokenize(body: &[u8]) -> Result<Vec<u32>, ApiError> {
    #[derive(Deserialize)]
    struct Body {
        tokens: Option<Vec<u32>>,
    }
    let request: Body = request::from_json(body)?;
    request
        .tokens
        .ok_or_else(|| request::missing_field("tokens", body))
}

/// The answer of a render endpoint: a list for completions, one object for the other APIs.
pub(crate) fn rendered(api: Api, request: &GenerationRequest) -> Value {
    let mut rendered = request.prompts.iter().map(|prompt| {
        json!({
            "request_id": request.id,
            "token_ids": prompt,
            "model": request.model,
            "features": null,
        })
    });
    match api {
        Api::Completions => rendered.collect(),
        Api::Chat | Api::Responses | Api::Messages => rendered.next().unwrap_or_default(),
    }
}
