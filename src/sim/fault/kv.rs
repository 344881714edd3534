//! Faults of a simulated engine's KV events. Batches are counted from the moment at which the faults are set. Pure.

use std::num::{NonZeroU64, NonZeroUsize};

use serde::{Deserialize, Serialize};

/// In JSON, an absent fault is off.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KvFaults {
    /// Do not send every n-th batch of KV events.
    pub lose_every: Option<NonZeroU64>,

    /// Do not send the next n batches.
    pub lose_next: u64,

    /// Leave batches that were not sent out of replays, too.
    pub lose_for_good: bool,

    /// Send every n-th batch twice.
    pub repeat_every: Option<NonZeroU64>,

    /// Swap the batches of the next n pairs.
    pub swap_next: u64,

    /// Replace the next n batches by invalid bytes, also in replays.
    pub garble_next: u64,

    /// Delay each batch by this long. Replays are not delayed.
    pub delay_ms: u64,

    /// Report this medium for all blocks: CPU or STORAGE.
    pub medium: Option<String>,

    /// Close all event and replay connections once, when this is set.
    pub cut: bool,

    /// Close the event connections before every n-th batch, so that no subscriber gets it.
    pub cut_every: Option<NonZeroU64>,

    /// Send no batches and answer no replay requests; catch up when this is cleared.
    pub silent: bool,

    /// Close the connection of every client that requests a replay.
    pub replay_refuse: bool,

    /// Replay no more than the last n batches.
    pub replay_last: Option<usize>,

    /// Stop each replay after n batches, without the end marker; with 0, replay requests are not answered.
    pub replay_stop_after: Option<usize>,

    /// Leave as many batches out of each replay after every n batches that it sends. vLLM does so, and loses the end
    /// marker, beyond the 1,000 messages that its socket queues.
    pub replay_drop_after: Option<NonZeroUsize>,
}

/// What the faults do to one batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fate {
    /// How often the batch is sent.
    pub times: usize,
    /// Replays contain the batch.
    pub replayable: bool,
    pub garbled: bool,
    /// The batch is sent after the next one.
    pub swapped: bool,
    /// Subscribers are disconnected before the batch is sent.
    pub cut: bool,
}

/// What the faults do to the answer to a replay request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplayFate {
    /// How many of the first batches are left out.
    pub skip: usize,
    /// How many of the remaining batches are sent.
    pub take: usize,
    /// After this many of them as many are left out, and so on.
    pub drop_after: Option<NonZeroUsize>,
    /// Whether the end marker is sent.
    pub ends: bool,
}

impl ReplayFate {
    /// Whether the batch at a position is sent.
    pub fn sends(&self, position: usize) -> bool {
        let Some(position) = position.checked_sub(self.skip) else {
            return false;
        };
        let is_dropped = |after: NonZeroUsize| position / after % 2 == 1;
        position < self.take && !self.drop_after.is_some_and(is_dropped)
    }
}

impl KvFaults {
    /// What happens to batch number `count`, starting at 1.
    pub fn fate(&self, count: u64) -> Fate {
        let is_nth = |every: Option<NonZeroU64>| every.is_some_and(|every| count % every == 0);
        let lost = count <= self.lose_next || is_nth(self.lose_every);
        let times = match lost {
            true => 0,
            false if is_nth(self.repeat_every) => 2,
            false => 1,
        };
        Fate {
            times,
            replayable: !(lost && self.lose_for_good),
            garbled: count <= self.garble_next,
            swapped: count % 2 == 1 && count.div_ceil(2) <= self.swap_next,
            cut: is_nth(self.cut_every),
        }
    }

    /// What happens to a replay of `batches` batches.
    pub fn replay(&self, batches: usize) -> ReplayFate {
        let last = self.replay_last.unwrap_or(usize::MAX).min(batches);
        ReplayFate {
            skip: batches - last,
            take: self.replay_stop_after.unwrap_or(usize::MAX).min(last),
            drop_after: self.replay_drop_after,
            ends: self.replay_stop_after.is_none()
                && self
                    .replay_drop_after
                    .is_none_or(|after| last <= after.get()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_FAULT: Fate = Fate {
        times: 1,
        replayable: true,
        garbled: false,
        swapped: false,
        cut: false,
    };

    fn fates(faults: &KvFaults, count: u64) -> Vec<Fate> {
        (1..=count).map(|count| faults.fate(count)).collect()
    }

    #[test]
    fn without_faults_a_batch_is_sent_once_and_can_be_replayed() {
        assert_eq!(fates(&KvFaults::default(), 3), [NO_FAULT; 3]);
    }

    #[test]
    fn lose_next_and_lose_every_add_up() {
        let faults = KvFaults {
            lose_next: 1,
            lose_every: NonZeroU64::new(2),
            ..KvFaults::default()
        };
        let times: Vec<usize> = fates(&faults, 4).iter().map(|fate| fate.times).collect();
        assert_eq!(times, [0, 0, 1, 0]);
        assert!(fates(&faults, 4).iter().all(|fate| fate.replayable));
        let faults = KvFaults {
            lose_for_good: true,
            ..faults
        };
        let replayable: Vec<bool> = fates(&faults, 4)
            .iter()
            .map(|fate| fate.replayable)
            .collect();
        assert_eq!(replayable, [false, false, true, false]);
    }

    #[test]
    fn the_first_batch_of_each_pair_is_swapped() {
        let faults = KvFaults {
            swap_next: 2,
            ..KvFaults::default()
        };
        let swapped: Vec<bool> = fates(&faults, 6).iter().map(|fate| fate.swapped).collect();
        assert_eq!(swapped, [true, false, true, false, false, false]);
    }

    #[test]
    fn a_replay_can_be_cut_at_both_ends() {
        let faults = KvFaults {
            replay_last: Some(3),
            ..KvFaults::default()
        };
        let replay = |skip, take, ends| ReplayFate {
            skip,
            take,
            drop_after: None,
            ends,
        };
        assert_eq!(faults.replay(10), replay(7, 3, true));
        assert_eq!(faults.replay(2), replay(0, 2, true));
        let faults = KvFaults {
            replay_stop_after: Some(1),
            ..faults
        };
        assert_eq!(faults.replay(10), replay(7, 1, false));
        assert_eq!(faults.replay(0), replay(0, 0, false));
    }

    #[test]
    fn a_replay_longer_than_the_socket_queues_has_holes_and_no_end() {
        let faults = KvFaults {
            replay_drop_after: NonZeroUsize::new(2),
            replay_last: Some(7),
            ..KvFaults::default()
        };
        let sent = |batches| {
            let replay = faults.replay(batches);
            let sent: Vec<usize> = (0..batches).filter(|at| replay.sends(*at)).collect();
            (sent, replay.ends)
        };
        assert_eq!(sent(2), (vec![0, 1], true));
        assert_eq!(sent(3), (vec![0, 1], false));
        assert_eq!(sent(8), (vec![1, 2, 5, 6], false));
    }
}
