//! Why a request is routed without the token ids of its prompt, although its model has a tokenizer.

use std::fmt;

use crate::prompt::engine;
use crate::prompt::render::TokenizeError;

#[derive(Debug, PartialEq)]
pub(super) enum FallbackReason {
    /// The router cannot tokenize this body. The tokenizer counts these in a metric of its own.
    Untokenizable(TokenizeError),
    /// The queue of the tokenizer pool is full.
    QueueFull,
    /// The tokenizer pool took longer than the configured wait.
    Timeout,
    Engine(engine::Error),
    /// The circuit breaker for tokenization by engines is open.
    EngineCircuitOpen,
    NoWorker,
}

impl FallbackReason {
    const ROUTER_REASONS: [&'static str; 4] =
        ["queue_full", "timeout", "engine_circuit_open", "no_worker"];

    /// Every label value of the metric.
    pub(super) fn labels() -> impl Iterator<Item = &'static str> {
        let engine_reasons = engine::Error::ALL.map(engine::Error::as_str);
        Self::ROUTER_REASONS.into_iter().chain(engine_reasons)
    }

    /// The label value of the metric. `None` if the tokenizer counts the reason.
    pub(super) fn label(&self) -> Option<&'static str> {
        let [queue_full, timeout, engine_circuit_open, no_worker] = Self::ROUTER_REASONS;
        match self {
            FallbackReason::Untokenizable(_) => None,
            FallbackReason::QueueFull => Some(queue_full),
            FallbackReason::Timeout => Some(timeout),
            FallbackReason::Engine(error) => Some(error.as_str()),
            FallbackReason::EngineCircuitOpen => Some(engine_circuit_open),
            FallbackReason::NoWorker => Some(no_worker),
        }
    }
}

impl fmt::Display for FallbackReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FallbackReason::Untokenizable(error) => error.fmt(f),
            other => f.write_str(other.label().unwrap_or_default()),
        }
    }
}
