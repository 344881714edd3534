//! Several replicas over workers without KV events: each knows what the others routed.

use serde_json::Value;
use tokio::net::TcpListener;
use warmroute::peers::settings::PeerDiscovery;

use crate::client;
use crate::cluster::{Cluster, Engine, Router, chat, eventually, fast};
use crate::peers::{are_connected, fleet_page, replica};

/// A prompt that starts as no other does.
fn prompt(number: usize) -> String {
    chat(
        &format!("{number} is where this starts. ").repeat(40),
        2,
        false,
    )
}

async fn explain(router: &Router, body: &str) -> Value {
    client::post(router.admin, "/explain", body.to_owned())
        .await
        .json()
}

async fn has_workers(router: &Router, count: usize) {
    eventually("all workers are up", async || {
        let explained = explain(router, &prompt(0)).await;
        explained["workers"]
            .as_array()
            .is_some_and(|workers| workers.len() == count)
    })
    .await;
}

#[tokio::test]
async fn a_prompt_that_one_replica_routed_is_followed_by_the_other_to_its_worker() {
    let engines = Cluster::engines_here(vec![fast(); 4]).await;
    let first = Router::here(&replica(&engines, &[])).await;
    let second = Router::here(&replica(&engines, &[&first])).await;
    are_connected(&[&first, &second]).await;
    for router in [&first, &second] {
        has_workers(router, 4).await;
    }
    for number in 0..8 {
        let body = prompt(number);
        let (one, other) = match number % 2 {
            0 => (&first, &second),
            _ => (&second, &first),
        };
        assert_eq!(explain(other, &body).await["reason"], "cold");
        let answer = client::post(one.api, "/v1/chat/completions", body.clone()).await;
        assert_eq!(answer.status, 200);
        let own = explain(one, &body).await;
        assert_eq!(own["reason"], "longest_prefix");
        eventually("the other replica knows of it", async || {
            let explained = explain(other, &body).await;
            explained["reason"] == "longest_prefix" && explained["chosen"] == own["chosen"]
        })
        .await;
        let engine = engines
            .iter()
            .find(|engine| own["chosen"] == engine.name)
            .unwrap();
        let before = engine.cached_tokens();
        client::post(other.api, "/v1/chat/completions", body).await;
        assert!(engine.cached_tokens() > before);
    }
}

#[tokio::test]
async fn a_worker_that_was_restarted_is_forgotten_by_all_replicas() {
    let mut engines = vec![Engine::child("w0", &fast())];
    let first = Router::here(&replica(&engines, &[])).await;
    let second = Router::here(&replica(&engines, &[&first])).await;
    are_connected(&[&first, &second]).await;
    let body = prompt(1);
    let answer = client::post(first.api, "/v1/chat/completions", body.clone()).await;
    assert_eq!(answer.status, 200);
    let is_everywhere = async |reason: &str| {
        for router in [&first, &second] {
            eventually(&format!("the reason is {reason}"), async || {
                explain(router, &body).await["reason"] == reason
            })
            .await;
        }
    };
    is_everywhere("longest_prefix").await;
    engines[0].restart(fast()).await;
    is_everywhere("cold").await;
}

#[tokio::test]
async fn replicas_that_hear_of_no_other_send_prompts_with_the_same_start_to_the_same_worker() {
    // It accepts connections and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent_address = silent.local_addr().unwrap().to_string();
    let engines = Cluster::engines_here(vec![fast(); 4]).await;
    let mut config = replica(&engines, &[]);
    let source = PeerDiscovery::Static(vec![silent_address]);
    config.peers.discovery.push(source);
    let replicas = [Router::here(&config).await, Router::here(&config).await];
    for router in &replicas {
        eventually("the replica is alone", async || {
            fleet_page(router).await["replica"]["is_alone"] == true
        })
        .await;
        has_workers(router, 4).await;
    }
    let mut hashed = 0;
    for number in 0..20 {
        let body = prompt(number);
        let chosen = [
            explain(&replicas[0], &body).await,
            explain(&replicas[1], &body).await,
        ];
        assert_eq!(chosen[0]["chosen"], chosen[1]["chosen"]);
        hashed += usize::from(chosen[0]["reason"] == "prefix_hash");
    }
    // The other prompts are those whose preferred worker was drawn as the cheapest one.
    assert!(hashed > 3, "{hashed}");
}
