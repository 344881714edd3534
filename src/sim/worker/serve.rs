//! One connection: its requests, which of them is meant, and the answer to each.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper::header::{self, HeaderValue};
use hyper::http::request::Parts;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tracing::debug;

use super::answer::json;
use super::ask::{self, Api};
use super::body::{AnswerBody, CloseAfter};
use super::problem::Problem;
use super::{Shared, generate, lists, metrics, pooling, tokenizer, transfer};
use crate::sim::fault::Faults;

pub(crate) type Answer = Response<AnswerBody>;

/// A longer body ends its connection.
const BODY_BYTES_MAX: usize = 64 << 20;

/// An error ends the connection without an answer.
type Result<T> = std::result::Result<T, io::Error>;

/// Which of a worker's addresses a connection came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entrance {
    Api,
    Bootstrap,
}

/// With an answer: the process ends once it is out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LastAnswer;

#[derive(Clone, Copy)]
enum Route {
    Generate(Api),
    Render(Api),
    Embeddings,
    Rerank,
    Models,
    Health,
    Version,
    Metrics,
    Tokenize,
    Detokenize,
    ResetPrefixCache,
    KvEventSources,
    Seen,
    Held,
    Fault,
    TransferStats,
    Blocks,
    Release,
    Bootstrap,
    /// `/v1/responses/{id}` and what is below: nothing is stored here.
    StoredResponse,
}

/// Serves a connection until either side ends it.
pub(crate) async fn connection(
    shared: Arc<Shared>,
    stream: TcpStream,
    number: u64,
    entrance: Entrance,
) {
    // Tokens are small and come one at a time; none may wait for the next.
    if let Err(error) = stream.set_nodelay(true) {
        debug!(%error, "no delay could not be switched off");
    }
    let close = Arc::new(Notify::new());
    let is_last = AtomicBool::new(false);
    let service = service_fn(async |request| {
        let answer = handle(&shared, &close, number, entrance, request).await?;
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
            // The answer's head is written before the wish to close is heard, so no header tells of it.
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
    entrance: Entrance,
    request: Request<Incoming>,
) -> Result<Answer> {
    let (parts, body) = request.into_parts();
    let body = Limited::new(body, BODY_BYTES_MAX).collect().await;
    let body = body.map_err(io::Error::other)?.to_bytes();
    let faults = shared.faults();
    let close = faults.close_idle.then(|| CloseAfter(Arc::clone(close)));
    let route = route(entrance, parts.uri.path());
    if !matches!(
        route,
        Some((
            _,
            Route::Health
                | Route::Metrics
                | Route::KvEventSources
                | Route::Seen
                | Route::Held
                | Route::Fault
                | Route::TransferStats
                | Route::Blocks
                | Route::Release
                | Route::Bootstrap
        ))
    ) {
        shared.seen.record(&parts, &body, connection);
    }
    let answer = match route {
        None => detail(StatusCode::NOT_FOUND, "Not Found"),
        Some((method, _)) if method != parts.method => wrong_method(&method),
        Some((_, route)) => dispatch(shared, route, &parts, &body, faults).await?,
    };
    Ok(answer.map(|body| body.then(close)))
}

fn route(entrance: Entrance, path: &str) -> Option<(Method, Route)> {
    if entrance == Entrance::Bootstrap {
        return (path == "/query").then_some((Method::GET, Route::Bootstrap));
    }
    let found = match path {
        "/v1/chat/completions" => (Method::POST, Route::Generate(Api::Chat)),
        "/v1/completions" => (Method::POST, Route::Generate(Api::Completions)),
        "/v1/responses" => (Method::POST, Route::Generate(Api::Responses)),
        "/v1/chat/completions/render" => (Method::POST, Route::Render(Api::Chat)),
        "/v1/completions/render" => (Method::POST, Route::Render(Api::Completions)),
        "/v1/responses/render" => (Method::POST, Route::Render(Api::Responses)),
        "/v1/embeddings" => (Method::POST, Route::Embeddings),
        "/v1/rerank" | "/rerank" => (Method::POST, Route::Rerank),
        "/v1/models" => (Method::GET, Route::Models),
        "/health" | "/ping" => (Method::GET, Route::Health),
        "/version" => (Method::GET, Route::Version),
        "/metrics" => (Method::GET, Route::Metrics),
        "/tokenize" => (Method::POST, Route::Tokenize),
        "/detokenize" => (Method::POST, Route::Detokenize),
        "/reset_prefix_cache" => (Method::POST, Route::ResetPrefixCache),
        "/kv_event_sources" => (Method::GET, Route::KvEventSources),
        "/sim/requests" => (Method::GET, Route::Seen),
        "/sim/cache" => (Method::GET, Route::Held),
        "/sim/faults" => (Method::POST, Route::Fault),
        "/sim/kv_transfers" => (Method::GET, Route::TransferStats),
        "/sim/blocks" => (Method::POST, Route::Blocks),
        "/sim/release" => (Method::POST, Route::Release),
        _ => {
            let below = path.strip_prefix("/v1/responses/")?;
            match below.split_once('/') {
                None => (Method::GET, Route::StoredResponse),
                Some((_, "cancel")) => (Method::POST, Route::StoredResponse),
                Some(_) => return None,
            }
        }
    };
    Some(found)
}

async fn dispatch(
    shared: &Arc<Shared>,
    route: Route,
    parts: &Parts,
    body: &Bytes,
    faults: Faults,
) -> Result<Answer> {
    let answer = match route {
        Route::Generate(api) => return generate::answer(shared, api, parts, body, faults).await,
        Route::Render(api) => generate::rendered(shared, api, parts, body, &faults).await,
        Route::Embeddings => return pooling::embeddings(shared, parts, body, faults).await,
        Route::Rerank => return pooling::rerank(shared, parts, body, faults).await,
        Route::Models => ok(lists::models(
            &shared.settings,
            shared.started_unix_seconds(),
        )),
        Route::Health if faults.unhealthy || shared.life.is_core_dead() => {
            empty(StatusCode::SERVICE_UNAVAILABLE)
        }
        Route::Health => empty(StatusCode::OK),
        Route::Version => ok(lists::VERSION),
        Route::Metrics => metrics_page(shared),
        Route::Tokenize => {
            generate::tokens_pause(&faults).await;
            let tokens = match &shared.own_tokens {
                Some(own) => own.tokenized(body),
                None => ask::read_tokenize(body, &shared.settings.models),
            };
            match tokens {
                Ok(tokens) => ok(lists::tokens(&tokens, shared.settings.context_tokens())),
                Err(found) => problem(&found),
            }
        }
        Route::Detokenize => match lists::read_detokenize(body) {
            Ok(tokens) => ok(lists::detokenized(&tokenizer::decode(&tokens))),
            Err(found) => problem(&found),
        },
        Route::ResetPrefixCache => ok(lists::success(shared.ranks.reset())),
        Route::KvEventSources => ok(shared.ranks.sources().to_string()),
        Route::Seen => ok(json(&shared.seen.stats())),
        Route::Held => ok(json(&shared.ranks.truths())),
        Route::Fault => match Faults::from_json(body) {
            Ok(faults) => {
                let now = json(&faults);
                shared.set_faults(faults);
                ok(now)
            }
            Err(message) => problem(&Problem::bad_request(message)),
        },
        Route::TransferStats => ok(json(&shared.kv_transfers())),
        Route::Blocks => match transfer::blocks(shared, body).await {
            Ok(answer) => ok(answer),
            Err(unanswered) => return Err(io::Error::other(format!("{unanswered:?}"))),
        },
        Route::Release => {
            transfer::release(shared, body);
            ok("{}")
        }
        Route::Bootstrap => ok(transfer::bootstrap_page(shared)),
        Route::StoredResponse => {
            let below = parts.uri.path().trim_start_matches("/v1/responses/");
            let id = below.trim_end_matches("/cancel");
            problem(&Problem::unknown_response(id))
        }
    };
    Ok(answer)
}

fn metrics_page(shared: &Shared) -> Answer {
    let text = metrics::render(
        shared.settings.first_model(),
        shared.started.as_secs_f64(),
        &shared.settings.engine(),
        shared.ranks.iter(),
    );
    typed(
        StatusCode::OK,
        metrics::CONTENT_TYPE,
        AnswerBody::whole(text),
    )
}

/// Whether a body may be read as JSON. A request that names no type is given the benefit.
pub(crate) fn check_content_type(parts: &Parts) -> std::result::Result<(), Problem> {
    match parts.headers.get(header::CONTENT_TYPE) {
        Some(kind) if !kind.as_bytes().starts_with(b"application/json") => {
            Err(Problem::media_type())
        }
        Some(_) | None => Ok(()),
    }
}

pub(crate) fn ok(json: impl Into<Bytes>) -> Answer {
    typed(StatusCode::OK, "application/json", AnswerBody::whole(json))
}

pub(crate) fn problem(problem: &Problem) -> Answer {
    let status = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    typed(
        status,
        "application/json",
        AnswerBody::whole(problem.body()),
    )
}

pub(crate) fn typed(status: StatusCode, kind: &'static str, body: AnswerBody) -> Answer {
    let mut answer = plain(status, body);
    let kind = HeaderValue::from_static(kind);
    answer.headers_mut().insert(header::CONTENT_TYPE, kind);
    answer
}

fn empty(status: StatusCode) -> Answer {
    plain(status, AnswerBody::whole(Bytes::new()))
}

fn plain(status: StatusCode, body: AnswerBody) -> Answer {
    let mut answer = Response::new(body);
    *answer.status_mut() = status;
    let headers = answer.headers_mut();
    headers.insert(header::SERVER, HeaderValue::from_static("uvicorn"));
    headers.insert(header::VARY, HeaderValue::from_static("Origin"));
    answer
}

fn detail(status: StatusCode, text: &str) -> Answer {
    let body = format!("{{\"detail\":\"{text}\"}}");
    typed(status, "application/json", AnswerBody::whole(body))
}

fn wrong_method(allowed: &Method) -> Answer {
    let mut answer = detail(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed");
    let allowed = HeaderValue::from_str(allowed.as_str()).expect("a method is a token");
    answer.headers_mut().insert(header::ALLOW, allowed);
    answer
}
