//! Asks a worker for the token ids of a prompt, for models whose tokenizer is not available to the router.
//!
//! The engine's render endpoints accept the body of each API unchanged and return the ids that the engine would
//! compute; they need `--enable-scale-out`. Where they are refused, `/tokenize` is used, which is always available
//! but supports fewer fields of a chat request. The caller chooses the worker. Responses are cached for a
//! limited time.

mod cache;
mod error;
mod request;
mod response;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::StatusCode;
use hyper::header::HeaderValue;
use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::sync::{Semaphore, SemaphorePermit};

use self::cache::ResponseCache;
pub use self::error::Error;
use super::render::messages::{self, TemplateFacts};
use super::types::Api;
use crate::http::client;
use crate::units::DurationText;

/// Tokenization by the engines, for models with `tokenizer: {from: engine}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// A request waits this long for its tokens; then it is routed by prediction. An idle engine answers in a few
    /// milliseconds, and waiting for a busy one costs more than a worse choice.
    #[serde(with = "DurationText")]
    pub timeout: Duration,
    /// Tokenization requests to engines at a time, of all models.
    #[serde(skip)]
    pub max_requests: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            timeout: Duration::from_millis(20),
            // Engines render on one thread; more at once would wait there.
            max_requests: 32,
        }
    }
}

/// The worker to send a tokenization request to.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    pub pool: &'a Arc<client::Pool>,
    pub authorization: Option<&'a HeaderValue>,
}

/// Requests token ids from engines, for all models.
#[derive(Debug)]
pub struct EngineTokenizer {
    settings: Settings,
    permits: Semaphore,
    cache: Mutex<ResponseCache>,
    /// Addresses of workers whose render endpoints are unavailable, each with the time when that was found.
    render_unavailable: Mutex<HashMap<Box<str>, Instant>>,
    seed: u64,
}

/// Memory for token ids that engines returned, of all models: 2,000 prompts of 4,000 tokens.
const CACHE_BYTES: u64 = 32 << 20;
/// Cached token ids are used for this long. Templates may contain the date.
const CACHE_TTL: Duration = Duration::from_secs(600);
/// After this time the render endpoints are tried again, because the engine may have been restarted.
const RENDER_RETRY_INTERVAL: Duration = Duration::from_secs(60);
/// More workers than a fleet has. When the map is full it is cleared.
const MAX_RENDER_UNAVAILABLE: usize = 4_096;

impl EngineTokenizer {
    /// `seed` must be random for each process, so that no client can prepare bodies with the same hash.
    pub fn new(settings: Settings, seed: u64) -> Self {
        Self {
            permits: Semaphore::new(settings.max_requests as usize),
            settings,
            cache: Mutex::default(),
            render_unavailable: Mutex::default(),
            seed,
        }
    }

    /// The cached token ids of a request. `model` is its served name.
    pub fn cached(&self, now: Instant, model: &str, api: Api, body: &[u8]) -> Option<Arc<[u32]>> {
        let key = cache::key(self.seed, model, api, body);
        self.cache.lock().get(key, now, CACHE_TTL)
    }

    /// Permission to send one request; fails if too many are running, or if engines cannot tokenize this body.
    pub fn permit(&self, body: &[u8]) -> Result<SemaphorePermit<'_>, Error> {
        if request::has_media(body) {
            return Err(Error::Unsupported);
        }
        self.permits.try_acquire().map_err(|_| Error::Busy)
    }

    /// Requests the token ids from a worker and caches them.
    pub async fn fetch(
        &self,
        _permit: SemaphorePermit<'_>,
        now: Instant,
        target: Target<'_>,
        model: &str,
        api: Api,
        body: &Bytes,
    ) -> Result<Arc<[u32]>, Error> {
        let timeout = self.settings.timeout;
        let ids = tokio::time::timeout(timeout, self.post_body(now, target, model, api, body))
            .await
            .map_err(|_| Error::Timeout)??;
        let ids: Arc<[u32]> = ids.into();
        let key = cache::key(self.seed, model, api, body);
        self.cache.lock().put(key, now, ids.clone(), CACHE_BYTES);
        Ok(ids)
    }

    async fn post_body(
        &self,
        now: Instant,
        target: Target<'_>,
        model: &str,
        api: Api,
        body: &Bytes,
    ) -> Result<Vec<u32>, Error> {
        let chat;
        let (api, body) = match api {
            Api::Messages | Api::CountTokens => {
                chat = as_chat(model, body)?;
                (Api::Chat, &chat)
            }
            _ => (api, body),
        };
        let path = match api {
            Api::Chat => "/v1/chat/completions/render",
            Api::Completions => "/v1/completions/render",
            Api::Responses => "/v1/responses/render",
            Api::Embeddings
            | Api::Rerank
            | Api::Tokenize
            | Api::Detokenize
            | Api::Messages
            | Api::CountTokens
            | Api::Generate
            | Api::Other => {
                return Err(Error::Unsupported);
            }
        };
        let address = target.pool.address();
        if self.may_render(now, address) {
            match post(target, path, body).await? {
                (StatusCode::OK, response) => return response::read_rendered(&response),
                // The engine was started without `--enable-scale-out`, or is older than these endpoints.
                (
                    StatusCode::FORBIDDEN | StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED,
                    _,
                ) => self.set_render_unavailable(now, address),
                (status, _) => return Err(error_of_status(status)),
            }
        }
        if !request::is_supported_by_tokenize(api, body) {
            return Err(Error::Unsupported);
        }
        match post(target, "/tokenize", body).await? {
            (StatusCode::OK, response) => response::read_tokenized(&response),
            (status, _) => Err(error_of_status(status)),
        }
    }

    fn may_render(&self, now: Instant, address: &str) -> bool {
        let since = self.render_unavailable.lock().get(address).copied();
        since.is_none_or(|since| now.saturating_duration_since(since) > RENDER_RETRY_INTERVAL)
    }

    fn set_render_unavailable(&self, now: Instant, address: &str) {
        let mut unavailable = self.render_unavailable.lock();
        if unavailable.len() >= MAX_RENDER_UNAVAILABLE {
            unavailable.clear();
        }
        unavailable.insert(address.into(), now);
    }
}

/// A Messages request as the chat completion that the engine makes of it. Engines of several versions can render those.
fn as_chat(model: &str, body: &Bytes) -> Result<Bytes, Error> {
    if messages::needs_facts(body) {
        return Err(Error::Unsupported);
    }
    let mut chat = messages::to_chat(body, TemplateFacts::ANY).map_err(|_| Error::Unsupported)?;
    chat["model"] = model.into();
    let chat = chat.to_string();
    if request::has_media(chat.as_bytes()) {
        Err(Error::Unsupported)
    } else {
        Ok(chat.into())
    }
}

fn error_of_status(status: StatusCode) -> Error {
    if status.is_client_error() && status != StatusCode::UNAUTHORIZED {
        Error::Refused
    } else {
        Error::Failed
    }
}

/// More than a million token ids, which is longer than any context.
const MAX_RESPONSE_BYTES: usize = 16 << 20;

async fn post(target: Target<'_>, path: &str, body: &Bytes) -> Result<(StatusCode, Bytes), Error> {
    let answer = target
        .pool
        .post(path, target.authorization, body.clone(), MAX_RESPONSE_BYTES);
    answer.await.map_err(|_| Error::Failed)
}

#[cfg(test)]
mod tests;
