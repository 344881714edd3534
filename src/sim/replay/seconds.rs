//! A cost in seconds whose constants are known, for comparison: what a request waits and computes, what it delays, and what its
//! answer costs the others. The router's own cost is in `routing/cost`, and does not change this one. Pure.

use super::candidate::{Candidate, Prompt};

pub(super) fn cost_seconds(prompt: &Prompt, worker: &Candidate) -> f64 {
    let constants = &worker.constants;
    let requests = f64::from(worker.requests);
    let new = f64::from(worker.new_tokens(prompt));
    let (queued, active) = (worker.queued_tokens as f64, worker.active_tokens as f64);
    let own = (queued + new) / constants.rate;
    // One request that comes later, and the answers that stand still meanwhile.
    let delays = new / prompt.mean_rate + requests * new / constants.rate;
    // A token of the answer slows the others down, and is slowed down by them.
    let context = requests * f64::from(prompt.tokens) + active;
    let token = 2.0 * constants.answer * requests + constants.context_token * context;
    let step = constants.step + constants.answer * requests + constants.context_token * active;
    let over = (requests + 1.0 - constants.slots).max(0.0) / constants.slots;
    own + delays + prompt.answer_tokens * (token + over * step)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::replay::candidate::Constants;

    #[test]
    fn it_is_the_sum_of_what_the_request_waits_for_and_of_what_it_delays() {
        let prompt = Prompt {
            tokens: 500,
            answer_tokens: 100.0,
            mean_rate: 2_000.0,
        };
        let check = |new_tokens: u32, requests, queued_tokens, active_tokens, expected: f64| {
            let worker = Candidate {
                requests,
                queued_tokens,
                active_tokens,
                cached_tokens: prompt.tokens - new_tokens,
                constants: Constants {
                    rate: 1_000.0,
                    step: 0.01,
                    answer: 0.001,
                    context_token: 1e-6,
                    slots: 4.0,
                },
                ..Candidate::default()
            };
            let cost = cost_seconds(&prompt, &worker);
            assert!((cost - expected).abs() < 1e-9, "{cost} {expected}");
        };
        check(200, 0, 0, 0, 0.2 + 0.1);
        let answer = 100.0 * (0.002 * 2.0 + 1e-6 * (2.0 * 500.0 + 4_000.0));
        check(200, 2, 300, 4_000, 0.5 + 0.1 + 0.4 + answer);
        let answer = 100.0 * (0.002 * 4.0 + 1e-6 * (4.0 * 500.0 + 4_000.0));
        let slot = 100.0 * (0.01 + 0.004 + 0.004) / 4.0;
        check(0, 4, 300, 4_000, 0.3 + answer + slot);
    }
}
