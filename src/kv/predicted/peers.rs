//! What other replicas routed: their prompts' blocks, placed in the order of use as one's own.
//!
//! A message names the blocks that are new at a worker and the block before them. Without that block they cannot be
//! placed, because a worker that owns a block owns all blocks before it. So the sender repeats a path from its start
//! with its next use whenever a replica may have missed a part: it connected later, a message was dropped, the worker
//! was restarted, or ten minutes have passed.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use super::{PredictedIndex, partition};
use crate::ids::{BlockHash, WorkerId};

#[derive(Clone, Copy, Debug)]
pub struct RoutedBlocks<'a> {
    /// The block before them; `None` if they are the prompt's first.
    pub parent: Option<BlockHash>,
    /// Path hashes.
    pub paths: &'a [u64],
    /// Tokens of each block.
    pub tokens: &'a [u32],
}

/// What became of routed blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placed {
    /// Blocks that count as cached now and did not before.
    pub new: usize,
    /// Blocks that could not be placed, because the block before them is not known.
    pub without_parent: usize,
}

impl PredictedIndex {
    /// Counts a prompt that another replica sent to a worker as cached there and used now.
    pub fn apply_routed(
        &self,
        now: Instant,
        worker: WorkerId,
        capacity_tokens: u64,
        routed: &RoutedBlocks<'_>,
    ) -> Placed {
        let len = routed.paths.len().min(routed.tokens.len());
        let paths = &routed.paths[..len];
        let now_s = self.seconds(now);
        let capacity_tokens = self.capacity(capacity_tokens);
        let lru = self.lru(worker);
        let lru = &mut *lru.lock();
        if lru.is_closed {
            return Placed::default();
        }
        let slot = |path: u64| self.slot(worker, BlockHash(path));
        let parent = routed.parent.map(|parent| self.slot(worker, parent));
        if parent == Some(None) {
            return Placed {
                new: 0,
                without_parent: len,
            };
        }
        // Most of what another replica sends is new here, too: one lookup then.
        let known = match paths.first() {
            Some(first) if slot(*first).is_some() => {
                partition(len, |block| slot(paths[block]).is_some())
            }
            _ => 0,
        };
        let last_known = match known {
            0 => parent.flatten(),
            known => slot(paths[known - 1]),
        };
        if known == len && self.is_fresh(lru, last_known, now_s, capacity_tokens) {
            return Placed::default();
        }
        let shared_s = parent
            .flatten()
            .map(|parent| lru.node(parent).used.shared_s);
        let before = last_known.map_or(0, |slot| lru.node(slot).end_tokens);
        // What the sender's engine has room for, this one's may not have, as far as is known.
        let mut end = before;
        let new = paths[known..].iter().zip(&routed.tokens[known..len]);
        let new = new.take_while(|(_, tokens)| {
            end = end.saturating_add(**tokens);
            u64::from(end) <= capacity_tokens
        });
        let new: usize = new.count();
        let tokens = routed.tokens[known..known + new].iter();
        let end = tokens.fold(before, |sum, tokens| sum.saturating_add(*tokens));
        let used = self.next_use(lru, end, now_s, shared_s);
        let blocks = paths[known..known + new]
            .iter()
            .zip(&routed.tokens[known..]);
        let blocks = blocks.map(|(path, tokens)| (BlockHash(*path), *tokens));
        self.extend(lru, worker, last_known, blocks, used);
        self.evict(lru, worker, capacity_tokens, now_s);
        Placed {
            new,
            without_parent: 0,
        }
    }

    /// Takes back the last `count` blocks of a path that another replica routed: the worker did not accept the
    /// request.
    pub fn retract_routed(&self, worker: WorkerId, end: BlockHash, count: usize) {
        let Some(lru) = self.lrus.get(&worker).map(|lru| lru.clone()) else {
            return;
        };
        let lru = &mut *lru.lock();
        let mut next = self.slot(worker, end);
        for _ in 0..count {
            let Some(slot) = next.filter(|slot| !lru.has_children(*slot)) else {
                break;
            };
            next = lru.parent(slot);
            self.remove(lru, worker, slot);
            self.metrics.retracted.inc();
        }
    }

    /// A replica may have missed what was shared until now: it has just connected, or a message was dropped. Paths
    /// are sent whole with their next use.
    pub fn resend_paths(&self, now: Instant) {
        self.resend_s.fetch_max(self.seconds(now), Relaxed);
    }
}

#[cfg(test)]
mod tests;
