#[cfg(feature = "s3")]
mod fake_s3;
#[cfg(feature = "s3")]
mod s3_faults;

use std::fs;
use std::path::{Path as FolderPath, PathBuf};
use std::time::Duration;

use proptest::prelude::*;
use tempfile::TempDir;

#[cfg(feature = "s3")]
use self::fake_s3::FakeS3;
use super::writer::PART_BYTES;
use super::*;
use crate::batches::storage_identity::StorageId;

/// A folder of its own, which goes with the test.
struct TestFolder(TempDir);

impl TestFolder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// The storage makes it.
    fn path(&self) -> PathBuf {
        self.0.path().join("storage")
    }

    fn open(&self, tasks: &Tasks) -> Storage {
        let settings = Settings {
            folder: self.path().to_str().unwrap().to_owned(),
            ..Settings::default()
        };
        Storage::open(&settings, &tls::Clients::default(), tasks).unwrap()
    }

    /// All files in it, unfinished ones too.
    fn files(&self) -> Vec<PathBuf> {
        let mut files = Vec::new();
        add_files(&self.path(), &mut files);
        files
    }
}

fn add_files(folder: &FolderPath, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            add_files(&path, files);
        } else {
            files.push(path);
        }
    }
}

async fn in_each(check: impl AsyncFn(Storage)) {
    check(Storage::memory()).await;
    let folder = TestFolder::new();
    check(folder.open(&Tasks::default())).await;
    #[cfg(feature = "s3")]
    check(FakeS3::start().await.open(&Tasks::default())).await;
}

fn bytes(length: usize) -> Bytes {
    (0..length).map(|at| (at % 251) as u8).collect()
}

async fn write(storage: &Storage, path: &str, content: &Bytes, piece: usize) {
    let mut writer = storage.writer(path).await.unwrap();
    for piece in content.chunks(piece) {
        writer.write(content.slice_ref(piece)).await.unwrap();
    }
    assert_eq!(writer.written, content.len() as u64);
    assert_eq!(writer.finish().await, Ok(content.len() as u64));
}

async fn read(storage: &Storage, path: &str, range: Option<Range<u64>>) -> Vec<u8> {
    let mut reader = storage.read(path, range).await.unwrap();
    let mut whole = Vec::new();
    while let Some(piece) = reader.next().await.unwrap() {
        assert!(!piece.is_empty());
        whole.extend_from_slice(&piece);
    }
    assert_eq!(whole.len() as u64, reader.len);
    whole
}

#[tokio::test]
async fn what_is_written_in_pieces_is_read_whole_and_in_ranges() {
    in_each(async |storage| {
        for length in [0, 1, PART_BYTES - 1, PART_BYTES, 2 * PART_BYTES + 17] {
            let content = bytes(length);
            write(&storage, "files/t/a", &content, (1 << 20) + 1).await;
            assert_eq!(read(&storage, "files/t/a", None).await, content);
            let whole = storage.read_whole("files/t/a", length as u64).await;
            assert_eq!(whole.unwrap(), content);
        }
        let content = bytes(2 * PART_BYTES + 17);
        for range in [0..1, 5..5, 7..900_000, 16_777_200..99_999_999] {
            let found = read(&storage, "files/t/a", Some(range.clone())).await;
            let end = (range.end as usize).min(content.len());
            assert_eq!(found, content[range.start as usize..end], "{range:?}");
        }
        let short = storage.read_whole("files/t/a", 10).await;
        assert!(matches!(short, Err(StorageError::Failed(_))));
    })
    .await;
}

#[tokio::test]
async fn an_object_is_replaced_and_deleted() {
    in_each(async |storage| {
        storage
            .put("a/b", Bytes::from_static(b"one"))
            .await
            .unwrap();
        storage
            .put("a/b", Bytes::from_static(b"two"))
            .await
            .unwrap();
        assert_eq!(read(&storage, "a/b", None).await, b"two");
        storage.delete("a/b").await.unwrap();
        storage.delete("a/b").await.unwrap();
        let gone = storage.read("a/b", None).await;
        assert_eq!(gone.err(), Some(StorageError::NotFound));
    })
    .await;
}

#[tokio::test]
async fn paths_are_listed_by_folder() {
    in_each(async |storage| {
        let paths = [
            "batches/b1/parts/000001/a.jsonl",
            "batches/b1/parts/000001/b.jsonl",
            "batches/b1/parts/000002/a.jsonl",
            "batches/b1/shards.json",
            "batches/b12/shards.json",
            "files/t/f",
        ];
        for path in paths {
            storage.put(path, Bytes::from_static(b"x")).await.unwrap();
        }
        let folders = [
            "",
            "batches/",
            "batches/b1/",
            "batches/b1/parts/",
            "batches/b1/parts/000001/",
            "batches/b1/parts/000003/",
            "nothing/here/",
        ];
        for folder in folders {
            let found = storage.list(folder).await.unwrap();
            let expected = paths.into_iter().filter(|path| path.starts_with(folder));
            assert_eq!(found, expected.collect::<Vec<_>>(), "{folder}");
        }
        storage.delete_all("batches/b1/").await.unwrap();
        storage.delete_all("batches/b1/").await.unwrap();
        assert_eq!(
            storage.list("").await.unwrap(),
            ["batches/b12/shards.json", "files/t/f"]
        );
    })
    .await;
}

#[tokio::test]
async fn nothing_stays_of_a_writer_that_does_not_finish() {
    let folder = TestFolder::new();
    let tasks = Tasks::default();
    let storage = folder.open(&tasks);
    let begin = async || {
        let mut writer = storage.writer("files/t/a").await.unwrap();
        writer.write(bytes(PART_BYTES + 1)).await.unwrap();
        assert_eq!(folder.files().len(), 1, "a part was written");
        assert_eq!(storage.list("").await.unwrap(), [""; 0]);
        writer
    };
    begin().await.abort().await;
    assert!(folder.files().is_empty());
    drop(begin().await);
    assert_eq!(tasks.drain(Duration::from_secs(10)).await, 0);
    assert!(folder.files().is_empty());
}

#[tokio::test]
async fn a_path_that_leads_elsewhere_is_refused() {
    in_each(async |storage| {
        for path in ["../a", "a/../../b", "a//b", "a/./b"] {
            let put = storage.put(path, Bytes::new()).await;
            assert!(matches!(put, Err(StorageError::Failed(_))), "{path}");
            assert!(storage.read(path, None).await.is_err(), "{path}");
        }
    })
    .await;
}

#[test]
fn storage_that_cannot_be_used_is_refused_at_the_start() {
    let open = |folder: &str| {
        let settings = Settings {
            folder: folder.to_owned(),
            ..Settings::default()
        };
        let opened = Storage::open(&settings, &tls::Clients::default(), &Tasks::default());
        opened.map(drop).map_err(|error| error.to_string())
    };
    assert!(open("").unwrap_err().contains("no storage"));
    let found = open("/proc/no-such-folder").unwrap_err();
    assert!(
        found.contains("batches.folder `/proc/no-such-folder`"),
        "{found}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn pieces_of_any_size_are_one_object(
        pieces in proptest::collection::vec(0..50_000_usize, 0..8),
        start in 0..100_000_u64,
        length in 1..100_000_u64,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let storage = Storage::memory();
            let mut writer = storage.writer("a").await.unwrap();
            let mut content = Vec::new();
            for piece in pieces {
                let piece = bytes(piece);
                content.extend_from_slice(&piece);
                writer.write(piece).await.unwrap();
            }
            writer.finish().await.unwrap();
            prop_assert_eq!(&read(&storage, "a", None).await, &content);
            if start < content.len() as u64 {
                let found = read(&storage, "a", Some(start..start + length)).await;
                let end = content.len().min((start + length) as usize);
                prop_assert_eq!(found, &content[start as usize..end]);
            }
            Ok(())
        })?;
    }
}

#[tokio::test]
async fn a_trial_leaves_nothing_behind() {
    in_each(async |storage| {
        // Another replica may do the same at the same time.
        let try_out = async || {
            for operation in StorageOperation::ALL {
                assert_eq!(storage.try_out(operation).await, Ok(()));
            }
        };
        tokio::join!(try_out(), try_out());
        assert_eq!(storage.list("").await, Ok(Vec::new()));
    })
    .await;
}

#[tokio::test]
async fn a_storage_has_the_markers_that_it_was_given() {
    in_each(async |storage| {
        let (a, b) = (StorageId::new(1), StorageId::new(2));
        assert_eq!(storage.markers().await, Ok(Vec::new()));
        assert_eq!(storage.has_marker(&a).await, Ok(false));
        storage.add_marker(&b).await.unwrap();
        storage.add_marker(&a).await.unwrap();
        let other = "storage/notes.txt";
        storage.put(other, Bytes::new()).await.unwrap();
        assert_eq!(storage.has_marker(&a).await, Ok(true));
        assert_eq!(storage.markers().await, Ok(vec![a.clone(), b.clone()]));
        storage.delete(&a.marker()).await.unwrap();
        assert_eq!(storage.has_marker(&a).await, Ok(false));
        assert_eq!(storage.markers().await, Ok(vec![b]));
    })
    .await;
}

#[tokio::test]
async fn a_folder_that_is_a_file_cannot_be_written() {
    let folder = TestFolder::new();
    let storage = folder.open(&Tasks::default());
    fs::remove_dir(folder.path()).unwrap();
    fs::write(folder.path(), "no folder").unwrap();
    let tried = storage.try_out(StorageOperation::Write).await;
    assert!(matches!(tried, Err(StorageError::Failed(_))), "{tried:?}");
    // It says nothing about the marker.
    let asked = storage.has_marker(&StorageId::new(1)).await;
    assert!(matches!(asked, Err(StorageError::Failed(_))), "{asked:?}");
}
