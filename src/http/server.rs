//! The accept loop, and the life of one connection: with TLS or without, HTTP/1.1 or HTTP/2 by its first bytes, a
//! maximum of connections, and time-outs for idle connections, slow request heads and clients that do
//! not read their response.

mod activity;
mod body;
mod connection;
mod discard;
mod head;
mod malformed;
mod metrics;
mod protocol;
mod settings;
mod upgrade;
mod watched;
mod window;

use std::future::Future;
use std::net::IpAddr;
use std::sync::Arc;

use bytes::Bytes;
use http_body::Body;
use hyper::{Request, Response};
use tokio::net::TcpListener;
use tracing::debug;

pub use self::body::RequestBody;
use self::connection::Listener;
pub use self::head::OversizedHead;
pub use self::malformed::OnMalformed;
pub use self::metrics::Metrics;
pub use self::settings::Settings;
pub use self::upgrade::{Upgrade, Upgraded};
pub use self::window::Unread;
use super::BodyError;
use super::accept::{Accepted, Acceptor};
use super::drain::Tasks;
use super::io_threads::IoThreads;
use super::tls;
use crate::observe::metrics::Counted;

/// What answers the requests of a listener.
#[derive(Clone, Debug)]
pub struct Handlers<H> {
    /// Gets each request with the address of its connection's other end.
    pub handler: H,
    /// Answers request heads that cannot be parsed; without it such a response has no body. With it, the handler gets
    /// HTTP/2 requests whose heads are too large, up to twice the bound, to refuse them: they have an [`OversizedHead`]
    /// among their extensions.
    pub on_malformed: Option<OnMalformed>,
    /// Connections begin with a TLS handshake. Requests of a client with a certificate have its
    /// [`tls::ClientNames`] among their extensions.
    pub tls: Option<Arc<tls::Server>>,
}

/// Accepts connections until the drain begins. Each runs on one of `io_threads`, and the drain waits for
/// it: it finishes the requests that have started and closes.
pub async fn serve<H, F, B>(
    listener: TcpListener,
    settings: Settings,
    metrics: Metrics,
    handlers: Handlers<H>,
    io_threads: IoThreads,
    tasks: Tasks,
) where
    H: Fn(Request<RequestBody>, IpAddr) -> F + Send + Sync + 'static,
    F: Future<Output = Response<B>> + Send + 'static,
    B: Body<Data = Bytes, Error = BodyError> + Unpin + Send + 'static,
{
    let max = settings.max_connections as usize;
    let mut acceptor = Acceptor::new(listener, "clients", max, tasks.clone());
    let slots = acceptor.slots.clone();
    let shared = Arc::new(Listener {
        settings,
        metrics: metrics.clone(),
        handler: handlers.handler,
        on_malformed: handlers.on_malformed,
        tls: handlers.tls,
        tasks: tasks.clone(),
        slots: slots.clone(),
    });
    loop {
        if slots.available_permits() == 0 {
            metrics.at_limit.inc();
        }
        let accepted = acceptor.next(|| metrics.accept_errors.inc()).await;
        let Some(Accepted { stream, peer, slot }) = accepted else {
            return;
        };
        metrics.accepted.inc();
        let open = Counted::new(&metrics.connections);
        metrics.note_peak();
        let (shared, tracker) = (shared.clone(), tasks.clone());
        let spawned = io_threads.spawn_connection(stream, move |stream| {
            tracker.track(async move {
                shared.serve(stream, peer).await;
                drop((slot, open));
            })
        });
        if let Err(error) = spawned {
            debug!(%error, "client connection lost before it was served");
        }
    }
}
