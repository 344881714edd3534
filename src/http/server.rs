//! The accept loop, and the life of one connection: HTTP/1.1 or cleartext HTTP/2 (prior knowledge), a
//! maximum of connections, and time-outs for idle connections, slow request heads and clients that do
//! not read their response.

mod activity;

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use hyper_util::server::conn::auto;
use prometheus::{IntCounter, IntCounterVec, IntGauge};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tracing::debug;

use self::activity::{Activity, Busy, Limits, Verdict, Watched};
use super::accept::{Accepted, Acceptor};
use super::drain::Tasks;
use super::io_threads::IoThreads;
use super::{BodyError, proxy_protocol};
use crate::observe;
use crate::observe::metrics::Registry;
use crate::units::DurationText;

/// Connections of clients.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Connections that are served at a time; more wait in the kernel's backlog. 16,384 streams need about 1 GB
    /// of memory for sockets and tasks.
    #[schemars(range(min = 1))]
    pub max_connections: u32,
    /// From the first byte of a request to the end of its header; then the connection is closed.
    #[serde(with = "DurationText")]
    pub header_timeout: Duration,
    /// A connection without a request is closed after this time. Common load balancers close theirs after 60 s
    /// and should be first, so that they send no request into a connection that is being closed.
    #[serde(with = "DurationText")]
    pub idle_timeout: Duration,
    /// A connection is closed, and an HTTP/2 stream reset, if the client takes no byte of a waiting response for
    /// this long.
    #[serde(with = "DurationText")]
    pub send_timeout: Duration,
    /// Requests at a time on one HTTP/2 connection.
    #[schemars(range(min = 1))]
    pub max_http2_streams: u32,
    /// Each connection must begin with a PROXY protocol header (version 1 or 2), which names the client; others
    /// are closed.
    pub proxy_protocol: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_connections: 16_384,
            header_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(75),
            send_timeout: Duration::from_secs(60),
            max_http2_streams: 1_024,
            proxy_protocol: false,
        }
    }
}

/// A listener's metrics.
#[derive(Clone, Debug)]
pub struct Metrics {
    connections: IntGauge,
    accepted: IntCounter,
    at_limit: IntCounter,
    accept_errors: IntCounter,
    closed: IntCounterVec,
    reset: IntCounter,
}

impl Metrics {
    pub fn new(registry: &Registry) -> Self {
        Self {
            connections: registry
                .gauge("warmroute_connections", "Open client connections."),
            accepted: registry.counter(
                "warmroute_connections_accepted_total",
                "Accepted client connections.",
            ),
            at_limit: registry.counter(
                "warmroute_connections_limit_reached_total",
                "Times that accepting paused because the maximum of connections was open.",
            ),
            accept_errors: registry.counter(
                "warmroute_accept_errors_total",
                "Client connections that could not be accepted, mostly for lack of file descriptors.",
            ),
            closed: registry.counters(
                "warmroute_connections_closed_total",
                "Client connections that the router closed, by reason: idle, header_timeout, send_timeout, \
                 proxy_header (missing or malformed).",
                &["reason"],
            ),
            reset: registry.counter(
                "warmroute_streams_reset_total",
                "HTTP/2 streams that the router reset because their client took no byte of a waiting response for the \
                 send time-out. Other streams of the connection go on.",
            ),
        }
    }
}

/// While the maximum of connections is open, one without a request is closed after this time, so that others get a
/// turn.
const IDLE_AT_LIMIT: Duration = Duration::from_secs(5);

/// Accepts connections until the drain begins. Each runs on one of `io_threads`, and the drain waits for
/// it: it finishes the requests that have started and closes. `handler` gets each request with the address
/// of its connection's other end.
pub async fn serve<H, F, B>(
    listener: TcpListener,
    settings: Settings,
    metrics: Metrics,
    handler: H,
    io_threads: IoThreads,
    tasks: Tasks,
) where
    H: Fn(Request<Incoming>, IpAddr) -> F + Clone + Send + 'static,
    F: Future<Output = Response<B>> + Send + 'static,
    B: Body<Data = Bytes, Error = BodyError> + Unpin + Send + 'static,
{
    let max = settings.max_connections as usize;
    let mut acceptor = Acceptor::new(listener, "clients", max, tasks.clone());
    let slots = acceptor.slots().clone();
    loop {
        if slots.available_permits() == 0 {
            metrics.at_limit.inc();
        }
        let accepted = acceptor.next(|| metrics.accept_errors.inc()).await;
        let Some(Accepted { stream, peer, slot }) = accepted else {
            return;
        };
        metrics.accepted.inc();
        let open = OpenConnection::new(metrics.connections.clone());
        let (settings, metrics, handler, tasks, slots) = (
            settings.clone(),
            metrics.clone(),
            handler.clone(),
            tasks.clone(),
            slots.clone(),
        );
        let tracker = tasks.clone();
        let spawned = io_threads.spawn_connection(stream, move |stream| {
            tracker.track(async move {
                connection(stream, peer, settings, metrics, handler, tasks, &slots).await;
                drop((slot, open));
            })
        });
        if let Err(error) = spawned {
            debug!(%error, "client connection lost before it was served");
        }
    }
}

async fn connection<H, F, B>(
    mut stream: TcpStream,
    mut peer: IpAddr,
    settings: Settings,
    metrics: Metrics,
    handler: H,
    tasks: Tasks,
    slots: &Semaphore,
) where
    H: Fn(Request<Incoming>, IpAddr) -> F + Clone + Send + 'static,
    F: Future<Output = Response<B>> + Send + 'static,
    B: Body<Data = Bytes, Error = BodyError> + Unpin + Send + 'static,
{
    // A token is a small packet; Nagle's algorithm would hold it back.
    let _ = stream.set_nodelay(true);
    let mut early = Bytes::new();
    if settings.proxy_protocol {
        let timeout = settings.header_timeout;
        let header = tokio::select! {
            header = proxy_protocol::read(&mut stream, timeout) => header,
            () = tasks.stopped() => return,
        };
        match header {
            Ok((client, rest)) => {
                peer = client.unwrap_or(peer);
                early = rest;
            }
            Err(error) => {
                metrics.closed.with_label_values(&["proxy_header"]).inc();
                debug!(%peer, %error, "client connection closed: no PROXY protocol header");
                return;
            }
        }
    }
    let activity = Arc::new(Activity::new(observe::now()));
    let service = service_fn({
        let activity = activity.clone();
        move |request: Request<Incoming>| {
            let busy = activity.begin(request.version());
            let response = handler(request, peer);
            async move { Ok::<_, Infallible>(response.await.map(|body| BusyBody { body, busy })) }
        }
    });
    let mut builder = auto::Builder::new(Executor {
        tasks: tasks.clone(),
        activity: activity.clone(),
        reset: metrics.reset.clone(),
    });
    // Our own limits cover head and idle time without a timer for each request.
    builder.http1().header_read_timeout(None);
    builder
        .http2()
        .max_concurrent_streams(settings.max_http2_streams);
    let mut connection = pin!(builder.serve_connection(
        TokioIo::new(Watched::new(stream, early, activity.clone())),
        service
    ));

    let limits = Limits {
        head: settings.header_timeout,
        idle: settings.idle_timeout,
        send: settings.send_timeout,
    };
    let mut stopped = pin!(tasks.stopped());
    let mut aborted = pin!(tasks.aborted());
    let mut tick = pin!(tokio::time::sleep(limits.look_every()));
    let mut registered = false;
    let mut finishing = false;
    let mut is_closing = false;
    let ended = poll_fn(|cx| {
        if !registered {
            // Once is enough: the task keeps its waker, and the flags below show what woke it.
            registered = true;
            let _ = stopped.as_mut().poll(cx);
            let _ = aborted.as_mut().poll(cx);
        }
        if tasks.is_stopping() && !finishing {
            finishing = true;
            connection.as_mut().graceful_shutdown();
        }
        if finishing && tasks.is_aborted() {
            return Poll::Ready(Ok(()));
        }
        if tick.as_mut().poll(cx).is_ready() {
            let limits = match slots.available_permits() {
                0 => limits.at_limit(IDLE_AT_LIMIT),
                _ => limits,
            };
            activity.end_stalled_streams(observe::now(), &limits);
            match activity.check(observe::now(), &limits) {
                Verdict::Fine => {}
                // GOAWAY was sent at the last look and the connection is still open: the client does not react to GOAWAY.
                Verdict::Idle if is_closing => return Poll::Ready(Ok(())),
                Verdict::Idle => {
                    is_closing = true;
                    metrics.closed.with_label_values(&["idle"]).inc();
                    connection.as_mut().graceful_shutdown();
                }
                Verdict::SlowHead => {
                    metrics.closed.with_label_values(&["header_timeout"]).inc();
                    return Poll::Ready(Ok(()));
                }
                Verdict::NotReading => {
                    metrics.closed.with_label_values(&["send_timeout"]).inc();
                    return Poll::Ready(Ok(()));
                }
            }
            tick.as_mut()
                .reset(tokio::time::Instant::now() + limits.look_every());
            let _ = tick.as_mut().poll(cx);
        }
        connection.as_mut().poll(cx)
    })
    .await;
    if let Err(error) = ended {
        debug!(%error, "client connection ended");
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

/// Counts a connection for as long as it lives.
struct OpenConnection(IntGauge);

impl OpenConnection {
    fn new(gauge: IntGauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// A response body that keeps its connection busy until it has been sent or dropped.
struct BusyBody<B> {
    body: B,
    busy: Busy,
}

impl<B: Body<Data = Bytes> + Unpin> Body for BusyBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        self.busy.on_poll();
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        if let Poll::Ready(Some(Ok(_))) = &polled {
            self.busy.on_frame();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
