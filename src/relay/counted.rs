//! What is counted of a model's requests, and the guard that counts each once.

use std::sync::Arc;
use std::time::Instant;

use hyper::StatusCode;
use prometheus::{HistogramVec, IntCounterVec, IntGaugeVec};

use super::model::ModelState;
use crate::observe::metrics;
use crate::prompt::Api;

/// Every metric with a model's name on it.
#[derive(Clone, Debug)]
pub(super) struct Families {
    pub(super) requests: IntCounterVec,
    pub(super) decisions: IntCounterVec,
    pub(super) prompt_blocks: IntCounterVec,
    pub(super) overlap_blocks: IntCounterVec,
    pub(super) overlap_tokens: IntCounterVec,
    pub(super) in_flight: IntGaugeVec,
    pub(super) ttft: HistogramVec,
    pub(super) itl: HistogramVec,
    pub(super) duration: HistogramVec,
    pub(super) prompt_tokens: IntCounterVec,
    pub(super) cached_tokens: IntCounterVec,
    pub(super) output_tokens: IntCounterVec,
    pub(super) ends: IntCounterVec,
    pub(super) breaker: IntCounterVec,
}

impl Families {
    pub(super) fn new(registry: &metrics::Registry) -> Self {
        let counters = |name, help, labels: &[&str]| registry.counters(name, help, labels);
        Self {
            requests: counters(
                "warmroute_requests_total",
                "Requests by their answer's status; `none` where no engine answered or the client left before.",
                &["model", "api", "status"],
            ),
            decisions: counters(
                "warmroute_decisions_total",
                "Workers chosen, by why.",
                &["model", "reason"],
            ),
            prompt_blocks: counters(
                "warmroute_prompt_blocks_total",
                "Blocks of the prompts routed.",
                &["model"],
            ),
            overlap_blocks: counters(
                "warmroute_overlap_blocks_total",
                "Blocks of those prompts that the chosen worker was believed to hold.",
                &["model"],
            ),
            overlap_tokens: counters(
                "warmroute_overlap_tokens_total",
                "Prompt tokens that the chosen worker was believed to hold (an estimate).",
                &["model"],
            ),
            in_flight: registry.gauges(
                "warmroute_requests_in_flight",
                "Requests being carried.",
                &["model"],
            ),
            ttft: registry.histograms(
                "warmroute_ttft_seconds",
                "From a streamed request's head to its first token.",
                metrics::TTFT_SECONDS,
                &["model"],
            ),
            itl: registry.histograms(
                "warmroute_itl_seconds",
                "Between two pieces of a streamed answer.",
                metrics::ITL_SECONDS,
                &["model"],
            ),
            duration: registry.histograms(
                "warmroute_request_seconds",
                "From a request's head to the end of its answer.",
                metrics::REQUEST_SECONDS,
                &["model"],
            ),
            prompt_tokens: counters(
                "warmroute_prompt_tokens_total",
                "Prompt tokens, as engines report them.",
                &["model"],
            ),
            cached_tokens: counters(
                "warmroute_cached_prompt_tokens_total",
                "Prompt tokens that engines report as cached.",
                &["model"],
            ),
            output_tokens: counters(
                "warmroute_output_tokens_total",
                "Output tokens, as engines report them.",
                &["model"],
            ),
            ends: counters(
                "warmroute_answer_ends_total",
                "Answers by how they ended.",
                &["model", "end"],
            ),
            breaker: counters(
                "warmroute_breaker_changes_total",
                "Breakers that opened or closed.",
                &["worker", "to"],
            ),
        }
    }
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Complete,
    /// The client left.
    Client,
    /// The engine broke off.
    Engine,
    /// The engine was silent for too long.
    Silence,
    /// The request's time was over.
    Deadline,
}

impl End {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            End::Complete => "complete",
            End::Client => "client_left",
            End::Engine => "engine_broke_off",
            End::Silence => "engine_silent",
            End::Deadline => "deadline",
        }
    }
}

/// One request in the counts of its model, from its plan to its end, however it ends.
#[derive(Debug)]
pub(super) struct Counted {
    pub(super) model: Arc<ModelState>,
    pub(super) begun: Instant,
    api: Api,
    is_counted: bool,
}

impl Counted {
    pub(super) fn new(model: Arc<ModelState>, api: Api, begun: Instant) -> Self {
        model.in_flight.inc();
        Self {
            model,
            api,
            begun,
            is_counted: false,
        }
    }

    pub(super) fn api(&self) -> Api {
        self.api
    }

    /// No engine's answer was passed on.
    pub(super) fn fail(mut self) {
        self.count("none", End::Engine);
    }

    pub(super) fn end(&mut self, now: Instant, status: StatusCode, end: End) {
        if self.is_counted {
            return;
        }
        self.model
            .duration
            .observe(now.saturating_duration_since(self.begun).as_secs_f64());
        if status == StatusCode::OK && end == End::Complete {
            self.is_counted = true;
            self.model.good[self.api as usize].inc();
            self.model.complete.inc();
        } else {
            self.count(status.as_str(), end);
        }
    }

    fn count(&mut self, status: &str, end: End) {
        self.is_counted = true;
        let families = &self.model.families;
        families
            .requests
            .with_label_values(&[self.model.name.as_ref(), self.api.as_str(), status])
            .inc();
        families
            .ends
            .with_label_values(&[self.model.name.as_ref(), end.as_str()])
            .inc();
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        if !self.is_counted {
            self.count("none", End::Client);
        }
        self.model.in_flight.dec();
    }
}
