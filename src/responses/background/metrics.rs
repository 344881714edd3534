//! Metrics of background runs.

use crate::observe::metrics::metric_table;

/// Buckets for the seconds since a cancel.
const SECONDS: &[f64] = &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0];

metric_table! {
    #[derive(Clone, Debug)]
    pub(super) struct Metrics {
        pub(super) running: gauge "warmroute_background_running"
            "Background responses that this replica runs, including those that wait for a worker.",
        pub(super) refused: counters "warmroute_background_refused_total" ["reason"]
            "Background responses that were not admitted, by reason; `no_memory`: a new one whose client's background \
             responses have as much of `api.max_total_body` as they may, or one of a lost replica or one that reads \
             its conversation anew, which waits and counts once.",
        pub(super) orphans: counters "warmroute_background_orphans_total" ["action"]
            "Responses taken over from lost or stopping replicas, by action: rerun, continued (after the events that were \
             stored), failed, or cancelled (its output was still to be stored).",
        pub(super) continuations: counters "warmroute_background_continuations_total" ["outcome", "reason"]
            "Streamed background responses with output that were taken over, while `stream_continuation` is on: a worker goes \
             on after the stored events (`continued`), none could (`failed`), or the request or what is stored did not allow it \
             (`refused`, with the reason).",
        pub(super) stopped: counters "warmroute_background_stopped_total" ["reason"]
            "Background runs that stopped before their end, by reason.",
        pub(super) readers: counters "warmroute_background_readers_total" ["kind"]
            "Event streams of background responses, by kind: live, replay, resume, or refused.",
        pub(super) cancel_seconds: histogram "warmroute_background_cancel_seconds" in SECONDS
            "Time to answer a cancel request.",
        pub(super) cancel_stop_seconds: histogram "warmroute_background_cancel_stop_seconds" in SECONDS
            "Time from a cancel request until the connection to the engine was closed. If another replica answered the request, \
             this compares the store's clock with the local one.",
        pub(super) event_bytes: counter "warmroute_background_event_bytes_total"
            "Bytes of stored events of background responses.",
        pub(super) logs_cut: counter "warmroute_background_logs_cut_total"
            "Background responses whose events exceeded max_event_log, so that the oldest were dropped while they ran.",
        pub(super) readers_behind: counter "warmroute_background_readers_behind_total"
            "Event streams that wanted dropped events of a running response, and therefore waited for its end.",
        pub(super) readers_lost: counter "warmroute_background_readers_lost_total"
            "Event streams that ended with the error `events_lost`: a failover of the store lost events that they had sent, and \
             another replica goes on with the response.",
        pub(super) leases_expired: counter "warmroute_background_leases_expired_total"
            "How often this replica could not renew its lease in time.",
        pub(super) restarted: counter "warmroute_background_restarted_total"
            "How often a background response was sent to another engine because its engine was lost before any output was seen.",
        pub(super) ends_repeated: counter "warmroute_background_ends_repeated_total"
            "Ends of background responses that were stored again because the store had lost them in a failover.",
    }
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
}
