//! `kv_transfer_params` of requests, and of the answers of a NIXL prefill engine. Pure.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::settings::Role;

/// The parameters of a request, for either connector.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct TransferParams {
    /// The prompt's tokens, which a router may send along; not part of the transfer.
    pub(crate) prompt_token_ids: Option<Vec<u32>>,
    do_remote_decode: Option<bool>,
    do_remote_prefill: Option<bool>,
    pub(crate) transfer_id: Option<String>,
    pub(crate) remote_bootstrap_addr: Option<String>,
    pub(crate) remote_engine_id: Option<String>,
    pub(crate) remote_request_id: Option<String>,
    pub(crate) remote_host: Option<String>,
    pub(crate) remote_port: Option<u16>,
    pub(crate) remote_handshake_port: Option<u16>,
    pub(crate) remote_block_ids: Option<Value>,
    pub(crate) remote_prefill_cached_tokens: Option<usize>,
}

/// Which part of a request an engine does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leg {
    /// Prefill and decode.
    Whole,
    /// Prefill, for another engine to decode.
    Prefill,
    /// Decode, after another engine's prefill.
    Decode,
}

impl TransferParams {
    /// The parameters in a request body. Of an invalid body there are none; others report the error.
    pub(crate) fn of_body(body: &[u8]) -> Self {
        #[derive(Deserialize)]
        struct Body {
            kv_transfer_params: Option<TransferParams>,
        }
        let body = serde_json::from_slice::<Body>(body).ok();
        body.and_then(|body| body.kv_transfer_params)
            .unwrap_or_default()
    }

    pub(crate) fn leg(&self) -> Leg {
        if self.do_remote_prefill == Some(true) {
            Leg::Decode
        } else if self.do_remote_decode == Some(true) {
            Leg::Prefill
        } else {
            Leg::Whole
        }
    }
}

impl Leg {
    /// Whether an engine of this role can do it. In Mooncake, a leg of the other role kills the engine; NIXL is assumed to
    /// do the same.
    pub(crate) fn is_for(self, role: Option<Role>) -> bool {
        match self {
            Self::Whole => true,
            Self::Prefill => matches!(role, Some(Role::Prefill | Role::Both)),
            Self::Decode => matches!(role, Some(Role::Decode | Role::Both)),
        }
    }
}

/// The parameters in the answer of a prefill engine, which the router passes on to the decode engine.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum PrefillResult {
    Nixl(NixlResult),
    Moriio(MoriioResult),
}

/// The parameters in the answer of a NIXL prefill engine, which the router passes on to the decode engine.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct NixlResult {
    pub(crate) do_remote_prefill: bool,
    pub(crate) do_remote_decode: bool,
    /// A list for each KV cache group; there is one group.
    pub(crate) remote_block_ids: [Vec<u32>; 1],
    pub(crate) remote_engine_id: String,
    pub(crate) remote_request_id: String,
    pub(crate) remote_host: String,
    pub(crate) remote_port: u16,
    pub(crate) tp_size: u32,
    pub(crate) dcp_size: u32,
    pub(crate) pp_size: u32,
    pub(crate) remote_num_tokens: usize,
    pub(crate) remote_blocks_expiry_time: (),
    pub(crate) transfer_mode: &'static str,
    /// Absent after an answer of several tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) remote_prefill_cached_tokens: Option<usize>,
}

/// The parameters in the answer of a MoRI-IO prefill engine in read mode, which the router passes on to the decode engine.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct MoriioResult {
    pub(crate) do_remote_prefill: bool,
    pub(crate) do_remote_decode: bool,
    pub(crate) remote_block_ids: Vec<u32>,
    pub(crate) remote_engine_id: String,
    pub(crate) remote_host: String,
    pub(crate) remote_handshake_port: u16,
    pub(crate) remote_notify_port: u16,
    pub(crate) remote_dp_rank: u32,
    pub(crate) remote_dp_rank_override: bool,
    pub(crate) remote_dp_size: u32,
    pub(crate) tp_size: u32,
    pub(crate) transfer_id: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_switches_decide_the_leg() {
        let leg = |params: &str| {
            let body = format!(r#"{{"prompt":"x","kv_transfer_params":{params}}}"#);
            TransferParams::of_body(body.as_bytes()).leg()
        };
        let cases = [
            ("null", Leg::Whole),
            (r#"{"prompt_token_ids":[1,2]}"#, Leg::Whole),
            (r#"{"do_remote_decode":true}"#, Leg::Prefill),
            (
                r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_port":null}"#,
                Leg::Prefill,
            ),
            (
                r#"{"do_remote_prefill":true,"do_remote_decode":false,"remote_port":5600}"#,
                Leg::Decode,
            ),
        ];
        for (params, expected) in cases {
            assert_eq!(leg(params), expected, "{params}");
        }
        assert_eq!(TransferParams::of_body(b"{").leg(), Leg::Whole);
    }

    #[test]
    fn the_parameters_are_those_of_a_real_engine() {
        let result = NixlResult {
            do_remote_prefill: true,
            do_remote_decode: false,
            remote_block_ids: [vec![256, 257]],
            remote_engine_id: "07c63c5d-cd36-4b50-815d-339a9bbe6c38".to_owned(),
            remote_request_id: "chatcmpl-chat-99d0844f".to_owned(),
            remote_host: "127.0.0.1".to_owned(),
            remote_port: 5600,
            tp_size: 1,
            dcp_size: 1,
            pp_size: 1,
            remote_num_tokens: 50,
            remote_blocks_expiry_time: (),
            transfer_mode: "pull",
            remote_prefill_cached_tokens: Some(0),
        };
        let expected = r#"{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[256,257]],"remote_engine_id":"07c63c5d-cd36-4b50-815d-339a9bbe6c38","remote_request_id":"chatcmpl-chat-99d0844f","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":50,"remote_blocks_expiry_time":null,"transfer_mode":"pull","remote_prefill_cached_tokens":0}"#;
        assert_eq!(serde_json::to_string(&result).unwrap(), expected);
    }
}
