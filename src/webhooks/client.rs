//! One attempt to deliver an event, over a connection of its own.
//!
//! The endpoint's name is resolved once. Its addresses are checked, and the connection is made to one that was checked:
//! a second look-up could give another. No proxy of the environment is used, which would resolve the name again, and no
//! redirect is followed.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::{Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};

use super::address;
use super::attempt::Attempt;
use super::endpoint::Endpoint;
use super::settings::Advanced;
use super::target::Target;
use crate::http::tls::{Protocol, Socket};
use crate::observe;

/// hyper reads the head of an answer into a buffer of up to this size.
const MAX_HEAD_BYTES: usize = 16 << 10;
/// Addresses of a name that are tried.
const MAX_ADDRESSES: usize = 4;
/// A receiver is not waited for to send the rest of an answer whose status is known.
const REST_TIMEOUT: Duration = Duration::from_secs(1);
const USER_AGENT: &str = concat!("warmroute/", env!("CARGO_PKG_VERSION"));

/// What is posted.
#[derive(Debug)]
pub(super) struct Message<'a> {
    pub(super) id: &'a str,
    pub(super) timestamp: i64,
    pub(super) signatures: &'a str,
    pub(super) body: String,
}

pub(super) async fn post(
    endpoint: &Endpoint,
    message: Message<'_>,
    settings: &Advanced,
) -> Attempt {
    match exchange(endpoint, message, settings).await {
        Ok(status) => Attempt::Answered(status),
        Err(failed) => failed,
    }
}

async fn exchange(
    endpoint: &Endpoint,
    message: Message<'_>,
    settings: &Advanced,
) -> Result<StatusCode, Attempt> {
    let request = request(&endpoint.target, message).map_err(Attempt::Broken)?;
    let deadline = Instant::from_std(observe::now()) + settings.attempt_timeout;
    let late = |_| Attempt::TimedOut;
    let opened = async {
        let addresses = resolve(endpoint).await?;
        connect(endpoint, &addresses, settings.connect_timeout).await
    };
    let socket = timeout_at(deadline, opened).await.map_err(late)??;
    let broken = |error: hyper::Error| {
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        Attempt::Broken(cause.unwrap_or_else(|| error.to_string()))
    };
    let mut builder = http1::Builder::new();
    builder.max_buf_size(MAX_HEAD_BYTES);
    let (mut sender, driver) = builder
        .handshake(TokioIo::new(socket))
        .await
        .map_err(broken)?;
    let mut driver = pin!(driver);
    let mut answer = pin!(sender.send_request(request));
    let answer = timeout_at(deadline, async {
        tokio::select! {
            biased;
            answer = &mut answer => answer,
            ended = &mut driver => {
                ended?;
                answer.await
            }
        }
    });
    let answer = answer.await.map_err(late)?.map_err(broken)?;
    let status = answer.status();
    // A receiver that is cut off while it answers may take that for a failure of its own.
    let rest = read_some(answer.into_body(), settings.max_answer);
    let _ = timeout(REST_TIMEOUT, async {
        tokio::select! {
            biased;
            () = rest => {}
            _ = &mut driver => {}
        }
    })
    .await;
    Ok(status)
}

fn request(target: &Target, message: Message<'_>) -> Result<Request<Full<Bytes>>, String> {
    Request::post(&target.path)
        .header(header::HOST, &target.authority)
        .header(header::USER_AGENT, USER_AGENT)
        .header(header::CONTENT_TYPE, "application/json")
        .header(header::CONNECTION, "close")
        .header("webhook-id", message.id)
        .header("webhook-timestamp", message.timestamp)
        .header("webhook-signature", message.signatures)
        .body(Full::new(message.body.into()))
        .map_err(|error| error.to_string())
}

/// The addresses of the endpoint that may be connected to, at least one.
async fn resolve(endpoint: &Endpoint) -> Result<Vec<SocketAddr>, Attempt> {
    let Target { host, port, .. } = &endpoint.target;
    let found: Vec<SocketAddr> = match host.parse::<IpAddr>() {
        Ok(address) => vec![SocketAddr::new(address, *port)],
        Err(_) => {
            let found = tokio::net::lookup_host((host.as_str(), *port)).await;
            found.map_err(Attempt::NotResolved)?.collect()
        }
    };
    let refusal = |address: &SocketAddr| {
        let address = address.ip().to_canonical();
        if endpoint.allowed_networks.contains(address) {
            None
        } else {
            address::refusal(address)
        }
    };
    let allowed = found.iter().filter(|address| refusal(address).is_none());
    let allowed: Vec<SocketAddr> = allowed.copied().take(MAX_ADDRESSES).collect();
    match (allowed.is_empty(), found.first()) {
        (false, _) => Ok(allowed),
        (true, Some(first)) => Err(Attempt::AddressRefused(
            first.ip(),
            refusal(first).unwrap_or_default(),
        )),
        (true, None) => Err(Attempt::NotResolved(io::Error::other("it has no address"))),
    }
}

async fn connect(
    endpoint: &Endpoint,
    addresses: &[SocketAddr],
    limit: Duration,
) -> Result<Socket, Attempt> {
    let mut last = io::Error::other("it has no address");
    for address in addresses {
        let connected = timeout(limit, open(endpoint, *address)).await;
        let late = || io::Error::new(io::ErrorKind::TimedOut, "not within the connect time-out");
        match connected.unwrap_or_else(|_| Err(late())) {
            Ok(socket) => return Ok(socket),
            Err(error) => last = error,
        }
    }
    Err(Attempt::NotConnected(last))
}

async fn open(endpoint: &Endpoint, address: SocketAddr) -> io::Result<Socket> {
    let stream = TcpStream::connect(address).await?;
    let _ = stream.set_nodelay(true);
    match &endpoint.tls {
        None => Ok(Socket::Clear(stream)),
        Some(tls) => {
            let host = &endpoint.target.host;
            tls.connect(host, stream, Protocol::Http1).await
        }
    }
}

async fn read_some(mut body: Incoming, mut bytes_left: u64) {
    while let Some(Ok(frame)) = body.frame().await {
        let length = frame.data_ref().map_or(0, Bytes::len) as u64;
        match bytes_left.checked_sub(length) {
            Some(left) => bytes_left = left,
            None => return,
        }
    }
}
