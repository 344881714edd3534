//! `POST /v1/responses` with `background`: the client gets its answer only after the record is stored.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tracing::warn;

use super::reader::{self, Reader};
use super::run::{self, Job};
use super::run_state::RunState;
use super::runs::{NO_MEMORY, RunGuard};
use super::stored_request::StoredRequest;
use crate::http;
use crate::openai::body_budget::Reservation;
use crate::openai::error::{Answer, ApiError};
use crate::responses::client_request::ClientRequest;
use crate::responses::history::Access;
use crate::responses::http_response::events_response;
use crate::responses::item::Ids;
use crate::responses::object::with_output;
use crate::responses::prepare::PreparedResponse;
use crate::responses::request::CreateRequest;
use crate::responses::retry;
use crate::responses::service::Responses;
use crate::responses::template::ResponseTemplate;
use crate::store::record::{Content, InitialState, Retention};
use crate::store::{
    self, FencingToken, IdempotencyToken, NewRecord, ResponseKey, RoutingHint, Status,
};

/// After which a client may ask again that keeps as much memory as it may. Its background responses have to end first,
/// which takes longer than an answer that a client waits for.
const MEMORY_PAUSE: Duration = Duration::from_secs(10);

impl Responses {
    pub(in crate::responses) async fn create_in_background(
        self: &Arc<Self>,
        request: &ClientRequest<'_>,
        create: &CreateRequest<'_>,
        reserved: &mut Reservation<'_>,
    ) -> Answer {
        let tenant = request.admitted.tenant;
        request.salt(create)?;
        self.relay.check_model(tenant, &create.model).await?;
        // A background response exists only in the store, so it cannot be served without one.
        self.store.admit().await?;
        self.background.wait_for_lease().await?;
        reserved.let_wait();
        let (record, job, guard) = loop {
            // One for each reading: a reader counts what it has unpacked.
            let reader = self.state_reader(tenant, &create.model);
            let mut history = self
                .history(&create.parent, &reader, Access::Exclusive)
                .await?;
            let lock = history.take_lock();
            let is_in_conversation = history.conversation.is_some();
            let prepared = self
                .prepare(create, history, &reader, true, create.store, reserved)
                .await;
            let ready = prepared.and_then(|prepared| {
                let has_state = prepared.client_state.is_some();
                let is_portable = !has_state && !is_in_conversation;
                let token = lock.as_ref().filter(|_| !has_state).map(|lock| lock.token);
                self.admit_background(request, create, prepared, is_portable, token, reserved)
            });
            match ready {
                Ok((record, mut job, guard)) => {
                    job.conversation = lock;
                    break (record, job, guard);
                }
                Err(error) => {
                    if let Some(lock) = lock {
                        lock.release().await;
                    }
                    if !reserved.may_keep_lacking() {
                        return Err(self.refuse_to_keep());
                    }
                    // The history is dropped meanwhile, and other responses of its conversation go on.
                    if !reserved.wait_for_lacking().await? {
                        return Err(error);
                    }
                }
            }
        };
        let key = guard.key;
        let response = record.content.response.clone();
        let run = guard.run.clone();
        // In a task of its own: the run starts even if the client disconnects now.
        let (created, is_created) = oneshot::channel();
        self.tasks
            .spawn(store_and_start(self.clone(), record, job, guard, created));
        let is_created = is_created.await.unwrap_or(Err(store::Error::Unknown {
            retry_after: Duration::from_secs(1),
            reason: "the router is stopping".into(),
        }));
        is_created?;
        if !create.stream {
            return Ok(http::json(with_output(&response, b"[]")));
        }
        self.background.count_reader("live");
        let reader = Reader::new(self.clone(), key, None, Some(run), response);
        Ok(events_response(reader::body(reader)))
    }

    /// The first record, the job, and the admission on this replica. The memory of the request goes with the job.
    fn admit_background(
        self: &Arc<Self>,
        request: &ClientRequest<'_>,
        create: &CreateRequest<'_>,
        mut prepared: PreparedResponse,
        is_portable: bool,
        lock: Option<IdempotencyToken>,
        reserved: &mut Reservation<'_>,
    ) -> Result<(NewRecord, Job, RunGuard), ApiError> {
        let salt = request.salt(create)?;
        let input = std::mem::take(&mut prepared.input);
        let meta = prepared.meta();
        let stored = StoredRequest::new(create, &meta, salt, is_portable, input);
        let mut stored =
            stored.ok_or_else(|| ApiError::wrong_value("input", "it cannot be stored"))?;
        let response =
            ResponseTemplate::new(create, &meta, Ids::of(prepared.id)).running(Status::Queued);
        let key = ResponseKey {
            tenant: request.admitted.tenant,
            id: prepared.id,
        };
        let input = prepared.new_input.json();
        let new_items = prepared.take_new_items();
        prepared.name_conversation(request.context.summary.as_ref());
        if let Some(trace) = request.context.trace() {
            stored.link_to(trace.context());
        }
        if let Some(token) = lock {
            stored.in_conversation(token, &new_items);
        }
        let fence = FencingToken::first(self.background.owner());
        let guard = self
            .background
            .admit(key, fence, RunState::new(create.stream, 0))
            .map_err(|refused| self.background.refusal_error(refused))?;
        let memory = reserved.try_keep().ok_or_else(|| self.refuse_to_keep())?;
        let record = NewRecord {
            token: IdempotencyToken(fastrand::u64(..)),
            parent: prepared.history.chain.take(),
            hint: RoutingHint {
                model: (&*create.model).into(),
                worker: None,
            },
            input,
            content: Content {
                response: response.into(),
                output: b"[]".as_slice().into(),
            },
            initial: InitialState::Background {
                fence,
                retention: if create.store {
                    Retention::Stored
                } else {
                    Retention::Ephemeral
                },
                streams: create.stream,
                request: stored.write(),
            },
        };
        let job = Job {
            request: stored,
            headers: request.headers.clone(),
            id: request.context.id,
            client: request.context.client,
            new_items,
            conversation: None,
            client_state: prepared.client_state.take(),
            memory,
        };
        Ok((record, job, guard))
    }

    /// The error for a client that keeps as much memory as it may, which is counted.
    fn refuse_to_keep(&self) -> ApiError {
        self.background.count_refusal(NO_MEMORY);
        ApiError::background_bodies_full(MEMORY_PAUSE)
    }
}

async fn store_and_start(
    responses: Arc<Responses>,
    record: NewRecord,
    job: Job,
    guard: RunGuard,
    answer: oneshot::Sender<Result<(), store::Error>>,
) {
    let key = guard.key;
    let created = retry::while_unknown(|| responses.store.create(key, record.clone())).await;
    let is_created = created.is_ok();
    let is_unknown = matches!(created, Err(store::Error::Unknown { .. }));
    if is_created {
        let _ = answer.send(created);
        responses.background.table.lock().on_stored(key);
        run::spawn(responses, job, guard);
        return;
    }
    if let Some(lock) = job.conversation {
        lock.release().await;
    }
    let _ = answer.send(created);
    // The record may be stored. The client got an error, so delete it.
    while is_unknown && !responses.tasks.is_stopping() {
        match responses.store.delete(key).await {
            Ok(_) => return,
            Err(error) => {
                warn!(response_id = %key.id, %error, "refused background response may still be stored; deleting it again in 1s")
            }
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}
