//! Cache events over ZeroMQ, as vLLM publishes them: a subscription, and a second connection for each
//! question about what was published before. Judges nothing; see [`super::source`].
//!
//! **Why ZMTP is spoken here and not by a crate.** A source must tell the end of a connection in its
//! place among the words, and never let two processes' words meet; a connection object of our own is
//! just that. Fault tests against libzmq 4.3.5 publishers (killed, stopped, flooding, replaced by other
//! servers) gave, in November 2026:
//! - `zeromq` 0.7.0 (pure Rust, 104 crates, the widest use): tells an end only on a side channel, and
//!   reconnects by itself, always; no heartbeat and no keepalive, so a stopped or unreachable publisher
//!   is never noticed; no bound on a frame: nine bytes that announce 16 TiB abort the whole process.
//! - `omq-tokio` 0.33.0 (pure Rust, 116 crates): heartbeats, a message bound, reconnect can be off; but then
//!   `recv` waits for ever after the end, which comes on a side channel ahead of what was received
//!   before it, a refused connection is not told, and 113 MB were queued for a slow reader with a bound
//!   of 8 MiB set. A breaking release every week or two.
//! - `zmq` (libzmq): needs a C++ compiler, which building this project must not.
//!
//! What is needed of ZMTP 3 for a client fits in one pure file ([`zmtp`]). `zeromq` stays for the
//! pretend engine, whose server half is trusted.
//!
//! **Bounds.** No queue is held: what is not asked for stays in the kernel's buffers and then with the
//! engine, which drops beyond its own mark; that is a gap in the numbers, and gaps are asked for again.
//! One message has a bound, and a longer one ends the connection.
//!
//! **Joining.** `Connected` is said once the engine has read the subscription (it answered a ping sent
//! after it; peers of ZMTP 3.0 can't be asked). libzmq applies it when it publishes next, up to about
//! a millisecond later. A batch lost in between is missing in the numbers: a replay asked for after
//! `Connected` takes two round trips and more, and shows it, or the next batch shows the gap.

pub mod zmtp;

mod connection;
mod endpoint;
pub mod frame;
pub mod tap;

use std::fmt;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use prometheus::{IntCounter, IntCounterVec};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep_until};

pub use self::endpoint::Endpoint;

use self::connection::{Connection, End};
use self::frame::Answer;
use self::zmtp::{Fault, Parts, Role};
use super::source::{Said, Source};
use crate::observe::metrics::Registry;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// How long a connection and its handshake may each take.
    pub connect_timeout_ms: u64,
    /// How long until the first new attempt; doubles with each, and is drawn between half and whole.
    pub backoff_ms: u64,
    pub backoff_max_ms: u64,
    /// How long a connection may be silent before it is asked for a sign of life.
    pub heartbeat_ms: u64,
    /// How long it may take to give one.
    pub silence_max_ms: u64,
    /// Of one published batch.
    pub message_bytes_max: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            // Beyond a lost first packet of the handshake (1 s) and one more.
            connect_timeout_ms: 3_000,
            backoff_ms: 100,
            // An engine that is back is heard of within this; a fleet of 2,000 costs 1,000 attempts/s.
            backoff_max_ms: 2_000,
            heartbeat_ms: 2_000,
            // An engine's socket thread answers at once, on a starved machine within a second or two.
            silence_max_ms: 5_000,
            // A step that stores 1,000,000 tokens takes 5 MB.
            message_bytes_max: 16 << 20,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Metrics {
    connected: IntCounter,
    ended: IntCounterVec,
    received_bytes: IntCounter,
    questions: IntCounterVec,
}

impl Metrics {
    pub fn new(registry: &Registry) -> Self {
        Self {
            connected: registry.counter(
                "warmroute_kv_zmq_connections_total",
                "Subscriptions to engines' cache events that were made.",
            ),
            ended: registry.counters(
                "warmroute_kv_zmq_ended_total",
                "Connections for cache events that ended or were not made, by why.",
                &["reason"],
            ),
            received_bytes: registry.counter(
                "warmroute_kv_zmq_received_bytes_total",
                "Bytes of batches of cache events, replayed ones included.",
            ),
            questions: registry.counters(
                "warmroute_kv_zmq_replays_total",
                "Questions for earlier batches, by what came of them.",
                &["outcome"],
            ),
        }
    }
}

/// Where one engine rank publishes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pub endpoint: Endpoint,
    /// What topics must begin with; empty for all.
    pub topic: String,
    /// Where earlier batches can be asked for, if the engine keeps them.
    pub replay: Option<Endpoint>,
}

/// A source over ZeroMQ. While nobody waits in `next`, nothing is read and nothing connects.
pub struct Zmq {
    target: Target,
    settings: Settings,
    metrics: Metrics,
    link: Link,
    question: Option<Question>,
    /// Attempts and short connections in a row.
    failures: u32,
    /// Why there is no connection, as it was last said.
    trouble: Option<String>,
}

type Future<T> = Pin<Box<dyn std::future::Future<Output = T> + Send>>;

enum Link {
    Waiting { until: Instant },
    Dialling(Future<Result<(Connection, Option<Parts>), End>>),
    Up(Box<Up>),
}

struct Up {
    connection: Connection,
    since: Instant,
    /// A message that came before the handshake was known to be done.
    early: Option<Parts>,
}

/// One connection for one question, so that an answer can only be the answer to it.
enum Question {
    Dialling(Future<Result<Connection, End>>),
    Answering(Box<Connection>),
}

impl Zmq {
    pub fn new(target: Target, settings: Settings, metrics: Metrics) -> Self {
        Self {
            target,
            settings,
            metrics,
            link: Link::Waiting {
                until: Instant::now(),
            },
            question: None,
            failures: 0,
            trouble: None,
        }
    }

    fn dial(&self) -> Link {
        let endpoint = self.target.endpoint.clone();
        let topic = Bytes::copy_from_slice(self.target.topic.as_bytes());
        let settings = self.settings.clone();
        Link::Dialling(Box::pin(async move {
            Connection::open(&endpoint, Role::Subscriber { topic }, &settings).await
        }))
    }

    fn connected(&mut self, connection: Connection, early: Option<Parts>) -> Said {
        self.metrics.connected.inc();
        self.trouble = None;
        self.link = Link::Up(Box::new(Up {
            connection,
            since: Instant::now(),
            early,
        }));
        Said::Connected { epoch: None }
    }

    /// Waits before the next attempt, and tells why the last one or its connection ended.
    fn ended(&mut self, end: &End) -> String {
        let now = Instant::now();
        let backoff_max = Duration::from_millis(self.settings.backoff_max_ms);
        if matches!(&self.link, Link::Up(up) if now.duration_since(up.since) > backoff_max) {
            self.failures = 0;
        }
        let doubled = self
            .settings
            .backoff_ms
            .saturating_mul(1 << self.failures.min(30));
        let backoff_ms = doubled.min(self.settings.backoff_max_ms);
        let drawn_ms = fastrand::u64(backoff_ms / 2..=backoff_ms);
        self.failures = self.failures.saturating_add(1);
        self.link = Link::Waiting {
            until: now + Duration::from_millis(drawn_ms),
        };
        self.question = None;
        self.metrics.ended.with_label_values(&[end.reason()]).inc();
        end.to_string()
    }

    fn heard(&mut self, heard: Result<Parts, End>) -> Said {
        let frame = heard.and_then(|parts| {
            frame::live(&parts).map_err(|what| End::Fault(Fault::Protocol(what)))
        });
        match frame {
            Ok(frame) => {
                self.metrics.received_bytes.inc_by(frame.bytes as u64);
                Said::Live(frame)
            }
            Err(end) => Said::Lost {
                why: self.ended(&end),
            },
        }
    }

    fn answered(&mut self, answer: Result<Answer, String>) -> Said {
        let (said, outcome) = match answer {
            Ok(Answer::Batch(frame)) => {
                self.metrics.received_bytes.inc_by(frame.bytes as u64);
                return Said::Replayed(frame);
            }
            Ok(Answer::End) => (Said::ReplayEnd, "answered"),
            Err(why) => (Said::ReplayFailed { why }, "failed"),
        };
        self.question = None;
        self.metrics.questions.with_label_values(&[outcome]).inc();
        said
    }
}

impl Source for Zmq {
    async fn next(&mut self) -> Said {
        loop {
            match &mut self.link {
                Link::Waiting { until } => {
                    sleep_until(*until).await;
                    self.link = self.dial();
                }
                Link::Dialling(dial) => match dial.await {
                    Ok((connection, early)) => return self.connected(connection, early),
                    Err(end) => {
                        let why = self.ended(&end);
                        // Each attempt fails in the same way mostly, which is worth one word.
                        if self.trouble.as_ref() != Some(&why) {
                            self.trouble = Some(why.clone());
                            return Said::Lost { why };
                        }
                    }
                },
                Link::Up(up) => {
                    if let Some(parts) = up.early.take() {
                        return self.heard(Ok(parts));
                    }
                    // In this order: an answer is never told past the end of the process that was
                    // asked, if that has been seen here.
                    tokio::select! {
                        biased;
                        heard = up.connection.message() => return self.heard(heard),
                        answer = answer(&mut self.question) => return self.answered(answer),
                    }
                }
            }
        }
    }

    /// Without a connection there is nothing to ask: its end was said, or its start will be.
    fn replay(&mut self, first: u64) {
        let (Some(endpoint), Link::Up(_)) = (self.target.replay.clone(), &self.link) else {
            return;
        };
        if self.question.is_some() {
            self.metrics
                .questions
                .with_label_values(&["replaced"])
                .inc();
        }
        let settings = self.settings.clone();
        self.question = Some(Question::Dialling(Box::pin(async move {
            let (mut connection, _) = Connection::open(&endpoint, Role::Dealer, &settings).await?;
            connection.send(&[b"", &frame::question(first)]);
            Ok(connection)
        })));
    }

    fn can_replay(&self) -> bool {
        self.target.replay.is_some()
    }
}

/// The next message of an answer; waits for ever where nothing was asked.
async fn answer(question: &mut Option<Question>) -> Result<Answer, String> {
    loop {
        match question {
            None => std::future::pending().await,
            Some(Question::Dialling(dial)) => {
                let connection = dial.await.map_err(|end| end.to_string())?;
                *question = Some(Question::Answering(Box::new(connection)));
            }
            Some(Question::Answering(connection)) => {
                let parts = connection.message().await.map_err(|end| end.to_string())?;
                return frame::answer(&parts);
            }
        }
    }
}

impl fmt::Debug for Zmq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let up = matches!(self.link, Link::Up(_));
        f.debug_struct("Zmq")
            .field("target", &self.target)
            .field("up", &up)
            .field("asked", &self.question.is_some())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
