//! A request that is ready to be made: named, with its whole input and what its end will need. Nothing is
//! begun for it.

use super::Responses;
use super::client_state::StateReader;
use super::create::ExpandedInput;
use super::finish::ClientState;
use super::history::History;
use super::input::NewInput;
use super::item::Ids;
use super::object::ResponseMeta;
use super::request::{self, CreateRequest};
use crate::ids::ResponseId;
use crate::openai::error::ApiError;
use crate::store::Item;

pub(super) struct PreparedResponse {
    pub(super) id: ResponseId,
    /// The same, as clients and engines know it.
    pub(super) name: String,
    pub(super) past: History,
    pub(super) own: NewInput,
    /// The list of items that an engine is sent.
    pub(super) input: Vec<u8>,
    pub(super) client_state: Option<ClientState>,
    previous: Option<String>,
    conversation: Option<String>,
    created_at: u64,
    store: bool,
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

    /// Its own items one by one, where a conversation will take them.
    pub(super) fn take_own(&mut self) -> Vec<Item> {
        match self.past.conversation {
            Some(_) => {
                let items = std::mem::take(&mut self.own.items);
                items.into_iter().map(Item::from).collect()
            }
            None => Vec::new(),
        }
    }
}

impl Responses {
    /// `is_kept`: there will be a record of it; `store` is what its client is told of that.
    pub(super) async fn prepare(
        &self,
        create: &CreateRequest<'_>,
        past: History,
        state_reader: &StateReader<'_>,
        is_kept: bool,
        store: bool,
    ) -> Result<PreparedResponse, ApiError> {
        let id = ResponseId::new(past.root, request::random()?);
        let name = id.to_string();
        let expanded = self
            .expand(create, past, &Ids::of(id), state_reader)
            .await?;
        let ExpandedInput { past, own, input } = expanded;
        self.check_size(is_kept, &past, &own)?;
        let client_state = self.client_state(create, state_reader, &name, &past, &own)?;
        let previous = past.chain.as_ref().and_then(|chain| chain.ids.last());
        Ok(PreparedResponse {
            id,
            previous: previous.map(ResponseId::to_string),
            conversation: past.conversation.as_ref().map(|it| it.id.to_string()),
            name,
            past,
            own,
            input,
            client_state,
            created_at: state_reader.now_s,
            store,
        })
    }
}
