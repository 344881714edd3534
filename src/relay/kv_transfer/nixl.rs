//! vLLM's `NixlConnector`: the prefill leg's answer says where the KV blocks are, and the decode leg's engine
//! fetches them from there.

use std::borrow::Cow;
use std::net::IpAddr;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::types::{Answer, Transfer, TransferError, has_blocks, quoted};

/// The fields of `kv_transfer_params` that a decode engine cannot do without. Others (`tp_size`, ...) pass
/// unchanged.
#[derive(Deserialize)]
struct Params<'a> {
    do_remote_prefill: bool,
    #[serde(borrow)]
    remote_block_ids: &'a RawValue,
    #[serde(borrow)]
    remote_engine_id: Cow<'a, str>,
    #[serde(borrow)]
    remote_request_id: Cow<'a, str>,
    #[serde(borrow)]
    remote_host: &'a RawValue,
    remote_port: u16,
    /// Missing in older versions.
    #[serde(default)]
    remote_prefill_cached_tokens: Option<u64>,
}

/// The decode leg's `kv_transfer_params`, and how many tokens the prefill worker had cached.
pub(super) fn read(
    transfer: &Transfer,
    answer: &Answer<'_>,
) -> Result<(String, u64), TransferError> {
    let (params, inside): (Params<'_>, _) = answer.params()?;
    let is_named = !params.remote_engine_id.is_empty()
        && !params.remote_request_id.is_empty()
        && params.remote_port != 0;
    if !params.do_remote_prefill || !has_blocks(params.remote_block_ids) || !is_named {
        return Err(TransferError::NoParams);
    }
    let text = params.remote_host.get();
    let host: Cow<'_, str> = serde_json::from_str(text).map_err(|_| TransferError::NoParams)?;
    // Without VLLM_NIXL_SIDE_CHANNEL_HOST an engine reports a loopback address, which no other host can reach.
    let fields = if is_local(&host) && !is_local(&transfer.host) {
        let start = text.as_ptr().addr() - inside.as_ptr().addr();
        let (before, after) = (&inside[..start], &inside[start + text.len()..]);
        let host = transfer.host.trim_start_matches('[').trim_end_matches(']');
        [before, &quoted(host), after].concat()
    } else {
        inside.to_owned()
    };
    Ok((fields, params.remote_prefill_cached_tokens.unwrap_or(0)))
}

/// True for an address that only the machine itself can use.
fn is_local(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let address = bare.parse::<IpAddr>();
    host == "localhost"
        || address.is_ok_and(|address| address.is_loopback() || address.is_unspecified())
}
