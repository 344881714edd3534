//! What a run looks like while it lasts: a bar on a terminal, a line now and then elsewhere.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Between two lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// A line of 80 characters, with the demo's longest message.
const TEMPLATE: &str = "{prefix} [{bar:16}] {pos:>4}/{len}  {msg}";

#[derive(Debug)]
pub(super) struct Progress {
    name: String,
    requests: u64,
    look: Look,
}

#[derive(Debug)]
enum Look {
    Bar(ProgressBar),
    Lines { next: Instant },
}

impl Progress {
    pub(super) fn start(now: Instant, name: &str, requests: u64) -> Self {
        let look = if std::io::stderr().is_terminal() {
            let style = ProgressStyle::with_template(TEMPLATE)
                .unwrap_or_else(|_| ProgressStyle::default_bar())
                .progress_chars("=> ");
            let target = ProgressDrawTarget::stderr();
            Look::Bar(
                ProgressBar::with_draw_target(Some(requests), target)
                    .with_prefix(name.to_owned())
                    .with_style(style),
            )
        } else {
            Look::Lines {
                next: now + LINE_EVERY,
            }
        };
        Self {
            name: name.to_owned(),
            requests,
            look,
        }
    }

    pub(super) fn show(&mut self, now: Instant, done: u64, message: impl FnOnce() -> String) {
        match &mut self.look {
            Look::Bar(bar) => {
                bar.set_message(message());
                bar.set_position(done);
            }
            Look::Lines { next } if now >= *next => {
                *next = now + LINE_EVERY;
                self.line(done, &message());
            }
            Look::Lines { .. } => {}
        }
    }

    pub(super) fn finish(self, done: u64, message: String) {
        match &self.look {
            Look::Bar(bar) => {
                bar.set_position(done);
                // Not `finish`, which would fill the bar even if requests are missing.
                bar.abandon_with_message(message);
                // It fills its last line and leaves the cursor there.
                eprintln!();
            }
            Look::Lines { .. } => self.line(done, &message),
        }
    }

    fn line(&self, done: u64, message: &str) {
        eprintln!("{} {done:>4}/{}  {message}", self.name, self.requests);
    }
}
