//! The generic cell rate algorithm: a limit as one number, the time at which everything may be used again. Pure.
//!
//! Times are microseconds of whichever clock the caller reads. A unit costs the time in which the limit gives one
//! back, so that what is used of a limit is a time, too: `full_at - now`.

use std::time::Duration;

const MINUTE_MICROS: u64 = 60_000_000;
const DAY_MICROS: u64 = 24 * 60 * MINUTE_MICROS;

/// What is used of a limit beyond its burst ends within this time, whatever an engine reports.
pub const MAX_DEBT_MICROS: u64 = 3_600_000_000;

/// The name of the only limit of which a whole day's worth may be used at once. `charge.lua` knows it, too.
pub const DAY_LIMIT: &str = "d";

/// A limit: units in a period, and how much of it may be used at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// The limit as it is configured: of a minute, or of a day.
    pub units: u64,
    /// The time in which so many units are given back.
    period_micros: u64,
    /// As the time in which that much is given back.
    pub burst_micros: u64,
}

impl Rate {
    /// `per_minute` of 0 counts as 1.
    pub fn new(per_minute: u64, burst: Duration) -> Self {
        Self {
            units: per_minute.max(1),
            period_micros: MINUTE_MICROS,
            burst_micros: u64::try_from(burst.as_micros()).unwrap_or(u64::MAX),
        }
    }

    /// At least one unit may be used at once, however short the burst.
    pub fn with_room_for_one(self) -> Self {
        let one = self.period_micros.div_ceil(self.units);
        Self {
            burst_micros: self.burst_micros.max(one),
            ..self
        }
    }

    /// All of a day's units may be used at once. 0 of them count as 1.
    pub fn of_day(units: u64) -> Self {
        Self {
            units: units.max(1),
            period_micros: DAY_MICROS,
            burst_micros: DAY_MICROS,
        }
    }

    pub fn per_minute(&self) -> u64 {
        self.units(MINUTE_MICROS)
    }

    /// The time in which so many units are given back.
    pub fn cost(&self, units: u64) -> u64 {
        let micros = u128::from(units) * u128::from(self.period_micros);
        let per_period = u128::from(self.units);
        u64::try_from((micros + per_period / 2) / per_period).unwrap_or(u64::MAX)
    }

    /// The units that are given back in so much time.
    pub fn units(&self, micros: u64) -> u64 {
        let units = u128::from(micros) * u128::from(self.units) / u128::from(self.period_micros);
        u64::try_from(units).unwrap_or(u64::MAX)
    }

    /// What may be used at once.
    pub fn capacity(&self) -> u64 {
        self.units(self.burst_micros)
    }

    pub fn remaining(&self, used_micros: u64) -> u64 {
        self.units(self.burst_micros.saturating_sub(used_micros))
    }
}

/// How long a cost must wait for a limit of which this much is used. `None`: it need not wait.
pub fn wait(used_micros: u64, cost_micros: u64, burst_micros: u64) -> Option<u64> {
    let after = used_micros.saturating_add(cost_micros);
    (after > burst_micros).then(|| after - burst_micros)
}

/// What is used at `now` of a limit that is full at `full_at`.
pub fn used(full_at: u64, now: u64) -> u64 {
    full_at.saturating_sub(now)
}

/// The limit after a charge, or after the correction of one. `max_debt`: of [`max_debt`].
pub fn charged(full_at: u64, now: u64, micros: i64, max_debt: u64) -> u64 {
    let latest = now.saturating_add(max_debt);
    full_at.max(now).saturating_add_signed(micros).min(latest)
}

/// The most that is ever used of the limit of this name.
pub fn max_debt(limit: &str) -> u64 {
    if limit == DAY_LIMIT {
        DAY_MICROS + MAX_DEBT_MICROS
    } else {
        MAX_DEBT_MICROS
    }
}

/// Units as a signed correction.
pub fn correction(rate: &Rate, reserved: u64, used: u64) -> i64 {
    let (reserved, used) = (rate.cost(reserved), rate.cost(used));
    let signed = |micros: u64| i64::try_from(micros).unwrap_or(i64::MAX);
    signed(used).saturating_sub(signed(reserved))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000;

    fn rate(per_minute: u64, burst_s: u64) -> Rate {
        Rate::new(per_minute, Duration::from_secs(burst_s))
    }

    #[test]
    fn a_burst_is_used_at_once_and_given_back_evenly() {
        let rate = rate(600, 60);
        assert_eq!(rate.capacity(), 600);
        let mut full_at = 0;
        let now = 100 * SECOND;
        for _ in 0..600 {
            assert_eq!(
                wait(used(full_at, now), rate.cost(1), rate.burst_micros),
                None
            );
            full_at = charged(full_at, now, rate.cost(1) as i64, MAX_DEBT_MICROS);
        }
        let waits = |now| wait(used(full_at, now), rate.cost(1), rate.burst_micros);
        assert_eq!(waits(now), Some(100_000));
        assert_eq!(waits(now + 100_000), None);
        assert_eq!(rate.remaining(used(full_at, now + SECOND)), 10);
    }

    #[test]
    fn an_absurd_usage_locks_a_tenant_out_for_an_hour_at_most() {
        let absurd = |limit| charged(0, 7, i64::MAX, max_debt(limit));
        assert_eq!(absurd("t"), 7 + MAX_DEBT_MICROS);
        // Or until the next day.
        assert_eq!(absurd(DAY_LIMIT), 7 + DAY_MICROS + MAX_DEBT_MICROS);
        assert_eq!(rate(1, 60).cost(u64::MAX), u64::MAX);
        assert_eq!(correction(&rate(1, 60), 0, u64::MAX), i64::MAX);
    }

    #[test]
    fn a_day_is_used_at_once_and_given_back_evenly() {
        let rate = Rate::of_day(1_000);
        assert_eq!(rate.capacity(), 1_000);
        let all = i64::try_from(rate.cost(1_000)).unwrap();
        let full_at = charged(0, 5, all, max_debt(DAY_LIMIT));
        assert_eq!(rate.remaining(used(full_at, 5)), 0);
        assert_eq!(rate.remaining(used(full_at, 5 + DAY_MICROS / 4)), 250);
        let waits = wait(used(full_at, 5), rate.cost(500), rate.burst_micros);
        assert_eq!(waits, Some(DAY_MICROS / 2));
    }

    #[test]
    fn one_unit_fits_into_the_shortest_burst_and_a_longer_one_stays() {
        for per_minute in 1..1_000 {
            let rate = rate(per_minute, 1).with_room_for_one();
            assert_eq!(rate.capacity(), (per_minute / 60).max(1), "{per_minute}");
            assert!(rate.cost(1) <= rate.burst_micros, "{per_minute}");
        }
        assert_eq!(rate(1, 60).with_room_for_one(), rate(1, 60));
    }

    /// The plainest model: a bucket that is filled as time passes.
    struct Bucket {
        level: f64,
        capacity: f64,
        per_micro: f64,
        now: u64,
    }

    impl Bucket {
        fn advance(&mut self, now: u64) {
            let gained = (now - self.now) as f64 * self.per_micro;
            self.level = (self.level + gained).min(self.capacity);
            self.now = now;
        }
    }

    proptest! {
        /// Charges, refusals and corrections come to the same as in a bucket of tokens, up to the longest debt.
        #[test]
        fn it_decides_as_a_token_bucket_does(
            per_minute in prop::sample::select(vec![600u64, 6_000, 60_000, 600_000]),
            burst in 1u64..120,
            steps in prop::collection::vec((0u64..5 * SECOND, 0u64..2_000, 0u64..4_000, any::<bool>()), 1..60),
        ) {
            let rate = rate(per_minute, burst);
            let capacity = rate.capacity() as f64;
            let mut bucket = Bucket { level: capacity, capacity, per_micro: per_minute as f64 / 60e6, now: 0 };
            let (mut now, mut full_at) = (0, 0);
            for (pause, reserve, actual, settles) in steps {
                now += pause;
                bucket.advance(now);
                let room = bucket.level - reserve as f64;
                let waits = wait(used(full_at, now), rate.cost(reserve), rate.burst_micros);
                // Within rounding both answers are right.
                if room.abs() > 0.01 {
                    prop_assert_eq!(waits.is_none(), room > 0.0, "{} {}", room, reserve);
                }
                if waits.is_some() {
                    continue;
                }
                full_at = charged(full_at, now, rate.cost(reserve) as i64, MAX_DEBT_MICROS);
                bucket.level -= reserve as f64;
                if settles {
                    full_at = charged(full_at, now, correction(&rate, reserve, actual), MAX_DEBT_MICROS);
                    bucket.level = (bucket.level + reserve as f64 - actual as f64).min(capacity);
                }
                let level = rate.burst_micros as f64 - used(full_at, now) as f64;
                prop_assert!((level * bucket.per_micro - bucket.level).abs() < 1.0);
            }
        }
    }
}
