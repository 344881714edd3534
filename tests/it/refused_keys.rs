//! Workers that refuse the key which the router has for them. Another worker answers; clients hear of it only where all refuse.

use std::time::Duration;

use serde_json::json;
use warmroute::config::Config;
use warmroute::routing::Policy;
use warmroute::secret::Secret;
use warmroute::sim::fault::Faults;

use crate::cluster::{Cluster, chat, eventually, fast, generating};
use crate::failures::refuse;

const CHAT: &str = "/v1/chat/completions";

/// Turns, so that a worker that refuses gets its share; and no attempt nor retry to spare.
fn sparing(config: &mut Config) {
    config.routing.policy = Policy::RoundRobin;
    config.requests.max_attempts = 1;
    config.requests.advanced.min_retries_per_second = 0;
    config.requests.advanced.retry_budget_percent = 0;
}

pub(crate) fn with_keys(config: &mut Config) {
    for worker in &mut config.workers {
        worker.api_key = Secret::new("engine-key");
    }
}

#[tokio::test]
async fn a_worker_that_refuses_the_routers_key_is_passed_over_until_it_takes_it() {
    let cluster = Cluster::start(vec![fast(); 2], |config| {
        sparing(config);
        with_keys(config);
        config.fleet.circuit_breaker.open_duration = Duration::from_secs(1);
    })
    .await;
    cluster.engines[0].fault(refuse(401)).await;
    eventually("its circuit breaker opens", async || {
        for stream in [false, true] {
            for (path, body) in generating(3, stream) {
                let (answer, decided) = cluster.post_decided(path, &body).await;
                let text = answer.text();
                assert_eq!(answer.status, 200, "{path}, stream {stream}: {text}");
                assert_eq!(decided.worker, "w1", "{path}, stream {stream}");
            }
        }
        cluster.worker("w0").await["circuit_breaker"] == "open"
    })
    .await;
    let refusals = ["reason=\"key_refused\"", "worker=\"w0\""];
    let retries = cluster.metric("warmroute_retries_total", &refusals).await;
    assert!(retries > 0.0);
    cluster.engines[0].fault(Faults::default()).await;
    eventually("it takes requests again", async || {
        let answer = cluster.post(CHAT, chat("x", 1, false)).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        cluster.worker("w0").await["circuit_breaker"] == "closed"
    })
    .await;
}

#[tokio::test]
async fn a_client_hears_of_a_refused_key_only_if_each_worker_refuses_it() {
    let cluster = Cluster::start(vec![fast(); 2], |config| {
        sparing(config);
        with_keys(config);
        config.fleet.circuit_breaker.failure_threshold = 1_000;
    })
    .await;
    for engine in &cluster.engines {
        engine.fault(refuse(401)).await;
    }
    let embedding = json!({"model": "sim", "input": "x"}).to_string();
    let kinds = generating(3, true).into_iter();
    for (path, body) in kinds.chain([("/v1/embeddings", embedding)]) {
        let answer = cluster.post(path, body).await;
        assert_eq!(answer.status, 502, "{path}: {}", answer.text());
        assert_eq!(answer.code(), "engine_key_refused", "{path}");
        assert_eq!(answer.header("x-should-retry"), "false", "{path}");
    }
    // One that is busy may do it later, whichever of the two was asked first.
    cluster.engines[1].fault(refuse(503)).await;
    for _ in 0..2 {
        let answer = cluster.post(CHAT, chat("x", 1, false)).await;
        assert_eq!(answer.status, 503, "{}", answer.text());
        assert_eq!(answer.header("x-should-retry"), "");
    }
}

#[tokio::test]
async fn a_client_may_try_again_while_a_worker_that_may_take_its_key_is_down() {
    let mut cluster = Cluster::start(vec![fast(); 2], |config| {
        sparing(config);
        with_keys(config);
        config.fleet.circuit_breaker.failure_threshold = 1_000;
    })
    .await;
    cluster.engines[0].fault(refuse(401)).await;
    cluster.engines[1].kill().await;
    cluster.is_worker("w1", "health", "down").await;
    let answer = cluster.post(CHAT, chat("x", 1, false)).await;
    assert_eq!(answer.status, 503, "{}", answer.text());
    assert_eq!(answer.code(), "no_healthy_worker");
    assert_eq!(answer.header("x-should-retry"), "");
}

/// A filter before an engine may refuse what a request asks for, and the client's own key is the client's to correct.
#[tokio::test]
async fn what_does_not_concern_the_routers_key_is_the_clients_to_know() {
    for (has_own_key, status) in [(false, 401), (false, 403), (true, 403)] {
        let cluster = Cluster::start(vec![fast(); 2], |config| {
            sparing(config);
            if has_own_key {
                with_keys(config);
            }
        })
        .await;
        cluster.engines[0].fault(refuse(status)).await;
        let mut statuses = Vec::new();
        for _ in 0..4 {
            let answer = cluster.post(CHAT, chat("x", 1, false)).await;
            statuses.push(answer.status);
        }
        statuses.sort_unstable();
        assert_eq!(statuses, [200, 200, status, status], "{has_own_key}");
        assert_eq!(cluster.metric("warmroute_retries_total", &[]).await, 0.0);
        assert_eq!(cluster.worker("w0").await["circuit_breaker"], "closed");
    }
}
