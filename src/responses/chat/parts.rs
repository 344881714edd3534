//! The parts of a message's content. Pure.

use crate::relay::NotConvertible;
use crate::responses::known_json;
use crate::responses::members::{Members, put, put_comma};

/// Writes the content of a message that is not the assistant's: a single text as a string, since some templates take
/// lists only of models with images.
pub(super) fn put_content(
    out: &mut Vec<u8>,
    content: &str,
    param: &str,
) -> Result<(), NotConvertible> {
    if content.starts_with('"') {
        out.extend_from_slice(content.as_bytes());
        return Ok(());
    }
    let parts = known_json::objects(content).into_iter().flatten();
    let mut parts = parts.peekable();
    let first = parts.next();
    if let Some(Some(part)) = &first
        && is_text(part)
        && parts.peek().is_none()
    {
        out.extend_from_slice(part.get("text").unwrap_or("\"\"").as_bytes());
        return Ok(());
    }
    out.push(b'[');
    put_parts(out, first.into_iter().chain(parts), param, |_| true)?;
    out.push(b']');
    Ok(())
}

/// Writes the parts of a tool's output that a tool message cannot have: a list without its brackets.
pub(super) fn put_other_parts(
    out: &mut Vec<u8>,
    output: &str,
    param: &str,
) -> Result<(), NotConvertible> {
    let parts = known_json::objects(output).into_iter().flatten();
    put_parts(out, parts, param, |part| !is_text(part))
}

fn is_text(part: &Members<'_>) -> bool {
    let kind = part.text("type");
    matches!(kind.as_deref(), Some("input_text" | "output_text" | "text"))
}

/// Writes the parts that are wanted, with commas between them. `param`: the name of the list in errors.
fn put_parts<'a>(
    out: &mut Vec<u8>,
    parts: impl Iterator<Item = Option<Members<'a>>>,
    param: &str,
    is_wanted: impl Fn(&Members<'_>) -> bool,
) -> Result<(), NotConvertible> {
    for (index, part) in parts.enumerate() {
        let refused = |why: &str| NotConvertible::new(&format!("{param}[{index}]"), why);
        let part = part.ok_or_else(|| refused("is no object"))?;
        if is_wanted(&part) {
            put_comma(out);
            put_part(out, &part).map_err(|why| refused(&why))?;
        }
    }
    Ok(())
}

fn put_part(out: &mut Vec<u8>, part: &Members<'_>) -> Result<(), String> {
    let kind = part.text("type").unwrap_or_default();
    match &*kind {
        "input_text" | "output_text" | "text" | "summary_text" => {
            out.extend_from_slice(br#"{"type":"text""#);
            put(out, "text", part.get("text").unwrap_or("\"\""));
        }
        "input_image" => {
            let Some(url) = part.get("image_url") else {
                return Err("an image needs an image_url here: files cannot be looked up".into());
            };
            out.extend_from_slice(br#"{"type":"image_url","image_url":{"url":"#);
            out.extend_from_slice(url.as_bytes());
            // Chat completions have no `original`, and engines check it.
            let detail = match part.get("detail") {
                Some("\"original\"") => "\"high\"",
                detail => detail.unwrap_or("\"auto\""),
            };
            put(out, "detail", detail);
            out.push(b'}');
        }
        "input_file" => {
            let Some(data) = part.get("file_data") else {
                return Err("a file needs file_data here: files cannot be looked up".into());
            };
            out.extend_from_slice(br#"{"type":"file","file":{"file_data":"#);
            out.extend_from_slice(data.as_bytes());
            if let Some(name) = part.get("filename") {
                put(out, "filename", name);
            }
            out.push(b'}');
        }
        "input_audio" => {
            out.extend_from_slice(br#"{"type":"input_audio""#);
            put(out, "input_audio", part.get("input_audio").unwrap_or("{}"));
        }
        kind => {
            return Err(format!(
                "parts of type '{kind}' cannot be sent to a worker that speaks chat completions only"
            ));
        }
    }
    out.push(b'}');
    Ok(())
}
