//! vLLM's tokens in, tokens out: routed by the cached prefix, counted, and held to the same rules as a completion.

use serde_json::{Value, json};

use crate::client;
use crate::cluster::{Cluster, Engine, eventually, fast, telling};
use crate::stub::Stub;

const PATH: &str = "/inference/v1/generate";

fn body(ids: std::ops::Range<u32>, max_tokens: u32, more: Value) -> String {
    let mut body = json!({
        "model": "sim",
        "token_ids": ids.collect::<Vec<_>>(),
        "sampling_params": {"max_tokens": max_tokens, "ignore_eos": true},
    });
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body.to_string()
}

#[tokio::test]
async fn a_prompt_goes_where_its_beginning_is_cached() {
    let engines = vec![
        Engine::here("w0", telling()).await,
        Engine::here("w1", telling()).await,
    ];
    let cluster = Cluster::with(engines, |_| {}).await;
    let headers = [("x-warmroute-decision", "1")];
    let mut first = String::new();
    eventually("the cached prefix is known", async || {
        let body = body(0..640, 2, json!({}));
        let answer = client::send(cluster.router.api, "POST", PATH, &headers, body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let choice = &answer.json()["choices"][0];
        assert_eq!(
            choice["token_ids"].as_array().map(Vec::len),
            Some(2),
            "{}",
            answer.text()
        );
        let decision = answer.header("x-warmroute-decision");
        let worker = decision.split(';').next().unwrap().to_owned();
        if first.is_empty() {
            first.clone_from(&worker);
        }
        assert_eq!(worker, first, "{decision}");
        decision.contains("reason=longest_prefix") && decision.contains("prompt_tokens=640")
    })
    .await;
    // The same blocks as those of a completion of these ids.
    let completion =
        json!({"model": "sim", "prompt": (0..640).collect::<Vec<_>>(), "max_tokens": 2});
    let answer = client::send(
        cluster.router.api,
        "POST",
        "/v1/completions",
        &headers,
        completion.to_string(),
    )
    .await;
    let decision = answer.header("x-warmroute-decision");
    assert!(decision.starts_with(&first), "{decision}");
    assert!(decision.contains("reason=longest_prefix"), "{decision}");
}

#[tokio::test]
async fn a_stream_ends_as_those_of_completions_do() {
    let cluster = Cluster::start(vec![fast()], |_| {}).await;
    let body = body(0..100, 5, json!({"stream": true}));
    let answer = client::post(cluster.router.api, PATH, body).await;
    assert_eq!(answer.status, 200);
    let text = answer.text();
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    // The client has not asked for it; the router has.
    assert!(!text.contains("\"usage\":{"), "{text}");
    eventually("its tokens are counted", async || {
        let labels = ["tenant=\"default\""];
        let generated = cluster
            .metric("warmroute_usage_generation_tokens_total", &labels)
            .await;
        let prompt = cluster
            .metric("warmroute_usage_prompt_tokens_total", &labels)
            .await;
        (generated, prompt) == (5.0, 100.0)
    })
    .await;
}

/// As vLLM's answers had it before they had usage.
#[tokio::test]
async fn an_answer_without_usage_is_counted_by_its_ids() {
    let choice = |index: u32, ids: usize| json!({"index": index, "logprobs": null, "finish_reason": "length", "token_ids": vec![7; ids]});
    let answer = json!({"request_id": "a", "choices": [choice(0, 300), choice(1, 45)], "prompt_logprobs": null}).to_string();
    let length = answer.len();
    let stub = Stub::start(format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{answer}"
    ))
    .await;
    let router = stub.router(|_| {}).await;
    let sent = body(
        0..50,
        300,
        json!({"sampling_params": {"max_tokens": 300, "n": 2}}),
    );
    let got = client::post(router.api, PATH, sent).await;
    assert_eq!((got.status, got.text()), (200, &*answer));
    eventually("its tokens are counted", async || {
        let page = client::get(router.admin, "/metrics").await;
        let is_there = |name: &str, value: u32| {
            let name = format!("warmroute_usage_{name}_total{{");
            page.text()
                .lines()
                .any(|line| line.starts_with(&name) && line.ends_with(&format!(" {value}")))
        };
        is_there("generation_tokens", 345) && is_there("prompt_tokens", 50)
    })
    .await;
}

#[tokio::test]
async fn what_is_the_routers_is_refused_by_name() {
    let cluster = Cluster::start(vec![fast()], |_| {}).await;
    let transfer =
        json!({"sampling_params": {"max_tokens": 1, "extra_args": {"kv_transfer_params": {}}}});
    for (more, param) in [
        (json!({"request_id": "a"}), "request_id"),
        (
            json!({"kv_transfer_params": {"do_remote_prefill": true}}),
            "kv_transfer_params",
        ),
        (transfer, "sampling_params.extra_args.kv_transfer_params"),
    ] {
        let answer = client::post(cluster.router.api, PATH, body(0..10, 1, more)).await;
        assert_eq!(
            (answer.status, &*answer.param()),
            (400, param),
            "{}",
            answer.text()
        );
    }
    let unknown = body(0..10, 1, json!({"model": "none"}));
    let answer = client::post(cluster.router.api, PATH, unknown).await;
    assert_eq!((answer.status, &*answer.code()), (404, "model_not_found"));
}
