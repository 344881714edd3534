//! Writes the events of one stream, numbered from 0. Pure.

use std::io::Write as _;
use std::ops::Range;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use smallvec::SmallVec;

use super::fields::EventFields;

/// The names of the events with reasoning text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ReasoningEvents {
    /// `response.reasoning_text.delta` and `.done`.
    #[default]
    #[serde(rename = "openai")]
    OpenAi,
    /// `response.reasoning.delta` and `.done`.
    OpenResponses,
}

/// The new value of a member.
pub(super) enum Replacement<'a> {
    Number(u64),
    Json(&'a [u8]),
}

/// Where the number and the delta of an event are.
#[derive(Debug)]
pub(super) struct Places {
    pub(super) in_data: [Range<usize>; 2],
    pub(super) in_out: [Range<usize>; 2],
}

/// See the module.
#[derive(Debug)]
pub(super) struct EventWriter {
    /// The number of the next event.
    pub(super) next: u64,
    pub(super) reasoning: ReasoningEvents,
}

impl EventWriter {
    pub(super) fn item_event(&mut self, name: &str, index: usize, item: &[u8], out: &mut Vec<u8>) {
        self.head(name, out);
        let _ = write!(out, r#","output_index":{index},"item":"#);
        out.extend_from_slice(item);
        out.extend_from_slice(b"}\n\n");
    }

    pub(super) fn response_event(&mut self, name: &str, response: &[u8], out: &mut Vec<u8>) {
        self.head(name, out);
        out.extend_from_slice(br#","response":"#);
        out.extend_from_slice(response);
        out.extend_from_slice(b"}\n\n");
    }

    /// Writes the `event` line and the first two members of the data.
    pub(super) fn head(&mut self, name: &str, out: &mut Vec<u8>) {
        let number = self.number();
        let _ = write!(
            out,
            "event: {name}\ndata: {{\"type\":\"{name}\",\"sequence_number\":{number}"
        );
    }

    pub(super) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    pub(super) fn renamed<'n>(&self, name: &'n str) -> &'n str {
        match (self.reasoning, name) {
            (ReasoningEvents::OpenResponses, "response.reasoning_text.delta") => {
                "response.reasoning.delta"
            }
            (ReasoningEvents::OpenResponses, "response.reasoning_text.done") => {
                "response.reasoning.done"
            }
            (_, name) => name,
        }
    }

    /// Copies an engine's event with its new number and with some values replaced. Returns where the number and the delta
    /// are, if the engine's event has both.
    pub(super) fn rewrite<const N: usize>(
        &mut self,
        name: &str,
        data: &str,
        fields: &EventFields<'_>,
        edits: [(Option<&RawValue>, Replacement<'_>); N],
        out: &mut Vec<u8>,
    ) -> Option<Places> {
        let number = self.number();
        let renamed = self.renamed(name);
        out.extend_from_slice(b"event: ");
        out.extend_from_slice(renamed.as_bytes());
        out.extend_from_slice(b"\ndata: ");
        let mut kind = SmallVec::<[u8; 48]>::new();
        let is_renamed = renamed != name;
        if is_renamed {
            kind.push(b'"');
            kind.extend_from_slice(renamed.as_bytes());
            kind.push(b'"');
        }
        let place = |raw: &RawValue| {
            let begin = raw.get().as_ptr() as usize - data.as_ptr() as usize;
            begin..begin + raw.get().len()
        };
        let mut all: SmallVec<[(Range<usize>, Replacement<'_>); 8]> = SmallVec::new();
        let common = [
            (fields.sequence_number, Replacement::Number(number)),
            (fields.kind.filter(|_| is_renamed), Replacement::Json(&kind)),
        ];
        for (raw, new) in common.into_iter().chain(edits) {
            if let Some(raw) = raw {
                all.push((place(raw), new));
            }
        }
        all.sort_unstable_by_key(|(at, _)| at.start);
        let number_in_data = fields.sequence_number.map(place);
        let delta_in_data = fields.delta.map(place);
        let (mut number_in_out, mut delta_in_out) = (None, None);
        let mut copy = |passed: usize, end: usize, out: &mut Vec<u8>| {
            if let Some(delta) = delta_in_data
                .clone()
                .filter(|delta| (passed..end).contains(&delta.start))
            {
                let begin = out.len() + delta.start - passed;
                delta_in_out = Some(begin..begin + delta.len());
            }
            out.extend_from_slice(&data.as_bytes()[passed..end]);
        };
        let mut passed = 0;
        for (at, new) in &all {
            copy(passed, at.start, out);
            let written = out.len();
            match new {
                Replacement::Number(number) => {
                    let _ = write!(out, "{number}");
                }
                Replacement::Json(json) => out.extend_from_slice(json),
            }
            if number_in_data
                .as_ref()
                .is_some_and(|number| number.start == at.start)
            {
                number_in_out = Some(written..out.len());
            }
            passed = at.end;
        }
        let whole = data.trim_end().len().max(passed);
        if number_in_data.is_some() {
            copy(passed, whole, out);
        } else {
            let end = if data[passed..whole].ends_with('}') {
                whole - 1
            } else {
                whole
            };
            copy(passed, end, out);
            let comma = if data.trim_end() == "{}" { "" } else { "," };
            let _ = write!(out, "{comma}\"sequence_number\":{number}}}");
        }
        out.extend_from_slice(b"\n\n");
        Some(Places {
            in_data: [number_in_data?, delta_in_data?],
            in_out: [number_in_out?, delta_in_out?],
        })
    }
}
