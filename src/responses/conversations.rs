//! `/v1/conversations`: lists of items to which responses are appended, one at a time.

use super::client_request::ClientRequest;
use super::input::{InputContext, NewInput, ReferencedItems};
use super::item::Ids;
use super::known_json;
use super::members::{Members, put, put_text};
use super::object::with_member;
use super::page::{self, Query};
use super::request as request_body;
use super::retry;
use super::service::Responses;
use crate::ids::{ConversationId, Root, Tenant};
use crate::openai::error::{Answer, ApiError};
use crate::store::{
    self, ConversationKey, IdempotencyToken, Item, ItemOutcome, ItemsOutcome, NewConversation,
    Page, PutOutcome,
};
use crate::{http, observe, openai};

/// Items in one request.
const ITEMS_MAX: usize = 20;

impl Responses {
    pub(super) async fn create_conversation(&self, request: &ClientRequest<'_>) -> Answer {
        // Every member is optional, and so is the body.
        let body = if request.body.is_empty() {
            b"{}"
        } else {
            &*request.body
        };
        let members = request_body::parse(body)?;
        let metadata = metadata(&members)?;
        let items = self.read_items(request, &members)?;
        let id = ConversationId::new(Root(fastrand::u64(..)), openai::random()?);
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
        let tenant = request.admitted.tenant;
        let key = ConversationKey { tenant, id };
        retry::while_unknown(|| self.store.create_conversation(key, new.clone()))
            .await
            .map_err(of_write)?;
        Ok(http::json(object))
    }

    pub(super) async fn conversation_object(&self, tenant: Tenant, id: &str) -> Answer {
        let object = self.store.conversation(key(tenant, id)?).await?;
        Ok(http::json(
            object.ok_or_else(|| ApiError::unknown_conversation(id))?,
        ))
    }

    pub(super) async fn update_conversation(
        &self,
        request: &ClientRequest<'_>,
        id: &str,
    ) -> Answer {
        let members = request_body::parse(&request.body)?;
        let metadata = metadata(&members)?;
        let metadata = match metadata {
            Some(metadata) => metadata,
            // As the SDK sends `None`.
            None if members.iter().any(|(name, _)| name == "metadata") => "{}",
            None => return Err(ApiError::missing_parameter("metadata")),
        };
        let key = key(request.admitted.tenant, id)?;
        let unknown = || ApiError::unknown_conversation(id);
        let object = self.store.conversation(key).await?;
        let object = with_member(&object.ok_or_else(unknown)?, "metadata", metadata);
        let new = object.clone().into();
        if self.store.update_conversation(key, new).await? {
            Ok(http::json(object))
        } else {
            Err(unknown())
        }
    }

    pub(super) async fn delete_conversation(&self, tenant: Tenant, id: &str) -> Answer {
        if self.store.delete_conversation(key(tenant, id)?).await? {
            let object = "conversation.deleted";
            Ok(http::json(format!(
                r#"{{"id":"{id}","object":"{object}","deleted":true}}"#
            )))
        } else {
            Err(ApiError::unknown_conversation(id))
        }
    }

    pub(super) async fn add_conversation_items(
        &self,
        request: &ClientRequest<'_>,
        id: &str,
    ) -> Answer {
        let members = request_body::parse(&request.body)?;
        if members.get("items").is_none() {
            return Err(ApiError::missing_parameter("items"));
        }
        let items = self.read_items(request, &members)?;
        let key = key(request.admitted.tenant, id)?;
        let token = IdempotencyToken(fastrand::u64(..));
        let put = retry::while_unknown(|| self.store.add_items(key, token, items.clone())).await;
        match put.map_err(of_write)? {
            PutOutcome::Done => Ok(http::json(page::of_items(&texts(&items), false))),
            PutOutcome::Gone => Err(ApiError::unknown_conversation(id)),
            PutOutcome::Taken(item) => {
                let why = format!("an item with id '{item}' exists already");
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
        match self.store.items(key(tenant, id)?, page).await? {
            ItemsOutcome::Found { items, has_more } => {
                Ok(http::json(page::of_items(&texts(&items), has_more)))
            }
            ItemsOutcome::Gone => Err(ApiError::unknown_conversation(id)),
            ItemsOutcome::UnknownAfter => {
                Err(page::unknown_after(&query.after.unwrap_or_default()))
            }
            ItemsOutcome::TooLarge { .. } => {
                let why = "the items are too large for one page; use a smaller limit";
                Err(ApiError::wrong_value("limit", why))
            }
        }
    }

    pub(super) async fn conversation_item(&self, tenant: Tenant, id: &str, item: &str) -> Answer {
        let found = self.store.item(key(tenant, id)?, item).await?;
        item_answer(found, id, item)
    }

    pub(super) async fn delete_conversation_item(
        &self,
        tenant: Tenant,
        id: &str,
        item: &str,
    ) -> Answer {
        let found = self.store.delete_item(key(tenant, id)?, item).await?;
        item_answer(found, id, item)
    }

    /// The `items` of a body, normalised.
    fn read_items(
        &self,
        request: &ClientRequest<'_>,
        members: &Members<'_>,
    ) -> Result<Vec<Item>, ApiError> {
        let raw = members.get("items");
        let count = raw.map(|raw| Some(known_json::values(raw)?.take(ITEMS_MAX + 1).count()));
        match count {
            Some(None) => return Err(ApiError::wrong_type("items", "a list of items")),
            Some(Some(count)) if count > ITEMS_MAX => {
                let why = format!("it may have at most {ITEMS_MAX} items");
                return Err(ApiError::wrong_value("items", why));
            }
            Some(Some(_)) | None => {}
        }
        let context = InputContext {
            ids: &Ids::random(openai::random()?),
            referenced: &ReferencedItems::new(),
            referenced_bytes_max: 0,
            reader: &self.state_reader(request.admitted.tenant, ""),
            // Two requests could bring the same id.
            keeps_ids: false,
            param: "items",
        };
        let new_input = NewInput::read(raw, &context)?;
        Ok(new_input.items.into_iter().map(Item::from).collect())
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
        openai::metadata::read(raw)?;
    }
    Ok(metadata)
}

fn item_answer(found: ItemOutcome, id: &str, item: &str) -> Answer {
    match found {
        ItemOutcome::Found(found) => Ok(http::json(found)),
        ItemOutcome::NoItem => Err(ApiError::unknown_conversation_item(item)),
        ItemOutcome::Gone => Err(ApiError::unknown_conversation(id)),
    }
}

fn key(tenant: Tenant, id: &str) -> Result<ConversationKey, ApiError> {
    let id = id.parse().map_err(|_| ApiError::unknown_conversation(id))?;
    Ok(ConversationKey { tenant, id })
}

/// The error of a write that must not be repeated blindly.
fn of_write(error: store::Error) -> ApiError {
    match error {
        store::Error::Unknown { .. } => ApiError::unknown_outcome(),
        store::Error::TooLarge { bytes, max } => {
            let why = format!("the conversation would have {bytes} bytes, and may have {max}");
            ApiError::wrong_value("items", why)
        }
        error => error.into(),
    }
}
