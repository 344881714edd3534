//! The bridge and our own source over real sockets, with an engine that obeys the test.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, FromArgMatches};
use hyper::Request;
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;

mod unusual_events;

use super::*;
use crate::http::full;
use crate::kv::event::{Batch, EngineHash, Event, Removed, Stored};
use crate::kv::grpc::{self, Grpc};
use crate::kv::protobuf::Service;
use crate::kv::source::{DecodeError, SourceBatch, SourceEvent};
use crate::kv::stream::{EventStream, Step};
use crate::observe;

/// An engine, and its end of a source.
#[derive(Clone)]
struct Engine(Arc<Mutex<State>>);

struct State {
    incarnation: u128,
    /// Its batches from number 0 on.
    batches: Vec<Batch>,
    wire: mpsc::UnboundedSender<SourceEvent>,
}

impl Engine {
    fn new() -> (Self, Wire) {
        let (wire, said) = mpsc::unbounded_channel();
        let engine = Self(Arc::new(Mutex::new(State {
            incarnation: 1,
            batches: Vec::new(),
            wire,
        })));
        engine.connect();
        let wire = Wire {
            engine: engine.clone(),
            said,
            answer: VecDeque::new(),
        };
        (engine, wire)
    }

    fn say(&self, said: SourceEvent) {
        let _ = self.0.lock().wire.send(said);
    }

    fn connect(&self) {
        self.say(SourceEvent::Connected { incarnation: None });
    }

    fn disconnect(&self) {
        let reason = "the engine is gone".to_owned();
        self.say(SourceEvent::Disconnected { reason });
    }

    /// Another process, whose counter stands where the old one's might have stood.
    fn restart(&self, batches: Vec<Batch>) {
        let mut state = self.0.lock();
        state.incarnation += 1;
        state.batches = batches;
    }

    fn publish(&self, events: Vec<Event>) {
        let mut state = self.0.lock();
        state.batches.push(batch(events));
        let frame = state.frame(state.batches.len() - 1);
        let _ = state.wire.send(SourceEvent::Live(frame));
    }

    /// A batch that cannot be decoded.
    fn garble(&self) {
        let mut state = self.0.lock();
        state.batches.push(batch(Vec::new()));
        let mut frame = state.frame(state.batches.len() - 1);
        frame.batch = Err(DecodeError("no batch".to_owned()));
        let _ = state.wire.send(SourceEvent::Live(frame));
    }

    fn store(&self, hashes: &[u64]) {
        self.publish(vec![store(hashes)]);
    }

    fn remove(&self, name: u64) {
        self.publish(vec![Event::Removed(Removed {
            hashes: vec![EngineHash(name)],
            ..Removed::default()
        })]);
    }
}

impl State {
    fn frame(&self, at: usize) -> SourceBatch {
        SourceBatch {
            sequence: at as u64,
            digest: self.incarnation << 64 | at as u128,
            bytes: 100,
            batch: Ok(self.batches[at].clone()),
            snapshot: None,
        }
    }
}

fn batch(events: Vec<Event>) -> Batch {
    Batch {
        events,
        ..Batch::default()
    }
}

/// Blocks below each other.
fn store(hashes: &[u64]) -> Event {
    Event::Stored(Stored {
        hashes: hashes.iter().copied().map(EngineHash).collect(),
        token_ids: hashes.iter().map(|name| *name as u32).collect(),
        block_size: 1,
        ..Stored::default()
    })
}

struct Wire {
    engine: Engine,
    said: mpsc::UnboundedReceiver<SourceEvent>,
    answer: VecDeque<SourceEvent>,
}

impl Source for Wire {
    async fn next(&mut self) -> SourceEvent {
        match self.answer.pop_front() {
            Some(said) => said,
            None => self.said.recv().await.unwrap(),
        }
    }

    fn replay(&mut self, first: u64) {
        let state = self.engine.0.lock();
        let kept = first as usize..state.batches.len();
        self.answer = kept
            .map(|at| SourceEvent::Replayed(state.frame(at)))
            .collect();
        self.answer.push_back(SourceEvent::ReplayEnd);
    }

    fn can_replay(&self) -> bool {
        true
    }
}

/// A router that follows the bridge and counts what it holds.
struct Router {
    source: Grpc,
    stream: EventStream<Batch>,
    copies: BTreeMap<u64, u32>,
    clears: u32,
    lost: Vec<String>,
}

impl Router {
    fn new(bridge: &Bridge) -> Self {
        Self::with(bridge, 0, &Service::ALL)
    }

    fn with(bridge: &Bridge, rank: u32, services: &'static [Service]) -> Self {
        let settings = grpc::Settings {
            services,
            backoff: Duration::from_millis(1),
            max_backoff: Duration::from_millis(10),
            ..grpc::Settings::default()
        };
        Self {
            source: Grpc::new(
                &bridge.address().to_string(),
                rank,
                settings,
                grpc::Metrics::new(&Registry::default()),
            ),
            stream: EventStream::new(stream::Settings::default(), observe::now()),
            copies: BTreeMap::new(),
            clears: 0,
            lost: Vec::new(),
        }
    }

    async fn on_event(&mut self) {
        let limit = Duration::from_secs(10);
        let said = tokio::time::timeout(limit, self.source.next()).await;
        let now = observe::now();
        let steps = match said.expect("something is said") {
            SourceEvent::Connected { incarnation } => {
                assert!(incarnation.is_some());
                self.stream.on_connected(now, incarnation.as_deref(), true)
            }
            SourceEvent::Live(frame) => self.stream.on_live(now, frame),
            SourceEvent::Replayed(frame) => self.stream.on_replayed(now, frame),
            SourceEvent::ReplayEnd => self.stream.on_replay_end(now),
            SourceEvent::ReplayFailed { .. } => self.stream.on_replay_failed(now),
            SourceEvent::Disconnected { reason } => {
                self.lost.push(reason);
                self.stream.on_disconnected(now)
            }
        };
        for step in steps {
            match step {
                Step::RequestPeerTree | Step::TakePeerTree => {}
                Step::RequestReplay { first } => self.source.replay(first),
                Step::Clear(_) => {
                    self.clears += 1;
                    self.copies.clear();
                }
                Step::Apply { payload, .. } => self.apply(payload),
            }
        }
    }

    fn apply(&mut self, batch: Batch) {
        for event in batch.events {
            match event {
                Event::Stored(event) => {
                    for name in event.hashes {
                        *self.copies.entry(name.0).or_default() += 1;
                    }
                }
                Event::Removed(event) => {
                    for name in event.hashes {
                        *self.copies.get_mut(&name.0).unwrap() -= 1;
                    }
                }
                Event::Cleared { .. } => self.copies.clear(),
                Event::Unknown { .. } => unreachable!(),
            }
        }
        self.copies.retain(|_, count| *count > 0);
    }

    async fn until_live_with(&mut self, hashes: &[u64]) {
        self.until(stream::State::Live, hashes).await;
    }

    async fn until(&mut self, state: stream::State, hashes: &[u64]) {
        let limit = Duration::from_secs(20);
        let waited = tokio::time::timeout(limit, async {
            while self.stream.state() != state || !self.copies.keys().eq(hashes) {
                self.on_event().await;
            }
        });
        let done = waited.await.is_ok();
        assert!(done, "{hashes:?}: {:?}, lost {:?}", self.copies, self.lost);
    }
}

fn settings(more: &str) -> Settings {
    let command = Settings::augment_args(clap::Command::new("bridge"));
    let words = format!("bridge --zmq tcp://unused:1 --listen 127.0.0.1:0 {more}");
    let matches = command.try_get_matches_from(words.split_whitespace());
    Settings::from_arg_matches(&matches.unwrap()).unwrap()
}

async fn bridge(more: &str) -> (Engine, Bridge) {
    let (engine, wire) = Engine::new();
    let bridge = Bridge::start(&settings(more), vec![wire], Registry::default())
        .await
        .unwrap();
    (engine, bridge)
}

/// The answer to a request of HTTP/1.
async fn get(bridge: &Bridge, path: &str) -> String {
    let mut stream = TcpStream::connect(bridge.address()).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

async fn until_it_serves(bridge: &Bridge, expected: bool) {
    for _ in 0..1_000 {
        if bridge.feeds.iter().all(|feed| feed.is_open()) == expected {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("serving was never {expected}");
}

#[tokio::test]
async fn early_and_late_subscribers_hold_what_the_engine_holds() {
    let (engine, bridge) = bridge("--history-batches-max 3").await;
    let mut early = Router::new(&bridge);
    engine.store(&[1, 2, 3]);
    engine.store(&[4]);
    early.until_live_with(&[1, 2, 3, 4]).await;
    for name in 10..20 {
        engine.store(&[name]);
        engine.remove(name);
    }
    engine.remove(2);
    engine.store(&[5]);
    let mut late = Router::new(&bridge);
    late.until_live_with(&[1, 3, 4, 5]).await;
    early.until_live_with(&[1, 3, 4, 5]).await;
    engine.remove(5);
    late.until_live_with(&[1, 3, 4]).await;
    early.until_live_with(&[1, 3, 4]).await;
    assert!(late.lost.is_empty(), "{:?}", late.lost);
}

#[tokio::test]
async fn every_path_is_served() {
    let (engine, bridge) = bridge("").await;
    engine.store(&[1]);
    for service in &[
        Service::Vllm,
        Service::Sglang,
        Service::TokenSpeed,
        Service::TensorrtLlm,
    ] {
        Router::with(&bridge, 0, std::slice::from_ref(service))
            .until_live_with(&[1])
            .await;
    }
}

#[tokio::test]
async fn a_restarted_engine_is_never_taken_for_the_old_one() {
    for count in 1..4 {
        let (engine, bridge) = bridge("").await;
        engine.store(&[1]);
        engine.store(&[2]);
        let mut router = Router::new(&bridge);
        router.until_live_with(&[1, 2]).await;
        engine.disconnect();
        // Its counter stands below, at and above the old one.
        engine.restart(
            (0..count)
                .map(|name| batch(vec![store(&[10 + name])]))
                .collect(),
        );
        engine.connect();
        let hashes: Vec<u64> = (10..10 + count).collect();
        router.until_live_with(&hashes).await;
        assert_eq!(router.clears, 1, "{count}");
    }
}

#[tokio::test]
async fn a_connection_that_was_lost_and_proved_costs_subscribers_nothing_that_they_hold() {
    let (engine, bridge) = bridge("").await;
    engine.store(&[1]);
    engine.store(&[2]);
    let mut router = Router::new(&bridge);
    router.until_live_with(&[1, 2]).await;
    engine.disconnect();
    until_it_serves(&bridge, false).await;
    engine.connect();
    engine.store(&[3]);
    router.until_live_with(&[1, 2, 3]).await;
    assert_eq!(router.clears, 0);
    assert!(
        router.lost[0].contains("not connected"),
        "{:?}",
        router.lost
    );
}

#[tokio::test]
async fn an_idle_engine_is_served_and_its_first_batch_too() {
    let (engine, bridge) = bridge("").await;
    until_it_serves(&bridge, true).await;
    let mut router = Router::new(&bridge);
    router.until_live_with(&[]).await;
    engine.store(&[1]);
    router.until_live_with(&[1]).await;
    assert!(router.lost.is_empty(), "{:?}", router.lost);
}

#[tokio::test]
async fn what_came_before_an_unreadable_batch_is_told_to_be_missing() {
    let (engine, bridge) = bridge("").await;
    engine.store(&[1]);
    let mut router = Router::new(&bridge);
    router.until_live_with(&[1]).await;
    engine.garble();
    router.until(stream::State::Partial, &[]).await;
    engine.store(&[2]);
    router.until(stream::State::Partial, &[2]).await;
    let mut late = Router::new(&bridge);
    late.until(stream::State::Partial, &[2]).await;
}

#[tokio::test]
async fn ranks_are_told_apart() {
    let (first, first_wire) = Engine::new();
    let (second, second_wire) = Engine::new();
    let wires = vec![first_wire, second_wire];
    let bridge = Bridge::start(&settings("--ranks 2"), wires, Registry::default())
        .await
        .unwrap();
    first.store(&[1]);
    second.store(&[2]);
    let mut routers = [0, 1].map(|rank| Router::with(&bridge, rank, &Service::ALL));
    routers[0].until_live_with(&[1]).await;
    routers[1].until_live_with(&[2]).await;
    // One rank's engine restarts, and the other's subscribers do not notice.
    second.disconnect();
    second.restart(vec![]);
    second.connect();
    second.store(&[3]);
    routers[1].until_live_with(&[3]).await;
    first.store(&[4]);
    routers[0].until_live_with(&[1, 4]).await;
    assert!(routers[0].lost.is_empty());
    let mut third = Router::with(&bridge, 2, &Service::ALL);
    third.on_event().await;
    assert!(third.lost[0].contains("no such rank"));
}

#[tokio::test]
async fn more_subscribers_than_there_are_places_are_refused() {
    let (engine, bridge) = bridge("--subscribers-max 1").await;
    engine.store(&[1]);
    let mut first = Router::new(&bridge);
    first.until_live_with(&[1]).await;
    let mut second = Router::new(&bridge);
    second.on_event().await;
    assert!(second.lost[0].contains("too many subscribers"));
    let refused = async || {
        let metrics = get(&bridge, "/metrics").await;
        let name = "warmroute_bridge_refused_subscribers_total ";
        let mut lines = metrics.lines();
        let count = lines.find_map(|line| line.strip_prefix(name));
        count.unwrap().parse::<u64>().unwrap()
    };
    let before = refused().await;
    // Resource exhausted.
    assert_eq!(call(&bridge, "Watch", "").await, "status 8");
    assert_eq!(refused().await, before + 1);
    drop(first);
    second.until_live_with(&[1]).await;
}

#[tokio::test]
async fn operators_see_whether_it_serves_and_what_it_holds() {
    let (engine, bridge) = bridge("").await;
    engine.store(&[1, 2]);
    engine.store(&[3]);
    let mut router = Router::new(&bridge);
    router.until_live_with(&[1, 2, 3]).await;
    assert!(get(&bridge, "/healthz").await.starts_with("HTTP/1.1 200"));
    assert_eq!(health(&bridge, "").await, "serving");
    assert_eq!(
        health(&bridge, "vllm.grpc.engine.VllmEngine").await,
        "serving"
    );
    assert_eq!(health(&bridge, "other").await, "status 5");
    let metrics = get(&bridge, "/metrics").await;
    for line in [
        "warmroute_bridge_batches_total 2",
        "warmroute_bridge_subscribers 1",
        "warmroute_bridge_history_batches{rank=\"0\"} 2",
        // The list is one batch behind.
        "warmroute_bridge_cached_blocks{rank=\"0\"} 2",
        "warmroute_bridge_serving{rank=\"0\"} 1",
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    engine.disconnect();
    until_it_serves(&bridge, false).await;
    let answer = get(&bridge, "/healthz").await;
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("not connected"));
    assert_eq!(health(&bridge, "").await, "not serving");
}

async fn health(bridge: &Bridge, service: &str) -> String {
    call(bridge, "Check", service).await
}

async fn call(bridge: &Bridge, method: &str, service: &str) -> String {
    let stream = TcpStream::connect(bridge.address()).await.unwrap();
    let io = TokioIo::new(stream);
    let shaken = hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await;
    let (mut sender, connection) = shaken.unwrap();
    let asked = async {
        let mut question = vec![0x0a, service.len() as u8];
        question.extend_from_slice(service.as_bytes());
        let request = Request::post(format!("http://x/grpc.health.v1.Health/{method}"))
            .header("content-type", "application/grpc")
            .body(full(crate::http::grpc::frame(&question)))
            .unwrap();
        let answer = sender.send_request(request).await.unwrap();
        if let Some(status) = answer.headers().get("grpc-status") {
            return format!("status {}", status.to_str().unwrap());
        }
        let body = http_body_util::BodyExt::collect(answer.into_body()).await;
        match body.unwrap().to_bytes()[..] {
            [0, 0, 0, 0, 2, 8, 1] => "serving".to_owned(),
            [0, 0, 0, 0, 2, 8, 2] => "not serving".to_owned(),
            ref other => format!("{other:?}"),
        }
    };
    tokio::select! {
        answer = asked => answer,
        ended = connection => panic!("{ended:?}"),
    }
}

#[tokio::test]
async fn stopping_ends_every_call_with_a_reason() {
    let (engine, bridge) = bridge("").await;
    engine.store(&[1]);
    let mut router = Router::new(&bridge);
    router.until_live_with(&[1]).await;
    let stopped = tokio::time::timeout(Duration::from_secs(10), bridge.stop());
    stopped.await.expect("it stops soon");
    while router.lost.is_empty() {
        router.on_event().await;
    }
    assert_eq!(router.lost[0], "Unavailable: the bridge is shutting down");
}
