//! Where others connect to one of the library's ZeroMQ sockets: a listener of our own, which carries
//! the bytes over.
//!
//! The library shakes hands in tasks that outlive its socket, so a connection that is made while an
//! engine is killed would stay open, to nobody. Behind the gate every connection ends with the worker
//! or when it is cut, in whatever state it is, and the port is free at once.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::sim::worker::accept;

#[derive(Debug)]
pub(super) struct Gate {
    listener: TcpListener,
    inner: SocketAddr,
    cutter: Cutter,
}

/// Cuts the connections through one gate.
#[derive(Clone, Debug, Default)]
pub(super) struct Cutter {
    /// Of the connections made since the last cut.
    current: Arc<Mutex<CancellationToken>>,
}

impl Cutter {
    /// Nothing more gets through on those that there are.
    pub(super) fn cut(&self) {
        std::mem::take(&mut *self.current.lock()).cancel();
    }
}

impl Gate {
    pub(super) fn new(listener: TcpListener, inner: SocketAddr) -> Self {
        let cutter = Cutter::default();
        Self {
            listener,
            inner,
            cutter,
        }
    }

    pub(super) fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    pub(super) fn cutter(&self) -> Cutter {
        self.cutter.clone()
    }

    /// Carries for as long as it is polled.
    pub(super) async fn run(self) -> Infallible {
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                Some(_) = connections.join_next() => {}
                outer = accept(&self.listener) => {
                    let cut = self.cutter.current.lock().clone();
                    connections.spawn(carry(outer, self.inner, cut));
                }
            }
        }
    }
}

/// Ends when either side does.
async fn carry(outer: TcpStream, inner: SocketAddr, cut: CancellationToken) {
    tokio::select! {
        // What comes together with a cut does not get through.
        biased;
        () = cut.cancelled() => {}
        carried = try_carry(outer, inner) => if let Err(error) = carried {
            debug!(%error, "event connection ended");
        }
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
