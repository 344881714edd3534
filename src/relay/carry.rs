//! One request's way: choose, try, try again, and pass on the answer.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::Response;
use hyper::header::{self, HeaderValue};
use tokio::time::Sleep;
use tracing::{debug, warn};

use super::attempt::{Attempts, Failure, Step};
use super::choice::{Choice, Failed, Unsplit};
use super::direct::{self, Part};
use super::metrics::Outcome as RequestOutcome;
use super::plan::{Excluded, NO_WORKER_RETRY_AFTER, Plan};
use super::report::{self, Report};
use super::request_count::RequestCount;
use super::running::{Belief, Running};
use super::usage::TrueUsage;
use super::{DECISION, Error, Job, Relay, ServedBy, headers, meter, stream};
use crate::fleet::Worker;
use crate::fleet::load::InFlight;
use crate::http::Body;
use crate::http::circuit_breaker::State;
use crate::observe;
use crate::prompt::Peek;
use crate::routing::Decision;

/// An engine may ask for a pause, but not take itself out for long.
const HOLD_MAX: Duration = Duration::from_secs(30);

/// An engine's answer, and how it was come by.
pub(super) struct Tried {
    pub(super) answer: direct::Answer,
    pub(super) running: Running,
    pub(super) decision: Decision,
    pub(super) tries: u32,
    /// Over which workers, or why over one. None where requests are never split.
    pub(super) split: Option<Result<Split, Unsplit>>,
}

/// How an answer was come by over two workers.
pub(super) struct Split {
    /// The worker that computed the prompt, and why that one.
    pub(super) prefill: Arc<str>,
    pub(super) decision: Decision,
    /// Tokens of the prompt that it had not to compute, where the answer is the other's.
    pub(super) cached_tokens: Option<u64>,
}

/// What one try came to.
pub(super) enum Outcome {
    Answered(Tried),
    Lost(Lost),
}

/// A try that came to nothing, and nothing of it went to the client.
pub(super) struct Lost {
    pub(super) at: At,
    pub(super) failure: Failure,
    pub(super) last: String,
    /// An answer that says somebody else should be asked: the client's, if nobody does better.
    pub(super) answer: Option<Tried>,
    pub(super) blame: Blame,
}

/// Whose breaker is to know that a try was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blame {
    Nobody,
    /// The worker where it was lost.
    Worker,
    /// That of what the prefill worker computes for others.
    Handoffs,
}

impl Blame {
    fn worker_if(is_its_fault: bool) -> Self {
        match is_its_fault {
            true => Self::Worker,
            false => Self::Nobody,
        }
    }

    /// Of an exchange that failed.
    pub(super) fn of(error: &direct::Error) -> Self {
        Self::worker_if(!error.is_stale())
    }
}

/// Where a try was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum At {
    /// The worker that was to answer.
    Worker,
    /// The one that was to compute its prompt.
    Prefill,
    /// On the way from one to the other.
    Between,
}

impl Lost {
    pub(super) fn refused(at: At, failure: Failure, answer: Tried) -> Self {
        let name = &answer.running.worker().name;
        Self {
            at,
            failure,
            last: format!("{name} answered {}", answer.answer.head.status),
            // 503 is a busy worker; what stands before an engine answers 502 and 504 for a dead one.
            blame: Blame::worker_if(answer.answer.is_failure()),
            answer: Some(answer),
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
        let count = RequestCount::new(plan.model.clone(), job.api, job.begun);
        self.budget.on_request();
        let deadline = job.begun + Duration::from_millis(self.settings.request_timeout_ms);
        let mut attempts = Attempts::new(&self.settings);
        let mut failed = Failed::default();
        // An engine's own refusal, for the client if nobody does better.
        let mut refused = None;
        let mut last = String::new();
        let mut failed_worker = None;
        let mut lacks_prefill = false;
        loop {
            let now = observe::now();
            let may_repeat = attempts.may_try_again_where_it_failed();
            let Some(choice) = self.choose(&plan, now, &failed, may_repeat) else {
                break;
            };
            if self.must_be_split(&choice) {
                lacks_prefill = true;
                break;
            }
            attempts.begin();
            let tries = attempts.tries();
            let outcome = match &choice.prefill {
                // Apart, so that requests that are not split do not carry its state about.
                Some(Ok(prefill)) => {
                    Box::pin(self.attempt_split(job, &plan, &choice, prefill, tries, deadline))
                        .await
                }
                None | Some(Err(_)) => self.attempt(job, &plan, &choice, tries, deadline).await,
            };
            let lost = match outcome {
                Outcome::Answered(tried) => {
                    // How it ends is judged then; a beginning is enough for a worker on trial.
                    let worker = tried.running.worker();
                    let is_good = !tried.answer.is_failure();
                    if !is_good || worker.breaker.state() != State::Closed {
                        plan.model.report_to_breaker(worker, is_good);
                    }
                    return Ok(self.pass_on(job, &plan, tried, count, deadline));
                }
                Outcome::Lost(lost) => lost,
            };
            last = lost.last;
            let at = lost.at;
            failed_worker = Some(choice.worker.name.clone());
            // A decode engine that answers an error has had the blocks, or has tried to: another prefill leg
            // would most likely come to the same.
            let is_answered = lost.at == At::Between && lost.answer.is_some();
            refused = lost.answer.or(refused);
            self.on_lost(&plan, &choice, lost.at, lost.blame, &mut failed);
            // The fleet may be another one by now.
            self.renew(&mut plan);
            let step = attempts.on_failure(lost.failure, fastrand::f64());
            match step {
                _ if is_answered
                    && observe::now() < deadline
                    && self.gives_up_handoffs(&mut failed) =>
                {
                    debug!(id = %job.id, last, "going on without a handoff");
                }
                Step::Retry { after }
                    if self.may_retry(&plan, &choice, at, lost.failure)
                        && observe::now() + after < deadline =>
                {
                    debug!(id = %job.id, last, ?after, "trying again");
                    tokio::time::sleep(after).await;
                }
                // No more than it would have cost without a prefill worker, so it is no retry.
                _ if lost.at != At::Worker
                    && self.gives_up_handoffs(&mut failed)
                    && observe::now() < deadline =>
                {
                    debug!(id = %job.id, last, "going on without a handoff");
                }
                Step::Retry { .. } | Step::GiveUp => break,
            }
        }
        if let Some(refused) = refused {
            return Ok(self.pass_on(job, &plan, refused, count, deadline));
        }
        let error = match attempts.tries() {
            0 if lacks_prefill => Error::NoPrefill {
                model: plan.group.model.to_string(),
                retry_after: NO_WORKER_RETRY_AFTER,
            },
            0 => Error::NoWorker {
                model: plan.group.model.to_string(),
                retry_after: NO_WORKER_RETRY_AFTER,
            },
            tries if attempts.has_timed_out() => Error::TimedOut { tries },
            tries => Error::Unreachable { tries, last },
        };
        if let Some(summary) = &job.summary {
            summary.update(|it| {
                it.model = Some(plan.group.model.clone());
                it.worker = failed_worker;
                it.attempts += attempts.tries();
                it.outcome = Some(RequestOutcome::WorkerFailed.as_str());
            });
        }
        let client_id = job.headers.get("x-request-id");
        warn!(id = %job.id, ?client_id, %error, "request failed");
        count.fail();
        Err(error)
    }

    /// Who is not to be asked again for this request, and whose breaker is to know.
    fn on_lost(&self, plan: &Plan, choice: &Choice, at: At, blame: Blame, failed: &mut Failed) {
        let prefill = match &choice.prefill {
            Some(Ok(prefill)) => Some(&prefill.worker),
            _ => None,
        };
        let is_new = |known: &Excluded, worker: &Worker| !known.contains(&worker.id);
        if at != At::Prefill {
            // A worker that is tried again fails the same request, not another one.
            if blame == Blame::Worker && is_new(&failed.whole, &choice.worker) {
                plan.model.report_to_breaker(&choice.worker, false);
            }
            failed.whole.push(choice.worker.id);
        }
        if let Some(worker) = prefill
            && at != At::Worker
        {
            let is_new = is_new(&failed.prefill, worker);
            if is_new && blame == Blame::Worker {
                plan.model.report_to_breaker(worker, false);
            }
            if is_new
                && blame == Blame::Handoffs
                && worker.kv_transfer_breaker.on_failure(observe::now())
            {
                warn!(worker = %worker.name, "its handoffs fail; it gets no prompts for a while");
            }
            failed.prefill.push(worker.id);
        }
    }

    /// One try. It counts at once, for the next decision to see, and is taken back if it fails.
    async fn attempt(
        &self,
        job: &Job<'_>,
        plan: &Plan,
        choice: &Choice,
        tries: u32,
        deadline: Instant,
    ) -> Outcome {
        let now = observe::now();
        let request = &plan.request;
        let (decision, worker) = (choice.decision, &choice.worker);
        plan.model.on_decision(request.prompt_tokens, &decision);
        if let (Some(of_model), Some(Err(why))) = (&plan.model.split, &choice.prefill) {
            of_model.on_whole(why.as_str());
        }
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
            plan.expect(&self.caches.unconfirmed, worker),
            plan.check(&self.caches.parity, now, worker),
            report.map(|_| self.caches.board.ask(worker.id)),
        );
        let limit = self.try_limit(plan, now).min(deadline);
        let timer = Box::pin(tokio::time::sleep_until(limit.into()));
        let body = plan.body.as_ref().unwrap_or(&job.body);
        let sent = match report {
            None => direct::attempt(job, body, Part::Whole, worker, timer).await,
            Some(report) => {
                let asking = report.put_into(body);
                self.attempt_asking(job, (&asking, body), Part::Whole, plan, worker, timer)
                    .await
            }
        };
        let answer = match sent {
            Ok(answer) => answer,
            Err(error) => {
                return Outcome::Lost(Lost {
                    at: At::Worker,
                    failure: error.failure(),
                    last: format!("{}: {error}", worker.name),
                    answer: None,
                    blame: Blame::Worker,
                });
            }
        };
        if answer.head.status.is_success() {
            belief.confirm();
        }
        let refusal = self.refusal(worker, &answer);
        let tried = Tried {
            answer,
            running,
            decision,
            tries,
            split: match &choice.prefill {
                Some(Err(why)) => Some(Err(*why)),
                _ => None,
            },
        };
        match refusal {
            None => Outcome::Answered(tried),
            Some(failure) => Outcome::Lost(Lost::refused(At::Worker, failure, tried)),
        }
    }

    /// One try that asks the engine to tell again what it holds. An engine that refuses that gets the
    /// client's own request, and is not asked again.
    pub(super) async fn attempt_asking(
        &self,
        job: &Job<'_>,
        (asking, plain): (&Bytes, &Bytes),
        part: Part,
        plan: &Plan,
        worker: &Arc<Worker>,
        timer: Pin<Box<Sleep>>,
    ) -> Result<direct::Answer, direct::Error> {
        let count = |outcome| {
            let labels = [&*plan.group.model, outcome];
            self.metrics.reports.with_label_values(&labels).inc();
        };
        let answer = direct::attempt(job, asking, part, worker, timer).await?;
        if !report::may_be_refused(answer.head.status) {
            count("asked");
            return Ok(answer);
        }
        let plain = direct::attempt(job, plain, part, worker, answer.timer).await?;
        // Else it is the client's own that is refused.
        if plain.head.status.is_success() {
            count("refused");
            worker.refuses_reports.store(true, Relaxed);
            warn!(worker = %worker.name, "does not take requests for reports of cached blocks");
        }
        Ok(plain)
    }

    pub(super) fn try_limit(&self, plan: &Plan, now: Instant) -> Instant {
        let limit_ms = if plan.is_stream {
            self.settings.first_byte_timeout_ms
        } else {
            self.settings.answer_timeout_ms
        };
        now + Duration::from_millis(limit_ms)
    }

    /// Whether an answer says that another worker should be asked, and this one left alone for a while.
    pub(super) fn refusal(&self, worker: &Worker, answer: &direct::Answer) -> Option<Failure> {
        let statuses = &self.settings.retry_statuses;
        if !statuses.contains(&answer.head.status.as_u16()) {
            return None;
        }
        let retry_after = headers::retry_after(&answer.head.headers);
        if let Some(pause) = retry_after {
            worker.breaker.pause(observe::now() + pause.min(HOLD_MAX));
        }
        Some(Failure::Refused { retry_after })
    }

    fn may_retry(&self, plan: &Plan, choice: &Choice, at: At, failure: Failure) -> bool {
        let allowed = self.budget.may_retry();
        let failed = match &choice.prefill {
            Some(Ok(prefill)) if at == At::Prefill => &prefill.worker,
            _ => &choice.worker,
        };
        match allowed {
            true => plan.model.families.on_retry(&failed.name, failure),
            false => self.metrics.retries_refused.inc(),
        }
        allowed
    }

    fn pass_on(
        &self,
        job: &Job<'_>,
        plan: &Plan,
        tried: Tried,
        count: RequestCount,
        deadline: Instant,
    ) -> Response<Body> {
        let Tried {
            answer,
            mut running,
            decision,
            tries,
            split,
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
        if job.headers.contains_key(DECISION) {
            let mut text = format!(
                "worker={}; reason={}; prompt_tokens={}; cached_tokens={}; cost={:.0}; tries={tries}",
                running.worker().name,
                decision.reason.as_str(),
                plan.request.prompt_tokens,
                decision.cached_tokens,
                decision.cost,
            );
            match &split {
                None => {}
                Some(Err(why)) => text += &format!("; split={}", why.as_str()),
                Some(Ok(split)) => {
                    text += &format!(
                        "; split=yes; prefill={}; prefill_reason={}; prefill_cached_tokens={}; prefill_cost={:.0}",
                        split.prefill,
                        split.decision.reason.as_str(),
                        split.decision.cached_tokens,
                        split.decision.cost,
                    );
                }
            }
            if let Ok(value) = HeaderValue::from_maybe_shared(Bytes::from(text)) {
                response.headers_mut().insert(DECISION, value);
            }
        }
        if let Some(summary) = &job.summary {
            summary.update(|it| {
                it.model = Some(plan.group.model.clone());
                it.worker = Some(running.worker().name.clone());
                it.reason = Some(decision.reason.as_str());
                it.status = Some(head.status);
                it.attempts += tries;
                it.prefill_worker = match &split {
                    Some(Ok(split)) => Some(split.prefill.clone()),
                    _ => None,
                };
            });
        }
        let served_by = ServedBy(running.worker().name.clone());
        response.extensions_mut().insert(served_by);
        let is_events = headers::is_event_stream(response.headers());
        let usage = match split {
            Some(Ok(Split {
                cached_tokens: Some(cached_tokens),
                ..
            })) => {
                // What it says of itself is put right, which may make it longer.
                response.headers_mut().remove(header::CONTENT_LENGTH);
                Some(Box::new(TrueUsage::new(cached_tokens, is_events)))
            }
            _ => None,
        };
        let limits = stream::Limits {
            idle: Duration::from_millis(self.settings.stream_idle_timeout_ms),
            deadline,
        };
        let status = head.status;
        let meter = meter::Meter::new(count, status, running, is_events, job.summary.clone());
        response.map(|()| {
            stream::relay(
                body, first, timer, limits, job.api, status, is_events, meter, usage, job.id,
            )
        })
    }
}
