//! Follows the objects of one type: by kube's watcher, and by complete lists beside it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::future::{Future, pending, poll_fn};
use std::pin::Pin;
use std::time::Duration;

use futures_core::Stream;
use kube::api::{Api, ListParams};
use kube::core::NamespaceResourceScope;
use kube::runtime::watcher::{self, Event};
use kube::{Client, Resource};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep_until};
use tracing::warn;

use super::failure::{Failure, Request, Target};
use super::metrics::EntryMetrics;
use super::pause::Pause;
use super::received::{Received, Unreadable};
use super::settings::Advanced;
use super::table::Table;

/// After a relist, events of what it shows may still be on their way in the watch. Only what they say nothing about for
/// this long is lost.
const MAX_GRACE: Duration = Duration::from_millis(500);
/// Pages of one list. It ends a server that always has one more.
const MAX_PAGES: u32 = 10_000;

type Events<K> = Pin<Box<dyn Stream<Item = watcher::Result<Event<Received<K>>>> + Send>>;
type Objects<K> = BTreeMap<String, K>;
type Relist<K> = Pin<Box<dyn Future<Output = Result<Listing<K>, Failure>> + Send>>;

/// One list.
#[derive(Debug)]
struct Listing<K> {
    objects: Objects<K>,
    unreadable: Vec<Unreadable>,
}

impl<K: Resource> Listing<K> {
    fn new() -> Self {
        Self {
            objects: Objects::new(),
            unreadable: Vec::new(),
        }
    }

    fn add(&mut self, received: Received<K>) {
        match received {
            Received::Object(object) => self.objects.extend(by_uid(object)),
            Received::Unreadable(object) => self.unreadable.push(*object),
        }
    }
}

/// What is followed of one type.
#[derive(Clone, Debug)]
pub(super) struct Filter {
    pub(super) namespace: String,
    /// One of both is set.
    pub(super) labels: Option<String>,
    pub(super) fields: Option<String>,
}

/// The objects of one type, kept up to date.
pub(super) struct Watch<K> {
    api: Api<Received<K>>,
    filter: Filter,
    target: Target,
    settings: Advanced,
    metrics: EntryMetrics,
    table: Table<K>,
    events: Events<K>,
    /// The watcher's own list, while it comes in, and when it must be complete.
    listing: Option<(Listing<K>, Instant)>,
    /// Objects that could not be read, in the last list or from the watch since. Each was logged.
    unreadable: BTreeSet<String>,
    has_list: bool,
    relist: Option<Relist<K>>,
    relist_at: Instant,
    pause: Pause,
}

impl<K> Debug for Watch<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut watch = f.debug_struct("Watch");
        watch.field("filter", &self.filter).finish_non_exhaustive()
    }
}

/// What happened to a watch.
enum Step<K> {
    Event(watcher::Result<Event<Received<K>>>),
    RelistDue,
    Relisted(Result<Listing<K>, Failure>),
    ListTimedOut,
    PauseOver,
}

impl<K> Watch<K>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + DeserializeOwned
        + Send
        + Sync
        + 'static,
{
    pub(super) fn new(
        client: &Client,
        filter: Filter,
        settings: &Advanced,
        metrics: EntryMetrics,
    ) -> Self {
        let api = Api::namespaced(client.clone(), &filter.namespace);
        let events = events(&api, &filter, settings);
        let target = Target {
            plural: K::plural(&()).into_owned(),
            group: K::group(&()).into_owned(),
            namespace: filter.namespace.clone(),
        };
        Self {
            api,
            filter,
            target,
            pause: Pause::new(settings.max_retry_pause),
            settings: settings.clone(),
            metrics,
            table: Table::default(),
            events,
            listing: None,
            unreadable: BTreeSet::new(),
            has_list: false,
            relist: None,
            relist_at: Instant::now(),
        }
    }

    /// Whether a complete list has come in.
    pub(super) fn has_list(&self) -> bool {
        self.has_list
    }

    /// The objects, once a complete list has shown them.
    pub(super) fn objects(&self) -> Option<impl Iterator<Item = &K> + Clone> {
        self.has_list.then(|| self.table.objects())
    }

    /// Waits until the objects may have changed. Cancel safe. After a failure it waits by itself before it asks again.
    pub(super) async fn changed(&mut self) -> Result<(), Failure> {
        loop {
            match self.step().await {
                Step::PauseOver => {}
                Step::Event(Ok(event)) => {
                    if self.on_event(event) {
                        return Ok(());
                    }
                }
                Step::Event(Err(error)) => {
                    let failure = Failure::of_watcher(&self.target, &error);
                    self.on_watch_failure(failure, &error)?;
                }
                Step::ListTimedOut => {
                    let failure = Failure::timed_out(&self.target, self.settings.list_timeout);
                    self.start_anew();
                    return Err(self.failed(failure));
                }
                Step::RelistDue => {
                    self.table.begin_relist();
                    self.relist = Some(self.relist());
                }
                Step::Relisted(listed) => {
                    self.relist = None;
                    self.on_relist(listed)?;
                    return Ok(());
                }
            }
        }
    }

    async fn step(&mut self) -> Step<K> {
        let now = Instant::now();
        let pause = self.pause.until(now);
        let is_relist_due = self.has_list && self.listing.is_none() && self.relist.is_none();
        let deadline = self.listing.as_ref().map(|(_, deadline)| *deadline);
        let relist = async {
            match &mut self.relist {
                Some(relist) => relist.await,
                None => pending().await,
            }
        };
        tokio::select! {
            Some(event) = next(&mut self.events), if pause.is_none() => Step::Event(event),
            () = sleep_until(pause.unwrap_or(now)), if pause.is_some() => Step::PauseOver,
            listed = relist => Step::Relisted(listed),
            () = sleep_until(self.relist_at), if is_relist_due && pause.is_none() => Step::RelistDue,
            () = sleep_until(deadline.unwrap_or(now)), if deadline.is_some() => Step::ListTimedOut,
        }
    }

    /// Returns whether the objects may have changed.
    fn on_event(&mut self, event: Event<Received<K>>) -> bool {
        match event {
            Event::Init => {
                let deadline = Instant::now() + self.settings.list_timeout;
                self.listing = Some((Listing::new(), deadline));
                false
            }
            Event::InitApply(object) => {
                if let Some((listing, _)) = &mut self.listing {
                    listing.add(object);
                }
                false
            }
            Event::InitDone => {
                let listing = self.listing.take().map(|(listing, _)| listing);
                let listed = self.readable(listing.unwrap_or_else(Listing::new));
                self.table.replace(listed);
                self.relist = None;
                self.listed();
                true
            }
            Event::Apply(Received::Object(object)) => {
                let Some((uid, object)) = by_uid(object) else {
                    return false;
                };
                self.unreadable.remove(&uid);
                self.table.apply(uid, object);
                true
            }
            Event::Apply(Received::Unreadable(object)) => {
                if let Some((uid, before)) = self.on_unreadable(&object) {
                    self.table.apply(uid, before);
                }
                false
            }
            Event::Delete(object) => {
                let Some(uid) = &object.meta().uid else {
                    return false;
                };
                self.unreadable.remove(uid);
                self.table.remove(uid);
                true
            }
        }
    }

    /// The objects of a complete list. One that cannot be read stays as it was when it could be.
    fn readable(&mut self, listing: Listing<K>) -> Objects<K> {
        let Listing {
            mut objects,
            unreadable,
        } = listing;
        let before = std::mem::take(&mut self.unreadable);
        let keys: BTreeSet<String> = unreadable.iter().map(key).collect();
        self.unreadable = before.intersection(&keys).cloned().collect();
        for object in &unreadable {
            if let Some((uid, before)) = self.on_unreadable(object) {
                objects.entry(uid).or_insert(before);
            }
        }
        objects
    }

    /// Counts an object that cannot be read, and logs it once. Returns it as it was before, if it could be read then.
    fn on_unreadable(&mut self, object: &Unreadable) -> Option<(String, K)> {
        let uid = object.uid().unwrap_or_default();
        let before = self.table.get(uid).cloned();
        self.metrics.unreadable();
        if self.unreadable.insert(key(object)) {
            let (plural, namespace) = (&self.target.plural, &self.target.namespace);
            let (name, reason) = (object.name(), &object.reason);
            match before {
                Some(_) => warn!(
                    plural,
                    namespace,
                    name,
                    reason,
                    "object of the Kubernetes API cannot be read; it stays as it was"
                ),
                None => warn!(
                    plural,
                    namespace,
                    name,
                    reason,
                    "object of the Kubernetes API cannot be read; it is left out"
                ),
            }
        }
        Some((uid.to_owned(), before?))
    }

    /// A watch that is behind is usual: everything is listed again. Other failures are the caller's to report.
    fn on_watch_failure(
        &mut self,
        failure: Failure,
        error: &watcher::Error,
    ) -> Result<(), Failure> {
        self.listing = None;
        let failure = self.failed(failure);
        // The watcher asks for the same version again if the refusal came as a status.
        if matches!(error, watcher::Error::WatchStartFailed(_)) {
            self.start_anew();
        }
        match (failure.request, failure.reason) {
            (Request::Watch, "gone") => Ok(()),
            (Request::List, "gone") => {
                // Its pages do not stay for as long as it takes.
                self.settings.page_size = 0;
                self.start_anew();
                Err(failure)
            }
            _ => Err(failure),
        }
    }

    fn on_relist(&mut self, listed: Result<Listing<K>, Failure>) -> Result<(), Failure> {
        let listed = match listed {
            Ok(listing) => self.readable(listing),
            Err(failure) => {
                self.table.cancel_relist();
                return Err(self.failed(failure));
            }
        };
        let version = |object: &K| object.meta().resource_version.clone();
        let lost = self
            .table
            .finish_relist(listed, |a, b| version(a) == version(b));
        self.listed();
        if lost > 0 {
            let (plural, namespace) = (&self.target.plural, &self.target.namespace);
            warn!(
                lost,
                plural,
                namespace,
                "the watch of the Kubernetes API had lost events; starting a new one"
            );
            self.metrics.lost(lost);
            self.start_anew();
        }
        Ok(())
    }

    fn failed(&mut self, failure: Failure) -> Failure {
        self.pause.on_failure(Instant::now(), fastrand::f64());
        self.metrics.failed(failure.request.name(), failure.reason);
        failure
    }

    /// The watcher lists everything again; until then the objects stay as they are.
    fn start_anew(&mut self) {
        self.listing = None;
        self.events = events(&self.api, &self.filter, &self.settings);
    }

    fn listed(&mut self) {
        self.metrics.listed();
        self.has_list = true;
        // Never later than the interval, the list itself included; replicas do not list all at once.
        let part = 0.75 + 0.15 * fastrand::f64();
        self.relist_at = Instant::now() + self.settings.relist_interval.mul_f64(part);
    }

    fn relist(&self) -> Relist<K> {
        let (api, target) = (self.api.clone(), self.target.clone());
        let limit = self.settings.list_timeout;
        let grace = MAX_GRACE.min(self.settings.relist_interval / 20);
        let mut params = ListParams {
            limit: page_size(&self.settings),
            ..ListParams::default()
        };
        params.label_selector.clone_from(&self.filter.labels);
        params.field_selector.clone_from(&self.filter.fields);
        Box::pin(async move {
            let listed = match tokio::time::timeout(limit, list(&api, params)).await {
                Ok(listed) => listed,
                // The watch may be well.
                Err(_) => return Err(without_connect(Failure::timed_out(&target, limit))),
            };
            let listed = listed.map_err(|error| {
                let failure = Failure::of_request(Request::List, &target, &error);
                match failure.reason {
                    "unauthorized" => failure,
                    _ => without_connect(failure),
                }
            })?;
            tokio::time::sleep(grace).await;
            Ok(listed)
        })
    }

    /// Tries a list and a watch. Returns what is missing.
    pub(super) async fn try_requests(&self) -> Vec<Failure> {
        let config = config(&self.filter, &self.settings);
        let mut params = ListParams::default().limit(1);
        params.label_selector.clone_from(&self.filter.labels);
        params.field_selector.clone_from(&self.filter.fields);
        let listed = self.api.list(&params).await;
        let mut failures = Vec::new();
        let version = match listed {
            Ok(list) => list.metadata.resource_version.unwrap_or_default(),
            Err(error) => {
                failures.push(Failure::of_request(Request::List, &self.target, &error));
                "0".to_owned()
            }
        };
        let params = kube::api::WatchParams {
            label_selector: config.label_selector,
            field_selector: config.field_selector,
            timeout: Some(1),
            ..kube::api::WatchParams::default()
        };
        if let Err(error) = self.api.watch(&params, &version).await {
            failures.push(Failure::of_request(Request::Watch, &self.target, &error));
        }
        failures
    }
}

fn without_connect(failure: Failure) -> Failure {
    Failure {
        needs_connect: false,
        ..failure
    }
}

/// All pages. The version that a list shows may be gone before its last page was asked for; that is an error.
async fn list<K>(api: &Api<Received<K>>, mut params: ListParams) -> kube::Result<Listing<K>>
where
    K: Clone + Debug + DeserializeOwned + Resource,
{
    let mut listing = Listing::new();
    for _ in 0..MAX_PAGES {
        let page = api.list(&params).await?;
        page.items
            .into_iter()
            .for_each(|object| listing.add(object));
        params.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
        if params.continue_token.is_none() {
            break;
        }
    }
    Ok(listing)
}

/// 0 stands for a list in one piece.
fn page_size(settings: &Advanced) -> Option<u32> {
    Some(settings.page_size).filter(|size| *size > 0)
}

fn config(filter: &Filter, settings: &Advanced) -> watcher::Config {
    watcher::Config {
        label_selector: filter.labels.clone(),
        field_selector: filter.fields.clone(),
        page_size: page_size(settings),
        ..watcher::Config::default()
    }
}

fn events<K>(api: &Api<Received<K>>, filter: &Filter, settings: &Advanced) -> Events<K>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
{
    let config = config(filter, settings);
    Box::pin(watcher::watcher(api.clone(), config))
}

async fn next<K>(events: &mut Events<K>) -> Option<watcher::Result<Event<Received<K>>>> {
    poll_fn(|context| events.as_mut().poll_next(context)).await
}

/// How an object that cannot be read is remembered.
fn key(object: &Unreadable) -> String {
    object.uid().unwrap_or_else(|| object.name()).to_owned()
}

/// An object by its uid, without what takes memory and is never read.
fn by_uid<K: Resource>(mut object: K) -> Option<(String, K)> {
    let metadata = object.meta_mut();
    metadata.managed_fields = None;
    metadata.annotations = None;
    Some((metadata.uid.clone()?, object))
}
