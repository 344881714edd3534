//! A connection that stands: the call whose messages are heard, and the one that a question needs.

use std::collections::VecDeque;
use std::future::Future;
use std::task::{Context, Poll};

use bytes::Bytes;
use tonic::Status;

use super::Doing;
use super::link::{Call, Link, chain, is_history_gone};
use crate::kv::source::{Frame, Said};

/// A connection that stands.
pub(super) struct Up {
    /// `None` while the first call on the way to another answer has failed.
    call: Option<Call>,
    /// The call that is to take its place, what for, and where it starts.
    next: Option<(Doing<Call>, Purpose, u64)>,
    pub(super) epoch: Option<String>,
    /// Whether `call` has said a frame.
    has_spoken: bool,
    /// While `call`'s frames are the answer to a question: how far that goes.
    answering: Option<Until>,
    /// The highest number said over this connection.
    highest: u64,
    /// It sends no snapshots and no epochs.
    is_plain: bool,
    link: Link,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// Someone asked for it.
    Answer,
    /// Someone asked in vain, and what is published now has to come from somewhere.
    GoOn,
}

/// Where an answer ends and what is live begins. It is all one stream; what matters is that the one
/// who asked has what they missed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Until {
    /// With the first batch, or the last chunk of a snapshot: how much more there is was not told.
    First,
    /// With this number, which was already said, or was there when the question was answered.
    Number(u64),
}

pub(super) enum Heard {
    Message(Bytes),
    /// A question has no answer.
    Refused(String),
    /// A question has no answer, and none ever will.
    NoHistory(String),
    /// Something changed that is nobody's business.
    Nothing,
}

impl Up {
    pub(super) fn new(link: Link, call: Call) -> Self {
        Self {
            epoch: call.epoch.clone(),
            call: Some(call),
            next: None,
            has_spoken: false,
            answering: None,
            highest: 0,
            is_plain: true,
            link,
        }
    }

    pub(super) fn ask(&mut self, start: u64) {
        let fits = |call: &&Call| call.start == start && !self.has_spoken;
        if self.next.is_none()
            && let Some(call) = self.call.as_ref().filter(fits)
        {
            // It begins where the answer does, and nothing of it was given away yet.
            self.answering = Some(self.until(call));
        } else if let Some((_, purpose, _)) = &mut self.next
            && *purpose == Purpose::GoOn
            && start == 0
        {
            // On its way already.
            *purpose = Purpose::Answer;
        } else {
            self.answering = None;
            let doing = Box::pin(self.link.subscribe(start));
            self.next = Some((doing, Purpose::Answer, start));
        }
    }

    fn until(&self, call: &Call) -> Until {
        // A list is of the moment that it was made, and may be of a process whose numbers are lower.
        let said = match call.start {
            0 => 0,
            _ => self.highest,
        };
        let last = call.last.unwrap_or(0).max(said);
        if last > call.start {
            Until::Number(last)
        } else {
            Until::First
        }
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Heard, Status>> {
        // What is live may wait for the answer: it is in it.
        if let Some((doing, purpose, start)) = &mut self.next {
            let (purpose, start) = (*purpose, *start);
            let opened = std::task::ready!(doing.as_mut().poll(cx));
            self.next = None;
            return Poll::Ready(match opened {
                Ok(call) if call.epoch != self.epoch => {
                    Err(Status::aborted("another process answers now"))
                }
                Ok(call) => {
                    let is_answer = purpose == Purpose::Answer;
                    self.answering = is_answer.then(|| self.until(&call));
                    self.call = Some(call);
                    self.has_spoken = false;
                    Ok(Heard::Nothing)
                }
                Err(status) if purpose == Purpose::Answer && is_history_gone(&status) => {
                    if self.call.is_none() {
                        self.go_on();
                    }
                    Ok(self.refused(start, &status))
                }
                Err(status) => Err(status),
            });
        }
        let Some(call) = &mut self.call else {
            self.go_on();
            return Poll::Ready(Ok(Heard::Nothing));
        };
        let start = call.start;
        let polled = std::task::ready!(poll_message(call, cx));
        Poll::Ready(match polled {
            Ok(Some(bytes)) => Ok(Heard::Message(bytes)),
            Ok(None) => Err(Status::unavailable("the server ended the call")),
            // As refused as when the call had not been taken: nothing of this answer was said.
            Err(status) if start != 0 && !self.has_spoken && is_history_gone(&status) => {
                let was_asked = self.answering.take().is_some();
                self.go_on();
                Ok(if was_asked {
                    self.refused(start, &status)
                } else {
                    Heard::Nothing
                })
            }
            Err(status) => Err(status),
        })
    }

    /// Says what a frame of the call is: part of an answer, or live.
    pub(super) fn say(&mut self, frame: Frame, said: &mut VecDeque<Said>) {
        let (sequence, snapshot) = (frame.sequence, frame.snapshot);
        self.has_spoken = true;
        self.highest = self.highest.max(sequence);
        self.is_plain &= snapshot.is_none() && self.epoch.is_none();
        let Some(until) = self.answering else {
            said.push_back(Said::Live(frame));
            return;
        };
        said.push_back(Said::Replayed(frame));
        let is_last = match (snapshot, until) {
            (Some(chunk), _) if chunk.index.saturating_add(1) < chunk.count => false,
            (_, Until::First) => true,
            // A list that was asked for by a number is all that there is.
            (Some(_), Until::Number(number)) => sequence >= number || !self.tells_last(),
            (None, Until::Number(number)) => sequence >= number,
        };
        if is_last {
            self.answering = None;
            said.push_back(Said::ReplayEnd);
        }
    }

    fn tells_last(&self) -> bool {
        self.call.as_ref().is_some_and(|call| call.last.is_some())
    }

    fn go_on(&mut self) {
        self.call = None;
        let doing = Box::pin(self.link.subscribe(0));
        self.next = Some((doing, Purpose::GoOn, 0));
    }

    /// A question for what comes after `start` was refused.
    fn refused(&self, start: u64, status: &Status) -> Heard {
        let was_just_said = self.highest > 0 && start + 1 >= self.highest;
        if self.is_plain && was_just_said {
            Heard::NoHistory(explain(status))
        } else {
            Heard::Refused(explain(status))
        }
    }
}

fn poll_message(call: &mut Call, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Status>> {
    let messages = &mut call.messages;
    // Nothing is lost when this future is dropped: it holds nothing but the reference.
    let message = std::pin::pin!(messages.message());
    message.poll(cx)
}

/// A status in one line.
pub(super) fn explain(status: &Status) -> String {
    let why = match status.message() {
        "" => status.code().description().to_owned(),
        message => format!("{:?}: {message}", status.code()),
    };
    match std::error::Error::source(status) {
        Some(cause) if !why.contains(&cause.to_string()) => {
            format!("{why}: {}", chain(cause))
        }
        _ => why,
    }
}
