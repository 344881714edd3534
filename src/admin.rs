//! The operator's pages, on a listener of their own: metrics, health, fleet, explain, drain.

mod answers;
mod config;
mod dashboard;
mod engine_facts;
mod explain;
mod fleet;
mod guard;
mod kv;
mod other_parts;
mod pages;
mod pairs;
mod readiness;
mod responses;
mod role;
mod settings;
mod tenants;
mod webhooks;
mod worker_metrics;

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};

use arc_swap::ArcSwap;
use hyper::header::{self, HeaderValue};
use hyper::{Request, Response, StatusCode};
use parking_lot::Mutex;
use prometheus::IntCounterVec;
use serde_json::json;
use tracing::{debug, info};

use self::answers::{answer, parameter, refuse, refuse_unknown_worker, wants_html};
pub use self::config::{ConfigStatus, RunningConfig};
use self::dashboard::Dashboard;
pub use self::dashboard::Sources;
pub use self::fleet::{FleetPage, KvTransfersRow, WorkerRow};
use self::guard::{Guard, Refusal};
pub use self::kv::{KvPage, KvPages};
pub use self::other_parts::{Answering, OtherParts};
pub use self::readiness::Readiness;
pub use self::responses::ResponsesReport;
use self::role::Role;
pub use self::settings::{NamesByRole, Settings, Tokens};
use self::worker_metrics::WorkerMetrics;
use crate::http::drain::Tasks;
use crate::http::io_threads::OffloadThread;
use crate::http::server::RequestBody;
use crate::http::tls::ClientNames;
use crate::observe::log_once::LogOnce;
use crate::relay::Relay;
use crate::{http, observe};

/// Whether the admin listener has a page at this path.
pub fn has_page(path: &str) -> bool {
    pages::find(path).is_some()
}

#[derive(Debug)]
pub struct AdminServer {
    /// What most pages show.
    sources: Arc<Sources>,
    worker_metrics: WorkerMetrics,
    dashboard: Dashboard,
    /// One scrape at a time: each sets the gauges of all workers anew.
    scraping: Mutex<()>,
    guard: ArcSwap<Guard>,
    refusals: IntCounterVec,
    /// What was logged last of requests whose role was not enough.
    forbidden: Mutex<LogOnce>,
    /// Lists blocks, which takes as long as there are many.
    listing: OffloadThread,
    readiness: Arc<Readiness>,
    is_drain_requested: AtomicBool,
    drain_requested: tokio::sync::Notify,
    max_body: AtomicU64,
}

impl AdminServer {
    /// `max_body`: the bytes that a body may have.
    pub fn new(
        sources: Sources,
        readiness: Arc<Readiness>,
        settings: &Settings,
        max_body: u64,
    ) -> io::Result<Arc<Self>> {
        let sources = Arc::new(sources);
        let registry = &sources.registry;
        Ok(Arc::new(Self {
            worker_metrics: WorkerMetrics::new(registry),
            dashboard: Dashboard::new(settings.dashboard.max_viewers, sources.clone()),
            scraping: Mutex::new(()),
            guard: ArcSwap::from_pointee(Guard::new(settings)),
            refusals: registry.counters(
                "warmroute_admin_refusals_total",
                "Requests to operators' pages that were refused, by reason: unauthenticated (no known token), forbidden (the \
                 role is not enough), cross_site or foreign_host (a browser's page of another site).",
                &["reason"],
            ),
            forbidden: Mutex::default(),
            listing: OffloadThread::start("admin-pages")?,
            sources,
            readiness,
            is_drain_requested: AtomicBool::new(false),
            drain_requested: tokio::sync::Notify::new(),
            max_body: AtomicU64::new(max_body),
        }))
    }

    /// Shows the relay of the next configuration, to whom that lets in.
    pub fn set(&self, relay: Arc<Relay>, settings: &Settings, max_body: u64) {
        self.sources.relay.store(relay);
        self.guard.store(Arc::new(Guard::new(settings)));
        self.dashboard
            .set_max_viewers(settings.dashboard.max_viewers);
        self.max_body.store(max_body, Relaxed);
    }

    /// Keeps open dashboards up to date until the drain of `tasks`, which are those of the listener.
    pub fn start_dashboard(&self, tasks: &Tasks) {
        let showing = self.dashboard.run(tasks.supervisor().clone());
        tasks.spawn_until_stopped_on(self.listing.runtime(), showing);
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
            let message = if uri.path().starts_with("/v1/") {
                "no such page; the API has a listener of its own (`api.listen`)"
            } else {
                "no such page; GET /pages lists them"
            };
            return refuse(StatusCode::NOT_FOUND, message);
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
            Name::Index if self.dashboard.is_on() && wants_html(request.headers()) => {
                dashboard::assets::page(request.headers())
            }
            Name::Index | Name::List => http::text(StatusCode::OK, pages::index()),
            Name::Asset => dashboard::assets::file(request.uri().path()).unwrap_or_else(|| {
                refuse(StatusCode::NOT_FOUND, "no such file; load the page again")
            }),
            Name::DashboardEvents => self.dashboard.events(),
            Name::DashboardWorker => self.dashboard.worker(query),
            Name::DashboardDecision => self.dashboard.decision(query),
            Name::Alive => http::text(StatusCode::OK, "ok\n"),
            Name::Ready => self.ready().await,
            Name::Metrics => self.metrics(),
            Name::Fleet => {
                let page = fleet::page(
                    &self.sources.relay.load(),
                    &self.sources.peers,
                    observe::now(),
                );
                answer(StatusCode::OK, &page)
            }
            Name::Queue => answer(StatusCode::OK, &self.sources.relay.load().queues().status()),
            Name::Kv => answer(StatusCode::OK, &self.sources.kv.page(observe::now())),
            Name::Tenants => {
                let relay = self.sources.relay.load();
                answer(StatusCode::OK, &tenants::page(relay.tenants()))
            }
            Name::Webhooks => webhooks::page(&self.sources.webhooks),
            Name::EnableWebhook => webhooks::enable(&self.sources.webhooks, query, client).await,
            Name::KvBlocks => self.blocks(query).await,
            Name::Config => answer(StatusCode::OK, &self.sources.others.config()),
            Name::Reload => {
                info!(%client, "an operator asked for a reload of the configuration");
                let (status, body) = self.sources.others.reload().await;
                answer(status, &body)
            }
            Name::Responses => {
                let counts = self.sources.others.responses();
                let page = responses::page(&*self.sources.store, counts).await;
                answer(StatusCode::OK, &page)
            }
            Name::Explain => {
                let max_body = self.max_body.load(Relaxed);
                let max_body = usize::try_from(max_body).unwrap_or(usize::MAX);
                explain::page(&self.sources, max_body, request, query).await
            }
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
        // Whoever has a token should learn from the log what it is not for. Neither a scanner nor a program that asks for a page
        // again and again must fill the log.
        let is_new = || {
            let who = format!("{client} {path:?}");
            self.forbidden.lock().should_log(observe::now(), &who)
        };
        if matches!(refusal, Refusal::Forbidden { .. }) && is_new() {
            info!(%client, path, reason, "an operator's request was refused");
        } else {
            debug!(%client, path, reason, "a request to an operators' page was refused");
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
                None => http::text(StatusCode::OK, "ready\n"),
                Some(detail) => http::text(StatusCode::OK, format!("ready; {detail}\n")),
            },
            Err(missing) => {
                let line = match self.readiness.detail_of(missing) {
                    None => format!("{missing}\n"),
                    Some(detail) => format!("{missing}: {detail}\n"),
                };
                http::text(StatusCode::SERVICE_UNAVAILABLE, line)
            }
        }
    }

    fn metrics(&self) -> Response<http::Body> {
        let page = {
            let _scraping = self.scraping.lock();
            self.worker_metrics
                .update(&self.sources.relay.load(), observe::now());
            self.sources.registry.text()
        };
        let mut response = http::text(StatusCode::OK, page);
        let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
        response.headers_mut().insert(header::CONTENT_TYPE, kind);
        response
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
            let relay = self.sources.relay.load();
            let snapshot = relay.fleet().snapshot();
            let mut workers = snapshot.workers.iter().map(|status| &status.worker);
            let found = workers.find(|worker| *worker.name == *name);
            found.map(|worker| worker.id)
        };
        let kv = self.sources.kv.clone();
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
        let relay = self.sources.relay.load();
        let Some(draining) = relay.fleet().set_drained(worker, drained) else {
            return refuse_unknown_worker(worker);
        };
        info!(%client, worker, draining, "an operator changed whether a worker drains");
        answer(
            StatusCode::OK,
            &json!({"worker": worker, "draining": draining}),
        )
    }
}
