//! Counts the tokens of a stream as its events show them, for an answer of which no engine has reported usage. An engine may put
//! many tokens into an event: because a request or its settings ask for it, because it guesses several at once, or because it
//! is read late. Pure.

mod listed_ids;

use std::sync::LazyLock;

use memchr::memmem::Finder;
use memchr::{memchr, memchr2, memrchr2};

pub(in crate::relay) use self::listed_ids::ListedIds;
use super::engine_answer::{BLOCK_DELTA, DELTA};
use crate::json_scan::{Scan, plain_string};
use crate::prompt::Api;

static CHOICE_DELTA: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"delta\":{"));
static EVENT_DELTA: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"delta\":\""));
static AT_LIMIT: LazyLock<Finder<'static>> =
    LazyLock::new(|| Finder::new("\"finish_reason\":\"length\""));
static TEXT: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"text\":\""));

/// Events of one token have 4 bytes of text on average, few have more than 16, and no text's average is twice the mean of
/// its model. So an average above that is one of events with several tokens.
const SEVERAL: f64 = 2.0;

/// The events with which some events begin and that have nothing but a text: see [`super::plain_events`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::relay) struct Plain {
    pub(in crate::relay) events: u64,
    /// Bytes of their text, an escape counted as what it stands for.
    pub(in crate::relay) text_bytes: u64,
    /// All of their bytes.
    pub(in crate::relay) length: usize,
}

/// What some events have shown.
#[derive(Debug, Default)]
pub(in crate::relay) struct TokenCount {
    /// Tokens of events that say how many they have: by token ids or by log probabilities.
    listed: u64,
    /// The other events that have a token.
    events: u64,
    /// Bytes of their text.
    text_bytes: u64,
    /// The last event was cut.
    is_cut: bool,
    /// An event says that the answer ended because it had as many tokens as it may have.
    pub(in crate::relay) is_at_limit: bool,
}

impl TokenCount {
    pub(in crate::relay) fn add(&mut self, api: Api, events: &[u8]) {
        let mut rest = events;
        while !rest.is_empty() {
            let end = memchr(b'\n', rest);
            let line = &rest[..end.unwrap_or(rest.len())];
            if std::mem::replace(&mut self.is_cut, end.is_none()) {
                self.text_bytes += line.len() as u64;
            } else if let Some(data) = line.strip_prefix(b"data:") {
                self.is_at_limit |= AT_LIMIT.find(data).is_some();
                self.add_event(api, data.trim_ascii_start());
            }
            rest = &rest[(line.len() + 1).min(rest.len())..];
        }
    }

    /// Takes events that have nothing but a text.
    pub(in crate::relay) fn add_plain(&mut self, plain: Plain) {
        self.events += plain.events;
        self.text_bytes += plain.text_bytes;
    }

    /// The bytes of text of the only event so far, if it has a token and does not say how many.
    pub(in crate::relay) fn only_text(&self) -> Option<u64> {
        let is_only = self.listed == 0 && self.events == 1 && !self.is_cut;
        (is_only && self.text_bytes > 0).then_some(self.text_bytes)
    }

    /// The tokens, at least one for each event. `bytes_per_token`: of a text of the model.
    pub(in crate::relay) fn total(&self, bytes_per_token: f64) -> u64 {
        let of_text = self.text_bytes as f64 / bytes_per_token;
        let unlisted = if of_text > self.events as f64 * SEVERAL {
            of_text as u64
        } else {
            self.events
        };
        self.listed + unlisted
    }

    fn add_event(&mut self, api: Api, data: &[u8]) {
        let choice = match api {
            Api::Responses => of_response_event(data),
            Api::Messages => of_message_event(data),
            _ if data.starts_with(b"[DONE]") => return,
            _ => match only_choice(api, data) {
                Some(choice) => Some(choice),
                None => return self.add_choices(data),
            },
        };
        if let Some(choice) = choice {
            self.add_choice(choice);
        }
    }

    fn add_choice(&mut self, choice: Choice) {
        if choice.listed > 0 {
            self.listed += choice.listed;
        } else if choice.text_bytes > 0 || !choice.is_empty {
            self.events += 1;
            self.text_bytes += choice.text_bytes;
        }
    }

    /// Any chunk of a chat or a completion, and any event of another API.
    fn add_choices(&mut self, data: &[u8]) {
        let mut has_choices = false;
        let read = Scan::<true>::of_bytes(data).and_then(|mut scan| {
            scan.each_member(|scan, name| {
                if name != "choices" || scan.first_byte() != Some(b'[') {
                    return scan.value().map(drop);
                }
                has_choices = true;
                scan.each_element(|scan| {
                    let choice = Choice::read(scan)?;
                    self.add_choice(choice);
                    Some(())
                })
            })
        });
        if !has_choices || read.is_none() {
            self.events += 1;
        }
    }
}

/// What an event has of one choice.
#[derive(Debug, Default)]
struct Choice {
    listed: u64,
    text_bytes: u64,
    /// Its text is there, and empty: what engines send before they compute anything.
    is_empty: bool,
}

impl Choice {
    fn of_text(text_bytes: usize) -> Self {
        Self {
            text_bytes: text_bytes as u64,
            is_empty: text_bytes == 0,
            ..Self::default()
        }
    }

    fn read(scan: &mut Scan<'_, true>) -> Option<Self> {
        let mut choice = Self::default();
        scan.each_member(|scan, name| match (&*name, scan.first_byte()?) {
            ("delta", b'{') => scan.each_member(|scan, name| {
                if name == "content" && scan.first_byte() == Some(b'"') {
                    let text = string_length(scan)?;
                    choice.is_empty |= text == 0;
                    choice.text_bytes += text;
                    return Some(());
                }
                choice.text_bytes += text_of_member(scan, &name, LEVELS_MAX)?;
                Some(())
            }),
            ("text", b'"') => {
                choice.text_bytes += string_length(scan)?;
                choice.is_empty = choice.text_bytes == 0;
                Some(())
            }
            ("token_ids", b'[') => {
                choice.listed = choice.listed.max(elements(scan)?);
                Some(())
            }
            ("logprobs", b'{') => scan.each_member(|scan, name| {
                match (&*name, scan.first_byte()?) {
                    ("content" | "tokens", b'[') => {
                        choice.listed = choice.listed.max(elements(scan)?);
                    }
                    _ => drop(scan.value()?),
                }
                Some(())
            }),
            _ => scan.value().map(drop),
        })?;
        Some(choice)
    }
}

/// A function's arguments are a text in the function of a call in a list of calls.
const LEVELS_MAX: u32 = 2;

/// Bytes of text in a member of a delta: of reasoning, of a refusal, of calls of tools.
fn text_of_member(scan: &mut Scan<'_, true>, name: &str, levels: u32) -> Option<u64> {
    let mut bytes = 0;
    let mut add_members = |scan: &mut Scan<'_, true>| {
        scan.each_member(|scan, name| {
            bytes += text_of_member(scan, &name, levels - 1)?;
            Some(())
        })
    };
    match (name, scan.first_byte()?) {
        ("tool_calls", b'[') if levels > 0 => scan.each_element(add_members)?,
        ("function" | "function_call", b'{') if levels > 0 => add_members(scan)?,
        ("role" | "type" | "id" | "signature", _) => drop(scan.value()?),
        (_, b'"') => bytes += string_length(scan)?,
        _ => drop(scan.value()?),
    }
    Some(bytes)
}

fn string_length(scan: &mut Scan<'_, true>) -> Option<u64> {
    let (quoted, has_escapes) = scan.string()?;
    Some(if has_escapes {
        text_before_quote(&quoted.as_bytes()[1..])?.0 as u64
    } else {
        quoted.len() as u64 - 2
    })
}

fn elements(scan: &mut Scan<'_, true>) -> Option<u64> {
    let mut count = 0;
    scan.each_element(|scan| {
        count += 1;
        scan.value().map(drop)
    })?;
    Some(count)
}

/// The choice of an event that has one with nothing but text, as nearly all have, written without spaces. `None` for any other.
fn only_choice(api: Api, data: &[u8]) -> Option<Choice> {
    let (begin, choice, behind) = match api {
        Api::Completions => {
            let begin = TEXT.find(data)? + TEXT.needle().len();
            let (text_bytes, end) = text_before_quote(&data[begin..])?;
            (begin, Choice::of_text(text_bytes), begin + end + 1)
        }
        _ => {
            let found = CHOICE_DELTA.find(data)?;
            let begin = found + CHOICE_DELTA.needle().len();
            let (choice, length) = delta_of_text(&data[begin..])?;
            (found, choice, begin + length)
        }
    };
    // Another choice, log probabilities and token ids have brackets, which open behind it or close before it.
    let is_only = memchr2(b'{', b'[', &data[behind..]).is_none()
        && memrchr2(b'}', b']', &data[..begin]).is_none();
    is_only.then_some(choice)
}

/// What a delta has of text, and the position behind it. It starts behind its brace. `None` if it has more than texts.
fn delta_of_text(delta: &[u8]) -> Option<(Choice, usize)> {
    let mut choice = Choice::default();
    let mut at = 0;
    loop {
        at += delta.get(at..)?.starts_with(b"\"").then_some(1)?;
        let is_quote = |byte: &u8| *byte == b'"';
        let name = &delta[at..at + delta[at..].iter().position(is_quote)?];
        at += name.len();
        at += delta[at..].starts_with(b"\":").then_some(2)?;
        match (name, *delta.get(at)?) {
            (_, b'n') => at += delta[at..].starts_with(b"null").then_some(4)?,
            (
                b"content" | b"reasoning_content" | b"reasoning" | b"role" | b"text" | b"thinking"
                | b"partial_json" | b"type",
                b'"',
            ) => {
                let (text_bytes, end) = text_before_quote(&delta[at + 1..])?;
                if !matches!(name, b"role" | b"type") {
                    choice.text_bytes += text_bytes as u64;
                    choice.is_empty |= name == b"content" && text_bytes == 0;
                }
                at += end + 2;
            }
            _ => return None,
        }
        at += 1;
        match *delta.get(at - 1)? {
            b',' => {}
            b'}' => return Some((choice, at)),
            _ => return None,
        }
    }
}

/// The bytes of a text up to the quote that ends it, an escape counted as what it stands for, and the position of that quote.
pub(in crate::relay) fn text_before_quote(text: &[u8]) -> Option<(usize, usize)> {
    let (mut at, mut escaped) = (0, 0);
    loop {
        at += plain_string(text.get(at..)?)?;
        if text[at] == b'"' {
            return Some((at - escaped, at));
        }
        // Of six bytes, most are one of a script of three bytes a letter.
        let (length, saved) = match text.get(at + 1)? {
            b'u' => (6, 3),
            _ => (2, 1),
        };
        at += length;
        escaped += saved;
    }
}

fn of_response_event(data: &[u8]) -> Option<Choice> {
    DELTA.find(data)?;
    let Some(found) = EVENT_DELTA.find(data) else {
        return Some(Choice::default());
    };
    let begin = found + EVENT_DELTA.needle().len();
    let Some((text_bytes, end)) = text_before_quote(&data[begin..]) else {
        return Some(Choice::of_text(data.len() - begin));
    };
    let mut choice = Choice {
        text_bytes: text_bytes as u64,
        ..Choice::default()
    };
    // Log probabilities have braces.
    if memchr(b'{', &data[begin + end..]).is_some()
        && let Some(mut scan) = Scan::<true>::of_bytes(data)
    {
        scan.each_member(|scan, name| match (&*name, scan.first_byte()?) {
            ("logprobs", b'[') => {
                choice.listed = elements(scan)?;
                Some(())
            }
            _ => scan.value().map(drop),
        });
    }
    Some(choice)
}

fn of_message_event(data: &[u8]) -> Option<Choice> {
    BLOCK_DELTA.find(data)?;
    if let Some(found) = CHOICE_DELTA.find(data)
        && let Some((choice, _)) = delta_of_text(&data[found + CHOICE_DELTA.needle().len()..])
    {
        return Some(Choice {
            is_empty: false,
            ..choice
        });
    }
    let mut choice = Choice::default();
    if let Some(mut scan) = Scan::<true>::of_bytes(data) {
        scan.each_member(|scan, name| match (&*name, scan.first_byte()?) {
            ("delta", b'{') => scan.each_member(|scan, name| {
                choice.text_bytes += text_of_member(scan, &name, LEVELS_MAX)?;
                Some(())
            }),
            _ => scan.value().map(drop),
        });
    }
    Some(choice)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn total(api: Api, events: &str) -> u64 {
        let mut count = TokenCount::default();
        count.add(api, events.as_bytes());
        count.total(4.0)
    }

    fn check(api: Api, events: &str, expected: u64) {
        assert_eq!(total(api, events), expected, "{events}");
    }

    fn event(choice: &Value) -> String {
        let chunk = json!({"id": "x", "choices": [choice]});
        // As engines write it, without spaces, and as others may.
        format!("data: {chunk}\n\n")
    }

    #[test]
    fn an_answer_that_ended_at_its_limit_says_so() {
        let is_at_limit = |reason: &str| {
            let mut count = TokenCount::default();
            let choice = json!({"index": 0, "delta": {"content": "a"}, "finish_reason": reason});
            count.add(Api::Chat, event(&choice).as_bytes());
            count.is_at_limit
        };
        assert!(is_at_limit("length"));
        assert!(!is_at_limit("stop"));
    }

    #[test]
    fn an_event_of_usual_length_is_one_token() {
        let role =
            "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
        let token =
            "data: {\"choices\":[{\"delta\":{\"content\":\"a\"},\"finish_reason\":null}]}\n\n";
        let done = "data: [DONE]\n\n";
        check(Api::Chat, &format!("{role}{token}{token}{done}"), 2);
        check(Api::Chat, role, 0);
        check(Api::Chat, token, 1);
        check(Api::Chat, "data: {\"choices\":[],\"usage\":{}}\n\n", 0);
        check(Api::Chat, done, 0);
        check(Api::Chat, ": ping\n\n", 0);
        for delta in [
            json!({"role": null, "content": "Hello", "reasoning_content": null, "tool_calls": null}),
            json!({"reasoning_content": " then"}),
            json!({"content": "\u{4e2d}\n"}),
            json!({"content": null}),
            json!({}),
            json!({"tool_calls": [{"index": 0, "id": "chatcmpl-tool-0123456789", "function": {"name": "search"}}]}),
        ] {
            check(Api::Chat, &event(&json!({"index": 0, "delta": delta})), 1);
        }
        // Text is no event.
        check(Api::Completions, "data: {\"text\":\"data: \"}\n\n", 1);
        let text = "data: {\"choices\":[{\"text\":\"a\"}]}\n\n";
        check(Api::Completions, &format!("{text}{text}{done}"), 2);
        let delta = "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"a\"}\n\n";
        check(Api::Responses, delta, 1);
        check(
            Api::Responses,
            "event: response.created\ndata: {\"response\":{}}\n\n",
            0,
        );
        let delta = "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\"Hi\"}}\n\n";
        check(Api::Messages, delta, 1);
        check(Api::Other, "data: anything\n\n", 1);
    }

    #[test]
    fn an_event_of_much_text_has_as_many_tokens_as_its_text() {
        let text = "word".repeat(100);
        let calls = json!([{"index": 0, "function": {"arguments": text}}]);
        for delta in [
            json!({"content": text}),
            json!({"content": text.replace("word", "\"o\\\n")}),
            json!({"content": "", "reasoning": text}),
            json!({"role": "assistant", "refusal": text}),
            json!({"tool_calls": calls}),
            json!({"content": &text[..200], "reasoning_content": &text[200..]}),
        ] {
            let event = event(&json!({"index": 0, "delta": delta, "logprobs": null}));
            check(Api::Chat, &event.repeat(3), 300);
        }
        let completion = event(&json!({"text": text, "index": 0}));
        check(Api::Completions, &completion, 100);
        let two = json!({"choices": [{"text": text}, {"text": text}]});
        check(Api::Completions, &format!("data:{two}\n\n"), 200);
        let delta = json!({"type": "response.output_text.delta", "delta": text, "logprobs": []});
        check(Api::Responses, &format!("data: {delta}\n\n"), 100);
        let delta = json!({"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": text}});
        check(Api::Messages, &format!("data: {delta}\n\n"), 100);
        let spaced = event(&json!({"delta": {"content": text}})).replace("\":", "\" : ");
        check(Api::Chat, &spaced, 100);
    }

    #[test]
    fn an_event_that_lists_its_tokens_has_that_many() {
        let tokens: Vec<u32> = (0..100).collect();
        let logprobs: Vec<Value> = tokens
            .iter()
            .map(|id| json!({"token": "a", "top_logprobs": [{"token": id}]}))
            .collect();
        for choice in [
            json!({"delta": {"content": "a"}, "token_ids": tokens}),
            json!({"delta": {"content": "a"}, "logprobs": {"content": logprobs}}),
            json!({"text": "a", "token_ids": tokens}),
            json!({"text": "a", "logprobs": {"tokens": tokens, "top_logprobs": logprobs}}),
        ] {
            check(Api::Completions, &event(&choice), 100);
            check(Api::Chat, &event(&choice).repeat(2), 200);
        }
        let delta =
            json!({"type": "response.output_text.delta", "delta": "a", "logprobs": logprobs});
        check(Api::Responses, &format!("data: {delta}\n\n"), 100);
    }

    #[test]
    fn an_event_that_passes_in_pieces_counts_once() {
        let event = event(&json!({"delta": {"content": "word".repeat(1_000)}}));
        let mut count = TokenCount::default();
        for piece in event.as_bytes().chunks(900) {
            count.add(Api::Chat, piece);
        }
        assert!((500..1_200).contains(&count.total(4.0)), "{count:?}");
    }

    #[test]
    fn functions_within_functions_are_not_followed() {
        let deep = format!("{}1{}", "{\"function\":".repeat(90_000), "}".repeat(90_000));
        let event =
            format!("data: {{\"choices\":[{{\"delta\":{{\"tool_calls\":[{deep}]}}}}]}}\n\n");
        check(Api::Chat, &event, 1);
    }
}
