//! Each request waits for the worker where it costs the least, behind those before it, and over all models that share workers.

use warmroute::openai::tenant::TenantSpec;
use warmroute::responses::Mode;
use warmroute::sim::worker::Settings;

use super::order::arrivals;
use super::{CHAT, Waiter, block, row, set_hang, wait, waiting, with_queue};
use crate::cluster::{Cluster, Router, chat, eventually, fast};
use crate::peers;

fn two_models() -> Settings {
    Settings {
        models: vec!["sim".to_owned(), "adapter".to_owned()],
        ..fast()
    }
}

fn of_adapter(body: String) -> String {
    body.replace("\"sim\"", "\"adapter\"")
}

fn tenant(name: &str) -> TenantSpec {
    TenantSpec {
        max_priority: Some(5),
        ..crate::cluster::tenant(name)
    }
}

fn worker_of(decision: &str) -> String {
    let fields = decision.split("; ").filter_map(|pair| pair.split_once('='));
    let worker = fields.into_iter().find(|(key, _)| *key == "worker");
    worker.map(|(_, name)| name.to_owned()).unwrap()
}

/// Waits in the queue of any model.
async fn wait_of(cluster: &Cluster, model: &str, headers: &[(&str, &str)], body: String) -> Waiter {
    let count = async || row(cluster, model).await["waiting"].as_u64().unwrap_or(0);
    let before = count().await;
    let waiter = super::send(cluster, headers, body);
    eventually("it waits", async || count().await == before + 1).await;
    waiter
}

#[tokio::test]
async fn a_request_waits_for_the_worker_with_its_prefix_while_others_pass_it() {
    let cluster = Cluster::start(vec![fast(); 2], |config| {
        with_queue(config, |_| {});
        config.responses.mode = Mode::PassThrough;
        "127.0.0.1:0".clone_into(&mut config.peers.listen);
    })
    .await;
    let replica = Router::here(&peers::replica(&cluster.engines, &[&cluster.router])).await;
    peers::are_connected(&[&cluster.router, &replica]).await;
    // What the other replica knows of those who wait here.
    let seen = async || {
        let page = peers::fleet_page(&replica).await;
        let workers = page["workers"].as_array().unwrap().iter();
        let waiting = workers.filter_map(|row| {
            let waiting = row["peers"][0]["waiting_requests"].as_u64()?;
            Some((row["name"].as_str()?.to_owned(), waiting))
        });
        let waiting: Vec<_> = waiting.filter(|(_, waiting)| *waiting > 0).collect();
        waiting
    };
    let story = "once upon a time there was a router that waited. ".repeat(200);
    let (first, _) = cluster.post_decided(CHAT, &chat(&story, 1, false)).await;
    let warm = worker_of(first.header("x-warmroute-decision"));
    // Requests go to the other worker and to this one, until this one is busy.
    let mut blockers = vec![block(&cluster, "busy ").await];
    while cluster.worker(&warm).await["queued_tokens"] == 0 {
        blockers.push(block(&cluster, &format!("busy {} ", blockers.len())).await);
    }
    if blockers.len() == 2 {
        blockers.remove(0);
        let other = if warm == "w0" { "w1" } else { "w0" };
        eventually("the other worker is free", async || {
            cluster.worker(other).await["queued_tokens"] == 0
        })
        .await;
    }
    let follower = wait(&cluster, &[], chat(&format!("{story} and then?"), 1, true)).await;
    // The other worker is idle, and a request that has nothing cached goes there at once.
    let (passed, _) = cluster.post_decided(CHAT, &chat("hello", 1, false)).await;
    assert_ne!(worker_of(passed.header("x-warmroute-decision")), warm);
    assert!(!passed.header("x-warmroute-decision").contains("queue_ms"));
    assert_eq!(waiting(&cluster).await, 1);
    eventually("the other replica knows", async || {
        seen().await == [(warm.clone(), 1)]
    })
    .await;
    // A decision is explained behind it, as it is made.
    eventually("it counts behind the one that runs", async || {
        let other = chat("another", 1, false);
        let page = cluster.post_admin("/explain", &other).await.json();
        let mut rows = page["workers"].as_array().unwrap().iter();
        let row = rows.find(|row| row["worker"] == warm.as_str()).unwrap();
        row["requests"] == 2 && row["load"]["own"]["requests"] == 1
    })
    .await;
    blockers.clear();
    let answer = follower.answer().await;
    assert_eq!(worker_of(answer.header("x-warmroute-decision")), warm);
    eventually("nothing waits any more", async || seen().await.is_empty()).await;
}

#[tokio::test]
async fn classes_hold_over_the_models_of_one_worker() {
    let cluster = Cluster::start(vec![two_models()], |config| {
        with_queue(config, |_| {});
        config.tenants = vec![tenant("a")];
    })
    .await;
    set_hang(&cluster, true).await;
    let key = ("authorization", "Bearer sk-a");
    let blocker = super::send(&cluster, &[key], chat("busy x", 1, true));
    eventually("the worker is busy", async || {
        cluster.requests().await == [1]
    })
    .await;
    set_hang(&cluster, false).await;
    let mut waiters = Vec::new();
    let low = [key, ("x-warmroute-priority", "-5")];
    let high = [key, ("x-warmroute-priority", "5")];
    for _ in 0..3 {
        waiters.push(wait_of(&cluster, "sim", &low, chat("l x", 1, true)).await);
    }
    for _ in 0..3 {
        let body = of_adapter(chat("h x", 1, true));
        waiters.push(wait_of(&cluster, "adapter", &high, body).await);
    }
    drop(blocker);
    for waiter in waiters {
        assert_eq!(waiter.answer().await.status, 200);
    }
    assert_eq!(arrivals(&cluster).await.concat(), "hhhlll");
}

#[tokio::test]
async fn a_tenant_with_several_models_of_one_worker_has_one_turn() {
    let cluster = Cluster::start(vec![two_models()], |config| {
        with_queue(config, |_| {});
        config.tenants = vec![tenant("a"), tenant("b")];
    })
    .await;
    set_hang(&cluster, true).await;
    let (a, b) = (
        [("authorization", "Bearer sk-a")],
        [("authorization", "Bearer sk-b")],
    );
    let blocker = super::send(&cluster, &a, chat("busy x", 1, true));
    eventually("the worker is busy", async || {
        cluster.requests().await == [1]
    })
    .await;
    set_hang(&cluster, false).await;
    let mut waiters = Vec::new();
    for _ in 0..3 {
        waiters.push(wait_of(&cluster, "sim", &a, chat("a x", 1, true)).await);
        let body = of_adapter(chat("a x", 1, true));
        waiters.push(wait_of(&cluster, "adapter", &a, body).await);
    }
    for _ in 0..3 {
        waiters.push(wait_of(&cluster, "sim", &b, chat("b x", 1, true)).await);
    }
    drop(blocker);
    for waiter in waiters {
        assert_eq!(waiter.answer().await.status, 200);
    }
    assert_eq!(arrivals(&cluster).await.concat(), "abababaaa");
}

#[tokio::test]
async fn in_a_full_queue_a_flood_makes_place_for_the_others() {
    let cluster = Cluster::start(vec![fast()], |config| {
        with_queue(config, |settings| settings.max_requests = 3);
        config.tenants = vec![tenant("flood"), tenant("quiet")];
    })
    .await;
    set_hang(&cluster, true).await;
    let (flood, quiet) = (
        [("authorization", "Bearer sk-flood")],
        [("authorization", "Bearer sk-quiet")],
    );
    let blocker = super::send(&cluster, &flood, chat("busy x", 1, true));
    eventually("the worker is busy", async || {
        cluster.requests().await == [1]
    })
    .await;
    set_hang(&cluster, false).await;
    let mut waiters = Vec::new();
    for _ in 0..3 {
        waiters.push(wait(&cluster, &flood, chat("f x", 1, true)).await);
    }
    let refused = super::send(&cluster, &flood, chat("f x", 1, true))
        .answer()
        .await;
    assert_eq!((refused.status, &*refused.code()), (429, "queue_full"));
    let newest = waiters.pop().unwrap();
    let quiet = super::send(&cluster, &quiet, chat("q x", 1, true));
    let refused = newest.answer().await;
    assert_eq!((refused.status, &*refused.code()), (429, "queue_full"));
    assert_ne!(refused.header("retry-after"), "");
    drop(blocker);
    for waiter in waiters.into_iter().chain([quiet]) {
        assert_eq!(waiter.answer().await.status, 200);
    }
}

#[tokio::test]
async fn by_default_requests_wait_here_once_the_slots_of_all_workers_are_taken() {
    let cluster = Cluster::start(vec![fast()], |config| {
        for worker in &mut config.workers {
            worker.slots = std::num::NonZeroU32::new(8);
        }
    })
    .await;
    set_hang(&cluster, true).await;
    let mut waiters = Vec::new();
    for number in 1..=12 {
        waiters.push(super::send(
            &cluster,
            &[],
            chat(&format!("{number}"), 1, true),
        ));
        eventually("it is at the engine, or waits", async || {
            cluster.requests().await[0] + waiting(&cluster).await == number
        })
        .await;
    }
    // Eight slots, and one more: an engine of more slots than are known is found out so.
    assert_eq!(
        (cluster.requests().await, waiting(&cluster).await),
        (vec![9], 3)
    );
    set_hang(&cluster, false).await;
    waiters.truncate(8);
    drop(waiters);
}
