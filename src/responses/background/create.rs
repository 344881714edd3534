//! The beginning of a background response: its record is there before its client hears of it.

use std::sync::Arc;
use std::time::Duration;

use hyper::{HeaderMap, Response};
use tokio::sync::oneshot;
use tracing::warn;

use super::RunGuard;
use super::reader::{self, Reader};
use super::run::{self, Job};
use super::run_state::RunState;
use super::stored_request::StoredRequest;
use crate::ids::Tenant;
use crate::openai::error::ApiError;
use crate::responses::create::own_headers;
use crate::responses::history::Access;
use crate::responses::item::Ids;
use crate::responses::object::{ResponseTemplate, with_output};
use crate::responses::prepared::PreparedResponse;
use crate::responses::request::CreateRequest;
use crate::responses::stored::json;
use crate::responses::{ClientRequest, Responses, retry};
use crate::store::record::{Content, InitialState, Retention};
use crate::store::{
    self, FencingToken, IdempotencyToken, NewRecord, ResponseKey, RoutingHint, Status,
};
use crate::{http, observe};

impl Responses {
    pub(in crate::responses) async fn create_in_background(
        self: &Arc<Self>,
        call: &ClientRequest<'_>,
        create: &CreateRequest<'_>,
    ) -> Result<Response<http::Body>, ApiError> {
        let tenant = call.admitted.tenant;
        let now_s = observe::unix_s().unsigned_abs();
        call.salt(create)?;
        // Without a store nobody would ever hear of it: there is no other way to serve it.
        let admitted = self.store.admit().await;
        admitted.map_err(|error| ApiError::of_store(&error))?;
        self.background.held().await?;
        let state_reader = self.state_reader(call, create, now_s);
        let mut past = self
            .past(&create.parent, &state_reader, Access::Exclusive)
            .await?;
        let mut lock = past.conversation.as_mut().and_then(|it| it.lock.take());
        let is_in_conversation = past.conversation.is_some();
        let prepared = self.prepare(create, past, &state_reader, true, create.store);
        let ready = prepared.await.and_then(|prepared| {
            let is_portable = prepared.client_state.is_none() && !is_in_conversation;
            self.ready(call, create, prepared, is_portable, tenant)
        });
        let (record, mut job, guard) = match ready {
            Ok(ready) => ready,
            Err(error) => {
                if let Some(lock) = lock {
                    lock.release().await;
                }
                return Err(error);
            }
        };
        job.conversation = lock.take();
        let key = guard.key;
        let response = record.content.response.clone();
        let run = guard.run.clone();
        // A client that leaves now may have been told: what was begun is run.
        let (begun, is_begun) = oneshot::channel();
        self.tasks
            .spawn(begin(self.clone(), record, job, guard, begun));
        let is_begun = is_begun.await.unwrap_or(Err(store::Error::Unknown {
            retry_after: Duration::from_secs(1),
            reason: "the router is stopping".into(),
        }));
        is_begun.map_err(|error| ApiError::of_store(&error))?;
        if !create.stream {
            return Ok(json(with_output(&response, b"[]")));
        }
        self.background.count_reader("live");
        let mut answer = Response::new(reader::body(Reader::new(
            self.clone(),
            key,
            None,
            Some(run),
        )));
        *answer.headers_mut() = HeaderMap::new();
        own_headers(answer.headers_mut(), true);
        Ok(answer)
    }

    /// All that is stored of it first, what is to be done for it, and its place here.
    fn ready(
        self: &Arc<Self>,
        call: &ClientRequest<'_>,
        create: &CreateRequest<'_>,
        mut prepared: PreparedResponse,
        is_portable: bool,
        tenant: Tenant,
    ) -> Result<(NewRecord, Job, RunGuard), ApiError> {
        let salt = call.salt(create)?;
        let input = std::mem::take(&mut prepared.input);
        let meta = prepared.meta();
        let kept = StoredRequest::new(create, &meta, salt, is_portable, input);
        let kept = kept.ok_or_else(|| ApiError::wrong_value("input", "it cannot be kept"))?;
        let response =
            ResponseTemplate::new(create, &meta, Ids::of(prepared.id)).running(Status::Queued);
        let key = ResponseKey {
            tenant,
            id: prepared.id,
        };
        let fence = FencingToken::first(self.background.owner());
        let guard = self
            .background
            .sit(key, fence, RunState::new(create.stream, 0))
            .map_err(|refused| self.background.refusal(refused))?;
        let record = NewRecord {
            token: IdempotencyToken(fastrand::u64(..)),
            parent: prepared.past.chain.take(),
            hint: RoutingHint {
                model: (&*create.model).into(),
                worker: None,
            },
            input: prepared.own.json(),
            content: Content {
                response: response.into(),
                output: b"[]".as_slice().into(),
            },
            initial: InitialState::Background {
                fence,
                retention: match create.store {
                    true => Retention::Stored,
                    false => Retention::Ephemeral,
                },
                streams: create.stream,
                request: kept.write(),
            },
        };
        let job = Job {
            kept,
            headers: call.headers.clone(),
            id: call.id,
            own: prepared.take_own(),
            conversation: None,
            client_state: prepared.client_state.take(),
        };
        Ok((record, job, guard))
    }
}

async fn begin(
    responses: Arc<Responses>,
    record: NewRecord,
    job: Job,
    guard: RunGuard,
    begun: oneshot::Sender<Result<(), store::Error>>,
) {
    let key = guard.key;
    let created = retry::while_unknown(|| responses.store.create(key, record.clone())).await;
    let is_created = created.is_ok();
    let is_unknown = matches!(created, Err(store::Error::Unknown { .. }));
    if is_created {
        let _ = begun.send(created);
        responses.background.table.lock().on_stored(key);
        run::spawn(responses, job, guard);
        return;
    }
    if let Some(lock) = job.conversation {
        lock.release().await;
    }
    let _ = begun.send(created);
    // It may be there, owned by us: nobody was told of it, so nobody misses it.
    while is_unknown && !responses.tasks.is_stopping() {
        match responses.store.delete(key).await {
            Ok(_) => return,
            Err(error) => {
                warn!(id = %key.id, %error, "a response that was not begun may be in the store")
            }
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}
