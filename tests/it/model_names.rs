//! Names that lead to models: aliases, weighted targets, sessions that stay, fallbacks.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use warmroute::config::{Config, ModelOverride};
use warmroute::responses::Mode;
use warmroute::sim::worker::Settings;

use crate::client::{self, Answer};
use crate::cluster::{Cluster, Engine, Router, chat, eventually, fast};
use crate::failures::unnoticed;
use crate::reload::{Folder, applied, text, workers};

const CHAT: &str = "/v1/chat/completions";

/// An engine that serves this model alone.
pub(crate) fn serving(model: &str) -> Settings {
    Settings {
        models: vec![model.to_owned()],
        ..fast()
    }
}

pub(crate) fn named(entries: Value) -> Vec<ModelOverride> {
    serde_json::from_value(entries).unwrap()
}

async fn cluster(models: &[&str], entries: Value) -> Cluster {
    let engines = models.iter().map(|model| serving(model)).collect();
    Cluster::start(engines, |config| config.models = named(entries)).await
}

fn asking(model: &str, prompt: &str) -> String {
    json!({"model": model, "prompt": prompt, "max_tokens": 1}).to_string()
}

async fn completion(api: std::net::SocketAddr, model: &str, headers: &[(&str, &str)]) -> Answer {
    let headers = [headers, &[("x-warmroute-decision", "1")]].concat();
    let body = asking(model, "once upon a time");
    client::send(api, "POST", "/v1/completions", &headers, body).await
}

/// A field of the decision header.
fn decided(answer: &Answer, field: &str) -> String {
    assert_eq!(answer.status, 200, "{}", answer.text());
    let header = answer.header("x-warmroute-decision");
    let mut pairs = header.split("; ").filter_map(|pair| pair.split_once('='));
    let found = pairs.find(|(name, _)| *name == field);
    found.map_or_else(String::new, |(_, value)| value.to_owned())
}

#[tokio::test]
async fn an_alias_reaches_its_model_on_every_api_and_no_other_byte_changes() {
    let entries = json!([{"name": "org/llama", "aliases": ["gpt-4o"]}]);
    let cluster = cluster(&["org/llama", "other"], entries).await;
    let bodies = [
        (
            CHAT,
            r#"{"messages":[{"role":"user","content":"gpt-4o"}], "model" : "gpt-4o" ,"max_tokens":1}"#,
        ),
        (
            "/v1/completions",
            r#"{"model":"gpt-4\u006f","prompt":"gpt-4o","max_tokens":1,"temperature":0.50}"#,
        ),
        ("/v1/embeddings", r#"{"model":"gpt-4o","input":"gpt-4o"}"#),
        (
            "/v1/rerank",
            r#"{"query":"q","documents":["a","b"],"model":"gpt-4o"}"#,
        ),
        ("/tokenize", r#"{"prompt":"gpt-4o","model":"gpt-4o"}"#),
    ];
    for (path, body) in bodies {
        let answer = cluster.post(path, body).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        let sent = cluster.engines[0].last_post().await;
        let expected = body
            .replace(r#""model" : "gpt-4o""#, r#""model" : "org/llama""#)
            .replace(r#""model":"gpt-4o""#, r#""model":"org/llama""#)
            .replace(r#""model":"gpt-4\u006f""#, r#""model":"org/llama""#);
        assert_eq!(str::from_utf8(&sent.body).unwrap(), expected, "{path}");
    }
    // Engines answer with the name of the model, and the router changes nothing in that.
    let answer = completion(cluster.router.api, "gpt-4o", &[]).await;
    assert_eq!(answer.json()["model"], "org/llama");
    assert_eq!(decided(&answer, "requested_model"), "gpt-4o");
    assert_eq!(decided(&answer, "model"), "org/llama");
    assert_eq!(decided(&answer, "model_reason"), "alias");
    let labels = [
        "requested=\"gpt-4o\"",
        "target=\"org/llama\"",
        "reason=\"alias\"",
    ];
    let counted = cluster
        .metric("warmroute_model_targets_total", &labels)
        .await;
    assert_eq!(counted, bodies.len() as f64 + 1.0);
    // A name that the configuration says nothing of costs and counts nothing.
    let answer = completion(cluster.router.api, "other", &[]).await;
    assert_eq!(decided(&answer, "requested_model"), "");
    let all = cluster.metric("warmroute_model_targets_total", &[]).await;
    assert_eq!(all, counted);
}

#[tokio::test]
async fn names_are_listed_as_models_and_an_unknown_one_is_refused_with_them() {
    let entries = json!([
        {"name": "org/llama", "aliases": ["gpt-4o"]},
        {"name": "canary", "targets": [{"model": "org/llama", "weight": 1}]},
        {"name": "absent", "aliases": ["gone"]},
    ]);
    let cluster = cluster(&["org/llama"], entries).await;
    let list = cluster.get("/v1/models").await.json();
    let ids: Vec<&str> = list["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| model["id"].as_str().unwrap())
        .collect();
    assert_eq!(ids, ["canary", "gpt-4o", "org/llama"]);
    let own = cluster.get("/v1/models/org%2Fllama").await.json();
    let mut alias = cluster.get("/v1/models/gpt-4o").await.json();
    assert_eq!(alias["id"], "gpt-4o");
    alias["id"] = own["id"].clone();
    assert_eq!(alias, own);
    assert_eq!(cluster.get("/v1/models/gone").await.status, 503);
    let answer = completion(cluster.router.api, "nothing", &[]).await;
    assert_eq!(answer.status, 404);
    assert!(
        answer.text().contains("canary, gpt-4o, org/llama"),
        "{}",
        answer.text()
    );
    // The configuration knows this name, so that it may come: the client may retry.
    let answer = completion(cluster.router.api, "gone", &[]).await;
    assert_eq!(answer.status, 503, "{}", answer.text());
    assert!(answer.text().contains("`gone`"), "{}", answer.text());
}

#[tokio::test]
async fn a_canary_gets_its_share() {
    let entries = json!([{"name": "llama", "targets": [
        {"model": "llama", "weight": 4}, {"model": "llama-next", "weight": 1}]}]);
    let cluster = cluster(&["llama", "llama-next"], entries).await;
    let mut canary = 0;
    for _ in 0..600 {
        let answer = completion(cluster.router.api, "llama", &[]).await;
        assert_eq!(decided(&answer, "model_reason"), "weight");
        canary += usize::from(decided(&answer, "model") == "llama-next");
    }
    // 120, give or take five standard deviations of 9.8.
    assert!((71..170).contains(&canary), "{canary}");
    let served = cluster.requests().await;
    assert_eq!(served, [600 - canary as u64, canary as u64]);
    let explained = cluster
        .post_admin("/explain?path=/v1/completions", &asking("llama", "x"))
        .await;
    let name = &explained.json()["name"];
    assert_eq!(name["requested"], "llama");
    assert_eq!(
        name["targets"][1],
        json!({"model": "llama-next", "weight": 1.0, "is_usable": true})
    );
}

#[tokio::test]
async fn a_session_stays_at_its_target_on_all_replicas() {
    let entries = json!([{"name": "chat", "sticky": "session", "targets": [
        {"model": "a", "weight": 1}, {"model": "b", "weight": 1}]}]);
    let first = cluster(&["a", "b"], entries.clone()).await;
    let mut routers = Vec::new();
    for _ in 0..2 {
        let mut config = crate::cluster::config();
        config.workers = first.engines.iter().map(Engine::listed).collect();
        config.models = named(entries.clone());
        routers.push(Router::here(&config).await);
    }
    let apis: Vec<_> = [first.router.api]
        .into_iter()
        .chain(routers.iter().map(|router| router.api))
        .collect();
    for api in &apis {
        eventually("both models are served", async || {
            client::get(*api, "/v1/models").await.json()["data"]
                .as_array()
                .unwrap()
                .len()
                == 3
        })
        .await;
    }
    let mut seen = BTreeMap::new();
    for session in 0..30 {
        let key = format!("session-{session}");
        for api in &apis {
            let answer = completion(*api, "chat", &[("x-session-id", &key)]).await;
            assert_eq!(decided(&answer, "model_reason"), "session");
            let model = decided(&answer, "model");
            let first = seen.entry(session).or_insert_with(|| model.clone());
            assert_eq!(*first, model, "{key}");
        }
    }
    let of_a = seen.values().filter(|model| *model == "a").count();
    assert!((3..28).contains(&of_a), "{of_a}");
}

/// Requests that ended because no worker answered.
async fn failed(cluster: &Cluster) -> f64 {
    let outcome = ["outcome=\"worker_failed\""];
    cluster.metric("warmroute_requests_total", &outcome).await
}

#[tokio::test]
async fn the_fallback_answers_while_the_workers_are_down() {
    let entries = json!([
        {"name": "big", "aliases": ["best"], "fallback": "small"},
        {"name": "small", "fallback": ["big"]},
    ]);
    let mut cluster = cluster(&["big", "small"], entries).await;
    let answer = completion(cluster.router.api, "best", &[]).await;
    assert_eq!(decided(&answer, "model"), "big");
    // A mistake of the client is no reason to ask another model.
    let wrong = cluster
        .post("/v1/completions", r#"{"model":"best","prompt":{"no":1}}"#)
        .await;
    assert_eq!(wrong.status, 400, "{}", wrong.text());
    assert_eq!(cluster.engines[1].generated().await, 0);

    cluster.engines[0].kill().await;
    // The first ones learn of it themselves, before any health check has.
    for name in ["best", "big"] {
        let answer = completion(cluster.router.api, name, &[]).await;
        assert_eq!(decided(&answer, "requested_model"), name);
        assert_eq!(decided(&answer, "model"), "small");
        assert_eq!(decided(&answer, "model_reason"), "fallback");
        assert_eq!(answer.json()["model"], "small");
    }
    // No client was answered that the first model's worker has failed.
    assert_eq!(failed(&cluster).await, 0.0);
    cluster.is_worker("w0", "health", "down").await;
    let answer = completion(cluster.router.api, "big", &[]).await;
    assert_eq!(decided(&answer, "model_reason"), "fallback");
    let answer = completion(cluster.router.api, "small", &[]).await;
    assert_eq!(decided(&answer, "model_reason"), "name");
    let explained = cluster
        .post_admin("/explain?path=/v1/completions", &asking("best", "x"))
        .await;
    let explained = explained.json();
    assert_eq!(explained["model"], "small");
    assert_eq!(explained["name"]["reason"], "fallback");
    assert_eq!(explained["name"]["targets"][0]["is_usable"], false);

    cluster.engines[0].restart(serving("big")).await;
    cluster.is_worker("w0", "health", "up").await;
    let answer = completion(cluster.router.api, "best", &[]).await;
    assert_eq!(decided(&answer, "model"), "big");
}

#[tokio::test]
async fn a_request_that_the_workers_of_no_model_answer_has_failed_once() {
    let entries = json!([{"name": "big", "fallback": "small"}]);
    let engines = vec![serving("big"), serving("small")];
    let mut cluster = Cluster::start(engines, |config| {
        unnoticed(config);
        config.models = named(entries);
    })
    .await;
    for engine in &mut cluster.engines {
        engine.kill().await;
    }
    let answer = completion(cluster.router.api, "big", &[]).await;
    assert!([502, 503].contains(&answer.status), "{}", answer.text());
    assert_eq!(
        failed(&cluster).await,
        1.0,
        "once, whichever models were tried"
    );
}

#[tokio::test]
async fn stored_responses_show_the_name_that_was_asked_for_and_keep_their_target() {
    let entries = json!([{"name": "chat", "aliases": ["assistant"], "sticky": "session", "targets": [
        {"model": "a", "weight": 1}, {"model": "b", "weight": 1}]}]);
    let cluster = cluster(&["a", "b"], entries).await;
    let mut targets = Vec::new();
    for _ in 0..12 {
        let mut previous = Value::Null;
        let before = cluster.requests().await;
        for turn in 0..3 {
            let body = json!({"model": "assistant", "input": "hi", "max_output_tokens": 1,
                "previous_response_id": previous, "background": turn == 1});
            let mut response = cluster.post("/v1/responses", body.to_string()).await.json();
            assert_eq!(response["model"], "assistant", "{response}");
            let path = format!("/v1/responses/{}", response["id"].as_str().unwrap());
            eventually("the response has ended", async || {
                response = cluster.get(&path).await.json();
                response["status"] == "incomplete"
            })
            .await;
            assert_eq!(response["model"], "assistant");
            previous = response["id"].clone();
        }
        let after = cluster.requests().await;
        let sent: Vec<u64> = after
            .iter()
            .zip(before)
            .map(|(after, before)| after - before)
            .collect();
        assert!([[3, 0], [0, 3]].contains(&[sent[0], sent[1]]), "{sent:?}");
        targets.push(sent[0]);
    }
    assert!(targets.contains(&0) && targets.contains(&3), "{targets:?}");
}

#[tokio::test]
async fn passed_through_and_streamed_answers_have_the_name_of_the_model() {
    let entries = json!([{"name": "a", "aliases": ["assistant"]}]);
    let engines = vec![serving("a")];
    let cluster = Cluster::start(engines, |config| {
        config.models = named(entries);
        config.responses.mode = Mode::PassThrough;
    })
    .await;
    let body = json!({"model": "assistant", "input": "hi", "max_output_tokens": 1});
    let answer = cluster.post("/v1/responses", body.to_string()).await;
    assert_eq!(answer.json()["model"], "a", "{}", answer.text());
    let body = chat("hi", 2, true).replace("\"sim\"", "\"assistant\"");
    let answer = cluster.post(CHAT, body).await;
    assert!(
        answer.text().contains("\"model\":\"a\""),
        "{}",
        answer.text()
    );
    assert!(
        !answer.text().contains("assistant\",\"choices"),
        "{}",
        answer.text()
    );
}

#[tokio::test]
async fn a_reload_moves_the_weights_and_the_access_log_has_both_names() {
    let mut engines = Vec::new();
    for model in ["a", "b"] {
        engines.push(Engine::here(model, serving(model)).await);
    }
    let list = workers(&engines);
    let entries = |a: u32, b: u32| {
        text(&format!(
            "models: [{{name: chat, aliases: [best], targets: [{{model: a, weight: {a}}}, {{model: b, weight: {b}}}]}}]\n{list}"
        ))
    };
    let folder = Folder::new();
    let cluster = folder.start_child(engines, &entries(1, 0)).await;
    cluster.all_up().await;
    let answer = completion(cluster.router.api, "best", &[]).await;
    assert_eq!(decided(&answer, "model"), "a");
    folder.write(&entries(0, 1));
    applied(&cluster).await;
    let answer = completion(cluster.router.api, "best", &[]).await;
    assert_eq!(decided(&answer, "model"), "b");
    eventually("both requests are logged", async || {
        let log = cluster.router.log();
        let logged = |model: &str| {
            let fields = format!("\"model\":\"{model}\",\"requested_model\":\"best\"");
            log.lines().any(|line| line.contains(&fields))
        };
        logged("a") && logged("b")
    })
    .await;
}

fn check(models: &str, expected: &[&str]) {
    let text = format!("workers: ['http://127.0.0.1:1']\nmodels:\n{models}");
    let problems = match Config::parse("c.yaml", &text) {
        Ok(_) => String::new(),
        Err(problems) => problems.to_string(),
    };
    let lines: Vec<&str> = problems.lines().collect();
    assert_eq!(lines.len(), expected.len(), "{text}\n{problems}");
    for (line, expected) in lines.iter().zip(expected) {
        assert!(
            line.contains(expected),
            "{text}\n{line}\n  lacks {expected}"
        );
    }
}

#[test]
fn names_that_cannot_work_are_refused_with_path_and_line() {
    check(
        "  - {name: a, aliases: [x, y], fallback: b}\n  - {name: b, fallback: [a, c]}",
        &[],
    );
    check(
        "  - {name: a, targets: [{model: a, weight: 9}, {model: b, weight: 1}], fallback: a}",
        &[],
    );
    check(
        "  - {name: a, aliases: [x, a, b, x, '']}\n  - {name: b, aliases: [x]}",
        &[
            "c.yaml:3:28: models[0].aliases[1]: `a` is the model's own name; leave it out",
            "models[0].aliases[2]: `b` is the name of models[1]; a request for it could mean either",
            "models[0].aliases[3]: `x` is an alias of models[0] already",
            "models[0].aliases[4]: is empty",
            "c.yaml:4:25: models[1].aliases[0]: `x` is an alias of models[0] already",
        ],
    );
    check(
        "  - {name: a, aliases: [x], sticky: session}\n  - {name: s, targets: [{model: x, weight: 1}, {model: b, weight: 1}, {model: b, weight: 1}]}\n  - {name: t, targets: [{model: s, weight: 1}], policy: random}\n  - {name: u, targets: [{model: m, weight: 0}]}",
        &[
            "models[0].sticky: there are no `targets` to choose from; leave it out",
            "models[1].targets[0].model: `x` is an alias, and targets are models; write `a`",
            "models[1].targets[2].model: `b` is listed twice; add up the weights",
            "models[2].targets[0].model: `s` has targets of its own, and targets are models; list those models here",
            "models[2].policy: has no effect: requests for `t` go to its targets",
            "models[3].targets: every weight is 0",
        ],
    );
    check(
        "  - {name: v, targets: [{model: m, weight: -1}]}",
        &["models[0].targets[0].weight: must be at least 0, not `-1`"],
    );
    check(
        "  - {name: a, aliases: [x], fallback: x}\n  - {name: b, fallback: [c, c, b]}\n  - {name: d, fallback: [1, 2, 3, 4, 5, 6, 7, 8, 9]}",
        &[
            "models[0].fallback: `x` is this model itself, so that a request could only fail again; name another",
            "models[1].fallback[1]: `c` is listed twice",
            "models[1].fallback[2]: `b` is this model itself",
            "models[2].fallback: lists 9 models; at most 8",
        ],
    );
}
