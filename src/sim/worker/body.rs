//! The body of an answer: whole, or event by event while the engine generates.
//!
//! When the client disconnects, hyper drops the body and with it the ticket, which cancels the request in the engine.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::{fmt, io};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use tokio::sync::Notify;

use super::driver::Ticket;
use super::error::ApiError;
use super::generation::Generation;
use super::in_flight::InFlight;
use super::shared::Shared;
use super::start::{Start, Started};
use super::transfer::offer::BlockOffer;
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

/// Closes the connection once the answer is sent.
#[derive(Debug)]
pub(crate) struct CloseAfter(pub(crate) Arc<Notify>);

#[derive(Debug)]
pub(crate) struct Events {
    shared: Arc<Shared>,
    generation: Generation,
    faults: Faults,
    state: State,
    /// Events to send, each as a frame of its own.
    ready: VecDeque<String>,
    /// The blocks that a prefill leg offers. Its `kv_transfer_params` are in the stream only for the Responses API.
    offer: Option<BlockOffer>,
}

enum State {
    /// The request is not yet submitted to the engine.
    Starting {
        start: Start,
        in_flight: InFlight,
    },
    Running {
        ticket: Ticket,
        in_flight: InFlight,
    },
    /// Nothing more is sent, but the connection stays open and the engine goes on, as in a process that hangs.
    Stalled {
        ticket: Ticket,
        in_flight: InFlight,
        /// Ready with the faults of then, when it sends again.
        over: Pin<Box<dyn Future<Output = Faults> + Send>>,
    },
    /// Flushes what was sent, then closes the connection.
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
            Content::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Content::Events(events) => events
                .poll_event(context)
                .map(|event| event.map(|result| result.map(|text| Frame::data(Bytes::from(text))))),
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
        mut generation: Generation,
        faults: Faults,
        start: Start,
        in_flight: InFlight,
        offer: Option<BlockOffer>,
    ) -> Self {
        Self {
            shared: Arc::clone(shared),
            ready: generation.opening().into(),
            generation,
            faults,
            state: State::Starting { start, in_flight },
            offer,
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
                State::Stalled { over, .. } => match over.as_mut().poll(context) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(faults) => {
                        self.faults = faults;
                        self.go_on();
                        continue;
                    }
                },
                _ => return self.poll_ended(context),
            };
            let tokens = self.generation.completion_tokens();
            if let Some(end) = self.faults.early_end_after(tokens) {
                self.end_early(end);
                continue;
            }
            match ticket.poll_next(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some((index, event))) => {
                    if let Some(token) = self.generation.on_event(index, event) {
                        self.ready.push_back(self.generation.token(index, token));
                    } else if self.generation.is_complete() {
                        self.end();
                    }
                }
                Poll::Ready(None) if ticket.is_of_dead_engine() => {
                    self.fail(&ApiError::engine_error());
                }
                // The worker is shutting down.
                Poll::Ready(None) => self.state = State::Cutting,
            }
        }
    }

    fn begin(&mut self, started: Result<Started, ApiError>) {
        match started {
            Err(error) => self.fail(&error),
            Ok(started) => {
                self.generation.received = started.received;
                let before = std::mem::replace(&mut self.state, State::Ended);
                if let State::Starting { in_flight, .. } = before {
                    let ticket = started.ticket;
                    self.state = State::Running { ticket, in_flight };
                }
            }
        }
    }

    /// Sends again after a stall.
    fn go_on(&mut self) {
        let before = std::mem::replace(&mut self.state, State::Ended);
        if let State::Stalled {
            ticket, in_flight, ..
        } = before
        {
            self.state = State::Running { ticket, in_flight };
        }
    }

    /// Ends the stream with an engine error.
    fn fail(&mut self, error: &ApiError) {
        self.state = match self.generation.failure(error) {
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
            let offer = self.offer.as_ref();
            self.generation.transfer_params =
                offer.and_then(|offer| offer.make(&ticket, &self.generation));
            in_flight.finish();
        }
        self.ready.extend(self.generation.closing());
    }

    fn end_early(&mut self, end: EarlyEnd) {
        let State::Running { ticket, in_flight } = std::mem::replace(&mut self.state, State::Ended)
        else {
            return;
        };
        match end {
            EarlyEnd::Error => self.fail(&ApiError::engine_error()),
            EarlyEnd::Cut => self.state = State::Cutting,
            EarlyEnd::Stall | EarlyEnd::Death => {
                let (shared, tokens) = (
                    Arc::clone(&self.shared),
                    self.generation.completion_tokens(),
                );
                self.state = State::Stalled {
                    ticket,
                    in_flight,
                    over: Box::pin(async move {
                        if end == EarlyEnd::Death {
                            shared.life.end();
                            std::future::pending::<()>().await;
                        }
                        shared.stall_is_over(tokens).await
                    }),
                };
            }
        }
    }

    fn poll_ended(&mut self, context: &mut Context<'_>) -> Poll<Option<io::Result<String>>> {
        match self.state {
            // hyper flushes when the body is pending.
            State::Cutting => {
                self.state = State::Cut;
                context.waker().wake_by_ref();
                Poll::Pending
            }
            State::Cut => Poll::Ready(Some(Err(io::Error::other("closed by an injected fault")))),
            State::Starting { .. }
            | State::Running { .. }
            | State::Stalled { .. }
            | State::Ended => Poll::Ready(None),
        }
    }
}
