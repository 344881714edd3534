//! The end of a prefill leg: offers its blocks to a decode engine.

use std::sync::Arc;

use super::params::{MoriioResult, NixlResult, PrefillResult};
use super::settings::Connector;
use super::state::{Offer, fingerprint};
use crate::sim::worker::driver::Ticket;
use crate::sim::worker::generation::Generation;
use crate::sim::worker::request::Api;
use crate::sim::worker::shared::Shared;

/// Offers a prompt's blocks once the prefill leg's answer is complete.
#[derive(Debug)]
pub(crate) struct BlockOffer {
    pub(crate) shared: Arc<Shared>,
    pub(crate) connector: Connector,
    pub(crate) transfer_id: Option<String>,
}

impl BlockOffer {
    /// Makes the offer, if the engine has kept the blocks. Returns the `kv_transfer_params` of the answer.
    pub(crate) fn make(&self, ticket: &Ticket, generation: &Generation) -> Option<PrefillResult> {
        let (driver, key) = ticket.first()?;
        let blocks = driver.engine().kept_blocks(key)?;
        let request = &generation.request;
        let prompt = request.prompts.first()?;
        let offer = Offer {
            driver: Arc::clone(driver),
            key,
            fingerprint: fingerprint(prompt, request.salt),
            is_used: false,
        };
        match self.connector {
            Connector::Nixl => {
                let request_id = internal_id(request.api, &request.id);
                self.shared.transfers.offer(request_id.clone(), offer);
                let tokens = generation.completion_tokens();
                Some(PrefillResult::Nixl(NixlResult {
                    do_remote_prefill: true,
                    do_remote_decode: false,
                    remote_block_ids: [blocks],
                    remote_engine_id: driver.id().to_owned(),
                    remote_request_id: request_id,
                    remote_host: self.shared.addr.ip().to_string(),
                    remote_port: self.shared.addr.port(),
                    tp_size: 1,
                    dcp_size: 1,
                    pp_size: 1,
                    // The KV of the last token is not computed.
                    remote_num_tokens: prompt.len() + tokens.saturating_sub(1),
                    remote_blocks_expiry_time: (),
                    transfer_mode: "pull",
                    remote_prefill_cached_tokens: (tokens == 1).then_some(generation.cached_tokens),
                }))
            }
            Connector::Moriio => {
                let name = self.transfer_id.clone()?;
                self.shared.transfers.offer(name.clone(), offer);
                Some(PrefillResult::Moriio(MoriioResult {
                    do_remote_prefill: true,
                    do_remote_decode: false,
                    remote_block_ids: blocks,
                    remote_engine_id: driver.id().to_owned(),
                    remote_host: self.shared.addr.ip().to_string(),
                    remote_handshake_port: self.shared.addr.port(),
                    remote_notify_port: self.shared.addr.port(),
                    remote_dp_rank: 0,
                    remote_dp_rank_override: false,
                    remote_dp_size: 1,
                    tp_size: 1,
                    transfer_id: name,
                }))
            }
            Connector::Mooncake => {
                if let Some(name) = &self.transfer_id {
                    self.shared.transfers.offer(name.clone(), offer);
                }
                None
            }
        }
    }
}

/// The id of a request inside vLLM.
fn internal_id(api: Api, id: &str) -> String {
    let random = fastrand::u32(..);
    match api {
        Api::Chat | Api::Messages => format!("{id}-{random:08x}"),
        Api::Completions => format!("{id}-0-{random:08x}"),
        Api::Responses => format!("{id}_0-{random:08x}"),
    }
}
