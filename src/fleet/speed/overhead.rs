//! What first tokens take beside what the engine's steps take: network, and the engine's server. Pure.

use super::types::{Row, Speed};

/// What the mean moves by in each second: the last ten or so count.
const STEP: f64 = 0.1;
/// Seconds. A first token that takes longer waited for something else.
const MAX: f64 = 2.0;

/// The seconds of one worker, as a mean over time.
///
/// It is no constant of a step: a cached prompt takes an engine milliseconds, and its server and the network take as long, so
/// that one would be learnt as the other.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Overhead(f64);

impl Overhead {
    /// Takes what was seen in a second: of the first tokens that waited for nothing the one in the middle.
    pub(super) fn on_rows(&mut self, firsts: &[Row], speed: &Speed) {
        let alone = firsts.iter().filter(|row| row.is_from_sent);
        let mut beyond: Vec<f64> = alone.map(|row| row.seconds - speed.seconds(row)).collect();
        beyond.sort_unstable_by(f64::total_cmp);
        if let Some(middle) = beyond.get(beyond.len().saturating_sub(1) / 2) {
            self.0 += STEP * (middle.clamp(-MAX, MAX) - self.0);
        }
    }

    /// Where steps are expected to take longer than first tokens took, there is none.
    pub(super) fn seconds(&self) -> f64 {
        self.0.max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(speed: &Speed, beyond: f64, is_from_sent: bool) -> Row {
        let row = Row {
            steps: 1.0,
            prompt_tokens: 60.0,
            is_from_sent,
            ..Row::default()
        };
        Row {
            seconds: speed.seconds(&row) + beyond,
            ..row
        }
    }

    #[test]
    fn what_first_tokens_take_beside_steps_is_the_mean_of_the_last_seconds() {
        let speed = Speed::default();
        let mut overhead = Overhead::default();
        for _ in 0..60 {
            // One client's network stood still, and one prompt was behind another.
            let rows = [
                row(&speed, 0.02, true),
                row(&speed, 0.02, true),
                row(&speed, 0.4, true),
                row(&speed, 0.0, false),
            ];
            overhead.on_rows(&rows, &speed);
            overhead.on_rows(&[], &speed);
        }
        assert!((overhead.seconds() - 0.02).abs() < 1e-3, "{overhead:?}");
        for _ in 0..60 {
            overhead.on_rows(&[row(&speed, -0.01, true)], &speed);
        }
        assert_eq!(overhead.seconds(), 0.0);
    }

    #[test]
    fn a_time_that_is_no_number_or_without_end_leaves_a_bounded_one() {
        let speed = Speed::default();
        let mut overhead = Overhead::default();
        for _ in 0..100 {
            overhead.on_rows(&[row(&speed, 1e30, true)], &speed);
            assert!((0.0..=MAX).contains(&overhead.seconds()), "{overhead:?}");
        }
    }
}
