//! Whatever fails between two engines: the client has an answer or a clean error, no engine ever answers to blocks that are not its
//! prompt's, and nothing stays pinned.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::{Value, json};
use warmroute::config::Config;
use warmroute::relay::prefill_decode::OnPrefillFailure;
use warmroute::routing::Policy;
use warmroute::sim::fault::{Faults, TransferFaults};
use warmroute::sim::worker::{Connector, Role, Settings, TransferStats};

use crate::client::{self, Answer};
use crate::cluster::{Cluster, Engine, chat, eventually, fast, router_connector, with_role};
use crate::failures::{hang, post_from, refuse, several_clients, unnoticed};
use crate::refused_keys::with_keys;

/// Long enough for a fetch on a busy machine, and short enough to wait for its end.
const LEASE: Duration = Duration::from_secs(10);
/// Requests that may be needed until one meets the engine that fails.
const ROUNDS: usize = 20;

pub(crate) const BOTH: [Connector; 2] = [Connector::Nixl, Connector::Mooncake];

/// Runs a test with both connectors at a time: most of it waits until leases end.
pub(super) async fn with_both(test: impl AsyncFn(Connector)) {
    let [one, other] = BOTH;
    tokio::join!(test(one), test(other));
}

pub(crate) fn engine(role: Role, connector: Connector) -> Settings {
    let mut engine = with_role(fast(), connector, role);
    engine.transfer.lease_ms = Some(LEASE.as_millis() as u64);
    engine
}

/// Prefill engines p0, p1 ..., then decode engines d0, d1 ..., behind a router that splits whatever it can.
pub(super) struct Fleet {
    pub(super) cluster: Cluster,
    prefills: usize,
    /// How often it was asked, so that no two prompts are the same.
    asked: usize,
}

/// One request of each kind: path, body, whether it streams.
fn kinds(salt: usize, max_tokens: usize) -> Vec<(&'static str, String, bool)> {
    let of = |stream: bool| {
        let text = |of: &str| format!("{of} {salt} {stream}: all that was said before. ").repeat(8);
        let chat = chat(&text("chat"), max_tokens, stream);
        let completion = json!({
            "model": "sim", "prompt": text("text"), "max_tokens": max_tokens, "stream": stream});
        let response = json!({
            "model": "sim", "input": text("response"), "max_output_tokens": max_tokens, "stream": stream});
        [
            ("/v1/chat/completions", chat, stream),
            ("/v1/completions", completion.to_string(), stream),
            ("/v1/responses", response.to_string(), stream),
        ]
    };
    of(false).into_iter().chain(of(true)).collect()
}

/// All text of an answer, whole or streamed.
pub(super) fn said(answer: &str) -> String {
    let of = |value: &Value| {
        let choice = &value["choices"][0];
        let texts = [
            &choice["message"]["content"],
            &choice["delta"]["content"],
            &choice["text"],
            &value["output"][0]["content"][0]["text"],
        ];
        let delta = (value["type"] == "response.output_text.delta").then(|| &value["delta"]);
        let mut texts = texts.into_iter().chain(delta);
        texts.find_map(Value::as_str).unwrap_or_default().to_owned()
    };
    match serde_json::from_str::<Value>(answer) {
        Ok(whole) => of(&whole),
        Err(_) => {
            let data = answer
                .lines()
                .filter_map(|line| line.strip_prefix("data: "));
            let events = data.filter_map(|data| serde_json::from_str::<Value>(data).ok());
            events.map(|event| of(&event)).collect()
        }
    }
}

pub(super) fn transfer_faults(transfer: TransferFaults) -> Faults {
    Faults {
        transfer,
        ..Faults::default()
    }
}

/// The connection breaks before anything of an answer.
fn reset() -> Faults {
    Faults {
        cut_after_tokens: Some(0),
        ..Faults::default()
    }
}

impl Fleet {
    pub(super) async fn start(
        connector: Connector,
        (prefills, decodes): (usize, usize),
        change: impl FnOnce(&mut Config),
    ) -> Self {
        Self::of(connector, (prefills, decodes), |settings| settings, change).await
    }

    pub(super) async fn of(
        connector: Connector,
        (prefills, decodes): (usize, usize),
        adjust: impl Fn(Settings) -> Settings,
        change: impl FnOnce(&mut Config),
    ) -> Self {
        let mut engines = Vec::new();
        for place in 0..prefills {
            let settings = adjust(engine(Role::Prefill, connector));
            engines.push(Engine::here(&format!("p{place}"), settings).await);
        }
        for place in 0..decodes {
            let settings = adjust(engine(Role::Decode, connector));
            engines.push(Engine::here(&format!("d{place}"), settings).await);
        }
        Self::with(connector, prefills, engines, change).await
    }

    /// As [`Fleet::start`], with engines that are processes of their own.
    async fn children(
        connector: Connector,
        (prefills, decodes): (usize, usize),
        adjust: impl Fn(Settings) -> Settings,
    ) -> Self {
        let prefill = adjust(engine(Role::Prefill, connector));
        let decode = adjust(engine(Role::Decode, connector));
        let ps = (0..prefills).map(|place| Engine::child(&format!("p{place}"), &prefill));
        let ds = (0..decodes).map(|place| Engine::child(&format!("d{place}"), &decode));
        let engines = ps.chain(ds).collect();
        Self::with(connector, prefills, engines, unnoticed).await
    }

    async fn with(
        connector: Connector,
        prefills: usize,
        engines: Vec<Engine>,
        change: impl FnOnce(&mut Config),
    ) -> Self {
        let cluster = Cluster::with(engines, |config| {
            split(config, connector);
            change(config);
        })
        .await;
        let fleet = Self {
            cluster,
            prefills,
            asked: 0,
        };
        fleet.pairs_up().await;
        fleet
    }

    /// Waits until a request is split, which with Mooncake takes a look at each bootstrap page.
    async fn pairs_up(&self) {
        eventually("requests are disaggregated", async || {
            let body = chat(&format!("{:032x} ", fastrand::u128(..)).repeat(8), 2, false);
            let headers = [("x-warmroute-decision", "1")];
            let (api, path) = (self.cluster.router.api, "/v1/chat/completions");
            let answer = client::send(api, "POST", path, &headers, body).await;
            answer
                .header("x-warmroute-decision")
                .contains("disaggregated=yes")
        })
        .await;
    }

    pub(super) fn prefill(&self, place: usize) -> &Engine {
        &self.cluster.engines[place]
    }

    pub(super) fn decode(&self, place: usize) -> &Engine {
        &self.cluster.engines[self.prefills + place]
    }

    pub(super) async fn kill(&mut self, name: &str) {
        let mut engines = self.cluster.engines.iter_mut();
        let engine = engines.find(|engine| engine.name == name).unwrap();
        engine.kill().await;
    }

    async fn sum(&self, of: impl Fn(&TransferStats) -> u64) -> u64 {
        let mut sum = 0;
        for engine in &self.cluster.engines {
            sum += of(&engine.kv_transfers().await);
        }
        sum
    }

    async fn outcome(&self, outcome: &str) -> f64 {
        let label = format!("outcome=\"{outcome}\"");
        self.cluster
            .metric("warmroute_kv_transfers_total", &[&label])
            .await
    }

    /// The answer to a chat with a prompt of its own.
    async fn ask(&self, number: usize) -> Answer {
        let text = format!("request {number}: all that was said before. ").repeat(8);
        let body = chat(&text, 2, false);
        self.cluster.post("/v1/chat/completions", body).await
    }

    fn kinds(&mut self, max_tokens: usize) -> Vec<(&'static str, String, bool)> {
        self.asked += 1;
        kinds(self.asked, max_tokens)
    }

    /// The answer is the one that an engine gives which is alone.
    async fn is_answered(&self, what: &str, path: &str, body: &str) -> Answer {
        let answer = self.cluster.post(path, body.to_owned()).await;
        let text = answer.text();
        assert_eq!(answer.status, 200, "{what}: {path}: {text}");
        assert!(!client::has_error(text), "{what}: {path}: {text}");
        assert_eq!(
            said(text),
            expected(path, body).await,
            "{what}: {path}: {text}"
        );
        assert!(!text.contains("remote_"), "{what}: {path}: {text}");
        answer
    }

    /// Requests of all kinds at a time are answered as ever, until one of each kind has met the engine that fails.
    async fn each_is_answered(&mut self, what: &str, engine: usize) {
        let mut met: BTreeSet<String> = BTreeSet::new();
        for round in 0..ROUNDS {
            let kinds = self.kinds(3);
            // Each time another one first, for workers take turns.
            let ask = |place: usize| {
                let (path, body, _) = &kinds[(round + place) % kinds.len()];
                self.is_answered(what, path, body)
            };
            tokio::join!(ask(0), ask(1), ask(2), ask(3), ask(4), ask(5));
            met.extend(self.legs(engine, self.asked).await);
            if met.len() == 6 {
                return self.is_clean(what).await;
            }
        }
        panic!("{what}: it was met by no others than {met:?}");
    }

    /// The kinds of the requests of one round of which an engine was sent a leg.
    async fn legs(&self, engine: usize, round: usize) -> Vec<String> {
        let stats = self.cluster.engines[engine].stats().await;
        let bodies = stats
            .last
            .iter()
            .map(|arrival| String::from_utf8_lossy(&arrival.body));
        let legs: Vec<_> = bodies.filter(|body| body.contains("do_remote_")).collect();
        let kind = |of: &str, stream: bool| format!("{of} {round} {stream}:");
        let kinds = ["chat", "text", "response"].into_iter();
        let kinds = kinds.flat_map(|of| [(of, false), (of, true)]);
        kinds
            .filter(|(of, stream)| legs.iter().any(|leg| leg.contains(&kind(of, *stream))))
            .map(|(of, stream)| format!("{of}, stream {stream}"))
            .collect()
    }

    /// No engine was asked for what is not its part, nor answered with what is not the prompt's.
    async fn is_clean(&self, what: &str) {
        for engine in &self.cluster.engines {
            if engine.is_gone() {
                continue;
            }
            let seen = engine.kv_transfers().await;
            let name = &engine.name;
            assert_eq!(seen.wrong_uses, 0, "{what}: {name}: {seen:?}");
            assert_eq!(seen.wrong_role, 0, "{what}: {name}: {seen:?}");
        }
    }

    /// In the end no engine keeps blocks pinned.
    pub(super) async fn is_unpinned(&self, what: &str) {
        eventually(&format!("{what}: nothing is pinned"), async || {
            for engine in &self.cluster.engines {
                if !engine.is_gone() && engine.kv_transfers().await.pinned > 0 {
                    return false;
                }
            }
            true
        })
        .await;
        self.is_clean(what).await;
    }
}

/// What an engine says that computes everything.
async fn expected(path: &str, body: &str) -> String {
    let alone = Engine::here("alone", fast()).await;
    let answer = client::post(alone.address, path, body.to_owned()).await;
    said(answer.text())
}

/// What keeps silent is given up while a test can wait for it, and not because a machine is busy.
fn impatient(config: &mut Config) {
    unnoticed(config);
    config.requests.first_byte_timeout = Duration::from_secs(6);
    config.requests.response_timeout = Duration::from_secs(6);
    config.prefill_decode.advanced.transfer_timeout = Duration::from_secs(4);
}

/// Splits all prompts, in turns.
pub(crate) fn split(config: &mut Config, connector: Connector) {
    config.prefill_decode.connector = Some(router_connector(connector));
    config.prefill_decode.advanced.min_remote_tokens = 16;
    config.prefill_decode.advanced.kv_lease = LEASE;
    config.routing.policy = Policy::RoundRobin;
    config.requests.max_attempts = 4;
    config.fleet.circuit_breaker.failure_threshold = 1_000;
}

#[tokio::test]
async fn what_fails_at_a_prefill_worker_is_computed_by_another() {
    with_both(async |connector| {
        let cases = [
            ("is busy", refuse(503)),
            ("is broken", refuse(500)),
            ("hangs", hang()),
            ("resets", reset()),
            (
                "says nothing of its blocks",
                transfer_faults(TransferFaults {
                    no_params: true,
                    ..TransferFaults::default()
                }),
            ),
        ];
        for (what, fault) in cases {
            // Mooncake never says anything of them.
            if connector == Connector::Mooncake && fault.transfer.no_params {
                continue;
            }
            let change = if fault.hang { impatient } else { unnoticed };
            let mut fleet = Fleet::start(connector, (2, 1), change).await;
            fleet.prefill(0).fault(fault).await;
            let what = format!("{connector:?}: p0 {what}");
            fleet.each_is_answered(&what, 0).await;
            assert!(fleet.prefill(1).kv_transfers().await.fetched > 0, "{what}");
            fleet.is_unpinned(&what).await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_worker_of_a_pair_that_refuses_the_routers_key_costs_no_answer() {
    with_both(async |connector| {
        // The place of the one that refuses, among prefill workers and then decode workers.
        for (workers, place) in [((2, 1), 0), ((1, 2), 1)] {
            let mut fleet = Fleet::start(connector, workers, |config| {
                unnoticed(config);
                with_keys(config);
            })
            .await;
            fleet.cluster.engines[place].fault(refuse(401)).await;
            let what = format!("{connector:?}: {place} of {workers:?} refuses");
            fleet.each_is_answered(&what, place).await;
            fleet.is_unpinned(&what).await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_key_that_more_decode_workers_refuse_than_a_request_may_try_is_the_operators_to_correct()
{
    let fleet = Fleet::start(Connector::Nixl, (1, 3), |config| {
        unnoticed(config);
        with_keys(config);
        // Each refusal costs the prompt that was computed for it, so it uses up an attempt.
        config.requests.max_attempts = 2;
    })
    .await;
    for place in 0..3 {
        fleet.decode(place).fault(refuse(401)).await;
    }
    let mut statuses = Vec::new();
    while statuses.last() != Some(&502) && statuses.len() < ROUNDS {
        let answer = fleet.ask(statuses.len()).await;
        let code = match answer.status {
            503 => "no_healthy_worker",
            _ => "engine_key_refused",
        };
        assert_eq!(answer.code(), code, "{}", answer.text());
        statuses.push(answer.status);
    }
    // The first has not tried the third worker, and workers take turns.
    assert_eq!(
        (statuses.first(), statuses.last()),
        (Some(&503), Some(&502))
    );
}

/// Also one after which another worker would be asked.
#[tokio::test]
async fn an_answer_of_any_other_status_shows_that_a_worker_takes_the_key_again() {
    for other in [400, 504] {
        let fleet = Fleet::start(Connector::Nixl, (1, 2), |config| {
            unnoticed(config);
            with_keys(config);
            config.requests.max_attempts = 1;
            config.fleet.circuit_breaker.failure_threshold = 1_000;
        })
        .await;
        for place in 0..2 {
            fleet.decode(place).fault(refuse(401)).await;
        }
        let mut numbers = 0..2 * ROUNDS;
        let mut are_known = false;
        for number in numbers.by_ref() {
            are_known = fleet.ask(number).await.status == 502;
            if are_known {
                break;
            }
        }
        assert!(are_known, "{other}");
        fleet.decode(0).fault(refuse(other)).await;
        let mut statuses = Vec::new();
        for number in numbers {
            let status = fleet.ask(number).await.status;
            let has_answered = statuses.contains(&other);
            statuses.push(status);
            if has_answered && status != other {
                break;
            }
        }
        // One refuses, as before, but the other one need not.
        assert_eq!(statuses.last(), Some(&503), "{other}: {statuses:?}");
    }
}

#[tokio::test]
async fn what_a_prefill_worker_does_not_understand_is_the_clients_to_know() {
    with_both(async |connector| {
        let mut fleet = Fleet::start(connector, (2, 1), unnoticed).await;
        for place in 0..2 {
            fleet.prefill(place).fault(refuse(400)).await;
        }
        let before = fleet.decode(0).generated().await;
        let legs = fleet.sum(|seen| seen.prefill_legs).await;
        for (path, body, stream) in fleet.kinds(3) {
            let answer = fleet.cluster.post(path, body).await;
            let text = answer.text();
            assert_eq!(answer.status, 400, "{path}, stream {stream}: {text}");
            assert!(text.contains("Rejected by an injected fault."), "{text}");
        }
        assert_eq!(fleet.decode(0).generated().await, before);
        assert_eq!(fleet.sum(|seen| seen.prefill_legs).await, legs + 6);
        fleet.is_unpinned("refused").await;
    })
    .await;
}

#[tokio::test]
async fn a_prefill_worker_that_dies_with_its_answer_or_after_it_costs_no_answer() {
    for connector in BOTH {
        for (what, after_answer) in [("with", false), ("after", true)] {
            for kind in 0..6 {
                let mut fleet = Fleet::start(connector, (2, 1), |config| {
                    config.prefill_decode.advanced.transfer_timeout = Duration::from_secs(2);
                })
                .await;
                let what = format!("{connector:?}: p0 dies {what} its answer");
                fleet
                    .prefill(0)
                    .fault(transfer_faults(TransferFaults {
                        die_at_leg: !after_answer,
                        die_after_answer: after_answer,
                        ..TransferFaults::default()
                    }))
                    .await;
                let mut rounds = 0;
                while !fleet.prefill(0).is_gone() {
                    rounds += 1;
                    assert!(rounds <= ROUNDS, "{what}: it was never met");
                    let (path, body, _) = fleet.kinds(3).swap_remove(kind);
                    fleet.is_answered(&what, path, &body).await;
                }
                fleet.is_clean(&what).await;
            }
        }
    }
}

#[tokio::test]
async fn a_killed_prefill_process_costs_no_answer() {
    for connector in BOTH {
        let mut fleet = Fleet::children(connector, (2, 1), |settings| settings).await;
        fleet.kill("p0").await;
        for (path, body, _) in fleet.kinds(3).into_iter().chain(kinds(1_000, 3)) {
            fleet.is_answered("p0 is killed", path, &body).await;
        }
        fleet.is_clean("p0 is killed").await;
    }
}

#[tokio::test]
async fn a_prefill_process_that_comes_again_gets_prompts_as_before() {
    let mut fleet = Fleet::start(Connector::Nixl, (1, 1), |config| {
        unnoticed(config);
        config.fleet.circuit_breaker.failure_threshold = 3;
        config.fleet.circuit_breaker.open_duration = Duration::from_millis(200);
    })
    .await;
    fleet.kill("p0").await;
    for (path, body, _) in fleet.kinds(3) {
        fleet.is_answered("p0 is gone", path, &body).await;
    }
    fleet
        .cluster
        .is_worker("p0", "circuit_breaker", "open")
        .await;
    let settings = engine(Role::Prefill, Connector::Nixl);
    fleet.cluster.engines[0].restart(settings).await;
    fleet.pairs_up().await;
    fleet
        .cluster
        .is_worker("p0", "circuit_breaker", "closed")
        .await;
    let legs = fleet.prefill(0).kv_transfers().await.prefill_legs;
    for (path, body, _) in fleet.kinds(3) {
        fleet.is_answered("p0 is back", path, &body).await;
    }
    assert_eq!(fleet.prefill(0).kv_transfers().await.prefill_legs, legs + 6);
}

#[tokio::test]
async fn what_a_dead_process_computed_is_not_waited_for() {
    for kind in 0..6 {
        let mut fleet = Fleet::start(Connector::Mooncake, (2, 1), |config| {
            config.requests.first_byte_timeout = Duration::from_secs(600);
            config.requests.response_timeout = Duration::from_secs(600);
            config.prefill_decode.advanced.transfer_timeout = Duration::from_secs(600);
        })
        .await;
        let dies = TransferFaults {
            die_after_answer: true,
            ..TransferFaults::default()
        };
        fleet.prefill(0).fault(transfer_faults(dies)).await;
        let all = async {
            let mut rounds = 0;
            while !fleet.prefill(0).is_gone() {
                rounds += 1;
                assert!(rounds <= ROUNDS, "it was never met");
                let (path, body, _) = fleet.kinds(3).swap_remove(kind);
                fleet.is_answered("p0 is gone", path, &body).await;
            }
        };
        let answered = tokio::time::timeout(Duration::from_secs(60), all).await;
        assert!(answered.is_ok(), "kind {kind}: it is waited for");
    }
}

#[tokio::test]
async fn where_no_prefill_worker_is_left_the_decode_worker_computes_or_nobody_does() {
    with_both(async |connector| {
        for policy in [OnPrefillFailure::Local, OnPrefillFailure::Fail] {
            let mut fleet = Fleet::start(connector, (1, 1), |config| {
                config.prefill_decode.on_prefill_failure = policy;
            })
            .await;
            fleet.prefill(0).fault(refuse(500)).await;
            for (path, body, stream) in fleet.kinds(3) {
                does_as(policy, &fleet, path, &body, stream).await;
            }
            fleet.kill("p0").await;
            fleet.cluster.is_worker("p0", "health", "down").await;
            for (path, body, stream) in fleet.kinds(3) {
                does_as(policy, &fleet, path, &body, stream).await;
            }
            fleet.is_unpinned("no prefill worker").await;
        }
    })
    .await;
}

async fn does_as(policy: OnPrefillFailure, fleet: &Fleet, path: &str, body: &str, stream: bool) {
    let legs = fleet.decode(0).kv_transfers().await.decode_legs;
    match policy {
        OnPrefillFailure::Local => {
            fleet.is_answered("alone", path, body).await;
        }
        OnPrefillFailure::Fail => {
            let before = fleet.decode(0).generated().await;
            let answer = fleet.cluster.post(path, body.to_owned()).await;
            let text = answer.text();
            assert!(answer.status >= 500, "{path}, stream {stream}: {text}");
            assert!(answer.json()["error"]["message"].is_string(), "{text}");
            assert_eq!(fleet.decode(0).generated().await, before);
        }
    }
    assert_eq!(fleet.decode(0).kv_transfers().await.decode_legs, legs);
}

#[tokio::test]
async fn what_fails_at_a_decode_worker_begins_again_with_its_prompt() {
    with_both(async |connector| {
        for (what, fault) in [
            ("is busy", refuse(503)),
            ("is broken", refuse(500)),
            ("resets", reset()),
        ] {
            let mut fleet = Fleet::start(connector, (1, 2), unnoticed).await;
            fleet.decode(0).fault(fault).await;
            let what = format!("{connector:?}: d0 {what}");
            let answers = fleet.sum(|seen| seen.received).await;
            fleet.each_is_answered(&what, 1).await;
            let legs = fleet.prefill(0).kv_transfers().await.prefill_legs;
            let tries = fleet.sum(|seen| seen.decode_legs).await;
            // Each attempt has its own KV transfer.
            assert!(
                legs >= tries,
                "{what}: {legs} prefill legs, {tries} decode legs"
            );
            assert!(fleet.sum(|seen| seen.received).await > answers, "{what}");
            fleet.is_unpinned(&what).await;
        }
    })
    .await;
}

#[tokio::test]
async fn what_a_decode_worker_does_not_understand_is_the_clients_to_know() {
    with_both(async |connector| {
        let mut fleet = Fleet::start(connector, (1, 1), unnoticed).await;
        fleet.decode(0).fault(refuse(400)).await;
        let legs = fleet.prefill(0).kv_transfers().await.prefill_legs;
        for (path, body, stream) in fleet.kinds(3) {
            let answer = fleet.cluster.post(path, body).await;
            assert_eq!(answer.status, 400, "{path}, stream {stream}");
        }
        let after = fleet.prefill(0).kv_transfers().await.prefill_legs;
        assert_eq!(after, legs + 6, "each once");
        fleet.is_unpinned("refused").await;
    })
    .await;
}

#[tokio::test]
async fn a_decode_worker_that_dies_before_its_first_byte_costs_no_answer() {
    for connector in BOTH {
        for kind in 0..6 {
            let mut fleet = Fleet::start(connector, (1, 2), unnoticed).await;
            fleet
                .decode(0)
                .fault(transfer_faults(TransferFaults {
                    die_at_leg: true,
                    ..TransferFaults::default()
                }))
                .await;
            let mut rounds = 0;
            while !fleet.decode(0).is_gone() {
                rounds += 1;
                assert!(rounds <= ROUNDS, "it was never met");
                let (path, body, _) = fleet.kinds(3).swap_remove(kind);
                fleet.is_answered("d0 dies", path, &body).await;
            }
            assert!(fleet.outcome("abandoned").await >= 1.0);
            fleet.is_clean("d0 dies").await;
        }
    }
}

#[tokio::test]
async fn a_decode_process_killed_while_it_fetches_costs_no_answer() {
    for connector in BOTH {
        let mut fleet = Fleet::children(connector, (1, 2), |settings| settings).await;
        let hangs = TransferFaults {
            transfer_hangs: true,
            ..TransferFaults::default()
        };
        fleet.decode(0).fault(transfer_faults(hangs)).await;
        let legs = fleet.decode(0).kv_transfers().await.decode_legs;
        let kinds = fleet.kinds(3);
        let ask = |place: usize| {
            let (path, body, _) = &kinds[place];
            fleet.is_answered("d0 is killed", path, body)
        };
        let killed = async {
            eventually("d0 has a leg", async || {
                fleet.decode(0).kv_transfers().await.decode_legs > legs
            })
            .await;
            fleet.decode(0).signal("KILL");
        };
        tokio::join!(killed, ask(0), ask(1), ask(2), ask(3), ask(4), ask(5));
        fleet.kill("d0").await;
        assert!(fleet.outcome("abandoned").await >= 1.0);
        fleet.is_clean("d0 is killed").await;
    }
}

#[tokio::test]
async fn a_decode_process_killed_in_mid_stream_ends_its_streams_with_an_error() {
    with_both(async |connector| {
        let slow = |settings| Settings {
            decode_ms: 20,
            ..settings
        };
        let mut fleet = Fleet::children(connector, (1, 1), slow).await;
        let mut open = Vec::new();
        for (path, body, stream) in fleet.kinds(3_000) {
            if stream {
                let mut stream = fleet.cluster.open(path, &body).await;
                let mut started = String::new();
                while said(&started).is_empty() {
                    started += &stream.until("\n\n").await;
                }
                open.push((path, stream, started));
            }
        }
        assert_eq!(fleet.decode(0).kv_transfers().await.received, 3 + 1);
        fleet.kill("d0").await;
        for (path, mut stream, started) in open {
            let (rest, whole) = stream.rest().await;
            assert!(whole, "{path}: {rest}");
            crate::failures::ends_with_an_error(path, &(started + &rest));
        }
        fleet.is_unpinned("d0 is killed").await;
    })
    .await;
}

#[tokio::test]
async fn a_whole_answer_whose_decode_worker_dies_in_it_is_begun_again() {
    for connector in BOTH {
        for kind in 0..3 {
            let mut fleet = Fleet::start(connector, (1, 2), unnoticed).await;
            let dies = Faults {
                die_after_tokens: Some(2),
                ..Faults::default()
            };
            fleet.decode(0).fault(dies).await;
            let mut rounds = 0;
            while !fleet.decode(0).is_gone() {
                rounds += 1;
                assert!(rounds <= ROUNDS, "it was never met");
                let (path, body, _) = fleet.kinds(5).swap_remove(kind);
                fleet.is_answered("d0 dies", path, &body).await;
            }
            fleet.is_clean("d0 dies").await;
        }
    }
}

#[tokio::test]
async fn a_transfer_that_fails_is_begun_again_in_whatever_shape_it_fails() {
    with_both(async |connector| {
        let mut fleet = Fleet::start(connector, (1, 2), unnoticed).await;
        fleet
            .decode(0)
            .fault(transfer_faults(TransferFaults {
                transfer_fails_ms: Some(5),
                ..TransferFaults::default()
            }))
            .await;
        let what = format!("{connector:?}: transfers to d0 fail");
        fleet.each_is_answered(&what, 1).await;
        assert!(fleet.outcome("failed").await >= 6.0);
        fleet.is_unpinned(&what).await;
    })
    .await;
}

#[tokio::test]
async fn where_every_transfer_fails_the_decode_worker_computes_or_nobody_does() {
    for policy in [OnPrefillFailure::Local, OnPrefillFailure::Fail] {
        let mut fleet = Fleet::start(Connector::Nixl, (1, 1), |config| {
            unnoticed(config);
            config.prefill_decode.on_prefill_failure = policy;
        })
        .await;
        fleet
            .decode(0)
            .fault(transfer_faults(TransferFaults {
                transfer_fails_ms: Some(5),
                ..TransferFaults::default()
            }))
            .await;
        for (path, body, stream) in fleet.kinds(3) {
            match policy {
                OnPrefillFailure::Local => {
                    fleet.is_answered("alone", path, &body).await;
                }
                OnPrefillFailure::Fail => {
                    let answer = fleet.cluster.post(path, body).await;
                    let text = answer.text();
                    assert!(answer.status >= 500, "{path}, stream {stream}: {text}");
                    assert!(answer.json()["error"]["message"].is_string(), "{text}");
                }
            }
        }
        fleet.is_unpinned("transfers fail").await;
    }
}

fn failing_transfers() -> Faults {
    transfer_faults(TransferFaults {
        transfer_fails_ms: Some(5),
        ..TransferFaults::default()
    })
}

/// As where all requests come through one ingress.
#[tokio::test]
async fn where_every_transfer_fails_one_client_alone_is_soon_answered_without_any() {
    let mut fleet = Fleet::start(Connector::Nixl, (1, 1), |config| {
        unnoticed(config);
        config.prefill_decode.on_prefill_failure = OnPrefillFailure::Local;
        config.requests.advanced.min_retries_per_second = 10;
        config.fleet.circuit_breaker.failure_threshold = 3;
        // Longer than the test.
        config.fleet.circuit_breaker.open_duration = Duration::from_secs(600);
    })
    .await;
    fleet.decode(0).fault(failing_transfers()).await;
    for (path, body, _) in fleet.kinds(3) {
        fleet.is_answered("one client", path, &body).await;
    }
    let row = fleet.cluster.worker("p0").await;
    assert_eq!(row["kv_transfers"]["circuit_breaker"], "open");
    let legs = fleet.decode(0).kv_transfers().await.decode_legs;
    for _ in 0..ROUNDS {
        let kinds = fleet.kinds(3);
        let ask = |place: usize| {
            let (path, body, _) = &kinds[place];
            fleet.is_answered("one client", path, body)
        };
        tokio::join!(ask(0), ask(1), ask(2), ask(3), ask(4), ask(5));
    }
    assert_eq!(fleet.decode(0).kv_transfers().await.decode_legs, legs);
}

#[tokio::test]
async fn an_only_pair_whose_transfer_fails_is_tried_again_if_no_worker_may_compute_alone() {
    let mut fleet = Fleet::start(Connector::Nixl, (1, 1), |config| {
        unnoticed(config);
        config.prefill_decode.on_prefill_failure = OnPrefillFailure::Fail;
    })
    .await;
    fleet.decode(0).fault(failing_transfers()).await;
    for (path, body, stream) in fleet.kinds(3) {
        let before = fleet.decode(0).kv_transfers().await.decode_legs;
        let answer = fleet.cluster.post(path, body).await;
        let text = answer.text();
        assert!(answer.status >= 500, "{path}, stream {stream}: {text}");
        let legs = fleet.decode(0).kv_transfers().await.decode_legs - before;
        assert_eq!(legs, 4, "{path}, stream {stream}: each attempt");
    }
}

#[tokio::test]
async fn a_decode_worker_that_is_unreachable_is_tried_again_if_no_other_one_has_a_prefill_worker() {
    let mut fleet = Fleet::start(Connector::Nixl, (1, 2), |config| {
        unnoticed(config);
        config.prefill_decode.on_prefill_failure = OnPrefillFailure::Fail;
        config.prefill_decode.topology = "zone".to_owned();
        for (worker, zone) in config.workers.iter_mut().zip(["a", "a", "b"]) {
            worker.labels.insert("zone".to_owned(), zone.to_owned());
        }
    })
    .await;
    fleet.kill("d0").await;
    let before = fleet.prefill(0).kv_transfers().await.prefill_legs;
    let (path, body, _) = fleet.kinds(3).swap_remove(0);
    let answer = fleet.cluster.post(path, body).await;
    assert!(answer.status >= 500, "{}", answer.text());
    let legs = fleet.prefill(0).kv_transfers().await.prefill_legs - before;
    assert!(legs > 2, "{legs} attempts");
}

#[tokio::test]
async fn one_request_does_not_keep_a_prefill_worker_from_all_others() {
    let mut fleet = Fleet::start(Connector::Nixl, (1, 3), |config| {
        unnoticed(config);
        config.prefill_decode.on_prefill_failure = OnPrefillFailure::Fail;
        config.fleet.circuit_breaker.failure_threshold = 3;
    })
    .await;
    for place in 0..3 {
        let fails = TransferFaults {
            transfer_fails_ms: Some(5),
            ..TransferFaults::default()
        };
        fleet.decode(place).fault(transfer_faults(fails)).await;
    }
    let (path, body, _) = fleet.kinds(3).swap_remove(0);
    let answer = fleet.cluster.post(path, body).await;
    assert!(answer.status >= 500, "{}", answer.text());
    assert!(fleet.outcome("failed").await >= 3.0);
    let row = fleet.cluster.worker("p0").await;
    assert_eq!(row["kv_transfers"]["circuit_breaker"], "closed");
}

#[tokio::test]
async fn the_log_says_why_a_kv_transfer_failed() {
    let engines = [Role::Prefill, Role::Decode].map(|role| engine(role, Connector::Nixl));
    let cluster = Cluster::with_router_child(Vec::from(engines), |config| {
        split(config, Connector::Nixl);
    })
    .await;
    cluster.engines[1].fault(failing_transfers()).await;
    let mut asked = 0;
    eventually("the log has the reason", async || {
        asked += 1;
        let (path, body, _) = kinds(asked, 3).swap_remove(0);
        cluster.post(path, body).await;
        let log = cluster.router.log();
        let mut lines = log
            .lines()
            .filter(|line| line.contains("KV transfer failed"));
        lines.any(|line| line.contains("it answered 500"))
    })
    .await;
}

/// Prefill workers of which no KV transfers are asked for.
async fn stopped_transfers(fleet: &Fleet) -> usize {
    let mut stopped = 0;
    for place in 0..fleet.prefills {
        let row = fleet.cluster.worker(&format!("p{place}")).await;
        stopped += usize::from(row["kv_transfers"]["circuit_breaker"] == "open");
    }
    stopped
}

#[tokio::test]
async fn clients_whose_transfers_fail_leave_half_of_the_prefill_workers_to_others() {
    for (prefills, most) in [(1, 0), (2, 1)] {
        let mut fleet = Fleet::start(Connector::Nixl, (prefills, 3), |config| {
            unnoticed(config);
            several_clients(config);
            config.prefill_decode.on_prefill_failure = OnPrefillFailure::Fail;
            config.fleet.circuit_breaker.failure_threshold = 3;
            // Longer than the test.
            config.fleet.circuit_breaker.open_duration = Duration::from_secs(600);
        })
        .await;
        for place in 0..3 {
            fleet.decode(place).fault(failing_transfers()).await;
        }
        for (clients, expected) in [([1; 6], 0), ([2, 3, 4, 2, 3, 4], most)] {
            for client in clients {
                let (_, body, _) = fleet.kinds(3).swap_remove(0);
                let answer = post_from(&fleet.cluster, client, body).await;
                assert!(answer.status >= 500, "{}", answer.text());
            }
            let stopped = stopped_transfers(&fleet).await;
            assert_eq!(stopped, expected, "{prefills}: {clients:?}");
        }
        for place in 0..3 {
            fleet.decode(place).fault(Faults::default()).await;
        }
        for (path, body, _) in fleet.kinds(3) {
            fleet.is_answered("others", path, &body).await;
        }
    }
}

#[tokio::test]
async fn bad_requests_of_several_clients_leave_half_of_the_decode_workers_to_others() {
    let mut fleet = Fleet::start(Connector::Nixl, (2, 2), |config| {
        unnoticed(config);
        several_clients(config);
        config.fleet.circuit_breaker.failure_threshold = 3;
        // Longer than the test.
        config.fleet.circuit_breaker.open_duration = Duration::from_secs(600);
    })
    .await;
    for place in 0..2 {
        fleet.decode(place).fault(refuse(500)).await;
    }
    for client in (0..4).cycle().take(32) {
        let (_, body, _) = fleet.kinds(3).swap_remove(0);
        let answer = post_from(&fleet.cluster, client, body).await;
        assert!(answer.status >= 500, "{}", answer.text());
    }
    let mut open = 0;
    for name in ["d0", "d1"] {
        let row = fleet.cluster.worker(name).await;
        open += usize::from(row["circuit_breaker"] == "open");
    }
    assert_eq!(open, 1);
    for place in 0..2 {
        fleet.decode(place).fault(Faults::default()).await;
    }
    for (path, body, _) in fleet.kinds(3) {
        fleet.is_answered("others", path, &body).await;
    }
}

#[tokio::test]
async fn a_silent_decode_leg_is_cancelled_and_begun_again() {
    with_both(async |connector| {
        let mut fleet = Fleet::start(connector, (1, 2), impatient).await;
        fleet
            .decode(0)
            .fault(transfer_faults(TransferFaults {
                transfer_hangs: true,
                ..TransferFaults::default()
            }))
            .await;
        let what = format!("{connector:?}: transfers to d0 hang");
        fleet.each_is_answered(&what, 1).await;
        let seen = fleet.decode(0).kv_transfers().await;
        assert_eq!(
            seen.aborted_decode_legs,
            seen.decode_legs - seen.received,
            "{what}"
        );
        fleet.is_unpinned(&what).await;
    })
    .await;
}

#[tokio::test]
async fn a_client_that_leaves_during_either_leg_stops_both_engines() {
    with_both(async |connector| {
        let mut fleet = Fleet::start(connector, (1, 1), |config| {
            config.requests.first_byte_timeout = Duration::from_secs(600);
            config.requests.response_timeout = Duration::from_secs(600);
            config.prefill_decode.advanced.transfer_timeout = Duration::from_secs(600);
        })
        .await;
        // During the first: nothing was handed over.
        fleet.prefill(0).fault(hang()).await;
        let (legs, aborted) = (
            |seen: &TransferStats| seen.prefill_legs,
            |seen: &TransferStats| seen.aborted_prefill_legs,
        );
        each_leaves(&mut fleet, "p0", legs, aborted).await;
        let seen = fleet.sum(|seen| seen.granted - seen.fetched).await;
        assert_eq!(seen, 0);
        fleet.prefill(0).fault(Faults::default()).await;

        // During the second: blocks are pinned until their lease ends, and the router knows.
        fleet
            .decode(0)
            .fault(transfer_faults(TransferFaults {
                transfer_hangs: true,
                ..TransferFaults::default()
            }))
            .await;
        let abandoned = fleet.outcome("abandoned").await;
        let (legs, aborted) = (
            |seen: &TransferStats| seen.decode_legs,
            |seen: &TransferStats| seen.aborted_decode_legs,
        );
        each_leaves(&mut fleet, "d0", legs, aborted).await;
        assert_eq!(fleet.prefill(0).kv_transfers().await.pinned, 6);
        assert!(fleet.prefill(0).kv_transfers().await.pinned_blocks > 6);
        eventually("the router counts them", async || {
            fleet.outcome("abandoned").await - abandoned == 6.0
        })
        .await;
        fleet.is_unpinned("clients left").await;
        assert_eq!(fleet.prefill(0).kv_transfers().await.expired, 6);
        for name in ["p0", "d0"] {
            fleet.cluster.is_worker(name, "requests", 0).await;
        }
    })
    .await;
}

/// A client of each kind leaves while an engine has its leg, and the leg is aborted.
async fn each_leaves(
    fleet: &mut Fleet,
    name: &str,
    legs: impl Fn(&TransferStats) -> u64,
    aborted: impl Fn(&TransferStats) -> u64,
) {
    for (path, body, stream) in fleet.kinds(3) {
        let mut engines = fleet.cluster.engines.iter();
        let engine = engines.find(|engine| engine.name == name).unwrap();
        let before = engine.kv_transfers().await;
        leaves(fleet, path, &body, async || {
            legs(&engine.kv_transfers().await) > legs(&before)
        })
        .await;
        eventually(
            &format!("{path}, {stream}: the leg is aborted"),
            async || aborted(&engine.kv_transfers().await) > aborted(&before),
        )
        .await;
    }
}

/// Sends a request, and closes the connection once `there` says that it is where it should be.
async fn leaves(fleet: &Fleet, path: &'static str, body: &str, there: impl AsyncFnMut() -> bool) {
    let (api, body) = (fleet.cluster.router.api, body.to_owned());
    let asked = tokio::spawn(async move { client::try_open(api, "POST", path, &[], body).await });
    eventually("the leg is there", there).await;
    asked.abort();
    let _ = asked.await;
}

#[tokio::test]
async fn a_client_that_leaves_in_mid_stream_leaves_nothing_behind() {
    for connector in BOTH {
        let slow = |settings| Settings {
            decode_ms: 20,
            ..settings
        };
        let mut fleet = Fleet::of(connector, (1, 1), slow, |_| {}).await;
        for (path, body, stream) in fleet.kinds(3_000) {
            if !stream {
                continue;
            }
            let before = fleet.decode(0).kv_transfers().await.aborted_decode_legs;
            let mut stream = fleet.cluster.open(path, &body).await;
            let mut started = String::new();
            while said(&started).is_empty() {
                started += &stream.until("\n\n").await;
            }
            drop(stream);
            eventually("the engine was let go", async || {
                fleet.decode(0).kv_transfers().await.aborted_decode_legs > before
            })
            .await;
        }
        assert_eq!(fleet.prefill(0).kv_transfers().await.pinned, 0);
        fleet.is_clean("clients left").await;
    }
}

#[tokio::test]
async fn a_model_that_ends_its_answer_at_once_is_made_to_go_on_where_it_only_computes() {
    with_both(async |connector| {
        let mut fleet = Fleet::start(connector, (1, 1), unnoticed).await;
        let stops = Faults {
            stop_at_once: true,
            ..Faults::default()
        };
        fleet.prefill(0).fault(stops).await;
        let before = fleet.decode(0).kv_transfers().await.received;
        for (path, body, _) in fleet.kinds(3) {
            fleet.is_answered("it stops", path, &body).await;
        }
        assert_eq!(fleet.decode(0).kv_transfers().await.received, before + 6);
        fleet.is_unpinned("it stops").await;
    })
    .await;
}

#[tokio::test]
async fn kv_transfer_fields_of_a_client_reach_no_engine() {
    with_both(async |connector| {
        let mut fleet = Fleet::start(connector, (1, 1), unnoticed).await;
        let lies = [
            json!({"do_remote_prefill": true}),
            json!({"do_remote_prefill": true, "remote_block_ids": [[1]], "remote_host": "127.0.0.1", "remote_port": 1}),
            json!({"do_remote_decode": true, "transfer_id": "mine"}),
        ];
        for lie in lies {
            // Split, and too short to be.
            for prompt in ["a long story ".repeat(30), "short".to_owned()] {
                for (path, mut body) in [
                    (
                        "/v1/chat/completions",
                        json!({"messages": [{"role": "user", "content": prompt}]}),
                    ),
                    ("/v1/completions", json!({"prompt": prompt})),
                    ("/v1/responses", json!({"input": prompt})),
                ] {
                    body["model"] = json!("sim");
                    body["kv_transfer_params"] = lie.clone();
                    let answer = fleet.cluster.post(path, body.to_string()).await;
                    let text = answer.text();
                    assert!(!text.contains("remote_"), "{path}: {text}");
                    assert!(
                        answer.status == 200 || answer.status == 400,
                        "{path}: {text}"
                    );
                }
            }
        }
        for (path, body, _) in fleet.kinds(3) {
            fleet.is_answered("afterwards", path, &body).await;
        }
        fleet.is_unpinned("lies").await;
    })
    .await;
}
