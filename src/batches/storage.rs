//! Where files, and the results of batches while they run, lie as bytes: a folder, S3, or memory (tests).
//!
//! Paths are made by this router alone and never come from a client. An object appears whole or not at all, and one
//! that is written again is replaced.

mod leftovers;
mod marker;
mod reader;
#[cfg(feature = "s3")]
mod s3;
mod trial;
mod writer;

use std::fs::DirBuilder;
use std::future::poll_fn;
use std::ops::Range;
use std::os::unix::fs::DirBuilderExt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::{io, vec};

use bytes::Bytes;
use futures_core::Stream;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{GetOptions, ObjectStore, PutOptions};
use tracing::info;

pub use self::reader::StorageReader;
pub use self::trial::StorageOperation;
pub use self::writer::StorageWriter;
use super::paths;
use super::settings::Settings;
pub use super::storage_error::StorageError;
use crate::http::drain::Tasks;
use crate::http::tls;
use crate::observe;

/// Objects of one listing. A batch of 200,000 lines has some thousand parts; more than this is no batch of this router.
const MAX_LISTED: usize = 1_000_000;

/// Files have prompts and answers: only the router's own user may read a folder that it makes.
const FOLDER_MODE: u32 = 0o700;

/// Bytes of files and of parts of results. A clone is the same storage.
#[derive(Clone, Debug)]
pub struct Storage {
    store: Arc<dyn ObjectStore>,
    tasks: Tasks,
    /// How many parts an object may be written in.
    pub(super) max_parts: usize,
}

impl Storage {
    /// Opens what the settings name. S3 is connected to at the first operation. `tasks` clean up after writers that
    /// were dropped.
    pub fn open(settings: &Settings, clients: &tls::Clients, tasks: &Tasks) -> io::Result<Self> {
        let store: Arc<dyn ObjectStore> = match &settings.s3 {
            #[cfg(feature = "s3")]
            Some(s3) => s3::open(s3, clients)?,
            #[cfg(not(feature = "s3"))]
            Some(_) => return Err(io::Error::other("this build cannot use S3")),
            None if settings.folder.is_empty() => {
                return Err(io::Error::other("no storage is configured"));
            }
            None => open_folder(&settings.folder)?,
        };
        #[cfg(not(feature = "s3"))]
        let _ = clients;
        let max_parts = match &settings.s3 {
            Some(_) => writer::MAX_S3_PARTS,
            None => usize::MAX,
        };
        Ok(Self {
            store,
            tasks: tasks.clone(),
            max_parts,
        })
    }

    /// Deletes from the folder what has no owner where the records of files and batches end with the process: objects
    /// of earlier ones, once they are older than files are kept. A router that was started without its Redis by
    /// mistake, in the folder of a fleet, deletes no file that the fleet keeps.
    pub fn remove_earlier(settings: &Settings) -> io::Result<()> {
        let folder = &settings.folder;
        let now = observe::wall_clock();
        let age = settings.retention;
        let removed = match leftovers::remove(folder.as_ref(), now, age, paths::is_object) {
            // There is nothing yet, or the storage is S3.
            Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
            removed => removed.map_err(|error| folder_failed(folder, &error))?,
        };
        if removed > 0 {
            info!(
                folder,
                removed, "removed files of earlier processes, whose records ended with these"
            );
        }
        Ok(())
    }

    /// In the memory of the process, for tests.
    pub fn memory() -> Self {
        Self {
            store: Arc::new(InMemory::new()),
            tasks: Tasks::default(),
            max_parts: usize::MAX,
        }
    }

    /// Over a store of a test's own.
    #[cfg(test)]
    pub(super) fn over(store: Arc<dyn ObjectStore>) -> Self {
        Self {
            store,
            ..Self::memory()
        }
    }

    /// Begins an object, which appears when its writer finishes.
    pub async fn writer(&self, path: &str) -> Result<StorageWriter, StorageError> {
        let path = parse(path)?;
        Ok(StorageWriter::new(
            self.store.clone(),
            path,
            self.tasks.clone(),
            self.max_parts,
        ))
    }

    /// Writes a whole object.
    pub async fn put(&self, path: &str, bytes: Bytes) -> Result<(), StorageError> {
        let path = parse(path)?;
        let written = self
            .store
            .put_opts(&path, bytes.into(), PutOptions::default());
        written.await.map(drop).map_err(StorageError::from)
    }

    /// Begins to read an object, or a range of its bytes. A range that ends after the object's end is cut there; one
    /// that begins after it is an error.
    pub async fn read(
        &self,
        path: &str,
        range: Option<Range<u64>>,
    ) -> Result<StorageReader, StorageError> {
        let path = parse(path)?;
        if range.as_ref().is_some_and(Range::is_empty) {
            return Ok(StorageReader::empty());
        }
        let options = GetOptions::new().with_range(range);
        let found = self.store.get_opts(&path, options).await?;
        Ok(StorageReader::new(found))
    }

    /// A whole object, which must not be larger than `max` bytes.
    pub async fn read_whole(&self, path: &str, max: u64) -> Result<Bytes, StorageError> {
        let reader = self.read(path, None).await?;
        if reader.len > max {
            let message = format!("{path} has {} bytes, and {max} were expected", reader.len);
            return Err(StorageError::Failed(message));
        }
        reader.whole().await
    }

    /// The paths below a folder, sorted. Below `""` are all.
    pub async fn list(&self, folder: &str) -> Result<Vec<String>, StorageError> {
        let paths = self.paths(folder).await?.into_iter();
        let mut paths: Vec<String> = paths.map(String::from).collect();
        paths.sort_unstable();
        Ok(paths)
    }

    /// Deletes an object. One that is not there is no error.
    pub async fn delete(&self, path: &str) -> Result<(), StorageError> {
        self.delete_paths(vec![parse(path)?]).await
    }

    pub async fn delete_all(&self, folder: &str) -> Result<(), StorageError> {
        let paths = self.paths(folder).await?;
        self.delete_paths(paths).await
    }

    async fn paths(&self, folder: &str) -> Result<Vec<Path>, StorageError> {
        let folder = parse(folder)?;
        let mut paths = Vec::new();
        let mut listed = self.store.list(Some(&folder));
        while let Some(object) = next(&mut listed).await {
            if paths.len() == MAX_LISTED {
                let message = format!("{folder} has more than {MAX_LISTED} objects");
                return Err(StorageError::Failed(message));
            }
            paths.push(object?.location);
        }
        Ok(paths)
    }

    /// Deletes as many as it can; then the first failure is reported.
    async fn delete_paths(&self, paths: Vec<Path>) -> Result<(), StorageError> {
        let mut deleted = self.store.delete_stream(Box::pin(Paths(paths.into_iter())));
        let mut result = Ok(());
        while let Some(path) = next(&mut deleted).await {
            match path.map_err(StorageError::from) {
                Ok(_) | Err(StorageError::NotFound) => {}
                Err(error) => result = result.and(Err(error)),
            }
        }
        result
    }
}

fn open_folder(folder: &str) -> io::Result<Arc<dyn ObjectStore>> {
    let failed = |error: io::Error| folder_failed(folder, &error);
    let mut builder = DirBuilder::new();
    builder.recursive(true).mode(FOLDER_MODE);
    builder.create(folder).map_err(failed)?;
    let now = observe::wall_clock();
    let removed = leftovers::remove(
        folder.as_ref(),
        now,
        leftovers::UNFINISHED_AGE,
        leftovers::is_unfinished,
    );
    let removed = removed.map_err(failed)?;
    if removed > 0 {
        info!(folder, removed, "removed what unfinished uploads had left");
    }
    let store = LocalFileSystem::new_with_prefix(folder);
    let store = store.map_err(|error| failed(io::Error::other(error)))?;
    // What is answered as stored outlasts a power failure. Folders that are empty go.
    Ok(Arc::new(
        store.with_fsync(true).with_automatic_cleanup(true),
    ))
}

fn folder_failed(folder: &str, error: &io::Error) -> io::Error {
    let message = format!("batches.folder `{folder}`: {error}");
    io::Error::new(error.kind(), message)
}

/// A path of this router. What could lead out of the storage is refused.
fn parse(path: &str) -> Result<Path, StorageError> {
    Path::parse(path).map_err(|error| StorageError::Failed(error.to_string()))
}

async fn next<S: Stream + Unpin>(stream: &mut S) -> Option<S::Item> {
    poll_fn(|cx| Pin::new(&mut *stream).poll_next(cx)).await
}

struct Paths(vec::IntoIter<Path>);

impl Stream for Paths {
    type Item = object_store::Result<Path>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(self.0.next().map(Ok))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

#[cfg(test)]
mod tests;
