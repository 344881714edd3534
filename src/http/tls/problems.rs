//! Problems of settings as one text.

use super::contents::Problem;

/// All problems in one line.
pub(super) fn text(problems: &[Problem]) -> String {
    let problems = problems.iter();
    let lines: Vec<String> = problems
        .map(|(key, text)| format!("{key}: {text}"))
        .collect();
    lines.join("; ")
}
