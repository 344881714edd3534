//! The body of a streamed response: an engine's events in, ours out, and the end only once it is kept.
//!
//! Nothing is read ahead of the client, and a client that leaves drops the engine's connection with
//! this body.

use std::future::Future;
use std::pin::Pin;
use std::task::Context;
use std::task::Poll;
use std::task::ready;

use bytes::Bytes;
use http_body::Body as _;
use http_body::Frame;
use http_body_util::BodyExt;

use super::events::Events;
use super::finish::Ended;
use super::finish::Finish;
use super::object::Outcome;
use crate::http;
use crate::http::BodyError;
use crate::store::Status;

/// What our own words take, around an engine's piece.
const SPARE_BYTES: usize = 256;

/// What an engine may still say after its last event: some say `[DONE]`.
const REST_BYTES_MAX: usize = 16 << 10;

struct Told {
    /// Gone when it has said all, or is not listened to any more.
    engine: Option<http::Body>,
    events: Events,
    state: State,
    /// What came after the engine's last event.
    rest_bytes: usize,
}

enum State {
    Running(Box<Finish>),
    Ending(Pin<Box<dyn Future<Output = Ended> + Send>>),
    Ended,
}

pub(super) fn body(engine: http::Body, events: Events, finish: Finish) -> http::Body {
    let told = Told {
        engine: Some(engine),
        events,
        state: State::Running(Box::new(finish)),
        rest_bytes: 0,
    };
    told.boxed_unsync()
}

impl Told {
    fn on_outcome(&mut self, outcome: Outcome) {
        if outcome.status == Status::Failed {
            // It may go on for long, and nobody would hear it.
            self.engine = None;
        }
        let state = std::mem::replace(&mut self.state, State::Ended);
        if let State::Running(finish) = state {
            let shape = self.events.shape().clone();
            let place = self.events.place();
            self.state = State::Ending(Box::pin(finish.run(shape, outcome, place)));
        }
    }

    fn on_ended(&mut self, ended: &Ended) -> Vec<u8> {
        self.state = State::Ended;
        let mut out =
            Vec::with_capacity(ended.response.len() + ended.outcome.told().len() + SPARE_BYTES);
        if let Some((added, done)) = &ended.state {
            self.events.add_item(added, done, &mut out);
        }
        self.events.end(&ended.response, &ended.outcome, &mut out);
        out
    }

    /// Hears the engine out after it has said how it ended: else it would look as if it was left. Ready
    /// when it has closed, or talks on and on.
    fn poll_rest(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while let Some(data) = ready!(self.poll_engine(cx)) {
            self.rest_bytes += data.len();
            if self.rest_bytes > REST_BYTES_MAX {
                self.engine = None;
            }
        }
        Poll::Ready(())
    }

    /// The next piece of what the engine says; `None` when there is no more.
    fn poll_engine(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let Some(engine) = &mut self.engine else {
            return Poll::Ready(None);
        };
        match ready!(Pin::new(engine).poll_frame(cx)) {
            Some(Ok(frame)) => Poll::Ready(Some(frame.into_data().unwrap_or_default())),
            Some(Err(_)) | None => {
                self.engine = None;
                Poll::Ready(None)
            }
        }
    }
}

impl http_body::Body for Told {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.get_mut();
        loop {
            let out = match &mut this.state {
                State::Running(_) => {
                    let data = ready!(this.poll_engine(cx));
                    let spare = data.as_ref().map_or(0, Bytes::len);
                    let mut out = Vec::with_capacity(spare + spare / 4 + SPARE_BYTES);
                    let outcome = match data {
                        Some(data) => this.events.push(&data, &mut out),
                        None => this.events.finish(&mut out),
                    };
                    if let Some(outcome) = outcome {
                        this.on_outcome(outcome);
                    }
                    out
                }
                State::Ending(ending) => {
                    let ended = ending.as_mut().poll(cx);
                    let _ = this.poll_rest(cx);
                    this.on_ended(&ready!(ended))
                }
                State::Ended => {
                    ready!(this.poll_rest(cx));
                    return Poll::Ready(None);
                }
            };
            if !out.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(out.into()))));
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.state, State::Ended) && self.engine.is_none()
    }
}
