//! The ends of a worker's processes, as its requests saw them. A process that ends cuts all of its connections in the same
//! moment: what was cut together was cut by one end, and an end that several requests saw speaks against none of them. Pure.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::ids::ClientKey;

/// The kernel closes all connections of a process at once. The I/O threads of a busy router notice it within this time.
const MOMENT: Duration = Duration::from_secs(1);
/// Requests of one end that are remembered one by one. With more it is only known that there were others.
const REQUESTS_MAX: usize = 256;

/// A request whose connection was cut before its answer. One that a client sends several times is one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CutRequest {
    /// Hash of its body.
    pub body: u64,
    pub client: ClientKey,
}

/// One end of a process, or one connection that was cut.
#[derive(Debug)]
pub struct ProcessEnd {
    at: Instant,
    /// The requests that had no answer yet.
    requests: Mutex<SmallVec<[CutRequest; 2]>>,
    /// Others were cut, too: answers that had begun.
    has_others: AtomicBool,
}

impl ProcessEnd {
    fn new(at: Instant) -> Self {
        Self {
            at,
            requests: Mutex::default(),
            has_others: AtomicBool::new(false),
        }
    }

    fn add(&self, request: Option<CutRequest>) {
        let mut requests = self.requests.lock();
        match request {
            Some(request) if requests.contains(&request) => {}
            Some(request) if requests.len() < REQUESTS_MAX => requests.push(request),
            _ => self.has_others.store(true, Relaxed),
        }
    }

    /// True if several requests were cut.
    pub fn is_shared(&self) -> bool {
        let others = usize::from(self.has_others.load(Relaxed));
        self.requests.lock().len() + others > 1
    }

    /// The bodies that were cut, each once, as far as they are remembered.
    pub fn bodies(&self) -> SmallVec<[u64; 2]> {
        let requests = self.requests.lock();
        let mut bodies: SmallVec<[u64; 2]> = requests.iter().map(|request| request.body).collect();
        bodies.sort_unstable();
        bodies.dedup();
        bodies
    }
}

#[derive(Debug, Default)]
pub struct ProcessEnds(Mutex<Option<Arc<ProcessEnd>>>);

impl ProcessEnds {
    /// A connection broke after a request had been sent at `sent`: `request`, if it had no answer yet.
    pub fn on_cut(
        &self,
        now: Instant,
        sent: Instant,
        request: Option<CutRequest>,
    ) -> Arc<ProcessEnd> {
        let mut last = self.0.lock();
        let same = last.as_ref().filter(|end| {
            let is_of_the_moment = now.saturating_duration_since(end.at) < MOMENT;
            // What is sent to a process that has ended is cut, too, by what stands before it. A request that was cut
            // alone, and is sent again, is cut again.
            is_of_the_moment && (sent <= end.at || end.is_shared())
        });
        let end = match same {
            Some(end) => end.clone(),
            None => Arc::new(ProcessEnd::new(now)),
        };
        end.add(request);
        *last = Some(end.clone());
        end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe;

    fn of_one_client(body: u64) -> CutRequest {
        CutRequest {
            body,
            client: ClientKey(1),
        }
    }

    /// Requests, each with the milliseconds when it was sent and cut, and its body. Returns which end each saw, and whether
    /// that is shared.
    fn check(cuts: &[(u64, u64, Option<u64>)], expected: &[(usize, bool)]) {
        let (ends, start) = (ProcessEnds::default(), observe::now());
        let at = |ms| start + Duration::from_millis(ms);
        let seen = cuts.iter();
        let seen: Vec<_> = seen
            .map(|(sent, cut, body)| ends.on_cut(at(*cut), at(*sent), body.map(of_one_client)))
            .collect();
        let mut distinct: Vec<&Arc<ProcessEnd>> = Vec::new();
        let numbers = seen.iter().map(|end| {
            let known = distinct.iter().position(|other| Arc::ptr_eq(other, end));
            let number = known.unwrap_or_else(|| {
                distinct.push(end);
                distinct.len() - 1
            });
            (number, end.is_shared())
        });
        assert_eq!(numbers.collect::<Vec<_>>(), expected, "{cuts:?}");
    }

    #[test]
    fn what_was_in_flight_and_is_cut_in_the_same_moment_saw_one_end() {
        let (a, b) = (Some(1), Some(2));
        check(&[(0, 5, a)], &[(0, false)]);
        check(&[(0, 5, a), (1, 6, b)], &[(0, true), (0, true)]);
        // An answer that had begun, in either order.
        check(&[(0, 5, a), (1, 6, None)], &[(0, true), (0, true)]);
        check(&[(0, 5, None), (1, 6, a)], &[(0, true), (0, true)]);
        // Seconds later.
        check(&[(0, 5, a), (1, 5_000, b)], &[(0, false), (1, false)]);
    }

    #[test]
    fn one_body_is_no_company_for_itself() {
        let a = Some(1);
        check(&[(0, 5, a), (0, 5, a), (1, 6, a)], &[(0, false); 3]);
        // Sent again after it was cut, it is cut again.
        check(&[(0, 5, a), (6, 7, a)], &[(0, false), (1, false)]);
    }

    #[test]
    fn the_same_body_of_another_client_is_another_request() {
        let (ends, now) = (ProcessEnds::default(), observe::now());
        let of = |client| CutRequest {
            body: 1,
            client: ClientKey(client),
        };
        let end = ends.on_cut(now, now, Some(of(1)));
        ends.on_cut(now, now, Some(of(1)));
        assert!(!end.is_shared());
        ends.on_cut(now, now, Some(of(2)));
        assert!(end.is_shared());
        assert_eq!(end.bodies().len(), 1);
    }

    #[test]
    fn what_is_sent_to_a_process_that_has_ended_saw_the_same_end() {
        let [a, b, c] = [1, 2, 3].map(Some);
        check(&[(0, 5, a), (0, 5, b), (9, 10, c)], &[(0, true); 3]);
        check(&[(0, 5, a), (0, 5, b), (9, 10, a)], &[(0, true); 3]);
        // One after the other, each alone: nothing shows that they saw the same.
        check(&[(0, 5, a), (9, 10, b)], &[(0, false), (1, false)]);
    }

    #[test]
    fn it_remembers_no_more_bodies_than_its_bound() {
        let (ends, now) = (ProcessEnds::default(), observe::now());
        for body in 0..10 * REQUESTS_MAX as u64 {
            let end = ends.on_cut(now, now, Some(of_one_client(body)));
            assert!(end.bodies().len() <= REQUESTS_MAX);
        }
    }
}
