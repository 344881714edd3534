//! Metrics of what replicas share.

use prometheus::{GaugeVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec};

use super::status::Status;
use crate::observe::metrics::Registry;

/// Registered whether or not there are other replicas.
#[derive(Clone, Debug)]
pub(super) struct Metrics {
    pub(super) peers: IntGaugeVec,
    pub(super) lag: GaugeVec,
    pub(super) sent: IntCounter,
    pub(super) received: IntCounter,
    pub(super) connections: IntCounter,
    pub(super) lost: IntCounterVec,
    pub(super) refused: IntCounterVec,
    pub(super) unknown_workers: IntGauge,
    pub(super) ignored: IntCounter,
    pub(super) skipped: IntCounter,
    pub(super) connect_failures: IntCounter,
    pub(super) lookup_failures: IntCounter,
}

impl Metrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let bytes = registry.counters(
            "warmroute_peer_bytes_total",
            "Bytes of messages between this replica and the others, by direction: sent or received.",
            &["direction"],
        );
        Self {
            peers: registry.gauges(
                "warmroute_peers",
                "Other replicas, by state: connected, stale (silent for 1 s), unreachable \
                 (listed, and not connected) or refused (another secret or version).",
                &["state"],
            ),
            lag: registry.real_gauges(
                "warmroute_peer_lag_seconds",
                "Age of the newest state of another replica, by its name.",
                &["peer"],
            ),
            sent: bytes.with_label_values(&["sent"]),
            received: bytes.with_label_values(&["received"]),
            connections: registry.counter(
                "warmroute_peer_connections_total",
                "Times that another replica was connected.",
            ),
            lost: registry.counters(
                "warmroute_peer_lost_total",
                "Times that another replica was lost, by reason: closed (its stream ended), silent (for \
                 3 s) or drained.",
                &["reason"],
            ),
            refused: registry.counters(
                "warmroute_peer_refused_total",
                "Streams of other replicas that were not used, by reason: secret, version, malformed, loopback (another \
                 host without a secret), full (there are 64) or handshake (it did not end).",
                &["reason"],
            ),
            unknown_workers: registry.gauge(
                "warmroute_peer_unknown_workers",
                "Workers that other replicas report and this one does not have. Replicas should have one fleet.",
            ),
            ignored: registry.counter(
                "warmroute_peer_ignored_total",
                "What was ignored in messages of other replicas: workers without a name or beyond \
                 8,192, and messages that only a later release knows.",
            ),
            connect_failures: registry.counter(
                "warmroute_peer_connect_failures_total",
                "Attempts to connect to the address of another replica that failed.",
            ),
            lookup_failures: registry.counter(
                "warmroute_peer_lookup_failures_total",
                "Lookups of a name of `peers.discovery` that failed. The addresses known stay.",
            ),
            skipped: registry.counter(
                "warmroute_peer_reports_skipped_total",
                "Reports that a slow replica was not sent. It gets the whole state later.",
            ),
        }
    }

    /// Sets the gauges.
    pub(super) fn show(&self, status: &Status) {
        for state in ["connected", "stale", "unreachable", "refused"] {
            let count = status.peers.iter().filter(|peer| peer.state == state);
            let gauge = self.peers.with_label_values(&[state]);
            gauge.set(count.count() as i64);
        }
        self.lag.reset();
        for peer in &status.peers {
            if let (Some(name), Some(lag)) = (&peer.name, peer.lag_ms) {
                let gauge = self.lag.with_label_values(&[name]);
                gauge.set(gauge.get().max(lag as f64 / 1_000.0));
            }
        }
        let unknown = status.peers.iter().map(|peer| peer.unknown_workers);
        let unknown: usize = unknown.sum();
        self.unknown_workers.set(unknown as i64);
    }
}
