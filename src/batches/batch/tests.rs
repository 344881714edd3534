use super::*;

fn record() -> BatchRecord {
    let day = Duration::from_secs(86_400);
    BatchRecord {
        id: new_batch_id(Flavor::OpenAi, 0xab),
        tenant_name: "team".to_owned(),
        input_file_id: "file-1".to_owned(),
        completion_window: "24h".to_owned(),
        metadata: Some(BTreeMap::from([("k".to_owned(), "v".to_owned())])),
        ..BatchRecord::new(1_000, day, 30 * day)
    }
}

#[test]
fn an_id_shows_the_api() {
    let id = new_batch_id(Flavor::OpenAi, 0xab);
    assert_eq!(id, "batch_000000000000000000000000000000ab");
    let id = new_batch_id(Flavor::Messages, u128::MAX);
    assert_eq!(id, "msgbatch_ffffffffffffffffffffffffffffffff");
}

#[test]
fn a_new_batch_has_its_times() {
    let new = record();
    assert_eq!(new.expires_ms, 86_401_000);
    assert_eq!(new.delete_ms, 30 * 86_400_000 + 1_000);
    assert!(!new.webhooks_sent);
    // It is not deleted before it can have ended.
    let short = BatchRecord::new(0, Duration::from_secs(60), Duration::from_secs(1));
    assert_eq!((short.expires_ms, short.delete_ms), (60_000, 86_460_000));
}

#[test]
fn a_refusal_counts_at_once_where_the_batch_was_accepted_and_elsewhere_after_a_minute() {
    let of = |accepted_by: Option<u64>| BatchRecord {
        accepted_by,
        ..record()
    };
    for (accepted_by, now_ms, expected) in [
        (Some(1), 1_000, None),
        (Some(2), 1_000, Some(61_000)),
        (Some(2), 60_999, Some(61_000)),
        (Some(2), 61_000, None),
        // An older release has accepted it.
        (None, 1_000, None),
    ] {
        let found = of(accepted_by).refusal_waits_until(1, now_ms);
        assert_eq!(found, expected, "{accepted_by:?} {now_ms}");
    }
    let short = BatchRecord {
        accepted_by: Some(2),
        ..BatchRecord::new(0, Duration::from_secs(5), Duration::from_secs(60))
    };
    assert_eq!(short.refusal_waits_until(1, 0), Some(5_000));
}

#[test]
fn a_record_is_read_back() {
    let mut record = record();
    record.status = BatchStatus::InProgress;
    record.claims = vec![
        Claim {
            work: Work::Shard(3),
            owner: u64::MAX,
            until_ms: 7,
        },
        Claim {
            work: Work::Validate,
            owner: 1,
            until_ms: 8,
        },
    ];
    record.returned = vec![1];
    record.accepted_by = Some(u64::MAX);
    record.errors = vec![LineError::new("c", "m", Some("p")).at_line(4)];
    assert_eq!(BatchRecord::from_json(&record.to_json()).unwrap(), record);
}

/// Changing these texts would lose the batches of running replicas.
#[test]
fn the_texts_of_a_record_stay_as_they_are() {
    let text = |work: Work| serde_json::to_string(&work).unwrap();
    assert_eq!(text(Work::Shard(3)), r#"{"shard":3}"#);
    assert_eq!(text(Work::Finalize), r#""finalize""#);
    let record = BatchRecord {
        id: "batch_1".to_owned(),
        status: BatchStatus::InProgress,
        flavor: Flavor::Messages,
        endpoint: LineEndpoint::ChatCompletions,
        ending: Ending::Cancelled,
        ..BatchRecord::default()
    };
    let json: Value = serde_json::from_slice(&record.to_json()).unwrap();
    assert_eq!(json["status"], "in_progress");
    assert_eq!(json["flavor"], "messages");
    assert_eq!(json["endpoint"], "chat_completions");
    assert_eq!(json["ending"], "cancelled");
}

/// Each member has another value than its default.
#[test]
fn the_members_of_a_record_stay_as_they_are() {
    const WRITTEN: &str = r#"{
        "id": "msgbatch_1", "tenant_name": "t", "flavor": "messages", "endpoint": "messages",
        "input_file_id": "input.jsonl", "completion_window": "24h", "metadata": {"k": "v"},
        "output_expires_after_s": 1, "status": "finalizing", "ending": "expired", "model": "m",
        "errors": [{"code": "c", "line": 4, "message": "m", "param": "p"}],
        "output_file_id": "o", "error_file_id": "e", "created_ms": 2, "expires_ms": 3, "delete_ms": 4,
        "in_progress_ms": 5, "finalizing_ms": 6, "completed_ms": 7, "failed_ms": 8, "expired_ms": 9,
        "cancelling_ms": 10, "cancelled_ms": 11, "is_validated": true, "shard_count": 12, "tokens": 13,
        "next_shard": 14, "returned": [15],
        "claims": [{"work": {"shard": 3}, "owner": 18446744073709551615, "until_ms": 16}],
        "counts": {"total": 20, "completed": 17, "failed": 1, "not_run": 2},
        "usage": {"input_tokens": 18, "output_tokens": 19, "cached_tokens": 20},
        "webhooks_sent": true, "parts_deleted": true, "parts_retry_ms": 21, "accepted_by": 22,
        "is_unconfirmed": true
    }"#;
    let record = BatchRecord::from_json(WRITTEN.as_bytes()).unwrap();
    assert_eq!(record.unknown, Map::new());
    let written: Value = serde_json::from_slice(&record.to_json()).unwrap();
    let expected: Value = serde_json::from_str(WRITTEN).unwrap();
    assert_eq!(written, expected);
}

#[test]
fn what_a_newer_release_has_added_to_a_record_outlasts_a_change_of_it() {
    let newer = br#"{"id":"batch_1","added":3,"new":{"x":[1,null]}}"#;
    let mut record = BatchRecord::from_json(newer).unwrap();
    assert!(record.cancel(5));
    let written: Value = serde_json::from_slice(&record.to_json()).unwrap();
    assert_eq!(written["status"], "cancelling");
    assert_eq!(written["added"], 3);
    assert_eq!(written["new"], serde_json::json!({"x": [1, null]}));
}

#[test]
fn records_of_other_releases_are_read() {
    let older = br#"{"id":"batch_1","claims":[{"work":"validate","owner":1,"until_ms":2}]}"#;
    let record = BatchRecord::from_json(older).unwrap();
    assert_eq!(record.claims.len(), 1);
    assert_eq!(record.status, BatchStatus::Validating);
    let newer =
        br#"{"id":"batch_1","new":{"x":[1]},"counts":{"total":3,"paused":2},"usage":{"audio":1}}"#;
    assert_eq!(BatchRecord::from_json(newer).unwrap().counts.total, 3);
    for wrong in [
        &b"{}"[..],
        b"[]",
        b"",
        br#"{"id":"batch_1","status":"new"}"#,
    ] {
        assert!(BatchRecord::from_json(wrong).is_err());
    }
}

#[test]
fn who_has_cancelled_never_sees_it_finalizing() {
    let mut record = record();
    record.status = BatchStatus::Finalizing;
    assert_eq!(record.shown_status(), BatchStatus::Finalizing);
    record.ending = Ending::Cancelled;
    assert_eq!(record.shown_status(), BatchStatus::Cancelling);
    record.status = BatchStatus::Cancelled;
    assert_eq!(record.shown_status(), BatchStatus::Cancelled);
}
