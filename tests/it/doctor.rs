//! `warmroute doctor` against a running router.

use std::process::{Command, Output};

use serde_json::{Value, json};
use warmroute::fleet::discovery::WorkerSpec;
use warmroute::fleet::events;
use warmroute::secret::Secret;
use warmroute::sim::worker::Settings;

use crate::client;
use crate::cluster::{Cluster, Engine, Router, chat, config, eventually, fast, telling};
use crate::model_names::named;

async fn doctor(cluster: &Cluster, arguments: &[&str]) -> Output {
    let url = format!("http://{}", cluster.router.admin);
    let arguments: Vec<String> = arguments
        .iter()
        .map(|argument| (*argument).to_owned())
        .collect();
    let run = move || {
        Command::new(env!("CARGO_BIN_EXE_warmroute"))
            .args(["doctor", "--url", &url])
            .args(arguments)
            .env_remove("WARMROUTE_ADMIN_TOKEN")
            .output()
            .unwrap()
    };
    tokio::task::spawn_blocking(run).await.unwrap()
}

fn rules(output: &Output) -> Vec<String> {
    let findings: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let rule = |finding: &Value| finding["rule"].as_str().unwrap().to_owned();
    findings.iter().map(rule).collect()
}

/// A worker whose KV events are where it publishes them: on loopback, as it announces them, they would not be usable.
fn followed(engine: &Engine) -> WorkerSpec {
    let events = engine.events.first().map(|bound| events::EventsSpec {
        from: events::From::Zmq,
        endpoint: format!("tcp://{}", bound.events),
        replay: bound
            .replay
            .map_or_else(String::new, |at| format!("tcp://{at}")),
        ..events::EventsSpec::default()
    });
    WorkerSpec {
        events,
        ..engine.listed()
    }
}

fn text(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

#[tokio::test]
async fn what_a_fleet_lacks_is_named_with_the_line_to_change() {
    let other = Settings {
        block_tokens: 64.try_into().unwrap(),
        ..fast()
    };
    let engines = Cluster::engines_here(vec![telling(), other, telling()]).await;
    let workers = engines.iter().map(followed).collect();
    let mut cluster = Cluster::with(engines, |config| {
        config.workers = workers;
        config.models = named(json!([{"name": "split", "targets": [
            {"model": "sim", "weight": 3}, {"model": "gone", "weight": 1}]}]));
    })
    .await;
    cluster.all_up().await;
    for _ in 0..6 {
        let answer = cluster
            .post("/v1/chat/completions", chat("hi", 1, false))
            .await;
        assert_eq!(answer.status, 200);
    }
    cluster.engines[2].kill().await;
    cluster.is_worker("w2", "health", "down").await;
    cluster.is_worker("w1", "block_size", 64).await;
    let mut found = Vec::new();
    let mut expected = [
        "worker_down",
        "kv_events_off",
        "block_sizes_differ",
        "tokenizer_missing",
        "target_without_workers",
    ];
    expected.sort_unstable();
    eventually("everything is found", async || {
        let output = doctor(&cluster, &["--json"]).await;
        assert_eq!(output.status.code(), Some(1));
        found = rules(&output);
        found.sort_unstable();
        println!("found: {found:?}");
        found == expected
    })
    .await;
    let output = doctor(&cluster, &[]).await;
    assert_eq!(output.status.code(), Some(1));
    let text = text(&output);
    for part in [
        "1 of 3 workers is down: w2",
        "no KV events of w1",
        r#"--kv-events-config '{"enable_kv_cache_events":true"#,
        "block sizes of sim differ: 16 at w0; 64 at w1",
        "engine, at w0: --block-size 64",
        "with it 100 % of its requests would be routed by what is cached exactly",
        "models: [{name: \"sim\", tokenizer: FOLDER}]",
        "25 % of the requests for split are for gone",
        "3 workers: 5 findings",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
}

#[tokio::test]
async fn a_fleet_that_lacks_nothing_has_no_findings() {
    let engines = Cluster::engines_here(vec![telling(), telling()]).await;
    let workers = engines.iter().map(followed).collect();
    let cluster = Cluster::with(engines, |config| {
        config.workers = workers;
        config.models = named(json!([{"name": "sim", "tokenizer": {"from": "engine"}}]));
    })
    .await;
    eventually("nothing is found", async || {
        let output = doctor(&cluster, &["--json"]).await;
        output.status.code() == Some(0) && text(&output) == "[]\n"
    })
    .await;
    let output = doctor(&cluster, &[]).await;
    assert_eq!(text(&output), "2 workers: nothing found\n");
}

#[tokio::test]
async fn a_router_that_cannot_be_asked_is_no_finding() {
    let engines = Cluster::engines_here(vec![fast()]).await;
    let mut config = config();
    config.workers = engines.iter().map(Engine::listed).collect();
    config.admin.token = Secret::new("operator");
    let router = Router::here(&config).await;
    eventually("the router is ready", async || {
        client::get(router.admin, "/readyz").await.status == 200
    })
    .await;
    let cluster = Cluster { engines, router };
    let refused = doctor(&cluster, &[]).await;
    assert_eq!(refused.status.code(), Some(2));
    let why = String::from_utf8(refused.stderr).unwrap();
    assert!(
        why.contains("/fleet: answered 401") && why.contains("--token"),
        "{why}"
    );
    let output = doctor(&cluster, &["--token", "operator", "--json"]).await;
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(rules(&output), ["kv_events_off"]);
}
