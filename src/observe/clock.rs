//! The clock that tasks read.

use std::time::Instant;

/// The one place where a task reads the clock. Code that decides takes `now` as an argument instead.
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}
