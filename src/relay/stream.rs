//! The body of an answer to the client: bytes unchanged, streams in whole SSE events and always terminated.

mod terminator;

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http_body::{Body as _, Frame};
use http_body_util::BodyExt;
use hyper::StatusCode;
use tokio::time::Sleep;
use tracing::info;

use self::terminator::StreamTerminator;
use super::meter::Meter;
use super::metrics::Outcome;
use super::usage_option;
use super::usage_rewriter::UsageRewriter;
use crate::http::client::EngineBody;
use crate::http::sse::Aligner;
use crate::http::{self, BodyError};
use crate::ids::RequestId;
use crate::observe;
use crate::prompt::Api;

/// An incomplete event is buffered up to this size; a longer one passes in pieces.
const EVENT_BYTES_MAX: usize = 1 << 20;
/// Pieces that are available at once are passed on as one, up to about this size.
const BATCH_BYTES: usize = 8 << 10;

const TOO_LONG: &str = "the request took longer than the router allows";

#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) idle: Duration,
    pub(super) deadline: Instant,
}

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
    meter: Meter,
    usage: Option<Box<UsageRewriter>>,
    strips_usage: bool,
    id: RequestId,
) -> http::Body {
    let events = is_events.then(|| Events {
        aligner: Aligner::new(EVENT_BYTES_MAX),
        // An error that an engine answers as a stream is its own business.
        terminator: status.is_success().then(|| StreamTerminator::new(api)),
    });
    let relayed = Relayed {
        engine: Some(engine),
        first,
        timer,
        is_armed: false,
        last: observe::now(),
        limits,
        events,
        meter,
        usage,
        strips_usage,
        id,
    };
    relayed.boxed_unsync()
}

struct Relayed {
    /// `None` once the answer has ended.
    engine: Option<EngineBody>,
    first: Option<Bytes>,
    timer: Pin<Box<Sleep>>,
    /// True once the timer is set to the limits of the stream.
    is_armed: bool,
    last: Instant,
    limits: Limits,
    events: Option<Events>,
    meter: Meter,
    /// Corrects the usage of a disaggregated request's answer.
    usage: Option<Box<UsageRewriter>>,
    /// Leaves out the event with the usage, for which the router asked.
    strips_usage: bool,
    id: RequestId,
}

/// What was read from the engine's connection.
enum Read {
    Data(Bytes),
    /// The last data.
    End(Bytes),
    Broken(Bytes),
}

/// Joins pieces. A single piece is not copied.
#[derive(Default)]
struct Batch {
    first: Bytes,
    all: BytesMut,
}

impl Batch {
    fn push(&mut self, piece: Bytes) {
        if self.len() == 0 {
            self.first = piece;
            return;
        }
        if self.all.is_empty() {
            self.all.reserve(BATCH_BYTES);
            self.all.extend_from_slice(&self.first);
        }
        self.all.extend_from_slice(&piece);
    }

    fn len(&self) -> usize {
        self.first.len().max(self.all.len())
    }

    fn take(self) -> Bytes {
        if self.all.is_empty() {
            self.first
        } else {
            self.all.freeze()
        }
    }
}

fn join(first: Bytes, second: Bytes) -> Bytes {
    match (first.is_empty(), second.is_empty()) {
        (_, true) => first,
        (true, false) => second,
        (false, false) => [first, second].concat().into(),
    }
}

struct Events {
    aligner: Aligner,
    terminator: Option<StreamTerminator>,
}

impl Relayed {
    /// Takes data from the engine; returns the whole events in it.
    fn on_data(&mut self, data: Bytes) -> Bytes {
        self.last = observe::now();
        if self.usage.is_some() {
            return self.on_disaggregated_data(data);
        }
        self.meter.on_data(self.last, &data);
        let Some(events) = &mut self.events else {
            return data;
        };
        let passed = events.aligner.push(data);
        if let Some(terminator) = &mut events.terminator
            && !passed.is_empty()
        {
            terminator.on_passed(&passed);
        }
        self.stripped(passed)
    }

    /// What the client gets of whole events.
    fn stripped(&self, events: Bytes) -> Bytes {
        match self.strips_usage {
            true => usage_option::without_usage(events),
            false => events,
        }
    }

    /// The same for an answer whose usage is corrected: metrics count what the client reads.
    fn on_disaggregated_data(&mut self, data: Bytes) -> Bytes {
        let passed = match &mut self.events {
            Some(events) => events.aligner.push(data),
            None => data,
        };
        let passed = self.correct(passed);
        if passed.is_empty() {
            return passed;
        }
        self.meter.on_data(self.last, &passed);
        let terminator = self.events.as_mut().and_then(|it| it.terminator.as_mut());
        if let Some(terminator) = terminator {
            terminator.on_passed(&passed);
        }
        self.stripped(passed)
    }

    fn correct(&mut self, data: Bytes) -> Bytes {
        match &mut self.usage {
            Some(usage) if !data.is_empty() => usage.on_data(data),
            _ => data,
        }
    }

    /// Everything that is available, as one piece: tokens that came together cost one write. Does not wait.
    fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Read> {
        let mut batch = Batch::default();
        if let Some(first) = self.first.take() {
            batch.push(first);
        }
        while batch.len() < BATCH_BYTES {
            let Some(engine) = &mut self.engine else {
                return Poll::Ready(Read::End(batch.take()));
            };
            // Where the length is known, hyper does not poll for an end that has been reached.
            if engine.is_end_stream() {
                return Poll::Ready(Read::End(batch.take()));
            }
            match Pin::new(engine).poll_frame(cx) {
                // Trailers are dropped.
                Poll::Ready(Some(Ok(frame))) => batch.push(frame.into_data().unwrap_or_default()),
                Poll::Ready(Some(Err(_))) => return Poll::Ready(Read::Broken(batch.take())),
                Poll::Ready(None) => return Poll::Ready(Read::End(batch.take())),
                Poll::Pending if batch.len() == 0 => return Poll::Pending,
                Poll::Pending => break,
            }
        }
        Poll::Ready(Read::Data(batch.take()))
    }

    /// The engine's answer has ended. Returns what is still to be sent.
    fn on_end(&mut self, data: Bytes) -> Bytes {
        let mut passed = if data.is_empty() {
            data
        } else {
            self.on_data(data)
        };
        self.engine = None;
        let mut end = Outcome::Complete;
        if let Some(events) = &mut self.events {
            let held = events.aligner.finish();
            let held = match &mut self.usage {
                Some(usage) if !held.is_empty() => usage.on_data(held),
                _ => held,
            };
            let rest = match events
                .terminator
                .take()
                .and_then(|terminator| terminator.if_missing(&held))
            {
                None => held,
                // An incomplete event is dropped.
                Some(error) => {
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
        let passed = if data.is_empty() {
            data
        } else {
            self.on_data(data)
        };
        self.engine = None;
        let terminator = self
            .events
            .as_mut()
            .and_then(|events| events.terminator.take());
        if terminator.as_ref().is_some_and(StreamTerminator::has_end) {
            // The stream was complete when the connection broke.
            self.meter.on_end(self.last, Outcome::Complete);
            return Ok(passed);
        }
        self.meter.on_end(observe::now(), end);
        info!(id = %self.id, worker = self.meter.worker(), reason = message, "answer ended early");
        match terminator {
            Some(terminator) => Ok(join(passed, terminator.error(message))),
            // The client notices by the length or by the missing last chunk.
            None => Err(message.into()),
        }
    }

    fn poll_limits(&mut self, cx: &mut Context<'_>) -> Poll<(Outcome, &'static str)> {
        loop {
            if self.is_armed && self.timer.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            // Pieces do not reset the timer: when it fires, it looks when the last one came.
            let now = observe::now();
            let silent_at = self.last + self.limits.idle;
            if now >= self.limits.deadline {
                return Poll::Ready((Outcome::RequestTimeout, TOO_LONG));
            }
            if now >= silent_at {
                return Poll::Ready((Outcome::StreamIdleTimeout, "the engine stopped sending"));
            }
            self.timer
                .as_mut()
                .reset(silent_at.min(self.limits.deadline).into());
            self.is_armed = true;
        }
    }
}

/// The message of the terminal event of a stream whose engine closed its connection.
const CLOSED_EARLY: &str = "the engine closed its connection before the answer's end";

/// Whether this is the message of a terminal event that stands for a lost engine.
pub fn is_engine_lost(message: &str) -> bool {
    [CLOSED_EARLY, terminator::ENDED_EARLY].contains(&message)
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
            if this.engine.is_none() {
                return Poll::Ready(None);
            }
            // Checked here too: with a client slower than the engine, nothing is ever pending.
            if this.last >= this.limits.deadline {
                let end = this.on_broken(Bytes::new(), Outcome::RequestTimeout, TOO_LONG);
                return Poll::Ready(Some(end.map(Frame::data)));
            }
            let passed = match this.poll_data(cx) {
                Poll::Ready(Read::Data(data)) => Ok(this.on_data(data)),
                Poll::Ready(Read::End(data)) => Ok(this.on_end(data)),
                Poll::Ready(Read::Broken(data)) => {
                    this.on_broken(data, Outcome::WorkerFailed, CLOSED_EARLY)
                }
                Poll::Pending => match this.poll_limits(cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready((end, message)) => this.on_broken(Bytes::new(), end, message),
                },
            };
            // Only part of an event has come.
            if passed.as_ref().map_or(true, |passed| !passed.is_empty()) {
                return Poll::Ready(Some(passed.map(Frame::data)));
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.engine.is_none()
    }
}

impl Drop for Relayed {
    fn drop(&mut self) {
        if self.engine.is_some() {
            self.meter
                .on_end(observe::now(), Outcome::ClientDisconnected);
        }
    }
}
