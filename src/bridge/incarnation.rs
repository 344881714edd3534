//! One engine incarnation of one rank: the batches of one engine process, without gaps. Numbers the
//! batches, keeps the last ones, and makes snapshots for subscribers that join late.
//!
//! Sequence numbers are the bridge's own. Those of each incarnation are above all earlier ones (they start
//! at the time in microseconds), so a request to resume after a number of another incarnation is refused
//! by the number alone, even from a client that ignores incarnation ids.

use std::ops::RangeInclusive;
use std::sync::{Arc, Weak};

use bytes::Bytes;

use super::cached_blocks::CachedBlocks;
use super::history::History;
use super::snapshot::{Snapshot, SnapshotJob};
use crate::http::grpc::frame;
use crate::kv::event::{Batch, Event, is_own_cache};
use crate::kv::protobuf::{Encoded, LeftOut, encode_batch};

/// A snapshot is reused, followed by the batches since, until there are this many of them.
const MAX_BATCHES_SINCE_SNAPSHOT: u64 = 256;
/// Snapshots of one incarnation in memory, the one being made included: one that slow subscribers still
/// read, and a newer one. Each may take as much memory as all cached blocks.
const MAX_SNAPSHOTS: usize = 2;

/// Bounds of one rank's memory: batches for resuming subscribers, in number and bytes, and bytes of cached blocks.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub history_batches: usize,
    pub history_bytes: usize,
    pub state_bytes: usize,
}

#[derive(Debug)]
pub struct Incarnation {
    rank: u32,
    id: String,
    /// Number of batches that the bridge missed before the first one that it received.
    unknown_before: u64,
    history: History,
    /// `None` while a [`SnapshotJob`] has it.
    blocks: Option<CachedBlocks>,
    /// Batches to apply to `blocks` once the job returns it.
    backlog: Vec<PendingBatch>,
    /// Blocks in `blocks`, their bytes, and blocks missing there for want of memory; also valid while a
    /// [`SnapshotJob`] has `blocks`.
    block_sizes: [usize; 3],
    /// The last batch. It is not yet applied to `blocks`, so every snapshot is followed by at least one batch. A
    /// subscriber needs such a batch to verify later, by asking for it again, that the process is the same.
    last: Option<PendingBatch>,
    snapshot: Option<Snapshot>,
    /// The parts of all snapshots that a subscriber may still be reading, to count them.
    alive: Vec<Weak<[Bytes]>>,
    /// Sequence numbers of snapshot parts, except of each last part. They are also numbers of batches: a subscriber
    /// that names one may have received only that part, so it cannot resume there.
    ambiguous: Vec<RangeInclusive<u64>>,
}

/// A batch that is not applied to the blocks yet.
#[derive(Debug)]
struct PendingBatch {
    batch: Batch,
    /// Its events that subscribers do not get.
    left_out: Vec<Event>,
}

impl PendingBatch {
    fn new(mut batch: Batch, left_out: &[LeftOut]) -> Self {
        let mut removed = Vec::with_capacity(left_out.len());
        for event in left_out.iter().rev() {
            removed.push(batch.events.remove(event.index));
        }
        Self {
            batch,
            left_out: removed,
        }
    }
}

/// What a new subscriber is sent: first the snapshot's parts, then the batches from `next` on.
#[derive(Clone, Debug)]
pub struct Start {
    pub parts: Arc<[Bytes]>,
    pub next: u64,
}

/// How a subscriber can begin.
#[derive(Debug)]
pub enum SubscribeOutcome {
    Now(Start),
    /// The caller must make a snapshot and then try again.
    MakeSnapshot(Box<SnapshotJob>),
    /// Another caller is making a snapshot; try again when it is finished.
    Wait,
    /// Too many snapshots are still being read, or the history has already moved past a new one.
    Busy,
}

/// The requested batch is no longer in the history, or never was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone {
    /// The lowest number after which a subscriber can resume.
    pub oldest: u64,
}

impl Incarnation {
    /// `number` must be above all sequence numbers of earlier incarnations.
    pub fn new(rank: u32, id: String, number: u64, unknown_before: u64, limits: Limits) -> Self {
        Self {
            rank,
            id,
            unknown_before,
            history: History::new(number + 1, limits.history_batches, limits.history_bytes),
            blocks: Some(CachedBlocks::new(limits.state_bytes)),
            backlog: Vec::new(),
            block_sizes: [0; 3],
            last: None,
            snapshot: None,
            alive: Vec::new(),
            ambiguous: Vec::new(),
        }
    }

    pub fn id(&self) -> &str {
        &self.id
    }

    pub fn unknown_before(&self) -> u64 {
        self.unknown_before
    }

    pub fn history(&self) -> &History {
        &self.history
    }

    /// Known blocks, their bytes, and blocks missing for want of memory.
    pub fn block_sizes(&self) -> [usize; 3] {
        self.block_sizes
    }

    /// The last batch's sequence number; before the first batch, the number before it.
    pub fn number(&self) -> u64 {
        self.history.next() - 1
    }

    /// Appends the engine's next batch. Returns the events that have no gRPC message, which are left out.
    pub fn push(&mut self, mut batch: Batch) -> Result<Vec<LeftOut>, String> {
        // The bridge's own rank number; a single-rank engine may call itself any rank of a larger group.
        batch.rank = Some(self.rank);
        let Encoded { message, left_out } = encode_batch(self.history.next(), &batch, None)?;
        self.history.push(frame(&message));
        let batch = PendingBatch::new(batch, &left_out);
        if let Some(before) = self.last.replace(batch) {
            self.backlog.push(before);
            self.apply_backlog();
        }
        let can_continue = |snapshot: &Snapshot| self.history.first() <= snapshot.number + 1;
        if !self.snapshot.as_ref().is_some_and(can_continue) {
            self.snapshot = None;
        }
        let oldest = self.history.first() - 1;
        self.ambiguous.retain(|numbers| *numbers.end() >= oldest);
        Ok(left_out)
    }

    fn apply_backlog(&mut self) {
        let Some(blocks) = &mut self.blocks else {
            return;
        };
        for pending in self.backlog.drain(..) {
            for event in &pending.batch.events {
                blocks.apply(event);
                // Whatever was missed before is not cached any more.
                if let Event::Cleared { ownership } = event
                    && is_own_cache(ownership.as_deref())
                {
                    self.unknown_before = 0;
                }
            }
            // After a clear of the same batch, which comes before what is stored then.
            for event in &pending.left_out {
                blocks.leave_out(event);
            }
        }
        let missing = usize::try_from(blocks.missing()).unwrap_or(usize::MAX);
        self.block_sizes = [blocks.blocks(), blocks.bytes(), missing];
    }

    /// How a subscriber begins that has all batches up to `after` (0: it has none). `has_waited`: it has waited for a
    /// snapshot to be finished, so it takes that one even if it is no longer fresh.
    pub fn subscribe(&mut self, after: u64, has_waited: bool) -> Result<SubscribeOutcome, Gone> {
        if after == 0 {
            return Ok(self.subscribe_with_snapshot(has_waited));
        }
        let oldest = self.history.first() - 1;
        let is_ambiguous = self
            .ambiguous
            .iter()
            .any(|numbers| numbers.contains(&after));
        if (oldest..=self.number()).contains(&after) && !is_ambiguous {
            let parts = Arc::default();
            let next = after + 1;
            Ok(SubscribeOutcome::Now(Start { parts, next }))
        } else {
            Err(Gone { oldest })
        }
    }

    fn subscribe_with_snapshot(&mut self, has_waited: bool) -> SubscribeOutcome {
        let number = self.number() - u64::from(self.last.is_some());
        if let Some(snapshot) = &mut self.snapshot {
            let since = number - snapshot.number;
            let is_fresh = since == 0
                || since <= MAX_BATCHES_SINCE_SNAPSHOT && self.history.bytes() <= snapshot.bytes;
            if is_fresh || has_waited || !snapshot.was_used {
                snapshot.was_used = true;
                return SubscribeOutcome::Now(start(snapshot));
            }
        }
        if has_waited {
            return SubscribeOutcome::Busy;
        }
        let Some(blocks) = self.blocks.take() else {
            return SubscribeOutcome::Wait;
        };
        self.alive.retain(|parts| parts.strong_count() > 0);
        let is_read = |snapshot: &Snapshot| Arc::strong_count(&snapshot.parts) > 1;
        let is_kept = self
            .snapshot
            .as_ref()
            .is_some_and(|snapshot| !is_read(snapshot));
        if self.alive.len() - usize::from(is_kept) >= MAX_SNAPSHOTS {
            self.blocks = Some(blocks);
            return match &self.snapshot {
                Some(snapshot) => SubscribeOutcome::Now(start(snapshot)),
                None => SubscribeOutcome::Busy,
            };
        }
        self.snapshot = None;
        SubscribeOutcome::MakeSnapshot(Box::new(SnapshotJob {
            incarnation: self.id.clone(),
            blocks,
            number,
            rank: self.rank,
            unknown_before: self.unknown_before,
            timestamp: self.last.as_ref().map_or(0.0, |last| last.batch.timestamp),
        }))
    }

    /// Takes what a [`SnapshotJob`] made: the blocks back, and the snapshot for later subscribers.
    pub(super) fn snapshot_finished(&mut self, (blocks, snapshot): (CachedBlocks, Snapshot)) {
        self.blocks = Some(blocks);
        self.apply_backlog();
        let (number, parts) = (snapshot.number, snapshot.parts.len() as u64);
        // If the batch after the snapshot is no longer in the history, no subscriber could continue from it.
        if self.history.first() <= number + 1 {
            if parts > 1 {
                self.ambiguous.push(number + 1 - parts..=number - 1);
            }
            self.alive.push(Arc::downgrade(&snapshot.parts));
            self.snapshot = Some(snapshot);
        }
    }
}

fn start(snapshot: &Snapshot) -> Start {
    Start {
        parts: snapshot.parts.clone(),
        next: snapshot.number + 1,
    }
}

#[cfg(test)]
mod tests;
