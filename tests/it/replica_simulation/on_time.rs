//! Limits in time: how long a cancel and a take-over take when nothing else goes wrong. And nodes of the store that are
//! down one after the other.

use std::time::Duration;

use fastrand::Rng;

use super::encoder::parse_events;
use super::faults::Fault;
use super::run::FailureCause;
use super::store_harness::NODES;
use super::store_request::{StoreReply, StoreRequest};
use super::{ATTEMPTS_MAX, Event, Fleet, REPLICAS, Scenario, Violation};
use warmroute::store::{ResponseKey, Status, WriteOutcome};

/// From the store's answer to a cancel until no engine works on the response.
const CANCEL_MAX: Duration = Duration::from_secs(1);
/// From the death of an owner until its responses run elsewhere or have ended.
const TAKE_OVER_MAX: Duration = Duration::from_secs(20);
/// A response that loses this many owners may fail although no engine has started it.
const OWNERS_MAX: u64 = 3 * ATTEMPTS_MAX as u64;

impl Fleet {
    pub(super) fn plan_kills(&mut self) {
        if self.scenario != Scenario::OnTime {
            return;
        }
        self.faults.without_traps();
        let first = self.ms(2_000..10_000);
        // Others have started again by then.
        for at in [first, first + Duration::from_secs(30)] {
            let fault = Fault::Kill(self.random.usize(..REPLICAS));
            self.world.set(at, Event::Fault(fault));
        }
    }

    pub(super) fn plan_nodes(&mut self) {
        if self.scenario != Scenario::Nodes {
            return;
        }
        let mut random = Rng::with_seed(self.random.u64(..));
        for _ in 0..random.u8(1..4) {
            let from = Duration::from_millis(random.u64(500..15_000));
            let length = Duration::from_millis(random.u64(500..9_000));
            let node = random.u64(..NODES);
            self.store.set_node_down(node, from, from + length);
        }
    }

    pub(super) fn loses_notices(&mut self) -> bool {
        self.scenario == Scenario::OnTime && self.random.bool()
    }

    pub(super) fn on_killed(&mut self, at: usize) {
        let now = self.now();
        for key in self.replicas[at].table.keys() {
            self.lost_at.insert(key, now);
        }
    }

    pub(super) fn check_times(&mut self) -> Result<(), Violation> {
        if self.scenario != Scenario::OnTime {
            return Ok(());
        }
        let now = self.now();
        let due = |(key, at): (&ResponseKey, &Duration)| (*at + CANCEL_MAX < now).then_some(*key);
        let due: Vec<_> = self.cancelled_at.iter().filter_map(due).collect();
        for key in due {
            let is_generating = self.replicas.iter().any(|replica| {
                let run = replica.table.find(key).filter(|_| replica.is_up);
                run.is_some_and(|run| run.state.is_generating())
            });
            if is_generating {
                let reason = "it was cancelled a second ago, and an engine works on it";
                return Err(Violation::new(now, key, reason));
            }
            self.cancelled_at.remove(&key);
            self.counts.cancels_on_time += 1;
        }
        let lost: Vec<_> = self.lost_at.iter().map(|(key, at)| (*key, *at)).collect();
        for (key, at) in lost {
            let record = self.store.get(now, key);
            let has_ended = record.is_none_or(|record| record.status.is_terminal());
            let runs = self
                .replicas
                .iter()
                .any(|replica| replica.is_up && replica.table.find(key).is_some());
            if has_ended || runs {
                self.lost_at.remove(&key);
                self.counts.takeovers_on_time += 1;
            } else if at + TAKE_OVER_MAX < now {
                let reason = format!("its owner died at {at:?}, and no other runs it");
                return Err(Violation::new(now, key, reason));
            }
        }
        Ok(())
    }

    /// A response that fails, and not because its engine said so, could be run by no other replica: readers have
    /// received output of it, or it cannot be run elsewhere, or it was lost too often.
    pub(super) fn check_failure(
        &mut self,
        at: usize,
        key: ResponseKey,
        ask: &StoreRequest,
        said: &StoreReply,
    ) -> Result<(), Violation> {
        let (StoreRequest::Finalize(_, fence, end), StoreReply::Write(Ok(WriteOutcome::Done))) =
            (ask, said)
        else {
            return Ok(());
        };
        let run = self.replicas[at].table.find(key);
        let cause = run.and_then(|run| run.failure);
        if end.status != Status::Failed
            || cause != Some(FailureCause::Owner)
            || self.rolled_back.contains(&key)
        {
            return Ok(());
        }
        self.counts.owner_failures += 1;
        let own = end.batch.as_ref().map_or(u64::MAX, |batch| batch.first);
        let now = self.now();
        let logged = self.store.logged(now, key).unwrap_or_default();
        let mut events = parse_events(&logged).unwrap_or_default().into_iter();
        let was_read = events.any(|event| event.kind == "word" && event.number < own)
            // The log is kept for some time only; then nothing is known.
            || logged.is_empty();
        let is_portable = self.portable.get(&key).copied().unwrap_or_default();
        let was_lost_often =
            self.store.starts(key) >= ATTEMPTS_MAX as usize || fence.number > OWNERS_MAX;
        let streams = self.streams.get(&key).copied().unwrap_or_default();
        if !is_portable || (streams && was_read) || was_lost_often {
            return Ok(());
        }
        let reason = "it failed, and another replica could have run it";
        Err(Violation::new(now, key, reason))
    }
}
