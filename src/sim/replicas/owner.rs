//! What a simulated replica does as an owner: what `api/responses/background` does in tasks, with the same
//! machines deciding.

use std::time::Duration;

use super::run::{Act, Run, Word};
use super::shop::{Ask, Said};
use super::{ATTEMPTS_MAX, Broken, Event, Fleet, NUMBERS, To, What, key};
use crate::responses::background::run_state::RunState;
use crate::responses::background::run_step::StopReason;
use crate::responses::background::run_table::RunRefusal;
use crate::responses::background::take_over::{OrphanState, TakeOver};
use crate::store::lease::Step;
use crate::store::{self, FencingToken, NoticeCursor, Orphan, Owner, ResponseKey, Status};

impl Fleet {
    pub(super) fn on_replica(&mut self, at: usize, what: What) -> Result<(), Broken> {
        match what {
            What::Lease => {
                let owner = self.owner();
                let now = self.instant();
                let by = self.replicas[at].table.owner();
                let step = self.replicas[at].table.on_timeout(now, owner);
                self.on_step(at, by, step)?;
                self.set_lease(at);
                for number in 1..=NUMBERS {
                    self.look(key(number))?;
                }
            }
            What::Notices => self.on_notices(at),
            What::Sweep => return self.on_sweep(at),
            What::Word(key, serial, word) => {
                let found = self.find(at, key, serial);
                let Some(run) = found.filter(|run| run.state.is_generating()) else {
                    return Ok(());
                };
                run.hear(word);
                if run.asked == 0 {
                    return self.drive(at, key);
                }
            }
            What::Again(key, serial, asked) => {
                let found = self.find(at, key, serial);
                if found.is_some_and(|run| run.asked == asked) {
                    return self.drive(at, key);
                }
            }
            What::Create(number) => self.on_create(at, number),
            What::Retry(to, ask) => self.send(at, to, *ask),
            What::Abort => {
                self.replicas[at].is_aborted = true;
                for key in self.replicas[at].table.keys() {
                    self.stop(at, key, StopReason::Draining)?;
                }
            }
            What::Exit => {
                self.replicas[at].is_up = false;
                let when = self.now() + self.ms(200..3_000);
                self.world.set(when, Event::Start(at));
            }
            What::Said(to, about) => {
                let (ask, said) = *about;
                return self.on_said(at, to, ask, said);
            }
        }
        Ok(())
    }

    pub(super) fn set_lease(&mut self, at: usize) {
        let next = self.replicas[at].table.next_timeout();
        let when = next
            .saturating_duration_since(self.begun)
            .max(self.now() + Duration::from_millis(1));
        let life = self.replicas[at].life;
        self.world.set(when, Event::At(at, life, What::Lease));
    }

    pub(super) fn on_step(&mut self, at: usize, owner: Owner, step: Step) -> Result<(), Broken> {
        match step {
            Step::Beat => {
                let lease = Duration::from_millis(self.leases.lease_ms);
                self.send(at, To::Beat(owner), Ask::Beat(owner, lease));
            }
            Step::Stop => {
                self.met.lost += 1;
                for key in self.replicas[at].table.keys() {
                    self.stop(at, key, StopReason::LeaseLost)?;
                }
            }
            Step::Wait => {}
        }
        Ok(())
    }

    pub(super) fn on_notices(&mut self, at: usize) {
        self.later(at, 100..1_000, What::Notices);
        let replica = &mut self.replicas[at];
        let owner = replica.table.owner();
        if replica.cursor.0 != owner {
            replica.cursor = (owner, NoticeCursor::default());
        }
        if replica.table.is_empty() {
            return;
        }
        let cursor = replica.cursor.1;
        replica.looks += 1;
        let running = replica
            .looks
            .is_multiple_of(4)
            .then(|| replica.table.to_check());
        self.send(at, To::Notices(owner), Ask::Notices(owner, cursor));
        if let Some(running) = running {
            self.send(at, To::Check, Ask::Check(running));
        }
    }

    pub(super) fn on_sweep(&mut self, at: usize) -> Result<(), Broken> {
        self.later(at, 1_500..2_500, What::Sweep);
        let now = self.instant();
        let replica = &self.replicas[at];
        if replica.is_draining || !replica.table.holds_lease(now) {
            return Ok(());
        }
        // A real one looks while it adopts nothing. It asks without delay, which leaves the other faults of
        // a seed as they are.
        let (owner, mut known) = (replica.table.owner(), replica.table.keys());
        known.extend(&replica.adopting);
        let now = self.now();
        if !self.faults.is_down(now)
            && let Said::Strays(Ok(strays)) = self.shop.ask(now, &Ask::Strays(owner, known))?
        {
            self.replicas[at].table.on_strays(owner, &strays);
        }
        let replica = &self.replicas[at];
        let (to_hand_back, unconfirmed) =
            (replica.table.to_hand_back(), replica.table.unconfirmed());
        for (key, fence) in to_hand_back {
            self.send(at, To::HandBack(key), Ask::Release(key, fence));
        }
        if unconfirmed.is_empty() {
            self.send(at, To::Sweep, Ask::Orphans);
        }
        for orphan in unconfirmed {
            self.adopt(at, orphan);
        }
        Ok(())
    }

    pub(super) fn adopt(&mut self, at: usize, orphan: Orphan) {
        let table = &self.replicas[at].table;
        if table.may_take_over(&orphan) {
            let by = table.owner();
            self.replicas[at].adopting.insert(orphan.key);
            self.send(at, To::Adopt(orphan, by), Ask::Adopt(orphan, by));
        }
    }

    pub(super) fn on_adopted(
        &mut self,
        at: usize,
        adopted: &store::record::TakenOver,
        key: ResponseKey,
    ) -> Result<(), Broken> {
        let orphan_state = OrphanState {
            is_portable: adopted.request.first() == Some(&b'p'),
            streams: adopted.streams,
            stored: adopted.last_event.map_or(0, |last| last + 1),
            attempts: adopted.attempts,
        };
        let state = match orphan_state.decide(ATTEMPTS_MAX) {
            TakeOver::Rerun => RunState::new(orphan_state.streams, orphan_state.stored),
            TakeOver::Fail(reason) => {
                RunState::failing(orphan_state.streams, orphan_state.stored, reason)
            }
        };
        let is_rerun = state.is_generating();
        let admitted = self.sit(at, key, adopted.fence, state);
        if admitted == Err(RunRefusal::AlreadyRunning) {
            return Ok(());
        }
        if admitted.is_err() {
            self.replicas[at].table.hand_back(key, adopted.fence);
            self.send(at, To::HandBack(key), Ask::Release(key, adopted.fence));
            return Ok(());
        }
        match is_rerun {
            true => self.met.rerun += 1,
            false => self.met.given_up += 1,
        }
        self.begin(at, key)
    }

    /// Its record is there.
    pub(super) fn begin(&mut self, at: usize, key: ResponseKey) -> Result<(), Broken> {
        let is_draining = self.replicas[at].is_draining;
        let table = &mut self.replicas[at].table;
        table.on_stored(key);
        if let Some(run) = table.find_mut(key) {
            run.is_stored = true;
            if is_draining {
                run.state.on_stop(StopReason::Draining);
            }
        }
        self.drive(at, key)
    }

    pub(super) fn sit(
        &mut self,
        at: usize,
        key: ResponseKey,
        fence: FencingToken,
        state: RunState,
    ) -> Result<(), RunRefusal> {
        self.names += 1;
        let run = Run::new(self.names, key, fence, state);
        let now = self.instant();
        let replica = &mut self.replicas[at];
        if replica.is_draining {
            return Err(RunRefusal::NotOwner);
        }
        replica.table.insert(now, key, fence, run)?;
        self.set_lease(at);
        Ok(())
    }

    /// Tells a run why it must not go on, and lets it do what follows.
    pub(super) fn stop(
        &mut self,
        at: usize,
        key: ResponseKey,
        reason: StopReason,
    ) -> Result<(), Broken> {
        let Some(run) = self.replicas[at].table.find_mut(key) else {
            return Ok(());
        };
        // One whose record is being made finds out when it is there.
        if run.stop(reason) && (run.is_stored || reason == StopReason::LeaseLost) {
            return self.drive(at, key);
        }
        Ok(())
    }

    /// Has a run do what it is to do next.
    pub(super) fn drive(&mut self, at: usize, key: ResponseKey) -> Result<(), Broken> {
        self.look(key)?;
        let Some(run) = self.replicas[at].table.find_mut(key) else {
            return Ok(());
        };
        run.asked = 0;
        let serial = run.serial;
        match run.act() {
            Act::Ask(ask) => {
                self.names += 1;
                let asked = self.names;
                if let Some(run) = self.replicas[at].table.find_mut(key) {
                    run.asked = asked;
                }
                if matches!(ask, Ask::Release(..)) {
                    self.met.released += 1;
                }
                self.send(at, To::Run { key, serial, asked }, ask);
            }
            Act::Engine => self.engine(at, key, serial),
            Act::Wait => {}
            Act::Leave => {
                if let Some(run) = self.replicas[at].table.remove(key) {
                    self.replicas[at].left.insert(serial, run);
                }
                self.exit(at);
            }
        }
        Ok(())
    }

    pub(super) fn find(&mut self, at: usize, key: ResponseKey, serial: u64) -> Option<&mut Run> {
        let run = self.replicas[at].table.find_mut(key)?;
        (run.serial == serial).then_some(run)
    }

    /// All that an engine will say, torn where it dies.
    pub(super) fn engine(&mut self, at: usize, key: ResponseKey, serial: u64) {
        let longest = if self.random.u8(..8) == 0 { 8_000 } else { 800 };
        let mut when = self.now() + self.ms(5..longest);
        let life = self.replicas[at].life;
        for _ in 0..self.random.u8(0..5) {
            let word = Word::Some(self.random.u64(0..4));
            self.world
                .set(when, Event::At(at, life, What::Word(key, serial, word)));
            when += self.ms(1..2_500);
        }
        let status = match self.random.u8(..6) {
            0 => Status::Failed,
            1 => Status::Incomplete,
            _ => Status::Completed,
        };
        let last = What::Word(key, serial, Word::Last(status));
        self.world.set(when, Event::At(at, life, last));
    }

    /// A stopping replica that runs nothing gives its lease back and is gone.
    pub(super) fn exit(&mut self, at: usize) {
        let replica = &self.replicas[at];
        if replica.is_draining && replica.table.is_empty() {
            let owner = replica.table.owner();
            self.send(at, To::Nobody, Ask::Retire(owner));
            self.later(at, 50..51, What::Exit);
        }
    }
}
