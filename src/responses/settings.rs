//! How the state of the Responses API is kept, and what clients see of it.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::background;
use super::chat::ChatSettings;
use super::events::ReasoningEvents;
use super::websocket;
use crate::units::DurationText;
use crate::{state_token, store};

/// The Responses API.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Who keeps the state of responses and conversations.
    pub mode: Mode,
    /// Where responses and conversations are kept. Short forms: `memory` and `{redis: "redis://host:6379"}`.
    #[serde(deserialize_with = "store::name_or_map")]
    #[schemars(with = "store::NameOrMap")]
    pub store: store::Settings,
    /// What happens to a request whose response would be stored while the store is down.
    pub on_store_down: OnStoreDown,
    /// A stream without output for this long sends an SSE comment, since proxies close silent connections, some
    /// after 30 s. `0s` sends none; otherwise at least 1 s. A disaggregated request's stream begins with the
    /// first token of its decode worker.
    #[serde(with = "DurationText")]
    #[schemars(extend("min" = "0s"))]
    pub keep_alive: Duration,
    /// State of conversations that clients keep.
    pub state_token: state_token::Settings,
    /// Compaction of conversations (`POST /v1/responses/compact`).
    pub compact: CompactSettings,
    /// Requests for workers that speak chat completions only.
    pub chat: ChatSettings,
    pub websocket: websocket::Settings,
    /// Background responses (`background: true`).
    pub background: background::Settings,
    /// Settings for experts.
    pub advanced: Advanced,
}

/// `responses.compact`: what `POST /v1/responses/compact` asks the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct CompactSettings {
    /// The last message that the model gets, after the conversation.
    pub prompt: String,
    /// The longest summary, in tokens.
    #[schemars(range(min = 16))]
    pub max_output_tokens: u64,
}

/// Settings of the Responses API for experts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Advanced {
    /// Whether a replica whose store is down still reports itself as ready. All replicas share the store: if all
    /// became unready, requests that need no store would fail too.
    pub ready_without_store: bool,
    /// Names of the events that stream a model's reasoning.
    pub reasoning_events: ReasoningEvents,
    /// Responses in a chain (`previous_response_id`) that a request may continue.
    #[serde(skip)]
    pub max_history_turns: u64,
    /// A conversation is locked while a response runs; if its replica dies, it is unlocked after this time.
    #[schemars(extend("min" = "1s"))]
    #[serde(with = "DurationText")]
    pub conversation_lease: Duration,
}

/// Who keeps the state of responses and conversations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// The router: every replica serves every stored response, and engines see one complete request at a time.
    #[default]
    Stateful,
    /// The engines, or none: `/v1/responses` passes byte for byte, and its other paths do not exist.
    PassThrough,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnStoreDown {
    /// It is refused with 503.
    #[default]
    Fail,
    /// It is served without being stored; `store` is false in the response, and a header says so.
    Degrade,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            store: store::Settings::default(),
            on_store_down: OnStoreDown::default(),
            // Half of what the least patient of common proxies wait (30 s), so that a late one still counts.
            keep_alive: Duration::from_secs(15),
            state_token: state_token::Settings::default(),
            compact: CompactSettings::default(),
            chat: ChatSettings::default(),
            websocket: websocket::Settings::default(),
            background: background::Settings::default(),
            advanced: Advanced::default(),
        }
    }
}

impl Default for CompactSettings {
    fn default() -> Self {
        Self {
            prompt: "Write a summary of this conversation for whoever continues it without having seen it. State what was asked, \
                     what was done and found, the decisions and their reasons, constraints, names, values and references that \
                     are still needed, and what is left to do. Write only the summary."
                .to_owned(),
            // A few pages: far shorter than what it replaces, and long enough for an agent's session.
            max_output_tokens: 4_096,
        }
    }
}

impl Default for Advanced {
    fn default() -> Self {
        Self {
            ready_without_store: true,
            reasoning_events: ReasoningEvents::default(),
            // Each is a read of the store; agents have a few hundred.
            max_history_turns: 1_000,
            conversation_lease: Duration::from_secs(30),
        }
    }
}

impl Settings {
    /// What is wrong beyond types and bounds: paths below `responses`, each with a message.
    pub fn check(&self) -> Vec<(String, String)> {
        let mut problems = Vec::new();
        if !self.keep_alive.is_zero() && self.keep_alive < Duration::from_secs(1) {
            let message = "must be at least 1s, or 0s to send no comments";
            problems.push(("keep_alive".to_owned(), message.to_owned()));
        }
        let below = |part: &'static str| {
            move |(key, message): (String, String)| (format!("{part}.{key}"), message)
        };
        problems.extend(
            self.state_token
                .check()
                .into_iter()
                .map(below("state_token")),
        );
        problems.extend(self.store.check().into_iter().map(below("store")));
        problems
    }
}
