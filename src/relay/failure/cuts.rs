//! The ends of processes that a request, or requests with one body, saw: connections that were cut after the request had been
//! sent over them. They say whether the request seems to end engines. Pure.
//!
//! A process that ends cuts all of its connections, so however many connections it cuts, it is one end. An end that other
//! requests saw in the same moment speaks against none of them. A connection that was idle for long and is cut says nothing,
//! and is not counted at all.

use std::sync::Arc;
use std::time::Instant;

use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64;

use crate::fleet::Worker;
use crate::fleet::process_end::{CutRequest, ProcessEnd};
use crate::ids::{ClientKey, WorkerId};

/// A request is not sent any more once this many workers cut it, each time alone.
const WORKERS_MAX: usize = 2;
/// A worker does not get a request any more that it cut alone this many times.
const CUTS_MAX: usize = 2;
/// A request is not sent any more that saw this many ends in the company of others, if no other request saw all of them. Engines
/// that are restarted one after the other end under one request several times, too; this is more often than one request is
/// sent by default.
const ENDS_MAX: usize = 5;

/// An end that a request saw at a worker.
#[derive(Clone, Debug)]
pub(in crate::relay) struct Cut {
    pub(in crate::relay) worker: WorkerId,
    pub(in crate::relay) end: Arc<ProcessEnd>,
}

impl Cut {
    /// The cut that a client's request with this body saw, which was sent at `sent`.
    pub(in crate::relay) fn at(
        worker: &Worker,
        (now, sent): (Instant, Instant),
        client: ClientKey,
        body: &[u8],
    ) -> Self {
        let body = xxh3_64(body);
        let request = CutRequest { body, client };
        Self {
            worker: worker.id,
            end: worker.ends.on_cut(now, sent, Some(request)),
        }
    }
}

/// The ends that one request, or requests with one body, saw.
#[derive(Clone, Debug, Default)]
pub(in crate::relay) struct Cuts(SmallVec<[Cut; 1]>);

impl Cuts {
    pub(in crate::relay) fn add(&mut self, cut: &Cut) {
        if self.0.iter().any(|known| Arc::ptr_eq(&known.end, &cut.end)) {
            return;
        }
        // The last ones count.
        if self.0.len() >= ENDS_MAX {
            self.0.remove(0);
        }
        self.0.push(cut.clone());
    }

    /// Takes what another request with the same body saw.
    pub(in crate::relay) fn merge(&mut self, other: &Self) {
        other.0.iter().for_each(|cut| self.add(cut));
    }

    pub(in crate::relay) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// True if the request may not be sent once more, because it seems to end the engines that get it.
    pub(in crate::relay) fn are_of_the_request(&self) -> bool {
        let mut alone: SmallVec<[WorkerId; 2]> = self.alone().collect();
        alone.sort_unstable();
        alone.dedup();
        alone.len() >= WORKERS_MAX || self.0.len() >= ENDS_MAX && !self.has_companion()
    }

    /// True if other requests saw the last end, too.
    pub(in crate::relay) fn is_last_shared(&self) -> bool {
        self.0.last().is_some_and(|cut| cut.end.is_shared())
    }

    #[cfg(test)]
    pub(in crate::relay) fn workers(&self) -> Vec<WorkerId> {
        self.0.iter().map(|cut| cut.worker).collect()
    }

    /// True if this worker may not get the request once more.
    pub(in crate::relay) fn excludes(&self, worker: WorkerId) -> bool {
        self.alone().filter(|id| *id == worker).count() >= CUTS_MAX
    }

    /// The workers that may not get the request once more, though others may.
    pub(in crate::relay) fn excluded(&self) -> impl Iterator<Item = WorkerId> {
        let excluded = self.alone().filter(|worker| self.excludes(*worker));
        let mut excluded: SmallVec<[WorkerId; 2]> = excluded.collect();
        excluded.sort_unstable();
        excluded.dedup();
        excluded.into_iter()
    }

    /// The workers that cut it while nothing else was cut, each as often as it did.
    fn alone(&self) -> impl Iterator<Item = WorkerId> {
        let alone = self.0.iter().filter(|cut| !cut.end.is_shared());
        alone.map(|cut| cut.worker)
    }

    /// True if another body was cut each time, so that either may be to blame.
    fn has_companion(&self) -> bool {
        let mut ends = self.0.iter().map(|cut| cut.end.bodies());
        let mut common = ends.next().unwrap_or_default();
        ends.for_each(|bodies| common.retain(|body| bodies.contains(body)));
        common.len() > 1
    }
}

#[cfg(test)]
pub(in crate::relay) mod tests {
    use std::time::Duration;

    use super::*;
    use crate::fleet::process_end::ProcessEnds;
    use crate::observe;

    const A: WorkerId = WorkerId(0);
    const B: WorkerId = WorkerId(1);
    const C: WorkerId = WorkerId(2);
    /// The request in question.
    const OWN: u64 = 0;

    fn of_one_client(body: u64) -> Option<CutRequest> {
        let client = ClientKey(1);
        Some(CutRequest { body, client })
    }

    /// The end of one process, which these bodies saw.
    pub(in crate::relay) fn cut(worker: WorkerId, bodies: &[u64]) -> Cut {
        let (ends, now) = (ProcessEnds::default(), observe::now());
        let seen = bodies
            .iter()
            .map(|body| ends.on_cut(now, now, of_one_client(*body)));
        let end = seen.last().expect("one body at least");
        Cut { worker, end }
    }

    fn of(cuts: &[(WorkerId, &[u64])]) -> Cuts {
        let mut sum = Cuts::default();
        cuts.iter()
            .for_each(|(worker, bodies)| sum.add(&cut(*worker, bodies)));
        sum
    }

    /// Whether the request is sent no more, to A no more, to B no more.
    fn check(cuts: &[(WorkerId, &[u64])], expected: (bool, bool, bool)) {
        let seen = of(cuts);
        let found = (
            seen.are_of_the_request(),
            seen.excludes(A),
            seen.excludes(B),
        );
        assert_eq!(found, expected, "{cuts:?}");
        let excluded: Vec<WorkerId> = seen.excluded().collect();
        let one_by_one = [A, B].into_iter().filter(|worker| seen.excludes(*worker));
        assert_eq!(excluded, one_by_one.collect::<Vec<_>>());
    }

    #[test]
    fn a_request_that_is_cut_alone_by_two_workers_seems_to_end_engines() {
        let alone: &[u64] = &[OWN];
        check(&[], (false, false, false));
        check(&[(A, alone)], (false, false, false));
        check(&[(A, alone), (A, alone)], (false, true, false));
        check(&[(A, alone), (B, alone)], (true, false, false));
        check(&[(A, alone), (A, alone), (B, alone)], (true, true, false));
    }

    #[test]
    fn others_that_were_cut_in_the_same_moment_acquit_it() {
        let together: &[u64] = &[OWN, 1, 2];
        check(&[(A, together), (A, together)], (false, false, false));
        check(&[(A, together), (B, together)], (false, false, false));
        check(&[(A, together), (B, &[OWN])], (false, false, false));
        // Engines that are killed in turn under the same requests.
        let killed = [A, B, C, A, B, C, A].map(|worker| (worker, together));
        check(&killed, (false, false, false));
    }

    #[test]
    fn one_that_is_cut_five_times_with_others_each_time_seems_to_end_engines() {
        let [first, second]: [&[u64]; 2] = [&[OWN, 1, 2], &[OWN, 1, 3]];
        let mut cuts = vec![(A, first), (B, second), (C, first), (A, second)];
        check(&cuts, (false, false, false));
        cuts.push((B, &[OWN, 4]));
        check(&cuts, (true, false, false));
        cuts[4] = (B, second);
        check(&cuts, (false, false, false));
    }

    #[test]
    fn who_is_cut_a_little_later_acquits_it_too() {
        let (ends, now) = (ProcessEnds::default(), observe::now());
        let end = ends.on_cut(now, now, of_one_client(OWN));
        let mut cuts = of(&[(A, &[OWN])]);
        cuts.add(&Cut { worker: B, end });
        assert!(cuts.are_of_the_request());
        ends.on_cut(now + Duration::from_millis(20), now, of_one_client(1));
        assert!(!cuts.are_of_the_request());
    }

    #[test]
    fn requests_that_saw_the_same_end_count_once() {
        let mut seen = Cuts::default();
        let end = cut(A, &[OWN]);
        (0..5).for_each(|_| seen.add(&end));
        let before = seen.clone();
        (0..5).for_each(|_| seen.merge(&before));
        assert_eq!(seen.0.len(), 1);
        seen.merge(&of(&[(B, &[OWN])]));
        assert!(seen.are_of_the_request());
    }

    #[test]
    fn it_remembers_no_more_ends_than_matter() {
        let mut cuts = Cuts::default();
        (0..100).for_each(|worker| cuts.add(&cut(WorkerId(worker), &[OWN, 1])));
        assert_eq!(cuts.0.len(), ENDS_MAX);
    }
}
