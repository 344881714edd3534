//! A stream that may go on on another worker: reads it while it passes, and asks for the next answer when it breaks.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use prometheus::IntCounterVec;
use tracing::info;

use crate::fleet::Worker;
use crate::ids::{Model, RequestId};
use crate::relay::attempt::outcome::AttemptAnswer;
use crate::relay::continuation::{End, Reader, Refusal};
use crate::relay::failure::types::Outcome;
use crate::relay::next_answer::{NextAnswer, NotContinued};

/// How a stream broke off, and how it ends if no worker goes on.
#[derive(Debug)]
pub(in crate::relay) struct Break {
    pub(in crate::relay) outcome: Outcome,
    pub(in crate::relay) message: &'static str,
    /// What the engine itself said of it.
    pub(in crate::relay) error: Option<Bytes>,
}

type Answered = (Box<NextAnswer>, Result<Box<AttemptAnswer>, NotContinued>);

pub(in crate::relay) struct Continuing {
    state: State,
    id: RequestId,
    model: Model,
    counts: IntCounterVec,
}

enum State {
    /// The request does not allow it.
    Refused(Refusal),
    Reading(Box<Reader>, Box<NextAnswer>),
    Waiting {
        reader: Box<Reader>,
        answer: Pin<Box<dyn Future<Output = Answered> + Send>>,
        broken: Break,
    },
    /// No worker could go on.
    Over,
}

impl Continuing {
    pub(in crate::relay) fn new(
        allowed: Result<(Reader, NextAnswer), Refusal>,
        id: RequestId,
        model: Model,
        counts: IntCounterVec,
    ) -> Self {
        let state = match allowed {
            Ok((reader, next)) => State::Reading(Box::new(reader), Box::new(next)),
            Err(refusal) => State::Refused(refusal),
        };
        Self {
            state,
            id,
            model,
            counts,
        }
    }

    /// How long an event may be for the ids in it: a number of a prompt's ids has up to seven digits and a comma.
    pub(in crate::relay) fn ids_bytes_max(&self) -> usize {
        match &self.state {
            State::Reading(reader, _) => reader.tokens_max() * 8,
            _ => 0,
        }
    }

    /// Takes whole events; returns what the client gets, and whether the stream is over.
    pub(in crate::relay) fn on_events(&mut self, events: Bytes) -> (Bytes, Option<End>) {
        match &mut self.state {
            State::Reading(reader, _) if !events.is_empty() => reader.on_events(events),
            _ => (events, None),
        }
    }

    pub(in crate::relay) fn is_waiting(&self) -> bool {
        matches!(self.state, State::Waiting { .. })
    }

    /// The stream of `lost` has broken off. The break is given back if it is not continued.
    pub(in crate::relay) fn start(
        &mut self,
        lost: &Arc<Worker>,
        broken: Break,
    ) -> Result<(), Break> {
        let refusal = match std::mem::replace(&mut self.state, State::Over) {
            State::Refused(refusal) => refusal,
            State::Reading(mut reader, mut next) => match reader.next_body() {
                Err(refusal) => refusal,
                Ok(body) => {
                    info!(
                        id = %self.id, worker = %lost.name, reason = broken.message,
                        answer_tokens = reader.answer_tokens(), times = reader.times,
                        "stream broke off; continuing it on another worker"
                    );
                    let (lost, tokens) = (lost.clone(), reader.answer_tokens());
                    let answer = Box::pin(async move {
                        let answer = next.run(body, lost, tokens).await;
                        (next, answer)
                    });
                    self.state = State::Waiting {
                        reader,
                        answer,
                        broken,
                    };
                    return Ok(());
                }
            },
            State::Waiting { .. } | State::Over => return Err(broken),
        };
        self.count("refused", refusal.as_str());
        Err(broken)
    }

    /// Waits for the next answer, after [`Continuing::start`]. An error if no worker can go on.
    pub(in crate::relay) fn poll_next(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Box<AttemptAnswer>, Break>> {
        let State::Waiting { answer, .. } = &mut self.state else {
            return Poll::Pending;
        };
        let (next, answer) = ready!(answer.as_mut().poll(cx));
        let State::Waiting { reader, broken, .. } = std::mem::replace(&mut self.state, State::Over)
        else {
            return Poll::Pending;
        };
        Poll::Ready(match answer {
            Ok(answer) => {
                self.count("continued", "none");
                self.state = State::Reading(reader, next);
                Ok(answer)
            }
            Err(error) => {
                info!(id = %self.id, %error, "no other worker continues the stream");
                self.count("failed", "none");
                Err(broken)
            }
        })
    }

    fn count(&self, outcome: &str, reason: &str) {
        let labels = [&*self.model, outcome, reason];
        self.counts.with_label_values(&labels).inc();
    }
}
