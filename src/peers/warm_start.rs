//! When a replica that starts has taken over what others know, or waits no longer for it. Pure.

use std::fmt;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::Relaxed;

use crate::observe::metrics::words;

/// What is known at one moment of the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Another replica is ready, or may be soon.
    pub has_peers: bool,
    /// Another replica was ready at some moment.
    pub had_ready_peer: bool,
    /// The workers and what they serve are known.
    pub is_fleet_known: bool,
    /// Ranks whose KV events are followed, and those of which all is known that is to be known soon. Neither has ranks
    /// of workers that are down.
    pub ranks: usize,
    pub settled_ranks: usize,
    /// Predicted blocks were taken over, or no replica has any.
    pub has_predicted: bool,
    /// No replica that was asked has answered to the end: each was lost before.
    pub are_sources_lost: bool,
}

words! {
    /// What a router says of its start.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Warmth {
        /// There are no other replicas to ask.
        Alone = "alone",
        /// Not ready yet.
        Warming = "warming",
        /// What other replicas know is known here.
        Warm = "warm",
        /// No other replica was ready.
        NoneReady = "none_ready",
        /// Each replica that was asked was lost before it had answered.
        SourcesLost = "sources_lost",
        /// It took too long.
        TimedOut = "timed_out",
    }
}

impl Progress {
    /// How the start ended, if it has. `is_late`: it has taken as long as it may.
    pub fn end(&self, is_late: bool) -> Option<Warmth> {
        let is_settled = self.settled_ranks >= self.ranks;
        if !self.has_peers && !self.had_ready_peer {
            Some(Warmth::NoneReady)
        } else if self.is_fleet_known && is_settled && self.has_predicted {
            if self.are_sources_lost {
                Some(Warmth::SourcesLost)
            } else {
                Some(Warmth::Warm)
            }
        } else {
            is_late.then_some(Warmth::TimedOut)
        }
    }
}

/// What readiness and operators see of the start: at first [`Warmth::Alone`].
#[derive(Debug, Default)]
pub struct WarmStartStatus(AtomicU8);

impl WarmStartStatus {
    pub fn set(&self, warmth: Warmth) {
        self.0.store(warmth as u8, Relaxed);
    }

    pub fn get(&self) -> Warmth {
        Warmth::ALL[usize::from(self.0.load(Relaxed))]
    }
}

impl Warmth {
    /// Whether the caches' contents were not taken over though there are other replicas.
    pub fn is_cold(self) -> bool {
        matches!(
            self,
            Warmth::NoneReady | Warmth::SourcesLost | Warmth::TimedOut
        )
    }
}

impl fmt::Display for Warmth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Warmth::Alone => "no other replicas",
            Warmth::Warming => "warming up: taking over what other replicas know of the workers' caches",
            Warmth::Warm => "warm",
            Warmth::NoneReady => "started cold: no other replica was ready",
            Warmth::SourcesLost => {
                "started cold: each replica that was asked was lost before it had answered"
            }
            Warmth::TimedOut => {
                "started cold: other replicas' knowledge of the workers' caches took longer than peers.warm_start_timeout"
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(warm().end(false), Some(Warmth::Warm));
        type Change = fn(&mut Progress);
        let lacking: [Change; 3] = [
            |progress| progress.is_fleet_known = false,
            |progress| progress.settled_ranks = 2,
            |progress| progress.has_predicted = false,
        ];
        for lack in lacking {
            let mut progress = warm();
            lack(&mut progress);
            assert_eq!(progress.end(false), None, "{progress:?}");
            assert_eq!(progress.end(true), Some(Warmth::TimedOut), "{progress:?}");
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
        assert_eq!(none.end(false), Some(Warmth::NoneReady));
        let lost = Progress {
            had_ready_peer: true,
            ..none
        };
        assert_eq!(lost.end(false), None);
        assert_eq!(lost.end(true), Some(Warmth::TimedOut));
    }

    #[test]
    fn without_an_answer_of_any_replica_it_is_not_called_warm() {
        let lost = Progress {
            are_sources_lost: true,
            ..warm()
        };
        assert_eq!(lost.end(false), Some(Warmth::SourcesLost));
        assert!(Warmth::SourcesLost.is_cold());
    }

    #[test]
    fn all_that_is_late_is_taken_when_it_comes_at_the_last_moment() {
        assert_eq!(warm().end(true), Some(Warmth::Warm));
    }

    #[test]
    fn a_status_is_read_as_it_was_set() {
        let status = WarmStartStatus::default();
        assert_eq!(status.get(), Warmth::Alone);
        for warmth in Warmth::ALL {
            status.set(warmth);
            assert_eq!(status.get(), warmth);
        }
    }
}
