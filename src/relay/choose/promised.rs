//! What workers get beside their load: requests that were released to them and are not there yet, and those that wait for
//! them, here and in other replicas. Whoever comes later is behind them.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::fleet::load::LoadShare;
use crate::fleet::waiting::WaitingByOwner;
use crate::ids::WorkerId;

/// By cache owner: a worker, which counts everything, and each of its dp ranks that requests are pinned to.
#[derive(Clone, Debug, Default)]
pub(in crate::relay) struct Promised {
    by_owner: FxHashMap<WorkerId, Promise>,
    /// What waits in other replicas. They let it go when its worker has room, so it takes none.
    peers: Option<Arc<WaitingByOwner>>,
}

/// What one worker or rank was promised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::relay) struct Promise {
    pub(in crate::relay) all: LoadShare,
    /// The part of `all` that waits.
    pub(in crate::relay) waiting: LoadShare,
    /// Those of the requests that wait for room here, and not for another worker to compute their prompt.
    pub(in crate::relay) in_line: u32,
}

impl Promised {
    /// With what waits in other replicas.
    pub(in crate::relay) fn with_peers(self, peers: Option<Arc<WaitingByOwner>>) -> Self {
        Self { peers, ..self }
    }

    /// Whether it has something that waits in other replicas.
    pub(in crate::relay) fn has_peers(&self) -> bool {
        self.peers.is_some()
    }

    /// What a worker was promised here.
    #[inline]
    pub(in crate::relay) fn of(&self, owner: WorkerId) -> Promise {
        self.by_owner.get(&owner).copied().unwrap_or_default()
    }

    /// What a worker was promised here and in other replicas.
    #[inline]
    pub(in crate::relay) fn everywhere(&self, owner: WorkerId) -> LoadShare {
        let peers = self.peers.as_ref().and_then(|peers| peers.get(&owner));
        let own = self.of(owner).all;
        own.plus(peers.copied().unwrap_or_default())
    }

    pub(in crate::relay) fn waiting(&self) -> WaitingByOwner {
        let all = self.by_owner.iter();
        let waiting = all.filter(|(_, promise)| promise.waiting.requests > 0);
        waiting
            .map(|(owner, promise)| (*owner, promise.waiting))
            .collect()
    }

    /// Adds the load of a request that was released.
    pub(in crate::relay) fn add(&mut self, promises: &[(WorkerId, LoadShare)]) {
        for (owner, more) in promises {
            self.change(*owner, |promise| promise.all = promise.all.plus(*more));
        }
    }

    /// Adds the load of a request that waits for room at the first of these.
    pub(in crate::relay) fn add_waiting(&mut self, promises: &[(WorkerId, LoadShare)]) {
        for (place, (owner, more)) in promises.iter().enumerate() {
            let in_line = if place == 0 { more.requests } else { 0 };
            self.change(*owner, |promise| {
                promise.all = promise.all.plus(*more);
                promise.waiting = promise.waiting.plus(*more);
                promise.in_line += in_line;
            });
        }
    }

    /// Adds the load of a request that waits although the first of these has room: nobody else has to wait for it.
    pub(in crate::relay) fn add_beside_line(&mut self, promises: &[(WorkerId, LoadShare)]) {
        for (owner, more) in promises {
            self.change(*owner, |promise| {
                promise.all = promise.all.plus(*more);
                promise.waiting = promise.waiting.plus(*more);
            });
        }
    }

    /// Takes off the load of a request that waits no longer for room at the first of these.
    pub(in crate::relay) fn remove_waiting(&mut self, promises: &[(WorkerId, LoadShare)]) {
        for (place, (owner, less)) in promises.iter().enumerate() {
            let in_line = if place == 0 { less.requests } else { 0 };
            self.change(*owner, |promise| {
                promise.all = promise.all.minus(*less);
                promise.waiting = promise.waiting.minus(*less);
                promise.in_line = promise.in_line.saturating_sub(in_line);
            });
        }
    }

    pub(in crate::relay) fn add_all(&mut self, others: &Self) {
        for (owner, more) in &others.by_owner {
            let promise = self.by_owner.entry(*owner).or_default();
            promise.all = promise.all.plus(more.all);
            promise.waiting = promise.waiting.plus(more.waiting);
            promise.in_line += more.in_line;
        }
    }

    /// Takes off the load of a request that was released.
    pub(in crate::relay) fn remove(&mut self, promises: &[(WorkerId, LoadShare)]) {
        for (owner, less) in promises {
            self.change(*owner, |promise| promise.all = promise.all.minus(*less));
        }
    }

    fn change(&mut self, owner: WorkerId, change: impl Fn(&mut Promise)) {
        let worker = owner.worker();
        let ranked = (owner != worker).then_some(owner);
        for owner in ranked.into_iter().chain([worker]) {
            let promise = self.by_owner.entry(owner).or_default();
            change(promise);
            if *promise == Promise::default() {
                self.by_owner.remove(&owner);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARE: LoadShare = LoadShare {
        requests: 1,
        queued_tokens: 10,
        context_tokens: 30,
    };

    #[test]
    fn what_a_rank_is_promised_its_worker_is_promised_too() {
        let worker = WorkerId(3);
        let rank = worker.cache_owner(Some(1));
        let mut promised = Promised::default();
        promised.add(&[(rank, SHARE), (worker, SHARE)]);
        assert_eq!(promised.of(rank).all, SHARE);
        assert_eq!(promised.of(worker).all.queued_tokens, 20);
        assert_eq!(promised.of(worker.cache_owner(Some(0))), Promise::default());
        promised.remove(&[(rank, SHARE), (worker, SHARE)]);
        assert!(promised.by_owner.is_empty());
    }

    #[test]
    fn a_request_waits_in_the_line_of_the_worker_that_computes_its_prompt() {
        let (prefill, decode) = (WorkerId(1), WorkerId(2));
        let mut promised = Promised::default();
        promised.add_waiting(&[(prefill, SHARE), (decode, SHARE)]);
        let in_line = |worker| promised.of(worker).in_line;
        assert_eq!((in_line(prefill), in_line(decode)), (1, 0));
        assert_eq!(promised.of(decode).waiting, SHARE);
        let before = promised.clone();
        promised.add_waiting(&[(decode, SHARE)]);
        promised.add_all(&before);
        assert_eq!(promised.of(prefill).in_line, 2);
        for promises in [&[(decode, SHARE)][..], &[(prefill, SHARE), (decode, SHARE)]] {
            promised.remove_waiting(promises);
        }
        assert_eq!(promised.by_owner, before.by_owner);
    }

    #[test]
    fn a_request_that_waits_beside_the_line_is_load_that_waits() {
        let mut promised = Promised::default();
        promised.add_beside_line(&[(WorkerId(1), SHARE)]);
        let expected = Promise {
            all: SHARE,
            waiting: SHARE,
            in_line: 0,
        };
        assert_eq!(promised.of(WorkerId(1)), expected);
    }

    #[test]
    fn what_waits_elsewhere_comes_before_a_request_and_does_not_wait_here() {
        let (here, there) = (WorkerId(1), WorkerId(2));
        let mut promised = Promised::default();
        promised.add_waiting(&[(here, SHARE)]);
        promised.add(&[(WorkerId(3), SHARE)]);
        let peers = [(here, SHARE), (there, SHARE)].into_iter().collect();
        let promised = promised.with_peers(Some(Arc::new(peers)));
        assert_eq!(promised.everywhere(here).queued_tokens, 20);
        assert_eq!(promised.everywhere(there), SHARE);
        assert_eq!(promised.of(there), Promise::default());
        assert_eq!(promised.waiting(), [(here, SHARE)].into_iter().collect());
    }
}
