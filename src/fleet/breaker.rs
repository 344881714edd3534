//! The settings of the workers' circuit breakers.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::http::circuit_breaker::SharedBreaker;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// Failed requests in a row until a worker gets no more.
    pub failures: u32,
    /// How long until one request may try again.
    pub open_ms: u64,
}

impl Default for Settings {
    fn default() -> Self {
        // Two failures may be one hiccup that two requests met; three are a state.
        Self {
            failures: 3,
            open_ms: 5_000,
        }
    }
}

impl Settings {
    /// A closed circuit breaker.
    pub fn build(&self) -> SharedBreaker {
        SharedBreaker::new(self.failures, Duration::from_millis(self.open_ms))
    }
}
