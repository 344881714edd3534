//! How a wait ends without a worker.

use std::time::Duration;

use super::{Blocker, CHAT, block, cluster, seconds, wait, waiting, with_queue};
use crate::client;
use crate::cluster::{Cluster, Engine, chat, eventually, fast};
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
async fn a_drain_refuses_new_requests_and_finishes_those_that_wait() {
    let cluster = Cluster::with_router_child(vec![fast()], |config| {
        with_queue(config, |_| {});
        config.api.drain_delay = seconds(2);
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
    assert_eq!(
        (answer.status, &*answer.code()),
        (503, "router_draining"),
        "{}",
        answer.text()
    );
    drop(blocker);
    assert_eq!(waiter.answer().await.status, 200);
}

#[tokio::test]
async fn a_reload_changes_the_bounds_and_turns_the_queue_on_and_off() {
    let folder = Folder::new();
    let engines = vec![Engine::here("w0", fast()).await];
    let listed = workers(&engines);
    let with = |queue: &str| text(&format!("{listed}{queue}"));
    let cluster = folder.start(engines, &with("")).await;
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
    folder.write(&with(""));
    applied(&cluster).await;
    assert_eq!(first.answer().await.status, 200);
    assert_eq!(second.answer().await.status, 200);
}
