//! A client over TLS.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, SupportedProtocolVersion, version};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::ca::{Ca, Pair};
use crate::client;
use crate::patience::too_long;

/// What a client trusts, has and offers.
#[derive(Clone)]
pub(super) struct Client {
    config: ClientConfig,
}

const ALL: &[&SupportedProtocolVersion] = &[&version::TLS13, &version::TLS12];

impl Client {
    pub(super) fn new(ca: &Ca) -> Self {
        Self::with(ca, None, ALL)
    }

    pub(super) fn with_certificate(ca: &Ca, pair: &Pair) -> Self {
        Self::with(ca, Some(pair), ALL)
    }

    pub(super) fn of_tls12(ca: &Ca) -> Self {
        Self::with(ca, None, &[&version::TLS12])
    }

    fn with(ca: &Ca, pair: Option<&Pair>, versions: &[&'static SupportedProtocolVersion]) -> Self {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .unwrap()
            .with_root_certificates(ca.roots());
        let mut config = match pair {
            None => builder.with_no_client_auth(),
            Some(pair) => builder
                .with_client_auth_cert(pair.chain(), pair.private_key())
                .unwrap(),
        };
        // Each connection is a full handshake.
        config.resumption = rustls::client::Resumption::disabled();
        Self { config }
    }

    pub(super) async fn connect(
        &self,
        address: SocketAddr,
        alpn: &str,
    ) -> Result<TlsStream<TcpStream>, String> {
        let stream = TcpStream::connect(address)
            .await
            .map_err(|error| error.to_string())?;
        self.secure(stream, alpn).await
    }

    /// Shakes hands on a connection.
    pub(super) async fn secure(
        &self,
        stream: TcpStream,
        alpn: &str,
    ) -> Result<TlsStream<TcpStream>, String> {
        let mut config = self.config.clone();
        if !alpn.is_empty() {
            config.alpn_protocols = vec![alpn.as_bytes().to_vec()];
        }
        let name = ServerName::try_from("localhost").unwrap();
        let connecting = TlsConnector::from(Arc::new(config)).connect(name, stream);
        let connected = tokio::time::timeout(too_long(), connecting).await;
        connected
            .expect("no hang")
            .map_err(|error| error.to_string())
    }

    /// One request over HTTP/1.1 on a connection of its own.
    pub(super) async fn get(
        &self,
        address: SocketAddr,
        path: &str,
    ) -> Result<client::Answer, String> {
        self.send(address, "GET", path, "").await
    }

    pub(super) async fn send(
        &self,
        address: SocketAddr,
        method: &str,
        path: &str,
        body: impl Into<Bytes>,
    ) -> Result<client::Answer, String> {
        let stream = self.connect(address, "http/1.1").await?;
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
        answer(stream, address, method, path, body.into()).await
    }

    /// One request over HTTP/2.
    pub(super) async fn get_http2(
        &self,
        address: SocketAddr,
        path: &str,
    ) -> Result<client::Answer, String> {
        let stream = self.connect(address, "h2").await?;
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
        let handshake =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
        let (mut sender, driver) = handshake.await.map_err(|error| error.to_string())?;
        let driving = tokio::spawn(driver);
        let request = Request::get(format!("https://{address}{path}"));
        let request = request.body(Full::<Bytes>::default()).unwrap();
        let answer = read(sender.send_request(request)).await;
        driving.abort();
        answer
    }
}

/// Sends a request over a connection.
pub(super) async fn answer(
    stream: TlsStream<TcpStream>,
    address: SocketAddr,
    method: &str,
    path: &str,
    body: Bytes,
) -> Result<client::Answer, String> {
    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream));
    let (mut sender, driver) = handshake.await.map_err(|error| error.to_string())?;
    let driving = tokio::spawn(driver);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", address.to_string())
        .header("content-type", "application/json")
        .body(Full::new(body))
        .unwrap();
    let answer = read(sender.send_request(request)).await;
    driving.abort();
    answer
}

async fn read(
    answer: impl Future<Output = hyper::Result<hyper::Response<hyper::body::Incoming>>>,
) -> Result<client::Answer, String> {
    let answer = tokio::time::timeout(too_long(), answer)
        .await
        .expect("no hang");
    let (head, body) = answer.map_err(|error| error.to_string())?.into_parts();
    let body = body.collect().await.map_err(|error| error.to_string())?;
    Ok(client::Answer {
        status: head.status.as_u16(),
        headers: head.headers,
        body: body.to_bytes(),
    })
}

/// The value of a metric on a page.
pub(super) fn metric(page: &str, name: &str) -> Option<f64> {
    let line = page.lines().find(|line| line.starts_with(name))?;
    line.rsplit_once(' ')?.1.parse().ok()
}

/// Handshakes of the API's listener that ended so.
pub(super) async fn handshakes(admin: SocketAddr, outcome: &str) -> u64 {
    let page = client::get(admin, "/metrics").await;
    let name = format!("warmroute_tls_handshakes_total{{listener=\"api\",outcome=\"{outcome}\"}}");
    metric(page.text(), &name).unwrap_or(0.0) as u64
}

pub(super) const SHORT: Duration = Duration::from_millis(500);
