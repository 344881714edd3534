//! The messages of a conversation, as vLLM passes them to a template: contents as one text or as parts, call
//! arguments as objects, and only known keys.

use serde_json::{Map, Value};

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

/// Whether some message has a picture, a sound or a film among its parts.
pub(super) fn have_media(messages: &[Map<String, Value>]) -> bool {
    let is_media = |part: &Value| {
        let kind = part.get("type").and_then(Value::as_str);
        kind.is_some_and(|kind| MEDIA_PARTS.iter().any(|(name, _)| *name == kind))
    };
    messages.iter().any(|message| match message.get("content") {
        Some(Value::Array(parts)) => parts.iter().any(is_media),
        _ => false,
    })
}

/// The messages as a template is given them. Their texts are moved, not copied: they may be long.
pub(super) fn converted(
    messages: Vec<Map<String, Value>>,
    format: ContentFormat,
    stand_in: StandIn,
) -> Result<Vec<Map<String, Value>>, Unknown> {
    messages
        .into_iter()
        .map(|message| convert(message, format, stand_in))
        .collect()
}

fn convert(
    mut message: Map<String, Value>,
    format: ContentFormat,
    stand_in: StandIn,
) -> Result<Map<String, Value>, Unknown> {
    let content = message.swap_remove("content");
    let role = match message.swap_remove("role") {
        Some(Value::String(role)) => role,
        _ => return Err(refused("a message without a role")),
    };
    let parts = parts(&role, content)?;
    let mut given = Map::with_capacity(4);
    // A tool's answer is one text for every template, unless it refers to tools.
    let is_listed = format == ContentFormat::Openai
        && (role != "tool" || parts.iter().any(|part| !matches!(part, Part::Text(..))));
    let content = match is_listed {
        true => Value::Array(parts.into_iter().map(|it| it.listed(stand_in)).collect()),
        false => Value::String(joined(parts, stand_in)),
    };
    let (is_assistant, is_tool, is_developer) =
        (role == "assistant", role == "tool", role == "developer");
    given.insert("role".to_owned(), Value::String(role));
    given.insert("content".to_owned(), content);
    if is_assistant {
        calls_and_reasoning(&mut message, &mut given)?;
    }
    if is_tool && let Some(id) = message.swap_remove("tool_call_id") {
        given.insert("tool_call_id".to_owned(), id);
    }
    for key in ["name", "task"] {
        if let Some(text @ Value::String(_)) = message.swap_remove(key) {
            given.insert(key.to_owned(), text);
        }
    }
    if is_developer {
        let tools = message.swap_remove("tools").unwrap_or(Value::Null);
        given.insert("tools".to_owned(), tools);
    }
    Ok(given)
}

/// One part of a content.
enum Part {
    /// A text, and the part's own keys beside it.
    Text(String, Map<String, Value>),
    /// A tool to be looked up by its name.
    ToolReference(String),
    Media(&'static str, Map<String, Value>),
}

impl Part {
    fn listed(self, stand_in: StandIn) -> Value {
        let mut listed = Map::new();
        let mut put = |key: &str, text: String| listed.insert(key.to_owned(), text.into());
        let keys = match self {
            Part::Text(text, keys) => {
                put("type", "text".to_owned());
                put("text", text);
                keys
            }
            Part::ToolReference(name) => {
                put("type", "tool_reference".to_owned());
                put("name", name);
                Map::new()
            }
            Part::Media(..) if stand_in == StandIn::Text => {
                put("type", "text".to_owned());
                put("text", stand_in.text().to_owned());
                Map::new()
            }
            Part::Media(modality, keys) => {
                put("type", modality.to_owned());
                keys
            }
        };
        for (key, value) in keys {
            if KNOWN_KEYS.binary_search(&key.as_str()).is_err() {
                listed.insert(key, value);
            }
        }
        Value::Object(listed)
    }
}

/// The engine puts what stands for media before all texts of a message.
fn joined(mut parts: Vec<Part>, stand_in: StandIn) -> String {
    if let [Part::Text(text, _)] = parts.as_mut_slice() {
        return std::mem::take(text);
    }
    let media = parts.iter().filter_map(|part| match part {
        Part::Media(..) => Some(stand_in.text()),
        _ => None,
    });
    let texts = parts.iter().filter_map(|part| match part {
        Part::Text(text, _) | Part::ToolReference(text) => Some(text.as_str()),
        Part::Media(..) => None,
    });
    media.chain(texts).collect::<Vec<_>>().join("\n")
}

fn parts(role: &str, content: Option<Value>) -> Result<Vec<Part>, Unknown> {
    match content {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::String(text)) => {
            let text = without_billing(role, text);
            let part = text.map(|text| Part::Text(text, Map::new()));
            Ok(part.into_iter().collect())
        }
        Some(Value::Array(items)) => {
            let parts = items.into_iter().map(|item| part(role, item));
            parts.filter_map(Result::transpose).collect()
        }
        Some(_) => Err(refused("a content of another type")),
    }
}

fn part(role: &str, item: Value) -> Result<Option<Part>, Unknown> {
    let mut item = match item {
        Value::String(text) => {
            let text = without_billing(role, text);
            return Ok(text.map(|text| Part::Text(text, Map::new())));
        }
        Value::Object(item) => item,
        _ => return Err(refused("a content part of another type")),
    };
    let kind = item
        .get("type")
        .and_then(Value::as_str)
        .ok_or_else(|| refused("a content part without a type"))?;
    if let Some((_, modality)) = MEDIA_PARTS.iter().find(|(name, _)| *name == kind) {
        return Ok(Some(Part::Media(modality, item)));
    }
    if kind == "tool_reference" {
        return match item.swap_remove("name") {
            Some(Value::String(name)) => Ok(Some(Part::ToolReference(name))),
            _ => Err(refused("a tool reference without a name")),
        };
    }
    let (_, key) = TEXT_PARTS
        .iter()
        .find(|(name, _)| *name == kind)
        .ok_or_else(|| refused("a content part of an unknown type"))?;
    let is_plain = kind == "text";
    let has_uuid = item.get("uuid").is_some_and(|uuid| !uuid.is_null());
    // Its place is kept, for those keys that are shown are shown in order.
    let text = match item.get_mut(*key) {
        Some(Value::String(text)) if !has_uuid => std::mem::take(text),
        _ => return Err(refused("a content part without its text")),
    };
    let text = match is_plain {
        true => without_billing(role, text),
        false => Some(text),
    };
    Ok(text.map(|text| Part::Text(text, item)))
}

/// Nothing, where the whole text is that line.
fn without_billing(role: &str, text: String) -> Option<String> {
    if role != "system" || !text.starts_with(BILLING_HEADER) {
        return Some(text);
    }
    text.split_once('\n')
        .map(|(_, rest)| rest.to_owned())
        .filter(|rest| !rest.is_empty())
}

fn calls_and_reasoning(
    message: &mut Map<String, Value>,
    given: &mut Map<String, Value>,
) -> Result<(), Unknown> {
    match message.swap_remove("tool_calls") {
        None | Some(Value::Null) => {}
        Some(Value::Array(calls)) if calls.is_empty() => {}
        Some(Value::Array(calls)) => {
            let calls = calls.into_iter().map(call).collect::<Result<_, _>>()?;
            given.insert("tool_calls".to_owned(), Value::Array(calls));
        }
        Some(_) => return Err(refused("tool_calls of another type")),
    }
    if let Some(reasoning) = message.swap_remove("reasoning").filter(|it| !it.is_null()) {
        given.insert("reasoning".to_owned(), reasoning.clone());
        given.insert("reasoning_content".to_owned(), reasoning);
    }
    Ok(())
}

/// A call whose arguments are an object, also where they are no JSON, or none of an object: the
/// engine does not let one bad call spoil a conversation.
fn call(mut call: Value) -> Result<Value, Unknown> {
    let function = call
        .as_object_mut()
        .filter(|call| call.get("type").is_none_or(|kind| kind == "function"))
        .and_then(|call| call.get_mut("function"))
        .and_then(Value::as_object_mut)
        .ok_or_else(|| refused("a tool call that is not of a function"))?;
    let arguments = match function.get_mut("arguments").map(Value::take) {
        Some(Value::Object(arguments)) => arguments,
        Some(Value::String(text)) => match serde_json::from_str(&text) {
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
