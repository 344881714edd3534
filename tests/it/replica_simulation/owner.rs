//! A simulated replica as an owner of background runs: what `responses/background` does in tasks, with the same
//! deciding parts.

use std::time::Duration;

use super::encoder::Answer;
use super::run::{Act, Run, Word};
use super::store_request::{StoreReply, StoreRequest};
use super::turns::Turn;
use super::{
    ATTEMPTS_MAX, Event, Fleet, NUMBERS, ReplicaEvent, ReplyTo, Scenario, TURNS, Violation, key,
};
use warmroute::responses::background::run_state::RunState;
use warmroute::responses::background::run_step::StopReason;
use warmroute::responses::background::run_table::RunRefusal;
use warmroute::responses::background::take_over::{OrphanState, TakeOver};
use warmroute::store::lease::Step;
use warmroute::store::{self, FencingToken, NoticeCursor, Orphan, Owner, ResponseKey, Status};

/// What every engine answers to the request of this response.
pub(super) fn answer_to(key: ResponseKey) -> Answer {
    // A short one, whatever its number.
    Answer::new((key.id.own() % TURNS) as u64)
}

impl Fleet {
    pub(super) fn on_replica(&mut self, at: usize, what: ReplicaEvent) -> Result<(), Violation> {
        match what {
            ReplicaEvent::Lease => {
                let now = self.instant();
                let by = self.replicas[at].table.owner;
                let step = self.replicas[at].table.on_timeout(now);
                self.on_step(at, by, step);
                self.set_lease(at);
                for number in (self.first_number()..).take(NUMBERS as usize) {
                    self.check_single_owner(key(number))?;
                }
                self.check_times()?;
            }
            ReplicaEvent::Notices => {
                self.on_notices(at);
                self.check_times()?;
            }
            ReplicaEvent::RepeatEnds => return self.on_repeat_ends(at),
            ReplicaEvent::RenewLock(key, serial) => self.renew_lock(at, key, serial),
            ReplicaEvent::Turn(turn) => self.on_turn(at, turn),
            ReplicaEvent::Scan => return self.on_sweep(at),
            ReplicaEvent::Word(key, serial, word) => {
                let found = self.find(at, key, serial);
                let Some(run) = found.filter(|run| run.state.is_generating()) else {
                    return Ok(());
                };
                run.hear(word);
                if run.asked == 0 {
                    return self.drive(at, key);
                }
            }
            ReplicaEvent::Again(key, serial, asked) => {
                let found = self.find(at, key, serial);
                if found.is_some_and(|run| run.asked == asked) {
                    return self.drive(at, key);
                }
            }
            ReplicaEvent::Create(number) => self.on_create(at, number),
            ReplicaEvent::Retry(to, ask) => self.send(at, to, *ask),
            ReplicaEvent::Abort => {
                self.replicas[at].is_aborted = true;
                for key in self.replicas[at].table.keys() {
                    self.stop(at, key, StopReason::Draining)?;
                }
            }
            ReplicaEvent::Exit => {
                self.replicas[at].is_up = false;
                let when = self.now() + self.ms(200..3_000);
                self.world.set(when, Event::Start(at));
            }
            ReplicaEvent::StoreReply(to, about) => {
                let (ask, said) = *about;
                return self.on_said(at, to, ask, said);
            }
        }
        Ok(())
    }

    pub(super) fn set_lease(&mut self, at: usize) {
        let next = self.replicas[at].table.next_timeout();
        let when = next
            .saturating_duration_since(self.started)
            .max(self.now() + Duration::from_millis(1));
        let incarnation = self.replicas[at].incarnation;
        self.world
            .set(when, Event::At(at, incarnation, ReplicaEvent::Lease));
    }

    pub(super) fn on_step(&mut self, at: usize, owner: Owner, step: Step) {
        match step {
            Step::SendHeartbeat => {
                let lease = self.leases.duration;
                self.send(
                    at,
                    ReplyTo::Heartbeat(owner),
                    StoreRequest::Heartbeat(owner, lease),
                );
            }
            Step::Expired => self.counts.lost += 1,
            Step::Wait => {}
        }
    }

    pub(super) fn on_notices(&mut self, at: usize) {
        // As often as the real one where it is timed.
        let (interval, check_every) = match self.scenario {
            Scenario::OnTime => (50..60, 10),
            _ => (100..1_000, 4),
        };
        self.later(at, interval, ReplicaEvent::Notices);
        let replica = &mut self.replicas[at];
        let owner = replica.table.owner;
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
            .is_multiple_of(check_every)
            .then(|| replica.table.to_check());
        self.send(
            at,
            ReplyTo::Notices(owner),
            StoreRequest::Notices(owner, cursor),
        );
        if let Some(running) = running {
            self.send(at, ReplyTo::Check, StoreRequest::CheckOwnership(running));
        }
    }

    pub(super) fn on_sweep(&mut self, at: usize) -> Result<(), Violation> {
        self.later(at, 1_500..2_500, ReplicaEvent::Scan);
        let now = self.instant();
        let replica = &self.replicas[at];
        if replica.is_draining || !replica.table.holds_lease(now) {
            return Ok(());
        }
        // A real owner scans only while no takeover is pending. This one scans without delay, which keeps the
        // other random draws of a seed unchanged.
        let (owner, mut known) = (replica.table.owner, replica.table.keys());
        known.extend(&replica.adopting);
        let now = self.now();
        if !self.faults.is_down(now)
            && let StoreReply::Untracked(Ok(strays)) = self
                .store
                .ask(now, &StoreRequest::Untracked(owner, known))?
        {
            let mut left = Vec::new();
            for (key, fence) in strays {
                match self.replicas[at].recent_ends.find(key) {
                    Some(write) => self.repeat_end(at, key, &write)?,
                    None => left.push((key, fence)),
                }
            }
            self.replicas[at].table.on_strays(owner, &left);
        }
        let replica = &self.replicas[at];
        let (to_hand_back, unconfirmed) =
            (replica.table.to_hand_back(), replica.table.unconfirmed());
        for (key, fence) in to_hand_back {
            self.send(
                at,
                ReplyTo::HandBack(key),
                StoreRequest::Release(key, fence),
            );
        }
        if unconfirmed.is_empty() {
            self.send(at, ReplyTo::Scan, StoreRequest::Orphans);
        }
        for orphan in unconfirmed {
            self.adopt(at, orphan);
        }
        Ok(())
    }

    pub(super) fn adopt(&mut self, at: usize, orphan: Orphan) {
        let now = self.instant();
        let table = &self.replicas[at].table;
        if table.may_take_over(now, &orphan) {
            let by = table.owner;
            self.replicas[at].adopting.insert(orphan.key);
            self.send(
                at,
                ReplyTo::TakeOver(orphan, by),
                StoreRequest::TakeOver(orphan, by),
            );
        }
    }

    pub(super) fn on_adopted(
        &mut self,
        at: usize,
        adopted: &store::TakenOver,
        key: ResponseKey,
        request: &[u8],
    ) -> Result<(), Violation> {
        let orphan_state = OrphanState {
            status: adopted.status,
            lost_owners: adopted.lost_owners,
            is_portable: request.first() == Some(&b'p'),
            streams: adopted.streams,
            stored: adopted.last_event.map_or(0, |last| last + 1),
            attempts: adopted.attempts,
            may_continue: self.is_continued,
        };
        let take_over = orphan_state.decide(ATTEMPTS_MAX);
        let state = match take_over {
            TakeOver::Rerun => RunState::new(orphan_state.streams, orphan_state.stored),
            TakeOver::Fail(reason) => {
                RunState::failing(orphan_state.streams, orphan_state.stored, reason)
            }
            TakeOver::Continue => RunState::continuing(orphan_state.streams, orphan_state.stored),
            TakeOver::StoreCancelled => {
                RunState::cancelled(orphan_state.streams, orphan_state.stored)
            }
        };
        let admitted = self.sit(at, key, adopted.fence, state);
        if admitted == Err(RunRefusal::AlreadyRunning) {
            return Ok(());
        }
        if admitted.is_err() {
            self.hand_back(at, key, adopted.fence);
            return Ok(());
        }
        let turn = Turn::from_request(request);
        self.hold(at, key, turn);
        match take_over {
            TakeOver::Rerun => self.counts.rerun += 1,
            TakeOver::Continue => self.counts.continued += 1,
            TakeOver::StoreCancelled => self.counts.outputs_kept += 1,
            TakeOver::Fail(_) => {
                self.counts.given_up += 1;
                // It never ran, and others could run it.
                if orphan_state.is_portable && !self.store.was_started(key) {
                    let reason = "it is given up, and no engine ever began it";
                    return Err(Violation::new(self.now(), key, reason));
                }
            }
        }
        self.begin(at, key)
    }

    pub(super) fn hand_back(&mut self, at: usize, key: ResponseKey, fence: FencingToken) {
        self.replicas[at].table.hand_back(key, fence);
        self.send(
            at,
            ReplyTo::HandBack(key),
            StoreRequest::Release(key, fence),
        );
    }

    /// The record has been created.
    pub(super) fn begin(&mut self, at: usize, key: ResponseKey) -> Result<(), Violation> {
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
        let answer = self.is_continued.then(|| answer_to(key));
        let run = Run::new(self.names, key, fence, state, answer);
        let now = self.instant();
        let replica = &mut self.replicas[at];
        if replica.is_draining {
            return Err(RunRefusal::NotOwner);
        }
        replica.table.insert(now, key, fence, run)?;
        self.set_lease(at);
        Ok(())
    }

    /// Stops a run and drives it on.
    pub(super) fn stop(
        &mut self,
        at: usize,
        key: ResponseKey,
        reason: StopReason,
    ) -> Result<(), Violation> {
        let Some(run) = self.replicas[at].table.find_mut(key) else {
            return Ok(());
        };
        // A run whose record is still being created learns of the stop afterwards.
        if run.stop(reason) && (run.is_stored || reason == StopReason::LeaseLost) {
            return self.drive(at, key);
        }
        Ok(())
    }

    /// Executes the next step of a run.
    pub(super) fn drive(&mut self, at: usize, key: ResponseKey) -> Result<(), Violation> {
        self.check_single_owner(key)?;
        let Some(run) = self.replicas[at].table.find_mut(key) else {
            return Ok(());
        };
        run.asked = 0;
        if self.set_up(at, key) {
            return Ok(());
        }
        let Some(run) = self.replicas[at].table.find_mut(key) else {
            return Ok(());
        };
        let serial = run.serial;
        match run.act() {
            Act::StoreRequest(ask) => {
                self.names += 1;
                let asked = self.names;
                if let Some(run) = self.replicas[at].table.find_mut(key) {
                    run.asked = asked;
                }
                if matches!(ask, StoreRequest::Release(..)) {
                    self.counts.released += 1;
                }
                self.send(at, ReplyTo::Run { key, serial, asked }, ask);
            }
            Act::Engine => self.engine(at, key, serial),
            Act::Wait => {}
            Act::Leave => {
                if let Some(run) = self.replicas[at].table.remove(key) {
                    self.leave_conversation(at, &run);
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

    /// Everything an engine will send, cut off where it fails.
    pub(super) fn engine(&mut self, at: usize, key: ResponseKey, serial: u64) {
        let longest = if self.random.u8(..8) == 0 { 8_000 } else { 800 };
        let mut when = self.now() + self.ms(5..longest);
        let incarnation = self.replicas[at].incarnation;
        let mut left = self.find(at, key, serial).and_then(|run| run.left());
        let pieces = self.random.u8(0..5);
        let mut piece = 0;
        // Of an answer that is continued, as many as it has tokens.
        while left.map_or(piece < pieces, |left| left > 0) {
            piece += 1;
            let count = self.random.u64(0..4);
            left = left.map(|left| left.saturating_sub(count));
            let word = Word::Some(count);
            self.world.set(
                when,
                Event::At(at, incarnation, ReplicaEvent::Word(key, serial, word)),
            );
            when += self.ms(1..2_500);
        }
        let status = match self.random.u8(..6) {
            0 => Status::Failed,
            1 if !self.is_continued => Status::Incomplete,
            _ => Status::Completed,
        };
        let last = ReplicaEvent::Word(key, serial, Word::Last(status));
        self.world.set(when, Event::At(at, incarnation, last));
    }

    /// A draining replica without runs ends its lease and exits.
    pub(super) fn exit(&mut self, at: usize) {
        let replica = &self.replicas[at];
        if replica.is_draining && replica.table.is_empty() {
            let owner = replica.table.owner;
            self.send(at, ReplyTo::NoReceiver, StoreRequest::EndLease(owner));
            self.later(at, 50..51, ReplicaEvent::Exit);
        }
    }
}
