//! Carries a request to an engine and its answer back: choose, try, try again, relay, account.
//!
//! The only part that talks to engines for a request. It knows bodies only as bytes with a few
//! fields that [`crate::prompt`] found in them.

pub mod attempt;
mod budget;
mod carry;
mod choice;
mod counted;
mod direct;
mod explain;
pub mod handoff;
mod headers;
pub mod held;
mod meter;
mod model;
mod opening;
mod pinned;
mod plan;
pub mod prefill_decode;
mod report;
mod running;
mod stream;
mod tell_tokens;
pub mod tokens;
pub mod trial;
pub mod usage;
pub mod view;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::header::HeaderName;
use hyper::{HeaderMap, Uri};
use prometheus::{IntCounter, IntCounterVec};
use serde::{Deserialize, Serialize};

use self::budget::RetryBudget;
pub use self::explain::{Explanation, Score};
pub use self::held::{Caches, KnownBy};
use self::model::Models;
pub use self::model::{KeySource, ModelSettings, PerModel};
use self::prefill_decode::PrefillDecode;
use self::tokens::Tokens;
use crate::fleet::registry::Registry;
use crate::ids::RequestId;
use crate::kv::predicted::Predicted;
use crate::observe::metrics;
use crate::prompt::Api;

/// A request that carries this header gets it back with the decision.
pub const DECISION: HeaderName = HeaderName::from_static("x-warmroute-decision");

/// Which worker an answer comes from, by its name: an extension of the response.
#[derive(Clone, Debug)]
pub struct ServedBy(pub Arc<str>);

/// Limits of one request's way to an engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// Workers that one request may try.
    pub attempts_max: u32,
    /// Statuses of an engine that send a request elsewhere. Not 500: a request that breaks one
    /// engine would break the next.
    pub retry_statuses: Vec<u16>,
    /// Before the second try; doubles with each further one.
    pub backoff_ms: u64,
    pub backoff_max_ms: u64,
    /// Retries allowed for each 100 requests.
    pub retry_budget_percent: u32,
    /// Retries a second that are always allowed.
    pub retry_budget_min_per_s: u32,
    /// Streamed requests: from sending to the first byte of the answer's body.
    pub first_byte_timeout_ms: u64,
    /// Other requests: from sending to the answer. Longer than the longest answer: one that is still
    /// being made when it ends is asked for again elsewhere.
    pub answer_timeout_ms: u64,
    /// Between two pieces of an answer. An engine that shuts down can leave a stream open for ever.
    pub stream_idle_timeout_ms: u64,
    /// From the first try to the end of the answer.
    pub request_timeout_ms: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            attempts_max: 3,
            retry_statuses: vec![502, 503, 504],
            backoff_ms: 25,
            backoff_max_ms: 1_000,
            retry_budget_percent: 20,
            retry_budget_min_per_s: 10,
            // Longer than any queue that anyone waits in.
            first_byte_timeout_ms: 120_000,
            // The time-out of OpenAI's own clients.
            answer_timeout_ms: 600_000,
            stream_idle_timeout_ms: 60_000,
            request_timeout_ms: 1_800_000,
        }
    }
}

/// One request to carry.
#[derive(Debug)]
pub struct Job<'a> {
    pub api: Api,
    /// In origin form: path and query, as the client sent them.
    pub target: Uri,
    pub headers: &'a HeaderMap,
    pub body: Bytes,
    pub id: RequestId,
    /// When the request's head had come.
    pub begun: Instant,
}

/// Why no engine's answer can be passed on.
#[derive(Debug, PartialEq)]
pub enum Error {
    /// No worker serves it.
    UnknownModel { model: String, known: Vec<String> },
    /// The request names none, and there is more than one.
    NoModel { known: Vec<String> },
    /// Workers serve it, and none can take it now.
    NoWorker {
        model: String,
        retry_after: Duration,
    },
    /// Workers can take it, but none can compute its prompt for them, and they are not to do so themselves.
    NoPrefill {
        model: String,
        retry_after: Duration,
    },
    /// Every try failed before an answer.
    Unreachable { tries: u32, last: String },
    /// The last try took too long.
    TimedOut { tries: u32 },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::UnknownModel { model, known } => {
                write!(
                    f,
                    "the model `{model}` does not exist; there is {}",
                    known.join(", ")
                )
            }
            Error::NoModel { known } => {
                write!(f, "`model` is missing; there is {}", known.join(", "))
            }
            Error::NoWorker { model, .. } if model.is_empty() => {
                f.write_str("no worker can take requests now")
            }
            Error::NoWorker { model, .. } => {
                write!(f, "no worker can take requests for `{model}` now")
            }
            Error::NoPrefill { model, .. } => {
                write!(f, "no prefill worker can take requests for `{model}` now")
            }
            Error::Unreachable { tries, last } => {
                write!(f, "no engine answered in {tries} tries: {last}")
            }
            Error::TimedOut { tries } => write!(f, "no engine answered in time, in {tries} tries"),
        }
    }
}

/// What is counted of requests as a whole; `model` has what is counted for each model.
#[derive(Clone, Debug)]
pub struct Metrics {
    retries: IntCounterVec,
    retries_refused: IntCounter,
    reports: IntCounterVec,
}

/// The relay, shared by all requests.
#[derive(Debug)]
pub struct Relay {
    settings: Settings,
    fleet: Arc<Registry>,
    caches: Caches,
    models: Models,
    tokens: Arc<Tokens>,
    budget: RetryBudget,
    /// None where requests are never split.
    prefill_decode: Option<PrefillDecode>,
    metrics: Metrics,
}

impl Relay {
    pub fn new(
        settings: Settings,
        fleet: Arc<Registry>,
        caches: Caches,
        models: ModelSettings,
        prefill_decode: &prefill_decode::Settings,
        tokens: Arc<Tokens>,
        registry: &metrics::Registry,
    ) -> Self {
        let prefill_decode = PrefillDecode::new(prefill_decode, registry);
        let families = prefill_decode.as_ref().map(|it| it.families.clone());
        Self {
            budget: RetryBudget::new(&settings),
            settings,
            fleet,
            caches,
            models: Models::new(models, families, registry),
            prefill_decode,
            tokens,
            metrics: Metrics {
                retries: registry.counters(
                    "warmroute_retries_total",
                    "Tries after the first, by why.",
                    &["reason"],
                ),
                retries_refused: registry.counter(
                    "warmroute_retries_refused_total",
                    "Retries that the retry budget did not allow.",
                ),
                reports: registry.counters(
                    "warmroute_kv_reports_asked_total",
                    "Requests that asked an engine to tell again what it held of their prompt.",
                    &["model", "outcome"],
                ),
            },
        }
    }

    pub fn fleet(&self) -> &Registry {
        &self.fleet
    }

    pub fn predicted(&self) -> &Predicted {
        &self.caches.predicted
    }

    /// Length of a prompt's first blocks, for [`crate::prompt::peek`].
    pub fn block_bytes(&self) -> u32 {
        self.caches.predicted.settings().block_bytes
    }
}
