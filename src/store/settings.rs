//! How long things are kept, how much of them, and where.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{lease, memory, redis};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    pub kind: Kind,
    pub keep: Keep,
    pub lease: lease::Settings,
    pub memory: memory::Settings,
    pub redis: redis::Settings,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            // Works as it is, for one replica.
            kind: Kind::Memory,
            keep: Keep::default(),
            lease: lease::Settings::default(),
            memory: memory::Settings::default(),
            redis: redis::Settings::default(),
        }
    }
}

impl Settings {
    /// What is wrong beyond types: paths below `store`, each with what is the matter.
    pub fn problems(&self) -> Vec<(String, String)> {
        let mut problems = self.keep.problems();
        for (key, value) in [
            ("lease.lease_ms", self.lease.lease_ms),
            ("lease.beat_ms", self.lease.beat_ms),
            ("lease.sweep_ms", self.lease.sweep_ms),
        ] {
            if value == 0 {
                problems.push((key.to_owned(), "must be at least 1".to_owned()));
            }
        }
        if self.lease.beat_ms.saturating_mul(2) > self.lease.lease_ms {
            problems.push((
                "lease.beat_ms".to_owned(),
                format!(
                    "must be at most half of lease.lease_ms ({}), or a lost beat costs the lease",
                    self.lease.lease_ms
                ),
            ));
        }
        problems.extend(self.memory.problems());
        problems.extend(self.redis.problems(self.kind == Kind::Redis));
        problems
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    Memory,
    Redis,
}

/// How long and how much, wherever it is kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Keep {
    /// A stored response from its last change on; 0 for as long as there is room.
    pub record_ttl_s: u64,
    /// A background response with `store: false`, from its end on.
    pub ephemeral_ttl_s: u64,
    /// A conversation from its last change on; 0 until it is deleted.
    pub conversation_ttl_s: u64,
    /// The events of a background response as they were sent, from its end on.
    pub log_ttl_s: u64,
    /// One response's log. Past it the events are no longer kept, nor told before the response's end.
    pub log_bytes_max: u64,
    /// One response: its input, output and the rest together.
    pub record_bytes_max: u64,
}

impl Default for Keep {
    fn default() -> Self {
        Self {
            // As long as OpenAI keeps responses; conversations are kept until they are deleted there.
            record_ttl_s: 30 * 24 * 3_600,
            ephemeral_ttl_s: 600,
            conversation_ttl_s: 0,
            // Readers come back within minutes or with the finished response.
            log_ttl_s: 600,
            // Some 36,000 tokens: an event of a delta is about 220 bytes as it is sent. Each owner keeps the
            // logs of what it runs in memory as well: `running_max` times this at most.
            log_bytes_max: 8 << 20,
            // Two of the largest bodies that the API takes by default.
            record_bytes_max: 64 << 20,
        }
    }
}

impl Keep {
    pub(super) fn record_ttl(&self) -> Option<Duration> {
        (self.record_ttl_s != 0).then(|| Duration::from_secs(self.record_ttl_s))
    }

    pub(super) fn conversation_ttl(&self) -> Option<Duration> {
        (self.conversation_ttl_s != 0).then(|| Duration::from_secs(self.conversation_ttl_s))
    }

    pub(super) fn ephemeral_ttl(&self) -> Duration {
        Duration::from_secs(self.ephemeral_ttl_s)
    }

    pub(super) fn log_ttl(&self) -> Duration {
        Duration::from_secs(self.log_ttl_s)
    }

    fn problems(&self) -> Vec<(String, String)> {
        const YEARS_10_S: u64 = 10 * 365 * 24 * 3_600;
        let mut problems = Vec::new();
        let mut wrong = |key: &str, reason: String| problems.push((format!("keep.{key}"), reason));
        for (key, seconds, may_be_zero) in [
            ("record_ttl_s", self.record_ttl_s, true),
            ("ephemeral_ttl_s", self.ephemeral_ttl_s, false),
            ("conversation_ttl_s", self.conversation_ttl_s, true),
            ("log_ttl_s", self.log_ttl_s, false),
        ] {
            if seconds == 0 && !may_be_zero {
                wrong(key, "must be at least 1".to_owned());
            }
            if seconds > YEARS_10_S {
                wrong(key, format!("{seconds} s is more than ten years"));
            }
        }
        if self.log_bytes_max == 0 {
            wrong("log_bytes_max", "must be at least 1".to_owned());
        }
        // A chunk's number has its limit, and Redis its own.
        if !(65_536..=1 << 29).contains(&self.record_bytes_max) {
            let found = self.record_bytes_max;
            wrong(
                "record_bytes_max",
                format!("must be from 65536 to 536870912, not {found}"),
            );
        }
        problems
    }
}
