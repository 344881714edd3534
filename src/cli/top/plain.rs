//! The table as text, for a pipe and for `--once`. Pure.

use std::fmt::Write as _;

use super::figures::Samples;
use super::state::{COLUMNS, State, rows, summary};

/// The whole table: names are not cut, so that scripts can read them.
pub(super) fn table(samples: &Samples, state: &State) -> String {
    let mut text = String::new();
    for line in summary(samples) {
        let _ = writeln!(text, "{line}");
    }
    text.push('\n');
    let rows = rows(samples, state);
    let widest = rows.iter().map(|row| row.cells[0].chars().count()).max();
    let width = |index: usize| {
        let (_, title, width) = COLUMNS[index];
        match index {
            0 => widest.unwrap_or(0).max(title.len()),
            _ => width,
        }
    };
    let titles: Vec<String> = COLUMNS
        .iter()
        .map(|(_, title, _)| (*title).to_owned())
        .collect();
    for cells in std::iter::once(&titles).chain(rows.iter().map(|row| &row.cells)) {
        let mut line = String::new();
        for (index, cell) in cells.iter().enumerate() {
            let _ = write!(line, "{cell:<width$} ", width = width(index));
        }
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::top::state::tests::three_workers;

    #[test]
    fn a_pipe_gets_the_summary_and_a_line_for_each_worker() {
        let text = table(&three_workers(), &State::default());
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 9, "{text}");
        assert!(lines[0].starts_with("ready   workers 1/3 up"));
        assert!(lines[5].starts_with("WORKER ROLE    STATE"), "{text}");
        assert!(
            lines[7].starts_with("gpu-b  both    up        3    12k"),
            "{text}"
        );
    }
}
