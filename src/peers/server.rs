//! The listener for other replicas.

use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tonic::Status;
use tracing::debug;

use super::client::{NEEDS_SECRET, handshake_timeout};
use super::handshake::{Identity, Side};
use super::link::{Failure, Link, RawLink};
use super::settings::Advanced;
use super::wire;
use crate::http::accept::Acceptor;
use crate::http::drain::Tasks;
use crate::http::tls::{self, Socket};
use crate::http::{Body, grpc};

/// What another replica asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    Sync,
    CopyTrees,
}

/// What the listener does with the streams of other replicas.
pub(super) trait Accept: Send + Sync + 'static {
    /// Serves a stream whose other side has proved who it is, until it ends. `from` is the other side's address.
    fn serve(
        self: Arc<Self>,
        call: Call,
        link: Link,
        from: IpAddr,
    ) -> impl Future<Output = ()> + Send;

    /// A handshake failed.
    fn on_failure(&self, from: IpAddr, failure: &Failure);
}

/// Each replica has one connection for load, and a starting one a few for trees; the rest are handshakes.
const CONNECTIONS_PER_PEER: usize = 4;
/// A stopped replica's connection must not hold more than this for it.
const WINDOW_BYTES: u32 = 256 << 10;
const MAX_STREAMS: u32 = 8;
/// A connection whose other side is gone without a word is closed after twice this time.
const PING_INTERVAL: Duration = Duration::from_secs(5);

/// Accepts streams of other replicas until the drain begins.
pub(super) async fn run(
    listener: TcpListener,
    identity: Arc<Identity>,
    tls: Option<Arc<tls::Server>>,
    settings: Advanced,
    accept: Arc<impl Accept>,
    tasks: Tasks,
) {
    let connections_max = settings.max_peers as usize * CONNECTIONS_PER_PEER;
    let mut acceptor = Acceptor::new(listener, "replicas", connections_max, tasks.clone());
    while let Some(accepted) = acceptor.next(|| {}).await {
        let (stream, from, slot) = (accepted.stream, accepted.peer, accepted.slot);
        if identity.secret.is_empty() && tls.is_none() && !from.is_loopback() {
            accept.on_failure(from, &NEEDS_SECRET);
            continue;
        }
        let (identity, settings, accept) = (identity.clone(), settings.clone(), accept.clone());
        let (tracker, tls) = (tasks.clone(), tls.clone());
        tasks.spawn(async move {
            let _ = stream.set_nodelay(true);
            let stream = match &tls {
                None => Socket::Clear(stream),
                Some(tls) => match tls.accept(stream, Bytes::new()).await {
                    Ok((stream, _)) => stream,
                    Err(error) => {
                        let reason = format!("TLS handshake failed: {error}");
                        return accept.on_failure(from, &Failure::Lost(reason));
                    }
                },
            };
            connection(stream, from, identity, settings, accept, tracker).await;
            drop(slot);
        });
    }
}

async fn connection(
    stream: Socket,
    from: IpAddr,
    identity: Arc<Identity>,
    settings: Advanced,
    accept: Arc<impl Accept>,
    tasks: Tasks,
) {
    let executor = Executor(tasks.clone());
    let mut builder = http2::Builder::new(executor);
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_INTERVAL);
    let limit = handshake_timeout(&settings).saturating_mul(2);
    let is_proved = Arc::new(AtomicBool::new(false));
    let proved = is_proved.clone();
    let service = service_fn(move |request| {
        let answer = answer(
            request, from, &identity, &settings, &accept, &proved, &tasks,
        );
        std::future::ready(Ok::<_, Infallible>(answer))
    });
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let ended = tokio::select! {
        ended = &mut connection => ended,
        // A stranger must not keep one of the connections.
        () = tokio::time::sleep(limit) => if is_proved.load(Relaxed) {
            connection.await
        } else {
            return debug!(%from, "connection closed: no replica has shown itself on it");
        },
    };
    if let Err(error) = ended {
        debug!(%from, %error, "a replica's connection ended");
    }
}

/// Answers at once; the handshake and what follows run beside it.
fn answer(
    request: Request<Incoming>,
    from: IpAddr,
    identity: &Arc<Identity>,
    settings: &Advanced,
    accept: &Arc<impl Accept>,
    is_proved: &Arc<AtomicBool>,
    tasks: &Tasks,
) -> Response<Body> {
    let call = match request.uri().path() {
        _ if !grpc::is_grpc(&request) => None,
        wire::SYNC => Some(Call::Sync),
        wire::COPY_TREES => Some(Call::CopyTrees),
        _ => None,
    };
    let Some(call) = call else {
        return grpc::refuse(&Status::unimplemented(
            "only other replicas are served here",
        ));
    };
    let (outgoing, queue) = RawLink::channel();
    let max_message = usize::try_from(settings.max_message).unwrap_or(usize::MAX);
    let raw = RawLink::accepted(outgoing, request.into_body(), max_message);
    let (identity, accept, is_proved) = (identity.clone(), accept.clone(), is_proved.clone());
    let limit = handshake_timeout(settings);
    tasks.spawn(async move {
        match raw.shake_hands(&identity, Side::Acceptor, limit).await {
            Ok(link) => {
                is_proved.store(true, Relaxed);
                accept.serve(call, link, from).await;
            }
            Err(failure) => accept.on_failure(from, &failure),
        }
    });
    grpc::answer(queue)
}

/// Runs a connection's tasks as tasks that the drain waits for.
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
