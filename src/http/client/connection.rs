//! One connection of HTTP/1.1, without a task of its own: whoever waits for an answer drives it.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::task::coop;

use super::alarm::Alarm;
use crate::http::tls::Socket;

/// hyper reads an answer's head or a part of its body into a buffer of up to this size. By default it may grow to 400 KB,
/// and stays as large for a client that does not read on.
const MAX_BUFFER_BYTES: usize = 64 << 10;

pub(super) struct Connection {
    sender: http1::SendRequest<Full<Bytes>>,
    driver: Driver,
}

/// Drives a connection only when it has something to do.
struct Driver {
    connection: Pin<Box<http1::Connection<TokioIo<Socket>, Full<Bytes>>>>,
    alarm: Arc<Alarm>,
    /// What wakes the alarm.
    waker: Waker,
    /// What it was last polled for was not there, and has not come since.
    is_awaited: bool,
    ended: bool,
}

impl Connection {
    pub(super) async fn over(socket: Socket) -> Result<Self, hyper::Error> {
        let mut builder = http1::Builder::new();
        builder.max_buf_size(MAX_BUFFER_BYTES);
        let (sender, connection) = builder.handshake(TokioIo::new(socket)).await?;
        let alarm = Arc::new(Alarm::default());
        let driver = Driver {
            connection: Box::pin(connection),
            waker: alarm.clone().into(),
            alarm,
            is_awaited: false,
            ended: false,
        };
        Ok(Self { sender, driver })
    }

    /// The socket of an idle connection without TLS, free of the thread that opened it.
    pub(super) fn into_stream(self) -> io::Result<std::net::TcpStream> {
        let parts = Pin::into_inner(self.driver.connection).into_parts();
        match parts.io.into_inner() {
            Socket::Clear(stream) if parts.read_buf.is_empty() => {
                let stream = stream.into_std()?;
                // Its thread may not have noticed yet that the server closed it.
                match stream.peek(&mut [0]) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(stream),
                    _ => Err(io::ErrorKind::NotConnected.into()),
                }
            }
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Sends a request, and returns its answer with the connection, which the answer's body needs.
    pub(super) async fn exchange(
        mut self,
        request: Request<Full<Bytes>>,
    ) -> Result<(Response<Incoming>, Self), hyper::Error> {
        // Without a budget left for the task, the channel would say "not yet" of an answer that is there, to a waker
        // that wakes nobody.
        let mut answer = pin!(coop::unconstrained(self.sender.send_request(request)));
        self.driver.alarm.ring();
        let answer =
            poll_fn(|cx| self.driver.poll(cx, |quiet| answer.as_mut().poll(quiet))).await?;
        Ok((answer, self))
    }

    /// Polls what the connection produces, and drives the connection for it.
    pub(super) fn poll<T>(
        &mut self,
        cx: &mut Context<'_>,
        produced: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        self.driver.poll(cx, produced)
    }

    /// Whether another request can be sent after an answer that has come to its end.
    pub(super) fn is_over(&mut self) -> bool {
        self.driver.alarm.ring();
        self.is_usable()
    }

    /// Whether a request can be sent: the server has not closed the connection.
    pub(super) fn is_usable(&mut self) -> bool {
        self.driver.drive();
        !self.driver.ended && self.sender.is_ready()
    }
}

impl Driver {
    /// `produced` needs no waker: only the connection produces it, while it is driven here. It always sees what was
    /// produced, and need not look again before the connection is driven: a body's channel spends nothing of the task's
    /// budget, and an answer's channel is polled without a limit.
    fn poll<T>(
        &mut self,
        cx: &mut Context<'_>,
        mut produced: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        let mut quiet = Context::from_waker(Waker::noop());
        let mut polled = if self.is_awaited {
            Poll::Pending
        } else {
            produced(&mut quiet)
        };
        if polled.is_pending() && self.drive() {
            polled = produced(&mut quiet);
        }
        self.is_awaited = polled.is_pending();
        if self.is_awaited {
            // Whoever gets something polls again, and needs no waker until then.
            self.alarm.wakes(cx.waker());
        }
        polled
    }

    /// Drives the connection as far as it goes without waiting, if anything has happened since the last time. False if not.
    fn drive(&mut self) -> bool {
        let has_rung = self.alarm.take();
        if has_rung && !self.ended {
            let cx = &mut Context::from_waker(&self.waker);
            self.ended = self.connection.as_mut().poll(cx).is_ready();
        }
        has_rung
    }
}
