//! Takes back what was predicted of a request that its worker did not accept.

use super::PredictedIndex;
use crate::ids::{Block, BlockHash, WorkerId};

impl PredictedIndex {
    /// Takes back the blocks after `cached_before` that a record added: the worker did not accept the
    /// request. Another request recorded meanwhile with the same blocks loses them too, unless it went on after them,
    /// which makes the prediction colder, not wrong.
    pub fn retract(&self, worker: WorkerId, prompt: &[Block], cached_before: usize) {
        let added = prompt.get(cached_before..).unwrap_or_default();
        let paths = added.iter().rev().map(|block| block.path);
        self.retract_path(worker, paths);
    }

    /// Removes blocks of a worker, given from the end of a path to its start. Stops at one that others follow.
    pub(super) fn retract_path(&self, worker: WorkerId, paths: impl Iterator<Item = BlockHash>) {
        let Some(lru) = self.lrus.get(&worker).map(|lru| lru.clone()) else {
            return;
        };
        let lru = &mut *lru.lock();
        for path in paths {
            match self.slot(worker, path) {
                Some(slot) if lru.has_children(slot) => break,
                Some(slot) => {
                    self.remove(lru, worker, slot);
                    self.metrics.retracted.inc();
                }
                None => {}
            }
        }
    }
}
