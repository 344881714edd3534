//! A copy of one worker's predicted blocks, for another replica, with their age and in their order of use.

use std::time::{Duration, Instant};

use super::PredictedIndex;
use super::lru::{Slot, Use};
use crate::ids::{BlockHash, WorkerId};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PredictedBlock {
    pub path: BlockHash,
    /// The block before it; `None` for a prompt's first block.
    pub parent: Option<BlockHash>,
    pub tokens: u32,
    /// Since it was last used.
    pub age_s: u32,
}

impl PredictedIndex {
    /// Up to `max` blocks of a worker, the one used last first: each comes after the block before it in its prompt.
    pub fn copy(&self, now: Instant, worker: WorkerId, max: usize) -> Vec<PredictedBlock> {
        let Some(lru) = self.lrus.get(&worker).map(|lru| lru.clone()) else {
            return Vec::new();
        };
        let now_s = self.seconds(now);
        let lru = lru.lock();
        let blocks = lru.newest_first().take(max);
        blocks
            .map(|slot| {
                let node = lru.node(slot);
                PredictedBlock {
                    path: node.path,
                    parent: lru.parent(slot).map(|parent| lru.node(parent).path),
                    tokens: node.tokens,
                    age_s: now_s.saturating_sub(node.used.at_s),
                }
            })
            .collect()
    }

    /// Adds what another replica predicts of a worker, as used before all that is known here. Returns how many of the
    /// blocks were new.
    pub fn import(
        &self,
        now: Instant,
        worker: WorkerId,
        capacity_tokens: u64,
        blocks: &[PredictedBlock],
    ) -> usize {
        let lru = self.lru(worker);
        let now_s = self.seconds(now);
        let lru = &mut *lru.lock();
        if lru.is_closed {
            return 0;
        }
        let mut added = 0;
        for block in blocks {
            let is_old = Duration::from_secs(block.age_s.into()) > self.settings.max_age;
            let parent = block.parent.map(|parent| self.slot(worker, parent));
            if is_old || parent == Some(None) {
                continue;
            }
            let used = Use {
                at_s: now_s.saturating_sub(block.age_s),
                at_tokens: 0,
                // Which other replicas know it is not known.
                shared_s: 0,
            };
            let before = lru.oldest();
            let insert = || {
                lru.insert(block.path, block.tokens, parent.flatten(), before, used)
                    .0
            };
            let inserted = self.owners.insert(worker, block.path, insert).map(Slot);
            added += usize::from(inserted.is_some());
        }
        self.metrics.blocks.add(added as i64);
        self.evict(lru, worker, self.capacity(capacity_tokens), now_s);
        added
    }
}
