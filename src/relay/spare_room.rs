//! How many requests of the lowest class a model's workers would take now without making others wait: what batches may
//! send. What a worker leaves over is a function of numbers; the rest reads these.

use std::sync::Arc;
use std::time::Instant;

use super::core::Relay;
use super::request::target::Name;
use crate::fleet::waiting::WaitingByOwner;
use crate::fleet::{Snapshot, Worker};
use crate::ids::Model;
use crate::observe;

/// The part of a worker's slots that batches may fill. The rest is for requests that come meanwhile: a line that runs
/// is not cut off for one.
const SLOTS_SHARE: f64 = 0.8;

/// Seconds of prompts that may be queued at a worker to which another line is sent. A request that comes then waits as
/// long for its first token.
const QUEUED_SECONDS: f64 = 0.1;

/// Slots of a worker that has shown none, while it has little to do. Any engine runs as many at a time.
const FIRST_SLOTS: u32 = 32;

/// A worker that has shown no slots gets this many times the requests that it usually has: more and more, until it
/// lets some wait and so shows its slots, or has as many as most engines run.
const GROWTH: f64 = 2.0;

/// vLLM's `--max-num-seqs` on most GPUs.
const MAX_UNKNOWN_SLOTS: u32 = 256;

/// What workers leave over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpareRoom {
    /// Requests.
    pub requests: u32,
    /// Prompt tokens to compute of all of these together.
    pub prompt_tokens: u64,
    /// Workers that have some.
    pub workers: u32,
}

impl SpareRoom {
    fn plus(self, other: Self) -> Self {
        Self {
            requests: self.requests.saturating_add(other.requests),
            prompt_tokens: self.prompt_tokens.saturating_add(other.prompt_tokens),
            workers: self.workers.saturating_add(other.workers),
        }
    }

    /// Of pairs of a prefill and a decode worker: each request needs both.
    fn of_pairs(prefill: Self, decode: Self) -> Self {
        Self {
            requests: prefill.requests.min(decode.requests),
            ..prefill
        }
    }

    /// What one of so many replicas may use. Rounded up, so that the last slot is not left idle; replicas know of each
    /// other's requests a moment later.
    fn shared_by(self, replicas: u32) -> Self {
        let replicas = replicas.max(1);
        Self {
            requests: self.requests.div_ceil(replicas),
            prompt_tokens: self.prompt_tokens.div_ceil(replicas.into()),
            workers: self.workers.div_ceil(replicas),
        }
    }
}

/// What is known of one worker.
#[derive(Clone, Copy, Debug, PartialEq)]
struct WorkerNumbers {
    /// Requests in flight.
    requests: u32,
    /// On average over the last seconds.
    usual_requests: f64,
    /// Answers that it generates at a time, if that is set or was seen.
    slots: Option<u32>,
    /// Requests that wait for it: inside its engine, and in routers.
    waiting: u32,
    /// Prompt tokens that it has accepted and not computed yet.
    queued_tokens: u64,
    /// Prompt tokens that it computes in a second.
    rate: f64,
    /// With more queued tokens than this, requests wait for it in the router's queue, if there is one.
    max_queued_tokens: Option<u64>,
}

impl WorkerNumbers {
    fn room(&self) -> SpareRoom {
        let max_queued = (self.rate * QUEUED_SECONDS) as u64;
        // Half of what makes others wait.
        let max_queued = self
            .max_queued_tokens
            .map_or(max_queued, |max| max_queued.min(max / 2))
            .max(1);
        if self.waiting > 0 || self.queued_tokens >= max_queued {
            return SpareRoom::default();
        }
        let slots = self.slots.unwrap_or_else(|| {
            let grown = (self.usual_requests * GROWTH) as u32;
            grown.clamp(FIRST_SLOTS, MAX_UNKNOWN_SLOTS)
        });
        let most = (f64::from(slots) * SLOTS_SHARE) as u32;
        match most.max(1).saturating_sub(self.requests) {
            0 => SpareRoom::default(),
            requests => SpareRoom {
                requests,
                prompt_tokens: max_queued - self.queued_tokens,
                workers: 1,
            },
        }
    }
}

/// What a worker is asked for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WorkerPart {
    Whole,
    Prefill,
    Decode,
}

impl Relay {
    /// How many requests of the lowest class the workers of a model, or of what a name stands for, would take now
    /// without making others wait. Lines that were let in and do not count at a worker yet are not taken off.
    pub fn spare_room(&self, model: &str) -> SpareRoom {
        let snapshot = self.fleet().snapshot();
        let now = observe::now();
        let Some(name) = self.names().get(model) else {
            return self.room_of_model(&snapshot, model, now);
        };
        self.room_of_name(&snapshot, name, now)
    }

    /// A request may go to any of the targets, so each must have room.
    fn room_of_name(&self, snapshot: &Snapshot, name: &Name, now: Instant) -> SpareRoom {
        let targets = name.targets().filter(|(_, weight)| *weight > 0.0);
        let rooms = targets.map(|(model, _)| self.room_of_model(snapshot, model, now));
        rooms
            .min_by_key(|room| (room.requests, room.prompt_tokens))
            .unwrap_or_default()
    }

    fn room_of_model(&self, snapshot: &Snapshot, model: &str, now: Instant) -> SpareRoom {
        let Some(group) = snapshot.models.get(model) else {
            return SpareRoom::default();
        };
        if self.has_waiting(&group.model) {
            return SpareRoom::default();
        }
        let waiting = self.fleet().waiting().peers();
        let peers = waiting.as_deref();
        let sum = |workers: &[Arc<Worker>], part: WorkerPart| {
            let usable = workers.iter().filter(|worker| {
                let sends_blocks = part == WorkerPart::Prefill;
                worker.breaker.may_admit(now)
                    && (!sends_blocks || worker.kv_transfer_breaker.may_admit(now))
            });
            let rooms = usable.map(|worker| self.numbers_of(worker, part, peers).room());
            rooms.fold(SpareRoom::default(), SpareRoom::plus)
        };
        let prefill = group.prefill_workers();
        let room = if self.prefill_decode().is_some() && !prefill.is_empty() {
            let decode = sum(group.decode_workers(), WorkerPart::Decode);
            SpareRoom::of_pairs(sum(prefill, WorkerPart::Prefill), decode)
        } else {
            sum(group.decode_workers(), WorkerPart::Whole)
        };
        room.shared_by(self.peers().connected().saturating_add(1))
    }

    /// Whether requests wait in the queue of a model.
    fn has_waiting(&self, model: &Model) -> bool {
        let queue = self.queues().get(model);
        queue.is_some_and(|queue| queue.waiting() > 0)
    }

    fn numbers_of(
        &self,
        worker: &Worker,
        part: WorkerPart,
        peers: Option<&WaitingByOwner>,
    ) -> WorkerNumbers {
        let load = &worker.load;
        let at_peers = peers.and_then(|peers| peers.get(&worker.id));
        let at_peers = at_peers.map_or(0, |waiting| waiting.requests);
        WorkerNumbers {
            requests: load.requests(),
            usual_requests: load.usual_requests(),
            slots: worker.known_slots(),
            waiting: load.waiting().saturating_add(at_peers),
            // Its prompts are computed by another worker.
            queued_tokens: match part {
                WorkerPart::Decode => 0,
                WorkerPart::Whole | WorkerPart::Prefill => load.queued_tokens(),
            },
            rate: load.speed.get().rate(),
            max_queued_tokens: self.queue().map(|queue| queue.max_worker_queued_tokens),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of 12,000 tokens a second: 1,200 may be queued.
    const IDLE: WorkerNumbers = WorkerNumbers {
        requests: 0,
        usual_requests: 0.0,
        slots: Some(100),
        waiting: 0,
        queued_tokens: 0,
        rate: 12_000.0,
        max_queued_tokens: None,
    };

    fn room(requests: u32, prompt_tokens: u64, workers: u32) -> SpareRoom {
        SpareRoom {
            requests,
            prompt_tokens,
            workers,
        }
    }

    type Change = fn(&mut WorkerNumbers);

    #[test]
    fn a_worker_leaves_over_a_part_of_its_slots_while_nobody_waits_for_it() {
        let none = SpareRoom::default();
        let table: [(&str, Change, SpareRoom); 14] = [
            ("idle", |_| {}, room(80, 1_200, 1)),
            ("some run", |of| of.requests = 30, room(50, 1_200, 1)),
            ("its share is used", |of| of.requests = 80, none),
            ("all slots are used", |of| of.requests = 120, none),
            ("some wait for it", |of| of.waiting = 1, none),
            (
                "a short prompt is queued",
                |of| of.queued_tokens = 200,
                room(80, 1_000, 1),
            ),
            ("a long one is", |of| of.queued_tokens = 1_200, none),
            ("it is fast", |of| of.rate = 47_000.0, room(80, 4_700, 1)),
            ("it is very slow", |of| of.rate = 1.0, room(80, 1, 1)),
            (
                "the queue has less",
                |of| of.max_queued_tokens = Some(500),
                room(80, 250, 1),
            ),
            ("one slot", |of| of.slots = Some(1), room(1, 1_200, 1)),
            (
                "it has shown no slots",
                |of| of.slots = None,
                room(25, 1_200, 1),
            ),
            (
                "and usually has more",
                |of| {
                    (of.slots, of.usual_requests, of.requests) = (None, 25.0, 25);
                },
                room(15, 1_200, 1),
            ),
            (
                "and has as many as most",
                |of| {
                    (of.slots, of.usual_requests, of.requests) = (None, 204.0, 200);
                },
                room(4, 1_200, 1),
            ),
        ];
        for (what, change, expected) in table {
            let mut numbers = IDLE;
            change(&mut numbers);
            assert_eq!(numbers.room(), expected, "{what}");
        }
    }

    #[test]
    fn each_request_of_a_pair_needs_both_workers() {
        let found = SpareRoom::of_pairs(room(9, 500, 2), room(4, 90_000, 3));
        assert_eq!(found, room(4, 500, 2));
    }

    #[test]
    fn replicas_share_what_is_left() {
        let all = room(5, 1_000, 2).plus(room(2, 200, 1));
        assert_eq!(all, room(7, 1_200, 3));
        assert_eq!(all.shared_by(3), room(3, 400, 1));
        assert_eq!(all.shared_by(0), all);
        assert_eq!(SpareRoom::default().shared_by(2), SpareRoom::default());
    }
}
