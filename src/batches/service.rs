//! What the endpoints of batches and their works share: store, storage, files, metrics. Each adds its own methods.

use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore};
use tracing::{debug, warn};

use super::batch::{BatchRecord, BatchStatus, new_batch_id};
use super::files::{FileUpload, Files};
use super::line::Flavor;
use super::memory_bounds::MemoryBounds;
use super::metrics::Metrics;
use super::paths;
use super::records::Records;
use super::routes::BatchEndpoint;
use super::running::{Running, RunningBatches};
use super::settings::Settings;
use super::storage::{Storage, StorageError};
use super::storage_identity::StorageIdentity;
use super::works::Works;
use crate::http::drain::Tasks;
use crate::http::io_threads::IoThreads;
use crate::ids::Tenant;
use crate::observe::log_once::LogOnce;
use crate::observe::metrics::Registry;
use crate::openai::error::{Answer, ApiError};
use crate::store::documents::{Collection, DocumentKey};
use crate::store::outbox::{BatchKey, EndEvent, EventKey, Outbox};
use crate::store::{OpenStore, ResponseStore};
use crate::{observe, openai, store};

/// Renewed three times in it, so that a slow store costs none.
const LEASE: Duration = Duration::from_secs(30);

/// Storage that has not answered a trial for so long cannot be used.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(10);

/// Storage that could not be used is tried again after this time.
const RETRIAL_INTERVAL: Duration = Duration::from_secs(10);

/// Batches of one tenant, those that have ended too: 2 KB each in the store, more while they run. Beyond them the oldest
/// that has ended is removed, and its files of results stay; while none has ended, a new one is refused.
const MAX_TENANT_BATCHES: u64 = 1_000;

/// Files and batches of all tenants, with the settings of the start: they need a restart to change.
#[derive(Debug)]
pub struct Batches {
    pub(super) settings: Settings,
    pub(super) store: Arc<dyn ResponseStore>,
    pub(super) records: Records,
    pub(super) storage: Storage,
    pub(super) files: Files,
    pub(super) tasks: Tasks,
    pub(super) io_threads: IoThreads,
    pub(super) metrics: Metrics,
    /// Who claims works for this replica.
    pub(super) owner: u64,
    /// How long a replica that dies holds its works up.
    pub(super) lease: Duration,
    /// Of one tenant.
    pub(super) max_batches: u64,
    pub(super) works: Arc<Works>,
    pub(super) memory: Arc<MemoryBounds>,
    pub(super) running: Mutex<Running>,
    /// Whether objects could be written and read at the last trial.
    pub(super) is_storage_working: AtomicBool,
    /// Whether a trial waits for an answer for longer than `trial_timeout`, or a request did since the last trial.
    pub(super) is_storage_hanging: AtomicBool,
    /// Notified when the storage is to be tried at once.
    pub(super) trial_due: Notify,
    /// How long a trial of the storage, or a question of a request, may take.
    pub(super) trial_timeout: Duration,
    /// Time until the next trial of storage that could not be used.
    pub(super) retrial_interval: Duration,
    /// Whether it is the storage that all replicas share, as far as that is known.
    pub(super) identity: Mutex<StorageIdentity>,
    /// For the one batch at a time whose parts are deleted here after its end.
    parts_deletion: Arc<Semaphore>,
    outbox: Arc<dyn Outbox>,
    failures: Mutex<LogOnce>,
}

/// Whose request it is.
#[derive(Clone, Copy, Debug)]
pub struct BatchCaller<'a> {
    pub tenant: Tenant,
    /// The name by which the tenant is found when no request of it is there.
    pub name: &'a str,
}

impl Batches {
    pub fn new(
        settings: Settings,
        store: OpenStore,
        storage: Storage,
        files: Files,
        tasks: Tasks,
        io_threads: IoThreads,
        registry: &Registry,
    ) -> Self {
        let metrics = Metrics::new(registry);
        Self {
            settings,
            records: Records::new(store.responses.clone(), files.clock.clone()),
            store: store.responses,
            outbox: store.outbox,
            storage,
            files,
            tasks,
            io_threads,
            works: Works::new(metrics.shards_running.clone()),
            memory: Arc::default(),
            metrics,
            owner: fastrand::u64(..),
            lease: LEASE,
            max_batches: MAX_TENANT_BATCHES,
            running: Mutex::default(),
            is_storage_working: AtomicBool::new(true),
            is_storage_hanging: AtomicBool::new(false),
            trial_due: Notify::new(),
            trial_timeout: TRIAL_TIMEOUT,
            retrial_interval: RETRIAL_INTERVAL,
            identity: Mutex::default(),
            parts_deletion: Arc::new(Semaphore::new(1)),
            failures: Mutex::default(),
        }
    }

    #[must_use]
    pub fn with_lease(self, lease: Duration) -> Self {
        Self { lease, ..self }
    }

    /// On a host with another clock.
    #[cfg(test)]
    pub(super) fn with_clock(mut self, host_ms: fn() -> u64) -> Self {
        self.files.clock = super::clock::Clock::new(host_ms);
        self.records = Records::new(self.store.clone(), self.files.clock.clone());
        self
    }

    /// Unix milliseconds.
    pub(super) fn now_ms(&self) -> u64 {
        self.files.clock.now_ms()
    }

    /// The time, if this host's clock is that of the store. `None`: this replica may begin and delete nothing.
    pub(super) async fn checked_ms(&self) -> Result<Option<u64>, store::Error> {
        let of_store_ms = self.store.clock_ms().await?;
        let Err(difference) = self.files.clock.compare(of_store_ms) else {
            return Ok(Some(self.now_ms()));
        };
        self.metrics.clock_refusals.inc();
        let minutes = difference.as_secs() / 60;
        let reason = format!("the clocks of this host and the store differ by {minutes} minutes");
        self.failed("batches are left to other replicas", &reason);
        Ok(None)
    }

    /// What runs on this replica.
    pub fn running(&self) -> RunningBatches {
        self.running.lock().report()
    }

    /// Another configuration is used from now on.
    pub fn on_reload(&self) {
        self.works.forget_refusals();
    }

    /// Answers a request whose body is read.
    pub async fn answer(
        &self,
        endpoint: &BatchEndpoint,
        caller: BatchCaller<'_>,
        query: &str,
        body: &Bytes,
    ) -> Answer {
        let (tenant, openai, messages) = (caller.tenant, Flavor::OpenAi, Flavor::Messages);
        self.check_storage(endpoint).await?;
        match endpoint {
            BatchEndpoint::ListFiles => self.files.list(tenant, query).await,
            BatchEndpoint::File(id) => self.files.get(tenant, id).await,
            BatchEndpoint::DeleteFile(id) => self.delete_file(tenant, id).await,
            BatchEndpoint::FileContent(id) => self.files.content(tenant, id).await,
            BatchEndpoint::Create => self.create(caller, body).await,
            BatchEndpoint::List => self.list(tenant, query).await,
            BatchEndpoint::Batch(id) => self.get(tenant, openai, id).await,
            BatchEndpoint::Cancel(id) => self.cancel(tenant, openai, id).await,
            BatchEndpoint::ListOfMessages => self.list_of_messages(tenant, query).await,
            BatchEndpoint::BatchOfMessages(id) => self.get(tenant, messages, id).await,
            BatchEndpoint::CancelOfMessages(id) => self.cancel(tenant, messages, id).await,
            BatchEndpoint::DeleteOfMessages(id) => self.delete_of_messages(tenant, id).await,
            BatchEndpoint::ResultsOfMessages(id) => self.results(tenant, id).await,
            // Their bodies are not read before.
            BatchEndpoint::CreateFile | BatchEndpoint::CreateOfMessages => {
                Err(ApiError::bad_json(&"it is an upload"))
            }
        }
    }

    /// Answers a request whose body is streamed into the storage.
    pub async fn upload(
        self: &Arc<Self>,
        endpoint: &BatchEndpoint,
        caller: BatchCaller<'_>,
        upload: FileUpload<'_>,
    ) -> Answer {
        self.check_storage(endpoint).await?;
        if *endpoint == BatchEndpoint::CreateOfMessages {
            return self.create_of_messages(caller, upload).await;
        }
        self.files.create(caller.tenant, upload).await
    }

    /// A batch of a tenant that exists.
    pub(super) async fn existing(
        &self,
        tenant: Tenant,
        flavor: Flavor,
        id: &str,
    ) -> Result<BatchRecord, ApiError> {
        match self.records.read(&key_of(tenant, flavor, id)?).await? {
            Some((record, _)) if !record.is_unconfirmed => Ok(record),
            _ => Err(ApiError::unknown_batch(id)),
        }
    }

    /// Has the end of a batch reported, and takes note of that. A report that failed is made later, by any replica; so
    /// is that of a replica that was killed, or that did not learn that it had ended the batch.
    pub(super) async fn settle_end(&self, key: &DocumentKey, record: &BatchRecord) {
        let Some(ended_ms) = record.ended_ms().filter(|_| !record.webhooks_sent) else {
            return;
        };
        let ended_s = i64::try_from(ended_ms / 1_000).unwrap_or(i64::MAX);
        let batch = BatchKey::of(key.tenant, &key.id).map(EventKey::Batch);
        let event = batch.and_then(|key| EndEvent::of(key, record.status.as_str(), ended_s));
        // Anthropic's API has no webhooks.
        if let Some(event) = event.filter(|_| record.flavor == Flavor::OpenAi)
            && let Err(error) = self.outbox.add(event).await
        {
            self.failed("end of a batch not reported", &error);
            return;
        }
        let noted = self.records.change(key, |record, _| {
            !std::mem::replace(&mut record.webhooks_sent, true)
        });
        if let Err(error) = noted.await {
            self.failed("report of a batch's end not noted", &error);
        }
    }

    /// Begins to delete the parts of a batch whose results have been in its files for long, beside all other work.
    /// While those of another batch are being deleted here, they stay due. Several replicas may delete the same ones;
    /// what all leave goes with the batch (`deleting`).
    pub(super) fn delete_parts(self: &Arc<Self>, key: DocumentKey) {
        let Ok(permit) = self.parts_deletion.clone().try_acquire_owned() else {
            return;
        };
        let batches = self.clone();
        self.tasks.spawn_until_stopped(async move {
            let is_noted = batches.delete_and_note_parts(&key).await;
            drop(permit);
            if is_noted {
                // Those of the next batch may be due.
                batches.works.wake.notify_one();
            }
        });
    }

    /// False if the store does not take what became of the deletion.
    async fn delete_and_note_parts(&self, key: &DocumentKey) -> bool {
        let deleted = async {
            self.storage.delete_all(&paths::parts(&key.id)).await?;
            // In another storage, such as the mount point of a mount that was just lost, there were none to delete.
            Ok(self.ask_storage().await?)
        };
        let deleted: Result<(), StorageError> = deleted.await;
        if let Err(error) = &deleted {
            self.failed("parts of a batch not deleted", error);
        }
        let is_done = deleted.is_ok();
        let noted = self.records.change(key, |record, now_ms| {
            record.end_parts_deletion(now_ms, is_done)
        });
        if let Err(error) = noted.await {
            self.failed("deletion of a batch's parts not noted", &error);
            return false;
        }
        true
    }

    /// Counts the end of a batch that was written here.
    pub(super) fn on_ended(&self, record: &BatchRecord) {
        let status = record.status.as_str();
        self.metrics.ended.with_label_values(&[status]).inc();
        if record.status != BatchStatus::Failed {
            return;
        }
        for bound in [
            "too_many_tasks",
            "token_limit_exceeded",
            "results_too_large",
        ] {
            if record.errors.iter().any(|error| error.code == bound) {
                let bounds = &self.metrics.bounds_reached;
                bounds.with_label_values(&[bound]).inc();
            }
        }
    }

    /// Logs what failed, once for each reason.
    pub(super) fn failed(&self, what: &'static str, error: &dyn Display) {
        let reason = format!("{what}: {error}");
        let is_new = self.failures.lock().should_log(observe::now(), &reason);
        if is_new {
            warn!(%error, "{what}");
        } else {
            debug!(%error, "{what}");
        }
    }

    /// What a client gets when the storage failed.
    pub(super) fn storage_failed(&self, error: &StorageError) -> ApiError {
        self.failed("storage of batches failed", error);
        ApiError::storage_failed()
    }
}

/// The key of a batch. An error if `id` is no id of one.
pub(super) fn key_of(tenant: Tenant, flavor: Flavor, id: &str) -> Result<DocumentKey, ApiError> {
    if !paths::is_batch_id(flavor, id) {
        return Err(ApiError::unknown_batch(id));
    }
    Ok(DocumentKey::new(Collection::Batches, tenant, id))
}

/// A batch of the default tenant, whatever its id.
#[cfg(test)]
pub(super) fn batch_key(id: &str) -> DocumentKey {
    DocumentKey::new(Collection::Batches, Tenant::default(), id)
}

/// The id of a new batch, which nobody can guess.
pub(super) fn random_id(flavor: Flavor) -> Result<String, ApiError> {
    Ok(new_batch_id(flavor, openai::random()?))
}
