//! WebSocket mode of the Responses API, as a client of another library sees it.

mod bounds;
mod handshake;
mod lanes;
mod replicas;
mod socket;

use serde_json::json;
use tokio_tungstenite::tungstenite::Message;
use warmroute::openai::tenant::TenantSpec;
use warmroute::responses::Mode;
use warmroute::sim::fault::Faults;
use warmroute::sim::worker::{Connector, Role};

use self::socket::{PATH, Socket, id, kinds};
use crate::client;
use crate::cluster::{Cluster, eventually, fast, router_connector, tenant, unhurried, with_role};

/// Texts of an event in which ids and times differ from run to run, without them.
fn without_ids(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) =
        rest.find(|character: char| character.is_ascii_digit() || ('a'..='f').contains(&character))
    {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let end = rest
            .find(|character: char| !character.is_ascii_hexdigit())
            .unwrap_or(rest.len());
        out.push_str(if end < 10 { &rest[..end] } else { "*" });
        rest = &rest[end..];
    }
    out + rest
}

#[tokio::test]
async fn a_turn_has_the_bytes_of_a_stream_over_http() {
    let cluster = Cluster::fast(1).await;
    let body = json!({"model": "sim", "input": "hello", "max_output_tokens": 8, "store": false,
        "stream": true, "metadata": {"k": "v"}, "temperature": 0.5});
    let answer = cluster.post(PATH, body.to_string()).await;
    let data = answer
        .text()
        .lines()
        .filter_map(|line| line.strip_prefix("data: "));
    let over_http: Vec<String> = data
        .filter(|data| *data != "[DONE]")
        .map(without_ids)
        .collect();
    let mut socket = Socket::open(cluster.router.api).await;
    let mut frame = body.clone();
    frame["type"] = "response.create".into();
    socket.text(&frame.to_string()).await;
    let mut over_socket = Vec::new();
    for _ in &over_http {
        let Some(Message::Text(text)) = socket.message().await else {
            panic!("no event after {over_socket:?}");
        };
        over_socket.push(without_ids(&text));
    }
    assert_eq!(over_socket, over_http);
    assert!(over_http.len() > 8);
}

#[tokio::test]
async fn turns_follow_each_other_on_one_connection() {
    let cluster = Cluster::fast(1).await;
    let mut socket = Socket::open(cluster.router.api).await;
    let first = socket.respond(json!({})).await;
    let second = socket
        .respond(json!({"previous_response_id": id(&first)}))
        .await;
    assert_eq!(second["previous_response_id"], id(&first));
    // Both are stored.
    let path = format!("{PATH}/{}", id(&second));
    assert_eq!(cluster.get(&path).await.json()["id"], id(&second));
    assert_eq!(
        cluster.metric("warmroute_websocket_connections", &[]).await,
        1.0
    );
    drop(socket);
    eventually("the connection is no longer counted", async || {
        cluster.metric("warmroute_websocket_connections", &[]).await == 0.0
    })
    .await;
}

#[tokio::test]
async fn what_is_not_stored_is_continued_on_its_connection_alone() {
    let cluster = Cluster::fast(1).await;
    let mut socket = Socket::open(cluster.router.api).await;
    let first = socket
        .respond(json!({"input": "one", "store": false}))
        .await;
    let again = json!({"input": "two", "store": false, "previous_response_id": id(&first)});
    let second = socket.respond(again).await;
    let input = cluster.engines[0].last_body().await["input"].clone();
    let text = |place: usize| input[place]["content"][0]["text"].clone();
    assert_eq!((text(0), text(2)), (json!("one"), json!("two")), "{input}");
    assert_eq!(text(1), first["output"][0]["content"][0]["text"]);
    // Stored from here on: its record has everything before.
    let third = json!({"input": "three", "previous_response_id": id(&second)});
    let third = socket.respond(third).await;
    let fourth = json!({"model": "sim", "input": "four", "previous_response_id": id(&third)});
    assert_eq!(cluster.post(PATH, fourth.to_string()).await.status, 200);
    let input = cluster.engines[0].last_body().await["input"].clone();
    assert_eq!(input.as_array().unwrap().len(), 7, "{input}");
    // Another connection has only the store.
    let mut other = Socket::open(cluster.router.api).await;
    let error = other
        .fail(json!({"previous_response_id": id(&second), "stream_id": "main"}))
        .await;
    let message = format!("Previous response with id '{}' not found.", id(&second));
    assert_eq!(
        error,
        json!({"type": "error", "status": 400, "stream_id": "main", "error": {
            "type": "invalid_request_error", "code": "previous_response_not_found",
            "message": message, "param": "previous_response_id"}})
    );
    other
        .respond(json!({"previous_response_id": id(&third)}))
        .await;
}

#[tokio::test]
async fn a_response_that_was_deleted_over_http_is_not_continued_on_its_connection() {
    let cluster = Cluster::fast(1).await;
    for deleted in 0..2 {
        let mut socket = Socket::open(cluster.router.api).await;
        let first = socket.respond(json!({"input": "one"})).await;
        let second = json!({"input": "two", "previous_response_id": id(&first)});
        let second = socket.respond(second).await;
        let gone = [&first, &second][deleted];
        let path = format!("{PATH}/{}", id(gone));
        let answer = client::send(cluster.router.api, "DELETE", &path, &[], "").await;
        assert_eq!(answer.status, 200);
        for store in [true, false] {
            let third = json!({"store": store, "previous_response_id": id(&second)});
            let error = socket.fail(third).await;
            let message = format!("Previous response with id '{}' not found.", id(gone));
            assert_eq!(error["error"]["code"], "previous_response_not_found");
            assert_eq!(error["error"]["message"], message);
        }
    }
}

#[tokio::test]
async fn a_child_whose_parent_was_deleted_while_it_ran_is_not_remembered_either() {
    let cluster = Cluster::start(vec![unhurried()], |_| {}).await;
    let mut socket = Socket::open(cluster.router.api).await;
    let first = socket.respond(json!({"max_output_tokens": 2})).await;
    let path = format!("{PATH}/{}", id(&first));
    let more = json!({"max_output_tokens": 100, "previous_response_id": id(&first)});
    cluster.engines[0].hold_after(3).await;
    let (second, _) = tokio::join!(socket.respond(more), async {
        eventually("the turn runs", async || {
            cluster.engines[0].stats().await.running == 1
        })
        .await;
        let answer = client::send(cluster.router.api, "DELETE", &path, &[], "").await;
        assert_eq!(answer.status, 200);
        cluster.engines[0].let_go().await;
    });
    assert_eq!(second["store"], false, "{second}");
    let error = socket
        .fail(json!({"previous_response_id": id(&second)}))
        .await;
    assert_eq!(error["error"]["code"], "previous_response_not_found");
}

#[tokio::test]
async fn a_failed_continuation_makes_the_connection_forget() {
    let cluster = Cluster::fast(1).await;
    let mut socket = Socket::open(cluster.router.api).await;
    let first = socket.respond(json!({"store": false})).await;
    let call = json!({"type": "function_call_output", "call_id": "c", "output": "x"});
    let again = json!({"input": [call], "store": false, "previous_response_id": id(&first)});
    let mut fork = again.clone();
    fork["stream_id"] = "fork".into();
    assert_eq!(socket.fail(fork).await["status"], 400);
    let kept = json!({"store": false, "previous_response_id": id(&first), "stream_id": "fork"});
    socket.respond(kept).await;
    let error = socket.fail(again).await;
    assert_eq!(error["status"], 400);
    let error = socket
        .fail(json!({"store": false, "previous_response_id": id(&first)}))
        .await;
    assert_eq!(error["error"]["code"], "previous_response_not_found");
}

#[tokio::test]
async fn a_response_that_generates_nothing_can_be_continued() {
    let cluster = Cluster::start(vec![fast()], |config| {
        // The engine gets nothing but the turns.
        config.responses.websocket.max_prewarms = 0;
    })
    .await;
    let mut socket = Socket::open(cluster.router.api).await;
    socket
        .create(json!({"input": "one", "generate": false, "store": false}))
        .await;
    let events = socket.turn().await;
    assert_eq!(
        kinds(&events),
        [
            "response.created",
            "response.in_progress",
            "response.completed"
        ]
    );
    let response = &events[2]["response"];
    assert_eq!(response["output"], json!([]));
    assert_eq!(response["usage"]["total_tokens"], 0);
    let next = json!({"input": "two", "store": false, "previous_response_id": id(response)});
    socket.respond(next).await;
    let input = cluster.engines[0].last_body().await["input"].clone();
    assert_eq!(input.as_array().unwrap().len(), 2, "{input}");
    // A client that only knows its tools yet.
    let tools =
        json!({"input": [], "generate": false, "tools": [{"type": "function", "name": "f"}]});
    let stored = socket.respond(tools).await;
    let path = format!("{PATH}/{}", id(&stored));
    assert_eq!(cluster.get(&path).await.json()["status"], "completed");
    let error = socket
        .fail(json!({"generate": false, "temperature": -1}))
        .await;
    assert_eq!(error["error"]["param"], "temperature");
    let error = socket
        .fail(json!({"generate": false, "model": "nope"}))
        .await;
    assert_eq!(error["error"]["code"], "model_not_found");
}

#[tokio::test]
async fn a_response_that_generates_nothing_warms_the_cache_for_the_next_turn() {
    let cluster = Cluster::fast(1).await;
    let mut socket = Socket::open(cluster.router.api).await;
    let long = "once upon a time there was a router. ".repeat(40);
    let first = socket
        .respond(json!({"input": long, "generate": false, "store": false}))
        .await;
    let done = ["outcome=\"done\""];
    eventually("the prompt was computed", async || {
        cluster.metric("warmroute_prewarms_total", &done).await == 1.0
    })
    .await;
    let body = cluster.engines[0].last_body().await;
    assert_eq!(
        (&body["max_output_tokens"], &body["store"]),
        (&json!(1), &json!(false))
    );
    assert_eq!(body["input"][0]["content"][0]["text"], *long);
    let next = json!({"input": "go on", "store": false, "previous_response_id": id(&first)});
    let next = socket.respond(next).await;
    let cached = next["usage"]["input_tokens_details"]["cached_tokens"].as_u64();
    assert!(cached.unwrap() > 100, "{next}");
}

#[tokio::test]
async fn a_prompt_that_is_sent_ahead_is_computed_by_a_prefill_worker_if_there_is_one() {
    let engine = |role| with_role(fast(), Connector::Nixl, role);
    let engines = [Role::Prefill, Role::Decode].map(engine).to_vec();
    let cluster = Cluster::start(engines, |config| {
        config.prefill_decode.connector = Some(router_connector(Connector::Nixl));
        config.prefill_decode.advanced.min_remote_tokens = 16;
    })
    .await;
    let mut socket = Socket::open(cluster.router.api).await;
    let long = "once upon a time there was a router. ".repeat(40);
    socket
        .respond(json!({"input": long, "generate": false, "store": false}))
        .await;
    let done = ["outcome=\"done\""];
    eventually("the prompt was computed", async || {
        cluster.metric("warmroute_prewarms_total", &done).await == 1.0
    })
    .await;
    let transfers = cluster.engines[0].kv_transfers().await;
    assert_eq!(transfers.prefill_legs, 1);
}

#[tokio::test]
async fn a_prompt_of_a_tenant_that_may_ask_for_one_token_is_sent_ahead_for_one() {
    let engine = |role| with_role(fast(), Connector::Nixl, role);
    let engines = [Role::Prefill, Role::Decode].map(engine).to_vec();
    let cluster = Cluster::start(engines, |config| {
        config.prefill_decode.connector = Some(router_connector(Connector::Nixl));
        let limits = serde_json::from_str(r#"{"max_tokens": 1}"#).unwrap();
        config.tenants = vec![TenantSpec {
            limits: Some(limits),
            ..tenant("a")
        }];
    })
    .await;
    let mut socket = Socket::with_key(cluster.router.api, "sk-a").await;
    socket
        .respond(json!({"input": "one", "generate": false, "store": false}))
        .await;
    let done = ["outcome=\"done\""];
    eventually("the prompt was computed", async || {
        cluster.metric("warmroute_prewarms_total", &done).await == 1.0
    })
    .await;
}

#[tokio::test]
async fn prompts_are_sent_ahead_only_as_far_as_that_is_allowed() {
    let cluster = Cluster::start(vec![fast()], |config| {
        config.responses.websocket.max_prewarms = 0;
    })
    .await;
    let mut socket = Socket::open(cluster.router.api).await;
    socket.respond(json!({"generate": false})).await;
    // There is no prompt yet.
    let tools = json!([{"type": "additional_tools", "role": "developer", "tools": []}]);
    socket
        .respond(json!({"input": tools, "generate": false}))
        .await;
    let skipped = ["outcome=\"skipped\""];
    assert_eq!(
        cluster.metric("warmroute_prewarms_total", &skipped).await,
        1.0
    );
    assert_eq!(cluster.engines[0].stats().await.finished, 0);
}

#[tokio::test]
async fn the_habits_of_codex_are_understood() {
    let cluster = Cluster::fast(1).await;
    let headers = [
        ("openai-beta", "responses_websockets=2026-02-06"),
        ("session-id", "s"),
        ("x-client-request-id", "r"),
    ];
    let mut socket = Socket::try_open(cluster.router.api, &headers)
        .await
        .unwrap();
    let more = json!({"stream": true, "stream_options": {"include_obfuscation": false},
        "client_metadata": {"traceparent": "x"}});
    let response = socket.respond(more).await;
    let sent = cluster.engines[0].last_body().await;
    assert_eq!(sent.get("client_metadata"), None);
    let processed = json!({"type": "response.processed", "response_id": id(&response)});
    socket.text(&processed.to_string()).await;
    socket.respond(json!({})).await;
}

#[tokio::test]
async fn a_frame_that_is_refused_leaves_the_connection_open() {
    let cluster = Cluster::fast(1).await;
    let mut socket = Socket::open(cluster.router.api).await;
    let mut check = async |message: Message, code: &str| {
        socket.send(message).await;
        let error = socket.event().await;
        let found = (error["status"].as_u64(), error["error"]["code"].as_str());
        assert_eq!(found, (Some(400), Some(code)), "{error}");
        assert_eq!(error.get("stream_id"), None);
    };
    check(Message::text("{"), "invalid_json").await;
    check(Message::binary(&b"{}"[..]), "binary_frame").await;
    check(
        Message::text(r#"{"type":"response.inject"}"#),
        "unknown_event_type",
    )
    .await;
    check(
        Message::text(r#"{"type":"response.create","stream_id":null}"#),
        "invalid_stream_id",
    )
    .await;
    for (more, status, code, param) in [
        (
            json!({"model": null}),
            400,
            "missing_required_parameter",
            "model",
        ),
        (json!({"model": "nope"}), 404, "model_not_found", "model"),
        (
            json!({"stream": false}),
            400,
            "unsupported_parameter",
            "stream",
        ),
        (
            json!({"background": true}),
            400,
            "unsupported_parameter",
            "background",
        ),
        (json!({"top_p": 2}), 400, "invalid_value", "top_p"),
    ] {
        let error = socket.fail(more).await;
        assert_eq!(error["status"], status, "{error}");
        assert_eq!(error["error"]["code"], code);
        assert_eq!(error["error"]["param"], param);
    }
    socket.respond(json!({})).await;
}

#[tokio::test]
async fn a_response_that_fails_after_its_start_ends_with_its_own_event() {
    let cluster = Cluster::start(vec![unhurried()], |_| {}).await;
    let mut socket = Socket::open(cluster.router.api).await;
    let first = socket.respond(json!({"store": false})).await;
    let cut = Faults {
        cut_after_tokens: Some(4),
        ..Faults::default()
    };
    cluster.engines[0].fault(cut).await;
    let more = json!({"store": false, "max_output_tokens": 50, "previous_response_id": id(&first)});
    socket.create(more).await;
    let events = socket.turn().await;
    assert_eq!(kinds(&events).last(), Some(&"response.failed"));
    cluster.engines[0].fault(Faults::default()).await;
    let error = socket
        .fail(json!({"store": false, "previous_response_id": id(&first)}))
        .await;
    assert_eq!(error["error"]["code"], "previous_response_not_found");
}

#[tokio::test]
async fn a_client_that_leaves_cancels_what_runs() {
    let cluster = Cluster::start(vec![unhurried()], |_| {}).await;
    let mut socket = Socket::open(cluster.router.api).await;
    socket.create(json!({"max_output_tokens": 5_000})).await;
    socket
        .create(json!({"max_output_tokens": 5_000, "stream_id": "b"}))
        .await;
    eventually("both run", async || {
        cluster.engines[0].stats().await.running == 2
    })
    .await;
    drop(socket);
    eventually("none runs", async || {
        cluster.engines[0].stats().await.running == 0
    })
    .await;
    let mut socket = Socket::open(cluster.router.api).await;
    socket.create(json!({"max_output_tokens": 5_000})).await;
    eventually("it runs", async || {
        cluster.engines[0].stats().await.running == 1
    })
    .await;
    socket.send(Message::Close(None)).await;
    eventually("none runs", async || {
        cluster.engines[0].stats().await.running == 0
    })
    .await;
}

#[tokio::test]
async fn a_handshake_that_is_not_one_is_answered_over_http() {
    let cluster = Cluster::fast(1).await;
    let key = ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==");
    let version = ("sec-websocket-version", "13");
    let upgrade = [("connection", "Upgrade"), ("upgrade", "websocket")];
    let check = async |more: &[(&str, &str)], status: u16, code: &str| {
        let headers = [&upgrade[..], more].concat();
        let answer = client::send(cluster.router.api, "GET", PATH, &headers, "").await;
        assert_eq!((answer.status, &*answer.code()), (status, code), "{more:?}");
        answer
    };
    check(&[version], 400, "invalid_handshake").await;
    check(
        &[version, ("sec-websocket-key", "short")],
        400,
        "invalid_handshake",
    )
    .await;
    let body = ("content-length", "2");
    check(&[key, version, body], 400, "invalid_handshake").await;
    let old = check(
        &[key, ("sec-websocket-version", "8")],
        426,
        "invalid_handshake",
    )
    .await;
    assert_eq!(old.header("sec-websocket-version"), "13");
    check(
        &[key, version, ("origin", "https://evil.example")],
        403,
        "origin_not_allowed",
    )
    .await;
    let plain = cluster.get(PATH).await;
    assert_eq!(plain.status, 405);
}

#[tokio::test]
async fn without_websocket_mode_a_client_uses_http_at_once() {
    for is_stateful in [true, false] {
        let cluster = Cluster::start(vec![fast()], |config| {
            config.responses.websocket.enabled = !is_stateful;
            if !is_stateful {
                config.responses.mode = Mode::PassThrough;
            }
        })
        .await;
        let (status, body) = Socket::try_open(cluster.router.api, &[]).await.unwrap_err();
        assert_eq!(status, 426);
        assert_eq!(body["error"]["code"], "websocket_not_available");
        let headers = [("connection", "Upgrade"), ("upgrade", "websocket")];
        let answer = client::send(cluster.router.api, "GET", PATH, &headers, "").await;
        assert_eq!(answer.header("connection"), "close");
    }
}

#[tokio::test]
async fn a_page_of_an_allowed_origin_may_open_one() {
    let cluster = Cluster::start(vec![fast()], |config| {
        config.api.requests.cors.allowed_origins = vec!["https://chat.example".to_owned()];
    })
    .await;
    let origin = [("origin", "https://chat.example")];
    let mut socket = Socket::try_open(cluster.router.api, &origin).await.unwrap();
    socket.respond(json!({})).await;
    let origin = [("origin", "https://evil.example")];
    let (status, _) = Socket::try_open(cluster.router.api, &origin)
        .await
        .unwrap_err();
    assert_eq!(status, 403);
}
