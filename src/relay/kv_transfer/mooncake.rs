//! vLLM's `MooncakeConnector`: both legs carry a transfer id that the router makes, and the decode leg names the
//! prefill worker's bootstrap server. The prefill leg's answer has nothing of that.

use super::types::{ASKS_FOR_BLOCKS, Transfer, TransferError, quoted};

/// Fields of the prefill leg's `kv_transfer_params`.
pub(super) fn prefill_params(transfer: &Transfer) -> String {
    let id = quoted(&transfer.id);
    format!(r#"{ASKS_FOR_BLOCKS},"transfer_id":{id}"#)
}

/// The decode leg's `kv_transfer_params`.
pub(super) fn decode_params(transfer: &Transfer) -> Result<String, TransferError> {
    let bootstrap_info = transfer.bootstrap_info.as_ref();
    let bootstrap_info = bootstrap_info.ok_or(TransferError::NoBootstrap)?;
    let engine = bootstrap_info.engine_id(transfer.rank);
    let engine = quoted(engine.ok_or(TransferError::NoBootstrap)?);
    let (bootstrap, id) = (quoted(&bootstrap_info.url), quoted(&transfer.id));
    Ok(format!(
        r#""do_remote_decode":false,"do_remote_prefill":true,"remote_bootstrap_addr":{bootstrap},"remote_engine_id":{engine},"transfer_id":{id}"#
    ))
}
