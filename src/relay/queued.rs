//! When a request waits for room at a worker, and with what.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::HeaderMap;
use tracing::debug;

use super::choose::chosen::{self, Chosen, Split};
use super::choose::failed_workers::FailedWorkers;
use super::choose::promised::Promised;
use super::core::Relay;
use super::job::{Error, FailedRequest, Job};
use super::plan::Plan;
use super::request::batch_line::BatchLine;
use super::request::context::RequestKind;
use super::request_count::RequestCount;
use super::wait::{self, Grant, Placed, Placing, Planned, Standing, WaitsFor};
use crate::ids::{Model, Tenant, WorkerId};
use crate::observe;
use crate::prompt::PeekedBody;
use crate::queue::{Refusal, Request, Settings};
use crate::routing::{Expected, PREFIX_CANDIDATES};
use crate::traces::Event;

/// After so many waits, for workers that were gone then or refused its key, a request goes on as without a queue.
const MAX_WAITS: u32 = 3;

/// Without a queue the prompt of a request that is not streamed counts as queued no longer than this. It is the queue's
/// default.
const STALE_AFTER: Duration = Duration::from_secs(30);

/// One request's waits before its first attempt, and before those after a refused key.
pub(super) struct Waits {
    settings: Arc<Settings>,
    standing: Standing,
    count: u32,
    pub(super) grant: Option<Box<Grant>>,
    /// Whether it has the choice by which it was released.
    is_chosen: bool,
    waited: Duration,
    /// See [`Request::has_lost_target`].
    has_lost_target: bool,
}

impl Waits {
    /// No worker was chosen: whether the request waits again, since its workers are gone.
    pub(super) fn goes_on(&mut self, attempts: u32) -> bool {
        self.grant = None;
        let goes_on = attempts == 0 && self.count < MAX_WAITS;
        self.count += u32::from(goes_on);
        goes_on
    }

    /// The choice by which the request was released.
    fn take_chosen(&mut self, plan: &Plan) -> Option<Chosen> {
        let chosen = self.grant.as_mut()?.take_chosen(&plan.group);
        self.is_chosen = chosen.is_some();
        chosen
    }
}

/// Gives a grant back once the attempt counts at its worker, which it does before it first waits for anything. If it were
/// given back earlier, another request would be released for the same room.
/// The same is true of a batch's `line`, which does not count as entering any more, but at the worker.
pub(super) fn with_grant<A: Future + Unpin>(
    mut grant: Option<Box<Grant>>,
    mut line: Option<(&BatchLine, WorkerId)>,
    mut attempt: A,
) -> impl Future<Output = A::Output> {
    poll_fn(move |context| {
        let polled = Pin::new(&mut attempt).poll(context);
        drop(grant.take());
        if let Some((line, worker)) = line.take() {
            line.count_at(worker);
        }
        polled
    })
}

impl Relay {
    /// The priority of a tenant's request of which only the headers are known.
    pub fn priority_of(&self, tenant: Tenant, headers: &HeaderMap) -> i32 {
        let profile = self.tenants().of(tenant);
        let standing = self.queue.as_ref().and_then(|settings| {
            Standing::of(headers, &PeekedBody::default(), profile, settings).ok()
        });
        standing.map_or(profile.priority, |standing| standing.priority)
    }

    /// What workers were promised before a request's first choice, which is behind that.
    pub(super) fn promised_before(&self, waits: &Waits) -> Option<Arc<Promised>> {
        match &waits.grant {
            None => self.queues().promised(),
            Some(grant) if waits.is_chosen => {
                let released = self.queues().released();
                Some(Arc::new(grant.others(released)))
            }
            // It was released without a choice, and chose by the load alone.
            Some(_) => None,
        }
    }

    /// `None` if requests do not wait.
    pub(super) fn waits(
        &self,
        job: &Job<'_>,
        peek: &PeekedBody<'_>,
    ) -> Result<Option<Waits>, Error> {
        let Some(settings) = &self.queue else {
            return Ok(None);
        };
        let tenant = self.tenants().of(job.context.tenant);
        let standing = match job.context.kind {
            RequestKind::Batch(_) => Standing::LAST,
            RequestKind::Interactive | RequestKind::Background => {
                Standing::of(job.headers, peek, tenant, settings)?
            }
        };
        Ok(Some(Waits {
            standing,
            settings: settings.clone(),
            count: 0,
            grant: None,
            is_chosen: false,
            waited: Duration::ZERO,
            has_lost_target: false,
        }))
    }

    /// The plan of a request, after a wait if no listed worker serves its model yet.
    pub(super) async fn plan_or_wait(
        &self,
        job: &Job<'_>,
        peek: &mut PeekedBody<'_>,
        waits: Option<&mut Waits>,
    ) -> Result<Arc<Plan>, Error> {
        let planned = self.plan(job.api, job.headers, peek, &job.body).await;
        let is_missing = matches!(
            planned,
            Err(Error::NoWorker { .. } | Error::UnknownModel { .. })
        );
        let Some(waits) = waits.filter(|_| is_missing) else {
            return planned;
        };
        let has_come = {
            let waiting = pin!(self.wait_for_model(job, peek.model.as_deref(), waits));
            self.unless_drained(job, waiting).await
        };
        if !has_come.unwrap_or_else(|| Err(Error::NotQueued(Refusal::DRAINING)))? {
            return planned;
        }
        let mut plan = self.plan(job.api, job.headers, peek, &job.body).await?;
        Plan::own(&mut plan).queued = waits.waited;
        Ok(plan)
    }

    /// What `future` comes to; `None` if the drain ends the request before. A client that leaves drops `future` as well.
    pub(super) async fn unless_drained<F: Future>(
        &self,
        job: &Job<'_>,
        future: Pin<&mut F>,
    ) -> Option<F::Output> {
        match self.last_part(&job.context.kind) {
            Some(last_part) => last_part.cuts_off(future).await,
            None => Some(future.await),
        }
    }

    /// The end of a request that was sent to no worker, or that the drain ends.
    pub(super) fn not_queued(job: &Job<'_>, count: RequestCount, error: Error) -> FailedRequest {
        debug!(id = %job.context.id, %error, "request refused by the queue, or by the drain");
        if let Some(summary) = &job.context.summary {
            summary.update(|line| line.outcome = Some(error.outcome().as_str()));
        }
        let model = Some(count.model.name.clone());
        count.fail();
        FailedRequest { error, model }
    }

    /// Waits for a worker of a model that the configuration names and that no listed worker serves. False if the model
    /// is not such a one.
    async fn wait_for_model(
        &self,
        job: &Job<'_>,
        model: Option<&str>,
        waits: &mut Waits,
    ) -> Result<bool, Error> {
        let is_waited_for = |model: &&str| {
            let waits_at_all = !waits.settings.no_worker_timeout.is_zero();
            waits_at_all && self.queues().is_known(model)
        };
        let Some(model) = model.filter(is_waited_for) else {
            return Ok(false);
        };
        // Its prompt is not known as tokens yet.
        let bytes_per_token = self.models.of(&Model::from(model)).bytes_per_token;
        let tokens = (job.body.len() as f64 / bytes_per_token) as u64;
        let request = self.waiting_request(job, waits, tokens);
        self.enter(job, &Model::from(model), request, None, waits)
            .await?;
        Ok(true)
    }

    /// Waits until there is room for the request, if there is none. Returns the choice for its next attempt, if one was
    /// made.
    pub(super) async fn find_room(
        self: &Arc<Self>,
        job: &Job<'_>,
        plan: &mut Arc<Plan>,
        failed: &FailedWorkers,
        waits: Option<&mut Waits>,
    ) -> Result<Option<Chosen>, Error> {
        let promised = self.queues().promised();
        let promised = promised.as_deref();
        let line = job.context.kind.batch_line();
        let for_line = line.and_then(|line| self.find_for_line(line, plan, failed, promised));
        // One that was released and not sent yet, or that has waited often enough, does not wait again. Its first
        // attempt has used up its grant.
        let may_wait = |waits: &&mut Waits| waits.grant.is_none() && waits.count < MAX_WAITS;
        let Some(waits) = waits.filter(may_wait) else {
            return Ok(for_line);
        };
        let chosen = for_line.or_else(|| self.choose_behind(plan, failed, promised));
        if self.may_pass(plan, chosen.as_ref(), promised, &waits.settings) {
            return Ok(chosen);
        }
        // Boxed, so that requests that do not wait do not carry the state of a wait.
        Box::pin(self.wait_for_room(job, plan, failed, chosen, waits)).await
    }

    /// The choice for a line: where requests of people run, it keeps to workers that have room, for it was let in because
    /// of that. `None`: none of these can have it.
    fn find_for_line(
        &self,
        line: &BatchLine,
        plan: &Plan,
        failed: &FailedWorkers,
        promised: Option<&Promised>,
    ) -> Option<Chosen> {
        let full = self.full_beside_people(&plan.group, &line.running());
        let failed = failed.without(&full.decode, &full.prefill);
        let chosen = self.choose_behind(plan, &failed, promised)?;
        // Those that have room may be no pair.
        let is_whole = matches!(chosen.1, Split::Whole(_));
        let lacks_pair = is_whole && matches!(plan.legs, Some(Ok(_))) && full.has_any();
        (!lacks_pair).then_some(chosen)
    }

    /// Where a request would be sent now, behind what is promised.
    fn choose_behind(
        &self,
        plan: &Plan,
        failed: &FailedWorkers,
        promised: Option<&Promised>,
    ) -> Option<Chosen> {
        let chooser = self.chooser();
        let prefixes = chooser.cached_prefixes(plan, PREFIX_CANDIDATES);
        chooser.choose_once(plan, &prefixes, observe::now(), failed, promised)
    }

    /// Whether a request with this plan would be sent at once.
    pub(super) fn has_room(&self, plan: &Plan, settings: &Settings) -> bool {
        let promised = self.queues().promised();
        let promised = promised.as_deref();
        let chosen = self.choose_behind(plan, &FailedWorkers::default(), promised);
        self.may_pass(plan, chosen.as_ref(), promised, settings)
    }

    /// Whether a request may be sent at once where it was `chosen` to go: there is room, behind what is promised to that
    /// worker. A request whose prompt is not computed needs none.
    fn may_pass(
        &self,
        plan: &Plan,
        chosen: Option<&Chosen>,
        promised: Option<&Promised>,
        settings: &Settings,
    ) -> bool {
        let Some(chosen) = chosen else {
            // None of the workers takes it, for what it is: that is answered at once. If none is up, it waits for one.
            return settings.no_worker_timeout.is_zero() || self.queues().is_up(&plan.group);
        };
        let decision = chosen::computes(chosen);
        let place = (&**plan.group.worker(decision.index), decision.rank);
        let queues = self.queues();
        !plan.api.computes_prompt() || queues.may_pass(settings, &plan.group.model, place, promised)
    }

    /// Waits until there is room for the request's next attempt where it costs the least, which was `chosen` now.
    /// Returns the choice by which it was released.
    async fn wait_for_room(
        self: &Arc<Self>,
        job: &Job<'_>,
        plan: &mut Arc<Plan>,
        failed: &FailedWorkers,
        chosen: Option<Chosen>,
        waits: &mut Waits,
    ) -> Result<Option<Chosen>, Error> {
        let decision = chosen.as_ref().map(chosen::computes);
        let tokens = decision.map_or(plan.request.prompt_tokens, |decision| decision.new_tokens);
        let compute = f64::from(tokens) * plan.group.speed.mean_prompt_token.get();
        let request = Request {
            compute: Duration::try_from_secs_f64(compute).unwrap_or_default(),
            has_room: decision.is_some_and(|decision| {
                let worker = plan.group.worker(decision.index);
                let promised = self.queues().promised();
                wait::has_room(worker, decision.rank, &waits.settings, promised.as_deref())
            }),
            ..self.waiting_request(job, waits, tokens.into())
        };
        let model = plan.group.model.clone();
        // So it is not unseen at its first turn: only so many of those are looked at each time.
        let waits_for = chosen.map(|chosen| WaitsFor {
            at: observe::now(),
            worker: plan.group.worker(chosen::computes(&chosen).index).id,
            promises: chosen::promises(plan.request.prompt_tokens, &plan.group, &chosen),
        });
        let planned = Planned {
            placing: self.placing(plan.clone(), failed.clone()),
            waits_for,
        };
        self.enter(job, &model, request, Some(planned), waits)
            .await?;
        // Whoever released the request has dropped its part.
        let own = Arc::get_mut(plan).ok_or(Error::NotQueued(Refusal::DRAINING))?;
        own.queued = waits.waited;
        self.renew(plan);
        Ok(waits.take_chosen(plan))
    }

    /// Looks where a waiting request would be sent.
    fn placing(self: &Arc<Self>, plan: Arc<Plan>, failed: FailedWorkers) -> Placing {
        let relay = self.clone();
        Box::new(move |now, promised, stalled| {
            // Workers may have come and gone meanwhile.
            let group = relay
                .fleet()
                .snapshot()
                .models
                .get(&plan.group.model)
                .cloned()?;
            let prefixes = relay
                .chooser()
                .cached_prefixes_in(&plan, &group, PREFIX_CANDIDATES);
            let mut failed = failed.clone();
            failed.exclude_all(stalled.iter().copied());
            let chosen =
                relay
                    .chooser()
                    .choose_once(&plan, &prefixes, now, &failed, Some(promised))?;
            let promises = chosen::promises(plan.request.prompt_tokens, &group, &chosen);
            Some(Placed {
                group,
                chosen,
                promises,
            })
        })
    }

    /// How long the prompt of a request that is not streamed counts as queued at its worker, since its first token is
    /// not seen: until it is `expected`.
    pub(super) fn unseen_prefill(&self, plan: &Plan, expected: &Expected) -> Option<Duration> {
        let max = match &self.queue {
            _ if plan.is_stream => return None,
            Some(settings) => settings.stale_after,
            None => STALE_AFTER,
        };
        let after = Duration::try_from_secs_f64(expected.first_token).unwrap_or(max);
        Some(after.min(max))
    }

    /// A request that waits, with so many tokens to compute, to the queue.
    fn waiting_request(&self, job: &Job<'_>, waits: &Waits, tokens: u64) -> Request {
        let entered = observe::now();
        Request {
            priority: waits.standing.priority,
            client: waits.standing.flow.unwrap_or(job.context.client),
            tokens,
            compute: Duration::ZERO,
            bytes: job.body.len() as u64,
            client_bytes: job.reserved_bytes,
            received: job.context.started,
            entered,
            since: entered,
            ttft_target: waits.standing.ttft_target,
            is_background: !job.context.kind.is_interactive(),
            deadline: self.deadline(&job.context),
            has_room: false,
            lacks_worker: false,
            has_lost_target: waits.has_lost_target,
        }
    }

    async fn enter(
        &self,
        job: &Job<'_>,
        model: &Model,
        request: Request,
        planned: Option<Planned>,
        waits: &mut Waits,
    ) -> Result<(), Error> {
        let entered = request.entered;
        let _waiting = WaitTime {
            job,
            model,
            entered,
        };
        waits.count += 1;
        // Boxed, so that requests that find room do not carry the state of a wait.
        let granted = Box::pin(self.queues().wait(&waits.settings, model, request, planned)).await;
        waits.waited += observe::now().saturating_duration_since(entered);
        let grant = granted.map_err(Error::NotQueued)?;
        waits.has_lost_target |= grant.has_lost_target;
        waits.grant = Some(Box::new(grant));
        Ok(())
    }
}

/// Writes how long a request waited into its summary, also if its client disconnects meanwhile.
struct WaitTime<'a> {
    job: &'a Job<'a>,
    model: &'a Model,
    entered: Instant,
}

impl Drop for WaitTime<'_> {
    fn drop(&mut self) {
        let now = observe::now();
        let waited = now.saturating_duration_since(self.entered);
        if let Some(trace) = self.job.context.trace() {
            trace.event(now, Event::Queued { waited });
        }
        if let Some(summary) = &self.job.context.summary {
            summary.update(|summary| summary.on_waited(self.model, waited));
        }
    }
}

#[cfg(test)]
mod tests;
