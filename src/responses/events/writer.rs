//! Writes the events of one stream, numbered from 0. Pure.

use std::io::Write as _;

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

    fn number(&mut self) -> u64 {
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

    /// Copies an engine's event with its new number and with some values replaced.
    pub(super) fn rewrite<const N: usize>(
        &mut self,
        name: &str,
        data: &str,
        fields: &EventFields<'_>,
        edits: [(Option<&RawValue>, Replacement<'_>); N],
        out: &mut Vec<u8>,
    ) {
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
        let mut all: SmallVec<[(usize, usize, Replacement<'_>); 8]> = SmallVec::new();
        let common = [
            (fields.sequence_number, Replacement::Number(number)),
            (fields.kind.filter(|_| is_renamed), Replacement::Json(&kind)),
        ];
        for (raw, new) in common.into_iter().chain(edits) {
            if let Some(raw) = raw {
                let raw = raw.get();
                let begin = raw.as_ptr() as usize - data.as_ptr() as usize;
                all.push((begin, begin + raw.len(), new));
            }
        }
        all.sort_unstable_by_key(|(begin, _, _)| *begin);
        let mut passed = 0;
        for (begin, end, new) in &all {
            out.extend_from_slice(&data.as_bytes()[passed..*begin]);
            match new {
                Replacement::Number(number) => {
                    let _ = write!(out, "{number}");
                }
                Replacement::Json(json) => out.extend_from_slice(json),
            }
            passed = *end;
        }
        let rest = data[passed..].trim_end();
        if fields.sequence_number.is_some() {
            out.extend_from_slice(rest.as_bytes());
        } else {
            out.extend_from_slice(rest.strip_suffix('}').unwrap_or(rest).as_bytes());
            let comma = if data.trim_end() == "{}" { "" } else { "," };
            let _ = write!(out, "{comma}\"sequence_number\":{number}}}");
        }
        out.extend_from_slice(b"\n\n");
    }
}
