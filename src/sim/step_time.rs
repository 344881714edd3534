//! How long the steps of an engine with continuous batching take: the weights are read once a step, each prompt token is
//! computed, and each answer's token reads the KV cache of its whole context. Pure.

use std::time::Duration;

use serde::Serialize;

/// A time in picoseconds: a token of context takes some ten nanoseconds, and sums of many must not depend on how they
/// are split.
pub type Picoseconds = u128;

const PICOSECONDS_PER_SECOND: f64 = 1e12;

/// The command-line arguments for what makes steps of many answers longer.
#[derive(clap::Args, Clone, Copy, Debug, Serialize)]
#[group(skip)]
pub struct AnswerTimes {
    /// What a step takes longer for each answer that it generates a token of.
    #[arg(long = "decode-time-per-answer", value_name = "DURATION", default_value = "20us", value_parser = parse_step_part)]
    pub decode_time_per_answer: Duration,

    /// What a step takes longer for each token of the prompts and answers that it generates tokens of: reading
    /// their KV cache.
    #[arg(long = "decode-time-per-context-token", value_name = "DURATION", default_value = "30ns", value_parser = parse_step_part)]
    pub decode_time_per_context_token: Duration,
}

impl AnswerTimes {
    /// Every step takes as long as one of a single answer.
    pub const NONE: Self = Self {
        decode_time_per_answer: Duration::ZERO,
        decode_time_per_context_token: Duration::ZERO,
    };
}

/// How long the steps of an engine take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepTimes {
    step: Picoseconds,
    answer: Picoseconds,
    context_token: Picoseconds,
    prompt_token: Picoseconds,
}

/// What an engine computes in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Answers that get a token.
    pub answers: u64,
    /// Tokens of these answers so far, and of their prompts.
    pub context_tokens: u64,
    pub prompt_tokens: u64,
}

impl StepTimes {
    /// `step` is what every step takes.
    pub fn new(step: Duration, answers: AnswerTimes, prompt_tokens_per_second: f64) -> Self {
        Self {
            step: picoseconds(step),
            answer: picoseconds(answers.decode_time_per_answer),
            context_token: picoseconds(answers.decode_time_per_context_token),
            prompt_token: (PICOSECONDS_PER_SECOND / prompt_tokens_per_second).round() as u128,
        }
    }

    /// These times, with steps and answers that take this many times as long.
    pub fn with_slower_answers(self, factor: f64) -> Self {
        let scaled = |time: Picoseconds| (time as f64 * factor).round() as u128;
        Self {
            step: scaled(self.step),
            answer: scaled(self.answer),
            context_token: scaled(self.context_token),
            ..self
        }
    }

    pub fn of(&self, batch: Batch) -> Duration {
        duration(self.of_steps(batch, 1))
    }

    /// The time of several steps one after the other: the first is `batch`, and each gives every answer a token. Only the
    /// first computes prompt tokens.
    pub fn of_steps(&self, batch: Batch, steps: u64) -> Picoseconds {
        let (answers, steps) = (u128::from(batch.answers), u128::from(steps));
        let context_tokens = u128::from(batch.context_tokens) * steps
            + answers * steps * steps.saturating_sub(1) / 2;
        steps * (self.step + self.answer * answers)
            + self.context_token * context_tokens
            + self.prompt_token * u128::from(batch.prompt_tokens)
    }
}

pub fn picoseconds(time: Duration) -> Picoseconds {
    time.as_nanos() * 1_000
}

/// Rounded up, so that it is not before the time.
pub fn duration(time: Picoseconds) -> Duration {
    let nanos = time.div_ceil(1_000);
    let seconds = u64::try_from(nanos / 1_000_000_000).unwrap_or(u64::MAX);
    Duration::new(seconds, (nanos % 1_000_000_000) as u32)
}

/// Reads a duration of at most a minute.
fn parse_step_part(text: &str) -> Result<Duration, String> {
    let duration = crate::units::parse_duration(text)?;
    if duration <= Duration::from_mins(1) {
        Ok(duration)
    } else {
        Err("expected at most `1m`".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times() -> StepTimes {
        let answers = AnswerTimes {
            decode_time_per_answer: Duration::from_micros(100),
            decode_time_per_context_token: Duration::from_nanos(10),
        };
        StepTimes::new(Duration::from_millis(10), answers, 1_000.0)
    }

    #[test]
    fn a_step_takes_longer_for_each_answer_context_and_prompt_token() {
        let batch = Batch {
            answers: 3,
            context_tokens: 1_000,
            prompt_tokens: 5,
        };
        assert_eq!(times().of(batch), Duration::from_micros(15_310));
        assert_eq!(times().of(Batch::default()), Duration::from_millis(10));
        let slower = times().with_slower_answers(2.0);
        assert_eq!(slower.of(batch), Duration::from_micros(25_620));
    }

    #[test]
    fn several_steps_take_what_each_of_them_takes() {
        let mut batch = Batch {
            answers: 3,
            context_tokens: 1_000,
            prompt_tokens: 5,
        };
        let together = times().of_steps(batch, 40);
        let mut sum = 0;
        for _ in 0..40 {
            sum += times().of_steps(batch, 1);
            batch.context_tokens += batch.answers;
            batch.prompt_tokens = 0;
        }
        assert_eq!(together, sum);
    }
}
