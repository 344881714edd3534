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

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::Context;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use serde::Deserialize;
use serde::Serialize;
use tokio::time::Sleep;
use tonic::Code;
use tonic::Status;

use self::link::Call;
use self::link::Link;
use self::link::Target;
use self::link::is_history_gone;
use super::event::Load;
use super::protobuf;
use super::protobuf::Message;
use super::protobuf::Service;
use super::source::Frame;
use super::source::Said;
use super::source::Source;

/// In the answer's head: names the engine's process. Only our own bridge sends it.
pub const EPOCH_METADATA: &str = "x-warmroute-epoch";
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

/// A connection that stands.
struct Up {
    /// `None` while the first call on the way to another answer has failed.
    call: Option<Call>,
    /// The call that is to take its place, what for, and where it starts.
    next: Option<(Doing<Call>, Purpose, u64)>,
    epoch: Option<String>,
    /// Whether `call` has said a frame.
    has_spoken: bool,
    /// While `call`'s frames are the answer to a question: how far that goes.
    answering: Option<Until>,
    /// The highest number said over this connection.
    highest: u64,
    /// It sends no snapshots and no epochs.
    is_plain: bool,
    link: Link,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// Someone asked for it.
    Answer,
    /// Someone asked in vain, and what is published now has to come from somewhere.
    GoOn,
}

/// Where an answer ends and what is live begins. It is all one stream; what matters is that the one
/// who asked has what they missed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Until {
    /// With the first batch, or the last chunk of a snapshot.
    First,
    /// With this number, which was already said.
    Number(u64),
}

impl Grpc {
    /// Subscribes to a rank's events at `address`, a `HOST:PORT`.
    pub fn new(address: &str, rank: u32, settings: Settings) -> Self {
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

    fn connected(&mut self, link: Link, call: Call) {
        self.service = Some(call.service);
        self.trouble = None;
        let epoch = call.epoch.clone();
        self.keeps_history |= epoch.is_some();
        self.said.push_back(Said::Connected {
            epoch: epoch.clone(),
        });
        self.state = State::Up(Box::new(Up {
            call: Some(call),
            next: None,
            epoch,
            has_spoken: false,
            answering: None,
            highest: 0,
            is_plain: true,
            link,
        }));
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
        self.state = State::Waiting(Box::pin(tokio::time::sleep(Duration::from_millis(wait))));
        // Each attempt fails in the same way mostly, which is worth one word.
        let why = explain(status);
        if self.trouble.as_ref() != Some(&why) {
            self.trouble = Some(why.clone());
            self.said.push_back(Said::Lost { why });
        }
    }

    fn heard(&mut self, bytes: &Bytes) {
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
        let State::Up(up) = &mut self.state else {
            return;
        };
        up.has_spoken = true;
        up.highest = up.highest.max(sequence);
        up.is_plain &= snapshot.is_none() && up.epoch.is_none();
        self.keeps_history |= snapshot.is_some();
        let Some(until) = up.answering else {
            self.said.push_back(Said::Live(frame));
            return;
        };
        let is_last = match (snapshot, until) {
            (Some(chunk), _) => chunk.index.saturating_add(1) >= chunk.count,
            (None, Until::First) => true,
            (None, Until::Number(number)) => sequence >= number,
        };
        self.said.push_back(Said::Replayed(frame));
        if is_last {
            up.answering = None;
            self.said.push_back(Said::ReplayEnd);
        }
    }
}

enum Heard {
    Message(Bytes),
    /// A question has no answer.
    Refused(String),
    /// A question has no answer, and none ever will.
    NoHistory(String),
    /// Something changed that is nobody's business.
    Nothing,
}

impl Up {
    fn ask(&mut self, start: u64) {
        let fits = |call: &Call| call.start == start;
        if self.next.is_none() && !self.has_spoken && self.call.as_ref().is_some_and(fits) {
            // It begins where the answer does, and nothing of it was given away yet.
            self.answering = Some(self.until(start));
        } else if let Some((_, purpose, _)) = &mut self.next
            && *purpose == Purpose::GoOn
            && start == 0
        {
            // On its way already.
            *purpose = Purpose::Answer;
        } else {
            self.answering = None;
            let doing = Box::pin(self.link.subscribe(start));
            self.next = Some((doing, Purpose::Answer, start));
        }
    }

    fn until(&self, start: u64) -> Until {
        match start {
            0 => Until::First,
            _ if self.highest > start => Until::Number(self.highest),
            _ => Until::First,
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Heard, Status>> {
        // What is live may wait for the answer: it is in it.
        if let Some((doing, purpose, start)) = &mut self.next {
            let (purpose, start) = (*purpose, *start);
            let opened = std::task::ready!(doing.as_mut().poll(cx));
            self.next = None;
            return Poll::Ready(match opened {
                Ok(call) if call.epoch != self.epoch => {
                    Err(Status::aborted("another process answers now"))
                }
                Ok(call) => {
                    let is_answer = purpose == Purpose::Answer;
                    self.answering = is_answer.then(|| self.until(call.start));
                    self.call = Some(call);
                    self.has_spoken = false;
                    Ok(Heard::Nothing)
                }
                Err(status) if purpose == Purpose::Answer && is_history_gone(&status) => {
                    if self.call.is_none() {
                        self.go_on();
                    }
                    Ok(self.refused(start, &status))
                }
                Err(status) => Err(status),
            });
        }
        let Some(call) = &mut self.call else {
            self.go_on();
            return Poll::Ready(Ok(Heard::Nothing));
        };
        let start = call.start;
        let polled = std::task::ready!(poll_message(call, cx));
        Poll::Ready(match polled {
            Ok(Some(bytes)) => Ok(Heard::Message(bytes)),
            Ok(None) => Err(Status::unavailable("the server ended the call")),
            // As refused as when the call had not been taken: nothing of this answer was said.
            Err(status) if start != 0 && !self.has_spoken && is_history_gone(&status) => {
                let was_asked = self.answering.take().is_some();
                self.go_on();
                Ok(if was_asked {
                    self.refused(start, &status)
                } else {
                    Heard::Nothing
                })
            }
            Err(status) => Err(status),
        })
    }

    fn go_on(&mut self) {
        self.call = None;
        let doing = Box::pin(self.link.subscribe(0));
        self.next = Some((doing, Purpose::GoOn, 0));
    }

    /// A question for what comes after `start` was refused.
    fn refused(&self, start: u64, status: &Status) -> Heard {
        let was_just_said = self.highest > 0 && start + 1 >= self.highest;
        if self.is_plain && was_just_said {
            Heard::NoHistory(explain(status))
        } else {
            Heard::Refused(explain(status))
        }
    }
}

fn poll_message(call: &mut Call, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Status>> {
    let messages = &mut call.messages;
    // Nothing is lost when this future is dropped: it holds nothing but the reference.
    let message = std::pin::pin!(messages.message());
    message.poll(cx)
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

fn explain(status: &Status) -> String {
    let why = match status.message() {
        "" => status.code().description().to_owned(),
        message => format!("{:?}: {message}", status.code()),
    };
    match std::error::Error::source(status) {
        Some(cause) if !why.contains(&cause.to_string()) => {
            format!("{why}: {}", link::chain(cause))
        }
        _ => why,
    }
}

impl Source for Grpc {
    async fn next(&mut self) -> Said {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    fn replay(&mut self, first: u64) {
        // Outside a connection there is nobody to ask, and what is lost was said.
        if matches!(self.state, State::Up(_)) {
            self.asked = Some(start_for(first));
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
mod tests;
