//! A request whose stream may be continued: whether it may, what the first worker is sent, and what the next.

use std::borrow::Cow;
use std::ops::Range;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;
use smallvec::SmallVec;

use super::refusal::Refusal;
use crate::json_scan::Scan;
use crate::prompt::Api;
use crate::relay::request::body_edit::{Edit, applied};

const ASKING: &str = "return_token_ids";
const PARAMS: &str = "kv_transfer_params";
/// How the router's own `kv_transfer_params` begin, where it sends the ids of the prompt.
const OWN_PARAMS: &str = r#"{"prompt_token_ids":["#;

/// The body that asks the engine for token ids, and where it changes for the next worker.
#[derive(Clone, Debug)]
pub(in crate::relay) struct Request {
    api: Api,
    /// What the first worker is sent.
    pub(in crate::relay) body: Bytes,
    /// Values that say how many tokens the answer may or must have.
    counts: SmallVec<[Count; 2]>,
    /// The value of a completion's prompt, or of a chat's `kv_transfer_params`.
    prompt: Option<Range<usize>>,
}

#[derive(Clone, Debug)]
struct Count {
    range: Range<usize>,
    tokens: u64,
    /// `min_tokens` may become 0; the others may not.
    is_minimum: bool,
}

impl Request {
    /// Reads the body of a streamed request as one worker gets it.
    pub(in crate::relay) fn read(api: Api, body: &Bytes) -> Result<Self, Refusal> {
        if !matches!(api, Api::Chat | Api::Completions) {
            return Err(Refusal::Api);
        }
        let mut reader = Reader {
            api,
            body,
            refusal: None,
            counts: SmallVec::new(),
            prompt: None,
        };
        let scan = Scan::<true>::of_bytes(body).ok_or(Refusal::Body)?;
        scan.whole_object(|name, value| reader.on_member(&name, value))
            .ok_or(Refusal::Body)?;
        if let Some(refusal) = reader.refusal {
            return Err(refusal);
        }
        let (counts, prompt) = (reader.counts, reader.prompt);
        if api == Api::Completions && prompt.is_none() {
            return Err(Refusal::Body);
        }
        let asking = Edit::last_field(body, ASKING, "true").ok_or(Refusal::Body)?;
        Ok(Self {
            api,
            body: applied(body, &mut [asking]),
            counts,
            prompt,
        })
    }

    /// What the next worker is sent, which goes on after these tokens of the answer.
    pub(super) fn after(&self, prompt: &[u32], answer: &[u32]) -> Result<Bytes, Refusal> {
        let done = answer.len() as u64;
        let mut edits: SmallVec<[Edit; 3]> = SmallVec::new();
        for count in &self.counts {
            let left = count.tokens.saturating_sub(done);
            if left == 0 && !count.is_minimum {
                return Err(Refusal::Finished);
            }
            edits.push(Edit {
                range: count.range.clone(),
                text: left.to_string(),
            });
        }
        // Numbers always serialize.
        let ids = serde_json::to_string(&[prompt, answer].concat()).unwrap_or_default();
        let text = match self.api {
            Api::Chat => format!("{OWN_PARAMS}{}}}", ids.trim_start_matches('[')),
            _ => ids,
        };
        edits.push(match self.prompt.clone() {
            Some(range) => Edit { range, text },
            None => Edit::last_field(&self.body, PARAMS, &text).ok_or(Refusal::Body)?,
        });
        Ok(applied(&self.body, &mut edits))
    }
}

/// One pass over a body's members.
struct Reader<'a> {
    api: Api,
    body: &'a [u8],
    refusal: Option<Refusal>,
    counts: SmallVec<[Count; 2]>,
    prompt: Option<Range<usize>>,
}

impl<'a> Reader<'a> {
    fn on_member(&mut self, name: &str, value: &'a str) {
        if let Err(refusal) = self.read(name, value) {
            self.refusal.get_or_insert(refusal);
        }
    }

    fn read(&mut self, name: &str, value: &'a str) -> Result<(), Refusal> {
        let is_chat = self.api == Api::Chat;
        // Null is as good as absent.
        let unless = |is_fine: bool, refusal| {
            if is_fine || value == "null" {
                Ok(())
            } else {
                Err(refusal)
            }
        };
        match name {
            ASKING => Err(Refusal::TokenIds),
            PARAMS if value != "null" && !value.starts_with(OWN_PARAMS) => Err(Refusal::Body),
            PARAMS if is_chat => {
                self.prompt = Some(self.range(value));
                Ok(())
            }
            "prompt" if !is_chat => {
                self.prompt = Some(self.range(value));
                unless(is_one_prompt(value), Refusal::Several)
            }
            "max_tokens" => self.on_count(value, false),
            "max_completion_tokens" if is_chat => self.on_count(value, false),
            "min_tokens" => self.on_count(value, true),
            "n" | "best_of" => unless(value == "1", Refusal::Several),
            "use_beam_search" => unless(value == "false", Refusal::Several),
            "echo" => unless(value == "false", Refusal::PromptOutput),
            "prompt_logprobs" => unless(false, Refusal::PromptOutput),
            "logprobs" if !is_chat => unless(false, Refusal::Logprobs),
            "prompt_embeds" => unless(false, Refusal::Media),
            "messages" if is_chat => unless(is_text(value), Refusal::Media),
            "truncate_prompt_tokens" => unless(false, Refusal::Truncated),
            "response_format" => unless(is_type(value, "text"), Refusal::Grammar),
            "structured_outputs" => unless(false, Refusal::Grammar),
            _ if name.starts_with("guided_") => unless(false, Refusal::Grammar),
            "tool_choice" => {
                let is_free = matches!(value, "\"auto\"" | "\"none\"");
                unless(is_free, Refusal::ToolChoice)
            }
            "function_call" => unless(value == "\"none\"", Refusal::ToolChoice),
            "seed" => unless(false, Refusal::Seed),
            "presence_penalty" | "frequency_penalty" => {
                let is_zero = value.parse::<f64>().is_ok_and(|penalty| penalty == 0.0);
                unless(is_zero, Refusal::Penalty)
            }
            "stop" => unless(matches!(value, "[]" | "\"\""), Refusal::StopStrings),
            "include_reasoning" => unless(value == "true", Refusal::HiddenTokens),
            _ => Ok(()),
        }
    }

    fn on_count(&mut self, value: &str, is_minimum: bool) -> Result<(), Refusal> {
        if value == "null" {
            return Ok(());
        }
        let tokens = value.parse().map_err(|_| Refusal::Body)?;
        let range = self.range(value);
        self.counts.push(Count {
            range,
            tokens,
            is_minimum,
        });
        Ok(())
    }

    /// Where a value, which is a part of the body, stands in it.
    fn range(&self, value: &str) -> Range<usize> {
        let start = value.as_ptr().addr() - self.body.as_ptr().addr();
        start..start + value.len()
    }
}

/// A text, or one list of token ids.
fn is_one_prompt(prompt: &str) -> bool {
    let inside = prompt.strip_prefix('[').map(str::trim_start);
    inside.is_none_or(|inside| inside.starts_with(|first: char| first.is_ascii_digit()))
}

fn is_type(value: &str, expected: &str) -> bool {
    #[derive(Deserialize)]
    struct Typed<'a> {
        #[serde(borrow, rename = "type")]
        kind: Cow<'a, str>,
    }
    serde_json::from_str::<Typed<'_>>(value).is_ok_and(|typed| typed.kind == expected)
}

/// True if all messages are text.
fn is_text(messages: &str) -> bool {
    #[derive(Deserialize)]
    struct Message<'a> {
        #[serde(borrow, default)]
        content: Option<&'a RawValue>,
    }
    let Ok(messages) = serde_json::from_str::<Vec<Message<'_>>>(messages) else {
        return false;
    };
    let mut contents = messages.iter().filter_map(|message| message.content);
    contents.all(|content| {
        if !content.get().starts_with('[') {
            return true;
        }
        let parts = serde_json::from_str::<Vec<&RawValue>>(content.get());
        parts.is_ok_and(|parts| {
            let mut parts = parts.iter().map(|part| part.get());
            parts.all(|part| {
                part.starts_with('"') || TEXT_PARTS.iter().any(|kind| is_type(part, kind))
            })
        })
    })
}

/// The types of parts of a message that are in the token ids.
const TEXT_PARTS: [&str; 5] = ["text", "input_text", "output_text", "refusal", "thinking"];
