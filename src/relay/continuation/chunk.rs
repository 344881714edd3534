//! One chunk of a stream, as slices of its text (`'de: 'a`). What engines leave out or set to null is `None`.

use serde::Deserialize;
use serde_json::value::RawValue;
use smallvec::SmallVec;

#[derive(Deserialize)]
#[serde(bound(deserialize = "'de: 'a"))]
pub(super) struct Chunk<'a> {
    pub(super) id: Option<&'a RawValue>,
    pub(super) created: Option<&'a RawValue>,
    pub(super) model: Option<&'a RawValue>,
    /// One; a request for several is not continued.
    pub(super) choices: Option<SmallVec<[Choice<'a>; 1]>>,
    pub(super) usage: Option<&'a RawValue>,
    pub(super) error: Option<&'a RawValue>,
    pub(super) prompt_token_ids: Option<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(bound(deserialize = "'de: 'a"))]
pub(super) struct Choice<'a> {
    pub(super) delta: Option<Delta<'a>>,
    pub(super) text: Option<&'a RawValue>,
    pub(super) logprobs: Option<&'a RawValue>,
    pub(super) finish_reason: Option<&'a RawValue>,
    pub(super) token_ids: Option<&'a RawValue>,
    pub(super) prompt_token_ids: Option<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(bound(deserialize = "'de: 'a"))]
pub(super) struct Delta<'a> {
    pub(super) role: Option<&'a RawValue>,
    pub(super) content: Option<&'a RawValue>,
    /// vLLM's name.
    pub(super) reasoning: Option<&'a RawValue>,
    /// Its older name, and that of others.
    pub(super) reasoning_content: Option<&'a RawValue>,
    pub(super) refusal: Option<&'a RawValue>,
    pub(super) tool_calls: Option<&'a RawValue>,
    pub(super) function_call: Option<&'a RawValue>,
}

impl<'a> Choice<'a> {
    /// Text of the answer that the client sees, as JSON strings.
    pub(super) fn content(&self) -> Option<&'a RawValue> {
        let delta = self.delta.as_ref();
        let texts = [
            delta.and_then(|delta| delta.content),
            delta.and_then(|delta| delta.refusal),
            self.text,
        ];
        texts.into_iter().flatten().find(|text| has_text(text))
    }

    pub(super) fn reasoning(&self) -> Option<&'a RawValue> {
        let delta = self.delta.as_ref()?;
        let texts = [delta.reasoning, delta.reasoning_content];
        texts.into_iter().flatten().find(|text| has_text(text))
    }

    pub(super) fn has_call(&self) -> bool {
        self.delta.as_ref().is_some_and(|delta| {
            let calls = delta.tool_calls.is_some_and(|calls| calls.get() != "[]");
            calls || delta.function_call.is_some()
        })
    }

    /// Its engine gave it up, mostly because it is shut down.
    pub(super) fn is_aborted(&self) -> bool {
        self.finish_reason
            .is_some_and(|reason| reason.get() == "\"abort\"")
    }

    /// A chunk that has nothing for the client, sent only because of the ids that were asked for.
    pub(super) fn is_empty(&self) -> bool {
        let is_empty = self.delta.as_ref().is_some_and(|delta| {
            let members = [
                delta.role,
                delta.content,
                delta.reasoning,
                delta.reasoning_content,
                delta.refusal,
                delta.tool_calls,
                delta.function_call,
            ];
            members.iter().all(Option::is_none)
        });
        is_empty && self.finish_reason.is_none() && self.logprobs.is_none()
    }

    /// The chunk that only names the role.
    pub(super) fn is_role(&self) -> bool {
        let has_role = self
            .delta
            .as_ref()
            .is_some_and(|delta| delta.role.is_some());
        has_role
            && self.content().is_none()
            && self.reasoning().is_none()
            && !self.has_call()
            && self.finish_reason.is_none()
    }
}

/// True for a JSON string that is not empty.
fn has_text(text: &RawValue) -> bool {
    text.get().len() > 2
}

/// Appends the numbers of a JSON list, and returns how many they are. `None` if it has anything else.
pub(super) fn push_ids(list: &str, ids: &mut Vec<u32>) -> Option<usize> {
    let inside = list.strip_prefix('[')?.strip_suffix(']')?.trim_ascii();
    let before = ids.len();
    if !inside.is_empty() {
        for number in inside.split(',') {
            ids.push(number.trim_ascii().parse().ok()?);
        }
    }
    Some(ids.len() - before)
}
