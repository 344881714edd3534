//! An engine that goes on serving, and whose KV events stop without an end of their connection.

use std::time::Duration;

use warmroute::config::Config;
use warmroute::sim::fault::Faults;
use warmroute::sim::fault::kv::KvFaults;

use super::followed::{Followed, Prompt, Wire};
use crate::cluster::{Engine, eventually, telling};

/// So that silence need not be waited for.
fn soon(config: &mut Config) {
    let check = &mut config.kv_events.advanced.tokenizer_check;
    check.grace_period = Duration::from_millis(100);
    check.silence_grace = Duration::from_millis(300);
}

fn silent(silent: bool) -> Faults {
    let kv = KvFaults {
        silent,
        ..KvFaults::default()
    };
    Faults {
        kv,
        ..Faults::default()
    }
}

async fn known_by(followed: &Followed, prompt: &Prompt) -> String {
    followed.explain(prompt).await[0].known_by.to_string()
}

async fn counts(followed: &Followed, ranks: f64) {
    eventually(&format!("{ranks} ranks are silent"), async || {
        let metric = followed.cluster.metric("warmroute_kv_silent_ranks", &[]);
        metric.await == ranks
    })
    .await;
}

#[tokio::test]
async fn a_worker_whose_events_stopped_is_predicted_until_its_next_event() {
    let engine = Engine::here("w0", telling()).await;
    let followed = Followed::of(Wire::Zmq, vec![engine], soon).await;
    let prompt = Prompt::new(1, 100);
    followed.post(&prompt).await;
    followed.equals(0, 0).await;
    assert_eq!(known_by(&followed, &prompt).await, "exact");

    followed.engine(0).fault(silent(true)).await;
    let mut family = 10;
    eventually("the worker is predicted", async || {
        family += 1;
        followed.post(&Prompt::new(family, 100)).await;
        known_by(&followed, &prompt).await == "predicted"
    })
    .await;
    counts(&followed, 1.0).await;
    // What is sent meanwhile is predicted to be there.
    let last = Prompt::new(family, 100);
    followed.post(&last).await;
    let rows = followed.explain(&last).await;
    assert!(rows[0].tokens > 0, "{rows:?}");

    followed.engine(0).fault(silent(false)).await;
    eventually("events are believed again", async || {
        family += 1;
        followed.post(&Prompt::new(family, 100)).await;
        known_by(&followed, &prompt).await == "exact"
    })
    .await;
    counts(&followed, 0.0).await;
}
