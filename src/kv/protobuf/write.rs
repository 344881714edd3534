//! Converts events to a message, for servers.

use std::fmt;

use bytes::Bytes;
use prost::Message as _;

use super::wire::smg::grpc::common::kv_block_extra_key::Key;
use super::wire::smg::grpc::common::kv_cache_event::Data;
use super::wire::smg::grpc::common::{self as message, KvCacheLocality, KvCacheTier};
use crate::kv::event::{Batch, EngineHash, Event, ExtraKey, Location, Medium, Removed, Stored};
use crate::kv::source::SnapshotChunk;

/// Why an event has no equivalent message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Untranslatable(pub String);

impl fmt::Display for Untranslatable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Event ids of one batch are distinct up to this many events.
const EVENTS_MAX: u64 = 1 << 16;

/// Encodes one message. `snapshot` is the chunk and the number of blocks of the whole snapshot.
pub fn encode_batch(
    sequence: u64,
    batch: &Batch,
    snapshot: Option<(SnapshotChunk, u64)>,
) -> Result<Bytes, Untranslatable> {
    let mut events = Vec::with_capacity(batch.events.len());
    for (location, event) in (1..).zip(&batch.events) {
        // Derived, so that the same batch always gets the same id.
        let event_id = match snapshot {
            Some(_) => 0,
            None => sequence.wrapping_mul(EVENTS_MAX).wrapping_add(location),
        };
        let data = Some(data(event)?);
        events.push(message::KvCacheEvent { event_id, data });
    }
    let dp_rank = batch.rank.map(i32::try_from).transpose();
    let message = message::KvEventBatch {
        sequence_number: sequence,
        timestamp: batch.timestamp,
        events,
        dp_rank: dp_rank.map_err(|_| Untranslatable("a rank above 2^31".to_owned()))?,
        snapshot: snapshot.map(|(chunk, blocks)| message::KvSnapshotChunk {
            index: chunk.index,
            count: chunk.count,
            blocks,
            unknown_before: chunk.unknown_before,
        }),
        load: None,
    };
    Ok(message.encode_to_vec().into())
}

fn data(event: &Event) -> Result<Data, Untranslatable> {
    Ok(match event {
        Event::Stored(event) => Data::Stored(stored(event)?),
        Event::Removed(event) => Data::Removed(removed(event)?),
        Event::Cleared { ownership } => Data::Cleared(message::KvCacheCleared {
            ownership: text(ownership.as_deref()),
        }),
        Event::Unknown { kind } => {
            return Err(Untranslatable(format!("an event of type {kind}")));
        }
    })
}

fn stored(event: &Stored) -> Result<message::KvBlocksStored, Untranslatable> {
    let size = event.block_size as usize;
    let block_size = i32::try_from(event.block_size)
        .ok()
        .filter(|size| *size > 0);
    let (Some(block_size), true) = (
        block_size,
        event.hashes.len().checked_mul(size) == Some(event.token_ids.len()),
    ) else {
        return Err(Untranslatable(format!(
            "{} tokens for {} blocks of {size}",
            event.token_ids.len(),
            event.hashes.len()
        )));
    };
    if !event.extra_keys.is_empty() && event.extra_keys.len() != event.hashes.len() {
        return Err(Untranslatable(format!(
            "extra keys for {} of {} blocks",
            event.extra_keys.len(),
            event.hashes.len()
        )));
    }
    let (tier, medium, cache_level) = medium(&event.location.medium);
    let tokens = event.token_ids.chunks_exact(size);
    let blocks = event.hashes.iter().zip(tokens).enumerate();
    let blocks = blocks.map(|(at, (name, tokens))| message::KvBlock {
        block_hash: hash(*name),
        token_ids: tokens.to_vec(),
        block_size,
        lora_id: event.lora_id,
        cache_level,
        extra_keys: event
            .extra_keys
            .get(at)
            .map(|keys| keys.iter().map(extra_key).collect())
            .unwrap_or_default(),
    });
    Ok(message::KvBlocksStored {
        blocks: blocks.collect(),
        parent_block_hash: event.parent.map(hash),
        tier: tier.map(i32::from),
        medium,
        group_idx: event.location.group,
        kv_cache_spec_kind: text(event.spec_kind.as_deref()),
        kv_cache_spec_sliding_window: event.sliding_window,
        locality: locality(&event.location)?,
        ownership: text(event.location.ownership.as_deref()),
        session_id: text(event.session_id.as_deref()),
        lora_name: text(event.lora_name.as_deref()),
        cache_salt: text(event.cache_salt.as_deref()),
    })
}

fn removed(event: &Removed) -> Result<message::KvBlocksRemoved, Untranslatable> {
    let (tier, medium, cache_level) = medium(&event.location.medium);
    Ok(message::KvBlocksRemoved {
        block_hashes: event.hashes.iter().map(|name| hash(*name)).collect(),
        cache_level,
        tier: tier.map(i32::from),
        medium,
        group_idx: event.location.group,
        locality: locality(&event.location)?,
        ownership: text(event.location.ownership.as_deref()),
    })
}

/// In all three forms, for readers of different versions. For readers that only know the level, an unknown
/// medium must not look like a missing one, which means the GPU.
fn medium(medium: &Medium) -> (Option<KvCacheTier>, Option<String>, Option<i32>) {
    let (tier, word, level) = match medium {
        Medium::Unspecified => return (None, None, None),
        Medium::Gpu => (KvCacheTier::Device, "GPU", 0),
        Medium::Cpu => (KvCacheTier::Host, "CPU", 1),
        Medium::Disk => (KvCacheTier::Disk, "STORAGE", 2),
        Medium::Other(word) => (KvCacheTier::External, &**word, 3),
    };
    (Some(tier), Some(word.to_owned()), Some(level))
}

fn locality(location: &Location) -> Result<Option<i32>, Untranslatable> {
    let value = match location.locality.as_deref() {
        None => return Ok(None),
        Some(word) if word.eq_ignore_ascii_case("local") => KvCacheLocality::Local,
        Some(word) if word.eq_ignore_ascii_case("remote") => KvCacheLocality::Remote,
        Some(word) => return Err(Untranslatable(format!("locality {word}"))),
    };
    Ok(Some(value.into()))
}

fn extra_key(key: &ExtraKey) -> message::KvBlockExtraKey {
    let key = match key {
        ExtraKey::Text(text) => Key::Text(text.to_string()),
        ExtraKey::Blob(blob) => Key::Blob(blob.to_vec()),
        ExtraKey::Number(number) => Key::Number(*number),
        ExtraKey::Multimodal { identifier, offset } => Key::Multimodal(message::KvMultimodalKey {
            identifier: identifier.to_string(),
            offset: *offset,
        }),
    };
    message::KvBlockExtraKey { key: Some(key) }
}

fn hash(name: EngineHash) -> i64 {
    name.0.cast_signed()
}

fn text(value: Option<&str>) -> Option<String> {
    value.map(str::to_owned)
}
