//! The objects of Anthropic's Message Batches. Pure.
//!
//! `messages_requests` reads what such a batch is created with; `output` writes its results.

use std::time::{Duration, UNIX_EPOCH};

use bytes::Bytes;
use serde_json::{Value, json};

use super::batch::{BatchRecord, BatchStatus, Ending, RequestCounts};

/// The last second of the year 9999: later times have no RFC 3339 text.
const LAST_MS: u64 = 253_402_300_799_000;

/// Anthropic's `MessageBatch`.
pub fn object(record: &BatchRecord) -> Value {
    let has_results = record.status.is_terminal() && record.output_file_id.is_some();
    // Without a host: the SDKs then ask the router that they asked for the object, by the same name.
    let results = has_results.then(|| format!("/v1/messages/batches/{}/results", record.id));
    json!({
        "id": record.id,
        "type": "message_batch",
        "processing_status": processing_status(record),
        "request_counts": request_counts(record),
        "created_at": time_text(record.created_ms),
        "expires_at": time_text(record.expires_ms),
        "ended_at": record.ended_ms().map(time_text),
        "cancel_initiated_at": record.cancelling_ms.map(time_text),
        "archived_at": null,
        "results_url": results,
    })
}

/// Anthropic's page of a list.
pub fn list_object(records: &[BatchRecord], has_more: bool) -> Bytes {
    let list = json!({
        "data": records.iter().map(object).collect::<Vec<_>>(),
        "first_id": records.first().map(|record| &record.id),
        "last_id": records.last().map(|record| &record.id),
        "has_more": has_more,
    });
    Bytes::from(list.to_string())
}

/// What a client gets that has deleted a batch.
pub fn deleted_object(id: &str) -> Bytes {
    Bytes::from(json!({"id": id, "type": "message_batch_deleted"}).to_string())
}

/// Why a batch cannot be deleted yet.
pub fn undeletable(record: &BatchRecord) -> Option<&'static str> {
    match processing_status(record) {
        "ended" => None,
        "canceling" => Some("it cannot be deleted: it is being canceled, wait until it has ended"),
        _ => Some("it cannot be deleted: cancel it first"),
    }
}

fn processing_status(record: &BatchRecord) -> &'static str {
    match record.shown_status() {
        BatchStatus::Validating | BatchStatus::InProgress | BatchStatus::Finalizing => {
            "in_progress"
        }
        BatchStatus::Cancelling => "canceling",
        BatchStatus::Failed
        | BatchStatus::Completed
        | BatchStatus::Expired
        | BatchStatus::Cancelled => "ended",
    }
}

/// All requests are processing until the whole batch has ended, as Anthropic counts them.
fn request_counts(record: &BatchRecord) -> Value {
    let RequestCounts {
        total,
        completed,
        failed,
        not_run,
    } = record.counts;
    let if_ended_as = |ending| if record.ending == ending { not_run } else { 0 };
    let (processing, succeeded, errored) = match record.status {
        BatchStatus::Failed => (0, 0, total),
        // It failed while it was being cancelled.
        BatchStatus::Cancelled if !record.errors.is_empty() => (0, 0, total),
        status if status.is_terminal() => (0, completed, failed),
        _ => (total, 0, 0),
    };
    let is_ended = record.status.is_terminal();
    json!({
        "processing": processing,
        "succeeded": succeeded,
        "errored": errored,
        "canceled": if is_ended { if_ended_as(Ending::Cancelled) } else { 0 },
        "expired": if is_ended { if_ended_as(Ending::Expired) } else { 0 },
    })
}

/// RFC 3339, such as `2026-01-31T12:00:00.000Z`.
fn time_text(millis: u64) -> String {
    let time = UNIX_EPOCH + Duration::from_millis(millis.min(LAST_MS));
    humantime::format_rfc3339_millis(time).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batches::line::{Flavor, LineEndpoint, LineError};

    fn record(status: BatchStatus) -> BatchRecord {
        BatchRecord {
            id: "msgbatch_1".to_owned(),
            flavor: Flavor::Messages,
            endpoint: LineEndpoint::Messages,
            status,
            created_ms: 1_767_225_600_250,
            expires_ms: 1_767_312_000_250,
            counts: RequestCounts {
                total: 9,
                completed: 5,
                failed: 1,
                not_run: 0,
            },
            ..BatchRecord::default()
        }
    }

    #[test]
    fn a_running_batch_has_all_members_of_the_published_type() {
        let expected = json!({
            "id": "msgbatch_1",
            "type": "message_batch",
            "processing_status": "in_progress",
            "request_counts": {"processing": 9, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0},
            "created_at": "2026-01-01T00:00:00.250Z",
            "expires_at": "2026-01-02T00:00:00.250Z",
            "ended_at": null,
            "cancel_initiated_at": null,
            "archived_at": null,
            "results_url": null,
        });
        let found = record(BatchStatus::InProgress).object();
        assert_eq!(serde_json::from_slice::<Value>(&found).unwrap(), expected);
    }

    #[test]
    fn each_request_of_an_ended_batch_is_counted_once() {
        let check = |status, ending, not_run, kind: &str| {
            let mut ended = record(status);
            ended.ending = ending;
            ended.counts.not_run = not_run;
            ended.counts.failed = 4 - not_run;
            ended.output_file_id = Some("file-1".to_owned());
            let object = object(&ended);
            assert_eq!(object["processing_status"], "ended");
            assert_eq!(
                object["results_url"],
                "/v1/messages/batches/msgbatch_1/results"
            );
            let counts = object["request_counts"].as_object().unwrap();
            let sum: u64 = counts.values().map(|count| count.as_u64().unwrap()).sum();
            assert_eq!(sum, 9, "{counts:?}");
            assert_eq!(counts["succeeded"], 5);
            assert_eq!(counts[kind], not_run, "{kind}");
        };
        check(BatchStatus::Cancelled, Ending::Cancelled, 3, "canceled");
        check(BatchStatus::Expired, Ending::Expired, 2, "expired");
        for status in [BatchStatus::Failed, BatchStatus::Cancelled] {
            let mut all = record(status);
            all.errors = vec![LineError::new("file_not_found", "gone", None)];
            assert_eq!(object(&all)["request_counts"]["errored"], 9);
            assert_eq!(object(&all)["results_url"], Value::Null);
        }
    }

    #[test]
    fn a_batch_that_is_being_cancelled_says_since_when() {
        let mut cancelled = record(BatchStatus::Finalizing);
        cancelled.ending = Ending::Cancelled;
        cancelled.cancelling_ms = Some(1_767_225_601_000);
        let object = object(&cancelled);
        assert_eq!(object["processing_status"], "canceling");
        assert!(
            undeletable(&cancelled)
                .unwrap()
                .contains("wait until it has ended")
        );
        let running = record(BatchStatus::InProgress);
        assert!(undeletable(&running).unwrap().contains("cancel it first"));
        assert_eq!(undeletable(&record(BatchStatus::Cancelled)), None);
        assert_eq!(object["cancel_initiated_at"], "2026-01-01T00:00:01.000Z");
    }

    #[test]
    fn any_number_is_a_time() {
        assert_eq!(time_text(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(time_text(u64::MAX), "9999-12-31T23:59:59.000Z");
    }

    #[test]
    fn a_list_has_cursors() {
        let list = list_object(&[record(BatchStatus::Completed)], false);
        let list: Value = serde_json::from_slice(&list).unwrap();
        assert_eq!(list["data"][0]["type"], "message_batch");
        assert_eq!(list["first_id"], "msgbatch_1");
        assert_eq!(list["last_id"], "msgbatch_1");
        assert_eq!(list["has_more"], false);
        let deleted: Value = serde_json::from_slice(&deleted_object("msgbatch_1")).unwrap();
        let expected = json!({"id": "msgbatch_1", "type": "message_batch_deleted"});
        assert_eq!(deleted, expected);
    }
}
