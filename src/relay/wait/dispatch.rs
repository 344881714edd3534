//! The task that releases waiting requests when workers have room, and refuses those whose time is over.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustc_hash::FxHashSet;

use super::Queues;
use super::grant::{Promises, Release};
use super::room::{Rooms, Workers};
use super::shared_queue::{Behind, Gone, Looked, SharedQueue, Waiter, WaitsFor};
use crate::fleet::load::LoadShare;
use crate::fleet::waiting::{DueTime, WaitingByOwner};
use crate::fleet::{Snapshot, Worker, with_different_members};
use crate::http::drain::Tasks;
use crate::ids::WorkerId;
use crate::observe;
use crate::queue::{
    InLine, LOOKED_AT_IN_ORDER, LetFirst, Look, Outcome, PASSED_OVER_FOR, Settings, Stretch,
    Timing, Turn,
};
use crate::relay::choose::chosen;
use crate::relay::choose::promised::Promised;

/// While requests wait, workers are looked at this often even if nothing reports that one has less to compute: circuit
/// breakers report nothing, and other replicas' reports wake nobody if they come too soon after each other.
const TICK: Duration = Duration::from_millis(10);
/// How often who stopped computing is looked for.
const STALL_TICK: Duration = Duration::from_millis(100);

/// For how long one of those behind the first 512 is passed over. 16 looks are left for each tick, of which the first
/// ones take 5: within this time they come around at 99,000.
const PASSED_OVER_BEHIND_FOR: Duration = Duration::from_secs(90);

/// After this time a walk over those behind the first ones begins anew if a worker has room that one of those it has passed
/// waits for. 512 are passed every 10 ms: of fewer than 100,000 it has come to the end by then, or looks at many of them again.
const WALK_BEHIND_MAX: Duration = Duration::from_secs(2);

impl Queues {
    /// Runs until the drain begins and no request waits any more.
    pub async fn dispatch(self: Arc<Self>, tasks: Tasks) {
        let freed = self.fleet.freed().clone();
        let mut looked = observe::now();
        loop {
            let is_idle = freed.waiting() == 0;
            if is_idle {
                self.forget_waiting();
            }
            if is_idle && tasks.is_stopping() {
                self.begin_drain();
                // A request may enter just now.
                tokio::time::sleep(TICK).await;
                if freed.waiting() == 0 {
                    return;
                }
            }
            tokio::select! {
                () = freed.notified() => {}
                () = tokio::time::sleep(TICK), if !is_idle => {}
                () = tasks.stopped(), if !tasks.is_stopping() => {}
            }
            let now = observe::now();
            if freed.waiting() == 0 {
                self.stalled.write().clear();
                continue;
            }
            let passed = now.saturating_duration_since(looked);
            if passed >= STALL_TICK {
                looked = now;
                let snapshot = self.fleet.snapshot();
                let mut stalled = self.stalled.write();
                stalled.update_after(passed, &snapshot, now);
            }
            self.release(now);
        }
    }

    /// Whoever waited when workers were last looked at has left. What waits in other replicas now is old when the next
    /// request waits here, so it is not kept.
    fn forget_waiting(&self) {
        self.fleet.waiting().set_own(WaitingByOwner::default());
        let released = self.granted.released.lock().clone();
        self.granted.last.store(Arc::new(released));
    }

    fn release(&self, now: Instant) {
        self.renew_sharing(now);
        let queues = self.by_name.load();
        let settings = self.settings.load();
        let mut waiting = Promised::default();
        for queue in queues.values().filter(|queue| queue.waiting() > 0) {
            // Held until those that leave count: whoever asks for it, to pass those that wait, reads the rooms then.
            let mut let_first = queue.let_first.lock();
            let gone = match settings.as_ref() {
                Some(settings) => self.advance(queue, &mut let_first, settings, now),
                // The queue was turned off.
                None => queue.end(now, Outcome::Released, |_| true),
            };
            for gone in gone {
                self.on_left(&gone);
                gone.wake(&self.granted, self.fleet.freed());
            }
            drop(let_first);
            queue.add_waiting(&mut waiting);
        }
        let mut own = waiting.waiting();
        if self.fleet.waiting().is_heard() {
            for queue in queues.values().filter(|queue| queue.waiting() > 0) {
                self.add_first(queue, &mut own, now);
            }
        }
        self.fleet.waiting().set_own(own);
        let mut promised = self.released();
        promised.add_all(&waiting);
        self.granted.last.store(Arc::new(promised));
    }

    /// Adds the first one in each line of a queue, without the lines of workers that get nothing from this replica now:
    /// nobody is to let their first ones go first.
    fn add_first(&self, queue: &SharedQueue, own: &mut WaitingByOwner, now: Instant) {
        let snapshot = self.fleet.snapshot();
        let mut usable = FxHashSet::default();
        let models = queue.models();
        let groups = models.iter().filter_map(|model| snapshot.models.get(model));
        for group in with_different_members(groups) {
            let prompts = self.workers_of(group, now).usable(now);
            let others = Self::decode_workers_of(group).usable(now);
            usable.extend(prompts.chain(others).map(|worker| worker.id));
        }
        queue.add_first(own, |worker| usable.contains(&worker));
    }

    /// Each waiting request, in its order, is promised to the worker where it costs the least behind those that were
    /// promised before. It leaves if that worker has room and nobody before it waits for it, here or as the first one
    /// in another replica's line. Promises are made anew each time, so a worker that becomes free gets what is best
    /// there; only those who stand behind many others and wait for a full worker keep theirs for a while.
    fn advance(
        &self,
        queue: &SharedQueue,
        let_first: &mut LetFirst,
        settings: &Settings,
        now: Instant,
    ) -> Vec<Gone> {
        let snapshot = self.fleet.snapshot();
        let promised = self.released();
        let mut models = queue.models();
        let rooms = self.rooms(&models, settings, &promised, now);
        models.retain(|model| !self.has_worker(model, now));
        queue.set_without_workers(now, models.into_iter().collect());
        let (room, computed) = (rooms.room, rooms.computed_tokens);
        let mut behind = queue.behind.lock();
        let peers = self.waiting_at_peers();
        let_first.begin_walk(|owner| first_of_peers(peers.as_deref(), owner));
        let mut walk = QueueWalk {
            queues: self,
            snapshot: &snapshot,
            settings,
            now,
            // Where decode workers alone have room, those that wait for prefill workers need no look each time.
            in_order: if room.is_full { 0 } else { LOOKED_AT_IN_ORDER },
            rooms,
            promised,
            behind: &mut behind,
            is_behind: false,
            peers,
            let_first,
        };
        queue.advance(now, room, computed, |waiter, timing, stretch, in_line| {
            walk.step(waiter, timing, stretch, in_line)
        })
    }
}

struct QueueWalk<'a> {
    queues: &'a Queues,
    snapshot: &'a Snapshot,
    settings: &'a Settings,
    now: Instant,
    /// So many more are looked at in their order.
    in_order: usize,
    rooms: Rooms,
    /// What workers are promised by those before.
    promised: Promised,
    /// The part of it that is kept for the walks to come.
    behind: &'a mut Behind,
    /// It has come to those behind the first ones.
    is_behind: bool,
    /// What waits in other replicas.
    peers: Option<Arc<WaitingByOwner>>,
    /// The first ones in their lines that are let go first.
    let_first: &'a mut LetFirst,
}

impl QueueWalk<'_> {
    /// `in_line`: the lines of the queue, without those that this walk has sent.
    fn step(
        &mut self,
        waiter: &Waiter,
        timing: Timing,
        stretch: Stretch,
        in_line: &InLine,
    ) -> Looked {
        if stretch != Stretch::First && !self.is_behind {
            if stretch == Stretch::Behind {
                *self.behind = Behind::default();
            }
            let began = *self.behind.began.get_or_insert(self.now);
            let is_long = self.now.saturating_duration_since(began) >= WALK_BEHIND_MAX;
            if is_long && self.rooms.has_room_for_one_of(&self.behind.promised) {
                // The next walk begins anew, and finds the one that waits for it.
                return Looked::Other(Look::Full);
            }
            self.is_behind = true;
            self.promised.add_all(&self.behind.promised);
            self.rooms.close_waited_for(&self.promised);
        }
        if self.rooms.is_full() {
            return Looked::Other(Look::Full);
        }
        if self.in_order > 0 {
            self.in_order -= 1;
        } else if self.pass_over(waiter, timing, in_line) {
            return Looked::Other(Look::PassOver);
        }
        self.look(waiter, timing, in_line)
    }

    /// Passes a request over that was looked at not long ago, if its worker is still full or its line lets another
    /// replica's first one go first: its promises are made again. False if the request is to be looked at.
    fn pass_over(&mut self, waiter: &Waiter, timing: Timing, in_line: &InLine) -> bool {
        let max_age = if self.is_behind {
            PASSED_OVER_BEHIND_FOR
        } else {
            PASSED_OVER_FOR
        };
        let seen = waiter.waits_for.borrow();
        let is_current =
            |waits_for: &&WaitsFor| self.now.saturating_duration_since(waits_for.at) < max_age;
        let Some(waits_for) = seen.as_ref().filter(is_current) else {
            return false;
        };
        if self.rooms.is_still_full(waits_for.worker, &waiter.model) {
            self.on_waiting(&waits_for.promises);
            return true;
        }
        let is_beside = self.waits_on_beside_line(waiter, waits_for, timing, in_line);
        if is_beside {
            self.on_beside_line(&waits_for.promises);
        }
        is_beside
    }

    /// Whether a request waits on beside the line where it was seen, behind one that this walk has looked at.
    fn waits_on_beside_line(
        &mut self,
        waiter: &Waiter,
        seen: &WaitsFor,
        timing: Timing,
        in_line: &InLine,
    ) -> bool {
        let stalled = self.rooms.stalled(&waiter.model);
        let is_open = self.rooms.is_open_at_all(seen.worker) && !stalled.contains(&seen.worker);
        // One without a plan lets nobody go first.
        let may_wait = is_open && waiter.placing.is_some();
        let Some((owner, _)) = seen.promises.first().filter(|_| may_wait) else {
            return false;
        };
        let firsts = first_of_peers(self.peers.as_deref(), *owner);
        self.let_first
            .waits_on(self.now, &waiter.patience, timing, *owner, in_line, firsts)
    }

    fn look(&mut self, waiter: &Waiter, timing: Timing, in_line: &InLine) -> Looked {
        let group = self.snapshot.models.get(&waiter.model);
        let workers = group.map(|group| self.queues.workers_of(group, self.now));
        let Some(workers) = workers.filter(|workers| workers.can_take(self.now)) else {
            // It waits for a worker to come, and keeps nobody from those that are there.
            return Looked::Other(Look::PassOver);
        };
        let Some(placing) = &waiter.placing else {
            // It has to be planned first, which it does once a worker has room.
            return self.look_unplanned(workers, waiter);
        };
        let stalled = self.rooms.stalled(&waiter.model);
        let Some(placed) = placing(self.now, &self.promised, stalled) else {
            // None of its workers takes it, for what it is: it finds out why.
            return Looked::Send(None);
        };
        let decision = chosen::computes(&placed.chosen);
        let (worker, rank) = (placed.group.worker(decision.index).clone(), decision.rank);
        if !self
            .rooms
            .is_open(&worker, rank, self.settings, &self.promised)
        {
            return self.wait_for(worker.id, placed.promises);
        }
        let owner = worker.id.cache_owner(rank);
        let firsts = first_of_peers(self.peers.as_deref(), owner);
        let turn = self
            .let_first
            .turn(self.now, &waiter.patience, timing, owner, in_line, firsts);
        match turn {
            Turn::Next => {}
            Turn::Overtakes => {
                let overtakes = &self.queues.metrics.overtakes;
                overtakes.with_label_values(&[&*waiter.model]).inc();
            }
            Turn::Waits => {
                self.on_beside_line(&placed.promises);
                return self.waits_for(worker.id, placed.promises);
            }
        }
        let seconds = chosen::first_token(&placed.chosen);
        let first_token = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
        if timing.time_left.is_some_and(|left| first_token > left) {
            return Looked::Other(Look::TooLate(first_token));
        }
        let release = Release {
            promises: placed.promises,
            chosen: Some((placed.group, placed.chosen)),
        };
        self.release(&worker, release)
    }

    /// Looks at a request that is planned only when it is released. So that no more of these are released than there is
    /// room for, its prompt is promised to the worker with room, or else to any, that has the least to compute. If none
    /// has room, it waits in the line of that one. It lets none of another replica go first: which worker it goes to is
    /// known only with its plan, and then it does not wait again.
    fn look_unplanned(&mut self, workers: Workers<'_>, waiter: &Waiter) -> Looked {
        let stalled = self.rooms.stalled(&waiter.model);
        let working = workers.usable(self.now);
        let working = working.filter(|worker| !stalled.contains(&worker.id));
        let is_open = |worker: &Worker| {
            let rooms = &self.rooms;
            !self.let_first.is_waited_for(worker.id)
                && rooms.is_open(worker, None, self.settings, &self.promised)
        };
        let by_room = |worker: &&Arc<Worker>| {
            let promised = self.promised.of(worker.id).all.queued_tokens;
            (!is_open(worker), worker.load.queued_tokens() + promised)
        };
        let Some(worker) = working.min_by_key(by_room) else {
            // All of them have stopped working: it is sent as without a queue.
            return Looked::Send(None);
        };
        let tokens = u32::try_from(waiter.tokens).unwrap_or(u32::MAX);
        let promise = LoadShare::of_request(tokens, tokens);
        let promises = Promises::from_iter([(worker.id, promise)]);
        if !is_open(worker) {
            return self.wait_for(worker.id, promises);
        }
        let release = Release {
            promises,
            chosen: None,
        };
        self.release(worker, release)
    }

    /// Sends a request to a worker that has room for it.
    fn release(&mut self, worker: &Worker, release: Release) -> Looked {
        self.promised.add(&release.promises);
        self.rooms
            .on_promised(worker, self.settings, &self.promised);
        Looked::Send(Some(release))
    }

    fn wait_for(&mut self, worker: WorkerId, promises: Promises) -> Looked {
        self.on_waiting(&promises);
        self.waits_for(worker, promises)
    }

    /// It is in this worker's line from now on, or beside it.
    fn waits_for(&self, worker: WorkerId, promises: Promises) -> Looked {
        Looked::Wait(WaitsFor {
            at: self.now,
            worker,
            promises,
        })
    }

    /// Those that come now are behind a request that waits.
    fn on_waiting(&mut self, promises: &Promises) {
        self.promised.add_waiting(promises);
        if self.is_behind {
            self.behind.promised.add_waiting(promises);
        }
    }

    /// Those that come now are behind a request that waits beside its line.
    fn on_beside_line(&mut self, promises: &Promises) {
        self.promised.add_beside_line(promises);
        if self.is_behind {
            self.behind.promised.add_beside_line(promises);
        }
    }
}

/// The first ones in other replicas' lines for a worker, or for one of its dp ranks.
fn first_of_peers(peers: Option<&WaitingByOwner>, owner: WorkerId) -> &[DueTime] {
    peers.map_or(&[][..], |peers| peers.first(owner))
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::Relaxed;
    use std::task::{Context, Poll, Waker};

    use super::*;
    use crate::fleet::Group;
    use crate::fleet::health::Health;
    use crate::fleet::in_flight::InFlight;
    use crate::fleet::registry::tests::{bring_up, facts, registry};
    use crate::ids::{ClientKey, Model, WorkerIndex};
    use crate::observe::metrics::Registry as MetricsRegistry;
    use crate::queue::{PASSED_OVER_MAX, Request, Room};
    use crate::relay::choose::chosen::Split;
    use crate::relay::wait::finds_room;
    use crate::relay::wait::shared_queue::{Placed, Planned, Ticket};
    use crate::relay::wait::sharing::Sharing;
    use crate::routing::{Decision, Expected, Reason};

    fn placed(group: &Arc<Group>, index: usize) -> Placed {
        let decision = Decision {
            index: WorkerIndex::new(index),
            rank: None,
            reason: Reason::Cold,
            cached_tokens: 0,
            shared: None,
            new_tokens: 10,
            cost: 0.0,
            expected: Expected::default(),
        };
        let chosen = (decision, Split::Off);
        Placed {
            group: group.clone(),
            chosen,
            promises: chosen::promises(10, group, &chosen),
        }
    }

    /// Requests that wait for three workers, of which the first two are full and the third is idle.
    struct Rig {
        queues: Arc<Queues>,
        group: Arc<Group>,
        queue: Arc<SharedQueue>,
        computing: Vec<InFlight>,
        waiting: Vec<Ticket>,
        now: Instant,
    }

    impl Rig {
        fn new() -> Self {
            let fleet = registry(&["a", "b", "c"]);
            fleet.waiting().set_shared();
            bring_up(&fleet, "m");
            let queues = Queues::new(fleet.clone(), None, &MetricsRegistry::default());
            let settings = Arc::new(Settings {
                max_worker_queued_tokens: 1_000,
                // Less than circuit breakers stay open.
                no_worker_timeout: Duration::from_secs(1),
                ..Settings::default()
            });
            queues.set(Some(&settings), FxHashSet::default());
            let model = Model::from("m");
            let group = fleet.snapshot().models[&model].clone();
            let full = group.workers[..2].iter();
            Self {
                computing: full
                    .map(|worker| InFlight::new(worker.clone(), 1_000, 0))
                    .collect(),
                queue: queues.of(&model, &settings).unwrap(),
                queues,
                group,
                waiting: Vec::new(),
                now: observe::now() + PASSED_OVER_BEHIND_FOR,
            }
        }

        /// So many enter that were seen to wait for the worker `seen`, so long ago, and would be sent to `best` now.
        fn enter(&mut self, count: usize, seen: usize, age: Duration, best: usize) {
            for _ in 0..count {
                let group = self.group.clone();
                self.enter_one(Some(Planned {
                    waits_for: Some(WaitsFor {
                        at: self.now - age,
                        worker: group.workers[seen].id,
                        promises: placed(&group, seen).promises,
                    }),
                    placing: Box::new(move |_, _, _| Some(placed(&group, best))),
                }));
            }
        }

        fn enter_one(&mut self, planned: Option<Planned>) {
            self.enter_request(planned, |_| {});
        }

        fn enter_request(
            &mut self,
            mut planned: Option<Planned>,
            change: impl FnOnce(&mut Request),
        ) {
            let room = Room {
                workers: 3,
                ..Room::default()
            };
            // Its tokens are its number.
            let mut request = Request::for_tests(self.now, self.waiting.len() as u64);
            change(&mut request);
            let (freed, model) = (self.queues.fleet.freed(), &self.group.model);
            let entered = self
                .queue
                .enter(freed, self.now, room, request, model, &mut planned);
            self.waiting.push(entered.unwrap().unwrap().0);
        }

        /// One enters that would be sent to the idle worker.
        fn enter_for_idle(&mut self, change: impl FnOnce(&mut Request)) {
            let group = self.group.clone();
            let planned = Planned {
                waits_for: Some(WaitsFor {
                    at: self.now,
                    worker: group.workers[2].id,
                    promises: placed(&group, 2).promises,
                }),
                placing: Box::new(move |_, _, _| Some(placed(&group, 2))),
            };
            self.enter_request(Some(planned), change);
        }

        /// What one enters with that would be sent to this worker, where it promises so many tokens.
        fn planned(&self, index: usize, tokens: u32) -> Planned {
            let group = self.group.clone();
            let worker = group.workers[index].id;
            let promise = (worker, LoadShare::of_request(tokens, tokens));
            let promises = Promises::from_iter([promise]);
            Planned {
                waits_for: Some(WaitsFor {
                    at: self.now,
                    worker,
                    promises: promises.clone(),
                }),
                placing: Box::new(move |_, _, _| {
                    let promises = promises.clone();
                    Some(Placed {
                        promises,
                        ..placed(&group, index)
                    })
                }),
            }
        }

        /// The first one in another replica's line for the idle worker.
        fn set_peers_first(&self, priority: i32, at: Instant) {
            let mut peers = WaitingByOwner::default();
            peers.add_first(self.group.workers[2].id, DueTime { priority, at });
            self.queues.fleet.waiting().set_peers(peers);
        }

        /// The first worker, which serves another model, too.
        fn share_first(&self) -> (Arc<Worker>, Arc<Group>) {
            let (fleet, first) = (&self.queues.fleet, self.group.workers[0].clone());
            fleet.set_facts(first.id, facts(&["m", "n"]));
            let other = fleet.snapshot().models["n"].clone();
            (first, other)
        }

        /// The numbers of those who leave.
        fn advance(&mut self) -> Vec<u64> {
            let settings = self.queues.settings.load_full().unwrap();
            let mut let_first = self.queue.let_first.lock();
            let gone = self
                .queues
                .advance(&self.queue, &mut let_first, &settings, self.now);
            drop(let_first);
            self.now += TICK;
            gone.iter().map(|gone| gone.left.waker.tokens).collect()
        }
    }

    /// The queues of a fleet whose only worker is not up yet.
    fn without_workers() -> (Arc<Queues>, Arc<Settings>) {
        let queues = Queues::new(registry(&["a"]), None, &MetricsRegistry::default());
        let settings = Arc::new(Settings {
            no_worker_timeout: Duration::from_secs(60),
            ..Settings::default()
        });
        queues.set(Some(&settings), FxHashSet::default());
        (queues, settings)
    }

    /// The worker comes up. It serves another model, too, in whose queue those who wait for it are from now on.
    fn bring_up_with_another_model(queues: &Queues) {
        bring_up(&queues.fleet, "m");
        let worker = queues.fleet.snapshot().workers[0].worker.id;
        queues.fleet.set_facts(worker, facts(&["k", "m"]));
        let sharing = Sharing::new(&queues.fleet.snapshot());
        assert_eq!(*sharing.queue_of(&Model::from("m")), Model::from("k"));
    }

    #[test]
    fn a_request_that_waits_for_a_first_worker_has_no_target_in_another_queue_either() {
        let (queues, settings) = without_workers();
        let (now, model) = (observe::now(), Model::from("m"));
        // The target is over before the worker comes.
        let request = Request {
            ttft_target: Some(Duration::from_nanos(1)),
            ..Request::for_tests(now, 10)
        };
        let mut waiting = pin!(queues.wait(&settings, &model, request, None));
        let mut poll = || {
            let mut context = Context::from_waker(Waker::noop());
            waiting.as_mut().poll(&mut context)
        };
        assert!(poll().is_pending());
        queues.release(now);
        assert!(poll().is_pending());
        bring_up_with_another_model(&queues);
        queues.release(now);
        assert!(poll().is_pending());
        queues.release(now + TICK);
        // It may have to wait once more, and has no target then either.
        assert!(matches!(poll(), Poll::Ready(Ok(grant)) if grant.has_lost_target));
    }

    #[test]
    fn a_request_whose_workers_were_gone_for_a_while_has_no_target_in_another_queue_either() {
        let (queues, settings) = without_workers();
        bring_up(&queues.fleet, "m");
        let worker = queues.fleet.snapshot().workers[0].worker.clone();
        let full = InFlight::new(worker.clone(), 10_000, 0);
        let (now, model) = (observe::now(), Model::from("m"));
        let request = Request {
            ttft_target: Some(Duration::from_secs(30)),
            ..Request::for_tests(now, 10)
        };
        let mut waiting = pin!(queues.wait(&settings, &model, request, None));
        let mut poll = || {
            let mut context = Context::from_waker(Waker::noop());
            waiting.as_mut().poll(&mut context)
        };
        assert!(poll().is_pending());
        queues.fleet.set_health(worker.id, Health::Down);
        queues.release(now);
        assert!(poll().is_pending());
        bring_up_with_another_model(&queues);
        queues.release(now);
        assert!(poll().is_pending());
        // The worker is still full.
        queues.release(now + Duration::from_secs(31));
        assert!(poll().is_pending());
        drop(full);
        queues.release(now + Duration::from_secs(32));
        assert!(matches!(poll(), Poll::Ready(Ok(grant)) if grant.has_lost_target));
    }

    #[test]
    fn the_time_for_a_first_worker_is_none_of_the_time_for_room_in_another_queue() {
        let fleet = registry(&["a"]);
        bring_up(&fleet, "k");
        let queues = Queues::new(fleet.clone(), None, &MetricsRegistry::default());
        let settings = Arc::new(Settings {
            max_wait: Duration::from_secs(3),
            no_worker_timeout: Duration::from_secs(60),
            ..Settings::default()
        });
        queues.set(Some(&settings), FxHashSet::default());
        let worker = fleet.snapshot().workers[0].worker.clone();
        let _full = InFlight::new(worker.clone(), 10_000, 0);
        let (other, model) = (Model::from("k"), Model::from("m"));
        // The other model's requests have waited for a while, too.
        let now = observe::now();
        let began = now - Duration::from_secs(4);
        let queue = queues.of(&other, &settings).unwrap();
        let room = Room {
            workers: 1,
            is_full: true,
            ..Room::default()
        };
        let (freed, request) = (fleet.freed(), Request::for_tests(began, 10));
        let entered = queue.enter(freed, began, room, request, &other, &mut None);
        let _other = entered.unwrap().unwrap();
        let mut waiting = pin!(queues.wait(&settings, &model, request, None));
        let mut poll = || {
            let mut context = Context::from_waker(Waker::noop());
            waiting.as_mut().poll(&mut context)
        };
        assert!(poll().is_pending());
        fleet.set_facts(worker.id, facts(&["k", "m"]));
        queues.release(now);
        assert!(poll().is_pending());
        queues.release(now);
        assert!(poll().is_pending());
        queues.release(now + Duration::from_secs(60));
        assert!(matches!(poll(), Poll::Ready(Err(_))));
        assert_eq!((queue.waiting(), fleet.freed().waiting()), (0, 0));
    }

    #[test]
    fn a_model_whose_workers_are_all_out_waits_for_one_as_long_as_it_may_beside_others() {
        let mut rig = Rig::new();
        let (first, other) = rig.share_first();
        while !first.breaker.on_failure(rig.now) {}
        rig.enter(1, 1, Duration::ZERO, 1);
        rig.group = other;
        rig.enter(1, 0, Duration::ZERO, 0);
        assert!(rig.advance().is_empty());
        rig.now += Duration::from_millis(500);
        // This one begins to wait now.
        rig.enter(1, 0, Duration::ZERO, 0);
        assert!(rig.advance().is_empty());
        rig.now += Duration::from_millis(500);
        assert_eq!(rig.advance(), [1]);
        rig.now += Duration::from_millis(500);
        assert_eq!(rig.advance(), [2]);
        assert_eq!(rig.queue.waiting(), 1);
    }

    /// Else the time would begin anew with each trial.
    #[test]
    fn a_worker_that_may_get_a_trial_ends_no_wait_for_a_worker() {
        let mut rig = Rig::new();
        let (first, other) = rig.share_first();
        first.breaker.set(1, Duration::from_millis(400));
        assert!(first.breaker.on_failure(rig.now));
        rig.group = other;
        rig.enter(1, 0, Duration::ZERO, 0);
        assert!(rig.advance().is_empty());
        rig.now += Duration::from_millis(490);
        assert!(first.breaker.may_admit(rig.now));
        assert!(rig.advance().is_empty());
        rig.now += Duration::from_millis(490);
        assert_eq!(rig.advance(), [0]);
    }

    #[test]
    fn those_that_wait_are_not_refused_because_their_engines_ask_for_a_pause() {
        let mut rig = Rig::new();
        let until = rig.now + Duration::from_secs(10);
        rig.enter(1, 0, Duration::ZERO, 2);
        for worker in &rig.group.workers {
            worker.breaker.pause(until);
        }
        assert!(rig.advance().is_empty());
        rig.now += Duration::from_secs(5);
        assert!(rig.advance().is_empty());
        rig.now = until;
        assert_eq!(rig.advance(), [0]);
    }

    /// Else the others would go to full workers, or be refused after some such waits.
    #[test]
    fn one_of_those_that_wait_is_the_trial_of_a_worker_and_the_others_wait_on() {
        let mut rig = Rig::new();
        let idle = rig.group.workers[2].clone();
        idle.breaker.set(1, Duration::from_secs(5));
        assert!(idle.breaker.on_failure(rig.now));
        rig.now += Duration::from_secs(5);
        for _ in 0..3 {
            rig.enter_for_idle(|_| {});
        }
        assert_eq!(rig.advance(), [0]);
        // It was released, and its worker's circuit breaker has not admitted it yet.
        let promises = [(idle.id, LoadShare::of_request(10, 10))];
        rig.queues.granted.released.lock().add(&promises);
        assert!(rig.advance().is_empty());
        rig.queues.granted.released.lock().remove(&promises);
        assert!(idle.breaker.admit(rig.now));
        assert!(rig.advance().is_empty());
        assert!(idle.breaker.on_success(rig.now, true));
        assert_eq!(rig.advance(), [1, 2]);
    }

    #[test]
    fn a_request_that_moves_while_the_router_drains_is_sent_at_once() {
        let (queues, settings) = without_workers();
        let (now, model) = (observe::now(), Model::from("m"));
        let mut waiting = pin!(queues.wait(&settings, &model, Request::for_tests(now, 10), None));
        let mut poll = || {
            let mut context = Context::from_waker(Waker::noop());
            waiting.as_mut().poll(&mut context)
        };
        assert!(poll().is_pending());
        queues.begin_drain();
        // Whoever waits already waits on.
        queues.release(now);
        assert!(poll().is_pending());
        bring_up_with_another_model(&queues);
        queues.release(now);
        let granted = poll();
        assert!(matches!(granted, Poll::Ready(Ok(_))));
        assert_eq!(queues.fleet.freed().waiting(), 1);
        drop(granted);
        assert_eq!(queues.fleet.freed().waiting(), 0);
    }

    #[test]
    fn those_who_chose_a_full_worker_before_they_entered_keep_nobody_from_an_idle_one() {
        let mut rig = Rig::new();
        rig.enter(100, 0, Duration::ZERO, 0);
        rig.enter(1, 2, Duration::ZERO, 2);
        assert_eq!(rig.advance(), [100]);
    }

    #[test]
    fn a_request_lets_one_of_another_replica_go_first_that_is_of_its_class_and_due_earlier() {
        let ms = Duration::from_millis(1);
        let all = || vec![0_u64, 1];
        let now = observe::now() + PASSED_OVER_BEHIND_FOR;
        for (what, peer, has_room, target, expected) in [
            ("due earlier", (0, now - ms), false, None, vec![]),
            ("due at the same time", (0, now), false, None, all()),
            ("due later", (0, now + ms), false, None, all()),
            ("of a higher class", (1, now - ms), false, None, all()),
            ("of a lower class", (-1, now - ms), false, None, all()),
            ("found room", (0, now - ms), true, None, all()),
            ("has a target", (0, now - ms), false, Some(100 * ms), all()),
        ] {
            let mut rig = Rig::new();
            rig.now = now;
            rig.set_peers_first(peer.0, peer.1);
            for _ in 0..2 {
                rig.enter_for_idle(|request| {
                    request.has_room = has_room;
                    request.ttft_target = target;
                });
            }
            assert_eq!(rig.advance(), expected, "{what}");
        }
    }

    #[test]
    fn the_replica_whose_line_begins_the_earliest_is_next_by_whatever_tenants_turn_it_is() {
        let ms = Duration::from_millis(1);
        for (second, expected) in [(-2, vec![0_u64, 1]), (0, vec![])] {
            let mut rig = Rig::new();
            let now = rig.now;
            rig.set_peers_first(0, now - ms);
            rig.enter_for_idle(|_| {});
            rig.enter_for_idle(|request| {
                request.client = ClientKey(2);
                if second < 0 {
                    request.received = now - 2 * ms;
                }
            });
            assert_eq!(rig.advance(), expected, "{second}");
        }
    }

    #[test]
    fn a_request_lets_others_go_first_for_a_second_at_most_and_is_counted_then() {
        let mut rig = Rig::new();
        let start = rig.now;
        rig.set_peers_first(0, start - Duration::from_secs(60));
        rig.enter_for_idle(|_| {});
        let left = [0, 990, 1_000].map(|ms| {
            rig.now = start + Duration::from_millis(ms);
            rig.advance()
        });
        assert_eq!(left, [vec![], vec![], vec![0]]);
        let overtakes = &rig.queues.metrics.overtakes;
        assert_eq!(overtakes.with_label_values(&["m"]).get(), 1);
    }

    #[test]
    fn behind_a_request_that_lets_another_go_first_only_those_go_that_let_nobody() {
        let ms = Duration::from_millis(1);
        let mut rig = Rig::new();
        rig.set_peers_first(0, rig.now - ms);
        rig.enter_for_idle(|_| {});
        rig.enter_for_idle(|request| request.ttft_target = Some(100 * ms));
        // No other replica has one of its class.
        rig.enter_for_idle(|request| request.priority = -1);
        rig.enter_for_idle(|request| request.has_room = true);
        let mut left = rig.advance();
        left.sort_unstable();
        assert_eq!(left, [1, 3]);
        // A plan makes no difference.
        let mut rig = Rig::new();
        rig.set_peers_first(0, rig.now - ms);
        rig.enter_for_idle(|_| {});
        rig.enter_one(None);
        assert!(rig.advance().is_empty());
    }

    #[test]
    fn one_with_a_target_finds_room_beside_those_that_let_another_go_first() {
        let ms = Duration::from_millis(1);
        let mut rig = Rig::new();
        rig.set_peers_first(0, rig.now - ms);
        rig.enter_for_idle(|_| {});
        assert!(rig.advance().is_empty());
        let settings = rig.queues.settings.load_full().unwrap();
        let models = [rig.group.model.clone()];
        let rooms = rig
            .queues
            .rooms(&models, &settings, &Promised::default(), rig.now);
        let finds_room = |index: usize, change: fn(&mut Request)| {
            let mut request = Request::for_tests(rig.now, 10);
            change(&mut request);
            let planned = rig.planned(index, 10);
            let is_passed_by = rig.queue.is_passed_by(&settings, &request, &planned);
            finds_room(&rooms, Some(&planned), is_passed_by)
        };
        let target = |request: &mut Request| request.ttft_target = Some(Duration::from_secs(1));
        assert!(finds_room(2, target));
        assert!(!finds_room(2, |_| {}));
        // The worker is full.
        assert!(!finds_room(0, target));
    }

    #[test]
    fn one_with_a_target_finds_no_room_that_another_one_was_given_just_now() {
        let mut rig = Rig::new();
        rig.set_peers_first(1, rig.now - Duration::from_millis(1));
        let target = |request: &mut Request| request.ttft_target = Some(Duration::from_secs(1));
        rig.enter_for_idle(|request| request.priority = 1);
        let large = rig.planned(2, 1_000);
        rig.enter_request(Some(large), target);
        rig.queues.release(rig.now);
        // The first one waits, and the other one is on its way.
        assert_eq!(rig.queue.waiting(), 1);
        let settings = rig.queues.settings.load_full().unwrap();
        let (models, released) = ([rig.group.model.clone()], rig.queues.released());
        let rooms = rig.queues.rooms(&models, &settings, &released, rig.now);
        let mut request = Request::for_tests(rig.now, 10);
        target(&mut request);
        let planned = rig.planned(2, 10);
        assert!(rig.queue.is_passed_by(&settings, &request, &planned));
        assert!(!finds_room(&rooms, Some(&planned), true));
    }

    #[test]
    fn all_requests_together_let_one_that_does_not_leave_go_first_for_a_second() {
        let mut rig = Rig::new();
        let start = rig.now;
        let ms = Duration::from_millis;
        rig.set_peers_first(0, start - ms(60_000));
        rig.enter_for_idle(|_| {});
        assert!(rig.advance().is_empty());
        rig.now = start + ms(500);
        rig.enter_for_idle(|_| {});
        assert!(rig.advance().is_empty());
        rig.now = start + ms(1_000);
        assert_eq!(rig.advance(), [0, 1]);
        // The next one there is another one.
        rig.set_peers_first(0, start - ms(50_000));
        rig.enter_for_idle(|_| {});
        assert!(rig.advance().is_empty());
    }

    #[test]
    fn many_that_let_another_go_first_keep_nobody_from_another_worker() {
        let mut rig = Rig::new();
        drop(rig.computing.remove(1));
        rig.set_peers_first(0, rig.now - Duration::from_millis(1));
        for _ in 0..100 {
            rig.enter_for_idle(|_| {});
        }
        rig.enter(1, 1, Duration::ZERO, 1);
        assert_eq!(rig.advance(), [100]);
    }

    #[test]
    fn whoever_waits_beside_a_line_is_in_the_line_of_no_other_worker_any_more() {
        let mut rig = Rig::new();
        rig.set_peers_first(0, rig.now - Duration::from_millis(1));
        // They were seen to wait for a full worker, and would be sent to the idle one now.
        rig.enter(10, 0, Duration::ZERO, 2);
        assert!(rig.advance().is_empty());
        let mut promised = Promised::default();
        rig.queue.add_waiting(&mut promised);
        let mut lines = WaitingByOwner::default();
        rig.queue.add_first(&mut lines, |_| true);
        let workers = [0, 2].map(|index: usize| rig.group.workers[index].id);
        let in_line = workers.map(|worker| promised.of(worker).in_line);
        let has_first = workers.map(|worker| !lines.first(worker).is_empty());
        assert_eq!((in_line, has_first), ([0, 10], [false, true]));
    }

    #[test]
    fn of_many_that_let_another_go_first_only_some_are_looked_at_each_time() {
        let mut rig = Rig::new();
        rig.set_peers_first(0, rig.now - Duration::from_millis(1));
        let looks = Arc::new(AtomicUsize::new(0));
        for _ in 0..2 * PASSED_OVER_MAX {
            let (group, looks) = (rig.group.clone(), looks.clone());
            let planned = Planned {
                waits_for: Some(WaitsFor {
                    at: rig.now,
                    worker: group.workers[2].id,
                    promises: placed(&group, 2).promises,
                }),
                placing: Box::new(move |_, _, _| {
                    looks.fetch_add(1, Relaxed);
                    Some(placed(&group, 2))
                }),
            };
            rig.enter_request(Some(planned), |_| {});
        }
        for _ in 0..4 {
            assert!(rig.advance().is_empty());
            let count = looks.swap(0, Relaxed);
            assert!((1..=32).contains(&count), "{count}");
        }
    }

    #[test]
    fn each_request_lets_all_that_come_to_another_replica_go_first_for_a_second_together() {
        let mut rig = Rig::new();
        let ms = Duration::from_millis;
        for number in 0..2_u64 {
            let start = rig.now;
            rig.enter_for_idle(|_| {});
            for at in (0..1_000).step_by(100) {
                rig.now = start + ms(at);
                rig.set_peers_first(0, start - ms(60_000 - at));
                assert!(rig.advance().is_empty());
            }
            rig.now = start + ms(1_000);
            rig.set_peers_first(0, start - ms(50_000));
            assert_eq!(rig.advance(), [number]);
        }
    }

    #[test]
    fn what_is_first_in_line_is_published_while_it_waits() {
        let mut rig = Rig::new();
        let first = rig.group.workers[0].id;
        let published = |rig: &Rig| {
            rig.queues.release(rig.now);
            let own = rig.queues.fleet.waiting().own();
            own.as_ref()
                .and_then(|own| own.first(first).first().copied())
        };
        assert_eq!(published(&rig), None);
        let now = rig.now;
        rig.enter(2, 0, Duration::ZERO, 0);
        // No other replica is there to hear of it.
        assert_eq!(published(&rig), None);
        rig.queues.fleet.waiting().set_heard(true);
        // All workers are full, so nobody is looked at.
        let full = InFlight::new(rig.group.workers[2].clone(), 1_000, 0);
        let due = DueTime {
            priority: 0,
            at: now,
        };
        assert_eq!(published(&rig), Some(due));
        drop(full);
        assert_eq!(published(&rig), Some(due));
        // This replica sends its worker nothing now.
        let worker = rig.group.workers[0].clone();
        while !worker.breaker.on_failure(rig.now) {}
        assert_eq!(published(&rig), None);
        rig.waiting.clear();
        rig.queues.forget_waiting();
        assert_eq!(published(&rig), None);
    }

    #[test]
    fn waiting_requests_give_memory_up_to_a_higher_class_and_none_if_all_of_it_is_too_little() {
        let mut rig = Rig::new();
        rig.enter(3, 0, Duration::ZERO, 0);
        let give_up = |bytes, all_or_none| rig.queues.give_up(i32::MAX, bytes, all_or_none);
        assert_eq!(give_up(31, true), 0);
        assert_eq!(rig.queue.waiting(), 3);
        assert_eq!(give_up(15, true), 20);
        assert_eq!(give_up(31, false), 10);
        assert_eq!(rig.queue.waiting(), 0);
    }

    #[test]
    fn those_whose_workers_are_all_out_keep_nobody_from_an_idle_one() {
        let mut rig = Rig::new();
        let (first, other) = rig.share_first();
        while !first.breaker.on_failure(rig.now) {}
        let own = std::mem::replace(&mut rig.group, other);
        rig.enter(100, 0, Duration::ZERO, 0);
        rig.group = own;
        rig.enter(1, 2, Duration::ZERO, 2);
        assert_eq!(rig.advance(), [100]);
    }

    #[test]
    fn a_request_without_a_plan_is_sent_if_its_workers_have_stopped_working() {
        let mut rig = Rig::new();
        // Among the workers of this one are others.
        rig.enter(1, 0, Duration::ZERO, 0);
        rig.group = rig.share_first().1;
        rig.enter_one(None);
        assert!(rig.advance().is_empty());
        let stale_after = Settings::default().stale_after;
        for now in [rig.now, rig.now + stale_after] {
            let snapshot = rig.queues.fleet.snapshot();
            rig.queues.stalled.write().update(&snapshot, now);
            rig.now = now;
        }
        assert_eq!(rig.advance(), [1]);
    }

    #[test]
    fn whoever_is_passed_over_is_looked_at_again() {
        let far = LOOKED_AT_IN_ORDER + PASSED_OVER_MAX;
        for (before, after) in [(far - 1, PASSED_OVER_FOR), (far, PASSED_OVER_BEHIND_FOR)] {
            let sooner = after - Duration::from_millis(1);
            for (age, expected) in [(sooner, vec![]), (after, vec![before as u64])] {
                let mut rig = Rig::new();
                rig.enter(before, 0, Duration::ZERO, 0);
                rig.enter(1, 0, age, 2);
                assert_eq!(rig.advance(), expected, "{before}");
            }
        }
    }

    #[test]
    fn whoever_waits_far_behind_gets_an_idle_worker_after_a_few_walks() {
        let mut rig = Rig::new();
        rig.enter(20 * PASSED_OVER_MAX, 0, Duration::ZERO, 0);
        rig.enter(1, 0, PASSED_OVER_BEHIND_FOR, 2);
        let left: Vec<u64> = (0..20).flat_map(|_| rig.advance()).collect();
        assert_eq!(left, [20 * PASSED_OVER_MAX as u64]);
    }

    #[test]
    fn of_those_behind_whom_a_walk_has_passed_the_first_gets_the_worker_that_has_room_then() {
        let mut rig = Rig::new();
        rig.enter(2 * PASSED_OVER_MAX, 0, Duration::ZERO, 0);
        rig.enter(2 * PASSED_OVER_MAX, 1, Duration::ZERO, 1);
        // The walk stops among those that wait for the second worker, which is full.
        for _ in 0..2 {
            assert!(rig.advance().is_empty());
        }
        rig.computing.truncate(1);
        let left = (0..4).map(|_| rig.advance()).find(|left| !left.is_empty());
        assert_eq!(left.unwrap()[0], 2 * PASSED_OVER_MAX as u64);
    }

    #[test]
    fn a_long_walk_begins_anew_for_a_worker_that_has_room_meanwhile() {
        let mut rig = Rig::new();
        rig.enter(2 * PASSED_OVER_MAX, 0, Duration::ZERO, 0);
        rig.enter(80 * PASSED_OVER_MAX, 1, Duration::ZERO, 1);
        for _ in 0..2 {
            assert!(rig.advance().is_empty());
        }
        rig.now += WALK_BEHIND_MAX;
        rig.computing.truncate(1);
        // The first ones are looked at again meanwhile. The walk would come to its end after 80.
        let left = (0..60).map(|_| rig.advance()).find(|left| !left.is_empty());
        assert_eq!(left.unwrap()[0], 2 * PASSED_OVER_MAX as u64);
    }

    #[test]
    fn whoever_left_before_the_next_one_waits_is_promised_nothing() {
        let mut rig = Rig::new();
        rig.enter(1, 0, Duration::ZERO, 0);
        let first = rig.group.workers[0].id;
        rig.queues.release(rig.now);
        let in_line = |rig: &Rig| {
            let promised = rig.queues.promised().unwrap_or_default();
            promised.of(first).in_line
        };
        assert_eq!(in_line(&rig), 1);
        rig.waiting.clear();
        rig.queues.forget_waiting();
        // Another request enters, and no worker was looked at since.
        rig.enter(1, 2, Duration::ZERO, 2);
        assert_eq!(in_line(&rig), 0);
    }

    #[test]
    fn the_first_request_that_waits_again_counts_what_waits_in_other_replicas_now() {
        let mut rig = Rig::new();
        let first = rig.group.workers[0].id;
        let set_peers = |rig: &Rig, requests: u32| {
            let share = LoadShare {
                requests,
                ..LoadShare::default()
            };
            let peers = [(first, share)].into_iter().filter(|_| requests > 0);
            rig.queues.fleet.waiting().set_peers(peers.collect());
        };
        let counted = |rig: &Rig| {
            let promised = rig.queues.promised().unwrap_or_default();
            promised.everywhere(first).requests
        };
        set_peers(&rig, 7);
        rig.queues.forget_waiting();
        set_peers(&rig, 3);
        assert_eq!(counted(&rig), 3);
        // No worker was looked at since.
        rig.enter(1, 2, Duration::ZERO, 2);
        assert_eq!(counted(&rig), 3);
        set_peers(&rig, 0);
        assert_eq!(counted(&rig), 0);
    }

    #[test]
    fn what_waits_is_published_as_a_whole_wherever_the_walk_is() {
        let mut rig = Rig::new();
        rig.enter(4 * PASSED_OVER_MAX, 0, Duration::ZERO, 0);
        let first = rig.group.workers[0].id;
        let published = |rig: &Rig| {
            rig.queues.release(rig.now);
            let own = rig.queues.fleet.waiting().own();
            let own = own.as_ref().and_then(|own| own.get(&first));
            let own = own.map(|waiting| waiting.requests);
            let last = rig.queues.granted.last.load().of(first).in_line;
            (own.unwrap_or_default(), last)
        };
        for count in [4, 4, 4, 4, 3, 3] {
            let count = count * PASSED_OVER_MAX;
            rig.waiting.truncate(count);
            rig.now += TICK;
            assert_eq!(published(&rig), (count as u32, count as u32));
        }
    }
}
