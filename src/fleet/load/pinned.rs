//! The load of single dp ranks: that of the requests that are pinned to them, here or by another replica.

use std::sync::OnceLock;

use super::{Load, LoadShare};
use crate::fleet::events::MAX_RANKS;

/// The loads of a worker's ranks. Takes memory with the first pinned request.
#[derive(Debug, Default)]
pub struct PinnedLoads(OnceLock<Box<[Load]>>);

/// Behind the loads of the ranks: all of them together.
const ALL: usize = MAX_RANKS as usize;

impl PinnedLoads {
    pub(in crate::fleet) fn change(&self, rank: u32, change: impl Fn(&Load)) {
        let loads = self.loads();
        if let Some(load) = loads[..ALL].get(rank as usize) {
            change(load);
            change(&loads[ALL]);
        }
    }

    /// The load of the requests that this router has pinned to a rank.
    pub fn own(&self, rank: u32) -> LoadShare {
        let load = self.at(rank as usize);
        load.map_or_else(LoadShare::default, Load::own)
    }

    /// The load of the requests that the other replicas have pinned to a rank, as they last reported it.
    pub fn peers(&self, rank: u32) -> LoadShare {
        let load = self.at(rank as usize);
        load.map_or_else(LoadShare::default, Load::peers)
    }

    /// What the other replicas together have at each of the first `ranks` ranks. One thread calls it.
    pub fn set_peers(&self, ranks: u32, of_rank: impl Fn(u32) -> LoadShare) {
        let ranks = ranks.min(MAX_RANKS);
        if self.0.get().is_none() && (0..ranks).all(|rank| of_rank(rank) == LoadShare::default()) {
            return;
        }
        let loads = self.loads();
        let mut all = LoadShare::default();
        let set = |load: &Load, share: LoadShare| {
            load.set_peers(share.requests, share.queued_tokens, share.context_tokens);
        };
        for rank in 0..ranks {
            let share = of_rank(rank);
            all = all.plus(share);
            set(&loads[rank as usize], share);
        }
        set(&loads[ALL], all);
    }

    /// The load of one of `ranks` ranks: what is pinned to it, here and by other replicas, and of what is pinned to none as
    /// much as each other one. The engine spreads that over its ranks, and other clients do not say which they chose.
    pub fn share(&self, worker: &Load, rank: u32, ranks: u32) -> LoadShare {
        let (own, all) = (self.pinned(rank as usize), self.pinned(ALL));
        let ranks = ranks.max(1);
        let of_rest = |all: u64, pinned: u64| all.saturating_sub(pinned) / u64::from(ranks);
        let requests = worker.requests().saturating_sub(all.requests) / ranks;
        LoadShare {
            requests: own.requests.saturating_add(requests),
            queued_tokens: own.queued_tokens + of_rest(worker.queued_tokens(), all.queued_tokens),
            context_tokens: own.context_tokens
                + of_rest(worker.context_tokens(), all.context_tokens),
        }
    }

    /// The load of what this router and the other replicas have pinned.
    fn pinned(&self, position: usize) -> LoadShare {
        let load = self.at(position);
        load.map_or_else(LoadShare::default, |load| load.own().plus(load.peers()))
    }

    fn at(&self, position: usize) -> Option<&Load> {
        self.0.get()?.get(position)
    }

    fn loads(&self) -> &[Load] {
        self.0
            .get_or_init(|| (0..=ALL).map(|_| Load::default()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::LoadShare;
    use crate::fleet::in_flight::InFlight;
    use crate::fleet::registry::tests::worker;

    #[test]
    fn a_pinned_request_counts_at_its_rank_and_at_its_worker() {
        let worker = worker("a");
        let queued = |rank| worker.pinned.share(&worker.load, rank, 2).queued_tokens;
        let mut pinned = InFlight::new(worker.clone(), 100, 40).at_rank(Some(1));
        assert_eq!([queued(0), queued(1)], [0, 60]);
        assert_eq!(worker.load.queued_tokens(), 60);
        pinned.on_first_token();
        let share = worker.pinned.share(&worker.load, 1, 2);
        assert_eq!(
            (share.requests, share.queued_tokens, share.context_tokens),
            (1, 0, 100)
        );
        drop(pinned);
        assert_eq!(worker.pinned.own(1), Default::default());
        assert_eq!(worker.load.requests(), 0);
    }

    #[test]
    fn what_is_pinned_to_no_rank_counts_at_each_in_equal_parts() {
        let worker = worker("a");
        let _pinned = InFlight::new(worker.clone(), 100, 0).at_rank(Some(0));
        let _other = InFlight::new(worker.clone(), 80, 0);
        worker.load.set_peers(2, 20, 0);
        let share = |rank| worker.pinned.share(&worker.load, rank, 2);
        assert_eq!([share(0).queued_tokens, share(1).queued_tokens], [150, 50]);
        assert_eq!([share(0).requests, share(1).requests], [2, 1]);
    }

    #[test]
    fn what_other_replicas_have_pinned_counts_at_its_rank_and_the_rest_in_equal_parts() {
        let worker = worker("a");
        let _own = InFlight::new(worker.clone(), 100, 0).at_rank(Some(0));
        // Of another replica's 70 queued tokens 50 are pinned.
        worker.load.set_peers(2, 70, 0);
        let of_peers = |rank| LoadShare {
            requests: u32::from(rank == 1),
            queued_tokens: if rank == 1 { 50 } else { 0 },
            context_tokens: 0,
        };
        worker.pinned.set_peers(2, of_peers);
        let share = |rank| worker.pinned.share(&worker.load, rank, 2);
        assert_eq!([share(0).queued_tokens, share(1).queued_tokens], [110, 60]);
        assert_eq!([share(0).requests, share(1).requests], [1, 1]);
        assert_eq!(worker.pinned.own(1), LoadShare::default());
        assert_eq!(worker.pinned.peers(1).queued_tokens, 50);
        worker.load.set_peers(0, 0, 0);
        worker.pinned.set_peers(2, |_| LoadShare::default());
        assert_eq!([share(0).queued_tokens, share(1).queued_tokens], [100, 0]);
    }
}
