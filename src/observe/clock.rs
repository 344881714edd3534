//! The clock that tasks read.

use std::time::Instant;

/// The one place where a task reads the clock. Code that decides takes `now` as an argument instead.
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Waits until then; for ever if there is no time to wait for.
pub async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
