//! An item that the engine has begun and not ended: enough of it to end it. Pure.

use std::io::Write as _;

use super::quoted;
use crate::responses::item::{self, Ids};
use crate::responses::members::{Members, put};

#[derive(Debug)]
pub(super) struct OpenItem {
    /// As the engine counts.
    pub(super) index: Option<u64>,
    pub(super) place: usize,
    /// Our id for it, as a JSON string.
    pub(super) id: String,
    kind: Kind,
    /// As it was added, as the engine writes it.
    added: String,
    parts: Vec<Part>,
    /// A call's, as an escaped JSON string without its quotes.
    arguments: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Message,
    Reasoning,
    FunctionCall,
    CustomToolCall,
    Other,
}

#[derive(Debug)]
struct Part {
    kind: PartKind,
    /// As an escaped JSON string without its quotes: deltas are joined as they are written.
    text: String,
    is_open: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PartKind {
    Text,
    Refusal,
    Reasoning,
}

impl OpenItem {
    pub(super) fn new(item: &str, index: Option<u64>, place: usize, ids: &Ids) -> Option<Self> {
        let kind = Members::parse(item).ok()?.text("type")?;
        Some(Self {
            index,
            place,
            id: quoted(&ids.output(item::prefix(&kind), place)),
            kind: match &*kind {
                "message" => Kind::Message,
                "reasoning" => Kind::Reasoning,
                "function_call" => Kind::FunctionCall,
                "custom_tool_call" => Kind::CustomToolCall,
                _ => Kind::Other,
            },
            added: item.to_owned(),
            parts: Vec::new(),
            arguments: String::new(),
        })
    }

    pub(super) fn begin_part(&mut self, part: Option<&str>) {
        let kind = part.and_then(|raw| Members::parse(raw).ok()?.text("type"));
        let kind = match kind.as_deref() {
            Some("refusal") => PartKind::Refusal,
            Some("reasoning_text") => PartKind::Reasoning,
            None if self.kind == Kind::Reasoning => PartKind::Reasoning,
            _ => PartKind::Text,
        };
        self.parts.push(Part {
            kind,
            text: String::new(),
            is_open: true,
        });
    }

    pub(super) fn end_part(&mut self) {
        if let Some(part) = self.parts.last_mut() {
            part.is_open = false;
        }
    }

    /// Takes a piece of its text; returns how many bytes are kept of it.
    pub(super) fn push(&mut self, name: &str, delta: &str) -> usize {
        match name {
            "response.output_text.delta"
            | "response.refusal.delta"
            | "response.reasoning_text.delta"
            | "response.reasoning.delta" => {
                if self.parts.is_empty() {
                    self.begin_part(None);
                }
                if let Some(part) = self.parts.last_mut() {
                    part.text.push_str(delta);
                }
                delta.len()
            }
            "response.function_call_arguments.delta" | "response.custom_tool_call_input.delta" => {
                self.arguments.push_str(delta);
                delta.len()
            }
            _ => 0,
        }
    }

    /// The place of its last part.
    pub(super) fn content_index(&self) -> Option<u64> {
        self.parts.len().checked_sub(1).map(|last| last as u64)
    }

    pub(super) fn bytes(&self) -> usize {
        let parts = self.parts.iter().map(|part| part.text.len());
        parts.sum::<usize>() + self.arguments.len()
    }

    /// What is left to be said of its last part, or of its arguments: names, and members that follow
    /// the item's id and place.
    pub(super) fn closing(&mut self) -> Vec<(&'static str, Vec<u8>)> {
        let mut events = Vec::new();
        match self.kind {
            Kind::FunctionCall => {
                let name = Members::parse(&self.added).ok();
                let name = name.and_then(|it| it.get("name")).unwrap_or("\"\"");
                let members = format!(r#","name":{name},"arguments":"{}""#, self.arguments);
                events.push((
                    "response.function_call_arguments.done",
                    members.into_bytes(),
                ));
            }
            Kind::CustomToolCall => {
                let members = format!(r#","input":"{}""#, self.arguments);
                events.push(("response.custom_tool_call_input.done", members.into_bytes()));
            }
            Kind::Message | Kind::Reasoning | Kind::Other => {}
        }
        let place = self.parts.len().saturating_sub(1);
        let Some(part) = self.parts.last_mut().filter(|part| part.is_open) else {
            return events;
        };
        part.is_open = false;
        let text = &part.text;
        let (name, last) = match part.kind {
            PartKind::Text => (
                "response.output_text.done",
                format!(r#""text":"{text}","logprobs":[]"#),
            ),
            PartKind::Refusal => ("response.refusal.done", format!(r#""refusal":"{text}""#)),
            PartKind::Reasoning => (
                "response.reasoning_text.done",
                format!(r#""text":"{text}""#),
            ),
        };
        let members = format!(r#","content_index":{place},{last}"#);
        events.push((name, members.into_bytes()));
        let mut members = format!(r#","content_index":{place},"part":"#).into_bytes();
        part.write(&mut members);
        events.push(("response.content_part.done", members));
        events
    }

    /// The item with what came of it.
    pub(super) fn item(&self) -> String {
        let members = Members::parse(&self.added).unwrap_or_default();
        let mut out = vec![b'{'];
        for (name, value) in members.iter() {
            if !matches!(name, "content" | "arguments" | "input") {
                put(&mut out, name, value);
            }
        }
        match self.kind {
            Kind::Message | Kind::Reasoning => {
                put(&mut out, "content", "[");
                for (place, part) in self.parts.iter().enumerate() {
                    if place > 0 {
                        out.push(b',');
                    }
                    part.write(&mut out);
                }
                out.push(b']');
            }
            Kind::FunctionCall => put(&mut out, "arguments", &format!("\"{}\"", self.arguments)),
            Kind::CustomToolCall => put(&mut out, "input", &format!("\"{}\"", self.arguments)),
            Kind::Other => {}
        }
        out.push(b'}');
        String::from_utf8(out).unwrap_or_default()
    }
}

impl Part {
    fn write(&self, out: &mut Vec<u8>) {
        let text = &self.text;
        // Writing to memory cannot fail.
        let _ = match self.kind {
            PartKind::Text => write!(
                out,
                r#"{{"type":"output_text","text":"{text}","annotations":[],"logprobs":[]}}"#
            ),
            PartKind::Refusal => write!(out, r#"{{"type":"refusal","refusal":"{text}"}}"#),
            PartKind::Reasoning => write!(out, r#"{{"type":"reasoning_text","text":"{text}"}}"#),
        };
    }
}
