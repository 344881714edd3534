//! Streams that begin or end oddly: what came before the first token is not the answer, and an end that only lacks its last
//! event is one.

use std::time::Duration;

use warmroute::config::Config;
use warmroute::fleet::discovery::WorkerSpec;
use warmroute::openai::tenant::TenantSpec;
use warmroute::secret::Secret;

use crate::client::{self, Answer};
use crate::cluster::{Engine, Router, chat, eventually, fast};
use crate::stub::Stub;

const CHAT: &str = "/v1/chat/completions";
const ROLE: &str = r#"{"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#;
const TOKEN: &str =
    r#"{"id":"c","choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":null}]}"#;
const STOP: &str = r#"{"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}"#;
const USAGE: &str = r#"{"id":"c","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}"#;
const ABORT: &str = r#"{"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}"#;
const ERROR: &str = r#"{"error":{"message":"EngineCore encountered an issue","type":"InternalServerError","code":500}}"#;
const REFUSAL: &str =
    r#"{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}"#;

const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n";

/// An answer whose body ends as it should.
fn stream(lines: &[&str]) -> String {
    format!("{HEAD}{}0\r\n\r\n", chunk(lines))
}

fn chunk(lines: &[&str]) -> String {
    let events = lines.iter().map(|line| {
        if line.starts_with(':') {
            format!("{line}\n\n")
        } else {
            format!("data: {line}\n\n")
        }
    });
    let body = events.collect::<String>();
    match body.len() {
        0 => String::new(),
        size => format!("{size:x}\r\n{body}\r\n"),
    }
}

async fn router(stubs: &[&Stub]) -> Router {
    router_with(stubs, |_| {}).await
}

async fn router_with(stubs: &[&Stub], change: impl FnOnce(&mut Config)) -> Router {
    let others: Vec<WorkerSpec> = stubs[1..].iter().map(|stub| spec(stub)).collect();
    let router = stubs[0].router(|config| {
        config.workers.extend(others);
        change(config);
    });
    let router = router.await;
    eventually("all are up", async || {
        let fleet = client::get(router.admin, "/fleet").await.json();
        let workers = fleet["workers"].as_array().unwrap();
        workers
            .iter()
            .filter(|worker| worker["health"] == "up")
            .count()
            == stubs.len()
    })
    .await;
    router
}

fn spec(stub: &Stub) -> WorkerSpec {
    WorkerSpec {
        url: format!("http://{}", stub.address),
        ..WorkerSpec::default()
    }
}

async fn post(router: &Router) -> Answer {
    client::send(router.api, "POST", CHAT, &[], chat("hello", 5, true)).await
}

async fn outcomes(router: &Router, outcome: &str) -> f64 {
    let page = client::get(router.admin, "/metrics").await;
    let page = page.text();
    let label = format!("outcome=\"{outcome}\"");
    let lines = page
        .lines()
        .filter(|line| line.starts_with("warmroute_requests_total{") && line.contains(&label));
    let values = lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    values.sum()
}

#[tokio::test]
async fn what_fails_before_its_first_token_is_tried_at_another_worker() {
    for bad in [
        stream(&[ERROR, "[DONE]"]),
        stream(&[": ping", ROLE, ERROR, "[DONE]"]),
        stream(&[": ping", ROLE]),
        stream(&[]),
        // An engine that is shut down.
        stream(&[ROLE, ABORT, USAGE, "[DONE]"]),
        stream(&[ROLE, USAGE, "[DONE]"]),
        // One that ended before it began.
        stream(&["[DONE]"]),
        stream(&[": ping", "[DONE]"]),
        stream(&[USAGE, "[DONE]"]),
    ] {
        let bad = Stub::start(bad).await;
        let good = Stub::start(stream(&[ROLE, TOKEN, STOP, "[DONE]"])).await;
        let router = router(&[&bad, &good]).await;
        for _ in 0..6 {
            let answer = post(&router).await;
            assert_eq!(answer.status, 200);
            assert!(answer.text().contains("\"hi\""), "{}", answer.text());
            assert!(!answer.text().contains("error"), "{}", answer.text());
            assert!(answer.text().ends_with("data: [DONE]\n\n"));
        }
        assert_eq!(outcomes(&router, "complete").await, 6.0);
    }
}

#[tokio::test]
async fn an_end_of_nothing_is_no_answer() {
    for bad in [stream(&["[DONE]"]), stream(&[": ping", "[DONE]"])] {
        let bad = Stub::start(bad).await;
        let router = router(&[&bad]).await;
        let answer = post(&router).await;
        let text = answer.text();
        assert!(text.contains("engine_stream_broken"), "{text}");
        assert_eq!(text.matches("[DONE]").count(), 1, "{text}");
        assert_eq!(outcomes(&router, "worker_failed").await, 1.0);
    }
}

#[tokio::test]
async fn an_answer_that_an_engine_gives_up_ends_with_an_error() {
    for bad in [
        stream(&[ROLE, TOKEN, ABORT, USAGE, "[DONE]"]),
        stream(&[ROLE, TOKEN, USAGE, "[DONE]"]),
    ] {
        let bad = Stub::start(bad).await;
        let router = router(&[&bad]).await;
        let answer = post(&router).await;
        let text = answer.text();
        assert!(text.contains("\"hi\""), "{text}");
        assert!(!text.contains("abort"), "{text}");
        assert!(text.contains("engine_stream_broken"), "{text}");
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
        assert_eq!(text.matches("[DONE]").count(), 1, "{text}");
        assert_eq!(outcomes(&router, "worker_failed").await, 1.0);
    }
}

#[tokio::test]
async fn a_whole_answer_that_an_engine_gives_up_is_asked_of_another() {
    let whole = |reason: &str| {
        let body = format!(
            r#"{{"choices":[{{"message":{{"content":"{reason}"}},"finish_reason":"{reason}"}}],"usage":{{"prompt_tokens":1,"completion_tokens":1}}}}"#
        );
        let size = body.len();
        format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {size}\r\nconnection: close\r\n\r\n{body}"
        )
    };
    let bad = Stub::start(whole("abort")).await;
    let good = Stub::start(whole("stop")).await;
    let router = router(&[&bad, &good]).await;
    for _ in 0..6 {
        let body = chat("hello", 5, false);
        let answer = client::send(router.api, "POST", CHAT, &[], body).await;
        assert_eq!(answer.status, 200);
        assert!(answer.text().contains("stop"), "{}", answer.text());
    }
}

/// What vLLM 0.32 sent to requests that ran when it got SIGTERM: path, stream, whole answer.
const SHUT_DOWN: [(&str, &str, &str); 3] = [
    (
        CHAT,
        include_str!("../fixtures/vllm-0.32-shutdown/chat_completions_stream.txt"),
        include_str!("../fixtures/vllm-0.32-shutdown/chat_completions_whole.txt"),
    ),
    (
        "/v1/completions",
        include_str!("../fixtures/vllm-0.32-shutdown/completions_stream.txt"),
        include_str!("../fixtures/vllm-0.32-shutdown/completions_whole.txt"),
    ),
    (
        "/v1/messages",
        include_str!("../fixtures/vllm-0.32-shutdown/messages_stream.txt"),
        include_str!("../fixtures/vllm-0.32-shutdown/messages_whole.txt"),
    ),
];

fn asking(path: &str, stream: bool) -> String {
    let mut body = serde_json::json!({"model": "sim", "max_tokens": 5, "stream": stream});
    match path {
        "/v1/completions" => body["prompt"] = "hello".into(),
        _ => body["messages"] = serde_json::json!([{"role": "user", "content": "hello"}]),
    }
    body.to_string()
}

#[tokio::test]
async fn a_real_vllm_that_is_shut_down_ends_no_stream() {
    for (path, events, _) in SHUT_DOWN {
        // Cut within events, too.
        for size in [events.len(), 1_000] {
            let mut sent = HEAD.as_bytes().to_vec();
            for piece in events.as_bytes().chunks(size) {
                sent.extend(format!("{:x}\r\n", piece.len()).into_bytes());
                sent.extend(piece);
                sent.extend(b"\r\n");
            }
            sent.extend(b"0\r\n\r\n");
            let bad = Stub::start(sent).await;
            let router = router(&[&bad]).await;
            let answer = client::send(router.api, "POST", path, &[], asking(path, true)).await;
            let text = answer.text();
            assert_eq!(answer.status, 200);
            assert!(!text.contains("abort"), "{path}: {text}");
            assert!(!text.contains("event: message_stop"), "{path}: {text}");
            assert!(text.contains("before the answer's end"), "{path}: {text}");
            eventually("it is counted", async || {
                outcomes(&router, "worker_failed").await == 1.0
            })
            .await;
        }
    }
}

#[tokio::test]
async fn a_whole_answer_of_a_real_vllm_that_is_shut_down_is_asked_of_another() {
    for (path, _, answer) in SHUT_DOWN {
        let size = answer.len();
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close";
        let bad = Stub::start(format!("{head}\r\ncontent-length: {size}\r\n\r\n{answer}")).await;
        let good = Engine::here("good", fast()).await;
        let router = bad
            .router(|config| config.workers.push(good.listed()))
            .await;
        eventually("all are up", async || {
            let fleet = client::get(router.admin, "/fleet").await.json();
            let workers = fleet["workers"].as_array().unwrap();
            workers.iter().all(|worker| worker["health"] == "up") && workers.len() == 2
        })
        .await;
        let mut tries = 0;
        for number in 0..20 {
            let headers = [("x-warmroute-decision", "1")];
            // What was answered before draws none of them to its worker.
            let body = asking(path, false).replace("hello", &format!("{number} hello"));
            let answer = client::send(router.api, "POST", path, &headers, body).await;
            assert_eq!(answer.status, 200, "{path}: {}", answer.text());
            let decided = answer.header("x-warmroute-decision");
            assert!(decided.contains("worker=good"), "{path}: {decided}");
            tries += usize::from(decided.contains("attempts=2"));
        }
        assert!(tries > 0, "{path}: the other was never asked");
    }
}

#[tokio::test]
async fn what_the_engine_refuses_in_its_stream_is_refused_once() {
    let refuses = Stub::start(stream(&[REFUSAL, "[DONE]"])).await;
    let other = Stub::start(stream(&[REFUSAL, "[DONE]"])).await;
    let router = router(&[&refuses, &other]).await;
    let answer = post(&router).await;
    assert!(answer.text().contains("too long"), "{}", answer.text());
    let posts = async || outcomes(&router, "complete").await;
    eventually("it is counted", async || posts().await == 1.0).await;
}

#[tokio::test]
async fn an_error_of_the_engine_within_a_stream_is_a_failed_request() {
    for lines in [&[ERROR, "[DONE]"][..], &[ROLE, TOKEN, ERROR, "[DONE]"]] {
        let only = Stub::start(stream(lines)).await;
        let router = router(&[&only]).await;
        let answer = post(&router).await;
        assert!(answer.text().contains("EngineCore"), "{}", answer.text());
        eventually("it is counted", async || {
            outcomes(&router, "worker_failed").await == 1.0
        })
        .await;
        assert_eq!(outcomes(&router, "complete").await, 0.0);
    }
}

#[tokio::test]
async fn a_stream_that_lacks_only_its_last_event_is_complete() {
    let engine = Stub::start(stream(&[ROLE, TOKEN, STOP])).await;
    let router = router(&[&engine]).await;
    for _ in 0..6 {
        let answer = post(&router).await;
        assert!(!answer.text().contains("error"), "{}", answer.text());
        assert!(answer.text().ends_with("\"stop\"}]}\n\ndata: [DONE]\n\n"));
    }
    assert_eq!(outcomes(&router, "complete").await, 6.0);
}

#[tokio::test]
async fn a_stream_that_its_engine_aborts_is_not_complete() {
    let engine = Stub::start(stream(&[ROLE, TOKEN, ABORT])).await;
    let router = router(&[&engine]).await;
    let answer = post(&router).await;
    assert!(
        answer.text().contains("engine_stream_broken"),
        "{}",
        answer.text()
    );
    assert_eq!(outcomes(&router, "complete").await, 0.0);
}

#[tokio::test]
async fn a_silent_stream_gets_comments_for_its_client_until_it_is_given_up() {
    let begun = format!("{HEAD}{}", chunk(&[ROLE, TOKEN]));
    let engine = Stub::once(begun).await;
    let router = router_with(&[&engine], |config| {
        config.requests.keep_alive = Duration::from_millis(30);
        config.requests.stream_idle_timeout = Duration::from_secs(2);
    })
    .await;
    let answer = post(&router).await;
    let text = answer.text();
    let (answer, rest) = text.split_once(": keep-alive\n\n").unwrap();
    assert!(answer.ends_with("}\n\n"), "{answer}");
    assert!(rest.contains(": keep-alive\n\n"), "{rest}");
    assert!(rest.contains("engine_stream_broken"), "{rest}");
    assert_eq!(outcomes(&router, "stream_idle_timeout").await, 1.0);
}

#[tokio::test]
async fn comments_of_an_engine_that_hangs_are_no_progress() {
    // Before the first token, and after it.
    for begun in [chunk(&[": ping", ROLE]), chunk(&[ROLE, TOKEN])] {
        let engine = Stub::repeating(format!("{HEAD}{begun}"), chunk(&[": ping"])).await;
        let router = router_with(&[&engine], |config| {
            config.requests.max_attempts = 1;
            config.requests.first_byte_timeout = Duration::from_millis(500);
            config.requests.stream_idle_timeout = Duration::from_millis(500);
        })
        .await;
        let answer = post(&router).await;
        assert!(
            answer.status == 504 || answer.text().contains("engine_stream_broken"),
            "{}",
            answer.text()
        );
    }
}

#[tokio::test]
async fn usage_that_comes_in_two_pieces_is_read() {
    const USAGE: &str = r#"{"id":"c","choices":[],"usage":{"prompt_tokens":11,"completion_tokens":7,"total_tokens":18}}"#;
    let usage = format!("data: {USAGE}\n\n");
    let part = |text: &str| format!("{:x}\r\n{text}\r\n", text.len());
    for cut in [1, 20, usage.len() / 2, usage.len() - 1] {
        let (first, second) = usage.split_at(cut);
        let begun = chunk(&[ROLE, TOKEN, STOP]);
        let end = chunk(&["[DONE]"]);
        // They come one after the other; what follows the end is not read.
        let engine = Stub::repeating(
            format!("{HEAD}{begun}{}", part(first)),
            format!("{}{end}0\r\n\r\n", part(second)),
        )
        .await;
        let router = router_with(&[&engine], |config| {
            config.tenants = vec![TenantSpec {
                name: "t".to_owned(),
                keys: vec![Secret::new("k")],
                ..TenantSpec::default()
            }];
        })
        .await;
        let key = [("authorization", "Bearer k")];
        let answer = client::send(router.api, "POST", CHAT, &key, chat("hello", 5, true)).await;
        assert_eq!(answer.status, 200);
        eventually("it is counted", async || {
            let page = client::get(router.admin, "/metrics").await;
            let tokens = page
                .text()
                .lines()
                .filter(|line| line.starts_with("warmroute_usage_generation_tokens_total{"))
                .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
                .sum::<f64>();
            tokens == 7.0
        })
        .await;
    }
}
