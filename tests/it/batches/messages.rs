//! Anthropic's Message Batches.

use std::time::Duration;

use serde_json::{Value, json};

use super::clients::{Client, chat_line, custom_ids, json_lines};
use super::{fast_cluster, start};
use crate::adapters::load;
use crate::client::Answer;
use crate::cluster::{eventually, fast, unhurried};

const PATH: &str = "/v1/messages/batches";

fn request(custom_id: &str, max_tokens: u32) -> Value {
    json!({"custom_id": custom_id, "params": {
        "model": "sim",
        "max_tokens": max_tokens,
        "messages": [{"role": "user", "content": "Hello"}],
    }})
}

async fn create(client: &Client, requests: &[Value]) -> Value {
    let body = json!({"requests": requests}).to_string();
    let answer = client.send("POST", PATH, body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

fn path(batch: &Value) -> String {
    format!("{PATH}/{}", batch["id"].as_str().unwrap())
}

async fn ended(client: &Client, batch: &Value) -> Value {
    let mut last = Value::Null;
    eventually("the batch ends", async || {
        last = client.get(&path(batch)).await.json();
        last["processing_status"] == "ended"
    })
    .await;
    last
}

async fn results(client: &Client, batch: &Value) -> Vec<Value> {
    let url = batch["results_url"].as_str().unwrap();
    let answer = client.get(url).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    json_lines(&answer)
}

/// Status and type of an error.
fn error(answer: &Answer) -> (u16, String) {
    let body = answer.json();
    assert_eq!(body["type"], "error", "{body}");
    let kind = body["error"]["type"].as_str().unwrap().to_owned();
    (answer.status, kind)
}

#[tokio::test]
async fn a_batch_of_messages_has_a_result_for_each_request() {
    let (cluster, _folder) = fast_cluster().await;
    let client = Client::of(&cluster.router);
    let mut requests: Vec<Value> = (0..5).map(|n| request(&format!("q-{n}"), 3)).collect();
    let mut wrong = request("wrong", 3);
    wrong["params"]["model"] = "nobody".into();
    requests.push(wrong);
    requests.push(json!({"custom_id": "empty", "params": {}}));
    let created = create(&client, &requests).await;
    assert_eq!(created["type"], "message_batch");
    assert_eq!(created["processing_status"], "in_progress");
    assert_eq!(created["request_counts"]["processing"], 7);
    let batch = ended(&client, &created).await;
    let counts = &batch["request_counts"];
    assert_eq!(
        (&counts["succeeded"], &counts["errored"]),
        (&json!(5), &json!(2))
    );
    let results = results(&client, &batch).await;
    let mut expected: Vec<String> = (0..5).map(|n| format!("q-{n}")).collect();
    expected.insert(0, "empty".to_owned());
    expected.push("wrong".to_owned());
    assert_eq!(custom_ids(&results), expected);
    for result in &results {
        let result_of = &result["result"];
        if result["custom_id"].as_str().unwrap().starts_with("q-") {
            assert_eq!(result_of["type"], "succeeded", "{result}");
            assert_eq!(result_of["message"]["type"], "message");
        } else {
            assert_eq!(result_of["type"], "errored", "{result}");
            assert_eq!(result_of["error"]["type"], "error");
        }
    }

    // Each API has its own batches, and no files are there for these.
    let listed = client.get(&format!("{PATH}?limit=10")).await.json();
    assert_eq!(listed["data"][0], batch);
    assert_eq!(client.get("/v1/files").await.json()["data"], json!([]));
    assert_eq!(client.get("/v1/batches").await.json()["data"], json!([]));
    let other = format!("/v1/batches/{}", batch["id"].as_str().unwrap());
    assert_eq!(client.get(&other).await.status, 404);

    let cancel = format!("{}/cancel", path(&batch));
    let cancelled = client.send("POST", &cancel, String::new()).await;
    let refused = (400, "invalid_request_error".to_owned());
    assert_eq!(error(&cancelled), refused);
    let deleted = client.send("DELETE", &path(&batch), String::new()).await;
    assert_eq!(deleted.json()["type"], "message_batch_deleted");
    let gone = (404, "not_found_error".to_owned());
    assert_eq!(error(&client.get(&path(&batch)).await), gone);
    let results = client.get(batch["results_url"].as_str().unwrap()).await;
    assert_eq!(error(&results), gone);
}

#[tokio::test]
async fn an_adapter_that_was_loaded_just_now_is_found_by_a_batch_of_messages() {
    let (cluster, _folder) = start(fast(), |config| {
        // The health checks find nothing in the meantime.
        config.fleet.health.interval = Duration::from_secs(600);
    })
    .await;
    let client = Client::of(&cluster.router);
    load(&cluster.engines[0], "new").await;
    let mut requests = [request("a", 1), request("b", 1)];
    for request in &mut requests {
        request["params"]["model"] = "new".into();
    }
    let created = create(&client, &requests).await;
    let batch = ended(&client, &created).await;
    assert_eq!(batch["request_counts"]["succeeded"], 2, "{batch}");
}

#[tokio::test]
async fn a_batch_of_messages_can_be_cancelled_and_then_deleted() {
    let (cluster, _folder) = start(unhurried(), |_| {}).await;
    let client = Client::of(&cluster.router);
    let requests = [request("a", 30_000), request("b", 30_000)];
    let created = create(&client, &requests).await;
    eventually("requests run", async || {
        cluster.engines[0].stats().await.running > 0
    })
    .await;
    let refused = (400, "invalid_request_error".to_owned());
    let deleted = client.send("DELETE", &path(&created), String::new()).await;
    assert_eq!(error(&deleted), refused);
    let early = client.get(&format!("{}/results", path(&created))).await;
    assert_eq!(error(&early), refused);
    let cancel = format!("{}/cancel", path(&created));
    let cancelled = client.send("POST", &cancel, String::new()).await;
    assert_eq!(cancelled.json()["processing_status"], "canceling");
    let batch = ended(&client, &created).await;
    assert_eq!(batch["request_counts"]["canceled"], 2);
    for result in results(&client, &batch).await {
        assert_eq!(result["result"], json!({"type": "canceled"}));
    }
    let deleted = client.send("DELETE", &path(&batch), String::new()).await;
    assert_eq!(deleted.status, 200);
}

#[tokio::test]
async fn requests_that_are_wrong_create_no_batch() {
    let (cluster, _folder) = fast_cluster().await;
    let client = Client::of(&cluster.router);
    let same = json!({"requests": [request("a", 1), request("a", 1)]});
    for body in ["{}", "no", r#"{"requests":[]}"#, &same.to_string()] {
        let answer = client.send("POST", PATH, body.to_owned()).await;
        let refused = (400, "invalid_request_error".to_owned());
        assert_eq!(error(&answer), refused, "{body}");
    }
    assert_eq!(client.get(PATH).await.json()["data"], json!([]));
    // One of OpenAI's with the same endpoint is another matter.
    let line = chat_line("a", "Hi", 1).replace("/v1/chat/completions", "/v1/messages");
    let file = client.upload(&[line]).await;
    let created = client
        .create(&file, json!({"endpoint": "/v1/messages"}))
        .await;
    assert_eq!(client.ended(&created).await["status"], "completed");
}
