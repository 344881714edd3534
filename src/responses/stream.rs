//! The body of a streamed response: an engine's events in, ours out, and the end only once it is kept.
//!
//! Nothing is read ahead of the client, and a client that leaves drops the engine's connection with
//! this body.

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
use super::object::Outcome;
use crate::http::{self, BodyError};
use crate::observe;
use crate::store::Status;

/// What our own words take, around an engine's piece.
const SPARE_BYTES: usize = 256;

/// What an engine may still say after its last event: some say `[DONE]`.
const REST_BYTES_MAX: usize = 16 << 10;

/// Nothing to clients, and a sign of life to what is between them and us.
const COMMENT: &[u8] = b": keep-alive\n\n";

struct StreamBody {
    /// Gone when it has said all, or is not listened to any more.
    engine: Option<http::Body>,
    events: EventRewriter,
    state: State,
    /// What came after the engine's last event.
    rest_bytes: usize,
    keep_alive: Option<KeepAlive>,
}

/// How long a stream has said nothing.
struct KeepAlive {
    max: Duration,
    spoke: Instant,
    /// Set once, and again when it is over: words only note the time.
    timer: Option<Pin<Box<Sleep>>>,
}

impl KeepAlive {
    /// Ready when it is too long, once for each time that it is.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(self.max)));
            ready!(timer.as_mut().poll(cx));
            let left = self.max.saturating_sub(self.spoke.elapsed());
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

pub(super) fn body(engine: http::Body, events: EventRewriter, finish: Finisher) -> http::Body {
    let keep_alive_ms = finish.responses.settings.keep_alive_ms;
    let told = StreamBody {
        engine: Some(engine),
        events,
        state: State::Running(Box::new(finish)),
        rest_bytes: 0,
        keep_alive: (keep_alive_ms > 0).then(|| KeepAlive {
            max: Duration::from_millis(keep_alive_ms),
            spoke: observe::now(),
            timer: None,
        }),
    };
    told.boxed_unsync()
}

impl StreamBody {
    fn on_outcome(&mut self, outcome: Outcome) {
        if outcome.status == Status::Failed {
            // It may go on for long, and nobody would hear it.
            self.engine = None;
        }
        let state = std::mem::replace(&mut self.state, State::Ended);
        if let State::Running(finish) = state {
            let template = self.events.template().clone();
            let place = self.events.place();
            self.state = State::Ending(Box::pin(finish.run(template, outcome, place)));
        }
    }

    fn on_ended(&mut self, ended: &FinishedResponse) -> Vec<u8> {
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

    /// Our next words, whole events; none at the end.
    fn poll_words(&mut self, cx: &mut Context<'_>) -> Poll<Vec<u8>> {
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
                    let _ = self.poll_rest(cx);
                    self.on_ended(&ready!(ended))
                }
                State::Ended => {
                    ready!(self.poll_rest(cx));
                    return Poll::Ready(Vec::new());
                }
            };
            if !out.is_empty() {
                return Poll::Ready(out);
            }
        }
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

impl http_body::Body for StreamBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.get_mut();
        let words = this.poll_words(cx);
        let Some(keep_alive) = &mut this.keep_alive else {
            let words = ready!(words);
            return Poll::Ready((!words.is_empty()).then(|| Ok(Frame::data(words.into()))));
        };
        match words {
            Poll::Ready(words) if words.is_empty() => Poll::Ready(None),
            Poll::Ready(words) => {
                keep_alive.spoke = observe::now();
                Poll::Ready(Some(Ok(Frame::data(words.into()))))
            }
            // Its end is told: all that is awaited is the engine's keep_alive.
            Poll::Pending if matches!(this.state, State::Ended) => Poll::Pending,
            Poll::Pending => {
                ready!(keep_alive.poll(cx));
                keep_alive.spoke = observe::now();
                Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(COMMENT)))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.state, State::Ended) && self.engine.is_none()
    }
}
