//! Bounds of what runs in the background.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::DurationText;

/// Background responses (`background: true`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Background responses that this replica runs at a time, those that wait for a worker included; the next one
    /// is answered with 503.
    #[schemars(range(min = 1))]
    pub max_running: u64,
    /// Of those, one tenant's; the next one is answered with 429. Not used without `tenants`.
    #[schemars(range(min = 1))]
    pub max_running_per_tenant: u64,
    /// A background response that no worker accepted for this long fails.
    #[schemars(extend("min" = "1s"))]
    #[serde(with = "DurationText")]
    pub queue_timeout: Duration,
    /// A background response that runs for this long fails, the wait included.
    #[schemars(extend("min" = "1s"))]
    #[serde(with = "DurationText")]
    pub run_timeout: Duration,
    /// A background response whose replica or engine died before any output was seen is started again up to this
    /// many times in all. One that took three of them with it may well be the cause. A run counts once an engine has
    /// started it.
    #[schemars(range(min = 1))]
    pub max_attempts: u32,
    /// Time between two reads of a response that another replica runs.
    #[serde(skip)]
    pub poll_interval: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_running: 1_000,
            max_running_per_tenant: 100,
            queue_timeout: Duration::from_secs(600),
            run_timeout: Duration::from_secs(3_600),
            max_attempts: 3,
            // Two flushes, a read of one key each.
            poll_interval: Duration::from_millis(100),
        }
    }
}
