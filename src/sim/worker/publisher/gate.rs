//! A TCP proxy in front of a ZeroMQ socket, so that its connections can be closed at any time.
//!
//! The ZeroMQ library does its handshakes in tasks that outlive the socket: a connection made while the engine is being
//! killed would stay open. Behind the gate every connection ends with the worker or when it is cut, and the port is
//! free at once.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::sim::worker::net::accept;

#[derive(Debug)]
pub(super) struct Gate {
    pub(super) listener: TcpListener,
    /// Where the socket listens.
    pub(super) inner: SocketAddr,
    pub(super) cutter: Cutter,
}

/// Closes the connections through one gate.
#[derive(Clone, Debug, Default)]
pub(super) struct Cutter {
    /// Cancels the connections made since the last cut.
    current: Arc<Mutex<CancellationToken>>,
}

impl Cutter {
    /// Closes all current connections.
    pub(super) fn cut(&self) {
        std::mem::take(&mut *self.current.lock()).cancel();
    }
}

impl Gate {
    /// Forwards connections while it is polled.
    pub(super) async fn run(self) -> Infallible {
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                Some(_) = connections.join_next() => {}
                outer = accept(&self.listener) => {
                    let cut = self.cutter.current.lock().clone();
                    connections.spawn(forward(outer, self.inner, cut));
                }
            }
        }
    }
}

/// Forwards bytes until either side closes the connection.
async fn forward(outer: TcpStream, inner: SocketAddr, cut: CancellationToken) {
    tokio::select! {
        // Bytes that arrive together with a cut are not forwarded.
        biased;
        () = cut.cancelled() => {}
        result = try_forward(outer, inner) => if let Err(error) = result {
            debug!(%error, "KV event connection closed");
        }
    }
}

async fn try_forward(mut outer: TcpStream, inner: SocketAddr) -> io::Result<u64> {
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
