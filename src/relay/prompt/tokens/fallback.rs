//! Why a request is routed without the token ids of its prompt, although its model has a tokenizer.

use crate::prompt::engine;
use crate::prompt::render::TokenizeError;

#[derive(Debug, PartialEq, thiserror::Error)]
pub(super) enum FallbackReason {
    /// The router cannot tokenize this body. The tokenizer counts these in a metric of its own.
    #[error("{0}")]
    Untokenizable(TokenizeError),
    /// The queue of the tokenizer pool is full.
    #[error("queue_full")]
    QueueFull,
    /// The tokenizer pool took longer than the configured wait.
    #[error("timeout")]
    Timeout,
    /// The call of the engine failed.
    #[error("{0}")]
    Engine(engine::Error),
    /// The circuit breaker for tokenization by engines is open.
    #[error("engine_circuit_open")]
    EngineCircuitOpen,
    /// No worker can be called.
    #[error("no_worker")]
    NoWorker,
}

impl FallbackReason {
    /// Every label value of the metric.
    pub(super) fn labels() -> impl Iterator<Item = &'static str> {
        let router_reasons = ["queue_full", "timeout", "engine_circuit_open", "no_worker"];
        let engine_reasons = engine::Error::ALL.map(engine::Error::as_str);
        router_reasons.into_iter().chain(engine_reasons)
    }

    /// The label value of the metric. `None` if the tokenizer counts the reason.
    pub(super) fn label(&self) -> Option<String> {
        match self {
            FallbackReason::Untokenizable(_) => None,
            of_router_or_engine => Some(of_router_or_engine.to_string()),
        }
    }
}
