//! An engine's output item, rewritten for clients: the router's id, and every member that clients require. Pure.

use std::borrow::Cow;

use super::item::{self, Ids};
use super::known_json;
use super::members::{put, put_comma, put_read, put_string, put_text};
use crate::json_scan::without_lone_surrogates;

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
    let is_written: &[&str] = match &*kind {
        "message" => {
            put_string(out, "status", status);
            put(out, "role", "\"assistant\"");
            put(out, "content", "");
            put_parts(out, members.get("content"));
            &["role", "content"]
        }
        "reasoning" => {
            put_string(out, "status", status);
            put(out, "summary", members.get("summary").unwrap_or("[]"));
            put(out, "content", "");
            put_parts(out, members.get("content"));
            // An engine's own encrypted content could not be used when a client sends it back.
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
