//! The waiting requests of the models that share workers.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustc_hash::{FxHashMap, FxHashSet};

use super::class::{Class, Place, Share};
use super::estimate::DrainRate;
use super::floors::{self, Floor};
use super::forecast::Forecast;
use super::next::Next;
use super::settings::Settings;
use super::types::{EntryId, Look, Outcome, Refusal, RefusalReason, Request, Room, SetBy};

/// A request enters the queue only if it is expected to meet its target with so much of it to spare, since later ones of
/// higher classes may come first, and a worker may be slower than on average.
const TARGET_PART: f64 = 0.9;
/// What a request costs at least, since one whose prompt is cached is work too.
const COST_MIN: u64 = 64;
/// The wait of what no client waits for; the request's own time ends before.
const LONG: Duration = Duration::from_secs(86_400);

/// Within a client the shortest prompt is next, but every second that another one has waited counts as so many of computing:
/// longer prompts wait longer, and none starves.
const AGEING: f64 = 0.3;
/// So many waiting requests are looked at each time, in their order: each asks what is known of the caches.
const LOOKED_AT_MAX: usize = 32;

/// The waiting requests of the models that share workers, each with a `T` to wake it by.
#[derive(Debug)]
pub struct Queue<T> {
    settings: Arc<Settings>,
    /// Highest first, as `floors` and `order`.
    classes: Vec<Class>,
    floors: Vec<Floor>,
    /// The indices of `settings.classes`.
    order: Vec<usize>,
    entries: FxHashMap<EntryId, Entry<T>>,
    expiries: BTreeSet<(Instant, EntryId)>,
    next_id: u64,
    room: Room,
    /// When workers came up or the last one was lost.
    changed: Option<Instant>,
    rate: DrainRate,
}

#[derive(Debug)]
struct Entry<T> {
    request: Request,
    waker: T,
    /// Its index in the queue's classes, highest first.
    class: usize,
    place: Place,
    cost: u64,
    expires: Instant,
    /// `None` also for a request that has waited for a worker to come up.
    target: Option<Duration>,
}

/// A request that has left the queue.
#[derive(Debug)]
pub struct Left<T> {
    pub waker: T,
    pub outcome: Outcome,
    /// Its index in the settings' classes.
    pub class: usize,
    /// The tokens that it counted for.
    pub tokens: u64,
    pub waited: Duration,
}

/// A request that has entered.
#[derive(Debug)]
pub struct Entered<T> {
    pub id: EntryId,
    /// Who had to leave for it.
    pub left: Vec<Left<T>>,
}

/// A request whose memory a request of a higher class may get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Below {
    pub id: EntryId,
    /// Its place among the classes; lower classes have higher numbers.
    pub class: usize,
    pub entered: Instant,
    pub bytes: u64,
}

/// One class for operators.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClassStatus {
    /// Its index in the settings' classes.
    pub class: usize,
    pub requests: u32,
    pub tokens: u64,
    pub bytes: u64,
    pub clients: usize,
    /// How long the oldest of its requests has waited.
    pub oldest: Duration,
}

impl<T> Queue<T> {
    pub fn new(settings: Arc<Settings>) -> Self {
        let mut queue = Self {
            settings,
            classes: Vec::new(),
            floors: Vec::new(),
            order: Vec::new(),
            entries: FxHashMap::default(),
            expiries: BTreeSet::new(),
            next_id: 0,
            room: Room::default(),
            changed: None,
            rate: DrainRate::default(),
        };
        queue.build_classes();
        queue
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Uses other settings, also for the requests that wait already. None of them is refused for that.
    pub fn set_settings(&mut self, settings: Arc<Settings>) {
        self.settings = settings;
        self.build_classes();
        let mut ids: Vec<EntryId> = self.entries.keys().copied().collect();
        ids.sort_unstable();
        self.expiries.clear();
        for id in ids {
            let Some(mut entry) = self.entries.remove(&id) else {
                continue;
            };
            entry.class = self.class_of(entry.request.priority);
            let client = entry.request.client;
            self.classes[entry.class].insert(client, entry.place, entry.cost, entry.request.bytes);
            entry.expires = self.expiry(&entry);
            self.expiries.insert((entry.expires, id));
            self.entries.insert(id, entry);
        }
    }

    /// Adds a request, or says why it would wait in vain, with its waker. Returns with it who had to leave for it.
    pub fn enter(
        &mut self,
        now: Instant,
        room: Room,
        request: Request,
        waker: T,
    ) -> Result<Entered<T>, (Refusal, T)> {
        self.set_room(now, room);
        let class = self.class_of(request.priority);
        let cost = request.tokens.max(COST_MIN);
        let target = request.ttft_target.or_else(|| self.target_of(class));
        let target = target.filter(|_| !request.is_background);
        let refusal = self.refusal(now, class, &request, cost, target);
        let made_place = match refusal {
            Some(reason) => Err(reason),
            None => self.make_place(now, class, &request),
        };
        let left = match made_place {
            Ok(left) => left,
            Err(reason) => {
                return Err((self.refused(reason, class), waker));
            }
        };
        let id = EntryId(self.next_id);
        self.next_id += 1;
        let by_length = || request.compute.min(LONG).div_f64(AGEING);
        let due = request.received + target.unwrap_or_else(by_length);
        let mut entry = Entry {
            request,
            waker,
            class,
            place: Place {
                has_no_target: target.is_none(),
                due,
                id,
            },
            cost,
            expires: now,
            target: target.filter(|_| room.workers > 0),
        };
        entry.expires = self.expiry(&entry);
        self.classes[class].insert(request.client, entry.place, cost, request.bytes);
        self.expiries.insert((entry.expires, id));
        self.entries.insert(id, entry);
        Ok(Entered { id, left })
    }

    /// Removes a request whose client has disconnected. False if it has left before.
    pub fn leave(&mut self, id: EntryId) -> bool {
        self.remove(id, false).is_some()
    }

    /// Looks at the requests in their order, releases those that `look` sends, and refuses those whose time is over. `computed`
    /// counts the prompt tokens that the workers have computed so far.
    pub fn advance(
        &mut self,
        now: Instant,
        room: Room,
        computed: u64,
        mut look: impl FnMut(&T) -> Look,
    ) -> Vec<Left<T>> {
        self.set_room(now, room);
        let is_busy = room.is_full && !self.is_empty();
        self.rate.update(now, computed, room.workers, is_busy);
        let mut left = Vec::new();
        self.expire(now, &mut left);
        if room.is_full || room.workers == 0 {
            return left;
        }
        let mut next = Next::new(&self.classes, &self.floors);
        let mut decided = Vec::new();
        let mut waiting = 0;
        while waiting < LOOKED_AT_MAX {
            let Some((id, class, cost)) = next.peek() else {
                break;
            };
            let Some(entry) = self.entries.get(&id) else {
                break;
            };
            let outcome = self.outcome_of_next(now, entry);
            if outcome == Outcome::Released {
                match look(&entry.waker) {
                    Look::Send => {
                        self.room.queued_tokens += cost;
                        self.room.own_queued_tokens += cost;
                    }
                    Look::Wait => {
                        waiting += 1;
                        next.advance(class, cost);
                        continue;
                    }
                    Look::Full => break,
                }
            }
            decided.push((id, outcome));
            next.advance(class, cost);
        }
        for (id, outcome) in decided {
            if let Some(entry) = self.remove(id, outcome == Outcome::Released) {
                left.push(self.left(entry, now, outcome));
            }
        }
        left
    }

    /// Those of lower classes than that of `priority`, with clients that wait for them.
    pub fn below(&self, priority: i32) -> Vec<Below> {
        let class = self.class_of(priority);
        if self.classes[class + 1..].iter().all(Class::is_empty) {
            return Vec::new();
        }
        let entries = self.entries.iter();
        let below =
            entries.filter(|(_, entry)| entry.class > class && !entry.request.is_background);
        let below = below.map(|(id, entry)| Below {
            id: *id,
            class: entry.class,
            entered: entry.request.entered,
            bytes: entry.request.bytes,
        });
        below.collect()
    }

    /// Refuses a request whose memory is needed. `None` if it has left.
    pub fn give_up(&mut self, now: Instant, id: EntryId) -> Option<Left<T>> {
        let entry = self.remove(id, false)?;
        let refusal = self.refused(RefusalReason::MemoryNeeded, entry.class);
        Some(self.left(entry, now, Outcome::Refused(refusal)))
    }

    /// Takes out those who wait on in another queue.
    pub fn take_moved(&mut self, now: Instant, is_moved: impl Fn(&T) -> bool) -> Vec<Left<T>> {
        let moved = self
            .entries
            .iter()
            .filter(|(_, entry)| is_moved(&entry.waker));
        let mut ids: Vec<EntryId> = moved.map(|(id, _)| *id).collect();
        ids.sort_unstable();
        let entries: Vec<Entry<T>> = ids
            .into_iter()
            .filter_map(|id| self.remove(id, false))
            .collect();
        let left = entries.into_iter();
        left.map(|entry| self.left(entry, now, Outcome::Moved))
            .collect()
    }

    /// Those who wait.
    pub fn wakers(&self) -> impl Iterator<Item = &T> {
        self.entries.values().map(|entry| &entry.waker)
    }

    /// Ends the wait of all requests.
    pub fn end(&mut self, now: Instant, outcome: Outcome) -> Vec<Left<T>> {
        let ids: Vec<EntryId> = self.entries.keys().copied().collect();
        let mut left = Vec::with_capacity(ids.len());
        for id in ids {
            if let Some(entry) = self.remove(id, false) {
                left.push(self.left(entry, now, outcome));
            }
        }
        left
    }

    /// When [`Self::advance`] has to be called next, if nothing happens before.
    pub fn next_timeout(&self) -> Option<Instant> {
        self.expiries.first().map(|(at, _)| *at)
    }

    /// In the order of the settings' classes, of those who wait that `is_of` names.
    pub fn classes(&self, now: Instant, is_of: impl Fn(&T) -> bool) -> Vec<ClassStatus> {
        let mut clients = vec![FxHashSet::default(); self.order.len()];
        let statuses = self.order.iter().map(|class| ClassStatus {
            class: *class,
            ..ClassStatus::default()
        });
        let mut statuses: Vec<ClassStatus> = statuses.collect();
        for entry in self.entries.values().filter(|entry| is_of(&entry.waker)) {
            let status = &mut statuses[entry.class];
            status.requests += 1;
            status.tokens += entry.cost;
            status.bytes += entry.request.bytes;
            let waited = now.saturating_duration_since(entry.request.entered);
            status.oldest = status.oldest.max(waited);
            clients[entry.class].insert(entry.request.client);
        }
        for (status, clients) in statuses.iter_mut().zip(&clients) {
            status.clients = clients.len();
        }
        statuses.sort_by_key(|status| status.class);
        statuses
    }

    /// Tokens that one worker computes in a second, if that was measured.
    pub fn measured_rate(&self) -> Option<f64> {
        self.rate.measured()
    }

    fn refused(&self, reason: RefusalReason, class: usize) -> Refusal {
        Refusal {
            reason,
            retry_after: self.forecast().retry_after(reason, class),
        }
    }

    fn forecast(&self) -> Forecast<'_> {
        Forecast {
            classes: &self.classes,
            floors: &self.floors,
            room: &self.room,
            rate: &self.rate,
        }
    }

    fn build_classes(&mut self) {
        let classes = &self.settings.classes;
        self.order = (0..classes.len()).collect();
        self.order
            .sort_by_key(|at| std::cmp::Reverse(classes[*at].priority));
        let floors = self
            .order
            .iter()
            .map(|at| Floor::new(classes[*at].min_share));
        self.floors = floors.collect();
        self.classes = self.order.iter().map(|_| Class::default()).collect();
    }

    fn class_of(&self, priority: i32) -> usize {
        let class = self.settings.class_of(priority);
        let place = self.order.iter().position(|at| *at == class);
        place.unwrap_or_default()
    }

    fn max_wait(&self, class: usize) -> Duration {
        self.max_wait_of(class).0
    }

    fn max_wait_of(&self, class: usize) -> (Duration, SetBy) {
        let index = self.order[class];
        let own = self.settings.classes[index].max_wait;
        SetBy::of(own, index, self.settings.max_wait)
    }

    fn target_of(&self, class: usize) -> Option<Duration> {
        let own = self.settings.classes[self.order[class]].ttft_target;
        Some(own.unwrap_or(self.settings.ttft_target)).filter(|target| !target.is_zero())
    }

    fn refusal(
        &self,
        now: Instant,
        class: usize,
        request: &Request,
        cost: u64,
        target: Option<Duration>,
    ) -> Option<RefusalReason> {
        if self.room.workers == 0 && self.settings.no_worker_timeout.is_zero() {
            let waited = Duration::ZERO;
            return Some(RefusalReason::NoWorker { waited });
        }
        let target = target?;
        let elapsed = now.saturating_duration_since(request.received);
        let forecast = self.forecast();
        let wait = forecast.wait(class, request.client, cost)?;
        let expected = elapsed + wait + forecast.compute(cost)?;
        (expected > target.mul_f64(TARGET_PART))
            .then_some(RefusalReason::TargetUnreachable { target, expected })
    }

    /// Place for a request in its class. In a full one the client that has the most waiting makes it: who sends a flood pays
    /// for it.
    fn make_place(
        &mut self,
        now: Instant,
        class: usize,
        request: &Request,
    ) -> Result<Vec<Left<T>>, RefusalReason> {
        let index = self.order[class];
        let own = self.settings.classes[index].max_requests;
        let (max_requests, set_by) = SetBy::of(own, index, self.settings.max_requests);
        let max_bytes = self.settings.max_size;
        // What is too much, for which reason, and who makes place for it: the heaviest client, if with all that it has to give
        // it still has no less than this one.
        let too_much = |of: &Class| {
            let requests = u64::from((of.requests + 1).saturating_sub(max_requests));
            let bytes = (of.bytes.saturating_add(request.bytes)).saturating_sub(max_bytes);
            let newest = |share, more| of.newest_of_heaviest(request.client, share, more);
            let of_requests = (requests > 0).then(|| {
                let max = max_requests;
                let reason = RefusalReason::TooManyRequests { max, set_by };
                (reason, newest(Share::Requests, requests))
            });
            let of_bytes = (bytes > 0).then(|| {
                let reason = RefusalReason::TooManyBytes { max: max_bytes };
                (reason, newest(Share::Bytes, request.bytes + bytes - 1))
            });
            [of_requests, of_bytes]
        };
        let all = too_much(&self.classes[class]);
        if let Some((reason, _)) = all.iter().flatten().find(|(_, newest)| newest.is_none()) {
            return Err(*reason);
        }
        let mut left = Vec::new();
        while let Some((reason, newest)) =
            too_much(&self.classes[class]).into_iter().flatten().next()
        {
            let Some(entry) = newest.and_then(|id| self.remove(id, false)) else {
                return Err(reason);
            };
            let refusal = self.refused(reason, class);
            left.push(self.left(entry, now, Outcome::Refused(refusal)));
        }
        Ok(left)
    }

    fn set_room(&mut self, now: Instant, room: Room) {
        let before = std::mem::replace(&mut self.room, room);
        if (before.workers == 0) == (room.workers == 0) {
            return;
        }
        self.changed = Some(now);
        // The time that requests wait for busy workers and that for any worker are two times.
        self.expiries.clear();
        let ids: Vec<EntryId> = self.entries.keys().copied().collect();
        for id in ids {
            let Some(mut entry) = self.entries.remove(&id) else {
                continue;
            };
            if room.workers == 0 {
                entry.target = None;
            }
            entry.expires = self.expiry(&entry);
            self.expiries.insert((entry.expires, id));
            self.entries.insert(id, entry);
        }
    }

    fn expiry(&self, entry: &Entry<T>) -> Instant {
        let max_wait = match entry.request.is_background {
            true => LONG,
            false => self.max_wait(entry.class),
        };
        let no_worker = self.settings.no_worker_timeout;
        let since = self
            .changed
            .map_or(entry.request.entered, |at| at.max(entry.request.entered));
        let due = entry.target.map(|target| entry.request.received + target);
        let end = match self.room.workers {
            0 => since + no_worker,
            _ => due.map_or(since + max_wait, |due| due.min(since + max_wait)),
        };
        // However often the workers come and go.
        let last = entry.request.entered + max_wait + no_worker;
        end.min(last).min(entry.request.deadline)
    }

    fn expire(&mut self, now: Instant, left: &mut Vec<Left<T>>) {
        while let Some((at, id)) = self.expiries.first().copied() {
            if at > now {
                return;
            }
            let Some(entry) = self.remove(id, false) else {
                self.expiries.remove(&(at, id));
                continue;
            };
            let waited = now.saturating_duration_since(entry.request.entered);
            let elapsed = now.saturating_duration_since(entry.request.received);
            let reason = match entry.target {
                _ if self.room.workers == 0 => RefusalReason::NoWorker { waited },
                Some(target) if elapsed >= target => RefusalReason::TargetUnreachable {
                    target,
                    expected: elapsed,
                },
                _ => RefusalReason::TimedOut {
                    waited,
                    set_by: self.max_wait_of(entry.class).1,
                },
            };
            let refusal = self.refused(reason, entry.class);
            left.push(self.left(entry, now, Outcome::Refused(refusal)));
        }
    }

    /// A request that cannot meet its target any more would only take the place of one that can.
    fn outcome_of_next(&self, now: Instant, entry: &Entry<T>) -> Outcome {
        let expected = || {
            let elapsed = now.saturating_duration_since(entry.request.received);
            Some(elapsed + self.forecast().compute(entry.cost)?)
        };
        match (entry.target, expected()) {
            (Some(target), Some(expected)) if expected > target => {
                let reason = RefusalReason::TargetUnreachable { target, expected };
                Outcome::Refused(self.refused(reason, entry.class))
            }
            _ => Outcome::Released,
        }
    }

    fn remove(&mut self, id: EntryId, is_sent: bool) -> Option<Entry<T>> {
        let entry = self.entries.remove(&id)?;
        self.expiries.remove(&(entry.expires, id));
        let (client, bytes) = (entry.request.client, entry.request.bytes);
        if is_sent {
            let waiting = |class: &Class| (!class.is_empty()).then_some(0);
            let heads: Vec<_> = self.classes.iter().map(waiting).collect();
            floors::on_sent(&mut self.floors, &heads, entry.class, entry.cost);
            self.classes[entry.class].take(client, entry.place, entry.cost, bytes);
        } else {
            self.classes[entry.class].remove(client, entry.place, entry.cost, bytes);
        }
        if self.classes[entry.class].is_empty() {
            self.floors[entry.class].on_empty();
        }
        Some(entry)
    }

    fn left(&self, entry: Entry<T>, now: Instant, outcome: Outcome) -> Left<T> {
        Left {
            waker: entry.waker,
            outcome,
            class: self.order[entry.class],
            tokens: entry.cost,
            waited: now.saturating_duration_since(entry.request.entered),
        }
    }
}

#[cfg(test)]
mod tests;
