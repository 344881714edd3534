//! How an answer ended, and the Response object that says so. Pure.

use crate::responses::members::{array, put_text};

const ENDED_EARLY: &str = "the engine ended the stream before the answer was complete";

/// How an answer ended.
#[derive(Debug)]
pub(super) enum End {
    Completed,
    /// Why it is incomplete.
    Incomplete(&'static str),
    Failed(String),
}

impl End {
    /// What a stream with this finish reason was.
    pub(super) fn of(finish_reason: Option<&str>) -> Self {
        match finish_reason {
            Some("stop" | "tool_calls" | "function_call") => Self::Completed,
            Some("length") => Self::Incomplete("max_output_tokens"),
            Some("content_filter") => Self::Incomplete("content_filter"),
            Some(reason) => Self::Failed(format!("the engine ended the answer: {reason}")),
            None => Self::Failed(ENDED_EARLY.to_owned()),
        }
    }

    pub(super) fn status(&self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Incomplete(_) => "incomplete",
            Self::Failed(_) => "failed",
        }
    }

    /// Writes the Response object. `items`: with their indices, if they are kept; whoever reads the events has them.
    pub(super) fn write_response(
        &self,
        items: &[(usize, Vec<u8>)],
        usage: Option<&str>,
        out: &mut Vec<u8>,
    ) {
        out.extend_from_slice(br#"{"object":"response","status":""#);
        out.extend_from_slice(self.status().as_bytes());
        out.extend_from_slice(br#"","incomplete_details":"#);
        match self {
            Self::Incomplete(reason) => {
                out.extend_from_slice(br#"{"reason":"#);
                put_text(out, reason);
                out.push(b'}');
            }
            Self::Completed | Self::Failed(_) => out.extend_from_slice(b"null"),
        }
        out.extend_from_slice(br#","error":"#);
        match self {
            Self::Failed(message) => {
                out.extend_from_slice(br#"{"code":"server_error","message":"#);
                put_text(out, message);
                out.push(b'}');
            }
            Self::Completed | Self::Incomplete(_) => out.extend_from_slice(b"null"),
        }
        out.extend_from_slice(br#","output":"#);
        let mut items: Vec<_> = items.iter().collect();
        items.sort_by_key(|(index, _)| *index);
        let list = array(items.into_iter().map(|(_, item)| item.as_slice()));
        out.extend_from_slice(&list);
        out.extend_from_slice(br#","usage":"#);
        out.extend_from_slice(usage.unwrap_or("null").as_bytes());
        out.push(b'}');
    }
}
