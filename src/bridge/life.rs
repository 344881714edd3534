//! One life of one rank: an engine's process, as far as its batches are known without a hole. Numbers
//! its batches, keeps the last ones, and makes the snapshots for those who come late.
//!
//! Numbers are the bridge's own. Each life's are above all that were ever given before (they begin with
//! the time), so a subscriber that asks to go on from a number of another life is refused by the number
//! alone, even one that does not know of epochs.

use std::ops::RangeInclusive;
use std::sync::{Arc, Weak};

use bytes::Bytes;

use super::held::Held;
use super::history::History;
use crate::http::grpc::frame;
use crate::kv::event::Batch;
use crate::kv::protobuf::{Untranslatable, encode_batch};
use crate::kv::source::Chunk;

/// Bytes of events in one part of a snapshot: readers commonly refuse messages above 4 MiB.
const PART_BYTES: usize = 1 << 20;
/// A snapshot is sent again, followed by the batches since, until those are so many.
const SNAPSHOT_BATCHES_MAX: u64 = 256;
/// Snapshots of one life that are in memory, the one being made included: one that the slowest are
/// still reading, and a newer one. Each may take as much as all that is held.
const SNAPSHOTS_MAX: usize = 2;

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
    /// Away while it is listed.
    held: Option<Held>,
    /// Batches that wait for it meanwhile; no more than come while one list is made.
    backlog: Vec<Batch>,
    /// Its blocks, bytes and blocks left out, as last known.
    held_sizes: [usize; 3],
    /// The last batch, which `held` does not have yet. So every snapshot is followed by a batch, and
    /// its reader has one to prove with whom it talks to.
    last: Option<Batch>,
    snapshot: Option<Snapshot>,
    /// All that anyone still reads.
    alive: Vec<Weak<[Bytes]>>,
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
    /// Whoever it was made for may have given up waiting and come again.
    was_given: bool,
}

/// What a new subscriber is sent: first the parts, then the batches from `next` on.
#[derive(Clone, Debug)]
pub struct Start {
    pub parts: Arc<[Bytes]>,
    pub next: u64,
}

/// How a subscriber can begin.
#[derive(Debug)]
pub enum Joining {
    Now(Start),
    /// When a list was made: by the one who is told this, without the life.
    List(Listing),
    /// When someone else has made one.
    Wait,
    /// Not now: others still read as many lists as there may be, or one that took long to make was
    /// overtaken by the history.
    Busy,
}

/// What is held, away from its life so that this goes on meanwhile: a million blocks of 16 tokens are
/// 58 MB, and take 9 s in an unoptimised build, of which the life is kept for 14 us.
#[derive(Debug)]
pub struct Listing {
    epoch: String,
    held: Held,
    number: u64,
    rank: u32,
    unknown_before: u64,
    timestamp: f64,
}

/// The same, with the list made.
#[derive(Debug)]
pub struct Listed {
    held: Held,
    snapshot: Snapshot,
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
            held: Some(Held::new(limits.state_bytes)),
            backlog: Vec::new(),
            held_sizes: [0; 3],
            last: None,
            snapshot: None,
            alive: Vec::new(),
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

    /// Blocks held, their bytes, and blocks left out.
    pub fn held_sizes(&self) -> [usize; 3] {
        self.held_sizes
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
            self.backlog.push(before);
            self.apply_backlog();
        }
        let is_of_use = |snapshot: &Snapshot| self.history.first() <= snapshot.number + 1;
        if !self.snapshot.as_ref().is_some_and(is_of_use) {
            self.snapshot = None;
        }
        let oldest = self.history.first() - 1;
        self.ambiguous.retain(|numbers| *numbers.end() >= oldest);
        Ok(())
    }

    fn apply_backlog(&mut self) {
        let Some(held) = &mut self.held else { return };
        for batch in self.backlog.drain(..) {
            for event in &batch.events {
                held.apply(event);
            }
        }
        let left_out = usize::try_from(held.left_out()).unwrap_or(usize::MAX);
        self.held_sizes = [held.blocks(), held.bytes(), left_out];
    }

    /// Where a subscriber begins that has all up to batch `after`; 0: nothing. `has_waited`: a list was
    /// made since it came.
    pub fn join(&mut self, after: u64, has_waited: bool) -> Result<Joining, Gone> {
        if after == 0 {
            return Ok(self.join_by_list(has_waited));
        }
        let oldest = self.history.first() - 1;
        let is_ambiguous = self
            .ambiguous
            .iter()
            .any(|numbers| numbers.contains(&after));
        if (oldest..=self.number()).contains(&after) && !is_ambiguous {
            let parts = Arc::default();
            let next = after + 1;
            Ok(Joining::Now(Start { parts, next }))
        } else {
            Err(Gone { oldest })
        }
    }

    fn join_by_list(&mut self, has_waited: bool) -> Joining {
        let at = self.number() - u64::from(self.last.is_some());
        if let Some(snapshot) = &mut self.snapshot {
            let since = at - snapshot.number;
            let is_fresh = since == 0
                || since <= SNAPSHOT_BATCHES_MAX && self.history.bytes() <= snapshot.bytes;
            if is_fresh || has_waited || !snapshot.was_given {
                snapshot.was_given = true;
                return Joining::Now(snapshot.start());
            }
        }
        if has_waited {
            return Joining::Busy;
        }
        let Some(held) = self.held.take() else {
            return Joining::Wait;
        };
        self.alive.retain(|parts| parts.strong_count() > 0);
        let is_read = |snapshot: &Snapshot| Arc::strong_count(&snapshot.parts) > 1;
        let is_kept = self.snapshot.as_ref().is_some_and(|it| !is_read(it));
        if self.alive.len() - usize::from(is_kept) >= SNAPSHOTS_MAX {
            self.held = Some(held);
            return match &self.snapshot {
                Some(snapshot) => Joining::Now(snapshot.start()),
                None => Joining::Busy,
            };
        }
        self.snapshot = None;
        Joining::List(Listing {
            epoch: self.epoch.clone(),
            held,
            number: at,
            rank: self.rank,
            unknown_before: self.unknown_before,
            timestamp: self.last.as_ref().map_or(0.0, |last| last.timestamp),
        })
    }

    /// Takes back what was listed.
    pub fn listed(&mut self, listed: Listed) {
        let Listed { held, snapshot } = listed;
        self.held = Some(held);
        self.apply_backlog();
        let (number, parts) = (snapshot.number, snapshot.parts.len() as u64);
        // The history may be past it by now; then it is of no use to anyone.
        if self.history.first() <= number + 1 {
            if parts > 1 {
                self.ambiguous.push(number + 1 - parts..=number - 1);
            }
            self.alive.push(Arc::downgrade(&snapshot.parts));
            self.snapshot = Some(snapshot);
        }
    }
}

impl Snapshot {
    fn start(&self) -> Start {
        Start {
            parts: self.parts.clone(),
            next: self.number + 1,
        }
    }
}

impl Listing {
    /// Of the life that it is of.
    pub fn epoch(&self) -> &str {
        &self.epoch
    }

    pub fn make(self) -> Listed {
        let events = self.held.list(PART_BYTES);
        let count = u32::try_from(events.len()).expect("parts of a megabyte each");
        // Not all that is held is listed: the reader has to know that it is so, not how much.
        let unknown_before = self.unknown_before.max(u64::from(self.held.left_out() > 0));
        let blocks = self.held.blocks() as u64;
        let numbers = self.number - u64::from(count) + 1..;
        let parts = (0..).zip(numbers).zip(events);
        let parts = parts.map(|((index, number), events)| {
            let chunk = Chunk {
                index,
                count,
                unknown_before,
            };
            let batch = Batch {
                timestamp: self.timestamp,
                rank: Some(self.rank),
                events,
            };
            let message = encode_batch(number, &batch, Some((chunk, blocks)));
            frame(&message.expect("what is held was encoded before"))
        });
        let parts: Arc<[Bytes]> = parts.collect();
        let snapshot = Snapshot {
            number: self.number,
            bytes: parts.iter().map(Bytes::len).sum(),
            parts,
            was_given: false,
        };
        Listed {
            held: self.held,
            snapshot,
        }
    }
}

#[cfg(test)]
mod tests;
