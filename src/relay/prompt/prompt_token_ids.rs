//! Puts the prompt's token ids into a request's body, so that the engine computes the prompt that the request was
//! routed by, and does not tokenize it again. Pure.

use bytes::Bytes;

use super::sglang_prompt;
use crate::fleet::engine::TokenIdsField;
use crate::prompt::Api;

/// In `kv_transfer_params`, which vLLM reads.
const BEFORE: &[u8] = br#""kv_transfer_params":{"prompt_token_ids":"#;
const AFTER: &[u8] = b"}}";
/// In `input_ids`, which SGLang reads.
const BEFORE_INPUT_IDS: &[u8] = br#""input_ids":"#;
const AFTER_INPUT_IDS: &[u8] = b"}";

/// The body with one more field at its end and otherwise unchanged. If the body has the field with null, the last
/// one counts. `None` for an API that takes no ids, and for `input_ids` of a chat that SGLang may render in another way: with ids
/// it takes them as they are.
pub(in crate::relay) fn spliced(
    field: TokenIdsField,
    api: Api,
    body: &[u8],
    ids: &[u32],
) -> Option<Bytes> {
    match (field, api) {
        (TokenIdsField::KvTransferParams, Api::Chat | Api::Responses) => {
            with_ids(body, BEFORE, ids, AFTER)
        }
        (TokenIdsField::InputIds, Api::Chat) if sglang_prompt::is_same_as_vllms(body) => {
            with_ids(body, BEFORE_INPUT_IDS, ids, AFTER_INPUT_IDS)
        }
        _ => None,
    }
}

fn with_ids(body: &[u8], before: &[u8], ids: &[u32], after: &[u8]) -> Option<Bytes> {
    let end = body.iter().rposition(|byte| *byte == b'}')?;
    let fields = body[..end].trim_ascii_end();
    let is_first = fields.last() == Some(&b'{');
    // Six digits and a comma.
    let room = fields.len() + before.len() + ids.len() * 7 + after.len() + 3;
    let mut whole = Vec::with_capacity(room);
    whole.extend_from_slice(fields);
    if !is_first {
        whole.push(b',');
    }
    whole.extend_from_slice(before);
    serde_json::to_writer(&mut whole, ids).ok()?;
    whole.extend_from_slice(after);
    Some(Bytes::from(whole))
}

#[cfg(test)]
mod tests {
    use super::TokenIdsField::{InputIds, KvTransferParams};
    use super::*;

    fn check(body: &str, ids: &[u32], expected: &str) {
        let spliced = spliced(KvTransferParams, Api::Chat, body.as_bytes(), ids).unwrap();
        assert_eq!(str::from_utf8(&spliced).unwrap(), expected);
    }

    #[test]
    fn the_ids_are_the_last_field_and_the_rest_is_untouched() {
        check(
            r#"{"messages": [ {"role":"user"} ] , "a" :1.0 }  "#,
            &[0, 7, 151_643, u32::MAX],
            r#"{"messages": [ {"role":"user"} ] , "a" :1.0,"kv_transfer_params":{"prompt_token_ids":[0,7,151643,4294967295]}}"#,
        );
        check(
            "{ }",
            &[1],
            r#"{"kv_transfer_params":{"prompt_token_ids":[1]}}"#,
        );
    }

    #[test]
    fn a_null_of_the_same_name_comes_before() {
        check(
            r#"{"kv_transfer_params":null}"#,
            &[1],
            r#"{"kv_transfer_params":null,"kv_transfer_params":{"prompt_token_ids":[1]}}"#,
        );
    }

    #[test]
    fn sglang_takes_them_for_a_plain_chat() {
        let chat = br#"{"messages":[{"role":"user","content":"x"}]}"#;
        let spliced = |api, body: &[u8]| spliced(InputIds, api, body, &[1, 20]);
        assert_eq!(
            spliced(Api::Chat, chat).unwrap(),
            r#"{"messages":[{"role":"user","content":"x"}],"input_ids":[1,20]}"#
        );
        assert_eq!(spliced(Api::Chat, b"{}"), None);
        assert_eq!(spliced(Api::Responses, chat), None);
    }

    #[test]
    fn completions_take_none() {
        for field in [KvTransferParams, InputIds] {
            assert_eq!(spliced(field, Api::Completions, b"{}", &[1]), None);
            assert_eq!(spliced(field, Api::Embeddings, b"{}", &[1]), None);
        }
    }
}
