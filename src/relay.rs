//! Carries a request to an engine and its answer back: choose, try, try again, relay, account.
//!
//! The only part that talks to engines for a request. It knows bodies only as bytes with a few
//! fields that [`crate::prompt`] found in them.

pub mod attempt;
mod direct;
mod headers;
mod meter;
mod model;
mod stream;
mod view;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use std::time::Instant;

use bytes::Bytes;
use hyper::HeaderMap;
use hyper::Response;
use hyper::Uri;
use hyper::header::HeaderName;
use hyper::header::HeaderValue;
use prometheus::IntCounter;
use prometheus::IntCounterVec;
use serde::Deserialize;
use serde::Serialize;
use smallvec::SmallVec;
use tower::retry::budget::Budget;
use tower::retry::budget::TpsBudget;
use tracing::debug;
use tracing::warn;

use self::attempt::Attempts;
use self::attempt::Failure;
use self::attempt::Step;
use self::model::Counted;
pub use self::model::KeySource;
pub use self::model::ModelSettings;
use self::model::Models;
pub use self::model::PerModel;
use self::view::LiveView;
use crate::fleet::Group;
use crate::fleet::Worker;
use crate::fleet::breaker;
use crate::fleet::load::InFlight;
use crate::fleet::registry::Registry;
use crate::http::Body;
use crate::ids::Block;
use crate::ids::RequestId;
use crate::ids::WorkerId;
use crate::kv;
use crate::kv::predicted::Predicted;
use crate::observe;
use crate::observe::metrics;
use crate::prompt::Api;
use crate::prompt::Peek;
use crate::routing;
use crate::routing::Decision;

/// A request that carries this header gets it back with the decision.
pub const DECISION: HeaderName = HeaderName::from_static("x-warmroute-decision");

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
    /// Other requests: from sending to the answer.
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
}

/// The relay, shared by all requests.
#[derive(Debug)]
pub struct Relay {
    settings: Settings,
    fleet: Arc<Registry>,
    predicted: Arc<Predicted>,
    models: Models,
    budget: RetryBudget,
    metrics: Metrics,
}

/// A request with all that is needed to choose a worker for it, again if need be.
struct Plan {
    group: Arc<Group>,
    model: Arc<model::ModelState>,
    request: routing::Request,
    blocks: Vec<Block>,
    is_stream: bool,
}

impl Relay {
    pub fn new(
        settings: Settings,
        fleet: Arc<Registry>,
        predicted: Arc<Predicted>,
        models: ModelSettings,
        registry: &metrics::Registry,
    ) -> Self {
        Self {
            budget: RetryBudget::new(&settings),
            settings,
            fleet,
            predicted,
            models: Models::new(models, registry),
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
            },
        }
    }

    pub fn fleet(&self) -> &Registry {
        &self.fleet
    }

    pub fn predicted(&self) -> &Predicted {
        &self.predicted
    }

    /// Length of a prompt's first blocks, for [`crate::prompt::peek`].
    pub fn block_bytes(&self) -> u32 {
        self.predicted.settings().block_bytes
    }

    /// Carries a request and returns an engine's answer, whatever its status.
    pub async fn run(&self, job: &Job<'_>, peek: Peek<'_>) -> Result<Response<Body>, Error> {
        let mut plan = self.plan(job.api, job.headers, &peek)?;
        plan.request.ticket = plan.model.take_ticket();
        drop(peek);
        let counted = Counted::new(plan.model.clone(), job.api, job.begun);
        self.budget.on_request();
        let deadline = job.begun + Duration::from_millis(self.settings.request_timeout_ms);
        let mut attempts = Attempts::new(&self.settings);
        let mut excluded = Excluded::new();
        // What to tell the client if nobody does better: an engine's own refusal, or what went wrong.
        let mut refusal = None;
        let mut last = String::new();
        let error = loop {
            let now = observe::now();
            let Some((decision, worker)) = self.choose(
                &plan,
                now,
                &excluded,
                attempts.may_try_again_where_it_failed(),
            ) else {
                break match attempts.tries() {
                    0 => Error::NoWorker {
                        model: plan.group.model.to_string(),
                        retry_after: NO_WORKER_RETRY_AFTER,
                    },
                    tries if attempts.has_timed_out() => Error::TimedOut { tries },
                    tries => Error::Unreachable { tries, last },
                };
            };
            attempts.begin();
            plan.model.on_decision(&plan.blocks, &decision);
            debug!(
                id = %job.id,
                worker = %worker.name,
                reason = decision.reason.as_str(),
                cost = decision.cost,
                cached_tokens = decision.cached_tokens,
                prompt_tokens = plan.request.prompt_tokens,
                "chosen"
            );
            if !plan.blocks.is_empty() {
                self.predicted.record(
                    now,
                    worker.id,
                    worker.cache_tokens.load(Relaxed),
                    &plan.blocks,
                );
            }
            let in_flight = InFlight::new(
                worker.clone(),
                plan.request.prompt_tokens,
                decision.cached_tokens,
            );
            let timer = Box::pin(tokio::time::sleep_until(
                self.try_limit(&plan, now).min(deadline).into(),
            ));
            let failure = match direct::attempt(job, &worker, timer).await {
                Ok(answer) => {
                    let tried = Tried {
                        answer,
                        in_flight,
                        decision,
                        tries: attempts.tries(),
                    };
                    match self.refusal(&tried.answer) {
                        None => {
                            // How it ends is judged then; a beginning is enough for a worker on trial.
                            let is_good = !tried.answer.is_failure();
                            if !is_good || worker.breaker.state() != breaker::State::Closed {
                                plan.model.judge(&worker, is_good);
                            }
                            return Ok(self.relay(job, &plan, tried, counted, deadline));
                        }
                        Some(failure) => {
                            last = format!("{} answered {}", worker.name, tried.answer.head.status);
                            if let Failure::Refused {
                                retry_after: Some(pause),
                            } = failure
                            {
                                worker.breaker.hold(now + pause.min(HOLD_MAX));
                            }
                            refusal = Some(tried);
                            failure
                        }
                    }
                }
                Err(error) => {
                    last = format!("{}: {error}", worker.name);
                    let failure = error.failure();
                    // A worker that is tried again fails the same request, not another one.
                    if !excluded.contains(&worker.id) {
                        plan.model.judge(&worker, !failure.blames_worker());
                    }
                    failure
                }
            };
            excluded.push(worker.id);
            match attempts.on_failure(failure, fastrand::f64()) {
                Step::Retry { after }
                    if self.may_retry(failure) && observe::now() + after < deadline =>
                {
                    debug!(id = %job.id, last, ?after, "trying again");
                    tokio::time::sleep(after).await;
                }
                _ if failure == Failure::TimedOut => {
                    break Error::TimedOut {
                        tries: attempts.tries(),
                    };
                }
                _ => {
                    break Error::Unreachable {
                        tries: attempts.tries(),
                        last,
                    };
                }
            }
        };
        if let Some(refused) = refusal {
            return Ok(self.relay(job, &plan, refused, counted, deadline));
        }
        warn!(id = %job.id, %error, "request failed");
        counted.fail();
        Err(error)
    }

    /// What would be chosen for a request now, and what every worker would cost. Changes nothing.
    pub fn explain(
        &self,
        api: Api,
        headers: &HeaderMap,
        peek: &Peek<'_>,
    ) -> Result<Explanation, Error> {
        let plan = self.plan(api, headers, peek)?;
        let view = self.view(&plan, observe::now(), &[], usize::MAX);
        let decision = routing::decide(&plan.model.routing, &plan.request, &view);
        let scores = plan
            .group
            .workers
            .iter()
            .enumerate()
            .map(|(place, worker)| {
                let state = routing::View::state(&view, place);
                let cached_tokens = routing::View::cached_tokens(&view, place);
                Score {
                    worker: worker.name.to_string(),
                    is_usable: state.is_usable,
                    breaker: worker.breaker.state(),
                    requests: state.requests,
                    pending_tokens: state.pending_tokens,
                    decode_tokens: state.decode_tokens,
                    cached_tokens,
                    cost: routing::cost::cost(
                        &plan.model.routing,
                        &plan.request,
                        &state,
                        cached_tokens,
                    ),
                }
            });
        Ok(Explanation {
            model: plan.group.model.to_string(),
            policy: plan.model.routing.policy,
            prompt_tokens: plan.request.prompt_tokens,
            prompt_blocks: plan.blocks.len(),
            chosen: decision.map(|decision| plan.group.workers[decision.place].name.to_string()),
            reason: decision.map(|decision| decision.reason),
            workers: scores.collect(),
        })
    }

    fn plan(&self, api: Api, headers: &HeaderMap, peek: &Peek<'_>) -> Result<Plan, Error> {
        let snapshot = self.fleet.snapshot();
        if snapshot.models.is_empty() {
            // Nobody knows yet what there is; a client should ask again, not give up.
            return Err(Error::NoWorker {
                model: peek.model.as_deref().unwrap_or_default().to_owned(),
                retry_after: NO_WORKER_RETRY_AFTER,
            });
        }
        let known = || {
            snapshot
                .models
                .keys()
                .map(|model| model.to_string())
                .collect()
        };
        let group = match &peek.model {
            Some(name) => {
                snapshot
                    .models
                    .get(name.as_ref())
                    .ok_or_else(|| Error::UnknownModel {
                        model: name.to_string(),
                        known: known(),
                    })?
            }
            None => snapshot
                .only_model()
                .ok_or_else(|| Error::NoModel { known: known() })?,
        };
        let model = self.models.of(&group.model);
        let tokens = |bytes: u64| (bytes as f64 / model.bytes_per_token) as u32;
        let blocks = if api.generates() {
            let start = kv::block::start(&group.model, peek.cache_salt.as_deref());
            let blocks = peek.prompt.blocks.iter();
            kv::block::chain(
                start,
                blocks.map(|block| (block.hash, tokens(u64::from(block.bytes)))),
            )
        } else {
            Vec::new()
        };
        Ok(Plan {
            request: routing::Request {
                // Rounding each block down must not make the prompt shorter than its blocks.
                prompt_tokens: tokens(peek.prompt.bytes)
                    .max(blocks.last().map_or(0, |block| block.end_tokens)),
                affinity: model.affinity(headers, peek),
                ticket: model.next_ticket(),
                seed: fastrand::u64(..),
            },
            is_stream: peek.is_stream,
            group: group.clone(),
            model,
            blocks,
        })
    }

    fn view<'a>(
        &'a self,
        plan: &'a Plan,
        now: Instant,
        excluded: &'a [WorkerId],
        holders_max: usize,
    ) -> LiveView<'a> {
        LiveView::new(
            &plan.group,
            &self.predicted,
            &plan.blocks,
            holders_max,
            plan.request.seed,
            now,
            excluded,
        )
    }

    fn choose(
        &self,
        plan: &Plan,
        now: Instant,
        excluded: &[WorkerId],
        may_repeat: bool,
    ) -> Option<(Decision, Arc<Worker>)> {
        let mut excluded: Excluded = excluded.into();
        let holders_max = plan.model.routing.holders as usize;
        loop {
            let decide = |excluded: &[WorkerId]| {
                routing::decide(
                    &plan.model.routing,
                    &plan.request,
                    &self.view(plan, now, excluded, holders_max),
                )
            };
            let decision =
                decide(&excluded).or_else(|| if may_repeat { decide(&[]) } else { None })?;
            let worker = &plan.group.workers[decision.place];
            // Of several requests that see a breaker ready to probe, one gets through.
            if worker.breaker.pass(now) {
                return Some((decision, worker.clone()));
            }
            excluded.push(worker.id);
        }
    }

    fn try_limit(&self, plan: &Plan, now: Instant) -> Instant {
        let limit_ms = if plan.is_stream {
            self.settings.first_byte_timeout_ms
        } else {
            self.settings.answer_timeout_ms
        };
        now + Duration::from_millis(limit_ms)
    }

    /// Whether an answer says that another worker should be asked.
    fn refusal(&self, answer: &direct::Answer) -> Option<Failure> {
        let is_refusal = self
            .settings
            .retry_statuses
            .contains(&answer.head.status.as_u16());
        is_refusal.then(|| Failure::Refused {
            retry_after: headers::retry_after(&answer.head.headers),
        })
    }

    fn may_retry(&self, failure: Failure) -> bool {
        let allowed = self.budget.may_retry();
        match allowed {
            true => self
                .metrics
                .retries
                .with_label_values(&[failure.as_str()])
                .inc(),
            false => self.metrics.retries_refused.inc(),
        }
        allowed
    }

    fn relay(
        &self,
        job: &Job<'_>,
        plan: &Plan,
        tried: Tried,
        counted: Counted,
        deadline: Instant,
    ) -> Response<Body> {
        let Tried {
            answer,
            in_flight,
            decision,
            tries,
        } = tried;
        let direct::Answer {
            head,
            body,
            first,
            timer,
        } = answer;
        let mut response = Response::new(());
        *response.status_mut() = head.status;
        *response.headers_mut() = headers::to_client(head.headers);
        if job.headers.contains_key(DECISION)
            && let Ok(value) = HeaderValue::from_maybe_shared(Bytes::from(format!(
                "worker={}; reason={}; prompt_tokens={}; cached_tokens={}; cost={:.0}; tries={tries}",
                in_flight.worker().name,
                decision.reason.as_str(),
                plan.request.prompt_tokens,
                decision.cached_tokens,
                decision.cost,
            )))
        {
            response.headers_mut().insert(DECISION, value);
        }
        let is_events = headers::is_event_stream(response.headers());
        let limits = stream::Limits {
            idle: Duration::from_millis(self.settings.stream_idle_timeout_ms),
            deadline,
        };
        let status = head.status;
        let meter = meter::Meter::new(counted, status, in_flight, is_events);
        response.map(|()| {
            stream::relay(
                body, first, timer, limits, job.api, status, is_events, meter,
            )
        })
    }
}

/// How long a client should wait where no worker is healthy: about half of what it takes a worker to
/// be found healthy again.
const NO_WORKER_RETRY_AFTER: Duration = Duration::from_secs(1);
/// An engine may ask for a pause, but not take itself out for long.
const HOLD_MAX: Duration = Duration::from_secs(30);

type Excluded = SmallVec<[WorkerId; 4]>;

/// An engine's answer, and how it was come by.
struct Tried {
    answer: direct::Answer,
    in_flight: InFlight,
    decision: Decision,
    tries: u32,
}

/// What `explain` answers.
#[derive(Debug, Serialize)]
pub struct Explanation {
    pub model: String,
    pub policy: routing::Policy,
    pub prompt_tokens: u32,
    pub prompt_blocks: usize,
    pub chosen: Option<String>,
    pub reason: Option<routing::Reason>,
    pub workers: Vec<Score>,
}

/// One worker, as a decision sees it.
#[derive(Debug, Serialize)]
pub struct Score {
    pub worker: String,
    pub is_usable: bool,
    pub breaker: breaker::State,
    pub requests: u32,
    pub pending_tokens: u64,
    pub decode_tokens: u64,
    pub cached_tokens: u32,
    pub cost: f64,
}

/// Retries as a share of requests, so that a fleet in trouble is not sent its requests many times over.
#[derive(Debug)]
struct RetryBudget {
    budget: TpsBudget,
    requests: AtomicU64,
}

impl RetryBudget {
    /// The budget takes a lock for each deposit, so requests are put in by the dozen.
    const BATCH: u64 = 16;

    fn new(settings: &Settings) -> Self {
        let percent = f32::from(u16::try_from(settings.retry_budget_percent).unwrap_or(u16::MAX));
        let share = (percent / 100.0 * Self::BATCH as f32).min(1_000.0);
        let budget = TpsBudget::new(
            Duration::from_secs(10),
            settings.retry_budget_min_per_s,
            share,
        );
        Self {
            budget,
            requests: AtomicU64::new(0),
        }
    }

    fn on_request(&self) {
        if self
            .requests
            .fetch_add(1, Relaxed)
            .is_multiple_of(Self::BATCH)
        {
            self.budget.deposit();
        }
    }

    fn may_retry(&self) -> bool {
        self.budget.withdraw()
    }
}
