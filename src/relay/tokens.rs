//! A request's prompt as its engine's token ids: made here, asked of an engine, or not known in time.
//!
//! Short prompts are tokenised where the request is, long ones on threads of their own. Whatever goes
//! wrong or takes too long leaves the request to be routed by prediction, and is counted.

use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fmt, io};

use bytes::Bytes;
use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;
use prometheus::{Histogram, IntCounter};
use rustc_hash::FxHashMap;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tracing::debug;

use crate::fleet::Group;
use crate::fleet::breaker;
use crate::http::circuit_breaker::SharedBreaker;
use crate::observe;
use crate::observe::metrics::Registry;
use crate::prompt::Api;
use crate::prompt::cache::{self, Cache};
use crate::prompt::engine::{self, Engine};
use crate::prompt::folder::Folder;
use crate::prompt::pool::{self, Pool};
use crate::prompt::render::Unknown;
use crate::prompt::tokenizer::{self, Tokenizer};

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
    /// Which texts are tokenised, and where.
    pub limits: tokenizer::Settings,
    /// Threads for texts that are too long to be tokenised on an I/O thread.
    pub pool: pool::Settings,
    /// Tokenization by the engines, for models with `tokenizer: {from: engine}`.
    pub engine: engine::Settings,
}

/// Where a model's token ids come from.
#[derive(Debug)]
pub enum Source {
    /// The files that its engines have.
    Folder(Box<Folder>),
    /// Its engines themselves.
    Engine,
}

#[derive(Debug)]
enum Of {
    Here(Arc<Tokenizer>),
    /// Opens when questions fail in a row, so that a slow engine does not make every request wait.
    Engine(SharedBreaker),
}

/// Every model's, by the name under which it is served.
#[derive(Debug)]
pub struct Tokens {
    models: FxHashMap<String, Of>,
    /// Where some model has its files.
    pool: Option<Pool>,
    engine: Engine,
    wait: Duration,
    metrics: Metrics,
}

/// A prompt's ids.
#[derive(Debug, PartialEq)]
pub(super) struct Found {
    pub(super) ids: Ids,
    /// Bytes of text after them whose ids are not known, since an image is before.
    pub(super) unknown_bytes: usize,
}

#[derive(Debug)]
pub(super) enum Ids {
    Own(Vec<u32>),
    Shared(Arc<[u32]>),
}

impl std::ops::Deref for Ids {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        match self {
            Ids::Own(ids) => ids,
            Ids::Shared(ids) => ids,
        }
    }
}

impl PartialEq for Ids {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Found {
    pub(super) fn whole(ids: Vec<u32>) -> Self {
        Self {
            ids: Ids::Own(ids),
            unknown_bytes: 0,
        }
    }

    /// Whether the prompt goes on after the ids.
    pub(super) fn ends_early(&self) -> bool {
        self.unknown_bytes > 0
    }
}

/// Why a prompt's ids are not known although its model has a tokenizer.
#[derive(Debug, PartialEq)]
enum Left {
    /// The body, and the tokenizer counts it.
    Unknown(Unknown),
    QueueFull,
    Late,
    Engine(engine::Error),
    /// The engines failed just now.
    EngineRests,
    NoEngine,
}

impl Left {
    const OWN: [&'static str; 4] = ["queue_full", "late", "engine_rests", "no_engine"];

    /// For a metric's label.
    fn reason(&self) -> Option<&'static str> {
        let [queue_full, late, engine_rests, no_engine] = Self::OWN;
        match self {
            Left::Unknown(_) => None,
            Left::QueueFull => Some(queue_full),
            Left::Late => Some(late),
            Left::Engine(error) => Some(error.reason()),
            Left::EngineRests => Some(engine_rests),
            Left::NoEngine => Some(no_engine),
        }
    }
}

impl fmt::Display for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Left::Unknown(unknown) => unknown.fmt(f),
            other => f.write_str(other.reason().unwrap_or_default()),
        }
    }
}

/// What an engine is asked.
#[derive(Clone, Copy)]
struct Question<'a> {
    model: &'a str,
    api: Api,
    headers: &'a HeaderMap,
    body: &'a Bytes,
}

/// How ids were come by.
#[derive(Clone, Copy)]
enum Made {
    /// Where the request is.
    Inline,
    Pool,
    Engine,
    /// An engine had said it before.
    Kept,
}

impl Made {
    const ALL: [&'static str; 4] = ["inline", "pool", "engine", "kept"];
}

/// Seconds from a known prompt to a text of megabytes.
const SECONDS: &[f64] = &[
    0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025,
    0.05, 0.1, 0.25, 0.5,
];

#[derive(Debug)]
struct Metrics {
    made: [Histogram; Made::ALL.len()],
    left: Vec<(&'static str, IntCounter)>,
}

impl Metrics {
    fn new(registry: &Registry) -> Self {
        let seconds = registry.histograms(
            "warmroute_tokens_seconds",
            "From a body to its token ids, by where they were made: inline, on the pool's threads, by an engine, or kept from an engine's answer.",
            SECONDS,
            &["how"],
        );
        let left = registry.counters(
            "warmroute_tokens_left_total",
            "Prompts of models with a tokenizer that were routed without their tokens, by why; what only the body says is in warmroute_tokens_prompts_total.",
            &["reason"],
        );
        let reasons = Left::OWN.into_iter().chain(engine::Error::REASONS);
        Self {
            made: Made::ALL.map(|how| seconds.with_label_values(&[how])),
            left: reasons
                .map(|reason| (reason, left.with_label_values(&[reason])))
                .collect(),
        }
    }

    fn count_left(&self, left: &Left) {
        let reason = left.reason();
        let mut found = self.left.iter().filter(|(name, _)| Some(*name) == reason);
        if let Some((_, counter)) = found.next() {
            counter.inc();
        }
    }
}

impl Tokens {
    /// `seed` is of this process.
    pub fn new(
        settings: &Settings,
        sources: impl IntoIterator<Item = (String, Source)>,
        seed: u64,
        registry: &Registry,
    ) -> io::Result<Self> {
        let cache = Cache::new(&settings.cache, seed, cache::Metrics::new(registry));
        let cache = Arc::new(cache);
        let metrics = tokenizer::Metrics::new(registry);
        let build = |source: Source| match source {
            Source::Folder(folder) => Of::Here(Arc::new(Tokenizer::new(
                folder.renderer,
                folder.vocabulary,
                cache.clone(),
                settings.advanced.limits.clone(),
                metrics.clone(),
            ))),
            Source::Engine => Of::Engine(breaker::Settings::default().build()),
        };
        let models: FxHashMap<String, Of> = sources
            .into_iter()
            .map(|(name, source)| (name, build(source)))
            .collect();
        let is_here = models.values().any(|of| matches!(of, Of::Here(_)));
        Ok(Self {
            pool: match is_here {
                true => Some(Pool::start(&settings.advanced.pool, registry)?),
                false => None,
            },
            models,
            engine: Engine::new(settings.advanced.engine.clone(), seed),
            wait: settings.advanced.pool.timeout,
            metrics: Metrics::new(registry),
        })
    }

    /// The ids of a request's prompt, if they can be had in time.
    pub(super) async fn of(
        &self,
        api: Api,
        group: &Group,
        headers: &HeaderMap,
        body: &Bytes,
    ) -> Option<Found> {
        let (name, of) = self.source(group)?;
        let begun = observe::now();
        let found = match of {
            Of::Here(tokenizer) => self.make(tokenizer, api, body).await,
            Of::Engine(breaker) => {
                let question = Question {
                    model: name,
                    api,
                    headers,
                    body,
                };
                self.ask(question, breaker, group, begun).await
            }
        };
        match found {
            Ok((found, made)) => {
                let seconds = (observe::now() - begun).as_secs_f64();
                self.metrics.made[made as usize].observe(seconds);
                Some(found)
            }
            Err(left) => {
                self.metrics.count_left(&left);
                debug!(model = %group.model, why = %left, "routed without its tokens");
                None
            }
        }
    }

    /// The text of some ids, where a group's tokenizer is here.
    pub(super) fn text(&self, group: &Group, ids: &[u32]) -> Option<String> {
        self.text_of(self.source(group)?.0, ids)
    }

    /// The same by the name of a model that has its own.
    pub fn text_of(&self, model: &str, ids: &[u32]) -> Option<String> {
        match self.models.get(model)? {
            Of::Here(tokenizer) => tokenizer.text(ids),
            Of::Engine(_) => None,
        }
    }

    /// A model's own, or its base's: an adapter's prompts are made of the same tokens, and so are those
    /// of a model that is served under several names.
    fn source<'a>(&self, group: &'a Group) -> Option<(&'a str, &Of)> {
        if self.models.is_empty() {
            return None;
        }
        let names = std::iter::once(&group.model).chain(&group.bases);
        names
            .map(|name| &**name)
            .find_map(|name| Some((name, self.models.get(name)?)))
    }

    async fn make(
        &self,
        tokenizer: &Arc<Tokenizer>,
        api: Api,
        body: &Bytes,
    ) -> Result<(Found, Made), Left> {
        let now_s = observe::unix_s();
        let tokens = if tokenizer.is_long_body(body) {
            let (tokenizer, body) = (tokenizer.clone(), body.clone());
            let work = move || tokenizer.tokens(api, &body, now_s);
            (self.on_pool(work).await?, Made::Pool)
        } else {
            let prepared = tokenizer.prepare(api, body, now_s).map_err(Left::Unknown)?;
            match tokenizer.is_long(&prepared) {
                true => (self.on_pool(move || prepared.finish()).await?, Made::Pool),
                false => (prepared.finish().map_err(Left::Unknown)?, Made::Inline),
            }
        };
        let (tokens, made) = tokens;
        let found = Found {
            ids: Ids::Own(tokens.ids),
            unknown_bytes: tokens.unknown_bytes,
        };
        Ok((found, made))
    }

    async fn on_pool(
        &self,
        work: impl FnOnce() -> Result<tokenizer::Tokens, Unknown> + Send + 'static,
    ) -> Result<tokenizer::Tokens, Left> {
        let pool = self.pool.as_ref().ok_or(Left::QueueFull)?;
        let answer = pool.run(work).map_err(|pool::Full| Left::QueueFull)?;
        match tokio::time::timeout(self.wait, answer).await {
            Ok(Ok(tokens)) => tokens.map_err(Left::Unknown),
            // The thread is gone, which no work of ours can bring about.
            Ok(Err(_)) => Err(Left::QueueFull),
            Err(_) => Err(Left::Late),
        }
    }

    async fn ask(
        &self,
        question: Question<'_>,
        breaker: &SharedBreaker,
        group: &Group,
        now: Instant,
    ) -> Result<(Found, Made), Left> {
        let Question {
            model,
            api,
            headers,
            body,
        } = question;
        let found = |ids| Found {
            ids: Ids::Shared(ids),
            unknown_bytes: 0,
        };
        if let Some(ids) = self.engine.kept(now, model, api, body) {
            return Ok((found(ids), Made::Kept));
        }
        let mut well = group.workers.iter().filter(|it| it.breaker.may_admit(now));
        let count = well.clone().count();
        let worker = match count {
            0 => None,
            count => well.nth(fastrand::usize(..count)),
        };
        let worker = worker.ok_or(Left::NoEngine)?;
        // First, since the breaker counts on hearing of what it let pass.
        let slot = self.engine.slot(body).map_err(Left::Engine)?;
        if !breaker.admit(now) {
            return Err(Left::EngineRests);
        }
        let at = engine::Worker {
            pool: &worker.pool,
            // As with the request itself.
            authorization: worker.authorization.as_ref().or(headers.get(AUTHORIZATION)),
        };
        let answer = self.engine.ask(slot, now, at, model, api, body).await;
        match answer
            .as_ref()
            .map_or_else(|error| error.is_well(), |_| Some(true))
        {
            Some(true) => breaker.on_success(observe::now()),
            Some(false) => breaker.on_failure(observe::now()),
            None => false,
        };
        let ids = answer.map_err(Left::Engine)?;
        Ok((found(ids), Made::Engine))
    }
}
