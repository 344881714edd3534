//! How long things are kept, how much of them, and where.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

use super::error::Error;
use super::lease;
use super::memory::Settings as MemorySettings;
use super::redis::{Settings as RedisSettings, UrlOrMap, url_or_map};
use crate::units::{DurationText, SizeText};

/// Where responses and conversations are kept, and for how long.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Redis, which all replicas share: a URL such as `redis://host:6379`, or a map. Without it responses are
    /// kept in the memory of this process: for one replica, lost when it stops.
    #[serde(deserialize_with = "url_or_map")]
    #[schemars(with = "Option<UrlOrMap>", example = "redis://HOST:6379")]
    pub redis: Option<RedisSettings>,
    /// Responses and conversations in the memory of this process; not used with `redis`.
    pub memory: MemorySettings,
    /// How long responses and conversations are kept, and their sizes.
    pub retention: RetentionSettings,
    /// Which replica runs a background response.
    pub lease: lease::Settings,
}

impl Settings {
    /// What is wrong beyond types and bounds: paths below `store`, each with a message.
    pub fn check(&self) -> Vec<(String, String)> {
        let problems = self.redis.iter().flat_map(RedisSettings::check);
        let below = |(key, message)| (format!("redis.{key}"), message);
        problems.map(below).collect()
    }
}

/// The forms in which a store is written: the name `memory`, or its settings.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum NameOrMap {
    Name(Name),
    Map(Box<Settings>),
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Name {
    Memory,
}

/// Reads a store from any of its forms.
pub fn name_or_map<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Settings, D::Error> {
    Ok(match NameOrMap::deserialize(deserializer)? {
        NameOrMap::Name(Name::Memory) => Settings::default(),
        NameOrMap::Map(settings) => *settings,
    })
}

/// How long responses and conversations are kept, and how large they may be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct RetentionSettings {
    /// A stored response is kept for this long after its last change or continuation, with all responses before
    /// it in its chain (Redis may keep those a tenth longer). 30 days, as at OpenAI. `0s`: as long as there is
    /// room.
    #[serde(with = "DurationText")]
    #[schemars(extend("min" = "0s", "max" = "3650d"))]
    pub responses: Duration,
    /// A conversation is kept for this long after its last change. `0s`: until it is deleted, as at OpenAI.
    #[serde(with = "DurationText")]
    #[schemars(extend("min" = "0s", "max" = "3650d"))]
    pub conversations: Duration,
    /// A background response with `store: false` is kept for this long after its end.
    #[schemars(extend("max" = "3650d"))]
    #[serde(with = "DurationText")]
    pub ephemeral: Duration,
    /// The events of a background response are kept as they were sent for this long after its end; later readers
    /// get events made from the finished response.
    #[schemars(extend("max" = "3650d"))]
    #[serde(with = "DurationText")]
    pub event_logs: Duration,
    /// Size of the events of one background response; 8 MiB are some 36,000 tokens. Beyond it the oldest events are
    /// dropped while the response runs: a reader that still wants them gets comments until the end, and then all
    /// events, up to four times this size, else only the end. The replica that runs a response also has its events in
    /// memory, `responses.background.max_running` times this at most, and the dropped ones compressed.
    #[serde(with = "SizeText")]
    pub max_event_log: u64,
    /// Size of one response or conversation with all its items.
    #[serde(with = "SizeText")]
    #[schemars(extend("min" = "64KiB", "max" = "512MiB"))]
    pub max_record: u64,
}

impl Default for RetentionSettings {
    fn default() -> Self {
        Self {
            responses: Duration::from_secs(30 * 24 * 3_600),
            conversations: Duration::ZERO,
            ephemeral: Duration::from_secs(600),
            // Readers come back within minutes or with the finished response.
            event_logs: Duration::from_secs(600),
            max_event_log: 8 << 20,
            // Two of the largest bodies that the API takes by default.
            max_record: 64 << 20,
        }
    }
}

impl RetentionSettings {
    /// Refuses a response or conversation of more bytes than one may have.
    pub(super) fn check_size(&self, bytes: usize) -> Result<(), Error> {
        let (bytes, max) = (bytes as u64, self.max_record);
        if bytes > max {
            return Err(Error::TooLarge { bytes, max });
        }
        Ok(())
    }

    /// `None` for as long as there is room.
    pub(super) fn of_responses(&self) -> Option<Duration> {
        (!self.responses.is_zero()).then_some(self.responses)
    }

    /// `None` until it is deleted.
    pub(super) fn of_conversations(&self) -> Option<Duration> {
        (!self.conversations.is_zero()).then_some(self.conversations)
    }
}
