//! An established connection: the call being read, and the call that a replay needs.

use std::collections::VecDeque;
use std::future::Future;
use std::task::{Context, Poll};

use bytes::Bytes;
use tonic::Status;

use super::connection::{Call, Connection, PendingCall, is_history_gone};
use crate::kv::source::{SourceBatch, SourceEvent};
use crate::observe::with_causes;

pub(super) struct Session {
    /// `None` between a failed call and its replacement.
    call: Option<Call>,
    /// The call being opened to replace it, its purpose and its start number.
    next: Option<(PendingCall<Call>, Purpose, u64)>,
    pub(super) incarnation: Option<String>,
    /// Whether `call` has delivered a batch.
    has_delivered: bool,
    /// While the batches of `call` are a replay: where it ends.
    replaying: Option<ReplayEnd>,
    /// The highest sequence number delivered over this connection.
    highest: u64,
    /// The server sends neither snapshots nor incarnation ids.
    is_basic_server: bool,
    connection: Connection,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// A replay was requested.
    Replay,
    /// A replay was refused, and live batches need a call again.
    Resume,
}

/// Where a replay ends and live batches begin, within the messages of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReplayEnd {
    /// After the first batch or the last chunk of a snapshot: the server did not say how much there is.
    First,
    /// After this number, which was delivered before, or was the last when the call was answered.
    Number(u64),
}

pub(super) enum SessionEvent {
    Message(Bytes),
    /// The replay was refused.
    Refused(String),
    /// The replay was refused, and so would any other be.
    NoHistory(String),
    /// Nothing to report.
    Nothing,
}

impl Session {
    pub(super) fn new(connection: Connection, call: Call) -> Self {
        Self {
            incarnation: call.incarnation.clone(),
            call: Some(call),
            next: None,
            has_delivered: false,
            replaying: None,
            highest: 0,
            is_basic_server: true,
            connection,
        }
    }

    pub(super) fn request_replay(&mut self, start: u64) {
        let fits = |call: &&Call| call.start == start && !self.has_delivered;
        if self.next.is_none()
            && let Some(call) = self.call.as_ref().filter(fits)
        {
            // The current call starts at the same batch, and none of it was delivered yet.
            self.replaying = Some(self.until(call));
        } else if let Some((_, purpose, _)) = &mut self.next
            && *purpose == Purpose::Resume
            && start == 0
        {
            // The call being opened is the requested one.
            *purpose = Purpose::Replay;
        } else {
            self.replaying = None;
            let pending = Box::pin(self.connection.subscribe(start));
            self.next = Some((pending, Purpose::Replay, start));
        }
    }

    fn until(&self, call: &Call) -> ReplayEnd {
        // A snapshot may be of another process, with lower numbers.
        let events = match call.start {
            0 => 0,
            _ => self.highest,
        };
        let last = call.last.unwrap_or(0).max(events);
        if last > call.start {
            ReplayEnd::Number(last)
        } else {
            ReplayEnd::First
        }
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<SessionEvent, Status>> {
        // Live batches can wait: the replay contains them.
        if let Some((pending, purpose, start)) = &mut self.next {
            let (purpose, start) = (*purpose, *start);
            let opened = std::task::ready!(pending.as_mut().poll(cx));
            self.next = None;
            return Poll::Ready(match opened {
                Ok(call) if call.incarnation != self.incarnation => Err(Status::aborted(
                    "the server is now another engine incarnation",
                )),
                Ok(call) => {
                    let is_answer = purpose == Purpose::Replay;
                    self.replaying = is_answer.then(|| self.until(&call));
                    self.call = Some(call);
                    self.has_delivered = false;
                    Ok(SessionEvent::Nothing)
                }
                Err(status) if purpose == Purpose::Replay && is_history_gone(&status) => {
                    if self.call.is_none() {
                        self.resume();
                    }
                    Ok(self.refused(start, &status))
                }
                Err(status) => Err(status),
            });
        }
        let Some(call) = &mut self.call else {
            self.resume();
            return Poll::Ready(Ok(SessionEvent::Nothing));
        };
        let start = call.start;
        let polled = std::task::ready!(poll_message(call, cx));
        Poll::Ready(match polled {
            Ok(Some(bytes)) => Ok(SessionEvent::Message(bytes)),
            Ok(None) => Err(Status::unavailable("the server ended the call")),
            // Refused after all: nothing of this call was delivered yet.
            Err(status) if start != 0 && !self.has_delivered && is_history_gone(&status) => {
                let was_asked = self.replaying.take().is_some();
                self.resume();
                Ok(if was_asked {
                    self.refused(start, &status)
                } else {
                    SessionEvent::Nothing
                })
            }
            Err(status) => Err(status),
        })
    }

    /// Reports a batch of the call as replayed or live.
    pub(super) fn deliver(&mut self, frame: SourceBatch, events: &mut VecDeque<SourceEvent>) {
        let (sequence, snapshot) = (frame.sequence, frame.snapshot);
        self.has_delivered = true;
        self.highest = self.highest.max(sequence);
        self.is_basic_server &= snapshot.is_none() && self.incarnation.is_none();
        let Some(until) = self.replaying else {
            events.push_back(SourceEvent::Live(frame));
            return;
        };
        events.push_back(SourceEvent::Replayed(frame));
        let is_last = match (snapshot, until) {
            (Some(chunk), _) if chunk.index.saturating_add(1) < chunk.count => false,
            (_, ReplayEnd::First) => true,
            // A snapshot sent instead of the requested batches is complete by itself.
            (Some(_), ReplayEnd::Number(number)) => sequence >= number || !self.reports_last(),
            (None, ReplayEnd::Number(number)) => sequence >= number,
        };
        if is_last {
            self.replaying = None;
            events.push_back(SourceEvent::ReplayEnd);
        }
    }

    fn reports_last(&self) -> bool {
        self.call.as_ref().is_some_and(|call| call.last.is_some())
    }

    fn resume(&mut self) {
        self.call = None;
        let pending = Box::pin(self.connection.subscribe(0));
        self.next = Some((pending, Purpose::Resume, 0));
    }

    /// A replay of the batches after `start` was refused.
    fn refused(&self, start: u64, status: &Status) -> SessionEvent {
        let was_just_said = self.highest > 0 && start + 1 >= self.highest;
        if self.is_basic_server && was_just_said {
            SessionEvent::NoHistory(explain(status))
        } else {
            SessionEvent::Refused(explain(status))
        }
    }
}

fn poll_message(call: &mut Call, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Status>> {
    let messages = &mut call.messages;
    // Dropping this future loses nothing: it only holds a reference.
    let message = std::pin::pin!(messages.message());
    message.poll(cx)
}

pub(super) fn explain(status: &Status) -> String {
    let reason = match status.message() {
        "" => status.code().description().to_owned(),
        message => format!("{:?}: {message}", status.code()),
    };
    match std::error::Error::source(status) {
        Some(cause) if !reason.contains(&cause.to_string()) => {
            format!("{reason}: {}", with_causes(cause))
        }
        _ => reason,
    }
}
