//! The operations on conversations: their object, items and lock.

use bytes::Bytes;

use super::client::Redis;
use super::packed::Packed;
use super::reply::Reply;
use super::request::{Kind, Request};
use super::scripts::{Call, Name};
use super::values::fields_of;
use crate::observe::metrics::words;
use crate::store::conversation::{Order, TOKENS_MAX};
use crate::store::meters::Op;
use crate::store::{
    Claim, Commit, ConversationKey, Conversations, Error, IdempotencyToken, Item, ItemOutcome,
    ItemsOutcome, LockOutcome, NewConversation, Page, PutOutcome, StoreFuture,
};

/// Items that are packed, their pieces written, and not yet part of a conversation.
pub(super) struct PreparedItems {
    packed: Vec<Packed>,
    item_values: String,
    pieces: Vec<String>,
}

words! {
    /// The operation that adds items to a conversation.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum PutKind {
        Create = "create",
        Add = "add",
        Commit = "commit",
    }
}

impl Conversations for Redis {
    fn create_conversation(
        &self,
        key: ConversationKey,
        new: NewConversation,
    ) -> StoreFuture<'_, ()> {
        self.meters
            .meter(Op::CreateConversation, move || async move {
                let object = self.pack_object(&new.object).await?;
                match self
                    .put_items(key, PutKind::Create, new.token, new.items, object)
                    .await?
                {
                    PutOutcome::Done => Ok(()),
                    PutOutcome::Gone | PutOutcome::Taken(_) | PutOutcome::Unlocked => {
                        Err(Error::Exists)
                    }
                }
            })
    }

    fn conversation(&self, key: ConversationKey) -> StoreFuture<'_, Option<Bytes>> {
        self.meters.meter(Op::Conversation, move || async move {
            let [conversation, ..] = self.keys.conversation(key);
            let call = fields_of(conversation, &["v", "ob"]);
            let mut reply = self.call(Kind::Read, call).await?;
            match reply.version()? {
                Some(()) => self.unpack(reply.whole("object")?).await.map(Some),
                None => Ok(None),
            }
        })
    }

    fn update_conversation(&self, key: ConversationKey, object: Bytes) -> StoreFuture<'_, bool> {
        self.meters
            .meter(Op::UpdateConversation, move || async move {
                let call = self
                    .call_about(Name::CONVERSATION, key)
                    .arg("update")
                    .arg(self.pack_object(&object).await?)
                    .number(self.keep.conversations.as_millis() as u64);
                existed(self.call_replicated(Kind::Write, call).await?)
            })
    }

    fn delete_conversation(&self, key: ConversationKey) -> StoreFuture<'_, bool> {
        self.meters
            .meter(Op::DeleteConversation, move || async move {
                let call = self.call_about(Name::CONVERSATION, key).arg("delete");
                existed(self.call_replicated(Kind::WriteOnce, call).await?)
            })
    }

    fn add_items(
        &self,
        key: ConversationKey,
        token: IdempotencyToken,
        items: Vec<Item>,
    ) -> StoreFuture<'_, PutOutcome> {
        self.meters.meter(Op::AddItems, move || {
            self.put_items(key, PutKind::Add, token, items, Bytes::new())
        })
    }

    fn items(&self, key: ConversationKey, page: Page) -> StoreFuture<'_, ItemsOutcome> {
        self.meters.meter(Op::Items, move || async move {
            self.read_items(key, "page", &page, 0).await
        })
    }

    fn all_items(&self, key: ConversationKey, bytes_max: u64) -> StoreFuture<'_, ItemsOutcome> {
        self.meters.meter(Op::AllItems, move || async move {
            let page = Page {
                after: None,
                limit: u32::MAX,
                order: Order::OldestFirst,
            };
            self.read_items(key, "all", &page, bytes_max).await
        })
    }

    fn item(&self, key: ConversationKey, item: &str) -> StoreFuture<'_, ItemOutcome> {
        let item = item.to_owned();
        self.meters.meter(Op::Item, move || async move {
            let call = self.call_about(Name::ITEMS, key).arg("one").arg(item);
            let call = call.number(0).arg("asc").number(0).number(0);
            let mut reply = self.call(Kind::Read, call).await?;
            match reply.word()?.as_str() {
                "ok" => {}
                "gone" => return Ok(ItemOutcome::Gone),
                "no_item" => return Ok(ItemOutcome::NoItem),
                other => return Err(reply.unexpected(other)),
            }
            let (_, _) = (reply.word()?, reply.word()?);
            match self.item_of(key, reply.whole("item")?).await? {
                Some(json) => Ok(ItemOutcome::Found(json)),
                // Items are never replaced, so it was deleted meanwhile.
                None => Ok(ItemOutcome::NoItem),
            }
        })
    }

    fn delete_item(&self, key: ConversationKey, item: &str) -> StoreFuture<'_, ItemOutcome> {
        let item = item.to_owned();
        self.meters.meter(Op::DeleteItem, move || async move {
            let call = self.call_about(Name::DELETE_ITEM, key).arg(item);
            let mut reply = self.call_replicated(Kind::WriteOnce, call).await?;
            match reply.word()?.as_str() {
                "ok" => {
                    let object = reply.whole("object")?;
                    Ok(ItemOutcome::Found(self.unpack(object).await?))
                }
                "gone" => Ok(ItemOutcome::Gone),
                "no_item" => Ok(ItemOutcome::NoItem),
                other => Err(reply.unexpected(other)),
            }
        })
    }

    fn lock(&self, key: ConversationKey, claim: Claim) -> StoreFuture<'_, LockOutcome> {
        self.meters
            .meter(Op::Lock, move || self.take_lock(key, "lock", claim))
    }

    fn renew_lock(&self, key: ConversationKey, claim: Claim) -> StoreFuture<'_, LockOutcome> {
        self.meters
            .meter(Op::RenewLock, move || self.take_lock(key, "renew", claim))
    }

    fn commit(&self, commit: Commit) -> StoreFuture<'_, PutOutcome> {
        self.meters.meter(Op::Commit, move || {
            let (key, token) = (commit.conversation, commit.token);
            self.put_items(key, PutKind::Commit, token, commit.items, Bytes::new())
        })
    }

    fn unlock(&self, key: ConversationKey, token: IdempotencyToken) -> StoreFuture<'_, ()> {
        self.meters.meter(Op::Unlock, move || async move {
            let call = self.call_about(Name::CONVERSATION, key).arg("unlock");
            let call = call.arg(token.to_string());
            existed(self.call(Kind::Write, call).await?)?;
            Ok(())
        })
    }
}

impl Redis {
    pub(super) fn call_about(&self, name: Name, key: ConversationKey) -> Call {
        Call::new(name).keys(self.keys.conversation(key))
    }

    /// Packs a conversation object or a document, which must fit into one field.
    pub(super) async fn pack_object(&self, object: &Bytes) -> Result<Bytes, Error> {
        let packed = self.pack(object).await?;
        if !packed.pieces.is_empty() {
            return Err(Error::TooLarge {
                bytes: object.len() as u64,
                max: 1 << 20,
            });
        }
        Ok(packed.field)
    }

    async fn put_items(
        &self,
        key: ConversationKey,
        kind: PutKind,
        token: IdempotencyToken,
        items: Vec<Item>,
        object: Bytes,
    ) -> Result<PutOutcome, Error> {
        let prepared = self.prepare_items(key, kind, &items).await?;
        let call = self
            .call_about(Name::PUT_ITEMS, key)
            .arg(kind.as_str())
            .arg(token.to_string())
            .number(self.keep.conversations.as_millis() as u64)
            .number(self.keep.max_record)
            .arg(object)
            .number(TOKENS_MAX as u64);
        let call = with_items(call, &items, &prepared);
        self.put_with(call, prepared).await
    }

    /// Calls a script that adds `items` and maybe more, or nothing at all.
    pub(super) async fn put_with(
        &self,
        call: Call,
        items: PreparedItems,
    ) -> Result<PutOutcome, Error> {
        let mut reply = match self.call_replicated(Kind::Write, call).await {
            Ok(reply) => reply,
            Err(error) => {
                // If the items may have been written, their pieces must stay.
                if !matches!(error, Error::Unknown { .. }) {
                    self.drop_items(items);
                }
                return Err(error);
            }
        };
        let put = match reply.word()?.as_str() {
            "ok" => return Ok(PutOutcome::Done),
            // The stored items use the pieces of the first write.
            "again" => Ok(PutOutcome::Done),
            "gone" => Ok(PutOutcome::Gone),
            "taken" => Ok(PutOutcome::Taken(reply.word()?.into())),
            "unlocked" => Ok(PutOutcome::Unlocked),
            "exists" => Err(Error::Exists),
            "too_large" => Err(Error::TooLarge {
                bytes: reply.count()?,
                max: self.keep.max_record,
            }),
            other => Err(reply.unexpected(other)),
        };
        self.drop_items(items);
        put
    }

    /// Packs items and writes the pieces of large ones.
    async fn prepare_items(
        &self,
        key: ConversationKey,
        kind: PutKind,
        items: &[Item],
    ) -> Result<PreparedItems, Error> {
        let [conversation, item_values, _] = self.keys.conversation(key);
        let values = items.iter().map(|item| item.json.clone()).collect();
        let packed = self.pack_all(values).await?;
        let mut pieces = Vec::new();
        for packed in &packed {
            for (field, piece) in packed.fields("k") {
                pieces.push(field.clone());
                let call = Call::new(Name::ITEM_CHUNK)
                    .key(conversation.clone())
                    .key(item_values.clone())
                    .arg(field)
                    .arg(piece.clone())
                    .arg(if kind == PutKind::Create {
                        "create"
                    } else {
                        ""
                    });
                if let Err(error) = self.execute(Kind::Write, Request::Script(call)).await {
                    self.delete_pieces(item_values, pieces);
                    return Err(error);
                }
            }
        }
        Ok(PreparedItems {
            packed,
            item_values,
            pieces,
        })
    }

    /// Adds the items of a commit to a call of the script that ends their response.
    pub(super) async fn commit_in(
        &self,
        call: Call,
        commit: &Commit,
    ) -> Result<(Call, PreparedItems), Error> {
        let prepared = self
            .prepare_items(commit.conversation, PutKind::Commit, &commit.items)
            .await?;
        let call = call
            .keys(self.keys.conversation(commit.conversation))
            .number(commit.items.len() as u64)
            .arg(commit.token.to_string())
            .number(self.keep.conversations.as_millis() as u64)
            .number(self.keep.max_record)
            .number(TOKENS_MAX as u64);
        Ok((with_items(call, &commit.items, &prepared), prepared))
    }

    /// Deletes the pieces of items that did not become part of a conversation.
    pub(super) fn drop_items(&self, items: PreparedItems) {
        self.delete_pieces(items.item_values, items.pieces);
    }

    /// Deletes pieces of values of a hash that nothing refers to.
    pub(super) fn delete_pieces(&self, hash: String, pieces: Vec<String>) {
        if !pieces.is_empty() {
            self.send_detached(Request::command("HDEL", (hash, pieces)));
        }
    }

    /// `how`: `lock` or `renew`.
    async fn take_lock(
        &self,
        key: ConversationKey,
        how: &'static str,
        claim: Claim,
    ) -> Result<LockOutcome, Error> {
        let call = self
            .call_about(Name::CONVERSATION, key)
            .arg(how)
            .arg(claim.token.to_string())
            .number(claim.lease.as_millis() as u64);
        let mut reply = self.call(Kind::Write, call).await?;
        match reply.word()?.as_str() {
            "ok" => Ok(LockOutcome::Locked),
            "busy" => Ok(LockOutcome::Busy),
            "lost" => Ok(LockOutcome::Lost),
            "gone" => Ok(LockOutcome::Gone),
            other => Err(reply.unexpected(other)),
        }
    }
}

/// Adds id, size and value of each item to the arguments.
fn with_items(mut call: Call, items: &[Item], prepared: &PreparedItems) -> Call {
    for (item, packed) in items.iter().zip(&prepared.packed) {
        let bytes = item.id.len() + item.json.len();
        call = call
            .arg(item.id.as_bytes().to_vec())
            .number(bytes as u64)
            .arg(packed.field.clone());
    }
    call
}

/// False if there is no such conversation.
fn existed(mut reply: Reply) -> Result<bool, Error> {
    match reply.word()?.as_str() {
        "ok" => Ok(true),
        "gone" => Ok(false),
        other => Err(reply.unexpected(other)),
    }
}
