//! SGLang as a single worker.

use std::sync::Arc;

use serde_json::{Value, json};
use warmroute::fleet::Role;
use warmroute::fleet::discovery::WorkerSpec;

use crate::client;
use crate::cluster::{self, Router, eventually};
use crate::sglang_engine::{Fault, SglangEngine};

const PATH: &str = "/v1/chat/completions";

async fn single() -> (SglangEngine, Router) {
    let engine = SglangEngine::start(Role::Both, &Arc::default()).await;
    let mut config = cluster::config();
    config.workers = vec![WorkerSpec {
        url: format!("http://{}", engine.address),
        ..WorkerSpec::default()
    }];
    let router = Router::here(&config).await;
    eventually("the engine is up", async || {
        client::get(router.admin, "/readyz").await.status == 200
    })
    .await;
    (engine, router)
}

fn chat() -> Value {
    json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]})
}

#[tokio::test]
async fn an_engine_that_says_that_it_is_sglang_is_asked_whether_it_is_ready_and_how_busy() {
    let (engine, router) = single().await;
    eventually("it is asked often", async || {
        engine.asked("/ready") > 10 && engine.asked("/v1/loads?include=core") > 10
    })
    .await;
    // Each generates a token.
    assert_eq!(engine.asked("/health"), 1);
    assert_eq!(engine.asked("/kv_event_sources"), 0);
    assert!(engine.asked("/server_info") > 0);
    let answer = client::send(router.api, "POST", PATH, &[], chat().to_string()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
}

#[tokio::test]
async fn fields_between_routers_and_engines_are_refused_by_name() {
    let (engine, router) = single().await;
    for (name, value) in [
        ("extra_key", json!("other")),
        ("bootstrap_host", json!("2.2.2.2")),
        ("bootstrap_port", json!(1)),
        ("bootstrap_room", json!(7)),
        ("rid", json!("mine")),
        ("routed_dp_rank", json!(0)),
        ("data_parallel_rank", json!(0)),
        ("disagg_prefill_dp_rank", json!(0)),
        ("input_ids", json!([1, 2])),
    ] {
        let mut body = chat();
        body[name] = value;
        let answer = client::send(router.api, "POST", PATH, &[], body.to_string()).await;
        assert_eq!(answer.status, 400, "{name}: {}", answer.text());
        assert!(answer.text().contains(name), "{}", answer.text());
    }
    assert_eq!(engine.bodies().len(), 0);
}

#[tokio::test]
async fn a_response_is_made_of_a_chat_completion() {
    let (engine, router) = single().await;
    let body = json!({"model": "tiny", "input": "hi"}).to_string();
    let answer = client::send(router.api, "POST", "/v1/responses", &[], body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.json()["output"][0]["content"][0]["text"], "alone");
    assert_eq!(engine.bodies().len(), 1);
}

#[tokio::test]
async fn a_whole_answer_that_its_client_no_longer_waits_for_is_aborted() {
    let (engine, router) = single().await;
    let answer = client::send(router.api, "POST", PATH, &[], chat().to_string()).await;
    assert_eq!(answer.status, 200);
    engine.fault(Fault::Hang);
    let asking = client::try_open(router.api, "POST", PATH, &[], chat().to_string());
    tokio::select! {
        _ = asking => panic!("the engine does not answer"),
        () = eventually("the engine has it", async || engine.bodies().len() == 2) => {}
    }
    eventually("it is aborted", async || {
        engine.asked("/abort_request") == 1
    })
    .await;
    let bodies = engine.bodies();
    let ids: Vec<&str> = bodies
        .iter()
        .map(|body| body["rid"].as_str().unwrap())
        .collect();
    assert_ne!(ids[0], ids[1]);
    assert_eq!(engine.aborted(), [ids[1]]);
    // A closed stream is noticed by the engine itself.
    let mut stream = chat();
    stream["stream"] = json!(true);
    let asking = client::try_open(router.api, "POST", PATH, &[], stream.to_string());
    tokio::select! {
        _ = asking => panic!("the engine does not answer"),
        () = eventually("the engine has it", async || engine.bodies().len() == 3) => {}
    }
    eventually("the stream is closed", async || engine.open() == 0).await;
    assert_eq!(engine.bodies()[2]["rid"], Value::Null);
    assert_eq!(engine.asked("/abort_request"), 1);
}
