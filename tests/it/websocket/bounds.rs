//! What bounds a connection, and how it ends.

use std::time::Duration;

use serde_json::json;
use tokio_tungstenite::tungstenite::Message;
use warmroute::config::Config;
use warmroute::openai::tenant::TenantSpec;

use super::socket::{PATH, Socket, id, kinds};
use crate::client;
use crate::cluster::{Cluster, Router, chat, eventually, fast, unhurried};
use crate::patience::too_long;
use crate::reload::{Folder, applied, engines, text, workers};
use crate::stub::Stub;

fn tenant(name: &str, limits: &str) -> TenantSpec {
    TenantSpec {
        limits: (!limits.is_empty()).then(|| serde_json::from_str(limits).unwrap()),
        ..crate::cluster::tenant(name)
    }
}

async fn with(change: impl FnOnce(&mut Config)) -> Cluster {
    Cluster::start(vec![unhurried()], change).await
}

async fn closed(router: &Router, reason: &str) {
    let line = format!("warmroute_websocket_connections_closed_total{{reason=\"{reason}\"}} 1");
    eventually("it is counted as closed", async || {
        let page = client::get(router.admin, "/metrics").await;
        page.text().contains(&line)
    })
    .await;
}

#[tokio::test]
async fn connections_are_bounded_in_all_and_by_tenant() {
    let cluster = with(|config| {
        config.tenants = vec![tenant("a", ""), tenant("b", "")];
        config.responses.websocket.max_connections = 3;
        config.responses.websocket.max_connections_per_tenant = 2;
    })
    .await;
    let api = cluster.router.api;
    let open = async |key: &str| {
        let bearer = format!("Bearer {key}");
        let opened = Socket::try_open(api, &[("authorization", &*bearer)]).await;
        opened.map_err(|(status, _)| status)
    };
    let mut first = open("sk-a").await.unwrap();
    let _second = open("sk-a").await.unwrap();
    assert_eq!(open("sk-a").await.unwrap_err(), 429);
    let _third = open("sk-b").await.unwrap();
    assert_eq!(open("sk-b").await.unwrap_err(), 503);
    first.send(Message::Close(None)).await;
    eventually("its place is free", async || open("sk-a").await.is_ok()).await;
    let name = "warmroute_websocket_connections_refused_total";
    assert!(cluster.metric(name, &["reason=\"tenant\""]).await >= 1.0);
    assert!(cluster.metric(name, &["reason=\"total\""]).await >= 1.0);
}

#[tokio::test]
async fn a_connection_is_its_tenants() {
    let cluster = Cluster::start(vec![fast()], |config| {
        config.tenants = vec![
            tenant("a", ""),
            tenant("b", r#"{"requests_per_minute": 1}"#),
        ];
    })
    .await;
    let api = cluster.router.api;
    for headers in [&[][..], &[("authorization", "Bearer sk-x")]] {
        let (status, body) = Socket::try_open(api, headers).await.unwrap_err();
        assert_eq!(status, 401);
        assert_eq!(body["error"]["code"], "invalid_api_key");
    }
    let mut a = Socket::with_key(api, "sk-a").await;
    let stored = a.respond(json!({})).await;
    let head = &cluster.engines[0].last_post().await.headers;
    assert!(
        !head
            .iter()
            .any(|(name, _)| name == "authorization" || name == "sec-websocket-key")
    );
    let mut b = Socket::with_key(api, "sk-b").await;
    let error = b.fail(json!({"previous_response_id": id(&stored)})).await;
    assert_eq!(error["error"]["code"], "previous_response_not_found");
    // Each turn counts in the tenant's limits.
    b.respond(json!({})).await;
    let error = b.fail(json!({"stream_id": "x"})).await;
    assert_eq!(
        (&error["status"], &error["stream_id"]),
        (&json!(429), &json!("x"))
    );
    let wait = error["error"]["headers"]["retry-after"].as_str().unwrap();
    assert!(wait.parse::<u64>().unwrap() > 10, "{error}");
}

#[tokio::test]
async fn a_reload_cuts_no_connection_and_turns_use_the_new_configuration() {
    let folder = Folder::new();
    let engines = engines(1).await;
    let with_keys = |key: &str| {
        let list = workers(&engines);
        text(&format!(
            "{list}tenants: [{{name: a, keys: [{key}]}}, {{name: b, keys: [sk-c]}}]\n"
        ))
    };
    let before = with_keys("sk-a");
    let cluster = folder.start(engines, &before).await;
    cluster.all_up().await;
    let mut socket = Socket::with_key(cluster.router.api, "sk-a").await;
    let response = socket.respond(json!({"store": false})).await;
    folder.write(&before.replace("sk-a", "sk-new"));
    applied(&cluster).await;
    let more = json!({"store": false, "previous_response_id": id(&response)});
    let error = socket.fail(more.clone()).await;
    assert_eq!(error["status"], 401);
    assert_eq!(error["error"]["code"], "invalid_api_key");
    // The key of another tenant is not this one's.
    folder.write(&before.replace("sk-a", "sk-z").replace("sk-c", "sk-a"));
    applied(&cluster).await;
    assert_eq!(socket.fail(json!({})).await["status"], 401);
    folder.write(&before);
    applied(&cluster).await;
    socket.respond(json!({})).await;
}

#[tokio::test]
async fn a_turn_beyond_the_queue_is_refused() {
    let cluster = with(|config| config.responses.websocket.max_queued_turns = 1).await;
    let mut socket = Socket::open(cluster.router.api).await;
    cluster.engines[0].hold_after(3).await;
    for _ in 0..3 {
        socket.create(json!({"max_output_tokens": 30})).await;
    }
    let name = "warmroute_websocket_limits_reached_total";
    eventually("one is refused", async || {
        cluster.metric(name, &["bound=\"queue\""]).await == 1.0
    })
    .await;
    cluster.engines[0].let_go().await;
    let mut errors = 0;
    for _ in 0..3 {
        let events = socket.turn().await;
        // The refusal may come between the events of what runs.
        errors += usize::from(events.last().unwrap()["type"] == "error");
    }
    assert_eq!(errors, 1);
    assert_eq!(cluster.metric(name, &["bound=\"queue\""]).await, 1.0);
}

#[tokio::test]
async fn what_a_connection_remembers_is_bounded() {
    let cluster = with(|config| config.responses.websocket.max_memory = 4 << 10).await;
    let mut socket = Socket::open(cluster.router.api).await;
    let long = json!({"input": "x".repeat(8 << 10), "store": false});
    let forgotten = socket.respond(long).await;
    let short = socket.respond(json!({"store": false})).await;
    let error = socket
        .fail(json!({"previous_response_id": id(&forgotten)}))
        .await;
    assert_eq!(error["error"]["code"], "previous_response_not_found");
    socket
        .respond(json!({"previous_response_id": id(&short)}))
        .await;
    let name = "warmroute_websocket_memory_bytes";
    let bytes = cluster.metric(name, &[]).await;
    assert!((1.0..4096.0).contains(&bytes), "{bytes}");
    drop(socket);
    eventually("it is given back", async || {
        cluster.metric(name, &[]).await == 0.0
    })
    .await;
}

#[tokio::test]
async fn a_message_that_is_too_large_closes_the_connection() {
    let cluster = with(|config| config.responses.websocket.max_message_size = 4 << 10).await;
    let mut socket = Socket::open(cluster.router.api).await;
    socket.create(json!({"input": "x".repeat(8 << 10)})).await;
    assert_eq!(socket.closed().await, 1009);
    closed(&cluster.router, "protocol").await;
}

#[tokio::test]
async fn a_message_for_which_no_memory_is_left_closes_its_connection() {
    let cluster = with(|config| config.responses.websocket.max_total_memory = 256 << 10).await;
    let mut other = Socket::open(cluster.router.api).await;
    let mut socket = Socket::open(cluster.router.api).await;
    // Larger than the buffers of sockets, and never complete.
    socket.begin(12 << 20, 4 << 20).await;
    assert_eq!(socket.closed().await, 1013);
    closed(&cluster.router, "memory").await;
    other.respond(json!({})).await;
    let bytes = "warmroute_websocket_memory_bytes";
    assert!(cluster.metric(bytes, &[]).await < 4096.0);
}

#[tokio::test]
async fn a_turn_that_waits_for_memory_counts_meanwhile() {
    let cluster = with(|config| {
        config.api.requests.max_total_body = 2 << 20;
        config.api.requests.max_body_wait = too_long();
    })
    .await;
    let api = cluster.router.api;
    let upload = chat(&"x".repeat(900 << 10), 1, false);
    let (uploads, _) = client::unfinished_uploads(api, "/v1/chat/completions", &upload, 1).await;
    let share = f64::from(1 << 20);
    eventually("the upload has its client's share", async || {
        cluster.metric("warmroute_request_body_bytes", &[]).await == share
    })
    .await;
    let mut socket = Socket::open(api).await;
    socket.create(json!({"input": "x".repeat(300 << 10)})).await;
    eventually("the turn waits", async || {
        let waiting = cluster.metric("warmroute_request_bodies_waiting", &[]);
        waiting.await == 1.0
    })
    .await;
    let bytes = "warmroute_websocket_memory_bytes";
    assert!(cluster.metric(bytes, &[]).await > 300_000.0);
    drop(uploads);
    socket.turn().await;
    drop(socket);
    eventually("it is given back", async || {
        cluster.metric(bytes, &[]).await == 0.0
    })
    .await;
}

#[tokio::test]
async fn a_ping_between_the_fragments_of_a_message_hides_none_of_them() {
    let cluster = with(|config| config.responses.websocket.max_total_memory = 1 << 20).await;
    let mut socket = Socket::open(cluster.router.api).await;
    socket.fragments(0..8, 60_000).await;
    let bytes = "warmroute_websocket_memory_bytes";
    eventually("they count", async || {
        cluster.metric(bytes, &[]).await > 400_000.0
    })
    .await;
    socket.fragments(8..60, 60_000).await;
    closed(&cluster.router, "memory").await;
    assert!(cluster.metric(bytes, &[]).await < 4096.0);
}

#[tokio::test]
async fn an_old_connection_ends_when_its_turns_have() {
    let cluster = with(|config| config.responses.websocket.max_age = Duration::from_secs(3)).await;
    let mut socket = Socket::open(cluster.router.api).await;
    cluster.engines[0].hold_after(3).await;
    socket
        .create(json!({"max_output_tokens": 20, "stream_id": "a"}))
        .await;
    let mut error = json!(null);
    eventually("it takes no new turn", async || {
        let other = json!({"stream_id": "b", "generate": false, "store": false});
        socket.create(other).await;
        error = socket.turn().await.pop().unwrap();
        error["type"] == "error"
    })
    .await;
    assert_eq!(error["error"]["code"], "websocket_connection_limit_reached");
    assert_eq!(error.get("stream_id"), None);
    cluster.engines[0].let_go().await;
    let rest = socket.turn().await;
    assert_eq!(kinds(&rest).last(), Some(&"response.incomplete"));
    assert_eq!(socket.closed().await, 1000);
    closed(&cluster.router, "over").await;
}

#[tokio::test]
async fn a_connection_without_turns_is_closed_in_the_end() {
    let cluster =
        with(|config| config.responses.websocket.idle_timeout = Duration::from_secs(2)).await;
    let mut busy = Socket::open(cluster.router.api).await;
    cluster.engines[0].hold_after(3).await;
    busy.create(json!({"max_output_tokens": 20})).await;
    assert_eq!(busy.event().await["type"], "response.created");
    let mut idle = Socket::open(cluster.router.api).await;
    assert_eq!(idle.closed().await, 1000);
    cluster.engines[0].let_go().await;
    let events = busy.turn().await;
    assert_eq!(kinds(&events).last(), Some(&"response.incomplete"));
    assert_eq!(busy.closed().await, 1000);
}

#[tokio::test]
async fn a_client_that_answers_no_ping_is_disconnected() {
    let cluster =
        with(|config| config.responses.websocket.ping_interval = Duration::from_secs(1)).await;
    let silent = Socket::open(cluster.router.api).await;
    let mut alive = Socket::open(cluster.router.api).await;
    let answers = async {
        loop {
            assert!(matches!(alive.message().await, Some(Message::Ping(_))));
        }
    };
    tokio::select! {
        () = closed(&cluster.router, "unresponsive") => {}
        () = answers => {}
    }
    alive.respond(json!({})).await;
    drop(silent);
}

/// Spaces before a frame's JSON change nothing.
const PIECE: usize = 20_000;

#[tokio::test]
async fn a_client_that_sends_a_long_message_is_there() {
    let cluster =
        with(|config| config.responses.websocket.ping_interval = Duration::from_secs(1)).await;
    let mut socket = Socket::open(cluster.router.api).await;
    let create = r#"{"type":"response.create","model":"sim","input":"x","max_output_tokens":4}"#;
    let spaces = [b' '; PIECE];
    socket
        .begin((10 * PIECE + create.len()) as u64, PIECE)
        .await;
    for _ in 1..10 {
        // In all longer than a client may leave pings unanswered.
        tokio::time::sleep(Duration::from_millis(400)).await;
        socket.go_on(&spaces).await;
    }
    socket.go_on(create.as_bytes()).await;
    let events = socket.turn().await;
    assert_eq!(kinds(&events).last(), Some(&"response.incomplete"));
}

#[tokio::test]
async fn a_client_that_sends_a_byte_now_and_then_is_disconnected() {
    let cluster =
        with(|config| config.responses.websocket.ping_interval = Duration::from_secs(1)).await;
    let mut socket = Socket::open(cluster.router.api).await;
    socket.begin(10 * PIECE as u64, PIECE).await;
    let drips = async {
        loop {
            socket.go_on(b" ").await;
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    };
    tokio::select! {
        () = closed(&cluster.router, "unresponsive") => {}
        () = drips => {}
    }
}

#[tokio::test]
async fn a_drain_closes_after_the_turns_that_run() {
    let mut cluster = Cluster::with_router_child(vec![unhurried()], |_| {}).await;
    let mut idle = Socket::open(cluster.router.api).await;
    let mut busy = Socket::open(cluster.router.api).await;
    let engine = &cluster.engines[0];
    engine.hold_after(3).await;
    busy.create(json!({"max_output_tokens": 100})).await;
    busy.create(json!({"max_output_tokens": 100})).await;
    eventually("it runs", async || engine.stats().await.running == 1).await;
    cluster.router.child.as_ref().unwrap().signal("TERM");
    assert_eq!(idle.closed().await, 1012);
    let waiting = busy.turn().await.pop().unwrap();
    assert_eq!(waiting["error"]["code"], "stopping", "{waiting}");
    cluster.engines[0].let_go().await;
    let events = busy.turn().await;
    assert_eq!(kinds(&events).last(), Some(&"response.incomplete"));
    assert_eq!(busy.closed().await, 1012);
    drop((idle, busy));
    let child = cluster.router.child.as_mut().unwrap();
    let mut status = None;
    eventually("the router ends", async || {
        status = child.ended();
        status.is_some()
    })
    .await;
    assert_eq!(status.unwrap().code(), Some(0));
}

#[tokio::test]
async fn a_turn_that_outlasts_the_drain_fails_and_its_connection_closes() {
    let cluster = Cluster::with_router_child(vec![unhurried()], |config| {
        config.api.drain_timeout = Duration::from_secs(4);
    })
    .await;
    let mut busy = Socket::open(cluster.router.api).await;
    busy.create(json!({"max_output_tokens": 3_000})).await;
    let first = busy.event().await;
    assert_eq!(first["type"], "response.created", "{first}");
    cluster.router.child.as_ref().unwrap().signal("TERM");
    let last = busy.turn().await.pop().unwrap();
    assert_eq!(last["type"], "response.failed", "{last}");
    assert_eq!(last["response"]["error"]["code"], "server_error", "{last}");
    assert_eq!(busy.closed().await, 1012);
    eventually("the engine has closed the request", async || {
        cluster.engines[0].stats().await.aborted == 1
    })
    .await;
}

#[tokio::test]
async fn a_client_that_does_not_read_holds_its_engine_back_and_is_disconnected() {
    let stub = Stub::endless().await;
    let router = stub
        .router(|config| config.api.advanced.send_timeout = Duration::from_secs(3))
        .await;
    let mut socket = Socket::open(router.api).await;
    socket.create(json!({})).await;
    eventually("its engine sends", async || stub.open() == 1).await;
    closed(&router, "send_timeout").await;
    eventually("its engine stops", async || stub.open() == 0).await;
    // Buffers of three sockets, and no more.
    assert!(stub.taken() < 64 << 20, "{}", stub.taken());
    assert_eq!(client::get(router.api, PATH).await.status, 405);
}

#[tokio::test]
async fn a_client_that_reads_none_of_the_large_answers_to_its_frames_is_not_read_on() {
    let cluster = Cluster::start(vec![fast()], |config| {
        config.api.advanced.send_timeout = Duration::from_secs(3);
    })
    .await;
    let mut socket = Socket::open(cluster.router.api).await;
    let steer = json!({"type": "response.steer", "previous_response_id": "resp_1",
        "input": "x".repeat(1 << 20)});
    // Buffers of two sockets, and no more.
    let sent = socket.flood(&steer.to_string(), 64).await;
    assert!(sent < 64, "{sent}");
    closed(&cluster.router, "send_timeout").await;
}
