//! The time limits of a stream.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::time::Sleep;

use crate::observe;
use crate::relay::request_outcome::Outcome;

pub(super) const TOO_LONG: &str = "the request took longer than the router allows";
const STOPPED: &str = "the engine stopped sending";

#[derive(Clone, Copy, Debug)]
pub(in crate::relay) struct Limits {
    pub(in crate::relay) idle: Duration,
    pub(in crate::relay) deadline: Instant,
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
        *self = Self::new(self.limits, timer);
    }

    pub(super) fn is_over(&self, now: Instant) -> bool {
        now >= self.limits.deadline
    }

    /// `last`: when the last piece came.
    pub(super) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        last: Instant,
    ) -> Poll<(Outcome, &'static str)> {
        loop {
            if self.is_armed && self.timer.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            // Pieces do not reset the timer: when it fires, it looks when the last one came.
            let now = observe::now();
            let silent_at = last + self.limits.idle;
            if self.is_over(now) {
                return Poll::Ready((Outcome::RequestTimeout, TOO_LONG));
            }
            if now >= silent_at {
                return Poll::Ready((Outcome::StreamIdleTimeout, STOPPED));
            }
            let next = silent_at.min(self.limits.deadline);
            self.timer.as_mut().reset(next.into());
            self.is_armed = true;
        }
    }
}
