//! Which chats SGLang renders as vLLM does, so that the router's tokens of them are SGLang's: messages of plain text without
//! anything that goes into the prompt in another way. Pure.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{self, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

/// Fields that are no part of the prompt. With any other the prompt may differ.
const OTHER_FIELDS: [&str; 34] = [
    "model",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "stream",
    "stream_options",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "ignore_eos",
    "skip_special_tokens",
    "no_stop_trim",
    "seed",
    "user",
    "metadata",
    "store",
    "service_tier",
    "priority",
    "session_id",
    "cache_salt",
    "prompt_cache_key",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "response_format",
    "safety_identifier",
];

/// Whether the chat's prompt is the same in both engines.
pub(in crate::relay) fn is_same_as_vllms(body: &[u8]) -> bool {
    let mut json = serde_json::Deserializer::from_slice(body);
    let read = de::Deserializer::deserialize_map(&mut json, Chat);
    matches!(read, Ok(true))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Message<'a> {
    #[serde(borrow)]
    role: Cow<'a, str>,
    #[serde(borrow)]
    content: &'a RawValue,
}

struct Chat;

impl<'de> Visitor<'de> for Chat {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a chat")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<bool, A::Error> {
        let mut has_messages = false;
        let mut is_same = true;
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            if key != "messages" {
                is_same &= OTHER_FIELDS.contains(&&*key);
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            is_same &= !std::mem::replace(&mut has_messages, true);
            let messages: Vec<Message<'de>> = map.next_value()?;
            let is_plain = |message: &Message<'_>| {
                let has_role = matches!(&*message.role, "system" | "user" | "assistant");
                has_role && message.content.get().starts_with('"')
            };
            is_same &= messages.iter().all(is_plain);
            // One that ends with an answer is continued, in another way in each engine.
            is_same &= messages.last().is_some_and(|last| last.role == "user");
        }
        Ok(has_messages && is_same)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_texts_that_end_with_the_user_are_the_same() {
        let user = r#"{"role":"user","content":"hi"}"#;
        for (body, expected) in [
            (format!(r#"{{"model":"m","messages":[{user}]}}"#), true),
            (
                format!(
                    r#"{{"messages":[{{"role":"system","content":"a\"b"}},{user},{{"role":"assistant","content":"x"}},{user}],"stream":true,"temperature":0}}"#
                ),
                true,
            ),
            (format!(r#"{{"messages":[{user}],"tools":[]}}"#), false),
            (
                format!(r#"{{"messages":[{user}],"reasoning_effort":"low"}}"#),
                false,
            ),
            (
                r#"{"messages":[{"role":"user","content":[{"type":"text","text":"hi"}]}]}"#
                    .to_owned(),
                false,
            ),
            (
                format!(r#"{{"messages":[{user},{{"role":"assistant","content":"x"}}]}}"#),
                false,
            ),
            (
                r#"{"messages":[{"role":"user","content":"hi","name":"a"}]}"#.to_owned(),
                false,
            ),
            (
                r#"{"messages":[{"role":"user","content":null}]}"#.to_owned(),
                false,
            ),
            (r#"{"messages":[]}"#.to_owned(), false),
            ("{}".to_owned(), false),
            ("[]".to_owned(), false),
        ] {
            assert_eq!(is_same_as_vllms(body.as_bytes()), expected, "{body}");
        }
    }
}
