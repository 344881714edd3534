//! How fast the workers of a model compute prompts, measured while all of them are busy.

use std::time::{Duration, Instant};

use super::types::Room;

/// Over which time the rate is averaged.
const MEMORY: Duration = Duration::from_secs(10);
/// Before so much time with all workers busy was seen the rate is the assumed one.
const SEEN_MIN: Duration = Duration::from_millis(500);
/// A longer time between two calls is not measured: it is unknown whether all workers were busy.
const GAP_MAX: Duration = Duration::from_millis(500);

/// Tokens a second of a worker of which nothing is known: a middle-sized model on one GPU.
const ASSUMED_RATE: u64 = 12_000;

/// Tokens a second and worker.
#[derive(Debug, Default)]
pub(super) struct DrainRate {
    last: Option<Last>,
    tokens: f64,
    worker_seconds: f64,
    seconds: f64,
}

#[derive(Clone, Copy, Debug)]
struct Last {
    at: Instant,
    computed: u64,
    workers: u32,
    counted_workers: u64,
}

impl Last {
    /// Whether the same workers have computed what was computed since.
    fn is_before(&self, next: &Self) -> bool {
        let is_of_same = self.counted_workers == next.counted_workers;
        is_of_same && self.workers == next.workers && self.computed <= next.computed
    }
}

impl DrainRate {
    /// `computed` counts the tokens that the workers have computed so far. `is_busy`: all workers are busy and requests
    /// wait.
    pub(super) fn update(&mut self, now: Instant, computed: u64, room: &Room, is_busy: bool) {
        let current = Last {
            at: now,
            computed,
            workers: room.workers,
            counted_workers: room.counted_workers,
        };
        let last = self.last.replace(current);
        if !is_busy || room.counted_workers == 0 {
            self.last = None;
        }
        let Some(last) = last.filter(|last| last.is_before(&current)) else {
            return;
        };
        let seconds = now.saturating_duration_since(last.at).as_secs_f64();
        if seconds <= 0.0 || seconds > GAP_MAX.as_secs_f64() {
            return;
        }
        let kept = (-seconds / MEMORY.as_secs_f64()).exp();
        self.tokens = self.tokens * kept + (computed - last.computed) as f64;
        self.worker_seconds = self.worker_seconds * kept + seconds * f64::from(room.workers);
        self.seconds = self.seconds * kept + seconds;
    }

    /// Tokens that one worker computes in a second: as measured, or else as learnt of each of them.
    pub(super) fn of_worker(&self, learnt: u64) -> f64 {
        match (self.measured(), learnt) {
            (Some(rate), _) => rate,
            (None, 0) => ASSUMED_RATE as f64,
            (None, learnt) => learnt as f64,
        }
    }

    pub(super) fn measured(&self) -> Option<f64> {
        let is_known = self.seconds >= SEEN_MIN.as_secs_f64() && self.tokens > 0.0;
        is_known.then(|| self.tokens / self.worker_seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe;

    const TWO: Room = Room {
        workers: 2,
        counted_workers: 1,
        is_full: true,
        others_have_room: false,
        queued_tokens: 0,
        rate: 0,
    };

    #[test]
    fn what_a_worker_computed_before_it_took_the_place_of_another_is_no_rate() {
        let start = observe::now();
        let mut rate = DrainRate::default();
        let replaced = Room {
            counted_workers: 2,
            ..TWO
        };
        // As many workers as before, of which one computed a million tokens elsewhere.
        for step in 0..200 {
            let (room, before) = match step {
                0..100 => (TWO, 0),
                _ => (replaced, 1_000_000),
            };
            let now = start + Duration::from_millis(step * 10);
            rate.update(now, before + step * 100, &room, true);
        }
        let measured = rate.of_worker(7);
        assert!((4_900.0..5_100.0).contains(&measured), "{measured}");
    }

    /// Else requests with a target would be refused after a pause, as if the workers had become slow.
    #[test]
    fn a_time_without_a_counted_worker_changes_no_rate() {
        let start = observe::now();
        let mut rate = DrainRate::default();
        let paused = Room {
            counted_workers: 0,
            ..TWO
        };
        for step in 0..1_000 {
            let (room, computed) = match step {
                0..200 => (TWO, step * 100),
                _ => (paused, 0),
            };
            let now = start + Duration::from_millis(step * 10);
            rate.update(now, computed, &room, true);
        }
        let measured = rate.of_worker(7);
        assert!((4_900.0..5_100.0).contains(&measured), "{measured}");
    }

    #[test]
    fn the_rate_is_that_of_the_busy_times() {
        let start = observe::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut rate = DrainRate::default();
        assert_eq!(rate.of_worker(7), 7.0);
        // 2 workers, 100 tokens in 10 ms: 5,000 tokens a second and worker.
        for step in 0..200 {
            rate.update(at(step * 10), step * 100, &TWO, true);
        }
        let measured = rate.of_worker(7);
        assert!((4_900.0..5_100.0).contains(&measured), "{measured}");
        // Idle times and pauses of the caller change nothing.
        rate.update(at(3_000), 20_000, &TWO, true);
        rate.update(at(3_010), 20_000, &TWO, false);
        rate.update(at(3_200), 20_000, &TWO, false);
        let after = rate.of_worker(7);
        assert!((4_800.0..5_100.0).contains(&after), "{after}");
    }
}
