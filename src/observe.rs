//! What the process tells of itself: logs, the clock that tasks read, and (in `metrics`) numbers.

pub mod metrics;

use std::io::IsTerminal;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// The one place where a task reads the clock. What decides takes `now` as an argument instead.
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Seconds since 1970, for those to whom the date matters.
pub fn unix_s() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs() as i64)
}

/// Milliseconds since 1970, for what is compared with another machine's clock.
pub fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}

/// How logs look and how much they say.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    pub format: Format,
    /// A level, or directives such as `info,warmroute::relay=debug`.
    pub level: String,
}

impl Default for Settings {
    fn default() -> Self {
        // One line for each change of state; requests speak at debug.
        Self {
            format: Format::Text,
            level: "info".to_owned(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    Text,
    Json,
}

/// Says what is wrong with a log level, if anything.
pub fn check_level(level: &str) -> Result<(), String> {
    level
        .parse::<tracing_subscriber::EnvFilter>()
        .map(drop)
        .map_err(|error| format!("`{level}` is not a log filter: {error}"))
}

/// Starts logging to standard error. A second call does nothing: tests share a process.
pub fn start_logging(settings: &Settings) {
    let filter = settings
        .level
        .parse()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    let logs = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    let _ = match settings.format {
        Format::Text => logs.try_init(),
        Format::Json => logs.json().try_init(),
    };
}
