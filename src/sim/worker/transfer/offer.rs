//! The end of a prefill leg: offers its blocks to a decode engine.

use std::net::SocketAddr;
use std::sync::Arc;

use serde_json::{Value, json};

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
    pub(crate) fn make(&self, ticket: &Ticket, generation: &Generation) -> Option<Value> {
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
        let (name, params) = match self.connector {
            Connector::Nixl => {
                let name = internal_id(request.api, &request.id);
                let tokens = generation.completion_tokens();
                let params = nixl_params(
                    self.shared.addr,
                    &driver.id,
                    &name,
                    &blocks,
                    // The KV of the last token is not computed.
                    prompt.len() + tokens.saturating_sub(1),
                    (tokens == 1).then_some(generation.cached_tokens),
                );
                (name, Some(params))
            }
            Connector::Moriio => {
                let name = self.transfer_id.clone()?;
                let params = moriio_params(self.shared.addr, &driver.id, &name, &blocks);
                (name, Some(params))
            }
            Connector::Mooncake => (self.transfer_id.clone()?, None),
        };
        self.shared.transfers.offer(name, offer);
        params
    }
}

/// The parameters in the answer of a NIXL prefill engine, which the router passes on to the decode engine. `cached_tokens`
/// is absent after an answer of several tokens.
fn nixl_params(
    address: SocketAddr,
    engine_id: &str,
    request_id: &str,
    blocks: &[u32],
    tokens: usize,
    cached_tokens: Option<usize>,
) -> Value {
    let mut params = json!({
        "do_remote_prefill": true,
        "do_remote_decode": false,
        // A list for each KV cache group; there is one group.
        "remote_block_ids": [blocks],
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": address.ip(),
        "remote_port": address.port(),
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": null,
        "transfer_mode": "pull",
    });
    if let Some(cached) = cached_tokens {
        params["remote_prefill_cached_tokens"] = cached.into();
    }
    params
}

/// The parameters in the answer of a MoRI-IO prefill engine in read mode, which the router passes on to the decode engine.
fn moriio_params(address: SocketAddr, engine_id: &str, transfer_id: &str, blocks: &[u32]) -> Value {
    json!({
        "do_remote_prefill": true,
        "do_remote_decode": false,
        "remote_block_ids": blocks,
        "remote_engine_id": engine_id,
        "remote_host": address.ip(),
        "remote_handshake_port": address.port(),
        "remote_notify_port": address.port(),
        "remote_dp_rank": 0,
        "remote_dp_rank_override": false,
        "remote_dp_size": 1,
        "tp_size": 1,
        "transfer_id": transfer_id,
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parameters_are_those_of_a_real_engine() {
        let address = SocketAddr::from(([127, 0, 0, 1], 5600));
        let engine_id = "07c63c5d-cd36-4b50-815d-339a9bbe6c38";
        let request_id = "chatcmpl-chat-99d0844f";
        let params = nixl_params(address, engine_id, request_id, &[256, 257], 50, Some(0));
        let expected = r#"{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[256,257]],"remote_engine_id":"07c63c5d-cd36-4b50-815d-339a9bbe6c38","remote_request_id":"chatcmpl-chat-99d0844f","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":50,"remote_blocks_expiry_time":null,"transfer_mode":"pull","remote_prefill_cached_tokens":0}"#;
        assert_eq!(params.to_string(), expected);
    }
}
