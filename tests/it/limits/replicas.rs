//! Three routers over one Redis.

use std::time::{Duration, Instant};

use serde_json::json;
use tokio::task::JoinSet;
use warmroute::limits::OnStoreFailure;

use super::*;
use crate::cluster::{fast, unhurried};
use crate::peers;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_over_three_replicas_gets_its_limit_once() {
    let replicas = Replicas::start(3, fast(), |config| {
        config.tenants = vec![tenant(
            "a",
            r#"{"requests_per_minute": 1200, "burst": "10s"}"#,
        )];
    })
    .await;
    let started = Instant::now();
    let mut clients = JoinSet::new();
    for client in 0..12 {
        let api = replicas.routers[client % 3].api;
        clients.spawn(async move {
            let mut granted = 0_u64;
            let mut was_refused = false;
            // Until all is used, too, which takes a slow machine longer; without a limit not for ever.
            while started.elapsed() < Duration::from_secs(4) || (!was_refused && granted < 300) {
                let body = cluster::chat("hello", 1, false);
                let headers = [("authorization", &*bearer("a"))];
                let path = "/v1/chat/completions";
                let answer = client::send(api, "POST", path, &headers, body).await;
                assert!([200, 429].contains(&answer.status), "{}", answer.text());
                was_refused = answer.status == 429;
                granted += u64::from(!was_refused);
            }
            granted
        });
    }
    let granted: u64 = clients.join_all().await.into_iter().sum();
    let limit = 200.0 + started.elapsed().as_secs_f64() * 20.0;
    let share = granted as f64 / limit;
    assert!((0.95..=1.05).contains(&share), "{granted} of {limit}");
    assert_eq!(replicas.engine.generated().await, granted);
    let decided = replicas.metric("warmroute_limit_admitted_total", &["decided=\"shared\""]);
    assert_eq!(decided.await, granted as f64);
}

#[tokio::test]
async fn without_redis_limits_are_open_with_a_share_or_closed() {
    for mode in [OnStoreFailure::Open, OnStoreFailure::Closed] {
        let mut replicas = Replicas::start(1, fast(), |config| {
            config.tenants = vec![
                tenant("a", r#"{"requests_per_minute": 30}"#),
                tenant("free", ""),
            ];
            config.limits.on_store_failure = mode;
            config.limits.replicas = 3;
        })
        .await;
        replicas.redis.kill();
        let router = &replicas.routers[0];
        let mut granted = 0;
        for _ in 0..20 {
            let answer = chat_as(router, "a").await;
            match mode {
                OnStoreFailure::Open => {
                    assert!([200, 429].contains(&answer.status), "{}", answer.text())
                }
                OnStoreFailure::Closed => {
                    assert_eq!(
                        (answer.status, &*answer.code()),
                        (503, "limits_unavailable")
                    );
                    assert_eq!(answer.header("retry-after"), "1");
                }
            }
            granted += u32::from(answer.status == 200);
        }
        if mode == OnStoreFailure::Open {
            assert!((10..=11).contains(&granted), "{granted}");
        }
        assert_eq!(chat_as(router, "free").await.status, 200);
        assert_eq!(
            replicas.metric("warmroute_limits_without_store", &[]).await,
            1.0
        );
        replicas.redis.run().await;
        // Also without a request.
        eventually("Redis is asked again", async || {
            replicas.metric("warmroute_limits_without_store", &[]).await == 0.0
        })
        .await;
    }
}

/// How many replicas there are is what `peers` says, not a setting.
#[tokio::test]
async fn without_redis_each_connected_replica_grants_its_share() {
    let engines = [Engine::here("w0", fast()).await];
    let config = |others: &[&Router]| {
        let mut config = peers::replica(&engines, others);
        config.tenants = vec![tenant("a", r#"{"requests_per_minute": 30}"#)];
        config
    };
    let a = Router::here(&config(&[])).await;
    let b = Router::here(&config(&[&a])).await;
    let c = Router::here(&config(&[&a, &b])).await;
    peers::are_connected(&[&a, &b, &c]).await;
    // They are counted once a second.
    tokio::time::sleep(Duration::from_secs(3)).await;
    for router in [&a, &b, &c] {
        let mut granted = 0;
        for _ in 0..20 {
            let answer = chat_as(router, "a").await;
            assert!([200, 429].contains(&answer.status), "{}", answer.text());
            granted += u32::from(answer.status == 200);
        }
        assert!((10..=12).contains(&granted), "{granted}");
    }
}

#[tokio::test]
async fn requests_at_the_same_time_count_over_replicas() {
    let replicas = Replicas::start(2, unhurried(), |config| {
        config.tenants = vec![tenant("a", r#"{"concurrent_requests": 2}"#)];
    })
    .await;
    let [a, b] = &*replicas.routers else { panic!() };
    let headers = [("authorization", &*bearer("a"))];
    let body = cluster::chat("hello", 10_000, true);
    let mut open = Vec::new();
    for router in [a, b] {
        let path = "/v1/chat/completions";
        open.push(client::open(router.api, "POST", path, &headers, body.clone()).await);
    }
    assert_eq!(chat_as(a, "a").await.status, 429);
    assert_eq!(chat_as(b, "a").await.status, 429);
    drop(open.pop());
    eventually("there is room at the other replica", async || {
        chat_as(a, "a").await.status == 200
    })
    .await;
}

#[tokio::test]
async fn a_background_response_is_charged_at_its_run() {
    let replicas = Replicas::start(2, fast(), |config| {
        config.tenants = vec![tenant(
            "a",
            r#"{"requests_per_minute": 100, "output_tokens_per_minute": 6000}"#,
        )];
    })
    .await;
    let [a, b] = &*replicas.routers else { panic!() };
    let body =
        json!({"model": "sim", "input": "hello", "max_output_tokens": 7, "background": true});
    let created = post_as(a, "a", "/v1/responses", &body.to_string()).await;
    assert_eq!(created.status, 200, "{}", created.text());
    assert_eq!(number(&created, "x-ratelimit-remaining-requests"), 100);
    let id = created.json()["id"].as_str().unwrap().to_owned();
    let headers = [("authorization", &*bearer("a"))];
    eventually("it has ended", async || {
        let path = format!("/v1/responses/{id}");
        let answer = client::send(b.api, "GET", &path, &headers, "").await;
        let status = answer.json()["status"].clone();
        assert!(status != "failed", "{}", answer.text());
        status != "queued" && status != "in_progress"
    })
    .await;
    eventually("one request is charged, and its tokens", async || {
        let answer = chat_as(b, "a").await;
        assert_eq!(answer.status, 200);
        let report = client::get(b.admin, "/tenants").await.json();
        let limits = report["tenants"][0]["limits"].clone();
        limits[0]["remaining"].as_u64() <= Some(98) && limits[1]["remaining"].as_u64() > Some(5_000)
    })
    .await;
}

/// The error of a background response of tenant `a`, which fails.
async fn failed(router: &Router, input: &str) -> serde_json::Value {
    let body = json!({"model": "sim", "input": input, "max_output_tokens": 7, "background": true});
    let created = post_as(router, "a", "/v1/responses", &body.to_string()).await;
    assert_eq!(created.status, 200, "{}", created.text());
    let path = format!("/v1/responses/{}", created.json()["id"].as_str().unwrap());
    let headers = [("authorization", &*bearer("a"))];
    let mut last = serde_json::Value::Null;
    eventually("it has failed", async || {
        let answer = client::send(router.api, "GET", &path, &headers, "").await;
        last = answer.json();
        last["status"] == "failed"
    })
    .await;
    last["error"].clone()
}

#[tokio::test]
async fn a_background_response_that_no_limit_ever_has_room_for_fails_at_once() {
    let replicas = Replicas::start(1, fast(), |config| {
        config.tenants = vec![tenant("a", r#"{"tokens_per_minute": 100}"#)];
        config.responses.background.queue_timeout = Duration::from_secs(3_600);
    })
    .await;
    let error = failed(&replicas.routers[0], &"word ".repeat(1_000)).await;
    assert_eq!(error["code"], "invalid_prompt", "{error}");
}

#[tokio::test]
async fn a_background_response_that_gets_no_room_in_a_limit_may_be_sent_again() {
    let replicas = Replicas::start(1, fast(), |config| {
        let limits = r#"{"requests_per_minute": 1, "burst": "60s"}"#;
        config.tenants = vec![tenant("a", limits)];
        config.responses.background.queue_timeout = Duration::from_secs(1);
    })
    .await;
    assert_eq!(chat_as(&replicas.routers[0], "a").await.status, 200);
    let error = failed(&replicas.routers[0], "hello").await;
    assert_eq!(error["code"], "rate_limit_exceeded", "{error}");
}

#[tokio::test]
async fn limits_change_with_a_reload_and_keep_what_was_used() {
    let engine = Engine::here("w0", fast()).await;
    let text = |limit: u32| {
        format!(
            "api: {{listen: \"127.0.0.1:0\"}}\nadmin: {{listen: \"127.0.0.1:0\"}}\nlog: {{format: json}}\nreload: {{watch_interval: 50ms}}\n\
             workers: [\"http://{}\"]\ntenants:\n- name: a\n  keys: [sk-a]\n  limits: {{requests_per_minute: {limit}}}\n",
            engine.address
        )
    };
    let file = cluster::Removed::new(&text(100));
    let router = Router::child_of(&file.0, "1024", &[]).await;
    eventually("a request is answered", async || {
        chat_as(&router, "a").await.status == 200
    })
    .await;
    for _ in 0..49 {
        chat_as(&router, "a").await;
    }
    std::fs::write(&file.0, text(20)).unwrap();
    eventually("the new limit is known", async || {
        let answer = chat_as(&router, "a").await;
        answer.header("x-ratelimit-limit-requests") == "20"
    })
    .await;
    // Half of the old limit is used, so half of the new one is.
    let answer = chat_as(&router, "a").await;
    let remaining = number(&answer, "x-ratelimit-remaining-requests");
    assert!((1..=12).contains(&remaining), "{remaining}");
}

/// Its replica is killed in the middle; the other one runs it again, and its tenant pays once.
#[tokio::test]
async fn a_background_response_that_is_taken_over_is_charged_once() {
    let mut replicas = Replicas::start(1, unhurried(), |config| {
        let limits = r#"{"requests_per_minute": 100, "burst": "60s"}"#;
        config.tenants = vec![tenant("a", limits)];
    })
    .await;
    // The printed configuration of a child has the key of state tokens in the place of every secret.
    let mut config = cluster::config();
    config.workers = vec![replicas.engine.listed()];
    config.responses.store.redis = Some(patient(&replicas.redis));
    config.responses.state_token.keys = vec![Secret::new(KEY)];
    config.tenants = vec![tenant("a", r#"{"requests_per_minute": 100}"#)];
    let mut killed = Router::child(&config).await;
    let key = format!("Bearer {KEY}");
    let headers = [("authorization", &*key)];
    let body =
        json!({"model": "sim", "input": "hello", "max_output_tokens": 40, "background": true});
    replicas.engine.hold_after(3).await;
    let mut id = String::new();
    eventually("it is created", async || {
        let path = "/v1/responses";
        let answer = client::send(killed.api, "POST", path, &headers, body.to_string()).await;
        let created = answer.json()["id"].as_str().map(str::to_owned);
        id = created.unwrap_or_default();
        answer.status == 200
    })
    .await;
    eventually("it runs", async || {
        replicas.engine.stats().await.running == 1
    })
    .await;
    killed.child.take();
    replicas.engine.let_go().await;
    let router = replicas.routers.remove(0);
    let own = bearer("a");
    let headers = [("authorization", &*own)];
    cluster::eventually("it is taken over and ends", async || {
        let path = format!("/v1/responses/{id}");
        let answer = client::send(router.api, "GET", &path, &headers, "").await;
        let status = answer.json()["status"].clone();
        assert!(status != "failed", "{}", answer.text());
        status != "queued" && status != "in_progress"
    })
    .await;
    assert_eq!(replicas.engine.generated().await, 2);
    // The limit gives back 1.7 in a second, so that nothing but the number of charges in Redis says it.
    let charged = replicas.redis.cli(&["KEYS", "wr:lc:*"]);
    eventually("it is charged once and settled once", async || {
        let members = replicas.redis.cli(&["ZRANGE", charged.trim(), "0", "-1"]);
        let members: Vec<&str> = members.lines().collect();
        members == [format!("c:{id}"), format!("s:{id}")]
    })
    .await;
}
