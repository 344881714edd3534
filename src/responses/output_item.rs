//! An engine's output item, rewritten for clients: the router's id, and every member that clients require. Pure.

use std::borrow::Cow;
use std::io::Write as _;

use super::item::{self, Ids};
use super::known_json;
use super::members::{put, put_comma, put_read, put_string, put_text};
use crate::json_scan::without_lone_surrogates;
use crate::observe::metrics::words;

words! {
    /// What a part of a message or of reasoning is.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) enum PartKind {
        Text = "output_text",
        Refusal = "refusal",
        Reasoning = "reasoning_text",
    }
}

impl PartKind {
    /// The kind with this name; `None` if it is another one.
    pub(super) fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == name)
    }

    /// The members that a part of this kind has for its text, a JSON string without quotes. `logprobs`: a list without
    /// its brackets.
    pub(super) fn put_members(self, out: &mut Vec<u8>, text: &str, logprobs: &str) {
        // Writing to memory cannot fail.
        let _ = match self {
            Self::Text => write!(out, r#","text":"{text}","logprobs":[{logprobs}]"#),
            Self::Refusal => write!(out, r#","refusal":"{text}""#),
            Self::Reasoning => write!(out, r#","text":"{text}""#),
        };
    }

    /// Writes a part, with what [`PartKind::put_members`] takes.
    pub(super) fn put_part(self, out: &mut Vec<u8>, text: &str, logprobs: &str) {
        let kind = self.as_str();
        let _ = match self {
            Self::Text => write!(
                out,
                r#"{{"type":"{kind}","text":"{text}","annotations":[],"logprobs":[{logprobs}]}}"#
            ),
            Self::Refusal => write!(out, r#"{{"type":"{kind}","refusal":"{text}"}}"#),
            Self::Reasoning => write!(out, r#"{{"type":"{kind}","text":"{text}"}}"#),
        };
    }
}

/// Writes an item, which is JSON, and returns its type; `None` if it is not an object with a type.
pub(super) fn put_item<'a>(
    out: &mut Vec<u8>,
    raw: &'a str,
    ids: &Ids,
    index: usize,
    status: &str,
) -> Option<Cow<'a, str>> {
    let Some(replaced) = without_lone_surrogates(raw) else {
        return put_whole_item(out, raw, ids, index, status);
    };
    let kind = put_whole_item(out, &replaced, ids, index, status)?;
    Some(Cow::Owned(kind.into_owned()))
}

fn put_whole_item<'a>(
    out: &mut Vec<u8>,
    raw: &'a str,
    ids: &Ids,
    index: usize,
    status: &str,
) -> Option<Cow<'a, str>> {
    let members = known_json::object(raw)?;
    let kind = members.text("type")?;
    out.extend_from_slice(br#"{"id":"#);
    put_text(out, &ids.output(item::prefix(&kind), index));
    put_string(out, "type", &kind);
    put_string(out, "status", status);
    let is_written: &[&str] = match &*kind {
        "message" => {
            put(out, "role", "\"assistant\"");
            put(out, "content", "");
            put_parts(out, members.get("content"));
            &["role", "content"]
        }
        "reasoning" => {
            put(out, "summary", members.get("summary").unwrap_or("[]"));
            put(out, "content", "");
            put_parts(out, members.get("content"));
            // An engine's own encrypted content could not be used when a client sends it back.
            &["summary", "content", "encrypted_content"]
        }
        // The parsers of some engines send nothing for an empty object, and clients read the arguments as JSON.
        "function_call" if status == "completed" && members.get("arguments") == Some("\"\"") => {
            put(out, "arguments", "\"{}\"");
            &["arguments"]
        }
        _ => &[],
    };
    for (name, value) in members.iter() {
        let is_done = matches!(name, "id" | "type" | "status") || is_written.contains(&name);
        if !is_done && value != "null" {
            put_read(out, name, value);
        }
    }
    out.push(b'}');
    Some(kind)
}

fn put_parts(out: &mut Vec<u8>, parts: Option<&str>) {
    out.push(b'[');
    let parts = parts.and_then(known_json::list).unwrap_or_default();
    for part in parts {
        put_comma(out);
        put_part(out, part);
    }
    out.push(b']');
}

/// Writes a part of an item's content, with every member that clients require of a text.
pub(super) fn put_part(out: &mut Vec<u8>, raw: &str) {
    let Some(members) = known_json::object(raw) else {
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
            put_read(out, name, value);
        }
    }
    out.push(b'}');
}
