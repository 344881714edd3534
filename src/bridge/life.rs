//! One life of one rank: an engine's process, as far as its batches are known without a hole. Numbers
//! its batches, keeps the last ones, and makes the snapshots for those who come late.
//!
//! Numbers are the bridge's own. Each life's are above all that were ever given before (they begin with
//! the time), so a subscriber that asks to go on from a number of another life is refused by the number
//! alone, even one that does not know of epochs.

use std::ops::RangeInclusive;
use std::sync::Arc;

use bytes::Bytes;

use super::held::Held;
use super::history::History;
use crate::http::grpc::frame;
use crate::kv::event::Batch;
use crate::kv::protobuf::Untranslatable;
use crate::kv::protobuf::encode_batch;
use crate::kv::source::Chunk;

/// Bytes of events in one part of a snapshot: readers commonly refuse messages above 4 MiB.
const PART_BYTES: usize = 1 << 20;
/// A snapshot is sent again, followed by the batches since, until those are so many.
const SNAPSHOT_BATCHES_MAX: u64 = 256;

/// How much is kept.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub history_batches: usize,
    pub history_bytes: usize,
    pub state_bytes: usize,
}

#[derive(Debug)]
pub struct Life {
    rank: u32,
    epoch: String,
    /// Batches before the first that is known.
    unknown_before: u64,
    history: History,
    held: Held,
    /// The last batch, which `held` does not have yet. So every snapshot is followed by a batch, and
    /// its reader has one to prove with whom it talks to.
    last: Option<Batch>,
    snapshot: Option<Snapshot>,
    /// Numbers that snapshots' parts have, but for the last ones. Whoever has all up to one of them may
    /// have a batch, or only a part.
    ambiguous: Vec<RangeInclusive<u64>>,
}

/// What is held after a batch, ready to be sent.
#[derive(Clone, Debug)]
struct Snapshot {
    /// The number of that batch.
    number: u64,
    parts: Arc<[Bytes]>,
    bytes: usize,
}

/// What a new subscriber is sent: first the parts, then the batches from `next` on.
#[derive(Clone, Debug)]
pub struct Start {
    pub parts: Arc<[Bytes]>,
    pub next: u64,
}

/// The number is not one that can be continued from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone {
    /// The least number that can.
    pub oldest: u64,
}

impl Life {
    /// `number`: above all that were given before.
    pub fn new(rank: u32, epoch: String, number: u64, unknown_before: u64, limits: Limits) -> Self {
        Self {
            rank,
            epoch,
            unknown_before,
            history: History::new(number + 1, limits.history_batches, limits.history_bytes),
            held: Held::new(limits.state_bytes),
            last: None,
            snapshot: None,
            ambiguous: Vec::new(),
        }
    }

    pub fn epoch(&self) -> &str {
        &self.epoch
    }

    pub fn unknown_before(&self) -> u64 {
        self.unknown_before
    }

    pub fn history(&self) -> &History {
        &self.history
    }

    pub fn held(&self) -> &Held {
        &self.held
    }

    /// The number of the last batch, or of the beginning.
    pub fn number(&self) -> u64 {
        self.history.next() - 1
    }

    /// Takes the engine's next batch.
    pub fn push(&mut self, mut batch: Batch) -> Result<(), Untranslatable> {
        // As the bridge counts its ranks; an engine on its own may be any rank of something larger.
        batch.rank = Some(self.rank);
        let message = encode_batch(self.history.next(), &batch, None)?;
        self.history.push(frame(&message));
        if let Some(before) = self.last.replace(batch) {
            for event in &before.events {
                self.held.apply(event);
            }
        }
        let is_of_use = |snapshot: &Snapshot| self.history.first() <= snapshot.number + 1;
        if !self.snapshot.as_ref().is_some_and(is_of_use) {
            self.snapshot = None;
        }
        let oldest = self.history.first() - 1;
        self.ambiguous.retain(|numbers| *numbers.end() >= oldest);
        Ok(())
    }

    /// Where a subscriber begins that has all up to batch `after`; 0: nothing.
    pub fn start(&mut self, after: u64) -> Result<Start, Gone> {
        if after == 0 {
            let snapshot = self.snapshot();
            return Ok(Start {
                parts: snapshot.parts,
                next: snapshot.number + 1,
            });
        }
        let oldest = self.history.first() - 1;
        let is_ambiguous = self
            .ambiguous
            .iter()
            .any(|numbers| numbers.contains(&after));
        if (oldest..=self.number()).contains(&after) && !is_ambiguous {
            let parts = Arc::default();
            let next = after + 1;
            Ok(Start { parts, next })
        } else {
            Err(Gone { oldest })
        }
    }

    fn snapshot(&mut self) -> Snapshot {
        let at = self.number() - u64::from(self.last.is_some());
        if let Some(snapshot) = &self.snapshot {
            let since = at - snapshot.number;
            let is_fresh = since == 0
                || since <= SNAPSHOT_BATCHES_MAX && self.history.bytes() <= snapshot.bytes;
            if is_fresh {
                return snapshot.clone();
            }
        }
        let snapshot = self.take_snapshot(at);
        let parts = snapshot.parts.len() as u64;
        if parts > 1 {
            self.ambiguous.push(at + 1 - parts..=at - 1);
        }
        self.snapshot = Some(snapshot.clone());
        snapshot
    }

    fn take_snapshot(&self, number: u64) -> Snapshot {
        let events = self.held.list(PART_BYTES);
        let count = u32::try_from(events.len()).expect("parts of a megabyte each");
        // Not all that is held is listed: the reader has to know that it is so, not how much.
        let unknown_before = self.unknown_before.max(u64::from(self.held.left_out() > 0));
        let blocks = self.held.blocks() as u64;
        let numbers = number - u64::from(count) + 1..;
        let parts = (0..).zip(numbers).zip(events);
        let parts = parts.map(|((index, number), events)| {
            let chunk = Chunk {
                index,
                count,
                unknown_before,
            };
            let batch = Batch {
                timestamp: self.last.as_ref().map_or(0.0, |last| last.timestamp),
                rank: Some(self.rank),
                events,
            };
            let message = encode_batch(number, &batch, Some((chunk, blocks)));
            frame(&message.expect("what is held was encoded before"))
        });
        let parts: Arc<[Bytes]> = parts.collect();
        Snapshot {
            number,
            bytes: parts.iter().map(Bytes::len).sum(),
            parts,
        }
    }
}

#[cfg(test)]
mod tests;
