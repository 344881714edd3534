//! The files of all tenants: records in the store, bytes in the storage. Each endpoint adds its own methods.

use std::iter;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tracing::{debug, warn};

use super::metrics::Metrics;
use super::slots::UploadSlots;
use crate::batches::clock::Clock;
use crate::batches::file::{self, FileRecord};
use crate::batches::list_page::{MAX_FETCHES, list_page};
use crate::batches::list_query::{ListOf, ListQuery};
use crate::batches::settings::Settings;
use crate::batches::storage::{Storage, StorageError};
use crate::http::drain::Tasks;
use crate::ids::Tenant;
use crate::observe::log_once::LogOnce;
use crate::observe::metrics::Registry;
use crate::openai::error::{Answer, ApiError};
use crate::store::documents::{
    Collection, Document, DocumentBounds, DocumentKey, InsertOutcome, NewDocument, ReplaceOutcome,
};
use crate::store::repeat::{repeat, until_known};
use crate::store::{self, ResponseStore};
use crate::{http, observe};

/// Files of one tenant, those with results too: 500 bytes each in the store, and as many as one page of a list has. An
/// upload beyond them is refused until one is deleted or expires.
const MAX_TENANT_FILES: u64 = 10_000;

/// Before a file is taken back anew.
const TAKE_BACK_PAUSE: Duration = Duration::from_secs(1);

/// Files that have expired and are read at a time.
const MAX_SWEPT: usize = 100;

/// The version of a document that was inserted.
const INSERTED: u64 = 1;

/// More than any sum, and exact as a number of Lua.
const UNBOUNDED: u64 = (1 << 53) - 1;

/// Files, with the settings of one configuration. A clone is the same service.
#[derive(Clone, Debug)]
pub struct Files {
    pub(super) settings: Arc<Settings>,
    pub(super) store: Arc<dyn ResponseStore>,
    pub(super) storage: Storage,
    pub(super) tasks: Tasks,
    pub(super) metrics: Metrics,
    pub(super) slots: Arc<UploadSlots>,
    /// Of one tenant.
    pub(super) max_files: u64,
    /// By which files are created and expire: that of all batches.
    pub(in crate::batches) clock: Clock,
    failures: Arc<Mutex<LogOnce>>,
}

impl Files {
    pub fn new(
        settings: Settings,
        store: Arc<dyn ResponseStore>,
        storage: Storage,
        tasks: Tasks,
        registry: &Registry,
    ) -> Self {
        Self {
            settings: Arc::new(settings),
            store,
            storage,
            tasks,
            metrics: Metrics::new(registry),
            slots: Arc::default(),
            max_files: MAX_TENANT_FILES,
            clock: Clock::new(observe::unix_ms),
            failures: Arc::default(),
        }
    }

    /// For the reference of metrics.
    pub fn register_metrics(registry: &Registry) {
        Metrics::new(registry);
    }

    /// `GET /v1/files`. `query`: what stands behind the path's `?`.
    pub async fn list(&self, tenant: Tenant, query: &str) -> Answer {
        let query = ListQuery::read(ListOf::Files, query)?;
        let from = query.from.as_deref();
        if from.is_some_and(|from| !file::is_file_id(from)) {
            return Err(query.unknown());
        }
        let now = self.clock.now_s();
        let shown = |document: &Document| {
            // One of a newer release hides no others.
            let record = self.readable(document)?;
            let asked = query.purpose.as_deref();
            let is_asked = asked.is_none_or(|asked| asked == record.purpose.as_str());
            let is_shown = is_asked && !record.is_expired(now);
            is_shown.then_some(record)
        };
        let page = list_page(
            &*self.store,
            Collection::Files,
            tenant,
            &query,
            MAX_FETCHES,
            shown,
        );
        let (records, has_more) = page.await?;
        Ok(http::json(file::list_object(&records, has_more)))
    }

    /// `GET /v1/files/{id}`.
    pub async fn get(&self, tenant: Tenant, id: &str) -> Answer {
        let record = self.existing(tenant, id).await?;
        Ok(http::json(record.object()))
    }

    /// `DELETE /v1/files/{id}`.
    pub async fn delete(&self, tenant: Tenant, id: &str) -> Answer {
        self.existing(tenant, id).await?;
        self.remove(tenant, id).await?;
        self.metrics.on_deleted("client");
        Ok(http::json(file::deleted_object(id)))
    }

    /// The record of a file. `None`: there is no such file, or it has expired.
    pub async fn record(&self, tenant: Tenant, id: &str) -> Result<Option<FileRecord>, ApiError> {
        let Some(key) = file::document_key(tenant, id) else {
            return Ok(None);
        };
        let Some(document) = self.store.document(key).await? else {
            return Ok(None);
        };
        let record = read_record(&document.value)?;
        let now = self.clock.now_s();
        Ok(Some(record).filter(|record| !record.is_expired(now)))
    }

    /// Registers a file whose bytes are in the storage already, at [`file::storage_path`]: results of a batch. It may
    /// be repeated. The tenant's bounds do not refuse it, since the batch has run; it counts for what comes later.
    pub async fn register(&self, tenant: Tenant, record: FileRecord) -> Result<(), ApiError> {
        let key = file::document_key(tenant, &record.id);
        let key = key.ok_or_else(|| ApiError::unknown_file(&record.id))?;
        let bounds = DocumentBounds {
            documents: UNBOUNDED,
            weight: UNBOUNDED,
        };
        // `Exists`: another replica has registered the same results.
        let (created_ms, due_ms) = (record.created_ms(), record.due_ms());
        let inserted = self.insert(&key, &record, created_ms, due_ms, bounds).await;
        Ok(inserted.map(drop)?)
    }

    /// Refuses a new batch of a tenant whose files are more than they may be, as those of results make them.
    pub async fn check_bounds(&self, tenant: Tenant) -> Result<(), ApiError> {
        let sums = self.store.document_sums(Collection::Files, tenant).await?;
        self.check_room(if sums.documents > self.max_files {
            InsertOutcome::TooMany
        } else if sums.weight > self.settings.max_size_per_tenant {
            InsertOutcome::TooHeavy
        } else {
            InsertOutcome::Done
        })
    }

    /// Deletes the bytes and the record of a file, which may be gone already: results of a batch that is deleted.
    pub async fn remove(&self, tenant: Tenant, id: &str) -> Result<(), ApiError> {
        let path = file::storage_path(tenant, id);
        let key = file::document_key(tenant, id);
        let (Some(path), Some(key)) = (path, key) else {
            return Ok(());
        };
        // The bytes first: as long as there is a record, a client can repeat what failed.
        let deleted = self.storage.delete(&path).await;
        deleted.map_err(|error| self.storage_failed(&error))?;
        let removed = self.store.remove_document(key, None).await;
        Ok(removed.map(drop)?)
    }

    /// Deletes a file whose client got an error, again and again until the store and the storage have answered, or the
    /// router ends. Few need it: those whose confirmation the store did not answer.
    pub(super) fn take_back(&self, tenant: Tenant, id: String) {
        let files = self.clone();
        self.tasks.spawn(async move {
            let always = |error: &ApiError| {
                debug!(id, reason = error.message, "a file is not taken back yet");
                true
            };
            let pauses = iter::repeat(TAKE_BACK_PAUSE);
            // There is no end of the pauses.
            let _ = repeat(pauses, always, || files.remove(tenant, &id)).await;
        });
    }

    /// Deletes the files that have expired, and returns how many. Any replica may call it at any time.
    pub async fn delete_expired(&self, now_ms: u64) -> Result<usize, store::Error> {
        let mut deleted = 0;
        // Those that cannot be deleted stand before the others.
        let mut left = 0;
        loop {
            let places = left..left + MAX_SWEPT;
            let due = self.store.due_documents(Collection::Files, now_ms, places);
            let due = due.await?;
            if due.is_empty() {
                return Ok(deleted);
            }
            for document in due {
                let path = file::storage_path(document.key.tenant, &document.key.id);
                if let Some(path) = path
                    && let Err(error) = self.storage.delete(&path).await
                {
                    let _ = self.storage_failed(&error);
                    left += 1;
                    continue;
                }
                self.metrics.on_deleted("expired");
                deleted += 1;
                let removed = self
                    .store
                    .remove_document(document.key, Some(document.version));
                removed.await.map(drop)?;
            }
        }
    }

    pub(super) async fn existing(&self, tenant: Tenant, id: &str) -> Result<FileRecord, ApiError> {
        let found = self.record(tenant, id).await?;
        found.ok_or_else(|| ApiError::unknown_file(id))
    }

    /// Counts a failure of the storage, logs it if it is a new one, and returns what the client gets.
    pub(super) fn storage_failed(&self, error: &StorageError) -> ApiError {
        self.metrics.storage_errors.inc();
        self.log_failure("file storage failed", &error.to_string());
        ApiError::storage_failed()
    }

    /// Logs what failed, once for each reason.
    fn log_failure(&self, what: &'static str, reason: &str) {
        let is_new = self.failures.lock().should_log(observe::now(), reason);
        if is_new {
            warn!(reason, "{what}");
        } else {
            debug!(reason, "{what}");
        }
    }

    /// `None`: the record is damaged, or a newer release has written it.
    fn readable(&self, document: &Document) -> Option<FileRecord> {
        match read_record(&document.value) {
            Ok(record) => Some(record),
            Err(error) => {
                self.log_failure("a file is not listed", &error.message);
                None
            }
        }
    }

    /// Writes a new record. A write whose outcome is unknown is repeated, which does no harm.
    /// `created_ms`: by which lists are sorted, more exact than the record's seconds. `due_ms`: when it is deleted.
    pub(super) async fn insert(
        &self,
        key: &DocumentKey,
        record: &FileRecord,
        created_ms: u64,
        due_ms: Option<u64>,
        bounds: DocumentBounds,
    ) -> Result<InsertOutcome, store::Error> {
        let new = NewDocument {
            value: record.to_json(),
            created_ms,
            weight: record.bytes,
            due_ms,
        };
        let documents = &self.store;
        until_known(|| documents.insert_document(key.clone(), new.clone(), bounds)).await
    }

    /// Has clients find a file that was inserted as unconfirmed. After an error it is unknown whether that was done.
    pub(super) async fn confirm(
        &self,
        key: &DocumentKey,
        record: &FileRecord,
    ) -> Result<(), store::Error> {
        let (value, due_ms) = (record.to_json(), record.due_ms());
        let documents = &self.store;
        let confirm = || documents.replace_document(key.clone(), INSERTED, value.clone(), due_ms);
        match until_known(confirm).await? {
            // `Changed`: by a write before, whose outcome was unknown. Only its own upload changes a file.
            ReplaceOutcome::Done(_) | ReplaceOutcome::Changed => Ok(()),
            ReplaceOutcome::Gone => Err(store::Error::Unavailable {
                retry_after: Duration::from_secs(1),
                reason: "the upload took too long and was deleted".into(),
            }),
        }
    }
}

/// A record that cannot be read is a fault of the router's, and not a file that is missing.
fn read_record(value: &[u8]) -> Result<FileRecord, ApiError> {
    FileRecord::from_json(value).map_err(|error| {
        let reason = format!("a file's record is damaged or of a newer release: {error}");
        store::Error::Unreadable(reason.into()).into()
    })
}
