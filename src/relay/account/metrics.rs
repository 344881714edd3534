//! Metric families of requests. Most carry the labels `model` and `worker`; [`super::worker_series`] resolves
//! the children that nearly every request adds to.

use std::sync::atomic::AtomicUsize;

use parking_lot::Mutex;
use prometheus::{Histogram, IntCounterVec};
use rustc_hash::FxHashSet;

use crate::fleet::Worker;
use crate::http::circuit_breaker::State;
use crate::ids::Model;
use crate::observe::metrics::{FoundSeries, metric_table};
use crate::prompt::Api;
use crate::relay::failure::failure_owner::FailureOwner;
use crate::relay::failure::types::{Failure, Outcome};

/// The label `worker` or `status` of a request that no worker answered.
pub(in crate::relay) const NONE: &str = "none";

// Each bucket is a line of `/metrics` for each worker: 1,000 workers must fit into 8 MB.

/// From a prefix cache hit on a small model to a long prompt in a long queue.
pub const TIME_TO_FIRST_TOKEN_SECONDS: &[f64] = &[0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0];
pub const INTER_TOKEN_LATENCY_SECONDS: &[f64] = &[0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.64, 5.0];
const REQUEST_SECONDS: &[f64] = &[0.25, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0];

const RATIOS: &[f64] = &[
    0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0, 1.15, 1.3, 1.5, 2.0, 3.0, 5.0, 10.0,
];

metric_table! {
    #[derive(Debug)]
    pub(in crate::relay) struct Families {
        pub(in crate::relay) requests: counters "warmroute_requests_total" ["model", "api", "worker", "status", "outcome"]
            "Requests that have ended, by the worker and the HTTP status of the answer (none: no worker \
             answered) and by how they ended.",
        pub(in crate::relay) decisions: counters "warmroute_routing_decisions_total" ["model", "policy", "reason"]
            "Workers chosen for a request or for a retry, by policy and reason.",
        pub(in crate::relay) routed_prompt_tokens: counters "warmroute_routed_prompt_tokens_total" ["model"]
            "Prompt tokens of the requests routed, as the router counts or estimates them.",
        pub(in crate::relay) expected_cached_tokens: counters "warmroute_expected_cached_prompt_tokens_total" ["model"]
            "Prompt tokens that the router expected the chosen worker to have in its prefix cache.",
        pub(in crate::relay) random_worker_prompt_tokens: counters "warmroute_random_worker_prompt_tokens_total" ["model"]
            "Prompt tokens of a sample of the requests routed (1 in 100, and one each second), once for each usable \
             worker that was drawn at random for comparison (up to 8).",
        pub(in crate::relay) random_worker_cached_tokens: counters "warmroute_random_worker_cached_prompt_tokens_total" ["model"]
            "Of warmroute_random_worker_prompt_tokens_total, those that the router expected the drawn worker to have \
             in its prefix cache: what routing at random would have found at that moment.",
        pub(in crate::relay) in_flight: gauges "warmroute_requests_in_flight" ["model"] "Requests that have not ended.",
        pub(in crate::relay) time_to_first_token: histograms "warmroute_time_to_first_token_seconds" ["model", "worker"]
            in TIME_TO_FIRST_TOKEN_SECONDS
            "Time from the head of a streamed request to the first token of its answer.",
        expected_ratio: histograms "warmroute_seen_to_expected_time_ratio" ["model", "of"] in RATIOS
            "How long tokens took, divided by what was expected when the worker was chosen; `of`: first_token (of streams) or \
             end (of complete answers, by the tokens that they had). 1: as expected; more: later.",
        pub(in crate::relay) inter_token_latency: histograms "warmroute_inter_token_latency_seconds" ["model", "worker"]
            in INTER_TOKEN_LATENCY_SECONDS
            "Time between two pieces of a streamed answer. Pieces of background responses are read together, and the \
             time before them is shared by their tokens.",
        /// Not by worker: the time to the first token and the inter-token latency say which worker is slow.
        pub(in crate::relay) duration: histograms "warmroute_request_duration_seconds" ["model"] in REQUEST_SECONDS
            "Time from the head of a request to the end of its answer.",
        pub(in crate::relay) prompt_tokens: counters "warmroute_prompt_tokens_total" ["model"]
            "Prompt tokens, as engines report them.",
        pub(in crate::relay) cached_tokens: counters "warmroute_cached_prompt_tokens_total" ["model"]
            "Prompt tokens that engines report as read from their prefix cache.",
        pub(in crate::relay) generation_tokens: counters "warmroute_generation_tokens_total" ["model"]
            "Generated tokens, as engines report them.",
        pub(in crate::relay) continuations: counters "warmroute_stream_continuations_total" ["model", "outcome", "reason"]
            "Streams that broke off, of models with `stream_continuation`: another worker goes on (`continued`), none \
             could (`failed`), or the request or its answer did not allow it (`refused`, with the reason).",
        retries: counters "warmroute_retries_total" ["worker", "reason"]
            "Retries, by the worker whose attempt failed and by how it failed.",
        failures: counters "warmroute_worker_failures_total" ["worker", "owner"]
            "Attempts without an answer, answers that refuse the router's own key or have a status of 500, 502 or 504, and \
             answers that broke off, by who is to blame: only `worker` counts for the worker's circuit breaker.",
        breaker_transitions: counters "warmroute_circuit_breaker_transitions_total" ["worker", "to"]
            "State changes of a worker's circuit breaker; to half-open once for each trial request.",
    } and {
        /// How many pairs of a model and a worker have series of their own.
        pub(in crate::relay) worker_series: AtomicUsize,
        /// Workers with a series in `retries`, `failures` or `breaker_transitions`.
        workers_with_failures: Mutex<FxHashSet<String>>,
    }
}

impl Families {
    pub(in crate::relay) fn expected_ratio(&self, model: &str, of: &str) -> Histogram {
        self.expected_ratio.with_label_values(&[model, of])
    }

    /// Counts a request that ended without a worker's answer.
    pub(in crate::relay) fn count_unanswered(&self, model: &str, api: &str, outcome: Outcome) {
        let labels = [model, api, NONE, NONE, outcome.as_str()];
        self.requests.with_label_values(&labels).inc();
    }

    pub(in crate::relay) fn on_retry(&self, worker: &str, failure: Failure) {
        self.count_failure(&self.retries, worker, failure.as_str());
    }

    pub(in crate::relay) fn on_failure(&self, worker: &str, owner: FailureOwner) {
        self.count_failure(&self.failures, worker, owner.as_str());
    }

    pub(in crate::relay) fn on_breaker_transition(&self, worker: &Worker, to: State) {
        self.count_failure(&self.breaker_transitions, &worker.name, to.as_str());
    }

    fn count_failure(&self, family: &IntCounterVec, worker: &str, label: &str) {
        let mut workers = self.workers_with_failures.lock();
        if !workers.contains(worker) {
            workers.insert(worker.to_owned());
        }
        family.with_label_values(&[worker, label]).inc();
    }

    /// Removes the failure counters of workers that left the fleet.
    pub(in crate::relay) fn remove_workers(&self, is_listed: impl Fn(&str) -> bool) {
        let mut workers = self.workers_with_failures.lock();
        for worker in workers.extract_if(|worker| !is_listed(worker)) {
            // A label value that never occurred has no series to remove.
            for failure in Failure::ALL {
                let labels = [&*worker, failure.as_str()];
                let _ = self.retries.remove_label_values(&labels);
            }
            for owner in FailureOwner::ALL {
                let labels = [&*worker, owner.as_str()];
                let _ = self.failures.remove_label_values(&labels);
            }
            for state in State::ALL {
                let labels = [&*worker, state.as_str()];
                let _ = self.breaker_transitions.remove_label_values(&labels);
            }
        }
    }

    /// Finds the series of models, but for those of the requests that have ended.
    pub(in crate::relay) fn find_models(&self, gone: &FxHashSet<Model>, found: &mut FoundSeries) {
        let is_gone = |model: &str| gone.contains(model);
        for family in [
            &self.decisions,
            &self.routed_prompt_tokens,
            &self.expected_cached_tokens,
            &self.random_worker_prompt_tokens,
            &self.random_worker_cached_tokens,
            &self.prompt_tokens,
            &self.cached_tokens,
            &self.generation_tokens,
            &self.continuations,
        ] {
            found.find(family, is_gone);
        }
        for family in [&self.expected_ratio, &self.duration] {
            found.find(family, is_gone);
        }
        found.find(&self.in_flight, is_gone);
    }

    /// Removes the series of a model's requests that no worker answered. The family has the series of all workers, so
    /// it is not looked through.
    pub(in crate::relay) fn remove_unanswered(&self, model: &str) {
        for api in Api::ALL {
            for outcome in Outcome::ALL {
                let labels = [model, api.as_str(), NONE, NONE, outcome.as_str()];
                let _ = self.requests.remove_label_values(&labels);
            }
        }
    }
}
