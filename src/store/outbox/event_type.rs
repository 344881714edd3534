//! The types of events. Pure.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An event that an endpoint can get.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
pub enum EventType {
    #[serde(rename = "response.completed")]
    ResponseCompleted,
    #[serde(rename = "response.failed")]
    ResponseFailed,
    #[serde(rename = "response.cancelled")]
    ResponseCancelled,
    #[serde(rename = "response.incomplete")]
    ResponseIncomplete,
    #[serde(rename = "batch.completed")]
    BatchCompleted,
    #[serde(rename = "batch.failed")]
    BatchFailed,
    #[serde(rename = "batch.expired")]
    BatchExpired,
    #[serde(rename = "batch.cancelled")]
    BatchCancelled,
}

impl EventType {
    pub const ALL: [Self; 8] = [
        Self::ResponseCompleted,
        Self::ResponseFailed,
        Self::ResponseCancelled,
        Self::ResponseIncomplete,
        Self::BatchCompleted,
        Self::BatchFailed,
        Self::BatchExpired,
        Self::BatchCancelled,
    ];

    /// As events and the configuration name it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ResponseCompleted => "response.completed",
            Self::ResponseFailed => "response.failed",
            Self::ResponseCancelled => "response.cancelled",
            Self::ResponseIncomplete => "response.incomplete",
            Self::BatchCompleted => "batch.completed",
            Self::BatchFailed => "batch.failed",
            Self::BatchExpired => "batch.expired",
            Self::BatchCancelled => "batch.cancelled",
        }
    }

    /// The status that it reports.
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
