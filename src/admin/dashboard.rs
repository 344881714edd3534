//! The dashboard: the page at `/`, and the events that keep it up to date. Once a second, and only while a page is open,
//! the router is read once for all of them.

pub(super) mod assets;
mod changes;
mod counts;
mod history;
mod limits;
mod panels;
mod side_panels;
mod tables;
mod update;
mod viewers;

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use http_body_util::BodyExt;
use hyper::header::{self, HeaderValue};
use hyper::{Response, StatusCode};
use serde_json::{Value, json};
use tokio::time::MissedTickBehavior;

use self::changes::Changes;
use self::history::{History, Monotone};
use self::tables::Latencies;
use self::update::{Slow, View};
use self::viewers::{Refused, Viewers};
use super::answers::{answer, parameter, refuse, refuse_unknown_worker};
use super::fleet;
use super::kv::KvPages;
use super::other_parts::OtherParts;
use super::responses;
use crate::http::supervisor::Supervisor;
use crate::observe::metrics::Registry;
use crate::peers::Peers;
use crate::relay::Relay;
use crate::store::ResponseStore;
use crate::webhooks::Webhooks;
use crate::{http, observe};

const INTERVAL: Duration = Duration::from_secs(1);

/// How long the store's report may delay the next update.
const STORE_TIMEOUT: Duration = Duration::from_millis(500);

/// In fleets with more rows than this, what takes long to read is read with each sample of the history only.
const MAX_ROWS_EACH_SECOND: usize = 200;

/// Decisions recorded each second while a page is open: as many as a person can follow.
const SEEN_DECISIONS: u32 = 5;

/// Decisions recorded each second while no page is open, so that one that is opened has some.
const UNSEEN_DECISIONS: u32 = 1;

#[derive(Debug)]
pub struct Sources {
    /// The relay of the configuration that runs.
    pub relay: ArcSwap<Relay>,
    pub peers: Peers,
    pub kv: Arc<KvPages>,
    pub store: Arc<dyn ResponseStore>,
    pub webhooks: Arc<Webhooks>,
    pub others: Box<dyn OtherParts>,
    pub registry: Registry,
}

#[derive(Debug)]
pub(super) struct Dashboard {
    sources: Arc<Sources>,
    viewers: Arc<Viewers>,
}

impl Dashboard {
    pub(super) fn new(max_viewers: u32, sources: Arc<Sources>) -> Self {
        let viewers = Viewers::new(max_viewers, &sources.registry);
        Self {
            sources,
            viewers: Arc::new(viewers),
        }
    }

    pub(super) fn set_max_viewers(&self, max: u32) {
        self.viewers.set_max(max);
    }

    pub(super) fn is_on(&self) -> bool {
        self.viewers.max() > 0
    }

    /// The answer to one more viewer: events until the page is closed or the router ends.
    pub(super) fn events(&self) -> Response<http::Body> {
        let updates = match self.viewers.join() {
            Ok(updates) => updates,
            Err(Refused::TooMany(0)) => {
                let message = "the dashboard is off: `admin.dashboard.max_viewers` is 0";
                return refuse(StatusCode::NOT_FOUND, message);
            }
            Err(Refused::TooMany(max)) => {
                let message = format!(
                    "{max} dashboards are open; close one, or raise `admin.dashboard.max_viewers`"
                );
                return refuse(StatusCode::SERVICE_UNAVAILABLE, &message);
            }
            Err(Refused::Draining) => {
                return refuse(StatusCode::SERVICE_UNAVAILABLE, "the router is ending");
            }
        };
        let mut response = Response::new(updates.boxed_unsync());
        let headers = response.headers_mut();
        let kind = HeaderValue::from_static("text/event-stream; charset=utf-8");
        headers.insert(header::CONTENT_TYPE, kind);
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        // Proxies such as nginx must not collect events.
        headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
        response
    }

    pub(super) fn worker(&self, query: &str) -> Response<http::Body> {
        let Some(name) = parameter(query, "name") else {
            let message = "name a worker: /dashboard/worker?name=NAME";
            return refuse(StatusCode::BAD_REQUEST, message);
        };
        let now = observe::now();
        match fleet::worker(&self.sources.relay.load(), &self.sources.peers, now, &name) {
            Some(worker) => {
                let ranks = self.sources.kv.ranks_of(now, &name);
                let page = json!({"worker": worker, "ranks": ranks});
                answer(StatusCode::OK, &page)
            }
            None => refuse_unknown_worker(&name),
        }
    }

    pub(super) fn decision(&self, query: &str) -> Response<http::Body> {
        let number = parameter(query, "number").and_then(|number| number.parse().ok());
        let Some(number) = number else {
            let message = "name a decision: /dashboard/decision?number=N";
            return refuse(StatusCode::BAD_REQUEST, message);
        };
        match self.sources.relay.load().decisions.get(number) {
            Some(decision) => answer(StatusCode::OK, &*decision),
            None => {
                let message = format!("decision {number} is not among the latest ones any more");
                refuse(StatusCode::NOT_FOUND, &message)
            }
        }
    }

    /// Sends updates until it is dropped, which ends the viewers' answers.
    pub(super) fn run(&self, supervisor: Supervisor) -> impl Future<Output = ()> + Send + 'static {
        let mut watch = Watch {
            sources: self.sources.clone(),
            viewers: self.viewers.clone(),
            monotone: Monotone::default(),
            history: History::default(),
            changes: Changes::default(),
            sampled_at: None,
            view: View::default(),
            latencies: Latencies::default(),
            last_change: 0,
            last_decision: 0,
        };
        let close = CloseOnDrop(self.viewers.clone());
        async move {
            let viewers = close.0.clone();
            let mut ticks = tokio::time::interval(INTERVAL);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                let is_tick = tokio::select! {
                    _ = ticks.tick() => true,
                    () = viewers.joined() => false,
                };
                let look = watch.look(observe::now(), is_tick);
                supervisor.attempt("dashboard", look).await;
            }
        }
    }
}

/// Ends the viewers' answers when the task that sends them updates ends.
struct CloseOnDrop(Arc<Viewers>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// What was read last.
#[derive(Debug)]
struct Watch {
    sources: Arc<Sources>,
    viewers: Arc<Viewers>,
    monotone: Monotone,
    history: History,
    changes: Changes,
    sampled_at: Option<Instant>,
    view: View,
    latencies: Latencies,
    last_change: u64,
    last_decision: u64,
}

impl Watch {
    async fn look(&mut self, now: Instant, is_tick: bool) {
        let sources = self.sources.clone();
        let relay = sources.relay.load_full();
        let is_watched = self.viewers.are_there();
        if is_tick {
            let allowed = if is_watched {
                SEEN_DECISIONS
            } else {
                UNSEEN_DECISIONS
            };
            relay.decisions.allow(allowed);
        }
        let age = self.sampled_at.map(|at| now.saturating_duration_since(at));
        // A tick may come a little early.
        let is_due = age.is_none_or(|age| age + INTERVAL / 2 >= history::INTERVAL);
        if !is_watched && !is_due {
            return;
        }
        let View { workers, slow, .. } = &self.view;
        let tables = [workers, &slow.models, &slow.ranks];
        let is_small = tables.iter().all(|rows| rows.len() <= MAX_ROWS_EACH_SECOND);
        let reads_all = is_due || is_small;
        let at_unix_ms = observe::unix_ms();
        self.view.sample.at_unix_ms = at_unix_ms;
        self.view.sample.gauges = counts::gauges(&relay, &sources.registry);
        if reads_all {
            self.view.sample.counters = self.monotone.advance(&counts::read(&sources.registry));
        }
        {
            let snapshot = relay.fleet().snapshot();
            let workers = snapshot.workers.iter();
            let conditions =
                workers.map(|status| (&*status.worker.name, tables::condition(status)));
            let policy = relay.policy().as_str();
            self.changes.observe(at_unix_ms, conditions, policy);
        }
        if is_due {
            self.history.add(self.view.sample.clone());
            self.sampled_at = Some(now);
        }
        if !is_watched {
            return;
        }
        let reads_all = reads_all || self.view.slow.panels.is_empty();
        if reads_all {
            self.latencies = Latencies::read(&sources.registry);
            self.view.slow = self.read_slow(&relay, now, is_due).await;
        }
        self.view.workers = tables::workers(&relay, &self.latencies);
        self.send(&relay, reads_all);
    }

    /// `is_due`: with a sample of the history.
    async fn read_slow(&self, relay: &Relay, now: Instant, is_due: bool) -> Slow {
        let Sources {
            peers,
            kv,
            webhooks,
            others,
            registry,
            ..
        } = &*self.sources;
        let mut panels = panels::read(relay, peers, &kv.tokenizer_check, registry, now);
        panels.extend(side_panels::read(
            registry,
            &webhooks.report(),
            others.batches(),
        ));
        panels.insert("responses", self.responses(is_due).await);
        Slow {
            models: tables::models(relay, registry, &self.latencies),
            ranks: tables::ranks(&kv.board, now),
            panels,
        }
    }

    /// Asks the store with each sample of the history only, and not for long.
    async fn responses(&self, is_due: bool) -> Value {
        let before = self.view.slow.panels.get("responses");
        if let Some(before) = before
            && !is_due
        {
            return before.clone();
        }
        let counts = self.sources.others.responses();
        let page = responses::page(&*self.sources.store, counts);
        match tokio::time::timeout(STORE_TIMEOUT, page).await {
            // Numbers and texts always serialize.
            Ok(page) => {
                let page = serde_json::to_value(page).unwrap_or_default();
                panels::responses(page, &self.sources.registry)
            }
            Err(_) => before.cloned().unwrap_or_default(),
        }
    }

    fn send(&mut self, relay: &Relay, has_slow: bool) {
        let Self {
            view,
            history,
            changes,
            ..
        } = &*self;
        let decisions = relay.decisions.after(self.last_decision);
        let new_changes = changes.after(self.last_change);
        let update = update::update(view, has_slow, new_changes, &decisions);
        self.viewers.send(&update, || {
            let decisions = relay.decisions.after(0);
            update::everything(view, history, changes, &decisions)
        });
        self.last_change = self.changes.last;
        self.last_decision = decisions
            .last()
            .map_or(self.last_decision, |decision| decision.number);
    }
}
