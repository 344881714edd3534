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
            // The looks come around too seldom at those far behind: these wait on for their worker while it is full.
            let max_age = if passed_over < PASSED_OVER_MAX {
                PASSED_OVER_FOR
            } else {
                Duration::MAX
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
            Some(placing) => placing(now, promised, &rooms.stalled),
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
        age < max_age && rooms.is_still_full(waits_for.worker)
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
