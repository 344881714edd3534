//! Adds up the load reports that the dp ranks of an engine send with their KV events.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::LoadReport;
use crate::fleet::Worker;

/// Older reports are ignored, and then there is no sum. Engines report their load with each batch of KV events,
/// and about every second while there are none.
const MAX_AGE: Duration = Duration::from_secs(10);

/// The last load report of each rank of a worker.
#[derive(Debug)]
pub struct RankLoads {
    worker: Arc<Worker>,
    reports: Mutex<Reports>,
}

#[derive(Debug, Default)]
struct Reports {
    rank_count: usize,
    by_rank: BTreeMap<u32, LoadReport>,
}

/// One rank's load, until the rank is no longer followed.
#[derive(Debug)]
pub struct RankLoad {
    ranks: Arc<RankLoads>,
    rank: u32,
}

impl RankLoads {
    pub fn new(worker: Arc<Worker>) -> Arc<Self> {
        let reports = Mutex::default();
        Arc::new(Self { worker, reports })
    }

    pub fn set_rank_count(&self, rank_count: usize) {
        self.reports.lock().rank_count = rank_count;
    }

    pub fn rank(self: &Arc<Self>, rank: u32) -> RankLoad {
        let ranks = self.clone();
        RankLoad { ranks, rank }
    }
}

impl RankLoad {
    /// Stores the rank's report. The sum becomes the worker's report once all ranks have recent ones.
    pub fn report(&self, now: Instant, mut load: LoadReport) {
        // NaN counts as 0.
        load.kv_usage = load.kv_usage.clamp(0.0, 1.0).max(0.0);
        let mut reports = self.ranks.reports.lock();
        reports.by_rank.insert(self.rank, load);
        let Some(sum) = reports.sum(now) else { return };
        let load = &self.ranks.worker.load;
        // The report from the engine's `/metrics` may be newer.
        if load.reported().is_none_or(|stored| stored.at <= sum.at) {
            load.report(sum);
        }
    }
}

impl Drop for RankLoad {
    fn drop(&mut self) {
        self.ranks.reports.lock().by_rank.remove(&self.rank);
    }
}

impl Reports {
    /// Requests are added up; cache usage is the mean, since all ranks have caches of one size. The sum is as old as
    /// its oldest report.
    fn sum(&self, now: Instant) -> Option<LoadReport> {
        let at = self.by_rank.values().map(|load| load.at).min()?;
        if self.by_rank.len() < self.rank_count || now.saturating_duration_since(at) > MAX_AGE {
            return None;
        }
        let add =
            |of: fn(&LoadReport) -> u32| self.by_rank.values().map(of).fold(0, u32::saturating_add);
        let usage: f64 = self.by_rank.values().map(|load| load.kv_usage).sum();
        Some(LoadReport {
            at,
            running: add(|load| load.running),
            waiting: add(|load| load.waiting),
            deferred: add(|load| load.deferred),
            kv_usage: usage / self.by_rank.len() as f64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::registry::tests::worker;
    use crate::observe;

    fn load(at: Instant, running: u32, waiting: u32, kv_usage: f64) -> LoadReport {
        LoadReport {
            at,
            running,
            waiting,
            deferred: 0,
            kv_usage,
        }
    }

    fn reported(worker: &Worker) -> Option<(u32, u32, f64)> {
        let reported = worker.load.reported()?;
        Some((reported.running, reported.waiting, reported.kv_usage))
    }

    #[test]
    fn ranks_add_up_once_all_have_reported() {
        let (worker, now) = (worker("a"), observe::now());
        let ranks = RankLoads::new(worker.clone());
        ranks.set_rank_count(2);
        let (first, second) = (ranks.rank(0), ranks.rank(1));
        first.report(now, load(now, 3, 1, 0.5));
        assert_eq!(reported(&worker), None);
        second.report(now, load(now, 2, 0, 0.25));
        assert_eq!(reported(&worker), Some((5, 1, 0.375)));
        assert_eq!(worker.load.requests(), 6);
        // Without a recent report of every rank there is no new sum.
        let later = now + MAX_AGE + Duration::from_millis(1);
        first.report(later, load(later, 9, 9, 0.5));
        assert_eq!(reported(&worker), Some((5, 1, 0.375)));
        second.report(later, load(later, 0, 0, f64::NAN));
        assert_eq!(reported(&worker), Some((9, 9, 0.25)));
        drop(second);
        first.report(later, load(later, 1, 1, 0.5));
        assert_eq!(reported(&worker), Some((9, 9, 0.25)));
    }

    #[test]
    fn an_older_report_does_not_replace_a_newer_one() {
        let (worker, now) = (worker("a"), observe::now());
        let ranks = RankLoads::new(worker.clone());
        ranks.set_rank_count(1);
        worker.load.report(LoadReport {
            at: now,
            running: 1,
            waiting: 0,
            deferred: 0,
            kv_usage: 0.0,
        });
        let before = now.checked_sub(Duration::from_millis(1)).unwrap();
        ranks.rank(0).report(now, load(before, 7, 0, 0.0));
        assert_eq!(reported(&worker), Some((1, 0, 0.0)));
        ranks.rank(0).report(now, load(now, 7, 0, 0.0));
        assert_eq!(reported(&worker), Some((7, 0, 0.0)));
    }
}
