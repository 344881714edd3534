//! What `/fleet` says of a worker, as the table shows it. Pure.

use crate::admin::WorkerRow;
use crate::fleet::health::Health;
use crate::http::circuit_breaker;

/// The state of a worker in one word: the worst of what is so.
pub(super) fn state_of(worker: &WorkerRow) -> &'static str {
    match (worker.health, worker.circuit_breaker) {
        (Health::Up, _) if worker.is_draining => "draining",
        (Health::Up, circuit_breaker::State::Closed) => "up",
        (Health::Up, breaker) => breaker.as_str(),
        (health, _) => health.as_str(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_worst_of_a_worker_is_its_state() {
        let check = |health: &str, breaker: &str, is_draining: bool, expected| {
            let worker =
                json!({"health": health, "circuit_breaker": breaker, "is_draining": is_draining});
            let worker: WorkerRow = serde_json::from_value(worker).unwrap();
            assert_eq!(state_of(&worker), expected);
        };
        check("up", "closed", false, "up");
        check("up", "open", false, "open");
        check("up", "half-open", false, "half-open");
        check("up", "closed", true, "draining");
        check("down", "open", true, "down");
    }
}
