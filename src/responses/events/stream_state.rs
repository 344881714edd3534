//! The state of one stream: which items are open or done, and what to write for each engine event. Pure.

use std::io::Write as _;

use serde_json::value::RawValue;
use smallvec::SmallVec;

use super::fields::EventFields;
use super::open_item::OpenItem;
use super::writer::{EventWriter, Places, Replacement};
use crate::responses::client_state::StateSigner;
use crate::responses::engine_error;
use crate::responses::engine_events::EngineEvent;
use crate::responses::members::{self, Members};
use crate::responses::outcome::{Outcome, OutputItems};
use crate::responses::output_item::{put_item, put_part};
use crate::responses::template::ResponseTemplate;
use crate::store::Status;

pub(super) const ENDED_EARLY: &str = "the engine ended the stream before the answer was complete";
const UNREADABLE: &str = "the engine sent an event that the router cannot read";
pub(super) const TOO_LONG: &str = "the answer is longer than the router allows";

/// See the module.
#[derive(Debug)]
pub(super) struct StreamState {
    pub(super) template: ResponseTemplate,
    pub(super) writer: EventWriter,
    /// Limit on the stored items together.
    pub(super) bytes_max: usize,
    phase: Phase,
    /// Number of items added, whether done or not.
    pub(super) added: usize,
    pub(super) open: SmallVec<[OpenItem; 2]>,
    done: OutputItems,
    signer: Option<StateSigner>,
    /// The last done item. Its event waits until the next one shows whether it is completed or incomplete.
    pending_done: Option<DoneItem>,
    pub(super) bytes: usize,
    /// The last event, if it was a delta that was parsed.
    pub(super) last_delta: Option<LastDelta>,
    /// Whether the stream announces that the response is queued.
    pub(super) is_background: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// No event of the engine yet.
    Waiting,
    /// No event of the engine yet; the client got the `queued` event.
    Announced,
    Running,
    /// The outcome is known; further events are ignored.
    Ended,
}

/// A delta that was rewritten.
#[derive(Debug)]
pub(super) struct LastDelta {
    /// The engine's name of the event.
    pub(super) name: String,
    /// The place of its item among the open ones.
    pub(super) open: usize,
    /// Where its event begins in what is written. Events that had to come before it may stand there, too.
    pub(super) begin: usize,
    pub(super) places: Places,
}

#[derive(Debug)]
struct DoneItem {
    index: usize,
    /// The JSON of the item from the engine.
    item: String,
}

impl StreamState {
    pub(super) fn new(
        template: ResponseTemplate,
        writer: EventWriter,
        bytes_max: usize,
        signer: Option<StateSigner>,
    ) -> Self {
        Self {
            template,
            writer,
            bytes_max,
            phase: Phase::Waiting,
            added: 0,
            open: SmallVec::new(),
            done: OutputItems::default(),
            signer,
            pending_done: None,
            bytes: 0,
            last_delta: None,
            is_background: false,
        }
    }

    pub(super) fn on_event(
        &mut self,
        event: &EngineEvent<'_>,
        out: &mut Vec<u8>,
    ) -> Option<Outcome> {
        if event.data == "[DONE]" {
            return Some(self.fail(ENDED_EARLY, out));
        }
        let Ok(fields) = serde_json::from_str::<EventFields<'_>>(&event.data) else {
            return Some(self.fail(UNREADABLE, out));
        };
        let kind = fields.kind.and_then(|raw| members::text(raw.get()));
        let name = match &*event.name {
            "" => kind.as_deref().unwrap_or_default(),
            name => name,
        };
        if name.ends_with(".delta") && self.phase == Phase::Running && self.pending_done.is_none() {
            return self.on_delta(name, &event.data, &fields, out);
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
            "error" => return Some(self.on_error(&fields, out)),
            "" if fields.error.is_some() => return Some(self.on_error(&fields, out)),
            "" => return Some(self.fail(UNREADABLE, out)),
            _ => {}
        }
        let announced = fields
            .response
            .and_then(|raw| Members::parse(raw.get()).ok());
        self.begin(announced.as_ref(), out);
        self.write_pending_done(Status::Completed, out);
        match name {
            "response.created" | "response.queued" | "response.in_progress" => None,
            "response.output_item.added" => self.on_added(&event.data, &fields, out),
            "response.output_item.done" => self.on_done(&fields, out),
            _ => self.on_delta(name, &event.data, &fields, out),
        }
    }

    /// Writes the events about the response itself, which come first.
    pub(super) fn begin(&mut self, announced: Option<&Members<'_>>, out: &mut Vec<u8>) {
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
            self.writer
                .response_event("response.created", &response, out);
        }
        self.writer
            .response_event("response.in_progress", &response, out);
        if let Some(item) = self.template.compaction.clone() {
            self.writer.head("response.compaction.compacting", out);
            let _ = write!(out, r#","item_id":"{}","output_index":0}}"#, item.id);
            out.extend_from_slice(b"\n\n");
            for name in ["response.output_item.added", "response.output_item.done"] {
                self.writer.item_event(name, 0, &item.json, out);
            }
            self.done.push(item.json.to_vec(), None);
            self.added = 1;
        }
    }

    pub(super) fn announce(&mut self, out: &mut Vec<u8>) {
        if self.phase != Phase::Waiting {
            return;
        }
        self.phase = Phase::Announced;
        let response = self.template.open(Status::Queued);
        self.writer
            .response_event("response.created", &response, out);
        self.writer
            .response_event("response.queued", &response, out);
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
        if let Err(why) = self.check_allowed(item) {
            return Some(self.fail(&why, out));
        }
        let index = self.added;
        let mut written = Vec::with_capacity(item.len() + 64);
        let kind = put_item(&mut written, item, &self.template.ids, index, "in_progress");
        let Some(open) = kind
            .and_then(|_| OpenItem::new(item, fields.engine_index(), index, &self.template.ids))
        else {
            return Some(self.fail(UNREADABLE, out));
        };
        self.added += 1;
        self.open.push(open);
        let edits = [
            (fields.item, Replacement::Json(&written)),
            (fields.output_index, Replacement::Number(index as u64)),
        ];
        self.writer
            .rewrite("response.output_item.added", data, fields, edits, out);
        None
    }

    fn check_allowed(&self, item: &str) -> Result<(), String> {
        let allowed = self.template.allowed_tools.as_ref();
        allowed.map_or(Ok(()), |allowed| allowed.check(item))
    }

    fn on_done(&mut self, fields: &EventFields<'_>, out: &mut Vec<u8>) -> Option<Outcome> {
        let Some(item) = fields.item.map(RawValue::get) else {
            return Some(self.fail(UNREADABLE, out));
        };
        if let Err(why) = self.check_allowed(item) {
            return Some(self.fail(&why, out));
        }
        let engine_index = fields.engine_index();
        let open = self
            .open
            .iter()
            .position(|open| open.engine_index == engine_index);
        let Some(open) = open else {
            // Clients could not handle an item that was never added, or is done twice.
            return None;
        };
        let open = self.open.remove(open);
        self.bytes = self.bytes.saturating_sub(open.bytes()) + item.len();
        if self.bytes > self.bytes_max {
            return Some(self.fail(TOO_LONG, out));
        }
        self.pending_done = Some(DoneItem {
            index: open.index,
            item: item.to_owned(),
        });
        None
    }

    /// Writes the event of the pending done item.
    pub(super) fn write_pending_done(&mut self, status: Status, out: &mut Vec<u8>) {
        let Some(DoneItem { index, item }) = self.pending_done.take() else {
            return;
        };
        let is_incomplete = status != Status::Completed;
        let status = if is_incomplete {
            "incomplete"
        } else {
            "completed"
        };
        let mut written = Vec::with_capacity(item.len() + 64);
        if let Some(kind) = put_item(&mut written, &item, &self.template.ids, index, status) {
            self.write_done(&kind, index, written, out);
        }
    }

    fn write_done(&mut self, kind: &str, index: usize, item: Vec<u8>, out: &mut Vec<u8>) {
        let signer = self.signer.as_ref().filter(|_| kind == "reasoning");
        let signed = signer.and_then(|signer| signer.reasoning(&item));
        let client_item = signed.as_ref().unwrap_or(&item);
        self.writer
            .item_event("response.output_item.done", index, client_item, out);
        self.done.push(item, signed);
    }

    /// A delta or any other event within an item.
    fn on_delta(
        &mut self,
        name: &str,
        data: &str,
        fields: &EventFields<'_>,
        out: &mut Vec<u8>,
    ) -> Option<Outcome> {
        let engine_index = fields.engine_index();
        let mut id: Option<&[u8]> = None;
        let mut index = None;
        let mut content = None;
        let mut part = Vec::new();
        let mut open = std::mem::take(&mut self.open);
        let place = open
            .iter()
            .rposition(|open| open.engine_index == engine_index);
        if let Some(open) = place.map(|place| &mut open[place]) {
            match name {
                "response.content_part.added" => open.begin_part(fields.part.map(RawValue::get)),
                "response.content_part.done" => open.end_part(),
                _ => {
                    if let Some(delta) =
                        fields.delta.and_then(|delta| members::escaped(delta.get()))
                    {
                        self.bytes += open.push(name, delta);
                    }
                }
            }
            id = Some(open.id.as_bytes());
            index = Some(open.index as u64);
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
                differing(fields.output_index, index),
                Replacement::Number(index.unwrap_or_default()),
            ),
            (
                differing(fields.content_index, content),
                Replacement::Number(content.unwrap_or_default()),
            ),
            (fields.part, Replacement::Json(&part)),
            (
                fields.logprobs.filter(|logprobs| logprobs.get() == "null"),
                Replacement::Json(b"[]"),
            ),
        ];
        let begin = out.len();
        let places = self.writer.rewrite(name, data, fields, edits, out);
        let places = places.filter(|_| name.ends_with(".delta"));
        self.last_delta = places.zip(place).map(|(places, open)| LastDelta {
            name: name.to_owned(),
            open,
            begin,
            places,
        });
        self.open = open;
        if self.bytes > self.bytes_max {
            return Some(self.fail(TOO_LONG, out));
        }
        None
    }

    /// The engine sent its final event.
    fn on_ended(&mut self, ended: &Members<'_>, out: &mut Vec<u8>) -> Outcome {
        let Some(mut outcome) = Outcome::of_engine(ended) else {
            return self.fail("the engine ended the stream while the answer went on", out);
        };
        let is_last = self
            .pending_done
            .as_ref()
            .is_some_and(|done| done.index + 1 == self.added);
        let is_incomplete = is_last && outcome.status == Status::Incomplete;
        let status = if is_incomplete {
            Status::Incomplete
        } else {
            Status::Completed
        };
        self.write_pending_done(status, out);
        self.close(outcome.status, out);
        // The client has the items of the single events; the list counts only if it has more items.
        let listed = ended.get("output").and_then(members::list);
        let own = usize::from(self.template.compaction.is_some());
        if listed.is_none_or(|items| items.len() + own <= self.added) {
            (outcome.output, outcome.client_output) = self.done.finish();
        } else {
            let (ids, signer) = (&self.template.ids, self.signer.as_ref());
            let compaction = self.template.compaction.as_ref();
            let read = outcome.read_output(ended, ids, compaction, signer);
            if read.is_none() {
                return self.fail(UNREADABLE, out);
            }
        }
        self.phase = Phase::Ended;
        outcome
    }

    fn on_error(&mut self, fields: &EventFields<'_>, out: &mut Vec<u8>) -> Outcome {
        let error = fields.error.and_then(|raw| Members::parse(raw.get()).ok());
        let status = error.as_ref().and_then(engine_error::status_of);
        let nested = error.and_then(|error| error.text("message"));
        let flat = || fields.message.and_then(|raw| members::text(raw.get()));
        let code = engine_error::failure_code(status);
        match nested.or_else(flat) {
            Some(message) => self.fail_with(code, &message, out),
            None => self.fail_with(code, "the engine failed", out),
        }
    }

    pub(super) fn fail(&mut self, message: &str, out: &mut Vec<u8>) -> Outcome {
        self.fail_with(engine_error::failure_code(None), message, out)
    }

    fn fail_with(&mut self, code: &'static str, message: &str, out: &mut Vec<u8>) -> Outcome {
        self.begin(None, out);
        self.write_pending_done(Status::Completed, out);
        self.close(Status::Failed, out);
        self.phase = Phase::Ended;
        let (output, client_output) = self.done.finish();
        Outcome {
            output,
            client_output,
            ..Outcome::failed(code, message)
        }
    }

    /// Completes the items that the engine left open.
    fn close(&mut self, status: Status, out: &mut Vec<u8>) {
        let status = if status == Status::Completed {
            "completed"
        } else {
            "incomplete"
        };
        for mut open in std::mem::take(&mut self.open) {
            for (name, members) in open.closing() {
                let name = self.writer.renamed(name);
                self.writer.head(name, out);
                let _ = write!(
                    out,
                    r#","item_id":{},"output_index":{}"#,
                    open.id, open.index
                );
                out.extend_from_slice(&members);
                out.extend_from_slice(b"}\n\n");
            }
            let mut item = Vec::new();
            let raw = open.item();
            if let Some(kind) = put_item(&mut item, &raw, &self.template.ids, open.index, status) {
                self.write_done(&kind, open.index, item, out);
            }
        }
    }
}

/// The engine's index if it differs from the router's, which is rare.
fn differing(raw: Option<&RawValue>, index: Option<u64>) -> Option<&RawValue> {
    let index = index?;
    raw.filter(|raw| raw.get().parse() != Ok(index))
}
