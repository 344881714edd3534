//! The task of one background run: takes one step of its [`RunState`](super::run_state::RunState) after the other.

mod encoder;
mod end;
mod engine_stream;
mod generating;
mod going_on;
mod in_conversation;
mod job;
mod kept_chain;
mod new_history;
mod stopping;

use std::borrow::Cow;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::HeaderMap;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, sleep_until};
use tracing::warn;

use self::encoder::{EndOfRun, EventEncoder};
use self::engine_stream::EngineStream;
pub(super) use self::job::Job;
use self::stopping::{lease_lost, stopped};
use super::run_step::{Step, StopReason, Then};
use super::runs::RunGuard;
use super::stored_request::StoredRequest;
use super::unreadable;
use crate::ids::ClientKey;
use crate::limits::ChargeId;
use crate::observe;
use crate::relay::{Progress, RequestContext, RequestKind, SummaryCell};
use crate::responses::client_request::Resumed;
use crate::responses::finish::Finisher;
use crate::responses::item::Ids;
use crate::responses::object::with_member;
use crate::responses::outcome::Outcome;
use crate::responses::request::CreateRequest;
use crate::responses::service::Responses;
use crate::responses::template::ResponseTemplate;
use crate::store::record::Retention;
use crate::store::{CancelledOutput, Commit, Status};
use crate::traces::RequestEnd;

/// Pause before a step is repeated because the store was unreachable. The run's time limit bounds the retries.
const STORE_PAUSE: Duration = Duration::from_millis(200);
/// Bytes of stored events per read.
const READ_BYTES: u64 = 1 << 20;

/// Spawns a run on the client's I/O thread. The drain waits for it; when the drain is over the run fails or is released.
pub(super) fn spawn(responses: Arc<Responses>, job: Job, guard: RunGuard) {
    let tracked = responses.tasks.clone().track(run(responses, job, guard));
    drop(Handle::current().spawn(tracked));
}

/// As [`spawn`], for a run that was taken over: no I/O thread is its client's.
pub(super) fn spawn_taken_over(responses: Arc<Responses>, job: Job, guard: RunGuard) {
    let io_threads = responses.io_threads.clone();
    let tracked = responses.tasks.clone().track(run(responses, job, guard));
    io_threads.spawn(tracked);
}

struct Runner<'a, 'r> {
    responses: &'a Responses,
    guard: &'a RunGuard,
    create: &'a CreateRequest<'r>,
    /// The response's id.
    name: &'a str,
    /// The client's headers.
    headers: &'a HeaderMap,
    /// What an engine is asked: with another history, if the one that it was created with is outdated.
    request: Cow<'a, StoredRequest>,
    context: RequestContext,
    encoder: EventEncoder,
    finisher: Finisher,
    /// The answer of the engine that was asked last. Dropping it closes the connection to the engine.
    engine: Option<EngineStream>,
    /// How many engines were asked on this history.
    attempts: u32,
    /// What another replica wrote.
    resumed: Option<Resumed>,
    end: Option<EndOfRun>,
    /// Whether it is stored and continues a response.
    continues: bool,
    /// What the conversation gets, once the end is known.
    commit: Option<Commit>,
    /// The token ids of the answer, for a replica that goes on with it. `None` if no model continues streams.
    progress: Option<Arc<Progress>>,
    /// The object of a cancelled response, as it was read.
    cancelled: Bytes,
    /// What is stored as its output.
    partial: Option<CancelledOutput>,
}

async fn run(responses: Arc<Responses>, job: Job, guard: RunGuard) {
    let request = job.request;
    let key = guard.key;
    let name = key.id.to_string();
    let Ok(create) = CreateRequest::read_without_required(request.client()) else {
        // A newer release accepted this body.
        return unreadable::end(&responses, &guard).await;
    };
    let reader = responses.state_reader(key.tenant, &create.model);
    let signer = responses.state_signer(&create, &reader, &name);
    let template = ResponseTemplate::new(&create, &request.meta(&name), Ids::of(key.id));
    let finisher = Finisher {
        responses: responses.clone(),
        key,
        is_stored: false,
        chain: None,
        model: (&*create.model).into(),
        worker: None,
        new_items: job.new_items,
        input: Bytes::new(),
        conversation: job.conversation,
        client_state: job.client_state,
        may_withhold: false,
        in_flight: responses.metrics.begin_background(),
        memory: None,
    };
    // A response whose events are not stored is run again.
    let keeps_tokens = create.stream && responses.relay.continues_streams();
    let tracer = responses.relay.tracer();
    let trace = tracer.begin_background(request.create_span());
    if let (Some(trace), Some(id)) = (&trace, request.conversation_id()) {
        trace.set_conversation(id);
    }
    let summary = trace.map(|trace| SummaryCell::traced(Some(trace)));
    let client = ClientKey::of_tenant(key.tenant);
    let mut runner = Runner {
        responses: &responses,
        guard: &guard,
        create: &create,
        name: &name,
        headers: &job.headers,
        request: Cow::Borrowed(&request),
        context: RequestContext {
            charge: ChargeId::Response(key.id),
            response: Some(key.id),
            kind: RequestKind::Background,
            summary: summary.clone(),
            ..RequestContext::new(job.id, client, key.tenant, observe::now())
        },
        encoder: EventEncoder::new(template, responses.event_options(), signer),
        finisher,
        engine: None,
        attempts: 1,
        resumed: None,
        end: None,
        continues: create.store && request.meta(&name).previous.is_some(),
        commit: None,
        progress: keeps_tokens.then(Arc::<Progress>::default),
        cancelled: Bytes::new(),
        partial: None,
    };
    if runner.finisher.conversation.is_none() && request.conversation().is_some() {
        guard.run.state.lock().on_lock_taken_over();
    }
    runner.drive().await;
    let reason = guard.run.state.lock().stop_reason();
    if let Some(reason) = reason {
        let stopped = &responses.background.metrics.stopped;
        stopped.with_label_values(&[reason.as_str()]).inc();
    }
    if let Some(trace) = summary.as_ref().and_then(SummaryCell::trace) {
        let status = runner.end.as_ref().map(|end| end.outcome.status);
        let end = end_of_trace(key.id.to_string(), reason, status);
        trace.end(observe::now(), end);
    }
    let is_given_up = guard.run.state.lock().is_given_up();
    let lock = runner.finisher.conversation.take();
    in_conversation::leave(&responses, is_given_up, lock, runner.commit.take()).await;
}

fn end_of_trace(id: String, stopped: Option<StopReason>, status: Option<Status>) -> RequestEnd {
    let failed = status.filter(|status| *status != Status::Completed);
    RequestEnd {
        error: stopped
            .map(StopReason::as_str)
            .or(failed.map(Status::as_str)),
        response: Some(id),
        ..RequestEnd::default()
    }
}

impl Runner<'_, '_> {
    /// Takes steps until nothing is left to do, or the end cannot be stored for too long.
    async fn drive(&mut self) {
        let (responses, guard) = (self.responses, self.guard);
        let (state, continues) = (&guard.run.state, self.continues);
        let limit = responses.background.settings.run_timeout;
        let until = Instant::now() + limit;
        let mut stop = pin!(stopped(responses, guard, until));
        let mut kept = pin!(kept_chain::keep(responses, guard.key, continues));
        let mut lost = pin!(lease_lost(guard));
        // Once the run ends: until when its end is tried to be stored.
        let mut end_until = None;
        loop {
            let (step, may_be_stopped) = {
                let run = state.lock();
                (run.next(), run.may_be_stopped())
            };
            match end_until {
                None if !may_be_stopped => {
                    self.on_generated();
                    end_until = Some(Instant::now() + limit);
                }
                Some(_) if may_be_stopped => {
                    self.begin_on_new_history();
                    stop.set(stopped(responses, guard, until));
                    kept.set(kept_chain::keep(responses, guard.key, continues));
                    end_until = None;
                }
                None | Some(_) => {}
            }
            if step == Step::Done {
                return;
            }
            let taken = self.take(step);
            match end_until {
                None => tokio::select! {
                    biased;
                    reason = &mut stop => state.lock().on_stop(reason),
                    () = &mut kept => {}
                    () = taken => {}
                },
                Some(end_until) => tokio::select! {
                    biased;
                    () = &mut lost => state.lock().on_stop(StopReason::LeaseLost),
                    () = taken => {}
                    () = sleep_until(end_until) => {
                        warn!(response_id = %guard.key.id, "end of a background response not stored within run_timeout; another replica takes it over");
                        return;
                    }
                },
            }
        }
    }

    /// Takes one step, and pauses if it is to be repeated.
    async fn take(&mut self, step: Step) {
        let (store, state) = (&self.responses.store, &self.guard.run.state);
        let (key, fence) = (self.guard.key, self.guard.run.fence);
        let then = match step {
            Step::ResumeLock => self.resume_lock().await,
            Step::ReadHistory => self.read_history().await,
            Step::ReadEngine => self.read_engine().await,
            Step::MarkStarted => {
                let result = store.start(key, fence).await;
                state.lock().on_started(&result)
            }
            Step::Append(batch) => self.append(batch).await,
            Step::ReadStored { after, with_tokens } => {
                let result = if with_tokens {
                    store.events_with_tokens(key, after, READ_BYTES).await
                } else {
                    store.events(key, after, READ_BYTES).await
                };
                state.lock().on_stored_events(&result)
            }
            Step::GoOn => self.go_on(),
            Step::Fail {
                reason,
                has_stored_output,
            } => self.fail(reason, has_stored_output).await,
            Step::FailInstead {
                number,
                reason,
                keeps_output,
            } => self.fail_instead(number, reason, keeps_output).await,
            Step::Finalize(batch) => self.finalize(batch).await,
            Step::ReadCancelled => self.read_cancelled().await,
            Step::CancelAgain => self.cancel_again().await,
            Step::StorePartial => self.store_partial().await,
            Step::Release => self.release().await,
            Step::Done => Then::Continue,
        };
        if then == Then::RetryLater {
            sleep(STORE_PAUSE).await;
        }
    }

    /// The run ends: closes the connection to the engine, if there is one.
    fn on_generated(&mut self) {
        self.engine = None;
        if let Some(requested) = self.guard.run.cancel_requested.get() {
            let took = observe::now().saturating_duration_since(*requested);
            let seconds = &self.responses.background.metrics.cancel_stop_seconds;
            seconds.observe(took.as_secs_f64());
        }
    }

    /// Builds the final events and everything that is stored at the end.
    async fn conclude(&mut self, events: &[u8], mut outcome: Outcome) {
        let mut last = self.encoder.compose(&self.finisher, &mut outcome).await;
        let mut retention = Retention::Stored;
        if self.continues && outcome.status.is_continuable() {
            retention = kept_chain::at_end(self.responses, self.guard.key).await;
        }
        if retention == Retention::Ephemeral {
            last.response = with_member(&last.response, "store", "false");
        }
        let mut state = self.guard.run.state.lock();
        state.on_events(events);
        let end = self.encoder.conclude(&mut state, last, outcome, retention);
        self.end = Some(end);
    }
}
