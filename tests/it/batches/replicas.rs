//! Batches over replicas with one Redis and one folder: what several run, and what is left of one that is killed.

use std::num::NonZeroU32;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinSet;
use warmroute::config::Config;
use warmroute::secret::Secret;
use warmroute::sim::fault::Faults;
use warmroute::sim::worker::Settings;
use warmroute::store::redis;

use super::clients::{Client, FORM, chat_line, custom_ids, form};
use crate::background::patient;
use crate::client::{self, Answer};
use crate::cluster::{self, Engine, Router, eventually, fast, tenant};
use crate::failures::hang;
use crate::redis_server::Server;
use crate::reload::Folder;

/// Answers that the engine generates at a time, where that is configured.
const SLOTS: u32 = 32;

/// An engine and a Redis, for routers that share a folder.
struct Site {
    engine: Engine,
    redis: Server,
    _folder: Folder,
    config: Config,
}

impl Site {
    /// Leases are short, so that what a router leaves is soon found.
    async fn new(engine: Settings) -> Self {
        let redis = Server::start().await;
        let folder = Folder::new();
        let engine = Engine::here("w0", engine).await;
        let mut config = cluster::config();
        config.workers = vec![engine.listed()];
        config.batches.folder = folder.path("files").to_str().unwrap().to_owned();
        let store = &mut config.responses.store;
        store.redis = Some(patient(&redis));
        store.lease.duration = Duration::from_millis(1_000);
        let key = "e0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff";
        config.responses.state_token.keys = vec![Secret::new(key)];
        Self {
            engine,
            redis,
            _folder: folder,
            config,
        }
    }

    async fn router(&self) -> Router {
        let router = Router::here(&self.config).await;
        router.worker_is_up().await;
        router
    }

    async fn child(&self) -> Router {
        let router = Router::child(&self.config).await;
        router.worker_is_up().await;
        router
    }
}

fn lines(count: usize, max_tokens: u32) -> Vec<String> {
    let line = |number| chat_line(&format!("q-{number:05}"), "Tell me something", max_tokens);
    (0..count).map(line).collect()
}

/// Every line has one result, and it is a good one.
async fn assert_whole(client: &Client, batch: &Value, count: usize) {
    assert_eq!(batch["status"], "completed", "{batch}");
    let counts = json!({"total": count, "completed": count, "failed": 0});
    assert_eq!(batch["request_counts"], counts);
    let results = client.results(batch, "output_file_id").await;
    let expected: Vec<String> = (0..count).map(|number| format!("q-{number:05}")).collect();
    assert_eq!(custom_ids(&results), expected);
}

/// A sample of a router's metrics; 0 if it is not there.
async fn metric(router: &Router, sample: &str) -> f64 {
    let page = client::get(router.admin, "/metrics").await;
    let mut lines = page.text().lines();
    let found = lines.find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
    found.map_or(0.0, |value| value.parse().unwrap())
}

/// Lines that a router has brought to a result.
async fn finished_by(router: &Router) -> f64 {
    const COMPLETED: &str = "warmroute_batch_lines_total{outcome=\"completed\"}";
    metric(router, COMPLETED).await
}

/// Requests that the engine does not answer: more than it has slots for, so that no line is sent to it. They end when the
/// returned set is dropped.
async fn blockers(site: &Site, routers: [&Router; 2]) -> JoinSet<Answer> {
    site.engine.fault(hang()).await;
    let mut blockers = JoinSet::new();
    for router in routers {
        for _ in 0..SLOTS + 8 {
            let body = cluster::chat("hello", 1, false);
            blockers.spawn(client::post(router.api, "/v1/chat/completions", body));
        }
        eventually("some wait in the router", async || {
            let queue = client::get(router.admin, "/queue").await.json();
            queue["models"][0]["waiting"].as_u64() > Some(0)
        })
        .await;
    }
    blockers
}

#[tokio::test]
async fn two_replicas_share_a_batch() {
    const COUNT: usize = 1_600;
    let engine = Settings {
        decode_ms: 10,
        ..fast()
    };
    let mut site = Site::new(engine).await;
    site.config.workers[0].slots = NonZeroU32::new(SLOTS);
    // However slow the machine is, no claim runs out: lines that two replicas run are counted by both.
    site.config.responses.store.lease.duration = Duration::from_secs(600);
    let (a, b) = (site.router().await, site.router().await);
    let client = Client::of(&a);
    let file = client.upload(&lines(COUNT, 4)).await;
    // No line runs before both have some: one replica could run all of them before the other looks for work.
    let blockers = blockers(&site, [&a, &b]).await;
    let created = client.create(&file, json!({})).await;
    for router in [&a, &b] {
        eventually("it has a shard", async || {
            metric(router, "warmroute_batch_shards_running").await > 0.0
        })
        .await;
    }
    site.engine.fault(Faults::default()).await;
    drop(blockers);
    // Its progress and its end are the same everywhere.
    let batch = Client::of(&b).ended(&created).await;
    assert_eq!(client.batch(&created).await, batch);
    assert_whole(&client, &batch, COUNT).await;
    let (by_a, by_b) = (finished_by(&a).await, finished_by(&b).await);
    assert!(by_a > 0.0 && by_b > 0.0, "{by_a} and {by_b}");
    assert_eq!(by_a + by_b, COUNT as f64);
}

#[tokio::test]
async fn a_router_that_is_killed_and_started_again_gives_each_line_one_result() {
    const COUNT: usize = 400;
    let engine = Settings {
        decode_ms: 10,
        ..fast()
    };
    let site = Site::new(engine).await;
    let first = site.child().await;
    let client = Client::of(&first);
    let file = client.upload(&lines(COUNT, 20)).await;
    let created = client.create(&file, json!({})).await;
    eventually("some results are written, and others are not", async || {
        let batch = client.batch(&created).await;
        batch["request_counts"]["completed"].as_u64().unwrap_or(0) > 0
    })
    .await;
    first.child.as_ref().unwrap().signal("KILL");
    let second = site.child().await;
    let client = Client::of(&second);
    let batch = client.ended(&created).await;
    assert_whole(&client, &batch, COUNT).await;
    // What had a result was not run again.
    assert!(finished_by(&second).await < COUNT as f64);
    assert!(site.engine.generated().await >= COUNT as u64);
}

#[tokio::test]
async fn a_cancel_on_one_replica_stops_what_runs_on_another() {
    let engine = Settings {
        decode_ms: 20,
        ..fast()
    };
    let site = Site::new(engine).await;
    let (a, b) = (site.router().await, site.router().await);
    let client = Client::of(&a);
    let file = client.upload(&lines(4, 30_000)).await;
    let created = client.create(&file, json!({})).await;
    eventually("lines run", async || site.engine.stats().await.running > 0).await;
    let cancelled = Client::of(&b).cancel(&created).await;
    assert_eq!(cancelled.status, 200, "{}", cancelled.text());
    eventually("nothing runs", async || {
        site.engine.stats().await.running == 0
    })
    .await;
    assert_eq!(client.ended(&created).await["status"], "cancelled");
}

#[tokio::test]
async fn a_router_that_drains_leaves_its_lines_to_others() {
    const COUNT: usize = 300;
    let engine = Settings {
        decode_ms: 10,
        ..fast()
    };
    let site = Site::new(engine).await;
    let (leaving, staying) = (site.child().await, site.router().await);
    let client = Client::of(&staying);
    let file = client.upload(&lines(COUNT, 20)).await;
    let created = Client::of(&leaving).create(&file, json!({})).await;
    eventually("lines run", async || site.engine.stats().await.running > 0).await;
    leaving.child.as_ref().unwrap().signal("TERM");
    let batch = client.ended(&created).await;
    assert_whole(&client, &batch, COUNT).await;
}

#[tokio::test]
async fn a_replica_with_a_folder_of_its_own_does_no_harm() {
    const COUNT: usize = 600;
    let engine = Settings {
        decode_ms: 10,
        ..fast()
    };
    let mut site = Site::new(engine).await;
    // However slow the machine is, no claim runs out: lines that are run again are counted again.
    site.config.responses.store.lease.duration = Duration::from_secs(600);
    let router = site.router().await;
    let client = Client::of(&router);
    let file = client.upload(&lines(COUNT, 10)).await;
    let own = Folder::new();
    let mut config = site.config.clone();
    config.batches.folder = own.path("files").to_str().unwrap().to_owned();
    let other = Router::here(&config).await;
    other.worker_is_up().await;
    let elsewhere = Client::of(&other);
    let created = client.create(&file, json!({})).await;
    let uploaded = client::send(other.api, "POST", "/v1/files", &[FORM], form(&lines(1, 2))).await;
    let content = format!("/v1/files/{file}/content");
    for refused in [
        uploaded,
        elsewhere.try_create(&file, json!({})).await,
        elsewhere.get(&content).await,
    ] {
        assert_eq!(
            (refused.status, &*refused.code()),
            (503, "batch_storage_differs")
        );
    }
    // States are the same everywhere.
    let batch = elsewhere.ended(&created).await;
    assert_whole(&client, &batch, COUNT).await;
    assert_eq!(finished_by(&router).await, COUNT as f64);
    assert_eq!(finished_by(&other).await, 0.0);
}

#[tokio::test]
async fn a_replica_that_does_not_know_a_tenant_yet_leaves_its_batch_to_the_others() {
    const COUNT: usize = 1_600;
    let engine = Settings {
        decode_ms: 10,
        ..fast()
    };
    let mut site = Site::new(engine).await;
    site.config.workers[0].slots = NonZeroU32::new(SLOTS);
    // However slow the machine is, no claim runs out.
    site.config.responses.store.lease.duration = Duration::from_secs(600);
    site.config.tenants = vec![tenant("a")];
    let behind = site.router().await;
    site.config.tenants.push(tenant("b"));
    let router = site.router().await;
    let client = Client::with_key(&router, "sk-b");
    // These are more shards than one replica runs at a time, and the other one looks for work meanwhile.
    let file = client.upload(&lines(COUNT, 8)).await;
    let created = client.create(&file, json!({})).await;
    let batch = client.ended(&created).await;
    assert_whole(&client, &batch, COUNT).await;
    assert_eq!(finished_by(&router).await, COUNT as f64);
    assert_eq!(finished_by(&behind).await, 0.0);
}

#[tokio::test]
async fn what_is_answered_503_while_redis_stands_still_is_not_there_afterwards() {
    let mut site = Site::new(fast()).await;
    // Each refusal comes after a time-out.
    let redis = site.config.responses.store.redis.as_mut().unwrap();
    redis.advanced = redis::Advanced::default();
    let router = site.router().await;
    let client = Client::of(&router);
    let first = client.upload(&lines(1, 2)).await;
    site.redis.pause();
    let uploaded = client::send(router.api, "POST", "/v1/files", &[FORM], form(&lines(2, 2))).await;
    assert_eq!(uploaded.status, 503, "{}", uploaded.text());
    let params = json!({
        "model": "sim", "max_tokens": 2, "messages": [{"role": "user", "content": "Hello"}],
    });
    let requests = json!({"requests": [{"custom_id": "a", "params": params}]}).to_string();
    let messages = "/v1/messages/batches";
    let created = client.send("POST", messages, requests).await;
    assert_eq!(created.status, 503, "{}", created.text());
    // Redis does now what it was sent before.
    site.redis.wake();
    eventually("the store answers", async || {
        client.get("/v1/files").await.status == 200
    })
    .await;
    let created = client.create(&first, json!({})).await;
    assert_eq!(client.ended(&created).await["status"], "completed");
    let inputs = client.get("/v1/files?purpose=batch").await.json();
    let ids: Vec<&Value> = inputs["data"].as_array().unwrap().iter().collect();
    assert_eq!(ids.len(), 1, "{inputs}");
    assert_eq!(ids[0]["id"], first);
    let batches = client.get(messages).await.json();
    assert_eq!(batches["data"], json!([]));
    assert_eq!(finished_by(&router).await, 1.0);
}
