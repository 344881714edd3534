//! Replicas with engines, over one store and one storage.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::HeaderMap;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::sleep;

use crate::batches::file::{self, FilePurpose, FileRecord};
use crate::batches::files::{FileUpload, Files};
use crate::batches::line::LineEndpoint;
use crate::batches::routes::BatchEndpoint;
use crate::batches::send::{LineAnswer, LineRequest, LookUpFuture, SendFuture, SendLine};
use crate::batches::service::{BatchCaller, Batches};
use crate::batches::settings::Settings;
use crate::batches::storage::Storage;
use crate::http::drain::Tasks;
use crate::http::io_threads::IoThreads;
use crate::http::server::RequestBody;
use crate::ids::{Tenant, WorkerId};
use crate::observe;
use crate::observe::metrics::Registry;
use crate::openai::error::ApiError;
use crate::relay::{LinesByWorker, SpareRoom};
use crate::store::memory::Memory;
use crate::store::{OpenStore, RetentionSettings};

pub(super) const LINES: usize = 600;
/// A model that is not known before it is looked up.
pub(super) const NEW_MODEL: &str = "new";
/// A model that has no room for any line until [`Engines::is_open`] is set.
pub(super) const FULL_MODEL: &str = "full";
const CALLER: &str = "default";

/// Engines that answer each line at once, and refuse those that ask for it.
#[derive(Debug, Default)]
pub(super) struct Engines {
    pub(super) answered: AtomicU32,
    /// The line that they else refuse breaks them.
    pub(super) breaks: bool,
    /// How often it did.
    pub(super) broken: AtomicU32,
    /// Bytes that each answer has besides.
    pub(super) padding: usize,
    /// They have no room for any line.
    pub(super) is_full: bool,
    /// There is room for [`FULL_MODEL`].
    pub(super) is_open: AtomicBool,
    /// As [`SendLine::tokens_queued_max`] has it.
    pub(super) tokens_max: Option<u64>,
    /// The replica's configuration does not have the tenant.
    pub(super) lacks_tenant: bool,
    /// The replica panics where it asks for the tenant; how often it did is in `broken`.
    pub(super) panics: bool,
    /// The replica's configuration lets the tenant use no model.
    pub(super) lacks_models: AtomicBool,
    /// [`NEW_MODEL`] is found when it is looked up.
    pub(super) has_new_model: bool,
    /// Models that were looked up.
    pub(super) looked_up: Mutex<Vec<String>>,
}

impl SendLine for Engines {
    fn send(&self, line: LineRequest) -> SendFuture<'_> {
        Box::pin(async move {
            tokio::task::yield_now().await;
            self.answered.fetch_add(1, Relaxed);
            let body: Value = serde_json::from_slice(&line.body).unwrap();
            let status = match (body["prompt"] == "7", self.breaks) {
                (false, _) => 200,
                (true, false) => 400,
                (true, true) => {
                    self.broken.fetch_add(1, Relaxed);
                    502
                }
            };
            let usage = json!({"prompt_tokens": 2, "completion_tokens": 1});
            let text = "x".repeat(self.padding);
            let answer = json!({"usage": usage, "text": text}).to_string();
            LineAnswer {
                status,
                request_id: "wr-1".to_owned(),
                retry_after: None,
                may_retry: true,
                is_locked: false,
                body: Bytes::from(answer),
            }
        })
    }

    fn room(&self, model: &str, _: &LinesByWorker) -> SpareRoom {
        let is_full = self.is_full || (model == FULL_MODEL && !self.is_open.load(Relaxed));
        SpareRoom {
            requests: if is_full { 0 } else { 50 },
            prompt_tokens: 100_000,
            workers: 1,
        }
    }

    fn to_give_way(&self, _: &LinesByWorker, _: u32) -> Vec<(WorkerId, u32)> {
        Vec::new()
    }

    fn knows_tenant(&self, _: &str) -> bool {
        if self.panics {
            self.broken.fetch_add(1, Relaxed);
            panic!("on purpose");
        }
        !self.lacks_tenant
    }

    fn refusal(&self, _: &str, model: &str, _: LineEndpoint) -> Option<(String, String)> {
        let is_new = self.has_new_model && model == NEW_MODEL && !self.looked_up.lock().is_empty();
        let lacks_models = self.lacks_models.load(Relaxed);
        let exists = !lacks_models && (is_new || ["m", FULL_MODEL].contains(&model));
        (!exists).then(|| ("model_not_found".to_owned(), "no".to_owned()))
    }

    fn look_up<'a>(&'a self, _: &'a str, model: &'a str) -> LookUpFuture<'a> {
        Box::pin(async move {
            tokio::task::yield_now().await;
            self.looked_up.lock().push(model.to_owned());
            self.has_new_model && model == NEW_MODEL
        })
    }

    fn tokens_queued_max(&self, _: &str) -> Option<u64> {
        self.tokens_max
    }
}

/// What replicas share.
pub(super) struct Shared {
    pub(super) store: OpenStore,
    pub(super) storage: Storage,
    pub(super) settings: Settings,
    pub(super) lease: Duration,
    /// Of one tenant, if they are other than usual.
    pub(super) max_batches: Option<u64>,
    /// The clock of the next replicas, if it is not this host's.
    pub(super) host_ms: Option<fn() -> u64>,
    /// The next replicas do not look for work.
    pub(super) is_idle: bool,
    /// How long the storage may take to answer the next replicas, and after which time they try it again if it could
    /// not be used. `None`: as usual.
    pub(super) trial_timeout: Option<Duration>,
}

/// One replica.
pub(super) struct Replica {
    pub(super) batches: Arc<Batches>,
    pub(super) engines: Arc<Engines>,
    pub(super) tasks: Tasks,
    pub(super) registry: Registry,
}

impl Shared {
    pub(super) fn new() -> Self {
        let keep = RetentionSettings::default();
        let memory = Memory::new(&Default::default(), &keep, &Registry::default());
        let memory = Arc::new(memory);
        Self {
            store: OpenStore {
                responses: memory.clone(),
                outbox: memory,
                redis: None,
            },
            storage: Storage::memory(),
            settings: Settings::default(),
            lease: Duration::from_secs(30),
            max_batches: None,
            host_ms: None,
            is_idle: false,
            trial_timeout: None,
        }
    }

    pub(super) fn replica(&self) -> Replica {
        self.replica_with(Engines::default())
    }

    pub(super) fn replica_with(&self, engines: Engines) -> Replica {
        let (tasks, registry) = (Tasks::default(), Registry::default());
        let settings = self.settings.clone();
        let (store, storage) = (self.store.clone(), self.storage.clone());
        let files = Files::new(
            settings.clone(),
            store.responses.clone(),
            storage.clone(),
            tasks.clone(),
            &registry,
        );
        let io_threads = IoThreads::start(1).unwrap();
        let batches = Batches::new(
            settings,
            store,
            storage,
            files,
            tasks.clone(),
            io_threads,
            &registry,
        );
        let mut batches = batches.with_lease(self.lease);
        if let Some(max_batches) = self.max_batches {
            batches.max_batches = max_batches;
        }
        if let Some(trial_timeout) = self.trial_timeout {
            batches.trial_timeout = trial_timeout;
            batches.retrial_interval = trial_timeout;
        }
        if let Some(host_ms) = self.host_ms {
            batches = batches.with_clock(host_ms);
        }
        let batches = Arc::new(batches);
        let engines = Arc::new(engines);
        if !self.is_idle {
            batches.start(engines.clone());
        }
        Replica {
            batches,
            engines,
            tasks,
            registry,
        }
    }

    /// A replica without room for lines, and a batch that is in progress there: the ids of its file and of itself.
    pub(super) async fn full_replica(&self) -> (Replica, String, String) {
        let replica = self.replica_with(Engines {
            is_full: true,
            ..Engines::default()
        });
        let file = self.file(&replica, &lines("m")).await;
        let created = replica.create(&file).await;
        let id = created["id"].as_str().unwrap().to_owned();
        replica
            .until(&id, |batch| batch["status"] == "in_progress")
            .await;
        (replica, file, id)
    }

    /// A file with these lines; returns its id.
    pub(super) async fn file(&self, replica: &Replica, lines: &[String]) -> String {
        self.file_until(replica, lines, None).await
    }

    pub(super) async fn file_until(
        &self,
        replica: &Replica,
        lines: &[String],
        expires_at: Option<i64>,
    ) -> String {
        let tenant = Tenant::default();
        let id = file::new_file_id(fastrand::u128(..));
        let text = Bytes::from(lines.join("\n"));
        let path = file::storage_path(tenant, &id).unwrap();
        self.storage.put(&path, text.clone()).await.unwrap();
        let record = FileRecord {
            id: id.clone(),
            bytes: text.len() as u64,
            created_at: observe::unix_s(),
            expires_at,
            filename: "in.jsonl".to_owned(),
            purpose: FilePurpose::Batch,
        };
        replica
            .batches
            .files
            .register(tenant, record)
            .await
            .unwrap();
        id
    }

    /// Waits until nothing lies in a folder of the storage.
    pub(super) async fn until_empty(&self, folder: &str) {
        let gone = async {
            while !self.storage.list(folder).await.unwrap().is_empty() {
                sleep(Duration::from_millis(5)).await;
            }
        };
        let limit = Duration::from_secs(60);
        tokio::time::timeout(limit, gone).await.expect("it goes");
    }
}

impl Replica {
    pub(super) async fn answer(&self, endpoint: &BatchEndpoint, body: String) -> Bytes {
        self.try_answer(endpoint, body).await.unwrap()
    }

    pub(super) async fn try_answer(
        &self,
        endpoint: &BatchEndpoint,
        body: String,
    ) -> Result<Bytes, ApiError> {
        let caller = BatchCaller {
            tenant: Tenant::default(),
            name: CALLER,
        };
        let body = Bytes::from(body);
        let answer = self.batches.answer(endpoint, caller, "", &body).await?;
        Ok(answer.into_body().collect().await.unwrap().to_bytes())
    }

    pub(super) async fn create(&self, file: &str) -> Value {
        self.try_create(file).await.unwrap()
    }

    pub(super) async fn try_create(&self, file: &str) -> Result<Value, ApiError> {
        self.create_within(file, "24h").await
    }

    pub(super) async fn create_within(&self, file: &str, window: &str) -> Result<Value, ApiError> {
        let body = json!({
            "input_file_id": file,
            "endpoint": "/v1/completions",
            "completion_window": window,
        });
        let created = self.try_answer(&BatchEndpoint::Create, body.to_string());
        Ok(serde_json::from_slice(&created.await?).unwrap())
    }

    /// Creates a batch of Messages with so many requests, and returns its id.
    pub(super) async fn create_of_messages(&self, count: usize) -> String {
        self.create_of_messages_for("m", count).await
    }

    pub(super) async fn create_of_messages_for(&self, model: &str, count: usize) -> String {
        let request = |number: usize| {
            let params = json!({"model": model, "max_tokens": 9});
            json!({"custom_id": number.to_string(), "params": params})
        };
        let requests: Vec<Value> = (0..count).map(request).collect();
        let body = json!({"requests": requests}).to_string();
        let (sender, piped) = mpsc::channel(1);
        sender.try_send(Bytes::from(body)).unwrap();
        drop(sender);
        let headers = HeaderMap::new();
        let upload = FileUpload {
            headers: &headers,
            body: RequestBody::from(piped),
            timeout: Duration::from_secs(60),
        };
        let caller = BatchCaller {
            tenant: Tenant::default(),
            name: CALLER,
        };
        let endpoint = BatchEndpoint::CreateOfMessages;
        let created = self.batches.upload(&endpoint, caller, upload).await;
        let body = created.unwrap().into_body().collect().await.unwrap();
        let batch: Value = serde_json::from_slice(&body.to_bytes()).unwrap();
        batch["id"].as_str().unwrap().to_owned()
    }

    pub(super) async fn batch(&self, id: &str) -> Value {
        let endpoint = if id.starts_with("msgbatch_") {
            BatchEndpoint::BatchOfMessages(id.to_owned())
        } else {
            BatchEndpoint::Batch(id.to_owned())
        };
        serde_json::from_slice(&self.answer(&endpoint, String::new()).await).unwrap()
    }

    /// The batch once this holds.
    pub(super) async fn until(&self, id: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let limit = observe::now() + Duration::from_secs(60);
        loop {
            let batch = self.batch(id).await;
            if holds(&batch) {
                return batch;
            }
            assert!(observe::now() < limit, "it holds in a minute: {batch}");
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until this replica has left the validation of a batch to others.
    pub(super) async fn until_refused(&self, id: &str) {
        let works = &self.batches.metrics.works;
        let returned = works.with_label_values(&["validate", "returned"]);
        let batch = self.until(id, |_| returned.get() > 0).await;
        assert_eq!(batch["status"], "validating");
    }

    /// The lines of a file of results.
    pub(super) async fn results(&self, file: &Value) -> Vec<Value> {
        let endpoint = BatchEndpoint::FileContent(file.as_str().unwrap().to_owned());
        self.json_lines(&endpoint).await
    }

    pub(super) async fn json_lines(&self, endpoint: &BatchEndpoint) -> Vec<Value> {
        let content = self.answer(endpoint, String::new()).await;
        let lines = content.split(|byte| *byte == b'\n');
        let lines = lines.filter(|line| !line.is_empty());
        lines
            .map(|line| serde_json::from_slice(line).unwrap())
            .collect()
    }

    /// The ids in a file of results, each of which must be there once.
    pub(super) async fn ids(&self, file: &Value) -> BTreeSet<String> {
        let mut ids = BTreeSet::new();
        for line in self.results(file).await {
            let id = line["custom_id"].as_str().unwrap().to_owned();
            assert!(ids.insert(id), "{line}");
        }
        ids
    }

    pub(super) async fn assert_whole(&self, batch: &Value) {
        let counts = json!({"total": LINES, "completed": LINES - 1, "failed": 1});
        assert_eq!(batch["status"], "completed", "{batch}");
        assert_eq!(batch["request_counts"], counts);
        assert_eq!(batch["usage"]["input_tokens"], 2 * (LINES - 1));
        let output = self.ids(&batch["output_file_id"]).await;
        let errors = self.ids(&batch["error_file_id"]).await;
        assert_eq!(output.len(), LINES - 1);
        assert_eq!(errors, BTreeSet::from(["id-7".to_owned()]));
        assert!(output.is_disjoint(&errors));
    }
}

pub(super) fn lines(model: &str) -> Vec<String> {
    lines_of(model, LINES)
}

pub(super) fn lines_of(model: &str, count: usize) -> Vec<String> {
    let line = |number: usize| {
        let body = json!({"model": model, "prompt": number.to_string()});
        json!({
            "custom_id": format!("id-{number}"),
            "method": "POST",
            "url": "/v1/completions",
            "body": body,
        })
        .to_string()
    };
    (0..count).map(line).collect()
}

pub(super) fn has_ended(batch: &Value) -> bool {
    let status = batch["status"].as_str().unwrap();
    ["completed", "failed", "expired", "cancelled"].contains(&status)
}
