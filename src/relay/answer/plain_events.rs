//! Recognises the events of a stream that differ in their text alone from one that was looked at, as nearly all do: each has a
//! token, and no usage, error or end. Pure.

use std::ops::Range;

use memchr::{memchr, memmem};

use super::engine_answer::{Finish, last_finish};
use super::first_token_gate::has_engine_error;
use super::token_count::{Plain, TokenCount, text_before_quote};
use super::usage_reader::UsageReader;
use crate::prompt::Api;

/// What ends an event.
const BLANK: &[u8] = b"\n\n";
/// A longer event is looked at each time.
const EVENT_BYTES_MAX: usize = 4 << 10;
/// Events of a stream whose chunks have different ids are not alike: after so many that were remembered in vain, no more are.
const ATTEMPTS: u8 = 8;

/// The members that have the text of an answer.
const TEXTS: [&[u8]; 6] = [
    b"\"content\":\"",
    b"\"text\":\"",
    b"\"reasoning_content\":\"",
    b"\"reasoning\":\"",
    b"\"thinking\":\"",
    b"\"partial_json\":\"",
];

#[derive(Debug)]
pub(in crate::relay) struct PlainEvents {
    /// The event that was looked at, without its text.
    like: Vec<u8>,
    /// Where its text was.
    text_at: usize,
    attempts: u8,
    /// The last piece ended with an event.
    is_between_events: bool,
}

impl Default for PlainEvents {
    fn default() -> Self {
        Self {
            like: Vec::new(),
            text_at: 0,
            attempts: ATTEMPTS,
            is_between_events: true,
        }
    }
}

impl PlainEvents {
    /// Takes the next events of a stream. Those behind the plain ones have to be looked at.
    pub(in crate::relay) fn take(&mut self, api: Api, events: &[u8]) -> Plain {
        let mut plain = Plain::default();
        let is_start = self.is_between_events;
        self.is_between_events = events.is_empty() && is_start || events.ends_with(BLANK);
        if !is_start || events.is_empty() {
            return plain;
        }
        while let Some((text_bytes, length)) = self.first_of(&events[plain.length..]) {
            plain.events += 1;
            plain.text_bytes += text_bytes as u64;
            plain.length += length;
        }
        if plain.events > 0 {
            self.attempts = ATTEMPTS;
        } else if self.attempts > 0 && self.is_between_events {
            self.attempts -= 1;
            self.remember(api, events);
        }
        plain
    }

    /// The bytes of text and all bytes of the plain event with which some events begin.
    fn first_of(&self, events: &[u8]) -> Option<(usize, usize)> {
        let (before, behind) = self.like.split_at(self.text_at);
        if behind.is_empty() {
            return None;
        }
        let text = events.strip_prefix(before)?;
        let (text_bytes, end) = text_before_quote(text)?;
        // A line break would end the event. Text that is empty is what engines send before they compute.
        let is_plain = text_bytes > 0
            && text[end..].starts_with(behind)
            && memchr(b'\n', &text[..end]).is_none();
        is_plain.then_some((text_bytes, before.len() + end + behind.len()))
    }

    /// Looks at the last of some events.
    fn remember(&mut self, api: Api, events: &[u8]) {
        let before = &events[..events.len() - BLANK.len()];
        let start = memmem::rfind(before, BLANK).map_or(0, |blank| blank + BLANK.len());
        let event = &events[start..];
        if let Some(text) = text_of_plain(api, event) {
            self.text_at = text.start;
            self.like.clear();
            self.like.extend_from_slice(&event[..text.start]);
            self.like.extend_from_slice(&event[text.end..]);
        }
    }
}

/// Where the text is in an event that has nothing but a token.
fn text_of_plain(api: Api, event: &[u8]) -> Option<Range<usize>> {
    let finish = match api {
        Api::Chat | Api::Completions => Some(Finish::None),
        Api::Messages => None,
        _ => return None,
    };
    if event.len() > EVENT_BYTES_MAX
        || last_finish(api, event).map(|(_, finish)| finish) != finish
        || has_engine_error(api, event)
        || UsageReader::new(api).on_events(event).is_some()
    {
        return None;
    }
    let mut count = TokenCount::default();
    count.add(api, event);
    let of_one_text = count.only_text()?;
    TEXTS.iter().find_map(|name| {
        let start = memmem::find(event, name)? + name.len();
        let (text_bytes, length) = text_before_quote(&event[start..])?;
        // All of its text is this one.
        (text_bytes as u64 == of_one_text).then_some(start..start + length)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ROLE: &str = "data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n";

    fn token(text: &str) -> String {
        format!(
            "data: {{\"id\":\"c\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}},\"finish_reason\":null}}]}}\n\n"
        )
    }

    fn taken(api: Api, pieces: &[&str]) -> Vec<u64> {
        let mut plain = PlainEvents::default();
        let take = |piece: &&str| plain.take(api, piece.as_bytes()).events;
        pieces.iter().map(take).collect()
    }

    #[test]
    fn events_that_differ_in_their_text_alone_are_plain() {
        let (first, second, escaped) = (token("Hello"), token(" world"), token(" \\\"a\\\"\\n"));
        let two = format!("{second}{escaped}");
        assert_eq!(
            taken(Api::Chat, &[ROLE, &first, &second, &escaped, &two]),
            [0, 0, 1, 1, 2]
        );
        let begin = format!("{ROLE}{first}");
        assert_eq!(taken(Api::Chat, &[&begin, &two]), [0, 2]);
        let done = format!("{second}data: [DONE]\n\n");
        let mut plain = PlainEvents::default();
        plain.take(Api::Chat, first.as_bytes());
        let begin = plain.take(Api::Chat, done.as_bytes());
        let expected = Plain {
            events: 1,
            text_bytes: 6,
            length: second.len(),
        };
        assert_eq!(begin, expected);
        let message = "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"Hi\"}}\n\n";
        assert_eq!(taken(Api::Messages, &[message, message]), [0, 1]);
        let text =
            "data: {\"choices\":[{\"text\":\"a\",\"finish_reason\":null}],\"usage\":null}\n\n";
        assert_eq!(taken(Api::Completions, &[text, text]), [0, 1]);
    }

    #[test]
    fn an_event_with_more_than_a_token_is_looked_at() {
        let first = token("Hello");
        for other in [
            token(""),
            token("a").replace("null", "\"stop\""),
            token("a").replace("}]}", "}],\"usage\":{\"completion_tokens\":1}}"),
            token("a").replace("\"id\"", "\"error\":{\"code\":500},\"id\""),
            token("a").replace("\"index\"", "\"token_ids\":[1,2],\"index\""),
            token("a").replace("\"content\"", "\"reasoning\":\"b\",\"content\""),
            token("a\n\nb"),
            token("a").replace("\n\n", "\r\n\r\n"),
            "data: [DONE]\n\n".to_owned(),
        ] {
            let taken = taken(Api::Chat, &[&first, &other, &other]);
            assert_eq!(taken, [0, 0, 0], "{other}");
        }
        // The end of an event that passed in pieces may look like one.
        let piece = "data: {\"choices\":[{\"delta\":{\"content\":\"a";
        assert_eq!(taken(Api::Chat, &[&first, piece, &first]), [0, 0, 0]);
    }

    #[test]
    fn a_stream_whose_events_are_never_alike_is_left_alone() {
        let mut plain = PlainEvents::default();
        for id in 0..100 {
            let event = token("a").replace("\"c\"", &id.to_string());
            plain.take(Api::Chat, event.as_bytes());
        }
        assert_eq!(plain.attempts, 0);
        let event = token("a").replace("\"c\"", "99");
        assert_eq!(plain.take(Api::Chat, event.as_bytes()).events, 0);
    }

    /// What all that look at events find in a stream.
    fn found(api: Api, pieces: &[String], is_plain: bool) -> (u64, Option<u64>, bool) {
        let (mut plain, mut count) = (PlainEvents::default(), TokenCount::default());
        let (mut usage, mut has_error) = (UsageReader::new(api), false);
        for piece in pieces {
            let begin = if is_plain {
                plain.take(api, piece.as_bytes())
            } else {
                Plain::default()
            };
            count.add_plain(begin);
            let rest = &piece.as_bytes()[begin.length..];
            count.add(api, rest);
            usage.on_events(rest);
            has_error |= has_engine_error(api, rest);
        }
        let output = usage.usage().map(|usage| usage.output_tokens);
        (count.total(4.0), output, has_error)
    }

    proptest! {
        #[test]
        fn what_is_found_in_a_stream_is_the_same_with_and_without_plain_events(
            parts in prop::collection::vec((0_u8..9, "[a-z\"\\\\\n\u{e9}{}\\[\\]:,]{0,12}", any::<bool>()), 1..40),
            api in prop::sample::select(vec![Api::Chat, Api::Completions, Api::Messages]),
        ) {
            let mut pieces = vec![String::new()];
            for (kind, text, begins) in parts {
                let quoted = serde_json::to_string(&text).unwrap();
                let quoted = &quoted[1..quoted.len() - 1];
                let event = match kind {
                    0 => token(quoted).replace("null", "\"stop\""),
                    1 => token(quoted).replace("}]}", "}],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":3}}"),
                    2 => "data: {\"error\":{\"code\":500}}\n\n".to_owned(),
                    3 => token(quoted).replace("content", "reasoning"),
                    4 => format!("data: {{\"choices\":[{{\"text\":\"{quoted}\",\"finish_reason\":null}}]}}\n\n"),
                    5 => format!("event: content_block_delta\ndata: {{\"type\":\"content_block_delta\",\"delta\":{{\"text\":\"{quoted}\"}}}}\n\n"),
                    _ => token(quoted),
                };
                match pieces.last_mut() {
                    Some(last) if !begins => last.push_str(&event),
                    _ => pieces.push(event),
                }
            }
            prop_assert_eq!(found(api, &pieces, true), found(api, &pieces, false));
        }
    }
}
