//! A pool of connections to one address: HTTP/1.1, with TLS or without, or over a Unix socket; or HTTP/2.
//!
//! A connection of HTTP/1.1 has no task of its own: the task that waits for a response drives its connection. That
//! saves a wake-up between tasks for every frame, and dropping a response half-way closes the socket at
//! once, which is what makes an engine stop generating.

mod alarm;
mod body;
mod connection;
mod dead_peers;
mod error;
mod http2;
mod resolver;
mod settings;

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fmt, io};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::header::HeaderValue;
use hyper::http::request;
use hyper::{Request, Response, Uri};
use parking_lot::Mutex;
use tokio::net::{TcpStream, UnixStream};

pub use self::body::EngineBody;
use self::connection::Connection;
use self::dead_peers::lose_dead_peers;
pub use self::error::{Error, is_local};
use self::resolver::Resolver;
pub use self::settings::Settings;
use super::BodyError;
use crate::http::io_threads::{self, SHARDS};
use crate::http::tls::{self, Protocol, Socket};
use crate::observe;

/// A connection that the server had closed while it was idle breaks within a round trip after a request was sent. One
/// that breaks later was closed because of the request, or with the server's process.
const STALE_WITHIN: Duration = Duration::from_secs(1);

/// A connection that was idle for less is needed by its own thread soon: a busy one would take it back.
const UNUSED_AFTER: Duration = Duration::from_millis(100);

/// The part of the connect time-out for which a name is looked up before its last addresses are used. A lookup takes
/// milliseconds, unless a packet is lost: resolvers ask again after seconds.
const LOOKUP_PART: u32 = 4;

/// What an address has before the path of a Unix socket.
pub const UNIX: &str = "unix:";
/// What an address has before the `host:port` of a server that speaks HTTP/2 from the first byte.
pub const HTTP2: &str = "h2c://";

/// The connections to one address.
#[derive(Debug)]
pub struct Pool {
    address: String,
    /// Where `host:port` is in the address. Empty for a Unix socket.
    authority: Range<usize>,
    /// What a request names as its host, if it can be a header.
    host: Option<HeaderValue>,
    /// The connections of HTTP/2, if it is spoken.
    http2: Option<Box<http2::Connections>>,
    settings: Settings,
    resolver: Resolver,
    tls: Option<Arc<tls::Client>>,
    /// By I/O thread: a connection is driven by the thread that opened it or took it over.
    idle: [Mutex<Vec<Idle>>; SHARDS],
}

struct Idle {
    connection: Connection,
    since: Instant,
}

impl Idle {
    fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.since)
    }

    /// The connection and since when it was idle, unless the server has closed it.
    fn usable(mut self) -> Option<(Connection, Instant)> {
        let is_usable = self.connection.is_usable();
        is_usable.then_some((self.connection, self.since))
    }
}

impl fmt::Debug for Idle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idle")
            .field("since", &self.since)
            .finish_non_exhaustive()
    }
}

impl Pool {
    /// `address` is `host:port`, with a path that is put before those of requests, if there is one; a name is resolved
    /// at each connect, and has its last addresses while the resolver fails. With [`HTTP2`] before it, HTTP/2 is spoken. Or
    /// it is [`UNIX`] and the path of a socket.
    pub fn new(address: String, settings: Settings) -> Arc<Self> {
        Self::with_tls(address, settings, None)
    }

    /// As [`Pool::new`], over TLS if there is any.
    pub fn with_tls(
        address: String,
        settings: Settings,
        tls: Option<Arc<tls::Client>>,
    ) -> Arc<Self> {
        let has_http2 = address.starts_with(HTTP2);
        let authority = if address.starts_with(UNIX) {
            address.len()..address.len()
        } else {
            let begin = if has_http2 { HTTP2.len() } else { 0 };
            let length = address[begin..].find('/');
            begin..length.map_or(address.len(), |length| begin + length)
        };
        let host = HeaderValue::from_str(host_of(&address[authority.clone()])).ok();
        Arc::new(Self {
            authority,
            host,
            http2: has_http2.then(Box::default),
            address,
            settings,
            resolver: Resolver::default(),
            tls,
            idle: Default::default(),
        })
    }

    /// The address with all that distinguishes it, as [`Pool::new`] has it.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// `host:port`; for a Unix socket, what a request names as its host.
    pub fn authority(&self) -> &str {
        host_of(&self.address[self.authority.clone()])
    }

    /// [`Pool::authority`] as a header.
    pub fn host(&self) -> Option<&HeaderValue> {
        self.host.as_ref()
    }

    fn unix_socket(&self) -> Option<&str> {
        self.address.strip_prefix(UNIX)
    }

    pub fn tls(&self) -> Option<&Arc<tls::Client>> {
        self.tls.as_ref()
    }

    /// Sends a request over a pooled connection, or over a new one if none is idle.
    pub async fn send(
        self: &Arc<Self>,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<EngineBody>, Error> {
        self.send_young(request, Duration::MAX).await
    }

    /// As [`Pool::send`], over no connection that was idle for longer than this.
    pub async fn send_young(
        self: &Arc<Self>,
        request: Request<Full<Bytes>>,
        max_idle: Duration,
    ) -> Result<Response<EngineBody>, Error> {
        if let Some(http2) = &self.http2
            && let Some(connection) = http2.open()
        {
            // Boxed, so that requests of HTTP/1.1 do not carry its state.
            return Box::pin(self.exchange_http2(http2, connection, request)).await;
        }
        let max_idle = max_idle.min(self.settings.idle_connection_timeout);
        let taken = match self.take(max_idle) {
            Some(taken) => Some(taken),
            // Boxed, so that other requests do not carry its state.
            None => Box::pin(self.borrow(max_idle)).await,
        };
        match taken {
            Some((connection, since)) => {
                let sent = observe::now();
                let idle = sent.saturating_duration_since(since);
                let answer = self.exchange(connection, request).await;
                answer.map_err(|error| {
                    if sent.elapsed() < STALE_WITHIN {
                        Error::Stale { error, idle }
                    } else {
                        Error::Broken(error)
                    }
                })
            }
            // Boxed, so that what goes over a pooled connection does not carry the state of a new one.
            None => Box::pin(self.send_anew(request)).await,
        }
    }

    /// Sends a request over a new connection.
    pub async fn send_anew(
        self: &Arc<Self>,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<EngineBody>, Error> {
        let limit = self.settings.connect_timeout;
        let socket = tokio::time::timeout(limit, self.connect())
            .await
            .unwrap_or_else(|_| {
                Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "no connection within the connect time-out",
                ))
            })
            .map_err(Error::Connect)?;
        if let Some(connections) = &self.http2 {
            let sender = Box::pin(http2::over(socket))
                .await
                .map_err(Error::Connect)?;
            let connection = connections.put(sender);
            return Box::pin(self.exchange_http2(connections, connection, request)).await;
        }
        let connection = Connection::over(socket)
            .await
            .map_err(|error| Error::Connect(io::Error::other(error)))?;
        let answer = self.exchange(connection, request).await;
        answer.map_err(|error| {
            // What a worker says of this router's certificate, instead of reading the request.
            let refused = self
                .tls
                .as_ref()
                .and_then(|_| tls::refused_certificate(&error));
            match refused {
                Some(reason) => Error::Connect(io::Error::other(reason)),
                None => Error::Broken(error),
            }
        })
    }

    async fn exchange(
        self: &Arc<Self>,
        connection: Connection,
        mut request: Request<Full<Bytes>>,
    ) -> Result<Response<EngineBody>, hyper::Error> {
        self.below_path(&mut request);
        let (answer, connection) = connection.exchange(request).await?;
        Ok(answer.map(|incoming| EngineBody::of_connection(incoming, connection, self.clone())))
    }

    async fn exchange_http2(
        self: &Arc<Self>,
        connections: &http2::Connections,
        connection: http2::SharedConnection,
        mut request: Request<Full<Bytes>>,
    ) -> Result<Response<EngineBody>, Error> {
        self.below_path(&mut request);
        let authority = self.authority();
        let answer = http2::exchange(connections, connection, request, authority).await?;
        Ok(answer.map(|incoming| EngineBody::of_stream(incoming, self.clone())))
    }

    /// A connection, with TLS its handshake included.
    async fn connect(&self) -> io::Result<Socket> {
        if let Some(path) = self.unix_socket() {
            return UnixStream::connect(path).await.map(Socket::Unix);
        }
        let stream = match self.authority().parse::<SocketAddr>() {
            Ok(address) => TcpStream::connect(address).await?,
            Err(_) => {
                let patience = self.settings.connect_timeout / LOOKUP_PART;
                let addresses = self.resolver.addresses(self.authority(), patience);
                TcpStream::connect(&*addresses.await?).await?
            }
        };
        let _ = stream.set_nodelay(true);
        lose_dead_peers(&stream);
        let Some(tls) = &self.tls else {
            return Ok(Socket::Clear(stream));
        };
        let authority = self.authority();
        let host = authority
            .rsplit_once(':')
            .map_or(authority, |(host, _)| host);
        // On the heap: an attempt needs its place only until it is connected.
        Box::pin(tls.connect(host, stream, Protocol::Http1)).await
    }

    /// The path of the address before that of the request.
    fn below_path(&self, request: &mut Request<Full<Bytes>>) {
        let path = &self.address[self.authority.end..];
        if path.is_empty() {
            return;
        }
        let own = request.uri().path_and_query();
        let target = format!("{path}{}", own.map_or("/", |own| own.as_str()));
        // Both parts are valid, so that the whole is.
        if let Ok(target) = target.parse() {
            *request.uri_mut() = target;
        }
    }

    /// A small GET, read whole: health, models, metrics.
    pub async fn get(
        self: &Arc<Self>,
        path: &str,
        authorization: Option<&HeaderValue>,
        body_bytes_max: usize,
    ) -> Result<(hyper::StatusCode, Bytes), BodyError> {
        let request = Request::get(path);
        self.small(request, authorization, Bytes::new(), body_bytes_max)
            .await
    }

    /// A small POST of JSON, whose answer is read whole.
    pub async fn post(
        self: &Arc<Self>,
        path: &str,
        authorization: Option<&HeaderValue>,
        json: impl Into<Bytes>,
        body_bytes_max: usize,
    ) -> Result<(hyper::StatusCode, Bytes), BodyError> {
        let request = Request::post(path).header(hyper::header::CONTENT_TYPE, "application/json");
        self.small(request, authorization, json.into(), body_bytes_max)
            .await
    }

    async fn small(
        self: &Arc<Self>,
        request: request::Builder,
        authorization: Option<&HeaderValue>,
        body: Bytes,
        body_bytes_max: usize,
    ) -> Result<(hyper::StatusCode, Bytes), BodyError> {
        let request = request.header(hyper::header::HOST, self.authority());
        let (mut parts, ()) = request.body(())?.into_parts();
        if let Some(value) = authorization {
            let name = hyper::header::AUTHORIZATION;
            parts.headers.insert(name, value.clone());
        }
        let build = || Request::from_parts(parts.clone(), Full::new(body.clone()));
        let answer = match self.send(build()).await {
            Err(Error::Stale { .. }) => self.send_anew(build()).await?,
            other => other?,
        };
        let status = answer.status();
        let body = http_body_util::Limited::new(answer.into_body(), body_bytes_max)
            .collect()
            .await?;
        Ok((status, body.to_bytes()))
    }

    /// Closes connections that have been idle for too long.
    pub fn close_expired(&self, now: Instant) {
        for idle in &self.idle {
            let limit = self.settings.idle_connection_timeout;
            idle.lock().retain(|idle| idle.age(now) <= limit);
        }
    }

    /// Closes all idle connections, to make room for others.
    pub fn close_idle(&self) {
        if let Some(http2) = &self.http2 {
            http2.close();
        }
        for idle in &self.idle {
            let closed = std::mem::take(&mut *idle.lock());
            // Sockets are closed without the lock.
            drop(closed);
        }
    }

    /// An idle connection of this thread, and since when it was idle.
    fn take(&self, max_idle: Duration) -> Option<(Connection, Instant)> {
        let now = observe::now();
        loop {
            // The most recently used one, so that surplus connections expire.
            let idle = self
                .shard()
                .lock()
                .pop_if(|idle| idle.age(now) <= max_idle)?;
            if let Some(taken) = idle.usable() {
                return Some(taken);
            }
        }
    }

    /// An idle connection of another thread, moved to this one. Where many threads send to many workers, each pair of them
    /// has few requests, and without this most would find their own connection closed for its age.
    async fn borrow(&self, max_idle: Duration) -> Option<(Connection, Instant)> {
        // A TLS connection's state stays with its socket's thread.
        if self.tls.is_some() || self.unix_socket().is_some() {
            return None;
        }
        let now = observe::now();
        let own = self.shard();
        let mut others = self.idle.iter().filter(|other| !std::ptr::eq(*other, own));
        let (connection, since) = others.find_map(|other| {
            let mut other = other.try_lock()?;
            // The one that its thread would use last.
            let oldest = other.iter().position(|idle| idle.age(now) <= max_idle)?;
            let is_unused = other[oldest].age(now) >= UNUSED_AFTER;
            let idle = is_unused.then(|| other.remove(oldest))?;
            drop(other);
            idle.usable()
        })?;
        let moved = connection.into_stream().and_then(TcpStream::from_std);
        let connection = Connection::over(Socket::Clear(moved.ok()?)).await.ok()?;
        Some((connection, since))
    }

    fn put(&self, connection: Connection) {
        let mut idle = self.shard().lock();
        if idle.len() < self.settings.max_idle_connections as usize {
            idle.push(Idle {
                connection,
                since: observe::now(),
            });
        }
    }

    fn shard(&self) -> &Mutex<Vec<Idle>> {
        &self.idle[io_threads::index() % SHARDS]
    }
}

/// That of a Unix socket is empty.
fn host_of(authority: &str) -> &str {
    match authority {
        "" => "localhost",
        authority => authority,
    }
}

/// A request target in origin form, which is what HTTP/1.1 sends to a server.
pub fn origin_form(uri: &Uri) -> Uri {
    uri.path_and_query()
        .cloned()
        .map(Uri::from)
        .unwrap_or_default()
}

#[cfg(test)]
mod tests;
