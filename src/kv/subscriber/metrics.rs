//! Metrics of each rank's KV events. A rank's series are removed when its last subscriber ends.

use std::sync::Arc;

use parking_lot::Mutex;
use prometheus::{Gauge, Histogram, IntCounter, IntCounterVec, IntGauge};
use rustc_hash::FxHashMap;

use crate::kv::event::Tier;
use crate::kv::event_filter::IgnoredReason;
use crate::kv::stream::{Counts, ResyncReason};
use crate::observe::metrics::{Registry, metric_table};

/// From an idle router beside its engine to one that cannot keep up.
const LAG_SECONDS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 10.0,
];
/// Ranks with series of their own. Those beyond share counters with the labels `worker="other", rank="other"`, and
/// have no gauges, which do not add up.
const RANKS_MAX: usize = 1_000;
const OTHER: &str = "other";
const STATES: [&str; 4] = ["cold", "partial", "live", "stale"];
const VERIFICATIONS: [&str; 2] = ["passed", "failed"];

#[derive(Clone, Debug)]
pub struct Metrics(Arc<Families>);

// The rank stands first: names of workers end with numbers, and label values that are the same text in a row are one
// series (`observe/metrics.rs`).
metric_table! {
    #[derive(Debug)]
    struct Families {
        state: gauges "warmroute_kv_state" ["rank", "worker", "state"]
            "1 for the current state of the router's knowledge of a rank's cache: cold, partial, live or stale.",
        blocks: gauges "warmroute_kv_blocks" ["rank", "worker", "tier"]
            "Distinct blocks cached by a rank according to its KV events, by tier.",
        connected: gauges "warmroute_kv_connected" ["rank", "worker"]
            "1 while the source of a rank's KV events is connected.",
        last_sequence: gauges "warmroute_kv_last_sequence" ["rank", "worker"]
            "Sequence number of the last batch of KV events applied; -1 before the first.",
        memory_bytes: gauges "warmroute_kv_memory_bytes" ["rank", "worker"]
            "Memory used by the tree of a rank's cached blocks, and by pages that are smaller than blocks.",
        last_lag: real_gauges "warmroute_kv_last_lag_seconds" ["rank", "worker"]
            "Lag of the last live batch; it includes the difference of the hosts' clocks, so it may be negative.",
        batches: counters "warmroute_kv_batches_total" ["rank", "worker"] "Batches of KV events applied.",
        events: counters "warmroute_kv_events_total" ["rank", "worker"] "KV events applied or ignored.",
        stored: counters "warmroute_kv_stored_blocks_total" ["rank", "worker"]
            "Blocks reported as stored and added to the tree, counted once for each copy.",
        removed: counters "warmroute_kv_removed_blocks_total" ["rank", "worker"]
            "Blocks reported as removed, counted once for each copy.",
        unknown: counters "warmroute_kv_unknown_removals_total" ["rank", "worker"]
            "Removals of blocks that were not in the tree.",
        ignored: counters "warmroute_kv_ignored_events_total" ["rank", "worker", "reason"]
            "KV events that were not applied to the tree, by reason.",
        resyncs: counters "warmroute_kv_resyncs_total" ["rank", "worker", "reason"]
            "Times that a rank's tree was cleared and built anew, by reason.",
        gaps: counters "warmroute_kv_gaps_total" ["rank", "worker"] "Gaps in the sequence numbers of KV event batches.",
        verifications: counters "warmroute_kv_verifications_total" ["rank", "worker", "result"]
            "Replays that verified whether the engine's process is still the same, by result.",
        dropped_batches: counters "warmroute_kv_dropped_batches_total" ["rank", "worker"]
            "Batches dropped because the buffer was full during a replay; they are requested again.",
        /// Without a rank label: the buckets of a whole fleet would dominate the exposition.
        lag: histogram "warmroute_kv_lag_seconds" in LAG_SECONDS
            "From a live batch's timestamp (the engine's clock) until it was applied (this host's clock).",
        ranks_without_series: gauge "warmroute_kv_ranks_without_series"
            "Ranks with KV events beyond the first 1,000, which have no series of their own.",
    } and {
        /// Subscribers by worker and rank, of those with series; two while one replaces another.
        users: Mutex<FxHashMap<(Arc<str>, u32), u32>>,
        /// Families for the gauges of ranks without series of their own. They are never scraped.
        unscraped: Option<Arc<Families>>,
    }
}

impl Metrics {
    pub fn new(registry: &Registry) -> Self {
        let mut families = Families::new(registry);
        families.unscraped = Some(Arc::new(Families::new(&Registry::default())));
        Self(Arc::new(families))
    }

    pub(super) fn of(&self, worker: &Arc<str>, rank: u32) -> Meters {
        let families = &self.0;
        let has_series = {
            let mut users = families.users.lock();
            let key = (worker.clone(), rank);
            let has_series = users.len() < RANKS_MAX || users.contains_key(&key);
            if has_series {
                *users.entry(key).or_default() += 1;
            }
            has_series
        };
        let (worker, rank_text) = if has_series {
            (worker.clone(), rank.to_string())
        } else {
            (OTHER.into(), OTHER.to_owned())
        };
        if !has_series {
            families.ranks_without_series.inc();
        }
        let unscraped = families.unscraped.as_ref().filter(|_| !has_series);
        let gauges = unscraped.unwrap_or(families).clone();
        let labels: &[&str] = &[&rank_text, &worker];
        let of_tier = |tier: Tier| [&*rank_text, &*worker, tier.as_str()];
        Meters {
            blocks: Tier::ALL.map(|tier| gauges.blocks.with_label_values(&of_tier(tier))),
            connected: gauges.connected.with_label_values(labels),
            last_sequence: gauges.last_sequence.with_label_values(labels),
            memory_bytes: gauges.memory_bytes.with_label_values(labels),
            last_lag: gauges.last_lag.with_label_values(labels),
            batches: families.batches.with_label_values(labels),
            events: families.events.with_label_values(labels),
            stored: families.stored.with_label_values(labels),
            removed: families.removed.with_label_values(labels),
            lag: families.lag.clone(),
            ignored: FxHashMap::default(),
            counted: Counts::default(),
            families: families.clone(),
            gauges,
            has_series,
            rank,
            worker,
            rank_text,
        }
    }
}

#[derive(Debug)]
pub(super) struct Meters {
    pub(super) blocks: [IntGauge; Tier::COUNT],
    pub(super) connected: IntGauge,
    last_sequence: IntGauge,
    pub(super) memory_bytes: IntGauge,
    last_lag: Gauge,
    pub(super) batches: IntCounter,
    pub(super) events: IntCounter,
    pub(super) stored: IntCounter,
    pub(super) removed: IntCounter,
    lag: Histogram,
    ignored: FxHashMap<IgnoredReason, IntCounter>,
    /// The stream's counts as last added to the counters.
    counted: Counts,
    /// The label values.
    worker: Arc<str>,
    rank_text: String,
    rank: u32,
    has_series: bool,
    families: Arc<Families>,
    gauges: Arc<Families>,
}

impl Meters {
    pub(super) fn state(&self, state: &str) {
        for other in STATES {
            self.gauges
                .state
                .with_label_values(&[&*self.rank_text, &*self.worker, other])
                .set(i64::from(other == state));
        }
    }

    pub(super) fn ignored(&mut self, why: IgnoredReason) {
        let (families, worker, rank) = (&self.families, &self.worker, &self.rank_text);
        self.ignored
            .entry(why)
            .or_insert_with(|| {
                let labels = [&**rank, &**worker, why.as_str()];
                families.ignored.with_label_values(&labels)
            })
            .inc();
    }

    pub(super) fn resync(&self, reason: ResyncReason) {
        self.families
            .resyncs
            .with_label_values(&[&*self.rank_text, &*self.worker, reason.as_str()])
            .inc();
    }

    pub(super) fn lag(&self, lag_s: f64) {
        self.lag.observe(lag_s.max(0.0));
        self.last_lag.set(lag_s);
    }

    pub(super) fn last_sequence(&self, last: Option<u64>) {
        let last = last.map_or(-1, |last| i64::try_from(last).unwrap_or(i64::MAX));
        self.last_sequence.set(last);
    }

    pub(super) fn counts(&mut self, counts: Counts) {
        let before = std::mem::replace(&mut self.counted, counts);
        let families = &self.families;
        self.add(&families.gaps, &[], counts.gaps - before.gaps);
        let passed = counts.verifications_passed - before.verifications_passed;
        self.add(&families.verifications, &[VERIFICATIONS[0]], passed);
        let failed = counts.verifications_failed - before.verifications_failed;
        self.add(&families.verifications, &[VERIFICATIONS[1]], failed);
        let dropped = counts.dropped_batches - before.dropped_batches;
        self.add(&families.dropped_batches, &[], dropped);
    }

    pub(super) fn unknown(&self, count: u64) {
        self.add(&self.families.unknown, &[], count);
    }

    /// Adds to a counter of events that are rare: its series begins with the first one, since each series is a line
    /// of `/metrics` for each rank.
    fn add(&self, family: &IntCounterVec, last: &[&str], count: u64) {
        if count == 0 {
            return;
        }
        let mut labels = vec![&*self.rank_text, &*self.worker];
        labels.extend(last);
        family.with_label_values(&labels).inc_by(count);
    }
}

impl Drop for Meters {
    fn drop(&mut self) {
        let families = &self.families;
        if !self.has_series {
            families.ranks_without_series.dec();
            return;
        }
        let mut users = families.users.lock();
        if let Some(left) = users.get_mut(&(self.worker.clone(), self.rank)) {
            *left -= 1;
            if *left > 0 {
                return;
            }
        }
        users.remove(&(self.worker.clone(), self.rank));
        // Removing a series that was never set is an error; ignore it.
        let labels: &[&str] = &[&self.rank_text, &self.worker];
        for family in [
            &families.batches,
            &families.events,
            &families.stored,
            &families.removed,
            &families.unknown,
            &families.gaps,
            &families.dropped_batches,
        ] {
            let _ = family.remove_label_values(labels);
        }
        for family in [
            &families.connected,
            &families.last_sequence,
            &families.memory_bytes,
        ] {
            let _ = family.remove_label_values(labels);
        }
        let _ = families.last_lag.remove_label_values(labels);
        let with = |last| [&*self.rank_text, &*self.worker, last];
        for state in STATES {
            let _ = families.state.remove_label_values(&with(state));
        }
        for tier in Tier::ALL {
            let _ = families.blocks.remove_label_values(&with(tier.as_str()));
        }
        for proof in VERIFICATIONS {
            let _ = families.verifications.remove_label_values(&with(proof));
        }
        for why in IgnoredReason::ALL {
            let _ = families.ignored.remove_label_values(&with(why.as_str()));
        }
        for reason in ResyncReason::ALL {
            let _ = families.resyncs.remove_label_values(&with(reason.as_str()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All series that the KV events of one rank can have.
    fn rank(metrics: &Metrics, worker: &str, rank: u32) -> Meters {
        let mut meters = metrics.of(&worker.into(), rank);
        meters.unknown(1);
        meters.counts(Counts {
            gaps: 1,
            verifications_passed: 1,
            ..Counts::default()
        });
        meters.state("live");
        meters.last_sequence(Some(1_000_000));
        meters.lag(0.0123);
        meters.blocks[0].set(12_345);
        meters.memory_bytes.set(123_456_789);
        meters.batches.inc_by(1_000_000);
        meters.events.inc_by(10_000_000);
        meters.ignored(IgnoredReason::ALL[0]);
        meters.resync(ResyncReason::ALL[0]);
        meters
    }

    fn lines_of(registry: &Registry, worker: &str) -> usize {
        let label = format!("worker=\"{worker}\"");
        let text = registry.text();
        text.lines().filter(|line| line.contains(&label)).count()
    }

    #[test]
    fn the_series_of_a_rank_are_removed_with_its_last_subscriber() {
        let registry = Registry::default();
        let metrics = Metrics::new(&registry);
        let stays = rank(&metrics, "stays", 0);
        let (before, after) = (rank(&metrics, "gone", 0), rank(&metrics, "gone", 0));
        drop(before);
        assert!(lines_of(&registry, "gone") > 10);
        drop(after);
        assert_eq!(lines_of(&registry, "gone"), 0);
        assert!(lines_of(&registry, "stays") > 10);
        drop(stays);
    }

    #[test]
    fn ranks_of_numbered_workers_have_series_of_their_own() {
        let registry = Registry::default();
        let metrics = Metrics::new(&registry);
        let first = rank(&metrics, "w1", 10);
        let second = rank(&metrics, "w11", 0);
        let lines = ["w1", "w11"].map(|worker| lines_of(&registry, worker));
        assert!(lines[0] > 10);
        assert_eq!(lines[0], lines[1]);
        drop((first, second));
    }

    /// `/metrics` is to stay below 8 MB with 1,000 workers, whatever their number of ranks.
    #[test]
    fn the_kv_metrics_of_1000_workers_take_less_than_2_5_mb() {
        let registry = Registry::default();
        let metrics = Metrics::new(&registry);
        let ranks: Vec<Meters> = (0..RANKS_MAX as u32 + 200)
            .map(|n| {
                let number = n / 2;
                let worker = format!("vllm-llama-70b-{number:04}.inference.svc.cluster.local:8000");
                rank(&metrics, &worker, n % 2)
            })
            .collect();
        let bytes = registry.text().len();
        assert!(bytes < 2_500_000, "{bytes}");
        // The last 200 share what counts; their gauges are nowhere.
        let text = registry.text();
        let is = |line: &str| assert!(text.lines().any(|found| found == line), "{line}");
        is(r#"warmroute_kv_batches_total{rank="other",worker="other"} 200000000"#);
        is("warmroute_kv_ranks_without_series 200");
        assert!(!text.contains(r#"warmroute_kv_connected{rank="other"#));
        drop(ranks);
        let left = registry.text();
        assert!(left.contains("warmroute_kv_ranks_without_series 0"));
        assert!(!left.contains("vllm-llama"));
    }
}
