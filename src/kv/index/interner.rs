//! Makes owner sets and reuses them: only the writer's, behind its lock.

use std::sync::atomic::Ordering::{Relaxed, Release};

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::owner_sets::{
    CLASSES, EMPTY_SET, FIRST_PIECE, OwnerSets, Residency, SetId, Slot, TREE_MASK, TREES_PER_WORD,
    class_of, group_and_plane, is_stored, locate, owner_of, sole_owner, stored_id, stride, word_of,
};
use super::sync::{fence, zeroed};

/// A set's words, sorted by tier and group.
type Content = SmallVec<[u64; 24]>;

#[derive(Debug)]
pub(super) struct SetInterner {
    free: [Vec<u32>; CLASSES],
    /// How many blocks refer to each set, by class.
    referrers: [Vec<u32>; CLASSES],
    ids: FxHashMap<Box<[u64]>, SetId>,
    /// The last change asked for: a run of blocks asks for the same one again and again.
    last: Change,
    content_bytes: usize,
    /// What [`SetInterner::bytes`] was when sets were made or freed last.
    bytes: usize,
}

/// A tree's residency in a set changed from `was` to `residency`, which gives the set `to`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Change {
    from: SetId,
    slot: Slot,
    residency: Residency,
    to: SetId,
    was: Residency,
}

impl SetInterner {
    pub(super) fn new() -> Self {
        Self {
            free: Default::default(),
            referrers: Default::default(),
            ids: FxHashMap::default(),
            last: Change {
                from: EMPTY_SET,
                slot: 0,
                residency: Residency::Absent,
                to: EMPTY_SET,
                was: Residency::Absent,
            },
            content_bytes: 0,
            bytes: 0,
        }
    }

    /// Memory of the sets, without the part of the last piece of each class that was never used: the system gives
    /// no memory for it.
    #[inline]
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    fn count_bytes(&mut self) {
        let words = |(class, sets): (usize, &Vec<u32>)| sets.len() * stride(class) * 8;
        let words: usize = self.referrers.iter().enumerate().map(words).sum();
        let numbers = self.referrers.iter().chain(&self.free);
        let numbers: usize = numbers.map(|numbers| numbers.capacity() * 4).sum();
        // A map has a control byte for each entry, and room for a seventh more.
        let ids = self.ids.capacity() * 8 / 7 * (size_of::<(Box<[u64]>, SetId)>() + 1);
        self.bytes = words + numbers + ids + self.content_bytes;
    }

    /// Of [`SetInterner::bytes`], the words of free sets. Lookups may be reading them, so they are used again and never
    /// given back.
    pub(super) fn free_bytes(&self) -> usize {
        let free = self.free.iter().enumerate();
        free.map(|(class, free)| free.len() * stride(class) * 8)
            .sum()
    }

    /// Memory beside the sets' words.
    #[cfg(test)]
    pub(super) fn recount_numbers(&self) -> usize {
        let contents = self.ids.keys().map(|content| size_of_val(&**content));
        let ids = self.ids.len() * size_of::<(Box<[u64]>, SetId)>();
        let numbers = self.referrers.iter().chain(&self.free);
        contents.sum::<usize>() + ids + numbers.map(|numbers| numbers.len() * 4).sum::<usize>()
    }

    /// Gives memory back if most of it is unused.
    pub(super) fn shrink(&mut self) {
        if self.ids.capacity() > 64 + self.ids.len() * 8 {
            self.ids.shrink_to(self.ids.len() * 2);
            self.count_bytes();
        }
    }

    /// The trees of a set, and where each has the block.
    pub(super) fn owners(&self, sets: &OwnerSets, set: SetId) -> SmallVec<[(Slot, Residency); 8]> {
        let mut owners = SmallVec::new();
        if set != EMPTY_SET && !is_stored(set) {
            let (slot, plane) = owner_of(set);
            owners.push((slot, Residency::of_plane(plane)));
        }
        if is_stored(set) {
            for word in self.content(sets, set) {
                let (group, plane) = group_and_plane(word);
                let mut trees = word & TREE_MASK;
                while trees != 0 {
                    let slot = group * TREES_PER_WORD as u64 + u64::from(trees.trailing_zeros());
                    owners.push((slot as Slot, Residency::of_plane(plane)));
                    trees &= trees - 1;
                }
            }
        }
        owners
    }

    /// Where a tree has a block of this owner set.
    #[inline]
    pub(super) fn residency(&self, sets: &OwnerSets, set: SetId, slot: Slot) -> Residency {
        if self.last.from == set && self.last.slot == slot {
            return self.last.was;
        }
        if !is_stored(set) {
            if set == EMPTY_SET {
                return Residency::Absent;
            }
            let (owner, plane) = owner_of(set);
            return if owner == slot {
                Residency::of_plane(plane)
            } else {
                Residency::Absent
            };
        }
        for word in self.content(sets, set) {
            let (group, plane) = group_and_plane(word);
            if group == u64::from(slot) / TREES_PER_WORD as u64
                && word >> (slot as usize % TREES_PER_WORD) & 1 == 1
            {
                return Residency::of_plane(plane);
            }
        }
        Residency::Absent
    }

    /// The set with another residency of one tree. The caller must [`SetInterner::retain`] it before
    /// its next call.
    #[inline]
    pub(super) fn with_residency(
        &mut self,
        sets: &OwnerSets,
        set: SetId,
        slot: Slot,
        residency: Residency,
    ) -> SetId {
        let last = &self.last;
        if last.from == set && last.slot == slot && last.residency == residency {
            return last.to;
        }
        if set == EMPTY_SET && residency != Residency::Absent {
            return sole_owner(slot, residency);
        }
        let was = self.residency(sets, set, slot);
        let to = self.change(sets, set, slot, residency);
        self.last = Change {
            from: set,
            slot,
            residency,
            to,
            was,
        };
        to
    }

    /// `more` blocks refer to the set now.
    #[inline]
    pub(super) fn retain(&mut self, set: SetId, more: u32) {
        if is_stored(set) {
            let (class, index) = class_of(set);
            self.referrers[class][index as usize] += more;
        }
    }

    /// `fewer` blocks refer to the set now; the last one frees it.
    #[inline]
    pub(super) fn release(&mut self, sets: &OwnerSets, set: SetId, fewer: u32) {
        if is_stored(set) {
            let (class, index) = class_of(set);
            self.referrers[class][index as usize] -= fewer;
            if self.referrers[class][index as usize] == 0 {
                self.free_set(sets, set);
            }
        }
    }

    fn content<'a>(&self, sets: &'a OwnerSets, set: SetId) -> impl Iterator<Item = u64> + 'a {
        let words = sets.words(set).unwrap_or_default();
        let len = words.first().map_or(0, |head| head.load(Relaxed) & 0xffff);
        words
            .iter()
            .skip(1)
            .take(len as usize)
            .map(|word| word.load(Relaxed))
    }

    #[inline(never)]
    fn change(&mut self, sets: &OwnerSets, set: SetId, slot: Slot, residency: Residency) -> SetId {
        let mut content = Content::new();
        if is_stored(set) {
            content.extend(self.content(sets, set));
        } else if set != EMPTY_SET {
            let (owner, plane) = owner_of(set);
            content.push(word_of(owner, Residency::of_plane(plane)));
        }
        for tier in [Residency::Gpu, Residency::Cpu, Residency::Disk] {
            let bit = word_of(slot, tier);
            let key = |word: u64| word >> TREES_PER_WORD;
            let found = content.binary_search_by_key(&key(bit), |word| key(*word));
            match (found, tier == residency) {
                (Ok(position), true) => content[position] |= bit,
                (Ok(position), false) => {
                    content[position] &= !(bit & TREE_MASK);
                    if content[position] & TREE_MASK == 0 {
                        content.remove(position);
                    }
                }
                (Err(position), true) => content.insert(position, bit),
                (Err(_), false) => {}
            }
        }
        match content[..] {
            [] => EMPTY_SET,
            [word] if (word & TREE_MASK).is_power_of_two() => {
                let (group, plane) = group_and_plane(word);
                let slot = group * TREES_PER_WORD as u64 + u64::from((word & TREE_MASK).ilog2());
                sole_owner(slot as Slot, Residency::of_plane(plane))
            }
            _ => self.intern(sets, &content),
        }
    }

    fn intern(&mut self, sets: &OwnerSets, content: &[u64]) -> SetId {
        if let Some(set) = self.ids.get(content) {
            return *set;
        }
        let class = (0..CLASSES)
            .find(|class| content.len() < stride(*class))
            .expect("an index has no more trees than the largest set has room for");
        let index = self.free[class].pop().unwrap_or_else(|| {
            self.referrers[class].push(0);
            let index = self.referrers[class].len() as u32 - 1;
            let (piece, _) = locate(index);
            sets.classes[class][piece]
                .get_or_init(|| zeroed((FIRST_PIECE << piece) as usize * stride(class)));
            index
        });
        // The index fits its bits: each set has at least one block, and an index has fewer blocks.
        let set = stored_id(class, index);
        let words = sets.words(set).expect("the set was just made");
        let generation = words[0].load(Relaxed) >> 16;
        words[0].store((generation + 1) << 16, Relaxed);
        fence(Release);
        for (to, from) in words[1..].iter().zip(content) {
            to.store(*from, Relaxed);
        }
        words[0].store((generation + 2) << 16 | content.len() as u64, Release);
        self.content_bytes += size_of_val(content);
        self.ids.insert(content.into(), set);
        self.count_bytes();
        set
    }

    #[cold]
    fn free_set(&mut self, sets: &OwnerSets, set: SetId) {
        let content: Content = self.content(sets, set).collect();
        self.ids.remove(&content[..]);
        self.content_bytes -= size_of_val(&content[..]);
        let (class, index) = class_of(set);
        self.free[class].push(index);
        self.count_bytes();
        if self.last.from == set || self.last.to == set {
            self.last = Change {
                from: EMPTY_SET,
                residency: Residency::Absent,
                to: EMPTY_SET,
                was: Residency::Absent,
                ..self.last
            };
        }
    }
}
