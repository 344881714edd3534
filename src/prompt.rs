//! Reads a request body in one pass: the few fields that routing needs, and the hashes of the prompt in blocks.
//! Unknown fields are skipped; the body is not changed. Pure.

mod blocks;
pub mod cache;
mod canonical;
pub mod engine;
pub mod folder;
pub mod pool;
pub mod render;
pub mod template;
pub mod tokenizer;
pub mod vocabulary;

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{self, DeserializeSeed, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use self::blocks::BlockHasher;
use self::canonical::Canonical;

/// The request bodies that are understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Api {
    Chat,
    Completions,
    Responses,
    Embeddings,
    Rerank,
    Tokenize,
    Detokenize,
}

impl Api {
    pub const COUNT: usize = 7;
    pub const ALL: [Api; Self::COUNT] = [
        Api::Chat,
        Api::Completions,
        Api::Responses,
        Api::Embeddings,
        Api::Rerank,
        Api::Tokenize,
        Api::Detokenize,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Api::Chat => "chat",
            Api::Completions => "completions",
            Api::Responses => "responses",
            Api::Embeddings => "embeddings",
            Api::Rerank => "rerank",
            Api::Tokenize => "tokenize",
            Api::Detokenize => "detokenize",
        }
    }

    /// Whether an engine computes the prompt and keeps its blocks.
    pub fn generates(self) -> bool {
        matches!(self, Api::Chat | Api::Completions | Api::Responses)
    }
}

/// What routing needs to know of a body.
#[derive(Debug, Default)]
pub struct Peek<'a> {
    pub model: Option<Cow<'a, str>>,
    pub is_stream: bool,
    /// A chat whose answer begins with its last message.
    pub is_echo: bool,
    pub user: Option<Cow<'a, str>>,
    pub prompt_cache_key: Option<Cow<'a, str>>,
    pub session_id: Option<Cow<'a, str>>,
    /// Keeps prompts of different salts apart in the engine's cache.
    pub cache_salt: Option<Cow<'a, str>>,
    /// The engine's extra arguments, as they stand in the body; the last, where there are several.
    pub vllm_xargs: Option<&'a str>,
    /// How often the body has the key `cache_salt`, whatever its value.
    pub cache_salts: u32,
    pub prompt: Prompt,
    /// A completion's prompt itself, where it is one and given as token ids.
    pub token_ids: Option<Vec<u32>>,
}

/// A prompt as hashed blocks of its canonical bytes: what comes first in every rendering
/// (instructions, tools) first, the conversation last.
#[derive(Debug, Default, PartialEq)]
pub struct Prompt {
    pub blocks: Vec<LocalBlock>,
    /// Canonical bytes of the whole prompt, what follows the last full block included.
    pub bytes: u64,
}

/// One block on its own, whatever comes before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalBlock {
    pub hash: u64,
    pub bytes: u32,
}

/// Why a body cannot be routed.
#[derive(Debug, PartialEq)]
pub enum Error {
    /// Not JSON, or not an object.
    Json(String),
    /// A field that has a type that no engine takes.
    Type {
        param: &'static str,
        expected: &'static str,
    },
    /// A field that belongs between router and engine.
    Forbidden(&'static str),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Json(error) => write!(f, "the request body is not valid JSON: {error}"),
            Error::Type { param, expected } => write!(f, "`{param}` must be {expected}"),
            Error::Forbidden(param) => {
                write!(
                    f,
                    "`{param}` is set by the router and cannot be part of a request"
                )
            }
        }
    }
}

/// Looks into a body. `block_bytes` is the length of the first blocks; later ones are longer, so that
/// a prompt of any length has a few hundred.
pub fn peek(api: Api, body: &[u8], block_bytes: u32) -> Result<Peek<'_>, Error> {
    look(api, body, block_bytes, false)
}

/// As [`peek`], for a body that the router made itself: it may say how the engine calls the request.
pub fn peek_own(api: Api, body: &[u8], block_bytes: u32) -> Result<Peek<'_>, Error> {
    look(api, body, block_bytes, true)
}

fn look(api: Api, body: &[u8], block_bytes: u32, is_own: bool) -> Result<Peek<'_>, Error> {
    let mut looker = Looker {
        api,
        is_own,
        peek: Peek::default(),
        hasher: BlockHasher::new(block_bytes),
        wrong: None,
    };
    let mut json = serde_json::Deserializer::from_slice(body);
    let read = de::Deserializer::deserialize_map(&mut json, &mut looker).and_then(|()| json.end());
    if let Err(error) = read {
        return Err(Error::Json(error.to_string()));
    }
    if let Some(wrong) = looker.wrong {
        return Err(wrong);
    }
    if api == Api::Completions {
        looker.peek.token_ids = looker.hasher.take_token_ids();
    }
    looker.peek.prompt = looker.hasher.finish();
    Ok(looker.peek)
}

/// Whether a client may send these `vllm_xargs`, as they stand in its body. What cannot be read here is refused,
/// as an engine might read it.
pub fn check_xargs(xargs: &str) -> Result<(), Error> {
    match serde_json::from_str(xargs) {
        Ok(Xargs { forbidden: None }) => Ok(()),
        Ok(Xargs {
            forbidden: Some(name),
        }) => Err(Error::Forbidden(name)),
        Err(error) => Err(Error::Json(error.to_string())),
    }
}

struct Looker<'a> {
    api: Api,
    is_own: bool,
    peek: Peek<'a>,
    hasher: BlockHasher,
    wrong: Option<Error>,
}

/// The parts of a prompt in the order in which engines render them, wherever the body has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Section {
    Template,
    Instructions,
    Tools,
    /// What grows from turn to turn.
    Conversation,
}

#[derive(Clone, Copy)]
#[expect(clippy::enum_variant_names, reason = "they are named as in the body")]
enum Key {
    Model,
    Stream,
    Echo,
    User,
    PromptCacheKey,
    SessionId,
    CacheSalt,
    Part(Section),
    Forbidden(&'static str),
    VllmXargs,
    Other,
}

impl Key {
    fn of(name: &str, api: Api) -> Self {
        match name {
            "model" => Key::Model,
            "stream" => Key::Stream,
            "echo" => Key::Echo,
            "user" => Key::User,
            "prompt_cache_key" => Key::PromptCacheKey,
            "session_id" => Key::SessionId,
            "cache_salt" => Key::CacheSalt,
            "messages" | "prompt" | "input" | "query" => Key::Part(Section::Conversation),
            "tools" | "functions" | "documents" => Key::Part(Section::Tools),
            "instructions" => Key::Part(Section::Instructions),
            "chat_template" | "chat_template_kwargs" => Key::Part(Section::Template),
            "kv_transfer_params" => Key::Forbidden("kv_transfer_params"),
            "ec_transfer_params" => Key::Forbidden("ec_transfer_params"),
            "request_id" if api == Api::Responses => Key::Forbidden("request_id"),
            "vllm_xargs" => Key::VllmXargs,
            _ => Key::Other,
        }
    }
}

impl<'de> Visitor<'de> for &mut Looker<'de> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key_seed(KeyOf(self.api))? {
            match key {
                Key::Model => self.peek.model = self.text("model", map.next_value()?),
                // Affinity keys of another type than text are the engine's to refuse.
                Key::User => self.peek.user = map.next_value::<Text<'de>>()?.0,
                Key::PromptCacheKey => {
                    self.peek.prompt_cache_key = map.next_value::<Text<'de>>()?.0
                }
                Key::SessionId => self.peek.session_id = map.next_value::<Text<'de>>()?.0,
                Key::CacheSalt => {
                    self.peek.cache_salts += 1;
                    self.peek.cache_salt = map.next_value::<Text<'de>>()?.0;
                }
                Key::Stream => self.peek.is_stream = map.next_value::<Flag>()?.0,
                Key::Echo => self.peek.is_echo = map.next_value::<Flag>()?.0,
                Key::Part(section) => {
                    self.hasher.begin(section);
                    map.next_value_seed(Canonical::new(&mut self.hasher, section))?;
                    self.hasher.end();
                }
                Key::Forbidden(name) => {
                    let is_ours = self.is_own && name == "request_id";
                    if map.next_value::<Option<IgnoredAny>>()?.is_some() && !is_ours {
                        self.wrong.get_or_insert(Error::Forbidden(name));
                    }
                }
                Key::VllmXargs => {
                    let xargs = map.next_value::<&'de RawValue>()?.get();
                    self.peek.vllm_xargs = Some(xargs);
                    if let Err(error) = check_xargs(xargs) {
                        self.wrong.get_or_insert(error);
                    }
                }
                Key::Other => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(())
    }
}

impl<'de> Looker<'de> {
    fn text(&mut self, param: &'static str, value: Text<'de>) -> Option<Cow<'de, str>> {
        if value.1 {
            self.wrong.get_or_insert(Error::Type {
                param,
                expected: "a string",
            });
        }
        value.0
    }
}

struct KeyOf(Api);

impl<'de> DeserializeSeed<'de> for KeyOf {
    type Value = Key;

    fn deserialize<D: de::Deserializer<'de>>(self, deserializer: D) -> Result<Key, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for KeyOf {
    type Value = Key;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<Key, E> {
        Ok(Key::of(name, self.0))
    }
}

/// A text, or nothing, or something else (the flag), which is skipped.
struct Text<'a>(Option<Cow<'a, str>>, bool);

impl<'de> Deserialize<'de> for Text<'de> {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Text<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any value")
            }
            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Text<'de>, E> {
                Ok(Text(Some(Cow::Borrowed(text)), false))
            }
            fn visit_str<E>(self, text: &str) -> Result<Text<'de>, E> {
                Ok(Text(Some(Cow::Owned(text.to_owned())), false))
            }
            fn visit_unit<E>(self) -> Result<Text<'de>, E> {
                Ok(Text(None, false))
            }
            fn visit_bool<E>(self, _: bool) -> Result<Text<'de>, E> {
                Ok(Text(None, true))
            }
            fn visit_i64<E>(self, _: i64) -> Result<Text<'de>, E> {
                Ok(Text(None, true))
            }
            fn visit_u64<E>(self, _: u64) -> Result<Text<'de>, E> {
                Ok(Text(None, true))
            }
            fn visit_f64<E>(self, _: f64) -> Result<Text<'de>, E> {
                Ok(Text(None, true))
            }
            fn visit_seq<A: de::SeqAccess<'de>>(self, mut seq: A) -> Result<Text<'de>, A::Error> {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Text(None, true))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Text<'de>, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Text(None, true))
            }
        }
        deserializer.deserialize_any(V)
    }
}

/// Whether a value is the word `true`.
struct Flag(bool);

impl<'de> Deserialize<'de> for Flag {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Anything else than a bool is the engine's to judge; here it only picks a time-out.
        let raw = <&RawValue>::deserialize(deserializer)?;
        Ok(Flag(raw.get() == "true"))
    }
}

/// What `vllm_xargs` has that is not the client's to say. vLLM takes its members for its own extra arguments, so
/// what is refused beside it is refused in it.
struct Xargs {
    forbidden: Option<&'static str>,
}

impl Xargs {
    /// Null says nothing of a report, but of a transfer an engine only asks whether the name is there.
    fn forbidden(name: &str, is_null: bool) -> Option<&'static str> {
        match name {
            "kv_cache_report_mode" if !is_null => Some("vllm_xargs.kv_cache_report_mode"),
            "kv_transfer_params" => Some("vllm_xargs.kv_transfer_params"),
            "ec_transfer_params" => Some("vllm_xargs.ec_transfer_params"),
            _ => None,
        }
    }
}

impl<'de> Deserialize<'de> for Xargs {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        /// Anything but an object is the engine's to refuse.
        const NOTHING: Xargs = Xargs { forbidden: None };
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Xargs;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any value")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Xargs, A::Error> {
                let mut forbidden = None;
                // However it is escaped, and however often it is there.
                while let Some(name) = map.next_key::<Cow<'de, str>>()? {
                    let is_null = map.next_value::<Option<IgnoredAny>>()?.is_none();
                    forbidden = forbidden.or(Xargs::forbidden(&name, is_null));
                }
                Ok(Xargs { forbidden })
            }
            fn visit_seq<A: de::SeqAccess<'de>>(self, mut seq: A) -> Result<Xargs, A::Error> {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(NOTHING)
            }
            fn visit_str<E>(self, _: &str) -> Result<Xargs, E> {
                Ok(NOTHING)
            }
            fn visit_unit<E>(self) -> Result<Xargs, E> {
                Ok(NOTHING)
            }
            fn visit_bool<E>(self, _: bool) -> Result<Xargs, E> {
                Ok(NOTHING)
            }
            fn visit_i64<E>(self, _: i64) -> Result<Xargs, E> {
                Ok(NOTHING)
            }
            fn visit_u64<E>(self, _: u64) -> Result<Xargs, E> {
                Ok(NOTHING)
            }
            fn visit_f64<E>(self, _: f64) -> Result<Xargs, E> {
                Ok(NOTHING)
            }
        }
        deserializer.deserialize_any(V)
    }
}

#[cfg(test)]
mod tests;
