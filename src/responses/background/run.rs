//! The task of one background run: carries out the steps of its [`RunState`](super::run_state::RunState).

mod encoder;
mod end;
mod engine_stream;
mod going_on;
mod in_conversation;
mod kept_chain;
mod new_history;
mod stopping;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::HeaderMap;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep};
use tracing::{debug, warn};

use self::encoder::{EndOfRun, EventEncoder};
use self::engine_stream::{EngineStream, PACE};
use self::stopping::{lease_lost, stopped};
use super::run_step::{Step, StopReason, Then};
use super::runs::RunGuard;
use super::stored_request::StoredRequest;
use super::unreadable;
use crate::ids::{ClientKey, RequestId};
use crate::limits::ChargeId;
use crate::observe;
use crate::openai::body_budget::KeptBody;
use crate::relay::{Progress, RequestContext, RequestKind, ServedBy, SummaryCell};
use crate::responses::client_request::{EngineCall, Resumed};
use crate::responses::client_state::ClientState;
use crate::responses::conversation_lock::ConversationLock;
use crate::responses::finish::Finisher;
use crate::responses::item::Ids;
use crate::responses::object::with_member;
use crate::responses::outcome::Outcome;
use crate::responses::request::CreateRequest;
use crate::responses::service::Responses;
use crate::responses::template::ResponseTemplate;
use crate::store::record::Retention;
use crate::store::{Commit, Item, Status, WriteOutcome};
use crate::traces::RequestEnd;

/// Pause before a step is repeated because the store was unreachable. The run's time limit bounds the retries.
const STORE_PAUSE: Duration = Duration::from_millis(200);
/// Bytes of stored events per read.
const READ_BYTES: u64 = 1 << 20;

/// What a run needs besides its record.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) request: StoredRequest,
    /// The client's headers; empty after a take-over.
    pub(super) headers: HeaderMap,
    pub(super) id: RequestId,
    /// With whose requests it takes turns. Nobody knows the address of the client of a run that was taken over: without
    /// tenants, those of all clients are one client's.
    pub(super) client: ClientKey,
    /// The new input items, if a conversation gets them.
    pub(super) new_items: Vec<Item>,
    pub(super) conversation: Option<ConversationLock>,
    pub(super) client_state: Option<ClientState>,
    /// The memory of the request, until the run has ended.
    pub(super) memory: KeptBody,
}

impl Job {
    pub(super) fn taken_over(request: StoredRequest, client: ClientKey, memory: KeptBody) -> Self {
        Self {
            request,
            headers: HeaderMap::new(),
            id: RequestId::new(fastrand::u128(..)),
            client,
            new_items: Vec::new(),
            conversation: None,
            client_state: None,
            memory,
        }
    }
}

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

struct Runner<'a> {
    responses: &'a Responses,
    guard: &'a RunGuard,
    encoder: EventEncoder,
    finisher: Finisher,
    end: Option<EndOfRun>,
    /// Whether it is stored and continues a response.
    continues: bool,
    /// What the conversation gets, once the end is known.
    commit: Option<Commit>,
    /// The token ids of the answer, for a replica that goes on with it. `None` if no model continues streams.
    progress: Option<Arc<Progress>>,
    /// The memory of the request, until the run has ended. A run that waits for that of a longer history has none.
    memory: KeptBody,
}

async fn run(responses: Arc<Responses>, job: Job, guard: RunGuard) {
    let request = job.request;
    let key = guard.key;
    let name = key.id.to_string();
    let Ok(create) = CreateRequest::read_stored(request.client()) else {
        // A newer release accepted this body, and the router would have to read what it cannot.
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
    let progress = keeps_tokens.then(Arc::<Progress>::default);
    let mut runner = Runner {
        responses: &responses,
        guard: &guard,
        encoder: EventEncoder::new(template, responses.event_options(), signer),
        finisher,
        end: None,
        continues: create.store && request.meta(&name).previous.is_some(),
        commit: None,
        progress: progress.clone(),
        memory: job.memory,
    };
    let tracer = &responses.relay.tracer;
    let trace = tracer.begin_background(request.create_span());
    if let (Some(trace), Some(id)) = (&trace, request.conversation_id()) {
        trace.set_conversation(id);
    }
    let summary = trace.map(|trace| SummaryCell::traced(Some(trace)));
    let limit = responses.background.settings.run_timeout;
    let until = Instant::now() + limit;
    // With another history, if the one that it was created with is outdated.
    let mut current = Cow::Borrowed(&request);
    let continues = runner.continues;
    loop {
        tokio::select! {
            biased;
            reason = stopped(&responses, &guard, until) => guard.run.state.lock().on_stop(reason),
            () = kept_chain::keep(&responses, key, continues) => {}
            () = async {
                if let Some(anew) = runner.set_up_conversation(&current).await {
                    current = Cow::Owned(anew);
                }
                let context = RequestContext {
                    charge: ChargeId::Response(key.id),
                    response: Some(key.id),
                    kind: RequestKind::Background,
                    deadline: Some(until.into_std()),
                    summary: summary.clone(),
                    ..RequestContext::new(job.id, job.client, key.tenant, observe::now())
                };
                let call = EngineCall {
                    is_salted: current.salt.is_some(),
                    progress: progress.as_ref(),
                    ..EngineCall::new(context, &job.headers, current.input())
                };
                runner.generate(&create, &current, &name, &call).await;
            } => {}
        }
        // Dropping `generate` has closed the connection to the engine.
        if let Some(requested) = guard.run.cancel_requested.get() {
            let took = observe::now().saturating_duration_since(*requested);
            let seconds = &responses.background.metrics.cancel_stop_seconds;
            seconds.observe(took.as_secs_f64());
        }
        tokio::select! {
            biased;
            () = lease_lost(&guard) => guard.run.state.lock().on_stop(StopReason::LeaseLost),
            () = runner.store_end() => {}
            () = sleep(limit) => {
                warn!(response_id = %key.id, "end of a background response not stored within run_timeout; another replica takes it over");
            }
        }
        if !guard.run.state.lock().has_old_history() {
            break;
        }
        runner.begin_again();
    }
    let reason = guard.run.state.lock().stop_reason;
    if let Some(reason) = reason {
        let stopped = &responses.background.metrics.stopped;
        stopped.with_label_values(&[reason.as_str()]).inc();
    }
    if let Some(trace) = summary.as_ref().and_then(SummaryCell::trace) {
        let status = runner.end.as_ref().map(|end| end.outcome.status);
        trace.end(observe::now(), end_of_trace(name, reason, status));
    }
    let is_given_up = guard.run.state.lock().is_given_up;
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

impl Runner<'_> {
    /// The end was refused, and nobody has read any of it.
    fn begin_again(&mut self) {
        debug!(response_id = %self.guard.key.id, "another response was added to the conversation first; generating again");
        self.restart();
    }

    fn restart(&mut self) {
        self.responses.background.metrics.restarted.inc();
        self.encoder.restart();
        if let Some(progress) = &self.progress {
            progress.restart();
        }
    }

    fn next(&self) -> Step {
        self.guard.run.state.lock().next()
    }

    /// Has an engine generate the response and stores the events as they arrive. Dropping this future closes
    /// the connection to the engine.
    async fn generate(
        &mut self,
        create: &CreateRequest<'_>,
        request: &StoredRequest,
        id: &str,
        call: &EngineCall<'_>,
    ) {
        let (store, key, fence) = (&self.responses.store, self.guard.key, self.guard.run.fence);
        let state = &self.guard.run.state;
        let updates = &self.guard.run.updates;
        let attempts_max = self.responses.background.settings.max_attempts;
        let mut engine: Option<EngineStream> = None;
        // What another replica wrote.
        let mut resumed: Option<Resumed> = None;
        let mut attempts = 1;
        loop {
            let then = match self.next() {
                Step::ReadEngine if !self.encoder.is_announced => {
                    state.lock().on_events(&self.encoder.announce());
                    Then::Continue
                }
                Step::ReadEngine => {
                    let Some(stream) = &mut engine else {
                        let call = EngineCall {
                            resumed: resumed.as_ref(),
                            ..call.clone()
                        };
                        let responses = self.responses;
                        let answer =
                            responses.wait_for_engine(create, request, id, &call, &mut attempts);
                        let answer = answer.await;
                        if let Some(resumed) = &resumed {
                            self.on_resumed(resumed, answer.as_ref().err());
                        }
                        match answer {
                            Ok(answer) => {
                                let served_by = answer.extensions().get::<ServedBy>();
                                self.finisher.worker = served_by.map(|worker| worker.0.clone());
                                engine = Some(EngineStream::new(answer.into_body()));
                            }
                            Err(error) => {
                                let (events, outcome) = self.encoder.fail_refused(&error);
                                self.conclude(&events, outcome).await;
                            }
                        }
                        continue;
                    };
                    let is_over = stream.read(PACE, || updates.receiver_count() > 0).await;
                    let (events, outcome) = self.encoder.push(&stream.take());
                    state.lock().on_engine_started();
                    let is_lost = outcome.as_ref().map_or(is_over, Outcome::is_engine_lost);
                    // If no reader has received any of it, another engine may do better.
                    if is_lost && attempts < attempts_max && state.lock().restart() {
                        debug!(response_id = %key.id, attempts, "engine lost before any output was seen; trying another");
                        self.restart();
                        attempts += 1;
                        engine = None;
                        sleep(STORE_PAUSE).await;
                        continue;
                    }
                    let (events, outcome) = match outcome {
                        Some(outcome) => (events, outcome),
                        None if !is_over => {
                            self.on_output(&events);
                            continue;
                        }
                        None => self.encoder.finish(events),
                    };
                    let is_failed = outcome.status == Status::Failed;
                    self.conclude(&events, outcome).await;
                    if let Some(stream) = engine.take().filter(|_| !is_failed) {
                        stream.drain().await;
                    }
                    return;
                }
                Step::MarkStarted => {
                    let result = store.start(key, fence).await;
                    state.lock().on_started(&result)
                }
                Step::Append(batch) => {
                    let (last, bytes) = (batch.last, batch.bytes.len() as u64);
                    let result = store.append(key, fence, batch).await;
                    if let Err(error) = &result
                        && error.retry_after().is_none()
                    {
                        warn!(response_id = %key.id, %error, "events of a background response not stored; the response fails");
                    }
                    if let Ok(WriteOutcome::Done | WriteOutcome::Overflow) = result {
                        self.responses.background.metrics.event_bytes.inc_by(bytes);
                    }
                    if result == Ok(WriteOutcome::Overflow) && !state.lock().log.is_cut() {
                        self.responses.background.metrics.logs_cut.inc();
                    }
                    let then = state.lock().on_appended(last, &result);
                    self.guard.run.updates.send_modify(|count| *count += 1);
                    then
                }
                Step::ReadStored { after } => {
                    let result = store.events_with_tokens(key, after, READ_BYTES).await;
                    state.lock().on_stored_events(&result)
                }
                Step::GoOn => {
                    resumed = self.go_on();
                    state.lock().on_set_up(resumed.is_some());
                    Then::Continue
                }
                _ => return,
            };
            if then == Then::RetryLater {
                sleep(STORE_PAUSE).await;
            }
        }
    }

    /// Builds the final events and everything that is stored at the end.
    async fn conclude(&mut self, events: &[u8], mut outcome: Outcome) {
        // At once: the run may be stopped while this waits, and what is written then has the numbers after these.
        self.guard.run.state.lock().on_events(events);
        let mut last = self.encoder.compose(&self.finisher, &mut outcome).await;
        let mut retention = Retention::Stored;
        if self.continues && outcome.status.is_continuable() {
            retention = kept_chain::at_end(self.responses, self.guard.key).await;
        }
        if retention == Retention::Ephemeral {
            last.response = with_member(&last.response, "store", "false");
        }
        let mut state = self.guard.run.state.lock();
        let end = self.encoder.conclude(&mut state, last, outcome, retention);
        self.end = Some(end);
    }
}
