//! The places that a request can be sent to: a group's workers, or, where requests can be pinned, the dp ranks of those
//! that have several. Pure.

use std::ops::Range;
use std::sync::Arc;

use super::group::Group;
use super::rank_places::{PinnedApi, RankPlaces};
use super::worker::Worker;
use crate::ids::{RankPlace, WorkerId, WorkerIndex};

/// The places for one request. Without ranks to pin to, a place is a worker and has its index.
#[derive(Clone, Copy, Debug)]
pub struct Places<'a> {
    group: &'a Group,
    ranks: Option<&'a RankPlaces>,
}

impl<'a> From<&'a Group> for Places<'a> {
    fn from(group: &'a Group) -> Self {
        Self { group, ranks: None }
    }
}

impl<'a> Places<'a> {
    /// `pinned`: the API of a request that may be pinned to a rank.
    pub fn new(group: &'a Group, pinned: Option<PinnedApi>) -> Self {
        let ranks = match pinned {
            None => None,
            Some(PinnedApi::Chat) => group.chat_ranks.as_ref(),
            Some(PinnedApi::Responses) => group.responses_ranks.as_ref(),
        };
        Self { group, ranks }
    }

    pub fn group(self) -> &'a Group {
        self.group
    }

    pub fn all(self) -> Range<RankPlace> {
        RankPlace::new(0)..RankPlace::new(self.len())
    }

    pub fn len(self) -> usize {
        match self.ranks {
            None => self.group.workers.len(),
            Some(ranks) => ranks.len(),
        }
    }

    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    pub fn of_workers(self, workers: Range<WorkerIndex>) -> Range<RankPlace> {
        match self.ranks {
            None => place_of(workers.start)..place_of(workers.end),
            Some(ranks) => ranks.of_workers(workers),
        }
    }

    #[inline]
    pub fn worker_index(self, place: RankPlace) -> WorkerIndex {
        match self.ranks {
            None => WorkerIndex::new(place.get()),
            Some(ranks) => ranks.at(place).0,
        }
    }

    #[inline]
    pub fn worker(self, place: RankPlace) -> &'a Arc<Worker> {
        self.group.worker(self.worker_index(place))
    }

    /// The rank to pin a request to that is sent there.
    #[inline]
    pub fn rank(self, place: RankPlace) -> Option<u32> {
        self.ranks.and_then(|ranks| ranks.at(place).1)
    }

    /// How many ranks of its worker requests are pinned to.
    pub fn ranks_beside(self, place: RankPlace) -> u32 {
        self.ranks.map_or(1, |ranks| {
            let of_worker = ranks.of_worker(ranks.at(place).0);
            (of_worker.end.get() - of_worker.start.get()) as u32
        })
    }

    /// How many ranks may get a request that is sent there, of those that publish KV events.
    #[inline]
    pub fn event_ranks(self, place: RankPlace) -> u32 {
        match self.rank(place) {
            None => self.group.event_ranks(self.worker_index(place)),
            Some(_) => 1,
        }
    }

    /// Where a request may use what a rank of a worker has cached. `None` for a worker that is down or serves another
    /// model.
    #[inline]
    pub fn of_rank(self, worker: WorkerId, rank: u32) -> Option<RankPlace> {
        let worker_index = self.group.index_of(worker)?;
        let Some(ranks) = self.ranks else {
            return Some(place_of(worker_index));
        };
        let of_worker = ranks.of_worker(worker_index);
        let place = match ranks.at(of_worker.start).1 {
            None => of_worker.start,
            Some(_) => RankPlace::new(of_worker.start.get() + rank as usize),
        };
        of_worker.contains(&place).then_some(place)
    }

    /// Whose cache it is in predictions, and of unconfirmed blocks.
    pub fn cache_owner(self, place: RankPlace) -> WorkerId {
        self.worker(place).id.cache_owner(self.rank(place))
    }

    /// The place of such a cache. `None` where requests cannot be sent to just that: the cache of one of several ranks is
    /// not that of the worker.
    #[inline]
    pub fn of_cache_owner(self, owner: WorkerId) -> Option<RankPlace> {
        let place = self.of_rank(owner.worker(), owner.rank().unwrap_or(0))?;
        (self.rank(place) == owner.rank()).then_some(place)
    }
}

/// The place of a worker, where requests are pinned to no rank.
#[inline]
fn place_of(worker_index: WorkerIndex) -> RankPlace {
    RankPlace::new(worker_index.get())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::engine::Engine;
    use crate::fleet::events::{Endpoint, Events};
    use crate::fleet::health::Health;
    use crate::fleet::registry::tests::{facts, member, registry};
    use crate::fleet::{Facts, Member, Snapshot};

    fn endpoint() -> Endpoint {
        Endpoint::Zmq {
            publisher: "tcp://*:5557".to_owned(),
            replay: None,
            topic: String::new(),
        }
    }

    /// A worker whose engine is asked for its events.
    fn reporting(name: &str) -> Member {
        Member {
            events: Events::Auto,
            ..member(name)
        }
    }

    /// A fleet whose engines have so many ranks and report them, or do not.
    fn announced(ranks: &[u32], are_reported: bool) -> Arc<Snapshot> {
        if !are_reported {
            return fleet(ranks, Some("0.32.0"), Engine::Vllm);
        }
        let fleet = registry(&[]);
        let members = (0..ranks.len()).map(|number| reporting(&format!("w{number}")));
        fleet.set_members("static", members.collect());
        for (status, ranks) in fleet.snapshot().workers.iter().zip(ranks) {
            let known = Facts {
                version: Some("0.32.0".to_owned()),
                event_endpoints: (0..*ranks).map(|rank| (rank, endpoint())).collect(),
                ..facts(&["m"])
            };
            fleet.set_facts(status.worker.id, known);
            fleet.set_health(status.worker.id, Health::Up);
        }
        fleet.snapshot().clone()
    }

    /// A fleet with one worker for each number of ranks, all of one version.
    fn fleet(ranks: &[u32], version: Option<&str>, engine: Engine) -> Arc<Snapshot> {
        let fleet = registry(&[]);
        let members = ranks.iter().enumerate().map(|(number, ranks)| {
            let mut member = member(&format!("w{number}"));
            member.events = Events::At(vec![endpoint(); *ranks as usize]);
            member
        });
        fleet.set_members("static", members.collect());
        for status in &fleet.snapshot().workers {
            let known = Facts {
                version: version.map(str::to_owned),
                engine,
                ..facts(&["m"])
            };
            fleet.set_facts(status.worker.id, known);
            fleet.set_health(status.worker.id, Health::Up);
        }
        fleet.snapshot().clone()
    }

    fn places_of(snapshot: &Snapshot, api: PinnedApi) -> Vec<(usize, Option<u32>)> {
        let places = Places::new(&snapshot.models["m"], Some(api));
        let place = |place| (places.worker_index(place).get(), places.rank(place));
        RankPlace::range(0..places.len()).map(place).collect()
    }

    #[test]
    fn each_rank_of_a_worker_with_several_is_a_place() {
        let snapshot = fleet(&[1, 3, 0], Some("0.32.0"), Engine::Vllm);
        let expected = [
            (0, None),
            (1, Some(0)),
            (1, Some(1)),
            (1, Some(2)),
            (2, None),
        ];
        assert_eq!(places_of(&snapshot, PinnedApi::Chat), expected);
        let places = Places::new(&snapshot.models["m"], Some(PinnedApi::Chat));
        let second = places.of_workers(WorkerIndex::new(1)..WorkerIndex::new(2));
        assert_eq!(second, RankPlace::new(1)..RankPlace::new(4));
        let some = [0, 1, 4].map(RankPlace::new);
        assert_eq!(some.map(|place| places.event_ranks(place)), [1, 1, 0]);
        assert_eq!(some.map(|place| places.ranks_beside(place)), [1, 3, 1]);
        let worker = places.worker(RankPlace::new(1)).id;
        let found = [0, 2, 3].map(|rank| places.of_rank(worker, rank));
        assert_eq!(
            found,
            [Some(1), Some(3), None].map(|place| place.map(RankPlace::new))
        );
        for place in RankPlace::range(0..places.len()) {
            assert_eq!(
                places.of_cache_owner(places.cache_owner(place)),
                Some(place)
            );
        }
        assert_eq!(places.of_cache_owner(worker), None);
    }

    #[test]
    fn ranks_are_alike_if_every_engine_reports_as_many() {
        let check = |ranks: &[u32], are_reported, expected| {
            let snapshot = announced(ranks, are_reported);
            let is_alike = snapshot.models["m"].has_alike_ranks(PinnedApi::Chat);
            assert_eq!(is_alike, expected, "{ranks:?}");
        };
        check(&[2, 2], true, true);
        check(&[2, 3], true, false);
        check(&[2, 1], true, false);
        check(&[1, 1], true, false);
        check(&[2, 2], false, false);
    }

    #[test]
    fn an_engine_that_refuses_its_ranks_has_none_until_it_restarts() {
        let fleet = registry(&[]);
        fleet.set_members("static", vec![reporting("a")]);
        let worker = fleet.snapshot().workers[0].worker.id;
        let events = (0..2).map(|rank| (rank, endpoint())).collect();
        let known = Facts {
            version: Some("0.32.0".to_owned()),
            event_endpoints: events,
            ..facts(&["m"])
        };
        fleet.set_facts(worker, known);
        fleet.set_health(worker, Health::Up);
        let places = || places_of(&fleet.snapshot(), PinnedApi::Chat).len();
        assert_eq!(places(), 2);
        assert!(fleet.on_ranks_refused(worker));
        assert!(!fleet.on_ranks_refused(worker));
        assert_eq!(places(), 1);
        assert_eq!(fleet.snapshot().workers[0].worker.pinned_to(Some(1)), None);
        fleet.restarted(worker);
        assert_eq!(places(), 2);
    }

    #[test]
    fn an_api_that_ignores_the_rank_has_the_workers_as_places() {
        let check = |version, engine, api, expected: usize| {
            let snapshot = fleet(&[2], version, engine);
            assert_eq!(
                places_of(&snapshot, api).len(),
                expected,
                "{version:?} {engine:?} {api:?}"
            );
        };
        check(Some("0.32.1"), Engine::Vllm, PinnedApi::Chat, 2);
        check(Some("0.32.1"), Engine::Vllm, PinnedApi::Responses, 1);
        check(Some("0.33.0rc1"), Engine::Vllm, PinnedApi::Responses, 2);
        check(Some("1.0"), Engine::Vllm, PinnedApi::Responses, 2);
        check(Some("dev"), Engine::Vllm, PinnedApi::Responses, 1);
        check(None, Engine::Vllm, PinnedApi::Chat, 1);
        check(None, Engine::Sglang, PinnedApi::Responses, 2);
    }

    #[test]
    fn a_cache_is_a_workers_or_one_of_its_ranks() {
        let worker = WorkerId(7);
        assert_eq!((worker.worker(), worker.rank()), (worker, None));
        let rank = worker.at_rank(3).unwrap();
        assert_eq!((rank.worker(), rank.rank()), (worker, Some(3)));
        assert_eq!(rank.at_rank(1), None);
        assert!(worker.at_rank(126).is_some() && worker.at_rank(127).is_none());
    }
}
