//! Writes an object piece by piece.

use std::mem;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use object_store::path::Path;
use object_store::{MultipartUpload, ObjectStore, PutMultipartOptions, PutOptions};
use tokio::runtime::Handle;
use tracing::debug;

use crate::batches::storage_error::StorageError;
use crate::http::drain::Tasks;

/// Parts of an object that S3 takes. Their sizes make 177 GiB of them.
pub(super) const MAX_S3_PARTS: usize = 10_000;

/// Bytes of a part. S3 wants at least 5 MiB.
pub(super) const PART_BYTES: usize = 8 << 20;

/// How many parts have `PART_BYTES`: 64 GiB, the largest upload of a client. Some servers of S3 want all parts but the
/// last to be alike.
pub(super) const EVEN_PARTS: usize = 8_192;

/// Bytes of these, which is all that such servers take.
const EVEN_BYTES: u64 = (EVEN_PARTS * PART_BYTES) as u64;

/// Bytes of a part behind the even ones.
const LARGE_PART_BYTES: usize = 64 << 20;

/// An object that is being written. One part is in memory, of 8 MiB, or of 64 MiB behind the first 64 GiB: it is
/// collected, and then sent while the writer waits.
///
/// The object appears with [`StorageWriter::finish`]. Nothing stays of a writer that is dropped or aborted.
#[must_use = "an object appears when its writer finishes"]
#[derive(Debug)]
pub struct StorageWriter {
    store: Arc<dyn ObjectStore>,
    path: Path,
    tasks: Tasks,
    /// No more parts may be written.
    max_parts: usize,
    pub(super) parts: usize,
    part: BytesMut,
    /// None until the first part is full: a small object is put at once.
    upload: Option<Box<dyn MultipartUpload>>,
    /// Bytes that were written so far.
    pub written: u64,
    /// A part is lost: its write failed, or was given up half-way.
    is_broken: bool,
}

impl StorageWriter {
    pub(super) fn new(
        store: Arc<dyn ObjectStore>,
        path: Path,
        tasks: Tasks,
        max_parts: usize,
    ) -> Self {
        Self {
            store,
            path,
            tasks,
            max_parts,
            parts: 0,
            part: BytesMut::new(),
            upload: None,
            written: 0,
            is_broken: false,
        }
    }

    pub async fn write(&mut self, mut piece: Bytes) -> Result<(), StorageError> {
        while !piece.is_empty() {
            let full = part_bytes(self.parts);
            let room = full - self.part.len();
            let taken = piece.split_to(room.min(piece.len()));
            self.part.extend_from_slice(&taken);
            self.written += taken.len() as u64;
            if self.part.len() == full {
                let part = mem::take(&mut self.part).freeze();
                self.put_part(part).await?;
            }
        }
        Ok(())
    }

    /// The object is there from now on. Returns its size.
    pub async fn finish(mut self) -> Result<u64, StorageError> {
        if self.is_broken {
            self.abort().await;
            let message = "a part of the object was not written";
            return Err(StorageError::Refused(message.to_owned()));
        }
        let rest = mem::take(&mut self.part).freeze();
        if self.upload.is_none() {
            let put = self
                .store
                .put_opts(&self.path, rest.into(), PutOptions::default());
            put.await?;
            return Ok(self.written);
        }
        if !rest.is_empty() {
            let put = self.put_part(rest).await;
            put.map_err(|error| match error {
                too_large @ StorageError::TooLarge(_) => too_large,
                // The upload was not completed.
                failed => StorageError::Refused(failed.to_string()),
            })?;
        }
        if let Some(upload) = &mut self.upload
            && let Err(error) = upload.complete().await
        {
            // S3's code for parts that cannot be put together. Another try would have the same.
            let is_uneven = EVEN_PARTS < self.parts && error.to_string().contains("InvalidPart");
            if is_uneven {
                return Err(StorageError::TooLarge(EVEN_BYTES));
            }
            return Err(error.into());
        }
        self.upload = None;
        Ok(self.written)
    }

    /// Nothing stays of the object. A failure to clean up is only logged: what is left is never listed, and storage
    /// expires it (S3 by a rule of the bucket, a folder at the next start).
    pub async fn abort(mut self) {
        if let Some(upload) = self.upload.take() {
            end(upload).await;
        }
    }

    async fn put_part(&mut self, part: Bytes) -> Result<(), StorageError> {
        if mem::replace(&mut self.is_broken, true) {
            let message = "an earlier part of the object was not written";
            return Err(StorageError::Failed(message.to_owned()));
        }
        if self.parts >= self.max_parts {
            return Err(StorageError::TooLarge(self.written - part.len() as u64));
        }
        if self.upload.is_none() {
            let options = PutMultipartOptions::default();
            let upload = self.store.put_multipart_opts(&self.path, options).await?;
            self.upload = Some(upload);
        }
        if let Some(upload) = &mut self.upload {
            upload.put_part(part.into()).await?;
        }
        self.parts += 1;
        self.is_broken = false;
        Ok(())
    }
}

/// Bytes of the part before which there are so many.
fn part_bytes(parts: usize) -> usize {
    if parts < EVEN_PARTS {
        PART_BYTES
    } else {
        LARGE_PART_BYTES
    }
}

impl Drop for StorageWriter {
    fn drop(&mut self) {
        let upload = self.upload.take();
        if let Some(upload) = upload
            && Handle::try_current().is_ok()
        {
            self.tasks.spawn(end(upload));
        }
    }
}

async fn end(mut upload: Box<dyn MultipartUpload>) {
    if let Err(error) = upload.abort().await {
        debug!(%error, "an unfinished object was not cleaned up");
    }
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;

    use super::*;

    #[test]
    fn an_upload_has_parts_of_one_size_and_results_may_be_larger() {
        let bytes = |parts: usize| (0..parts).map(|part| part_bytes(part) as u64).sum::<u64>();
        assert_eq!(bytes(EVEN_PARTS), 64 << 30);
        assert_eq!(bytes(EVEN_PARTS), EVEN_BYTES);
        assert_eq!(bytes(MAX_S3_PARTS), 177 << 30);
    }

    #[tokio::test]
    async fn parts_grow_and_an_object_that_needs_too_many_fails() {
        let store = Arc::new(InMemory::new());
        let (path, tasks) = (Path::from("a"), Tasks::default());
        let mut writer = StorageWriter::new(store, path, tasks, EVEN_PARTS + 1);
        writer.parts = EVEN_PARTS - 1;
        let piece = Bytes::from(vec![0; PART_BYTES]);
        writer.write(piece.clone()).await.unwrap();
        let large = LARGE_PART_BYTES / PART_BYTES;
        for _ in 0..large {
            assert_eq!(writer.parts, EVEN_PARTS);
            writer.write(piece.clone()).await.unwrap();
        }
        assert_eq!(writer.parts, EVEN_PARTS + 1);
        let full = writer.written;
        writer.write(Bytes::from_static(b"x")).await.unwrap();
        assert_eq!(writer.finish().await, Err(StorageError::TooLarge(full)));
    }
}
