//! The batches of KV events of one dp rank: their sequence numbers, the replay buffer, and what the faults do to
//! them. Pure.

use std::collections::VecDeque;
use std::num::NonZeroUsize;

use bytes::Bytes;

use crate::sim::fault::kv::KvFaults;

/// The payload of a garbled batch; no msgpack value starts with this byte.
const GARBLED: &[u8] = &[0xc1, 0xc1];

#[derive(Debug)]
pub(super) struct Log {
    next: u64,
    first: u64,
    /// The replay buffer.
    buffer: VecDeque<NumberedBatch>,
    max_buffered: NonZeroUsize,
    faults: KvFaults,
    /// The number of batches since the faults were set.
    count: u64,
    /// Batches to send after the next one.
    swapped: Vec<NumberedBatch>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NumberedBatch {
    pub(super) sequence: u64,
    pub(super) payload: Bytes,
}

/// What to do when a batch is published.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Publication {
    /// Disconnect all subscribers before sending.
    pub(super) cut: bool,
    pub(super) batches: Vec<NumberedBatch>,
}

/// The answer to one request for a replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Replayed {
    pub(super) batches: Vec<NumberedBatch>,
    /// Whether the end marker follows.
    pub(super) ends: bool,
}

impl Log {
    pub(super) fn new(first: u64, max_buffered: NonZeroUsize, faults: KvFaults) -> Self {
        Self {
            next: first,
            first,
            buffer: VecDeque::new(),
            max_buffered,
            faults,
            count: 0,
            swapped: Vec::new(),
        }
    }

    pub(super) fn publish(&mut self, payload: Bytes) -> Publication {
        self.count += 1;
        let fate = self.faults.fate(self.count);
        let payload = if fate.garbled {
            Bytes::from_static(GARBLED)
        } else {
            payload
        };
        let sequence = self.next;
        // Tests start near the largest number.
        self.next = self.next.wrapping_add(1);
        let batch = NumberedBatch { sequence, payload };
        if fate.replayable {
            if self.buffer.len() == self.max_buffered.get() {
                self.buffer.pop_front();
            }
            self.buffer.push_back(batch.clone());
        }
        let mut batches = vec![batch; fate.times];
        if fate.swapped {
            self.swapped.append(&mut batches);
        } else {
            batches.append(&mut self.swapped);
        }
        let cut = fate.cut;
        Publication { cut, batches }
    }

    /// The buffered batches from `first` on, or from the oldest one if `first` is no longer buffered.
    pub(super) fn replay(&self, first: u64) -> Replayed {
        let wanted = self.buffer.iter().filter(|batch| batch.sequence >= first);
        let replay = self.faults.replay(wanted.clone().count());
        let batches = wanted.enumerate();
        let batches = batches.filter(|(position, _)| replay.sends(*position));
        Replayed {
            batches: batches.map(|(_, batch)| batch.clone()).collect(),
            ends: replay.ends,
        }
    }

    pub(super) fn set_faults(&mut self, faults: KvFaults) {
        self.faults = faults;
        self.count = 0;
    }

    pub(super) fn last_sequence(&self) -> Option<u64> {
        (self.next != self.first).then(|| self.next.wrapping_sub(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(first: u64, max_buffered: usize, faults: KvFaults) -> Log {
        Log::new(first, NonZeroUsize::new(max_buffered).unwrap(), faults)
    }

    /// Publishes batches and returns their numbers in the order of sending.
    fn sent(log: &mut Log, batches: usize) -> Vec<u64> {
        let sending = (0..batches).flat_map(|_| log.publish(Bytes::new()).batches);
        sending.map(|batch| batch.sequence).collect()
    }

    fn replayed(log: &Log, first: u64) -> Vec<u64> {
        let batches = log.replay(first).batches;
        batches.iter().map(|batch| batch.sequence).collect()
    }

    #[test]
    fn sequence_numbers_start_at_the_given_one() {
        let mut log = log(7, 10, KvFaults::default());
        assert_eq!(log.last_sequence(), None);
        assert_eq!(sent(&mut log, 3), [7, 8, 9]);
        assert_eq!(log.last_sequence(), Some(9));
    }

    #[test]
    fn a_replay_starts_at_the_requested_or_the_oldest_buffered_batch() {
        let mut log = log(0, 3, KvFaults::default());
        sent(&mut log, 5);
        assert_eq!(replayed(&log, 3), [3, 4]);
        assert_eq!(replayed(&log, 0), [2, 3, 4]);
        assert_eq!(replayed(&log, 5), [0_u64; 0]);
        assert!(log.replay(5).ends);
    }

    #[test]
    fn a_lost_batch_can_be_replayed_unless_it_is_lost_for_good() {
        let lose = |lose_for_good| KvFaults {
            lose_next: 2,
            lose_for_good,
            ..KvFaults::default()
        };
        let mut log = log(0, 10, lose(false));
        assert_eq!(sent(&mut log, 3), [2]);
        assert_eq!(replayed(&log, 0), [0, 1, 2]);
        log.set_faults(lose(true));
        assert_eq!(sent(&mut log, 3), [5]);
        assert_eq!(replayed(&log, 0), [0, 1, 2, 5]);
    }

    #[test]
    fn pairs_are_swapped_and_batches_repeated() {
        let mut log = log(
            0,
            10,
            KvFaults {
                swap_next: 1,
                repeat_every: std::num::NonZeroU64::new(3),
                ..KvFaults::default()
            },
        );
        assert_eq!(sent(&mut log, 4), [1, 0, 2, 2, 3]);
    }

    #[test]
    fn a_garbled_batch_is_garbled_in_replays_too() {
        let mut log = log(
            0,
            10,
            KvFaults {
                garble_next: 1,
                ..KvFaults::default()
            },
        );
        let sending = log.publish(Bytes::from_static(b"x"));
        assert_eq!(sending.batches[0].payload, GARBLED);
        assert_eq!(log.replay(0).batches, sending.batches);
        assert_eq!(
            log.publish(Bytes::from_static(b"y")).batches[0].payload,
            "y"
        );
    }
}
