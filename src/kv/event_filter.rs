//! Decides which KV events a tree can take. Fails closed: events that are not understood are ignored, and
//! blocks are never stored at a guessed location.
//!
//! An ignored store makes the tree partial, not wrong. A removal that is not understood would
//! leave blocks behind that are gone, so everything that it names is forgotten wherever it is.

mod extra_keys;
mod ignored;

use std::num::NonZeroU32;

use rustc_hash::{FxHashMap, FxHashSet};

use self::ignored::no_impact;
pub use self::ignored::{Ignored, IgnoredReason, TreeImpact, impact_of_store, tier};
use super::block::{self, BlockShape};
use super::event::{EngineHash, Event, Location, Removed, Stored, Tier, is_own_cache};
use super::index::{NewBlock, Parent};

/// More cache groups, or unknown media, than any engine has; further ones are not remembered.
const MAX_LEARNED: usize = 64;

#[derive(Clone, Debug, PartialEq)]
pub enum TreeChange<'a> {
    Store {
        after: Parent,
        blocks: &'a [NewBlock],
        tier: Tier,
        shape: BlockShape,
    },
    /// One more copy of each block, in a tier below the GPU's, of the blocks that the tree knows by these names.
    AddCopies {
        hashes: &'a [EngineHash],
        tier: Tier,
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
    /// Of the stores that the tree placed.
    shape: Option<BlockShape>,
    /// `shape` is that of a store in the GPU. A lower tier may have chunks of another size, which say nothing of the blocks
    /// that the engine reuses.
    is_shape_of_gpu: bool,
    /// A store of several blocks was placed in the GPU, so `shape` has no partial block's.
    is_size_certain: bool,
    /// Some blocks of this process have extra keys, so a store without them in a lower tier may lack them.
    has_extra_keys: bool,
    /// Unknown media in which blocks were stored (and ignored): removals there concern no block of the
    /// tree.
    media: FxHashSet<Box<str>>,
    /// Buffers, reused to avoid allocations.
    blocks: Vec<NewBlock>,
    /// A block's tokens and those after it.
    window: Vec<u32>,
}

impl EventFilter {
    /// Call this when the engine's process may be another one.
    pub fn forget(&mut self) {
        self.groups.clear();
        self.forget_shape();
        self.has_extra_keys = false;
        self.media.clear();
    }

    fn forget_shape(&mut self) {
        self.shape = None;
        self.is_shape_of_gpu = false;
        self.is_size_certain = false;
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
    pub fn relearn(&mut self, shape: BlockShape, learned: &LearnedFacts) {
        self.forget();
        self.shape = Some(shape);
        self.is_shape_of_gpu = true;
        self.is_size_certain = true;
        // It may have some.
        self.has_extra_keys = true;
        self.groups
            .extend(learned.groups.iter().copied().take(MAX_LEARNED));
        self.media
            .extend(learned.media.iter().take(MAX_LEARNED).cloned());
    }

    /// The tree placed a store of `blocks` blocks. Only that shows the block size: the first store may be the partial
    /// block of a short prompt.
    pub fn on_placed(&mut self, shape: BlockShape, tier: Tier, blocks: usize) {
        let is_gpu = tier == Tier::Gpu;
        self.is_size_certain |= is_gpu && blocks > 1;
        self.is_shape_of_gpu |= is_gpu;
        self.shape = Some(shape);
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
            Event::Cleared { ownership } if is_own_cache(ownership.as_deref()) => {
                // Nothing is left that would have to be of the same shape.
                self.forget_shape();
                Ok(TreeChange::Clear)
            }
            // A separately owned cache was cleared, whose blocks are never in the tree.
            Event::Cleared { .. } => Err(no_impact(IgnoredReason::SeparateOwner)),
            // It might have removed what it names.
            Event::Unknown { hashes, .. } => match hashes.as_deref() {
                Some([]) => Err(no_impact(IgnoredReason::UnknownEvent)),
                Some(hashes) => Ok(TreeChange::Forget {
                    hashes,
                    reason: IgnoredReason::UnknownEvent,
                }),
                None => Err(Ignored {
                    reason: IgnoredReason::UnknownEvent,
                    impact: TreeImpact::Unknown,
                }),
            },
        }
    }

    fn store<'a>(&'a mut self, stored: &'a Stored) -> Result<TreeChange<'a>, IgnoredReason> {
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
        if tier != Tier::Gpu {
            let lacks_keys = stored.extra_keys.is_empty() && stored.cache_salt.is_none();
            let may_lack_keys = self.has_extra_keys && lacks_keys;
            // Copies to a lower tier are often reported without tokens, or without extra keys: then the names count.
            if may_lack_keys || self.read_blocks(stored, tier).is_err() {
                return Ok(TreeChange::AddCopies {
                    hashes: &stored.hashes,
                    tier,
                });
            }
        }
        let (shape, after) = self.read_blocks(stored, tier)?;
        Ok(TreeChange::Store {
            after,
            blocks: &self.blocks,
            tier,
            shape,
        })
    }

    /// Fills `blocks`. Returns their shape, and what they follow.
    fn read_blocks(
        &mut self,
        stored: &Stored,
        tier: Tier,
    ) -> Result<(BlockShape, Parent), IgnoredReason> {
        let block_size = NonZeroU32::new(stored.block_size).ok_or(IgnoredReason::NoBlockSize)?;
        let blocks = stored.hashes.len();
        if blocks == 0 {
            return Err(IgnoredReason::InconsistentFields);
        }
        // A lower tier's shape does not bind the GPU.
        let known = self
            .shape
            .filter(|_| self.is_shape_of_gpu || tier != Tier::Gpu);
        match known.map(|shape| shape.size) {
            Some(known) if block_size < known && blocks == 1 => {
                return Err(IgnoredReason::PartialBlock);
            }
            Some(known) if block_size < known => return Err(IgnoredReason::BlockSizeChanged),
            // Until now there may have been nothing but partial blocks.
            Some(known) if block_size > known && (self.is_size_certain || tier != Tier::Gpu) => {
                return Err(IgnoredReason::BlockSizeChanged);
            }
            Some(_) | None => {}
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
        let salt = match (stored.parent, stored.cache_salt.as_deref()) {
            (Some(_), _) => None,
            (None, Some(salt)) => Some(salt),
            (None, None) => extra_keys::salt(stored.keys(0), lora_name),
        };
        let after = match stored.parent {
            Some(parent) => Parent::Block(parent),
            None => Parent::Root(block::chain_root(lora_name, salt)),
        };
        let lookahead = stored.lookahead(0).len();
        let shape = BlockShape {
            size: block_size,
            lookahead: u32::try_from(lookahead).unwrap_or(u32::MAX),
        };
        if known.is_some_and(|known| known.lookahead != shape.lookahead) {
            return Err(IgnoredReason::LookaheadChanged);
        }
        self.blocks.clear();
        let tokens = stored.token_ids.chunks_exact(block_size.get() as usize);
        for (location, (name, mut tokens)) in stored.hashes.iter().zip(tokens).enumerate() {
            let after = stored.lookahead(location);
            if after.len() != lookahead {
                return Err(IgnoredReason::InconsistentFields);
            }
            if lookahead > 0 {
                self.window.clear();
                self.window.extend_from_slice(tokens);
                self.window.extend_from_slice(after);
                tokens = &self.window;
            }
            let salt = salt.filter(|_| location == 0);
            let local = match extra_keys::hash(stored.keys(location), lora_name, salt) {
                None => block::hash_block(tokens),
                Some(extra) => {
                    self.has_extra_keys = true;
                    block::hash_block_with(tokens, extra)
                }
            };
            self.blocks.push(NewBlock { name: *name, local });
        }
        self.has_extra_keys |= salt.is_some();
        Ok((shape, after))
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
            let was_kept = before.unwrap_or(group == 0 && self.shape.is_some());
            if was_kept && !is_kept {
                return Err(IgnoredReason::GroupChanged);
            }
        }
        reason.map_or(Ok(()), Err)
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
    if is_own_cache(location.ownership.as_deref()) {
        Ok(())
    } else {
        Err(IgnoredReason::SeparateOwner)
    }
}

#[cfg(test)]
mod tests;
