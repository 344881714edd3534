//! The accept loop and one connection's life: HTTP/1.1 or cleartext HTTP/2 (prior knowledge), a cap
//! on connections, and limits on idling, dawdling over a request's head, and not reading the answer.

mod activity;

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use hyper_util::server::conn::auto;
use prometheus::{IntCounter, IntCounterVec, IntGauge};
use serde::{Deserialize, Serialize};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tracing::{debug, warn};

use self::activity::{Activity, Verdict, Watched};
use super::drain::Tasks;
use super::{Body, BodyError};
use crate::http::io_threads::IoThreads;
use crate::observe;
use crate::observe::metrics::Registry;

/// Limits of one listener's connections.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// Connections at a time; more wait in the kernel's backlog.
    pub connections_max: u32,
    /// From a request's first byte to the end of its head.
    pub header_timeout_ms: u64,
    /// Without a request.
    pub idle_timeout_ms: u64,
    /// Without the client taking any byte of an answer that stands ready for it.
    pub send_timeout_ms: u64,
    /// Requests at a time on one HTTP/2 connection.
    pub http2_streams_max: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            // 16k streams need about 1 GB of socket and task memory; a process has as many files.
            connections_max: 16_384,
            header_timeout_ms: 10_000,
            // Longer than the 60 s after which common load balancers let go, so that they go first.
            idle_timeout_ms: 75_000,
            send_timeout_ms: 60_000,
            http2_streams_max: 1_024,
        }
    }
}

/// What a listener counts.
#[derive(Clone, Debug)]
pub struct Metrics {
    connections: IntGauge,
    accepted: IntCounter,
    at_cap: IntCounter,
    closed: IntCounterVec,
}

impl Metrics {
    pub fn new(registry: &Registry) -> Self {
        Self {
            connections: registry
                .gauge("warmroute_connections", "Client connections that are open."),
            accepted: registry.counter(
                "warmroute_connections_accepted_total",
                "Client connections accepted.",
            ),
            at_cap: registry.counter(
                "warmroute_connections_at_cap_total",
                "Times that accepting waited because connections_max were open.",
            ),
            closed: registry.counters(
                "warmroute_connections_closed_total",
                "Client connections that a limit closed, by limit.",
                &["limit"],
            ),
        }
    }
}

/// Accepts until told to stop. Each connection runs on one of `io_threads`, and `tasks` waits for
/// it: on the stop signal it finishes what it has begun and closes.
pub async fn serve<H, F>(
    listener: TcpListener,
    settings: Settings,
    metrics: Metrics,
    handler: H,
    io_threads: IoThreads,
    tasks: Tasks,
) where
    H: Fn(Request<Incoming>) -> F + Clone + Send + 'static,
    F: Future<Output = Response<Body>> + Send + 'static,
{
    let slots = Arc::new(Semaphore::new(settings.connections_max as usize));
    let mut stopped = pin!(tasks.stopped());
    loop {
        if slots.available_permits() == 0 {
            metrics.at_cap.inc();
        }
        let accepted = tokio::select! {
            () = &mut stopped => return,
            accepted = async {
                let slot = slots.clone().acquire_owned().await.expect("the semaphore is never closed");
                (slot, listener.accept().await)
            } => accepted,
        };
        let (slot, stream) = match accepted {
            (slot, Ok((stream, _))) => (slot, stream),
            (_, Err(error)) => {
                // Out of files, mostly. Trying again at once would only burn a core.
                warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        metrics.accepted.inc();
        let open = Open::new(metrics.connections.clone());
        let (settings, metrics, handler, tasks) = (
            settings.clone(),
            metrics.clone(),
            handler.clone(),
            tasks.clone(),
        );
        let tracker = tasks.clone();
        let carried = io_threads.spawn_connection(stream, move |stream| {
            tracker.track(async move {
                connection(stream, settings, metrics, handler, tasks).await;
                drop((slot, open));
            })
        });
        if let Err(error) = carried {
            debug!(%error, "connection was gone before it was served");
        }
    }
}

async fn connection<H, F>(
    stream: TcpStream,
    settings: Settings,
    metrics: Metrics,
    handler: H,
    tasks: Tasks,
) where
    H: Fn(Request<Incoming>) -> F + Clone + Send + 'static,
    F: Future<Output = Response<Body>> + Send + 'static,
{
    // Tokens are small and must not wait for each other.
    let _ = stream.set_nodelay(true);
    let activity = Arc::new(Activity::new(observe::now()));
    let service = service_fn({
        let activity = activity.clone();
        move |request: Request<Incoming>| {
            let busy = activity.begin(request.version());
            let answer = handler(request);
            async move { Ok::<_, Infallible>(answer.await.map(|body| Counted { body, busy })) }
        }
    });
    let mut builder = auto::Builder::new(Executor(tasks.clone()));
    // Our own limits cover head and idle time without a timer for each request.
    builder.http1().header_read_timeout(None);
    builder
        .http2()
        .max_concurrent_streams(settings.http2_streams_max);
    let mut connection = pin!(builder.serve_connection(
        TokioIo::new(Watched::new(stream, activity.clone())),
        service
    ));

    let limits = activity::Limits::from(&settings);
    let mut stopped = pin!(tasks.stopped());
    let mut aborted = pin!(tasks.aborted());
    let mut tick = pin!(tokio::time::sleep(limits.look_every()));
    let mut registered = false;
    let mut finishing = false;
    let mut is_leaving = false;
    let ended = poll_fn(|cx| {
        if !registered {
            // Once is enough: a task keeps its waker, and the flags below tell what woke it.
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
            match activity.judge(observe::now(), &limits) {
                Verdict::Fine => {}
                // Asked to go a look ago and still here: it takes no part in its own farewell.
                Verdict::Idle if is_leaving => return Poll::Ready(Ok(())),
                Verdict::Idle => {
                    is_leaving = true;
                    metrics.closed.with_label_values(&["idle"]).inc();
                    connection.as_mut().graceful_shutdown();
                }
                Verdict::SlowHead => {
                    metrics.closed.with_label_values(&["header"]).inc();
                    return Poll::Ready(Ok(()));
                }
                Verdict::NotReading => {
                    metrics.closed.with_label_values(&["send"]).inc();
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
struct Executor(Tasks);

impl<F> hyper::rt::Executor<F> for Executor
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, task: F) {
        self.0.spawn(task);
    }
}

/// Counts a connection for as long as it lives.
struct Open(IntGauge);

impl Open {
    fn new(gauge: IntGauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// An answer's body that keeps its connection busy until it has been sent or dropped.
struct Counted {
    body: Body,
    busy: activity::Busy,
}

impl http_body::Body for Counted {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        self.busy.on_poll();
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        if let Poll::Ready(Some(Ok(_))) = &polled {
            self.busy.on_piece();
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
