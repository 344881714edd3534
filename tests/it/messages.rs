//! Anthropic's Messages: passed on, metered, and with errors in its shape.

use serde_json::{Value, json};
use warmroute::sim::fault::Faults;
use warmroute::sim::worker::Settings;

use crate::client::{self, Answer};
use crate::cluster::{Cluster, fast, tenant};
use crate::model_names::named;
use crate::stub::Stub;

const PATH: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";

fn ask(text: &str, stream: bool) -> Value {
    json!({"model": "sim", "max_tokens": 4, "stream": stream, "system": "Be brief. ".repeat(20),
        "messages": [{"role": "user", "content": text}]})
}

/// The names of a stream's events, in order.
fn names(text: &str) -> Vec<&str> {
    let lines = text.lines();
    lines
        .filter_map(|line| line.strip_prefix("event: "))
        .collect()
}

/// The type of an error in Anthropic's shape.
#[track_caller]
fn kind(answer: &Answer) -> String {
    let body = answer.json();
    assert_eq!(body["type"], "error", "{body}");
    assert!(body["error"]["message"].is_string(), "{body}");
    let kind = body["error"]["type"].as_str();
    kind.unwrap_or_else(|| panic!("no type: {body}")).to_owned()
}

async fn tenants() -> Cluster {
    Cluster::start(vec![fast()], |config| {
        config.tenants = vec![tenant("a")];
    })
    .await
}

#[tokio::test]
async fn a_message_passes_unchanged_whole_and_streamed() {
    let cluster = Cluster::fast(1).await;
    let body = ask("hi", false).to_string();
    let headers = [
        ("anthropic-version", "2023-06-01"),
        ("anthropic-beta", "tools-2024-04-04"),
    ];
    let api = cluster.router.api;
    let answer = client::send(
        api,
        "POST",
        "/v1/messages?beta=true",
        &headers,
        body.clone(),
    )
    .await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.json()["type"], "message");
    let id = answer.header("x-request-id");
    assert_eq!(answer.header("request-id"), id);
    let sent = cluster.engines[0].last_post().await;
    assert_eq!(sent.path, "/v1/messages?beta=true");
    assert_eq!(sent.body, body);
    assert_eq!(sent.headers["anthropic-version"], "2023-06-01");
    assert_eq!(sent.headers["anthropic-beta"], "tools-2024-04-04");
    let stream = cluster.post(PATH, ask("hi", true).to_string()).await;
    let expected = [
        &["message_start", "content_block_start"][..],
        &["content_block_delta"; 4],
        &["content_block_stop", "message_delta", "message_stop"],
    ];
    assert_eq!(names(stream.text()), expected.concat());
    assert!(!stream.text().contains("[DONE]"));
}

#[tokio::test]
async fn the_usage_of_a_message_is_metered_with_what_was_cached() {
    let cluster = tenants().await;
    let (mut prompt, mut cached) = (0, 0);
    for stream in [false, true] {
        let key = [("x-api-key", "sk-a")];
        let body = ask("hi", stream).to_string();
        let answer = client::send(cluster.router.api, "POST", PATH, &key, body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let usage = if stream {
            let (_, end) = answer.text().rsplit_once("\"usage\":").unwrap();
            let mut values = serde_json::Deserializer::from_str(end).into_iter();
            values.next().unwrap().unwrap()
        } else {
            answer.json()["usage"].clone()
        };
        let count = |name: &str| usage[name].as_u64().unwrap();
        let read = count("cache_read_input_tokens");
        prompt += count("input_tokens") + count("cache_creation_input_tokens") + read;
        cached += read;
    }
    assert!(cached > 0, "the second prompt is cached");
    let metric = async |kind: &str| {
        let name = format!("warmroute_usage_{kind}_total");
        cluster.metric(&name, &["tenant=\"a\""]).await as u64
    };
    assert_eq!(metric("requests").await, 2);
    assert_eq!(metric("incomplete").await, 0);
    assert_eq!(metric("prompt_tokens").await, prompt);
    assert_eq!(metric("cached_prompt_tokens").await, cached);
    assert_eq!(metric("generation_tokens").await, 8);
}

#[tokio::test]
async fn a_key_may_stand_in_either_header_and_reaches_no_engine() {
    let cluster = tenants().await;
    let send = async |path: &'static str, headers: &[(&str, &str)]| {
        let body = ask("hi", false).to_string();
        client::send(cluster.router.api, "POST", path, headers, body).await
    };
    for headers in [
        &[("x-api-key", "sk-a")][..],
        &[("authorization", "Bearer sk-a")],
        &[("authorization", "Bearer sk-a"), ("x-api-key", "other")],
    ] {
        let answer = send(PATH, headers).await;
        assert_eq!(answer.status, 200, "{headers:?}: {}", answer.text());
        let sent = cluster.engines[0].last_post().await;
        assert_eq!(sent.headers.get("x-api-key"), None);
        assert_eq!(sent.headers.get("authorization"), None);
    }
    for headers in [
        &[][..],
        &[("x-api-key", "sk-b")],
        &[("x-api-key", "")],
        &[("x-api-key", "sk-a"), ("x-api-key", "sk-a")],
        &[("authorization", "Bearer sk-b"), ("x-api-key", "sk-a")],
    ] {
        for path in [PATH, COUNT] {
            let answer = send(path, headers).await;
            assert_eq!(answer.status, 401, "{headers:?}");
            assert_eq!(kind(&answer), "authentication_error");
        }
        let answer = send("/v1/chat/completions", headers).await;
        assert_eq!(answer.code(), "invalid_api_key");
    }
}

#[tokio::test]
async fn the_routers_own_errors_have_anthropics_shape() {
    let cluster = Cluster::start(vec![fast()], |config| {
        config.api.requests.max_body = 4_096;
    })
    .await;
    let check = async |body: String, status: u16, expected: &str| {
        for path in [PATH, COUNT] {
            let answer = cluster.post(path, body.clone()).await;
            assert_eq!(answer.status, status, "{path}: {}", answer.text());
            assert_eq!(kind(&answer), expected, "{path}");
        }
    };
    let with = |name: &str, value: Value| {
        let mut body = ask("hi", false);
        body[name] = value;
        body.to_string()
    };
    check("{".to_owned(), 400, "invalid_request_error").await;
    check(with("model", "none".into()), 404, "not_found_error").await;
    check(with("model", 7.into()), 400, "invalid_request_error").await;
    check("x".repeat(5_000), 413, "request_too_large").await;
    for name in [
        "kv_transfer_params",
        "ec_transfer_params",
        "mm_payload",
        "bootstrap_host",
        "bootstrap_room",
        "routed_dp_rank",
        "rid",
        "extra_key",
    ] {
        let body = with(name, json!({}));
        check(body.clone(), 400, "invalid_request_error").await;
        let answer = cluster.post(PATH, body).await;
        assert!(answer.text().contains(name), "{}", answer.text());
    }
    let answer = cluster.get(PATH).await;
    assert_eq!((answer.status, answer.header("allow")), (405, "POST"));
    assert_eq!(kind(&answer), "invalid_request_error");
    let answer = cluster.post("/v1/messages/batches", "{}").await;
    assert_eq!((answer.status, &*kind(&answer)), (404, "not_found_error"));
    assert_eq!(cluster.engines[0].generated().await, 0);
}

#[tokio::test]
async fn a_stream_that_breaks_off_ends_with_an_error_event() {
    let mut cluster = Cluster::fast(1).await;
    let faults = Faults {
        cut_after_tokens: Some(2),
        ..Faults::default()
    };
    cluster.engines[0].fault(faults).await;
    let answer = cluster.post(PATH, ask("hi", true).to_string()).await;
    assert_eq!(answer.status, 200);
    let events = names(answer.text());
    assert_eq!(events.last(), Some(&"error"), "{}", answer.text());
    let (_, data) = answer.text().rsplit_once("data: ").unwrap();
    let data: Value = serde_json::from_str(data).unwrap();
    assert_eq!(data["type"], "error");
    assert_eq!(data["error"]["type"], "api_error");
    // Nothing is left.
    cluster.engines[0].kill().await;
    let answer = cluster.post(PATH, ask("hi", true).to_string()).await;
    assert!(matches!(answer.status, 502 | 503), "{}", answer.status);
    let expected = match answer.status {
        503 => "overloaded_error",
        _ => "api_error",
    };
    assert_eq!(kind(&answer), expected);
}

#[tokio::test]
async fn messages_go_to_the_workers_that_serve_them() {
    let without = || Settings {
        no_messages: true,
        ..fast()
    };
    let cluster = Cluster::start(vec![without(), fast(), without()], |_| {}).await;
    for index in 0..6 {
        let body = ask(&format!("{index} hi"), false).to_string();
        let (answer, decided) = cluster.post_decided(PATH, &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(decided.worker, "w1");
        assert_eq!(cluster.post(COUNT, body).await.status, 200);
    }
    let none = Cluster::start(vec![without()], |_| {}).await;
    let answer = none.post(PATH, ask("hi", false).to_string()).await;
    assert_eq!((answer.status, &*kind(&answer)), (404, "not_found_error"));
    assert!(answer.text().contains("/v1/chat/completions"));
    let answer = none.post(COUNT, ask("hi", false).to_string()).await;
    assert_eq!((answer.status, &*kind(&answer)), (501, "api_error"));
    assert_eq!(answer.header("x-should-retry"), "false");
    assert_eq!(none.engines[0].generated().await, 0);
}

#[tokio::test]
async fn who_asks_for_an_alias_is_not_told_the_model_that_does_not_serve_messages() {
    let without = Settings {
        no_messages: true,
        ..fast()
    };
    let cluster = Cluster::start(vec![without], |config| {
        config.models = named(json!([{"name": "sim", "aliases": ["claude"]}]));
    })
    .await;
    let mut body = ask("hi", false);
    body["model"] = "claude".into();
    let answer = cluster.post(PATH, body.to_string()).await;
    assert_eq!((answer.status, &*kind(&answer)), (404, "not_found_error"));
    let text = answer.text();
    assert!(text.contains("`claude`"), "{text}");
    assert!(!text.contains("`sim`"), "{text}");
}

#[tokio::test]
async fn a_workers_error_has_anthropics_shape_and_its_own_status_and_message() {
    let answer_to = async |path: &str, head: &str, body: &str| {
        let head = format!("HTTP/1.1 {head}\r\ncontent-type: application/json\r\nretry-after: 7");
        let length = body.len();
        let text = format!("{head}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}");
        let stub = Stub::start(text).await;
        let router = stub.router(|_| {}).await;
        client::post(router.api, path, ask("hi", false).to_string()).await
    };
    let of_vllm = r#"{"type":"error","error":{"type":"BadRequestError","message":"too long"}}"#;
    for path in [PATH, COUNT] {
        let answer = answer_to(path, "400 Bad Request", of_vllm).await;
        let found = (answer.status, kind(&answer));
        assert_eq!(found, (400, "invalid_request_error".to_owned()));
        assert_eq!(answer.json()["error"]["message"], "too long");
        assert_eq!(answer.header("retry-after"), "7");
        let answer = answer_to(path, "422 Unprocessable Entity", "{}").await;
        let found = (answer.status, kind(&answer));
        assert_eq!(found, (422, "invalid_request_error".to_owned()));
    }
    let right = r#"{"type":"error","error":{"type":"billing_error","message":"pay"},"more":1}"#;
    let answer = answer_to(PATH, "400 Bad Request", right).await;
    assert_eq!((answer.status, answer.text()), (400, right));
    // Other paths are as the engine writes them.
    let answer = answer_to("/v1/chat/completions", "422 Unprocessable Entity", "{}").await;
    assert_eq!((answer.status, answer.text()), (422, "{}"));
}
