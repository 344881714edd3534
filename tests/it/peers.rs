//! Several replicas over one fleet: each routes with the load of all.

mod partition;

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;
use warmroute::config::Config;
use warmroute::peers::settings::PeerDiscovery;
use warmroute::responses::Mode;
use warmroute::secret::Secret;

use self::partition::Proxy;
use crate::client;
use crate::cluster::{Engine, Router, chat, config, eventually, unhurried};
use crate::own_ports;

/// A replica that listens at `listen` and knows others by `listed`.
fn listening_at(engines: &[Engine], listen: &str, listed: &[String]) -> Config {
    let mut config = config();
    config.workers = engines.iter().map(Engine::listed).collect();
    config.responses.mode = Mode::PassThrough;
    listen.clone_into(&mut config.peers.listen);
    if !listed.is_empty() {
        let listed = PeerDiscovery::Static(listed.to_vec());
        config.peers.discovery.push(listed);
    }
    config
}

/// A replica at a free port that knows `others`.
pub(crate) fn replica(engines: &[Engine], others: &[&Router]) -> Config {
    let others = others.iter().map(|other| other.peers.unwrap().to_string());
    listening_at(engines, "127.0.0.1:0", &others.collect::<Vec<_>>())
}

/// One for each replica.
fn addresses(count: usize) -> Vec<String> {
    (0..count)
        .map(|_| own_ports::address().to_string())
        .collect()
}

/// Replicas that are processes of their own. Each is listed at all, itself included.
async fn processes(engines: &[Engine], count: usize) -> Vec<Router> {
    let addresses = addresses(count);
    let mut routers = Vec::new();
    for address in &addresses {
        routers.push(Router::child(&listening_at(engines, address, &addresses)).await);
    }
    are_connected(&routers.iter().collect::<Vec<_>>()).await;
    routers
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

async fn sees(router: &Router, requests: u64) {
    eventually(
        &format!("{requests} requests of others are seen"),
        async || requests_of_others(router).await == requests,
    )
    .await;
}

async fn metric(router: &Router, line: &str) -> Option<f64> {
    let page = client::get(router.admin, "/metrics").await;
    let found = page
        .text()
        .lines()
        .find_map(|whole| whole.strip_prefix(line));
    found.map(|value| value.trim().parse().unwrap())
}

/// A stream that lasts until it is dropped.
async fn hold(router: &Router) -> client::Open {
    let body = chat("Tell me a long story.", 10_000, true);
    let mut open = client::open(router.api, "POST", "/v1/chat/completions", &[], body).await;
    assert_eq!(open.status, 200);
    open.next().await.unwrap().unwrap();
    open
}

fn signal(router: &Router, name: &str) {
    router.child.as_ref().unwrap().signal(name);
}

#[tokio::test]
async fn the_load_of_one_replica_is_seen_at_the_other() {
    let engines = [Engine::here("w0", unhurried()).await];
    let first = Router::here(&replica(&engines, &[])).await;
    let second = Router::here(&replica(&engines, &[&first])).await;
    are_connected(&[&first, &second]).await;
    let stream = hold(&first).await;
    sees(&second, 1).await;
    let explained = client::post(second.admin, "/explain", chat("Hello", 1, false)).await;
    let workers = &explained.json()["workers"];
    assert_eq!(workers[0]["load"]["peers"]["requests"], 1, "{workers}");
    assert_eq!(workers[0]["load"]["own"]["requests"], 0, "{workers}");
    assert_eq!(workers[0]["requests"], 1, "{workers}");
    drop(stream);
    eventually("its end is seen", async || {
        requests_of_others(&second).await == 0
    })
    .await;
}

#[tokio::test]
async fn least_load_avoids_the_workers_that_other_replicas_use() {
    let engines = [
        Engine::here("w0", unhurried()).await,
        Engine::here("w1", unhurried()).await,
    ];
    let least_load = |config: &mut Config| {
        config.routing.policy = warmroute::routing::Policy::LeastLoad;
    };
    let mut config = replica(&engines, &[]);
    least_load(&mut config);
    let first = Router::here(&config).await;
    let mut config = replica(&engines, &[&first]);
    least_load(&mut config);
    let second = Router::here(&config).await;
    are_connected(&[&first, &second]).await;
    for router in [&first, &second] {
        eventually("both workers are up", async || {
            let page = fleet_page(router).await;
            page["models"][0]["workers"].as_array().map(Vec::len) == Some(2)
        })
        .await;
    }
    // Alternately, each of them would send the first of its requests anywhere.
    let mut streams = Vec::new();
    for number in 0..6 {
        let (router, other) = match number % 2 {
            0 => (&first, &second),
            _ => (&second, &first),
        };
        streams.push(hold(router).await);
        sees(other, number / 2 + 1).await;
    }
    for engine in &engines {
        assert_eq!(engine.stats().await.running, 3, "{}", engine.name);
    }
}

#[tokio::test]
async fn the_load_of_a_killed_replica_is_gone_at_once() {
    let engines = [Engine::here("w0", unhurried()).await];
    let routers = processes(&engines, 3).await;
    let _streams = [hold(&routers[0]).await, hold(&routers[0]).await];
    for other in &routers[1..] {
        sees(other, 2).await;
    }
    signal(&routers[0], "KILL");
    let killed = Instant::now();
    for other in &routers[1..] {
        eventually("its load is gone", async || {
            requests_of_others(other).await == 0
        })
        .await;
        println!("load of a killed replica gone after {:?}", killed.elapsed());
    }
    let lost = metric(&routers[1], "warmroute_peer_lost_total{reason=\"closed\"}").await;
    assert_eq!(lost, Some(1.0), "{}", routers[1].log());
    eventually("its loss is said", async || {
        routers[1].log().contains("replica lost")
    })
    .await;
    eventually("its address is shown", async || {
        let mut states = states(&routers[1]).await;
        states.sort();
        states == ["connected", "unreachable"]
    })
    .await;
}

#[tokio::test]
async fn a_stopped_replica_is_stale_then_dropped_and_comes_back() {
    let engines = [Engine::here("w0", unhurried()).await];
    let sleeper = Router::child(&replica(&engines, &[])).await;
    let mut config = replica(&engines, &[&sleeper]);
    // It is stale for longer than a busy machine takes to look.
    config.peers.advanced.dead_after = Duration::from_secs(8);
    let other = &Router::here(&config).await;
    are_connected(&[&sleeper, other]).await;
    let _stream = hold(&sleeper).await;
    sees(other, 1).await;
    signal(&sleeper, "STOP");
    let stopped = Instant::now();
    eventually("it is stale", async || states(other).await == ["stale"]).await;
    println!("a stopped replica was stale after {:?}", stopped.elapsed());
    assert_eq!(
        requests_of_others(other).await,
        1,
        "its last load still counts"
    );
    eventually("its load is gone", async || {
        requests_of_others(other).await == 0
    })
    .await;
    println!(
        "a stopped replica was dropped after {:?}",
        stopped.elapsed()
    );
    let alone = fleet_page(other).await["replica"]["is_alone"].clone();
    assert_eq!(alone, true);
    signal(&sleeper, "CONT");
    let continued = Instant::now();
    sees(other, 1).await;
    println!("a stopped replica was back after {:?}", continued.elapsed());
    are_connected(&[&sleeper, other]).await;
}

#[tokio::test]
async fn a_partition_drops_the_load_and_healing_brings_it_back() {
    let engines = [Engine::here("w0", unhurried()).await];
    let first = Router::here(&replica(&engines, &[])).await;
    let proxy = Proxy::start(first.peers.unwrap()).await;
    let listed = [proxy.address.to_string()];
    let second = Router::here(&listening_at(&engines, "127.0.0.1:0", &listed)).await;
    are_connected(&[&first, &second]).await;
    let (_a, _b) = (hold(&first).await, hold(&second).await);
    let both = [&first, &second];
    for router in both {
        sees(router, 1).await;
    }
    proxy.cut();
    for router in both {
        sees(router, 0).await;
    }
    assert!(fleet_page(&second).await["replica"]["is_alone"] == true);
    let _c = hold(&first).await;
    proxy.heal();
    let healed = Instant::now();
    sees(&second, 2).await;
    sees(&first, 1).await;
    println!("equal again {:?} after the partition", healed.elapsed());
    let lost = metric(&first, "warmroute_peer_lost_total{reason=\"silent\"}").await;
    assert!(lost >= Some(1.0), "{lost:?}");
}

#[tokio::test]
async fn another_secret_is_refused_and_said() {
    let engines = [Engine::here("w0", unhurried()).await];
    let secret = |config: &mut Config, secret: &str| config.peers.secret = Secret::new(secret);
    let mut config = replica(&engines, &[]);
    secret(&mut config, "the secret of the fleet");
    let first = Router::here(&config).await;
    let mut config = replica(&engines, &[&first]);
    secret(&mut config, "another secret, mistyped");
    let stranger = Router::child(&config).await;
    eventually("it is refused", async || {
        states(&stranger).await == ["refused"]
    })
    .await;
    let page = fleet_page(&stranger).await;
    let error = page["peers"][0]["error"].as_str().unwrap();
    assert!(error.contains("`peers.secret` differs"), "{error}");
    eventually("it says so", async || {
        stranger.log().contains("replica not used")
    })
    .await;
    assert!(!stranger.log().contains("mistyped"));
    let refused = metric(&first, "warmroute_peer_refused_total{reason=\"secret\"}").await;
    assert!(refused.unwrap() >= 1.0);
    assert_eq!(states(&first).await, [""; 0]);
    // The right one, beside it.
    let mut config = replica(&engines, &[&first]);
    secret(&mut config, "the secret of the fleet");
    let second = Router::child(&config).await;
    are_connected(&[&first, &second]).await;
}

#[tokio::test]
async fn replicas_are_replaced_one_by_one_and_nothing_is_lost() {
    let engines = [Engine::here("w0", unhurried()).await];
    let addresses = addresses(3);
    let start = async |place: usize| {
        Router::child(&listening_at(&engines, &addresses[place], &addresses)).await
    };
    let mut routers = vec![start(0).await, start(1).await, start(2).await];
    for place in 0..3 {
        are_connected(&routers.iter().collect::<Vec<_>>()).await;
        let stream = hold(&routers[place]).await;
        let other = (place + 1) % 3;
        sees(&routers[other], 1).await;
        signal(&routers[place], "TERM");
        eventually("it is shown as draining", async || {
            let page = fleet_page(&routers[other]).await;
            let peers = page["peers"].as_array().unwrap().iter();
            peers.filter(|peer| peer["is_draining"] == true).count() == 1
        })
        .await;
        // It reports until its last request has ended.
        assert_eq!(requests_of_others(&routers[other]).await, 1);
        drop(stream);
        eventually("it has ended", async || {
            routers[place].child.as_mut().unwrap().ended().is_some()
        })
        .await;
        sees(&routers[other], 0).await;
        routers[place] = start(place).await;
    }
    are_connected(&routers.iter().collect::<Vec<_>>()).await;
    for router in &routers {
        assert!(!router.log().contains("replica lost"), "{}", router.log());
    }
}

/// Debian's package, as `.ci/faketime` installs it.
const FAKETIME: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1";

#[tokio::test]
async fn a_replica_whose_clock_is_an_hour_off_is_as_good_as_any() {
    if !Path::new(FAKETIME).exists() {
        return println!("SKIPPED: faketime is not installed");
    }
    let engines = [Engine::here("w0", unhurried()).await];
    let first = Router::here(&replica(&engines, &[])).await;
    let environment = [
        ("LD_PRELOAD", FAKETIME),
        ("FAKETIME", "+1h"),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
    ];
    let second = Router::child_in(&replica(&engines, &[&first]), &environment).await;
    are_connected(&[&first, &second]).await;
    let (_a, _b) = (hold(&first).await, hold(&second).await);
    for router in [&first, &second] {
        sees(router, 1).await;
        eventually("the other one is connected", async || {
            states(router).await == ["connected"]
        })
        .await;
        // A pause of a busy machine counts, and the clock does not.
        let peer = fleet_page(router).await["peers"][0].clone();
        assert!(peer["lag_ms"].as_u64().unwrap() < 1_800_000, "{peer}");
    }
}

#[tokio::test]
async fn eight_processes_know_each_others_load() {
    let engines = [Engine::here("w0", unhurried()).await];
    let routers = processes(&engines, 8).await;
    let _streams = [hold(&routers[2]).await, hold(&routers[5]).await];
    for (place, router) in routers.iter().enumerate() {
        sees(router, if place == 2 || place == 5 { 1 } else { 2 }).await;
    }
    signal(&routers[2], "KILL");
    let killed = Instant::now();
    for (place, router) in routers.iter().enumerate().filter(|(place, _)| *place != 2) {
        eventually("its load is gone", async || {
            requests_of_others(router).await == u64::from(place != 5)
        })
        .await;
        let lost = metric(router, "warmroute_peer_lost_total{reason=\"closed\"}").await;
        assert_eq!(lost, Some(1.0), "{place}");
    }
    println!(
        "load of a killed replica gone from seven after {:?}",
        killed.elapsed()
    );
}

#[tokio::test]
async fn a_replica_that_is_not_there_makes_no_replica_alone() {
    let engines = [Engine::here("w0", unhurried()).await];
    let gone = own_ports::address();
    let router = Router::here(&listening_at(&engines, "127.0.0.1:0", &[gone.to_string()])).await;
    // Before its first try to connect, a replica is not alone either.
    eventually("it was tried", async || {
        let page = fleet_page(&router).await;
        page["peers"][0]["error"] == "nothing listens there"
    })
    .await;
    assert_eq!(states(&router).await, ["unreachable"]);
    assert_eq!(fleet_page(&router).await["replica"]["is_alone"], false);
}
