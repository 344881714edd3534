//! Whether an orphan is generated again or fails: no reader may see two different beginnings. Pure.

use super::run_phase::{ALL_LOST, LOST};
use super::run_step::FIRST_EVENTS;
use crate::responses::fail_reason::FailReason;
use crate::store::Status;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakeOver {
    Rerun,
    /// Go on after the stored events, or fail if what is stored does not allow it.
    Continue,
    /// End it as failed, with the output that is stored.
    Fail(FailReason),
    /// It was cancelled: store the output that readers had received.
    StoreCancelled,
}

impl TakeOver {
    /// Whether an engine may be sent the request, for which there must be memory. The others only have to be ended.
    pub fn may_generate(self) -> bool {
        matches!(self, Self::Rerun | Self::Continue)
    }
}

/// A response that loses its owners this many times as often as it may be started fails, though no engine has started
/// it: it may be what ends them.
const LOST_OWNERS_FACTOR: u32 = 3;

/// The state of a response whose owner was lost.
#[derive(Clone, Copy, Debug)]
pub struct OrphanState {
    pub status: Status,
    /// Whether the store has everything needed to start it again.
    pub is_portable: bool,
    pub streams: bool,
    /// Number of stored events.
    pub stored: u64,
    /// How often an engine has started it, this time included.
    pub attempts: u32,
    /// How many of its owners were lost.
    pub lost_owners: u32,
    /// Whether this replica continues streams.
    pub may_continue: bool,
}

impl OrphanState {
    pub fn decide(&self, attempts_max: u32) -> TakeOver {
        if self.status == Status::Cancelled {
            return TakeOver::StoreCancelled;
        }
        let was_read = self.streams && self.stored > FIRST_EVENTS;
        if !self.is_portable || was_read && !self.may_continue {
            return TakeOver::Fail(LOST);
        }
        let lost_max = attempts_max.saturating_mul(LOST_OWNERS_FACTOR);
        if self.attempts > attempts_max || self.lost_owners > lost_max {
            return TakeOver::Fail(ALL_LOST);
        }
        if was_read {
            TakeOver::Continue
        } else {
            TakeOver::Rerun
        }
    }
}

/// Whether to scan again at once instead of after the interval: the last scan filled its limit `max` and some of
/// the `found` orphans were `taken`.
pub fn must_rescan(found: usize, taken: usize, max: usize) -> bool {
    found >= max && taken > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scans_repeat_at_once_while_they_are_full() {
        assert!(must_rescan(64, 64, 64) && must_rescan(64, 1, 64));
        // The last orphans; or others take them, or the store refuses.
        assert!(!must_rescan(63, 63, 64) && !must_rescan(64, 0, 64));
    }

    #[test]
    fn an_orphan_without_read_output_is_started_again_and_others_fail() {
        let check = |is_portable, streams, stored, attempts, runs: bool| {
            let orphan_state = OrphanState {
                status: Status::Queued,
                lost_owners: 9,
                is_portable,
                streams,
                stored,
                attempts,
                may_continue: false,
            };
            assert_eq!(
                orphan_state.decide(3) == TakeOver::Rerun,
                runs,
                "{orphan_state:?}"
            );
        };
        check(true, true, 0, 2, true);
        check(true, true, 3, 2, true);
        check(true, true, 4, 2, false);
        check(true, false, 0, 3, true);
        check(true, false, 0, 4, false);
        check(false, true, 0, 2, false);
        let orphan_state = OrphanState {
            status: Status::Queued,
            is_portable: true,
            streams: false,
            stored: 0,
            attempts: 1,
            lost_owners: 10,
            may_continue: true,
        };
        assert!(matches!(orphan_state.decide(3), TakeOver::Fail(_)));
    }

    #[test]
    fn only_what_an_engine_may_be_sent_needs_memory() {
        let needing = [TakeOver::Rerun, TakeOver::Continue];
        assert!(needing.into_iter().all(TakeOver::may_generate));
        let ending = [TakeOver::Fail(LOST), TakeOver::StoreCancelled];
        assert!(!ending.into_iter().any(TakeOver::may_generate));
    }
}
