//! Everything that a response needs before an engine is asked: its id, history, input and client state.

use bytes::Bytes;

use super::additional_tools;
use super::client_state::{ClientState, StateReader, StateSigner};
use super::engine_input::EngineInput;
use super::history::{Access, History, MAX_HISTORY_BYTES};
use super::input::{self, InputContext, NewInput};
use super::item::Ids;
use super::request::{CreateRequest, Parent};
use super::service::Responses;
use super::template::ResponseMeta;
use crate::ids::{ResponseId, Tenant};
use crate::openai::body_budget::Reservation;
use crate::openai::error::ApiError;
use crate::relay::SummaryCell;
use crate::store::Item;
use crate::{observe, openai};

/// The client includes this to get its state, and the model's reasoning, as state tokens.
const STATE_INCLUDE: &str = "reasoning.encrypted_content";

pub(super) struct PreparedResponse {
    pub(super) id: ResponseId,
    /// The id as text.
    pub(super) name: String,
    /// Assigns the ids of the response's items.
    pub(super) ids: Ids,
    pub(super) history: History,
    pub(super) new_input: NewInput,
    /// History and new input as the list of items for the engine.
    pub(super) input: Vec<u8>,
    pub(super) client_state: Option<ClientState>,
    previous: Option<String>,
    conversation: Option<String>,
    created_at: u64,
    store: bool,
}

/// A request's new input together with its history.
pub(super) struct ExpandedInput {
    pub(super) history: History,
    pub(super) new_input: NewInput,
    /// Both as the list of items for the engine.
    pub(super) input: Vec<u8>,
}

impl PreparedResponse {
    pub(super) fn meta(&self) -> ResponseMeta<'_> {
        ResponseMeta {
            id: &self.name,
            created_at: self.created_at,
            previous: self.previous.as_deref(),
            conversation: self.conversation.as_deref(),
            store: self.store,
        }
    }

    /// Names the conversation in the request's trace, if there are both.
    pub(super) fn name_conversation(&self, summary: Option<&SummaryCell>) {
        let trace = summary.and_then(SummaryCell::trace);
        if let (Some(trace), Some(id)) = (trace, &self.conversation) {
            trace.set_conversation(id);
        }
    }

    /// Replaces the history and the new input by `window`, a JSON array of items. The record has all of it.
    pub(super) fn continue_from(&mut self, window: Bytes) {
        self.history.chain = None;
        self.history.lists = vec![window.clone()];
        self.new_input.items.clear();
        if let Some(state) = &mut self.client_state {
            state.lists = vec![window.clone()];
        }
        self.history.client_held = Some(window);
    }

    /// The new input items, if a conversation will get them.
    pub(super) fn take_new_items(&mut self) -> Vec<Item> {
        match self.history.conversation {
            Some(_) => {
                let items = std::mem::take(&mut self.new_input.items);
                items.into_iter().map(Item::from).collect()
            }
            None => Vec::new(),
        }
    }
}

impl Responses {
    /// `has_record`: whether the store will have a record of it. `store`: what the Response object says.
    pub(super) async fn prepare(
        &self,
        create: &CreateRequest<'_>,
        history: History,
        reader: &StateReader<'_>,
        has_record: bool,
        store: bool,
        reserved: &mut Reservation<'_>,
    ) -> Result<PreparedResponse, ApiError> {
        let id = ResponseId::new(history.root, openai::random()?);
        let name = id.to_string();
        let ids = Ids::of(id);
        let ExpandedInput {
            history,
            new_input,
            input,
        } = self
            .expand(create, history, &ids, reader, Some(reserved))
            .await?;
        self.check_size(has_record, &history, &new_input)?;
        let client_state = self.client_state(create, reader, &name, &history, &new_input)?;
        let chain = history.chain.as_ref().and_then(|chain| chain.ids.last());
        let previous = history.previous.as_ref().or(chain);
        Ok(PreparedResponse {
            id,
            previous: previous.map(ResponseId::to_string),
            conversation: history
                .conversation
                .as_ref()
                .map(|conversation| conversation.id.to_string()),
            name,
            ids,
            history,
            new_input,
            input,
            client_state,
            created_at: reader.now_s,
            store,
        })
    }

    /// Reads what a request continues and its new input, with nothing locked. Where there is no memory for both, they
    /// are dropped, and read again once there is.
    pub(super) async fn read_input(
        &self,
        create: &CreateRequest<'_>,
        tenant: Tenant,
        access: Access,
        ids: &Ids,
        reserved: &mut Reservation<'_>,
    ) -> Result<ExpandedInput, ApiError> {
        reserved.let_wait();
        loop {
            // One for each reading: a reader counts what it has unpacked.
            let reader = self.state_reader(tenant, &create.model);
            let history = self.history(&create.parent, &reader, access).await?;
            let expanded = self
                .expand(create, history, ids, &reader, Some(&mut *reserved))
                .await;
            if !reserved.wait_for_lacking().await? {
                return expanded;
            }
        }
    }

    /// Reads the new input with everything it refers to, and appends it to the history. `reserved`: the memory of the
    /// request's body, if it counts; it grows before anything is expanded.
    pub(super) async fn expand(
        &self,
        create: &CreateRequest<'_>,
        history: History,
        ids: &Ids,
        reader: &StateReader<'_>,
        mut reserved: Option<&mut Reservation<'_>>,
    ) -> Result<ExpandedInput, ApiError> {
        let history_bytes = history.bytes();
        if let Some(reserved) = &mut reserved {
            reserved.grow_beyond_body(history_bytes as u64)?;
        }
        let referenced = self
            .referenced(create.input, &history, reader.tenant)
            .await?;
        let context = InputContext {
            ids,
            referenced: &referenced,
            referenced_bytes_max: MAX_HISTORY_BYTES,
            reader,
            keeps_ids: history.conversation.is_none(),
            param: "input",
        };
        let new_input = self.new_input(create.input, &context).await?;
        // The engine would read it twice.
        if let Some(id) = input::first_of(&history.lists, &new_input.earlier) {
            return Err(ApiError::duplicate_item(&id));
        }
        let body_bytes = create.input.map_or(0, str::len);
        if let Some(reserved) = reserved {
            // Referenced items, and what the client's state tokens have.
            let more = new_input.bytes().saturating_sub(body_bytes);
            let total = history_bytes + more;
            reserved.grow_beyond_body(total as u64)?;
        }
        let bytes = history_bytes + body_bytes;
        let mut input = EngineInput::new(bytes + bytes / 8 + 128);
        for list in &history.lists {
            input.add_list(list)?;
        }
        if create.parent != Parent::None {
            self.metrics.on_history(input.len(), history_bytes);
        }
        input.add_new(&new_input)?;
        let input = input.finish()?;
        if !create.input_may_be_empty && additional_tools::has_no_prompt(&input) {
            return Err(ApiError::missing_parameter("input"));
        }
        Ok(ExpandedInput {
            history,
            new_input,
            input,
        })
    }

    /// Checks that the input fits into the record or conversation, before an engine is asked. The output
    /// comes on top and is checked when it is stored.
    fn check_size(
        &self,
        has_record: bool,
        history: &History,
        new_input: &NewInput,
    ) -> Result<(), ApiError> {
        let new_bytes = new_input.bytes() + new_input.items.len();
        let record = history.client_held.as_ref().map_or(0, Bytes::len) + new_bytes;
        let whole = history.bytes() + new_bytes;
        let max = self.settings.store.retention.max_record;
        let is_too_large = (has_record && record as u64 > max)
            || (history.conversation.is_some() && whole as u64 > max);
        if is_too_large {
            Err(ApiError::too_large_to_store(max))
        } else {
            Ok(())
        }
    }

    /// The state that the client gets back as a token: only if it asked for one and nothing is stored.
    fn client_state(
        &self,
        create: &CreateRequest<'_>,
        reader: &StateReader<'_>,
        id: &str,
        history: &History,
        new_input: &NewInput,
    ) -> Result<Option<ClientState>, ApiError> {
        let signer = self.state_signer(create, reader, id);
        let Some(signer) = signer.filter(|_| !create.store) else {
            return Ok(None);
        };
        let mut lists = history.lists.clone();
        lists.push(new_input.json());
        let bytes = lists.iter().map(Bytes::len).sum();
        self.key_ring
            .check_size(bytes)
            .map_err(|why| ApiError::state_token_too_large(&why))?;
        Ok(Some(ClientState { signer, lists }))
    }

    /// Signs state tokens for this response, if the client asked for them.
    pub(super) fn state_signer(
        &self,
        create: &CreateRequest<'_>,
        reader: &StateReader<'_>,
        id: &str,
    ) -> Option<StateSigner> {
        create
            .includes(STATE_INCLUDE)
            .then(|| self.signer_of(create, reader, id))
    }

    /// Signs state tokens for this response.
    pub(super) fn signer_of(
        &self,
        create: &CreateRequest<'_>,
        reader: &StateReader<'_>,
        id: &str,
    ) -> StateSigner {
        StateSigner {
            key_ring: self.key_ring.clone(),
            tenant: reader.tenant,
            now_s: reader.now_s,
            response: id.to_owned(),
            model: self.relay.names().canonical(&create.model).to_owned(),
        }
    }

    pub(super) fn state_reader<'a>(&'a self, tenant: Tenant, model: &'a str) -> StateReader<'a> {
        StateReader::new(
            &self.key_ring,
            tenant,
            observe::unix_s().unsigned_abs(),
            self.relay.names().canonical(model),
        )
    }
}

/// The list of items for the engine: a history, and the new items of a turn as a conversation gets them.
pub(super) fn input_after(history: &History, new_items: &[Item]) -> Result<Vec<u8>, ApiError> {
    let bytes = history.bytes() + new_items.iter().map(|item| item.json.len()).sum::<usize>();
    let mut input = EngineInput::new(bytes + bytes / 8 + 128);
    for list in &history.lists {
        input.add_list(list)?;
    }
    for item in new_items {
        input.add(std::str::from_utf8(&item.json).unwrap_or_default())?;
    }
    input.finish()
}
