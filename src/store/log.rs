//! The event log of a background response: appended in order, read from a number on, bounded in bytes.

use std::collections::VecDeque;

use bytes::Bytes;

use super::record::{EventBatch, WriteOutcome};
use super::status::Status;

/// The outcome of reading a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoggedEvents {
    pub status: Status,
    /// The fencing number of the run that may write to the log now.
    pub fencing_number: u64,
    /// In order. The first batch may contain events from before the requested number.
    pub batches: Vec<EventBatch>,
    /// The number of the last event of the log, which may lie after these batches.
    pub last: Option<u64>,
    pub log: LogState,
}

impl LoggedEvents {
    /// What readers get.
    #[must_use]
    pub fn without_tokens(mut self) -> Self {
        for batch in &mut self.batches {
            batch.tokens = Bytes::new();
        }
        self
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogState {
    /// Every event after the requested number can be read.
    Whole,
    /// The response has ended, and its log has expired or lost the events that follow the requested number. This delta
    /// table and the final output reproduce the events.
    Expired(Bytes),
    /// The log exceeded its maximum size and has dropped the events that follow the requested number; only the status
    /// can be read.
    Overflowed,
}

/// A log in memory.
#[derive(Clone, Debug, Default)]
pub struct Log {
    batches: VecDeque<EventBatch>,
    pub last: Option<u64>,
    pub bytes: u64,
    pub overflowed: bool,
}

impl Log {
    /// Appends if `batch` starts where the log ends. A log that would exceed `bytes_max` drops its oldest events.
    pub fn append(&mut self, batch: &EventBatch, bytes_max: u64) -> WriteOutcome {
        if let Some(mismatch) = self.mismatch(batch) {
            return mismatch;
        }
        self.last = Some(batch.last);
        self.bytes += batch.size();
        self.batches.push_back(batch.clone());
        while self.bytes > bytes_max
            && let Some(dropped) = self.batches.pop_front()
        {
            self.bytes -= dropped.size();
            self.overflowed = true;
        }
        if self.overflowed {
            WriteOutcome::Overflow
        } else {
            WriteOutcome::Done
        }
    }

    /// Why `batch` cannot be appended: it does not start where the log ends.
    pub fn mismatch(&self, batch: &EventBatch) -> Option<WriteOutcome> {
        let next = self.last.map_or(0, |last| last + 1);
        if batch.first == next && batch.last >= batch.first {
            return None;
        }
        Some(match self.last {
            Some(last) if batch.last <= last => WriteOutcome::Duplicate { last },
            last => WriteOutcome::Gap { last },
        })
    }

    /// Whether all events after this number are here.
    pub fn follows(&self, after: Option<u64>) -> bool {
        let wanted = after.map_or(0, |after| after.saturating_add(1));
        let first = self.batches.front().map(|batch| batch.first);
        self.last.is_none() || first.is_some_and(|first| first <= wanted)
    }

    /// Returns the batches with events after `after`, up to about `bytes_max`, but at least one.
    pub fn read(&self, after: Option<u64>, bytes_max: u64) -> Vec<EventBatch> {
        let from = match after {
            None => 0,
            Some(after) => self.batches.partition_point(|batch| batch.last <= after),
        };
        let mut bytes = 0;
        let fits = |batch: &&EventBatch| {
            let begins = bytes == 0;
            bytes += batch.size().max(1);
            begins || bytes <= bytes_max
        };
        self.batches
            .iter()
            .skip(from)
            .take_while(fits)
            .cloned()
            .collect()
    }

    /// Memory used: event bytes and overhead.
    pub fn cost(&self) -> u64 {
        const BATCH: usize = size_of::<EventBatch>() + 24;
        self.bytes + (self.batches.capacity() * BATCH) as u64
    }

    /// Drops the events and keeps their count.
    pub fn forget(&mut self) {
        self.batches = VecDeque::new();
        self.bytes = 0;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn batch(first: u64, last: u64, bytes: usize) -> EventBatch {
        EventBatch::new(first, last, vec![b'x'; bytes])
    }

    #[test]
    fn an_append_must_start_where_the_log_ends() {
        let mut log = Log::default();
        assert_eq!(
            log.append(&batch(1, 1, 1), 99),
            WriteOutcome::Gap { last: None }
        );
        assert_eq!(log.append(&batch(0, 2, 1), 99), WriteOutcome::Done);
        assert_eq!(
            log.append(&batch(1, 2, 1), 99),
            WriteOutcome::Duplicate { last: 2 }
        );
        assert_eq!(
            log.append(&batch(2, 3, 1), 99),
            WriteOutcome::Gap { last: Some(2) }
        );
        assert_eq!(log.append(&batch(3, 3, 1), 99), WriteOutcome::Done);
        assert_eq!(log.last, Some(3));
    }

    #[test]
    fn a_full_log_drops_its_oldest_events() {
        let mut log = Log::default();
        assert_eq!(log.append(&batch(0, 0, 6), 10), WriteOutcome::Done);
        assert!(log.follows(None));
        assert_eq!(log.append(&batch(1, 1, 6), 10), WriteOutcome::Overflow);
        assert_eq!(log.append(&batch(2, 2, 1), 10), WriteOutcome::Overflow);
        assert_eq!((log.last, log.bytes, log.overflowed), (Some(2), 7, true));
        assert!(!log.follows(None) && log.follows(Some(0)));
        assert_eq!(log.read(Some(0), 99), [batch(1, 1, 6), batch(2, 2, 1)]);
        // Larger than the log may be.
        assert_eq!(log.append(&batch(3, 3, 11), 10), WriteOutcome::Overflow);
        assert_eq!((log.last, log.bytes), (Some(3), 0));
        assert!(!log.follows(Some(2)) && !log.follows(Some(3)));
    }

    #[test]
    fn a_read_returns_at_least_one_batch_and_about_the_requested_bytes() {
        let mut log = Log::default();
        for number in 0..9 {
            let _ = log.append(&batch(number, number, 4), 99);
        }
        assert_eq!(log.read(None, 1).len(), 1);
        assert_eq!(log.read(None, 8).len(), 2);
        assert_eq!(log.read(Some(6), 99).len(), 2);
        assert_eq!(log.read(Some(8), 99), []);
    }

    proptest! {
        #[test]
        fn a_read_returns_every_event_after_the_number(
            sizes in proptest::collection::vec(1..5u64, 0..40),
            after in proptest::option::of(0..100u64),
        ) {
            let mut log = Log::default();
            let mut next = 0;
            for size in sizes {
                prop_assert_eq!(log.append(&batch(next, next + size - 1, 1), 1_000), WriteOutcome::Done);
                next += size;
            }
            let read = log.read(after, u64::MAX);
            let seen: Vec<u64> = read.iter().flat_map(|batch| batch.first..=batch.last).collect();
            let expected: Vec<u64> = (after.map_or(0, |after| after + 1)..next).collect();
            prop_assert!(seen.ends_with(&expected));
            // Only the first batch may contain earlier events.
            prop_assert!(read.len() < 2 || read[1].first > after.unwrap_or(0));
        }
    }
}
