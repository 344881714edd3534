//! A step's changes of the cache as vLLM's KV events. Pure.

use crate::kv::event::{Batch, EngineHash, Event, ExtraKey, Location, Medium, Removed, Stored};
use crate::sim::engine::cache::{BlockHash, Change, Label};

/// The KV cache group; there is one.
const GROUP: u32 = 0;
const SPEC_KIND: &str = "full_attention";

/// `timestamp` is in seconds since 1970.
pub(super) fn batch(changes: &[Change], block_tokens: u32, rank: u32, timestamp: f64) -> Batch {
    let mut events = Vec::with_capacity(changes.len());
    for change in changes {
        match change {
            Change::Stored {
                parent,
                hashes,
                token_ids,
                label,
            } => events.push(Event::Stored(Stored {
                hashes: hashes.iter().copied().map(name).collect(),
                parent: parent.map(name),
                token_ids: token_ids.clone(),
                block_size: block_tokens,
                extra_keys: extra_keys(label.as_deref(), parent.is_none(), hashes.len()),
                location: location(),
                spec_kind: Some(SPEC_KIND.into()),
                ..labelled(label.as_deref())
            })),
            Change::Removed { hashes } => {
                // One event for each block, as vLLM has it.
                let removed = |hash: &BlockHash| Removed {
                    hashes: vec![name(*hash)],
                    location: location(),
                };
                events.extend(hashes.iter().map(removed).map(Event::Removed));
            }
            Change::Cleared => events.push(Event::Cleared { ownership: None }),
        }
    }
    Batch {
        joined: 0,
        timestamp,
        rank: Some(rank),
        events,
    }
}

/// Changes the medium of all blocks.
pub(super) fn set_medium(batch: &mut Batch, medium: &str) {
    for event in &mut batch.events {
        let location = match event {
            Event::Stored(stored) => &mut stored.location,
            Event::Removed(removed) => &mut removed.location,
            Event::Cleared { .. } | Event::Unknown { .. } => continue,
        };
        location.medium = match medium {
            "CPU" => Medium::Cpu,
            "STORAGE" => Medium::Disk,
            other => Medium::Other(other.into()),
        };
    }
}

fn name(hash: BlockHash) -> EngineHash {
    EngineHash(hash.0)
}

/// GPU, which engines without a GPU report, too.
fn location() -> Location {
    Location {
        medium: Medium::Gpu,
        group: Some(GROUP),
        ..Location::default()
    }
}

fn labelled(label: Option<&Label>) -> Stored {
    let Some(label) = label else {
        return Stored::default();
    };
    Stored {
        lora_id: label.lora.as_ref().map(|(id, _)| *id),
        lora_name: label.lora.as_ref().map(|(_, name)| name.clone()),
        session_id: label.session_id.clone(),
        ..Stored::default()
    }
}

/// The adapter's name for every block, and the cache salt for the first block of a prompt.
fn extra_keys(label: Option<&Label>, from_the_start: bool, blocks: usize) -> Vec<Vec<ExtraKey>> {
    let lora = label.and_then(|label| label.lora.as_ref());
    let salt = label.and_then(|label| label.cache_salt.as_ref());
    let salt = salt.filter(|_| from_the_start);
    if lora.is_none() && salt.is_none() {
        return Vec::new();
    }
    let of_adapter: Vec<ExtraKey> = lora
        .map(|(_, name)| ExtraKey::Text(name.clone()))
        .into_iter()
        .collect();
    let mut keys = vec![of_adapter; blocks];
    if let (Some(first), Some(salt)) = (keys.first_mut(), salt) {
        first.push(ExtraKey::Text(salt.clone()));
    }
    keys
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn stored(parent: Option<u64>, hashes: &[u64], label: Label) -> Change {
        Change::Stored {
            parent: parent.map(BlockHash),
            hashes: hashes.iter().copied().map(BlockHash).collect(),
            token_ids: (0..hashes.len() as u32 * 2).collect(),
            label: Some(Arc::new(label)),
        }
    }

    fn event(change: Change) -> Stored {
        let batch = batch(&[change], 2, 0, 0.0);
        match &batch.events[..] {
            [Event::Stored(stored)] => stored.clone(),
            events => panic!("{events:?}"),
        }
    }

    fn text(text: &str) -> ExtraKey {
        ExtraKey::Text(text.into())
    }

    #[test]
    fn only_the_first_block_of_a_prompt_has_the_salt() {
        let label = Label {
            cache_salt: Some("tenant".into()),
            ..Label::default()
        };
        let first = event(stored(None, &[1, 2], label.clone()));
        assert_eq!(first.extra_keys, [vec![text("tenant")], vec![]]);
        let later = event(stored(Some(2), &[3], label));
        assert_eq!(later.extra_keys, Vec::<Vec<ExtraKey>>::new());
        assert_eq!(later.parent, Some(EngineHash(2)));
    }

    #[test]
    fn every_block_has_the_adapter_before_the_salt() {
        let label = Label {
            lora: Some((1, "sql".into())),
            cache_salt: Some("tenant".into()),
            session_id: Some("s".into()),
        };
        let first = event(stored(None, &[1, 2], label));
        let keys = [vec![text("sql"), text("tenant")], vec![text("sql")]];
        assert_eq!(first.extra_keys, keys);
        assert_eq!(first.lora_id, Some(1));
        assert_eq!(first.lora_name.as_deref(), Some("sql"));
        assert_eq!(first.session_id.as_deref(), Some("s"));
    }

    #[test]
    fn each_removed_block_has_an_event_of_its_own() {
        let hashes = vec![BlockHash(1), BlockHash(1), BlockHash(2)];
        let batch = batch(&[Change::Removed { hashes }, Change::Cleared], 2, 3, 1.5);
        assert_eq!(batch.rank, Some(3));
        let hashes: Vec<Option<Vec<EngineHash>>> = batch
            .events
            .iter()
            .map(|event| match event {
                Event::Removed(removed) => Some(removed.hashes.clone()),
                Event::Stored(_) | Event::Cleared { .. } | Event::Unknown { .. } => None,
            })
            .collect();
        let one = |name| Some(vec![EngineHash(name)]);
        assert_eq!(hashes, [one(1), one(1), one(2), None]);
    }
}
