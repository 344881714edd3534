//! The clock of batches: that of the store, by which all replicas claim works, and by which files and batches expire.
//! With a wrong one a replica would take what others run, and delete the files of all tenants.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::observe;

/// How far the clocks of this host and the store may be apart. Clocks that are set by NTP differ by less, and an upload
/// that is not confirmed is deleted after an hour.
const MAX_DIFFERENCE: Duration = Duration::from_secs(300);

/// The store's clock, as it was when it was compared last, and went on since by the time that passed in this process. A
/// jump of either clock changes it only once both agree again.
#[derive(Clone, Debug)]
pub(super) struct Clock {
    /// This host's clock, in Unix milliseconds.
    host_ms: fn() -> u64,
    since: Instant,
    compared: Arc<Compared>,
}

#[derive(Debug)]
struct Compared {
    /// What the store's clock showed at `Clock::since`, in Unix milliseconds. 0 before the first comparison.
    since_ms: AtomicU64,
    /// Whether this host's clock was that of the store when they were compared last.
    is_right: AtomicBool,
}

impl Clock {
    pub(super) fn new(host_ms: fn() -> u64) -> Self {
        Self {
            host_ms,
            since: observe::now(),
            compared: Arc::new(Compared {
                since_ms: AtomicU64::new(0),
                is_right: AtomicBool::new(true),
            }),
        }
    }

    /// Unix milliseconds.
    pub(super) fn now_ms(&self) -> u64 {
        match self.compared.since_ms.load(Relaxed) {
            0 => (self.host_ms)(),
            since_ms => since_ms.saturating_add(self.passed_ms()),
        }
    }

    /// Unix seconds.
    pub(super) fn now_s(&self) -> i64 {
        (self.now_ms() / 1_000) as i64
    }

    /// Whether it was compared at all: before, the time is this host's.
    pub(super) fn is_compared(&self) -> bool {
        self.compared.since_ms.load(Relaxed) != 0
    }

    /// Whether the clock was right when it was compared last.
    pub(super) fn is_right(&self) -> bool {
        self.compared.is_right.load(Relaxed)
    }

    /// How far this host's clock is from that of the store, if that is too far.
    pub(super) fn compare(&self, of_store_ms: u64) -> Result<(), Duration> {
        let difference = Duration::from_millis((self.host_ms)().abs_diff(of_store_ms));
        let is_right = difference <= MAX_DIFFERENCE;
        self.compared.is_right.store(is_right, Relaxed);
        if is_right || self.compared.since_ms.load(Relaxed) == 0 {
            let since_ms = of_store_ms.saturating_sub(self.passed_ms());
            self.compared.since_ms.store(since_ms, Relaxed);
        }
        if is_right { Ok(()) } else { Err(difference) }
    }

    fn passed_ms(&self) -> u64 {
        let passed = observe::now().saturating_duration_since(self.since);
        u64::try_from(passed.as_millis()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static HOST_MS: AtomicU64 = AtomicU64::new(0);

    #[test]
    fn the_time_is_that_of_the_store_and_jumps_only_with_both_clocks() {
        const HOUR_MS: u64 = 3_600_000;
        let start_ms = 500_000 * HOUR_MS;
        HOST_MS.store(start_ms, Relaxed);
        let clock = Clock::new(|| HOST_MS.load(Relaxed));
        let is_about = |expected_ms: u64| clock.now_ms().abs_diff(expected_ms) < HOUR_MS / 2;
        assert!(is_about(start_ms) && clock.is_right() && !clock.is_compared());
        // It starts with a wrong clock.
        let store_ms = start_ms - 5 * HOUR_MS;
        assert!(clock.compare(store_ms).is_err() && !clock.is_right());
        assert!(is_about(store_ms) && clock.is_compared());
        HOST_MS.store(store_ms + 60_000, Relaxed);
        assert_eq!(clock.compare(store_ms), Ok(()));
        assert!(clock.is_right() && clock.now_ms() < store_ms + 60_000);
        // One jumps, then the other.
        let later_ms = store_ms + 2 * HOUR_MS;
        HOST_MS.store(later_ms, Relaxed);
        assert!(is_about(store_ms));
        assert!(clock.compare(store_ms).is_err() && is_about(store_ms));
        assert_eq!(clock.compare(later_ms), Ok(()));
        assert!(is_about(later_ms));
    }
}
