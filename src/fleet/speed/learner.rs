//! Learns the constants of a step from rows of what a worker did. Pure.

use super::least_squares::{LeastSquares, N};
use super::types::{ANSWER, CONTEXT, Row, Speed};

/// One worker's constants, or those of several alike.
///
/// How much an answer and how much a token of its context add to a step is one unknown: they cannot be told apart, because both
/// grow with the load. Least squares with two gave answers up to 20 % slower than with wrong constants.
#[derive(Clone, Debug)]
pub struct Learner {
    squares: LeastSquares,
    samples: u64,
}

impl Default for Learner {
    fn default() -> Self {
        Self {
            squares: LeastSquares::new(starts()),
            samples: 0,
        }
    }
}

fn starts() -> [f64; N] {
    let speed = Speed::default();
    [
        speed.step,
        speed.batch,
        speed.prompt_token,
        speed.prompt_token,
    ]
}

/// The last one is how many seconds less than it takes itself a prompt token takes from an answer.
fn unknowns(speed: &Speed) -> [f64; N] {
    let overlapped = speed.prompt_token * speed.overlap;
    [speed.step, speed.batch, speed.prompt_token, overlapped]
}

impl Learner {
    /// As another router, or this one before, has learnt it.
    pub fn from_known(speed: &Speed, samples: u64) -> Self {
        let mut learner = Self::default();
        learner.squares.set(unknowns(speed));
        learner.samples = samples;
        learner
    }

    pub fn on_row(&mut self, row: &Row) {
        if row.seconds <= 0.0 || !row.seconds.is_finite() {
            return;
        }
        let batch = ANSWER * row.answer_tokens + CONTEXT * row.context_tokens;
        let counts = [row.steps, batch, row.prompt_tokens, -row.beside_tokens];
        let per_second = counts.map(|count| count / row.seconds);
        self.squares.observe(per_second, row.seconds);
        self.samples += 1;
    }

    /// Of several rows of the same kind the one in the middle, by how long it took compared with what is expected: a client
    /// that reads slowly, or a pause of the network, changes nothing.
    pub fn on_median(&mut self, rows: &mut [Row]) {
        let speed = self.speed();
        let excess = |row: &Row| row.seconds / speed.seconds(row);
        rows.sort_unstable_by(|left, right| excess(left).total_cmp(&excess(right)));
        if let Some(row) = rows.get(rows.len().saturating_sub(1) / 2) {
            self.on_row(row);
        }
    }

    pub fn speed(&self) -> Speed {
        let [step, batch, prompt_token, overlapped] = self.squares.x;
        Speed {
            prompt_token,
            step,
            batch,
            overlap: (overlapped / prompt_token).min(1.0),
        }
    }

    pub fn samples(&self) -> u64 {
        self.samples
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What an engine does in about half a second, with a load that is drawn.
    fn row(truth: &Speed, random: &mut fastrand::Rng, noise: f64) -> Row {
        let answers = f64::from(random.u32(0..120));
        let steps = f64::from(random.u32(5..40));
        let context = answers * f64::from(random.u32(200..8_000));
        let prompts = match random.u32(0..3) {
            0 => 0.0,
            _ => f64::from(random.u32(0..6_000)),
        };
        let mut row = Row {
            seconds: 0.0,
            steps,
            answer_tokens: steps * answers,
            context_tokens: steps * context,
            prompt_tokens: prompts,
            // A row in three is from a first token.
            beside_tokens: if random.u32(0..3) == 0 { 0.0 } else { prompts },
            is_from_sent: false,
        };
        row.seconds = truth.seconds(&row) * (1.0 + noise * (random.f64() * 2.0 - 1.0));
        row
    }

    fn learnt(truth: &Speed, rows: usize, noise: f64, seed: u64) -> Speed {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut learner = Learner::default();
        for _ in 0..rows {
            learner.on_row(&row(truth, &mut random, noise));
        }
        learner.speed()
    }

    fn is_near(found: f64, truth: f64, by: f64) -> bool {
        (truth / by..=truth * by).contains(&found)
    }

    #[test]
    fn the_constants_are_found_from_a_start_that_is_far_off() {
        let truth = Speed {
            prompt_token: 1.0 / 45_000.0,
            step: 0.004,
            batch: 0.6,
            overlap: 0.0,
        };
        let found = learnt(&truth, 200, 0.1, 1);
        assert!(
            is_near(found.prompt_token, truth.prompt_token, 1.15),
            "{found:?}"
        );
        assert!(is_near(found.step, truth.step, 1.15), "{found:?}");
        assert!(is_near(found.batch, truth.batch, 1.15), "{found:?}");
    }

    /// What prompts take from answers, by engines that take half a second for prompts beside answers of half a second.
    #[test]
    fn whether_answers_stand_still_while_prompts_are_computed_is_learnt() {
        let overlap = |overlap| {
            let truth = Speed {
                prompt_token: 1.0 / 4_000.0,
                overlap,
                ..Speed::default()
            };
            learnt(&truth, 300, 0.1, 3).overlap
        };
        assert!(overlap(0.0) < 0.15, "{}", overlap(0.0));
        assert!((0.35..0.65).contains(&overlap(0.5)), "{}", overlap(0.5));
        assert!(overlap(1.0) > 0.85, "{}", overlap(1.0));
    }

    #[test]
    fn a_row_without_a_time_teaches_nothing() {
        let mut learner = Learner::default();
        learner.on_row(&Row::default());
        learner.on_row(&Row {
            seconds: f64::NAN,
            ..Row::default()
        });
        assert_eq!(learner.speed(), Learner::default().speed());
        assert_eq!(learner.samples(), 0);
    }

    #[test]
    fn clients_that_read_slowly_change_nothing_while_they_are_fewer_than_half() {
        let truth = Speed::default();
        let mut random = fastrand::Rng::with_seed(7);
        let mut learner = Learner::default();
        for _ in 0..200 {
            let mut rows: Vec<Row> = (0..7).map(|_| row(&truth, &mut random, 0.05)).collect();
            for slow in &mut rows[..3] {
                slow.seconds *= 20.0;
            }
            learner.on_median(&mut rows);
        }
        let found = learner.speed();
        assert!(is_near(found.step, truth.step, 1.25), "{found:?}");
        assert!(
            is_near(found.prompt_token, truth.prompt_token, 1.25),
            "{found:?}"
        );
    }

    proptest! {
        #[test]
        fn whatever_is_seen_the_constants_are_bounded_and_finite(
            rows in proptest::collection::vec((0.0f64..1e6, 0.0f64..1e6, 0.0f64..1e9, 0.0f64..1e12, 0.0f64..1e9), 0..200),
        ) {
            let mut learner = Learner::default();
            for (seconds, steps, answer_tokens, context_tokens, prompt_tokens) in rows {
                learner.on_row(&Row { seconds, steps, answer_tokens, context_tokens, prompt_tokens, beside_tokens: prompt_tokens / 2.0, is_from_sent: false });
            }
            let (found, start) = (learner.speed(), Speed::default());
            prop_assert!((0.0..=1.0).contains(&found.overlap), "{found:?}");
            for (found, start) in unknowns(&found).into_iter().zip(unknowns(&start)).take(N - 1) {
                prop_assert!(found.is_finite() && (start / 50.1..=start * 50.1).contains(&found), "{found}");
            }
        }

        #[test]
        fn times_are_expected_as_they_are_whatever_the_constants(
            rate in 2_000.0f64..60_000.0, step in 0.002f64..0.06, batch in 0.2f64..6.0, overlap in 0.0f64..1.0, seed in any::<u64>(),
        ) {
            let truth = Speed { prompt_token: 1.0 / rate, step, batch, overlap };
            let found = learnt(&truth, 400, 0.1, seed);
            // A rate that is high beside slow steps shows little, and matters little: what counts is what is expected.
            let mut random = fastrand::Rng::with_seed(seed);
            for _ in 0..50 {
                let row = row(&truth, &mut random, 0.0);
                let found_time = found.seconds(&row);
                prop_assert!(is_near(found_time, row.seconds, 1.25), "{row:?} {found:?} {truth:?}");
            }
        }
    }
}
