//! The list of items for an engine. Checks that tool calls and outputs are paired. Pure.
//!
//! An item is written as the same bytes in every turn, so that the prompt prefix stays the same and hits the
//! engine's prefix cache. Texts and arguments are copied as written.

use std::borrow::Cow;
use std::collections::HashMap;

use super::input::NewInput;
use super::item::{Item, Kind, call_id, joined_text};
use super::known_json;
use super::members::{self, Members, put, put_comma, put_string};
use crate::json_scan::without_lone_surrogates;
use crate::openai::error::ApiError;

/// Writes the list item by item. Items that engines do not know, such as calls of hosted tools, become a function call
/// and its output if they contain text; otherwise they are left out.
#[derive(Debug, Default)]
pub(super) struct EngineInput {
    json: Vec<u8>,
    calls: Vec<Call>,
    /// Indexes in `calls` of the calls with each id, whose outputs come in the same order.
    by_id: HashMap<String, Calls>,
    /// Index of the next item.
    next: usize,
    /// Index of the last item that is neither a call nor reasoning.
    last_other: Option<usize>,
}

#[derive(Debug, Default)]
struct Calls {
    indexes: Vec<usize>,
    /// How many of them have an output.
    answered: usize,
}

#[derive(Debug)]
struct Call {
    id: String,
    /// Its name in errors.
    kind: &'static str,
    index: usize,
    is_answered: bool,
}

impl EngineInput {
    pub(super) fn new(capacity: usize) -> Self {
        let mut json = Vec::with_capacity(capacity + 2);
        json.push(b'[');
        Self {
            json,
            ..Self::default()
        }
    }

    /// Adds a stored list of items.
    pub(super) fn add_list(&mut self, list: &[u8]) -> Result<(), ApiError> {
        for item in known_json::each_object(std::str::from_utf8(list).ok()) {
            self.add_item(&Item::of(item, &|| "input".to_owned())?)?;
        }
        Ok(())
    }

    pub(super) fn add_new(&mut self, new_input: &NewInput) -> Result<(), ApiError> {
        new_input
            .items
            .iter()
            .try_for_each(|item| self.add(&item.json))
    }

    /// Adds one normalised or stored item.
    pub(super) fn add(&mut self, raw: &str) -> Result<(), ApiError> {
        let item =
            known_json::object(raw).ok_or_else(|| ApiError::wrong_type("input", "an object"))?;
        self.add_item(&Item::of(item, &|| "input".to_owned())?)
    }

    fn add_item(&mut self, item: &Item<'_>) -> Result<(), ApiError> {
        let index = self.next;
        self.next += 1;
        match item.kind {
            Kind::Message => {
                self.add_message(item);
                self.last_other = Some(index);
            }
            Kind::Reasoning => self.add_reasoning(item)?,
            Kind::FunctionCall => {
                self.add_call(item, "function call", index);
                self.begin("function_call");
                self.copy(item, &["call_id", "namespace", "name", "arguments"]);
            }
            Kind::CustomToolCall => {
                self.add_call(item, "custom tool call", index);
                self.begin("custom_tool_call");
                self.copy(item, &["call_id", "namespace", "name", "input"]);
            }
            Kind::FunctionCallOutput | Kind::CustomToolCallOutput => {
                self.mark_answered(item, index)?;
                self.begin(item.name);
                self.copy(item, &["call_id", "output"]);
            }
            Kind::ClientCall => {
                let id = call_id(item).to_owned();
                self.add_call(item, "tool call", index);
                self.function_call(&id, item.name, &client_call_arguments(item));
            }
            Kind::ClientCallOutput => {
                self.mark_answered(item, index)?;
                let output = item.members.get("output");
                let output = output.or_else(|| item.members.get("result"));
                let id = call_id(item).to_owned();
                self.function_call_output(&id, output.unwrap_or("\"\""));
            }
            Kind::ComputerCallOutput => {
                self.mark_answered(item, index)?;
                self.begin("function_call_output");
                put(&mut self.json, "call_id", call_id(item));
                put(&mut self.json, "output", &screenshot(item));
                self.json.push(b'}');
            }
            Kind::McpCall => {
                let output = item.members.get("output");
                if let Some(output) = output.or_else(|| item.members.get("error")) {
                    let name = item.members.text("name").unwrap_or_default();
                    let arguments = item.members.text("arguments").unwrap_or_default();
                    self.answered_call(item, &name, &arguments, output);
                }
            }
            Kind::CodeInterpreterCall => {
                let logs = item.members.get("outputs").and_then(logs);
                if let Some(logs) = logs {
                    let code = item.members.get("code").unwrap_or("\"\"");
                    let arguments = format!(r#"{{"code":{code}}}"#);
                    self.answered_call(item, "code_interpreter", &arguments, &logs);
                }
            }
            Kind::FileSearchCall => {
                if let Some(results) = item.members.get("results") {
                    let queries = item.members.get("queries").unwrap_or("[]");
                    let arguments = format!(r#"{{"queries":{queries}}}"#);
                    self.answered_call(item, "file_search", &arguments, results);
                }
            }
            Kind::AdditionalTools => {
                // The body of an engine has them among its own, and this item not.
                self.begin(item.name);
                put(&mut self.json, "role", "\"developer\"");
                self.copy(item, &["tools"]);
            }
            Kind::Hidden | Kind::Compaction | Kind::CompactionTrigger | Kind::Reference => {}
        }
        Ok(())
    }

    /// The list. Fails if a call has no output though other items follow it.
    pub(super) fn finish(mut self) -> Result<Vec<u8>, ApiError> {
        let last = self.last_other.unwrap_or(0);
        let open = self
            .calls
            .iter()
            .find(|call| !call.is_answered && call.index < last);
        if let Some(call) = open {
            return Err(ApiError::call_without_output(call.kind, &call.id));
        }
        self.json.push(b']');
        // Items that were stored before engines' own were replaced, and those of clients.
        let replaced = std::str::from_utf8(&self.json)
            .ok()
            .and_then(without_lone_surrogates);
        Ok(replaced.map_or(self.json, String::into_bytes))
    }

    pub(super) fn len(&self) -> usize {
        self.next
    }

    fn begin(&mut self, kind: &str) {
        put_comma(&mut self.json);
        self.json.push(b'{');
        put_string(&mut self.json, "type", kind);
    }

    fn copy(&mut self, item: &Item<'_>, names: &[&'static str]) {
        for name in names {
            if let Some(value) = item.members.get(name) {
                put(&mut self.json, name, value);
            }
        }
        self.json.push(b'}');
    }

    fn add_message(&mut self, item: &Item<'_>) {
        let content = item.members.get("content").unwrap_or("[]");
        let role = item.members.get("role").unwrap_or("\"user\"");
        self.begin("message");
        put(&mut self.json, "role", role);
        if role == "\"assistant\"" {
            // Engines read only the first part, and would continue a message that is not completed.
            put(&mut self.json, "status", "\"completed\"");
            let text = joined_text(content, "").unwrap_or_default();
            put(
                &mut self.json,
                "content",
                r#"[{"type":"output_text","text":""#,
            );
            self.json.extend_from_slice(text.as_bytes());
            self.json.extend_from_slice(br#"","annotations":[]}]"#);
        } else {
            put(&mut self.json, "content", content);
        }
        self.json.push(b'}');
    }

    /// Reasoning without text is left out; encrypted content that the router cannot read is an error.
    fn add_reasoning(&mut self, item: &Item<'_>) -> Result<(), ApiError> {
        let text_of = |name: &str| {
            let content = item.members.get(name);
            content
                .and_then(|content| joined_text(content, r"\n"))
                .filter(|text| !text.is_empty())
        };
        if let Some(text) = text_of("content") {
            self.begin("reasoning");
            put(&mut self.json, "summary", "[]");
            let part = format!(r#"[{{"type":"reasoning_text","text":"{text}"}}]"#);
            put(&mut self.json, "content", &part);
            self.json.push(b'}');
            return Ok(());
        }
        let encrypted = item.members.text("encrypted_content");
        if let Some(encrypted) = encrypted.filter(|text| !text.is_empty()) {
            return Err(ApiError::unreadable_content(&encrypted));
        }
        if let Some(text) = text_of("summary") {
            self.begin("reasoning");
            let part = format!(r#"[{{"type":"summary_text","text":"{text}"}}]"#);
            put(&mut self.json, "summary", &part);
            self.json.push(b'}');
        }
        Ok(())
    }

    fn add_call(&mut self, item: &Item<'_>, kind: &'static str, index: usize) {
        let id = members::text(call_id(item)).unwrap_or_default();
        let id = id.into_owned();
        let calls = self.by_id.entry(id.clone()).or_default();
        calls.indexes.push(self.calls.len());
        self.calls.push(Call {
            id,
            kind,
            index,
            is_answered: false,
        });
    }

    /// An output of a call, with this index.
    fn mark_answered(&mut self, item: &Item<'_>, index: usize) -> Result<(), ApiError> {
        // Compared as text: the client may have changed the escapes.
        let id = members::text(call_id(item)).unwrap_or_default();
        let Some(calls) = self.by_id.get_mut(&*id) else {
            let kind = match item.kind {
                Kind::ClientCallOutput => "tool call output".to_owned(),
                _ => item.name.replace('_', " "),
            };
            return Err(ApiError::output_without_call(&kind, &id));
        };
        self.last_other = Some(index);
        // A second output of a call changes nothing.
        if let Some(index) = calls.indexes.get(calls.answered) {
            self.calls[*index].is_answered = true;
            calls.answered += 1;
        }
        Ok(())
    }

    /// Writes a call as a function call. `arguments`: JSON that becomes a string.
    fn function_call(&mut self, id: &str, name: &str, arguments: &str) {
        self.begin("function_call");
        put(&mut self.json, "call_id", id);
        put_string(&mut self.json, "name", name);
        put_string(&mut self.json, "arguments", arguments);
        self.json.push(b'}');
    }

    /// `output`: a JSON value. Anything but a string becomes a string of its JSON.
    fn function_call_output(&mut self, id: &str, output: &str) {
        self.begin("function_call_output");
        put(&mut self.json, "call_id", id);
        if output.starts_with('"') {
            put(&mut self.json, "output", output);
        } else {
            put_string(&mut self.json, "output", output);
        }
        self.json.push(b'}');
    }

    fn answered_call(&mut self, item: &Item<'_>, name: &str, arguments: &str, output: &str) {
        let id = item.members.get("id").unwrap_or("\"call\"").to_owned();
        self.function_call(&id, name, arguments);
        self.function_call_output(&id, output);
    }
}

/// The arguments of a client's own call, as JSON: what its type has instead.
fn client_call_arguments<'a>(item: &Item<'a>) -> Cow<'a, str> {
    let whole = ["action", "actions", "operation"];
    if let Some(what) = whole.iter().find_map(|name| item.members.get(name)) {
        return Cow::Borrowed(what);
    }
    match item.members.get("code") {
        Some(code) => Cow::Owned(format!(r#"{{"code":{code}}}"#)),
        None => Cow::Borrowed("{}"),
    }
}

/// The output of a computer call as a list of parts, so that its image is seen and not read as text.
fn screenshot(item: &Item<'_>) -> String {
    let output = item.members.get("output").unwrap_or_default();
    let output = Members::parse(output).unwrap_or_default();
    match output.get("image_url") {
        Some(url) => format!(r#"[{{"type":"input_image","image_url":{url},"detail":"auto"}}]"#),
        None => r#""""#.to_owned(),
    }
}

/// The logs of a code interpreter, as a JSON string.
fn logs(outputs: &str) -> Option<String> {
    let mut all = String::new();
    for output in known_json::objects(outputs)? {
        let output = output?;
        if let Some(logs) = output.get("logs").and_then(members::escaped) {
            all.push_str(logs);
        }
    }
    (!all.is_empty()).then(|| format!("\"{all}\""))
}
