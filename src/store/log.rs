//! A background response's events: appended in order, read after a number, bounded in bytes.

use std::collections::VecDeque;

use bytes::Bytes;

/// Consecutive events, encoded by whoever appends them. The store knows their numbers alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventBatch {
    /// The numbers of the first and the last event. The first event of a response is 0.
    pub first: u64,
    pub last: u64,
    pub bytes: Bytes,
}

/// What can be read of a response's events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoggedEvents {
    pub status: super::Status,
    /// In order. The first may hold events from before the number asked for.
    pub batches: Vec<EventBatch>,
    /// The number of the last event of all, which may lie beyond these batches.
    pub last: Option<u64>,
    /// What became of the log.
    pub log: LogState,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogState {
    /// Every event from 0 on can be read.
    Whole,
    /// The log is gone after the response's end; its cut table tells the events again.
    Expired(Bytes),
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
    batches: VecDeque<EventBatch>,
    last: Option<u64>,
    bytes: u64,
    overflowed: bool,
}

impl Log {
    /// Appends if `batch` begins where the log ends. Once more than `bytes_max` would be kept, what is
    /// kept is dropped and only the numbers go on.
    pub fn append(&mut self, batch: &EventBatch, bytes_max: u64) -> Append {
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
    pub fn read(&self, after: Option<u64>, bytes_max: u64) -> Vec<EventBatch> {
        let from = match after {
            None => 0,
            Some(after) => self.batches.partition_point(|batch| batch.last <= after),
        };
        let mut bytes = 0;
        let fits = |batch: &&EventBatch| {
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

    /// Its bytes with what keeping them costs.
    pub fn cost(&self) -> u64 {
        const BATCH: usize = size_of::<EventBatch>() + 24;
        self.bytes + (self.batches.capacity() * BATCH) as u64
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn batch(first: u64, last: u64, bytes: usize) -> EventBatch {
        EventBatch {
            first,
            last,
            bytes: vec![b'x'; bytes].into(),
        }
    }

    #[test]
    fn a_log_goes_on_where_it_ends() {
        let mut log = Log::default();
        assert_eq!(log.append(&batch(1, 1, 1), 99), Append::Gap { last: None });
        assert_eq!(log.append(&batch(0, 2, 1), 99), Append::Done);
        assert_eq!(
            log.append(&batch(1, 2, 1), 99),
            Append::Duplicate { last: 2 }
        );
        assert_eq!(
            log.append(&batch(2, 3, 1), 99),
            Append::Gap { last: Some(2) }
        );
        assert_eq!(log.append(&batch(3, 3, 1), 99), Append::Done);
        assert_eq!(log.last(), Some(3));
    }

    #[test]
    fn a_full_log_keeps_its_numbers_alone() {
        let mut log = Log::default();
        assert_eq!(log.append(&batch(0, 0, 6), 10), Append::Done);
        assert_eq!(log.append(&batch(1, 1, 6), 10), Append::Overflow);
        assert_eq!(log.append(&batch(2, 2, 1), 10), Append::Overflow);
        assert_eq!(
            (log.last(), log.bytes(), log.has_overflowed()),
            (Some(2), 0, true)
        );
    }

    #[test]
    fn a_read_gives_at_least_one_batch_and_not_many_more_bytes_than_asked() {
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
        fn what_is_read_after_a_number_is_every_event_beyond_it(
            sizes in proptest::collection::vec(1..5u64, 0..40),
            after in proptest::option::of(0..100u64),
        ) {
            let mut log = Log::default();
            let mut next = 0;
            for size in sizes {
                prop_assert_eq!(log.append(&batch(next, next + size - 1, 1), 1_000), Append::Done);
                next += size;
            }
            let read = log.read(after, u64::MAX);
            let seen: Vec<u64> = read.iter().flat_map(|batch| batch.first..=batch.last).collect();
            let expected: Vec<u64> = (after.map_or(0, |after| after + 1)..next).collect();
            prop_assert!(seen.ends_with(&expected));
            // Only its first batch may reach back.
            prop_assert!(read.len() < 2 || read[1].first > after.unwrap_or(0));
        }
    }
}
