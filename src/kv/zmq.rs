//! KV events over ZeroMQ, as vLLM publishes them: one connection for the subscription, and one more for
//! each replay request. Transport only; see [`super::source`].
//!
//! **Why ZMTP is implemented here instead of using a crate.** A source must report the end of a
//! connection in order with its messages, and must never mix messages of two processes; both need a
//! connection object that does not reconnect. Fault tests against libzmq 4.3.5 publishers (killed,
//! stopped, flooding, replaced by other servers) gave, in November 2026:
//! - `zeromq` 0.7.0 (pure Rust, 104 crates, the most used): reports an end only on a side channel and
//!   always reconnects by itself; without heartbeat and keepalive a stopped or unreachable publisher goes
//!   unnoticed; frames are unbounded, so nine bytes that announce 16 TiB abort the whole process.
//! - `omq-tokio` 0.33.0 (pure Rust, 116 crates): has heartbeats and a message bound, and reconnecting can be
//!   turned off; but then `recv` hangs after the end, which is reported on a side channel ahead of messages
//!   received before it, refused connections are not reported, and 113 MB were queued for a slow reader
//!   despite a bound of 8 MiB. A breaking release every week or two.
//! - `zmq` (libzmq): needs a C++ compiler to build.
//!
//! A client needs little of ZMTP 3; it fits in one pure file ([`zmtp`]). The simulated engine uses `zeromq`
//! for the server side, where its peers are trusted.
//!
//! **Bounds.** Nothing is queued here: unread messages stay in the kernel's buffers and then with the
//! engine, which drops beyond its high-water mark. That shows as a gap in the sequence numbers, and gaps
//! are replayed. A message above the size limit ends the connection.
//!
//! **Joining.** `Connected` is reported once the engine has read the subscription: it has answered a ping
//! sent after it (peers of ZMTP 3.0 cannot be pinged). libzmq applies the subscription when it publishes
//! next, up to about a millisecond later. If a batch is lost in between, the sequence numbers show it: in
//! the replay requested after `Connected`, which takes at least two round trips, or in the next batch.

mod connection;
mod endpoint;
pub mod frame;
mod gather;
mod load_socket;
mod metrics;
mod settings;
pub mod zmtp;

use std::fmt;
use std::pin::Pin;

use bytes::Bytes;
use tokio::time::{Instant, sleep_until};

use self::connection::{CloseReason, Connection};
pub use self::endpoint::Endpoint;
use self::frame::ReplayMessage;
pub use self::gather::before_park;
pub use self::load_socket::LoadSocket;
pub use self::metrics::Metrics;
pub use self::settings::Settings;
use self::zmtp::{Parts, ProtocolError, Role};
use super::reconnects::{Reconnects, jittered};
use super::source::{Source, SourceEvent};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pub endpoint: Endpoint,
    /// Subscribe to topics with this prefix; empty for all.
    pub topic: String,
    /// Where the engine answers replay requests, if it keeps a history.
    pub replay: Option<Endpoint>,
}

/// A source over ZeroMQ. It reads and connects only while `next` is polled.
pub struct Zmq {
    target: Target,
    settings: Settings,
    metrics: Metrics,
    state: State,
    replay: Option<Replay>,
    reconnects: Reconnects,
}

type Future<T> = Pin<Box<dyn std::future::Future<Output = T> + Send>>;

enum State {
    Waiting { until: Instant },
    Connecting(Future<Result<(Connection, Option<Parts>), CloseReason>>),
    Connected(Box<Subscription>),
}

struct Subscription {
    connection: Connection,
    /// A message that arrived during the handshake.
    early: Option<Parts>,
}

/// A connection of its own for each replay request, so that a response cannot belong to another request.
enum Replay {
    Connecting(Future<Result<Connection, CloseReason>>),
    Receiving(Box<Connection>),
}

impl Zmq {
    pub fn new(target: Target, settings: Settings, metrics: Metrics) -> Self {
        Self {
            target,
            settings,
            metrics,
            state: State::Waiting {
                until: Instant::now(),
            },
            replay: None,
            reconnects: Reconnects::default(),
        }
    }

    fn connect(&self) -> State {
        let endpoint = self.target.endpoint.clone();
        let topic = Bytes::copy_from_slice(self.target.topic.as_bytes());
        let settings = self.settings.clone();
        State::Connecting(Box::pin(async move {
            Connection::open(&endpoint, Role::Subscriber { topic }, &settings).await
        }))
    }

    fn on_connected(&mut self, connection: Connection, early: Option<Parts>) -> SourceEvent {
        self.metrics.connections.inc();
        self.reconnects.on_connected(Instant::now());
        self.state = State::Connected(Box::new(Subscription { connection, early }));
        SourceEvent::Connected { incarnation: None }
    }

    /// Schedules the next attempt, and returns the reason as text.
    fn on_closed(&mut self, closed: &CloseReason) -> String {
        let (backoff, max_backoff) = (self.settings.backoff, self.settings.max_backoff);
        let now = Instant::now();
        let wait = self.reconnects.on_closed(now, backoff, max_backoff);
        self.state = State::Waiting {
            until: now + jittered(wait, fastrand::f64()),
        };
        self.replay = None;
        self.metrics.disconnected(closed.label());
        closed.to_string()
    }

    fn on_message(&mut self, received: Result<Parts, CloseReason>) -> SourceEvent {
        let batch = received.and_then(|parts| {
            frame::live(&parts)
                .map_err(|what| CloseReason::ProtocolError(ProtocolError::Invalid(what)))
        });
        match batch {
            Ok(batch) => {
                self.metrics.received_bytes.inc_by(batch.bytes as u64);
                SourceEvent::Live(batch)
            }
            Err(closed) => SourceEvent::Disconnected {
                reason: self.on_closed(&closed),
            },
        }
    }

    fn on_replay_message(&mut self, message: Result<ReplayMessage, String>) -> SourceEvent {
        let (event, outcome) = match message {
            Ok(ReplayMessage::Batch(batch)) => {
                self.metrics.received_bytes.inc_by(batch.bytes as u64);
                return SourceEvent::Replayed(batch);
            }
            Ok(ReplayMessage::End) => (SourceEvent::ReplayEnd, "completed"),
            Err(reason) => (SourceEvent::ReplayFailed { reason }, "failed"),
        };
        self.replay = None;
        self.metrics.replay_ended(outcome);
        event
    }
}

impl Source for Zmq {
    async fn next(&mut self) -> SourceEvent {
        loop {
            match &mut self.state {
                State::Waiting { until } => {
                    sleep_until(*until).await;
                    self.state = self.connect();
                }
                State::Connecting(connecting) => match connecting.await {
                    Ok((connection, early)) => return self.on_connected(connection, early),
                    Err(closed) => {
                        let reason = self.on_closed(&closed);
                        if self.reconnects.is_new(&reason) {
                            return SourceEvent::Disconnected { reason };
                        }
                    }
                },
                State::Connected(subscription) => {
                    if let Some(parts) = subscription.early.take() {
                        return self.on_message(Ok(parts));
                    }
                    // In this order: live batches must wait for the end of the replay, and those that are not
                    // read wait with the engine. Whether both are of one process is for the stream to find out.
                    tokio::select! {
                        biased;
                        message = next_replay_message(&mut self.replay) => {
                            return self.on_replay_message(message);
                        }
                        received = subscription.connection.message() => {
                            return self.on_message(received);
                        }
                    }
                }
            }
        }
    }

    /// Does nothing while disconnected: the disconnect has been reported, or a connect will be.
    fn replay(&mut self, first: u64) {
        let (Some(endpoint), State::Connected(_)) = (self.target.replay.clone(), &self.state)
        else {
            return;
        };
        if self.replay.is_some() {
            self.metrics.replay_ended("replaced");
        }
        let settings = self.settings.clone();
        self.replay = Some(Replay::Connecting(Box::pin(async move {
            let (mut connection, _) = Connection::open(&endpoint, Role::Dealer, &settings).await?;
            connection.send(&[b"", &first.to_be_bytes()]);
            Ok(connection)
        })));
    }

    fn can_replay(&self) -> bool {
        self.target.replay.is_some()
    }
}

/// The next message of a replay; pending for ever if none was requested.
async fn next_replay_message(replay: &mut Option<Replay>) -> Result<ReplayMessage, String> {
    loop {
        match replay {
            None => std::future::pending().await,
            Some(Replay::Connecting(connecting)) => {
                let connection = connecting.await.map_err(|closed| closed.to_string())?;
                *replay = Some(Replay::Receiving(Box::new(connection)));
            }
            Some(Replay::Receiving(connection)) => {
                let received = connection.message().await;
                let parts = received.map_err(|closed| closed.to_string())?;
                return frame::replay_message(&parts);
            }
        }
    }
}

impl fmt::Debug for Zmq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Zmq")
            .field("target", &self.target)
            .field("is_connected", &matches!(self.state, State::Connected(_)))
            .field("is_replaying", &self.replay.is_some())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
