//! The works of batches that run on this replica: how many there may be, which is next, and how each is stopped.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use prometheus::IntGauge;
use tokio::sync::{Notify, watch};

use super::batch::Work;
use super::turns::{Stalls, Turn, TurnClass};
use crate::store::documents::DocumentKey;

/// Shards at a time. Each has its part of the input in memory (4 MiB), and up to 1 MiB of results.
const MAX_SHARDS: usize = 4;

/// Other works at a time: each reads or writes whole files, and delays nobody who waits for a shard.
const MAX_OTHERS: usize = 2;

/// For so long a shard that found no place is taken to wait for one, since each look for work finds it again. For as
/// long others come before the batch of the shard that has given it its place.
const WANTED_FOR: Duration = Duration::from_secs(10);

/// After so long another shard may end to give its place away, though one still does: its last lines may take as long
/// as any answer, and the batch that waits has no place yet.
const ENDING_ALONE_FOR: Duration = Duration::from_secs(60);

/// Why a work stops before its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopWork {
    /// Its batch was cancelled or has expired.
    Stopping,
    /// It is another replica's now, or the batch is gone.
    Lost,
    Draining,
    /// Its lines wait for what does not come: it makes room for other batches.
    Stalled,
    /// Few of its lines can run: a batch of which no shard runs here gets its place.
    GivesPlace,
}

impl StopWork {
    /// What becomes of a work whose batch was cancelled or has expired: lines run no more; a check and an assembly go
    /// on.
    pub fn of_stopping_batch(work: Work) -> Option<Self> {
        is_shard(work).then_some(Self::Stopping)
    }
}

type Running = BTreeMap<DocumentKey, Vec<(Work, watch::Sender<Option<StopWork>>)>>;

/// The works that run here, by batch.
#[derive(Debug)]
pub struct Works {
    running: Mutex<Running>,
    stalls: Mutex<Stalls>,
    giving: Mutex<Giving>,
    /// Batches of which this replica's configuration refuses a model, and until when their validation is left to
    /// others, in Unix milliseconds. They are few: at each refusal those whose time is over go, and of the others the
    /// input was read here within the minute before.
    refused: Mutex<BTreeMap<DocumentKey, u64>>,
    /// Notified when one has ended, and when there may be something new to do.
    pub wake: Notify,
    shards: IntGauge,
}

/// Shards that wait for places, and those that give theirs away.
#[derive(Debug, Default)]
struct Giving {
    /// When a batch of which no shard runs here last found no place for one.
    wanted: Option<Instant>,
    /// Since when the last shard ends to give its place away.
    ending_since: Option<Instant>,
    /// The batches that have given a place away within [`WANTED_FOR`], and when. They are few: for each, a shard has
    /// ended, and a batch without any has found no place after the one before.
    given: BTreeMap<DocumentKey, Instant>,
}

/// A shard that ends to give its place away. There is no other one until this is dropped or has lasted for
/// [`ENDING_ALONE_FOR`]. Once it is dropped, a batch must find no place anew.
#[must_use = "dropping it lets the next shard end"]
#[derive(Debug)]
pub(super) struct EndingShard {
    works: Arc<Works>,
    since: Instant,
}

impl Drop for EndingShard {
    fn drop(&mut self) {
        let mut giving = self.works.giving.lock();
        // Another one may have begun to end since.
        if giving.ending_since == Some(self.since) {
            giving.ending_since = None;
        }
        giving.wanted = None;
    }
}

/// Keeps a work registered until it is dropped.
#[must_use = "dropping the guard ends the work"]
#[derive(Debug)]
pub struct WorkGuard {
    works: Arc<Works>,
    pub(super) key: DocumentKey,
    pub(super) work: Work,
    stop: watch::Receiver<Option<StopWork>>,
}

impl Works {
    /// `shards`: shows how many shards run.
    pub fn new(shards: IntGauge) -> Arc<Self> {
        Arc::new(Self {
            running: Mutex::default(),
            stalls: Mutex::default(),
            giving: Mutex::default(),
            refused: Mutex::default(),
            wake: Notify::new(),
            shards,
        })
    }

    /// Whether another work of this kind may begin.
    pub fn has_room(&self, work: Work) -> bool {
        let (shards, others) = self.counts();
        if is_shard(work) {
            shards < MAX_SHARDS
        } else {
            others < MAX_OTHERS
        }
    }

    /// Whether any work may begin.
    pub fn has_any_room(&self) -> bool {
        let (shards, others) = self.counts();
        shards < MAX_SHARDS || others < MAX_OTHERS
    }

    /// There was no room for a work of a batch.
    pub(super) fn on_no_room(&self, now: Instant, key: &DocumentKey, work: Work) {
        let has_shard = || self.of_batch(key).into_iter().any(is_shard);
        // A place that is given away would not be that of a paused batch.
        if is_shard(work) && !has_shard() && !self.is_paused(now, key) {
            self.giving.lock().wanted = Some(now);
        }
    }

    /// Lets a shard end to give its place away, if a batch of which none runs here waits for one and no other shard has
    /// begun to end for it within [`ENDING_ALONE_FOR`].
    pub(super) fn end_for_another(self: &Arc<Self>, now: Instant) -> Option<EndingShard> {
        let mut giving = self.giving.lock();
        let is_wanted = giving.wanted.is_some_and(|at| is_recent(now, at));
        let ending_since = giving.ending_since;
        let ends_another = ending_since
            .is_some_and(|since| now.saturating_duration_since(since) < ENDING_ALONE_FOR);
        if !is_wanted || ends_another {
            return None;
        }
        giving.ending_since = Some(now);
        Some(EndingShard {
            works: self.clone(),
            since: now,
        })
    }

    /// A shard of this batch has given its place away.
    pub(super) fn on_place_given(&self, now: Instant, key: &DocumentKey) {
        let given = &mut self.giving.lock().given;
        given.retain(|_, at| is_recent(now, *at));
        given.insert(key.clone(), now);
    }

    /// Whether others come before a batch: a work of it has stalled, or a shard has given its place away just now.
    fn is_paused(&self, now: Instant, key: &DocumentKey) -> bool {
        if self.stalls.lock().is_paused(now, key) {
            return true;
        }
        let giving = self.giving.lock();
        let given = giving.given.get(key);
        given.is_some_and(|at| is_recent(now, *at))
    }

    fn counts(&self) -> (usize, usize) {
        let running = self.running.lock();
        let all: usize = running.values().map(Vec::len).sum();
        let works = running.values().flatten();
        let shards = works.filter(|(work, _)| is_shard(*work)).count();
        (shards, all - shards)
    }

    /// The place of a batch that is due, by its next work; `None` if it needs no room.
    pub(super) fn turn(&self, now: Instant, key: &DocumentKey, work: Option<Work>) -> Turn {
        let Some(work) = work else {
            return Turn::default();
        };
        let is_paused = self.is_paused(now, key);
        let class = match work {
            Work::Finalize => TurnClass::Finalize,
            Work::Validate => TurnClass::Validate,
            Work::Delete => TurnClass::Delete,
            Work::Shard(_) => TurnClass::Shard,
        };
        let is_same_kind = |other: Work| is_shard(other) == is_shard(work);
        let (mut of_tenant, mut of_batch) = (0, 0);
        for (other, works) in &*self.running.lock() {
            let same_kind = works.iter().filter(|(running, _)| is_same_kind(*running));
            let count = same_kind.count();
            if other.tenant == key.tenant {
                of_tenant += count;
            }
            if other == key {
                of_batch = count;
            }
        }
        Turn {
            is_left: false,
            is_paused,
            of_tenant,
            class,
            of_batch,
        }
    }

    /// A work was given back, because no line of it has moved or its storage has failed: other batches come first for a
    /// while.
    pub(super) fn on_stall(&self, now: Instant, key: &DocumentKey) {
        self.stalls.lock().on_stall(now, key);
    }

    /// A model of a batch is refused here, and its validation is left to others until then.
    pub(super) fn on_refusal(&self, now_ms: u64, key: &DocumentKey, until_ms: u64) {
        let mut refused = self.refused.lock();
        refused.retain(|_, until_ms| now_ms < *until_ms);
        refused.insert(key.clone(), until_ms);
    }

    /// This replica has another configuration, which may not refuse what the one before did.
    pub(super) fn forget_refusals(&self) {
        self.refused.lock().clear();
        self.wake.notify_one();
    }

    /// Whether a batch's validation is left to others.
    pub(super) fn leaves_validation(&self, now_ms: u64, key: &DocumentKey) -> bool {
        let refused = self.refused.lock();
        refused.get(key).is_some_and(|until_ms| now_ms < *until_ms)
    }

    pub(super) fn on_done(&self, key: &DocumentKey) {
        self.stalls.lock().on_done(key);
    }

    /// Registers a work. `None` if it runs already.
    pub fn begin(self: &Arc<Self>, key: &DocumentKey, work: Work) -> Option<WorkGuard> {
        let mut running = self.running.lock();
        let works = running.entry(key.clone()).or_default();
        if works.iter().any(|(other, _)| *other == work) {
            return None;
        }
        let (sender, stop) = watch::channel(None);
        works.push((work, sender));
        if is_shard(work) {
            self.shards.inc();
        }
        Some(WorkGuard {
            works: self.clone(),
            key: key.clone(),
            work,
            stop,
        })
    }

    pub fn runs(&self, key: &DocumentKey, work: Work) -> bool {
        self.of_batch(key).contains(&work)
    }

    /// What runs of a batch.
    pub fn of_batch(&self, key: &DocumentKey) -> Vec<Work> {
        let running = self.running.lock();
        let works = running.get(key).into_iter().flatten();
        works.map(|(work, _)| *work).collect()
    }

    /// The batches that something runs of.
    pub fn batches(&self) -> Vec<DocumentKey> {
        self.running.lock().keys().cloned().collect()
    }

    /// Stops works of a batch, each with what `reason` says of it. The first reason counts, but a work that is lost
    /// writes no end, whatever else happens.
    pub fn stop(&self, key: &DocumentKey, reason: impl Fn(Work) -> Option<StopWork>) {
        let running = self.running.lock();
        for (work, sender) in running.get(key).into_iter().flatten() {
            let Some(reason) = reason(*work) else {
                continue;
            };
            sender.send_if_modified(|current| {
                let may_replace = current.is_none() || reason == StopWork::Lost;
                let is_new = may_replace && *current != Some(reason);
                if is_new {
                    *current = Some(reason);
                }
                is_new
            });
        }
    }
}

fn is_recent(now: Instant, at: Instant) -> bool {
    now.saturating_duration_since(at) < WANTED_FOR
}

fn is_shard(work: Work) -> bool {
    matches!(work, Work::Shard(_))
}

impl WorkGuard {
    /// Why the work is to stop; resolves once it is.
    pub async fn stopped(&self) -> StopWork {
        let mut stop = self.stop.clone();
        // The sender lives as long as this guard.
        match stop.wait_for(Option::is_some).await {
            Ok(reason) => (*reason).unwrap_or(StopWork::Lost),
            Err(_) => StopWork::Lost,
        }
    }

    /// Resolves once another replica has the work.
    pub async fn lost(&self) {
        let mut stop = self.stop.clone();
        let is_lost = |reason: &Option<StopWork>| *reason == Some(StopWork::Lost);
        // The sender lives as long as this guard.
        let _ = stop.wait_for(is_lost).await;
    }

    /// Whether another replica has the work now.
    pub fn is_lost(&self) -> bool {
        *self.stop.borrow() == Some(StopWork::Lost)
    }
}

impl Drop for WorkGuard {
    fn drop(&mut self) {
        let mut running = self.works.running.lock();
        if let Some(works) = running.get_mut(&self.key) {
            works.retain(|(work, _)| *work != self.work);
            if works.is_empty() {
                running.remove(&self.key);
            }
        }
        drop(running);
        if is_shard(self.work) {
            self.works.shards.dec();
        }
        self.works.wake.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batches::service::batch_key;
    use crate::ids::Tenant;
    use crate::observe;

    fn works() -> (Arc<Works>, IntGauge) {
        let shards = IntGauge::new("shards", "shards").unwrap();
        (Works::new(shards.clone()), shards)
    }

    #[test]
    fn a_work_runs_once_and_its_room_comes_back() {
        let (works, gauge) = works();
        let a = batch_key("a");
        let mut guards: Vec<WorkGuard> = (0..MAX_SHARDS as u32)
            .map(|shard| works.begin(&a, Work::Shard(shard)).unwrap())
            .collect();
        assert!(works.begin(&a, Work::Shard(0)).is_none());
        assert!(works.runs(&a, Work::Shard(0)) && !works.runs(&batch_key("b"), Work::Shard(0)));
        assert!(!works.has_room(Work::Shard(9)) && works.has_room(Work::Finalize));
        assert_eq!(gauge.get(), MAX_SHARDS as i64);
        guards.pop();
        assert!(works.has_room(Work::Shard(9)));
        assert_eq!(works.batches(), [a]);
        guards.clear();
        assert!(works.batches().is_empty());
        assert_eq!(gauge.get(), 0);
    }

    #[test]
    fn one_shard_ends_for_a_batch_that_has_none_and_finds_no_place() {
        let (works, _) = works();
        let (first, other) = (batch_key("1"), batch_key("2"));
        let now = observe::now();
        let _shard = works.begin(&first, Work::Shard(0)).unwrap();
        works.on_no_room(now, &first, Work::Shard(1));
        works.on_no_room(now, &other, Work::Validate);
        assert!(works.end_for_another(now).is_none());
        works.on_no_room(now, &other, Work::Shard(0));
        assert!(works.end_for_another(now + WANTED_FOR).is_none());
        let ending = works.end_for_another(now).unwrap();
        assert!(works.end_for_another(now).is_none());
        // It has the place now, and must find none anew.
        drop(ending);
        assert!(works.end_for_another(now).is_none());
        works.on_no_room(now, &other, Work::Shard(0));
        assert!(works.end_for_another(now).is_some());
        works.on_stall(now, &other);
        works.on_no_room(now, &other, Work::Shard(0));
        assert!(works.end_for_another(now).is_none());
    }

    #[test]
    fn a_shard_whose_end_takes_long_keeps_no_other_from_ending() {
        let (works, _) = works();
        let waiting = batch_key("1");
        let now = observe::now();
        let ends = |at: Instant| {
            works.on_no_room(at, &waiting, Work::Shard(0));
            works.end_for_another(at)
        };
        let slow = ends(now).unwrap();
        assert!(ends(now + ENDING_ALONE_FOR / 2).is_none());
        let later = now + ENDING_ALONE_FOR;
        let next = ends(later).unwrap();
        assert!(ends(later).is_none());
        // Its end is not that of the next one.
        drop(slow);
        assert!(ends(later).is_none());
        drop(next);
        assert!(ends(later).is_some());
    }

    #[test]
    fn a_batch_that_has_given_a_place_away_comes_after_others_for_a_while() {
        let (works, _) = works();
        let (first, other) = (batch_key("1"), batch_key("2"));
        let now = observe::now();
        let turn = |now, key: &DocumentKey| works.turn(now, key, Some(Work::Shard(9)));
        works.on_place_given(now, &first);
        assert!(turn(now, &other) < turn(now, &first));
        let later = now + WANTED_FOR;
        assert_eq!(turn(later, &other), turn(later, &first));
        // It has not stalled: the next stall is its first.
        works.on_stall(later, &first);
        let after = later + Duration::from_secs(60);
        assert_eq!(turn(after, &other), turn(after, &first));
    }

    #[test]
    fn a_validation_is_left_to_others_for_a_time() {
        let (works, _) = works();
        let [refused, other] = ["1", "2"].map(batch_key);
        works.on_refusal(5, &refused, 10);
        assert!(works.leaves_validation(9, &refused) && !works.leaves_validation(9, &other));
        assert!(!works.leaves_validation(10, &refused));
        works.on_refusal(10, &other, 20);
        assert_eq!(works.refused.lock().len(), 1);
        works.forget_refusals();
        assert!(!works.leaves_validation(10, &other));
    }

    #[test]
    fn of_two_batches_that_have_given_places_away_neither_takes_its_own_back() {
        let (works, _) = works();
        let [first, second, other] = ["1", "2", "3"].map(batch_key);
        let now = observe::now();
        let turn = |now, key: &DocumentKey| works.turn(now, key, Some(Work::Shard(9)));
        works.on_place_given(now, &first);
        let soon = now + WANTED_FOR / 2;
        works.on_place_given(soon, &second);
        for giver in [&first, &second] {
            assert!(turn(soon, &other) < turn(soon, giver));
            // It asks nobody for a place meanwhile.
            works.on_no_room(soon, giver, Work::Shard(0));
            assert!(works.end_for_another(soon).is_none());
        }
        let later = now + WANTED_FOR;
        assert_eq!(turn(later, &other), turn(later, &first));
        assert!(turn(later, &other) < turn(later, &second));
        // What is over is forgotten.
        works.on_place_given(later, &other);
        assert_eq!(works.giving.lock().given.len(), 2);
    }

    #[test]
    fn the_tenant_and_then_the_batch_of_which_the_fewest_shards_run_is_next() {
        let (works, _) = works();
        let of = |tenant: &str, id: &str| DocumentKey {
            tenant: Tenant::of(tenant),
            ..batch_key(id)
        };
        let (first, second, other) = (of("a", "1"), of("a", "2"), of("b", "3"));
        let now = observe::now();
        let turn = |key: &DocumentKey| works.turn(now, key, Some(Work::Shard(9)));
        assert_eq!(turn(&first), turn(&other));
        let _shard = works.begin(&first, Work::Shard(0)).unwrap();
        let _check = works.begin(&other, Work::Validate).unwrap();
        assert!(turn(&other) < turn(&second) && turn(&second) < turn(&first));
        works.on_stall(now, &other);
        assert!(turn(&first) < turn(&other));
        works.on_done(&other);
        assert!(turn(&other) < turn(&second));
    }

    #[test]
    fn what_ends_a_batch_comes_before_validations_and_these_before_deletions() {
        let (works, _) = works();
        let (ends, new) = (batch_key("1"), batch_key("2"));
        let now = observe::now();
        let turn = |key: &DocumentKey, work| works.turn(now, key, Some(work));
        let _running = works.begin(&ends, Work::Validate).unwrap();
        assert!(turn(&ends, Work::Finalize) < turn(&new, Work::Validate));
        assert!(turn(&ends, Work::Validate) < turn(&new, Work::Delete));
        // Another tenant does not wait for all ends of this one.
        let other = DocumentKey {
            tenant: Tenant::of("b"),
            ..batch_key("3")
        };
        assert!(turn(&other, Work::Delete) < turn(&new, Work::Finalize));
        works.on_stall(now, &ends);
        assert!(turn(&new, Work::Delete) < turn(&ends, Work::Finalize));
    }

    #[tokio::test]
    async fn what_is_lost_stays_lost() {
        let (works, _) = works();
        let a = batch_key("a");
        let shard = works.begin(&a, Work::Shard(0)).unwrap();
        let check = works.begin(&a, Work::Validate).unwrap();
        let shards = |work| is_shard(work).then_some(StopWork::Stopping);
        works.stop(&a, shards);
        assert_eq!(shard.stopped().await, StopWork::Stopping);
        assert!(!shard.is_lost() && !check.is_lost());
        works.stop(&a, |_| Some(StopWork::Lost));
        works.stop(&a, shards);
        assert_eq!(shard.stopped().await, StopWork::Lost);
        assert!(check.is_lost());
    }
}
