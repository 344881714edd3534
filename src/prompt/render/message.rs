//! Converts the messages of a conversation as vLLM does before it calls the template: contents as one text or as a list
//! of parts, arguments of tool calls as objects, and only known keys.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::chat_message::{Message, PlainContent, PlainMessage};
use super::exact_integers;
use super::types::{TokenizeError, refused};
use crate::prompt::template::ContentFormat;
use crate::prompt::types::BILLING_HEADER;

/// Types of text parts, each with the key of its text.
const TEXT_PARTS: &[(&str, &str)] = &[
    ("text", "text"),
    ("input_text", "text"),
    ("output_text", "text"),
    ("refusal", "refusal"),
    ("thinking", "thinking"),
];
/// Types of media parts, each with the type that templates see.
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
/// Keys of parts that vLLM interprets itself. Templates see the other keys unchanged.
const INTERPRETED_KEYS: &[&str] = &[
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
/// Stands for an image, sound or video in a rendered text. A prompt is rendered with both: the texts are equal up to
/// the first media part, and that prefix does not depend on what the engine inserts there.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Placeholder {
    Media,
    Text,
}

impl Placeholder {
    fn text(self) -> &'static str {
        match self {
            Placeholder::Media => "\u{1}media",
            Placeholder::Text => "\u{2}media",
        }
    }
}

/// Whether any message has an image, a sound or a video.
pub(super) fn contain_media(messages: &[Message<'_>]) -> bool {
    let is_media = |part: &Value| {
        let kind = part.get("type").and_then(Value::as_str);
        kind.is_some_and(|kind| MEDIA_PARTS.iter().any(|(name, _)| *name == kind))
    };
    messages.iter().any(|message| match message {
        Message::Plain(_) => false,
        Message::Object(message) => match message.get("content") {
            Some(Value::Array(parts)) => parts.iter().any(is_media),
            _ => false,
        },
    })
}

/// The messages as the template gets them. Texts may be long, so they are moved instead of copied.
pub(super) fn to_template_messages<'a>(
    messages: Vec<Message<'a>>,
    format: ContentFormat,
    placeholder: Placeholder,
) -> Result<Vec<Message<'a>>, TokenizeError> {
    let convert = |message| match message {
        Message::Plain(message) if message.role != "developer" => {
            Ok(convert_plain(message, format))
        }
        message => convert(message.into_object(), format, placeholder).map(Message::Object),
    };
    messages.into_iter().map(convert).collect()
}

/// Does what `convert` does, for a message without other keys. It is not the developer's, which gets one more key.
fn convert_plain(message: PlainMessage<'_>, format: ContentFormat) -> Message<'_> {
    let PlainMessage { role, content } = message;
    let text = without_billing_header(&role, content.into_text());
    let content = if format == ContentFormat::Openai && role != "tool" {
        PlainContent::List(text)
    } else {
        PlainContent::Text(text.unwrap_or_default())
    };
    Message::Plain(PlainMessage { role, content })
}

fn convert(
    mut message: Map<String, Value>,
    format: ContentFormat,
    placeholder: Placeholder,
) -> Result<Map<String, Value>, TokenizeError> {
    let content = message.swap_remove("content");
    let role = match message.swap_remove("role") {
        Some(Value::String(role)) => role,
        _ => return Err(refused("a message without a role")),
    };
    let parts = parts(&role, content)?;
    let mut converted = Map::with_capacity(4);
    // A tool's result is one text for every template, unless the result refers to tools.
    let is_list = format == ContentFormat::Openai
        && (role != "tool" || parts.iter().any(|part| !matches!(part, Part::Text(..))));
    let content = if is_list {
        Value::Array(
            parts
                .into_iter()
                .map(|part| part.into_list_item(placeholder))
                .collect(),
        )
    } else {
        Value::String(joined(parts, placeholder))
    };
    let (is_assistant, is_tool, is_developer) =
        (role == "assistant", role == "tool", role == "developer");
    converted.insert("role".to_owned(), Value::String(role));
    converted.insert("content".to_owned(), content);
    if is_assistant {
        convert_calls_and_reasoning(&mut message, &mut converted)?;
    }
    if is_tool && let Some(id) = message.swap_remove("tool_call_id") {
        converted.insert("tool_call_id".to_owned(), id);
    }
    for key in ["name", "task"] {
        if let Some(text @ Value::String(_)) = message.swap_remove(key) {
            converted.insert(key.to_owned(), text);
        }
    }
    if is_developer {
        let tools = message.swap_remove("tools").unwrap_or(Value::Null);
        converted.insert("tools".to_owned(), tools);
    }
    Ok(converted)
}

enum Part {
    /// A text and the other keys of the part.
    Text(String, Map<String, Value>),
    /// The name of a tool.
    ToolReference(String),
    /// The type that templates see, and the keys of the part.
    Media(&'static str, Map<String, Value>),
}

impl Part {
    fn into_list_item(self, placeholder: Placeholder) -> Value {
        let mut item = Map::new();
        let mut put = |key: &str, text: String| item.insert(key.to_owned(), text.into());
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
            Part::Media(..) if placeholder == Placeholder::Text => {
                put("type", "text".to_owned());
                put("text", placeholder.text().to_owned());
                Map::new()
            }
            Part::Media(modality, keys) => {
                put("type", modality.to_owned());
                keys
            }
        };
        for (key, value) in keys {
            if INTERPRETED_KEYS.binary_search(&key.as_str()).is_err() {
                item.insert(key, value);
            }
        }
        Value::Object(item)
    }
}

/// Joins parts into one text. The engine puts the placeholders of media before all texts of a message.
fn joined(mut parts: Vec<Part>, placeholder: Placeholder) -> String {
    if let [Part::Text(text, _)] = parts.as_mut_slice() {
        return std::mem::take(text);
    }
    let media = parts.iter().filter_map(|part| match part {
        Part::Media(..) => Some(placeholder.text()),
        _ => None,
    });
    let texts = parts.iter().filter_map(|part| match part {
        Part::Text(text, _) | Part::ToolReference(text) => Some(text.as_str()),
        Part::Media(..) => None,
    });
    media.chain(texts).collect::<Vec<_>>().join("\n")
}

fn parts(role: &str, content: Option<Value>) -> Result<Vec<Part>, TokenizeError> {
    match content {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::String(text)) => {
            let text = without_billing_header(role, text.into());
            let part = text.map(|text| Part::Text(text.into_owned(), Map::new()));
            Ok(part.into_iter().collect())
        }
        Some(Value::Array(items)) => {
            let parts = items.into_iter().map(|item| part(role, item));
            parts.filter_map(Result::transpose).collect()
        }
        Some(_) => Err(refused("a content of another type")),
    }
}

fn part(role: &str, item: Value) -> Result<Option<Part>, TokenizeError> {
    let mut item = match item {
        Value::String(text) => {
            let text = without_billing_header(role, text.into());
            return Ok(text.map(|text| Part::Text(text.into_owned(), Map::new())));
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
    // The key keeps its position, because templates see the remaining keys in order.
    let text = match item.get_mut(*key) {
        Some(Value::String(text)) if !has_uuid => std::mem::take(text),
        _ => return Err(refused("a content part without its text")),
    };
    let text = if is_plain {
        without_billing_header(role, text.into())
    } else {
        Some(text.into())
    };
    Ok(text.map(|text| Part::Text(text.into_owned(), item)))
}

/// Removes the billing line. `None` if nothing remains.
fn without_billing_header<'a>(role: &str, text: Cow<'a, str>) -> Option<Cow<'a, str>> {
    if role != "system" || !text.starts_with(BILLING_HEADER) {
        return Some(text);
    }
    text.split_once('\n')
        .map(|(_, rest)| rest.to_owned())
        .filter(|rest| !rest.is_empty())
        .map(Cow::Owned)
}

fn convert_calls_and_reasoning(
    message: &mut Map<String, Value>,
    converted: &mut Map<String, Value>,
) -> Result<(), TokenizeError> {
    match message.swap_remove("tool_calls") {
        None | Some(Value::Null) => {}
        Some(Value::Array(calls)) if calls.is_empty() => {}
        Some(Value::Array(calls)) => {
            let calls = calls
                .into_iter()
                .map(convert_call)
                .collect::<Result<_, _>>()?;
            converted.insert("tool_calls".to_owned(), Value::Array(calls));
        }
        Some(_) => return Err(refused("tool_calls of another type")),
    }
    if let Some(reasoning) = message
        .swap_remove("reasoning")
        .filter(|reasoning| !reasoning.is_null())
    {
        converted.insert("reasoning".to_owned(), reasoning.clone());
        converted.insert("reasoning_content".to_owned(), reasoning);
    }
    Ok(())
}

/// Parses the arguments of a call. Engines replace arguments that are not a JSON object with an empty one, so that one
/// invalid call does not break the conversation.
fn convert_call(mut call: Value) -> Result<Value, TokenizeError> {
    let function = call
        .as_object_mut()
        .filter(|call| call.get("type").is_none_or(|kind| kind == "function"))
        .and_then(|call| call.get_mut("function"))
        .and_then(Value::as_object_mut)
        .ok_or_else(|| refused("a tool call that is not of a function"))?;
    let arguments = match function.get_mut("arguments").map(Value::take) {
        Some(Value::Object(arguments)) => arguments,
        Some(Value::String(text)) => {
            match serde_json::from_slice(&exact_integers::marked(text.as_bytes())) {
                Ok(Value::Object(arguments)) => arguments,
                _ => Map::new(),
            }
        }
        _ => Map::new(),
    };
    function.insert("arguments".to_owned(), Value::Object(arguments));
    Ok(call)
}

/// For templates without the developer role: developer messages become system messages, and all system messages are
/// merged into one at the start.
pub(super) fn developer_to_system(messages: Vec<Message<'_>>) -> Vec<Message<'_>> {
    if !messages.iter().any(|message| message.has_role("developer")) {
        return messages;
    }
    let messages: Vec<_> = messages
        .into_iter()
        .map(|message| {
            if message.has_role("developer") {
                let mut message = message.into_object();
                message.insert("role".to_owned(), "system".into());
                message.shift_remove("tools");
                Message::from(message)
            } else {
                message
            }
        })
        .collect();
    let is_merged = messages
        .iter()
        .skip(1)
        .all(|message| !message.has_role("system"));
    if is_merged {
        return messages;
    }
    let (system, others): (Vec<_>, Vec<_>) = messages
        .into_iter()
        .partition(|message| message.has_role("system"));
    let texts = system.into_iter().map(|message| match message {
        Message::Plain(message) => message.content.into_text(),
        Message::Object(message) => match &message["content"] {
            Value::String(text) => text.clone().into(),
            Value::Array(parts) => {
                let texts: Vec<&str> = parts
                    .iter()
                    .filter_map(|part| part["text"].as_str())
                    .collect();
                texts.join("\n").into()
            }
            _ => Cow::default(),
        },
    });
    let texts: Vec<_> = texts.filter(|text| !text.is_empty()).collect();
    let merged = Message::Plain(PlainMessage {
        role: "system".into(),
        content: PlainContent::Text(texts.join("\n\n").into()),
    });
    std::iter::once(merged).chain(others).collect()
}
