//! Progress on standard error: a bar on a terminal, and lines that stay.

use std::io::{self, Write};

use indicatif::{ProgressBar, ProgressStyle};

pub(super) const BYTES: &str = "{prefix:<6} [{bar:20}] {bytes} of {total_bytes}, {eta} left";
pub(super) const LINES: &str = "{prefix:<6} [{bar:20}] {msg}, {per_sec}, {eta} left";

/// A bar that shows on a terminal only, and disappears when it is dropped.
pub(super) fn bar(name: &'static str, template: &str, total: u64) -> ProgressBar {
    let style = ProgressStyle::with_template(template);
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::new(total).with_prefix(name);
    bar.with_style(style.progress_chars("=> "))
}

/// A line on standard error, which may be closed, above a bar.
pub(super) fn say(bar: &ProgressBar, line: &str) {
    bar.suspend(|| write_line(line));
}

/// A line on standard error, which may be closed.
pub(super) fn write_line(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}
