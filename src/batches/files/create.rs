//! `POST /v1/files`: streams a form's file into the storage.

use std::time::Duration;

use http_body::Body as _;
use hyper::HeaderMap;
use hyper::header::CONTENT_TYPE;
use multer::{Field, Multipart};
use tokio::sync::oneshot;

use super::form::{FILE, FileRequest, FormFields, MAX_FIELD_BYTES};
use super::pieces::{HeadBytes, MAX_HEAD_BYTES, PieceError, UploadLimits, UploadPieces};
use super::service::Files;
use super::slots::{MAX_UPLOADS_PER_TENANT, NoSlot, UploadSlot};
use crate::batches::file::{self, FileRecord, UNCONFIRMED_LIMIT};
use crate::batches::storage::StorageWriter;
use crate::http::server::RequestBody;
use crate::ids::Tenant;
use crate::openai::error::{Answer, ApiError};
use crate::store::documents::{DocumentBounds, InsertOutcome};
use crate::{http, openai};

/// RFC 2046 has 70 characters.
const MAX_BOUNDARY_BYTES: usize = 200;

/// The request of an upload.
#[derive(Debug)]
pub struct FileUpload<'a> {
    pub headers: &'a HeaderMap,
    pub body: RequestBody,
    /// The time within which a piece of the body must come.
    pub timeout: Duration,
}

/// A file that was received, and is not there yet.
#[derive(Debug)]
struct ReceivedFile {
    id: String,
    filename: String,
    request: FileRequest,
    writer: StorageWriter,
    _slot: UploadSlot,
}

impl Files {
    /// `POST /v1/files`. Nothing stays of an upload that is broken off or refused, whether by an error or because this
    /// is dropped. In memory is one part of the file (8 MiB), whatever its size.
    pub async fn create(&self, tenant: Tenant, upload: FileUpload<'_>) -> Answer {
        let in_flight = self.metrics.begin_upload();
        let received = match self.receive(tenant, upload).await {
            Ok(received) => received,
            Err(error) => {
                in_flight.end(outcome_of(&error));
                return Err(error);
            }
        };
        // The file is complete. From here on a client that leaves changes nothing.
        let (sender, receiver) = oneshot::channel();
        let files = self.clone();
        self.tasks.spawn(async move {
            let stored = files.store_file(tenant, received).await;
            in_flight.end(stored.as_ref().map_or_else(outcome_of, |_| "stored"));
            let _ = sender.send(stored);
        });
        let stored = receiver.await;
        let record = stored.unwrap_or_else(|_| Err(ApiError::stopping()))?;
        Ok(http::json(record.object()))
    }

    async fn receive(
        &self,
        tenant: Tenant,
        upload: FileUpload<'_>,
    ) -> Result<ReceivedFile, ApiError> {
        let FileUpload {
            headers,
            body,
            timeout,
        } = upload;
        let limits = UploadLimits {
            max: self.settings.max_file_size,
            timeout,
        };
        let boundary = boundary(headers)?;
        let announced = body.size_hint().lower();
        if announced > limits.max.saturating_add(MAX_HEAD_BYTES) {
            return Err(self.too_large());
        }
        let slot = self.enter(tenant)?;
        let id = file::new_file_id(openai::random()?);
        let path = file::storage_path(tenant, &id).ok_or_else(|| ApiError::unknown_file(&id))?;
        let writer = self.storage.writer(&path).await;
        let mut writer = writer.map_err(|error| self.storage_failed(&error))?;
        let read = self.read_form(boundary, body, limits, &mut writer).await;
        match read {
            Ok((filename, request)) => Ok(ReceivedFile {
                id,
                filename,
                request,
                writer,
                _slot: slot,
            }),
            Err(error) => {
                writer.abort().await;
                Err(error)
            }
        }
    }

    pub(super) fn enter(&self, tenant: Tenant) -> Result<UploadSlot, ApiError> {
        self.slots.enter(tenant).map_err(|full| match full {
            NoSlot::TenantFull => {
                self.metrics.on_bound("tenant_uploads");
                ApiError::too_many_uploads(MAX_UPLOADS_PER_TENANT)
            }
            NoSlot::Full => {
                self.metrics.on_bound("uploads");
                ApiError::uploads_full()
            }
        })
    }

    async fn read_form(
        &self,
        boundary: String,
        body: RequestBody,
        limits: UploadLimits,
        writer: &mut StorageWriter,
    ) -> Result<(String, FileRequest), ApiError> {
        let head = HeadBytes::default();
        let pieces = UploadPieces::new(body, limits, head.clone());
        let mut form = Multipart::new(pieces, boundary);
        let mut fields = FormFields::default();
        let mut filename = None;
        let failed = |error| self.form_failed(error, limits);
        while let Some(mut field) = form.next_field().await.map_err(failed)? {
            head.reset();
            let name = field.name().unwrap_or_default().to_owned();
            if name != FILE {
                fields.check_name(&name)?;
                let value = self.read_field(&name, &mut field, limits).await?;
                fields.add(&name, &value)?;
                head.reset();
                continue;
            }
            if filename.is_some() {
                return Err(ApiError::repeated_parameter(FILE));
            }
            filename = Some(file::clean_name(field.file_name()));
            while let Some(piece) = field.chunk().await.map_err(failed)? {
                head.reset();
                let length = piece.len() as u64;
                if writer.written + length > limits.max {
                    return Err(self.too_large());
                }
                self.metrics.on_received(length);
                let written = writer.write(piece).await;
                written.map_err(|error| self.storage_failed(&error))?;
            }
        }
        let file_bytes = filename.as_ref().map(|_| writer.written);
        let request = fields.end(file_bytes)?;
        Ok((filename.unwrap_or_default(), request))
    }

    /// The value of a field that is no file.
    async fn read_field(
        &self,
        name: &str,
        field: &mut Field<'_>,
        limits: UploadLimits,
    ) -> Result<Vec<u8>, ApiError> {
        let mut value = Vec::new();
        loop {
            let piece = field.chunk().await;
            let piece = piece.map_err(|error| self.form_failed(error, limits))?;
            let Some(piece) = piece else {
                return Ok(value);
            };
            if value.len() + piece.len() > MAX_FIELD_BYTES {
                let why = format!("it must not be longer than {MAX_FIELD_BYTES} bytes");
                return Err(ApiError::wrong_value(name, why));
            }
            value.extend_from_slice(&piece);
        }
    }

    /// First the record, then the object: whatever stops in between, no object is left that no record names. Clients
    /// find the file once the record is confirmed; until then it is one that goes soon, also if the router is killed or
    /// the store does not answer. The store checks the tenant's bounds, so that what exceeds them is no more than the
    /// uploads under way.
    async fn store_file(
        &self,
        tenant: Tenant,
        received: ReceivedFile,
    ) -> Result<FileRecord, ApiError> {
        let ReceivedFile {
            id,
            filename,
            request,
            writer,
            _slot,
        } = received;
        let key = file::document_key(tenant, &id).ok_or_else(|| ApiError::unknown_file(&id))?;
        let created_ms = self.clock.now_ms();
        let created_at = (created_ms / 1_000) as i64;
        // No longer than all files do.
        let retention = self.settings.retention.as_secs();
        let lasts = request.expires_after.unwrap_or(retention).min(retention);
        let record = FileRecord {
            id,
            bytes: writer.written,
            created_at,
            expires_at: Some(created_at.saturating_add(lasts as i64)),
            filename,
            purpose: request.purpose,
        };
        let bounds = DocumentBounds {
            documents: self.max_files,
            weight: self.settings.max_size_per_tenant,
        };
        let unconfirmed = record.unconfirmed();
        let due_ms = created_ms.saturating_add(UNCONFIRMED_LIMIT.as_millis() as u64);
        let inserted = self.insert(&key, &unconfirmed, created_ms, Some(due_ms), bounds);
        let checked = match inserted.await {
            Ok(inserted) => self.check_room(inserted),
            Err(error) => Err(error.into()),
        };
        let finished = match checked {
            Ok(()) => writer.finish().await,
            Err(error) => {
                writer.abort().await;
                let _ = self.store.remove_document(key, None).await;
                return Err(error);
            }
        };
        if let Err(error) = finished {
            // Storage that did not answer in time may have the object later. The record, which no client finds, stays
            // until `UNCONFIRMED_LIMIT`, and what is there then goes with it.
            if error.leaves_nothing() {
                let _ = self.store.remove_document(key, None).await;
            }
            return Err(self.storage_failed(&error));
        }
        if let Err(error) = self.confirm(&key, &record).await {
            self.take_back(tenant, record.id);
            return Err(error.into());
        }
        Ok(record)
    }

    /// What a client gets whose file, or batch, exceeds the bounds of the tenant's files.
    pub(super) fn check_room(&self, inserted: InsertOutcome) -> Result<(), ApiError> {
        match inserted {
            InsertOutcome::Done | InsertOutcome::Exists => Ok(()),
            InsertOutcome::TooMany => {
                self.metrics.on_bound("tenant_files");
                Err(ApiError::too_many_files(self.max_files))
            }
            InsertOutcome::TooHeavy => {
                self.metrics.on_bound("tenant_size");
                let max = self.settings.max_size_per_tenant;
                Err(ApiError::file_quota_exceeded(max))
            }
        }
    }

    fn too_large(&self) -> ApiError {
        self.metrics.on_bound("file_size");
        ApiError::file_too_large(self.settings.max_file_size)
    }

    fn form_failed(&self, error: multer::Error, limits: UploadLimits) -> ApiError {
        let multer::Error::StreamReadFailed(source) = error else {
            return ApiError::bad_form(&error);
        };
        match source.downcast::<PieceError>().map(|error| *error) {
            Ok(PieceError::Broken(error)) => ApiError::broken_body(&error),
            Ok(PieceError::Slow) => limits.too_slow(),
            Ok(PieceError::TooLarge) => self.too_large(),
            Ok(error @ PieceError::LongHead) => ApiError::bad_form(&error),
            Err(error) => ApiError::bad_form(&error),
        }
    }
}

/// The text between the parts of the form.
fn boundary(headers: &HeaderMap) -> Result<String, ApiError> {
    let kind = headers.get(CONTENT_TYPE);
    let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let boundary = multer::parse_boundary(kind).map_err(|_| ApiError::no_form(kind))?;
    if boundary.is_empty() || boundary.len() > MAX_BOUNDARY_BYTES {
        return Err(ApiError::bad_form(&"its boundary is empty or too long"));
    }
    Ok(boundary)
}

/// How an upload ended that was answered with an error.
pub(super) fn outcome_of(error: &ApiError) -> &'static str {
    if error.status.is_server_error() {
        "failed"
    } else {
        "refused"
    }
}
