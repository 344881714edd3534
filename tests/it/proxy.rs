//! What a client sends reaches the engine, and what the engine says reaches the client.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use warmroute::secret::Secret;
use warmroute::sim::fault::Faults;
use warmroute::sim::worker::Settings;
use xxhash_rust::xxh3::xxh3_64;

use crate::client;
use crate::cluster::{Cluster, Router, chat, fast, generating, unhurried};
use crate::patience::too_long;
use crate::stub::Stub;

/// Digests as the engine writes them.
fn digest(body: &[u8]) -> String {
    format!("{:016x}", xxh3_64(body))
}

/// A router in front of an engine that answers with these bytes.
async fn in_front_of(answer: impl Into<Vec<u8>>) -> (Stub, Router) {
    let stub = Stub::start(answer).await;
    let router = stub.router(|_| {}).await;
    (stub, router)
}

#[tokio::test]
async fn a_body_reaches_the_engine_byte_for_byte() {
    let cluster = Cluster::fast(1).await;
    let bodies = [
        "  {\n\t\"messages\" : [ {\"role\":\"user\",\"content\":\"hi\"} ]\r\n , \"model\":\"sim\"  }\n ",
        r#"{"model":"\u0073im","messages":[{"role":"user","content":"\u00e9\ud83d\ude00\/é😀"}],"max_tokens":2}"#,
        r#"{"messages":[{"content":"x","role":"user"}],"model":"sim","unknown":{"a":[1.0,1e2,-0,12345678901234567890]},"z":null}"#,
        r#"{"model":"sim","messages":[{"role":"user","content":[{"type":"text","text":"x"}]}],"temperature":1.00}"#,
    ];
    for body in bodies {
        let answer = cluster.post("/v1/chat/completions", body).await;
        assert_eq!(answer.status, 200, "{body}: {}", answer.text());
        let arrival = cluster.engines[0].last_post().await;
        assert_eq!(arrival.body_bytes, body.len(), "{body}");
        assert_eq!(arrival.body_xxh3, digest(body.as_bytes()), "{body}");
        assert_eq!(
            arrival.headers["content-length"],
            body.len().to_string(),
            "{body}"
        );
    }
}

#[tokio::test]
async fn a_body_of_ten_megabytes_reaches_the_engine_byte_for_byte() {
    let cluster = Cluster::start(
        vec![Settings {
            cache_blocks: 200_000.try_into().unwrap(),
            context_tokens_max: 3_000_000.try_into().unwrap(),
            prefill_tokens_per_second: 100_000_000.try_into().unwrap(),
            batch_tokens_max: 3_000_000.try_into().unwrap(),
            ..fast()
        }],
        |_| {},
    )
    .await;
    let body = chat(&"0123456789".repeat(1 << 20), 1, false);
    let answer = cluster.post("/v1/chat/completions", body.clone()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let arrival = cluster.engines[0].last_post().await;
    assert_eq!(arrival.body_xxh3, digest(body.as_bytes()));
}

#[tokio::test]
async fn an_answer_is_the_engines_byte_for_byte_whole_and_streamed() {
    let cluster = Cluster::fast(1).await;
    let engine = &cluster.engines[0];
    for stream in [false, true] {
        // Responses carry random ids, so two of theirs are never the same.
        for (path, body) in &generating(6, stream)[..2] {
            let mut tries = 0;
            loop {
                let through = cluster.post(path, body.clone()).await;
                // The engine makes the answer's id of its request's.
                let arrival = engine.last_post().await;
                let id = [("x-request-id", &*arrival.headers["x-request-id"])];
                let direct = client::send(engine.address, "POST", path, &id, body.clone()).await;
                assert_eq!(through.status, direct.status);
                let kind = direct.header("content-type");
                assert_eq!(through.header("content-type"), kind);
                assert_eq!(through.header("server"), "uvicorn");
                if through.body == direct.body {
                    break;
                }
                // Another second's answer has another time, and perhaps another cached prompt.
                tries += 1;
                assert!(tries < 5, "{}\n{}", through.text(), direct.text());
            }
        }
    }
}

#[tokio::test]
async fn an_odd_answer_passes_as_it_is() {
    let body = b"\x1f\x8b\x08\x00 not really gzip, and not our business \xff\x00";
    let mut answer = format!(
        "HTTP/1.1 207 Whatever\r\nContent-Type: application/octet-stream\r\ncontent-encoding: gzip\r\nX-Odd: a\tb\r\nset-cookie: one\r\nset-cookie: two\r\nconnection: close, x-hop\r\nx-hop: 1\r\nkeep-alive: timeout=5\r\nx-request-id: engine\r\ncontent-length: {}\r\n\r\n",
        body.len()
    )
    .into_bytes();
    answer.extend_from_slice(body);
    let (stub, router) = in_front_of(answer).await;
    let headers = [
        ("accept-encoding", "gzip, br"),
        ("x-custom", "caf\u{e9}"),
        (
            "traceparent",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        ),
        ("tracestate", "a=b"),
        ("authorization", "Bearer client"),
        ("connection", "x-hop, keep-alive"),
        ("x-hop", "1"),
        ("te", "trailers"),
        ("proxy-authorization", "Basic x"),
        ("x-data-parallel-rank", "3"),
        ("x-vllm-priority", "-100"),
        ("x-session-id", "s"),
        ("x-request-id", "mine"),
    ];
    let path = "/v1/chat/completions?a=b%20c";
    let answer = client::send(router.api, "POST", path, &headers, chat("x", 1, false)).await;
    assert_eq!(answer.status, 207);
    assert_eq!(&answer.body[..], body);
    assert_eq!(answer.header("content-encoding"), "gzip");
    assert_eq!(answer.header("x-odd"), "a\tb");
    assert_eq!(answer.headers.get_all("set-cookie").iter().count(), 2);
    for gone in ["x-hop", "keep-alive"] {
        assert!(!answer.headers.contains_key(gone), "{gone}");
    }
    assert_eq!(answer.header("x-request-id"), "mine");

    let head = stub.last_head();
    assert!(head.starts_with("post /v1/chat/completions?a=b%20c http/1.1\r\n"));
    for passed in [
        "x-custom: caf\u{e9}\r\n",
        "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n",
        "tracestate: a=b\r\n",
        "authorization: bearer client\r\n",
    ] {
        assert!(head.contains(passed), "{passed} in {head}");
    }
    for kept in [
        "x-hop",
        "\r\nte: ",
        "proxy-authorization",
        "x-data-parallel-rank",
        "x-vllm-priority",
        "x-session-id",
        "mine",
        "accept-encoding",
    ] {
        assert!(!head.contains(kept), "{kept} in {head}");
    }
    let host = format!("host: {}\r\n", stub.address);
    assert!(head.contains(&host), "{head}");
}

#[tokio::test]
async fn the_engine_gets_our_request_id_and_the_client_its_own_back() {
    let cluster = Cluster::fast(1).await;
    let body = chat("x", 1, false);
    let ask = async |headers: &[(&str, &str)]| {
        let path = "/v1/chat/completions";
        let answer = client::send(cluster.router.api, "POST", path, headers, body.clone()).await;
        let arrival = cluster.engines[0].last_post().await;
        (answer, arrival.headers["x-request-id"].clone())
    };
    let (answer, engines) = ask(&[("x-request-id", "client/1:a")]).await;
    assert_eq!(answer.header("x-request-id"), "client/1:a");
    assert!(engines.starts_with("wr-"), "{engines}");

    let (answer, engines_next) = ask(&[]).await;
    assert_eq!(answer.header("x-request-id"), engines_next);
    assert_ne!(engines, engines_next);

    for bad in ["a b", &"x".repeat(129), "caf\u{e9}"] {
        let (answer, _) = ask(&[("x-request-id", bad)]).await;
        assert_eq!(answer.status, 400, "{bad}");
        assert_eq!(answer.param(), "x-request-id");
        assert!(answer.header("x-request-id").starts_with("wr-"));
    }
    assert_eq!(cluster.engines[0].stats().await.finished, 2);
    let answer = cluster.get("/nowhere").await;
    assert!(answer.header("x-request-id").starts_with("wr-"));
}

#[tokio::test]
async fn a_workers_own_key_takes_the_place_of_the_clients() {
    let cluster = Cluster::start(vec![fast()], |config| {
        config.workers[0].api_key = Secret::new("engine-key");
    })
    .await;
    let headers = [("authorization", "Bearer client-key")];
    let body = chat("x", 1, false);
    let path = "/v1/chat/completions";
    let answer = client::send(cluster.router.api, "POST", path, &headers, body).await;
    assert_eq!(answer.status, 200);
    let arrival = cluster.engines[0].last_post().await;
    assert_eq!(arrival.headers["authorization"], "Bearer engine-key");
}

#[tokio::test]
async fn events_pass_while_the_engine_is_still_generating() {
    let cluster = Cluster::start(vec![unhurried()], |_| {}).await;
    for (path, body) in generating(3_000, true) {
        let mut open = cluster.open(path, &body).await;
        assert_eq!(open.status, 200);
        assert_eq!(
            open.headers["content-type"],
            "text/event-stream; charset=utf-8"
        );
        // The whole answer would take a minute.
        open.until("\n\n").await;
        assert_eq!(cluster.engines[0].stats().await.finished, 0, "{path}");
        for _ in 0..3 {
            let piece = open.next().await.unwrap().unwrap();
            assert!(piece.ends_with(b"\n\n"), "{path}: {piece:?}");
        }
    }
}

#[tokio::test]
async fn every_endpoint_has_its_engines_answer() {
    let cluster = Cluster::fast(2).await;
    let model = "sim";
    for (path, body, expected) in [
        (
            "/v1/chat/completions",
            json!({"model": model, "messages": [{"role": "user", "content": "x"}]}),
            "/choices/0/message/content",
        ),
        (
            "/v1/completions",
            json!({"model": model, "prompt": "x"}),
            "/choices/0/text",
        ),
        (
            "/v1/completions",
            json!({"model": model, "prompt": [1, 2, 3]}),
            "/choices/0/text",
        ),
        (
            "/v1/completions",
            json!({"model": model, "prompt": ["x", "y"]}),
            "/choices/1/text",
        ),
        (
            "/v1/responses",
            json!({"model": model, "input": "x"}),
            "/output/0/content/0/text",
        ),
        (
            "/v1/responses",
            json!({"model": model, "input": [{"role": "user", "content": "x"}]}),
            "/output/0/content/0/text",
        ),
        (
            "/v1/embeddings",
            json!({"model": model, "input": ["x", "y"]}),
            "/data/1/embedding/7",
        ),
        (
            "/v1/rerank",
            json!({"model": model, "query": "x", "documents": ["y", "z"]}),
            "/results/1/relevance_score",
        ),
        (
            "/rerank",
            json!({"model": model, "query": "x", "documents": ["y", "z"]}),
            "/results/1/relevance_score",
        ),
        (
            "/tokenize",
            json!({"model": model, "prompt": "four more"}),
            "/tokens/2",
        ),
        (
            "/tokenize",
            json!({"model": model, "messages": [{"role": "user", "content": "x"}]}),
            "/tokens/0",
        ),
        (
            "/detokenize",
            json!({"model": model, "tokens": [1, 2]}),
            "/prompt",
        ),
    ] {
        let answer = cluster.post(path, body.to_string()).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        let found = answer.json().pointer(expected).cloned();
        assert!(
            found.is_some_and(|value| !value.is_null()),
            "{path}: {}",
            answer.text()
        );
    }
}

#[tokio::test]
async fn the_models_of_all_engines_are_listed_each_in_its_own_words() {
    let model = |name: &str| Settings {
        models: vec![name.to_owned(), format!("{name}-adapter")],
        ..fast()
    };
    let cluster = Cluster::start(vec![model("org/one"), model("two")], |_| {}).await;
    let list = cluster.get("/v1/models").await;
    assert_eq!(list.status, 200);
    let json = list.json();
    assert_eq!(json["object"], "list");
    let ids = json["data"].as_array().unwrap().iter();
    let ids: Vec<&Value> = ids.map(|card| &card["id"]).collect();
    assert_eq!(ids, ["org/one", "org/one-adapter", "two", "two-adapter"]);
    for engine in &cluster.engines {
        let own = client::get(engine.address, "/v1/models").await;
        let own = own.text();
        let cards = &own[own.find('[').unwrap() + 1..own.rfind(']').unwrap()];
        assert!(list.text().contains(cards), "{cards}");
    }
    for path in ["/v1/models/org/one", "/v1/models/org%2Fone"] {
        let one = cluster.get(path).await;
        assert_eq!((one.status, &one.json()["id"]), (200, &json!("org/one")));
    }
    let none = cluster.get("/v1/models/three").await;
    assert_eq!(
        (none.status, none.code()),
        (404, "model_not_found".to_owned())
    );

    for (model, place) in [("org/one", 0), ("two-adapter", 1)] {
        let body = chat("x", 1, false).replace("\"sim\"", &format!("\"{model}\""));
        for _ in 0..4 {
            let (answer, decided) = cluster.post_decided("/v1/chat/completions", &body).await;
            assert_eq!(answer.status, 200);
            assert_eq!(decided.worker, cluster.engines[place].name);
        }
    }
    let answer = cluster.post("/v1/completions", r#"{"prompt":"x"}"#).await;
    assert_eq!((answer.status, answer.param()), (400, "model".to_owned()));
}

#[tokio::test]
async fn the_model_may_be_left_out_where_there_is_only_one() {
    let cluster = Cluster::fast(2).await;
    let answer = cluster.post("/v1/completions", r#"{"prompt":"x"}"#).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.json()["model"], "sim");
}

#[tokio::test]
async fn http2_without_an_upgrade_carries_many_requests_at_once() {
    let cluster = Cluster::fast(2).await;
    let bodies = (0..20).map(|n| chat(&format!("question {n}"), 5, n % 2 == 0));
    let answers = client::http2(cluster.router.api, "/v1/chat/completions", bodies.collect()).await;
    for (place, (status, body)) in answers.iter().enumerate() {
        assert_eq!(*status, 200);
        let is_stream = place % 2 == 0;
        assert_eq!(body.ends_with("data: [DONE]\n\n"), is_stream, "{body}");
    }
}

#[tokio::test]
async fn what_is_wrong_with_a_request_is_said_in_openais_words() {
    let cluster = Cluster::fast(1).await;
    let chat = "/v1/chat/completions";
    let message = r#""messages":[{"role":"user","content":"x"}]"#;
    let with = |fields: &str| format!("{{\"model\":\"sim\",{message},{fields}}}");
    for (path, body, status, code, param) in [
        (chat, "{\"model\":".to_owned(), 400, "invalid_json", ""),
        (chat, "[]".to_owned(), 400, "invalid_json", ""),
        (chat, String::new(), 400, "invalid_json", ""),
        (chat, "{} {}".to_owned(), 400, "invalid_json", ""),
        (
            chat,
            format!("{{\"model\":7,{message}}}"),
            400,
            "invalid_type",
            "model",
        ),
        (
            chat,
            format!("{{\"model\":\"no\",{message}}}"),
            404,
            "model_not_found",
            "model",
        ),
        (
            chat,
            with(r#""kv_transfer_params":{}"#),
            400,
            "unsupported_parameter",
            "kv_transfer_params",
        ),
        (
            chat,
            with(r#""kv\u005ftransfer_params":{}"#),
            400,
            "unsupported_parameter",
            "kv_transfer_params",
        ),
        (
            chat,
            with(r#""ec_transfer_params":{}"#),
            400,
            "unsupported_parameter",
            "ec_transfer_params",
        ),
        (
            chat,
            with(r#""vllm_xargs":{"kv_cache_report_mode":"full"}"#),
            400,
            "unsupported_parameter",
            "vllm_xargs.kv_cache_report_mode",
        ),
        (
            chat,
            with(r#""vllm_xargs":{"kv_transfer_params":null}"#),
            400,
            "unsupported_parameter",
            "vllm_xargs.kv_transfer_params",
        ),
        (
            "/v1/completions",
            r#"{"model":"sim","prompt":"x","vllm_xargs":{"ec\u005ftransfer_params":""}}"#.to_owned(),
            400,
            "unsupported_parameter",
            "vllm_xargs.ec_transfer_params",
        ),
        (
            "/v1/responses",
            r#"{"model":"sim","input":"x","vllm_xargs":{"kv_transfer_params":0}}"#.to_owned(),
            400,
            "unsupported_parameter",
            "vllm_xargs.kv_transfer_params",
        ),
        (
            "/v1/responses",
            r#"{"model":"sim","input":"x","background":true,"vllm_xargs":{"kv_transfer_params":0}}"#
                .to_owned(),
            400,
            "unsupported_parameter",
            "vllm_xargs.kv_transfer_params",
        ),
        (chat, with(r#""vllm_xargs":{"a":1}"#), 200, "", ""),
        (chat, with(r#""request_id":"mine""#), 200, "", ""),
        (chat, with(r#""kv_transfer_params":null"#), 200, "", ""),
        (
            "/v1/responses",
            r#"{"model":"sim","input":"x","request_id":"mine"}"#.to_owned(),
            400,
            "unsupported_parameter",
            "request_id",
        ),
        (
            "/v1/completions",
            r#"{"model":"sim","prompt":"x","kv_transfer_params":{}}"#.to_owned(),
            400,
            "unsupported_parameter",
            "kv_transfer_params",
        ),
        ("/v1/chat", "{}".to_owned(), 404, "unknown_url", ""),
        ("/chat/completions", "{}".to_owned(), 404, "unknown_url", ""),
        ("/v1/models", "{}".to_owned(), 405, "method_not_allowed", ""),
    ] {
        let before = cluster.engines[0].generated().await;
        let answer = cluster.post(path, body.clone()).await;
        assert_eq!(answer.status, status, "{path} {body}: {}", answer.text());
        if status == 200 {
            continue;
        }
        assert_eq!(answer.code(), code, "{body}");
        assert_eq!(answer.param(), param, "{body}");
        let kind = &answer.json()["error"]["type"];
        assert_eq!(kind, "invalid_request_error", "{body}");
        assert_eq!(answer.header("content-type"), "application/json");
        assert_eq!(cluster.engines[0].generated().await, before, "{body}");
    }
    let answer = cluster.get("/metrics").await;
    assert_eq!((answer.status, &*answer.code()), (404, "unknown_url"));
    let text = answer.text();
    assert!(
        text.contains("a page of the router's admin listener"),
        "{text}"
    );
    let answer = cluster.get(chat).await;
    assert_eq!((answer.status, answer.header("allow")), (405, "POST"));
    let answer = cluster.post("/v1/models", "").await;
    assert_eq!((answer.status, answer.header("allow")), (405, "GET"));
    // A path of the API at the admin listener.
    let answer = cluster.admin("/v1/models").await;
    assert_eq!(answer.status, 404);
    assert!(answer.text().contains("`api.listen`"), "{}", answer.text());
}

#[tokio::test]
async fn a_body_that_is_too_large_is_refused_announced_or_not() {
    let cluster = Cluster::start(vec![fast()], |config| {
        config.api.requests.max_body = 100_000;
    })
    .await;
    let fits = cluster
        .post("/v1/chat/completions", chat(&"x".repeat(99_000), 1, false))
        .await;
    assert_eq!(fits.status, 200);

    // Nothing of it is sent, so the head alone must do.
    let announced =
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100001\r\n\r\n";
    let mut chunked =
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            .to_owned();
    for _ in 0..11 {
        chunked.push_str(&format!("2710\r\n{}\r\n", "x".repeat(10_000)));
    }
    for request in [announced, &chunked] {
        let mut stream = TcpStream::connect(cluster.router.api).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let read = async {
            while !answer.ends_with(b"}") {
                assert_ne!(stream.read_buf(&mut answer).await.unwrap(), 0);
            }
        };
        tokio::time::timeout(too_long(), read).await.unwrap();
        let answer = String::from_utf8(answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
        assert!(answer.contains("request_too_large"), "{answer}");
    }
}

#[tokio::test]
async fn without_a_healthy_worker_a_client_is_told_when_to_come_back() {
    let cluster = Cluster::fast(1).await;
    let unhealthy = Faults {
        unhealthy: true,
        ..Faults::default()
    };
    cluster.engines[0].fault(unhealthy).await;
    cluster.is_worker("w0", "health", "down").await;
    let answer = cluster
        .post("/v1/chat/completions", chat("x", 1, false))
        .await;
    assert_eq!(
        (answer.status, answer.code()),
        (503, "no_healthy_worker".to_owned())
    );
    assert_eq!(answer.json()["error"]["type"], "server_error");
    assert!(answer.header("retry-after").parse::<u32>().unwrap() >= 1);
    assert_eq!(cluster.admin("/readyz").await.status, 503);
    assert_eq!(cluster.admin("/healthz").await.status, 200);
    // A model whose workers are down is not an unknown one.
    assert_eq!(cluster.get("/v1/models/sim").await.status, 200);

    cluster.engines[0].fault(Faults::default()).await;
    cluster.is_worker("w0", "health", "up").await;
    let answer = cluster
        .post("/v1/chat/completions", chat("x", 1, false))
        .await;
    assert_eq!(answer.status, 200);
}

#[tokio::test]
async fn an_engine_that_cannot_be_reached_is_a_bad_gateway() {
    let mut cluster = Cluster::start(vec![fast()], |config| {
        config.fleet.health.interval = Duration::from_secs(60);
    })
    .await;
    cluster.engines[0].kill().await;
    let answer = cluster
        .post("/v1/chat/completions", chat("x", 1, false))
        .await;
    assert_eq!(
        (answer.status, answer.code()),
        (502, "engine_unreachable".to_owned())
    );
}

#[tokio::test]
async fn an_engines_own_refusal_passes_unchanged() {
    let cluster = Cluster::fast(2).await;
    for body in [
        r#"{"model":"sim"}"#,
        r#"{"model":"sim","messages":[]}"#,
        r#"{"model":"sim","messages":[{"role":"user","content":"x"}],"max_tokens":0}"#,
        r#"{"model":"sim","messages":[{"role":"user","content":"x"}],"max_tokens":9000000}"#,
        r#"{"model":"sim","messages":[{"role":"user","content":"x"}],"stream":"yes"}"#,
    ] {
        let path = "/v1/chat/completions";
        let (through, decided) = cluster.post_decided(path, body).await;
        let direct = client::post(cluster.engines[0].address, path, body).await;
        assert_eq!(through.status, 400, "{body}");
        assert_eq!(through.body, direct.body);
        assert_eq!(decided.tries, 1);
    }
    let path = "/v1/chat/completions";
    let text = [("content-type", "text/plain")];
    let body = chat("x", 1, false);
    let answer = client::send(cluster.router.api, "POST", path, &text, body).await;
    assert!(
        answer.text().contains("Unsupported Media Type"),
        "{}",
        answer.text()
    );
}

#[tokio::test]
async fn a_decision_is_told_to_those_who_ask() {
    let cluster = Cluster::fast(2).await;
    let body = chat(
        &"a long prompt, long enough for blocks. ".repeat(10),
        2,
        false,
    );
    let (_, first) = cluster.post_decided("/v1/chat/completions", &body).await;
    assert_eq!(
        (first.reason.as_str(), first.cached_tokens, first.tries),
        ("cold", 0, 1)
    );
    let (_, second) = cluster.post_decided("/v1/chat/completions", &body).await;
    assert_eq!(second.reason, "longest_prefix");
    assert!(second.cached_tokens > 50, "{second:?}");
    assert_eq!(second.worker, first.worker);
    let place = usize::from(first.worker == "w1");
    let arrival = cluster.engines[place].last_post().await;
    assert!(!arrival.headers.contains_key("x-warmroute-decision"));
    let answer = cluster.post("/v1/chat/completions", body).await;
    assert!(!answer.headers.contains_key("x-warmroute-decision"));
}

#[tokio::test]
async fn odd_events_pass_byte_for_byte() {
    let huge = format!("data: {{\"x\":\"{}\"}}\n\n", "y".repeat(3 << 20));
    for stream in [
        "data: {\"a\":1}\n\ndata: [DONE]\n\n",
        ": ping\n\nevent: x\nid: 7\nretry: 5\ndata: a\ndata: b\n\ndata: [DONE]\n\n",
        "data: {\"a\":1}\r\n\r\ndata: [DONE]\r\n\r\n",
        "data:{\"a\":\"\u{e9}\u{1f600}\"}\n\n\n\ndata: [DONE]\n\n",
        "data: no line feed at the end\n\ndata: [DONE]",
        &format!("{huge}data: [DONE]\n\n"),
    ] {
        let head =
            "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
        let (_stub, router) = in_front_of(format!("{head}{stream}")).await;
        let answer = client::post(router.api, "/v1/chat/completions", chat("x", 1, true)).await;
        assert_eq!(answer.status, 200);
        let shown = &stream[..stream.len().min(200)];
        assert_eq!(digest(&answer.body), digest(stream.as_bytes()), "{shown:?}");
    }
}

/// Sends bytes and reads until the answer's JSON body has ended.
async fn raw(router: &Router, request: &[&str]) -> String {
    let mut stream = TcpStream::connect(router.api).await.unwrap();
    for piece in request {
        stream.write_all(piece.as_bytes()).await.unwrap();
    }
    let mut answer = Vec::new();
    let read = async {
        while !answer.ends_with(b"}") {
            let count = stream.read_buf(&mut answer).await.unwrap();
            assert_ne!(count, 0, "{}", String::from_utf8_lossy(&answer));
        }
    };
    tokio::time::timeout(too_long(), read).await.unwrap();
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn a_body_in_chunks_or_after_a_continue_is_a_body_like_any_other() {
    let cluster = Cluster::fast(1).await;
    let body = chat("x", 1, false);
    let (one, two) = body.split_at(20);
    let head =
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n";
    let chunk = |text: &str| format!("{:x}\r\n{text}\r\n", text.len());
    let chunked = "transfer-encoding: chunked\r\n\r\n";
    let (one, two) = (chunk(one), chunk(two));
    let answer = raw(&cluster.router, &[head, chunked, &one, &two, "0\r\n\r\n"]).await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");

    let length = format!(
        "content-length: {}\r\nexpect: 100-continue\r\n\r\n",
        body.len()
    );
    let answer = raw(&cluster.router, &[head, &length, &body]).await;
    assert!(answer.contains("HTTP/1.1 200 OK\r\n"), "{answer}");
    let stats = cluster.engines[0].stats().await;
    let arrived = stats.last.iter().filter(|arrival| arrival.method == "POST");
    let arrived: Vec<_> = arrived.collect();
    assert_eq!(arrived.len(), 2);
    for arrival in arrived {
        assert_eq!(arrival.body_xxh3, digest(body.as_bytes()));
        assert_eq!(arrival.headers["content-length"], body.len().to_string());
        assert!(!arrival.headers.contains_key("expect"));
        assert!(!arrival.headers.contains_key("transfer-encoding"));
    }
}

#[tokio::test]
async fn a_connection_to_an_engine_is_used_again() {
    let cluster = Cluster::fast(1).await;
    for n in 0..40 {
        let answer = cluster
            .post("/v1/chat/completions", chat("x", 2, n % 2 == 0))
            .await;
        assert_eq!(answer.status, 200);
    }
    let stats = cluster.engines[0].stats().await;
    let posts = stats.last.iter().filter(|arrival| arrival.method == "POST");
    let connections: std::collections::BTreeSet<u64> =
        posts.map(|arrival| arrival.connection).collect();
    // Probes run beside the requests and may hold one of their own.
    assert!(connections.len() <= 5, "{connections:?}");
}

#[tokio::test]
async fn a_path_that_is_nearly_right_is_named() {
    let cluster = Cluster::start(vec![fast()], |_| {}).await;
    for path in [
        "/chat/completions",
        "/v1/v1/chat/completions",
        "/v1//chat/completions/",
    ] {
        let answer = cluster.post(path, chat("hello", 1, false)).await;
        assert_eq!(answer.status, 404, "{path}");
        let text = answer.text();
        assert!(
            text.contains("did you mean /v1/chat/completions? (a client's base URL ends in /v1)"),
            "{text}"
        );
    }
    // A base URL that ends in /v1 leads to no such path.
    let answer = cluster.post("/v1/tokenize", "{}").await;
    let text = answer.text();
    assert_eq!(answer.status, 404, "{text}");
    assert!(text.contains("did you mean /tokenize?\""), "{text}");
}

#[tokio::test]
async fn monitors_that_know_only_the_address_are_answered() {
    let cluster = Cluster::start(vec![fast()], |_| {}).await;
    let api = cluster.router.api;
    let head = async |path: &str| client::send(api, "HEAD", path, &[], "").await;
    for path in ["/", "/health", "/v1/models", "/v1/models/sim"] {
        let get = client::send(api, "GET", path, &[], "").await;
        let head = head(path).await;
        assert_eq!((get.status, head.status), (200, 200), "{path}");
        assert!(head.body.is_empty() && !get.body.is_empty(), "{path}");
        assert_eq!(
            head.header("content-length"),
            get.body.len().to_string(),
            "{path}"
        );
    }
    assert_eq!(head("/v1/models/none").await.status, 404);
    assert_eq!(head("/v1/chat/completions").await.status, 405);
}

#[tokio::test]
async fn a_websocket_whose_upgrade_a_proxy_dropped_hears_what_is_missing() {
    let cluster = Cluster::start(vec![fast()], |_| {}).await;
    let headers = [
        ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
        ("sec-websocket-version", "13"),
    ];
    let api = cluster.router.api;
    let answer = client::send(api, "GET", "/v1/responses", &headers, "").await;
    assert_eq!(
        (answer.status, &*answer.code()),
        (426, "websocket_upgrade_missing")
    );
    assert!(
        answer.text().contains("proxy_set_header Upgrade"),
        "{}",
        answer.text()
    );
}
