//! Where others connect to one of the library's ZeroMQ sockets: a listener of our own, which carries
//! the bytes over.
//!
//! The library shakes hands in tasks that outlive its socket, so a connection that is made while an
//! engine is killed would stay open, to nobody. Behind the gate every connection ends with the worker,
//! and its port is free at once.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;

use tokio::net::TcpListener;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tracing::debug;

use super::super::accept;

#[derive(Debug)]
pub(super) struct Gate {
    listener: TcpListener,
    inner: SocketAddr,
}

impl Gate {
    pub(super) fn new(listener: TcpListener, inner: SocketAddr) -> Self {
        Self { listener, inner }
    }

    pub(super) fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Carries for as long as it is polled.
    pub(super) async fn run(self) -> Infallible {
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                Some(_) = connections.join_next() => {}
                outer = accept(&self.listener) => {
                    connections.spawn(carry(outer, self.inner));
                }
            }
        }
    }
}

/// Ends when either side does.
async fn carry(outer: TcpStream, inner: SocketAddr) {
    if let Err(error) = try_carry(outer, inner).await {
        debug!(%error, "event connection ended");
    }
}

async fn try_carry(mut outer: TcpStream, inner: SocketAddr) -> io::Result<u64> {
    let mut inner = TcpStream::connect(inner).await?;
    outer.set_nodelay(true)?;
    inner.set_nodelay(true)?;
    let (mut outer_read, mut outer_write) = outer.split();
    let (mut inner_read, mut inner_write) = inner.split();
    tokio::select! {
        copied = tokio::io::copy(&mut outer_read, &mut inner_write) => copied,
        copied = tokio::io::copy(&mut inner_read, &mut outer_write) => copied,
    }
}
