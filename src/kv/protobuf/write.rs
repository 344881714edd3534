//! Converts events to a message, for servers.

use bytes::Bytes;
use prost::Message as _;

use super::wire::smg::grpc::common::kv_block_extra_key::Key;
use super::wire::smg::grpc::common::kv_cache_event::Data;
use super::wire::smg::grpc::common::{self as message, KvCacheLocality, KvCacheTier};
use crate::kv::event::{Batch, EngineHash, Event, ExtraKey, Location, Medium, Removed, Stored};
use crate::kv::source::SnapshotChunk;
use crate::observe::metrics::words;

/// An encoded batch, without the events that have no equivalent.
#[derive(Clone, Debug, PartialEq)]
pub struct Encoded {
    pub message: Bytes,
    pub left_out: Vec<LeftOut>,
}

/// An event that has no equivalent message. Leaving it out makes readers know less, never more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOut {
    /// Its place in the batch.
    pub index: usize,
    pub reason: LeftOutReason,
    pub detail: String,
}

words! {
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum LeftOutReason {
        /// A store without its blocks' tokens: default CPU offloading reports such.
        NoTokens = "no_tokens",
        /// The numbers of tokens, hashes and extra keys do not match: groups that skip blocks report such.
        InconsistentFields = "inconsistent_fields",
        /// An unknown type of event that names no blocks.
        UnknownEvent = "unknown_event",
    }
}

enum NotEncoded {
    Event(LeftOutReason, String),
    /// The event may have removed blocks that it does not name.
    Batch(String),
}

/// The locality of readers' unknown ones, so that they forget what was removed there, wherever it is.
const UNKNOWN_LOCALITY: i32 = 15;

/// Event ids of one batch are distinct up to this many events.
const EVENTS_MAX: u64 = 1 << 16;

/// Encodes one message; events without an equivalent are left out. `snapshot` is the chunk and the number of blocks of
/// the whole snapshot. The error names an event that may have removed blocks that it does not name.
pub fn encode_batch(
    sequence: u64,
    batch: &Batch,
    snapshot: Option<(SnapshotChunk, u64)>,
) -> Result<Encoded, String> {
    let mut events = Vec::with_capacity(batch.events.len());
    let mut left_out = Vec::new();
    for (location, event) in (1..).zip(&batch.events) {
        // Derived, so that the same batch always gets the same id.
        let event_id = match snapshot {
            Some(_) => 0,
            None => sequence.wrapping_mul(EVENTS_MAX).wrapping_add(location),
        };
        match data(event) {
            Ok(data) => events.push(message::KvCacheEvent {
                event_id,
                data: Some(data),
            }),
            Err(NotEncoded::Event(reason, detail)) => left_out.push(LeftOut {
                index: location as usize - 1,
                reason,
                detail,
            }),
            Err(NotEncoded::Batch(error)) => return Err(error),
        }
    }
    let message = message::KvEventBatch {
        sequence_number: sequence,
        timestamp: batch.timestamp,
        events,
        // The bridge numbers its ranks itself, from 0.
        dp_rank: batch
            .rank
            .map(|rank| i32::try_from(rank).unwrap_or(i32::MAX)),
        snapshot: snapshot.map(|(chunk, blocks)| message::KvSnapshotChunk {
            index: chunk.index,
            count: chunk.count,
            blocks,
            unknown_before: chunk.unknown_before,
        }),
        load: None,
    };
    Ok(Encoded {
        message: message.encode_to_vec().into(),
        left_out,
    })
}

fn data(event: &Event) -> Result<Data, NotEncoded> {
    Ok(match event {
        Event::Stored(event) => Data::Stored(stored(event)?),
        Event::Removed(event) => Data::Removed(removed(event)),
        Event::Cleared { ownership } => Data::Cleared(message::KvCacheCleared {
            ownership: text(ownership.as_deref()),
        }),
        Event::Unknown { kind, hashes } => {
            let text = format!("an event of type {kind}");
            return match hashes.as_deref() {
                None => Err(NotEncoded::Batch(text)),
                Some([]) => Err(NotEncoded::Event(LeftOutReason::UnknownEvent, text)),
                // What became of these blocks is unknown, so readers forget them.
                Some(hashes) => Ok(Data::Removed(message::KvBlocksRemoved {
                    block_hashes: hashes.iter().map(|name| hash(*name)).collect(),
                    locality: Some(UNKNOWN_LOCALITY),
                    ..message::KvBlocksRemoved::default()
                })),
            };
        }
    })
}

fn stored(event: &Stored) -> Result<message::KvBlocksStored, NotEncoded> {
    let size = event.block_size as usize;
    let block_size = i32::try_from(event.block_size)
        .ok()
        .filter(|size| *size > 0);
    let (Some(block_size), true) = (
        block_size,
        event.hashes.len().checked_mul(size) == Some(event.token_ids.len()),
    ) else {
        let reason = if event.token_ids.is_empty() {
            LeftOutReason::NoTokens
        } else {
            LeftOutReason::InconsistentFields
        };
        let detail = format!(
            "{} tokens for {} blocks of {size}",
            event.token_ids.len(),
            event.hashes.len()
        );
        return Err(NotEncoded::Event(reason, detail));
    };
    if !event.extra_keys.is_empty() && event.extra_keys.len() != event.hashes.len() {
        let detail = format!(
            "extra keys for {} of {} blocks",
            event.extra_keys.len(),
            event.hashes.len()
        );
        return Err(NotEncoded::Event(LeftOutReason::InconsistentFields, detail));
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
        extra_keys: event.keys(at).iter().map(extra_key).collect(),
    });
    Ok(message::KvBlocksStored {
        blocks: blocks.collect(),
        parent_block_hash: event.parent.map(hash),
        tier: tier.map(i32::from),
        medium,
        group_idx: event.location.group,
        kv_cache_spec_kind: text(event.spec_kind.as_deref()),
        kv_cache_spec_sliding_window: event.sliding_window,
        locality: locality(&event.location),
        ownership: text(event.location.ownership.as_deref()),
        session_id: text(event.session_id.as_deref()),
        lora_name: text(event.lora_name.as_deref()),
        cache_salt: text(event.cache_salt.as_deref()),
    })
}

fn removed(event: &Removed) -> message::KvBlocksRemoved {
    let (tier, medium, cache_level) = medium(&event.location.medium);
    message::KvBlocksRemoved {
        block_hashes: event.hashes.iter().map(|name| hash(*name)).collect(),
        cache_level,
        tier: tier.map(i32::from),
        medium,
        group_idx: event.location.group,
        locality: locality(&event.location),
        ownership: text(event.location.ownership.as_deref()),
    }
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

fn locality(location: &Location) -> Option<i32> {
    let word = location.locality.as_deref()?;
    Some(if word.eq_ignore_ascii_case("local") {
        KvCacheLocality::Local.into()
    } else if word.eq_ignore_ascii_case("remote") {
        KvCacheLocality::Remote.into()
    } else {
        UNKNOWN_LOCALITY
    })
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
        ExtraKey::Lookahead(tokens) => Key::Lookahead(message::KvLookaheadKey {
            token_ids: tokens.to_vec(),
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
