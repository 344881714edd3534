//! How long answers of a model usually are, in tokens.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

/// Of a model that has not answered yet.
const START: f32 = 250.0;
/// What the mean moves by with an answer: the last fifty count for two thirds.
const STEP: f32 = 0.02;
/// Longer answers count as this long, shorter ones as that: one odd answer does not move the mean far.
const MAX: f32 = 4_000.0;
const MIN: f32 = 8.0;

/// The mean of a model's answers, of which later ones count more.
#[derive(Debug)]
pub struct AnswerTokens(AtomicU32);

impl Default for AnswerTokens {
    fn default() -> Self {
        Self(AtomicU32::new(START.to_bits()))
    }
}

impl AnswerTokens {
    #[inline]
    pub fn mean(&self) -> f64 {
        f32::from_bits(self.0.load(Relaxed)).into()
    }

    /// An answer has ended. Of two that end at the same moment, one may not count.
    pub fn on_answer(&self, tokens: u64) {
        let mean = f32::from_bits(self.0.load(Relaxed));
        let tokens = (tokens as f32).clamp(MIN, MAX);
        self.0
            .store((mean + STEP * (tokens - mean)).to_bits(), Relaxed);
    }

    pub fn set(&self, mean: f64) {
        let mean = (mean as f32).clamp(MIN, MAX);
        self.0.store(mean.to_bits(), Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_follows_what_answers_are_within_bounds() {
        let answers = AnswerTokens::default();
        for _ in 0..300 {
            answers.on_answer(1_000);
        }
        assert!((990.0..=1_000.0).contains(&answers.mean()));
        for _ in 0..600 {
            answers.on_answer(0);
        }
        assert!((8.0..9.0).contains(&answers.mean()));
        answers.on_answer(u64::MAX);
        assert!(answers.mean() < 100.0);
    }
}
