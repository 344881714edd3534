//! Room for an upload among a tenant's files, from its first byte to its last: what many uploads at a time may use
//! together is bounded, and one for which there is no room is refused before it is sent.

use tokio::runtime::Handle;

use super::service::Files;
use crate::ids::Tenant;
use crate::observe;
use crate::openai::error::ApiError;
use crate::store;
use crate::store::documents::{Collection, DocumentKey, InsertOutcome, NewDocument};

/// What a router that is killed leaves of a reservation goes after this time. An upload that takes longer goes on
/// without it.
const RESERVED_MS: u64 = 6 * 3_600 * 1_000;

/// A document of the tenant's files that is no file: its id is none. It goes when this is dropped.
#[must_use = "dropping the guard gives the room back"]
#[derive(Debug)]
pub(super) struct FileReservation {
    files: Files,
    key: Option<DocumentKey>,
}

impl Files {
    /// Reserves room for so many bytes, as far as they are known.
    pub(super) async fn reserve(
        &self,
        tenant: Tenant,
        random: u128,
        bytes: u64,
    ) -> Result<FileReservation, ApiError> {
        let key = DocumentKey {
            collection: Collection::Files,
            tenant,
            id: format!("upload-{random:032x}"),
        };
        let now_ms = observe::unix_ms();
        let new = NewDocument {
            value: "{}".into(),
            created_ms: now_ms,
            weight: bytes,
            due_ms: Some(now_ms.saturating_add(RESERVED_MS)),
        };
        // Also an insertion whose outcome is unknown is undone when this is dropped.
        let reservation = FileReservation {
            files: self.clone(),
            key: Some(key.clone()),
        };
        let inserted = self.store.insert_document(key, new, self.bounds()).await;
        let inserted = inserted.map_err(|error| ApiError::of_store(&error))?;
        self.check_room(inserted)?;
        Ok(reservation)
    }

    /// What a client gets whose file exceeds the tenant's bounds.
    pub(super) fn check_room(&self, inserted: InsertOutcome) -> Result<(), ApiError> {
        match inserted {
            InsertOutcome::Done | InsertOutcome::Exists => Ok(()),
            InsertOutcome::TooMany => {
                self.metrics.on_bound("tenant_files");
                let max = self.settings.max_files_per_tenant;
                Err(ApiError::too_many_files(max))
            }
            InsertOutcome::TooHeavy => {
                self.metrics.on_bound("tenant_size");
                let max = self.settings.max_size_per_tenant;
                Err(ApiError::file_quota_exceeded(max))
            }
        }
    }
}

impl FileReservation {
    /// Gives the room back, so that the file itself may take it.
    pub(super) async fn release(mut self) -> Result<(), store::Error> {
        let Some(key) = self.key.clone() else {
            return Ok(());
        };
        self.files
            .store
            .remove_document(key, None)
            .await
            .map(drop)?;
        self.key = None;
        Ok(())
    }
}

impl Drop for FileReservation {
    fn drop(&mut self) {
        let Some(key) = self.key.take() else {
            return;
        };
        if Handle::try_current().is_err() {
            return;
        }
        let store = self.files.store.clone();
        self.files.tasks.spawn(async move {
            // If it fails, the document goes when it is due.
            let _ = store.remove_document(key, None).await;
        });
    }
}
