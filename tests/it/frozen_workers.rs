//! A worker that stops working without closing its connections: its health checks fail, or its circuit breaker opens. The
//! requests that wait for it go to another worker long before their time is over.

use std::time::Duration;

use serde_json::json;
use tokio::task::JoinSet;
use warmroute::config::Config;
use warmroute::routing::Policy;
use warmroute::sim::worker::{Connector, Role, Settings};

use crate::client;
use crate::cluster::{Cluster, Engine, chat, eventually, fast, generating, unhurried};
use crate::continuation::continued;
use crate::failures::{hang, refuse};
use crate::prefill_decode::failures::{BOTH, engine, split};

const CHAT: &str = "/v1/chat/completions";

fn by_turns(config: &mut Config) {
    config.routing.policy = Policy::RoundRobin;
    probed_quickly(config);
}

fn probed_quickly(config: &mut Config) {
    config.fleet.health.timeout = Duration::from_millis(500);
}

/// Every kind of request that generates, `rounds` times, all at once. Each must be answered.
async fn are_answered(cluster: &Cluster, rounds: usize, what: &str) {
    let mut asked = JoinSet::new();
    for round in 0..rounds {
        for stream in [false, true] {
            for (path, body) in generating(3, stream) {
                let body = body.replace("once", &format!("{round}: once"));
                let api = cluster.router.api;
                asked.spawn(async move { (client::post(api, path, body).await, path, stream) });
            }
        }
    }
    for (answer, path, stream) in asked.join_all().await {
        let text = answer.text();
        assert_eq!(
            answer.status, 200,
            "{what}: {path}, stream {stream}: {text}"
        );
        assert!(!client::has_error(text), "{what}: {path}: {text}");
    }
}

#[tokio::test]
async fn requests_that_wait_for_a_worker_that_is_frozen_are_answered_by_another_one() {
    let cluster = Cluster::start_children(vec![fast(); 2], by_turns).await;
    cluster.engines[0].signal("STOP");
    are_answered(&cluster, 3, "one of two is frozen").await;
    let labels = ["reason=\"worker_taken_out\"", "worker=\"w0\""];
    let retries = cluster.metric("warmroute_retries_total", &labels).await;
    assert!(retries > 0.0, "nothing waited for it");
    // It failed nobody's request.
    let failures = "warmroute_worker_failures_total";
    assert_eq!(cluster.metric(failures, &["owner=\"worker\""]).await, 0.0);
    cluster.engines[0].signal("CONT");
    cluster.is_worker("w0", "health", "up").await;
    are_answered(&cluster, 1, "both work again").await;
}

#[tokio::test]
async fn requests_stay_at_a_frozen_worker_that_no_other_can_replace() {
    let cluster = Cluster::start_children(vec![fast()], probed_quickly).await;
    cluster.engines[0].signal("STOP");
    let api = cluster.router.api;
    let waiting = tokio::spawn(client::post(api, CHAT, chat("once", 3, false)));
    cluster.is_worker("w0", "health", "down").await;
    cluster.engines[0].signal("CONT");
    let answer = waiting.await.unwrap();
    assert_eq!(answer.status, 200, "{}", answer.text());
}

/// A tool may have sent a message or bought something.
#[tokio::test]
async fn a_request_for_which_the_engine_may_have_run_tools_is_not_tried_elsewhere() {
    let cluster = Cluster::start_children(vec![fast(); 2], |config| {
        by_turns(config);
        // All are sent before it is found to be down.
        config.fleet.health.timeout = Duration::from_secs(3);
    })
    .await;
    eventually("the next turn is that of w0", async || {
        let (_, decided) = cluster.post_decided(CHAT, &chat("x", 1, false)).await;
        decided.worker == "w1"
    })
    .await;
    cluster.engines[0].signal("STOP");
    let mut asked = JoinSet::new();
    for (sent, kind) in ["function", "code_interpreter"].into_iter().enumerate() {
        let tool = match kind {
            "function" => json!({"type": kind, "name": "f", "parameters": {"type": "object"}}),
            _ => json!({"type": kind, "container": {"type": "auto"}}),
        };
        let body = json!({"model": "sim", "input": "once", "tools": [tool]}).to_string();
        let (api, headers) = (cluster.router.api, [("x-warmroute-decision", "1")]);
        let at_w0 = body.clone();
        asked.spawn(async move {
            let answer = client::send(api, "POST", "/v1/responses", &headers, at_w0).await;
            (answer, kind)
        });
        eventually("it waits for w0", async || {
            cluster.worker("w0").await["requests"] == sent + 1
        })
        .await;
        let answer = client::send(api, "POST", "/v1/responses", &headers, body).await;
        assert!(answer.header("x-warmroute-decision").contains("worker=w1"));
    }
    cluster.is_worker("w0", "health", "down").await;
    let mut ended = vec![asked.join_next().await.unwrap().unwrap()];
    assert_eq!(ended[0].1, "function", "a tool of the engine's own stays");
    cluster.engines[0].signal("CONT");
    ended.extend(asked.join_all().await);
    for (answer, kind) in &ended {
        assert_eq!(answer.status, 200, "{kind}: {}", answer.text());
    }
    let (last, _) = ended.last().unwrap();
    let decision = last.header("x-warmroute-decision");
    assert!(
        decision.contains("worker=w0") && decision.contains("attempts=1"),
        "{decision}"
    );
}

#[tokio::test]
async fn requests_that_wait_for_a_worker_whose_circuit_breaker_opens_are_answered_by_another_one() {
    let cluster = Cluster::start(vec![fast(); 2], |config| {
        by_turns(config);
        config.fleet.circuit_breaker.failure_threshold = 2;
        let proxies = vec!["127.0.0.1".to_owned()];
        config.api.requests.trusted_proxies = proxies.try_into().unwrap();
    })
    .await;
    cluster.engines[0].fault(hang()).await;
    let api = cluster.router.api;
    let mut waiting = JoinSet::new();
    for _ in 0..2 {
        waiting.spawn(client::post(api, CHAT, chat("once", 3, false)));
    }
    let first = waiting.join_next().await.unwrap().unwrap();
    assert_eq!(first.status, 200);
    cluster.engines[0].fault(refuse(500)).await;
    for client in 1..=4 {
        let address = format!("198.51.100.{client}");
        let headers = [("x-forwarded-for", &*address)];
        client::send(api, "POST", CHAT, &headers, chat("twice", 3, false)).await;
    }
    let second = waiting.join_next().await.unwrap().unwrap();
    assert_eq!(second.status, 200, "{}", second.text());
}

#[tokio::test]
async fn a_pair_with_a_frozen_worker_is_replaced() {
    for connector in BOTH {
        for frozen in 0..4 {
            let child = |(name, role)| Engine::child(name, &engine(role, connector));
            let roles = [("p0", Role::Prefill), ("p1", Role::Prefill)];
            let roles = roles
                .into_iter()
                .chain([("d0", Role::Decode), ("d1", Role::Decode)]);
            let engines = roles.map(child).collect();
            let cluster = Cluster::with(engines, |config| {
                split(config, connector);
                probed_quickly(config);
            })
            .await;
            cluster.engines[frozen].signal("STOP");
            let name = &cluster.engines[frozen].name;
            are_answered(&cluster, 2, &format!("{connector:?}, {name}")).await;
            cluster.engines[frozen].signal("CONT");
        }
    }
}

#[tokio::test]
async fn a_whole_answer_goes_on_without_the_prefill_worker_whose_blocks_were_fetched() {
    for connector in BOTH {
        let child = |(name, role)| {
            let settings = Settings {
                decode_ms: 20,
                ..engine(role, connector)
            };
            Engine::child(name, &settings)
        };
        let roles = [
            ("p0", Role::Prefill),
            ("p1", Role::Prefill),
            ("d0", Role::Decode),
        ];
        let cluster = Cluster::with(Vec::from(roles.map(child)), |config| {
            split(config, connector);
            probed_quickly(config);
            // Twice this time is over before a worker is found to be down.
            config.prefill_decode.advanced.transfer_timeout = Duration::from_millis(100);
        })
        .await;
        if connector == Connector::Mooncake {
            for name in ["p0", "p1"] {
                eventually("its bootstrap server is known", async || {
                    cluster.worker(name).await["kv_transfers"]["bootstrap"].is_string()
                })
                .await;
            }
        }
        let decode = &cluster.engines[2];
        // The answer does not end before.
        decode.hold_after(3).await;
        let [(path, body), ..] = generating(40, false);
        let waiting = tokio::spawn(client::post(cluster.router.api, path, body));
        eventually("its blocks are fetched", async || {
            decode.kv_transfers().await.received == 1
        })
        .await;
        let granted = cluster.engines[0].kv_transfers().await.granted;
        let frozen = &cluster.engines[usize::from(granted == 0)];
        frozen.signal("STOP");
        cluster.is_worker(&frozen.name, "health", "down").await;
        decode.let_go().await;
        let answer = waiting.await.unwrap();
        frozen.signal("CONT");
        assert_eq!(answer.status, 200, "{connector:?}: {}", answer.text());
        let legs = decode.kv_transfers().await.decode_legs;
        assert_eq!(legs, 1, "{connector:?}: it was begun again");
    }
}

/// Whichever of them is found to be out first, so that the requests of the one that comes back may have been moved to the
/// other.
#[tokio::test]
async fn a_worker_that_comes_back_while_all_are_out_gets_the_requests_of_the_others() {
    for (first, last) in [("w0", "w1"), ("w1", "w0")] {
        for back in [0, 1] {
            let cluster = Cluster::start_children(vec![fast(); 2], by_turns).await;
            let api = cluster.router.api;
            let mut waiting = JoinSet::new();
            for name in [first, last] {
                let engine = cluster.engines.iter().find(|engine| engine.name == name);
                engine.unwrap().signal("STOP");
                for _ in 0..2 {
                    waiting.spawn(client::post(api, CHAT, chat("once", 3, false)));
                }
                cluster.is_worker(name, "health", "down").await;
            }
            cluster.engines[back].signal("CONT");
            for answer in waiting.join_all().await {
                assert_eq!(answer.status, 200, "{first}, {back}: {}", answer.text());
            }
        }
    }
}

/// An engine that is shut down can leave its streams open, in the middle, until it is killed.
#[tokio::test]
async fn a_stream_that_is_silent_while_its_worker_is_down_does_not_wait_for_more() {
    for goes_on in [false, true] {
        let cluster = Cluster::start_children(vec![unhurried(); 2], |config| {
            by_turns(config);
            if goes_on {
                continued(config, 1);
            }
        })
        .await;
        // Its stream does not end before it is stopped.
        cluster.engines[0].hold_after(3).await;
        let mut streams = Vec::new();
        for _ in 0..2 {
            let mut stream = cluster.open(CHAT, &chat("once", 40, true)).await;
            stream.until("\"content\":\"").await;
            streams.push(stream);
        }
        cluster.engines[0].signal("STOP");
        let mut broken = 0;
        for mut stream in streams {
            let (text, _) = stream.rest().await;
            assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
            broken += usize::from(text.contains("engine_stream_broken"));
        }
        assert_eq!(broken, usize::from(!goes_on));
    }
}
