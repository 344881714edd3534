//! Lines of batches give way to people.

use std::num::NonZeroU32;

use serde_json::json;
use tokio::task::JoinSet;
use warmroute::sim::worker::Settings;

use super::clients::{Client, chat_line, custom_ids};
use super::start;
use crate::cluster::{eventually, fast};

const SLOTS: NonZeroU32 = NonZeroU32::new(4).unwrap();

/// Each line is longer than what people ask for, and there is a slot for each of these once no line has one.
#[tokio::test]
async fn lines_give_way_to_people_and_have_their_results_later() {
    let engine = Settings {
        decode_ms: 5,
        running_max: SLOTS,
        ..fast()
    };
    let (cluster, _folder) = start(engine, |config| config.workers[0].slots = Some(SLOTS)).await;
    let client = Client::of(&cluster.router);
    cluster.engines[0].hold_after(3).await;
    let lines = ["a", "b", "c"].map(|id| chat_line(id, "Go on", 100));
    let file = client.upload(&lines).await;
    let batch = client.create(&file, json!({})).await;
    eventually("a slot is left free", async || {
        cluster.engines[0].stats().await.running == 3
    })
    .await;
    let mut people = JoinSet::new();
    for number in 0..SLOTS.get() {
        let client = client.clone();
        let body = json!({"model": "sim", "prompt": format!("{number}: hi"), "max_tokens": 40});
        let body = body.to_string();
        people.spawn(async move { client.send("POST", "/v1/completions", body).await });
    }
    let all_lines = 3.0;
    eventually("the lines give way", async || {
        let gave_way = "warmroute_batch_lines_gave_way_total";
        cluster.metric(gave_way, &[]).await >= all_lines
    })
    .await;
    // Only lines are chats.
    let ended = ["api=\"chat\"", "outcome=\"complete\""];
    let answers = cluster.metric("warmroute_requests_total", &ended).await;
    assert_eq!(answers, 0.0, "no line had to end for that");
    cluster.engines[0].let_go().await;
    while let Some(answer) = people.join_next().await {
        assert_eq!(answer.unwrap().status, 200);
    }
    let batch = client.ended(&batch).await;
    assert_eq!(batch["status"], "completed", "{batch}");
    let results = client.results(&batch, "output_file_id").await;
    assert_eq!(custom_ids(&results), ["a", "b", "c"]);
    for result in &results {
        let usage = &result["response"]["body"]["usage"];
        assert_eq!(usage["completion_tokens"], 100, "{result}");
    }
}
