//! The attempts of a request, until a worker answers or none is left: of a new request, and of the rest of a stream whose worker
//! is lost.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{debug, warn};

use super::attempt::outcome::{AttemptAnswer, AttemptOutcome, FailedAttempt, Stage};
use super::choose::choice::Choice;
use super::choose::chosen::Chosen;
use super::choose::failed_workers::FailedWorkers;
use super::core::Relay;
use super::course::{Course, Ended, Next};
use super::failure::cuts::Cut;
use super::failure::failure_owner::FailureOwner;
use super::failure::retries::Failure;
use super::job::{Job, NotConvertible, ToolLoss};
use super::plan::Plan;
use super::queued::{Waits, with_grant};
use super::request_count::RequestCount;
use crate::fleet::Worker;
use crate::http::circuit_breaker::State;
use crate::observe;

/// Others that were cut in the same moment are waited for so long before a request is refused: I/O threads notice it one after
/// the other.
const COMPANY_WAIT: Duration = Duration::from_millis(100);

/// What the attempts of one request have met.
pub(super) struct Tries {
    pub(super) failed: FailedWorkers,
    pub(super) course: Course,
    /// A retryable answer, for the client if no other attempt does better.
    pub(super) refused: Option<AttemptAnswer>,
    pub(super) last_error: String,
    pub(super) last_worker: Option<Arc<Worker>>,
}

impl Tries {
    pub(super) fn new(failed: FailedWorkers, course: Course) -> Self {
        Self {
            failed,
            course,
            refused: None,
            last_error: String::new(),
            last_worker: None,
        }
    }
}

/// What a request has that no part of an answer was sent for yet.
pub(super) struct First<'a> {
    /// `None`: it does not wait for room.
    pub(super) waits: Option<&'a mut Waits>,
    pub(super) count: &'a mut RequestCount,
}

/// Why there is no further attempt.
#[derive(Debug)]
pub(super) enum End {
    /// Nothing was sent yet, and another worker is to be looked for, where it may have to wait.
    Again,
    /// Its time is over.
    Late,
    /// No worker that may get it can take it, or it was tried often enough.
    NoWorker,
    /// Its only worker computes no prompts, and no prefill worker is left.
    LacksPrefill,
    /// It can only be sent as a chat completion, and has something that none can have.
    NotConvertible(NotConvertible),
}

impl Relay {
    /// `chosen`: a choice that was made just now. `first`: nothing of the answer has been sent yet.
    pub(super) async fn attempts(
        &self,
        job: &Job<'_>,
        plan: &mut Plan,
        tries: &mut Tries,
        mut chosen: Option<Chosen>,
        mut first: Option<First<'_>>,
    ) -> Result<AttemptAnswer, End> {
        loop {
            let now = observe::now();
            let waits = first.as_mut().and_then(|first| first.waits.as_deref_mut());
            let is_unsent = tries.course.count() == 0;
            let next = self.next_choice(job, plan, now, tries, chosen.take());
            let (choice, converted) = match next {
                Ok(next) => next,
                Err(End::Again) if is_unsent && waits.is_some() => return Err(End::Again),
                Err(End::Again) => continue,
                Err(End::NoWorker) => {
                    let count = tries.course.count();
                    if waits.is_some_and(|waits| waits.goes_on(count)) {
                        self.renew(plan);
                        return Err(End::Again);
                    }
                    return Err(End::NoWorker);
                }
                Err(end) => return Err(end),
            };
            let sent = converted.as_deref().unwrap_or(job);
            tries.course.begin();
            let grant = waits.and_then(Waits::take_grant);
            if let Some(first) = &mut first {
                self.sample_decision(job, plan, &choice, (now, tries.course.count()));
                first.count.on_sent();
            }
            let Tries { failed, course, .. } = &*tries;
            let (attempts, deadline) = (course.attempts(), course.deadline());
            let carried = job.gateway.map(|gateway| {
                self.chooser()
                    .carried_to(gateway, plan, &choice, now, failed)
            });
            let carried = carried.as_ref();
            // A gateway gets both workers at once.
            let prefill = choice.split.prefill().filter(|_| carried.is_none());
            let outcome = match prefill {
                Some(prefill) => {
                    // Boxed, so that other requests do not carry the state of two legs.
                    let mut attempt =
                        Box::pin(self.attempt_disaggregated(
                            sent, plan, &choice, prefill, attempts, deadline,
                        ));
                    let attempt = pin!(with_grant(grant, attempt.as_mut()));
                    self.or_released(attempt, sent, plan, &choice, attempts, failed)
                        .await
                }
                None => {
                    let attempt =
                        pin!(self.attempt(sent, plan, &choice, attempts, deadline, carried));
                    let attempt = pin!(with_grant(grant, attempt));
                    self.or_released(attempt, sent, plan, &choice, attempts, failed)
                        .await
                }
            };
            let attempt = match outcome {
                AttemptOutcome::Answered(answer) => {
                    self.on_answer(job, plan, &answer);
                    return Ok(answer);
                }
                AttemptOutcome::Failed(attempt) => attempt,
            };
            if !self.goes_on(job, plan, &choice, attempt, tries, now).await {
                return Err(End::NoWorker);
            }
        }
    }

    /// The workers of the next attempt, and the request in their form if that is not its own.
    fn next_choice<'a>(
        &self,
        job: &Job<'a>,
        plan: &Plan,
        now: Instant,
        tries: &mut Tries,
        chosen: Option<Chosen>,
    ) -> Result<(Choice, Option<Box<Job<'a>>>), End> {
        let Tries { failed, course, .. } = tries;
        if course.is_late(now) {
            return Err(End::Late);
        }
        let may_repeat = course.attempts().may_repeat_worker();
        if let Some(owed) = course.take_owed() {
            // A retry that no worker can take must not use up the budget of others.
            if !self.chooser().has_choice(plan, now, failed, may_repeat) {
                return Err(End::NoWorker);
            }
            if !owed.is_off_budget && !self.budget().may_retry() {
                self.metrics().retries_refused.inc();
                return Err(End::NoWorker);
            }
            plan.model.families.on_retry(&owed.worker, owed.failure);
        }
        let choice = self.chooser().choose(plan, now, failed, may_repeat, chosen);
        let choice = choice.ok_or(End::NoWorker)?;
        if let Some(gateway) = job.gateway
            && !gateway.may_reach(&choice.worker)
        {
            // It joined after the request was planned.
            failed.unfit.push(choice.worker.id);
            failed.decode.push(choice.worker.id);
            return Err(End::Again);
        }
        let mut converted = self.converted(job, plan, &choice, plan.tool_loss());
        if converted.is_err() && plan.tool_loss() == ToolLoss::Refused {
            let mut others = failed.clone();
            others.exclude_chat(&plan.group);
            if self.chooser().has_choice(plan, now, &others, false) {
                *failed = others;
                return Err(End::Again);
            }
            // No worker with the Responses API can be had now.
            converted = self.converted(job, plan, &choice, ToolLoss::AsConfigured);
        }
        let converted = converted.map_err(End::NotConvertible)?;
        if self.chooser().lacks_prefill_worker(&choice) {
            return Err(End::LacksPrefill);
        }
        Ok((choice, converted))
    }

    /// A closed circuit breaker learns the result when the answer ends; for a trial request the beginning of an answer is enough.
    fn on_answer(&self, job: &Job<'_>, plan: &Plan, answer: &AttemptAnswer) {
        let worker = answer.running.worker();
        if answer.answer.is_failure() {
            let (owner, status) = (answer.answer.owner(), answer.answer.head.status);
            let model = &plan.model;
            model.report_failure(worker, job.context.client, owner, status.as_str());
        } else if worker.breaker.state() != State::Closed {
            plan.model.report_success(worker, job.context.client);
        }
        self.quarantine().on_answer(job.original);
    }

    /// Takes note of a failed attempt, and waits for the time of the next. False if there is none.
    async fn goes_on(
        &self,
        job: &Job<'_>,
        plan: &mut Plan,
        choice: &Choice,
        attempt: FailedAttempt,
        tries: &mut Tries,
        sent_at: Instant,
    ) -> bool {
        self.on_failed_attempt(job, plan, choice, &attempt, &mut tries.failed);
        if attempt.failure == Failure::TooLong {
            let shorter = plan.group.context_lengths.shorter();
            tries.failed.exclude_all(shorter);
        }
        if attempt.is_rank_refused {
            plan.pinned = None;
            plan.rank_refused_by = Some(choice.worker.id);
        }
        let worker = choice.worker_at(attempt.stage);
        if attempt.is_cut {
            let now = observe::now();
            let cut = Cut::at(worker, (now, sent_at), job.context.client, job.original);
            let waits_for_others = tries.course.on_cut(&cut);
            // Now, since the client may leave before the next attempt. An answer takes it back.
            self.quarantine()
                .on_cuts(now, job.original, tries.course.cuts());
            if waits_for_others {
                tokio::time::sleep(COMPANY_WAIT).await;
            }
        }
        let ended = Ended {
            stage: attempt.stage,
            failure: attempt.failure,
            is_stale: attempt.is_stale(),
            is_answered: attempt.answer.is_some(),
            worker: &worker.name,
        };
        let may_give_up = self.chooser().may_give_up_transfers(&tries.failed);
        let next = tries
            .course
            .on_failed(observe::now(), &ended, may_give_up, fastrand::f64());
        tries.last_worker = Some(worker.clone());
        tries.last_error = attempt.error;
        tries.refused = attempt.answer.or(tries.refused.take());
        // The fleet may have changed meanwhile.
        self.renew(plan);
        let error = &*tries.last_error;
        match next {
            Next::WithoutTransfers => {
                debug!(id = %job.context.id, error, "attempt failed; trying without a KV transfer");
                tries.failed.gave_up_transfers = true;
                true
            }
            Next::Retry { after } => {
                debug!(id = %job.context.id, error, ?after, "attempt failed; retrying");
                tokio::time::sleep(after).await;
                true
            }
            Next::Stop => false,
        }
    }

    /// Excludes the workers that failed from further attempts, and reports the failure.
    pub(super) fn on_failed_attempt(
        &self,
        job: &Job<'_>,
        plan: &Plan,
        choice: &Choice,
        attempt: &FailedAttempt,
        failed: &mut FailedWorkers,
    ) {
        let FailedAttempt { stage, owner, .. } = *attempt;
        let report = |worker: &Worker| {
            plan.model
                .report_failure(worker, job.context.client, owner, &attempt.error);
        };
        if attempt.failure == Failure::Local {
            // Idle connections make room. No worker has failed.
            report(choice.worker_at(stage));
            for status in &self.fleet().snapshot().workers {
                status.worker.pool.close_idle();
            }
            return;
        }
        let at = choice.worker_at(stage).id;
        let was_stale = failed.stale.contains(&at);
        failed.stale.retain(|id| *id != at);
        // A worker that is tried again fails the same request, not another one: it counts once.
        if stage != Stage::Prefill {
            let worker = &choice.worker;
            let is_new = was_stale || !failed.decode.contains(&worker.id);
            if stage == Stage::Worker && is_new {
                report(worker);
            }
            failed.decode.push(worker.id);
        }
        if attempt.is_stale() {
            failed.stale.push(at);
        }
        if let Some(prefill) = choice.split.prefill()
            && stage != Stage::Worker
        {
            let worker = &prefill.worker;
            let is_new = !failed.prefill.contains(&worker.id);
            if is_new {
                report(worker);
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
}

impl Choice {
    /// The worker that an attempt failed at.
    fn worker_at(&self, stage: Stage) -> &Arc<Worker> {
        match self.split.prefill() {
            Some(prefill) if stage == Stage::Prefill => &prefill.worker,
            _ => &self.worker,
        }
    }
}
