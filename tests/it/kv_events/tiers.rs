//! Blocks below the GPU's memory, and trees that are not whole.

use serde_json::json;
use warmroute::sim::fault::Faults;
use warmroute::sim::fault::kv::KvFaults;
use warmroute::sim::worker::Settings;
use xxhash_rust::xxh3::xxh3_64;

use super::followed::{Followed, Prompt, Wire, explained, held, scored};
use crate::cluster::{Engine, eventually, telling};

fn in_medium(medium: &str) -> Faults {
    Faults {
        kv: KvFaults {
            medium: Some(medium.to_owned()),
            ..KvFaults::default()
        },
        ..Faults::default()
    }
}

#[tokio::test]
async fn a_holder_below_the_gpu_loses_to_one_in_it_and_wins_against_none() {
    let followed = Followed::start(Wire::Zmq, vec![telling(); 3]).await;
    followed.engine(0).fault(in_medium("STORAGE")).await;
    followed.engine(1).fault(in_medium("CPU")).await;
    let (all, lower) = (Prompt::new(1, 200), Prompt::new(2, 200));
    for place in 0..3 {
        all.to(followed.engine(place)).await;
    }
    lower.to(followed.engine(0)).await;
    lower.to(followed.engine(1)).await;
    for (place, tier, blocks) in [(0, "disk", 24), (1, "cpu", 24), (2, "gpu", 12)] {
        followed
            .shows(place, 0, &format!("blocks/{tier}"), blocks)
            .await;
    }
    let page = explained(&followed.cluster, &all).await;
    assert_eq!(page["chosen"], "w2", "{page:#}");
    let rows = page["workers"].as_array().unwrap();
    let cached = |gpu, cpu, disk| json!({"gpu": gpu, "cpu": cpu, "disk": disk});
    let expected = [
        (cached(0, 0, 192), 124),
        (cached(0, 192, 0), 47),
        (cached(192, 0, 0), 8),
    ];
    for (row, (cached, new_tokens)) in rows.iter().zip(expected) {
        assert_eq!(row["cached"], cached, "{row:#}");
        assert_eq!(row["trees"][0]["cached"], cached, "{row:#}");
        assert_eq!(row["cached_tokens"], 192, "{row:#}");
        assert_eq!(row["new_tokens"], new_tokens, "{row:#}");
    }
    let page = explained(&followed.cluster, &lower).await;
    assert_eq!(page["chosen"], "w1", "{page:#}");
    let why = page["explanation"].as_str().unwrap();
    let expected =
        "longest cached prefix: 192 of 200 prompt tokens are cached (GPU 0, CPU 192, disk 0)";
    // Then the cost's terms, by what was learnt so far.
    let rest = why.strip_prefix(expected).expect(why);
    assert!(rest.is_empty() || rest.starts_with("; "), "{why}");
}

#[tokio::test]
async fn a_tree_that_is_not_proved_counts_for_nothing_and_explain_says_so() {
    let followed = Followed::start(Wire::Zmq, vec![telling(); 2]).await;
    let prompt = Prompt::new(1, 200);
    prompt.to(followed.engine(0)).await;
    followed.equals(0, 0).await;
    let page = explained(&followed.cluster, &prompt).await;
    let tree = &page["workers"][0]["trees"][0];
    assert_eq!(
        (&tree["state"], &tree["scores"]),
        (&json!("live"), &json!(true))
    );
    assert_eq!(tree["cached"]["gpu"], 192);
    assert_eq!(page["chosen"], "w0", "{page:#}");
    assert_eq!(page["reason"], "longest_prefix");
    let silent = Faults {
        kv: KvFaults {
            silent: true,
            cut: true,
            ..KvFaults::default()
        },
        ..Faults::default()
    };
    followed.engine(0).fault(silent).await;
    followed.shows(0, 0, "state", "stale").await;
    let page = explained(&followed.cluster, &prompt).await;
    let row = &page["workers"][0];
    let tree = &row["trees"][0];
    assert_eq!(
        (&tree["state"], &tree["scores"]),
        (&json!("stale"), &json!(false))
    );
    assert_eq!(row["cached_tokens"], 0, "{row:#}");
    assert_eq!(row["known_by"], "exact", "{row:#}");
    assert_eq!(page["reason"], "cold", "{page:#}");
    assert_eq!(page["excluded"], json!([]));
}

/// An engine whose first batches are gone, and a router that comes late.
async fn late(asks: bool, settings: Settings) -> Followed {
    let engine = Engine::here("w0", settings).await;
    for family in 1..4 {
        Prompt::new(family, 200).to(&engine).await;
    }
    let forgets = Faults {
        kv: KvFaults {
            replay_last: Some(1),
            ..KvFaults::default()
        },
        ..Faults::default()
    };
    engine.fault(forgets).await;
    let followed = Followed::of(Wire::Zmq, vec![engine], |config| {
        config.routing.advanced.request_cache_reports = asks;
    })
    .await;
    Prompt::new(4, 200).to(followed.engine(0)).await;
    followed.shows(0, 0, "state", "partial").await;
    followed
}

/// Whether the last request came with the question in it; else it is the client's own, to the byte.
async fn was_asked(followed: &Followed, prompt: &Prompt) -> bool {
    let sent = followed.engine(0).last_post().await;
    let own = prompt.body();
    let asking = own.replacen('{', r#"{"vllm_xargs":{"kv_cache_report_mode":"full"},"#, 1);
    let hash = |body: &str| format!("{:016x}", xxh3_64(body.as_bytes()));
    let was_asked = sent.body_xxh3 == hash(&asking);
    assert!(was_asked || sent.body_xxh3 == hash(&own), "{sent:?}");
    was_asked
}

#[tokio::test]
async fn an_engine_that_is_known_in_part_is_asked_to_tell_again() {
    let followed = late(true, telling()).await;
    let prompt = Prompt::new(1, 250);
    assert_eq!(followed.explain(&prompt).await[0].tokens, 0);
    followed.post(&prompt).await;
    eventually("what it held before is known", async || {
        // Not only what is expected of the request itself.
        explained(&followed.cluster, &prompt).await["workers"][0]["trees"][0]["cached"]["gpu"]
            == 240
    })
    .await;
    assert!(was_asked(&followed, &prompt).await);
    // There is nothing more to tell of it, so nothing is asked.
    followed.post(&prompt).await;
    assert!(!was_asked(&followed, &prompt).await);
    let counted = ["model=\"sim\"", "outcome=\"asked\""];
    let metric = "warmroute_kv_report_requests_total";
    assert_eq!(followed.cluster.metric(metric, &counted).await, 1.0);
}

#[tokio::test]
async fn nothing_is_asked_unless_it_is_set() {
    let followed = late(false, telling()).await;
    let prompt = Prompt::new(1, 250);
    followed.post(&prompt).await;
    assert!(!was_asked(&followed, &prompt).await);
}

#[tokio::test]
async fn an_engine_that_does_not_take_it_gets_the_clients_own_request_and_is_not_asked_again() {
    let followed = late(true, telling()).await;
    let faults = Faults {
        refuse_xargs: true,
        ..Faults::default()
    };
    followed.engine(0).fault(faults).await;
    for family in 1..3 {
        followed.post(&Prompt::new(family, 250)).await;
    }
    let counted = ["model=\"sim\"", "outcome=\"refused\""];
    let metric = "warmroute_kv_report_requests_total";
    assert_eq!(followed.cluster.metric(metric, &counted).await, 1.0);
    // What is wrong with the client's own is answered as the engine answers it.
    let body = json!({"model": "sim", "prompt": vec![7; 100], "max_tokens": 0});
    let answer = followed
        .cluster
        .post("/v1/completions", body.to_string())
        .await;
    assert_eq!(answer.status, 400, "{}", answer.text());
}

/// A re-report is no further copy: what is evicted later is not believed to be there.
#[tokio::test]
async fn what_was_told_again_is_forgotten_with_its_first_removal() {
    let followed = late(true, super::followed::small(telling())).await;
    for family in [1, 2, 3] {
        followed.post(&Prompt::new(family, 250)).await;
        followed.post(&Prompt::new(family, 250)).await;
    }
    // Room for 1,024 tokens.
    for family in 10..20 {
        followed.post(&Prompt::new(family, 300)).await;
    }
    eventually("nothing is believed that is gone", async || {
        let truth = held(&followed.engine(0).cache_contents(0).await);
        let scored = scored(&followed.cluster, "w0", 0).await;
        // How many copies there are of some is not known.
        scored.is_some_and(|scored| scored.keys().all(|name| truth.contains_key(name)))
    })
    .await;
}
