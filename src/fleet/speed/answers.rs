//! How long answers of a model usually are, in tokens.

use super::shared::SharedF32;

/// The mean for a model that has not answered yet.
const START: f64 = 250.0;
/// What the mean moves by with an answer: the last fifty count for two thirds.
const STEP: f64 = 0.02;
/// Longer answers count as this long, shorter ones as that: one odd answer does not move the mean far.
const MAX: f64 = 4_000.0;
const MIN: f64 = 8.0;

/// The mean of a model's answers, of which later ones count more.
#[derive(Debug)]
pub struct AnswerTokens(SharedF32);

impl Default for AnswerTokens {
    fn default() -> Self {
        Self(SharedF32::new(START))
    }
}

impl AnswerTokens {
    #[inline]
    pub fn mean(&self) -> f64 {
        self.0.get()
    }

    /// An answer has ended. Of two that end at the same moment, one may not count.
    pub fn on_answer(&self, tokens: u64) {
        let mean = self.mean();
        let tokens = (tokens as f64).clamp(MIN, MAX);
        self.0.set(mean + STEP * (tokens - mean));
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
