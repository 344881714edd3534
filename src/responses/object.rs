//! The Response object: what its request decides, and what became of it. Pure.
//!
//! It is rebuilt and not passed on, because engines leave members out, fill in their own and tell of
//! each other's business. Every member that clients require is always there.

use std::borrow::Cow;
use std::io::Write as _;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::client_state::StateSigner;
use super::item::{self, Ids};
use super::members::{self, Members, put, put_string, put_text};
use super::request::CreateRequest;
use crate::store::Status;

/// What of a Response does not change while it is made.
#[derive(Clone, Debug)]
pub(super) struct ResponseTemplate {
    /// Unix seconds.
    created_at: u64,
    /// Members up to the sampling parameters.
    head: Vec<u8>,
    temperature: Option<String>,
    top_p: Option<String>,
    /// The other members.
    tail: Vec<u8>,
    pub(super) ids: Ids,
}

/// Who asks for what, beyond the request itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct ResponseMeta<'a> {
    pub(super) id: &'a str,
    /// Unix seconds.
    pub(super) created_at: u64,
    /// The previous response, or the conversation, by its id.
    pub(super) previous: Option<&'a str>,
    pub(super) conversation: Option<&'a str>,
    /// Whether it will be kept, whatever was asked for.
    pub(super) store: bool,
}

/// What became of a response.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Outcome {
    pub(super) status: Status,
    /// Array of items, as they are kept.
    pub(super) output: Vec<u8>,
    /// As they are told, where that is not the same.
    pub(super) told: Option<Vec<u8>>,
    pub(super) usage: Option<Usage>,
    /// Why it is incomplete.
    pub(super) reason: Option<String>,
    pub(super) error: Option<Failure>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Failure {
    pub(super) code: &'static str,
    pub(super) message: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Usage {
    pub(super) input_tokens: u64,
    input_tokens_details: InputDetails,
    pub(super) output_tokens: u64,
    output_tokens_details: OutputDetails,
    total_tokens: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
struct InputDetails {
    cached_tokens: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
struct OutputDetails {
    reasoning_tokens: u64,
}

impl Outcome {
    pub(super) fn failed(code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status: Status::Failed,
            output: b"[]".to_vec(),
            told: None,
            usage: None,
            reason: None,
            error: Some(Failure {
                code,
                message: message.into(),
            }),
        }
    }

    /// How an engine's Response object says that it ended, without its output. `None` where it is none,
    /// or has not ended.
    pub(super) fn of_engine(members: &Members<'_>) -> Option<Self> {
        let status = match Status::parse(&members.text("status")?)? {
            // Whoever runs it did not cancel it.
            Status::Cancelled => Status::Failed,
            Status::Queued | Status::InProgress => return None,
            ended => ended,
        };
        let text_in = |object: &str, name: &str| {
            let object = Members::parse(members.get(object)?).ok()?;
            object.text(name).map(Cow::into_owned)
        };
        let reason =
            || text_in("incomplete_details", "reason").unwrap_or("max_output_tokens".into());
        let message = || text_in("error", "message").unwrap_or("the engine failed".into());
        Some(Self {
            status,
            output: b"[]".to_vec(),
            told: None,
            usage: members
                .get("usage")
                .and_then(|raw| serde_json::from_str(raw).ok()),
            reason: (status == Status::Incomplete).then(reason),
            error: (status == Status::Failed).then(|| Failure {
                code: "server_error",
                message: message(),
            }),
        })
    }

    /// Takes the output of an engine's Response object, and tells how many items it has.
    pub(super) fn read_output(
        &mut self,
        members: &Members<'_>,
        ids: &Ids,
        state_signer: Option<&StateSigner>,
    ) -> Option<usize> {
        let items = members.get("output").and_then(members::list);
        let items = items.unwrap_or_default();
        let mut list = OutputItems::default();
        for (place, raw) in items.iter().enumerate() {
            // Only the last one can have been cut.
            let is_cut = self.status != Status::Completed && place + 1 == items.len();
            let status = if is_cut { "incomplete" } else { "completed" };
            let mut item = Vec::with_capacity(raw.len() + 192);
            let kind = put_item(&mut item, raw, ids, place, status)?;
            let sealed = state_signer.filter(|_| kind == "reasoning");
            let sealed = sealed.and_then(|state_signer| state_signer.reasoning(&item));
            list.push(item, sealed);
        }
        (self.output, self.told) = list.finish();
        Some(items.len())
    }
}

impl Outcome {
    /// The items that a client is told of.
    pub(super) fn told(&self) -> &[u8] {
        self.told.as_deref().unwrap_or(&self.output)
    }
}

/// Output items, as they are kept and as they are told.
#[derive(Clone, Debug, Default)]
pub(super) struct OutputItems {
    items: Vec<(Vec<u8>, Option<Vec<u8>>)>,
}

impl OutputItems {
    pub(super) fn push(&mut self, kept: Vec<u8>, told: Option<Vec<u8>>) {
        self.items.push((kept, told));
    }

    /// Both lists; the second one where it is another.
    pub(super) fn finish(&self) -> (Vec<u8>, Option<Vec<u8>>) {
        let kept = array(self.items.iter().map(|(kept, _)| kept.as_slice()));
        let is_told = self.items.iter().any(|(_, told)| told.is_some());
        let told = |(kept, told): &'_ (Vec<u8>, Option<Vec<u8>>)| -> Vec<u8> {
            told.as_ref().unwrap_or(kept).clone()
        };
        let told = is_told.then(|| {
            let told: Vec<Vec<u8>> = self.items.iter().map(told).collect();
            array(told.iter().map(Vec::as_slice))
        });
        (kept, told)
    }
}

fn array<'a>(items: impl Iterator<Item = &'a [u8]> + Clone) -> Vec<u8> {
    let bytes = items.clone().map(|item| item.len() + 1).sum::<usize>();
    let mut out = Vec::with_capacity(bytes + 2);
    out.push(b'[');
    for item in items {
        if out.len() > 1 {
            out.push(b',');
        }
        out.extend_from_slice(item);
    }
    out.push(b']');
    out
}

impl ResponseTemplate {
    pub(super) fn new(create: &CreateRequest<'_>, header: &ResponseMeta<'_>, ids: Ids) -> Self {
        let members = &create.members;
        let of = |name: &str| members.get(name);
        let mut head = Vec::with_capacity(512);
        head.extend_from_slice(br#"{"id":"#);
        put_text(&mut head, header.id);
        put(&mut head, "object", "\"response\"");
        put(&mut head, "created_at", &header.created_at.to_string());
        put_name(&mut head, "model");
        put_text(&mut head, &create.model);
        put_name(&mut head, "previous_response_id");
        put_optional(&mut head, header.previous);
        if let Some(conversation) = header.conversation {
            put_name(&mut head, "conversation");
            head.extend_from_slice(br#"{"id":"#);
            put_text(&mut head, conversation);
            head.push(b'}');
        }
        put(
            &mut head,
            "instructions",
            of("instructions").unwrap_or("null"),
        );

        let mut tail = Vec::with_capacity(768);
        tail.push(b',');
        put_first(
            &mut tail,
            "presence_penalty",
            number(of("presence_penalty")).unwrap_or("0.0"),
        );
        put(
            &mut tail,
            "frequency_penalty",
            number(of("frequency_penalty")).unwrap_or("0.0"),
        );
        put(
            &mut tail,
            "top_logprobs",
            number(of("top_logprobs")).unwrap_or("0"),
        );
        put_name(&mut tail, "tools");
        put_tools(&mut tail, of("tools"));
        put(
            &mut tail,
            "tool_choice",
            of("tool_choice").unwrap_or("\"auto\""),
        );
        put(
            &mut tail,
            "parallel_tool_calls",
            of("parallel_tool_calls").unwrap_or("true"),
        );
        put(
            &mut tail,
            "truncation",
            of("truncation").unwrap_or("\"disabled\""),
        );
        put_name(&mut tail, "text");
        put_format(&mut tail, of("text"));
        put_name(&mut tail, "reasoning");
        put_with(
            &mut tail,
            of("reasoning"),
            &[("effort", "null"), ("summary", "null")],
        );
        put(
            &mut tail,
            "max_output_tokens",
            of("max_output_tokens").unwrap_or("null"),
        );
        put(
            &mut tail,
            "max_tool_calls",
            of("max_tool_calls").unwrap_or("null"),
        );
        put(
            &mut tail,
            "store",
            if header.store { "true" } else { "false" },
        );
        put(
            &mut tail,
            "background",
            if create.background { "true" } else { "false" },
        );
        let tier = of("service_tier").filter(|it| it.starts_with('"') && *it != "\"auto\"");
        put(&mut tail, "service_tier", tier.unwrap_or("\"default\""));
        put(&mut tail, "metadata", of("metadata").unwrap_or("{}"));
        for name in ["safety_identifier", "prompt_cache_key", "user"] {
            put(&mut tail, name, of(name).unwrap_or("null"));
        }
        for name in ["prompt_cache_retention", "prompt_cache_options"] {
            if let Some(value) = of(name) {
                put(&mut tail, name, value);
            }
        }
        // The client's own values are in it as they are written, and go into events, whose data is one line.
        for part in [&mut head, &mut tail] {
            if part.contains(&b'\n') || part.contains(&b'\r') {
                part.retain(|byte| !matches!(byte, b'\n' | b'\r'));
            }
        }
        Self {
            created_at: header.created_at,
            head,
            temperature: number(of("temperature")).map(str::to_owned),
            top_p: number(of("top_p")).map(str::to_owned),
            tail,
            ids,
        }
    }

    /// Takes over what an engine says it samples with, where the request does not say.
    pub(super) fn learn(&mut self, engine: &Members<'_>) {
        for (own, name) in [
            (&mut self.temperature, "temperature"),
            (&mut self.top_p, "top_p"),
        ] {
            if own.is_none() {
                *own = number(engine.get(name)).map(str::to_owned);
            }
        }
    }

    /// The object of a response that has not ended.
    pub(super) fn open(&self, status: Status) -> Vec<u8> {
        with_output(&self.running(status), b"[]")
    }

    /// The same without its output.
    pub(super) fn running(&self, status: Status) -> Vec<u8> {
        let mut out = self.begin(status);
        for name in ["completed_at", "error", "incomplete_details", "usage"] {
            put(&mut out, name, "null");
        }
        out.push(b'}');
        out
    }

    /// The object of one that has, but for its output. `now` is in Unix seconds.
    pub(super) fn ended(&self, outcome: &Outcome, now: u64) -> Vec<u8> {
        let mut out = self.begin(outcome.status);
        let completed_at = (outcome.status == Status::Completed).then(|| now.max(self.created_at));
        match completed_at {
            Some(at) => put(&mut out, "completed_at", &at.to_string()),
            None => put(&mut out, "completed_at", "null"),
        }
        put_name(&mut out, "error");
        match &outcome.error {
            None => out.extend_from_slice(b"null"),
            Some(error) => {
                out.extend_from_slice(br#"{"code":"#);
                put_text(&mut out, error.code);
                put_name(&mut out, "message");
                put_text(&mut out, &error.message);
                out.push(b'}');
            }
        }
        put_name(&mut out, "incomplete_details");
        match &outcome.reason {
            None => out.extend_from_slice(b"null"),
            Some(reason) => {
                out.extend_from_slice(br#"{"reason":"#);
                put_text(&mut out, reason);
                out.push(b'}');
            }
        }
        put_name(&mut out, "usage");
        match &outcome.usage {
            None => out.extend_from_slice(b"null"),
            Some(usage) => {
                // Writing to memory cannot fail.
                let _ = write!(
                    out,
                    r#"{{"input_tokens":{},"input_tokens_details":{{"cached_tokens":{}}},"output_tokens":{},"output_tokens_details":{{"reasoning_tokens":{}}},"total_tokens":{}}}"#,
                    usage.input_tokens,
                    usage.input_tokens_details.cached_tokens,
                    usage.output_tokens,
                    usage.output_tokens_details.reasoning_tokens,
                    usage.total_tokens,
                );
            }
        }
        out.push(b'}');
        out
    }

    fn begin(&self, status: Status) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.head.len() + self.tail.len() + 512);
        out.extend_from_slice(&self.head);
        put_string(&mut out, "status", status.as_str());
        put(
            &mut out,
            "temperature",
            self.temperature.as_deref().unwrap_or("1.0"),
        );
        put(&mut out, "top_p", self.top_p.as_deref().unwrap_or("1.0"));
        out.extend_from_slice(&self.tail);
        out
    }
}

/// An object as it is stored, with its output put back.
pub(super) fn with_output(response: &[u8], output: &[u8]) -> Vec<u8> {
    let open = response.strip_suffix(b"}").unwrap_or(response);
    [open, br#","output":"#, output, b"}"].concat()
}

/// A stored object whose status is another one by now.
pub(super) fn with_member(response: &[u8], name: &str, value: &str) -> Vec<u8> {
    let members = std::str::from_utf8(response)
        .ok()
        .and_then(|text| Members::parse(text).ok());
    let mut out = Vec::with_capacity(response.len() + 16);
    out.push(b'{');
    for (key, old) in members.iter().flat_map(Members::iter) {
        put(&mut out, key, if key == name { value } else { old });
    }
    out.push(b'}');
    out
}

/// Writes an engine's output item as ours, and tells its type. `None` where it is no object with one.
pub(super) fn put_item<'a>(
    out: &mut Vec<u8>,
    raw: &'a str,
    ids: &Ids,
    place: usize,
    status: &str,
) -> Option<Cow<'a, str>> {
    let members = Members::parse(raw).ok()?;
    let kind = members.text("type")?;
    out.extend_from_slice(br#"{"id":"#);
    put_text(out, &ids.output(item::prefix(&kind), place));
    put_name(out, "type");
    put_text(out, &kind);
    let is_written: &[&str] = match &*kind {
        "message" => {
            put_string(out, "status", status);
            put(out, "role", "\"assistant\"");
            put_name(out, "content");
            put_parts(out, members.get("content"));
            &["role", "content"]
        }
        "reasoning" => {
            put_string(out, "status", status);
            put(out, "summary", members.get("summary").unwrap_or("[]"));
            put_name(out, "content");
            put_parts(out, members.get("content"));
            // An engine's own sealed text would be nothing to us when it comes back.
            &["summary", "content", "encrypted_content"]
        }
        _ => {
            put_string(out, "status", status);
            &[]
        }
    };
    for (name, value) in members.iter() {
        let is_done = matches!(name, "id" | "type" | "status") || is_written.contains(&name);
        if !is_done && value != "null" {
            put(out, name, value);
        }
    }
    out.push(b'}');
    Some(kind)
}

fn put_parts(out: &mut Vec<u8>, parts: Option<&str>) {
    out.push(b'[');
    let parts = parts.and_then(members::list).unwrap_or_default();
    for (place, part) in parts.into_iter().enumerate() {
        if place > 0 {
            out.push(b',');
        }
        put_part(out, part);
    }
    out.push(b']');
}

/// Writes a part of an item's content, with all that clients require of a text.
pub(super) fn put_part(out: &mut Vec<u8>, raw: &str) {
    let Ok(members) = Members::parse(raw) else {
        out.extend_from_slice(raw.as_bytes());
        return;
    };
    if members.get("type") != Some("\"output_text\"") {
        out.extend_from_slice(raw.as_bytes());
        return;
    }
    out.extend_from_slice(br#"{"type":"output_text""#);
    put(out, "text", members.get("text").unwrap_or("\"\""));
    put(
        out,
        "annotations",
        members.get("annotations").unwrap_or("[]"),
    );
    put(out, "logprobs", members.get("logprobs").unwrap_or("[]"));
    for (name, value) in members.iter() {
        if !matches!(name, "type" | "text" | "annotations" | "logprobs") {
            put(out, name, value);
        }
    }
    out.push(b'}');
}

/// As [`put`], where the comma is there already.
fn put_first(out: &mut Vec<u8>, name: &str, value: &str) {
    put_text(out, name);
    out.push(b':');
    out.extend_from_slice(value.as_bytes());
}

fn put_name(out: &mut Vec<u8>, name: &str) {
    put(out, name, "");
}

fn put_optional(out: &mut Vec<u8>, text: Option<&str>) {
    match text {
        Some(text) => put_text(out, text),
        None => out.extend_from_slice(b"null"),
    }
}

fn number(raw: Option<&str>) -> Option<&str> {
    raw.filter(|it| it.starts_with(|first: char| first == '-' || first.is_ascii_digit()))
}

/// Writes an object, with these members where it has none of that name.
fn put_with(out: &mut Vec<u8>, raw: Option<&str>, defaults: &[(&str, &str)]) {
    let members = raw.and_then(|raw| Members::parse(raw).ok());
    let members = members.unwrap_or_default();
    out.push(b'{');
    for (name, value) in members.iter() {
        put(out, name, value);
    }
    for (name, value) in defaults {
        if !members.iter().any(|(known, _)| known == *name) {
            put(out, name, value);
        }
    }
    out.push(b'}');
}

fn put_tools(out: &mut Vec<u8>, raw: Option<&str>) {
    let tools: Vec<&RawValue> = raw
        .and_then(|raw| serde_json::from_str(raw).ok())
        .unwrap_or_default();
    out.push(b'[');
    for (place, tool) in tools.into_iter().enumerate() {
        if place > 0 {
            out.push(b',');
        }
        let is_function = Members::parse(tool.get())
            .is_ok_and(|members| members.get("type") == Some("\"function\""));
        if is_function {
            const REQUIRED: [(&str, &str); 3] = [
                ("description", "null"),
                ("parameters", "null"),
                ("strict", "null"),
            ];
            put_with(out, Some(tool.get()), &REQUIRED);
        } else {
            out.extend_from_slice(tool.get().as_bytes());
        }
    }
    out.push(b']');
}

fn put_format(out: &mut Vec<u8>, raw: Option<&str>) {
    let members = raw.and_then(|raw| Members::parse(raw).ok());
    let members = members.unwrap_or_default();
    out.push(b'{');
    put_name(out, "format");
    match members.get("format") {
        None => out.extend_from_slice(br#"{"type":"text"}"#),
        Some(format) => {
            let is_schema =
                Members::parse(format).is_ok_and(|it| it.get("type") == Some("\"json_schema\""));
            if is_schema {
                put_with(
                    out,
                    Some(format),
                    &[("description", "null"), ("strict", "false")],
                );
            } else {
                out.extend_from_slice(format.as_bytes());
            }
        }
    }
    for (name, value) in members.iter() {
        if name != "format" {
            put(out, name, value);
        }
    }
    out.push(b'}');
}

#[cfg(test)]
mod tests;
