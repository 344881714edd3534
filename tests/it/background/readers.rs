//! What the readers of a background response get at its end, wherever they read it.

use serde_json::{Value, json};

use super::*;

#[tokio::test]
async fn every_reader_of_a_deleted_response_gets_the_whole_object() {
    let pair = Pair::new(unhurried()).await;
    let (mut live, mut started, response) = streaming(&pair.a, 2_000).await;
    let path = format!("{}?stream=true", path(&response));
    let mut other = client::open(pair.b.api, "GET", &path, &[], String::new()).await;
    let mut read = other.until("output_text.delta").await;
    let deleted = client::send(pair.b.api, "DELETE", &super::path(&response), &[], "").await;
    assert_eq!(deleted.status, 200);
    started += &live.rest().await.0;
    read += &other.rest().await.0;
    for text in [started, read] {
        let (name, last) = events(&text, 0).pop().unwrap();
        assert_eq!(name, "response.failed");
        let last = &last["response"];
        assert_eq!(last["status"], "failed");
        assert_eq!(last["error"]["message"], "The response was deleted.");
        for member in ["id", "model", "created_at", "tools", "metadata"] {
            assert_eq!(last[member], response[member], "{member}: {last}");
        }
    }
}

#[tokio::test]
async fn a_reader_at_a_stopping_router_learns_where_to_read_on() {
    let pair = Pair::with_child(unhurried(), |_| {}).await;
    let (_live, _, response) = streaming(&pair.b, 2_000).await;
    let path = format!("{}?stream=true", path(&response));
    let mut reader = client::open(pair.a.api, "GET", &path, &[], String::new()).await;
    let mut text = reader.until("output_text.delta").await;
    pair.a.child.as_ref().unwrap().signal("TERM");
    let (rest, is_whole) = reader.rest().await;
    assert!(is_whole, "{rest}");
    text += &rest;
    let mut received = events(&text, 0);
    let (name, last) = received.pop().unwrap();
    assert_eq!(
        (name.as_str(), &last["code"]),
        ("error", &json!("router_draining"))
    );
    let after = last["sequence_number"].as_u64().unwrap() - 1;
    let message = last["message"].as_str().unwrap();
    assert!(
        message.ends_with(&format!("starting_after={after}")),
        "{message}"
    );
    // It goes on there.
    let body = format!("{path}&starting_after={after}");
    let mut more = client::open(pair.b.api, "GET", &body, &[], String::new()).await;
    let next = more.until("output_text.delta").await;
    assert_eq!(part(&next, after + 1)[0].1["sequence_number"], after + 1);
    cancel(&pair.b, &response).await;
}

#[tokio::test]
async fn a_reader_that_outlasts_the_drain_of_the_owner_learns_where_to_read_on() {
    let pair = Pair::with_child(unhurried(), |config| {
        config.api.drain_timeout = Duration::from_secs(4);
    })
    .await;
    let (mut live, mut text, _) = streaming(&pair.a, 2_000).await;
    pair.a.child.as_ref().unwrap().signal("TERM");
    let (rest, is_whole) = live.rest().await;
    assert!(is_whole, "{rest}");
    text += &rest;
    let (name, last) = events(&text, 0).pop().unwrap();
    assert_eq!(
        (name.as_str(), &last["code"]),
        ("error", &json!("router_draining"))
    );
    let after = last["sequence_number"].as_u64().unwrap() - 1;
    let message = last["message"].as_str().unwrap();
    assert!(
        message.ends_with(&format!("starting_after={after}")),
        "{message}"
    );
}

#[tokio::test]
async fn a_polled_response_that_is_not_stored_carries_its_state_token() {
    let pair = Pair::new(fast()).await;
    let more = json!({"store": false, "include": ["reasoning.encrypted_content"]});
    let response = create(&pair.a, &ask(4, more.clone())).await;
    let last = ended(&pair.b, &response).await;
    let items = last["output"].as_array().unwrap();
    let token = |item: &Value| item["encrypted_content"].is_string();
    assert!(items.iter().any(token), "{last}");
    // The conversation goes on with it.
    let next =
        json!({"store": false, "background": false, "input": "next", "previous_response": last});
    let mut body = ask(4, next);
    body["include"] = more["include"].clone();
    create(&pair.b, &body).await;
    let sent = pair.engine.last_body().await;
    let texts = sent["input"].to_string();
    assert!(texts.contains("hello") && texts.contains("next"), "{texts}");
}

#[tokio::test]
async fn a_reader_learns_that_events_it_was_told_are_lost() {
    let pair = Pair::new(unhurried()).await;
    let (_live, _, response) = streaming(&pair.a, 2_000).await;
    let path = format!("{}?stream=true", path(&response));
    let mut reader = client::open(pair.b.api, "GET", &path, &[], String::new()).await;
    let mut text = reader.until("output_text.delta").await;
    // A failover to a replica that had two events, and another owner.
    let record = pair.redis.cli(&["--scan", "--pattern", "wr:r:*"]);
    let record = record.trim();
    let log = record.replacen("wr:r:", "wr:e:", 1);
    let script = "redis.call('HSET', KEYS[1], 'sq', '1', 'ep', '2', 'own', '') \
                  for _, entry in ipairs(redis.call('XRANGE', KEYS[2], '(2-0', '+')) do \
                  redis.call('XDEL', KEYS[2], entry[1]) end";
    pair.redis.cli(&["eval", script, "2", record, &log]);
    let (rest, is_whole) = reader.rest().await;
    assert!(is_whole, "{rest}");
    text += &rest;
    let (name, last) = events(&text, 0).pop().unwrap();
    assert_eq!(
        (name.as_str(), &last["code"]),
        ("error", &json!("events_lost"))
    );
    assert_eq!(last["param"], "starting_after");
    let message = last["message"].as_str().unwrap();
    assert!(
        message.ends_with(&format!("{path}&starting_after=1")),
        "{message}"
    );
    // So does one that comes back with its number.
    let after = last["sequence_number"].as_u64().unwrap() - 1;
    let late = format!("{path}&starting_after={after}");
    let late = client::get(pair.b.api, &late).await;
    let (_, late) = events(late.text(), after + 1).pop().unwrap();
    assert_eq!(late["code"], "events_lost");
    let metrics = client::get(pair.b.admin, "/metrics").await;
    assert!(
        metrics
            .text()
            .contains("warmroute_background_readers_lost_total 2")
    );
}
