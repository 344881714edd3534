//! Stream terminator: ends an event stream that its engine left without an end. Pure.

use bytes::Bytes;
use memchr::memmem;
use serde_json::{Value, json};

use crate::http::sse;
use crate::prompt::Api;

/// The message of the terminal event of a stream that its engine ended without one.
pub(super) const ENDED_EARLY: &str = "the engine ended the stream before the answer's end";

/// Watches one stream for its terminal event.
#[derive(Debug)]
pub(super) struct StreamTerminator {
    api: Api,
    has_end: bool,
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
            first: None,
            events: 0,
        }
    }

    /// Takes whole events that go to the client.
    pub(super) fn on_passed(&mut self, events: &Bytes) {
        if self.api == Api::Responses {
            self.events += memmem::find_iter(events, b"\n\n").count() as u64;
            self.first.get_or_insert_with(|| events.clone());
        }
        self.has_end = self.has_end || is_terminal(self.api, events);
    }

    /// True once the stream had its terminal event.
    pub(super) fn has_end(&self) -> bool {
        self.has_end
    }

    /// What to add to a stream that the engine ended, with `held` as its incomplete last event. `None` if it had a
    /// terminal event.
    pub(super) fn if_missing(self, held: &[u8]) -> Option<Bytes> {
        let has_end = self.has_end || is_terminal(self.api, held);
        (!has_end).then(|| self.error(ENDED_EARLY))
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
                        let data = json!({
                            "type": "error", "sequence_number": self.events, "code": "server_error",
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
                    "message": message, "type": "server_error", "param": null, "code": "engine_stream_broken"}});
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
        && memmem::find_iter(events, b"event:").any(|at| {
            let starts_line = at == 0 || events[at - 1] == b'\n';
            let line = events[at + b"event:".len()..]
                .split(|byte| *byte == b'\n')
                .next();
            starts_line && line.is_some_and(|name| last.contains(&name.trim_ascii()))
        })
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

    fn after(api: Api, passed: &[&'static str]) -> StreamTerminator {
        let mut terminator = StreamTerminator::new(api);
        for events in passed {
            terminator.on_passed(&Bytes::from_static(events.as_bytes()));
        }
        terminator
    }

    const CREATED: &str = "event: response.created\ndata: {\"response\":{\"id\":\"r\",\"status\":\"in_progress\"},\"sequence_number\":0}\n\n";
    const DELTA: &str = "event: response.output_text.delta\ndata: {\"delta\":\"a\"}\n\n";

    #[test]
    fn a_terminated_stream_gets_no_second_end() {
        let done = ["data: {}\n\n", "data: {}\n\ndata: [DONE]\n\n"];
        assert_eq!(after(Api::Chat, &done).if_missing(b""), None);
        assert_eq!(after(Api::Chat, &done).error("late"), "");
        assert_eq!(
            after(Api::Chat, &["data: {}\n\n"]).if_missing(b"data: [DONE]\n"),
            None
        );
        assert_eq!(
            after(
                Api::Responses,
                &[CREATED, "event: response.completed\ndata: {}\n\n"]
            )
            .if_missing(b""),
            None
        );
    }

    #[test]
    fn a_text_that_mentions_a_final_event_does_not_end_the_stream() {
        let quoted = "event: response.output_text.delta\ndata: {\"delta\":\"event: error\"}\n\n";
        assert!(
            after(Api::Responses, &[CREATED, quoted])
                .if_missing(b"")
                .is_some()
        );
        assert!(
            after(
                Api::Responses,
                &["event:response.failed\r\ndata: {}\r\n\r\n"]
            )
            .has_end()
        );
        // A final event so long that it passed in pieces.
        let pieces = ["event: response.completed\ndata: {\"a", "b\"}\n\n"];
        assert_eq!(after(Api::Responses, &pieces).if_missing(b""), None);
    }

    #[test]
    fn a_chat_that_breaks_off_ends_with_an_error_and_done() {
        let end = after(Api::Chat, &["data: {}\n\n"]).if_missing(b"").unwrap();
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
        let end = after(Api::Messages, &[START]).if_missing(b"").unwrap();
        let end = std::str::from_utf8(&end).unwrap();
        let expected = r#"event: error
data: {"type":"error","error":{"type":"api_error","message":"the engine ended the stream before the answer's end"}}

"#;
        assert_eq!(end, expected);
        for last in ["message_stop", "error"] {
            let last = format!("event: {last}\ndata: {{}}\n\n");
            let mut terminator = after(Api::Messages, &[START]);
            terminator.on_passed(&Bytes::from(last));
            assert_eq!(terminator.if_missing(b""), None);
        }
        let quoted = "event: content_block_delta\ndata: {\"text\":\"event: message_stop\"}\n\n";
        assert!(
            after(Api::Messages, &[START, quoted])
                .if_missing(b"")
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
