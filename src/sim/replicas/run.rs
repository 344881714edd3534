//! One response that a simulated replica runs: the real course, driven without a task.

use std::collections::VecDeque;

use bytes::Bytes;

use super::shop::{Ask, Said};
use super::voice::Voice;
use crate::responses::background::log;
use crate::responses::background::run_state::RunState;
use crate::responses::background::run_step::{Step, StopReason, Then};
use crate::store::record::Content;
use crate::store::{
    CancelledOutput, FencingToken, Finalization, IdempotencyToken, ResponseKey, RoutingHint, Status,
};

/// What an engine says.
#[derive(Clone, Copy, Debug)]
pub(super) enum Word {
    Some(u64),
    /// Nothing more, and how it ended.
    Last(Status),
}

/// What a run needs of the world.
#[derive(Debug)]
pub(super) enum Act {
    Ask(Ask),
    /// An engine that answers.
    Engine,
    /// What comes.
    Wait,
    /// Nothing more.
    Leave,
}

#[derive(Debug)]
pub(super) struct Run {
    pub(super) serial: u64,
    pub(super) state: RunState,
    /// Whether its record is known to be there.
    pub(super) is_stored: bool,
    key: ResponseKey,
    fence: FencingToken,
    voice: Voice,
    heard: VecDeque<Word>,
    has_engine: bool,
    end: Option<End>,
    /// The question that it waits to be answered. Another one's answer is not heard.
    pub(super) asked: u64,
    /// The last event of the batch that was sent.
    last: u64,
    /// Ends that were made.
    ends: u64,
}

#[derive(Debug)]
struct End {
    token: IdempotencyToken,
    status: Status,
    cut: Bytes,
}

impl Run {
    pub(super) fn new(serial: u64, key: ResponseKey, fence: FencingToken, state: RunState) -> Self {
        Self {
            serial,
            state,
            is_stored: false,
            key,
            fence,
            voice: Voice::new(serial),
            heard: VecDeque::new(),
            has_engine: false,
            end: None,
            asked: 0,
            last: 0,
            ends: 0,
        }
    }

    pub(super) fn hear(&mut self, word: Word) {
        self.heard.push_back(word);
    }

    /// True if what it waits for is waited for no more.
    pub(super) fn stop(&mut self, reason: StopReason) -> bool {
        let before = self.state.next();
        self.state.on_stop(reason);
        before != self.state.next()
    }

    pub(super) fn act(&mut self) -> Act {
        let (key, fence) = (self.key, self.fence);
        loop {
            return Act::Ask(match self.state.next() {
                Step::ReadEngine if !self.voice.is_announced() => {
                    self.state.on_events(self.voice.announce().as_bytes());
                    continue;
                }
                Step::ReadEngine => match self.heard.pop_front() {
                    Some(word) => {
                        self.on_word(word);
                        continue;
                    }
                    None if self.has_engine => return Act::Wait,
                    None => {
                        self.has_engine = true;
                        return Act::Engine;
                    }
                },
                Step::MarkStarted => Ask::Start(key, fence),
                Step::Append(batch) => {
                    self.last = batch.last;
                    Ask::Append(key, fence, batch)
                }
                Step::ReadStored { after } => Ask::Events(key, after),
                Step::Fail {
                    has_stored_output, ..
                } => {
                    match has_stored_output {
                        true => self.voice.go_on_at(self.state.log().stored()),
                        false => {
                            let said = self.voice.words(0);
                            self.state.on_events(said.as_bytes());
                        }
                    }
                    self.conclude(Status::Failed);
                    continue;
                }
                Step::FailWithoutOutput { number } => {
                    self.voice.go_on_at(number);
                    self.conclude(Status::Failed);
                    if let Some(end) = &mut self.end {
                        end.cut = Bytes::new();
                    }
                    continue;
                }
                Step::Finalize(batch) => {
                    let Some(end) = &self.end else {
                        return Act::Leave;
                    };
                    Ask::Finalize(
                        key,
                        fence,
                        Box::new(Finalization {
                            token: end.token,
                            status: end.status,
                            content: Content::default(),
                            hint: hint(),
                            batch,
                            delta_table: end.cut.clone(),
                        }),
                    )
                }
                Step::ReadCancelled => Ask::Get(key),
                Step::StorePartial => {
                    let told = self.state.log().stored_text();
                    let told = told.filter(|_| self.state.streams());
                    let amend = CancelledOutput {
                        content: Content::default(),
                        delta_table: told.map(log::compressed).unwrap_or_default(),
                    };
                    Ask::Amend(key, fence, amend)
                }
                Step::Release => Ask::Release(key, fence),
                Step::Done => return Act::Leave,
            });
        }
    }

    fn on_word(&mut self, word: Word) {
        self.state.on_begun();
        match word {
            Word::Some(count) => {
                let said = self.voice.words(count);
                self.state.on_events(said.as_bytes());
            }
            Word::Last(status) => {
                let said = self.voice.words(0);
                self.state.on_events(said.as_bytes());
                self.conclude(status);
            }
        }
    }

    fn conclude(&mut self, status: Status) {
        let text = self.state.log().text().filter(|_| self.state.streams());
        let cut = text.map(log::compressed).unwrap_or_default();
        self.state.on_last_event(self.voice.end().as_bytes());
        self.ends += 1;
        self.end = Some(End {
            token: IdempotencyToken(self.serial * 256 + self.ends),
            status,
            cut,
        });
    }

    pub(super) fn on_said(&mut self, said: &Said) -> Then {
        match (self.state.next(), said) {
            (Step::MarkStarted, Said::Cas(said)) => self.state.on_started(said),
            (Step::Append(_), Said::Cas(said)) => self.state.on_appended(self.last, said),
            (Step::ReadStored { .. }, Said::Events(said)) => self.state.on_stored_events(said),
            (Step::Finalize(_), Said::Cas(said)) => self.state.on_finalized(said),
            (Step::ReadCancelled, Said::Record(said)) => {
                let said = said.as_ref().map(|found| {
                    let found = found.as_ref()?;
                    let last = found.background.and_then(|it| it.last_event);
                    Some((found.status, last))
                });
                self.state.on_record(&said.map_err(Clone::clone))
            }
            (Step::StorePartial, Said::Cas(said)) => self.state.on_partial_stored(said),
            (Step::Release, Said::Cas(said)) => self.state.on_released(said),
            _ => Then::Continue,
        }
    }
}

pub(super) fn hint() -> RoutingHint {
    RoutingHint {
        model: "sim".into(),
        worker: None,
    }
}
