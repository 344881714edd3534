//! Pairs of workers with several dp ranks: each leg goes to the rank that was chosen for it.

use std::collections::BTreeMap;

use serde_json::json;
use warmroute::sim::worker::{self, Role, Settings};

use super::exact::two_ranks_of;
use super::followed::{Followed, Prompt, Wire};
use super::ranks::in_every_rank;
use crate::client::Answer;
use crate::cluster::{Engine, eventually, router_connector, telling, with_role};

const PATH: &str = "/v1/completions";

fn of_role(connector: worker::Connector, role: Role) -> Settings {
    with_role(telling(), connector, role)
}

/// A router before a prefill and a decode worker, which it was told to have so many ranks.
async fn pair(
    connector: worker::Connector,
    prefill: (Engine, u32),
    decode: (Engine, u32),
) -> Followed {
    let ranks = [prefill.1, decode.1];
    let followed = Followed::of(Wire::Zmq, vec![prefill.0, decode.0], |config| {
        config.prefill_decode.connector = Some(router_connector(connector));
        config.prefill_decode.advanced.min_remote_tokens = 24;
        for (listed, ranks) in config.workers.iter_mut().zip(ranks) {
            listed.events.as_mut().unwrap().ranks = ranks;
        }
    })
    .await;
    if connector == worker::Connector::Mooncake {
        eventually("its bootstrap server is known", async || {
            let row = followed.cluster.worker("p").await;
            row["kv_transfers"]["bootstrap"].is_string()
        })
        .await;
    }
    followed
}

async fn two_and_two(connector: worker::Connector) -> Followed {
    let prefill = two_ranks_of("p", of_role(connector, Role::Prefill)).await;
    let decode = two_ranks_of("d", of_role(connector, Role::Decode)).await;
    pair(connector, (prefill, 2), (decode, 2)).await
}

/// One with more than one token, which is worth two legs.
fn body(prompt: &Prompt) -> String {
    let body = json!({"model": prompt.model, "prompt": prompt.tokens, "max_tokens": 3});
    body.to_string()
}

/// The fields of `x-warmroute-decision`.
fn decision(answer: &Answer) -> BTreeMap<String, String> {
    assert_eq!(answer.status, 200, "{}", answer.text());
    let header = answer.header("x-warmroute-decision").to_owned();
    let fields = header.split("; ").filter_map(|field| field.split_once('='));
    fields
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect()
}

async fn asked(followed: &Followed, prompt: &Prompt) -> Answer {
    let cluster = &followed.cluster;
    cluster.post_decided(PATH, &body(prompt)).await.0
}

/// The header of the last request that generates.
async fn pinned_to(engine: &Engine) -> Option<String> {
    let last = engine.last_post().await;
    assert_eq!(last.path, PATH);
    last.headers.get("x-data-parallel-rank").cloned()
}

#[tokio::test]
async fn both_legs_go_to_the_ranks_that_were_chosen_and_conversations_return_to_them() {
    for connector in [worker::Connector::Nixl, worker::Connector::Mooncake] {
        let followed = two_and_two(connector).await;
        for engine in &followed.cluster.engines {
            in_every_rank(engine).await;
        }
        let mut prefill_ranks = BTreeMap::new();
        let mut decode_ranks = BTreeMap::new();
        for turn in 1..4 {
            for family in 0..4 {
                let prompt = Prompt::new(family, turn * 96 + 5);
                let answer = asked(&followed, &prompt).await;
                let decision = decision(&answer);
                let context = format!("{connector:?}, turn {turn} of {family}: {decision:?}");
                assert_eq!(decision["disaggregated"], "yes", "{context}");
                for (engine, rank) in [(0, "prefill_rank"), (1, "rank")] {
                    let pinned = pinned_to(followed.engine(engine)).await;
                    assert_eq!(pinned.as_ref(), decision.get(rank), "{context}");
                }
                // The last token is always computed.
                let before = u64::from((turn - 1) * 96);
                let said: u64 = decision["prefill_cached_tokens"].parse().unwrap();
                assert!(said >= before, "{context}");
                let details = &answer.json()["usage"]["prompt_tokens_details"];
                assert_eq!(details["cached_tokens"], said, "{context}");
                for (ranks, name) in [
                    (&mut prefill_ranks, "prefill_rank"),
                    (&mut decode_ranks, "rank"),
                ] {
                    let rank = decision[name].clone();
                    let first = ranks.entry(family).or_insert(rank.clone());
                    assert_eq!(*first, rank, "{context}");
                }
            }
            followed.all_equal().await;
        }
        let page = format!("/explain?path={PATH}");
        let next = body(&Prompt::new(0, 400));
        let page = followed.cluster.post_admin(&page, &next).await.json();
        let of_prefill = &page["disaggregation"];
        assert_eq!(of_prefill["prefill"], "p", "{page:#}");
        assert_eq!(of_prefill["prefill_rank"].to_string(), prefill_ranks[&0]);
        assert_eq!(of_prefill["workers"].as_array().unwrap().len(), 2);
        assert_eq!(page["chosen_rank"].to_string(), decode_ranks[&0]);
    }
}

#[tokio::test]
async fn an_api_whose_ranks_cannot_be_pinned_is_split_all_the_same() {
    let followed = two_and_two(worker::Connector::Nixl).await;
    let input = "so it is ".repeat(60);
    let body = json!({"model": "sim", "input": input, "max_output_tokens": 3}).to_string();
    let path = "/v1/responses";
    let (answer, _) = followed.cluster.post_decided(path, &body).await;
    let decision = decision(&answer);
    assert_eq!(decision["disaggregated"], "yes");
    assert!(!decision.contains_key("rank") && !decision.contains_key("prefill_rank"));
}

#[tokio::test]
async fn workers_with_fewer_ranks_than_configured_take_both_legs_all_the_same() {
    for connector in [worker::Connector::Nixl, worker::Connector::Mooncake] {
        let prefill = Engine::here("p", of_role(connector, Role::Prefill)).await;
        let decode = Engine::here("d", of_role(connector, Role::Decode)).await;
        let followed = pair(connector, (prefill, 3), (decode, 3)).await;
        for family in 0..12 {
            let answer = asked(&followed, &Prompt::new(family, 101)).await;
            let decision = decision(&answer);
            assert_eq!(decision["disaggregated"], "yes", "{connector:?} {family}");
        }
        // Once it is known, nothing is sent in vain.
        let before = followed.engine(1).generated().await;
        for family in 20..24 {
            let answer = asked(&followed, &Prompt::new(family, 101)).await;
            let decision = decision(&answer);
            assert!(!decision.contains_key("rank"), "{decision:?}");
            assert_eq!(decision["attempts"], "1");
        }
        assert_eq!(followed.engine(1).generated().await - before, 4);
    }
}
