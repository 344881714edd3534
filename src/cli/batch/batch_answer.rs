//! A batch as a router's API answers it: what the command reads and says of it. Pure.

use indicatif::HumanCount;
use serde::Deserialize;

use crate::batches::line::LineError;

/// More errors than these show no more than that there are many.
const SHOWN_ERRORS: usize = 10;

/// OpenAI's Batch object.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct BatchAnswer {
    pub(super) id: String,
    pub(super) status: String,
    pub(super) input_file_id: String,
    pub(super) completion_window: Option<String>,
    pub(super) output_file_id: Option<String>,
    pub(super) error_file_id: Option<String>,
    pub(super) request_counts: RequestCounts,
    errors: Option<Errors>,
}

/// How many of a batch's requests are over.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct RequestCounts {
    pub(super) total: u64,
    pub(super) completed: u64,
    failed: u64,
}

#[derive(Clone, Debug, Deserialize)]
struct Errors {
    data: Vec<LineError>,
}

/// A page of batches, the newest first.
#[derive(Debug, Deserialize)]
pub(super) struct BatchPage {
    pub(super) data: Vec<BatchAnswer>,
    /// Whether older ones follow.
    #[serde(default)]
    pub(super) has_more: bool,
}

impl RequestCounts {
    pub(super) fn finished(self) -> u64 {
        self.completed.saturating_add(self.failed)
    }
}

impl BatchAnswer {
    /// Whether nothing more happens to the batch.
    pub(super) fn is_over(&self) -> bool {
        let over = ["completed", "failed", "expired", "cancelled"];
        over.contains(&self.status.as_str())
    }

    /// Why no line was run, if the input was refused.
    pub(super) fn refusal(&self) -> Option<String> {
        let errors = self.errors.as_ref();
        let errors = errors.map_or(&[][..], |errors| &errors.data[..]);
        (self.status == "failed").then(|| problems(&self.id, errors))
    }

    pub(super) fn progress(&self) -> String {
        let counts = self.request_counts;
        let status = self.status.replace('_', " ");
        if counts.total == 0 {
            return status;
        }
        let (finished, total) = (HumanCount(counts.finished()), HumanCount(counts.total));
        let mut text = format!("{finished} of {total} lines, {status}");
        if counts.failed > 0 {
            text += &format!(", {} failed", HumanCount(counts.failed));
        }
        text
    }
}

/// A line for each of the first errors of an input, by line number.
pub(super) fn problems(input: &str, errors: &[LineError]) -> String {
    let mut text = format!("{input}: the batch cannot run");
    for error in errors.iter().take(SHOWN_ERRORS) {
        text.push('\n');
        if let Some(line) = error.line {
            text += &format!("line {line}: ");
        }
        text += &format!("{} ({})", error.message, error.code);
    }
    if errors.len() > SHOWN_ERRORS {
        text += &format!("\nand {} more", errors.len() - SHOWN_ERRORS);
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn batch(status: &str, [total, completed, failed]: [u64; 3]) -> BatchAnswer {
        let counts = json!({"total": total, "completed": completed, "failed": failed});
        let batch = json!({"id": "batch_1", "status": status, "input_file_id": "file-1", "request_counts": counts});
        serde_json::from_value(batch).unwrap()
    }

    #[test]
    fn a_batch_says_how_far_it_is_and_whether_it_is_over() {
        for (status, counts, is_over, expected) in [
            ("validating", [0, 0, 0], false, "validating"),
            (
                "in_progress",
                [2_000, 0, 0],
                false,
                "0 of 2,000 lines, in progress",
            ),
            (
                "finalizing",
                [5, 4, 1],
                false,
                "5 of 5 lines, finalizing, 1 failed",
            ),
            ("cancelling", [5, 4, 0], false, "4 of 5 lines, cancelling"),
            (
                "some new status",
                [5, 4, 0],
                false,
                "4 of 5 lines, some new status",
            ),
            ("completed", [5, 5, 0], true, "5 of 5 lines, completed"),
            ("expired", [5, 4, 0], true, "4 of 5 lines, expired"),
            ("cancelled", [5, 4, 0], true, "4 of 5 lines, cancelled"),
            ("failed", [0, 0, 0], true, "failed"),
        ] {
            let batch = batch(status, counts);
            assert_eq!(batch.is_over(), is_over, "{status}");
            assert_eq!(batch.progress(), expected);
            assert_eq!(batch.refusal().is_some(), status == "failed");
        }
    }

    #[test]
    fn the_first_errors_are_shown_by_their_lines() {
        let error = |line| LineError::new("missing", "no url", None).at_line(line);
        let expected = "in.jsonl: the batch cannot run\nline 3: no url (missing)";
        assert_eq!(problems("in.jsonl", &[error(3)]), expected);
        let many: Vec<LineError> = (1..=12).map(error).collect();
        let text = problems("in.jsonl", &many);
        assert_eq!(text.lines().count(), 12);
        assert!(text.ends_with("\nand 2 more"), "{text}");
    }
}
