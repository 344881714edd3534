//! One request's way: choose, try, try again, and pass on the answer.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use std::time::Instant;

use bytes::Bytes;
use hyper::Response;
use hyper::header::HeaderValue;
use tokio::time::Sleep;
use tracing::debug;
use tracing::warn;

use super::DECISION;
use super::Error;
use super::Job;
use super::Relay;
use super::attempt::Attempts;
use super::attempt::Failure;
use super::attempt::Step;
use super::counted::Counted;
use super::direct;
use super::headers;
use super::meter;
use super::plan::Excluded;
use super::plan::NO_WORKER_RETRY_AFTER;
use super::plan::Plan;
use super::report;
use super::report::Report;
use super::running::Running;
use super::stream;
use crate::fleet::Worker;
use crate::fleet::breaker;
use crate::fleet::load::InFlight;
use crate::http::Body;
use crate::ids::Block;
use crate::ids::WorkerId;
use crate::kv::predicted::Predicted;
use crate::observe;
use crate::prompt::Peek;
use crate::routing::Decision;

/// An engine may ask for a pause, but not take itself out for long.
const HOLD_MAX: Duration = Duration::from_secs(30);

/// An engine's answer, and how it was come by.
struct Tried {
    answer: direct::Answer,
    running: Running,
    decision: Decision,
    tries: u32,
}

/// What one try came to.
enum Outcome {
    Answered(Tried),
    /// An answer that says somebody else should be asked.
    Refused(Tried, Failure),
    Failed(direct::Error),
}

/// The belief that a worker computes a prompt, and so holds its blocks. Taken back when dropped, unless
/// the worker has begun to answer.
struct Belief<'a> {
    predicted: &'a Predicted,
    worker: WorkerId,
    blocks: &'a [Block],
    held_before: usize,
}

impl<'a> Belief<'a> {
    fn new(predicted: &'a Predicted, now: Instant, worker: &Worker, blocks: &'a [Block]) -> Self {
        let held_before = match blocks {
            [] => 0,
            _ => {
                let capacity_tokens = worker.cache_tokens.load(Relaxed);
                predicted.record(now, worker.id, capacity_tokens, blocks)
            }
        };
        Self {
            predicted,
            worker: worker.id,
            blocks,
            held_before,
        }
    }

    fn confirm(mut self) {
        self.held_before = self.blocks.len();
    }
}

impl Drop for Belief<'_> {
    fn drop(&mut self) {
        if self.held_before < self.blocks.len() {
            self.predicted
                .retract(self.worker, self.blocks, self.held_before);
        }
    }
}

impl Relay {
    /// Carries a request and returns an engine's answer, whatever its status.
    pub async fn run(&self, job: &Job<'_>, mut peek: Peek<'_>) -> Result<Response<Body>, Error> {
        let mut plan = self
            .plan(job.api, job.headers, &mut peek, &job.body)
            .await?;
        plan.request.ticket = plan.model.take_ticket();
        if plan.model.routing.ask_reports {
            plan.report = Report::new(&job.body, peek.vllm_xargs);
        }
        drop(peek);
        let counted = Counted::new(plan.model.clone(), job.api, job.begun);
        self.budget.on_request();
        let deadline = job.begun + Duration::from_millis(self.settings.request_timeout_ms);
        let mut attempts = Attempts::new(&self.settings);
        let mut excluded = Excluded::new();
        // An engine's own refusal, for the client if nobody does better.
        let mut refused = None;
        let mut last = String::new();
        loop {
            let now = observe::now();
            let may_repeat = attempts.may_try_again_where_it_failed();
            let Some((decision, worker)) = self.choose(&plan, now, &excluded, may_repeat) else {
                break;
            };
            attempts.begin();
            let outcome = self.attempt(job, &plan, decision, &worker, attempts.tries(), deadline);
            let failure = match outcome.await {
                Outcome::Answered(tried) => {
                    // How it ends is judged then; a beginning is enough for a worker on trial.
                    let is_good = !tried.answer.is_failure();
                    if !is_good || worker.breaker.state() != breaker::State::Closed {
                        plan.model.judge(&worker, is_good);
                    }
                    return Ok(self.pass_on(job, &plan, tried, counted, deadline));
                }
                Outcome::Refused(tried, failure) => {
                    last = format!("{} answered {}", worker.name, tried.answer.head.status);
                    // 503 is a busy worker; what stands before an engine answers 502 and 504 for a dead one.
                    if tried.answer.is_failure() && !excluded.contains(&worker.id) {
                        plan.model.judge(&worker, false);
                    }
                    refused = Some(tried);
                    failure
                }
                Outcome::Failed(error) => {
                    last = format!("{}: {error}", worker.name);
                    // A worker that is tried again fails the same request, not another one.
                    if !excluded.contains(&worker.id) {
                        plan.model.judge(&worker, false);
                    }
                    error.failure()
                }
            };
            excluded.push(worker.id);
            // The fleet may be another one by now.
            self.renew(&mut plan);
            match attempts.on_failure(failure, fastrand::f64()) {
                Step::Retry { after }
                    if self.may_retry(failure) && observe::now() + after < deadline =>
                {
                    debug!(id = %job.id, last, ?after, "trying again");
                    tokio::time::sleep(after).await;
                }
                Step::Retry { .. } | Step::GiveUp => break,
            }
        }
        if let Some(refused) = refused {
            return Ok(self.pass_on(job, &plan, refused, counted, deadline));
        }
        let error = match attempts.tries() {
            0 => Error::NoWorker {
                model: plan.group.model.to_string(),
                retry_after: NO_WORKER_RETRY_AFTER,
            },
            tries if attempts.has_timed_out() => Error::TimedOut { tries },
            tries => Error::Unreachable { tries, last },
        };
        let client_id = job.headers.get("x-request-id");
        warn!(id = %job.id, ?client_id, %error, "request failed");
        counted.fail();
        Err(error)
    }

    /// One try. It counts at once, for the next decision to see, and is taken back if it fails.
    async fn attempt(
        &self,
        job: &Job<'_>,
        plan: &Plan,
        decision: Decision,
        worker: &Arc<Worker>,
        tries: u32,
        deadline: Instant,
    ) -> Outcome {
        let now = observe::now();
        let request = &plan.request;
        plan.model.on_decision(&plan.prompt.blocks, &decision);
        debug!(
            id = %job.id,
            worker = %worker.name,
            reason = decision.reason.as_str(),
            cost = decision.cost,
            cached_tokens = decision.cached_tokens,
            prompt_tokens = request.prompt_tokens,
            "chosen"
        );
        let belief = Belief::new(&self.caches.predicted, now, worker, &plan.prompt.blocks);
        let in_flight = InFlight::new(
            worker.clone(),
            request.prompt_tokens,
            request.prompt_tokens.saturating_sub(decision.new_tokens),
        );
        let report = plan.asks(&self.caches.board, worker);
        let running = Running::new(
            in_flight,
            plan.expect(&self.caches.expected, worker),
            plan.check(&self.caches.parity, now, worker),
            report.map(|_| self.caches.board.ask(worker.id)),
        );
        let limit = self.try_limit(plan, now).min(deadline);
        let timer = Box::pin(tokio::time::sleep_until(limit.into()));
        let body = plan.body.as_ref().unwrap_or(&job.body);
        let sent = match report {
            None => direct::attempt(job, body, worker, timer).await,
            Some(report) => {
                self.attempt_asking(job, body, plan, report, worker, timer)
                    .await
            }
        };
        let outcome = match sent {
            Ok(answer) => {
                if answer.head.status.is_success() {
                    belief.confirm();
                }
                let refusal = self.refusal(&answer);
                let tried = Tried {
                    answer,
                    running,
                    decision,
                    tries,
                };
                match refusal {
                    None => return Outcome::Answered(tried),
                    Some(failure) => Outcome::Refused(tried, failure),
                }
            }
            Err(error) => Outcome::Failed(error),
        };
        if let Outcome::Refused(
            _,
            Failure::Refused {
                retry_after: Some(pause),
            },
        ) = outcome
        {
            worker.breaker.hold(observe::now() + pause.min(HOLD_MAX));
        }
        outcome
    }

    /// One try that asks the engine to tell again what it holds. An engine that refuses that gets the
    /// client's own request, and is not asked again.
    async fn attempt_asking(
        &self,
        job: &Job<'_>,
        body: &Bytes,
        plan: &Plan,
        report: &Report,
        worker: &Arc<Worker>,
        timer: Pin<Box<Sleep>>,
    ) -> Result<direct::Answer, direct::Error> {
        let count = |outcome| {
            let labels = [&*plan.group.model, outcome];
            self.metrics.reports.with_label_values(&labels).inc();
        };
        let asking = report.put_into(body);
        let answer = direct::attempt(job, &asking, worker, timer).await?;
        if !report::may_be_refused(answer.head.status) {
            count("asked");
            return Ok(answer);
        }
        let plain = direct::attempt(job, body, worker, answer.timer).await?;
        // Else it is the client's own that is refused.
        if plain.head.status.is_success() {
            count("refused");
            worker.refuses_reports.store(true, Relaxed);
            warn!(worker = %worker.name, "does not take requests for reports of cached blocks");
        }
        Ok(plain)
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

    fn pass_on(
        &self,
        job: &Job<'_>,
        plan: &Plan,
        tried: Tried,
        counted: Counted,
        deadline: Instant,
    ) -> Response<Body> {
        let Tried {
            answer,
            mut running,
            decision,
            tries,
        } = tried;
        if !answer.head.status.is_success() {
            running.on_refusal();
        }
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
                running.worker().name,
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
        let meter = meter::Meter::new(counted, status, running, is_events);
        response.map(|()| {
            stream::relay(
                body, first, timer, limits, job.api, status, is_events, meter, job.id,
            )
        })
    }
}
