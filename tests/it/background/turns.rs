//! Turns of one conversation of which one holds the lock too long: the conversation reads as each of them saw it.

use std::time::Duration;

use serde_json::{Value, json};

use super::*;

/// A router of its own beside another one. A lock is lost long before a response is taken over.
async fn pair() -> Pair {
    Pair::with_child(unhurried(), |config| {
        config.responses.advanced.conversation_lease = Duration::from_secs(1);
        config.responses.store.lease.duration = Duration::from_secs(4);
    })
    .await
}

async fn new_conversation(router: &Router) -> Value {
    let made = client::post(router.api, "/v1/conversations", "{}").await;
    made.json()["id"].clone()
}

fn turn(input: &str, conversation: &Value, more: Value) -> Value {
    let mut body = ask(8, json!({"input": input, "conversation": conversation}));
    body.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    body
}

/// What its users said, in order; and each has an answer.
async fn read(router: &Router, conversation: &Value) -> Vec<String> {
    let id = conversation.as_str().unwrap();
    let path = format!("/v1/conversations/{id}/items?order=asc");
    let items = client::get(router.api, &path).await.json();
    let items = items["data"].as_array().unwrap();
    let roles: Vec<_> = items.iter().map(|item| &item["role"]).collect();
    assert_eq!(roles, ["user", "assistant"].repeat(items.len() / 2));
    texts(items)
}

fn texts(items: &[Value]) -> Vec<String> {
    let users = items.iter().filter(|item| item["role"] == "user");
    let text = |item: &Value| item["content"][0]["text"].as_str().unwrap().to_owned();
    users.map(text).collect()
}

/// What the engine was asked last.
async fn asked(pair: &Pair) -> Vec<String> {
    let body = pair.engine.last_body().await;
    texts(body["input"].as_array().unwrap())
}

/// A turn of another router, once the lock's lease has run out.
async fn other_turn(pair: &Pair, conversation: &Value) {
    let body = turn("B", conversation, json!({"background": false})).to_string();
    eventually("the conversation is free", async || {
        let answer = client::post(pair.b.api, PATH, body.clone()).await;
        answer.status == 200
    })
    .await;
}

#[tokio::test]
async fn an_orphan_that_another_turn_came_before_is_generated_on_the_history_of_now() {
    let pair = pair().await;
    let conversation = new_conversation(&pair.b).await;
    let body = turn("first", &conversation, json!({"background": false}));
    create(&pair.a, &body).await;
    let more = json!({"max_output_tokens": 40});
    // More tokens than the other turn has.
    pair.engine.hold_after(9).await;
    let one = create(&pair.a, &turn("A", &conversation, more)).await;
    pair.runs(1).await;
    pair.a.child.as_ref().unwrap().signal("KILL");
    other_turn(&pair, &conversation).await;
    assert_eq!(read(&pair.b, &conversation).await, ["first", "B"]);
    eventually("it is generated again", async || {
        asked(&pair).await == ["first", "B", "A"]
    })
    .await;
    pair.engine.let_go().await;
    let last = ended(&pair.b, &one).await;
    assert_eq!(last["status"], "incomplete", "{last}");
    assert_eq!(read(&pair.b, &conversation).await, ["first", "B", "A"]);
}

#[tokio::test]
async fn an_orphan_that_was_read_and_that_another_turn_came_before_fails() {
    let pair = pair().await;
    let conversation = new_conversation(&pair.b).await;
    let more = json!({"stream": true, "max_output_tokens": 200});
    let body = turn("A", &conversation, more).to_string();
    pair.engine.hold_after(3).await;
    let mut live = client::open(pair.a.api, "POST", PATH, &[], body).await;
    let started = live.until("output_text.delta").await;
    let one = part(&started, 0)[0].1["response"].clone();
    pair.a.child.as_ref().unwrap().signal("KILL");
    pair.engine.let_go().await;
    other_turn(&pair, &conversation).await;
    let last = ended(&pair.b, &one).await;
    assert_eq!(last["status"], "failed", "{last}");
    assert_ne!(last["output"], json!([]));
    assert_eq!(read(&pair.b, &conversation).await, ["B"]);
}

#[tokio::test]
async fn a_turn_of_a_router_that_was_stopped_too_long_is_generated_again_or_fails() {
    let pair = pair().await;
    let sleeper = pair.a.child.as_ref().unwrap();
    for (more, expected) in [
        (json!({"background": false}), "incomplete"),
        (json!({"background": true}), "incomplete"),
        (json!({"background": false, "stream": true}), "failed"),
    ] {
        let conversation = new_conversation(&pair.b).await;
        let mut body = turn("A", &conversation, more.clone());
        body["max_output_tokens"] = json!(40);
        // More tokens than the other turn has.
        pair.engine.hold_after(9).await;
        let open = client::open(pair.a.api, "POST", PATH, &[], body.to_string());
        let mut open = std::pin::pin!(open);
        let is_background = more["background"] == true;
        let created = if is_background {
            Some(open.as_mut().await)
        } else {
            None
        };
        let stopped = async {
            pair.runs(1).await;
            sleeper.signal("STOP");
            other_turn(&pair, &conversation).await;
            sleeper.signal("CONT");
            pair.engine.let_go().await;
        };
        let mut open = match created {
            Some(open) => {
                stopped.await;
                open
            }
            None => tokio::join!(open, stopped).0,
        };
        assert_eq!(open.status, 200, "{more}");
        let (text, _) = open.rest().await;
        let last = if more["stream"] == true {
            events(&text, 0).pop().unwrap().1["response"].clone()
        } else {
            serde_json::from_str(&text).unwrap()
        };
        let last = ended(&pair.b, &last).await;
        assert_eq!(last["status"], expected, "{more} {last}");
        let expected = match expected {
            "failed" => {
                assert_eq!(last["error"]["code"], "conversation_changed");
                assert_ne!(last["output"], json!([]));
                vec!["B"]
            }
            _ => {
                assert_eq!(asked(&pair).await, ["B", "A"]);
                vec!["B", "A"]
            }
        };
        assert_eq!(read(&pair.b, &conversation).await, expected, "{more}");
    }
}

#[tokio::test]
async fn a_background_turn_that_its_conversation_refuses_fails_with_its_output() {
    let pair = Pair::with(unhurried(), |config| {
        config.responses.store.retention.max_record = 64 << 10;
    })
    .await;
    for streams in [false, true] {
        let more = json!({"stream": streams, "max_output_tokens": 40});
        // Deleted while the turn runs.
        let conversation = new_conversation(&pair.b).await;
        let body = turn("A", &conversation, more.clone()).to_string();
        pair.engine.hold_after(3).await;
        let open = client::open(pair.a.api, "POST", PATH, &[], body).await;
        pair.runs(1).await;
        let path = format!("/v1/conversations/{}", conversation.as_str().unwrap());
        let deleted = client::send(pair.b.api, "DELETE", &path, &[], "").await;
        assert_eq!(deleted.status, 200);
        pair.engine.let_go().await;
        refused(&pair, open, "conversation_not_found").await;
        // Filled while the turn runs.
        let conversation = new_conversation(&pair.b).await;
        let body = turn("A", &conversation, more).to_string();
        pair.engine.hold_after(3).await;
        let open = client::open(pair.a.api, "POST", PATH, &[], body).await;
        pair.runs(1).await;
        let id = conversation.as_str().unwrap();
        let items = json!({"items": [{"role": "user", "content": "x".repeat(65_200)}]});
        let path = format!("/v1/conversations/{id}/items");
        let added = client::post(pair.b.api, &path, items.to_string()).await;
        assert_eq!(added.status, 200, "{}", added.text());
        pair.engine.let_go().await;
        refused(&pair, open, "conversation_too_large").await;
        let items = client::get(pair.b.api, &path).await.json();
        assert_eq!(items["data"].as_array().unwrap().len(), 1);
        // It is not locked any more.
        let unlocked = turn("x", &conversation, json!({"background": false}));
        let answer = client::post(pair.b.api, PATH, unlocked.to_string()).await;
        assert!(
            !answer.text().contains("conversation_locked"),
            "{}",
            answer.text()
        );
    }
}

#[tokio::test]
async fn a_turn_in_the_foreground_that_its_conversation_refuses_is_no_success() {
    let pair = Pair::with(unhurried(), |config| {
        config.responses.store.retention.max_record = 64 << 10;
    })
    .await;
    for streams in [false, true] {
        for (code, status) in [
            ("conversation_not_found", 404),
            ("conversation_too_large", 400),
        ] {
            let conversation = new_conversation(&pair.b).await;
            let more = json!({"background": false, "stream": streams, "max_output_tokens": 40});
            let body = turn("A", &conversation, more).to_string();
            let path = format!("/v1/conversations/{}", conversation.as_str().unwrap());
            pair.engine.hold_after(3).await;
            let refusing = async {
                pair.runs(1).await;
                let answer = match status {
                    404 => client::send(pair.b.api, "DELETE", &path, &[], "").await,
                    _ => {
                        let items =
                            json!({"items": [{"role": "user", "content": "x".repeat(65_200)}]});
                        let path = format!("{path}/items");
                        client::post(pair.b.api, &path, items.to_string()).await
                    }
                };
                assert_eq!(answer.status, 200, "{}", answer.text());
                pair.engine.let_go().await;
            };
            let asking = client::post(pair.a.api, PATH, body);
            let (answer, ()) = tokio::join!(asking, refusing);
            if streams {
                let (name, last) = events(answer.text(), 0).pop().unwrap();
                assert_eq!(name, "response.failed");
                let last = &last["response"];
                assert_eq!(last["error"]["code"], code);
                assert_ne!(last["output"], json!([]));
                // Its record says the same.
                let stored = client::get(pair.b.api, &super::path(last)).await.json();
                assert_eq!(&stored, last);
            } else {
                assert_eq!((answer.status, answer.code().as_str()), (status, code));
            }
        }
    }
}

/// The response ends with this error, in its record and for its readers.
async fn refused(pair: &Pair, mut open: Open, code: &str) {
    let (text, _) = open.rest().await;
    let (response, last) = if text.starts_with('{') {
        (serde_json::from_str::<Value>(&text).unwrap(), None)
    } else {
        let mut events = events(&text, 0);
        let (name, last) = events.pop().unwrap();
        assert_eq!(name, "response.failed");
        (last["response"].clone(), Some(last["response"].clone()))
    };
    let stored = ended(&pair.b, &response).await;
    assert_eq!(
        (&stored["status"], &stored["error"]["code"]),
        (&json!("failed"), &json!(code))
    );
    assert_ne!(stored["output"], json!([]));
    if let Some(last) = last {
        assert_eq!(last, stored);
        let replayed = resumed(&pair.b, &response, None).await;
        assert_eq!(replayed.last().unwrap().1["response"], stored);
    }
}
