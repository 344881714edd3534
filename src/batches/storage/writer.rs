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

/// Bytes of a part. S3 wants at least 5 MiB, and takes 10,000 of them: 80 GB.
pub(super) const PART_BYTES: usize = 8 << 20;

/// An object that is being written. One part of 8 MiB is in memory: it is collected, and then sent while the writer
/// waits.
///
/// The object appears with [`StorageWriter::finish`]. Nothing stays of a writer that is dropped or aborted.
#[must_use = "an object appears when its writer finishes"]
#[derive(Debug)]
pub struct StorageWriter {
    store: Arc<dyn ObjectStore>,
    path: Path,
    tasks: Tasks,
    part: BytesMut,
    /// None until the first part is full: a small object is put at once.
    upload: Option<Box<dyn MultipartUpload>>,
    written: u64,
    /// A part is lost: its write failed, or was given up half-way.
    is_broken: bool,
}

impl StorageWriter {
    pub(super) fn new(store: Arc<dyn ObjectStore>, path: Path, tasks: Tasks) -> Self {
        Self {
            store,
            path,
            tasks,
            part: BytesMut::new(),
            upload: None,
            written: 0,
            is_broken: false,
        }
    }

    /// Bytes that were written so far.
    pub fn written(&self) -> u64 {
        self.written
    }

    pub async fn write(&mut self, mut piece: Bytes) -> Result<(), StorageError> {
        while !piece.is_empty() {
            let room = PART_BYTES - self.part.len();
            let taken = piece.split_to(room.min(piece.len()));
            self.part.extend_from_slice(&taken);
            self.written += taken.len() as u64;
            if self.part.len() == PART_BYTES {
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
            return Err(StorageError::Failed(message.to_owned()));
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
            self.put_part(rest).await?;
        }
        if let Some(upload) = &mut self.upload {
            upload.complete().await?;
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
        if self.upload.is_none() {
            let options = PutMultipartOptions::default();
            let upload = self.store.put_multipart_opts(&self.path, options).await?;
            self.upload = Some(upload);
        }
        if let Some(upload) = &mut self.upload {
            upload.put_part(part.into()).await?;
        }
        self.is_broken = false;
        Ok(())
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
