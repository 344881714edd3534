//! How long answers are, as a router learns it. Pure.

/// Before the first answer.
const START_TOKENS: f64 = 250.0;
/// What one answer counts.
const STEP: f64 = 0.02;
const BOUNDS: (f64, f64) = (8.0, 4_000.0);

#[derive(Debug)]
pub(super) struct AnswerLength(f64);

impl Default for AnswerLength {
    fn default() -> Self {
        Self(START_TOKENS)
    }
}

impl AnswerLength {
    pub(super) fn on_end(&mut self, tokens: u32) {
        let moved = self.0 + STEP * (f64::from(tokens) - self.0);
        self.0 = moved.clamp(BOUNDS.0, BOUNDS.1);
    }

    pub(super) fn mean(&self) -> f64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_follows_the_answers_within_bounds() {
        let mut length = AnswerLength::default();
        length.on_end(350);
        assert_eq!(length.mean(), 252.0);
        for _ in 0..1_000 {
            length.on_end(1);
        }
        assert_eq!(length.mean(), 8.0);
    }
}
