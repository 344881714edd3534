//! Writes the records of new batches within the bounds of their tenant, and makes room for them.

use std::iter;
use std::time::Duration;

use tracing::{debug, info};

use super::batch::BatchRecord;
use super::line::Flavor;
use super::paths;
use super::records::{Changed, Records};
use super::service::Batches;
use crate::ids::Tenant;
use crate::openai::error::ApiError;
use crate::store;
use crate::store::conversation::Order;
use crate::store::documents::{DocumentBounds, DocumentKey, InsertOutcome, NewDocument};
use crate::store::repeat::{repeat, until_known};

/// Before a batch is taken back anew.
const TAKE_BACK_PAUSE: Duration = Duration::from_millis(250);

impl Batches {
    /// Writes the record of a new batch, which no replica runs before it is confirmed. `weight`: the bytes of the
    /// tenant's quota that are the batch's own.
    pub(super) async fn insert(
        &self,
        key: &DocumentKey,
        record: &BatchRecord,
        weight: u64,
    ) -> Result<(), ApiError> {
        let record = record.unconfirmed();
        let new = NewDocument {
            value: record.to_json(),
            created_ms: record.created_ms,
            weight,
            due_ms: record.due_ms(record.created_ms),
        };
        let bounds = DocumentBounds {
            documents: self.max_batches,
            weight: self.settings.max_size_per_tenant,
        };
        let bound = |name: &str| self.metrics.bounds_reached.with_label_values(&[name]).inc();
        // Each round after the first has removed a batch.
        loop {
            // The same id and the same value: it may be repeated.
            let insert = || self.store.insert_document(key.clone(), new.clone(), bounds);
            match until_known(insert).await? {
                InsertOutcome::Done => return Ok(()),
                // The id is random.
                InsertOutcome::Exists => return Err(store::Error::Exists.into()),
                InsertOutcome::TooMany if self.make_room(key.tenant).await? => {
                    bound("ended_batches");
                }
                InsertOutcome::TooMany => {
                    bound("tenant_batches");
                    return Err(ApiError::too_many_batches(self.max_batches));
                }
                InsertOutcome::TooHeavy => {
                    bound("tenant_size");
                    let max = self.settings.max_size_per_tenant;
                    return Err(ApiError::file_quota_exceeded(max));
                }
            }
        }
    }

    /// Confirms a batch that was inserted: from now on replicas run it. If the outcome is unknown, the batch is taken
    /// back as soon as the store answers, because its client gets an error.
    pub(super) async fn confirm(
        &self,
        key: &DocumentKey,
        new: &BatchRecord,
    ) -> Result<(), ApiError> {
        let confirmed = self.records.change(key, |record, _| record.confirm(new));
        let error = match confirmed.await {
            Ok(Changed::Done(_)) => return Ok(()),
            // By a write before, whose outcome was unknown.
            Ok(Changed::Unchanged(record)) if !record.is_unconfirmed => return Ok(()),
            Ok(Changed::Unchanged(_) | Changed::Gone) => store::Error::Unavailable {
                retry_after: Duration::from_secs(1),
                reason: "the creation of a batch took too long, and was undone".into(),
            },
            Err(error) => {
                // Few need it: those whose confirmation the store did not answer.
                let taken_back = take_back(self.records.clone(), key.clone());
                self.tasks.spawn(taken_back);
                error
            }
        };
        Err(error.into())
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
        // In the mount point of a lost mount there is nothing to delete: without the record, the objects of the batch
        // would stay in the storage for ever.
        let asked = self.ask_storage_in_time().await;
        asked.map_err(|error| self.identity_failed(&error))?;
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
        Ok(removed.map(drop)?)
    }
}

/// Runs until the store has answered, or the router ends.
async fn take_back(records: Records, key: DocumentKey) {
    let is_passing = |error: &store::Error| {
        debug!(batch = key.id, %error, "a batch is not taken back yet");
        error.retry_after().is_some()
    };
    let take_back = || records.change(&key, BatchRecord::take_back);
    // Whoever looks at it next deletes it.
    let _ = repeat(iter::repeat(TAKE_BACK_PAUSE), is_passing, take_back).await;
}
