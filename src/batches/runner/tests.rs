mod hanging_store;
mod outbox;
mod storage;
mod world;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::task::{Context, Waker};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use serde_json::{Value, json};

use self::outbox::WatchfulOutbox;
use self::world::{
    Engines, FULL_MODEL, LINES, NEW_MODEL, Replica, Shared, has_ended, lines, lines_of,
};
use super::assembling::file_ids;
use super::look_pace::LookPace;
use super::{Runner, Taken};
use crate::batches::batch::{BatchRecord, BatchStatus, PARTS_KEPT_MS, Work, new_batch_id};
use crate::batches::file;
use crate::batches::line::Flavor;
use crate::batches::list_page::MIN_FETCHED;
use crate::batches::output::LineTries;
use crate::batches::paths;
use crate::batches::room_gate::RoomGate;
use crate::batches::routes::BatchEndpoint;
use crate::batches::service::key_of;
use crate::batches::shards::MAX_SHARD_LINES;
use crate::ids::Tenant;
use crate::observe;
use crate::store;
use crate::store::conversation::Order;
use crate::store::documents::{
    Collection, DocumentBounds, DocumentKey, InsertOutcome, NewDocument,
};

#[tokio::test]
async fn each_line_of_a_batch_has_one_result() {
    let shared = Shared::new();
    let replica = shared.replica();
    let file = shared.file(&replica, &lines("m")).await;
    let created = replica.create(&file).await;
    let id = created["id"].as_str().unwrap();
    let batch = replica.until(id, has_ended).await;
    replica.assert_whole(&batch).await;
    assert_eq!(replica.engines.answered.load(Relaxed), LINES as u32);
    replica.tasks.drain(Duration::from_secs(10)).await;
    assert_eq!(shared.storage.list("files/").await.unwrap().len(), 3);
    let page = replica.registry.text();
    assert!(page.contains("warmroute_batch_lines_total{outcome=\"completed\"} 599"));
    assert!(page.contains("warmroute_batches_ended_total{status=\"completed\"} 1"));
    assert!(page.contains("warmroute_batch_lines_waiting 0"));
    assert!(page.contains("warmroute_batch_shards_running 0"));
}

#[tokio::test]
async fn the_parts_of_a_batch_go_though_the_replica_that_ended_it_did_not_learn_that() {
    let shared = Shared::new();
    let first = shared.replica();
    let file = shared.file(&first, &lines("m")).await;
    let created = first.create(&file).await;
    let id = created["id"].as_str().unwrap();
    first.until(id, has_ended).await;
    first.tasks.drain(Duration::from_secs(10)).await;
    let part = paths::part(id, 0, 1, 1);
    let left = Bytes::from_static(b"left");
    shared.storage.put(&part, left).await.unwrap();
    let key = key_of(Tenant::default(), Flavor::OpenAi, id).unwrap();
    let unsettled = first.batches.records.change(&key, |record, now_ms| {
        record.webhooks_sent = false;
        record.completed_ms = Some(now_ms - PARTS_KEPT_MS);
        true
    });
    unsettled.await.unwrap();
    let _second = shared.replica();
    shared.until_empty(&paths::parts(id)).await;
    // What clients read and what says where lines are stays.
    let left = shared.storage.list("batches/").await.unwrap();
    assert_eq!(left, [format!("batches/{id}/shards.json")]);
    assert_eq!(shared.storage.list("files/").await.unwrap().len(), 3);
}

#[tokio::test]
async fn a_batch_whose_end_the_store_has_lost_ends_with_the_same_results() {
    let shared = Shared::new();
    let first = shared.replica();
    let file = shared.file(&first, &lines("m")).await;
    let created = first.create(&file).await;
    let id = created["id"].as_str().unwrap();
    first.until(id, has_ended).await;
    first.tasks.drain(Duration::from_secs(10)).await;
    // As of a snapshot that was made while the results were put together.
    let key = key_of(Tenant::default(), Flavor::OpenAi, id).unwrap();
    let rolled_back = first.batches.records.change(&key, |record, _| {
        record.status = BatchStatus::Finalizing;
        record.completed_ms = None;
        record.output_file_id = None;
        record.error_file_id = None;
        record.webhooks_sent = false;
        true
    });
    rolled_back.await.unwrap();
    let second = shared.replica();
    let batch = second.until(id, has_ended).await;
    second.assert_whole(&batch).await;
    assert_eq!(second.engines.answered.load(Relaxed), 0);
}

#[tokio::test]
async fn results_that_are_listed_late_are_among_those_of_the_batch() {
    let shared = Shared::new();
    let first = shared.replica();
    let file = shared.file(&first, &lines("m")).await;
    let created = first.create(&file).await;
    let id = created["id"].as_str().unwrap();
    first.until(id, has_ended).await;
    first.tasks.drain(Duration::from_secs(10)).await;
    // All shards have ended just now, and a part is not listed yet.
    let parts = shared.storage.list(&paths::shard_parts(id, 0)).await;
    let late = parts.unwrap().remove(0);
    let part = shared.storage.read_whole(&late, 1 << 20).await.unwrap();
    shared.storage.delete(&late).await.unwrap();
    let key = key_of(Tenant::default(), Flavor::OpenAi, id).unwrap();
    let rolled_back = first.batches.records.change(&key, |record, now_ms| {
        record.status = BatchStatus::Finalizing;
        record.finalizing_ms = Some(now_ms);
        record.completed_ms = None;
        record.output_file_id = None;
        record.error_file_id = None;
        record.webhooks_sent = false;
        true
    });
    rolled_back.await.unwrap();
    let second = shared.replica();
    let works = &second.batches.metrics.works;
    let returned = works.with_label_values(&["finalize", "returned"]);
    second.until(id, |_| returned.get() > 0).await;
    shared.storage.put(&late, part).await.unwrap();
    let batch = second.until(id, has_ended).await;
    second.assert_whole(&batch).await;
    assert_eq!(second.engines.answered.load(Relaxed), 0);
}

#[tokio::test]
async fn the_end_of_a_batch_is_reported_before_its_parts_are_deleted() {
    let mut shared = Shared::new();
    let outbox = Arc::new(WatchfulOutbox {
        storage: shared.storage.clone(),
        parts: Mutex::default(),
    });
    shared.store.outbox = outbox.clone();
    let replica = shared.replica();
    let file = shared.file(&replica, &lines("m")).await;
    let created = replica.create(&file).await;
    let id = created["id"].as_str().unwrap();
    replica.until(id, has_ended).await;
    replica.tasks.drain(Duration::from_secs(10)).await;
    let key = key_of(Tenant::default(), Flavor::OpenAi, id).unwrap();
    let (record, _) = replica.batches.records.read(&key).await.unwrap().unwrap();
    assert!(record.webhooks_sent);
    let aged = replica.batches.records.change(&key, |record, now_ms| {
        record.completed_ms = Some(now_ms - PARTS_KEPT_MS);
        true
    });
    aged.await.unwrap();
    let _other = shared.replica();
    shared.until_empty(&paths::parts(id)).await;
    let parts = outbox.parts.lock().clone();
    assert!(parts.len() == 1 && parts[0] > 0, "{parts:?}");
}

#[tokio::test]
async fn parts_that_a_killed_replica_has_left_go_with_their_batch() {
    let shared = Shared::new();
    let first = shared.replica();
    let file = shared.file(&first, &lines("m")).await;
    let created = first.create(&file).await;
    let id = created["id"].as_str().unwrap();
    first.until(id, has_ended).await;
    first.tasks.drain(Duration::from_secs(10)).await;
    let left = Bytes::from_static(b"left");
    let part = paths::part(id, 0, 1, 1);
    shared.storage.put(&part, left).await.unwrap();
    let key = key_of(Tenant::default(), Flavor::OpenAi, id).unwrap();
    let retained = first.batches.records.change(&key, |record, now_ms| {
        record.delete_ms = now_ms;
        true
    });
    retained.await.unwrap();
    let _second = shared.replica();
    shared.until_empty(&paths::folder(id)).await;
}

#[tokio::test]
async fn files_of_a_batch_that_never_ended_go_with_it() {
    let shared = Shared::new();
    let (full, file, id) = shared.full_replica().await;
    full.tasks.drain(Duration::from_secs(10)).await;
    // As of a replica that was killed when the file had appeared and was not registered.
    let tenant = Tenant::default();
    for output in file_ids(&id) {
        let path = file::storage_path(tenant, &output).unwrap();
        let left = Bytes::from_static(b"left");
        shared.storage.put(&path, left).await.unwrap();
    }
    let key = key_of(tenant, Flavor::OpenAi, &id).unwrap();
    let retained = full.batches.records.change(&key, |record, now_ms| {
        record.delete_ms = now_ms;
        true
    });
    retained.await.unwrap();
    let _other = shared.replica();
    shared.until_empty(&paths::folder(&id)).await;
    let input = file::storage_path(tenant, &file).unwrap();
    assert_eq!(shared.storage.list("files/").await.unwrap(), [input]);
}

#[tokio::test]
async fn a_model_that_cannot_be_used_fails_the_batch() {
    let shared = Shared::new();
    let replica = shared.replica();
    let file = shared.file(&replica, &lines("n")).await;
    let created = replica.create(&file).await;
    let batch = replica
        .until(created["id"].as_str().unwrap(), has_ended)
        .await;
    assert_eq!(batch["status"], "failed");
    assert_eq!(batch["errors"]["data"][0]["code"], "model_not_found");
    assert_eq!(replica.engines.answered.load(Relaxed), 0);
}

#[tokio::test]
async fn a_model_that_was_loaded_just_now_is_looked_up() {
    let shared = Shared::new();
    let replica = shared.replica_with(Engines {
        has_new_model: true,
        ..Engines::default()
    });
    let file = shared.file(&replica, &lines(NEW_MODEL)).await;
    let created = replica.create(&file).await;
    let id = created["id"].as_str().unwrap();
    let batch = replica.until(id, has_ended).await;
    replica.assert_whole(&batch).await;
    assert_eq!(*replica.engines.looked_up.lock(), [NEW_MODEL]);
}

#[tokio::test]
async fn requests_of_a_batch_of_messages_share_the_look_up_of_their_model() {
    const COUNT: usize = 20;
    for (has_new_model, outcome) in [(true, "succeeded"), (false, "errored")] {
        let shared = Shared::new();
        let replica = shared.replica_with(Engines {
            has_new_model,
            ..Engines::default()
        });
        let id = replica.create_of_messages_for(NEW_MODEL, COUNT).await;
        let batch = replica
            .until(&id, |batch| batch["processing_status"] == "ended")
            .await;
        assert_eq!(batch["request_counts"][outcome], COUNT, "{batch}");
        assert_eq!(*replica.engines.looked_up.lock(), [NEW_MODEL]);
    }
}

#[tokio::test]
async fn a_replica_that_does_not_know_a_tenant_leaves_its_batch_to_others() {
    let shared = Shared::new();
    let other = shared.replica_with(Engines {
        lacks_tenant: true,
        ..Engines::default()
    });
    let file = shared.file(&other, &lines("m")).await;
    let created = other.create(&file).await;
    let replica = shared.replica();
    let id = created["id"].as_str().unwrap();
    let batch = replica.until(id, has_ended).await;
    replica.assert_whole(&batch).await;
    assert_eq!(replica.engines.answered.load(Relaxed), LINES as u32);
    assert_eq!(other.engines.answered.load(Relaxed), 0);
}

#[tokio::test]
async fn a_look_goes_on_behind_the_first_batches_and_ends_behind_all() {
    let shared = Shared::new();
    let runner = runner_of(&shared.replica()).await;
    let first = insert(&shared, Tenant::default(), 1, 1).await;
    let last = insert(&shared, Tenant::default(), 2, 1).await;
    let version = async |key: &DocumentKey| {
        let document = shared.store.responses.document(key.clone()).await;
        document.unwrap().unwrap().version
    };
    let (first_version, last_version) = (version(&first).await, version(&last).await);
    let mut behind = 1;
    runner.take_behind(&mut behind).await.unwrap();
    assert_eq!(behind, 2);
    assert!(version(&first).await == first_version && version(&last).await != last_version);
    runner.take_behind(&mut behind).await.unwrap();
    assert_eq!(behind, 0);
}

#[tokio::test]
async fn batches_that_are_left_to_others_are_counted() {
    let shared = Shared::new();
    let replica = shared.replica_with(Engines {
        lacks_tenant: true,
        ..Engines::default()
    });
    let file = shared.file(&replica, &lines("m")).await;
    let runner = runner_of(&replica).await;
    for _ in 0..2 {
        replica.create(&file).await;
    }
    let mut pace = LookPace::new(observe::now());
    runner.look(&mut pace).await.unwrap();
    assert_eq!(pace.left, 2);
}

/// A replica that accepts batches and runs none, and one whose configuration lets the tenant use no model.
fn accepting_and_lagging() -> (Shared, Replica, Replica) {
    let mut shared = Shared::new();
    shared.is_idle = true;
    let acceptor = shared.replica();
    shared.is_idle = false;
    let lagging = shared.replica_with(Engines {
        lacks_models: AtomicBool::new(true),
        ..Engines::default()
    });
    (shared, acceptor, lagging)
}

#[tokio::test]
async fn a_replica_that_refuses_a_model_leaves_the_batch_to_the_one_that_accepted_it() {
    let (shared, acceptor, lagging) = accepting_and_lagging();
    let file = shared.file(&acceptor, &lines("m")).await;
    let created = acceptor.create(&file).await;
    let id = created["id"].as_str().unwrap();
    lagging.until_refused(id).await;
    acceptor.batches.start(acceptor.engines.clone());
    let batch = acceptor.until(id, has_ended).await;
    acceptor.assert_whole(&batch).await;
    // It has read the input once.
    assert_eq!(*lagging.engines.looked_up.lock(), ["m"]);
}

#[tokio::test]
async fn a_replica_that_reads_a_new_configuration_validates_what_it_has_refused() {
    let (shared, acceptor, lagging) = accepting_and_lagging();
    let file = shared.file(&acceptor, &lines("m")).await;
    let created = acceptor.create(&file).await;
    let id = created["id"].as_str().unwrap();
    lagging.until_refused(id).await;
    lagging.engines.lacks_models.store(false, Relaxed);
    lagging.batches.on_reload();
    let batch = lagging.until(id, has_ended).await;
    lagging.assert_whole(&batch).await;
}

#[tokio::test]
async fn a_batch_with_other_errors_fails_at_once_where_its_model_is_refused() {
    let [line, other]: [String; 2] = lines_of("m", 2).try_into().unwrap();
    let unnamed = other.replace("\"m\"", "\"\"");
    let unreadable = other.replace("\"m\"", "7");
    for (second, code) in [
        (line.clone(), "duplicate_custom_id"),
        (unnamed, "empty_string"),
        (unreadable, "invalid_type"),
    ] {
        let (shared, acceptor, lagging) = accepting_and_lagging();
        let file = shared.file(&acceptor, &[line.clone(), second]).await;
        let created = acceptor.create(&file).await;
        let batch = lagging
            .until(created["id"].as_str().unwrap(), has_ended)
            .await;
        assert_eq!(batch["status"], "failed", "{batch}");
        let codes = [0_usize, 1].map(|error| batch["errors"]["data"][error]["code"].clone());
        assert_eq!(codes, ["model_not_found", code]);
        let works = &lagging.batches.metrics.works;
        let returned = works.with_label_values(&["validate", "returned"]);
        assert_eq!(returned.get(), 0, "{code}");
    }
}

#[tokio::test]
async fn a_batch_whose_tenant_nobody_knows_expires() {
    let shared = Shared::new();
    let replica = shared.replica_with(Engines {
        lacks_tenant: true,
        ..Engines::default()
    });
    let file = shared.file(&replica, &lines("m")).await;
    let created = replica.create_within(&file, "2s").await.unwrap();
    let id = created["id"].as_str().unwrap();
    let batch = replica.until(id, has_ended).await;
    assert_eq!(batch["status"], "expired", "{batch}");
    assert_eq!(replica.engines.answered.load(Relaxed), 0);
}

#[tokio::test]
async fn what_a_replica_gives_back_when_it_drains_another_one_runs() {
    let shared = Shared::new();
    let first = shared.replica();
    let file = shared.file(&first, &lines("m")).await;
    let created = first.create(&file).await;
    let id = created["id"].as_str().unwrap();
    first
        .until(id, |batch| batch["request_counts"]["completed"] != 0)
        .await;
    first.tasks.drain(Duration::from_secs(10)).await;
    let second = shared.replica();
    let batch = second.until(id, has_ended).await;
    second.assert_whole(&batch).await;
    let answered = |replica: &Replica| replica.engines.answered.load(Relaxed) as usize;
    assert!(answered(&first) + answered(&second) >= LINES);
}

#[tokio::test]
async fn a_batch_whose_results_are_too_large_for_the_storage_fails() {
    let mut shared = Shared::new();
    // 8 MiB, and the results have 12 MB.
    shared.storage.max_parts = 1;
    let replica = shared.replica_with(Engines {
        padding: 20_000,
        ..Engines::default()
    });
    let file = shared.file(&replica, &lines("m")).await;
    let created = replica.create(&file).await;
    let id = created["id"].as_str().unwrap();
    let batch = replica.until(id, has_ended).await;
    assert_eq!(batch["status"], "failed", "{batch}");
    assert_eq!(batch["errors"]["data"][0]["code"], "results_too_large");
    replica.tasks.drain(Duration::from_secs(10)).await;
    let input = file::storage_path(Tenant::default(), &file).unwrap();
    assert_eq!(shared.storage.list("files/").await.unwrap(), [input]);
    let bound = "warmroute_batch_bounds_reached_total{bound=\"results_too_large\"} 1";
    assert!(replica.registry.text().contains(bound));
}

#[tokio::test]
async fn no_file_stays_of_a_batch_whose_errors_are_too_large_for_the_storage() {
    let mut shared = Shared::new();
    // 8 MiB, and the errors have 12 MB.
    shared.storage.max_parts = 1;
    let replica = shared.replica_with(Engines {
        padding: 20_000,
        ..Engines::default()
    });
    let mut input = lines_of("m", 1);
    let refused = &lines("m")[7];
    let others = 1..LINES;
    input.extend(others.map(|number| refused.replace("id-7", &format!("id-{number}"))));
    let file = shared.file(&replica, &input).await;
    let created = replica.create(&file).await;
    let id = created["id"].as_str().unwrap();
    let batch = replica.until(id, has_ended).await;
    assert_eq!(batch["errors"]["data"][0]["code"], "results_too_large");
    replica.tasks.drain(Duration::from_secs(10)).await;
    let input = file::storage_path(Tenant::default(), &file).unwrap();
    assert_eq!(shared.storage.list("files/").await.unwrap(), [input]);
}

/// A batch of Messages that fails as a whole: each of its requests has the reason.
async fn assert_errored(replica: &Replica, count: usize, reason: &str) {
    let id = replica.create_of_messages(count).await;
    let batch = replica
        .until(&id, |batch| batch["processing_status"] == "ended")
        .await;
    assert_eq!(batch["request_counts"]["errored"], count, "{batch}");
    let results = BatchEndpoint::ResultsOfMessages(id.clone());
    let path = format!("/v1/messages/batches/{id}/results");
    assert_eq!(batch["results_url"], path);
    let results = replica.json_lines(&results).await;
    assert_eq!(results.len(), count);
    for (number, line) in results.iter().enumerate() {
        assert_eq!(line["custom_id"], number.to_string(), "{line}");
        assert_eq!(line["result"]["type"], "errored", "{line}");
        let error = &line["result"]["error"]["error"];
        assert_eq!(error["type"], "api_error", "{line}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(reason), "{message}");
    }
}

#[tokio::test]
async fn requests_of_a_batch_of_messages_beyond_the_tenants_tokens_have_the_limit_as_their_error() {
    let shared = Shared::new();
    let replica = shared.replica_with(Engines {
        tokens_max: Some(17),
        ..Engines::default()
    });
    assert_errored(&replica, 2, "Limit 17, Used 0, Needed 18").await;
    assert_eq!(replica.engines.answered.load(Relaxed), 0);
}

#[tokio::test]
async fn requests_of_a_batch_of_messages_whose_results_are_too_large_have_that_as_their_error() {
    let mut shared = Shared::new();
    // 8 MiB, and the results have 12 MB.
    shared.storage.max_parts = 1;
    let replica = shared.replica_with(Engines {
        padding: 20_000,
        ..Engines::default()
    });
    assert_errored(&replica, LINES, "larger than 8388608 bytes").await;
}

#[tokio::test]
async fn a_replica_whose_clock_is_far_ahead_deletes_and_creates_nothing() {
    const YEAR_MS: u64 = 365 * 24 * 3_600_000;
    let mut shared = Shared::new();
    let right = shared.replica();
    let file = shared.file(&right, &lines("m")).await;
    let created = right.create(&file).await;
    let id = created["id"].as_str().unwrap();
    let batch = right.until(id, has_ended).await;
    right.tasks.drain(Duration::from_secs(10)).await;
    shared.host_ms = Some(|| observe::unix_ms() + YEAR_MS);
    let ahead = shared.replica();
    // Its first request, its first look for work and its first look for expired files.
    ahead
        .until(id, |_| ahead.batches.metrics.clock_refusals.get() >= 3)
        .await;
    ahead.assert_whole(&batch).await;
    assert_eq!(ahead.batch(id).await, batch);
    let refused = ahead.try_create(&file).await.unwrap_err();
    let found = (refused.status.as_u16(), refused.code);
    assert_eq!(found, (503, "batch_clock_differs"));
}

#[tokio::test]
async fn a_replica_whose_clock_is_far_ahead_knows_files_and_creates_nothing_from_the_start() {
    let mut shared = Shared::new();
    shared.is_idle = true;
    let right = shared.replica();
    let until = observe::unix_s() + 48 * 3_600;
    let file = shared.file_until(&right, &lines("m"), Some(until)).await;
    shared.host_ms = Some(|| observe::unix_ms() + 365 * 24 * 3_600_000);
    let ahead = shared.replica();
    // By its own clock the file has expired.
    let found = BatchEndpoint::File(file.clone());
    ahead.answer(&found, String::new()).await;
    let refused = ahead.try_create(&file).await.unwrap_err();
    assert_eq!(refused.code, "batch_clock_differs");
}

#[tokio::test]
async fn a_replica_whose_clock_jumps_ahead_ends_no_shard_that_it_runs() {
    static AHEAD_MS: AtomicU64 = AtomicU64::new(0);
    const YEAR_MS: u64 = 365 * 24 * 3_600_000;
    let mut shared = Shared::new();
    shared.host_ms = Some(|| observe::unix_ms() + AHEAD_MS.load(Relaxed));
    let (replica, _, id) = shared.full_replica().await;
    let runs = || replica.batches.metrics.shards_running.get() > 0;
    replica.until(&id, |_| runs()).await;
    AHEAD_MS.store(YEAR_MS, Relaxed);
    // What runs is looked at as often as work is looked for.
    let refusals = || replica.batches.metrics.clock_refusals.get();
    replica.until(&id, |_| refusals() >= 6).await;
    assert_eq!(replica.batch(&id).await["status"], "in_progress");
    assert!(runs());
    let cancel = BatchEndpoint::Cancel(id.to_owned());
    replica.answer(&cancel, String::new()).await;
    replica.until(&id, |_| !runs()).await;
}

#[tokio::test]
async fn what_a_replica_gives_back_after_its_clock_has_jumped_another_one_runs_at_once() {
    static AHEAD_MS: AtomicU64 = AtomicU64::new(0);
    let mut shared = Shared::new();
    shared.host_ms = Some(|| observe::unix_ms() + AHEAD_MS.load(Relaxed));
    let (replica, _, id) = shared.full_replica().await;
    let runs = || replica.batches.metrics.shards_running.get() > 0;
    replica.until(&id, |_| runs()).await;
    AHEAD_MS.store(2 * 3_600_000, Relaxed);
    let refusals = || replica.batches.metrics.clock_refusals.get();
    replica.until(&id, |_| refusals() > 0).await;
    shared.host_ms = None;
    let other = shared.replica();
    replica.tasks.drain(Duration::from_secs(10)).await;
    let batch = other.until(&id, has_ended).await;
    other.assert_whole(&batch).await;
}

#[tokio::test]
async fn a_line_that_breaks_engines_is_tried_no_more_often_because_its_shard_was_given_back() {
    let shared = Shared::new();
    let breaks = || Engines {
        breaks: true,
        ..Engines::default()
    };
    let first = shared.replica_with(breaks());
    let file = shared.file(&first, &lines("m")).await;
    let created = first.create(&file).await;
    let id = created["id"].as_str().unwrap();
    let retried = "warmroute_batch_line_retries_total{status=\"502\"}";
    first
        .until(id, |_| first.registry.text().contains(retried))
        .await;
    first.tasks.drain(Duration::from_secs(10)).await;
    let mut found = Vec::new();
    let parts = shared.storage.list(&paths::shard_parts(id, 0)).await;
    for path in parts.unwrap() {
        let part = shared.storage.read_whole(&path, 1 << 20).await.unwrap();
        let lines = part.split(|byte| *byte == b'\n');
        found.extend(lines.filter_map(LineTries::read));
    }
    assert!(found.len() == 1 && found[0].line == 7, "{found:?}");
    // As after some more runs.
    let mut part = Vec::new();
    let all = LineTries { tries: 5, line: 7 };
    all.write(&mut part);
    let path = paths::part(id, 0, 1, 1);
    shared.storage.put(&path, part.into()).await.unwrap();
    let second = shared.replica_with(breaks());
    let batch = second.until(id, has_ended).await;
    second.assert_whole(&batch).await;
    assert_eq!(second.engines.broken.load(Relaxed), 1);
}

#[tokio::test]
async fn a_line_whose_input_is_gone_has_an_error() {
    let shared = Shared::new();
    let (full, file, id) = shared.full_replica().await;
    let path = file::storage_path(Tenant::default(), &file).unwrap();
    shared.storage.delete(&path).await.unwrap();
    full.tasks.drain(Duration::from_secs(10)).await;
    let replica = shared.replica();
    let batch = replica.until(&id, has_ended).await;
    assert_eq!(batch["status"], "completed", "{batch}");
    let counts = json!({"total": LINES, "completed": 0, "failed": LINES});
    assert_eq!(batch["request_counts"], counts);
    let errors = replica.results(&batch["error_file_id"]).await;
    assert_eq!(errors.len(), LINES);
    for (number, line) in errors.iter().enumerate() {
        assert_eq!(line["error"]["code"], "input_file_gone", "{line}");
        let message = line["error"]["message"].as_str().unwrap();
        let expected = format!("It was line {} of the file", number + 1);
        assert!(message.contains(&expected), "{message}");
    }
}

#[tokio::test]
async fn a_batch_whose_input_expires_before_its_end_is_refused() {
    let shared = Shared::new();
    let replica = shared.replica();
    let until = |hours: i64| Some(observe::unix_s() + hours * 3_600);
    let file = shared.file_until(&replica, &lines("m"), until(23)).await;
    let refused = replica.try_create(&file).await.unwrap_err();
    assert_eq!(refused.status, 400);
    assert_eq!(refused.param_or_empty(), "input_file_id");
    let advice = "a shorter 'completion_window'";
    assert!(refused.message.contains(advice), "{}", refused.message);
    let file = shared.file_until(&replica, &lines("m"), until(25)).await;
    let created = replica.create(&file).await;
    assert_eq!(created["status"], "validating");
}

#[tokio::test]
async fn a_batch_expires_on_time_behind_many_that_wait_for_room() {
    const WAITING: usize = 150;
    let shared = Shared::new();
    let replica = shared.replica_with(Engines {
        is_full: true,
        ..Engines::default()
    });
    let file = shared.file(&replica, &lines("m")[..1]).await;
    for _ in 0..WAITING {
        let created = replica.create(&file).await;
        let id = created["id"].as_str().unwrap();
        replica
            .until(id, |batch| batch["status"] == "in_progress")
            .await;
    }
    let created = replica.create_within(&file, "2s").await.unwrap();
    let last = replica
        .until(created["id"].as_str().unwrap(), has_ended)
        .await;
    assert_eq!(last["status"], "expired");
}

/// What looks for work on a replica, where nothing else does any more.
async fn runner_of(replica: &Replica) -> Runner {
    replica.tasks.drain(Duration::from_secs(10)).await;
    let batches = replica.batches.clone();
    Runner {
        gate: Arc::new(RoomGate::new(batches.metrics.lines_waiting.clone())),
        sender: replica.engines.clone(),
        batches,
    }
}

#[tokio::test]
async fn a_batch_that_makes_the_look_for_work_panic_ends_nothing_else() {
    let shared = Shared::new();
    let replica = shared.replica_with(Engines {
        panics: true,
        ..Engines::default()
    });
    let runner = runner_of(&replica).await;
    let gate = runner.gate.clone();
    insert(&shared, Tenant::default(), 1, 1).await;
    let entered = async {
        while replica.engines.broken.load(Relaxed) == 0 {
            tokio::task::yield_now().await;
        }
        gate.enter("m", 1, false).await
    };
    tokio::select! {
        () = runner.run() => unreachable!("it never ends"),
        entered = entered => assert!(entered.is_some()),
    }
}

/// Inserts a batch in progress with so many shards.
async fn insert(shared: &Shared, tenant: Tenant, due_ms: u64, shard_count: u32) -> DocumentKey {
    let record = BatchRecord {
        id: new_batch_id(Flavor::OpenAi, u128::from(due_ms)),
        status: BatchStatus::InProgress,
        is_validated: true,
        shard_count,
        expires_ms: u64::MAX,
        delete_ms: u64::MAX,
        ..BatchRecord::default()
    };
    let key = key_of(tenant, Flavor::OpenAi, &record.id).unwrap();
    let new = NewDocument {
        value: record.to_json(),
        created_ms: 1,
        weight: 0,
        due_ms: Some(due_ms),
    };
    let bounds = DocumentBounds {
        documents: 1_000,
        weight: 0,
    };
    let store = &shared.store.responses;
    let inserted = store.insert_document(key.clone(), new, bounds).await;
    assert_eq!(inserted, Ok(InsertOutcome::Done));
    key
}

#[tokio::test]
async fn a_tenant_with_many_batches_hides_none_of_another_tenant() {
    const MANY: u64 = 1_000;
    let shared = Shared::new();
    let runner = runner_of(&shared.replica()).await;
    let first = insert(&shared, Tenant::of("a"), 1, 1).await;
    for due_ms in 2..=MANY {
        insert(&shared, Tenant::of("a"), due_ms, 1).await;
    }
    let other = insert(&shared, Tenant::of("b"), MANY + 1, 1).await;
    let _runs = runner.batches.works.begin(&first, Work::Shard(0)).unwrap();
    let mut pace = LookPace::new(observe::now());
    let due = runner.first_due(&mut pace).await.unwrap();
    let (_, document) = &due[0];
    assert_eq!(document.key, other);
}

#[tokio::test]
async fn a_batch_of_which_a_work_was_started_is_looked_at_again_at_once_if_it_has_more_to_do() {
    let shared = Shared::new();
    let runner = runner_of(&shared.replica()).await;
    for (shard_count, is_due) in [(1, false), (2, true)] {
        let due_ms = u64::from(shard_count);
        let key = insert(&shared, Tenant::default(), due_ms, shard_count).await;
        let document = shared.store.responses.document(key).await.unwrap();
        let taken = runner.take(document.unwrap()).await;
        assert_eq!(taken, Ok(Taken::Started { is_due }), "{shard_count}");
    }
}

#[tokio::test]
async fn a_batch_whose_model_has_no_room_does_not_hold_up_another() {
    let shared = Shared::new();
    let full = shared.replica_with(Engines {
        is_full: true,
        ..Engines::default()
    });
    let mut ids = Vec::new();
    for (model, shards) in [(FULL_MODEL, 20), ("m", 6)] {
        let input = lines_of(model, shards * MAX_SHARD_LINES as usize);
        let file = shared.file(&full, &input).await;
        let created = full.create(&file).await;
        let id = created["id"].as_str().unwrap().to_owned();
        full.until(&id, |batch| batch["status"] == "in_progress")
            .await;
        ids.push(id);
    }
    full.tasks.drain(Duration::from_secs(10)).await;
    // Both are due here, and the first one has shards for all places.
    let replica = shared.replica();
    let batch = replica.until(&ids[1], has_ended).await;
    assert_eq!(batch["status"], "completed");
    assert_eq!(replica.batch(&ids[0]).await["status"], "in_progress");
}

#[tokio::test]
async fn the_input_of_a_batch_stays_until_the_batch_has_ended() {
    let shared = Shared::new();
    let replica = shared.replica_with(Engines {
        is_full: true,
        ..Engines::default()
    });
    let file = shared.file(&replica, &lines("m")).await;
    let other = shared.file(&replica, &lines("m")).await;
    let created = replica.create(&file).await;
    let id = created["id"].as_str().unwrap();
    let delete = |file: &str| {
        let endpoint = BatchEndpoint::DeleteFile(file.to_owned());
        let replica = &replica;
        async move { replica.try_answer(&endpoint, String::new()).await }
    };
    let refused = delete(&file).await.unwrap_err();
    assert_eq!(
        (refused.status.as_u16(), refused.code),
        (400, "file_in_use")
    );
    assert!(refused.message.contains(id), "{}", refused.message);
    delete(&other).await.unwrap();
    let cancel = BatchEndpoint::Cancel(id.to_owned());
    replica.answer(&cancel, String::new()).await;
    replica.until(id, has_ended).await;
    delete(&file).await.unwrap();
}

#[tokio::test]
async fn batches_behind_one_that_is_deleted_meanwhile_are_not_taken_to_be_missing() {
    let shared = Shared::new();
    let runner = runner_of(&shared.replica()).await;
    let tenant = Tenant::of("a");
    for due_ms in 0..=MIN_FETCHED as u64 {
        insert(&shared, tenant, due_ms, 1).await;
    }
    let mut seen = 0;
    let found = runner.batches.find(tenant, Order::NewestFirst, |record| {
        seen += 1;
        if seen == MIN_FETCHED {
            let key = key_of(tenant, Flavor::OpenAi, &record.id).unwrap();
            let mut removed = shared.store.responses.remove_document(key, None);
            let mut context = Context::from_waker(Waker::noop());
            assert!(removed.as_mut().poll(&mut context).is_ready());
        }
        false
    });
    let found = found.await;
    assert!(
        matches!(found, Err(store::Error::Unavailable { .. })),
        "{found:?}"
    );
}

#[tokio::test]
async fn the_oldest_batch_that_has_ended_makes_room() {
    let mut shared = Shared::new();
    shared.max_batches = Some(2);
    let replica = shared.replica();
    let file = shared.file(&replica, &lines("m")).await;
    let mut ended = Vec::new();
    for _ in 0..3 {
        let created = replica.create(&file).await;
        let id = created["id"].as_str().unwrap();
        ended.push(replica.until(id, has_ended).await);
    }
    let listed = listed(&replica).await;
    assert_eq!(listed, [ended[2]["id"].clone(), ended[1]["id"].clone()]);
    // The results of the first are there still.
    let output = replica.ids(&ended[0]["output_file_id"]).await;
    assert_eq!(output.len(), LINES - 1);
}

#[tokio::test]
async fn a_tenant_whose_results_exceed_its_quota_begins_no_other_batch() {
    let mut shared = Shared::new();
    // The input has half of it, and the results are more than all of it.
    shared.settings.max_size_per_tenant = 100 << 10;
    let replica = shared.replica();
    let file = shared.file(&replica, &lines("m")).await;
    let created = replica.create(&file).await;
    let id = created["id"].as_str().unwrap();
    let batch = replica.until(id, has_ended).await;
    replica.assert_whole(&batch).await;
    let refused = replica.try_create(&file).await.unwrap_err();
    assert_eq!(
        (refused.status.as_u16(), refused.code),
        (400, "file_storage_quota_exceeded")
    );
    let output = batch["output_file_id"].as_str().unwrap();
    let delete = BatchEndpoint::DeleteFile(output.to_owned());
    replica.answer(&delete, String::new()).await;
    replica.create(&file).await;
}

#[tokio::test]
async fn batches_that_have_not_ended_make_no_room() {
    let mut shared = Shared::new();
    shared.max_batches = Some(2);
    let replica = shared.replica_with(Engines {
        is_full: true,
        ..Engines::default()
    });
    let file = shared.file(&replica, &lines("m")).await;
    for _ in 0..2 {
        replica.create(&file).await;
    }
    let refused = replica.try_create(&file).await.unwrap_err();
    assert_eq!(
        (refused.status.as_u16(), refused.code),
        (400, "too_many_batches")
    );
}

#[tokio::test]
async fn records_of_a_newer_release_hide_no_others() {
    // More than are fetched at once, and fewer batches of both kinds than a tenant may have.
    const NEWER: u128 = 450;
    const NEWER_FILES: u128 = 1_100;
    let shared = Shared::new();
    let replica = shared.replica_with(Engines {
        tokens_max: Some(1 << 20),
        ..Engines::default()
    });
    let file = shared.file(&replica, &lines("m")).await;
    let created = replica.create(&file).await;
    let of_messages = BatchRecord {
        id: new_batch_id(Flavor::Messages, NEWER),
        flavor: Flavor::Messages,
        status: BatchStatus::Cancelled,
        ..BatchRecord::default()
    };
    let insert = async |collection, id: String, value: Bytes, created_ms| {
        let key = DocumentKey {
            collection,
            tenant: Tenant::default(),
            id,
        };
        let new = NewDocument {
            value,
            created_ms,
            weight: 0,
            due_ms: None,
        };
        let bounds = DocumentBounds {
            documents: 10_000,
            weight: 100 << 20,
        };
        let store = &shared.store.responses;
        let inserted = store.insert_document(key, new, bounds).await;
        assert_eq!(inserted, Ok(InsertOutcome::Done));
    };
    let (id, value) = (of_messages.id.clone(), of_messages.to_json());
    insert(Collection::Batches, id, value, 1).await;
    let later_ms = observe::unix_ms() + 1_000;
    for number in 0..NEWER {
        let batch = Bytes::from(json!({"status": "dreaming"}).to_string());
        for flavor in [Flavor::OpenAi, Flavor::Messages] {
            let id = new_batch_id(flavor, number);
            insert(Collection::Batches, id, batch.clone(), later_ms).await;
        }
    }
    for number in 0..NEWER_FILES {
        let id = file::new_file_id(number << 64);
        let purpose = Bytes::from(json!({"purpose": "dreams"}).to_string());
        insert(Collection::Files, id, purpose, later_ms).await;
    }
    for (list, expected) in [
        (BatchEndpoint::List, &created["id"]),
        (BatchEndpoint::ListOfMessages, &json!(of_messages.id)),
        (BatchEndpoint::ListFiles, &json!(file)),
    ] {
        let answer = replica.answer(&list, String::new()).await;
        let page: Value = serde_json::from_slice(&answer).unwrap();
        let found = page["data"].as_array().unwrap();
        assert!(found.iter().any(|item| item["id"] == *expected), "{page}");
        assert_eq!(page["has_more"], false, "{list:?}");
    }
    assert_eq!(listed(&replica).await, [created["id"].clone()]);
    // Nor do they keep a batch from being validated whose tenant has a limit of tokens.
    let last = replica.create(&file).await;
    let id = last["id"].as_str().unwrap();
    let ended = replica.until(id, has_ended).await;
    assert_eq!(ended["status"], "completed");
}

/// The ids of all batches, newest first.
async fn listed(replica: &Replica) -> Vec<Value> {
    let list = replica.answer(&BatchEndpoint::List, String::new()).await;
    let list: Value = serde_json::from_slice(&list).unwrap();
    let batches = list["data"].as_array().unwrap().iter();
    batches.map(|batch| batch["id"].clone()).collect()
}
