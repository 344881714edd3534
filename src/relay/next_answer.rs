//! The answer of the next worker, for a stream whose worker is lost: choose, attempt, retry, as for a new request. It
//! owns what the request's first part only borrowed, because the client's body outlives that.

use std::pin::pin;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use hyper::{HeaderMap, Uri};
use tracing::debug;

use super::choice::FailedWorkers;
use super::core::Relay;
use super::cuts::{Cut, Cuts};
use super::headers;
use super::job::Job;
use super::outcome::{AttemptAnswer, AttemptOutcome};
use super::plan::Plan;
use super::retries::{Attempts, Step};
use super::summary::SummaryCell;
use super::traced;
use super::usage_option::UnaskedUsage;
use crate::fleet::Worker;
use crate::http::circuit_breaker::State;
use crate::ids::{ClientKey, RequestId, Tenant};
use crate::limits::ChargeId;
use crate::observe;

/// A request that may be sent to further workers.
pub(super) struct NextAnswer {
    relay: Arc<Relay>,
    plan: Plan,
    failed: FailedWorkers,
    deadline: Instant,
    target: Uri,
    headers: HeaderMap,
    client: ClientKey,
    tenant: Tenant,
    charge: ChargeId,
    id: RequestId,
    started: Instant,
    is_converted: bool,
    summary: Option<SummaryCell>,
}

impl NextAnswer {
    pub(super) fn new(relay: Arc<Relay>, job: &Job<'_>, plan: Plan, deadline: Instant) -> Self {
        // The plan has what its API needs; an error was an error of the first attempt.
        let mut failed = FailedWorkers::unfit_for(&plan, None).unwrap_or_default();
        // The next worker computes prompt and answer itself.
        failed.gave_up_transfers = true;
        Self {
            relay,
            failed,
            deadline,
            target: job.target.clone(),
            headers: job.headers.clone(),
            client: job.client,
            tenant: job.tenant,
            charge: job.charge,
            id: job.id,
            started: job.started,
            is_converted: job.is_converted,
            summary: job.summary.clone(),
            plan: Plan {
                body: None,
                continuation: None,
                resumed: None,
                // Its place in the body is another one now.
                report: None,
                ..plan
            },
        }
    }

    /// Sends `body` to another worker than `lost`, and waits for the beginning of its answer. The answer begins with the
    /// answer's token number `answer_tokens`. An error for the log if no worker answers.
    pub(super) async fn run(
        &mut self,
        body: Bytes,
        lost: Arc<Worker>,
        answer_tokens: u32,
    ) -> Result<AttemptAnswer, String> {
        let relay = self.relay.clone();
        self.failed.exclude_all(std::iter::once(lost.id));
        self.plan.body = Some(body.clone());
        let prompt_tokens = self.plan.request.prompt_tokens;
        self.plan.request.prompt_tokens = prompt_tokens.saturating_add(answer_tokens);
        let answer = self.attempts(&relay, body, (&lost, answer_tokens)).await;
        self.plan.request.prompt_tokens = prompt_tokens;
        answer
    }

    async fn attempts(
        &mut self,
        relay: &Relay,
        body: Bytes,
        (lost, answer_tokens): (&Worker, u32),
    ) -> Result<AttemptAnswer, String> {
        let job = Job {
            api: self.plan.api,
            target: self.target.clone(),
            headers: &self.headers,
            body,
            original: &[],
            client: self.client,
            tenant: self.tenant,
            charge: self.charge,
            standing: None,
            id: self.id,
            started: self.started,
            response: None,
            requested: None,
            unasked_usage: UnaskedUsage::default(),
            progress: None,
            resume: None,
            chat: None,
            is_converted: self.is_converted,
            is_background: false,
            gateway: None,
            summary: self.summary.clone(),
        };
        traced::continued(&job, observe::now(), lost, answer_tokens);
        let (plan, failed) = (&mut self.plan, &mut self.failed);
        let mut attempts = Attempts::new(&relay.settings, Cuts::default());
        loop {
            let now = observe::now();
            if now >= self.deadline {
                return Err("the request took too long".to_owned());
            }
            relay.renew(plan);
            let Some(choice) = relay.choose(plan, now, failed, attempts.may_repeat_worker(), None)
            else {
                return Err("no other worker can take it now".to_owned());
            };
            attempts.begin();
            let outcome = {
                let attempt = relay.attempt(&job, plan, &choice, &attempts, self.deadline, None);
                let attempt = pin!(attempt);
                relay
                    .or_released(attempt, &job, plan, &choice, &attempts, failed)
                    .await
            };
            let attempt = match outcome {
                AttemptOutcome::Failed(attempt) => attempt,
                AttemptOutcome::Answered(answer) => {
                    let (worker, head) = (answer.running.worker(), &answer.answer.head);
                    if answer.answer.is_failure() {
                        let (owner, status) = (answer.answer.owner(), head.status);
                        plan.model
                            .report_failure(worker, job.client, owner, status.as_str());
                    } else if worker.breaker.state() != State::Closed {
                        plan.model.report_success(worker, job.client);
                    }
                    let is_stream = headers::is_event_stream(&head.headers);
                    if head.status.is_success() && is_stream {
                        return Ok(answer);
                    }
                    return Err(format!("{} answered {}", worker.name, head.status));
                }
            };
            relay.on_failed_attempt(&job, plan, &choice, &attempt, failed);
            if attempt.is_cut {
                let times = (observe::now(), now);
                attempts.on_cut(&Cut::at(&choice.worker, times, job.client, &job.body));
            }
            let step = attempts.on_failure(attempt.failure, attempt.is_stale(), fastrand::f64());
            let after = match step {
                Step::Retry { after } if now + after < self.deadline => after,
                Step::Retry { .. } | Step::GiveUp => return Err(attempt.error),
            };
            if !attempt.failure.is_free()
                && !relay.may_retry(plan, &choice.worker.name, attempt.failure)
            {
                return Err(attempt.error);
            }
            debug!(id = %job.id, error = attempt.error, ?after, "attempt to continue a stream failed; retrying");
            tokio::time::sleep(after).await;
        }
    }
}
