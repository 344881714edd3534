//! Clients that share conversations while everything is killed and stopped, and what must then be in those.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use super::fleet::{END, Places, any, end};
use super::{PATH, ask, part};
use crate::client;
use crate::cluster::{Router, eventually};

/// Of so many turns of a conversation it is asked what the engine was sent.
const ASKED_MAX: usize = 30;

/// What a client knows of one turn.
#[derive(Clone, Debug)]
pub(super) struct Turn {
    /// No other turn says the same.
    input: String,
    known: Known,
}

#[derive(Clone, Debug)]
enum Known {
    /// The turn was refused before anything ran.
    Refused,
    /// The client heard no end of the turn, so it may be there or not.
    Nothing,
    /// A background response, which is in the store.
    Created(Value),
    /// A response that its client has whole.
    Answered(Value),
}

pub(super) async fn new_conversation(places: &Places) -> Value {
    let mut id = Value::Null;
    eventually("some router makes a conversation", async || {
        let open = client::try_open(any(places), "POST", "/v1/conversations", &[], "{}").await;
        let Ok(mut open) = open else { return false };
        let (text, true) = open.rest().await else {
            return false;
        };
        let made: Value = serde_json::from_str(&text).unwrap_or_default();
        id = made["id"].clone();
        open.status == 200
    })
    .await;
    id
}

/// Says one turn after the other, each at any router. Others do the same in the same conversation.
pub(super) async fn talk(
    places: Places,
    is_over: Arc<AtomicBool>,
    conversation: Value,
    name: usize,
) -> Vec<Turn> {
    let mut turns: Vec<Turn> = Vec::new();
    let is_taken = |turn: &Turn| matches!(turn.known, Known::Created(_) | Known::Answered(_));
    // Also where few turns fit into the time of the faults, one is taken.
    while !is_over.load(Ordering::Relaxed) || !turns.iter().any(is_taken) {
        let input = format!("client {name} says {}", turns.len());
        let known = turn(&places, &conversation, &input).await;
        if matches!(known, Known::Refused) {
            tokio::time::sleep(Duration::from_millis(fastrand::u64(100..600))).await;
        }
        turns.push(Turn { input, known });
    }
    turns
}

async fn turn(places: &Places, conversation: &Value, input: &str) -> Known {
    let (is_background, streams) = (fastrand::bool(), fastrand::bool());
    let tokens = fastrand::usize(1..40);
    let more = json!({
        "input": input,
        "conversation": conversation,
        "background": is_background,
        "stream": streams,
    });
    let body = ask(tokens, more).to_string();
    let Ok(mut open) = client::try_open(any(places), "POST", PATH, &[], body).await else {
        return Known::Nothing;
    };
    let status = open.status;
    let (text, is_whole) = open.rest().await;
    if status != 200 {
        let is_refused = status == 400 && text.contains("conversation_locked");
        assert!(is_refused || status >= 500 || !is_whole, "{status} {text}");
        return if is_refused {
            Known::Refused
        } else {
            Known::Nothing
        };
    }
    let answered = |response: Value| {
        if is_background {
            Known::Created(response)
        } else {
            Known::Answered(response)
        }
    };
    if !streams {
        return if is_whole {
            answered(serde_json::from_str(&text).unwrap())
        } else {
            Known::Nothing
        };
    }
    let events = part(text.strip_suffix(END).unwrap_or(&text), 0);
    let response = if is_background {
        events.first()
    } else {
        events.last().filter(|(name, _)| {
            [
                "response.completed",
                "response.incomplete",
                "response.failed",
            ]
            .contains(&&**name)
        })
    };
    match response.map(|(_, event)| event["response"].clone()) {
        Some(response) if !response.is_null() => answered(response),
        _ => Known::Nothing,
    }
}

/// All items, in order.
async fn items(router: &Router, conversation: &str) -> Vec<Value> {
    let mut items: Vec<Value> = Vec::new();
    loop {
        let after = items.last().and_then(|item| item["id"].as_str());
        let after = after.map(|id| format!("&after={id}")).unwrap_or_default();
        let path = format!("/v1/conversations/{conversation}/items?order=asc&limit=100{after}");
        let page = client::get(router.api, &path).await;
        assert_eq!(page.status, 200, "{}", page.text());
        let page = page.json();
        items.extend(page["data"].as_array().unwrap().iter().cloned());
        if page["has_more"] != true {
            return items;
        }
    }
}

/// Every turn is in its conversation whole, in order and once, and was generated on what is before it; or it is not there at all.
/// Returns how many are there.
pub(super) async fn check(routers: &[&Router], conversation: &Value, turns: &[Turn]) -> usize {
    let id = conversation.as_str().unwrap();
    let all = items(routers[0], id).await;
    for router in routers {
        assert_eq!(items(router, id).await, all, "{id}");
    }
    let text = |item: &Value| {
        let text = item["content"][0]["text"].as_str();
        text.unwrap_or_default().to_owned()
    };
    let roles: Vec<&Value> = all.iter().map(|item| &item["role"]).collect();
    let expected = ["user", "assistant"].repeat(all.len() / 2);
    let wrong = roles
        .iter()
        .zip(&expected)
        .position(|(role, due)| role != due);
    let around = wrong.map(|place| &all[place.saturating_sub(3)..all.len().min(place + 5)]);
    assert_eq!(roles, expected, "{id}, at {wrong:?}: {around:?}");
    let said: Vec<String> = all.iter().step_by(2).map(text).collect();
    for (place, input) in said.iter().enumerate() {
        assert!(!said[..place].contains(input), "{id} has {input} twice");
        let turn = turns.iter().find(|turn| turn.input == *input);
        let turn = turn.unwrap_or_else(|| panic!("nobody said {input}"));
        assert!(!matches!(turn.known, Known::Refused), "{id}: {turn:?}");
    }
    for Turn { input, known } in turns {
        let place = said.iter().position(|one| one == input);
        let last = match known {
            Known::Refused | Known::Nothing => continue,
            Known::Created(response) => end(routers, response).await,
            Known::Answered(response) => response.clone(),
        };
        let is_stored = last["store"] == true;
        match (last["status"].as_str().unwrap(), place) {
            ("incomplete" | "completed", Some(place)) if is_stored => {
                assert_eq!(all[2 * place + 1]["id"], last["output"][0]["id"], "{last}");
                if place.is_multiple_of(said.len().div_ceil(ASKED_MAX)) {
                    let seen = input_tokens(routers[0], &all[..=2 * place]).await;
                    assert_eq!(last["usage"]["input_tokens"], seen, "{id}, {input}: {last}");
                }
            }
            ("failed", None) => {}
            ("incomplete" | "completed", None) if !is_stored => {}
            (_, place) => panic!("{id} has {input} at {place:?}: {last}"),
        }
    }
    said.len()
}

/// What an engine counts of these items.
async fn input_tokens(router: &Router, items: &[Value]) -> Value {
    let plain = items.iter().map(|item| {
        let mut item = item.clone();
        let fields = item.as_object_mut().unwrap();
        fields.remove("id");
        item
    });
    let input: Vec<Value> = plain.collect();
    let body = json!({"model": "sim", "input": input, "max_output_tokens": 1, "store": false});
    let answer = client::post(router.api, PATH, body.to_string()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["usage"]["input_tokens"].clone()
}
