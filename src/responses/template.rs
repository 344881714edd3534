//! The Response object that clients get, built from their request. Pure.
//!
//! An engine's own object is not passed on: engines leave members out and add their own. Every member that
//! clients require is always present.

use std::borrow::Cow;

use memchr::memchr2;
use serde_json::value::RawValue;

use super::allowed_tools::AllowedTools;
use super::item::Ids;
use super::member_table::{self, Shown};
use super::members::{Members, put, put_comma, put_number, put_read, put_string, put_text};
use super::object::with_output;
use super::outcome::{CompactionItem, Outcome};
use super::request::CreateRequest;
use crate::store::Status;

/// The members of a Response object that follow from the request.
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
    /// What the output begins with, if the history was compacted.
    pub(super) compaction: Option<CompactionItem>,
    pub(super) allowed_tools: Option<AllowedTools>,
}

/// Members of a Response object that the router decides.
#[derive(Clone, Copy, Debug)]
pub(super) struct ResponseMeta<'a> {
    pub(super) id: &'a str,
    /// Unix seconds.
    pub(super) created_at: u64,
    /// Id of the previous response.
    pub(super) previous: Option<&'a str>,
    pub(super) conversation: Option<&'a str>,
    /// Whether it will be stored, whatever the client asked for.
    pub(super) store: bool,
}

impl ResponseTemplate {
    pub(super) fn new(create: &CreateRequest<'_>, meta: &ResponseMeta<'_>, ids: Ids) -> Self {
        let members = &create.members;
        let of = |name: &str| members.get(name);
        let mut head = Vec::with_capacity(512);
        head.extend_from_slice(br#"{"id":"#);
        put_text(&mut head, meta.id);
        put(&mut head, "object", "\"response\"");
        put_number(&mut head, "created_at", meta.created_at);
        put_string(&mut head, "model", &create.model);
        match meta.previous {
            Some(previous) => put_string(&mut head, "previous_response_id", previous),
            None => put(&mut head, "previous_response_id", "null"),
        }
        if let Some(conversation) = meta.conversation {
            put(&mut head, "conversation", r#"{"id":"#);
            put_text(&mut head, conversation);
            head.push(b'}');
        }

        let mut tail = Vec::with_capacity(768);
        for member in member_table::MEMBERS {
            let given = || of(member.name);
            let shown = match member.shown {
                Shown::Otherwise => None,
                Shown::Or(default) => Some(given().unwrap_or(default)),
                Shown::NumberOr(default) => Some(number(given()).unwrap_or(default)),
                Shown::IfGiven => given(),
            };
            if let Some(value) = shown {
                put(&mut tail, member.name, value);
            }
        }
        put(&mut tail, "tools", "");
        put_tools(&mut tail, of("tools"));
        let choice = of("tool_choice").map_or(Cow::Borrowed("\"auto\""), tool_choice);
        put(&mut tail, "tool_choice", &choice);
        put(&mut tail, "text", "");
        put_format(&mut tail, of("text"));
        put(&mut tail, "reasoning", "");
        put_with(
            &mut tail,
            of("reasoning"),
            &[("effort", "null"), ("summary", "null")],
        );
        for (name, flag) in [("store", meta.store), ("background", create.background)] {
            put(&mut tail, name, if flag { "true" } else { "false" });
        }
        let tier = of("service_tier").filter(|tier| tier.starts_with('"') && *tier != "\"auto\"");
        put(&mut tail, "service_tier", tier.unwrap_or("\"default\""));
        // The client's values are copied as written, and an event's data must be one line.
        for part in [&mut head, &mut tail] {
            if memchr2(b'\n', b'\r', part).is_some() {
                part.retain(|byte| !matches!(byte, b'\n' | b'\r'));
            }
        }
        Self {
            created_at: meta.created_at,
            head,
            temperature: number(of("temperature")).map(str::to_owned),
            top_p: number(of("top_p")).map(str::to_owned),
            tail,
            ids,
            compaction: None,
            allowed_tools: AllowedTools::of(of("tool_choice")),
        }
    }

    /// Takes over the engine's sampling parameters where the request has none.
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

    /// The object of a running response.
    pub(super) fn open(&self, status: Status) -> Vec<u8> {
        with_output(&self.running(status), b"[]")
    }

    /// The object of a running response without its output.
    pub(super) fn running(&self, status: Status) -> Vec<u8> {
        let mut out = self.begin(status);
        for name in ["completed_at", "error", "incomplete_details", "usage"] {
            put(&mut out, name, "null");
        }
        out.push(b'}');
        out
    }

    /// The object of an ended response without its output. `now`: Unix seconds.
    pub(super) fn ended(&self, outcome: &Outcome, now: u64) -> Vec<u8> {
        let mut out = self.begin(outcome.status);
        let completed_at = (outcome.status == Status::Completed).then(|| now.max(self.created_at));
        match completed_at {
            Some(at) => put_number(&mut out, "completed_at", at),
            None => put(&mut out, "completed_at", "null"),
        }
        match &outcome.error {
            None => put(&mut out, "error", "null"),
            Some(error) => {
                put(&mut out, "error", "{");
                put_string(&mut out, "code", error.code);
                put_string(&mut out, "message", &error.message);
                out.push(b'}');
            }
        }
        match &outcome.incomplete_reason {
            None => put(&mut out, "incomplete_details", "null"),
            Some(reason) => {
                put(&mut out, "incomplete_details", r#"{"reason":"#);
                put_text(&mut out, reason);
                out.push(b'}');
            }
        }
        let compaction = self.compaction.as_ref().and_then(|item| item.usage);
        let usage = match (outcome.usage, compaction) {
            (Some(usage), Some(more)) => Some(usage.plus(&more)),
            (usage, more) => usage.or(more),
        };
        put(&mut out, "usage", "");
        match &usage {
            None => out.extend_from_slice(b"null"),
            Some(usage) => usage.write(&mut out),
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
        out.push(b',');
        out.extend_from_slice(&self.tail);
        out
    }
}

fn number(raw: Option<&str>) -> Option<&str> {
    raw.filter(|text| text.starts_with(|first: char| first == '-' || first.is_ascii_digit()))
}

/// Writes an object, with defaults for the members that it lacks.
fn put_with(out: &mut Vec<u8>, raw: Option<&str>, defaults: &[(&'static str, &str)]) {
    let members = raw.and_then(|raw| Members::parse(raw).ok());
    let members = members.unwrap_or_default();
    out.push(b'{');
    for (name, value) in members.iter() {
        put_read(out, name, value);
    }
    for (name, value) in defaults {
        if !members.iter().any(|(known, _)| known == *name) {
            put(out, name, value);
        }
    }
    out.push(b'}');
}

/// `allowed_tools` without its `mode` means `auto`, which clients and engines require to be written.
pub(super) fn tool_choice(raw: &str) -> Cow<'_, str> {
    let choice = Members::parse(raw).unwrap_or_default();
    let lacks_mode =
        choice.get("type") == Some("\"allowed_tools\"") && choice.get("mode").is_none();
    if !lacks_mode {
        return Cow::Borrowed(raw);
    }
    let mut out = vec![b'{'];
    for (name, value) in choice.iter().filter(|(name, _)| *name != "mode") {
        put_read(&mut out, name, value);
    }
    put(&mut out, "mode", "\"auto\"");
    out.push(b'}');
    Cow::Owned(String::from_utf8(out).unwrap_or_default())
}

fn put_tools(out: &mut Vec<u8>, raw: Option<&str>) {
    let tools: Vec<&RawValue> = raw
        .and_then(|raw| serde_json::from_str(raw).ok())
        .unwrap_or_default();
    out.push(b'[');
    for tool in tools {
        put_comma(out);
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
    put(out, "format", "");
    match members.get("format") {
        None => out.extend_from_slice(br#"{"type":"text"}"#),
        Some(format) => {
            let is_schema = Members::parse(format)
                .is_ok_and(|format| format.get("type") == Some("\"json_schema\""));
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
            put_read(out, name, value);
        }
    }
    out.push(b'}');
}

#[cfg(test)]
mod tests;
