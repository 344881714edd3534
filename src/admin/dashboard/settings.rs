//! The `admin.dashboard` settings.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// More open pages would leave no connection of the listener to other operators.
const MAX_VIEWERS: u32 = 48;

/// The dashboard, the page at `/` of the operators' listener.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Open dashboards that get updates, at most 48; further ones are refused. 0 turns the dashboard off.
    pub max_viewers: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            // A team, each with a page or two.
            max_viewers: 16,
        }
    }
}

impl Settings {
    /// What is wrong: the key below `admin`, and a message.
    pub(crate) fn check(&self) -> Vec<(String, String)> {
        if self.max_viewers > MAX_VIEWERS {
            let message = format!("must be at most {MAX_VIEWERS}");
            return vec![("dashboard.max_viewers".to_owned(), message)];
        }
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_viewers_than_the_listener_has_room_for_are_refused() {
        let check = |max_viewers| Settings { max_viewers }.check();
        assert!(check(Settings::default().max_viewers).is_empty());
        assert!(check(48).is_empty());
        let message = "must be at most 48".to_owned();
        assert_eq!(check(49), [("dashboard.max_viewers".to_owned(), message)]);
    }
}
