//! A replica that starts beside a warm one takes over what it knows, if the engines themselves confirm it.

mod cached_share;

use std::num::NonZeroUsize;
use std::time::Duration;

use serde_json::{Value, json};
use warmroute::config::{Config, ModelOverride};
use warmroute::peers::settings::PeerDiscovery;
use warmroute::queue;
use warmroute::responses::Mode;
use warmroute::sim::worker::{Settings, publisher};

use crate::client;
use crate::cluster::{Engine, Router, config, eventually, fast, telling};
use crate::own_ports;

/// An engine that keeps so few batches for replays that most of its history is gone.
fn forgetful() -> Settings {
    let settings = telling();
    Settings {
        kv: publisher::Settings {
            buffer_steps: NonZeroUsize::new(4).unwrap(),
            ..settings.kv
        },
        ..settings
    }
}

fn without_replay() -> Settings {
    let mut settings = forgetful();
    settings.kv.replay = None;
    settings
}

fn prompt(family: u32, blocks: u32) -> String {
    let tokens: Vec<u32> = (0..blocks * 16 + 1)
        .map(|at| family * 10_000 + at)
        .collect();
    json!({"model": "sim", "prompt": tokens, "max_tokens": 1}).to_string()
}

/// A replica over these engines, with events and without replays of their own where they have none.
fn replica(engines: &[Engine], others: &[&Router]) -> Config {
    let mut config = config();
    config.responses.mode = Mode::PassThrough;
    config.workers = engines.iter().map(listed).collect();
    config.kv_events.advanced.stream.verify_interval = Duration::from_millis(400);
    config.kv_events.advanced.unconfirmed.grace_period = Duration::ZERO;
    "127.0.0.1:0".clone_into(&mut config.peers.listen);
    let others: Vec<String> = others
        .iter()
        .map(|other| other.peers.unwrap().to_string())
        .collect();
    if !others.is_empty() {
        config.peers.discovery.push(PeerDiscovery::Static(others));
    }
    config
}

fn listed(engine: &Engine) -> warmroute::fleet::discovery::WorkerSpec {
    if engine.events.is_empty() {
        engine.listed()
    } else {
        crate::kv_events::over_zmq(engine)
    }
}

async fn page(router: &Router, path: &str) -> Value {
    client::get(router.admin, path).await.json()
}

async fn rank(router: &Router, worker: &str) -> Value {
    let page = page(router, "/kv").await;
    let mut rows = page["ranks"].as_array().unwrap().iter();
    let row = rows.find(|row| row["worker"] == worker);
    row.cloned().unwrap_or_default()
}

async fn blocks(router: &Router, worker: &str) -> Value {
    let path = format!("/kv/blocks?worker={worker}&rank=0");
    page(router, &path).await["blocks"].clone()
}

async fn readiness(router: &Router) -> (u16, String) {
    let answer = client::get(router.admin, "/readyz").await;
    (answer.status, answer.text().to_owned())
}

async fn is_ready(router: &Router) {
    eventually("it is ready", async || readiness(router).await.0 == 200).await;
}

/// The cached tokens that a replica sees at each worker.
async fn cached(router: &Router, body: &str) -> Vec<(String, u64)> {
    let path = "/explain?path=/v1/completions";
    let answer = client::post(router.admin, path, body.to_owned()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let page = answer.json();
    let rows = page["workers"].as_array().unwrap().iter();
    let row = |row: &Value| {
        let tokens = row["cached_tokens"].as_u64().unwrap();
        (row["worker"].as_str().unwrap().to_owned(), tokens)
    };
    let mut rows: Vec<_> = rows.map(row).collect();
    rows.sort();
    rows
}

async fn state_is(router: &Router, worker: &str, state: &str) {
    eventually(&format!("{worker} is {state}"), async || {
        rank(router, worker).await["state"] == state
    })
    .await;
}

/// A router that has followed the engines from their first batch on, through so many prompts.
async fn warm(engines: &[Engine], families: u32) -> Router {
    let router = Router::here(&replica(engines, &[])).await;
    is_ready(&router).await;
    for engine in engines {
        eventually("it follows the engine's events", async || {
            rank(&router, &engine.name).await["connected"] == true
        })
        .await;
    }
    // In turn, so that each engine has more than it keeps for replays.
    for (family, engine) in (0..families).zip(engines.iter().cycle()) {
        let answer = client::post(engine.address, "/v1/completions", prompt(family, 5)).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    for engine in engines {
        receives_all(&router, engine).await;
    }
    is_seen_ready().await;
    router
}

/// Waits until a router has every batch that an engine published.
async fn receives_all(router: &Router, engine: &Engine) {
    eventually("it has received all", async || {
        let last = engine.cache_contents(0).await.last_sequence;
        rank(router, &engine.name).await["last_sequence"].as_u64() == last
    })
    .await;
}

/// Other replicas know within 100 ms that one is ready.
async fn is_seen_ready() {
    tokio::time::sleep(Duration::from_millis(400)).await;
}

#[tokio::test]
async fn a_replica_that_starts_late_takes_over_the_trees_of_a_warm_one() {
    let mut engines = Vec::new();
    for name in ["w0", "w1", "w2"] {
        engines.push(Engine::here(name, forgetful()).await);
    }
    let first = warm(&engines, 60).await;
    let late = Router::here(&replica(&engines, &[&first])).await;
    is_ready(&late).await;
    // At once: it was not ready before.
    for engine in &engines {
        let row = rank(&late, &engine.name).await;
        assert_eq!(row["state"], "live", "{row:#}");
        let from = row["tree_from"].as_str().unwrap();
        assert!(from.starts_with("peer "), "{row:#}");
        assert_eq!(
            blocks(&late, &engine.name).await,
            blocks(&first, &engine.name).await
        );
        let row = rank(&first, &engine.name).await;
        assert_eq!(row["tree_from"], "engine replay", "{row:#}");
    }
    for family in [0, 7, 59] {
        let body = prompt(family, 5);
        assert_eq!(cached(&late, &body).await, cached(&first, &body).await);
    }
    assert_eq!(readiness(&late).await, (200, "ready\n".to_owned()));
    // It follows on: what comes now is known to both.
    let answer = client::post(first.api, "/v1/completions", prompt(99, 5)).await;
    assert_eq!(answer.status, 200);
    eventually("both know the new prompt", async || {
        let (a, b) = (prompt(99, 5), prompt(99, 5));
        let (first, late) = (cached(&first, &a).await, cached(&late, &b).await);
        first == late && first.iter().any(|(_, tokens)| *tokens == 80)
    })
    .await;
    let metrics = client::get(late.admin, "/metrics").await;
    let taken = r#"warmroute_peer_trees_total{outcome="taken"} 3"#;
    assert!(metrics.text().contains(taken), "{}", metrics.text());
    let state = r#"warmroute_warm_start_state{state="warm"} 1"#;
    assert!(metrics.text().contains(state));
}

#[tokio::test]
async fn without_another_replica_the_late_one_knows_only_the_end_of_the_history() {
    let engines = [Engine::here("w0", forgetful()).await];
    let first = warm(&engines, 60).await;
    let late = Router::here(&replica(&engines, &[])).await;
    is_ready(&late).await;
    state_is(&late, "w0", "partial").await;
    let (known, all) = (blocks(&late, "w0").await, blocks(&first, "w0").await);
    assert!(known.as_array().unwrap().len() < all.as_array().unwrap().len() / 4);
    assert_eq!(rank(&late, "w0").await["tree_from"], "events");
}

#[tokio::test]
async fn an_engine_without_replays_confirms_a_tree_by_a_batch_that_waits() {
    let engines = [Engine::here("w0", without_replay()).await];
    let first = warm(&engines, 20).await;
    let late = Router::here(&replica(&engines, &[&first])).await;
    // The engine has to say something.
    let mut family = 100;
    eventually("the tree is taken over", async || {
        family += 1;
        let answer = client::post(first.api, "/v1/completions", prompt(family, 3)).await;
        assert_eq!(answer.status, 200);
        rank(&late, "w0").await["state"] == "live"
    })
    .await;
    eventually("both know the same", async || {
        blocks(&late, "w0").await == blocks(&first, "w0").await
    })
    .await;
}

#[tokio::test]
async fn the_tree_of_an_engine_that_restarted_meanwhile_is_refused() {
    let mut engines = [Engine::here("w0", forgetful()).await];
    let first = warm(&engines, 30).await;
    // The first replica does not notice it: it is asked before it can.
    let before = blocks(&first, "w0").await;
    engines[0].restart(forgetful()).await;
    let late = Router::here(&replica(&engines, &[&first])).await;
    for family in 200..230 {
        let answer = client::post(engines[0].address, "/v1/completions", prompt(family, 2)).await;
        assert_eq!(answer.status, 200);
    }
    is_ready(&late).await;
    let names = |blocks: &Value| -> Vec<String> {
        let rows = blocks.as_array().unwrap().iter();
        rows.map(|row| row["hash"].to_string()).collect()
    };
    let old = names(&before);
    let known = names(&blocks(&late, "w0").await);
    assert!(known.iter().all(|name| !old.contains(name)));
    // Both come to know what the new process caches.
    eventually("both know the new process's blocks", async || {
        let known = names(&blocks(&late, "w0").await);
        !known.is_empty() && known.iter().all(|name| !old.contains(name))
    })
    .await;
}

#[tokio::test]
async fn a_cold_replica_gives_no_empty_tree() {
    let engines = [Engine::here("w0", without_replay()).await];
    for family in 0..20 {
        let answer = client::post(engines[0].address, "/v1/completions", prompt(family, 5)).await;
        assert_eq!(answer.status, 200);
    }
    let cold = Router::here(&replica(&engines, &[])).await;
    is_ready(&cold).await;
    is_seen_ready().await;
    let late = Router::here(&replica(&engines, &[&cold])).await;
    is_ready(&late).await;
    // The first batches may come before it listens.
    let mut family = 20;
    eventually("both follow what comes", async || {
        let body = prompt(family, 5);
        family += 1;
        let answer = client::post(engines[0].address, "/v1/completions", body).await;
        assert_eq!(answer.status, 200);
        let (cold, late) = (rank(&cold, "w0").await, rank(&late, "w0").await);
        [cold, late]
            .iter()
            .all(|row| row["blocks"]["gpu"].as_u64() > Some(0))
    })
    .await;
    let mut known = Vec::new();
    for router in [&cold, &late] {
        receives_all(router, &engines[0]).await;
        let row = rank(router, "w0").await;
        known.push(row["blocks"]["gpu"].as_u64().unwrap());
    }
    for family in [family, family + 1] {
        let answer = client::post(engines[0].address, "/v1/completions", prompt(family, 5)).await;
        assert_eq!(answer.status, 200);
    }
    // What came since is no more than a part, at both.
    for (router, known) in [&cold, &late].into_iter().zip(known) {
        assert!(known <= u64::from(5 * (family - 20)));
        eventually("what comes is followed", async || {
            let row = rank(router, "w0").await;
            row["state"] == "partial" && row["blocks"]["gpu"] == known + 10
        })
        .await;
    }
}

#[tokio::test]
async fn a_source_that_dies_is_not_waited_for_and_the_next_one_is_asked() {
    let engines = [Engine::here("w0", forgetful()).await];
    let first = warm(&engines, 60).await;
    let second = Router::here(&replica(&engines, &[&first])).await;
    is_ready(&second).await;
    is_seen_ready().await;
    // It accepts and says nothing, as a process that is stopped.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut config = replica(&engines, &[&first, &second]);
    let silent_address = silent.local_addr().unwrap().to_string();
    config
        .peers
        .discovery
        .push(PeerDiscovery::Static(vec![silent_address]));
    drop(first);
    let late = Router::here(&config).await;
    is_ready(&late).await;
    let row = rank(&late, "w0").await;
    assert_eq!(row["state"], "live", "{row:#}");
    assert_eq!(blocks(&late, "w0").await, blocks(&second, "w0").await);
}

#[tokio::test]
async fn readiness_waits_no_longer_than_the_timeout_and_says_that_it_serves_cold() {
    let engines = [Engine::here("w0", forgetful()).await];
    let first = warm(&engines, 30).await;
    let mut config = replica(&engines, &[&first]);
    // It warms up for longer than a busy machine takes to look.
    config.peers.warm_start_timeout = Duration::from_secs(5);
    // A worker that never answers: what it serves is not known in time.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    config
        .workers
        .push(warmroute::fleet::discovery::WorkerSpec {
            url: format!("http://{}", silent.local_addr().unwrap()),
            ..Default::default()
        });
    config.fleet.health.timeout = Duration::from_secs(30);
    let late = Router::here(&config).await;
    eventually("it is warming up", async || {
        let (status, text) = readiness(&late).await;
        status == 503 && text.contains("warming up")
    })
    .await;
    is_ready(&late).await;
    let (_, text) = readiness(&late).await;
    assert!(text.contains("started cold"), "{text}");
    let metrics = client::get(late.admin, "/metrics").await;
    let state = r#"warmroute_warm_start_state{state="timed_out"} 1"#;
    assert!(metrics.text().contains(state));
}

#[tokio::test]
async fn with_no_replica_ready_it_starts_at_once() {
    let engines = [Engine::here("w0", telling()).await];
    let mut config = replica(&engines, &[]);
    let address = own_ports::address().to_string();
    config
        .peers
        .discovery
        .push(PeerDiscovery::Static(vec![address]));
    config.peers.warm_start_timeout = Duration::from_secs(600);
    let router = Router::here(&config).await;
    is_ready(&router).await;
    let (_, text) = readiness(&router).await;
    assert!(text.contains("no other replica was ready"), "{text}");
}

/// Such a replica is ready if its requests wait for the first worker, but knows nothing that others could take over.
#[tokio::test]
async fn a_replica_without_workers_is_not_waited_for() {
    let without_workers = |others: &[&Router]| {
        let mut config = replica(&[], others);
        config.models = vec![ModelOverride {
            name: "sim".to_owned(),
            ..ModelOverride::default()
        }];
        config.queue = queue::Settings {
            no_worker_timeout: Duration::from_secs(600),
            ..queue::Settings::default()
        }
        .into();
        config.peers.warm_start_timeout = Duration::from_secs(600);
        config
    };
    let first = Router::here(&without_workers(&[])).await;
    is_ready(&first).await;
    is_seen_ready().await;
    let late = Router::here(&without_workers(&[&first])).await;
    is_ready(&late).await;
    let (_, text) = readiness(&late).await;
    assert!(text.contains("no other replica was ready"), "{text}");
}

#[tokio::test]
async fn predicted_blocks_are_taken_over_too() {
    let engines = [
        Engine::here("w0", fast()).await,
        Engine::here("w1", fast()).await,
    ];
    let first = Router::here(&replica(&engines, &[])).await;
    is_ready(&first).await;
    for family in 0..20 {
        let answer = client::post(first.api, "/v1/completions", prompt(family, 5)).await;
        assert_eq!(answer.status, 200);
    }
    is_seen_ready().await;
    let late = Router::here(&replica(&engines, &[&first])).await;
    is_ready(&late).await;
    let (_, start) = readiness(&late).await;
    let mut known = [Vec::new(), Vec::new()];
    for family in 0..20 {
        let body = prompt(family, 5);
        for (router, known) in [&first, &late].into_iter().zip(&mut known) {
            known.push(cached(router, &body).await);
        }
    }
    let [first, late] = known;
    let is_known = |row: &Vec<(String, u64)>| row.iter().any(|(_, tokens)| *tokens > 0);
    assert!(first.iter().all(is_known), "{first:?}");
    assert_eq!(late, first, "{start}");
}
