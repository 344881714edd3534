//! What clients see when engines, clients or the router itself stop half-way.

use std::time::Duration;

use http_body_util::BodyExt;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use warmroute::config::{Config, DiscoveryEntry, WorkersFile};
use warmroute::fleet::discovery::WorkerDefaults;
use warmroute::routing::Policy;
use warmroute::sim::fault::Faults;
use warmroute::sim::worker::Settings;

use crate::client::{self, Answer};
use crate::cluster::{
    Cluster, Engine, Removed, Router, chat, config, eventually, fast, generating, unhurried,
};
use crate::model_names::{named, serving};
use crate::patience::too_long;
use crate::stub::Stub;

const CHAT: &str = "/v1/chat/completions";

/// Every kind of request: path, body, whether it streams.
fn kinds(max_tokens: usize) -> Vec<(&'static str, String, bool)> {
    let of = |stream: bool| {
        generating(max_tokens, stream)
            .into_iter()
            .map(move |(path, body)| (path, body, stream))
    };
    let embedding = json!({"model": "sim", "input": ["x", "y"]}).to_string();
    let one = ("/v1/embeddings", embedding, false);
    of(false).chain(of(true)).chain([one]).collect()
}

/// Turns, so that a broken worker gets its share.
fn by_turns(config: &mut Config) {
    config.routing.policy = Policy::RoundRobin;
    config.fleet.circuit_breaker.failure_threshold = 1_000;
}

/// An engine that hangs is waited for only this long. So is one that a busy machine holds up.
fn waits_for(config: &mut Config, time: Duration) {
    config.requests.first_byte_timeout = time;
    config.requests.response_timeout = time;
}

/// An engine is gone for longer than a test takes before the probes notice.
pub(crate) fn unnoticed(config: &mut Config) {
    config.fleet.health.interval = Duration::from_secs(600);
}

/// The router believes what [`post_from`] says of a client's address.
pub(crate) fn several_clients(config: &mut Config) {
    let proxies = vec!["127.0.0.1".to_owned()];
    config.api.requests.trusted_proxies = proxies.try_into().unwrap();
}

/// A chat of a client with a number of its own.
pub(crate) async fn post_from(cluster: &Cluster, client: u8, body: String) -> Answer {
    let address = format!("198.51.100.{client}");
    let headers = [("x-forwarded-for", &*address)];
    client::send(cluster.router.api, "POST", CHAT, &headers, body).await
}

pub(crate) fn refuse(status: u16) -> Faults {
    Faults {
        refuse: Some(status),
        ..Faults::default()
    }
}

pub(crate) fn hang() -> Faults {
    Faults {
        hang: true,
        ..Faults::default()
    }
}

/// The events of a stream: name, and data as JSON (null for `[DONE]`).
fn events(text: &str) -> Vec<(String, Value)> {
    let event = |block: &str| {
        let field = |name: &str| {
            let mut lines = block.lines();
            lines.find_map(|line| line.strip_prefix(name).map(str::to_owned))
        };
        let data = field("data: ").unwrap_or_else(|| panic!("no data in {block:?}"));
        let data = match data.as_str() {
            "[DONE]" => Value::Null,
            data => serde_json::from_str(data).unwrap(),
        };
        (field("event: ").unwrap_or_default(), data)
    };
    let blocks = text.split("\n\n").filter(|block| !block.is_empty());
    blocks.map(event).collect()
}

/// A stream that broke off in the middle: what came is kept, and its end says what happened.
pub(crate) fn ends_with_an_error(path: &str, text: &str) {
    let events = events(text);
    assert!(text.ends_with("data: [DONE]\n\n"), "{path}: {text}");
    let (name, last) = &events[events.len() - 2];
    assert!(events.len() > 2, "{path}: {text}");
    if path == "/v1/responses" {
        assert_eq!(name, "response.failed", "{text}");
        assert_eq!(last["response"]["status"], "failed");
        assert_eq!(last["response"]["error"]["code"], "server_error");
        let created = &events[0].1["response"]["id"];
        assert_eq!(&last["response"]["id"], created);
        for (place, (_, data)) in events[..events.len() - 1].iter().enumerate() {
            assert_eq!(data["sequence_number"], place, "{text}");
        }
    } else {
        assert_eq!(last["error"]["type"], "server_error", "{text}");
        assert_eq!(last["error"]["code"], "engine_stream_broken", "{text}");
    }
}

#[tokio::test]
async fn what_fails_before_the_first_byte_is_tried_elsewhere() {
    for (name, fault) in [
        ("refuses", Some(refuse(503))),
        ("bad gateway", Some(refuse(502))),
        ("hangs", Some(hang())),
        ("is gone", None),
    ] {
        let mut cluster = Cluster::start(vec![fast(); 2], |config| {
            by_turns(config);
            unnoticed(config);
            if name == "hangs" {
                waits_for(config, Duration::from_millis(700));
            }
        })
        .await;
        match fault {
            Some(fault) => cluster.engines[0].fault(fault).await,
            None => cluster.engines[0].kill().await,
        }
        for (path, body, stream) in kinds(3) {
            let mut tries = Vec::new();
            for _ in 0..2 {
                let (answer, decided) = cluster.post_decided(path, &body).await;
                assert_eq!(answer.status, 200, "{name}, {path}, stream {stream}");
                assert_eq!(decided.worker, "w1", "{name}, {path}, stream {stream}");
                assert!(!client::has_error(answer.text()), "{}", answer.text());
                tries.push(decided.tries);
            }
            tries.sort_unstable();
            assert_eq!(tries, [1, 2], "{name}, {path}, stream {stream}");
        }
    }
}

#[tokio::test]
async fn what_fails_everywhere_is_told_as_what_it_is() {
    for (name, fault, status, code) in [
        ("refuses", Some(refuse(503)), 503, None),
        ("is broken", Some(refuse(500)), 500, None),
        ("is busy", Some(refuse(429)), 429, None),
        ("hangs", Some(hang()), 504, Some("engine_timeout")),
        ("is gone", None, 502, Some("engine_unreachable")),
    ] {
        let mut cluster = Cluster::start(vec![fast()], |config| {
            by_turns(config);
            unnoticed(config);
            if name == "hangs" {
                waits_for(config, Duration::from_millis(200));
            }
        })
        .await;
        match fault {
            Some(fault) => cluster.engines[0].fault(fault).await,
            None => cluster.engines[0].kill().await,
        }
        for (path, body, stream) in kinds(3) {
            let answer = cluster.post(path, body.clone()).await;
            let text = answer.text();
            assert_eq!(
                answer.status, status,
                "{name}, {path}, stream {stream}: {text}"
            );
            match code {
                Some(code) => assert_eq!(answer.code(), code, "{name}, {path}"),
                None => {
                    let engine = cluster.engines[0].address;
                    let direct = client::post(engine, path, body).await;
                    if path == "/v1/responses" {
                        // The same words in the shape that its clients know.
                        let said = |answer: &Answer| answer.json()["error"]["message"].clone();
                        assert_eq!(said(&answer), said(&direct), "{name}, {path}");
                        assert!(answer.code().parse::<u16>().is_err(), "{text}");
                        continue;
                    }
                    assert_eq!(answer.body, direct.body, "{name}, {path}");
                }
            }
        }
    }
}

#[tokio::test]
async fn an_engines_refusal_that_is_passed_on_says_how_many_attempts_there_were() {
    let mut cluster = Cluster::start(vec![fast(); 2], |config| {
        by_turns(config);
        unnoticed(config);
    })
    .await;
    cluster.engines[0].fault(refuse(503)).await;
    cluster.engines[1].kill().await;
    // Each worker is the first one once.
    for _ in 0..2 {
        let (answer, decided) = cluster.post_decided(CHAT, &chat("x", 1, false)).await;
        assert_eq!((answer.status, decided.worker.as_str()), (503, "w0"));
        assert!(decided.tries > 1, "{}", decided.tries);
    }
}

#[tokio::test]
async fn a_stream_that_breaks_off_ends_with_an_error_and_not_in_a_hang() {
    let after = Some(3);
    let cut = Faults {
        cut_after_tokens: after,
        ..Faults::default()
    };
    let stall = Faults {
        stall_after_tokens: after,
        ..Faults::default()
    };
    for (fault, idle, outcome) in [
        (cut, too_long(), "outcome=\"worker_failed\""),
        (
            stall,
            Duration::from_millis(300),
            "outcome=\"stream_idle_timeout\"",
        ),
    ] {
        let cluster = Cluster::start(vec![fast()], |config| {
            config.requests.stream_idle_timeout = idle;
            config.fleet.circuit_breaker.failure_threshold = 1_000;
        })
        .await;
        cluster.engines[0].fault(fault.clone()).await;
        for (path, body) in generating(50, true) {
            let mut open = cluster.open(path, &body).await;
            assert_eq!(open.status, 200);
            let (text, whole) = open.rest().await;
            assert!(whole, "{path}, {fault:?}: {text}");
            ends_with_an_error(path, &text);
            eventually("the engine was let go", async || {
                cluster.engines[0].stats().await.running == 0
            })
            .await;
        }
        let ends = cluster.metric("warmroute_requests_total", &[outcome]).await;
        assert_eq!(ends, 3.0, "{outcome}");
        cluster.is_worker("w0", "requests", 0).await;
    }
}

#[tokio::test]
async fn an_engines_own_error_in_a_stream_passes_as_it_is() {
    let cluster = Cluster::fast(1).await;
    let fault = Faults {
        error_after_tokens: Some(2),
        ..Faults::default()
    };
    cluster.engines[0].fault(fault).await;
    for (path, body) in &generating(50, true)[..2] {
        let answer = cluster.post(path, body.clone()).await;
        assert!(
            answer.text().contains("EngineCore encountered"),
            "{}",
            answer.text()
        );
        assert_eq!(answer.text().matches("[DONE]").count(), 1);
        // As an engine writes it in a stream.
        assert_eq!(answer.text().matches("\"error\": {").count(), 1);
    }
    let (path, body) = &generating(50, false)[0];
    let answer = cluster.post(path, body.clone()).await;
    assert_eq!(answer.status, 500);
    assert!(
        answer.text().contains("EngineCore encountered"),
        "{}",
        answer.text()
    );
}

#[tokio::test]
async fn a_worker_killed_in_mid_stream_ends_its_streams_with_an_error() {
    let mut cluster = Cluster::start_children(vec![unhurried()], |_| {}).await;
    let mut open = Vec::new();
    for (path, body) in generating(3_000, true) {
        let mut stream = cluster.open(path, &body).await;
        let mut started = stream.until("\n\n").await;
        for _ in 0..3 {
            started += &stream.until("\n\n").await;
        }
        open.push((path, stream, started));
    }
    cluster.engines[0].kill().await;
    for (path, mut stream, started) in open {
        let (rest, whole) = stream.rest().await;
        assert!(whole, "{path}: {rest}");
        ends_with_an_error(path, &(started + &rest));
    }
}

#[tokio::test]
async fn a_worker_killed_before_the_first_byte_costs_a_retry_and_not_the_answer() {
    let mut cluster = Cluster::start_children(vec![fast(); 2], |config| {
        config.routing.policy = Policy::RoundRobin;
    })
    .await;
    let slow = Faults {
        slow_first_ms: 600_000,
        ..Faults::default()
    };
    cluster.engines[0].fault(slow).await;
    let api = cluster.router.api;
    let mut running = Vec::new();
    // Twice, so that each kind has a turn on each worker.
    for (path, body, stream) in kinds(3).into_iter().chain(kinds(3)) {
        let asked = tokio::spawn(async move { client::post(api, path, body).await });
        running.push((path, stream, asked));
        // One after the other, or turns would be taken in any order.
        let total = running.len();
        eventually("it is on a worker", async || {
            let mut sent = 0;
            for name in ["w0", "w1"] {
                sent += cluster.worker(name).await["requests_total"]
                    .as_u64()
                    .unwrap();
            }
            sent == total as u64
        })
        .await;
    }
    let stuck = running.len() / 2;
    cluster.is_worker("w0", "requests", stuck).await;
    cluster.is_worker("w1", "requests", 0).await;
    cluster.engines[0].kill().await;
    for (path, stream, asked) in running {
        let answer = asked.await.unwrap();
        let text = answer.text();
        assert_eq!(answer.status, 200, "{path}, stream {stream}: {text}");
        assert!(!client::has_error(text), "{text}");
    }
    let broken = ["reason=\"connection_lost\""];
    let retries = cluster.metric("warmroute_retries_total", &broken).await;
    assert!(retries > 0.0 && retries <= stuck as f64, "{retries}");
}

#[tokio::test]
async fn a_stopped_process_is_left_for_another_one() {
    let cluster = Cluster::start_children(vec![fast(); 2], |config| {
        by_turns(config);
        unnoticed(config);
        waits_for(config, Duration::from_secs(3));
    })
    .await;
    cluster.engines[0].signal("STOP");
    let mut tries = Vec::new();
    for _ in 0..2 {
        let (answer, decided) = cluster.post_decided(CHAT, &chat("x", 2, false)).await;
        assert_eq!((answer.status, decided.worker.as_str()), (200, "w1"));
        tries.push(decided.tries);
    }
    tries.sort_unstable();
    assert_eq!(tries, [1, 2]);
    let timed_out = ["reason=\"timeout\""];
    assert_eq!(
        cluster.metric("warmroute_retries_total", &timed_out).await,
        1.0
    );
    cluster.engines[0].signal("CONT");
}

#[tokio::test]
async fn connections_that_engines_close_while_idle_cost_nobody_anything() {
    let cluster = Cluster::fast(2).await;
    let fault = Faults {
        close_idle: true,
        ..Faults::default()
    };
    for engine in &cluster.engines {
        engine.fault(fault.clone()).await;
    }
    for n in 0..200 {
        let stream = n % 3 == 0;
        let answer = cluster
            .post(CHAT, chat(&format!("question {n}"), 2, stream))
            .await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(answer.text().contains("[DONE]"), stream);
        assert!(!client::has_error(answer.text()), "{}", answer.text());
    }
    assert_eq!(cluster.metric("warmroute_retries_total", &[]).await, 0.0);
    assert_eq!(
        cluster
            .metric("warmroute_circuit_breaker_transitions_total", &[])
            .await,
        0.0
    );
}

#[tokio::test]
async fn a_connection_that_closes_under_a_request_costs_nobody_anything() {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n";
    let stub = Stub::once(format!("{head}{{}}")).await;
    let router = stub.router(|_| {}).await;
    for n in 0..50 {
        let answer = client::post(router.api, CHAT, chat("x", 1, false)).await;
        assert_eq!((answer.status, answer.text()), (200, "{}"), "{n}");
    }
    let page = client::get(router.admin, "/metrics").await;
    assert!(
        !page.text().contains("warmroute_retries_total{"),
        "{}",
        page.text()
    );
    assert!(
        !page
            .text()
            .contains("warmroute_circuit_breaker_transitions_total{")
    );
}

#[tokio::test]
async fn a_breaker_opens_after_failures_and_closes_once_the_worker_answers_again() {
    let cluster = Cluster::start(vec![fast(); 2], |config| {
        by_turns(config);
        several_clients(config);
        config.fleet.circuit_breaker.failure_threshold = 3;
        config.fleet.circuit_breaker.open_duration = Duration::from_secs(5);
    })
    .await;
    cluster.engines[0].fault(refuse(500)).await;
    let mut failures = 0;
    for n in 1..=6 {
        assert_eq!(
            cluster.worker("w0").await["circuit_breaker"],
            if failures < 3 { "closed" } else { "open" },
            "{n}"
        );
        let answer = post_from(&cluster, n, chat("x", 1, false)).await;
        failures += u32::from(answer.status == 500);
    }
    assert_eq!(failures, 3);
    assert_eq!(cluster.worker("w0").await["circuit_breaker"], "open");
    assert_eq!(
        cluster.metric("warmroute_circuit_breaker_state", &[]).await,
        2.0
    );
    let (answer, decided) = cluster.post_decided(CHAT, &chat("x", 1, false)).await;
    assert_eq!((answer.status, decided.worker.as_str()), (200, "w1"));

    cluster.engines[0].fault(Faults::default()).await;
    eventually("the breaker lets a request try", async || {
        cluster.post(CHAT, chat("x", 1, false)).await;
        cluster.worker("w0").await["circuit_breaker"] == "closed"
    })
    .await;
    let changes = "warmroute_circuit_breaker_transitions_total";
    assert_eq!(
        cluster
            .metric(changes, &["to=\"open\"", "worker=\"w0\""])
            .await,
        1.0
    );
    assert_eq!(
        cluster
            .metric(changes, &["to=\"closed\"", "worker=\"w0\""])
            .await,
        1.0
    );
    assert_eq!(
        cluster.metric("warmroute_circuit_breaker_state", &[]).await,
        0.0
    );
}

/// Neither a trial request nor a round of health checks comes within the test, only what follows lost connections.
#[tokio::test]
async fn a_lone_engine_that_is_killed_and_started_again_takes_all_requests_at_once() {
    let slow = Settings {
        decode_ms: 100,
        ..fast()
    };
    let mut cluster = Cluster::start_children(vec![slow.clone()], |config| {
        unnoticed(config);
        config.fleet.circuit_breaker.open_duration = Duration::from_secs(600);
    })
    .await;
    cluster.engines[0].kill().await;
    eventually("its circuit breaker opens", async || {
        let answer = cluster.post(CHAT, chat("x", 1, false)).await;
        assert!(answer.status >= 500, "{}", answer.text());
        cluster.worker("w0").await["circuit_breaker"] == "open"
    })
    .await;
    cluster.engines[0].restart(slow).await;
    let api = cluster.router.api;
    // It comes again until it is taken, and its answer takes minutes.
    let long = tokio::spawn(async move {
        loop {
            let answer = client::post(api, CHAT, chat("long", 3_000, false)).await;
            if answer.status < 500 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    cluster.is_worker("w0", "requests", 1).await;
    for n in 0..3 {
        let answer = cluster.post(CHAT, chat(&format!("{n}"), 1, false)).await;
        assert_eq!(answer.status, 200, "{n}: {}", answer.text());
    }
    assert!(!long.is_finished());
    long.abort();
    assert_eq!(cluster.worker("w0").await["circuit_breaker"], "closed");
    let closed = ["to=\"closed\"", "worker=\"w0\""];
    let changes = "warmroute_circuit_breaker_transitions_total";
    assert_eq!(cluster.metric(changes, &closed).await, 1.0);
}

#[tokio::test]
async fn a_request_that_tries_a_worker_again_counts_as_one_failure() {
    let mut cluster = Cluster::start(vec![fast()], |config| {
        unnoticed(config);
        config.fleet.circuit_breaker.failure_threshold = 3;
        config.fleet.circuit_breaker.open_duration = Duration::from_secs(600);
    })
    .await;
    cluster.engines[0].kill().await;
    for n in 1..=3 {
        let answer = cluster.post(CHAT, chat("x", 1, false)).await;
        assert_eq!(answer.status, 502, "request {n}");
        // The third request's first try opens the breaker.
        let (tries, expected) = if n < 3 { (3, "closed") } else { (1, "open") };
        let attempts = format!("in {tries} attempts");
        assert!(answer.text().contains(&attempts), "{}", answer.text());
        assert_eq!(
            cluster.worker("w0").await["circuit_breaker"],
            expected,
            "request {n}"
        );
    }
}

#[tokio::test]
async fn a_worker_whose_streams_keep_breaking_off_is_left_alone() {
    let cluster = Cluster::start(vec![fast(); 2], |config| {
        by_turns(config);
        several_clients(config);
        config.fleet.circuit_breaker.failure_threshold = 3;
        config.fleet.circuit_breaker.open_duration = Duration::from_secs(600);
    })
    .await;
    let cut = Faults {
        cut_after_tokens: Some(2),
        ..Faults::default()
    };
    for engine in &cluster.engines {
        engine.fault(cut.clone()).await;
    }
    for n in 0..5 {
        let answer = post_from(&cluster, n, chat("x", 9, true)).await;
        assert_eq!(answer.status, 200);
        ends_with_an_error(CHAT, answer.text());
    }
    // The one that had the first turn had three of them.
    eventually("the circuit breaker of one is open", async || {
        let [w0, w1] = [cluster.worker("w0").await, cluster.worker("w1").await];
        w0["circuit_breaker"] == "open" || w1["circuit_breaker"] == "open"
    })
    .await;
}

#[tokio::test]
async fn a_busy_worker_gets_the_pause_that_it_asked_for() {
    let cluster = Cluster::start(vec![fast(); 2], by_turns).await;
    let busy = Faults {
        retry_after: Some(25),
        ..refuse(503)
    };
    cluster.engines[0].fault(busy).await;
    for n in 0..6 {
        let (answer, decided) = cluster.post_decided(CHAT, &chat("x", 1, false)).await;
        assert_eq!((answer.status, decided.worker.as_str()), (200, "w1"), "{n}");
    }
    assert_eq!(cluster.engines[0].stats().await.refused, 1);
    assert_eq!(cluster.worker("w0").await["circuit_breaker"], "closed");

    let busy = Faults {
        retry_after: Some(25),
        ..refuse(503)
    };
    cluster.engines[1].fault(busy).await;
    let answer = cluster.post(CHAT, chat("x", 1, false)).await;
    assert_eq!((answer.status, answer.header("retry-after")), (503, "25"));
}

#[tokio::test]
async fn a_pause_lasts_whatever_else_the_worker_finishes() {
    let cluster = Cluster::start(vec![unhurried(); 2], by_turns).await;
    // One on each worker, of which the first does not end yet.
    cluster.engines[0].hold_after(3).await;
    let running = streams(&cluster, 2, 30).await;
    let busy = Faults {
        retry_after: Some(25),
        ..refuse(503)
    };
    let held = Faults {
        stall_after_tokens: Some(3),
        ..busy.clone()
    };
    cluster.engines[0].fault(held).await;
    for _ in 0..2 {
        let (answer, decided) = cluster.post_decided(CHAT, &chat("x", 1, false)).await;
        assert_eq!((answer.status, decided.worker.as_str()), (200, "w1"));
    }
    cluster.engines[0].fault(busy).await;
    for mut stream in running {
        assert!(stream.rest().await.1);
    }
    cluster.is_worker("w0", "requests", 0).await;
    for _ in 0..4 {
        let (answer, decided) = cluster.post_decided(CHAT, &chat("x", 1, false)).await;
        assert_eq!((answer.status, decided.tries), (200, 1));
        assert_eq!(decided.worker, "w1");
    }
    assert_eq!(cluster.engines[0].stats().await.refused, 1);
}

#[tokio::test]
async fn an_engine_hears_at_once_that_a_client_left() {
    let cluster = Cluster::start(vec![unhurried()], |_| {}).await;
    let engine = &cluster.engines[0];
    let mut aborted = 0;
    for (path, body, stream) in kinds(3_000) {
        if path == "/v1/embeddings" {
            continue;
        }
        let api = cluster.router.api;
        if stream {
            let mut open = cluster.open(path, &body).await;
            open.until("\n\n").await;
        } else {
            let asked = tokio::spawn(async move { client::post(api, path, body).await });
            eventually("the engine computes", async || {
                engine.stats().await.running == 1
            })
            .await;
            asked.abort();
        }
        aborted += 1;
        eventually(&format!("{path} was aborted"), async || {
            engine.stats().await.aborted == aborted
        })
        .await;
    }
    let slow = Faults {
        slow_first_ms: 600_000,
        ..Faults::default()
    };
    engine.fault(slow).await;
    for (path, body, stream) in kinds(3) {
        let api = cluster.router.api;
        let asked = tokio::spawn(async move { client::post(api, path, body).await });
        eventually("the engine has it", async || {
            engine.stats().await.running == 1
        })
        .await;
        asked.abort();
        aborted += 1;
        let what = format!("{path}, stream {stream}, was aborted before its first byte");
        eventually(&what, async || engine.stats().await.aborted == aborted).await;
    }
    let left = "outcome=\"client_disconnected\"";
    eventually("all are counted", async || {
        cluster.metric("warmroute_requests_total", &[left]).await == aborted as f64
    })
    .await;
    cluster.is_worker("w0", "requests", 0).await;
    assert_eq!(
        cluster
            .metric("warmroute_circuit_breaker_transitions_total", &[])
            .await,
        0.0
    );
}

#[tokio::test]
async fn a_client_that_leaves_with_bytes_behind_its_request_has_left() {
    let cluster = Cluster::start(vec![unhurried()], |_| {}).await;
    let engine = &cluster.engines[0];
    let more = chat("x", 1, false);
    let next = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{more}",
        more.len()
    );
    let mut aborted = 0;
    for stream in [false, true] {
        let body = chat("x", 3_000, stream);
        let head = format!(
            "POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {}",
            body.len()
        );
        for behind in ["\r\n", "\n", "x", &next, &next.repeat(100)] {
            let mut client = TcpStream::connect(cluster.router.api).await.unwrap();
            let request = format!("{head}\r\n\r\n{body}{behind}");
            client.write_all(request.as_bytes()).await.unwrap();
            eventually("the engine computes", async || {
                engine.stats().await.running == 1
            })
            .await;
            drop(client);
            aborted += 1;
            eventually("the engine hears of it", async || {
                engine.stats().await.aborted == aborted
            })
            .await;
        }
    }
    cluster.is_worker("w0", "requests", 0).await;
    let open = "warmroute_connections";
    eventually("the connections are closed", async || {
        cluster.metric(open, &[]).await == 0.0
    })
    .await;
}

#[tokio::test]
async fn a_client_that_sends_on_without_waiting_is_answered_up_to_a_bound() {
    let cluster = Cluster::start(vec![unhurried()], |_| {}).await;
    let body = chat("x", 20, false);
    let one = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut client = TcpStream::connect(cluster.router.api).await.unwrap();
    client.write_all(one.repeat(4).as_bytes()).await.unwrap();
    let mut answers = Vec::new();
    let four = async {
        while String::from_utf8_lossy(&answers)
            .matches("HTTP/1.1 200 ")
            .count()
            < 4
        {
            assert_ne!(client.read_buf(&mut answers).await.unwrap(), 0);
        }
    };
    tokio::time::timeout(too_long(), four).await.unwrap();
    let mut client = TcpStream::connect(cluster.router.api).await.unwrap();
    let _ = client.write_all(one.repeat(2_000).as_bytes()).await;
    until_closed(&mut client).await;
    let closed = "warmroute_connections_closed_total";
    let pipelined = cluster.metric(closed, &["reason=\"pipelined\""]).await;
    assert_eq!(pipelined, 1.0);
}

#[tokio::test]
async fn an_engine_hears_that_an_http2_client_gave_up() {
    let cluster = Cluster::start(vec![unhurried()], |_| {}).await;
    let engine = &cluster.engines[0];
    let api = cluster.router.api;
    for stream in [false, true] {
        let body = chat("x", 3_000, stream);
        let before = engine.stats().await.aborted;
        let asked = tokio::spawn(async move { client::http2(api, CHAT, vec![body]).await });
        eventually("the engine computes", async || {
            engine.stats().await.running == 1
        })
        .await;
        asked.abort();
        eventually("it was aborted", async || {
            engine.stats().await.aborted == before + 1
        })
        .await;
    }
}

#[tokio::test]
async fn a_client_that_does_not_read_holds_up_its_engine_and_nobody_else() {
    let stub = Stub::endless().await;
    let router = stub.router(|_| {}).await;
    let body = chat("x", 1, true);
    let request = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut lazy = TcpStream::connect(router.api).await.unwrap();
    lazy.write_all(request.as_bytes()).await.unwrap();
    let mut last = 0;
    let mut same = 0;
    eventually("the engine is held up", async || {
        let now = stub.taken();
        same = if now == last && now > 0 { same + 1 } else { 0 };
        last = now;
        same > 40
    })
    .await;
    // What the kernel's buffers of two connections take, which is not the router's memory.
    let held = stub.taken();
    assert!(held < 64 << 20, "{held} bytes taken");

    // A client that reads gets more than that, from the same engine, meanwhile.
    let mut eager = client::open(router.api, "POST", CHAT, &[], body).await;
    let mut got = 0;
    while got < 4 << 20 {
        got += eager.next().await.unwrap().unwrap().len();
    }
    drop(eager);
    eventually("the engine has closed the request", async || {
        stub.open() == 1
    })
    .await;

    let mut answer = vec![0; 1 << 20];
    let mut read = 0;
    while read < held as usize + (1 << 20) {
        let next = tokio::time::timeout(too_long(), lazy.read(&mut answer)).await;
        read += next.unwrap().unwrap();
    }
    drop(lazy);
    eventually("the engine has closed the request", async || {
        stub.open() == 0
    })
    .await;
}

#[tokio::test]
async fn a_client_that_takes_nothing_for_too_long_is_cut_off() {
    let stub = Stub::endless().await;
    let router = stub
        .router(|config| config.api.advanced.send_timeout = Duration::from_millis(300))
        .await;
    let mut lazy = TcpStream::connect(router.api).await.unwrap();
    let body = chat("x", 1, true);
    let request = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    lazy.write_all(request.as_bytes()).await.unwrap();
    eventually("it began", async || stub.taken() > 0).await;
    eventually("the connection was cut", async || stub.open() == 0).await;
    let line = "warmroute_connections_closed_total{reason=\"send_timeout\"} 1";
    eventually("it is counted", async || {
        let page = client::get(router.admin, "/metrics").await;
        page.text().contains(line)
    })
    .await;
}

#[tokio::test]
async fn an_http2_stream_that_gets_no_window_ends_alone() {
    let stub = Stub::endless().await;
    let router = stub
        .router(|config| config.api.advanced.send_timeout = Duration::from_secs(3))
        .await;
    let stream = TcpStream::connect(router.api).await.unwrap();
    let (mut sender, driver) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
            .await
            .unwrap();
    let driver = tokio::spawn(driver);
    let request = || {
        hyper::Request::post(format!("http://{}{CHAT}", router.api))
            .header("content-type", "application/json")
            .body(chat("x", 1, true))
            .unwrap()
    };
    // The connection is read all the while; this answer's body is not.
    let stalled = sender.send_request(request()).await.unwrap();
    assert_eq!(stalled.status(), 200);
    let mut read = sender.send_request(request()).await.unwrap().into_body();
    let reset = "warmroute_streams_reset_total 1";
    let is_reset = async || {
        let page = client::get(router.admin, "/metrics").await;
        page.text().contains(reset)
    };
    let started = std::time::Instant::now();
    while !is_reset().await {
        assert!(
            started.elapsed() < too_long(),
            "the stalled stream was not reset"
        );
        for _ in 0..10 {
            read.frame().await.unwrap().unwrap();
        }
    }
    eventually("only its engine has closed the request", async || {
        stub.open() == 1
    })
    .await;
    for _ in 0..100 {
        read.frame().await.unwrap().unwrap();
    }
    let another = sender.send_request(request()).await.unwrap();
    assert_eq!(another.status(), 200);
    assert!(!driver.is_finished());
    drop((stalled, another));
}

#[tokio::test]
async fn a_slow_engine_is_waited_for() {
    let cluster = Cluster::start(vec![fast()], |config| {
        // The time-out between pieces is not the one for the first.
        config.requests.stream_idle_timeout = Duration::from_secs(2);
    })
    .await;
    let slow = Faults {
        slow_first_ms: 3_000,
        ..Faults::default()
    };
    cluster.engines[0].fault(slow).await;
    let mut asked = tokio::task::JoinSet::new();
    for (path, body, stream) in kinds(3) {
        let api = cluster.router.api;
        asked.spawn(async move { (client::post(api, path, body).await, path, stream) });
    }
    for (answer, path, stream) in asked.join_all().await {
        assert_eq!(answer.status, 200, "{path}, stream {stream}");
        assert!(!client::has_error(answer.text()), "{}", answer.text());
    }
    assert_eq!(cluster.metric("warmroute_retries_total", &[]).await, 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_streams_at_a_time_all_complete() {
    let roomy = Settings {
        running_max: 300.try_into().unwrap(),
        ..unhurried()
    };
    let cluster = Cluster::all_children(vec![roomy; 4]).await;
    let bodies = (0..1_000).map(|n| chat(&format!("{n}: a question of its own"), 20, true));
    let answers = client::http2(cluster.router.api, CHAT, bodies.collect()).await;
    assert_eq!(answers.len(), 1_000);
    for (status, text) in answers {
        assert_eq!(status, 200, "{text}");
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
        assert!(!client::has_error(&text), "{text}");
        assert_eq!(text.matches("data: ").count(), 22, "{text}");
    }
    for engine in &cluster.engines {
        cluster.is_worker(&engine.name, "requests", 0).await;
    }
    let good = ["status=\"200\"", "api=\"chat\""];
    assert_eq!(
        cluster.metric("warmroute_requests_total", &good).await,
        1_000.0
    );
}

/// Streams of which the first event has come.
async fn streams(cluster: &Cluster, count: usize, tokens: usize) -> Vec<client::Open> {
    let mut open = Vec::new();
    for n in 0..count {
        let mut stream = cluster
            .open(CHAT, &chat(&format!("{n}"), tokens, true))
            .await;
        stream.until("\n\n").await;
        open.push(stream);
    }
    open
}

#[tokio::test]
async fn a_router_that_is_told_to_stop_finishes_what_it_has() {
    for by_signal in [true, false] {
        let mut cluster = Cluster::with_router_child(vec![unhurried(); 2], |_| {}).await;
        for engine in &cluster.engines {
            engine.hold_after(3).await;
        }
        let open = streams(&cluster, 20, 40).await;
        if by_signal {
            cluster.router.child.as_ref().unwrap().signal("TERM");
        } else {
            assert_eq!(cluster.post_admin("/drain", "").await.status, 202);
        }
        let api = cluster.router.api;
        eventually("new connections are refused", async || {
            TcpStream::connect(api).await.is_err()
        })
        .await;
        let ready = cluster.admin("/readyz").await;
        assert_eq!((ready.status, ready.text()), (503, "draining\n"));
        assert_eq!(cluster.admin("/healthz").await.status, 200);
        let in_flight = cluster.metric("warmroute_requests_in_flight", &[]).await;
        assert_eq!(in_flight, open.len() as f64, "streams are running still");
        for engine in &cluster.engines {
            engine.let_go().await;
        }
        for mut stream in open {
            let (text, whole) = stream.rest().await;
            assert!(whole && text.ends_with("data: [DONE]\n\n"), "{text}");
            assert!(!client::has_error(&text), "{text}");
        }
        let child = cluster.router.child.as_mut().unwrap();
        let mut status = None;
        eventually("the router ends", async || {
            status = child.ended();
            status.is_some()
        })
        .await;
        assert_eq!(status.unwrap().code(), Some(0), "{}", cluster.router.log());
    }
}

#[tokio::test]
async fn a_router_that_drains_takes_requests_until_load_balancers_have_noticed() {
    for hurries in [false, true] {
        let mut cluster = Cluster::with_router_child(vec![fast()], |config| {
            config.api.drain_delay = Duration::from_secs(if hurries { 600 } else { 2 });
        })
        .await;
        cluster.router.child.as_ref().unwrap().signal("TERM");
        // Without a second signal, a slow machine may find the delay over at any line.
        if hurries {
            eventually("it is not ready", async || {
                cluster.admin("/readyz").await.status == 503
            })
            .await;
            for number in 0..20 {
                let answer = cluster
                    .post(CHAT, chat(&format!("{number}"), 1, false))
                    .await;
                assert_eq!(answer.status, 200, "{number}");
            }
            cluster.router.child.as_ref().unwrap().signal("TERM");
        }
        let api = cluster.router.api;
        eventually(
            "new connections are refused",
            async || match client::try_open(api, "GET", "/v1/models", &[], "").await {
                Ok(answer) => {
                    assert_eq!(answer.status, 200);
                    false
                }
                Err(_) => true,
            },
        )
        .await;
        let child = cluster.router.child.as_mut().unwrap();
        eventually("the router ends", async || child.ended().is_some()).await;
    }
}

#[tokio::test]
async fn a_drain_lets_http2_streams_finish() {
    let mut cluster = Cluster::with_router_child(vec![unhurried()], |_| {}).await;
    let api = cluster.router.api;
    cluster.engines[0].hold_after(3).await;
    let bodies = (0..20).map(|n| chat(&format!("{n}"), 50, true)).collect();
    let asked = tokio::spawn(async move { client::http2(api, CHAT, bodies).await });
    eventually("all run", async || {
        cluster.engines[0].stats().await.running == 20
    })
    .await;
    cluster.router.child.as_ref().unwrap().signal("TERM");
    cluster.engines[0].let_go().await;
    for (status, text) in asked.await.unwrap() {
        assert_eq!(status, 200);
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
        assert!(!client::has_error(&text), "{text}");
    }
    let child = cluster.router.child.as_mut().unwrap();
    eventually("the router ends", async || child.ended().is_some()).await;
}

#[tokio::test]
async fn what_runs_longer_than_the_drain_may_take_is_cut() {
    let mut cluster = Cluster::with_router_child(vec![unhurried()], |config| {
        config.api.drain_timeout = Duration::from_millis(500);
    })
    .await;
    let open = streams(&cluster, 5, 3_000).await;
    let child = cluster.router.child.as_mut().unwrap();
    child.signal("TERM");
    let mut status = None;
    eventually("the router ends", async || {
        status = child.ended();
        status.is_some()
    })
    .await;
    assert_eq!(status.unwrap().code(), Some(0));
    for mut stream in open {
        let (text, _) = stream.rest().await;
        assert!(!text.contains("\"finish_reason\":\"length\""), "{text}");
    }
    eventually("the engine has closed the request", async || {
        cluster.engines[0].stats().await.aborted == 5
    })
    .await;
    let log = cluster.router.log();
    assert!(log.contains("the drain timeout is nearly over"), "{log}");
}

#[tokio::test]
async fn an_idle_client_does_not_hold_up_a_drain() {
    let mut cluster = Cluster::with_router_child(vec![fast()], |config| {
        config.api.drain_timeout = 10 * too_long();
    })
    .await;
    let mut idle = TcpStream::connect(cluster.router.api).await.unwrap();
    idle.write_all(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        .await
        .unwrap();
    let mut answer = [0; 64];
    idle.read_exact(&mut answer).await.unwrap();
    let _never_used = TcpStream::connect(cluster.router.api).await.unwrap();
    let child = cluster.router.child.as_mut().unwrap();
    child.signal("INT");
    let mut status = None;
    eventually("the router ends", async || {
        status = child.ended();
        status.is_some()
    })
    .await;
    assert_eq!(status.unwrap().code(), Some(0));
    assert!(!cluster.router.log().contains("connections were cut"));
}

#[tokio::test]
async fn a_connection_beyond_the_cap_waits_for_its_turn() {
    let cluster = Cluster::start(vec![fast()], |config| {
        config.api.advanced.max_connections = 2;
    })
    .await;
    let api = cluster.router.api;
    let first = TcpStream::connect(api).await.unwrap();
    let _second = TcpStream::connect(api).await.unwrap();
    eventually("two are in", async || {
        cluster.metric("warmroute_connections", &[]).await == 2.0
    })
    .await;
    let third = tokio::spawn(async move { client::post(api, CHAT, chat("x", 1, false)).await });
    eventually("it waits for a slot", async || {
        let reached = "warmroute_connections_limit_reached_total";
        cluster.metric(reached, &[]).await >= 1.0
    })
    .await;
    assert_eq!(
        cluster
            .metric("warmroute_connections_accepted_total", &[])
            .await,
        2.0
    );
    assert!(!third.is_finished());
    drop(first);
    assert_eq!(third.await.unwrap().status, 200);
}

/// Reads until the other side closes; gives what came.
async fn until_closed(stream: &mut TcpStream) -> String {
    let mut text = Vec::new();
    let read = tokio::time::timeout(too_long(), stream.read_to_end(&mut text)).await;
    // A reset is a close, too.
    let _ = read.expect("the connection is closed");
    String::from_utf8(text).unwrap()
}

#[tokio::test]
async fn connections_that_dawdle_or_idle_are_closed() {
    let cluster = Cluster::start(vec![fast()], |config| {
        config.api.advanced.header_timeout = Duration::from_secs(1);
        config.api.advanced.idle_timeout = Duration::from_secs(1);
        config.api.requests.body_timeout = Duration::from_millis(300);
    })
    .await;
    let closed = "warmroute_connections_closed_total";
    let connect = async || TcpStream::connect(cluster.router.api).await.unwrap();

    let mut idle = connect().await;
    assert_eq!(until_closed(&mut idle).await, "");
    let mut used = connect().await;
    used.write_all(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        .await
        .unwrap();
    assert!(
        until_closed(&mut used)
            .await
            .starts_with("HTTP/1.1 200 OK\r\n")
    );
    eventually("both are counted", async || {
        cluster.metric(closed, &["reason=\"idle\""]).await == 2.0
    })
    .await;

    let mut slow = connect().await;
    slow.write_all(b"GET /v1/models HT").await.unwrap();
    until_closed(&mut slow).await;
    // A byte now and then is no excuse.
    let (mut reads, mut writes) = connect().await.into_split();
    let dribble = tokio::spawn(async move {
        while writes.write_all(b"G").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
    });
    let mut rest = Vec::new();
    let read = tokio::time::timeout(too_long(), reads.read_to_end(&mut rest)).await;
    let _ = read.expect("the connection is closed");
    dribble.abort();
    eventually("both are counted", async || {
        cluster.metric(closed, &["reason=\"header_timeout\""]).await == 2.0
    })
    .await;

    let mut body = connect().await;
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{");
    body.write_all(head.as_bytes()).await.unwrap();
    let answer = until_closed(&mut body).await;
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    assert!(answer.contains("request_body_timeout"), "{answer}");
}

#[tokio::test]
async fn a_body_that_drips_is_not_waited_for_forever() {
    let cluster = Cluster::start(vec![fast()], |config| {
        config.api.requests.body_timeout = Duration::from_millis(200);
    })
    .await;
    let stream = TcpStream::connect(cluster.router.api).await.unwrap();
    let (mut reads, mut writes) = stream.into_split();
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n{{");
    writes.write_all(head.as_bytes()).await.unwrap();
    let drip = tokio::spawn(async move {
        while writes.write_all(b" ").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let mut answer = vec![0; 4096];
    let read = tokio::time::timeout(too_long(), reads.read(&mut answer)).await;
    let read = read.expect("an answer, not a hang").unwrap();
    drip.abort();
    let answer = String::from_utf8_lossy(&answer[..read]);
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    assert!(answer.contains("fewer than 204 bytes"), "{answer}");
}

#[tokio::test]
async fn an_answer_that_takes_long_is_not_an_idle_connection() {
    let cluster = Cluster::start(vec![fast()], |config| {
        config.api.advanced.header_timeout = Duration::from_millis(500);
        config.api.advanced.idle_timeout = Duration::from_millis(500);
    })
    .await;
    let slow = Faults {
        slow_first_ms: 2_000,
        ..Faults::default()
    };
    cluster.engines[0].fault(slow).await;
    let answer = cluster.post(CHAT, chat("x", 1, false)).await;
    assert_eq!(answer.status, 200);
}

#[tokio::test]
async fn a_changed_workers_file_adds_and_removes_workers() {
    let one = Engine::here("one", fast()).await;
    let two = Engine::here("two", fast()).await;
    let file = Removed::new("workers: []\n");
    let mut config = config();
    config.discovery = vec![DiscoveryEntry::File(WorkersFile {
        path: file.0.to_str().unwrap().to_owned(),
        interval: Duration::from_millis(20),
        defaults: WorkerDefaults::default(),
    })];
    let mut cluster = Cluster {
        router: Router::here(&config).await,
        engines: Vec::new(),
    };
    let list = |engines: &[&Engine]| {
        let line = |engine: &&Engine| {
            format!(
                "  - url: http://{}\n    name: {}\n",
                engine.address, engine.name
            )
        };
        let lines: String = engines.iter().map(line).collect();
        std::fs::write(&file.0, format!("workers:\n{lines}")).unwrap();
    };
    list(&[&one]);
    cluster.is_worker("one", "health", "up").await;
    assert_eq!(cluster.post(CHAT, chat("x", 1, false)).await.status, 200);

    list(&[&one, &two]);
    cluster.is_worker("two", "health", "up").await;

    // A file that cannot be read is no reason to send workers away.
    std::fs::write(&file.0, "workers:\n  - url: 7").unwrap();
    list(&[&two]);
    eventually("one has left", async || {
        cluster.worker("one").await.is_null()
    })
    .await;
    for _ in 0..4 {
        let (answer, decided) = cluster.post_decided(CHAT, &chat("x", 1, false)).await;
        assert_eq!((answer.status, decided.worker.as_str()), (200, "two"));
    }
    cluster.engines.extend([one, two]);
}

#[tokio::test]
async fn a_worker_that_comes_up_later_is_found() {
    let mut engine = Engine::here("late", fast()).await;
    engine.kill().await;
    let mut config = config();
    config.workers = vec![engine.listed()];
    let mut cluster = Cluster {
        router: Router::here(&config).await,
        engines: Vec::new(),
    };
    // No model list of the worker has come yet: that is not the client's mistake.
    for body in [chat("x", 1, false), r#"{"messages":[]}"#.to_owned()] {
        let answer = cluster.post(CHAT, body).await;
        assert_eq!(
            (answer.status, answer.code()),
            (503, "no_healthy_worker".to_owned())
        );
        assert!(!answer.header("retry-after").is_empty());
    }
    assert_eq!(cluster.admin("/readyz").await.status, 503);
    assert_eq!(cluster.get("/v1/models").await.json()["data"], json!([]));
    engine.restart(fast()).await;
    cluster.is_worker("late", "health", "up").await;
    assert_eq!(cluster.admin("/readyz").await.status, 200);
    assert_eq!(cluster.post(CHAT, chat("x", 1, false)).await.status, 200);
    cluster.engines.push(engine);
}

/// A request for a model: status and code of its answer. One that may be sent again says when.
async fn asked(cluster: &Cluster, model: &str) -> (u16, String) {
    let body = chat("x", 1, false).replace("\"sim\"", &format!("\"{model}\""));
    let answer = cluster.post(CHAT, body).await;
    let has_time = !answer.header("retry-after").is_empty();
    assert_eq!(has_time, answer.status == 503, "{}", answer.text());
    (answer.status, answer.code())
}

fn unavailable() -> (u16, String) {
    (503, "no_healthy_worker".to_owned())
}

fn unknown() -> (u16, String) {
    (404, "model_not_found".to_owned())
}

#[tokio::test]
async fn no_model_is_unknown_while_a_worker_has_not_said_what_it_serves() {
    let one = Engine::here("one", serving("one")).await;
    let mut two = Engine::here("two", serving("two")).await;
    two.kill().await;
    let mut config = config();
    config.workers = vec![one.listed(), two.listed()];
    let cluster = Cluster {
        router: Router::here(&config).await,
        engines: Vec::new(),
    };
    cluster.is_worker("one", "health", "up").await;
    cluster.is_worker("two", "health", "down").await;
    assert_eq!(asked(&cluster, "one").await.0, 200);
    for model in ["two", "none"] {
        assert_eq!(asked(&cluster, model).await, unavailable(), "{model}");
    }
    // No alert fires for a client with a wrong name.
    let unsent = async |outcome: &str| {
        let labels = ["model=\"none\"", outcome];
        cluster.metric("warmroute_requests_total", &labels).await
    };
    assert_eq!(unsent("outcome=\"refused\"").await, 2.0);
    assert_eq!(unsent("outcome=\"worker_failed\"").await, 0.0);
    two.restart(serving("two")).await;
    cluster.is_worker("two", "health", "up").await;
    assert_eq!(asked(&cluster, "two").await.0, 200);
    assert_eq!(asked(&cluster, "none").await, unknown());
    // What it served is known now.
    two.kill().await;
    cluster.is_worker("two", "health", "down").await;
    assert_eq!(asked(&cluster, "two").await, unavailable());
    assert_eq!(asked(&cluster, "none").await, unknown());
}

#[tokio::test]
async fn a_model_whose_last_worker_left_is_unavailable_and_not_unknown() {
    let one = Engine::here("one", serving("one")).await;
    let two = Engine::here("two", serving("two")).await;
    let file = Removed::new("workers: []\n");
    let list = |engines: &[&Engine]| {
        let line = |engine: &&Engine| {
            let (address, name) = (engine.address, &engine.name);
            format!("  - {{url: 'http://{address}', name: {name}}}\n")
        };
        let lines: String = engines.iter().map(line).collect();
        std::fs::write(&file.0, format!("workers:\n{lines}")).unwrap();
    };
    list(&[&one, &two]);
    let mut config = config();
    config.discovery = vec![DiscoveryEntry::File(WorkersFile {
        path: file.0.to_str().unwrap().to_owned(),
        interval: Duration::from_millis(20),
        defaults: WorkerDefaults::default(),
    })];
    // A name that is configured, and that no worker has served so far.
    config.models = named(json!([{"name": "cold"}]));
    let cluster = Cluster {
        router: Router::here(&config).await,
        engines: Vec::new(),
    };
    for name in ["one", "two"] {
        cluster.is_worker(name, "health", "up").await;
    }
    list(&[&one]);
    eventually("two has left", async || {
        cluster.worker("two").await.is_null()
    })
    .await;
    for model in ["two", "cold"] {
        assert_eq!(asked(&cluster, model).await, unavailable(), "{model}");
    }
    let failed = ["outcome=\"worker_failed\""];
    let failed = cluster.metric("warmroute_requests_total", &failed).await;
    assert_eq!(failed, 2.0, "the fleet lacks their workers");
    assert_eq!(asked(&cluster, "none").await, unknown());
    let listed = cluster.get("/v1/models").await.json();
    assert_eq!(listed["data"].as_array().unwrap().len(), 1, "{listed}");
    let of_two = cluster.get("/v1/models/two").await;
    assert_eq!((of_two.status, of_two.code()), unavailable());
    let none = cluster.get("/v1/models/none").await;
    assert_eq!((none.status, none.code()), unknown());
    assert_eq!(
        cluster
            .metric("warmroute_requests_total", &["outcome=\"router_failed\""])
            .await,
        0.0
    );
    list(&[&one, &two]);
    cluster.is_worker("two", "health", "up").await;
    assert_eq!(asked(&cluster, "two").await.0, 200);
}

#[tokio::test]
async fn a_killed_worker_is_taken_out_and_taken_back() {
    let mut cluster = Cluster::start_children(vec![fast(); 2], |_| {}).await;
    cluster.engines[0].kill().await;
    cluster.is_worker("w0", "health", "down").await;
    let error = cluster.worker("w0").await["last_error"].to_string();
    assert!(error.contains("refused"), "{error}");
    for _ in 0..4 {
        let (answer, decided) = cluster.post_decided(CHAT, &chat("x", 1, false)).await;
        assert_eq!((answer.status, decided.worker.as_str()), (200, "w1"));
        assert_eq!(decided.tries, 1);
    }
    cluster.engines[0].restart(fast()).await;
    cluster.is_worker("w0", "health", "up").await;
}

#[tokio::test]
async fn an_answer_that_is_cut_short_is_not_taken_for_a_whole_one() {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n";
    let stub = Stub::start(format!("{head}{{\"half\":")).await;
    let router = stub.router(|_| {}).await;
    // What came may be lost with the connection, but never looks whole.
    let body = chat("x", 1, false);
    if let Ok(mut open) = client::try_open(router.api, "POST", CHAT, &[], body).await {
        assert_eq!(open.status, 200);
        let (text, whole) = open.rest().await;
        assert!("{\"half\":".starts_with(&text) && !whole, "{text}");
    }

    // Without its first byte it is no answer yet.
    let stub = Stub::start(head).await;
    let router = stub.router(|_| {}).await;
    let answer = client::post(router.api, CHAT, chat("x", 1, false)).await;
    assert_eq!(
        (answer.status, answer.code()),
        (502, "engine_unreachable".to_owned())
    );
}

#[tokio::test]
async fn a_redirect_and_another_protocol_are_no_answers_of_an_engine() {
    let redirect = "HTTP/1.1 307 Temporary Redirect\r\nlocation: http://10.0.0.1:8000/x\r\ncontent-length: 0\r\n\r\n";
    let switch = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n";
    for reply in [redirect, switch] {
        let stub = Stub::start(reply).await;
        let router = stub.router(|_| {}).await;
        for stream in [false, true] {
            let answer = client::post(router.api, CHAT, chat("x", 1, stream)).await;
            assert_eq!(
                (answer.status, answer.code()),
                (502, "invalid_engine_response".to_owned()),
                "{reply}"
            );
            assert!(!answer.headers.contains_key("location"), "{reply}");
            assert!(!answer.text().contains("10.0.0.1"), "{}", answer.text());
        }
    }
}

#[tokio::test]
async fn half_an_event_is_dropped_and_a_stream_without_an_end_gets_one() {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n";
    let event = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n";
    let close = format!("{head}connection: close\r\n\r\n{event}{event}data: {{\"cho");
    let chunk = format!("{:x}\r\n{event}\r\n", event.len());
    let chunked =
        format!("{head}transfer-encoding: chunked\r\n\r\n{chunk}{chunk}40\r\ndata: {{\"cho");
    let ended = format!("{head}transfer-encoding: chunked\r\n\r\n{chunk}{chunk}0\r\n\r\n");
    for answer in [close, chunked, ended] {
        let stub = Stub::start(answer.clone()).await;
        let router = stub.router(|_| {}).await;
        let mut open = client::open(router.api, "POST", CHAT, &[], chat("x", 1, true)).await;
        let (text, whole) = open.rest().await;
        assert!(whole, "{answer}");
        assert!(
            text.starts_with(&format!("{event}{event}data: {{\"error\":")),
            "{text}"
        );
        ends_with_an_error(CHAT, &text);
    }
}

#[tokio::test]
async fn a_request_that_takes_longer_than_allowed_ends_with_an_error() {
    let cluster = Cluster::start(vec![unhurried()], |config| {
        config.requests.request_timeout = Duration::from_secs(2);
    })
    .await;
    let mut asked = tokio::task::JoinSet::new();
    for (path, body) in generating(3_000, true) {
        let api = cluster.router.api;
        asked.spawn(async move { (client::post(api, path, body).await, path) });
    }
    for (answer, path) in asked.join_all().await {
        ends_with_an_error(path, answer.text());
    }
    let ends = "warmroute_requests_total";
    assert_eq!(
        cluster.metric(ends, &["outcome=\"request_timeout\""]).await,
        3.0
    );
    let (path, body) = &generating(3_000, false)[0];
    let answer = cluster.post(path, body.clone()).await;
    assert_eq!(
        (answer.status, answer.code()),
        (504, "request_timeout".to_owned())
    );
    eventually("the engine has closed the request", async || {
        cluster.engines[0].stats().await.aborted == 4
    })
    .await;
    // Its time is over, which says nothing of the worker.
    assert_eq!(cluster.worker("w0").await["circuit_breaker"], "closed");
}

#[tokio::test]
async fn retries_stop_when_their_budget_is_spent() {
    let cluster = Cluster::start(vec![fast(); 2], |config| {
        by_turns(config);
        config.requests.advanced.min_retries_per_second = 0;
        config.requests.advanced.retry_budget_percent = 0;
    })
    .await;
    cluster.engines[0].fault(refuse(503)).await;
    let mut statuses = Vec::new();
    for _ in 0..4 {
        let answer = cluster.post(CHAT, chat("x", 1, false)).await;
        statuses.push(answer.status);
    }
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 200, 503, 503]);
    assert_eq!(
        cluster
            .metric("warmroute_retry_budget_exhausted_total", &[])
            .await,
        2.0
    );
    assert_eq!(cluster.metric("warmroute_retries_total", &[]).await, 0.0);
}

#[tokio::test]
async fn an_idle_workers_load_is_asked_for_with_every_fifth_health_check() {
    const ANSWER: &str = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}";
    let stub = Stub::start(ANSWER).await;
    let router = stub.router(|_| {}).await;
    let checks = async |more: usize| {
        let before = stub.gets("/health");
        let is_enough = async || stub.gets("/health") >= before + more;
        eventually("further health checks", is_enough).await;
    };
    checks(2).await;
    let before = (stub.gets("/health"), stub.gets("/metrics"));
    checks(40).await;
    let health = stub.gets("/health") - before.0;
    let metrics = stub.gets("/metrics") - before.1;
    assert!(
        (health / 5 - 1..=health / 5 + 2).contains(&metrics),
        "{metrics} of {health}"
    );
    // What a request may have changed is asked for at once.
    for _ in 0..5 {
        checks(2).await;
        let before = stub.gets("/metrics");
        let body = chat("hello", 2, false);
        assert_eq!(client::post(router.api, CHAT, body).await.status, 200);
        checks(2).await;
        assert!(stub.gets("/metrics") > before);
    }
}
