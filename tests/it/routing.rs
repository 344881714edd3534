//! Where requests go, and whether the router can say why.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use warmroute::config::Config;
use warmroute::routing::Policy;
use warmroute::sim::fault::Faults;
use warmroute::sim::worker::Settings;

use crate::client;
use crate::cluster::{Cluster, chat, eventually, fast, generating, unhurried};

const CHAT: &str = "/v1/chat/completions";

fn with(policy: Policy) -> impl FnOnce(&mut Config) {
    move |config| config.routing.policy = policy
}

/// Conversations that take turns, each request with all that was said before. Returns the workers
/// that each conversation met, and how many prompt tokens the engines found in their caches.
async fn converse(policy: Policy) -> (Vec<BTreeSet<String>>, u64) {
    let cluster = Cluster::start(vec![fast(); 3], with(policy)).await;
    let mut conversations: Vec<Vec<Value>> = (0..4)
        .map(|n| {
            let text = format!("You are assistant number {n}. ").repeat(20);
            vec![json!({"role": "system", "content": text})]
        })
        .collect();
    let mut met = vec![BTreeSet::new(); conversations.len()];
    for turn in 0..5 {
        for (messages, met) in conversations.iter_mut().zip(&mut met) {
            let question = format!("Question {turn}: {}", "what then? ".repeat(10));
            messages.push(json!({"role": "user", "content": question}));
            let body = json!({"model": "sim", "messages": messages, "max_tokens": 16});
            let (answer, decided) = cluster.post_decided(CHAT, &body.to_string()).await;
            assert_eq!(answer.status, 200);
            met.insert(decided.worker);
            messages.push(answer.json()["choices"][0]["message"].clone());
        }
    }
    let cached = cluster.engines.iter().map(|engine| engine.cached_tokens());
    (met, cached.sum())
}

#[tokio::test]
async fn a_conversation_stays_on_its_worker_which_beats_taking_turns() {
    let (met, cached) = converse(Policy::CacheAware).await;
    assert!(met.iter().all(|workers| workers.len() == 1), "{met:?}");
    let (_, cached_by_turns) = converse(Policy::RoundRobin).await;
    assert!(
        cached * 2 > cached_by_turns * 3,
        "{cached} and {cached_by_turns} cached tokens"
    );
}

/// How many requests shared the longest prefix of a prompt lately.
async fn shared_requests(cluster: &Cluster, text: &str) -> f64 {
    let explained = cluster.post_admin("/explain", &chat(text, 4, false)).await;
    explained.json()["shared_requests"].as_f64().unwrap()
}

#[tokio::test]
async fn requests_that_share_a_prefix_are_counted_and_others_are_not() {
    let cluster = Cluster::start(vec![fast(); 2], with(Policy::CacheAware)).await;
    let system = "You are the assistant of everybody. ".repeat(100);
    let ask = |question: u32| format!("{system} Question {question}.");
    eventually("they are counted", async || {
        for question in 0..6 {
            let answer = cluster.post(CHAT, chat(&ask(question), 4, false)).await;
            assert_eq!(answer.status, 200);
        }
        shared_requests(&cluster, &ask(7)).await > 3.0
    })
    .await;
    let other = "Somebody else's prompt. ".repeat(100);
    assert_eq!(shared_requests(&cluster, &other).await, 0.0);
    let answer = cluster.post(CHAT, chat(&other, 4, false)).await;
    assert_eq!(answer.status, 200);
    assert!(shared_requests(&cluster, &other).await <= 1.0);
}

#[tokio::test]
async fn how_long_engines_take_is_learnt_from_streams_and_from_whole_answers() {
    let slow = Settings {
        decode_ms: 60,
        ..fast()
    };
    for is_stream in [true, false] {
        let cluster = Cluster::start(vec![slow.clone(); 2], with(Policy::RoundRobin)).await;
        let api = cluster.router.api;
        let step = async || {
            cluster.worker("w0").await["speed"]["step_ms"]
                .as_f64()
                .unwrap()
        };
        assert_eq!(step().await, 10.0);
        eventually("the time of a step is known", async || {
            let ask = |n: u32| client::post(api, CHAT, chat(&format!("of {n}"), 24, is_stream));
            let answers: Vec<_> = (0..4).map(|n| tokio::spawn(ask(n))).collect();
            for answer in answers {
                assert_eq!(answer.await.unwrap().status, 200);
            }
            step().await > 25.0
        })
        .await;
        let explained = cluster.post_admin("/explain", &chat("x", 100, false)).await;
        let explained = explained.json();
        let row = &explained["workers"][0];
        assert_eq!(explained["answer_tokens"], 100);
        let end = row["expected_end_ms"].as_f64().unwrap();
        assert!(end > 2_500.0, "{explained}");
    }
}

#[tokio::test]
async fn taking_turns_is_even() {
    let cluster = Cluster::start(vec![fast(); 3], with(Policy::RoundRobin)).await;
    for _ in 0..12 {
        let (_, decided) = cluster
            .post_decided(CHAT, &chat("the same", 1, false))
            .await;
        assert_eq!(decided.reason, "round_robin");
    }
    assert_eq!(cluster.requests().await, [4, 4, 4]);
}

#[tokio::test]
async fn a_key_stays_on_its_worker_and_keys_spread() {
    let cluster = Cluster::start(vec![fast(); 4], with(Policy::ConsistentHash)).await;
    let mut workers: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for n in 0..3 {
        for user in 0..12 {
            let body = json!({"model": "sim", "prompt": format!("{n}"), "max_tokens": 1, "user": format!("user-{user}")});
            let (_, decided) = cluster
                .post_decided("/v1/completions", &body.to_string())
                .await;
            assert_eq!(decided.reason, "affinity");
            workers
                .entry(format!("user-{user}"))
                .or_default()
                .insert(decided.worker);
        }
    }
    assert!(workers.values().all(|met| met.len() == 1), "{workers:?}");
    let used: BTreeSet<&String> = workers.values().flatten().collect();
    assert!(used.len() > 1, "{workers:?}");

    // A header comes before the field, and the same key means the same worker wherever it stands.
    for (user, met) in &workers {
        let headers = [
            ("x-session-id", user.as_str()),
            ("x-warmroute-decision", "1"),
        ];
        let body = json!({"model": "sim", "prompt": "x", "max_tokens": 1, "user": "another"});
        let answer = client::send(
            cluster.router.api,
            "POST",
            "/v1/completions",
            &headers,
            body.to_string(),
        )
        .await;
        let worker = format!("worker={};", met.first().unwrap());
        let decision = answer.header("x-warmroute-decision");
        assert!(decision.starts_with(&worker), "{decision}");
    }
}

#[tokio::test]
async fn a_burst_of_siblings_spreads() {
    let slow_prefill = warmroute::sim::worker::Settings {
        prefill_tokens_per_second: 20_000.try_into().unwrap(),
        ..fast()
    };
    let cluster = Cluster::start(vec![slow_prefill; 4], |_| {}).await;
    let shared = "the same long instructions for everyone. ".repeat(8);
    let own = "and a question of its own, longer than what is shared. ".repeat(40);
    // No first token comes before all are there.
    for engine in &cluster.engines {
        engine.hold_after(0).await;
    }
    let bodies: Vec<String> = (0..32)
        .map(|n| chat(&format!("{shared}{n}{own}"), 4, true))
        .collect();
    let running = bodies.into_iter().map(|body| {
        let api = cluster.router.api;
        tokio::spawn(async move { client::post(api, CHAT, body).await.status })
    });
    let running: Vec<_> = running.collect();
    let mut counts = Vec::new();
    eventually("all are there", async || {
        counts = cluster.requests().await;
        counts.iter().sum::<u64>() == 32
    })
    .await;
    assert!(
        counts.iter().all(|count| (4..=12).contains(count)),
        "{counts:?}"
    );
    for engine in &cluster.engines {
        engine.let_go().await;
    }
    for status in running {
        assert_eq!(status.await.unwrap(), 200);
    }
}

#[tokio::test]
async fn a_draining_worker_finishes_what_it_has_and_gets_nothing_new() {
    let cluster = Cluster::start(vec![unhurried(); 2], |_| {}).await;
    let body = chat(
        &"a conversation with a long beginning. ".repeat(10),
        50,
        true,
    );
    for engine in &cluster.engines {
        engine.hold_after(3).await;
    }
    let headers = [("x-warmroute-decision", "1")];
    let mut running = client::open(cluster.router.api, "POST", CHAT, &headers, body.clone()).await;
    let decision = running.headers["x-warmroute-decision"].to_str().unwrap();
    let warm = decision[7..9].to_owned();
    let drained = cluster
        .post_admin(&format!("/drain?worker={warm}"), "")
        .await;
    assert_eq!(drained.status, 200);
    cluster.is_worker(&warm, "is_draining", true).await;
    for _ in 0..10 {
        let (answer, decided) = cluster.post_decided(CHAT, &chat("x", 1, false)).await;
        assert_eq!(answer.status, 200);
        assert_ne!(decided.worker, warm);
    }
    for engine in &cluster.engines {
        engine.let_go().await;
    }
    let (rest, whole) = running.rest().await;
    assert!(whole && rest.ends_with("data: [DONE]\n\n"), "{rest}");
    assert!(!rest.contains("\"error\""), "{rest}");

    let back = cluster
        .post_admin(&format!("/undrain?worker={warm}"), "")
        .await;
    assert_eq!(back.status, 200);
    let (_, decided) = cluster
        .post_decided(CHAT, &body.replace("true", "false"))
        .await;
    assert_eq!(
        (decided.worker, decided.reason.as_str()),
        (warm, "longest_prefix")
    );

    let unknown = cluster.post_admin("/drain?worker=unknown", "").await;
    assert_eq!(unknown.status, 404);
    assert_eq!(cluster.post_admin("/undrain", "").await.status, 400);
    for misspelt in [
        "/drain?wroker=w0",
        "/undrain?worker=w0&x=1",
        "/explain?pth=/",
    ] {
        let refused = cluster.post_admin(misspelt, "").await;
        assert_eq!(refused.status, 400, "{misspelt}");
        assert!(refused.text().contains("unknown parameter `"), "{misspelt}");
    }
    assert_eq!(cluster.admin("/kv/blocks?wroker=w0").await.status, 400);
    assert_eq!(cluster.admin("/drain?worker=w0").await.status, 405);
}

#[tokio::test]
async fn explain_lists_every_candidate_and_foretells_the_decision() {
    let cluster = Cluster::fast(3).await;
    for (path, body) in generating(2, false) {
        let explain = format!("/explain?path={path}");
        let cold = cluster.post_admin(&explain, &body).await.json();
        assert_eq!(cold["reason"], "cold", "{path}");
        let (_, first) = cluster.post_decided(path, &body).await;

        // Nothing that explain does may change what it is asked about.
        for _ in 0..2 {
            let answer = cluster.post_admin(&explain, &body).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            let explained = answer.json();
            assert_eq!(explained["chosen"], first.worker, "{path}");
            assert_eq!(explained["reason"], "longest_prefix");
            assert_eq!(explained["policy"], "cache_aware");
            let rows = explained["workers"].as_array().unwrap();
            assert_eq!(rows.len(), 3);
            let chosen = rows
                .iter()
                .find(|row| row["worker"] == first.worker)
                .unwrap();
            for row in rows {
                assert_eq!(row["is_usable"], true);
                let cost = row["cost_ms"].as_f64().unwrap();
                assert!(cost >= chosen["cost_ms"].as_f64().unwrap(), "{explained}");
                let is_chosen = row["worker"] == first.worker;
                assert_eq!(row["cached_tokens"].as_u64().unwrap() > 0, is_chosen);
            }
            let (_, next) = cluster.post_decided(path, &body).await;
            assert_eq!(next.worker, first.worker);
            assert_eq!(
                next.cached_tokens,
                chosen["cached_tokens"].as_u64().unwrap()
            );
        }
        cluster.is_worker(&first.worker, "requests", 0).await;
    }
    let bad = cluster.post_admin("/explain", "{").await;
    assert_eq!(bad.status, 400);
    let unknown = cluster
        .post_admin("/explain", r#"{"model":"no","messages":[]}"#)
        .await;
    assert_eq!(unknown.status, 404);
}

#[tokio::test]
async fn explain_does_not_take_a_turn() {
    let cluster = Cluster::start(vec![fast(); 3], with(Policy::RoundRobin)).await;
    let body = chat("x", 1, false);
    for _ in 0..6 {
        let explained = cluster.post_admin("/explain", &body).await.json();
        let (_, decided) = cluster.post_decided(CHAT, &body).await;
        assert_eq!(explained["chosen"], decided.worker);
    }
    assert_eq!(cluster.requests().await, [2, 2, 2]);
}

#[tokio::test]
async fn a_worker_that_was_restarted_is_not_believed_to_be_warm() {
    let mut cluster = Cluster::start_children(vec![fast(); 2], |_| {}).await;
    let body = chat(&"a prompt that will be forgotten. ".repeat(20), 2, false);
    let (_, first) = cluster.post_decided(CHAT, &body).await;
    let (_, second) = cluster.post_decided(CHAT, &body).await;
    assert_eq!(
        (second.worker.clone(), second.reason.as_str()),
        (first.worker, "longest_prefix")
    );
    let place = usize::from(second.worker == "w1");
    assert!(
        cluster.worker(&second.worker).await["predicted_blocks"]
            .as_u64()
            .unwrap()
            > 0
    );
    cluster.engines[place].restart(fast()).await;
    cluster
        .is_worker(&second.worker, "predicted_blocks", 0)
        .await;
    cluster.is_worker(&second.worker, "health", "up").await;
    let (answer, after) = cluster.post_decided(CHAT, &body).await;
    assert_eq!(answer.status, 200);
    assert_eq!((after.reason.as_str(), after.cached_tokens), ("cold", 0));
}

#[tokio::test]
async fn metrics_count_what_happened() {
    let cluster = Cluster::start(vec![fast(); 2], |_| {}).await;
    let body = chat(&"a prompt that is counted. ".repeat(20), 5, false);
    let (_, first) = cluster.post_decided(CHAT, &body).await;
    let (answer, second) = cluster.post_decided(CHAT, &body).await;
    let usage = &answer.json()["usage"];
    let prompt = usage["prompt_tokens"].as_f64().unwrap();
    cluster.post(CHAT, r#"{"model":"sim","messages":[]}"#).await;
    cluster
        .post("/v1/embeddings", r#"{"model":"sim","input":"x"}"#)
        .await;

    let model = "model=\"sim\"";
    let is = async |name: &str, labels: &[&str], expected: f64| {
        eventually(&format!("{name} {labels:?} is {expected}"), async || {
            cluster.metric(name, labels).await == expected
        })
        .await;
    };
    let requests = "warmroute_requests_total";
    is(requests, &[model, "api=\"chat\"", "status=\"200\""], 2.0).await;
    is(requests, &[model, "api=\"chat\"", "status=\"400\""], 1.0).await;
    is(
        requests,
        &[model, "api=\"embeddings\"", "status=\"200\""],
        1.0,
    )
    .await;
    is(
        "warmroute_routing_decisions_total",
        &["reason=\"longest_prefix\""],
        1.0,
    )
    .await;
    is(
        "warmroute_routing_decisions_total",
        &["reason=\"cold\""],
        3.0,
    )
    .await;
    let overlap = second.cached_tokens as f64;
    assert!(overlap > 0.0);
    is(
        "warmroute_expected_cached_prompt_tokens_total",
        &[model],
        overlap,
    )
    .await;
    is("warmroute_generation_tokens_total", &[model], 10.0).await;
    // The embedding's one token is counted, too.
    is(
        "warmroute_prompt_tokens_total",
        &[model],
        2.0 * prompt + 1.0,
    )
    .await;
    let cached = cluster.engines.iter().map(|engine| engine.cached_tokens());
    let cached: u64 = cached.sum();
    assert!(cached > 0);
    is(
        "warmroute_cached_prompt_tokens_total",
        &[model],
        cached as f64,
    )
    .await;
    is("warmroute_requests_in_flight", &[model], 0.0).await;
    is("warmroute_request_duration_seconds_count", &[model], 4.0).await;
    is("warmroute_time_to_first_token_seconds_count", &[model], 0.0).await;
    is("warmroute_worker_up", &[], 2.0).await;
    is("warmroute_worker_requests", &[], 0.0).await;
    assert!(
        cluster
            .metric("warmroute_worker_predicted_tokens", &[])
            .await
            > 0.0
    );

    let mut stream = cluster.open(CHAT, &body.replace("false", "true")).await;
    assert!(stream.rest().await.1);
    is("warmroute_time_to_first_token_seconds_count", &[model], 1.0).await;
    // Tokens that arrive together have no time between them.
    eventually("a time between tokens is counted", async || {
        let mut stream = cluster.open(CHAT, &body.replace("false", "true")).await;
        assert!(stream.rest().await.1);
        let name = "warmroute_inter_token_latency_seconds_count";
        cluster.metric(name, &[model]).await >= 1.0
    })
    .await;

    // A retry: the warm worker refuses.
    let place = usize::from(first.worker == "w1");
    let refuse = Faults {
        refuse: Some(503),
        ..Faults::default()
    };
    cluster.engines[place].fault(refuse).await;
    let (answer, decided) = cluster.post_decided(CHAT, &body).await;
    assert_eq!((answer.status, decided.tries), (200, 2));
    assert_ne!(decided.worker, first.worker);
    is("warmroute_retries_total", &["reason=\"refused\""], 1.0).await;
    assert_eq!(
        cluster.metric("warmroute_circuit_breaker_state", &[]).await,
        0.0
    );

    let page = cluster.admin("/metrics").await;
    assert_eq!(
        page.header("content-type"),
        "text/plain; version=0.0.4; charset=utf-8"
    );
    for line in page.text().lines() {
        let is_expected = ["warmroute_", "process_", "# "]
            .iter()
            .any(|start| line.starts_with(start));
        assert!(is_expected, "{line}");
    }
}

#[tokio::test]
async fn a_sleeping_engine_gets_nothing_until_it_wakes() {
    let cluster = Cluster::start(vec![fast(); 2], |config| {
        with(Policy::RoundRobin)(config);
        // Health checks alone would take long to take it down: it answers them.
        config.fleet.health.unhealthy_threshold = 1000;
    })
    .await;
    let asleep = Faults {
        asleep: true,
        ..Faults::default()
    };
    cluster.engines[0].fault(asleep).await;
    let error = async || {
        let fleet = client::get(cluster.router.admin, "/fleet").await.json();
        fleet["workers"][0]["last_error"].to_string()
    };
    eventually("the router sees that it sleeps", async || {
        error().await.contains("it sleeps")
    })
    .await;
    let before = cluster.engines[0].stats().await.finished;
    for _ in 0..6 {
        assert_eq!(
            cluster.post(CHAT, chat("hello", 2, false)).await.status,
            200
        );
    }
    assert_eq!(cluster.engines[0].stats().await.finished, before);
    cluster.engines[0].fault(Faults::default()).await;
    eventually("it is awake", async || {
        cluster.post(CHAT, chat("hello", 2, false)).await;
        cluster.engines[0].stats().await.finished > before
    })
    .await;
}

/// An engine that takes so many tokens of a prompt and its answer.
fn taking(tokens: u32) -> Settings {
    Settings {
        context_tokens_max: tokens.try_into().unwrap(),
        ..fast()
    }
}

/// Two engines, of which the first takes short prompts only, and a router that takes a token for so many bytes.
async fn short_and_long(bytes_per_token: f64) -> Cluster {
    Cluster::start(vec![taking(1_024), taking(16_384)], |config| {
        config.predicted.bytes_per_token = bytes_per_token;
    })
    .await
}

async fn sent_on(cluster: &Cluster) -> f64 {
    let reason = ["reason=\"context_too_short\""];
    cluster.metric("warmroute_retries_total", &reason).await
}

/// A chat with a prompt of about so many tokens of the simulated engines.
fn long_chat(number: usize, tokens: usize, max_tokens: usize) -> String {
    chat(
        &format!("{number:04} ").repeat(tokens * 4 / 5),
        max_tokens,
        false,
    )
}

#[tokio::test]
async fn a_prompt_goes_where_its_context_fits() {
    let cluster = short_and_long(4.0).await;
    let long = &cluster.engines[1];
    // Room is needed for the answer that is asked for, however short it turns out to be.
    long.fault(Faults {
        stop_at_once: true,
        ..Faults::default()
    })
    .await;
    for number in 0..10 {
        // Neither the prompt nor the answer that it asks for has room at the first one.
        for (tokens, max_tokens) in [(3_000, 5), (200, 2_000)] {
            let body = long_chat(number, tokens, max_tokens);
            let answer = cluster.post(CHAT, body).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
        }
    }
    assert_eq!(long.stats().await.finished, 20);
    assert_eq!(sent_on(&cluster).await, 0.0);
    let models = client::get(cluster.router.api, "/v1/models").await.json();
    assert_eq!(models["data"][0]["max_model_len"], 16_384);
    // What fits nowhere is answered as the engine says it.
    let answer = cluster.post(CHAT, long_chat(0, 40_000, 5)).await;
    assert_eq!(answer.status, 400);
    let text = answer.text();
    assert!(text.contains("maximum context length is 16384"), "{text}");
}

#[tokio::test]
async fn an_engine_that_restarted_with_a_shorter_context_gets_no_long_prompts() {
    let mut cluster = short_and_long(4.0).await;
    for (engine, tokens) in [(1, 1_024), (0, 16_384)] {
        cluster.engines[engine].restart(taking(tokens)).await;
        eventually("the longest context is known", async || {
            let models = cluster.get("/v1/models").await.json();
            models["data"][0]["max_model_len"] == tokens
        })
        .await;
        cluster.all_up().await;
    }
    for number in 0..10 {
        let (answer, decided) = cluster
            .post_decided(CHAT, &long_chat(number, 3_000, 5))
            .await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(decided.worker, "w0");
    }
    assert_eq!(sent_on(&cluster).await, 0.0);
}

#[tokio::test]
async fn a_prompt_that_is_longer_than_estimated_is_sent_on_to_where_it_fits() {
    let cluster = short_and_long(9.0).await;
    for number in 0..10 {
        let answer = cluster.post(CHAT, long_chat(number, 1_500, 5)).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    let retries = sent_on(&cluster).await;
    assert!(retries >= 1.0, "{retries}");
    for engine in &cluster.engines {
        let row = cluster.worker(&engine.name).await;
        assert_eq!(row["circuit_breaker"], "closed");
    }
    // Any other fault of a request is told once, and of a short prompt nothing is supposed.
    let bad = json!({"model": "sim", "messages": "none", "max_tokens": 5}).to_string();
    assert_eq!(cluster.post(CHAT, bad).await.status, 400);
    assert_eq!(sent_on(&cluster).await, retries);
}
