//! Reads the prompt of a completion request: one text or one list of token ids.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use super::types::{RenderedPrompt, RenderedText, TokenizeError, refused};

#[derive(Deserialize)]
struct Body {
    prompt: Option<PromptField>,
    add_special_tokens: Option<bool>,
    suffix: Option<IgnoredAny>,
    prompt_embeds: Option<IgnoredAny>,
    truncate_prompt_tokens: Option<Value>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum PromptField {
    Text(String),
    Ids(Vec<u32>),
    Texts(Vec<String>),
    Lists(Vec<Vec<u32>>),
}

pub(super) fn read(body: &[u8]) -> Result<RenderedPrompt, TokenizeError> {
    let body: Body = serde_json::from_slice(body)?;
    if body.suffix.is_some() {
        return Err(TokenizeError::Field("suffix"));
    }
    if body.prompt_embeds.is_some() {
        return Err(TokenizeError::Field("prompt_embeds"));
    }
    if body.truncate_prompt_tokens.is_some() {
        return Err(TokenizeError::Field("truncate_prompt_tokens"));
    }
    let add_special_tokens = body.add_special_tokens.unwrap_or(true);
    let text = |text| RenderedPrompt::Text(RenderedText::complete(text, add_special_tokens));
    match body.prompt {
        Some(PromptField::Text(prompt)) => Ok(text(prompt)),
        Some(PromptField::Ids(ids)) if !ids.is_empty() => Ok(RenderedPrompt::Ids(ids)),
        Some(PromptField::Texts(mut texts)) if texts.len() == 1 => Ok(text(texts.remove(0))),
        Some(PromptField::Lists(mut lists)) if lists.len() == 1 => {
            Ok(RenderedPrompt::Ids(lists.remove(0)))
        }
        // The engine makes a separate request of each prompt, and all of them go to one worker.
        Some(PromptField::Texts(_) | PromptField::Lists(_)) => Err(TokenizeError::Field("prompt")),
        Some(PromptField::Ids(_)) | None => Err(refused("no prompt")),
    }
}
