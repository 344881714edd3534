//! What it costs to give a request to a worker, in tokens: those to wait for and those to compute.

use super::Request;
use super::Settings;
use super::State;

/// `pending + (1 + lambda) * new + mu * decode`. Needs no rate of any worker, and in simulation beat
/// every published formula on two public traces.
pub fn cost(settings: &Settings, request: &Request, state: &State, cached_tokens: u32) -> f64 {
    let new_tokens = request.prompt_tokens.saturating_sub(cached_tokens);
    state.pending_tokens as f64
        + (1.0 + settings.lambda) * f64::from(new_tokens)
        + settings.mu * state.decode_tokens as f64
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
        let idle = cost(&settings, &request, &State::default(), 0);
        let warm = |pending_tokens| {
            cost(
                &settings,
                &request,
                &State {
                    pending_tokens,
                    ..State::default()
                },
                900,
            )
        };
        assert!(warm(4_499) < idle);
        assert!(warm(4_501) > idle);
    }
}
