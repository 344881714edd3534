//! Progress of a run on standard error: a bar on a terminal, otherwise a line every few seconds.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

/// Time between two progress lines when standard error is not a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// The width of the bar is chosen so that the longest message of `warmroute demo` fits in 80 columns.
const TEMPLATE: &str = "{prefix} [{bar:16}] {pos:>4}/{len}  {msg}";

/// The bars of runs that may run at the same time, one below the other.
#[derive(Debug, Default)]
pub(super) struct Bars(MultiProgress);

impl Bars {
    /// Writes a line above the bars.
    pub(super) fn write_line(&self, line: &str) {
        // Standard error may be closed.
        let _ = if std::io::stderr().is_terminal() {
            self.0.println(line)
        } else {
            writeln!(std::io::stderr(), "{line}")
        };
    }

    /// After the last run has finished.
    pub(super) fn end(self) {
        if std::io::stderr().is_terminal() {
            // The bars leave the cursor at the end of the last line.
            eprintln!();
        }
    }
}

#[derive(Debug)]
pub(super) struct Progress {
    name: String,
    requests: u64,
    display: Display,
}

#[derive(Debug)]
enum Display {
    Bar(ProgressBar),
    Lines { next_line: Instant },
}

impl Progress {
    pub(super) fn start(bars: &Bars, now: Instant, name: &str, requests: u64) -> Self {
        let display = if std::io::stderr().is_terminal() {
            let style = ProgressStyle::with_template(TEMPLATE)
                .unwrap_or_else(|_| ProgressStyle::default_bar())
                .progress_chars("=> ");
            let bar = ProgressBar::new(requests)
                .with_prefix(format!("{name:<11}"))
                .with_style(style);
            Display::Bar(bars.0.add(bar))
        } else {
            Display::Lines {
                next_line: now + LINE_INTERVAL,
            }
        };
        Self {
            name: name.to_owned(),
            requests,
            display,
        }
    }

    pub(super) fn show(&mut self, now: Instant, done: u64, message: impl FnOnce() -> String) {
        match &mut self.display {
            Display::Bar(bar) => {
                bar.set_message(message());
                bar.set_position(done);
            }
            Display::Lines { next_line } if now >= *next_line => {
                *next_line = now + LINE_INTERVAL;
                self.line(done, &message());
            }
            Display::Lines { .. } => {}
        }
    }

    pub(super) fn finish(self, done: u64, message: String) {
        match &self.display {
            Display::Bar(bar) => {
                bar.set_position(done);
                // Not `finish`, which would fill the bar even if requests are missing.
                bar.abandon_with_message(message);
            }
            Display::Lines { .. } => self.line(done, &message),
        }
    }

    fn line(&self, done: u64, message: &str) {
        eprintln!("{} {done:>4}/{}  {message}", self.name, self.requests);
    }
}
