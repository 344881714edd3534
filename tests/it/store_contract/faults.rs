//! Redis that is slow, stopped, killed, empty, full, or another than before.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use tempfile::{NamedTempFile, TempPath};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use warmroute::config::Config;
use warmroute::http::io_threads::IoThreadScope;
use warmroute::ids::RequestId;
use warmroute::observe::metrics::Registry;
use warmroute::secret::Secret;
use warmroute::store::charges::{Charge, ChargeId, Charges};
use warmroute::store::conversation::Order;
use warmroute::store::redis::{Advanced, CircuitBreaker, Mode, Settings, Tls};
use warmroute::store::{
    BackgroundResponses, CancelOutcome, Claim, Commit, CommitRefusal, Error, History, Item,
    ItemOutcome, ItemsOutcome, LockOutcome, NewConversation, Orphan, Ownership, Page, PutOutcome,
    Responses, Takeover, WriteOutcome,
};

use super::*;
use crate::cluster::eventually;
use crate::redis_server;

/// Settings under which a failure shows soon.
fn impatient(server: &Server) -> Settings {
    Settings {
        advanced: Advanced {
            read_timeout: Duration::from_millis(200),
            write_timeout: Duration::from_millis(400),
            connect_timeout: Duration::from_millis(1_000),
            ..Advanced::default()
        },

        ..at(server)
    }
}

/// These settings, for the cluster of these nodes.
fn of_cluster(nodes: &[Server], settings: Settings) -> Settings {
    Settings {
        mode: Mode::Cluster,
        urls: nodes.iter().map(Server::url).collect(),
        ..settings
    }
}

fn is_unavailable<T>(result: &Result<T, Error>) -> bool {
    matches!(result, Err(Error::Unavailable { .. }))
}

fn may_be_written<T>(result: &Result<T, Error>) -> bool {
    matches!(
        result,
        Err(Error::Unavailable { .. } | Error::Unknown { .. })
    )
}

/// Makes a check over the connection that is shared, and then over a carrier's own.
async fn over_each(check: impl AsyncFn()) {
    check().await;
    eprintln!("asked on a carrier");
    let _scope = IoThreadScope::enter(1);
    check().await;
}

#[tokio::test]
async fn a_killed_redis_makes_nothing_missing_and_comes_back_with_all() {
    over_each(async || {
        let mut server = Server::durable().await;
        let store = open(&impatient(&server), &keep());
        let (key, running) = (new_key(), new_key());
        store.create(key, finished()).await.unwrap();
        store.create(running, queued()).await.unwrap();
        server.kill();
        for _ in 0..20 {
            assert!(is_unavailable(&store.get(key).await));
            assert!(is_unavailable(&store.history(key, ANY).await));
            assert!(is_unavailable(&store.input(new_key()).await));
            assert!(is_unavailable(&store.events(running, None, 9).await));
            assert!(may_be_written(&store.delete(key).await));
            assert!(may_be_written(&store.cancel(running, cancelling()).await));
            assert!(may_be_written(
                &store.append(running, FENCE, batch(0, 0)).await
            ));
            assert!(is_unavailable(&store.admit().await) && !store.health().is_up);
        }
        let why = store.health().reason;
        assert!(!why.is_empty());
        server.run().await;
        eventually("it is there again", async || store.get(key).await.is_ok()).await;
        assert!(matches!(
            store.history(key, ANY).await,
            Ok(History::Found(_))
        ));
        // Its scripts are sent again.
        assert_eq!(
            store.append(running, FENCE, batch(0, 0)).await,
            Ok(WriteOutcome::Done)
        );
        assert!(store.admit().await.is_ok() && store.health().is_up);
    })
    .await;
}

#[tokio::test]
async fn a_redis_that_comes_back_empty_has_lost_all_and_nothing_is_brought_back() {
    over_each(async || {
        let mut server = Server::start().await;
        let store = open(&at(&server), &keep());
        let (key, running) = (new_key(), new_key());
        store.create(key, finished()).await.unwrap();
        store.create(running, queued()).await.unwrap();
        server.kill();
        server.run().await;
        eventually("it answers", async || store.get(key).await.is_ok()).await;
        assert!(store.get(key).await.unwrap().is_none());
        assert_eq!(store.history(key, ANY).await, Ok(History::Missing(key.id)));
        assert_eq!(
            store.append(running, FENCE, batch(0, 0)).await,
            Ok(WriteOutcome::Gone)
        );
        let end = ending(Status::Completed);
        assert_eq!(
            store.finalize(running, FENCE, end).await,
            Ok(WriteOutcome::Gone)
        );
        assert!(store.get(running).await.unwrap().is_none());
    })
    .await;
}

#[tokio::test]
async fn a_write_that_was_sent_and_not_answered_is_reported_as_unknown_and_may_be_repeated() {
    over_each(async || {
        let server = Server::start().await;
        let settings = Settings {
            advanced: Advanced {
                circuit_breaker: CircuitBreaker {
                    failure_threshold: 1_000,
                    ..CircuitBreaker::default()
                },
                ..impatient(&server).advanced
            },
            ..at(&server)
        };
        let store = open(&settings, &keep());
        let (key, new) = (new_key(), finished());
        // So that its script is known there.
        store.create(new_key(), finished()).await.unwrap();
        server.pause();
        assert!(is_unavailable(&store.get(key).await));
        let unanswered = store.create(key, new.clone()).await;
        assert!(
            matches!(unanswered, Err(Error::Unknown { .. })),
            "{unanswered:?}"
        );
        server.wake();
        // It had been done: another finds the id taken, and the same write knows itself.
        eventually("it was done", async || {
            store.create(key, finished()).await == Err(Error::Exists)
        })
        .await;
        assert_eq!(store.create(key, new).await, Ok(()));
    })
    .await;
}

#[tokio::test]
async fn a_redis_that_hangs_is_not_asked_for_a_while_and_then_again() {
    over_each(async || {
        let server = Server::start().await;
        let store = open(&impatient(&server), &keep());
        let key = new_key();
        store.create(key, finished()).await.unwrap();
        server.pause();
        eventually("the breaker opens", async || {
            let _ = store.get(key).await;
            !store.health().is_up
        })
        .await;
        assert!(is_unavailable(&store.admit().await));
        server.wake();
        eventually("it is asked again", async || {
            matches!(store.get(key).await, Ok(Some(_)))
        })
        .await;
        assert!(store.health().is_up);
    })
    .await;
}

/// A charge to no limits.
fn charge() -> [Charge; 1] {
    [Charge {
        id: ChargeId::Request(RequestId::new(1)),
        limits: Default::default(),
        max_concurrent: 0,
    }]
}

fn charges(charges: &[Charge]) -> Charges<'_> {
    Charges {
        charges,
        settlements: &[],
        lease: LEASE,
        charge_once: LEASE,
        was_apart: false,
    }
}

#[tokio::test]
async fn a_redis_that_has_just_replied_is_asked_after_a_charge_that_did_not_wait_for_long() {
    let server = Server::start().await;
    let settings = Settings {
        advanced: Advanced {
            circuit_breaker: CircuitBreaker {
                failure_threshold: 1,
                ..CircuitBreaker::default()
            },
            ..at(&server).advanced
        },
        ..at(&server)
    };
    let store = Redis::open(&settings, &keep(), CARRIERS, &Registry::default()).unwrap();
    let keys = store.charge_keys(Tenant::default());
    let one = charge();
    let charges = charges(&one);
    let early = Duration::from_millis(1);
    // A reply that is older than a second shows nothing, and a busy machine may stand still for as long.
    eventually("a charge ends soon after a reply", async || {
        if store.get(new_key()).await.is_err() {
            return false;
        }
        let replied = Instant::now();
        server.pause();
        let charged = store.charge(&keys, charges, early).await;
        server.wake();
        assert!(may_be_written(&charged), "{charged:?}");
        if replied.elapsed() > Duration::from_millis(800) {
            return false;
        }
        let read = store.get(new_key()).await;
        assert!(matches!(read, Ok(None)), "{read:?}");
        true
    })
    .await;
}

#[tokio::test]
async fn no_more_operations_wait_than_were_allowed() {
    over_each(async || {
        let server = Server::start().await;
        let settings = Settings {
            advanced: Advanced {
                max_in_flight: 4,
                ..at(&server).advanced
            },
            ..at(&server)
        };
        let store = open(&settings, &keep());
        store.admit().await.unwrap();
        server.pause();
        let ask = |_| {
            let store = store.clone();
            tokio::spawn(async move { store.get(new_key()).await })
        };
        let asked: Vec<_> = (0..20).map(ask).collect();
        let mut refused = 0;
        eventually("all but four are refused", async || {
            refused = asked.iter().filter(|asked| asked.is_finished()).count();
            refused == 16
        })
        .await;
        server.wake();
        for asked in asked {
            let answer = asked.await.unwrap();
            let is_refused = is_unavailable(&answer);
            assert!(is_refused || matches!(answer, Ok(None)), "{answer:?}");
        }
    })
    .await;
}

#[tokio::test]
async fn a_store_opens_before_its_redis() {
    let mut server = Server::start().await;
    server.kill();
    let store = open(&impatient(&server), &keep());
    let key = new_key();
    assert!(is_unavailable(&store.create(key, finished()).await));
    server.run().await;
    eventually("it connects", async || {
        store.create(key, finished()).await.is_ok()
    })
    .await;
}

#[tokio::test]
async fn a_full_redis_refuses_writes_and_answers_reads() {
    let server = Server::start().await;
    let store = open(&at(&server), &keep());
    let key = new_key();
    store.create(key, finished()).await.unwrap();
    store.heartbeat(OWNER, "a", LEASE).await.unwrap();
    let running = new_key();
    store.create(running, queued()).await.unwrap();
    server.cli(&["config", "set", "maxmemory", "1"]);
    let refused = store.create(new_key(), finished()).await;
    assert!(matches!(refused, Err(Error::Full { .. })), "{refused:?}");
    assert!(store.get(key).await.unwrap().is_some());
    assert!(store.health().is_up);
    // Before anything is generated, and not the lease of one that runs something.
    eventually("it is known", async || {
        matches!(store.admit().await, Err(Error::Full { .. }))
    })
    .await;
    store.heartbeat(OWNER, "a", LEASE).await.unwrap();
    // A cancel needs no memory: its worker is freed.
    let cancelled = store.cancel(running, cancelling()).await.unwrap();
    assert!(
        matches!(cancelled, CancelOutcome::Done { .. }),
        "{cancelled:?}"
    );
    let record = store.get(running).await.unwrap().unwrap();
    assert_eq!(record.status, Status::Cancelled);
    server.cli(&["config", "set", "maxmemory", "0"]);
    eventually("it takes writes again", async || {
        store.admit().await.is_ok()
    })
    .await;
}

#[tokio::test]
async fn a_redis_that_evicts_leases_makes_no_orphans_and_is_warned_of() {
    let server = Server::start().await;
    server.cli(&["config", "set", "maxmemory-policy", "volatile-ttl"]);
    let (store, other) = (open(&at(&server), &keep()), open(&at(&server), &keep()));
    store.heartbeat(OWNER, "a", LEASE).await.unwrap();
    other.heartbeat(OTHER, "b", LEASE).await.unwrap();
    let key = new_key();
    store.create(key, queued()).await.unwrap();
    let lease = server.cli(&["--scan", "--pattern", &format!("wr:o:{OWNER}")]);
    assert_eq!(server.cli(&["del", lease.trim()]).trim(), "1");
    assert_eq!(other.orphans(9).await.unwrap(), []);
    let orphan = Orphan {
        key,
        owner: Some(OWNER),
        fencing_number: 1,
    };
    assert_eq!(
        other.take_over(orphan, OTHER).await.unwrap(),
        Takeover::Raced
    );
    let warning = store.health().warning;
    assert!(
        warning.contains("noeviction") && warning.contains("volatile-ttl"),
        "{warning}"
    );
    let page = store.report().await.unwrap();
    assert_eq!(page.details["owners"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn a_policy_that_is_changed_while_redis_runs_is_warned_of() {
    let server = Server::start().await;
    let store = open(&at(&server), &keep());
    let warned = async || {
        store.heartbeat(OWNER, "a", LEASE).await.unwrap();
        store.health().warning.contains("noeviction")
    };
    assert!(!warned().await);
    server.cli(&["config", "set", "maxmemory-policy", "allkeys-lru"]);
    eventually("it is noticed", async || warned().await).await;
    server.cli(&["config", "set", "maxmemory-policy", "noeviction"]);
    eventually("it is over", async || !warned().await).await;
}

/// Leaves a server so many bytes of memory.
fn leave_memory(server: &Server, bytes: u64) {
    let info = server.cli(&["info", "memory"]);
    let used = info
        .lines()
        .find_map(|line| line.strip_prefix("used_memory:"));
    let used: u64 = used.unwrap().trim().parse().unwrap();
    server.cli(&["config", "set", "maxmemory", &(used + bytes).to_string()]);
}

#[tokio::test]
async fn a_redis_in_which_only_small_writes_fit_is_full() {
    let server = Server::start().await;
    let store = open(&at(&server), &keep());
    let large = || NewRecord {
        // Not compressible.
        input: Bytes::from_iter((0..400_000).map(|_| fastrand::u8(b'!'..=b'~'))),
        ..finished()
    };
    store.admit().await.unwrap();
    store.create(new_key(), large()).await.unwrap();
    leave_memory(&server, 200_000);
    let (mut in_vain, mut refused) = (0, 0);
    for _ in 0..40 {
        match store.admit().await {
            Ok(()) => in_vain += u32::from(store.create(new_key(), large()).await.is_err()),
            Err(Error::Full { .. }) => refused += 1,
            Err(error) => panic!("{error:?}"),
        }
        // The next check is due.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // What the connection's buffer still has decides whether the first one fits.
    assert!(in_vain <= 1 && refused > 30, "{in_vain} {refused}");
    server.cli(&["config", "set", "maxmemory", "0"]);
    eventually("it takes writes again", async || {
        store.admit().await.is_ok()
    })
    .await;
}

#[tokio::test]
async fn a_record_of_a_newer_release_is_left_as_it_is() {
    let server = Server::start().await;
    let store = open(&at(&server), &keep());
    let key = new_key();
    store.create(key, queued()).await.unwrap();
    let name = server.cli(&["--scan", "--pattern", "wr:r:*"]);
    server.cli(&["hset", name.trim(), "v", "3"]);
    let is_unreadable = |error: Option<Error>| matches!(error, Some(Error::Unreadable(_)));
    assert!(is_unreadable(store.get(key).await.err()));
    assert!(is_unreadable(store.history(key, ANY).await.err()));
    assert!(is_unreadable(store.events(key, None, 9).await.err()));
    assert!(is_unreadable(store.start(key, FENCE).await.err()));
    assert!(is_unreadable(store.cancel(key, cancelling()).await.err()));
    let end = ending(Status::Completed);
    assert!(is_unreadable(store.finalize(key, FENCE, end).await.err()));
    assert_eq!(server.cli(&["hget", name.trim(), "st"]).trim(), "queued");
    // Only this record is affected.
    assert!(store.health().is_up);
}

#[tokio::test]
async fn a_stored_response_is_one_write_and_a_chain_of_a_hundred_two_reads() {
    let server = Server::start().await;
    let store = open(&at(&server), &keep());
    let mut key = new_key();
    store.create(key, finished()).await.unwrap();
    for _ in 0..100 {
        let History::Found(found) = store.history(key, ANY).await.unwrap() else {
            panic!("not found");
        };
        key = child(key);
        store.create(key, continuing(found.chain)).await.unwrap();
    }
    let next = child(key);
    let listening = server.listen().await;
    let History::Found(found) = store.history(key, ANY).await.unwrap() else {
        panic!("not found");
    };
    assert_eq!(found.turns.len(), 101);
    let commands = listening.commands().await;
    assert_eq!(commands, ["hmget", "echo", "evalsha"]);
    let listening = server.listen().await;
    store.create(next, continuing(found.chain)).await.unwrap();
    assert_eq!(listening.commands().await, ["evalsha"]);
}

#[tokio::test]
async fn every_key_of_a_response_carries_its_roots_tag_and_once_it_has_ended_a_time_to_live() {
    let server = Server::start().await;
    let store = open(&at(&server), &RetentionSettings::default());
    let key = new_key();
    let mut new = queued();
    new.input = (0..3 << 20).map(|_| fastrand::u8(..)).collect();
    store.create(key, new).await.unwrap();
    assert_eq!(
        store.append(key, FENCE, batch(0, 0)).await,
        Ok(WriteOutcome::Done)
    );
    let tag = format!("{{{}:{}}}", key.tenant, key.id.root());
    let listed = server.cli(&["--scan"]);
    let own: Vec<_> = listed.lines().filter(|name| name.contains('{')).collect();
    assert_eq!(own.len(), 2, "{listed}");
    let left = |name: &str| -> i64 { server.cli(&["ttl", name]).trim().parse().unwrap() };
    for name in &own {
        assert!(name.starts_with("wr:") && name.contains(&tag), "{name}");
        // However long it runs.
        assert_eq!(left(name), -1, "{name}");
    }
    let ended = store
        .finalize(key, FENCE, ending(Status::Completed))
        .await
        .unwrap();
    assert_eq!(ended, WriteOutcome::Done);
    for name in own {
        let least = if name.starts_with("wr:e:") {
            500
        } else {
            29 * 24 * 3_600
        };
        assert!(left(name) > least, "{name}: {}", left(name));
    }
}

#[tokio::test]
async fn a_password_is_needed_where_one_is_set_and_a_wrong_one_is_no_missing_response() {
    over_each(async || {
        let server = Server::with(
            &[
                "--requirepass",
                "all",
                "--user",
                "wr",
                "on",
                ">pass",
                "~wr:*",
                "+@all",
            ],
            &["-a", "all"],
        )
        .await;
        let with = |username: &str, password: &str, settings: Settings| {
            let settings = Settings {
                username: username.to_owned(),
                password: Secret::new(password),
                ..settings
            };
            open(&settings, &keep())
        };
        for (username, password) in [("", "all"), ("wr", "pass")] {
            let (store, key) = (with(username, password, at(&server)), new_key());
            store.create(key, finished()).await.unwrap();
            assert!(store.get(key).await.unwrap().is_some());
        }
        for (username, password) in [("", ""), ("", "wrong"), ("wr", "wrong")] {
            let store = with(username, password, impatient(&server));
            let found = store.get(new_key()).await;
            assert!(is_unavailable(&found), "{username} {password}: {found:?}");
        }
    })
    .await;
}

fn fixture(name: &str) -> String {
    format!("{}/tests/fixtures/tls/{name}", env!("CARGO_MANIFEST_DIR"))
}

#[tokio::test]
async fn tls_proves_both_sides_where_it_is_asked_for() {
    let (ca, cert, key) = (
        fixture("ca.pem"),
        fixture("server.pem"),
        fixture("server.key"),
    );
    let (own_cert, own_key) = (fixture("client.pem"), fixture("client.key"));
    let server = Server::with(
        &[
            "--tls-port",
            "PORT",
            "--port",
            "0",
            "--tls-cert-file",
            &cert,
            "--tls-key-file",
            &key,
            "--tls-ca-cert-file",
            &ca,
        ],
        &[
            "--tls", "--cacert", &ca, "--cert", &own_cert, "--key", &own_key,
        ],
    )
    .await;
    let port = server.port;
    let with = |tls: Tls| {
        let settings = Settings {
            urls: vec![format!("rediss://localhost:{port}")],
            tls,
            ..at(&server)
        };
        open(&settings, &keep())
    };
    let whole = Tls {
        ca_file: ca.clone(),
        certificate_file: own_cert,
        key_file: own_key,
    };
    let (store, id) = (with(whole.clone()), new_key());
    store.create(id, finished()).await.unwrap();
    assert!(store.get(id).await.unwrap().is_some());
    // Without our own certificate, and without the authority that signed the server's.
    let nameless = Tls {
        ca_file: ca,
        ..Tls::default()
    };
    let distrustful = Tls {
        ca_file: String::new(),
        ..whole
    };
    for tls in [nameless, distrustful] {
        assert!(is_unavailable(&with(tls).get(id).await));
    }
}

#[tokio::test]
async fn a_cluster_keeps_a_chain_in_one_slot_and_outlives_a_master() {
    let mut nodes = redis_server::cluster().await;
    let settings = Settings {
        mode: Mode::Cluster,
        urls: nodes.iter().map(Server::url).collect(),
        ..at(&nodes[0])
    };
    let store = open(&settings, &keep());
    // Over all slots.
    let mut chains = Vec::new();
    for _ in 0..30 {
        let first = new_key();
        store.create(first, finished()).await.unwrap();
        let History::Found(found) = store.history(first, ANY).await.unwrap() else {
            panic!("not found");
        };
        let second = child(first);
        store.create(second, continuing(found.chain)).await.unwrap();
        let running = child(first);
        store.create(running, queued()).await.unwrap();
        assert_eq!(
            store.append(running, FENCE, batch(0, 0)).await,
            Ok(WriteOutcome::Done)
        );
        chains.push((second, running));
    }
    let is_whole = async |(second, running): &(ResponseKey, ResponseKey)| -> Result<bool, Error> {
        let History::Found(found) = store.history(*second, ANY).await? else {
            return Ok(false);
        };
        let events = store.events(*running, None, 99).await?;
        Ok(found.turns.len() == 2 && events.is_some_and(|events| events.last == Some(0)))
    };
    for chain in &chains {
        assert_eq!(is_whole(chain).await, Ok(true));
    }
    // Replication does not wait for the replicas; this test does.
    for node in &nodes {
        node.cli(&["wait", "1", "5000"]);
    }
    let lost = nodes
        .iter()
        .position(|node| node.cli(&["role"]).starts_with("master"))
        .unwrap();
    nodes[lost].kill();
    eventually("a replica has taken over", async || {
        for chain in &chains {
            match is_whole(chain).await {
                Ok(whole) => assert!(whole, "reported as missing while its master was down"),
                Err(_) => return false,
            }
        }
        true
    })
    .await;
    for (_, running) in &chains {
        assert_eq!(
            store.append(*running, FENCE, batch(1, 1)).await,
            Ok(WriteOutcome::Done)
        );
    }
    assert!(store.health().is_up);
    let report = store.report().await.unwrap();
    assert_eq!(report.details["server"]["cluster_state"], "ok");
}

#[tokio::test]
async fn a_store_opens_while_a_node_of_its_cluster_hangs() {
    let nodes = redis_server::cluster().await;
    let is_replica = |node: &&Server| node.cli(&["role"]).starts_with("slave");
    nodes.iter().find(is_replica).unwrap().pause();
    let store = open(&of_cluster(&nodes, impatient(&nodes[0])), &keep());
    eventually("it connects", async || {
        store.create(new_key(), finished()).await.is_ok()
    })
    .await;
}

#[tokio::test]
async fn a_store_opens_while_a_master_of_its_cluster_hangs() {
    let nodes = redis_server::cluster_with_replicas(0).await;
    nodes[1].pause();
    let store = open(&of_cluster(&nodes, impatient(&nodes[0])), &keep());
    eventually("it connects", async || {
        store.create(new_key(), finished()).await.is_ok()
    })
    .await;
}

#[tokio::test]
async fn a_cluster_admits_what_will_be_stored_until_no_node_of_it_replies() {
    let nodes = redis_server::cluster_with_replicas(0).await;
    let store = open(&of_cluster(&nodes, impatient(&nodes[0])), &keep());
    let patient = open(&of_cluster(&nodes, at(&nodes[0])), &keep());
    eventually("it is admitted", async || store.admit().await.is_ok()).await;
    patient.admit().await.unwrap();
    nodes[0].pause();
    for _ in 0..3 {
        // A reply counts for a second.
        tokio::time::sleep(Duration::from_millis(1_100)).await;
        patient.admit().await.unwrap();
    }
    for node in &nodes[1..] {
        node.pause();
    }
    eventually("nothing is admitted", async || store.admit().await.is_err()).await;
    for _ in 0..8 {
        assert!(store.admit().await.is_err());
    }
    assert!(!store.health().is_up);
    for node in &nodes {
        node.wake();
    }
    eventually("it is admitted again", async || store.admit().await.is_ok()).await;
    assert!(store.health().is_up);
}

#[tokio::test]
async fn a_node_of_a_cluster_that_hangs_is_not_waited_for_by_each_charge() {
    let nodes = redis_server::cluster_with_replicas(0).await;
    let settings = Settings {
        advanced: Advanced {
            circuit_breaker: CircuitBreaker {
                failure_threshold: 1,
                open_duration: Duration::from_secs(60),
            },
            ..at(&nodes[0]).advanced
        },
        ..of_cluster(&nodes, at(&nodes[0]))
    };
    let store = Redis::open(&settings, &keep(), CARRIERS, &Registry::default()).unwrap();
    let keys = store.charge_keys(Tenant::default());
    let one = charge();
    let ask = async |timeout_ms| {
        let timeout = Duration::from_millis(timeout_ms);
        store.charge(&keys, charges(&one), timeout).await
    };
    // A node has just replied.
    ask(5_000).await.unwrap();
    for node in &nodes {
        node.pause();
    }
    let unanswered = ask(1).await;
    assert!(may_be_written(&unanswered), "{unanswered:?}");
    let refused = ask(1).await;
    assert!(is_unavailable(&refused), "{refused:?}");
}

#[tokio::test]
async fn all_that_wait_for_a_cluster_that_hangs_ask_it_together() {
    let nodes = redis_server::cluster_with_replicas(0).await;
    let registry = Registry::default();
    let settings = of_cluster(&nodes, at(&nodes[0]));
    let store: Store =
        Arc::new(redis::Redis::open(&settings, &keep(), CARRIERS, &registry).unwrap());
    eventually("it is admitted", async || store.admit().await.is_ok()).await;
    for node in &nodes {
        node.pause();
    }
    // A reply counts for a second.
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    let in_flight = || -> u32 {
        let text = registry.text();
        let name = "warmroute_store_operations_in_flight ";
        let mut values = text.lines().filter_map(|line| line.strip_prefix(name));
        values.next().unwrap().parse().unwrap()
    };
    let mut waiting = tokio::task::JoinSet::new();
    for _ in 0..50 {
        let store = store.clone();
        waiting.spawn(async move { store.admit().await.is_err() });
    }
    let mut most = 0;
    eventually("all are refused", async || {
        most = most.max(in_flight());
        while let Some(is_refused) = waiting.try_join_next() {
            assert!(is_refused.unwrap());
        }
        waiting.is_empty()
    })
    .await;
    // Four probes, and the check of refused commands.
    assert!((1..=5).contains(&most), "{most}");
    // It counts as one failure for each of them.
    assert!(!store.health().is_up);
    eventually(
        "one asks again, and others do not wait for it",
        async || {
            let mut trial = store.admit();
            let soon = tokio::time::timeout(Duration::from_millis(20), &mut trial).await;
            soon.is_err()
                && tokio::select! {
                    biased;
                    _ = trial => false,
                    other = store.admit() => is_unavailable(&other),
                }
        },
    )
    .await;
}

#[tokio::test]
async fn a_cluster_is_full_when_all_its_nodes_are() {
    let nodes = redis_server::cluster_with_replicas(0).await;
    let store = open(&of_cluster(&nodes, at(&nodes[0])), &keep());
    eventually("it is admitted", async || store.admit().await.is_ok()).await;
    let set_memory = |node: &Server, max: &str| node.cli(&["config", "set", "maxmemory", max]);
    set_memory(&nodes[0], "1");
    eventually("one is full", async || {
        matches!(
            store.create(new_key(), finished()).await,
            Err(Error::Full { .. })
        )
    })
    .await;
    store.admit().await.unwrap();
    for node in &nodes[1..] {
        set_memory(node, "1");
    }
    eventually("it is full", async || {
        matches!(store.admit().await, Err(Error::Full { .. }))
    })
    .await;
    // A reply to a read does not say that writes are taken.
    assert!(matches!(store.get(new_key()).await, Ok(None)));
    assert!(matches!(store.admit().await, Err(Error::Full { .. })));
    for node in &nodes {
        set_memory(node, "0");
    }
    eventually("it is admitted again", async || store.admit().await.is_ok()).await;
}

#[tokio::test]
async fn one_node_of_a_cluster_that_may_evict_is_warned_of() {
    let nodes = redis_server::cluster_with_replicas(0).await;
    let store = open(&of_cluster(&nodes, at(&nodes[0])), &keep());
    let warned = async || {
        store.heartbeat(OWNER, "a", LEASE).await.unwrap();
        store.health().warning.contains("allkeys-lru")
    };
    assert!(!warned().await);
    nodes[1].cli(&["config", "set", "maxmemory-policy", "allkeys-lru"]);
    eventually("it is noticed", async || warned().await).await;
    nodes[1].cli(&["config", "set", "maxmemory-policy", "noeviction"]);
    eventually("it is over", async || !warned().await).await;
}

#[tokio::test]
async fn sentinels_name_the_new_master_after_the_old_one_died() {
    over_each(async || {
        let mut master = Server::start().await;
        let port = master.port.to_string();
        let replica = Server::with(&["--replicaof", "127.0.0.1", &port], &[]).await;
        let sentinel = Server::sentinel(&master).await;
        eventually("the sentinel knows the replica", async || {
            sentinel
                .cli(&["sentinel", "replicas", "main"])
                .contains("slave")
                && replica
                    .cli(&["info", "replication"])
                    .contains("master_link_status:up")
        })
        .await;
        let settings = Settings {
            mode: Mode::Sentinel,
            master: "main".to_owned(),
            // The first is not there.
            urls: vec!["redis://127.0.0.1:1".to_owned(), sentinel.url()],
            ..impatient(&master)
        };
        let store = open(&settings, &keep());
        let key = new_key();
        eventually("it is written", async || {
            store.create(key, finished()).await.is_ok()
        })
        .await;
        eventually("the replica has it", async || {
            replica
                .cli(&["--scan", "--pattern", "wr:r:*"])
                .contains(":r:")
        })
        .await;
        master.kill();
        eventually("it is read from the new master", async || {
            match store.get(key).await {
                Ok(found) => {
                    assert!(
                        found.is_some(),
                        "reported as missing while its master was down"
                    );
                    true
                }
                Err(_) => false,
            }
        })
        .await;
        eventually("and written", async || {
            store.create(new_key(), finished()).await.is_ok()
        })
        .await;
    })
    .await;
}

#[tokio::test]
async fn connections_that_were_cut_are_made_anew_and_whoever_asks_does_not_notice() {
    let server = Server::start().await;
    let store = open(&at(&server), &keep());
    let connections = async || store.report().await.unwrap().details["connections_opened"].clone();
    let key = new_key();
    store.create(key, finished()).await.unwrap();
    {
        let _scope = IoThreadScope::enter(1);
        assert!(store.get(key).await.unwrap().is_some());
        assert_eq!(connections().await, 2);
        // A carrier beyond those that have one of their own.
        let _scope = IoThreadScope::enter(7);
        assert!(store.get(key).await.unwrap().is_some());
        assert_eq!(connections().await, 2);
    }
    for round in 1..=5 {
        server.cli(&["client", "kill", "type", "normal"]);
        let _scope = IoThreadScope::enter(round % 2);
        for _ in 0..3 {
            assert!(store.get(key).await.unwrap().is_some());
        }
        drop(_scope);
        assert!(store.create(new_key(), finished()).await.is_ok());
        assert!(store.health().is_up);
    }
    // Whoever found its own cut has the other one made anew with it: two a round, not more.
    let made = connections().await.as_u64().unwrap();
    assert!((5..=12).contains(&made), "{made}");
}

/// Passes connections on to a server, and nothing more on those up to the number that it is given.
async fn hanging(server: &Server) -> (Settings, watch::Sender<usize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let to = server.url().replace("redis://", "");
    let (hang, hung) = watch::channel(0);
    tokio::spawn(async move {
        for number in 1.. {
            let Ok((mut client, _)) = listener.accept().await else {
                break;
            };
            let mut server = TcpStream::connect(to.trim_end_matches('/')).await.unwrap();
            let mut hung = hung.clone();
            tokio::spawn(async move {
                tokio::select! {
                    _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
                    // Both stay open.
                    () = async { drop(hung.wait_for(|hung| number <= *hung).await) } => std::future::pending().await,
                }
            });
        }
    });
    let settings = Settings {
        urls: vec![format!("redis://{address}")],
        ..impatient(server)
    };
    (settings, hang)
}

#[tokio::test]
async fn a_connection_that_hangs_alone_is_made_anew_while_others_answer() {
    let server = Server::start().await;
    let (settings, hang) = hanging(&server).await;
    let store = open(&settings, &keep());
    let key = new_key();
    {
        let _scope = IoThreadScope::enter(1);
        store.create(key, finished()).await.unwrap();
    }
    assert!(store.get(key).await.unwrap().is_some());
    hang.send(1).unwrap();
    eventually("the carrier is answered again", async || {
        let scope = IoThreadScope::enter(1);
        let is_answered = store.get(key).await.is_ok();
        drop(scope);
        assert!(store.get(key).await.unwrap().is_some());
        is_answered
    })
    .await;
    let details = store.report().await.unwrap().details;
    assert_eq!(details["connections_opened"], 3);
}

#[tokio::test]
async fn a_carrier_that_gets_no_connection_of_its_own_goes_with_the_others() {
    let server = Server::start().await;
    let store = open(&at(&server), &keep());
    let connections = async || store.report().await.unwrap().details["connections_opened"].clone();
    let key = new_key();
    store.create(key, finished()).await.unwrap();
    server.cli(&["config", "set", "maxclients", "2"]);
    let address = server.url().replace("redis://", "");
    let other = TcpStream::connect(address.trim_end_matches('/'))
        .await
        .unwrap();
    let _scope = IoThreadScope::enter(1);
    for _ in 0..100 {
        assert!(store.get(key).await.unwrap().is_some());
    }
    assert_eq!(connections().await, 1);
    drop(other);
    eventually("it has its own", async || {
        assert!(store.get(key).await.unwrap().is_some());
        connections().await == 2
    })
    .await;
}

#[tokio::test]
async fn who_stops_waiting_holds_no_place_and_breaks_no_connection() {
    let server = Server::start().await;
    let settings = Settings {
        advanced: Advanced {
            max_in_flight: 10,
            ..at(&server).advanced
        },
        ..at(&server)
    };
    let store = open(&settings, &keep());
    let _scope = IoThreadScope::enter(1);
    let key = new_key();
    store.create(key, finished()).await.unwrap();
    for round in 0..1_000 {
        let asked = store.get(key);
        // Left before it is sent, while it is on its way, or after it was answered.
        let polls = round % 4;
        let asked = tokio::time::timeout(Duration::from_micros(polls * 50), asked);
        let _ = asked.await;
    }
    let details = store.report().await.unwrap().details;
    assert_eq!(
        (&details["connections_opened"], &details["in_flight"]),
        (&1.into(), &0.into())
    );
    assert!(store.get(key).await.unwrap().is_some());
}

#[tokio::test]
async fn what_it_does_shows_in_metrics_and_to_operators() {
    let server = Server::start().await;
    let registry = Registry::default();
    let settings = at(&server);
    let store = redis::Redis::open(&settings, &keep(), CARRIERS, &registry).unwrap();
    let key = new_key();
    store.create(key, queued()).await.unwrap();
    let late = FencingToken { number: 7, ..FENCE };
    assert_eq!(
        store.append(key, late, batch(0, 0)).await,
        Ok(WriteOutcome::Fenced)
    );
    store
        .heartbeat(OWNER, "here", Duration::from_secs(9))
        .await
        .unwrap();
    let text = registry.text();
    for line in [
        "warmroute_store_operations_total{operation=\"create\",outcome=\"ok\"} 1",
        "warmroute_store_operations_total{operation=\"append\",outcome=\"fenced\"} 1",
        "warmroute_store_fenced_writes_total 1",
        "warmroute_store_connections_opened_total 1",
        "warmroute_store_circuit_breaker_state 0",
        "warmroute_store_operation_duration_seconds_count{operation=\"create\"} 1",
    ] {
        assert!(text.contains(line), "no {line} in {text}");
    }
    let report = store.report().await.unwrap();
    let details = report.details;
    assert!(report.health.is_up && details["circuit_breaker"] == "closed");
    let owner = &details["owners"][0];
    assert_eq!(
        (&owner["name"], &owner["running"]),
        (&"here".into(), &1.into())
    );
    assert!(details["scripts"].as_array().unwrap().len() > 10);
    assert!(details["server"]["redis_version"].is_string());
}

/// Bytes that do not shrink.
fn noise(bytes: usize) -> Bytes {
    (0..bytes).map(|_| fastrand::u8(..)).collect()
}

/// Passes connections on to a server, and what it answers at so many bytes a second all together.
async fn narrow(server: &Server, bytes_per_s: u64) -> Settings {
    const AT_A_TIME: usize = 64 << 10;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let to = server.url().replace("redis://", "");
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (mut from_client, mut to_client) = client.into_split();
            let server = TcpStream::connect(to.trim_end_matches('/')).await.unwrap();
            let (mut from_server, mut to_server) = server.into_split();
            tokio::spawn(async move {
                let _ = tokio::io::copy(&mut from_client, &mut to_server).await;
            });
            tokio::spawn(async move {
                let mut buffer = vec![0; AT_A_TIME];
                while let Ok(count @ 1..) = from_server.read(&mut buffer).await {
                    let takes = Duration::from_micros(count as u64 * 1_000_000 / bytes_per_s);
                    tokio::time::sleep(takes).await;
                    if to_client.write_all(&buffer[..count]).await.is_err() {
                        break;
                    }
                }
            });
        }
    });
    Settings {
        urls: vec![format!("redis://{address}")],
        advanced: Advanced {
            read_timeout: Duration::from_millis(1_000),
            ..Advanced::default()
        },

        ..at(server)
    }
}

#[tokio::test]
async fn a_long_history_leaves_small_reads_their_turn() {
    let server = Server::start().await;
    let near = open(&at(&server), &keep());
    let (small, conversation) = (new_key(), new_conversation_key());
    near.create(small, finished()).await.unwrap();
    let mut key = new_key();
    let mut expected = Vec::new();
    // Some in one field, one in pieces.
    for turn in 0..16 {
        let mut record = finished();
        if turn > 0 {
            let History::Found(found) = near.history(key, ANY).await.unwrap() else {
                panic!("not found");
            };
            record.parent = Some(found.chain);
            key = child(key);
        }
        record.input = noise(if turn == 7 { 5 << 20 } else { 700_000 });
        expected.push(record.input.clone());
        near.create(key, record).await.unwrap();
    }
    let items: Vec<Item> = (0..12)
        .map(|number| Item {
            id: format!("msg_{number}").into(),
            json: noise(if number == 3 { 3 << 20 } else { 500_000 }),
        })
        .collect();
    let new = NewConversation {
        token: token(),
        object: Bytes::from_static(b"{}"),
        items: items.clone(),
    };
    near.create_conversation(conversation, new).await.unwrap();

    // In one answer either would take two or three times its deadline.
    let far = open(&narrow(&server, 6 << 20).await, &keep());
    let is_done = std::sync::atomic::AtomicBool::new(false);
    let long = async {
        let History::Found(found) = far.history(key, ANY).await.unwrap() else {
            panic!("not found");
        };
        let inputs: Vec<_> = found.turns.into_iter().map(|turn| turn.input).collect();
        assert!(inputs == expected);
        let all = far.all_items(conversation, 1 << 30).await.unwrap();
        let has_more = false;
        assert!(all == ItemsOutcome::Found { items, has_more });
        is_done.store(true, Relaxed);
    };
    let short = async {
        let mut count = 0;
        while !is_done.load(Relaxed) {
            assert!(far.get(small).await.unwrap().is_some());
            assert!(far.health().is_up);
            count += 1;
        }
        count
    };
    let ((), count) = tokio::join!(long, short);
    assert!(count > 5, "{count}");
}

#[tokio::test]
async fn a_damaged_key_is_no_trouble_of_the_servers() {
    let server = Server::start().await;
    let store = open(&at(&server), &keep());
    let (other, damaged) = (new_key(), new_key());
    store.create(damaged, queued()).await.unwrap();
    let name = server.cli(&["--scan", "--pattern", "wr:r:*"]);
    server.cli(&["hset", name.trim(), "v", "no number"]);
    let is_unreadable = |error: Option<Error>| matches!(error, Some(Error::Unreadable(_)));
    for _ in 0..10 {
        let started = store.start(damaged, FENCE).await;
        assert!(is_unreadable(started.err()));
    }
    server.cli(&["set", name.trim(), "another type"]);
    for _ in 0..10 {
        assert!(is_unreadable(store.get(damaged).await.err()));
        assert!(is_unreadable(store.start(damaged, FENCE).await.err()));
    }
    assert!(store.health().is_up && store.get(other).await.unwrap().is_none());
}

#[tokio::test]
async fn a_response_whose_object_is_large_is_cancelled_and_leaves_no_pieces_behind() {
    let server = Server::start().await;
    let store = open(&at(&server), &keep());
    let key = new_key();
    let mut record = queued();
    record.content.response = noise(2 << 20);
    store.create(key, record).await.unwrap();
    let cancel = |response: Bytes| Cancellation {
        response,
        ..cancelling()
    };
    let cancelled = noise(3 << 20);
    let outcome = store.cancel(key, cancel(cancelled.clone())).await;
    assert!(
        matches!(outcome, Ok(CancelOutcome::Done { .. })),
        "{outcome:?}"
    );
    let found = store.get(key).await.unwrap().unwrap();
    assert!(found.content.response == cancelled);
    let name = server.cli(&["--scan", "--pattern", "wr:r:*"]);
    let pieces = || server.cli(&["hkeys", name.trim()]).matches("re:").count();
    assert_eq!(pieces(), 7);
    let outcome = store.cancel(key, cancel(noise(2 << 20))).await;
    assert!(
        matches!(outcome, Ok(CancelOutcome::Terminal(_))),
        "{outcome:?}"
    );
    assert_eq!(pieces(), 7);
}

#[tokio::test]
async fn of_two_cancels_at_once_only_the_pieces_of_one_stay() {
    let server = Server::start().await;
    let store = open(&at(&server), &keep());
    let key = new_key();
    store.create(key, queued()).await.unwrap();
    // While one writes its many pieces the other one writes its few, and cancels.
    let (many, few) = (noise(8 << 20), noise(2 << 20));
    let cancel = async |response: &Bytes| {
        let cancellation = Cancellation {
            response: response.clone(),
            ..cancelling()
        };
        store.cancel(key, cancellation).await.unwrap()
    };
    let outcomes = tokio::join!(cancel(&many), cancel(&few));
    let (stays, expected) = match outcomes {
        (CancelOutcome::Done { .. }, CancelOutcome::Terminal(_)) => (many, 17),
        (CancelOutcome::Terminal(_), CancelOutcome::Done { .. }) => (few, 5),
        outcomes => panic!("{outcomes:?}"),
    };
    let name = server.cli(&["--scan", "--pattern", "wr:r:*"]);
    let pieces = || server.cli(&["hkeys", name.trim()]).matches("re:").count();
    eventually("the others are gone", async || pieces() == expected).await;
    let found = store.get(key).await.unwrap().unwrap();
    assert!(found.content.response == stays);
}

#[tokio::test]
async fn a_cancel_that_does_not_fit_leaves_no_pieces_behind() {
    let server = Server::start().await;
    let store = open(&at(&server), &keep());
    let key = new_key();
    store.create(key, queued()).await.unwrap();
    // The first pieces fit.
    leave_memory(&server, 4 << 20);
    let cancel = async || {
        let cancellation = Cancellation {
            response: noise(8 << 20),
            ..cancelling()
        };
        store.cancel(key, cancellation).await
    };
    let name = server.cli(&["--scan", "--pattern", "wr:r:*"]);
    let pieces = || server.cli(&["hkeys", name.trim()]).matches("re:").count();
    for _ in 0..3 {
        let outcome = cancel().await;
        assert!(matches!(outcome, Err(Error::Full { .. })), "{outcome:?}");
        eventually("its pieces are gone", async || pieces() == 0).await;
    }
    server.cli(&["config", "set", "maxmemory", "0"]);
    let outcome = cancel().await;
    assert!(
        matches!(outcome, Ok(CancelOutcome::Done { .. })),
        "{outcome:?}"
    );
    assert_eq!(pieces(), 17);
}

#[tokio::test]
async fn items_added_again_leave_no_pieces_behind() {
    let server = Server::start().await;
    let store = open(&at(&server), &keep());
    let key = new_conversation_key();
    let item = Item {
        id: "msg_1".into(),
        json: noise(2 << 20),
    };
    let new = NewConversation {
        token: token(),
        object: Bytes::from_static(b"{}"),
        items: vec![],
    };
    store.create_conversation(key, new).await.unwrap();
    let token = token();
    let add = async || store.add_items(key, token, vec![item.clone()]).await;
    assert_eq!(add().await, Ok(PutOutcome::Done));
    let name = server.cli(&["--scan", "--pattern", "wr:i:*"]);
    let fields = || server.cli(&["hlen", name.trim()]);
    let whole = fields();
    assert_eq!(add().await, Ok(PutOutcome::Done));
    eventually("the second pieces are gone", async || fields() == whole).await;
    let found = store.item(key, "msg_1").await.unwrap();
    assert!(found == ItemOutcome::Found(item.json.clone()));
}

#[tokio::test]
async fn a_chain_that_goes_on_is_kept_from_its_first_turn() {
    let server = Server::start().await;
    let store = open(&at(&server), &RetentionSettings::default());
    let mut key = new_key();
    store.create(key, finished()).await.unwrap();
    let names = || server.cli(&["--scan", "--pattern", "wr:r:*"]);
    for turn in 2..5 {
        // Nearly all of their time has passed.
        for name in names().lines() {
            server.cli(&["pexpire", name, "60000"]);
        }
        let History::Found(found) = store.history(key, ANY).await.unwrap() else {
            panic!("not found");
        };
        key = child(key);
        store.create(key, continuing(found.chain)).await.unwrap();
        let names = names();
        assert_eq!(names.lines().count(), turn);
        for name in names.lines() {
            let left: u64 = server.cli(&["ttl", name]).trim().parse().unwrap();
            assert!(left > 2_592_000 - 600, "{name}: {left}");
        }
    }
    // What has more time left than it needs is not written to.
    let before: Vec<String> = names()
        .lines()
        .map(|name| server.cli(&["persist", name]))
        .collect();
    assert_eq!(before.len(), 4);
    assert!(matches!(
        store.history(key, ANY).await,
        Ok(History::Found(_))
    ));
    for name in names().lines() {
        assert_eq!(server.cli(&["ttl", name]).trim(), "-1");
    }
}

#[tokio::test]
async fn what_a_long_run_continues_is_kept_as_long_as_its_response() {
    let server = Server::start().await;
    let store = open(&at(&server), &RetentionSettings::default());
    let names = || server.cli(&["--scan", "--pattern", "wr:r:*"]);
    let left = |name: &str| -> i64 { server.cli(&["ttl", name]).trim().parse().unwrap() };
    let mut key = new_key();
    store.create(key, finished()).await.unwrap();
    for is_background in [false, true] {
        let History::Found(found) = store.history(key, ANY).await.unwrap() else {
            panic!("not found");
        };
        let turns = found.turns.len();
        key = child(key);
        if is_background {
            let new = NewRecord {
                parent: Some(found.chain.clone()),
                ..queued()
            };
            store.create(key, new).await.unwrap();
        }
        // The run lasts for nearly all of their time. What runs has no end.
        for name in names().lines().filter(|name| left(name) > 0) {
            server.cli(&["pexpire", name, "60000"]);
        }
        if is_background {
            assert_eq!(store.keep_chain(key).await, Ok(None));
            let ended = store.finalize(key, FENCE, ending(Status::Completed)).await;
            assert_eq!(ended, Ok(WriteOutcome::Done));
        } else {
            store.create(key, continuing(found.chain)).await.unwrap();
        }
        let names = names();
        assert_eq!(names.lines().count(), turns + 1);
        for name in names.lines() {
            assert!(left(name) > 2_592_000 - 600, "{name}: {}", left(name));
        }
    }
}

/// Creates a chain of this many tiny turns, which continues `keys`.
async fn chain_on(store: &Store, keys: &mut Vec<ResponseKey>, turns: usize) {
    for _ in 0..turns {
        let ids = keys.iter().map(|key| key.id).collect();
        let new = continuing(Chain { ids, bytes: 0 });
        let next = child(keys[0]);
        store.create(next, new).await.unwrap();
        keys.push(next);
    }
}

#[tokio::test]
async fn what_a_chain_takes_grows_with_its_turns() {
    let server = Server::start().await;
    let store = open(&at(&server), &RetentionSettings::default());
    let used = || -> usize {
        let memory = server.cli(&["info", "memory"]);
        let used = memory
            .lines()
            .find_map(|line| line.strip_prefix("used_memory_dataset:"));
        used.unwrap().trim().parse().unwrap()
    };
    let mut keys = vec![new_key()];
    store.create(keys[0], finished()).await.unwrap();
    let before = used();
    chain_on(&store, &mut keys, 500).await;
    let first = used() - before;
    chain_on(&store, &mut keys, 499).await;
    let all = used() - before;
    eprintln!("500 turns: {first} bytes, 1,000 turns: {all} bytes");
    assert!(all < 2_500_000 && all < first * 5 / 2, "{first} {all}");
}

#[tokio::test]
async fn a_chain_that_an_older_release_began_goes_on() {
    let server = Server::start().await;
    let store = open(&at(&server), &RetentionSettings::default());
    let mut keys = vec![new_key()];
    store.create(keys[0], finished()).await.unwrap();
    chain_on(&store, &mut keys, 149).await;
    // Older releases gave each record the whole chain.
    let script = "local chain = '' \
        for number, key in ipairs(KEYS) do \
          if redis.call('HEXISTS', key, 'st') == 0 then return 'missing' end \
          redis.call('HSET', key, 'pa', chain, 'v', '1') \
          redis.call('HDEL', key, 'an') \
          local own = string.match(key, '%x+$') \
          chain = chain .. string.gsub(own, '..', function(hex) return string.char(tonumber(hex, 16)) end) \
        end \
        return 'done'";
    let name = |key: &ResponseKey| {
        let (root, own) = (key.id.root(), key.id.own());
        format!("wr:r:{{{}:{root}}}:{own:032x}", key.tenant)
    };
    let names: Vec<String> = keys.iter().map(name).collect();
    let count = names.len().to_string();
    let mut call = vec!["eval", script, &count];
    call.extend(names.iter().map(String::as_str));
    assert_eq!(server.cli(&call).trim(), "done");
    for last in [127, 128, 129, 149] {
        let History::Found(found) = store.history(keys[last], ANY).await.unwrap() else {
            panic!("not found");
        };
        assert_eq!(found.turns.len(), last + 1);
    }
    chain_on(&store, &mut keys, 150).await;
    let History::Found(found) = store.history(keys[299], ANY).await.unwrap() else {
        panic!("not found");
    };
    assert!(found.chain.ids.iter().eq(keys.iter().map(|key| &key.id)));
}

/// The name of the one record that Redis holds.
fn record_name(server: &Server) -> String {
    server.cli(&["keys", "*r:{*"]).trim().to_owned()
}

#[tokio::test]
async fn one_record_that_cannot_be_read_does_not_keep_from_the_others() {
    let server = Server::start().await;
    let store = open(&at(&server), &keep());
    let (newer, own) = (new_key(), new_key());
    store.create(newer, queued()).await.unwrap();
    server.cli(&["hset", &record_name(&server), "v", "99"]);
    store.create(own, queued()).await.unwrap();
    let found = store.orphans(9).await.unwrap();
    assert_eq!(
        found.iter().map(|orphan| orphan.key).collect::<Vec<_>>(),
        [own]
    );
    let running = vec![(newer, FENCE), (own, FENCE)];
    assert_eq!(store.check_ownership(running).await.unwrap(), []);
    let strays = store.untracked(FENCE.owner, Vec::new(), 9).await.unwrap();
    assert_eq!(strays, [(own, FENCE)]);
}

/// A process may go on after its lease has ended: it was stopped, or Redis was.
#[tokio::test]
async fn a_response_that_is_being_created_after_the_lease_has_ended_is_found_when_its_owner_is_dead()
 {
    let server = Server::start().await;
    let (store, other) = (open(&at(&server), &keep()), open(&at(&server), &keep()));
    let lease = Duration::from_millis(200);
    store.heartbeat(OWNER, "a", lease).await.unwrap();
    other.heartbeat(OTHER, "b", lease).await.unwrap();
    let key = new_key();
    store.create(key, queued()).await.unwrap();
    // As before the record is written: its entry is there.
    let record = record_name(&server);
    server.cli(&["rename", &record, "kept"]);
    let lease = format!("wr:o:{OWNER}");
    eventually("the lease has ended", async || {
        server.cli(&["exists", &lease]).trim() == "0"
    })
    .await;
    let scan = async || other.orphans(9).await.unwrap();
    // Entries are removed after the answer, but before that of a later scan.
    for _ in 0..3 {
        assert_eq!(scan().await, []);
    }
    server.cli(&["rename", "kept", &record]);
    let orphan = Orphan {
        key,
        owner: Some(OWNER),
        fencing_number: 1,
    };
    eventually("it is an orphan", async || scan().await == [orphan]).await;
    // What was never created goes once its owner has been dead for long.
    server.cli(&["del", &record]);
    server.cli(&["zadd", "wr:owners", "1", &OWNER.to_string()]);
    eventually("its entry is removed", async || {
        assert_eq!(scan().await, []);
        server.cli(&["exists", &format!("wr:q:{OWNER}")]).trim() == "0"
    })
    .await;
}

#[tokio::test]
async fn what_was_released_without_a_note_is_noted_when_its_owner_looks() {
    let server = Server::start().await;
    let store = open(&at(&server), &keep());
    let key = new_key();
    store
        .heartbeat(FENCE.owner, "a", Duration::from_secs(60))
        .await
        .unwrap();
    store.create(key, queued()).await.unwrap();
    // As by a release of which only the first write was done.
    server.cli(&["hset", &record_name(&server), "own", "", "ep", "2"]);
    assert_eq!(store.orphans(9).await.unwrap(), []);
    let strays = store.untracked(FENCE.owner, Vec::new(), 9).await.unwrap();
    assert_eq!(strays, []);
    let found = store.orphans(9).await.unwrap();
    assert_eq!(
        found.iter().map(|orphan| orphan.key).collect::<Vec<_>>(),
        [key]
    );
}

/// Passes connections on to a server, and swallows one reply when it is told to.
async fn swallowing(server: &Server) -> (Settings, Arc<AtomicBool>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let to = server.url().replace("redis://", "");
    let swallows = Arc::<AtomicBool>::default();
    let is_told = swallows.clone();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let server = TcpStream::connect(to.trim_end_matches('/')).await.unwrap();
            let is_told = is_told.clone();
            tokio::spawn(async move {
                let (mut from_client, mut to_client) = client.into_split();
                let (mut from_server, mut to_server) = server.into_split();
                let replies = async {
                    let mut buffer = vec![0; 1 << 16];
                    loop {
                        let Ok(length @ 1..) = from_server.read(&mut buffer).await else {
                            return;
                        };
                        // One reply, while one request is on its way.
                        if !is_told.swap(false, Relaxed)
                            && to_client.write_all(&buffer[..length]).await.is_err()
                        {
                            return;
                        }
                    }
                };
                tokio::select! {
                    () = replies => {}
                    _ = tokio::io::copy(&mut from_client, &mut to_server) => {}
                }
            });
        }
    });
    let settings = Settings {
        urls: vec![format!("redis://{address}")],
        ..impatient(server)
    };
    (settings, swallows)
}

#[tokio::test]
async fn a_reply_that_is_lost_on_the_way_gives_nobody_the_record_of_another() {
    let server = Server::start().await;
    let (settings, swallows) = swallowing(&server).await;
    let registry = Registry::default();
    let store = Redis::open(&settings, &keep(), CARRIERS, &registry).unwrap();
    let store: Store = Arc::new(store);
    // This one waits for as long as a busy machine takes.
    let near = open(&at(&server), &keep());
    let own = |number: usize| Content {
        response: format!("{{\"id\":{number}}}").into(),
        output: format!("[{number}]").into(),
    };
    let mut keys = Vec::new();
    for number in 0..16 {
        let key = ResponseKey {
            tenant: Tenant::tagged(number as u64 % 2),
            ..new_key()
        };
        let record = NewRecord {
            content: own(number),
            ..finished()
        };
        near.create(key, record).await.unwrap();
        keys.push(key);
    }
    eventually("it connects", async || store.get(keys[0]).await.is_ok()).await;
    for _ in 0..3 {
        swallows.store(true, Relaxed);
        let lost = tokio::spawn({
            let (store, key) = (store.clone(), keys[0]);
            async move { store.get(key).await }
        });
        eventually("a reply is swallowed", async || !swallows.load(Relaxed)).await;
        let mut found = 0;
        for round in 0..20 {
            let reads = keys.iter().enumerate().map(|(number, key)| {
                let store = store.clone();
                let key = *key;
                tokio::spawn(async move {
                    (number, store.get(key).await, store.history(key, ANY).await)
                })
            });
            let reads: Vec<_> = reads.collect();
            for read in reads {
                let (number, record, history) = read.await.unwrap();
                if let Ok(record) = record {
                    assert_eq!(record.unwrap().content, own(number), "round {round}");
                    found += 1;
                }
                if let Ok(history) = history {
                    let History::Found(turns) = history else {
                        panic!("{history:?}");
                    };
                    assert_eq!(turns.turns[0].output, own(number).output);
                }
            }
        }
        assert!(found > 0);
        if let Ok(record) = lost.await.unwrap() {
            assert_eq!(record.unwrap().content, own(0));
        }
        eventually("Redis answers again", async || {
            store.get(keys[1]).await.is_ok()
        })
        .await;
    }
    let text = registry.text();
    assert!(
        !text.contains("warmroute_store_foreign_replies_total 0"),
        "{text}"
    );
}

#[tokio::test]
async fn a_conversation_that_has_lost_a_part_is_damaged_and_takes_nothing_more() {
    let server = Server::start().await;
    let store = open(&at(&server), &keep());
    for part in ["wr:x:*", "wr:i:*"] {
        let key = new_conversation_key();
        let items = |range: std::ops::Range<usize>| {
            let item = |number: usize| Item {
                id: format!("msg_{number}").into(),
                json: format!("{{\"n\":{number}}}").into(),
            };
            range.map(item).collect::<Vec<_>>()
        };
        let conversation = NewConversation {
            token: token(),
            object: Bytes::from_static(b"{}"),
            items: items(0..3),
        };
        store.create_conversation(key, conversation).await.unwrap();
        let claim = Claim {
            token: token(),
            lease: LEASE,
        };
        assert_eq!(store.lock(key, claim).await, Ok(LockOutcome::Locked));
        let names = server.cli(&["--scan", "--pattern", part]);
        server.cli(&["del", names.trim()]);
        let page = Page {
            after: None,
            limit: 2,
            order: Order::OldestFirst,
        };
        let damaged = Error::DamagedConversation;
        assert_eq!(
            store.all_items(key, 1 << 20).await,
            Err(damaged.clone()),
            "{part}"
        );
        assert_eq!(store.items(key, page).await, Err(damaged.clone()));
        assert_eq!(store.item(key, "msg_1").await, Err(damaged.clone()));
        assert_eq!(store.delete_item(key, "msg_1").await, Err(damaged.clone()));
        let added = store.add_items(key, token(), items(3..4)).await;
        assert_eq!(added, Err(damaged.clone()));
        let commit = Commit {
            conversation: key,
            token: claim.token,
            items: items(3..4),
        };
        let response = ResponseKey {
            tenant: key.tenant,
            id: ResponseId::new(key.id.root(), 1),
        };
        let created = store.create_in_conversation(response, finished(), commit.clone());
        assert_eq!(created.await, Err(damaged));
        store.create(response, queued()).await.unwrap();
        let end = Finalization {
            commit: Some(commit),
            ..ending(Status::Completed)
        };
        let refused = WriteOutcome::NotAdded(CommitRefusal::Damaged);
        assert_eq!(store.finalize(response, FENCE, end).await, Ok(refused));
        // It can be deleted.
        assert!(store.delete_conversation(key).await.unwrap());
        assert_eq!(server.cli(&["--scan", "--pattern", "wr:[ix]:*"]).trim(), "");
    }
}

#[tokio::test]
async fn a_stored_response_is_read_without_a_script() {
    let server = Server::start().await;
    let store = open(&at(&server), &keep());
    let key = new_key();
    store.create(key, finished()).await.unwrap();
    let scripts = || {
        let stats = server.cli(&["info", "commandstats"]);
        let line = stats
            .lines()
            .find(|line| line.starts_with("cmdstat_evalsha:"));
        line.unwrap_or_default().to_owned()
    };
    let before = scripts();
    assert!(store.get(key).await.unwrap().is_some());
    assert_eq!(scripts(), before);
    // One that may not ask for the echo has the script.
    server.cli(&["acl", "setuser", "default", "-echo"]);
    assert!(store.get(key).await.unwrap().is_some());
    assert_ne!(scripts(), before);
}

#[tokio::test]
async fn a_reply_that_arrived_while_its_thread_was_busy_is_no_time_out() {
    let server = Server::start().await;
    let settings = at(&server);
    let store = open(&settings, &keep());
    // This thread asks, and reads the replies.
    let _scope = IoThreadScope::enter(1);
    let key = new_key();
    store.create(key, finished()).await.unwrap();
    // Each read has one.
    let echoes = || {
        let stats = server.cli(&["info", "commandstats"]);
        let mut lines = stats.lines();
        let echoes = lines.find(|line| line.starts_with("cmdstat_echo:"));
        echoes.map(str::to_owned)
    };
    let before = echoes();
    let busy = async {
        for _ in 0..100 {
            if echoes() != before {
                break;
            }
            // The read is sent.
            tokio::task::yield_now().await;
        }
        // Redis has replied.
        std::thread::sleep(settings.advanced.read_timeout);
    };
    let (found, ()) = tokio::join!(store.get(key), busy);
    assert!(found.unwrap().is_some());
}

#[tokio::test]
async fn a_command_that_redis_refuses_is_named_before_anything_is_generated() {
    over_each(async || {
        let server = Server::start().await;
        server.cli(&["acl", "setuser", "default", "-hset", "-zrevrank"]);
        let store = open(&at(&server), &keep());
        let refused = store.admit().await.unwrap_err();
        let Error::Unavailable { reason, .. } = &refused else {
            panic!("{refused:?}");
        };
        assert!(reason.contains("refuses HSET, ZREVRANK that"), "{reason}");
        let warning = store.health().warning;
        assert!(warning.contains("HSET, ZREVRANK"), "{warning}");
        server.cli(&["acl", "setuser", "default", "+@all"]);
        eventually("it is admitted", async || store.admit().await.is_ok()).await;
        assert_eq!(store.health().warning, "");
        assert_eq!(server.cli(&["dbsize"]).trim(), "0");
    })
    .await;
}

#[tokio::test]
async fn a_command_with_another_name_is_named_too() {
    let server = Server::with(&["--rename-command", "XADD", "other"], &[]).await;
    let store = open(&at(&server), &keep());
    let refused = store.admit().await.unwrap_err();
    assert!(
        refused.to_string().contains("refuses XADD that"),
        "{refused}"
    );
    let server = Server::with(&["--rename-command", "EVALSHA", ""], &[]).await;
    let store = open(&at(&server), &keep());
    let refused = store.admit().await.unwrap_err().to_string();
    assert!(refused.to_lowercase().contains("evalsha"), "{refused}");
}

/// A file with a password, removed after the test.
struct PasswordFile(TempPath);

impl PasswordFile {
    fn new(password: &str) -> Self {
        let file = Self(NamedTempFile::new().unwrap().into_temp_path());
        file.write(password);
        file
    }

    fn write(&self, password: &str) {
        std::fs::write(&self.0, format!("{password}\n")).unwrap();
    }
}

/// Lets the store's user in with this password only.
fn let_in(server: &Server, password: &str) {
    server.cli(&[
        "acl",
        "setuser",
        "router",
        "on",
        "resetpass",
        &format!(">{password}"),
        "~*",
        "&*",
        "+@all",
    ]);
}

/// Whether every node lets the store's user in: reads go to all slots.
async fn is_let_in(store: &Store) -> bool {
    let mut all = true;
    for _ in 0..20 {
        all &= matches!(store.get(new_key()).await, Ok(None));
    }
    all
}

/// A store whose user's password is replaced on the servers and in its file, and whose connections to the first
/// `closed` servers are closed then: it goes on with the new one.
async fn check_rotated(servers: &[&Server], closed: usize, sentinel: Option<&Server>, more: &str) {
    check_rotated_after(servers, closed, sentinel, more, async |_| {}).await;
}

/// Does what [`check_rotated`] does, and `between` before the servers know the password that the file has.
async fn check_rotated_after(
    servers: &[&Server],
    closed: usize,
    sentinel: Option<&Server>,
    more: &str,
    between: impl AsyncFnOnce(&Store),
) {
    let (password, of_sentinel) = (PasswordFile::new("old"), PasswordFile::new("old-too"));
    let asked = sentinel.unwrap_or(servers[0]);
    for server in servers {
        let_in(server, "old");
    }
    let mut text = format!(
        "workers: ['http://a:1']\nresponses:\n  mode: stateful\n  state_token: {{keys: ['00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff']}}\n  store:\n    redis:\n      urls: [\"{}\"]\n      username: router\n      password: file:{}\n{more}",
        asked.url(),
        password.0.display(),
    );
    if let Some(sentinel) = sentinel {
        let_in(sentinel, "old-too");
        text += &format!(
            "      sentinel_username: router\n      sentinel_password: file:{}\n",
            of_sentinel.0.display()
        );
    }
    let config = Config::parse("c", &text).unwrap();
    let settings = config.responses.store.redis.unwrap();
    assert_eq!(settings.password.expose(), "old");
    let store = open(&settings, &keep());
    store.admit().await.unwrap();
    password.write("new");
    of_sentinel.write("new-too");
    between(&store).await;
    for server in servers {
        let_in(server, "new");
    }
    if let Some(sentinel) = sentinel {
        let_in(sentinel, "new-too");
        sentinel.cli(&["client", "kill", "user", "router"]);
    }
    for server in &servers[..closed] {
        server.cli(&["client", "kill", "user", "router"]);
    }
    eventually("the new password is used at every node", async || {
        is_let_in(&store).await
    })
    .await;
}

#[tokio::test]
async fn a_password_that_is_replaced_in_its_file_is_taken_up() {
    let server = Server::start().await;
    check_rotated(&[&server], 1, None, "").await;
}

/// A pipe that nobody opens to write hangs who opens it to read, as a file on a lost file server does.
#[tokio::test]
async fn a_password_file_that_hangs_leaves_the_last_password_in_use() {
    let server = Server::start().await;
    let_in(&server, "old");
    let folder = tempfile::tempdir().unwrap();
    let (file, pipe) = (folder.path().join("password"), folder.path().join("pipe"));
    std::fs::write(&file, "old\n").unwrap();
    let text = format!(
        "workers: ['http://a:1']\nresponses:\n  mode: stateful\n  state_token: {{keys: ['00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff']}}\n  store:\n    redis:\n      urls: [\"{}\"]\n      username: router\n      password: file:{}\n",
        server.url(),
        file.display(),
    );
    let config = Config::parse("c", &text).unwrap();
    let settings = config.responses.store.redis.unwrap();
    let store = open(&settings, &keep());
    store.admit().await.unwrap();
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());
    std::fs::rename(&pipe, &file).unwrap();
    for _ in 0..2 {
        server.cli(&["client", "kill", "user", "router"]);
        eventually("it is connected again", async || {
            matches!(store.get(new_key()).await, Ok(None))
        })
        .await;
    }
}

#[tokio::test]
async fn passwords_of_sentinels_and_of_their_master_are_taken_up_from_their_files() {
    let master = Server::start().await;
    let sentinel = Server::sentinel(&master).await;
    let mode = "      mode: sentinel\n      master: main\n";
    check_rotated(&[&master], 1, Some(&sentinel), mode).await;
}

#[tokio::test]
async fn a_password_of_a_cluster_is_taken_up_from_its_file() {
    let nodes = redis_server::cluster_with_replicas(0).await;
    let nodes: Vec<&Server> = nodes.iter().collect();
    check_rotated(&nodes, nodes.len(), None, "      mode: cluster\n").await;
}

#[tokio::test]
async fn a_password_of_a_cluster_is_taken_up_when_one_node_has_closed_its_connections() {
    let nodes = redis_server::cluster_with_replicas(0).await;
    let nodes: Vec<&Server> = nodes.iter().collect();
    check_rotated(&nodes, 1, None, "      mode: cluster\n").await;
}

/// One node of a cluster hangs until reads fail.
async fn hang_for_a_while(node: &Server, store: &Store) {
    node.pause();
    eventually("a read fails", async || !is_let_in(store).await).await;
    node.wake();
    eventually("all nodes reply", async || is_let_in(store).await).await;
}

#[tokio::test]
async fn a_password_that_no_node_of_a_cluster_knows_yet_costs_no_connection() {
    let nodes = redis_server::cluster_with_replicas(0).await;
    let nodes: Vec<&Server> = nodes.iter().collect();
    // No connection can be opened meanwhile.
    let hang = async |store: &Store| hang_for_a_while(nodes[1], store).await;
    let mode = "      mode: cluster\n";
    check_rotated_after(&nodes, nodes.len(), None, mode, hang).await;
}

#[tokio::test]
async fn a_password_that_one_node_of_a_cluster_knows_costs_no_connection_to_the_others() {
    let nodes = redis_server::cluster_with_replicas(0).await;
    let nodes: Vec<&Server> = nodes.iter().collect();
    let hang = async |store: &Store| {
        // Beside the old one. This is the node of the settings: a connection can be opened.
        nodes[0].cli(&["acl", "setuser", "router", ">new"]);
        for _ in 0..3 {
            hang_for_a_while(nodes[1], store).await;
        }
    };
    let mode = "      mode: cluster\n";
    check_rotated_after(&nodes, nodes.len(), None, mode, hang).await;
}
