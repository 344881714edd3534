//! The fields of each event in the order of the array form, as vLLM's event classes declare them.

/// Field names of a `BlockStored` event, in the order in which an event that is an array has them after its
/// type. An event that is a map has the names as keys. New releases append fields.
pub(super) const STORED: &[&str] = &[
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
pub(super) const REMOVED: &[&str] = &[
    "block_hashes",
    "medium",
    "group_idx",
    "locality",
    "ownership",
];
/// Field names of an `AllBlocksCleared` event, in the order of the array form.
pub(super) const CLEARED: &[&str] = &["ownership"];
