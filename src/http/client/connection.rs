//! One connection of HTTP/1.1, without a task of its own: whoever waits for an answer drives it.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Waker};

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;

use crate::http::tls::Socket;

/// hyper reads an answer's head or a part of its body into a buffer of up to this size. By default it may grow to 400 KB,
/// and stays as large for a client that does not read on.
const MAX_BUFFER_BYTES: usize = 64 << 10;

pub(super) struct Connection {
    sender: http1::SendRequest<Full<Bytes>>,
    driver: Pin<Box<http1::Connection<TokioIo<Socket>, Full<Bytes>>>>,
    ended: bool,
}

impl Connection {
    pub(super) async fn over(socket: Socket) -> Result<Self, hyper::Error> {
        let mut builder = http1::Builder::new();
        builder.max_buf_size(MAX_BUFFER_BYTES);
        let (sender, driver) = builder.handshake(TokioIo::new(socket)).await?;
        Ok(Self {
            sender,
            driver: Box::pin(driver),
            ended: false,
        })
    }

    /// The socket of an idle connection without TLS, free of the thread that opened it.
    pub(super) fn into_stream(self) -> io::Result<std::net::TcpStream> {
        let parts = Pin::into_inner(self.driver).into_parts();
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
        let mut answer = pin!(self.sender.send_request(request));
        // Only the driver produces the response, and this task polls both: the response needs no waker.
        let answer = poll_fn(|cx| {
            self.drive(cx);
            answer
                .as_mut()
                .poll(&mut Context::from_waker(Waker::noop()))
        })
        .await?;
        Ok((answer, self))
    }

    /// Drives the connection as far as it goes without waiting.
    pub(super) fn drive(&mut self, cx: &mut Context<'_>) {
        if !self.ended {
            self.ended = self.driver.as_mut().poll(cx).is_ready();
        }
    }

    pub(super) fn is_usable(&mut self) -> bool {
        self.drive(&mut Context::from_waker(Waker::noop()));
        !self.ended && self.sender.is_ready()
    }
}
