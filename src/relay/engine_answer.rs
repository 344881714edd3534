//! What the relay reads of an engine's answer: whether a piece of a stream has a token, and the usage at the end.
//! Pure.

use std::sync::LazyLock;

use memchr::memchr_iter;
use memchr::memmem::{self, Finder, FinderRev};
use serde::Deserialize;

use crate::json_scan::Scan;
use crate::prompt::Api;

static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"usage\":"));
static EMPTY_CONTENT: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"content\":\"\""));
static BLOCK_DELTA: LazyLock<Finder<'static>> =
    LazyLock::new(|| Finder::new("\"content_block_delta\""));
static FINISH_REASON: LazyLock<FinderRev<'static>> =
    LazyLock::new(|| FinderRev::new("\"finish_reason\""));
static STOP_REASON: LazyLock<FinderRev<'static>> =
    LazyLock::new(|| FinderRev::new("\"stop_reason\""));
static DELTA: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(".delta\""));

/// Tokens of one request, as its engine reports them.
#[derive(Debug, Default, PartialEq)]
pub struct Usage {
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
}

/// Why a choice has ended, as its engine says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Finish {
    /// It goes on.
    None,
    Reason,
    /// The engine gave it up, mostly because it is shut down: vLLM and SGLang say `abort`.
    Abort,
}

/// Where the last choice in some events, or in a whole answer, says why it has ended, and what it says. `None` if there is no
/// choice, or the API has none.
pub(super) fn last_finish(api: Api, answer: &[u8]) -> Option<(usize, Finish)> {
    let name = match api {
        Api::Chat | Api::Completions => &*FINISH_REASON,
        Api::Messages => &*STOP_REASON,
        _ => return None,
    };
    // Within a text the quotes are escaped.
    let is_name = |at: &usize| *at > 0 && answer[at - 1] != b'\\';
    let at = name.rfind_iter(answer).find(is_name)?;
    let value = answer[at + name.needle().len()..].trim_ascii_start();
    let value = value.strip_prefix(b":")?.trim_ascii_start();
    let finish = match value {
        value if value.starts_with(b"\"abort\"") => Finish::Abort,
        value if value.starts_with(b"\"") => Finish::Reason,
        _ => Finish::None,
    };
    Some((at, finish))
}

/// True if a piece of a stream has a token. What engines send before they compute anything has none: a chat
/// stream's first chunk with the role, the first events of a response, keep-alive comments.
pub fn is_token(api: Api, data: &[u8]) -> bool {
    let mut data = data;
    while data.starts_with(b":") {
        data = match memmem::find(data, b"\n\n") {
            Some(end) => &data[end + 2..],
            None => &[],
        };
    }
    match api {
        Api::Responses => DELTA.find(data).is_some(),
        Api::Messages => BLOCK_DELTA.find(data).is_some(),
        Api::Chat => {
            let one_event =
                data.len() < 2 || memmem::find(&data[..data.len() - 2], b"\n\n").is_none();
            !(data.is_empty() || (one_event && EMPTY_CONTENT.find(data).is_some()))
        }
        _ => !data.is_empty(),
    }
}

/// Tokens in a piece of a stream, as far as its events show them: one for each event that is neither a comment nor the
/// first of a chat. For answers without usage.
pub fn count_tokens(api: Api, data: &[u8]) -> u64 {
    let events = match api {
        Api::Responses => DELTA.find_iter(data).count(),
        Api::Messages => BLOCK_DELTA.find_iter(data).count(),
        _ => {
            let without = EMPTY_CONTENT.find_iter(data).count();
            lines_of_data(data).saturating_sub(without)
        }
    };
    events as u64
}

/// Lines of data in a piece of a stream but for the one that ends it.
fn lines_of_data(data: &[u8]) -> usize {
    let is_counted = |line: &[u8]| {
        line.strip_prefix(b"data: ")
            .is_some_and(|value| !value.starts_with(b"[DONE]"))
    };
    let begins = memchr_iter(b'\n', data).map(|end| end + 1);
    let lines = std::iter::once(0).chain(begins).map(|begin| &data[begin..]);
    lines.filter(|line| is_counted(line)).count()
}

/// True if a piece of an answer may contain usage.
pub fn has_usage(data: &[u8]) -> bool {
    USAGE.find(data).is_some()
}

/// From the front, because the search from the end compares byte by byte.
fn last_usage_at(data: &[u8]) -> Option<usize> {
    USAGE.find_iter(data).last()
}

/// The last usage in a piece of an answer, with the field names of chat completions or of Responses.
pub fn last_usage(data: &[u8]) -> Option<Usage> {
    let at = last_usage_at(data)? + b"\"usage\":".len();
    let rest = match std::str::from_utf8(&data[at..]) {
        Ok(rest) => rest,
        // Something else after it is cut off.
        Err(error) => std::str::from_utf8(&data[at..at + error.valid_up_to()]).ok()?,
    };
    let (mut prompt_tokens, mut output_tokens) = (None, None);
    let mut cached_tokens = 0;
    // None if it is given under both names.
    let set = |count: &mut Option<u64>, json: &str| {
        count.replace(json.parse().ok()?).is_none().then_some(())
    };
    let mut scan = Scan::<true>::new(rest.trim_ascii_start());
    scan.each_member(|scan, name| {
        match name {
            "prompt_tokens" | "input_tokens" => set(&mut prompt_tokens, scan.value()?)?,
            "completion_tokens" | "output_tokens" => set(&mut output_tokens, scan.value()?)?,
            "prompt_tokens_details" | "input_tokens_details" if scan.first_byte() == Some(b'{') => {
                scan.object(|name, value| {
                    if name == "cached_tokens" {
                        cached_tokens = value.parse().unwrap_or(0);
                    }
                })?;
            }
            _ => {
                scan.value()?;
            }
        }
        Some(())
    })?;
    Some(Usage {
        prompt_tokens: prompt_tokens?,
        cached_tokens,
        output_tokens: output_tokens.unwrap_or(0),
    })
}

/// The usage of an answer of Messages: its last piece with usage, and of a stream the first such piece too, because the
/// event at the end may report the output only. Cached tokens, and those that were written into the cache, are no part of
/// the input tokens here.
pub fn messages_usage(first: Option<&[u8]>, last: &[u8]) -> Option<Usage> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Wire {
        input_tokens: Option<u64>,
        output_tokens: Option<u64>,
        cache_read_input_tokens: Option<u64>,
        cache_creation_input_tokens: Option<u64>,
    }
    let read = |data: &[u8], at: usize| {
        let at = at + b"\"usage\":".len();
        let mut wires = serde_json::Deserializer::from_slice(&data[at..]).into_iter::<Wire>();
        wires.next()?.ok()
    };
    let end = last_usage_at(last).and_then(|at| read(last, at));
    let begin = first.unwrap_or(last);
    let begin = USAGE.find(begin).and_then(|at| read(begin, at));
    let output = |wire: &Option<Wire>| wire.as_ref().and_then(|it| it.output_tokens);
    let output_tokens = output(&end).or(output(&begin))?;
    let mut both = [end, begin].into_iter().flatten();
    let input = both.find(|it| it.input_tokens.is_some())?;
    let cached_tokens = input.cache_read_input_tokens.unwrap_or(0);
    let counts = [
        input.input_tokens,
        input.cache_creation_input_tokens,
        Some(cached_tokens),
    ];
    let add = |sum: u64, count: u64| sum.saturating_add(count);
    Some(Usage {
        prompt_tokens: counts.into_iter().flatten().fold(0, add),
        cached_tokens,
        output_tokens,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_read_with_the_field_names_of_either_api() {
        let expected = || Usage {
            prompt_tokens: 33,
            cached_tokens: 32,
            output_tokens: 4,
        };
        let chat = br#"{"choices":[],"usage":{"prompt_tokens":33,"total_tokens":37,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":32}},"x":1}"#;
        let responses = br#"data: {"response":{"usage":{"input_tokens":33,"input_tokens_details":{"cached_tokens":32,"cache_write_tokens":0},"output_tokens":4,"total_tokens":37}}}"#;
        assert_eq!(last_usage(chat), Some(expected()));
        assert_eq!(last_usage(responses), Some(expected()));
        let none =
            br#"{"usage":{"prompt_tokens":33,"completion_tokens":4,"prompt_tokens_details":null}}"#;
        assert_eq!(
            last_usage(none),
            Some(Usage {
                cached_tokens: 0,
                ..expected()
            })
        );
        for bad in [
            "",
            "\"usage\":",
            "\"usage\":null}",
            "\"usage\":{\"prompt_tokens\":-1}",
            "\"usage\":{\"prompt_tokens\":1,\"input_tokens\":0}",
        ] {
            assert_eq!(last_usage(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn usage_of_messages_counts_cached_tokens_besides_the_input_tokens() {
        let check = |first: Option<&str>, last: &str, expected: Option<(u64, u64, u64)>| {
            let found = messages_usage(first.map(str::as_bytes), last.as_bytes());
            let found = found.map(|usage| {
                (
                    usage.prompt_tokens,
                    usage.cached_tokens,
                    usage.output_tokens,
                )
            });
            assert_eq!(found, expected, "{first:?} {last}");
        };
        let whole = r#"{"content":[],"usage":{"input_tokens":10,"output_tokens":4,"cache_creation_input_tokens":3,"cache_read_input_tokens":20}}"#;
        check(None, whole, Some((33, 20, 4)));
        let start = r#"data: {"message":{"usage":{"input_tokens":33,"output_tokens":0}}}"#;
        let end = r#"data: {"usage":{"output_tokens":4}}"#;
        let full =
            r#"data: {"usage":{"input_tokens":1,"cache_read_input_tokens":32,"output_tokens":4}}"#;
        check(Some(start), end, Some((33, 0, 4)));
        check(Some(start), full, Some((33, 32, 4)));
        check(None, &format!("{start}\n\n{end}"), Some((33, 0, 4)));
        // A stream that broke off after its start.
        check(None, start, Some((33, 0, 0)));
        check(None, end, None);
        check(None, r#"{"usage":null}"#, None);
        check(None, "", None);
    }

    #[test]
    fn tokens_without_usage_are_counted_by_their_events() {
        let check = |api, data: &str, expected| {
            assert_eq!(count_tokens(api, data.as_bytes()), expected, "{data}");
        };
        let role =
            "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
        let token = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
        check(
            Api::Chat,
            &format!("{role}{token}{token}data: [DONE]\n\n"),
            2,
        );
        check(Api::Chat, role, 0);
        check(Api::Chat, token, 1);
        check(Api::Chat, "data: {\"usage\":{}}\n\n", 1);
        check(Api::Chat, "data: [DONE]\n\n", 0);
        check(Api::Chat, ": ping\n\n", 0);
        // Text is no event.
        check(Api::Completions, "data: {\"text\":\"data: \"}\n\n", 1);
        let text = "data: {\"choices\":[{\"text\":\"a\"}]}\n\n";
        check(
            Api::Completions,
            &format!("{text}{text}data: [DONE]\n\n"),
            2,
        );
        let delta = "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\"}\n\n";
        check(Api::Responses, delta, 1);
    }

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
