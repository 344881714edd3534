//! SGLang's prefill and decode workers: whatever happens to one leg, the other is closed at once, and the client has an answer or
//! a clean error soon.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use warmroute::config::Config;
use warmroute::fleet::Role;
use warmroute::fleet::discovery::WorkerSpec;
use warmroute::fleet::events::{EventsSpec, From};
use warmroute::fleet::kv_transfer::Connector;
use warmroute::relay::prefill_decode::OnPrefillFailure;
use warmroute::routing::Policy;

use super::failures::said;
use super::paths::{decision, one_pair_in_a_zone};
use crate::client::{self, Answer};
use crate::cluster::{self, Router, eventually};
use crate::patience::too_long;
use crate::sglang_engine::{Fault, Rooms, SglangEngine};

const PATH: &str = "/v1/chat/completions";

struct Pairs {
    prefills: Vec<SglangEngine>,
    decodes: Vec<SglangEngine>,
    router: Router,
    rooms: Arc<Rooms>,
}

impl Pairs {
    async fn start(prefills: usize, decodes: usize) -> Self {
        Self::with(prefills, decodes, &[], |_| {}).await
    }

    async fn with(
        prefills: usize,
        decodes: usize,
        unified: &[&SglangEngine],
        change: impl FnOnce(&mut Config),
    ) -> Self {
        Self::with_ranks((prefills, 1), (decodes, 1), unified, change).await
    }

    /// A fleet of so many workers, each with so many ranks.
    async fn with_ranks(
        (prefills, prefill_ranks): (usize, u64),
        (decodes, decode_ranks): (usize, u64),
        unified: &[&SglangEngine],
        change: impl FnOnce(&mut Config),
    ) -> Self {
        let rooms = Arc::new(Rooms::default());
        let mut engines = Vec::new();
        for (role, count, ranks) in [
            (Role::Prefill, prefills, prefill_ranks),
            (Role::Decode, decodes, decode_ranks),
        ] {
            for _ in 0..count {
                engines.push(SglangEngine::with_ranks(role, &rooms, ranks).await);
            }
        }
        let decode_engines = engines.split_off(prefills);
        let spec = |engine: &SglangEngine, role| WorkerSpec {
            url: format!("http://{}", engine.address),
            role: Some(role),
            bootstrap: format!("http://{}", engine.bootstrap),
            ..WorkerSpec::default()
        };
        let mut config = cluster::config();
        config.prefill_decode.connector = Some(Connector::Sglang);
        // Longer than a test waits: what ends before that ends because a leg has.
        config.prefill_decode.advanced.transfer_timeout = 10 * too_long();
        let of_role = |of: &[SglangEngine], role| {
            let specs = of.iter().map(|engine| spec(engine, role));
            specs.collect::<Vec<_>>()
        };
        config.workers = of_role(&engines, Role::Prefill);
        config
            .workers
            .extend(of_role(&decode_engines, Role::Decode));
        let whole = unified.iter().map(|engine| WorkerSpec {
            bootstrap: String::new(),
            ..spec(engine, Role::Both)
        });
        config.workers.extend(whole);
        change(&mut config);
        let router = Router::here(&config).await;
        Self {
            prefills: engines,
            decodes: decode_engines,
            router,
            rooms,
        }
    }

    /// Waits until requests are split.
    async fn up(self) -> Self {
        eventually("requests are split", async || {
            self.ask(&chat("up", false)).await.status == 200
        })
        .await;
        self
    }

    async fn ask(&self, body: &Value) -> Answer {
        client::send(self.router.api, "POST", PATH, &[], body.to_string()).await
    }

    fn open_legs(&self) -> usize {
        let engines = self.prefills.iter().chain(&self.decodes);
        engines.map(SglangEngine::open).sum()
    }

    async fn nothing_stays_open(&self) {
        eventually("both legs are closed", async || self.open_legs() == 0).await;
    }
}

fn chat(text: &str, is_stream: bool) -> Value {
    json!({"model": "tiny", "messages": [{"role": "user", "content": text}], "stream": is_stream})
}

#[tokio::test]
async fn both_legs_are_the_clients_request_in_the_same_new_room() {
    let pairs = Pairs::start(1, 1).await.up().await;
    let body = chat("hello", true);
    for is_stream in [false, true] {
        let answer = pairs.ask(&chat("hello", is_stream)).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(said(answer.text()), "together with another");
    }
    let (prefill, decode) = (pairs.prefills[0].bodies(), pairs.decodes[0].bodies());
    let legs = [prefill.last().unwrap(), decode.last().unwrap()];
    assert_eq!(legs[0], legs[1]);
    let leg = legs[0].as_object().unwrap();
    assert_eq!(leg["bootstrap_host"], "127.0.0.1");
    assert_eq!(leg["bootstrap_port"], pairs.prefills[0].bootstrap.port());
    assert!(leg["bootstrap_room"].as_u64().unwrap() <= i64::MAX as u64);
    assert_eq!(leg["messages"], body["messages"]);
    let used = pairs.rooms.used.lock().clone();
    let rooms: BTreeSet<u64> = used.iter().copied().collect();
    assert_eq!(rooms.len(), used.len());
    pairs.nothing_stays_open().await;
}

#[tokio::test]
async fn a_prefill_worker_that_dies_ends_the_decode_leg_at_once() {
    for is_stream in [false, true] {
        let pairs = Pairs::start(1, 1).await.up().await;
        pairs.prefills[0].fault(Fault::Hang);
        let body = chat("x", is_stream);
        let asking = pairs.ask(&body);
        let killing = async {
            eventually("both legs wait", async || pairs.open_legs() == 2).await;
            pairs.prefills[0].kill();
        };
        let (answer, ()) = tokio::join!(asking, killing);
        assert!((502..=503).contains(&answer.status), "{}", answer.text());
        pairs.nothing_stays_open().await;
    }
}

#[tokio::test]
async fn a_decode_worker_that_dies_ends_the_prefill_leg_at_once() {
    let pairs = Pairs::start(1, 1).await.up().await;
    pairs.decodes[0].fault(Fault::Hang);
    let body = chat("x", true);
    let asking = pairs.ask(&body);
    let killing = async {
        eventually("both legs wait", async || pairs.open_legs() == 2).await;
        pairs.decodes[0].kill();
    };
    let (answer, ()) = tokio::join!(asking, killing);
    assert!((502..=503).contains(&answer.status), "{}", answer.text());
    pairs.nothing_stays_open().await;
}

#[tokio::test]
async fn another_pair_takes_a_request_in_a_new_room_when_a_leg_dies() {
    let pairs = Pairs::start(2, 2).await.up().await;
    for engine in [&pairs.prefills[0], &pairs.decodes[1]] {
        engine.kill();
        for round in 0..10 {
            let answer = pairs
                .ask(&chat(&format!("round {round}"), round % 2 == 0))
                .await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            assert_eq!(said(answer.text()), "together with another");
        }
    }
    let used = pairs.rooms.used.lock().clone();
    let rooms: BTreeSet<u64> = used.iter().copied().collect();
    assert_eq!(rooms.len(), used.len());
    pairs.nothing_stays_open().await;
}

#[tokio::test]
async fn a_failed_transfer_is_tried_again_before_anything_goes_to_the_client() {
    let pairs = Pairs::start(1, 2).await.up().await;
    pairs.decodes[0].fault(Fault::Transfer(Duration::from_millis(20)));
    for round in 0..10 {
        let answer = pairs
            .ask(&chat(&format!("round {round}"), round % 2 == 0))
            .await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(said(answer.text()), "together with another");
        assert!(!answer.text().contains("KVTransferError"));
    }
    pairs.nothing_stays_open().await;
}

#[tokio::test]
async fn an_only_pair_whose_transfer_fails_is_tried_again() {
    let pairs = Pairs::with(1, 1, &[], |config| config.requests.max_attempts = 3);
    let pairs = pairs.await.up().await;
    pairs.decodes[0].fault(Fault::Transfer(Duration::from_millis(20)));
    for is_stream in [false, true] {
        let before = pairs.decodes[0].bodies().len();
        let answer = pairs.ask(&chat("x", is_stream)).await;
        assert!(answer.status >= 500, "{}", answer.text());
        assert_eq!(pairs.decodes[0].bodies().len(), before + 3);
        pairs.nothing_stays_open().await;
    }
}

#[tokio::test]
async fn a_whole_worker_takes_a_request_whose_only_prefill_worker_has_failed() {
    let whole = SglangEngine::start(Role::Both, &Arc::default()).await;
    let pairs = Pairs::with(1, 2, &[&whole], |config| {
        config.prefill_decode.on_prefill_failure = OnPrefillFailure::Fail;
        config.routing.policy = Policy::RoundRobin;
    })
    .await
    .up()
    .await;
    let legs = || pairs.decodes.iter().map(|decode| decode.bodies().len());
    eventually("all are used", async || {
        pairs.ask(&chat("up", false)).await;
        legs().all(|legs| legs > 0) && !whole.bodies().is_empty()
    })
    .await;
    for decode in &pairs.decodes {
        decode.fault(Fault::Transfer(Duration::from_millis(20)));
    }
    let before: usize = legs().sum();
    for round in 0..6 {
        let asked: usize = legs().sum();
        let body = chat(&format!("round {round}"), round % 2 == 0);
        let answer = pairs.ask(&body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(said(answer.text()), "alone");
        assert!(legs().sum::<usize>() <= asked + 1, "one attempt as a pair");
    }
    assert!(legs().sum::<usize>() > before, "none was sent to a pair");
    pairs.nothing_stays_open().await;
}

#[tokio::test]
async fn a_whole_answer_goes_on_without_the_prefill_worker_whose_blocks_were_fetched() {
    let pairs = Pairs::start(2, 1).await.up().await;
    let decode = &pairs.decodes[0];
    let rows = async |role: &str| {
        let page = client::get(pairs.router.admin, "/fleet").await.json();
        let workers = page["workers"].as_array().unwrap().clone();
        let of_role = workers.into_iter().filter(|row| row["role"] == role);
        of_role.collect::<Vec<_>>()
    };
    eventually("both prefill workers are up", async || {
        let prefills = rows("prefill").await;
        prefills.iter().all(|row| row["health"] == "up")
    })
    .await;
    decode.fault(Fault::Silent);
    let (before, legs) = (pairs.prefills[0].bodies().len(), decode.bodies().len());
    let asked = chat("x", false);
    let goes_on = async {
        eventually("the decode worker alone has it", async || {
            let prefills = rows("prefill").await;
            decode.open() == 1
                && pairs.open_legs() == 1
                && prefills.iter().all(|row| row["requests"] == 0)
        })
        .await;
        let is_first = pairs.prefills[0].bodies().len() > before;
        pairs.prefills[usize::from(!is_first)].kill();
        eventually("the prefill worker is down", async || {
            let prefills = rows("prefill").await;
            prefills.iter().any(|row| row["health"] == "down")
        })
        .await;
        decode.fault(Fault::None);
        let other = pairs.ask(&chat("another", false)).await;
        assert_eq!(other.status, 200, "{}", other.text());
    };
    tokio::select! {
        _ = pairs.ask(&asked) => panic!("the decode worker does not answer"),
        () = goes_on => {}
    }
    assert_eq!(decode.bodies().len(), legs + 2, "it was begun again");
    pairs.nothing_stays_open().await;
}

#[tokio::test]
async fn a_leg_that_is_refused_ends_the_other() {
    let pairs = Pairs::start(1, 1).await.up().await;
    for (status, is_stream) in [(503, false), (503, true), (500, false)] {
        for engine in [&pairs.prefills[0], &pairs.decodes[0]] {
            engine.fault(Fault::Status(status));
            let answer = pairs.ask(&chat("x", is_stream)).await;
            assert!(answer.status >= 500, "{}", answer.text());
            pairs.nothing_stays_open().await;
            engine.fault(Fault::None);
        }
        eventually("the pair is used again", async || {
            pairs.ask(&chat("again", false)).await.status == 200
        })
        .await;
    }
}

#[tokio::test]
async fn a_prompt_that_is_too_long_is_refused_once_by_the_engine() {
    let pairs = Pairs::start(1, 1).await.up().await;
    let before = pairs.decodes[0].bodies().len();
    for is_stream in [false, true] {
        let answer = pairs.ask(&chat(&"long ".repeat(1_000), is_stream)).await;
        assert_eq!(answer.status, 400, "{}", answer.text());
        assert!(
            answer.text().contains("context length"),
            "{}",
            answer.text()
        );
    }
    assert_eq!(pairs.decodes[0].bodies().len(), before + 2);
    pairs.nothing_stays_open().await;
}

#[tokio::test]
async fn what_the_engines_refuse_within_a_stream_is_the_clients_answer() {
    let pairs = Pairs::start(1, 1).await.up().await;
    let engines = [&pairs.prefills[0], &pairs.decodes[0]];
    // Whichever of the two says so first.
    for faults in [[true, true], [false, true]] {
        let before = pairs.decodes[0].bodies().len();
        for (engine, refuses) in engines.into_iter().zip(faults) {
            engine.fault(if refuses { Fault::Refusal } else { Fault::None });
        }
        for _ in 0..4 {
            let answer = pairs.ask(&chat("x", true)).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            assert!(
                answer.text().contains("as the test wants it"),
                "{}",
                answer.text()
            );
        }
        assert_eq!(pairs.decodes[0].bodies().len(), before + 4);
        pairs.nothing_stays_open().await;
    }
    let page = client::get(pairs.router.admin, "/fleet").await.json();
    for row in page["workers"].as_array().unwrap() {
        assert_eq!(row["circuit_breaker"], "closed");
        let of_transfers = &row["kv_transfers"]["circuit_breaker"];
        assert!(of_transfers.is_null() || of_transfers == "closed");
    }
    for engine in engines {
        engine.fault(Fault::None);
    }
    let answer = pairs.ask(&chat("x", true)).await;
    assert_eq!(said(answer.text()), "together with another");
}

#[tokio::test]
async fn a_client_that_leaves_closes_both_legs() {
    let pairs = Pairs::start(1, 1).await.up().await;
    pairs.decodes[0].fault(Fault::Hang);
    for is_stream in [false, true] {
        let body = chat("x", is_stream).to_string();
        let asking = client::try_open(pairs.router.api, "POST", PATH, &[], body);
        tokio::select! {
            _ = asking => panic!("the decode worker does not answer"),
            () = eventually("both legs wait", async || pairs.open_legs() == 2) => {}
        }
        pairs.nothing_stays_open().await;
    }
}

#[tokio::test]
async fn a_prompt_whose_blocks_were_fetched_counts_at_its_prefill_worker_no_more() {
    let pairs = Pairs::start(1, 1).await.up().await;
    pairs.decodes[0].fault(Fault::Silent);
    let fields = ["requests", "queued_tokens", "context_tokens"];
    let counts = async || {
        let page = client::get(pairs.router.admin, "/fleet").await.json();
        let workers = page["workers"].as_array().unwrap().clone();
        ["prefill", "decode"].map(|role| {
            let row = workers.iter().find(|row| row["role"] == role).unwrap();
            fields.map(|field| row[field].as_u64().unwrap())
        })
    };
    for is_stream in [false, true] {
        let body = chat("x", is_stream).to_string();
        let asking = client::try_open(pairs.router.api, "POST", PATH, &[], body);
        let is_over_at_prefill = async || {
            let [prefill, decode] = counts().await;
            decode[2] > 0 && prefill == [0; 3]
        };
        tokio::select! {
            _ = asking => panic!("the decode worker does not answer"),
            () = eventually("the decode worker alone counts it", is_over_at_prefill) => {}
        }
        pairs.nothing_stays_open().await;
        eventually("neither counts it", async || counts().await == [[0; 3]; 2]).await;
    }
}

#[tokio::test]
async fn a_request_that_cannot_be_split_is_refused_with_the_reason_or_goes_to_a_whole_worker() {
    let pairs = Pairs::start(1, 1).await.up().await;
    let mut several = chat("x", false);
    several["n"] = json!(2);
    let answer = pairs.ask(&several).await;
    assert_eq!((answer.status, &*answer.code()), (400, "not_disaggregated"));
    assert!(
        answer.text().contains("several answers"),
        "{}",
        answer.text()
    );

    let whole = SglangEngine::start(Role::Both, &Arc::default()).await;
    let pairs = Pairs::with(1, 1, &[&whole], |_| {}).await.up().await;
    eventually("the whole worker is up", async || {
        let answer = pairs.ask(&several).await;
        answer.status == 200 && said(answer.text()) == "alone"
    })
    .await;
    assert_eq!(whole.bodies()[0]["bootstrap_room"], Value::Null);
}

#[tokio::test]
async fn without_a_registered_prefill_worker_nothing_is_sent_and_the_error_says_why() {
    let pairs = Pairs::start(1, 1).await;
    pairs.prefills[0].set_registered(false);
    eventually("the decode worker is up", async || {
        pairs
            .ask(&chat("x", false))
            .await
            .text()
            .contains("compute no prompts")
    })
    .await;
    assert_eq!(pairs.decodes[0].bodies().len(), 0);
    pairs.prefills[0].set_registered(true);
    let pairs = pairs.up().await;
    assert!(pairs.prefills[0].asked("/route?prefill_dp_rank=-1") > 0);
}

#[tokio::test]
async fn a_decode_worker_without_a_prefill_worker_in_its_zone_gets_nothing() {
    for policy in [Policy::CacheAware, Policy::RoundRobin] {
        let pairs = Pairs::with(2, 2, &[], |config| {
            one_pair_in_a_zone(config);
            config.routing.policy = policy;
        });
        let pairs = pairs.await.up().await;
        for round in 0..12 {
            let body = chat(&format!("round {round}"), round % 2 == 0);
            let answer = pairs.ask(&body).await;
            assert_eq!(answer.status, 200, "{policy:?}: {}", answer.text());
        }
        assert_eq!(pairs.prefills[0].bodies().len(), 0, "{policy:?}");
        assert_eq!(pairs.decodes[1].bodies().len(), 0, "{policy:?}");
    }
}

#[tokio::test]
async fn one_token_and_completions_are_split_too() {
    let pairs = Pairs::start(1, 1).await.up().await;
    let body = json!({"model": "tiny", "prompt": "x", "max_tokens": 1}).to_string();
    let answer = client::send(pairs.router.api, "POST", "/v1/completions", &[], body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(said(answer.text()), "together with another");
}

/// KV events of so many ranks, of which none ever comes: their caches are predicted.
fn silent(ranks: u32) -> EventsSpec {
    EventsSpec {
        from: From::Zmq,
        endpoint: "tcp://127.0.0.1:1".to_owned(),
        ranks,
        ..EventsSpec::default()
    }
}

#[tokio::test]
async fn a_prompt_returns_to_the_prefill_rank_that_cached_it_by_its_room_and_a_retry_takes_another_room()
 {
    let pairs = Pairs::with_ranks((1, 3), (2, 2), &[], |config| {
        config.workers[0].events = Some(silent(3));
        config.workers[1].events = Some(silent(2));
        config.workers[2].events = Some(silent(2));
    })
    .await
    .up()
    .await;
    let prefill = &pairs.prefills[0];
    let mut seen = BTreeSet::new();
    for family in 0..8 {
        let prompt = format!("{family} is where it starts. ").repeat(40);
        let mut first = None;
        for round in 0..3 {
            if round == 2 {
                pairs.decodes[0].fault(Fault::Transfer(Duration::ZERO));
            }
            let answer = pairs.ask(&chat(&prompt, round == 1)).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            let body = prefill.bodies().pop().unwrap();
            let room = body["bootstrap_room"].as_u64().unwrap();
            let rank = prefill.pinned().pop().unwrap().unwrap();
            assert_eq!(room % 3, rank);
            assert_eq!(body["disagg_prefill_dp_rank"], rank);
            assert_eq!(*first.get_or_insert(rank), rank, "{family}, round {round}");
            seen.insert(rank);
        }
        pairs.decodes[0].fault(Fault::None);
    }
    assert!(seen.len() > 1, "{seen:?}");
    let decodes = || pairs.decodes.iter();
    for decode in decodes() {
        for (body, pinned) in decode.bodies().iter().zip(decode.pinned()) {
            let room = body["bootstrap_room"].as_u64().unwrap();
            assert_eq!(body["disagg_prefill_dp_rank"], room % 3);
            assert!(pinned.is_some_and(|rank| rank < 2), "{pinned:?}");
        }
    }
    // Every attempt had a room of its own.
    let used = pairs.rooms.used.lock().clone();
    let rooms: BTreeSet<u64> = used.iter().copied().collect();
    assert_eq!(rooms.len(), used.len());
    assert!(
        used.len() > 24,
        "some transfer failed and was retried: {}",
        used.len()
    );
    pairs.nothing_stays_open().await;
}

#[tokio::test]
async fn a_decode_worker_that_refuses_its_rank_gets_both_legs_again_without_one() {
    let pairs = Pairs::with_ranks((1, 2), (1, 1), &[], |config| {
        config.workers[0].events = Some(silent(2));
        config.workers[1].events = Some(silent(8));
    })
    .await
    .up()
    .await;
    for round in 0..12 {
        let answer = pairs
            .ask(&chat(&format!("round {round}"), round % 2 == 0))
            .await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(said(answer.text()), "together with another");
    }
    assert_eq!(pairs.decodes[0].pinned().pop().unwrap(), None);
    assert!(pairs.prefills[0].pinned().pop().unwrap().is_some());
    pairs.nothing_stays_open().await;
}

#[tokio::test]
async fn how_fast_a_prefill_worker_is_is_learnt_from_the_first_tokens_of_streams() {
    let pairs = Pairs::start(1, 1).await.up().await;
    pairs.prefills[0].fault(Fault::Slow(Duration::from_millis(100)));
    // An answer that is not streamed comes at its end.
    let whole = chat(&"not streamed ".repeat(200), false);
    let page = async || {
        let page = client::get(pairs.router.admin, "/fleet").await.json();
        let workers = page["workers"].as_array().unwrap().clone();
        let of_role = |role: &str| {
            let found = workers.iter().find(|row| row["role"] == role);
            found.unwrap()["prefill_rate"].clone()
        };
        [of_role("prefill"), of_role("decode")]
    };
    let (mut tokens, mut longest) = (0.0, 0.1);
    let mut rates = page().await;
    assert!(rates[0].is_null(), "{rates:?}");
    let until = Instant::now() + Duration::from_secs(40);
    for number in 0.. {
        // Different from the start, so that nothing is predicted to be cached.
        let prompt = format!("{number} ").repeat(900);
        let headers = [("x-warmroute-decision", "1")];
        let body = chat(&prompt, true).to_string();
        let asked = Instant::now();
        let answer = client::send(pairs.router.api, "POST", PATH, &headers, body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        longest = asked.elapsed().as_secs_f64().max(longest);
        let of_prompt = decision(&answer, "prompt_tokens").parse::<f64>().unwrap();
        tokens = of_prompt.max(tokens);
        if number % 16 == 0 {
            assert_eq!(pairs.ask(&whole).await.status, 200);
        }
        rates = page().await;
        let rate = rates[0]["tokens_per_second"].as_f64();
        let is_known = rate.is_some_and(|rate| rate <= tokens / 0.1 * 1.4);
        if is_known || Instant::now() > until {
            break;
        }
    }
    // Nearly all of the time between a request and its first token is the prefill worker's. A part of it counts as the time of a
    // step, since prompts of one length do not show which is which.
    let rate = rates[0]["tokens_per_second"].as_f64().unwrap();
    let real = tokens / 0.1;
    // A busy machine takes longer, which is time before a first token, too.
    assert!(
        (tokens / longest / 3.0..=real * 1.4).contains(&rate),
        "{rate}, not {real}"
    );
    assert_eq!(rates[0]["source"], "learnt");
    assert!(
        rates[1].is_null(),
        "the decode worker computes no prompts: {rates:?}"
    );
}
