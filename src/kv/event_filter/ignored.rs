//! Why an event is ignored, and what the tree lacks then.

use crate::kv::event::{Medium, Stored, Tier};
use crate::observe::metrics::words;

words! {
    /// Why an event is ignored.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum IgnoredReason {
        /// Of a cache group whose blocks do not show which prefix can be reused: sliding window, Mamba state.
        NonPrefixAttention = "non_prefix_attention",
        /// Of an unknown kind of attention.
        UnknownAttention = "unknown_attention",
        /// Of a cache group whose kind was not reported.
        UnknownGroup = "unknown_group",
        /// A cache group changed its kind.
        GroupChanged = "group_changed",
        UnknownMedium = "unknown_medium",
        /// Stored in another host's memory.
        RemoteMemory = "remote_memory",
        UnknownLocality = "unknown_locality",
        /// Stored in a separately owned cache, whose removals are not always reported.
        SeparateOwner = "separate_owner",
        NoBlockSize = "no_block_size",
        BlockSizeChanged = "block_size_changed",
        /// The numbers of tokens, hashes and extra keys do not match.
        InconsistentFields = "inconsistent_fields",
        /// A LoRA adapter without a name: its blocks could be taken for the base model's.
        UnnamedLora = "unnamed_lora",
        UnknownEvent = "unknown_event",
        /// The parent block is not in the tree.
        UnknownParent = "unknown_parent",
        /// The index has no room for another tree.
        IndexFull = "index_full",
        /// A prompt's last block, of fewer tokens than a block: engines with several cache groups report it.
        PartialBlock = "partial_block",
        /// With another number of tokens after each block on which it depends than the stores before it.
        LookaheadChanged = "lookahead_changed",
        /// In a lower tier, of blocks that the tree does not have, without what would show their place.
        UnknownCopy = "unknown_copy",
        /// Pages whose names are not those of their tokens: they belong to a name space that is not reported.
        HashMismatch = "hash_mismatch",
        /// In a lower tier, in chunks of another size than the GPU's blocks and under names that the tree does not have.
        TierBlockSize = "tier_block_size",
        /// In a batch that names another dp rank than the one whose events are read.
        OtherRank = "other_rank",
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ignored {
    pub reason: IgnoredReason,
    pub impact: TreeImpact,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum TreeImpact {
    /// None: the tree need not know this event.
    #[default]
    None,
    /// Some cached blocks are missing in the tree.
    Incomplete,
    /// Unknown blocks may have been removed, so the tree must be cleared.
    Unknown,
}

/// For events that concern no block of the tree.
pub(super) fn no_impact(reason: IgnoredReason) -> Ignored {
    Ignored {
        reason,
        impact: TreeImpact::None,
    }
}

/// The impact of ignoring a store. A tree is complete if it has all GPU blocks; other tiers do not count.
pub fn impact_of_store(reason: IgnoredReason, stored: &Stored) -> TreeImpact {
    let is_gpu = tier(&stored.location.medium) == Ok(Tier::Gpu);
    match reason {
        // Removals no longer show which kind of group they mean.
        IgnoredReason::GroupChanged => TreeImpact::Unknown,
        IgnoredReason::NonPrefixAttention
        | IgnoredReason::RemoteMemory
        | IgnoredReason::SeparateOwner
        // A prefix is reused in whole blocks; the block is reported again when it is full.
        | IgnoredReason::PartialBlock
        | IgnoredReason::UnknownCopy
        | IgnoredReason::HashMismatch
        | IgnoredReason::TierBlockSize
        // It says nothing of this rank's cache.
        | IgnoredReason::OtherRank => TreeImpact::None,
        _ if !is_gpu || stored.hashes.is_empty() => TreeImpact::None,
        IgnoredReason::UnknownAttention
        | IgnoredReason::UnknownGroup
        | IgnoredReason::UnknownMedium
        | IgnoredReason::UnknownLocality
        | IgnoredReason::NoBlockSize
        | IgnoredReason::BlockSizeChanged
        | IgnoredReason::LookaheadChanged
        | IgnoredReason::InconsistentFields
        | IgnoredReason::UnnamedLora
        | IgnoredReason::UnknownEvent
        | IgnoredReason::UnknownParent
        | IgnoredReason::IndexFull => TreeImpact::Incomplete,
    }
}

/// The tier of a medium; the medium's name if it is unknown.
pub fn tier(medium: &Medium) -> Result<Tier, &str> {
    match medium {
        Medium::Unspecified | Medium::Gpu => Ok(Tier::Gpu),
        Medium::Cpu => Ok(Tier::Cpu),
        Medium::Disk => Ok(Tier::Disk),
        Medium::Other(name) => Err(name),
    }
}
