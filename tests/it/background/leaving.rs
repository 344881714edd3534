//! Routers that stop while background responses run.

use std::time::Duration;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::task::{JoinSet, LocalSet};

use super::fleet::{Fleet, Places, end, ends_once, followed, replayed, started};
use super::{PATH, ask, create, get, said};
use crate::client;
use crate::cluster::{Router, eventually, unhurried};
use crate::redis_server::Server;

async fn has_ended(router: &mut Router) {
    let child = router.child.as_mut().unwrap();
    eventually("the process ends", async || child.ended().is_some()).await;
}

#[tokio::test]
async fn at_the_end_of_the_drain_runs_without_output_are_released_and_others_fail() {
    let mut fleet = Fleet::with(unhurried(), Server::durable().await, |config| {
        config.api.drain_timeout = Duration::from_millis(500);
        // The response need not be finished.
        config.responses.store.lease.duration = Duration::from_secs(600);
    })
    .await;
    fleet.engine.hold_after(3).await;
    let one = create(&fleet.routers[0], &ask(40, json!({}))).await;
    let body = ask(2_000, json!({"stream": true}));
    let live = client::open(fleet.routers[0].api, "POST", PATH, &[], body.to_string()).await;
    eventually("both have started", async || {
        fleet.engine.stats().await.running == 2
            && get(&fleet.routers[1], &one).await["status"] == "in_progress"
    })
    .await;
    let places: Places = Arc::new(Mutex::new(vec![fleet.routers[1].api]));
    fleet.routers[0].child.as_ref().unwrap().signal("TERM");
    let received = followed(&places, live).await;
    has_ended(&mut fleet.routers[0]).await;
    fleet.engine.let_go().await;
    let others = [&fleet.routers[1], &fleet.routers[2]];
    let two = &received[0].1["response"];
    let last = end(&others, two).await;
    assert_eq!(
        (&last["status"], &last["error"]["code"]),
        (&json!("failed"), &json!("server_error"))
    );
    assert_eq!(last["output"][0]["content"][0]["text"], *said(&received));
    assert_eq!(replayed(&others, two).await, received);
    let last = end(&others, &one).await;
    assert_eq!(
        (&last["status"], &last["usage"]["output_tokens"]),
        (&json!("incomplete"), &json!(40))
    );
    fleet.runs(0).await;
}

#[tokio::test]
async fn a_response_in_a_conversation_goes_on_elsewhere_and_its_lock_with_it() {
    for signal in ["KILL", "TERM"] {
        let mut fleet = Fleet::with(unhurried(), Server::durable().await, |config| {
            config.api.drain_timeout = Duration::from_millis(500);
        })
        .await;
        fleet.engine.hold_after(3).await;
        let made = client::post(fleet.routers[1].api, "/v1/conversations", "{}").await;
        let conversation = made.json()["id"].clone();
        let in_it = json!({"conversation": conversation});
        let one = create(&fleet.routers[0], &ask(40, in_it.clone())).await;
        eventually("it has started", async || {
            get(&fleet.routers[1], &one).await["status"] == "in_progress"
        })
        .await;
        fleet.routers[0].child.as_ref().unwrap().signal(signal);
        has_ended(&mut fleet.routers[0]).await;
        fleet.engine.let_go().await;
        let others = [&fleet.routers[1], &fleet.routers[2]];
        let last = end(&others, &one).await;
        assert_eq!(
            (&last["status"], &last["usage"]["output_tokens"]),
            (&json!("incomplete"), &json!(40)),
            "{signal}: {last}"
        );
        // Its items came with its end, and the conversation is free.
        let path = format!("/v1/conversations/{}/items", conversation.as_str().unwrap());
        let items = client::get(fleet.routers[1].api, &path).await.json();
        assert_eq!(items["data"].as_array().unwrap().len(), 2, "{items}");
        let two = create(&fleet.routers[2], &ask(3, in_it)).await;
        assert_eq!(end(&others, &two).await["status"], "incomplete");
        let items = client::get(fleet.routers[1].api, &path).await.json();
        assert_eq!(items["data"].as_array().unwrap().len(), 4, "{items}");
    }
}

/// Sends requests one after the other until it must stop. Returns the acknowledged responses.
async fn load(places: Places, streams: bool, is_over: Arc<AtomicBool>) -> Vec<(Value, usize)> {
    let mut acknowledged = Vec::new();
    while !is_over.load(Ordering::Relaxed) {
        let tokens = fastrand::usize(1..30);
        let mut live = started(&places, &ask(tokens, json!({"stream": streams}))).await;
        if streams {
            let received = followed(&places, live).await;
            if let Some((_, first)) = received.first() {
                ends_once(&received);
                acknowledged.push((first["response"].clone(), tokens));
            }
        } else if let (text, true) = live.rest().await {
            acknowledged.push((serde_json::from_str(&text).unwrap(), tokens));
        }
    }
    acknowledged
}

#[tokio::test]
async fn a_rolling_restart_loses_no_acknowledged_response() {
    let mut fleet = Fleet::new(unhurried()).await;
    let places: Places = Arc::new(Mutex::new(
        fleet.routers.iter().map(|router| router.api).collect(),
    ));
    let is_over = Arc::new(AtomicBool::new(false));
    let (local, mut clients) = (LocalSet::new(), JoinSet::new());
    for client in 0..12 {
        clients.spawn_local_on(
            load(places.clone(), client % 2 == 0, is_over.clone()),
            &local,
        );
    }
    let restarts = async {
        for place in 0..3 {
            // Requests are running.
            let before = fleet.engine.stats().await.finished;
            eventually("some are answered", async || {
                fleet.engine.stats().await.finished > before + 10
            })
            .await;
            fleet.routers[place].child.as_ref().unwrap().signal("TERM");
            has_ended(&mut fleet.routers[place]).await;
            fleet.replace(place).await;
            places.lock()[place] = fleet.routers[place].api;
        }
        is_over.store(true, Ordering::Relaxed);
        clients.join_all().await.concat()
    };
    let acknowledged = local.run_until(restarts).await;
    assert!(acknowledged.len() > 30, "{}", acknowledged.len());
    let routers: Vec<_> = fleet.routers.iter().collect();
    for (response, tokens) in &acknowledged {
        let last = end(&routers, response).await;
        assert_eq!(
            (&last["status"], &last["usage"]["output_tokens"]),
            (&json!("incomplete"), &json!(tokens)),
            "{last}"
        );
    }
    fleet.runs(0).await;
}
