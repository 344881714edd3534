//! The load of single dp ranks: that of the requests that are pinned to them.

use std::sync::OnceLock;

use super::Load;
use crate::fleet::events::MAX_RANKS;

/// What a decision reads of the load of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankShare {
    pub requests: u32,
    pub queued_tokens: u64,
    pub decode_tokens: u64,
}

/// The loads of a worker's ranks. Takes memory with the first pinned request.
#[derive(Debug, Default)]
pub struct PinnedLoads(OnceLock<Box<[Load]>>);

/// Behind the loads of the ranks: all of them together.
const ALL: usize = MAX_RANKS as usize;

impl PinnedLoads {
    pub(in crate::fleet) fn change(&self, rank: u32, change: impl Fn(&Load)) {
        let loads = self
            .0
            .get_or_init(|| (0..=ALL).map(|_| Load::default()).collect());
        if let Some(load) = loads[..ALL].get(rank as usize) {
            change(load);
            change(&loads[ALL]);
        }
    }

    /// Of the requests that this router has pinned to a rank.
    pub fn own(&self, rank: u32) -> RankShare {
        self.at(rank as usize)
    }

    /// The load of one of `ranks` ranks: its own, and of what is pinned to none as much as each other one. The engine spreads
    /// that over its ranks, and other replicas and clients do not say which they chose.
    pub fn share(&self, worker: &Load, rank: u32, ranks: u32) -> RankShare {
        let (own, all) = (self.at(rank as usize), self.at(ALL));
        let ranks = ranks.max(1);
        let of_rest = |all: u64, pinned: u64| all.saturating_sub(pinned) / u64::from(ranks);
        RankShare {
            requests: own.requests + worker.requests().saturating_sub(all.requests) / ranks,
            queued_tokens: own.queued_tokens + of_rest(worker.queued_tokens(), all.queued_tokens),
            decode_tokens: own.decode_tokens + of_rest(worker.decode_tokens(), all.decode_tokens),
        }
    }

    fn at(&self, position: usize) -> RankShare {
        let Some(load) = self.0.get().and_then(|loads| loads.get(position)) else {
            return RankShare::default();
        };
        RankShare {
            requests: load.own_requests(),
            queued_tokens: load.own_queued_tokens(),
            decode_tokens: load.own_decode_tokens(),
        }
    }
}

#[cfg(test)]
mod tests {
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
            (share.requests, share.queued_tokens, share.decode_tokens),
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
}
