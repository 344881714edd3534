//! What of an engine's events a tree can take, and as what. Fails closed: what is not understood is
//! left out, and never put at a place that was guessed.
//!
//! A store that is left out makes the tree partial, not wrong. A removal that is not understood would
//! leave blocks behind that are gone, so everything that it names is forgotten wherever it is.

mod extra;

use std::num::NonZeroU32;

use rustc_hash::{FxHashMap, FxHashSet};

use super::block;
use super::event::{Event, Medium, Name, Place, Removed, Stored, Tier};
use super::index::{NewBlock, Parent};

/// More groups, or unknown media, than any engine has: past it, what is new is not learnt.
const LEARNT_MAX: usize = 64;

/// What a tree should do.
#[derive(Clone, Debug, PartialEq)]
pub enum Change<'a> {
    Store {
        after: Parent,
        blocks: &'a [NewBlock],
        tier: Tier,
        block_size: NonZeroU32,
    },
    Remove {
        names: &'a [Name],
        tier: Tier,
    },
    /// All copies in all tiers, since it is not known which are gone.
    Forget {
        names: &'a [Name],
        why: Filtered,
    },
    Clear,
}

/// Why an event, or a part of it, is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Filtered {
    /// Of a cache group that does not tell what can be reused: a sliding window, a state.
    Attention,
    /// Of a kind of attention that is not known here.
    UnknownAttention,
    /// Of a group that nothing was said of yet.
    UnknownGroup,
    /// What a group is has changed under its number.
    GroupChanged,
    UnknownMedium,
    /// In another host's memory.
    Remote,
    UnknownLocality,
    /// Of a store of its own, whose removals are not always told.
    Ownership,
    NoBlockSize,
    BlockSizeChanged,
    /// Tokens, names or extra keys that do not go together.
    Sparse,
    /// An adapter without a name: its blocks could be taken for the base model's.
    UnnamedAdapter,
    UnknownEvent,
    /// The block that it continues is not held.
    UnknownParent,
    /// The index has more trees than it can tell apart, so this one has no place in it.
    IndexFull,
}

impl Filtered {
    pub const ALL: [Filtered; 15] = [
        Filtered::Attention,
        Filtered::UnknownAttention,
        Filtered::UnknownGroup,
        Filtered::GroupChanged,
        Filtered::UnknownMedium,
        Filtered::Remote,
        Filtered::UnknownLocality,
        Filtered::Ownership,
        Filtered::NoBlockSize,
        Filtered::BlockSizeChanged,
        Filtered::Sparse,
        Filtered::UnnamedAdapter,
        Filtered::UnknownEvent,
        Filtered::UnknownParent,
        Filtered::IndexFull,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Filtered::Attention => "attention",
            Filtered::UnknownAttention => "unknown_attention",
            Filtered::UnknownGroup => "unknown_group",
            Filtered::GroupChanged => "group_changed",
            Filtered::UnknownMedium => "unknown_medium",
            Filtered::Remote => "remote",
            Filtered::UnknownLocality => "unknown_locality",
            Filtered::Ownership => "ownership",
            Filtered::NoBlockSize => "no_block_size",
            Filtered::BlockSizeChanged => "block_size_changed",
            Filtered::Sparse => "sparse",
            Filtered::UnnamedAdapter => "unnamed_adapter",
            Filtered::UnknownEvent => "unknown_event",
            Filtered::UnknownParent => "unknown_parent",
            Filtered::IndexFull => "index_full",
        }
    }
}

/// An event that is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Left {
    pub why: Filtered,
    pub harm: Harm,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Harm {
    /// It is none of what the tree is to know.
    #[default]
    None,
    /// More is held than is known.
    Incomplete,
    /// Less may be held than is known: all must be forgotten.
    Opaque,
}

/// What must be learnt of one process to understand its events.
#[derive(Debug, Default)]
pub struct Admit {
    /// Whether a cache group's blocks are kept.
    groups: FxHashMap<u32, bool>,
    block_size: Option<NonZeroU32>,
    /// Media without a tier in which blocks were stored: a removal there is of those blocks, and not of
    /// any that a tree holds.
    media: FxHashSet<Box<str>>,
    /// Kept for its memory.
    blocks: Vec<NewBlock>,
}

impl Admit {
    /// What it takes is of another process from here on.
    pub fn forget(&mut self) {
        self.groups.clear();
        self.block_size = None;
        self.media.clear();
    }

    /// Learnt from the first store that was taken.
    pub fn block_size(&self) -> Option<NonZeroU32> {
        self.block_size
    }

    pub fn admit<'a>(&'a mut self, event: &'a Event) -> Result<Change<'a>, Left> {
        match event {
            Event::Stored(stored) => {
                let harm = |why| Left {
                    why,
                    harm: harm_of_store(why, stored),
                };
                self.store(stored).map_err(harm)
            }
            Event::Removed(removed) => self.remove(removed).map_err(harmless),
            Event::Cleared { ownership: None } => Ok(Change::Clear),
            // A store whose blocks are never taken was emptied.
            Event::Cleared { ownership: Some(_) } => Err(harmless(Filtered::Ownership)),
            // It might have removed something.
            Event::Unknown { .. } => Err(Left {
                why: Filtered::UnknownEvent,
                harm: Harm::Opaque,
            }),
        }
    }

    fn store(&mut self, stored: &Stored) -> Result<Change<'_>, Filtered> {
        self.learn_group(stored)?;
        check_group(&self.groups, stored.place.group)?;
        let tier = match tier(&stored.place.medium) {
            Ok(tier) => tier,
            Err(medium) => {
                if self.media.len() < LEARNT_MAX {
                    self.media.insert(medium.into());
                }
                return Err(Filtered::UnknownMedium);
            }
        };
        check_owner(&stored.place)?;
        let block_size = NonZeroU32::new(stored.block_size).ok_or(Filtered::NoBlockSize)?;
        if self.block_size.is_some_and(|known| known != block_size) {
            return Err(Filtered::BlockSizeChanged);
        }
        let blocks = stored.names.len();
        if blocks == 0 {
            return Err(Filtered::Sparse);
        }
        let tokens = blocks.checked_mul(block_size.get() as usize);
        let has_keys = !stored.extra_keys.is_empty();
        if tokens != Some(stored.token_ids.len()) || has_keys && stored.extra_keys.len() != blocks {
            return Err(Filtered::Sparse);
        }
        let lora_name = stored.lora_name.as_deref();
        // Engines number their adapters from one.
        if lora_name.is_none() && stored.lora_id.is_some_and(|id| id != 0) {
            return Err(Filtered::UnnamedAdapter);
        }
        let first_keys = stored.extra_keys.first().map(Vec::as_slice);
        let salt = match (stored.parent, stored.cache_salt.as_deref()) {
            (Some(_), _) => None,
            (None, Some(salt)) => Some(salt),
            (None, None) => first_keys.and_then(|keys| extra::salt(keys, lora_name)),
        };
        let after = match stored.parent {
            Some(parent) => Parent::Block(parent),
            None => Parent::Root(block::chain_root(lora_name, salt)),
        };
        self.blocks.clear();
        let tokens = stored.token_ids.chunks_exact(block_size.get() as usize);
        for (place, (name, tokens)) in stored.names.iter().zip(tokens).enumerate() {
            let keys = stored.extra_keys.get(place).map_or(&[][..], Vec::as_slice);
            let salt = salt.filter(|_| place == 0);
            let local = match extra::hash(keys, lora_name, salt) {
                None => block::hash_block(tokens),
                Some(extra) => block::hash_block_with(tokens, extra),
            };
            self.blocks.push(NewBlock { name: *name, local });
        }
        self.block_size = Some(block_size);
        Ok(Change::Store {
            after,
            blocks: &self.blocks,
            tier,
            block_size,
        })
    }

    fn remove<'a>(&self, removed: &'a Removed) -> Result<Change<'a>, Filtered> {
        // Another group's blocks bear the same names.
        check_group(&self.groups, removed.place.group)?;
        let names = removed.names.as_slice();
        match check_owner(&removed.place) {
            Ok(()) => {}
            Err(why @ Filtered::UnknownLocality) => return Ok(Change::Forget { names, why }),
            Err(why) => return Err(why),
        }
        match tier(&removed.place.medium) {
            Ok(tier) => Ok(Change::Remove { names, tier }),
            Err(medium) if self.media.contains(medium) => Err(Filtered::UnknownMedium),
            Err(_) => Ok(Change::Forget {
                names,
                why: Filtered::UnknownMedium,
            }),
        }
    }

    fn learn_group(&mut self, stored: &Stored) -> Result<(), Filtered> {
        let Some(kind) = stored.spec_kind.as_deref() else {
            return Ok(());
        };
        let group = stored.place.group.unwrap_or(0);
        let (is_kept, why) = match kind {
            "full_attention" | "mla_attention" | "sink_full_attention" => (true, None),
            "sliding_window"
            | "sliding_window_mla"
            | "mamba"
            | "chunked_local_attention"
            | "cross_attention"
            | "encoder_only_attention" => (false, Some(Filtered::Attention)),
            _ => (false, Some(Filtered::UnknownAttention)),
        };
        if self.groups.len() < LEARNT_MAX || self.groups.contains_key(&group) {
            let before = self.groups.insert(group, is_kept);
            // One that was not told of counted as kept where its number is 0.
            let was_kept = before.unwrap_or(group == 0 && self.block_size.is_some());
            if was_kept && !is_kept {
                return Err(Filtered::GroupChanged);
            }
        }
        why.map_or(Ok(()), Err)
    }
}

/// A removal is left out only where no block that it means was ever taken.
fn harmless(why: Filtered) -> Left {
    Left {
        why,
        harm: Harm::None,
    }
}

/// What is not listed of lower tiers is no harm: a tree is whole when it knows the GPU's blocks.
pub fn harm_of_store(why: Filtered, stored: &Stored) -> Harm {
    let is_gpu = tier(&stored.place.medium) == Ok(Tier::Gpu);
    match why {
        // Which of the two groups a removal means is no longer known.
        Filtered::GroupChanged => Harm::Opaque,
        Filtered::Attention | Filtered::Remote | Filtered::Ownership => Harm::None,
        _ if !is_gpu || stored.names.is_empty() => Harm::None,
        Filtered::UnknownAttention
        | Filtered::UnknownGroup
        | Filtered::UnknownMedium
        | Filtered::UnknownLocality
        | Filtered::NoBlockSize
        | Filtered::BlockSizeChanged
        | Filtered::Sparse
        | Filtered::UnnamedAdapter
        | Filtered::UnknownEvent
        | Filtered::UnknownParent
        | Filtered::IndexFull => Harm::Incomplete,
    }
}

/// Engines with one group say nothing of it; of a further one its kind must be known.
fn check_group(groups: &FxHashMap<u32, bool>, group: Option<u32>) -> Result<(), Filtered> {
    let group = group.unwrap_or(0);
    match groups.get(&group) {
        Some(true) => Ok(()),
        Some(false) => Err(Filtered::Attention),
        None if group == 0 => Ok(()),
        None => Err(Filtered::UnknownGroup),
    }
}

fn check_owner(place: &Place) -> Result<(), Filtered> {
    match place.locality.as_deref() {
        None => {}
        Some(locality) if locality.eq_ignore_ascii_case("LOCAL") => {}
        Some(locality) if locality.eq_ignore_ascii_case("REMOTE") => return Err(Filtered::Remote),
        Some(_) => return Err(Filtered::UnknownLocality),
    }
    match place.ownership.as_deref() {
        None | Some("") => Ok(()),
        Some(_) => Err(Filtered::Ownership),
    }
}

fn tier(medium: &Medium) -> Result<Tier, &str> {
    match medium {
        Medium::Unsaid | Medium::Gpu => Ok(Tier::Gpu),
        Medium::Cpu => Ok(Tier::Cpu),
        Medium::Disk => Ok(Tier::Disk),
        Medium::Other(name) => Err(name),
    }
}

#[cfg(test)]
mod tests;
