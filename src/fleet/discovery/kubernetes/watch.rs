//! Follows the objects of one type: by kube's watcher, and by complete lists beside it.
//!
//! kube's watcher lists, watches, and goes on where a watch broke off. What it leaves to do is here: a list has a time limit
//! and is taken over when it is complete, a watch that has lost events is found out by lists beside it, and failures are
//! counted and followed by pauses.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::future::{Future, pending, poll_fn};
use std::pin::Pin;
use std::time::Duration;

use futures_core::Stream;
use kube::api::{Api, ListParams, WatchParams};
use kube::runtime::watcher::{self, Event, watcher};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::warn;

use super::client::ApiContext;
use super::failure::{Failure, Pause, Request, Target};
use super::objects::{ObjectKind, Received};
use super::table::Table;

/// After a relist, events of what it shows may still be on their way in the watch. Only what they say nothing about for
/// this long is lost.
const MAX_GRACE: Duration = Duration::from_millis(500);

type Events<K> = Pin<Box<dyn Stream<Item = watcher::Result<Event<Received<K>>>> + Send>>;

/// A complete list, and the watch that goes on after it.
type CompleteList<K> = (Vec<Received<K>>, Events<K>);
type PendingList<K> = Pin<Box<dyn Future<Output = Result<CompleteList<K>, Failure>> + Send>>;

#[derive(Debug)]
struct KnownObject<K> {
    version: Option<String>,
    /// None if it could never be read.
    object: Option<K>,
    /// Whether this version of it can be read.
    is_readable: bool,
}

/// The objects of one type, kept up to date.
pub(super) struct Watch<K> {
    pub(super) context: ApiContext,
    config: watcher::Config,
    table: Table<KnownObject<K>>,
    /// None if everything must be listed before there is a watch.
    events: Option<Events<K>>,
    /// A list that is under way: the one before a watch, or one beside it (a relist).
    listing: Option<PendingList<K>>,
    relist_at: Instant,
    has_list: bool,
    pause: Pause,
    /// After a relist that failed. The watch goes on meanwhile.
    relist_pause: Pause,
}

impl<K> Debug for Watch<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut watch = f.debug_struct("Watch");
        watch.field("config", &self.config).finish_non_exhaustive()
    }
}

impl<K: ObjectKind> Watch<K> {
    /// `config` selects the objects.
    pub(super) fn new(context: &ApiContext, config: watcher::Config) -> Self {
        let settings = &context.settings;
        Self {
            context: context.clone(),
            config: watcher::Config {
                // 0 stands for a list in one piece.
                page_size: Some(settings.page_size).filter(|size| *size > 0),
                ..config
            },
            table: Table::default(),
            events: None,
            listing: None,
            relist_at: Instant::now(),
            has_list: false,
            pause: Pause::new(settings.max_retry_pause),
            relist_pause: Pause::new(settings.max_retry_pause),
        }
    }

    /// The objects, once a complete list has shown them.
    pub(super) fn objects(&self) -> Option<impl Iterator<Item = &K> + Clone> {
        let known = self.table.objects();
        self.has_list
            .then(|| known.filter_map(|known| known.object.as_ref()))
    }

    /// Waits until the objects may have changed. Cancel safe. After a failure it waits by itself before it asks again.
    pub(super) async fn changed(&mut self) -> Result<(), Failure> {
        while !self.step().await? {}
        Ok(())
    }

    /// Returns whether the objects may have changed.
    async fn step(&mut self) -> Result<bool, Failure> {
        let now = Instant::now();
        let paused = self.pause.until(now);
        let is_due = self.events.is_none() || self.relist_at <= now;
        if paused.is_none() && is_due && self.listing.is_none() {
            self.list();
        }
        let is_listing = self.listing.is_some();
        let event = async {
            match &mut self.events {
                Some(events) => next(events).await,
                None => pending().await,
            }
        };
        let listed = async {
            match &mut self.listing {
                Some(listing) => listing.await,
                None => pending().await,
            }
        };
        tokio::select! {
            Some(event) = event, if paused.is_none() => self.on_event(event),
            // Also during a pause: its time limit runs.
            listed = listed => self.on_listed(listed),
            () = sleep_until(paused.unwrap_or(self.relist_at)), if paused.is_some() || !is_listing => Ok(false),
        }
    }

    /// Begins a complete list, by a watcher of its own.
    fn list(&mut self) {
        let settings = &self.context.settings;
        let (target, limit) = (self.target(), settings.list_timeout);
        let mut grace = Duration::ZERO;
        if self.events.is_some() {
            self.table.begin_relist();
            grace = MAX_GRACE.min(settings.relist_interval / 20);
        }
        let mut events: Events<K> = Box::pin(watcher(self.api(), self.config.clone()));
        self.listing = Some(Box::pin(async move {
            let listed = timeout(limit, objects_of_list(&mut events)).await;
            let listed = listed.map_err(|_| Failure::timed_out(&target, limit))?;
            let listed = listed.map_err(|error| Failure::of_watcher(&target, &error))?;
            sleep(grace).await;
            Ok((listed, events))
        }));
    }

    fn on_listed(&mut self, listed: Result<CompleteList<K>, Failure>) -> Result<bool, Failure> {
        self.listing = None;
        let is_relist = self.events.is_some();
        let (listed, events) = match listed {
            Ok(listed) => listed,
            Err(mut failure) => {
                self.table.cancel_relist();
                if failure.reason == "gone" {
                    // Its pages do not stay for as long as it takes.
                    self.config.page_size = None;
                }
                if !is_relist {
                    return Err(self.failed(failure));
                }
                // The watch may be well, and goes on: only the next list waits.
                failure.needs_connect &= failure.reason == "unauthorized";
                let now = Instant::now();
                self.relist_pause.on_failure(now, fastrand::f64());
                self.relist_at = self.relist_pause.until(now).unwrap_or(now);
                return Err(self.counted(failure));
            }
        };
        let listed = listed.into_iter().map(|object| self.known(object));
        let listed: BTreeMap<String, KnownObject<K>> = listed.collect();
        self.context.metrics.listed();
        self.has_list = true;
        // Never later than the interval, the list itself included; replicas do not list all at once.
        let part = 0.75 + 0.15 * fastrand::f64();
        self.relist_at = Instant::now() + self.context.settings.relist_interval.mul_f64(part);
        if !is_relist {
            self.table.replace(listed);
            self.events = Some(events);
            return Ok(true);
        }
        let is_same = |a: &KnownObject<K>, b: &KnownObject<K>| a.version == b.version;
        let lost = self.table.finish_relist(listed, is_same);
        if lost > 0 {
            warn!(
                lost,
                plural = K::PLURAL,
                namespace = self.context.namespace,
                "the watch of the Kubernetes API had lost events; starting a new one"
            );
            self.context.metrics.lost(lost);
            self.start_anew();
        }
        Ok(true)
    }

    fn on_event(&mut self, event: watcher::Result<Event<Received<K>>>) -> Result<bool, Failure> {
        match event {
            Ok(Event::Apply(object)) => {
                let (uid, known) = self.known(object);
                self.table.apply(uid, known);
                Ok(true)
            }
            Ok(Event::Delete(object)) => {
                self.table.remove(object.key());
                Ok(true)
            }
            // The watcher is behind, and begins a list.
            Ok(Event::Init | Event::InitApply(_) | Event::InitDone) => {
                self.start_anew();
                Ok(false)
            }
            Err(error) => {
                let failure = Failure::of_watcher(&self.target(), &error);
                let failure = self.failed(failure);
                // The watcher asks for the same version again if the refusal came as a status.
                if matches!(error, watcher::Error::WatchStartFailed(_)) {
                    self.start_anew();
                }
                // A watch that is behind is usual. Other failures are the caller's to report.
                match failure.reason {
                    "gone" => Ok(false),
                    _ => Err(failure),
                }
            }
        }
    }

    /// One that cannot be read stays as it was when it could be. It is counted each time, and logged once.
    fn known(&self, received: Received<K>) -> (String, KnownObject<K>) {
        let (key, name) = (received.key().to_owned(), received.name().to_owned());
        let version = received.version().map(str::to_owned);
        let before = self.table.get(&key);
        let is_readable = received.object.is_ok();
        let object = received.object.or_else(|reason| {
            let object = before.and_then(|before| before.object.clone());
            self.context.metrics.unreadable();
            if before.is_none_or(|before| before.is_readable) {
                let outcome = match object {
                    Some(_) => "it stays as it was",
                    None => "it is left out",
                };
                warn!(
                    plural = K::PLURAL,
                    namespace = self.context.namespace,
                    name,
                    reason,
                    "object of the Kubernetes API cannot be read; {outcome}"
                );
            }
            object.ok_or(())
        });
        let known = KnownObject {
            version,
            object: object.ok(),
            is_readable,
        };
        (key, known)
    }

    fn failed(&mut self, failure: Failure) -> Failure {
        self.pause.on_failure(Instant::now(), fastrand::f64());
        self.counted(failure)
    }

    fn counted(&self, failure: Failure) -> Failure {
        let metrics = &self.context.metrics;
        metrics.failed(failure.request.as_str(), failure.reason);
        failure
    }

    /// Everything is listed again before there is a new watch; until then the objects stay as they are.
    fn start_anew(&mut self) {
        self.table.cancel_relist();
        self.listing = None;
        self.events = None;
    }

    fn api(&self) -> Api<Received<K>> {
        Api::namespaced(self.context.client.clone(), &self.context.namespace)
    }

    fn target(&self) -> Target {
        Target {
            plural: K::PLURAL,
            group: K::GROUP,
            namespace: self.context.namespace.clone(),
        }
    }

    /// Tries a list and a watch. Returns what is missing.
    pub(super) async fn try_requests(&self) -> Vec<Failure> {
        let (api, target) = (self.api(), self.target());
        let labels = self.config.label_selector.clone();
        let fields = self.config.field_selector.clone();
        let list = ListParams {
            label_selector: labels.clone(),
            field_selector: fields.clone(),
            limit: Some(1),
            ..ListParams::default()
        };
        let watch = WatchParams {
            label_selector: labels,
            field_selector: fields,
            timeout: Some(1),
            ..WatchParams::default()
        };
        let listed = api.list(&list).await;
        let version = match &listed {
            Ok(list) => list.metadata.resource_version.as_deref().unwrap_or(""),
            Err(_) => "0",
        };
        let watched = api.watch(&watch, version).await.err();
        let failures = [(Request::List, listed.err()), (Request::Watch, watched)];
        let failed = |(request, error): (_, Option<kube::Error>)| {
            Some(Failure::of_request(request, &target, &error?))
        };
        failures.into_iter().filter_map(failed).collect()
    }
}

/// The objects that a watcher lists before it watches.
async fn objects_of_list<K: ObjectKind>(
    events: &mut Events<K>,
) -> watcher::Result<Vec<Received<K>>> {
    let mut objects = Vec::new();
    while let Some(event) = next(events).await {
        match event? {
            Event::InitApply(object) => objects.push(object),
            Event::InitDone => break,
            // No watch has begun.
            Event::Init | Event::Apply(_) | Event::Delete(_) => {}
        }
    }
    Ok(objects)
}

async fn next<K>(events: &mut Events<K>) -> Option<watcher::Result<Event<Received<K>>>> {
    poll_fn(|context| events.as_mut().poll_next(context)).await
}
