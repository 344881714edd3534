//! An answer on its way to the client: bytes unchanged, in whole events, and never without an end.

mod ending;

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

use self::ending::Ending;
use super::meter::Meter;
use super::metrics::Outcome;
use super::usage::TrueUsage;
use crate::http::client::EngineBody;
use crate::http::sse::Aligner;
use crate::http::{self, BodyError};
use crate::ids::RequestId;
use crate::observe;
use crate::prompt::Api;

/// How much of an event that has not ended is held back. Longer ones pass in pieces.
const HELD_BYTES_MAX: usize = 1 << 20;
/// Pieces that have come together are passed on together, up to about so much.
const BATCH_BYTES: usize = 8 << 10;

const TOO_LONG: &str = "the request took longer than the router allows";

#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) idle: Duration,
    pub(super) deadline: Instant,
}

/// Makes the client's body of an engine's.
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
    usage: Option<Box<TrueUsage>>,
    id: RequestId,
) -> http::Body {
    let events = is_events.then(|| Events {
        aligner: Aligner::new(HELD_BYTES_MAX),
        // An error that an engine answers as a stream is its own business.
        ending: status.is_success().then(|| Ending::new(api)),
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
        id,
    };
    relayed.boxed_unsync()
}

struct Relayed {
    /// Gone when nothing more is to come from it.
    engine: Option<EngineBody>,
    first: Option<Bytes>,
    timer: Pin<Box<Sleep>>,
    /// Whether the timer is set to this answer's limits.
    is_armed: bool,
    last: Instant,
    limits: Limits,
    events: Option<Events>,
    meter: Meter,
    /// Puts right what an answer says that another worker has computed the prompt of.
    usage: Option<Box<TrueUsage>>,
    id: RequestId,
}

/// What the engine's connection had to give.
enum Came {
    Data(Bytes),
    /// The last of it.
    End(Bytes),
    Broken(Bytes),
}

/// Pieces made one. A single one is not copied.
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
    ending: Option<Ending>,
}

impl Relayed {
    /// Takes what has come; returns what may pass.
    fn on_data(&mut self, data: Bytes) -> Bytes {
        self.last = observe::now();
        if self.usage.is_some() {
            return self.on_split_data(data);
        }
        self.meter.on_data(self.last, &data);
        let Some(events) = &mut self.events else {
            return data;
        };
        let passed = events.aligner.push(data);
        if let Some(ending) = &mut events.ending
            && !passed.is_empty()
        {
            ending.on_passed(&passed);
        }
        passed
    }

    /// The same for an answer in which something is put right: what is counted is what the client reads.
    fn on_split_data(&mut self, data: Bytes) -> Bytes {
        let passed = match &mut self.events {
            Some(events) => events.aligner.push(data),
            None => data,
        };
        let passed = self.put_right(passed);
        if passed.is_empty() {
            return passed;
        }
        self.meter.on_data(self.last, &passed);
        let ending = self.events.as_mut().and_then(|it| it.ending.as_mut());
        if let Some(ending) = ending {
            ending.on_passed(&passed);
        }
        passed
    }

    fn put_right(&mut self, data: Bytes) -> Bytes {
        match &mut self.usage {
            Some(usage) if !data.is_empty() => usage.on_data(data),
            _ => data,
        }
    }

    /// All that has come and not been passed on, as one piece: a token costs a write only if it came
    /// alone. Nothing is waited for.
    fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Came> {
        let mut batch = Batch::default();
        if let Some(first) = self.first.take() {
            batch.push(first);
        }
        while batch.len() < BATCH_BYTES {
            let Some(engine) = &mut self.engine else {
                return Poll::Ready(Came::End(batch.take()));
            };
            // Where the length is known, nobody polls for an end that has been reached.
            if engine.is_end_stream() {
                return Poll::Ready(Came::End(batch.take()));
            }
            match Pin::new(engine).poll_frame(cx) {
                // Trailers are dropped: nobody asked for any.
                Poll::Ready(Some(Ok(frame))) => batch.push(frame.into_data().unwrap_or_default()),
                Poll::Ready(Some(Err(_))) => return Poll::Ready(Came::Broken(batch.take())),
                Poll::Ready(None) => return Poll::Ready(Came::End(batch.take())),
                Poll::Pending if batch.len() == 0 => return Poll::Pending,
                Poll::Pending => break,
            }
        }
        Poll::Ready(Came::Data(batch.take()))
    }

    /// The engine has said all. Returns what is still to be sent.
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
                .ending
                .take()
                .and_then(|ending| ending.if_missing(&held))
            {
                None => held,
                // Half an event is dropped: nothing could follow it.
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

    /// The engine will not say more, or is not waited for. Returns what ends the stream.
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
        let ending = self.events.as_mut().and_then(|events| events.ending.take());
        if ending.as_ref().is_some_and(Ending::has_end) {
            // All was said before the connection broke.
            self.meter.on_end(self.last, Outcome::Complete);
            return Ok(passed);
        }
        self.meter.on_end(observe::now(), end);
        info!(id = %self.id, worker = self.meter.worker(), message, "answer broke off");
        match ending {
            Some(ending) => Ok(join(passed, ending.error(message))),
            // Of a whole answer the client knows the length, or misses the last chunk: it sees the cut.
            None => Err(message.into()),
        }
    }

    fn poll_limits(&mut self, cx: &mut Context<'_>) -> Poll<(Outcome, &'static str)> {
        loop {
            if self.is_armed && self.timer.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            // Pieces do not set the timer anew; it looks when the last one came.
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
            // Here too, for a client that is slower than its engine and never waits.
            if this.last >= this.limits.deadline {
                let end = this.on_broken(Bytes::new(), Outcome::RequestTimeout, TOO_LONG);
                return Poll::Ready(Some(end.map(Frame::data)));
            }
            let passed = match this.poll_data(cx) {
                Poll::Ready(Came::Data(data)) => Ok(this.on_data(data)),
                Poll::Ready(Came::End(data)) => Ok(this.on_end(data)),
                Poll::Ready(Came::Broken(data)) => this.on_broken(
                    data,
                    Outcome::WorkerFailed,
                    "the engine closed its connection before the answer's end",
                ),
                Poll::Pending => match this.poll_limits(cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready((end, message)) => this.on_broken(Bytes::new(), end, message),
                },
            };
            // An event that goes on passes nothing yet.
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
