//! The task that releases waiting requests when workers have room, and refuses those whose time is over.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Queues;
use super::room::{Rooms, Workers};
use super::shared_queue::{Gone, Promises, Release, SharedQueue, Waiter, WaitsFor};
use crate::fleet::load::LoadShare;
use crate::fleet::waiting::WaitingByOwner;
use crate::fleet::{Snapshot, Worker};
use crate::http::drain::Tasks;
use crate::observe;
use crate::queue::{Look, PASSED_OVER_MAX, Settings};
use crate::relay::choose::promised::Promised;

/// While requests wait, workers are looked at this often even if nothing reports that one has less to compute: other
/// replicas' requests and circuit breakers report nothing.
const TICK: Duration = Duration::from_millis(10);
/// How often who stopped computing is looked for.
const STALL_TICK: Duration = Duration::from_millis(100);

/// So many waiting requests are looked at each time, in their order, whatever is known of them. Behind these, who was
/// seen to wait for a worker that is still full is passed over.
const LOOKED_AT_IN_ORDER: usize = 16;
/// For how long a request is passed over. Within this time the looks of each [`TICK`] come around at the first
/// [`PASSED_OVER_MAX`].
const PASSED_OVER_FOR: Duration = Duration::from_secs(1);
/// The same for those behind them. Ten times a second they are reached, and 16 looks are left, of which the first ones
/// take 5: within 71 s these come around at the 8,192 that are passed over at most.
const PASSED_OVER_FAR_FOR: Duration = Duration::from_secs(90);

/// When a waiting request is looked at.
#[derive(Clone, Copy)]
struct Looking {
    now: Instant,
    /// What its target leaves of time until its first token.
    time_left: Option<Duration>,
}

impl Queues {
    /// Runs until the drain begins and no request waits any more.
    pub async fn dispatch(self: Arc<Self>, tasks: Tasks) {
        let freed = self.fleet.freed().clone();
        let mut looked = observe::now();
        loop {
            let is_idle = freed.waiting() == 0;
            if is_idle {
                // Whoever waited when workers were last looked at has left.
                self.fleet.waiting().set_own(WaitingByOwner::default());
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
                self.stalled.lock().clear();
                continue;
            }
            if now.saturating_duration_since(looked) >= STALL_TICK {
                looked = now;
                self.stalled.lock().update(&self.fleet.snapshot(), now);
            }
            self.release(now);
        }
    }

    /// Releases what there is room for.
    fn release(&self, now: Instant) {
        self.renew_sharing(now);
        let queues = self.by_name.load();
        let settings = self.settings.load();
        let mut promised = self.granted.promised().with_peers(self.waiting_at_peers());
        for queue in queues.values().filter(|queue| queue.waiting() > 0) {
            let gone = match settings.as_ref() {
                Some(settings) => self.advance(queue, settings, &mut promised, now),
                // The queue was turned off.
                None => queue.release_all(now),
            };
            for gone in gone {
                self.on_left(&gone);
                gone.wake(&self.granted, self.fleet.freed());
            }
        }
        self.fleet.waiting().set_own(promised.waiting());
        self.granted.set_last(promised);
    }

    /// Each waiting request, in its order, is promised to the worker where it costs the least behind those that were promised
    /// before. It leaves if that worker has room and nobody before it waits for it. Promises are made anew each time, so a
    /// worker that becomes free gets what is best there; only those who stand behind many others and wait for a full
    /// worker keep theirs for a while.
    fn advance(
        &self,
        queue: &SharedQueue,
        settings: &Settings,
        promised: &mut Promised,
        now: Instant,
    ) -> Vec<Gone> {
        let snapshot = self.fleet.snapshot();
        let mut rooms = self.rooms(&queue.models(), settings, promised, now);
        let (room, computed) = (rooms.room, rooms.computed_tokens);
        // Where decode workers alone have room, those that wait for prefill workers need no look each time.
        let in_order = if room.is_full { 0 } else { LOOKED_AT_IN_ORDER };
        let (mut looked, mut passed_over) = (0, 0);
        queue.advance(now, room, computed, |waiter, time_left| {
            if rooms.is_full() {
                return (Look::Full, None);
            }
            // The looks come around seldom at those far behind: these wait on for their worker longer.
            let max_age = if passed_over < PASSED_OVER_MAX {
                PASSED_OVER_FOR
            } else {
                PASSED_OVER_FAR_FOR
            };
            if looked >= in_order && pass_over(waiter, &rooms, promised, now, max_age) {
                passed_over += 1;
                return (Look::PassOver, None);
            }
            looked += 1;
            let looking = Looking { now, time_left };
            self.look(&snapshot, waiter, settings, &mut rooms, promised, looking)
        })
    }

    fn look(
        &self,
        snapshot: &Snapshot,
        waiter: &Waiter,
        settings: &Settings,
        rooms: &mut Rooms,
        promised: &mut Promised,
        Looking { now, time_left }: Looking,
    ) -> (Look, Option<Release>) {
        let Some(group) = snapshot.models.get(&waiter.model) else {
            return (Look::Wait, None);
        };
        let workers = self.workers_of(group, now);
        let placed = match &waiter.placing {
            Some(placing) => placing(now, promised, rooms.stalled(&waiter.model)),
            // It has to be planned first, which it does once a worker has room.
            None => return look_unplanned(workers, waiter, settings, rooms, promised, now),
        };
        let Some(placed) = placed else {
            // None of its workers takes it, for what it is: it finds out why. If none takes anything, it waits for one.
            let look = if workers.can_take(now) {
                Look::Send
            } else {
                Look::Wait
            };
            return (look, None);
        };
        let worker = placed.computes();
        let is_sent = rooms.is_open(worker, settings, promised);
        let first_token = placed.first_token();
        if is_sent && time_left.is_some_and(|left| first_token > left) {
            return (Look::TooLate(first_token), None);
        }
        if is_sent {
            for (owner, promise) in &placed.promises {
                promised.add(*owner, *promise);
            }
            rooms.on_promised(worker, settings, promised);
            return (Look::Send, Some(placed.into()));
        }
        promised.add_waiting(&placed.promises);
        *waiter.waits_for.borrow_mut() = Some(WaitsFor {
            at: now,
            worker: worker.id,
            promises: placed.promises,
        });
        (Look::Wait, None)
    }
}

/// Passes a request over that was looked at within `max_age` and waits for a worker that is still full: its promises
/// are made again. False if the request is to be looked at.
fn pass_over(
    waiter: &Waiter,
    rooms: &Rooms,
    promised: &mut Promised,
    now: Instant,
    max_age: Duration,
) -> bool {
    let seen = waiter.waits_for.borrow();
    let is_current = |waits_for: &&WaitsFor| {
        let age = now.saturating_duration_since(waits_for.at);
        age < max_age && rooms.is_still_full(waits_for.worker, &waiter.model)
    };
    let Some(waits_for) = seen.as_ref().filter(is_current) else {
        return false;
    };
    promised.add_waiting(&waits_for.promises);
    true
}

/// Looks at a request that is planned only when it is released. So that no more of these are released than there is
/// room for, its prompt is promised to the worker with room, or else to any, that has the least to compute.
fn look_unplanned(
    workers: Workers<'_>,
    waiter: &Waiter,
    settings: &Settings,
    rooms: &mut Rooms,
    promised: &mut Promised,
    now: Instant,
) -> (Look, Option<Release>) {
    let by_room = |worker: &Worker| {
        let queued = worker.load.queued_tokens() + promised.of(worker.id).all.queued_tokens;
        (!rooms.is_open(worker, settings, promised), queued)
    };
    let Some(worker) = workers.usable(now).min_by_key(|worker| by_room(worker)) else {
        return (Look::Wait, None);
    };
    let tokens = u32::try_from(waiter.tokens).unwrap_or(u32::MAX);
    let promise = LoadShare::of_request(tokens, tokens);
    let promises = Promises::from_iter([(worker.id, promise)]);
    if !rooms.is_open(worker, settings, promised) {
        promised.add_waiting(&promises);
        *waiter.waits_for.borrow_mut() = Some(WaitsFor {
            at: now,
            worker: worker.id,
            promises,
        });
        return (Look::Wait, None);
    }
    promised.add(worker.id, promise);
    rooms.on_promised(worker, settings, promised);
    let release = Release {
        promises,
        chosen: None,
    };
    (Look::Send, Some(release))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::Group;
    use crate::fleet::in_flight::InFlight;
    use crate::fleet::registry::tests::{bring_up, registry};
    use crate::ids::{ClientKey, Model, WorkerIndex};
    use crate::observe::metrics::Registry as MetricsRegistry;
    use crate::queue::{Request, Room};
    use crate::relay::choose::chosen::{self, Split};
    use crate::relay::wait::shared_queue::{Placed, Planned};
    use crate::routing::{Decision, Expected, Reason};

    fn placed(group: &Arc<Group>, index: usize) -> Placed {
        let decision = Decision {
            index: WorkerIndex::new(index),
            rank: None,
            reason: Reason::Cold,
            cached_tokens: 0,
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

    /// How many requests are released while the first of two workers is full and the second one is idle. So many wait
    /// for the first one. The last one behind them was seen to wait for the worker `seen`, so long ago, and would be
    /// sent to the second one now.
    fn released(before: usize, seen: usize, age: Duration) -> usize {
        let fleet = registry(&["a", "b"]);
        bring_up(&fleet, "m");
        let queues = Queues::new(fleet.clone(), None, &MetricsRegistry::default());
        let settings = Arc::new(Settings {
            max_worker_queued_tokens: 1_000,
            ..Settings::default()
        });
        let model = Model::from("m");
        let group = fleet.snapshot().models[&model].clone();
        let _computing = InFlight::new(group.workers[0].clone(), 1_000, 0);
        let queue = queues.of(&model, &settings).unwrap();
        let start = observe::now();
        let now = start + age;
        let room = Room {
            workers: 2,
            ..Room::default()
        };
        let request = Request {
            priority: 0,
            client: ClientKey(1),
            tokens: 10,
            compute: Duration::ZERO,
            bytes: 10,
            received: now,
            entered: now,
            ttft_target: None,
            is_background: false,
            deadline: now + Duration::from_secs(60),
            has_room: false,
        };
        let enter = |at: Instant, seen: usize, best: usize| {
            let waits_for = WaitsFor {
                at,
                worker: group.workers[seen].id,
                promises: placed(&group, seen).promises,
            };
            let group = group.clone();
            let planned = Planned {
                placing: Box::new(move |_, _, _| Some(placed(&group, best))),
                waits_for: Some(waits_for),
            };
            let mut planned = Some(planned);
            let entered = queue.enter(fleet.freed(), now, room, request, &model, &mut planned);
            let (ticket, _) = entered.unwrap().unwrap();
            ticket
        };
        let _first: Vec<_> = (0..before).map(|_| enter(now, 0, 0)).collect();
        let _last = enter(start, seen, 1);
        let gone = queues.advance(&queue, &settings, &mut Promised::default(), now);
        gone.len()
    }

    #[test]
    fn those_who_chose_a_full_worker_before_they_entered_keep_nobody_from_an_idle_one() {
        assert_eq!(released(100, 1, Duration::ZERO), 1);
    }

    #[test]
    fn whoever_is_passed_over_is_looked_at_again_however_far_behind() {
        let far = LOOKED_AT_IN_ORDER + PASSED_OVER_MAX;
        for (before, after) in [(far - 1, PASSED_OVER_FOR), (far, PASSED_OVER_FAR_FOR)] {
            let sooner = after - Duration::from_millis(1);
            assert_eq!(released(before, 0, sooner), 0, "{before}");
            assert_eq!(released(before, 0, after), 1, "{before}");
        }
    }
}
