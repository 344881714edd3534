//! Responses that are kept, gone on with, run in the background or cancelled, while engines of pairs fail.

use std::time::Duration;

use serde_json::{Value, json};
use warmroute::sim::fault::{Faults, TransferFaults};
use warmroute::sim::worker::Settings;

use super::failures::{Fleet, said, with_both};
use crate::cluster::eventually;
use crate::failures::{hang, refuse, unnoticed};

const PATH: &str = "/v1/responses";

fn ask(topic: &str, tokens: usize, more: Value) -> Value {
    let input = format!("{topic}, and all that was said of it before. ").repeat(10);
    let mut body = json!({"model": "sim", "input": input, "max_output_tokens": tokens});
    let fields = body.as_object_mut().unwrap();
    fields.extend(more.as_object().unwrap().clone());
    body
}

async fn stored(fleet: &Fleet, response: &Value) -> Value {
    let id = response["id"].as_str().unwrap();
    let answer = fleet.cluster.get(&format!("{PATH}/{id}")).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

async fn ended(fleet: &Fleet, response: &Value) -> Value {
    let mut last = Value::Null;
    eventually("it ends", async || {
        last = stored(fleet, response).await;
        !["queued", "in_progress"].contains(&last["status"].as_str().unwrap())
    })
    .await;
    last
}

#[tokio::test]
async fn a_chain_goes_on_at_other_workers_when_those_of_its_past_fail() {
    with_both(async |connector| {
        let fleet = Fleet::start(connector, (2, 2), unnoticed).await;
        let first = fleet.cluster.create(&ask("ships", 8, json!({}))).await;
        let healthy = fleet.cluster.create(&continued(&first)).await;
        for broken in ["p0", "p1", "d0", "d1"] {
            let mut engines = fleet.cluster.engines.iter();
            let engine = engines.find(|engine| engine.name == broken).unwrap();
            engine.fault(refuse(503)).await;
            // The same history gives the same text, wherever it is computed.
            for _ in 0..2 {
                let next = fleet.cluster.create(&continued(&first)).await;
                assert_eq!(next["previous_response_id"], first["id"]);
                assert_eq!(
                    said(&next.to_string()),
                    said(&healthy.to_string()),
                    "{broken}"
                );
                assert_eq!(stored(&fleet, &next).await, next);
            }
            engine.fault(Faults::default()).await;
        }
        fleet.is_unpinned("a chain").await;
    })
    .await;
}

fn continued(response: &Value) -> Value {
    ask(
        "harbours",
        8,
        json!({"previous_response_id": response["id"]}),
    )
}

#[tokio::test]
async fn what_a_decode_engine_did_not_finish_is_stored_as_failed() {
    with_both(async |connector| {
        let slow = |settings| Settings {
            decode_ms: 20,
            ..settings
        };
        let mut fleet = Fleet::of(connector, (1, 1), slow, unnoticed).await;
        let body = ask("storms", 3_000, json!({"stream": true}));
        let mut stream = fleet.cluster.open(PATH, &body.to_string()).await;
        let started = stream.until("output_text.delta").await;
        fleet.kill("d0").await;
        let (rest, whole) = stream.rest().await;
        let text = started + &rest;
        assert!(whole, "{text}");
        crate::failures::ends_with_an_error(PATH, &text);
        let id = text
            .split("\"id\":\"")
            .nth(1)
            .unwrap()
            .split('"')
            .next()
            .unwrap();
        let kept = stored(&fleet, &json!({"id": id})).await;
        assert_eq!(kept["status"], "failed", "{kept}");
        fleet.is_unpinned("it is killed").await;
    })
    .await;
}

#[tokio::test]
async fn a_background_response_outlives_what_fails_at_either_engine() {
    with_both(async |connector| {
        let fleet = Fleet::start(connector, (2, 2), unnoticed).await;
        let fails = Faults {
            transfer: TransferFaults {
                transfer_fails_ms: Some(5),
                ..TransferFaults::default()
            },
            ..Faults::default()
        };
        let cases = [("p0", refuse(500)), ("d0", refuse(503)), ("d0", fails)];
        for (place, (broken, fault)) in cases.into_iter().enumerate() {
            let mut engines = fleet.cluster.engines.iter();
            let engine = engines.find(|engine| engine.name == broken).unwrap();
            engine.fault(fault).await;
            for round in 0..4 {
                let topic = format!("tide {place} {round}");
                let whole = ask(&topic, 6, json!({"store": false}));
                let expected = said(&fleet.cluster.create(&whole).await.to_string());
                let body = ask(&topic, 6, json!({"background": true}));
                let response = fleet.cluster.create(&body).await;
                assert_eq!(response["status"], "queued");
                let last = ended(&fleet, &response).await;
                assert_eq!(last["status"], "incomplete", "{last}");
                assert_eq!(said(&last.to_string()), expected, "{last}");
            }
            engine.fault(Faults::default()).await;
        }
        fleet.is_unpinned("in the background").await;
    })
    .await;
}

#[tokio::test]
async fn a_cancelled_response_leaves_either_leg() {
    with_both(async |connector| {
        let fleet = Fleet::start(connector, (1, 1), |config| {
            config.requests.first_byte_timeout = Duration::from_secs(600);
            config.requests.response_timeout = Duration::from_secs(600);
            config.prefill_decode.advanced.transfer_timeout = Duration::from_secs(600);
        })
        .await;
        fleet.prefill(0).fault(hang()).await;
        cancelled(&fleet, "leg one", async || {
            let seen = fleet.prefill(0).kv_transfers().await;
            (seen.prefill_legs, seen.aborted_prefill_legs)
        })
        .await;
        fleet.prefill(0).fault(Faults::default()).await;
        let hangs = TransferFaults {
            transfer_hangs: true,
            ..TransferFaults::default()
        };
        fleet
            .decode(0)
            .fault(Faults {
                transfer: hangs,
                ..Faults::default()
            })
            .await;
        cancelled(&fleet, "leg two", async || {
            let seen = fleet.decode(0).kv_transfers().await;
            (seen.decode_legs, seen.aborted_decode_legs)
        })
        .await;
        fleet.is_unpinned("cancelled").await;
        assert_eq!(fleet.prefill(0).kv_transfers().await.expired, 1);
    })
    .await;
}

/// A background response is cancelled once its leg, counted by `legs` with those that were aborted, has started.
async fn cancelled(fleet: &Fleet, what: &str, legs: impl AsyncFn() -> (u64, u64)) {
    let (started, aborted) = legs().await;
    let body = ask(what, 8, json!({"background": true}));
    let response = fleet.cluster.create(&body).await;
    eventually("the leg has started", async || legs().await.0 > started).await;
    let cancel = format!("{PATH}/{}/cancel", response["id"].as_str().unwrap());
    let answer = fleet.cluster.post(&cancel, "").await;
    assert_eq!(
        answer.json()["status"],
        "cancelled",
        "{what}: {}",
        answer.text()
    );
    eventually("the leg is aborted", async || legs().await.1 > aborted).await;
    assert_eq!(stored(fleet, &response).await["status"], "cancelled");
}

#[tokio::test]
async fn pairs_that_speak_chat_completions_only_answer_as_others_do() {
    with_both(async |connector| {
        let chat_only = |settings| Settings {
            no_responses: true,
            ..settings
        };
        let fleet = Fleet::of(connector, (1, 1), chat_only, unnoticed).await;
        let first = fleet.cluster.create(&ask("ships", 8, json!({}))).await;
        let next = fleet.cluster.create(&continued(&first)).await;
        assert_eq!(stored(&fleet, &next).await, next);
        let background = ask("tides", 8, json!({"background": true}));
        let background = fleet.cluster.create(&background).await;
        assert_eq!(ended(&fleet, &background).await["status"], "incomplete");
        for engine in &fleet.cluster.engines {
            let seen = engine.kv_transfers().await;
            assert!(seen.prefill_legs + seen.decode_legs > 0, "{}", engine.name);
        }
        fleet.is_unpinned("chats").await;
    })
    .await;
}
