//! One pass over a request body: the fields that routing needs, and the prompt's block hashes. Pure.

mod field;
mod vllm_xargs;

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;

use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use self::field::Key;
pub use self::vllm_xargs::check_xargs;
use super::blocks::BlockHasher;
use super::canonical::Canonical;
use super::types::{Api, Error, HashedPrompt, Section};
use crate::json_scan::{JsonString, Scan};

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
    /// The raw JSON of `priority`. If the key is repeated, the last value.
    pub priority_json: Option<&'a str>,
    /// OpenAI's: `auto`, `default`, `flex` or `priority`.
    pub service_tier: Option<Cow<'a, str>>,
    /// Engines share cached blocks only between requests with the same salt.
    pub cache_salt: Option<Cow<'a, str>>,
    /// The raw JSON of `stream_options`. If the key is repeated, the last value.
    pub stream_options: Option<&'a str>,
    /// The client may get events of several tokens each (`stream_interval`).
    pub has_stream_interval: bool,
    /// How many times the body has the key `cache_salt`, with any value.
    pub cache_salt_count: u32,
    /// The most output tokens that the client allows, under any of the APIs' names.
    pub max_tokens: Option<u64>,
    /// The name under which the body has that number.
    pub max_tokens_name: &'static str,
    /// The raw JSON of the last `null` under one of these names.
    pub no_max_tokens: Option<&'a str>,
    /// Answers that the client asks for, or that the engine generates to choose from.
    pub choices: Option<u64>,
    /// One of these, or `stream`, is of another type. Engines read some of these values nevertheless, such as `"1000"`
    /// and `"true"`.
    pub odd_value: Option<&'static str>,
    pub prompt: HashedPrompt,
    /// The raw JSON of `sampling_params`, of tokens in, tokens out. If the key is repeated, the last value.
    pub sampling_params: Option<&'a str>,
    /// The prompt, if it is a single list of token ids and nothing else.
    pub token_ids: Option<Vec<u32>>,
    /// It names an image or another medium: `uuid` in a part of a message, or `features`. vLLM takes what it keeps under such
    /// a name for the medium, whoever sent that and with whatever salt.
    pub names_media: bool,
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
    let reader = || BodyReader {
        api,
        is_router_made,
        peek: PeekedBody::default(),
        hasher: BlockHasher::new(block_bytes),
        has_other_tokens: false,
        first_error: None,
    };
    match scanned(body, reader()) {
        Some(reader) => reader.finish(),
        None => parsed(body, reader()),
    }
}

/// Finds the values of a body, and parses those that are read but for the prompt. `None` if the body is not JSON, or has bytes
/// that are no text, which a parser takes where it does not look.
fn scanned<'a>(body: &'a [u8], mut reader: BodyReader<'a>) -> Option<BodyReader<'a>> {
    let mut scan = Scan::of_bytes(body)?;
    scan.each_member(|scan, name| match Key::new(&name, reader.api) {
        Key::Prompt(section) => {
            reader.hasher.begin(section);
            Canonical::new(&mut reader.hasher, section).scan(scan)?;
            reader.hasher.end();
            Some(())
        }
        Key::Other => scan.value().map(drop),
        key => {
            let json = scan.value()?;
            reader.on_member(key, json).ok()
        }
    })?;
    scan.is_over().then_some(reader)
}

/// Says what is wrong with a body.
fn parsed<'a>(body: &'a [u8], mut reader: BodyReader<'a>) -> Result<PeekedBody<'a>, Error> {
    let mut json = serde_json::Deserializer::from_slice(body);
    let read = de::Deserializer::deserialize_map(&mut json, &mut reader).and_then(|()| json.end());
    match read {
        Ok(()) => reader.finish(),
        Err(error) => Err(Error::Json(error.to_string())),
    }
}

struct BodyReader<'a> {
    api: Api,
    is_router_made: bool,
    peek: PeekedBody<'a>,
    hasher: BlockHasher,
    /// The engine computes other tokens than those of the prompt: some stand for images, or it cuts some off.
    has_other_tokens: bool,
    /// The body is read to its end, and invalid JSON is reported before this.
    first_error: Option<Error>,
}

impl<'de> Visitor<'de> for &mut BodyReader<'de> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(JsonString(name)) = map.next_key()? {
            let key = Key::new(&name, self.api);
            map.next_value_seed(Member { reader: self, key })?;
        }
        Ok(())
    }
}

/// Reads the value of a key.
struct Member<'r, 'a> {
    reader: &'r mut BodyReader<'a>,
    key: Key,
}

impl<'de> DeserializeSeed<'de> for Member<'_, 'de> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, value: D) -> Result<(), D::Error> {
        let Self { reader, key } = self;
        match key {
            Key::Prompt(section) => {
                reader.hasher.begin(section);
                Canonical::new(&mut reader.hasher, section).deserialize(value)?;
                reader.hasher.end();
                Ok(())
            }
            Key::Other => IgnoredAny::deserialize(value).map(drop),
            key => {
                let json = <&'de RawValue>::deserialize(value).map(RawValue::get)?;
                reader.on_member(key, json).map_err(|error| {
                    // The body's parser adds the position in the body. The one in the value would mislead.
                    let text = error.to_string();
                    let reason = text
                        .split_once(" at line ")
                        .map_or(&*text, |(reason, _)| reason);
                    de::Error::custom(reason)
                })
            }
        }
    }
}

impl<'de> BodyReader<'de> {
    /// Takes the raw JSON of a key's value. The prompt and what is skipped never come here.
    fn on_member(&mut self, key: Key, json: &'de str) -> serde_json::Result<()> {
        match key {
            // Hashed or skipped where they are found.
            Key::Prompt(_) | Key::Other => {}
            Key::Model => {
                self.peek.model_json = Some(json);
                self.peek.model = field::string(json)?;
                if self.peek.model.is_none() && json != "null" {
                    self.first_error.get_or_insert(Error::Type {
                        param: "model",
                        expected: "a string",
                    });
                }
            }
            // If an affinity key is not a string, the engine decides whether to refuse the request.
            Key::User => self.peek.user = field::string(json)?,
            Key::PromptCacheKey => self.peek.prompt_cache_key = field::string(json)?,
            Key::SessionId => self.peek.session_id = field::string(json)?,
            // The engine decides, too, whether to refuse what is no whole number.
            Key::Priority => {
                self.peek.priority = json.parse().ok();
                self.peek.priority_json = Some(json);
            }
            Key::ServiceTier => self.peek.service_tier = field::string(json)?,
            Key::CacheSalt => {
                self.peek.cache_salt_count += 1;
                self.peek.cache_salt = field::string(json)?;
            }
            Key::Stream => {
                self.peek.is_stream = json == "true";
                if !matches!(json, "true" | "false" | "null") {
                    self.peek.odd_value = Some("stream");
                }
            }
            Key::MaxTokens(name) => {
                let given = self.number(name, json);
                if given > self.peek.max_tokens {
                    (self.peek.max_tokens, self.peek.max_tokens_name) = (given, name);
                }
                if json == "null" {
                    self.peek.no_max_tokens = Some(json);
                }
            }
            Key::Choices(name) => {
                let given = self.number(name, json);
                self.peek.choices = self.peek.choices.max(given);
            }
            // The router only chooses a time-out by it.
            Key::Echo => self.peek.is_echo = json == "true",
            Key::Forbidden(name) => {
                let is_allowed = self.is_router_made && name == "request_id";
                if json != "null" && !is_allowed {
                    self.first_error.get_or_insert(Error::Forbidden(name));
                }
            }
            Key::VllmXargs => {
                if let Err(error) = check_xargs(json) {
                    self.first_error.get_or_insert(error);
                }
            }
            Key::StreamOptions => self.peek.stream_options = Some(json),
            Key::StreamInterval => self.peek.has_stream_interval = !matches!(json, "null" | "1"),
            Key::Metadata => {
                let user = field::user_of(json);
                self.peek.user = user.or(self.peek.user.take());
            }
            Key::SamplingParams => self.on_sampling_params(json),
            Key::ChangesTokens => self.has_other_tokens |= json != "null",
            Key::Features if json == "null" => {}
            Key::Features => {
                self.has_other_tokens = true;
                self.hasher.media_names += 1;
                self.hasher.begin(Section::Template);
                Canonical::new(&mut self.hasher, Section::Template)
                    .deserialize(&mut serde_json::Deserializer::from_str(json))?;
                self.hasher.end();
            }
        }
        Ok(())
    }

    /// The engine says what is wrong with parameters that are no object.
    fn on_sampling_params(&mut self, params: &'de str) {
        self.peek.sampling_params = Some(params);
        let Ok(members) = serde_json::from_str::<HashMap<String, &RawValue>>(params) else {
            self.peek.odd_value = Some("sampling_params");
            return;
        };
        let member = |name: &str| members.get(name).map(|value| value.get());
        if let Some(raw) = member("max_tokens") {
            let name = "sampling_params.max_tokens";
            (self.peek.max_tokens, self.peek.max_tokens_name) = (self.number(name, raw), name);
            self.peek.no_max_tokens = (raw == "null").then_some(raw);
        }
        if let Some(raw) = member("n") {
            self.peek.choices = self.number("sampling_params.n", raw);
        }
        // What other APIs have as `vllm_xargs`.
        if let Some(extra) = member("extra_args").filter(|extra| *extra != "null")
            && let Err(error) = check_xargs(extra)
        {
            self.first_error.get_or_insert(match error {
                Error::Forbidden(name) => Error::Forbidden(vllm_xargs::as_extra_args(name)),
                other => other,
            });
        }
    }

    fn finish(mut self) -> Result<PeekedBody<'de>, Error> {
        if let Some(error) = self.first_error {
            return Err(error);
        }
        let may_be_ids = match self.api {
            Api::Completions | Api::Generate => !self.has_other_tokens,
            _ => false,
        };
        if may_be_ids {
            self.peek.token_ids = self.hasher.take_token_ids();
        }
        self.peek.names_media = self.hasher.media_names > 0;
        self.peek.prompt = self.hasher.finish();
        Ok(self.peek)
    }

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
}

#[cfg(test)]
mod tests;
