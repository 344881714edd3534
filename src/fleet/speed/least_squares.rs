//! Recursive least squares with forgetting, for the constants of a step. Pure.

/// What a constant may be of its start, down and up. More is no difference of hardware and model, but a defect.
const FACTOR: f64 = 50.0;
/// How far off the starts are taken to be: their standard deviation as a part of them.
const DOUBT: f64 = 0.7;
/// What an earlier observation counts of the next one: 200 observations are most of what is known.
const KEEP: f64 = 0.995;
/// The standard deviation of an observation, as a part of it.
const NOISE: f64 = 0.1;
/// And besides in seconds: network, scheduling, the step that ran when a request came. What took a few milliseconds shows
/// little.
const NOISE_SECONDS: f64 = 0.02;
/// The most that a constant's doubt grows to while no observation tells of it, in parts of its start.
const MAX_DOUBT: f64 = 2.0;

/// How many constants there are.
pub(super) const N: usize = 4;

/// The last constant is taken away from the others: it is 0 at its start, and may stay 0.
const TAKEN: usize = 3;

/// Learns `x` such that `row . x` is 1.
#[derive(Clone, Debug)]
pub(super) struct LeastSquares {
    /// Where each constant starts; of the last, which starts at 0, what it is measured by.
    start: [f64; N],
    pub(super) x: [f64; N],
    covariance: [[f64; N]; N],
}

impl LeastSquares {
    pub(super) fn new(start: [f64; N]) -> Self {
        let mut covariance = [[0.0; N]; N];
        for (index, value) in start.iter().enumerate() {
            covariance[index][index] = (value * DOUBT).powi(2);
        }
        let mut x = start;
        x[TAKEN] = 0.0;
        Self {
            start,
            x,
            covariance,
        }
    }

    /// Goes on from other values, with the doubt of a start.
    pub(super) fn set(&mut self, x: [f64; N]) {
        let fresh = Self::new(self.start);
        self.covariance = fresh.covariance;
        self.x = std::array::from_fn(|index| self.bounded(index, x[index]));
    }

    /// An observation that took so many seconds, divided by them.
    pub(super) fn observe(&mut self, row: [f64; N], seconds: f64) {
        let of_row = |other: &[f64; N]| -> f64 {
            let products = other.iter().zip(&row).map(|(left, right)| left * right);
            products.sum()
        };
        let spread: [f64; N] = std::array::from_fn(|index| of_row(&self.covariance[index]));
        let noise = NOISE + NOISE_SECONDS / seconds;
        let total = noise * noise + of_row(&spread);
        let error = 1.0 - of_row(&self.x);
        if !(total.is_finite() && error.is_finite()) {
            return;
        }
        self.x = std::array::from_fn(|index| {
            self.bounded(index, self.x[index] + spread[index] / total * error)
        });
        for (left, of_left) in self.covariance.iter_mut().zip(&spread) {
            for (value, of_right) in left.iter_mut().zip(&spread) {
                *value = (*value - of_left * of_right / total) / KEEP;
            }
        }
        let shrink: [f64; N] = std::array::from_fn(|index| {
            let most = (self.start[index] * MAX_DOUBT).powi(2);
            (most / self.covariance[index][index].max(f64::MIN_POSITIVE))
                .sqrt()
                .min(1.0)
        });
        for (left, by_left) in self.covariance.iter_mut().zip(&shrink) {
            for (value, by_right) in left.iter_mut().zip(&shrink) {
                *value *= by_left * by_right;
            }
        }
    }

    fn bounded(&self, index: usize, value: f64) -> f64 {
        let start = self.start[index];
        let (least, first) = if index == TAKEN {
            (0.0, 0.0)
        } else {
            (start / FACTOR, start)
        };
        if value.is_nan() {
            return first;
        }
        value.clamp(least, start * FACTOR)
    }
}
