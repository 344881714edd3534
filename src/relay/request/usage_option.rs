//! Streams report usage only if they are asked to (`stream_options.include_usage`). The router asks where the client did
//! not, and takes usage that the client has not asked for out of what it gets. Pure.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::LazyLock;

use bytes::Bytes;
use memchr::memmem::{self, Finder};
use serde_json::{Map, Value};

use super::body_edit::Edit;
use crate::http::sse;
use crate::json_scan::Scan;
use crate::prompt::{Api, PeekedBody};
use crate::relay::answer::splice::Splice;

const NAME: &str = "stream_options";
const AT_THE_END: &str = "include_usage";
const IN_EACH: &str = "continuous_usage_stats";

/// Usage in a stream that its client has not asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnaskedUsage {
    /// The event at the end that has nothing else.
    pub event: bool,
    /// The usage in each event.
    pub of_each: bool,
}

impl UnaskedUsage {
    pub(in crate::relay) fn is_any(self) -> bool {
        self.event || self.of_each
    }
}

/// The edit that asks for usage, and what of it the client has not asked for. `None` if the answer has it anyway, or if the body
/// is not as engines accept it. Where events may have several tokens each, the usage of each is asked for: a stream that its
/// client leaves has no other number.
pub(in crate::relay) fn asking(
    api: Api,
    body: &[u8],
    peek: &PeekedBody<'_>,
) -> Option<(Edit, UnaskedUsage)> {
    if !peek.is_stream || !api.has_choices() {
        return None;
    }
    let own = match peek.stream_options {
        None => None,
        Some(options) => serde_json::from_str::<Option<Map<String, Value>>>(options).ok()?,
    };
    let asks_for = |name| own.as_ref().and_then(|own| own.get(name)) == Some(&Value::Bool(true));
    let has_event = asks_for(AT_THE_END);
    let has_of_each = asks_for(IN_EACH);
    if has_event && (has_of_each || !peek.has_stream_interval) {
        return None;
    }
    let unasked = UnaskedUsage {
        event: !has_event,
        // Engines have it only with that at the end.
        of_each: !has_event && has_of_each || peek.has_stream_interval,
    };
    let mut asked = own.unwrap_or_default();
    asked.insert(AT_THE_END.to_owned(), Value::Bool(true));
    if peek.has_stream_interval {
        asked.insert(IN_EACH.to_owned(), Value::Bool(true));
    }
    let text = Value::from(asked).to_string();
    let edit = match peek.stream_options {
        None => Edit::last_field(body, NAME, &text)?,
        Some(options) => Edit::of_value(body, options, text)?,
    };
    Some((edit, unasked))
}

static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"usage\""));

/// Whole events of a stream without usage that the client has not asked for.
pub(in crate::relay) fn without_usage(events: Bytes, unasked: UnaskedUsage) -> Bytes {
    if USAGE.find(&events).is_none() {
        return events;
    }
    let mut kept = Splice::new(&events);
    let mut position = 0;
    while position < events.len() {
        let rest = &events[position..];
        let event = &rest[..sse::event_end(rest)];
        let left_out = match usage_of(event) {
            Some(Found::Alone) if unasked.event => 0..event.len(),
            Some(Found::Member(range)) if unasked.of_each => range,
            _ => 0..0,
        };
        if !left_out.is_empty() {
            kept.put(position + left_out.start..position + left_out.end, b"");
        }
        position += event.len();
    }
    let changed = kept.finish(position);
    changed.unwrap_or(events)
}

/// The usage in an event.
enum Found {
    /// The event has usage and an empty list of choices.
    Alone,
    /// Among choices, with the comma beside it.
    Member(Range<usize>),
}

fn usage_of(event: &[u8]) -> Option<Found> {
    let field = memmem::find(event, b"data:").filter(|at| *at == 0 || event[at - 1] == b'\n')?;
    let begin = field + b"data:".len();
    let line = event[begin..].split(|byte| *byte == b'\n').next()?;
    let begin = begin + (line.len() - line.trim_ascii_start().len());
    let json = line.trim_ascii();
    let mut scan = Scan::<true>::of_bytes(json)?;
    // Where a part of the text is.
    let at = |part: &str| part.as_ptr().addr() - json.as_ptr().addr();
    let (mut is_alone, mut member) = (None, None);
    scan.each_member(|scan, name| {
        let value = scan.value()?;
        match name {
            Cow::Borrowed("choices") => {
                is_alone = Some(value[1..].trim_ascii_start().starts_with(']'));
            }
            // It is cut out where its name is, which a name with escapes does not say.
            Cow::Borrowed(name @ "usage") if value.starts_with('{') => {
                member = Some(at(name) - 1..at(value) + value.len());
            }
            _ => {}
        }
        Some(())
    })?;
    let mut member = member?;
    if is_alone? {
        return Some(Found::Alone);
    }
    let before = json[..member.start].trim_ascii_end();
    match before.last() {
        Some(b',') => member.start = before.len() - 1,
        _ => {
            let after = json[member.end..].trim_ascii_start();
            let spaces = json.len() - member.end - after.len();
            member.end += spaces + usize::from(after.first() == Some(&b','));
        }
    }
    Some(Found::Member(begin + member.start..begin + member.end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt;
    use crate::relay::request::body_edit::applied;

    fn check(body: &str, expected: Option<&str>) {
        let body = Bytes::copy_from_slice(body.as_bytes());
        let peek = prompt::peek(Api::Chat, &body, 64).unwrap();
        let edit = asking(Api::Chat, &body, &peek);
        let asked = edit.map(|(edit, _)| applied(&body, &mut [edit]));
        let asked = asked.as_deref().map(|bytes| str::from_utf8(bytes).unwrap());
        assert_eq!(asked, expected);
    }

    #[test]
    fn usage_is_asked_for_where_the_client_did_not() {
        check(
            r#"{"stream":true,"n":1.0}"#,
            Some(r#"{"stream":true,"n":1.0,"stream_options":{"include_usage":true}}"#),
        );
        check(
            r#"{"stream_options": null ,"stream":true}"#,
            Some(r#"{"stream_options": {"include_usage":true} ,"stream":true}"#),
        );
        check(
            r#"{"stream":true,"stream_options":{"include_usage":false,"x":[1]}}"#,
            Some(r#"{"stream":true,"stream_options":{"include_usage":true,"x":[1]}}"#),
        );
        check(
            r#"{"stream":true,"stream_options":{"include_usage": true}}"#,
            None,
        );
        // The engine refuses it.
        check(r#"{"stream":true,"stream_options":7}"#, None);
        check(r#"{"n":1}"#, None);
        let peek = prompt::peek(Api::Responses, br#"{"stream":true}"#, 64).unwrap();
        assert_eq!(asking(Api::Responses, br#"{"stream":true}"#, &peek), None);
    }

    #[test]
    fn the_usage_of_each_event_is_asked_for_where_it_may_have_several_tokens() {
        let check = |fields: &str, options: Option<&str>, event, of_each| {
            let body = format!(r#"{{"stream":true{fields}}}"#);
            let body = Bytes::from(body);
            let peek = prompt::peek(Api::Completions, &body, 64).unwrap();
            let asked = asking(Api::Completions, &body, &peek);
            let unasked = asked.as_ref().map(|(_, unasked)| *unasked);
            let wanted = UnaskedUsage { event, of_each };
            assert_eq!(unasked, options.map(|_| wanted), "{fields}");
            if let (Some(options), Some((edit, _))) = (options, asked) {
                let asked = applied(&body, &mut [edit]);
                let asked: Value = serde_json::from_slice(&asked).unwrap();
                let expected: Value = serde_json::from_str(options).unwrap();
                assert_eq!(asked["stream_options"], expected, "{fields}");
            }
        };
        let at_the_end = r#"{"include_usage":true}"#;
        let both = r#"{"include_usage":true,"continuous_usage_stats":true}"#;
        check("", Some(at_the_end), true, false);
        check(r#","stream_interval":1"#, Some(at_the_end), true, false);
        check(r#","stream_interval":100"#, Some(both), true, true);
        check(r#","stream_interval":"100""#, Some(both), true, true);
        let asked_for = |options: &str, interval: &str| {
            format!(r#","stream_options":{options},"stream_interval":{interval}"#)
        };
        check(&asked_for(at_the_end, "2"), Some(both), false, true);
        check(&asked_for(at_the_end, "null"), None, false, false);
        check(&asked_for(both, "2"), None, false, false);
        // Engines leave the usage of each out where that at the end is not asked for.
        let of_each = r#"{"continuous_usage_stats":true}"#;
        check(&asked_for(of_each, "1"), Some(both), true, true);
    }

    #[test]
    fn usage_that_was_not_asked_for_is_left_out_of_each_event() {
        let check = |unasked, events: &str, expected: &str| {
            let found = without_usage(Bytes::copy_from_slice(events.as_bytes()), unasked);
            assert_eq!(str::from_utf8(&found).unwrap(), expected);
        };
        let of_each = UnaskedUsage {
            event: false,
            of_each: true,
        };
        let both = UnaskedUsage {
            event: true,
            of_each: true,
        };
        let last = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":1}}\n\ndata: [DONE]\n\n";
        for (event, expected) in [
            (
                r#"{"choices":[{"a":{"usage":{}}}],"usage":{"x":{}}}"#,
                r#"{"choices":[{"a":{"usage":{}}}]}"#,
            ),
            (
                r#"{"choices":[1] , "usage" : {"x":1} , "y":2}"#,
                r#"{"choices":[1]  , "y":2}"#,
            ),
            (
                r#"{ "usage":{"x":1}, "choices":[1]}"#,
                r#"{  "choices":[1]}"#,
            ),
            (
                r#"{"choices":[1],"usage":null}"#,
                r#"{"choices":[1],"usage":null}"#,
            ),
            (r#"{"choices":[1],"usage":{"#, r#"{"choices":[1],"usage":{"#),
        ] {
            let events = format!(": ping\n\ndata: {event}\n\n{last}");
            check(
                of_each,
                &events,
                &format!(": ping\n\ndata: {expected}\n\n{last}"),
            );
            check(
                both,
                &events,
                &format!(": ping\n\ndata: {expected}\n\ndata: [DONE]\n\n"),
            );
            let lines = events.replace('\n', "\r\n");
            let expected = format!(": ping\n\ndata: {expected}\n\n{last}").replace('\n', "\r\n");
            check(of_each, &lines, &expected);
        }
    }

    #[test]
    fn only_the_event_with_usage_alone_is_left_out() {
        let token = "data: {\"choices\":[{\"delta\":{\"content\":\"\\\"usage\\\": \"}}]}\n\n";
        let continuous = "data: {\"choices\":[{}],\"usage\":{\"prompt_tokens\":1}}\n\n";
        let null = "data: {\"choices\":[],\"usage\":null}\n\n";
        let usage = "data: {\"id\":\"x\",\"choices\":[],\"usage\":{\"prompt_tokens\":1}}\n\n";
        let done = "data: [DONE]\n\n";
        let check = |events: &str, expected: &str| {
            let unasked = UnaskedUsage {
                event: true,
                of_each: false,
            };
            let found = without_usage(Bytes::copy_from_slice(events.as_bytes()), unasked);
            assert_eq!(str::from_utf8(&found).unwrap(), expected);
        };
        let all = [token, continuous, null, usage, done].concat();
        check(&all, &[token, continuous, null, done].concat());
        check(usage, "");
        check(
            &all.replace('\n', "\r\n"),
            &[token, continuous, null, done]
                .concat()
                .replace('\n', "\r\n"),
        );
        check(": ping\n\n", ": ping\n\n");
        check("data: \"usage\":", "data: \"usage\":");
    }
}
