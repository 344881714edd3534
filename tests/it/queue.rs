//! Requests that wait in the router while all workers are busy.
//!
//! A worker is kept busy by a request that its engine never answers, so that nothing depends on time.

mod ends;
mod limited;
mod lines;
mod order;
mod pairs;
mod placing;
mod scaling;

use std::time::Duration;

use serde_json::Value;
use tokio::task::JoinHandle;
use warmroute::config::Config;
use warmroute::queue;
use warmroute::sim::fault::Faults;

use crate::client::{self, Answer};
use crate::cluster::{Cluster, chat, eventually, fast};
use crate::patience::too_long;

const CHAT: &str = "/v1/chat/completions";

/// Turns the queue on, with workers that are busy as soon as they compute anything.
fn with_queue(config: &mut Config, change: impl FnOnce(&mut queue::Settings)) {
    let mut settings = queue::Settings {
        max_worker_queued_tokens: 1,
        no_worker_timeout: seconds(30),
        // A worker that a test keeps busy is busy for as long as the test takes.
        stale_after: seconds(3_600),
        ..queue::Settings::default()
    };
    change(&mut settings);
    config.queue = settings.into();
}

async fn cluster(engines: usize, change: impl FnOnce(&mut queue::Settings)) -> Cluster {
    Cluster::start(vec![fast(); engines], |config| with_queue(config, change)).await
}

/// A request that keeps a worker busy until this is dropped.
struct Blocker(JoinHandle<()>);

impl Drop for Blocker {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Makes one more worker busy with a prompt of its own. The engines answer the requests after it.
async fn block(cluster: &Cluster, text: &str) -> Blocker {
    let busy = async || {
        let mut busy = 0;
        for engine in &cluster.engines {
            let row = cluster.worker(&engine.name).await;
            busy += usize::from(row["queued_tokens"].as_u64().unwrap_or(0) > 0);
        }
        busy
    };
    let received = async || {
        let requests: u64 = cluster.requests().await.iter().sum();
        requests
    };
    let (busy_before, received_before) = (busy().await, received().await);
    set_hang(cluster, true).await;
    let (api, body) = (cluster.router.api, chat(&text.repeat(20), 2, true));
    let blocker = Blocker(tokio::spawn(async move {
        let _open = client::open(api, "POST", CHAT, &[], body).await;
    }));
    // An engine that has not received it yet would answer it after all.
    eventually("one more worker is busy", async || {
        busy().await == busy_before + 1 && received().await > received_before
    })
    .await;
    set_hang(cluster, false).await;
    blocker
}

async fn set_hang(cluster: &Cluster, hang: bool) {
    for engine in &cluster.engines {
        let faults = Faults {
            hang,
            ..Faults::default()
        };
        engine.fault(faults).await;
    }
}

/// A request that waits; dropped, its client disconnects.
struct Waiter(JoinHandle<Answer>);

impl Drop for Waiter {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Waiter {
    async fn answer(mut self) -> Answer {
        tokio::time::timeout(too_long(), &mut self.0)
            .await
            .unwrap()
            .unwrap()
    }
}

/// Sends a request without waiting for its answer.
fn send(cluster: &Cluster, headers: &[(&str, &str)], body: String) -> Waiter {
    let api = cluster.router.api;
    let mut owned = vec![("x-warmroute-decision".to_owned(), "1".to_owned())];
    owned.extend(
        headers
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned())),
    );
    Waiter(tokio::spawn(async move {
        let headers: Vec<(&str, &str)> = owned
            .iter()
            .map(|(name, value)| (&**name, &**value))
            .collect();
        client::send(api, "POST", CHAT, &headers, body).await
    }))
}

/// Sends a request that has to wait, and returns once it does.
async fn wait(cluster: &Cluster, headers: &[(&str, &str)], body: String) -> Waiter {
    let before = waiting(cluster).await;
    let waiter = send(cluster, headers, body);
    eventually("the request waits", async || {
        waiting(cluster).await == before + 1
    })
    .await;
    waiter
}

/// Requests for `sim` that wait.
async fn waiting(cluster: &Cluster) -> u64 {
    row(cluster, "sim").await["waiting"].as_u64().unwrap_or(0)
}

/// A model's row of `/queue`; null if there is none.
async fn row(cluster: &Cluster, model: &str) -> Value {
    let page = cluster.admin("/queue").await.json();
    let mut rows = page["models"].as_array().unwrap().iter();
    rows.find(|row| row["model"] == model)
        .cloned()
        .unwrap_or_default()
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}
