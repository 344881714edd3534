//! What the command says of a batch. Pure.

use std::fmt::Write;
use std::path::Path;

use indicatif::{HumanBytes, HumanCount};

use super::batch_answer::{AnsweredError, BatchAnswer};
use super::begun_run::LineTally;
use super::line_rate::LineRate;

/// More errors than these show no more than that there are many.
const SHOWN_ERRORS: usize = 10;
/// Width of the names in front of a batch's values.
const NAME_WIDTH: usize = 10;

/// A batch as `warmroute batch status` prints it.
pub(super) fn status(batch: &BatchAnswer) -> String {
    let counts = batch.counts();
    let mut text = format!("{}: {}", batch.id, batch.status);
    if counts.total > 0 {
        let (finished, total) = (HumanCount(counts.finished()), HumanCount(counts.total));
        text += &format!(", {finished} of {total} lines are finished");
        if counts.failed > 0 {
            text += &format!(", {} of them failed", HumanCount(counts.failed));
        }
    }
    text.push('\n');
    let mut row = |name: &str, value: &str| {
        if !value.is_empty() {
            // Writing into a text does not fail.
            let _ = writeln!(text, "{name:<NAME_WIDTH$} {value}");
        }
    };
    row("endpoint", &batch.endpoint);
    row("created", &time(batch.created_at));
    let expires_at = batch.expires_at.filter(|_| !batch.is_over());
    row("expires", &time(expires_at));
    row("input", &batch.input_file_id);
    row(
        "output",
        batch.output_file_id.as_deref().unwrap_or_default(),
    );
    row("errors", batch.error_file_id.as_deref().unwrap_or_default());
    text += &problems(batch.problems());
    text
}

fn time(unix_s: Option<i64>) -> String {
    let time = unix_s.and_then(|unix_s| jiff::Timestamp::from_second(unix_s).ok());
    time.map_or_else(String::new, |time| time.to_string())
}

/// A line for each of the first errors, by line number.
pub(super) fn problems(errors: &[AnsweredError]) -> String {
    let mut text = String::new();
    for error in errors.iter().take(SHOWN_ERRORS) {
        if let Some(line) = error.line {
            text += &format!("line {line}: ");
        }
        text += error.message.as_deref().unwrap_or("no message");
        if let Some(code) = &error.code {
            text += &format!(" ({code})");
        }
        text.push('\n');
    }
    if errors.len() > SHOWN_ERRORS {
        text += &format!("and {} more\n", errors.len() - SHOWN_ERRORS);
    }
    text
}

/// What stands beside the bar of a batch that runs.
pub(super) fn progress(batch: &BatchAnswer, rate: &LineRate) -> String {
    let counts = batch.counts();
    let mut text = batch.status.replace('_', " ");
    if counts.total == 0 {
        return text;
    }
    let (finished, total) = (HumanCount(counts.finished()), HumanCount(counts.total));
    text = format!("{finished} of {total} lines, {text}");
    if counts.failed > 0 {
        text += &format!(", {} failed", HumanCount(counts.failed));
    }
    if batch.is_over() {
        return text;
    }
    if let Some(lines) = rate.per_second() {
        text += &format!(", {lines:.1} lines/s");
    }
    let left = counts.total.saturating_sub(counts.finished());
    if let Some(time) = rate.time_left(left).filter(|_| left > 0) {
        text += &format!(", {} left", humantime::format_duration(time));
    }
    text
}

pub(super) fn bytes(done: u64, total: u64) -> String {
    if total == 0 {
        return HumanBytes(done).to_string();
    }
    format!("{} of {}", HumanBytes(done), HumanBytes(total))
}

/// How to go on with a batch, or to end it.
pub(super) fn how_to_go_on(batch_id: &str, url: &str) -> String {
    format!(
        "the batch {batch_id} goes on at {url}; the same command again waits for it, and \
         `warmroute batch cancel {batch_id} --url {url}` ends it"
    )
}

/// What a run came to.
pub(super) fn result(tally: &LineTally, output: &Path, errors: &Path) -> String {
    let (succeeded, lines) = (HumanCount(tally.succeeded), HumanCount(tally.lines));
    let (status, output) = (&tally.status, output.display());
    let mut text = format!("{status}: {succeeded} of {lines} lines succeeded: {output}");
    if tally.failed > 0 {
        let failed = HumanCount(tally.failed);
        text += &format!("; {failed} did not: {}", errors.display());
    }
    if tally.missing() > 0 {
        text += &format!("; {} are in neither file", HumanCount(tally.missing()));
    }
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::batch_answer::AnsweredCounts;
    use super::*;
    use crate::observe;

    fn batch(status: &str, total: u64, completed: u64, failed: u64) -> BatchAnswer {
        BatchAnswer {
            id: "batch_1".to_owned(),
            status: status.to_owned(),
            request_counts: Some(AnsweredCounts {
                total,
                completed,
                failed,
            }),
            ..BatchAnswer::default()
        }
    }

    #[test]
    fn progress_has_counts_rate_and_time_left_once_they_are_known() {
        let begin = observe::now();
        let mut rate = LineRate::default();
        assert_eq!(progress(&batch("validating", 0, 0, 0), &rate), "validating");
        let text = progress(&batch("in_progress", 2_000, 0, 0), &rate);
        assert_eq!(text, "0 of 2,000 lines, in progress");
        rate.add(begin, 0);
        rate.add(begin + Duration::from_secs(10), 500);
        let text = progress(&batch("in_progress", 2_000, 497, 3), &rate);
        assert_eq!(
            text,
            "500 of 2,000 lines, in progress, 3 failed, 50.0 lines/s, 30s left"
        );
        let text = progress(&batch("completed", 2_000, 2_000, 0), &rate);
        assert_eq!(text, "2,000 of 2,000 lines, completed");
    }

    #[test]
    fn a_status_names_what_there_is() {
        let mut batch = batch("expired", 10, 7, 1);
        batch.endpoint = "/v1/completions".to_owned();
        batch.created_at = Some(1_784_740_000);
        batch.expires_at = Some(1_784_740_001);
        batch.output_file_id = Some("file-o".to_owned());
        assert_eq!(
            status(&batch),
            "batch_1: expired, 8 of 10 lines are finished, 1 of them failed\n\
             endpoint   /v1/completions\n\
             created    2026-07-22T17:06:40Z\n\
             output     file-o\n"
        );
    }

    #[test]
    fn a_result_says_how_many_lines_are_where() {
        let check = |succeeded, failed, expected: &str| {
            let tally = LineTally {
                status: "completed".to_owned(),
                lines: 2_000,
                succeeded,
                failed,
            };
            let text = result(&tally, Path::new("out.jsonl"), Path::new("bad.jsonl"));
            let expected = format!("completed: {expected}\n");
            assert_eq!(text, expected);
        };
        check(2_000, 0, "2,000 of 2,000 lines succeeded: out.jsonl");
        check(
            1_997,
            3,
            "1,997 of 2,000 lines succeeded: out.jsonl; 3 did not: bad.jsonl",
        );
        check(
            1_990,
            3,
            "1,990 of 2,000 lines succeeded: out.jsonl; 3 did not: bad.jsonl; 7 are in neither file",
        );
    }

    #[test]
    fn the_first_errors_are_shown_by_their_lines() {
        let error = |line| AnsweredError {
            code: Some("missing".to_owned()),
            line: Some(line),
            message: Some("no url".to_owned()),
        };
        assert_eq!(problems(&[error(3)]), "line 3: no url (missing)\n");
        let many: Vec<AnsweredError> = (1..=12).map(error).collect();
        let text = problems(&many);
        assert_eq!(text.lines().count(), 11);
        assert!(text.ends_with("and 2 more\n"), "{text}");
    }
}
