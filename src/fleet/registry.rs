//! Applies changes of membership, health and engine facts, and publishes a new immutable [`Snapshot`] of them.
//!
//! A snapshot is made when it is asked for, once for all changes until then: when a router starts, a thousand workers
//! become known one after the other.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use serde_json::value::RawValue;
use tokio::sync::watch;
use tracing::{info, warn};

use super::circuit_breaker;
use super::departed::Departed;
use super::departed_models::DepartedModels;
use super::entry::Entry;
use super::freed::Freed;
use super::health::{self, Health};
use super::kv_transfer::BootstrapInfo;
use super::membership::Membership;
use super::model_lookup::{self, Lookup, ModelLookup};
use super::model_set::ModelSet;
use super::waiting::Waiting;
use super::worker::{Worker, WorkerState};
use super::{Facts, Member, Snapshot, Status};
use crate::http::{client, tls};
use crate::ids::{Model, WorkerId};
use crate::observe;

/// Who looks through the whole fleet after a change waits so long before doing it again.
pub const CHANGES_APART: Duration = Duration::from_millis(10);

/// The idle connections to all workers are closed no sooner again: of a thousand workers, to look for some takes a while. Less
/// than the pause between two attempts of a request, so that the next one finds what became idle meanwhile closed.
pub const IDLE_CLOSED_APART: Duration = Duration::from_millis(10);

/// Owns the fleet's state. Readers take a snapshot with one pointer load, unless they are the first after a change.
#[derive(Debug)]
pub struct Registry {
    snapshot: ArcSwap<Snapshot>,
    /// Something has changed since the snapshot was made.
    is_stale: AtomicBool,
    state: Mutex<State>,
    client: client::Settings,
    tls: Arc<tls::Clients>,
    settings: ArcSwap<Settings>,
    version: watch::Sender<u64>,
    freed: Arc<Freed>,
    waiting: Waiting,
    /// When the idle connections to all workers were last closed.
    idle_closed: Mutex<Option<Instant>>,
    /// Has the workers asked for models that are not known.
    pub(super) model_lookup: ModelLookup,
}

/// What a reload of the configuration may change.
#[derive(Clone, Debug)]
pub struct Settings {
    pub health: health::Settings,
    pub circuit_breaker: circuit_breaker::Settings,
    pub max_workers: usize,
    /// The label that the workers of a pair must share; empty for none.
    pub topology: Arc<str>,
    pub model_lookup: model_lookup::Settings,
}

#[derive(Debug, Default)]
struct State {
    next_id: u32,
    /// Discovery name -> the members that it lists.
    lists: BTreeMap<String, Vec<Member>>,
    /// Addresses listed with different roles. Each was logged.
    role_conflicts: BTreeSet<String>,
    /// Workers that are called by their address because another one has their name: address -> the name that is listed.
    name_conflicts: BTreeMap<String, String>,
    /// In the order in which the workers joined, so that worker indices are stable.
    entries: Vec<Entry>,
    departed: Departed,
    departed_models: DepartedModels,
    /// The models of a worker that has reported none yet.
    no_models: Arc<ModelSet>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            health: health::Settings::default(),
            circuit_breaker: circuit_breaker::Settings::default(),
            // A thousand workers are a large fleet. The bound stops a runaway discovery.
            max_workers: 4_096,
            topology: "".into(),
            model_lookup: model_lookup::Settings::default(),
        }
    }
}

impl State {
    /// Nothing if the worker has left in the meantime.
    fn entry(&mut self, id: WorkerId) -> Option<&mut Entry> {
        // Who joins later has a higher id.
        let id_of = |entry: &Entry| entry.status.worker.id;
        let index = self.entries.binary_search_by_key(&id, id_of).ok()?;
        self.entries.get_mut(index)
    }
}

impl Registry {
    pub fn new(client: client::Settings, settings: Settings) -> Arc<Self> {
        Arc::new(Self {
            snapshot: ArcSwap::default(),
            is_stale: AtomicBool::new(false),
            state: Mutex::default(),
            client,
            tls: Arc::default(),
            settings: ArcSwap::from_pointee(settings),
            version: watch::Sender::new(0),
            freed: Arc::default(),
            waiting: Waiting::default(),
            idle_closed: Mutex::default(),
            model_lookup: ModelLookup::default(),
        })
    }

    pub fn settings(&self) -> arc_swap::Guard<Arc<Settings>> {
        self.settings.load()
    }

    /// Uses other settings: for the next health check, the next failure, the next list of workers.
    pub fn set_settings(&self, settings: Settings) {
        let state = self.state.lock();
        let breakers = &settings.circuit_breaker;
        for entry in &state.entries {
            let worker = &entry.status.worker;
            for breaker in [&worker.breaker, &worker.kv_transfer_breaker] {
                breaker.set(breakers.failure_threshold, breakers.open_duration);
            }
        }
        self.settings.store(Arc::new(settings));
        self.on_change();
    }

    pub fn snapshot(&self) -> arc_swap::Guard<Arc<Snapshot>> {
        if self.is_stale.load(Acquire) {
            self.renew();
        }
        self.snapshot.load()
    }

    pub fn tls(&self) -> &Arc<tls::Clients> {
        &self.tls
    }

    pub fn worker(&self, id: WorkerId) -> Option<Arc<Worker>> {
        let mut state = self.state.lock();
        Some(state.entry(id)?.status.worker.clone())
    }

    /// Closes the idle connections to all workers, to make room for others: the process lacks file descriptors, ports or memory,
    /// of which each request finds a lack at that time.
    pub fn close_idle(&self, now: Instant) {
        if self.may_close_idle(now) {
            for status in &self.snapshot().workers {
                status.worker.pool.close_idle();
            }
        }
    }

    fn may_close_idle(&self, now: Instant) -> bool {
        let mut closed = self.idle_closed.lock();
        let is_long_ago = |at: Instant| now.saturating_duration_since(at) >= IDLE_CLOSED_APART;
        let may_close = closed.is_none_or(is_long_ago);
        if may_close {
            *closed = Some(now);
        }
        may_close
    }

    /// The addresses at which requests run although no list has them any more.
    pub fn departed(&self) -> Vec<(Arc<str>, Arc<WorkerState>)> {
        self.state.lock().departed.running().collect()
    }

    /// Whether the last worker of a model left lately, and none has said since that it serves it.
    pub fn lost_lately(&self, model: &str) -> bool {
        let state = self.state.lock();
        state.departed_models.contains(observe::now(), model)
    }

    /// The label that the workers of a pair must share; empty for none.
    pub fn topology(&self) -> Arc<str> {
        self.settings().topology.clone()
    }

    /// Notifies of workers that have less to compute.
    pub fn freed(&self) -> &Arc<Freed> {
        &self.freed
    }

    pub fn waiting(&self) -> &Waiting {
        &self.waiting
    }

    /// Notifies of every new snapshot.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// Replaces the members that one discovery lists; those of other discoveries stay.
    pub fn set_members(&self, discovery: &str, members: Vec<Member>) {
        self.set_lists([(discovery.to_owned(), Some(members))]);
    }

    /// Replaces the lists of several discoveries at once, and removes those of discoveries that are gone: a worker that
    /// moves from one list to another stays.
    pub fn set_lists(&self, lists: impl IntoIterator<Item = (String, Option<Vec<Member>>)>) {
        let mut state = self.state.lock();
        for (discovery, members) in lists {
            match members {
                Some(members) => state.lists.insert(discovery, members),
                None => state.lists.remove(&discovery),
            };
        }
        let Membership {
            mut members,
            role_conflicts,
            name_conflicts,
        } = {
            let present = state.entries.iter().map(|entry| &entry.member);
            let names = present.map(|member| (&*member.address, &*member.name));
            let listed = state.lists.values().flatten();
            Membership::merge(listed, &names.collect(), &state.name_conflicts)
        };
        for address in role_conflicts.difference(&state.role_conflicts) {
            let member = members.iter().find(|member| member.address == *address);
            warn!(
                address,
                role = member.map(|member| tracing::field::display(member.role)),
                "worker is listed with different roles; using the narrowest of them"
            );
        }
        state.role_conflicts = role_conflicts;
        state.name_conflicts = name_conflicts;
        let max_workers = self.settings().max_workers;
        if members.len() > max_workers {
            warn!(
                listed = members.len(),
                max_workers, "more workers are listed than allowed; ignoring the last ones"
            );
            members.truncate(max_workers);
        }
        let mut listed: BTreeMap<&str, &Member> = members
            .iter()
            .map(|member| (member.address.as_str(), member))
            .collect();
        let State {
            entries,
            departed,
            departed_models,
            ..
        } = &mut *state;
        let mut left = Vec::new();
        let mut has_changed = false;
        entries.retain_mut(|entry| {
            // A worker of another name, role or TLS is a new one, with new connections.
            let member = listed.remove(entry.member.address.as_str());
            has_changed |= member != Some(&entry.member);
            let stays = member.is_some_and(|member| entry.update(member));
            if !stays {
                info!(worker = %entry.member.name, "worker left");
                departed.add(&entry.member, &entry.status.worker);
                left.push(entry.models.clone());
                listed.extend(member.map(|member| (member.address.as_str(), member)));
            }
            stays
        });
        if !left.is_empty() {
            let rest = entries.iter().map(|entry| &entry.models);
            let forgotten = departed_models.on_left(observe::now(), &left, rest);
            if forgotten > 0 {
                warn!(
                    forgotten,
                    "more models lost their last worker than are remembered; requests for the first ones get 404"
                );
            }
        }
        for member in &members {
            if listed.contains_key(member.address.as_str()) {
                info!(worker = %member.name, address = member.address, role = %member.role, "worker joined");
                let entry = self.join(&mut state, member.clone());
                state.entries.push(entry);
                has_changed = true;
            }
        }
        // A name is resolved every few seconds and mostly has the same addresses. To look through a large fleet takes a while.
        if has_changed {
            self.on_change();
        }
    }

    pub fn set_health(&self, id: WorkerId, health: Health) {
        self.change(id, |entry| {
            entry.status.health = health;
            entry.status.worker.set_down(health == Health::Down);
            // A worker that was down may come back as another process.
            if health == Health::Down {
                entry.begin_incarnation();
            }
        });
    }

    /// Stores what an engine reports about itself. The entries of its models contain the time, so they differ in every
    /// response; only other changes publish a new snapshot, such as another context length of an engine that restarted.
    pub fn set_facts(&self, id: WorkerId, facts: Facts) {
        let mut state = self.state.lock();
        let has_changed = state.entry(id).is_some_and(|entry| {
            let stored = &entry.status.facts;
            stored.version != facts.version
                || stored.engine != facts.engine
                || stored.base != facts.base
                || stored.adapters != facts.adapters
                || stored.max_model_len != facts.max_model_len
                || stored.block_size != facts.block_size
                || stored.prefix_caching != facts.prefix_caching
                || stored.lacks_responses != facts.lacks_responses
                || stored.lacks_messages != facts.lacks_messages
                || stored.event_endpoints != facts.event_endpoints
                || stored.unusable_events != facts.unusable_events
                || stored.load_endpoints != facts.load_endpoints
                || stored.entries_hash != facts.entries_hash
                || !stored.models.keys().eq(facts.models.keys())
        });
        if !has_changed {
            return;
        }
        let models = ModelSet::of(&facts, state.entries.iter().map(|entry| &entry.models));
        state.departed_models.on_served(&models);
        if let Some(entry) = state.entry(id) {
            entry.status.facts = Arc::new(facts);
            entry.models = models;
            self.on_change();
        }
    }

    /// Has all workers asked for their models, and waits until one of them serves this one.
    pub async fn look_up(&self, model: &str) -> Lookup {
        let settings = self.settings().model_lookup.clone();
        let is_known = || self.snapshot().models.contains_key(model);
        let lookup = &self.model_lookup;
        lookup.wait(&settings, self.changes(), is_known).await
    }

    /// Waits until the model is known or every worker was probed once, at most for `limit`: of a router that has just started,
    /// or of workers that have just joined.
    pub async fn first_probes(&self, model: Option<&str>, limit: Duration) {
        let is_known = |fleet: &Snapshot| match model {
            Some(model) => fleet.models.contains_key(model),
            None => fleet.only_model().is_some(),
        };
        let mut changes = self.changes();
        let probed = async {
            loop {
                let fleet = self.snapshot().clone();
                if is_known(&fleet) || !fleet.has_unprobed_workers() {
                    return;
                }
                if changes.changed().await.is_err() {
                    return;
                }
            }
        };
        // As things are when the time is over.
        let _ = tokio::time::timeout(limit, probed).await;
    }

    /// Has workers asked whether they have loaded an adapter that other workers of its base model serve. It is not waited for.
    pub fn look_for_adapters(&self) {
        if !self.settings().model_lookup.timeout.is_zero() {
            self.model_lookup.hint();
        }
    }

    /// The models that an engine lists now, and which of them are adapters.
    pub(super) fn set_models(
        &self,
        id: WorkerId,
        models: BTreeMap<Model, Box<RawValue>>,
        adapters: BTreeSet<Model>,
    ) {
        let Some(known) = self.facts(id) else {
            return;
        };
        self.set_facts(
            id,
            Facts {
                models,
                adapters,
                ..(*known).clone()
            },
        );
    }

    /// What is known of a worker's engine.
    pub(super) fn facts(&self, id: WorkerId) -> Option<Arc<Facts>> {
        let mut state = self.state.lock();
        Some(state.entry(id)?.status.facts.clone())
    }

    /// The engine process restarted, so its cache is empty.
    pub fn restarted(&self, id: WorkerId) {
        self.change(id, Entry::begin_incarnation);
    }

    /// The engine refuses requests that are pinned to its ranks: until it restarts they are pinned to none. False if that was
    /// known.
    pub fn on_ranks_refused(&self, id: WorkerId) -> bool {
        let mut is_new = false;
        self.change(id, |entry| {
            is_new = !entry.status.worker.refuses_ranks.swap(true, Relaxed);
        });
        is_new
    }

    pub fn set_bootstrap_info(&self, id: WorkerId, info: Option<BootstrapInfo>) {
        self.change(id, |entry| {
            entry.status.worker.bootstrap_info.store(info.map(Arc::new));
        });
    }

    /// Drains a worker (it finishes its requests and gets no new ones), or ends its drain. `worker`: its address or its
    /// name. Which one of several has a name that is listed twice may differ between replicas; an address has one
    /// worker. Returns whether it drains now: one that its list drains goes on. `None` if there is no such worker.
    pub fn set_drained(&self, worker: &str, drained: bool) -> Option<bool> {
        let mut state = self.state.lock();
        let entries = &mut state.entries;
        let at_address = |entry: &Entry| entry.member.address == worker;
        let named = |entry: &Entry| entry.member.name == worker;
        let found = entries.iter().position(at_address);
        let index = found.or_else(|| entries.iter().position(named))?;
        let entry = &mut entries[index];
        entry.is_drained = drained;
        let draining = drained || entry.member.draining;
        entry.status.draining = draining;
        info!(
            worker = %entry.member.name,
            drained, "worker drain changed by an operator"
        );
        self.on_change();
        Some(draining)
    }

    fn change(&self, id: WorkerId, change: impl FnOnce(&mut Entry)) {
        let mut state = self.state.lock();
        if let Some(entry) = state.entry(id) {
            change(entry);
            self.on_change();
        }
    }

    fn join(&self, state: &mut State, member: Member) -> Entry {
        let id = WorkerId(state.next_id);
        state.next_id += 1;
        let new_pool = || {
            let tls = member.tls.as_ref().map(|tls| self.tls.get(tls));
            client::Pool::with_tls(member.address.clone(), self.client.clone(), tls)
        };
        let (shared, pool) = match state.departed.take(&member) {
            Some((shared, pool)) => {
                let requests = shared.load.own_requests();
                info!(worker = %member.name, requests, "requests from before still run at the worker; they count as its load");
                // It may be another process, in which they are about to end.
                shared.forget_engine();
                (shared, pool.unwrap_or_else(new_pool))
            }
            None => {
                let breakers = &self.settings().circuit_breaker;
                let shared = WorkerState::new(breakers, self.freed.clone());
                (shared, new_pool())
            }
        };
        let worker = Worker::new(id, &member, pool, shared);
        let draining = member.draining;
        let status = Status {
            worker,
            health: Health::Unknown,
            incarnation: 0,
            draining,
            facts: Arc::default(),
        };
        Entry {
            member,
            status,
            models: state.no_models.clone(),
            is_drained: false,
        }
    }

    /// To be called before the state is unlocked.
    fn on_change(&self) {
        self.is_stale.store(true, Release);
        self.version.send_modify(|version| *version += 1);
        self.freed.on_freed();
    }

    fn renew(&self) {
        let state = self.state.lock();
        // Another thread may have done it meanwhile.
        if !self.is_stale.load(Relaxed) {
            return;
        }
        for Entry { status, .. } in &state.entries {
            status.worker.set_event_ranks(status.event_ranks());
        }
        let workers = state.entries.iter();
        let workers = workers.map(|entry| (entry.status.clone(), entry.models.clone()));
        let snapshot = Snapshot::new(workers.collect(), &self.topology());
        self.snapshot.store(Arc::new(snapshot));
        // After the snapshot, so that who sees this sees that.
        self.is_stale.store(false, Release);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fleet::events::Events;
    use crate::fleet::{Role, with_different_members};

    pub(crate) fn member(name: &str) -> Member {
        Member {
            name: name.to_owned(),
            address: format!("{name}.test:8000"),
            role: Role::Both,
            draining: false,
            authorization: None,
            tls: None,
            events: Events::Off,
            responses: Default::default(),
            labels: BTreeMap::new(),
            bootstrap: None,
            prefill_rate: None,
            slots: None,
            identity: None,
        }
    }

    pub(crate) fn registry(names: &[&str]) -> Arc<Registry> {
        let registry = Registry::new(client::Settings::default(), Settings::default());
        registry.set_members("static", names.iter().map(|name| member(name)).collect());
        registry
    }

    pub(crate) fn facts(models: &[&str]) -> Facts {
        let card = serde_json::value::RawValue::from_string("{}".to_owned()).unwrap();
        Facts {
            models: models
                .iter()
                .map(|model| ((*model).into(), card.clone()))
                .collect(),
            ..Facts::default()
        }
    }

    /// Brings every worker up with one model.
    pub(crate) fn bring_up(registry: &Registry, model: &str) {
        let ids: Vec<WorkerId> = registry
            .snapshot()
            .workers
            .iter()
            .map(|status| status.worker.id)
            .collect();
        for id in ids {
            registry.set_health(id, Health::Up);
            registry.set_facts(id, facts(&[model]));
        }
    }

    pub(crate) fn worker(name: &str) -> Arc<Worker> {
        registry(&[name]).snapshot().workers[0].worker.clone()
    }

    fn group_of(registry: &Registry, model: &str) -> Option<Vec<String>> {
        let snapshot = registry.snapshot();
        let group = snapshot.models.get(model)?;
        Some(
            group
                .workers
                .iter()
                .map(|worker| worker.name.to_string())
                .collect(),
        )
    }

    #[tokio::test]
    async fn a_request_waits_for_the_first_probes_up_to_its_limit() {
        let registry = registry(&["a", "b"]);
        registry
            .first_probes(Some("m"), Duration::from_millis(1))
            .await;
        assert!(registry.snapshot().has_unprobed_workers());
        let hour = Duration::from_secs(3_600);
        let probed = async { bring_up(&registry, "m") };
        tokio::join!(registry.first_probes(Some("m"), hour), probed);
        // Every worker is probed: a model that none of them serves is not waited for.
        registry.first_probes(Some("other"), hour).await;
    }

    #[test]
    fn a_worker_takes_requests_once_it_is_up_and_reported_its_models() {
        let registry = registry(&["a", "b"]);
        let id = registry.snapshot().workers[0].worker.id;
        assert!(!registry.snapshot().is_ready());
        registry.set_facts(id, facts(&["m"]));
        assert_eq!(group_of(&registry, "m"), Some(vec![]));
        registry.set_health(id, Health::Up);
        assert_eq!(group_of(&registry, "m"), Some(vec!["a".to_owned()]));
        assert!(registry.snapshot().is_ready());
    }

    #[test]
    fn an_engine_that_restarts_with_another_context_length_is_known_with_it() {
        let registry = registry(&["a", "b"]);
        let ids: Vec<WorkerId> = {
            let snapshot = registry.snapshot();
            let workers = snapshot.workers.iter();
            workers.map(|status| status.worker.id).collect()
        };
        let of = |tokens: u32, entries_hash: u64| {
            let card = RawValue::from_string(format!("{{\"max_model_len\":{tokens}}}")).unwrap();
            Facts {
                models: [("m".into(), card)].into(),
                entries_hash,
                max_model_len: Some(tokens),
                ..Facts::default()
            }
        };
        let published = || {
            let snapshot = registry.snapshot();
            let group = &snapshot.models["m"];
            let tokens = snapshot.workers[0].facts.max_model_len;
            let too_short = group.context_lengths.too_short(10_000).count();
            (tokens, group.card.get().to_owned(), too_short)
        };
        for id in &ids {
            registry.set_health(*id, Health::Up);
            registry.set_facts(*id, of(16_384, 0));
        }
        let card = |tokens: u32| format!("{{\"max_model_len\":{tokens}}}");
        assert_eq!(published(), (Some(16_384), card(16_384), 0));
        registry.set_facts(ids[0], of(4_096, 0));
        assert_eq!(published(), (Some(4_096), card(16_384), 1));
        registry.set_facts(ids[1], of(2_048, 0));
        assert_eq!(published(), (Some(4_096), card(4_096), 1));
        // Nothing that routing uses differs, but what clients are shown does.
        let changes = registry.changes();
        registry.set_facts(ids[0], of(4_096, 0));
        assert!(!changes.has_changed().unwrap());
        registry.set_facts(ids[0], of(4_096, 1));
        assert!(changes.has_changed().unwrap());
    }

    #[test]
    fn an_engine_is_asked_again_after_a_restart_for_what_it_refused() {
        let registry = registry(&["a"]);
        let worker = registry.snapshot().workers[0].worker.clone();
        let refusals = [
            &worker.refuses_chat_token_ids,
            &worker.refuses_completion_token_ids,
        ];
        for refusal in refusals {
            refusal.store(true, Relaxed);
        }
        registry.restarted(worker.id);
        assert!(refusals.iter().all(|refusal| !refusal.load(Relaxed)));
    }

    #[test]
    fn a_worker_with_another_key_or_label_is_the_same_one() {
        let registry = registry(&["a"]);
        bring_up(&registry, "m");
        let before = registry.snapshot().workers[0].clone();
        before.worker.breaker.on_failure(crate::observe::now());
        let changed = Member {
            authorization: Some(hyper::header::HeaderValue::from_static("Bearer other")),
            labels: [("zone".to_owned(), "b".into())].into(),
            ..member("a")
        };
        registry.set_members("static", vec![changed.clone()]);
        let after = registry.snapshot().workers[0].clone();
        assert_eq!(
            (after.worker.id, after.health),
            (before.worker.id, Health::Up)
        );
        assert_eq!(after.worker.authorization, changed.authorization);
        assert_eq!(&*after.worker.labels["zone"], "b");
        assert!(Arc::ptr_eq(&after.worker.state, &before.worker.state));
        assert_eq!(before.worker.authorization, None);
    }

    #[test]
    fn a_refusal_of_a_key_says_nothing_of_the_key_that_replaces_it_or_of_another_process() {
        let registry = registry(&["a"]);
        let before = registry.snapshot().workers[0].worker.clone();
        let sent = crate::observe::now() + Duration::from_secs(1);
        let changed = Member {
            authorization: Some(hyper::header::HeaderValue::from_static("Bearer other")),
            ..member("a")
        };
        registry.set_members("static", vec![changed]);
        // It was sent with the former key.
        before.key.on_refused(sent);
        let after = registry.snapshot().workers[0].worker.clone();
        assert!(before.key.is_refused() && !after.key.is_refused());
        assert!(after.key.on_refused(sent) && !after.key.on_refused(sent));
        assert!(after.key.is_refused());
        registry.restarted(after.id);
        assert!(!after.key.is_refused() && after.key.on_refused(sent));
    }

    #[test]
    fn a_worker_that_moves_between_lists_stays() {
        let registry = registry(&["a"]);
        let id = registry.snapshot().workers[0].worker.id;
        let lists = [("static", None), ("file", Some(vec![member("a")]))];
        registry.set_lists(lists.map(|(name, list)| (name.to_owned(), list)));
        assert_eq!(registry.snapshot().workers[0].worker.id, id);
        registry.set_lists([("file".to_owned(), None)]);
        assert!(registry.snapshot().workers.is_empty());
    }

    #[test]
    fn requests_that_lack_descriptors_do_not_each_look_for_idle_connections() {
        let (registry, now) = (registry(&["a"]), crate::observe::now());
        let found = [0, 9, 10, 15].map(|ms| {
            let later = now + Duration::from_millis(ms);
            registry.may_close_idle(later)
        });
        assert_eq!(found, [true, false, true, false]);
    }

    #[test]
    fn a_list_that_says_the_same_again_makes_no_new_snapshot() {
        let registry = registry(&["a", "b"]);
        bring_up(&registry, "m");
        let before = registry.snapshot().clone();
        let changes = registry.changes();
        registry.set_members("static", vec![member("a"), member("b")]);
        assert!(!changes.has_changed().unwrap());
        assert!(Arc::ptr_eq(&before, &registry.snapshot()));
        let draining = Member {
            draining: true,
            ..member("a")
        };
        registry.set_members("static", vec![draining, member("b")]);
        assert!(changes.has_changed().unwrap());
        assert!(registry.snapshot().workers[0].draining);
    }

    #[test]
    fn other_settings_count_from_now_on_and_the_state_stays() {
        let registry = registry(&["a", "b"]);
        bring_up(&registry, "m");
        let worker = registry.snapshot().workers[0].worker.clone();
        let now = crate::observe::now();
        assert!(!worker.breaker.on_failure(now));
        let mut settings = Settings::default();
        settings.circuit_breaker.failure_threshold = 2;
        settings.max_workers = 1;
        registry.set_settings(settings);
        assert!(worker.breaker.on_failure(now));
        assert_eq!(registry.snapshot().workers.len(), 2);
        registry.set_members("static", vec![member("a"), member("b")]);
        assert_eq!(registry.snapshot().workers.len(), 1);
    }

    #[test]
    fn workers_with_the_same_models_share_their_members_and_others_do_not() {
        let registry = registry(&["a", "b", "c"]);
        bring_up(&registry, "base");
        let ids: Vec<WorkerId> = {
            let snapshot = registry.snapshot();
            let workers = snapshot.workers.iter();
            workers.map(|status| status.worker.id).collect()
        };
        for id in &ids {
            registry.set_facts(*id, facts(&["base", "adapter-1", "adapter-2"]));
        }
        registry.set_facts(ids[2], facts(&["base", "adapter-2", "adapter-3"]));
        let all = || Some(["a", "b", "c"].map(str::to_owned).to_vec());
        let found = |model| group_of(&registry, model);
        assert_eq!(found("base"), all());
        assert_eq!(found("adapter-1"), Some(vec!["a".into(), "b".into()]));
        assert_eq!(found("adapter-2"), all());
        assert_eq!(found("adapter-3"), Some(vec!["c".into()]));
        {
            let snapshot = registry.snapshot();
            let members = |model: &str| &snapshot.models[model].members;
            assert!(Arc::ptr_eq(members("base"), members("adapter-2")));
            assert!(!Arc::ptr_eq(members("base"), members("adapter-1")));
            let groups = with_different_members(snapshot.models.values());
            let models: Vec<&str> = groups.map(|group| &*group.model).collect();
            assert_eq!(models, ["adapter-1", "adapter-2", "adapter-3"]);
        }
        registry.set_health(ids[1], Health::Down);
        assert_eq!(found("adapter-1"), Some(vec!["a".into()]));
        registry.set_facts(ids[0], facts(&["base"]));
        assert_eq!(found("adapter-1"), Some(vec![]));
    }

    /// A thousand changes of a fleet in which each worker serves a thousand models: at one step for each pair of a worker
    /// and a model this takes minutes.
    #[test]
    fn a_change_of_one_worker_does_not_go_through_every_pair_of_a_worker_and_a_model() {
        let names: Vec<String> = (0..300).map(|n| format!("w{n}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let registry = registry(&names);
        let models: Vec<String> = (0..300).map(|n| format!("adapter-{n}")).collect();
        let models: Vec<&str> = models.iter().map(String::as_str).collect();
        let ids: Vec<WorkerId> = {
            let snapshot = registry.snapshot();
            let workers = snapshot.workers.iter();
            workers.map(|status| status.worker.id).collect()
        };
        for id in ids {
            registry.set_health(id, Health::Up);
            registry.set_facts(id, facts(&models));
        }
        let snapshot = registry.snapshot();
        assert_eq!(snapshot.models.len(), 300);
        let first = &snapshot.models["adapter-0"].members;
        assert_eq!(first.workers.len(), 300);
        let mut groups = snapshot.models.values();
        assert!(groups.all(|group| Arc::ptr_eq(&group.members, first)));
    }

    #[test]
    fn a_model_whose_workers_are_down_keeps_its_group() {
        let registry = registry(&["a"]);
        bring_up(&registry, "m");
        registry.set_health(registry.snapshot().workers[0].worker.id, Health::Down);
        assert_eq!(group_of(&registry, "m"), Some(vec![]));
        assert_eq!(group_of(&registry, "other"), None);
    }

    #[test]
    fn a_model_is_lost_with_its_last_worker_until_another_one_serves_it() {
        let registry = registry(&["a", "b"]);
        bring_up(&registry, "m");
        registry.set_members("static", vec![member("b")]);
        assert!(!registry.lost_lately("m"), "b serves it");
        registry.set_members("static", vec![member("c")]);
        assert_eq!(group_of(&registry, "m"), None);
        assert!(registry.lost_lately("m") && !registry.lost_lately("other"));
        bring_up(&registry, "m");
        assert!(!registry.lost_lately("m"));
        // An engine that serves another model now has not left.
        bring_up(&registry, "other");
        assert!(!registry.lost_lately("m"));
    }

    #[test]
    fn the_second_of_two_workers_with_one_name_is_named_by_its_address() {
        let registry = registry(&[]);
        let at = |address: &str| Member {
            address: address.to_owned(),
            ..member("a")
        };
        for _ in 0..2 {
            registry.set_members("static", vec![at("x:1"), at("x:2")]);
            let snapshot = registry.snapshot();
            let names: Vec<&str> = snapshot
                .workers
                .iter()
                .map(|status| &*status.worker.name)
                .collect();
            assert_eq!(names, ["a", "x:2"]);
            assert_eq!(snapshot.workers[1].worker.id, WorkerId(1));
        }
        // An address names one worker, whatever that is called.
        let is_draining = |index: usize| registry.snapshot().workers[index].draining;
        assert_eq!(registry.set_drained("x:1", true), Some(true));
        assert!(is_draining(0) && !is_draining(1));
        assert_eq!(registry.set_drained("x:1", false), Some(false));
        assert!(!is_draining(0));
        // It stays what it is when the other one leaves and when that comes back, in whatever order they are listed.
        assert_eq!(registry.set_drained("x:2", true), Some(true));
        for listed in [vec!["x:2"], vec!["x:2", "x:1"], vec!["x:1", "x:2"]] {
            registry.set_members("static", listed.into_iter().map(at).collect());
            let snapshot = registry.snapshot();
            let mut workers = snapshot.workers.iter();
            let found = workers.find(|status| status.worker.id == WorkerId(1));
            let second = found.unwrap();
            assert_eq!((&*second.worker.name, second.draining), ("x:2", true));
            let mut workers = snapshot.workers.iter();
            let has_name = workers.any(|status| &*status.worker.name == "a");
            assert_eq!(has_name, snapshot.workers.len() == 2);
        }
        // Nor does a third one take the name of the first.
        let first = registry.snapshot().workers[1].worker.id;
        registry.set_members("static", vec![at("x:3"), at("x:1")]);
        let snapshot = registry.snapshot();
        let workers = snapshot.workers.iter().map(|status| &status.worker);
        let names: Vec<(WorkerId, &str)> =
            workers.map(|worker| (worker.id, &*worker.name)).collect();
        assert_eq!(names[0], (first, "a"));
        assert_eq!(names[1].1, "x:3");
    }

    #[test]
    fn a_worker_that_gets_another_name_of_its_own_is_called_by_it() {
        let registry = registry(&[]);
        let at = |address: &str, name: &str| Member {
            address: address.to_owned(),
            ..member(name)
        };
        let names = || {
            let snapshot = registry.snapshot();
            let workers = snapshot.workers.iter().map(|status| &status.worker);
            workers
                .map(|worker| worker.name.to_string())
                .collect::<Vec<_>>()
        };
        // Without a name in the list it has its address.
        registry.set_members("static", vec![at("x:1", "x:1")]);
        registry.set_members("static", vec![at("x:1", "a"), at("x:2", "a")]);
        assert_eq!(names(), ["a", "x:2"]);
        registry.set_members("static", vec![at("x:1", "a"), at("x:2", "b")]);
        assert_eq!(names(), ["a", "b"]);
    }

    #[test]
    fn a_drained_worker_gets_no_requests_until_its_drain_ends() {
        let registry = registry(&["a", "b"]);
        bring_up(&registry, "m");
        assert_eq!(registry.set_drained("a", true), Some(true));
        assert_eq!(group_of(&registry, "m"), Some(vec!["b".to_owned()]));
        assert_eq!(registry.set_drained("a", false), Some(false));
        assert_eq!(group_of(&registry, "m").unwrap().len(), 2);
        assert_eq!(registry.set_drained("unknown", true), None);
    }

    #[test]
    fn a_worker_that_its_list_drains_goes_on_to_drain_after_an_operators_drain() {
        let registry = registry(&[]);
        let listed = Member {
            draining: true,
            ..member("a")
        };
        registry.set_members("static", vec![listed]);
        assert_eq!(registry.set_drained("a", true), Some(true));
        assert_eq!(registry.set_drained("a", false), Some(true));
        assert!(registry.snapshot().workers[0].draining);
    }

    #[test]
    fn a_worker_that_left_and_came_back_is_another_one() {
        let registry = registry(&["a"]);
        let first = registry.snapshot().workers[0].worker.id;
        registry.set_members("static", vec![]);
        registry.set_members("static", vec![member("a")]);
        assert_ne!(registry.snapshot().workers[0].worker.id, first);
    }

    #[test]
    fn workers_of_one_role_are_a_range_and_prefill_workers_take_no_whole_requests() {
        let registry = registry(&[]);
        let with_role = |name, role| Member {
            role,
            ..member(name)
        };
        registry.set_members(
            "static",
            vec![
                with_role("p0", Role::Prefill),
                with_role("b", Role::Both),
                with_role("d0", Role::Decode),
                with_role("p1", Role::Prefill),
                with_role("d1", Role::Decode),
            ],
        );
        bring_up(&registry, "m");
        let snapshot = registry.snapshot();
        let group = &snapshot.models["m"];
        let names = |workers: &[Arc<Worker>]| {
            let workers = workers.iter();
            workers
                .map(|worker| worker.name.to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(names(group.decode_workers()), ["d0", "d1", "b"]);
        assert_eq!(names(group.prefill_workers()), ["b", "p0", "p1"]);
        for (worker_index, worker) in group.workers.iter().enumerate() {
            let found = group.index_of(worker.id).map(|index| index.get());
            assert_eq!(found, Some(worker_index));
        }
        registry.set_members("static", vec![with_role("p0", Role::Prefill)]);
        assert!(registry.snapshot().models["m"].decode().is_empty());
        assert!(!registry.snapshot().is_ready());
    }

    #[test]
    fn a_worker_in_two_lists_gets_the_narrower_role() {
        let (both, decode, prefill) = (Role::Both, Role::Decode, Role::Prefill);
        for (first, second, expected) in [
            (both, prefill, prefill),
            (prefill, both, prefill),
            (decode, prefill, prefill),
            (prefill, decode, prefill),
            (both, decode, decode),
            (decode, both, decode),
            (both, both, both),
        ] {
            let registry = registry(&[]);
            let listed = |role: Role| Member {
                role,
                labels: [("as".to_owned(), role.to_string().into())].into(),
                ..member("a")
            };
            registry.set_members("dns", vec![listed(first), member("b")]);
            registry.set_members("dns_prefill", vec![listed(second)]);
            let of_first = || {
                let snapshot = registry.snapshot();
                let mut workers = snapshot.workers.iter().map(|status| &status.worker);
                workers.find(|worker| &*worker.name == "a").unwrap().clone()
            };
            let worker = of_first();
            assert_eq!(worker.role, expected, "{first} {second}");
            assert_eq!(*worker.labels["as"], expected.to_string());
            let conflicts = registry.state.lock().role_conflicts.len();
            assert_eq!(conflicts, usize::from(first != second));
            // Listed again, it stays the same worker.
            registry.set_members("dns", vec![listed(first), member("b")]);
            assert_eq!(of_first().id, worker.id);
            registry.set_members("dns_prefill", vec![]);
            assert_eq!(of_first().role, first);
            assert!(registry.state.lock().role_conflicts.is_empty());
        }
    }

    proptest! {
        /// Compares with a set of names, while two discoveries list any names in any order.
        #[test]
        fn the_snapshot_lists_the_union_and_keeps_workers_that_stay(
            lists in proptest::collection::vec((any::<bool>(), proptest::collection::vec(0u8..6, 0..6)), 0..12),
        ) {
            let registry = registry(&[]);
            let mut model: [std::collections::BTreeSet<u8>; 2] = Default::default();
            for (second, names) in lists {
                let before: BTreeMap<String, WorkerId> = registry.snapshot().workers.iter()
                    .map(|status| (status.worker.name.to_string(), status.worker.id)).collect();
                let members = names.iter().map(|name| member(&name.to_string())).collect();
                registry.set_members(if second { "dns" } else { "static" }, members);
                model[usize::from(second)] = names.into_iter().collect();
                let expected: std::collections::BTreeSet<String> =
                    model.iter().flatten().map(u8::to_string).collect();
                let snapshot = registry.snapshot();
                let listed: Vec<String> = snapshot.workers.iter().map(|status| status.worker.name.to_string()).collect();
                prop_assert_eq!(listed.len(), expected.len());
                prop_assert_eq!(listed.into_iter().collect::<std::collections::BTreeSet<_>>(), expected);
                for status in &snapshot.workers {
                    if let Some(id) = before.get(&*status.worker.name) {
                        prop_assert_eq!(status.worker.id, *id);
                    }
                }
            }
        }
    }
}
