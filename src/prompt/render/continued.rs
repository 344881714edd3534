//! `continue_final_message`: the model must continue the last message. The template renders that message as finished;
//! then everything that the template put after the text of the message is removed, as `transformers` does.

use serde_json::{Map, Value};

use super::types::{TokenizeError, refused};
use crate::prompt::template::is_space;

/// Appended to the last message, so that the text after it can be found and cut off. `transformers` uses the same tag,
/// so a message that contains the tag is cut at the same position.
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// Appends the tag to the last text of the last message. Returns the text without the tag.
pub(super) fn append_tag(
    last: Option<&mut Map<String, Value>>,
    source: &str,
) -> Result<String, TokenizeError> {
    if !source.contains("content") {
        return Err(refused("the template prints no content to continue"));
    }
    let content = last.and_then(|message| message.get_mut("content"));
    let text = match content {
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

/// Cuts the rendered text at the tag. `last` is the text without the tag.
pub(super) fn cut_at_tag(mut text: String, last: &str) -> Result<String, TokenizeError> {
    let tag = CONTINUE_TAG.trim_end();
    let end = match text.rfind(tag) {
        Some(end) if text.contains(last.trim_matches(is_space)) => end,
        _ => {
            let why = "the template does not print the message to continue";
            return Err(refused(why));
        }
    };
    let keeps_spaces = text[end..].starts_with(CONTINUE_TAG);
    text.truncate(end);
    if !keeps_spaces {
        // The template trimmed the tag, so it would have trimmed the text before the tag as well.
        text.truncate(text.trim_end_matches(is_space).len());
    }
    Ok(text)
}
