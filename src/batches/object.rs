//! A batch as clients get it: OpenAI's `Batch`, or Anthropic's `MessageBatch` if that API made it. Pure.

use bytes::Bytes;
use serde_json::{Value, json};

use super::batch::BatchRecord;
use super::line::Flavor;
use super::messages_batch;

impl BatchRecord {
    pub fn object(&self) -> Bytes {
        let object = match self.flavor {
            Flavor::OpenAi => openai_object(self),
            Flavor::Messages => messages_batch::object(self),
        };
        Bytes::from(object.to_string())
    }
}

/// OpenAI's page of a list.
pub fn list_object(records: &[BatchRecord], has_more: bool) -> Bytes {
    let list = json!({
        "object": "list",
        "data": records.iter().map(openai_object).collect::<Vec<_>>(),
        "first_id": records.first().map(|record| &record.id),
        "last_id": records.last().map(|record| &record.id),
        "has_more": has_more,
    });
    Bytes::from(list.to_string())
}

fn openai_object(record: &BatchRecord) -> Value {
    let seconds = |millis: u64| millis / 1_000;
    let errors = match &record.errors[..] {
        [] => Value::Null,
        errors => json!({"object": "list", "data": errors}),
    };
    let counts = record.counts;
    let usage = record.usage;
    json!({
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint.path(),
        "model": record.model,
        "errors": errors,
        "input_file_id": record.input_file_id,
        "completion_window": record.completion_window,
        "status": record.shown_status().as_str(),
        "output_file_id": record.output_file_id,
        "error_file_id": record.error_file_id,
        "created_at": seconds(record.created_ms),
        "in_progress_at": record.in_progress_ms.map(seconds),
        "expires_at": seconds(record.expires_ms),
        "finalizing_at": record.finalizing_ms.map(seconds),
        "completed_at": record.completed_ms.map(seconds),
        "failed_at": record.failed_ms.map(seconds),
        "expired_at": record.expired_ms.map(seconds),
        "cancelling_at": record.cancelling_ms.map(seconds),
        "cancelled_at": record.cancelled_ms.map(seconds),
        "request_counts": {
            "total": counts.total,
            "completed": counts.completed,
            // The error file has the lines that did not run, too.
            "failed": counts.failed.saturating_add(counts.not_run),
        },
        "usage": {
            "input_tokens": usage.input_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.output_tokens,
            // Most engines do not count them apart; the SDKs want a number.
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.input_tokens.saturating_add(usage.output_tokens),
        },
        "metadata": record.metadata,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::batches::batch::{BatchStatus, Ending, RequestCounts, Usage};
    use crate::batches::line::{LineEndpoint, LineError};

    fn parsed(bytes: &Bytes) -> Value {
        serde_json::from_slice(bytes).unwrap()
    }

    fn record() -> BatchRecord {
        BatchRecord {
            id: "batch_1".to_owned(),
            endpoint: LineEndpoint::Embeddings,
            input_file_id: "file-1".to_owned(),
            completion_window: "24h".to_owned(),
            created_ms: 1_999,
            expires_ms: 86_401_999,
            ..BatchRecord::default()
        }
    }

    #[test]
    fn a_new_batch_has_all_members_of_the_published_type() {
        let expected = json!({
            "id": "batch_1",
            "object": "batch",
            "endpoint": "/v1/embeddings",
            "model": null,
            "errors": null,
            "input_file_id": "file-1",
            "completion_window": "24h",
            "status": "validating",
            "output_file_id": null,
            "error_file_id": null,
            "created_at": 1,
            "in_progress_at": null,
            "expires_at": 86_401,
            "finalizing_at": null,
            "completed_at": null,
            "failed_at": null,
            "expired_at": null,
            "cancelling_at": null,
            "cancelled_at": null,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "usage": {
                "input_tokens": 0,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": 0,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": 0,
            },
            "metadata": null,
        });
        assert_eq!(parsed(&record().object()), expected);
    }

    #[test]
    fn an_expired_batch_counts_what_did_not_run_as_failed() {
        let ended = BatchRecord {
            status: BatchStatus::Expired,
            ending: Ending::Expired,
            expired_ms: Some(90_000_000),
            metadata: Some(BTreeMap::from([("k".to_owned(), "v".to_owned())])),
            counts: RequestCounts {
                total: 9,
                completed: 5,
                failed: 1,
                not_run: 3,
            },
            usage: Usage {
                input_tokens: 70,
                output_tokens: 8,
                cached_tokens: 60,
            },
            ..record()
        };
        let object = parsed(&ended.object());
        assert_eq!(object["status"], "expired");
        assert_eq!(object["expired_at"], 90_000);
        let counts = json!({"total": 9, "completed": 5, "failed": 4});
        assert_eq!(object["request_counts"], counts);
        assert_eq!(object["usage"]["total_tokens"], 78);
        assert_eq!(object["metadata"], json!({"k": "v"}));
    }

    #[test]
    fn errors_are_a_list_of_objects_with_lines() {
        let failed = BatchRecord {
            status: BatchStatus::Failed,
            errors: vec![
                LineError::new("invalid_url", "wrong", Some("url")).at_line(3),
                LineError::new("empty_file", "empty", None),
            ],
            ..record()
        };
        let expected = json!({"object": "list", "data": [
            {"code": "invalid_url", "line": 3, "message": "wrong", "param": "url"},
            {"code": "empty_file", "line": null, "message": "empty", "param": null},
        ]});
        assert_eq!(parsed(&failed.object())["errors"], expected);
    }

    #[test]
    fn a_list_names_its_first_and_its_last() {
        let last = BatchRecord {
            id: "batch_2".to_owned(),
            ..record()
        };
        let list = parsed(&list_object(&[record(), last], true));
        assert_eq!(list["first_id"], "batch_1");
        assert_eq!(list["last_id"], "batch_2");
        assert_eq!(list["has_more"], true);
        assert_eq!(list["data"][1]["object"], "batch");
        let empty = json!({"object": "list", "data": [], "first_id": null, "last_id": null, "has_more": false});
        assert_eq!(parsed(&list_object(&[], false)), empty);
    }
}
