//! A turn that runs: asks, then reads what it is answered.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::Body as _;
use hyper::{HeaderMap, Response};

use super::outgoing::Events;
use crate::api::access_log::LoggedBody;
use crate::responses::websocket::client_frame::Lane;
use crate::responses::websocket::error_frame;
use crate::responses::websocket::memory::{BodyCounted, TurnRecord};
use crate::responses::websocket::step::TurnNumber;

/// An error body is the router's own; more is not read of it.
const ERROR_BYTES_MAX: usize = 64 << 10;

pub(super) type Answer = Pin<Box<dyn Future<Output = Response<LoggedBody>> + Send>>;

pub(super) struct RunningTurn {
    /// None once its response has ended and only the engine's stream has not.
    pub(super) number: Option<TurnNumber>,
    lane: Lane,
    pub(super) record: TurnRecord,
    /// None once the session knows that the memory of bodies counts this turn's.
    uncounted: Option<BodyCounted>,
    state: TurnState,
}

enum TurnState {
    /// No byte of the answer yet.
    Asking(Answer),
    Streaming(LoggedBody, Events),
    /// An answer that is an error.
    Refused {
        status: u16,
        headers: HeaderMap,
        body: LoggedBody,
        read: Vec<u8>,
    },
}

impl RunningTurn {
    pub(super) fn new(
        number: TurnNumber,
        lane: Lane,
        record: TurnRecord,
        counted: BodyCounted,
        answer: Answer,
    ) -> Self {
        Self {
            number: Some(number),
            lane,
            record,
            uncounted: Some(counted),
            state: TurnState::Asking(answer),
        }
    }

    /// The number of the turn, once, as soon as the memory of bodies counts its body.
    pub(super) fn take_counted(&mut self) -> Option<TurnNumber> {
        let number = self.number?;
        let counted = self.uncounted.take_if(|counted| counted.is_set());
        counted.map(|_| number)
    }

    /// Ready with each piece of the answer that was sent, and with true at its end. The answer's head alone is no piece:
    /// its turn may have ended already, and whoever looks for that now sends what comes after it first.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>, mut send: impl FnMut(Bytes)) -> Poll<bool> {
        loop {
            match &mut self.state {
                TurnState::Asking(answer) => {
                    let (head, body) = ready!(answer.as_mut().poll(cx)).into_parts();
                    self.state = if head.status.is_success() {
                        TurnState::Streaming(body, Events::new(&self.lane))
                    } else {
                        TurnState::Refused {
                            status: head.status.as_u16(),
                            headers: head.headers,
                            body,
                            read: Vec::new(),
                        }
                    };
                }
                TurnState::Streaming(body, events) => {
                    let Some(Ok(frame)) = ready!(Pin::new(body).poll_frame(cx)) else {
                        return Poll::Ready(true);
                    };
                    if let Ok(piece) = frame.into_data() {
                        events.of(&piece, send);
                    }
                    return Poll::Ready(false);
                }
                TurnState::Refused {
                    status,
                    headers,
                    body,
                    read,
                } => match ready!(Pin::new(body).poll_frame(cx)) {
                    Some(Ok(frame)) if read.len() < ERROR_BYTES_MAX => {
                        read.extend_from_slice(&frame.into_data().unwrap_or_default());
                    }
                    _ => {
                        send(error_frame::of_answer(*status, headers, read, &self.lane));
                        return Poll::Ready(true);
                    }
                },
            }
        }
    }
}
