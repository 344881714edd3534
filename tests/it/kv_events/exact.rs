//! Without faults, the router knows every engine's cache block by block.

use std::time::Duration;

use serde_json::json;
use warmroute::config::Config;
use warmroute::relay::PinRanks;
use warmroute::sim::worker::Settings;
use warmroute::sim::worker::publisher::{self, Hashes, Layout};

use super::followed::{BOTH, Followed, Prompt, Row, Wire, held, small};
use crate::client;
use crate::cluster::{Engine, telling};

fn written(layout: Layout, hashes: Hashes) -> Settings {
    let settings = small(telling());
    Settings {
        kv: publisher::Settings {
            layout,
            hashes,
            ..settings.kv
        },
        ..settings
    }
}

/// A request of any kind; many begin alike.
fn any(draw: &mut fastrand::Rng) -> (&'static str, String) {
    let family = draw.u32(0..6);
    let length = draw.u32(10..400);
    let text = format!("{family}: once upon a time there was a router. ").repeat(30);
    let text = &text[..draw.usize(40..text.len())];
    let salt = ["a", "b"][draw.usize(0..2)];
    let most = draw.u32(1..20);
    let body = match draw.u32(0..6) {
        0 | 1 => return ("/v1/completions", Prompt::new(family, length).body()),
        2 => {
            let salt = Some(salt);
            let prompt = Prompt::new(family, length);
            return ("/v1/completions", Prompt { salt, ..prompt }.body());
        }
        3 => {
            let body = json!({"model": "sim", "prompt": text, "max_tokens": most});
            return ("/v1/completions", body.to_string());
        }
        4 => {
            let messages = json!([{"role": "user", "content": text}]);
            json!({"model": "sim", "messages": messages, "max_tokens": most, "stream": draw.bool()})
        }
        _ => {
            let body = json!({"model": "sim", "input": text, "max_output_tokens": most});
            return ("/v1/responses", body.to_string());
        }
    };
    ("/v1/chat/completions", body.to_string())
}

/// A hundred requests of all kinds, six at a time, half of them past the router.
async fn mixed(followed: &Followed, draw: &mut fastrand::Rng) {
    for _ in 0..17 {
        let mut running = tokio::task::JoinSet::new();
        for _ in 0..6 {
            let engines = &followed.cluster.engines;
            let at = if draw.bool() {
                followed.cluster.router.api
            } else {
                engines[draw.usize(..engines.len())].address
            };
            let (path, body) = any(draw);
            running.spawn(async move {
                let answer = client::post(at, path, body).await;
                assert_eq!(answer.status, 200, "{}", answer.text());
            });
        }
        for done in running.join_all().await {
            let () = done;
        }
    }
}

async fn knows_every_block(wire: Wire, layout: Layout, hashes: Hashes) {
    let seed = fastrand::u64(..);
    let what = format!("{wire:?}, {layout:?}, {hashes:?}, seed {seed}");
    let _last = super::followed::Last(what.clone());
    let mut draw = fastrand::Rng::with_seed(seed);
    let followed = Followed::start(wire, vec![written(layout, hashes); 2]).await;
    mixed(&followed, &mut draw).await;
    followed.all_equal().await;
    let truths = [
        followed.engine(0).cache_contents(0).await,
        followed.engine(1).cache_contents(0).await,
    ];
    for (place, truth) in truths.iter().enumerate() {
        let status = followed.status(place, 0).await;
        assert_eq!(status["state"], "live", "{what}: {status:#}");
        let removed = status["removed_blocks"].as_u64().unwrap();
        assert!(removed > 0, "{what}: nothing was evicted");
        assert_eq!(status["unknown_removals"], 0, "{what}");
        if wire != Wire::Bridge {
            let last = truth.last_sequence.unwrap();
            followed.shows(place, 0, "last_sequence", last).await;
        }
        assert!(!held(truth).is_empty());
    }
    let mut to_the_holder = 0;
    for family in 0..6 {
        for salt in [None, Some("a"), Some("b")] {
            let prompt = Prompt {
                salt,
                ..Prompt::new(family, 405)
            };
            let expected = truths.each_ref().map(|truth| prompt.held_by(truth));
            let row = |place: usize| Row {
                worker: format!("w{place}"),
                tokens: expected[place],
                known_by: "exact".to_owned(),
            };
            let known = [row(0), row(1)];
            // What was routed counts as cached for some time, until its events must have passed.
            let mut rows = followed.explain(&prompt).await;
            for _ in 0..200 {
                if rows == known {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
                rows = followed.explain(&prompt).await;
            }
            assert_eq!(rows, known, "{what}, {family}, {salt:?}");
            to_the_holder += u32::from(expected.iter().any(|tokens| *tokens > 0));
        }
    }
    assert!(to_the_holder > 0, "{what}: nothing of any prompt is held");
}

#[tokio::test]
async fn every_block_is_known_over_zeromq_as_maps() {
    knows_every_block(Wire::Announced, Layout::Map, Hashes::Int).await;
    knows_every_block(Wire::Zmq, Layout::Map, Hashes::Bytes).await;
}

#[tokio::test]
async fn every_block_is_known_over_zeromq_as_arrays() {
    knows_every_block(Wire::Zmq, Layout::Array, Hashes::Int).await;
    knows_every_block(Wire::Announced, Layout::Array, Hashes::Bytes).await;
}

#[tokio::test]
async fn every_block_is_known_through_a_bridge_as_maps() {
    knows_every_block(Wire::Bridge, Layout::Map, Hashes::Int).await;
    knows_every_block(Wire::Bridge, Layout::Map, Hashes::Bytes).await;
}

#[tokio::test]
async fn every_block_is_known_through_a_bridge_as_arrays() {
    knows_every_block(Wire::Bridge, Layout::Array, Hashes::Int).await;
    knows_every_block(Wire::Bridge, Layout::Array, Hashes::Bytes).await;
}

#[tokio::test]
async fn a_prompt_goes_to_the_engine_that_tells_that_it_holds_it() {
    for wire in [Wire::Announced, Wire::Zmq, Wire::Bridge] {
        let followed = Followed::start(wire, vec![telling(); 3]).await;
        // The router has no part in it.
        Prompt::new(1, 100).to(followed.engine(1)).await;
        Prompt::new(1, 200).to(followed.engine(2)).await;
        Prompt::new(2, 100).to(followed.engine(0)).await;
        followed.all_equal().await;
        for (family, worker, tokens) in [(1, "w2", 192), (2, "w0", 96)] {
            let decided = followed.post(&Prompt::new(family, 205)).await;
            assert_eq!(decided.worker, worker, "{wire:?}");
            assert_eq!(decided.reason, "longest_prefix", "{wire:?}");
            assert_eq!(decided.cached_tokens, tokens, "{wire:?}");
        }
    }
}

#[tokio::test]
async fn a_reset_cache_is_known_to_be_empty() {
    for wire in BOTH {
        let followed = Followed::start(wire, vec![telling()]).await;
        let prompt = Prompt::new(1, 100);
        prompt.to(followed.engine(0)).await;
        followed.equals(0, 0).await;
        assert_eq!(followed.explain(&prompt).await[0].tokens, 96, "{wire:?}");
        followed.engine(0).reset().await;
        // An engine publishes it with its next step.
        Prompt::new(2, 50).to(followed.engine(0)).await;
        followed.equals(0, 0).await;
        assert_eq!(followed.explain(&prompt).await[0].tokens, 0, "{wire:?}");
        let status = followed.status(0, 0).await;
        assert_eq!(status["state"], "live", "{wire:?}: {status:#}");
    }
}

#[tokio::test]
async fn adapters_and_salts_share_nothing_with_each_other() {
    for wire in BOTH {
        let settings = Settings {
            models: vec!["sim".to_owned(), "sql".to_owned()],
            ..telling()
        };
        let followed = Followed::start(wire, vec![settings]).await;
        let variants = [
            ("sim", None, 50),
            ("sim", Some("a"), 90),
            ("sim", Some("b"), 0),
            ("sql", None, 130),
            ("sql", Some("a"), 0),
            ("sql", Some("b"), 170),
        ];
        let variant = |model, salt, length| Prompt {
            model,
            salt,
            ..Prompt::new(1, length)
        };
        for (model, salt, length) in variants {
            if length > 0 {
                variant(model, salt, length).to(followed.engine(0)).await;
            }
        }
        followed.equals(0, 0).await;
        for (model, salt, length) in variants {
            let rows = followed.explain(&variant(model, salt, 205)).await;
            let expected = u64::from(length / 16 * 16);
            assert_eq!(rows[0].tokens, expected, "{wire:?}, {model}, {salt:?}");
            assert!(rows[0].known_by == "exact", "{wire:?}, {model}, {salt:?}");
        }
    }
}

/// Two ranks on consecutive ports, as are their replays.
pub(super) async fn two_ranks(name: &str) -> Engine {
    two_ranks_of(name, telling()).await
}

pub(super) async fn two_ranks_of(name: &str, one: Settings) -> Engine {
    let settings = Settings {
        data_parallel_size: 2.try_into().unwrap(),
        kv: publisher::Settings::loopback(),
        ..one
    };
    Engine::here(name, settings).await
}

#[tokio::test]
async fn every_rank_has_its_tree_and_where_none_is_pinned_to_a_worker_counts_by_the_poorest() {
    for wire in BOTH {
        let unpinned = |config: &mut Config| config.requests.pin_ranks = PinRanks::Never;
        let followed = Followed::of(wire, vec![two_ranks("w0").await], unpinned).await;
        let engine = followed.engine(0);
        assert_eq!(engine.events.len(), 2);
        Prompt::new(1, 100).to_rank(engine, 0).await;
        Prompt::new(2, 200).to_rank(engine, 1).await;
        followed.all_equal().await;
        let tokens = async |family| followed.explain(&Prompt::new(family, 205)).await[0].tokens;
        assert_eq!([tokens(1).await, tokens(2).await], [0, 0], "{wire:?}");
        Prompt::new(1, 50).to_rank(engine, 1).await;
        Prompt::new(2, 205).to_rank(engine, 0).await;
        followed.all_equal().await;
        assert_eq!([tokens(1).await, tokens(2).await], [48, 192], "{wire:?}");
        for rank in 0..2 {
            let status = followed.status(0, rank).await;
            assert_eq!(status["state"], "live", "{wire:?}: {status:#}");
            let blocks = held(&engine.cache_contents(rank).await).len();
            followed.shows(0, rank, "blocks/gpu", blocks).await;
        }
    }
}
