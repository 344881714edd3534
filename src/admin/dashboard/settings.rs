//! The `admin.dashboard` settings.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// More open pages would leave no connection of the listener to other operators.
const MAX_VIEWERS: u32 = 48;
/// Each takes the time of an explanation, on the thread that serves the request.
const MAX_DECISIONS_PER_SECOND: u32 = 100;

/// The dashboard, the page at `/` of the operators' listener.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Open dashboards that get updates, at most 48; further ones are refused. 0 turns the dashboard off.
    pub max_viewers: u32,
    /// Decisions each second that a dashboard shows, and explains on a click, while one is open; one a second while none
    /// is. At most 100. 0: none.
    pub max_decisions_per_second: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            // A team, each with a page or two.
            max_viewers: 16,
            // As many as a person can follow.
            max_decisions_per_second: 5,
        }
    }
}

impl Settings {
    /// What is wrong: the key below `admin`, and a message.
    pub(crate) fn check(&self) -> Vec<(String, String)> {
        let bounds = [
            ("max_viewers", self.max_viewers, MAX_VIEWERS),
            (
                "max_decisions_per_second",
                self.max_decisions_per_second,
                MAX_DECISIONS_PER_SECOND,
            ),
        ];
        let beyond = bounds.into_iter().filter(|(_, value, max)| value > max);
        beyond
            .map(|(key, _, max)| (format!("dashboard.{key}"), format!("must be at most {max}")))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_have_bounds() {
        assert!(Settings::default().check().is_empty());
        let settings = Settings {
            max_viewers: 49,
            max_decisions_per_second: 101,
        };
        let keys: Vec<String> = settings.check().into_iter().map(|(key, _)| key).collect();
        let expected = [
            "dashboard.max_viewers",
            "dashboard.max_decisions_per_second",
        ];
        assert_eq!(keys, expected);
    }
}
