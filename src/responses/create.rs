//! One create: from the client's body to an engine's request, and from its answer to the client's.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::header::{self, HeaderName, HeaderValue};
use hyper::{HeaderMap, Response, Uri};

use super::client_state::{StateReader, StateSigner, joined};
use super::conversation_lock::ConversationLock;
use super::engine_input::{self, EngineInput};
use super::events::{EventOptions, EventRewriter};
use super::finish::{ClientState, Finisher};
use super::history::{Access, History};
use super::input::{InputContext, NewInput};
use super::item::Ids;
use super::members::Members;
use super::object::{Outcome, ResponseTemplate, with_output};
use super::request::{self, CreateRequest, Parent, Truncation};
use super::{
    ClientRequest, OnStoreDown, RequestContext, Responses, engine_body, engine_error, stream,
};
use crate::ids::Tenant;
use crate::openai::error::ApiError;
use crate::prompt::{self, Api};
use crate::relay::{self, ServedBy};
use crate::store::ResponseKey;
use crate::{http, observe};

/// Says that a response is not stored though it was to be.
const STORE: HeaderName = HeaderName::from_static("x-warmroute-store");
/// Says that the item with the state, which the client asked for, was too large.
const STATE: HeaderName = HeaderName::from_static("x-warmroute-state");
const BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");
/// Of an engine's error: enough for its message.
const ERROR_BYTES_MAX: usize = 64 << 10;
const SEALED_REASONING: &str = "reasoning.encrypted_content";

/// A request's input with all that comes before it.
pub(super) struct ExpandedInput {
    pub(super) past: History,
    pub(super) own: NewInput,
    /// The list of items that an engine is sent.
    pub(super) input: Vec<u8>,
}

impl Responses {
    pub(super) async fn create(
        self: &Arc<Self>,
        call: &ClientRequest<'_>,
    ) -> Result<Response<http::Body>, ApiError> {
        let create = CreateRequest::read(&call.body)?;
        if create.background {
            return self.create_in_background(call, &create).await;
        }
        let now_s = observe::unix_s().unsigned_abs();
        call.salt(&create)?;
        let is_stored = self.admit(&create).await?;
        let state_reader = self.state_reader(call, &create, now_s);
        let mut past = self
            .past(&create.parent, &state_reader, Access::Exclusive)
            .await?;
        let mut lock = past.conversation.as_mut().and_then(|it| it.lock.take());
        let made = self.make(call, &create, past, &state_reader, &mut lock, is_stored);
        let made = made.await;
        if let Some(lock) = lock.filter(|_| made.is_err()) {
            lock.release().await;
        }
        made
    }

    /// `lock` is taken by what ends the response; if it never comes to that, it stays.
    async fn make(
        self: &Arc<Self>,
        call: &ClientRequest<'_>,
        create: &CreateRequest<'_>,
        past: History,
        state_reader: &StateReader<'_>,
        lock: &mut Option<ConversationLock>,
        is_stored: bool,
    ) -> Result<Response<http::Body>, ApiError> {
        let salt = call.salt(create)?;
        let prepared = self.prepare(create, past, state_reader, is_stored, is_stored);
        let mut prepared = prepared.await?;
        let template = ResponseTemplate::new(create, &prepared.meta(), Ids::of(prepared.id));
        let in_flight = self.metrics.begin(is_stored);
        let input = std::mem::take(&mut prepared.input);
        let answer = self.answered(call, create, input, &prepared.name, salt);
        let answer = answer.await?;

        let (mut head, engine) = answer.into_parts();
        let served_by = head.extensions.get::<ServedBy>();
        let finish = Finisher {
            responses: self.clone(),
            key: ResponseKey {
                tenant: state_reader.tenant,
                id: prepared.id,
            },
            is_stored,
            past: prepared.past.chain.take(),
            model: (&*create.model).into(),
            worker: served_by.map(|it| it.0.clone()),
            input: match &prepared.past.carried {
                Some(carried) => joined(&[carried, &prepared.own.json()]).into(),
                None => prepared.own.json(),
            },
            own: prepared.take_own(),
            conversation: lock.take(),
            client_state: prepared.client_state.take(),
            may_refuse: !create.stream,
            in_flight,
        };
        let is_degraded = create.store && !is_stored;
        own_headers(&mut head.headers, create.stream);
        if create.stream {
            let state_signer = finish
                .client_state
                .as_ref()
                .map(|client_state| client_state.state_signer.clone());
            let state_signer =
                state_signer.or_else(|| self.state_signer(create, state_reader, &prepared.name));
            let events = EventRewriter::new(template, self.limits(), state_signer);
            let mut response = Response::new(stream::body(engine, events, finish));
            *response.headers_mut() = head.headers;
            mark(&mut response, is_degraded);
            return Ok(response);
        }
        let state_signer = self.state_signer(create, state_reader, &prepared.name);
        let whole = collect(engine, self.limits().bytes_max).await;
        let read = whole.and_then(|whole| read_whole(&whole, template, state_signer.as_ref()));
        let (template, outcome, place) = match read {
            Ok(read) => read,
            Err(error) => {
                *lock = finish.conversation;
                return Err(error);
            }
        };
        let ended = finish.run(template, outcome, place).await;
        if let Some(error) = ended.error {
            return Err(error);
        }
        let body = with_output(&ended.response, ended.outcome.told());
        let mut response = Response::new(http::full(body));
        *response.headers_mut() = head.headers;
        mark(&mut response, is_degraded || ended.is_degraded);
        if ended.is_state_left_out {
            let left_out = HeaderValue::from_static("left-out");
            response.headers_mut().insert(STATE, left_out);
        }
        Ok(response)
    }

    /// The body that an engine would be sent for a client's body, with other ids. Nothing is sent or stored.
    pub async fn dry_run(
        &self,
        body: Bytes,
        tenant: Tenant,
        salt: Option<&str>,
    ) -> Result<Bytes, String> {
        let prepared = async {
            let create = CreateRequest::read(&body)?;
            let state_reader = StateReader {
                key_ring: &self.key_ring,
                tenant,
                now_s: observe::unix_s().unsigned_abs(),
                model: &create.model,
                plain_bytes: AtomicU64::new(0),
            };
            let past = self
                .past(&create.parent, &state_reader, Access::ReadOnly)
                .await?;
            let ids = Ids::random(request::random()?);
            let expanded = self.expand(&create, past, &ids, &state_reader).await?;
            Ok(engine_body::body(&create, &expanded.input, "", salt))
        };
        prepared.await.map_err(|error: ApiError| error.message)
    }

    /// An engine's answer; of a conversation that is too long to what is left of it, if the client wants that.
    async fn answered(
        &self,
        call: &ClientRequest<'_>,
        create: &CreateRequest<'_>,
        mut input: Vec<u8>,
        id: &str,
        salt: Option<&str>,
    ) -> Result<Response<http::Body>, ApiError> {
        loop {
            let body = engine_body::body(create, &input, id, salt);
            let asked = self.ask_response(&call.context(), body).await;
            let error = match asked {
                Err(error) if error.code == engine_error::TOO_LONG => error,
                answered => return answered,
            };
            // Each time about half of it, so a few tries at most.
            let shorter = match create.truncation {
                Truncation::Disabled => None,
                Truncation::Auto => engine_input::shortened(&input),
            };
            input = shorter.ok_or(error)?;
        }
    }

    /// Whether the response will be stored, before anything is begun for it.
    async fn admit(&self, create: &CreateRequest<'_>) -> Result<bool, ApiError> {
        // What comes before it lies in the store as well.
        let needs_store = matches!(create.parent, Parent::Response(_) | Parent::Conversation(_));
        if !create.store && !needs_store {
            return Ok(false);
        }
        match self.store.admit().await {
            Ok(()) => Ok(create.store),
            Err(_) if self.settings.on_store_down == OnStoreDown::Degrade && !needs_store => {
                self.metrics.on_degraded();
                Ok(false)
            }
            Err(error) => Err(ApiError::of_store(&error)),
        }
    }

    /// Reads what the input refers to, and puts all together.
    pub(super) async fn expand(
        &self,
        create: &CreateRequest<'_>,
        past: History,
        ids: &Ids,
        state_reader: &StateReader<'_>,
    ) -> Result<ExpandedInput, ApiError> {
        let referenced = self
            .referenced(create.input, &past, state_reader.tenant)
            .await?;
        let reading = InputContext {
            ids,
            referenced: &referenced,
            referenced_bytes_max: self.settings.history_bytes_max,
            state_reader,
            keeps_ids: past.conversation.is_none(),
            param: "input",
        };
        let own = self.own(create.input, &reading).await?;
        let before = past.bytes();
        let bytes = before + call_bytes(create);
        let mut input = EngineInput::new(self.settings.unsupported_items, bytes + bytes / 8 + 128);
        for list in &past.lists {
            input.add_list(list)?;
        }
        if create.parent != Parent::None {
            self.metrics.on_history(input.len(), before);
        }
        input.add_own(&own)?;
        if input.is_empty() && !create.may_be_empty {
            return Err(ApiError::missing_parameter("input"));
        }
        let input = input.finish()?;
        Ok(ExpandedInput { past, own, input })
    }

    /// Whether what is to be kept fits in, before an engine is asked; the answer comes on top.
    pub(super) fn check_size(
        &self,
        is_stored: bool,
        past: &History,
        own: &NewInput,
    ) -> Result<(), ApiError> {
        let own: usize = own.items.iter().map(|item| item.json.len() + 1).sum();
        let record = past.carried.as_ref().map_or(0, Bytes::len) + own;
        let whole = past.bytes() + own;
        let max = self.settings.store.keep.record_bytes_max;
        let is_too_large = (is_stored && record as u64 > max)
            || (past.conversation.is_some() && whole as u64 > max);
        match is_too_large {
            true => Err(ApiError::too_large_to_store(max)),
            false => Ok(()),
        }
    }

    pub(super) fn client_state(
        &self,
        create: &CreateRequest<'_>,
        state_reader: &StateReader<'_>,
        id: &str,
        past: &History,
        own: &NewInput,
    ) -> Result<Option<ClientState>, ApiError> {
        let Some(state_signer) = self
            .state_signer(create, state_reader, id)
            .filter(|_| !create.store)
        else {
            return Ok(None);
        };
        let mut lists = past.lists.clone();
        lists.push(own.json());
        let bytes = lists.iter().map(Bytes::len).sum();
        let room = self.key_ring.has_room(bytes);
        room.map_err(|why| ApiError::too_large_to_carry(&why))?;
        Ok(Some(ClientState {
            state_signer,
            lists,
        }))
    }

    pub(super) fn state_signer(
        &self,
        create: &CreateRequest<'_>,
        state_reader: &StateReader<'_>,
        id: &str,
    ) -> Option<StateSigner> {
        create.includes(SEALED_REASONING).then(|| StateSigner {
            key_ring: self.key_ring.clone(),
            tenant: state_reader.tenant,
            now_s: state_reader.now_s,
            response: id.to_owned(),
            model: create.model.clone().into_owned(),
        })
    }

    pub(super) fn state_reader<'a>(
        &'a self,
        call: &ClientRequest<'_>,
        create: &'a CreateRequest<'_>,
        now_s: u64,
    ) -> StateReader<'a> {
        StateReader {
            key_ring: &self.key_ring,
            tenant: call.admitted.tenant,
            now_s,
            model: &create.model,
            plain_bytes: AtomicU64::new(0),
        }
    }

    pub(super) fn limits(&self) -> EventOptions {
        EventOptions {
            bytes_max: usize::try_from(self.settings.answer_bytes_max).unwrap_or(usize::MAX),
            reasoning: self.settings.reasoning_events,
        }
    }

    pub(super) async fn ask_response(
        &self,
        call: &RequestContext<'_>,
        body: Bytes,
    ) -> Result<Response<http::Body>, ApiError> {
        self.ask(call, Api::Responses, "/v1/responses", body).await
    }

    /// Has an engine answer a body of ours; an answer that is an error becomes one of ours.
    pub(super) async fn ask(
        &self,
        call: &RequestContext<'_>,
        api: Api,
        path: &'static str,
        body: Bytes,
    ) -> Result<Response<http::Body>, ApiError> {
        let headers = engine_headers(call.headers);
        let peek = prompt::peek_own(api, &body, self.relay.block_bytes())?;
        let job = relay::Job {
            api,
            target: Uri::from_static(path),
            headers: &headers,
            body: body.clone(),
            id: call.id,
            begun: call.begun,
            summary: call.summary.cloned(),
        };
        let answer = self.relay.run(&job, peek).await?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        let pause = engine_error::pause(answer.headers());
        let said = collect(answer.into_body(), ERROR_BYTES_MAX).await;
        let mut error = engine_error::of_engine(status, &said.unwrap_or_default());
        error.pause(pause);
        Err(error)
    }
}

/// A client's headers, for a body of ours and an answer that is read here.
fn engine_headers(headers: &HeaderMap) -> Cow<'_, HeaderMap> {
    const JSON: &str = "application/json";
    let kinds = headers.get_all(header::CONTENT_TYPE).iter();
    if kinds.eq([JSON]) && !headers.contains_key(header::ACCEPT_ENCODING) {
        return Cow::Borrowed(headers);
    }
    let mut headers = headers.clone();
    headers.remove(header::ACCEPT_ENCODING);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(JSON));
    Cow::Owned(headers)
}

/// How much a client's own input is.
fn call_bytes(create: &CreateRequest<'_>) -> usize {
    create.input.map_or(0, str::len)
}

/// Reads a whole answer, up to a bound.
pub(super) async fn collect(mut body: http::Body, bytes_max: usize) -> Result<Bytes, ApiError> {
    let mut whole = Vec::new();
    let mut first = Bytes::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            ApiError::engine_broken(format!("the engine's answer broke off: {error}"))
        })?;
        let data = frame.into_data().unwrap_or_default();
        if first.len() + whole.len() + data.len() > bytes_max {
            return Err(ApiError::engine_broken(
                "the engine's answer is longer than the router allows",
            ));
        }
        // An answer of one piece, which most are, is not copied.
        if first.is_empty() && whole.is_empty() {
            first = data;
            continue;
        }
        if whole.is_empty() {
            whole.extend_from_slice(&first);
            first = Bytes::new();
        }
        whole.extend_from_slice(&data);
    }
    Ok(if whole.is_empty() {
        first
    } else {
        whole.into()
    })
}

/// Takes an engine's whole answer apart; the last is the number of its items.
fn read_whole(
    whole: &[u8],
    mut template: ResponseTemplate,
    state_signer: Option<&StateSigner>,
) -> Result<(ResponseTemplate, Outcome, usize), ApiError> {
    let wrong = || ApiError::engine_broken("the engine's answer is no response object");
    let text = std::str::from_utf8(whole).map_err(|_| wrong())?;
    let members = Members::parse(text).map_err(|_| wrong())?;
    template.learn(&members);
    let mut outcome = Outcome::of_engine(&members).ok_or_else(wrong)?;
    let count = outcome.read_output(&members, &template.ids, state_signer);
    let count = count.ok_or_else(wrong)?;
    Ok((template, outcome, count))
}

/// An engine's headers pass, but for those that describe the body that we made another one of.
pub(super) fn own_headers(headers: &mut HeaderMap, is_stream: bool) {
    headers.remove(header::CONTENT_LENGTH);
    headers.remove(header::CONTENT_ENCODING);
    headers.remove(header::ETAG);
    let kind = match is_stream {
        true => "text/event-stream; charset=utf-8",
        false => "application/json",
    };
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    if is_stream {
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        headers.insert(BUFFERING, HeaderValue::from_static("no"));
    }
}

fn mark(response: &mut Response<http::Body>, is_degraded: bool) {
    if is_degraded {
        let headers = response.headers_mut();
        headers.insert(STORE, HeaderValue::from_static("degraded"));
    }
}
