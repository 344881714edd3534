//! One attempt at one worker, which computes the prompt and generates the answer.

use hyper::StatusCode;
use std::pin::pin;
use tracing::debug;

use super::exchange::Sending;
use super::first_token;
use super::offers::Offers;
use super::outcome::{AttemptAnswer, AttemptOutcome, FailedAttempt};
use super::running::{OptimisticInsert, Running, count_prompt};
use crate::fleet::Worker;
use crate::fleet::in_flight::InFlight;
use crate::observe;
use crate::prompt::Api;
use crate::relay::answer::first_token_gate::Verdict;
use crate::relay::choose::chosen::{Choice, Split};
use crate::relay::core::Relay;
use crate::relay::course::Course;
use crate::relay::failure::fault::{Fault, Part, Sign};
use crate::relay::failure::types::Stage;
use crate::relay::job::Job;
use crate::relay::plan::Plan;
use crate::relay::request::gateway::CarriedTo;
use crate::relay::traced;

/// An engine that refuses a prompt whose tokens are estimated may have too short a context for it; another one may not.
fn is_too_long(plan: &Plan, worker: &Worker, status: StatusCode) -> bool {
    let lengths = &plan.group.context_lengths;
    let is_refused = matches!(
        status,
        StatusCode::BAD_REQUEST | StatusCode::PAYLOAD_TOO_LARGE
    );
    is_refused
        && plan.prompt.exact.is_none()
        && lengths.may_be_too_short(worker.id, plan.context_tokens)
}

impl Relay {
    /// The request counts at the worker at once, so that the next decision sees it; a failure undoes that.
    pub(in crate::relay) async fn attempt(
        &self,
        job: &Job<'_>,
        plan: &Plan,
        choice: &Choice,
        course: &Course,
        carried: Option<&CarriedTo<'_>>,
    ) -> AttemptOutcome {
        let now = observe::now();
        let request = &plan.request;
        let (decision, worker) = (&choice.decision, &choice.worker);
        // Only a gateway has the prompt computed by another worker in the same attempt: that one's cached prefix counts.
        let prefill = choice.split.prefill();
        let computes = prefill.map_or(decision, |prefill| &prefill.decision);
        plan.model.on_decision(request.prompt_tokens, computes);
        if let Some(metrics) = &plan.model.disaggregated {
            match &choice.split {
                Split::Pair(_) => metrics.disaggregated.inc(),
                Split::Whole(reason) => metrics.count_local(reason.as_str()),
                Split::Off => {}
            }
        }
        debug!(
            id = %job.context.id,
            worker = %worker.name,
            rank = decision.rank,
            reason = decision.reason.as_str(),
            cost_ms = decision.cost * 1e3,
            cached_tokens = decision.cached_tokens,
            prompt_tokens = request.prompt_tokens,
            "worker chosen"
        );
        let chosen = (worker, decision);
        let may_pin = carried.is_none() || self.may_pin_carried(plan);
        let rank = worker.pinned_to(decision.rank).filter(|_| may_pin);
        let mut span = traced::begin_try(job, plan, now, chosen, rank, None, course.count);
        let insert = OptimisticInsert::new(&self.caches, now, (worker, rank), plan);
        let unseen_prefill = self.unseen_prefill(plan, &decision.expected);
        let in_flight = match prefill {
            None => count_prompt(plan, worker, decision)
                .at_rank(rank)
                .sent_at(now, plan.is_stream),
            Some(_) => InFlight::decoding(worker.clone(), request.prompt_tokens),
        };
        // The plan's tokens are those of the other form of the request.
        let is_planned = plan.api == job.api;
        let mut running = if is_planned {
            Running::computing(&self.caches, plan, now, in_flight)
        } else {
            Running::new(in_flight)
        };
        running.expected = Some((now, decision.expected));
        running.prefill =
            prefill.map(|prefill| count_prompt(plan, &prefill.worker, &prefill.decision));
        let limit = self.attempt_deadline(plan, now).min(course.deadline());
        let timer = Box::pin(tokio::time::sleep_until(limit.into()));
        let planned_body = plan.body.as_ref().filter(|_| is_planned);
        let body = planned_body.unwrap_or(&job.body);
        let asking_ids = plan.asks_token_ids(worker).filter(|_| is_planned);
        let aborted = if !plan.is_stream && plan.group.aborting_by_id.contains(&worker.id) {
            let id = format!("{}-{}", job.context.id, course.count);
            self.aborts.guard(job.api, body, worker, id)
        } else {
            None
        };
        let (with_id, abort) = aborted.unzip();
        let body = with_id.as_ref().unwrap_or(body);
        let sending = Sending {
            rank,
            reuse: course.reuse(),
            carried,
            span: span.as_deref(),
        };
        let mut offers = Offers::new(body, sending.rank)
            .asking_token_ids(asking_ids)
            .keeping_rank(carried.is_some());
        // A gateway's answer is its own.
        let waits_for_token = carried.is_none()
            && plan.is_stream
            && (job.api.has_choices() || job.api == Api::Messages);
        let mut verdict = Verdict::Token;
        let sent = {
            // Pinned where it is: a future that is moved into another one is copied.
            let sent = pin!(async {
                let mut answer =
                    pin!(self.send(job, &mut offers, sending, plan, worker, timer)).await?;
                if waits_for_token {
                    verdict = first_token::wait(job, &mut answer).await?;
                } else if carried.is_none() && first_token::is_given_up(job.api, &answer) {
                    verdict = Verdict::GivenUp;
                }
                Ok(answer)
            });
            match unseen_prefill {
                None => sent.await,
                Some(after) => Box::pin(running.prefilled_after(after, sent)).await,
            }
        };
        let answer = match sent {
            Ok(answer) => answer,
            Err(error) => {
                let (name, deadline) = (&worker.name, course.deadline());
                let failed = FailedAttempt::unanswered(Stage::Worker, name, &error, deadline);
                failed.end_try(span.as_deref_mut());
                return Err(failed);
            }
        };
        if let Some(abort) = abort {
            abort.disarm();
        }
        if let Some(span) = &mut span {
            span.update(|tried| tried.rank = worker.pinned_to(rank));
        }
        running.span = span;
        let other = answer.served.as_deref().and_then(|served| {
            let mut workers = plan.group.workers.iter();
            workers
                .find(|candidate| candidate.pool.authority() == served && candidate.id != worker.id)
        });
        let mut taken_by = (worker, worker.pinned_to(rank));
        if let Some(other) = other {
            debug!(id = %job.context.id, worker = %other.name, "the gateway sent the request to another worker");
            // It has the same rank.
            taken_by = (other, rank);
            let in_flight = InFlight::new(other.clone(), request.prompt_tokens, 0);
            running.move_to(in_flight.at_rank(rank));
            if let Some(span) = running.span() {
                traced::answered_by(span, other);
            }
        }
        let (worker, taken_rank) = taken_by;
        // An engine may have taken it without its rank only.
        let insert = if other.is_some() || taken_rank != rank {
            drop(insert);
            OptimisticInsert::new(&self.caches, now, (worker, taken_rank), plan)
        } else {
            insert
        };
        let status = answer.head.status;
        let sign = match verdict {
            Verdict::Error => Sign::ErrorEvent,
            Verdict::GivenUp | Verdict::Undecided => Sign::GivenUp,
            Verdict::Token | Verdict::Refusal => {
                let is_trial = choice.is_trial_of(worker);
                match self.on_status(job, worker, &answer, now, is_trial) {
                    Sign::Nothing if is_too_long(plan, worker, status) => Sign::TooLong,
                    of_status => of_status,
                }
            }
        };
        if status.is_success() && !matches!(sign, Sign::ErrorEvent | Sign::GivenUp) {
            insert.confirm();
        }
        let answer = Box::new(AttemptAnswer {
            answer,
            running,
            decision: choice.decision,
            is_converted: job.is_converted,
            attempts: course.count,
            split: choice.split.as_ref().map(|prefill| prefill.leg(None)),
        });
        match Fault::of_answer(Part::Whole, status, sign) {
            None => Ok(answer),
            Some(fault) => {
                let mut failed = FailedAttempt::answered(fault, answer);
                if sign == Sign::ErrorEvent {
                    failed.error = format!("{}: an error in place of the first token", worker.name);
                }
                Err(failed)
            }
        }
    }
}
