//! Reads off what passes: the first token, the gaps, the usage at the end. Changes no byte.

use std::sync::LazyLock;
use std::time::Instant;

use bytes::Bytes;
use hyper::StatusCode;
use memchr::memmem;
use serde::Deserialize;

use super::counted::{Counted, End};
use super::running::Running;
use crate::prompt::Api;

static USAGE: LazyLock<memmem::Finder<'static>> =
    LazyLock::new(|| memmem::Finder::new("\"usage\":"));
static NO_CONTENT: LazyLock<memmem::Finder<'static>> =
    LazyLock::new(|| memmem::Finder::new("\"content\":\"\""));
static DELTA: LazyLock<memmem::Finder<'static>> = LazyLock::new(|| memmem::Finder::new(".delta\""));

/// One answer's meter.
#[derive(Debug)]
pub(super) struct Meter {
    counted: Counted,
    status: StatusCode,
    running: Running,
    is_events: bool,
    has_token: bool,
    last: Instant,
    /// The last piece that told of usage.
    usage: Option<Bytes>,
}

impl Meter {
    pub(super) fn new(
        counted: Counted,
        status: StatusCode,
        running: Running,
        is_events: bool,
    ) -> Self {
        let last = counted.begun;
        Self {
            counted,
            status,
            running,
            is_events,
            has_token: false,
            last,
            usage: None,
        }
    }

    pub(super) fn on_data(&mut self, now: Instant, data: &Bytes) {
        if !self.is_events {
            self.running.on_first_token(now);
            // Usage stands near the end of a whole answer, so the last piece has it.
            self.usage = Some(data.clone());
            return;
        }
        if self.has_token {
            self.counted
                .model
                .itl
                .observe(now.saturating_duration_since(self.last).as_secs_f64());
            self.last = now;
        } else if is_token(self.counted.api(), data) {
            self.has_token = true;
            self.last = now;
            self.counted.model.ttft.observe(
                now.saturating_duration_since(self.counted.begun)
                    .as_secs_f64(),
            );
            self.running.on_first_token(now);
        }
        if USAGE.find(data).is_some() {
            self.usage = Some(data.clone());
        }
    }

    pub(super) fn on_end(&mut self, now: Instant, end: End) {
        self.counted.end(now, self.status, end);
        let is_good = match end {
            // A failure's status has been judged already.
            End::Complete => (!self.status.is_server_error()).then_some(true),
            End::Engine | End::Silence => Some(false),
            End::Client | End::Deadline => None,
        };
        if let Some(is_good) = is_good {
            self.counted.model.judge(self.running.worker(), is_good);
        }
        let Some(usage) = self.usage.take().and_then(|data| usage(&data)) else {
            return;
        };
        let model = &self.counted.model;
        model.prompt_tokens.inc_by(usage.prompt_tokens);
        model.cached_tokens.inc_by(usage.cached_tokens);
        model.output_tokens.inc_by(usage.output_tokens);
    }

    pub(super) fn worker(&self) -> &str {
        &self.running.worker().name
    }
}

/// Whether a piece of a stream has a token. What engines send before they compute anything has none:
/// a chat stream's first chunk with the role, the first events of a response, keep-alive comments.
pub(super) fn is_token(api: Api, data: &[u8]) -> bool {
    match api {
        Api::Responses => DELTA.find(data).is_some(),
        Api::Chat => {
            let one_event =
                data.len() < 2 || memmem::find(&data[..data.len() - 2], b"\n\n").is_none();
            !(data.starts_with(b":") || (one_event && NO_CONTENT.find(data).is_some()))
        }
        _ => !data.starts_with(b":"),
    }
}

#[derive(Debug, Default, PartialEq)]
pub(super) struct Usage {
    pub(super) prompt_tokens: u64,
    pub(super) cached_tokens: u64,
    pub(super) output_tokens: u64,
}

/// The last usage in a piece of an answer, in the words of chat or of Responses.
pub(super) fn usage(data: &[u8]) -> Option<Usage> {
    #[derive(Deserialize)]
    struct Wire {
        #[serde(alias = "input_tokens")]
        prompt_tokens: u64,
        #[serde(default, alias = "output_tokens")]
        completion_tokens: u64,
        #[serde(default, alias = "input_tokens_details")]
        prompt_tokens_details: Option<Details>,
    }
    #[derive(Deserialize)]
    struct Details {
        #[serde(default)]
        cached_tokens: Option<u64>,
    }
    let at = memmem::rfind(data, b"\"usage\":")? + b"\"usage\":".len();
    let wire = serde_json::Deserializer::from_slice(&data[at..])
        .into_iter::<Wire>()
        .next()?
        .ok()?;
    Some(Usage {
        prompt_tokens: wire.prompt_tokens,
        cached_tokens: wire
            .prompt_tokens_details
            .and_then(|details| details.cached_tokens)
            .unwrap_or(0),
        output_tokens: wire.completion_tokens,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_read_in_the_words_of_either_api() {
        let expected = || Usage {
            prompt_tokens: 33,
            cached_tokens: 32,
            output_tokens: 4,
        };
        let chat = br#"{"choices":[],"usage":{"prompt_tokens":33,"total_tokens":37,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":32}},"x":1}"#;
        let responses = br#"data: {"response":{"usage":{"input_tokens":33,"input_tokens_details":{"cached_tokens":32,"cache_write_tokens":0},"output_tokens":4,"total_tokens":37}}}"#;
        assert_eq!(usage(chat), Some(expected()));
        assert_eq!(usage(responses), Some(expected()));
        let none =
            br#"{"usage":{"prompt_tokens":33,"completion_tokens":4,"prompt_tokens_details":null}}"#;
        assert_eq!(
            usage(none),
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
        ] {
            assert_eq!(usage(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn what_comes_before_the_prompt_is_computed_is_no_token() {
        let role =
            b"data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
        let token = b"data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
        assert!(!is_token(Api::Chat, role));
        assert!(is_token(Api::Chat, token));
        assert!(is_token(Api::Chat, &[&role[..], &token[..]].concat()));
        assert!(!is_token(Api::Chat, b": ping\n\n"));
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
