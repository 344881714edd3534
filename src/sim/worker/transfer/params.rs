//! `kv_transfer_params` of requests. Pure.

use serde::Deserialize;
use serde_json::Value;

use crate::fleet::Role;

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
}
