//! The beginning of a stream whose prompt another worker has computed: whether a token has come, so that the
//! blocks were fetched. An engine begins such a stream before it has tried, and says in it that it could
//! not: until the first token nothing of it may pass. Pure.

use bytes::Bytes;
use memchr::memmem;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::engine_answer;
use crate::http::sse::Aligner;
use crate::prompt::Api;

/// A stream that has said so much before its first token is passed on all the same.
const BYTES_MAX: usize = 1 << 20;

/// What is known of a stream by now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// Nothing that an engine could not have said before it had the prompt.
    Nothing,
    /// A token, or a proper end without any.
    Token,
    /// The engine says that it failed.
    Error,
}

/// Watches one stream until its first token.
#[derive(Debug)]
pub(super) struct Opening {
    api: Api,
    aligner: Aligner,
    bytes: usize,
}

impl Opening {
    pub(super) fn new(api: Api) -> Self {
        Self {
            api,
            aligner: Aligner::new(BYTES_MAX),
            bytes: 0,
        }
    }

    /// Takes what has come, in order and cut anyhow.
    pub(super) fn on_data(&mut self, data: &Bytes) -> Seen {
        self.bytes += data.len();
        let events = self.aligner.push(data.clone());
        let seen = self.first_in(&events);
        match seen {
            Seen::Nothing if self.bytes > BYTES_MAX => Seen::Token,
            seen => seen,
        }
    }

    fn first_in(&self, events: &[u8]) -> Seen {
        let mut start = 0;
        while start < events.len() {
            let end = memmem::find(&events[start..], b"\n\n")
                .map_or(events.len(), |blank| start + blank + 2);
            let seen = self.of_event(&events[start..end]);
            if seen != Seen::Nothing {
                return seen;
            }
            start = end;
        }
        Seen::Nothing
    }

    fn of_event(&self, event: &[u8]) -> Seen {
        let (name, data) = parts(event);
        let is_error = match self.api {
            Api::Responses => matches!(name, b"error" | b"response.failed"),
            _ => false,
        };
        if is_error || tells_error(data) {
            return Seen::Error;
        }
        let is_end =
            data == b"[DONE]" || matches!(name, b"response.completed" | b"response.incomplete");
        if is_end || (!data.is_empty() && engine_answer::is_token(self.api, event)) {
            return Seen::Token;
        }
        Seen::Nothing
    }
}

/// An event's name and its data, which engines write in one line.
fn parts(event: &[u8]) -> (&[u8], &[u8]) {
    let (mut name, mut data): (&[u8], &[u8]) = (b"", b"");
    for line in event.split(|byte| *byte == b'\n') {
        if let Some(text) = line.strip_prefix(b"event:") {
            name = text.trim_ascii();
        } else if let Some(text) = line.strip_prefix(b"data:") {
            data = text.trim_ascii();
        }
    }
    (name, data)
}

/// Whether data is an object that says `error` of itself, and not of something in it.
fn tells_error(data: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Wire {
        #[serde(default)]
        error: Option<IgnoredAny>,
    }
    memmem::find(data, b"\"error\"").is_some()
        && serde_json::from_slice::<Wire>(data).is_ok_and(|wire| wire.error.is_some())
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

    /// What is seen of a stream in one piece, and in two, wherever it is cut.
    fn check(api: Api, events: &[&str], expected: Seen) {
        let whole = events.concat();
        for cut in 0..=whole.len() {
            let mut opening = Opening::new(api);
            let mut seen = Seen::Nothing;
            for piece in [&whole[..cut], &whole[cut..]] {
                if seen == Seen::Nothing {
                    seen = opening.on_data(&Bytes::copy_from_slice(piece.as_bytes()));
                }
            }
            assert_eq!(seen, expected, "{whole} cut at {cut}");
        }
    }

    #[test]
    fn a_token_is_told_from_what_is_said_before_it_and_from_a_failure() {
        check(Api::Chat, &[ROLE], Seen::Nothing);
        check(Api::Chat, &[": ping\n\n", ROLE], Seen::Nothing);
        check(Api::Chat, &[ROLE, TOKEN], Seen::Token);
        check(Api::Chat, &[ROLE, ERROR, DONE], Seen::Error);
        check(Api::Chat, &[ROLE, TOKEN, ERROR], Seen::Token);
        check(Api::Chat, &[ROLE, DONE], Seen::Token);
        check(Api::Completions, &[ERROR, DONE], Seen::Error);
        check(
            Api::Completions,
            &["data: {\"choices\":[{\"text\":\"a\"}]}\n\n"],
            Seen::Token,
        );
        check(Api::Responses, &[CREATED], Seen::Nothing);
        check(Api::Responses, &[CREATED, DELTA], Seen::Token);
        check(
            Api::Responses,
            &[CREATED, "event: response.failed\ndata: {}\n\n"],
            Seen::Error,
        );
        check(
            Api::Responses,
            &[CREATED, "event: response.completed\ndata: {}\n\n"],
            Seen::Token,
        );
    }

    #[test]
    fn a_stream_that_says_too_much_is_not_held_for_ever() {
        let mut opening = Opening::new(Api::Responses);
        let long = Bytes::from(vec![b' '; BYTES_MAX]);
        assert_eq!(opening.on_data(&long), Seen::Nothing);
        assert_eq!(opening.on_data(&long), Seen::Token);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(pieces in proptest::collection::vec("(data:|event:|\n|\\{\"error\":1\\}|é| ){0,6}", 0..6)) {
            let mut opening = Opening::new(Api::Chat);
            for piece in pieces {
                let _ = opening.on_data(&Bytes::from(piece));
            }
        }
    }
}
