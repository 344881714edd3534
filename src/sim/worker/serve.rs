//! One HTTP connection: reads requests and sends the answers.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tracing::debug;

use super::body::CloseAfter;
use super::http_answer::{self, Answer, LastAnswer, Result, detail, wrong_method};
use super::request::missing_field;
use super::routes::{self, Listener};
use super::shared::Shared;

/// A longer body closes its connection.
const MAX_BODY_BYTES: usize = 64 << 20;

/// Serves a connection until either side ends it.
pub(crate) async fn connection(
    shared: Arc<Shared>,
    stream: TcpStream,
    number: u64,
    listener: Listener,
) {
    // Nagle's algorithm would delay the small token events.
    if let Err(error) = stream.set_nodelay(true) {
        debug!(%error, "TCP_NODELAY could not be set");
    }
    let close = Arc::new(Notify::new());
    let is_last = AtomicBool::new(false);
    let service = service_fn(async |request| {
        let answer = handle(&shared, &close, number, listener, request).await?;
        if answer.extensions().get::<LastAnswer>().is_none() {
            return Ok(answer);
        }
        is_last.store(true, Ordering::Relaxed);
        Ok::<_, io::Error>(answer.map(|body| body.then(Some(CloseAfter(Arc::clone(&close))))))
    });
    let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    let ended = loop {
        tokio::select! {
            // The answer's head is written before the shutdown begins, so it has no "connection: close" header.
            biased;
            ended = connection.as_mut() => break ended,
            () = close.notified() => connection.as_mut().graceful_shutdown(),
        }
    };
    if is_last.load(Ordering::Relaxed) {
        shared.life.end();
    }
    if let Err(error) = ended {
        debug!(number, %error, "connection ended early");
    }
}

async fn handle(
    shared: &Arc<Shared>,
    close: &Arc<Notify>,
    connection: u64,
    listener: Listener,
    request: Request<Incoming>,
) -> Result<Answer> {
    let (parts, body) = request.into_parts();
    let body = Limited::new(body, MAX_BODY_BYTES).collect().await;
    let body = body.map_err(io::Error::other)?.to_bytes();
    let faults = shared.faults();
    let close = faults.close_idle.then(|| CloseAfter(Arc::clone(close)));
    let route = routes::route(listener, parts.uri.path());
    // Routers ask in this way which APIs there are.
    let asked = match parts.uri.path() {
        "/v1/responses" => Some((shared.settings.no_responses, "input")),
        "/v1/messages" => Some((shared.settings.no_messages, "messages")),
        _ => None,
    };
    if let Some((is_missing, field)) = asked
        && parts.method == Method::POST
        && &*body == b"{}"
    {
        return Ok(if is_missing {
            detail(StatusCode::NOT_FOUND, "Not Found")
        } else {
            http_answer::error(&missing_field(field, &body))
        });
    }
    if route.as_ref().is_none_or(|(_, route)| route.is_recorded()) {
        shared.recorder.record(&parts, &body, connection);
    }
    let path = parts.uri.path();
    let is_missing = shared.settings.no_responses && path.starts_with("/v1/responses")
        || shared.settings.no_messages && path.starts_with("/v1/messages");
    let answer = match route.filter(|_| !is_missing) {
        None => detail(StatusCode::NOT_FOUND, "Not Found"),
        Some((method, _)) if method != parts.method => wrong_method(&method),
        Some((_, route)) => routes::dispatch(shared, route, &parts, &body, faults).await?,
    };
    Ok(answer.map(|body| body.then(close)))
}
