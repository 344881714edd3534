//! The load of an engine whose ranks tell theirs one by one, beside their cache events, as one report.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Reported;
use crate::fleet::Worker;

/// What a rank told longer ago is not of now, and without it there is no sum. Engines tell their load
/// with each batch, and about every second where there are none.
const AGE_MAX: Duration = Duration::from_secs(10);

/// What each rank of a worker told last.
#[derive(Debug)]
pub struct Ranks {
    worker: Arc<Worker>,
    told: Mutex<Told>,
}

#[derive(Debug, Default)]
struct Told {
    /// How many ranks there are.
    count: usize,
    by: BTreeMap<u32, Reported>,
}

/// One rank, for as long as it is followed.
#[derive(Debug)]
pub struct Rank {
    ranks: Arc<Ranks>,
    rank: u32,
}

impl Ranks {
    pub fn new(worker: Arc<Worker>) -> Arc<Self> {
        let told = Mutex::default();
        Arc::new(Self { worker, told })
    }

    pub fn set_count(&self, count: usize) {
        self.told.lock().count = count;
    }

    pub fn rank(self: &Arc<Self>, rank: u32) -> Rank {
        let ranks = self.clone();
        Rank { ranks, rank }
    }
}

impl Rank {
    /// Takes what the rank tells. It becomes the worker's when all ranks have told theirs lately.
    pub fn tell(&self, now: Instant, mut load: Reported) {
        // Whatever is no share counts as none.
        load.kv_usage = load.kv_usage.clamp(0.0, 1.0).max(0.0);
        let mut told = self.ranks.told.lock();
        told.by.insert(self.rank, load);
        let Some(sum) = told.sum(now) else { return };
        let load = &self.ranks.worker.load;
        // The engine's own page may be newer.
        if load.reported().is_none_or(|known| known.at <= sum.at) {
            load.report(sum);
        }
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        self.ranks.told.lock().by.remove(&self.rank);
    }
}

impl Told {
    /// Requests add up; of the caches, which are alike, the part in use is the mean. As old as the
    /// oldest of it.
    fn sum(&self, now: Instant) -> Option<Reported> {
        let at = self.by.values().map(|told| told.at).min()?;
        if self.by.len() < self.count || now.saturating_duration_since(at) > AGE_MAX {
            return None;
        }
        let add = |of: fn(&Reported) -> u32| self.by.values().map(of).fold(0, u32::saturating_add);
        let usage: f64 = self.by.values().map(|told| told.kv_usage).sum();
        Some(Reported {
            at,
            running: add(|told| told.running),
            waiting: add(|told| told.waiting),
            kv_usage: usage / self.by.len() as f64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::registry::tests::worker;
    use crate::observe;

    fn load(at: Instant, running: u32, waiting: u32, kv_usage: f64) -> Reported {
        Reported {
            at,
            running,
            waiting,
            kv_usage,
        }
    }

    fn reported(worker: &Worker) -> Option<(u32, u32, f64)> {
        let reported = worker.load.reported()?;
        Some((reported.running, reported.waiting, reported.kv_usage))
    }

    #[test]
    fn ranks_add_up_once_all_have_told_theirs() {
        let (worker, now) = (worker("a"), observe::now());
        let ranks = Ranks::new(worker.clone());
        ranks.set_count(2);
        let (first, second) = (ranks.rank(0), ranks.rank(1));
        first.tell(now, load(now, 3, 1, 0.5));
        assert_eq!(reported(&worker), None);
        second.tell(now, load(now, 2, 0, 0.25));
        assert_eq!(reported(&worker), Some((5, 1, 0.375)));
        assert_eq!(worker.load.requests(), 6);
        // One that is silent for long is not known any more.
        let later = now + AGE_MAX + Duration::from_millis(1);
        first.tell(later, load(later, 9, 9, 0.5));
        assert_eq!(reported(&worker), Some((5, 1, 0.375)));
        second.tell(later, load(later, 0, 0, f64::NAN));
        assert_eq!(reported(&worker), Some((9, 9, 0.25)));
        drop(second);
        first.tell(later, load(later, 1, 1, 0.5));
        assert_eq!(reported(&worker), Some((9, 9, 0.25)));
    }

    #[test]
    fn what_was_told_late_does_not_replace_what_is_newer() {
        let (worker, now) = (worker("a"), observe::now());
        let ranks = Ranks::new(worker.clone());
        ranks.set_count(1);
        worker.load.report(Reported {
            at: now,
            running: 1,
            waiting: 0,
            kv_usage: 0.0,
        });
        let before = now.checked_sub(Duration::from_millis(1)).unwrap();
        ranks.rank(0).tell(now, load(before, 7, 0, 0.0));
        assert_eq!(reported(&worker), Some((1, 0, 0.0)));
        ranks.rank(0).tell(now, load(now, 7, 0, 0.0));
        assert_eq!(reported(&worker), Some((7, 0, 0.0)));
    }
}
