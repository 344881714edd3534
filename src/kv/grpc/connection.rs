//! One HTTP/2 connection and the calls on it. It never reconnects: a connection that did might reach
//! another process unnoticed.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use hyper::client::conn::http2;
use hyper::http::uri::PathAndQuery;
use hyper::{Request, Uri};
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;
use tonic::body::Body;
use tonic::client::Grpc;
use tonic::metadata::MetadataValue;
use tonic::{Code, Status, Streaming};

use super::settings::Settings;
use crate::http::connection_tasks::ConnectionTasks;
use crate::http::grpc::Raw;
use crate::http::tls::{self, Protocol, Socket};
use crate::kv::protobuf::{Service, encode_request};
use crate::observe::with_causes;

/// Response metadata: the id of the engine incarnation. Only `warmroute bridge` sends it.
pub const INCARNATION_METADATA: &str = "x-warmroute-incarnation";
/// Response metadata: the rank's last sequence number when the call was answered. Batches up to it are the
/// replay, later ones are live. Only `warmroute bridge` sends it.
pub const LAST_SEQUENCE_METADATA: &str = "x-warmroute-last";
/// Request metadata: the rank to send. Only `warmroute bridge` respects it.
pub const RANK_METADATA: &str = "x-warmroute-rank";

/// A call, or a connection with its first call, that is being opened.
pub(super) type PendingCall<T> = Pin<Box<dyn Future<Output = Result<T, Status>> + Send>>;

/// Where to subscribe.
#[derive(Clone, Debug)]
pub(super) struct Target {
    /// `HOST:PORT`.
    pub address: String,
    pub rank: u32,
    pub settings: Settings,
    pub tls: Option<Arc<tls::Client>>,
}

/// An open connection. Dropping it closes it and stops its tasks.
#[derive(Debug)]
pub(super) struct Connection {
    sender: http2::SendRequest<Body>,
    target: Target,
    /// The tasks answer pings while the subscriber is busy.
    _tasks: ConnectionTasks,
    /// The service that the server implements, once one has answered.
    service: Option<Service>,
}

/// A subscription.
#[derive(Debug)]
pub(super) struct Call {
    pub messages: Streaming<Bytes>,
    /// Batches strictly after this number were requested; 0: the current state.
    pub start: u64,
    pub incarnation: Option<String>,
    /// The last sequence number when the call was answered.
    pub last: Option<u64>,
    pub service: Service,
}

impl Connection {
    /// Connects and subscribes. `service` is the one that answered the last time.
    pub(super) async fn open(
        target: Target,
        service: Option<Service>,
        start: u64,
    ) -> Result<(Self, Call), Status> {
        let limit = target.settings.connect_timeout;
        let connected = tokio::time::timeout(limit, connect(&target)).await;
        let (sender, tasks) =
            connected.map_err(|_| Status::unavailable("connecting timed out"))??;
        let mut connection = Self {
            sender,
            target,
            _tasks: tasks,
            service,
        };
        let mut subscribed = connection.subscribe(start).await;
        if start != 0 && subscribed.as_ref().is_err_and(is_history_gone) {
            subscribed = connection.subscribe(0).await;
        }
        let call = subscribed?;
        connection.service = Some(call.service);
        Ok((connection, call))
    }

    /// Opens one more call on the same connection. The future is free of the link, which must be
    /// kept while it runs.
    pub(super) fn subscribe(
        &self,
        start: u64,
    ) -> impl Future<Output = Result<Call, Status>> + Send + use<> {
        let (sender, target) = (self.sender.clone(), self.target.clone());
        let known = self.service;
        async move {
            let mut services = target.settings.services.to_vec();
            // A stable sort: the known service first, the others in order.
            services.sort_by_key(|service| Some(*service) != known);
            let mut last = Status::unimplemented("no service to ask for");
            for service in services {
                let pending_replay = ask(sender.clone(), &target, service, start);
                let limit = target.settings.connect_timeout;
                let answered = tokio::time::timeout(limit, pending_replay).await;
                match answered.map_err(|_| Status::unavailable("subscribing timed out"))? {
                    Err(status) if status.code() == Code::Unimplemented => last = status,
                    other => return other,
                }
            }
            Err(last)
        }
    }
}

/// Whether the server no longer has the requested batches.
pub(super) fn is_history_gone(status: &Status) -> bool {
    matches!(status.code(), Code::OutOfRange | Code::DataLoss)
}

async fn ask(
    mut sender: http2::SendRequest<Body>,
    target: &Target,
    service: Service,
    start: u64,
) -> Result<Call, Status> {
    let scheme = match target.tls {
        Some(_) => "https",
        None => "http",
    };
    let origin = format!("{scheme}://{}", target.address);
    let origin: Uri = origin
        .parse()
        .map_err(|_| Status::invalid_argument(format!("{} is no HOST:PORT", target.address)))?;
    let ready = sender.ready().await;
    ready.map_err(|error| Status::unavailable(with_causes(&error)))?;
    let send = tower::service_fn(move |request: Request<Body>| sender.send_request(request));
    let mut client =
        Grpc::with_origin(send, origin).max_decoding_message_size(target.settings.max_message);
    let mut request = tonic::Request::new(encode_request(start));
    request
        .metadata_mut()
        .insert(RANK_METADATA, MetadataValue::from(target.rank));
    let path = PathAndQuery::from_static(service.path());
    let answer = client.server_streaming(request, path, Raw).await?;
    let value_of = |name| answer.metadata().get(name)?.to_str().ok();
    let incarnation = value_of(INCARNATION_METADATA).map(str::to_owned);
    let last = value_of(LAST_SEQUENCE_METADATA).and_then(|last| last.parse().ok());
    Ok(Call {
        messages: answer.into_inner(),
        start,
        incarnation,
        last,
        service,
    })
}

async fn connect(target: &Target) -> Result<(http2::SendRequest<Body>, ConnectionTasks), Status> {
    let settings = &target.settings;
    let failed = |error: &dyn std::error::Error| Status::unavailable(with_causes(error));
    let stream = TcpStream::connect(&target.address).await;
    let stream = stream.map_err(|error| failed(&error))?;
    let _ = stream.set_nodelay(true);
    let alive = settings.keepalive_interval;
    let alive = TcpKeepalive::new().with_time(alive).with_interval(alive);
    // If it cannot be set, the HTTP/2 pings below still detect a dead peer.
    let _ = SockRef::from(&stream).set_tcp_keepalive(&alive.with_retries(3));
    let socket = match &target.tls {
        None => Socket::Clear(stream),
        Some(tls) => {
            let host = target.address.rsplit_once(':');
            let host = host.map_or(target.address.as_str(), |(host, _)| host);
            let connected = tls.connect(host, stream, Protocol::Http2).await;
            connected.map_err(|error| failed(&error))?
        }
    };
    let tasks = ConnectionTasks::default();
    let mut builder = http2::Builder::new(tasks.executor());
    builder
        .timer(TokioTimer::new())
        .keep_alive_interval(settings.ping_interval)
        .keep_alive_timeout(settings.keepalive_interval);
    let handshake = builder.handshake(TokioIo::new(socket)).await;
    let (sender, connection) = handshake.map_err(|error| failed(&error))?;
    hyper::rt::Executor::execute(&tasks.executor(), async move {
        // Its end shows as errors of the calls.
        let _ = connection.await;
    });
    Ok((sender, tasks))
}
