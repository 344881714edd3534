//! A stream whose worker is lost goes on on another worker.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use warmroute::config::Config;
use warmroute::fleet::discovery::WorkerSpec;
use warmroute::routing::Policy;
use warmroute::sim::fault::Faults;
use warmroute::sim::worker::{Connector, Role, Settings};

use crate::client;
use crate::cluster::{
    self, Cluster, Engine, Router, chat_only, eventually, fast, router_connector, unhurried,
    with_role,
};
use crate::model_names::named;
use crate::sglang_engine::SglangEngine;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";
const COUNT: &str = "warmroute_stream_continuations_total";

/// Turns, and streams that may go on this often.
pub(crate) fn continued(config: &mut Config, times: u32) {
    config.routing.policy = Policy::RoundRobin;
    config.fleet.circuit_breaker.failure_threshold = 1_000;
    let settings = json!({"max_per_request": times});
    config.models = named(json!([{"name": "sim", "stream_continuation": settings}]));
}

async fn cluster(engines: Vec<Settings>, times: u32) -> Cluster {
    Cluster::start(engines, |config| continued(config, times)).await
}

fn cut_after(tokens: usize) -> Faults {
    Faults {
        cut_after_tokens: Some(tokens),
        ..Faults::default()
    }
}

/// A streamed request with usage.
fn asking(path: &str, text: &str, max_tokens: usize) -> Value {
    let mut body = json!({"model": "sim", "stream": true});
    match path {
        RESPONSES => {
            body["input"] = text.into();
            body["max_output_tokens"] = max_tokens.into();
            return body;
        }
        CHAT => body["messages"] = json!([{"role": "user", "content": text}]),
        _ => body["prompt"] = text.into(),
    }
    body["max_tokens"] = max_tokens.into();
    body["stream_options"] = json!({"include_usage": true});
    body
}

/// What a client makes of a stream: the text, the counts, the number of ends.
#[derive(Debug, Default, PartialEq)]
struct Read {
    text: String,
    usage: [u64; 3],
    ends: usize,
    errors: usize,
    ids: Vec<String>,
}

fn read(stream: &str) -> Read {
    let mut read = Read::default();
    for line in stream.lines() {
        let Some(data) = line.strip_prefix("data: ") else {
            continue;
        };
        if data == "[DONE]" {
            read.ends += 1;
            continue;
        }
        let chunk: Value = serde_json::from_str(data).unwrap();
        let choice = &chunk["choices"][0];
        for text in [&choice["delta"]["content"], &choice["text"]] {
            read.text += text.as_str().unwrap_or_default();
        }
        if chunk["type"] == "response.output_text.delta" {
            read.text += chunk["delta"].as_str().unwrap();
        }
        if let Some(id) = chunk["id"].as_str().map(str::to_owned)
            && !read.ids.contains(&id)
        {
            read.ids.push(id);
        }
        read.errors += usize::from(chunk["error"].is_object());
        let usage = if chunk["usage"].is_object() {
            &chunk["usage"]
        } else {
            &chunk["response"]["usage"]
        };
        let names = if chunk["response"].is_object() {
            ["input_tokens", "output_tokens", "total_tokens"]
        } else {
            ["prompt_tokens", "completion_tokens", "total_tokens"]
        };
        if usage.is_object() {
            read.usage = names.map(|name| usage[name].as_u64().unwrap());
        }
        assert!(!line.contains("token_ids\":["), "{line}");
    }
    read
}

#[tokio::test]
async fn a_stream_gets_comments_while_it_waits_for_its_next_worker() {
    let cluster = Cluster::start(vec![unhurried(), unhurried()], |config| {
        continued(config, 1);
        config.requests.keep_alive = Duration::from_millis(30);
    })
    .await;
    cluster.engines[0].fault(cut_after(3)).await;
    let slow = Faults {
        slow_first_ms: 1_500,
        ..Faults::default()
    };
    cluster.engines[1].fault(slow).await;
    loop {
        let answer = cluster.post(CHAT, asking(CHAT, "x", 6).to_string()).await;
        let stream = answer.text();
        assert_eq!(read(stream).errors, 0, "{stream}");
        let comments = |text: &str| {
            text.split("\n\n")
                .filter(|part| part.starts_with(':'))
                .count()
        };
        if cluster.metric(COUNT, &["continued"]).await > 0.0 {
            let (before_its_end, _) = stream.split_at(stream.rfind("data: {").unwrap());
            assert!(comments(before_its_end) >= 2, "{stream}");
            break;
        }
    }
}

/// The stream of one engine alone.
async fn unbroken(engine: &Engine, path: &str, body: &Value) -> Read {
    engine.fault(Faults::default()).await;
    let answer = client::post(engine.address, path, body.to_string()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    read(answer.text())
}

#[tokio::test]
async fn a_stream_goes_on_wherever_its_worker_cuts_it() {
    for (path, settings) in [
        (CHAT, fast()),
        (COMPLETIONS, fast()),
        (RESPONSES, chat_only()),
    ] {
        let cluster = cluster(vec![settings; 2], 50).await;
        // Written by a worker of its own, which no other test touches.
        let alone = Engine::here("alone", fast()).await;
        for tokens in 1..12 {
            let body = asking(path, &format!("tell me {tokens}"), 12);
            let whole = unbroken(&alone, path, &body).await;
            // The other one writes the rest.
            cluster.engines[tokens % 2].fault(cut_after(tokens)).await;
            cluster.engines[1 - tokens % 2]
                .fault(Faults::default())
                .await;
            // One of two turns is that of the worker that cuts.
            let before = cluster.metric(COUNT, &["continued"]).await;
            let mut answers = Vec::new();
            for _ in 0..2 {
                let answer = cluster.post(path, body.to_string()).await;
                let found = read(answer.text());
                assert_eq!(
                    (found.ends, found.errors),
                    (1, 0),
                    "{path} {tokens}: {}",
                    answer.text()
                );
                assert_eq!(found.text, whole.text, "{path} {tokens}: {}", answer.text());
                assert_eq!(
                    found.usage,
                    whole.usage,
                    "{path} {tokens}: {}",
                    answer.text()
                );
                assert!(found.ids.len() <= 1, "{:?}", found.ids);
                answers.push(answer);
            }
            let continued = cluster.metric(COUNT, &["continued"]).await - before;
            assert_eq!(continued, 1.0, "{path} {tokens}");
            if path != RESPONSES {
                let marked = |answer: &&client::Answer| {
                    answer
                        .text()
                        .contains(": x-warmroute-continued: 1\n\ndata: [DONE]")
                };
                assert_eq!(answers.iter().filter(marked).count(), 1);
            }
        }
    }
}

#[tokio::test]
async fn an_engine_error_and_a_silent_engine_are_continued_too() {
    let cluster = Cluster::start(vec![fast(); 2], |config| {
        continued(config, 1);
        config.requests.stream_idle_timeout = Duration::from_secs(2);
    })
    .await;
    let alone = Engine::here("alone", fast()).await;
    let faults = [
        Faults {
            error_after_tokens: Some(3),
            ..Faults::default()
        },
        Faults {
            stall_after_tokens: Some(3),
            ..Faults::default()
        },
    ];
    for fault in faults {
        cluster.engines[0].fault(fault).await;
        let body = asking(CHAT, "tell me", 9);
        let whole = unbroken(&alone, CHAT, &body).await;
        for _ in 0..2 {
            let answer = cluster.post(CHAT, body.to_string()).await;
            let found = read(answer.text());
            assert_eq!((found.ends, found.errors), (1, 0), "{}", answer.text());
            assert_eq!(found.text, whole.text);
        }
    }
    assert_eq!(cluster.metric(COUNT, &["continued"]).await, 2.0);
}

#[tokio::test]
async fn twenty_streams_outlive_a_worker_that_is_killed() {
    let slow = Settings {
        decode_ms: 40,
        ..unhurried()
    };
    let mut cluster = Cluster::start_children(vec![slow; 3], |config| continued(config, 1)).await;
    let alone = Engine::here("alone", fast()).await;
    // None of the streams of the worker that is killed ends before.
    cluster.engines[1].hold_after(3).await;
    let mut streams = Vec::new();
    for number in 0..20 {
        let body = asking(CHAT, &format!("stream number {number}"), 40);
        let mut open = cluster.open(CHAT, &body.to_string()).await;
        let start = open.until("\"content\":\"").await;
        streams.push((body, open, start));
    }
    cluster.engines[1].kill().await;
    let mut continued = 0;
    for (body, mut open, mut text) in streams {
        let (rest, is_whole) = open.rest().await;
        assert!(is_whole);
        text.push_str(&rest);
        let whole = unbroken(&alone, CHAT, &body).await;
        let found = read(&text);
        assert_eq!((found.ends, found.errors), (1, 0), "{text}");
        assert_eq!(
            (found.text, found.usage),
            (whole.text, whole.usage),
            "{text}"
        );
        continued += usize::from(text.contains("x-warmroute-continued"));
    }
    assert!(continued >= 5, "{continued}");
    let counted = cluster.metric(COUNT, &["continued"]).await;
    assert_eq!(counted, continued as f64);
    // Nothing is left of them in the counts.
    eventually("no request runs", async || {
        let mut requests = 0.0;
        for name in ["w0", "w2"] {
            requests += cluster.worker(name).await["requests"]
                .as_f64()
                .unwrap_or(0.0);
        }
        requests == 0.0
            && cluster
                .metric("warmroute_requests_in_flight", &["sim"])
                .await
                == 0.0
    })
    .await;
}

#[tokio::test]
async fn what_cannot_be_continued_ends_as_without_it() {
    let cluster = cluster(vec![fast(); 2], 1).await;
    for engine in &cluster.engines {
        engine.fault(cut_after(3)).await;
    }
    for (member, value, reason) in [
        ("seed", json!(7), "seed"),
        ("stop", json!(["x"]), "stop_strings"),
        ("response_format", json!({"type": "json_object"}), "grammar"),
        ("return_token_ids", json!(false), "token_ids_asked"),
        // The second worker cuts it, too.
        ("temperature", json!(0), "limit"),
    ] {
        let mut body = asking(CHAT, "tell me", 9);
        body[member] = value;
        let answer = cluster.post(CHAT, body.to_string()).await;
        let found = read(answer.text());
        assert_eq!((found.ends, found.errors), (1, 1), "{}", answer.text());
        assert!(answer.text().contains("engine_stream_broken"));
        let refused = format!("reason=\"{reason}\"");
        assert_eq!(
            cluster.metric(COUNT, &["refused", &refused]).await,
            1.0,
            "{reason}"
        );
    }
    // Responses of an engine that serves them itself.
    let body = asking(RESPONSES, "tell me", 9);
    let answer = cluster.post(RESPONSES, body.to_string()).await;
    assert!(
        answer.text().contains("response.failed"),
        "{}",
        answer.text()
    );
    assert_eq!(
        cluster.metric(COUNT, &["refused", "reason=\"api\""]).await,
        1.0
    );
}

#[tokio::test]
async fn without_another_worker_the_stream_ends_with_an_error() {
    let cluster = cluster(vec![fast()], 1).await;
    cluster.engines[0].fault(cut_after(3)).await;
    let answer = cluster
        .post(CHAT, asking(CHAT, "tell me", 9).to_string())
        .await;
    let found = read(answer.text());
    assert_eq!((found.ends, found.errors), (1, 1), "{}", answer.text());
    assert_eq!(cluster.metric(COUNT, &["failed"]).await, 1.0);
    let failures = cluster
        .metric("warmroute_worker_failures_total", &["w0"])
        .await;
    assert_eq!(failures, 1.0, "the lost worker is reported once");
}

#[tokio::test]
async fn a_stream_goes_on_only_where_the_tokens_so_far_are_read() {
    let tiny = || Settings {
        models: vec!["tiny".to_owned()],
        ..fast()
    };
    let (cutting, other) = (
        Engine::here("w0", tiny()).await,
        Engine::here("w1", tiny()).await,
    );
    let alone = Engine::here("alone", tiny()).await;
    let sglang = SglangEngine::start(Role::Both, &Arc::default()).await;
    cutting.fault(cut_after(3)).await;
    let mut config = cluster::config();
    continued(&mut config, 1);
    // Either of the other two may be chosen next.
    config.routing.policy = Policy::Random;
    config.models = named(json!([{"name": "tiny", "stream_continuation": {}}]));
    let sglang_worker = WorkerSpec {
        url: format!("http://{}", sglang.address),
        ..WorkerSpec::default()
    };
    config.workers = vec![cutting.listed(), sglang_worker, other.listed()];
    let router = Router::here(&config).await;
    eventually("all workers are up", async || {
        let fleet = client::get(router.admin, "/fleet").await.json();
        let workers = fleet["workers"].as_array().unwrap();
        workers.len() == 3 && workers.iter().all(|worker| worker["health"] == "up")
    })
    .await;
    let (mut number, mut goings_on) = (0, 0);
    eventually(
        "eight streams were continued, and SGLang had requests",
        async || {
            number += 1;
            let mut body = asking(CHAT, &format!("tell me {number}"), 9);
            body["model"] = "tiny".into();
            let whole = unbroken(&alone, CHAT, &body).await;
            let answer = client::post(router.api, CHAT, body.to_string()).await;
            let found = read(answer.text());
            assert_eq!((found.ends, found.errors), (1, 0), "{}", answer.text());
            let is_of_one = found.text == whole.text || found.text == "alone";
            assert!(is_of_one, "{}", answer.text());
            goings_on += usize::from(answer.text().contains("x-warmroute-continued"));
            goings_on >= 8 && !sglang.bodies().is_empty()
        },
    )
    .await;
}

#[tokio::test]
async fn without_the_setting_engines_are_not_asked_for_ids() {
    let cluster = Cluster::start(vec![fast()], |_| {}).await;
    let body = asking(CHAT, "tell me", 2).to_string();
    cluster.post(CHAT, body.clone()).await;
    let sent = cluster.engines[0].last_post().await;
    assert_eq!(sent.body, body.as_bytes());
}

#[tokio::test]
async fn after_a_prefill_leg_another_decode_worker_goes_on_alone() {
    for connector in [Connector::Nixl, Connector::Mooncake] {
        let engine = |role| with_role(fast(), connector, role);
        let roles = [Role::Prefill, Role::Decode, Role::Decode];
        let cluster = Cluster::start(roles.map(engine).to_vec(), |config| {
            continued(config, 1);
            config.prefill_decode.connector = Some(router_connector(connector));
            config.prefill_decode.advanced.min_remote_tokens = 16;
        })
        .await;
        let alone = Engine::here("alone", fast()).await;
        cluster.engines[1].fault(cut_after(3)).await;
        let mut number = 0;
        eventually("a stream was cut and continued", async || {
            number += 1;
            let text = format!("{number}: all that was said before. ").repeat(8);
            let body = asking(CHAT, &text, 9);
            let whole = unbroken(&alone, CHAT, &body).await;
            let answer = cluster.post(CHAT, body.to_string()).await;
            let found = read(answer.text());
            assert_eq!((found.ends, found.errors), (1, 0), "{}", answer.text());
            assert_eq!(
                (found.text, found.usage),
                (whole.text, whole.usage),
                "{}",
                answer.text()
            );
            let is_split = cluster.engines[0].kv_transfers().await.prefill_legs > 0;
            is_split && answer.text().contains("x-warmroute-continued")
        })
        .await;
        let metrics = cluster.metric(COUNT, &["continued"]).await;
        assert!(metrics >= 1.0);
    }
}
