//! An engine's events -> the events of one Responses stream: numbered, begun and ended by the router.
//! Pure.
//!
//! Deltas pass as they are but for their number, their item's id and, if it was wrong, their place. The
//! first events and the last are made here. A stream has exactly one end, whatever comes.

mod open_item;

use std::io::Write as _;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use smallvec::SmallVec;

use self::open_item::OpenItem;
use super::client_state::StateSigner;
use super::engine_events::{EngineEvent, EngineEvents};
use super::members::{self, Members, put_text};
use super::object::{Outcome, OutputItems, ResponseTemplate, put_item, put_part, with_output};
use crate::store::Status;

/// The names of the events that client_state what a model thinks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReasoningEvents {
    /// `response.reasoning_text.delta` and `.done`.
    #[default]
    #[serde(rename = "openai")]
    OpenAi,
    /// `response.reasoning.delta` and `.done`.
    OpenResponses,
}

/// How a stream is read and written.
#[derive(Clone, Copy, Debug)]
pub(super) struct EventOptions {
    /// Of one event of an engine, and of what its items hold together.
    pub(super) bytes_max: usize,
    pub(super) reasoning: ReasoningEvents,
}

/// One stream.
#[derive(Debug)]
pub(super) struct EventRewriter {
    frames: Option<EngineEvents>,
    stream: StreamState,
}

#[derive(Debug)]
struct StreamState {
    pub(super) template: ResponseTemplate,
    limits: EventOptions,
    phase: Phase,
    /// The number of the next event.
    next: u64,
    /// Items that were added, whether they are done or not.
    added: usize,
    open: SmallVec<[OpenItem; 2]>,
    /// Those that are done.
    done: OutputItems,
    state_signer: Option<StateSigner>,
    /// The last item that is done: it is told as completed once something follows it.
    held: Option<DoneItem>,
    bytes: usize,
    is_background: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Nothing came yet.
    Waiting,
    /// Nothing came yet, and it was told that it waits.
    Announced,
    Running,
    /// All is known, and nothing more is listened to.
    Ended,
}

#[derive(Debug)]
struct DoneItem {
    place: usize,
    /// The item as the engine writes it.
    item: String,
}

/// What is looked at of an event. All of it borrows from the event's text.
#[derive(Deserialize)]
struct EventFields<'a> {
    #[serde(borrow, rename = "type")]
    kind: Option<&'a RawValue>,
    #[serde(borrow)]
    sequence_number: Option<&'a RawValue>,
    #[serde(borrow)]
    item_id: Option<&'a RawValue>,
    #[serde(borrow)]
    output_index: Option<&'a RawValue>,
    #[serde(borrow)]
    content_index: Option<&'a RawValue>,
    #[serde(borrow)]
    delta: Option<&'a RawValue>,
    #[serde(borrow)]
    item: Option<&'a RawValue>,
    #[serde(borrow)]
    part: Option<&'a RawValue>,
    #[serde(borrow)]
    response: Option<&'a RawValue>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
    #[serde(borrow)]
    message: Option<&'a RawValue>,
    /// Some of older engines' are null, which no client takes.
    #[serde(borrow, default, deserialize_with = "given")]
    logprobs: Option<&'a RawValue>,
}

/// A value that is there, though it be null.
fn given<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(deserializer).map(Some)
}

/// What takes the place of a member's value.
enum Replacement<'a> {
    Number(u64),
    Json(&'a [u8]),
}

const TORN: &str = "the engine ended the stream before the answer's end";
const UNREADABLE: &str = "the engine sent an event that cannot be read";
const TOO_LONG: &str = "the answer is longer than the router allows";

impl EventRewriter {
    /// With a state_signer a client is given its model's thoughts sealed, too.
    pub(super) fn new(
        template: ResponseTemplate,
        limits: EventOptions,
        state_signer: Option<StateSigner>,
    ) -> Self {
        Self {
            frames: Some(EngineEvents::new(limits.bytes_max)),
            stream: StreamState {
                template,
                limits,
                phase: Phase::Waiting,
                next: 0,
                added: 0,
                open: SmallVec::new(),
                done: OutputItems::default(),
                state_signer,
                held: None,
                bytes: 0,
                is_background: false,
            },
        }
    }

    /// Of a response that waits first, and says so.
    pub(super) fn in_background(mut self) -> Self {
        self.stream.is_background = true;
        self
    }

    /// Says that it waits, if that was not said.
    pub(super) fn announce(&mut self, out: &mut Vec<u8>) {
        self.stream.announce(out);
    }

    /// It ends before any engine took it.
    pub(super) fn refuse(&mut self, message: &str, out: &mut Vec<u8>) -> Outcome {
        self.frames = None;
        self.stream.fail(message, out)
    }

    /// The next event gets this number.
    pub(super) fn go_on_at(&mut self, number: u64) {
        self.stream.next = number;
    }

    /// What there is of an output that nobody waits for any more.
    pub(super) fn cut(mut self) -> Outcome {
        let outcome = self.stream.fail("", &mut Vec::new());
        Outcome {
            status: Status::Cancelled,
            error: None,
            ..outcome
        }
    }

    /// As [`EventRewriter::cut`], from events that were told.
    pub(super) fn cut_again(mut self, told: &[u8]) -> Outcome {
        self.push(told, &mut Vec::new());
        self.cut()
    }

    /// Takes what came, appends what is to be sent, and tells how the response ended once it has.
    pub(super) fn push(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Option<Outcome> {
        let frames = self.frames.as_mut()?;
        let stream = &mut self.stream;
        let mut outcome = None;
        let pushed = frames.push(bytes, |frame| {
            outcome = stream.on_event(&frame, out);
            outcome.is_none()
        });
        if outcome.is_none() && pushed.is_err() {
            outcome = Some(stream.fail(TOO_LONG, out));
        }
        if outcome.is_some() {
            self.frames = None;
        }
        outcome
    }

    /// The engine says no more.
    pub(super) fn finish(&mut self, out: &mut Vec<u8>) -> Option<Outcome> {
        self.frames.take()?;
        Some(self.stream.fail(TORN, out))
    }

    pub(super) fn template(&self) -> &ResponseTemplate {
        &self.stream.template
    }

    /// An item of the router's own, after the engine's.
    pub(super) fn add_item(&mut self, added: &[u8], done: &[u8], out: &mut Vec<u8>) {
        let place = self.stream.added;
        self.stream.added += 1;
        let names = ["response.output_item.added", "response.output_item.done"];
        for (name, item) in names.into_iter().zip([added, done]) {
            self.stream.tell_item(name, place, item, out);
        }
    }

    /// Where an item would be that is added now.
    pub(super) fn place(&self) -> usize {
        self.stream.added
    }

    /// The last words. `response` is the object without its output.
    pub(super) fn end(&mut self, response: &[u8], outcome: &Outcome, out: &mut Vec<u8>) {
        let name = match outcome.status {
            Status::Completed => "response.completed",
            Status::Failed => "response.failed",
            // No client knows an event for what was cancelled; this one ends every reader.
            Status::Incomplete | Status::Cancelled | Status::Queued | Status::InProgress => {
                "response.incomplete"
            }
        };
        let response = with_output(response, outcome.told());
        self.stream.tell_response(name, &response, out);
        out.extend_from_slice(b"data: [DONE]\n\n");
    }
}

impl StreamState {
    fn on_event(&mut self, frame: &EngineEvent<'_>, out: &mut Vec<u8>) -> Option<Outcome> {
        if frame.data == "[DONE]" {
            return Some(self.fail(TORN, out));
        }
        let Ok(fields) = serde_json::from_str::<EventFields<'_>>(&frame.data) else {
            return Some(self.fail(UNREADABLE, out));
        };
        let kind = fields.kind.and_then(|raw| members::text(raw.get()));
        let name = match &*frame.name {
            "" => kind.as_deref().unwrap_or_default(),
            name => name,
        };
        if name.ends_with(".delta") && self.phase == Phase::Running && self.held.is_none() {
            return self.on_delta(name, &frame.data, &fields, out);
        }
        match name {
            "response.completed" | "response.incomplete" | "response.failed" => {
                let ended = fields
                    .response
                    .and_then(|raw| Members::parse(raw.get()).ok());
                let Some(ended) = ended else {
                    return Some(self.fail(UNREADABLE, out));
                };
                self.begin(Some(&ended), out);
                return Some(self.on_ended(&ended, out));
            }
            "error" => return Some(self.fail_as(&fields, out)),
            "" if fields.error.is_some() => return Some(self.fail_as(&fields, out)),
            "" => return Some(self.fail(UNREADABLE, out)),
            _ => {}
        }
        let announced = fields
            .response
            .and_then(|raw| Members::parse(raw.get()).ok());
        self.begin(announced.as_ref(), out);
        self.release(Status::Completed, out);
        match name {
            "response.created" | "response.queued" | "response.in_progress" => None,
            "response.output_item.added" => self.on_added(&frame.data, &fields, out),
            "response.output_item.done" => self.on_done(&fields, out),
            _ => self.on_delta(name, &frame.data, &fields, out),
        }
    }

    /// Tells of the response itself, before anything else.
    fn begin(&mut self, announced: Option<&Members<'_>>, out: &mut Vec<u8>) {
        if !matches!(self.phase, Phase::Waiting | Phase::Announced) {
            return;
        }
        if self.is_background {
            self.announce(out);
        }
        let is_announced = self.phase == Phase::Announced;
        self.phase = Phase::Running;
        if let Some(announced) = announced {
            self.template.learn(announced);
        }
        let response = self.template.open(Status::InProgress);
        if !is_announced {
            self.tell_response("response.created", &response, out);
        }
        self.tell_response("response.in_progress", &response, out);
    }

    fn announce(&mut self, out: &mut Vec<u8>) {
        if self.phase != Phase::Waiting {
            return;
        }
        self.phase = Phase::Announced;
        let response = self.template.open(Status::Queued);
        self.tell_response("response.created", &response, out);
        self.tell_response("response.queued", &response, out);
    }

    fn on_added(
        &mut self,
        data: &str,
        fields: &EventFields<'_>,
        out: &mut Vec<u8>,
    ) -> Option<Outcome> {
        let Some(item) = fields.item.map(RawValue::get) else {
            return Some(self.fail(UNREADABLE, out));
        };
        let place = self.added;
        let mut told = Vec::with_capacity(item.len() + 64);
        let written = put_item(&mut told, item, &self.template.ids, place, "in_progress");
        let Some(open) =
            written.and_then(|_| OpenItem::new(item, index(fields), place, &self.template.ids))
        else {
            return Some(self.fail(UNREADABLE, out));
        };
        self.added += 1;
        self.open.push(open);
        let edits = [
            (fields.item, Replacement::Json(&told)),
            (fields.output_index, Replacement::Number(place as u64)),
        ];
        self.rewrite("response.output_item.added", data, fields, edits, out);
        None
    }

    fn on_done(&mut self, fields: &EventFields<'_>, out: &mut Vec<u8>) -> Option<Outcome> {
        let Some(item) = fields.item.map(RawValue::get) else {
            return Some(self.fail(UNREADABLE, out));
        };
        let at = index(fields);
        let open = self.open.iter().position(|open| open.index == at);
        let Some(open) = open else {
            // An item that was never added, or is done twice, would confuse every reader.
            return None;
        };
        let open = self.open.remove(open);
        self.bytes = self.bytes.saturating_sub(open.bytes()) + item.len();
        if self.bytes > self.limits.bytes_max {
            return Some(self.fail(TOO_LONG, out));
        }
        self.held = Some(DoneItem {
            place: open.place,
            item: item.to_owned(),
        });
        None
    }

    /// Tells of the item that is done.
    fn release(&mut self, status: Status, out: &mut Vec<u8>) {
        let Some(DoneItem { place, item }) = self.held.take() else {
            return;
        };
        let is_cut = status != Status::Completed;
        let status = if is_cut { "incomplete" } else { "completed" };
        let mut told = Vec::with_capacity(item.len() + 64);
        if let Some(kind) = put_item(&mut told, &item, &self.template.ids, place, status) {
            self.tell_done(&kind, place, told, out);
        }
    }

    fn tell_done(&mut self, kind: &str, place: usize, item: Vec<u8>, out: &mut Vec<u8>) {
        let state_signer = self.state_signer.as_ref().filter(|_| kind == "reasoning");
        let sealed = state_signer.and_then(|state_signer| state_signer.reasoning(&item));
        let told = sealed.as_ref().unwrap_or(&item);
        self.tell_item("response.output_item.done", place, told, out);
        self.done.push(item, sealed);
    }

    fn tell_item(&mut self, name: &str, place: usize, item: &[u8], out: &mut Vec<u8>) {
        self.head(name, out);
        let _ = write!(out, r#","output_index":{place},"item":"#);
        out.extend_from_slice(item);
        out.extend_from_slice(b"}\n\n");
    }

    /// A delta, or any other event within an item.
    fn on_delta(
        &mut self,
        name: &str,
        data: &str,
        fields: &EventFields<'_>,
        out: &mut Vec<u8>,
    ) -> Option<Outcome> {
        let at = index(fields);
        let mut id: Option<&[u8]> = None;
        let mut place = None;
        let mut content = None;
        let mut part = Vec::new();
        let mut open = std::mem::take(&mut self.open);
        if let Some(open) = open.iter_mut().rev().find(|open| open.index == at) {
            match name {
                "response.content_part.added" => open.begin_part(fields.part.map(RawValue::get)),
                "response.content_part.done" => open.end_part(),
                _ => {
                    if let Some(delta) = fields.delta.and_then(|it| members::escaped(it.get())) {
                        self.bytes += open.push(name, delta);
                    }
                }
            }
            id = Some(open.id.as_bytes());
            place = Some(open.place as u64);
            content = open.content_index();
        }
        if let Some(raw) = fields.part {
            put_part(&mut part, raw.get());
        }
        let edits = [
            (
                fields.item_id.filter(|_| id.is_some()),
                Replacement::Json(id.unwrap_or_default()),
            ),
            (
                misplaced(fields.output_index, place),
                Replacement::Number(place.unwrap_or_default()),
            ),
            (
                misplaced(fields.content_index, content),
                Replacement::Number(content.unwrap_or_default()),
            ),
            (fields.part, Replacement::Json(&part)),
            (
                fields.logprobs.filter(|it| it.get() == "null"),
                Replacement::Json(b"[]"),
            ),
        ];
        self.rewrite(name, data, fields, edits, out);
        self.open = open;
        if self.bytes > self.limits.bytes_max {
            return Some(self.fail(TOO_LONG, out));
        }
        None
    }

    /// The engine says how it ended.
    fn on_ended(&mut self, ended: &Members<'_>, out: &mut Vec<u8>) -> Outcome {
        let Some(mut outcome) = Outcome::of_engine(ended) else {
            return self.fail("the engine ended the stream while the answer went on", out);
        };
        let is_last = self
            .held
            .as_ref()
            .is_some_and(|it| it.place + 1 == self.added);
        let is_cut = is_last && outcome.status == Status::Incomplete;
        let status = if is_cut {
            Status::Incomplete
        } else {
            Status::Completed
        };
        self.release(status, out);
        self.close(outcome.status, out);
        // Items that were told one by one are those that the client has.
        let told = ended.get("output").and_then(members::list);
        if told.is_none_or(|items| items.len() <= self.added) {
            (outcome.output, outcome.told) = self.done.finish();
        } else {
            let (ids, state_signer) = (&self.template.ids, self.state_signer.as_ref());
            if outcome.read_output(ended, ids, state_signer).is_none() {
                return self.fail(UNREADABLE, out);
            }
        }
        self.phase = Phase::Ended;
        outcome
    }

    fn fail_as(&mut self, fields: &EventFields<'_>, out: &mut Vec<u8>) -> Outcome {
        let error = fields.error.and_then(|raw| Members::parse(raw.get()).ok());
        let nested = error.and_then(|error| error.text("message"));
        let flat = || fields.message.and_then(|raw| members::text(raw.get()));
        match nested.or_else(flat) {
            Some(message) => self.fail(&message, out),
            None => self.fail("the engine failed", out),
        }
    }

    fn fail(&mut self, message: &str, out: &mut Vec<u8>) -> Outcome {
        self.begin(None, out);
        self.release(Status::Completed, out);
        self.close(Status::Failed, out);
        self.phase = Phase::Ended;
        let (output, told) = self.done.finish();
        Outcome {
            output,
            told,
            ..Outcome::failed("server_error", message)
        }
    }

    /// Ends the items that the engine left open.
    fn close(&mut self, status: Status, out: &mut Vec<u8>) {
        let status = if status == Status::Completed {
            "completed"
        } else {
            "incomplete"
        };
        for mut open in std::mem::take(&mut self.open) {
            for (name, members) in open.closing() {
                let name = self.renamed(name);
                self.head(name, out);
                let _ = write!(
                    out,
                    r#","item_id":{},"output_index":{}"#,
                    open.id, open.place
                );
                out.extend_from_slice(&members);
                out.extend_from_slice(b"}\n\n");
            }
            let mut item = Vec::new();
            let raw = open.item();
            if let Some(kind) = put_item(&mut item, &raw, &self.template.ids, open.place, status) {
                self.tell_done(&kind, open.place, item, out);
            }
        }
    }

    fn tell_response(&mut self, name: &str, response: &[u8], out: &mut Vec<u8>) {
        self.head(name, out);
        out.extend_from_slice(br#","response":"#);
        out.extend_from_slice(response);
        out.extend_from_slice(b"}\n\n");
    }

    /// `event: name`, and the data's first two members.
    fn head(&mut self, name: &str, out: &mut Vec<u8>) {
        let number = self.number();
        let _ = write!(
            out,
            "event: {name}\ndata: {{\"type\":\"{name}\",\"sequence_number\":{number}"
        );
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    fn renamed<'n>(&self, name: &'n str) -> &'n str {
        match (self.limits.reasoning, name) {
            (ReasoningEvents::OpenResponses, "response.reasoning_text.delta") => {
                "response.reasoning.delta"
            }
            (ReasoningEvents::OpenResponses, "response.reasoning_text.done") => {
                "response.reasoning.done"
            }
            (_, name) => name,
        }
    }

    /// Passes an event on, with its number and with some of its members' values replaced.
    fn rewrite<const N: usize>(
        &mut self,
        name: &str,
        data: &str,
        fields: &EventFields<'_>,
        edits: [(Option<&RawValue>, Replacement<'_>); N],
        out: &mut Vec<u8>,
    ) {
        let number = self.number();
        let renamed = self.renamed(name);
        out.extend_from_slice(b"event: ");
        out.extend_from_slice(renamed.as_bytes());
        out.extend_from_slice(b"\ndata: ");
        let mut kind = SmallVec::<[u8; 48]>::new();
        let is_renamed = renamed != name;
        if is_renamed {
            kind.push(b'"');
            kind.extend_from_slice(renamed.as_bytes());
            kind.push(b'"');
        }
        let mut all: SmallVec<[(usize, usize, Replacement<'_>); 8]> = SmallVec::new();
        let own = [
            (fields.sequence_number, Replacement::Number(number)),
            (fields.kind.filter(|_| is_renamed), Replacement::Json(&kind)),
        ];
        for (raw, new) in own.into_iter().chain(edits) {
            if let Some(raw) = raw {
                let raw = raw.get();
                let begin = raw.as_ptr() as usize - data.as_ptr() as usize;
                all.push((begin, begin + raw.len(), new));
            }
        }
        all.sort_unstable_by_key(|(begin, _, _)| *begin);
        let mut passed = 0;
        for (begin, end, new) in &all {
            out.extend_from_slice(&data.as_bytes()[passed..*begin]);
            match new {
                Replacement::Number(number) => {
                    let _ = write!(out, "{number}");
                }
                Replacement::Json(json) => out.extend_from_slice(json),
            }
            passed = *end;
        }
        let rest = data[passed..].trim_end();
        if fields.sequence_number.is_some() {
            out.extend_from_slice(rest.as_bytes());
        } else {
            out.extend_from_slice(rest.strip_suffix('}').unwrap_or(rest).as_bytes());
            let comma = if data.trim_end() == "{}" { "" } else { "," };
            let _ = write!(out, "{comma}\"sequence_number\":{number}}}");
        }
        out.extend_from_slice(b"\n\n");
    }
}

/// A place that is not the one we count. Mostly there is none.
fn misplaced(raw: Option<&RawValue>, place: Option<u64>) -> Option<&RawValue> {
    let place = place?;
    raw.filter(|raw| raw.get().parse() != Ok(place))
}

/// Where the engine puts the item.
fn index(fields: &EventFields<'_>) -> Option<u64> {
    fields.output_index?.get().parse().ok()
}

/// A JSON string.
fn quoted(text: &str) -> String {
    let mut out = Vec::with_capacity(text.len() + 2);
    put_text(&mut out, text);
    String::from_utf8(out).unwrap_or_default()
}

#[cfg(test)]
mod tests;
