//! A conversation's messages as vLLM hands them to a template: contents as one text or as parts, call
//! arguments as objects, only the keys that it knows.

use serde_json::Map;
use serde_json::Value;

use super::Unknown;
use crate::prompt::template::ContentFormat;

/// Kinds of parts that are text, and the key that has it.
const TEXT_PARTS: &[(&str, &str)] = &[
    ("text", "text"),
    ("input_text", "text"),
    ("output_text", "text"),
    ("refusal", "refusal"),
    ("thinking", "thinking"),
];
/// Kinds of parts that become an image, a sound or a film, and what a template knows them as.
const MEDIA_PARTS: &[(&str, &str)] = &[
    ("image_url", "image"),
    ("input_image", "image"),
    ("image_embeds", "image"),
    ("audio_url", "audio"),
    ("input_audio", "audio"),
    ("audio_embeds", "audio"),
    ("video_url", "video"),
    ("video_embeds", "video"),
];
/// Keys of parts that have a meaning, so that a template is not shown them beside it.
const KNOWN_KEYS: &[&str] = &[
    "audio_embeds",
    "audio_url",
    "closed",
    "data",
    "file",
    "image_embeds",
    "image_pil",
    "image_url",
    "input_audio",
    "name",
    "prompt_cache_breakpoint",
    "refusal",
    "text",
    "thinking",
    "type",
    "uuid",
    "video_embeds",
    "video_url",
];
/// A line that some clients put first into the system prompt and change with every request. The
/// engine drops it, or no two requests would share a start.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

pub(super) struct Conversation {
    pub(super) messages: Vec<Map<String, Value>>,
    pub(super) has_media: bool,
}

/// What is put where a picture, a sound or a film would be. The renderings of both differ from the
/// first of them on, at the latest, whatever the engine puts there.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum StandIn {
    Media,
    Text,
}

impl StandIn {
    fn text(self) -> &'static str {
        match self {
            StandIn::Media => "\u{1}media",
            StandIn::Text => "\u{2}media",
        }
    }
}

impl Conversation {
    pub(super) fn new(
        messages: &[Map<String, Value>],
        format: ContentFormat,
        stand_in: StandIn,
    ) -> Result<Self, Unknown> {
        let mut has_media = false;
        let mut given = Vec::with_capacity(messages.len());
        for message in messages {
            given.push(convert(message, format, stand_in, &mut has_media)?);
        }
        Ok(Self {
            messages: given,
            has_media,
        })
    }
}

fn convert(
    message: &Map<String, Value>,
    format: ContentFormat,
    stand_in: StandIn,
    has_media: &mut bool,
) -> Result<Map<String, Value>, Unknown> {
    let role = message
        .get("role")
        .and_then(Value::as_str)
        .ok_or_else(|| refused("a message without a role"))?;
    let parts = parts(role, message.get("content"))?;
    *has_media |= parts.iter().any(|part| matches!(part, Part::Media(..)));
    let mut given = Map::with_capacity(4);
    given.insert("role".to_owned(), role.into());
    // A tool's answer is one text for every template, unless it refers to tools.
    let is_listed = format == ContentFormat::Openai
        && (role != "tool" || parts.iter().any(|part| !matches!(part, Part::Text(..))));
    let content = match is_listed {
        true => Value::Array(parts.iter().map(|part| part.listed(stand_in)).collect()),
        false => Value::String(joined(&parts, stand_in)),
    };
    given.insert("content".to_owned(), content);
    if role == "assistant" {
        calls_and_reasoning(message, &mut given)?;
    }
    if role == "tool"
        && let Some(id) = message.get("tool_call_id")
    {
        given.insert("tool_call_id".to_owned(), id.clone());
    }
    for key in ["name", "task"] {
        if let Some(Value::String(text)) = message.get(key) {
            given.insert(key.to_owned(), text.as_str().into());
        }
    }
    if role == "developer" {
        let tools = message.get("tools").cloned().unwrap_or(Value::Null);
        given.insert("tools".to_owned(), tools);
    }
    Ok(given)
}

/// One part of a content.
enum Part<'v> {
    /// A text, and the part's own keys beside it.
    Text(&'v str, Option<&'v Map<String, Value>>),
    /// A tool to be looked up by its name.
    ToolReference(&'v str),
    Media(&'static str, &'v Map<String, Value>),
}

impl Part<'_> {
    fn listed(&self, stand_in: StandIn) -> Value {
        let mut listed = Map::new();
        let mut put = |key: &str, text: &str| listed.insert(key.to_owned(), text.into());
        let keys = match self {
            Part::Text(text, keys) => {
                put("type", "text");
                put("text", text);
                *keys
            }
            Part::ToolReference(name) => {
                put("type", "tool_reference");
                put("name", name);
                None
            }
            Part::Media(..) if stand_in == StandIn::Text => {
                put("type", "text");
                put("text", stand_in.text());
                None
            }
            Part::Media(modality, keys) => {
                put("type", modality);
                Some(*keys)
            }
        };
        for (key, value) in keys.into_iter().flatten() {
            if KNOWN_KEYS.binary_search(&key.as_str()).is_err() {
                listed.insert(key.clone(), value.clone());
            }
        }
        Value::Object(listed)
    }
}

/// The engine puts what stands for media before all texts of a message.
fn joined(parts: &[Part<'_>], stand_in: StandIn) -> String {
    let media = parts.iter().filter_map(|part| match part {
        Part::Media(..) => Some(stand_in.text()),
        _ => None,
    });
    let texts = parts.iter().filter_map(|part| match part {
        Part::Text(text, _) | Part::ToolReference(text) => Some(*text),
        Part::Media(..) => None,
    });
    media.chain(texts).collect::<Vec<_>>().join("\n")
}

fn parts<'v>(role: &str, content: Option<&'v Value>) -> Result<Vec<Part<'v>>, Unknown> {
    let mut parts = Vec::new();
    match content {
        None | Some(Value::Null) => {}
        Some(Value::String(text)) => {
            parts.extend(without_billing(role, text).map(|text| Part::Text(text, None)));
        }
        Some(Value::Array(items)) => {
            for item in items {
                parts.extend(part(role, item)?);
            }
        }
        Some(_) => return Err(refused("a content of another type")),
    }
    Ok(parts)
}

fn part<'v>(role: &str, item: &'v Value) -> Result<Option<Part<'v>>, Unknown> {
    let item = match item {
        Value::String(text) => {
            return Ok(without_billing(role, text).map(|text| Part::Text(text, None)));
        }
        Value::Object(item) => item,
        _ => return Err(refused("a content part of another type")),
    };
    let kind = item
        .get("type")
        .and_then(Value::as_str)
        .ok_or_else(|| refused("a content part without a type"))?;
    let of = |key: &str| item.get(key).and_then(Value::as_str);
    if let Some((_, modality)) = MEDIA_PARTS.iter().find(|(name, _)| *name == kind) {
        return Ok(Some(Part::Media(modality, item)));
    }
    if kind == "tool_reference" {
        let name = of("name").ok_or_else(|| refused("a tool reference without a name"))?;
        return Ok(Some(Part::ToolReference(name)));
    }
    let (_, key) = TEXT_PARTS
        .iter()
        .find(|(name, _)| *name == kind)
        .ok_or_else(|| refused("a content part of an unknown type"))?;
    let has_uuid = item.get("uuid").is_some_and(|uuid| !uuid.is_null());
    let text = of(key)
        .filter(|_| !has_uuid)
        .ok_or_else(|| refused("a content part without its text"))?;
    let text = match kind {
        "text" => without_billing(role, text),
        _ => Some(text),
    };
    Ok(text.map(|text| Part::Text(text, Some(item))))
}

/// Nothing, where the whole text is that line.
fn without_billing<'v>(role: &str, text: &'v str) -> Option<&'v str> {
    if role != "system" || !text.starts_with(BILLING_HEADER) {
        return Some(text);
    }
    text.split_once('\n')
        .map(|(_, rest)| rest)
        .filter(|rest| !rest.is_empty())
}

fn calls_and_reasoning(
    message: &Map<String, Value>,
    given: &mut Map<String, Value>,
) -> Result<(), Unknown> {
    match message.get("tool_calls") {
        None | Some(Value::Null) => {}
        Some(Value::Array(calls)) if calls.is_empty() => {}
        Some(Value::Array(calls)) => {
            let calls = calls.iter().map(call).collect::<Result<_, _>>()?;
            given.insert("tool_calls".to_owned(), Value::Array(calls));
        }
        Some(_) => return Err(refused("tool_calls of another type")),
    }
    if let Some(reasoning) = message.get("reasoning").filter(|it| !it.is_null()) {
        given.insert("reasoning".to_owned(), reasoning.clone());
        given.insert("reasoning_content".to_owned(), reasoning.clone());
    }
    Ok(())
}

/// A call whose arguments are an object, also where they are no JSON, or none of an object: the
/// engine does not let one bad call spoil a conversation.
fn call(call: &Value) -> Result<Value, Unknown> {
    let mut call = call.clone();
    let function = call
        .as_object_mut()
        .filter(|call| call.get("type").is_none_or(|kind| kind == "function"))
        .and_then(|call| call.get_mut("function"))
        .and_then(Value::as_object_mut)
        .ok_or_else(|| refused("a tool call that is not of a function"))?;
    let arguments = match function.get("arguments") {
        Some(Value::Object(arguments)) => arguments.clone(),
        Some(Value::String(text)) => match serde_json::from_str(text) {
            Ok(Value::Object(arguments)) => arguments,
            _ => Map::new(),
        },
        _ => Map::new(),
    };
    function.insert("arguments".to_owned(), Value::Object(arguments));
    Ok(call)
}

/// For templates that know no developers: their messages, and all of the system, become one of the
/// system, at the start.
pub(super) fn developers_as_system(
    mut messages: Vec<Map<String, Value>>,
) -> Vec<Map<String, Value>> {
    let is = |message: &Map<String, Value>, role: &str| message["role"] == role;
    if !messages.iter().any(|message| is(message, "developer")) {
        return messages;
    }
    for message in &mut messages {
        if is(message, "developer") {
            message.insert("role".to_owned(), "system".into());
            message.shift_remove("tools");
        }
    }
    let is_one_at_the_start = messages
        .iter()
        .skip(1)
        .all(|message| !is(message, "system"));
    if is_one_at_the_start {
        return messages;
    }
    let (system, others): (Vec<_>, Vec<_>) = messages
        .into_iter()
        .partition(|message| is(message, "system"));
    let texts: Vec<String> = system
        .iter()
        .map(|message| match &message["content"] {
            Value::String(text) => text.clone(),
            Value::Array(parts) => {
                let texts: Vec<&str> = parts.iter().filter_map(|it| it["text"].as_str()).collect();
                texts.join("\n")
            }
            _ => String::new(),
        })
        .filter(|text| !text.is_empty())
        .collect();
    let mut merged = Map::with_capacity(2);
    merged.insert("role".to_owned(), "system".into());
    merged.insert("content".to_owned(), texts.join("\n\n").into());
    std::iter::once(merged).chain(others).collect()
}

fn refused(why: &str) -> Unknown {
    Unknown::Refused(why.to_owned())
}
