//! Membership, health and facts -> a new immutable [`Snapshot`], swapped in on every change.

use std::collections::{BTreeMap, BTreeSet, btree_map};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use arc_swap::{ArcSwap, ArcSwapOption};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use tokio::sync::watch;
use tracing::{info, warn};

use super::breaker;
use super::handoff::{Peer, Shape};
use super::health::Health;
use super::load::Load;
use super::{Facts, Group, Member, Role, Snapshot, Status, Worker};
use crate::http::client;
use crate::ids::WorkerId;

/// The fleet's book-keeper. Readers take a snapshot with one pointer load.
#[derive(Debug)]
pub struct Registry {
    snapshot: ArcSwap<Snapshot>,
    book: Mutex<Book>,
    client: client::Settings,
    breaker: breaker::Settings,
    workers_max: usize,
    /// The label that two workers of a pair must share; empty for none.
    topology: String,
    version: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Book {
    next_id: u32,
    /// Discovery's name -> what it lists.
    lists: BTreeMap<String, Vec<Member>>,
    /// The addresses that are listed with different roles, which was told.
    clashing: BTreeSet<String>,
    /// In the order in which they joined, so that places are stable.
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    member: Member,
    status: Status,
    /// Drained by an operator, whatever the discovery says.
    drained: bool,
}

/// Of the roles that one worker is listed with the narrowest is its own: an engine that is asked for what it was not
/// started for may end, while a prefill worker that is left out of decoding only idles.
fn narrowness(role: Role) -> u8 {
    match role {
        Role::Both => 0,
        Role::Decode => 1,
        Role::Prefill => 2,
    }
}

impl Entry {
    /// Nothing that its process told of itself or held is to be relied on any more.
    fn begin_life(&mut self) {
        self.status.life += 1;
        self.status.worker.peer.store(None);
    }
}

impl Registry {
    pub fn new(
        client: client::Settings,
        breaker: breaker::Settings,
        workers_max: usize,
        topology: &str,
    ) -> Arc<Self> {
        Arc::new(Self {
            snapshot: ArcSwap::default(),
            book: Mutex::default(),
            client,
            breaker,
            workers_max,
            topology: topology.to_owned(),
            version: watch::Sender::new(0),
        })
    }

    pub fn snapshot(&self) -> arc_swap::Guard<Arc<Snapshot>> {
        self.snapshot.load()
    }

    /// The label that a pair of workers must share; empty for none.
    pub fn topology(&self) -> &str {
        &self.topology
    }

    /// Tells of every new snapshot.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// Takes what one discovery lists now; what others list stays.
    pub fn set_members(&self, discovery: &str, members: Vec<Member>) {
        let mut book = self.book.lock();
        book.lists.insert(discovery.to_owned(), members);
        let mut listed: BTreeMap<String, Member> = BTreeMap::new();
        let mut order = Vec::new();
        let mut clashing = BTreeSet::new();
        for member in book.lists.values().flatten() {
            match listed.entry(member.address.clone()) {
                btree_map::Entry::Vacant(free) => {
                    order.push(member.address.clone());
                    free.insert(member.clone());
                }
                btree_map::Entry::Occupied(mut known) => {
                    if known.get().role != member.role {
                        clashing.insert(member.address.clone());
                    }
                    if narrowness(member.role) > narrowness(known.get().role) {
                        known.insert(member.clone());
                    }
                }
            }
        }
        for address in clashing.difference(&book.clashing) {
            let role = listed.get(address).map(|member| member.role);
            warn!(
                address,
                role = role.map(tracing::field::display),
                "a worker is listed with different roles; it gets the narrowest of them"
            );
        }
        book.clashing = clashing;
        let mut names = BTreeSet::new();
        for address in &order {
            if let Some(member) = listed.get_mut(address)
                && !names.insert(member.name.clone())
            {
                // Two of one name could not be told apart in logs, metrics and drains.
                member.name.clone_from(&member.address);
            }
        }
        if order.len() > self.workers_max {
            warn!(
                listed = order.len(),
                workers_max = self.workers_max,
                "more workers than allowed; the last are left out"
            );
            for address in order.drain(self.workers_max..) {
                listed.remove(&address);
            }
        }
        book.entries.retain(|entry| {
            // A worker whose role or credential changed is a new one: its connections and counts are not its own.
            let stays = listed.get(&entry.member.address).is_some_and(|member| {
                let draining = entry.member.draining;
                Member {
                    draining,
                    ..member.clone()
                } == entry.member
            });
            if !stays {
                info!(worker = %entry.member.name, "worker left");
            }
            stays
        });
        for address in order {
            let Some(member) = listed.remove(&address) else {
                continue;
            };
            match book
                .entries
                .iter_mut()
                .find(|entry| entry.member.address == address)
            {
                Some(entry) => {
                    entry.member.draining = member.draining;
                    entry.status.draining = member.draining || entry.drained;
                }
                None => {
                    info!(worker = %member.name, address, role = %member.role, "worker joined");
                    let entry = self.enter(&mut book, member);
                    book.entries.push(entry);
                }
            }
        }
        self.publish(&book);
    }

    pub fn set_health(&self, id: WorkerId, health: Health) {
        self.change(id, |entry| {
            entry.status.health = health;
            // A worker that was down may be another process when it comes back.
            if health == Health::Down {
                entry.begin_life();
            }
        });
    }

    /// Takes what a worker tells of itself. Its models' entries differ each time it is asked (they carry
    /// the time); only other names or another version make a new snapshot.
    pub fn set_facts(&self, id: WorkerId, facts: Facts) {
        let is_news = self.snapshot().workers.iter().any(|status| {
            let known = &status.facts;
            status.worker.id == id
                && (known.version != facts.version
                    || known.base != facts.base
                    || known.block_size != facts.block_size
                    || known.event_endpoints != facts.event_endpoints
                    || !known.models.keys().eq(facts.models.keys()))
        });
        if is_news {
            self.change(id, |entry| entry.status.facts = Arc::new(facts));
        }
    }

    /// The engine process behind a worker is another one now: what it held is gone.
    pub fn restarted(&self, id: WorkerId) {
        self.change(id, Entry::begin_life);
    }

    /// Takes where a worker's blocks are fetched, as its process told it.
    pub fn set_peer(&self, id: WorkerId, peer: Option<Peer>) {
        self.change(id, |entry| {
            entry.status.worker.peer.store(peer.map(Arc::new));
        });
    }

    /// Lets a worker finish what it has and gives it nothing new, or takes it back. `false` if there
    /// is no such worker.
    pub fn set_drained(&self, name: &str, drained: bool) -> bool {
        let mut book = self.book.lock();
        let Some(entry) = book
            .entries
            .iter_mut()
            .find(|entry| entry.member.name == name)
        else {
            return false;
        };
        entry.drained = drained;
        entry.status.draining = drained || entry.member.draining;
        info!(
            worker = name,
            drained, "worker drain changed by an operator"
        );
        self.publish(&book);
        true
    }

    fn change(&self, id: WorkerId, change: impl FnOnce(&mut Entry)) {
        let mut book = self.book.lock();
        // A worker that has left in the meantime has nothing to change.
        if let Some(entry) = book
            .entries
            .iter_mut()
            .find(|entry| entry.status.worker.id == id)
        {
            change(entry);
            self.publish(&book);
        }
    }

    fn enter(&self, book: &mut Book, member: Member) -> Entry {
        let id = WorkerId(book.next_id);
        book.next_id += 1;
        let worker = Arc::new(Worker {
            id,
            name: member.name.as_str().into(),
            role: member.role,
            authorization: member.authorization.clone(),
            events: member.events.clone(),
            labels: member.labels.clone(),
            bootstrap: member.bootstrap.clone(),
            pool: client::Pool::new(member.address.clone(), self.client.clone()),
            load: Load::default(),
            breaker: self.breaker.build(),
            kv_transfer_breaker: self.breaker.build(),
            cache_tokens: AtomicU64::new(0),
            refuses_reports: AtomicBool::new(false),
            peer: ArcSwapOption::empty(),
        });
        let draining = member.draining;
        let status = Status {
            worker,
            health: Health::Unknown,
            life: 0,
            draining,
            facts: Arc::default(),
        };
        Entry {
            member,
            status,
            drained: false,
        }
    }

    fn publish(&self, book: &Book) {
        let workers = book.entries.iter().map(|entry| entry.status.clone());
        let snapshot = snapshot(workers.collect(), &self.topology);
        self.snapshot.store(Arc::new(snapshot));
        self.version.send_modify(|version| *version += 1);
    }
}

/// Groups workers by model. A model whose workers are all down keeps its (empty) group: it is
/// unavailable, not unknown.
fn snapshot(workers: Vec<Status>, topology: &str) -> Snapshot {
    let mut models: BTreeMap<_, (Group, Vec<&Status>)> = BTreeMap::new();
    for status in &workers {
        for (model, card) in &status.facts.models {
            let (group, members) = models.entry(model.clone()).or_insert_with(|| {
                let group = Group {
                    model: model.clone(),
                    workers: Vec::new(),
                    decode_only: 0,
                    prefill_only: 0,
                    shapes: Vec::new(),
                    place: FxHashMap::default(),
                    event_ranks: Vec::new(),
                    card: card.clone(),
                    bases: Vec::new(),
                    is_adapter: status.facts.adapters.contains(model),
                };
                (group, Vec::new())
            });
            if let Some(base) = &status.facts.base
                && !group.bases.contains(base)
            {
                group.bases.push(base.clone());
            }
            if status.health == Health::Up && !status.draining {
                members.push(status);
            }
        }
    }
    let models = models.into_iter().map(|(model, (mut group, mut members))| {
        // Places of one role are next to each other, and else in the order of joining.
        members.sort_by_key(|status| match status.worker.role {
            Role::Decode => 0,
            Role::Both => 1,
            Role::Prefill => 2,
        });
        let count = |role| {
            let mut roles = members.iter().map(|status| status.worker.role);
            roles.by_ref().filter(|it| *it == role).count()
        };
        group.decode_only = count(Role::Decode);
        group.prefill_only = count(Role::Prefill);
        for (place, status) in members.into_iter().enumerate() {
            group.place.insert(status.worker.id, place);
            group
                .event_ranks
                .push(status.event_endpoints().len() as u32);
            group.workers.push(status.worker.clone());
            group.shapes.push(Shape::of(status, topology));
        }
        (model, Arc::new(group))
    });
    let models = models.collect();
    Snapshot { workers, models }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fleet::events::Events;

    pub(crate) fn member(name: &str) -> Member {
        Member {
            name: name.to_owned(),
            address: format!("{name}.test:8000"),
            role: Role::Both,
            draining: false,
            authorization: None,
            events: Events::Off,
            labels: BTreeMap::new(),
            bootstrap: None,
        }
    }

    pub(crate) fn registry(names: &[&str]) -> Arc<Registry> {
        let registry = Registry::new(
            client::Settings::default(),
            breaker::Settings::default(),
            1_000,
            "",
        );
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

    #[test]
    fn a_worker_takes_requests_once_it_is_up_and_its_models_are_known() {
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
    fn a_model_whose_workers_are_down_is_still_known() {
        let registry = registry(&["a"]);
        bring_up(&registry, "m");
        registry.set_health(registry.snapshot().workers[0].worker.id, Health::Down);
        assert_eq!(group_of(&registry, "m"), Some(vec![]));
        assert_eq!(group_of(&registry, "other"), None);
    }

    #[test]
    fn of_two_workers_with_one_name_the_second_is_called_by_its_address() {
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
    }

    #[test]
    fn a_draining_worker_gets_nothing_new_and_can_come_back() {
        let registry = registry(&["a", "b"]);
        bring_up(&registry, "m");
        assert!(registry.set_drained("a", true));
        assert_eq!(group_of(&registry, "m"), Some(vec!["b".to_owned()]));
        assert!(registry.set_drained("a", false));
        assert_eq!(group_of(&registry, "m").unwrap().len(), 2);
        assert!(!registry.set_drained("nobody", true));
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
    fn workers_of_one_role_are_a_range_of_places_and_prefill_workers_take_no_whole_requests() {
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
        let names = |places: std::ops::Range<usize>| {
            let workers = group.workers[places].iter();
            workers.map(|it| &*it.name).collect::<Vec<_>>()
        };
        assert_eq!(names(group.decode()), ["d0", "d1", "b"]);
        assert_eq!(names(group.prefill()), ["b", "p0", "p1"]);
        for (place, worker) in group.workers.iter().enumerate() {
            assert_eq!(group.place[&worker.id], place);
        }
        registry.set_members("static", vec![with_role("p0", Role::Prefill)]);
        assert!(registry.snapshot().models["m"].decode().is_empty());
        assert!(!registry.snapshot().is_ready());
    }

    #[test]
    fn of_two_lists_that_have_one_worker_the_narrower_role_is_taken() {
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
            let clashing = registry.book.lock().clashing.len();
            assert_eq!(clashing, usize::from(first != second));
            // Listed again, it is the one it was.
            registry.set_members("dns", vec![listed(first), member("b")]);
            assert_eq!(of_first().id, worker.id);
            registry.set_members("dns_prefill", vec![]);
            assert_eq!(of_first().role, first);
            assert!(registry.book.lock().clashing.is_empty());
        }
    }

    proptest! {
        /// Against a set of names: two discoveries list any names in any order, over and over.
        #[test]
        fn the_snapshot_lists_the_union_and_keeps_who_stays(
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
