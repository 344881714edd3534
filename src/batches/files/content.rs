//! `GET /v1/files/{id}/content`.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::Response;
use hyper::header::{CONTENT_DISPOSITION, CONTENT_TYPE};

use super::service::Files;
use crate::batches::file;
use crate::batches::storage::{StorageError, StorageReader};
use crate::http::BodyError;
use crate::ids::Tenant;
use crate::openai::error::{Answer, ApiError};

impl Files {
    /// `GET /v1/files/{id}/content`. The bytes are read as the client takes them.
    pub async fn content(&self, tenant: Tenant, id: &str) -> Answer {
        let record = self.existing(tenant, id).await?;
        let path = file::storage_path(tenant, id).ok_or_else(|| ApiError::unknown_file(id))?;
        let mut answer = self.stored(&path, ApiError::unknown_file(id)).await?;
        let headers = answer.headers_mut();
        headers.insert(CONTENT_TYPE, file::content_type(&record.filename));
        headers.insert(
            CONTENT_DISPOSITION,
            file::content_disposition(&record.filename),
        );
        Ok(answer)
    }

    /// An object of the storage as an answer. `gone`: what a client gets if there is none any more.
    pub(in crate::batches) async fn stored(&self, path: &str, gone: ApiError) -> Answer {
        let reader = match self.storage.read(path, None).await {
            Ok(reader) => reader,
            Err(StorageError::NotFound) => return Err(gone),
            Err(error) => return Err(self.storage_failed(&error)),
        };
        let body = StoredBody {
            left: reader.len,
            reader,
            files: self.clone(),
        };
        Ok(Response::new(body.boxed_unsync()))
    }
}

/// An object's bytes as an answer's body, of known length.
struct StoredBody {
    reader: StorageReader,
    left: u64,
    files: Files,
}

impl Body for StoredBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        Poll::Ready(match ready!(this.reader.poll_next(cx)) {
            Ok(Some(piece)) => {
                let length = piece.len() as u64;
                this.left = this.left.saturating_sub(length);
                this.files.metrics.on_sent(length);
                Some(Ok(Frame::data(piece)))
            }
            Ok(None) => None,
            Err(error) => {
                // The client notices: fewer bytes come than were announced.
                let _ = this.files.storage_failed(&error);
                Some(Err(error.into()))
            }
        })
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}
