//! The time weights of a model's workers, from their prefill rates. Pure.

use std::ops::RangeInclusive;

/// Of the mean rate divided by a worker's. More is no difference of hardware.
pub const BOUNDS: RangeInclusive<f64> = 1.0 / 8.0..=8.0;
/// Of that ratio, in the weight. With 1 the fast workers get so many prompts that their caches are too small for them: over
/// Mooncake's synthetic trace at 1.5, 2 and 2.5 times its rate, workers of 1:4, the mean TTFT is 3, 7 and 5 % longer.
const EXPONENT: f64 = 0.7;
/// Workers that differ by less from the mean count as equal. What is learnt of equal workers differs by a few percent, by
/// the lengths of their prompts.
const DEADBAND: f64 = 1.2;
/// A weight stays while the new one is within this factor of it, so that choices do not change back and forth.
pub const HYSTERESIS: f64 = 1.1;

/// By worker, from its rate, if it is known, and its time weight so far. A worker of unknown rate counts as the mean.
pub fn compare(workers: &[(Option<f64>, f64)]) -> Vec<f64> {
    let known = || workers.iter().filter_map(|(rate, _)| *rate);
    let mean = known().sum::<f64>() / known().count().max(1) as f64;
    let weight = |(rate, before): &(Option<f64>, f64)| {
        let Some(rate) = rate else { return 1.0 };
        let time = mean / rate;
        if !time.is_finite() {
            return 1.0;
        }
        let is_within = |factor: f64| (1.0 / factor..=factor).contains(&time);
        let weight = time.clamp(*BOUNDS.start(), *BOUNDS.end()).powf(EXPONENT);
        match *before {
            1.0 if is_within(DEADBAND) => 1.0,
            // A worker that counted as different must come nearer to count as equal.
            _ if is_within(DEADBAND / HYSTERESIS) => 1.0,
            before if before != 1.0 && is_near(weight, before) => before,
            _ => weight,
        }
    };
    workers.iter().map(weight).collect()
}

/// Whether a value is so near to the one before that the one before stays.
pub fn is_near(weight: f64, before: f64) -> bool {
    (before / HYSTERESIS..=before * HYSTERESIS).contains(&weight)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(rates: &[Option<f64>], expected: &[f64]) {
        let workers: Vec<_> = rates.iter().map(|rate| (*rate, 1.0)).collect();
        let expected: Vec<f64> = expected.iter().map(|time| time.powf(EXPONENT)).collect();
        assert_eq!(compare(&workers), expected, "{rates:?}");
    }

    #[test]
    fn a_weight_is_by_the_mean_rate_divided_by_the_own() {
        let known = |rates: [f64; 2]| rates.map(Some);
        check(&known([4_000.0, 16_000.0]), &[2.5, 0.625]);
        check(&[Some(4_000.0), Some(16_000.0), None], &[2.5, 0.625, 1.0]);
        check(&[None, Some(16_000.0)], &[1.0, 1.0]);
        check(&[], &[]);
        check(&known([1.0, 100_000.0]), &[8.0, 0.500005]);
        check(&known([0.0, 1.0]), &[1.0, 0.5]);
    }

    #[test]
    fn workers_of_nearly_one_speed_count_as_equal() {
        check(&[Some(9_000.0), Some(11_000.0)], &[1.0, 1.0]);
        check(&[Some(10_000.0), Some(10_000.0)], &[1.0, 1.0]);
    }

    #[test]
    fn a_weight_stays_while_it_hardly_changes() {
        let after = |rate: f64, before: f64| {
            let both = [(Some(rate), before), (Some(2.0 - rate), 1.0)];
            compare(&both)[0]
        };
        let half = 2.0_f64.powf(EXPONENT);
        assert_eq!(after(0.5, half * 1.05), half * 1.05);
        assert_eq!(after(0.5, half * 1.15), half);
        // 1 / 0.86 is within the deadband; one that was slower stays so until it is nearly equal.
        assert_eq!(after(0.86, 1.0), 1.0);
        assert_eq!(after(0.86, 1.15), 1.15);
        assert_eq!(after(0.95, 1.15), 1.0);
    }

    proptest! {
        #[test]
        fn weights_are_bounded_and_settle(
            workers in proptest::collection::vec((proptest::option::of(any::<f64>()), 0.25f64..4.0), 0..20),
        ) {
            let first = compare(&workers);
            for weight in &first {
                prop_assert!(BOUNDS.contains(weight), "{weight}");
            }
            let again: Vec<_> = workers.iter().zip(&first).map(|((rate, _), weight)| (*rate, *weight)).collect();
            prop_assert_eq!(compare(&again), first);
        }
    }
}
