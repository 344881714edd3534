//! One background response, from its first event to its end: does what its course says.

mod encoder;
mod engine_stream;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use bytes::Bytes;
use hyper::HeaderMap;
use tokio::runtime::Handle;
use tokio::time::sleep;
use tracing::warn;

use self::encoder::{End, EventEncoder};
use self::engine_stream::EngineStream;
use super::run_state::{Step, StopReason, Then};
use super::stored_request::StoredRequest;
use super::{RunGuard, unreadable};
use crate::ids::RequestId;
use crate::observe;
use crate::relay::ServedBy;
use crate::responses::client_state::StateReader;
use crate::responses::conversation_lock::ConversationLock;
use crate::responses::finish::{ClientState, Finisher};
use crate::responses::item::Ids;
use crate::responses::object::{Outcome, ResponseTemplate};
use crate::responses::request::CreateRequest;
use crate::responses::{RequestContext, Responses};
use crate::store::{self, CancelledOutput, Item, Status, WriteOutcome};

/// Parent the store is asked again that did not answer. The lease ends it.
const STORE_PAUSE: Duration = Duration::from_millis(200);
/// Of another replica's events, read at once.
const RECALL_BYTES: u64 = 1 << 20;

/// What is to be done for one response.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) kept: StoredRequest,
    /// The client's.
    pub(super) headers: HeaderMap,
    pub(super) id: RequestId,
    pub(super) own: Vec<Item>,
    pub(super) conversation: Option<ConversationLock>,
    pub(super) client_state: Option<ClientState>,
}

impl Job {
    pub(super) fn adopted(kept: StoredRequest) -> Self {
        Self {
            kept,
            headers: HeaderMap::new(),
            id: RequestId::new(fastrand::u128(..)),
            own: Vec::new(),
            conversation: None,
            client_state: None,
        }
    }
}

/// Runs it until its end; the drain waits for it, and it ends soon after that is over.
pub(super) fn spawn(responses: Arc<Responses>, job: Job, guard: RunGuard) {
    let tracked = responses.tasks.clone().track(run(responses, job, guard));
    drop(Handle::current().spawn(tracked));
}

struct Runner<'a> {
    responses: &'a Responses,
    guard: &'a RunGuard,
    words: EventEncoder,
    finish: Finisher,
    end: Option<End>,
}

async fn run(responses: Arc<Responses>, job: Job, guard: RunGuard) {
    let kept = job.kept;
    let key = guard.key;
    let text = key.id.to_string();
    let Ok(create) = CreateRequest::read_count(kept.client()) else {
        // Of a release that read more of a body than this one.
        return unreadable::end(&responses, &guard).await;
    };
    let state_reader = StateReader {
        key_ring: &responses.key_ring,
        tenant: key.tenant,
        now_s: observe::unix_s().unsigned_abs(),
        model: &create.model,
        plain_bytes: AtomicU64::new(0),
    };
    let state_signer = job
        .client_state
        .as_ref()
        .map(|client_state| client_state.state_signer.clone());
    let state_signer =
        state_signer.or_else(|| responses.state_signer(&create, &state_reader, &text));
    let template = ResponseTemplate::new(&create, &kept.meta(&text), Ids::of(key.id));
    let finish = Finisher {
        responses: responses.clone(),
        key,
        is_stored: false,
        past: None,
        model: (&*create.model).into(),
        worker: None,
        own: job.own,
        input: Bytes::new(),
        conversation: job.conversation,
        client_state: job.client_state,
        may_refuse: false,
        in_flight: responses.metrics.begin_background(),
    };
    let mut runner = Runner {
        responses: &responses,
        guard: &guard,
        words: EventEncoder::new(template, responses.limits(), state_signer),
        finish,
        end: None,
    };
    let context = RequestContext {
        headers: &job.headers,
        id: job.id,
        begun: observe::now(),
        summary: None,
    };
    tokio::select! {
        biased;
        why = stopped(&responses, &guard) => guard.run.state.lock().on_stop(why),
        () = runner.make(&create, &kept, &text, &context) => {}
    }
    // The engine's connection went with what made it.
    if let Some(asked) = guard.run.cancelled.get() {
        let took = observe::now().saturating_duration_since(*asked);
        let seconds = &responses.background.metrics.cancel_stop_seconds;
        seconds.observe(took.as_secs_f64());
    }
    tokio::select! {
        biased;
        () = lost(&guard) => guard.run.state.lock().on_stop(StopReason::LeaseLost),
        () = runner.end() => {}
    }
    let why = guard.run.state.lock().why();
    if let Some(why) = why {
        let stopped = &responses.background.metrics.stopped;
        stopped.with_label_values(&[why.as_str()]).inc();
    }
    if let Some(lock) = runner.finish.conversation.take() {
        lock.release().await;
    }
}

/// Resolves when it must not go on as it does.
async fn stopped(responses: &Responses, guard: &RunGuard) -> StopReason {
    let mut stop = guard.run.stop.subscribe();
    let told = async {
        match stop.wait_for(Option::is_some).await {
            Ok(why) => (*why).unwrap_or(StopReason::LeaseLost),
            Err(_) => StopReason::LeaseLost,
        }
    };
    let drained = async {
        responses.tasks.stopped().await;
        // What no engine has begun is handed over at once; the rest has until the end of the drain.
        let is_begun = guard.run.state.lock().is_begun();
        if is_begun {
            responses.tasks.aborted().await;
        }
        StopReason::Draining
    };
    let limit = Duration::from_millis(responses.background.settings.run_max_ms);
    tokio::select! {
        biased;
        why = told => why,
        why = drained => why,
        () = sleep(limit) => StopReason::TimeLimit,
    }
}

/// Resolves when another replica may have it.
async fn lost(guard: &RunGuard) {
    let mut stop = guard.run.stop.subscribe();
    let _ = stop
        .wait_for(|why| *why == Some(StopReason::LeaseLost))
        .await;
}

impl Runner<'_> {
    fn next(&self) -> Step {
        self.guard.run.state.lock().next()
    }

    /// Has it made, and stores its events as they come. The engine's connection goes with this future.
    async fn make(
        &mut self,
        create: &CreateRequest<'_>,
        kept: &StoredRequest,
        id: &str,
        context: &RequestContext<'_>,
    ) {
        let (store, key, fence) = (&self.responses.store, self.guard.key, self.guard.run.fence);
        let state = &self.guard.run.state;
        let flush = Duration::from_millis(self.responses.background.settings.flush_ms);
        let mut engine: Option<EngineStream> = None;
        loop {
            let then = match self.next() {
                Step::ReadEngine if !self.words.is_announced() => {
                    state.lock().on_events(&self.words.announce());
                    Then::Continue
                }
                Step::ReadEngine => {
                    let Some(hearing) = &mut engine else {
                        match self.answered(create, kept, id, context).await {
                            Ok(answer) => {
                                let served_by = answer.extensions().get::<ServedBy>();
                                self.finish.worker = served_by.map(|it| it.0.clone());
                                engine = Some(EngineStream::new(answer.into_body()));
                            }
                            Err(error) => {
                                let (said, outcome) = self.words.refuse(&error);
                                self.conclude(&said, outcome).await;
                            }
                        }
                        continue;
                    };
                    let is_over = hearing.hear(flush).await;
                    let (said, outcome) = self.words.push(&hearing.take(), is_over);
                    state.lock().on_begun();
                    let Some(outcome) = outcome else {
                        state.lock().on_events(&said);
                        continue;
                    };
                    let is_failed = outcome.status == Status::Failed;
                    self.conclude(&said, outcome).await;
                    if let Some(hearing) = engine.take().filter(|_| !is_failed) {
                        hearing.rest().await;
                    }
                    return;
                }
                Step::MarkStarted => {
                    let said = store.start(key, fence).await;
                    state.lock().on_started(&said)
                }
                Step::Append(batch) => {
                    let (last, bytes) = (batch.last, batch.bytes.len() as u64);
                    let said = store.append(key, fence, batch).await;
                    if let Err(error) = &said
                        && error.retry_after().is_none()
                    {
                        warn!(id = %key.id, %error, "events of a background response were not stored");
                    }
                    if said == Ok(WriteOutcome::Done) {
                        self.responses.background.metrics.event_bytes.inc_by(bytes);
                    }
                    let then = state.lock().on_appended(last, &said);
                    self.guard.run.news.send_modify(|news| *news += 1);
                    then
                }
                Step::ReadStored { after } => {
                    let said = store.events(key, after, RECALL_BYTES).await;
                    state.lock().on_stored_events(&said)
                }
                _ => return,
            };
            if then == Then::RetryLater {
                sleep(STORE_PAUSE).await;
            }
        }
    }

    /// Makes its last events, and all that is stored at its end.
    async fn conclude(&mut self, said: &[u8], mut outcome: Outcome) {
        let composed = self.words.compose(&self.finish, &mut outcome).await;
        let mut state = self.guard.run.state.lock();
        state.on_events(said);
        let end = self.words.conclude(&mut state, composed, outcome);
        self.end = Some(end);
    }

    /// Stores its end, or what is left of it.
    async fn end(&mut self) {
        let (store, key, fence) = (&self.responses.store, self.guard.key, self.guard.run.fence);
        let state = &self.guard.run.state;
        let mut response = Bytes::new();
        let mut left: Option<CancelledOutput> = None;
        loop {
            let then = match self.next() {
                Step::Done => return,
                // What was left undone before it ended.
                Step::MarkStarted => {
                    let said = store.start(key, fence).await;
                    state.lock().on_started(&said)
                }
                Step::Fail { why, is_recalled } => {
                    let (said, outcome) = match is_recalled {
                        true => self.words.fail_after(state.lock().log(), why),
                        false => self.words.fail(why),
                    };
                    self.conclude(&said, outcome).await;
                    Then::Continue
                }
                Step::FailWithoutOutput { number } => {
                    let end = self.words.shorten(&mut state.lock(), number);
                    self.end = Some(end);
                    Then::Continue
                }
                Step::Finalize(batch) => {
                    let Some(end) = &self.end else {
                        warn!(id = %key.id, "a background response has no end");
                        return;
                    };
                    let end = end.with(batch, &self.finish);
                    let said = store.finalize(key, fence, end).await;
                    if let Err(error) = &said {
                        warn!(id = %key.id, %error, "the end of a background response was not stored");
                    }
                    let then = state.lock().on_finalized(&said);
                    self.on_finalized(&said).await;
                    then
                }
                Step::ReadCancelled => {
                    let said = store.get(key).await.map(|found| {
                        let found = found?;
                        let last = found.background.and_then(|it| it.last_event);
                        response = found.content.response;
                        Some((found.status, last))
                    });
                    state.lock().on_record(&said)
                }
                Step::StorePartial => {
                    let amend = left.get_or_insert_with(|| {
                        let response = std::mem::take(&mut response);
                        self.words.cut(&state.lock(), response)
                    });
                    let said = store.finalize_cancelled(key, fence, amend.clone()).await;
                    if let Err(error) = &said {
                        warn!(id = %key.id, %error, "what there was of a cancelled response was not kept");
                    }
                    state.lock().on_partial_stored(&said)
                }
                Step::Release => {
                    let said = store.release(key, fence).await;
                    if let Err(error) = &said {
                        warn!(id = %key.id, %error, "a background response was not handed over");
                    }
                    state.lock().on_released(&said)
                }
                Step::ReadStored { after } => {
                    let said = store.events(key, after, RECALL_BYTES).await;
                    state.lock().on_stored_events(&said)
                }
                // These are done with.
                Step::ReadEngine | Step::Append(_) => return,
            };
            if then == Then::RetryLater {
                sleep(STORE_PAUSE).await;
            }
        }
    }

    /// It is stored: whoever reads it here is told, and its conversation gets it.
    async fn on_finalized(&mut self, said: &Result<WriteOutcome, store::Error>) {
        if *said != Ok(WriteOutcome::Done) {
            return;
        }
        self.guard.run.news.send_modify(|news| *news += 1);
        let Some(end) = self.end.take() else {
            return;
        };
        self.responses.metrics.on_end(end.outcome.status);
        if let Err(error) = self.finish.add_to_conversation(&end.outcome).await {
            let id = self.guard.key.id;
            warn!(%id, %error, "response was made and not added to its conversation");
        }
    }
}
