//! Opens streams to other replicas.

use std::error::Error;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use hyper::client::conn::http2;
use hyper::{Method, Request, header};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tonic::metadata::GRPC_CONTENT_TYPE;
use tonic::{Code, Status, Streaming};

use super::handshake::{Identity, Side};
use super::link::{Failure, Link, RawLink};
use super::settings::{Advanced, host_and_port};
use crate::http::connection_tasks::ConnectionTasks;
use crate::http::grpc::{self, Raw};
use crate::http::tls::{self, Socket};

/// Opens a stream for `call` (one of the paths in [`super::wire`]) to the replica at `address`, a `HOST:PORT`, and
/// shakes hands.
pub(super) async fn connect(
    address: &str,
    call: &'static str,
    identity: &Identity,
    tls: Option<&tls::Server>,
    settings: &Advanced,
) -> Result<Link, Failure> {
    let limit = settings.connect_timeout;
    let is_loopback_only = identity.secret.is_empty() && tls.is_none();
    let connecting = tokio::time::timeout(limit, open(address, is_loopback_only));
    let (stream, to) = connecting
        .await
        .map_err(|_| Failure::Lost(format!("no connection within {limit:?}")))??;
    let stream = match tls {
        None => Socket::Clear(stream),
        Some(tls) => {
            let shaking =
                tokio::time::timeout(handshake_timeout(settings), tls.connect(stream, to));
            let shaken = shaking
                .await
                .map_err(|_| Failure::Lost("no TLS handshake in time".to_owned()))?;
            shaken.map_err(|error| Failure::Lost(format!("TLS handshake failed: {error}")))?
        }
    };
    let asking = ask(address, stream, call, settings);
    let raw = tokio::time::timeout(handshake_timeout(settings), asking)
        .await
        .map_err(|_| Failure::Lost("the other side does not answer".to_owned()))??;
    raw.shake_hands(identity, Side::Dialer, handshake_timeout(settings))
        .await
}

/// Another host is dialed or accepted only with a secret or certificates.
pub(super) const NEEDS_SECRET: Failure =
    Failure::NotAllowed("it is another host, for which `peers.secret` or `peers.tls` is needed");

/// Longer than connecting, for which the kernel of the other side is enough.
pub(super) fn handshake_timeout(settings: &Advanced) -> Duration {
    settings.connect_timeout.saturating_mul(4)
}

async fn open(address: &str, is_loopback_only: bool) -> Result<(TcpStream, IpAddr), Failure> {
    let (host, port) = host_and_port(address).map_err(Failure::Lost)?;
    let found = tokio::net::lookup_host((host, port)).await;
    let found = found.map_err(|error| Failure::Lost(format!("cannot resolve {host}: {error}")))?;
    let mut allowed: Vec<SocketAddr> = found.collect();
    if is_loopback_only && !allowed.is_empty() {
        allowed.retain(|address| address.ip().is_loopback());
        if allowed.is_empty() {
            return Err(NEEDS_SECRET);
        }
    }
    let mut last = Failure::Lost(format!("{host} has no addresses"));
    for address in allowed {
        match TcpStream::connect(address).await {
            Ok(stream) => {
                let _ = stream.set_nodelay(true);
                return Ok((stream, address.ip()));
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                last = Failure::NotListening;
            }
            Err(error) => last = Failure::Lost(error.to_string()),
        }
    }
    Err(last)
}

fn lost(error: hyper::Error) -> Failure {
    let text = match error.source() {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    };
    Failure::Lost(tls::refused_certificate_in(&text).unwrap_or(text))
}

async fn ask(
    address: &str,
    stream: Socket,
    call: &'static str,
    settings: &Advanced,
) -> Result<RawLink, Failure> {
    let running = ConnectionTasks::default();
    let mut builder = http2::Builder::new(running.executor());
    builder.timer(TokioTimer::new());
    let (mut sender, connection) = builder
        .handshake(TokioIo::new(stream))
        .await
        .map_err(lost)?;
    let (report_end, end) = oneshot::channel();
    hyper::rt::Executor::execute(&running.executor(), async move {
        let _ = report_end.send(connection.await.err());
    });
    let (outgoing, queue) = RawLink::channel();
    let request = Request::builder()
        .method(Method::POST)
        .uri(format!("http://{address}{call}"))
        .header(header::CONTENT_TYPE, GRPC_CONTENT_TYPE)
        .header(header::TE, "trailers")
        .body(grpc::request_body(queue))
        .map_err(|error| Failure::Lost(error.to_string()))?;
    let answer = match sender.send_request(request).await {
        Ok(answer) => answer,
        Err(error) => {
            // Why the connection ended says more than that its stream was cancelled.
            let ended = tokio::time::timeout(settings.connect_timeout, end).await;
            let cause = ended.ok().and_then(|end| end.ok().flatten());
            return Err(lost(cause.unwrap_or(error)));
        }
    };
    // An answer that consists of its headers only.
    if let Some(status) = Status::from_header_map(answer.headers())
        && status.code() != Code::Ok
    {
        return Err(status.into());
    }
    let (parts, body) = answer.into_parts();
    let max_message = Some(settings.max_message);
    let incoming = Streaming::new_response(Raw, body, parts.status, None, max_message);
    Ok(RawLink::new(outgoing, incoming, Some(running)))
}
