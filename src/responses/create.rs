//! `POST /v1/responses` in the foreground: from the client's body to the answer.

use std::sync::Arc;

use bytes::Bytes;
use hyper::Response;

use super::client_request::{ClientRequest, EngineCall};
use super::client_state::{StateReader, StateSigner, joined};
use super::conversation_lock::ConversationLock;
use super::engine_call::collect;
use super::events::{EventOptions, EventRewriter};
use super::fail_reason::{CHANGED, HISTORIES_MAX};
use super::finish::Finisher;
use super::history::{Access, History};
use super::http_response::{mark_degraded, mark_state_left_out, set_body_headers};
use super::item::Ids;
use super::members::{self, Members};
use super::object::with_output;
use super::outcome::Outcome;
use super::prepare::PreparedResponse;
use super::request::{CreateRequest, Truncation};
use super::service::Responses;
use super::settings::OnStoreDown;
use super::template::ResponseTemplate;
use super::{engine_body, engine_error, inline_compaction, stream, truncation};
use crate::ids::Tenant;
use crate::openai::body_budget::Reservation;
use crate::openai::error::{Answer, ApiError};
use crate::prompt::Api;
use crate::relay::{self, ServedBy};
use crate::store::ResponseKey;
use crate::{http, openai};

/// Of one response of an engine, and of one event of it. Four million tokens.
const MAX_RESPONSE_BYTES: usize = 16 << 20;

impl Responses {
    pub(super) async fn create(
        self: &Arc<Self>,
        request: &ClientRequest<'_>,
        reserved: &mut Reservation<'_>,
    ) -> Answer {
        let mut create = CreateRequest::read(&request.body)?;
        let generates = request.turn.is_none_or(|turn| turn.generates);
        // A client that has no input yet may send its tools and instructions ahead.
        create.input_may_be_empty = !generates;
        if create.background {
            return self.create_in_background(request, &create, reserved).await;
        }
        request.salt(&create)?;
        if !generates {
            // No engine will find out.
            self.relay
                .check_model(request.admitted.tenant, &create.model)
                .await?;
        }
        let remembered = request.turn.and_then(|turn| turn.continued.as_deref());
        let needs_store = remembered.is_none() && create.parent.is_in_store();
        let is_stored = self.will_store(&create, needs_store).await?;
        let mut old_histories = 0;
        reserved.let_wait();
        loop {
            // One for each reading: a reader counts what it has unpacked.
            let reader = self.state_reader(request.admitted.tenant, &create.model);
            let mut history = match remembered {
                Some(response) => self.remembered(response, reader.tenant, is_stored).await?,
                None => {
                    self.history(&create.parent, &reader, Access::Exclusive)
                        .await?
                }
            };
            let mut lock = history.take_lock();
            let answer = self
                .generate(
                    request, &create, history, &reader, &mut lock, is_stored, reserved,
                )
                .await;
            if let Some(lock) = lock.filter(|_| answer.is_err()) {
                lock.release().await;
            }
            // The history is dropped meanwhile, and other responses of its conversation go on.
            if reserved.wait_for_lacking().await? {
                continue;
            }
            match answer {
                // The client has nothing of it yet.
                Err(error) if error.code == CHANGED && old_histories < HISTORIES_MAX => {
                    old_histories += 1;
                }
                answer => return answer,
            }
        }
    }

    /// Takes `lock` only once the response itself will release it.
    #[expect(
        clippy::too_many_arguments,
        reason = "one caller; a struct would name them once more"
    )]
    async fn generate(
        self: &Arc<Self>,
        request: &ClientRequest<'_>,
        create: &CreateRequest<'_>,
        history: History,
        reader: &StateReader<'_>,
        lock: &mut Option<ConversationLock>,
        is_stored: bool,
        reserved: &mut Reservation<'_>,
    ) -> Answer {
        let salt = request.salt(create)?;
        let mut prepared = self
            .prepare(create, history, reader, is_stored, is_stored, reserved)
            .await?;
        let mut template = ResponseTemplate::new(create, &prepared.meta(), prepared.ids.clone());
        prepared.name_conversation(request.context.summary.as_ref());
        let compacted = self
            .compact_in_line(request, create, &prepared, reader)
            .await?;
        let mut input = std::mem::take(&mut prepared.input);
        let mut is_asked = true;
        if let Some(compacted) = compacted {
            is_asked = compacted.goes_on;
            input = compacted.engine_input()?;
            prepared.continue_from(compacted.window);
            template.compaction = Some(compacted.item);
        }
        let mut finisher = self.finisher(request, create, reader.tenant, &mut prepared, is_stored);
        if request.turn.is_some_and(|turn| !turn.generates) {
            finisher.conversation = lock.take();
            self.prewarm(request, create, &input, prepared.id, salt, reserved);
            return Ok(self.without_output(template, finisher).await);
        }
        let mut call = request.engine_call();
        call.context.response = Some(prepared.id);
        call.reserved_bytes = reserved.bytes();
        let answer = if is_asked {
            self.ask_truncating(&call, create, input, &prepared.name, salt)
                .await?
        } else {
            inline_compaction::empty_answer(create.stream)
        };

        let (mut head, engine) = answer.into_parts();
        let served_by = head.extensions.get::<ServedBy>();
        finisher.worker = served_by.map(|worker| worker.0.clone());
        finisher.conversation = lock.take();
        let is_degraded = create.store && !is_stored;
        let signer = self.state_signer(create, reader, &prepared.name);
        set_body_headers(&mut head.headers, create.stream);
        if create.stream {
            let events = EventRewriter::new(template, self.event_options(), signer);
            let mut response = Response::new(stream::body(engine, events, finisher));
            *response.headers_mut() = head.headers;
            mark_degraded(&mut response, is_degraded);
            return Ok(response);
        }
        let line = call.context.kind.batch_line();
        let whole = collect(engine, self.event_options().bytes_max, line).await;
        // Given up while it is stored, the response would stay, and the line would make another one.
        if let Some(line) = line {
            line.stay().await;
        }
        let read = whole.and_then(|whole| read_whole(&whole, template, signer.as_ref()));
        let (template, outcome, item_count) = match read {
            Ok(read) => read,
            Err(error) => {
                *lock = finisher.conversation;
                return Err(error);
            }
        };
        let finished = finisher.run(template, outcome, item_count).await;
        if let Some(error) = finished.error {
            return Err(error);
        }
        let body = with_output(&finished.response, finished.outcome.client_output());
        let mut response = Response::new(http::full(body));
        *response.headers_mut() = head.headers;
        mark_degraded(&mut response, is_degraded || finished.is_degraded);
        if finished.is_state_left_out {
            mark_state_left_out(&mut response);
        }
        Ok(response)
    }

    /// What the end of the response needs, but for its worker and the lock of its conversation.
    fn finisher(
        self: &Arc<Self>,
        request: &ClientRequest<'_>,
        create: &CreateRequest<'_>,
        tenant: Tenant,
        prepared: &mut PreparedResponse,
        is_stored: bool,
    ) -> Finisher {
        let new_input = prepared.new_input.json();
        let memory = request.turn.map(|turn| {
            let mut lists = prepared.history.lists.clone();
            lists.push(new_input.clone());
            let memory = turn.memory(lists);
            match prepared.history.conversation {
                // Its record says how it is continued, which has its own items alone.
                Some(_) => memory.without_items(),
                None => memory,
            }
        });
        Finisher {
            responses: self.clone(),
            key: ResponseKey {
                tenant,
                id: prepared.id,
            },
            is_stored,
            chain: prepared.history.chain.take(),
            model: (&*create.model).into(),
            worker: None,
            input: match &prepared.history.client_held {
                Some(items) => joined(&[items, &new_input]).into(),
                None => new_input,
            },
            new_items: prepared.take_new_items(),
            conversation: None,
            client_state: prepared.client_state.take(),
            may_withhold: !create.stream,
            in_flight: self.metrics.begin(is_stored),
            memory,
        }
    }

    /// The body that an engine would get for this client body, and its API, except for random ids. Starts nothing.
    pub async fn dry_run(
        &self,
        body: Bytes,
        tenant: Tenant,
        salt: Option<&str>,
    ) -> Result<(Api, Bytes), String> {
        let engine_body = async {
            let create = CreateRequest::read(&body)?;
            let reader = self.state_reader(tenant, &create.model);
            let history = self
                .history(&create.parent, &reader, Access::ReadOnly)
                .await?;
            let ids = Ids::random(openai::random()?);
            let expanded = self.expand(&create, history, &ids, &reader, None).await?;
            let body = engine_body::body(&create, &expanded.input, "", salt, create.stream);
            let model = self.relay.names().canonical(&create.model);
            if !self.relay.sends_chat(Some(model)) {
                return Ok((Api::Responses, body));
            }
            let chat = self.as_chat(&body, relay::ToolLoss::AsConfigured);
            let chat = chat.map_err(relay::Error::NotConvertible)?;
            Ok((Api::Chat, chat.body))
        };
        engine_body.await.map_err(|error: ApiError| error.message)
    }

    /// An engine's answer. If the input is too long for the model and the client allows truncation, older
    /// items are dropped until it fits.
    async fn ask_truncating(
        &self,
        call: &EngineCall<'_>,
        create: &CreateRequest<'_>,
        mut input: Vec<u8>,
        id: &str,
        salt: Option<&str>,
    ) -> Answer {
        loop {
            let body = engine_body::body(create, &input, id, salt, create.stream);
            let error = match self.ask_response(call, body).await {
                Err(error) if error.code == engine_error::TOO_LONG => error,
                answered => return answered,
            };
            // Each round drops about half of the items, so there are few rounds.
            let shorter = match create.truncation {
                Truncation::Disabled => None,
                Truncation::Auto => truncation::shortened(&input),
            };
            input = shorter.ok_or(error)?;
        }
    }

    /// Whether the response will be stored. An error if the request needs the store and it is down. `needs_store`:
    /// whether what it continues lies there.
    pub(super) async fn will_store(
        &self,
        create: &CreateRequest<'_>,
        needs_store: bool,
    ) -> Result<bool, ApiError> {
        if !create.store && !needs_store {
            return Ok(false);
        }
        match self.store.admit().await {
            Ok(()) => Ok(create.store),
            Err(_) if self.settings.on_store_down == OnStoreDown::Degrade && !needs_store => {
                self.metrics.on_not_stored("served");
                Ok(false)
            }
            Err(error) => Err(error.into()),
        }
    }

    pub(super) fn event_options(&self) -> EventOptions {
        EventOptions {
            bytes_max: MAX_RESPONSE_BYTES,
            reasoning: self.settings.advanced.reasoning_events,
        }
    }
}

/// Reads an engine's whole answer: the completed template, the outcome, and the number of output items.
fn read_whole(
    whole: &[u8],
    mut template: ResponseTemplate,
    signer: Option<&StateSigner>,
) -> Result<(ResponseTemplate, Outcome, usize), ApiError> {
    let wrong =
        || ApiError::invalid_engine_response("the engine's answer is not a response object");
    let text = simdutf8::basic::from_utf8(whole).map_err(|_| wrong())?;
    let members = Members::parse(text).map_err(|_| wrong())?;
    template.learn(&members);
    let mut outcome = Outcome::of_engine(&members).ok_or_else(wrong)?;
    let count = outcome.read_output(
        &members,
        &template.ids,
        template.compaction.as_ref(),
        signer,
    );
    let count = count.ok_or_else(wrong)?;
    if let Some(allowed) = &template.allowed_tools {
        let items = members.get("output").and_then(members::list);
        for item in items.unwrap_or_default() {
            allowed
                .check(item)
                .map_err(ApiError::invalid_engine_response)?;
        }
    }
    Ok((template, outcome, count))
}
