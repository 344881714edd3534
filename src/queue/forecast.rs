//! How long requests will wait and be computed, by what waits, what the workers have, and how fast they were. Pure.

use std::time::Duration;

use super::class::Class;
use super::estimate::DrainRate;
use super::floors::Floor;
use super::types::{RefusalReason, Room};
use crate::ids::ClientKey;

const RETRY_AFTER_MIN: Duration = Duration::from_secs(1);
const RETRY_AFTER_MAX: Duration = Duration::from_secs(30);

/// What is known at one moment.
#[derive(Debug)]
pub(super) struct Forecast<'a> {
    /// Highest first, as `floors`.
    pub(super) classes: &'a [Class],
    pub(super) floors: &'a [Floor],
    pub(super) room: &'a Room,
    pub(super) rate: &'a DrainRate,
}

impl Forecast<'_> {
    /// How long a new request would wait here, if no other came, by how fast requests left while all workers were busy. `None`
    /// before that was measured.
    pub(super) fn wait(&self, class: usize, client: ClientKey, cost: u64) -> Option<Duration> {
        let rate = self.rate.measured()? * f64::from(self.room.workers.max(1));
        let own = self.classes[class].tokens_before(client, cost) as f64;
        let higher: u64 = self.classes[..class].iter().map(|class| class.tokens).sum();
        let lower = self.classes.iter().zip(self.floors).skip(class + 1);
        let lower = lower.filter(|(class, _)| !class.is_empty());
        let lower: f64 = lower.map(|(_, floor)| floor.min_share).sum();
        let in_order = (higher as f64 + own) / (1.0 - lower).max(0.01);
        let by_floor = own / self.floors[class].min_share.max(1e-6);
        Some(seconds(in_order.min(by_floor).max(own) / rate))
    }

    /// How long a request would be at a worker until its first token, by what was learnt of how fast workers compute prompts.
    pub(super) fn compute(&self, cost: u64) -> Duration {
        let queued = self.room.queued_tokens as f64 / f64::from(self.room.workers.max(1));
        seconds((queued + cost as f64) / self.room.rate.max(1) as f64)
    }

    /// When a refused client should come back.
    pub(super) fn retry_after(&self, reason: RefusalReason, class: usize) -> Duration {
        let rate = self.rate.of_worker(self.room.rate);
        let rate = rate * f64::from(self.room.workers.max(1));
        let higher: u64 = self.classes[..=class]
            .iter()
            .map(|class| class.tokens)
            .sum();
        let delay = match reason {
            // Until what is too late has been computed.
            RefusalReason::TargetUnreachable { target, expected } => {
                expected.saturating_sub(target)
            }
            RefusalReason::TooManyRequests { .. }
            | RefusalReason::TooManyBytes { .. }
            | RefusalReason::MemoryNeeded => {
                // Until a quarter of it has left.
                seconds(higher as f64 / rate / 4.0)
            }
            RefusalReason::TimedOut { .. } => seconds(higher as f64 / rate),
            RefusalReason::NoWorker { .. } | RefusalReason::Draining => RETRY_AFTER_MIN,
        };
        delay.clamp(RETRY_AFTER_MIN, RETRY_AFTER_MAX)
    }
}

/// At most a day: also for nothing at a rate of 0, which is no number.
fn seconds(seconds: f64) -> Duration {
    const DAY: Duration = Duration::from_secs(86_400);
    Duration::try_from_secs_f64(seconds).map_or(DAY, |duration| duration.min(DAY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_that_is_no_number_is_a_day() {
        let day = Duration::from_secs(86_400);
        for long in [f64::NAN, f64::INFINITY, 1e300, 86_401.0] {
            assert_eq!(seconds(long), day, "{long}");
        }
        assert_eq!(seconds(1.5), Duration::from_millis(1_500));
        assert_eq!(seconds(0.0), Duration::ZERO);
    }
}
