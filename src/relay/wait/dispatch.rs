//! The task that releases waiting requests when workers have room, and refuses those whose time is over.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Queues;
use super::model_queue::{Gone, ModelQueue};
use super::room;
use crate::http::drain::Tasks;
use crate::observe;
use crate::queue::{Room, Settings};

/// While requests wait, workers are looked at this often even if nothing reports that one has less to compute: other
/// replicas' requests and circuit breakers report nothing.
const TICK: Duration = Duration::from_millis(10);
/// How often who stopped computing is looked for.
const STALL_TICK: Duration = Duration::from_millis(100);

impl Queues {
    /// Runs until the drain begins and no request waits any more.
    pub async fn dispatch(self: Arc<Self>, tasks: Tasks) {
        let freed = self.fleet.freed().clone();
        let mut turn = 0;
        let mut looked = observe::now();
        loop {
            let is_idle = freed.waiting() == 0;
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
            turn += 1;
            self.release(now, turn);
        }
    }

    /// Releases what there is room for. The queue at `turn` is first, since models can share workers.
    fn release(&self, now: Instant, turn: usize) {
        let queues = self.by_model.load();
        let mut waiting: Vec<&Arc<ModelQueue>> = queues
            .values()
            .filter(|queue| queue.waiting() > 0)
            .collect();
        if waiting.is_empty() {
            return;
        }
        let count = waiting.len();
        waiting.rotate_left(turn % count);
        let settings = self.settings.load();
        for queue in &waiting {
            let gone = match settings.as_ref() {
                Some(settings) => self.advance(queue, &waiting, settings, now),
                // The queue was turned off.
                None => queue.release_all(now),
            };
            for Gone { left, class } in gone {
                self.on_left(queue, &class, &left.outcome, left.waited);
                queue.wake(self.fleet.freed(), left);
            }
        }
    }

    fn advance(
        &self,
        queue: &ModelQueue,
        others: &[&Arc<ModelQueue>],
        settings: &Settings,
        now: Instant,
    ) -> Vec<Gone> {
        let snapshot = self.fleet.snapshot();
        let Some(group) = snapshot.models.get(&queue.model) else {
            return queue.advance(now, Room::default(), 0);
        };
        let workers = self.workers_of(group);
        let mut room = room::room(workers, settings, &self.stalled.lock(), now);
        // What was released and is not at a worker yet, also of models with the same workers.
        let shares = |other: &&Arc<ModelQueue>| {
            let other = snapshot.models.get(&other.model);
            other.is_some_and(|other| room::shares_any(group, other))
        };
        let sharing = others.iter().copied().filter(shares);
        let mut granted = 0;
        for other in sharing {
            granted += other.granted();
            let requests = other.granted_requests();
            room.free_slots = room.free_slots.saturating_sub(requests);
        }
        room.free_tokens = room.free_tokens.saturating_sub(granted);
        room.queued_tokens += granted;
        room.own_queued_tokens += granted;
        queue.advance(now, room, workers.computed_tokens())
    }
}
