//! A last message that the model must continue: the template renders it as finished, and what the template puts
//! after the text of the message is removed again, as `transformers` does.

use serde_json::{Map, Value};

use super::Unknown;

/// Marks the place where the last message ends, so that what the template adds after it can be cut
/// off. The engine uses the same words, so a message that has them is cut at the same place.
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// Puts the tag behind the last message's last text, which is returned as it was.
pub(super) fn mark_end(
    messages: &mut [Map<String, Value>],
    source: &str,
) -> Result<String, Unknown> {
    let refused = |why: &str| Unknown::Refused(why.to_owned());
    if !source.contains("content") {
        return Err(refused("the template says no content to continue"));
    }
    let last = messages
        .last_mut()
        .and_then(|message| message.get_mut("content"));
    let text = match last {
        Some(Value::String(text)) => Some(text),
        Some(Value::Array(parts)) => parts.iter_mut().rev().find_map(|part| match part {
            Value::Object(part) => match part.get_mut("text") {
                Some(Value::String(text)) => Some(text),
                _ => None,
            },
            _ => None,
        }),
        _ => None,
    };
    let text = text.ok_or_else(|| refused("the last message has no text to continue"))?;
    let last = text.clone();
    text.push_str(CONTINUE_TAG);
    Ok(last)
}

pub(super) fn cut_at_mark(mut text: String, last: &str) -> Result<String, Unknown> {
    let tag = CONTINUE_TAG.trim_end();
    let at = match text.rfind(tag) {
        Some(at) if text.contains(python_strip(last)) => at,
        _ => {
            let why = "the template does not show the message to continue";
            return Err(Unknown::Refused(why.to_owned()));
        }
    };
    let keeps_spaces = text[at..].starts_with(CONTINUE_TAG);
    text.truncate(at);
    if !keeps_spaces {
        // The template trims what it is given, so what came before the tag is trimmed as well.
        text.truncate(python_strip_end(&text).len());
    }
    Ok(text)
}

/// Python's white space: Unicode's, and four separators of old that Unicode calls controls.
fn is_python_space(char: char) -> bool {
    char.is_whitespace() || ('\x1c'..='\x1f').contains(&char)
}

fn python_strip(text: &str) -> &str {
    text.trim_matches(is_python_space)
}

fn python_strip_end(text: &str) -> &str {
    text.trim_end_matches(is_python_space)
}
