use std::collections::BTreeSet;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use http_body_util::BodyExt;
use serde_json::{Value, json};

use super::*;
use crate::batches::file::{self, FilePurpose, FileRecord};
use crate::batches::files::Files;
use crate::batches::line::LineEndpoint;
use crate::batches::routes::BatchEndpoint;
use crate::batches::send::{LineAnswer, LineRequest, SendFuture};
use crate::batches::service::BatchCaller;
use crate::batches::settings::Settings;
use crate::batches::storage::Storage;
use crate::http::drain::Tasks;
use crate::http::io_threads::IoThreads;
use crate::ids::Tenant;
use crate::observe::metrics::Registry;
use crate::relay::SpareRoom;
use crate::store::memory::Memory;
use crate::store::{OpenStore, RetentionSettings};

const LINES: usize = 600;
const CALLER: &str = "default";

/// Engines that answer each line at once, and refuse those that ask for it.
#[derive(Debug, Default)]
struct Engines {
    answered: AtomicU32,
}

impl SendLine for Engines {
    fn send(&self, line: LineRequest) -> SendFuture<'_> {
        Box::pin(async move {
            tokio::task::yield_now().await;
            self.answered.fetch_add(1, Relaxed);
            let body: Value = serde_json::from_slice(&line.body).unwrap();
            let status = if body["prompt"] == "7" { 400 } else { 200 };
            let usage = json!({"prompt_tokens": 2, "completion_tokens": 1});
            LineAnswer {
                status,
                request_id: "wr-1".to_owned(),
                retry_after: None,
                may_retry: true,
                body: Bytes::from(json!({"usage": usage}).to_string()),
            }
        })
    }

    fn room(&self, _: &str) -> SpareRoom {
        SpareRoom {
            requests: 50,
            prompt_tokens: 100_000,
            workers: 1,
        }
    }

    fn refusal(&self, _: &str, model: &str, _: LineEndpoint) -> Option<(String, String)> {
        (model != "m").then(|| ("model_not_found".to_owned(), "no".to_owned()))
    }
}

/// What replicas share.
struct Shared {
    store: OpenStore,
    storage: Storage,
}

/// One replica.
struct Replica {
    batches: Arc<Batches>,
    engines: Arc<Engines>,
    tasks: Tasks,
    registry: Registry,
}

impl Shared {
    fn new() -> Self {
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
        }
    }

    fn replica(&self) -> Replica {
        let (tasks, registry) = (Tasks::default(), Registry::default());
        let settings = Settings::default();
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
        let batches = Arc::new(batches);
        let engines = Arc::<Engines>::default();
        batches.start(engines.clone());
        Replica {
            batches,
            engines,
            tasks,
            registry,
        }
    }

    /// A file with these lines; returns its id.
    async fn file(&self, replica: &Replica, lines: &[String]) -> String {
        let tenant = Tenant::default();
        let id = file::new_file_id(fastrand::u128(..));
        let text = Bytes::from(lines.join("\n"));
        let path = file::storage_path(tenant, &id).unwrap();
        self.storage.put(&path, text.clone()).await.unwrap();
        let record = FileRecord {
            id: id.clone(),
            bytes: text.len() as u64,
            created_at: observe::unix_s(),
            expires_at: None,
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
}

impl Replica {
    async fn answer(&self, endpoint: &BatchEndpoint, body: String) -> Bytes {
        let caller = BatchCaller {
            tenant: Tenant::default(),
            name: CALLER,
        };
        let body = Bytes::from(body);
        let answer = self
            .batches
            .answer(endpoint, caller, "", &body)
            .await
            .unwrap();
        answer.into_body().collect().await.unwrap().to_bytes()
    }

    async fn create(&self, file: &str) -> Value {
        let body = json!({
            "input_file_id": file,
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        });
        let created = self.answer(&BatchEndpoint::Create, body.to_string()).await;
        serde_json::from_slice(&created).unwrap()
    }

    async fn batch(&self, id: &str) -> Value {
        let endpoint = BatchEndpoint::Batch(id.to_owned());
        serde_json::from_slice(&self.answer(&endpoint, String::new()).await).unwrap()
    }

    /// The batch once this holds.
    async fn until(&self, id: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let waits = async {
            loop {
                let batch = self.batch(id).await;
                if holds(&batch) {
                    return batch;
                }
                sleep(Duration::from_millis(5)).await;
            }
        };
        let limit = Duration::from_secs(60);
        tokio::time::timeout(limit, waits).await.expect("it holds")
    }

    /// The ids in a file of results, each of which must be there once.
    async fn ids(&self, file: &Value) -> BTreeSet<String> {
        let endpoint = BatchEndpoint::FileContent(file.as_str().unwrap().to_owned());
        let content = self.answer(&endpoint, String::new()).await;
        let mut ids = BTreeSet::new();
        for line in content.split(|byte| *byte == b'\n') {
            if line.is_empty() {
                continue;
            }
            let line: Value = serde_json::from_slice(line).unwrap();
            let id = line["custom_id"].as_str().unwrap().to_owned();
            assert!(ids.insert(id), "{line}");
        }
        ids
    }

    async fn assert_whole(&self, batch: &Value) {
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

fn lines(model: &str) -> Vec<String> {
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
    (0..LINES).map(line).collect()
}

fn has_ended(batch: &Value) -> bool {
    let status = batch["status"].as_str().unwrap();
    ["completed", "failed", "expired", "cancelled"].contains(&status)
}

#[tokio::test]
async fn each_line_of_a_batch_has_one_result() {
    let shared = Shared::new();
    let replica = shared.replica();
    let file = shared.file(&replica, &lines("m")).await;
    let created = replica.create(&file).await;
    let id = created["id"].as_str().unwrap();
    let batch = replica.until(id, has_ended).await;
    replica.assert_whole(&batch).await;
    assert_eq!(replica.engines.answered.load(Relaxed), LINES as u32);
    replica.tasks.drain(Duration::from_secs(10)).await;
    // The parts have gone, the files are there.
    let left = shared.storage.list("batches/").await.unwrap();
    assert_eq!(left, [format!("batches/{id}/shards.json")]);
    assert_eq!(shared.storage.list("files/").await.unwrap().len(), 3);
    let page = replica.registry.text();
    assert!(page.contains("warmroute_batch_lines_total{outcome=\"completed\"} 599"));
    assert!(page.contains("warmroute_batches_ended_total{status=\"completed\"} 1"));
    assert!(page.contains("warmroute_batch_lines_waiting 0"));
    assert!(page.contains("warmroute_batch_shards_running 0"));
}

#[tokio::test]
async fn a_model_that_cannot_be_used_fails_the_batch() {
    let shared = Shared::new();
    let replica = shared.replica();
    let file = shared.file(&replica, &lines("n")).await;
    let created = replica.create(&file).await;
    let batch = replica
        .until(created["id"].as_str().unwrap(), has_ended)
        .await;
    assert_eq!(batch["status"], "failed");
    assert_eq!(batch["errors"]["data"][0]["code"], "model_not_found");
    assert_eq!(replica.engines.answered.load(Relaxed), 0);
}

#[tokio::test]
async fn what_a_replica_gives_back_when_it_drains_another_one_runs() {
    let shared = Shared::new();
    let first = shared.replica();
    let file = shared.file(&first, &lines("m")).await;
    let created = first.create(&file).await;
    let id = created["id"].as_str().unwrap();
    first
        .until(id, |batch| batch["request_counts"]["completed"] != 0)
        .await;
    first.tasks.drain(Duration::from_secs(10)).await;
    let second = shared.replica();
    let batch = second.until(id, has_ended).await;
    second.assert_whole(&batch).await;
    let answered = |replica: &Replica| replica.engines.answered.load(Relaxed) as usize;
    assert!(answered(&first) + answered(&second) >= LINES);
}
