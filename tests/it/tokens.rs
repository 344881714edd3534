//! Routing by token ids: every API is matched against the KV events of the engines, and tokenization never delays a
//! request longer than configured.

mod input_tokens;
mod messages;
mod over_chat;

use std::time::Duration;

use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;
use warmroute::config::{Config, From, ModelOverride, Tokenizer};
use warmroute::fleet::discovery::WorkerSpec;
use warmroute::fleet::events;
use warmroute::responses::Mode;
use warmroute::sim::fault::Faults;
use warmroute::sim::worker::Settings;
use xxhash_rust::xxh3::xxh3_64;

use crate::client;
use crate::cluster::{Cluster, Engine, Router, chat, config, eventually, telling};

/// A temporary model folder, removed after the test.
#[derive(Debug)]
struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
        for (from, to) in [
            ("tokenizers/qwen2.json", "tokenizer.json"),
            ("templates/chatml.jinja", "chat_template.jinja"),
        ] {
            std::fs::copy(fixtures.join(from), folder.path().join(to)).unwrap();
        }
        Self(folder)
    }

    fn engine(&self) -> Settings {
        Settings {
            tokenizer: Some(self.0.path().to_owned()),
            ..telling()
        }
    }

    fn model(&self) -> ModelOverride {
        model(Tokenizer {
            path: self.0.path().display().to_string(),
            ..Tokenizer::default()
        })
    }
}

fn model(tokenizer: Tokenizer) -> ModelOverride {
    ModelOverride {
        name: "sim".to_owned(),
        tokenizer: Some(tokenizer),
        ..ModelOverride::default()
    }
}

fn tokenized_by_engine() -> ModelOverride {
    model(Tokenizer {
        from: From::Engine,
        ..Tokenizer::default()
    })
}

/// An engine on a busy machine has time to count.
fn patient(config: &mut Config) {
    config.tokenization.advanced.engine.timeout = Duration::from_secs(20);
}

/// A router that follows the KV events of these engines.
async fn cluster_with_events(
    engines: Vec<Settings>,
    model: ModelOverride,
    change: impl FnOnce(&mut Config),
) -> Cluster {
    let mut config = config();
    config.kv_events.advanced.unconfirmed.grace_period = Duration::ZERO;
    config.models = vec![model];
    let mut started = Vec::new();
    for (index, settings) in engines.into_iter().enumerate() {
        let engine = Engine::here(&format!("w{index}"), settings).await;
        let at = &engine.events[0];
        config.workers.push(WorkerSpec {
            events: Some(events::EventsSpec {
                from: events::From::Zmq,
                endpoint: format!("tcp://{}", at.events),
                replay: at.replay.map(|at| format!("tcp://{at}")).unwrap(),
                ..events::EventsSpec::default()
            }),
            ..engine.listed()
        });
        started.push(engine);
    }
    change(&mut config);
    let cluster = Cluster {
        router: Router::here(&config).await,
        engines: started,
    };
    cluster.all_up().await;
    cluster
}

impl Cluster {
    /// Waits until the router's tree of an engine is live and has as many blocks as the engine's cache.
    async fn wait_for_kv_events(&self, worker_index: usize) {
        let engine = &self.engines[worker_index];
        let path = format!("/kv/blocks?worker={}&rank=0", engine.name);
        eventually("the tree is the cache", async || {
            let page = self.admin(&path).await;
            let held = engine.cache_contents(0).await.blocks.len();
            page.status == 200 && {
                let page = page.json();
                page["state"] == "live" && page["blocks"].as_array().unwrap().len() == held
            }
        })
        .await;
    }

    async fn explain(&self, path: &str, body: &str) -> Value {
        let answer = self
            .post_admin(&format!("/explain?path={path}"), body)
            .await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()
    }

    async fn post_to_engine(&self, worker_index: usize, path: &str, body: &str) -> Value {
        let answer = client::post(self.engines[worker_index].address, path, body.to_owned()).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()
    }
}

fn row<'p>(page: &'p Value, worker: &str) -> &'p Value {
    let mut rows = page["workers"].as_array().unwrap().iter();
    rows.find(|row| row["worker"] == worker).unwrap()
}

/// Bodies of every API. No two prompts share a prefix.
fn bodies(model: &str) -> [(&'static str, Value); 6] {
    let text = |of: &str| format!("{of}: once upon a time there was a router.\n").repeat(12);
    let tool = json!({"type": "function", "name": "find", "parameters": {"type": "object"}});
    [
        (
            "/v1/chat/completions",
            json!({"model": model, "max_tokens": 2, "messages": [
                {"role": "system", "content": text("A")},
                {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
                {"role": "assistant", "content": "Größe, 世界 and so on."},
                {"role": "user", "content": text("and")}]}),
        ),
        (
            "/v1/chat/completions",
            json!({"model": model, "max_tokens": 2, "add_generation_prompt": false,
                "cache_salt": "s", "messages": [{"role": "system", "content": text("B")}]}),
        ),
        (
            "/v1/completions",
            json!({"model": model, "max_tokens": 2, "prompt": text("C")}),
        ),
        (
            "/v1/completions",
            json!({"model": model, "max_tokens": 2, "prompt": (7..90).collect::<Vec<u32>>()}),
        ),
        (
            "/v1/responses",
            json!({"model": model, "max_output_tokens": 2, "input": text("D"),
                "instructions": text("E"), "tools": [tool]}),
        ),
        (
            "/v1/responses",
            json!({"model": model, "max_output_tokens": 2, "input": [
                {"role": "system", "content": text("F")},
                {"type": "function_call", "call_id": "c", "name": "find", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": text("found")}]}),
        ),
    ]
}

fn prompt_tokens(answer: &Value) -> u64 {
    let usage = &answer["usage"];
    let tokens = usage["prompt_tokens"].as_u64();
    tokens.or_else(|| usage["input_tokens"].as_u64()).unwrap()
}

/// Checks for every API that the router knows the cached prefix exactly, to the token.
async fn check_exact_cached_tokens(cluster: &Cluster, model: &str) {
    for (index, (path, body)) in bodies(model).into_iter().enumerate() {
        let body = body.to_string();
        let owner = index % cluster.engines.len();
        // Sent without the router, so that it learns of the blocks by events only.
        let answer = cluster.post_to_engine(owner, path, &body).await;
        cluster.wait_for_kv_events(owner).await;
        let tokens = prompt_tokens(&answer);
        // The engine computes at least the last token.
        let held = (tokens - 1) / 16 * 16;
        assert!(held >= 48, "{path}: {tokens} tokens are too few");
        let page = cluster.explain(path, &body).await;
        assert_eq!(page["prompt_tokens"], tokens, "{path}, {body}");
        for (position, engine) in cluster.engines.iter().enumerate() {
            let row = row(&page, &engine.name);
            let expected = if engine.name == cluster.engines[owner].name {
                held
            } else {
                0
            };
            assert_eq!(row["cached_tokens"], expected, "{path}, {body}: {page:#}");
            // An engine that was not asked yet has stored nothing: its tree may still begin.
            let was_asked = position <= index;
            assert!(!was_asked || row["known_by"] == "exact", "{path}: {page:#}");
        }
        let (answer, decided) = cluster.post_decided(path, &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(decided.worker, format!("w{owner}"), "{path}");
        assert_eq!(decided.reason, "longest_prefix", "{path}");
        assert_eq!(decided.cached_tokens, held, "{path}");
    }
}

#[tokio::test]
async fn every_api_is_routed_by_kv_events() {
    let folder = Folder::new();
    let cluster = cluster_with_events(vec![folder.engine(); 3], folder.model(), |_| {}).await;
    check_exact_cached_tokens(&cluster, "sim").await;
    let count = |source: &'static str| {
        let label = format!("source=\"{source}\"");
        let cluster = &cluster;
        async move {
            cluster
                .metric("warmroute_tokenization_duration_seconds_count", &[&label])
                .await
        }
    };
    // Each body except the one with token ids was explained once and sent once.
    assert_eq!(count("inline").await, 10.0);
    assert_eq!(count("pool").await, 0.0);
    let outcome = cluster.metric(
        "warmroute_tokenizer_prompts_total",
        &["outcome=\"complete\""],
    );
    assert_eq!(outcome.await, 10.0);
    let hits = cluster.metric(
        "warmroute_tokenizer_cache_lookup_bytes_total",
        &["result=\"hit\""],
    );
    assert!(hits.await > 1_000.0, "pieces are cached the second time");
}

#[tokio::test]
async fn an_adapter_uses_the_tokenizer_of_its_base() {
    let folder = Folder::new();
    let settings = Settings {
        models: vec!["sim".to_owned(), "sql".to_owned()],
        ..folder.engine()
    };
    let cluster = cluster_with_events(vec![settings; 2], folder.model(), |_| {}).await;
    check_exact_cached_tokens(&cluster, "sql").await;
}

#[tokio::test]
async fn the_next_turn_goes_to_the_worker_of_the_conversation() {
    let folder = Folder::new();
    let cluster = cluster_with_events(vec![folder.engine(); 3], folder.model(), |_| {}).await;
    let mut messages = vec![json!({"role": "system", "content": "Be brief. ".repeat(40)})];
    let mut home = None;
    for turn in 0..6 {
        messages
            .push(json!({"role": "user", "content": format!("{turn} tell me more ").repeat(9)}));
        let body = json!({"model": "sim", "max_tokens": 3, "messages": messages}).to_string();
        let (answer, decided) = cluster.post_decided("/v1/chat/completions", &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let worker = home.get_or_insert(decided.worker.clone()).clone();
        assert_eq!(decided.worker, worker, "turn {turn}");
        if turn > 0 {
            assert!(decided.cached_tokens > 0, "turn {turn}");
        }
        cluster
            .wait_for_kv_events(worker[1..].parse().unwrap())
            .await;
        let said = answer.json()["choices"][0]["message"]["content"].clone();
        messages.push(json!({"role": "assistant", "content": said}));
    }
}

fn image(text: &str) -> String {
    json!({"model": "sim", "max_tokens": 1, "messages": [
        {"role": "system", "content": "You look at pictures. ".repeat(30)},
        {"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            {"type": "text", "text": text}]}]})
    .to_string()
}

#[tokio::test]
async fn cached_tokens_are_exact_before_an_image_and_predicted_after() {
    let folder = Folder::new();
    let cluster = cluster_with_events(vec![folder.engine(); 2], folder.model(), |_| {}).await;
    let path = "/v1/chat/completions";
    let long = "What is this? ".repeat(200);
    // Both engines cache the text before the image. The router knows that from events only.
    for index in 0..2 {
        cluster.post_to_engine(index, path, &image("x")).await;
        cluster.wait_for_kv_events(index).await;
    }
    let page = cluster.explain(path, &image(&long)).await;
    let before = row(&page, "w0")["cached_tokens"].as_u64().unwrap();
    assert!(before >= 48, "{page:#}");
    for worker in ["w0", "w1"] {
        assert_eq!(row(&page, worker)["cached_tokens"], before, "{page:#}");
        assert_eq!(row(&page, worker)["known_by"], "exact", "{page:#}");
    }
    let (answer, decided) = cluster.post_decided(path, &image(&long)).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    // The router predicts that the worker now caches the rest as well.
    let page = cluster.explain(path, &image(&long)).await;
    for worker in ["w0", "w1"] {
        let row = row(&page, worker);
        let is_there = worker == decided.worker;
        assert_eq!(
            row["cached_tokens"].as_u64().unwrap() > before,
            is_there,
            "{page:#}"
        );
        let known_by = if is_there { "predicted" } else { "exact" };
        assert_eq!(row["known_by"], known_by, "{page:#}");
    }
    let part = cluster.metric(
        "warmroute_tokenizer_prompts_total",
        &["outcome=\"partial\""],
    );
    assert_eq!(part.await, 3.0);
}

/// The ids that an engine renders for a body.
async fn ids(cluster: &Cluster, path: &str, body: &str) -> Vec<u64> {
    let answer = cluster
        .post_to_engine(0, &format!("{path}/render"), body)
        .await;
    let ids = answer["token_ids"].as_array().unwrap().iter();
    ids.map(|id| id.as_u64().unwrap()).collect()
}

#[tokio::test]
async fn send_tokens_adds_token_ids_to_chats_and_responses() {
    let folder = Folder::new();
    let settings = Settings {
        enable_scale_out: true,
        ..folder.engine()
    };
    let model = ModelOverride {
        send_token_ids: Some(true),
        ..folder.model()
    };
    // In pass-through mode the router does not rewrite the body of a Responses request.
    let passing = |config: &mut Config| config.responses.mode = Mode::PassThrough;
    let cluster = cluster_with_events(vec![settings], model, passing).await;
    for (path, body) in bodies("sim") {
        let body = format!(" {body} \n");
        let answer = cluster.post(path, body.clone()).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let last = cluster.engines[0].last_post().await;
        let expected = match path {
            "/v1/completions" => body,
            _ => {
                let ids = json!(ids(&cluster, path, &body).await);
                let fields = &body[..body.trim_end().len() - 1];
                format!("{fields},\"kv_transfer_params\":{{\"prompt_token_ids\":{ids}}}}}")
            }
        };
        assert_eq!(last.path, path);
        let hash = format!("{:016x}", xxh3_64(expected.as_bytes()));
        assert_eq!(last.body_xxh3, hash, "{path}: {expected}");
    }
    // Not sent if they are incomplete, or if the engine would ignore them (`echo`).
    let echo = json!({"model": "sim", "max_tokens": 1, "echo": true,
        "messages": [{"role": "user", "content": "hi"}]});
    for body in [image("x"), echo.to_string()] {
        let answer = cluster.post("/v1/chat/completions", body.clone()).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let last = cluster.engines[0].last_post().await;
        assert_eq!(last.body_bytes, body.len(), "{body}");
    }
    let own = json!({"model": "sim", "messages": [{"role": "user", "content": "hi"}],
        "kv_transfer_params": {"prompt_token_ids": [1]}});
    let answer = cluster.post("/v1/chat/completions", own.to_string()).await;
    assert_eq!(answer.status, 400, "{}", answer.text());
    assert!(answer.text().contains("kv_transfer_params"));
}

/// A body with random text, which no cache has.
fn long(bytes: usize) -> String {
    let mut text = String::with_capacity(bytes + 20);
    while text.len() < bytes {
        text.push_str(&format!("{:x} ", fastrand::u64(..)));
    }
    json!({"model": "sim", "max_tokens": 1, "prompt": text}).to_string()
}

#[tokio::test]
async fn a_long_prompt_does_not_delay_others() {
    let folder = Folder::new();
    let cluster = cluster_with_events(vec![folder.engine()], folder.model(), |config| {
        config.runtime.threads = 1;
        config.tokenization.advanced.pool.timeout = Duration::from_secs(60);
    })
    .await;
    let explained = async {
        let answer = cluster.post("/v1/completions", long(6 << 20)).await;
        // Longer than the engine's context, which the engine finds by tokenizing it.
        assert_eq!(answer.status, 400, "{}", answer.text());
        assert!(answer.text().contains("tokens"), "{}", answer.text());
        cluster
            .metric(
                "warmroute_tokenization_duration_seconds_count",
                &["source=\"pool\""],
            )
            .await
    };
    let mut explained = Box::pin(explained);
    let mut others = 0;
    loop {
        let other = cluster.post("/v1/chat/completions", crate::cluster::chat("hi", 1, false));
        tokio::select! {
            tokenized = &mut explained => {
                assert_eq!(tokenized, 1.0);
                break;
            }
            answer = other => {
                assert_eq!(answer.status, 200);
                others += 1;
            }
        }
    }
    assert!(others > 5, "only {others} others were answered meanwhile");
}

#[tokio::test]
async fn a_full_pool_or_a_slow_one_falls_back_to_prediction() {
    let folder = Folder::new();
    let cluster = cluster_with_events(vec![folder.engine()], folder.model(), |config| {
        config.tokenization.advanced.pool.threads = 1;
        config.tokenization.advanced.pool.max_queued = 1;
        config.tokenization.advanced.pool.timeout = Duration::from_millis(1);
    })
    .await;
    let fallbacks = async |reason: &str| {
        let label = format!("reason=\"{reason}\"");
        cluster
            .metric("warmroute_tokenization_fallbacks_total", &[&label])
            .await
    };
    eventually(
        "some requests found the queue full, and some timed out",
        async || {
            let mut running = tokio::task::JoinSet::new();
            for _ in 0..6 {
                let (at, body) = (cluster.router.api, long(1 << 20));
                running
                    .spawn(async move { client::post(at, "/v1/completions", body).await.status });
            }
            // Refused by the engine: the prompts are longer than its context.
            let statuses = running.join_all().await;
            assert!(statuses.iter().all(|status| *status == 400), "{statuses:?}");
            fallbacks("queue_full").await > 0.0 && fallbacks("timeout").await > 0.0
        },
    )
    .await;
}

#[tokio::test]
async fn engines_tokenize_for_models_without_a_folder() {
    let folder = Folder::new();
    let settings = Settings {
        enable_scale_out: true,
        ..folder.engine()
    };
    let cluster = cluster_with_events(vec![settings; 2], tokenized_by_engine(), patient).await;
    check_exact_cached_tokens(&cluster, "sim").await;
    let count = async |source: &str| {
        let label = format!("source=\"{source}\"");
        cluster
            .metric("warmroute_tokenization_duration_seconds_count", &[&label])
            .await
    };
    // The second request of each body is answered from the cache.
    assert_eq!([count("engine").await, count("cache").await], [5.0, 5.0]);
}

#[tokio::test]
async fn without_render_endpoints_tokenize_is_used() {
    let folder = Folder::new();
    let cluster = cluster_with_events(vec![folder.engine()], tokenized_by_engine(), patient).await;
    for (path, body) in bodies("sim") {
        let body = body.to_string();
        let answer = cluster.post_to_engine(0, path, &body).await;
        cluster.wait_for_kv_events(0).await;
        let page = cluster.explain(path, &body).await;
        let expected = match path {
            "/v1/responses" => "predicted",
            _ => "exact",
        };
        assert_eq!(row(&page, "w0")["known_by"], expected, "{path}: {page:#}");
        if expected == "exact" {
            assert_eq!(page["prompt_tokens"], prompt_tokens(&answer), "{path}");
        }
    }
    let label = ["reason=\"engine_unsupported\""];
    assert_eq!(
        cluster
            .metric("warmroute_tokenization_fallbacks_total", &label)
            .await,
        2.0
    );
}

#[tokio::test]
async fn a_slow_tokenizing_engine_delays_nobody() {
    let folder = Folder::new();
    let settings = Settings {
        faults: Faults {
            slow_tokens_ms: 600_000,
            ..Faults::default()
        },
        ..folder.engine()
    };
    let cluster = cluster_with_events(vec![settings], tokenized_by_engine(), |_| {}).await;
    for number in 0..6 {
        let body = crate::cluster::chat(&format!("{number}"), 1, false);
        let answer = cluster.post("/v1/chat/completions", body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    let fallbacks = async |reason: &str| {
        let label = format!("reason=\"{reason}\"");
        cluster
            .metric("warmroute_tokenization_fallbacks_total", &[&label])
            .await
    };
    // The circuit breaker opens after three failures in a row.
    assert_eq!(
        [
            fallbacks("engine_timeout").await,
            fallbacks("engine_circuit_open").await
        ],
        [3.0, 3.0]
    );
}

#[tokio::test]
async fn what_kv_events_report_is_predicted_only_if_its_tokens_may_come_late() {
    let folder = Folder::new();
    // A long text waits for a thread.
    for (times, is_predicted) in [(40, false), (800, true)] {
        let cluster = cluster_with_events(vec![folder.engine()], folder.model(), |_| {}).await;
        let path = "/v1/chat/completions";
        cluster
            .post_to_engine(0, path, &chat(&"others ".repeat(40), 2, false))
            .await;
        cluster.wait_for_kv_events(0).await;
        let body = chat(&"some words of a prompt ".repeat(times), 2, false);
        assert_eq!(cluster.post(path, body).await.status, 200);
        let blocks = cluster.worker("w0").await["predicted_blocks"].as_u64();
        assert_eq!(blocks.unwrap() > 0, is_predicted, "{times}");
    }
}

#[tokio::test]
async fn what_a_template_refuses_is_said_of_the_request_counted_and_logged_once() {
    let folder = Folder::new();
    let template = "{% if tools %}{{ raise_exception('No tools, please.') }}{% endif %}\
                    {% for m in messages %}{{ m.content }}{% endfor %}";
    std::fs::write(folder.0.path().join("chat_template.jinja"), template).unwrap();
    let cluster = Cluster::with_router_child(vec![telling()], |config| {
        config.models = vec![folder.model()];
    })
    .await;
    let path = "/v1/chat/completions";
    let plain = chat("What is the weather?", 1, false);
    let mut with_tools: Value = serde_json::from_str(&plain).unwrap();
    with_tools["tools"] =
        json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
    let with_tools = with_tools.to_string();

    let page = cluster.explain(path, &plain).await;
    assert_eq!(page["tokens_known"], true, "{page:#}");
    assert!(page.get("tokens_unknown_reason").is_none(), "{page:#}");
    let page = cluster.explain(path, &with_tools).await;
    assert_eq!(page["tokens_known"], false, "{page:#}");
    let why = page["tokens_unknown_reason"].as_str().unwrap_or_default();
    assert!(why.contains("No tools, please."), "{page:#}");

    let refused = async || {
        cluster
            .metric(
                "warmroute_tokenizer_prompts_total",
                &["outcome=\"refused\""],
            )
            .await
    };
    let before = refused().await;
    for _ in 0..3 {
        let answer = cluster.post(path, with_tools.clone()).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    assert_eq!(refused().await, before + 3.0);
    let answer = cluster.post(path, plain).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(refused().await, before + 3.0);
    let said = || {
        let log = cluster.router.log();
        let lines = log.lines().map(str::to_owned);
        let said = lines.filter(|line| line.contains("a request cannot be tokenized"));
        said.collect::<Vec<String>>()
    };
    eventually("the log says it", async || !said().is_empty()).await;
    let said = said();
    assert_eq!(said.len(), 1, "{said:?}");
    for part in ["WARN", "\"model\":\"sim\"", "No tools, please."] {
        assert!(said[0].contains(part), "{said:?}");
    }
}
