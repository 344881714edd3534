//! What is counted of each rank's events. The labels of a rank go when its last subscriber goes.

use std::sync::Arc;

use parking_lot::Mutex;
use prometheus::{
    Gauge, GaugeVec, Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec,
};
use rustc_hash::FxHashMap;

use crate::kv::admit::Filtered;
use crate::kv::event::Tier;
use crate::kv::stream::{Counts, Reset};
use crate::observe::metrics::Registry;

/// Seconds, from an idle router beside its engine to one that cannot keep up.
const LAG_SECONDS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 10.0,
];
const STATES: [&str; 4] = ["cold", "partial", "live", "stale"];
const PROOFS: [&str; 2] = ["kept", "failed"];

#[derive(Clone, Debug)]
pub struct Metrics(Arc<Families>);

#[derive(Debug)]
struct Families {
    state: IntGaugeVec,
    blocks: IntGaugeVec,
    connected: IntGaugeVec,
    last_number: IntGaugeVec,
    memory_bytes: IntGaugeVec,
    last_lag: GaugeVec,
    batches: IntCounterVec,
    events: IntCounterVec,
    stored: IntCounterVec,
    removed: IntCounterVec,
    unknown: IntCounterVec,
    filtered: IntCounterVec,
    resets: IntCounterVec,
    gaps: IntCounterVec,
    proofs: IntCounterVec,
    held_dropped: IntCounterVec,
    lag: HistogramVec,
    /// Subscribers by worker and rank: while one takes another's place there are two.
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
                "1 for the state that what is known of a rank's cache is in: cold, partial, live, stale.",
                "state",
            ),
            blocks: gauges(
                "warmroute_kv_blocks",
                "Blocks that a rank reports to hold, by tier.",
                "tier",
            ),
            connected: registry.gauges(
                "warmroute_kv_connected",
                "1 while a rank's source of cache events is connected.",
                &["worker", "rank"],
            ),
            last_number: registry.gauges(
                "warmroute_kv_last_number",
                "The engine's number of the last batch applied; -1 while there is none.",
                &["worker", "rank"],
            ),
            memory_bytes: registry.gauges(
                "warmroute_kv_memory_bytes",
                "What is taken by what is known of a rank's cache.",
                &["worker", "rank"],
            ),
            last_lag: registry.real_gauges(
                "warmroute_kv_last_lag_seconds",
                "Lag of the last live batch. Hosts' clocks differ, so it may be negative.",
                &["worker", "rank"],
            ),
            batches: counters(
                "warmroute_kv_batches_total",
                "Batches of cache events applied.",
            ),
            events: counters("warmroute_kv_events_total", "Cache events read."),
            stored: counters(
                "warmroute_kv_stored_blocks_total",
                "Blocks reported as stored and taken over, each copy.",
            ),
            removed: counters(
                "warmroute_kv_removed_blocks_total",
                "Blocks reported as removed, each copy.",
            ),
            unknown: counters(
                "warmroute_kv_unknown_removals_total",
                "Removals of blocks that were not known to be held.",
            ),
            filtered: by(
                "warmroute_kv_filtered_events_total",
                "Cache events left out, by why.",
                "reason",
            ),
            resets: by(
                "warmroute_kv_resets_total",
                "Times that all that was known of a rank's cache was forgotten, by why.",
                "reason",
            ),
            gaps: counters(
                "warmroute_kv_gaps_total",
                "Times that batches of cache events were missing.",
            ),
            proofs: by(
                "warmroute_kv_proofs_total",
                "Questions whether the engine's process is still the same, by what came of them.",
                "result",
            ),
            held_dropped: counters(
                "warmroute_kv_held_dropped_batches_total",
                "Batches dropped while too many waited for a replay; they are asked for again.",
            ),
            lag: registry.histograms(
                "warmroute_kv_lag_seconds",
                "From a live batch's timestamp by the engine's clock until it was applied.",
                LAG_SECONDS,
                // Not by rank: its buckets times a fleet would be most of the page.
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
            last_number: families.last_number.with_label_values(labels),
            memory_bytes: families.memory_bytes.with_label_values(labels),
            last_lag: families.last_lag.with_label_values(labels),
            batches: families.batches.with_label_values(labels),
            events: families.events.with_label_values(labels),
            stored: families.stored.with_label_values(labels),
            removed: families.removed.with_label_values(labels),
            unknown: families.unknown.with_label_values(labels),
            gaps: families.gaps.with_label_values(labels),
            kept: families.proofs.with_label_values(&with(PROOFS[0])),
            failed: families.proofs.with_label_values(&with(PROOFS[1])),
            held_dropped: families.held_dropped.with_label_values(labels),
            lag: families.lag.with_label_values::<&str>(&[]),
            filtered: FxHashMap::default(),
            counted: Counts::default(),
            worker: worker.clone(),
            rank,
            rank_text,
            families,
        }
    }
}

/// One rank's.
#[derive(Debug)]
pub(super) struct Meters {
    pub(super) blocks: [IntGauge; Tier::COUNT],
    pub(super) connected: IntGauge,
    last_number: IntGauge,
    pub(super) memory_bytes: IntGauge,
    last_lag: Gauge,
    pub(super) batches: IntCounter,
    pub(super) events: IntCounter,
    pub(super) stored: IntCounter,
    pub(super) removed: IntCounter,
    pub(super) unknown: IntCounter,
    lag: Histogram,
    gaps: IntCounter,
    kept: IntCounter,
    failed: IntCounter,
    held_dropped: IntCounter,
    filtered: FxHashMap<Filtered, IntCounter>,
    /// Of the stream's counts, what was added already.
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

    pub(super) fn filtered(&mut self, why: Filtered) {
        let (families, worker, rank) = (&self.families, &self.worker, &self.rank_text);
        self.filtered
            .entry(why)
            .or_insert_with(|| {
                let labels = [&**worker, &**rank, why.as_str()];
                families.filtered.with_label_values(&labels)
            })
            .inc();
    }

    pub(super) fn reset(&self, reset: Reset) {
        self.families
            .resets
            .with_label_values(&[&*self.worker, &*self.rank_text, reset.as_str()])
            .inc();
    }

    pub(super) fn lag(&self, lag_s: f64) {
        self.lag.observe(lag_s.max(0.0));
        self.last_lag.set(lag_s);
    }

    pub(super) fn last_number(&self, last: Option<u64>) {
        let last = last.map_or(-1, |last| i64::try_from(last).unwrap_or(i64::MAX));
        self.last_number.set(last);
    }

    pub(super) fn counts(&mut self, counts: Counts) {
        let before = std::mem::replace(&mut self.counted, counts);
        self.gaps.inc_by(counts.gaps - before.gaps);
        self.kept.inc_by(counts.proofs_kept - before.proofs_kept);
        self.failed
            .inc_by(counts.proofs_failed - before.proofs_failed);
        self.held_dropped
            .inc_by(counts.held_dropped - before.held_dropped);
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
        // One that was never set is not there to be removed.
        let labels: &[&str] = &[&self.worker, &self.rank_text];
        for family in [
            &families.batches,
            &families.events,
            &families.stored,
            &families.removed,
            &families.unknown,
            &families.gaps,
            &families.held_dropped,
        ] {
            let _ = family.remove_label_values(labels);
        }
        for family in [
            &families.connected,
            &families.last_number,
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
        for proof in PROOFS {
            let _ = families.proofs.remove_label_values(&with(proof));
        }
        for why in Filtered::ALL {
            let _ = families.filtered.remove_label_values(&with(why.as_str()));
        }
        for reset in Reset::ALL {
            let _ = families.resets.remove_label_values(&with(reset.as_str()));
        }
    }
}
