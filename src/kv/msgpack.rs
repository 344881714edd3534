//! Decodes vLLM's event payloads from msgpack to a [`Batch`]. Events are maps (since vLLM 0.24) or arrays
//! (before), hashes are integers or bytes, and a batch is an array or a map.
//!
//! Bytes are read once, straight into the batch. A length is refused if fewer bytes follow, and the counts of
//! one batch are bounded, so decoding uses a small multiple of the payload's size in memory.

pub mod load_stat;
mod read;
mod repeated;
mod sglang;
mod values;

use std::ops::Range;

use self::read::{Cursor, Read};
use super::event::{Batch, EngineHash, Event, ExtraKey, Location, Stored};
use super::source::DecodeError;

/// Events in one batch: far more than a scheduler step produces. A decoded event takes about 300 bytes.
const EVENTS_MAX: usize = 65_536;
/// Hashes and extra keys of one batch: enough for 16 million tokens in blocks of 16.
const BLOCKS_MAX: usize = 1 << 20;

/// Field names of a `BlockStored` event, in the order in which an event that is an array has them after its
/// type. An event that is a map has the names as keys. New releases append fields.
const STORED: &[&str] = &[
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
];
/// Field names of a `BlockRemoved` event, in the order of the array form.
const REMOVED: &[&str] = &[
    "block_hashes",
    "medium",
    "group_idx",
    "locality",
    "ownership",
];
/// Field names of an `AllBlocksCleared` event, in the order of the array form.
const CLEARED: &[&str] = &["ownership"];

/// Decodes a payload. The error says what is wrong and at which byte.
pub fn decode(payload: &[u8]) -> Result<Batch, DecodeError> {
    let mut reader = Reader {
        cursor: Cursor::new(payload),
        blocks_left: BLOCKS_MAX,
        removed: Vec::new(),
        removed_one: None,
    };
    reader
        .batch()
        .map_err(|fault| DecodeError(fault.to_string()))
}

struct Reader<'a> {
    cursor: Cursor<'a>,
    /// Hashes and extra keys that this batch may still contain.
    blocks_left: usize,
    /// Buffer for the hashes of a removal, reused to avoid allocations.
    removed: Vec<EngineHash>,
    /// Where the hash is of a removal of one block.
    removed_one: Option<Range<usize>>,
}

/// The fields of an event of any type. [`Reader::build`] checks that none is missing.
#[derive(Default)]
struct Fields {
    hashes: Option<Vec<EngineHash>>,
    /// The event is of an unknown type, and may name blocks in a form that is unknown too.
    has_unreadable_hashes: bool,
    token_ids: Option<Vec<u32>>,
    /// The token after each of `token_ids`, if they came in pairs.
    next_ids: Vec<u32>,
    block_size: Option<u32>,
    parent: Option<EngineHash>,
    lora_id: Option<i64>,
    lora_name: Option<Box<str>>,
    cache_salt: Option<Box<str>>,
    extra_keys: Vec<Vec<ExtraKey>>,
    lookahead: Vec<Box<[u32]>>,
    location: Location,
    spec_kind: Option<Box<str>>,
    sliding_window: Option<u32>,
    session_id: Option<Box<str>>,
}

/// The required fields of a batch that were read.
#[derive(Default)]
struct Seen {
    timestamp: bool,
    events: bool,
}

impl<'a> Reader<'a> {
    fn batch(&mut self) -> Read<Batch> {
        let mut batch = Batch::default();
        let mut seen = Seen::default();
        if self.cursor.is_array() {
            let fields = self.cursor.array()?;
            for index in 0..fields {
                let order: [&[u8]; 3] = [b"ts", b"events", b"data_parallel_rank"];
                let key = order.get(index).copied().unwrap_or_default();
                self.batch_field(key, &mut batch, &mut seen)?;
            }
        } else {
            for _ in 0..self.cursor.map()? {
                let key = self.cursor.name()?;
                self.batch_field(key, &mut batch, &mut seen)?;
            }
        }
        if !(seen.timestamp && seen.events) {
            return Err(self.cursor.fault("a batch without a timestamp or events"));
        }
        match self.cursor.left() {
            0 => Ok(batch),
            left => Err(self.cursor.fault(format!("{left} bytes after the batch"))),
        }
    }

    fn batch_field(&mut self, key: &[u8], batch: &mut Batch, seen: &mut Seen) -> Read<()> {
        match key {
            b"ts" => {
                batch.timestamp = self.cursor.float().map_err(|fault| fault.under("ts"))?;
                seen.timestamp = true;
            }
            b"events" => {
                self.events(batch).map_err(|fault| fault.under("events"))?;
                seen.events = true;
            }
            b"data_parallel_rank" | b"attn_dp_rank" => {
                let rank = self.or_nil(|reader| reader.cursor.u32());
                batch.rank = rank.map_err(|fault| fault.under_name(key))?;
            }
            _ => {
                self.cursor.skip()?;
            }
        }
        Ok(())
    }

    fn events(&mut self, batch: &mut Batch) -> Read<()> {
        let len = self.cursor.array()?;
        if len > EVENTS_MAX {
            return Err(self.cursor.fault(format!("more than {EVENTS_MAX} events")));
        }
        batch.events.clear();
        batch.joined = 0;
        let mut index = 0;
        while index < len {
            let start = self.cursor.clone();
            self.event(batch).map_err(|fault| fault.under_item(index))?;
            index += 1;
            if let Some(hash) = self.removed_one.take() {
                index += self.removals_like(start, hash, len - index, batch);
            }
        }
        Ok(())
    }

    fn event(&mut self, batch: &mut Batch) -> Read<()> {
        if self.cursor.is_array() {
            let len = self.cursor.array()?;
            if len == 0 {
                return Err(self.cursor.fault("an event without a type"));
            }
            let kind = self.cursor.name().map_err(|fault| fault.under("type"))?;
            let order = order_of(kind);
            self.fields(kind, len - 1, batch, |_, index| {
                Ok(order.get(index).map_or(&[], |name| name.as_bytes()))
            })
        } else {
            let len = self.cursor.map()?;
            let kind = self.kind_in_map(len)?;
            self.fields(kind, len, batch, |reader, _| reader.cursor.name())
        }
    }

    /// The type of an event that is a map. Engines write it first, but the order of keys is not guaranteed. The
    /// cursor stays at the first key.
    fn kind_in_map(&mut self, len: usize) -> Read<&'a [u8]> {
        let mut ahead = self.cursor.clone();
        for _ in 0..len {
            if ahead.name()? == b"type" {
                return ahead.name().map_err(|fault| fault.under("type"));
            }
            ahead.skip()?;
        }
        Err(self.cursor.fault("an event without a type"))
    }

    /// Reads an event of type `kind` with `len` fields into the batch. `key` returns the name of a field: for an array
    /// by its index, for a map by reading it.
    fn fields(
        &mut self,
        kind: &[u8],
        len: usize,
        batch: &mut Batch,
        mut key: impl FnMut(&mut Self, usize) -> Read<&'a [u8]>,
    ) -> Read<()> {
        if kind == b"BlockRemoved" {
            return self.removal(len, batch, key);
        }
        let order = order_of(kind);
        let mut fields = Fields::default();
        for index in 0..len {
            let key = key(self, index)?;
            // Skip fields of other event types and of later releases.
            let is_named_only = matches!(key, b"cache_salt" | b"lookahead_token_ids");
            if order.iter().any(|name| name.as_bytes() == key)
                || (is_named_only && kind == b"BlockStored")
            {
                self.field(key, &mut fields)
                    .map_err(|fault| fault.under_name(key))?;
            } else if order.is_empty() && Self::may_name_blocks(key) {
                self.hashes_of_unknown(&mut fields)?;
            } else {
                self.cursor.skip()?;
            }
        }
        let event = self.build(kind, fields).map_err(|field| {
            let kind = String::from_utf8_lossy(kind);
            self.cursor.fault(format!("{kind} without {field}"))
        })?;
        batch.events.push(event);
        Ok(())
    }

    /// Reads a removal. Engines that evict send one for each block, so this is most of what a full cache sends.
    fn removal(
        &mut self,
        len: usize,
        batch: &mut Batch,
        mut key: impl FnMut(&mut Self, usize) -> Read<&'a [u8]>,
    ) -> Read<()> {
        let mut has_hashes = false;
        let mut location = Location::default();
        for index in 0..len {
            let key = key(self, index)?;
            has_hashes |= key == b"block_hashes";
            self.removal_field(key, &mut location)
                .map_err(|fault| fault.under_name(key))?;
        }
        if !has_hashes {
            return Err(self.cursor.fault("BlockRemoved without block_hashes"));
        }
        batch.remove(&self.removed, location);
        Ok(())
    }

    /// Reads the hashes into `self.removed`, and all else into `location`.
    fn removal_field(&mut self, key: &[u8], location: &mut Location) -> Read<()> {
        match key {
            b"block_hashes" => {
                let mut removed = std::mem::take(&mut self.removed);
                removed.clear();
                let mut list = self.cursor.clone();
                let read = self.hashes_into(&mut removed);
                self.removed = removed;
                read?;
                let is_one = list.array().is_ok_and(|len| len == 1);
                self.removed_one = is_one.then(|| list.at()..self.cursor.at());
            }
            b"medium" => location.medium = self.medium()?,
            b"group_idx" => location.group = self.or_nil(|reader| reader.cursor.u32())?,
            b"locality" => location.locality = self.or_nil(Self::text)?,
            b"ownership" => location.ownership = self.or_nil(Self::text)?,
            _ => {
                self.cursor.skip()?;
            }
        }
        Ok(())
    }

    fn field(&mut self, key: &[u8], fields: &mut Fields) -> Read<()> {
        match key {
            b"block_hashes" => fields.hashes = Some(self.hashes()?),
            b"parent_block_hash" => fields.parent = self.or_nil(Self::hash)?,
            b"token_ids" => {
                let (ids, next) = self.token_ids()?;
                (fields.token_ids, fields.next_ids) = (Some(ids), next);
            }
            // SGLang's last field, for a while, of events that are arrays.
            b"lora_name" if self.cursor.is_map() => self.named_fields(fields)?,
            b"block_size" => fields.block_size = Some(self.cursor.u32()?),
            b"lora_id" => fields.lora_id = self.or_nil(Self::i64)?,
            b"medium" => fields.location.medium = self.medium()?,
            b"lora_name" => fields.lora_name = self.or_nil(Self::text)?,
            b"cache_salt" => fields.cache_salt = self.or_nil(Self::text)?,
            b"extra_keys" => fields.extra_keys = self.extra_keys()?,
            b"lookahead_token_ids" => fields.lookahead = self.lookahead()?,
            b"group_idx" => fields.location.group = self.or_nil(|reader| reader.cursor.u32())?,
            b"kv_cache_spec_kind" => fields.spec_kind = self.or_nil(Self::text)?,
            b"kv_cache_spec_sliding_window" => {
                fields.sliding_window = self.or_nil(|reader| reader.cursor.u32())?;
            }
            b"locality" => fields.location.locality = self.or_nil(Self::text)?,
            b"ownership" => fields.location.ownership = self.or_nil(Self::text)?,
            b"session_id" => fields.session_id = self.or_nil(Self::text)?,
            // Cannot happen: every listed field is handled above.
            _ => {
                self.cursor.skip()?;
            }
        }
        Ok(())
    }

    /// Reads what an event of an unknown type may name its blocks by: one hash, or a list.
    fn hashes_of_unknown(&mut self, fields: &mut Fields) -> Read<()> {
        let start = self.cursor.clone();
        let read = if self.cursor.is_array() {
            self.hashes()
        } else {
            self.or_nil(Self::hash).map(Vec::from_iter)
        };
        match read {
            Ok(hashes) => fields.hashes.get_or_insert_default().extend(hashes),
            Err(_) => {
                fields.has_unreadable_hashes = true;
                self.cursor = start;
                self.cursor.skip()?;
            }
        }
        Ok(())
    }

    /// Whether a field of an event of an unknown type may name the blocks that it is about. A field of an array has no
    /// name.
    fn may_name_blocks(key: &[u8]) -> bool {
        let has_hash = key.windows(4).any(|part| part == b"hash");
        key.is_empty() || has_hash && key != b"parent_block_hash"
    }

    /// The event, or the name of a required field that is missing.
    fn build(&self, kind: &[u8], mut fields: Fields) -> Result<Event, &'static str> {
        if let (false, Some(size)) = (fields.next_ids.is_empty(), fields.block_size) {
            fields.lookahead = Self::tokens_after(&fields.next_ids, size);
        }
        Ok(match kind {
            b"BlockStored" => Event::Stored(Stored {
                hashes: fields.hashes.ok_or("block_hashes")?,
                parent: fields.parent,
                token_ids: fields.token_ids.ok_or("token_ids")?,
                block_size: fields.block_size.ok_or("block_size")?,
                lora_id: fields.lora_id,
                lora_name: fields.lora_name,
                cache_salt: fields.cache_salt,
                extra_keys: with_lookahead(fields.extra_keys, fields.lookahead),
                location: fields.location,
                spec_kind: fields.spec_kind,
                sliding_window: fields.sliding_window,
                session_id: fields.session_id,
            }),
            b"AllBlocksCleared" => Event::Cleared {
                ownership: fields.location.ownership,
            },
            kind => Event::Unknown {
                kind: String::from_utf8_lossy(kind).into(),
                hashes: if fields.has_unreadable_hashes {
                    None
                } else {
                    Some(fields.hashes.unwrap_or_default())
                },
            },
        })
    }
}

/// The fields of an event that is an array, by its type.
fn order_of(kind: &[u8]) -> &'static [&'static str] {
    match kind {
        b"BlockStored" => STORED,
        b"BlockRemoved" => REMOVED,
        b"AllBlocksCleared" => CLEARED,
        _ => &[],
    }
}

/// Adds the tokens after each block to its keys. Lists of different lengths stay so, and the event is inconsistent.
fn with_lookahead(mut keys: Vec<Vec<ExtraKey>>, lookahead: Vec<Box<[u32]>>) -> Vec<Vec<ExtraKey>> {
    if lookahead.iter().all(|tokens| tokens.is_empty()) {
        return keys;
    }
    if keys.len() < lookahead.len() {
        keys.resize_with(lookahead.len(), Vec::new);
    }
    for (keys, tokens) in keys.iter_mut().zip(lookahead) {
        keys.push(ExtraKey::Lookahead(tokens));
    }
    keys
}

#[cfg(test)]
mod tests;
