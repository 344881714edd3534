//! How often a request is sent, and whether with a KV transfer: what comes after each attempt that failed. Pure.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::attempt::outcome::Stage;
use super::failure::cuts::{Cut, Cuts};
use super::failure::retries::{Attempts, Failure, Step};

/// The attempts of one request.
#[derive(Debug)]
pub(super) struct Course {
    attempts: Attempts,
    deadline: Instant,
    /// What the next attempt is a retry of, if it is one that costs the fleet something.
    owed: Option<Owed>,
}

/// A retry that was not counted yet.
#[derive(Debug, PartialEq)]
pub(super) struct Owed {
    /// The worker that failed.
    pub(super) worker: Arc<str>,
    pub(super) failure: Failure,
    /// It takes nothing from the retry budget, though it is counted as a retry: what ended with all that its worker had is no
    /// further load, and what was refused at once hardly any.
    pub(super) is_off_budget: bool,
}

/// An attempt that failed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ended<'a> {
    pub(super) stage: Stage,
    pub(super) failure: Failure,
    /// The worker had closed the idle connection that the attempt used.
    pub(super) is_stale: bool,
    /// An engine has refused it, with an answer.
    pub(super) is_answered: bool,
    /// The worker that failed.
    pub(super) worker: &'a Arc<str>,
}

#[must_use]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Next {
    /// Another attempt after a pause.
    Retry {
        after: Duration,
    },
    /// Another attempt at once, and no KV transfer from now on. It costs no more than without a prefill worker, so it is not
    /// counted as a retry.
    WithoutTransfers,
    Stop,
}

impl Course {
    pub(super) fn new(attempts: Attempts, deadline: Instant) -> Self {
        Self {
            attempts,
            deadline,
            owed: None,
        }
    }

    pub(super) fn attempts(&self) -> &Attempts {
        &self.attempts
    }

    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// How many attempts there were.
    pub(super) fn count(&self) -> u32 {
        self.attempts.count()
    }

    pub(super) fn is_late(&self, now: Instant) -> bool {
        now >= self.deadline
    }

    pub(super) fn begin(&mut self) {
        self.attempts.begin();
    }

    /// The connection of the last attempt broke after the request was sent over it. True if others that were cut in the same
    /// moment are to be waited for: it may be that the request is refused for it.
    pub(super) fn on_cut(&mut self, cut: &Cut) -> bool {
        self.attempts.on_cut(cut);
        self.attempts.has_cut_enough() || self.attempts.is_last()
    }

    pub(super) fn cuts(&self) -> &Cuts {
        self.attempts.cuts()
    }

    /// `may_give_up_transfers`: the request may go on without a prefill worker, and did not so far. `random`: from 0 to 1.
    pub(super) fn on_failed(
        &mut self,
        now: Instant,
        ended: &Ended<'_>,
        may_give_up_transfers: bool,
        random: f64,
    ) -> Next {
        let Ended { failure, stage, .. } = *ended;
        let step = self.attempts.on_failure(failure, ended.is_stale, random);
        let may_go_on =
            may_give_up_transfers && !self.is_late(now) && !self.attempts.has_cut_enough();
        // The decode engine had the KV blocks or tried to fetch them, so another prefill leg would most likely end the same.
        if stage == Stage::Transfer && ended.is_answered && may_go_on {
            return Next::WithoutTransfers;
        }
        match step {
            Step::Retry { after } if !self.is_late(now + after) => {
                // What was sent over a connection that was closed already costs the fleet nothing.
                let is_counted = !failure.is_free() && !ended.is_stale;
                self.owed = is_counted.then(|| Owed {
                    worker: ended.worker.clone(),
                    failure,
                    is_off_budget: self.attempts.is_acquitted() || failure == Failure::TooLong,
                });
                Next::Retry { after }
            }
            _ if stage != Stage::Worker && may_go_on => Next::WithoutTransfers,
            Step::Retry { .. } | Step::GiveUp => Next::Stop,
        }
    }

    /// The retry that the next attempt is, once.
    pub(super) fn take_owed(&mut self) -> Option<Owed> {
        self.owed.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relay::settings::Settings;

    const RETRY: fn(&Next) -> bool = |next| matches!(next, Next::Retry { .. });
    const WITHOUT: fn(&Next) -> bool = |next| *next == Next::WithoutTransfers;
    const STOP: fn(&Next) -> bool = |next| *next == Next::Stop;

    fn course(left: Duration) -> (Course, Instant) {
        let settings = Settings {
            max_attempts: 2,
            ..Settings::default()
        };
        let now = crate::observe::now();
        let mut course = Course::new(Attempts::new(&settings, Cuts::default()), now + left);
        course.begin();
        (course, now)
    }

    fn ended(stage: Stage, failure: Failure, worker: &Arc<str>) -> Ended<'_> {
        Ended {
            stage,
            failure,
            is_stale: false,
            is_answered: false,
            worker,
        }
    }

    /// Two attempts are allowed, and each has its expectation.
    fn check(
        (stage, failure, is_answered): (Stage, Failure, bool),
        may_give_up: bool,
        expected: [fn(&Next) -> bool; 2],
    ) {
        let (mut course, now) = course(Duration::from_secs(60));
        let worker = "w".into();
        for expected in expected {
            let ended = Ended {
                is_answered,
                ..ended(stage, failure, &worker)
            };
            let next = course.on_failed(now, &ended, may_give_up, 0.5);
            assert!(
                expected(&next),
                "{stage:?} {failure:?} {is_answered} {may_give_up}: {next:?}"
            );
            course.begin();
        }
    }

    #[test]
    fn a_worker_that_fails_is_replaced_until_the_attempts_are_used_up() {
        for may_give_up in [false, true] {
            check(
                (Stage::Worker, Failure::Connect, false),
                may_give_up,
                [RETRY, STOP],
            );
            check(
                (Stage::Worker, Failure::Refused, true),
                may_give_up,
                [RETRY, STOP],
            );
        }
    }

    #[test]
    fn a_pair_is_replaced_by_another_and_then_by_one_worker() {
        check(
            (Stage::Prefill, Failure::Connect, false),
            true,
            [RETRY, WITHOUT],
        );
        check(
            (Stage::Transfer, Failure::TimedOut, false),
            true,
            [RETRY, WITHOUT],
        );
        check(
            (Stage::Prefill, Failure::Connect, false),
            false,
            [RETRY, STOP],
        );
    }

    #[test]
    fn after_a_decode_engines_refusal_no_other_pair_is_tried() {
        check(
            (Stage::Transfer, Failure::KvTransfer, true),
            true,
            [WITHOUT, WITHOUT],
        );
        check(
            (Stage::Transfer, Failure::KvTransfer, true),
            false,
            [RETRY, STOP],
        );
    }

    #[test]
    fn nothing_is_tried_when_the_time_is_over() {
        let (mut course, now) = course(Duration::from_millis(1));
        let worker = "w".into();
        let ended = ended(Stage::Prefill, Failure::Connect, &worker);
        // The pause would end too late, and one worker may begin now.
        assert_eq!(
            course.on_failed(now, &ended, true, 1.0),
            Next::WithoutTransfers
        );
        let late = now + Duration::from_secs(1);
        assert!(course.is_late(late));
        assert_eq!(course.on_failed(late, &ended, true, 1.0), Next::Stop);
        assert_eq!(course.take_owed(), None);
    }

    #[test]
    fn a_retry_is_owed_once_unless_it_costs_nothing() {
        for (failure, is_stale, expected) in [
            (Failure::Connect, false, Some(false)),
            (Failure::TooLong, false, Some(true)),
            (Failure::Broken, true, None),
            (Failure::Local, false, None),
            (Failure::TakenOut, false, None),
        ] {
            let (mut course, now) = course(Duration::from_secs(60));
            let worker = "w".into();
            let ended = Ended {
                is_stale,
                ..ended(Stage::Worker, failure, &worker)
            };
            let next = course.on_failed(now, &ended, false, 0.5);
            assert!(RETRY(&next), "{failure:?}");
            let owed = course.take_owed();
            assert_eq!(owed.map(|owed| owed.is_off_budget), expected, "{failure:?}");
            assert_eq!(course.take_owed(), None);
        }
    }
}
