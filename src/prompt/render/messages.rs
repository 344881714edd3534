//! Converts the body of a Messages request into that of a chat completion, as vLLM does before it calls the chat template.
//! Only what the prompt depends on is converted; images lose their data, because only their places matter.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::types::{TokenizeError, refused};
use crate::prompt::types::BILLING_HEADER;

/// What the conversion depends on besides the body: what an engine finds out about its chat template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TemplateFacts {
    /// The template accepts a system message at the start only, so that those within the conversation move there.
    pub(crate) has_system_first: bool,
    /// The reasoning effort for thinking that is disabled.
    pub(crate) effort_without_thinking: &'static str,
}

impl TemplateFacts {
    /// Of a template that accepts everything.
    pub(crate) const ANY: Self = Self {
        has_system_first: false,
        effort_without_thinking: "none",
    };
}

#[derive(Deserialize)]
struct Body {
    messages: Vec<Message>,
    system: Option<Content>,
    tools: Option<Vec<Tool>>,
    tool_choice: Option<Named>,
    thinking: Option<Named>,
    output_config: Option<OutputConfig>,
    chat_template_kwargs: Option<Map<String, Value>>,
}

#[derive(Deserialize)]
struct Message {
    role: String,
    content: Content,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Blocks(Vec<Block>),
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Block {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
    source: Option<Value>,
    id: Option<String>,
    tool_use_id: Option<String>,
    name: Option<String>,
    input: Option<Map<String, Value>>,
    content: Option<Value>,
    thinking: Option<String>,
}

#[derive(Deserialize)]
struct Tool {
    name: String,
    description: Option<String>,
    input_schema: Map<String, Value>,
    strict: Option<bool>,
    defer_loading: Option<bool>,
}

#[derive(Deserialize)]
struct Named {
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Deserialize)]
struct OutputConfig {
    effort: Option<String>,
}

/// Whether [`to_chat`] needs the facts of the engine's template for this body.
pub(crate) fn needs_facts(body: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Roles {
        messages: Vec<Role>,
        thinking: Option<Named>,
    }
    #[derive(Deserialize)]
    struct Role {
        role: String,
    }
    let Ok(body) = serde_json::from_slice::<Roles>(body) else {
        return true;
    };
    body.messages.iter().any(|message| message.role == "system")
        || body
            .thinking
            .is_some_and(|thinking| thinking.kind == "disabled")
}

pub(crate) fn to_chat(body: &[u8], facts: TemplateFacts) -> Result<Value, TokenizeError> {
    let body: Body = serde_json::from_slice(body)?;
    let merges = facts.has_system_first;
    let mut system = body.system.map(system_texts).unwrap_or_default();
    let mut messages = Vec::with_capacity(body.messages.len() + 1);
    for message in body.messages {
        if message.role != "system" {
            append(&mut messages, message)?;
            continue;
        }
        let texts = system_texts(message.content);
        match merges {
            true => system.push(texts.concat()),
            false if texts.concat().is_empty() => {}
            false => messages.push(json!({"role": "system", "content": texts.concat()})),
        }
    }
    system.retain(|text| !text.is_empty());
    if !system.is_empty() {
        messages.insert(0, json!({"role": "system", "content": system.concat()}));
    }
    let mut chat = Map::with_capacity(6);
    chat.insert("messages".to_owned(), messages.into());
    if let Some(tools) = body.tools {
        let tools: Vec<Value> = tools.into_iter().map(tool).collect();
        chat.insert("tools".to_owned(), tools.into());
    }
    // Other choices do not change the prompt.
    if body.tool_choice.is_some_and(|choice| choice.kind == "none") {
        chat.insert("tool_choice".to_owned(), "none".into());
    }
    let effort = match body.thinking {
        Some(thinking) if thinking.kind == "disabled" => {
            Some(facts.effort_without_thinking.to_owned())
        }
        _ => body.output_config.and_then(|config| config.effort),
    };
    if let Some(effort) = effort {
        chat.insert("reasoning_effort".to_owned(), effort.into());
    }
    if let Some(kwargs) = body.chat_template_kwargs {
        chat.insert("chat_template_kwargs".to_owned(), kwargs.into());
    }
    Ok(chat.into())
}

/// The texts of a system prompt without billing headers.
fn system_texts(content: Content) -> Vec<String> {
    let mut texts = match content {
        Content::Text(text) => return vec![text],
        Content::Blocks(blocks) => blocks,
    };
    texts.retain(|block| block.kind == "text");
    let texts = texts.into_iter().filter_map(|block| block.text);
    texts
        .filter(|text| !text.starts_with(BILLING_HEADER))
        .collect()
}

/// A turn of the user or of the assistant, with the results of tools before it.
fn append(messages: &mut Vec<Value>, message: Message) -> Result<(), TokenizeError> {
    let is_user = match message.role.as_str() {
        "user" => true,
        "assistant" => false,
        _ => return Err(refused("a message of another role")),
    };
    let blocks = match message.content {
        Content::Text(text) => {
            messages.push(json!({"role": message.role, "content": text}));
            return Ok(());
        }
        Content::Blocks(blocks) => blocks,
    };
    let mut parts: Vec<Value> = Vec::with_capacity(blocks.len());
    let mut calls: Vec<Value> = Vec::new();
    let mut reasoning: Option<String> = None;
    for block in blocks {
        match block.kind.as_str() {
            "text" => {
                if let Some(text) = block.text.filter(|text| !text.is_empty()) {
                    parts.push(json!({"type": "text", "text": text}));
                }
            }
            "image" => {
                if block.source.is_some() {
                    parts.push(image());
                }
            }
            "thinking" => {
                if let Some(text) = block.thinking {
                    reasoning.get_or_insert_default().push_str(&text);
                }
            }
            "tool_use" => calls.push(json!({
                "id": block.id.unwrap_or_default(),
                "type": "function",
                "function": {
                    "name": block.name.unwrap_or_default(),
                    "arguments": block.input.unwrap_or_default(),
                },
            })),
            "tool_result" if is_user => tool_result(messages, block),
            "tool_result" => match block.content {
                None => parts.push(json!({"type": "text", "text": "Tool result: "})),
                Some(Value::String(text)) => {
                    parts.push(json!({"type": "text", "text": format!("Tool result: {text}")}));
                }
                // Engines print a list as their language does.
                Some(_) => return Err(TokenizeError::Field("tool_result")),
            },
            "redacted_thinking" | "tool_reference" => {}
            "tool_addition" | "tool_removal" => return Err(TokenizeError::Field("tools")),
            _ => return Err(refused("a content block of an unknown type")),
        }
    }
    if is_user && parts.is_empty() {
        return Ok(());
    }
    let mut turn = Map::with_capacity(4);
    turn.insert("role".to_owned(), message.role.into());
    if let Some(reasoning) = reasoning {
        turn.insert("reasoning".to_owned(), reasoning.into());
    }
    if !calls.is_empty() {
        turn.insert("tool_calls".to_owned(), calls.into());
    }
    if let [Value::Object(part)] = parts.as_mut_slice()
        && let Some(text) = part.get_mut("text")
    {
        turn.insert("content".to_owned(), text.take());
    } else if !parts.is_empty() {
        turn.insert("content".to_owned(), parts.into());
    }
    messages.push(turn.into());
    Ok(())
}

/// The result of a tool is a message of its own; its images are a user's message after it.
fn tool_result(messages: &mut Vec<Value>, block: Block) {
    let id = block.tool_use_id.unwrap_or_default();
    let mut texts: Vec<String> = Vec::new();
    let mut images: Vec<Value> = Vec::new();
    let mut references: Vec<Value> = Vec::new();
    match block.content {
        Some(Value::String(text)) => texts.push(text),
        Some(Value::Array(items)) => {
            for item in &items {
                let text = |key: &str| item.get(key).and_then(Value::as_str);
                match text("type") {
                    Some("text") => texts.push(text("text").unwrap_or_default().to_owned()),
                    Some("image") => images.push(image()),
                    Some("tool_reference") => {
                        let names = [text("tool_name"), text("name")];
                        let mut names = names.into_iter().flatten().filter(|name| !name.is_empty());
                        if let Some(name) = names.next() {
                            references.push(json!({"type": "tool_reference", "name": name}));
                        }
                    }
                    _ => {}
                }
            }
        }
        _ => {}
    }
    messages.push(json!({"role": "tool", "tool_call_id": id, "content": texts.join("\n")}));
    if !images.is_empty() {
        messages.push(json!({"role": "user", "content": images}));
    }
    if !references.is_empty() {
        messages.push(json!({"role": "tool", "tool_call_id": id, "content": references}));
    }
}

fn image() -> Value {
    json!({"type": "image_url", "image_url": {"url": ""}})
}

fn tool(tool: Tool) -> Value {
    let mut parameters = tool.input_schema;
    if !parameters.contains_key("type") {
        parameters.insert("type".to_owned(), "object".into());
    }
    json!({"type": "function", "function": {
        "name": tool.name,
        "description": tool.description,
        "parameters": parameters,
        "strict": tool.strict,
        "defer_loading": tool.defer_loading,
    }})
}

#[cfg(test)]
mod tests;
