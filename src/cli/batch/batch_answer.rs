//! A batch as a router's API answers it: what the command reads of it.

use serde::Deserialize;

/// OpenAI's Batch object. What a server leaves out is none.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct BatchAnswer {
    pub(super) id: String,
    pub(super) status: String,
    #[serde(default)]
    pub(super) endpoint: String,
    #[serde(default)]
    pub(super) input_file_id: String,
    #[serde(default)]
    pub(super) output_file_id: Option<String>,
    #[serde(default)]
    pub(super) error_file_id: Option<String>,
    #[serde(default)]
    pub(super) request_counts: Option<AnsweredCounts>,
    #[serde(default)]
    pub(super) errors: Option<AnsweredErrors>,
    #[serde(default)]
    pub(super) created_at: Option<i64>,
    #[serde(default)]
    pub(super) expires_at: Option<i64>,
}

/// How many of a batch's requests are over.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub(super) struct AnsweredCounts {
    pub(super) total: u64,
    pub(super) completed: u64,
    pub(super) failed: u64,
}

impl AnsweredCounts {
    pub(super) fn finished(self) -> u64 {
        self.completed.saturating_add(self.failed)
    }
}

/// Why a batch did not begin.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct AnsweredErrors {
    #[serde(default)]
    pub(super) data: Option<Vec<AnsweredError>>,
}

/// What is wrong with an input file, or a line of it.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct AnsweredError {
    #[serde(default)]
    pub(super) code: Option<String>,
    #[serde(default)]
    pub(super) line: Option<u64>,
    #[serde(default)]
    pub(super) message: Option<String>,
}

impl BatchAnswer {
    /// Whether nothing more happens to the batch.
    pub(super) fn is_over(&self) -> bool {
        let over = ["completed", "failed", "expired", "cancelled"];
        over.contains(&self.status.as_str())
    }

    /// Whether its input was refused, so that no line was run.
    pub(super) fn is_refused(&self) -> bool {
        self.status == "failed"
    }

    pub(super) fn counts(&self) -> AnsweredCounts {
        self.request_counts.unwrap_or_default()
    }

    pub(super) fn problems(&self) -> &[AnsweredError] {
        let data = self.errors.as_ref().and_then(|errors| errors.data.as_ref());
        data.map_or(&[], |data| &data[..])
    }
}

/// Anything that was created: a file, a batch.
#[derive(Debug, Deserialize)]
pub(super) struct CreatedObject {
    pub(super) id: String,
}

/// A page of batches, the newest first.
#[derive(Debug, Deserialize)]
pub(super) struct BatchPage {
    pub(super) data: Vec<BatchAnswer>,
    #[serde(default)]
    pub(super) has_more: bool,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_batch_is_read_with_and_without_what_may_be_left_out() {
        let small: BatchAnswer =
            serde_json::from_value(json!({"id": "batch_1", "status": "validating"})).unwrap();
        assert!(!small.is_over() && small.problems().is_empty());
        assert_eq!(small.counts().finished(), 0);
        let failed: BatchAnswer = serde_json::from_value(json!({
            "id": "batch_1", "object": "batch", "status": "failed", "endpoint": "/v1/completions",
            "input_file_id": "file-1", "output_file_id": null, "metadata": null,
            "request_counts": {"total": 5, "completed": 2, "failed": 1},
            "errors": {"object": "list", "data": [{"code": "c", "line": 3, "message": "m", "param": null}]},
        }))
        .unwrap();
        assert!(failed.is_over() && failed.is_refused());
        assert_eq!(failed.counts().finished(), 3);
        assert_eq!(failed.problems()[0].line, Some(3));
    }

    #[test]
    fn a_status_that_is_not_known_is_no_end() {
        let is_over = |status: &str| {
            let status = status.to_owned();
            BatchAnswer {
                status,
                ..BatchAnswer::default()
            }
            .is_over()
        };
        for status in ["completed", "failed", "expired", "cancelled"] {
            assert!(is_over(status), "{status}");
        }
        for status in [
            "validating",
            "in_progress",
            "finalizing",
            "cancelling",
            "new",
        ] {
            assert!(!is_over(status), "{status}");
        }
    }
}
