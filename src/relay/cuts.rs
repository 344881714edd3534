//! The workers that cut the connection after a request had been sent to them. Pure.
//!
//! A process that ends closes all of its connections, and some servers close those that were idle for long. So however
//! many connections one worker cuts, it is one worker; a request that several workers cut seems to end engines.

use smallvec::SmallVec;

use crate::ids::WorkerId;

/// A request is not sent any more once this many workers cut the connection when they had got it.
pub(super) const WORKERS_MAX: usize = 2;
/// A worker does not get a request any more that it cut this many connections of.
const CUTS_MAX: u32 = 2;

/// Connections that broke after one request, or requests with one body, had been sent over them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cuts {
    by_worker: SmallVec<[(WorkerId, u32); WORKERS_MAX]>,
}

impl Cuts {
    /// `worker` cut this many more connections.
    pub(super) fn add(&mut self, worker: WorkerId, cuts: u32) {
        if cuts > 0 {
            self.raise(worker, self.of(worker).saturating_add(cuts));
        }
    }

    /// Takes what another request with the same body saw. Requests that were under way when a worker ended all saw the
    /// same end, so the cuts of one worker do not add up.
    pub(super) fn merge(&mut self, other: &Self) {
        for (worker, cuts) in &other.by_worker {
            self.raise(*worker, *cuts);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_worker.is_empty()
    }

    /// True if the request may not be sent once more, because it seems to end the engines that get it.
    pub(super) fn has_several_workers(&self) -> bool {
        self.by_worker.len() >= WORKERS_MAX
    }

    /// True if this worker may not get the request once more.
    pub(super) fn excludes(&self, worker: WorkerId) -> bool {
        self.of(worker) >= CUTS_MAX
    }

    /// The workers that may not get the request once more, though others may.
    pub(super) fn excluded(&self) -> impl Iterator<Item = WorkerId> {
        let excluded = self.by_worker.iter().filter(|(_, cuts)| *cuts >= CUTS_MAX);
        excluded.map(|(worker, _)| *worker)
    }

    fn of(&self, worker: WorkerId) -> u32 {
        let found = self.by_worker.iter().find(|(id, _)| *id == worker);
        found.map_or(0, |(_, cuts)| *cuts)
    }

    /// Further workers than [`WORKERS_MAX`] would change nothing.
    fn raise(&mut self, worker: WorkerId, at_least: u32) {
        let known = self.by_worker.iter_mut().find(|(id, _)| *id == worker);
        if let Some((_, cuts)) = known {
            *cuts = at_least.max(*cuts);
        } else if !self.has_several_workers() {
            self.by_worker.push((worker, at_least));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: WorkerId = WorkerId(0);
    const B: WorkerId = WorkerId(1);

    fn of(cuts: &[(WorkerId, u32)]) -> Cuts {
        let mut sum = Cuts::default();
        cuts.iter()
            .for_each(|(worker, cuts)| sum.add(*worker, *cuts));
        sum
    }

    /// Whether the request is sent no more, to A no more, to B no more.
    fn check(cuts: &Cuts, expected: (bool, bool, bool)) {
        let found = (
            cuts.has_several_workers(),
            cuts.excludes(A),
            cuts.excludes(B),
        );
        assert_eq!(found, expected, "{cuts:?}");
        let excluded: Vec<WorkerId> = cuts.excluded().collect();
        let one_by_one = [A, B].into_iter().filter(|worker| cuts.excludes(*worker));
        assert_eq!(excluded, one_by_one.collect::<Vec<_>>());
    }

    #[test]
    fn one_worker_that_cuts_many_connections_keeps_the_request_from_no_other() {
        check(&of(&[]), (false, false, false));
        check(&of(&[(A, 0)]), (false, false, false));
        check(&of(&[(A, 1)]), (false, false, false));
        check(&of(&[(A, 1), (A, 1)]), (false, true, false));
        check(&of(&[(A, 2)]), (false, true, false));
        check(&of(&[(A, 9), (A, 9)]), (false, true, false));
    }

    #[test]
    fn two_workers_that_cut_one_connection_each_end_the_request() {
        check(&of(&[(A, 1), (B, 1)]), (true, false, false));
        check(&of(&[(A, 2), (B, 1)]), (true, true, false));
    }

    #[test]
    fn requests_that_saw_the_same_end_of_a_worker_count_once() {
        let mut seen = of(&[(A, 1)]);
        (0..5).for_each(|_| seen.merge(&of(&[(A, 1)])));
        check(&seen, (false, false, false));
        seen.merge(&of(&[(A, 2)]));
        check(&seen, (false, true, false));
        seen.merge(&of(&[(B, 1)]));
        check(&seen, (true, true, false));
    }

    #[test]
    fn it_remembers_no_more_workers_than_matter() {
        let mut cuts = Cuts::default();
        (0..100).for_each(|worker| cuts.add(WorkerId(worker), 1));
        assert_eq!(cuts.by_worker.len(), WORKERS_MAX);
    }
}
