//! What one client may cost the others: heads and bodies that are refused, memory, pages of other origins, and how
//! connections end.

mod http2;
mod memory;

use std::net::SocketAddr;
use std::time::Duration;

use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use warmroute::openai::tenant::TenantSpec;

use crate::client;
use crate::cluster::{Cluster, chat, eventually, fast, tenant};
use crate::patience::too_long;

const CHAT: &str = "/v1/chat/completions";
const MODELS: &str = "GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n";

/// Sends bytes and reads until the router closes the connection.
async fn until_closed(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let read = tokio::time::timeout(too_long(), stream.read_to_end(&mut answer)).await;
    // A reset is a close, too.
    let _ = read.expect("the connection is closed");
    String::from_utf8(answer).unwrap()
}

/// The last response of a connection: its head in lower case, and its body.
fn last(answer: &str) -> (String, Value) {
    let mut starts = answer.rmatch_indices("HTTP/1.1 ");
    let is_status = |at: usize| answer.as_bytes()[at + 9].is_ascii_digit();
    let start = starts.find_map(|(at, _)| is_status(at).then_some(at));
    let start = start.expect(answer);
    let (head, body) = answer[start..].split_once("\r\n\r\n").expect(answer);
    let body = serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {answer}"));
    (head.to_lowercase(), body)
}

fn header<'a>(head: &'a str, name: &str) -> &'a str {
    let mut lines = head.lines();
    lines
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
        .unwrap_or_default()
}

#[tokio::test]
async fn a_head_that_cannot_be_parsed_gets_an_error_with_an_id() {
    let cluster = Cluster::fast(1).await;
    let with = |more: &str| format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\n{more}\r\n\r\n");
    let many: String = (0..200)
        .map(|number| format!("x-{number}: 1\r\n"))
        .collect();
    for (request, status, code) in [
        ("NO HTTP\r\n\r\n".to_owned(), 400, "malformed_request"),
        (
            "GET / HTTP/9.9\r\n\r\n".to_owned(),
            400,
            "malformed_request",
        ),
        (
            format!("{MODELS}GET  \u{1} HTTP/1.1\r\n\r\n"),
            400,
            "malformed_request",
        ),
        (with("content-length: x"), 400, "malformed_request"),
        (
            with("content-length: 1\r\ncontent-length: 2"),
            400,
            "malformed_request",
        ),
        (with("transfer-encoding: gzip"), 400, "malformed_request"),
        (with("a b: c"), 400, "malformed_request"),
        (with(many.trim_end()), 431, "headers_too_large"),
        (
            with(&format!("x: {}", "x".repeat(65 << 10))),
            431,
            "headers_too_large",
        ),
        (
            with(&format!("x: {}", "x".repeat(100 << 10))),
            431,
            "headers_too_large",
        ),
    ] {
        let counted = [
            &*format!("status=\"{status}\""),
            &*format!("code=\"{code}\""),
        ];
        let errors = "warmroute_request_errors_total";
        let before = cluster.metric(errors, &counted).await;
        let answer = until_closed(cluster.router.api, &request).await;
        let (head, body) = last(&answer);
        assert!(head.starts_with(&format!("http/1.1 {status} ")), "{head}");
        assert_eq!(body["error"]["code"], code, "{request:.60}");
        assert_eq!(body["error"]["type"], "invalid_request_error");
        assert!(header(&head, "x-request-id").starts_with("wr-"), "{head}");
        assert_eq!(header(&head, "content-type"), "application/json");
        assert_eq!(header(&head, "connection"), "close");
        assert_eq!(cluster.metric(errors, &counted).await, before + 1.0);
    }
    // The response of a request before it on the same connection is whole.
    let both = until_closed(cluster.router.api, &format!("{MODELS}NO HTTP\r\n\r\n")).await;
    assert!(both.starts_with("HTTP/1.1 200 OK\r\n"), "{both}");
    assert_eq!(both.matches("HTTP/1.1 ").count(), 2, "{both}");
}

#[tokio::test]
async fn an_ambiguous_head_and_a_compressed_body_are_refused_by_name() {
    let cluster = Cluster::fast(1).await;
    let request = |headers: &str| {
        format!("POST {CHAT} HTTP/1.1\r\nconnection: close\r\ncontent-length: 0\r\n{headers}\r\n")
    };
    let coded = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n"
    );
    for (request, status, code) in [
        (request(""), 400, "invalid_header"),
        (request("host: a\r\nhost: b\r\n"), 400, "invalid_header"),
        (
            request("host: a\r\ncontent-encoding: gzip\r\n"),
            415,
            "unsupported_content_encoding",
        ),
        (coded, 501, "unsupported_transfer_coding"),
    ] {
        let answer = until_closed(cluster.router.api, &request).await;
        let (head, body) = last(&answer);
        assert!(head.starts_with(&format!("http/1.1 {status} ")), "{head}");
        assert_eq!(body["error"]["code"], code, "{request}");
        assert_ne!(header(&head, "x-request-id"), "", "{head}");
    }
    assert_eq!(cluster.engines[0].generated().await, 0);
}

const PAGE: (&str, &str) = ("origin", "https://chat.example");

#[tokio::test]
async fn pages_of_allowed_origins_may_use_the_api() {
    let cluster = Cluster::start(vec![fast()], |config| {
        config.api.requests.cors.allowed_origins = vec![PAGE.1.to_owned()];
        let limits = r#"{"requests_per_minute": 1000, "tokens_per_minute": 100000}"#;
        config.tenants = vec![TenantSpec {
            limits: serde_json::from_str(limits).unwrap(),
            ..tenant("a")
        }];
    })
    .await;
    let api = cluster.router.api;
    let asking = [
        PAGE,
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization, x-mine"),
    ];
    // A browser sends no key with this.
    let preflight = client::send(api, "OPTIONS", CHAT, &asking, "").await;
    assert_eq!(preflight.status, 204, "{}", preflight.text());
    assert_eq!(preflight.header("access-control-allow-origin"), PAGE.1);
    let methods = preflight.header("access-control-allow-methods");
    assert!(methods.contains("POST") && methods.contains("DELETE"));
    assert_eq!(
        preflight.header("access-control-allow-headers"),
        "authorization, x-mine"
    );
    assert_eq!(preflight.header("access-control-max-age"), "7200");
    let vary = preflight.headers.get_all("vary").iter();
    assert!(vary.into_iter().any(|name| name == "origin"));
    assert_ne!(preflight.header("x-request-id"), "");

    let key = ("authorization", "Bearer sk-a");
    let explained = ("x-warmroute-decision", "1");
    for stream in [false, true] {
        let body = chat("x", 2, stream);
        let headers = [PAGE, key, explained];
        let answer = client::send(api, "POST", CHAT, &headers, body).await;
        assert_eq!(answer.status, 200);
        assert_eq!(answer.header("access-control-allow-origin"), PAGE.1);
        assert_eq!(answer.headers.get_all("vary").iter().count(), 1);
        assert!(answer.header("vary").eq_ignore_ascii_case("origin"));
        let exposed = answer.header("access-control-expose-headers");
        let is_exposed = |name: &str| exposed.split(", ").any(|listed| listed == name);
        let added = answer.headers.keys().map(|name| name.as_str());
        let added: Vec<&str> = added.filter(|name| name.starts_with("x-")).collect();
        // Six of limits, the request's id, the decision.
        assert!(added.len() >= 8, "{added:?}");
        // This answer has no reason for the others.
        let others = [
            "request-id",
            "retry-after",
            "retry-after-ms",
            "x-should-retry",
            "x-warmroute-store",
            "x-warmroute-state",
            "x-warmroute-tools-left-out",
        ];
        for name in added.into_iter().chain(others) {
            assert!(is_exposed(name), "{name}: {exposed}");
        }
    }
    // A page reads why it is refused.
    let refused = client::send(api, "POST", CHAT, &[PAGE], "{}").await;
    assert_eq!(refused.status, 401);
    assert_eq!(refused.header("access-control-allow-origin"), PAGE.1);

    let foreign = [("origin", "https://evil.example"), asking[1]];
    let answer = client::send(api, "OPTIONS", CHAT, &foreign, "").await;
    assert_eq!(
        (answer.status, answer.code()),
        (403, "origin_not_allowed".to_owned())
    );
    let answer = client::send(api, "GET", "/v1/models", &[foreign[0], key], "").await;
    assert_eq!(
        (answer.status, answer.header("access-control-allow-origin")),
        (200, "")
    );
}

#[tokio::test]
async fn without_a_setting_no_page_of_another_origin_is_answered() {
    let cluster = Cluster::fast(1).await;
    let asking = [PAGE, ("access-control-request-method", "POST")];
    let answer = client::send(cluster.router.api, "OPTIONS", CHAT, &asking, "").await;
    assert_eq!(
        (answer.status, answer.header("access-control-allow-origin")),
        (405, "")
    );
    assert_eq!(answer.header("vary"), "");
}

#[tokio::test]
async fn every_field_of_a_body_may_be_nested_equally_deep() {
    let cluster = Cluster::fast(1).await;
    let nested = |depth: usize| (0..depth).fold(json!(1), |inner, _| json!([inner]));
    let body = |path: &str, field: &str, depth: usize| {
        let mut body = json!({"model": "sim", "max_tokens": 1});
        let prompt = if path == CHAT { "messages" } else { "input" };
        body[prompt] = json!([{"role": "user", "content": "x"}]);
        body[field] = nested(depth);
        body.to_string()
    };
    for (path, fields) in [
        (CHAT, &["messages", "tools", "user", "vllm_xargs", "x_mine"]),
        (
            "/v1/responses",
            &["input", "tools", "metadata", "vllm_xargs", "x_mine"],
        ),
    ] {
        for field in fields {
            let answer = cluster.post(path, body(path, field, 100)).await;
            assert_eq!(
                (answer.status, answer.code(), answer.param()),
                (400, "nested_too_deeply".to_owned(), (*field).to_owned()),
                "{path}"
            );
        }
    }
    let answer = cluster.post(CHAT, body(CHAT, "x_mine", 99)).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let answer = cluster.post(CHAT, body(CHAT, "tools", 99)).await;
    assert_ne!(answer.code(), "invalid_json", "{}", answer.text());
}

#[tokio::test]
async fn large_bodies_wait_for_memory_and_small_ones_go_on() {
    // One client gets half of it.
    const BUDGET: f64 = (8 << 20) as f64;
    // The simulated engine takes no prompt as long.
    const ENGINES_ANSWER: &str = "maximum context length";
    let cluster = Cluster::start(vec![fast()], |config| {
        config.api.requests.max_total_body = 8 << 20;
        config.api.requests.max_body_wait = too_long();
    })
    .await;
    let api = cluster.router.api;
    let body = chat(&"x".repeat(900 << 10), 1, false);
    let (uploads, rest) = client::unfinished_uploads(api, CHAT, &body, 4).await;
    let used = async || cluster.metric("warmroute_request_body_bytes", &[]).await;
    let waiting = async || {
        cluster
            .metric("warmroute_request_bodies_waiting", &[])
            .await
    };
    eventually("four bodies are in memory", async || {
        used().await == BUDGET / 2.0
    })
    .await;
    let mut large = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let body = body.clone();
        large.spawn(async move { client::post(api, CHAT, body).await });
    }
    eventually("four wait", async || waiting().await == 4.0).await;
    for _ in 0..20 {
        assert_eq!(cluster.post(CHAT, chat("x", 1, false)).await.status, 200);
        assert!(used().await <= BUDGET);
    }
    assert_eq!(waiting().await, 4.0);
    for mut upload in uploads {
        upload.write_all(rest.as_bytes()).await.unwrap();
        let mut answer = String::new();
        let read = tokio::time::timeout(too_long(), upload.read_to_string(&mut answer)).await;
        read.unwrap().unwrap();
        assert!(answer.contains(ENGINES_ANSWER), "{answer}");
    }
    while let Some(ended) = large.join_next().await {
        let answer = ended.unwrap();
        assert!(answer.text().contains(ENGINES_ANSWER), "{}", answer.text());
        assert!(used().await <= BUDGET);
    }
    eventually("nothing is left", async || used().await == 0.0).await;
    let waited = cluster.metric("warmroute_request_bodies_waited_total", &[]);
    assert_eq!(waited.await, 4.0);
    let refused = cluster.metric("warmroute_request_bodies_refused_total", &[]);
    assert_eq!(refused.await, 0.0);
}

/// A quick tick, so that idle connections give their buffers back soon.
fn quick(config: &mut warmroute::config::Config) {
    config.api.advanced.header_timeout = Duration::from_millis(500);
}

/// Longer than [`quick`] connections keep their buffers.
const IDLE: Duration = Duration::from_millis(2_500);

#[tokio::test]
async fn a_connection_that_was_idle_for_long_serves_on() {
    let cluster = Cluster::start(vec![fast()], quick).await;
    let mut stream = TcpStream::connect(cluster.router.api).await.unwrap();
    let mut answers = Vec::new();
    for round in 1..=3 {
        stream.write_all(MODELS.as_bytes()).await.unwrap();
        let whole = async {
            while answers
                .windows(4)
                .filter(|window| window == b"\r\n\r\n")
                .count()
                < round
                || !answers.ends_with(b"}")
            {
                assert_ne!(stream.read_buf(&mut answers).await.unwrap(), 0);
            }
        };
        tokio::time::timeout(too_long(), whole).await.unwrap();
        tokio::time::sleep(IDLE).await;
    }
    // In pieces, and an error after it.
    for piece in ["PR", "I", " HTTP\r\n\r\n"] {
        stream.write_all(piece.as_bytes()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let read = tokio::time::timeout(too_long(), stream.read_to_end(&mut answers)).await;
    let _ = read.expect("the connection is closed");
    let answers = String::from_utf8(answers).unwrap();
    assert_eq!(answers.matches("HTTP/1.1 200 OK").count(), 3, "{answers}");
    assert!(answers.contains("malformed_request"), "{answers}");
}

/// A router that closes idle connections at once, and a page of 10 MB that it writes in one piece.
async fn with_a_long_page() -> (Cluster, String) {
    let cluster = Cluster::start(vec![fast()], |config| {
        config.api.advanced.idle_timeout = Duration::from_millis(300);
    })
    .await;
    let item = json!({"role": "user", "content": "x".repeat(500_000)});
    let conversation = json!({"items": vec![item; 20]}).to_string();
    let made = cluster.post("/v1/conversations", conversation).await;
    assert_eq!(made.status, 200, "{}", made.text());
    let made = made.json();
    let path = format!("/v1/conversations/{}/items", made["id"].as_str().unwrap());
    (cluster, path)
}

#[tokio::test]
async fn an_answer_that_its_client_reads_slowly_arrives_whole() {
    let (cluster, path) = with_a_long_page().await;
    let socket = TcpSocket::new_v4().unwrap();
    // A small buffer, and the one of the other end: most of the page waits in the router.
    socket.set_recv_buffer_size(256 << 10).unwrap();
    let mut stream = socket.connect(cluster.router.api).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let mut part = vec![0; 256 << 10];
    loop {
        let read = tokio::time::timeout(too_long(), stream.read(&mut part)).await;
        let length = read.unwrap().unwrap();
        if length == 0 {
            break;
        }
        answer.extend_from_slice(&part[..length]);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let length = header(&head.to_lowercase(), "content-length").to_owned();
    assert_eq!(length, body.len().to_string());
    assert!(body.len() > 10_000_000);
}

#[tokio::test]
async fn an_answer_that_its_client_reads_slowly_over_http2_arrives_whole() {
    let (cluster, path) = with_a_long_page().await;
    let connection = client::Http2::connect(cluster.router.api).await;
    let answer = connection.get(&path).await;
    let length = answer.headers()["content-length"].clone();
    let mut body = answer.into_body();
    let mut read = 0;
    while let Some(frame) = tokio::time::timeout(too_long(), body.frame())
        .await
        .unwrap()
    {
        read += frame.unwrap().into_data().unwrap().len();
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert_eq!(length, read.to_string());
}

#[tokio::test]
async fn an_answer_says_whether_its_connection_can_be_used_again() {
    let cluster = Cluster::start(vec![fast()], |config| {
        config.api.requests.max_body = 1 << 20;
    })
    .await;
    let long = "x".repeat(300_000);
    let post = |path: &str, more: &str, body: &str| {
        let length = body.len();
        format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n{more}\r\n{body}")
    };
    let chunked = "POST /nowhere HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n";
    for (request, status, closes) in [
        (post("/nowhere", "", "{}"), 404, false),
        (post("/nowhere", "", &long), 404, true),
        (format!("{chunked}2\r\n{{}}\r\n"), 404, true),
        (post("/nowhere", "expect: 100-continue\r\n", ""), 404, false),
        (post("/v1/models", "", "{}"), 405, false),
        (post("/v1/models", "", &long), 405, true),
        (post(CHAT, "", &"x".repeat(2 << 20)), 413, true),
        (post(CHAT, "content-encoding: gzip\r\n", "{}"), 415, false),
        (post(CHAT, "content-encoding: gzip\r\n", &long), 415, true),
        (post(CHAT, "", "{"), 400, false),
        (MODELS.to_owned(), 200, false),
    ] {
        let what = request[..60.min(request.len())].to_owned();
        let stream = TcpStream::connect(cluster.router.api).await.unwrap();
        let (mut reads, mut writes) = stream.into_split();
        // The router may close before all is sent.
        let sent = tokio::spawn(async move {
            let _ = writes.write_all(request.as_bytes()).await;
            writes
        });
        let mut answer = Vec::new();
        while !answer.ends_with(b"}") {
            let read = tokio::time::timeout(too_long(), reads.read_buf(&mut answer)).await;
            assert_ne!(read.unwrap().unwrap(), 0, "{what}");
        }
        let (head, _) = last(std::str::from_utf8(&answer).unwrap());
        assert!(
            head.starts_with(&format!("http/1.1 {status} ")),
            "{what}: {head}"
        );
        assert_eq!(
            header(&head, "connection") == "close",
            closes,
            "{what}: {head}"
        );
        let mut writes = sent.await.unwrap();
        let _ = writes.write_all(MODELS.as_bytes()).await;
        let mut next = vec![0; 4096];
        let read = tokio::time::timeout(too_long(), reads.read(&mut next)).await;
        let is_answered = read.unwrap().is_ok_and(|length| length > 0);
        assert_eq!(is_answered, !closes, "{what}");
    }
}

#[tokio::test]
async fn a_client_can_send_all_of_a_long_body_that_is_refused_and_then_reads_why() {
    let cluster = Cluster::fast(1).await;
    // More than the buffers of both sockets.
    let length = 16 << 20;
    let head = format!("POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n");
    let mut request = head.into_bytes();
    request.resize(request.len() + length, b'x');
    let mut stream = TcpStream::connect(cluster.router.api).await.unwrap();
    stream.write_all(&request).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    assert!(answer.starts_with(b"HTTP/1.1 404 "));
}

#[tokio::test]
async fn the_rest_of_a_refused_body_is_never_read_as_a_request() {
    let cluster = Cluster::start(vec![fast()], quick).await;
    for framing in ["content-length: 100000", "transfer-encoding: chunked"] {
        let mut stream = TcpStream::connect(cluster.router.api).await.unwrap();
        let head = format!("POST /nowhere HTTP/1.1\r\nhost: x\r\n{framing}\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        while !answer.starts_with(b"HTTP/1.1 404 ") {
            let read = stream.read_buf(&mut answer);
            let read = tokio::time::timeout(too_long(), read).await.unwrap();
            assert_ne!(read.unwrap(), 0, "{}", String::from_utf8_lossy(&answer));
        }
        tokio::time::sleep(IDLE).await;
        // It may be closed by now.
        let _ = stream.write_all(MODELS.as_bytes()).await;
        let read = stream.read_to_end(&mut answer);
        let _ = tokio::time::timeout(Duration::from_secs(1), read).await;
        let answer = String::from_utf8(answer).unwrap();
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{answer}");
    }
}
