//! A background response's events: appended in order, read after a number, bounded in bytes.

use std::collections::VecDeque;

use bytes::Bytes;

/// Consecutive events, encoded by whoever appends them. The store knows their numbers alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// The numbers of the first and the last event. The first event of a response is 0.
    pub first: u64,
    pub last: u64,
    pub bytes: Bytes,
}

/// What can be read of a response's events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Events {
    pub status: super::Status,
    /// In order. The first may hold events from before the number asked for.
    pub batches: Vec<Batch>,
    /// The number of the last event of all, which may lie beyond these batches.
    pub last: Option<u64>,
    /// What became of the log.
    pub kept: Kept,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kept {
    /// Every event from 0 on can be read.
    Whole,
    /// The log is gone after the response's end; its cut table tells the events again.
    Sealed(Bytes),
    /// The log was full: events are missing, and only the status tells the end.
    Overflowed,
}

/// What an append came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Append {
    Done,
    Duplicate { last: u64 },
    Gap { last: Option<u64> },
    Overflow,
}

/// The log itself, for a store that has nothing better.
#[derive(Clone, Debug, Default)]
pub struct Log {
    batches: VecDeque<Batch>,
    last: Option<u64>,
    bytes: u64,
    overflowed: bool,
}

impl Log {
    /// Appends if `batch` begins where the log ends. Once more than `bytes_max` would be kept, what is
    /// kept is dropped and only the numbers go on.
    pub fn append(&mut self, batch: &Batch, bytes_max: u64) -> Append {
        let next = self.last.map_or(0, |last| last + 1);
        if batch.first != next || batch.last < batch.first {
            return match self.last {
                Some(last) if batch.last <= last => Append::Duplicate { last },
                last => Append::Gap { last },
            };
        }
        self.last = Some(batch.last);
        let bytes = self.bytes + batch.bytes.len() as u64;
        if self.overflowed || bytes > bytes_max {
            self.forget();
            self.overflowed = true;
            return Append::Overflow;
        }
        self.bytes = bytes;
        self.batches.push_back(batch.clone());
        Append::Done
    }

    /// The batches with events beyond `after`, up to about `bytes_max`, at least one.
    pub fn read(&self, after: Option<u64>, bytes_max: u64) -> Vec<Batch> {
        let from = match after {
            None => 0,
            Some(after) => self.batches.partition_point(|batch| batch.last <= after),
        };
        let mut bytes = 0;
        let fits = |batch: &&Batch| {
            let begins = bytes == 0;
            bytes += (batch.bytes.len() as u64).max(1);
            begins || bytes <= bytes_max
        };
        self.batches
            .iter()
            .skip(from)
            .take_while(fits)
            .cloned()
            .collect()
    }

    pub fn last(&self) -> Option<u64> {
        self.last
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn has_overflowed(&self) -> bool {
        self.overflowed
    }

    /// Drops the events, but for their numbers.
    pub fn forget(&mut self) {
        self.batches = VecDeque::new();
        self.bytes = 0;
    }
}
