//! The settings of the workers' circuit breakers.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::http::circuit_breaker::SharedBreaker;
use crate::units::DurationText;

/// Protects clients from a worker whose requests fail: while its circuit breaker is open, it gets none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// After this many failed requests in a row the worker's circuit breaker opens. Two may be one hiccup that
    /// two requests met; three are a state. Requests that fail at healthy workers open the circuit breakers of at most half
    /// of a model's workers for the same part of a request.
    #[schemars(range(min = 1))]
    pub failure_threshold: u32,
    /// An open circuit breaker lets one request try the worker again after this time (half-open). One that is open because the
    /// worker took no connections closes before, once a health check succeeds.
    #[serde(with = "DurationText")]
    pub open_duration: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            failure_threshold: 3,
            open_duration: Duration::from_secs(5),
        }
    }
}

impl Settings {
    /// A closed circuit breaker.
    pub fn build(&self) -> SharedBreaker {
        SharedBreaker::new(self.failure_threshold, self.open_duration)
    }
}
