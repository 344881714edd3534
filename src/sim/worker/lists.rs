//! The small answers: models, version, tokens. Pure.

use serde::{Deserialize, Serialize};

use super::Settings;
use super::answer::json;
use super::ask::{self, Api, Ask, Tokenize};
use super::problem::Problem;

pub(crate) const VERSION: &str = r#"{"version":"0.32.0"}"#;

#[derive(Serialize)]
struct Models<'a> {
    object: &'a str,
    data: Vec<Model<'a>>,
}

#[derive(Serialize)]
struct Model<'a> {
    id: &'a str,
    object: &'a str,
    created: u64,
    owned_by: &'a str,
    root: &'a str,
    parent: Option<&'a str>,
    max_model_len: Option<usize>,
    permission: [Permission<'a>; 1],
}

#[derive(Serialize)]
struct Permission<'a> {
    id: String,
    object: &'a str,
    created: u64,
    allow_create_engine: bool,
    allow_sampling: bool,
    allow_logprobs: bool,
    allow_search_indices: bool,
    allow_view: bool,
    allow_fine_tuning: bool,
    organization: &'a str,
    group: (),
    is_blocking: bool,
}

#[derive(Serialize)]
struct Tokens<'a> {
    count: usize,
    max_model_len: usize,
    tokens: &'a [u32],
    token_strs: Option<&'a [String]>,
}

#[derive(Serialize)]
struct Rendered<'a> {
    request_id: &'a str,
    token_ids: &'a [u32],
    model: &'a str,
    features: (),
}

#[derive(Serialize)]
struct Detokenized<'a> {
    prompt: &'a str,
}

#[derive(Serialize)]
struct Success {
    success: bool,
}

/// The first model is the base, the others are its adapters.
pub(crate) fn models(settings: &Settings, created: u64) -> String {
    let base = settings.first_model();
    let data = settings.models.iter().map(|id| {
        let is_base = id == base;
        let permission = Permission {
            id: format!(
                "modelperm-{:016x}",
                xxhash_rust::xxh3::xxh3_64(id.as_bytes())
            ),
            object: "model_permission",
            created,
            allow_create_engine: false,
            allow_sampling: true,
            allow_logprobs: true,
            allow_search_indices: false,
            allow_view: true,
            allow_fine_tuning: false,
            organization: "*",
            group: (),
            is_blocking: false,
        };
        Model {
            id,
            object: "model",
            created,
            owned_by: "vllm",
            root: id,
            parent: (!is_base).then_some(base),
            max_model_len: is_base.then(|| settings.context_tokens()),
            permission: [permission],
        }
    });
    json(&Models {
        object: "list",
        data: data.collect(),
    })
}

pub(crate) fn tokens(tokenized: &Tokenize, max_model_len: usize) -> String {
    json(&Tokens {
        count: tokenized.tokens.len(),
        max_model_len,
        tokens: &tokenized.tokens,
        token_strs: tokenized.pieces.as_deref(),
    })
}

pub(crate) fn read_detokenize(body: &[u8]) -> Result<Vec<u32>, Problem> {
    #[derive(Deserialize)]
    struct Body {
        tokens: Option<Vec<u32>>,
    }
    let request: Body = ask::from_json(body)?;
    request
        .tokens
        .ok_or_else(|| ask::missing_field("tokens", body))
}

pub(crate) fn detokenized(prompt: &str) -> String {
    json(&Detokenized { prompt })
}

/// Completions are answered with a list, the other APIs with one.
pub(crate) fn rendered(api: Api, ask: &Ask) -> String {
    let mut rendered = ask.prompts.iter().map(|prompt| Rendered {
        request_id: &ask.id,
        token_ids: prompt,
        model: &ask.model,
        features: (),
    });
    match api {
        Api::Completions => json(&rendered.collect::<Vec<_>>()),
        Api::Chat | Api::Responses => json(&rendered.next()),
    }
}

pub(crate) fn success(success: bool) -> String {
    json(&Success { success })
}
