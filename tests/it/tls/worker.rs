//! An engine behind TLS: requests come with a client certificate and below a path.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use rustls::ServerConfig;
use rustls::server::WebPkiClientVerifier;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

use super::ca::{Ca, Pair};

/// Accepts TLS and passes requests on to an engine.
pub(super) struct Front {
    pub(super) address: SocketAddr,
    /// The paths of the requests that came, without the prefix.
    pub(super) paths: Arc<Mutex<Vec<String>>>,
    task: JoinHandle<()>,
}

impl Front {
    /// With `client_ca`, clients need a certificate. Paths must begin with `prefix`.
    pub(super) async fn start(
        engine: SocketAddr,
        pair: &Pair,
        client_ca: Option<&Ca>,
        prefix: &'static str,
    ) -> Self {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .unwrap();
        let builder = match client_ca {
            None => builder.with_no_client_auth(),
            Some(ca) => {
                let verifier = WebPkiClientVerifier::builder_with_provider(ca.roots(), provider);
                builder.with_client_cert_verifier(verifier.build().unwrap())
            }
        };
        let mut config = builder
            .with_single_cert(pair.chain(), pair.private_key())
            .unwrap();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let paths: Arc<Mutex<Vec<String>>> = Arc::default();
        let seen = paths.clone();
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, seen) = (acceptor.clone(), seen.clone());
                tokio::spawn(async move {
                    let Ok(stream) = acceptor.accept(stream).await else {
                        return;
                    };
                    let service = service_fn(|request| pass_on(request, engine, prefix, &seen));
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        Self {
            address,
            paths,
            task,
        }
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn pass_on(
    mut request: Request<Incoming>,
    engine: SocketAddr,
    prefix: &str,
    seen: &Mutex<Vec<String>>,
) -> Result<Response<Incoming>, Infallible> {
    let path = request.uri().to_string();
    let below = path.strip_prefix(prefix).unwrap_or("/not-below-the-prefix");
    seen.lock().push(below.to_owned());
    *request.uri_mut() = below.parse().unwrap();
    let stream = TcpStream::connect(engine).await.unwrap();
    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream));
    let (mut sender, driver) = handshake.await.unwrap();
    tokio::spawn(driver);
    Ok(sender.send_request(request).await.unwrap())
}
