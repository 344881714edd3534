//! vLLM's `NixlConnector`, which pulls: the prefill leg's answer names the blocks, and the decode leg's
//! engine fetches them from where it says.

use std::borrow::Cow;
use std::net::IpAddr;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::{Answer, Dialect, Told, Transfer, Unhanded, quoted};

#[derive(Debug)]
pub(super) struct Nixl;

/// Of its `kv_transfer_params`, what an engine that is sent them relies on. `tp_size` and the like pass as
/// they are.
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

impl Dialect for Nixl {
    fn ask(&self, _: &Transfer) -> String {
        r#""do_remote_decode":true,"do_remote_prefill":false"#.to_owned()
    }

    fn read(&self, transfer: &Transfer, answer: &Answer<'_>) -> Result<Told, Unhanded> {
        let raw = answer.kv_transfer_params.ok_or(Unhanded::NoParams)?.get();
        let params: Params<'_> = serde_json::from_str(raw).map_err(|_| Unhanded::NoParams)?;
        // A decode engine that is told to fetch, and not which blocks, dies of it.
        let has_blocks = params
            .remote_block_ids
            .get()
            .contains(|c: char| c.is_ascii_digit());
        let is_named = !params.remote_engine_id.is_empty()
            && !params.remote_request_id.is_empty()
            && params.remote_port != 0;
        if !params.do_remote_prefill || !has_blocks || !is_named {
            return Err(Unhanded::NoParams);
        }
        let host: Cow<'_, str> =
            serde_json::from_str(params.remote_host.get()).map_err(|_| Unhanded::NoParams)?;
        let inside = raw
            .strip_prefix('{')
            .and_then(|inside| inside.strip_suffix('}'))
            .ok_or(Unhanded::NoParams)?;
        // An engine that was not told its own address says one that means itself to everybody.
        let fields = if is_of_its_own(&host) && !is_of_its_own(&transfer.host) {
            let text = params.remote_host.get();
            let start = text.as_ptr().addr() - inside.as_ptr().addr();
            let (before, after) = (&inside[..start], &inside[start + text.len()..]);
            let host = transfer.host.trim_start_matches('[').trim_end_matches(']');
            [before, &quoted(host), after].concat()
        } else {
            inside.to_owned()
        };
        Ok(Told {
            fields,
            cached_tokens: params.remote_prefill_cached_tokens.unwrap_or(0),
        })
    }
}

/// Whether only the machine itself can mean itself by it.
fn is_of_its_own(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let address = bare.parse::<IpAddr>();
    host == "localhost" || address.is_ok_and(|it| it.is_loopback() || it.is_unspecified())
}
