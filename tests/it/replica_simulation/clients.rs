//! The clients: they create, cancel and delete responses.

use super::run::hint;
use super::store_request::StoreRequest;
use super::turns::Turn;
use super::{Event, Fleet, REPLICAS, ReplicaEvent, ReplyTo, Scenario, Violation, key};
use warmroute::responses::background::log;
use warmroute::responses::background::run_state::RunState;
use warmroute::store::record::{Content, InitialState, Retention};
use warmroute::store::{self, Cancellation, FencingToken, IdempotencyToken, NewRecord};

impl Fleet {
    /// A random replica that accepts requests.
    pub(super) fn open(&mut self) -> Option<usize> {
        let open = |at: &usize| self.replicas[*at].is_up && !self.replicas[*at].is_draining;
        let open: Vec<usize> = (0..REPLICAS).filter(open).collect();
        if open.is_empty() {
            None
        } else {
            Some(open[self.random.usize(..open.len())])
        }
    }

    pub(super) fn on_create(&mut self, at: usize, number: u128) {
        match self.scenario {
            Scenario::Turns => self.lock_for(at, number),
            _ => self.create(at, number, None),
        }
    }

    /// `turn`: of the shared conversation, which it has locked.
    pub(super) fn create(&mut self, at: usize, number: u128, turn: Option<Turn>) {
        let key = key(number);
        let fence = FencingToken::first(self.replicas[at].table.owner);
        let streams = self.random.u8(..4) > 0;
        if self.sit(at, key, fence, RunState::new(streams, 0)).is_err() {
            let when = self.now() + self.ms(100..900);
            self.world.set(when, Event::Create(number));
            if let Some(turn) = turn {
                self.send(at, ReplyTo::NoReceiver, turn.unlock());
            }
            return;
        }
        self.streams.insert(key, streams);
        let request: &[u8] = match self.random.u8(..8) {
            0 => b"not portable",
            _ => b"portable",
        };
        self.portable.insert(key, request == b"portable");
        let mut request = request.to_vec();
        if let Some(turn) = &turn {
            request.extend_from_slice(&turn.to_bytes());
        }
        self.hold(at, key, turn);
        let is_ephemeral = self.scenario == Scenario::Nodes && number.is_multiple_of(2);
        let record = NewRecord {
            token: IdempotencyToken(number as u64),
            parent: None,
            hint: hint(),
            input: b"[]".as_slice().into(),
            content: Content::default(),
            initial: InitialState::Background {
                fence,
                retention: if is_ephemeral {
                    Retention::Ephemeral
                } else {
                    Retention::Stored
                },
                streams,
                request: request.into(),
            },
        };
        let to = ReplyTo::Create {
            number,
            tries: 0,
            is_unknown: false,
        };
        self.send(at, to, StoreRequest::Create(key, Box::new(record)));
    }

    pub(super) fn cancel(&mut self, at: usize, number: u128) {
        let cancel = Cancellation {
            token: IdempotencyToken(self.random.u64(..)),
            response: b"{}".as_slice().into(),
            event: log::CANCELLED.into(),
        };
        let to = ReplyTo::Cancel { number, tries: 0 };
        self.send(at, to, StoreRequest::Cancel(key(number), cancel));
    }

    pub(super) fn on_created(
        &mut self,
        at: usize,
        number: u128,
        tries: u32,
        is_unknown: bool,
        ask: StoreRequest,
        said: Result<(), store::Error>,
    ) -> Result<(), Violation> {
        let key = key(number);
        let error = match said {
            Ok(()) => {
                self.counts.acknowledged += 1;
                self.acknowledged.insert(key);
                return self.begin(at, key);
            }
            Err(error) => error,
        };
        let is_unknown = is_unknown || matches!(error, store::Error::Unknown { .. });
        if is_unknown && tries < 3 {
            let to = ReplyTo::Create {
                number,
                tries: tries + 1,
                is_unknown,
            };
            self.later(at, 100..1_400, ReplicaEvent::Retry(to, Box::new(ask)));
            return Ok(());
        }
        if let Some(run) = self.replicas[at].table.remove(key)
            && let Some(turn) = &run.turn
        {
            self.send(at, ReplyTo::NoReceiver, turn.unlock());
        }
        if is_unknown {
            self.send(at, ReplyTo::Forget, StoreRequest::Delete(key));
        }
        Ok(())
    }
}
