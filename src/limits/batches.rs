//! Charges that are made together: those of one tenant that one thread asks for before the task runs that makes them.
//! It is queued behind the tasks that are ready already, so that nobody waits for the others.

use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use tokio::sync::oneshot;

use crate::ids::Tenant;
use crate::store::charges::{Charge, ChargeReply};

/// Charges of one call: less than a millisecond of Redis' time.
const MAX: usize = 64;
/// A usual batch under load.
const USUAL: usize = 8;
/// Threads with batches of their own; others share them.
const SLOTS: usize = 64;

/// What became of a charge. `None`: the store did not answer.
pub(super) type Reply = Option<ChargeReply>;

/// Charges of one tenant, and who waits for the reply to each.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) charges: Vec<Charge>,
    pub(super) waiting: Vec<oneshot::Sender<Reply>>,
}

#[derive(Debug)]
pub(super) struct Batches(Vec<Mutex<FxHashMap<Tenant, Batch>>>);

impl Default for Batches {
    fn default() -> Self {
        Self((0..SLOTS).map(|_| Mutex::default()).collect())
    }
}

impl Batches {
    fn slot(&self, thread: usize) -> &Mutex<FxHashMap<Tenant, Batch>> {
        &self.0[thread % SLOTS]
    }

    /// Adds a charge. True if it is the first of a batch: the caller has it made.
    pub(super) fn join(
        &self,
        thread: usize,
        tenant: Tenant,
        charge: Charge,
    ) -> (oneshot::Receiver<Reply>, bool) {
        let (sender, receiver) = oneshot::channel();
        let mut slot = self.slot(thread).lock();
        let batch = slot.entry(tenant).or_insert_with(|| Batch {
            charges: Vec::with_capacity(USUAL),
            waiting: Vec::with_capacity(USUAL),
        });
        let is_first = batch.charges.len().is_multiple_of(MAX);
        batch.charges.push(charge);
        batch.waiting.push(sender);
        (receiver, is_first)
    }

    /// The charges that waited longest, for one call. Empty only if they were taken already.
    pub(super) fn take(&self, thread: usize, tenant: Tenant) -> Batch {
        let mut slot = self.slot(thread).lock();
        let Some(batch) = slot
            .get_mut(&tenant)
            .filter(|batch| batch.charges.len() > MAX)
        else {
            return slot.remove(&tenant).unwrap_or_default();
        };
        Batch {
            charges: batch.charges.drain(..MAX).collect(),
            waiting: batch.waiting.drain(..MAX).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::RequestId;
    use crate::store::charges::ChargeId;

    fn charge(number: u128) -> Charge {
        Charge {
            id: ChargeId::Request(RequestId::new(number)),
            limits: Default::default(),
            max_concurrent: 0,
        }
    }

    #[test]
    fn each_first_charge_of_a_batch_has_it_made_and_none_is_left() {
        let batches = Batches::default();
        let [a, b] = ["a", "b"].map(Tenant::of);
        let count = 2 * MAX + 1;
        let mut calls = 0;
        for number in 0..count {
            calls += usize::from(batches.join(1, a, charge(number as u128)).1);
        }
        assert!(batches.join(1, b, charge(1)).1 && batches.join(2, a, charge(1)).1);
        assert_eq!(calls, 3);
        let sizes = [MAX, MAX, 1].map(|_| batches.take(1, a).charges);
        assert_eq!(sizes.each_ref().map(Vec::len), [MAX, MAX, 1]);
        let ids = sizes.iter().flatten().map(|charge| charge.id);
        assert!(ids.eq((0..count).map(|number| charge(number as u128).id)));
        assert!(batches.take(1, a).charges.is_empty());
        assert!(batches.join(1, a, charge(1)).1);
    }
}
