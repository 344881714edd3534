//! Metrics of webhooks.

use crate::observe::metrics::metric_table;
use crate::store::outbox::AddCounters;

/// From an endpoint next door to the time-out of an attempt.
const ATTEMPT_SECONDS: &[f64] = &[
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0,
];
/// From the first attempt to the last.
const DELAY_SECONDS: &[f64] = &[
    0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1_800.0, 7_200.0, 43_200.0, 259_200.0,
];

metric_table! {
    #[derive(Clone, Debug)]
    pub(super) struct Metrics {
        pub(super) attempts: counters "warmroute_webhook_attempts_total" ["endpoint", "outcome"]
            "Attempts to deliver an event of a webhook, by endpoint and outcome: delivered, redirect, gone, client_error, \
             server_error, not_resolved, address_refused, not_connected, broken, timed_out.",
        pub(super) attempt_seconds: histograms "warmroute_webhook_attempt_duration_seconds" ["endpoint"] in ATTEMPT_SECONDS
            "Duration of attempts to deliver an event, by endpoint.",
        pub(super) events: counters "warmroute_webhook_events_total" ["endpoint", "outcome"]
            "Events of webhooks, by endpoint and what became of them: added, delivered, dropped_attempts (failed too often), \
             dropped_age (too old), dropped_full (too many waited), dropped_disabled (the endpoint answered 410).",
        pub(super) delay_seconds: histograms "warmroute_webhook_delivery_delay_seconds" ["endpoint"] in DELAY_SECONDS
            "Time from the end of a response or batch to the delivery of its event, by endpoint.",
        pub(super) waiting: gauges "warmroute_webhook_waiting_events" ["endpoint"]
            "Events that wait for an endpoint, in the store that all replicas share.",
        pub(super) oldest_age: real_gauges "warmroute_webhook_oldest_event_age_seconds" ["endpoint"]
            "Age of the oldest event that waits for an endpoint; 0 if none does.",
        pub(super) state: gauges "warmroute_webhook_endpoint_state" ["endpoint"]
            "State of an endpoint as this replica sees it: 0 it takes events, 1 it fails and is tried now and then, 2 it is \
             disabled, because it answered 410.",
    }
}

impl Metrics {
    pub(super) fn add_counters(&self, endpoint: &str) -> AddCounters {
        let of = |outcome| self.events.with_label_values(&[endpoint, outcome]);
        AddCounters {
            added: of("added"),
            dropped_full: of("dropped_full"),
            dropped_disabled: of("dropped_disabled"),
        }
    }

    /// Removes the gauges of an endpoint that is no longer configured.
    pub(super) fn forget(&self, endpoint: &str) {
        let _ = self.waiting.remove_label_values(&[endpoint]);
        let _ = self.oldest_age.remove_label_values(&[endpoint]);
        let _ = self.state.remove_label_values(&[endpoint]);
    }
}
