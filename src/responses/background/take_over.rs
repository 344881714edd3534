//! What to do with a response whose replica was lost: nobody must see two beginnings of it. Pure.

use super::run_state::FIRST_EVENTS;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakeOver {
    Rerun,
    /// What came of it, and no more.
    Fail(&'static str),
}

/// What is known of it.
#[derive(Clone, Copy, Debug)]
pub struct OrphanState {
    /// Whether all that is needed to begin it is in the store.
    pub is_portable: bool,
    pub streams: bool,
    /// How many events of it are stored.
    pub stored: u64,
    /// How often it was begun, this time included.
    pub attempts: u32,
}

pub fn take_over(orphan_state: &OrphanState, attempts_max: u32) -> TakeOver {
    if !orphan_state.is_portable || (orphan_state.streams && orphan_state.stored > FIRST_EVENTS) {
        return TakeOver::Fail("The replica that ran this response was lost.");
    }
    if orphan_state.attempts > attempts_max {
        return TakeOver::Fail("Every replica that ran this response was lost.");
    }
    TakeOver::Rerun
}

/// Whether there is more to take over than was found: whoever has room for it looks again at once, and does not
/// leave it until the next sweep. `taken` of those that were `found`, which were up to `max`.
pub fn is_more_left(found: usize, taken: usize, max: usize) -> bool {
    found >= max && taken > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_of_a_full_replica_is_taken_over_at_once() {
        assert!(is_more_left(64, 64, 64) && is_more_left(64, 1, 64));
        // Nothing more is there; and others take it, or the store lets nobody.
        assert!(!is_more_left(63, 63, 64) && !is_more_left(64, 0, 64));
    }

    #[test]
    fn what_nobody_saw_is_run_again_and_the_rest_fails() {
        let check = |is_portable, streams, stored, attempts, runs: bool| {
            let orphan_state = OrphanState {
                is_portable,
                streams,
                stored,
                attempts,
            };
            assert_eq!(
                take_over(&orphan_state, 3) == TakeOver::Rerun,
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
    }
}
