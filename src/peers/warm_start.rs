//! When a replica that starts has taken over what others know, or waits no longer for it. Pure.

use std::fmt;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// What is known at one moment of the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Another replica is ready, or may be soon.
    pub has_peers: bool,
    /// Another replica was ready at some moment.
    pub had_ready_peer: bool,
    /// The workers and what they serve are known.
    pub is_fleet_known: bool,
    /// Ranks whose KV events are followed, and those of which all is known that is to be known soon.
    pub ranks: usize,
    pub settled_ranks: usize,
    /// Predicted blocks were taken over, or no replica has any.
    pub has_predicted: bool,
    /// No replica that was asked has answered to the end: each was lost before.
    pub are_sources_lost: bool,
}

/// How the start ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// What other replicas know is known here.
    Warm,
    /// No other replica is ready.
    NoneReady,
    /// Each replica that was asked was lost before it had answered.
    SourcesLost,
    /// It took too long.
    TimedOut,
}

/// The start of a replica that has others.
#[derive(Clone, Copy, Debug)]
pub struct WarmStart {
    deadline: Instant,
}

impl WarmStart {
    pub fn new(now: Instant, timeout: Duration) -> Self {
        Self {
            deadline: now + timeout,
        }
    }

    /// Whether the start has ended.
    pub fn end(&self, now: Instant, progress: &Progress) -> Option<End> {
        let is_settled = progress.settled_ranks >= progress.ranks;
        if !progress.has_peers && !progress.had_ready_peer {
            Some(End::NoneReady)
        } else if progress.is_fleet_known && is_settled && progress.has_predicted {
            if progress.are_sources_lost {
                Some(End::SourcesLost)
            } else {
                Some(End::Warm)
            }
        } else if now >= self.deadline {
            Some(End::TimedOut)
        } else {
            None
        }
    }
}

/// What readiness and operators see of the start.
#[derive(Debug, Default)]
pub struct WarmStartStatus(AtomicU8);

/// What a router says of its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Warmth {
    /// There are no other replicas to ask.
    Alone,
    /// Not ready yet.
    Warming,
    Ended(End),
}

impl WarmStartStatus {
    pub fn set(&self, warmth: Warmth) {
        let code = match warmth {
            Warmth::Alone => 0,
            Warmth::Warming => 1,
            Warmth::Ended(End::Warm) => 2,
            Warmth::Ended(End::NoneReady) => 3,
            Warmth::Ended(End::TimedOut) => 4,
            Warmth::Ended(End::SourcesLost) => 5,
        };
        self.0.store(code, Relaxed);
    }

    pub fn get(&self) -> Warmth {
        match self.0.load(Relaxed) {
            1 => Warmth::Warming,
            2 => Warmth::Ended(End::Warm),
            3 => Warmth::Ended(End::NoneReady),
            4 => Warmth::Ended(End::TimedOut),
            5 => Warmth::Ended(End::SourcesLost),
            _ => Warmth::Alone,
        }
    }
}

impl Warmth {
    pub const ALL: [Warmth; 6] = [
        Warmth::Alone,
        Warmth::Warming,
        Warmth::Ended(End::Warm),
        Warmth::Ended(End::NoneReady),
        Warmth::Ended(End::SourcesLost),
        Warmth::Ended(End::TimedOut),
    ];

    pub fn is_warming(self) -> bool {
        self == Warmth::Warming
    }

    /// Whether the caches' contents were not taken over though there are other replicas.
    pub fn is_cold(self) -> bool {
        matches!(
            self,
            Warmth::Ended(End::NoneReady | End::SourcesLost | End::TimedOut)
        )
    }

    /// The metric label.
    pub fn as_str(self) -> &'static str {
        match self {
            Warmth::Alone => "alone",
            Warmth::Warming => "warming",
            Warmth::Ended(End::Warm) => "warm",
            Warmth::Ended(End::NoneReady) => "none_ready",
            Warmth::Ended(End::SourcesLost) => "sources_lost",
            Warmth::Ended(End::TimedOut) => "timed_out",
        }
    }
}

impl fmt::Display for Warmth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Warmth::Alone => "no other replicas",
            Warmth::Warming => "warming up: taking over what other replicas know of the workers' caches",
            Warmth::Ended(End::Warm) => "warm",
            Warmth::Ended(End::NoneReady) => "started cold: no other replica was ready",
            Warmth::Ended(End::SourcesLost) => {
                "started cold: each replica that was asked was lost before it had answered"
            }
            Warmth::Ended(End::TimedOut) => {
                "started cold: other replicas' knowledge of the workers' caches took longer than peers.warm_start_timeout"
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe;

    const TIMEOUT: Duration = Duration::from_secs(10);

    fn end_after(seconds: u64, progress: Progress) -> Option<End> {
        let now = observe::now();
        let start = WarmStart::new(now, TIMEOUT);
        start.end(now + Duration::from_secs(seconds), &progress)
    }

    fn warm() -> Progress {
        Progress {
            has_peers: true,
            had_ready_peer: true,
            is_fleet_known: true,
            ranks: 3,
            settled_ranks: 3,
            has_predicted: true,
            are_sources_lost: false,
        }
    }

    #[test]
    fn it_ends_when_all_is_known_and_not_before() {
        assert_eq!(end_after(1, warm()), Some(End::Warm));
        type Change = fn(&mut Progress);
        let lacking: [Change; 3] = [
            |progress| progress.is_fleet_known = false,
            |progress| progress.settled_ranks = 2,
            |progress| progress.has_predicted = false,
        ];
        for lack in lacking {
            let mut progress = warm();
            lack(&mut progress);
            assert_eq!(end_after(9, progress), None, "{progress:?}");
            assert_eq!(end_after(10, progress), Some(End::TimedOut), "{progress:?}");
        }
    }

    #[test]
    fn with_no_replica_to_ask_it_ends_at_once_but_one_that_is_asked_already_is_waited_for() {
        let none = Progress {
            has_peers: false,
            had_ready_peer: false,
            settled_ranks: 0,
            ..warm()
        };
        assert_eq!(end_after(0, none), Some(End::NoneReady));
        let lost = Progress {
            had_ready_peer: true,
            ..none
        };
        assert_eq!(end_after(0, lost), None);
        assert_eq!(end_after(10, lost), Some(End::TimedOut));
    }

    #[test]
    fn without_an_answer_of_any_replica_it_is_not_called_warm() {
        let lost = Progress {
            are_sources_lost: true,
            ..warm()
        };
        assert_eq!(end_after(1, lost), Some(End::SourcesLost));
        assert!(Warmth::Ended(End::SourcesLost).is_cold());
    }

    #[test]
    fn all_that_is_late_is_taken_when_it_comes_at_the_last_moment() {
        assert_eq!(end_after(10, warm()), Some(End::Warm));
    }

    #[test]
    fn a_status_is_read_as_it_was_set() {
        let status = WarmStartStatus::default();
        assert_eq!(status.get(), Warmth::Alone);
        for warmth in Warmth::ALL {
            status.set(warmth);
            assert_eq!(status.get(), warmth);
            assert_eq!(warmth.is_warming(), warmth == Warmth::Warming);
        }
    }
}
