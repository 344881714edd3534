//! The operator's pages, on a listener of their own: metrics, health, fleet, explain, drain.

mod config;
mod fleet;
mod guard;
mod kv;
mod pages;
mod pairs;
mod readiness;
mod responses;
mod role;
mod settings;
mod worker_metrics;

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};

use arc_swap::ArcSwap;
use http_body_util::{BodyExt, Limited};
use hyper::header::{self, HeaderValue};
use hyper::{Request, Response, StatusCode};
use parking_lot::Mutex;
use prometheus::IntCounterVec;
use serde::Serialize;
use serde_json::json;
use tracing::{debug, info};

pub use self::config::{ConfigPage, ConfigStatus, ReloadAnswer};
use self::guard::{Guard, Refusal};
pub use self::kv::KvPages;
pub use self::readiness::Readiness;
pub use self::responses::ResponsesPage;
use self::role::Role;
pub use self::settings::{NamesByRole, Settings, Tokens};
use self::worker_metrics::WorkerMetrics;
use crate::http::io_threads::OffloadThread;
use crate::http::server::RequestBody;
use crate::http::tls::ClientNames;
use crate::observe::metrics::Registry;
use crate::peers::Peers;
use crate::prompt::{self, Api};
use crate::relay::Relay;
use crate::{http, observe};

/// The admin listener's handler.
#[derive(Debug)]
pub struct AdminServer {
    relay: ArcSwap<Relay>,
    peers: Peers,
    kv: Arc<KvPages>,
    responses: ResponsesPage,
    config: ConfigPage,
    registry: Registry,
    worker_metrics: WorkerMetrics,
    /// One scrape at a time: each sets the gauges of all workers anew.
    scraping: Mutex<()>,
    guard: ArcSwap<Guard>,
    refusals: IntCounterVec,
    /// Lists blocks, which takes as long as there are many.
    listing: OffloadThread,
    readiness: Arc<Readiness>,
    is_drain_requested: AtomicBool,
    drain_requested: tokio::sync::Notify,
    body_bytes_max: AtomicUsize,
}

/// Pages of parts that this one does not know.
#[derive(Debug)]
pub struct Pages {
    pub kv: KvPages,
    pub responses: ResponsesPage,
    pub config: ConfigPage,
}

/// Who may use the pages, and for how large a body.
#[derive(Clone, Copy, Debug)]
pub struct Access<'a> {
    pub settings: &'a Settings,
    pub body_bytes_max: u64,
}

impl Access<'_> {
    fn body_bytes_max(&self) -> usize {
        usize::try_from(self.body_bytes_max).unwrap_or(usize::MAX)
    }
}

impl AdminServer {
    pub fn new(
        relay: Arc<Relay>,
        peers: Peers,
        pages: Pages,
        registry: Registry,
        readiness: Arc<Readiness>,
        access: Access<'_>,
    ) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            worker_metrics: WorkerMetrics::new(&registry),
            scraping: Mutex::new(()),
            guard: ArcSwap::from_pointee(Guard::new(access.settings)),
            refusals: registry.counters(
                "warmroute_admin_refusals_total",
                "Requests to operators' pages that were refused, by reason: unauthenticated (no known token), forbidden (the \
                 role is not enough), cross_site or foreign_host (a browser's page of another site).",
                &["reason"],
            ),
            listing: OffloadThread::start("admin-pages")?,
            relay: ArcSwap::new(relay),
            peers,
            kv: Arc::new(pages.kv),
            responses: pages.responses,
            config: pages.config,
            registry,
            readiness,
            is_drain_requested: AtomicBool::new(false),
            drain_requested: tokio::sync::Notify::new(),
            body_bytes_max: AtomicUsize::new(access.body_bytes_max()),
        }))
    }

    /// Shows the relay of the next configuration, to whom that lets in.
    pub fn set(&self, relay: Arc<Relay>, access: Access<'_>) {
        self.relay.store(relay);
        self.guard.store(Arc::new(Guard::new(access.settings)));
        self.body_bytes_max.store(access.body_bytes_max(), Relaxed);
    }

    /// Resolves when an operator has asked the process to drain.
    pub async fn drain_requested(&self) {
        while !self.is_drain_requested.load(Relaxed) {
            self.drain_requested.notified().await;
        }
    }

    pub async fn handle(
        self: Arc<Self>,
        request: Request<RequestBody>,
        client: IpAddr,
    ) -> Response<http::Body> {
        let page = pages::find(request.uri().path());
        // What does not exist is said to those who may read what exists.
        let needs = page.map_or(Some(Role::Read), |page| page.needs);
        let is_safe = request.method().is_safe();
        let names = request.extensions().get::<ClientNames>();
        let (uri, headers) = (request.uri(), request.headers());
        let checked = self.guard.load().check(needs, is_safe, uri, headers, names);
        if let Err(refusal) = checked {
            return self.refuse_access(refusal, &request, client);
        }
        let Some(page) = page else {
            return refuse(StatusCode::NOT_FOUND, "no such page; GET / lists them");
        };
        if page.method != request.method() {
            let message = format!("use {}", page.method);
            return refuse(StatusCode::METHOD_NOT_ALLOWED, &message);
        }
        let query = request.uri().query().unwrap_or_default().to_owned();
        if let Err(message) = page.check_parameters(&query) {
            return refuse(StatusCode::BAD_REQUEST, &message);
        }
        self.answer_page(page.name, request, &query, client).await
    }

    async fn answer_page(
        &self,
        page: pages::Name,
        request: Request<RequestBody>,
        query: &str,
        client: IpAddr,
    ) -> Response<http::Body> {
        use pages::Name;
        match page {
            Name::Index => text(StatusCode::OK, pages::index()),
            Name::Alive => text(StatusCode::OK, "ok\n"),
            Name::Ready => self.ready().await,
            Name::Metrics => self.metrics(),
            Name::Fleet => {
                let page = fleet::page(&self.relay.load(), &self.peers, observe::now());
                answer(StatusCode::OK, &page)
            }
            Name::Queue => answer(StatusCode::OK, &self.relay.load().queues().status()),
            Name::Kv => answer(StatusCode::OK, &self.kv.page(observe::now())),
            Name::KvBlocks => self.blocks(query).await,
            Name::Config => answer(StatusCode::OK, &self.config.running()),
            Name::Reload => {
                info!(%client, "an operator asked for a reload of the configuration");
                let (status, body) = self.config.reload().await;
                answer(status, &body)
            }
            Name::Responses => answer(StatusCode::OK, &self.responses.page().await),
            Name::Explain => self.explain(request, query).await,
            Name::Drain => match parameter(query, "worker") {
                Some(worker) => self.set_drained(&worker, true, client),
                None => {
                    info!(%client, "an operator asked for the drain of this router");
                    self.is_drain_requested.store(true, Relaxed);
                    self.drain_requested.notify_waiters();
                    self.drain_requested.notify_one();
                    answer(StatusCode::ACCEPTED, &json!({"draining": true}))
                }
            },
            Name::Undrain => match parameter(query, "worker") {
                Some(worker) => self.set_drained(&worker, false, client),
                None => refuse(
                    StatusCode::BAD_REQUEST,
                    "name a worker: /undrain?worker=NAME",
                ),
            },
        }
    }

    fn refuse_access(
        &self,
        refusal: Refusal,
        request: &Request<RequestBody>,
        client: IpAddr,
    ) -> Response<http::Body> {
        let reason = refusal.reason();
        self.refusals.with_label_values(&[reason]).inc();
        let path = pages::find(request.uri().path()).map(|page| page.path);
        // Whoever has a token should learn from the log what it is not for; a scanner must not fill the log.
        match refusal {
            Refusal::Forbidden { .. } => {
                info!(%client, path, reason, "an operator's request was refused")
            }
            _ => debug!(%client, path, reason, "a request to an operators' page was refused"),
        }
        let mut response = refuse(refusal.status(), &refusal.to_string());
        if refusal.status() == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer");
            let headers = response.headers_mut();
            headers.insert(header::WWW_AUTHENTICATE, scheme);
        }
        response
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
            self.worker_metrics
                .update(&self.relay.load(), observe::now());
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
        let Ok(body) = Limited::new(body, self.body_bytes_max.load(Relaxed))
            .collect()
            .await
        else {
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
        let relay = self.relay.load_full();
        match prompt::peek(api, &body, relay.block_bytes()) {
            Err(error) => refuse(StatusCode::BAD_REQUEST, &error.to_string()),
            Ok(peek) => {
                let explained = relay.explain(api, &head.headers, peek, &body, shows_tokens);
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
            let relay = self.relay.load();
            let snapshot = relay.fleet().snapshot();
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

    fn set_drained(&self, worker: &str, drained: bool, client: IpAddr) -> Response<http::Body> {
        if self.relay.load().fleet().set_drained(worker, drained) {
            info!(%client, worker, draining = drained, "an operator changed whether a worker drains");
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
