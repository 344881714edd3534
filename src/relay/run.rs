//! The attempts of a request, until a worker answers or none is left: of a new request, and of the rest of a stream whose worker
//! is lost. Does what [`Course`] says, and decides nothing itself.

use std::pin::pin;
use std::sync::Arc;
use std::time::Instant;

use hyper::StatusCode;
use tracing::{debug, warn};

use super::attempt::outcome::{AttemptAnswer, AttemptOutcome, FailedAttempt};
use super::choose::chosen::{Choice, Chosen};
use super::core::Relay;
use super::course::{Course, Ended, Retry, Step, Unanswered};
use super::failure::cuts::Cut;
use super::failure::failure_owner::FailureOwner;
use super::failure::fault::Fault;
use super::failure::types::{Failure, Stage};
use super::job::{Job, ToolLoss};
use super::plan::Plan;
use super::queued::{Waits, with_grant};
use super::request_count::RequestCount;
use super::wait::Grant;
use crate::fleet::Worker;
use crate::http::circuit_breaker::State;
use crate::observe;

/// What a request has that no part of an answer was sent for yet.
pub(super) struct First<'a> {
    /// `None`: it does not wait for room.
    pub(super) waits: Option<&'a mut Waits>,
    pub(super) count: &'a mut RequestCount,
}

/// What the last attempt that failed leaves for the client and for the log.
#[derive(Default)]
pub(super) struct LastFailure {
    /// A retryable answer of any attempt, for the client if no other attempt does better.
    pub(super) answer: Option<Box<AttemptAnswer>>,
    pub(super) error: String,
    pub(super) worker: Option<Arc<Worker>>,
}

/// The chosen workers, and the request in their form if that is not its own.
type Next<'a> = (Choice, Option<Box<Job<'a>>>);

impl Relay {
    /// `first`: nothing of the answer has been sent yet.
    pub(super) async fn attempts(
        self: &Arc<Self>,
        job: &Job<'_>,
        plan: &mut Arc<Plan>,
        course: &mut Course,
        last: &mut LastFailure,
        mut first: Option<First<'_>>,
    ) -> Result<Box<AttemptAnswer>, Unanswered> {
        let id = job.context.id;
        let mut chosen = None;
        let mut step = course.next(observe::now());
        loop {
            step = match step {
                Step::FindRoom => {
                    let waits = first.as_mut().and_then(|first| first.waits.as_deref_mut());
                    // One that each worker refuses would wait in vain.
                    let workers = plan.group.workers.iter();
                    let is_in_vain = course.is_refused_by_each(Stage::Worker, workers, |_| false);
                    let waits = waits.filter(|_| !is_in_vain);
                    match self.find_room(job, plan, &course.failed, waits).await {
                        Ok(found) => {
                            chosen = found;
                            course.on_room(observe::now())
                        }
                        Err(error) => Step::Stop(Unanswered::NotQueued(error)),
                    }
                }
                Step::Send { at, retry } => {
                    let chosen = chosen.take();
                    let next = self.next_choice(job, plan, course, &mut first, (at, retry, chosen));
                    let (choice, converted) = match next {
                        Ok(next) => next,
                        Err(other) => {
                            step = other;
                            continue;
                        }
                    };
                    course.on_sent();
                    let grant = self.on_sent(job, plan, &choice, (at, course.count), &mut first);
                    let sent = converted.as_deref().unwrap_or(job);
                    // Pinned where it is made, so that it is not moved.
                    let outcome = pin!(self.send_to(sent, plan, &choice, course, grant, at)).await;
                    match outcome {
                        Ok(answer) => {
                            self.on_answer(job, plan, course, (&choice, at), &answer);
                            return Ok(answer);
                        }
                        Err(attempt) => {
                            self.on_failed(job, plan, (&choice, at), attempt, course, last)
                        }
                    }
                }
                Step::AwaitOthers(wait) => {
                    tokio::time::sleep(wait).await;
                    self.renew(plan);
                    course.on_others(observe::now(), fastrand::f64())
                }
                Step::GiveUpTransfers => {
                    debug!(%id, error = last.error, "attempt failed; trying without a KV transfer");
                    course.next(observe::now())
                }
                Step::Pause(after) => {
                    debug!(%id, error = last.error, ?after, "attempt failed; retrying");
                    tokio::time::sleep(after).await;
                    course.next(observe::now())
                }
                Step::Stop(why) => return Err(why),
            };
        }
    }

    /// The workers of the next attempt; or what comes next without them.
    fn next_choice<'a>(
        &self,
        job: &Job<'a>,
        plan: &mut Arc<Plan>,
        course: &mut Course,
        first: &mut Option<First<'_>>,
        (now, retry, mut chosen): (Instant, Option<Retry>, Option<Chosen>),
    ) -> Result<Next<'a>, Step> {
        let may_repeat = course.may_repeat_worker();
        let (chooser, failed) = (self.chooser(), &course.failed);
        if let Some(retry) = retry {
            if chosen.is_none() {
                chosen = chooser.find_first(plan, now, failed, may_repeat);
            }
            // A retry that no worker can take must not use up the budget of others.
            let Some(found) = &chosen else {
                return Err(course.on_no_worker(false));
            };
            if chooser.lacks_prefill_worker(&plan.group, found) {
                return Err(Step::Stop(Unanswered::LacksPrefill));
            }
            if !self.may_retry(plan, &retry) {
                return Err(course.on_no_worker(false));
            }
        }
        let Some(choice) = chooser.choose(plan, now, failed, may_repeat, chosen) else {
            let waits = first.as_mut().and_then(|first| first.waits.as_deref_mut());
            let waits_again = waits.is_some_and(|waits| waits.goes_on(course.count));
            if waits_again {
                self.renew(plan);
            }
            return Err(course.on_no_worker(waits_again));
        };
        if let Some(gateway) = job.gateway
            && !gateway.may_reach(&choice.worker)
        {
            // It joined after the request was planned.
            course.failed.unfit.push(choice.worker.id);
            course.failed.decode.push(choice.worker.id);
            return Err(course.next(observe::now()));
        }
        let mut converted = self.converted(job, plan, &choice, plan.tool_loss());
        if converted.is_err() && plan.tool_loss() == ToolLoss::Refused {
            let mut others = failed.clone();
            others.exclude_chat(&plan.group);
            if chooser.find_first(plan, now, &others, false).is_some() {
                course.failed = others;
                return Err(course.next(observe::now()));
            }
            // No worker with the Responses API can be had now.
            converted = self.converted(job, plan, &choice, ToolLoss::AsConfigured);
        }
        let converted = converted.map_err(|what| Step::Stop(Unanswered::NotConvertible(what)))?;
        let role = choice.worker.role;
        let reason = choice.split.why_whole();
        if reason.is_some_and(|reason| chooser.lacks_prefill(role, reason)) {
            return Err(Step::Stop(Unanswered::LacksPrefill));
        }
        Ok((choice, converted))
    }

    /// Counts a retry, if the budget allows it.
    fn may_retry(&self, plan: &Plan, retry: &Retry) -> bool {
        if !retry.is_off_budget && !self.budget.may_retry() {
            self.metrics.retries_refused.inc();
            return false;
        }
        plan.model.families.on_retry(&retry.worker, retry.failure);
        true
    }

    /// A request is sent for the `attempt`th time. Returns the room that it was granted, if it has waited for it.
    fn on_sent(
        &self,
        job: &Job<'_>,
        plan: &Plan,
        choice: &Choice,
        (now, attempt): (Instant, u32),
        first: &mut Option<First<'_>>,
    ) -> Option<Box<Grant>> {
        let First { waits, count } = first.as_mut()?;
        self.sample_decision(job, plan, choice, (now, attempt), waits.as_deref());
        count.on_sent();
        waits.as_deref_mut()?.grant.take()
    }

    /// One attempt, which ends with an answer, with a failure, or because one of its workers is taken out.
    async fn send_to(
        &self,
        job: &Job<'_>,
        plan: &Plan,
        choice: &Choice,
        course: &Course,
        grant: Option<Box<Grant>>,
        now: Instant,
    ) -> AttemptOutcome {
        let carried = job.gateway.map(|gateway| {
            let (chooser, failed) = (self.chooser(), &course.failed);
            // Boxed, so that other requests do not carry its place.
            Box::new(chooser.carried_to(gateway, plan, choice, now, failed))
        });
        let carried = carried.as_deref();
        let attempt = pin!(async {
            // A gateway gets both workers at once.
            match choice.split.prefill().filter(|_| carried.is_none()) {
                // Boxed, so that other requests do not carry the state of two legs.
                Some(prefill) => {
                    Box::pin(self.attempt_disaggregated(job, plan, choice, prefill, course)).await
                }
                None => self.attempt(job, plan, choice, course, carried).await,
            }
        });
        let line = job.context.kind.batch_line();
        let line = line.map(|line| (line, choice.worker.id));
        let attempt = pin!(with_grant(grant, line, attempt));
        self.or_released(attempt, job, plan, choice, course).await
    }

    /// Takes note of the beginning of an answer to a request that was sent at `sent`. A closed circuit breaker learns
    /// the result when the answer ends; for a trial request its beginning is enough.
    fn on_answer(
        &self,
        job: &Job<'_>,
        plan: &Plan,
        course: &Course,
        (choice, sent): (&Choice, Instant),
        answer: &AttemptAnswer,
    ) {
        let worker = answer.running.worker();
        let status = answer.answer.head.status;
        // That it counts tokens says nothing of how busy its engine is.
        if status.is_success() && job.api.computes_prompt() {
            worker.on_taken(sent);
        }
        if status != StatusCode::UNAUTHORIZED {
            job.on_no_refusal_of_key(worker, sent);
        }
        let owner = FailureOwner::of_status(status);
        let (model, client) = (&plan.model, job.context.client);
        let is_trial = choice.is_trial_of(worker);
        if owner != FailureOwner::Unattributed {
            model.report_failure(worker, client, is_trial, owner, status.as_str());
        } else if is_trial && worker.breaker.state() != State::Closed {
            model.report_success(worker, client, is_trial, sent);
        }
        // Its legs were not seen. A worker that the gateway has turned to may have got the prompt otherwise.
        if job.gateway.is_some()
            && status.is_success()
            && worker.id == choice.worker.id
            && let Some(prefill) = choice.split.prefill()
        {
            let is_trial = choice.is_trial_of(&prefill.worker);
            model.report_success(&prefill.worker, client, is_trial, sent);
            prefill.worker.on_taken(sent);
            let is_trial = prefill.is_transfer_trial();
            model.report_transferred(&prefill.worker, client, is_trial, sent);
        }
        // Whether the request was to blame for its failed KV transfer.
        if course.is_after_failed_transfer() && answer.split.prefill().is_none() {
            model.report_whole(client, status.is_success());
        }
        self.quarantine.on_answer(job.original);
    }

    /// Takes note of a failed attempt at a choice that was made at `chosen_at`.
    fn on_failed(
        &self,
        job: &Job<'_>,
        plan: &mut Arc<Plan>,
        (choice, chosen_at): (&Choice, Instant),
        attempt: FailedAttempt,
        course: &mut Course,
        last: &mut LastFailure,
    ) -> Step {
        let FailedAttempt {
            fault,
            error,
            answer,
        } = attempt;
        let now = observe::now();
        let prefill = choice.split.prefill().map(|prefill| &prefill.worker);
        let at_prefill = prefill.filter(|_| fault.stage == Stage::Prefill);
        let worker = at_prefill.unwrap_or(&choice.worker);
        let cut = fault
            .is_cut
            .then(|| Cut::at(worker, (now, chosen_at), job.context.client, job.original));
        let ended = Ended {
            fault,
            is_answered: answer.is_some(),
            name: worker.name.clone(),
            worker: choice.worker.id,
            prefill: prefill.map(|prefill| prefill.id),
        };
        let judgement = course.on_failed(now, ended, cut.as_ref(), fastrand::f64());
        if judgement.is_counted {
            self.report(job, plan, choice, &fault, &error);
        }
        if cut.is_some() {
            // Now, since the client may leave before the next attempt. An answer takes it back.
            let cuts = &course.cuts;
            self.quarantine.on_cuts(now, job.original, cuts);
        }
        let is_key_refused =
            fault.failure == Failure::KeyRefused && fault.owner != FailureOwner::Unattributed;
        if is_key_refused && worker.key.on_refused(chosen_at) {
            warn!(
                worker = %worker.name,
                error,
                "engine refuses the key that the router has for it, so other workers get its requests; set `api_key` of the \
                 worker, or of its discovery entry, to the engine's --api-key"
            );
        }
        // A refusal of the key leaves no answer for the client.
        if let Some(answer) = &answer {
            job.on_no_refusal_of_key(answer.running.worker(), chosen_at);
        }
        if fault.failure == Failure::TooLong {
            course
                .failed
                .exclude_all(plan.group.context_lengths.shorter());
        }
        if fault.is_rank_refused {
            let plan = Plan::own(plan);
            plan.pinned = None;
            plan.rank_refused_by = Some(choice.worker.id);
        }
        last.worker = Some(worker.clone());
        last.error = error;
        last.answer = answer.or(last.answer.take());
        // The fleet may have changed meanwhile.
        self.renew(plan);
        judgement.step
    }

    /// Reports a failed attempt to the circuit breakers.
    fn report(&self, job: &Job<'_>, plan: &Plan, choice: &Choice, fault: &Fault, error: &str) {
        let prefill = choice.split.prefill();
        let prefill = prefill.filter(|_| fault.stage != Stage::Worker);
        let worker = prefill.map_or(&choice.worker, |prefill| &prefill.worker);
        let client = job.context.client;
        let is_trial = choice.is_trial_of(worker);
        plan.model
            .report_failure(worker, client, is_trial, fault.owner, error);
        if fault.failure == Failure::Local {
            // Idle connections make room.
            self.fleet().close_idle(observe::now());
        }
        if let Some(prefill) = prefill
            && fault.owner == FailureOwner::KvTransfer
        {
            let is_trial = prefill.is_transfer_trial();
            plan.model
                .report_transfer_failure(&prefill.worker, client, is_trial);
        }
    }
}
