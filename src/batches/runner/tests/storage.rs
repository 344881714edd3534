//! Replicas whose storage fails, is lost, or is not the one of the others.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use std::{fs, mem};

use tempfile::TempDir;
use tokio::time::{sleep, timeout};

use super::hanging_store::HangingStore;
use super::world::{FULL_MODEL, LINES, Replica, Shared, has_ended, lines};
use crate::batches::line::Flavor;
use crate::batches::routes::BatchEndpoint;
use crate::batches::service::key_of;
use crate::batches::settings::Settings;
use crate::batches::storage::Storage;
use crate::batches::storage_identity::StorageId;
use crate::http::drain::Tasks;
use crate::http::tls;
use crate::ids::Tenant;
use crate::store::documents::DocumentKey;

const LIMIT: Duration = Duration::from_secs(60);

/// A storage, its folder, and what removes that.
fn storage_in_a_folder() -> (Storage, PathBuf, TempDir) {
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path().join("storage");
    let settings = Settings {
        folder: folder.to_str().unwrap().to_owned(),
        ..Settings::default()
    };
    let storage = Storage::open(&settings, &tls::Clients::default(), &Tasks::default());
    (storage.unwrap(), folder, temporary)
}

async fn copy(from: &Storage, to: &Storage) {
    for below in ["files/", "batches/", "storage/"] {
        for path in from.list(below).await.unwrap() {
            let bytes = from.read_whole(&path, 1 << 30).await.unwrap();
            to.put(&path, bytes).await.unwrap();
        }
    }
}

/// Waits until a replica shows a line among its metrics.
async fn until_shown(replica: &Replica, line: &str) {
    let line = format!("{line}\n");
    let shown = async {
        while !replica.registry.text().contains(&line) {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LIMIT, shown).await.expect("it is shown");
}

/// Waits until a replica shows whether an operation of its storage can be used: 1 or 0.
async fn until_usable(replica: &Replica, operation: &str, value: u32) {
    let metric = "warmroute_batch_storage_usable";
    let line = format!("{metric}{{operation=\"{operation}\"}} {value}");
    until_shown(replica, &line).await;
}

/// What needs the storage is refused.
async fn assert_refused(replica: &Replica, file: &str) {
    let refused = replica.try_create(file).await.unwrap_err();
    assert_eq!(refused.code, "batch_storage_differs");
    for endpoint in [
        BatchEndpoint::FileContent(file.to_owned()),
        BatchEndpoint::DeleteFile(file.to_owned()),
    ] {
        let answer = replica.try_answer(&endpoint, String::new()).await;
        let refused = answer.unwrap_err();
        let found = (refused.status.as_u16(), refused.code);
        assert_eq!(found, (503, "batch_storage_differs"), "{endpoint:?}");
        let named = refused.message.contains("no object 'storage/");
        assert!(named, "{}", refused.message);
    }
}

/// A replica that runs shards loses its folder, and `lose` says what is there instead.
async fn assert_left_to_others(lose: impl FnOnce(&Path)) {
    let mut shared = Shared::new();
    shared.lease = Duration::from_secs(3);
    let (storage, folder, _temporary) = storage_in_a_folder();
    shared.storage = storage;
    let (failing, _, id) = shared.full_replica().await;
    // It has read its shards, and its first trial is over.
    let all_wait = format!("warmroute_batch_lines_waiting {LINES}");
    until_shown(&failing, &all_wait).await;
    until_usable(&failing, "delete", 1).await;
    // The same files, where only the other replica has them.
    let whole = Storage::memory();
    copy(&shared.storage, &whole).await;
    fs::remove_dir_all(&folder).unwrap();
    lose(&folder);
    assert!(!failing.batches.try_storage().await);
    shared.storage = whole;
    let other = shared.replica();
    let batch = other.until(&id, has_ended).await;
    other.assert_whole(&batch).await;
}

#[tokio::test]
async fn a_replica_whose_storage_fails_leaves_its_shards_to_others() {
    assert_left_to_others(|folder| fs::write(folder, "no folder").unwrap()).await;
}

#[tokio::test]
async fn a_replica_whose_mount_is_lost_leaves_its_shards_to_others() {
    assert_left_to_others(|folder| fs::create_dir(folder).unwrap()).await;
}

/// A replica whose three lines were answered after it has lost its folder, with what removes that, and the batch. `lose`
/// says what is there instead of the folder.
async fn unwritten_results(lose: impl FnOnce(&Path)) -> (Replica, TempDir, DocumentKey) {
    let mut shared = Shared::new();
    let (storage, folder, temporary) = storage_in_a_folder();
    shared.storage = storage;
    let replica = shared.replica();
    let file = shared.file(&replica, &lines(FULL_MODEL)[..3]).await;
    let created = replica.create(&file).await;
    let id = created["id"].as_str().unwrap();
    // It has read its shard, and its first trial is over.
    until_shown(&replica, "warmroute_batch_lines_waiting 3").await;
    until_usable(&replica, "delete", 1).await;
    fs::remove_dir_all(&folder).unwrap();
    lose(&folder);
    replica.engines.is_open.store(true, Relaxed);
    let answered = async {
        while replica.engines.answered.load(Relaxed) < 3 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LIMIT, answered).await.expect("all are answered");
    until_shown(&replica, "warmroute_batch_lines_in_flight 0").await;
    let key = key_of(Tenant::default(), Flavor::OpenAi, id).unwrap();
    (replica, temporary, key)
}

#[tokio::test]
async fn a_cancelled_shard_whose_results_are_not_written_has_not_ended() {
    let lose = |folder: &Path| fs::write(folder, "no folder").unwrap();
    let (replica, _temporary, key) = unwritten_results(lose).await;
    let cancel = BatchEndpoint::Cancel(key.id.clone());
    replica.answer(&cancel, String::new()).await;
    replica.tasks.drain(Duration::from_secs(10)).await;
    let (record, _) = replica.batches.records.read(&key).await.unwrap().unwrap();
    assert_eq!(record.returned, [0]);
}

#[tokio::test]
async fn lines_of_a_shard_that_is_given_back_before_their_results_are_written_are_not_counted() {
    let lose = |folder: &Path| fs::write(folder, "no folder").unwrap();
    let (replica, _temporary, key) = unwritten_results(lose).await;
    replica.tasks.drain(Duration::from_secs(10)).await;
    let (record, _) = replica.batches.records.read(&key).await.unwrap().unwrap();
    assert_eq!((record.returned, record.counts.completed), (vec![0], 0));
}

#[tokio::test]
async fn lines_of_a_shard_that_is_lost_before_their_results_are_written_are_not_counted() {
    let lose = |folder: &Path| fs::write(folder, "no folder").unwrap();
    let (replica, _temporary, key) = unwritten_results(lose).await;
    let lost = replica.batches.records.change(&key, |record, _| {
        for claim in &mut record.claims {
            claim.owner = claim.owner.wrapping_add(1);
        }
        !record.claims.is_empty()
    });
    lost.await.unwrap();
    until_shown(&replica, "warmroute_batch_shards_running 0").await;
    let counted = "warmroute_batch_lines_total{";
    assert!(!replica.registry.text().contains(counted));
}

#[tokio::test]
async fn the_mount_point_of_a_lost_mount_is_not_filled_with_results() {
    let lose = |folder: &Path| fs::create_dir(folder).unwrap();
    let (replica, _temporary, _) = unwritten_results(lose).await;
    let parts = async || {
        let listed = replica.batches.storage.list("batches/").await;
        listed.unwrap().len()
    };
    let is_tried = async {
        while parts().await == 0 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LIMIT, is_tried).await.expect("it is tried");
    // By then it was tried once more.
    sleep(Duration::from_secs(3)).await;
    assert_eq!(parts().await, 1);
}

#[tokio::test]
async fn a_replica_with_storage_of_its_own_leaves_all_to_the_others() {
    let mut shared = Shared::new();
    let first = shared.replica();
    let file = shared.file(&first, &lines("m")).await;
    until_usable(&first, "identity", 1).await;
    let whole = mem::replace(&mut shared.storage, Storage::memory());
    let second = shared.replica();
    let created = first.create(&file).await;
    let id = created["id"].as_str().unwrap();
    assert_refused(&second, &file).await;
    // States lie in the store.
    let batch = second.until(id, has_ended).await;
    first.assert_whole(&batch).await;
    assert_eq!(second.engines.answered.load(Relaxed), 0);
    until_usable(&second, "identity", 0).await;
    until_usable(&second, "delete", 1).await;
    assert_eq!(shared.storage.list("").await, Ok(Vec::new()));
    // It is given the storage of the first.
    first.tasks.drain(Duration::from_secs(10)).await;
    copy(&whole, &shared.storage).await;
    assert!(second.batches.try_storage().await);
    second.assert_whole(&batch).await;
}

#[tokio::test]
async fn what_the_mount_point_of_a_lost_mount_lacks_is_not_gone() {
    let mut shared = Shared::new();
    let (storage, folder, _temporary) = storage_in_a_folder();
    shared.storage = storage;
    let replica = shared.replica();
    let file = shared.file(&replica, &lines("m")).await;
    // Its first trial is over.
    until_usable(&replica, "delete", 1).await;
    let away = folder.with_extension("away");
    fs::rename(&folder, &away).unwrap();
    fs::create_dir(&folder).unwrap();
    // No trial has noticed it yet, so that the replica takes the batch, and does not find its input.
    let created = replica.create(&file).await;
    let id = created["id"].as_str().unwrap();
    until_usable(&replica, "identity", 0).await;
    assert_refused(&replica, &file).await;
    assert!(!replica.batches.try_storage().await);
    assert_eq!(replica.batch(id).await["status"], "validating");
    fs::remove_dir_all(&folder).unwrap();
    fs::rename(&away, &folder).unwrap();
    assert!(replica.batches.try_storage().await);
    let batch = replica.until(id, has_ended).await;
    replica.assert_whole(&batch).await;
}

#[tokio::test]
async fn no_batch_makes_room_for_another_while_its_mount_is_lost() {
    let mut shared = Shared::new();
    shared.max_batches = Some(1);
    let (storage, folder, _temporary) = storage_in_a_folder();
    shared.storage = storage;
    let replica = shared.replica();
    let file = shared.file(&replica, &lines("m")).await;
    let created = replica.create(&file).await;
    let id = created["id"].as_str().unwrap();
    replica.until(id, has_ended).await;
    // Its end is settled, and no trial will notice the loss.
    replica.tasks.drain(Duration::from_secs(10)).await;
    fs::rename(&folder, folder.with_extension("away")).unwrap();
    fs::create_dir(&folder).unwrap();
    let refused = replica.try_create(&file).await.unwrap_err();
    assert_eq!(refused.code, "batch_storage_differs");
    assert_eq!(replica.batch(id).await["status"], "completed");
}

/// A replica that does nothing by itself, its storage, and the id of a file there.
async fn replica_of_a_storage_that_may_hang() -> (Replica, Arc<HangingStore>, String) {
    let store = Arc::new(HangingStore::default());
    let mut shared = Shared::new();
    shared.is_idle = true;
    shared.trial_timeout = Some(Duration::from_millis(200));
    shared.storage = Storage::over(store.clone());
    let replica = shared.replica();
    let file = shared.file(&replica, &lines("m")).await;
    replica.batches.storage_id().await.unwrap();
    (replica, store, file)
}

async fn assert_unavailable(replica: &Replica, file: &str) {
    let content = BatchEndpoint::FileContent(file.to_owned());
    let answer = replica.try_answer(&content, String::new());
    let answer = timeout(LIMIT, answer).await.expect("it is answered");
    let refused = answer.unwrap_err();
    let found = (refused.status.as_u16(), refused.code);
    assert_eq!(found, (503, "storage_unavailable"));
}

#[tokio::test]
async fn requests_for_a_storage_that_hangs_are_refused_without_asking_it() {
    let (replica, store, file) = replica_of_a_storage_that_may_hang().await;
    store.hang(true);
    let refused = async {
        until_usable(&replica, "read", 0).await;
        let before = store.reads();
        for _ in 0..3 {
            assert_unavailable(&replica, &file).await;
        }
        assert_eq!(store.reads(), before);
        // A new batch is asked for of the store alone.
        replica.create(&file).await;
        store.hang(false);
    };
    let (is_usable, ()) = tokio::join!(replica.batches.try_storage(), refused);
    assert!(is_usable);
    let content = BatchEndpoint::FileContent(file);
    assert_eq!(replica.json_lines(&content).await.len(), LINES);
}

#[tokio::test]
async fn a_deletion_that_hangs_refuses_no_reads() {
    let (replica, store, file) = replica_of_a_storage_that_may_hang().await;
    store.hang_deletions();
    let content = BatchEndpoint::FileContent(file.clone());
    let reads = async {
        until_usable(&replica, "delete", 0).await;
        assert_eq!(replica.json_lines(&content).await.len(), LINES);
        // What a request has seen ends with the next trial, though the deletion goes on.
        store.hang(true);
        assert_unavailable(&replica, &file).await;
        store.hang(false);
        while replica.batches.is_storage_hanging.load(Relaxed) {
            sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(replica.json_lines(&content).await.len(), LINES);
    };
    tokio::select! {
        _ = replica.batches.try_storage() => panic!("the deletion has ended"),
        read = timeout(LIMIT, reads) => read.expect("it is read"),
    }
}

#[tokio::test]
async fn a_write_that_failed_while_a_deletion_hangs_is_tried_again() {
    let (replica, store, _) = replica_of_a_storage_that_may_hang().await;
    store.hang_deletions();
    let works_again = async {
        until_usable(&replica, "delete", 0).await;
        store.fail_next_write();
        replica.batches.trial_due.notify_one();
        while !store.has_failed() || !replica.batches.is_storage_usable() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::select! {
        _ = replica.batches.try_storage() => panic!("the deletion has ended"),
        works = timeout(LIMIT, works_again) => works.expect("it works again"),
    }
}

#[tokio::test]
async fn a_request_does_not_wait_for_ever_for_a_storage_that_hangs() {
    let (replica, store, file) = replica_of_a_storage_that_may_hang().await;
    store.hang(true);
    assert_unavailable(&replica, &file).await;
    // It is not asked again before a trial has shown that it answers.
    let before = store.reads();
    assert_unavailable(&replica, &file).await;
    assert_eq!(store.reads(), before);
    store.hang(false);
    assert_unavailable(&replica, &file).await;
    assert!(replica.batches.try_storage().await);
    let content = BatchEndpoint::FileContent(file);
    assert_eq!(replica.json_lines(&content).await.len(), LINES);
}

#[tokio::test]
async fn a_store_that_names_no_storage_is_given_a_marker_that_is_there() {
    let shared = Shared::new();
    let (first, last) = (StorageId::new(1), StorageId::new(2));
    for id in [&last, &first] {
        shared.storage.add_marker(id).await.unwrap();
    }
    for _ in 0..2 {
        let replica = shared.replica();
        let named = replica.batches.storage_id().await.unwrap();
        assert_eq!(named, last);
    }
    let markers = shared.storage.markers().await;
    assert_eq!(markers, Ok(vec![first, last]));
}

#[tokio::test]
async fn replicas_that_start_together_agree_on_one_marker() {
    let shared = Shared::new();
    let replicas: Vec<Replica> = (0..4).map(|_| shared.replica()).collect();
    let named = replicas[0].batches.storage_id().await.unwrap();
    for replica in &replicas {
        let id = replica.batches.storage_id().await;
        assert_eq!(id.unwrap(), named);
    }
    // A replica that was not the first deletes the one that it has made.
    let expected = Ok(vec![named]);
    let is_alone = async {
        while shared.storage.markers().await != expected {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LIMIT, is_alone).await.expect("one is left");
}
