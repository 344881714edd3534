//! Decides which KV events a tree can take. Fails closed: events that are not understood are ignored, and
//! blocks are never stored at a guessed location.
//!
//! An ignored store makes the tree partial, not wrong. A removal that is not understood would
//! leave blocks behind that are gone, so everything that it names is forgotten wherever it is.

mod extra_keys;

use std::num::NonZeroU32;

use rustc_hash::{FxHashMap, FxHashSet};

use super::block;
use super::event::{EngineHash, Event, Location, Medium, Removed, Stored, Tier};
use super::index::{NewBlock, Parent};

/// More cache groups, or unknown media, than any engine has; further ones are not remembered.
const MAX_LEARNED: usize = 64;

/// How an event changes a tree.
#[derive(Clone, Debug, PartialEq)]
pub enum TreeChange<'a> {
    Store {
        after: Parent,
        blocks: &'a [NewBlock],
        tier: Tier,
        block_size: NonZeroU32,
    },
    Remove {
        hashes: &'a [EngineHash],
        tier: Tier,
    },
    /// Remove all copies in all tiers, since it is unknown which are gone.
    Forget {
        hashes: &'a [EngineHash],
        reason: IgnoredReason,
    },
    Clear,
}

/// Why an event is ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum IgnoredReason {
    /// Of a cache group whose blocks do not show which prefix can be reused: sliding window, Mamba state.
    NonPrefixAttention,
    /// Of an unknown kind of attention.
    UnknownAttention,
    /// Of a cache group whose kind was not reported.
    UnknownGroup,
    /// A cache group changed its kind.
    GroupChanged,
    UnknownMedium,
    /// Stored in another host's memory.
    RemoteMemory,
    UnknownLocality,
    /// Stored in a separately owned cache, whose removals are not always reported.
    SeparateOwner,
    NoBlockSize,
    BlockSizeChanged,
    /// The numbers of tokens, hashes and extra keys do not match.
    InconsistentFields,
    /// A LoRA adapter without a name: its blocks could be taken for the base model's.
    UnnamedLora,
    UnknownEvent,
    /// The parent block is not in the tree.
    UnknownParent,
    /// The index has no room for another tree.
    IndexFull,
}

impl IgnoredReason {
    pub const ALL: [IgnoredReason; 15] = [
        IgnoredReason::NonPrefixAttention,
        IgnoredReason::UnknownAttention,
        IgnoredReason::UnknownGroup,
        IgnoredReason::GroupChanged,
        IgnoredReason::UnknownMedium,
        IgnoredReason::RemoteMemory,
        IgnoredReason::UnknownLocality,
        IgnoredReason::SeparateOwner,
        IgnoredReason::NoBlockSize,
        IgnoredReason::BlockSizeChanged,
        IgnoredReason::InconsistentFields,
        IgnoredReason::UnnamedLora,
        IgnoredReason::UnknownEvent,
        IgnoredReason::UnknownParent,
        IgnoredReason::IndexFull,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            IgnoredReason::NonPrefixAttention => "non_prefix_attention",
            IgnoredReason::UnknownAttention => "unknown_attention",
            IgnoredReason::UnknownGroup => "unknown_group",
            IgnoredReason::GroupChanged => "group_changed",
            IgnoredReason::UnknownMedium => "unknown_medium",
            IgnoredReason::RemoteMemory => "remote_memory",
            IgnoredReason::UnknownLocality => "unknown_locality",
            IgnoredReason::SeparateOwner => "separate_owner",
            IgnoredReason::NoBlockSize => "no_block_size",
            IgnoredReason::BlockSizeChanged => "block_size_changed",
            IgnoredReason::InconsistentFields => "inconsistent_fields",
            IgnoredReason::UnnamedLora => "unnamed_lora",
            IgnoredReason::UnknownEvent => "unknown_event",
            IgnoredReason::UnknownParent => "unknown_parent",
            IgnoredReason::IndexFull => "index_full",
        }
    }
}

/// An event that the tree does not take.
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

/// What was learned from one engine process's events, needed to understand later ones, for another replica.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LearnedFacts {
    pub groups: Vec<(u32, bool)>,
    pub media: Vec<Box<str>>,
}

/// What was learned from one engine process's events, needed to understand later ones.
#[derive(Debug, Default)]
pub struct EventFilter {
    /// Whether a cache group's blocks go into the tree.
    groups: FxHashMap<u32, bool>,
    block_size: Option<NonZeroU32>,
    /// Unknown media in which blocks were stored (and ignored): removals there concern no block of the
    /// tree.
    media: FxHashSet<Box<str>>,
    /// A buffer, reused to avoid allocations.
    blocks: Vec<NewBlock>,
}

impl EventFilter {
    /// Call this when the engine's process may be another one.
    pub fn forget(&mut self) {
        self.groups.clear();
        self.block_size = None;
        self.media.clear();
    }

    pub fn learned(&self) -> LearnedFacts {
        let mut learned = LearnedFacts {
            groups: self
                .groups
                .iter()
                .map(|(group, is_kept)| (*group, *is_kept))
                .collect(),
            media: self.media.iter().cloned().collect(),
        };
        learned.groups.sort_unstable();
        learned.media.sort_unstable();
        learned
    }

    /// Replaces what was learned by what another replica learned from the same process.
    pub fn relearn(&mut self, block_size: NonZeroU32, learned: &LearnedFacts) {
        self.forget();
        self.block_size = Some(block_size);
        self.groups
            .extend(learned.groups.iter().copied().take(MAX_LEARNED));
        self.media
            .extend(learned.media.iter().take(MAX_LEARNED).cloned());
    }

    /// The block size of the first accepted store.
    pub fn block_size(&self) -> Option<NonZeroU32> {
        self.block_size
    }

    pub fn accept<'a>(&'a mut self, event: &'a Event) -> Result<TreeChange<'a>, Ignored> {
        match event {
            Event::Stored(stored) => {
                let impact = |reason| Ignored {
                    reason,
                    impact: impact_of_store(reason, stored),
                };
                self.store(stored).map_err(impact)
            }
            Event::Removed(removed) => self.remove(removed).map_err(no_impact),
            Event::Cleared { ownership: None } => Ok(TreeChange::Clear),
            // A separately owned cache was cleared, whose blocks are never in the tree.
            Event::Cleared { ownership: Some(_) } => Err(no_impact(IgnoredReason::SeparateOwner)),
            // It might have removed something.
            Event::Unknown { .. } => Err(Ignored {
                reason: IgnoredReason::UnknownEvent,
                impact: TreeImpact::Unknown,
            }),
        }
    }

    fn store(&mut self, stored: &Stored) -> Result<TreeChange<'_>, IgnoredReason> {
        self.learn_group(stored)?;
        check_group(&self.groups, stored.location.group)?;
        let tier = match tier(&stored.location.medium) {
            Ok(tier) => tier,
            Err(medium) => {
                if self.media.len() < MAX_LEARNED {
                    self.media.insert(medium.into());
                }
                return Err(IgnoredReason::UnknownMedium);
            }
        };
        check_owner(&stored.location)?;
        let block_size = NonZeroU32::new(stored.block_size).ok_or(IgnoredReason::NoBlockSize)?;
        if self.block_size.is_some_and(|known| known != block_size) {
            return Err(IgnoredReason::BlockSizeChanged);
        }
        let blocks = stored.hashes.len();
        if blocks == 0 {
            return Err(IgnoredReason::InconsistentFields);
        }
        let tokens = blocks.checked_mul(block_size.get() as usize);
        let has_keys = !stored.extra_keys.is_empty();
        if tokens != Some(stored.token_ids.len()) || has_keys && stored.extra_keys.len() != blocks {
            return Err(IgnoredReason::InconsistentFields);
        }
        let lora_name = stored.lora_name.as_deref();
        // Engines number their adapters from one.
        if lora_name.is_none() && stored.lora_id.is_some_and(|id| id != 0) {
            return Err(IgnoredReason::UnnamedLora);
        }
        let first_keys = stored.extra_keys.first().map(Vec::as_slice);
        let salt = match (stored.parent, stored.cache_salt.as_deref()) {
            (Some(_), _) => None,
            (None, Some(salt)) => Some(salt),
            (None, None) => first_keys.and_then(|keys| extra_keys::salt(keys, lora_name)),
        };
        let after = match stored.parent {
            Some(parent) => Parent::Block(parent),
            None => Parent::Root(block::chain_root(lora_name, salt)),
        };
        self.blocks.clear();
        let tokens = stored.token_ids.chunks_exact(block_size.get() as usize);
        for (location, (name, tokens)) in stored.hashes.iter().zip(tokens).enumerate() {
            let keys = stored
                .extra_keys
                .get(location)
                .map_or(&[][..], Vec::as_slice);
            let salt = salt.filter(|_| location == 0);
            let local = match extra_keys::hash(keys, lora_name, salt) {
                None => block::hash_block(tokens),
                Some(extra) => block::hash_block_with(tokens, extra),
            };
            self.blocks.push(NewBlock { name: *name, local });
        }
        self.block_size = Some(block_size);
        Ok(TreeChange::Store {
            after,
            blocks: &self.blocks,
            tier,
            block_size,
        })
    }

    fn remove<'a>(&self, removed: &'a Removed) -> Result<TreeChange<'a>, IgnoredReason> {
        // Blocks of different cache groups have the same hashes.
        check_group(&self.groups, removed.location.group)?;
        let hashes = removed.hashes.as_slice();
        match check_owner(&removed.location) {
            Ok(()) => {}
            Err(reason @ IgnoredReason::UnknownLocality) => {
                return Ok(TreeChange::Forget { hashes, reason });
            }
            Err(reason) => return Err(reason),
        }
        match tier(&removed.location.medium) {
            Ok(tier) => Ok(TreeChange::Remove { hashes, tier }),
            Err(medium) if self.media.contains(medium) => Err(IgnoredReason::UnknownMedium),
            Err(_) => Ok(TreeChange::Forget {
                hashes,
                reason: IgnoredReason::UnknownMedium,
            }),
        }
    }

    fn learn_group(&mut self, stored: &Stored) -> Result<(), IgnoredReason> {
        let Some(kind) = stored.spec_kind.as_deref() else {
            return Ok(());
        };
        let group = stored.location.group.unwrap_or(0);
        let (is_kept, reason) = match kind {
            "full_attention" | "mla_attention" | "sink_full_attention" => (true, None),
            "sliding_window"
            | "sliding_window_mla"
            | "mamba"
            | "chunked_local_attention"
            | "cross_attention"
            | "encoder_only_attention" => (false, Some(IgnoredReason::NonPrefixAttention)),
            _ => (false, Some(IgnoredReason::UnknownAttention)),
        };
        if self.groups.len() < MAX_LEARNED || self.groups.contains_key(&group) {
            let before = self.groups.insert(group, is_kept);
            // Before its kind was reported, group 0 counted as full attention.
            let was_kept = before.unwrap_or(group == 0 && self.block_size.is_some());
            if was_kept && !is_kept {
                return Err(IgnoredReason::GroupChanged);
            }
        }
        reason.map_or(Ok(()), Err)
    }
}

/// For events that concern no block of the tree.
fn no_impact(reason: IgnoredReason) -> Ignored {
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
        | IgnoredReason::SeparateOwner => TreeImpact::None,
        _ if !is_gpu || stored.hashes.is_empty() => TreeImpact::None,
        IgnoredReason::UnknownAttention
        | IgnoredReason::UnknownGroup
        | IgnoredReason::UnknownMedium
        | IgnoredReason::UnknownLocality
        | IgnoredReason::NoBlockSize
        | IgnoredReason::BlockSizeChanged
        | IgnoredReason::InconsistentFields
        | IgnoredReason::UnnamedLora
        | IgnoredReason::UnknownEvent
        | IgnoredReason::UnknownParent
        | IgnoredReason::IndexFull => TreeImpact::Incomplete,
    }
}

/// Engines with one cache group do not report its kind; for any other group it must be known.
fn check_group(groups: &FxHashMap<u32, bool>, group: Option<u32>) -> Result<(), IgnoredReason> {
    let group = group.unwrap_or(0);
    match groups.get(&group) {
        Some(true) => Ok(()),
        Some(false) => Err(IgnoredReason::NonPrefixAttention),
        None if group == 0 => Ok(()),
        None => Err(IgnoredReason::UnknownGroup),
    }
}

fn check_owner(location: &Location) -> Result<(), IgnoredReason> {
    match location.locality.as_deref() {
        None => {}
        Some(locality) if locality.eq_ignore_ascii_case("LOCAL") => {}
        Some(locality) if locality.eq_ignore_ascii_case("REMOTE") => {
            return Err(IgnoredReason::RemoteMemory);
        }
        Some(_) => return Err(IgnoredReason::UnknownLocality),
    }
    match location.ownership.as_deref() {
        None | Some("") => Ok(()),
        Some(_) => Err(IgnoredReason::SeparateOwner),
    }
}

fn tier(medium: &Medium) -> Result<Tier, &str> {
    match medium {
        Medium::Unspecified | Medium::Gpu => Ok(Tier::Gpu),
        Medium::Cpu => Ok(Tier::Cpu),
        Medium::Disk => Ok(Tier::Disk),
        Medium::Other(name) => Err(name),
    }
}

#[cfg(test)]
mod tests;
