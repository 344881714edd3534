//! Decides from probe results whether a worker is up or down. Pure.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::observe::metrics::words;
use crate::units::DurationText;

/// Health checks of the workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Time between two health checks of a worker (`GET /health` and `/metrics`, at times `/v1/models`). While nothing
    /// runs at a worker, only every fifth check asks for `/metrics`.
    #[serde(with = "DurationText")]
    pub interval: Duration,
    /// A health check without an answer for this long has failed. An engine under load was seen to take 5 s.
    #[serde(with = "DurationText")]
    pub timeout: Duration,
    /// Failed health checks in a row after which a worker is down. With the default interval a worker that
    /// refuses connections is down after 6 s; the circuit breaker is faster where there is traffic.
    #[schemars(range(min = 1))]
    pub unhealthy_threshold: u32,
    /// Successful health checks in a row after which a worker that was down is up.
    #[schemars(range(min = 1))]
    pub healthy_threshold: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(2),
            timeout: Duration::from_secs(10),
            unhealthy_threshold: 3,
            healthy_threshold: 1,
        }
    }
}

words! {
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Health: Display {
        /// Not probed yet.
        #[default]
        Unknown = "unknown",
        Up = "up",
        Down = "down",
    }
}

#[derive(Debug, Default)]
pub struct Machine {
    health: Health,
    /// Probe results in a row that contradict `health`.
    contradicting: u32,
}

impl Machine {
    pub fn health(&self) -> Health {
        self.health
    }

    /// The worker says itself that it cannot serve, so no further failure is waited for. Returns the new health if it
    /// changed.
    pub fn on_sleep(&mut self) -> Option<Health> {
        self.contradicting = 0;
        let was = std::mem::replace(&mut self.health, Health::Down);
        (was != Health::Down).then_some(Health::Down)
    }

    /// Applies the result of a probe, by the thresholds of now. Returns the new health if it changed.
    pub fn on_probe(&mut self, is_good: bool, settings: &Settings) -> Option<Health> {
        let (next, needed) = match (self.health, is_good) {
            (Health::Up, true) | (Health::Down, false) => {
                self.contradicting = 0;
                return None;
            }
            // The first probe of a new worker decides, whatever the thresholds.
            (Health::Unknown, true) => (Health::Up, 1),
            (Health::Unknown, false) => (Health::Down, 1),
            (Health::Up, false) => (Health::Down, settings.unhealthy_threshold),
            (Health::Down, true) => (Health::Up, settings.healthy_threshold),
        };
        self.contradicting += 1;
        if self.contradicting < needed {
            return None;
        }
        self.contradicting = 0;
        self.health = next;
        Some(next)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(unhealthy_threshold: u32, healthy_threshold: u32, probes: &str, expected: Health) {
        let settings = Settings {
            unhealthy_threshold,
            healthy_threshold,
            ..Settings::default()
        };
        let mut machine = Machine::default();
        for probe in probes.chars() {
            machine.on_probe(probe == '+', &settings);
        }
        assert_eq!(machine.health(), expected, "{probes}");
    }

    #[test]
    fn the_first_probe_decides_for_a_new_worker() {
        check(3, 2, "", Health::Unknown);
        check(3, 2, "+", Health::Up);
        check(3, 2, "-", Health::Down);
    }

    #[test]
    fn a_worker_that_sleeps_is_down_at_once_and_up_again_as_after_failures() {
        let settings = Settings {
            unhealthy_threshold: 3,
            healthy_threshold: 2,
            ..Settings::default()
        };
        let mut machine = Machine::default();
        machine.on_probe(true, &settings);
        assert_eq!(machine.on_sleep(), Some(Health::Down));
        assert_eq!(machine.on_sleep(), None);
        assert_eq!(machine.on_probe(true, &settings), None);
        assert_eq!(machine.on_sleep(), None);
        assert_eq!(machine.on_probe(true, &settings), None);
        assert_eq!(machine.on_probe(true, &settings), Some(Health::Up));
    }

    #[test]
    fn only_failures_in_a_row_take_a_worker_down() {
        check(3, 1, "+--+--", Health::Up);
        check(3, 1, "+---", Health::Down);
        check(3, 1, "+---+", Health::Up);
        check(3, 2, "+---+", Health::Down);
        check(3, 2, "+---+-++", Health::Up);
    }

    proptest! {
        #[test]
        fn the_health_is_that_of_the_last_long_enough_run(
            probes in proptest::collection::vec(any::<bool>(), 1..60),
            unhealthy_threshold in 1u32..5,
            healthy_threshold in 1u32..5,
        ) {
            let settings = Settings { unhealthy_threshold, healthy_threshold, ..Settings::default() };
            let mut machine = Machine::default();
            let mut up = probes[0];
            let mut run = 0;
            for (index, probe) in probes.iter().enumerate() {
                let before = machine.health();
                let change = machine.on_probe(*probe, &settings);
                if index > 0 {
                    run = if index > 1 && probes[index - 1] == *probe && run > 0 { run + 1 } else { 1 };
                    let needed = if *probe { healthy_threshold } else { unhealthy_threshold };
                    if *probe != up && run >= needed { up = *probe; }
                }
                prop_assert_eq!(machine.health(), if up { Health::Up } else { Health::Down });
                prop_assert_eq!(change.is_some(), machine.health() != before);
            }
        }
    }
}
