//! What `/fleet` says, as far as the table shows it. Pure.

use serde::Deserialize;

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Fleet {
    pub(super) is_ready: bool,
    pub(super) workers: Vec<Worker>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Worker {
    pub(super) name: String,
    pub(super) role: String,
    pub(super) health: String,
    pub(super) last_error: Option<String>,
    pub(super) circuit_breaker: String,
    pub(super) is_draining: bool,
    pub(super) models: Vec<String>,
    pub(super) requests: u64,
    pub(super) queued_tokens: u64,
    pub(super) reported: Option<Reported>,
}

/// The engine's own numbers.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Reported {
    pub(super) running: u64,
    pub(super) waiting: u64,
    /// Share of its KV cache that is used.
    pub(super) kv_usage: f64,
}

impl Worker {
    /// The state of the worker in one word: the worst of what is so.
    pub(super) fn state(&self) -> &str {
        match (&*self.health, &*self.circuit_breaker) {
            ("up", _) if self.is_draining => "draining",
            ("up", "closed" | "") => "up",
            ("up", breaker) => breaker,
            (health, _) => health,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_of_a_worker_is_its_state() {
        let check = |health: &str, breaker: &str, is_draining, expected| {
            let worker = Worker {
                health: health.to_owned(),
                circuit_breaker: breaker.to_owned(),
                is_draining,
                ..Worker::default()
            };
            assert_eq!(worker.state(), expected);
        };
        check("up", "closed", false, "up");
        check("up", "open", false, "open");
        check("up", "half_open", false, "half_open");
        check("up", "closed", true, "draining");
        check("down", "open", true, "down");
    }
}
