//! Discovery entries and the workers in them.

use serde_json::json;

use super::{Folder, applied, text, workers};
use crate::cluster::{Engine, chat, eventually, fast, telling, unhurried};

#[tokio::test]
async fn a_worker_that_moves_to_another_entry_keeps_its_requests_and_its_cached_blocks() {
    let folder = Folder::new();
    let engine = Engine::here("w0", unhurried()).await;
    let url = format!("http://{}", engine.address);
    let first = text(&workers([&engine]));
    let listed = format!("workers: [{{url: '{url}', name: w0}}]\n");
    let list = folder.path("workers.yaml");
    std::fs::write(&list, listed).unwrap();
    let moved = text(&format!(
        "discovery: [{{file: {{path: '{}'}}}}]\n",
        list.display()
    ));
    let keyed = text(&format!(
        "workers: [{{url: '{url}', name: w0, api_key: hush, labels: {{zone: a}}}}]\n"
    ));
    let cluster = folder.start(vec![engine], &first).await;
    cluster.is_worker("w0", "health", "up").await;
    cluster.engines[0].hold_after(3).await;
    let body = chat("a long story", 40, true);
    let mut stream = cluster.open("/v1/chat/completions", &body).await;
    stream.until("data: ").await;
    let row = cluster.worker("w0").await;
    assert_eq!(row["requests"], 1, "{row}");
    for next in [&moved, &keyed, &first] {
        folder.write(next);
        let changes = applied(&cluster).await;
        assert!(!changes.to_string().contains("hush"), "{changes}");
        let row = cluster.worker("w0").await;
        assert_eq!(row["requests"], 1, "{row}");
        // It was never unknown.
        assert_eq!(row["health"], "up", "{row}");
    }
    cluster.engines[0].let_go().await;
    let (_, is_whole) = stream.rest().await;
    assert!(is_whole);
}

#[tokio::test]
async fn a_worker_with_another_key_is_sent_it_and_keeps_its_tree() {
    let folder = Folder::new();
    let engine = Engine::here("w0", telling()).await;
    let url = format!("http://{}", engine.address);
    let endpoint = format!("tcp://{}", engine.events[0].events);
    let with = |key: &str| {
        let events = format!("{{from: zmq, endpoint: '{endpoint}'}}");
        text(&format!(
            "workers: [{{url: '{url}', name: w0, api_key: {key}, events: {events}}}]\n"
        ))
    };
    let cluster = folder.start(vec![engine], &with("first")).await;
    cluster.is_worker("w0", "health", "up").await;
    let sent = async || {
        let answer = cluster
            .post("/v1/chat/completions", chat(&"tell ".repeat(100), 2, false))
            .await;
        assert_eq!(answer.status, 200);
        let last = cluster.engines[0].last_post().await;
        last.headers["authorization"].clone()
    };
    let rank = async || cluster.admin("/kv").await.json()["ranks"][0].clone();
    let blocks = async || rank().await["stored_blocks"].as_u64();
    eventually("it is connected", async || {
        rank().await["connected"] == true
    })
    .await;
    assert_eq!(sent().await, "Bearer first");
    eventually("its blocks are known", async || blocks().await > Some(0)).await;
    let age = rank().await["state_age_s"].as_f64();
    folder.write(&with("second"));
    applied(&cluster).await;
    assert_eq!(sent().await, "Bearer second");
    // The same subscriber, with the same tree.
    assert!(blocks().await > Some(0));
    assert!(rank().await["state_age_s"].as_f64() >= age);
}

#[tokio::test]
async fn an_entry_that_is_taken_out_takes_its_workers_with_it_and_others_stay() {
    let folder = Folder::new();
    let mut engines = Vec::new();
    for name in ["a", "b"] {
        engines.push(Engine::here(name, fast()).await);
        let engine = engines.last().unwrap();
        let list =
            json!({"workers": [{"url": format!("http://{}", engine.address), "name": name}]});
        std::fs::write(folder.path(name), list.to_string()).unwrap();
    }
    let with = |names: &[&str]| {
        let entry = |name: &&str| {
            let path = folder.path(name);
            format!("  - file: {{path: '{}', interval: 20ms}}\n", path.display())
        };
        text(&format!(
            "discovery:\n{}",
            names.iter().map(entry).collect::<String>()
        ))
    };
    let cluster = folder.start(engines, &with(&["a", "b"])).await;
    cluster.is_worker("a", "health", "up").await;
    cluster.is_worker("b", "health", "up").await;
    folder.write(&with(&["b"]));
    applied(&cluster).await;
    assert!(cluster.worker("a").await.is_null());
    assert_eq!(cluster.worker("b").await["health"], "up");
    // Its task is gone, too: the file may say what it wants.
    let again = json!({"workers": [{"url": "http://127.0.0.1:1", "name": "late"}]});
    std::fs::write(folder.path("a"), again.to_string()).unwrap();
    std::fs::write(folder.path("b"), again.to_string().replace("late", "b2")).unwrap();
    eventually("b's file is followed", async || {
        !cluster.worker("b2").await.is_null()
    })
    .await;
    assert!(cluster.worker("late").await.is_null());
    // What is listed again is there at once.
    folder.write(&with(&["a", "b"]));
    applied(&cluster).await;
    assert!(!cluster.worker("late").await.is_null());
}
