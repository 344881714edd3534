//! The workers of a model, by how long each takes for a token. Pure.

use crate::fleet::prefill_rate::{BOUNDS, HYSTERESIS, is_near};

/// Workers that take less than this many times as long as the fastest of their model count as equally fast: a larger batch
/// of the same engine takes that much longer.
const DEADBAND: f64 = 1.5;

/// By worker, from the time that it takes for a token, if it is known, and its value so far: how many times as long as the
/// fastest it takes. 1 for one that is nearly as fast, and for one of which nothing is known.
pub fn compare(workers: &[(Option<f64>, f64)]) -> Vec<f64> {
    let known = workers.iter().filter_map(|(time, _)| *time);
    let fastest = known.fold(f64::INFINITY, f64::min);
    let of = |(time, before): &(Option<f64>, f64)| {
        let times = time.map_or(1.0, |time| time / fastest);
        if !times.is_finite() {
            return 1.0;
        }
        let times = times.clamp(1.0, *BOUNDS.end());
        // A worker that counted as slower must come nearer to count as equal.
        let limit = match *before > 1.0 {
            true => DEADBAND / HYSTERESIS,
            false => DEADBAND,
        };
        match times {
            times if times < limit => 1.0,
            times if *before > 1.0 && is_near(times, *before) => *before,
            times => times,
        }
    };
    workers.iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn workers_are_compared_with_the_fastest() {
        let check = |times: &[Option<f64>], expected: &[f64]| {
            let workers: Vec<_> = times.iter().map(|time| (*time, 1.0)).collect();
            assert_eq!(compare(&workers), expected, "{times:?}");
        };
        check(&[Some(0.01), Some(0.04), None], &[1.0, 4.0, 1.0]);
        check(&[Some(0.01), Some(0.014)], &[1.0, 1.0]);
        check(&[None, Some(0.04)], &[1.0, 1.0]);
        check(&[Some(0.001), Some(10.0)], &[1.0, 8.0]);
        check(&[], &[]);
        let after = |time: f64, before: f64| compare(&[(Some(1.0), 1.0), (Some(time), before)])[1];
        assert_eq!(after(2.0, 1.9), 1.9);
        assert_eq!(after(2.0, 3.0), 2.0);
        assert_eq!(after(1.45, 1.0), 1.0);
        assert_eq!(after(1.45, 1.55), 1.55);
        assert_eq!(after(1.3, 1.6), 1.0);
    }

    proptest! {
        #[test]
        fn values_are_bounded_and_settle(
            workers in proptest::collection::vec((proptest::option::of(any::<f64>()), 1.0f64..8.0), 0..20),
        ) {
            let first = compare(&workers);
            for time in &first {
                prop_assert!((1.0..=*BOUNDS.end()).contains(time), "{time}");
            }
            let again: Vec<_> = workers.iter().zip(&first).map(|((time, _), value)| (*time, *value)).collect();
            prop_assert_eq!(compare(&again), first);
        }
    }
}
