//! The life of a request: plan, choose, attempt, retry, respond.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::Response;
use tracing::{debug, field, warn};

use super::charge::WantedOutput;
use super::choice::{Choice, FailedWorkers};
use super::core::Relay;
use super::cuts::{Cut, Cuts};
use super::failure_owner::FailureOwner;
use super::job::{Error, FailedRequest, Job, ToolLoss};
use super::kv_report_request::KvReportRequest;
use super::outcome::{AttemptOutcome, FailedAttempt, Stage};
use super::plan::{NO_WORKER_RETRY_AFTER, Plan};
use super::queued::{Waits, with_grant};
use super::request_count::RequestCount;
use super::retries::{Attempts, Failure, Step};
use crate::fleet::Worker;
use crate::http::Body;
use crate::http::circuit_breaker::State;
use crate::observe;
use crate::prompt::{Api, PeekedBody};
use crate::traces::{Event, RequestTrace};

/// Others that were cut in the same moment are waited for so long before a request is refused: I/O threads notice it one after
/// the other.
const COMPANY_WAIT: Duration = Duration::from_millis(100);

impl Relay {
    /// Sends a request to an engine of the model that its body names.
    pub(super) async fn carry(
        self: &Arc<Self>,
        job: &Job<'_>,
        mut peek: PeekedBody<'_>,
    ) -> Result<Response<Body>, FailedRequest> {
        if job.chat.is_some()
            && let Some(chat) = self.chat_for_all(job, peek.model.as_deref())?
        {
            // Boxed, so that other requests do not carry its state.
            return Box::pin(self.carry_chat(&chat)).await;
        }
        let mut waits = self.waits(job, &peek)?;
        let planning = job.trace().map(|trace| (trace, observe::now()));
        let mut plan = self.plan_or_wait(job, &mut peek, waits.as_mut()).await?;
        if let Some((trace, began)) = planning {
            self.on_tokenized(trace, began, &plan);
        }
        if job.gateway.is_some() {
            // Another worker could not go on with its answer: the gateway has the connection.
            plan.continuation = None;
            if !self.may_pin_carried(&plan) {
                plan.pinned = None;
            }
        }
        plan.request.ticket = plan.model.take_ticket();
        if plan.model.routing.advanced.request_cache_reports && job.api != Api::Generate {
            plan.report = KvReportRequest::new(&job.body, peek.vllm_xargs);
        }
        plan.go_on(job)?;
        let mut failed = FailedWorkers::unfit_for(&plan, job.gateway)?;
        let wanted = WantedOutput::of(&peek);
        drop(peek);
        let earlier_cuts = self.quarantine.cuts(observe::now(), job.original);
        if no_worker_may_get(&plan, &failed, &earlier_cuts) {
            self.quarantine.on_refused();
            warn!(id = %job.id, "request refused; engines cut the connection each time they got its body");
            return Err(Error::CutsConnections.into());
        }
        failed.exclude_all(earlier_cuts.excluded());
        let charge = self.reserve(job, &plan, wanted).await?;
        let mut count = RequestCount::new(plan.model.clone(), job.asked_api(), job.started, charge);
        self.budget.on_request();
        let deadline = job.started + self.settings.request_timeout;
        let mut attempts = Attempts::new(&self.settings, earlier_cuts);
        if job.gateway.is_some() {
            attempts = attempts.only_one();
        }
        // A retryable answer, for the client if no other attempt does better.
        let mut refused = None;
        let mut last_error = String::new();
        let mut last_worker: Option<Arc<Worker>> = None;
        let mut lacks_prefill = false;
        let mut is_over = false;
        // What a chat completion cannot have, if a worker that needs one was chosen.
        let mut not_convertible = None;
        // The failure that the next attempt is a retry of.
        let mut retried: Option<(Arc<str>, Failure)> = None;
        loop {
            let mut chosen = None;
            if attempts.count() == 0
                && let Some(waits) = &mut waits
            {
                let (may_pass, found) = self.may_pass(&plan, &failed, waits);
                chosen = found;
                if !may_pass {
                    // Boxed, so that requests that do not wait do not carry the state of a wait.
                    let room = self.wait_for_room(job, plan, &failed, chosen.take(), waits);
                    (plan, chosen) = match Box::pin(room).await {
                        Ok(room) => room,
                        Err(error) => return Err(Self::not_queued(job, count, error)),
                    };
                }
            }
            let now = observe::now();
            if now >= deadline {
                is_over = true;
                break;
            }
            let may_repeat = attempts.may_repeat_worker();
            if let Some((worker, failure)) = retried.take() {
                // A retry that no worker can take must not use up the budget of others.
                if !self.has_choice(&plan, now, &failed, may_repeat) {
                    break;
                }
                // What ended with all that its worker had is no further load, and what was refused at once hardly any.
                if attempts.is_acquitted() || failure == Failure::TooLong {
                    plan.model.families.on_retry(&worker, failure);
                } else if !self.may_retry(&plan, &worker, failure) {
                    break;
                }
            }
            let choice = self.choose(&plan, now, &failed, may_repeat, chosen);
            let sent_at = now;
            if let Some(waits) = &mut waits
                && waits.goes_on(choice.is_some(), attempts.count())
            {
                self.renew(&mut plan);
                continue;
            }
            let Some(choice) = choice else { break };
            if let Some(gateway) = job.gateway
                && !gateway.may_reach(&choice.worker)
            {
                // It joined after the request was planned.
                failed.unfit.push(choice.worker.id);
                failed.decode.push(choice.worker.id);
                continue;
            }
            let mut converted = self.converted(job, &plan, &choice, plan.tool_loss());
            if converted.is_err() && plan.tool_loss() == ToolLoss::Refused {
                let mut others = failed.clone();
                others.exclude_chat(&plan.group);
                if self.has_choice(&plan, now, &others, false) {
                    failed = others;
                    continue;
                }
                // No worker with the Responses API can be had now.
                converted = self.converted(job, &plan, &choice, ToolLoss::AsConfigured);
            }
            let converted = match converted {
                Ok(converted) => converted,
                Err(why) => {
                    not_convertible = Some(why);
                    break;
                }
            };
            let sent = converted.as_ref().unwrap_or(job);
            if self.lacks_prefill_worker(&choice) {
                lacks_prefill = true;
                break;
            }
            attempts.begin();
            self.sample_decision(job, &plan, &choice, (now, attempts.count()));
            count.on_sent();
            let grant = waits.as_mut().and_then(Waits::take_grant);
            let carried = job
                .gateway
                .map(|gateway| self.carried_to(gateway, &plan, &choice, now, &failed));
            let carried = carried.as_ref();
            let prefill = match &choice.prefill {
                // A gateway gets both workers at once.
                Some(Ok(prefill)) if carried.is_none() => Some(prefill),
                _ => None,
            };
            let outcome = match prefill {
                Some(prefill) => {
                    // Boxed, so that other requests do not carry the state of two legs.
                    let mut attempt =
                        Box::pin(self.attempt_disaggregated(
                            sent, &plan, &choice, prefill, &attempts, deadline,
                        ));
                    let attempt = pin!(with_grant(grant, attempt.as_mut()));
                    self.or_released(attempt, sent, &plan, &choice, &attempts, &failed)
                        .await
                }
                None => {
                    let attempt =
                        pin!(self.attempt(sent, &plan, &choice, &attempts, deadline, carried));
                    let attempt = pin!(with_grant(grant, attempt));
                    self.or_released(attempt, sent, &plan, &choice, &attempts, &failed)
                        .await
                }
            };
            let attempt = match outcome {
                AttemptOutcome::Answered(answer) => {
                    // A closed circuit breaker learns the result when the answer ends; for a trial request the
                    // beginning of an answer is enough.
                    let worker = answer.running.worker();
                    if answer.answer.is_failure() {
                        let (owner, status) = (answer.answer.owner(), answer.answer.head.status);
                        plan.model
                            .report_failure(worker, job.client, owner, status.as_str());
                    } else if worker.breaker.state() != State::Closed {
                        plan.model.report_success(worker, job.client);
                    }
                    self.quarantine.on_answer(job.original);
                    return Ok(self.respond(job, plan, answer, count, deadline));
                }
                AttemptOutcome::Failed(attempt) => attempt,
            };
            self.on_failed_attempt(job, &plan, &choice, &attempt, &mut failed);
            if attempt.failure == Failure::TooLong {
                failed.exclude_all(plan.group.context_lengths.shorter());
            }
            if attempt.is_rank_refused {
                plan.pinned = None;
                plan.rank_refused_by = Some(choice.worker.id);
            }
            let is_stale = attempt.is_stale();
            if attempt.is_cut {
                let (now, worker) = (observe::now(), choice.worker_at(attempt.stage));
                attempts.on_cut(&Cut::at(worker, (now, sent_at), job.client, job.original));
                // Now, since the client may leave before the next attempt. An answer takes it back.
                self.quarantine.on_cuts(now, job.original, attempts.cuts());
                if attempts.has_cut_enough() || attempts.is_last() {
                    tokio::time::sleep(COMPANY_WAIT).await;
                }
            }
            let step = attempts.on_failure(attempt.failure, is_stale, fastrand::f64());
            let FailedAttempt {
                stage,
                failure,
                error,
                answer,
                ..
            } = attempt;
            last_error = error;
            // An error status of the decode engine: it had the KV blocks or tried to fetch them, so another
            // prefill leg would most likely end the same.
            let is_decode_error = stage == Stage::Transfer && answer.is_some();
            refused = answer.or(refused);
            last_worker = Some(choice.worker_at(stage).clone());
            let failed_worker = choice.worker_at(stage).name.clone();
            // The fleet may have changed meanwhile.
            self.renew(&mut plan);
            match step {
                _ if is_decode_error
                    && !attempts.has_cut_enough()
                    && observe::now() < deadline
                    && self.give_up_transfers(&mut failed) =>
                {
                    debug!(id = %job.id, error = last_error, "attempt failed; trying without a KV transfer");
                }
                Step::Retry { after } if observe::now() + after < deadline => {
                    debug!(id = %job.id, error = last_error, ?after, "attempt failed; retrying");
                    // What was sent over a connection that was closed already costs the fleet nothing.
                    let is_free = failure.is_free() || is_stale;
                    retried = (!is_free).then_some((failed_worker, failure));
                    tokio::time::sleep(after).await;
                }
                // Costs no more than without a prefill worker, so it is not counted as a retry.
                _ if stage != Stage::Worker
                    && !attempts.has_cut_enough()
                    && self.give_up_transfers(&mut failed)
                    && observe::now() < deadline =>
                {
                    debug!(id = %job.id, error = last_error, "attempt failed; trying without a KV transfer");
                }
                Step::Retry { .. } | Step::GiveUp => break,
            }
        }
        if let Some(refused) = refused {
            return Ok(self.respond(job, plan, refused, count, deadline));
        }
        if attempts.count() == 0
            && let Some(why) = not_convertible
        {
            let error = Error::NotConvertible(why);
            count.fail(error.outcome());
            return Err(FailedRequest::counted(error));
        }
        if attempts.count() == 0
            && let Some(reason) = self.not_split(&plan)
        {
            let model = plan.group.model.to_string();
            let error = Error::NotSplit { model, reason };
            count.fail(error.outcome());
            return Err(FailedRequest::counted(error));
        }
        is_over |= attempts.last() == Some(Failure::Deadline);
        let error = match is_over {
            true => Error::Deadline {
                attempts: attempts.count(),
                limit: self.settings.request_timeout,
            },
            false => match no_worker_may_get(&plan, &failed, attempts.cuts()) {
                true => Error::CutsConnections,
                false => {
                    let shown = last_worker.as_deref();
                    let shown = shown.filter(|_| self.settings.decision_header);
                    failure_of(&plan, &attempts, lacks_prefill, shown)
                }
            },
        };
        let outcome = error.outcome();
        if let Some(summary) = &job.summary {
            summary.update(|it| {
                it.model = Some(plan.group.model.clone());
                it.worker = last_worker.as_ref().map(|worker| worker.name.clone());
                it.attempts += attempts.count();
                it.outcome = Some(outcome.as_str());
            });
        }
        // Absent from the line if the client sent none.
        let client_id = job.headers.get("x-request-id").map(field::debug);
        warn!(id = %job.id, client_id, %error, last = last_error, "request failed");
        count.fail(outcome);
        Err(FailedRequest::counted(error))
    }

    /// How long it took to know a traced request's prompt. Nothing for a model that has no tokenizer.
    fn on_tokenized(&self, trace: &RequestTrace, began: Instant, plan: &Plan) {
        let is_exact = plan.prompt.exact.is_some();
        if is_exact || self.tokens.has_tokenizer(&plan.group) {
            let now = observe::now();
            let tokens = is_exact.then_some(u64::from(plan.request.prompt_tokens));
            // Without a wait for a worker of the model.
            let took = now.saturating_duration_since(began);
            let took = took.saturating_sub(plan.queued);
            trace.event(now, Event::Tokenized { took, tokens });
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
                .report_failure(worker, job.client, owner, &attempt.error);
        };
        if attempt.failure == Failure::Local {
            // Idle connections make room. No worker has failed.
            report(choice.worker_at(stage));
            for status in &self.fleet.snapshot().workers {
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
        if let Some(Ok(prefill)) = &choice.prefill
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

    /// Takes a retry from the budget.
    pub(super) fn may_retry(&self, plan: &Plan, failed: &str, failure: Failure) -> bool {
        let may_retry = self.budget.may_retry();
        match may_retry {
            true => plan.model.families.on_retry(failed, failure),
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

/// True if the request seems to end the engines that get it, or ended connections of each that could have it.
fn no_worker_may_get(plan: &Plan, failed: &FailedWorkers, cuts: &Cuts) -> bool {
    let may_get = |worker: &Arc<Worker>| {
        let id = worker.id;
        !failed.unfit.contains(&id) && !cuts.excludes(id)
    };
    let has_excluded = cuts.excluded().next().is_some();
    cuts.are_of_the_request() || has_excluded && !plan.group.workers.iter().any(may_get)
}

/// The error of a request that no attempt answered.
fn failure_of(
    plan: &Plan,
    attempts: &Attempts,
    lacks_prefill: bool,
    last_worker: Option<&Worker>,
) -> Error {
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
        count => match attempts.last() {
            Some(Failure::TimedOut) => Error::TimedOut { attempts: count },
            Some(Failure::Local) => Error::OutOfResources { retry_after },
            last => Error::Unreachable {
                attempts: count,
                last: last.unwrap_or(Failure::Broken),
                worker: last_worker.map(|worker| worker.client_name.clone()),
                may_have_computed: attempts.may_have_computed(),
            },
        },
    }
}
