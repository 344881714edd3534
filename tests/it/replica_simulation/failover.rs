//! The store fails over to a copy that lacks its last acknowledged writes. What is promised then: an end or a cancel
//! that was acknowledged stays, if the replica that wrote it lives on.

use super::checks::PromisedEnd;
use super::store_request::{StoreReply, StoreRequest};
use super::{Event, Fleet, ReplicaEvent, Scenario, Violation};
use warmroute::responses::background::recent_ends::{self, EndWrite};
use warmroute::responses::background::run_step::StopReason;
use warmroute::store::{CancelOutcome, FencingToken, ResponseKey, WriteOutcome};

impl Fleet {
    pub(super) fn has_failed_over(&self) -> bool {
        self.scenario == Scenario::Failover && self.quiet_from <= self.now()
    }

    /// The store loses its last `lost` writes. No other fault happens from now on.
    pub(super) fn on_failover(&mut self, lost: usize) -> Result<(), Violation> {
        let now = self.now();
        self.quiet_from = now;
        self.faults.end(now);
        for replica in &mut self.replicas {
            replica.paused_until = now;
        }
        for key in self.store.fail_over(now, lost)? {
            self.counts.lost_writes += 1;
            self.ledger.forget(key);
            self.rolled_back.insert(key);
            for reader in self.readers.iter_mut().filter(|reader| reader.key == key) {
                reader.is_over = true;
            }
        }
        for (key, end) in std::mem::take(&mut self.promised) {
            let replica = &self.replicas[end.replica];
            let owner = replica.table.owner;
            let lives = replica.is_up
                && !replica.is_draining
                && replica.incarnation == end.incarnation
                && self.store.has_lease(now, owner);
            let Some(record) = self.store.get(now, key).filter(|_| lives) else {
                continue;
            };
            let Some(run) = record.background.filter(|_| !record.status.is_terminal()) else {
                continue;
            };
            let is_same = |fence: FencingToken| {
                (run.owner, run.fencing_number) == (Some(fence.owner), fence.number)
                    && fence.owner == owner
            };
            if end.fence.is_none_or(is_same) {
                self.counts.lost_ends += 1;
                self.promised.insert(key, end);
            }
        }
        Ok(())
    }

    /// The store answered the write of an end to a replica.
    pub(super) fn on_end_reply(&mut self, at: usize, ask: &StoreRequest, said: &StoreReply) {
        if self.scenario != Scenario::Failover {
            return;
        }
        let (key, write, status) = match (ask, said) {
            (
                StoreRequest::Finalize(key, fence, end),
                StoreReply::Write(Ok(WriteOutcome::Done)),
            ) => {
                let write = EndWrite::Finalized(*fence, (**end).clone());
                (*key, write, end.status)
            }
            (
                StoreRequest::Cancel(key, cancel),
                StoreReply::Cancelled(Ok(CancelOutcome::Done { .. })),
            ) => {
                let (cancel, output) = (cancel.clone(), None);
                let write = EndWrite::Cancelled { cancel, output };
                (*key, write, warmroute::store::Status::Cancelled)
            }
            (
                StoreRequest::FinalizeCancelled(key, fence, output),
                StoreReply::Write(Ok(WriteOutcome::Done)),
            ) => {
                let write = EndWrite::Cancelled {
                    cancel: super::run::cancellation(fence.owner.0),
                    output: Some((*fence, output.clone())),
                };
                (*key, write, warmroute::store::Status::Cancelled)
            }
            _ => return,
        };
        let end = PromisedEnd {
            status,
            at: self.now(),
            replica: at,
            incarnation: self.replicas[at].incarnation,
            fence: write.fence(),
        };
        let now = self.instant();
        self.replicas[at].recent_ends.push(now, key, write);
        // After the failover what was promised is only looked at.
        if !self.has_failed_over() {
            self.promised.insert(key, end);
        }
    }

    /// What the task of `repeat_ends` does, without delays.
    pub(super) fn on_repeat_ends(&mut self, at: usize) -> Result<(), Violation> {
        let when = self.now() + std::time::Duration::from_secs(1);
        let incarnation = self.replicas[at].incarnation;
        let event = Event::At(at, incarnation, ReplicaEvent::RepeatEnds);
        self.world.set(when, event);
        let now = self.instant();
        let due = self.replicas[at].recent_ends.due(now);
        if self.faults.is_down(self.now()) {
            return Ok(());
        }
        for (key, write) in due {
            if let Some(fence) = write.fence() {
                let ask = StoreRequest::CheckOwnership(vec![(key, fence)]);
                let lost = self.store.ask(self.now(), &ask)?;
                if !matches!(lost, StoreReply::Lost(Ok(lost)) if lost.is_empty()) {
                    continue;
                }
            }
            self.repeat_end(at, key, &write)?;
        }
        Ok(())
    }

    pub(super) fn repeat_end(
        &mut self,
        at: usize,
        key: ResponseKey,
        write: &EndWrite,
    ) -> Result<(), Violation> {
        let now = self.now();
        match write {
            EndWrite::Finalized(fence, end) => {
                let mut end = end.clone();
                for _ in 0..recent_ends::TRIES_MAX {
                    let ask = StoreRequest::Finalize(key, *fence, Box::new(end.clone()));
                    let StoreReply::Write(Ok(outcome)) = self.store.ask(now, &ask)? else {
                        break;
                    };
                    if !recent_ends::adapt(&mut end, &outcome) {
                        break;
                    }
                }
            }
            EndWrite::Cancelled { cancel, output } => {
                let ask = StoreRequest::Cancel(key, cancel.clone());
                let said = self.store.ask(now, &ask)?;
                if !matches!(said, StoreReply::Cancelled(Ok(CancelOutcome::Done { .. }))) {
                    return Ok(());
                }
                self.stop(at, key, StopReason::Cancelled)?;
                if let Some((fence, output)) = output {
                    let ask = StoreRequest::FinalizeCancelled(key, *fence, output.clone());
                    let _ = self.store.ask(now, &ask)?;
                }
            }
        }
        Ok(())
    }
}
