//! The body of an answer: all at once, or event by event while the engine goes on.
//!
//! hyper drops the body when the client is gone, and with it the ticket: that is how the engine
//! learns of it.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::{fmt, io};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use tokio::sync::Notify;

use super::Shared;
use super::answer::Transcript;
use super::driver::Ticket;
use super::generate::{Start, Started};
use super::problem::Problem;
use super::seen::InFlight;
use super::transfer::Grant;
use crate::sim::fault::{EarlyEnd, Faults};

#[derive(Debug)]
pub(crate) struct AnswerBody {
    content: Content,
    _close: Option<CloseAfter>,
}

#[derive(Debug)]
enum Content {
    Whole(Option<Bytes>),
    Events(Box<Events>),
}

/// Tells the connection, once the answer is out, that it was the last one.
#[derive(Debug)]
pub(crate) struct CloseAfter(pub(crate) Arc<Notify>);

#[derive(Debug)]
pub(crate) struct Events {
    shared: Arc<Shared>,
    transcript: Transcript,
    faults: Faults,
    state: State,
    /// Written events that are still to be sent, each as a frame of its own.
    ready: VecDeque<String>,
    /// For a prefill leg. What it hands over shows in a Responses stream only.
    grant: Option<Grant>,
}

enum State {
    /// The engine does not have it yet.
    Starting {
        start: Start,
        in_flight: InFlight,
    },
    Running {
        ticket: Ticket,
        in_flight: InFlight,
    },
    /// Nothing more comes, but the connection is kept and the engine works on, as in a process that
    /// hangs.
    Stalled {
        _ticket: Ticket,
        _in_flight: InFlight,
    },
    /// What was sent is flushed first, then the connection is dropped.
    Cutting,
    Cut,
    Ended,
}

impl AnswerBody {
    pub(crate) fn whole(bytes: impl Into<Bytes>) -> Self {
        let bytes = Some(bytes.into()).filter(|bytes: &Bytes| !bytes.is_empty());
        Self {
            content: Content::Whole(bytes),
            _close: None,
        }
    }

    pub(crate) fn events(events: Events) -> Self {
        Self {
            content: Content::Events(Box::new(events)),
            _close: None,
        }
    }

    pub(crate) fn then(mut self, close: Option<CloseAfter>) -> Self {
        self._close = close;
        self
    }
}

impl Drop for CloseAfter {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

impl fmt::Debug for State {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("State").finish_non_exhaustive()
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match &mut self.content {
            Content::Whole(bytes) => Poll::Ready(bytes.take().map(|it| Ok(Frame::data(it)))),
            Content::Events(events) => events
                .poll_event(context)
                .map(|event| event.map(|it| it.map(|text| Frame::data(Bytes::from(text))))),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.content, Content::Whole(None))
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Whole(bytes) => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64)
            }
            Content::Events(_) => SizeHint::default(),
        }
    }
}

impl Events {
    pub(crate) fn new(
        shared: &Arc<Shared>,
        mut transcript: Transcript,
        faults: Faults,
        start: Start,
        in_flight: InFlight,
        grant: Option<Grant>,
    ) -> Self {
        Self {
            shared: Arc::clone(shared),
            ready: transcript.opening().into(),
            transcript,
            faults,
            state: State::Starting { start, in_flight },
            grant,
        }
    }

    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<io::Result<String>>> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(event)));
            }
            let ticket = match &mut self.state {
                State::Running { ticket, .. } => ticket,
                State::Starting { start, .. } => match start.as_mut().poll(context) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(started) => {
                        self.begin(started);
                        continue;
                    }
                },
                _ => return self.poll_after_the_end(context),
            };
            let tokens = self.transcript.completion_tokens();
            if let Some(ending) = self.faults.early_end_after(tokens) {
                self.end_early(ending);
                continue;
            }
            match ticket.poll_next(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some((index, event))) => {
                    if let Some(token) = self.transcript.on_event(index, event) {
                        self.ready.push_back(self.transcript.token(index, token));
                    } else if self.transcript.is_complete() {
                        self.end();
                    }
                }
                Poll::Ready(None) if ticket.is_of_dead_engine() => {
                    self.fail(&Problem::engine_error());
                }
                // The engine has stopped with the whole worker.
                Poll::Ready(None) => self.state = State::Cutting,
            }
        }
    }

    fn begin(&mut self, started: Result<Started, Problem>) {
        match started {
            Err(problem) => self.fail(&problem),
            Ok(started) => {
                self.transcript.received = started.received;
                let before = std::mem::replace(&mut self.state, State::Ended);
                if let State::Starting { in_flight, .. } = before {
                    let ticket = started.ticket;
                    self.state = State::Running { ticket, in_flight };
                }
            }
        }
    }

    /// The engine reports an error, and this answer ends with it.
    fn fail(&mut self, problem: &Problem) {
        self.state = match self.transcript.failure(problem) {
            Some(events) => {
                self.ready.extend(events);
                State::Ended
            }
            None => State::Cutting,
        };
    }

    fn end(&mut self) {
        let running = std::mem::replace(&mut self.state, State::Ended);
        if let State::Running { in_flight, ticket } = running {
            let grant = self.grant.as_ref();
            self.transcript.handed = grant.and_then(|it| it.offer(&ticket, &self.transcript));
            in_flight.finish();
        }
        self.ready.extend(self.transcript.closing());
    }

    fn end_early(&mut self, ending: EarlyEnd) {
        let State::Running { ticket, in_flight } = std::mem::replace(&mut self.state, State::Ended)
        else {
            return;
        };
        match ending {
            EarlyEnd::Error => self.fail(&Problem::engine_error()),
            EarlyEnd::Cut => self.state = State::Cutting,
            EarlyEnd::Stall | EarlyEnd::Death => {
                self.state = State::Stalled {
                    _ticket: ticket,
                    _in_flight: in_flight,
                };
            }
        }
        if ending == EarlyEnd::Death {
            self.shared.life.end();
        }
    }

    fn poll_after_the_end(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<String>>> {
        match self.state {
            // hyper flushes what it has when there is nothing more for the moment.
            State::Cutting => {
                self.state = State::Cut;
                context.waker().wake_by_ref();
                Poll::Pending
            }
            State::Cut => Poll::Ready(Some(Err(io::Error::other("cut by a fault switch")))),
            State::Stalled { .. } => Poll::Pending,
            State::Starting { .. } | State::Running { .. } | State::Ended => Poll::Ready(None),
        }
    }
}
