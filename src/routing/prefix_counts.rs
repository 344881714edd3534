//! How many requests had a prefix in common lately. A fixed table, written and read without a lock.

use std::fmt;
use std::num::NonZeroU64;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use crate::ids::Block;

/// Prefixes that are counted at the same time. A conversation is asked for once in some seconds and gives its place up; the
/// others are prompts of applications, of which a model has some tens.
const PREFIXES: usize = 1_024;

/// After this many seconds a request counts for about a third.
const KEPT_SECONDS: f64 = 5.0;

/// The requests of the last seconds by the longest prefix of theirs that a worker had cached.
pub struct PrefixCounts {
    began: Instant,
    slots: Box<[AtomicU64]>,
}

/// Parts of a request that the table tells apart.
const PARTS: f64 = 64.0;

/// Threads that read the clock just before a second ends may write after others that read it later.
const LATE_SECONDS_MAX: u16 = 60;

/// Names the prefix of so many tokens, as far as they are whole blocks of text.
pub fn key(blocks: &[Block], tokens: u32) -> Option<NonZeroU64> {
    let whole = blocks.partition_point(|block| block.end_tokens <= tokens);
    NonZeroU64::new(blocks[whole.checked_sub(1)?].path.0)
}

/// One prefix in its place of the table.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Slot {
    /// Tells prefixes of the same place apart.
    tag: u16,
    /// The second in which one was last counted, modulo 65,536.
    second: u16,
    /// Requests of that second.
    now: u16,
    /// Requests of the seconds before, in parts of [`PARTS`].
    before: u16,
}

impl PrefixCounts {
    pub fn new(began: Instant) -> Self {
        Self {
            began,
            slots: (0..PREFIXES).map(|_| AtomicU64::default()).collect(),
        }
    }

    /// Counts a request. `prefix`: a hash of the prefix.
    pub fn count(&self, now: Instant, prefix: NonZeroU64) {
        let (slot, tag) = self.slot(prefix);
        let second = self.second(now);
        // What other threads counted meanwhile is lost: these are some requests more or less.
        let counted = Slot::of(slot.load(Relaxed)).count(second, tag);
        slot.store(counted.bits(), Relaxed);
    }

    /// The requests before this second, each the less the longer ago. Those of this second do not count: prompts that come all at
    /// once, and no more after that, need no copies (unless a second ends just then).
    pub fn requests(&self, now: Instant, prefix: NonZeroU64) -> f64 {
        let (slot, tag) = self.slot(prefix);
        let slot = Slot::of(slot.load(Relaxed));
        if slot.tag == tag {
            slot.before(self.second(now))
        } else {
            0.0
        }
    }

    fn slot(&self, prefix: NonZeroU64) -> (&AtomicU64, u16) {
        let prefix = prefix.get();
        // A tag of 0 is that of an empty place.
        let tag = (prefix >> 48) as u16 | 1;
        (&self.slots[prefix as usize % PREFIXES], tag)
    }

    fn second(&self, now: Instant) -> u16 {
        now.saturating_duration_since(self.began).as_secs() as u16
    }
}

impl Slot {
    fn of(bits: u64) -> Self {
        Self {
            tag: (bits >> 48) as u16,
            second: (bits >> 32) as u16,
            now: (bits >> 16) as u16,
            before: bits as u16,
        }
    }

    fn bits(self) -> u64 {
        let high = u64::from(self.tag) << 48 | u64::from(self.second) << 32;
        high | u64::from(self.now) << 16 | u64::from(self.before)
    }

    /// Seconds from the one in which it was last counted to another.
    fn elapsed(self, second: u16) -> u16 {
        let elapsed = second.wrapping_sub(self.second);
        if elapsed > u16::MAX - LATE_SECONDS_MAX {
            0
        } else {
            elapsed
        }
    }

    /// The requests before a second.
    fn before(self, second: u16) -> f64 {
        let before = f64::from(self.before) / PARTS;
        match self.elapsed(second) {
            0 => before,
            seconds => (before + f64::from(self.now)) * (-f64::from(seconds) / KEPT_SECONDS).exp(),
        }
    }

    /// With one request more. A prefix of which less than one request is left gives its place to another.
    fn count(self, second: u16, tag: u16) -> Self {
        let before = self.before(second);
        let (latest, now) = match self.elapsed(second) {
            0 => (self.second, self.now),
            _ => (second, 0),
        };
        if self.tag == tag {
            Self {
                tag,
                second: latest,
                now: now.saturating_add(1),
                before: (before * PARTS).round() as u16,
            }
        } else if before + f64::from(now) < 1.0 {
            Self {
                tag,
                second,
                now: 1,
                before: 0,
            }
        } else {
            self
        }
    }
}

impl fmt::Debug for PrefixCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrefixCounts").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::observe;

    const PREFIX: NonZeroU64 = NonZeroU64::new(0x1234_0000_0000_0007).unwrap();
    /// At the same place of the table.
    const OTHER: NonZeroU64 = NonZeroU64::new(0x0234_0000_0000_0007).unwrap();
    /// At the place beside it.
    const BESIDE: NonZeroU64 = NonZeroU64::new(0x1234_0000_0000_0008).unwrap();

    #[test]
    fn the_requests_of_a_second_count_from_the_next_one_on_and_fade() {
        let began = observe::now();
        let counts = PrefixCounts::new(began);
        let at = |millis| began + Duration::from_millis(millis);
        for _ in 0..10 {
            counts.count(at(300), PREFIX);
        }
        assert_eq!(counts.requests(at(999), PREFIX), 0.0);
        let after = |seconds: u64| counts.requests(at(1_000 * seconds), PREFIX);
        assert!((after(1) - 10.0 * (-0.2_f64).exp()).abs() < 0.1);
        assert!((after(5) - 10.0 * (-1.0_f64).exp()).abs() < 0.1);
        assert!(after(60) < 0.1);
        // Of another prefix at the same place nothing is known.
        assert_eq!(counts.requests(at(1_000), OTHER), 0.0);
        assert_eq!(counts.requests(at(1_000), BESIDE), 0.0);
    }

    #[test]
    fn a_thread_that_is_late_takes_nothing_away() {
        let began = observe::now();
        let counts = PrefixCounts::new(began);
        let at = |seconds| began + Duration::from_secs(seconds);
        for second in [1, 1, 2, 1, 2] {
            counts.count(at(second), PREFIX);
        }
        let before = 2.0 * (-0.2_f64).exp();
        let left = (before + 3.0) * (-0.2_f64).exp();
        assert!((counts.requests(at(3), PREFIX) - left).abs() < 0.05);
        assert!((counts.requests(at(1), PREFIX) - counts.requests(at(2), PREFIX)).abs() < 1e-9);
    }

    #[test]
    fn a_prefix_that_comes_all_the_time_keeps_its_place_and_one_that_came_once_gives_it_up() {
        let began = observe::now();
        let counts = PrefixCounts::new(began);
        let at = |seconds| began + Duration::from_secs(seconds);
        for second in 0..30 {
            for _ in 0..3 {
                counts.count(at(second), PREFIX);
            }
            counts.count(at(second), OTHER);
        }
        // 3 a second: 3 / (e^0.2 - 1).
        assert!((counts.requests(at(30), PREFIX) - 13.5).abs() < 0.7);
        assert_eq!(counts.requests(at(30), OTHER), 0.0);
        counts.count(at(60), OTHER);
        assert_eq!(counts.requests(at(61), PREFIX), 0.0);
        assert!(counts.requests(at(61), OTHER) > 0.8);
    }

    proptest! {
        /// Against the plainest model: the sum of what is left of each request.
        #[test]
        fn a_count_is_the_sum_of_its_requests_each_the_less_the_longer_ago(
            seconds in prop::collection::vec(0u64..40, 0..200), asked in 0u64..60,
        ) {
            let mut seconds = seconds;
            seconds.sort_unstable();
            seconds.retain(|second| *second <= asked);
            let began = observe::now();
            let counts = PrefixCounts::new(began);
            let at = |second| began + Duration::from_secs(second);
            for second in &seconds {
                counts.count(at(*second), PREFIX);
            }
            let before = seconds.iter().filter(|second| **second < asked);
            let left = before.map(|second| (-((asked - second) as f64) / KEPT_SECONDS).exp());
            let expected: f64 = left.sum();
            let found = counts.requests(at(asked), PREFIX);
            prop_assert!((found - expected).abs() < 0.1 + expected * 0.05, "{found} {expected}");
        }
    }
}
