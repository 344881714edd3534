//! Which requests are traced. Pure.

use super::context::TraceContext;

/// Half of all trace ids' lower 8 bytes begin with a 0 bit: the share is taken of 63 bits, as OpenTelemetry's own
/// samplers do, so that all services decide the same of a trace.
const ALL: u64 = 1 << 63;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampler {
    /// Trace ids below are sampled.
    threshold: u64,
    /// A request with a trace context is sampled if its parent is.
    is_parent_based: bool,
}

impl Sampler {
    /// `ratio` is between 0 and 1.
    pub fn new(ratio: f64, is_parent_based: bool) -> Self {
        let threshold = match ratio {
            ratio if ratio >= 1.0 => ALL,
            // Neither negative numbers nor NaN.
            ratio if ratio > 0.0 => (ratio * ALL as f64) as u64,
            _ => 0,
        };
        Self {
            threshold,
            is_parent_based,
        }
    }

    /// The trace id of a request, if it is sampled. `random` is asked for a number only if one is needed.
    pub fn sample(
        &self,
        parent: Option<&TraceContext>,
        random: impl FnOnce() -> u128,
    ) -> Option<u128> {
        match parent {
            Some(parent) if self.is_parent_based => parent.is_sampled.then_some(parent.trace_id),
            Some(parent) => self.takes(parent.trace_id).then_some(parent.trace_id),
            None if self.threshold == 0 => None,
            None => {
                let id = random().max(1);
                self.takes(id).then_some(id)
            }
        }
    }

    fn takes(&self, trace_id: u128) -> bool {
        (trace_id as u64) >> 1 < self.threshold
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parent(trace_id: u128, is_sampled: bool) -> Option<TraceContext> {
        Some(TraceContext {
            trace_id,
            span_id: 1,
            is_sampled,
        })
    }

    #[test]
    fn the_parent_decides_whatever_the_ratio_is() {
        for ratio in [0.0, 0.5, 1.0] {
            let sampler = Sampler::new(ratio, true);
            let sample = |parent| sampler.sample(Option::as_ref(&parent), || unreachable!());
            assert_eq!(sample(parent(7, true)), Some(7), "{ratio}");
            assert_eq!(sample(parent(7, false)), None, "{ratio}");
        }
    }

    #[test]
    fn without_parents_the_trace_id_decides() {
        let never = Sampler::new(0.0, true);
        assert_eq!(never.sample(None, || unreachable!()), None);
        let always = Sampler::new(1.0, true);
        assert_eq!(always.sample(None, || u128::MAX), Some(u128::MAX));
        assert_eq!(always.sample(None, || 0), Some(1));
        let half = Sampler::new(0.5, false);
        assert_eq!(half.sample(None, || 5), Some(5));
        assert_eq!(half.sample(None, || u128::from(u64::MAX)), None);
        // A parent that was sampled by others does not count.
        let high = u128::from(u64::MAX);
        assert_eq!(half.sample(parent(high, true).as_ref(), || 5), None);
        assert_eq!(half.sample(parent(7, false).as_ref(), || 5), Some(7));
    }

    #[test]
    fn a_hundredth_of_random_ids_is_a_hundredth() {
        let sampler = Sampler::new(0.01, true);
        let mut random = fastrand::Rng::with_seed(1);
        let taken = (0..100_000).filter(|_| sampler.sample(None, || random.u128(..)).is_some());
        let taken = taken.count();
        assert!((850..1_150).contains(&taken), "{taken}");
    }

    #[test]
    fn a_ratio_that_is_no_number_samples_nothing() {
        assert_eq!(Sampler::new(f64::NAN, true), Sampler::new(0.0, true));
        assert_eq!(Sampler::new(-1.0, true), Sampler::new(0.0, true));
    }
}
