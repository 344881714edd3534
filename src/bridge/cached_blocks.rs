//! The blocks that one rank caches, with their tokens, from the batches applied so far. Snapshots for late
//! subscribers are made from them.
//!
//! They are always a subset of what the engine caches. If some cannot be kept or are unknown, the
//! snapshot says that it is incomplete.

mod block;
mod kinds;
mod snapshot_events;

use std::collections::{HashMap, HashSet};

use rustc_hash::FxBuildHasher;
use smallvec::SmallVec;

use self::block::{Block, Kind, KindId, bytes, medium};
use self::kinds::Kinds;
use self::snapshot_events::SnapshotWriter;
use crate::kv::event::{EngineHash, Event, ExtraKey, Location, Medium, Stored, is_own_cache};

#[derive(Debug)]
pub struct CachedBlocks {
    blocks: HashMap<EngineHash, Block, FxBuildHasher>,
    /// A block holds its own kind and those of its copies.
    kinds: Kinds,
    order: u64,
    /// Blocks without a copy, kept for their descendants.
    placeholders: usize,
    bytes: usize,
    bytes_max: usize,
    /// Stored blocks that could not be kept, since the cache was last cleared.
    missing: u64,
}

impl CachedBlocks {
    pub fn new(bytes_max: usize) -> Self {
        Self {
            blocks: HashMap::default(),
            kinds: Kinds::default(),
            order: 0,
            placeholders: 0,
            bytes: 0,
            bytes_max,
            missing: 0,
        }
    }

    /// Number of blocks with at least one copy.
    pub fn blocks(&self) -> usize {
        self.blocks.len() - self.placeholders
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Stored blocks that could not be kept: the memory bound was reached, too many kinds are in use, or their parent
    /// is unknown.
    pub fn missing(&self) -> u64 {
        self.missing
    }

    pub fn apply(&mut self, event: &Event) {
        match event {
            Event::Stored(event) => self.store(event),
            Event::Removed(event) if is_known_locality(&event.location) => {
                for hash in &event.hashes {
                    self.remove(*hash, &event.location);
                }
            }
            // Which copies are gone is unknown.
            Event::Removed(event) => self.forget(&event.hashes),
            // Whichever owner's blocks were cleared: knowing fewer blocks is safe.
            Event::Cleared { ownership } => {
                *self = Self::new(self.bytes_max);
                self.missing = u64::from(!is_own_cache(ownership.as_deref()));
            }
            Event::Unknown { hashes, .. } => self.forget(hashes.as_deref().unwrap_or_default()),
        }
    }

    /// Counts blocks of a store that has no equivalent message.
    pub fn leave_out(&mut self, event: &Event) {
        if let Event::Stored(stored) = event
            && medium(&stored.location.medium) == &Medium::Gpu
        {
            self.missing += stored.hashes.len() as u64;
        }
    }

    /// Removes all copies of blocks that may still be cached.
    fn forget(&mut self, hashes: &[EngineHash]) {
        for hash in hashes {
            if let Some(block) = self.blocks.get_mut(hash)
                && !block.copies.is_empty()
            {
                for (kind, _) in block.copies.drain(..) {
                    self.kinds.release(kind);
                }
                self.missing += 1;
                self.placeholders += 1;
                self.remove_unused(*hash);
            }
        }
    }

    fn store(&mut self, event: &Stored) {
        let Some(kind) = self.kinds.hold(Kind::of(event)) else {
            self.missing += event.hashes.len() as u64;
            return;
        };
        self.put_all(event, kind);
        self.kinds.release(kind);
    }

    fn put_all(&mut self, event: &Stored, kind: KindId) {
        let mut parent = event.parent;
        let size = event.block_size.max(1) as usize;
        let tokens = event.token_ids.chunks_exact(size);
        for (at, (hash, tokens)) in event.hashes.iter().zip(tokens).enumerate() {
            if !self.put(*hash, parent, tokens, event.keys(at), kind) {
                // Its descendants cannot be stored without it.
                self.missing += (event.hashes.len() - at) as u64;
                return;
            }
            parent = Some(*hash);
        }
    }

    fn put(
        &mut self,
        hash: EngineHash,
        parent: Option<EngineHash>,
        tokens: &[u32],
        keys: &[ExtraKey],
        kind: KindId,
    ) -> bool {
        if let Some(block) = self.blocks.get_mut(&hash) {
            // Copies to a lower tier are often reported without their blocks' extra keys.
            let Some(kind) = self.kinds.hold_copy(block.kind, kind) else {
                return false;
            };
            if block.copies.is_empty() {
                self.placeholders -= 1;
                self.kinds.hold_again(kind);
                self.kinds.release(block.kind);
                block.kind = kind;
            }
            match block.copies.iter_mut().find(|(of, _)| *of == kind) {
                Some((_, count)) => {
                    *count += 1;
                    self.kinds.release(kind);
                }
                None => block.copies.push((kind, 1)),
            }
            return true;
        }
        let bytes = bytes(tokens, keys);
        if self.bytes + bytes > self.bytes_max {
            return false;
        }
        if let Some(parent) = parent {
            match self.blocks.get_mut(&parent) {
                Some(parent) => parent.children += 1,
                None => return false,
            }
        }
        self.bytes += bytes;
        self.order += 1;
        // Once for the block and once for its copy.
        self.kinds.hold_again(kind);
        self.kinds.hold_again(kind);
        let block = Block {
            order: self.order,
            parent,
            children: 0,
            tokens: tokens.into(),
            extra_keys: keys.into(),
            kind,
            copies: SmallVec::from_buf([(kind, 1)]),
        };
        self.blocks.insert(hash, block);
        true
    }

    fn remove(&mut self, hash: EngineHash, location: &Location) {
        let Some(block) = self.blocks.get_mut(&hash) else {
            return;
        };
        let kinds = &self.kinds;
        let is_exact = |of: &(KindId, u32)| is_same_location(&kinds.get(of.0).location, location);
        let may_be = |of: &(KindId, u32)| may_be_of(&kinds.get(of.0).location, location);
        let found = block.copies.iter().position(is_exact);
        let found = found.or_else(|| block.copies.iter().position(may_be));
        // An unknown copy: nothing to remove.
        let Some(found) = found else { return };
        block.copies[found].1 -= 1;
        if block.copies[found].1 > 0 {
            return;
        }
        let (kind, _) = block.copies.remove(found);
        self.kinds.release(kind);
        if !block.copies.is_empty() {
            return;
        }
        self.placeholders += 1;
        self.remove_unused(hash);
    }

    /// Removes a block that has neither copies nor children, then likewise its ancestors.
    fn remove_unused(&mut self, hash: EngineHash) {
        let mut next = Some(hash);
        while let Some(hash) = next {
            let Some(block) = self.blocks.get(&hash) else {
                return;
            };
            if block.children > 0 || !block.copies.is_empty() {
                return;
            }
            next = block.parent;
            self.bytes -= bytes(&block.tokens, &block.extra_keys);
            self.kinds.release(block.kind);
            self.blocks.remove(&hash);
            self.placeholders -= 1;
            if let Some(parent) = next.and_then(|parent| self.blocks.get_mut(&parent)) {
                parent.children -= 1;
            }
        }
    }

    /// All blocks as events, in parts of about `bytes_max` encoded bytes: a clear, then stores with parents
    /// before children, one for each copy.
    ///
    /// A placeholder (a removed block with descendants) is stored for its descendants' sake and removed
    /// at the end. These blocks come last, so that readers count them only briefly.
    pub fn snapshot_events(&self, bytes_max: usize) -> Vec<Vec<Event>> {
        let mut blocks: Vec<(EngineHash, &Block)> =
            self.blocks.iter().map(|(n, b)| (*n, b)).collect();
        blocks.sort_unstable_by_key(|(_, block)| block.order);
        let mut under_placeholders: HashSet<EngineHash, FxBuildHasher> = HashSet::default();
        if self.placeholders > 0 {
            for (hash, block) in &blocks {
                let is_under = |parent| under_placeholders.contains(&parent);
                if block.copies.is_empty() || block.parent.is_some_and(is_under) {
                    under_placeholders.insert(*hash);
                }
            }
        }
        let mut writer = SnapshotWriter::new(bytes_max);
        for is_last in [false, true] {
            for (hash, block) in &blocks {
                if under_placeholders.contains(hash) == is_last {
                    self.write(*hash, block, &mut writer);
                }
            }
        }
        writer.flush();
        for (hash, block) in blocks.iter().filter(|(_, block)| block.copies.is_empty()) {
            let location = &self.kinds.get(block.kind).location;
            writer.remove(*hash, location);
        }
        writer.finish()
    }

    fn write(&self, hash: EngineHash, block: &Block, writer: &mut SnapshotWriter) {
        let first = block.copies.first().map_or(block.kind, |(kind, _)| *kind);
        writer.store(hash, block, first, &self.kinds);
        for (at, (kind, count)) in block.copies.iter().enumerate() {
            let is_written = u32::from(at == 0);
            for _ in is_written..*count {
                writer.copy(hash, block, self.kinds.get(*kind));
            }
        }
    }
}

fn is_same_location(a: &Location, b: &Location) -> bool {
    medium(&a.medium) == medium(&b.medium)
        && (a.group, &a.locality, &a.ownership) == (b.group, &b.locality, &b.ownership)
}

/// Whether a removal may be of a copy whose location it gives in other words. Cache groups have blocks of the same names, and
/// stores of one of them may have been left out: what that group loses says nothing of another group's copies.
fn may_be_of(copy: &Location, removed: &Location) -> bool {
    let groups = copy.group.zip(removed.group);
    medium(&copy.medium) == medium(&removed.medium)
        && groups.is_none_or(|(of_copy, of_removed)| of_copy == of_removed)
}

fn is_known_locality(location: &Location) -> bool {
    let locality = location.locality.as_deref();
    locality.is_none_or(|word| {
        word.eq_ignore_ascii_case("LOCAL") || word.eq_ignore_ascii_case("REMOTE")
    })
}

#[cfg(test)]
mod tests;
