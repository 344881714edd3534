//! A worker over real sockets.

#![expect(
    clippy::disallowed_methods,
    reason = "a test waits in real time, for tasks of its own"
)]

mod event_clients;
mod kv_events;
mod kv_faults;
mod transfer;
mod transfer_failures;

use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::*;

const CHAT: &str = r#"{"messages":[{"role":"user","content":"the same long question, again and again and again and again"}],"max_tokens":5}"#;

/// A running worker. Tests end it with `stop`, so that a task that never ends is noticed.
struct Running {
    addr: SocketAddr,
    handle: Handle,
    shutdown: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Running {
    async fn start(settings: Settings) -> Self {
        let worker = bind(settings).await.unwrap();
        let (shutdown, stopped) = oneshot::channel();
        Self {
            addr: worker.addr(),
            handle: worker.handle(),
            shutdown,
            task: tokio::spawn(worker.run(async {
                let _ = stopped.await;
            })),
        }
    }

    async fn fast() -> Self {
        Self::start(Settings {
            decode_ms: 1,
            ..Settings::default()
        })
        .await
    }

    async fn with_faults(faults: Faults) -> Self {
        let worker = Self::fast().await;
        worker.handle.set_faults(faults);
        worker
    }

    async fn stop(self) {
        self.shutdown.send(()).unwrap();
        self.task.await.unwrap();
    }

    /// Sends a request on a connection of its own.
    async fn send(&self, method: &str, path: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.addr).await.unwrap();
        write(&mut stream, method, path, body, "connection: close\r\n").await;
        stream
    }

    /// The whole answer, head and all, up to where the worker closes the connection.
    async fn ask(&self, method: &str, path: &str, body: &str) -> String {
        let mut stream = self.send(method, path, body).await;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    async fn post_json(&self, path: &str, body: &str) -> Value {
        let answer = self.ask("POST", path, body).await;
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {answer}"))
    }

    async fn eventually(&self, what: &str, holds: impl Fn(&Handle) -> bool) {
        let limit = Instant::now() + Duration::from_secs(10);
        while !holds(&self.handle) {
            assert!(Instant::now() < limit, "not within ten seconds: {what}");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

async fn write(stream: &mut TcpStream, method: &str, path: &str, body: &str, headers: &str) {
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: sim\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n{headers}\r\n{body}"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
}

/// Reads until the text is there; gives everything so far.
async fn read_until(stream: &mut TcpStream, wanted: &str) -> String {
    let mut text = String::new();
    while !text.contains(wanted) {
        let mut piece = [0; 4096];
        let count = stream.read(&mut piece).await.unwrap();
        assert!(count > 0, "closed before {wanted:?}: {text}");
        text.push_str(std::str::from_utf8(&piece[..count]).unwrap());
    }
    text
}

fn streamed(body: &str) -> String {
    body.replacen('{', r#"{"stream":true,"#, 1)
}

fn token_events(answer: &str) -> usize {
    answer.matches(r#""delta":{"content""#).count()
}

#[tokio::test]
async fn the_same_prompt_gets_the_same_text_and_is_cached_the_second_time() {
    let worker = Running::fast().await;
    let first = worker.post_json("/v1/chat/completions", CHAT).await;
    let second = worker.post_json("/v1/chat/completions", CHAT).await;
    let cached =
        |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    assert_eq!(cached(&first), Some(0));
    assert_eq!(cached(&second), Some(16));
    assert_eq!(first["choices"], second["choices"]);
    assert_eq!(first["usage"]["completion_tokens"], 5);
    worker.stop().await;
}

#[tokio::test]
async fn a_stream_has_an_event_for_each_token_and_says_the_same_as_the_whole_answer() {
    let worker = Running::fast().await;
    let whole = worker.post_json("/v1/chat/completions", CHAT).await;
    let stream = worker
        .ask("POST", "/v1/chat/completions", &streamed(CHAT))
        .await;
    assert!(stream.contains("content-type: text/event-stream; charset=utf-8\r\n"));
    assert_eq!(token_events(&stream), 5);
    let events = stream.split("\"delta\":{\"content\":\"").skip(1);
    let text: String = events
        .map(|event| event.split('"').next().unwrap())
        .collect();
    assert_eq!(text, whole["choices"][0]["message"]["content"]);
    assert!(
        stream.ends_with("\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"),
        "{stream}"
    );
    worker.stop().await;
}

#[tokio::test]
async fn what_a_response_would_read_is_rendered() {
    let worker = Running::start(Settings {
        enable_scale_out: true,
        decode_ms: 1,
        ..Settings::default()
    })
    .await;
    let body = r#"{"input":"a question","instructions":"be brief","model":"sim"}"#;
    let rendered = worker.post_json("/v1/responses/render", body).await;
    let answered = worker.post_json("/v1/responses", body).await;
    let tokens = rendered["token_ids"].as_array().unwrap().len();
    assert_eq!(answered["usage"]["input_tokens"], tokens);
    worker.stop().await;
}

#[tokio::test]
async fn a_response_reports_cached_tokens_and_its_own_id() {
    let worker = Running::fast().await;
    let body = r#"{"input":"a question that is long enough to fill at least one block","request_id":"a b/c"}"#;
    worker.post_json("/v1/responses", body).await;
    let second = worker.post_json("/v1/responses", body).await;
    assert_eq!(second["id"], "a b/c");
    assert_eq!(second["usage"]["input_tokens_details"]["cached_tokens"], 16);
    let stream = worker.ask("POST", "/v1/responses", &streamed(body)).await;
    assert_eq!(
        stream.matches("event: response.output_text.delta").count(),
        16
    );
    assert!(!stream.contains("[DONE]"));
    worker.stop().await;
}

#[tokio::test]
async fn a_client_that_leaves_takes_its_request_out_of_the_engine() {
    let worker = Running::fast().await;
    let endless = CHAT.replace("\"max_tokens\":5", "\"max_tokens\":30000");
    for body in [endless.clone(), streamed(&endless)] {
        let stream = worker.send("POST", "/v1/chat/completions", &body).await;
        worker
            .eventually("it runs", |handle| handle.gauges().running == 1)
            .await;
        drop(stream);
        worker
            .eventually("it is gone", |handle| handle.gauges() == Gauges::default())
            .await;
    }
    let stats = worker.handle.stats();
    assert_eq!((stats.aborted, stats.finished, stats.running), (2, 0, 0));
    worker.stop().await;
}

#[tokio::test]
async fn a_full_queue_is_answered_as_busy() {
    let worker = Running::start(Settings {
        queue_max: 0,
        ..Settings::default()
    })
    .await;
    let answer = worker.ask("POST", "/v1/chat/completions", CHAT).await;
    assert!(answer.starts_with("HTTP/1.1 503 "));
    assert!(answer.contains("The engine is currently busy"));
    assert_eq!(worker.handle.stats().refused, 1);
    worker.stop().await;
}

#[tokio::test]
async fn a_cut_stream_has_its_tokens_and_no_end() {
    let worker = Running::with_faults(Faults {
        cut_after_tokens: Some(2),
        ..Faults::default()
    })
    .await;
    let stream = worker
        .ask("POST", "/v1/chat/completions", &streamed(CHAT))
        .await;
    assert_eq!(token_events(&stream), 2);
    assert!(!stream.contains("[DONE]") && !stream.ends_with("0\r\n\r\n"));
    let whole = worker.ask("POST", "/v1/chat/completions", CHAT).await;
    assert_eq!(whole, "");
    worker
        .eventually("both are gone", |handle| handle.stats().aborted == 2)
        .await;
    worker.stop().await;
}

#[tokio::test]
async fn an_engine_error_comes_as_an_event_before_the_end() {
    let worker = Running::with_faults(Faults {
        error_after_tokens: Some(1),
        ..Faults::default()
    })
    .await;
    let stream = worker
        .ask("POST", "/v1/chat/completions", &streamed(CHAT))
        .await;
    assert_eq!(token_events(&stream), 1);
    assert!(stream.contains("data: {\"error\": {\"message\": \"EngineCore encountered"));
    assert!(stream.ends_with("data: [DONE]\n\n\r\n0\r\n\r\n"));
    let response = r#"{"input":"x","stream":true}"#;
    let stream = worker.ask("POST", "/v1/responses", response).await;
    assert!(!stream.contains("error") && !stream.ends_with("0\r\n\r\n"));
    worker.stop().await;
}

#[tokio::test]
async fn a_stalled_stream_stays_open_until_the_client_leaves() {
    let worker = Running::with_faults(Faults {
        stall_after_tokens: Some(3),
        ..Faults::default()
    })
    .await;
    let mut stream = worker
        .send("POST", "/v1/chat/completions", &streamed(CHAT))
        .await;
    worker
        .eventually("the engine is done", |handle| {
            handle.counters().finished == 1
        })
        .await;
    let mut answer = read_until(&mut stream, "chat.completion.chunk").await;
    let more = tokio::time::timeout(
        Duration::from_millis(100),
        stream.read_to_string(&mut answer),
    );
    more.await.expect_err("the stream has ended");
    assert_eq!(worker.handle.stats().running, 1);
    drop(stream);
    worker
        .eventually("the client is gone", |handle| handle.stats().aborted == 1)
        .await;
    worker.stop().await;
}

#[tokio::test]
async fn a_stalled_answer_goes_on_once_the_fault_is_off() {
    let worker = Running::with_faults(Faults {
        stall_after_tokens: Some(3),
        ..Faults::default()
    })
    .await;
    let (path, asked) = ("/v1/chat/completions", streamed(CHAT));
    let (whole, streamed, ()) = tokio::join!(
        worker.ask("POST", path, CHAT),
        worker.ask("POST", path, &asked),
        async {
            worker
                .eventually("the engine is done", |handle| {
                    handle.counters().finished == 2
                })
                .await;
            assert_eq!(worker.handle.stats().running, 2);
            worker.handle.set_faults(Faults::default());
        }
    );
    assert!(whole.contains("chat.completion"), "{whole}");
    assert!(token_events(&streamed) > 3, "{streamed}");
    assert!(streamed.ends_with("data: [DONE]\n\n\r\n0\r\n\r\n"));
    worker.stop().await;
}

#[tokio::test]
async fn faults_are_switched_while_it_runs() {
    let worker = Running::fast().await;
    let faults = r#"{"refuse":429,"retry_after":7,"unhealthy":true}"#;
    assert_eq!(worker.post_json("/sim/faults", faults).await["refuse"], 429);
    let refused = worker.ask("POST", "/v1/embeddings", "{}").await;
    assert!(refused.starts_with("HTTP/1.1 429 ") && refused.contains("retry-after: 7\r\n"));
    let health = worker.ask("GET", "/health", "").await;
    assert!(health.starts_with("HTTP/1.1 503 "));

    worker.post_json("/sim/faults", r#"{"hang":true}"#).await;
    let hanging = worker.send("POST", "/v1/completions", "{}").await;
    worker
        .eventually("it hangs", |handle| handle.stats().running == 1)
        .await;
    drop(hanging);
    worker
        .eventually("it is gone", |handle| handle.stats().aborted == 1)
        .await;

    worker.post_json("/sim/faults", "{}").await;
    let health = worker.ask("GET", "/health", "").await;
    assert!(health.starts_with("HTTP/1.1 200 ") && health.contains("content-length: 0\r\n"));
    worker.stop().await;
}

#[tokio::test]
async fn an_idle_connection_can_be_closed_without_a_word() {
    let worker = Running::with_faults(Faults {
        close_idle: true,
        ..Faults::default()
    })
    .await;
    for (path, body) in [
        ("/v1/chat/completions", CHAT.to_owned()),
        ("/v1/chat/completions", streamed(CHAT)),
        ("/nowhere", String::new()),
    ] {
        let mut stream = TcpStream::connect(worker.addr).await.unwrap();
        write(&mut stream, "POST", path, &body, "").await;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 "), "{answer}");
        assert!(!answer.to_lowercase().contains("connection:"), "{answer}");
    }
    worker.stop().await;
}

#[tokio::test]
async fn it_remembers_what_it_was_sent_byte_for_byte() {
    let worker = Running::fast().await;
    let body = "{ \"prompt\" :\t\"x\", \"unknown\": [1.50, 1e3] }";
    let mut stream = TcpStream::connect(worker.addr).await.unwrap();
    for _ in 0..2 {
        let headers = "X-Tag: one\r\nX-Tag: two\r\n";
        write(&mut stream, "POST", "/v1/completions?a=b", body, headers).await;
        read_until(&mut stream, "\"metrics\":null}").await;
    }
    worker.ask("GET", "/health", "").await;
    worker.ask("GET", "/v1/models", "").await;
    let seen = worker.ask("GET", "/sim/requests", "").await;
    let (_, seen) = seen.split_once("\r\n\r\n").unwrap();
    let seen: Value = serde_json::from_str(seen).unwrap();
    assert_eq!(seen["requests"], 3);
    assert_eq!(seen["finished"], 2);
    let last = &seen["last"];
    assert_eq!(last[0]["path"], "/v1/completions?a=b");
    assert_eq!(last[0]["headers"]["x-tag"], "one, two");
    assert_eq!(last[0]["body_bytes"], body.len());
    let digest = format!("{:016x}", xxhash_rust::xxh3::xxh3_64(body.as_bytes()));
    assert_eq!(last[0]["body_xxh3"], digest);
    assert_eq!(last[0]["connection"], last[1]["connection"]);
    assert_ne!(last[1]["connection"], last[2]["connection"]);
    worker.stop().await;
}

#[tokio::test]
async fn what_it_does_not_have_is_refused_as_by_a_real_server() {
    let worker = Running::fast().await;
    let cases = [
        ("GET", "/v1/nope", "", 404, r#"{"detail":"Not Found"}"#),
        (
            "GET",
            "/v1/chat/completions",
            "",
            405,
            r#"{"detail":"Method Not Allowed"}"#,
        ),
        (
            "DELETE",
            "/v1/responses/resp_1",
            "",
            405,
            "Method Not Allowed",
        ),
        (
            "GET",
            "/v1/responses/resp_1",
            "",
            404,
            "'resp_1' not found.",
        ),
        (
            "GET",
            "/v1/responses/resp_1/input_items",
            "",
            404,
            "\"Not Found\"",
        ),
        (
            "POST",
            "/v1/chat/completions",
            "{",
            400,
            "JSON decode error",
        ),
        (
            "POST",
            "/v1/completions",
            r#"{"model":"x","prompt":"x"}"#,
            404,
            "NotFoundError",
        ),
        ("POST", "/tokenize", "{}", 400, "body.prompt"),
    ];
    for (method, path, body, status, expected) in cases {
        let answer = worker.ask(method, path, body).await;
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")),
            "{path}: {answer}"
        );
        assert!(answer.contains(expected), "{path}: {answer}");
    }
    worker.stop().await;
}

#[tokio::test]
async fn metrics_follow_the_engine_and_the_cache_can_be_reset() {
    let worker = Running::fast().await;
    worker.post_json("/v1/chat/completions", CHAT).await;
    worker.post_json("/v1/chat/completions", CHAT).await;
    let page = worker.ask("GET", "/metrics", "").await;
    for line in [
        "vllm:num_requests_running{engine=\"0\",model_name=\"sim\"} 0.0\n",
        "vllm:prefix_cache_hits_total{engine=\"0\",model_name=\"sim\"} 16.0\n",
        "vllm:generation_tokens_total{engine=\"0\",model_name=\"sim\"} 10.0\n",
        "block_size=\"16\"",
        "num_gpu_blocks=\"4096\"",
        "\nprocess_start_time_seconds ",
    ] {
        assert!(page.contains(line), "{line} is not in {page}");
    }
    let reset = worker.post_json("/reset_prefix_cache", "").await;
    assert_eq!(reset["success"], true);
    worker.post_json("/v1/chat/completions", CHAT).await;
    assert_eq!(worker.handle.counters().prefix_hits, 16);
    worker.stop().await;
}

#[tokio::test]
async fn tokens_are_the_same_wherever_they_are_counted() {
    let worker = Running::fast().await;
    let tokenized = worker.post_json("/tokenize", CHAT).await;
    let answered = worker.post_json("/v1/chat/completions", CHAT).await;
    assert_eq!(tokenized["count"], answered["usage"]["prompt_tokens"]);
    let words = worker
        .post_json("/tokenize", r#"{"prompt":"ash bay "}"#)
        .await;
    let tokens = format!("{{\"tokens\":{}}}", words["tokens"]);
    assert_eq!(
        worker.post_json("/detokenize", &tokens).await["prompt"],
        "ash bay "
    );
    worker.stop().await;
}

#[tokio::test]
async fn pooling_requests_go_through_the_engine() {
    let worker = Running::fast().await;
    let body = r#"{"input":["one","two"]}"#;
    let embedded = worker.post_json("/v1/embeddings", body).await;
    assert_eq!(embedded["data"].as_array().unwrap().len(), 2);
    let body = r#"{"query":"q","documents":["one","two","three"],"top_n":2}"#;
    let ranked = worker.post_json("/v1/rerank", body).await;
    let score = |at: usize| ranked["results"][at]["relevance_score"].as_f64().unwrap();
    assert!(score(0) >= score(1));
    assert_eq!(ranked["results"].as_array().unwrap().len(), 2);
    assert_eq!(worker.handle.counters().finished, 5);
    worker.stop().await;
}

#[tokio::test]
async fn it_stops_with_streams_open_and_hanging() {
    let worker = Running::fast().await;
    let endless = CHAT.replace("\"max_tokens\":5", "\"max_tokens\":30000");
    let _open = worker
        .send("POST", "/v1/chat/completions", &streamed(&endless))
        .await;
    worker
        .eventually("it runs", |handle| handle.gauges().running == 1)
        .await;
    let handle = worker.handle.clone();
    worker.stop().await;
    assert_eq!(handle.stats().running, 0);
    assert_eq!(handle.gauges().running, 0);
}
