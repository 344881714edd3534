//! One line of an input file: what it asks for, or what is wrong with it, in OpenAI's codes and words. Pure.
//!
//! A line's body is looked through once for a few members; no tree of it is built, and no byte of it is changed.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::json_scan::Scan;
use crate::observe::shortened;

/// A longer line is an error. Bodies with images have megabytes; a file without line breaks would be held whole.
pub const MAX_LINE_BYTES: u64 = 8 << 20;

/// Bytes of a body for each token of its prompt, about.
pub const BYTES_PER_TOKEN: u64 = 4;

/// Characters of a `custom_id`, which each result line repeats.
const CUSTOM_ID_MAX: usize = 512;

/// Bytes of a model's name, which the record of a batch repeats. Some names are paths of adapters.
const MODEL_MAX: usize = 1_024;

/// The endpoint that all lines of a batch are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LineEndpoint {
    #[default]
    ChatCompletions,
    Completions,
    Responses,
    Embeddings,
    Messages,
}

impl LineEndpoint {
    pub const ALL: [Self; 5] = [
        Self::ChatCompletions,
        Self::Completions,
        Self::Responses,
        Self::Embeddings,
        Self::Messages,
    ];

    pub fn path(self) -> &'static str {
        match self {
            Self::ChatCompletions => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Responses => "/v1/responses",
            Self::Embeddings => "/v1/embeddings",
            Self::Messages => "/v1/messages",
        }
    }

    pub fn of_path(path: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|endpoint| endpoint.path() == path)
    }
}

/// The API that a batch was made with. Its objects and result lines have that API's shape.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Flavor {
    /// OpenAI's Batch API.
    #[default]
    OpenAi,
    /// Anthropic's Message Batches.
    Messages,
}

/// What is wrong with an input file or one of its lines: OpenAI's `BatchError`, member for member.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LineError {
    pub code: String,
    /// The line's number in the file, from 1, blank lines counted. `None` if the whole file is meant.
    pub line: Option<u32>,
    pub message: String,
    pub param: Option<String>,
}

impl LineError {
    pub fn new(code: &str, message: impl Into<String>, param: Option<&str>) -> Self {
        Self {
            code: code.to_owned(),
            line: None,
            message: message.into(),
            param: param.map(str::to_owned),
        }
    }

    #[must_use]
    pub fn at_line(self, line: u32) -> Self {
        Self {
            line: Some(line),
            ..self
        }
    }

    fn missing(name: &str) -> Self {
        let message = format!("Missing required parameter: '{name}'.");
        Self::new("missing_required_parameter", message, Some(name))
    }

    fn wrong_type(name: &str, expected: &str, value: &str) -> Self {
        let found = match value.as_bytes().first() {
            Some(b'{') => "an object",
            Some(b'[') => "an array",
            Some(b'"') => "a string",
            Some(b't' | b'f') => "a boolean",
            _ => "a number",
        };
        let message =
            format!("Invalid type for '{name}': expected {expected}, but got {found} instead.");
        Self::new("invalid_type", message, Some(name))
    }

    fn too_long(name: &str, max: usize, length: usize) -> Self {
        let message = format!(
            "Invalid '{name}': string too long. Expected a string with maximum length {max}, \
             but got a string with length {length} instead."
        );
        Self::new("string_above_max_length", message, Some(name))
    }

    fn empty(name: &str) -> Self {
        let message = format!(
            "Invalid '{name}': empty string. Expected a string with minimum length 1, but got an empty string instead."
        );
        Self::new("empty_string", message, Some(name))
    }
}

/// A line that may be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line<'a> {
    pub custom_id: Cow<'a, str>,
    /// The request body: a part of the line, as it was written.
    pub body: &'a [u8],
    pub model: Cow<'a, str>,
    /// The raw JSON of what stands first in the prompt: tools, instructions, and the messages, prompt or input.
    pub prompt: [&'a str; 3],
    /// The most output tokens that it asks for; 0 if it names no number.
    pub max_output: u64,
    /// The raw JSON of the conversation that a response is added to.
    pub conversation: Option<&'a str>,
}

impl Line<'_> {
    /// About as many as its prompt has, and the output tokens that it names.
    pub fn tokens(&self) -> u64 {
        let bytes: usize = self.prompt.iter().map(|part| part.len()).sum();
        (bytes as u64 / BYTES_PER_TOKEN).saturating_add(self.max_output)
    }

    /// Lines in this order share long prefixes with their neighbours.
    pub fn sort_key(&self) -> (&str, [&str; 3]) {
        (self.model.as_ref(), self.prompt)
    }
}

/// Reads a line without its line break. `endpoint` is the batch's.
pub fn read(line: &[u8], endpoint: LineEndpoint) -> Result<Line<'_>, LineError> {
    let envelope = Envelope::of(line).ok_or_else(|| not_an_object(line))?;
    let custom_id = text(envelope.custom_id, "custom_id")?;
    let length = custom_id.chars().count();
    if length == 0 {
        return Err(LineError::empty("custom_id"));
    }
    if length > CUSTOM_ID_MAX {
        return Err(LineError::too_long("custom_id", CUSTOM_ID_MAX, length));
    }
    let method = text(envelope.method, "method")?;
    if method != "POST" {
        let message = format!(
            "Invalid value: '{}'. Supported values are: 'POST'.",
            shortened(&method)
        );
        return Err(LineError::new("invalid_value", message, Some("method")));
    }
    if text(envelope.url, "url")? != endpoint.path() {
        let message = "The URL provided for this request does not match the batch endpoint.";
        return Err(LineError::new("invalid_url", message, Some("url")));
    }
    let body = given(envelope.body, "body")?;
    let members =
        BodyMembers::of(body).ok_or_else(|| LineError::wrong_type("body", "an object", body))?;
    let model = text(members.model, "body.model")?;
    if model.is_empty() {
        return Err(LineError::empty("body.model"));
    }
    if model.len() > MODEL_MAX {
        return Err(LineError::too_long("body.model", MODEL_MAX, model.len()));
    }
    if is_on(members.stream) {
        return Err(not_in_a_batch("body.stream"));
    }
    if endpoint == LineEndpoint::Responses && is_on(members.background) {
        return Err(not_in_a_batch("body.background"));
    }
    Ok(Line {
        custom_id,
        body: body.as_bytes(),
        model,
        prompt: members.prompt,
        max_output: members
            .max_output
            .and_then(|number| number.parse().ok())
            .unwrap_or(0),
        conversation: members
            .conversation
            .filter(|value| endpoint == LineEndpoint::Responses && *value != "null"),
    })
}

/// The raw JSON of a line's members. Of a repeated member the last counts, as for Python.
#[derive(Default)]
struct Envelope<'a> {
    custom_id: Option<&'a str>,
    method: Option<&'a str>,
    url: Option<&'a str>,
    body: Option<&'a str>,
}

impl<'a> Envelope<'a> {
    fn of(line: &'a [u8]) -> Option<Self> {
        let mut found = Self::default();
        let scan = Scan::<true>::of_bytes(line.trim_ascii())?;
        scan.whole_object(|name, value| match name.as_ref() {
            "custom_id" => found.custom_id = Some(value),
            "method" => found.method = Some(value),
            "url" => found.url = Some(value),
            "body" => found.body = Some(value),
            _ => {}
        })?;
        Some(found)
    }
}

/// The raw JSON of those members of a body that a batch needs. Of a repeated member the last counts.
#[derive(Default)]
struct BodyMembers<'a> {
    model: Option<&'a str>,
    stream: Option<&'a str>,
    background: Option<&'a str>,
    prompt: [&'a str; 3],
    max_output: Option<&'a str>,
    conversation: Option<&'a str>,
}

impl<'a> BodyMembers<'a> {
    fn of(body: &'a str) -> Option<Self> {
        if !body.starts_with('{') {
            return None;
        }
        let mut found = Self::default();
        Scan::<false>::new(body).whole_object(|name, value| match name.as_ref() {
            "model" => found.model = Some(value),
            "stream" => found.stream = Some(value),
            "background" => found.background = Some(value),
            "tools" | "functions" => found.prompt[0] = value,
            "system" | "instructions" => found.prompt[1] = value,
            "messages" | "prompt" | "input" => found.prompt[2] = value,
            "max_tokens" | "max_completion_tokens" | "max_output_tokens" => {
                found.max_output = Some(value);
            }
            "conversation" => found.conversation = Some(value),
            _ => {}
        })?;
        Some(found)
    }
}

/// Engines read `"true"` and 1 as true, so a flag is off only if it is plainly false.
fn is_on(flag: Option<&str>) -> bool {
    flag.is_some_and(|value| !matches!(value, "false" | "null"))
}

fn not_in_a_batch(name: &str) -> LineError {
    let message = format!("Unsupported value: '{name}' must be false or left out in a batch.");
    LineError::new("unsupported_value", message, Some(name))
}

fn not_an_object(line: &[u8]) -> LineError {
    let message = if serde_json::from_slice::<&RawValue>(line).is_ok() {
        "This line is valid JSON, but not an object."
    } else {
        "This line is not parseable as valid JSON."
    };
    LineError::new("invalid_json_line", message, None)
}

/// The raw JSON of a member that must not be missing.
fn given<'a>(value: Option<&'a str>, name: &str) -> Result<&'a str, LineError> {
    value
        .filter(|value| *value != "null")
        .ok_or_else(|| LineError::missing(name))
}

fn text<'a>(value: Option<&'a str>, name: &str) -> Result<Cow<'a, str>, LineError> {
    let value = given(value, name)?;
    if !value.starts_with('"') {
        return Err(LineError::wrong_type(name, "a string", value));
    }
    Scan::<false>::new(value).text().ok_or_else(|| {
        let message =
            format!("Invalid '{name}': the string has an escaped surrogate without its pair.");
        LineError::new("invalid_string", message, Some(name))
    })
}

#[cfg(test)]
mod tests;
