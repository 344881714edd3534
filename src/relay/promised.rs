//! What workers get beside their load: requests that were released to them and are not there yet, and those that wait for
//! them here. Whoever comes later is behind them.

use rustc_hash::FxHashMap;

use crate::ids::WorkerId;

/// By cache owner: a worker, which counts everything, and each of its dp ranks that requests are pinned to.
#[derive(Clone, Debug, Default)]
pub(super) struct Promised {
    by_owner: FxHashMap<WorkerId, Promise>,
}

/// What one worker or rank was promised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Promise {
    pub(super) requests: u32,
    /// Those of them that wait.
    pub(super) waiting: u32,
    pub(super) queued_tokens: u64,
    pub(super) context_tokens: u64,
}

impl Promised {
    #[inline]
    pub(super) fn of(&self, owner: WorkerId) -> Promise {
        match self.by_owner.is_empty() {
            true => Promise::default(),
            false => self.by_owner.get(&owner).copied().unwrap_or_default(),
        }
    }

    pub(super) fn add(&mut self, owner: WorkerId, promise: Promise) {
        self.change(owner, |it| {
            it.requests += promise.requests;
            it.waiting += promise.waiting;
            it.queued_tokens += promise.queued_tokens;
            it.context_tokens += promise.context_tokens;
        });
    }

    pub(super) fn remove(&mut self, owner: WorkerId, promise: Promise) {
        self.change(owner, |it| {
            it.requests = it.requests.saturating_sub(promise.requests);
            it.waiting = it.waiting.saturating_sub(promise.waiting);
            it.queued_tokens = it.queued_tokens.saturating_sub(promise.queued_tokens);
            it.context_tokens = it.context_tokens.saturating_sub(promise.context_tokens);
        });
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

    #[test]
    fn what_a_rank_is_promised_its_worker_is_promised_too() {
        let worker = WorkerId(3);
        let rank = worker.cache_owner(Some(1));
        let promise = Promise {
            requests: 1,
            waiting: 1,
            queued_tokens: 10,
            context_tokens: 30,
        };
        let mut promised = Promised::default();
        promised.add(rank, promise);
        promised.add(worker, promise);
        assert_eq!(promised.of(rank), promise);
        assert_eq!(promised.of(worker).queued_tokens, 20);
        assert_eq!(promised.of(worker.cache_owner(Some(0))), Promise::default());
        promised.remove(rank, promise);
        promised.remove(worker, promise);
        assert!(promised.by_owner.is_empty());
    }
}
