//! One response that a simulated replica runs: the real run state, driven without a task.

use std::collections::VecDeque;

use bytes::Bytes;

use super::encoder::{self, Answer, EventEncoder};
use super::store_harness::{conversation_of, conversation_token};
use super::store_request::{StoreReply, StoreRequest};
use super::turns::Turn;
use warmroute::responses::background::log;
use warmroute::responses::background::run_state::RunState;
use warmroute::responses::background::run_step::{Step, StopReason, Then};
use warmroute::store::record::{Content, Retention};
use warmroute::store::{
    Cancellation, CancelledOutput, Commit, FencingToken, Finalization, IdempotencyToken, Item,
    ResponseKey, RoutingHint, Status,
};

/// An output of the engine.
#[derive(Clone, Copy, Debug)]
pub(super) enum Word {
    Some(u64),
    /// The end of the stream, and the resulting status.
    Last(Status),
}

/// What a run needs next from its environment.
#[derive(Debug)]
pub(super) enum Act {
    StoreRequest(StoreRequest),
    /// A response of an engine.
    Engine,
    /// Engine output.
    Wait,
    /// Nothing.
    Leave,
}

/// Why a run ends as failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FailureCause {
    Engine,
    /// The store refuses the output.
    TooLarge,
    /// What the owner found or was asked to do.
    Owner,
}

#[derive(Debug)]
pub(super) struct Run {
    pub(super) serial: u64,
    pub(super) state: RunState,
    /// Whether the record is known to exist.
    pub(super) is_stored: bool,
    key: ResponseKey,
    fence: FencingToken,
    encoder: EventEncoder,
    arrived: VecDeque<Word>,
    has_engine: bool,
    end: Option<End>,
    /// The request whose reply it waits for; other replies are ignored.
    pub(super) asked: u64,
    /// The last event of the batch that was sent.
    last: u64,
    /// Finalizations sent so far.
    ends: u64,
    pub(super) failure: Option<FailureCause>,
    /// Its turn, if its conversation is shared.
    pub(super) turn: Option<Turn>,
}

#[derive(Debug)]
struct End {
    token: IdempotencyToken,
    status: Status,
    cut: Bytes,
    /// The text of all events before the end, if they are known.
    output: Bytes,
}

impl Run {
    pub(super) fn new(
        serial: u64,
        key: ResponseKey,
        fence: FencingToken,
        state: RunState,
        answer: Option<Answer>,
    ) -> Self {
        Self {
            serial,
            state,
            is_stored: false,
            key,
            fence,
            encoder: EventEncoder::new(serial, answer),
            arrived: VecDeque::new(),
            has_engine: false,
            end: None,
            asked: 0,
            last: 0,
            ends: 0,
            failure: None,
            turn: None,
        }
    }

    /// Its end was refused because of another turn: it is generated again as the run of this serial.
    pub(super) fn begin_again(&mut self, serial: u64) {
        self.serial = serial;
        self.encoder.restart(serial);
        self.arrived.clear();
        self.has_engine = false;
        self.end = None;
    }

    pub(super) fn has_end(&self) -> bool {
        self.end.is_some()
    }

    pub(super) fn hear(&mut self, word: Word) {
        self.arrived.push_back(word);
    }

    /// True if the pending wait was abandoned.
    pub(super) fn stop(&mut self, reason: StopReason) -> bool {
        let before = self.state.next();
        self.state.on_stop(reason);
        before != self.state.next()
    }

    pub(super) fn act(&mut self) -> Act {
        let (key, fence) = (self.key, self.fence);
        loop {
            return Act::StoreRequest(match self.state.next() {
                Step::ReadEngine if !self.encoder.is_announced() => {
                    self.state.on_events(self.encoder.announce().as_bytes());
                    continue;
                }
                Step::ReadEngine => match self.arrived.pop_front() {
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
                Step::MarkStarted => StoreRequest::Start(key, fence),
                Step::Append(batch) => {
                    self.last = batch.last;
                    StoreRequest::Append(key, fence, batch)
                }
                Step::ReadStored { after } => StoreRequest::Events(key, after),
                Step::GoOn => {
                    let may_go_on = self.go_on();
                    self.state.on_set_up(may_go_on);
                    continue;
                }
                Step::Fail {
                    has_stored_output, ..
                } => {
                    if has_stored_output {
                        self.encoder.go_on_at(self.state.log.stored());
                    } else {
                        let said = self.encoder.words(0);
                        self.state.on_events(said.as_bytes());
                    }
                    self.failure = Some(FailureCause::Owner);
                    self.conclude(Status::Failed);
                    continue;
                }
                Step::FailInstead { number, .. } => {
                    self.encoder.go_on_at(number);
                    self.conclude(Status::Failed);
                    self.failure = Some(FailureCause::TooLarge);
                    if let Some(end) = &mut self.end {
                        (end.cut, end.output) = Default::default();
                    }
                    continue;
                }
                Step::Finalize(batch) => {
                    let Some(end) = &self.end else {
                        return Act::Leave;
                    };
                    StoreRequest::Finalize(
                        key,
                        fence,
                        Box::new(Finalization {
                            commit: match &mut self.turn {
                                Some(turn) => turn.commit(end.status, self.serial),
                                None => commit(key, end.status, self.serial),
                            },
                            retention: Retention::Stored,
                            token: end.token,
                            status: end.status,
                            content: Content {
                                response: run_name(self.serial),
                                output: end.output.clone(),
                            },
                            hint: hint(),
                            batch,
                            delta_table: end.cut.clone(),
                        }),
                    )
                }
                Step::ReadCancelled => StoreRequest::Get(key),
                Step::CancelAgain => StoreRequest::Cancel(key, cancellation(self.serial)),
                Step::StorePartial => {
                    let logged = self.state.log.stored_text();
                    let logged = logged.filter(|_| self.state.streams);
                    let amend = CancelledOutput {
                        content: Content {
                            response: Bytes::new(),
                            output: Bytes::copy_from_slice(logged.unwrap_or_default()),
                        },
                        delta_table: logged.map(log::compressed).unwrap_or_default(),
                    };
                    StoreRequest::FinalizeCancelled(key, fence, amend)
                }
                Step::Release => StoreRequest::Release(key, fence),
                Step::Done => return Act::Leave,
            });
        }
    }

    fn on_word(&mut self, word: Word) {
        self.state.on_engine_started();
        match word {
            Word::Some(count) => {
                let part = self.part(count);
                let said = self.encoder.words(count);
                self.state.on_events(said.as_bytes());
                if let Some(part) = part {
                    self.state.on_tokens(part, true);
                }
            }
            Word::Last(status) => {
                self.failure = Some(FailureCause::Engine);
                // After a pause, words of an engine come in any order.
                let left = self.left().filter(|_| status == Status::Completed);
                let said = self.encoder.words(left.unwrap_or(0));
                self.state.on_events(said.as_bytes());
                self.conclude(status);
            }
        }
    }

    /// How many tokens its engine still has.
    pub(super) fn left(&self) -> Option<u64> {
        let answer = self.encoder.answer()?;
        Some(answer.length() - answer.said)
    }

    /// The tokens of the next `count` words, as they are stored: how many, and each.
    fn part(&self, count: u64) -> Option<Vec<u8>> {
        let tokens = self.encoder.answer()?.next(count);
        let mut part = vec![tokens.len() as u8];
        part.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
        Some(part)
    }

    /// True if everything is there to go on after the stored events. Then it has the tokens of all their words.
    fn go_on(&mut self) -> bool {
        let log = &self.state.log;
        let (Some(parts), Some(text)) = (log.tokens(), log.stored_text()) else {
            return false;
        };
        let mut bytes: &[u8] = &parts.flatten().copied().collect::<Vec<u8>>();
        let mut tokens = Vec::new();
        while let [count, rest @ ..] = bytes {
            let (part, behind) = rest.split_at(usize::from(*count) * 8);
            let part = part.chunks_exact(8);
            tokens.extend(part.map(|token| u64::from_le_bytes(token.try_into().unwrap())));
            bytes = behind;
        }
        let events = encoder::parse_events(text).unwrap();
        assert_eq!(encoder::tokens(&events), tokens, "{events:?}");
        let stored = log.stored();
        self.encoder.go_on_after(stored, tokens.len() as u64);
        true
    }

    fn conclude(&mut self, status: Status) {
        let cut = if self.state.streams {
            self.state.log.compressed()
        } else {
            Bytes::new()
        };
        let output = log::decompressed(&cut, usize::MAX).unwrap_or_default();
        let output = Bytes::from(output);
        self.state.on_last_event(self.encoder.end().as_bytes());
        self.ends += 1;
        self.end = Some(End {
            token: IdempotencyToken(self.serial * 256 + self.ends),
            status,
            cut,
            output,
        });
    }

    pub(super) fn on_said(&mut self, said: &StoreReply) -> Then {
        match (self.state.next(), said) {
            (Step::MarkStarted, StoreReply::Write(said)) => self.state.on_started(said),
            (Step::Append(_), StoreReply::Write(said)) => self.state.on_appended(self.last, said),
            (Step::ReadStored { .. }, StoreReply::Events(said)) => {
                self.state.on_stored_events(said)
            }
            (Step::Finalize(_), StoreReply::Write(said)) => self.state.on_finalized(said),
            (Step::ReadCancelled, StoreReply::Record(said)) => {
                let said = said.as_ref().map(|found| {
                    let found = found.as_ref()?;
                    let last = found
                        .background
                        .and_then(|background| background.last_event);
                    Some((found.status, last))
                });
                self.state.on_record(&said.map_err(Clone::clone))
            }
            (Step::CancelAgain, StoreReply::Cancelled(said)) => self.state.on_cancelled_again(said),
            (Step::StorePartial, StoreReply::Write(said)) => self.state.on_partial_stored(said),
            (Step::Release, StoreReply::Write(said)) => self.state.on_released(said),
            _ => Then::Continue,
        }
    }
}

/// What a response that ended well leaves in a conversation of its own.
fn commit(key: ResponseKey, status: Status, serial: u64) -> Option<Commit> {
    status.is_continuable().then(|| Commit {
        conversation: conversation_of(key),
        token: conversation_token(key),
        items: vec![Item {
            id: serial.to_string().into(),
            json: run_name(serial),
        }],
    })
}

fn run_name(serial: u64) -> Bytes {
    serial.to_string().into()
}

pub(super) fn cancellation(serial: u64) -> Cancellation {
    Cancellation {
        token: IdempotencyToken(serial),
        response: b"{}".as_slice().into(),
        event: log::CANCELLED.into(),
    }
}

pub(super) fn hint() -> RoutingHint {
    RoutingHint {
        model: "sim".into(),
        worker: None,
    }
}
