//! Whether a failed attempt is retried, and when. Pure.
//!
//! Only attempts that failed before the first byte of an answer are retried.

use std::time::Duration;

use super::cuts::{Cut, Cuts};
use crate::relay::settings::Settings;

/// So many ends of processes use up none of a request's attempts. A request that ends engines which have others, too, gets no
/// further.
const ACQUITTED_MAX: u32 = 2;

/// How an attempt failed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Failure {
    /// The router had no file descriptor, port or memory for a connection.
    Local,
    /// No connection to the worker.
    Connect,
    /// The connection broke after the request was sent and before its answer.
    Broken,
    /// No answer within the attempt's time limit.
    TimedOut,
    /// The time of the whole request, all attempts together, is over.
    Deadline,
    /// The engine answered with a retryable status (503, ...).
    Refused,
    /// The engine refused the request, and its context may be too short for it, unlike another one's.
    TooLong,
    /// The KV transfer from the prefill to the decode worker failed.
    KvTransfer,
    /// The worker was taken out before it answered.
    TakenOut,
}

impl Failure {
    /// Every value of [`Failure::as_str`].
    pub const REASONS: [&'static str; 9] = [
        "router_resources",
        "connect",
        "connection_lost",
        "timeout",
        "request_timeout",
        "refused",
        "context_too_short",
        "kv_transfer",
        "worker_taken_out",
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Failure::Local => "router_resources",
            Failure::Connect => "connect",
            Failure::Broken => "connection_lost",
            Failure::TimedOut => "timeout",
            Failure::Deadline => "request_timeout",
            Failure::Refused => "refused",
            Failure::TooLong => "context_too_short",
            Failure::KvTransfer => "kv_transfer",
            Failure::TakenOut => "worker_taken_out",
        }
    }

    /// True if its retry takes nothing more from the retry budget: what was not sent costs the fleet nothing, and a request that is
    /// released has paid before.
    pub fn is_free(self) -> bool {
        matches!(self, Failure::Local | Failure::TakenOut)
    }

    /// For clients: without the worker's address, which errors of its connection may have.
    pub fn explanation(self) -> &'static str {
        match self {
            Failure::Local => "the router could open no connection",
            Failure::Connect => "cannot connect",
            Failure::Broken => "the connection closed before the answer",
            Failure::TimedOut => "timed out",
            Failure::Deadline => "the request's time was over",
            Failure::Refused => "it refused the request",
            Failure::TooLong => "its context may be too short for the request",
            Failure::KvTransfer => "the KV transfer failed",
            Failure::TakenOut => "the worker was taken out before it answered",
        }
    }
}

/// Whether a request may be sent over a connection that was kept alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reuse {
    /// One that turns out to be closed is replaced by a new one, once.
    Replaced,
    /// One that was used so recently that no server closes it for its age. It is not replaced if the engine may have read
    /// the request.
    Young,
    Never,
}

impl Reuse {
    /// For what may be sent once only: a KV transfer that can take place once.
    #[must_use]
    pub fn without_replacement(self) -> Self {
        match self {
            Self::Replaced | Self::Young => Self::Young,
            Self::Never => Self::Never,
        }
    }
}

/// Whether a connection that was cut had been idle before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reused {
    Idle,
    No,
}

#[must_use]
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Step {
    /// Try a worker again after a pause.
    Retry {
        after: Duration,
    },
    GiveUp,
}

/// One request's attempts.
#[derive(Debug)]
pub struct Attempts {
    count: u32,
    count_max: u32,
    cuts: Cuts,
    backoff: Duration,
    backoff_max: Duration,
    last: Option<Failure>,
    /// An engine got the request and may have computed an answer that was lost.
    may_have_computed: bool,
    /// The last attempt failed because the worker had closed the idle connection that it used.
    was_stale: bool,
    /// A connection that had not been idle before was cut, and no other request's with it.
    has_cut_new: bool,
    /// Attempts that ended with the worker's process, and not because of the request.
    acquitted: u32,
    /// The last attempt was cut.
    last_cut: Option<Reused>,
    is_only_one: bool,
}

impl Attempts {
    /// `cuts`: what broke before, after the same request was sent.
    pub fn new(settings: &Settings, cuts: Cuts) -> Self {
        Self {
            count: 0,
            count_max: settings.max_attempts.max(1),
            cuts,
            backoff: settings.advanced.backoff,
            backoff_max: settings.advanced.max_backoff,
            last: None,
            may_have_computed: false,
            was_stale: false,
            has_cut_new: false,
            acquitted: 0,
            last_cut: None,
            is_only_one: false,
        }
    }

    /// No more than one.
    #[must_use]
    pub fn only_one(self) -> Self {
        Self {
            is_only_one: true,
            ..self
        }
    }

    pub fn begin(&mut self) {
        // Whoever was cut with the last attempt has said so by now.
        match self.last_cut.take() {
            Some(_) if self.cuts.is_last_shared() => self.acquitted = self.with_one_more(),
            Some(Reused::No) => self.has_cut_new = true,
            Some(Reused::Idle) | None => {}
        }
        self.count += 1;
    }

    /// The ends of processes that use up no attempts, with one more.
    fn with_one_more(&self) -> u32 {
        (self.acquitted + 1).min(ACQUITTED_MAX)
    }

    /// True if this attempt is the last one, unless it ends with its worker's process.
    pub fn is_last(&self) -> bool {
        self.is_only_one || self.count >= self.count_max + self.acquitted
    }

    pub fn count(&self) -> u32 {
        self.count
    }

    /// The connection of the last attempt broke after the request was sent over it. Called before
    /// [`Attempts::on_failure`].
    pub(in crate::relay) fn on_cut(&mut self, cut: &Cut) {
        self.cuts.add(cut);
    }

    /// `is_stale`: the worker had closed an idle connection. `random` from 0 to 1 spreads the pause over 50 % to 100 % of
    /// the backoff.
    pub fn on_failure(&mut self, failure: Failure, is_stale: bool, random: f64) -> Step {
        self.last = Some(failure);
        self.was_stale = is_stale;
        self.may_have_computed |= match failure {
            Failure::Broken => !is_stale,
            Failure::TimedOut | Failure::Deadline | Failure::KvTransfer | Failure::TakenOut => true,
            Failure::Local | Failure::Connect | Failure::Refused | Failure::TooLong => false,
        };
        self.last_cut = (failure == Failure::Broken).then_some(if is_stale {
            Reused::Idle
        } else {
            Reused::No
        });
        let acquitted = if self.is_acquitted() {
            self.with_one_more()
        } else {
            self.acquitted
        };
        // The first ends of processes under a request use up none of its attempts.
        let is_last = self.is_only_one || self.count >= self.count_max + acquitted;
        if is_last || self.has_cut_enough() || failure == Failure::Deadline {
            return Step::GiveUp;
        }
        if matches!(failure, Failure::TakenOut | Failure::TooLong) {
            let after = Duration::ZERO;
            return Step::Retry { after };
        }
        let doublings = self.count.saturating_sub(1).min(16);
        let full = self
            .backoff
            .saturating_mul(1 << doublings)
            .min(self.backoff_max);
        Step::Retry {
            after: full.mul_f64(0.5 + random.clamp(0.0, 1.0) / 2.0),
        }
    }

    /// How the last attempt failed.
    pub fn last(&self) -> Option<Failure> {
        self.last
    }

    /// True if an engine may have computed an answer that was lost: sent once more, the request is computed again.
    pub fn may_have_computed(&self) -> bool {
        self.may_have_computed
    }

    /// What broke after the request was sent, now and before.
    pub fn cuts(&self) -> &Cuts {
        &self.cuts
    }

    /// Which connection the next attempt may use. After a cut only a new one: the worker's other idle connections may
    /// have been closed with the first, and what closes a new one is the worker's end.
    pub fn reuse(&self) -> Reuse {
        if self.cuts.is_empty() {
            Reuse::Replaced
        } else {
            Reuse::Never
        }
    }

    /// True if the request may not be sent once more, because it seems to end the engines that get it.
    pub fn has_cut_enough(&self) -> bool {
        self.cuts.are_of_the_request()
    }

    /// True if the last attempt ended with the worker's process, and other requests with it: the worker has no more of
    /// what it had, so that sending it elsewhere is no further load.
    pub fn is_acquitted(&self) -> bool {
        self.last == Some(Failure::Broken) && self.cuts.is_last_shared()
    }

    /// True if a worker that failed this request may get it again when there is no other: an unreachable worker may
    /// be restarting, one that was taken out may be back, and after a failed KV transfer either worker may be healthy. A worker
    /// that refused or timed out would do so again, and one that cut a new connection may have ended because of the request.
    pub fn may_repeat_worker(&self) -> bool {
        self.last.is_some_and(|last| self.may_repeat_after(last))
    }

    /// What [`Attempts::may_repeat_worker`] will say if the attempt that runs now fails like this.
    pub fn may_repeat_after(&self, failure: Failure) -> bool {
        match failure {
            Failure::Local | Failure::Connect | Failure::KvTransfer | Failure::TakenOut => {
                !self.has_cut_new
            }
            // The worker most likely never read the request, or its process ended with all that it had.
            Failure::Broken => self.was_stale || self.cuts.is_last_shared(),
            Failure::TimedOut | Failure::Deadline | Failure::Refused | Failure::TooLong => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::cuts::tests::cut;
    use super::*;
    use crate::ids::WorkerId;
    use crate::relay::settings::Retries;

    const A: WorkerId = WorkerId(0);
    const B: WorkerId = WorkerId(1);
    /// The request itself, and others.
    const ALONE: &[u64] = &[0];
    const TOGETHER: &[u64] = &[0, 1, 2];

    fn attempts(max_attempts: u32) -> Attempts {
        let settings = Settings {
            max_attempts,
            advanced: Retries {
                backoff: Duration::from_millis(100),
                max_backoff: Duration::from_millis(300),
                ..Retries::default()
            },
            ..Settings::default()
        };
        Attempts::new(&settings, Cuts::default())
    }

    fn steps(attempts: &mut Attempts, count: usize) -> Vec<Step> {
        (0..count)
            .map(|_| {
                attempts.begin();
                attempts.on_failure(Failure::Connect, false, 1.0)
            })
            .collect()
    }

    #[test]
    fn the_backoff_doubles_up_to_its_bound_until_the_attempts_are_used_up() {
        let retry = |ms| Step::Retry {
            after: Duration::from_millis(ms),
        };
        assert_eq!(
            steps(&mut attempts(5), 5),
            [retry(100), retry(200), retry(300), retry(300), Step::GiveUp]
        );
        assert_eq!(steps(&mut attempts(1), 1), [Step::GiveUp]);
    }

    #[test]
    fn jitter_halves_the_backoff_at_most() {
        let mut attempts = attempts(3);
        attempts.begin();
        assert_eq!(
            attempts.on_failure(Failure::Connect, false, 0.0),
            Step::Retry {
                after: Duration::from_millis(50)
            }
        );
    }

    #[test]
    fn a_request_whose_worker_was_taken_out_goes_to_the_next_one_at_once() {
        let mut attempts = attempts(3);
        attempts.begin();
        let step = attempts.on_failure(Failure::TakenOut, false, 1.0);
        let after = Duration::ZERO;
        assert_eq!(step, Step::Retry { after });
        assert!(attempts.may_have_computed());
        attempts.begin();
        assert!(!attempts.is_last());
        attempts.begin();
        assert!(attempts.is_last());
    }

    #[test]
    fn a_worker_that_was_unreachable_or_taken_out_may_get_the_request_again() {
        for (failure, expected) in [
            (Failure::Local, true),
            (Failure::Connect, true),
            (Failure::Broken, false),
            (Failure::KvTransfer, true),
            (Failure::TimedOut, false),
            (Failure::Refused, false),
            (Failure::TooLong, false),
            (Failure::TakenOut, true),
        ] {
            let mut attempts = attempts(3);
            attempts.begin();
            if failure == Failure::Broken {
                attempts.on_cut(&cut(A, ALONE));
            }
            let _ = attempts.on_failure(failure, false, 0.5);
            assert_eq!(attempts.may_repeat_worker(), expected, "{failure:?}");
        }
    }

    /// The step after a connection to the worker was cut.
    fn broken(attempts: &mut Attempts, worker: WorkerId, bodies: &[u64], is_stale: bool) -> Step {
        attempts.begin();
        attempts.on_cut(&cut(worker, bodies));
        attempts.on_failure(Failure::Broken, is_stale, 0.5)
    }

    #[test]
    fn a_request_that_two_workers_cut_is_not_sent_again_and_never_to_the_same_worker() {
        let mut one = attempts(9);
        assert_ne!(broken(&mut one, A, ALONE, false), Step::GiveUp);
        one.begin();
        let step = one.on_failure(Failure::Connect, false, 0.5);
        assert_ne!(step, Step::GiveUp);
        assert!(!one.may_repeat_worker());
        assert_eq!(broken(&mut one, B, ALONE, false), Step::GiveUp);
        assert!(one.has_cut_enough());
    }

    #[test]
    fn one_dying_worker_ends_no_request_however_many_connections_it_cuts() {
        // Each as whether it was an idle one.
        for cuts in [
            &[true][..],
            &[false],
            &[true, true],
            &[true, false],
            &[true, true, true, false],
        ] {
            let mut attempts = attempts(9);
            for is_stale in cuts {
                let step = broken(&mut attempts, A, ALONE, *is_stale);
                assert_ne!(step, Step::GiveUp, "{cuts:?}");
                assert_eq!(attempts.reuse(), Reuse::Never, "{cuts:?}");
            }
            assert!(!attempts.has_cut_enough(), "{cuts:?}");
            let step = broken(&mut attempts, B, ALONE, false);
            assert_eq!(step, Step::GiveUp, "{cuts:?}");
        }
    }

    #[test]
    fn engines_that_end_with_all_that_they_have_use_up_no_attempts() {
        let mut attempts = attempts(2);
        for worker in [A, B] {
            let step = broken(&mut attempts, worker, TOGETHER, false);
            assert_ne!(step, Step::GiveUp);
            assert!(attempts.is_acquitted() && attempts.may_repeat_worker());
        }
        for expected in [false, true] {
            attempts.begin();
            let step = attempts.on_failure(Failure::Connect, false, 0.5);
            assert_eq!(step == Step::GiveUp, expected);
            assert!(!attempts.is_acquitted());
        }
        let mut carried = self::attempts(9).only_one();
        assert_eq!(broken(&mut carried, A, TOGETHER, false), Step::GiveUp);
    }

    #[test]
    fn a_worker_that_closed_an_idle_connection_may_get_the_request_over_a_new_one() {
        let mut attempts = attempts(9);
        assert_eq!(attempts.reuse(), Reuse::Replaced);
        let _ = broken(&mut attempts, A, ALONE, true);
        assert!(attempts.may_repeat_worker());
        // Another one is unreachable.
        attempts.begin();
        let _ = attempts.on_failure(Failure::Connect, false, 0.5);
        assert!(attempts.may_repeat_worker());
        assert_eq!(attempts.reuse(), Reuse::Never);
    }

    #[test]
    fn a_request_whose_time_is_over_is_not_tried_again() {
        let mut attempts = attempts(9);
        attempts.begin();
        assert_eq!(
            attempts.on_failure(Failure::Deadline, false, 0.5),
            Step::GiveUp
        );
    }
}
