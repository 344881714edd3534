//! Logs, the clock that tasks read, (in `metrics`) the metrics registry, and what is known of the process itself.

mod clock;
pub mod line_log;
pub mod log_once;
mod log_text;
mod log_writer;
pub mod memory_limit;
pub mod metrics;
pub mod metrics_text;
pub mod process;

use std::ffi::OsStr;
use std::io::{self, IsTerminal};
use std::sync::OnceLock;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

pub use self::clock::{now, sleep_until};
use self::log_text::{PlainFields, Timestamp};
pub use self::log_writer::ACCESS_LOG;
use self::log_writer::{LogWriter, MAX_QUEUED_BYTES, Writers};
use crate::units::SizeText;

/// The time of day, for what is written down with a date, such as certificates.
pub fn wall_clock() -> SystemTime {
    SystemTime::now()
}

/// Time since 1970; zero if the clock is before it, which makes only timestamps wrong.
pub fn since_epoch() -> Duration {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default()
}

/// Seconds since 1970.
pub fn unix_s() -> i64 {
    since_epoch().as_secs() as i64
}

/// Milliseconds since 1970, to compare with other machines' clocks.
pub fn unix_ms() -> u64 {
    since_epoch().as_millis() as u64
}

/// An error with its causes, in one line: the first alone often says nothing but that something failed.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        // Many repeat what is under them.
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}

/// The log, on standard error.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// How log lines are written.
    pub format: Format,
    /// `error`, `warn`, `info`, `debug` or `trace`, or directives such as `info,warmroute::relay=debug`.
    pub level: String,
    /// One line at the end of each API request (level info, target `warmroute::access`).
    pub access: bool,
    /// Where these lines go: `stdout`, or the path of a file, which may be renamed or removed at any time to rotate it. Empty:
    /// among the others, on standard error.
    pub access_file: String,
    /// A longer file is renamed to its name with `.1`, in place of the one before.
    #[serde(with = "SizeText")]
    #[schemars(extend("min" = "4KiB"))]
    pub access_file_max_size: u64,
    /// The share of requests with a line, 0 to 1, of those that were answered with success and to their end. All others have
    /// theirs.
    #[schemars(range(min = 0, max = 1))]
    pub access_sample: f64,
}

impl Default for Settings {
    fn default() -> Self {
        // One line for each change of state and, at its end, for each request.
        Self {
            format: Format::Text,
            level: "info".to_owned(),
            access: true,
            access_file: String::new(),
            // About 200,000 lines.
            access_file_max_size: 100 << 20,
            access_sample: 1.0,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// Lines for people: time, level, target, message, `name=value` fields.
    Text,
    /// One JSON object a line, for log collectors.
    Json,
}

/// Describes what is wrong with a log level, if anything.
pub fn check_level(level: &str) -> Result<(), String> {
    let wrong = |found: &str, error: &str| {
        format!(
            "`{found}` is not a log level{error}; write `error`, `warn`, `info`, `debug` or `trace`, or directives \
             such as `info,warmroute::relay=debug`"
        )
    };
    // tracing takes a bare word that is no level as a target, so that a misspelt level would log nearly nothing.
    let bare = level.split(',').map(str::trim);
    let mut bare = bare.filter(|directive| !directive.contains(['=', '[', ']', '{', '}']));
    if let Some(unknown) = bare.find(|directive| directive.parse::<LevelFilter>().is_err()) {
        return Err(wrong(unknown, ""));
    }
    match level.parse::<EnvFilter>() {
        Ok(_) => Ok(()),
        Err(error) => Err(wrong(level, &format!(" ({error})"))),
    }
}

/// The process's log, once it is started.
static LOG: OnceLock<Writers> = OnceLock::new();

fn log_lines_dropped() -> u64 {
    LOG.get().map_or(0, Writers::dropped)
}

/// The share of the lines of the access log that are written, as a part of all numbers.
static ACCESS_SAMPLE: AtomicU32 = AtomicU32::new(u32::MAX);

/// Whether a request that went well has a line in the access log.
pub fn is_access_sampled() -> bool {
    let share = ACCESS_SAMPLE.load(Relaxed);
    share == u32::MAX || fastrand::u32(..) < share
}

fn set_access_sample(settings: &Settings) {
    let share = settings.access_sample.clamp(0.0, 1.0) * f64::from(u32::MAX);
    ACCESS_SAMPLE.store(share as u32, Relaxed);
}

/// Writes the queued log lines when it is dropped, which is `main`'s last act.
#[must_use = "dropping the guard at once loses the last lines"]
#[derive(Debug)]
pub struct LogGuard(());

/// A standard error that does not take the last lines must not keep the process alive.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

impl Drop for LogGuard {
    fn drop(&mut self) {
        if let Some(log) = LOG.get() {
            log.flush(FLUSH_TIMEOUT);
        }
    }
}

/// Makes a builder's subscriber the process's. A macro, because each has a type of its own, with bounds that only the library
/// can name.
macro_rules! start {
    ($builder:expr) => {{
        let logs = $builder.with_filter_reloading();
        let handle = logs.reload_handle();
        if logs.try_init().is_ok() {
            let _ = FILTER.set(Box::new(move |filter| drop(handle.reload(filter))));
        }
    }};
}

/// Starts logging to standard error. A second call changes nothing: tests share a process.
pub fn start_logging(settings: &Settings) -> io::Result<LogGuard> {
    if LOG.get().is_none() {
        let _ = LOG.set(Writers {
            log: LogWriter::start(io::stderr(), MAX_QUEUED_BYTES)?,
            access: access_file(settings)?,
        });
    }
    set_access_sample(settings);
    let writer = LOG.get().expect("set just now").clone();
    // A file has no colours, and both have one format.
    let is_terminal = settings.access_file.is_empty() && io::stderr().is_terminal();
    let [no_color, term] = ["NO_COLOR", "TERM"].map(std::env::var_os);
    let has_colours = is_terminal && allows_colours(no_color.as_deref(), term.as_deref());
    let logs = tracing_subscriber::fmt()
        .with_env_filter(filter(settings))
        .with_timer(Timestamp)
        .with_ansi(has_colours)
        .with_writer(writer);
    match settings.format {
        Format::Text if has_colours => start!(logs),
        Format::Text => start!(logs.fmt_fields(PlainFields)),
        Format::Json => start!(logs.json().flatten_event(true)),
    }
    Ok(LogGuard(()))
}

/// Whether the environment of a terminal wants colours, by the convention of <https://no-color.org> and as far as it can show
/// them.
fn allows_colours(no_color: Option<&OsStr>, term: Option<&OsStr>) -> bool {
    no_color.is_none_or(OsStr::is_empty) && term.is_none_or(|term| term != "dumb")
}

/// Where the lines of the access log go, if not with the others.
fn access_file(settings: &Settings) -> io::Result<Option<LogWriter>> {
    let place = &settings.access_file;
    if place.is_empty() {
        return Ok(None);
    }
    let opened = line_log::access_writer(place, settings.access_file_max_size);
    opened.map(Some).map_err(|error| {
        let message =
            format!("cannot write the access log: {place}: {error}; change `log.access_file`");
        io::Error::new(error.kind(), message)
    })
}

/// Replaces the filter of the process's log, once that is started.
static FILTER: OnceLock<Box<dyn Fn(EnvFilter) + Send + Sync>> = OnceLock::new();

/// Logs by the level of other settings from now on. Their format and file need a restart.
pub fn set_log_level(settings: &Settings) {
    set_access_sample(settings);
    if let Some(set) = FILTER.get() {
        set(filter(settings));
    }
}

/// Whether the level lets lines of the access log through.
pub fn has_access_lines(settings: &Settings) -> bool {
    let most = filter(settings).max_level_hint();
    settings.access && most.is_none_or(|most| most >= LevelFilter::INFO)
}

fn filter(settings: &Settings) -> EnvFilter {
    let filter = settings.level.parse();
    let mut filter = filter.unwrap_or_else(|_| EnvFilter::new("info"));
    // They warn of each failure of the Kubernetes API; discovery does so once for each reason.
    for library in ["kube_client", "kube_runtime"] {
        if !settings.level.contains(library) {
            let off = format!("{library}=off").parse();
            filter = filter.add_directive(off.expect("a target and a level"));
        }
    }
    if settings.access {
        return filter;
    }
    let off = format!("{ACCESS_LOG}=off").parse();
    filter.add_directive(off.expect("a target and a level"))
}

/// The first characters of what a client sent, as many as a message may show of it.
pub fn shortened(text: &str) -> &str {
    const CHARS_MAX: usize = 100;
    match text.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => &text[..end],
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_that_wants_no_colours_gets_none() {
        let check = |no_color: Option<&str>, term: Option<&str>, expected: bool| {
            let allows = allows_colours(no_color.map(OsStr::new), term.map(OsStr::new));
            assert_eq!(allows, expected, "{no_color:?} {term:?}");
        };
        check(None, None, true);
        check(Some(""), Some("xterm"), true);
        check(Some("1"), Some("xterm"), false);
        check(Some("0"), None, false);
        check(None, Some("dumb"), false);
    }
}
