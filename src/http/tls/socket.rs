//! A connection with or without TLS.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::{client, server};

#[derive(Debug)]
pub enum Socket {
    Clear(TcpStream),
    Unix(UnixStream),
    /// Accepted here.
    Accepted(Box<server::TlsStream<Early>>),
    /// Opened here.
    Opened(Box<client::TlsStream<TcpStream>>),
}

impl Socket {
    pub fn is_tls(&self) -> bool {
        !matches!(self, Self::Clear(_) | Self::Unix(_))
    }

    /// Sends the end of a TLS connection as far as it goes without waiting.
    pub async fn close(&mut self) {
        if self.is_tls() {
            std::future::poll_fn(|cx| {
                // A client that takes nothing more sees the end of the connection itself.
                let _ = Pin::new(&mut *self).poll_shutdown(cx);
                Poll::Ready(())
            })
            .await;
        }
    }
}

macro_rules! each {
    ($socket:expr, $stream:ident => $call:expr) => {
        match $socket {
            Socket::Clear($stream) => $call,
            Socket::Unix($stream) => $call,
            Socket::Accepted($stream) => $call,
            Socket::Opened($stream) => $call,
        }
    };
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        each!(self.get_mut(), stream => Pin::new(stream).poll_read(cx, buffer))
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        each!(self.get_mut(), stream => Pin::new(stream).poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        each!(self.get_mut(), stream => Pin::new(stream).poll_write_vectored(cx, slices))
    }

    fn is_write_vectored(&self) -> bool {
        each!(self, stream => stream.is_write_vectored())
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(self.get_mut(), stream => Pin::new(stream).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(self.get_mut(), stream => Pin::new(stream).poll_shutdown(cx))
    }
}

/// A socket of which some bytes were read before its TLS handshake: reads return them first.
#[derive(Debug)]
pub struct Early {
    pub(super) stream: TcpStream,
    pub(super) bytes: Bytes,
}

impl AsyncRead for Early {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.bytes.is_empty() {
            return Pin::new(&mut self.stream).poll_read(cx, buffer);
        }
        let length = self.bytes.len().min(buffer.remaining());
        buffer.put_slice(&self.bytes.split_to(length));
        Poll::Ready(Ok(()))
    }
}

/// What is written to such a type is written to one of its fields.
macro_rules! write_to {
    ($of:ty, $stream:ident) => {
        impl AsyncWrite for $of {
            fn poll_write(
                mut self: Pin<&mut Self>,
                cx: &mut Context<'_>,
                bytes: &[u8],
            ) -> Poll<io::Result<usize>> {
                Pin::new(&mut self.$stream).poll_write(cx, bytes)
            }

            fn poll_write_vectored(
                mut self: Pin<&mut Self>,
                cx: &mut Context<'_>,
                slices: &[IoSlice<'_>],
            ) -> Poll<io::Result<usize>> {
                Pin::new(&mut self.$stream).poll_write_vectored(cx, slices)
            }

            fn is_write_vectored(&self) -> bool {
                self.$stream.is_write_vectored()
            }

            fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                Pin::new(&mut self.$stream).poll_flush(cx)
            }

            fn poll_shutdown(
                mut self: Pin<&mut Self>,
                cx: &mut Context<'_>,
            ) -> Poll<io::Result<()>> {
                Pin::new(&mut self.$stream).poll_shutdown(cx)
            }
        }
    };
}
pub(in crate::http) use write_to;

write_to!(Early, stream);
