//! The operator's pages, on a listener of their own: metrics, health, fleet, explain, drain.

mod fleet;
mod guard;
mod kv;
mod pairs;
mod readiness;
mod responses;
mod worker_metrics;

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use http_body_util::{BodyExt, Limited};
use hyper::header::{self, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::json;

use self::guard::Guard;
pub use self::kv::KvPages;
pub use self::readiness::Readiness;
pub use self::responses::ResponsesPage;
use self::worker_metrics::WorkerMetrics;
use crate::http::io_threads::OffloadThread;
use crate::http::server::RequestBody;
use crate::observe::metrics::Registry;
use crate::peers::Peers;
use crate::prompt::{self, Api};
use crate::relay::Relay;
use crate::secret::Secret;
use crate::{http, observe};

/// The page at `/`.
const PATHS: &str = "\
With `admin.token`, all but the first four need `Authorization: Bearer TOKEN`.

GET  /                    this page
GET  /metrics             Prometheus metrics
GET  /healthz             200 while the process lives
GET  /readyz              200 while a worker can take requests (and the response store is up, if it is required)
GET  /fleet               workers, models, load and other replicas (JSON)
GET  /kv                  state of the workers' KV events and of the prefix-cache index (JSON)
GET  /kv/blocks           ?worker=NAME&rank=0: every cached block of one rank (JSON)
GET  /responses           responses by status, and their store (JSON)
POST /explain             send any request body: every worker's cost, and the decision (JSON); ?path=/v1/responses for another API; &tenant=NAME with that tenant's cache salt and stored responses; &tokens=true shows the prompt's tokens
POST /drain               stop accepting, finish running requests, exit; ?worker=NAME: send that worker no new requests
POST /undrain?worker=NAME send it requests again
";

/// The admin listener's handler.
#[derive(Debug)]
pub struct AdminServer {
    relay: Arc<Relay>,
    peers: Peers,
    kv: Arc<KvPages>,
    responses: ResponsesPage,
    registry: Registry,
    worker_metrics: WorkerMetrics,
    /// One scrape at a time: each sets the gauges of all workers anew.
    scraping: Mutex<()>,
    guard: Guard,
    /// Lists blocks, which takes as long as there are many.
    listing: OffloadThread,
    readiness: Arc<Readiness>,
    is_drain_requested: AtomicBool,
    drain_requested: tokio::sync::Notify,
    body_bytes_max: usize,
}

/// Who may use the pages, and for how large a body.
#[derive(Clone, Copy, Debug)]
pub struct Access<'a> {
    /// Empty: no token is asked for.
    pub token: &'a Secret,
    pub body_bytes_max: u64,
}

impl AdminServer {
    pub fn new(
        relay: Arc<Relay>,
        peers: Peers,
        kv: KvPages,
        responses: ResponsesPage,
        registry: Registry,
        readiness: Arc<Readiness>,
        access: Access<'_>,
    ) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            worker_metrics: WorkerMetrics::new(&registry),
            scraping: Mutex::new(()),
            guard: Guard::new(access.token),
            listing: OffloadThread::start("admin-pages")?,
            relay,
            peers,
            kv: Arc::new(kv),
            responses,
            registry,
            readiness,
            is_drain_requested: AtomicBool::new(false),
            drain_requested: tokio::sync::Notify::new(),
            body_bytes_max: usize::try_from(access.body_bytes_max).unwrap_or(usize::MAX),
        }))
    }

    /// Resolves when an operator has asked the process to drain.
    pub async fn drain_requested(&self) {
        while !self.is_drain_requested.load(Relaxed) {
            self.drain_requested.notified().await;
        }
    }

    pub async fn handle(self: Arc<Self>, request: Request<RequestBody>) -> Response<http::Body> {
        let path = request.uri().path().to_owned();
        let query = request.uri().query().unwrap_or_default().to_owned();
        let checked = self
            .guard
            .check(request.method(), request.uri(), request.headers());
        if let Err(refusal) = checked {
            let mut response = refuse(refusal.status(), refusal.message());
            if refusal.status() == StatusCode::UNAUTHORIZED {
                let scheme = HeaderValue::from_static("Bearer");
                response
                    .headers_mut()
                    .insert(header::WWW_AUTHENTICATE, scheme);
            }
            return response;
        }
        if let Some(refusal) = refuse_unknown_parameter(request.method(), &path, &query) {
            return refusal;
        }
        match (request.method(), path.as_str()) {
            (&Method::GET, "/") => text(StatusCode::OK, PATHS),
            (&Method::GET, "/healthz") => text(StatusCode::OK, "ok\n"),
            (&Method::GET, "/readyz") => self.ready().await,
            (&Method::GET, "/metrics") => self.metrics(),
            (&Method::GET, "/fleet") => {
                let page = fleet::page(&self.relay, &self.peers, observe::now());
                answer(StatusCode::OK, &page)
            }
            (&Method::GET, "/kv") => answer(StatusCode::OK, &self.kv.page(observe::now())),
            (&Method::GET, "/kv/blocks") => self.blocks(&query).await,
            (&Method::GET, "/responses") => answer(StatusCode::OK, &self.responses.page().await),
            (&Method::POST, "/explain") => self.explain(request, &query).await,
            (&Method::POST, "/drain") => match parameter(&query, "worker") {
                Some(worker) => self.set_drained(&worker, true),
                None => {
                    self.is_drain_requested.store(true, Relaxed);
                    self.drain_requested.notify_waiters();
                    self.drain_requested.notify_one();
                    answer(StatusCode::ACCEPTED, &json!({"draining": true}))
                }
            },
            (&Method::POST, "/undrain") => match parameter(&query, "worker") {
                Some(worker) => self.set_drained(&worker, false),
                None => refuse(
                    StatusCode::BAD_REQUEST,
                    "name a worker: /undrain?worker=NAME",
                ),
            },
            (
                _,
                "/" | "/healthz" | "/readyz" | "/metrics" | "/fleet" | "/kv" | "/kv/blocks"
                | "/responses",
            ) => refuse(StatusCode::METHOD_NOT_ALLOWED, "use GET"),
            (_, "/explain" | "/drain" | "/undrain") => {
                refuse(StatusCode::METHOD_NOT_ALLOWED, "use POST")
            }
            _ => refuse(StatusCode::NOT_FOUND, "no such page; GET / lists them"),
        }
    }

    async fn ready(&self) -> Response<http::Body> {
        match self.readiness.check().await {
            Ok(()) => match self.readiness.detail() {
                None => text(StatusCode::OK, "ready\n"),
                Some(detail) => text(StatusCode::OK, format!("ready; {detail}\n")),
            },
            Err(missing) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{missing}\n")),
        }
    }

    fn metrics(&self) -> Response<http::Body> {
        let page = {
            let _scraping = self.scraping.lock();
            self.worker_metrics.update(&self.relay, observe::now());
            self.registry.text()
        };
        let mut response = text(StatusCode::OK, page);
        let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
        response.headers_mut().insert(header::CONTENT_TYPE, kind);
        response
    }

    async fn explain(&self, request: Request<RequestBody>, query: &str) -> Response<http::Body> {
        let path = parameter(query, "path");
        let shows_tokens = match parameter(query, "tokens").as_deref() {
            None | Some("false") => false,
            Some("true") => true,
            Some(_) => return refuse(StatusCode::BAD_REQUEST, "tokens is true or false"),
        };
        let (head, body) = request.into_parts();
        let Ok(body) = Limited::new(body, self.body_bytes_max).collect().await else {
            return refuse(
                StatusCode::PAYLOAD_TOO_LARGE,
                "the request body is too large or incomplete",
            );
        };
        let body = body.to_bytes();
        let api = match path.as_deref() {
            None | Some("/v1/chat/completions") => Api::Chat,
            Some("/v1/completions") => Api::Completions,
            Some("/v1/responses") => Api::Responses,
            Some(_) => {
                return refuse(
                    StatusCode::BAD_REQUEST,
                    "path must be /v1/chat/completions, /v1/completions or /v1/responses",
                );
            }
        };
        // Engines get stored responses as one whole input, and some tenants' requests with a cache salt.
        let tenant = parameter(query, "tenant");
        let body = match self.responses.engine_body(api, tenant, body).await {
            Ok(body) => body,
            Err(error) => return refuse(StatusCode::BAD_REQUEST, &error),
        };
        match prompt::peek(api, &body, self.relay.block_bytes()) {
            Err(error) => refuse(StatusCode::BAD_REQUEST, &error.to_string()),
            Ok(peek) => {
                let explained = self
                    .relay
                    .explain(api, &head.headers, peek, &body, shows_tokens);
                match explained.await {
                    Err(error) => refuse(StatusCode::NOT_FOUND, &error.to_string()),
                    Ok(explanation) => answer(StatusCode::OK, &explanation),
                }
            }
        }
    }

    async fn blocks(&self, query: &str) -> Response<http::Body> {
        let rank = parameter(query, "rank").unwrap_or_else(|| "0".to_owned());
        let (Some(name), Ok(rank)) = (parameter(query, "worker"), rank.parse()) else {
            return refuse(
                StatusCode::BAD_REQUEST,
                "name a worker, and a rank if it has several: /kv/blocks?worker=NAME&rank=0",
            );
        };
        let id = {
            let snapshot = self.relay.fleet().snapshot();
            let mut workers = snapshot.workers.iter().map(|status| &status.worker);
            let found = workers.find(|worker| *worker.name == *name);
            found.map(|worker| worker.id)
        };
        let kv = self.kv.clone();
        let list = {
            let name = name.clone();
            move || {
                let blocks = kv.blocks(observe::now(), id?, &name, rank)?;
                Some(answer(StatusCode::OK, &blocks))
            }
        };
        match self.listing.run(list).await.flatten() {
            Some(blocks) => blocks,
            None => refuse(
                StatusCode::NOT_FOUND,
                &format!(
                    "no KV events of worker `{name}`, rank {rank}; GET /kv lists the ranks that have them"
                ),
            ),
        }
    }

    fn set_drained(&self, worker: &str, drained: bool) -> Response<http::Body> {
        if self.relay.fleet().set_drained(worker, drained) {
            answer(
                StatusCode::OK,
                &json!({"worker": worker, "draining": drained}),
            )
        } else {
            refuse(
                StatusCode::NOT_FOUND,
                &format!("no worker is called `{worker}`; GET /fleet lists them"),
            )
        }
    }
}

/// Refuses a misspelt parameter: `POST /drain?wroker=NAME` must not drain the whole router.
fn refuse_unknown_parameter(
    method: &Method,
    path: &str,
    query: &str,
) -> Option<Response<http::Body>> {
    let known: &[&str] = match (method, path) {
        (&Method::POST, "/drain" | "/undrain") => &["worker"],
        (&Method::POST, "/explain") => &["path", "tenant", "tokens"],
        (&Method::GET, "/kv/blocks") => &["worker", "rank"],
        _ => return None,
    };
    let mut pairs = form_urlencoded::parse(query.as_bytes());
    let (unknown, _) = pairs.find(|(key, _)| !known.contains(&&**key))?;
    let message = format!(
        "unknown parameter `{unknown}`; {path} knows {}",
        known.join(", ")
    );
    Some(refuse(StatusCode::BAD_REQUEST, &message))
}

/// One parameter of a query.
fn parameter(query: &str, name: &str) -> Option<String> {
    let mut pairs = form_urlencoded::parse(query.as_bytes());
    pairs
        .find(|(key, _)| key == name)
        .map(|(_, value)| value.into_owned())
}

fn text(status: StatusCode, text: impl Into<String>) -> Response<http::Body> {
    let mut response = Response::new(http::full(text.into()));
    *response.status_mut() = status;
    let kind = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

fn answer(status: StatusCode, value: &impl Serialize) -> Response<http::Body> {
    let body = serde_json::to_string_pretty(value)
        .unwrap_or_else(|error| format!("{{\"error\":\"{error}\"}}"));
    let mut response = text(status, body + "\n");
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    response
}

fn refuse(status: StatusCode, message: &str) -> Response<http::Body> {
    answer(status, &json!({"error": message}))
}
