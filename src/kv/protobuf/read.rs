//! Converts a message to events.

use super::wire::smg::grpc::common::kv_block_extra_key::Key;
use super::wire::smg::grpc::common::kv_cache_event::Data;
use super::wire::smg::grpc::common::{self as message, KvCacheLocality, KvCacheTier};
use crate::kv::event::{
    Batch, EngineHash, Event, ExtraKey, Load, Location, Medium, Removed, Stored,
};
use crate::kv::source::{DecodeError, SnapshotChunk};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Message {
    /// The rank's sequence number.
    pub sequence: u64,
    pub batch: Batch,
    pub snapshot: Option<SnapshotChunk>,
    pub load: Option<Load>,
    /// It only carries a load report, and its sequence number is another batch's.
    pub is_load_only: bool,
}

pub(super) fn message(message: message::KvEventBatch) -> Result<Message, DecodeError> {
    let rank = message.dp_rank.map(u32::try_from).transpose();
    let rank = rank.map_err(|_| DecodeError("a negative dp_rank".to_owned()))?;
    let mut batch = Batch {
        timestamp: message.timestamp,
        rank,
        ..Batch::default()
    };
    for event in message.events {
        match event.data {
            Some(Data::Stored(data)) => stored(data, &mut batch.events),
            Some(Data::Removed(data)) => {
                let Removed { hashes, location } = removed(data);
                batch.remove(&hashes, location);
            }
            Some(Data::Cleared(data)) => batch.events.push(Event::Cleared {
                ownership: text(data.ownership),
            }),
            // Its fields are lost with its type.
            None => batch.events.push(Event::Unknown {
                kind: "none that is known".into(),
                hashes: None,
            }),
        }
    }
    Ok(Message {
        sequence: message.sequence_number,
        batch,
        snapshot: message.snapshot.map(|chunk| SnapshotChunk {
            index: chunk.index,
            count: chunk.count,
            unknown_before: chunk.unknown_before,
        }),
        is_load_only: message.load.as_ref().is_some_and(|load| load.load_only),
        load: message.load.map(load),
    })
}

/// An event has one block size, adapter and location for all of its blocks; a message has some of that per
/// block. Blocks that differ become separate events, linked by their parents.
fn stored(data: message::KvBlocksStored, events: &mut Vec<Event>) {
    let mut parent = data.parent_block_hash.map(name);
    let mut blocks = data.blocks.into_iter().peekable();
    let mut is_first = true;
    // An event without blocks is still an event; the filter ignores it.
    while is_first || blocks.peek().is_some() {
        let mut part = Stored {
            parent,
            spec_kind: text(data.kv_cache_spec_kind.clone()),
            sliding_window: data.kv_cache_spec_sliding_window,
            session_id: text(data.session_id.clone()),
            lora_name: text(data.lora_name.clone()),
            cache_salt: text(data.cache_salt.clone()),
            ..Stored::default()
        };
        let key = blocks.peek().map(grouping_key);
        let level = key.and_then(|(_, _, level)| level);
        part.location = Location {
            medium: medium(data.medium.as_deref(), data.tier, level),
            group: data.group_idx,
            locality: locality(data.locality),
            ownership: text(data.ownership.clone()),
        };
        let (size, lora_id, _) = key.unwrap_or_default();
        // A negative size is as invalid as 0.
        part.block_size = u32::try_from(size).unwrap_or(0);
        part.lora_id = lora_id;
        let mut has_keys = false;
        let mut lengths_fit = part.block_size > 0 || key.is_none();
        while let Some(block) = blocks.next_if(|block| Some(grouping_key(block)) == key) {
            lengths_fit &= block.token_ids.len() == part.block_size as usize;
            has_keys |= !block.extra_keys.is_empty();
            part.hashes.push(name(block.block_hash));
            part.token_ids.extend_from_slice(&block.token_ids);
            let keys = block.extra_keys.into_iter();
            part.extra_keys.push(keys.map(extra_key).collect());
        }
        if !has_keys {
            part.extra_keys.clear();
        }
        parent = part.hashes.last().copied().or(parent);
        // A block too long and one too short would together look consistent. Without tokens, the names still count
        // where they are known.
        if !lengths_fit {
            part.token_ids.clear();
            part.extra_keys.clear();
        }
        events.push(Event::Stored(part));
        is_first = false;
    }
}

/// What must be equal for two blocks to share an event.
fn grouping_key(block: &message::KvBlock) -> (i32, Option<i64>, Option<i32>) {
    (block.block_size, block.lora_id, block.cache_level)
}

fn removed(data: message::KvBlocksRemoved) -> Removed {
    Removed {
        hashes: data.block_hashes.into_iter().map(name).collect(),
        location: Location {
            medium: medium(data.medium.as_deref(), data.tier, data.cache_level),
            group: data.group_idx,
            locality: locality(data.locality),
            ownership: text(data.ownership),
        },
    }
}

/// Combines the protocol's tier, the engine's medium and the cache level of old servers. If they
/// contradict each other, the medium is unknown.
fn medium(medium: Option<&str>, tier: Option<i32>, level: Option<i32>) -> Medium {
    let said = medium.map(Medium::named);
    let tier = match tier.map(KvCacheTier::try_from) {
        None | Some(Ok(KvCacheTier::Unspecified)) => level.map(|level| match level {
            0 => Medium::Gpu,
            1 => Medium::Cpu,
            2 => Medium::Disk,
            3 => external(),
            other => Medium::Other(format!("cache level {other}").into()),
        }),
        Some(Ok(KvCacheTier::Device)) => Some(Medium::Gpu),
        Some(Ok(KvCacheTier::Host)) => Some(Medium::Cpu),
        Some(Ok(KvCacheTier::Disk)) => Some(Medium::Disk),
        Some(Ok(KvCacheTier::External)) => Some(external()),
        Some(Err(unknown)) => Some(Medium::Other(format!("tier {}", unknown.0).into())),
    };
    match (said, tier) {
        (None, None) => Medium::Unspecified,
        (Some(said), None) => said,
        (None, Some(tier)) => tier,
        // The server mapped the engine's medium to a tier.
        (Some(Medium::Other(word)), Some(Medium::Other(_))) => Medium::Other(word),
        (Some(Medium::Other(_)), Some(tier)) => tier,
        (Some(said), Some(tier)) if said == tier => said,
        (Some(said), Some(tier)) => Medium::Other(format!("{said:?} and {tier:?} at once").into()),
    }
}

fn external() -> Medium {
    Medium::Other("EXTERNAL".into())
}

fn locality(value: Option<i32>) -> Option<Box<str>> {
    match KvCacheLocality::try_from(value?) {
        Ok(KvCacheLocality::Unspecified) => None,
        Ok(KvCacheLocality::Local) => Some("LOCAL".into()),
        Ok(KvCacheLocality::Remote) => Some("REMOTE".into()),
        Err(unknown) => Some(format!("locality {}", unknown.0).into()),
    }
}

fn extra_key(key: message::KvBlockExtraKey) -> ExtraKey {
    match key.key {
        Some(Key::Text(text)) => ExtraKey::Text(text.into()),
        Some(Key::Blob(blob)) => ExtraKey::Blob(blob.into()),
        Some(Key::Number(number)) => ExtraKey::Number(number),
        Some(Key::Multimodal(image)) => ExtraKey::Multimodal {
            identifier: image.identifier.into(),
            offset: image.offset,
        },
        Some(Key::Lookahead(after)) => ExtraKey::Lookahead(after.token_ids.into()),
        // An unknown kind of key still changes the block's content; matching nothing is better than
        // matching another block.
        None => ExtraKey::Text("warmroute: a key of an unknown kind".into()),
    }
}

fn load(load: message::EngineLoad) -> Load {
    Load {
        running_requests: load.running_requests,
        waiting_requests: load.waiting_requests,
        token_usage: load.token_usage,
        age_ms: load.age_ms,
    }
}

fn name(hash: i64) -> EngineHash {
    EngineHash(hash.cast_unsigned())
}

fn text(value: Option<String>) -> Option<Box<str>> {
    value.map(Into::into)
}
