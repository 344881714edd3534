//! HTTP/2 to a server of which it is known that it speaks it. One connection for each I/O thread carries all of the thread's
//! requests; one that is dropped half-way resets its own stream and no other.

use std::io;
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

/// The connections, by I/O thread.
#[derive(Debug, Default)]
pub(super) struct Connections([Mutex<Option<Sender>>; SHARDS]);

impl Connections {
    /// This thread's connection, if it is open.
    pub(super) fn open(&self) -> Option<Sender> {
        let sender = self.shard().lock().clone()?;
        (!sender.is_closed()).then_some(sender)
    }

    /// Has later requests use this connection.
    pub(super) fn put(&self, sender: &Sender) {
        *self.shard().lock() = Some(sender.clone());
    }

    /// Lets the connections end with the requests that they carry.
    pub(super) fn close(&self) {
        for shard in &self.0 {
            let closed = shard.lock().take();
            drop(closed);
        }
    }

    fn shard(&self) -> &Mutex<Option<Sender>> {
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

/// `authority`: of the server.
pub(super) async fn exchange(
    mut sender: Sender,
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
    let answer = sender.send_request(request).await;
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
