//! Three routers, Redis that syncs every write to disk, two engines, and clients, while a seeded schedule kills and
//! pauses all of them. At the end everything that was acknowledged has one end, the same on every router, every
//! conversation that clients shared has its turns whole, in order and once, and every line of a batch has one result.
//!
//! `WARMROUTE_CHAOS_SECONDS` (15) and `WARMROUTE_CHAOS_SEEDS` (`1`; several: `1,2,3`) change length and schedule:
//! `make chaos` runs ten minutes a seed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fastrand::Rng;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::task::{JoinSet, LocalSet};

use super::fleet::{END, Fleet, Places, any, end, followed_after, replayed, started};
use super::talk::{self, Turn};
use super::{ask, batch_clients, part, path, said};
use crate::client;
use crate::cluster::{Engine, Router, eventually, unhurried};
use crate::patience::too_long;
use crate::redis_server::Server;
use crate::reload::Folder;

const CLIENTS: usize = 8;
/// Two clients talk in each.
const CONVERSATIONS: usize = 3;
/// Clients that run batches, one at a time each.
const BATCH_CLIENTS: usize = 2;
/// Responses that each client receives at least.
const RECEIVED_MIN: usize = 2;
/// Between two faults.
const PAUSE_MS: std::ops::Range<u64> = 700..3_000;

/// What a client knows of one response.
#[derive(Clone, Debug)]
struct ReceivedResponse {
    response: Value,
    tokens: usize,
    /// The events of a stream, to its end; empty without a stream.
    events: Vec<(String, Value)>,
    /// Whether a client asked for a cancel, and the status that it received after it.
    cancel: Option<Option<String>>,
}

/// Cancels a response on some router. The status that it received, or nothing if no router answered.
async fn cancelled(places: &Places, response: &Value) -> Option<String> {
    let path = format!("{}/cancel", path(response));
    for _ in 0..3 {
        let Ok(mut open) = client::try_open(any(places), "POST", &path, &[], "").await else {
            continue;
        };
        let status = open.status;
        let (text, is_whole) = open.rest().await;
        if status == 200 && is_whole {
            let answer: Value = serde_json::from_str(&text).unwrap();
            return answer["status"].as_str().map(str::to_owned);
        }
        assert!(status == 503 || !is_whole, "{status} {text}");
    }
    None
}

async fn client(places: Places, is_over: Arc<AtomicBool>) -> Vec<ReceivedResponse> {
    let mut all = Vec::new();
    // Also where few responses fit into the time of the faults, some are received.
    while !is_over.load(Ordering::Relaxed) || all.len() < RECEIVED_MIN {
        let tokens = fastrand::usize(1..60);
        let streams = fastrand::bool();
        let cancels = fastrand::u8(..5) == 0;
        let mut live = started(&places, &ask(tokens, json!({"stream": streams}))).await;
        let pause = Duration::from_millis(fastrand::u64(0..1_500));
        if !streams {
            // Without a whole answer its id is not known; the store's records are looked through at the end.
            let (text, true) = live.rest().await else {
                continue;
            };
            let response: Value = serde_json::from_str(&text).unwrap();
            let mut cancel = None;
            if cancels {
                tokio::time::sleep(pause).await;
                cancel = Some(cancelled(&places, &response).await);
            }
            all.push(ReceivedResponse {
                response,
                tokens,
                events: Vec::new(),
                cancel,
            });
            continue;
        }
        let mut text = String::new();
        while !text.contains("\n\n")
            && let Some(Ok(piece)) = live.next().await
        {
            text.push_str(std::str::from_utf8(&piece).unwrap());
        }
        // The whole stream, if the client was slow.
        let events = part(text.strip_suffix(END).unwrap_or(&text), 0);
        let Some(response) = events.first().map(|(_, event)| event["response"].clone()) else {
            continue;
        };
        let reading = followed_after(&places, live, text);
        let cancelling = async {
            if !cancels {
                return None;
            }
            tokio::time::sleep(pause).await;
            Some(cancelled(&places, &response).await)
        };
        let (events, cancel) = tokio::join!(reading, cancelling);
        all.push(ReceivedResponse {
            response,
            tokens,
            events,
            cancel,
        });
    }
    all
}

/// One fault, and its end.
async fn fault(
    random: &mut Rng,
    fleet: &mut Fleet,
    second: &mut Engine,
    places: &Places,
) -> &'static str {
    let place = random.usize(..3);
    let pause = |random: &mut Rng, max| Duration::from_millis(random.u64(200..max));
    match random.u8(..10) {
        0..3 => {
            fleet.routers[place].child.as_ref().unwrap().signal("KILL");
            tokio::time::sleep(pause(random, 1_000)).await;
            fleet.replace(place).await;
            places.lock()[place] = fleet.routers[place].api;
            "router killed"
        }
        3 | 4 => {
            let child = fleet.routers[place].child.as_ref().unwrap();
            child.signal("STOP");
            // Some are longer than the lease of its responses, more than that of a conversation's lock.
            tokio::time::sleep(pause(random, 4_000)).await;
            child.signal("CONT");
            "router paused"
        }
        5 => {
            fleet.redis.pause();
            tokio::time::sleep(pause(random, 3_500)).await;
            fleet.redis.wake();
            "Redis paused"
        }
        6 | 7 => {
            fleet.redis.kill();
            tokio::time::sleep(pause(random, 3_500)).await;
            fleet.redis.run().await;
            "Redis killed"
        }
        8 => {
            fleet.engine.kill().await;
            tokio::time::sleep(pause(random, 1_500)).await;
            fleet.engine.restart(unhurried()).await;
            "engine killed"
        }
        _ => {
            second.kill().await;
            tokio::time::sleep(pause(random, 1_500)).await;
            second.restart(unhurried()).await;
            "second engine killed"
        }
    }
}

/// The statuses of all responses in the store.
fn statuses(redis: &Server) -> Vec<String> {
    let names = redis.cli(&["--scan", "--pattern", "wr:r:*"]);
    let status = |name: &str| redis.cli(&["hget", name, "st"]).trim().to_owned();
    names.lines().map(status).collect()
}

async fn check(routers: &[&Router], received: &ReceivedResponse) {
    let last = end(routers, &received.response).await;
    let status = last["status"].as_str().unwrap();
    match status {
        "incomplete" => assert_eq!(last["usage"]["output_tokens"], received.tokens, "{last}"),
        "cancelled" => assert!(received.cancel.is_some(), "no client cancelled it: {last}"),
        // Output was seen, and what made it was lost. Or engines were killed while they ran its request alone, so that
        // it seems to end them.
        "failed" => {
            let message = last["error"]["message"].as_str().unwrap_or_default();
            let seems_to_end_engines = message.starts_with("engines closed the connection");
            assert!(
                seems_to_end_engines || !received.events.is_empty(),
                "no client had seen any of it: {last}"
            );
        }
        _ => panic!("{last}"),
    }
    if let Some(Some(reported)) = &received.cancel {
        assert_eq!(reported, status, "{last}");
    }
    if received.events.is_empty() {
        return;
    }
    let again = replayed(routers, &received.response).await;
    let count = received.events.len() - 1;
    assert_eq!(again[..count], received.events[..count], "{last}");
    assert_eq!(again.len(), received.events.len());
    let text = last["output"][0]["content"][0]["text"].as_str();
    assert_eq!(text.unwrap_or_default(), said(&again), "{last}");
}

async fn run(seed: u64, length: Duration) {
    let mut random = Rng::with_seed(seed);
    // Its name is not of the seed, which another process may have too.
    let folder = Folder::new();
    fastrand::seed(seed);
    let mut second = Engine::here("w1", unhurried()).await;
    let listed = second.listed();
    let mut fleet = Fleet::with(unhurried(), Server::durable().await, |config| {
        config.workers.push(listed);
        // No response is given up for having been hit too often.
        config.responses.background.max_attempts = 50;
        config.responses.advanced.conversation_lease = Duration::from_secs(1);
        config.batches.folder = folder.path("files").to_str().unwrap().to_owned();
    })
    .await;
    let places: Places = Arc::new(Mutex::new(
        fleet.routers.iter().map(|router| router.api).collect(),
    ));
    let is_over = Arc::new(AtomicBool::new(false));
    let (local, mut clients) = (LocalSet::new(), JoinSet::new());
    for _ in 0..CLIENTS {
        clients.spawn_local_on(client(places.clone(), is_over.clone()), &local);
    }
    let mut batch_runs = JoinSet::new();
    for name in 0..BATCH_CLIENTS {
        let running = batch_clients::run(places.clone(), is_over.clone(), name);
        batch_runs.spawn_local_on(running, &local);
    }
    let mut conversations = Vec::new();
    let mut talkers = JoinSet::new();
    for place in 0..CONVERSATIONS {
        let conversation = talk::new_conversation(&places).await;
        for name in [2 * place, 2 * place + 1] {
            let (over, id) = (is_over.clone(), conversation.clone());
            let talking = talk::talk(places.clone(), over, id, name);
            talkers.spawn_local_on(async move { (place, talking.await) }, &local);
        }
        conversations.push((conversation, Vec::<Turn>::new()));
    }
    let faults = async {
        let started = Instant::now();
        let mut count = 0;
        while started.elapsed() < length {
            tokio::time::sleep(Duration::from_millis(random.u64(PAUSE_MS))).await;
            let what = fault(&mut random, &mut fleet, &mut second, &places).await;
            eprintln!("seed {seed}, {:?}: {what}", started.elapsed());
            count += 1;
        }
        is_over.store(true, Ordering::Relaxed);
        let ends = async {
            let turns = talkers.join_all().await;
            let batches = batch_runs.join_all().await.concat();
            (turns, batches, clients.join_all().await.concat())
        };
        let ended = tokio::time::timeout(2 * too_long(), ends).await;
        let (turns, batches, all) = ended.expect("every client has received something");
        for (place, turns) in turns {
            conversations[place].1.extend(turns);
        }
        (count, all, conversations, batches)
    };
    let (count, all, conversations, batches) = local.run_until(faults).await;
    eventually("every response in the store has ended", async || {
        let statuses = statuses(&fleet.redis);
        !statuses
            .iter()
            .any(|status| ["queued", "in_progress"].contains(&status.as_str()))
    })
    .await;
    let routers: Vec<&Router> = fleet.routers.iter().collect();
    eventually("every router has the store", async || {
        let mut is_up = true;
        for router in &routers {
            let unknown = format!("{}/resp_00", super::PATH);
            is_up &= client::get(router.api, &unknown).await.status != 503;
        }
        is_up
    })
    .await;
    let lines = batch_clients::check(&routers, &batches).await;
    eventually("no engine and no router runs anything", async || {
        let mut running = fleet.engine.stats().await.running + second.stats().await.running;
        for place in 0..3 {
            running += fleet.metric(place, "warmroute_background_running").await as u64;
        }
        running == 0
    })
    .await;
    for received in &all {
        check(&routers, received).await;
    }
    let mut turns = Vec::new();
    for (conversation, said) in &conversations {
        turns.push((talk::check(&routers, conversation, said).await, said.len()));
    }
    let of = |status: &str| {
        let ended = statuses(&fleet.redis);
        ended.iter().filter(|end| *end == status).count()
    };
    let ends = ["incomplete", "failed", "cancelled"].map(|status| (status, of(status)));
    eprintln!(
        "seed {seed}: {count} faults, {} responses received: {ends:?}; turns in conversations, of those said: {turns:?}; \
         {} batches, their lines: {lines:?}",
        all.len(),
        batches.len()
    );
    assert!(all.len() >= RECEIVED_MIN * CLIENTS, "{}", all.len());
    assert!(turns.iter().all(|(kept, _)| *kept > 0), "{turns:?}");
    assert!(lines.contains_key("200"), "{lines:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_is_killed_or_paused_each_response_has_one_end() {
    let seconds = std::env::var("WARMROUTE_CHAOS_SECONDS").ok();
    let seconds = seconds.map_or(15, |seconds| seconds.parse().unwrap());
    let seeds = std::env::var("WARMROUTE_CHAOS_SEEDS").unwrap_or_else(|_| "1".to_owned());
    for seed in seeds.split([',', ' ']).filter(|seed| !seed.is_empty()) {
        run(seed.parse().unwrap(), Duration::from_secs(seconds)).await;
    }
}
