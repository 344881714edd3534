//! Whether an engine sleeps. vLLM in development mode has the page; a sleeping engine answers `/health` as ever and serves
//! nothing.

use std::time::Duration;

use bytes::Bytes;
use serde::Deserialize;

use super::get::{ProbeError, get};
use crate::fleet::Worker;

/// Why a sleeping worker is down.
pub(super) const REASON: &str = "it sleeps (/is_sleeping); POST /wake_up wakes it";

/// `None` if the engine has no such page.
pub(super) async fn is_sleeping(worker: &Worker, limit: Duration) -> Option<bool> {
    parse(&get(worker, "/is_sleeping", limit).await)
}

fn parse(page: &Result<Bytes, ProbeError>) -> Option<bool> {
    #[derive(Deserialize)]
    struct Page {
        is_sleeping: bool,
    }
    let page: Page = serde_json::from_slice(page.as_ref().ok()?).ok()?;
    Some(page.is_sleeping)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_engine_that_says_so_sleeps() {
        for (page, expected) in [
            (r#"{"is_sleeping":true}"#, Some(true)),
            (r#"{"is_sleeping": false, "level": 0}"#, Some(false)),
            (r#"{"is_sleeping":"yes"}"#, None),
            ("", None),
        ] {
            assert_eq!(
                parse(&Ok(Bytes::from_static(page.as_bytes()))),
                expected,
                "{page}"
            );
        }
    }
}
