//! Decisions of several replicas over one Redis, without routers in front.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use warmroute::http::drain::Tasks;
use warmroute::ids::{RequestId, ResponseId, Root};
use warmroute::limits::{
    Charge, ChargeId, Known, Limiter, Refusal, Request, Settings, TenantLimits,
};
use warmroute::observe::metrics::Registry;
use warmroute::store::RetentionSettings;
use warmroute::store::redis::{self, Redis};

use super::*;

pub(super) struct Replica {
    limiter: Arc<Limiter>,
    limits: Arc<TenantLimits>,
    tasks: Tasks,
    registry: Registry,
}

impl Replica {
    pub(super) fn new(redis: &redis::Settings, limits: &str) -> Self {
        Self::with_lease(redis, limits, Settings::default().advanced.lease)
    }

    fn with_lease(redis: &redis::Settings, limits: &str, lease: Duration) -> Self {
        let registry = Registry::default();
        let keep = RetentionSettings::default();
        let redis = Redis::open(redis, &keep, 0, &registry).unwrap();
        let mut settings = Settings {
            replicas: 3,
            ..Settings::default()
        };
        settings.advanced.timeout = Duration::from_secs(5);
        settings.advanced.lease = lease;
        let limiter = Limiter::new(&settings, Some(Arc::new(redis)), &registry);
        let tasks = Tasks::default();
        tasks.spawn(limiter.clone().run(tasks.clone()));
        Self {
            limits: TenantLimits::new(&limiter, "a", &spec(limits), &settings),
            limiter,
            tasks,
            registry,
        }
    }

    pub(super) async fn charge(&self, id: ChargeId, prompt_tokens: u64) -> Result<Charge, Refusal> {
        charge(&self.limits, id, prompt_tokens).await
    }

    fn remaining(&self) -> u64 {
        self.limits.report().limits[0].remaining
    }
}

async fn charge(
    limits: &Arc<TenantLimits>,
    id: ChargeId,
    prompt_tokens: u64,
) -> Result<Charge, Refusal> {
    let request = Request {
        id,
        model: "m",
        target: "m",
        known: Known {
            prompt_tokens,
            ..Known::default()
        },
    };
    limits.admit(request).await.0
}

pub(super) fn new_id() -> ChargeId {
    ChargeId::Request(RequestId::new(fastrand::u128(..)))
}

pub(super) fn at(server: &Server) -> redis::Settings {
    patient(server)
}

/// What a limit of so many a minute gives back in this time.
pub(super) fn given_back(per_minute: u64, since: Instant) -> u64 {
    (since.elapsed().as_secs_f64() * per_minute as f64 / 60.0) as u64 + 1
}

async fn flood(replicas: &[Replica], requests: usize) -> Vec<Charge> {
    let mut set = JoinSet::new();
    for worker in 0..24 {
        let limits = replicas[worker % replicas.len()].limits.clone();
        let share = requests / 24;
        set.spawn(async move {
            let mut charges = Vec::new();
            for _ in 0..share {
                charges.extend(charge(&limits, new_id(), 0).await.ok());
            }
            charges
        });
    }
    set.join_all().await.into_iter().flatten().collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_decisions_of_three_replicas_are_exact() {
    let server = Server::start().await;
    // It gives back less than two a second, so that one too many is seen.
    let limits = r#"{"requests_per_minute": 100, "burst": "1h"}"#;
    let replicas: Vec<_> = (0..3).map(|_| Replica::new(&at(&server), limits)).collect();
    let started = Instant::now();
    let charges = flood(&replicas, 10_008).await;
    let granted = charges.len() as u64;
    let most = 6_000 + given_back(100, started);
    assert!((6_000..=most).contains(&granted), "{granted} {most}");
    let running = replicas[0].limits.report().running_requests;
    assert!(running <= granted, "{running}");
}

#[tokio::test]
async fn a_charge_is_made_once_for_one_id_and_settled_once() {
    let server = Server::start().await;
    let limits = r#"{"input_tokens_per_minute": 6000}"#;
    let (a, b) = (
        Replica::new(&at(&server), limits),
        Replica::new(&at(&server), limits),
    );
    let started = Instant::now();
    let id = new_id();
    let mut first = a.charge(id, 1_000).await.unwrap();
    first.on_sent();
    // The same again, as after a lost reply.
    let mut again = b.charge(id, 1_000).await.unwrap();
    again.on_sent();
    let expected = |used: u64| (6_000 - used)..=(6_000 - used + given_back(6_000, started));
    assert!(
        expected(1_000).contains(&b.remaining()),
        "{}",
        b.remaining()
    );
    first.use_tokens(1_500, 0, 0);
    again.use_tokens(1_500, 0, 0);
    drop((first, again));
    eventually("the charge is settled", async || {
        a.limits.report().unsettled + b.limits.report().unsettled == 0
    })
    .await;
    let probe = b.charge(new_id(), 0).await.unwrap();
    assert!(
        expected(1_500).contains(&b.remaining()),
        "{}",
        b.remaining()
    );
    drop(probe);
}

/// A replica that has nothing more to ask for learns that the requests of others have ended.
#[tokio::test]
async fn requests_that_have_ended_run_nowhere_on_any_replica() {
    let server = Server::start().await;
    let limits = r#"{"requests_per_minute": 6000, "concurrent_requests": 100}"#;
    let replicas: Vec<_> = (0..3).map(|_| Replica::new(&at(&server), limits)).collect();
    let running = || {
        let reports = replicas.iter().map(|replica| replica.limits.report());
        reports
            .map(|report| report.running_requests)
            .collect::<Vec<_>>()
    };
    let charges = flood(&replicas, 72).await;
    assert_eq!(charges.len(), 72);
    let seen = running();
    assert!(seen.iter().any(|running| *running > 60), "{seen:?}");
    drop(charges);
    eventually("nothing runs", async || running() == [0, 0, 0]).await;
}

/// One after the other, thousands of tenants would outlast their leases where a round trip takes milliseconds.
#[tokio::test]
async fn many_tenants_are_settled_at_the_same_time() {
    let server = Server::start().await;
    let mut settings = at(&server);
    settings.advanced.write_timeout = Duration::from_secs(600);
    let limits = r#"{"concurrent_requests": 9}"#;
    let replica = Replica::new(&settings, limits);
    let mut charges = Vec::new();
    for number in 0..64 {
        let (name, of_all) = (format!("t{number}"), Settings::default());
        let of_tenant = TenantLimits::new(&replica.limiter, &name, &spec(limits), &of_all);
        charges.push(charge(&of_tenant, new_id(), 0).await.unwrap());
    }
    let in_flight = || {
        let text = replica.registry.text();
        let name = "warmroute_store_operations_in_flight ";
        let count = text.lines().find_map(|line| line.strip_prefix(name));
        count.map_or(0, |count| count.parse::<u64>().unwrap())
    };
    server.pause();
    drop(charges);
    eventually("half of them are under way", async || in_flight() >= 32).await;
    server.wake();
    let runs = || server.cli(&["KEYS", "wr:lr:*"]);
    eventually("nothing runs", async || runs().trim().is_empty()).await;
}

/// Charges that are asked for at the same time go to Redis together, and each is still decided by itself.
#[tokio::test]
async fn charges_that_are_made_together_are_decided_one_after_the_other() {
    let server = Server::start().await;
    // It gives back two a minute, and this takes seconds.
    let limits = r#"{"input_tokens_per_minute": 2, "burst": "50m", "concurrent_requests": 150,
        "models": ["*", {"name": "m", "requests_per_minute": 1000}]}"#;
    let replica = Replica::new(&at(&server), limits);
    let calls = || {
        let stats = server.cli(&["INFO", "commandstats"]);
        let mut lines = stats.lines();
        let line = lines.find(|line| line.starts_with("cmdstat_evalsha:"));
        let calls = line.and_then(|line| line.split("calls=").nth(1)?.split(',').next());
        calls.map_or(0, |count| count.parse::<u64>().unwrap())
    };
    drop(replica.charge(new_id(), 0).await.unwrap());
    let before = calls();
    // 30 of the first are more than is left at that point; smaller ones after them still fit.
    let asked = [vec![3; 40], vec![1; 10], vec![0; 150]].concat();
    let mut set = JoinSet::new();
    for (number, tokens) in asked.into_iter().enumerate() {
        let limits = replica.limits.clone();
        set.spawn(async move { (number, charge(&limits, new_id(), tokens).await) });
    }
    let mut charges = set.join_all().await;
    charges.sort_by_key(|(number, _)| *number);
    let charges: Vec<_> = charges.into_iter().map(|(_, charge)| charge).collect();
    let granted: Vec<bool> = charges.iter().map(Result::is_ok).collect();
    let is_granted = |range: std::ops::Range<usize>| {
        granted[range]
            .iter()
            .filter(|is_granted| **is_granted)
            .count()
    };
    // 33 of 3 tokens, one of 1, and of the others what may run at the same time.
    assert_eq!([0..33, 33..40].map(is_granted), [33, 0]);
    assert_eq!([40..50, 50..200].map(is_granted), [1, 116]);
    let is_concurrent = |result: &Result<Charge, Refusal>| {
        matches!(result, Err(Refusal::Concurrent { used: 150, .. }))
    };
    assert_eq!(
        charges
            .iter()
            .filter(|result| is_concurrent(result))
            .count(),
        34
    );
    // 64 of them to a call, and settlements and renewals besides.
    let made = calls() - before;
    assert!((4..20).contains(&made), "{made}");
}

/// A client that leaves before Redis has answered pays nothing, wherever its charge is at that moment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_charge_whose_client_leaves_is_withdrawn() {
    let server = Server::start().await;
    let limits = r#"{"input_tokens_per_minute": 100, "burst": "1h", "concurrent_requests": 1000}"#;
    let (a, b) = (
        Replica::new(&at(&server), limits),
        Replica::new(&at(&server), limits),
    );
    let started = Instant::now();
    let mut left = 0;
    for patience in (0..40).cycle().take(400) {
        let leaves = async {
            for _ in 0..patience {
                tokio::time::sleep(Duration::ZERO).await;
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            biased;
            charge = a.charge(new_id(), 10) => drop(charge.unwrap()),
            () = leaves => left += 1,
        }
        drop(b.charge(new_id(), 0).await.unwrap());
    }
    assert!(left > 0);
    eventually("nothing runs", async || {
        let members = server.cli(&["ZCARD", server.cli(&["KEYS", "wr:lr:*"]).trim()]);
        let settled = a.limits.report().unsettled + b.limits.report().unsettled == 0;
        settled && !matches!(members.trim().parse::<u64>(), Ok(1..))
    })
    .await;
    drop(b.charge(new_id(), 0).await.unwrap());
    let remaining = b.remaining();
    assert_eq!(remaining, 6_000, "{left} left in {:?}", started.elapsed());
}

#[tokio::test]
async fn a_background_response_is_charged_once_however_often_it_is_run() {
    let server = Server::start().await;
    let limits = r#"{"input_tokens_per_minute": 6000}"#;
    let (a, b) = (
        Replica::new(&at(&server), limits),
        Replica::new(&at(&server), limits),
    );
    let started = Instant::now();
    let id = ChargeId::Response(ResponseId::new(Root(1), 2));
    for _ in 0..2 {
        for replica in [&a, &b] {
            let mut charge = replica.charge(id, 1_000).await.unwrap();
            charge.on_sent();
            charge.use_tokens(1_200, 0, 0);
            drop(charge);
            eventually("the charge is settled", async || {
                replica.limits.report().unsettled == 0
            })
            .await;
        }
    }
    let probe = b.charge(new_id(), 0).await.unwrap();
    let remaining = b.remaining();
    let most = 4_800 + given_back(6_000, started);
    assert!((4_800..=most).contains(&remaining), "{remaining} {most}");
    drop(probe);
}

#[tokio::test]
async fn requests_of_a_replica_that_is_gone_stop_counting() {
    let server = Server::start().await;
    let limits = r#"{"concurrent_requests": 2}"#;
    let (a, b) = (
        Replica::new(&at(&server), limits),
        Replica::new(&at(&server), limits),
    );
    let held = [
        a.charge(new_id(), 0).await.unwrap(),
        a.charge(new_id(), 0).await.unwrap(),
    ];
    assert!(matches!(
        b.charge(new_id(), 0).await,
        Err(Refusal::Concurrent { used: 2, .. })
    ));
    // Its leases end.
    let keys = server.cli(&["KEYS", "wr:lr:*"]);
    let key = keys.trim();
    for member in server.cli(&["ZRANGE", key, "0", "-1"]).lines() {
        server.cli(&["ZADD", key, "1", member]);
    }
    drop(b.charge(new_id(), 0).await.unwrap());
    drop(held);
    // A request that has ended makes room at once, also for the same replica's next.
    for _ in 0..20 {
        let pair = [
            b.charge(new_id(), 0).await.unwrap(),
            b.charge(new_id(), 0).await.unwrap(),
        ];
        drop(pair);
    }
    a.tasks.drain(Duration::from_secs(5)).await;
    let _ = &a.limiter;
}

#[tokio::test]
async fn a_redis_whose_clock_is_set_back_keeps_no_limit_used_up() {
    let server = Server::start().await;
    let replica = Replica::new(&at(&server), r#"{"requests_per_minute": 2}"#);
    for _ in 0..2 {
        replica.charge(new_id(), 0).await.unwrap().on_sent();
    }
    eventually("the charges are settled", async || {
        replica.limits.report().unsettled == 0
    })
    .await;
    let key = server.cli(&["KEYS", "wr:l:*"]);
    // What was written is from an hour ahead, and so is the time at which it was.
    for field in ["r", "@"] {
        let written = server.cli(&["HGET", key.trim(), field]);
        let ahead = written.trim().parse::<u64>().unwrap() + 3_600_000_000;
        server.cli(&["HSET", key.trim(), field, &ahead.to_string()]);
    }
    let mut left = Duration::from_secs(60);
    // The clock goes on, also while all is refused.
    for _ in 0..3 {
        let refused = replica.charge(new_id(), 0).await;
        let Err(Refusal::Rate { retry_after, .. }) = refused else {
            panic!("{refused:?}");
        };
        assert!(retry_after < left, "{retry_after:?} {left:?}");
        left = retry_after;
    }
}

#[tokio::test]
async fn requests_that_run_on_while_their_replica_drains_keep_their_leases() {
    let server = Server::start().await;
    let lease = Duration::from_secs(6);
    let a = Replica::with_lease(&at(&server), r#"{"concurrent_requests": 2}"#, lease);
    let held = a.charge(new_id(), 0).await.unwrap();
    a.tasks.stop();
    let keys = server.cli(&["KEYS", "wr:lr:*"]);
    let lease_end = || server.cli(&["ZRANGE", keys.trim(), "0", "-1", "WITHSCORES"]);
    // One that was under way may still come.
    for _ in 0..2 {
        let before = lease_end();
        eventually("the lease is renewed", async || lease_end() != before).await;
    }
    drop(held);
    assert_eq!(a.tasks.drain(Duration::from_secs(5)).await, 0);
}

/// Redis is killed and comes back empty: the replicas go on with their shares, and restore what was used.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_redis_errs_by_little() {
    let mut server = Server::start().await;
    let limits = r#"{"requests_per_minute": 600}"#;
    let replicas: Vec<_> = (0..3).map(|_| Replica::new(&at(&server), limits)).collect();
    let started = Instant::now();
    let mut charges = flood(&replicas, 300).await;
    assert_eq!(charges.len(), 288);
    // As in a steady flood, each replica has just been answered.
    for replica in &replicas {
        charges.extend(replica.charge(new_id(), 0).await);
    }
    server.kill();
    let away = flood(&replicas, 1_200).await;
    charges.extend(away);
    server.run().await;
    eventually("Redis is asked again", async || {
        let id = new_id();
        charges.extend(replicas[0].charge(id, 0).await.ok());
        !replicas[0].limits.report().is_alone
    })
    .await;
    charges.extend(flood(&replicas, 1_200).await);
    let granted = charges.len() as u64;
    // In flight: 24 requests; a second's worth: 10; a share is rounded at each replica.
    let most = 600 + given_back(600, started) + 24 + 10 + 3;
    assert!((566..=most).contains(&granted), "{granted} {most}");
}

#[tokio::test]
async fn it_works_over_a_redis_cluster() {
    let servers = crate::redis_server::cluster().await;
    let settings = redis::Settings {
        urls: servers.iter().map(Server::url).collect(),
        mode: redis::Mode::Cluster,
        ..redis::Settings::default()
    };
    let replica = Replica::new(
        &settings,
        r#"{"requests_per_minute": 5, "concurrent_requests": 9}"#,
    );
    for _ in 0..5 {
        let mut charge = replica.charge(new_id(), 0).await.unwrap();
        charge.on_sent();
    }
    let refused = replica.charge(new_id(), 0).await;
    assert!(matches!(refused, Err(Refusal::Rate { .. })), "{refused:?}");
    assert!(!replica.limits.report().is_alone);
}
