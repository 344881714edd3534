//! A request's body as the bodies of its two legs. Pure.

use std::borrow::Cow;
use std::ops::Range;

use bytes::Bytes;
use serde::Deserialize;
use serde::de::IgnoredAny;
use smallvec::SmallVec;

use super::sglang::Rendezvous;
use super::types::{Transfer, TransferParams};
use crate::fleet::kv_transfer::Connector;
use crate::json_scan::Scan;
use crate::observe::metrics::words;
use crate::prompt::Api;

words! {
    /// Why a request must run on one worker.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum SingleWorkerReason {
        /// Embeddings and other APIs that generate nothing.
        Api = "api",
        /// The body is invalid: its engine answers the error, and no prefill worker pins blocks for it.
        Body = "body",
        /// Several answers or several prompts. An engine makes a request of each, and all would fetch the same blocks,
        /// which can be fetched once.
        Several = "several",
        /// The answer has output for the prompt's tokens (echo, prompt_logprobs), which only the prefill worker computes.
        PromptOutput = "prompt_output",
        /// Nothing is left to decode.
        OneToken = "one_token",
        /// Truncation of the prompt depends on the answer's length limit, in which the legs differ.
        Truncated = "truncated",
        /// The engine itself calls tools, and continues with another prompt.
        Turns = "turns",
        /// The request refers to state that one engine keeps (`previous_response_id`, `background`).
        EngineState = "engine_state",
        /// The prompt consists of embeddings.
        Embeds = "embeds",
    }
}

impl SingleWorkerReason {
    /// What in the request is the reason, for its sender.
    pub fn explanation(self) -> &'static str {
        match self {
            Self::Api => "the endpoint generates nothing",
            Self::Body => "a field has a type that engines refuse",
            Self::Several => "it asks for several answers (n, best_of) or has several prompts",
            Self::PromptOutput => {
                "it asks for output of the prompt's tokens (echo, prompt_logprobs)"
            }
            Self::OneToken => "its answer has one token",
            Self::Truncated => "it has its prompt truncated",
            Self::Turns => "it has tools that the engine calls itself",
            Self::EngineState => "it refers to state that one engine keeps",
            Self::Embeds => "its prompt consists of embeddings",
        }
    }
}

/// The body of a request that can be disaggregated, with the positions of the fields that differ between the legs.
/// Found in one pass.
#[derive(Debug)]
pub struct Legs {
    api: Api,
    body: Bytes,
    /// Where the first field begins, after the brace.
    inside: usize,
    /// Where the last field ends: at `inside`, if there is none.
    end: usize,
    /// In their order.
    cuts: SmallVec<[Cut; 8]>,
    /// The inside of a `kv_transfer_params` that the router put into the body: the prompt's token ids.
    own_params: Option<Range<usize>>,
}

/// A field that one leg or both leave out.
#[derive(Debug)]
struct Cut {
    /// From the end of the field before it.
    range: Range<usize>,
    /// The decode leg has the field unchanged.
    is_kept_by_decode: bool,
}

impl Legs {
    /// Reads the body that a single worker would get.
    pub fn of(api: Api, body: &Bytes) -> Result<Self, SingleWorkerReason> {
        Self::for_connector(Connector::Nixl, api, body)
    }

    /// As [`Legs::of`], for legs of this connector.
    pub fn for_connector(
        connector: Connector,
        api: Api,
        body: &Bytes,
    ) -> Result<Self, SingleWorkerReason> {
        // Its most tokens are in an object of their own.
        if !api.generates() || api == Api::Generate {
            return Err(SingleWorkerReason::Api);
        }
        let brace = body.iter().position(|byte| *byte == b'{');
        let inside = brace.ok_or(SingleWorkerReason::Body)? + 1;
        let mut reader = FieldReader {
            legs: Self {
                api,
                body: body.clone(),
                inside,
                end: inside,
                cuts: SmallVec::new(),
                own_params: None,
            },
            are_legs_alike: connector == Connector::Sglang,
            reason: None,
            tokens_max: [None; 2],
        };
        let scan = Scan::<true>::of_bytes(body).ok_or(SingleWorkerReason::Body)?;
        scan.whole_object(|name, value| reader.on_field(Field::of(&name, api), value))
            .ok_or(SingleWorkerReason::Body)?;
        // Of the two names that chats have for it, the newer one counts.
        let [newer, older] = reader.tokens_max;
        let is_one_token = newer.or(older).is_some_and(|tokens| tokens <= 1.0);
        if is_one_token && connector.decodes_alone() {
            reader.reason.get_or_insert(SingleWorkerReason::OneToken);
        }
        match reader.reason {
            Some(reason) => Err(reason),
            None => Ok(reader.legs),
        }
    }

    /// The prefill leg's body: the same prompt, an answer of one token, not streamed and not stored, without
    /// fields that could end it before that token.
    pub fn prefill(&self, transfer: &Transfer) -> Bytes {
        let one_token = match self.api {
            Api::Responses => r#""stream":false,"store":false,"max_output_tokens":1,"#,
            _ => r#""stream":false,"max_tokens":1,"#,
        };
        let ignored_end = if transfer.ends_at_limit() {
            r#""ignore_eos":true,"#
        } else {
            ""
        };
        let first = [one_token, ignored_end];
        self.spliced(&first, &transfer.prefill_params(), |_| false)
    }

    /// The decode leg's body: the whole request, and where the prompt's KV blocks are.
    pub fn decode(&self, params: TransferParams) -> Bytes {
        self.spliced(&[], &params.0, |cut| cut.is_kept_by_decode)
    }

    /// The body of either leg, where both are the whole request and meet in a room.
    pub fn meeting(&self, room: &Rendezvous) -> Bytes {
        let fields = room.fields();
        let (before, after) = self.body.split_at(self.inside);
        let comma: &[u8] = if self.is_empty() { b"" } else { b"," };
        [before, fields.as_bytes(), comma, after].concat().into()
    }

    fn is_empty(&self) -> bool {
        self.end == self.inside
    }

    /// The body with the fields `first`, each with its comma, and with `params` beside the router's own.
    fn spliced(&self, first: &[&str], params: &str, is_kept: impl Fn(&Cut) -> bool) -> Bytes {
        let own = self.own_params.clone().unwrap_or(0..0);
        let room = self.body.len() + own.len() + params.len() + 128;
        let mut out = Vec::with_capacity(room);
        out.extend_from_slice(&self.body[..self.inside]);
        for text in first {
            out.extend_from_slice(text.as_bytes());
        }
        out.extend_from_slice(br#""kv_transfer_params":{"#);
        out.extend_from_slice(params.as_bytes());
        if !own.is_empty() {
            out.push(b',');
            out.extend_from_slice(&self.body[own]);
        }
        out.push(b'}');
        let mut at = self.inside;
        let mut keep = |range: Range<usize>| {
            // All fields but the body's first have their comma before them.
            if range.start == self.inside && !range.is_empty() && !self.is_empty() {
                out.push(b',');
            }
            out.extend_from_slice(&self.body[range]);
        };
        for cut in self.cuts.iter().filter(|cut| !is_kept(cut)) {
            keep(at..cut.range.start);
            at = cut.range.end;
        }
        keep(at..self.body.len());
        out.into()
    }
}

/// One pass over a body's fields.
struct FieldReader {
    legs: Legs,
    /// Both legs are the whole request.
    are_legs_alike: bool,
    reason: Option<SingleWorkerReason>,
    /// How long the answer may be, by the newer name and by the older.
    tokens_max: [Option<f64>; 2],
}

#[derive(Clone, Copy)]
enum Field {
    Params,
    /// Which of the names for how long the answer may be.
    TokensMax(usize),
    /// `stream` or `store`.
    Flag,
    /// It could end a prefill leg early, or contradicts an answer of one token that is not streamed.
    StreamTerminator,
    /// Any value but this one means that the request must run on one worker.
    Only(&'static str, SingleWorkerReason),
    /// Any value but null does.
    Null(SingleWorkerReason),
    /// A completion's prompt.
    Prompt,
    /// Tools of a Responses request.
    Tools,
    Other,
}

impl Field {
    fn of(name: &str, api: Api) -> Self {
        let is_responses = api == Api::Responses;
        match name {
            "kv_transfer_params" => Field::Params,
            "max_output_tokens" if is_responses => Field::TokensMax(0),
            "max_completion_tokens" if api == Api::Chat => Field::TokensMax(0),
            "max_tokens" if !is_responses => Field::TokensMax(1),
            "stream" => Field::Flag,
            "stop_sequences" if api == Api::Messages => Field::StreamTerminator,
            "stream_options" | "stop" | "stop_token_ids" | "min_tokens" | "ignore_eos"
            | "return_token_ids" => Field::StreamTerminator,
            "store" if is_responses => Field::Flag,
            "n" | "best_of" if !is_responses => Field::Only("1", SingleWorkerReason::Several),
            "use_beam_search" => Field::Only("false", SingleWorkerReason::Several),
            "echo" if !is_responses => Field::Only("false", SingleWorkerReason::PromptOutput),
            "prompt_logprobs" => Field::Null(SingleWorkerReason::PromptOutput),
            "truncate_prompt_tokens" => Field::Null(SingleWorkerReason::Truncated),
            "prompt_embeds" => Field::Null(SingleWorkerReason::Embeds),
            "prompt" if api == Api::Completions => Field::Prompt,
            // Null is not its default: it truncates.
            "truncation" if is_responses => {
                Field::Only("\"disabled\"", SingleWorkerReason::Truncated)
            }
            "background" if is_responses => Field::Only("false", SingleWorkerReason::EngineState),
            "previous_response_id" if is_responses => Field::Null(SingleWorkerReason::EngineState),
            "tools" if is_responses => Field::Tools,
            _ => Field::Other,
        }
    }
}

impl FieldReader {
    fn on_field(&mut self, field: Field, value: &str) {
        // A part of the body, as its type says.
        let start = value.as_ptr().addr() - self.legs.body.as_ptr().addr();
        let range = start..start + value.len();
        let before = std::mem::replace(&mut self.legs.end, range.end);
        if let Field::Params | Field::TokensMax(_) | Field::Flag | Field::StreamTerminator = field {
            self.legs.cuts.push(Cut {
                range: before.min(start)..range.end,
                is_kept_by_decode: !matches!(field, Field::Params),
            });
        }
        // Of a field that the prefill leg leaves out, a value that the decode engine would refuse must be found before a prefill
        // leg pins blocks.
        let reason = match field {
            Field::Other | Field::StreamTerminator => None,
            Field::Only(expected, reason) => {
                let is_null = value == "null" && reason != SingleWorkerReason::Truncated;
                (value != expected && !is_null).then_some(reason)
            }
            Field::Null(reason) => (value != "null").then_some(reason),
            Field::Prompt => match prompts(value) {
                Some(1) => None,
                Some(_) => Some(SingleWorkerReason::Several),
                None => Some(SingleWorkerReason::Body),
            },
            Field::Tools => runs_tools(value),
            Field::Params => {
                let inside = value.strip_prefix('{');
                let inside = inside.and_then(|inside| inside.strip_suffix('}'));
                let is_empty = inside.is_none_or(|inside| inside.trim_ascii().is_empty());
                // Of several, the last counts.
                self.legs.own_params = (!is_empty).then_some(range.start + 1..range.end - 1);
                None
            }
            Field::TokensMax(name) => match serde_json::from_str(value) {
                Ok(tokens) => {
                    self.tokens_max[name] = tokens;
                    None
                }
                Err(_) => Some(SingleWorkerReason::Body),
            },
            Field::Flag => {
                (!matches!(value, "true" | "false" | "null")).then_some(SingleWorkerReason::Body)
            }
        };
        if let Some(reason) = reason
            && !(self.are_legs_alike && reason == SingleWorkerReason::Truncated)
        {
            self.reason.get_or_insert(reason);
        }
    }
}

/// The number of prompts of a completion: a text, token ids, or a list of either.
fn prompts(value: &str) -> Option<usize> {
    let inside = match value.as_bytes().first()? {
        b'"' => return Some(1),
        b'[' => value[1..].trim_ascii_start(),
        _ => return None,
    };
    match inside.as_bytes().first()? {
        b'0'..=b'9' => Some(1),
        b'"' | b'[' => {
            let all: Vec<IgnoredAny> = serde_json::from_str(value).ok()?;
            Some(all.len())
        }
        _ => None,
    }
}

/// Some reason if the engine would call one of these tools itself.
pub(in crate::relay) fn runs_tools(value: &str) -> Option<SingleWorkerReason> {
    #[derive(Deserialize)]
    struct Tool<'a> {
        #[serde(rename = "type", borrow)]
        kind: Cow<'a, str>,
    }
    let tools: Option<Vec<Tool<'_>>> = match serde_json::from_str(value) {
        Ok(tools) => tools,
        Err(_) => return Some(SingleWorkerReason::Body),
    };
    // A namespace has functions of the client.
    let is_clients = |tool: &Tool<'_>| matches!(&*tool.kind, "function" | "custom" | "namespace");
    let all = tools.unwrap_or_default();
    (!all.iter().all(is_clients)).then_some(SingleWorkerReason::Turns)
}

#[cfg(test)]
mod tests;
