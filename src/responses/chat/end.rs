//! How an answer ended, and the Response object that says so. Pure.

use crate::responses::engine_error;
use crate::responses::members::{array, put, put_string, put_text};

const ENDED_EARLY: &str = "the engine ended the stream before the answer was complete";

/// How an answer ended.
#[derive(Debug)]
pub(super) enum End {
    Completed,
    Incomplete(&'static str),
    Failed { code: &'static str, message: String },
}

impl End {
    /// What a stream with this finish reason was.
    pub(super) fn of(finish_reason: Option<&str>) -> Self {
        match finish_reason {
            Some("stop" | "tool_calls" | "function_call") => Self::Completed,
            Some("length") => Self::Incomplete("max_output_tokens"),
            Some("content_filter") => Self::Incomplete("content_filter"),
            Some(reason) => Self::failed(format!("the engine ended the answer: {reason}")),
            None => Self::failed(ENDED_EARLY),
        }
    }

    /// It failed, and not because of the prompt.
    pub(super) fn failed(message: impl Into<String>) -> Self {
        Self::Failed {
            code: engine_error::failure_code(None),
            message: message.into(),
        }
    }

    pub(super) fn status(&self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Incomplete(_) => "incomplete",
            Self::Failed { .. } => "failed",
        }
    }

    /// Writes the Response object. `items`: with their indices, if they are kept; whoever reads the events has them.
    pub(super) fn write_response(
        &self,
        items: &[(usize, Vec<u8>)],
        usage: Option<&str>,
        out: &mut Vec<u8>,
    ) {
        out.extend_from_slice(br#"{"object":"response""#);
        put_string(out, "status", self.status());
        match self {
            Self::Incomplete(reason) => {
                put(out, "incomplete_details", r#"{"reason":"#);
                put_text(out, reason);
                out.push(b'}');
            }
            Self::Completed | Self::Failed { .. } => put(out, "incomplete_details", "null"),
        }
        match self {
            Self::Failed { code, message } => {
                put(out, "error", r#"{"code":"#);
                put_text(out, code);
                put_string(out, "message", message);
                out.push(b'}');
            }
            Self::Completed | Self::Incomplete(_) => put(out, "error", "null"),
        }
        let mut items: Vec<_> = items.iter().collect();
        items.sort_by_key(|(index, _)| *index);
        let list = array(items.into_iter().map(|(_, item)| item.as_slice()));
        put(out, "output", "");
        out.extend_from_slice(&list);
        put(out, "usage", usage.unwrap_or("null"));
        out.push(b'}');
    }
}
