//! The list of items that an engine is sent: rendered one by one, calls paired with their outputs. Pure.
//!
//! An item is rendered in the same bytes each time it is sent, in whatever turn, so that a conversation's
//! start stays the same prompt. Texts and arguments are never written anew.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};

use super::input::NewInput;
use super::item::{Item, Kind, joined_text};
use super::members::{self, Members, put, put_string, put_text};
use crate::openai::error::ApiError;

/// What becomes of items that engines do not know, such as calls of hosted tools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UnsupportedItems {
    /// Shown to the model as a function's call and output, where they have a text; else left out.
    #[default]
    Convert,
    /// Refused with 400.
    Reject,
}

/// Writes the list that an engine is sent, item by item, and sees that calls and outputs are paired.
#[derive(Debug)]
pub(super) struct EngineInput {
    json: Vec<u8>,
    unsupported: UnsupportedItems,
    calls: Vec<Call>,
    /// The last call of each id, by its place among them.
    by_id: HashMap<String, usize>,
    /// Of the item that is added next.
    place: usize,
    /// The last item that is no call and no reasoning.
    last_other: Option<usize>,
}

#[derive(Debug)]
struct Call {
    id: String,
    /// What errors call it.
    kind: &'static str,
    place: usize,
    is_answered: bool,
}

impl EngineInput {
    pub(super) fn new(unsupported: UnsupportedItems, capacity: usize) -> Self {
        let mut json = Vec::with_capacity(capacity + 2);
        json.push(b'[');
        Self {
            json,
            unsupported,
            calls: Vec::new(),
            by_id: HashMap::new(),
            place: 0,
            last_other: None,
        }
    }

    /// Adds a stored list of items.
    pub(super) fn add_list(&mut self, list: &[u8]) -> Result<(), ApiError> {
        let items = std::str::from_utf8(list).ok().and_then(members::objects);
        for item in items.unwrap_or_default() {
            self.add_item(&Item::of(item, &|| "input".to_owned())?)?;
        }
        Ok(())
    }

    pub(super) fn add_own(&mut self, own: &NewInput) -> Result<(), ApiError> {
        own.items.iter().try_for_each(|item| self.add(&item.json))
    }

    /// Adds one normalised item, or one that the router itself stored.
    pub(super) fn add(&mut self, raw: &str) -> Result<(), ApiError> {
        self.add_item(&Item::read(raw, "input")?)
    }

    fn add_item(&mut self, item: &Item<'_>) -> Result<(), ApiError> {
        let place = self.place;
        self.place += 1;
        if self.unsupported == UnsupportedItems::Reject
            && matches!(
                item.kind,
                Kind::McpCall
                    | Kind::CodeInterpreterCall
                    | Kind::FileSearchCall
                    | Kind::ClientCall
                    | Kind::ClientCallOutput
                    | Kind::Silent
            )
        {
            let why = format!("items of type '{}' are not supported", item.name);
            return Err(ApiError::wrong_value("input", why));
        }
        match item.kind {
            Kind::Message => {
                self.add_message(item);
                self.last_other = Some(place);
            }
            Kind::Reasoning => self.add_reasoning(item)?,
            Kind::FunctionCall => {
                self.called(item, "function call", place);
                self.begin("function_call");
                self.copy(item, &["call_id", "namespace", "name", "arguments"]);
            }
            Kind::CustomToolCall => {
                self.called(item, "custom tool call", place);
                self.begin("custom_tool_call");
                self.copy(item, &["call_id", "name", "input"]);
            }
            Kind::FunctionCallOutput => {
                self.answered(item, "function call output")?;
                self.last_other = Some(place);
                self.begin("function_call_output");
                self.copy(item, &["call_id", "output"]);
            }
            Kind::CustomToolCallOutput => {
                self.answered(item, "custom tool call output")?;
                self.last_other = Some(place);
                self.begin("custom_tool_call_output");
                self.copy(item, &["call_id", "output"]);
            }
            Kind::ClientCall => {
                let what = item.members.get("action");
                let what = what
                    .or_else(|| item.members.get("operation"))
                    .unwrap_or("{}");
                let id = call_id(item).to_owned();
                self.called(item, "tool call", place);
                self.function_call(&id, item.name, what);
            }
            Kind::ClientCallOutput => {
                self.answered(item, "tool call output")?;
                self.last_other = Some(place);
                let output = item.members.get("output").unwrap_or("\"\"");
                let id = call_id(item).to_owned();
                self.function_call_output(&id, output);
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
            Kind::Silent | Kind::Compaction | Kind::Reference => {}
        }
        Ok(())
    }

    /// The list, if every call that something follows has an output.
    pub(super) fn finish(mut self) -> Result<Vec<u8>, ApiError> {
        let last = self.last_other.unwrap_or(0);
        let open = self
            .calls
            .iter()
            .find(|call| !call.is_answered && call.place < last);
        if let Some(call) = open {
            return Err(ApiError::call_without_output(call.kind, &call.id));
        }
        self.json.push(b']');
        Ok(self.json)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.json.len() <= 1
    }

    pub(super) fn len(&self) -> usize {
        self.place
    }

    fn begin(&mut self, kind: &str) {
        if !self.is_empty() {
            self.json.push(b',');
        }
        self.json.push(b'{');
        put_string(&mut self.json, "type", kind);
    }

    fn copy(&mut self, item: &Item<'_>, names: &[&str]) {
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
            // Engines take the first part alone, and go on with what is not completed.
            put(&mut self.json, "status", "\"completed\"");
            let text = joined_text(content, "").unwrap_or_default();
            let part = format!(r#"[{{"type":"output_text","text":"{text}","annotations":[]}}]"#);
            put(&mut self.json, "content", &part);
        } else {
            put(&mut self.json, "content", content);
        }
        self.json.push(b'}');
    }

    /// Thoughts that cannot be read are an error; where there are none, there is no item.
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
        let sealed = item.members.text("encrypted_content");
        if let Some(sealed) = sealed.filter(|it| !it.is_empty()) {
            return Err(ApiError::unreadable_content(&sealed));
        }
        if let Some(text) = text_of("summary") {
            self.begin("reasoning");
            let part = format!(r#"[{{"type":"summary_text","text":"{text}"}}]"#);
            put(&mut self.json, "summary", &part);
            self.json.push(b'}');
        }
        Ok(())
    }

    fn called(&mut self, item: &Item<'_>, kind: &'static str, place: usize) {
        let id = members::text(call_id(item)).unwrap_or_default();
        let id = id.into_owned();
        self.by_id.insert(id.clone(), self.calls.len());
        self.calls.push(Call {
            id,
            kind,
            place,
            is_answered: false,
        });
    }

    fn answered(&mut self, item: &Item<'_>, kind: &str) -> Result<(), ApiError> {
        // As a text: a client may write what it was given with other escapes.
        let id = members::text(call_id(item)).unwrap_or_default();
        match self.by_id.get(&*id) {
            Some(place) => {
                self.calls[*place].is_answered = true;
                Ok(())
            }
            None => Err(ApiError::output_without_call(kind, &id)),
        }
    }

    /// A call as a function's; `arguments` is a JSON text that becomes a string.
    fn function_call(&mut self, id: &str, name: &str, arguments: &str) {
        self.begin("function_call");
        put(&mut self.json, "call_id", id);
        self.json.extend_from_slice(br#","name":"#);
        put_text(&mut self.json, name);
        self.json.extend_from_slice(br#","arguments":"#);
        put_text(&mut self.json, arguments);
        self.json.push(b'}');
    }

    /// `output` is a JSON value; what is no string becomes the string of its JSON.
    fn function_call_output(&mut self, id: &str, output: &str) {
        self.begin("function_call_output");
        put(&mut self.json, "call_id", id);
        if output.starts_with('"') {
            put(&mut self.json, "output", output);
        } else {
            self.json.extend_from_slice(br#","output":"#);
            put_text(&mut self.json, output);
        }
        self.json.push(b'}');
    }

    fn answered_call(&mut self, item: &Item<'_>, name: &str, arguments: &str, output: &str) {
        let id = item.members.get("id").unwrap_or("\"call\"").to_owned();
        self.function_call(&id, name, arguments);
        self.function_call_output(&id, output);
    }
}

/// A list that is too long for its engine, without its older half; `None` where nothing more may go. What
/// stays in any case: instructions among the items, and all from the last message of the user on. A call
/// goes with its output.
pub(super) fn shortened(list: &[u8]) -> Option<Vec<u8>> {
    let items = members::list(std::str::from_utf8(list).ok()?)?;
    let read: Vec<Item<'_>> = items
        .iter()
        .map(|raw| Item::read(raw, "input").ok())
        .collect::<Option<_>>()?;
    let role = |place: usize| read[place].members.get("role").unwrap_or_default();
    let last = (0..read.len()).rfind(|place| role(*place) == "\"user\"")?;
    let may_go = |place: &usize| !matches!(role(*place), "\"system\"" | "\"developer\"");
    let old: Vec<usize> = (0..last).filter(may_go).collect();
    let gone = &old[..old.len().div_ceil(2)];
    if gone.is_empty() {
        return None;
    }
    let calls: HashSet<&str> = gone
        .iter()
        .map(|place| &read[*place])
        .filter(|item| matches!(item.kind, Kind::FunctionCall | Kind::CustomToolCall))
        .map(call_id)
        .collect();
    let is_output = |item: &Item<'_>| {
        matches!(
            item.kind,
            Kind::FunctionCallOutput | Kind::CustomToolCallOutput
        )
    };
    let mut out = vec![b'['];
    for (place, item) in read.iter().enumerate() {
        let goes = gone.binary_search(&place).is_ok()
            || (is_output(item) && calls.contains(call_id(item)));
        if !goes {
            if out.len() > 1 {
                out.push(b',');
            }
            out.extend_from_slice(items[place].as_bytes());
        }
    }
    out.push(b']');
    Some(out)
}

/// The id that a call and its output share, as it is written.
fn call_id<'a>(item: &Item<'a>) -> &'a str {
    let id = item.members.get("call_id");
    id.or_else(|| item.members.get("id")).unwrap_or("\"\"")
}

/// What a code interpreter printed, as a JSON string.
fn logs(outputs: &str) -> Option<String> {
    let mut all = String::new();
    for output in members::list(outputs)? {
        let output = Members::parse(output).ok()?;
        if let Some(logs) = output.get("logs").and_then(members::escaped) {
            all.push_str(logs);
        }
    }
    (!all.is_empty()).then(|| format!("\"{all}\""))
}
