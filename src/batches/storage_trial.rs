//! Whether this replica may use its storage, for operators and for the works of batches: it can be written and read,
//! and it is the one that all replicas share.

use std::pin::pin;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use super::routes::BatchEndpoint;
use super::service::Batches;
use super::storage::{StorageError, StorageOperation};
use super::storage_identity::{StorageId, StorageIdentity};
use crate::ids::Tenant;
use crate::openai::error::ApiError;
use crate::store::documents::{
    Collection, DocumentBounds, DocumentKey, InsertOutcome, NewDocument,
};
use crate::{observe, store};

/// Time between two trials of the storage, each of which is three requests to S3.
const TRIAL_INTERVAL: Duration = Duration::from_secs(60);

/// The label of the metric, beside the operations that are tried.
const IDENTITY: &str = "identity";

/// The store names one storage.
const BOUNDS: DocumentBounds = DocumentBounds {
    documents: 1,
    weight: 0,
};

/// Why it is not certain that this is the storage that all replicas share.
#[derive(Debug, thiserror::Error)]
pub(super) enum IdentityError {
    #[error("it is not the storage of the other replicas: it has no object `{}`", .0.marker())]
    Another(StorageId),
    #[error(transparent)]
    Store(#[from] store::Error),
    #[error(transparent)]
    Storage(#[from] StorageError),
}

impl From<IdentityError> for StorageError {
    fn from(error: IdentityError) -> Self {
        Self::Failed(error.to_string())
    }
}

impl Batches {
    /// Tries the storage, for operators and for the works. False if this replica may not use it.
    pub(super) async fn try_storage(&self) -> bool {
        if !self.try_uses().await {
            return false;
        }
        let mut deletion = pin!(self.try_operation(StorageOperation::Delete));
        loop {
            let interval = self.trial_interval(self.is_storage_usable());
            tokio::select! {
                biased;
                is_deleted = &mut deletion => return is_deleted && self.is_storage_usable(),
                // A deletion may hang for ever where all else works, and where all else fails for a while.
                () = self.trial_due.notified() => {}
                () = sleep(interval) => {}
            }
            self.try_uses().await;
        }
    }

    /// Time between a trial with this result and the next one.
    pub(super) fn trial_interval(&self, is_usable: bool) -> Duration {
        if is_usable {
            TRIAL_INTERVAL
        } else {
            self.retrial_interval
        }
    }

    /// Tries what works and requests need. False if nothing can be written or read.
    async fn try_uses(&self) -> bool {
        let tried = async {
            for operation in [StorageOperation::Write, StorageOperation::Read] {
                if !self.try_operation(operation).await {
                    return false;
                }
            }
            let asked = self.in_time(StorageOperation::Read, self.identify()).await;
            if let Err(error) = asked {
                self.failed("storage of batches cannot be used", &error);
            }
            true
        };
        let is_working = tried.await;
        // It has answered, however late: requests may ask it again.
        self.is_storage_hanging.store(false, Relaxed);
        is_working
    }

    async fn try_operation(&self, operation: StorageOperation) -> bool {
        let trial = self.storage.try_out(operation);
        let tried = self.in_time(operation, trial).await;
        self.on_trial(operation, &tried);
        tried.is_ok()
    }

    /// Waits for a trial. One that takes too long has failed meanwhile.
    async fn in_time<T>(&self, operation: StorageOperation, trial: impl Future<Output = T>) -> T {
        let mut trial = pin!(trial);
        if let Ok(tried) = timeout(self.trial_timeout, trial.as_mut()).await {
            return tried;
        }
        // Where only deletions hang, batches can run all the same.
        if operation != StorageOperation::Delete {
            self.is_storage_hanging.store(true, Relaxed);
        }
        self.on_trial(operation, &Err(self.no_answer()));
        // A mount that hangs keeps a thread with each trial: there is no other one before it answers.
        trial.await
    }

    fn no_answer(&self) -> StorageError {
        let limit = self.trial_timeout;
        StorageError::Failed(format!("no answer within {limit:?}"))
    }

    fn on_trial(&self, operation: StorageOperation, tried: &Result<(), StorageError>) {
        self.show_usable(operation.as_str(), tried.is_ok());
        match (operation, tried) {
            // Where nothing can be deleted, batches can run all the same.
            (StorageOperation::Read, Ok(())) => self.is_storage_working.store(true, Relaxed),
            (StorageOperation::Write | StorageOperation::Read, Err(_)) => {
                self.is_storage_working.store(false, Relaxed);
            }
            (StorageOperation::Write | StorageOperation::Delete, _) => {}
        }
        if let Err(error) = tried {
            self.failed("storage of batches cannot be used", error);
        }
    }

    fn show_usable(&self, operation: &str, is_usable: bool) {
        let usable = &self.metrics.storage_usable;
        let usable = usable.with_label_values(&[operation]);
        usable.set(i64::from(is_usable));
    }

    /// Whether works can be done here. Those of a replica whose storage cannot be used, or is not the one that all
    /// replicas share, are left to others.
    pub(super) fn is_storage_usable(&self) -> bool {
        self.is_storage_working.load(Relaxed) && self.identity.lock().is_same()
    }

    /// The id of the storage. An error: when it was asked last, it was not the one that all replicas share.
    pub(super) async fn storage_id(&self) -> Result<StorageId, IdentityError> {
        let known = self.identity.lock().clone();
        match known {
            StorageIdentity::Unknown => self.identify().await,
            StorageIdentity::Same(id) => Ok(id),
            StorageIdentity::Another(id) => Err(IdentityError::Another(id)),
        }
    }

    /// Asks the storage whether it is still the one that all replicas share. On a mounted folder it may hang for ever.
    pub(super) async fn ask_storage(&self) -> Result<(), IdentityError> {
        let named = self.identity.lock().named().cloned();
        let asked = match named {
            Some(id) => self.compare(id).await,
            None => self.identify().await,
        };
        asked.map(drop)
    }

    /// [`ask_storage`](Self::ask_storage) for a request, which does not wait for ever. Once a trial or a request shows
    /// that the storage hangs, it is not asked until a trial has an answer: each question would keep a thread of those
    /// that resolve names of workers, too.
    pub(super) async fn ask_storage_in_time(&self) -> Result<(), IdentityError> {
        if self.is_storage_hanging.load(Relaxed) {
            return Err(self.no_answer().into());
        }
        let asked = timeout(self.trial_timeout, self.ask_storage()).await;
        asked.unwrap_or_else(|_| {
            self.is_storage_hanging.store(true, Relaxed);
            self.trial_due.notify_one();
            Err(self.no_answer().into())
        })
    }

    /// What a client gets whose request needs another storage than this one, or one that answers.
    pub(super) fn identity_failed(&self, error: &IdentityError) -> ApiError {
        match error {
            IdentityError::Another(id) => {
                self.failed("storage of batches cannot be used", error);
                ApiError::batch_storage_differs(&id.marker())
            }
            IdentityError::Store(reason) => ApiError::of_store(reason),
            IdentityError::Storage(reason) => self.storage_failed(reason),
        }
    }

    /// Refuses a request that needs the storage, if it does not answer or is not the one that all replicas share, and a
    /// creation, if the clock of this host was wrong when it was compared last.
    pub(super) async fn check_storage(&self, endpoint: &BatchEndpoint) -> Result<(), ApiError> {
        if !self.files.clock.is_compared() {
            // A request has come before the first look for work, which compares it as well.
            self.checked_ms().await?;
        }
        let is_creation = matches!(
            endpoint,
            BatchEndpoint::Create | BatchEndpoint::CreateFile | BatchEndpoint::CreateOfMessages
        );
        if is_creation && !self.files.clock.is_right() {
            return Err(ApiError::batch_clock_differs());
        }
        let is_named = self.identity.lock().named().is_some();
        let asked = match endpoint {
            // Only the works of the batch need the storage, and a mount that hangs does not keep the client waiting.
            BatchEndpoint::Create if is_named => self.storage_id().await.map(drop),
            BatchEndpoint::Create
            | BatchEndpoint::CreateFile
            | BatchEndpoint::DeleteFile(_)
            | BatchEndpoint::FileContent(_)
            | BatchEndpoint::CreateOfMessages
            | BatchEndpoint::DeleteOfMessages(_)
            | BatchEndpoint::ResultsOfMessages(_) => self.ask_storage_in_time().await,
            // They need the store alone.
            BatchEndpoint::ListFiles
            | BatchEndpoint::File(_)
            | BatchEndpoint::List
            | BatchEndpoint::Batch(_)
            | BatchEndpoint::Cancel(_)
            | BatchEndpoint::ListOfMessages
            | BatchEndpoint::BatchOfMessages(_)
            | BatchEndpoint::CancelOfMessages(_) => Ok(()),
        };
        asked.map_err(|error| self.identity_failed(&error))
    }

    /// Finds out whether this is the storage that the store names. Where the store or the storage does not answer, what
    /// was known stays.
    async fn identify(&self) -> Result<StorageId, IdentityError> {
        let named = self.named_storage().await?;
        self.compare(named).await
    }

    /// Returns the id that the store names, if the storage has the marker of it.
    async fn compare(&self, named: StorageId) -> Result<StorageId, IdentityError> {
        let has_marker = self.storage.has_marker(&named).await;
        let found = StorageIdentity::of(named.clone(), has_marker.as_ref().ok().copied());
        self.note_identity(found);
        if has_marker? {
            Ok(named)
        } else {
            Err(IdentityError::Another(named))
        }
    }

    fn note_identity(&self, found: StorageIdentity) {
        let mut identity = self.identity.lock();
        let was_same = identity.is_same();
        identity.note(found);
        let (is_known, is_same) = (identity.named().is_some(), identity.is_same());
        drop(identity);
        if is_known {
            self.show_usable(IDENTITY, is_same);
        }
        if is_same && !was_same {
            // What has waited for the storage may start.
            self.works.wake.notify_one();
        }
    }

    /// The id that the store names. If it names none, it is given that of this replica's storage, which gets a marker
    /// if it has none.
    async fn named_storage(&self) -> Result<StorageId, IdentityError> {
        if let Some(named) = self.read_storage_id().await? {
            return Ok(named);
        }
        let mut markers = self.storage.markers().await?;
        let last = markers.pop();
        let has_marker = last.is_some();
        let own = last.unwrap_or_else(|| StorageId::new(fastrand::u128(..)));
        if !markers.is_empty() {
            warn!(
                storage = own.as_str(),
                others = markers.len(),
                "the storage of batches has several markers, of which the store names none: the last by name counts"
            );
        }
        if !has_marker {
            self.storage.add_marker(&own).await?;
        }
        let new = NewDocument {
            value: Bytes::copy_from_slice(own.as_str().as_bytes()),
            created_ms: observe::unix_ms(),
            weight: 0,
            due_ms: None,
        };
        let inserted = self.store.insert_document(identity_key(), new, BOUNDS);
        if inserted.await? == InsertOutcome::Done {
            info!(
                storage = own.as_str(),
                "the store names this storage of batches from now on"
            );
            return Ok(own);
        }
        // Another replica was faster. Nothing names the marker that was made here.
        if !has_marker {
            self.storage.delete(&own.marker()).await?;
        }
        let named = self.read_storage_id().await?;
        named.ok_or_else(|| {
            let error = store::Error::Unavailable {
                retry_after: Duration::from_secs(1),
                reason: "it has forgotten the storage of batches".into(),
            };
            IdentityError::Store(error)
        })
    }

    async fn read_storage_id(&self) -> Result<Option<StorageId>, IdentityError> {
        let Some(document) = self.store.document(identity_key()).await? else {
            return Ok(None);
        };
        let text = str::from_utf8(&document.value).unwrap_or_default();
        let id = StorageId::parse(text).ok_or_else(|| {
            let reason = "the id of the storage of batches";
            store::Error::Unreadable(reason.into())
        })?;
        Ok(Some(id))
    }
}

/// The document with the id of the storage. It stays for as long as the store has its data.
fn identity_key() -> DocumentKey {
    DocumentKey::new(Collection::Storage, Tenant::tagged(0), "identity")
}
