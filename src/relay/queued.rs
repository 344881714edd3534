//! When a request waits for room at a worker, and with what.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use tracing::debug;

use super::choice::FailedWorkers;
use super::core::Relay;
use super::job::{Error, Job};
use super::metrics::Outcome;
use super::plan::Plan;
use super::request_count::RequestCount;
use super::wait::{Grant, Standing, Waiting};
use crate::fleet::Worker;
use crate::ids::Model;
use crate::observe;
use crate::prompt::PeekedBody;
use crate::queue::Settings;
use crate::traces::Event;

/// After so many waits in vain a request is answered as without a queue.
const MAX_WAITS: u32 = 3;

/// One request's waits before its first attempt.
pub(super) struct Waits {
    settings: Arc<Settings>,
    standing: Standing,
    count: u32,
    grant: Option<Grant>,
    waited: Duration,
}

impl Waits {
    /// After a choice: whether the request waits again, since its workers are gone.
    pub(super) fn goes_on(&mut self, is_chosen: bool, attempts: u32) -> bool {
        if !is_chosen {
            self.grant = None;
        }
        let goes_on = !is_chosen && attempts == 0 && self.count < MAX_WAITS;
        self.count += u32::from(goes_on);
        goes_on
    }

    pub(super) fn take_grant(&mut self) -> Option<Grant> {
        self.grant.take()
    }
}

/// Gives a grant back once the attempt counts at its worker, which it does before it first waits for anything. If it were
/// given back earlier, another request would be released for the same room.
pub(super) async fn with_grant<A: Future>(grant: Grant, attempt: A) -> A::Output {
    let mut attempt = pin!(attempt);
    let first = poll_fn(|context| Poll::Ready(attempt.as_mut().poll(context))).await;
    drop(grant);
    match first {
        Poll::Ready(output) => output,
        Poll::Pending => attempt.await,
    }
}

impl Relay {
    /// `None` if requests do not wait.
    pub(super) fn waits(
        &self,
        job: &Job<'_>,
        peek: &PeekedBody<'_>,
    ) -> Result<Option<Waits>, Error> {
        let Some(settings) = &self.queue else {
            return Ok(None);
        };
        let tenant = self.tenants.of(job.tenant);
        Ok(Some(Waits {
            standing: Standing::of(job.headers, peek, tenant, settings)?,
            settings: settings.clone(),
            count: 0,
            grant: None,
            waited: Duration::ZERO,
        }))
    }

    /// The plan of a request, after a wait if no listed worker serves its model yet.
    pub(super) async fn plan_or_wait(
        &self,
        job: &Job<'_>,
        peek: &mut PeekedBody<'_>,
        waits: Option<&mut Waits>,
    ) -> Result<Plan, Error> {
        let planned = self.plan(job.api, job.headers, peek, &job.body).await;
        let is_missing = matches!(
            planned,
            Err(Error::NoWorker { .. } | Error::UnknownModel { .. })
        );
        let Some(waits) = waits.filter(|_| is_missing) else {
            return planned;
        };
        if !self
            .wait_for_model(job, peek.model.as_deref(), waits)
            .await?
        {
            return planned;
        }
        let mut plan = self.plan(job.api, job.headers, peek, &job.body).await?;
        plan.queued = waits.waited;
        Ok(plan)
    }

    /// The end of a request that was sent to no worker.
    pub(super) fn not_queued(job: &Job<'_>, count: RequestCount, error: Error) -> Error {
        debug!(id = %job.id, %error, "request refused by the queue");
        if let Some(summary) = &job.summary {
            summary.update(|it| it.outcome = Some(Outcome::NotQueued.as_str()));
        }
        count.fail(Outcome::NotQueued);
        error
    }

    /// Waits for a worker of a model that the configuration names and that no listed worker serves. False if the model
    /// is not such a one.
    async fn wait_for_model(
        &self,
        job: &Job<'_>,
        model: Option<&str>,
        waits: &mut Waits,
    ) -> Result<bool, Error> {
        let Some(model) = model.filter(|model| self.queues.is_known(model)) else {
            return Ok(false);
        };
        // Its prompt is not known as tokens yet.
        let bytes_per_token = self.models.of(&Model::from(model)).bytes_per_token;
        let tokens = (job.body.len() as f64 / bytes_per_token) as u64;
        self.enter(job, &Model::from(model), tokens, waits).await?;
        Ok(true)
    }

    /// Waits until a worker has room for the request's first attempt, and updates the plan's workers.
    pub(super) async fn wait_for_room(
        &self,
        job: &Job<'_>,
        plan: &mut Plan,
        waits: &mut Waits,
    ) -> Result<(), Error> {
        let is_free = || {
            let settings = &waits.settings;
            self.queues.is_free(
                settings,
                &plan.group,
                plan.would_be_split(),
                plan.request.seed,
            )
        };
        if waits.grant.is_some() || waits.count >= MAX_WAITS || is_free() {
            return Ok(());
        }
        let tokens = self.tokens_to_compute(plan);
        let model = plan.group.model.clone();
        self.enter(job, &model, tokens, waits).await?;
        plan.queued = waits.waited;
        self.renew(plan);
        Ok(())
    }

    /// How long the prompt of a request that is not streamed counts as queued at its worker, since its first token is
    /// not seen. `None` without a queue: then until the answer.
    pub(super) fn unseen_prefill(&self, plan: &Plan, worker: &Worker) -> Option<Duration> {
        let settings = self.queue.as_ref().filter(|_| !plan.is_stream)?;
        let rate = settings.advanced.assumed_prefill_rate.max(1) as f64;
        let queued = worker.load.queued_tokens() as f64;
        Some(Duration::from_secs_f64(queued / rate).min(settings.advanced.stale_after))
    }

    async fn enter(
        &self,
        job: &Job<'_>,
        model: &Model,
        tokens: u64,
        waits: &mut Waits,
    ) -> Result<(), Error> {
        let entered = observe::now();
        let waiting = Waiting {
            standing: waits.standing,
            client: waits.standing.flow.unwrap_or(job.client),
            tokens,
            bytes: job.body.len() as u64,
            is_background: job.is_background,
            received: job.started,
            deadline: job.started + self.settings.request_timeout,
        };
        let _waiting = WaitTime {
            job,
            model,
            before: waits.waited,
            entered,
        };
        waits.count += 1;
        // Boxed, so that requests that find room do not carry the state of a wait.
        let granted = Box::pin(self.queues.wait(&waits.settings, model, waiting)).await;
        waits.waited += observe::now().saturating_duration_since(entered);
        waits.grant = Some(granted.map_err(Error::NotQueued)?);
        Ok(())
    }

    /// The prompt's tokens that the worker would compute that is best now.
    fn tokens_to_compute(&self, plan: &Plan) -> u64 {
        let now = observe::now();
        let candidates = plan.model.routing.advanced.prefix_candidates as usize;
        let held = self.held(plan, candidates);
        let chosen = self.choose_once(plan, &held, now, &FailedWorkers::default());
        let tokens = chosen.map(|(decode, prefill)| match prefill {
            Some(Ok(prefill)) => prefill.new_tokens,
            _ => decode.new_tokens,
        });
        tokens.unwrap_or(plan.request.prompt_tokens).into()
    }
}

/// Writes how long a request waited into its summary, also if its client disconnects meanwhile.
struct WaitTime<'a> {
    job: &'a Job<'a>,
    model: &'a Model,
    before: Duration,
    entered: Instant,
}

impl Drop for WaitTime<'_> {
    fn drop(&mut self) {
        let now = observe::now();
        let waited = now.saturating_duration_since(self.entered);
        if let Some(trace) = self.job.trace() {
            trace.event(now, Event::Queued { waited });
        }
        let waited = self.before + waited;
        if let Some(summary) = &self.job.summary {
            summary.update(|it| {
                it.queued = Some(waited);
                it.model.get_or_insert_with(|| self.model.clone());
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::task::{Context, Waker};

    use tokio::sync::oneshot;

    use super::*;

    /// Without this two requests would be released for the room of one.
    #[test]
    fn a_released_request_counts_in_the_queue_until_its_attempt_counts_at_the_worker() {
        let (grant, queue) = Grant::of_own_queue(100);
        let at_worker = Cell::new(0);
        let (answer, answered) = oneshot::channel();
        let attempt = async {
            assert_eq!(
                queue.granted(),
                100,
                "it counts nowhere when its attempt begins"
            );
            at_worker.set(100);
            answered.await.unwrap()
        };
        let mut running = pin!(with_grant(grant, attempt));
        let mut context = Context::from_waker(Waker::noop());
        assert_eq!(queue.granted(), 100);
        assert!(running.as_mut().poll(&mut context).is_pending());
        // From here on it counts once, at the worker.
        assert_eq!((queue.granted(), at_worker.get()), (0, 100));
        answer.send("answer").unwrap();
        assert_eq!(running.as_mut().poll(&mut context), Poll::Ready("answer"));
        assert_eq!(queue.granted(), 0);
    }

    #[test]
    fn a_released_request_that_is_never_sent_gives_its_room_back() {
        let (grant, queue) = Grant::of_own_queue(100);
        drop(with_grant(grant, std::future::pending::<()>()));
        assert_eq!(queue.granted(), 0);
        let (grant, queue) = Grant::of_own_queue(7);
        let mut context = Context::from_waker(Waker::noop());
        let mut at_once = pin!(with_grant(grant, std::future::ready(1)));
        assert_eq!(at_once.as_mut().poll(&mut context), Poll::Ready(1));
        assert_eq!(queue.granted(), 0);
    }
}
