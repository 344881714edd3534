//! The time limits of a stream, and when a silent one needs a comment.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::time::Sleep;

use super::end_message::{DOWN, STOPPED, TOO_LONG};
use crate::http::drain::LastPart;
use crate::observe;
use crate::relay::failure::types::Outcome;

/// How long an engine that is down may be silent: one that is shut down can leave its streams open until it is killed, which
/// takes 30 s in Kubernetes. Health checks take a moment to find out.
const SILENT_WHILE_DOWN: Duration = Duration::from_secs(10);
/// How often a stream that is silent for longer asks whether its worker is down.
const LOOK_EVERY: Duration = Duration::from_secs(2);

#[derive(Clone, Debug)]
pub(in crate::relay) struct Limits {
    pub(in crate::relay) idle: Duration,
    /// A client that gets nothing for this long gets a comment, so that no proxy takes its connection for dead. `None`: it gets
    /// none.
    pub(in crate::relay) keep_alive: Option<Duration>,
    pub(in crate::relay) deadline: Instant,
    /// The part of the router's drain in which the stream ends. `None`: it goes on.
    pub(in crate::relay) last_part: Option<LastPart>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fired {
    /// The stream is over.
    End(Outcome, &'static str),
    KeepAlive,
}

/// Fires when a limit is reached.
pub(super) struct Timer {
    limits: Limits,
    timer: Pin<Box<Sleep>>,
    /// True once the timer is set to the limits of the stream.
    is_armed: bool,
}

impl Timer {
    pub(super) fn new(limits: Limits, timer: Pin<Box<Sleep>>) -> Self {
        Self {
            limits,
            timer,
            is_armed: false,
        }
    }

    /// For another worker's answer.
    pub(super) fn restart(&mut self, timer: Pin<Box<Sleep>>) {
        self.timer = timer;
        self.is_armed = false;
    }

    pub(super) fn is_over(&self, now: Instant) -> bool {
        now >= self.limits.deadline
    }

    /// Whether the router ends now, and the stream with it.
    pub(super) fn is_drained(&self) -> bool {
        self.limits
            .last_part
            .as_ref()
            .is_some_and(LastPart::has_begun)
    }

    /// Until a comment is due, while no engine answers.
    pub(super) fn poll_comment(&mut self, cx: &mut Context<'_>, sent: Instant) -> Poll<()> {
        let Some(interval) = self.limits.keep_alive else {
            return Poll::Pending;
        };
        loop {
            if self.is_armed && self.timer.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            let comment_at = sent + interval;
            self.is_armed = observe::now() < comment_at;
            if !self.is_armed {
                return Poll::Ready(());
            }
            self.timer.as_mut().reset(comment_at.into());
        }
    }

    /// `last`: when the engine sent something last; `sent`: when the client was. `is_down`: the worker's health checks fail.
    pub(super) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        last: Instant,
        sent: Instant,
        is_down: impl Fn() -> bool,
    ) -> Poll<Fired> {
        loop {
            if self.is_armed && self.timer.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            // Pieces do not reset the timer: when it fires, it looks when the last one came.
            let now = observe::now();
            let silent_at = last + self.limits.idle;
            if self.is_over(now) {
                return Poll::Ready(Fired::End(Outcome::RequestTimeout, TOO_LONG));
            }
            if now >= silent_at {
                return Poll::Ready(Fired::End(Outcome::StreamIdleTimeout, STOPPED));
            }
            let mut next = silent_at.min(self.limits.deadline);
            let lost_at = last + SILENT_WHILE_DOWN;
            if now >= lost_at && is_down() {
                return Poll::Ready(Fired::End(Outcome::StreamIdleTimeout, DOWN));
            }
            next = next.min(if now < lost_at {
                lost_at
            } else {
                now + LOOK_EVERY
            });
            if let Some(interval) = self.limits.keep_alive {
                let comment_at = sent + interval;
                if now >= comment_at {
                    self.is_armed = false;
                    return Poll::Ready(Fired::KeepAlive);
                }
                next = next.min(comment_at);
            }
            self.timer.as_mut().reset(next.into());
            self.is_armed = true;
        }
    }
}
