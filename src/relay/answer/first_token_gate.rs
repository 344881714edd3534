//! First-token gate: decides when a stream may go to the client. An engine may begin it with comments and a role before it has
//! computed anything, and report within it what went wrong, such as KV blocks that it could not fetch. Its first token proves
//! that all is well. Pure.

use std::borrow::Cow;
use std::sync::LazyLock;

use bytes::Bytes;
use memchr::memmem::{self, Finder};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::engine_answer::{self, Finish};
use crate::http::sse::{self, Aligner};
use crate::prompt::Api;

static ERROR: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"error\""));

static CHOICES: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"choices\":"));

/// A stream without a token in its first megabyte is passed on all the same.
const BYTES_MAX: usize = 1 << 20;

/// What a stream has shown so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::relay) enum Verdict {
    /// Nothing that an engine could not send before it has the prompt.
    Undecided,
    /// A token, or a proper end without tokens.
    Token,
    /// The engine gave the answer up before its first token.
    GivenUp,
    /// The engine reports an error.
    Error,
    /// The engine reports an error, and says that the request is at fault.
    Refusal,
}

/// Watches one stream until its first token.
#[derive(Debug)]
pub(in crate::relay) struct FirstTokenGate {
    api: Api,
    aligner: Aligner,
    bytes: usize,
    /// The last choice has not ended.
    is_unfinished: bool,
    /// There was something of an answer, be it only its role.
    pub(in crate::relay) has_begun: bool,
}

impl FirstTokenGate {
    pub(in crate::relay) fn new(api: Api) -> Self {
        Self {
            api,
            aligner: Aligner::new(BYTES_MAX),
            bytes: 0,
            is_unfinished: false,
            has_begun: false,
        }
    }

    /// The answer is given up if it ends without a finish reason, also if its chunks have no place for one.
    pub(in crate::relay) fn require_finish(&mut self) {
        self.is_unfinished = true;
    }

    /// Takes the next piece of the stream, cut anywhere.
    pub(in crate::relay) fn on_data(&mut self, data: &Bytes) -> Verdict {
        self.bytes += data.len();
        let events = self.aligner.push(data.clone());
        match self.first_in(&events) {
            Verdict::Undecided if self.bytes > BYTES_MAX => Verdict::Token,
            seen => seen,
        }
    }

    fn first_in(&mut self, events: &[u8]) -> Verdict {
        let mut start = 0;
        while start < events.len() {
            let end = sse::BLANK
                .find(&events[start..])
                .map_or(events.len(), |blank| start + blank + 2);
            let seen = self.verdict_of(&events[start..end]);
            if seen != Verdict::Undecided {
                return seen;
            }
            start = end;
        }
        Verdict::Undecided
    }

    fn verdict_of(&mut self, event: &[u8]) -> Verdict {
        let (name, data) = parts(event);
        let is_error = match self.api {
            Api::Responses => matches!(name, b"error" | b"response.failed"),
            Api::Messages => name == b"error",
            _ => false,
        };
        if let Some(error) = error_of(data).or(is_error.then_some(Verdict::Error)) {
            return error;
        }
        match engine_answer::last_finish(self.api, event) {
            Some((_, Finish::Abort)) => return Verdict::GivenUp,
            Some((_, finish)) => self.is_unfinished = finish == Finish::None,
            None => {}
        }
        let is_end = data == b"[DONE]"
            || matches!(
                name,
                b"response.completed" | b"response.incomplete" | b"message_stop"
            );
        self.has_begun = self.has_begun || begins_answer(event);
        if is_end && (self.is_unfinished || !self.has_begun) {
            return Verdict::GivenUp;
        }
        let may_be_usage_alone = self.is_unfinished || !self.has_begun;
        let has_token = !data.is_empty()
            && engine_answer::is_token(self.api, event)
            && !(may_be_usage_alone && has_no_choice(data));
        if is_end || has_token {
            return Verdict::Token;
        }
        Verdict::Undecided
    }
}

/// Whether there is something of an answer in some events: anything but comments, usage and the marks of its end. An
/// engine that ends a stream without it has computed nothing.
pub(in crate::relay) fn begins_answer(events: &[u8]) -> bool {
    const MESSAGE_STOP: &[u8] = b"\"message_stop\"";
    let mut data = sse::lines(events)
        .filter_map(|line| line.strip_prefix(b"data:"))
        .map(<[u8]>::trim_ascii);
    data.any(|data| {
        let is_stop = data.len() < 64 && memmem::find(data, MESSAGE_STOP).is_some();
        !data.is_empty() && data != b"[DONE]" && !is_stop && !has_no_choice(data)
    })
}

/// Whether a chunk has the usage and no choice.
fn has_no_choice(data: &[u8]) -> bool {
    CHOICES.find(data).is_some_and(|at| {
        let value = data[at + CHOICES.needle().len()..].trim_ascii_start();
        value.starts_with(b"[]")
    })
}

/// An event's name and data; engines write each on one line.
fn parts(event: &[u8]) -> (&[u8], &[u8]) {
    let (mut name, mut data): (&[u8], &[u8]) = (b"", b"");
    for line in sse::lines(event) {
        if let Some(text) = line.strip_prefix(b"event:") {
            name = text.trim_ascii();
        } else if let Some(text) = line.strip_prefix(b"data:") {
            data = text.trim_ascii();
        }
    }
    (name, data)
}

/// Whether some whole events of a stream have an error of the engine, which is not one of the request.
pub(in crate::relay) fn has_engine_error(api: Api, events: &[u8]) -> bool {
    errors_in(api, events).any(|error| error == Verdict::Error)
}

/// The errors and refusals of the engine in some whole events of a stream.
pub(in crate::relay) fn errors_in(api: Api, events: &[u8]) -> impl Iterator<Item = Verdict> {
    let may_have = !matches!(api, Api::Responses | Api::Other) && ERROR.find(events).is_some();
    let events = if may_have { events } else { &events[..0] };
    let data = sse::lines(events).filter_map(|line| line.strip_prefix(b"data:"));
    data.filter_map(|data| error_of(data.trim_ascii()))
}

/// An error or a refusal, if data is an object with a top-level `error` that is not null.
fn error_of(data: &[u8]) -> Option<Verdict> {
    #[derive(Deserialize)]
    struct Wire<'a> {
        #[serde(default, borrow)]
        error: Option<&'a RawValue>,
    }
    ERROR.find(data)?;
    let error = serde_json::from_slice::<Wire<'_>>(data).ok()?.error?;
    Some(verdict_on(error))
}

/// An error or a refusal: what the value of a chunk's `error` is.
pub(in crate::relay) fn verdict_on(error: &RawValue) -> Verdict {
    #[derive(Deserialize)]
    struct Coded {
        code: u16,
    }
    #[derive(Deserialize)]
    struct Typed<'a> {
        #[serde(borrow)]
        r#type: Cow<'a, str>,
    }
    let error = error.get();
    // Engines write the status as the code, and the type as OpenAI or as Python names it.
    let coded = serde_json::from_str::<Coded>(error);
    let typed = serde_json::from_str::<Typed<'_>>(error);
    let is_refusal = |text: &str| {
        let text = text.to_ascii_lowercase().replace('_', "");
        text.contains("invalidrequest") || text.contains("badrequest")
    };
    let is_refused = match coded {
        Ok(Coded { code }) => (400..500).contains(&code),
        Err(_) => typed.is_ok_and(|typed| is_refusal(&typed.r#type)),
    };
    if is_refused {
        Verdict::Refusal
    } else {
        Verdict::Error
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ROLE: &str =
        "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
    const TOKEN: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"an \\\"error\\\"\"}}]}\n\n";
    const ERROR: &str =
        "data: {\"error\":{\"message\":\"Internal server error\",\"code\":500}}\n\n";
    const DONE: &str = "data: [DONE]\n\n";
    const CREATED: &str = "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"error\":null}}\n\n";
    const DELTA: &str = "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"a\"}\n\n";

    /// The verdict on a stream in one piece, and in two, wherever it is cut.
    fn check(api: Api, events: &[&str], expected: Verdict) {
        let whole = events.concat();
        for cut in 0..=whole.len() {
            let mut gate = FirstTokenGate::new(api);
            let mut seen = Verdict::Undecided;
            for piece in [&whole[..cut], &whole[cut..]] {
                if seen == Verdict::Undecided {
                    seen = gate.on_data(&Bytes::copy_from_slice(piece.as_bytes()));
                }
            }
            assert_eq!(seen, expected, "{whole} cut at {cut}");
        }
    }

    #[test]
    fn a_token_is_distinguished_from_earlier_events_and_from_errors() {
        check(Api::Chat, &[ROLE], Verdict::Undecided);
        check(Api::Chat, &[": ping\n\n", ROLE], Verdict::Undecided);
        check(Api::Chat, &[ROLE, TOKEN], Verdict::Token);
        check(Api::Chat, &[ROLE, ERROR, DONE], Verdict::Error);
        check(Api::Chat, &[ROLE, TOKEN, ERROR], Verdict::Token);
        for refusal in [
            "data: {\"error\":{\"message\":\"too long\",\"code\":400}}\n\n",
            "data: {\"error\":{\"type\":\"invalid_request_error\",\"code\":\"context_length\"}}\n\n",
            "data: {\"error\":{\"type\":\"BadRequestError\",\"code\":null}}\n\n",
        ] {
            check(Api::Chat, &[ROLE, refusal], Verdict::Refusal);
        }
        for error in [
            "1",
            "\"no\"",
            "{\"code\":\"400\"}",
            "{\"code\":503,\"type\":\"BadRequest\"}",
        ] {
            let event = format!("data: {{\"error\":{error}}}\n\n");
            check(Api::Chat, &[&event], Verdict::Error);
        }
        check(Api::Chat, &[ROLE, DONE], Verdict::Token);
        check(Api::Completions, &[ERROR, DONE], Verdict::Error);
        check(
            Api::Completions,
            &["data: {\"choices\":[{\"text\":\"a\"}]}\n\n"],
            Verdict::Token,
        );
        check(Api::Responses, &[CREATED], Verdict::Undecided);
        check(Api::Responses, &[CREATED, DELTA], Verdict::Token);
        check(
            Api::Responses,
            &[CREATED, "event: response.failed\ndata: {}\n\n"],
            Verdict::Error,
        );
        check(
            Api::Responses,
            &[CREATED, "event: response.completed\ndata: {}\n\n"],
            Verdict::Token,
        );
    }

    #[test]
    fn a_stream_that_needs_a_finish_reason_is_given_up_without_one() {
        const USAGE: &str = "data: {\"choices\":[],\"usage\":{}}\n\n";
        for (events, expected) in [
            (&[ROLE, DONE][..], Verdict::GivenUp),
            (&[ROLE, USAGE, DONE], Verdict::GivenUp),
            (&[DONE], Verdict::GivenUp),
            (&[ROLE, TOKEN, DONE], Verdict::Token),
            (&[ROLE], Verdict::Undecided),
        ] {
            let mut gate = FirstTokenGate::new(Api::Chat);
            gate.require_finish();
            let seen = gate.on_data(&Bytes::from(events.concat()));
            assert_eq!(seen, expected, "{events:?}");
        }
    }

    #[test]
    fn a_stream_that_ends_before_it_has_begun_is_given_up() {
        const USAGE: &str = "data: {\"choices\":[],\"usage\":{}}\n\n";
        const STOP: &str = "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";
        for api in [Api::Chat, Api::Completions] {
            check(api, &[DONE], Verdict::GivenUp);
            check(api, &[": hi\n\n", DONE], Verdict::GivenUp);
            check(api, &[": hi\n", DONE], Verdict::GivenUp);
            check(api, &[USAGE, DONE], Verdict::GivenUp);
            check(api, &[USAGE], Verdict::Undecided);
            // Some engines say something of the prompt first.
            check(api, &[USAGE, TOKEN, DONE], Verdict::Token);
        }
        check(Api::Messages, &[STOP], Verdict::GivenUp);
        check(Api::Messages, &[DONE], Verdict::GivenUp);
        let begun = "event: message_start\ndata: {\"message\":{}}\n\n";
        check(Api::Messages, &[begun, STOP], Verdict::Token);
        // Lines that end in CR LF come as one event.
        let mut gate = FirstTokenGate::new(Api::Chat);
        let whole = [TOKEN, DONE].concat().replace('\n', "\r\n");
        assert_eq!(gate.on_data(&Bytes::from(whole)), Verdict::Token);
    }

    #[test]
    fn the_gate_says_whether_the_answer_has_begun() {
        const USAGE: &str = "data: {\"choices\":[],\"usage\":{}}\n\n";
        for (events, has_begun) in [
            (&[ROLE][..], true),
            (&[ROLE, TOKEN], true),
            (&[USAGE, TOKEN], true),
            (&[": hi\n\n"], false),
            (&[USAGE], false),
            (&[USAGE, DONE], false),
            (&[ERROR], false),
        ] {
            let mut gate = FirstTokenGate::new(Api::Chat);
            let _ = gate.on_data(&Bytes::from(events.concat()));
            assert_eq!(gate.has_begun, has_begun, "{events:?}");
        }
    }

    #[test]
    fn a_long_stream_without_a_token_is_passed_on() {
        let mut gate = FirstTokenGate::new(Api::Responses);
        let long = Bytes::from(vec![b' '; BYTES_MAX]);
        assert_eq!(gate.on_data(&long), Verdict::Undecided);
        assert_eq!(gate.on_data(&long), Verdict::Token);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(pieces in proptest::collection::vec("(data:|event:|\n|\\{\"error\":1\\}|é| ){0,6}", 0..6)) {
            let mut gate = FirstTokenGate::new(Api::Chat);
            for piece in pieces {
                let _ = gate.on_data(&Bytes::from(piece));
            }
        }
    }
}
