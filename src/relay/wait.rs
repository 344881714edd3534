//! Waiting for room at a worker, before the first attempt of a request: the queues of all models, and the wait itself.
//!
//! A request whose best worker has room passes without a lock. Else it enters the queue of its model and of those that share
//! workers with it ([`crate::queue`]), which all I/O threads share. One task ([`dispatch`]) promises each waiting request to
//! its best worker, as things are then, and releases those whose worker has room.

mod dispatch;
mod grant;
mod metrics;
mod room;
mod shared_queue;
mod sharing;
mod standing;
mod status;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, ArcSwapOption};
use parking_lot::{Mutex, RwLock};
use rustc_hash::{FxHashMap, FxHashSet};

pub(super) use self::grant::Grant;
use self::grant::Granted;
use self::metrics::Metrics;
pub(super) use self::room::has_room;
use self::room::{Rooms, Stalled};
use self::shared_queue::{Gone, Ticket, Woken};
pub(super) use self::shared_queue::{Placed, Placing, Planned, SharedQueue, WaitsFor};
use self::sharing::Sharing;
pub(super) use self::standing::Standing;
pub use self::status::{QueueStatus, QueueSummary};
use super::choose::promised::Promised;
use crate::fleet::kv_transfer::Connector;
use crate::fleet::registry::Registry;
use crate::fleet::waiting::WaitingByOwner;
use crate::fleet::{Group, Snapshot, Worker, with_different_members};
use crate::ids::Model;
use crate::observe;
use crate::observe::metrics::Registry as MetricsRegistry;
use crate::queue::{Outcome, Refusal, RefusalReason, Request, Room, SetBy, Settings};

/// Far more than there are models; what is listed bounds them too.
const MAX_QUEUES: usize = 10_000;

/// The queues of all models, whatever the configuration.
#[derive(Debug)]
pub struct Queues {
    fleet: Arc<Registry>,
    /// `None`: requests are not disaggregated. Else room for a prompt is that of prefill workers, where there are any.
    connector: Option<Connector>,
    /// The settings of `queue` in the newest configuration; `None`: requests do not wait.
    settings: ArcSwapOption<Settings>,
    /// Models that the newest configuration names.
    configured: ArcSwap<FxHashSet<Model>>,
    by_name: ArcSwap<FxHashMap<Model, Arc<SharedQueue>>>,
    /// Which models wait in one.
    sharing: ArcSwap<Sharing>,
    granted: Arc<Granted>,
    /// Held while queues are added and removed, and while `settings` change with theirs.
    changing: Mutex<()>,
    /// Read for as long as all workers of a model are looked at, by each request that enters a queue.
    stalled: RwLock<Stalled>,
    is_draining: AtomicBool,
    metrics: Metrics,
}

impl Queues {
    pub(super) fn new(
        fleet: Arc<Registry>,
        connector: Option<Connector>,
        registry: &MetricsRegistry,
    ) -> Arc<Self> {
        let queues = Arc::new(Self {
            fleet,
            connector,
            settings: ArcSwapOption::empty(),
            configured: ArcSwap::default(),
            by_name: ArcSwap::default(),
            sharing: ArcSwap::default(),
            granted: Arc::default(),
            changing: Mutex::default(),
            stalled: RwLock::default(),
            is_draining: AtomicBool::new(false),
            metrics: Metrics::new(registry),
        });
        let exported = Arc::downgrade(&queues);
        registry.on_scrape(move || {
            if let Some(queues) = exported.upgrade() {
                queues.export();
            }
        });
        queues
    }

    /// Uses the settings of a new configuration, also for the requests that wait already.
    pub(super) fn set(&self, settings: Option<&Arc<Settings>>, configured: FxHashSet<Model>) {
        self.configured.store(Arc::new(configured));
        let changing = self.changing.lock();
        let before = self.settings.swap(settings.cloned());
        if before.as_ref() == settings {
            return;
        }
        if let Some(settings) = settings {
            for queue in self.by_name.load().values() {
                queue.set_settings(settings);
            }
        }
        drop(changing);
        self.fleet.freed().notify();
    }

    /// Requests that find no room from now on are sent all the same; those that wait go on.
    pub fn begin_drain(&self) {
        self.is_draining.store(true, Relaxed);
    }

    /// What workers were promised, for a request that chooses its worker beside those that wait here and in other replicas.
    /// `None` while none waits.
    pub(super) fn promised(&self) -> Option<Arc<Promised>> {
        let peers = self.waiting_at_peers();
        if self.fleet.freed().waiting() > 0 {
            let last = self.granted.last.load_full();
            if last.has_peers() || peers.is_none() {
                return Some(last);
            }
            // While none waited here, nobody looked at what waits in other replicas.
            let promised = Promised::clone(&last).with_peers(peers);
            return Some(Arc::new(promised));
        }
        Some(Arc::new(Promised::default().with_peers(Some(peers?))))
    }

    /// What workers were promised by requests that were released and do not count there yet, and in other replicas. A
    /// released request was chosen behind these, and behind those that wait before it, which are not known any more.
    pub(super) fn released(&self) -> Promised {
        let released = self.granted.released.lock().clone();
        released.with_peers(self.waiting_at_peers())
    }

    fn waiting_at_peers(&self) -> Option<Arc<WaitingByOwner>> {
        self.fleet.waiting().peers().clone()
    }

    /// Whether a request may go without waiting to the `worker` that it has chosen, and to the dp rank that it is pinned to: that
    /// one has room, and nobody waits for it. Takes no lock.
    pub(super) fn may_pass(
        &self,
        settings: &Settings,
        model: &Model,
        (worker, rank): (&Worker, Option<u32>),
        promised: Option<&Promised>,
    ) -> bool {
        if !has_room(worker, rank, settings, promised) {
            return false;
        }
        let is_known = |queue: Arc<SharedQueue>| queue.waiting() == 0 || queue.is_all_promised();
        promised.is_none() || self.get(model).is_none_or(is_known)
    }

    /// Whether any of a group's workers takes requests.
    pub(super) fn is_up(&self, group: &Group) -> bool {
        let now = observe::now();
        self.workers_of(group, now).can_take(now)
    }

    /// Whether any of a model's workers takes requests, now or after a pause. One that only gets a trial does not.
    pub(super) fn has_worker(&self, model: &Model, now: Instant) -> bool {
        let snapshot = self.fleet.snapshot();
        let Some(group) = snapshot.models.get(model) else {
            return false;
        };
        let decodes_alone = self.connector.is_some_and(Connector::decodes_alone);
        let others = decodes_alone.then(|| Self::decode_workers_of(group));
        let mut workers = others.into_iter().chain([self.workers_of(group, now)]);
        workers.any(room::Workers::are_up)
    }

    /// Whether requests for a model wait for a worker although none is listed that serves it.
    pub(super) fn is_known(&self, model: &str) -> bool {
        self.configured.load().contains(model)
    }

    /// Whether requests for a model that the configuration names wait for its first worker.
    pub fn wait_for_workers(&self) -> bool {
        let settings = self.settings.load();
        let may_wait = |settings: &Settings| !settings.no_worker_timeout.is_zero();
        settings.as_deref().is_some_and(may_wait) && !self.configured.load().is_empty()
    }

    /// Waits until the request's best worker has room. An error ends the request. `planned` says which one that is; `None` if
    /// the model has no workers yet.
    pub(super) async fn wait(
        self: &Arc<Self>,
        settings: &Arc<Settings>,
        model: &Model,
        mut request: Request,
        mut planned: Option<Planned>,
    ) -> Result<Grant, Refusal> {
        let class = &settings.classes[settings.class_of(request.priority)].name;
        let refused = |reason| {
            let retry_after = Duration::from_secs(1);
            self.metrics.on_refused(model, class, reason);
            Refusal {
                reason,
                retry_after,
            }
        };
        let freed = self.fleet.freed();
        loop {
            if self.is_draining.load(Relaxed) {
                // The router ends sooner than the engine, which takes it at once.
                return Ok(Grant::at_once(&self.granted, freed));
            }
            let now = observe::now();
            let lacks_worker = !self.has_worker(model, now);
            if request.lacks_worker != lacks_worker {
                (request.lacks_worker, request.since) = (lacks_worker, now);
            }
            let Some(queue) = self.of(model, settings) else {
                let max = MAX_QUEUES as u32;
                let set_by = SetBy::Queue;
                return Err(refused(RefusalReason::TooManyRequests { max, set_by }));
            };
            let room = {
                // Asking for the models may wait for a walk, too.
                let mut models = queue.models();
                models.push(model.clone());
                // One with a target waits for a walk to end. The rooms are read then, without what that has given away.
                let may_pass = |planned: &Planned| queue.is_passed_by(settings, &request, planned);
                let is_passed_by = planned.as_ref().is_some_and(may_pass);
                let released = self.granted.released.lock().clone();
                let rooms = self.rooms(&models, settings, &released, now);
                request.has_room |= finds_room(&rooms, planned.as_ref(), is_passed_by);
                rooms.room
            };
            let Some(entered) = self.enter(&queue, now, room, request, model, &mut planned) else {
                continue;
            };
            let ticket = entered.inspect_err(|refusal| {
                refused(refusal.reason);
            })?;
            match ticket.woken().await {
                Woken::Granted(grant) => return Ok(grant),
                Woken::Refused(refusal) => return Err(refusal),
                Woken::Moved {
                    planned: back,
                    request: moved,
                } => (planned, request) = (back, moved),
            }
        }
    }

    /// Adds a request to a queue. `None` if it does not wait there: the queue was removed just now, and `planned` stays, or
    /// the router has begun to drain.
    fn enter(
        &self,
        queue: &Arc<SharedQueue>,
        now: Instant,
        room: Room,
        request: Request,
        model: &Model,
        planned: &mut Option<Planned>,
    ) -> Option<Result<Ticket, Refusal>> {
        let freed = self.fleet.freed();
        let (ticket, gone) = match queue.enter(freed, now, room, request, model, planned)? {
            Ok(entered) => entered,
            Err(refusal) => return Some(Err(refusal)),
        };
        for gone in gone {
            self.on_left(&gone);
            gone.wake(&self.granted, freed);
        }
        if self.is_draining.load(Relaxed) {
            // The task that releases requests may have ended before this one was there.
            return None;
        }
        // The fleet may have changed since the queue was found, and those who waited in it then have moved.
        if *self.sharing.load().queue_of(model) != queue.name {
            self.move_out(queue, now);
        }
        Some(Ok(ticket))
    }

    /// Ends the wait of requests of lower priority until they give so many bytes of their bodies back: of the newest of the
    /// lowest class first. Returns how many they give. `all_or_none`: if all of them together have fewer, none gives any.
    pub fn give_up(&self, priority: i32, bytes: u64, all_or_none: bool) -> u64 {
        let now = observe::now();
        let queues = self.by_name.load();
        let mut below = Vec::new();
        for queue in queues.values().filter(|queue| queue.waiting() > 0) {
            let found = queue.below(priority).into_iter();
            below.extend(found.map(|waiting| (waiting, queue)));
        }
        let all: u64 = below.iter().map(|(waiting, _)| waiting.bytes).sum();
        if all_or_none && all < bytes {
            return 0;
        }
        below.sort_unstable_by_key(|(waiting, _)| {
            std::cmp::Reverse((waiting.class, waiting.entered))
        });
        let mut given = 0;
        for (waiting, queue) in below {
            if given >= bytes {
                break;
            }
            if let Some(gone) = queue.give_up(now, waiting.id) {
                given += waiting.bytes;
                self.on_left(&gone);
                gone.wake(&self.granted, self.fleet.freed());
            }
        }
        given
    }

    /// What is known of a model's queue. `None` if nothing has waited there.
    pub(super) fn get(&self, model: &Model) -> Option<Arc<SharedQueue>> {
        let sharing = self.sharing.load();
        self.by_name.load().get(sharing.queue_of(model)).cloned()
    }

    /// Removes the queues of models that are gone, or wait with others now, and that no request waits in.
    pub(super) fn remove_gone(&self, fleet: &Snapshot) {
        // A former fleet has workers that left, with their idle connections. While nobody waits, nobody else renews it.
        self.renew_sharing(observe::now());
        let sharing = self.sharing.load();
        let is_known = |name: &Model| {
            let is_listed = fleet.models.contains_key(name) || self.is_known(name);
            is_listed && sharing.queue_of(name) == name
        };
        if self.by_name.load().keys().all(is_known) {
            return;
        }
        let _changing = self.changing.lock();
        let mut queues = FxHashMap::clone(&self.by_name.load());
        queues.retain(|name, queue| is_known(name) || !queue.close_if_empty());
        self.by_name.store(Arc::new(queues));
    }

    fn of(&self, model: &Model, settings: &Arc<Settings>) -> Option<Arc<SharedQueue>> {
        self.renew_sharing(observe::now());
        let sharing = self.sharing.load();
        let name = sharing.queue_of(model);
        if let Some(queue) = self.by_name.load().get(name) {
            return Some(queue.clone());
        }
        let _changing = self.changing.lock();
        let queues = self.by_name.load();
        if let Some(queue) = queues.get(name) {
            return Some(queue.clone());
        }
        if queues.len() >= MAX_QUEUES {
            return None;
        }
        // The request may have come under an older configuration.
        let newest = self.settings.load_full();
        let settings = newest.as_ref().unwrap_or(settings);
        let is_shared = self.fleet.waiting().is_shared();
        let queue = Arc::new(SharedQueue::new(name.clone(), settings.clone(), is_shared));
        let mut queues = FxHashMap::clone(&queues);
        queues.insert(name.clone(), queue.clone());
        self.by_name.store(Arc::new(queues));
        Some(queue)
    }

    /// Who waits in the wrong queue since the fleet has changed goes to the right one.
    fn renew_sharing(&self, now: Instant) {
        let fleet = self.fleet.snapshot();
        if self.sharing.load().is_of(&fleet) {
            return;
        }
        self.sharing.store(Arc::new(Sharing::new(&fleet)));
        // Each queue is locked, also one where none waits: whoever enters it later sees the new sharing.
        for queue in self.by_name.load().values() {
            self.move_out(queue, now);
        }
    }

    /// Who waits in a queue that is not that of its model goes to the right one.
    fn move_out(&self, queue: &SharedQueue, now: Instant) {
        let sharing = self.sharing.load();
        let is_moved = |model: &Model| *sharing.queue_of(model) != queue.name;
        for gone in queue.end(now, Outcome::Moved, is_moved) {
            gone.wake(&self.granted, self.fleet.freed());
        }
    }

    /// The workers that compute the prompts of some models, and decode workers beside them.
    fn rooms(
        &self,
        models: &[Model],
        settings: &Settings,
        promised: &Promised,
        now: Instant,
    ) -> Rooms {
        let snapshot = self.fleet.snapshot();
        let listed = models.iter().filter_map(|model| snapshot.models.get(model));
        let groups: Vec<&Arc<Group>> = listed.collect();
        let workers = with_different_members(groups.iter().copied());
        let workers = workers.map(|group| self.workers_of(group, now));
        let stalled = self.stalled.read();
        let rooms = Rooms::new(workers, settings, promised, &stalled, now);
        let has_others = self.connector.is_some_and(Connector::decodes_alone);
        if !has_others {
            return rooms;
        }
        let others = groups
            .iter()
            .map(|group| (&group.model, Self::decode_workers_of(group)));
        rooms.with_others(others, settings, promised, &stalled, now)
    }

    /// The workers that compute prompts now: decode workers if no prefill worker can and they compute any. A request
    /// that needs a prefill worker all the same fails when it is sent.
    fn workers_of<'a>(&self, group: &'a Group, now: Instant) -> room::Workers<'a> {
        let prefill = room::Workers {
            workers: group.prefill_workers(),
            is_prefill: true,
        };
        let is_prefill = self.connector.is_some_and(|connector| {
            let has_others = connector.decodes_alone() || group.prefill_workers().is_empty();
            !has_others || prefill.can_take(now)
        });
        if is_prefill {
            prefill
        } else {
            Self::decode_workers_of(group)
        }
    }

    fn decode_workers_of(group: &Group) -> room::Workers<'_> {
        room::Workers {
            workers: group.decode_workers(),
            is_prefill: false,
        }
    }

    fn on_left(&self, gone: &Gone) {
        let model = &gone.left.waker.model;
        self.metrics.on_waited(model, &gone.class, gone.left.waited);
        if let Outcome::Refused(refusal) = &gone.left.outcome {
            self.metrics.on_refused(model, &gone.class, refusal.reason);
        }
    }
}

/// Whether a request that enters a queue has room, though one that waits may be in its line. `is_passed_by`: it may
/// pass those.
fn finds_room(rooms: &Rooms, planned: Option<&Planned>, is_passed_by: bool) -> bool {
    let Some(planned) = planned else {
        // Any worker may be that of a request without a plan.
        return !rooms.room.is_full;
    };
    let worker = planned.waits_for.as_ref().map(|waits_for| waits_for.worker);
    let has_room = worker.is_some_and(|worker| rooms.is_open_at_all(worker));
    has_room && is_passed_by
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;
    use crate::fleet::load::LoadShare;
    use crate::fleet::registry::tests::{bring_up, facts, member, registry};
    use crate::fleet::{Member, Role};
    use crate::ids::WorkerId;

    /// The queue of a model as it was found before a worker came up that serves another model, too, in whose queue the
    /// requests for both wait from then on.
    fn outdated_queue(queues: &Queues, model: &Model) -> Arc<SharedQueue> {
        let queue = queues.of(model, &Arc::default()).unwrap();
        bring_up(&queues.fleet, model);
        let worker = queues.fleet.snapshot().workers[0].worker.id;
        queues
            .fleet
            .set_facts(worker, facts(&["first", model.as_ref()]));
        queues.renew_sharing(observe::now());
        queue
    }

    fn enter(queues: &Queues, queue: &Arc<SharedQueue>, model: &Model) -> Option<Ticket> {
        let now = observe::now();
        let room = Room {
            workers: 1,
            ..Room::default()
        };
        let request = Request::for_tests(now, 10);
        let entered = queues.enter(queue, now, room, request, model, &mut None);
        entered.map(Result::unwrap)
    }

    /// Else it would take its turn beside those of its class, and lines of batches would be let in before it.
    #[test]
    fn a_request_that_enters_the_queue_of_a_former_fleet_moves_to_the_right_one() {
        let queues = Queues::new(registry(&["a"]), None, &MetricsRegistry::default());
        let model = Model::from("second");
        let queue = outdated_queue(&queues, &model);
        let ticket = enter(&queues, &queue, &model).unwrap();
        let mut woken = pin!(ticket.woken());
        let polled = woken.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(matches!(polled, Poll::Ready(Woken::Moved { .. })));
        assert_eq!((queue.waiting(), queues.fleet.freed().waiting()), (0, 0));
        // One that enters the right queue waits in it.
        let right = queues.of(&model, &Arc::default()).unwrap();
        let ticket = enter(&queues, &right, &model);
        assert_eq!(
            (right.name.clone(), right.waiting()),
            (Model::from("first"), 1)
        );
        drop(ticket);
        assert_eq!(queues.fleet.freed().waiting(), 0);
    }

    #[test]
    fn a_worker_that_left_is_not_kept_because_somebody_has_waited() {
        let fleet = registry(&["a"]);
        bring_up(&fleet, "m");
        let queues = Queues::new(fleet.clone(), None, &MetricsRegistry::default());
        let model = Model::from("m");
        let queue = queues.of(&model, &Arc::default()).unwrap();
        drop(enter(&queues, &queue, &model));
        let worker = Arc::downgrade(&fleet.snapshot().workers[0].worker);
        fleet.set_members("static", Vec::new());
        queues.remove_gone(&fleet.snapshot());
        assert!(worker.upgrade().is_none());
    }

    #[test]
    fn a_request_that_enters_while_the_drain_begins_does_not_wait() {
        let queues = Queues::new(registry(&["a"]), None, &MetricsRegistry::default());
        let model = Model::from("m");
        let queue = queues.of(&model, &Arc::default()).unwrap();
        assert!(enter(&queues, &queue, &model).is_some());
        queues.begin_drain();
        assert!(enter(&queues, &queue, &model).is_none());
        assert_eq!((queue.waiting(), queues.fleet.freed().waiting()), (0, 0));
    }

    #[test]
    fn a_released_request_was_chosen_before_those_that_wait() {
        let queues = Queues::new(registry(&[]), None, &MetricsRegistry::default());
        let worker = WorkerId(1);
        let share = |tokens| LoadShare::of_request(tokens, tokens);
        queues.granted.released.lock().add(&[(worker, share(10))]);
        let mut last = queues.granted.released.lock().clone();
        last.add_waiting(&[(worker, share(7))]);
        queues.granted.last.store(Arc::new(last));
        assert_eq!(queues.released().of(worker).all, share(10));
    }

    #[test]
    fn a_request_of_an_older_configuration_creates_a_queue_with_the_newest_settings() {
        let queues = Queues::new(registry(&[]), None, &MetricsRegistry::default());
        let of_size = |max_requests| {
            let settings = Settings {
                max_requests,
                ..Settings::default()
            };
            Arc::new(settings)
        };
        let (older, newest) = (of_size(2), of_size(1));
        let settings_of = |model: &str| {
            let queue = queues.of(&Model::from(model), &older);
            queue.unwrap().settings()
        };
        assert_eq!(settings_of("before"), older);
        queues.set(Some(&newest), FxHashSet::default());
        assert_eq!(settings_of("before"), newest);
        assert_eq!(settings_of("after"), newest);
    }

    #[test]
    fn while_no_prefill_worker_can_requests_wait_for_decode_workers_that_compute_alone() {
        let (settings, now) = (Settings::default(), observe::now());
        for (connector, before, after) in [
            (Connector::Nixl, (1, true, true), (2, false, true)),
            // Its decode workers compute no prompts.
            (Connector::Sglang, (1, false, true), (0, false, false)),
        ] {
            let fleet = registry(&[]);
            let roles = [
                ("p", Role::Prefill),
                ("d", Role::Decode),
                ("e", Role::Decode),
            ];
            let members = roles.map(|(name, role)| Member {
                role,
                ..member(name)
            });
            fleet.set_members("static", members.into());
            bring_up(&fleet, "m");
            let metrics = MetricsRegistry::default();
            let queues = Queues::new(fleet.clone(), Some(connector), &metrics);
            let models = [Model::from("m")];
            let group = fleet.snapshot().models[&models[0]].clone();
            let counted = || {
                let rooms = queues.rooms(&models, &settings, &Promised::default(), now);
                let can_take = queues.workers_of(&group, now).can_take(now);
                (rooms.room.workers, rooms.room.others_have_room, can_take)
            };
            assert_eq!(counted(), before, "{connector}");
            let prefill = &group.prefill_workers()[0];
            while !prefill.kv_transfer_breaker.on_failure(now) {}
            assert_eq!(counted(), after, "{connector}");
        }
    }
}
