//! Whether the router notices by itself that an engine has other tokens than it.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::Value;
use warmroute::config::Config;
use warmroute::sim::fault::Faults;
use warmroute::sim::fault::kv::KvFaults;

use super::followed::{Followed, Prompt, Row, Wire, explained, small};
use crate::cluster::{Engine, eventually, telling};
use crate::patience::scaled;

/// An engine that reads other tokens, from one of a prompt on.
fn other_tokens(from: usize) -> Faults {
    Faults {
        other_tokens_from: Some(from),
        ..Faults::default()
    }
}

/// So that a check need not be waited for. Events may come late on a busy machine, and late ones look like other tokens.
fn soon(config: &mut Config) {
    config.kv_events.advanced.tokenizer_check.grace_period = scaled(Duration::from_secs(1));
    config.kv_events.advanced.tokenizer_check.mismatch_threshold = 6;
    config.kv_events.advanced.tokenizer_check.match_threshold = 3;
}

async fn followed(engines: usize) -> Followed {
    let mut started = Vec::new();
    for place in 0..engines {
        started.push(Engine::here(&format!("w{place}"), telling()).await);
    }
    let followed = Followed::of(Wire::Zmq, started, soon).await;
    for place in 0..engines {
        // Of an engine that has published nothing yet, the size of its blocks is not known.
        Prompt::new(90, 32).to(followed.engine(place)).await;
        followed.equals(place, 0).await;
    }
    followed
}

/// What `/kv` says of the model; null before anything was checked.
async fn parity(followed: &Followed) -> Value {
    let page = followed.cluster.admin("/kv").await.json();
    let mut rows = page["tokenizer_check"].as_array().unwrap().iter();
    rows.find(|row| row["model"] == "sim")
        .cloned()
        .unwrap_or_default()
}

/// What `/kv` says of the model once the blocks of this many requests were looked for.
async fn checked(followed: &Followed, count: u64) -> Value {
    let mut report = Value::Null;
    eventually(&format!("{count} checks have ended"), async || {
        report = parity(followed).await;
        let counts = report["checks"].as_object().into_iter().flatten();
        let ended: u64 = counts.map(|(_, ended)| ended.as_u64().unwrap()).sum();
        ended >= count
    })
    .await;
    report
}

async fn alarm(followed: &Followed) -> f64 {
    let labels = ["model=\"sim\""];
    let metric = "warmroute_tokenizer_mismatch";
    followed.cluster.metric(metric, &labels).await
}

#[tokio::test]
async fn an_engine_with_other_tokens_is_noticed_and_believed_again_when_it_agrees() {
    let followed = followed(2).await;
    let mut sent = 0;
    let mut report = Value::Null;
    // Of blocks that are there already, and of new ones. A check while a tree is verified says nothing.
    while report["checks"]["confirmed"].as_u64() < Some(5) {
        assert!(sent < 50, "{report:#}");
        for family in [1, 1, 1, 2, 3] {
            followed.post(&Prompt::new(family, 100)).await;
            sent += 1;
        }
        report = checked(&followed, sent).await;
    }
    let confirmed = report["checks"]["confirmed"].clone();
    assert_eq!(report["confirmed_ratio"], 1.0);
    assert_eq!(alarm(&followed).await, 0.0);

    for place in 0..2 {
        followed.engine(place).fault(other_tokens(40)).await;
    }
    // An engine's tokens are recorded from its first miss on.
    let mut family = 10;
    while report["mismatch"] != true || report["difference"]["token"] != 40 {
        let mut asked = BTreeSet::new();
        // An engine that is asked for none of them is still believed.
        while asked.len() < 2 {
            family += 1;
            assert!(family < 60, "only {asked:?} is asked: {report:#}");
            asked.insert(followed.post(&Prompt::new(family, 100)).await.worker);
            sent += 1;
        }
        report = checked(&followed, sent).await;
    }
    let checks = &report["checks"];
    assert!(checks["partial"].as_u64() >= Some(6), "{report:#}");
    assert_eq!(checks["missing"], 0, "{report:#}");
    assert_eq!(checks["confirmed"], confirmed, "{report:#}");
    let difference = &report["difference"];
    assert_eq!(difference["block"], 2, "{report:#}");
    assert_eq!(difference["token"], 40, "{report:#}");
    let at = |of: &str| difference[of][12].as_u64().unwrap();
    assert_eq!(at("engine_tokens"), at("router_tokens") + 1, "{report:#}");
    assert_eq!(alarm(&followed).await, 1.0);
    let (wrong, right) = (Prompt::new(11, 100), Prompt::new(1, 100));
    for prompt in [&wrong, &right] {
        for row in followed.explain(prompt).await {
            assert_eq!(row.known_by, "predicted", "{row:?}");
        }
    }
    // What is sent from now on is the best that is known.
    let first = followed.post(&wrong).await;
    assert_eq!(first.reason, "cold");
    let rows = followed.explain(&wrong).await;
    let decided = followed.post(&wrong).await;
    let held = |row: &Row| row.worker == decided.worker && row.tokens > 0;
    assert!(rows.iter().any(held), "{rows:?} {decided:?}");
    assert_eq!(decided.reason, "longest_prefix");
    let page = explained(&followed.cluster, &wrong).await;
    let why = page["explanation"].as_str().unwrap();
    assert!(why.contains("tokens differ"), "{why}");
    assert_eq!(page["workers"][0]["is_trusted"], false);

    for place in 0..2 {
        followed.engine(place).fault(Faults::default()).await;
    }
    family = 60;
    eventually("they count again", async || {
        family += 1;
        followed.post(&Prompt::new(family, 100)).await;
        let report = parity(&followed).await;
        report["mismatch"] == false && report["difference"] == Value::Null
    })
    .await;
    assert_eq!(alarm(&followed).await, 0.0);
    eventually("every worker counts", async || {
        family += 1;
        followed.post(&Prompt::new(family, 100)).await;
        let rows = followed.explain(&right).await;
        rows.iter().all(|row| row.known_by == "exact")
    })
    .await;
}

#[tokio::test]
async fn one_engine_of_two_that_differs_is_believed_no_more_and_the_other_is() {
    let followed = followed(2).await;
    followed.engine(1).fault(other_tokens(0)).await;
    let mut family = 1;
    eventually("the one that differs is found", async || {
        family += 1;
        followed.post(&Prompt::new(family, 64)).await;
        let report = parity(&followed).await;
        let rows = report["workers"].as_array().cloned().unwrap_or_default();
        let mut rows = rows.iter();
        rows.any(|row| row["worker"] == "w1" && row["is_trusted"] == false)
    })
    .await;
    let report = parity(&followed).await;
    assert_eq!(report["mismatch"], false, "{report:#}");
    let rows = followed.explain(&Prompt::new(1, 64)).await;
    let known_by: Vec<&str> = rows.iter().map(|row| &*row.known_by).collect();
    assert_eq!(known_by, ["exact", "predicted"]);
    // An engine's tokens are recorded from the first miss on, which several checks at a time may be.
    eventually("the engine's tokens are shown", async || {
        family += 1;
        followed.post(&Prompt::new(family, 64)).await;
        let report = parity(&followed).await;
        let tokens = report["difference"]["engine_tokens"].as_array();
        tokens.is_some_and(|tokens| tokens.len() > 1)
    })
    .await;
}

/// Refused requests, a cache that is too small for what is sent, and lost events are no evidence.
#[tokio::test]
async fn an_engine_that_agrees_is_not_suspected_whatever_happens_to_it() {
    let settings = small(telling());
    let engine = Engine::here("w0", settings).await;
    // Longer than it takes to send twenty requests whose events are lost, and the one whose event shows it.
    let later = |config: &mut Config| {
        soon(config);
        config.kv_events.advanced.tokenizer_check.grace_period = scaled(Duration::from_secs(4));
    };
    let followed = Followed::of(Wire::Zmq, vec![engine], later).await;
    let engine = followed.engine(0);
    Prompt::new(90, 32).to(engine).await;
    followed.equals(0, 0).await;
    // The cache has room for 1,024 tokens.
    for family in 0..40 {
        followed.post(&Prompt::new(family, 800)).await;
    }
    let refused = Faults {
        refuse: Some(400),
        ..Faults::default()
    };
    engine.fault(refused).await;
    for family in 40..60 {
        let body = Prompt::new(family, 100).body();
        let answer = followed.cluster.post("/v1/completions", body).await;
        assert_eq!(answer.status, 400);
    }
    let lost = Faults {
        kv: KvFaults {
            lose_next: 1_000,
            lose_for_good: true,
            ..KvFaults::default()
        },
        ..Faults::default()
    };
    engine.fault(lost).await;
    for family in 60..80 {
        followed.post(&Prompt::new(family, 100)).await;
    }
    // Lost batches show with the next one that comes.
    engine.fault(Faults::default()).await;
    engine.reset().await;
    followed.post(&Prompt::new(91, 100)).await;
    followed.equals(0, 0).await;
    let last = checked(&followed, 40).await;
    assert_eq!(last["mismatch"], false, "{last:#}");
    assert!(last["checks"]["confirmed"].as_u64() > Some(0), "{last:#}");
}

/// As engines do between the steps of a training: what was sent is looked for when it is gone.
#[tokio::test]
async fn a_cache_that_is_reset_after_requests_is_no_evidence() {
    let followed = followed(1).await;
    for round in 0..4 {
        for family in 0..8 {
            followed
                .post(&Prompt::new(100 + 8 * round + family, 100))
                .await;
        }
        followed.engine(0).reset().await;
        // It is reported with what comes next.
        followed.post(&Prompt::new(200 + round, 100)).await;
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    let last = checked(&followed, 36).await;
    assert_eq!(last["checks"]["missing"], 0, "{last:#}");
    assert_eq!(last["mismatch"], false, "{last:#}");
}
