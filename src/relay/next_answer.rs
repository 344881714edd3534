//! The answer of the next worker, for a stream whose worker is lost: by the same attempts as a new request has. It
//! owns what the request's first part only borrowed, because the client's body outlives that.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use hyper::{HeaderMap, StatusCode, Uri};

use super::attempt::outcome::AttemptAnswer;
use super::choose::failed_workers::FailedWorkers;
use super::core::Relay;
use super::course::{Course, Rules, Unanswered};
use super::failure::cuts::Cuts;
use super::headers;
use super::job::Job;
use super::plan::Plan;
use super::request::context::RequestContext;
use super::run::LastFailure;
use super::traced;
use crate::fleet::Worker;
use crate::observe;

/// A request that may be sent to further workers.
pub(super) struct NextAnswer {
    relay: Arc<Relay>,
    plan: Arc<Plan>,
    failed: FailedWorkers,
    deadline: Instant,
    target: Uri,
    headers: HeaderMap,
    context: RequestContext,
    is_converted: bool,
}

impl NextAnswer {
    pub(super) fn new(
        relay: Arc<Relay>,
        job: &Job<'_>,
        mut plan: Arc<Plan>,
        deadline: Instant,
    ) -> Self {
        // The plan has what its API needs; an error was an error of the first attempt.
        let mut failed = FailedWorkers::unfit_for(&plan, None).unwrap_or_default();
        // The next worker computes prompt and answer itself.
        failed.gave_up_transfers = true;
        let own = Plan::own(&mut plan);
        own.body = None;
        own.continuation = None;
        own.resumed = None;
        Self {
            relay,
            plan,
            failed,
            deadline,
            target: job.target.clone(),
            headers: job.headers.clone(),
            context: job.context.clone(),
            is_converted: job.is_converted,
        }
    }

    /// Sends `body` to another worker than `lost`, and waits for the beginning of its answer. The answer begins with the
    /// answer's token number `answer_tokens`.
    pub(super) async fn run(
        &mut self,
        body: Bytes,
        lost: Arc<Worker>,
        answer_tokens: u32,
    ) -> Result<Box<AttemptAnswer>, NotContinued> {
        self.failed.exclude_all(std::iter::once(lost.id));
        let plan = Plan::own(&mut self.plan);
        plan.body = Some(body.clone());
        let prompt_tokens = plan.request.prompt_tokens;
        plan.request.prompt_tokens = prompt_tokens.saturating_add(answer_tokens);
        let original = body.clone();
        // What a new request would begin with, its response and its wait, is not looked at again.
        let (context, target) = (self.context.clone(), self.target.clone());
        let api = self.plan.api;
        let job = Job {
            is_converted: self.is_converted,
            ..Job::new(context, api, target, &self.headers, body, &original)
        };
        traced::continued(&job, observe::now(), &lost, answer_tokens);
        self.relay.renew(&mut self.plan);
        self.failed.exclude_for_rest_of_stream(&self.plan);
        let rules = Rules {
            deadline: self.deadline,
            looks_for_room: false,
            is_only_one: false,
            // The rest of a stream goes without a transfer from the start.
            may_give_up_transfers: false,
        };
        let failed = std::mem::take(&mut self.failed);
        let mut course = Course::new(&self.relay.settings, rules, failed, Cuts::default());
        let mut last = LastFailure::default();
        let answer = self
            .relay
            .attempts(&job, &mut self.plan, &mut course, &mut last, None)
            .await;
        Plan::own(&mut self.plan).request.prompt_tokens = prompt_tokens;
        let is_unsent = course.count == 0;
        self.failed = course.failed;
        let answer = answer.map_err(|why| {
            if why == Unanswered::Late {
                NotContinued::Late
            } else if is_unsent {
                NotContinued::NoWorker
            } else {
                NotContinued::Failed(last.error)
            }
        })?;
        let head = &answer.answer.head;
        if head.status.is_success() && headers::is_event_stream(&head.headers) {
            return Ok(answer);
        }
        let name = answer.running.worker().name.clone();
        Err(NotContinued::Answered(name, head.status))
    }
}

/// Why no other worker goes on with a stream, for the log.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotContinued {
    #[error("the request took too long")]
    Late,
    #[error("no other worker can take it now")]
    NoWorker,
    /// How the last attempt failed.
    #[error("{0}")]
    Failed(String),
    /// A worker answered something else than a stream.
    #[error("{0} answered {1}")]
    Answered(Arc<str>, StatusCode),
}
