//! Streamed responses that outlive their router: another one goes on after the stored events.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};
use warmroute::config::Config;
use warmroute::sim::worker::Settings;

use super::fleet::{Fleet, Places, end, followed_after, replayed};
use super::{PATH, ask, said};
use crate::client::{self, Open};
use crate::cluster::{Router, eventually, unhurried};
use crate::model_names::named;
use crate::redis_server::Server;

const CONTINUATIONS: &str = "warmroute_background_continuations_total";

/// An engine that speaks chat completions only.
fn chat_only() -> Settings {
    Settings {
        no_responses: true,
        ..unhurried()
    }
}

fn continued(config: &mut Config) {
    config.models = named(json!([{"name": "sim", "stream_continuation": {}}]));
}

async fn fleet() -> Fleet {
    Fleet::with(chat_only(), Server::durable().await, continued).await
}

/// A stream of the router of which this many tokens have come, and their text.
async fn streaming(router: &Router, body: &Value, tokens: usize) -> (Open, String) {
    let mut live = client::open(router.api, "POST", PATH, &[], body.to_string()).await;
    let mut text = live.until("response.output_item.added").await;
    while text.matches("event: response.output_text.delta").count() < tokens {
        text += &live.until("event: response.output_text.delta").await;
    }
    (live, text)
}

fn counts(response: &Value) -> [u64; 3] {
    let names = ["input_tokens", "output_tokens", "total_tokens"];
    names.map(|name| response["usage"][name].as_u64().unwrap())
}

fn text_of(response: &Value) -> &str {
    response["output"][0]["content"][0]["text"]
        .as_str()
        .unwrap()
}

async fn continuations(fleet: &Fleet, places: &[usize], labels: &str) -> f64 {
    let mut sum = 0.0;
    for place in places {
        sum += fleet
            .metric(*place, &format!("{CONTINUATIONS}{labels}"))
            .await;
    }
    sum
}

const CONTINUED: &str = r#"{outcome="continued",reason="none"}"#;

#[tokio::test]
async fn a_response_whose_router_is_killed_goes_on_at_another_one() {
    let mut fleet = fleet().await;
    let mut goings_on = 0.0;
    for (round, tokens) in [1, 2, 7, 25, 39].into_iter().enumerate() {
        let text = format!("round {round}");
        let body = ask(40, json!({"stream": true, "input": text}));
        // The unbroken run.
        let (mut live, start) = streaming(&fleet.routers[1], &body, 1).await;
        let (rest, is_whole) = live.rest().await;
        assert!(is_whole);
        let whole = super::events(&(start + &rest), 0);
        let expected = &whole.last().unwrap().1["response"];
        let before = continuations(&fleet, &[1, 2], CONTINUED).await;

        // The last one may have ended before the kill.
        if tokens < 39 {
            fleet.engine.hold_after(tokens + 1).await;
        }
        let (live, start) = streaming(&fleet.routers[0], &body, tokens).await;
        fleet.routers[0].child.as_ref().unwrap().signal("KILL");
        fleet.engine.let_go().await;
        let places: Places = Arc::new(Mutex::new(vec![fleet.routers[1].api]));
        let received = followed_after(&places, live, start).await;
        let response = &received[0].1["response"];
        let others = [&fleet.routers[1], &fleet.routers[2]];
        let last = end(&others, response).await;
        assert_eq!(last["status"], expected["status"], "{tokens}: {last}");
        assert_eq!(
            (text_of(&last), counts(&last)),
            (text_of(expected), counts(expected)),
            "{tokens}"
        );
        // Whoever followed it, or reads it again on any router, has each event once and the same text.
        assert_eq!(said(&received), said(&whole));
        assert_eq!(received.len(), whole.len());
        assert_eq!(replayed(&others, response).await, received);
        assert_eq!(received.last().unwrap().1["response"], last);
        goings_on += continuations(&fleet, &[1, 2], CONTINUED).await - before;
        fleet.runs(0).await;
        fleet.replace(0).await;
    }
    assert!(goings_on >= 4.0, "{goings_on}");
}

#[tokio::test]
async fn a_response_goes_on_at_the_model_that_its_name_led_to() {
    let models: Vec<String> = (0..8).map(|number| format!("m{number}")).collect();
    let engine = Settings {
        models: models.clone(),
        ..chat_only()
    };
    let fleet = Fleet::with(engine, Server::durable().await, |config| {
        let named_model = |model: &String| json!({"name": model, "stream_continuation": {}});
        let target = |model: &String| json!({"model": model, "weight": 1});
        let mut entries: Vec<Value> = models.iter().map(named_model).collect();
        // Drawn again, it would most likely lead to another one.
        let targets: Vec<Value> = models.iter().map(target).collect();
        entries.push(json!({"name": "split", "targets": targets}));
        config.models = named(json!(entries));
    })
    .await;
    let body = ask(100, json!({"stream": true, "model": "split"}));
    fleet.engine.hold_after(4).await;
    let (live, start) = streaming(&fleet.routers[0], &body, 3).await;
    fleet.routers[0].child.as_ref().unwrap().signal("KILL");
    fleet.engine.let_go().await;
    let places: Places = Arc::new(Mutex::new(vec![fleet.routers[1].api]));
    let received = followed_after(&places, live, start).await;
    let others = [&fleet.routers[1], &fleet.routers[2]];
    let last = end(&others, &received[0].1["response"]).await;
    assert_eq!(last["usage"]["output_tokens"], 100, "{last}");
    assert_eq!(text_of(&last), said(&received));
    assert_eq!(continuations(&fleet, &[1, 2], CONTINUED).await, 1.0);
    fleet.runs(0).await;
}

#[tokio::test]
async fn a_response_goes_on_as_often_as_is_allowed_and_then_fails_with_its_text() {
    let mut fleet = fleet().await;
    let body = ask(3_000, json!({"stream": true}));
    let (live, start) = streaming(&fleet.routers[0], &body, 5).await;
    let first = super::part(&start, 0)[0].1["response"].clone();
    let id = first["id"].as_str().unwrap().to_owned();
    let mut owner = 0;
    for _ in 0..2 {
        fleet.routers[owner].child.as_ref().unwrap().signal("KILL");
        let gone = owner;
        // Who goes on with it?
        let mut runs = Vec::new();
        eventually("it runs or has ended", async || {
            runs.clear();
            for place in (0..3).filter(|place| *place != gone) {
                if fleet.metric(place, "warmroute_background_running").await > 0.0 {
                    runs.push(place);
                }
            }
            let place = (0..3).find(|place| *place != gone).unwrap();
            let answer = client::get(fleet.routers[place].api, &format!("{PATH}/{id}")).await;
            !runs.is_empty() || answer.json()["status"] == "failed"
        })
        .await;
        // It has written some text of its own.
        tokio::time::sleep(Duration::from_millis(500)).await;
        fleet.replace(gone).await;
        match runs.first() {
            Some(place) => owner = *place,
            None => break,
        }
    }
    let places: Places = Arc::new(Mutex::new(
        fleet.routers.iter().map(|router| router.api).collect(),
    ));
    let received = followed_after(&places, live, start).await;
    let routers: Vec<&Router> = fleet.routers.iter().collect();
    let last = end(&routers, &first).await;
    assert_eq!(last["status"], "failed", "{last}");
    assert_eq!(text_of(&last), said(&received));
    assert_eq!(replayed(&routers, &first).await, received);
    let limit = r#"{outcome="refused",reason="limit"}"#;
    assert_eq!(continuations(&fleet, &[0, 1, 2], limit).await, 1.0);
    fleet.runs(0).await;
}

#[tokio::test]
async fn a_router_that_stops_leaves_what_it_has_not_finished_to_another_one() {
    let mut fleet = Fleet::with(chat_only(), Server::durable().await, |config| {
        continued(config);
        config.api.drain_timeout = Duration::from_millis(500);
    })
    .await;
    let conversation = client::post(fleet.routers[1].api, "/v1/conversations", "{}").await;
    let conversation = conversation.json()["id"].clone();
    let body = ask(100, json!({"stream": true, "conversation": conversation}));
    fleet.engine.hold_after(4).await;
    let (live, start) = streaming(&fleet.routers[0], &body, 3).await;
    let places: Places = Arc::new(Mutex::new(vec![fleet.routers[1].api]));
    let engine = &fleet.engine;
    let child = fleet.routers[0].child.as_mut().unwrap();
    child.signal("TERM");
    let stops = async {
        eventually("the process ends", async || child.ended().is_some()).await;
        engine.let_go().await;
    };
    let (received, ()) = tokio::join!(followed_after(&places, live, start), stops);
    let response = &received[0].1["response"];
    let others = [&fleet.routers[1], &fleet.routers[2]];
    let last = end(&others, response).await;
    assert_eq!(
        (&last["status"], &last["usage"]["output_tokens"]),
        (&json!("incomplete"), &json!(100)),
        "{last}"
    );
    assert_eq!(text_of(&last), said(&received));
    assert_eq!(continuations(&fleet, &[1, 2], CONTINUED).await, 1.0);
    // The turn is in its conversation, once.
    let path = format!("/v1/conversations/{}/items", conversation.as_str().unwrap());
    let items = client::get(fleet.routers[1].api, &path).await.json();
    assert_eq!(items["data"].as_array().unwrap().len(), 2, "{items}");
}

#[tokio::test]
async fn what_cannot_go_on_fails_with_its_text_and_says_why() {
    for (more, reason) in [
        (
            json!({"text": {"format": {"type": "json_object"}}}),
            "grammar",
        ),
        (
            json!({"include": ["reasoning.encrypted_content"]}),
            "encrypted_reasoning",
        ),
    ] {
        let fleet = fleet().await;
        let mut body = ask(400, json!({"stream": true}));
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        let (live, start) = streaming(&fleet.routers[0], &body, 3).await;
        fleet.routers[0].child.as_ref().unwrap().signal("KILL");
        let places: Places = Arc::new(Mutex::new(vec![fleet.routers[1].api]));
        let received = followed_after(&places, live, start).await;
        let others = [&fleet.routers[1], &fleet.routers[2]];
        let last = end(&others, &received[0].1["response"]).await;
        assert_eq!(last["status"], "failed", "{last}");
        assert_eq!(text_of(&last), said(&received));
        let refused = format!(r#"{{outcome="refused",reason="{reason}"}}"#);
        assert_eq!(
            continuations(&fleet, &[1, 2], &refused).await,
            1.0,
            "{reason}"
        );
        fleet.runs(0).await;
    }
}
