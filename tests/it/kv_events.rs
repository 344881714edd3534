//! What engines tell of their caches, and what becomes of it.

use std::collections::BTreeMap;

use warmroute::sim::worker::Settings;
use warmroute::sim::worker::Truth;
use warmroute::sim::worker::publisher;

use crate::client;
use crate::cluster::Engine;
use crate::cluster::telling;

/// What a rank holds: the copies of each block, by the tokens of its whole path, which mean the same
/// to every engine and to the router.
fn held(truth: &Truth) -> BTreeMap<Vec<u32>, usize> {
    let blocks: BTreeMap<_, _> = truth.held.iter().map(|held| (held.hash, held)).collect();
    let path = |hash| {
        let blocks =
            std::iter::successors(blocks.get(hash), |held| blocks.get(held.parent.as_ref()?));
        let mut path: Vec<u32> = Vec::new();
        // From the end to the start.
        for held in blocks {
            path.splice(..0, held.token_ids.iter().copied());
        }
        path
    };
    let copies = truth.held.iter();
    copies.map(|held| (path(&held.hash), held.copies)).collect()
}

/// Sends an engine a prompt of these tokens, past any router.
async fn read(engine: &Engine, prompt: impl Iterator<Item = u32>) {
    let prompt: Vec<u32> = prompt.collect();
    let body = serde_json::json!({"prompt": prompt, "max_tokens": 1}).to_string();
    let answer = client::post(engine.address, "/v1/completions", body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
}

#[tokio::test]
async fn a_restarted_engine_has_its_ports_again_and_an_empty_cache() {
    let here = Engine::here("w0", telling()).await;
    let child = Engine::child("w1", &telling());
    for mut engine in [here, child] {
        let events = engine.events.clone();
        assert_eq!(events.len(), 1);
        read(&engine, 0..40).await;
        let truth = engine.truth(0).await;
        assert_eq!(truth.last_sequence, Some(0));
        let expected = [16, 32].map(|end| ((0..end).collect::<Vec<u32>>(), 1));
        assert_eq!(held(&truth), BTreeMap::from(expected));
        let settings = telling();
        engine
            .restart(Settings {
                kv: publisher::Settings {
                    first_sequence: 5,
                    ..settings.kv
                },
                ..settings
            })
            .await;
        assert_eq!(engine.events, events);
        assert!(held(&engine.truth(0).await).is_empty());
        read(&engine, 0..16).await;
        assert_eq!(engine.truth(0).await.last_sequence, Some(5));
    }
}
