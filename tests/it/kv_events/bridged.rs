//! A bridge that is killed, one that several routers follow, and a router that comes late to it.

use super::followed::{Bridge, Followed, Prompt, Wire, held, quick, scored, small};
use crate::client;
use crate::cluster::{Cluster, Engine, Router, eventually, telling};

fn prompts(families: std::ops::Range<u32>) -> impl Iterator<Item = Prompt> {
    families.map(|family| Prompt::new(family, 30 + family % 7 * 40))
}

/// Another router that follows the same engine over the same bridge.
async fn another(bridge: &Bridge, engine: &Engine) -> Cluster {
    let mut config = quick();
    config.workers = vec![bridge.listed(engine)];
    let router = Router::here(&config).await;
    let engines = Vec::new();
    let cluster = Cluster { engines, router };
    cluster.is_worker("w0", "health", "up").await;
    cluster
}

async fn equals(cluster: &Cluster, engine: &Engine) {
    eventually(
        "the other router's tree is the engine's cache",
        async || {
            let scored = scored(cluster, "w0", 0).await;
            scored == Some(held(&engine.cache_contents(0).await))
        },
    )
    .await;
}

#[tokio::test]
async fn a_bridge_that_is_killed_is_followed_again() {
    let mut followed = Followed::start(Wire::Bridge, vec![small(telling())]).await;
    for prompt in prompts(0..20) {
        prompt.to(followed.engine(0)).await;
    }
    followed.equals(0, 0).await;
    let incarnation = followed.status(0, 0).await["incarnation"].clone();
    for round in 1..=3 {
        followed.bridges[0].kill();
        followed.shows(0, 0, "connected", false).await;
        // These reach no router until the bridge is back.
        for prompt in prompts(round * 20..round * 20 + 10) {
            prompt.to(followed.engine(0)).await;
        }
        assert_eq!(scored(&followed.cluster, "w0", 0).await, None);
        followed.bridges[0].restart().await;
        followed.equals(0, 0).await;
        // The new bridge asked the engine for all from its first batch on.
        followed.shows(0, 0, "state", "live").await;
        for prompt in prompts(round * 20 + 10..round * 20 + 20) {
            prompt.to(followed.engine(0)).await;
        }
        followed.equals(0, 0).await;
    }
    assert_ne!(followed.status(0, 0).await["incarnation"], incarnation);
}

#[tokio::test]
async fn routers_on_one_bridge_believe_the_same() {
    let followed = Followed::start(Wire::Bridge, vec![small(telling())]).await;
    let other = another(&followed.bridges[0], followed.engine(0)).await;
    for prompt in prompts(0..30) {
        let body = prompt.body();
        let answer = client::post(other.router.api, "/v1/completions", body).await;
        assert_eq!(answer.status, 200);
        followed.post(&prompt).await;
    }
    followed.equals(0, 0).await;
    equals(&other, followed.engine(0)).await;
    let lost = followed.status(0, 0).await["disconnect_reason"].clone();
    // One that goes leaves the other alone.
    drop(other);
    for prompt in prompts(30..40) {
        prompt.to(followed.engine(0)).await;
    }
    followed.equals(0, 0).await;
    let status = followed.status(0, 0).await;
    assert_eq!(status["state"], "live");
    assert_eq!(status["disconnect_reason"], lost);
    assert_eq!(status["connected"], true);
}

#[tokio::test]
async fn a_router_that_comes_late_to_a_bridge_is_told_all_at_once() {
    let followed = Followed::start(Wire::Bridge, vec![small(telling())]).await;
    for prompt in prompts(0..60) {
        prompt.to(followed.engine(0)).await;
    }
    followed.equals(0, 0).await;
    let late = another(&followed.bridges[0], followed.engine(0)).await;
    let mut believed = None;
    eventually("the late one believes something", async || {
        believed = scored(&late, "w0", 0).await;
        believed.is_some()
    })
    .await;
    // Not what was held when the list was made.
    assert_eq!(
        believed,
        Some(held(&followed.engine(0).cache_contents(0).await))
    );
    let status = super::followed::status(&late, "w0", 0).await;
    assert_eq!(status["state"], "live", "{status:#}");
    assert_eq!(status["reason"], "snapshot", "{status:#}");
    // Not by all that ever was.
    let first = followed.status(0, 0).await;
    let batches = |status: &serde_json::Value| status["batches"].as_u64().unwrap();
    assert!(batches(&status) < batches(&first) / 2, "{status:#}");
    for prompt in prompts(60..80) {
        prompt.to(followed.engine(0)).await;
    }
    followed.equals(0, 0).await;
    equals(&late, followed.engine(0)).await;
}
