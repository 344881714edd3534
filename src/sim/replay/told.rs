//! What the engines' cache events have told so far. Every router hears all of them at the same time,
//! so one index serves them all.

use rustc_hash::FxHashSet;

use super::engine::Change;
use super::workload::Job;
use super::workload::tokens_of;
use crate::ids::BlockHash;

#[derive(Debug)]
pub(super) struct Told {
    held: Vec<FxHashSet<BlockHash>>,
}

impl Told {
    pub(super) fn new(workers: usize) -> Self {
        Self {
            held: vec![FxHashSet::default(); workers],
        }
    }

    /// An engine has computed a prompt.
    pub(super) fn apply(&mut self, worker: usize, job: &Job, change: &Change) {
        for block in &job.blocks[change.held..change.end] {
            self.held[worker].insert(block.path);
        }
        for path in &change.evicted {
            self.held[worker].remove(path);
        }
    }

    /// Tokens of a prompt's start that each worker holds.
    pub(super) fn tokens(&self, job: &Job) -> Vec<u32> {
        self.held
            .iter()
            .map(|held| {
                let depth = job
                    .blocks
                    .iter()
                    .take_while(|block| held.contains(&block.path));
                tokens_of(&job.blocks, depth.count())
            })
            .collect()
    }
}
