//! A call of an answer while it grows. Arguments are a JSON string without quotes, as the engine wrote it. Pure.

use std::borrow::Cow;
use std::io::Write as _;

use super::custom_input;
use super::tools::{Tool, put_call};
use super::writer::{begin_in_item, end, item_event};
use crate::responses::members::{self, Members, put};

/// A call of which fragments came.
#[derive(Debug, Default)]
pub(super) struct Call {
    /// The engine's index; the position of the call if the engine gives none.
    pub(super) key: u64,
    /// The engine's id of it; empty if it gave none yet.
    pub(super) id: String,
    /// Fragments of it repeated its name with other ids, which say nothing then.
    has_other_ids: bool,
    /// Complete once the call is open.
    pub(super) name: String,
    arguments: String,
    /// The arguments of a custom tool without JSON's escapes; `None` once a fragment could not be read by itself.
    plain: Option<String>,
    opened: Option<Opened>,
}

#[derive(Debug)]
struct Opened {
    index: usize,
    tool: Tool,
    /// How much of the arguments, or of the custom tool's input, the client has.
    sent: usize,
}

impl Call {
    pub(super) fn new(key: u64) -> Self {
        Self {
            key,
            plain: Some(String::new()),
            ..Self::default()
        }
    }

    /// Some servers repeat the whole name in each fragment, others send it in pieces.
    pub(super) fn add_name(&mut self, name: &str) {
        if self.name != name && self.opened.is_none() {
            self.name.push_str(name);
        }
    }

    /// `raw`: a JSON string, or an object that some servers send in place of one. `is_custom`: of a custom tool.
    pub(super) fn add_arguments(&mut self, raw: &str, is_custom: bool) {
        if is_custom && let Some(plain) = &mut self.plain {
            match members::text(raw) {
                Some(text) => plain.push_str(&text),
                None => self.plain = None,
            }
        }
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

    /// `name`: that of its fragment, or empty.
    pub(super) fn add_id(&mut self, id: &str, name: &str) {
        if self.id.is_empty() {
            id.clone_into(&mut self.id);
        } else if self.id != id && !name.is_empty() {
            self.has_other_ids = true;
        }
    }

    /// Whether a fragment with a name, and perhaps its index, begins another call. An id alone does not say so: some
    /// engines give each fragment of a call a new one, and repeat its name in all of them, also in an empty last one.
    pub(super) fn is_followed_by(&self, id: Option<&str>, name: &str, arguments: &str) -> bool {
        let is_other_name = self.name != name;
        match id {
            Some(id) if !self.has_other_ids => {
                let is_new = !self.id.is_empty() && self.id != id;
                is_new && (is_other_name || self.has_whole_arguments())
            }
            _ if is_other_name && self.is_open() => true,
            // Nothing follows arguments that are whole.
            _ => begins_object(arguments) && self.has_whole_arguments(),
        }
    }

    fn has_whole_arguments(&self) -> bool {
        // Most fragments end elsewhere, and are not worth a look at all before them.
        if !self.arguments.ends_with('}') {
            return false;
        }
        let arguments = format!("\"{}\"", self.arguments);
        members::text(&arguments).is_some_and(|text| Members::parse(&text).is_ok())
    }

    pub(super) fn is_open(&self) -> bool {
        self.opened.is_some()
    }

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

    /// Sends the arguments that the client has not, or the input of a custom tool in them.
    pub(super) fn send(&mut self, out: &mut Vec<u8>) {
        let Some(opened) = &mut self.opened else {
            return;
        };
        let (kind, more, text) = if opened.tool.is_custom {
            let value = self.plain.as_deref().and_then(custom_input::value);
            let more = value.map(|value| custom_input::more(value, opened.sent));
            let more = more.unwrap_or_default();
            let kind = "custom_tool_call_input.delta";
            (kind, more, custom_input::valid(more))
        } else {
            let more = self.arguments.get(opened.sent..);
            let more = more.unwrap_or_default();
            let kind = "function_call_arguments.delta";
            (kind, more, Cow::Borrowed(more))
        };
        if !more.is_empty() {
            delta(out, kind, opened.index, &text);
            opened.sent += more.len();
        }
    }

    /// Ends its item, and returns it. `None` if it never had a name. `is_complete`: whether the answer ended by itself,
    /// and not at a limit.
    pub(super) fn close(mut self, is_complete: bool, out: &mut Vec<u8>) -> Option<Vec<u8>> {
        let opened = self.opened.as_ref();
        let is_function = opened.is_some_and(|opened| !opened.tool.is_custom);
        if is_complete && is_function && !self.has_arguments() {
            // The parsers of some engines send no fragment of an empty object, which clients read as JSON.
            self.arguments.push_str("{}");
        }
        self.send(out);
        let Opened { index, tool, sent } = self.opened.take()?;
        let item = if tool.is_custom {
            let value = self.plain.as_deref().and_then(custom_input::value);
            let input = match value.and_then(|value| value.get(..sent)) {
                Some(input) if sent > 0 => custom_input::valid(input).into_owned(),
                _ => whole_input(&self.arguments),
            };
            if sent == 0 && !input.is_empty() {
                delta(out, "custom_tool_call_input.delta", index, &input);
            }
            begin_in_item(out, "custom_tool_call_input.done", index);
            put(out, "input", &format!("\"{input}\""));
            end(out);
            self.item(&tool, &input)
        } else {
            begin_in_item(out, "function_call_arguments.done", index);
            put(out, "name", &members::quoted(&tool.name));
            put(out, "arguments", &format!("\"{}\"", self.arguments));
            end(out);
            self.item(&tool, &self.arguments)
        };
        item_event(out, "output_item.done", index, &item);
        Some(item)
    }

    fn item(&self, tool: &Tool, text: &str) -> Vec<u8> {
        let (kind, member) = if tool.is_custom {
            ("custom_tool_call", "input")
        } else {
            ("function_call", "arguments")
        };
        let mut item = Vec::with_capacity(text.len() + 128);
        // Writing to memory cannot fail.
        let _ = write!(item, r#"{{"type":"{kind}""#);
        put_call(&mut item, tool, &self.id);
        put(&mut item, member, &format!("\"{text}\""));
        item.push(b'}');
        item
    }
}

/// `raw`: as of [`Call::add_arguments`].
fn begins_object(raw: &str) -> bool {
    let text = members::text(raw);
    let text = text.as_deref().unwrap_or(raw);
    text.trim_start().starts_with('{')
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
fn whole_input(arguments: &str) -> String {
    let found = members::text(&format!("\"{arguments}\"")).and_then(|text| {
        let read = Members::parse(&text).ok()?;
        let input = members::escaped(read.get("input")?)?;
        Some(input.to_owned())
    });
    found.unwrap_or_else(|| arguments.to_owned())
}
