//! The prompt of a completion: one text, or one list of token ids.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use super::{Prompt, Text, Unknown};

#[derive(Deserialize)]
struct Body {
    #[serde(default)]
    prompt: Option<GivenPrompt>,
    #[serde(default)]
    add_special_tokens: Option<bool>,
    #[serde(default)]
    suffix: Option<IgnoredAny>,
    #[serde(default)]
    prompt_embeds: Option<IgnoredAny>,
    #[serde(default)]
    truncate_prompt_tokens: Option<Value>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum GivenPrompt {
    Text(String),
    Ids(Vec<u32>),
    Texts(Vec<String>),
    Lists(Vec<Vec<u32>>),
}

pub(super) fn read(body: &[u8]) -> Result<Prompt, Unknown> {
    let body: Body =
        serde_json::from_slice(body).map_err(|error| Unknown::Body(error.to_string()))?;
    if body.suffix.is_some() {
        return Err(Unknown::Field("suffix"));
    }
    if body.prompt_embeds.is_some() {
        return Err(Unknown::Field("prompt_embeds"));
    }
    if body.truncate_prompt_tokens.is_some() {
        return Err(Unknown::Field("truncate_prompt_tokens"));
    }
    let add_special_tokens = body.add_special_tokens.unwrap_or(true);
    let text = |text| Prompt::Text(Text::whole(text, add_special_tokens));
    match body.prompt {
        Some(GivenPrompt::Text(prompt)) => Ok(text(prompt)),
        Some(GivenPrompt::Ids(ids)) if !ids.is_empty() => Ok(Prompt::Ids(ids)),
        Some(GivenPrompt::Texts(mut texts)) if texts.len() == 1 => Ok(text(texts.remove(0))),
        Some(GivenPrompt::Lists(mut lists)) if lists.len() == 1 => Ok(Prompt::Ids(lists.remove(0))),
        // Each is a request of its own to the engine, and they go to one worker.
        Some(GivenPrompt::Texts(_) | GivenPrompt::Lists(_)) => Err(Unknown::Field("prompt")),
        Some(GivenPrompt::Ids(_)) | None => Err(Unknown::Refused("no prompt".to_owned())),
    }
}
