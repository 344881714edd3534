//! Carries the requests of `object_store` over the router's pools of connections.

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Full};
use hyper::header::{HOST, HeaderValue, USER_AGENT};
use hyper::{Request, Uri};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
    HttpResponseBody, HttpService,
};
use object_store::{ClientConfigKey, ClientOptions};
use parking_lot::Mutex;
use tokio::time::{Instant, Sleep};

use crate::http::client::{self, EngineBody, Pool};
use crate::http::tls;
use crate::observe;

/// Until the head of an answer has come, which is after a part of 8 MiB, or at most 64 MiB, was sent.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Between two pieces of an answer's body.
const PIECE_TIMEOUT: Duration = Duration::from_secs(30);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The bucket's server, and those that give credentials.
const MAX_POOLS: usize = 8;
/// For each server and I/O thread. Nobody closes those that nobody uses again.
const MAX_IDLE: u32 = 8;
const USER_AGENT_TEXT: &str = concat!("warmroute/", env!("CARGO_PKG_VERSION"));

/// Makes the clients of a bucket, and of the servers that give credentials for it.
#[derive(Debug)]
pub(super) struct S3Connector {
    pools: Arc<Pools>,
}

impl S3Connector {
    pub(super) fn new(tls: Arc<tls::Client>) -> Self {
        Self {
            pools: Arc::new(Pools {
                tls,
                known: Mutex::default(),
            }),
        }
    }
}

impl HttpConnector for S3Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let allows_http = options.get_config_value(&ClientConfigKey::AllowHttp);
        Ok(HttpClient::new(StorageClient {
            pools: self.pools.clone(),
            allows_http: allows_http.as_deref() == Some("true"),
        }))
    }
}

/// The connections to each server: with TLS or without, by `host:port`.
#[derive(Debug)]
struct Pools {
    tls: Arc<tls::Client>,
    known: Mutex<BTreeMap<(bool, String), Arc<Pool>>>,
}

impl Pools {
    fn get(&self, has_tls: bool, authority: String) -> Arc<Pool> {
        let tls = has_tls.then(|| self.tls.clone());
        let settings = client::Settings {
            connect_timeout: CONNECT_TIMEOUT,
            max_idle_connections: MAX_IDLE,
            ..client::Settings::default()
        };
        let mut known = self.known.lock();
        if let Some(pool) = known.get(&(has_tls, authority.clone())) {
            return pool.clone();
        }
        let pool = Pool::with_tls(authority.clone(), settings, tls);
        if known.len() < MAX_POOLS {
            known.insert((has_tls, authority), pool.clone());
        }
        pool
    }
}

#[derive(Debug)]
struct StorageClient {
    pools: Arc<Pools>,
    allows_http: bool,
}

impl StorageClient {
    async fn send(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (mut head, body) = request.into_parts();
        let target = S3Target::of(&head.uri).map_err(unusable)?;
        if !target.has_tls && !self.allows_http {
            return Err(unusable("`http` is not allowed (batches.s3.allow_http)"));
        }
        let host = HeaderValue::from_str(&target.host);
        let host = host.map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))?;
        // The signature has this host.
        head.headers.insert(HOST, host);
        let agent = HeaderValue::from_static(USER_AGENT_TEXT);
        head.headers.entry(USER_AGENT).or_insert(agent);
        head.uri = client::origin_form(&head.uri);
        // One piece, which is not copied.
        let body = body.collect().await?.to_bytes();
        let request = Request::from_parts(head, Full::new(body));
        let pool = self.pools.get(target.has_tls, target.authority);
        let answer = tokio::time::timeout(ANSWER_TIMEOUT, pool.send(request)).await;
        let answer = answer.map_err(|late| HttpError::new(HttpErrorKind::Timeout, late))?;
        let answer = answer.map_err(|error| HttpError::new(kind_of(&error), error))?;
        Ok(answer.map(|body| HttpResponseBody::new(S3AnswerBody::new(body))))
    }
}

/// Only errors after which another try may help have kinds of their own.
fn kind_of(error: &client::Error) -> HttpErrorKind {
    match error {
        client::Error::Connect(_) => HttpErrorKind::Connect,
        // The server closed an idle connection.
        client::Error::Stale { .. } => HttpErrorKind::Request,
        client::Error::Broken(_) => HttpErrorKind::Interrupted,
    }
}

fn unusable(reason: &'static str) -> HttpError {
    HttpError::new(HttpErrorKind::Unknown, io::Error::other(reason))
}

type Answer<'a> = Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'a>>;

impl HttpService for StorageClient {
    // As the macro `async_trait` writes it.
    fn call<'life0, 'async_trait>(&'life0 self, request: HttpRequest) -> Answer<'async_trait>
    where
        'life0: 'async_trait,
        Self: 'async_trait,
    {
        Box::pin(self.send(request))
    }
}

/// Where a request goes.
#[derive(Debug, PartialEq)]
struct S3Target {
    has_tls: bool,
    /// `host:port`.
    authority: String,
    /// As the header `host` names it: without the port that the scheme has anyway.
    host: String,
}

impl S3Target {
    fn of(uri: &Uri) -> Result<Self, &'static str> {
        let (has_tls, usual_port) = match uri.scheme_str() {
            Some("https") => (true, 443),
            Some("http") => (false, 80),
            Some(_) | None => return Err("the URL begins with neither `http` nor `https`"),
        };
        let host = uri.host().filter(|host| !host.is_empty());
        let host = host.ok_or("the URL names no host")?;
        let port = uri.port_u16().unwrap_or(usual_port);
        let authority = format!("{host}:{port}");
        let host = if port == usual_port {
            host.to_owned()
        } else {
            authority.clone()
        };
        Ok(Self {
            has_tls,
            authority,
            host,
        })
    }
}

/// An answer's body that must not stand still.
struct TimedBody {
    body: EngineBody,
    /// Runs while a piece is waited for.
    timer: Option<Pin<Box<Sleep>>>,
}

/// `object_store` wants bodies that threads could share, and shares none: nobody waits for the lock.
struct S3AnswerBody(Mutex<TimedBody>);

impl S3AnswerBody {
    fn new(body: EngineBody) -> Self {
        Self(Mutex::new(TimedBody { body, timer: None }))
    }
}

impl Body for S3AnswerBody {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        let TimedBody { body, timer } = self.0.get_mut();
        if let Poll::Ready(frame) = Pin::new(body).poll_frame(cx) {
            *timer = None;
            let broken = |error| HttpError::new(HttpErrorKind::Interrupted, error);
            return Poll::Ready(frame.map(|frame| frame.map_err(broken)));
        }
        let running = timer.get_or_insert_with(|| {
            let deadline = Instant::from_std(observe::now()) + PIECE_TIMEOUT;
            Box::pin(tokio::time::sleep_until(deadline))
        });
        running.as_mut().poll(cx).map(|()| {
            let late = io::Error::from(io::ErrorKind::TimedOut);
            Some(Err(HttpError::new(HttpErrorKind::Timeout, late)))
        })
    }

    fn size_hint(&self) -> SizeHint {
        self.0.lock().body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_goes_to_the_host_that_its_signature_has() {
        let check = |uri: &str, expected: Option<(bool, &str, &str)>| {
            let found = S3Target::of(&uri.parse().unwrap()).ok();
            let expected = expected.map(|(has_tls, authority, host)| S3Target {
                has_tls,
                authority: authority.to_owned(),
                host: host.to_owned(),
            });
            assert_eq!(found, expected, "{uri}");
        };
        let amazon = "s3.eu-central-1.amazonaws.com";
        check(
            &format!("https://{amazon}/b/files/x?partNumber=1"),
            Some((true, &format!("{amazon}:443"), amazon)),
        );
        check(
            "https://s3.local:443/",
            Some((true, "s3.local:443", "s3.local")),
        );
        check(
            "http://minio:9000/b",
            Some((false, "minio:9000", "minio:9000")),
        );
        check(
            "http://[::1]:9000/b",
            Some((false, "[::1]:9000", "[::1]:9000")),
        );
        check("/b/files/x", None);
    }
}
