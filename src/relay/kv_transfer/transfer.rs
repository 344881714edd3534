//! One KV transfer: what its prefill leg carries, and what the prefill leg's answer gives to the decode leg.

use std::sync::Arc;

use super::types::{Answer, Dialect, PrefillResult, Transfer, TransferError, TransferParams};
use super::{mooncake, moriio, nixl, sglang};
use crate::fleet::kv_transfer::{BootstrapInfo, Connector};
use crate::prompt::Api;
use crate::relay::engine_answer;

pub(super) fn dialect(connector: Connector) -> &'static dyn Dialect {
    match connector {
        Connector::Nixl => &nixl::Nixl,
        Connector::Mooncake => &mooncake::Mooncake,
        Connector::Moriio => &moriio::MoriioRead,
        Connector::Sglang => &sglang::Sglang,
    }
}

impl Transfer {
    /// `host` is the prefill worker's. `seed` chooses one of several dp ranks.
    pub fn begin(
        connector: Connector,
        api: Api,
        id: String,
        host: &str,
        bootstrap_info: Option<Arc<BootstrapInfo>>,
        seed: u64,
    ) -> Result<Self, TransferError> {
        let mut rank = 0;
        if connector.needs_bootstrap() {
            let bootstrap_info = bootstrap_info.as_ref().ok_or(TransferError::NoBootstrap)?;
            let count = bootstrap_info.ranks().len();
            // vLLM chooses the rank of a Responses request itself, and does not report it.
            if api == Api::Responses && count > 1 {
                return Err(TransferError::NoRank);
            }
            let drawn = (seed % count.max(1) as u64) as usize;
            rank = bootstrap_info
                .ranks()
                .nth(drawn)
                .ok_or(TransferError::NoBootstrap)?;
        }
        Ok(Self {
            connector,
            id,
            host: host.to_owned(),
            bootstrap_info,
            rank,
            api,
        })
    }

    /// The prefill leg's header `x-data-parallel-rank`.
    pub fn rank(&self) -> Option<u32> {
        let bootstrap_info = self.bootstrap_info.as_ref()?;
        let is_chosen = self.connector.needs_bootstrap() && bootstrap_info.ranks().len() > 1;
        is_chosen.then_some(self.rank)
    }

    /// Reads the whole answer of the prefill leg, with status 200.
    pub fn end(self, answer: &[u8]) -> Result<PrefillResult, TransferError> {
        let parsed: Answer<'_> =
            serde_json::from_slice(answer).map_err(|_| TransferError::Malformed)?;
        let read = dialect(self.connector).read(&self, &parsed)?;
        let usage = match self.api {
            Api::Messages => engine_answer::messages_usage(None, answer),
            _ => engine_answer::last_usage(answer),
        };
        let usage = usage.unwrap_or_default();
        Ok(PrefillResult {
            params: TransferParams(read.fields),
            prompt_tokens: usage.prompt_tokens,
            // Engines leave it out of their usage by default.
            cached_tokens: usage.cached_tokens.max(read.cached_tokens),
        })
    }
}
