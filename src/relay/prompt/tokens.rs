//! The token ids of a request's prompt: from a tokenizer in the router, or from an engine.
//!
//! Short prompts are tokenized on the I/O thread, long ones on the threads of a pool. If tokenization fails or takes too
//! long, the request is routed by prediction, and the fallback is counted by reason.

mod fallback;
mod metrics;

use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use bytes::Bytes;
use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tracing::{debug, warn};

use self::fallback::FallbackReason;
use self::metrics::{Metrics, TokenSource};
use crate::fleet::Group;
use crate::fleet::circuit_breaker;
use crate::http::circuit_breaker::{SharedBreaker, State};
use crate::observe;
use crate::observe::log_once::LogOnce;
use crate::observe::metrics::Registry;
use crate::prompt::Api;
use crate::prompt::cache::{self, Cache};
use crate::prompt::engine::{self, EngineTokenizer};
use crate::prompt::folder::ModelFolder;
use crate::prompt::pool::{self, Pool};
use crate::prompt::render::TokenizeError;
use crate::prompt::tokenizer::{self, TokenizedPrompt, Tokenizer};

/// Tokenization of prompts, for models that have a tokenizer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    #[serde(flatten)]
    pub cache: cache::Settings,
    /// Settings for experts.
    pub advanced: Advanced,
}

/// Settings of tokenization for experts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Advanced {
    /// Threads for texts that are too long to be tokenised on an I/O thread.
    pub pool: pool::Settings,
    /// Tokenization by the engines, for models with `tokenizer: {from: engine}`.
    pub engine: engine::Settings,
}

/// Where a model's token ids come from.
#[derive(Debug)]
pub enum Source {
    /// A tokenizer in the router, from the same model folder that the engines use.
    Folder(Box<ModelFolder>),
    /// The model's engines.
    Engine,
    /// The one that the model has: nothing about it has changed.
    Kept,
}

#[derive(Clone, Debug)]
enum ModelTokenizer {
    Local(Arc<Tokenizer>),
    /// The circuit breaker opens after consecutive failures, so that a slow engine does not delay every request.
    Engine(Arc<SharedBreaker>),
}

/// The tokenizers of all models of one configuration, by served name.
#[derive(Debug)]
pub struct Tokens {
    models: FxHashMap<String, ModelTokenizer>,
    shared: Arc<Shared>,
}

/// What outlives a configuration.
#[derive(Debug)]
struct Shared {
    settings: Settings,
    cache: Arc<Cache>,
    /// Started with the first tokenizer in the router.
    pool: OnceLock<Pool>,
    engine: EngineTokenizer,
    registry: Registry,
    tokenizer_metrics: tokenizer::Metrics,
    metrics: Metrics,
    /// What was logged of each configured model's requests that cannot be tokenized.
    refusals: Mutex<FxHashMap<String, LogOnce>>,
}

impl Shared {
    /// A template that refuses a request may be one that is not understood here; or the engine refuses it, too.
    fn warn_of_refusal(&self, model: &str, now: Instant, reason: &FallbackReason) {
        let FallbackReason::Untokenizable(
            TokenizeError::Refused(why) | TokenizeError::Tokenizer(why),
        ) = reason
        else {
            return;
        };
        let mut refusals = self.refusals.lock();
        let log = refusals.entry(model.to_owned()).or_default();
        if log.should_log(now, why) {
            warn!(
                model,
                why,
                "a request cannot be tokenized and is routed by prediction; if the engine answers such requests, their cached prefixes are not known exactly"
            );
        }
    }
}

/// The token ids of a prompt, up to the first image.
#[derive(Debug, PartialEq)]
pub(in crate::relay) struct PromptTokens {
    pub(in crate::relay) ids: Arc<[u32]>,
    /// Bytes of text from the first image on, which have no ids.
    pub(in crate::relay) untokenized_bytes: usize,
    /// The token ids of the next such prompt may not come in time: the prompt is so long that it may be tokenized on another
    /// thread, or an engine tokenizes it.
    pub(in crate::relay) may_be_late: bool,
}

impl PromptTokens {
    pub(in crate::relay) fn complete(ids: Vec<u32>) -> Self {
        Self {
            ids: ids.into(),
            untokenized_bytes: 0,
            may_be_late: false,
        }
    }

    /// Whether the prompt continues after the ids, with an image.
    pub(in crate::relay) fn is_partial(&self) -> bool {
        self.untokenized_bytes > 0
    }
}

impl Tokens {
    /// `seed` must be random for each process, so that no client can prepare texts with the same hash.
    pub fn new(
        settings: &Settings,
        sources: impl IntoIterator<Item = (String, Source)>,
        seed: u64,
        registry: &Registry,
    ) -> io::Result<Self> {
        let shared = Shared {
            cache: Arc::new(Cache::new(
                &settings.cache,
                seed,
                cache::Metrics::new(registry),
            )),
            pool: OnceLock::new(),
            engine: EngineTokenizer::new(settings.advanced.engine.clone(), seed),
            registry: registry.clone(),
            tokenizer_metrics: tokenizer::Metrics::new(registry),
            metrics: Metrics::new(registry),
            refusals: Mutex::default(),
            settings: settings.clone(),
        };
        let none = Self {
            models: FxHashMap::default(),
            shared: Arc::new(shared),
        };
        none.successor(sources)
    }

    /// The tokenizers of the next configuration, with the cache and the threads of this one.
    pub fn successor(
        &self,
        sources: impl IntoIterator<Item = (String, Source)>,
    ) -> io::Result<Self> {
        let shared = &self.shared;
        let build = |name: &str, source: Source| match source {
            Source::Folder(folder) => Some(ModelTokenizer::Local(Arc::new(Tokenizer::new(
                folder.renderer,
                folder.vocabulary,
                shared.cache.clone(),
                shared.tokenizer_metrics.clone(),
            )))),
            Source::Engine => match self.models.get(name) {
                Some(ModelTokenizer::Engine(breaker)) => {
                    Some(ModelTokenizer::Engine(breaker.clone()))
                }
                _ => {
                    let breaker = circuit_breaker::Settings::default().build();
                    Some(ModelTokenizer::Engine(Arc::new(breaker)))
                }
            },
            Source::Kept => self.models.get(name).cloned(),
        };
        let built = sources.into_iter().filter_map(|(name, source)| {
            let tokenizer = build(&name, source)?;
            Some((name, tokenizer))
        });
        let models: FxHashMap<String, ModelTokenizer> = built.collect();
        let mut tokenizers = models.values();
        let has_local = tokenizers.any(|tokenizer| matches!(tokenizer, ModelTokenizer::Local(_)));
        if has_local && shared.pool.get().is_none() {
            let pool = Pool::start(&shared.settings.advanced.pool, &shared.registry)?;
            // One configuration is taken over at a time.
            let _ = shared.pool.set(pool);
        }
        Ok(Self {
            models,
            shared: shared.clone(),
        })
    }

    /// Whether prompts for this group's model are tokenized.
    pub(in crate::relay) fn has_tokenizer(&self, group: &Group) -> bool {
        self.tokenizer(group).is_some()
    }

    /// The ids of a request's prompt, if they are available in time.
    pub(in crate::relay) async fn of(
        &self,
        api: Api,
        group: &Group,
        headers: &HeaderMap,
        body: &Bytes,
    ) -> Option<PromptTokens> {
        let (name, tokenizer) = self.tokenizer(group)?;
        let started = observe::now();
        let found = match tokenizer {
            ModelTokenizer::Local(tokenizer) => self.tokenize(tokenizer, api, body).await,
            ModelTokenizer::Engine(breaker) => {
                self.fetch(name, breaker, group, api, headers, body).await
            }
        };
        match found {
            Ok((tokens, source)) => {
                let seconds = (observe::now() - started).as_secs_f64();
                self.shared.metrics.observe(source, seconds);
                Some(tokens)
            }
            Err(reason) => {
                self.shared.metrics.count_fallback(&reason);
                self.shared.warn_of_refusal(name, started, &reason);
                debug!(model = %group.model, %reason, "prompt not tokenized; routing by prediction");
                None
            }
        }
    }

    /// Why the router cannot tokenize a request; `None` if it can, or if an engine does.
    pub(in crate::relay) fn why_untokenizable(
        &self,
        api: Api,
        group: &Group,
        body: &Bytes,
    ) -> Option<String> {
        match self.tokenizer(group)? {
            (_, ModelTokenizer::Local(tokenizer)) => {
                let error = tokenizer.render(api, body, observe::unix_s()).err()?;
                Some(error.to_string())
            }
            (_, ModelTokenizer::Engine(_)) => None,
        }
    }

    /// Whether the model's template is known to fail on a system message after the head.
    pub(in crate::relay) fn refuses_later_system(&self, group: &Group) -> bool {
        let found = self.tokenizer(group);
        matches!(found, Some((_, ModelTokenizer::Local(tokenizer))) if tokenizer.refuses_later_system())
    }

    /// The text of token ids, if the group's model has a tokenizer in the router.
    pub(in crate::relay) fn text(&self, group: &Group, ids: &[u32]) -> Option<String> {
        self.text_of(self.tokenizer(group)?.0, ids)
    }

    /// The text of token ids, by served name.
    pub fn text_of(&self, model: &str, ids: &[u32]) -> Option<String> {
        match self.models.get(model)? {
            ModelTokenizer::Local(tokenizer) => tokenizer.text(ids),
            ModelTokenizer::Engine(_) => None,
        }
    }

    /// The tokenizer of the group's model or of its base model, with the name of that model. An adapter has the tokens of
    /// its base, and so has a model that is served under several names.
    fn tokenizer<'a>(&self, group: &'a Group) -> Option<(&'a str, &ModelTokenizer)> {
        if self.models.is_empty() {
            return None;
        }
        let names = std::iter::once(&group.model).chain(&group.bases);
        names
            .map(|name| &**name)
            .find_map(|name| Some((name, self.models.get(name)?)))
    }

    async fn tokenize(
        &self,
        tokenizer: &Arc<Tokenizer>,
        api: Api,
        body: &Bytes,
    ) -> Result<(PromptTokens, TokenSource), FallbackReason> {
        let now_s = observe::unix_s();
        let mut may_be_late = true;
        let (tokens, source) = if body.len() > tokenizer::MAX_INLINE_BODY {
            let (tokenizer, body) = (tokenizer.clone(), body.clone());
            let task = move || tokenizer.tokens(api, &body, now_s);
            (self.on_pool(task).await?, TokenSource::Pool)
        } else {
            let prepared = tokenizer
                .prepare(api, body, now_s)
                .map_err(FallbackReason::Untokenizable)?;
            may_be_late = prepared.may_be_long();
            if prepared.is_long() {
                let task = move || prepared.finish();
                (self.on_pool(task).await?, TokenSource::Pool)
            } else {
                let tokens = prepared.finish().map_err(FallbackReason::Untokenizable)?;
                (tokens, TokenSource::Inline)
            }
        };
        let tokens = PromptTokens {
            ids: tokens.ids.into(),
            untokenized_bytes: tokens.untokenized_bytes,
            may_be_late,
        };
        Ok((tokens, source))
    }

    async fn on_pool(
        &self,
        task: impl FnOnce() -> Result<TokenizedPrompt, TokenizeError> + Send + 'static,
    ) -> Result<TokenizedPrompt, FallbackReason> {
        let pool = self.shared.pool.get().ok_or(FallbackReason::QueueFull)?;
        let result = pool
            .run(task)
            .map_err(|pool::QueueFull| FallbackReason::QueueFull)?;
        match tokio::time::timeout(self.shared.settings.advanced.pool.timeout, result).await {
            Ok(Ok(tokens)) => tokens.map_err(FallbackReason::Untokenizable),
            // The tokenizer panicked.
            Ok(Err(_)) => Err(FallbackReason::QueueFull),
            Err(_) => Err(FallbackReason::Timeout),
        }
    }

    async fn fetch(
        &self,
        model: &str,
        breaker: &SharedBreaker,
        group: &Group,
        api: Api,
        headers: &HeaderMap,
        body: &Bytes,
    ) -> Result<(PromptTokens, TokenSource), FallbackReason> {
        let now = observe::now();
        let complete = |ids| PromptTokens {
            ids,
            untokenized_bytes: 0,
            may_be_late: true,
        };
        if let Some(ids) = self.shared.engine.cached(now, model, api, body) {
            return Ok((complete(ids), TokenSource::Cache));
        }
        let workers = group.workers.iter();
        let available = workers.filter(|worker| worker.breaker.may_admit(now));
        let available: Vec<_> = available.collect();
        let worker = fastrand::choice(available).ok_or(FallbackReason::NoWorker)?;
        // Before the circuit breaker, which expects a result for each call that it admits.
        let permit = self
            .shared
            .engine
            .permit(body)
            .map_err(FallbackReason::Engine)?;
        if !breaker.admit(now) {
            return Err(FallbackReason::EngineCircuitOpen);
        }
        let trial = if breaker.state() == State::HalfOpen {
            Some(Trial {
                breaker,
                admitted_at: now,
            })
        } else {
            None
        };
        let target = engine::Target {
            pool: &worker.pool,
            // The same key as the request itself uses.
            authorization: worker.authorization.as_ref().or(headers.get(AUTHORIZATION)),
        };
        let engine = &self.shared.engine;
        // Boxed, so that requests whose tokens are known here do not carry its state.
        let result = Box::pin(engine.fetch(permit, now, target, model, api, body)).await;
        match result
            .as_ref()
            .map_or_else(|error| error.engine_succeeded(), |_| Some(true))
        {
            Some(true) => {
                let trial = trial.as_ref();
                let counts = trial.is_some_and(|trial| breaker.counts_trial(trial.admitted_at));
                breaker.on_success(observe::now(), counts)
            }
            Some(false) => breaker.on_failure(observe::now()),
            None => false,
        };
        let ids = result.map_err(FallbackReason::Engine)?;
        Ok((complete(ids), TokenSource::Engine))
    }
}

/// The trial of a half-open circuit breaker. If it shows nothing of the engines, as when its client leaves, the next
/// call is the trial.
struct Trial<'a> {
    breaker: &'a SharedBreaker,
    admitted_at: Instant,
}

impl Drop for Trial<'_> {
    fn drop(&mut self) {
        self.breaker.release_trial(self.admitted_at, observe::now());
    }
}
