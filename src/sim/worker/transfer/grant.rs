//! The end of a prefill leg: its blocks are offered to whoever is named.

use std::sync::Arc;

use super::{Connector, Handed, Offer, fingerprint};
use crate::sim::worker::Shared;
use crate::sim::worker::answer::Transcript;
use crate::sim::worker::ask::Api;
use crate::sim::worker::driver::Ticket;

/// A promise to offer a prompt's blocks once the prompt is computed.
#[derive(Debug)]
pub(crate) struct Grant {
    pub(crate) shared: Arc<Shared>,
    pub(crate) connector: Connector,
    pub(crate) transfer_id: Option<String>,
}

impl Grant {
    /// The answer has ended, and the engine keeps its blocks. Says what the answer tells of them.
    pub(crate) fn offer(&self, ticket: &Ticket, transcript: &Transcript) -> Option<Handed> {
        let (driver, key) = ticket.first()?;
        let blocks = driver.kept_blocks(key)?;
        let ask = &transcript.ask;
        let prompt = ask.prompts.first()?;
        let offer = Offer {
            driver: Arc::clone(driver),
            key,
            fingerprint: fingerprint(prompt, ask.salt),
            is_used: false,
        };
        match self.connector {
            Connector::Nixl => {
                let request_id = internal_id(ask.api, &ask.id);
                self.shared.transfers.offer(request_id.clone(), offer);
                let tokens = transcript.completion_tokens();
                Some(Handed {
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
                    // What the last token said is not computed.
                    remote_num_tokens: prompt.len() + tokens.saturating_sub(1),
                    remote_blocks_expiry_time: (),
                    transfer_mode: "pull",
                    remote_prefill_cached_tokens: (tokens == 1).then_some(transcript.cached_tokens),
                })
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

/// The name of a request inside vLLM.
fn internal_id(api: Api, id: &str) -> String {
    let random = fastrand::u32(..);
    match api {
        Api::Chat => format!("{id}-{random:08x}"),
        Api::Completions => format!("{id}-0-{random:08x}"),
        Api::Responses => format!("{id}_0-{random:08x}"),
    }
}
