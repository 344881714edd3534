//! The ends of batches at an endpoint of webhooks.

use serde_json::json;

use super::clients::{Client, chat_line};
use super::start;
use crate::cluster::{eventually, fast};
use crate::webhooks::receiver::{Receiver, Reply};
use crate::webhooks::{KEY, endpoint, quick, received};

#[tokio::test]
async fn every_end_of_a_batch_is_one_signed_event() {
    let receiver = Receiver::start(Reply::Status(204)).await;
    let (cluster, _folder) = start(fast(), |config| {
        quick(config);
        config.webhooks.endpoints = vec![endpoint("hook", &receiver.url())];
    })
    .await;
    let client = Client::of(&cluster.router);
    for (count, line, status, at) in [
        (1, chat_line("a", "Hi", 2), "completed", "completed_at"),
        (2, "not JSON".to_owned(), "failed", "failed_at"),
    ] {
        let file = client.upload(&[line]).await;
        let created = client.create(&file, json!({})).await;
        let batch = client.ended(&created).await;
        assert_eq!(batch["status"], status, "{batch}");
        let event = received(&receiver, count).await.remove(count - 1);
        assert!(event.is_signed_by(KEY));
        let expected = json!({
            "id": event.id(),
            "object": "event",
            "created_at": batch[at],
            "type": format!("batch.{status}"),
            "data": {"id": batch["id"]},
        });
        assert_eq!(event.json(), expected);
    }
    let delivered = "warmroute_webhook_events_total";
    eventually("both are settled", async || {
        cluster.metric(delivered, &["outcome=\"delivered\""]).await == 2.0
    })
    .await;
    assert_eq!(receiver.received().len(), 2);
}
