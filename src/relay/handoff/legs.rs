//! A request's body as the bodies of its two legs. Pure.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use bytes::Bytes;
use serde::Deserialize;
use serde::de::{self, DeserializeSeed, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;
use smallvec::SmallVec;

use super::{Params, Transfer, dialect};
use crate::prompt::Api;

/// Why a request must run on one worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotSplit {
    /// Embeddings and the like: nothing is decoded.
    Api,
    /// Something is wrong with it; its engine says what. No prefill worker should keep blocks for it.
    Body,
    /// Several answers, or several prompts. An engine makes a request of each, and all would fetch the
    /// same blocks, which are there for one.
    Several,
    /// Something is told of the prompt's own tokens, which only who computes them can.
    PromptOutput,
    /// Nothing is left to decode.
    OneToken,
    /// How much of the prompt is cut off depends on how long the answer may be, and the legs differ in that.
    Truncated,
    /// The engine itself calls tools, and goes on with another prompt and the same blocks.
    Turns,
    /// What the engine keeps from one request to the next is at one worker.
    EngineState,
    /// The prompt is not made of tokens.
    Embeds,
}

impl NotSplit {
    pub fn as_str(self) -> &'static str {
        match self {
            NotSplit::Api => "api",
            NotSplit::Body => "body",
            NotSplit::Several => "several",
            NotSplit::PromptOutput => "prompt_output",
            NotSplit::OneToken => "one_token",
            NotSplit::Truncated => "truncated",
            NotSplit::Turns => "turns",
            NotSplit::EngineState => "engine_state",
            NotSplit::Embeds => "embeds",
        }
    }
}

/// A body that can be split, with where its fields stand that differ between the legs. Found in one pass.
#[derive(Debug)]
pub struct Legs {
    api: Api,
    body: Bytes,
    /// Where the first field begins, after the brace.
    inside: usize,
    is_empty: bool,
    /// In their order.
    cuts: SmallVec<[Cut; 8]>,
    /// What the router itself tells the engine of the prompt: the inside of a `kv_transfer_params`.
    own_params: Option<Range<usize>>,
}

/// A field that does not pass as it is.
#[derive(Debug)]
struct Cut {
    /// From the end of the field before it.
    range: Range<usize>,
    /// It is the decode leg's too.
    is_kept_by_decode: bool,
}

impl Legs {
    /// For the body that an engine would be sent whole: the client's, perhaps with its prompt's ids put in.
    pub fn of(api: Api, body: &Bytes) -> Result<Self, NotSplit> {
        if !api.generates() {
            return Err(NotSplit::Api);
        }
        let mut look = Look {
            api,
            body,
            end: None,
            wrong: None,
            tokens_max: [None; 2],
            cuts: SmallVec::new(),
            own_params: None,
        };
        let mut json = serde_json::Deserializer::from_slice(body);
        let read = de::Deserializer::deserialize_map(&mut json, &mut look);
        if read.and_then(|()| json.end()).is_err() {
            return Err(NotSplit::Body);
        }
        // Of the two names that chats have for it, the newer one counts.
        let [newer, older] = look.tokens_max;
        if newer.or(older).is_some_and(|tokens| tokens <= 1.0) {
            look.wrong.get_or_insert(NotSplit::OneToken);
        }
        if let Some(wrong) = look.wrong {
            return Err(wrong);
        }
        let inside = body.iter().position(|byte| *byte == b'{');
        Ok(Self {
            api,
            inside: inside.ok_or(NotSplit::Body)? + 1,
            is_empty: look.end.is_none(),
            cuts: look.cuts,
            own_params: look.own_params,
            body: body.clone(),
        })
    }

    /// What the prefill worker is sent: the same prompt, and one token of answer, whole. Nothing may end it
    /// before that token, and nobody keeps it.
    pub fn prefill(&self, transfer: &Transfer) -> Bytes {
        let dialect = dialect(transfer.connector);
        let ends = match self.api {
            Api::Responses => r#""stream":false,"store":false,"max_output_tokens":1"#,
            _ => r#""stream":false,"max_tokens":1"#,
        };
        let ask = dialect.ask(transfer);
        self.spliced([ends, dialect.also(), ","], &ask, |_| false)
    }

    /// What the decode worker is sent: the whole request, with where its prompt's blocks are.
    pub fn decode(&self, params: Params) -> Bytes {
        self.spliced(["", "", ""], &params.0, |cut| cut.is_kept_by_decode)
    }

    fn spliced(&self, first: [&str; 3], params: &str, is_kept: impl Fn(&Cut) -> bool) -> Bytes {
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
            if range.start == self.inside && !range.is_empty() && !self.is_empty {
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
struct Look<'a> {
    api: Api,
    body: &'a [u8],
    /// Where the last field that was seen ends.
    end: Option<usize>,
    wrong: Option<NotSplit>,
    /// How long the answer may be, by the newer name and by the older.
    tokens_max: [Option<f64>; 2],
    cuts: SmallVec<[Cut; 8]>,
    own_params: Option<Range<usize>>,
}

#[derive(Clone, Copy)]
enum Field {
    Params,
    /// Which of the names for how long the answer may be.
    TokensMax(usize),
    Stream,
    /// It could end a prefill leg early, or does not go with one token, or with an answer that is whole.
    Ending,
    Store,
    /// Any value but the one here means that the request cannot be split.
    Only(&'static str, NotSplit),
    /// Any value but null means so.
    Null(NotSplit),
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
            "stream" => Field::Stream,
            "stream_options" | "stop" | "stop_token_ids" | "min_tokens" | "ignore_eos" => {
                Field::Ending
            }
            "store" if is_responses => Field::Store,
            "n" | "best_of" if !is_responses => Field::Only("1", NotSplit::Several),
            "use_beam_search" => Field::Only("false", NotSplit::Several),
            "echo" if !is_responses => Field::Only("false", NotSplit::PromptOutput),
            "prompt_logprobs" => Field::Null(NotSplit::PromptOutput),
            "truncate_prompt_tokens" => Field::Null(NotSplit::Truncated),
            "prompt_embeds" => Field::Null(NotSplit::Embeds),
            "prompt" if api == Api::Completions => Field::Prompt,
            // Null is not its default: it truncates.
            "truncation" if is_responses => Field::Only("\"disabled\"", NotSplit::Truncated),
            "background" if is_responses => Field::Only("false", NotSplit::EngineState),
            "previous_response_id" if is_responses => Field::Null(NotSplit::EngineState),
            "tools" if is_responses => Field::Tools,
            _ => Field::Other,
        }
    }
}

impl<'de> Visitor<'de> for &mut Look<'de> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(field) = map.next_key_seed(FieldOf(self.api))? {
            self.on_field(field, map.next_value::<&'de RawValue>()?.get());
        }
        Ok(())
    }
}

impl Look<'_> {
    fn on_field(&mut self, field: Field, value: &str) {
        // A part of the body, as its type says.
        let start = value.as_ptr().addr() - self.body.as_ptr().addr();
        let range = start..start + value.len();
        let before = self.end.replace(range.end);
        let wrong = match field {
            Field::Other => None,
            Field::Only(expected, wrong) => {
                let is_default = value == expected || (value == "null" && !truncates(wrong));
                (!is_default).then_some(wrong)
            }
            Field::Null(wrong) => (value != "null").then_some(wrong),
            Field::Prompt => match prompts(value) {
                Some(1) => None,
                Some(_) => Some(NotSplit::Several),
                None => Some(NotSplit::Body),
            },
            Field::Tools => runs_tools(value),
            Field::Params | Field::TokensMax(_) | Field::Stream | Field::Ending | Field::Store => {
                let cut = Cut {
                    range: before.unwrap_or_else(|| self.first()).min(start)..range.end,
                    is_kept_by_decode: !matches!(field, Field::Params),
                };
                self.cuts.push(cut);
                self.on_cut(field, value, range)
            }
        };
        if let Some(wrong) = wrong {
            self.wrong.get_or_insert(wrong);
        }
    }

    /// Where the first field begins.
    fn first(&self) -> usize {
        let brace = self.body.iter().position(|byte| *byte == b'{');
        brace.map_or(0, |brace| brace + 1)
    }

    /// What a prefill leg leaves out is judged by the decode worker alone. Where that would refuse it, blocks
    /// would be kept for nobody.
    fn on_cut(&mut self, field: Field, value: &str, range: Range<usize>) -> Option<NotSplit> {
        match field {
            Field::Params => {
                let inside = value.strip_prefix('{').and_then(|it| it.strip_suffix('}'));
                let is_empty = inside.is_none_or(|inside| inside.trim_ascii().is_empty());
                // Of several, the last counts.
                self.own_params = (!is_empty).then_some(range.start + 1..range.end - 1);
                None
            }
            Field::TokensMax(name) => {
                let Ok(tokens) = serde_json::from_str(value) else {
                    return Some(NotSplit::Body);
                };
                self.tokens_max[name] = tokens;
                None
            }
            Field::Stream | Field::Store => {
                (!matches!(value, "true" | "false" | "null")).then_some(NotSplit::Body)
            }
            _ => None,
        }
    }
}

/// Whether a field's null does not mean its default.
fn truncates(wrong: NotSplit) -> bool {
    wrong == NotSplit::Truncated
}

/// How many prompts a completion has: a text, or token ids, or a list of either.
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

/// Whether an engine would call some of these tools itself.
fn runs_tools(value: &str) -> Option<NotSplit> {
    #[derive(Deserialize)]
    struct Tool<'a> {
        #[serde(rename = "type", borrow)]
        kind: Cow<'a, str>,
    }
    let tools: Option<Vec<Tool<'_>>> = match serde_json::from_str(value) {
        Ok(tools) => tools,
        Err(_) => return Some(NotSplit::Body),
    };
    let is_clients = |tool: &Tool<'_>| matches!(&*tool.kind, "function" | "custom");
    let all = tools.unwrap_or_default();
    (!all.iter().all(is_clients)).then_some(NotSplit::Turns)
}

struct FieldOf(Api);

impl<'de> DeserializeSeed<'de> for FieldOf {
    type Value = Field;

    fn deserialize<D: de::Deserializer<'de>>(self, deserializer: D) -> Result<Field, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for FieldOf {
    type Value = Field;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<Field, E> {
        Ok(Field::of(name, self.0))
    }
}

#[cfg(test)]
mod tests;
