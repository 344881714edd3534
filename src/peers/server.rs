//! The listener for other replicas.

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
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
use tonic::{Status, Streaming};
use tracing::{debug, warn};

use super::client::{NEEDS_SECRET, handshake_timeout};
use super::handshake::{Refusal, Side};
use super::link::{Failure, Link, RawLink};
use super::said::Level;
use super::session;
use super::state::State;
use super::wire;
use crate::http::Body;
use crate::http::accept::Acceptor;
use crate::http::drain::Tasks;
use crate::http::grpc::{self, Raw};
use crate::http::tls::Socket;
use crate::observe;

/// What another replica asked for.
#[derive(Clone, Copy)]
enum Call {
    Sync,
    CopyTrees,
}

/// Each replica has one connection for load, and a starting one a few for trees; the rest are handshakes.
const CONNECTIONS_PER_PEER: usize = 4;
/// A stopped replica's connection must not hold more than this for it.
const WINDOW_BYTES: u32 = 256 << 10;
const MAX_STREAMS: u32 = 8;
/// A connection whose other side is gone without a word is closed after twice this time.
const PING_INTERVAL: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub(super) struct Server {
    pub(super) state: Arc<State>,
    pub(super) tasks: Tasks,
}

impl Server {
    /// Accepts streams of other replicas until the drain begins.
    pub(super) async fn run(self, listener: TcpListener) {
        let state = &self.state;
        let connections_max = state.settings.max_peers as usize * CONNECTIONS_PER_PEER;
        let mut acceptor = Acceptor::new(listener, "replicas", connections_max, self.tasks.clone());
        while let Some(accepted) = acceptor.next(|| {}).await {
            let (stream, from, slot) = (accepted.stream, accepted.peer, accepted.slot);
            if state.identity.secret.is_empty() && state.tls.is_none() && !from.is_loopback() {
                self.on_failure(from, &NEEDS_SECRET);
                continue;
            }
            let server = self.clone();
            self.tasks.spawn(async move {
                let _ = stream.set_nodelay(true);
                let stream = match &server.state.tls {
                    None => Socket::Clear(stream),
                    Some(tls) => match tls.accept(stream, Bytes::new()).await {
                        Ok((stream, _)) => stream,
                        Err(error) => {
                            let reason = format!("TLS handshake failed: {error}");
                            return server.on_failure(from, &Failure::Lost(reason));
                        }
                    },
                };
                server.connection(stream, from).await;
                drop(slot);
            });
        }
    }

    async fn connection(self, stream: Socket, from: IpAddr) {
        let executor = Executor(self.tasks.clone());
        let mut builder = http2::Builder::new(executor);
        builder
            .timer(TokioTimer::new())
            .max_concurrent_streams(MAX_STREAMS)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            .keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_INTERVAL);
        let limit = handshake_timeout(&self.state.settings).saturating_mul(2);
        let is_proved = Arc::new(AtomicBool::new(false));
        let proved = is_proved.clone();
        let service = service_fn(move |request| {
            let answer = self.answer(request, from, &proved);
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
        &self,
        request: Request<Incoming>,
        from: IpAddr,
        is_proved: &Arc<AtomicBool>,
    ) -> Response<Body> {
        let call = match request.uri().path() {
            _ if !grpc::is_grpc(&request) => None,
            wire::SYNC => Some(Call::Sync),
            wire::COPY_TREES => Some(Call::CopyTrees),
            _ => None,
        };
        let Some(call) = call else {
            return Status::unimplemented("only other replicas are served here").into_http();
        };
        let settings = &self.state.settings;
        let (outgoing, queue) = RawLink::channel();
        let max_message = Some(settings.max_message);
        let incoming = Streaming::new_request(Raw, request.into_body(), None, max_message);
        let raw = RawLink::new(outgoing, incoming, None);
        let limit = handshake_timeout(settings);
        let (server, is_proved) = (self.clone(), is_proved.clone());
        self.tasks.spawn(async move {
            let identity = &server.state.identity;
            let shaken = raw.shake_hands(identity, Side::Acceptor, limit).await;
            match shaken {
                Ok(link) => {
                    is_proved.store(true, Relaxed);
                    server.serve(call, link, from).await;
                }
                Err(failure) => server.on_failure(from, &failure),
            }
        });
        grpc::answer(queue)
    }

    /// Serves a stream whose other side has proved who it is, until it ends.
    async fn serve(self, call: Call, link: Link, from: IpAddr) {
        match call {
            Call::Sync => {
                let port = link.peer.port;
                let address = (port != 0).then(|| SocketAddr::new(from, port).to_string().into());
                session::run(self.state, link, address, self.tasks).await;
            }
            Call::CopyTrees => match self.state.trees.get() {
                Some(trees) => trees.serve(link).await,
                None => {
                    let status = Status::unimplemented("this replica serves no trees");
                    let (outgoing, _receiving) = link.split();
                    let _ = outgoing.send(Err(status)).await;
                }
            },
        }
    }

    fn on_failure(&self, from: IpAddr, failure: &Failure) {
        let reason = match failure {
            Failure::Refused(Refusal::Secret) => "secret",
            Failure::Refused(Refusal::Version(_)) => "version",
            Failure::Refused(Refusal::Malformed(_)) => "malformed",
            // An address of this replica is among those listed.
            Failure::Refused(Refusal::Itself) => return,
            Failure::NotAllowed(_) => "loopback",
            Failure::Lost(_)
            | Failure::Malformed(_)
            | Failure::NotListening
            | Failure::RefusedByPeer(_) => "handshake",
        };
        let state = &self.state;
        state.metrics.refused.with_label_values(&[reason]).inc();
        match failure {
            Failure::Refused(Refusal::Secret | Refusal::Version(_)) | Failure::NotAllowed(_) => {
                // Once: it tries again every few seconds.
                let from = from.to_string().into();
                if state.says_address(observe::now(), &from, Level::Lost) {
                    warn!(%from, reason = %failure, "replica refused");
                }
            }
            _ => debug!(%from, reason = %failure, "replica's handshake failed"),
        }
    }
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
