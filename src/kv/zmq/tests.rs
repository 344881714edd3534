//! Over real sockets. The publishers are the `zeromq` crate's, and bytes written by hand where it
//! cannot misbehave.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use super::*;
use crate::observe::metrics::Registry;

const ANY: &str = "tcp://127.0.0.1:0";

fn source(endpoint: &str, replay: Option<&str>, settings: Settings) -> Zmq {
    let target = Target {
        endpoint: endpoint.parse().unwrap(),
        topic: "kv".to_owned(),
        replay: replay.map(|replay| replay.parse().unwrap()),
    };
    Zmq::new(target, settings, Metrics::new(&Registry::default()))
}

/// Quick to try again and to ask for a sign of life, and slow to give up: machines may be busy.
fn hasty() -> Settings {
    Settings {
        backoff: Duration::from_millis(1),
        max_backoff: Duration::from_millis(10),
        heartbeat_interval: Duration::from_millis(20),
        heartbeat_timeout: Duration::from_millis(20_000),
        max_message: 10_000,
        ..Settings::default()
    }
}

/// What is said next. The limit only ends what hangs.
async fn said(source: &mut Zmq) -> SourceEvent {
    let limit = Duration::from_secs(20);
    tokio::time::timeout(limit, source.next()).await.unwrap()
}

/// In short, so that a row of them can be compared.
fn short(said: &SourceEvent) -> String {
    match said {
        SourceEvent::Connected { .. } => "connected".to_owned(),
        SourceEvent::Live(frame) => format!("live {}", frame.sequence),
        SourceEvent::Replayed(frame) => format!("replayed {}", frame.sequence),
        SourceEvent::ReplayEnd => "end".to_owned(),
        SourceEvent::ReplayFailed { .. } => "failed".to_owned(),
        SourceEvent::Disconnected { reason } => format!("lost: {reason}"),
    }
}

fn payload() -> Vec<u8> {
    // [timestamp 0.0, no events]
    b"\x92\xcb\0\0\0\0\0\0\0\0\x90".to_vec()
}

fn parts<const N: usize>(parts: [&[u8]; N]) -> ZmqMessage {
    let parts = parts.map(Bytes::copy_from_slice);
    ZmqMessage::try_from(Vec::from(parts)).unwrap()
}

async fn publisher() -> (PubSocket, String) {
    let mut publisher = PubSocket::new();
    let endpoint = publisher.bind(ANY).await.unwrap().to_string();
    (publisher, endpoint)
}

async fn publish(publisher: &mut PubSocket, number: u64) {
    let message = parts([b"kv-events", &number.to_be_bytes(), &payload()]);
    publisher.send(message).await.unwrap();
}

/// Publishes `numbers`, one after the other, until the first has come: this crate's publisher does
/// not say when a subscription holds.
async fn first_live(publisher: &mut PubSocket, source: &mut Zmq, number: u64) {
    loop {
        publish(publisher, number).await;
        let soon = Duration::from_millis(20);
        if let Ok(said) = tokio::time::timeout(soon, source.next()).await {
            assert_eq!(short(&said), format!("live {number}"));
            return;
        }
    }
}

#[tokio::test]
async fn published_batches_come_between_connected_and_lost() {
    let (mut publisher, endpoint) = publisher().await;
    let mut source = source(&endpoint, None, hasty());
    assert!(!source.can_replay());
    assert_eq!(short(&said(&mut source).await), "connected");
    first_live(&mut publisher, &mut source, 7).await;
    publish(&mut publisher, u64::MAX - 1).await;
    loop {
        match short(&said(&mut source).await).as_str() {
            "live 7" => {}
            last => {
                assert_eq!(last, "live 18446744073709551614");
                break;
            }
        }
    }
    drop(publisher);
    assert!(matches!(
        said(&mut source).await,
        SourceEvent::Disconnected { .. }
    ));
}

/// A publisher made by hand: accepts, shakes hands as `minor` and waits for the subscription.
struct ByHand {
    stream: TcpStream,
}

impl ByHand {
    async fn accept(listener: &TcpListener, kind: &str, minor: u8) -> Self {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut greeting = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, minor];
        greeting.extend(b"NULL");
        greeting.resize(64, 0);
        greeting.extend([4, 22 + kind.len() as u8]);
        greeting.extend(b"\x05READY\x0bSocket-Type\0\0\0");
        greeting.push(kind.len() as u8);
        greeting.extend(kind.as_bytes());
        stream.write_all(&greeting).await.unwrap();
        Self { stream }
    }

    /// Reads until `bytes` have come.
    async fn until(&mut self, bytes: &[u8]) {
        let mut read = Vec::new();
        while !read.windows(bytes.len()).any(|window| window == bytes) {
            read.push(self.stream.read_u8().await.unwrap());
        }
    }

    async fn subscribed(mut self) -> Self {
        self.until(b"\x09SUBSCRIBEkv").await;
        self.until(b"\x04PING\0\0").await;
        self.stream.write_all(b"\x04\x05\x04PONG").await.unwrap();
        self
    }

    async fn say(&mut self, parts: &[&[u8]]) {
        let mut bytes = Vec::new();
        for (at, part) in parts.iter().enumerate() {
            bytes.push(u8::from(at + 1 < parts.len()));
            bytes.push(part.len() as u8);
            bytes.extend_from_slice(part);
        }
        self.stream.write_all(&bytes).await.unwrap();
    }

    async fn publish(&mut self, number: u64) {
        self.say(&[b"kv", &number.to_be_bytes(), &payload()]).await;
    }
}

async fn listen() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("tcp://{}", listener.local_addr().unwrap());
    (listener, endpoint)
}

/// Listens on the address of a former listener, as a restarted engine does.
fn listen_again(addr: SocketAddr) -> TcpListener {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.bind(addr).unwrap();
    socket.listen(8).unwrap()
}

#[tokio::test]
async fn a_restarted_publisher_is_heard_only_after_the_end_of_the_old_one() {
    let (listener, endpoint) = listen().await;
    let addr = listener.local_addr().unwrap();
    let mut source = source(&endpoint, None, hasty());
    let engine = async {
        let mut old = ByHand::accept(&listener, "PUB", 1).await.subscribed().await;
        old.publish(5).await;
        old.publish(6).await;
        // In the middle of a message.
        old.stream.write_all(b"\x01\x02kv\x01").await.unwrap();
        drop((old, listener));
        let listener = listen_again(addr);
        let mut new = ByHand::accept(&listener, "PUB", 1).await.subscribed().await;
        // The numbers alone would not tell.
        new.publish(7).await;
        (listener, new)
    };
    let received = async {
        let mut received = Vec::new();
        while received.last().is_none_or(|last| last != "live 7") {
            received.push(short(&said(&mut source).await));
        }
        received
    };
    let (_engine, received) = tokio::join!(engine, received);
    let lost = "lost: closed by the peer";
    assert_eq!(
        received,
        ["connected", "live 5", "live 6", lost, "connected", "live 7"]
    );
}

#[tokio::test]
async fn a_publisher_that_is_there_but_silent_is_lost() {
    let (listener, endpoint) = listen().await;
    let settings = Settings {
        heartbeat_timeout: Duration::from_millis(50),
        ..hasty()
    };
    let mut source = source(&endpoint, None, settings);
    let (black_hole, connected) = tokio::join!(
        async { ByHand::accept(&listener, "PUB", 1).await.subscribed().await },
        said(&mut source)
    );
    assert_eq!(short(&connected), "connected");
    let lost = short(&said(&mut source).await);
    assert_eq!(lost, "lost: no answer to a ping within 50 ms");
    drop(black_hole);
}

#[tokio::test]
async fn silence_that_answers_pings_is_not_the_end() {
    let (listener, endpoint) = listen().await;
    let mut source = source(&endpoint, None, hasty());
    let engine = async {
        let mut engine = ByHand::accept(&listener, "PUB", 1).await.subscribed().await;
        for _ in 0..5 {
            engine.until(b"\x04PING\0\0").await;
            engine.stream.write_all(b"\x04\x05\x04PONG").await.unwrap();
        }
        engine.publish(1).await;
        engine
    };
    let received = async { [said(&mut source).await, said(&mut source).await] };
    let (_engine, received) = tokio::join!(engine, received);
    assert_eq!(received.map(|said| short(&said)), ["connected", "live 1"]);
}

#[tokio::test]
async fn a_publisher_that_asks_and_does_not_read_is_lost() {
    let (listener, endpoint) = listen().await;
    let mut source = source(&endpoint, None, hasty());
    let engine = async {
        let mut engine = ByHand::accept(&listener, "PUB", 1).await.subscribed().await;
        let pings = b"\x04\x17\x04PING\0\0sixteen bytes...".repeat(1_000);
        // The kernel holds some megabytes of answers first.
        while engine.stream.write_all(&pings).await.is_ok() {}
    };
    let received = async {
        let received = [said(&mut source).await, said(&mut source).await];
        drop(source);
        received
    };
    let ((), [connected, lost]) = tokio::join!(engine, received);
    assert_eq!(short(&connected), "connected");
    assert_eq!(
        short(&lost),
        "lost: the peer sends pings and does not read the answers"
    );
}

#[tokio::test]
async fn a_heartbeat_of_a_year_is_no_reason_not_to_connect() {
    let (listener, endpoint) = listen().await;
    let settings = Settings {
        heartbeat_interval: Duration::from_millis(365 * 24 * 3_600_000),
        ..hasty()
    };
    let mut source = source(&endpoint, None, settings);
    let (_engine, said) = tokio::join!(
        async { ByHand::accept(&listener, "PUB", 1).await.subscribed().await },
        said(&mut source)
    );
    assert_eq!(short(&said), "connected");
}

/// What becomes of a connection on which `garbage` comes.
async fn lost_by(garbage: &[u8]) -> String {
    let (listener, endpoint) = listen().await;
    let mut source = source(&endpoint, None, hasty());
    let engine = async {
        let mut engine = ByHand::accept(&listener, "PUB", 1).await.subscribed().await;
        engine.stream.write_all(garbage).await.unwrap();
        engine
    };
    let received = async { [said(&mut source).await, said(&mut source).await] };
    let (_engine, [connected, lost]) = tokio::join!(engine, received);
    assert_eq!(short(&connected), "connected");
    short(&lost)
}

#[tokio::test]
async fn garbage_ends_the_connection_and_says_what_was_wrong() {
    let huge = lost_by(b"\x02\0\0\x10\0\0\0\0\0").await;
    assert_eq!(
        huge,
        "lost: protocol error: a frame of 17592186044416 bytes, 10000 are allowed"
    );
    let shape = lost_by(b"\0\x02kv").await;
    assert!(shape.contains("a published message of 1 frames"), "{shape}");
    let number = lost_by(b"\x01\x02kv\x01\x02no\0\0").await;
    assert!(number.contains("a sequence number of 2 bytes"), "{number}");
    assert!(lost_by(b"\xf0").await.contains("flags 0xf0"));
}

#[tokio::test]
async fn a_server_of_another_kind_is_never_connected_and_tried_again() {
    let (listener, endpoint) = listen().await;
    let mut source = source(&endpoint, None, hasty());
    let others = async {
        for _ in 0..2 {
            let (mut other, _) = listener.accept().await.unwrap();
            other.write_all(b"HTTP/1.1 400 Bad Request").await.unwrap();
        }
        ByHand::accept(&listener, "PUB", 1).await.subscribed().await
    };
    let received = async { [said(&mut source).await, said(&mut source).await] };
    let (_engine, received) = tokio::join!(others, received);
    // The reason is said once, not with each attempt.
    assert_eq!(
        received.map(|said| short(&said)),
        ["lost: protocol error: no ZeroMQ greeting", "connected"]
    );
}

/// Answers one question as vLLM does, with `numbers`; gives what was asked.
async fn answer_one(router: &mut RouterSocket, numbers: &[u64], topic: bool) -> Vec<Bytes> {
    let replay = router.recv().await.unwrap().into_vec();
    let who = replay[0].clone();
    let end = [END.to_be_bytes().to_vec(), Vec::new()];
    let batches = numbers
        .iter()
        .map(|n| [n.to_be_bytes().to_vec(), payload()]);
    for [number, payload] in batches.chain([end]) {
        let message = if topic {
            parts([&who, b"", b"kv", &number, &payload])
        } else {
            parts([&who, b"", &number, &payload])
        };
        router.send(message).await.unwrap();
    }
    replay[1..].to_vec()
}

const END: u64 = u64::MAX;

#[tokio::test]
async fn an_answer_comes_among_live_batches_with_or_without_topics() {
    for topic in [false, true] {
        let (mut publisher, endpoint) = publisher().await;
        let mut router = RouterSocket::new();
        let replay = router.bind(ANY).await.unwrap().to_string();
        let mut source = source(&endpoint, Some(&replay), hasty());
        assert!(source.can_replay());
        assert_eq!(short(&said(&mut source).await), "connected");
        first_live(&mut publisher, &mut source, 9).await;
        source.replay(3);
        let engine = async {
            publish(&mut publisher, 10).await;
            let asked = answer_one(&mut router, &[3, 4, 5], topic).await;
            publish(&mut publisher, 11).await;
            asked
        };
        let received = async {
            let mut received = Vec::new();
            while !received.contains(&"live 11".to_owned()) || !received.contains(&"end".to_owned())
            {
                received.push(short(&said(&mut source).await));
            }
            received
        };
        let (asked, received) = tokio::join!(engine, received);
        assert_eq!(asked, [&b""[..], &3_u64.to_be_bytes()]);
        let answers: Vec<_> = received
            .iter()
            .filter(|said| !said.starts_with("live"))
            .collect();
        assert_eq!(answers, ["replayed 3", "replayed 4", "replayed 5", "end"]);
    }
}

#[tokio::test]
async fn the_answer_to_an_older_question_is_never_heard() {
    let (mut publisher, endpoint) = publisher().await;
    let mut router = RouterSocket::new();
    let replay = router.bind(ANY).await.unwrap().to_string();
    let mut source = source(&endpoint, Some(&replay), hasty());
    assert_eq!(short(&said(&mut source).await), "connected");
    first_live(&mut publisher, &mut source, 1).await;
    source.replay(100);
    let first = async {
        let replay = router.recv().await.unwrap().into_vec();
        let replay_message = parts([&replay[0], b"", &100_u64.to_be_bytes(), &payload()]);
        router.send(replay_message).await.unwrap();
    };
    let received = async {
        loop {
            let received = short(&said(&mut source).await);
            if !received.starts_with("live") {
                return received;
            }
        }
    };
    let ((), received) = tokio::join!(first, received);
    assert_eq!(received, "replayed 100");
    // The rest of that answer is still to come when the next question is asked.
    source.replay(2);
    let mut received = Vec::new();
    let listen = async {
        while received.last().is_none_or(|last| last != "end") {
            received.push(short(&said(&mut source).await));
        }
    };
    tokio::join!(answer_one(&mut router, &[2, 3], true), listen);
    received.retain(|said| !said.starts_with("live"));
    assert_eq!(received, ["replayed 2", "replayed 3", "end"]);
}

#[tokio::test]
async fn a_replay_that_is_refused_fails_alone() {
    let (mut publisher, endpoint) = publisher().await;
    let (gone, replay) = listen().await;
    drop(gone);
    let mut source = source(&endpoint, Some(&replay), hasty());
    // Before there is a connection there is nothing to ask.
    source.replay(0);
    assert_eq!(short(&said(&mut source).await), "connected");
    first_live(&mut publisher, &mut source, 1).await;
    source.replay(0);
    loop {
        match said(&mut source).await {
            SourceEvent::ReplayFailed { reason } => {
                assert!(reason.starts_with("cannot connect"), "{reason}");
                break;
            }
            other => assert_eq!(short(&other), "live 1"),
        }
    }
    publish(&mut publisher, 2).await;
    loop {
        match short(&said(&mut source).await).as_str() {
            "live 1" => {}
            last => return assert_eq!(last, "live 2"),
        }
    }
}
