//! What a connection does at its times: pings, its end, and a client that reads nothing.

use std::task::{Context, Poll};

use bytes::Bytes;
use tokio_websockets::{CloseCode, Message};

use super::Live;
use crate::observe;
use crate::responses::websocket::lifetime::Due;

impl Live<'_> {
    /// Sends what is due, and ends the connection if its client reads nothing or does not answer.
    pub(super) fn poll_timer(&mut self, cx: &mut Context<'_>) -> Poll<&'static str> {
        while self.timer.as_mut().poll(cx).is_ready() {
            let now = observe::now();
            if let Some((reason, until)) = self.closing
                && now >= until
            {
                return Poll::Ready(reason);
            }
            if self
                .blocked_since
                .is_some_and(|since| now >= since + self.send_timeout)
            {
                return Poll::Ready("send_timeout");
            }
            match self.lifetime.due(now) {
                // It would wait behind what the client does not read.
                Some(Due::Ping) if self.blocked_since.is_some() => {}
                Some(Due::Ping) => {
                    self.send(Message::ping(Bytes::new()));
                    // A connection without turns keeps no old configuration alive.
                    self.server = self.server.latest();
                }
                Some(Due::Unresponsive) if self.closing.is_none() => {
                    self.close("unresponsive", CloseCode::INTERNAL_SERVER_ERROR, "no pong");
                }
                Some(Due::Idle) => {
                    let steps = self.session.on_idle();
                    self.take(steps);
                }
                Some(Due::Expired) => {
                    let steps = self.session.on_expired();
                    self.take(steps);
                }
                Some(Due::Unresponsive) | None => {}
            }
            self.reset_timer();
        }
        Poll::Pending
    }

    pub(super) fn reset_timer(&mut self) {
        let mut next = match self.closing {
            Some((_, until)) => until,
            None => self.lifetime.next(),
        };
        if let Some(since) = self.blocked_since {
            next = next.min(since + self.send_timeout);
        }
        self.timer.as_mut().reset(next.into());
    }

    pub(super) fn set_timer(&mut self, cx: &mut Context<'_>) {
        self.reset_timer();
        let _ = self.timer.as_mut().poll(cx);
    }
}
