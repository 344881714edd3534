//! Metrics of each rank's KV events. A rank's series are removed when its last subscriber ends.

use std::sync::Arc;

use parking_lot::Mutex;
use prometheus::{
    Gauge, GaugeVec, Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec,
};
use rustc_hash::FxHashMap;

use crate::kv::event::Tier;
use crate::kv::event_filter::IgnoredReason;
use crate::kv::stream::{Counts, ResyncReason};
use crate::observe::metrics::Registry;

/// From an idle router beside its engine to one that cannot keep up.
const LAG_SECONDS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 10.0,
];
const STATES: [&str; 4] = ["cold", "partial", "live", "stale"];
const VERIFICATIONS: [&str; 2] = ["passed", "failed"];

#[derive(Clone, Debug)]
pub struct Metrics(Arc<Families>);

#[derive(Debug)]
struct Families {
    state: IntGaugeVec,
    blocks: IntGaugeVec,
    connected: IntGaugeVec,
    last_sequence: IntGaugeVec,
    memory_bytes: IntGaugeVec,
    last_lag: GaugeVec,
    batches: IntCounterVec,
    events: IntCounterVec,
    stored: IntCounterVec,
    removed: IntCounterVec,
    unknown: IntCounterVec,
    ignored: IntCounterVec,
    resyncs: IntCounterVec,
    gaps: IntCounterVec,
    verifications: IntCounterVec,
    dropped_batches: IntCounterVec,
    lag: HistogramVec,
    /// Subscribers by worker and rank; two while one replaces another.
    users: Mutex<FxHashMap<(Arc<str>, u32), u32>>,
}

impl Metrics {
    pub fn new(registry: &Registry) -> Self {
        let counters = |name, help| registry.counters(name, help, &["worker", "rank"]);
        let by = |name, help, label| registry.counters(name, help, &["worker", "rank", label]);
        let gauges = |name, help, label| registry.gauges(name, help, &["worker", "rank", label]);
        Self(Arc::new(Families {
            state: gauges(
                "warmroute_kv_state",
                "1 for the current state of the router's knowledge of a rank's cache: cold, partial, live or stale.",
                "state",
            ),
            blocks: gauges(
                "warmroute_kv_blocks",
                "Distinct blocks cached by a rank according to its KV events, by tier.",
                "tier",
            ),
            connected: registry.gauges(
                "warmroute_kv_connected",
                "1 while the source of a rank's KV events is connected.",
                &["worker", "rank"],
            ),
            last_sequence: registry.gauges(
                "warmroute_kv_last_sequence",
                "Sequence number of the last batch of KV events applied; -1 before the first.",
                &["worker", "rank"],
            ),
            memory_bytes: registry.gauges(
                "warmroute_kv_memory_bytes",
                "Memory used by the tree of a rank's cached blocks.",
                &["worker", "rank"],
            ),
            last_lag: registry.real_gauges(
                "warmroute_kv_last_lag_seconds",
                "Lag of the last live batch; it includes the difference of the hosts' clocks, so it may be negative.",
                &["worker", "rank"],
            ),
            batches: counters(
                "warmroute_kv_batches_total",
                "Batches of KV events applied.",
            ),
            events: counters("warmroute_kv_events_total", "KV events applied or ignored."),
            stored: counters(
                "warmroute_kv_stored_blocks_total",
                "Blocks reported as stored and added to the tree, counted once for each copy.",
            ),
            removed: counters(
                "warmroute_kv_removed_blocks_total",
                "Blocks reported as removed, counted once for each copy.",
            ),
            unknown: counters(
                "warmroute_kv_unknown_removals_total",
                "Removals of blocks that were not in the tree.",
            ),
            ignored: by(
                "warmroute_kv_ignored_events_total",
                "KV events that were not applied to the tree, by reason.",
                "reason",
            ),
            resyncs: by(
                "warmroute_kv_resyncs_total",
                "Times that a rank's tree was cleared and built anew, by reason.",
                "reason",
            ),
            gaps: counters(
                "warmroute_kv_gaps_total",
                "Gaps in the sequence numbers of KV event batches.",
            ),
            verifications: by(
                "warmroute_kv_verifications_total",
                "Replays that verified whether the engine's process is still the same, by result.",
                "result",
            ),
            dropped_batches: counters(
                "warmroute_kv_dropped_batches_total",
                "Batches dropped because the buffer was full during a replay; they are requested again.",
            ),
            lag: registry.histograms(
                "warmroute_kv_lag_seconds",
                "From a live batch's timestamp (the engine's clock) until it was applied (this host's clock).",
                LAG_SECONDS,
                // Without a rank label: the buckets of a whole fleet would dominate the exposition.
                &[],
            ),
            users: Mutex::default(),
        }))
    }

    pub(super) fn of(&self, worker: &Arc<str>, rank: u32) -> Meters {
        let families = self.0.clone();
        *families
            .users
            .lock()
            .entry((worker.clone(), rank))
            .or_default() += 1;
        let rank_text = rank.to_string();
        let labels: &[&str] = &[worker, &rank_text];
        let with = |last| [&**worker, &*rank_text, last];
        Meters {
            blocks: Tier::ALL.map(|tier| families.blocks.with_label_values(&with(tier.as_str()))),
            connected: families.connected.with_label_values(labels),
            last_sequence: families.last_sequence.with_label_values(labels),
            memory_bytes: families.memory_bytes.with_label_values(labels),
            last_lag: families.last_lag.with_label_values(labels),
            batches: families.batches.with_label_values(labels),
            events: families.events.with_label_values(labels),
            stored: families.stored.with_label_values(labels),
            removed: families.removed.with_label_values(labels),
            unknown: families.unknown.with_label_values(labels),
            gaps: families.gaps.with_label_values(labels),
            passed: families
                .verifications
                .with_label_values(&with(VERIFICATIONS[0])),
            failed: families
                .verifications
                .with_label_values(&with(VERIFICATIONS[1])),
            dropped_batches: families.dropped_batches.with_label_values(labels),
            lag: families.lag.with_label_values::<&str>(&[]),
            ignored: FxHashMap::default(),
            counted: Counts::default(),
            worker: worker.clone(),
            rank,
            rank_text,
            families,
        }
    }
}

/// One rank's series.
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
    pub(super) unknown: IntCounter,
    lag: Histogram,
    gaps: IntCounter,
    passed: IntCounter,
    failed: IntCounter,
    dropped_batches: IntCounter,
    ignored: FxHashMap<IgnoredReason, IntCounter>,
    /// The stream's counts as last added to the counters.
    counted: Counts,
    worker: Arc<str>,
    rank: u32,
    rank_text: String,
    families: Arc<Families>,
}

impl Meters {
    pub(super) fn state(&self, state: &str) {
        for other in STATES {
            self.families
                .state
                .with_label_values(&[&*self.worker, &*self.rank_text, other])
                .set(i64::from(other == state));
        }
    }

    pub(super) fn ignored(&mut self, why: IgnoredReason) {
        let (families, worker, rank) = (&self.families, &self.worker, &self.rank_text);
        self.ignored
            .entry(why)
            .or_insert_with(|| {
                let labels = [&**worker, &**rank, why.as_str()];
                families.ignored.with_label_values(&labels)
            })
            .inc();
    }

    pub(super) fn resync(&self, reason: ResyncReason) {
        self.families
            .resyncs
            .with_label_values(&[&*self.worker, &*self.rank_text, reason.as_str()])
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
        self.gaps.inc_by(counts.gaps - before.gaps);
        self.passed
            .inc_by(counts.verifications_passed - before.verifications_passed);
        self.failed
            .inc_by(counts.verifications_failed - before.verifications_failed);
        self.dropped_batches
            .inc_by(counts.dropped_batches - before.dropped_batches);
    }
}

impl Drop for Meters {
    fn drop(&mut self) {
        let families = &self.families;
        let mut users = families.users.lock();
        if let Some(left) = users.get_mut(&(self.worker.clone(), self.rank)) {
            *left -= 1;
            if *left > 0 {
                return;
            }
        }
        users.remove(&(self.worker.clone(), self.rank));
        // Removing a series that was never set is an error; ignore it.
        let labels: &[&str] = &[&self.worker, &self.rank_text];
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
        let with = |last| [&*self.worker, &*self.rank_text, last];
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
