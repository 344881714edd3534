//! Metrics of waiting, for operators and autoscalers.

use std::time::Duration;

use parking_lot::Mutex;
use rustc_hash::FxHashSet;

use crate::ids::Model;
use crate::observe::metrics::metric_table;
use crate::queue::RefusalReason;

const WAIT_SECONDS: &[f64] = &[
    0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
];

metric_table! {
    #[derive(Debug)]
    pub(super) struct Metrics {
        pub(super) requests: gauges "warmroute_queue_requests" ["model", "class"]
            "Requests that wait in the router for a worker with room; 0 for known models where none waits.",
        pub(super) tokens: gauges "warmroute_queue_tokens" ["model", "class"]
            "Uncached prompt tokens of the requests that wait in the router.",
        pub(super) bytes: gauges "warmroute_queue_bytes" ["model", "class"]
            "Bytes of the bodies of the requests that wait in the router.",
        pub(super) saturation: real_gauges "warmroute_saturation_ratio" ["model"]
            "Uncached prompt tokens that wait in the router and at a model's workers, of all replicas there, by what \
             the workers may have before requests wait (queue.max_worker_queued_tokens, or its default without a \
             queue); or the requests there by the workers' slots, where these are known and that is more. More than \
             1: the workers are busy. Without a worker, as if there were one.",
        pub(super) overtakes: counters "warmroute_queue_overtakes_total" ["model"]
            "Requests that were sent before the first one in another replica's line for the same worker, which was due \
             earlier: that one, or several one after another as in a flood there, had been let go first for 1 s.",
        wait: histograms "warmroute_queue_wait_seconds" ["model", "class"] in WAIT_SECONDS
            "How long requests have waited in the router, released or refused.",
        refusals: counters "warmroute_queue_refusals_total" ["model", "class", "reason"]
            "Requests that were refused because no worker had room, by reason: queue_full, queue_timeout, \
             ttft_target_unreachable, no_healthy_worker or router_draining.",
    } and {
        /// Models and classes with gauges.
        exported: Mutex<FxHashSet<(String, String)>>,
    }
}

impl Metrics {
    pub(super) fn on_waited(&self, model: &Model, class: &str, waited: Duration) {
        let labels = [model.as_ref(), class];
        let histogram = self.wait.with_label_values(&labels);
        histogram.observe(waited.as_secs_f64());
    }

    pub(super) fn on_refused(&self, model: &Model, class: &str, reason: RefusalReason) {
        let labels = [model.as_ref(), class, reason.code()];
        self.refusals.with_label_values(&labels).inc();
    }

    /// Removes the series of what is no longer exported.
    pub(super) fn retain(&self, exported: FxHashSet<(String, String)>) {
        let mut before = self.exported.lock();
        let models: FxHashSet<&str> = exported.iter().map(|(model, _)| &**model).collect();
        for (model, class) in before.difference(&exported) {
            let labels = [model.as_str(), class.as_str()];
            for gauges in [&self.requests, &self.tokens, &self.bytes] {
                let _ = gauges.remove_label_values(&labels);
            }
            let _ = self.wait.remove_label_values(&labels);
            for code in RefusalReason::CODES {
                let _ = self
                    .refusals
                    .remove_label_values(&[model.as_str(), class, code]);
            }
            if !models.contains(model.as_str()) {
                let _ = self.saturation.remove_label_values(&[model]);
                let _ = self.overtakes.remove_label_values(&[model]);
            }
        }
        drop(models);
        *before = exported;
    }
}
