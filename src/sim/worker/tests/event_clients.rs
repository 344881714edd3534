//! Clients of a simulated engine's KV events: a subscriber, and one that asks for replays.

use std::ops::Range;

use bytes::Bytes;
use tokio::time::timeout;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

use super::*;
use crate::kv::event::Batch;
use crate::kv::msgpack;

pub(super) const LIMIT: Duration = Duration::from_secs(10);
/// How long to wait for what should not come.
pub(super) const MOMENT: Duration = Duration::from_millis(100);

pub(super) fn with_events() -> Settings {
    Settings {
        decode_ms: 1,
        kv: publisher::Settings::loopback(),
        ..Settings::default()
    }
}

impl Running {
    /// A prompt of these tokens, read by one rank and answered with one token.
    pub(super) async fn read(&self, rank: usize, prompt: Range<u32>) -> Value {
        let prompt: Vec<u32> = prompt.collect();
        let body = serde_json::json!({"prompt": prompt, "max_tokens": 1}).to_string();
        let mut stream = TcpStream::connect(self.addr).await.unwrap();
        let headers = format!("connection: close\r\nx-data-parallel-rank: {rank}\r\n");
        write(&mut stream, "POST", "/v1/completions", &body, &headers).await;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        serde_json::from_str(body).unwrap()
    }

    pub(super) fn last_sequence(&self, rank: usize) -> Option<u64> {
        self.handle.cache_contents(rank).last_sequence
    }
}

#[derive(Debug)]
pub(super) struct Message {
    pub(super) topic: Bytes,
    pub(super) sequence: u64,
    pub(super) payload: Bytes,
}

impl Message {
    pub(super) fn of(frames: ZmqMessage) -> Self {
        let [topic, sequence, payload] = frames.into_vec().try_into().unwrap();
        Self {
            topic,
            sequence: number(&sequence),
            payload,
        }
    }

    pub(super) fn batch(&self) -> Batch {
        msgpack::decode(&self.payload).unwrap()
    }
}

pub(super) fn number(bytes: &[u8]) -> u64 {
    u64::from_be_bytes(bytes.try_into().unwrap())
}

pub(super) struct Subscriber {
    pub(super) socket: SubSocket,
    pub(super) rank: usize,
}

impl Subscriber {
    /// Subscribed, and past everything that is published by now.
    pub(super) async fn join(worker: &Running, rank: usize) -> Self {
        let mut socket = SubSocket::new();
        let address = worker.handle.kv_events()[rank].events;
        socket.connect(&format!("tcp://{address}")).await.unwrap();
        socket.subscribe("").await.unwrap();
        let mut subscriber = Self { socket, rank };
        // What is published before the subscription arrives is not seen. So something new is
        // published until it is.
        let mut seen = None;
        for round in 0.. {
            let first = 1_000_000 + 16 * round;
            worker.read(rank, first..first + 16).await;
            if let Ok(first) = timeout(MOMENT, subscriber.socket.recv()).await {
                seen = Some(Message::of(first.unwrap()).sequence);
                break;
            }
        }
        while seen != worker.last_sequence(rank) {
            seen = Some(subscriber.next().await.sequence);
        }
        subscriber
    }

    pub(super) async fn next(&mut self) -> Message {
        let next = timeout(LIMIT, self.socket.recv()).await;
        Message::of(next.expect("a batch arrives").unwrap())
    }
}

pub(super) struct Asker {
    pub(super) socket: DealerSocket,
}

impl Asker {
    pub(super) async fn connect(worker: &Running, rank: usize) -> Self {
        let mut socket = DealerSocket::new();
        let address = worker.handle.kv_events()[rank].replay.unwrap();
        socket.connect(&format!("tcp://{address}")).await.unwrap();
        Self { socket }
    }

    pub(super) async fn ask(&mut self, first: u64) {
        let frames = vec![Bytes::new(), Bytes::copy_from_slice(&first.to_be_bytes())];
        let request = ZmqMessage::try_from(frames).unwrap();
        self.socket.send(request).await.unwrap();
    }

    /// The frames after the delimiter.
    pub(super) async fn frames(&mut self) -> Vec<Bytes> {
        let reply = timeout(LIMIT, self.socket.recv()).await;
        let mut frames = reply.expect("there is an answer").unwrap().into_vec();
        assert_eq!(frames.remove(0), "");
        frames
    }

    pub(super) async fn hears_nothing(&mut self) {
        let reply = timeout(MOMENT, self.socket.recv()).await;
        assert!(!matches!(reply, Ok(Ok(_))), "{reply:?}");
    }

    /// The batches of an answer, up to its end.
    pub(super) async fn replay(&mut self, first: u64) -> Vec<Message> {
        self.ask(first).await;
        let mut messages = Vec::new();
        loop {
            let frames = self.frames().await;
            let message = Message::of(ZmqMessage::try_from(frames).unwrap());
            if message.sequence == u64::MAX {
                assert_eq!(
                    (&message.topic[..], &message.payload[..]),
                    (&b""[..], &b""[..])
                );
                return messages;
            }
            messages.push(message);
        }
    }
}

pub(super) fn sequences(messages: &[Message]) -> Vec<u64> {
    messages.iter().map(|message| message.sequence).collect()
}
