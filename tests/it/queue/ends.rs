//! How a wait ends without a worker.

use std::time::Duration;

use tokio::task::JoinSet;
use warmroute::config::ModelOverride;

use super::{Blocker, CHAT, Waiter, block, cluster, seconds, send, wait, waiting, with_queue};
use crate::client::{self, Answer};
use crate::cluster::{Cluster, Engine, chat, eventually, fast};
use crate::patience::too_long;
use crate::reload::{Folder, applied, text, workers};

async fn refusals(cluster: &Cluster, reason: &str) -> f64 {
    let reason = format!("reason=\"{reason}\"");
    cluster
        .metric(
            "warmroute_queue_refusals_total",
            &["model=\"sim\"", &reason],
        )
        .await
}

fn body(kib: usize) -> String {
    chat(&"x".repeat(kib << 10), 1, false)
}

/// A router with a busy engine, and three requests of low priority that wait there, the oldest first. They have most of
/// the memory for bodies.
async fn with_low_that_wait() -> (Cluster, Blocker, Vec<Waiter>) {
    let cluster = Cluster::start(vec![fast()], |config| {
        with_queue(config, |_| {});
        let requests = &mut config.api.requests;
        // A body of 200 KB takes a fifth of it.
        requests.max_total_body = 5 << 18;
        requests.max_body_wait = too_long();
        requests.trusted_proxies = vec!["127.0.0.1".to_owned()].try_into().unwrap();
    })
    .await;
    let blocker = block(&cluster, "busy ").await;
    let mut low = Vec::new();
    for client in ["10.0.0.1", "10.0.0.2", "10.0.0.3"] {
        let headers = [("x-forwarded-for", client), ("x-warmroute-priority", "-5")];
        low.push(wait(&cluster, &headers, body(200)).await);
    }
    (cluster, blocker, low)
}

/// The answer of a request that has to give its memory up.
async fn given_up(waiter: Waiter) -> Answer {
    let answer = waiter.answer().await;
    assert_eq!(
        (answer.status, answer.code()),
        (429, "queue_full".to_owned()),
        "{}",
        answer.text()
    );
    answer
}

#[tokio::test]
async fn a_request_of_higher_priority_gets_the_memory_of_the_newest_of_lower_that_wait() {
    let (cluster, _blocker, mut low) = with_low_that_wait().await;
    let _high = send(&cluster, &[("x-forwarded-for", "10.0.0.4")], body(200));
    let newest = given_up(low.pop().unwrap()).await;
    assert!(newest.text().contains("api.max_total_body"));
    eventually("it waits in its place", async || {
        waiting(&cluster).await == 3
    })
    .await;
    let refused = cluster.metric("warmroute_request_bodies_refused_total", &[]);
    assert_eq!(refused.await, 0.0);
}

#[tokio::test]
async fn a_request_of_higher_priority_gets_memory_though_bodies_that_wait_hold_its_http2_window() {
    let (cluster, _blocker, mut low) = with_low_that_wait().await;
    let connection = client::Http2::connect(cluster.router.api).await;
    let mut uploads = JoinSet::new();
    // As many as may wait, which are larger than what is left.
    for _ in 0..4 {
        let headers = [
            ("x-forwarded-for", "10.0.0.5"),
            ("x-warmroute-priority", "-5"),
        ];
        uploads.spawn(connection.post(CHAT, &headers, body(300)));
    }
    eventually("they wait for memory", async || {
        let waiting = cluster.metric("warmroute_request_bodies_waiting", &[]);
        waiting.await == 4.0
    })
    .await;
    uploads.spawn(connection.post(CHAT, &[("x-forwarded-for", "10.0.0.4")], body(280)));
    given_up(low.pop().unwrap()).await;
}

#[tokio::test]
async fn a_full_queue_answers_429_and_says_when_to_come_back() {
    let cluster = cluster(1, |settings| settings.max_requests = 1).await;
    let _blocker = block(&cluster, "busy ").await;
    let waiter = wait(&cluster, &[], chat("hello", 1, false)).await;
    let answer = cluster.post(CHAT, chat("one too many", 1, false)).await;
    assert_eq!(
        (answer.status, &*answer.code()),
        (429, "queue_full"),
        "{}",
        answer.text()
    );
    assert_eq!(answer.json()["error"]["type"], "rate_limit_error");
    assert!(
        answer.text().contains("queue.max_requests"),
        "{}",
        answer.text()
    );
    assert!(answer.header("retry-after").parse::<u64>().unwrap() >= 1);
    assert_eq!(refusals(&cluster, "queue_full").await, 1.0);
    // Another class has room of its own.
    let _other = wait(
        &cluster,
        &[("x-warmroute-priority", "-1")],
        chat("low", 1, false),
    )
    .await;
    drop(waiter);
    eventually("there is room", async || waiting(&cluster).await == 1).await;
    let _again = wait(&cluster, &[], chat("hello again", 1, false)).await;
}

#[tokio::test]
async fn bodies_that_wait_have_a_bound_in_bytes() {
    let cluster = cluster(1, |settings| settings.max_size = 1_000).await;
    let _blocker = block(&cluster, "busy ").await;
    let _waiter = wait(&cluster, &[], chat(&"x".repeat(600), 1, false)).await;
    let answer = cluster.post(CHAT, chat(&"y".repeat(600), 1, false)).await;
    assert_eq!((answer.status, &*answer.code()), (429, "queue_full"));
    assert!(
        answer.text().contains("queue.max_size"),
        "{}",
        answer.text()
    );
}

#[tokio::test]
async fn a_wait_that_is_too_long_ends_with_429() {
    let cluster = cluster(1, |settings| settings.max_wait = Duration::from_millis(200)).await;
    let _blocker = block(&cluster, "busy ").await;
    let answer = cluster.post(CHAT, chat("hello", 1, false)).await;
    assert_eq!(
        (answer.status, &*answer.code()),
        (429, "queue_timeout"),
        "{}",
        answer.text()
    );
    assert_ne!(answer.header("retry-after"), "");
    assert_eq!(refusals(&cluster, "queue_timeout").await, 1.0);
    let ended = ["outcome=\"not_queued\""];
    assert_eq!(
        cluster.metric("warmroute_requests_total", &ended).await,
        1.0
    );
}

#[tokio::test]
async fn a_target_that_cannot_be_met_any_more_ends_the_wait() {
    let cluster = cluster(1, |_| {}).await;
    let _blocker = block(&cluster, "busy ").await;
    let headers = [("x-warmroute-ttft-target", "200ms")];
    let answer = client::send(
        cluster.router.api,
        "POST",
        CHAT,
        &headers,
        chat("hello", 1, true),
    )
    .await;
    let ended = (answer.status, answer.code());
    assert_eq!(
        ended,
        (429, "ttft_target_unreachable".to_owned()),
        "{}",
        answer.text()
    );
    let headers = [("x-warmroute-ttft-target", "200")];
    let answer = client::send(
        cluster.router.api,
        "POST",
        CHAT,
        &headers,
        chat("hello", 1, true),
    )
    .await;
    assert_eq!(
        (answer.status, &*answer.param()),
        (400, "x-warmroute-ttft-target")
    );
}

#[tokio::test]
async fn a_drain_sends_new_requests_at_once_and_finishes_those_that_wait() {
    let cluster = Cluster::with_router_child(vec![fast()], |config| {
        with_queue(config, |_| {});
        // Longer than the test.
        config.api.drain_delay = seconds(600);
    })
    .await;
    let blocker = block(&cluster, "busy ").await;
    let waiter = wait(&cluster, &[], chat("hello", 1, false)).await;
    cluster.router.child.as_ref().unwrap().signal("TERM");
    eventually("it drains", async || {
        cluster.admin("/queue").await.json()["is_draining"] == true
    })
    .await;
    let answer = cluster.post(CHAT, chat("late", 1, false)).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(waiting(&cluster).await, 1);
    drop(blocker);
    assert_eq!(waiter.answer().await.status, 200);
}

#[tokio::test]
async fn a_reload_changes_the_bounds_and_turns_the_queue_on_and_off() {
    let folder = Folder::new();
    let engines = vec![Engine::here("w0", fast()).await];
    let listed = workers(&engines);
    let with = |queue: &str| text(&format!("{listed}{queue}"));
    let cluster = folder.start(engines, &with("queue: off\n")).await;
    cluster.is_worker("w0", "health", "up").await;
    let _blocker: Blocker = block(&cluster, "busy ").await;
    // Off: nothing waits.
    assert_eq!(cluster.post(CHAT, chat("a", 1, false)).await.status, 200);
    folder.write(&with(
        "queue: {max_worker_queued_tokens: 1, max_requests: 1}\n",
    ));
    applied(&cluster).await;
    let first = wait(&cluster, &[], chat("b", 1, false)).await;
    assert_eq!(cluster.post(CHAT, chat("c", 1, false)).await.status, 429);
    folder.write(&with(
        "queue: {max_worker_queued_tokens: 1, max_requests: 2}\n",
    ));
    let changes = applied(&cluster).await;
    assert_eq!(changes[0]["path"], "queue.max_requests", "{changes}");
    let second = wait(&cluster, &[], chat("d", 1, false)).await;
    // Off again: who waits goes on.
    folder.write(&with("queue: off\n"));
    applied(&cluster).await;
    assert_eq!(first.answer().await.status, 200);
    assert_eq!(second.answer().await.status, 200);
}

#[tokio::test]
async fn the_fallback_answers_what_the_queue_refuses() {
    let small = warmroute::sim::worker::Settings {
        models: vec!["small".to_owned()],
        ..fast()
    };
    let cluster = Cluster::start(vec![fast(), small], |config| {
        with_queue(config, |settings| settings.max_requests = 1);
        config.models = vec![ModelOverride {
            name: "sim".to_owned(),
            fallback: vec!["small".to_owned()],
            ..ModelOverride::default()
        }];
    })
    .await;
    let _blocker = block(&cluster, "busy ").await;
    // The first waits, since there is room in the queue; the second finds it full.
    let first = wait(&cluster, &[], chat("hello", 1, false)).await;
    let headers = [("x-warmroute-decision", "1")];
    let body = chat("one too many", 1, false);
    let answer = client::send(cluster.router.api, "POST", CHAT, &headers, body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let decision = answer.header("x-warmroute-decision");
    for part in [
        "requested_model=sim; model=small; model_reason=fallback",
        "worker=w1;",
    ] {
        assert!(decision.contains(part), "{decision}");
    }
    assert_eq!(refusals(&cluster, "queue_full").await, 1.0);
    assert_eq!(waiting(&cluster).await, 1);
    drop(first);
}

#[tokio::test]
async fn a_refusal_names_the_setting_of_the_class_that_is_full() {
    let cluster = cluster(1, |settings| {
        settings.classes[1].max_requests = Some(1);
        settings.classes[1].max_wait = Some(Duration::from_millis(300));
    })
    .await;
    let _blocker = block(&cluster, "busy ").await;
    let waiter = wait(&cluster, &[], chat("hello", 1, false)).await;
    let answer = cluster.post(CHAT, chat("one too many", 1, false)).await;
    assert_eq!((answer.status, &*answer.code()), (429, "queue_full"));
    for named in [
        "1 requests of this priority wait already",
        "(queue.classes[1].max_requests)",
    ] {
        assert!(answer.text().contains(named), "{}", answer.text());
    }
    let answer = waiter.answer().await;
    assert_eq!((answer.status, &*answer.code()), (429, "queue_timeout"));
    let named = "(queue.classes[1].max_wait)";
    assert!(answer.text().contains(named), "{}", answer.text());
}

/// Each of these is what a client may send; none may end in a panic, a wait without end, or a place before others.
#[tokio::test]
async fn absurd_wishes_of_clients_do_no_harm() {
    let cluster = cluster(1, |settings| settings.max_wait = Duration::from_millis(200)).await;
    let _blocker = block(&cluster, "busy ").await;
    let cases = [
        ("x-warmroute-ttft-target", "18446744073709551615s", 429),
        ("x-warmroute-ttft-target", "584542046090y", 429),
        ("x-warmroute-ttft-target", "0s", 400),
        ("x-warmroute-ttft-target", "soon", 400),
        ("x-llm-d-slo-ttft-ms", "1e308", 429),
        ("x-llm-d-slo-ttft-ms", "-5", 429),
        ("x-llm-d-slo-ttft-ms", "NaN", 429),
        ("x-warmroute-priority", "2147483647", 429),
        ("x-warmroute-priority", "-2147483648", 429),
        ("x-warmroute-priority", "99999999999", 400),
        ("x-warmroute-priority", "1e3", 400),
        ("x-llm-d-inference-objective", "made-up", 429),
    ];
    for (name, value, status) in cases {
        let headers = [(name, value)];
        let body = chat("hello", 1, false);
        let answer = client::send(cluster.router.api, "POST", CHAT, &headers, body).await;
        assert_eq!(answer.status, status, "{name}: {value}: {}", answer.text());
    }
    for priority in ["-9223372036854775808", "1e400", "\"high\"", "[1]", "null"] {
        let body = chat("hello", 1, false).replacen('{', &format!("{{\"priority\":{priority},"), 1);
        let answer = cluster.post(CHAT, body).await;
        assert!(
            [400, 429].contains(&answer.status),
            "{priority}: {}",
            answer.text()
        );
    }
    assert_eq!(waiting(&cluster).await, 0);
}

#[tokio::test]
async fn clients_that_leave_at_once_leave_nothing_in_the_queue() {
    let cluster = cluster(1, |settings| settings.max_requests = 1_000).await;
    let blocker = block(&cluster, "busy ").await;
    for _ in 0..5 {
        let waiters: Vec<_> = (0..40)
            .map(|number| super::send(&cluster, &[], chat(&format!("leaving {number}"), 1, true)))
            .collect();
        eventually("some wait", async || waiting(&cluster).await > 0).await;
        drop(waiters);
        eventually("none waits", async || waiting(&cluster).await == 0).await;
    }
    drop(blocker);
    eventually("the worker is free", async || {
        cluster.worker("w0").await["queued_tokens"] == 0
    })
    .await;
    assert_eq!(
        cluster.post(CHAT, chat("hello", 1, false)).await.status,
        200
    );
}
