//! The answer of a chat stream as the events of an engine with the Responses API. Pure.

use serde_json::value::RawValue;
use smallvec::SmallVec;

use super::call::Call;
use super::chunk::{
    CallDelta, Choice, Chunk, Delta, FunctionDelta, entries, message_of, text_of, usage,
};
use super::end::End;
use super::item::{Phase, TextItem};
use super::tools::AnsweredTools;
use super::written::Written;
use crate::responses::engine_error;
use crate::responses::output_item::PartKind;

const TOO_LONG: &str = "the answer is longer than the router allows";
const UNREADABLE: &str = "the engine sent a chunk that the router cannot read";
/// Calls in one answer. More is a defect of the engine.
const CALLS_MAX: usize = 1024;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct ChatAnswer {
    tools: AnsweredTools,
    has_started: bool,
    /// True after the terminal event.
    pub(super) is_over: bool,
    /// The message or reasoning item that grows.
    text: Option<TextItem>,
    /// Calls stay open until the end, since their fragments may be mixed.
    calls: SmallVec<[Call; 2]>,
    /// Index of the next item.
    next: usize,
    finish_reason: Option<String>,
    usage: Option<String>,
    /// Why the answer failed.
    pub(super) error: Option<String>,
    /// The data of the engine's own error event.
    pub(super) engine_error: Option<String>,
    /// Bytes of texts and arguments, however they came.
    pub(super) bytes: usize,
    bytes_max: usize,
    /// The items that are done, if they are kept for a whole answer.
    done: Option<Vec<(usize, Vec<u8>)>>,
    /// The Response object at the end, if the items are kept.
    pub(super) whole: Vec<u8>,
}

impl ChatAnswer {
    /// `keeps_items`: for a whole answer.
    pub(super) fn new(tools: AnsweredTools, bytes_max: usize, keeps_items: bool) -> Self {
        Self {
            tools,
            bytes_max,
            done: keeps_items.then(Vec::new),
            ..Self::default()
        }
    }

    /// Goes on with an answer whose beginning another replica wrote.
    pub(super) fn go_on_after(&mut self, written: &Written) {
        self.has_started = true;
        self.text = written.open.clone();
        self.next = written.next;
        self.bytes = written.bytes;
    }

    pub(super) fn has_items(&self) -> bool {
        self.next > 0
    }

    /// Takes the data of one event, and appends the events that it becomes.
    pub(super) fn on_data(&mut self, data: &str, out: &mut Vec<u8>) {
        if self.is_over {
            return;
        }
        self.start(out);
        if data == "[DONE]" {
            return self.finish(out);
        }
        let Ok(chunk) = serde_json::from_str::<Chunk<'_>>(data) else {
            return self.fail(UNREADABLE, out);
        };
        if let Some(error) = chunk.error {
            // The answer is complete once it has its finish reason; what is lost is at most its usage.
            return match self.finish_reason {
                Some(_) => self.finish(out),
                None => {
                    let status = engine_error::status_within(data);
                    self.engine_error = Some(data.to_owned());
                    let failed = End::Failed {
                        code: engine_error::failure_code(status),
                        message: message_of(error.get()),
                    };
                    self.end(failed, out);
                }
            };
        }
        if let Some(found) = chunk.usage.and_then(|raw| usage(raw.get())) {
            self.usage = Some(found);
        }
        for choice in chunk.choices.into_iter().flatten() {
            if choice.index.is_some_and(|index| index != 0) {
                return self.fail("the engine sent a second answer", out);
            }
            if let Err(message) = self.on_choice(choice, out) {
                return self.fail(&message, out);
            }
        }
    }

    /// The engine closed the stream.
    pub(super) fn on_end(&mut self, out: &mut Vec<u8>) {
        if !self.is_over {
            self.start(out);
            self.finish(out);
        }
    }

    /// Ends the answer for a reason of the router's.
    pub(super) fn fail(&mut self, message: &str, out: &mut Vec<u8>) {
        self.start(out);
        self.end(End::failed(message), out);
    }

    fn start(&mut self, out: &mut Vec<u8>) {
        if !std::mem::replace(&mut self.has_started, true) {
            out.extend_from_slice(
                b"data: {\"type\":\"response.created\",\"response\":{\"status\":\"in_progress\"}}\n\n",
            );
        }
    }

    fn on_choice(&mut self, choice: Choice<'_>, out: &mut Vec<u8>) -> Result<(), String> {
        if let Some(delta) = &choice.delta {
            let logprobs = choice.logprobs.filter(|_| self.tools.has_logprobs);
            self.on_delta(delta, logprobs.map(RawValue::get), out)?;
        }
        if let Some(reason) = choice.finish_reason.filter(|reason| !reason.is_empty()) {
            self.finish_reason = Some(reason.into_owned());
        }
        if self.bytes > self.bytes_max {
            Err(TOO_LONG.to_owned())
        } else {
            Ok(())
        }
    }

    fn on_delta(
        &mut self,
        delta: &Delta<'_>,
        logprobs: Option<&str>,
        out: &mut Vec<u8>,
    ) -> Result<(), String> {
        // Engines that send both names send the same under both.
        let reasoning = text_of(delta.reasoning).or_else(|| text_of(delta.reasoning_content));
        let calls = delta.tool_calls.as_deref().unwrap_or_default();
        let is_mixed = reasoning.is_some() || !calls.is_empty();
        if let Some(reasoning) = reasoning {
            self.push_text(PartKind::Reasoning, &reasoning, "", out);
        }
        if let Some(content) = text_of(delta.content) {
            // Of reasoning and calls the engine's own entries are mixed in.
            let logprobs = logprobs.filter(|_| !is_mixed).and_then(entries);
            self.push_text(PartKind::Text, &content, logprobs.unwrap_or_default(), out);
        }
        if let Some(refusal) = text_of(delta.refusal) {
            self.push_text(PartKind::Refusal, &refusal, "", out);
        }
        for (position, call) in calls.iter().enumerate() {
            self.on_call(position, call, out)?;
        }
        if let Some(function) = &delta.function_call {
            let slot = self.slot(Some(0), None, None);
            self.on_function(slot, function, out)?;
        }
        Ok(())
    }

    fn push_text(&mut self, kind: PartKind, text: &str, logprobs: &str, out: &mut Vec<u8>) {
        self.bytes += text.len() + logprobs.len();
        let is_reasoning = kind == PartKind::Reasoning;
        // A call after it closed the text item, so that text after a call is a new one.
        if self
            .text
            .as_ref()
            .is_some_and(|item| item.is_reasoning != is_reasoning)
        {
            self.close_text(None, out);
        }
        let next = &mut self.next;
        let item = self.text.get_or_insert_with(|| {
            *next += 1;
            TextItem::open(*next - 1, is_reasoning, out)
        });
        item.push(kind, text, logprobs, out);
    }

    fn on_call(
        &mut self,
        position: usize,
        delta: &CallDelta<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), String> {
        let id = delta.id.as_deref().filter(|id| !id.is_empty());
        let index = delta.index.or((position > 0).then_some(position as u64));
        if self.calls.len() >= CALLS_MAX {
            return Err("the engine sent too many calls".to_owned());
        }
        let slot = self.slot(index, id, delta.function.as_ref());
        if let Some(id) = id {
            let function = delta.function.as_ref();
            let name = function.and_then(|function| function.name.as_deref());
            self.calls[slot].add_id(id, name.unwrap_or_default());
        }
        match &delta.function {
            Some(function) => self.on_function(slot, function, out),
            None => Ok(()),
        }
    }

    /// The position of the call that a fragment belongs to. Without an index it is the last call, unless its id is new. Some
    /// engines give all calls one index: there, too, it is the last call, unless the fragment begins another one or has the
    /// id of an earlier one.
    fn slot(
        &mut self,
        index: Option<u64>,
        id: Option<&str>,
        function: Option<&FunctionDelta<'_>>,
    ) -> usize {
        let name = function.and_then(|function| function.name.as_deref());
        let name = name.filter(|name| !name.is_empty());
        let arguments = function.and_then(|function| function.arguments);
        let arguments = arguments.map_or("", RawValue::get);
        let begins_another =
            |call: &Call| name.is_some_and(|name| call.is_followed_by(id, name, arguments));
        let found = match (index, id) {
            (Some(key), _) => {
                let mut calls = self.calls.iter();
                let known = calls.rposition(|call| call.key == key && id == Some(&*call.id));
                known.or_else(|| {
                    let last = self.calls.iter().rposition(|call| call.key == key);
                    last.filter(|last| !begins_another(&self.calls[*last]))
                })
            }
            (None, Some(id)) => self
                .calls
                .iter()
                .position(|call| call.id == id)
                .or_else(|| self.calls.iter().rposition(|call| call.id.is_empty())),
            (None, None) => {
                let last = self.calls.len().checked_sub(1);
                last.filter(|last| !begins_another(&self.calls[*last]))
            }
        };
        found.unwrap_or_else(|| {
            let key = index.unwrap_or(self.calls.len() as u64);
            self.calls.push(Call::new(key));
            self.calls.len() - 1
        })
    }

    fn on_function(
        &mut self,
        slot: usize,
        function: &FunctionDelta<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), String> {
        if let Some(name) = function.name.as_deref().filter(|name| !name.is_empty()) {
            self.calls[slot].add_name(name);
        }
        if let Some(arguments) = function.arguments {
            self.bytes += arguments.get().len();
            let is_custom = self.tools.has_custom;
            self.calls[slot].add_arguments(arguments.get(), is_custom);
        }
        let call = &self.calls[slot];
        // A name that no tool has may be only a piece of it.
        let is_named =
            !call.name.is_empty() && (call.has_arguments() || self.tools.knows(&call.name));
        if is_named && !call.is_open() {
            self.open_call(slot, out)?;
        }
        self.calls[slot].send(out);
        Ok(())
    }

    fn open_call(&mut self, slot: usize, out: &mut Vec<u8>) -> Result<(), String> {
        let name = &self.calls[slot].name;
        if let Some(allowed) = &self.tools.allowed {
            allowed.check_name(name)?;
        }
        let tool = self.tools.tool(name);
        self.close_text(Some(Phase::Commentary), out);
        let call = &mut self.calls[slot];
        if call.id.is_empty() {
            call.id = format!("call_{:016x}{:016x}", fastrand::u64(..), fastrand::u64(..));
        }
        call.open(self.next, tool, out);
        self.next += 1;
        Ok(())
    }

    fn close_text(&mut self, phase: Option<Phase>, out: &mut Vec<u8>) {
        if let Some(item) = self.text.take() {
            let index = item.index;
            let item = item.close(phase.filter(|_| self.tools.marks_phases), out);
            self.keep(index, item);
        }
    }

    fn keep(&mut self, index: usize, item: Vec<u8>) {
        if let Some(done) = &mut self.done {
            done.push((index, item));
        }
    }

    /// The stream is over: what it was depends on its finish reason.
    fn finish(&mut self, out: &mut Vec<u8>) {
        let end = End::of(self.finish_reason.as_deref());
        self.end(end, out);
    }

    fn end(&mut self, mut end: End, out: &mut Vec<u8>) {
        if std::mem::replace(&mut self.is_over, true) {
            return;
        }
        if !matches!(end, End::Failed { .. })
            && let Err(message) = self.close_all(matches!(end, End::Completed), out)
        {
            end = End::failed(message);
        }
        self.write_end(&end, out);
        if let End::Failed { message, .. } = end {
            // Open items are closed as incomplete by the reader of the events.
            self.error = Some(message);
        }
    }

    /// Closes all items in the order of their indices.
    fn close_all(&mut self, is_complete: bool, out: &mut Vec<u8>) -> Result<(), String> {
        for slot in 0..self.calls.len() {
            let call = &self.calls[slot];
            if !call.is_open() && !call.name.is_empty() {
                self.open_call(slot, out)?;
            }
        }
        let mut calls = std::mem::take(&mut self.calls);
        calls.sort_by_key(Call::index);
        for call in calls {
            let Some(index) = call.index() else { continue };
            if self.text.as_ref().is_some_and(|text| text.index < index) {
                self.close_text(Some(Phase::Commentary), out);
            }
            if let Some(item) = call.close(is_complete, out) {
                self.keep(index, item);
            }
        }
        self.close_text(is_complete.then_some(Phase::FinalAnswer), out);
        Ok(())
    }

    fn write_end(&mut self, end: &End, out: &mut Vec<u8>) {
        out.extend_from_slice(br#"data: {"type":"response."#);
        out.extend_from_slice(end.status().as_bytes());
        out.extend_from_slice(br#"","response":"#);
        let begin = out.len();
        let usage = self.usage.as_deref();
        end.write_response(self.done.as_deref().unwrap_or_default(), usage, out);
        if self.done.is_some() {
            self.whole = out[begin..].to_vec();
        }
        out.extend_from_slice(b"}\n\n");
    }
}
