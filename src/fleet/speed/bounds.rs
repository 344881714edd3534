//! What a decision needs of all workers of a model, without looking at each.

use super::shared::SharedF32;
use super::types::Speed;

/// Over the workers of a model.
#[derive(Debug)]
pub struct GroupSpeed {
    /// Seconds for a prompt token at the mean rate.
    pub mean_prompt_token: SharedF32,
    /// Seconds for a prompt token at the fastest worker. Until the next update it may be too high for a worker that has
    /// become faster: then a decision may not look at that worker.
    pub min_prompt_token: SharedF32,
    /// Prompts that wait at all workers, on average over the last seconds.
    pub waiting_prompts: SharedF32,
}

impl Default for GroupSpeed {
    fn default() -> Self {
        let start = Speed::default().prompt_token;
        Self {
            mean_prompt_token: SharedF32::new(start),
            min_prompt_token: SharedF32::new(start),
            waiting_prompts: SharedF32::default(),
        }
    }
}

impl GroupSpeed {
    /// From the seconds that each worker takes for a prompt token, and the prompts that usually wait there.
    pub fn set(&self, workers: impl Iterator<Item = (f64, f64)>) {
        let (mut count, mut rates, mut min, mut waiting) = (0.0, 0.0, f64::INFINITY, 0.0);
        for (seconds, waiting_there) in workers {
            count += 1.0;
            waiting += waiting_there;
            rates += 1.0 / seconds;
            min = seconds.min(min);
        }
        if count > 0.0 {
            self.mean_prompt_token.set(count / rates);
            self.waiting_prompts.set(waiting);
            // Rounded down, so that it is a bound.
            self.min_prompt_token.set(min * (1.0 - 1e-6));
        }
    }
}
