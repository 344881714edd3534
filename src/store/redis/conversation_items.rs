//! Reads the items of conversations.

use bytes::Bytes;

use super::client::Redis;
use super::packed::BATCH_BYTES;
use super::reply::malformed;
use super::request::Kind;
use super::scripts::Name;
use super::values::REREADS_MAX;
use crate::store::conversation::Order;
use crate::store::{ConversationKey, Error, Item, ItemsOutcome, Page};

/// Items that one read of a conversation goes through: about three milliseconds of Redis on a busy machine.
const ITEMS_AT_A_TIME: u32 = 1_000;

impl Redis {
    /// Reads in batches, so that small reads of other requests are not blocked. Items added meanwhile may be
    /// included. If the last item of a batch is deleted before the next batch, reading starts over.
    pub(super) async fn read_items(
        &self,
        key: ConversationKey,
        which: &'static str,
        page: &Page,
        bytes_max: u64,
    ) -> Result<ItemsOutcome, Error> {
        let mut items: Vec<Item> = Vec::new();
        let mut rereads = 0;
        loop {
            let after = items.last().map(|item| &item.id).or(page.after.as_ref());
            let after = after.map_or(Vec::new(), |id| id.as_bytes().to_vec());
            let left = page.limit.saturating_sub(items.len() as u32);
            let call = self
                .call_about(Name::ITEMS, key)
                .arg(which)
                .arg(after)
                .number(left.min(ITEMS_AT_A_TIME).into())
                .arg(match page.order {
                    Order::OldestFirst => "asc",
                    Order::NewestFirst => "desc",
                })
                .number(bytes_max)
                .number(BATCH_BYTES as u64)
                .expecting(BATCH_BYTES as u64);
            let mut reply = self.call(Kind::Read, call).await?;
            match reply.word()?.as_str() {
                "ok" => {}
                "gone" => return Ok(ItemsOutcome::Gone),
                "unknown_after" if items.is_empty() => return Ok(ItemsOutcome::UnknownAfter),
                "unknown_after" if rereads < REREADS_MAX => {
                    rereads += 1;
                    items.clear();
                    continue;
                }
                "too_large" => {
                    return Ok(ItemsOutcome::TooLarge {
                        bytes: reply.count()?,
                    });
                }
                other => return Err(reply.unexpected(other)),
            }
            let has_more = reply.word()? == "1";
            let mut is_whole = true;
            while is_whole && !reply.is_empty() {
                let id = reply.word()?.into();
                let packed = reply.whole("item")?;
                match self.item_of(key, packed).await? {
                    Some(json) => items.push(Item { id, json }),
                    // Deleted since: continue after the last item that was read.
                    None if rereads < REREADS_MAX => {
                        rereads += 1;
                        is_whole = false;
                    }
                    None => return Err(malformed("a piece of an item is missing")),
                }
            }
            if is_whole && (!has_more || items.len() as u64 >= page.limit.into()) {
                return Ok(ItemsOutcome::Found { items, has_more });
            }
        }
    }

    pub(super) async fn item_of(
        &self,
        key: ConversationKey,
        packed: Vec<u8>,
    ) -> Result<Option<Bytes>, Error> {
        let [_, values, _] = self.keys.conversation(key);
        self.assemble(&values, "k", packed).await
    }
}
