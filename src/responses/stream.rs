//! The body of a streamed response. The final event is sent only once the response is stored.
//!
//! Nothing is read ahead of the client. If the client disconnects, this body is dropped, and with it the
//! connection to the engine.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body::{Body as _, Frame};
use http_body_util::BodyExt;
use tokio::time::{Sleep, sleep};

use super::events::EventRewriter;
use super::finish::{FinishedResponse, Finisher};
use super::outcome::Outcome;
use crate::http::{self, BodyError, sse};
use crate::observe;
use crate::store::Status;

/// Space for what the router adds to a piece of the engine.
const SPARE_BYTES: usize = 256;

/// What an engine may send after its last event, such as `[DONE]`.
const TRAILER_BYTES_MAX: usize = 16 << 10;

struct StreamBody {
    /// `None` once the engine has closed the stream, or the router has.
    engine: Option<http::Body>,
    events: EventRewriter,
    state: State,
    /// Bytes after the engine's last event.
    trailer_bytes: usize,
    keep_alive: Option<KeepAlive>,
}

/// Measures how long the stream has been silent.
struct KeepAlive {
    interval: Duration,
    last_sent: Instant,
    /// Set again only when it has fired: sending data just updates `last_sent`.
    timer: Option<Pin<Box<Sleep>>>,
}

impl KeepAlive {
    /// Ready each time the stream has been silent for the interval.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let timer = self
                .timer
                .get_or_insert_with(|| Box::pin(sleep(self.interval)));
            ready!(timer.as_mut().poll(cx));
            let left = self.interval.saturating_sub(self.last_sent.elapsed());
            if left.is_zero() {
                self.timer = None;
                return Poll::Ready(());
            }
            self.timer = Some(Box::pin(sleep(left)));
        }
    }
}

enum State {
    Running(Box<Finisher>),
    Ending(Pin<Box<dyn Future<Output = FinishedResponse> + Send>>),
    Ended,
}

pub(super) fn body(engine: http::Body, events: EventRewriter, finisher: Finisher) -> http::Body {
    let keep_alive = finisher.responses.settings.keep_alive;
    let stream = StreamBody {
        engine: Some(engine),
        events,
        state: State::Running(Box::new(finisher)),
        trailer_bytes: 0,
        keep_alive: (!keep_alive.is_zero()).then(|| KeepAlive {
            interval: keep_alive,
            last_sent: observe::now(),
            timer: None,
        }),
    };
    stream.boxed_unsync()
}

impl StreamBody {
    fn on_outcome(&mut self, outcome: Outcome) {
        if outcome.status == Status::Failed {
            // The engine may continue for long, and no client would read it.
            self.engine = None;
        }
        let state = std::mem::replace(&mut self.state, State::Ended);
        if let State::Running(finisher) = state {
            let template = self.events.template().clone();
            let item_count = self.events.item_count();
            self.state = State::Ending(Box::pin(finisher.run(template, outcome, item_count)));
        }
    }

    fn on_finished(&mut self, finished: &FinishedResponse) -> Vec<u8> {
        self.state = State::Ended;
        let mut out = Vec::with_capacity(
            finished.response.len() + finished.outcome.client_output().len() + SPARE_BYTES,
        );
        if let Some(item) = &finished.state_item {
            self.events.add_state_item(item, &mut out);
        }
        self.events
            .end(&finished.response, &finished.outcome, &mut out);
        out
    }

    /// Drains the engine's stream after its last event; otherwise the engine would see a disconnected client.
    /// Ready when it has closed or exceeds the limit.
    fn poll_drain(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while let Some(data) = ready!(self.poll_engine(cx)) {
            self.trailer_bytes += data.len();
            if self.trailer_bytes > TRAILER_BYTES_MAX {
                self.engine = None;
            }
        }
        Poll::Ready(())
    }

    /// The next events for the client; empty at the end.
    fn poll_events(&mut self, cx: &mut Context<'_>) -> Poll<Vec<u8>> {
        loop {
            let out = match &mut self.state {
                State::Running(_) => {
                    let data = ready!(self.poll_engine(cx));
                    let spare = data.as_ref().map_or(0, Bytes::len);
                    let mut out = Vec::with_capacity(spare + spare / 4 + SPARE_BYTES);
                    let outcome = match data {
                        Some(data) => self.events.push(&data, &mut out),
                        None => self.events.finish(&mut out),
                    };
                    if let Some(outcome) = outcome {
                        self.on_outcome(outcome);
                    }
                    out
                }
                State::Ending(ending) => {
                    let ended = ending.as_mut().poll(cx);
                    let _ = self.poll_drain(cx);
                    self.on_finished(&ready!(ended))
                }
                State::Ended => {
                    ready!(self.poll_drain(cx));
                    return Poll::Ready(Vec::new());
                }
            };
            if !out.is_empty() {
                return Poll::Ready(out);
            }
        }
    }

    /// The next piece from the engine; `None` at the end.
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

impl http_body::Body for StreamBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.get_mut();
        let events = this.poll_events(cx);
        let Some(keep_alive) = &mut this.keep_alive else {
            let events = ready!(events);
            return Poll::Ready((!events.is_empty()).then(|| Ok(Frame::data(events.into()))));
        };
        match events {
            Poll::Ready(events) if events.is_empty() => Poll::Ready(None),
            Poll::Ready(events) => {
                keep_alive.last_sent = observe::now();
                Poll::Ready(Some(Ok(Frame::data(events.into()))))
            }
            // The final event is sent; only the stream of the engine is still being drained.
            Poll::Pending if matches!(this.state, State::Ended) => Poll::Pending,
            Poll::Pending => {
                ready!(keep_alive.poll(cx));
                keep_alive.last_sent = observe::now();
                Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(sse::KEEP_ALIVE)))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.state, State::Ended) && self.engine.is_none()
    }
}
