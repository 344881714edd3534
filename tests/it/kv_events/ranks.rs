//! Requests go to the dp rank that has most of their prompt cached.

use std::time::Duration;

use serde_json::{Value, json};
use warmroute::config::Config;
use warmroute::fleet::discovery::WorkerSpec;
use warmroute::sim::worker::Settings;

use super::exact::{two_ranks, two_ranks_of};
use super::followed::{Followed, Prompt, Wire, over_zmq, quick};
use crate::client::{self, Answer};
use crate::cluster::{Cluster, Decided, Engine, Router, chat, eventually, telling, unhurried};
use crate::peers::{are_connected, replica};

/// Prompt tokens that the engine found in its cache.
fn cached(answer: &Answer) -> u64 {
    assert_eq!(answer.status, 200, "{}", answer.text());
    let usage = &answer.json()["usage"];
    let details = &usage["prompt_tokens_details"]["cached_tokens"];
    details.as_u64().unwrap()
}

async fn asked(cluster: &Cluster, prompt: &Prompt) -> (Answer, Decided) {
    cluster
        .post_decided("/v1/completions", &prompt.body())
        .await
}

/// Has each rank of an engine cache something: a rank that has reported nothing does not count.
pub(super) async fn in_every_rank(engine: &Engine) {
    for rank in 0..engine.events.len() {
        Prompt::new(90, 40).to_rank(engine, rank).await;
    }
}

/// What `explain` says of the ranks of the only worker, and which it would choose.
async fn explained(cluster: &Cluster, path: &str, body: &str) -> Value {
    let path = format!("/explain?path={path}");
    cluster.post_admin(&path, body).await.json()
}

#[tokio::test]
async fn conversations_return_to_their_rank_and_find_there_what_the_router_says() {
    let followed = Followed::of(Wire::Zmq, vec![two_ranks("w0").await], |_| {}).await;
    in_every_rank(followed.engine(0)).await;
    let mut ranks = [None; 6];
    for turn in 1..4 {
        for family in 0..6 {
            let prompt = Prompt::new(family, turn * 96 + 5);
            let (answer, decided) = asked(&followed.cluster, &prompt).await;
            assert_eq!(
                cached(&answer),
                decided.cached_tokens,
                "turn {turn} of {family}"
            );
            let rank = &mut ranks[family as usize];
            assert!(decided.rank.is_some(), "{decided:?}");
            assert_eq!(*rank.get_or_insert(decided.rank), decided.rank);
            // The last token is always computed.
            let before = u64::from((turn - 1) * 96);
            assert!(decided.cached_tokens >= before, "turn {turn}: {decided:?}");
        }
        followed.all_equal().await;
    }
    let body = Prompt::new(0, 400).body();
    let page = explained(&followed.cluster, "/v1/completions", &body).await;
    let rows = page["workers"].as_array().unwrap();
    let numbers: Vec<u64> = rows
        .iter()
        .map(|row| row["rank"].as_u64().unwrap())
        .collect();
    assert_eq!(numbers, [0, 1], "{page:#}");
    let chosen = ranks[0].unwrap().unwrap();
    assert_eq!(page["chosen_rank"], chosen);
    assert_eq!(rows[chosen]["cached_tokens"], 288, "{page:#}");
    assert_eq!(rows[1 - chosen]["cached_tokens"], 0);
    let numbers: Vec<&Value> = rows[1]["trees"]
        .as_array()
        .unwrap()
        .iter()
        .map(|tree| &tree["rank"])
        .collect();
    assert_eq!(numbers, [1]);
}

#[tokio::test]
async fn an_api_that_ignores_the_rank_is_not_pinned() {
    let followed = Followed::of(Wire::Zmq, vec![two_ranks("w0").await], |_| {}).await;
    let body = json!({"model": "sim", "input": "once upon a time", "max_output_tokens": 1});
    let (answer, decided) = followed
        .cluster
        .post_decided("/v1/responses", &body.to_string())
        .await;
    assert_eq!(answer.status, 200);
    assert_eq!(decided.rank, None);
    let page = explained(&followed.cluster, "/v1/responses", &body.to_string()).await;
    assert_eq!(page["workers"].as_array().unwrap().len(), 1, "{page:#}");
}

#[tokio::test]
async fn load_spreads_over_the_ranks_and_fleet_shows_it() {
    let settings = Settings {
        data_parallel_size: 2.try_into().unwrap(),
        ..unhurried()
    };
    let engine = Engine::here(
        "w0",
        Settings {
            kv: telling().kv,
            ..settings
        },
    )
    .await;
    let cluster = followed_at(engine, 2, quick()).await;
    let mut open = Vec::new();
    for number in 0..6 {
        let body = chat(&format!("{number} of them. ").repeat(40), 2_000, true);
        let mut stream = cluster.open("/v1/chat/completions", &body).await;
        stream.until("delta").await;
        open.push(stream);
    }
    let page = cluster.admin("/fleet").await.json();
    let ranks = page["workers"][0]["ranks"].as_array().unwrap();
    let requests: Vec<&Value> = ranks.iter().map(|rank| &rank["requests"]).collect();
    assert_eq!(requests, [3, 3], "{page:#}");
    drop(open);
    eventually("no rank has a request", async || {
        let page = cluster.admin("/fleet").await.json();
        let ranks = page["workers"][0]["ranks"].as_array().unwrap();
        ranks
            .iter()
            .all(|rank| rank["requests"] == 0 && rank["context_tokens"] == 0)
    })
    .await;
}

/// An engine whose ranks publish at addresses that do not follow each other: only rank 0 is found.
fn with_ranks(engine: &Engine, ranks: u32) -> WorkerSpec {
    let mut listed = over_zmq(engine);
    if let Some(events) = &mut listed.events {
        events.ranks = ranks;
    }
    listed
}

/// A router in front of an engine that it was configured to have so many ranks.
async fn followed_at(engine: Engine, ranks: u32, mut config: Config) -> Cluster {
    config.workers.push(with_ranks(&engine, ranks));
    let router = Router::here(&config).await;
    let cluster = Cluster {
        engines: vec![engine],
        router,
    };
    cluster.all_up().await;
    cluster
}

#[tokio::test]
async fn a_rank_whose_events_never_come_is_predicted_and_the_other_is_known() {
    let settings = Settings {
        data_parallel_size: 2.try_into().unwrap(),
        ..telling()
    };
    // On any free ports: nothing is at that of rank 0 plus one.
    let engine = Engine::try_here("w0", settings).await.unwrap();
    let mut config = quick();
    // The next prompt may come before the events of the one that it continues.
    config.kv_events.advanced.unconfirmed.grace_period = Duration::from_secs(3);
    let cluster = followed_at(engine, 2, config).await;
    // Before its first event the block size of rank 0 is not known.
    for family in 100..200 {
        let prompt = Prompt::new(family, 101);
        if asked(&cluster, &prompt).await.1.rank == Some(0) {
            eventually("rank 0 has reported", async || {
                let page = explained(&cluster, "/v1/completions", &prompt.body()).await;
                page["workers"][0]["cached_tokens"] == 96
            })
            .await;
            break;
        }
    }
    let mut seen = [false; 2];
    for family in 0..16 {
        let first = asked(&cluster, &Prompt::new(family, 101)).await.1;
        let (answer, again) = asked(&cluster, &Prompt::new(family, 205)).await;
        assert_eq!(
            again.rank, first.rank,
            "family {family}: {first:?}, {again:?}"
        );
        assert!(cached(&answer) >= 96);
        seen[first.rank.unwrap()] = true;
    }
    assert_eq!(seen, [true; 2]);
    let body = Prompt::new(0, 101).body();
    eventually("rank 0 is known and rank 1 is predicted", async || {
        let page = explained(&cluster, "/v1/completions", &body).await;
        page["workers"][0]["known_by"] == "exact" && page["workers"][1]["known_by"] == "predicted"
    })
    .await;
}

#[tokio::test]
async fn without_a_tokenizer_a_conversation_returns_to_its_rank_by_prediction() {
    let followed = Followed::of(Wire::Zmq, vec![two_ranks("w0").await], |_| {}).await;
    for number in 0..4 {
        let start = format!("{number} is where this starts. ").repeat(40);
        let mut ranks = Vec::new();
        for turn in 0..3 {
            let body = chat(
                &format!("{start}{}", "and so on. ".repeat(turn * 20)),
                1,
                false,
            );
            let path = "/v1/chat/completions";
            let (answer, decided) = followed.cluster.post_decided(path, &body).await;
            assert_eq!(turn > 0, decided.cached_tokens > 0, "{decided:?}");
            assert!(turn == 0 || cached(&answer) > 0, "{decided:?}");
            ranks.push(decided.rank.unwrap());
        }
        assert!(ranks.iter().all(|rank| *rank == ranks[0]), "{ranks:?}");
    }
}

#[tokio::test]
async fn an_engine_with_fewer_ranks_than_configured_answers_all_the_same() {
    let engine = Engine::here("w0", telling()).await;
    let cluster = followed_at(engine, 3, quick()).await;
    for family in 0..12 {
        let (answer, _) = asked(&cluster, &Prompt::new(family, 101)).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
}

#[tokio::test]
async fn another_replica_knows_how_busy_each_rank_is() {
    let slow = Settings {
        kv: telling().kv,
        ..unhurried()
    };
    let engines = [two_ranks_of("w0", slow).await];
    let listed = |others: &[&Router]| {
        let mut config = replica(&engines, others);
        config.workers = vec![over_zmq(&engines[0])];
        config
    };
    let first = Router::here(&listed(&[])).await;
    let second = Router::here(&listed(&[&first])).await;
    are_connected(&[&first, &second]).await;
    let path = "/v1/chat/completions";
    let body = chat(&"a long answer. ".repeat(40), 2_000, true);
    let mut stream = None;
    eventually("the worker is up", async || {
        let answer = client::open(first.api, "POST", path, &[], body.clone()).await;
        let is_up = answer.status == 200;
        stream = Some(answer);
        is_up
    })
    .await;
    // Requests, and tokens that are decoding, by rank.
    let loads = async |router: &Router, whose: &str| {
        let page = client::post(router.admin, "/explain", chat("other", 1, false)).await;
        let page = page.json();
        let rows = page["workers"].as_array().unwrap().iter();
        let of_rank = |row: &Value| {
            let load = &row["load"][whose];
            ["requests", "context_tokens"].map(|name| load[name].as_u64().unwrap())
        };
        rows.map(of_rank).collect::<Vec<_>>()
    };
    eventually(
        "it decodes, and the other replica knows where",
        async || {
            let own = loads(&first, "own").await;
            let peers = loads(&second, "peers").await;
            let busy = own
                .iter()
                .filter(|[requests, decoding]| *requests == 1 && *decoding > 0);
            own == peers && own.len() == 2 && busy.count() == 1
        },
    )
    .await;
    drop(stream);
    eventually("it has ended", async || {
        loads(&second, "peers").await == [[0, 0], [0, 0]]
    })
    .await;
}

#[tokio::test]
async fn another_replica_knows_the_rank_that_a_prompt_was_sent_to() {
    let engines = [two_ranks("w0").await];
    let listed = |others: &[&Router]| {
        let mut config = replica(&engines, others);
        config.workers = vec![over_zmq(&engines[0])];
        config
    };
    let first = Router::here(&listed(&[])).await;
    let second = Router::here(&listed(&[&first])).await;
    are_connected(&[&first, &second]).await;
    for number in 0..4 {
        let body = chat(
            &format!("{number} is where this starts. ").repeat(40),
            1,
            false,
        );
        let path = "/v1/chat/completions";
        let mut status = 0;
        eventually("the worker is up", async || {
            status = client::post(first.api, path, body.clone()).await.status;
            status == 200
        })
        .await;
        let explain = async |router: &Router| {
            let answer = client::post(router.admin, "/explain", body.clone()).await;
            answer.json()
        };
        let own = explain(&first).await;
        assert_eq!(own["reason"], "longest_prefix", "{own:#}");
        eventually("the other replica knows of it", async || {
            let page = explain(&second).await;
            page["reason"] == "longest_prefix" && page["chosen_rank"] == own["chosen_rank"]
        })
        .await;
        assert!(own["chosen_rank"].is_u64(), "{own:#}");
    }
}
