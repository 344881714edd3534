//! Probe results -> up, down. Pure.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How often workers are asked, and how many answers it takes to believe them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// Between two probes of one worker.
    pub interval_ms: u64,
    /// For one answer. A loaded engine was seen to take 5 s for `/health`.
    pub timeout_ms: u64,
    /// Failed probes in a row until a worker is down.
    pub down_after: u32,
    /// Good probes in a row until a worker that was down is up.
    pub up_after: u32,
}

impl Default for Settings {
    fn default() -> Self {
        // A worker that refuses connections is out after 6 s; the breaker is faster where there is traffic.
        Self {
            interval_ms: 2_000,
            timeout_ms: 10_000,
            down_after: 3,
            up_after: 1,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Health {
    /// Not asked yet.
    Unknown,
    Up,
    Down,
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Health::Unknown => "unknown",
            Health::Up => "up",
            Health::Down => "down",
        })
    }
}

/// One worker's health, from its probes.
#[derive(Debug)]
pub struct Machine {
    health: Health,
    /// Answers in a row that speak against `health`.
    against: u32,
    down_after: u32,
    up_after: u32,
}

impl Machine {
    pub fn new(settings: &Settings) -> Self {
        Self {
            health: Health::Unknown,
            against: 0,
            down_after: settings.down_after.max(1),
            up_after: settings.up_after.max(1),
        }
    }

    pub fn health(&self) -> Health {
        self.health
    }

    /// Takes one probe's result. Returns the new health when it changed.
    pub fn on_probe(&mut self, is_good: bool) -> Option<Health> {
        let (next, needed) = match (self.health, is_good) {
            (Health::Up, true) | (Health::Down, false) => {
                self.against = 0;
                return None;
            }
            // A worker that was never seen has no name to lose: one answer settles it.
            (Health::Unknown, true) => (Health::Up, 1),
            (Health::Unknown, false) => (Health::Down, 1),
            (Health::Up, false) => (Health::Down, self.down_after),
            (Health::Down, true) => (Health::Up, self.up_after),
        };
        self.against += 1;
        if self.against < needed {
            return None;
        }
        self.against = 0;
        self.health = next;
        Some(next)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(down_after: u32, up_after: u32, probes: &str, expected: Health) {
        let mut machine = Machine::new(&Settings {
            down_after,
            up_after,
            ..Settings::default()
        });
        for probe in probes.chars() {
            machine.on_probe(probe == '+');
        }
        assert_eq!(machine.health(), expected, "{probes}");
    }

    #[test]
    fn one_answer_settles_a_new_worker() {
        check(3, 2, "", Health::Unknown);
        check(3, 2, "+", Health::Up);
        check(3, 2, "-", Health::Down);
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
            down_after in 1u32..5,
            up_after in 1u32..5,
        ) {
            let mut machine = Machine::new(&Settings { down_after, up_after, ..Settings::default() });
            let mut up = probes[0];
            let mut run = 0;
            for (place, probe) in probes.iter().enumerate() {
                let before = machine.health();
                let change = machine.on_probe(*probe);
                if place > 0 {
                    run = if place > 1 && probes[place - 1] == *probe && run > 0 { run + 1 } else { 1 };
                    let needed = if *probe { up_after } else { down_after };
                    if *probe != up && run >= needed { up = *probe; }
                }
                prop_assert_eq!(machine.health(), if up { Health::Up } else { Health::Down });
                prop_assert_eq!(change.is_some(), machine.health() != before);
            }
        }
    }
}
