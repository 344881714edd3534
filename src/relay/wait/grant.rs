//! What a request has that may be sent to a worker: the right itself, and what it promises workers until it counts there.

use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::fleet::Group;
use crate::fleet::freed::Freed;
use crate::fleet::load::LoadShare;
use crate::ids::WorkerId;
use crate::relay::choose::chosen::Chosen;
use crate::relay::choose::promised::Promised;

/// What a request promises workers, by cache owner; first the one that computes the prompt.
pub(in crate::relay) type Promises = SmallVec<[(WorkerId, LoadShare); 2]>;

/// What a released request takes with it.
#[derive(Default)]
pub(super) struct Release {
    pub(super) promises: Promises,
    /// The choice by which it was released. `None` for one that is planned only now.
    pub(super) chosen: Option<(Arc<Group>, Chosen)>,
}

/// What workers were promised.
#[derive(Debug, Default)]
pub(super) struct Granted {
    /// By requests that were released and do not count at their worker yet.
    pub(super) released: Mutex<Promised>,
    /// When workers were last looked at: with those that wait.
    pub(super) last: ArcSwap<Promised>,
}

/// The right to be sent to a worker. Until it is dropped, the request counts at its worker.
#[derive(Debug)]
pub(in crate::relay) struct Grant {
    granted: Arc<Granted>,
    freed: Arc<Freed>,
    promises: Promises,
    /// The choice by which it was released.
    chosen: Option<(Arc<Group>, Chosen)>,
    /// See [`crate::queue::Request::has_lost_target`]: the request may wait again.
    pub(in crate::relay) has_lost_target: bool,
}

impl Grant {
    /// For a request that leaves the queue, in which it counted.
    pub(super) fn new(
        granted: &Arc<Granted>,
        freed: &Arc<Freed>,
        release: Release,
        has_lost_target: bool,
    ) -> Self {
        let Release { promises, chosen } = release;
        granted.released.lock().add(&promises);
        Self {
            granted: granted.clone(),
            freed: freed.clone(),
            promises,
            chosen,
            has_lost_target,
        }
    }

    /// For a request that is sent although there is no room.
    pub(super) fn at_once(granted: &Arc<Granted>, freed: &Arc<Freed>) -> Self {
        freed.add_waiting(1);
        Self::new(granted, freed, Release::default(), false)
    }

    /// The choice by which it was released, if it is one among these workers.
    pub(in crate::relay) fn take_chosen(&mut self, group: &Arc<Group>) -> Option<Chosen> {
        let (of, chosen) = self.chosen.take()?;
        Arc::ptr_eq(&of, group).then_some(chosen)
    }

    /// What workers are promised, without what this promises.
    pub(in crate::relay) fn others(&self, mut promised: Promised) -> Promised {
        promised.remove(&self.promises);
        promised
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.granted.released.lock().remove(&self.promises);
        self.freed.remove_waiting(1);
        if self.freed.waiting() > 0 {
            self.freed.notify();
        }
    }
}

#[cfg(test)]
impl Grant {
    /// One for a request of so many tokens, and what counts it.
    pub(in crate::relay) fn of_tokens(tokens: u64) -> (Self, impl Fn() -> u64) {
        let worker = WorkerId(0);
        let granted = Arc::new(Granted::default());
        let freed = Arc::new(Freed::default());
        freed.add_waiting(1);
        let promise = LoadShare {
            requests: 1,
            queued_tokens: tokens,
            ..LoadShare::default()
        };
        let release = Release {
            promises: smallvec::smallvec![(worker, promise)],
            chosen: None,
        };
        let grant = Self::new(&granted, &freed, release, false);
        (grant, move || {
            granted.released.lock().of(worker).all.queued_tokens
        })
    }
}
