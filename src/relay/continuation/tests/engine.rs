//! An engine whose next token follows from all tokens before it, and whose characters may be several tokens.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde_json::{Value, json};

use crate::prompt::Api;

const WORDS: [&str; 6] = ["once ", "upon ", "a ", "time", ", \"so\" ", "\n"];
/// The end of the reasoning, which has no text.
const THINK_END: u32 = 50;
/// The first bytes of characters of several tokens; then come tokens of a byte each.
const PARTS: [&str; 2] = ["é", "🙂"];
const PROMPT: [u32; 5] = [1001, 1002, 1003, 1004, 1005];

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Engine {
    /// Chats begin with reasoning.
    pub(super) reasons: bool,
}

impl Engine {
    /// The whole stream for a body.
    pub(super) fn stream(self, api: Api, body: &[u8]) -> String {
        let body: Value = serde_json::from_slice(body).unwrap();
        let given = match api {
            Api::Completions => &body["prompt"],
            _ => &body["kv_transfer_params"]["prompt_token_ids"],
        };
        let mut tokens: Vec<u32> =
            serde_json::from_value(given.clone()).unwrap_or_else(|_| PROMPT.to_vec());
        let prompt = tokens.clone();
        let asks_ids = body["return_token_ids"] == true;
        let max_tokens = body["max_tokens"].as_u64().unwrap();
        let options = &body["stream_options"];
        let is_chat = api != Api::Completions;
        let has_reasoning = self.reasons && is_chat;
        let mut is_reasoning = has_reasoning && !prompt.contains(&THINK_END);
        let id = format!("id-{}", prompt.len());
        let usage = |count: usize| json!({"prompt_tokens": prompt.len(), "total_tokens": prompt.len() + count, "completion_tokens": count});
        let mut stream = String::new();
        let mut event = |choices: Value, count: usize, prompt_ids: Option<Value>| {
            let mut chunk =
                json!({"id": id, "created": prompt.len(), "model": "m", "choices": choices});
            if options["continuous_usage_stats"] == true {
                chunk["usage"] = usage(count);
            }
            if let Some(ids) = prompt_ids {
                chunk["prompt_token_ids"] = ids;
            }
            stream += &format!("data: {chunk}\n\n");
        };
        let prompt_ids = if asks_ids { json!(prompt) } else { Value::Null };
        if is_chat {
            let role = json!([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null}]);
            event(role, 0, Some(prompt_ids.clone()));
        }
        let mut held = Vec::new();
        for left in (0..max_tokens).rev() {
            let token = next(&tokens, left, is_reasoning);
            tokens.push(token);
            let count = tokens.len() - prompt.len();
            held.extend_from_slice(&bytes(token));
            let text = match String::from_utf8(held.clone()) {
                Ok(text) => {
                    held.clear();
                    text
                }
                Err(_) => String::new(),
            };
            let finish = if left == 0 {
                json!("length")
            } else {
                Value::Null
            };
            let ids = if asks_ids {
                json!([token])
            } else {
                Value::Null
            };
            let mut choice = json!({"index": 0});
            if is_chat {
                choice["delta"] = match is_reasoning {
                    _ if token == THINK_END => json!({}),
                    true => json!({"reasoning": text}),
                    false => json!({"content": text}),
                };
            } else {
                choice["text"] = text.into();
                let is_first = count == 1;
                choice["prompt_token_ids"] = if is_first {
                    prompt_ids.clone()
                } else {
                    Value::Null
                };
            }
            is_reasoning &= token != THINK_END;
            choice["finish_reason"] = finish;
            choice["token_ids"] = ids;
            // Without ids, a chunk with nothing in it is not sent.
            if token != THINK_END || asks_ids || left == 0 {
                event(json!([choice]), count, None);
            }
        }
        if options["include_usage"] == true {
            let count = tokens.len() - prompt.len();
            let mut usage = usage(count);
            usage["prompt_tokens_details"] = json!({"cached_tokens": 0});
            let chunk = json!({"id": id, "created": prompt.len(), "model": "m", "choices": [], "usage": usage});
            stream += &format!("data: {chunk}\n\n");
        }
        stream + "data: [DONE]\n\n"
    }
}

fn next(tokens: &[u32], left: u64, is_reasoning: bool) -> u32 {
    let last = *tokens.last().unwrap();
    let (part, byte) = (last / 100, last % 100);
    // The rest of a character.
    if (1..=2).contains(&part) && (byte as usize) + 1 < PARTS[part as usize - 1].len() {
        return last + 1;
    }
    let mut hasher = DefaultHasher::new();
    tokens.hash(&mut hasher);
    let random = hasher.finish() % 12;
    match random {
        8 | 9 if left >= 4 => (random as u32 - 7) * 100,
        10 | 11 if is_reasoning => THINK_END,
        random => (random % WORDS.len() as u64) as u32,
    }
}

fn bytes(token: u32) -> Vec<u8> {
    match token {
        THINK_END => Vec::new(),
        100.. => vec![PARTS[token as usize / 100 - 1].as_bytes()[token as usize % 100]],
        word => WORDS[word as usize].as_bytes().to_vec(),
    }
}
