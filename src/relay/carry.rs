//! A request from its plan to its answer: what is prepared once, the attempts, and what a client gets that none answered.

use std::pin::pin;
use std::sync::Arc;
use std::time::Instant;

use hyper::Response;
use tracing::{field, warn};

use super::charge::WantedOutput;
use super::choose::failed_workers::FailedWorkers;
use super::core::Relay;
use super::course::Course;
use super::failure::cuts::Cuts;
use super::failure::retries::{Attempts, Failure};
use super::job::{Error, FailedRequest, Job};
use super::plan::Plan;
use super::planner::NO_WORKER_RETRY_AFTER;
use super::request::kv_report_request::KvReportRequest;
use super::request_count::RequestCount;
use super::run::{End, First, Tries};
use crate::fleet::Worker;
use crate::http::Body;
use crate::observe;
use crate::prompt::{Api, PeekedBody};
use crate::traces::{Event, RequestTrace};

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
        let earlier_cuts = self.quarantine().cuts(observe::now(), job.original);
        if no_worker_may_get(&plan, &failed, &earlier_cuts) {
            self.quarantine().on_refused();
            warn!(id = %job.context.id, "request refused; engines cut the connection each time they got its body");
            return Err(Error::CutsConnections.into());
        }
        failed.exclude_all(earlier_cuts.excluded());
        let charge = self.reserve(job, &plan, wanted).await?;
        let mut count = RequestCount::new(
            plan.model.clone(),
            job.asked_api(),
            job.context.started,
            charge,
        );
        self.budget().on_request();
        let deadline = job.context.started + self.settings().request_timeout;
        let mut attempts = Attempts::new(self.settings(), earlier_cuts);
        if job.gateway.is_some() {
            attempts = attempts.only_one();
        }
        let mut tries = Tries::new(failed, Course::new(attempts, deadline));
        let end = loop {
            let mut chosen = None;
            if tries.course.count() == 0
                && let Some(waits) = &mut waits
            {
                let (may_pass, found) = self.may_pass(&plan, &tries.failed, waits);
                chosen = found;
                if !may_pass {
                    // Boxed, so that requests that do not wait do not carry the state of a wait.
                    let room = self.wait_for_room(job, plan, &tries.failed, chosen.take(), waits);
                    (plan, chosen) = match Box::pin(room).await {
                        Ok(room) => room,
                        Err(error) => return Err(Self::not_queued(job, count, error)),
                    };
                }
            }
            let first = First {
                waits: waits.as_mut(),
                count: &mut count,
            };
            // Pinned where it is made, so that it is not moved.
            let tried = pin!(self.attempts(job, &mut plan, &mut tries, chosen, Some(first))).await;
            match tried {
                Ok(answer) => return Ok(self.respond(job, plan, answer, count, deadline)),
                Err(End::Again) => {}
                Err(end) => break end,
            }
        };
        self.unanswered(job, plan, tries, end, count)
    }

    /// What a client gets that no attempt answered.
    fn unanswered(
        self: &Arc<Self>,
        job: &Job<'_>,
        plan: Plan,
        tries: Tries,
        end: End,
        count: RequestCount,
    ) -> Result<Response<Body>, FailedRequest> {
        let Tries {
            failed,
            course,
            refused,
            last_error,
            last_worker,
        } = tries;
        if let Some(refused) = refused {
            return Ok(self.respond(job, plan, refused, count, course.deadline()));
        }
        let attempts = course.attempts();
        let is_unsent = attempts.count() == 0;
        let lacks_prefill = matches!(end, End::LacksPrefill);
        let is_late = matches!(end, End::Late) || attempts.last() == Some(Failure::Deadline);
        let error = match end {
            End::NotConvertible(why) if is_unsent => Some(Error::NotConvertible(why)),
            _ if is_unsent => self
                .chooser()
                .not_split(&plan)
                .map(|reason| Error::NotSplit {
                    model: plan.group.model.to_string(),
                    reason,
                }),
            _ => None,
        };
        if let Some(error) = error {
            count.fail(error.outcome());
            return Err(FailedRequest::counted(error));
        }
        let error = if is_late {
            Error::Deadline {
                attempts: attempts.count(),
                limit: self.settings().request_timeout,
            }
        } else if no_worker_may_get(&plan, &failed, course.cuts()) {
            Error::CutsConnections
        } else {
            let shown = last_worker.as_deref();
            let shown = shown.filter(|_| self.settings().decision_header);
            failure_of(&plan, attempts, lacks_prefill, shown)
        };
        let outcome = error.outcome();
        if let Some(summary) = &job.context.summary {
            summary.update(|line| {
                line.model = Some(plan.group.model.clone());
                line.worker = last_worker.as_ref().map(|worker| worker.name.clone());
                line.attempts += attempts.count();
                line.outcome = Some(outcome.as_str());
            });
        }
        // Absent from the line if the client sent none.
        let client_id = job.headers.get("x-request-id").map(field::debug);
        warn!(id = %job.context.id, client_id, %error, last = last_error, "request failed");
        count.fail(outcome);
        Err(FailedRequest::counted(error))
    }

    /// How long it took to know a traced request's prompt. Nothing for a model that has no tokenizer.
    fn on_tokenized(&self, trace: &RequestTrace, began: Instant, plan: &Plan) {
        let is_exact = plan.prompt.exact.is_some();
        if is_exact || self.tokens().has_tokenizer(&plan.group) {
            let now = observe::now();
            let tokens = is_exact.then_some(u64::from(plan.request.prompt_tokens));
            // Without a wait for a worker of the model.
            let took = now.saturating_duration_since(began);
            let took = took.saturating_sub(plan.queued);
            trace.event(now, Event::Tokenized { took, tokens });
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
