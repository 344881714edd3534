//! One client, one request or the router itself must not take healthy workers away from everybody else.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use warmroute::config::Config;
use warmroute::fleet::discovery::WorkerSpec;
use warmroute::routing::Policy;
use warmroute::secret::Secret;
use warmroute::sim::fault::Faults;

use crate::client::{self, Answer};
use crate::cluster::{self, Cluster, Router, chat, eventually, fast, unhurried};
use crate::failures::hang;
use crate::patience::too_long;

const CHAT: &str = "/v1/chat/completions";
/// Words in a prompt that make a [`ScriptedEngine`] fail.
const CUT: &str = "cut the connection";
const BREAK: &str = "answer 500";
const BUSY: &str = "answer 503";
/// The engine waits with the answer until it ends, unless it was killed before.
const HOLD: &str = "wait with the answer";
/// The engine waits after the first token of a stream until it ends, unless it was killed before.
const BEGIN: &str = "wait with the second token";
/// The engine's process ends.
const KILL: &str = "end the process";

/// An engine that does what the body of a request says. It keeps its connections open.
#[derive(Clone, Debug)]
struct ScriptedEngine {
    address: SocketAddr,
    model: &'static str,
    bodies: Arc<Mutex<Vec<String>>>,
    /// It answers 500 to everything.
    is_broken: Arc<AtomicBool>,
    /// Changes when its process ends. The next one has the same address and waits with no answer.
    ends: watch::Sender<u32>,
}

impl ScriptedEngine {
    async fn start(model: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let engine = Self {
            address: listener.local_addr().unwrap(),
            model,
            bodies: Arc::default(),
            is_broken: Arc::default(),
            ends: watch::Sender::new(0),
        };
        let served = engine.clone();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let engine = served.clone();
                let mut ends = engine.ends.subscribe();
                tokio::spawn(async move {
                    tokio::select! {
                        served = engine.serve(stream) => served,
                        _ = ends.changed() => None,
                    }
                });
            }
        });
        engine
    }

    async fn serve(&self, mut stream: TcpStream) -> Option<()> {
        let mut bytes = Vec::new();
        loop {
            let end = loop {
                if let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
                    break end + 4;
                }
                read_more(&mut stream, &mut bytes).await?;
            };
            let head = String::from_utf8_lossy(&bytes[..end]).to_lowercase();
            let mut lengths = head
                .lines()
                .filter_map(|line| line.strip_prefix("content-length: "));
            let length = lengths.next().map_or(0, |length| length.parse().unwrap());
            while bytes.len() < end + length {
                read_more(&mut stream, &mut bytes).await?;
            }
            let body = String::from_utf8_lossy(&bytes[end..end + length]).into_owned();
            bytes.drain(..end + length);
            if *self.ends.borrow() == 0 && [HOLD, BEGIN].iter().any(|words| body.contains(words)) {
                if body.contains(BEGIN) {
                    let head = "HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
                    let token = json!({"choices": [{"index": 0, "delta": {"content": "a"}}]});
                    let event = format!("data: {token}\n\n");
                    let begun = format!("{head}{:x}\r\n{event}\r\n", event.len());
                    stream.write_all(begun.as_bytes()).await.ok()?;
                }
                self.bodies.lock().push(body);
                // Until its process ends.
                std::future::pending::<()>().await;
                return None;
            }
            let (status, page) = self.answer(&head, body)?;
            let answer = format!(
                "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{page}",
                page.len()
            );
            stream.write_all(answer.as_bytes()).await.ok()?;
        }
    }

    /// `None`: the connection is closed.
    fn answer(&self, head: &str, body: String) -> Option<(u16, String)> {
        if head.starts_with("get /v1/models ") {
            return Some((200, json!({"data": [{"id": self.model}]}).to_string()));
        }
        if !head.starts_with("post ") {
            return Some((200, String::new()));
        }
        // A health check asks whether there is a Responses API.
        if body == "{}" {
            return Some((400, "{}".to_owned()));
        }
        let has = |words: &str| body.contains(words);
        if has(KILL) {
            self.kill();
        }
        let answer = match () {
            () if has(CUT) || has(KILL) => None,
            () if has(BREAK) || self.is_broken.load(Relaxed) => Some(500),
            () if has(BUSY) => Some(503),
            () => Some(200),
        };
        self.bodies.lock().push(body);
        answer.map(|status| (status, "{}".to_owned()))
    }

    /// Ends its process, which closes all of its connections.
    fn kill(&self) {
        self.ends.send_modify(|ends| *ends += 1);
    }

    fn seen(&self, words: &str) -> usize {
        let bodies = self.bodies.lock();
        bodies.iter().filter(|body| body.contains(words)).count()
    }
}

async fn read_more(stream: &mut TcpStream, bytes: &mut Vec<u8>) -> Option<()> {
    match stream.read_buf(bytes).await {
        Ok(0) | Err(_) => None,
        Ok(_) => Some(()),
    }
}

/// Scripted engines with a router in front that believes what the test says of its clients' addresses.
struct Fleet {
    engines: Vec<ScriptedEngine>,
    router: Router,
}

impl Fleet {
    async fn start(models: &[&'static str], change: impl FnOnce(&mut Config)) -> Self {
        let mut engines = Vec::new();
        for model in models {
            engines.push(ScriptedEngine::start(model).await);
        }
        let mut config = cluster::config();
        config.workers = engines
            .iter()
            .enumerate()
            .map(|(number, engine)| WorkerSpec {
                url: format!("http://{}", engine.address),
                name: format!("w{number}"),
                ..WorkerSpec::default()
            })
            .collect();
        config.routing.policy = Policy::RoundRobin;
        config.fleet.circuit_breaker.failure_threshold = 3;
        config.fleet.circuit_breaker.open_duration = Duration::from_secs(600);
        config.api.requests.trusted_proxies = vec!["127.0.0.1".to_owned()].try_into().unwrap();
        change(&mut config);
        let router = Router::here(&config).await;
        let fleet = Self { engines, router };
        for number in 0..models.len() {
            eventually("all are up", async || {
                fleet.worker(number).await["health"] == "up"
            })
            .await;
        }
        fleet
    }

    async fn worker(&self, number: usize) -> serde_json::Value {
        client::get(self.router.admin, "/fleet").await.json()["workers"][number].take()
    }

    async fn breakers(&self) -> Vec<String> {
        let mut states = Vec::new();
        for number in 0..self.engines.len() {
            let state = self.worker(number).await["circuit_breaker"].take();
            states.push(state.as_str().unwrap().to_owned());
        }
        states
    }

    async fn open_breakers(&self) -> usize {
        let states = self.breakers().await;
        states.iter().filter(|state| *state == "open").count()
    }

    /// A request of the client at this address.
    async fn post_as(&self, address: &str, body: String) -> Answer {
        let headers = [("x-forwarded-for", address)];
        client::send(self.router.api, "POST", CHAT, &headers, body).await
    }

    fn seen(&self, words: &str) -> usize {
        self.engines.iter().map(|engine| engine.seen(words)).sum()
    }

    async fn has_metric(&self, line: &str) -> bool {
        let page = client::get(self.router.admin, "/metrics").await;
        page.text().lines().any(|other| other == line)
    }
}

const GUILTY: &str = "203.0.113.66";
const INNOCENT: &str = "198.51.100.7";

#[tokio::test]
async fn one_clients_bad_requests_take_no_worker_away_from_others() {
    for words in [BREAK, CUT] {
        let fleet = Fleet::start(&["sim"; 4], |_| {}).await;
        for number in 0..40 {
            let body = chat(&format!("{words} {number}"), 1, false);
            let status = fleet.post_as(GUILTY, body).await.status;
            assert_eq!(status, if words == BREAK { 500 } else { 502 });
        }
        assert_eq!(fleet.breakers().await, ["closed"; 4], "{words}");
        for number in 0..20 {
            let body = chat(&format!("{number}"), 1, false);
            assert_eq!(fleet.post_as(INNOCENT, body).await.status, 200, "{words}");
        }
    }
}

#[tokio::test]
async fn a_worker_that_fails_several_clients_requests_gets_no_more() {
    for words in [BREAK, CUT] {
        let fleet = Fleet::start(&["sim"; 2], |_| {}).await;
        for number in 0..6 {
            let address = format!("198.51.100.{number}");
            fleet
                .post_as(&address, chat(&format!("{words} {number}"), 1, false))
                .await;
        }
        assert!(fleet.open_breakers().await > 0, "{words}");
    }
}

#[tokio::test]
async fn bad_requests_of_several_clients_leave_half_of_the_workers_to_others() {
    for workers in [1, 2, 3, 4] {
        let fleet = Fleet::start(&vec!["sim"; workers], |_| {}).await;
        for number in 0..10 * workers {
            let address = format!("198.51.100.{}", number / workers % 3);
            let body = chat(&format!("{BREAK} {number}"), 1, false);
            assert_eq!(fleet.post_as(&address, body).await.status, 500);
        }
        assert_eq!(fleet.open_breakers().await, workers / 2, "{workers}");
        for number in 0..2 * workers {
            let body = chat(&format!("{number}"), 1, false);
            assert_eq!(fleet.post_as("192.0.2.1", body).await.status, 200);
        }
    }
}

/// The worker is well again, and one client's requests go on failing.
#[tokio::test]
async fn a_client_whose_requests_fail_keeps_no_circuit_breaker_open() {
    let fleet = Fleet::start(&["sim"; 2], |config| {
        config.fleet.circuit_breaker.open_duration = Duration::from_millis(300);
    })
    .await;
    let mut number = 0;
    // Where a few requests take longer than it stays open, one of them is its trial, and it is half-open until another
    // client's has failed, too. Without a request it stays as it is.
    eventually("the breaker of one of them is open", async || {
        let address = format!("198.51.100.{}", number % 3);
        let body = chat(&format!("{BREAK} {number}"), 1, false);
        fleet.post_as(&address, body).await;
        number += 1;
        number >= 30 && fleet.open_breakers().await == 1
    })
    .await;
    // All of them are known to fail, so none is believed; the second of them would be.
    let is_over = AtomicBool::new(false);
    let attack = async {
        let mut number = 1_000;
        while !is_over.load(Relaxed) {
            number += 1;
            let body = chat(&format!("{BREAK} {number}"), 1, false);
            fleet.post_as("198.51.100.0", body).await;
        }
    };
    let victim = async {
        // The other one has failed several clients, too, and counts as well once it has answered one.
        eventually("the breaker closes, and both have answered", async || {
            let answer = fleet.post_as(INNOCENT, chat("hello", 1, false)).await;
            assert_eq!(answer.status, 200);
            let has_answered = |engine: &ScriptedEngine| engine.seen("hello") > 0;
            fleet.breakers().await == ["closed"; 2] && fleet.engines.iter().all(has_answered)
        })
        .await;
        is_over.store(true, Relaxed);
    };
    tokio::join!(attack, victim);
    assert_eq!(fleet.breakers().await, ["closed"; 2]);
}

#[tokio::test]
async fn a_broken_worker_is_found_even_if_all_requests_come_from_one_client() {
    let fleet = Fleet::start(&["sim"; 3], |_| {}).await;
    fleet.engines[1].is_broken.store(true, Relaxed);
    eventually("its circuit breaker opens", async || {
        for number in 0..6 {
            fleet
                .post_as(GUILTY, chat(&format!("{number}"), 1, false))
                .await;
        }
        fleet.breakers().await == ["closed", "open", "closed"]
    })
    .await;
}

#[tokio::test]
async fn a_request_that_ends_engines_reaches_two_at_most_however_often_it_is_sent() {
    let fleet = Fleet::start(&["sim"; 4], |_| {}).await;
    // Connections that will be used again.
    for number in 0..8 {
        let body = chat(&format!("{number}"), 1, false);
        assert_eq!(fleet.post_as(INNOCENT, body).await.status, 200);
    }
    for attempt in 0..5 {
        // As an SDK sends it again.
        let answer = fleet.post_as(GUILTY, chat(CUT, 1, false)).await;
        assert_eq!(
            (answer.status, answer.code()),
            (502, "engine_connection_cut".to_owned())
        );
        assert_eq!(answer.header("x-should-retry"), "false", "{attempt}");
        assert_eq!(fleet.seen(CUT), 2, "{attempt}");
    }
    assert!(
        fleet
            .has_metric("warmroute_quarantine_refusals_total 4")
            .await
    );
    let answer = fleet.post_as(GUILTY, chat("another one", 1, false)).await;
    assert_eq!(answer.status, 200);
}

/// It would end one engine after the other, and does not wait for a worker until its time is over.
#[tokio::test]
async fn a_background_response_that_ends_engines_fails_at_once() {
    let fleet = Fleet::start(&["sim"; 4], |config| {
        config.responses.background.queue_timeout = Duration::from_secs(3_600);
    })
    .await;
    let ask = json!({"model": "sim", "input": CUT, "background": true});
    let created = client::post(fleet.router.api, "/v1/responses", ask.to_string()).await;
    assert_eq!(created.status, 200, "{}", created.text());
    let path = format!("/v1/responses/{}", created.json()["id"].as_str().unwrap());
    eventually("it has failed", async || {
        let response = client::get(fleet.router.api, &path).await.json();
        let message = response["error"]["message"].as_str().unwrap_or_default();
        response["status"] == "failed" && message.starts_with("engines closed the connection")
    })
    .await;
    assert_eq!(fleet.seen(CUT), 2);
}

#[tokio::test]
async fn a_request_that_ends_engines_reaches_two_at_most_although_its_client_leaves_after_each() {
    let fleet = Fleet::start(&["sim"; 4], |config| {
        config.requests.advanced.backoff = Duration::from_secs(600);
        config.requests.advanced.max_backoff = Duration::from_secs(600);
    })
    .await;
    for _ in 0..6 {
        let before = fleet.seen(CUT);
        let mut sent = Box::pin(fleet.post_as(GUILTY, chat(CUT, 1, false)));
        // Until an engine has cut the connection and the router has noticed, or it is refused.
        let is_over = async {
            eventually("an engine gets it", async || fleet.seen(CUT) > before).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
        };
        tokio::select! {
            answer = &mut sent => assert_eq!(answer.status, 502),
            () = is_over => {}
        }
    }
    assert_eq!(fleet.seen(CUT), 2);
}

/// Bodies with these words and numbers.
fn bodies(words: &str, is_stream: bool, count: usize) -> Vec<String> {
    let bodies = (0..count).map(|number| chat(&format!("{words} {number}"), 1, is_stream));
    bodies.collect()
}

/// Sends all of them at once, each as a client of its own, and waits until engines have them.
async fn send_all(fleet: &Fleet, bodies: Vec<String>) -> JoinSet<Answer> {
    let before = fleet.seen("");
    let count = bodies.len();
    let mut sent = JoinSet::new();
    for (number, body) in bodies.into_iter().enumerate() {
        let api = fleet.router.api;
        sent.spawn(async move {
            let address = format!("198.51.100.{number}");
            let headers = [("x-forwarded-for", &*address)];
            client::send(api, "POST", CHAT, &headers, body).await
        });
    }
    eventually("engines have them", async || {
        fleet.seen("") == before + count
    })
    .await;
    sent
}

#[tokio::test]
async fn engines_that_are_killed_in_turn_under_several_requests_make_none_of_them_suspect() {
    for (engines, count) in [(2, 3), (2, 2), (3, 6), (3, 20)] {
        let fleet = Fleet::start(&vec!["sim"; engines], |_| {}).await;
        let sent = send_all(&fleet, bodies(HOLD, false, count)).await;
        for number in 0..2 {
            let seen = fleet.seen(HOLD);
            let had = fleet.engines[number].seen(HOLD);
            fleet.engines[number].kill();
            eventually("others get what it had", async || {
                fleet.seen(HOLD) >= seen + had
            })
            .await;
        }
        for engine in &fleet.engines[2..] {
            engine.kill();
        }
        for answer in sent.join_all().await {
            assert_eq!(answer.status, 200, "{engines} {count}: {}", answer.text());
        }
        for body in bodies(HOLD, false, count) {
            assert_eq!(fleet.post_as(INNOCENT, body).await.status, 200);
        }
        let refused = "warmroute_quarantine_refusals_total 0";
        assert!(fleet.has_metric(refused).await);
    }
}

#[tokio::test]
async fn answers_that_had_begun_acquit_the_request_that_was_cut_with_them() {
    let fleet = Fleet::start(&["sim"; 2], |_| {}).await;
    let streams = send_all(&fleet, bodies(BEGIN, true, 4)).await;
    let sent = send_all(&fleet, bodies(HOLD, false, 1)).await;
    let first = fleet
        .engines
        .iter()
        .position(|engine| engine.seen(HOLD) == 1);
    let first = first.unwrap();
    fleet.engines[first].kill();
    let second = &fleet.engines[1 - first];
    eventually("the other one gets it", async || second.seen(HOLD) == 1).await;
    second.kill();
    for answer in sent.join_all().await {
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    drop(streams);
}

#[tokio::test]
async fn a_request_that_ends_engines_among_others_reaches_five_at_most() {
    let fleet = Fleet::start(&["sim"; 7], |_| {}).await;
    let streams = send_all(&fleet, bodies(BEGIN, true, 14)).await;
    for attempt in 0..4 {
        let answer = fleet.post_as(GUILTY, chat(KILL, 1, false)).await;
        assert_eq!(answer.status, 502, "{attempt}: {}", answer.text());
        assert_eq!(answer.header("x-should-retry"), "false", "{attempt}");
        assert_eq!(fleet.seen(KILL), 5, "{attempt}");
    }
    drop(streams);
}

#[tokio::test]
async fn a_request_that_ends_a_single_engine_is_sent_to_it_twice_at_most() {
    let fleet = Fleet::start(&["sim"], |_| {}).await;
    let warm_up = fleet.post_as(INNOCENT, chat("x", 1, false)).await;
    assert_eq!(warm_up.status, 200);
    for _ in 0..4 {
        assert_eq!(fleet.post_as(GUILTY, chat(CUT, 1, false)).await.status, 502);
    }
    assert_eq!(fleet.seen(CUT), 2);
}

#[tokio::test]
async fn a_stored_response_that_ends_engines_is_remembered_too() {
    let fleet = Fleet::start(&["sim"; 4], |_| {}).await;
    let body = json!({"model": "sim", "input": CUT}).to_string();
    for _ in 0..4 {
        let answer = client::post(fleet.router.api, "/v1/responses", body.clone()).await;
        assert_eq!(answer.status, 502, "{}", answer.text());
        assert_eq!(answer.header("x-should-retry"), "false");
    }
    assert_eq!(fleet.seen(CUT), 2);
}

#[tokio::test]
async fn a_retry_that_no_worker_can_take_costs_the_others_nothing() {
    let fleet = Fleet::start(&["lone", "sim", "sim"], |config| {
        config.requests.advanced.retry_budget_percent = 0;
        config.requests.advanced.min_retries_per_second = 1;
    })
    .await;
    let lone = json!({"model": "lone", "messages": [{"role": "user", "content": BUSY}]});
    for _ in 0..50 {
        assert_eq!(fleet.post_as(GUILTY, lone.to_string()).await.status, 503);
    }
    assert!(
        fleet
            .has_metric("warmroute_retry_budget_exhausted_total 0")
            .await
    );
    // Each is tried at both workers.
    for number in 0..5 {
        let body = chat(&format!("{BUSY} {number}"), 1, false);
        assert_eq!(fleet.post_as(INNOCENT, body).await.status, 503);
    }
    assert_eq!(fleet.seen(&format!("{BUSY} ")), 10);
}

#[tokio::test]
async fn a_request_without_time_left_blames_no_worker() {
    let cluster = Cluster::start(vec![fast()], |config| {
        config.requests.request_timeout = Duration::from_millis(300);
        config.fleet.circuit_breaker.failure_threshold = 2;
    })
    .await;
    cluster.engines[0].fault(hang()).await;
    for _ in 0..4 {
        let answer = cluster.post(CHAT, chat("x", 1, false)).await;
        assert_eq!(
            (answer.status, answer.code()),
            (504, "request_timeout".to_owned())
        );
    }
    cluster.engines[0].fault(Faults::default()).await;
    let received = cluster.requests().await;
    // Uploads that use up the time are not sent at all.
    for _ in 0..4 {
        let body = chat("x", 1, false);
        let mut slow = TcpStream::connect(cluster.router.api).await.unwrap();
        let head = format!(
            "POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        slow.write_all(head.as_bytes()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(400)).await;
        slow.write_all(body.as_bytes()).await.unwrap();
        let mut answer = String::new();
        let read = tokio::time::timeout(too_long(), slow.read_to_string(&mut answer)).await;
        read.unwrap().unwrap();
        assert!(answer.starts_with("HTTP/1.1 504 "), "{answer}");
    }
    assert_eq!(cluster.requests().await, received);
    assert_eq!(cluster.worker("w0").await["circuit_breaker"], "closed");
    // A busy machine may use up the time, too.
    eventually("a request is answered in its time", async || {
        cluster.post(CHAT, chat("x", 1, false)).await.status == 200
    })
    .await;
}

#[tokio::test]
async fn a_router_with_few_file_descriptors_blames_no_worker() {
    let engines = vec![unhurried(); 3];
    let cluster = Cluster::with_few_descriptors(engines, 128).await;
    assert!(
        cluster
            .router
            .log()
            .contains("too few file descriptors for max_connections")
    );
    let api = cluster.router.api;
    let mut clients = JoinSet::new();
    for client in 0..60 {
        clients.spawn(async move {
            for number in 0..5 {
                let body = chat(&format!("{client} {number}"), 3, false);
                let answer = client::post(api, CHAT, body).await;
                assert_eq!(answer.status, 200, "{}", answer.text());
            }
        });
    }
    while let Some(done) = clients.join_next().await {
        done.unwrap();
    }
    // More requests at a time than descriptors: each needs a connection to an engine.
    let bodies = (0..200)
        .map(|number| chat(&format!("{number}"), 100, false))
        .collect();
    for (status, text) in client::http2(api, CHAT, bodies).await {
        let is_named = status == 503 && text.contains("router_out_of_resources");
        assert!(status == 200 || is_named, "{status} {text}");
    }
    let changes = "warmroute_circuit_breaker_transitions_total";
    assert_eq!(cluster.metric(changes, &[]).await, 0.0);
    let failures = "warmroute_worker_failures_total";
    assert_eq!(cluster.metric(failures, &["owner=\"worker\""]).await, 0.0);
    assert!(cluster.metric(failures, &["owner=\"router\""]).await > 0.0);
    assert_eq!(cluster.post(CHAT, chat("x", 1, false)).await.status, 200);
}

/// A router of which one client's four uploads hold half of the memory for bodies. Returns with it the body of each,
/// the uploads, and what they lack.
async fn with_held_bodies(max_wait: Duration) -> (Fleet, String, (Vec<TcpStream>, String)) {
    let fleet = Fleet::start(&["sim"], |config| {
        config.api.requests.max_total_body = 8 << 20;
        config.api.requests.max_body_wait = max_wait;
    })
    .await;
    let body = chat(&"x".repeat(900 << 10), 1, false);
    let (uploads, lacking) = client::unfinished_uploads(fleet.router.api, CHAT, &body, 4).await;
    let rest = lacking.to_owned();
    let held = 4 << 20;
    eventually("four bodies are held", async || {
        fleet
            .has_metric(&format!("warmroute_request_body_bytes {held}"))
            .await
    })
    .await;
    (fleet, body, (uploads, rest))
}

#[tokio::test]
async fn a_client_whose_bodies_have_their_share_of_memory_leaves_the_rest_to_others() {
    let (fleet, body, (uploads, rest)) = with_held_bodies(Duration::from_millis(100)).await;
    // As the uploads, from the address of the proxy itself.
    let refused = client::post(fleet.router.api, CHAT, body.clone()).await;
    assert_eq!(
        (refused.status, refused.code()),
        (503, "router_overloaded".to_owned())
    );
    assert_eq!(refused.header("retry-after"), "1");
    for other in [chat("x", 1, false), body.clone()] {
        let answer = fleet.post_as(INNOCENT, other).await;
        assert_eq!(answer.status, 200);
    }
    let small = client::post(fleet.router.api, CHAT, chat("x", 1, false)).await;
    assert_eq!(small.status, 200);
    finish(uploads, &rest).await;
    eventually("their memory is free", async || {
        fleet.has_metric("warmroute_request_body_bytes 0").await
    })
    .await;
    assert_eq!(fleet.post_as(GUILTY, body).await.status, 200);
}

/// Sends the rest of each upload, and reads its answer.
async fn finish(uploads: Vec<TcpStream>, rest: &str) {
    for mut upload in uploads {
        upload.write_all(rest.as_bytes()).await.unwrap();
        let mut answer = String::new();
        let read = tokio::time::timeout(too_long(), upload.read_to_string(&mut answer)).await;
        read.unwrap().unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    }
}

#[tokio::test]
async fn a_body_that_waits_for_memory_holds_up_no_other_of_its_http2_connection() {
    let (fleet, _, (uploads, rest)) = with_held_bodies(too_long()).await;
    let waits = "warmroute_request_bodies_waiting 1";
    let connection = client::Http2::connect(fleet.router.api).await;
    // From the address of the uploads, which has its share. Its bytes alone would fill hyper's window of a connection.
    let large = connection.post(CHAT, &[], chat(&"x".repeat(2 << 20), 1, false));
    let large = tokio::spawn(large);
    eventually("the large one waits", async || {
        fleet.has_metric(waits).await
    })
    .await;
    let innocent = [("x-forwarded-for", INNOCENT)];
    let other = connection.post(CHAT, &innocent, chat(&"x".repeat(100_000), 1, false));
    let (status, text) = tokio::time::timeout(too_long(), other).await.unwrap();
    assert_eq!(status, 200, "{text}");
    assert!(fleet.has_metric(waits).await, "the large one still waits");
    finish(uploads, &rest).await;
    let (status, text) = tokio::time::timeout(too_long(), large)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(status, 200, "{text}");
}

#[tokio::test]
async fn many_bodies_that_wait_for_memory_leave_their_http2_connection_to_others() {
    let (fleet, body, (uploads, rest)) = with_held_bodies(too_long()).await;
    // From the address of the uploads, which has its share. Together they would fill the window of the connection.
    let connection = client::Http2::connect(fleet.router.api).await;
    let mut large = tokio::task::JoinSet::new();
    for _ in 0..32 {
        large.spawn(connection.post(CHAT, &[], body.clone()));
    }
    let waits = "warmroute_request_bodies_waiting 4";
    for _ in 0..28 {
        let ended = tokio::time::timeout(too_long(), large.join_next()).await;
        let (status, text) = ended.unwrap().unwrap().unwrap();
        assert_eq!(status, 503, "{text}");
        assert!(text.contains("router_overloaded"), "{text}");
    }
    assert!(
        fleet.has_metric(waits).await,
        "a quarter of the window waits"
    );
    let innocent = [("x-forwarded-for", INNOCENT)];
    for _ in 0..3 {
        let other = connection.post(CHAT, &innocent, body.clone());
        let (status, text) = tokio::time::timeout(too_long(), other).await.unwrap();
        assert_eq!(status, 200, "{text}");
    }
    assert!(fleet.has_metric(waits).await, "they still wait");
    drop(large);
    finish(uploads, &rest).await;
}

#[tokio::test]
async fn refused_uploads_do_not_end_their_http2_connection() {
    let fleet = Fleet::start(&["sim"], |config| {
        config.api.requests.max_body = 100_000;
    })
    .await;
    let connection = client::Http2::connect(fleet.router.api).await;
    // The client has not sent all of it when it is refused: it is longer than the window of a stream.
    let body = chat(&"x".repeat(300 << 10), 1, false);
    for _ in 0..4 {
        let mut uploads = JoinSet::new();
        for _ in 0..100 {
            uploads.spawn(connection.post(CHAT, &[], body.clone()));
        }
        for _ in 0..100 {
            let ended = tokio::time::timeout(too_long(), uploads.join_next()).await;
            let (status, text) = ended.unwrap().unwrap().unwrap();
            assert_eq!(status, 413, "{text}");
        }
    }
    let other = connection.post(CHAT, &[], chat("x", 1, false));
    let (status, text) = tokio::time::timeout(too_long(), other).await.unwrap();
    assert_eq!(status, 200, "{text}");
}

#[tokio::test]
async fn a_key_salts_every_tenants_prompts() {
    let fleet = Fleet::start(&["sim"], |config| {
        config.tenant_salt_key = Secret::new("0123456789abcdef");
        config.tenants = ["a", "b"].map(cluster::tenant).into();
    })
    .await;
    for key in ["Bearer sk-a", "Bearer sk-b"] {
        let headers = [("authorization", key)];
        let body = chat("x", 1, false);
        let answer = client::send(fleet.router.api, "POST", CHAT, &headers, body).await;
        assert_eq!(answer.status, 200);
    }
    let bodies = fleet.engines[0].bodies.lock().clone();
    let salts = bodies.iter().map(|body| {
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        body["cache_salt"].as_str().unwrap().to_owned()
    });
    let salts: Vec<String> = salts.collect();
    assert_eq!(salts.len(), 2);
    assert_ne!(salts[0], salts[1]);
}

#[tokio::test]
async fn the_decision_header_can_be_switched_off() {
    let fleet = Fleet::start(&["sim"], |config| config.requests.decision_header = false).await;
    let headers = [("x-warmroute-decision", "1")];
    let body = chat("x", 1, false);
    let answer = client::send(fleet.router.api, "POST", CHAT, &headers, body).await;
    assert_eq!(
        (answer.status, answer.header("x-warmroute-decision")),
        (200, "")
    );
}

/// A chat without a worker's name, to a worker that is called by its address and to the one that is left once it is gone.
async fn decisions_and_errors(shows: bool) -> [String; 2] {
    let mut engine = cluster::Engine::here("w", fast()).await;
    let mut config = cluster::config();
    config.requests.decision_header = shows;
    config.fleet.health.interval = Duration::from_secs(600);
    let url = format!("http://{}", engine.address);
    config.workers = vec![WorkerSpec::from(url)];
    let router = Router::here(&config).await;
    eventually("the worker is up", async || {
        client::get(router.admin, "/readyz").await.status == 200
    })
    .await;
    let headers = [("x-warmroute-decision", "1")];
    let ask = async || {
        let body = chat("x", 1, false);
        client::send(router.api, "POST", CHAT, &headers, body).await
    };
    let answered = ask().await;
    assert_eq!(answered.status, 200, "{}", answered.text());
    let decision = answered.header("x-warmroute-decision").to_owned();
    engine.kill().await;
    let failed = ask().await;
    assert_eq!(failed.code(), "engine_unreachable");
    let port = engine.address.port().to_string();
    let texts = [decision, failed.text().to_owned()];
    for text in &texts {
        assert!(
            !text.contains("127.0.0.1") && !text.contains(&port),
            "{text}"
        );
    }
    texts
}

#[tokio::test]
async fn clients_see_no_worker_address() {
    let [decision, error] = decisions_and_errors(true).await;
    assert!(decision.starts_with("worker=worker-"), "{decision}");
    assert!(error.contains(": worker-"), "{error}");
    let [decision, error] = decisions_and_errors(false).await;
    assert_eq!(decision, "");
    assert!(!error.contains("worker-"), "{error}");
}

#[tokio::test]
async fn what_a_client_sends_comes_back_shortened() {
    let fleet = Fleet::start(&["sim"], |_| {}).await;
    let name = "m".repeat(1 << 20);
    let body = json!({"model": name, "messages": []}).to_string();
    let answer = fleet.post_as(GUILTY, body).await;
    assert_eq!(
        (answer.status, answer.code()),
        (404, "model_not_found".to_owned())
    );
    assert!(answer.body.len() < 400, "{}", answer.body.len());
}

#[tokio::test]
async fn every_scrape_has_all_workers_whoever_else_scrapes() {
    let fleet = Fleet::start(&["sim"; 12], |_| {}).await;
    let admin = fleet.router.admin;
    let mut scrapers = JoinSet::new();
    for _ in 0..8 {
        scrapers.spawn(async move {
            for _ in 0..40 {
                let page = client::get(admin, "/metrics").await;
                let up = page
                    .text()
                    .lines()
                    .filter(|line| line.starts_with("warmroute_worker_up{"));
                assert_eq!(up.count(), 12);
            }
        });
    }
    while let Some(done) = scrapers.join_next().await {
        done.unwrap();
    }
}

#[tokio::test]
async fn a_worker_without_models_is_reported_with_the_reason() {
    let stub = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = stub.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = stub.accept().await.unwrap();
            tokio::spawn(async move {
                let mut bytes = Vec::new();
                while !bytes.ends_with(b"\r\n\r\n") {
                    if read_more(&mut stream, &mut bytes).await.is_none() {
                        return;
                    }
                }
                let status = if bytes.starts_with(b"GET /v1/models ") {
                    "401 Unauthorized"
                } else {
                    "200 OK"
                };
                let answer =
                    format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
                let _ = stream.write_all(answer.as_bytes()).await;
            });
        }
    });
    let mut config = cluster::config();
    config.workers = [format!("http://{address}"), "http://127.0.0.1:1".to_owned()]
        .map(WorkerSpec::from)
        .into();
    let router = Router::child(&config).await;
    let line_with = |text: &str| {
        let log = router.log();
        log.lines()
            .find(|line| line.contains(text))
            .map(str::to_owned)
    };
    let mut lines = Vec::new();
    eventually("both are reported", async || {
        lines = ["lists no models", "worker is down"]
            .iter()
            .filter_map(|text| line_with(text))
            .collect();
        lines.len() == 2
    })
    .await;
    assert!(
        lines[0].contains("/v1/models answered 401") && lines[0].contains("WARN"),
        "{}",
        lines[0]
    );
    assert!(
        lines[1].contains("\"reason\":\"cannot connect: "),
        "{}",
        lines[1]
    );
    assert!(line_with("worker is up\"").is_none(), "{}", router.log());
}
