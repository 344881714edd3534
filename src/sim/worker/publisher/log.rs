//! The batches of one rank: their numbers, those that are kept for replays, and which of them go out
//! when. Pure.

use std::collections::VecDeque;
use std::num::NonZeroUsize;

use bytes::Bytes;

use crate::sim::fault::kv::KvFaults;

/// What a garbled batch reads; msgpack has no value that begins so.
const GARBLED: &[u8] = &[0xc1, 0xc1];

#[derive(Debug)]
pub(super) struct Log {
    next: u64,
    first: u64,
    kept: VecDeque<Numbered>,
    kept_max: NonZeroUsize,
    faults: KvFaults,
    /// Batches since the faults were set.
    count: u64,
    /// What goes out after the next batch.
    held_back: Vec<Numbered>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Numbered {
    pub(super) sequence: u64,
    pub(super) payload: Bytes,
}

/// What to do with the subscribers because of a batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Sending {
    /// First of all, cut them off.
    pub(super) cut: bool,
    pub(super) batches: Vec<Numbered>,
}

/// The answer to one request for a replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Replayed {
    pub(super) batches: Vec<Numbered>,
    /// Whether it ends with its end marker.
    pub(super) ends: bool,
}

impl Log {
    pub(super) fn new(first: u64, kept_max: NonZeroUsize, faults: KvFaults) -> Self {
        Self {
            next: first,
            first,
            kept: VecDeque::new(),
            kept_max,
            faults,
            count: 0,
            held_back: Vec::new(),
        }
    }

    pub(super) fn publish(&mut self, payload: Bytes) -> Sending {
        self.count += 1;
        let fate = self.faults.fate(self.count);
        let payload = match fate.garbled {
            true => Bytes::from_static(GARBLED),
            false => payload,
        };
        let sequence = self.next;
        // A test may begin next to the end.
        self.next = self.next.wrapping_add(1);
        let batch = Numbered { sequence, payload };
        if fate.kept {
            if self.kept.len() == self.kept_max.get() {
                self.kept.pop_front();
            }
            self.kept.push_back(batch.clone());
        }
        let mut batches = vec![batch; fate.times];
        if fate.held_back {
            self.held_back.append(&mut batches);
        } else {
            batches.append(&mut self.held_back);
        }
        let cut = fate.cut;
        Sending { cut, batches }
    }

    /// The kept batches from `first` on; from the oldest if that is not kept any more.
    pub(super) fn replay(&self, first: u64) -> Replayed {
        let wanted = self.kept.iter().filter(|batch| batch.sequence >= first);
        let replay = self.faults.replay(wanted.clone().count());
        let batches = wanted.skip(replay.skip).take(replay.take).cloned();
        Replayed {
            batches: batches.collect(),
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

    fn log(first: u64, kept_max: usize, faults: KvFaults) -> Log {
        Log::new(first, NonZeroUsize::new(kept_max).unwrap(), faults)
    }

    /// Publishes so many batches and gives the numbers in the order in which they go out.
    fn sent(log: &mut Log, batches: usize) -> Vec<u64> {
        let sending = (0..batches).flat_map(|_| log.publish(Bytes::new()).batches);
        sending.map(|batch| batch.sequence).collect()
    }

    fn replayed(log: &Log, first: u64) -> Vec<u64> {
        let batches = log.replay(first).batches;
        batches.iter().map(|batch| batch.sequence).collect()
    }

    #[test]
    fn numbers_rise_from_the_first() {
        let mut log = log(7, 10, KvFaults::default());
        assert_eq!(log.last_sequence(), None);
        assert_eq!(sent(&mut log, 3), [7, 8, 9]);
        assert_eq!(log.last_sequence(), Some(9));
    }

    #[test]
    fn a_replay_begins_where_asked_or_at_the_oldest_that_is_kept() {
        let mut log = log(0, 3, KvFaults::default());
        sent(&mut log, 5);
        assert_eq!(replayed(&log, 3), [3, 4]);
        assert_eq!(replayed(&log, 0), [2, 3, 4]);
        assert_eq!(replayed(&log, 5), [0_u64; 0]);
        assert!(log.replay(5).ends);
    }

    #[test]
    fn what_is_lost_can_be_asked_for_unless_it_is_lost_for_good() {
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
    fn a_garbled_batch_is_kept_as_it_was_sent() {
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
