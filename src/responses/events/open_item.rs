//! An item that the engine has started and not completed, with what is needed to complete it. Pure.

use crate::responses::item::{self, Ids, Kind};
use crate::responses::members::{Members, put, put_comma, put_read, quoted};
use crate::responses::output_item::PartKind;

#[derive(Debug)]
pub(super) struct OpenItem {
    pub(super) engine_index: Option<u64>,
    /// The router's index of it.
    pub(super) index: usize,
    /// The router's id for it, as a JSON string.
    pub(super) id: String,
    kind: Option<Kind>,
    /// Its JSON when the engine added it.
    added: String,
    parts: Vec<Part>,
    /// The arguments of a call: a JSON string with escapes, without quotes.
    arguments: String,
}

#[derive(Debug)]
struct Part {
    kind: PartKind,
    /// A JSON string with escapes, without quotes: deltas are concatenated as written.
    text: String,
    is_open: bool,
}

impl OpenItem {
    pub(super) fn new(
        item: &str,
        engine_index: Option<u64>,
        index: usize,
        ids: &Ids,
    ) -> Option<Self> {
        let kind = Members::parse(item).ok()?.text("type")?;
        Some(Self {
            engine_index,
            index,
            id: quoted(&ids.output(item::prefix(&kind), index)),
            kind: item::kind(&kind),
            added: item.to_owned(),
            parts: Vec::new(),
            arguments: String::new(),
        })
    }

    pub(super) fn begin_part(&mut self, part: Option<&str>) {
        let kind = part.and_then(|raw| Members::parse(raw).ok()?.text("type"));
        let kind = match kind.as_deref().map(PartKind::parse) {
            Some(Some(kind)) => kind,
            None if self.kind == Some(Kind::Reasoning) => PartKind::Reasoning,
            Some(None) | None => PartKind::Text,
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

    /// Appends a delta; returns the number of bytes stored.
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

    /// The index of its last part.
    pub(super) fn content_index(&self) -> Option<u64> {
        self.parts.len().checked_sub(1).map(|last| last as u64)
    }

    pub(super) fn bytes(&self) -> usize {
        let parts = self.parts.iter().map(|part| part.text.len());
        parts.sum::<usize>() + self.arguments.len()
    }

    /// The missing events of its last part or its arguments: names, and the members after the item's id and
    /// index.
    pub(super) fn closing(&mut self) -> Vec<(&'static str, Vec<u8>)> {
        let mut events = Vec::new();
        match self.kind {
            Some(Kind::FunctionCall) => {
                let name = Members::parse(&self.added).ok();
                let name = name.and_then(|item| item.get("name")).unwrap_or("\"\"");
                let members = format!(r#","name":{name},"arguments":"{}""#, self.arguments);
                events.push((
                    "response.function_call_arguments.done",
                    members.into_bytes(),
                ));
            }
            Some(Kind::CustomToolCall) => {
                let members = format!(r#","input":"{}""#, self.arguments);
                events.push(("response.custom_tool_call_input.done", members.into_bytes()));
            }
            _ => {}
        }
        let index = self.parts.len().saturating_sub(1);
        let Some(part) = self.parts.last_mut().filter(|part| part.is_open) else {
            return events;
        };
        part.is_open = false;
        let name = match part.kind {
            PartKind::Text => "response.output_text.done",
            PartKind::Refusal => "response.refusal.done",
            PartKind::Reasoning => "response.reasoning_text.done",
        };
        let mut members = format!(r#","content_index":{index}"#).into_bytes();
        part.kind.put_members(&mut members, &part.text, "");
        events.push((name, members));
        let mut members = format!(r#","content_index":{index},"part":"#).into_bytes();
        part.kind.put_part(&mut members, &part.text, "");
        events.push(("response.content_part.done", members));
        events
    }

    /// The JSON of the item with what was received.
    pub(super) fn item(&self) -> String {
        let members = Members::parse(&self.added).unwrap_or_default();
        let mut out = vec![b'{'];
        for (name, value) in members.iter() {
            if !matches!(name, "content" | "arguments" | "input") {
                put_read(&mut out, name, value);
            }
        }
        match self.kind {
            Some(Kind::Message | Kind::Reasoning) => {
                put(&mut out, "content", "[");
                for part in &self.parts {
                    put_comma(&mut out);
                    part.kind.put_part(&mut out, &part.text, "");
                }
                out.push(b']');
            }
            Some(Kind::FunctionCall) => {
                put(&mut out, "arguments", &format!("\"{}\"", self.arguments));
            }
            Some(Kind::CustomToolCall) => {
                put(&mut out, "input", &format!("\"{}\"", self.arguments));
            }
            _ => {}
        }
        out.push(b'}');
        String::from_utf8(out).unwrap_or_default()
    }
}
