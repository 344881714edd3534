//! What tenants use: metrics by tenant and model, and the usage log.

mod numbers;

use std::fs;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use warmroute::config::Config;
use warmroute::fleet::kv_transfer::Connector;
use warmroute::sim::worker::{self, Role};

use crate::client::{self, Answer};
use crate::cluster::{Cluster, eventually, fast, tenant, unhurried, with_role};
use crate::model_names::named;
use crate::reload::Folder;

const KINDS: [&str; 4] = [
    "requests",
    "prompt_tokens",
    "cached_prompt_tokens",
    "generation_tokens",
];

fn tenants(config: &mut Config) {
    config.tenants = vec![tenant("a"), tenant("b")];
}

async fn post_as(cluster: &Cluster, tenant: &str, path: &str, body: &Value) -> Answer {
    let key = format!("Bearer sk-{tenant}");
    let headers = [("authorization", &*key)];
    client::send(cluster.router.api, "POST", path, &headers, body.to_string()).await
}

async fn counted(cluster: &Cluster, kind: &str, labels: &[&str]) -> u64 {
    let name = format!("warmroute_usage_{kind}_total");
    cluster.metric(&name, labels).await as u64
}

/// The sum of an engine's own counter.
async fn engine_metric(cluster: &Cluster, engine: usize, name: &str) -> u64 {
    let page = client::get(cluster.engines[engine].address, "/metrics").await;
    let lines = page.text().lines().filter(|line| line.starts_with(name));
    let values = lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap());
    values.sum::<f64>() as u64
}

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn words(count: usize) -> String {
    "once upon a time there was a router. ".repeat(count)
}

/// Requests of every API that computes something, with and without streams and usage.
fn bodies() -> Vec<(&'static str, Value)> {
    let mut bodies = vec![
        ("/v1/embeddings", json!({"model": "sim", "input": words(3)})),
        (
            "/v1/rerank",
            json!({"model": "sim", "query": "q", "documents": [words(1), words(2)]}),
        ),
    ];
    for (place, stream) in [false, true, true].into_iter().enumerate() {
        let options = match place {
            2 => json!({"include_usage": true}),
            _ => Value::Null,
        };
        let chat = json!([{"role": "user", "content": words(place + 1)}]);
        let mut common = json!({"model": "sim", "stream": stream});
        if stream {
            common["stream_options"] = options;
        }
        let with = |fields: Value| {
            let mut body = common.clone();
            body.as_object_mut()
                .unwrap()
                .extend(fields.as_object().unwrap().clone());
            body
        };
        bodies.push((
            "/v1/chat/completions",
            with(json!({"messages": chat, "max_tokens": 7})),
        ));
        bodies.push((
            "/v1/completions",
            with(json!({"prompt": words(place + 4), "max_tokens": 5})),
        ));
        bodies.push(("/v1/responses", json!({"model": "sim", "stream": stream, "input": words(place + 7), "max_output_tokens": 3})));
    }
    bodies
}

#[tokio::test]
async fn counters_and_lines_add_up_to_what_the_engine_reports() {
    let folder = Folder::new();
    let file = folder.path("usage.jsonl");
    let cluster = Cluster::start(vec![fast()], |config| {
        tenants(config);
        config.models = named(json!([{"name": "sim", "aliases": ["best"]}]));
        config.usage.log = file.to_str().unwrap().to_owned();
    })
    .await;
    let mut sent = 0;
    let mut pooled_hits = 0;
    for (path, mut body) in bodies() {
        for (tenant, model) in [("a", "sim"), ("b", "best"), ("a", "best")] {
            body["model"] = model.into();
            let answer = post_as(&cluster, tenant, path, &body).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            assert!(!client::has_error(answer.text()), "{}", answer.text());
            sent += 1;
        }
        if path == "/v1/rerank" {
            // Engines do not report how much of these was cached.
            pooled_hits = engine_metric(&cluster, 0, "vllm:prefix_cache_hits_total").await;
        }
    }
    let refused = post_as(
        &cluster,
        "a",
        "/v1/completions",
        &json!({"model": "sim", "prompt": {}}),
    )
    .await;
    assert_eq!(refused.status, 400);
    let model = "model=\"sim\"";
    assert_eq!(counted(&cluster, "requests", &[model]).await, sent);
    assert_eq!(
        counted(&cluster, "requests", &["tenant=\"b\""]).await * 3,
        sent
    );
    assert_eq!(counted(&cluster, "incomplete", &[]).await, 0);
    for (kind, engine) in [
        ("prompt_tokens", "vllm:prompt_tokens_total"),
        ("cached_prompt_tokens", "vllm:prefix_cache_hits_total"),
        ("generation_tokens", "vllm:generation_tokens_total"),
    ] {
        let mut reported = engine_metric(&cluster, 0, engine).await;
        if kind == "cached_prompt_tokens" {
            reported -= pooled_hits;
        }
        assert!(reported > 0, "{engine}");
        assert_eq!(counted(&cluster, kind, &[model]).await, reported, "{kind}");
    }
    eventually("every line is written", async || {
        lines(&file).len() as u64 == sent
    })
    .await;
    let lines = lines(&file);
    for tenant in ["a", "b"] {
        let of = |field: &str| -> u64 {
            let own = lines.iter().filter(|line| line["tenant"] == tenant);
            own.map(|line| line[field].as_u64().unwrap()).sum()
        };
        let label = format!("tenant=\"{tenant}\"");
        assert_eq!(
            of("prompt_tokens"),
            counted(&cluster, "prompt_tokens", &[&label]).await
        );
        assert_eq!(
            of("cached_tokens"),
            counted(&cluster, "cached_prompt_tokens", &[&label]).await
        );
        assert_eq!(
            of("output_tokens"),
            counted(&cluster, "generation_tokens", &[&label]).await
        );
    }
    for line in &lines {
        assert_eq!(
            (&line["model"], &line["complete"]),
            (&json!("sim"), &json!(true)),
            "{line}"
        );
        let is_response = line["response_id"]
            .as_str()
            .is_some_and(|id| id.starts_with("resp_"));
        assert_eq!(is_response, line["api"] == "responses", "{line}");
    }
    let aliased = lines
        .iter()
        .filter(|line| line["requested_model"] == "best")
        .count();
    assert_eq!(aliased as u64 * 3, sent * 2);
}

#[tokio::test]
async fn a_client_gets_the_usage_of_a_stream_only_if_it_asked() {
    let cluster = Cluster::start(vec![fast()], tenants).await;
    for (path, body) in bodies() {
        let is_response = path == "/v1/responses";
        if body["stream"] != true || is_response {
            continue;
        }
        let answer = post_as(&cluster, "a", path, &body).await;
        let asked = !body["stream_options"].is_null();
        assert_eq!(
            answer.text().contains("\"usage\""),
            asked,
            "{}",
            answer.text()
        );
        assert!(
            answer.text().ends_with("data: [DONE]\n\n"),
            "{}",
            answer.text()
        );
        let sent = cluster.engines[0].last_body().await;
        assert_eq!(sent["stream_options"]["include_usage"], true, "{sent}");
    }
}

#[tokio::test]
async fn where_usage_is_not_counted_bodies_stay_as_they_are() {
    let plain = Cluster::fast(1).await;
    let off = Cluster::start(vec![fast()], |config| {
        tenants(config);
        config.requests.stream_usage = false;
    })
    .await;
    let body = r#"{"model":"sim","prompt":"x","stream":true,"max_tokens":1}"#;
    let answer = plain.post("/v1/completions", body).await;
    assert_eq!(answer.status, 200);
    let headers = [("authorization", "Bearer sk-a")];
    client::send(off.router.api, "POST", "/v1/completions", &headers, body).await;
    for cluster in [plain, off] {
        assert_eq!(cluster.engines[0].last_post().await.body, body);
    }
}

#[tokio::test]
async fn a_stream_that_its_client_left_counts_what_passed_and_is_marked() {
    let folder = Folder::new();
    let file = folder.path("usage.jsonl");
    let cluster = Cluster::start(vec![unhurried()], |config| {
        config.usage.log = file.to_str().unwrap().to_owned();
    })
    .await;
    let body = json!({"model": "sim", "prompt": words(20), "max_tokens": 500, "stream": true});
    let mut open = cluster.open("/v1/completions", &body.to_string()).await;
    for _ in 0..5 {
        open.next().await.unwrap().unwrap();
    }
    drop(open);
    eventually("the line is written", async || !lines(&file).is_empty()).await;
    let line = lines(&file).remove(0);
    assert_eq!(line["complete"], false, "{line}");
    assert_eq!(line["outcome"], "client_disconnected");
    assert_eq!(line["tenant"], "default");
    let output = line["output_tokens"].as_u64().unwrap();
    assert!((4..400).contains(&output), "{line}");
    assert!(line["prompt_tokens"].as_u64().unwrap() > 20, "{line}");
    assert_eq!(
        counted(&cluster, "incomplete", &["tenant=\"default\""]).await,
        1
    );
    assert_eq!(counted(&cluster, "generation_tokens", &[]).await, output);
}

#[tokio::test]
async fn a_disaggregated_and_a_background_request_count_once() {
    let folder = Folder::new();
    let file = folder.path("usage.jsonl");
    let of = |role| with_role(fast(), worker::Connector::Nixl, role);
    let cluster = Cluster::start(vec![of(Role::Prefill), of(Role::Decode)], |config| {
        config.prefill_decode.connector = Some(Connector::Nixl);
        config.prefill_decode.advanced.min_remote_tokens = 24;
        config.usage.log = file.to_str().unwrap().to_owned();
    })
    .await;
    let body = json!({"model": "sim", "prompt": words(30), "max_tokens": 6, "stream": true});
    let answer = cluster.post("/v1/completions", body.to_string()).await;
    assert_eq!(answer.status, 200);
    assert!(!answer.text().contains("\"usage\""), "{}", answer.text());
    assert_eq!(
        cluster
            .metric("warmroute_kv_transfers_total", &["outcome=\"completed\""])
            .await,
        1.0
    );
    let body =
        json!({"model": "sim", "input": words(40), "max_output_tokens": 4, "background": true});
    let response = cluster.post("/v1/responses", body.to_string()).await.json();
    eventually("both lines are written", async || lines(&file).len() == 2).await;
    let lines = lines(&file);
    assert_eq!(lines[0]["output_tokens"], 6);
    assert_eq!(lines[0]["complete"], true);
    assert_eq!(
        lines[0]["cached_tokens"], 0,
        "not those that came over the network: {}",
        lines[0]
    );
    assert_eq!(lines[1]["response_id"], response["id"]);
    assert_eq!(lines[1]["output_tokens"], 4);
    assert_eq!(counted(&cluster, "requests", &[]).await, 2);
    for kind in KINDS.into_iter().skip(1) {
        let field = kind
            .replace("generation", "output")
            .replace("cached_prompt", "cached");
        let sum: u64 = lines
            .iter()
            .map(|line| line[&field].as_u64().unwrap())
            .sum();
        assert_eq!(counted(&cluster, kind, &[]).await, sum, "{kind}");
    }
}

#[tokio::test]
async fn the_last_lines_are_written_before_the_process_ends_and_rotation_loses_none() {
    let folder = Folder::new();
    let (file, old) = (folder.path("usage.jsonl"), folder.path("usage.jsonl.1"));
    let mut cluster = Cluster::with_router_child(vec![fast()], |config| {
        config.usage.log = file.to_str().unwrap().to_owned();
    })
    .await;
    let body = json!({"model": "sim", "prompt": "x", "max_tokens": 1}).to_string();
    for number in 0..60 {
        if number == 30 {
            eventually("the first are written", async || lines(&file).len() == 30).await;
            fs::rename(&file, &old).unwrap();
        }
        assert_eq!(
            cluster.post("/v1/completions", body.clone()).await.status,
            200
        );
    }
    let child = cluster.router.child.as_mut().unwrap();
    child.signal("TERM");
    eventually("the router has ended", async || child.ended().is_some()).await;
    assert_eq!((lines(&old).len(), lines(&file).len()), (30, 30));
}

#[test]
fn a_usage_log_that_cannot_be_written_is_refused() {
    let text = "workers: ['http://127.0.0.1:1']\nusage: {log: /nowhere/usage.jsonl}\n";
    let problems = Config::parse("c.yaml", text).unwrap_err().to_string();
    assert!(
        problems.starts_with("c.yaml:2:14: usage.log: "),
        "{problems}"
    );
    assert!(
        problems.contains("there is no folder `/nowhere`"),
        "{problems}"
    );
    let config = Config::parse(
        "c.yaml",
        "workers: ['http://127.0.0.1:1']\nusage: {log: stdout}\n",
    )
    .unwrap();
    assert_eq!(config.usage.max_queued_size, 16 << 20);
    assert_eq!(
        config.requests.stream_idle_timeout,
        Duration::from_secs(600)
    );
}
