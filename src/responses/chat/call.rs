//! A call of an answer while it grows. Arguments are a JSON string without quotes, as the engine wrote it. Pure.

use std::io::Write as _;

use super::tools::{Tool, put_call};
use super::writer::{begin_in_item, end, item_event};
use crate::responses::members::{self, Members, put};

/// A call of which fragments came.
#[derive(Debug)]
pub(super) struct Call {
    /// The engine's index; the position of the call if the engine gives none.
    pub(super) key: u64,
    /// The engine's id of it; empty if it gave none yet.
    pub(super) id: String,
    /// Complete once the call is open.
    pub(super) name: String,
    arguments: String,
    opened: Option<Opened>,
}

#[derive(Debug)]
struct Opened {
    index: usize,
    tool: Tool,
    /// How much of the arguments the client has.
    sent: usize,
}

impl Call {
    pub(super) fn new(key: u64) -> Self {
        Self {
            key,
            id: String::new(),
            name: String::new(),
            arguments: String::new(),
            opened: None,
        }
    }

    /// Some servers repeat the whole name in each fragment, others send it in pieces.
    pub(super) fn add_name(&mut self, name: &str) {
        if self.name != name && self.opened.is_none() {
            self.name.push_str(name);
        }
    }

    /// `raw`: a JSON string, or an object that some servers send in place of one.
    pub(super) fn add_arguments(&mut self, raw: &str) {
        match members::escaped(raw) {
            Some(text) => self.arguments.push_str(text),
            None => {
                let text = members::quoted(raw);
                self.arguments
                    .push_str(members::escaped(&text).unwrap_or_default());
            }
        }
    }

    pub(super) fn has_arguments(&self) -> bool {
        !self.arguments.is_empty()
    }

    pub(super) fn is_open(&self) -> bool {
        self.opened.is_some()
    }

    /// The index of its item.
    pub(super) fn index(&self) -> Option<usize> {
        self.opened.as_ref().map(|opened| opened.index)
    }

    /// Adds its item to the answer.
    pub(super) fn open(&mut self, index: usize, tool: Tool, out: &mut Vec<u8>) {
        let item = self.item(&tool, "");
        item_event(out, "output_item.added", index, &item);
        self.opened = Some(Opened {
            index,
            tool,
            sent: 0,
        });
    }

    /// Sends the arguments that the client has not. The input of a custom tool is in the arguments: it is sent whole.
    pub(super) fn send(&mut self, out: &mut Vec<u8>) {
        let Some(opened) = &mut self.opened else {
            return;
        };
        let more = &self.arguments[opened.sent..];
        if more.is_empty() || opened.tool == Tool::Custom {
            return;
        }
        delta(out, "function_call_arguments.delta", opened.index, more);
        opened.sent = self.arguments.len();
    }

    /// Ends its item, and returns it. `None` if it never had a name.
    pub(super) fn close(mut self, out: &mut Vec<u8>) -> Option<Vec<u8>> {
        self.send(out);
        let Opened { index, tool, .. } = self.opened.take()?;
        let item = match tool {
            Tool::Custom => {
                let input = custom_input(&self.arguments);
                if !input.is_empty() {
                    delta(out, "custom_tool_call_input.delta", index, &input);
                }
                begin_in_item(out, "custom_tool_call_input.done", index);
                put(out, "input", &format!("\"{input}\""));
                end(out);
                self.item(&tool, &input)
            }
            Tool::Function { ref name, .. } => {
                begin_in_item(out, "function_call_arguments.done", index);
                put(out, "name", &members::quoted(name));
                put(out, "arguments", &format!("\"{}\"", self.arguments));
                end(out);
                self.item(&tool, &self.arguments)
            }
        };
        item_event(out, "output_item.done", index, &item);
        Some(item)
    }

    fn item(&self, tool: &Tool, text: &str) -> Vec<u8> {
        let (kind, member) = match tool {
            Tool::Custom => ("custom_tool_call", "input"),
            Tool::Function { .. } => ("function_call", "arguments"),
        };
        let mut item = Vec::with_capacity(text.len() + 128);
        // Writing to memory cannot fail.
        let _ = write!(item, r#"{{"type":"{kind}""#);
        put_call(&mut item, tool, &self.name, &self.id);
        put(&mut item, member, &format!("\"{text}\""));
        item.push(b'}');
        item
    }
}

fn delta(out: &mut Vec<u8>, kind: &str, index: usize, text: &str) {
    begin_in_item(out, kind, index);
    out.extend_from_slice(br#","delta":""#);
    out.extend_from_slice(text.as_bytes());
    out.push(b'"');
    end(out);
}

/// The input of a custom tool, in the arguments of the function that stands for it: the member `input`; all of them
/// if they cannot be read.
fn custom_input(arguments: &str) -> String {
    let found = members::text(&format!("\"{arguments}\"")).and_then(|text| {
        let read = Members::parse(&text).ok()?;
        let input = members::escaped(read.get("input")?)?;
        Some(input.to_owned())
    });
    found.unwrap_or_else(|| arguments.to_owned())
}
