//! Stream terminator: ends an event stream that its engine left without an end. Pure.

use std::sync::LazyLock;

use bytes::Bytes;
use memchr::memmem::{self, Finder};
use serde_json::{Value, json};

use super::end_message::{DRAINED, ENDED_EARLY, code_of};
use crate::http::sse;
use crate::prompt::Api;
use crate::relay::answer::engine_answer::{Finish, last_finish};
use crate::relay::answer::first_token_gate::{self, Verdict};
use crate::relay::failure::types::Outcome;

static EVENT: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("event:"));

/// What a stream lacks that its engine ended, and the events that stand for it.
#[derive(Debug, PartialEq)]
pub(super) enum Missing {
    Nothing,
    /// Only the terminal event.
    Done(Bytes),
    /// The rest of the answer.
    Answer(Bytes),
}

/// Watches one stream for its terminal event.
#[derive(Debug)]
pub(super) struct StreamTerminator {
    pub(super) api: Api,
    /// The stream had its terminal event.
    pub(super) has_end: bool,
    /// The engine reported an error.
    has_error: bool,
    /// The engine reported that the request is at fault.
    is_refused: bool,
    /// How the last choice has ended: with a reason, only `[DONE]` may be missing. `None` before any choice, unless a reason
    /// is required.
    finish: Option<Finish>,
    /// There was something of an answer. Then no more events are looked at for it.
    pub(super) has_begun: bool,
    /// The first events of a Responses stream: they have the response object for `response.failed`.
    first: Option<Bytes>,
    events: u64,
}

impl StreamTerminator {
    pub(super) fn new(api: Api) -> Self {
        Self {
            api,
            // Nothing is known of how streams of other endpoints end.
            has_end: api == Api::Other,
            has_error: false,
            is_refused: false,
            finish: None,
            has_begun: false,
            first: None,
            events: 0,
        }
    }

    /// The answer is complete only with a finish reason, also if its chunks have no place for one.
    pub(super) fn require_finish(&mut self) {
        self.finish = Some(Finish::None);
    }

    /// Takes events that have nothing but a token: their choice goes on.
    pub(super) fn on_plain(&mut self) {
        self.has_begun = true;
        if self.api.has_choices() {
            self.finish = Some(Finish::None);
        }
    }

    /// Where the engine gives up the answer in the next whole events, if it does: by an end that no client asked for, or by the
    /// last event of an answer that has not begun, or whose last choice has not ended. What is before may go to the
    /// client.
    pub(super) fn gives_up_at(&mut self, events: &[u8]) -> Option<usize> {
        if self.has_end || self.has_error || self.is_refused {
            return None;
        }
        match last_finish(self.api, events) {
            Some((at, Finish::Abort)) => return Some(event_start(events, at)),
            Some((_, finish)) => self.finish = Some(finish),
            None => {}
        }
        self.has_begun = self.has_begun || first_token_gate::begins_answer(events);
        let lacks_end = (self.finish == Some(Finish::None) || !self.has_begun)
            && is_terminal(self.api, events)
            && first_token_gate::errors_in(self.api, events)
                .next()
                .is_none();
        lacks_end.then(|| event_start(events, events.trim_ascii_end().len()))
    }

    /// Takes whole events that go to the client, after [`Self::gives_up_at`].
    pub(super) fn on_passed(&mut self, events: &Bytes) {
        if self.api == Api::Responses {
            self.events += sse::BLANK.find_iter(events).count() as u64;
            self.first.get_or_insert_with(|| events.clone());
        }
        self.has_end = self.has_end || is_terminal(self.api, events);
        for error in first_token_gate::errors_in(self.api, events) {
            if error == Verdict::Error {
                self.has_error = true;
            } else {
                self.is_refused = true;
            }
        }
    }

    /// How the request ends if the stream is over now.
    pub(super) fn outcome(&self) -> Outcome {
        if self.has_error {
            Outcome::WorkerFailed
        } else {
            Outcome::Complete
        }
    }

    /// True once the client has had all of a stream whose end is known.
    pub(super) fn has_passed_all(&self) -> bool {
        self.has_end && self.api != Api::Other
    }

    /// What to add to a stream that the engine ended, with `held` as its incomplete last event.
    pub(super) fn at_end(self, held: &[u8]) -> Missing {
        if self.has_end || is_terminal(self.api, held) {
            return Missing::Nothing;
        }
        if self.api.has_choices()
            && self.finish == Some(Finish::Reason)
            && held.trim_ascii().is_empty()
        {
            Missing::Done(Bytes::from_static(b"data: [DONE]\n\n"))
        } else {
            Missing::Answer(self.error(ENDED_EARLY))
        }
    }

    /// The events that terminate a stream that broke off.
    pub(super) fn error(&self, message: &str) -> Bytes {
        if self.has_end {
            return Bytes::new();
        }
        let text = match self.api {
            Api::Responses => {
                let (name, data) = match self.first.as_deref().and_then(created) {
                    Some(mut response) => {
                        response["status"] = json!("failed");
                        response["error"] = json!({"code": "server_error", "message": message});
                        let data = json!({
                            "type": "response.failed", "sequence_number": self.events, "response": response});
                        ("response.failed", data)
                    }
                    None => {
                        let code = if message == DRAINED {
                            code_of(message)
                        } else {
                            "server_error"
                        };
                        let data = json!({
                            "type": "error", "sequence_number": self.events, "code": code,
                            "message": message, "param": null});
                        ("error", data)
                    }
                };
                format!("event: {name}\ndata: {data}\n\ndata: [DONE]\n\n")
            }
            Api::Messages => {
                let data =
                    json!({"type": "error", "error": {"type": "api_error", "message": message}});
                format!("event: error\ndata: {data}\n\n")
            }
            _ => {
                let data = json!({"error": {
                    "message": message, "type": "server_error", "param": null, "code": code_of(message)}});
                format!("data: {data}\n\ndata: [DONE]\n\n")
            }
        };
        Bytes::from(text)
    }
}

/// True if events terminate a stream: with `[DONE]`, or (Responses, Messages) with an event of a final type. A final
/// type counts only in an `event:` line, not within a text.
fn is_terminal(api: Api, events: &[u8]) -> bool {
    if events.trim_ascii_end().ends_with(b"[DONE]") {
        return true;
    }
    let last: &[&[u8]] = match api {
        Api::Responses => &[
            b"response.completed",
            b"response.incomplete",
            b"response.failed",
            b"error",
        ],
        Api::Messages => &[b"message_stop", b"error"],
        _ => &[],
    };
    !last.is_empty()
        && EVENT.find_iter(events).any(|at| {
            let starts_line = at == 0 || events[at - 1] == b'\n';
            let line = events[at + EVENT.needle().len()..]
                .split(|byte| *byte == b'\n')
                .next();
            starts_line && line.is_some_and(|name| last.contains(&name.trim_ascii()))
        })
}

/// Where the event that is at a position begins.
fn event_start(events: &[u8], at: usize) -> usize {
    memmem::rfind(&events[..at], b"\n\n").map_or(0, |blank| blank + 2)
}

/// The response object of a `response.created` event.
fn created(events: &[u8]) -> Option<Value> {
    let mut found = Vec::new();
    sse::Decoder::default().push(events, &mut found);
    let event = found
        .into_iter()
        .find(|event| event.event == "response.created")?;
    let mut data: Value = serde_json::from_str(&event.data).ok()?;
    Some(data.get_mut("response")?.take()).filter(Value::is_object)
}

#[cfg(test)]
mod tests {
    use super::*;

    impl StreamTerminator {
        /// What stands for an answer that the engine left without its end.
        fn missing_at(self, held: &[u8]) -> Option<Bytes> {
            match self.at_end(held) {
                Missing::Nothing => None,
                Missing::Done(done) | Missing::Answer(done) => Some(done),
            }
        }
    }

    fn after(api: Api, passed: &[&'static str]) -> StreamTerminator {
        let mut terminator = StreamTerminator::new(api);
        for events in passed {
            terminator.gives_up_at(events.as_bytes());
            terminator.on_passed(&Bytes::from_static(events.as_bytes()));
        }
        terminator
    }

    const TEXT: &str =
        "data: {\"choices\":[{\"delta\":{\"content\":\"a\"},\"finish_reason\":null}]}\n\n";
    const STOP: &str = "data: {\"choices\":[{\"delta\":{},\"finish_reason\": \"stop\"}]}\n\n";
    const USAGE: &str = "data: {\"choices\":[],\"usage\":{\"completion_tokens\":3}}\n\n";
    const CREATED: &str = "event: response.created\ndata: {\"response\":{\"id\":\"r\",\"status\":\"in_progress\"},\"sequence_number\":0}\n\n";
    const DELTA: &str = "event: response.output_text.delta\ndata: {\"delta\":\"a\"}\n\n";

    #[test]
    fn a_terminated_stream_gets_no_second_end() {
        let done = ["data: {}\n\n", "data: {}\n\ndata: [DONE]\n\n"];
        assert_eq!(after(Api::Chat, &done).missing_at(b""), None);
        assert_eq!(after(Api::Chat, &done).error("late"), "");
        assert_eq!(
            after(Api::Chat, &["data: {}\n\n"]).missing_at(b"data: [DONE]\n"),
            None
        );
        assert_eq!(
            after(
                Api::Responses,
                &[CREATED, "event: response.completed\ndata: {}\n\n"]
            )
            .missing_at(b""),
            None
        );
    }

    #[test]
    fn a_chat_that_lacks_only_its_last_event_gets_it() {
        const ABORT: &str = "data: {\"choices\":[{\"finish_reason\":\"abort\"}]}\n\n";
        const QUOTED: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"\\\"finish_reason\\\":\\\"stop\\\"\"}}]}\n\n";
        let done = Missing::Done(Bytes::from_static(b"data: [DONE]\n\n"));
        for passed in [&[TEXT, STOP][..], &[TEXT, STOP, USAGE]] {
            assert_eq!(after(Api::Chat, passed).at_end(b""), done);
            assert_eq!(after(Api::Completions, passed).at_end(b""), done);
        }
        for passed in [&[TEXT][..], &[QUOTED], &[TEXT, ABORT], &[STOP, TEXT], &[]] {
            let end = after(Api::Chat, passed).at_end(b"");
            assert!(matches!(end, Missing::Answer(_)), "{passed:?} {end:?}");
        }
        // An event has started.
        let end = after(Api::Chat, &[TEXT, STOP]).at_end(b"data: {\"us");
        assert!(matches!(end, Missing::Answer(_)), "{end:?}");
    }

    #[test]
    fn an_abort_and_an_end_before_the_last_choice_ended_give_the_answer_up() {
        const ABORT: &str = "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"abort\"}]}\n\n";
        const QUOTED: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"\\\"finish_reason\\\":\\\"abort\\\"\"},\"finish_reason\":null}]}\n\n";
        const ERROR: &str = "data: {\"error\":{\"message\":\"x\",\"code\":500}}\n\n";
        const DONE: &str = "data: [DONE]\n\n";
        // The events that pass; of the others none.
        for (events, passing) in [
            (&[TEXT, STOP, USAGE, DONE][..], 4),
            (&[TEXT, QUOTED, STOP, DONE], 4),
            (&[TEXT, ABORT, USAGE, DONE], 1),
            (&[TEXT, USAGE, DONE], 2),
            (&[STOP, TEXT, DONE], 2),
            (&[TEXT, ERROR, DONE], 3),
            (&["data: {}\n\n", DONE], 2),
            // Nothing was computed.
            (&[DONE], 0),
            (&[": hi\n\n", DONE], 1),
            (&[USAGE, DONE], 1),
        ] {
            let expected = events[..passing].concat();
            let mut terminator = StreamTerminator::new(Api::Chat);
            let mut passed = String::new();
            for event in events {
                let at = terminator.gives_up_at(event.as_bytes());
                passed += &event[..at.unwrap_or(event.len())];
                if at.is_some() {
                    break;
                }
                terminator.on_passed(&Bytes::from_static(event.as_bytes()));
            }
            assert_eq!(passed, expected);
            let whole = events.concat();
            let at = StreamTerminator::new(Api::Chat).gives_up_at(whole.as_bytes());
            let at = at.unwrap_or(whole.len());
            assert_eq!(whole[..at], expected, "in one piece");
        }
        let abort = "event: message_delta\ndata: {\"delta\":{\"stop_reason\":\"abort\"}}\n\n";
        let at = StreamTerminator::new(Api::Messages).gives_up_at(abort.as_bytes());
        assert_eq!(at, Some(0));
        let stop = "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";
        let at = StreamTerminator::new(Api::Messages).gives_up_at(stop.as_bytes());
        assert_eq!(at, Some(0));
    }

    #[test]
    fn hidden_states_after_the_end_of_a_choice_do_not_give_its_answer_up() {
        const OF_CHAT: &str =
            "data: {\"choices\":[{\"delta\":{\"hidden_states\":[1]},\"finish_reason\":null}]}\n\n";
        const OF_COMPLETION: &str =
            "data: {\"choices\":[{\"text\":\"\",\"finish_reason\":null,\"hidden_states\":[]}]}\n\n";
        const NONE: &str =
            "data: {\"choices\":[{\"finish_reason\":null,\"hidden_states\":null}]}\n\n";
        const DONE: &str = "data: [DONE]\n\n";
        for (api, events, is_given_up) in [
            (Api::Chat, &[TEXT, STOP, OF_CHAT, DONE][..], false),
            (Api::Chat, &[TEXT, STOP, OF_CHAT, USAGE, DONE], false),
            (Api::Chat, &[TEXT, OF_CHAT, DONE], true),
            (Api::Completions, &[NONE, STOP, OF_COMPLETION, DONE], false),
            (Api::Completions, &[STOP, NONE, DONE], true),
        ] {
            let whole = events.concat();
            let at = StreamTerminator::new(api).gives_up_at(whole.as_bytes());
            assert_eq!(at.is_some(), is_given_up, "{events:?} in one piece");
            let mut terminator = StreamTerminator::new(api);
            let gives_up = events.iter().any(|event| {
                let at = terminator.gives_up_at(event.as_bytes());
                terminator.on_passed(&Bytes::from_static(event.as_bytes()));
                at.is_some()
            });
            assert_eq!(gives_up, is_given_up, "{events:?} one by one");
        }
    }

    #[test]
    fn an_answer_that_is_known_to_have_begun_ends_without_more_of_it() {
        let mut terminator = StreamTerminator::new(Api::Chat);
        terminator.has_begun = true;
        assert_eq!(terminator.gives_up_at(b"data: [DONE]\n\n"), None);
    }

    #[test]
    fn an_answer_that_needs_a_finish_reason_is_given_up_at_done_without_one() {
        const BARE: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
        const ERROR: &str = "data: {\"error\":{\"message\":\"x\",\"code\":500}}\n\n";
        const REFUSAL: &str = "data: {\"error\":{\"message\":\"x\",\"code\":400}}\n\n";
        const DONE: &str = "data: [DONE]\n\n";
        for (events, is_required, is_given_up) in [
            (&[BARE, DONE][..], true, true),
            (&[BARE, USAGE, DONE], true, true),
            (&[DONE], true, true),
            (&[BARE, STOP, DONE], true, false),
            (&[BARE, ERROR, DONE], true, false),
            (&[REFUSAL, DONE], true, false),
            (&[TEXT, REFUSAL, DONE], false, false),
            // How other streams end is not known.
            (&[BARE, DONE], false, false),
        ] {
            let begin = || {
                let mut terminator = StreamTerminator::new(Api::Chat);
                if is_required {
                    terminator.require_finish();
                }
                terminator
            };
            let whole = events.concat();
            let at = begin().gives_up_at(whole.as_bytes());
            let expected = is_given_up.then(|| whole.len() - DONE.len());
            assert_eq!(at, expected, "{events:?} in one piece");
            let mut terminator = begin();
            let gives_up = events.iter().any(|event| {
                let at = terminator.gives_up_at(event.as_bytes());
                terminator.on_passed(&Bytes::from_static(event.as_bytes()));
                at.is_some()
            });
            assert_eq!(gives_up, is_given_up, "{events:?} one by one");
        }
    }

    #[test]
    fn a_message_that_stops_for_no_reason_is_given_up() {
        const START: &str = "event: message_start\ndata: {\"message\":{\"stop_reason\":null}}\n\n";
        const STOP: &str = "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";
        let delta = |reason: &str| {
            format!("event: message_delta\ndata: {{\"delta\":{{\"stop_reason\":{reason}}}}}\n\n")
        };
        for (reason, is_given_up) in [("null", true), ("\"end_turn\"", false)] {
            let mut terminator = StreamTerminator::new(Api::Messages);
            let events = [START.to_owned(), delta(reason), STOP.to_owned()];
            let at: Vec<Option<usize>> = events
                .iter()
                .map(|event| {
                    let at = terminator.gives_up_at(event.as_bytes());
                    terminator.on_passed(&Bytes::from(event.clone()));
                    at
                })
                .collect();
            let expected = [None, None, is_given_up.then_some(0)];
            assert_eq!(at, expected, "{reason}");
            let whole = events.concat();
            let at = StreamTerminator::new(Api::Messages).gives_up_at(whole.as_bytes());
            assert_eq!(
                at,
                is_given_up.then(|| whole.len() - STOP.len()),
                "{reason}"
            );
        }
    }

    #[test]
    fn a_text_that_mentions_a_final_event_does_not_end_the_stream() {
        let quoted = "event: response.output_text.delta\ndata: {\"delta\":\"event: error\"}\n\n";
        assert!(
            after(Api::Responses, &[CREATED, quoted])
                .missing_at(b"")
                .is_some()
        );
        assert!(
            after(
                Api::Responses,
                &["event:response.failed\r\ndata: {}\r\n\r\n"]
            )
            .has_end
        );
        // A final event so long that it passed in pieces.
        let pieces = ["event: response.completed\ndata: {\"a", "b\"}\n\n"];
        assert_eq!(after(Api::Responses, &pieces).missing_at(b""), None);
    }

    #[test]
    fn a_chat_that_breaks_off_ends_with_an_error_and_done() {
        let end = after(Api::Chat, &["data: {}\n\n"]).missing_at(b"").unwrap();
        let end = std::str::from_utf8(&end).unwrap();
        assert!(
            end.starts_with("data: {\"error\":{\"message\":\"the engine ended the stream"),
            "{end}"
        );
        assert!(end.ends_with("\n\ndata: [DONE]\n\n"));
    }

    #[test]
    fn a_message_that_breaks_off_ends_with_an_error_event_only() {
        const START: &str = "event: message_start\ndata: {\"type\":\"message_start\"}\n\n";
        let end = after(Api::Messages, &[START]).missing_at(b"").unwrap();
        let end = std::str::from_utf8(&end).unwrap();
        let expected = r#"event: error
data: {"type":"error","error":{"type":"api_error","message":"the engine ended the stream before the answer's end"}}

"#;
        assert_eq!(end, expected);
        for last in ["message_stop", "error"] {
            let last = format!("event: {last}\ndata: {{}}\n\n");
            let mut terminator = after(Api::Messages, &[START]);
            terminator.on_passed(&Bytes::from(last));
            assert_eq!(terminator.missing_at(b""), None);
        }
        let quoted = "event: content_block_delta\ndata: {\"text\":\"event: message_stop\"}\n\n";
        assert!(
            after(Api::Messages, &[START, quoted])
                .missing_at(b"")
                .is_some()
        );
    }

    #[test]
    fn a_response_that_breaks_off_ends_as_failed_with_its_id() {
        let end = after(Api::Responses, &[CREATED, DELTA, DELTA]).error("gone");
        let mut events = Vec::new();
        sse::Decoder::default().push(&end, &mut events);
        assert_eq!(events[0].event, "response.failed");
        let data: Value = serde_json::from_str(&events[0].data).unwrap();
        assert_eq!(data["sequence_number"], 3);
        assert_eq!(data["response"]["id"], "r");
        assert_eq!(data["response"]["status"], "failed");
        assert_eq!(data["response"]["error"]["message"], "gone");
        assert_eq!(events[1].data, "[DONE]");
    }

    #[test]
    fn a_response_without_created_event_ends_with_an_error_event() {
        let end = after(Api::Responses, &[]).error("gone");
        assert!(end.starts_with(b"event: error\ndata: {\"type\":\"error\""));
    }
}
