//! A connection that stands: the call whose messages are heard, and the one that a question needs.

use std::collections::VecDeque;
use std::future::Future;
use std::task::Context;
use std::task::Poll;

use bytes::Bytes;
use tonic::Status;

use super::Doing;
use super::link::Call;
use super::link::Link;
use super::link::chain;
use super::link::is_history_gone;
use crate::kv::source::Frame;
use crate::kv::source::Said;

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
    /// With the first batch, or the last chunk of a snapshot.
    First,
    /// With this number, which was already said.
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
        let fits = |call: &Call| call.start == start;
        if self.next.is_none() && !self.has_spoken && self.call.as_ref().is_some_and(fits) {
            // It begins where the answer does, and nothing of it was given away yet.
            self.answering = Some(self.until(start));
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

    fn until(&self, start: u64) -> Until {
        match start {
            0 => Until::First,
            _ if self.highest > start => Until::Number(self.highest),
            _ => Until::First,
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
                    self.answering = is_answer.then(|| self.until(call.start));
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
            (Some(chunk), _) => chunk.index.saturating_add(1) >= chunk.count,
            (None, Until::First) => true,
            (None, Until::Number(number)) => sequence >= number,
        };
        if is_last {
            self.answering = None;
            said.push_back(Said::ReplayEnd);
        }
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
