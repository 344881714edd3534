//! What one rank's cache holds, block by block with its tokens, from the batches applied so far: what
//! a subscriber that comes late has to be told.
//!
//! It is always a part of what the engine holds. Where not all can be kept or known it is a smaller
//! part, and says so.

mod list;

use std::collections::{HashMap, HashSet};

use rustc_hash::FxBuildHasher;
use smallvec::SmallVec;

use self::list::List;
use crate::kv::event::{Event, ExtraKey, Medium, Name, Place, Stored};

/// A block beside its tokens, with its share of the tables.
const BLOCK_BYTES: usize = 160;
/// Different kinds of blocks at a time; each adapter, tier and group makes one.
const KINDS_MAX: usize = 4_096;

/// What blocks of one store have in common.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Kind {
    place: Place,
    lora_id: Option<i64>,
    lora_name: Option<Box<str>>,
    cache_salt: Option<Box<str>>,
    spec_kind: Option<Box<str>>,
    sliding_window: Option<u32>,
}

/// An index into the kinds.
type KindId = u32;

#[derive(Clone, Debug)]
struct Block {
    /// Rises with each new block, so that parents come before children.
    born: u64,
    parent: Option<Name>,
    children: u32,
    tokens: Box<[u32]>,
    extra_keys: Box<[ExtraKey]>,
    /// Of the copy that made it be here; what is told of it when there is none any more.
    kind: KindId,
    /// How many there are of each kind. None at all: it is remembered for its descendants' sake, whose
    /// place cannot be told without it.
    copies: SmallVec<[(KindId, u32); 1]>,
}

#[derive(Debug)]
pub struct Held {
    blocks: HashMap<Name, Block, FxBuildHasher>,
    kinds: Vec<Kind>,
    kind_ids: HashMap<Kind, KindId>,
    born: u64,
    /// Blocks without a copy.
    ghosts: usize,
    bytes: usize,
    bytes_max: usize,
    /// Blocks that were stored and are not here, since all was cleared.
    left_out: u64,
}

impl Held {
    pub fn new(bytes_max: usize) -> Self {
        Self {
            blocks: HashMap::default(),
            kinds: Vec::new(),
            kind_ids: HashMap::new(),
            born: 0,
            ghosts: 0,
            bytes: 0,
            bytes_max,
            left_out: 0,
        }
    }

    /// Blocks of which there is a copy.
    pub fn blocks(&self) -> usize {
        self.blocks.len() - self.ghosts
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Stored blocks that could not be kept: there was no room, or their parent is not known.
    pub fn left_out(&self) -> u64 {
        self.left_out
    }

    pub fn apply(&mut self, event: &Event) {
        match event {
            Event::Stored(event) => self.store(event),
            Event::Removed(event) => {
                for name in &event.names {
                    self.remove(*name, &event.place);
                }
            }
            // Whoever's blocks they were: to hold fewer is safe.
            Event::Cleared { ownership } => {
                *self = Self::new(self.bytes_max);
                self.left_out = u64::from(ownership.is_some());
            }
            // Nothing that reaches this place; if it did, it could be anything.
            Event::Unknown { .. } => self.left_out += 1,
        }
    }

    fn store(&mut self, event: &Stored) {
        let Some(kind) = self.kind(event) else {
            self.left_out += event.names.len() as u64;
            return;
        };
        let mut parent = event.parent;
        let size = event.block_size.max(1) as usize;
        let tokens = event.token_ids.chunks_exact(size);
        for (at, (name, tokens)) in event.names.iter().zip(tokens).enumerate() {
            let keys = event.extra_keys.get(at).map_or(&[][..], Vec::as_slice);
            if !self.put(*name, parent, tokens, keys, kind) {
                // Nor could what hangs on it be placed.
                self.left_out += (event.names.len() - at) as u64;
                return;
            }
            parent = Some(*name);
        }
    }

    fn put(
        &mut self,
        name: Name,
        parent: Option<Name>,
        tokens: &[u32],
        keys: &[ExtraKey],
        kind: KindId,
    ) -> bool {
        if let Some(block) = self.blocks.get_mut(&name) {
            if block.copies.is_empty() {
                self.ghosts -= 1;
                block.kind = kind;
            }
            match block.copies.iter_mut().find(|(of, _)| *of == kind) {
                Some((_, count)) => *count += 1,
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
        self.born += 1;
        let block = Block {
            born: self.born,
            parent,
            children: 0,
            tokens: tokens.into(),
            extra_keys: keys.into(),
            kind,
            copies: SmallVec::from_buf([(kind, 1)]),
        };
        self.blocks.insert(name, block);
        true
    }

    fn remove(&mut self, name: Name, place: &Place) {
        let Some(block) = self.blocks.get_mut(&name) else {
            return;
        };
        let kinds = &self.kinds;
        let is_there = |of: &(KindId, u32)| is_same(&kinds[of.0 as usize].place, place);
        let is_near = |of: &(KindId, u32)| {
            medium(&kinds[of.0 as usize].place.medium) == medium(&place.medium)
        };
        let found = block.copies.iter().position(is_there);
        let found = found.or_else(|| block.copies.iter().position(is_near));
        // Of a copy that is not known there is nothing to forget.
        let Some(found) = found else { return };
        block.copies[found].1 -= 1;
        if block.copies[found].1 > 0 {
            return;
        }
        block.copies.remove(found);
        if !block.copies.is_empty() {
            return;
        }
        self.ghosts += 1;
        self.forget(name);
    }

    /// Forgets a block without copies, unless others hang on it, and then those that it hung on alike.
    fn forget(&mut self, name: Name) {
        let mut next = Some(name);
        while let Some(name) = next {
            let Some(block) = self.blocks.get(&name) else {
                return;
            };
            if block.children > 0 || !block.copies.is_empty() {
                return;
            }
            next = block.parent;
            self.bytes -= bytes(&block.tokens, &block.extra_keys);
            self.blocks.remove(&name);
            self.ghosts -= 1;
            if let Some(parent) = next.and_then(|parent| self.blocks.get_mut(&parent)) {
                parent.children -= 1;
            }
        }
    }

    fn kind(&mut self, event: &Stored) -> Option<KindId> {
        let kind = Kind {
            place: event.place.clone(),
            lora_id: event.lora_id,
            lora_name: event.lora_name.clone(),
            cache_salt: event.cache_salt.clone(),
            spec_kind: event.spec_kind.clone(),
            sliding_window: event.sliding_window,
        };
        if let Some(id) = self.kind_ids.get(&kind) {
            return Some(*id);
        }
        if self.kinds.len() >= KINDS_MAX {
            return None;
        }
        let id = u32::try_from(self.kinds.len()).expect("a few thousand");
        self.kinds.push(kind.clone());
        self.kind_ids.insert(kind, id);
        Some(id)
    }

    /// Everything held as events, in parts of about `bytes_max` encoded bytes: a clear, then stores with
    /// parents before children, one for each copy.
    ///
    /// A block that is gone but has descendants is stored for their sake and removed afterwards. Those
    /// come last, so that nobody believes in them for longer than it takes to send the last parts.
    pub fn list(&self, bytes_max: usize) -> Vec<Vec<Event>> {
        let mut blocks: Vec<(Name, &Block)> = self.blocks.iter().map(|(n, b)| (*n, b)).collect();
        blocks.sort_unstable_by_key(|(_, block)| block.born);
        let mut under_ghosts: HashSet<Name, FxBuildHasher> = HashSet::default();
        if self.ghosts > 0 {
            for (name, block) in &blocks {
                let is_under = |parent| under_ghosts.contains(&parent);
                if block.copies.is_empty() || block.parent.is_some_and(is_under) {
                    under_ghosts.insert(*name);
                }
            }
        }
        let mut list = List::new(bytes_max);
        for is_last in [false, true] {
            for (name, block) in &blocks {
                if under_ghosts.contains(name) == is_last {
                    self.tell(*name, block, &mut list);
                }
            }
        }
        list.flush();
        for (name, block) in blocks.iter().filter(|(_, block)| block.copies.is_empty()) {
            let place = &self.kinds[block.kind as usize].place;
            list.remove(*name, place);
        }
        list.done()
    }

    fn tell(&self, name: Name, block: &Block, list: &mut List) {
        let first = block.copies.first().map_or(block.kind, |(kind, _)| *kind);
        list.store(name, block, first, &self.kinds);
        for (at, (kind, count)) in block.copies.iter().enumerate() {
            let is_told = u32::from(at == 0);
            for _ in is_told..*count {
                list.copy(name, block, &self.kinds[*kind as usize]);
            }
        }
    }
}

/// Bytes of a block in memory.
fn bytes(tokens: &[u32], keys: &[ExtraKey]) -> usize {
    BLOCK_BYTES + size_of_val(tokens) + keys_bytes(keys)
}

fn keys_bytes(keys: &[ExtraKey]) -> usize {
    let text = |key: &ExtraKey| match key {
        ExtraKey::Text(text) => text.len(),
        ExtraKey::Blob(blob) => blob.len(),
        ExtraKey::Number(_) => 0,
        ExtraKey::Multimodal { identifier, .. } => identifier.len(),
    };
    keys.iter()
        .map(|key| size_of::<ExtraKey>() + text(key))
        .sum()
}

fn is_same(a: &Place, b: &Place) -> bool {
    medium(&a.medium) == medium(&b.medium)
        && (a.group, &a.locality, &a.ownership) == (b.group, &b.locality, &b.ownership)
}

/// What is not said is the GPU.
fn medium(medium: &Medium) -> &Medium {
    match medium {
        Medium::Unsaid => &Medium::Gpu,
        said => said,
    }
}

#[cfg(test)]
mod tests;
