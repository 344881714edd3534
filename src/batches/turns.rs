//! Which of the batches that are due gets its next work first on this replica. Pure.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::store::documents::DocumentKey;

/// For so long other batches come before one of which a work has stalled. A stall after the pause doubles it.
const FIRST_PAUSE: Duration = Duration::from_secs(60);
const MAX_PAUSE: Duration = Duration::from_secs(600);

/// The place of a batch among those that are due. The least comes first, and of equal ones the one whose due time is
/// the earliest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Turn {
    /// This replica begins no work of the batch, and other replicas may.
    pub(super) is_left: bool,
    /// A work of the batch has stalled here: it gets one if no other batch has a work for its room.
    pub(super) is_paused: bool,
    /// Works of the same kind that run here for the batch's tenant. Shards are one kind, and all other works another.
    /// Each kind has room of its own, so that neither takes the other's, whichever comes first.
    pub(super) of_tenant: usize,
    pub(super) class: TurnClass,
    /// The same for the batch itself.
    pub(super) of_batch: usize,
}

/// What a batch needs next, in the order in which it is done for one tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TurnClass {
    /// The end of a batch, or what needs no room.
    #[default]
    Finalize,
    Validate,
    Delete,
    Shard,
}

/// The batches of which a work has stalled here. They are bounded: a work takes some seconds to stall, few run at a
/// time, and a batch is forgotten when it has not stalled for [`MAX_PAUSE`] after its pause.
#[derive(Debug, Default)]
pub(super) struct Stalls(BTreeMap<DocumentKey, Stall>);

#[derive(Clone, Copy, Debug)]
struct Stall {
    pause: Duration,
    until: Instant,
}

impl Stalls {
    /// A work of the batch was given back, because it could not go on.
    pub(super) fn on_stall(&mut self, now: Instant, key: &DocumentKey) {
        self.0.retain(|_, stall| now < stall.until + MAX_PAUSE);
        let pause = match self.0.get(key) {
            // Works that run beside each other stall together.
            Some(stall) if now < stall.until => stall.pause,
            Some(stall) => (stall.pause * 2).min(MAX_PAUSE),
            None => FIRST_PAUSE,
        };
        let until = now + pause;
        self.0.insert(key.clone(), Stall { pause, until });
    }

    /// A work of the batch is done.
    pub(super) fn on_done(&mut self, key: &DocumentKey) {
        self.0.remove(key);
    }

    pub(super) fn is_paused(&self, now: Instant, key: &DocumentKey) -> bool {
        let stall = self.0.get(key);
        stall.is_some_and(|stall| now < stall.until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batches::service::batch_key;
    use crate::observe;

    #[test]
    fn each_stall_after_a_pause_doubles_it_up_to_ten_minutes() {
        let key = batch_key("batch_1");
        let second = Duration::from_secs(1);
        let (mut stalls, mut now) = (Stalls::default(), observe::now());
        let mut stall = |stalls: &mut Stalls, seconds: u32| {
            // Two shards.
            stalls.on_stall(now, &key);
            stalls.on_stall(now + second / 2, &key);
            let pause = second * seconds;
            assert!(stalls.is_paused(now + pause, &key), "{seconds}");
            now += pause + second;
            assert!(!stalls.is_paused(now, &key), "{seconds}");
        };
        for seconds in [60, 120, 240, 480, 600, 600] {
            stall(&mut stalls, seconds);
        }
        stalls.on_done(&key);
        stall(&mut stalls, 60);
        stall(&mut stalls, 120);
    }

    #[test]
    fn what_is_left_to_others_comes_after_all_others() {
        let paused = Turn {
            is_paused: true,
            of_tenant: 9,
            class: TurnClass::Shard,
            ..Turn::default()
        };
        let left = Turn {
            is_left: true,
            ..Turn::default()
        };
        assert!(paused < left);
    }

    #[test]
    fn a_batch_that_stalls_no_more_is_forgotten() {
        let (mut stalls, now) = (Stalls::default(), observe::now());
        stalls.on_stall(now, &batch_key("batch_1"));
        let later = now + FIRST_PAUSE + MAX_PAUSE;
        stalls.on_stall(later, &batch_key("batch_2"));
        assert_eq!(stalls.0.len(), 1);
    }
}
