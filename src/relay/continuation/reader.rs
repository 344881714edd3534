//! Reads a stream as it passes: keeps the token ids, takes them out, and joins what several workers write into one stream.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use serde_json::value::RawValue;

use super::chunk::{Choice, Chunk, push_ids};
use super::progress::{Counts, Progress, Resume};
use super::refusal::Refusal;
use super::request::Request;
use super::settings::Settings;
use super::usage::{self, Earlier};
use crate::http::sse;
use crate::relay::answer::first_token_gate::{self, Verdict};
use crate::relay::answer::splice::Splice;

const NULL: &str = "null";
/// More than the text of any token.
const TOKEN_TEXT_BYTES: usize = 256;

#[derive(Debug)]
pub(in crate::relay) struct Reader {
    settings: Settings,
    request: Request,
    /// As the router expected, at the first worker.
    cached_tokens: u64,
    /// The ids of the client's prompt; empty until the first chunk.
    prompt: Vec<u32>,
    /// The ids of the answer, from all workers.
    answer: Vec<u32>,
    /// How many of them have all their text in what was passed. The text of the others is held back by the engine: a
    /// character that is not complete, the beginning of a tool call.
    settled: usize,
    /// Settled tokens of reasoning.
    reasoning: usize,
    /// How many ids came with the last text.
    last_ids: usize,
    has_role: bool,
    has_text: bool,
    /// The answer has ended, or the request was refused within it.
    has_finish: bool,
    /// What all chunks have in common, from the first one.
    common: Option<Common>,
    /// Why the stream cannot be continued.
    refusal: Option<Refusal>,
    /// How often the stream was continued.
    pub(in crate::relay) times: u32,
    earlier: Earlier,
    /// The next text is the first of another worker.
    is_at_seam: bool,
    /// That worker has shown that it goes on from the tokens that it was given. An engine that does not read them begins the
    /// answer again.
    goes_on: bool,
    /// Learns what was passed, if another process may go on with it.
    progress: Option<Arc<Progress>>,
}

#[derive(Debug)]
struct Common {
    id: Box<str>,
    created: Box<str>,
    model: Box<str>,
}

/// How a stream ends whose connection has not.
#[derive(Debug)]
pub(in crate::relay) enum End {
    /// With an error of the engine, and what came after it: to be passed if the stream is not continued.
    EngineError(Bytes),
    /// With a text that does not join.
    Torn,
}

/// What becomes of an event.
enum Fate {
    Pass,
    Drop,
    Error,
    Torn,
}

impl Reader {
    pub(in crate::relay) fn new(settings: Settings, request: Request, cached_tokens: u64) -> Self {
        Self {
            settings,
            request,
            cached_tokens,
            prompt: Vec::new(),
            answer: Vec::new(),
            settled: 0,
            reasoning: 0,
            last_ids: 0,
            has_role: false,
            has_text: false,
            has_finish: false,
            common: None,
            refusal: None,
            times: 0,
            earlier: Earlier::default(),
            is_at_seam: false,
            goes_on: false,
            progress: None,
        }
    }

    /// Goes on with a stream of which another process passed the beginning. Returns the body for the worker, too.
    pub(in crate::relay) fn resumed(
        settings: Settings,
        request: Request,
        resume: &Resume,
    ) -> Result<(Self, Bytes), Refusal> {
        let Resume {
            counts,
            prompt,
            answer,
            model: _,
        } = resume;
        if let Some(refusal) = counts.refusal {
            return Err(refusal);
        }
        if prompt.len() + answer.len() > settings.max_tokens as usize {
            return Err(Refusal::TooLong);
        }
        let mut reader = Self {
            prompt: prompt.clone(),
            answer: answer.clone(),
            settled: answer.len(),
            reasoning: counts.reasoning as usize,
            last_ids: counts.last_ids as usize,
            has_role: true,
            has_text: true,
            times: counts.times,
            ..Self::new(settings, request, counts.cached.into())
        };
        let body = reader.next_body()?;
        Ok((reader, body))
    }

    /// Notes what was passed in `progress`.
    pub(in crate::relay) fn report_to(&mut self, progress: Arc<Progress>, model: &str) {
        progress.begin(model);
        self.progress = Some(progress);
    }

    fn report(&self) {
        let Some(progress) = &self.progress else {
            return;
        };
        let finished = self.has_finish.then_some(Refusal::Finished);
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let counts = Counts {
            times: self.times,
            reasoning: count(self.reasoning),
            last_ids: count(self.last_ids),
            cached: u32::try_from(self.cached_tokens).unwrap_or(u32::MAX),
            refusal: self.refusal.or(finished),
        };
        progress.note(counts, &self.prompt, &self.answer[..self.settled]);
    }

    pub(in crate::relay) fn tokens_max(&self) -> usize {
        self.settings.max_tokens as usize
    }

    /// Tokens of the answer that the next worker is given.
    pub(in crate::relay) fn answer_tokens(&self) -> u32 {
        u32::try_from(self.settled).unwrap_or(u32::MAX)
    }

    /// Takes whole events; returns what the client gets, and whether the stream is over.
    pub(in crate::relay) fn on_events(&mut self, events: Bytes) -> (Bytes, Option<End>) {
        let passed = self.pass(events);
        self.report();
        passed
    }

    fn pass(&mut self, events: Bytes) -> (Bytes, Option<End>) {
        let mut splice = Splice::new(&events);
        let mut position = 0;
        while position < events.len() {
            let rest = &events[position..];
            let end = position + sse::event_end(rest);
            match self.on_event(&events, position..end, &mut splice) {
                Fate::Pass => splice.apply(),
                Fate::Drop => splice.drop_event(position..end),
                fate @ (Fate::Error | Fate::Torn) => {
                    let passed = splice.finish(position);
                    let end = match fate {
                        Fate::Torn => End::Torn,
                        _ => End::EngineError(events.slice(position..)),
                    };
                    return (passed.unwrap_or_default(), Some(end));
                }
            }
            position = end;
        }
        let passed = splice.finish(position);
        (passed.unwrap_or(events), None)
    }

    fn on_event<'e>(
        &mut self,
        events: &'e [u8],
        event: Range<usize>,
        splice: &mut Splice<'e>,
    ) -> Fate {
        let Some(data) = data_of(&events[event.clone()]) else {
            return Fate::Pass;
        };
        if data.starts_with(b"[DONE]") {
            if self.has_text && !self.has_finish && self.refusal.is_none() {
                return Fate::Torn;
            }
            if self.times > 0 {
                let comment = format!(": x-warmroute-continued: {}\n\n", self.times);
                splice.put(event.start..event.start, comment.as_bytes());
            }
            return Fate::Pass;
        }
        match serde_json::from_slice::<Chunk<'e>>(data) {
            Ok(chunk) => self.on_chunk(&chunk, splice),
            Err(_) => {
                self.refuse(Refusal::NoTokenIds);
                Fate::Pass
            }
        }
    }

    fn on_chunk<'e>(&mut self, chunk: &Chunk<'e>, splice: &mut Splice<'e>) -> Fate {
        if let Some(error) = chunk.error {
            if first_token_gate::verdict_on(error) != Verdict::Refusal {
                return Fate::Error;
            }
            // Another worker would answer it, too: nothing is to follow.
            self.has_finish = true;
            return Fate::Pass;
        }
        let choice = chunk.choices.as_deref().and_then(<[_]>::first);
        let prompt_ids = choice.and_then(|choice| choice.prompt_token_ids);
        for ids in [chunk.prompt_token_ids, prompt_ids].into_iter().flatten() {
            splice.replace(ids.get(), NULL);
            if self.prompt.is_empty() && push_ids(ids.get(), &mut self.prompt).is_none() {
                self.refuse(Refusal::NoTokenIds);
            }
            if self.is_at_seam && !self.goes_on {
                if !self.is_given(ids) {
                    self.refuse(Refusal::Seam);
                    return Fate::Torn;
                }
                self.goes_on = true;
            }
            self.earlier.prompt = self.prompt.len() as u64;
        }
        self.on_common(chunk, splice);
        if self.times > 0
            && let Some(usage) = chunk.usage
        {
            usage::correct(usage, self.earlier, splice);
        }
        let fate = choice.map_or(Fate::Pass, |choice| self.on_choice(choice, splice));
        if self.prompt.len() + self.answer.len() > self.settings.max_tokens as usize {
            self.refuse(Refusal::TooLong);
        }
        fate
    }

    /// Later chunks get the id, the time and the model of the first one.
    fn on_common<'e>(&mut self, chunk: &Chunk<'e>, splice: &mut Splice<'e>) {
        let Some(common) = &self.common else {
            let text = |raw: Option<&RawValue>| raw.map_or(NULL, RawValue::get).into();
            self.common = Some(Common {
                id: text(chunk.id),
                created: text(chunk.created),
                model: text(chunk.model),
            });
            return;
        };
        if self.times == 0 {
            return;
        }
        for (raw, text) in [
            (chunk.id, &common.id),
            (chunk.created, &common.created),
            (chunk.model, &common.model),
        ] {
            if let Some(raw) = raw {
                splice.replace(raw.get(), text.to_string());
            }
        }
    }

    fn on_choice<'e>(&mut self, choice: &Choice<'e>, splice: &mut Splice<'e>) -> Fate {
        if choice.is_aborted() {
            return Fate::Torn;
        }
        let ids = choice.token_ids.map(|ids| {
            splice.replace(ids.get(), NULL);
            match self.refusal {
                None => push_ids(ids.get(), &mut self.answer),
                Some(_) => None,
            }
        });
        self.has_finish |= choice.finish_reason.is_some();
        let reasoning = choice.reasoning();
        let text = choice.content().or(reasoning);
        let has_call = choice.has_call();
        if self.is_at_seam && !self.goes_on && (text.is_some() || has_call) {
            self.refuse(Refusal::Seam);
            return Fate::Torn;
        }
        if has_call {
            self.refuse(Refusal::ToolCall);
        }
        let Some(text) = text else {
            let is_role = choice.is_role();
            let is_second = is_role && std::mem::replace(&mut self.has_role, true);
            let is_left_out = choice.is_empty() && ids.is_some() || is_second;
            return if is_left_out { Fate::Drop } else { Fate::Pass };
        };
        self.has_text = true;
        let count = ids.flatten();
        // The ids of a stream that cannot go on once more are not read; its text joins all the same.
        if std::mem::take(&mut self.is_at_seam) && self.is_torn(text, count.unwrap_or_default()) {
            self.refuse(Refusal::Seam);
            return Fate::Torn;
        }
        let Some(count) = count else {
            self.refuse(Refusal::NoTokenIds);
            return Fate::Pass;
        };
        if reasoning.is_some() {
            self.reasoning += self.answer.len() - self.settled;
        }
        self.settled = self.answer.len();
        self.last_ids = count;
        Fate::Pass
    }

    /// Whether these are the ids of the prompt and of the answer so far.
    fn is_given(&self, ids: &RawValue) -> bool {
        let mut given = Vec::new();
        let so_far = self.prompt.iter().chain(&self.answer);
        push_ids(ids.get(), &mut given).is_some() && given.iter().eq(so_far)
    }

    /// Whether the first text of another worker does not join. With several ids in the last chunk, the last of them may
    /// have been the beginning of a character. Then engines write it as U+FFFD, or their whole prompt as text.
    fn is_torn(&self, text: &RawValue, count: usize) -> bool {
        let text = text.get().as_bytes();
        let starts_broken = [&b"\"\xEF\xBF\xBD"[..], b"\"\\ufffd", b"\"\\uFFFD"];
        let is_broken = starts_broken.iter().any(|start| text.starts_with(start));
        let is_long = text.len() > TOKEN_TEXT_BYTES * count.max(1);
        self.last_ids > 1 && (is_broken || is_long)
    }

    /// The stream has broken off: the body for the next worker.
    pub(in crate::relay) fn next_body(&mut self) -> Result<Bytes, Refusal> {
        if let Some(refusal) = self.refusal {
            return Err(refusal);
        }
        if self.has_finish {
            return Err(Refusal::Finished);
        }
        if self.times >= self.settings.max_per_request {
            return Err(Refusal::Limit);
        }
        // What the engine held back is generated anew.
        self.answer.truncate(self.settled);
        let body = match (self.has_text, self.prompt.is_empty()) {
            // Nothing of the answer was passed.
            (false, _) => self.request.body.clone(),
            (true, true) => return Err(Refusal::NoTokenIds),
            (true, false) => self.request.after(&self.prompt, &self.answer)?,
        };
        self.times += 1;
        self.is_at_seam = self.has_text;
        self.goes_on = false;
        self.earlier = Earlier {
            prompt: self.prompt.len() as u64,
            answer: self.settled as u64,
            reasoning: self.reasoning as u64,
            cached: self.cached_tokens,
        };
        Ok(body)
    }

    /// The first reason counts. What was kept is of no use any more.
    fn refuse(&mut self, refusal: Refusal) {
        if self.refusal.is_none() {
            self.refusal = Some(refusal);
            self.answer = Vec::new();
            self.settled = 0;
        }
    }
}

/// The data of an event of one line.
fn data_of(event: &[u8]) -> Option<&[u8]> {
    let data = sse::lines(event).find_map(|line| line.strip_prefix(b"data:"))?;
    Some(data.trim_ascii())
}
