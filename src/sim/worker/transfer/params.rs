//! `kv_transfer_params` as requests bring them and as a NIXL prefill engine answers with them. Pure.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::settings::Role;

/// What a request says of its handoff, for whichever connector.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Asked {
    /// The prompt as its router has tokenised it; no part of any handoff.
    pub(crate) prompt_token_ids: Option<Vec<u32>>,
    do_remote_decode: Option<bool>,
    do_remote_prefill: Option<bool>,
    pub(crate) transfer_id: Option<String>,
    pub(crate) remote_bootstrap_addr: Option<String>,
    pub(crate) remote_engine_id: Option<String>,
    pub(crate) remote_request_id: Option<String>,
    pub(crate) remote_host: Option<String>,
    pub(crate) remote_port: Option<u16>,
    pub(crate) remote_block_ids: Option<Value>,
    pub(crate) remote_prefill_cached_tokens: Option<usize>,
}

/// What an engine is to do of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leg {
    /// All of it.
    Whole,
    /// Its prompt, for another engine.
    Prefill,
    /// Its answer, to a prompt that another engine has computed.
    Decode,
}

impl Asked {
    /// Of any body; nothing if it cannot be read, which is somebody else's to say.
    pub(crate) fn peek(body: &[u8]) -> Self {
        #[derive(Deserialize)]
        struct Body {
            kv_transfer_params: Option<Asked>,
        }
        let body = serde_json::from_slice::<Body>(body).ok();
        body.and_then(|it| it.kv_transfer_params)
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
    /// Whether an engine of this role can do it. What comes to the wrong one kills a Mooncake engine;
    /// nobody has tried with NIXL, which is no reason to be kinder here.
    pub(crate) fn is_for(self, role: Option<Role>) -> bool {
        match self {
            Self::Whole => true,
            Self::Prefill => matches!(role, Some(Role::Prefill | Role::Both)),
            Self::Decode => matches!(role, Some(Role::Decode | Role::Both)),
        }
    }
}

/// What a NIXL prefill engine answers with, to be given to the decode engine as it is.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Handed {
    pub(crate) do_remote_prefill: bool,
    pub(crate) do_remote_decode: bool,
    /// A list for each group of the cache, of which there is one.
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
    /// Not said after an answer of several tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) remote_prefill_cached_tokens: Option<usize>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leg_is_told_by_its_switches() {
        let leg = |params: &str| {
            let body = format!(r#"{{"prompt":"x","kv_transfer_params":{params}}}"#);
            Asked::peek(body.as_bytes()).leg()
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
        assert_eq!(Asked::peek(b"{").leg(), Leg::Whole);
    }

    #[test]
    fn the_answer_is_that_of_a_real_engine() {
        let handed = Handed {
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
        assert_eq!(serde_json::to_string(&handed).unwrap(), expected);
    }
}
