//! A worker that dies cuts all of its connections, also those that are kept alive. That is one failure of one worker: no
//! request is lost to it while another worker is healthy.

use std::time::Duration;

use tokio::task::JoinSet;
use warmroute::config::Config;
use warmroute::routing::Policy;
use warmroute::sim::worker::{Connector, Role};

use crate::client;
use crate::cluster::{Cluster, Engine, chat, eventually, fast, generating};
use crate::cutting_proxy::{Cut, CuttingProxy};
use crate::prefill_decode::failures::{BOTH, engine, split};

/// Engines close connections that were idle for some seconds. The router takes a connection that was idle for one second and
/// breaks for such a one.
const IDLE: Duration = Duration::from_millis(1_100);

/// Every kind of request that generates: path, body, whether it streams. `salt` makes prompts new.
fn kinds(salt: usize) -> impl Iterator<Item = (&'static str, String)> {
    let of = move |stream| {
        let all = generating(3, stream).into_iter();
        all.map(move |(path, body)| (path, body.replace("once", &format!("{salt}: once"))))
    };
    of(false).chain(of(true))
}

struct Fleet {
    cluster: Cluster,
    proxies: Vec<CuttingProxy>,
}

impl Fleet {
    async fn start(engines: Vec<Engine>, change: impl FnOnce(&mut Config)) -> Self {
        let proxies = CuttingProxy::of_all(&engines).await;
        let cluster = Cluster::with(engines, |config| {
            CuttingProxy::put_between(&proxies, config);
            config.routing.policy = Policy::RoundRobin;
            config.fleet.circuit_breaker.failure_threshold = 1_000;
            // No health check notices anything.
            config.fleet.health.interval = Duration::from_secs(600);
            change(config);
        })
        .await;
        Self { cluster, proxies }
    }

    async fn of_single_workers(count: usize) -> Self {
        Self::start(Cluster::engines_here(vec![fast(); count]).await, |_| {}).await
    }

    /// Prefill workers p0 and p1, decode workers d0 and d1.
    async fn of_pairs(connector: Connector) -> Self {
        let mut engines = Vec::new();
        for (letter, role) in [('p', Role::Prefill), ('d', Role::Decode)] {
            for number in 0..2 {
                let name = format!("{letter}{number}");
                engines.push(Engine::here(&name, engine(role, connector)).await);
            }
        }
        Self::start(engines, |config| split(config, connector)).await
    }

    /// Until each worker has this many connections that are kept alive.
    async fn keep_alive(&self, connections: usize) {
        self.proxies.iter().for_each(|proxy| proxy.cut(Cut::None));
        while self.proxies.iter().any(|proxy| proxy.open() < connections) {
            let mut asked = JoinSet::new();
            for _ in 0..connections * self.proxies.len() {
                let api = self.cluster.router.api;
                let text = format!("{:032x} ", fastrand::u128(..)).repeat(8);
                let body = chat(&text, 9, false);
                asked.spawn(client::post(api, "/v1/chat/completions", body));
            }
            for answer in asked.join_all().await {
                assert_eq!(answer.status, 200, "{}", answer.text());
            }
        }
    }

    /// Sends requests of each kind, all at once or one after the other, all of which must be answered.
    async fn are_answered(&self, rounds: usize, what: &str) {
        let mut asked = JoinSet::new();
        for (path, body) in (0..rounds).flat_map(kinds) {
            let (api, what) = (self.cluster.router.api, format!("{what}: {path}: {body}"));
            asked.spawn(async move { (client::post(api, path, body).await, what) });
        }
        for (answer, what) in asked.join_all().await {
            assert_eq!(answer.status, 200, "{what}: {}", answer.text());
            assert!(
                !client::has_error(answer.text()),
                "{what}: {}",
                answer.text()
            );
        }
    }
}

#[tokio::test]
async fn a_single_worker_answers_over_a_new_connection_however_many_it_had_closed() {
    let fleet = Fleet::of_single_workers(1).await;
    for connections in [1, 2, 3, 12] {
        for (path, body) in kinds(connections) {
            // An I/O thread that has no idle connection opens one, which is not cut.
            let before = fleet.proxies[0].cuts();
            eventually("a kept-alive connection was cut", async || {
                fleet.keep_alive(connections).await;
                fleet.proxies[0].cut(Cut::KeptAlive);
                let answer = fleet.cluster.post(path, body.clone()).await;
                let text = answer.text();
                assert_eq!(answer.status, 200, "{connections}, {path}, {body}: {text}");
                assert!(!client::has_error(text), "{connections}, {path}: {text}");
                fleet.proxies[0].cuts() > before
            })
            .await;
        }
    }
    let retries = fleet.cluster.metric("warmroute_retries_total", &[]).await;
    assert_eq!(retries, 0.0, "what a closed connection costs is no retry");
}

#[tokio::test]
async fn a_dying_worker_costs_no_request_while_another_is_healthy() {
    let fleet = Fleet::of_single_workers(2).await;
    for connections in [1, 2, 3, 12] {
        fleet.keep_alive(connections).await;
        fleet.proxies[0].cut(Cut::All);
        fleet
            .are_answered(2, &format!("{connections} connections"))
            .await;
    }
    assert!(fleet.proxies[0].cuts() > 0);
}

#[tokio::test]
async fn connections_that_were_idle_for_long_cost_no_request_of_a_dying_worker() {
    // The healthy worker closes its idle connections at the same time, or does not.
    for healthy in [Cut::None, Cut::KeptAlive] {
        let fleet = Fleet::of_single_workers(2).await;
        fleet.keep_alive(12).await;
        tokio::time::sleep(IDLE).await;
        fleet.proxies[0].cut(Cut::All);
        fleet.proxies[1].cut(healthy);
        fleet.are_answered(2, &format!("{healthy:?}")).await;
        assert!(fleet.proxies[0].cuts() > 0);
    }
}

#[tokio::test]
async fn a_dying_worker_of_a_pair_costs_no_request_while_another_pair_is_healthy() {
    let ways = [
        (Duration::ZERO, Cut::None),
        (IDLE, Cut::None),
        (IDLE, Cut::KeptAlive),
    ];
    for connector in BOTH {
        let dies = async |dying: usize| {
            for (idle, others) in ways {
                let fleet = Fleet::of_pairs(connector).await;
                fleet.keep_alive(3).await;
                tokio::time::sleep(idle).await;
                fleet.proxies.iter().for_each(|proxy| proxy.cut(others));
                fleet.proxies[dying].cut(Cut::All);
                let what = format!("{connector:?}, {dying} dies, {idle:?}, {others:?}");
                fleet.are_answered(2, &what).await;
                assert!(fleet.proxies[dying].cuts() > 0, "{what}");
            }
        };
        tokio::join!(dies(0), dies(1), dies(2), dies(3));
    }
}
