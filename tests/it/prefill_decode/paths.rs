//! What requests over pairs come to while all is well, and what the metrics and /explain show of them.

use std::time::Duration;

use serde_json::{Value, json};
use warmroute::config::Config;
use warmroute::fleet::kv_transfer::Connector;
use warmroute::relay::prefill_decode::OnPrefillFailure;
use warmroute::routing::Policy;
use warmroute::sim::fault::{Faults, TransferFaults};
use warmroute::sim::worker::{self, Role, Settings, TransferSettings};

use super::failures::transfer_faults;
use crate::client::{self, Answer};
use crate::cluster::{
    Cluster, Engine, eventually, fast, generating, router_connector, unhurried, with_role,
};
use crate::failures::several_clients;

const NIXL: worker::Connector = worker::Connector::Nixl;

/// `count` prefill engines, then as many that decode. Prompts of a few tokens are split.
async fn pairs(
    count: usize,
    connector: worker::Connector,
    settings: Settings,
    change: impl FnOnce(&mut Config),
) -> Cluster {
    let of = |role| with_role(settings.clone(), connector, role);
    let mut engines = vec![of(Role::Prefill); count];
    engines.extend(vec![of(Role::Decode); count]);
    let cluster = Cluster::start(engines, |config| {
        config.prefill_decode.connector = Some(router_connector(connector));
        config.prefill_decode.advanced.min_remote_tokens = 24;
        change(config);
    })
    .await;
    if connector == worker::Connector::Mooncake {
        for engine in &cluster.engines[..count] {
            eventually("its bootstrap server is known", async || {
                let row = cluster.worker(&engine.name).await;
                row["kv_transfers"]["bootstrap"].is_string()
            })
            .await;
        }
    }
    cluster
}

pub(super) async fn one_pair(connector: worker::Connector) -> Cluster {
    pairs(1, connector, fast(), |_| {}).await
}

/// A field of `x-warmroute-decision`.
pub(super) fn decision<'a>(answer: &'a Answer, name: &str) -> &'a str {
    let header = answer.header("x-warmroute-decision");
    let mut fields = header.split("; ").filter_map(|field| field.split_once('='));
    fields
        .find(|(key, _)| *key == name)
        .map_or("", |(_, value)| value)
}

pub(super) async fn decided(cluster: &Cluster, path: &str, body: &str) -> Answer {
    let headers = [("x-warmroute-decision", "1")];
    client::send(cluster.router.api, "POST", path, &headers, body.to_owned()).await
}

/// Of an answer, its text, however it was sent.
fn text(path: &str, answer: &Answer) -> String {
    let of = |value: &Value| -> String {
        let parts = match path {
            "/v1/chat/completions" => [
                &value["choices"][0]["message"]["content"],
                &value["choices"][0]["delta"]["content"],
            ],
            "/v1/completions" => [&value["choices"][0]["text"], &Value::Null],
            _ => [&value["output"][0]["content"][0]["text"], &value["delta"]],
        };
        parts.map(|part| part.as_str().unwrap_or("")).concat()
    };
    if !answer.text().contains("data: ") {
        return of(&answer.json());
    }
    let data = answer
        .text()
        .lines()
        .filter_map(|line| line.strip_prefix("data: "));
    data.filter_map(|data| serde_json::from_str(data).ok())
        .map(|value: Value| of(&value))
        .collect()
}

#[tokio::test]
async fn each_api_is_answered_over_two_workers_as_over_one() {
    let [mooncake, moriio] = [worker::Connector::Mooncake, worker::Connector::Moriio];
    for connector in [NIXL, mooncake, moriio] {
        let alone = Cluster::fast(1).await;
        let cluster = one_pair(connector).await;
        let mut requests = 0;
        for stream in [false, true] {
            // Each asked for once, or a decode worker would hold it.
            for (path, body) in generating(if stream { 9 } else { 8 }, stream) {
                let body = body.replace("once", if stream { "twice" } else { "once" });
                let context = format!("{connector:?} {path}, stream {stream}");
                let answer = decided(&cluster, path, &body).await;
                assert_eq!(answer.status, 200, "{context}: {}", answer.text());
                requests += 1;
                assert_eq!(decision(&answer, "disaggregated"), "yes", "{context}");
                assert_eq!(decision(&answer, "worker"), "w1", "{context}");
                assert_eq!(decision(&answer, "prefill"), "w0", "{context}");
                assert_eq!(decision(&answer, "attempts"), "1", "{context}");
                let expected = alone.post(path, body.clone()).await;
                assert_eq!(text(path, &answer), text(path, &expected), "{context}");
                assert!(!text(path, &answer).is_empty(), "{context}");
                assert!(!answer.text().contains("remote_"), "{}", answer.text());
                assert!(!answer.text().contains("do_remote"), "{}", answer.text());
                let [first, second] = [0, 1].map(|place| &cluster.engines[place]);
                let legs = [first.last_post().await, second.last_post().await];
                assert_eq!(
                    legs[0].headers["x-request-id"],
                    legs[1].headers["x-request-id"]
                );
            }
        }
        let prefill = cluster.engines[0].kv_transfers().await;
        let decode = cluster.engines[1].kv_transfers().await;
        assert_eq!((prefill.granted, prefill.fetched), (requests, requests));
        assert_eq!((decode.received, decode.decode_legs), (requests, requests));
        assert_eq!(
            (prefill.pinned, prefill.wrong_uses, decode.wrong_uses),
            (0, 0, 0)
        );
        assert_eq!((prefill.wrong_role, decode.wrong_role), (0, 0));
        let used = ["outcome=\"completed\""];
        assert_eq!(
            cluster.metric("warmroute_kv_transfers_total", &used).await,
            requests as f64
        );
        let yes = ["disaggregated=\"yes\""];
        assert_eq!(
            cluster
                .metric("warmroute_disaggregated_requests_total", &yes)
                .await,
            requests as f64
        );
        for part in ["queue", "prefill", "dispatch", "decode"] {
            let label = format!("phase=\"{part}\"");
            let count = cluster
                .metric("warmroute_disaggregated_phase_seconds_count", &[&label])
                .await;
            assert_eq!(count, requests as f64, "{part}");
        }
    }
}

/// The usage of the answer says what the prefill worker had cached.
#[tokio::test]
async fn the_prompt_of_a_pair_counts_for_the_worker_that_computed_it() {
    let cluster = one_pair(NIXL).await;
    for (path, body) in generating(4, false) {
        let answer = decided(&cluster, path, &body).await;
        assert_eq!(decision(&answer, "disaggregated"), "yes", "{path}");
    }
    eventually("all answers are counted", async || {
        let complete = ["outcome=\"complete\""];
        cluster.metric("warmroute_requests_total", &complete).await == 3.0
    })
    .await;
    let all = cluster.metric("warmroute_prompt_tokens_total", &[]).await;
    let of_worker = "warmroute_worker_prompt_tokens_total";
    let prefill = cluster.metric(of_worker, &["worker=\"w0\""]).await;
    let decode = cluster.metric(of_worker, &["worker=\"w1\""]).await;
    assert!(all > 0.0);
    assert_eq!((prefill, decode), (all, 0.0));
}

#[tokio::test]
async fn a_decode_worker_that_holds_the_prompt_computes_the_rest_itself() {
    let cluster = one_pair(NIXL).await;
    for (path, body) in generating(4, false) {
        let first = decided(&cluster, path, &body).await;
        assert_eq!(decision(&first, "disaggregated"), "yes", "{path}");
        let second = decided(&cluster, path, &body).await;
        assert_eq!(
            decision(&second, "disaggregated"),
            "prefix_cached",
            "{path}"
        );
        assert_eq!(decision(&second, "worker"), "w1", "{path}");
        assert_eq!(text(path, &first), text(path, &second));
    }
    assert_eq!(cluster.engines[0].kv_transfers().await.granted, 3);
}

#[tokio::test]
async fn what_cannot_be_split_runs_whole_and_never_on_a_prefill_worker() {
    let cluster = one_pair(NIXL).await;
    let chat = |field: &str, value: Value| {
        let mut body = json!({"model": "sim", "max_tokens": 4,
            "messages": [{"role": "user", "content": format!("{field} ").repeat(100)}]});
        body[field] = value;
        ("/v1/chat/completions", body.to_string())
    };
    let completion = |field: &str, value: Value| {
        let mut body = json!({"model": "sim", "max_tokens": 4,
            "prompt": format!("{field} ").repeat(100)});
        body[field] = value;
        ("/v1/completions", body.to_string())
    };
    for ((path, body), why) in [
        (chat("n", json!(2)), "several"),
        (chat("max_tokens", json!(1)), "one_token"),
        (completion("n", json!(2)), "several"),
        (completion("echo", json!(true)), "prompt_output"),
        (
            (
                "/v1/embeddings",
                json!({"model": "sim", "input": "x"}).to_string(),
            ),
            "api",
        ),
    ] {
        let answer = decided(&cluster, path, &body).await;
        assert_eq!(decision(&answer, "disaggregated"), why, "{body}");
        assert_eq!(decision(&answer, "worker"), "w1", "{body}");
    }
    let prefill = &cluster.engines[0];
    assert_eq!(prefill.generated().await, 0);
    let transfers = prefill.kv_transfers().await;
    assert_eq!((transfers.prefill_legs, transfers.wrong_role), (0, 0));
}

#[tokio::test]
async fn without_a_prefill_worker_the_decode_worker_does_it_all_or_the_request_fails() {
    for on_prefill_failure in [OnPrefillFailure::Local, OnPrefillFailure::Fail] {
        let cluster = pairs(1, NIXL, fast(), |config| {
            config.prefill_decode.on_prefill_failure = on_prefill_failure;
        })
        .await;
        let drained = cluster.post_admin("/drain?worker=w0", "").await;
        assert_eq!(drained.status, 200, "{}", drained.text());
        for (path, body) in generating(4, false) {
            let answer = decided(&cluster, path, &body).await;
            match on_prefill_failure {
                OnPrefillFailure::Local => {
                    assert_eq!(answer.status, 200, "{path}: {}", answer.text());
                    assert_eq!(
                        decision(&answer, "disaggregated"),
                        "no_prefill_worker",
                        "{path}"
                    );
                }
                OnPrefillFailure::Fail => {
                    assert_eq!(answer.status, 503, "{path}: {}", answer.text());
                    assert_eq!(answer.code(), "no_healthy_worker", "{path}");
                    assert_eq!(answer.header("retry-after"), "1", "{path}");
                }
            }
        }
        // What need not be split is answered all the same.
        let short = json!({"model": "sim", "prompt": "x", "max_tokens": 2});
        assert_eq!(
            cluster
                .post("/v1/completions", short.to_string())
                .await
                .status,
            200
        );
    }
}

#[tokio::test]
async fn a_prompt_counts_at_its_prefill_worker_until_it_is_computed_and_then_no_more() {
    let slow = Settings {
        prefill_tokens_per_second: 200.try_into().unwrap(),
        ..unhurried()
    };
    let cluster = pairs(1, NIXL, slow, |_| {}).await;
    // The prompt is not computed before both were seen.
    cluster.engines[0].hold_after(0).await;
    let (path, body) = &generating(200, true)[0];
    let counts = async |name: &str| {
        let row = cluster.worker(name).await;
        ["requests", "queued_tokens", "context_tokens"].map(|field| row[field].as_u64().unwrap())
    };
    let asked = cluster.open(path, body);
    let seen = async {
        let mut both = ([0; 3], [0; 3]);
        eventually("both are counted", async || {
            both = (counts("w0").await, counts("w1").await);
            both.0[0] == 1 && both.1[0] == 1
        })
        .await;
        cluster.engines[0].let_go().await;
        both
    };
    let (mut open, (prefill, decode)) = tokio::join!(asked, seen);
    // The one computes, and the other does nothing yet but will be decoding.
    assert!(prefill[1] > 0 && prefill[2] > 0, "{prefill:?}");
    assert!(decode[1] == 0 && decode[2] > 0, "{decode:?}");
    open.until("\"content\":\"").await;
    assert_eq!(counts("w0").await, [0, 0, 0]);
    assert_eq!(counts("w1").await, decode);
    drop(open);
    eventually("nothing is counted any more", async || {
        counts("w1").await == [0, 0, 0]
    })
    .await;
    // The engine has stopped, too.
    eventually("the decode engine has stopped", async || {
        cluster.engines[1].stats().await.running == 0
    })
    .await;
}

#[tokio::test]
async fn blocks_that_a_client_left_behind_count_as_pinned_until_the_lease_ends() {
    const LEASE_MS: u64 = 5_000;
    let cluster = pairs(1, NIXL, fast(), |config| {
        config.prefill_decode.advanced.kv_lease = Duration::from_millis(LEASE_MS);
    })
    .await;
    cluster.engines[1]
        .fault(transfer_faults(TransferFaults {
            transfer_hangs: true,
            ..TransferFaults::default()
        }))
        .await;
    let pinned = async || {
        cluster
            .metric("warmroute_worker_kv_transfers_pending", &["w0"])
            .await
    };
    assert_eq!(pinned().await, 0.0);
    let (path, body) = generating(4, true)[0].clone();
    let api = cluster.router.api;
    let asked = tokio::spawn(async move { client::post(api, path, body).await });
    eventually("its blocks are pinned", async || pinned().await == 1.0).await;
    let row = cluster.worker("w0").await;
    assert_eq!(row["kv_transfers"]["pending"], 1);
    assert!(row["kv_transfers"]["pending_tokens"].as_u64().unwrap() > 8);
    asked.abort();
    let abandoned = ["outcome=\"abandoned\""];
    eventually("it counts as abandoned", async || {
        cluster
            .metric("warmroute_kv_transfers_total", &abandoned)
            .await
            == 1.0
    })
    .await;
    eventually("the engine's part is aborted", async || {
        cluster.engines[1].kv_transfers().await.aborted_decode_legs == 1
    })
    .await;
    eventually("the lease ends", async || pinned().await == 0.0).await;
}

/// The second and the third worker are in one zone.
pub(super) fn one_pair_in_a_zone(config: &mut Config) {
    config.prefill_decode.topology = "zone".to_owned();
    for (worker, zone) in config.workers.iter_mut().zip(["a", "b", "b", "c"]) {
        worker.labels.insert("zone".to_owned(), zone.to_owned());
    }
}

#[tokio::test]
async fn workers_of_different_places_are_no_pair() {
    for on_failure in [OnPrefillFailure::Local, OnPrefillFailure::Fail] {
        for policy in [Policy::CacheAware, Policy::RoundRobin] {
            let context = format!("{on_failure:?} {policy:?}");
            let cluster = pairs(2, NIXL, fast(), |config| {
                one_pair_in_a_zone(config);
                config.prefill_decode.on_prefill_failure = on_failure;
                config.routing.policy = policy;
            })
            .await;
            for number in 0..12 {
                let body = json!({"model": "sim", "max_tokens": 2,
                    "prompt": format!("{number} is the number. ").repeat(40)});
                let answer = decided(&cluster, "/v1/completions", &body.to_string()).await;
                assert_eq!(answer.status, 200, "{context}: {}", answer.text());
                let (worker, split) = (
                    decision(&answer, "worker"),
                    decision(&answer, "disaggregated"),
                );
                match worker {
                    "w2" => assert_eq!((split, decision(&answer, "prefill")), ("yes", "w1")),
                    "w3" if on_failure == OnPrefillFailure::Local => {
                        assert_eq!(split, "no_pair", "{context}");
                    }
                    other => panic!("{context}: {other}"),
                }
            }
            let legs = cluster.engines[0].kv_transfers().await.prefill_legs;
            assert_eq!(legs, 0, "{context}");
        }
    }
}

#[tokio::test]
async fn explain_names_both_workers_or_says_why_there_is_one() {
    let cluster = one_pair(NIXL).await;
    let (path, body) = generating(4, false)[1].clone();
    let explain = async |body: &str| {
        let answer = cluster
            .post_admin(&format!("/explain?path={path}"), body)
            .await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()
    };
    let explained = explain(&body).await;
    assert_eq!(explained["chosen"], "w1");
    assert_eq!(explained["disaggregation"]["is_disaggregated"], true);
    assert_eq!(explained["disaggregation"]["prefill"], "w0");
    assert_eq!(explained["disaggregation"]["workers"][0]["worker"], "w0");
    assert_eq!(explained["workers"].as_array().unwrap().len(), 1);
    let several = body.replacen('{', "{\"n\":2,", 1);
    let explained = explain(&several).await;
    assert_eq!(explained["disaggregation"]["is_disaggregated"], false);
    assert_eq!(
        explained["disaggregation"]["not_disaggregated_reason"],
        "several"
    );
    assert_eq!(cluster.requests().await, [0, 0]);
    let fleet = cluster.admin("/fleet").await.json();
    assert_eq!(fleet["models"][0]["workers"], json!(["w1"]));
    assert_eq!(fleet["models"][0]["prefill"], json!(["w0"]));
}

#[tokio::test]
async fn responses_are_stored_gone_on_with_and_cancelled_over_pairs() {
    let cluster = pairs(1, NIXL, unhurried(), |_| {}).await;
    let ask = async |extra: Value| {
        let mut body = json!({"model": "sim", "max_output_tokens": 4,
            "input": "tell me a story of two workers. ".repeat(8)});
        for (key, value) in extra.as_object().unwrap() {
            body[key] = value.clone();
        }
        let answer = decided(&cluster, "/v1/responses", &body.to_string()).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer
    };
    let first = ask(json!({})).await;
    assert_eq!(decision(&first, "disaggregated"), "yes");
    let first = first.json();
    let id = first["id"].as_str().unwrap();
    let kept = cluster.get(&format!("/v1/responses/{id}")).await;
    assert_eq!(kept.json()["output"], first["output"]);
    // What it goes on from is in both legs' prompt, or the text would be of another.
    let longer = json!({"previous_response_id": id, "input": "and of two others. ".repeat(30)});
    let second = ask(longer).await;
    assert_eq!(decision(&second, "disaggregated"), "yes");
    let again = ask(json!({"input": "another. ".repeat(60), "stream": true})).await;
    assert!(
        again.text().contains("event: response.incomplete"),
        "{}",
        again.text()
    );

    let before = cluster.engines[0].kv_transfers().await.granted;
    let body = json!({"model": "sim", "background": true, "max_output_tokens": 2_000,
        "input": "in the background. ".repeat(40)});
    let answer = cluster.post("/v1/responses", body.to_string()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let id = answer.json()["id"].as_str().unwrap().to_owned();
    let decode = &cluster.engines[1];
    eventually("it runs over a pair", async || {
        cluster.engines[0].kv_transfers().await.granted == before + 1
            && decode.kv_transfers().await.received == before + 1
    })
    .await;
    let cancelled = cluster
        .post(&format!("/v1/responses/{id}/cancel"), "")
        .await;
    assert_eq!(
        cancelled.json()["status"],
        "cancelled",
        "{}",
        cancelled.text()
    );
    eventually("the decode engine has stopped", async || {
        decode.stats().await.running == 0
    })
    .await;
    assert_eq!(decode.kv_transfers().await.wrong_uses, 0);
}

#[tokio::test]
async fn a_prefill_worker_that_fails_costs_another_try_and_not_the_answer() {
    let cluster = pairs(2, NIXL, fast(), |config| {
        several_clients(config);
        // Longer than the test.
        config.fleet.circuit_breaker.open_duration = Duration::from_secs(600);
    })
    .await;
    let fails = transfer_faults(TransferFaults {
        no_params: true,
        ..TransferFaults::default()
    });
    cluster.engines[0].fault(fails).await;
    let split_by = async |number: usize| {
        let body = json!({"model": "sim", "max_tokens": 2,
            "prompt": format!("{number} is the number. ").repeat(40)});
        let address = format!("198.51.100.{number}");
        let headers = [
            ("x-warmroute-decision", "1"),
            ("x-forwarded-for", &*address),
        ];
        let (api, body) = (cluster.router.api, body.to_string());
        let answer = client::send(api, "POST", "/v1/completions", &headers, body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(decision(&answer, "disaggregated"), "yes");
        assert_eq!(decision(&answer, "prefill"), "w1");
    };
    for number in 0..24 {
        split_by(number).await;
    }
    // After the failures of three clients in a row it is not asked, but it is not down either.
    let row = cluster.worker("w0").await;
    assert_eq!(row["kv_transfers"]["circuit_breaker"], "open");
    assert_eq!(row["circuit_breaker"], "closed");
    let none = ["outcome=\"no_params\""];
    assert_eq!(
        cluster.metric("warmroute_kv_transfers_total", &none).await,
        3.0
    );
}

#[tokio::test]
async fn one_client_is_enough_to_give_up_an_engine_without_a_connector() {
    let cluster = one_pair(NIXL).await;
    let lacks = transfer_faults(TransferFaults {
        no_params: true,
        ..TransferFaults::default()
    });
    cluster.engines[0].fault(lacks).await;
    for number in 0..6 {
        let prompt = format!("{number} is the number. ").repeat(40);
        let body = json!({"model": "sim", "max_tokens": 2, "prompt": prompt});
        let answer = cluster.post("/v1/completions", body.to_string()).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    let row = cluster.worker("w0").await;
    let transfers = &row["kv_transfers"];
    assert_eq!(transfers["circuit_breaker"], "open", "{row}");
    let legs = transfers["legs_without_params"].as_u64().unwrap();
    assert!(legs >= 3, "{row}");
    assert_eq!(row["circuit_breaker"], "closed", "{row}");
}

#[tokio::test]
async fn a_transfer_that_fails_is_begun_again_and_at_last_done_without() {
    for connector in [NIXL] {
        for stream in [false, true] {
            let cluster = one_pair(connector).await;
            let alone = Cluster::fast(1).await;
            cluster.engines[1]
                .fault(transfer_faults(TransferFaults {
                    transfer_fails_ms: Some(1),
                    ..TransferFaults::default()
                }))
                .await;
            for (path, body) in generating(6, stream) {
                let context = format!("{path}, stream {stream}");
                let answer = decided(&cluster, path, &body).await;
                assert_eq!(answer.status, 200, "{context}: {}", answer.text());
                // An engine that answers an error has said so; a stream that breaks off may be started again.
                let why = if stream {
                    "no_prefill_worker"
                } else {
                    "prefill_failed"
                };
                assert_eq!(decision(&answer, "disaggregated"), why, "{context}");
                let expected = alone.post(path, body).await;
                assert_eq!(text(path, &answer), text(path, &expected), "{context}");
                assert!(
                    !client::has_error(answer.text()),
                    "{context}: {}",
                    answer.text()
                );
            }
            let decode = cluster.engines[1].kv_transfers().await;
            assert_eq!((decode.received, decode.wrong_uses), (0, 0));
            let failed = ["outcome=\"failed\""];
            assert_eq!(
                cluster
                    .metric("warmroute_kv_transfers_total", &failed)
                    .await,
                3.0
            );
            let row = cluster.worker("w1").await;
            assert_eq!(row["circuit_breaker"], "closed");
        }
    }
}

#[tokio::test]
async fn a_decode_leg_that_keeps_silent_is_cancelled_and_the_request_begun_again() {
    let cluster = pairs(1, worker::Connector::Mooncake, fast(), |config| {
        config.prefill_decode.advanced.transfer_timeout = Duration::from_millis(200);
    })
    .await;
    let alone = Cluster::fast(1).await;
    let hangs = transfer_faults(TransferFaults {
        transfer_hangs: true,
        ..TransferFaults::default()
    });
    cluster.engines[1].fault(hangs).await;
    for (number, (path, body)) in generating(6, true).into_iter().enumerate() {
        let answer = decided(&cluster, path, &body).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        assert_eq!(
            decision(&answer, "disaggregated"),
            "no_prefill_worker",
            "{path}"
        );
        let expected = alone.post(path, body).await;
        assert_eq!(text(path, &answer), text(path, &expected), "{path}");
        let silent = number as u64 + 1;
        eventually("the silent leg is aborted", async || {
            cluster.engines[1].kv_transfers().await.aborted_decode_legs == silent
        })
        .await;
    }
    assert_eq!(
        cluster
            .metric("warmroute_worker_kv_transfers_pending", &["w0"])
            .await,
        3.0
    );
    // It may have been a queue.
    let row = cluster.worker("w0").await;
    assert_eq!(row["kv_transfers"]["circuit_breaker"], "closed");
}

#[tokio::test]
async fn blocks_that_come_slowly_are_waited_for_where_the_engine_would_say_that_none_come() {
    let of = |role| Settings {
        transfer: TransferSettings {
            role: Some(role),
            connector: Some(NIXL),
            tokens_per_second: 50.try_into().unwrap(),
            ..TransferSettings::default()
        },
        ..fast()
    };
    let cluster = Cluster::start(vec![of(Role::Prefill), of(Role::Decode)], |config| {
        config.prefill_decode.connector = Some(Connector::Nixl);
        config.prefill_decode.advanced.min_remote_tokens = 24;
        config.prefill_decode.advanced.transfer_timeout = Duration::from_millis(50);
    })
    .await;
    for (path, body) in generating(6, true) {
        let answer = decided(&cluster, path, &body).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        assert_eq!(decision(&answer, "disaggregated"), "yes", "{path}");
    }
    let seen = cluster.engines[1].kv_transfers().await;
    assert_eq!((seen.received, seen.aborted_decode_legs), (3, 0));
    let used = ["outcome=\"completed\""];
    assert_eq!(
        cluster.metric("warmroute_kv_transfers_total", &used).await,
        3.0
    );
}

#[tokio::test]
async fn an_answer_that_is_not_there_in_time_is_late_and_no_failed_transfer() {
    for connector in [NIXL, worker::Connector::Mooncake] {
        let cluster = pairs(1, connector, fast(), |config| {
            config.requests.response_timeout = Duration::from_secs(1);
        })
        .await;
        let hangs = transfer_faults(TransferFaults {
            transfer_hangs: true,
            ..TransferFaults::default()
        });
        cluster.engines[1].fault(hangs).await;
        let [(path, body), ..] = generating(6, false);
        let answer = cluster.post(path, body).await;
        assert_eq!(answer.status, 504, "{connector:?}: {}", answer.text());
        let failed = ["outcome=\"failed\""];
        assert_eq!(
            cluster
                .metric("warmroute_kv_transfers_total", &failed)
                .await,
            0.0
        );
    }
}

#[tokio::test]
async fn what_a_decode_engine_fails_at_is_computed_by_one_prefill_worker_at_most() {
    let cluster = pairs(3, NIXL, fast(), |_| {}).await;
    for engine in &cluster.engines[3..] {
        let fails = Faults {
            refuse: Some(500),
            ..Faults::default()
        };
        engine.fault(fails).await;
    }
    for (number, (path, body)) in generating(6, false).into_iter().enumerate() {
        let answer = cluster.post(path, body).await;
        assert_eq!(answer.status, 500, "{path}: {}", answer.text());
        let mut legs = 0;
        for engine in &cluster.engines[..3] {
            legs += engine.kv_transfers().await.prefill_legs;
        }
        assert_eq!(legs, number as u64 + 1, "{path}");
    }
}

#[tokio::test]
async fn a_prefill_engines_refusal_of_the_request_is_the_clients_answer() {
    let cluster = one_pair(NIXL).await;
    // Longer than the engine's longest.
    let body = json!({"model": "sim", "max_tokens": 10_000_000, "prompt": "x ".repeat(200)});
    let answer = decided(&cluster, "/v1/completions", &body.to_string()).await;
    let whole = json!({"model": "sim", "max_tokens": 10_000_000, "prompt": "x"});
    let expected = cluster.post("/v1/completions", whole.to_string()).await;
    assert_eq!(answer.status, expected.status, "{}", answer.text());
}

#[tokio::test]
async fn an_engine_of_both_roles_computes_for_another_and_never_for_itself() {
    let both = with_role(fast(), NIXL, Role::Both);
    let engines = vec![both.clone(), both];
    let mut started = Vec::new();
    for (place, settings) in engines.into_iter().enumerate() {
        started.push(Engine::here(&format!("w{place}"), settings).await);
    }
    let cluster = Cluster::with(started, |config| {
        config.prefill_decode.connector = Some(Connector::Nixl);
        config.prefill_decode.advanced.min_remote_tokens = 24;
    })
    .await;
    for (path, body) in generating(4, false) {
        let answer = decided(&cluster, path, &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        if decision(&answer, "disaggregated") == "yes" {
            assert_ne!(decision(&answer, "worker"), decision(&answer, "prefill"));
        }
    }
}
