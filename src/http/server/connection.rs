//! The life of one connection: it shakes hands if there is TLS, waits for bytes, is served as HTTP/1.1 or HTTP/2 by what
//! they are, and ends by its client, by a time-out or in the drain.
//!
//! An HTTP/1.1 connection that has been between two requests for a while is taken apart: hyper's state and buffers
//! (about 30 KB) are dropped, and the socket alone waits for the next request.

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http_body::Body;
use hyper::body::Incoming;
use hyper::header::{CONNECTION, EXPECT, HeaderValue, UPGRADE};
use hyper::server::conn::{http1, http2};
use hyper::service::{Service, service_fn};
use hyper::{Request, Response, Version};
use hyper_util::rt::TokioIo;
use prometheus::IntCounter;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::Sleep;
use tokio_util::sync::WaitForCancellationFutureOwned;
use tracing::debug;

use super::activity::{Activity, Limits, Verdict};
use super::body::{BusyBody, RequestBody};
use super::discard::discard;
use super::head::{MAX_HTTP2_HEAD, MAX_REQUEST_HEAD, OversizedHead, is_too_large};
use super::malformed::OnMalformed;
use super::metrics::Metrics;
use super::protocol::protocol_of;
use super::settings::Settings;
use super::upgrade::{Upgrade, Upgraded};
use super::watched::Watched;
use super::window::{STREAM_WINDOW_BYTES, Window};
use crate::http::drain::Tasks;
use crate::http::tls::{self, ClientNames, Protocol, Socket};
use crate::http::{BodyError, proxy_protocol};
use crate::observe;
use crate::observe::metrics::Counted;

/// While the maximum of connections is open, one without a request is closed after this time, so that others get a
/// turn; and in the drain, which would wait for a client of HTTP/2 that has gone and answers no GOAWAY.
const SHORT_IDLE: Duration = Duration::from_secs(5);
/// A connection without a request for this long gives its buffers back. Clients that send one request after the other
/// keep theirs.
const KEEPS_BUFFERS: Duration = Duration::from_secs(1);
/// hyper reads an HTTP/1.1 head or a part of a body into a buffer of up to this size.
const MAX_BUFFER_BYTES: usize = MAX_REQUEST_HEAD as usize;
/// What is read of a connection before its protocol is known.
const FIRST_BYTES: usize = 24;

/// What the connections of one listener have in common.
#[derive(Debug)]
pub(super) struct Listener<H> {
    pub(super) settings: Settings,
    pub(super) metrics: Metrics,
    pub(super) handler: H,
    pub(super) on_malformed: Option<OnMalformed>,
    pub(super) tls: Option<Arc<tls::Server>>,
    pub(super) tasks: Tasks,
    pub(super) slots: Arc<Semaphore>,
}

impl<H, F, B> Listener<H>
where
    H: Fn(Request<RequestBody>, IpAddr) -> F + Send + Sync + 'static,
    F: Future<Output = Response<B>> + Send + 'static,
    B: Body<Data = Bytes, Error = BodyError> + Unpin + Send + 'static,
{
    pub(super) async fn serve(self: Arc<Self>, mut stream: TcpStream, mut peer: IpAddr) {
        // A token is a small packet; Nagle's algorithm would hold it back.
        let _ = stream.set_nodelay(true);
        let Some((client, early)) = self.proxy_header(&mut stream, peer).await else {
            return;
        };
        peer = client;
        let Some((mut stream, early, names)) = self.secure(stream, early, peer).await else {
            return;
        };
        let limits = Limits::new(&self.settings);
        let activity = Arc::new(Activity::new(observe::now()));
        let stopped = pin!(self.tasks.stopped());
        let ending = pin!(self.tasks.ending());
        let aborted = pin!(self.tasks.aborted());
        let tick = pin!(tokio::time::sleep(limits.look_every()));
        let mut watch = Watch {
            activity: &activity,
            limits,
            tasks: &self.tasks,
            slots: &self.slots,
            metrics: &self.metrics,
            tick,
            stopped,
            ending,
            aborted,
            is_registered: false,
            has_woken_streams: false,
            is_finishing: false,
            asked_to_close: None,
        };
        let handler = self.clone();
        let upgrade = Upgrade::default();
        let window = Window::new(self.settings.http2_connection_window);
        let service = service_fn({
            let activity = activity.clone();
            let upgrade = upgrade.clone();
            move |request: Request<Incoming>| {
                let busy = activity.begin(request.version());
                let is_promised = request.headers().contains_key(EXPECT);
                let mut request = request.map(|body| {
                    RequestBody::new(body, &activity, busy.stream(), &window, is_promised)
                });
                if is_too_large(&request) {
                    request.extensions_mut().insert(OversizedHead);
                }
                if let Some(names) = &names {
                    request.extensions_mut().insert(names.clone());
                }
                if request.headers().contains_key(UPGRADE) && request.version() < Version::HTTP_2 {
                    request.extensions_mut().insert(upgrade.clone());
                }
                // Boxed, because hyper keeps room for it while the body is sent; and here, because an `async` block that
                // awaits it would have room for it twice and copy it from one place to the other. Allocated first: then
                // only what it starts with is written, and not all 20 kB of room that it has.
                let place = Box::new_uninit();
                let response = Box::into_pin(Box::write(place, (handler.handler)(request, peer)));
                let activity = activity.clone();
                async move {
                    let mut response = response.await;
                    if activity.leaves_body_unread().await {
                        // hyper closes the connection then: what follows is no request's head.
                        let close = HeaderValue::from_static("close");
                        response.headers_mut().insert(CONNECTION, close);
                    }
                    Ok::<_, Infallible>(response.map(|body| BusyBody::new(body, busy)))
                }
            }
        });
        match first_bytes(&mut stream, early, protocol_of, &mut watch).await {
            Some((Protocol::Http1, early)) => {
                self.serve_http1((stream, early), service, &upgrade, &mut watch)
                    .await;
            }
            Some((Protocol::Http2, early)) => {
                self.serve_http2((stream, early), service, &mut watch).await;
            }
            None => stream.close().await,
        }
    }
}

impl<H> Listener<H> {
    async fn serve_http2<S, B>(
        &self,
        (stream, early): (Socket, Bytes),
        service: S,
        watch: &mut Watch<'_>,
    ) where
        S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible>,
        S::Future: Send + 'static,
        B: Body<Data = Bytes, Error = BodyError> + Send + 'static,
    {
        let activity = watch.activity;
        let executor = Executor {
            tasks: self.tasks.clone(),
            activity: activity.clone(),
            reset: self.metrics.reset.clone(),
        };
        let max_head = match self.on_malformed {
            Some(_) => MAX_HTTP2_HEAD,
            None => MAX_REQUEST_HEAD,
        };
        let mut builder = http2::Builder::new(executor);
        builder
            .max_concurrent_streams(self.settings.max_http2_streams)
            .max_header_list_size(max_head)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(self.settings.http2_connection_window);
        let socket = Watched::new(stream, early, activity.clone(), None, &self.metrics);
        let mut connection = Box::pin(builder.serve_connection(TokioIo::new(socket), service));
        let finish = |connection: Pin<&mut _>| http2::Connection::graceful_shutdown(connection);
        watch.drive(connection.as_mut(), finish).await;
    }

    /// Serves requests, takes the connection apart while it is between two for a while, and hands it over if one asks for that.
    async fn serve_http1<S, B>(
        &self,
        (mut stream, mut early): (Socket, Bytes),
        mut service: S,
        upgrade: &Upgrade,
        watch: &mut Watch<'_>,
    ) where
        S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Unpin,
        B: Body<Data = Bytes, Error = BodyError> + Unpin + 'static,
    {
        let mut builder = http1::Builder::new();
        // Our own limits cover head and idle time without a timer for each request.
        builder.header_read_timeout(None);
        builder.max_buf_size(MAX_BUFFER_BYTES);
        // A buffer may grow beyond its limit.
        builder.max_header_size(MAX_BUFFER_BYTES);
        loop {
            let (activity, on_malformed) = (watch.activity.clone(), self.on_malformed.clone());
            let socket = Watched::new(stream, early, activity, on_malformed, &self.metrics);
            let connection = builder.serve_connection(TokioIo::new(socket), service);
            let mut connection = Box::new(connection);
            let finish = |connection: Pin<&mut _>| http1::Connection::graceful_shutdown(connection);
            let driven = watch.drive(Pin::new(&mut *connection), finish).await;
            let new_owner = upgrade.take();
            if driven == Driven::Cut && new_owner.is_none() {
                return;
            }
            let parts = connection.into_parts();
            service = parts.service;
            let (socket, unread) = parts.io.into_inner().into_parts();
            if driven == Driven::Ended && new_owner.is_none() {
                drop((parts.read_buf, unread));
                if watch.activity.leaves_bytes_unread() {
                    // Boxed, because few connections need its place.
                    let discarded = Box::pin(discard(socket));
                    tokio::select! {
                        () = discarded => {}
                        () = watch.aborted.as_mut() => {}
                    }
                }
                return;
            }
            stream = socket;
            let mut left = BytesMut::from(parts.read_buf);
            left.extend_from_slice(&unread);
            if let Some(new_owner) = new_owner {
                let send_timeout = self.settings.send_timeout;
                drop(service);
                return new_owner(Upgraded::new(stream, left.freeze(), send_timeout)).await;
            }
            // A connection keeps the protocol that it began with.
            let any = |bytes: &[u8]| (!bytes.is_empty()).then_some(Protocol::Http1);
            let _parked = Counted::new(&self.metrics.parked);
            match first_bytes(&mut stream, left.freeze(), any, watch).await {
                Some((_, next)) => early = next,
                None => return stream.close().await,
            }
        }
    }

    /// The client's address and what has been read behind the PROXY protocol's header, if the listener expects one. `None` if it
    /// did not come, which was counted.
    async fn proxy_header(&self, stream: &mut TcpStream, peer: IpAddr) -> Option<(IpAddr, Bytes)> {
        if !self.settings.proxy_protocol {
            return Some((peer, Bytes::new()));
        }
        let timeout = self.settings.header_timeout;
        let header = tokio::select! {
            header = proxy_protocol::read(stream, timeout) => header,
            () = self.tasks.stopped() => return None,
        };
        match header {
            Ok((client, rest)) => Some((client.unwrap_or(peer), rest)),
            Err(error) => {
                let closed = &self.metrics.closed;
                closed.with_label_values(&["proxy_header"]).inc();
                debug!(%peer, %error, "client connection closed: no PROXY protocol header");
                None
            }
        }
    }

    /// Shakes hands, if there is TLS. `None` if that failed, which was counted.
    async fn secure(
        &self,
        stream: TcpStream,
        early: Bytes,
        peer: IpAddr,
    ) -> Option<(Socket, Bytes, Option<ClientNames>)> {
        let Some(tls) = &self.tls else {
            return Some((Socket::Clear(stream), early, None));
        };
        // On the heap, because a connection needs its place only for a moment.
        let accepted = tokio::select! {
            accepted = Box::pin(tls.accept(stream, early)) => accepted,
            () = self.tasks.stopped() => return None,
        };
        match accepted {
            Ok((stream, names)) => Some((stream, Bytes::new(), names)),
            Err(error) => {
                debug!(%peer, %error, "client connection closed: TLS handshake failed");
                None
            }
        }
    }
}

/// Runs HTTP/2 streams as tasks that the drain waits for.
#[derive(Clone)]
struct Executor {
    tasks: Tasks,
    activity: Arc<Activity>,
    reset: IntCounter,
}

impl<F> hyper::rt::Executor<F> for Executor
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, task: F) {
        let Some(watch) = self.activity.take_newest_stream() else {
            return self.tasks.spawn(task);
        };
        let reset = self.reset.clone();
        self.tasks.spawn(async move {
            if watch.run(task).await {
                reset.inc();
            }
        });
    }
}

/// Reads until `protocol` knows what the bytes are. `None` if the connection ends before.
async fn first_bytes(
    stream: &mut Socket,
    early: Bytes,
    protocol: impl Fn(&[u8]) -> Option<Protocol>,
    watch: &mut Watch<'_>,
) -> Option<(Protocol, Bytes)> {
    if let Some(protocol) = protocol(&early) {
        return Some((protocol, early));
    }
    let mut bytes = [0; FIRST_BYTES];
    // As few as the protocol left open.
    let mut length = early.len();
    bytes[..length].copy_from_slice(&early);
    poll_fn(|cx| {
        loop {
            if let Step::Finish | Step::Close = watch.poll(cx) {
                return Poll::Ready(None);
            }
            let mut buffer = ReadBuf::new(&mut bytes[length..]);
            if ready!(Pin::new(&mut *stream).poll_read(cx, &mut buffer)).is_err() {
                return Poll::Ready(None);
            }
            let read = buffer.filled().len();
            if read == 0 {
                return Poll::Ready(None);
            }
            length += read;
            watch.activity.on_read(&bytes[..length]);
            if let Some(protocol) = protocol(&bytes[..length]) {
                let bytes = Bytes::copy_from_slice(&bytes[..length]);
                return Poll::Ready(Some((protocol, bytes)));
            }
        }
    })
    .await
}

/// What a look at the time-outs and the drain asks for.
enum Step {
    Go,
    /// The connection has been between two requests for a while.
    Park,
    /// Finish what runs and close. Comes once for each reason.
    Finish,
    /// Close at once.
    Close,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Driven {
    Ended,
    /// By a time-out or by the end of the drain.
    Cut,
    /// Between two requests.
    Parked,
}

/// Watches a connection's time-outs and the drain.
struct Watch<'a> {
    activity: &'a Arc<Activity>,
    limits: Limits,
    tasks: &'a Tasks,
    slots: &'a Semaphore,
    metrics: &'a Metrics,
    tick: Pin<&'a mut Sleep>,
    stopped: Pin<&'a mut WaitForCancellationFutureOwned>,
    ending: Pin<&'a mut WaitForCancellationFutureOwned>,
    aborted: Pin<&'a mut WaitForCancellationFutureOwned>,
    is_registered: bool,
    /// For the last part of the drain.
    has_woken_streams: bool,
    is_finishing: bool,
    /// When the client was asked to close the connection, which was idle or took nothing.
    asked_to_close: Option<Instant>,
}

impl Watch<'_> {
    /// Runs a connection until it ends, or may be parked.
    async fn drive<C, E>(
        &mut self,
        mut connection: Pin<&mut C>,
        finish: impl Fn(Pin<&mut C>),
    ) -> Driven
    where
        C: Future<Output = Result<(), E>>,
        E: std::fmt::Display,
    {
        poll_fn(|cx| {
            match self.poll(cx) {
                Step::Go => {}
                Step::Park => return Poll::Ready(Driven::Parked),
                Step::Finish => finish(connection.as_mut()),
                Step::Close => return Poll::Ready(Driven::Cut),
            }
            if let Err(error) = ready!(connection.as_mut().poll(cx)) {
                debug!(%error, "client connection ended");
            }
            Poll::Ready(Driven::Ended)
        })
        .await
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Step {
        if !self.is_registered {
            // Once is enough: the task keeps its waker, and the flags below show what woke it.
            self.is_registered = true;
            let _ = self.stopped.as_mut().poll(cx);
            // Its requests look whether it has begun when the connection is polled.
            let _ = self.ending.as_mut().poll(cx);
            let _ = self.aborted.as_mut().poll(cx);
        }
        if self.tasks.last_part().has_begun() && !self.has_woken_streams {
            // An HTTP/2 stream is a task of its own: the connection's does not poll it.
            self.has_woken_streams = true;
            self.activity.wake_streams();
        }
        if self.tasks.is_stopping() && !self.is_finishing {
            self.is_finishing = true;
            return Step::Finish;
        }
        if self.is_finishing && self.tasks.is_aborted() {
            return Step::Close;
        }
        if self.tick.as_mut().poll(cx).is_pending() {
            return Step::Go;
        }
        let (due, now) = (self.tick.deadline(), tokio::time::Instant::now());
        self.tick.as_mut().reset(now + self.limits.look_every());
        let _ = self.tick.as_mut().poll(cx);
        self.on_tick(now.saturating_duration_since(due))
    }

    /// A look was due, so long ago.
    fn on_tick(&mut self, late: Duration) -> Step {
        if late >= self.limits.look_every() {
            // This process was paused. What the client did meanwhile is read before the next look.
            return Step::Go;
        }
        self.look()
    }

    fn look(&mut self) -> Step {
        let now = observe::now();
        let limits = if self.is_finishing || self.slots.available_permits() == 0 {
            self.limits.idle_at_most(SHORT_IDLE)
        } else {
            self.limits
        };
        self.activity.end_stalled_streams(now, &limits);
        let verdict = match self.activity.check(now, &limits) {
            Verdict::Fine => {
                let is_parkable = self.activity.is_between_requests(now, KEEPS_BUFFERS);
                return if is_parkable && !self.is_finishing && self.asked_to_close.is_none() {
                    Step::Park
                } else {
                    Step::Go
                };
            }
            verdict => verdict,
        };
        if let Some(asked) = self.asked_to_close {
            // A client that reads on after a while finds the GOAWAY; one that does not react is cut off.
            let is_patient = verdict == Verdict::NotReading && now - asked <= limits.send;
            return if is_patient { Step::Go } else { Step::Close };
        }
        let (reason, is_graceful) = match verdict {
            Verdict::SlowHead => ("header_timeout", false),
            // GOAWAY says to an HTTP/2 client which of its requests were not seen. Over HTTP/1 nothing can be said.
            Verdict::NotReading => ("send_timeout", self.activity.is_http2()),
            Verdict::Idle | Verdict::Fine => ("idle", true),
        };
        self.metrics.closed.with_label_values(&[reason]).inc();
        if is_graceful {
            self.asked_to_close = Some(now);
            return Step::Finish;
        }
        Step::Close
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::metrics::Registry;

    /// A connection that has been without a request for twice [`SHORT_IDLE`].
    fn with_idle(check: impl FnOnce(&mut Watch<'_>)) {
        let limits = Limits::new(&Settings::default());
        let activity = Arc::new(Activity::new(observe::now() - 2 * SHORT_IDLE));
        let (tasks, slots) = (Tasks::default(), Semaphore::new(1));
        let metrics = Metrics::new(&Registry::default());
        let tick = pin!(tokio::time::sleep(limits.look_every()));
        let stopped = pin!(tasks.stopped());
        let ending = pin!(tasks.ending());
        let aborted = pin!(tasks.aborted());
        check(&mut Watch {
            activity: &activity,
            limits,
            tasks: &tasks,
            slots: &slots,
            metrics: &metrics,
            tick,
            stopped,
            ending,
            aborted,
            is_registered: false,
            has_woken_streams: false,
            is_finishing: false,
            asked_to_close: None,
        });
    }

    #[tokio::test]
    async fn a_drain_does_not_wait_for_the_idle_timeout_of_a_client_that_has_gone() {
        with_idle(|watch| {
            assert!(matches!(watch.look(), Step::Park));
            watch.is_finishing = true;
            assert!(matches!(watch.look(), Step::Finish));
            assert!(matches!(watch.look(), Step::Close));
        });
    }

    #[tokio::test]
    async fn after_a_pause_of_this_process_a_client_is_read_before_its_time_is_over() {
        with_idle(|watch| {
            watch.limits = watch.limits.idle_at_most(SHORT_IDLE);
            assert!(matches!(watch.on_tick(SHORT_IDLE), Step::Go));
            assert!(matches!(watch.on_tick(Duration::ZERO), Step::Finish));
        });
    }
}
