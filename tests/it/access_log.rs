//! The access log, client addresses, the health check on the API port, and a log without a reader.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use warmroute::config::Config;
use warmroute::fleet::discovery::WorkerSpec;
use warmroute::http::client_address::Networks;
use warmroute::observe::ACCESS_LOG;
use warmroute::openai::tenant::TenantSpec;
use warmroute::secret::Secret;
use warmroute::sim::fault::Faults;
use warmroute::sim::worker::Settings;

use crate::client::{self, Answer};
use crate::cluster::{self, Cluster, Router, chat, eventually, fast, unhurried};
use crate::model_names::named;
use crate::patience::too_long;
use crate::stub::Stub;

const CHAT: &str = "/v1/chat/completions";
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

/// A router that is a process of its own, whose log can be read.
async fn logged(engine: Settings, change: impl FnOnce(&mut Config)) -> Cluster {
    Cluster::with_router_child(vec![engine], change).await
}

/// The fields of the access log's lines so far.
fn lines(cluster: &Cluster) -> Vec<Value> {
    lines_of(&cluster.router)
}

fn lines_of(router: &Router) -> Vec<Value> {
    let log = router.log();
    let lines = log
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok());
    lines
        .filter(|line: &Value| line["target"] == ACCESS_LOG)
        .collect()
}

/// The only line, once it is written.
async fn line(cluster: &Cluster) -> Value {
    eventually("the request has its line", async || {
        !lines(cluster).is_empty()
    })
    .await;
    let [line] = <[Value; 1]>::try_from(lines(cluster)).unwrap();
    line
}

async fn send(cluster: &Cluster, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
    client::send(cluster.router.api, "POST", path, headers, body.to_owned()).await
}

#[tokio::test]
async fn a_plain_request_has_one_line_with_its_figures() {
    let cluster = logged(fast(), |_| {}).await;
    let traceparent = format!("00-{TRACE}-00f067aa0ba902b7-01");
    let headers = [("x-request-id", "mine-1"), ("traceparent", &*traceparent)];
    let body = chat("once upon a time there was a router", 3, false);
    let answer = send(&cluster, &format!("{CHAT}?secret=1"), &headers, &body).await;
    assert_eq!(answer.status, 200);
    let line = line(&cluster).await;
    let usage = &answer.json()["usage"];
    assert_eq!(line["message"], "request");
    for (field, expected) in [
        ("method", json!("POST")),
        ("path", json!(CHAT)),
        ("model", json!("sim")),
        ("tenant", json!("default")),
        ("worker", json!("w0")),
        ("status", json!(200)),
        ("outcome", json!("complete")),
        ("prompt_tokens", usage["prompt_tokens"].clone()),
        ("cached_tokens", json!(0)),
        ("generation_tokens", json!(3)),
        ("bytes", json!(answer.body.len())),
        ("retries", json!(0)),
        ("client", json!("127.0.0.1")),
        ("client_request_id", json!("mine-1")),
        ("trace_id", json!(TRACE)),
    ] {
        assert_eq!(line[field], expected, "{field}: {line}");
    }
    assert!(line["reason"].is_string(), "{line}");
    assert!(line["id"].as_str().unwrap().starts_with("wr-"), "{line}");
    assert!(line["duration_ms"].as_f64().unwrap() > 0.0, "{line}");
}

#[tokio::test]
async fn a_stream_has_its_line_when_it_ends() {
    let cluster = logged(unhurried(), |_| {}).await;
    let mut body: Value = serde_json::from_str(&chat("tell me a story", 20, true)).unwrap();
    body["stream_options"] = json!({"include_usage": true});
    cluster.engines[0].hold_after(3).await;
    let mut stream = cluster.open(CHAT, &body.to_string()).await;
    let first = stream.until("data: ").await;
    assert_eq!(lines(&cluster), [] as [Value; 0]);
    cluster.engines[0].let_go().await;
    let (rest, is_whole) = stream.rest().await;
    assert!(is_whole);
    let line = line(&cluster).await;
    assert_eq!(line["outcome"], "complete", "{line}");
    assert_eq!(line["bytes"], first.len() + rest.len(), "{line}");
    assert_eq!(line["generation_tokens"], 20, "{line}");
    let (first, all) = (&line["ttft_ms"], &line["duration_ms"]);
    assert!(first.as_f64().unwrap() < all.as_f64().unwrap(), "{line}");
    assert!(all.as_f64().unwrap() > 19.0 * 20.0, "{line}");
}

#[tokio::test]
async fn the_line_of_a_stream_that_went_on_says_why_its_last_worker_was_chosen() {
    let cluster = Cluster::with_router_child(vec![fast(); 2], |config| {
        let settings = json!({"max_per_request": 1});
        config.models = named(json!([{"name": "sim", "stream_continuation": settings}]));
    })
    .await;
    let body = chat(&"once upon a time there was a router ".repeat(60), 9, true);
    let mut seen = Vec::new();
    for number in 1..=2 {
        let answer = send(&cluster, CHAT, &[], &body).await;
        assert!(!client::has_error(answer.text()), "{}", answer.text());
        eventually("the stream has its line", async || {
            lines(&cluster).len() == number
        })
        .await;
        seen = lines(&cluster);
        // The second stream begins where the first one has left the prompt.
        for engine in &cluster.engines {
            if seen[0]["worker"] == engine.name {
                let cut = Faults {
                    cut_after_tokens: Some(3),
                    ..Faults::default()
                };
                engine.fault(cut).await;
            }
        }
    }
    let by_prefix = ["reason=\"longest_prefix\""];
    let decisions = "warmroute_routing_decisions_total";
    assert_eq!(cluster.metric(decisions, &by_prefix).await, 1.0);
    assert_eq!(seen[1]["continued"], 1, "{}", seen[1]);
    assert_ne!(seen[1]["worker"], seen[0]["worker"]);
    assert_ne!(seen[1]["reason"], "longest_prefix", "{}", seen[1]);
}

#[tokio::test]
async fn a_refused_request_has_a_line_with_the_error() {
    let cluster = logged(fast(), |config| {
        config.tenants = vec![TenantSpec {
            name: "team".to_owned(),
            keys: vec![Secret::new("sk-1")],
            ..TenantSpec::default()
        }];
    })
    .await;
    // A router that is a child hides its tenants' keys from a printed configuration, so `***` is the key.
    let key = [("authorization", "Bearer ***")];
    let unknown = send(&cluster, CHAT, &[], &chat("hi", 1, false)).await;
    assert_eq!(unknown.status, 401);
    let body = chat("hi", 1, false).replace("sim", "other");
    assert_eq!(send(&cluster, CHAT, &key, &body).await.status, 404);
    assert_eq!(send(&cluster, "/v1/nothing", &key, "").await.status, 404);
    let retrieve = client::send(cluster.router.api, "GET", "/v1/responses/resp_x", &key, "").await;
    assert_eq!(retrieve.status, 404);
    let wrong = client::send(cluster.router.api, "GET", CHAT, &key, "").await;
    assert_eq!(wrong.status, 405);
    eventually("each has a line", async || lines(&cluster).len() >= 5).await;
    let lines = lines(&cluster);
    let seen: Vec<_> = lines
        .iter()
        .map(|line| (&line["status"], &line["error_code"], &line["tenant"]))
        .collect();
    assert_eq!(lines[1]["requested_model"], "other", "{}", lines[1]);
    let team = json!("team");
    assert_eq!(
        seen,
        [
            (&json!(401), &json!("invalid_api_key"), &Value::Null),
            (&json!(404), &json!("model_not_found"), &team),
            (&json!(404), &json!("unknown_url"), &team),
            (&json!(404), &lines[3]["error_code"], &team),
            (&json!(405), &json!("method_not_allowed"), &team),
        ]
    );
    assert!(
        lines.iter().all(|line| line["outcome"] == "error"),
        "{lines:?}"
    );
}

#[tokio::test]
async fn a_client_that_disconnects_has_a_line() {
    let cluster = logged(unhurried(), |_| {}).await;
    let mut stream = cluster
        .open(CHAT, &chat("tell me a story", 1_000, true))
        .await;
    stream.until("data: ").await;
    drop(stream);
    let line = line(&cluster).await;
    assert_eq!(line["outcome"], "client_disconnected", "{line}");
    assert_eq!(line["status"], 200, "{line}");
    assert_eq!(line["worker"], "w0", "{line}");
}

#[tokio::test]
async fn a_stream_that_the_drain_cuts_is_not_said_to_have_lost_its_client() {
    let cluster = logged(unhurried(), |config| {
        config.api.drain_timeout = std::time::Duration::from_millis(300);
    })
    .await;
    let mut stream = cluster
        .open(CHAT, &chat("tell me a story", 3_000, true))
        .await;
    stream.until("data: ").await;
    cluster.router.child.as_ref().unwrap().signal("TERM");
    let line = line(&cluster).await;
    assert_eq!(line["outcome"], "drain_timeout", "{line}");
}

#[tokio::test]
async fn the_access_log_can_be_turned_off() {
    let cluster = logged(fast(), |config| config.log.access = false).await;
    for _ in 0..3 {
        let answer = cluster.post(CHAT, chat("hi", 1, false)).await;
        assert_eq!(answer.status, 200);
    }
    cluster.router.child.as_ref().unwrap().signal("TERM");
    eventually("it has drained", async || {
        cluster.router.log().contains("drained")
    })
    .await;
    assert_eq!(lines(&cluster), [] as [Value; 0]);
}

/// Over a new connection that begins with `header`: what comes back, and how the log calls the client.
async fn address_of(cluster: &Cluster, header: &[u8], forwarded: &str) -> (String, Value) {
    let before = lines(cluster).len();
    let mut stream = TcpStream::connect(cluster.router.api).await.unwrap();
    let request = format!(
        "GET /v1/models HTTP/1.1\r\nhost: x\r\nx-forwarded-for: {forwarded}\r\nconnection: close\r\n\r\n"
    );
    stream
        .write_all(&[header, request.as_bytes()].concat())
        .await
        .unwrap();
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer).await;
    if answer.is_empty() {
        return (answer, Value::Null);
    }
    eventually("the request has its line", async || {
        lines(cluster).len() > before
    })
    .await;
    (answer, lines(cluster)[before]["client"].clone())
}

#[tokio::test]
async fn x_forwarded_for_is_believed_of_trusted_proxies_only() {
    let chain = "198.51.100.1, 203.0.113.9, 10.1.2.3";
    for (trusted, expected) in [
        (vec![], "127.0.0.1"),
        (vec!["10.0.0.0/8"], "127.0.0.1"),
        (vec!["127.0.0.1"], "10.1.2.3"),
        (vec!["127.0.0.0/8", "10.0.0.0/8"], "203.0.113.9"),
    ] {
        let trusted: Vec<String> = trusted.into_iter().map(str::to_owned).collect();
        let cluster = logged(fast(), |config| {
            config.api.requests.trusted_proxies = Networks::try_from(trusted).unwrap();
        })
        .await;
        let (_, client) = address_of(&cluster, b"", chain).await;
        assert_eq!(client, expected);
    }
}

#[tokio::test]
async fn a_proxy_protocol_header_names_the_client_and_is_required() {
    let cluster = logged(fast(), |config| {
        config.api.advanced.proxy_protocol = true;
        config.api.advanced.header_timeout = Duration::from_secs(2);
    })
    .await;
    let v1 = b"PROXY TCP4 203.0.113.9 10.0.0.1 56324 443\r\n";
    let v2 = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c\xcb\0\x71\x0a\x0a\0\0\x01\x12\x34\x01\xbb";
    let local = b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0";
    for (header, expected) in [
        (&v1[..], "203.0.113.9"),
        (&v2[..], "203.0.113.10"),
        (&local[..], "127.0.0.1"),
    ] {
        let (answer, client) = address_of(&cluster, header, "192.0.2.7").await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert_eq!(client, expected);
    }
    // In pieces, as a slow network may bring it.
    let mut stream = TcpStream::connect(cluster.router.api).await.unwrap();
    stream.set_nodelay(true).unwrap();
    for (index, byte) in v2.iter().enumerate() {
        stream.write_all(&[*byte]).await.unwrap();
        if index % 9 == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    stream
        .write_all(b"GET /health HTTP/1.0\r\n\r\n")
        .await
        .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.contains(" 200 "), "{answer}");
    // None at all, half of one, and one that does not come.
    let mut silent = TcpStream::connect(cluster.router.api).await.unwrap();
    for header in [&b""[..], b"PROXY TCP4 1.2.3.4\r\n"] {
        assert_eq!(address_of(&cluster, header, "192.0.2.7").await.0, "");
    }
    let ended = tokio::time::timeout(too_long(), silent.read(&mut [0])).await;
    assert!(matches!(ended.unwrap(), Ok(0) | Err(_)));
    let closed = "warmroute_connections_closed_total";
    let count = cluster.metric(closed, &["reason=\"proxy_header\""]).await;
    assert_eq!(count, 3.0);
}

#[tokio::test]
async fn a_client_that_leaves_at_the_last_event_had_all_of_its_answer() {
    let choice = r#"{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}"#;
    let events = format!("data: {{\"choices\":[{choice}]}}\n\ndata: [DONE]\n\n");
    let head =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    // The engine keeps the body open.
    let stub = Stub::once(format!("{head}{:x}\r\n{events}\r\n", events.len())).await;
    let mut config = cluster::config();
    config.workers = vec![WorkerSpec::from(format!("http://{}", stub.address))];
    let router = Router::child(&config).await;
    eventually("the stub is up", async || {
        client::get(router.admin, "/readyz").await.status == 200
    })
    .await;
    let mut answer = client::open(router.api, "POST", CHAT, &[], chat("hi", 1, true)).await;
    answer.until("[DONE]").await;
    drop(answer);
    eventually("the request has its line", async || {
        !lines_of(&router).is_empty()
    })
    .await;
    assert_eq!(lines_of(&router)[0]["outcome"], "complete");
}

#[tokio::test]
async fn the_health_check_on_the_api_port_needs_no_key() {
    let mut cluster = Cluster::start(vec![fast()], |config| {
        config.tenants = vec![TenantSpec {
            name: "team".to_owned(),
            keys: vec![Secret::new("sk-1")],
            ..TenantSpec::default()
        }];
        config.fleet.health.unhealthy_threshold = 1;
    })
    .await;
    let answer = cluster.get("/health").await;
    assert_eq!(
        (answer.status, answer.text()),
        (200, r#"{"status":"ready"}"#)
    );
    assert_eq!(cluster.post("/health", "").await.status, 401);
    cluster.engines[0].kill().await;
    eventually("no client is left", async || {
        cluster.get("/health").await.status == 503
    })
    .await;
    let answer = cluster.get("/health").await;
    assert_eq!(
        answer.json(),
        json!({"status": "not_ready", "reason": "no healthy worker"})
    );
}

#[tokio::test]
async fn a_log_that_nobody_reads_stops_no_request() {
    const REQUESTS: usize = 2_500;
    let cluster = logged(fast(), |_| {}).await;
    cluster.router.read_log(false);
    // The pipe takes 64 KiB, the queue 4 MiB; a line has the first 2,048 bytes of its path, so 2,500 are more than
    // both.
    let path = format!("/{}", "x".repeat(60_000));
    for _ in 0..REQUESTS {
        assert_eq!(cluster.get(&path).await.status, 404);
    }
    let dropped = cluster
        .metric("warmroute_log_lines_dropped_total", &[])
        .await;
    assert!((1.0..REQUESTS as f64).contains(&dropped), "{dropped}");
    cluster.router.read_log(true);
    eventually("what was queued is written", async || {
        lines(&cluster).len() == REQUESTS - dropped as usize
    })
    .await;
    assert_eq!(cluster.post(CHAT, chat("hi", 1, false)).await.status, 200);
    eventually("new lines come", async || {
        lines(&cluster)
            .last()
            .is_some_and(|line| line["path"] == CHAT)
    })
    .await;
}

#[tokio::test]
async fn the_access_log_may_have_a_file_and_only_a_sample_of_what_went_well() {
    let folder = crate::reload::Folder::new();
    let path = folder.path("access.jsonl");
    let cluster = logged(fast(), |config| {
        config.log.access_file = path.to_str().unwrap().to_owned();
        config.log.access_sample = 0.0;
    })
    .await;
    let well = chat("hello", 1, false);
    for _ in 0..5 {
        assert_eq!(send(&cluster, CHAT, &[], &well).await.status, 200);
    }
    assert_eq!(send(&cluster, CHAT, &[], "{").await.status, 400);
    let mut written = Vec::new();
    eventually("the failure has its line", async || {
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        written = text
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap())
            .collect();
        !written.is_empty()
    })
    .await;
    assert_eq!(written.len(), 1, "{written:?}");
    assert_eq!(
        (&written[0]["status"], &written[0]["target"]),
        (&json!(400), &json!(ACCESS_LOG))
    );
    assert_eq!(lines(&cluster), Vec::<Value>::new());
}
