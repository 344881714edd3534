//! One create: from the client's body to an engine's request, and from its answer to the client's.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::header::{self, HeaderName, HeaderValue};
use hyper::{HeaderMap, Response, Uri};

use super::events::{Events, Limits};
use super::finish::{Carry, Finish};
use super::input::{Own, Reading};
use super::item::Ids;
use super::lock::Locked;
use super::members::Members;
use super::object::{Outcome, Shape, with_output};
use super::past::{Access, Past};
use super::request::{self, Before, Create, Truncation};
use super::sealing::{Opener, Sealer, joined};
use super::sent::{self, EngineInput};
use super::{Asking, Call, OnStoreDown, Responses, engine, failure, stream};
use crate::ids::Tenant;
use crate::openai::error::ApiError;
use crate::prompt::{self, Api};
use crate::relay::{self, ServedBy};
use crate::store::Key;
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
pub(super) struct Expanded {
    pub(super) past: Past,
    pub(super) own: Own,
    /// The list of items that an engine is sent.
    pub(super) input: Vec<u8>,
}

impl Responses {
    pub(super) async fn create(
        self: &Arc<Self>,
        call: &Call<'_>,
    ) -> Result<Response<http::Body>, ApiError> {
        let create = Create::read(&call.body)?;
        if create.background {
            return self.create_in_background(call, &create).await;
        }
        let now_s = observe::unix_s().unsigned_abs();
        call.salt(&create)?;
        let is_stored = self.admit(&create).await?;
        let opener = self.opener(call, &create, now_s);
        let mut past = self
            .past(&create.before, &opener, Access::Exclusive)
            .await?;
        let mut lock = past.conversation.as_mut().and_then(|it| it.lock.take());
        let made = self.make(call, &create, past, &opener, &mut lock, is_stored);
        let made = made.await;
        if let Some(lock) = lock.filter(|_| made.is_err()) {
            lock.release().await;
        }
        made
    }

    /// `lock` is taken by what ends the response; if it never comes to that, it stays.
    async fn make(
        self: &Arc<Self>,
        call: &Call<'_>,
        create: &Create<'_>,
        past: Past,
        opener: &Opener<'_>,
        lock: &mut Option<Locked>,
        is_stored: bool,
    ) -> Result<Response<http::Body>, ApiError> {
        let salt = call.salt(create)?;
        let prepared = self.prepare(create, past, opener, is_stored, is_stored);
        let mut prepared = prepared.await?;
        let shape = Shape::new(create, &prepared.header(), Ids::of(prepared.id));
        let in_flight = self.metrics.begin(is_stored);
        let input = std::mem::take(&mut prepared.input);
        let answer = self.answered(call, create, input, &prepared.name, salt);
        let answer = answer.await?;

        let (mut head, engine) = answer.into_parts();
        let served_by = head.extensions.get::<ServedBy>();
        let finish = Finish {
            responses: self.clone(),
            key: Key {
                tenant: opener.tenant,
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
            carry: prepared.carry.take(),
            may_refuse: !create.stream,
            in_flight,
        };
        let is_degraded = create.store && !is_stored;
        own_headers(&mut head.headers, create.stream);
        if create.stream {
            let sealer = finish.carry.as_ref().map(|carry| carry.sealer.clone());
            let sealer = sealer.or_else(|| self.sealer(create, opener, &prepared.name));
            let events = Events::new(shape, self.limits(), sealer);
            let mut response = Response::new(stream::body(engine, events, finish));
            *response.headers_mut() = head.headers;
            mark(&mut response, is_degraded);
            return Ok(response);
        }
        let sealer = self.sealer(create, opener, &prepared.name);
        let whole = collect(engine, self.limits().bytes_max).await;
        let read = whole.and_then(|whole| read_whole(&whole, shape, sealer.as_ref()));
        let (shape, outcome, place) = match read {
            Ok(read) => read,
            Err(error) => {
                *lock = finish.conversation;
                return Err(error);
            }
        };
        let ended = finish.run(shape, outcome, place).await;
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

    /// What an engine would be sent for a client's body, but for what differs each time. Nothing is begun.
    pub async fn foretell(
        &self,
        body: Bytes,
        tenant: Tenant,
        salt: Option<&str>,
    ) -> Result<Bytes, String> {
        let foretold = async {
            let create = Create::read(&body)?;
            let opener = Opener {
                ring: &self.ring,
                tenant,
                now_s: observe::unix_s().unsigned_abs(),
                model: &create.model,
                plain_bytes: AtomicU64::new(0),
            };
            let past = self.past(&create.before, &opener, Access::ReadOnly).await?;
            let ids = Ids::random(request::random()?);
            let expanded = self.expand(&create, past, &ids, &opener).await?;
            Ok(engine::body(&create, &expanded.input, "", salt))
        };
        foretold.await.map_err(|error: ApiError| error.message)
    }

    /// An engine's answer; of a conversation that is too long to what is left of it, if the client wants that.
    async fn answered(
        &self,
        call: &Call<'_>,
        create: &Create<'_>,
        mut input: Vec<u8>,
        id: &str,
        salt: Option<&str>,
    ) -> Result<Response<http::Body>, ApiError> {
        loop {
            let body = engine::body(create, &input, id, salt);
            let asked = self.ask_response(&call.asking(), body).await;
            let error = match asked {
                Err(error) if error.code == failure::TOO_LONG => error,
                answered => return answered,
            };
            // Each time about half of it, so a few tries at most.
            let shorter = match create.truncation {
                Truncation::Disabled => None,
                Truncation::Auto => sent::shortened(&input),
            };
            input = shorter.ok_or(error)?;
        }
    }

    /// Whether the response will be stored, before anything is begun for it.
    async fn admit(&self, create: &Create<'_>) -> Result<bool, ApiError> {
        // What comes before it lies in the store as well.
        let needs_store = matches!(create.before, Before::Response(_) | Before::Conversation(_));
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
        create: &Create<'_>,
        past: Past,
        ids: &Ids,
        opener: &Opener<'_>,
    ) -> Result<Expanded, ApiError> {
        let referenced = self.referenced(create.input, &past, opener.tenant).await?;
        let reading = Reading {
            ids,
            referenced: &referenced,
            referenced_bytes_max: self.settings.history_bytes_max,
            opener,
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
        if create.before != Before::Nothing {
            self.metrics.on_history(input.len(), before);
        }
        input.add_own(&own)?;
        if input.is_empty() && !create.may_be_empty {
            return Err(ApiError::missing_parameter("input"));
        }
        let input = input.finish()?;
        Ok(Expanded { past, own, input })
    }

    /// Whether what is to be kept fits in, before an engine is asked; the answer comes on top.
    pub(super) fn check_size(
        &self,
        is_stored: bool,
        past: &Past,
        own: &Own,
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

    pub(super) fn carry(
        &self,
        create: &Create<'_>,
        opener: &Opener<'_>,
        id: &str,
        past: &Past,
        own: &Own,
    ) -> Result<Option<Carry>, ApiError> {
        let Some(sealer) = self.sealer(create, opener, id).filter(|_| !create.store) else {
            return Ok(None);
        };
        let mut lists = past.lists.clone();
        lists.push(own.json());
        let bytes = lists.iter().map(Bytes::len).sum();
        let room = self.ring.has_room(bytes);
        room.map_err(|why| ApiError::too_large_to_carry(&why))?;
        Ok(Some(Carry { sealer, lists }))
    }

    pub(super) fn sealer(
        &self,
        create: &Create<'_>,
        opener: &Opener<'_>,
        id: &str,
    ) -> Option<Sealer> {
        create.includes(SEALED_REASONING).then(|| Sealer {
            ring: self.ring.clone(),
            tenant: opener.tenant,
            now_s: opener.now_s,
            response: id.to_owned(),
            model: create.model.clone().into_owned(),
        })
    }

    pub(super) fn opener<'a>(
        &'a self,
        call: &Call<'_>,
        create: &'a Create<'_>,
        now_s: u64,
    ) -> Opener<'a> {
        Opener {
            ring: &self.ring,
            tenant: call.admitted.tenant,
            now_s,
            model: &create.model,
            plain_bytes: AtomicU64::new(0),
        }
    }

    pub(super) fn limits(&self) -> Limits {
        Limits {
            bytes_max: usize::try_from(self.settings.answer_bytes_max).unwrap_or(usize::MAX),
            reasoning: self.settings.reasoning_events,
        }
    }

    pub(super) async fn ask_response(
        &self,
        call: &Asking<'_>,
        body: Bytes,
    ) -> Result<Response<http::Body>, ApiError> {
        self.ask(call, Api::Responses, "/v1/responses", body).await
    }

    /// Has an engine answer a body of ours; an answer that is an error becomes one of ours.
    pub(super) async fn ask(
        &self,
        call: &Asking<'_>,
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
        };
        let answer = self.relay.run(&job, peek).await?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        let pause = failure::pause(answer.headers());
        let said = collect(answer.into_body(), ERROR_BYTES_MAX).await;
        let mut error = failure::of_engine(status, &said.unwrap_or_default());
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
fn call_bytes(create: &Create<'_>) -> usize {
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
    mut shape: Shape,
    sealer: Option<&Sealer>,
) -> Result<(Shape, Outcome, usize), ApiError> {
    let wrong = || ApiError::engine_broken("the engine's answer is no response object");
    let text = std::str::from_utf8(whole).map_err(|_| wrong())?;
    let members = Members::parse(text).map_err(|_| wrong())?;
    shape.learn(&members);
    let mut outcome = Outcome::of_engine(&members).ok_or_else(wrong)?;
    let count = outcome.read_output(&members, &shape.ids, sealer);
    let count = count.ok_or_else(wrong)?;
    Ok((shape, outcome, count))
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
