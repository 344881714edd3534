//! HTTP/2 to a server of which it is known that it speaks it. One connection for each I/O thread carries all of the thread's
//! new requests; one that is dropped half-way resets its own stream and no other. If its connection answered nothing meanwhile,
//! later requests get a new one. The old one ends with what it carries, so that there are never more than requests that run,
//! but for the thread's own.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http2;
use hyper::header;
use hyper::{Request, Response, Uri};
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;

use super::error::{Error, is_unprocessed};
use crate::http::io_threads::{self, SHARDS};
use crate::http::tls::Socket;

pub(super) type Sender = http2::SendRequest<Full<Bytes>>;

/// What an answer may have sent that its client has not taken.
const ANSWER_WINDOW_BYTES: u32 = 256 << 10;
/// More than the answers of a connection can hold together: from a smaller window, a few clients that read slowly would take all,
/// and the answers of all others would stand still. The library also ends a connection whose small frames that nobody has read
/// yet are too many for half of the window.
const CONNECTION_WINDOW_BYTES: u32 = 1 << 30;

/// One that requests share.
#[derive(Clone, Debug)]
pub(super) struct SharedConnection {
    sender: Sender,
    /// Requests whose answers have begun, or that have failed.
    answered: Arc<AtomicU64>,
}

/// The connections, by I/O thread.
#[derive(Debug, Default)]
pub(super) struct Connections([Mutex<Option<SharedConnection>>; SHARDS]);

impl Connections {
    /// This thread's connection, if it is open.
    pub(super) fn open(&self) -> Option<SharedConnection> {
        let connection = self.shard().lock().clone()?;
        (!connection.sender.is_closed()).then_some(connection)
    }

    /// Has later requests use this connection.
    pub(super) fn put(&self, sender: Sender) -> SharedConnection {
        let connection = SharedConnection {
            sender,
            answered: Arc::default(),
        };
        *self.shard().lock() = Some(connection.clone());
        connection
    }

    /// Has later requests use another connection than the one with this count. It ends with the requests that it carries.
    fn forget(&self, answered: &Arc<AtomicU64>) {
        let is_same = |known: &mut SharedConnection| Arc::ptr_eq(&known.answered, answered);
        let forgotten = self.shard().lock().take_if(is_same);
        drop(forgotten);
    }

    /// Lets the connections end with the requests that they carry.
    pub(super) fn close(&self) {
        for shard in &self.0 {
            let closed = shard.lock().take();
            drop(closed);
        }
    }

    fn shard(&self) -> &Mutex<Option<SharedConnection>> {
        &self.0[io_threads::index() % SHARDS]
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "the connection ends with its last request, and those are waited for"
)]
pub(super) async fn over(socket: Socket) -> io::Result<Sender> {
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .initial_stream_window_size(ANSWER_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES);
    let handshake = builder.handshake(TokioIo::new(socket)).await;
    let (sender, driver) = handshake.map_err(io::Error::other)?;
    drop(tokio::spawn(driver));
    Ok(sender)
}

/// A request that waits for its answer. If it is given up and its connection has answered nothing meanwhile, the
/// connection may answer nothing any more, although its server takes others.
struct Unanswered<'a> {
    connections: &'a Connections,
    answered: Arc<AtomicU64>,
    answered_before: u64,
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if self.answered.load(Relaxed) == self.answered_before {
            self.connections.forget(&self.answered);
        }
    }
}

/// `authority`: of the server.
pub(super) async fn exchange(
    connections: &Connections,
    connection: SharedConnection,
    mut request: Request<Full<Bytes>>,
    authority: &str,
) -> Result<Response<Incoming>, Error> {
    request.headers_mut().remove(header::HOST);
    let target = request.uri().path_and_query();
    let target = target.map_or("/", |target| target.as_str());
    let target = Uri::builder()
        .scheme("http")
        .authority(authority)
        .path_and_query(target);
    if let Ok(target) = target.build() {
        *request.uri_mut() = target;
    }
    let SharedConnection {
        mut sender,
        answered,
    } = connection;
    let unanswered = Unanswered {
        connections,
        answered_before: answered.load(Relaxed),
        answered,
    };
    let answer = sender.send_request(request).await;
    unanswered.answered.fetch_add(1, Relaxed);
    drop(unanswered);
    answer.map_err(|error| {
        if !is_unprocessed(&error) {
            return Error::Broken(error);
        }
        Error::Stale {
            error,
            idle: Duration::ZERO,
        }
    })
}
