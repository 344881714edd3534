//! The messages of a chat completion, from the items of a Responses request. Pure.
//!
//! Written like this because templates are strict: one system message at the head, no two assistant messages in a row,
//! and the outputs of calls directly after their assistant message, in the order of the calls.

use std::collections::{HashMap, VecDeque};

use rustc_hash::{FxHashMap, FxHashSet};

use super::parts::{put_content, put_other_parts};
use super::settings::{ChatSettings, InvalidArguments};
use crate::relay::NotConvertible;
use crate::responses::allowed_tools::qualified;
use crate::responses::item::joined_text;
use crate::responses::known_json;
use crate::responses::members::{self, Members, put, put_comma, put_string, put_text};

/// Between system texts, and between texts of the assistant that were separate messages.
const PARAGRAPH: &str = r"\n\n";
/// The arguments of a function that is called without any, as JSON.
const NO_ARGUMENTS: &str = "\"{}\"";

pub(super) struct Written {
    /// Whether the last message is to be continued.
    pub(super) continues: bool,
    pub(super) replaced_arguments: u64,
}

/// Writes the list of messages. `merges_later`: whether system messages after the head are appended to it.
pub(super) fn write(
    out: &mut Vec<u8>,
    instructions: Option<&str>,
    input: &str,
    settings: &ChatSettings,
    merges_later: &dyn Fn() -> bool,
) -> Result<Written, NotConvertible> {
    let mut messages = Messages::new(settings, merges_later);
    if let Some(text) = instructions.and_then(members::escaped) {
        messages.add_to_head(text);
    }
    let mut continues = false;
    if input.starts_with('"') {
        messages.message("user", input, "input")?;
    } else {
        continues = messages.pair_outputs(input)?;
        for (index, item) in known_json::each_object(Some(input)).enumerate() {
            messages.item(index, &item)?;
        }
    }
    let replaced_arguments = messages.replaced_arguments;
    messages.finish(out)?;
    Ok(Written {
        continues,
        replaced_arguments,
    })
}

fn is_unfinished(item: &Members<'_>) -> bool {
    item.get("role") == Some("\"assistant\"") && item.get("status") == Some("\"in_progress\"")
}

struct Messages<'a> {
    settings: &'a ChatSettings,
    merges_later: &'a dyn Fn() -> bool,
    /// The system message at the head: a JSON string without quotes.
    head: String,
    /// True until the first message that is not a system message.
    is_at_head: bool,
    /// The messages after it.
    json: Vec<u8>,
    assistant: Assistant,
    /// The output of each call, by the place of the call among the items.
    outputs: FxHashMap<usize, Output<'a>>,
    /// The places of those outputs.
    paired: FxHashSet<usize>,
    replaced_arguments: u64,
}

struct Output<'a> {
    /// Its place among the items.
    index: usize,
    json: &'a str,
}

/// The assistant message that is being collected. Texts are JSON strings without quotes.
#[derive(Default)]
struct Assistant {
    reasoning: Option<String>,
    text: Option<String>,
    /// A list without its brackets.
    calls: Vec<u8>,
    /// Place and id of each, in order.
    call_ids: Vec<(usize, String)>,
}

impl<'a> Messages<'a> {
    fn new(settings: &'a ChatSettings, merges_later: &'a dyn Fn() -> bool) -> Self {
        Self {
            settings,
            merges_later,
            head: String::new(),
            is_at_head: true,
            json: Vec::new(),
            assistant: Assistant::default(),
            outputs: FxHashMap::default(),
            paired: FxHashSet::default(),
            replaced_arguments: 0,
        }
    }

    /// An output belongs to the first call before it with its id that has none yet: engines may give the same id in
    /// every turn. Returns whether the last item is to be continued.
    fn pair_outputs(&mut self, input: &'a str) -> Result<bool, NotConvertible> {
        let no_items = || NotConvertible::new("input", "is no list of items");
        let mut open: HashMap<String, VecDeque<usize>> = HashMap::new();
        let mut continues = false;
        let items = known_json::objects(input).ok_or_else(no_items)?;
        for (index, item) in items.enumerate() {
            let item = item.ok_or_else(no_items)?;
            continues = is_unfinished(&item);
            let id = || item.text("call_id").unwrap_or_default();
            match item.text("type").as_deref() {
                Some("function_call" | "custom_tool_call") => {
                    open.entry(id().into_owned()).or_default().push_back(index);
                }
                Some("function_call_output" | "custom_tool_call_output") => {
                    let call = open.get_mut(&*id()).and_then(VecDeque::pop_front);
                    if let Some(call) = call {
                        self.outputs.insert(call, Output::of(&item, index));
                        self.paired.insert(index);
                    }
                }
                _ => {}
            }
        }
        Ok(continues)
    }

    fn item(&mut self, index: usize, item: &Members<'a>) -> Result<(), NotConvertible> {
        let kind = item.text("type");
        match kind.as_deref().unwrap_or("message") {
            "message" => {
                let role = item.text("role").unwrap_or_default();
                let content = item.get("content").unwrap_or("[]");
                self.message(&role, content, &format!("input[{index}].content"))
            }
            "reasoning" => {
                let text = |name| joined_text(item.get(name)?, r"\n");
                let text = text("content").or_else(|| text("summary"));
                if let Some(text) = text.filter(|text| !text.is_empty()) {
                    append(&mut self.assistant.reasoning, &text, r"\n");
                }
                Ok(())
            }
            "function_call" => {
                let arguments = item.get("arguments").unwrap_or("\"\"");
                self.call(index, item, arguments);
                Ok(())
            }
            "custom_tool_call" => {
                let input = item.get("input").unwrap_or("\"\"");
                let mut arguments = Vec::new();
                put_text(&mut arguments, &format!(r#"{{"input":{input}}}"#));
                let arguments = String::from_utf8(arguments).unwrap_or_default();
                self.call(index, item, &arguments);
                Ok(())
            }
            "function_call_output" | "custom_tool_call_output" => {
                self.end_assistant(true)?;
                if self.paired.contains(&index) {
                    return Ok(());
                }
                // Of a call that stands nowhere, or a second output: it stays here.
                let id = item.text("call_id").unwrap_or_default();
                self.tool_messages(&[(id.into_owned(), Output::of(item, index))])
            }
            kind => Err(NotConvertible::new(
                &format!("input[{index}]"),
                &format!(
                    "items of type '{kind}' cannot be sent to a worker that speaks chat completions only"
                ),
            )),
        }
    }

    fn message(&mut self, role: &str, content: &str, param: &str) -> Result<(), NotConvertible> {
        match role {
            "assistant" => {
                let text = joined_text(content, "").unwrap_or_default();
                if !text.is_empty() {
                    append(&mut self.assistant.text, &text, PARAGRAPH);
                }
                self.is_at_head = false;
                Ok(())
            }
            "system" | "developer" => {
                let text = joined_text(content, r"\n").unwrap_or_default();
                let mut others = Vec::new();
                put_other_parts(&mut others, content, param)?;
                if !others.is_empty() {
                    let why = "a system message can have only text on a worker that speaks chat completions only";
                    return Err(NotConvertible::new(param, why));
                }
                let keeps_role = role == "developer" && self.settings.developer_role;
                let is_at_head = self.is_at_head && self.assistant.is_empty();
                if !keeps_role && (is_at_head || (self.merges_later)()) {
                    self.add_to_head(&text);
                    return Ok(());
                }
                self.end_assistant(true)?;
                self.begin(if keeps_role { role } else { "system" });
                put(&mut self.json, "content", &format!("\"{text}\""));
                self.json.push(b'}');
                Ok(())
            }
            _ => {
                self.end_assistant(true)?;
                self.is_at_head = false;
                self.begin(role);
                put(&mut self.json, "content", "");
                put_content(&mut self.json, content, param)?;
                self.json.push(b'}');
                Ok(())
            }
        }
    }

    fn add_to_head(&mut self, text: &str) {
        if !self.head.is_empty() && !text.is_empty() {
            self.head.push_str(PARAGRAPH);
        }
        self.head.push_str(text);
    }

    fn call(&mut self, index: usize, item: &Members<'_>, arguments: &str) {
        let replaces = self.settings.invalid_arguments == InvalidArguments::EmptyObject;
        let arguments = if replaces && !is_object(arguments) {
            self.replaced_arguments += 1;
            NO_ARGUMENTS
        } else if arguments == "\"\"" {
            // An engine sent none, and templates read them as JSON.
            NO_ARGUMENTS
        } else {
            arguments
        };
        let id = item.text("call_id").unwrap_or_default();
        let namespace = item.text("namespace").unwrap_or_default();
        let name = item.text("name").unwrap_or_default();
        let calls = &mut self.assistant.calls;
        put_comma(calls);
        calls.extend_from_slice(br#"{"id":"#);
        put_text(calls, &id);
        calls.extend_from_slice(br#","type":"function","function":{"name":"#);
        put_text(calls, &qualified(&namespace, &name));
        put(calls, "arguments", arguments);
        calls.extend_from_slice(b"}}");
        self.assistant.call_ids.push((index, id.into_owned()));
    }

    fn begin(&mut self, role: &str) {
        put_comma(&mut self.json);
        self.json.push(b'{');
        put_string(&mut self.json, "role", role);
    }

    /// Writes the assistant message that was collected, and the outputs of its calls. Reasoning alone is written only at
    /// the end, where the model goes on from it.
    fn end_assistant(&mut self, is_followed: bool) -> Result<(), NotConvertible> {
        let assistant = std::mem::take(&mut self.assistant);
        let is_only_reasoning = assistant.text.is_none() && assistant.calls.is_empty();
        if assistant.is_empty() || is_followed && is_only_reasoning {
            return Ok(());
        }
        self.is_at_head = false;
        self.begin("assistant");
        if let Some(reasoning) = &assistant.reasoning {
            // vLLM's name, and that of SGLang and others.
            for name in ["reasoning", "reasoning_content"] {
                put(&mut self.json, name, &format!("\"{reasoning}\""));
            }
        }
        match &assistant.text {
            Some(text) => put(&mut self.json, "content", &format!("\"{text}\"")),
            None if is_only_reasoning => put(&mut self.json, "content", "\"\""),
            None => put(&mut self.json, "content", "null"),
        }
        if !assistant.calls.is_empty() {
            put(&mut self.json, "tool_calls", "[");
            self.json.extend_from_slice(&assistant.calls);
            self.json.push(b']');
        }
        self.json.push(b'}');
        let mut answered = Vec::new();
        for (index, id) in assistant.call_ids {
            if let Some(output) = self.outputs.remove(&index) {
                answered.push((id, output));
            }
        }
        self.tool_messages(&answered)
    }

    /// Writes tool messages. They have text only: what else the outputs have follows as a user message.
    fn tool_messages(&mut self, outputs: &[(String, Output<'_>)]) -> Result<(), NotConvertible> {
        // A list without its brackets.
        let mut others = Vec::new();
        for (id, output) in outputs {
            self.begin("tool");
            put_string(&mut self.json, "tool_call_id", id);
            let text = joined_text(output.json, r"\n").unwrap_or_default();
            put(&mut self.json, "content", &format!("\"{text}\""));
            self.json.push(b'}');
            let param = format!("input[{}].output", output.index);
            put_other_parts(&mut others, output.json, &param)?;
        }
        if !others.is_empty() {
            self.begin("user");
            put(&mut self.json, "content", "[");
            self.json.extend_from_slice(&others);
            self.json.extend_from_slice(b"]}");
        }
        Ok(())
    }

    fn finish(mut self, out: &mut Vec<u8>) -> Result<(), NotConvertible> {
        self.end_assistant(false)?;
        out.push(b'[');
        if !self.head.is_empty() {
            out.extend_from_slice(br#"{"role":"system","content":""#);
            out.extend_from_slice(self.head.as_bytes());
            out.extend_from_slice(br#""}"#);
            if !self.json.is_empty() {
                out.push(b',');
            }
        }
        out.extend_from_slice(&self.json);
        out.push(b']');
        Ok(())
    }
}

impl<'a> Output<'a> {
    /// The output in the item at `index`.
    fn of(item: &Members<'a>, index: usize) -> Self {
        Self {
            index,
            json: item.get("output").unwrap_or("\"\""),
        }
    }
}

impl Assistant {
    fn is_empty(&self) -> bool {
        self.reasoning.is_none() && self.text.is_none() && self.calls.is_empty()
    }
}

fn append(text: &mut Option<String>, more: &str, separator: &str) {
    match text {
        Some(text) => {
            text.push_str(separator);
            text.push_str(more);
        }
        None => *text = Some(more.to_owned()),
    }
}

/// Whether a JSON string contains a JSON object.
fn is_object(arguments: &str) -> bool {
    members::text(arguments).is_some_and(|text| Members::parse(&text).is_ok())
}
