//! Removals that wait until their batch has stored the same blocks again, so that lookups, which take no lock, never
//! see the batch's middle as an emptied path: an engine that moves a block to a lower tier reports the removal first.
//!
//! Where a store counts as "at least one copy", one that comes after the removal of the last copy makes that removal void:
//! carried out at the end of the batch, the removal would take what was stored after it.

use rustc_hash::FxHashMap;

use crate::kv::event::{Batch, EngineHash, Event, Tier};

/// A set of names that may wrongly say that it has one: most batches remove other blocks than they store, which this shows
/// for a tenth of what a map costs.
struct NameFilter([u64; 64]);

impl NameFilter {
    fn add(&mut self, name: EngineHash) {
        for (word, bit) in Self::bits(name) {
            self.0[word] |= bit;
        }
    }

    fn may_have(&self, name: EngineHash) -> bool {
        Self::bits(name)
            .iter()
            .all(|(word, bit)| self.0[*word] & bit != 0)
    }

    /// Names are hashes, so their bits are random.
    fn bits(EngineHash(name): EngineHash) -> [(usize, u64); 2] {
        [name, name >> 32].map(|digits| ((digits >> 6) as usize % 64, 1 << (digits % 64)))
    }
}

#[derive(Debug, Default)]
pub(super) struct KeptRemovals {
    /// The place of the last store of each name that is stored after some removal.
    stored_at: FxHashMap<EngineHash, usize>,
    waiting: Vec<(EngineHash, Tier)>,
    /// How many removals of a block wait and are not void.
    counts: FxHashMap<(EngineHash, Tier), u32>,
}

impl KeptRemovals {
    /// Reads which names the batch stores after a removal, if it may remove one of these.
    pub(super) fn read(&mut self, batch: &Batch) {
        self.stored_at.clear();
        self.waiting.clear();
        self.counts.clear();
        let mut events = batch.events.iter();
        let first_removal = events.position(|event| matches!(event, Event::Removed(_)));
        let Some(first_removal) = first_removal else {
            return;
        };
        let later = || batch.events.iter().enumerate().skip(first_removal);
        let mut stored_names = NameFilter([0; 64]);
        for (_, event) in later() {
            if let Event::Stored(stored) = event {
                stored
                    .hashes
                    .iter()
                    .for_each(|hash| stored_names.add(*hash));
            }
        }
        let may_be_stored = |event: &Event| match event {
            Event::Removed(removed) => removed
                .hashes
                .iter()
                .any(|hash| stored_names.may_have(*hash)),
            Event::Stored(_) | Event::Cleared { .. } | Event::Unknown { .. } => false,
        };
        if !later().any(|(_, event)| may_be_stored(event)) {
            return;
        }
        for (at, event) in later() {
            if let Event::Stored(stored) = event {
                self.stored_at
                    .extend(stored.hashes.iter().map(|hash| (*hash, at)));
            }
        }
    }

    /// Whether the batch stores the block again after the event at `at`.
    pub(super) fn is_stored_after(&self, hash: EngineHash, at: usize) -> bool {
        self.stored_at.get(&hash).is_some_and(|stored| *stored > at)
    }

    /// Whether no removal of the batch needs to wait.
    pub(super) fn is_empty(&self) -> bool {
        self.stored_at.is_empty()
    }

    pub(super) fn waiting(&self, hash: EngineHash, tier: Tier) -> u32 {
        self.counts.get(&(hash, tier)).copied().unwrap_or(0)
    }

    pub(super) fn is_any_waiting(&self) -> bool {
        !self.counts.is_empty()
    }

    pub(super) fn keep(&mut self, hash: EngineHash, tier: Tier) {
        self.waiting.push((hash, tier));
        *self.counts.entry((hash, tier)).or_default() += 1;
    }

    /// Makes one waiting removal of the block void.
    pub(super) fn cancel(&mut self, hash: EngineHash, tier: Tier) {
        if let Some(count) = self.counts.get_mut(&(hash, tier)) {
            *count = count.saturating_sub(1);
        }
    }

    /// The removals that waited, in order.
    pub(super) fn take(&mut self) -> Vec<(EngineHash, Tier)> {
        let mut counts = std::mem::take(&mut self.counts);
        let mut waiting = std::mem::take(&mut self.waiting);
        waiting.retain(|removal| match counts.get_mut(removal) {
            Some(count) if *count > 0 => {
                *count -= 1;
                true
            }
            Some(_) | None => false,
        });
        waiting
    }
}
