//! One KV transfer: what its prefill leg carries, and what the prefill leg's answer gives to the decode leg.

use std::sync::Arc;

use super::types::{
    ASKS_FOR_BLOCKS, Answer, PrefillResult, Transfer, TransferError, TransferParams,
};
use super::{mooncake, moriio, nixl};
use crate::fleet::kv_transfer::{BootstrapInfo, Connector};
use crate::prompt::Api;
use crate::relay::answer::usage_reader;

impl Transfer {
    /// `host` is the prefill worker's. `chosen` is the dp rank to pin the prefill leg to. Without one, `seed` draws one of several
    /// where the decode leg must name it.
    pub fn begin(
        connector: Connector,
        api: Api,
        id: String,
        host: &str,
        bootstrap_info: Option<Arc<BootstrapInfo>>,
        chosen: Option<u32>,
        seed: u64,
    ) -> Result<Self, TransferError> {
        let mut rank = chosen.unwrap_or(0);
        let mut is_pinned = chosen.is_some();
        if connector.needs_bootstrap() {
            let bootstrap_info = bootstrap_info.as_ref().ok_or(TransferError::NoBootstrap)?;
            let count = bootstrap_info.ranks().len();
            let is_known = chosen.is_some_and(|rank| bootstrap_info.engine_id(rank).is_some());
            if !is_known {
                // vLLM before 0.33 chooses the rank of a Responses request itself, and does not report it.
                if api == Api::Responses && count > 1 {
                    return Err(TransferError::NoRank);
                }
                let drawn = (seed % count.max(1) as u64) as usize;
                rank = bootstrap_info
                    .ranks()
                    .nth(drawn)
                    .ok_or(TransferError::NoBootstrap)?;
                is_pinned = count > 1;
            }
        }
        Ok(Self {
            connector,
            id,
            host: host.to_owned(),
            bootstrap_info,
            rank,
            is_pinned,
            api,
        })
    }

    /// The prefill leg's header `x-data-parallel-rank`.
    pub fn rank(&self) -> Option<u32> {
        self.is_pinned.then_some(self.rank)
    }

    /// Fields of the prefill leg's `kv_transfer_params`, as JSON without braces.
    pub(super) fn prefill_params(&self) -> String {
        match self.connector {
            Connector::Nixl => ASKS_FOR_BLOCKS.to_owned(),
            Connector::Mooncake => mooncake::prefill_params(self),
            Connector::Moriio => moriio::prefill_params(self),
            // Its legs hand nothing over.
            Connector::Sglang => String::new(),
        }
    }

    /// True if the prefill leg must end at its length limit. After an end-of-sequence token, Mooncake's engine frees the blocks,
    /// and the decode leg waits for them for minutes; MoRIIO's does not say where they are.
    pub(super) fn ends_at_limit(&self) -> bool {
        match self.connector {
            Connector::Mooncake | Connector::Moriio => true,
            Connector::Nixl | Connector::Sglang => false,
        }
    }

    /// Reads the whole answer of the prefill leg, with status 200.
    pub fn end(self, answer: &[u8]) -> Result<PrefillResult, TransferError> {
        let parsed: Answer<'_> =
            serde_json::from_slice(answer).map_err(|_| TransferError::Malformed)?;
        if self.ends_at_limit() && !parsed.is_cut_at_one_token() {
            return Err(TransferError::Stopped);
        }
        let (fields, cached_tokens) = match self.connector {
            Connector::Nixl => nixl::read(&self, &parsed)?,
            Connector::Mooncake => (mooncake::decode_params(&self)?, 0),
            Connector::Moriio => (moriio::read(&parsed)?, 0),
            Connector::Sglang => return Err(TransferError::NoParams),
        };
        let usage = usage_reader::of_whole(self.api, answer).unwrap_or_default();
        Ok(PrefillResult {
            params: TransferParams(fields),
            prompt_tokens: usage.prompt_tokens,
            // Engines leave it out of their usage by default.
            cached_tokens: usage.cached_tokens.max(cached_tokens),
        })
    }
}
