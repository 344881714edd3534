//! What the relay reads of an engine's answer: whether a piece of a stream has a token, and why the answer ended. Its usage:
//! [`super::usage_reader`]. Pure.

use std::sync::LazyLock;

use memchr::memmem::Finder;
use memchr::{memchr, memrchr};

use crate::http::sse;
use crate::prompt::Api;
pub use crate::traces::Usage;

static EMPTY_CONTENT: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"content\":\"\""));
pub(in crate::relay) static BLOCK_DELTA: LazyLock<Finder<'static>> =
    LazyLock::new(|| Finder::new("\"content_block_delta\""));
static FINISH_REASON: LazyLock<Finder<'static>> =
    LazyLock::new(|| Finder::new("\"finish_reason\""));
static STOP_REASON: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"stop_reason\""));
static HIDDEN_STATES: LazyLock<Finder<'static>> =
    LazyLock::new(|| Finder::new("\"hidden_states\":"));
pub(in crate::relay) static DELTA: LazyLock<Finder<'static>> =
    LazyLock::new(|| Finder::new(".delta\""));

/// Why a choice has ended, as its engine says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::relay) enum Finish {
    /// It goes on.
    None,
    Reason,
    /// The engine gave it up, mostly because it is shut down: vLLM and SGLang say `abort`.
    Abort,
}

/// Where the last choice in some events, or in a whole answer, says why it has ended, and what it says. `None` if there is no
/// choice, or the API has none.
pub(in crate::relay) fn last_finish(api: Api, answer: &[u8]) -> Option<(usize, Finish)> {
    let name = match api {
        Api::Chat | Api::Completions | Api::Generate => &*FINISH_REASON,
        Api::Messages => &*STOP_REASON,
        _ => return None,
    };
    // Within a text the quotes are escaped.
    let is_name = |at: &usize| *at > 0 && answer[at - 1] != b'\\';
    let finish_at = |at: usize| finish_of(&answer[at + name.needle().len()..]);
    // Forwards: backwards there is no search with vector instructions.
    let names = name.find_iter(answer).filter(is_name);
    let at = if HIDDEN_STATES.find(answer).is_none() {
        names.last()
    } else {
        let is_of_choice =
            |at: &usize| finish_at(*at) != Some(Finish::None) || !is_of_hidden_states(answer, *at);
        names.filter(is_of_choice).last()
    };
    let at = at?;
    Some((at, finish_at(at)?))
}

/// What is behind the name of a finish reason.
fn finish_of(behind: &[u8]) -> Option<Finish> {
    let value = behind.trim_ascii_start().strip_prefix(b":")?;
    Some(match value.trim_ascii_start() {
        value if value.starts_with(b"\"abort\"") => Finish::Abort,
        value if value.starts_with(b"\"") => Finish::Reason,
        _ => Finish::None,
    })
}

/// Whether a position is in a chunk with the hidden states of a choice. SGLang sends it after the choice has ended, without a
/// finish reason.
fn is_of_hidden_states(answer: &[u8], at: usize) -> bool {
    let start = memrchr(b'\n', &answer[..at]).map_or(0, |newline| newline + 1);
    let end = memchr(b'\n', &answer[at..]).map_or(answer.len(), |length| at + length);
    let line = &answer[start..end];
    HIDDEN_STATES.find(line).is_some_and(|name| {
        let value = &line[name + HIDDEN_STATES.needle().len()..];
        !value.trim_ascii_start().starts_with(b"null")
    })
}

/// True if a piece of a stream has a token. What engines send before they compute anything has none: a chat
/// stream's first chunk with the role, the first events of a response, keep-alive comments.
pub fn is_token(api: Api, data: &[u8]) -> bool {
    let mut data = data;
    while data.starts_with(b":") {
        data = match sse::BLANK.find(data) {
            Some(end) => &data[end + 2..],
            None => &[],
        };
    }
    match api {
        Api::Responses => DELTA.find(data).is_some(),
        Api::Messages => BLOCK_DELTA.find(data).is_some(),
        Api::Chat => {
            let one_event = data.len() < 2 || sse::BLANK.find(&data[..data.len() - 2]).is_none();
            !(data.is_empty() || (one_event && EMPTY_CONTENT.find(data).is_some()))
        }
        _ => !data.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_sent_before_the_prompt_is_computed_is_no_token() {
        let role =
            b"data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
        let token = b"data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
        assert!(!is_token(Api::Chat, role));
        assert!(is_token(Api::Chat, token));
        assert!(is_token(Api::Chat, &[&role[..], &token[..]].concat()));
        assert!(!is_token(Api::Chat, b": ping\n\n"));
        assert!(is_token(Api::Chat, &[&b": ping\n\n"[..], token].concat()));
        assert!(!is_token(Api::Chat, &[&b": ping\n\n"[..], role].concat()));
        assert!(!is_token(Api::Completions, b": ping\n\n: ping\n\n"));
        assert!(!is_token(
            Api::Responses,
            b"event: response.created\ndata: {}\n\n"
        ));
        assert!(is_token(
            Api::Responses,
            b"data: {\"type\":\"response.output_text.delta\"}\n\n"
        ));
        assert!(is_token(
            Api::Completions,
            b"data: {\"choices\":[{\"text\":\"a\"}]}\n\n"
        ));
    }
}
