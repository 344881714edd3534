//! The ways in which a pretend engine's cache events can go wrong. Plain data, as the other faults;
//! batches are counted from when the set was made. Pure.

use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};

/// In JSON, a switch that is not named is off.
#[derive(clap::Args, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KvFaults {
    /// Do not send every n-th batch of cache events.
    #[arg(long = "fault-kv-lose-every", value_name = "BATCHES")]
    pub lose_every: Option<NonZeroU64>,

    /// Do not send the next n batches.
    #[arg(
        long = "fault-kv-lose-next",
        value_name = "BATCHES",
        default_value_t = 0
    )]
    pub lose_next: u64,

    /// What is not sent cannot be asked for again either.
    #[arg(long = "fault-kv-lose-for-good")]
    pub lose_for_good: bool,

    /// Send every n-th batch twice.
    #[arg(long = "fault-kv-repeat-every", value_name = "BATCHES")]
    pub repeat_every: Option<NonZeroU64>,

    /// Of the next n pairs of batches, send the second first.
    #[arg(long = "fault-kv-swap-next", value_name = "PAIRS", default_value_t = 0)]
    pub swap_next: u64,

    /// Send the next n batches as bytes that are not a batch, and keep them so.
    #[arg(
        long = "fault-kv-garble-next",
        value_name = "BATCHES",
        default_value_t = 0
    )]
    pub garble_next: u64,

    /// Send each batch this much later, in milliseconds. Asked for, it is there at once.
    #[arg(
        long = "fault-kv-delay-ms",
        value_name = "MILLISECONDS",
        default_value_t = 0
    )]
    pub delay_ms: u64,

    /// Tell of all blocks as if they lay there: CPU or STORAGE.
    #[arg(long = "fault-kv-medium", value_name = "MEDIUM")]
    pub medium: Option<String>,

    /// Cut all event and replay connections, once, when this is switched on.
    #[arg(skip)]
    pub cut: bool,

    /// Cut the event connections before every n-th batch is sent, so that nobody gets it.
    #[arg(long = "fault-kv-cut-every", value_name = "BATCHES")]
    pub cut_every: Option<NonZeroU64>,

    /// Send nothing and answer nothing, and catch up when this is switched off.
    #[arg(long = "fault-kv-silent")]
    pub silent: bool,

    /// Cut the connection of whoever asks for batches again.
    #[arg(long = "fault-kv-replay-refuse")]
    pub replay_refuse: bool,

    /// Give no more than the last n batches again.
    #[arg(long = "fault-kv-replay-last", value_name = "BATCHES")]
    pub replay_last: Option<usize>,

    /// Stop an answer after n batches, without its end; 0: never answer.
    #[arg(long = "fault-kv-replay-stop-after", value_name = "BATCHES")]
    pub replay_stop_after: Option<usize>,
}

/// What becomes of one batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fate {
    /// How often it is sent.
    pub times: usize,
    /// Whether it can be asked for again.
    pub kept: bool,
    pub garbled: bool,
    /// It is sent after the batch that follows it.
    pub held_back: bool,
    /// Subscribers are cut off before it is sent.
    pub cut: bool,
}

/// What becomes of the answer to a replay request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replay {
    /// How many of the batches, at the front, are left out.
    pub skip: usize,
    /// How many of the others are sent.
    pub take: usize,
    /// Whether it ends with its end marker.
    pub ends: bool,
}

impl KvFaults {
    /// What becomes of a batch; `count` is 1 for the first.
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
            kept: !(lost && self.lose_for_good),
            garbled: count <= self.garble_next,
            held_back: count % 2 == 1 && count.div_ceil(2) <= self.swap_next,
            cut: is_nth(self.cut_every),
        }
    }

    /// What becomes of an answer that would have `batches`.
    pub fn replay(&self, batches: usize) -> Replay {
        let last = self.replay_last.unwrap_or(usize::MAX).min(batches);
        Replay {
            skip: batches - last,
            take: self.replay_stop_after.unwrap_or(usize::MAX).min(last),
            ends: self.replay_stop_after.is_none(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USUAL: Fate = Fate {
        times: 1,
        kept: true,
        garbled: false,
        held_back: false,
        cut: false,
    };

    fn fates(faults: &KvFaults, count: u64) -> Vec<Fate> {
        (1..=count).map(|count| faults.fate(count)).collect()
    }

    #[test]
    fn without_faults_a_batch_is_sent_once_and_kept() {
        assert_eq!(fates(&KvFaults::default(), 3), [USUAL; 3]);
    }

    #[test]
    fn the_next_are_lost_and_then_every_second() {
        let faults = KvFaults {
            lose_next: 1,
            lose_every: NonZeroU64::new(2),
            ..KvFaults::default()
        };
        let times: Vec<usize> = fates(&faults, 4).iter().map(|fate| fate.times).collect();
        assert_eq!(times, [0, 0, 1, 0]);
        assert!(fates(&faults, 4).iter().all(|fate| fate.kept));
        let faults = KvFaults {
            lose_for_good: true,
            ..faults
        };
        let kept: Vec<bool> = fates(&faults, 4).iter().map(|fate| fate.kept).collect();
        assert_eq!(kept, [false, false, true, false]);
    }

    #[test]
    fn the_first_of_each_pair_is_held_back() {
        let faults = KvFaults {
            swap_next: 2,
            ..KvFaults::default()
        };
        let held: Vec<bool> = fates(&faults, 6).iter().map(|it| it.held_back).collect();
        assert_eq!(held, [true, false, true, false, false, false]);
    }

    #[test]
    fn an_answer_has_the_last_ones_and_may_stop_without_an_end() {
        let faults = KvFaults {
            replay_last: Some(3),
            ..KvFaults::default()
        };
        let replay = |skip, take, ends| Replay { skip, take, ends };
        assert_eq!(faults.replay(10), replay(7, 3, true));
        assert_eq!(faults.replay(2), replay(0, 2, true));
        let faults = KvFaults {
            replay_stop_after: Some(1),
            ..faults
        };
        assert_eq!(faults.replay(10), replay(7, 1, false));
        assert_eq!(faults.replay(0), replay(0, 0, false));
    }
}
