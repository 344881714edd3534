//! One worker's prefill rate: the median of what was seen lately. Pure.

use std::collections::VecDeque;
use std::time::Duration;

use super::seen::Sample;

/// Tokens of one observation. Fewer, and the odd step of an engine is most of it.
const OBSERVATION_TOKENS: u64 = 2_048;
/// The rate is the median of this many observations, of which each is at least a second's: it moves once half of them
/// differ, so that a pause of the engine or a batch of strange prompts changes nothing.
const WINDOW: usize = 31;
/// Fewer show nothing: the first prompts of an engine are computed slowly.
const MIN_OBSERVATIONS: usize = 7;

/// Learns from samples that are taken about once a second.
#[derive(Clone, Debug, Default)]
pub struct Learner {
    unfinished: Sample,
    /// Tokens a second.
    rates: VecDeque<f64>,
    /// Seconds that an answer takes besides computing its prompt.
    overheads: VecDeque<f64>,
}

impl Learner {
    pub fn on_sample(&mut self, sample: &Sample) {
        let seen = &mut self.unfinished;
        seen.prompts = seen.prompts.saturating_add(sample.prompts);
        seen.tokens = seen.tokens.saturating_add(sample.tokens);
        seen.time = seen.time.saturating_add(sample.time);
        if sample.short_prompts > 0 {
            let seconds = sample.short_time.as_secs_f64() / f64::from(sample.short_prompts);
            push(&mut self.overheads, seconds);
        }
        if seen.tokens < OBSERVATION_TOKENS {
            return;
        }
        let seen = std::mem::take(seen);
        let overhead = median(&self.overheads).unwrap_or(0.0) * f64::from(seen.prompts);
        let seconds = seen.time.as_secs_f64();
        // Prompts that were computed in one step had one overhead together.
        let seconds = (seconds - overhead).max(seconds / 2.0);
        if seconds > 0.0 {
            push(&mut self.rates, seen.tokens as f64 / seconds);
        }
    }

    /// Prompt tokens that the worker computes in a second, once enough was seen.
    pub fn rate(&self) -> Option<f64> {
        median(&self.rates).filter(|_| self.rates.len() >= MIN_OBSERVATIONS)
    }

    /// The time of an answer besides computing its prompt, if one was seen.
    pub fn overhead(&self) -> Option<Duration> {
        median(&self.overheads).map(Duration::from_secs_f64)
    }
}

fn push(window: &mut VecDeque<f64>, value: f64) {
    if window.len() == WINDOW {
        window.pop_front();
    }
    window.push_back(value);
}

fn median(values: &VecDeque<f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.iter().copied().collect();
    let middle = values.len().checked_sub(1)? / 2;
    Some(*values.select_nth_unstable_by(middle, f64::total_cmp).1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sample(tokens: u64, millis: u64) -> Sample {
        Sample {
            prompts: 1,
            tokens,
            time: Duration::from_millis(millis),
            ..Sample::default()
        }
    }

    fn learnt(samples: impl IntoIterator<Item = Sample>) -> Learner {
        let mut learner = Learner::default();
        for sample in samples {
            learner.on_sample(&sample);
        }
        learner
    }

    #[test]
    fn a_rate_is_known_after_seven_observations() {
        let one = sample(4_000, 500);
        assert_eq!(learnt([one; 6]).rate(), None);
        assert_eq!(learnt([one; 7]).rate(), Some(8_000.0));
        assert_eq!(learnt([sample(1_024, 128); 14]).rate(), Some(8_000.0));
    }

    #[test]
    fn a_pause_of_the_engine_changes_nothing_and_a_new_speed_is_learnt() {
        let (usual, pause) = (sample(4_000, 500), sample(4_000, 60_000));
        let mut samples = vec![usual; 31];
        samples.extend([pause; 10]);
        assert_eq!(learnt(samples.clone()).rate(), Some(8_000.0));
        samples.extend([sample(4_000, 2_000); 31]);
        assert_eq!(learnt(samples).rate(), Some(2_000.0));
    }

    #[test]
    fn prompts_of_different_lengths_show_the_same_rate() {
        let nearly_cached = Sample {
            short_prompts: 4,
            short_time: Duration::from_millis(120),
            ..Sample::default()
        };
        // 10,000 tokens/s, and 30 ms for each answer.
        for tokens in [2_048, 4_096, 40_960] {
            let mut samples = vec![nearly_cached];
            samples.extend([sample(tokens, tokens / 10 + 30); 9]);
            let learner = learnt(samples);
            let rate = learner.rate().unwrap();
            assert!((9_900.0..10_100.0).contains(&rate), "{rate}");
            assert_eq!(learner.overhead(), Some(Duration::from_millis(30)));
        }
    }

    proptest! {
        /// Whatever less than half of the observations show, the rate is within what the others show.
        #[test]
        fn a_minority_of_outliers_does_not_move_the_rate(
            good in proptest::collection::vec(900u64..1_100, 16..=16),
            bad in proptest::collection::vec((2_048u64..1_000_000, 0u64..100_000), 0..=15),
            order in any::<u64>(),
        ) {
            let mut samples: Vec<Sample> = good.iter().map(|millis| sample(10_000, *millis)).collect();
            samples.extend(bad.iter().map(|(tokens, millis)| sample(*tokens, *millis)));
            fastrand::Rng::with_seed(order).shuffle(&mut samples);
            let rate = learnt(samples).rate().unwrap();
            prop_assert!((10_000.0 / 1.1..=10_000.0 / 0.9).contains(&rate), "{rate}");
        }
    }
}
