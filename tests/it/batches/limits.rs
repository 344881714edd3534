//! Limits of tenants, as lines of batches keep to them.

use serde_json::{Value, json};
use warmroute::openai::tenant::TenantSpec;
use warmroute::sim::worker::Settings;

use super::clients::{Client, chat_line, custom_ids};
use super::start;
use crate::cluster::{Cluster, chat, eventually, fast, tenant, unhurried};
use crate::reload::Folder;

const LINES: &str = "warmroute_batch_lines_total";

/// A router with one tenant that has these limits.
async fn limited(engine: Settings, limits: Value) -> (Cluster, Folder, Client) {
    let (cluster, folder) = start(engine, |config| {
        config.tenants = vec![TenantSpec {
            limits: Some(serde_json::from_value(limits).unwrap()),
            ..tenant("a")
        }];
    })
    .await;
    let client = Client::with_key(&cluster.router, "sk-a");
    (cluster, folder, client)
}

async fn ask(client: &Client) -> u16 {
    let body = chat("Hi", 1, false);
    client
        .send("POST", "/v1/chat/completions", body)
        .await
        .status
}

#[tokio::test]
async fn a_tenant_has_so_many_tokens_queued_and_all_its_places_for_other_requests() {
    let limits = json!({"concurrent_requests": 1, "batch_tokens_queued": 70_000});
    let (cluster, _folder, client) = limited(unhurried(), limits).await;
    let long = ["a", "b"].map(|id| chat_line(id, "Go on", 30_000));
    let file = client.upload(&long).await;
    let first = client.create(&file, json!({})).await;
    eventually("both lines run", async || {
        cluster.engines[0].stats().await.running == 2
    })
    .await;
    assert_eq!(ask(&client).await, 200);

    let second = client.create(&file, json!({})).await;
    let batch = client.ended(&second).await;
    assert_eq!(batch["status"], "failed", "{batch}");
    let error = &batch["errors"]["data"][0];
    assert_eq!(error["code"], "token_limit_exceeded");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("Limit 70000, Used 600"), "{message}");
    let bounds = "warmroute_batch_bounds_reached_total";
    let bound = ["bound=\"token_limit_exceeded\""];
    assert_eq!(cluster.metric(bounds, &bound).await, 1.0);
    let small = client.upload(&[chat_line("c", "Hi", 1)]).await;
    let small = client.create(&small, json!({})).await;
    assert_eq!(client.ended(&small).await["status"], "completed");

    client.cancel(&first).await;
    client.ended(&first).await;
    let third = client.create(&file, json!({})).await;
    eventually("there is room again", async || {
        client.batch(&third).await["status"] == "in_progress"
    })
    .await;
}

#[tokio::test]
async fn lines_wait_for_their_day_and_leave_the_minute_to_others() {
    let limits = json!({"batch_tokens_per_day": 500, "requests_per_minute": 1});
    let (cluster, _folder, client) = limited(fast(), limits).await;
    let lines = ["a", "b"].map(|id| chat_line(id, "Go on", 300));
    let file = client.upload(&lines).await;
    let created = client.create(&file, json!({})).await;
    let retries = "warmroute_batch_line_retries_total";
    eventually("one line has run, and one waits", async || {
        cluster.metric(LINES, &["outcome=\"completed\""]).await == 1.0
            && cluster.metric(retries, &["status=\"429\""]).await >= 1.0
    })
    .await;
    assert_eq!(ask(&client).await, 200);
    client.cancel(&created).await;
    let batch = client.ended(&created).await;
    assert_eq!(batch["request_counts"]["completed"], 1, "{batch}");
    let errors = client.results(&batch, "error_file_id").await;
    assert_eq!(errors[0]["error"]["code"], "batch_cancelled");
}

#[tokio::test]
async fn lines_wait_for_the_minute_and_fail_only_if_they_are_too_large_for_it() {
    let limits = json!({
        "requests_per_minute": 60, "input_tokens_per_minute": 12_000, "burst": "1s",
    });
    let (cluster, _folder, client) = limited(fast(), limits).await;
    let mut lines: Vec<String> = (0..3)
        .map(|number| chat_line(&number.to_string(), "Hi", 1))
        .collect();
    lines.push(chat_line("large", &"word ".repeat(4_000), 1));
    let file = client.upload(&lines).await;
    let created = client.create(&file, json!({})).await;
    let batch = client.ended(&created).await;
    let counts = json!({"total": 4, "completed": 3, "failed": 1});
    assert_eq!(batch["request_counts"], counts, "{batch}");
    let errors = client.results(&batch, "error_file_id").await;
    assert_eq!(custom_ids(&errors), ["large"]);
    let response = &errors[0]["response"];
    assert_eq!(response["status_code"], 429);
    assert_eq!(response["body"]["error"]["code"], "rate_limit_exceeded");
    assert_eq!(cluster.metric(LINES, &["outcome=\"failed\""]).await, 1.0);
}

#[tokio::test]
async fn a_line_for_a_model_that_the_tenant_may_not_use_is_named() {
    let engine = Settings {
        models: ["sim", "secret"].map(str::to_owned).into(),
        ..fast()
    };
    let (_cluster, _folder, client) = limited(engine, json!({"models": ["sim"]})).await;
    let secret = chat_line("b", "Hi", 1).replace("\"sim\"", "\"secret\"");
    let file = client.upload(&[chat_line("a", "Hi", 1), secret]).await;
    let created = client.create(&file, json!({})).await;
    let batch = client.ended(&created).await;
    let error = &batch["errors"]["data"][0];
    assert_eq!(
        (&error["code"], &error["line"]),
        (&json!("model_not_found"), &json!(2))
    );
}
