//! Requests wait only while all workers are busy, and choose by what is known when there is room.

use std::thread;

use tokio::task::JoinSet;
use warmroute::fleet::ResponsesApi;

use super::{CHAT, block, cluster, row, send, wait, waiting, with_queue};
use crate::client;
use crate::cluster::{Cluster, chat, eventually, fast};
use crate::failures::refuse;
use crate::patience::too_long;
use crate::refused_keys::with_keys;
use crate::stub::Stub;

/// It would stand in the engine before everybody else: what an engine runs that says nothing of it is as much as most run.
#[tokio::test]
async fn an_engine_that_reports_nothing_gets_256_requests_and_an_eighth() {
    let never_whole =
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{";
    let stub = Stub::once(never_whole).await;
    // It is not asked whether it has the API.
    let router = stub
        .router(|config| config.workers[0].responses = Some(ResponsesApi::Chat))
        .await;
    // One prompt, so that they have hardly any tokens to compute.
    let body = chat("hello", 1, false);
    let mut clients = JoinSet::new();
    for _ in 0..300 {
        let (api, body) = (router.api, body.clone());
        clients.spawn(async move { client::post(api, CHAT, body).await });
    }
    let row = async || client::get(router.admin, "/fleet").await.json()["workers"][0].clone();
    let waiting =
        async || client::get(router.admin, "/queue").await.json()["models"][0]["waiting"].clone();
    let sent = async || row().await["requests"].as_u64().unwrap();
    eventually("each is at the engine or waits", async || {
        sent().await + waiting().await.as_u64().unwrap_or(0) == 300
    })
    .await;
    // Each thread may choose for a request while another one has chosen for one that does not count yet.
    let threads = thread::available_parallelism().unwrap().get() as u64;
    let sent = sent().await;
    assert!((288..=288 + threads).contains(&sent), "{sent}");
    clients.abort_all();
    while clients.join_next().await.is_some() {}
    eventually("nobody waits", async || row().await["requests"] == 0).await;
}

#[tokio::test]
async fn a_request_waits_until_a_worker_has_room() {
    let cluster = cluster(1, |_| {}).await;
    // Room: it does not wait.
    let (answer, _) = cluster.post_decided(CHAT, &chat("first", 1, false)).await;
    assert!(!answer.header("x-warmroute-decision").contains("queue_ms"));
    let blocker = block(&cluster, "busy ").await;
    let waiter = wait(&cluster, &[], chat("hello", 1, false)).await;
    let explained = cluster
        .post_admin("/explain", &chat("other", 1, false))
        .await
        .json();
    assert_eq!(explained["queue"]["would_wait"], true, "{explained}");
    assert_eq!(explained["queue"]["class"], "normal");
    assert_eq!(explained["queue"]["waiting"], 1);
    drop(blocker);
    let answer = waiter.answer().await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let decision = answer.header("x-warmroute-decision");
    assert!(decision.contains("; queue_ms="), "{decision}");
    assert_eq!(waiting(&cluster).await, 0);
    let waits = "warmroute_queue_wait_seconds_count";
    assert_eq!(
        cluster
            .metric(waits, &["model=\"sim\"", "class=\"normal\""])
            .await,
        1.0
    );
}

#[tokio::test]
async fn a_request_whose_prompt_is_only_counted_does_not_wait_and_counts_as_no_prompt() {
    let cluster = cluster(1, |_| {}).await;
    let _blocker = block(&cluster, "busy ").await;
    let body = chat("hello", 1, false);
    for path in ["/tokenize", "/v1/messages/count_tokens"] {
        let asked = tokio::time::timeout(too_long(), cluster.post_decided(path, &body));
        let (answer, _) = asked.await.expect("it does not wait");
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        let decision = answer.header("x-warmroute-decision");
        assert!(decision.contains("; prompt_tokens=0;"), "{decision}");
        assert!(!decision.contains("queue_ms"), "{decision}");
    }
    let waits = cluster
        .metric("warmroute_queue_wait_seconds_count", &[])
        .await;
    assert_eq!(waits, 0.0);
}

#[tokio::test]
async fn a_request_goes_to_a_worker_with_room_while_another_is_busy() {
    let cluster = cluster(2, |_| {}).await;
    let _blocker = block(&cluster, "busy ").await;
    let answer = cluster.post(CHAT, chat("hello", 1, false)).await;
    assert_eq!(answer.status, 200);
    let waits = cluster
        .metric("warmroute_queue_wait_seconds_count", &[])
        .await;
    assert_eq!(waits, 0.0);
}

#[tokio::test]
async fn a_waiting_request_goes_to_the_worker_that_cached_its_prefix_meanwhile() {
    let cluster = cluster(2, |_| {}).await;
    let first = block(&cluster, "the first worker computes this ").await;
    let second = block(&cluster, "and this is for the second worker ").await;
    let story = "once upon a time there was a router that waited. ".repeat(40);
    // When they come, no worker has anything of the story. The second asks for the story and more.
    let leader = wait(&cluster, &[], chat(&story, 1, true)).await;
    let follower = wait(&cluster, &[], chat(&format!("{story} and then?"), 1, true)).await;
    drop(first);
    let leader = leader.answer().await;
    let decision = |header: &str| {
        let fields = header.split("; ").filter_map(|pair| pair.split_once('='));
        let fields: std::collections::BTreeMap<&str, &str> = fields.collect();
        let cached: u64 = fields["cached_tokens"].parse().unwrap();
        (fields["worker"].to_owned(), cached)
    };
    let (worker, cached) = decision(leader.header("x-warmroute-decision"));
    assert_eq!(cached, 0);
    let follower = follower.answer().await;
    let chosen = decision(follower.header("x-warmroute-decision"));
    assert_eq!(chosen.0, worker);
    assert!(chosen.1 > 200, "{chosen:?}");
    drop(second);
}

#[tokio::test]
async fn as_many_are_woken_as_there_is_room() {
    let cluster = cluster(1, |_| {}).await;
    let blocker = block(&cluster, "busy ").await;
    let mut waiters = Vec::new();
    for number in 0..10 {
        waiters.push(wait(&cluster, &[], chat(&format!("{number} waits"), 1, true)).await);
    }
    // The engine answers no more: the first to be released keeps the worker busy.
    super::set_hang(&cluster, true).await;
    drop(blocker);
    eventually("one is released", async || waiting(&cluster).await == 9).await;
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    assert_eq!(waiting(&cluster).await, 9);
    super::set_hang(&cluster, false).await;
}

#[tokio::test]
async fn a_client_that_disconnects_leaves_the_queue_at_once() {
    let cluster = cluster(1, |_| {}).await;
    let _blocker = block(&cluster, "busy ").await;
    let waiter = wait(&cluster, &[], chat("hello", 1, false)).await;
    drop(waiter);
    eventually("it has left", async || waiting(&cluster).await == 0).await;
    let left = row(&cluster, "sim").await;
    let tokens: u64 = left["classes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|class| class["tokens"].as_u64().unwrap())
        .sum();
    assert_eq!(tokens, 0, "{left}");
    assert_eq!(cluster.requests().await, [1]);
}

#[tokio::test]
async fn the_answer_of_a_request_that_is_not_streamed_is_not_waited_for() {
    // Its prompt is computed at once, and its answer takes for ever.
    let engine = warmroute::sim::worker::Settings {
        decode_ms: 50,
        ..fast()
    };
    let cluster = Cluster::start(vec![engine], |config| {
        super::with_queue(config, |_| {});
    })
    .await;
    let long = send(&cluster, &[], chat("a long answer", 2_000, false));
    eventually("it runs", async || cluster.requests().await == [1]).await;
    let short = cluster.post(CHAT, chat("a short one", 1, false)).await;
    assert_eq!(short.status, 200);
    drop(long);
}

#[tokio::test]
async fn however_many_wait_for_the_only_worker_with_an_adapter_others_go_to_idle_ones() {
    let with_adapter = warmroute::sim::worker::Settings {
        models: vec!["sim".to_owned(), "adapter".to_owned()],
        ..fast()
    };
    let cluster = Cluster::start(vec![fast(), with_adapter], |config| {
        super::with_queue(config, |_| {});
    })
    .await;
    let adapter = |text: &str| chat(text, 1, true).replace("\"sim\"", "\"adapter\"");
    super::set_hang(&cluster, true).await;
    let _blocker = send(&cluster, &[], adapter("busy"));
    eventually("the worker with the adapter is busy", async || {
        cluster.requests().await == [0, 1]
    })
    .await;
    super::set_hang(&cluster, false).await;
    let waiters: Vec<_> = (0..60)
        .map(|number| send(&cluster, &[], adapter(&format!("{number} waits"))))
        .collect();
    eventually("all wait", async || {
        row(&cluster, "adapter").await["waiting"] == 60
    })
    .await;
    // It is the longest, so that it stands behind them.
    let body = chat(&"a long prompt for an idle worker ".repeat(20), 1, false);
    let answer = tokio::time::timeout(too_long(), cluster.post(CHAT, body)).await;
    assert_eq!(answer.expect("it is sent").status, 200);
    assert_eq!(row(&cluster, "adapter").await["waiting"], 60);
    drop(waiters);
}

#[tokio::test]
async fn a_request_for_an_adapter_does_not_pass_those_who_wait_for_the_same_worker() {
    let engine = warmroute::sim::worker::Settings {
        models: vec!["sim".to_owned(), "adapter".to_owned()],
        ..fast()
    };
    let cluster = Cluster::start(vec![engine], |config| super::with_queue(config, |_| {})).await;
    let adapter = |text: &str| chat(text, 1, true).replace("\"sim\"", "\"adapter\"");
    let blocker = block(&cluster, "busy ").await;
    let first = wait(&cluster, &[], chat("first", 1, true)).await;
    let second = send(&cluster, &[], adapter("second"));
    eventually("both wait", async || {
        row(&cluster, "adapter").await["waiting"] == 1
    })
    .await;
    drop(blocker);
    assert_eq!(first.answer().await.status, 200);
    assert_eq!(second.answer().await.status, 200);
}

/// The worker that refuses has nothing to do: requests are sent there first, and go on from there.
#[tokio::test]
async fn a_request_whose_key_an_idle_worker_refuses_waits_for_room_at_another() {
    let cluster = Cluster::start(vec![fast(); 2], |config| {
        with_queue(config, |_| {});
        with_keys(config);
        config.fleet.circuit_breaker.failure_threshold = 1_000;
    })
    .await;
    let blocker = block(&cluster, "busy ").await;
    for engine in &cluster.engines {
        if cluster.worker(&engine.name).await["queued_tokens"] == 0 {
            engine.fault(refuse(401)).await;
        }
    }
    let waiter = wait(&cluster, &[], chat("x", 1, false)).await;
    let refusals = ["reason=\"key_refused\""];
    assert_eq!(
        cluster.metric("warmroute_retries_total", &refusals).await,
        0.0
    );
    drop(blocker);
    let answer = waiter.answer().await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(
        cluster.metric("warmroute_retries_total", &refusals).await,
        1.0
    );
}
