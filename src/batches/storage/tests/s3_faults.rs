//! S3 that is slow, refuses for a moment or closes connections, and what stays there of an unfinished upload.

use std::time::Duration;

use super::fake_s3::{FakeS3, S3Faults};
use super::{bytes, read, write};
use crate::batches::storage::StorageError;
use crate::batches::storage::writer::{EVEN_PARTS, PART_BYTES};
use crate::http::drain::Tasks;

async fn check(faults: S3Faults) {
    let s3 = FakeS3::start().await;
    let storage = s3.open(&Tasks::default());
    // An object in parts, and one that is put at once.
    for length in [2 * PART_BYTES + 17, 1_000] {
        s3.set_faults(faults.clone());
        let content = bytes(length);
        write(&storage, "files/t/a", &content, 1 << 20).await;
        let left = s3.faults();
        assert_eq!((left.slow_downs, left.cuts), (0, 0), "{faults:?}");
        assert_eq!(read(&storage, "files/t/a", None).await, content);
    }
    assert_eq!(s3.uploads(), 0, "{faults:?}");
    assert_eq!(storage.list("").await.unwrap(), ["files/t/a"]);
}

#[tokio::test]
async fn a_server_that_is_slow_is_waited_for() {
    check(S3Faults {
        delay: Duration::from_millis(20),
        ..S3Faults::default()
    })
    .await;
}

#[tokio::test]
async fn a_server_that_asks_to_slow_down_is_asked_again() {
    check(S3Faults {
        slow_downs: 1,
        ..S3Faults::default()
    })
    .await;
}

#[tokio::test]
async fn a_write_whose_connection_is_closed_half_way_is_sent_again() {
    check(S3Faults {
        cuts: 2,
        ..S3Faults::default()
    })
    .await;
}

#[tokio::test]
async fn nothing_is_there_of_what_the_server_refuses() {
    // Their last steps: a part, the completion, the object.
    for length in [PART_BYTES + 1, PART_BYTES, 1_000] {
        let s3 = FakeS3::start().await;
        let storage = s3.open(&Tasks::default());
        let mut writer = storage.writer("files/t/a").await.unwrap();
        writer.write(bytes(length)).await.unwrap();
        s3.set_faults(S3Faults {
            refusals: 1,
            ..S3Faults::default()
        });
        let refused = writer.finish().await.unwrap_err();
        assert!(refused.leaves_nothing(), "{length}: {refused}");
        assert_eq!(storage.list("").await.unwrap(), [""; 0]);
    }
}

#[tokio::test]
async fn a_server_that_wants_equal_parts_takes_no_object_with_larger_ones() {
    let s3 = FakeS3::start().await;
    let storage = s3.open(&Tasks::default());
    let mut writer = storage.writer("files/t/a").await.unwrap();
    writer.write(bytes(PART_BYTES)).await.unwrap();
    // As behind 64 GiB.
    writer.parts = EVEN_PARTS + 1;
    s3.set_faults(S3Faults {
        refusals: 1,
        ..S3Faults::default()
    });
    let refused = writer.finish().await;
    assert_eq!(refused, Err(StorageError::TooLarge(64 << 30)));
}

#[tokio::test]
async fn nothing_stays_of_an_upload_that_does_not_finish() {
    let s3 = FakeS3::start().await;
    let tasks = Tasks::default();
    let storage = s3.open(&tasks);
    let begin = async || {
        let mut writer = storage.writer("files/t/a").await.unwrap();
        writer.write(bytes(PART_BYTES + 1)).await.unwrap();
        assert_eq!(s3.uploads(), 1, "a part was written");
        assert_eq!(storage.list("").await.unwrap(), [""; 0]);
        writer
    };
    begin().await.abort().await;
    assert_eq!(s3.uploads(), 0);
    drop(begin().await);
    assert_eq!(tasks.drain(Duration::from_secs(10)).await, 0);
    assert_eq!(s3.uploads(), 0);
}
