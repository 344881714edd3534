//! Asks a worker for the token ids of a prompt, for models whose tokenizer is not available to the router.
//!
//! The engine's render endpoints accept the body of each API unchanged and return the ids that the engine would
//! compute; they need `--enable-scale-out`. Where they are refused, `/tokenize` is used, which is always available
//! but supports fewer fields of a chat request. The caller chooses the worker. Replies are cached for a while.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hashlink::LinkedHashMap;
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::{self, HeaderValue};
use hyper::{Request, StatusCode};
use parking_lot::Mutex;
use rustc_hash::{FxBuildHasher, FxHashMap};
use schemars::JsonSchema;
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use tokio::sync::{Semaphore, SemaphorePermit};
use xxhash_rust::xxh3::Xxh3;

use super::Api;
use crate::http::client;
use crate::units::{DurationText, SizeText};

/// Tokenization by the engines, for models with `tokenizer: {from: engine}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// A request waits this long for its tokens; then it is routed by prediction. An idle engine answers in a few
    /// milliseconds, and waiting for a busy one costs more than a worse choice.
    #[serde(with = "DurationText")]
    pub timeout: Duration,
    /// Tokenization requests to engines at a time, of all models.
    #[schemars(range(min = 1, max = 1048576))]
    pub max_requests: u32,
    /// Memory for token ids that engines returned, of all models: 2,000 prompts of 4,000 tokens. 0 keeps none.
    #[serde(with = "SizeText")]
    #[schemars(extend("min" = "0"))]
    pub max_cache_memory: u64,
    /// Cached token ids are used for this long. Templates may contain the date.
    #[serde(with = "DurationText")]
    #[schemars(extend("min" = "0s"))]
    pub cache_ttl: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            timeout: Duration::from_millis(20),
            max_requests: 32,
            max_cache_memory: 32 << 20,
            cache_ttl: Duration::from_secs(600),
        }
    }
}

/// Why a worker's answer is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Error {
    /// As many questions as are allowed are out.
    Busy,
    /// No answer in time.
    Late,
    /// No connection, or an answer that is none of this endpoint's.
    Failed,
    /// The engine says that the body is wrong, or too much for its model.
    Refused,
    /// Nothing that the engine can be asked tells the ids of such a body.
    Unknown,
}

impl Error {
    pub const REASONS: [&'static str; 5] = [
        "engine_busy",
        "engine_late",
        "engine_failed",
        "engine_refused",
        "engine_unknown",
    ];

    /// For a metric's label.
    pub fn reason(self) -> &'static str {
        Self::REASONS[self as usize]
    }

    /// What it says of the worker: whether it answered as one that is well. `None`: nothing.
    pub fn is_well(self) -> Option<bool> {
        match self {
            Error::Late | Error::Failed => Some(false),
            Error::Refused => Some(true),
            Error::Busy | Error::Unknown => None,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.reason())
    }
}

impl std::error::Error for Error {}

/// A worker to be asked.
#[derive(Clone, Copy, Debug)]
pub struct Worker<'a> {
    pub pool: &'a Arc<client::Pool>,
    pub authorization: Option<&'a HeaderValue>,
}

/// See [`Engine::slot`].
#[derive(Debug)]
pub struct Slot<'a>(#[expect(dead_code, reason = "held")] SemaphorePermit<'a>);

#[derive(Debug)]
pub struct Engine {
    settings: Settings,
    slots: Semaphore,
    kept: Mutex<Kept>,
    /// Workers that refused to render, and when.
    without_render: Mutex<FxHashMap<Box<str>, Instant>>,
    seed: u64,
}

/// After so long a worker is asked to render again: it may have been started anew.
const WITHOUT_RENDER: Duration = Duration::from_secs(60);
/// More workers than a fleet has; past it, what is known of them is found out again.
const WITHOUT_RENDER_MAX: usize = 4_096;
/// Fields of a body that do not change its prompt, so that requests which differ in them share an answer.
const NOT_OF_THE_PROMPT: &[&str] = &[
    "cache_salt",
    "frequency_penalty",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens",
    "metadata",
    "min_p",
    "n",
    "presence_penalty",
    "priority",
    "prompt_cache_key",
    "request_id",
    "safety_identifier",
    "seed",
    "session_id",
    "stop",
    "store",
    "stream",
    "stream_options",
    "temperature",
    "top_k",
    "top_p",
    "user",
];

#[derive(Debug, Default)]
struct Kept {
    /// Least recently used first.
    answers: LinkedHashMap<u128, (Instant, Arc<[u32]>), FxBuildHasher>,
    bytes: u64,
}

/// What an answer takes beside its ids.
const ENTRY_BYTES: u64 = 100;

fn bytes_of(ids: &[u32]) -> u64 {
    size_of_val(ids) as u64 + ENTRY_BYTES
}

impl Kept {
    fn get(&mut self, key: u128, now: Instant, age_max: Duration) -> Option<Arc<[u32]>> {
        let (since, ids) = self.answers.to_back(&key)?;
        if now.saturating_duration_since(*since) <= age_max {
            return Some(ids.clone());
        }
        self.bytes -= bytes_of(ids);
        self.answers.remove(&key);
        None
    }

    fn put(&mut self, key: u128, now: Instant, ids: Arc<[u32]>, bytes_max: u64) {
        let bytes = bytes_of(&ids);
        if bytes > bytes_max {
            return;
        }
        self.bytes += bytes;
        if let Some((_, old)) = self.answers.insert(key, (now, ids)) {
            self.bytes -= bytes_of(&old);
        }
        while self.bytes > bytes_max {
            let Some((_, (_, oldest))) = self.answers.pop_front() else {
                break;
            };
            self.bytes -= bytes_of(&oldest);
        }
    }
}

impl Engine {
    /// `seed` is of this process: nobody can prepare bodies that share a hash.
    pub fn new(settings: Settings, seed: u64) -> Self {
        Self {
            slots: Semaphore::new(settings.max_requests as usize),
            settings,
            kept: Mutex::default(),
            without_render: Mutex::default(),
            seed,
        }
    }

    /// What is known already of a body. `model` is the name under which it is served.
    pub fn kept(&self, now: Instant, model: &str, api: Api, body: &[u8]) -> Option<Arc<[u32]>> {
        let age_max = self.settings.cache_ttl;
        let key = self.key(model, api, body);
        self.kept.lock().get(key, now, age_max)
    }

    /// A place for a question, if one is free and the body is one to ask about.
    pub fn slot(&self, body: &[u8]) -> Result<Slot<'_>, Error> {
        if has_media(body) {
            return Err(Error::Unknown);
        }
        self.slots.try_acquire().map(Slot).map_err(|_| Error::Busy)
    }

    /// Asks a worker, and keeps what it says.
    pub async fn ask(
        &self,
        _slot: Slot<'_>,
        now: Instant,
        worker: Worker<'_>,
        model: &str,
        api: Api,
        body: &Bytes,
    ) -> Result<Arc<[u32]>, Error> {
        let limit = self.settings.timeout;
        let ids = tokio::time::timeout(limit, self.ids(now, worker, api, body))
            .await
            .map_err(|_| Error::Late)??;
        let ids: Arc<[u32]> = ids.into();
        let key = self.key(model, api, body);
        let bytes_max = self.settings.max_cache_memory;
        self.kept.lock().put(key, now, ids.clone(), bytes_max);
        Ok(ids)
    }

    fn key(&self, model: &str, api: Api, body: &[u8]) -> u128 {
        let mut hasher = Xxh3::with_seed(self.seed);
        hasher.update(model.as_bytes());
        hasher.update(&[0xff, api as u8]);
        match serde_json::from_slice::<Fields<'_>>(body) {
            Ok(Fields(fields)) => {
                for (name, value) in fields {
                    if NOT_OF_THE_PROMPT.binary_search(&&*name).is_err() {
                        hasher.update(name.as_bytes());
                        hasher.update(&[0xff]);
                        hasher.update(value.get().as_bytes());
                        hasher.update(&[0xff]);
                    }
                }
            }
            Err(_) => hasher.update(body),
        }
        hasher.digest128()
    }

    async fn ids(
        &self,
        now: Instant,
        worker: Worker<'_>,
        api: Api,
        body: &Bytes,
    ) -> Result<Vec<u32>, Error> {
        let path = match api {
            Api::Chat => "/v1/chat/completions/render",
            Api::Completions => "/v1/completions/render",
            Api::Responses => "/v1/responses/render",
            Api::Embeddings | Api::Rerank | Api::Tokenize | Api::Detokenize => {
                return Err(Error::Unknown);
            }
        };
        let address = worker.pool.address();
        if self.renders(now, address) {
            match post(worker, path, body).await? {
                (StatusCode::OK, answer) => return read_rendered(&answer),
                // Not switched on, or older than these endpoints.
                (
                    StatusCode::FORBIDDEN | StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED,
                    _,
                ) => self.set_without_render(now, address),
                (status, _) => return Err(refusal(status)),
            }
        }
        if !is_told_by_tokenize(api, body) {
            return Err(Error::Unknown);
        }
        match post(worker, "/tokenize", body).await? {
            (StatusCode::OK, answer) => read_tokenized(&answer),
            (status, _) => Err(refusal(status)),
        }
    }

    fn renders(&self, now: Instant, address: &str) -> bool {
        let since = self.without_render.lock().get(address).copied();
        since.is_none_or(|since| now.saturating_duration_since(since) > WITHOUT_RENDER)
    }

    fn set_without_render(&self, now: Instant, address: &str) {
        let mut without = self.without_render.lock();
        if without.len() >= WITHOUT_RENDER_MAX {
            without.clear();
        }
        without.insert(address.into(), now);
    }
}

/// A body's fields, in their order, each as it is written.
struct Fields<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de: 'a, 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Fields<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields<'de>, A::Error> {
                let mut fields = Vec::with_capacity(8);
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                Ok(Fields(fields))
            }
        }
        deserializer.deserialize_map(V)
    }
}

fn refusal(status: StatusCode) -> Error {
    match status.is_client_error() && status != StatusCode::UNAUTHORIZED {
        true => Error::Refused,
        false => Error::Failed,
    }
}

/// An answer of more than a million ids is none that an engine could compute.
const ANSWER_BYTES_MAX: usize = 16 << 20;

async fn post(worker: Worker<'_>, path: &str, body: &Bytes) -> Result<(StatusCode, Bytes), Error> {
    let build = || {
        let mut request = Request::post(path)
            .header(header::HOST, worker.pool.address())
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(value) = worker.authorization {
            request = request.header(header::AUTHORIZATION, value);
        }
        request
            .body(Full::new(body.clone()))
            .map_err(|_| Error::Failed)
    };
    let answer = match worker.pool.send(build()?).await {
        Err(client::Error::Stale(_)) => worker.pool.send_anew(build()?).await,
        answer => answer,
    };
    let answer = answer.map_err(|_| Error::Failed)?;
    let status = answer.status();
    let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX);
    let body = body.collect().await.map_err(|_| Error::Failed)?;
    Ok((status, body.to_bytes()))
}

#[derive(Deserialize)]
struct Rendered {
    token_ids: Vec<u32>,
    /// Of pictures and sounds, whose blocks have names that cannot be known here.
    #[serde(default)]
    features: Option<IgnoredAny>,
}

/// One prompt; completions answer with a list of those.
#[derive(Deserialize)]
#[serde(untagged)]
enum Answer {
    One(Rendered),
    Several(Vec<Rendered>),
}

fn read_rendered(answer: &[u8]) -> Result<Vec<u32>, Error> {
    let rendered = match serde_json::from_slice(answer).map_err(|_| Error::Failed)? {
        Answer::One(rendered) => rendered,
        Answer::Several(mut all) if all.len() == 1 => all.remove(0),
        Answer::Several(_) => return Err(Error::Unknown),
    };
    match rendered.features {
        None => Ok(rendered.token_ids),
        Some(_) => Err(Error::Unknown),
    }
}

fn read_tokenized(answer: &[u8]) -> Result<Vec<u32>, Error> {
    #[derive(Deserialize)]
    struct Tokenized {
        tokens: Vec<u32>,
    }
    let tokenized: Tokenized = serde_json::from_slice(answer).map_err(|_| Error::Failed)?;
    Ok(tokenized.tokens)
}

/// Whether `/tokenize`, given the same body, comes to the same ids: it knows a chat's messages, tools
/// and template arguments, and a completion's one text.
fn is_told_by_tokenize(api: Api, body: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Known<'a> {
        #[serde(default, borrow)]
        prompt: Option<&'a RawValue>,
        #[serde(default)]
        documents: Option<IgnoredAny>,
        #[serde(default)]
        reasoning_effort: Option<IgnoredAny>,
        #[serde(default)]
        truncate_prompt_tokens: Option<IgnoredAny>,
        #[serde(default)]
        suffix: Option<IgnoredAny>,
        #[serde(default)]
        prompt_embeds: Option<IgnoredAny>,
        #[serde(default)]
        chat_template: Option<IgnoredAny>,
    }
    let Ok(fields) = serde_json::from_slice::<Known<'_>>(body) else {
        return false;
    };
    let is_plain = fields.truncate_prompt_tokens.is_none();
    match api {
        Api::Chat => {
            is_plain
                && fields.prompt.is_none()
                && fields.documents.is_none()
                && fields.reasoning_effort.is_none()
                && fields.chat_template.is_none()
        }
        Api::Completions => {
            is_plain
                && fields.prompt.is_some_and(|it| it.get().starts_with('"'))
                && fields.suffix.is_none()
                && fields.prompt_embeds.is_none()
        }
        _ => false,
    }
}

/// Whether a body may have a picture, a sound or a film in it. A text that says so counts as well: its
/// request is routed by prediction and no harm is done.
fn has_media(body: &[u8]) -> bool {
    const KINDS: [&[u8]; 8] = [
        b"\"image_url\"",
        b"\"input_image\"",
        b"\"image_embeds\"",
        b"\"audio_url\"",
        b"\"input_audio\"",
        b"\"audio_embeds\"",
        b"\"video_url\"",
        b"\"video_embeds\"",
    ];
    let has = |kind: &&[u8]| memchr::memmem::find(body, kind).is_some();
    KINDS.iter().any(has)
}

#[cfg(test)]
mod tests;
