//! Blocks below the GPU's memory, and trees that do not count.

use serde_json::json;
use warmroute::sim::fault::Faults;
use warmroute::sim::fault::kv::KvFaults;

use super::followed::{Followed, Prompt, Wire, explained};
use crate::cluster::telling;

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
