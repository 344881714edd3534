//! Progress of a step on standard error: a bar on a terminal, otherwise a line now and then.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Time between two lines when standard error is not a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

const TEMPLATE: &str = "{prefix:<6} [{bar:20}] {msg}";

/// Dropped before its end, the bar disappears.
#[derive(Debug)]
pub(super) struct StepProgress {
    name: &'static str,
    drawn: Drawn,
}

#[derive(Debug)]
enum Drawn {
    Bar(ProgressBar),
    Lines { next_line: Instant },
}

impl StepProgress {
    pub(super) fn start(now: Instant, name: &'static str) -> Self {
        let drawn = if io::stderr().is_terminal() {
            let style = ProgressStyle::with_template(TEMPLATE)
                .unwrap_or_else(|_| ProgressStyle::default_bar())
                .progress_chars("=> ");
            Drawn::Bar(ProgressBar::new(1).with_prefix(name).with_style(style))
        } else {
            Drawn::Lines {
                next_line: now + LINE_INTERVAL,
            }
        };
        Self { name, drawn }
    }

    pub(super) fn show(
        &mut self,
        now: Instant,
        (done, total): (u64, u64),
        message: impl FnOnce() -> String,
    ) {
        match &mut self.drawn {
            Drawn::Bar(bar) => {
                bar.set_length(total.max(1));
                bar.set_position(done);
                bar.set_message(message());
            }
            Drawn::Lines { next_line } if now >= *next_line => {
                *next_line = now + LINE_INTERVAL;
                write_line(&format!("{}: {}", self.name, message()));
            }
            Drawn::Lines { .. } => {}
        }
    }

    /// The next time that something is shown, it is.
    pub(super) fn has_news(&mut self, now: Instant) {
        if let Drawn::Lines { next_line } = &mut self.drawn {
            *next_line = now;
        }
    }

    /// Leaves what the step came to.
    pub(super) fn end(self, message: &str) {
        match self.drawn {
            Drawn::Bar(bar) => {
                bar.abandon_with_message(message.to_owned());
                // The bar leaves the cursor at the end of its line.
                write_line("");
            }
            Drawn::Lines { .. } => write_line(&format!("{}: {message}", self.name)),
        }
    }
}

/// A line on standard error, which may be closed.
pub(super) fn write_line(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}
