//! Turns of one conversation: responses that run in the background, and plain turns whose clients wait. Each locks the
//! conversation, reads its items, and adds its own; between those, no other turn may have been added.

use std::time::Duration;

use bytes::Bytes;

use super::run::Run;
use super::store_request::{StoreReply, StoreRequest};
use super::{Event, Fleet, PAUSE, ReplicaEvent, ReplyTo, Scenario, TURNS, Violation, key};
use warmroute::ids::{ConversationId, Root, Tenant};
use warmroute::store::{
    self, Claim, Commit, CommitRefusal, ConversationKey, IdempotencyToken, Item, LockOutcome,
    PutOutcome, ResponseKey, Status, WriteOutcome,
};

/// Shorter than many pauses, so that locks run out.
const LEASE: Duration = Duration::from_secs(10);
const RENEWALS: u32 = 3;

pub(super) fn conversation() -> ConversationKey {
    ConversationKey {
        tenant: Tenant::tagged(0),
        id: ConversationId::new(Root(TURNS as u64), TURNS),
    }
}

/// The history that a turn was generated after: how many items, and the last of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seen {
    count: u64,
    last: u64,
}

impl Seen {
    fn of(ids: &[u64]) -> Self {
        Self {
            count: ids.len() as u64,
            last: ids.last().copied().unwrap_or_default(),
        }
    }
}

/// An item says who wrote it, and what that had seen.
fn item(name: u64, seen: Seen) -> Item {
    Item {
        id: name.to_string().into(),
        json: format!("{name} {} {}", seen.count, seen.last).into(),
    }
}

fn parse(item: &Bytes) -> (u64, Seen) {
    let text = std::str::from_utf8(item).unwrap();
    let mut numbers = text.split(' ').map(|number| number.parse().unwrap());
    let [name, count, last] = std::array::from_fn(|_| numbers.next().unwrap());
    (name, Seen { count, last })
}

/// Who wrote each item.
pub(super) fn ids(items: &[Bytes]) -> Vec<u64> {
    items.iter().map(|item| parse(item).0).collect()
}

/// Each turn was generated after exactly those that stand before it.
pub(super) fn check_order(now: Duration, items: &[Bytes]) -> Result<(), Violation> {
    let ids = ids(items);
    for (count, item) in items.iter().enumerate() {
        let (name, seen) = parse(item);
        if seen != Seen::of(&ids[..count]) {
            let reason = format!("turn {name} had seen {seen:?}, and the conversation is {ids:?}");
            return Err(Violation::new(now, key(TURNS + 1), reason));
        }
    }
    Ok(())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lock {
    /// The previous owner's, which is to be renewed first.
    ToResume,
    Held,
    /// Taken again; the history is to be read.
    Anew,
    None,
}

/// The turn of a response that runs.
#[derive(Debug)]
pub(super) struct Turn {
    token: IdempotencyToken,
    seen: Seen,
    lock: Lock,
    /// What its end is written with. From there on the lock is not renewed.
    commit: Option<Commit>,
    is_lost: bool,
}

impl Turn {
    fn new(token: IdempotencyToken, seen: Seen, lock: Lock) -> Self {
        Self {
            token,
            seen,
            lock,
            commit: None,
            is_lost: false,
        }
    }

    pub(super) fn unlock(&self) -> StoreRequest {
        StoreRequest::Unlock(self.token)
    }

    /// The record of its response keeps it so.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let Seen { count, last } = self.seen;
        [self.token.0, count, last]
            .iter()
            .flat_map(|number| number.to_le_bytes())
            .collect()
    }

    /// From the request of a response that is taken over. `None` if its conversation is its own.
    pub(super) fn from_request(request: &[u8]) -> Option<Self> {
        let numbers = request.len().checked_sub(24).filter(|length| *length > 0)?;
        let numbers = request[numbers..].chunks_exact(8);
        let mut numbers = numbers.map(|number| u64::from_le_bytes(number.try_into().unwrap()));
        let [token, count, last] = std::array::from_fn(|_| numbers.next().unwrap());
        let seen = Seen { count, last };
        Some(Self::new(IdempotencyToken(token), seen, Lock::ToResume))
    }

    fn claim(&self) -> Claim {
        claim(self.token)
    }

    fn is_renewed(&self) -> bool {
        self.lock == Lock::Held && self.commit.is_none() && !self.is_lost
    }

    pub(super) fn on_renewed(&mut self, said: &Result<LockOutcome, store::Error>) {
        self.is_lost |= matches!(said, Ok(outcome) if *outcome != LockOutcome::Locked);
    }

    /// What its end leaves in the conversation. A response that failed leaves nothing.
    pub(super) fn commit(&mut self, status: Status, serial: u64) -> Option<Commit> {
        if !status.is_continuable() {
            return None;
        }
        if self.commit.is_none() && self.lock == Lock::Held {
            self.commit = Some(Commit {
                conversation: conversation(),
                token: self.token,
                items: vec![item(serial, self.seen)],
            });
        }
        self.commit.clone()
    }
}

fn claim(token: IdempotencyToken) -> Claim {
    Claim {
        token,
        lease: LEASE,
    }
}

impl Run {
    /// What its conversation needs before an engine is asked.
    fn next_set_up(&self, anew: IdempotencyToken) -> Option<StoreRequest> {
        let turn = self.turn.as_ref()?;
        if self.has_end() || self.state.stop_reason.is_some() {
            return None;
        }
        match (self.state.has_old_history(), turn.lock) {
            (false, Lock::ToResume) => Some(StoreRequest::RenewLock(turn.claim())),
            (true, Lock::Anew) => Some(StoreRequest::History),
            (true, _) => Some(StoreRequest::Lock(claim(anew))),
            (false, _) => None,
        }
    }
}

/// A turn whose client waits for its answer.
#[derive(Debug)]
pub(super) struct PlainTurn {
    token: IdempotencyToken,
    name: u64,
    seen: Seen,
    ends_at: Duration,
    /// Whether the client has the answer.
    is_added: bool,
}

impl Fleet {
    /// Clients send plain turns.
    pub(super) fn plan_turns(&mut self) {
        if self.scenario != Scenario::Turns {
            return;
        }
        for turn in 0..self.random.usize(1..6) {
            let at = self.ms(500..18_000);
            self.plain_turns.push(PlainTurn {
                token: IdempotencyToken(0),
                name: 0,
                seen: Seen::default(),
                ends_at: Duration::ZERO,
                is_added: false,
            });
            self.world.set(at, Event::Turn(turn));
        }
    }

    fn token(&mut self) -> IdempotencyToken {
        self.names += 1;
        IdempotencyToken(self.names)
    }

    /// Locks the conversation for a response that a client creates.
    pub(super) fn lock_for(&mut self, at: usize, number: u128) {
        let token = self.token();
        let to = ReplyTo::CreateTurn(number, token);
        self.send(at, to, StoreRequest::Lock(claim(token)));
    }

    pub(super) fn on_locked_for(
        &mut self,
        at: usize,
        number: u128,
        token: IdempotencyToken,
        said: StoreReply,
    ) {
        match said {
            StoreReply::Lock(Ok(LockOutcome::Locked)) => {
                let to = ReplyTo::CreateTurn(number, token);
                self.send(at, to, StoreRequest::History);
            }
            StoreReply::History(Ok(ids)) => {
                let turn = Turn::new(token, Seen::of(&ids), Lock::Held);
                self.create(at, number, Some(turn));
            }
            // The client tries again.
            _ => {
                self.send(at, ReplyTo::NoReceiver, StoreRequest::Unlock(token));
                let when = self.now() + self.ms(100..900);
                self.world.set(when, Event::Create(number));
            }
        }
    }

    /// A run begins here, with its turn.
    pub(super) fn hold(&mut self, at: usize, key: ResponseKey, turn: Option<Turn>) {
        let Some(turn) = turn else { return };
        let Some(run) = self.replicas[at].table.find_mut(key) else {
            return;
        };
        let serial = run.serial;
        let is_held = turn.lock == Lock::Held;
        run.turn = Some(turn);
        self.turn_names.insert(serial, key);
        if is_held {
            self.later_renewal(at, key, serial);
        }
    }

    fn later_renewal(&mut self, at: usize, key: ResponseKey, serial: u64) {
        let when = self.now() + LEASE / RENEWALS;
        let incarnation = self.replicas[at].incarnation;
        let renew = ReplicaEvent::RenewLock(key, serial);
        self.world.set(when, Event::At(at, incarnation, renew));
    }

    pub(super) fn renew_lock(&mut self, at: usize, key: ResponseKey, serial: u64) {
        let run = self.find(at, key, serial);
        let turn = run.and_then(|run| run.turn.as_ref());
        if let Some(turn) = turn.filter(|turn| turn.is_renewed()) {
            let renewal = StoreRequest::RenewLock(turn.claim());
            self.send(at, ReplyTo::RenewLock { key, serial }, renewal);
            self.later_renewal(at, key, serial);
        }
    }

    /// True if the run waits for its conversation.
    pub(super) fn set_up(&mut self, at: usize, key: ResponseKey) -> bool {
        let anew = self.token();
        let Some(run) = self.replicas[at].table.find_mut(key) else {
            return false;
        };
        let Some(ask) = run.next_set_up(anew) else {
            return false;
        };
        let (serial, asked) = (run.serial, anew.0);
        run.asked = asked;
        self.send(at, ReplyTo::SetUp { key, serial, asked }, ask);
        true
    }

    pub(super) fn on_set_up(
        &mut self,
        at: usize,
        key: ResponseKey,
        serial: u64,
        asked: u64,
        ask: &StoreRequest,
        said: StoreReply,
    ) -> Result<(), Violation> {
        let run = self.find(at, key, serial).filter(|run| run.asked == asked);
        let Some(run) = run else {
            // The run has stopped meanwhile: what it was given is given back.
            if let StoreRequest::Lock(claim) | StoreRequest::RenewLock(claim) = ask {
                self.send(at, ReplyTo::NoReceiver, StoreRequest::Unlock(claim.token));
            }
            return Ok(());
        };
        let Some(turn) = &mut run.turn else {
            return Ok(());
        };
        let mut waits = false;
        match (ask, said) {
            (StoreRequest::RenewLock(_), StoreReply::Lock(Ok(outcome))) => {
                let refusal = match outcome {
                    LockOutcome::Locked => None,
                    LockOutcome::Gone => Some(CommitRefusal::Gone),
                    LockOutcome::Busy | LockOutcome::Lost => Some(CommitRefusal::Unlocked),
                };
                turn.lock = match refusal {
                    None => Lock::Held,
                    Some(_) => Lock::None,
                };
                if let Some(refusal) = refusal {
                    run.state.on_conversation_lost(refusal);
                    self.counts.locks_lost += 1;
                } else {
                    self.counts.locks_resumed += 1;
                    self.later_renewal(at, key, serial);
                }
            }
            (StoreRequest::Lock(claim), StoreReply::Lock(Ok(LockOutcome::Locked))) => {
                (turn.token, turn.lock) = (claim.token, Lock::Anew);
            }
            (_, StoreReply::History(Ok(ids))) => {
                (turn.seen, turn.lock, turn.is_lost) = (Seen::of(&ids), Lock::Held, false);
                run.state.on_new_history();
                self.counts.new_histories += 1;
                self.later_renewal(at, key, serial);
            }
            (StoreRequest::History, _) => {
                turn.lock = Lock::None;
                let unlock = turn.unlock();
                self.send(at, ReplyTo::NoReceiver, unlock);
                waits = true;
            }
            _ => waits = true,
        }
        if !waits {
            return self.drive(at, key);
        }
        let when = self.now() + PAUSE;
        let incarnation = self.replicas[at].incarnation;
        let again = ReplicaEvent::Again(key, serial, asked);
        self.world.set(when, Event::At(at, incarnation, again));
        Ok(())
    }

    /// The store answered the end of a run.
    pub(super) fn after_end(&mut self, at: usize, key: ResponseKey, said: &StoreReply) {
        let StoreReply::Write(Ok(WriteOutcome::NotAdded(_))) = said else {
            return;
        };
        self.names += 1;
        let serial = self.names;
        let Some(run) = self.replicas[at].table.find_mut(key) else {
            return;
        };
        let Some(turn) = &mut run.turn else { return };
        (turn.lock, turn.commit) = (Lock::None, None);
        let unlock = turn.unlock();
        if run.state.has_old_history() {
            run.begin_again(serial);
            self.turn_names.insert(serial, key);
        }
        self.send(at, ReplyTo::NoReceiver, unlock);
    }

    /// The run has ended here. Its lock goes on with the response, if another replica does.
    pub(super) fn leave_conversation(&mut self, at: usize, run: &Run) {
        if let Some(turn) = run.turn.as_ref().filter(|_| !run.state.is_given_up) {
            self.send(at, ReplyTo::NoReceiver, turn.unlock());
        }
    }

    pub(super) fn begin_turn(&mut self, turn: usize) {
        let Some(at) = self.open() else {
            let when = self.now() + Duration::from_secs(1);
            self.world.set(when, Event::Turn(turn));
            return;
        };
        let token = self.token();
        let plain = &mut self.plain_turns[turn];
        (plain.token, plain.name) = (token, token.0);
        self.send(at, ReplyTo::Turn(turn), StoreRequest::Lock(claim(token)));
    }

    /// Renews the lock while its engine generates; then adds the turn.
    pub(super) fn on_turn(&mut self, at: usize, turn: usize) {
        let now = self.now();
        let plain = &self.plain_turns[turn];
        if now < plain.ends_at {
            let renewal = StoreRequest::RenewLock(claim(plain.token));
            let next = plain.ends_at.min(now + LEASE / RENEWALS);
            self.send(at, ReplyTo::NoReceiver, renewal);
            let incarnation = self.replicas[at].incarnation;
            let tick = ReplicaEvent::Turn(turn);
            self.world.set(next, Event::At(at, incarnation, tick));
            return;
        }
        let ask = match self.random.u8(..8) {
            // Its engine failed, or its client left.
            0 => StoreRequest::Unlock(plain.token),
            _ => StoreRequest::Commit(Commit {
                conversation: conversation(),
                token: plain.token,
                items: vec![item(plain.name, plain.seen)],
            }),
        };
        self.send(at, ReplyTo::Turn(turn), ask);
    }

    pub(super) fn on_turn_said(
        &mut self,
        at: usize,
        turn: usize,
        ask: StoreRequest,
        said: StoreReply,
    ) {
        let token = self.plain_turns[turn].token;
        match said {
            StoreReply::Lock(Ok(LockOutcome::Locked)) => {
                self.send(at, ReplyTo::Turn(turn), StoreRequest::History);
            }
            StoreReply::History(Ok(ids)) => {
                let now = self.now();
                let generates = self.ms(50..9_000);
                let plain = &mut self.plain_turns[turn];
                (plain.seen, plain.ends_at) = (Seen::of(&ids), now + generates);
                self.on_turn(at, turn);
            }
            StoreReply::Lock(_) | StoreReply::History(Err(_)) => {
                self.send(at, ReplyTo::NoReceiver, StoreRequest::Unlock(token));
                let when = self.now() + self.ms(100..900);
                self.world.set(when, Event::Turn(turn));
            }
            StoreReply::Put(Ok(PutOutcome::Done)) => {
                self.plain_turns[turn].is_added = true;
                self.counts.plain_turns += 1;
            }
            StoreReply::Put(Ok(_)) => {
                self.send(at, ReplyTo::NoReceiver, StoreRequest::Unlock(token));
            }
            // Whether it was added is asked until it is known.
            StoreReply::Put(Err(_)) => {
                let again = ReplicaEvent::Retry(ReplyTo::Turn(turn), Box::new(ask));
                self.later(at, 200..201, again);
            }
            _ => {}
        }
    }

    /// The items of a response, by the names of its runs.
    pub(super) fn turn_of(&self, key: ResponseKey) -> Vec<Bytes> {
        let names = ids(&self.store.turns());
        let own = names
            .iter()
            .filter(|name| self.turn_names.get(name) == Some(&key));
        own.map(|name| name.to_string().into()).collect()
    }

    pub(super) fn check_plain_turns(&self) -> Result<(), Violation> {
        let names = ids(&self.store.turns());
        for plain in self.plain_turns.iter().filter(|plain| plain.is_added) {
            let count = names.iter().filter(|name| **name == plain.name).count();
            if count != 1 {
                let reason = format!("a client's turn is {count} times in {names:?}");
                return Err(Violation::new(self.now(), key(TURNS + 1), reason));
            }
        }
        Ok(())
    }
}
