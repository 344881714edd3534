//! KV events over gRPC: `SubscribeKvEvents`, as served by several engines and by `warmroute bridge`.
//!
//! Each source has its own connection and a call for its one rank. Each rank counts its own sequence
//! numbers and a call has one start number, so a call for all ranks could not be resumed exactly. Servers
//! that ignore [`RANK_METADATA`] send the batches of all ranks; other ranks' are dropped.
//!
//! A replay is a new call on the same connection, so that it comes from the same process. A call starts
//! strictly after a given number, and 0 means the current state, so a rank's batches 0 and 1 cannot be
//! requested by number.

mod connection;
mod metrics;
mod session;
mod settings;

use std::collections::VecDeque;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::time::Sleep;
use tonic::{Code, Status};

use self::connection::{Call, Connection, PendingCall, Target, is_history_gone};
pub use self::connection::{INCARNATION_METADATA, LAST_SEQUENCE_METADATA, RANK_METADATA};
pub use self::metrics::Metrics;
use self::session::{Session, SessionEvent, explain};
pub use self::settings::Settings;
use super::event::Load;
use super::protobuf::{self, Message, Service};
use super::reconnects::{Reconnects, jittered};
use super::source::{Source, SourceBatch, SourceEvent};
use crate::http::tls;

/// One rank's events over gRPC.
pub struct Grpc {
    target: Target,
    state: State,
    /// Events not returned yet.
    events: VecDeque<SourceEvent>,
    /// The start number of a replay that was requested but not sent yet.
    pending_replay: Option<u64>,
    is_replaying: bool,
    metrics: Metrics,
    /// Sequence number of the last batch, across connections.
    last: Option<u64>,
    reconnects: Reconnects,
    service: Option<Service>,
    /// False once the server could not even replay the batch it had just sent.
    keeps_history: bool,
    is_only_rank: bool,
    /// What the batches of this connection call the worker's only rank.
    named_rank: Option<u32>,
    on_load: Option<OnLoad>,
}

type OnLoad = Box<dyn FnMut(Load) + Send>;

enum State {
    Waiting(Pin<Box<Sleep>>),
    Connecting(PendingCall<(Connection, Call)>),
    Session(Box<Session>),
}

impl Grpc {
    /// Subscribes to a rank's events at `address`, a `HOST:PORT`.
    pub fn new(address: &str, rank: u32, settings: Settings, metrics: Metrics) -> Self {
        let target = Target {
            address: address.to_owned(),
            rank,
            settings,
            tls: None,
        };
        Self {
            state: connecting(&target, None, None),
            target,
            events: VecDeque::new(),
            pending_replay: None,
            is_replaying: false,
            metrics,
            last: None,
            reconnects: Reconnects::default(),
            service: None,
            keeps_history: true,
            is_only_rank: false,
            named_rank: None,
            on_load: None,
        }
    }

    /// Connects over TLS, if there is any.
    #[must_use]
    pub fn with_tls(mut self, tls: Option<Arc<tls::Client>>) -> Self {
        self.target.tls = tls;
        self.state = connecting(&self.target, None, None);
        self
    }

    /// Says whether the worker has no other rank. A process with one rank may call itself any rank of a larger group, but
    /// always the same.
    #[must_use]
    pub fn with_only_rank(self, is_only_rank: bool) -> Self {
        Self {
            is_only_rank,
            ..self
        }
    }

    /// Calls `hook` with each load report of this rank.
    #[must_use]
    pub fn with_load(mut self, hook: impl FnMut(Load) + Send + 'static) -> Self {
        self.on_load = Some(Box::new(hook));
        self
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<SourceEvent> {
        loop {
            if let Some(event) = self.events.pop_front() {
                self.count(&event);
                return Poll::Ready(event);
            }
            match &mut self.state {
                State::Waiting(sleep) => {
                    std::task::ready!(sleep.as_mut().poll(cx));
                    self.state = connecting(&self.target, self.service, self.last);
                }
                State::Connecting(pending) => match std::task::ready!(pending.as_mut().poll(cx)) {
                    Ok((connection, call)) => self.on_connected(connection, call),
                    Err(status) => self.on_disconnected(&status),
                },
                State::Session(session) => {
                    if let Some(start) = self.pending_replay.take() {
                        session.request_replay(start);
                    }
                    let polled = session.poll(cx);
                    match std::task::ready!(polled) {
                        Ok(SessionEvent::Message(bytes)) => self.on_message(&bytes),
                        Ok(SessionEvent::Refused(reason)) => {
                            self.events.push_back(SourceEvent::ReplayFailed { reason });
                        }
                        Ok(SessionEvent::NoHistory(reason)) => {
                            // Each failed verification clears the tree, and an idle engine is verified
                            // often. Reconnecting reports that this source cannot replay.
                            self.keeps_history = false;
                            self.events.push_back(SourceEvent::ReplayFailed { reason });
                            self.on_disconnected(&Status::unavailable(
                                "the server keeps no history",
                            ));
                        }
                        Ok(SessionEvent::Nothing) => {}
                        Err(status) => self.on_disconnected(&status),
                    }
                }
            }
        }
    }

    fn count(&mut self, event: &SourceEvent) {
        let outcome = match event {
            SourceEvent::ReplayEnd => "completed",
            SourceEvent::ReplayFailed { .. } => "failed",
            _ => return,
        };
        self.is_replaying = false;
        self.metrics.replay_ended(outcome);
    }

    fn on_connected(&mut self, connection: Connection, call: Call) {
        self.metrics.connections.inc();
        self.reconnects.on_connected(tokio::time::Instant::now());
        self.service = Some(call.service);
        // It may be another process.
        self.named_rank = None;
        let session = Box::new(Session::new(connection, call));
        let incarnation = session.incarnation.clone();
        self.keeps_history |= incarnation.is_some();
        self.events
            .push_back(SourceEvent::Connected { incarnation });
        self.state = State::Session(session);
    }

    fn on_disconnected(&mut self, status: &Status) {
        let settings = &self.target.settings;
        let (backoff, max_backoff) = (settings.backoff, settings.max_backoff);
        let doubled = self
            .reconnects
            .on_closed(tokio::time::Instant::now(), backoff, max_backoff);
        // The server would refuse the same number again.
        if is_history_gone(status) {
            self.last = None;
        }
        let wait = match status.code() {
            Code::FailedPrecondition | Code::Unimplemented | Code::InvalidArgument => {
                settings.refused_backoff
            }
            _ => doubled,
        };
        self.pending_replay = None;
        self.is_replaying = false;
        self.metrics.disconnected(status);
        self.state = State::Waiting(Box::pin(tokio::time::sleep(jittered(
            wait,
            fastrand::f64(),
        ))));
        let reason = explain(status);
        if self.reconnects.is_new(&reason) {
            self.events.push_back(SourceEvent::Disconnected { reason });
        }
    }

    /// Whether a batch that names this rank is one of those that are followed.
    fn is_followed(&mut self, named: Option<u32>) -> bool {
        if !self.is_only_rank {
            return named.unwrap_or(0) == self.target.rank;
        }
        named.is_none_or(|named| *self.named_rank.get_or_insert(named) == named)
    }

    fn on_message(&mut self, bytes: &Bytes) {
        self.metrics.received_bytes.inc_by(bytes.len() as u64);
        let message = match protobuf::decode_batch(bytes) {
            Ok(message) => message,
            // Without its sequence number, no later batch can be placed.
            Err(error) => return self.on_disconnected(&Status::invalid_argument(error.0)),
        };
        if !self.is_followed(message.batch.rank) {
            return;
        }
        let Message {
            sequence,
            batch,
            snapshot,
            load,
            is_load_only,
        } = message;
        if let (Some(load), Some(hook)) = (load, &mut self.on_load) {
            hook(load);
        }
        if is_load_only {
            return;
        }
        self.last = Some(sequence);
        let batch = SourceBatch {
            sequence,
            digest: protobuf::digest(bytes),
            bytes: bytes.len(),
            batch: Ok(batch),
            snapshot,
        };
        self.keeps_history |= snapshot.is_some();
        if let State::Session(session) = &mut self.state {
            session.deliver(batch, &mut self.events);
        }
    }
}

/// Connects and subscribes from the last received batch, since the stream will most likely request that
/// batch to verify the process.
fn connecting(target: &Target, service: Option<Service>, last: Option<u64>) -> State {
    let start = last.map_or(0, start_for);
    State::Connecting(Box::pin(Connection::open(target.clone(), service, start)))
}

/// The start number of a call whose first batch is `first`.
fn start_for(first: u64) -> u64 {
    first.saturating_sub(1)
}

impl Source for Grpc {
    async fn next(&mut self) -> SourceEvent {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    fn replay(&mut self, first: u64) {
        // While disconnected there is nothing to request: the disconnect has been reported.
        if matches!(self.state, State::Session(_)) {
            self.pending_replay = Some(start_for(first));
            if std::mem::replace(&mut self.is_replaying, true) {
                self.metrics.replay_ended("replaced");
            }
            // The end of the replaced replay would pass for the end of the new one.
            self.events.retain(|event| {
                matches!(
                    event,
                    SourceEvent::Connected { .. }
                        | SourceEvent::Live(_)
                        | SourceEvent::Disconnected { .. }
                )
            });
        }
    }

    fn can_replay(&self) -> bool {
        self.keeps_history
    }
}

impl fmt::Debug for Grpc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grpc")
            .field("target", &self.target)
            .field("last", &self.last)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
pub(crate) mod tests;
