//! One cached block of the bridge, and what blocks of one store event have in common.

use smallvec::SmallVec;

use crate::kv::event::{EngineHash, ExtraKey, Location, Medium, Stored};

/// Memory of a block besides its tokens, with its share of the tables.
pub(super) const BLOCK_BYTES: usize = 160;

/// What all blocks of one store event have in common.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Kind {
    pub(super) location: Location,
    pub(super) lora_id: Option<i64>,
    pub(super) lora_name: Option<Box<str>>,
    pub(super) cache_salt: Option<Box<str>>,
    pub(super) spec_kind: Option<Box<str>>,
    pub(super) sliding_window: Option<u32>,
}

/// The place of a kind in the table of kinds.
pub(super) type KindId = u32;

#[derive(Clone, Debug)]
pub(super) struct Block {
    /// Rises with each new block, so that parents come before children.
    pub(super) order: u64,
    pub(super) parent: Option<EngineHash>,
    pub(super) children: u32,
    pub(super) tokens: Box<[u32]>,
    pub(super) extra_keys: Box<[ExtraKey]>,
    /// Of the first copy; used if there is none left.
    pub(super) kind: KindId,
    /// Number of copies by kind. A block without copies is a placeholder: it is kept because its
    /// descendants cannot be stored without it.
    pub(super) copies: SmallVec<[(KindId, u32); 1]>,
}

impl Kind {
    pub(super) fn of(event: &Stored) -> Self {
        Self {
            location: event.location.clone(),
            lora_id: event.lora_id,
            lora_name: event.lora_name.clone(),
            cache_salt: event.cache_salt.clone(),
            spec_kind: event.spec_kind.clone(),
            sliding_window: event.sliding_window,
        }
    }
}

/// Bytes of a block in memory.
pub(super) fn bytes(tokens: &[u32], keys: &[ExtraKey]) -> usize {
    BLOCK_BYTES + size_of_val(tokens) + keys_bytes(keys)
}

pub(super) fn keys_bytes(keys: &[ExtraKey]) -> usize {
    let text = |key: &ExtraKey| match key {
        ExtraKey::Text(text) => text.len(),
        ExtraKey::Blob(blob) => blob.len(),
        ExtraKey::Number(_) => 0,
        ExtraKey::Multimodal { identifier, .. } => identifier.len(),
        ExtraKey::Lookahead(tokens) => size_of_val(&**tokens),
    };
    keys.iter()
        .map(|key| size_of::<ExtraKey>() + text(key))
        .sum()
}

/// Engines that name no medium mean the GPU.
pub(super) fn medium(medium: &Medium) -> &Medium {
    match medium {
        Medium::Unspecified => &Medium::Gpu,
        named => named,
    }
}
