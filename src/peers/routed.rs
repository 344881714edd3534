//! Routed prompts: what this replica sent to which worker, for the others, and what they sent.
//!
//! A request's path only copies hashes into a bounded queue, and not even that while no replica is connected. The next report
//! takes all of them as one message for all replicas. What finds no room or is missed by a replica is repeated: the
//! predicted index then sends paths whole with their next use.

mod metrics;
mod queue;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use self::metrics::Metrics;
use self::queue::{Batch, Queue};
use super::wire;
use crate::ids::{Block, BlockHash, WorkerId};
use crate::kv::predicted::{PredictedIndex, RoutedBlocks};
use crate::kv::unconfirmed::{PrefixKeys, UnconfirmedBlocks};
use crate::observe::metrics::Registry;

/// A worker that a number in a message stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoutedWorker {
    pub id: WorkerId,
    /// Capacity of its prefix cache, 0 if unknown.
    pub cache_tokens: u64,
}

#[derive(Debug)]
pub struct RoutedPrompts {
    queue: Queue,
    /// Another replica is connected.
    is_connected: AtomicBool,
    predicted: Arc<PredictedIndex>,
    unconfirmed: Arc<UnconfirmedBlocks>,
    metrics: Metrics,
}

impl RoutedPrompts {
    /// At most `max_queued` blocks wait for the next report.
    pub fn new(
        max_queued: usize,
        predicted: Arc<PredictedIndex>,
        unconfirmed: Arc<UnconfirmedBlocks>,
        registry: &Registry,
    ) -> Self {
        Self {
            queue: Queue::new(max_queued),
            is_connected: AtomicBool::new(false),
            predicted,
            unconfirmed,
            metrics: Metrics::new(registry),
        }
    }

    /// Reports a prompt that a worker is sent: the blocks in `news`, which follow ones that they know. For
    /// workers without KV events.
    pub fn push(&self, now: Instant, worker: WorkerId, prompt: &[Block], news: Range<usize>) {
        if self.is_connected() && !self.queue.push(worker, prompt, news.clone()) {
            self.drop_blocks(now, news.len());
        }
    }

    /// Reports that a worker did not accept a prompt: its blocks from `first` on do not count.
    pub fn retract(&self, now: Instant, worker: WorkerId, prompt: &[Block], first: usize) {
        let count = prompt.len().saturating_sub(first);
        if count > 0 && self.is_connected() && !self.queue.retract(worker, prompt, count) {
            self.drop_blocks(now, 0);
        }
    }

    /// Reports a prompt whose worker will report it by KV events.
    pub fn push_unconfirmed(&self, worker: WorkerId, keys: &PrefixKeys) {
        // Dropped prefixes need no repetition: the worker's events follow.
        if self.is_connected() && !self.queue.push_unconfirmed(worker, keys) {
            self.metrics.dropped.inc_by(keys.len() as u64);
        }
    }

    /// Whether another replica is connected. Otherwise nothing is queued.
    pub fn set_connected(&self, is_connected: bool) {
        self.is_connected.store(is_connected, Relaxed);
        if !is_connected {
            self.queue.clear();
        }
    }

    /// Whether something waits for the next message.
    pub fn has_queued(&self) -> bool {
        self.queue.has_queued()
    }

    /// A replica may have missed what was sent until now: it has just connected, or could not take a message.
    pub fn on_missed(&self, now: Instant) {
        self.predicted.resend_paths(now);
    }

    /// What was routed since the last message, for all replicas. `number_of` gives a worker's number in messages.
    pub fn take_message(
        &self,
        mut number_of: impl FnMut(WorkerId) -> Option<u32>,
    ) -> Option<wire::RoutedPrompts> {
        let mut message = wire::RoutedPrompts::default();
        for batch in self.queue.take() {
            append(&mut message, &batch, &mut number_of);
        }
        let blocks = message.prompts.iter().map(|prompt| prompt.blocks.len());
        let prefixes = message
            .unconfirmed
            .iter()
            .map(|prompt| prompt.prefixes.len());
        let sent = blocks.chain(prefixes).sum::<usize>();
        self.metrics.sent.inc_by(sent as u64);
        (!message.prompts.is_empty() || !message.unconfirmed.is_empty()).then_some(message)
    }

    /// Counts what another replica routed. `worker_of` knows the worker of a number; `None` if it is not of this
    /// replica's fleet.
    pub fn apply(
        &self,
        now: Instant,
        message: &wire::RoutedPrompts,
        mut worker_of: impl FnMut(u32) -> Option<RoutedWorker>,
    ) {
        let (mut new, mut without_parent, mut known, mut unknown_worker) = (0, 0, 0, 0);
        for prompt in &message.prompts {
            let Some(worker) = worker_of(prompt.number) else {
                unknown_worker += prompt.blocks.len();
                continue;
            };
            let parent = prompt.parent.map(BlockHash);
            if prompt.retracted > 0 {
                if let Some(end) = parent {
                    let count = prompt.retracted as usize;
                    self.predicted.retract_routed(worker.id, end, count);
                }
                continue;
            }
            let routed = RoutedBlocks {
                parent,
                paths: &prompt.blocks,
                tokens: &prompt.tokens,
            };
            let capacity = worker.cache_tokens;
            let placed = self
                .predicted
                .apply_routed(now, worker.id, capacity, &routed);
            new += placed.new;
            without_parent += placed.without_parent;
            known += prompt.blocks.len() - placed.new - placed.without_parent;
        }
        let mut unconfirmed = 0;
        for prompt in &message.unconfirmed {
            match worker_of(prompt.number) {
                Some(worker) => {
                    unconfirmed += prompt.prefixes.len();
                    self.unconfirmed
                        .insert_routed(now, worker.id, &prompt.prefixes);
                }
                None => unknown_worker += prompt.prefixes.len(),
            }
        }
        self.metrics.new.inc_by(new as u64);
        self.metrics.without_parent.inc_by(without_parent as u64);
        self.metrics.known.inc_by(known as u64);
        self.metrics.unconfirmed.inc_by(unconfirmed as u64);
        self.metrics.unknown_worker.inc_by(unknown_worker as u64);
    }

    fn is_connected(&self) -> bool {
        self.is_connected.load(Relaxed)
    }

    fn drop_blocks(&self, now: Instant, blocks: usize) {
        self.metrics.dropped.inc_by(blocks as u64);
        self.on_missed(now);
    }
}

fn append(
    message: &mut wire::RoutedPrompts,
    batch: &Batch,
    mut number_of: impl FnMut(WorkerId) -> Option<u32>,
) {
    for prompt in batch.prompts() {
        // None for a worker that has left.
        let Some(number) = number_of(prompt.worker) else {
            continue;
        };
        if prompt.is_unconfirmed {
            message.unconfirmed.push(wire::UnconfirmedPrompt {
                number,
                prefixes: prompt.paths.to_vec(),
            });
        } else {
            message.prompts.push(wire::RoutedPrompt {
                number,
                parent: prompt.parent.map(|parent| parent.0),
                blocks: prompt.paths.to_vec(),
                tokens: prompt.tokens.to_vec(),
                retracted: prompt.retracted,
            });
        }
    }
}

#[cfg(test)]
mod tests;
