//! A message or a reasoning item of an answer while it grows. Texts are JSON strings without quotes: deltas are
//! concatenated as the engine wrote them. Pure.

use std::io::Write as _;

use super::writer::{begin_in_item, end, item_event, part_event};
use crate::observe::metrics::words;
use crate::responses::members::{put_comma, put_string};
use crate::responses::output_item::PartKind;

words! {
    /// What a message of the assistant is in its turn.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) enum Phase {
        /// A call follows.
        Commentary = "commentary",
        FinalAnswer = "final_answer",
    }
}

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TextItem {
    pub(super) index: usize,
    pub(super) is_reasoning: bool,
    parts: Vec<Part>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Part {
    kind: PartKind,
    text: String,
    /// A list without its brackets.
    logprobs: String,
}

impl TextItem {
    /// Adds an item to the answer.
    pub(super) fn open(index: usize, is_reasoning: bool, out: &mut Vec<u8>) -> Self {
        let item: &[u8] = if is_reasoning {
            br#"{"type":"reasoning","summary":[],"content":[]}"#
        } else {
            br#"{"type":"message","role":"assistant","content":[]}"#
        };
        item_event(out, "output_item.added", index, item);
        Self::opened(index, is_reasoning)
    }

    /// One that was added before.
    pub(super) fn opened(index: usize, is_reasoning: bool) -> Self {
        Self {
            index,
            is_reasoning,
            parts: Vec::new(),
        }
    }

    /// One of its parts was started before.
    pub(super) fn on_part(&mut self, kind: PartKind) {
        self.parts.push(Part {
            kind,
            text: String::new(),
            logprobs: String::new(),
        });
    }

    /// Text of its last part was written before. `None` if it has no part.
    pub(super) fn on_text(&mut self, text: &str, logprobs: &str) -> Option<()> {
        let part = self.parts.last_mut()?;
        part.text.push_str(text);
        part.add_logprobs(logprobs);
        Some(())
    }

    /// Appends a text. `logprobs`: a list without its brackets.
    pub(super) fn push(&mut self, kind: PartKind, text: &str, logprobs: &str, out: &mut Vec<u8>) {
        if self.parts.last().is_none_or(|part| part.kind != kind) {
            self.close_part(out);
            let mut json = Vec::new();
            kind.put_part(&mut json, "", "");
            let content_index = self.parts.len();
            part_event(out, "content_part.added", self.index, content_index, &json);
            self.on_part(kind);
        }
        let content_index = self.parts.len() - 1;
        let part = &mut self.parts[content_index];
        part.text.push_str(text);
        begin_in_item(out, format_args!("{}.delta", kind.as_str()), self.index);
        // Writing to memory cannot fail.
        let _ = write!(out, r#","content_index":{content_index},"delta":""#);
        out.extend_from_slice(text.as_bytes());
        out.push(b'"');
        if kind == PartKind::Text {
            let _ = write!(out, r#","logprobs":[{logprobs}]"#);
            part.add_logprobs(logprobs);
        }
        end(out);
    }

    /// Ends the last part.
    fn close_part(&mut self, out: &mut Vec<u8>) {
        let Some(part) = self.parts.last() else {
            return;
        };
        let (index, content_index) = (self.index, self.parts.len() - 1);
        begin_in_item(out, format_args!("{}.done", part.kind.as_str()), index);
        let _ = write!(out, r#","content_index":{content_index}"#);
        part.kind.put_members(out, &part.text, &part.logprobs);
        end(out);
        let mut json = Vec::with_capacity(part.text.len() + 96);
        part.write(&mut json);
        part_event(out, "content_part.done", index, content_index, &json);
    }

    /// Ends the item, and returns it. Only messages have a phase.
    pub(super) fn close(mut self, phase: Option<Phase>, out: &mut Vec<u8>) -> Vec<u8> {
        self.close_part(out);
        let mut item = Vec::with_capacity(256);
        item.extend_from_slice(if self.is_reasoning {
            br#"{"type":"reasoning","summary":[],"content":["#
        } else {
            br#"{"type":"message","role":"assistant","content":["#
        });
        for part in &self.parts {
            put_comma(&mut item);
            part.write(&mut item);
        }
        item.push(b']');
        if let Some(phase) = phase.filter(|_| !self.is_reasoning) {
            put_string(&mut item, "phase", phase.as_str());
        }
        item.push(b'}');
        item_event(out, "output_item.done", self.index, &item);
        item
    }
}

impl Part {
    fn add_logprobs(&mut self, logprobs: &str) {
        if !logprobs.is_empty() {
            if !self.logprobs.is_empty() {
                self.logprobs.push(',');
            }
            self.logprobs.push_str(logprobs);
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        self.kind.put_part(out, &self.text, &self.logprobs);
    }
}
