//! The body of an answer to the client: bytes unchanged, streams in whole SSE events and always terminated.

mod continuing;
mod end_message;
mod limits;
mod source;
mod terminator;

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::Bytes;
use http_body::Frame;
use http_body_util::BodyExt;
use hyper::StatusCode;
use tokio::time::Sleep;
use tracing::info;

use self::continuing::Break;
pub(super) use self::continuing::Continuing;
use self::end_message::{CLOSED_EARLY, DRAINED, ENDED_EARLY, ENGINE_ERROR, TOO_LONG};
pub use self::end_message::{is_drained, is_engine_lost};
pub(super) use self::limits::Limits;
use self::limits::{Fired, Timer};
use self::source::{Read, Source};
use self::terminator::{Missing, StreamTerminator};
use super::answer::plain_events::PlainEvents;
use super::answer::token_count::Plain;
use super::answer::usage_rewriter::UsageRewriter;
use super::attempt::outcome::AttemptAnswer;
use super::continuation::End;
use super::failure::types::Outcome;
use super::meter::Meter;
use super::request::usage_option::{self, UnaskedUsage};
use crate::http::client::EngineBody;
use crate::http::sse::{Aligner, KEEP_ALIVE};
use crate::http::{self, BodyError};
use crate::ids::RequestId;
use crate::observe;
use crate::prompt::Api;

/// An incomplete event is buffered up to this size; a longer one passes in pieces.
const EVENT_BYTES_MAX: usize = 1 << 20;

/// Turns an engine's body into the client's.
#[expect(
    clippy::too_many_arguments,
    reason = "one caller; a struct would name them once more"
)]
pub(super) fn relay(
    engine: EngineBody,
    first: Option<Bytes>,
    timer: Pin<Box<Sleep>>,
    limits: Limits,
    api: Api,
    status: StatusCode,
    is_events: bool,
    is_converted: bool,
    has_begun: bool,
    meter: Meter,
    usage: Option<Box<UsageRewriter>>,
    unasked_usage: Option<UnaskedUsage>,
    continuing: Option<Box<Continuing>>,
    id: RequestId,
) -> http::Body {
    let ids_bytes = continuing
        .as_ref()
        .map_or(0, |continuing| continuing.ids_bytes_max());
    let events = is_events.then(|| Events {
        aligner: Aligner::new(EVENT_BYTES_MAX + ids_bytes),
        // An error that an engine answers as a stream is its own business.
        terminator: status.is_success().then(|| {
            let mut terminator = StreamTerminator::new(api);
            if is_converted {
                // Without a finish reason no response can be made of it.
                terminator.require_finish();
            }
            // What the reader of a stream that may go on leaves out begins no answer.
            terminator.has_begun = has_begun && continuing.is_none();
            terminator
        }),
        plain: PlainEvents::default(),
    });
    let now = observe::now();
    let relayed = Relayed {
        source: Source::new(engine, first),
        timer: Timer::new(limits, timer),
        last: now,
        sent: now,
        is_within_event: false,
        events,
        meter,
        usage,
        unasked_usage,
        continuing,
        id,
    };
    relayed.boxed_unsync()
}

struct Relayed {
    source: Source,
    timer: Timer,
    /// When the engine sent something last that is no comment.
    last: Instant,
    /// When the client was sent something last.
    sent: Instant,
    /// A long event has passed in part.
    is_within_event: bool,
    events: Option<Events>,
    meter: Meter,
    /// Corrects the usage of a disaggregated request's answer.
    usage: Option<Box<UsageRewriter>>,
    /// Leaves out the usage for which the router asked.
    unasked_usage: Option<UnaskedUsage>,
    /// Goes on on another worker, if that is configured.
    continuing: Option<Box<Continuing>>,
    id: RequestId,
}

struct Events {
    aligner: Aligner,
    terminator: Option<StreamTerminator>,
    plain: PlainEvents,
}

impl Relayed {
    /// Takes data from the engine; returns what the client gets of it, of a stream in whole events.
    fn on_data(&mut self, data: Bytes) -> Bytes {
        if data.is_empty() {
            // The end came alone.
            return data;
        }
        if self.events.is_none() || !is_comment(&data) {
            self.last = observe::now();
        }
        // Whole events: the usage may come in two pieces.
        let whole = match &mut self.events {
            Some(events) => events.aligner.push(data),
            None => data,
        };
        let corrected = self.correct(whole);
        let Some(continuing) = &mut self.continuing else {
            return self.passed(corrected);
        };
        let (events, end) = continuing.on_events(corrected);
        let passed = self.passed(events);
        match end {
            None => passed,
            Some(end) => join(passed, self.on_engine_end(end)),
        }
    }

    /// What the client gets of whole events.
    fn stripped(&self, events: Bytes) -> Bytes {
        match self.unasked_usage {
            Some(unasked) => usage_option::without_usage(events, unasked),
            None => events,
        }
    }

    /// Takes whole events, or data of another answer, and returns what the client gets. Metrics count them before a usage is
    /// left out that the client has not asked for.
    fn passed(&mut self, passed: Bytes) -> Bytes {
        if passed.is_empty() {
            return passed;
        }
        let Some(Events {
            terminator: Some(terminator),
            plain: plain_events,
            ..
        }) = &mut self.events
        else {
            self.meter.on_data(self.last, &passed, Plain::default());
            return self.stripped(passed);
        };
        let plain = plain_events.take(terminator.api, &passed);
        if plain.events > 0 {
            terminator.on_plain();
        }
        if plain.length == passed.len() {
            self.meter.on_data(self.last, &passed, plain);
            return passed;
        }
        let given_up = terminator.gives_up_at(&passed[plain.length..]);
        let given_up = given_up.map(|at| plain.length + at);
        let passed = match given_up {
            None => passed,
            Some(at) => passed.slice(..at),
        };
        terminator.on_passed(&passed.slice(plain.length..));
        if !passed.is_empty() {
            self.meter.on_data(self.last, &passed, plain);
        }
        let passed = self.stripped(passed);
        match given_up {
            None => passed,
            Some(_) => join(passed, self.on_engine_end(End::Torn)),
        }
    }

    /// The engine's answer is over although its connection is not. Returns what ends the stream, if no other worker is
    /// asked.
    fn on_engine_end(&mut self, end: End) -> Bytes {
        let error = match end {
            End::EngineError(error) => Some(error),
            End::Torn => None,
        };
        let broken = Break {
            outcome: Outcome::WorkerFailed,
            message: ENGINE_ERROR,
            error,
        };
        match self.start_next(broken) {
            Ok(()) => Bytes::new(),
            Err(broken) => {
                self.continuing = None;
                match broken.error {
                    // As without continuation: the stream goes on to its end.
                    Some(error) => self.passed(error),
                    None => self.lost(broken),
                }
            }
        }
    }

    /// Asks another worker to go on. An error if that must not be, or if the answer is complete.
    fn start_next(&mut self, broken: Break) -> Result<(), Break> {
        let terminator = self.terminator();
        let lacks_end = terminator.is_some_and(|terminator| !terminator.has_end);
        let is_over = matches!(
            broken.outcome,
            Outcome::RequestTimeout | Outcome::RouterFailed
        );
        let may_go_on = lacks_end && !is_over;
        let Some(continuing) = self.continuing.as_mut().filter(|_| may_go_on) else {
            return Err(broken);
        };
        let outcome = broken.outcome;
        continuing.start(self.meter.worker(), broken)?;
        self.source.close();
        if let Some(events) = &mut self.events {
            // An incomplete event is dropped.
            let _ = events.aligner.finish();
        }
        self.meter.on_lost(observe::now(), outcome);
        Ok(())
    }

    /// Another worker's answer takes the place of the one that broke off.
    fn on_next(&mut self, answer: Box<AttemptAnswer>) {
        let AttemptAnswer {
            answer,
            running,
            decision,
            attempts,
            ..
        } = *answer;
        self.meter.on_next(running, decision.reason, attempts);
        self.source = Source::new(answer.body, answer.first);
        self.timer.restart(answer.timer);
        self.last = observe::now();
    }

    /// What ends a stream that no worker goes on with.
    fn lost(&mut self, broken: Break) -> Bytes {
        self.continuing = None;
        let end = self.end_early(broken.outcome, broken.message);
        match broken.error {
            Some(error) if error.trim_ascii_end().ends_with(b"[DONE]") => error,
            Some(error) => join(error, Bytes::from_static(b"data: [DONE]\n\n")),
            None => end.unwrap_or_default(),
        }
    }

    /// What a client gets that has got nothing for long. `None` within an event, which a comment would tear.
    fn comment(&mut self) -> Option<Frame<Bytes>> {
        self.sent = observe::now();
        let comment = || Frame::data(Bytes::from_static(KEEP_ALIVE));
        (!self.is_within_event).then(comment)
    }

    /// The answer ends before its end. Returns what terminates it, if it is a stream of events.
    fn end_early(&mut self, outcome: Outcome, message: &str) -> Option<Bytes> {
        self.source.close();
        self.meter.on_end(observe::now(), outcome);
        info!(id = %self.id, worker = %self.meter.worker().name, reason = message, "answer ended early");
        let terminator = self.events.as_mut()?.terminator.take()?;
        Some(terminator.error(message))
    }

    fn correct(&mut self, data: Bytes) -> Bytes {
        match &mut self.usage {
            Some(usage) if !data.is_empty() => usage.on_data(data),
            _ => data,
        }
    }

    /// What ends the stream, if it is one of events that has not ended.
    fn terminator(&self) -> Option<&StreamTerminator> {
        self.events.as_ref()?.terminator.as_ref()
    }

    /// The engine's answer has ended. Returns what is still to be sent.
    fn on_end(&mut self, data: Bytes) -> Bytes {
        let mut passed = self.on_data(data);
        let broken = Break {
            outcome: Outcome::WorkerFailed,
            message: ENDED_EARLY,
            error: None,
        };
        if self.source.is_closed() || self.start_next(broken).is_ok() {
            return passed;
        }
        self.source.close();
        let mut end = Outcome::Complete;
        if let Some(events) = &mut self.events {
            let (held, terminator) = (events.aligner.finish(), events.terminator.take());
            let held = self.correct(held);
            end = terminator.as_ref().map_or(end, StreamTerminator::outcome);
            let missing = terminator.map(|terminator| terminator.at_end(&held));
            let rest = match missing {
                None | Some(Missing::Nothing) => {
                    if !held.is_empty() {
                        self.meter.on_data(self.last, &held, Plain::default());
                    }
                    held
                }
                Some(Missing::Done(done)) => done,
                // An incomplete event is dropped.
                Some(Missing::Answer(error)) => {
                    end = Outcome::WorkerFailed;
                    error
                }
            };
            passed = join(passed, rest);
        }
        self.meter.on_end(self.last, end);
        passed
    }

    /// The engine's answer broke off or took too long. Returns what ends the stream.
    fn on_broken(
        &mut self,
        data: Bytes,
        end: Outcome,
        message: &'static str,
    ) -> Result<Bytes, BodyError> {
        let passed = self.on_data(data);
        let broken = Break {
            outcome: end,
            message,
            error: None,
        };
        if self.source.is_closed() || self.start_next(broken).is_ok() {
            return Ok(passed);
        }
        let complete = self.terminator().filter(|terminator| terminator.has_end);
        if let Some(outcome) = complete.map(StreamTerminator::outcome) {
            // The stream was complete when the connection broke.
            self.source.close();
            self.meter.on_end(self.last, outcome);
            return Ok(passed);
        }
        // Without a terminator the client notices by the length or by the missing last chunk.
        let terminal = self.end_early(end, message).ok_or(message)?;
        Ok(join(passed, terminal))
    }

    /// The router ends before the answer. Returns what ends the stream; `None` for an answer that the client could not
    /// tell from a whole one then: it goes on until its connection is closed.
    fn on_drained(&mut self) -> Option<Bytes> {
        let has_known_end = self
            .terminator()
            .is_some_and(|terminator| terminator.api != Api::Other);
        if !has_known_end {
            return None;
        }
        let outcome = Outcome::RouterFailed;
        if self.has_next() {
            let broken = Break {
                outcome,
                message: DRAINED,
                error: None,
            };
            return Some(self.lost(broken));
        }
        if self.source.is_closed() {
            return None;
        }
        self.on_broken(Bytes::new(), outcome, DRAINED).ok()
    }

    /// Whether another worker is asked to go on.
    fn has_next(&self) -> bool {
        self.continuing
            .as_ref()
            .is_some_and(|continuing| continuing.is_waiting())
    }
}

/// Both, one after the other. A single one is not copied.
fn join(first: Bytes, second: Bytes) -> Bytes {
    match (first.is_empty(), second.is_empty()) {
        (_, true) => first,
        (true, false) => second,
        (false, false) => [first, second].concat().into(),
    }
}

/// Whether a piece of a stream is nothing but comments.
fn is_comment(data: &[u8]) -> bool {
    let is_blank = |line: &[u8]| line.is_empty() || line.starts_with(b":") || line == b"\r";
    data.first() == Some(&b':') && data.split(|byte| *byte == b'\n').all(is_blank)
}

impl http_body::Body for Relayed {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.get_mut();
        loop {
            if this.timer.is_drained()
                && let Some(end) = this.on_drained()
            {
                return Poll::Ready(Some(Ok(Frame::data(end))));
            }
            if this.source.is_closed() {
                let waiting = this
                    .continuing
                    .as_mut()
                    .filter(|continuing| continuing.is_waiting());
                let Some(waiting) = waiting else {
                    return Poll::Ready(None);
                };
                match waiting.poll_next(cx) {
                    Poll::Pending => {
                        ready!(this.timer.poll_comment(cx, this.sent));
                        if let Some(comment) = this.comment() {
                            return Poll::Ready(Some(Ok(comment)));
                        }
                        continue;
                    }
                    Poll::Ready(Ok(answer)) => this.on_next(answer),
                    Poll::Ready(Err(broken)) => {
                        let end = this.lost(broken);
                        return Poll::Ready(Some(Ok(Frame::data(end))));
                    }
                }
            }
            // Checked here too: with a client slower than the engine, nothing is ever pending.
            if this.timer.is_over(this.last) {
                let end = this.on_broken(Bytes::new(), Outcome::RequestTimeout, TOO_LONG);
                return Poll::Ready(Some(end.map(Frame::data)));
            }
            let passed = match this.source.poll(cx) {
                Poll::Ready(Read::Data(data)) => Ok(this.on_data(data)),
                Poll::Ready(Read::End(data)) => Ok(this.on_end(data)),
                Poll::Ready(Read::Broken(data)) => {
                    this.meter.on_cut();
                    this.on_broken(data, Outcome::WorkerFailed, CLOSED_EARLY)
                }
                Poll::Pending => match this
                    .timer
                    .poll(cx, this.last, this.sent, || this.meter.worker().is_down())
                {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Fired::KeepAlive) => {
                        if let Some(comment) = this.comment() {
                            return Poll::Ready(Some(Ok(comment)));
                        }
                        continue;
                    }
                    Poll::Ready(Fired::End(end, message)) => {
                        this.on_broken(Bytes::new(), end, message)
                    }
                },
            };
            // Only part of an event has come.
            if passed.as_ref().map_or(true, |passed| !passed.is_empty()) {
                if let Ok(passed) = &passed {
                    this.sent = this.sent.max(this.last);
                    this.is_within_event = !passed.ends_with(b"\n\n");
                }
                return Poll::Ready(Some(passed.map(Frame::data)));
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.source.is_closed() && !self.has_next()
    }
}

impl Drop for Relayed {
    fn drop(&mut self) {
        if !self.source.is_closed() || self.has_next() {
            let terminator = self.terminator();
            let complete = terminator.filter(|terminator| terminator.has_passed_all());
            match complete.map(StreamTerminator::outcome) {
                // The client had all of it, and did not wait for the end of the body.
                Some(outcome) => self.meter.on_end(self.last, outcome),
                None => self
                    .meter
                    .on_end(observe::now(), Outcome::ClientDisconnected),
            }
        }
    }
}
