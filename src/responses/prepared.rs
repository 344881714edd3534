//! A request that is ready to be made: named, with its whole input and what its end will need. Nothing is
//! begun for it.

use super::Responses;
use super::create::Expanded;
use super::finish::Carry;
use super::input::Own;
use super::item::Ids;
use super::object::Header;
use super::past::Past;
use super::request::{self, Create};
use super::sealing::Opener;
use crate::ids::ResponseId;
use crate::openai::error::ApiError;
use crate::store::Item;

pub(super) struct Prepared {
    pub(super) id: ResponseId,
    /// The same, as clients and engines know it.
    pub(super) name: String,
    pub(super) past: Past,
    pub(super) own: Own,
    /// The list of items that an engine is sent.
    pub(super) input: Vec<u8>,
    pub(super) carry: Option<Carry>,
    previous: Option<String>,
    conversation: Option<String>,
    created_at: u64,
    store: bool,
}

impl Prepared {
    pub(super) fn header(&self) -> Header<'_> {
        Header {
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
        create: &Create<'_>,
        past: Past,
        opener: &Opener<'_>,
        is_kept: bool,
        store: bool,
    ) -> Result<Prepared, ApiError> {
        let id = ResponseId::new(past.root, request::random()?);
        let name = id.to_string();
        let expanded = self.expand(create, past, &Ids::of(id), opener).await?;
        let Expanded { past, own, input } = expanded;
        self.check_size(is_kept, &past, &own)?;
        let carry = self.carry(create, opener, &name, &past, &own)?;
        let previous = past.chain.as_ref().and_then(|chain| chain.chain.last());
        Ok(Prepared {
            id,
            previous: previous.map(ResponseId::to_string),
            conversation: past.conversation.as_ref().map(|it| it.id.to_string()),
            name,
            past,
            own,
            input,
            carry,
            created_at: opener.now_s,
            store,
        })
    }
}
