//! Metrics of background runs.

use prometheus::{Histogram, IntCounter, IntCounterVec, IntGauge};

use crate::observe::metrics::Registry;

/// Buckets for the seconds since a cancel.
const SECONDS: &[f64] = &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0];

#[derive(Clone, Debug)]
pub(super) struct Metrics {
    pub(super) running: IntGauge,
    pub(super) refused: IntCounterVec,
    pub(super) orphans: IntCounterVec,
    pub(super) continuations: IntCounterVec,
    pub(super) stopped: IntCounterVec,
    pub(super) readers: IntCounterVec,
    pub(super) cancel_seconds: Histogram,
    pub(super) cancel_stop_seconds: Histogram,
    pub(super) event_bytes: IntCounter,
    pub(super) logs_cut: IntCounter,
    pub(super) readers_behind: IntCounter,
    pub(super) readers_lost: IntCounter,
    pub(super) leases_expired: IntCounter,
    pub(super) restarted: IntCounter,
    pub(super) ends_repeated: IntCounter,
}

impl Metrics {
    pub(super) fn on_orphan(&self, action: &str) {
        self.orphans.with_label_values(&[action]).inc();
    }

    pub(super) fn on_continuation(&self, outcome: &str, reason: &str) {
        let labels = [outcome, reason];
        self.continuations.with_label_values(&labels).inc();
        self.on_orphan(match outcome {
            "continued" => "continued",
            _ => "failed",
        });
    }

    pub(super) fn new(registry: &Registry) -> Self {
        let none: &[&str] = &[];
        Self {
            running: registry
                .gauges(
                    "warmroute_background_running",
                    "Background responses that this replica runs, including those that wait for a worker.",
                    &[],
                )
                .with_label_values(none),
            refused: registry.counters(
                "warmroute_background_refused_total",
                "Background responses that were not admitted, by reason.",
                &["reason"],
            ),
            orphans: registry.counters(
                "warmroute_background_orphans_total",
                "Responses taken over from lost or stopping replicas, by action: rerun, continued (after the events that were stored), failed, or cancelled (its output was still to be stored).",
                &["action"],
            ),
            continuations: registry.counters(
                "warmroute_background_continuations_total",
                "Streamed background responses with output that were taken over, while `stream_continuation` is on: a worker goes on after the stored events (`continued`), none could (`failed`), or the request or what is stored did not allow it (`refused`, with the reason).",
                &["outcome", "reason"],
            ),
            stopped: registry.counters(
                "warmroute_background_stopped_total",
                "Background runs that stopped before their end, by reason.",
                &["reason"],
            ),
            readers: registry.counters(
                "warmroute_background_readers_total",
                "Event streams of background responses, by kind: live, replay, resume, or refused.",
                &["kind"],
            ),
            cancel_seconds: registry
                .histograms(
                    "warmroute_background_cancel_seconds",
                    "Time to answer a cancel request.",
                    SECONDS,
                    &[],
                )
                .with_label_values(none),
            cancel_stop_seconds: registry
                .histograms(
                    "warmroute_background_cancel_stop_seconds",
                    "Time from a cancel request until the connection to the engine was closed. If another replica \
                     answered the request, this compares the store's clock with the local one.",
                    SECONDS,
                    &[],
                )
                .with_label_values(none),
            event_bytes: registry.counter(
                "warmroute_background_event_bytes_total",
                "Bytes of stored events of background responses.",
            ),
            logs_cut: registry.counter(
                "warmroute_background_logs_cut_total",
                "Background responses whose events exceeded max_event_log, so that the oldest were dropped while they ran.",
            ),
            readers_behind: registry.counter(
                "warmroute_background_readers_behind_total",
                "Event streams that wanted dropped events of a running response, and therefore waited for its end.",
            ),
            readers_lost: registry.counter(
                "warmroute_background_readers_lost_total",
                "Event streams that ended with the error `events_lost`: a failover of the store lost events that they had sent, \
                 and another replica goes on with the response.",
            ),
            ends_repeated: registry.counter(
                "warmroute_background_ends_repeated_total",
                "Ends of background responses that were stored again because the store had lost them in a failover.",
            ),
            restarted: registry.counter(
                "warmroute_background_restarted_total",
                "How often a background response was sent to another engine because its engine was lost before any \
                 output was seen.",
            ),
            leases_expired: registry.counter(
                "warmroute_background_leases_expired_total",
                "How often this replica could not renew its lease in time.",
            ),
        }
    }
}
