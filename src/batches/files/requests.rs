//! The body that creates a batch of Messages: streamed into the storage as the lines of an input file.

use std::future::poll_fn;
use std::pin::Pin;

use bytes::Bytes;
use futures_core::Stream;
use http_body::Body as _;

use super::create::{FileUpload, outcome_of};
use super::pieces::{HeadBytes, PieceError, UploadLimits, UploadPieces};
use super::service::Files;
use super::slots::UploadSlot;
use crate::batches::messages_requests::RequestReader;
use crate::batches::storage::{StorageError, StorageWriter};
use crate::ids::Tenant;
use crate::openai::error::ApiError;

/// Requests that were received. Their lines appear in the storage with [`ReceivedRequests::finish`].
#[must_use = "the lines appear when this finishes"]
#[derive(Debug)]
pub struct ReceivedRequests {
    /// How many there are.
    pub count: u32,
    writer: StorageWriter,
    _slot: UploadSlot,
}

impl ReceivedRequests {
    pub fn bytes(&self) -> u64 {
        self.writer.written
    }

    pub async fn finish(self) -> Result<u64, StorageError> {
        self.writer.finish().await
    }

    /// Nothing stays of the lines.
    pub async fn abort(self) {
        self.writer.abort().await;
    }
}

impl Files {
    /// Reads requests and writes their lines to an object. In memory is one part of it, whatever its size; nothing
    /// stays of what is broken off or refused.
    pub async fn receive_requests(
        &self,
        tenant: Tenant,
        upload: FileUpload<'_>,
        path: &str,
    ) -> Result<ReceivedRequests, ApiError> {
        let limits = UploadLimits {
            max: self.settings.max_file_size,
            timeout: upload.timeout,
        };
        if upload.body.size_hint().lower() > limits.max {
            return Err(self.requests_too_large());
        }
        let slot = self.enter(tenant)?;
        let writer = self.storage.writer(path).await;
        let mut writer = writer.map_err(|error| self.storage_failed(&error))?;
        let in_flight = self.metrics.begin_upload();
        match self.write_lines(upload, limits, &mut writer).await {
            Ok(count) => {
                in_flight.end("stored");
                Ok(ReceivedRequests {
                    count,
                    writer,
                    _slot: slot,
                })
            }
            Err(error) => {
                in_flight.end(outcome_of(&error));
                writer.abort().await;
                Err(error)
            }
        }
    }

    async fn write_lines(
        &self,
        upload: FileUpload<'_>,
        limits: UploadLimits,
        writer: &mut StorageWriter,
    ) -> Result<u32, ApiError> {
        let invalid = |message: String| ApiError::invalid_batch_requests(&message);
        let head = HeadBytes::default();
        let mut pieces = UploadPieces::new(upload.body, limits, head.clone());
        let mut reader = RequestReader::new(self.settings.max_lines);
        let mut lines = Vec::new();
        while let Some(piece) = poll_fn(|cx| Pin::new(&mut pieces).poll_next(cx)).await {
            let piece = piece.map_err(|error| self.piece_failed(error, limits))?;
            head.reset();
            self.metrics.on_received(piece.len() as u64);
            reader.push(&piece, &mut lines).map_err(invalid)?;
            if lines.is_empty() {
                continue;
            }
            if writer.written + lines.len() as u64 > limits.max {
                return Err(self.requests_too_large());
            }
            let written = writer.write(Bytes::from(std::mem::take(&mut lines))).await;
            written.map_err(|error| self.storage_failed(&error))?;
        }
        reader.finish().map_err(invalid)
    }

    fn requests_too_large(&self) -> ApiError {
        self.metrics.on_bound("file_size");
        ApiError::too_large(self.settings.max_file_size)
    }

    fn piece_failed(&self, error: PieceError, limits: UploadLimits) -> ApiError {
        match error {
            PieceError::Broken(error) => ApiError::broken_body(&error),
            PieceError::Slow => limits.too_slow(),
            PieceError::TooLarge | PieceError::LongHead => self.requests_too_large(),
        }
    }
}
