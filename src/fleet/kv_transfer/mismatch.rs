//! Why two workers are not a pair, in words for an operator.

use std::sync::Arc;

use super::connector::Connector;
use crate::fleet::Status;

/// Why no KV transfer is possible from a prefill worker to a decode worker.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Mismatch {
    #[error("they serve no model in common")]
    Model,
    #[error("block sizes differ: {prefill} and {decode} tokens")]
    BlockSize { prefill: u32, decode: u32 },
    #[error("engine versions differ: {prefill} and {decode}")]
    Version { prefill: Arc<str>, decode: Arc<str> },
    /// No decode worker can fetch from it.
    #[error("the prefill worker's bootstrap server does not answer")]
    NoBootstrap,
    #[error(
        "topology labels differ: {} and {}",
        .prefill.as_deref().unwrap_or("(no label)"),
        .decode.as_deref().unwrap_or("(no label)")
    )]
    Topology {
        prefill: Option<Arc<str>>,
        decode: Option<Arc<str>>,
    },
}

impl Mismatch {
    pub fn as_str(&self) -> &'static str {
        match self {
            Mismatch::Model => "model",
            Mismatch::BlockSize { .. } => "block_size",
            Mismatch::Version { .. } => "version",
            Mismatch::NoBootstrap => "no_bootstrap",
            Mismatch::Topology { .. } => "topology",
        }
    }
}

/// The known reason why a KV transfer cannot work. `None` does not prove that it works: only trying shows whether
/// two engines understand each other.
pub fn mismatch(
    connector: Connector,
    topology: &str,
    prefill: &Status,
    decode: &Status,
) -> Option<Mismatch> {
    let models = &prefill.facts.models;
    if !models
        .keys()
        .any(|model| decode.facts.models.contains_key(model))
    {
        return Some(Mismatch::Model);
    }
    let from = prefill.compatibility_key(topology);
    let to = decode.compatibility_key(topology);
    if from.zone != to.zone {
        return Some(Mismatch::Topology {
            prefill: from.zone,
            decode: to.zone,
        });
    }
    if let (Some(prefill), Some(decode)) = (from.version, to.version)
        && prefill != decode
    {
        return Some(Mismatch::Version { prefill, decode });
    }
    if let (Some(prefill), Some(decode)) = (from.block_size, to.block_size)
        && prefill != decode
    {
        return Some(Mismatch::BlockSize { prefill, decode });
    }
    let lacks_bootstrap =
        connector.needs_bootstrap() && prefill.worker.bootstrap_info.load().is_none();
    lacks_bootstrap.then_some(Mismatch::NoBootstrap)
}
