//! Bounds of what runs in the background.

use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// Responses that this replica runs at the same time.
    pub running_max: u64,
    /// Of those, one tenant's.
    pub running_per_tenant_max: u64,
    /// How long one waits for a worker that takes it.
    pub queue_max_ms: u64,
    /// How long one may run, the wait included.
    pub run_max_ms: u64,
    /// How often one is begun, where its replica is lost before anybody saw anything of it.
    pub attempts_max: u32,
    /// How long events are gathered before they are stored and told.
    pub flush_ms: u64,
    /// Between two looks for news of a response that another replica runs.
    pub poll_ms: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            // A store that notes the events of so many still answers at once.
            running_max: 1_000,
            running_per_tenant_max: 100,
            queue_max_ms: 600_000,
            run_max_ms: 3_600_000,
            // One that took three replicas with it may well be why they went.
            attempts_max: 3,
            // A reader sees no delay, and a store has a tenth of the writes that tokens would make.
            flush_ms: 50,
            poll_ms: 100,
        }
    }
}

impl Settings {
    pub fn problems(&self) -> Vec<(&'static str, String)> {
        let at_least = [
            ("background.running_max", self.running_max, 1),
            (
                "background.running_per_tenant_max",
                self.running_per_tenant_max,
                1,
            ),
            ("background.queue_max_ms", self.queue_max_ms, 1_000),
            ("background.run_max_ms", self.run_max_ms, 1_000),
            ("background.attempts_max", self.attempts_max.into(), 1),
            ("background.poll_ms", self.poll_ms, 10),
        ];
        let wrong = at_least.into_iter().filter(|(_, value, min)| value < min);
        wrong
            .map(|(path, value, min)| (path, format!("must be at least {min}, not {value}")))
            .collect()
    }
}
