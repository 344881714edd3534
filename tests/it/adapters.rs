//! LoRA adapters: found as soon as they are loaded, and used where they are loaded.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde_json::json;
use warmroute::sim::worker::Settings;

use crate::client;
use crate::cluster::{Cluster, Engine, chat, eventually, fast};
use crate::patience::too_long;

const CHAT: &str = "/v1/chat/completions";

fn of(model: &str, text: &str) -> String {
    chat(text, 1, false).replace("\"sim\"", &format!("\"{model}\""))
}

/// Has an engine load an adapter.
pub(crate) async fn load(engine: &Engine, name: &str) {
    let body = json!({"lora_name": name, "lora_path": "/adapters"}).to_string();
    let answer = client::post(engine.address, "/v1/load_lora_adapter", body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
}

#[tokio::test]
async fn an_adapter_that_was_loaded_just_now_is_found_by_its_first_request() {
    let cluster = Cluster::start(vec![fast(); 2], |config| {
        // The health checks find nothing in the meantime.
        config.fleet.health.interval = Duration::from_secs(600);
    })
    .await;
    for (round, name) in ["first", "second"].into_iter().enumerate() {
        assert_eq!(cluster.post(CHAT, of(name, "x")).await.status, 404);
        load(&cluster.engines[round], name).await;
        let (answer, decided) = cluster.post_decided(CHAT, &of(name, "x")).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(decided.worker, format!("w{round}"));
    }
    let found = cluster.metric("warmroute_model_lookups_total", &["found"]);
    assert!(found.await >= 2.0);
}

#[tokio::test]
async fn a_second_worker_that_loads_an_adapter_is_found_while_it_is_requested() {
    let cluster = Cluster::start(vec![fast(); 3], |config| {
        config.fleet.health.interval = Duration::from_secs(600);
        // Fewer than there are: the rounds take turns.
        config.fleet.model_lookup.workers_per_round = 1;
        config.fleet.model_lookup.interval = Duration::from_millis(100);
    })
    .await;
    load(&cluster.engines[0], "new").await;
    let answer = cluster.post(CHAT, of("new", "x")).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    load(&cluster.engines[2], "new").await;
    let mut used = BTreeSet::new();
    let began = Instant::now();
    while used.len() < 2 {
        let waited = began.elapsed();
        assert!(waited < too_long(), "only {used:?}");
        let text = |number: u32| {
            of(
                "new",
                // Long enough that loading the adapter takes less time than waiting for the other one.
                &format!("{number} of {waited:?}: {}", "new ".repeat(4_000)),
            )
        };
        let (first, second) = (text(1), text(2));
        let (first, second) = tokio::join!(
            cluster.post_decided(CHAT, &first),
            cluster.post_decided(CHAT, &second)
        );
        for (answer, decided) in [first, second] {
            assert_eq!(answer.status, 200, "{}", answer.text());
            used.insert(decided.worker);
        }
    }
    assert_eq!(used, BTreeSet::from(["w0", "w2"].map(str::to_owned)));
    // The worker that does not have it is asked as long as it is requested, and not longer.
    let asked = async || cluster.engines[1].stats().await.requests;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before = asked().await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(asked().await, before);
}

#[tokio::test]
async fn a_name_that_no_engine_serves_is_refused_and_has_them_asked_once_a_second() {
    let cluster = Cluster::start(vec![fast()], |config| {
        config.fleet.health.interval = Duration::from_secs(600);
    })
    .await;
    // No other request reaches the engine.
    let asked = async || cluster.engines[0].stats().await.requests;
    let before = asked().await;
    let began = Instant::now();
    let api = cluster.router.api;
    let request = |number: u32| client::post(api, CHAT, of("none", &number.to_string()));
    let requests = (0..20).map(|number| tokio::spawn(request(number)));
    for request in requests.collect::<Vec<_>>() {
        let answer = request.await.unwrap();
        assert_eq!((answer.status, &*answer.code()), (404, "model_not_found"));
    }
    let rounds = asked().await - before;
    let most = began.elapsed().as_secs() + 2;
    assert!((1..=most).contains(&rounds), "{rounds} rounds of {most}");
}

#[tokio::test]
async fn without_a_wait_an_unknown_name_is_refused_at_once() {
    let cluster = Cluster::start(vec![fast()], |config| {
        config.fleet.health.interval = Duration::from_secs(600);
        config.fleet.model_lookup.timeout = Duration::ZERO;
    })
    .await;
    load(&cluster.engines[0], "new").await;
    assert_eq!(cluster.post(CHAT, of("new", "x")).await.status, 404);
    let counted = cluster.metric("warmroute_model_lookups_total", &[]).await;
    assert_eq!(counted, 0.0);
}

#[tokio::test]
async fn requests_of_an_adapter_gather_where_it_is_in_the_gpu() {
    let engine = Settings {
        models: ["sim", "a", "b"].map(str::to_owned).to_vec(),
        ..fast()
    };
    let cluster = Cluster::start(vec![engine; 2], |_| {}).await;
    let mut used = [BTreeSet::new(), BTreeSet::new()];
    for round in 0..10 {
        for (model, used) in ["a", "b"].into_iter().zip(&mut used) {
            let (answer, decided) = cluster
                .post_decided(CHAT, &of(model, &format!("{round} of {model}")))
                .await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            used.insert(decided.worker);
        }
    }
    // The first request of either finds it nowhere.
    assert!(used[0].len() <= 2 && used[1].len() <= 2);
    let last: BTreeSet<_> = [cluster.worker("w0").await, cluster.worker("w1").await]
        .map(|row| row["loaded_adapters"].to_string())
        .into();
    assert_eq!(
        last,
        BTreeSet::from(["[\"a\"]".to_owned(), "[\"b\"]".to_owned()])
    );
    let explained = cluster.post_admin("/explain", &of("a", "new")).await;
    assert!(
        explained.text().contains("\"adapter\": 30.0"),
        "{}",
        explained.text()
    );
}

#[tokio::test]
async fn an_adapter_that_another_client_uses_counts_as_loaded() {
    let engine = Settings {
        models: ["sim", "a"].map(str::to_owned).to_vec(),
        decode_ms: 20,
        ..fast()
    };
    let cluster = Cluster::start(vec![engine; 2], |_| {}).await;
    let body = chat("not by the router", 2_000, true).replace("\"sim\"", "\"a\"");
    let running = client::open(cluster.engines[1].address, "POST", CHAT, &[], body).await;
    eventually("the engine reports it", async || {
        cluster.worker("w1").await["loaded_adapters"] == json!(["a"])
    })
    .await;
    drop(running);
}
