//! Rewrites an engine's events into those of one Responses stream. Pure.
//!
//! Deltas pass with a new number, the router's item id and, if needed, a corrected index. The first and the
//! last events are written here. A stream has exactly one end, whatever the engine sends.

mod delta_shape;
mod fields;
mod open_item;
mod stream_state;
mod writer;

use self::delta_shape::DeltaShape;
use self::stream_state::{ENDED_EARLY, StreamState, TOO_LONG};
use self::writer::EventWriter;
pub use self::writer::ReasoningEvents;
use super::client_state::{StateItem, StateSigner};
use super::engine_events::EngineEvents;
use super::object::with_output;
use super::outcome::Outcome;
use super::template::ResponseTemplate;
use crate::store::Status;

/// The marker that clients get after the final event. It is no event.
pub(super) const DONE: &[u8] = b"data: [DONE]\n\n";

/// Limits and dialect of a stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct EventOptions {
    /// Limit on one event, and on all items together.
    pub(super) bytes_max: usize,
    pub(super) reasoning: ReasoningEvents,
}

/// See the module.
#[derive(Debug)]
pub(super) struct EventRewriter {
    /// `None` once the stream has ended.
    engine_events: Option<EngineEvents>,
    stream: StreamState,
    /// The shape of the last event, if it was a delta.
    shape: Option<DeltaShape>,
}

impl EventRewriter {
    /// With a signer, reasoning items get a state token of their own.
    pub(super) fn new(
        template: ResponseTemplate,
        options: EventOptions,
        signer: Option<StateSigner>,
    ) -> Self {
        let writer = EventWriter {
            next: 0,
            reasoning: options.reasoning,
        };
        Self {
            engine_events: Some(EngineEvents::new(options.bytes_max)),
            stream: StreamState::new(template, writer, options.bytes_max, signer),
            shape: None,
        }
    }

    /// For a background response, which is queued first.
    pub(super) fn in_background(mut self) -> Self {
        self.stream.is_background = true;
        self
    }

    /// Writes the `created` and `queued` events, unless they are written.
    pub(super) fn announce(&mut self, out: &mut Vec<u8>) {
        self.stream.announce(out);
    }

    /// Writes the `created` and `in_progress` events of a response for which no engine is asked.
    pub(super) fn open(&mut self, out: &mut Vec<u8>) {
        self.engine_events = None;
        self.stream.begin(None, out);
    }

    /// The response fails before an engine answered.
    pub(super) fn fail(&mut self, message: &str, out: &mut Vec<u8>) -> Outcome {
        self.engine_events = None;
        self.stream.fail(message, out)
    }

    /// Sets the number of the next event.
    pub(super) fn continue_at(&mut self, number: u64) {
        self.stream.writer.next = number;
    }

    /// Goes on after the text of `count` stored events. False if it is not what this writer would have written.
    pub(super) fn go_on_after(&mut self, stored: &[u8], count: u64) -> bool {
        let mut written = Vec::with_capacity(stored.len());
        if self.push(stored, &mut written).is_some() {
            return false;
        }
        self.stream
            .write_pending_done(Status::Completed, &mut written);
        self.stream.writer.next == count
    }

    /// The outcome of a cancelled response: the output so far.
    pub(super) fn cancel(mut self) -> Outcome {
        let outcome = self.stream.fail("", &mut Vec::new());
        Outcome {
            status: Status::Cancelled,
            error: None,
            ..outcome
        }
    }

    /// As [`EventRewriter::cancel`], from the text of stored events.
    pub(super) fn cancel_from(mut self, stored: &[u8]) -> Outcome {
        self.push(stored, &mut Vec::new());
        self.cancel()
    }

    /// Reads bytes of the engine, appends the events for the client, and returns the outcome once there is one.
    pub(super) fn push(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Option<Outcome> {
        let engine_events = self.engine_events.as_mut()?;
        let (stream, shape) = (&mut self.stream, &mut self.shape);
        let mut outcome = None;
        let pushed = engine_events.push_lines(bytes, |lines| {
            outcome = delta_shape::on_lines(stream, shape, lines, out);
            outcome.is_none()
        });
        if outcome.is_none() && pushed.is_err() {
            outcome = Some(stream.fail(TOO_LONG, out));
        }
        if outcome.is_some() {
            self.engine_events = None;
        }
        outcome
    }

    /// The engine closed the stream.
    pub(super) fn finish(&mut self, out: &mut Vec<u8>) -> Option<Outcome> {
        self.engine_events.take()?;
        Some(self.stream.fail(ENDED_EARLY, out))
    }

    pub(super) fn template(&self) -> &ResponseTemplate {
        &self.stream.template
    }

    /// Appends the router's own item after the engine's.
    pub(super) fn add_state_item(&mut self, item: &StateItem, out: &mut Vec<u8>) {
        let index = self.stream.added;
        self.stream.added += 1;
        let names = ["response.output_item.added", "response.output_item.done"];
        for (name, item) in names.into_iter().zip([&item.added, &item.done]) {
            self.stream.writer.item_event(name, index, item, out);
        }
    }

    /// The number of items so far.
    pub(super) fn item_count(&self) -> usize {
        self.stream.added
    }

    /// Writes the final event. `response`: the object without its output.
    pub(super) fn end(&mut self, response: &[u8], outcome: &Outcome, out: &mut Vec<u8>) {
        let response = with_output(response, outcome.client_output());
        let writer = &mut self.stream.writer;
        writer.response_event(final_name(outcome.status), &response, out);
        out.extend_from_slice(DONE);
    }
}

/// The final event of a response, with this number. `response`: the whole object.
pub(super) fn final_event(status: Status, number: u64, response: &[u8]) -> Vec<u8> {
    let mut writer = EventWriter {
        next: number,
        reasoning: ReasoningEvents::default(),
    };
    let mut out = Vec::with_capacity(response.len() + 128);
    writer.response_event(final_name(status), response, &mut out);
    out
}

fn final_name(status: Status) -> &'static str {
    match status {
        Status::Completed => "response.completed",
        Status::Failed => "response.failed",
        // There is no event for a cancelled response; every client ends its stream at this one.
        Status::Incomplete | Status::Cancelled | Status::Queued | Status::InProgress => {
            "response.incomplete"
        }
    }
}

#[cfg(test)]
mod tests;
