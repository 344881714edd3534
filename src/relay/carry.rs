//! A request from its plan to its answer: what is prepared once, the attempts, and what a client gets that none answered.

use std::pin::pin;
use std::sync::Arc;
use std::time::Instant;

use hyper::Response;
use tracing::{field, warn};

use super::choose::failed_workers::FailedWorkers;
use super::core::Relay;
use super::course::{Course, Rules, Unanswered};
use super::failure::cuts::Cuts;
use super::failure::types::Failure;
use super::job::{Error, FailedRequest, Job};
use super::plan::Plan;
use super::planner::NO_WORKER_RETRY_AFTER;
use super::request::context::RequestContext;
use super::request_count::RequestCount;
use super::run::{First, LastFailure};
use crate::fleet::Worker;
use crate::http::Body;
use crate::http::circuit_breaker::State;
use crate::limits::Known;
use crate::observe;
use crate::prompt::{Api, PeekedBody};
use crate::queue::Refusal;
use crate::traces::{Event, RequestTrace};

impl Relay {
    /// Sends a request to an engine of the model that its body names.
    pub(super) async fn carry(
        self: &Arc<Self>,
        job: &Job<'_>,
        mut peek: Box<PeekedBody<'_>>,
    ) -> Result<Response<Body>, FailedRequest> {
        if job.chat.is_some()
            && let Some(chat) = self.chat_for_all(job, peek.model.as_deref())?
        {
            // Boxed, so that other requests do not carry its state.
            return Box::pin(self.carry_chat(&chat)).await;
        }
        let mut waits = self.waits(job, &peek)?;
        let planning = job.context.trace().map(|trace| (trace, observe::now()));
        let mut plan = self.plan_or_wait(job, &mut peek, waits.as_mut()).await?;
        if let Some((trace, began)) = planning {
            self.on_tokenized(trace, began, &plan);
        }
        let own = Plan::own(&mut plan);
        if job.gateway.is_some() {
            // Another worker could not go on with its answer: the gateway has the connection.
            own.continuation = None;
            if !self.may_pin_carried(own) {
                own.pinned = None;
            }
        }
        own.request.ticket = own.model.take_ticket();
        own.go_on(job)?;
        let mut failed = FailedWorkers::unfit_for(&plan, job.gateway)?;
        let wanted = Known {
            max_tokens: peek.max_tokens,
            max_tokens_name: if job.asked_api() == Api::Responses {
                "max_output_tokens"
            } else {
                peek.max_tokens_name
            },
            choices: peek.choices.unwrap_or(1),
            odd_value: peek.odd_value,
            ..Known::default()
        };
        // Its blocks are not needed any more.
        drop(peek);
        let earlier_cuts = self.quarantine.cuts(observe::now(), job.original);
        if no_worker_may_get(&plan, &failed, &earlier_cuts) {
            self.quarantine.on_refused();
            warn!(id = %job.context.id, "request refused; engines cut the connection each time they got its body");
            return Err(Error::CutsConnections.into());
        }
        if !earlier_cuts.is_empty() {
            failed.exclude_all(earlier_cuts.excluded());
        }
        let rules = Rules {
            deadline: self.deadline(&job.context),
            looks_for_room: waits.is_some() || job.context.kind.batch_line().is_some(),
            is_only_one: job.gateway.is_some(),
            may_give_up_transfers: self.chooser().may_give_up_transfers(),
        };
        let mut course = Course::new(&self.settings, rules, failed, earlier_cuts);
        let charge = self.reserve(job, &plan, wanted).await?;
        let mut count = RequestCount::new(
            plan.model.clone(),
            job.asked_api(),
            job.context.started,
            charge,
        );
        count.max_tokens = wanted.max_tokens.filter(|_| wanted.choices == 1);
        self.budget.on_request();
        let mut last = LastFailure::default();
        let first = Some(First {
            waits: waits.as_mut(),
            count: &mut count,
        });
        let answered = {
            // Pinned where it is made, so that it is not moved.
            let attempts = pin!(self.attempts(job, &mut plan, &mut course, &mut last, first));
            self.unless_drained(job, attempts).await
        };
        let drained = || Unanswered::NotQueued(Error::NotQueued(Refusal::DRAINING));
        match answered.unwrap_or_else(|| Err(drained())) {
            Ok(answer) => Ok(self.respond(job, plan, answer, count, rules.deadline)),
            Err(why) => self.unanswered(job, plan, course, last, why, count),
        }
    }

    /// When a request's time is over.
    pub(super) fn deadline(&self, context: &RequestContext) -> Instant {
        let usual = || context.started + self.settings.request_timeout;
        context.deadline.unwrap_or_else(usual)
    }

    /// What a client gets that no attempt answered.
    fn unanswered(
        self: &Arc<Self>,
        job: &Job<'_>,
        plan: Arc<Plan>,
        course: Course,
        last: LastFailure,
        why: Unanswered,
        count: RequestCount,
    ) -> Result<Response<Body>, FailedRequest> {
        if let Unanswered::NotQueued(error) = why {
            return Err(Self::not_queued(job, count, error));
        }
        if let Some(mut refused) = last.answer {
            // Later attempts may have ended without an answer.
            refused.attempts = course.count;
            return Ok(self.respond(job, plan, refused, count, course.deadline()));
        }
        let error = self.error_of(job, &plan, &course, why, last.worker.as_deref());
        // What the request itself rules out is no failure.
        if !matches!(error, Error::NotConvertible(_) | Error::NotSplit { .. }) {
            if let Some(summary) = &job.context.summary {
                summary.update(|line| {
                    line.model = Some(plan.group.model.clone());
                    line.worker = last.worker.as_ref().map(|worker| worker.name.clone());
                    line.attempts += course.count;
                    line.outcome = Some(error.outcome().as_str());
                });
            }
            // Absent from the line if the client sent none.
            let client_id = job.headers.get("x-request-id").map(field::debug);
            warn!(id = %job.context.id, client_id, %error, last = last.error, "request failed");
        }
        count.fail();
        let model = Some(plan.group.model.clone());
        Err(FailedRequest { error, model })
    }

    fn error_of(
        &self,
        job: &Job<'_>,
        plan: &Plan,
        course: &Course,
        why: Unanswered,
        last_worker: Option<&Worker>,
    ) -> Error {
        let model = || plan.group.model.to_string();
        let (attempts, retry_after) = (course.count, NO_WORKER_RETRY_AFTER);
        let is_late = why == Unanswered::Late || course.last() == Some(Failure::Deadline);
        let lacks_prefill = why == Unanswered::LacksPrefill;
        if attempts == 0 {
            if let Unanswered::NotConvertible(what) = why {
                return Error::NotConvertible(what);
            }
            if let Some(reason) = self.chooser().not_split(plan) {
                let model = model();
                return Error::NotSplit { model, reason };
            }
        }
        if is_late {
            let limit = course
                .deadline()
                .saturating_duration_since(job.context.started);
            return Error::Deadline { attempts, limit };
        }
        if self.is_refused_by_each(plan, course) {
            return Error::KeyRefused;
        }
        if no_worker_may_get(plan, &course.failed, &course.cuts) {
            return Error::CutsConnections;
        }
        let shown = last_worker.filter(|_| self.settings.decision_header);
        // Where a worker that may take the key cannot be used now, it can be soon.
        match course.last().filter(|_| !course.has_only_refused_keys()) {
            Some(Failure::TimedOut) => Error::TimedOut { attempts },
            Some(Failure::Local) => Error::OutOfResources { retry_after },
            Some(last) => Error::Unreachable {
                attempts,
                last,
                worker: shown.map(|worker| worker.client_name.clone()),
                may_have_computed: course.may_have_computed,
            },
            None if lacks_prefill => Error::NoPrefill {
                model: model(),
                retry_after,
            },
            None => Error::NoWorker {
                model: model(),
                is_known: true,
                retry_after,
            },
        }
    }

    /// True if each worker that could do what was refused last has refused the router's key for it, also those that are
    /// down now. One request may not try them all, so what a worker refused earlier requests counts as well.
    fn is_refused_by_each(&self, plan: &Plan, course: &Course) -> bool {
        let Some(stage) = course.last_stage() else {
            return false;
        };
        let snapshot = self.fleet().snapshot();
        let are_down = snapshot.workers.iter().filter(|status| {
            status.worker.is_down() && status.facts.models.contains_key(&plan.group.model)
        });
        let are_down = are_down.map(|status| &status.worker);
        let workers = plan.group.workers.iter().chain(are_down);
        let now = observe::now();
        course.is_refused_by_each(stage, workers, |worker| refuses_key(worker, now))
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
}

/// True if a worker that takes requests now has refused the router's key for it since it last answered otherwise. Where
/// one is down, has asked for a pause, or has an open circuit breaker, the key may be right again by the time that it
/// takes requests.
fn refuses_key(worker: &Worker, now: Instant) -> bool {
    let breaker = &worker.breaker;
    let is_admitting = breaker.state() == State::Closed && breaker.may_admit(now);
    !worker.is_down() && is_admitting && worker.key.is_refused()
}

/// True if the request seems to end the engines that get it, or ended connections of each that could have it.
fn no_worker_may_get(plan: &Plan, failed: &FailedWorkers, cuts: &Cuts) -> bool {
    if cuts.is_empty() {
        return false;
    }
    let may_get = |worker: &Arc<Worker>| {
        let id = worker.id;
        !failed.unfit.contains(&id) && !cuts.excludes(id)
    };
    let has_excluded = cuts.excluded().next().is_some();
    cuts.are_of_the_request() || has_excluded && !plan.group.workers.iter().any(may_get)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::fleet::health::Health;
    use crate::fleet::registry::tests::registry;

    #[test]
    fn only_a_worker_that_takes_requests_now_is_known_to_refuse_the_key() {
        let fleet = registry(&["a"]);
        let worker = fleet.snapshot().workers[0].worker.clone();
        let now = observe::now() + Duration::from_secs(1);
        let later = now + Duration::from_secs(5);
        assert!(!refuses_key(&worker, now));
        worker.key.on_refused(now);
        assert!(refuses_key(&worker, now));
        // The engine has asked for a pause, which leaves its circuit breaker closed.
        worker.breaker.pause(later);
        assert!(!refuses_key(&worker, now));
        assert!(refuses_key(&worker, later));
        while worker.breaker.state() == State::Closed {
            worker.breaker.on_failure(later);
        }
        assert!(!refuses_key(&worker, later));
        // An open circuit breaker that would admit a trial request is no closed one.
        let trial = later + Duration::from_secs(3_600);
        assert!(worker.breaker.may_admit(trial) && !refuses_key(&worker, trial));
        assert!(worker.breaker.admit(trial));
        worker.breaker.on_success(trial, true);
        assert!(refuses_key(&worker, trial));
        fleet.set_health(worker.id, Health::Down);
        worker.key.on_refused(trial);
        assert!(worker.key.is_refused() && !refuses_key(&worker, trial));
    }
}
