//! Writes the records of new batches within the bounds of their tenant, and makes room for them.

use std::time::Duration;

use tokio::time::sleep;
use tracing::info;

use super::batch::BatchRecord;
use super::line::Flavor;
use super::paths;
use super::service::Batches;
use crate::ids::Tenant;
use crate::openai::error::ApiError;
use crate::store;
use crate::store::conversation::Order;
use crate::store::documents::{DocumentBounds, DocumentKey, InsertOutcome, NewDocument};

/// Pauses before a write whose outcome is unknown is repeated: 2 s in all, about as long as a failover of the store.
const PAUSES: [Duration; 3] = [
    Duration::from_millis(100),
    Duration::from_millis(500),
    Duration::from_millis(1_400),
];

impl Batches {
    /// Writes the record of a new batch. `weight`: the bytes of the tenant's quota that are the batch's own.
    pub(super) async fn insert(
        &self,
        key: &DocumentKey,
        record: &BatchRecord,
        weight: u64,
    ) -> Result<(), ApiError> {
        let bound = |name: &str| self.metrics.bounds_reached.with_label_values(&[name]).inc();
        // Each round after the first has removed a batch.
        loop {
            let inserted = self.try_insert(key, record, weight).await;
            match inserted.map_err(|error| ApiError::of_store(&error))? {
                InsertOutcome::Done => return Ok(()),
                // The id is random.
                InsertOutcome::Exists => return Err(ApiError::of_store(&store::Error::Exists)),
                InsertOutcome::TooMany if self.make_room(key.tenant).await? => {
                    bound("ended_batches");
                }
                InsertOutcome::TooMany => {
                    bound("tenant_batches");
                    let max = self.settings.max_batches_per_tenant;
                    return Err(ApiError::too_many_batches(max));
                }
                InsertOutcome::TooHeavy => {
                    bound("tenant_size");
                    let max = self.settings.max_size_per_tenant;
                    return Err(ApiError::file_quota_exceeded(max));
                }
            }
        }
    }

    async fn try_insert(
        &self,
        key: &DocumentKey,
        record: &BatchRecord,
        weight: u64,
    ) -> Result<InsertOutcome, store::Error> {
        let mut pauses = PAUSES.into_iter();
        loop {
            let new = NewDocument {
                value: record.to_json(),
                created_ms: record.created_ms,
                weight,
                due_ms: Some(record.created_ms),
            };
            let bounds = DocumentBounds {
                documents: self.settings.max_batches_per_tenant,
                weight: self.settings.max_size_per_tenant,
            };
            let inserted = self.store.insert_document(key.clone(), new, bounds).await;
            match (inserted, pauses.next()) {
                // The same id and the same value: it may be repeated.
                (Err(store::Error::Unknown { .. }), Some(pause)) => sleep(pause).await,
                (inserted, _) => return inserted,
            }
        }
    }

    /// Removes the oldest of a tenant's batches that has ended, which no client of OpenAI's API can. Its files of
    /// results stay until they expire. A batch of Messages stays: its results would go with it, and clients can delete
    /// it. False: there is none.
    async fn make_room(&self, tenant: Tenant) -> Result<bool, ApiError> {
        let may_go = |record: &BatchRecord| {
            record.flavor == Flavor::OpenAi && record.status.is_terminal() && record.webhooks_sent
        };
        let Some(key) = self.find(tenant, Order::OldestFirst, may_go).await? else {
            return Ok(false);
        };
        info!(
            batch = key.id,
            "a batch that has ended is removed to make room for another"
        );
        self.remove(key).await?;
        Ok(true)
    }

    /// Deletes all that is kept of a batch but its files.
    pub(super) async fn remove(&self, key: DocumentKey) -> Result<(), ApiError> {
        // The bytes first: as long as there is a record, a client can repeat what failed.
        let deleted = self.storage.delete_all(&paths::folder(&key.id)).await;
        deleted.map_err(|error| self.storage_failed(&error))?;
        let removed = self.store.remove_document(key, None).await;
        removed
            .map(drop)
            .map_err(|error| ApiError::of_store(&error))
    }
}
