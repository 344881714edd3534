mod world;

use std::time::Duration;

use bytes::Bytes;
use hyper::header::{CONTENT_DISPOSITION, CONTENT_TYPE};
use proptest::prelude::*;
use serde_json::json;
use tokio::sync::mpsc;

use self::world::{
    FILE, PATIENCE, PURPOSE, TYPE, World, bytes, files_below, form, headers, object, with_file,
};
use super::FileUpload;
use crate::batches::clock::Clock;
use crate::batches::file::{FilePurpose, FileRecord, UNCONFIRMED_LIMIT, new_file_id, storage_path};
use crate::batches::settings::Settings;
use crate::http::server::RequestBody;
use crate::ids::Tenant;
use crate::observe;

#[tokio::test]
async fn a_file_is_uploaded_listed_read_and_deleted() {
    let world = World::new(Settings::default());
    let tenant = Tenant::default();
    // openai-python sends the fields first, openai-node in the order in which they are given.
    let file = (FILE, "{\"custom_id\":\"a\"}\n");
    for parts in [[PURPOSE, file], [file, PURPOSE]] {
        let form = form(&parts);
        for piece in [1, 7, form.len()] {
            let created = world.upload(&form, piece).await.unwrap();
            let id = created["id"].as_str().unwrap();
            assert_eq!(created["object"], "file");
            assert_eq!(created["bytes"], file.1.len());
            assert_eq!(created["filename"], "in.jsonl");
            assert_eq!(created["purpose"], "batch");
            assert_eq!(created["status"], "processed");
            let days = 30 * 24 * 3_600;
            let created_at = created["created_at"].as_i64().unwrap();
            assert_eq!(created["expires_at"], created_at + days);
            let found = object(world.files.get(tenant, id).await.unwrap()).await;
            assert_eq!(found, created);
            let list = world.list("").await;
            assert_eq!(list["data"], json!([created]));
            let answer = world.files.content(tenant, id).await.unwrap();
            assert_eq!(answer.headers()[CONTENT_TYPE], "application/jsonl");
            assert_eq!(
                answer.headers()[CONTENT_DISPOSITION],
                "attachment; filename=\"in.jsonl\""
            );
            assert_eq!(bytes(answer).await, file.1);
            let deleted = object(world.files.delete(tenant, id).await.unwrap()).await;
            assert_eq!(
                deleted,
                json!({"id": id, "object": "file", "deleted": true})
            );
            let again = world.files.delete(tenant, id).await.unwrap_err();
            assert_eq!(again.status, 404);
            assert_eq!(again.message, format!("No such File object: {id}"));
            assert_eq!(again.param_or_empty(), "id");
            world.assert_empty("deleted").await;
        }
    }
    assert!(world.has_metric("warmroute_batch_uploads_total{outcome=\"stored\"} 6"));
    assert!(world.has_metric("warmroute_batch_uploads_in_flight 0"));
}

#[tokio::test]
async fn a_form_that_is_cut_anywhere_leaves_nothing() {
    let world = World::new(Settings::default());
    let expires = [
        ("name=\"expires_after[anchor]\"", "created_at"),
        ("name=\"expires_after[seconds]\"", "3600"),
    ];
    let file = (FILE, "{\"a\":1}\r\n--x2\r\n");
    for parts in [
        [file, PURPOSE, expires[0], expires[1]],
        [PURPOSE, expires[0], expires[1], file],
    ] {
        let form = form(&parts);
        // The line break behind the last boundary says nothing.
        for cut in 0..form.len() - 2 {
            let error = world.upload(&form[..cut], 16).await.unwrap_err();
            assert_eq!(error.status, 400, "{cut}: {}", error.message);
            world.assert_empty(&format!("{cut}")).await;
        }
        let created = world.upload(&form[..form.len() - 2], 16).await.unwrap();
        let seconds =
            created["expires_at"].as_i64().unwrap() - created["created_at"].as_i64().unwrap();
        assert_eq!(seconds, 3_600);
        let id = created["id"].as_str().unwrap();
        drop(world.files.delete(Tenant::default(), id).await.unwrap());
    }
}

#[tokio::test]
async fn what_is_missing_or_wrong_is_named_also_behind_the_file() {
    let world = World::new(Settings::default());
    let check = async |parts: &[(&str, &str)], status: u16, param: &str| {
        let error = world.upload(&form(parts), 64).await.unwrap_err();
        assert_eq!(error.status, status, "{parts:?}: {}", error.message);
        assert_eq!(error.param_or_empty(), param, "{parts:?}");
        world.assert_empty(param).await;
    };
    let file = (FILE, "x");
    check(&[file], 400, "purpose").await;
    check(&[PURPOSE], 400, "file").await;
    check(&[], 400, "purpose").await;
    check(&[PURPOSE, (FILE, "")], 400, "file").await;
    check(&[file, ("name=\"purpose\"", "vision")], 400, "purpose").await;
    check(&[file, PURPOSE, file], 400, "file").await;
    check(&[file, PURPOSE, PURPOSE], 400, "purpose").await;
    check(&[file, PURPOSE, ("name=\"model\"", "m")], 400, "model").await;
    let long = "b".repeat(2_000);
    check(&[file, ("name=\"purpose\"", long.as_str())], 400, "purpose").await;
    for wrong in [
        "",
        "application/json",
        "multipart/form-data",
        "multipart/form-data; boundary=",
    ] {
        let form = form(&[PURPOSE, file]);
        let upload = world.upload_as(Tenant::default(), wrong, &form, 64);
        let error = upload.await.unwrap_err();
        assert_eq!(error.status, 400, "{wrong}");
        assert!(error.message.contains("boundary"), "{}", error.message);
    }
    let form_of_json = form(&[PURPOSE, file]);
    let upload = world.upload_as(Tenant::default(), "text/plain", &form_of_json, 64);
    let message = upload.await.unwrap_err().message;
    assert!(message.starts_with("Send the file as a form"), "{message}");
    assert!(
        message.ends_with("'content-type' 'text/plain'."),
        "{message}"
    );
    let mut endless = vec![b'x'; 1 << 20];
    endless.extend_from_slice(&form(&[PURPOSE, file]));
    let error = world.upload(&endless, 1_000).await.unwrap_err();
    assert_eq!(error.status, 400);
    assert!(
        error.message.contains("longer than 65536 bytes"),
        "{}",
        error.message
    );
}

#[tokio::test]
async fn a_file_that_is_too_large_is_refused_and_leaves_nothing() {
    let world = World::new(Settings {
        max_file_size: 1_000,
        ..Settings::default()
    });
    drop(world.upload(&with_file(&[b'x'; 1_000]), 64).await.unwrap());
    let error = world
        .upload(&with_file(&[b'x'; 1_001]), 64)
        .await
        .unwrap_err();
    assert_eq!((error.status.as_u16(), error.code), (413, "file_too_large"));
    assert_eq!(world.documents().await.len(), 1);
    assert_eq!(world.storage.list("").await.unwrap().len(), 1);
    assert!(world.has_metric("warmroute_batch_file_bounds_reached_total{bound=\"file_size\"} 1"));
}

#[tokio::test]
async fn a_tenant_has_so_many_files_and_bytes() {
    let mut world = World::new(Settings {
        max_size_per_tenant: 100,
        ..Settings::default()
    });
    world.files.max_files = 2;
    let upload = async |bytes: usize| world.upload(&with_file(&vec![b'x'; bytes]), 64).await;
    let first = upload(60).await.unwrap();
    let heavy = upload(60).await.unwrap_err();
    assert_eq!(
        (heavy.status.as_u16(), heavy.code),
        (400, "file_storage_quota_exceeded")
    );
    drop(upload(40).await.unwrap());
    let many = upload(1).await.unwrap_err();
    assert_eq!((many.status.as_u16(), many.code), (400, "too_many_files"));
    assert_eq!(world.storage.list("").await.unwrap().len(), 2);
    let form = with_file(b"x");
    let other = world.upload_as(Tenant::of("b"), TYPE, &form, 64);
    drop(other.await.unwrap());
    let id = first["id"].as_str().unwrap();
    drop(world.files.delete(Tenant::default(), id).await.unwrap());
    drop(upload(60).await.unwrap());
}

#[tokio::test]
async fn other_tenants_do_not_find_a_file() {
    let world = World::new(Settings::default());
    let created = world.upload(&with_file(b"x"), 64).await.unwrap();
    let id = created["id"].as_str().unwrap();
    let other = Tenant::of("b");
    assert_eq!(world.files.get(other, id).await.unwrap_err().status, 404);
    assert_eq!(
        world.files.content(other, id).await.unwrap_err().status,
        404
    );
    assert_eq!(world.files.delete(other, id).await.unwrap_err().status, 404);
    let list = object(world.files.list(other, "").await.unwrap()).await;
    assert_eq!(list["data"], json!([]));
    for id in ["", "../x", "file-", "file-FFFFFFFFFFFFFFFFFFFFFFFF"] {
        let error = world.files.get(Tenant::default(), id).await.unwrap_err();
        assert_eq!(error.status, 404, "{id}");
    }
}

#[tokio::test]
async fn pages_together_are_all_files() {
    let world = World::new(Settings::default());
    let mut ids = Vec::new();
    for number in 0..5_i64 {
        let record = FileRecord {
            id: new_file_id((number as u128) << 64),
            bytes: 1,
            created_at: 1_000 + number,
            expires_at: None,
            filename: "a".to_owned(),
            purpose: FilePurpose::BatchOutput,
        };
        ids.push(record.id.clone());
        let tenant = Tenant::default();
        world.files.register(tenant, record.clone()).await.unwrap();
        // Another replica may have put the same results together.
        world.files.register(tenant, record).await.unwrap();
    }
    let input = world.upload(&with_file(b"x"), 64).await.unwrap();
    ids.push(input["id"].as_str().unwrap().to_owned());
    for (order, is_ascending) in [("asc", true), ("desc", false)] {
        let mut found = Vec::new();
        let mut after = String::new();
        loop {
            let page = world
                .list(&format!("limit=2&order={order}&after={after}"))
                .await;
            let listed = page["data"].as_array().unwrap();
            found.extend(
                listed
                    .iter()
                    .map(|file| file["id"].as_str().unwrap().to_owned()),
            );
            if page["has_more"] == false {
                break;
            }
            after = page["last_id"].as_str().unwrap().to_owned();
        }
        if !is_ascending {
            found.reverse();
        }
        assert_eq!(found, ids, "{order}");
    }
    let inputs = world.list("purpose=batch").await;
    assert_eq!(inputs["data"], json!([input]));
    assert_eq!(world.list("purpose=vision").await["data"], json!([]));
    let first = world.list("purpose=batch_output&limit=1&order=asc").await;
    assert_eq!(
        (&first["has_more"], &first["first_id"]),
        (&json!(true), &json!(ids[0]))
    );
    for after in ["file-000000000000000000000009", "x"] {
        let query = format!("after={after}");
        let listed = world.files.list(Tenant::default(), &query).await;
        assert_eq!(listed.unwrap_err().param_or_empty(), "after");
    }
}

#[tokio::test]
async fn a_file_that_has_expired_is_not_found_and_goes() {
    let world = World::new(Settings::default());
    let tenant = Tenant::default();
    let now = observe::unix_s();
    let record = FileRecord {
        id: new_file_id(1 << 64),
        bytes: 1,
        created_at: now - 10,
        expires_at: Some(now - 1),
        filename: "a".to_owned(),
        purpose: FilePurpose::BatchOutput,
    };
    let path = storage_path(tenant, &record.id).unwrap();
    world
        .storage
        .put(&path, Bytes::from_static(b"x"))
        .await
        .unwrap();
    world.files.register(tenant, record.clone()).await.unwrap();
    assert_eq!(world.files.record(tenant, &record.id).await.unwrap(), None);
    assert_eq!(world.list("").await["data"], json!([]));
    let delete = async |now_s: i64| {
        let deleted = world.files.delete_expired(now_s as u64 * 1_000).await;
        deleted.unwrap()
    };
    assert_eq!(delete(now - 2).await, 0);
    assert_eq!(delete(now).await, 1);
    assert_eq!(delete(now).await, 0);
    world.assert_empty("expired").await;
}

#[tokio::test]
async fn a_file_is_created_and_expires_by_the_clock_of_the_store() {
    let mut world = World::new(Settings::default());
    // This host's clock is three minutes ahead.
    world.files.clock = Clock::new(|| observe::unix_ms() + 180_000);
    let compared = world.files.clock.compare(observe::unix_ms());
    assert_eq!(compared, Ok(()));
    let created = world.upload(&with_file(b"x"), 64).await.unwrap();
    let created_at = created["created_at"].as_i64().unwrap();
    let now = observe::unix_s();
    assert!((now - created_at).abs() < 60, "{created_at}, {now}");
    let tenant = Tenant::default();
    let record = FileRecord {
        id: new_file_id(1 << 64),
        bytes: 1,
        created_at: now,
        expires_at: Some(now + 120),
        filename: "a".to_owned(),
        purpose: FilePurpose::BatchOutput,
    };
    world.files.register(tenant, record.clone()).await.unwrap();
    let found = world.files.record(tenant, &record.id).await;
    assert_eq!(found.unwrap(), Some(record));
    assert_eq!(world.list("").await["data"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn files_that_cannot_be_deleted_keep_none_behind_them() {
    const STUCK: u64 = 150;
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path();
    let world = World::new(Settings {
        folder: folder.to_str().unwrap().to_owned(),
        ..Settings::default()
    });
    let tenant = Tenant::default();
    for number in 0..=STUCK {
        let record = FileRecord {
            id: new_file_id(u128::from(number) << 64),
            bytes: 1,
            created_at: 1,
            expires_at: Some(number as i64 + 10),
            filename: "a".to_owned(),
            purpose: FilePurpose::BatchOutput,
        };
        if number < STUCK {
            // A folder in the place of its object.
            let path = storage_path(tenant, &record.id).unwrap();
            std::fs::create_dir_all(folder.join(path).join("x")).unwrap();
        }
        world.files.register(tenant, record).await.unwrap();
    }
    assert_eq!(world.files.delete_expired(1_000_000).await, Ok(1));
}

#[tokio::test]
async fn an_upload_that_appears_after_its_client_got_an_error_goes() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path();
    let world = World::new(Settings {
        folder: folder.to_str().unwrap().to_owned(),
        ..Settings::default()
    });
    // A file in the place of the folder of all files.
    let files = folder.join("files");
    std::fs::write(&files, "").unwrap();
    let failed = world.upload(&with_file(b"x"), 64).await.unwrap_err();
    assert_eq!(failed.code, "storage_unavailable");
    std::fs::remove_file(&files).unwrap();
    assert_eq!(world.list("").await["data"], json!([]));
    let documents = world.documents().await;
    assert_eq!(documents.len(), 1);
    let path = storage_path(Tenant::default(), &documents[0]).unwrap();
    let late = Bytes::from_static(b"x");
    world.storage.put(&path, late).await.unwrap();
    let limit_ms = observe::unix_ms() + UNCONFIRMED_LIMIT.as_millis() as u64;
    assert_eq!(world.files.delete_expired(limit_ms).await, Ok(1));
    world.assert_empty("expired").await;
}

#[tokio::test]
async fn nothing_stays_in_the_folder_of_an_upload_that_is_broken_off() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path();
    let world = World::new(Settings {
        folder: folder.to_str().unwrap().to_owned(),
        ..Settings::default()
    });
    let form = with_file(&vec![b'x'; 9 << 20]);
    let cut = &form[..form.len() - 100];
    let error = world.upload(cut, 64 << 10).await.unwrap_err();
    assert_eq!(error.status, 400);
    assert!(files_below(folder).is_empty());

    // The client leaves.
    let (sender, piped) = mpsc::channel(1);
    let headers = headers(TYPE);
    let upload = FileUpload {
        headers: &headers,
        body: RequestBody::from(piped),
        timeout: PATIENCE,
    };
    tokio::select! {
        _ = world.files.create(Tenant::default(), upload) => panic!("the form is not complete"),
        () = async {
            for piece in cut.chunks(64 << 10) {
                sender.send(Bytes::copy_from_slice(piece)).await.unwrap();
            }
        } => {}
    }
    assert_eq!(world.tasks.drain(Duration::from_secs(10)).await, 0);
    assert!(files_below(folder).is_empty());
    assert_eq!(world.documents().await, [""; 0]);
    assert!(world.has_metric("warmroute_batch_uploads_total{outcome=\"abandoned\"} 1"));

    let whole = world.upload(&form, 64 << 10).await.unwrap();
    assert_eq!(whole["bytes"], 9 << 20);
    assert_eq!(files_below(folder).len(), 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_bytes_of_a_file_are_those_that_were_sent(
        content in proptest::collection::vec(
            prop_oneof![Just(b'\r'), Just(b'\n'), Just(b'-'), Just(b'x'), Just(b'1'), any::<u8>()],
            1..300,
        ),
        piece in 1..40_usize,
    ) {
        let delimiter = b"\r\n--x1";
        prop_assume!(!content.windows(delimiter.len()).any(|window| window == delimiter));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let found = runtime.block_on(async {
            let world = World::new(Settings::default());
            let created = world.upload(&with_file(&content), piece).await.unwrap();
            let id = created["id"].as_str().unwrap();
            bytes(world.files.content(Tenant::default(), id).await.unwrap()).await
        });
        prop_assert_eq!(found, content);
    }
}
