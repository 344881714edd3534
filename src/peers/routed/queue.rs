//! The queue of routed prompts for the next report. Pure.

use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use parking_lot::Mutex;

use crate::ids::{Block, BlockHash, WorkerId};
use crate::kv::unconfirmed::PrefixKeys;

/// Parts of the queue with a lock each; a worker's prompts are in one of them, in the order of their choice.
const SHARDS: usize = 8;

#[derive(Debug)]
pub(super) struct Queue {
    shards: [Mutex<Batch>; SHARDS],
    /// Blocks and prompts of a shard.
    max_shard: usize,
    has_queued: AtomicBool,
}

/// Prompts, in flat lists so that none of them needs an allocation of its own.
#[derive(Debug, Default)]
pub(super) struct Batch {
    headers: Vec<Header>,
    paths: Vec<u64>,
    /// Of all paths but those of unconfirmed prompts.
    tokens: Vec<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Header {
    worker: WorkerId,
    parent: Option<BlockHash>,
    len: u32,
    retracted: u32,
    is_unconfirmed: bool,
}

/// One prompt of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Queued<'a> {
    pub(super) worker: WorkerId,
    pub(super) parent: Option<BlockHash>,
    pub(super) paths: &'a [u64],
    pub(super) tokens: &'a [u32],
    pub(super) retracted: u32,
    pub(super) is_unconfirmed: bool,
}

impl Queue {
    pub(super) fn new(max_queued: usize) -> Self {
        Self {
            shards: Default::default(),
            max_shard: (max_queued / SHARDS).max(1),
            has_queued: AtomicBool::new(false),
        }
    }

    /// Queues the blocks in `news`. False if there is no room.
    pub(super) fn push(&self, worker: WorkerId, prompt: &[Block], news: Range<usize>) -> bool {
        let before = news.start.checked_sub(1).map(|before| prompt[before]);
        let header = Header {
            worker,
            parent: before.map(|before| before.path),
            len: news.len() as u32,
            retracted: 0,
            is_unconfirmed: false,
        };
        self.add(header, |batch| {
            let mut end = before.map_or(0, |before| before.end_tokens);
            for block in &prompt[news] {
                batch.paths.push(block.path.0);
                batch.tokens.push(block.end_tokens.saturating_sub(end));
                end = block.end_tokens;
            }
        })
    }

    /// Queues that the last `count` blocks of a prompt do not count. False if there is no room.
    pub(super) fn retract(&self, worker: WorkerId, prompt: &[Block], count: usize) -> bool {
        let header = Header {
            worker,
            parent: prompt.last().map(|last| last.path),
            len: 0,
            retracted: count as u32,
            is_unconfirmed: false,
        };
        self.add(header, |_| ())
    }

    /// Queues the prefixes of a prompt. False if there is no room.
    pub(super) fn push_unconfirmed(&self, worker: WorkerId, keys: &PrefixKeys) -> bool {
        let header = Header {
            worker,
            parent: None,
            len: keys.len() as u32,
            retracted: 0,
            is_unconfirmed: true,
        };
        self.add(header, |batch| {
            batch.paths.extend(keys.iter().map(|key| key.path.0));
        })
    }

    /// Whether there is something to take.
    pub(super) fn has_queued(&self) -> bool {
        self.has_queued.load(Relaxed)
    }

    pub(super) fn take(&self) -> impl Iterator<Item = Batch> {
        self.has_queued.store(false, Relaxed);
        let shards = self.shards.iter();
        shards
            .map(|shard| std::mem::take(&mut *shard.lock()))
            .filter(|batch| !batch.headers.is_empty())
    }

    pub(super) fn clear(&self) {
        for shard in &self.shards {
            *shard.lock() = Batch::default();
        }
    }

    fn add(&self, header: Header, fill: impl FnOnce(&mut Batch)) -> bool {
        let batch = &mut *self.shards[header.worker.0 as usize % SHARDS].lock();
        let queued = batch.headers.len() + batch.paths.len();
        if queued + header.len as usize >= self.max_shard {
            return false;
        }
        batch.headers.push(header);
        fill(batch);
        // Only the first request since the last message writes what all threads read.
        if !self.has_queued() {
            self.has_queued.store(true, Relaxed);
        }
        true
    }
}

impl Batch {
    pub(super) fn prompts(&self) -> impl Iterator<Item = Queued<'_>> {
        let (mut paths, mut tokens) = (&self.paths[..], &self.tokens[..]);
        self.headers.iter().map(move |header| {
            let len = header.len as usize;
            let (its_paths, other_paths) = paths.split_at(len);
            let counted = if header.is_unconfirmed { 0 } else { len };
            let (its_tokens, other_tokens) = tokens.split_at(counted);
            (paths, tokens) = (other_paths, other_tokens);
            Queued {
                worker: header.worker,
                parent: header.parent,
                paths: its_paths,
                tokens: its_tokens,
                retracted: header.retracted,
                is_unconfirmed: header.is_unconfirmed,
            }
        })
    }
}
