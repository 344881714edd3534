//! The types of events. Pure.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::observe::metrics::words;

words! {
    /// An event that an endpoint can get.
    #[derive(
        Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
    )]
    pub enum EventType {
        #[serde(rename = "response.completed")]
        ResponseCompleted = "response.completed",
        #[serde(rename = "response.failed")]
        ResponseFailed = "response.failed",
        #[serde(rename = "response.cancelled")]
        ResponseCancelled = "response.cancelled",
        #[serde(rename = "response.incomplete")]
        ResponseIncomplete = "response.incomplete",
        #[serde(rename = "batch.completed")]
        BatchCompleted = "batch.completed",
        #[serde(rename = "batch.failed")]
        BatchFailed = "batch.failed",
        #[serde(rename = "batch.expired")]
        BatchExpired = "batch.expired",
        #[serde(rename = "batch.cancelled")]
        BatchCancelled = "batch.cancelled",
    }
}

impl EventType {
    pub fn status(self) -> &'static str {
        let parts = self.as_str().split_once('.');
        parts.map_or("", |(_, status)| status)
    }

    /// `None` for a status that is no end.
    pub(super) fn of(subject: &str, status: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|event| event.as_str().split_once('.') == Some((subject, status)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_has_the_name_that_the_configuration_uses() {
        for event in EventType::ALL {
            let written = serde_json::to_value(event).unwrap();
            assert_eq!(written, event.as_str());
        }
    }

    #[test]
    fn only_what_has_ended_is_reported() {
        for (subject, status, expected) in [
            ("response", "failed", Some(EventType::ResponseFailed)),
            ("batch", "failed", Some(EventType::BatchFailed)),
            ("batch", "expired", Some(EventType::BatchExpired)),
            ("response", "expired", None),
            ("response", "queued", None),
            ("batch", "finalizing", None),
        ] {
            let found = EventType::of(subject, status);
            assert_eq!(found, expected, "{subject} {status}");
            assert!(found.is_none_or(|event| event.status() == status));
        }
    }
}
