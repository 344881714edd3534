//! One pass over a request body: the fields that routing needs, and the prompt's block hashes. Pure.

mod field;
mod vllm_xargs;

use std::borrow::Cow;
use std::fmt;

use serde::de::{self, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use self::field::{Flag, Key, KeySeed, OptionalInteger, OptionalString};
pub use self::vllm_xargs::check_xargs;
use super::blocks::BlockHasher;
use super::canonical::Canonical;
use super::types::{Api, Error, HashedPrompt};

/// The fields of a request body that routing needs.
#[derive(Debug, Default)]
pub struct PeekedBody<'a> {
    pub model: Option<Cow<'a, str>>,
    /// The raw JSON of `model`. If the key is repeated, the last value, which is the one that engines take.
    pub model_json: Option<&'a str>,
    pub is_stream: bool,
    /// The response to this chat begins with its last message (`echo`).
    pub is_echo: bool,
    pub user: Option<Cow<'a, str>>,
    pub prompt_cache_key: Option<Cow<'a, str>>,
    pub session_id: Option<Cow<'a, str>>,
    /// vLLM's: lower is earlier.
    pub priority: Option<i64>,
    /// OpenAI's: `auto`, `default`, `flex` or `priority`.
    pub service_tier: Option<Cow<'a, str>>,
    /// Engines share cached blocks only between requests with the same salt.
    pub cache_salt: Option<Cow<'a, str>>,
    /// The raw JSON of the engine's extra arguments. If the key is repeated, the last value.
    pub vllm_xargs: Option<&'a str>,
    /// The raw JSON of `stream_options`. If the key is repeated, the last value.
    pub stream_options: Option<&'a str>,
    /// How many times the body has the key `cache_salt`, with any value.
    pub cache_salt_count: u32,
    /// The most output tokens that the client allows, under any of the APIs' names.
    pub max_tokens: Option<u64>,
    /// The raw JSON of the last `null` under one of these names.
    pub no_max_tokens: Option<&'a str>,
    /// Answers that the client asks for, or that the engine generates to choose from.
    pub choices: Option<u64>,
    /// One of these, or `stream`, is of another type. Engines read some of these values nevertheless, such as `"1000"`
    /// and `"true"`.
    pub odd_value: Option<&'static str>,
    pub prompt: HashedPrompt,
    /// The prompt of a completion request, if it is a single list of token ids.
    pub token_ids: Option<Vec<u32>>,
}

/// Reads a client's body. `block_bytes` is the length of the first blocks. Later blocks are longer, so that a
/// prompt of any length has at most a few hundred.
pub fn peek(api: Api, body: &[u8], block_bytes: u32) -> Result<PeekedBody<'_>, Error> {
    read(api, body, block_bytes, false)
}

/// Reads a body that the router made itself. Unlike a client's, it may have a `request_id`.
pub fn peek_router_made(api: Api, body: &[u8], block_bytes: u32) -> Result<PeekedBody<'_>, Error> {
    read(api, body, block_bytes, true)
}

fn read(
    api: Api,
    body: &[u8],
    block_bytes: u32,
    is_router_made: bool,
) -> Result<PeekedBody<'_>, Error> {
    let mut reader = BodyReader {
        api,
        is_router_made,
        peek: PeekedBody::default(),
        hasher: BlockHasher::new(block_bytes),
        first_error: None,
    };
    let mut json = serde_json::Deserializer::from_slice(body);
    let read = de::Deserializer::deserialize_map(&mut json, &mut reader).and_then(|()| json.end());
    if let Err(error) = read {
        return Err(Error::Json(error.to_string()));
    }
    if let Some(error) = reader.first_error {
        return Err(error);
    }
    if api == Api::Completions {
        reader.peek.token_ids = reader.hasher.take_token_ids();
    }
    reader.peek.prompt = reader.hasher.finish();
    Ok(reader.peek)
}

struct BodyReader<'a> {
    api: Api,
    is_router_made: bool,
    peek: PeekedBody<'a>,
    hasher: BlockHasher,
    /// The body is read to its end, and invalid JSON is reported before this.
    first_error: Option<Error>,
}

impl<'de> Visitor<'de> for &mut BodyReader<'de> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key_seed(KeySeed(self.api))? {
            match key {
                Key::Model => {
                    let json = map.next_value::<&'de RawValue>()?.get();
                    let value = serde_json::from_str(json).map_err(de::Error::custom)?;
                    self.peek.model_json = Some(json);
                    self.peek.model = self.string("model", value);
                }
                // If an affinity key is not a string, the engine decides whether to refuse the request.
                Key::User => self.peek.user = map.next_value::<OptionalString<'de>>()?.value,
                Key::PromptCacheKey => {
                    self.peek.prompt_cache_key = map.next_value::<OptionalString<'de>>()?.value
                }
                Key::SessionId => {
                    self.peek.session_id = map.next_value::<OptionalString<'de>>()?.value
                }
                Key::Priority => self.peek.priority = map.next_value::<OptionalInteger>()?.0,
                Key::ServiceTier => {
                    self.peek.service_tier = map.next_value::<OptionalString<'de>>()?.value
                }
                Key::CacheSalt => {
                    self.peek.cache_salt_count += 1;
                    self.peek.cache_salt = map.next_value::<OptionalString<'de>>()?.value;
                }
                Key::Stream => {
                    let raw = map.next_value::<&'de RawValue>()?.get();
                    self.peek.is_stream = raw == "true";
                    if !matches!(raw, "true" | "false" | "null") {
                        self.peek.odd_value = Some("stream");
                    }
                }
                Key::MaxTokens => {
                    let raw = map.next_value::<&'de RawValue>()?.get();
                    let given = self.number("max_tokens", raw);
                    self.peek.max_tokens = self.peek.max_tokens.max(given);
                    if raw == "null" {
                        self.peek.no_max_tokens = Some(raw);
                    }
                }
                Key::Choices => {
                    let raw = map.next_value::<&'de RawValue>()?.get();
                    let given = self.number("n", raw);
                    self.peek.choices = self.peek.choices.max(given);
                }
                Key::Echo => self.peek.is_echo = map.next_value::<Flag>()?.0,
                Key::Prompt(section) => {
                    self.hasher.begin(section);
                    map.next_value_seed(Canonical::new(&mut self.hasher, section))?;
                    self.hasher.end();
                }
                Key::Forbidden(name) => {
                    let is_allowed = self.is_router_made && name == "request_id";
                    if map.next_value::<Option<IgnoredAny>>()?.is_some() && !is_allowed {
                        self.first_error.get_or_insert(Error::Forbidden(name));
                    }
                }
                Key::VllmXargs => {
                    let xargs = map.next_value::<&'de RawValue>()?.get();
                    self.peek.vllm_xargs = Some(xargs);
                    if let Err(error) = check_xargs(xargs) {
                        self.first_error.get_or_insert(error);
                    }
                }
                Key::StreamOptions => {
                    self.peek.stream_options = Some(map.next_value::<&'de RawValue>()?.get());
                }
                Key::Metadata => {
                    let user = field::user_of(map.next_value::<&'de RawValue>()?.get());
                    self.peek.user = user.or(self.peek.user.take());
                }
                Key::Other => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(())
    }
}

impl<'de> BodyReader<'de> {
    /// A whole number; the engine decides whether to refuse anything else.
    fn number(&mut self, param: &'static str, raw: &str) -> Option<u64> {
        let whole = || {
            raw.parse::<f64>()
                .ok()
                .filter(|number| number.fract() == 0.0)
        };
        let float = || whole().filter(|number| (0.0..1e15).contains(number));
        let number = raw
            .parse()
            .ok()
            .or_else(|| float().map(|number| number as u64));
        if number.is_none() && raw != "null" {
            self.peek.odd_value = Some(param);
        }
        number
    }

    fn string(&mut self, param: &'static str, field: OptionalString<'de>) -> Option<Cow<'de, str>> {
        if field.is_other_type {
            self.first_error.get_or_insert(Error::Type {
                param,
                expected: "a string",
            });
        }
        field.value
    }
}
