//! What routing makes of it where the events alone do not tell.

use warmroute::fleet::events;
use warmroute::sim::worker::Settings;

use super::followed::{Followed, Prompt, Wire};
use crate::cluster::{Engine, eventually, telling};

/// Blocks are published when they are computed; a burst of siblings comes before that.
#[tokio::test]
async fn a_sibling_goes_where_the_prompt_is_being_computed() {
    let slow = Settings {
        prefill_tokens_per_second: 400.try_into().unwrap(),
        ..telling()
    };
    let engines = vec![
        Engine::here("w0", slow.clone()).await,
        Engine::here("w1", slow).await,
    ];
    let followed = Followed::of(Wire::Zmq, engines, |_| {}).await;
    // Of an engine that has published nothing yet, the size of its blocks is not known.
    for place in 0..2 {
        Prompt::new(2, 32).to(followed.engine(place)).await;
        followed.equals(place, 0).await;
        followed.shows(place, 0, "stored_blocks", 2).await;
    }
    let prompt = Prompt::new(1, 1_600);
    let (first, known) = tokio::join!(followed.post(&prompt), async {
        let mut known = Vec::new();
        eventually("a worker is to get the prompt", async || {
            known = followed.explain(&prompt).await;
            known.iter().any(|row| row.tokens > 0)
        })
        .await;
        // Neither has published any block of it.
        for place in 0..2 {
            assert_eq!(followed.status(place, 0).await["stored_blocks"], 2);
        }
        known
    });
    for row in known {
        assert_eq!(row.tokens > 0, row.worker == first.worker, "{row:?}");
        assert_eq!(
            row.known_by,
            if row.tokens > 0 {
                "unconfirmed"
            } else {
                "exact"
            }
        );
    }
    // Its answer has come, so the prompt is computed and published.
    let place = usize::from(first.worker == "w1");
    followed.equals(place, 0).await;
    let again = followed.post(&prompt).await;
    assert_eq!(
        (again.worker, again.reason),
        (first.worker, "longest_prefix".to_owned())
    );
}

/// A port that a firewall closes must not make a worker cold for ever.
#[tokio::test]
async fn a_worker_whose_events_cannot_be_reached_is_predicted() {
    let engines = vec![
        Engine::here("w0", telling()).await,
        Engine::here("w1", telling()).await,
    ];
    let followed = Followed::of(Wire::Zmq, engines, |config| {
        for worker in &mut config.workers {
            worker.events = Some(events::EventsSpec {
                endpoint: "tcp://127.0.0.1:1".to_owned(),
                ..worker.events.clone().unwrap_or_default()
            });
        }
    })
    .await;
    for worker in 0..2 {
        // Until it was tried, nothing is known of the endpoint.
        eventually("the endpoint is refused", async || {
            let status = followed.status(worker, 0).await;
            let lost = status["disconnect_reason"].as_str().unwrap_or_default();
            lost.contains("refused")
        })
        .await;
        followed.shows(worker, 0, "state", "cold").await;
    }
    let prompt = Prompt::new(1, 320);
    let first = followed.post(&prompt).await;
    for row in followed.explain(&prompt).await {
        assert_eq!(row.known_by, "predicted");
        assert_eq!(row.tokens > 0, row.worker == first.worker, "{row:?}");
    }
    // Where they can be reached, they count.
    let followed = Followed::start(Wire::Zmq, vec![telling()]).await;
    followed.shows(0, 0, "connected", true).await;
    followed.post(&prompt).await;
    followed.equals(0, 0).await;
    assert_eq!(followed.explain(&prompt).await[0].known_by, "exact");
}
