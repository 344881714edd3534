//! Removals that wait until their batch has stored the same blocks again, so that lookups, which take no lock, never
//! see the batch's middle as an emptied path: an engine that moves a block to a lower tier reports the removal first.

use rustc_hash::FxHashMap;

use crate::kv::event::{Batch, EngineHash, Event, Tier};

#[derive(Debug, Default)]
pub(super) struct KeptRemovals {
    /// The place of the last store of each name that is stored after some removal.
    stored_at: FxHashMap<EngineHash, usize>,
    waiting: Vec<(EngineHash, Tier)>,
}

impl KeptRemovals {
    /// Reads which names the batch stores after a removal.
    pub(super) fn read(&mut self, batch: &Batch) {
        self.stored_at.clear();
        self.waiting.clear();
        let first_removal = batch
            .events
            .iter()
            .position(|event| matches!(event, Event::Removed(_)));
        let Some(first_removal) = first_removal else {
            return;
        };
        for (at, event) in batch.events.iter().enumerate().skip(first_removal) {
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

    pub(super) fn keep(&mut self, hash: EngineHash, tier: Tier) {
        self.waiting.push((hash, tier));
    }

    /// The removals that waited, in order.
    pub(super) fn take(&mut self) -> Vec<(EngineHash, Tier)> {
        std::mem::take(&mut self.waiting)
    }
}
