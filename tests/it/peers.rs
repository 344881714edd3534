//! Several replicas over one fleet: each routes with the load of all.

use std::time::{Duration, Instant};

use serde_json::Value;
use warmroute::config::Config;
use warmroute::peers::settings::PeerDiscovery;
use warmroute::responses::Mode;

use crate::client;
use crate::cluster::{Engine, Router, chat, config, eventually, unhurried, within};

/// A replica of a fleet.
pub(crate) fn replica(engines: &[Engine], others: &[&Router]) -> Config {
    let mut config = config();
    config.workers = engines.iter().map(Engine::listed).collect();
    config.responses.mode = Mode::PassThrough;
    "127.0.0.1:0".clone_into(&mut config.peers.listen);
    let others = others.iter().map(|other| other.peers.unwrap().to_string());
    let others: Vec<String> = others.collect();
    if !others.is_empty() {
        config.peers.discovery.push(PeerDiscovery::Static(others));
    }
    config
}

pub(crate) async fn fleet_page(router: &Router) -> Value {
    client::get(router.admin, "/fleet").await.json()
}

/// The states of the other replicas.
async fn states(router: &Router) -> Vec<String> {
    let page = fleet_page(router).await;
    let peers = page["peers"].as_array().unwrap().iter();
    let states = peers.map(|peer| peer["state"].as_str().unwrap().to_owned());
    states.collect()
}

pub(crate) async fn are_connected(routers: &[&Router]) {
    for router in routers {
        eventually("the replicas are connected", async || {
            let states = states(router).await;
            states == vec!["connected"; routers.len() - 1]
        })
        .await;
        eventually("a worker is up", async || {
            fleet_page(router).await["is_ready"] == true
        })
        .await;
    }
}

/// Requests of other replicas at all workers, as a replica sees them.
async fn requests_of_others(router: &Router) -> u64 {
    let page = fleet_page(router).await;
    let workers = page["workers"].as_array().unwrap().iter();
    let loads = workers.filter_map(|worker| worker["peers"].as_array());
    let requests = loads
        .flatten()
        .map(|load| load["requests"].as_u64().unwrap());
    requests.sum()
}

/// A stream that lasts until it is dropped.
async fn hold(router: &Router) -> client::Open {
    let body = chat("Tell me a long story.", 10_000, true);
    let mut open = client::open(router.api, "POST", "/v1/chat/completions", &[], body).await;
    open.next().await.unwrap().unwrap();
    open
}

#[tokio::test]
async fn the_load_of_one_replica_is_seen_at_the_other() {
    let engines = [Engine::here("w0", unhurried()).await];
    let first = Router::here(&replica(&engines, &[])).await;
    let second = Router::here(&replica(&engines, &[&first])).await;
    are_connected(&[&first, &second]).await;
    let stream = hold(&first).await;
    eventually("the request is seen", async || {
        requests_of_others(&second).await == 1
    })
    .await;
    let ended = Instant::now();
    drop(stream);
    within(Duration::from_secs(5), "its end is seen", async || {
        requests_of_others(&second).await == 0
    })
    .await;
    println!("the end of a request was seen after {:?}", ended.elapsed());
}
