//! A worker that health checks or its circuit breaker take out releases the requests that wait for its answer: they are tried
//! at another worker at once. Only those of which the client has nothing yet, and never those for which the engine itself may have
//! run tools: what a tool does would be done twice. A prefill worker counts until the decode worker has the blocks.
//!
//! Requests stay where they are as long as no other worker could take them, and while the retry budget is used up.

use std::pin::Pin;
use std::time::Duration;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::attempt::outcome::{AttemptOutcome, FailedAttempt};
use super::choose::chosen::Choice;
use super::core::Relay;
use super::course::Course;
use super::failure::failure_owner::FailureOwner;
use super::failure::fault::Fault;
use super::failure::types::{Failure, Stage};
use super::job::{Job, ToolLoss};
use super::kv_transfer::runs_tools;
use super::plan::Plan;
use crate::ids::WorkerId;
use crate::observe;
use crate::prompt::Api;

/// How often a request that waits for a worker that is out looks for another one.
const LOOK_EVERY: Duration = Duration::from_secs(1);

impl Relay {
    /// Waits for an attempt, or until it is released: then it has failed.
    pub(super) async fn or_released<F: Future<Output = AttemptOutcome>>(
        &self,
        attempt: Pin<&mut F>,
        job: &Job<'_>,
        plan: &Plan,
        choice: &Choice,
        course: &Course,
    ) -> AttemptOutcome {
        // A gateway has the connection itself.
        if course.is_last() || job.gateway.is_some() {
            return attempt.await;
        }
        tokio::select! {
            biased;
            outcome = attempt => outcome,
            failed = self.released(job, plan, choice, course) => Err(failed),
        }
    }

    /// Resolves once a worker of the choice was taken out and another one may get the request in its place.
    async fn released(
        &self,
        job: &Job<'_>,
        plan: &Plan,
        choice: &Choice,
        course: &Course,
    ) -> FailedAttempt {
        let prefill = choice.split.prefill();
        let needed = || prefill.filter(|prefill| prefill.is_needed(observe::now()));
        loop {
            let (stage, worker) = match needed() {
                Some(prefill) => tokio::select! {
                    biased;
                    () = choice.worker.taken_out() => (Stage::Worker, &choice.worker),
                    () = prefill.worker.taken_out() => (Stage::Prefill, &prefill.worker),
                },
                None => {
                    choice.worker.taken_out().await;
                    (Stage::Worker, &choice.worker)
                }
            };
            if stage == Stage::Prefill && needed().is_none() {
                // The decode worker got the blocks meanwhile.
                continue;
            }
            if self.may_go_on_without(worker.id, job, plan, course)
                && !may_run_tools(job)
                && self.budget.may_retry()
            {
                let failure = Failure::TakenOut;
                plan.model.families.on_retry(&worker.name, failure);
                let error = format!("{} was taken out before it answered", worker.name);
                let owner = FailureOwner::of_failure(failure, false);
                let fault = Fault::new(stage, failure, owner);
                return FailedAttempt::new(fault, error);
            }
            // Boxed, so that other requests do not carry its state.
            Box::pin(tokio::time::sleep(LOOK_EVERY)).await;
        }
    }

    /// True if a retry of the request finds a worker now, or a pair, without this one.
    fn may_go_on_without(
        &self,
        out: WorkerId,
        job: &Job<'_>,
        plan: &Plan,
        course: &Course,
    ) -> bool {
        let snapshot = self.fleet().snapshot();
        let Some(group) = snapshot.models.get(&plan.group.model) else {
            return false;
        };
        let mut failed = course.failed.clone();
        failed.exclude_all(std::iter::once(out));
        if let Some(chat) = job.chat
            && chat.chat_body(&job.body, ToolLoss::AsConfigured).is_err()
        {
            failed.exclude_chat(group);
        }
        let may_repeat = course.may_repeat_after(Failure::TakenOut);
        self.chooser()
            .may_retry_in(plan, group, observe::now(), &failed, may_repeat)
    }
}

/// True if the engine itself may run tools for the request: the Responses API has such tools.
fn may_run_tools(job: &Job<'_>) -> bool {
    #[derive(Deserialize)]
    struct Wire<'a> {
        #[serde(borrow)]
        tools: Option<&'a RawValue>,
    }
    let runs = |tools: &RawValue| runs_tools(tools.get()).is_some();
    // A body that does not parse might have some.
    job.api == Api::Responses
        && !job.is_converted
        && serde_json::from_slice::<Wire<'_>>(&job.body)
            .map_or(true, |wire| wire.tools.is_some_and(runs))
}
