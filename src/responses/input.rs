//! Normalises the input of a request into items: each gets an id, a type, a status and content in parts.
//! Everything else stays as the client wrote it. Pure.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use bytes::Bytes;

use super::client_state::{StateReader, is_state_token};
use super::content;
use super::item::{Ids, Item, Kind, has_text, owner};
use super::known_json;
use super::member_checks::check_tools;
use super::members::{self, Members, array, put, put_read, put_string, put_text};
use super::request::is_id_byte;
use crate::ids::ResponseId;
use crate::openai::error::ApiError;
use crate::store;

const ID_LENGTH_MAX: usize = 256;
/// OpenAI allows 64. Some engines make the id of the function's name, such as `functions.NAME:0` for Kimi, and a client must
/// be able to answer each call that it got.
const CALL_ID_LENGTH_MAX: usize = 256;

/// The normalised input of one request: stored, listed, and sent to the engine.
#[derive(Debug, Default, PartialEq)]
pub(super) struct NewInput {
    pub(super) items: Vec<InputItem>,
    /// Ids that the router gave to items of earlier responses, which the client sent again or referred to.
    pub(super) earlier: HashSet<String>,
}

#[derive(Debug, PartialEq)]
pub(super) struct InputItem {
    pub(super) id: String,
    pub(super) json: String,
}

impl From<InputItem> for store::Item {
    fn from(item: InputItem) -> Self {
        Self {
            id: item.id.into(),
            json: item.json.into(),
        }
    }
}

/// Stored items that `item_reference`s name, by id.
pub(super) type ReferencedItems = HashMap<String, String>;

/// What is needed to normalise an input.
#[derive(Clone, Copy, Debug)]
pub(super) struct InputContext<'a> {
    pub(super) ids: &'a Ids,
    pub(super) referenced: &'a ReferencedItems,
    /// Limit on the bytes of referenced items; an item counts once per reference. 0: none may be referred to.
    pub(super) referenced_bytes_max: u64,
    pub(super) reader: &'a StateReader<'a>,
    /// Whether valid ids of the client are kept. In a conversation they are not, since ids of different
    /// requests could collide.
    pub(super) keeps_ids: bool,
    /// The name of the list in errors.
    pub(super) param: &'a str,
}

impl NewInput {
    /// Normalises `input`, the JSON of a string or a list.
    pub(super) fn read(input: Option<&str>, context: &InputContext<'_>) -> Result<Self, ApiError> {
        let InputContext {
            ids,
            referenced,
            referenced_bytes_max,
            reader,
            keeps_ids,
            param,
        } = *context;
        let mut new_input = Self::default();
        let Some(input) = input else {
            return Ok(new_input);
        };
        if input.starts_with('"') {
            let id = ids.input("msg", 0);
            let content = [r#"[{"type":"input_text","text":"#, input, "}]"];
            new_input.items.push(InputItem {
                json: message(&id, "\"user\"", &content, None),
                id,
            });
            return Ok(new_input);
        }
        let wrong = || ApiError::wrong_type(param, "a string or a list of items");
        let items = known_json::objects(input).ok_or_else(wrong)?;
        let mut used = HashSet::new();
        let mut referenced_bytes = 0;
        // The place of the last summary of a compacted conversation.
        let mut compaction = None;
        for (index, members) in items.enumerate() {
            let path = || format!("{param}[{index}]");
            let members = members.ok_or_else(|| ApiError::wrong_type(&path(), "an object"))?;
            let mut item = Item::of(members, &path)?;
            if let Some(id) = item.id().filter(|id| owner(id).is_some()) {
                new_input.earlier.insert(id.into_owned());
            }
            if item.kind == Kind::Reference {
                let id = item
                    .id()
                    .ok_or_else(|| ApiError::missing_parameter(&format!("{}.id", path())))?;
                let raw = referenced.get(&*id).ok_or_else(|| {
                    if referenced_bytes_max == 0 {
                        let why = "is a reference, which is not looked up here: send the item";
                        ApiError::unsupported(&path(), why)
                    } else {
                        ApiError::unknown_item(&id)
                    }
                })?;
                // A short reference may stand for a large item, and may be repeated.
                referenced_bytes += raw.len() as u64;
                if referenced_bytes > referenced_bytes_max {
                    let max = referenced_bytes_max;
                    return Err(ApiError::too_long_history("bytes", max));
                }
                item = Item::read(raw, &path())?;
            }
            let mut id_of = |item: &Item<'_>| {
                let id = item.id().filter(|id| {
                    keeps_ids
                        && (1..=ID_LENGTH_MAX).contains(&id.len())
                        && id.bytes().all(is_id_byte)
                });
                match id {
                    Some(id) if used.insert(id.to_string()) => id.into_owned(),
                    Some(_) | None => ids.input(item.prefix(), index),
                }
            };
            let token = match item.kind {
                Kind::Reasoning | Kind::Compaction => item.members.text("encrypted_content"),
                _ => None,
            };
            let mut with_id = |item: &Item<'_>| -> Result<InputItem, ApiError> {
                let id = id_of(item);
                let json = normalised(item, &id, &path)?;
                Ok(InputItem { id, json })
            };
            let is_compaction = item.kind == Kind::Compaction;
            let item = match token.filter(|token| is_state_token(token)) {
                None => with_id(&item)?,
                Some(token) => match reader.item(&token)? {
                    None => continue,
                    Some(raw) => with_id(&Item::read(&raw, &path())?)?,
                },
            };
            // The latest summary covers what the earlier ones did.
            if is_compaction && let Some(earlier) = compaction.replace(new_input.items.len()) {
                new_input.items.remove(earlier);
                compaction = Some(new_input.items.len());
            }
            new_input.items.push(item);
        }
        Ok(new_input)
    }

    pub(super) fn bytes(&self) -> usize {
        self.items.iter().map(|item| item.json.len()).sum()
    }

    pub(super) fn json(&self) -> Bytes {
        array(self.items.iter().map(|item| item.json.as_bytes())).into()
    }
}

/// The first of the items in stored lists that has one of these ids.
pub(super) fn first_of(lists: &[Bytes], ids: &HashSet<String>) -> Option<String> {
    if ids.is_empty() {
        return None;
    }
    let lists = lists.iter().filter_map(|list| members::list_of(list));
    let mut items = lists.flatten();
    items.find_map(|raw| {
        let id = Members::parse(raw).ok()?.text("id")?;
        ids.contains(&*id).then(|| id.into_owned())
    })
}

/// The ids in the `item_reference`s of an input.
pub(super) fn references(input: Option<&str>) -> HashSet<String> {
    let found = known_json::each_object(input).filter_map(|item| {
        let is_reference = match item.text("type") {
            Some(name) => name == "item_reference",
            None => item.get("role").is_none(),
        };
        is_reference.then(|| item.text("id")).flatten()
    });
    found.map(Cow::into_owned).collect()
}

/// The responses that own these items, each with whether its output (or else its input) has them.
pub(super) fn owners(references: &HashSet<String>) -> HashSet<(ResponseId, bool)> {
    references.iter().filter_map(|id| owner(id)).collect()
}

/// Adds the wanted items of a stored list to `found` that it lacks. Returns their bytes: many lists may have the same
/// item, since what a request refers to is stored with it.
pub(super) fn collect(list: &[u8], wanted: &HashSet<String>, found: &mut ReferencedItems) -> usize {
    let mut bytes = 0;
    for raw in members::list_of(list).unwrap_or_default() {
        let id = Members::parse(raw).ok().and_then(|item| item.text("id"));
        let is_new = |id: &Cow<'_, str>| wanted.contains(&**id) && !found.contains_key(&**id);
        if let Some(id) = id.filter(is_new) {
            bytes += raw.len();
            found.insert(id.into_owned(), raw.to_owned());
        }
    }
    bytes
}

/// Writes a message item. `content`: pieces of its JSON; `rest`: other members to copy.
fn message(id: &str, role: &str, content: &[&str], rest: Option<&Members<'_>>) -> String {
    let length: usize = content.iter().map(|piece| piece.len()).sum();
    let mut out = Vec::with_capacity(96 + id.len() + length);
    out.extend_from_slice(br#"{"id":"#);
    put_text(&mut out, id);
    put(&mut out, "type", "\"message\"");
    put(&mut out, "role", role);
    put(&mut out, "status", "\"completed\"");
    put(&mut out, "content", "");
    for piece in content {
        out.extend_from_slice(piece.as_bytes());
    }
    for (name, value) in rest.into_iter().flat_map(Members::iter) {
        if !matches!(name, "id" | "type" | "role" | "status" | "content") && value != "null" {
            put_read(&mut out, name, value);
        }
    }
    out.push(b'}');
    into_string(out)
}

/// The bytes are pieces of valid UTF-8 put together.
fn into_string(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_default()
}

/// The JSON of an item with an id, a type, a status and content in parts.
fn normalised(item: &Item<'_>, id: &str, path: &dyn Fn() -> String) -> Result<String, ApiError> {
    let of = |name: &str| item.members.get(name);
    let at = |name: &str| format!("{}.{name}", path());
    let string = |name: &str| content::required_text(&item.members, name, &at);
    let mut output = None;
    match item.kind {
        Kind::Message => {
            let role = string("role")?;
            let kind = match role {
                "\"assistant\"" => "output_text",
                "\"user\"" | "\"system\"" | "\"developer\"" => "input_text",
                _ => {
                    let why = "it must be 'user', 'assistant', 'system' or 'developer'";
                    return Err(ApiError::wrong_value(&at("role"), why));
                }
            };
            let parts;
            let list;
            let content: &[&str] = match of("content") {
                None => return Err(ApiError::missing_parameter(&at("content"))),
                Some(text) if text.starts_with('"') => {
                    let rest = match kind {
                        "output_text" => r#","annotations":[],"logprobs":[]"#,
                        _ => "",
                    };
                    parts = [r#"[{"type":""#, kind, r#"","text":"#, text, rest, "}]"];
                    &parts
                }
                Some(raw) => {
                    list = content::complete(raw, &|| at("content"))?;
                    // Output parts are joined for the engine, so they must be readable.
                    let is_readable = kind == "input_text" || list == "[]" || has_text(&list);
                    if !is_readable {
                        let expected = "a string or a list of parts";
                        return Err(ApiError::wrong_type(&at("content"), expected));
                    }
                    parts = [&list, "", "", "", "", ""];
                    &parts
                }
            };
            return Ok(message(id, role, content, Some(&item.members)));
        }
        Kind::FunctionCall => {
            string("name")?;
            string("arguments")?;
            check_call_id(string("call_id")?, &at)?;
        }
        Kind::CustomToolCall => {
            string("name")?;
            string("input")?;
            check_call_id(string("call_id")?, &at)?;
        }
        Kind::FunctionCallOutput | Kind::CustomToolCallOutput => {
            check_call_id(string("call_id")?, &at)?;
            match of("output") {
                None => return Err(ApiError::missing_parameter(&at("output"))),
                Some(text) if text.starts_with('"') => {}
                Some(list) => output = Some(content::complete(list, &|| at("output"))?),
            }
        }
        Kind::Compaction => {
            // Another service's.
            let content = item.members.text("encrypted_content").unwrap_or_default();
            return Err(ApiError::unreadable_content(&content));
        }
        // A local shell's output has its call's id as `id`.
        Kind::ClientCall | Kind::ClientCallOutput if of("call_id").is_none() => {
            string("id")?;
        }
        Kind::ClientCall | Kind::ClientCallOutput => check_call_id(string("call_id")?, &at)?,
        Kind::ComputerCallOutput => {
            check_call_id(string("call_id")?, &at)?;
            let output = of("output").and_then(|raw| Members::parse(raw).ok());
            let url = output.as_ref().and_then(|output| output.get("image_url"));
            if !url.is_some_and(|url| url.starts_with('"')) {
                let why = "it must be a screenshot with an `image_url`";
                return Err(ApiError::wrong_value(&at("output"), why));
            }
        }
        Kind::AdditionalTools => match of("tools") {
            None => return Err(ApiError::missing_parameter(&at("tools"))),
            Some(tools) => check_tools(&at("tools"), tools)?,
        },
        Kind::Reasoning
        | Kind::McpCall
        | Kind::CodeInterpreterCall
        | Kind::FileSearchCall
        | Kind::Hidden
        | Kind::CompactionTrigger
        | Kind::Reference => {}
    }
    let mut out = Vec::with_capacity(128);
    out.extend_from_slice(br#"{"id":"#);
    put_text(&mut out, id);
    put_string(&mut out, "type", item.name);
    let status = of("status").unwrap_or("\"completed\"");
    if item.kind != Kind::Reasoning || of("status").is_some() {
        put(&mut out, "status", status);
    }
    for (name, value) in item.members.iter() {
        let value = match (name, &output) {
            ("output", Some(completed)) => completed,
            _ => value,
        };
        if !matches!(name, "id" | "type" | "status") && value != "null" {
            put_read(&mut out, name, value);
        }
    }
    let required = match item.name {
        "reasoning" => "summary",
        "computer_call" => "pending_safety_checks",
        _ => "",
    };
    if !required.is_empty() && of(required).is_none() {
        put(&mut out, required, "[]");
    }
    out.push(b'}');
    Ok(into_string(out))
}

fn check_call_id(raw: &str, at: &dyn Fn(&str) -> String) -> Result<(), ApiError> {
    let id = members::text(raw).unwrap_or_default();
    if id.is_empty() || id.chars().count() > CALL_ID_LENGTH_MAX {
        let why = format!("it must have 1 to {CALL_ID_LENGTH_MAX} characters");
        return Err(ApiError::wrong_value(&at("call_id"), why));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
