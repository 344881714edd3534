//! What a run looks like while it lasts: a bar on a terminal, a line now and then elsewhere.

use std::io::IsTerminal;
use std::time::Duration;
use std::time::Instant;

use indicatif::ProgressBar;
use indicatif::ProgressDrawTarget;
use indicatif::ProgressStyle;

use crate::sim::report;
use crate::sim::report::Tally;

/// Between two lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

const TEMPLATE: &str = "{prefix} [{bar:28}] {pos:>4}/{len}  {msg}";

#[derive(Debug)]
pub(super) struct Progress {
    name: &'static str,
    requests: u64,
    started: Instant,
    look: Look,
}

#[derive(Debug)]
enum Look {
    Bar(ProgressBar),
    Lines { next: Instant },
}

impl Progress {
    pub(super) fn start(now: Instant, name: &'static str, requests: u64) -> Self {
        let look = if std::io::stderr().is_terminal() {
            let style = ProgressStyle::with_template(TEMPLATE)
                .unwrap_or_else(|_| ProgressStyle::default_bar())
                .progress_chars("=> ");
            let target = ProgressDrawTarget::stderr();
            Look::Bar(
                ProgressBar::with_draw_target(Some(requests), target)
                    .with_prefix(name)
                    .with_style(style),
            )
        } else {
            Look::Lines {
                next: now + LINE_EVERY,
            }
        };
        Self {
            name,
            requests,
            started: now,
            look,
        }
    }

    pub(super) fn show(&mut self, now: Instant, tally: &Tally) {
        let message = self.message(now, tally);
        match &mut self.look {
            Look::Bar(bar) => {
                bar.set_message(message);
                bar.set_position(tally.requests());
            }
            Look::Lines { next } if now >= *next => {
                *next = now + LINE_EVERY;
                self.line(tally, &message);
            }
            Look::Lines { .. } => {}
        }
    }

    pub(super) fn finish(self, now: Instant, tally: &Tally) {
        let message = self.message(now, tally);
        match &self.look {
            Look::Bar(bar) => {
                bar.set_position(tally.requests());
                // Not `finish`, which would fill the bar even if requests are missing.
                bar.abandon_with_message(message);
            }
            Look::Lines { .. } => self.line(tally, &message),
        }
    }

    fn line(&self, tally: &Tally, message: &str) {
        let (name, done, of) = (self.name, tally.requests(), self.requests);
        eprintln!("{name} {done:>4}/{of}  {message}");
    }

    fn message(&self, now: Instant, tally: &Tally) -> String {
        let mut text = format!(
            "{:>2} s  cached {:>6}  TTFT p50 {:>7}",
            now.saturating_duration_since(self.started).as_secs(),
            report::percent(tally.cached_share()),
            report::milliseconds(tally.first_token(50)),
        );
        if tally.failed() > 0 {
            text.push_str(&format!("  failed {}", tally.failed()));
        }
        text
    }
}
