//! An answer on its way to the client: bytes unchanged, in whole events, and never without an end.

mod ending;

use std::future::Future;
use std::pin::Pin;
use std::task::Context;
use std::task::Poll;
use std::time::Duration;
use std::time::Instant;

use bytes::Bytes;
use http_body::Frame;
use http_body_util::BodyExt;
use hyper::StatusCode;
use tokio::time::Sleep;
use tracing::info;

use self::ending::Ending;
use super::meter::Meter;
use super::model::End;
use crate::http;
use crate::http::BodyError;
use crate::http::client::EngineBody;
use crate::http::sse::Aligner;
use crate::observe;
use crate::prompt::Api;

/// How much of an event that has not ended is held back. Longer ones pass in pieces.
const HELD_BYTES_MAX: usize = 1 << 20;

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
}

struct Events {
    aligner: Aligner,
    ending: Option<Ending>,
}

impl Relayed {
    /// Takes a piece; returns what may pass.
    fn on_data(&mut self, data: Bytes) -> Bytes {
        self.last = observe::now();
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

    /// The engine has said all. Returns what is still to be sent.
    fn on_complete(&mut self) -> Option<Bytes> {
        self.engine = None;
        let (rest, end) = match &mut self.events {
            None => (Bytes::new(), End::Complete),
            Some(events) => {
                let held = events.aligner.finish();
                match events
                    .ending
                    .take()
                    .and_then(|ending| ending.if_missing(&held))
                {
                    None => (held, End::Complete),
                    // Half an event is dropped: nothing could follow it.
                    Some(error) => (error, End::Engine),
                }
            }
        };
        self.meter.on_end(self.last, end);
        (!rest.is_empty()).then_some(rest)
    }

    /// The engine will not say more, or is not waited for. Returns what ends the stream.
    fn on_broken(&mut self, end: End, message: &str) -> Result<Bytes, BodyError> {
        self.engine = None;
        self.meter.on_end(observe::now(), end);
        info!(worker = self.meter.worker(), message, "answer broke off");
        match self.events.as_mut().and_then(|events| events.ending.take()) {
            Some(ending) => Ok(ending.error(message)),
            // Of a whole answer the client knows the length, or the missing last chunk: it sees the cut.
            None => Err(message.into()),
        }
    }

    fn poll_limits(&mut self, cx: &mut Context<'_>) -> Poll<(End, &'static str)> {
        loop {
            if self.is_armed && self.timer.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            // Pieces do not set the timer anew; it looks when the last one came.
            let now = observe::now();
            let silent_at = self.last + self.limits.idle;
            if now >= self.limits.deadline {
                return Poll::Ready((
                    End::Deadline,
                    "the request took longer than the router allows",
                ));
            }
            if now >= silent_at {
                return Poll::Ready((End::Silence, "the engine stopped sending"));
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
            let Some(engine) = &mut this.engine else {
                return Poll::Ready(None);
            };
            let data = match this.first.take() {
                Some(first) => first,
                None => match Pin::new(engine).poll_frame(cx) {
                    Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                        Ok(data) => data,
                        // Trailers: nobody asked for any.
                        Err(_) => continue,
                    },
                    Poll::Ready(None) => {
                        return Poll::Ready(this.on_complete().map(|rest| Ok(Frame::data(rest))));
                    }
                    Poll::Ready(Some(Err(_))) => {
                        let end = this.on_broken(
                            End::Engine,
                            "the engine closed its connection before the answer's end",
                        );
                        return Poll::Ready(Some(end.map(Frame::data)));
                    }
                    Poll::Pending => match this.poll_limits(cx) {
                        Poll::Pending => return Poll::Pending,
                        Poll::Ready((end, message)) => {
                            return Poll::Ready(Some(
                                this.on_broken(end, message).map(Frame::data),
                            ));
                        }
                    },
                },
            };
            let passed = this.on_data(data);
            // Where the length is known, nobody polls for an end that has been reached.
            if this.events.is_none()
                && this
                    .engine
                    .as_ref()
                    .is_some_and(http_body::Body::is_end_stream)
            {
                let _ = this.on_complete();
            }
            if !passed.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(passed))));
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
            self.meter.on_end(observe::now(), End::Client);
        }
    }
}
