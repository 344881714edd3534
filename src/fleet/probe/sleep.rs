//! Whether an engine sleeps. vLLM in development mode has the page; a sleeping engine answers `/health` as ever and serves
//! nothing.

use std::time::Duration;

use bytes::Bytes;
use serde::Deserialize;

use super::get::{ProbeError, get};
use crate::fleet::Worker;

/// Why a sleeping worker is down.
pub(super) const REASON: &str = "it sleeps (/is_sleeping); POST /wake_up wakes it";

/// What an engine says when it is asked whether it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SleepPage {
    Asleep,
    Awake,
    /// It has no such page.
    Missing,
    /// No answer came, which says nothing.
    Lost,
}

pub(super) async fn ask(worker: &Worker, limit: Duration) -> SleepPage {
    parse(&get(worker, "/is_sleeping", limit).await)
}

fn parse(page: &Result<Bytes, ProbeError>) -> SleepPage {
    #[derive(Deserialize)]
    struct Page {
        is_sleeping: bool,
    }
    let page = match page {
        Ok(page) => page,
        Err(error) if error.is_status => return SleepPage::Missing,
        Err(_) => return SleepPage::Lost,
    };
    match serde_json::from_slice::<Page>(page) {
        Ok(page) if page.is_sleeping => SleepPage::Asleep,
        Ok(_) => SleepPage::Awake,
        Err(_) => SleepPage::Missing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_engine_that_says_so_sleeps() {
        for (page, expected) in [
            (r#"{"is_sleeping":true}"#, SleepPage::Asleep),
            (r#"{"is_sleeping": false, "level": 0}"#, SleepPage::Awake),
            (r#"{"is_sleeping":"yes"}"#, SleepPage::Missing),
            ("", SleepPage::Missing),
        ] {
            assert_eq!(
                parse(&Ok(Bytes::from_static(page.as_bytes()))),
                expected,
                "{page}"
            );
        }
    }

    #[test]
    fn a_page_is_missing_only_if_the_engine_says_so() {
        for (is_status, expected) in [(true, SleepPage::Missing), (false, SleepPage::Lost)] {
            let error = ProbeError {
                text: String::new(),
                is_local: false,
                is_timeout: !is_status,
                is_status,
                is_missing: is_status,
            };
            assert_eq!(parse(&Err(error)), expected);
        }
    }
}
