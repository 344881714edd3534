//! Background responses when routers, Redis or engines are lost: each has exactly one end, the same on every
//! router.

use std::time::Duration;

use serde_json::{Value, json};
use warmroute::config::{DiscoveryEntry, WorkersFile};
use warmroute::fleet::discovery::WorkerDefaults;
use warmroute::sim::fault::Faults;
use warmroute::store::redis::Mode;

use super::fleet::{Fleet, end, ends_once, replayed, retrieved};
use super::{PATH, Pair, ask, cancel, create, ended, events, get, over, part, path, said};
use crate::client::{self, Open};
use crate::cluster::{self, Engine, Removed, Router, eventually, fast, unhurried};
use crate::model_names::serving;
use crate::redis_server::{self, Server};

/// A stream that the first router runs: its text up to some event, and the response.
async fn started(fleet: &Fleet, tokens: usize, until: &str) -> (Open, String, Value) {
    let body = ask(tokens, json!({"stream": true}));
    let mut live = client::open(fleet.routers[0].api, "POST", PATH, &[], body.to_string()).await;
    let text = live.until(until).await;
    let response = part(&text, 0)[0].1["response"].clone();
    (live, text, response)
}

/// A response that the first router runs without a stream and that an engine has started.
async fn polled(fleet: &Fleet, tokens: usize) -> Value {
    let response = create(&fleet.routers[0], &ask(tokens, json!({}))).await;
    eventually("it has started", async || {
        get(&fleet.routers[1], &response).await["status"] == "in_progress"
    })
    .await;
    response
}

fn tokens(response: &Value) -> &Value {
    &response["usage"]["output_tokens"]
}

/// The rest of a stream, which must end properly.
async fn rest(live: &mut Open, started: String) -> Vec<(String, Value)> {
    let (rest, is_whole) = live.rest().await;
    assert!(is_whole);
    let events = events(&(started + &rest), 0);
    ends_once(&events);
    events
}

#[tokio::test]
async fn a_run_of_a_killed_router_continues_at_its_next_event_number() {
    let mut fleet = Fleet::new(unhurried()).await;
    // One is queued without a worker; the other is at an engine that has not answered.
    let refusing = Faults {
        refuse: Some(503),
        ..Faults::default()
    };
    let silent = Faults {
        hang: true,
        ..Faults::default()
    };
    for (faults, running) in [(refusing, 0), (silent, 2)] {
        fleet.engine.fault(faults).await;
        let one = create(&fleet.routers[0], &ask(20, json!({}))).await;
        let (mut live, seen, two) = started(&fleet, 20, "response.queued").await;
        let second = fleet.routers[1].api;
        let reading = format!("{}?stream=true", path(&two));
        let reader = tokio::spawn(async move { client::get(second, &reading).await });
        fleet.runs(running).await;
        fleet.routers[0].child.as_ref().unwrap().signal("KILL");
        let (more, _) = live.rest().await;
        fleet.engine.fault(Faults::default()).await;
        let left = [&fleet.routers[1], &fleet.routers[2]];
        for response in [&one, &two] {
            let last = end(&left, response).await;
            assert_eq!(
                (&last["status"], tokens(&last)),
                (&json!("incomplete"), &json!(20))
            );
        }
        let whole = replayed(&left, &two).await;
        let seen = part(&(seen + &more), 0);
        assert_eq!(whole[..seen.len()], seen);
        assert_eq!(events(reader.await.unwrap().text(), 0), whole);
        // A router that starts now serves the same events.
        fleet.replace(0).await;
        assert_eq!(fleet.end(&two).await, whole.last().unwrap().1["response"]);
        fleet.runs(0).await;
    }
}

#[tokio::test]
async fn a_redis_restart_within_the_lease_loses_nothing() {
    let mut fleet = Fleet::with(unhurried(), Server::durable().await, |config| {
        config.responses.store.lease.duration = Duration::from_secs(60);
    })
    .await;
    fleet.engine.hold_after(3).await;
    let one = polled(&fleet, 60).await;
    let (mut live, seen, two) = started(&fleet, 60, "output_text.delta").await;
    fleet.runs(2).await;
    fleet.redis.kill();
    fleet.engine.let_go().await;
    // One is in the middle of its events when Redis is killed, the other at its end.
    eventually("the engine has said all", async || {
        fleet.engine.stats().await.finished == 2
    })
    .await;
    for router in &fleet.routers {
        for response in [&one, &two] {
            assert_eq!(retrieved(router, response).await, None);
            let answer = cancel(router, response).await;
            let stream = client::get(router.api, &format!("{}?stream=true", path(response))).await;
            for answer in [answer, stream] {
                assert_eq!(
                    (answer.status, answer.code().as_str()),
                    (503, "store_unavailable")
                );
            }
        }
    }
    fleet.redis.run().await;
    for response in [&one, &two] {
        let last = fleet.end(response).await;
        assert_eq!(
            (&last["status"], tokens(&last)),
            (&json!("incomplete"), &json!(60))
        );
    }
    let received = rest(&mut live, seen).await;
    let routers: Vec<_> = fleet.routers.iter().collect();
    assert_eq!(replayed(&routers, &two).await, received);
    assert_eq!(fleet.engine.generated().await, 2);
}

#[tokio::test]
async fn a_store_that_is_away_is_said_once_however_many_runs_end() {
    const RUNS: u64 = 6;
    let mut fleet = Fleet::with(unhurried(), Server::durable().await, |config| {
        config.responses.store.lease.duration = Duration::from_secs(60);
    })
    .await;
    let mut responses = Vec::new();
    fleet.engine.hold_after(3).await;
    for _ in 0..RUNS {
        responses.push(polled(&fleet, 60).await);
    }
    fleet.runs(RUNS).await;
    fleet.redis.kill();
    fleet.engine.let_go().await;
    eventually("the engine has said all", async || {
        fleet.engine.stats().await.finished == RUNS
    })
    .await;
    let warned = |router: &Router| {
        let log = router.log();
        let lines = log
            .lines()
            .filter(|line| line.contains("end of a background response not stored"));
        lines.count()
    };
    eventually("a failed end is said", async || {
        fleet.routers.iter().any(|router| warned(router) > 0)
    })
    .await;
    fleet.redis.run().await;
    for response in &responses {
        assert_eq!(fleet.end(response).await["status"], "incomplete");
    }
    for router in &fleet.routers {
        assert!(warned(router) <= 1, "{}", router.log());
    }
}

#[tokio::test]
async fn a_redis_outage_beyond_the_lease_ends_nothing_that_no_other_replica_took_over() {
    // Killed and started again without the leases; and paused, so that they end meanwhile.
    for is_killed in [true, false] {
        // The owners have a heartbeat's time to come back before others take their runs over.
        let mut fleet = Fleet::with(unhurried(), Server::durable().await, |config| {
            config.responses.store.lease.duration = Duration::from_secs(7);
        })
        .await;
        fleet.engine.hold_after(3).await;
        let one = polled(&fleet, 60).await;
        let (mut live, seen, two) = started(&fleet, 60, "output_text.delta").await;
        fleet.runs(2).await;
        if is_killed {
            fleet.redis.kill();
        } else {
            fleet.redis.pause();
        }
        // Some tokens come meanwhile, and the rest afterwards.
        fleet.engine.hold_after(30).await;
        eventually("the leases have expired", async || {
            let mut expired = 0.0;
            for place in 0..3 {
                let sample = "warmroute_background_leases_expired_total";
                expired += f64::from(fleet.metric(place, sample).await > 0.0);
            }
            expired == 3.0
        })
        .await;
        if is_killed {
            fleet.redis.run().await;
        } else {
            fleet.redis.wake();
        }
        fleet.engine.let_go().await;
        for response in [&one, &two] {
            let last = fleet.end(response).await;
            assert_eq!(
                (&last["status"], tokens(&last)),
                (&json!("incomplete"), &json!(60))
            );
        }
        let received = rest(&mut live, seen).await;
        let routers: Vec<_> = fleet.routers.iter().collect();
        assert_eq!(replayed(&routers, &two).await, received);
        assert_eq!(fleet.engine.generated().await, 2);
    }
}

#[tokio::test]
async fn a_pause_of_a_router_whose_store_is_its_memory_loses_nothing() {
    let engine = Engine::here("w0", unhurried()).await;
    let mut config = cluster::config();
    config.workers = vec![engine.listed()];
    config.responses.state_token.keys = vec![super::key()];
    super::short_lease(&mut config);
    let router = Router::child(&config).await;
    router.worker_is_up().await;
    let one = create(&router, &ask(300, json!({}))).await;
    let body = ask(300, json!({"stream": true}));
    let mut live = client::open(router.api, "POST", PATH, &[], body.to_string()).await;
    let seen = live.until("output_text.delta").await;
    let child = router.child.as_ref().unwrap();
    child.signal("STOP");
    // Twice the lease.
    tokio::time::sleep(Duration::from_secs(3)).await;
    child.signal("CONT");
    let received = rest(&mut live, seen).await;
    assert_eq!(received.last().unwrap().0, "response.incomplete");
    let last = end(&[&router], &one).await;
    assert_eq!(
        (&last["status"], tokens(&last)),
        (&json!("incomplete"), &json!(300))
    );
}

#[tokio::test]
async fn orphans_of_a_tenant_at_its_limit_wait_for_room_and_run() {
    let mut fleet = Fleet::with(unhurried(), Server::durable().await, |config| {
        // Without tenants every client is the same one: this limit does not count.
        config.responses.background.max_running_per_tenant = 1;
        config.responses.background.max_running = 2;
    })
    .await;
    let mut all = Vec::new();
    fleet.engine.hold_after(3).await;
    for router in &fleet.routers {
        for _ in 0..2 {
            all.push(create(router, &ask(20, json!({}))).await);
        }
    }
    fleet.runs(6).await;
    let killed = all.split_off(4);
    fleet.routers[2].child.as_ref().unwrap().signal("KILL");
    fleet.runs(4).await;
    // Twice the lease, after which they would be taken over.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(fleet.engine.stats().await.running, 4);
    fleet.engine.let_go().await;
    let left = [&fleet.routers[0], &fleet.routers[1]];
    for response in all.iter().chain(&killed) {
        let last = end(&left, response).await;
        assert_eq!(
            (&last["status"], tokens(&last)),
            (&json!("incomplete"), &json!(20)),
            "{last}"
        );
    }
    fleet.replace(2).await;
}

#[tokio::test]
async fn a_cancelled_response_whose_router_is_dead_keeps_the_output_that_was_sent() {
    let fleet = Fleet::new(unhurried()).await;
    let (mut live, seen, two) = started(&fleet, 2_000, "output_text.delta").await;
    fleet.routers[0].child.as_ref().unwrap().signal("KILL");
    let (more, _) = live.rest().await;
    let seen = part(&(seen + &more), 0);
    assert_eq!(cancel(&fleet.routers[1], &two).await.status, 200);
    let left = [&fleet.routers[1], &fleet.routers[2]];
    let mut last = Value::Null;
    eventually("its output is stored", async || {
        last = retrieved(left[1], &two).await.unwrap();
        last["output"] != json!([])
    })
    .await;
    assert_eq!(last["status"], "cancelled");
    let whole = replayed(&left, &two).await;
    assert_eq!(whole[..seen.len()], seen);
    assert_eq!(last["output"][0]["content"][0]["text"], *said(&whole));
}

#[tokio::test]
async fn a_redis_that_restarts_empty_ends_all_runs() {
    let mut fleet = Fleet::with(unhurried(), Server::start().await, |_| {}).await;
    let one = polled(&fleet, 2_000).await;
    let (mut live, seen, two) = started(&fleet, 2_000, "output_text.delta").await;
    fleet.runs(2).await;
    fleet.redis.kill();
    fleet.redis.run().await;
    let received = rest(&mut live, seen).await;
    assert_eq!(received.last().unwrap().0, "response.failed");
    fleet.runs(0).await;
    for router in &fleet.routers {
        for response in [&one, &two] {
            let answer = client::get(router.api, &path(response)).await;
            assert_eq!(answer.status, 404, "{}", answer.text());
        }
    }
    assert_eq!(fleet.redis.cli(&["keys", "wr:[re]:*"]).trim(), "");
    let next = create(&fleet.routers[0], &ask(3, json!({}))).await;
    assert_eq!(fleet.end(&next).await["status"], "incomplete");
}

#[tokio::test]
async fn an_engine_crash_fails_what_was_seen_and_the_others_run_again() {
    let mut fleet = Fleet::new(unhurried()).await;
    // Neither ends before the engine does.
    fleet.engine.hold_after(3).await;
    let one = polled(&fleet, 40).await;
    let (mut live, seen, two) = started(&fleet, 2_000, "output_text.delta").await;
    fleet.runs(2).await;
    fleet.engine.kill().await;
    let received = rest(&mut live, seen).await;
    let last = fleet.end(&two).await;
    assert_eq!(
        (&last["status"], &last["error"]["code"]),
        (&json!("failed"), &json!("server_error"))
    );
    assert_eq!(last["output"][0]["status"], "incomplete", "{last}");
    let routers: Vec<_> = fleet.routers.iter().collect();
    assert_eq!(replayed(&routers, &two).await, received);
    assert_eq!(
        received.last().unwrap().1["response"]["output"][0]["content"][0]["text"],
        *said(&received)
    );
    let waiting = create(&fleet.routers[0], &ask(3, json!({}))).await;
    assert_eq!(get(&fleet.routers[1], &waiting).await["status"], "queued");
    fleet.engine.restart(unhurried()).await;
    assert_eq!(fleet.end(&waiting).await["status"], "incomplete");
    // No client had seen anything of the one without a stream.
    let last = fleet.end(&one).await;
    assert_eq!(
        (&last["status"], tokens(&last)),
        (&json!("incomplete"), &json!(40)),
        "{last}"
    );
}

#[tokio::test]
async fn a_background_response_has_its_own_time_and_waits_for_an_engine_from_when_it_has_none() {
    let mut fleet = Fleet::with(unhurried(), Server::durable().await, |config| {
        config.requests.request_timeout = Duration::from_secs(1);
        config.responses.background.queue_timeout = Duration::from_secs(6);
    })
    .await;
    // Each takes longer than a request may, and the long one does not end before its engine.
    fleet.engine.hold_after(80).await;
    let short = polled(&fleet, 75).await;
    let long = polled(&fleet, 100).await;
    assert_eq!(tokens(&fleet.end(&short).await), &json!(75));
    // And one has run for longer than it may wait for an engine when its engine is lost.
    tokio::time::sleep(Duration::from_secs(6)).await;
    fleet.engine.kill().await;
    fleet.engine.restart(unhurried()).await;
    let last = fleet.end(&long).await;
    assert_eq!(tokens(&last), &json!(100), "{last}");
}

#[tokio::test]
async fn a_run_whose_worker_is_replaced_waits_for_the_next_one_of_its_model() {
    let other_engine = Engine::here("other", serving("other")).await;
    let other = other_engine.listed().url;
    let file = Removed::new("workers: []\n");
    let list = |urls: &[&str]| {
        let lines: String = urls.iter().map(|url| format!("- {url}\n")).collect();
        std::fs::write(&file.0, format!("workers:\n{lines}")).unwrap();
    };
    let mut own = String::new();
    let pair = Pair::with(unhurried(), |config| {
        own = config.workers.remove(0).url;
        list(&[other.as_str(), own.as_str()]);
        config.discovery = vec![DiscoveryEntry::File(WorkersFile {
            path: file.0.to_str().unwrap().to_owned(),
            interval: Duration::from_millis(20),
            defaults: WorkerDefaults::default(),
        })];
    })
    .await;
    eventually("both models are served", async || {
        let models = client::get(pair.a.api, "/v1/models").await.json();
        models["data"].as_array().unwrap().len() == 2
    })
    .await;
    // The engine is about to end.
    let refusing = Faults {
        refuse: Some(503),
        ..Faults::default()
    };
    pair.engine.fault(refusing).await;
    let response = create(&pair.a, &ask(20, json!({}))).await;
    list(&[other.as_str()]);
    // The run asks for a worker of a model that none is listed for.
    let in_vain = "warmroute_model_lookups_total{outcome=\"not_found\"}";
    eventually("it is looked for in vain", async || {
        let page = client::get(pair.a.admin, "/metrics").await;
        let mut samples = page.text().lines();
        samples.any(|line| line.starts_with(in_vain) && !line.ends_with(" 0"))
    })
    .await;
    pair.engine.fault(Faults::default()).await;
    list(&[other.as_str(), own.as_str()]);
    let last = ended(&pair.a, &response).await;
    assert_eq!(
        (&last["status"], tokens(&last)),
        (&json!("incomplete"), &json!(20)),
        "{last}"
    );
}

#[tokio::test]
async fn nothing_is_generated_while_no_node_of_the_stores_cluster_replies() {
    let nodes = redis_server::cluster_with_replicas(0).await;
    let engine = Engine::here("w0", fast()).await;
    let mut config = over(&engine, &nodes[0]);
    super::impatient(&mut config);
    let redis = config.responses.store.redis.as_mut().unwrap();
    redis.mode = Mode::Cluster;
    redis.urls = nodes.iter().map(Server::url).collect();
    let router = Router::here(&config).await;
    router.worker_is_up().await;
    let body = json!({"model": "sim", "input": "hello", "max_output_tokens": 1}).to_string();
    let post = async || client::post(router.api, PATH, body.clone()).await;
    eventually("one is stored", async || post().await.status == 200).await;
    for node in &nodes {
        node.pause();
    }
    // A reply counts for a second.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let before = engine.generated().await;
    for _ in 0..4 {
        let refused = post().await;
        let code = refused.code();
        assert_eq!((refused.status, &*code), (503, "store_unavailable"));
    }
    assert_eq!(engine.generated().await, before);
}

/// Keeps copies of all keys of responses and owners; `restore` puts them back, as a failover to a copy does that has
/// not received the latest writes.
fn snapshot(redis: &Server) -> Vec<String> {
    let names: Vec<String> = ["wr:r:*", "wr:e:*", "wr:q:*"]
        .iter()
        .flat_map(|pattern| {
            let found = redis.cli(&["--scan", "--pattern", pattern]);
            found.lines().map(str::to_owned).collect::<Vec<_>>()
        })
        .collect();
    for name in &names {
        redis.cli(&["copy", name, &format!("copy:{name}"), "replace"]);
    }
    names
}

fn restore(redis: &Server, names: &[String]) {
    for name in names {
        redis.cli(&["copy", &format!("copy:{name}"), name, "replace"]);
    }
}

#[tokio::test]
async fn an_end_that_the_store_lost_in_a_failover_is_stored_again() {
    let fleet = Fleet::new(unhurried()).await;
    fleet.engine.hold_after(3).await;
    let one = polled(&fleet, 60).await;
    let (mut live, seen, two) = started(&fleet, 60, "output_text.delta").await;
    let (mut cancelled, _, three) = started(&fleet, 3_000, "output_text.delta").await;
    fleet.runs(3).await;
    let before = snapshot(&fleet.redis);
    fleet.engine.let_go().await;
    let received = rest(&mut live, seen).await;
    let ends = [fleet.end(&one).await, fleet.end(&two).await];
    assert_eq!(cancel(&fleet.routers[1], &three).await.status, 200);
    let _ = cancelled.rest().await;
    fleet.runs(0).await;
    restore(&fleet.redis, &before);
    for (response, end) in [&one, &two].into_iter().zip(ends) {
        assert_eq!(fleet.end(response).await, end);
    }
    let routers: Vec<_> = fleet.routers.iter().collect();
    assert_eq!(replayed(&routers, &two).await, received);
    let last = fleet.end(&three).await;
    assert_eq!(last["status"], "cancelled");
    fleet.runs(0).await;
    assert_eq!(fleet.engine.generated().await, 3);
}

/// All keys of responses in Redis.
fn kept(redis: &Server) -> Vec<String> {
    let names = redis.cli(&["keys", "wr:[re]:*"]);
    let mut names: Vec<&str> = names.split_whitespace().collect();
    names.sort_unstable();
    let read = |name: &&str| {
        if name.starts_with("wr:e:") {
            redis.cli(&["xrange", name, "-", "+"])
        } else {
            redis.cli(&["hgetall", name])
        }
    };
    names.iter().map(read).collect()
}

#[tokio::test]
async fn a_router_paused_beyond_its_lease_writes_nothing_more() {
    let fleet = Fleet::new(unhurried()).await;
    let routers: Vec<_> = fleet.routers.iter().collect();
    let sleeper = fleet.routers[0].child.as_ref().unwrap();
    // It resumes while another router runs its response again, and after that has ended.
    for (round, has_ended) in [false, true].into_iter().enumerate() {
        fleet.engine.hold_after(3).await;
        let one = polled(&fleet, 180).await;
        let (mut live, seen, two) = started(&fleet, 180, "output_text.delta").await;
        fleet.runs(2).await;
        sleeper.signal("STOP");
        fleet.engine.let_go().await;
        let failed = end(&routers[1..], &two).await;
        assert_eq!(failed["status"], "failed");
        // The engine's whole answer waits in the paused router's socket.
        let finished = 3 * round as u64 + 2;
        eventually("the engine has said all", async || {
            fleet.engine.stats().await.finished >= finished
        })
        .await;
        let before = if has_ended {
            end(&routers[1..], &one).await;
            Some(kept(&fleet.redis))
        } else {
            None
        };
        sleeper.signal("CONT");
        eventually("it runs nothing", async || {
            fleet.metric(0, "warmroute_background_running").await == 0.0
        })
        .await;
        if let Some(before) = before {
            assert_eq!(kept(&fleet.redis), before);
        }
        let received = rest(&mut live, seen).await;
        assert_eq!(replayed(&routers, &two).await, received);
        assert_eq!(fleet.end(&two).await, failed);
        let last = fleet.end(&one).await;
        assert_eq!(
            (&last["status"], tokens(&last)),
            (&json!("incomplete"), &json!(180))
        );
    }
    // The paused router stored none of the ends.
    for status in ["completed", "incomplete", "failed", "cancelled"] {
        let sample = format!("warmroute_responses_finished_total{{status=\"{status}\"}}");
        assert_eq!(fleet.metric(0, &sample).await, 0.0, "{status}");
    }
    assert_eq!(fleet.engine.generated().await, 6);
}
