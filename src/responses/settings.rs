//! How the state of the Responses API is kept, and what clients are told.

use serde::{Deserialize, Serialize};

use super::background;
use super::engine_input::UnsupportedItems;
use super::events::ReasoningEvents;
use crate::{state_token, store};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    pub mode: Mode,
    pub on_store_down: OnStoreDown,
    /// Whether a router whose store is down counts as ready.
    pub ready_without_store: bool,
    pub reasoning_events: ReasoningEvents,
    pub unsupported_items: UnsupportedItems,
    /// Responses that one may go on from, each from the one before.
    pub history_turns_max: u64,
    /// Of all items of such a chain, or of a conversation, as JSON.
    pub history_bytes_max: u64,
    /// Of one answer of an engine, and of one event of it.
    pub answer_bytes_max: u64,
    /// How long a stream may be silent before it says a comment; 0 for ever.
    pub keep_alive_ms: u64,
    /// How long a conversation stays locked after its response's router has vanished.
    pub conversation_lease_ms: u64,
    pub background: background::Settings,
    pub store: store::Settings,
    pub carrier: state_token::Settings,
}

/// Whose the state of responses is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// The router's: every replica answers for every response.
    #[default]
    Stateful,
    /// None of the router's business: `/v1/responses` passes byte for byte, and its other paths are
    /// not there.
    PassThrough,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnStoreDown {
    /// What would be stored is refused with 503.
    #[default]
    Fail,
    /// It is served without being stored, and says so.
    Degrade,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            on_store_down: OnStoreDown::default(),
            // All replicas share the store: taking them all out would turn a part of the service that
            // fails into all of it.
            ready_without_store: true,
            reasoning_events: ReasoningEvents::default(),
            unsupported_items: UnsupportedItems::default(),
            history_turns_max: 1_000,
            // Eight million tokens of text: more than any engine takes.
            history_bytes_max: 32 << 20,
            answer_bytes_max: 16 << 20,
            // Half of what the least patient of common proxies wait (30 s), so that a late one still counts.
            keep_alive_ms: 15_000,
            // Renewed while it is needed; a lost router costs a conversation so much time.
            conversation_lease_ms: 30_000,
            background: background::Settings::default(),
            store: store::Settings::default(),
            carrier: state_token::Settings::default(),
        }
    }
}

impl Settings {
    /// What is wrong beyond types: paths below `responses`, each with what is the matter.
    pub fn problems(&self) -> Vec<(&'static str, String)> {
        let at_least = [
            ("history_turns_max", self.history_turns_max, 1),
            ("history_bytes_max", self.history_bytes_max, 1 << 10),
            ("answer_bytes_max", self.answer_bytes_max, 64 << 10),
            ("conversation_lease_ms", self.conversation_lease_ms, 1_000),
        ];
        let wrong = at_least.into_iter().filter(|(_, value, min)| value < min);
        // More often than that a comment keeps nothing alive that the last one did not.
        let keep_alive = (1..1_000).contains(&self.keep_alive_ms).then(|| {
            let found = self.keep_alive_ms;
            let message = format!("must be at least 1000, or 0 to say nothing, not {found}");
            ("keep_alive_ms", message)
        });
        wrong
            .map(|(path, value, min)| (path, format!("must be at least {min}, not {value}")))
            .chain(keep_alive)
            .chain(self.background.problems())
            .collect()
    }
}
