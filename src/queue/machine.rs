//! The waiting requests of the models that share workers.

mod entering;
mod expiry;
mod walk;

use std::collections::BTreeSet;
use std::hash::Hash;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustc_hash::{FxHashMap, FxHashSet};

use super::class::{Class, Place};
use super::estimate::DrainRate;
use super::floors::{self, Floor};
use super::forecast::Forecast;
use super::next::Next;
use super::settings::Settings;
use super::types::{EntryId, Outcome, Refusal, RefusalReason, Request, Room, SetBy};
use crate::fleet::waiting::DueTime;

pub use self::walk::{LOOKED_AT_IN_ORDER, PASSED_OVER_FOR, PASSED_OVER_MAX};

/// What a request costs at least, since one whose prompt is cached is work too.
const COST_MIN: u64 = 64;
/// The wait of what no client waits for; the request's own time ends before.
const LONG: Duration = Duration::from_secs(86_400);

/// Within a client the shortest prompt is next, but every second that another one has waited counts as so many of computing:
/// longer prompts wait longer, and none starves.
const AGEING: f64 = 0.3;

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
    rate: DrainRate,
    /// Where the walk over those goes on who are behind the first ones. `None`: behind the first ones.
    behind: Option<Next>,
    /// When it last went on.
    walked_behind: Option<Instant>,
    /// Whether the last walk looked at all, or passed over them.
    pub is_all_looked_at: bool,
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
    pub waited: Duration,
    /// The request, as it would enter another queue.
    pub request: Request,
}

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
    /// Of what its client sent.
    pub bytes: u64,
}

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
            rate: DrainRate::default(),
            behind: None,
            walked_behind: None,
            is_all_looked_at: false,
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
        let mut entries = std::mem::take(&mut self.entries);
        let mut in_order: Vec<(&EntryId, &mut Entry<T>)> = entries.iter_mut().collect();
        in_order.sort_unstable_by_key(|(id, _)| **id);
        for (id, entry) in in_order {
            let request = &entry.request;
            entry.class = self.class_of(request.priority);
            let target = self.target(entry.class, request);
            entry.place = place(request, target, *id);
            entry.target = target.filter(|_| !request.has_lost_target);
            self.classes[entry.class].insert(
                request.client,
                entry.place,
                entry.cost,
                request.bytes,
            );
        }
        self.set_entries(entries);
    }

    /// Adds a request, or says why it would wait in vain, with its waker. Returns with it who had to leave for it.
    pub fn enter(
        &mut self,
        now: Instant,
        room: Room,
        mut request: Request,
        waker: T,
    ) -> Result<Entered<T>, (Refusal, T)> {
        request.has_lost_target |= room.workers == 0 || request.lacks_worker;
        let room_before = std::mem::replace(&mut self.room, room);
        let class = self.class_of(request.priority);
        let cost = request.tokens.max(COST_MIN);
        // A lost one still gives the request its turn.
        let first_target = self.target(class, &request);
        let target = first_target.filter(|_| !request.has_lost_target);
        let refusal = self.refusal(now, class, &request, cost, target);
        let made_place = match refusal {
            Some(reason) => Err(reason),
            None => self.make_place(now, class, &request),
        };
        let left = match made_place {
            Ok(left) => left,
            Err(reason) => {
                let refusal = self.refused(reason, class);
                // The time of those who wait without a worker goes on.
                self.room = room_before;
                return Err((refusal, waker));
            }
        };
        self.room = room_before;
        self.set_room(now, room);
        let id = EntryId(self.next_id);
        self.next_id += 1;
        let mut entry = Entry {
            request,
            waker,
            class,
            place: place(&request, first_target, id),
            cost,
            expires: now,
            target,
        };
        entry.expires = self.expiry(&entry);
        self.classes[class].insert(request.client, entry.place, cost, request.bytes);
        self.expiries.insert((entry.expires, id));
        self.entries.insert(id, entry);
        Ok(Entered { id, left })
    }

    /// When a request that enters now is due.
    pub fn due(&self, request: &Request) -> DueTime {
        let class = self.class_of(request.priority);
        let target = self.target(class, request);
        self.due_in(class, &place(request, target, EntryId(self.next_id)))
    }

    /// Removes a request whose client has disconnected. `None` if it has left before.
    pub fn leave(&mut self, id: EntryId) -> Option<T> {
        self.remove(id, false).map(|entry| entry.waker)
    }

    /// The waiting requests of lower classes than that of `priority`, without background requests: no client waits for
    /// those.
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
            bytes: entry.request.client_bytes,
        });
        below.collect()
    }

    /// Refuses a request whose memory is needed. `None` if it has left.
    pub fn give_up(&mut self, now: Instant, id: EntryId) -> Option<Left<T>> {
        let entry = self.remove(id, false)?;
        let refusal = self.refused(RefusalReason::MemoryNeeded, entry.class);
        Some(self.left(entry, now, Outcome::Refused(refusal)))
    }

    /// Ends the wait of some requests here.
    pub fn end(
        &mut self,
        now: Instant,
        outcome: Outcome,
        which: impl Fn(&T) -> bool,
    ) -> Vec<Left<T>> {
        let entries = self.entries.iter();
        let entries = entries.filter(|(_, entry)| which(&entry.waker));
        let mut ids: Vec<EntryId> = entries.map(|(id, _)| *id).collect();
        ids.sort_unstable();
        let mut left = Vec::with_capacity(ids.len());
        for id in ids {
            if let Some(entry) = self.remove(id, false) {
                left.push(self.left(entry, now, outcome));
            }
        }
        left
    }

    /// What waits of each kind that any is of, in the order of the settings' classes.
    pub fn classes<'a, K: Eq + Hash>(
        &'a self,
        now: Instant,
        of: impl Fn(&'a T) -> &'a K,
    ) -> FxHashMap<&'a K, Vec<ClassStatus>> {
        let none = (0..self.order.len()).map(|class| ClassStatus {
            class,
            ..ClassStatus::default()
        });
        let none: Vec<ClassStatus> = none.collect();
        let mut kinds: FxHashMap<&'a K, Vec<ClassStatus>> = FxHashMap::default();
        let mut clients = FxHashSet::default();
        for entry in self.entries.values() {
            let (kind, class) = (of(&entry.waker), self.order[entry.class]);
            let status = &mut kinds.entry(kind).or_insert_with(|| none.clone())[class];
            status.requests += 1;
            status.tokens += entry.cost;
            status.bytes += entry.request.bytes;
            let waited = now.saturating_duration_since(entry.request.entered);
            status.oldest = status.oldest.max(waited);
            let is_new = clients.insert((kind, class, entry.request.client));
            status.clients += usize::from(is_new);
        }
        kinds
    }

    /// Tokens that one worker computes in a second, if that was measured.
    pub fn measured_rate(&self) -> Option<f64> {
        self.rate.measured()
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
        self.behind = None;
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

    fn due_in(&self, class: usize, place: &Place) -> DueTime {
        DueTime {
            priority: self.settings.classes[self.order[class]].priority,
            at: place.due,
        }
    }

    fn max_wait(&self, class: usize) -> (Duration, SetBy) {
        let index = self.order[class];
        let own = self.settings.classes[index].max_wait;
        SetBy::of(own, index, self.settings.max_wait)
    }

    fn target(&self, class: usize, request: &Request) -> Option<Duration> {
        self.settings.target(self.order[class], request)
    }

    fn set_room(&mut self, now: Instant, room: Room) {
        let before = std::mem::replace(&mut self.room, room);
        if (before.workers == 0) == (room.workers == 0) {
            return;
        }
        // The time that requests wait for busy workers and that for any worker are two times.
        let mut entries = std::mem::take(&mut self.entries);
        for entry in entries.values_mut() {
            if !entry.request.lacks_worker {
                entry.request.since = now;
            }
            if room.workers == 0 {
                entry.lose_target();
            }
        }
        self.set_entries(entries);
    }

    /// Takes note of who waits for a worker although other models may have some. Their time for that begins now, and so
    /// does the time for room of those whose worker has come.
    pub fn set_lacks_worker(&mut self, now: Instant, lacks: impl Fn(&T) -> bool) {
        let has_workers = self.room.workers > 0;
        let mut entries = std::mem::take(&mut self.entries);
        for (id, entry) in &mut entries {
            let lacks_worker = lacks(&entry.waker);
            if lacks_worker == entry.request.lacks_worker {
                continue;
            }
            entry.request.lacks_worker = lacks_worker;
            if has_workers {
                entry.request.since = now;
            }
            if lacks_worker {
                entry.lose_target();
            }
            self.expiries.remove(&(entry.expires, *id));
            entry.expires = self.expiry(entry);
            self.expiries.insert((entry.expires, *id));
        }
        self.entries = entries;
    }

    /// Whether a request waits for a worker to come, and not for room.
    fn waits_for_worker(&self, request: &Request) -> bool {
        self.room.workers == 0 || request.lacks_worker
    }

    /// Keeps these requests, and works out anew when each of them expires.
    fn set_entries(&mut self, mut entries: FxHashMap<EntryId, Entry<T>>) {
        for entry in entries.values_mut() {
            entry.expires = self.expiry(entry);
        }
        let expiries = entries.iter().map(|(id, entry)| (entry.expires, *id));
        self.expiries = expiries.collect();
        self.entries = entries;
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
            waited: now.saturating_duration_since(entry.request.entered),
            request: entry.request,
        }
    }
}

/// Its place within its client.
fn place(request: &Request, target: Option<Duration>, id: EntryId) -> Place {
    let by_length = || request.compute.min(LONG).div_f64(AGEING);
    Place {
        has_no_target: target.is_none(),
        due: request.received + target.unwrap_or_else(by_length),
        id,
    }
}

#[cfg(test)]
mod tests;
