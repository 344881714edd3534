//! The life of a request: plan, choose, attempt, retry, respond.

use std::sync::Arc;

use hyper::Response;
use tracing::{debug, field, warn};

use super::choice::{Choice, FailedWorkers};
use super::core::Relay;
use super::job::{Error, Job};
use super::kv_report_request::KvReportRequest;
use super::metrics::Outcome;
use super::outcome::{AttemptOutcome, FailedAttempt, FailureOwner, Stage};
use super::plan::{NO_WORKER_RETRY_AFTER, Plan};
use super::request_count::RequestCount;
use super::retries::{Attempts, Failure, Step};
use crate::fleet::Worker;
use crate::http::Body;
use crate::http::circuit_breaker::State;
use crate::observe;
use crate::prompt::PeekedBody;

impl Relay {
    /// Sends a request to an engine and returns the engine's answer, whatever its status.
    pub async fn run(
        &self,
        job: &Job<'_>,
        mut peek: PeekedBody<'_>,
    ) -> Result<Response<Body>, Error> {
        let mut plan = self
            .plan(job.api, job.headers, &mut peek, &job.body)
            .await?;
        plan.request.ticket = plan.model.take_ticket();
        if plan.model.routing.advanced.request_cache_reports {
            plan.report = KvReportRequest::new(&job.body, peek.vllm_xargs);
        }
        drop(peek);
        let count = RequestCount::new(plan.model.clone(), job.api, job.begun);
        self.budget.on_request();
        let deadline = job.begun + self.settings.request_timeout;
        let mut attempts = Attempts::new(&self.settings);
        let mut failed = FailedWorkers::default();
        // A retryable answer, for the client if no other attempt does better.
        let mut refused = None;
        let mut last_error = String::new();
        let mut last_worker = None;
        let mut lacks_prefill = false;
        loop {
            let now = observe::now();
            let may_repeat = attempts.may_repeat_worker();
            let Some(choice) = self.choose(&plan, now, &failed, may_repeat) else {
                break;
            };
            if self.lacks_prefill_worker(&choice) {
                lacks_prefill = true;
                break;
            }
            attempts.begin();
            let number = attempts.count();
            let outcome = match &choice.prefill {
                // Boxed, so that other requests do not carry the state of two legs.
                Some(Ok(prefill)) => {
                    let attempt =
                        self.attempt_disaggregated(job, &plan, &choice, prefill, number, deadline);
                    Box::pin(attempt).await
                }
                None | Some(Err(_)) => self.attempt(job, &plan, &choice, number, deadline).await,
            };
            let attempt = match outcome {
                AttemptOutcome::Answered(answer) => {
                    // A closed circuit breaker learns the result when the answer ends; for a trial request the
                    // beginning of an answer is enough.
                    let worker = answer.running.worker();
                    let is_success = !answer.answer.is_failure();
                    if !is_success || worker.breaker.state() != State::Closed {
                        plan.model.report_to_breaker(worker, is_success);
                    }
                    return Ok(self.respond(job, &plan, answer, count, deadline));
                }
                AttemptOutcome::Failed(attempt) => attempt,
            };
            let FailedAttempt {
                stage,
                failure,
                error,
                answer,
                owner,
            } = attempt;
            last_error = error;
            // An error status of the decode engine: it had the KV blocks or tried to fetch them, so another
            // prefill leg would most likely end the same.
            let is_decode_error = stage == Stage::Transfer && answer.is_some();
            refused = answer.or(refused);
            self.on_failed_attempt(&plan, &choice, stage, owner, &mut failed);
            let failed_worker = choice.worker_at(stage);
            last_worker = Some(failed_worker.name.clone());
            // The fleet may have changed meanwhile.
            self.renew(&mut plan);
            let step = attempts.on_failure(failure, fastrand::f64());
            match step {
                _ if is_decode_error
                    && observe::now() < deadline
                    && self.give_up_transfers(&mut failed) =>
                {
                    debug!(id = %job.id, error = last_error, "attempt failed; trying without a KV transfer");
                }
                Step::Retry { after }
                    if self.may_retry(&plan, failed_worker, failure)
                        && observe::now() + after < deadline =>
                {
                    debug!(id = %job.id, error = last_error, ?after, "attempt failed; retrying");
                    tokio::time::sleep(after).await;
                }
                // Costs no more than without a prefill worker, so it is not counted as a retry.
                _ if stage != Stage::Worker
                    && self.give_up_transfers(&mut failed)
                    && observe::now() < deadline =>
                {
                    debug!(id = %job.id, error = last_error, "attempt failed; trying without a KV transfer");
                }
                Step::Retry { .. } | Step::GiveUp => break,
            }
        }
        if let Some(refused) = refused {
            return Ok(self.respond(job, &plan, refused, count, deadline));
        }
        let error = failure_of(&plan, &attempts, lacks_prefill, last_error);
        if let Some(summary) = &job.summary {
            summary.update(|it| {
                it.model = Some(plan.group.model.clone());
                it.worker = last_worker;
                it.attempts += attempts.count();
                it.outcome = Some(Outcome::WorkerFailed.as_str());
            });
        }
        // Absent from the line if the client sent none.
        let client_id = job.headers.get("x-request-id").map(field::debug);
        warn!(id = %job.id, client_id, %error, "request failed");
        count.fail();
        Err(error)
    }

    /// Excludes the workers that failed from further attempts, and reports the failure to its circuit breaker.
    fn on_failed_attempt(
        &self,
        plan: &Plan,
        choice: &Choice,
        stage: Stage,
        owner: FailureOwner,
        failed: &mut FailedWorkers,
    ) {
        // A worker that is tried again fails the same request, not another one: it counts once.
        if stage != Stage::Prefill {
            let worker = &choice.worker;
            if owner == FailureOwner::Worker && !failed.decode.contains(&worker.id) {
                plan.model.report_to_breaker(worker, false);
            }
            failed.decode.push(worker.id);
        }
        if let Some(Ok(prefill)) = &choice.prefill
            && stage != Stage::Worker
        {
            let worker = &prefill.worker;
            let is_new = !failed.prefill.contains(&worker.id);
            if is_new && owner == FailureOwner::Worker {
                plan.model.report_to_breaker(worker, false);
            }
            if is_new
                && owner == FailureOwner::KvTransfer
                && worker.kv_transfer_breaker.on_failure(observe::now())
            {
                warn!(
                    worker = %worker.name,
                    "KV transfers from this worker fail; its KV transfer circuit breaker is open and it gets no prefill legs"
                );
            }
            failed.prefill.push(worker.id);
        }
    }

    fn may_retry(&self, plan: &Plan, failed: &Worker, failure: Failure) -> bool {
        let may_retry = self.budget.may_retry();
        match may_retry {
            true => plan.model.families.on_retry(&failed.name, failure),
            false => self.metrics.retries_refused.inc(),
        }
        may_retry
    }
}

impl Choice {
    /// The worker that an attempt failed at.
    fn worker_at(&self, stage: Stage) -> &Arc<Worker> {
        match &self.prefill {
            Some(Ok(prefill)) if stage == Stage::Prefill => &prefill.worker,
            _ => &self.worker,
        }
    }
}

/// The error of a request that no attempt answered.
fn failure_of(plan: &Plan, attempts: &Attempts, lacks_prefill: bool, last: String) -> Error {
    let model = || plan.group.model.to_string();
    let retry_after = NO_WORKER_RETRY_AFTER;
    match attempts.count() {
        0 if lacks_prefill => Error::NoPrefill {
            model: model(),
            retry_after,
        },
        0 => Error::NoWorker {
            model: model(),
            retry_after,
        },
        attempts_made if attempts.has_timed_out() => Error::TimedOut {
            attempts: attempts_made,
        },
        attempts => Error::Unreachable { attempts, last },
    }
}
