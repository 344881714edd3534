//! vLLM's `MooncakeConnector`: both legs carry a transfer id that the router makes, and the decode leg names the
//! prefill worker's bootstrap server. The prefill leg's answer has nothing of that.

use super::types::{Answer, DecodeParams, Dialect, Transfer, TransferError, quoted};

#[derive(Debug)]
pub(super) struct Mooncake;

impl Dialect for Mooncake {
    fn prefill_params(&self, transfer: &Transfer) -> String {
        let id = quoted(&transfer.id);
        format!(r#""do_remote_decode":true,"do_remote_prefill":false,"transfer_id":{id}"#)
    }

    /// An engine whose prefill leg ends at the end-of-sequence token frees the blocks, and the decode leg waits
    /// for them for minutes.
    fn prefill_fields(&self) -> &'static str {
        r#","ignore_eos":true"#
    }

    fn read(
        &self,
        transfer: &Transfer,
        answer: &Answer<'_>,
    ) -> Result<DecodeParams, TransferError> {
        if !answer.is_cut_at_one_token() {
            return Err(TransferError::Stopped);
        }
        let bootstrap_info = transfer
            .bootstrap_info
            .as_ref()
            .ok_or(TransferError::NoBootstrap)?;
        let engine = bootstrap_info
            .engine_id(transfer.rank)
            .ok_or(TransferError::NoBootstrap)?;
        let (bootstrap, engine, id) = (
            quoted(&bootstrap_info.url),
            quoted(engine),
            quoted(&transfer.id),
        );
        Ok(DecodeParams {
            fields: format!(
                r#""do_remote_decode":false,"do_remote_prefill":true,"remote_bootstrap_addr":{bootstrap},"remote_engine_id":{engine},"transfer_id":{id}"#
            ),
            cached_tokens: 0,
        })
    }
}
