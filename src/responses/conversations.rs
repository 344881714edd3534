//! Conversations: lists of items that responses are added to, one after the other.

use std::sync::atomic::AtomicU64;

use hyper::Response;

use super::client_state::StateReader;
use super::input::{InputContext, NewInput, ReferencedItems};
use super::item::Ids;
use super::members::{self, Members, put, put_text};
use super::object::with_member;
use super::page::{self, Query};
use super::stored::json;
use super::{ClientRequest, Responses, request, retry};
use crate::ids::{ConversationId, Root, Tenant};
use crate::openai::error::ApiError;
use crate::store::{
    self, ConversationKey, IdempotencyToken, Item, ItemOutcome, ItemsOutcome, NewConversation,
    Page, PutOutcome,
};
use crate::{http, observe};

/// Of one request.
const ITEMS_MAX: usize = 20;

type Answer = Result<Response<http::Body>, ApiError>;

impl Responses {
    pub(super) async fn create_conversation(&self, call: &ClientRequest<'_>) -> Answer {
        // All of it may be left out, and so may the body.
        let body = if call.body.is_empty() {
            b"{}"
        } else {
            &*call.body
        };
        let members = request::parse(body)?;
        let metadata = metadata(&members)?;
        let items = self.items_of(call, &members)?;
        let id = ConversationId::new(Root(fastrand::u64(..)), request::random()?);
        let mut object = br#"{"id":"#.to_vec();
        put_text(&mut object, &id.to_string());
        put(&mut object, "object", "\"conversation\"");
        put(&mut object, "created_at", &observe::unix_s().to_string());
        put(&mut object, "metadata", metadata.unwrap_or("{}"));
        object.push(b'}');
        let new = NewConversation {
            token: IdempotencyToken(fastrand::u64(..)),
            object: object.clone().into(),
            items,
        };
        let tenant = call.admitted.tenant;
        let key = ConversationKey { tenant, id };
        retry::while_unknown(|| self.store.create_conversation(key, new.clone()))
            .await
            .map_err(of_write)?;
        Ok(json(object))
    }

    pub(super) async fn conversation_object(&self, tenant: Tenant, id: &str) -> Answer {
        let object = self.store.conversation(key(tenant, id)?).await;
        let object = object.map_err(of_store)?;
        Ok(json(
            object.ok_or_else(|| ApiError::unknown_conversation(id))?,
        ))
    }

    pub(super) async fn update_conversation(&self, call: &ClientRequest<'_>, id: &str) -> Answer {
        let members = request::parse(&call.body)?;
        let metadata = metadata(&members)?;
        let metadata = metadata.ok_or_else(|| ApiError::missing_parameter("metadata"))?;
        let key = key(call.admitted.tenant, id)?;
        let unknown = || ApiError::unknown_conversation(id);
        let object = self.store.conversation(key).await.map_err(of_store)?;
        let object = with_member(&object.ok_or_else(unknown)?, "metadata", metadata);
        let updated = self
            .store
            .update_conversation(key, object.clone().into())
            .await;
        match updated.map_err(of_store)? {
            true => Ok(json(object)),
            false => Err(unknown()),
        }
    }

    pub(super) async fn delete_conversation(&self, tenant: Tenant, id: &str) -> Answer {
        let deleted = self.store.delete_conversation(key(tenant, id)?).await;
        match deleted.map_err(of_store)? {
            true => {
                let object = "conversation.deleted";
                Ok(json(format!(
                    r#"{{"id":"{id}","object":"{object}","deleted":true}}"#
                )))
            }
            false => Err(ApiError::unknown_conversation(id)),
        }
    }

    pub(super) async fn add_conversation_items(
        &self,
        call: &ClientRequest<'_>,
        id: &str,
    ) -> Answer {
        let members = request::parse(&call.body)?;
        if members.get("items").is_none() {
            return Err(ApiError::missing_parameter("items"));
        }
        let items = self.items_of(call, &members)?;
        let key = key(call.admitted.tenant, id)?;
        let token = IdempotencyToken(fastrand::u64(..));
        let put = retry::while_unknown(|| self.store.add_items(key, token, items.clone())).await;
        match put.map_err(of_write)? {
            PutOutcome::Done => Ok(json(page::of_items(&texts(&items), false))),
            PutOutcome::Gone => Err(ApiError::unknown_conversation(id)),
            PutOutcome::Taken(item) => {
                let why = format!("an item with id '{item}' is there already");
                Err(ApiError::wrong_value("items", why))
            }
            PutOutcome::Unlocked => Err(ApiError::locked_conversation()),
        }
    }

    pub(super) async fn conversation_items(&self, tenant: Tenant, id: &str, query: &str) -> Answer {
        let query = Query::read(query)?;
        let page = Page {
            after: query.after.as_deref().map(Into::into),
            limit: query.limit,
            order: query.order,
        };
        let items = self.store.items(key(tenant, id)?, page).await;
        match items.map_err(of_store)? {
            ItemsOutcome::Found { items, has_more } => {
                Ok(json(page::of_items(&texts(&items), has_more)))
            }
            ItemsOutcome::Gone => Err(ApiError::unknown_conversation(id)),
            ItemsOutcome::UnknownAfter => {
                Err(page::unknown_after(&query.after.unwrap_or_default()))
            }
            ItemsOutcome::TooLarge { .. } => {
                let why = "its items are too large for one page; ask for fewer";
                Err(ApiError::wrong_value("limit", why))
            }
        }
    }

    pub(super) async fn conversation_item(&self, tenant: Tenant, id: &str, item: &str) -> Answer {
        let found = self.store.item(key(tenant, id)?, item).await;
        one(found, id, item)
    }

    pub(super) async fn delete_conversation_item(
        &self,
        tenant: Tenant,
        id: &str,
        item: &str,
    ) -> Answer {
        let found = self.store.delete_item(key(tenant, id)?, item).await;
        one(found, id, item)
    }

    /// The `items` of a body, normalised.
    fn items_of(
        &self,
        call: &ClientRequest<'_>,
        members: &Members<'_>,
    ) -> Result<Vec<Item>, ApiError> {
        let raw = members.get("items");
        let count = raw.map(|raw| members::list(raw).map(|items| items.len()));
        match count {
            Some(None) => return Err(ApiError::wrong_type("items", "a list of items")),
            Some(Some(count)) if count > ITEMS_MAX => {
                let why = format!("it may have {ITEMS_MAX} items");
                return Err(ApiError::wrong_value("items", why));
            }
            Some(Some(_)) | None => {}
        }
        let state_reader = StateReader {
            key_ring: &self.key_ring,
            tenant: call.admitted.tenant,
            now_s: observe::unix_s().unsigned_abs(),
            model: "",
            plain_bytes: AtomicU64::new(0),
        };
        let reading = InputContext {
            ids: &Ids::random(request::random()?),
            referenced: &ReferencedItems::new(),
            referenced_bytes_max: 0,
            state_reader: &state_reader,
            // Another request may have brought the same.
            keeps_ids: false,
            param: "items",
        };
        let own = NewInput::read(raw, &reading)?;
        Ok(own.items.into_iter().map(Item::from).collect())
    }
}

fn texts(items: &[Item]) -> Vec<&str> {
    items
        .iter()
        .filter_map(|item| std::str::from_utf8(&item.json).ok())
        .collect()
}

fn metadata<'a>(members: &Members<'a>) -> Result<Option<&'a str>, ApiError> {
    let metadata = members.get("metadata");
    if let Some(raw) = metadata {
        request::check_metadata(raw)?;
    }
    Ok(metadata)
}

fn one(found: Result<ItemOutcome, store::Error>, id: &str, item: &str) -> Answer {
    match found.map_err(of_store)? {
        ItemOutcome::Found(found) => Ok(json(found)),
        ItemOutcome::NoItem => Err(ApiError::unknown_conversation_item(item)),
        ItemOutcome::Gone => Err(ApiError::unknown_conversation(id)),
    }
}

fn key(tenant: Tenant, id: &str) -> Result<ConversationKey, ApiError> {
    let id = id.parse().map_err(|_| ApiError::unknown_conversation(id))?;
    Ok(ConversationKey { tenant, id })
}

fn of_store(error: store::Error) -> ApiError {
    ApiError::of_store(&error)
}

/// Of a write that would be another one if the client sent it again.
fn of_write(error: store::Error) -> ApiError {
    match error {
        store::Error::Unknown { .. } => ApiError::unknown_outcome(),
        error => of_store(error),
    }
}
