//! vLLM's `MoRIIOConnector` (AMD GPUs) with `read_mode`: like NIXL, the prefill leg's answer says where the KV blocks are, and
//! the decode leg's engine reads them from there. Written after vLLM 0.33's source; not tried on hardware.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::types::{ASKS_FOR_BLOCKS, Answer, Transfer, TransferError, has_blocks, quoted};

/// The fields of `kv_transfer_params` that a decode engine cannot do without. Others pass unchanged.
#[derive(Deserialize)]
struct Params<'a> {
    do_remote_prefill: bool,
    #[serde(borrow)]
    remote_block_ids: &'a RawValue,
    #[serde(borrow)]
    remote_engine_id: Cow<'a, str>,
    #[serde(borrow)]
    remote_host: Cow<'a, str>,
    remote_handshake_port: u16,
    remote_notify_port: u16,
}

/// Fields of the prefill leg's `kv_transfer_params`.
pub(super) fn prefill_params(transfer: &Transfer) -> String {
    let id = quoted(&transfer.id);
    format!(
        r#"{ASKS_FOR_BLOCKS},"remote_engine_id":null,"remote_block_ids":null,"transfer_id":{id},"remote_dp_size":1,"tp_size":1,"remote_tp_size":1"#
    )
}

/// The decode leg's `kv_transfer_params`.
pub(super) fn read(answer: &Answer<'_>) -> Result<String, TransferError> {
    let (params, inside): (Params<'_>, _) = answer.params()?;
    let has_blocks = has_blocks(params.remote_block_ids);
    let is_named = !params.remote_engine_id.is_empty() && !params.remote_host.is_empty();
    let has_ports = params.remote_handshake_port != 0 && params.remote_notify_port != 0;
    if !(params.do_remote_prefill && has_blocks && is_named && has_ports) {
        return Err(TransferError::NoParams);
    }
    Ok(inside.to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fleet::kv_transfer::Connector;
    use crate::prompt::Api;

    fn begin() -> Transfer {
        let id = "tx-1".to_owned();
        Transfer::begin(Connector::Moriio, Api::Completions, id, "p0", None, None, 0).unwrap()
    }

    fn answer(finish_reason: &str, params: &Value) -> String {
        json!({
            "choices": [{"finish_reason": finish_reason, "text": "a"}],
            "usage": {"prompt_tokens": 50, "completion_tokens": 1},
            "kv_transfer_params": params,
        })
        .to_string()
    }

    fn offered() -> Value {
        json!({
            "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [3, 4], "remote_engine_id": "e",
            "remote_host": "10.0.0.5", "remote_handshake_port": 6301, "remote_notify_port": 61005, "remote_dp_rank": 0,
            "remote_dp_rank_override": false, "remote_dp_size": 1, "tp_size": 8, "transfer_id": "tx-1"
        })
    }

    #[test]
    fn a_prefill_leg_names_the_transfer_and_asks_for_blocks_to_be_kept() {
        let params = prefill_params(&begin());
        let params: Value = serde_json::from_str(&format!("{{{params}}}")).unwrap();
        assert_eq!(params["do_remote_decode"], true);
        assert_eq!(params["do_remote_prefill"], false);
        assert_eq!(params["transfer_id"], "tx-1");
    }

    #[test]
    fn a_decode_leg_gets_what_the_prefill_leg_answered() {
        let read = begin()
            .end(answer("length", &offered()).as_bytes())
            .unwrap();
        assert_eq!(read.prompt_tokens, 50);
        let params: Value = serde_json::from_str(&format!("{{{}}}", read.params.0)).unwrap();
        assert_eq!(params, offered());
    }

    #[test]
    fn an_answer_that_a_decode_engine_could_not_use_is_refused() {
        let why = |answer: &str| begin().end(answer.as_bytes()).unwrap_err();
        assert_eq!(why(&answer("stop", &offered())), TransferError::Stopped);
        assert_eq!(
            why(&answer("length", &Value::Null)),
            TransferError::NoParams
        );
        for (field, value) in [
            ("do_remote_prefill", json!(false)),
            ("remote_block_ids", json!([])),
            ("remote_engine_id", json!("")),
            ("remote_host", json!(null)),
            ("remote_handshake_port", json!(0)),
            ("remote_notify_port", json!(70_000)),
        ] {
            let mut params = offered();
            params[field] = value;
            let found = why(&answer("length", &params));
            assert_eq!(found, TransferError::NoParams, "{field}");
        }
    }
}
