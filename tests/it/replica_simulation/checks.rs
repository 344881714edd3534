//! The invariants, checked at each step and at the end of a simulation.

use std::time::Duration;

use super::{Fleet, Scenario, Violation};
use warmroute::store::{FencingToken, ResponseKey, Status};

/// An owner that returns after its lease has ended learns within this time what was taken over from it.
const DOUBLE_MAX: Duration = Duration::from_secs(20);

/// An end that a client was informed of.
#[derive(Clone, Copy, Debug)]
pub(super) struct PromisedEnd {
    pub(super) status: Status,
    pub(super) at: Duration,
    /// The replica that wrote it.
    pub(super) replica: usize,
    pub(super) incarnation: u64,
    /// `None`: cancelled by a replica that did not run it.
    pub(super) fence: Option<FencingToken>,
}

/// A lost cancel is repeated this long after it at the latest. A response whose owner had not seen it may end before.
const CANCEL_REPEATED: Duration = Duration::from_secs(3);

impl PromisedEnd {
    /// Whether the response may have ended so instead, at this time.
    fn allows(&self, status: Status, ended_at: Option<Duration>) -> bool {
        let was_unseen = self.status == Status::Cancelled && self.fence.is_none();
        let is_early = ended_at.is_some_and(|at| at <= self.at + CANCEL_REPEATED);
        status == self.status || (was_unseen && is_early)
    }
}

impl Fleet {
    pub(super) fn has_settled(&mut self) -> bool {
        let now = self.now();
        let keys: Vec<ResponseKey> = self.streams.keys().copied().collect();
        self.replicas
            .iter()
            .all(|replica| replica.is_up && replica.table.is_empty())
            && self
                .readers
                .iter()
                .all(|reader| reader.is_over || !self.acknowledged.contains(&reader.key))
            && keys.into_iter().all(|key| {
                let found = self.store.get(now, key);
                found.is_none_or(|found| {
                    found.status.is_terminal()
                        && (found.status != Status::Cancelled || !self.store.lacks_output(now, key))
                })
            })
    }

    /// Checks the end state: the faults are over, and every run had time to finish.
    pub(super) fn check_end(&mut self) -> Result<(), Violation> {
        let now = self.now();
        let events = self.store.outbox_events();
        for key in self.streams.keys().copied().collect::<Vec<_>>() {
            let is_acknowledged = self.acknowledged.contains(&key);
            let Some(record) = self.store.get(now, key) else {
                if self.store.may_have_expired(now, key) {
                    self.counts.expired += 1;
                    continue;
                }
                if is_acknowledged && !self.store.is_gone(key) {
                    return Err(Violation::new(
                        now,
                        key,
                        "it was acknowledged and is missing",
                    ));
                }
                self.counts.gone += 1;
                continue;
            };
            let promised = self
                .promised
                .get(&key)
                .filter(|_| self.rolled_back.contains(&key));
            if let Some(end) = promised
                && !end.allows(record.status, self.store.ended_at(key))
            {
                let reason = format!("{end:?} was acknowledged, and it is {}", record.status);
                return Err(Violation::new(now, key, reason));
            }
            match record.status {
                Status::Completed | Status::Incomplete => self.counts.completed += 1,
                Status::Failed => self.counts.failed += 1,
                Status::Cancelled => {
                    self.counts.cancelled += 1;
                    if self.store.lacks_output(now, key) {
                        let reason =
                            "it was cancelled, and lacks the output that readers received of it";
                        return Err(Violation::new(now, key, reason));
                    }
                }
                running => {
                    let reason = format!("it is {running} at the end, {:?}", record.background);
                    return Err(Violation::new(now, key, reason));
                }
            }
            if events.get(&key) != Some(&record.status) {
                let (status, event) = (record.status, events.get(&key));
                let reason = format!("it is {status}, and its event in the outbox says {event:?}");
                return Err(Violation::new(now, key, reason));
            }
            // The items of one run if it ended well, else none.
            let items = match self.scenario {
                Scenario::Turns => self.turn_of(key),
                _ => self.store.conversation_items(now, key),
            };
            let expected: Vec<_> = if record.status.is_continuable() {
                vec![record.content.response.clone()]
            } else {
                Vec::new()
            };
            if items != expected {
                let status = record.status;
                let reason = format!("it is {status}, and its conversation has {items:?}");
                return Err(Violation::new(now, key, reason));
            }
            if record
                .background
                .is_some_and(|background| background.streams)
            {
                self.read_whole(key)?;
            }
        }
        self.check_plain_turns()?;
        for replica in &self.replicas {
            if let Some(key) = replica.table.keys().first() {
                return Err(Violation::new(
                    now,
                    *key,
                    "it has ended in the store and still runs",
                ));
            }
        }
        for reader in &self.readers {
            if !reader.is_over && self.acknowledged.contains(&reader.key) {
                return Err(Violation::new(now, reader.key, "a reader never finished"));
            }
        }
        Ok(())
    }

    /// Not for long do two replicas with a valid lease run a response, and a lease that a replica considers valid
    /// is valid in the store too.
    pub(super) fn check_single_owner(&mut self, key: ResponseKey) -> Result<(), Violation> {
        if self.faults.was_emptied() || self.has_failed_over() {
            // The store has lost the leases too, until the next heartbeats.
            return Ok(());
        }
        let now = self.instant();
        let mut holders = 0;
        for replica in self
            .replicas
            .iter()
            .filter(|replica| replica.is_up && replica.table.holds_lease(now))
        {
            if replica.is_draining && replica.table.is_empty() {
                // It has ended its lease.
                continue;
            }
            let owner = replica.table.owner;
            if !self.store.has_lease(self.now(), owner) {
                let reason = format!("{owner} holds a lease that the store does not");
                return Err(Violation::new(self.now(), key, reason));
            }
            let found = replica.table.find(key);
            holders += u32::from(found.is_some_and(|run| run.state.is_generating()));
        }
        let now = self.now();
        if holders < 2 {
            self.doubled.remove(&key);
            return Ok(());
        }
        let since = *self.doubled.entry(key).or_insert(now);
        if now - since > DOUBLE_MAX {
            Err(Violation::new(now, key, "two replicas run it"))
        } else {
            Ok(())
        }
    }
}
