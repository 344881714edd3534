//! A source over gRPC: `SubscribeKvEvents`, as the servicers of several engines and our own bridge serve
//! it.
//!
//! A source has a connection of its own and a call for its one rank. Numbers are a rank's, and the call
//! has one number to start from: one call for all ranks could not be continued exactly. Servers that do
//! not know of [`RANK_METADATA`] send all ranks' batches; those of others are dropped.
//!
//! To ask again is to call again, on the same connection, so that the answer comes from whoever said
//! the rest. A number can only be asked for as "what comes strictly after the one before it", and 0
//! stands for the current state, so a rank's batches 0 and 1 cannot be asked for by number.

mod codec;
mod link;
mod metrics;
mod up;

use std::collections::VecDeque;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::time::Sleep;
use tonic::{Code, Status};

use self::link::{Call, Link, Target, is_history_gone};
pub use self::metrics::Metrics;
use self::up::{Heard, Up, explain};
use super::event::Load;
use super::protobuf::{self, Message, Service};
use super::source::{Frame, Said, Source};

/// In the answer's head: names the engine's process. Only our own bridge sends it.
pub const EPOCH_METADATA: &str = "x-warmroute-epoch";
/// In the answer's head: the rank's last number as of then. An answer goes that far, and what comes
/// after it is live. Only our own bridge sends it.
pub const LAST_METADATA: &str = "x-warmroute-last";
/// In the question's head: the only rank that is wanted. Only our own bridge heeds it.
pub const RANK_METADATA: &str = "x-warmroute-rank";

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// Whose servicer is asked.
    pub service: Servicer,
    pub connect_timeout_ms: u64,
    /// Before the second try to connect; doubled each time, and a random part of it is left out.
    pub backoff_ms: u64,
    pub backoff_max_ms: u64,
    /// Before another try when the other side cannot serve this at all.
    pub refused_backoff_ms: u64,
    /// How long the other side's host may be silent before it is asked whether it lives.
    pub keepalive_ms: u64,
    /// The same question at the level of HTTP/2, which finds a process that hangs.
    pub ping_ms: u64,
    /// A larger message ends the connection.
    pub message_bytes_max: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            service: Servicer::Auto,
            connect_timeout_ms: 2_000,
            backoff_ms: 100,
            // A restarted engine takes longer than that to load its model.
            backoff_max_ms: 5_000,
            // What an engine sends in its events changes with its version, not from second to second.
            refused_backoff_ms: 60_000,
            keepalive_ms: 20_000,
            // gRPC's servers in C and Python close connections that ping more often than every five
            // minutes while they have nothing to say.
            ping_ms: 310_000,
            // A snapshot's chunk of 100,000 blocks of 16 tokens is 10 MB.
            message_bytes_max: 64 << 20,
        }
    }
}

/// Which of the services to ask; `auto` asks one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Servicer {
    Auto,
    Vllm,
    Sglang,
    TokenSpeed,
    TensorrtLlm,
}

impl Servicer {
    fn choice(self) -> &'static [Service] {
        match self {
            Self::Auto => &Service::ALL,
            Self::Vllm => &[Service::Vllm],
            Self::Sglang => &[Service::Sglang],
            Self::TokenSpeed => &[Service::TokenSpeed],
            Self::TensorrtLlm => &[Service::TensorrtLlm],
        }
    }
}

/// One rank's events over gRPC.
pub struct Grpc {
    target: Target,
    state: State,
    /// Said, and not yet fetched.
    said: VecDeque<Said>,
    /// The number to start after, for a question that was not sent yet.
    asked: Option<u64>,
    /// A question has no answer yet.
    is_asking: bool,
    metrics: Metrics,
    /// The number of the last frame, whatever connection it came over.
    last: Option<u64>,
    /// Tries to connect since a message came.
    failures: u32,
    service: Option<Service>,
    /// No, once the other side could not even repeat what it had just said.
    keeps_history: bool,
    /// Why there is no connection, as last said.
    trouble: Option<String>,
    on_load: Option<OnLoad>,
}

type OnLoad = Box<dyn FnMut(Load) + Send>;
type Doing<T> = Pin<Box<dyn Future<Output = Result<T, Status>> + Send>>;

enum State {
    Waiting(Pin<Box<Sleep>>),
    Connecting(Doing<(Link, Call)>),
    Up(Box<Up>),
}

impl Grpc {
    /// Subscribes to a rank's events at `address`, a `HOST:PORT`.
    pub fn new(address: &str, rank: u32, settings: Settings, metrics: Metrics) -> Self {
        let target = Target {
            address: address.to_owned(),
            rank,
            settings,
        };
        Self {
            state: connecting(&target, None, None),
            target,
            said: VecDeque::new(),
            asked: None,
            is_asking: false,
            metrics,
            last: None,
            failures: 0,
            service: None,
            keeps_history: true,
            trouble: None,
            on_load: None,
        }
    }

    /// Calls `hook` with each report of load that comes along with this rank's events.
    #[must_use]
    pub fn with_load(mut self, hook: impl FnMut(Load) + Send + 'static) -> Self {
        self.on_load = Some(Box::new(hook));
        self
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Said> {
        loop {
            if let Some(said) = self.said.pop_front() {
                self.count(&said);
                return Poll::Ready(said);
            }
            match &mut self.state {
                State::Waiting(sleep) => {
                    std::task::ready!(sleep.as_mut().poll(cx));
                    self.state = connecting(&self.target, self.service, self.last);
                }
                State::Connecting(doing) => match std::task::ready!(doing.as_mut().poll(cx)) {
                    Ok((link, call)) => self.connected(link, call),
                    Err(status) => self.lost(&status),
                },
                State::Up(up) => {
                    if let Some(start) = self.asked.take() {
                        up.ask(start);
                    }
                    let polled = up.poll(cx);
                    match std::task::ready!(polled) {
                        Ok(Heard::Message(bytes)) => self.heard(&bytes),
                        Ok(Heard::Refused(why)) => {
                            self.said.push_back(Said::ReplayFailed { why });
                        }
                        Ok(Heard::NoHistory(why)) => {
                            // It is asked at each silence, and each answer that fails costs all that
                            // is known. Whoever follows learns at a new connection that it need not.
                            self.keeps_history = false;
                            self.said.push_back(Said::ReplayFailed { why });
                            self.lost(&Status::unavailable("the server keeps no history"));
                        }
                        Ok(Heard::Nothing) => {}
                        Err(status) => self.lost(&status),
                    }
                }
            }
        }
    }

    fn count(&mut self, said: &Said) {
        let outcome = match said {
            Said::ReplayEnd => "answered",
            Said::ReplayFailed { .. } => "failed",
            _ => return,
        };
        self.is_asking = false;
        self.metrics.asked(outcome);
    }

    fn connected(&mut self, link: Link, call: Call) {
        self.metrics.connected.inc();
        self.service = Some(call.service);
        self.trouble = None;
        let up = Box::new(Up::new(link, call));
        let epoch = up.epoch.clone();
        self.keeps_history |= epoch.is_some();
        self.said.push_back(Said::Connected { epoch });
        self.state = State::Up(up);
    }

    fn lost(&mut self, status: &Status) {
        let settings = &self.target.settings;
        // A server that says so will say it again of the number that was asked for.
        if is_history_gone(status) {
            self.last = None;
        }
        let wait = match status.code() {
            Code::FailedPrecondition | Code::Unimplemented | Code::InvalidArgument => {
                settings.refused_backoff_ms
            }
            _ => settings
                .backoff_ms
                .saturating_mul(1 << self.failures.min(16))
                .min(settings.backoff_max_ms),
        };
        self.failures = self.failures.saturating_add(1);
        // Half of it at least, so that a fleet's routers do not come back in one moment.
        let wait = wait / 2 + fastrand::u64(0..=wait.div_ceil(2));
        self.asked = None;
        self.is_asking = false;
        self.metrics.ended(status);
        self.state = State::Waiting(Box::pin(tokio::time::sleep(Duration::from_millis(wait))));
        // Each attempt fails in the same way mostly, which is worth one word.
        let why = explain(status);
        if self.trouble.as_ref() != Some(&why) {
            self.trouble = Some(why.clone());
            self.said.push_back(Said::Lost { why });
        }
    }

    fn heard(&mut self, bytes: &Bytes) {
        self.metrics.received_bytes.inc_by(bytes.len() as u64);
        let message = match protobuf::decode_batch(bytes) {
            Ok(message) => message,
            // Not even its number is known, so nothing after it could be believed.
            Err(error) => return self.lost(&Status::invalid_argument(error.0)),
        };
        self.failures = 0;
        if message.batch.rank.unwrap_or(0) != self.target.rank {
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
        let frame = Frame {
            sequence,
            digest: protobuf::digest(bytes),
            bytes: bytes.len(),
            batch: Ok(batch),
            snapshot,
        };
        self.keeps_history |= snapshot.is_some();
        if let State::Up(up) = &mut self.state {
            up.say(frame, &mut self.said);
        }
    }
}

/// Where a source was when its connection ended, it is likely asked to start again: the number that it
/// said last is the one that must be proved. So it calls for that at once, and is right mostly.
fn connecting(target: &Target, service: Option<Service>, last: Option<u64>) -> State {
    let start = last.map_or(0, start_for);
    State::Connecting(Box::pin(Link::open(target.clone(), service, start)))
}

/// The number after which `first` comes.
fn start_for(first: u64) -> u64 {
    first.saturating_sub(1)
}

impl Source for Grpc {
    async fn next(&mut self) -> Said {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    fn replay(&mut self, first: u64) {
        // Outside a connection there is nobody to ask, and what is lost was said.
        if matches!(self.state, State::Up(_)) {
            self.asked = Some(start_for(first));
            if std::mem::replace(&mut self.is_asking, true) {
                self.metrics.asked("replaced");
            }
            // The end of an answer that this question takes the place of would pass for its own.
            self.said.retain(|said| {
                matches!(
                    said,
                    Said::Connected { .. } | Said::Live(_) | Said::Lost { .. }
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
