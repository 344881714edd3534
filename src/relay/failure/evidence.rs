//! Evidence against workers: failures that a request may have caused as well as its worker (a status of 500, a
//! connection that was cut, a time-out). One client's requests alone must not open a circuit breaker and take the
//! worker away from everybody else.
//!
//! Such a failure counts against the worker
//! - if requests of several clients failed at it without a success in between,
//! - if its health check fails, too, or
//! - if the one client's requests fail at this worker [`SHARE_FACTOR`] times as often as at the others, and no
//!   request of another client has just succeeded there that was sent since they began to fail, or
//! - if it is the trial of a half-open circuit breaker, and no request of its client failed before.
//!
//! KV transfers have evidence of their own, which speaks against the circuit breaker of the prefill worker's transfers.
//! Where no other pair is, a client's requests can succeed nowhere else. So they are also compared with how they fare
//! without a transfer: a request that one worker then answers was not to blame. Where other clients' transfers from the
//! worker succeed, it may be, and the comparison shows nothing. An engine that has never returned parameters of a
//! transfer is to blame without evidence.
//!
//! What fails while a circuit breaker is open was sent before, and says nothing new of the worker. Neither does what
//! fails while it is half-open and is not its trial: the breaker would open, and then ignore the trial's success.
//!
//! The machine is pure; [`SharedEvidence`] lets requests pass without a lock while nothing fails.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::http::circuit_breaker::State;
use crate::ids::{ClientKey, WorkerId};

/// How many times as often one client's requests must fail at a worker as elsewhere.
pub(in crate::relay) const SHARE_FACTOR: f64 = 5.0;
/// After a trial request that shows nothing of its worker, since that is busy or the request may be to blame: as often as a
/// health check asks. Otherwise the next request would be the next trial.
pub(in crate::relay) const NEXT_TRIAL_PAUSE: Duration = Duration::from_secs(2);
/// Evidence is forgotten after this time: the requests of a minute describe the state of now.
const WINDOW: Duration = Duration::from_secs(60);
/// For so long after another client's request has succeeded at a worker, the worker is taken to be well.
const WELL_AFTER_SUCCESS: Duration = Duration::from_secs(10);
/// Clients and workers that are remembered; with more, the evidence starts anew. A minute of failures of this many
/// clients speaks against the workers long before.
const ENTRIES_MAX: usize = 4_096;
/// With more entries than this, old ones are looked for only every `LOOK_INTERVAL`, and with more workers and clients that
/// failed all requests take the lock: when a network fails with thousands of requests, each failure would look through what
/// all before have left.
const FEW: usize = 256;
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Failures of one worker since its last success.
#[derive(Debug)]
struct Row {
    since: Instant,
    /// The first client, and whether there was another one.
    client: ClientKey,
    has_several_clients: bool,
    /// Failures that were not counted against the worker yet.
    uncounted: u32,
}

/// One client's requests since its first failure.
#[derive(Debug)]
struct Suspect {
    since: Instant,
    by_worker: SmallVec<[AtWorker; 4]>,
    /// Its requests that were computed as a whole after they had failed.
    whole: Tally,
}

/// One client's requests at one worker.
#[derive(Debug)]
struct AtWorker {
    worker: WorkerId,
    tally: Tally,
    /// When the first of them failed.
    failing_since: Option<Instant>,
}

#[derive(Clone, Copy, Debug)]
struct Success {
    at: Instant,
    sent: Instant,
}

/// The last successes of one worker: those of the requests that were sent last.
#[derive(Clone, Copy, Debug)]
struct Successes {
    last: Success,
    client: ClientKey,
    /// The last one of any other client.
    other: Option<Success>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    failed: u32,
    succeeded: u32,
}

impl Tally {
    /// The expected share of failures (Laplace's rule of succession): a half without any request, so that a client
    /// whose requests ran nowhere else proves nothing.
    fn share(self) -> f64 {
        let failed = f64::from(self.failed);
        (failed + 1.0) / (failed + f64::from(self.succeeded) + 2.0)
    }
}

/// The failures and successes that matter. Times are arguments.
#[derive(Debug, Default)]
pub(in crate::relay) struct Evidence {
    rows: FxHashMap<WorkerId, Row>,
    suspects: FxHashMap<ClientKey, Suspect>,
    /// The last successes of workers at which something has failed.
    successes: FxHashMap<WorkerId, Successes>,
    /// When old entries were last looked for.
    looked_at: Option<Instant>,
}

impl Evidence {
    /// Takes a failure at a worker whose circuit breaker is in this state. `is_trial`: the request is the breaker's
    /// trial. Returns how many failures count against the worker now; 0 if the request is to blame.
    pub(in crate::relay) fn on_failure(
        &mut self,
        now: Instant,
        worker: WorkerId,
        client: ClientKey,
        breaker: State,
        is_unhealthy: bool,
        is_trial: bool,
    ) -> u32 {
        self.forget_old(now);
        let successes = self.successes.get(&worker);
        let of_others = successes.and_then(|successes| successes.of_others(client));
        let has_failed_before = self.suspects.contains_key(&client);
        let suspect = self.suspects.entry(client).or_insert_with(|| Suspect {
            since: now,
            by_worker: SmallVec::new(),
            whole: Tally::default(),
        });
        let here = suspect.at(worker);
        here.tally.failed += 1;
        let failing_since = *here.failing_since.get_or_insert(now);
        let whole = if of_others.is_some() {
            Tally::default()
        } else {
            suspect.whole
        };
        // What is wrong with a worker fails all clients' requests. It may have broken since one that ended long ago, or
        // was sent before.
        let is_well = of_others
            .is_some_and(|success| success.sent > failing_since && success.shows_well(now));
        let stands_out = !is_well && suspect.stands_out(worker, whole);
        let was_sent_before = match breaker {
            State::Closed => false,
            State::HalfOpen => !is_trial,
            State::Open => true,
        };
        if was_sent_before {
            return 0;
        }
        let is_first_trial = breaker == State::HalfOpen && !has_failed_before;
        let row = self.rows.entry(worker).or_insert(Row {
            since: now,
            client,
            has_several_clients: false,
            uncounted: 0,
        });
        row.has_several_clients |= row.client != client;
        row.uncounted += 1;
        if is_unhealthy || row.has_several_clients || stands_out || is_first_trial {
            std::mem::take(&mut row.uncounted)
        } else {
            0
        }
    }

    /// Takes a success of a request that was sent at `sent`: the worker's failures in a row end, and the client's share
    /// of failures sinks.
    pub(in crate::relay) fn on_success(
        &mut self,
        now: Instant,
        worker: WorkerId,
        client: ClientKey,
        sent: Instant,
    ) {
        self.rows.remove(&worker);
        let success = Success { at: now, sent };
        let successes = self.successes.entry(worker).or_insert(Successes {
            last: success,
            client,
            other: None,
        });
        successes.on_success(success, client);
        if let Some(suspect) = self.suspects.get_mut(&client) {
            suspect.at(worker).tally.succeeded += 1;
        }
    }

    /// One worker alone has answered a client's request that had failed at two. If it succeeds now, it was not to blame.
    pub(in crate::relay) fn on_whole(&mut self, client: ClientKey, is_success: bool) {
        if let Some(suspect) = self.suspects.get_mut(&client) {
            let tally = &mut suspect.whole;
            tally.succeeded += u32::from(is_success);
            tally.failed += u32::from(!is_success);
        }
    }

    /// The worker's circuit breaker has opened: what made it open does not count against the worker once more.
    pub(in crate::relay) fn on_opened(&mut self, worker: WorkerId) {
        self.rows.remove(&worker);
    }

    fn entries(&self) -> [usize; 3] {
        [self.rows.len(), self.suspects.len(), self.successes.len()]
    }

    /// Without the successes: while all requests take the lock, each worker of the fleet has some, and it would never end.
    fn has_many_failures(&self) -> bool {
        self.rows.len() + self.suspects.len() > FEW
    }

    fn forget_old(&mut self, now: Instant) {
        let age = |since: Instant| now.saturating_duration_since(since);
        let looked = self.looked_at.filter(|at| age(*at) < LOOK_INTERVAL);
        if looked.is_none() || self.entries().into_iter().sum::<usize>() <= FEW {
            self.looked_at = Some(now);
            let is_recent = |since: Instant| age(since) < WINDOW;
            self.rows.retain(|_, row| is_recent(row.since));
            self.suspects.retain(|_, suspect| is_recent(suspect.since));
            self.successes.retain(|_, successes| {
                successes.other = successes.other.filter(|other| is_recent(other.at));
                is_recent(successes.last.at)
            });
        }
        if self.entries().into_iter().any(|count| count >= ENTRIES_MAX) {
            *self = Self::default();
        }
    }
}

impl Success {
    /// True if the worker is well now for all that it shows.
    fn shows_well(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.at) < WELL_AFTER_SUCCESS
    }

    /// True if this one, which has just come, says more than an `earlier` one: a stream that ends now may have been
    /// sent long ago.
    fn replaces(&self, earlier: &Self) -> bool {
        self.sent >= earlier.sent || !earlier.shows_well(self.at)
    }
}

impl Successes {
    fn on_success(&mut self, success: Success, client: ClientKey) {
        if success.replaces(&self.last) {
            if self.client != client {
                self.other = Some(self.last);
                self.client = client;
            }
            self.last = success;
        } else if self.client != client && self.other.is_none_or(|other| success.replaces(&other)) {
            self.other = Some(success);
        }
    }

    /// The last one of any other client than this one.
    fn of_others(&self, client: ClientKey) -> Option<Success> {
        if self.client == client {
            self.other
        } else {
            Some(self.last)
        }
    }
}

impl Suspect {
    fn at(&mut self, worker: WorkerId) -> &mut AtWorker {
        let found = self.by_worker.iter().position(|at| at.worker == worker);
        let index = found.unwrap_or_else(|| {
            self.by_worker.push(AtWorker {
                worker,
                tally: Tally::default(),
                failing_since: None,
            });
            self.by_worker.len() - 1
        });
        &mut self.by_worker[index]
    }

    /// True if the client's requests fail at this worker much more often than at the others, or than as a `whole`.
    fn stands_out(&self, worker: WorkerId, whole: Tally) -> bool {
        let (mut here, mut elsewhere) = (Tally::default(), Tally::default());
        for at in &self.by_worker {
            let sum = if at.worker == worker {
                &mut here
            } else {
                &mut elsewhere
            };
            sum.failed += at.tally.failed;
            sum.succeeded += at.tally.succeeded;
        }
        let others = elsewhere.share().min(whole.share());
        here.share() >= SHARE_FACTOR * others
    }
}

#[derive(Debug, Default)]
pub(in crate::relay) struct SharedEvidence {
    /// A bit for each worker with failures and each client under suspicion, by their numbers modulo 64, and for each
    /// worker of a client whose requests are compared with how they fare as a whole. Requests whose bits are not set
    /// take no lock.
    filter: AtomicU64,
    evidence: Mutex<Evidence>,
}

impl SharedEvidence {
    /// As [`Evidence::on_failure`].
    pub(in crate::relay) fn on_failure(
        &self,
        now: Instant,
        worker: WorkerId,
        client: ClientKey,
        breaker: State,
        is_unhealthy: bool,
        is_trial: bool,
    ) -> u32 {
        let mut evidence = self.evidence.lock();
        let failures = evidence.on_failure(now, worker, client, breaker, is_unhealthy, is_trial);
        if evidence.has_many_failures() {
            self.filter.store(u64::MAX, Relaxed);
            return failures;
        }
        let workers = evidence.rows.keys().map(|worker| bit(u64::from(worker.0)));
        let clients = evidence.suspects.keys().map(|client| bit(client.0));
        let suspects = evidence.suspects.values();
        let compared = suspects.filter(|suspect| suspect.whole.succeeded > 0);
        let compared = compared.flat_map(|suspect| &suspect.by_worker);
        let compared = compared.map(|at| bit(u64::from(at.worker.0)));
        let bits = workers.chain(clients).chain(compared);
        let filter = bits.fold(0, |bits, bit| bits | bit);
        self.filter.store(filter, Relaxed);
        failures
    }

    pub(in crate::relay) fn on_opened(&self, worker: WorkerId) {
        self.evidence.lock().on_opened(worker);
    }

    /// As [`Evidence::on_whole`].
    pub(in crate::relay) fn on_whole(&self, client: ClientKey, is_success: bool) {
        self.evidence.lock().on_whole(client, is_success);
    }

    /// As [`Evidence::on_success`].
    pub(in crate::relay) fn on_success(
        &self,
        now: Instant,
        worker: WorkerId,
        client: ClientKey,
        sent: Instant,
    ) {
        let filter = self.filter.load(Relaxed);
        if filter & (bit(u64::from(worker.0)) | bit(client.0)) != 0 {
            self.evidence.lock().on_success(now, worker, client, sent);
        }
    }
}

fn bit(number: u64) -> u64 {
    1 << (number % 64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::observe;

    const A: WorkerId = WorkerId(0);
    const B: WorkerId = WorkerId(1);
    const GUILTY: ClientKey = ClientKey(1);
    const OTHER: ClientKey = ClientKey(2);

    impl Evidence {
        /// A failure of a healthy worker whose circuit breaker is closed.
        fn fails(&mut self, now: Instant, worker: WorkerId, client: ClientKey) -> u32 {
            self.on_failure(now, worker, client, State::Closed, false, false)
        }

        /// A success of a request that was sent and answered now.
        fn succeeds(&mut self, now: Instant, worker: WorkerId, client: ClientKey) {
            self.on_success(now, worker, client, now);
        }
    }

    #[test]
    fn one_clients_failures_count_against_no_worker() {
        let (mut evidence, now) = (Evidence::default(), observe::now());
        for worker in [A, B, WorkerId(2), WorkerId(3)]
            .into_iter()
            .cycle()
            .take(40)
        {
            assert_eq!(evidence.fails(now, worker, GUILTY), 0);
        }
    }

    #[test]
    fn not_each_of_many_failures_looks_through_all_before() {
        let (mut evidence, now) = (Evidence::default(), observe::now());
        let clients = || (0..300).map(ClientKey);
        for client in clients() {
            evidence.fails(now, A, client);
        }
        assert_eq!(evidence.suspects.len(), 300);
        evidence.fails(now + LOOK_INTERVAL / 2, A, GUILTY);
        assert_eq!(evidence.looked_at, Some(now));
        let later = now + WINDOW;
        assert_eq!(evidence.fails(later, B, GUILTY), 0);
        assert_eq!((evidence.suspects.len(), evidence.rows.len()), (1, 1));
        let shared = SharedEvidence::default();
        for client in clients() {
            shared.on_failure(now, A, client, State::Closed, false, false);
        }
        assert_eq!(shared.filter.load(Relaxed), u64::MAX);
    }

    #[test]
    fn one_client_that_fails_among_many_workers_makes_others_take_no_lock() {
        let (shared, now) = (SharedEvidence::default(), observe::now());
        let fails = || shared.on_failure(now, A, GUILTY, State::Closed, false, false);
        fails();
        let filter = shared.filter.load(Relaxed);
        for worker in (0..300).map(WorkerId) {
            shared.on_success(now, worker, GUILTY, now);
        }
        assert_eq!(shared.evidence.lock().successes.len(), 300);
        fails();
        assert_eq!(shared.filter.load(Relaxed), filter);
    }

    #[test]
    fn a_second_clients_failure_makes_all_in_the_row_count() {
        let (mut evidence, now) = (Evidence::default(), observe::now());
        assert_eq!(evidence.fails(now, A, GUILTY), 0);
        assert_eq!(evidence.fails(now, A, GUILTY), 0);
        assert_eq!(evidence.fails(now, A, OTHER), 3);
        assert_eq!(evidence.fails(now, A, GUILTY), 1);
    }

    #[test]
    fn a_success_between_two_clients_failures_ends_the_row() {
        let (mut evidence, now) = (Evidence::default(), observe::now());
        assert_eq!(evidence.fails(now, A, GUILTY), 0);
        evidence.succeeds(now, A, OTHER);
        assert_eq!(evidence.fails(now, A, OTHER), 0);
    }

    #[test]
    fn failures_of_a_worker_whose_health_check_fails_count() {
        let (mut evidence, now) = (Evidence::default(), observe::now());
        assert_eq!(evidence.fails(now, A, GUILTY), 0);
        assert_eq!(
            evidence.on_failure(now, A, GUILTY, State::Closed, true, false),
            2
        );
    }

    #[test]
    fn one_clients_failures_count_if_its_requests_succeed_elsewhere() {
        let (mut evidence, now) = (Evidence::default(), observe::now());
        for _ in 0..2 {
            assert_eq!(evidence.fails(now, A, GUILTY), 0);
            (0..3).for_each(|_| evidence.succeeds(now, B, GUILTY));
        }
        assert_eq!(evidence.fails(now, A, GUILTY), 3);
        // B fails as often as A does: the request is to blame.
        (0..9).for_each(|_| assert_eq!(evidence.fails(now, B, GUILTY), 0));
        assert_eq!(evidence.fails(now, A, GUILTY), 0);
    }

    /// Its other requests, with other prefixes, succeed elsewhere.
    #[test]
    fn one_clients_failures_count_against_no_worker_that_answers_others_meanwhile() {
        let well = WELL_AFTER_SUCCESS.as_millis() as u64;
        // When another client's request was sent, when it ended, and when the one client's fail that failed first at 1.
        for (sent, ended, fails, is_counted) in [
            // The worker may have broken since.
            (0, 0, 4, true),
            (0, 2, 4, true),
            (1, 2, 4, true),
            (2, 2, 4, false),
            (2, well, well + 4, false),
            (2, 2, well + 1, false),
            (2, 2, well + 2, true),
        ] {
            let (mut evidence, now) = (Evidence::default(), observe::now());
            let at = |ms| now + Duration::from_millis(ms);
            let other = |evidence: &mut Evidence| {
                evidence.on_success(at(ended), A, OTHER, at(sent));
            };
            if ended == 0 {
                other(&mut evidence);
            }
            assert_eq!(evidence.fails(at(1), A, GUILTY), 0);
            if ended > 0 {
                other(&mut evidence);
            }
            (0..9).for_each(|_| evidence.succeeds(at(3), B, GUILTY));
            let failures = (0..9).map(|_| evidence.fails(at(fails), A, GUILTY));
            let counted: u32 = failures.sum();
            assert_eq!(counted > 0, is_counted, "{sent} {ended} {fails}");
            // The other one's request fails there, too.
            assert!(evidence.fails(at(fails + 1), A, OTHER) > 0);
        }
    }

    #[test]
    fn the_end_of_a_request_that_was_sent_long_ago_hides_no_later_ones() {
        let (mut evidence, now) = (Evidence::default(), observe::now());
        let at = |ms| now + Duration::from_millis(ms);
        assert_eq!(evidence.fails(at(1), A, GUILTY), 0);
        evidence.on_success(at(3), A, OTHER, at(2));
        for client in [OTHER, ClientKey(3)] {
            evidence.on_success(at(4), A, client, at(0));
        }
        (0..9).for_each(|_| evidence.succeeds(at(5), B, GUILTY));
        (0..9).for_each(|_| assert_eq!(evidence.fails(at(6), A, GUILTY), 0));
    }

    #[test]
    fn one_clients_failures_count_if_one_worker_alone_answers_its_requests() {
        let (mut evidence, now) = (Evidence::default(), observe::now());
        // Both fail each of its requests, so that neither differs from the other.
        for _ in 0..4 {
            assert_eq!(evidence.fails(now, A, GUILTY), 0);
            assert_eq!(evidence.fails(now, B, GUILTY), 0);
            evidence.on_whole(GUILTY, true);
        }
        assert_eq!(evidence.fails(now, A, GUILTY), 5);
        assert_eq!(evidence.fails(now, B, GUILTY), 5);
    }

    #[test]
    fn one_client_takes_no_worker_from_others_whose_transfers_succeed() {
        let (shared, now) = (SharedEvidence::default(), observe::now());
        let fails = |at, worker| shared.on_failure(at, worker, GUILTY, State::Closed, false, false);
        for _ in 0..9 {
            for worker in [A, B] {
                assert_eq!(fails(now, worker), 0);
                shared.on_whole(GUILTY, true);
            }
            shared.on_success(now, A, OTHER, now);
            shared.on_success(now, B, OTHER, now);
        }
        // Its own success does not hide that of the other one.
        shared.on_success(now, A, GUILTY, now);
        (0..9).for_each(|_| assert_eq!(fails(now, A), 0));
        // The others' successes are forgotten as well.
        let later = now + WINDOW;
        let counted = (0..9).map(|_| {
            let counted = fails(later, A);
            shared.on_whole(GUILTY, true);
            counted
        });
        assert!(counted.sum::<u32>() > 0);
    }

    #[test]
    fn what_fails_as_a_whole_too_counts_against_no_worker() {
        let (mut evidence, now) = (Evidence::default(), observe::now());
        for _ in 0..40 {
            assert_eq!(evidence.fails(now, A, GUILTY), 0);
            evidence.on_whole(GUILTY, false);
        }
        // Another client's answers say nothing of this one's.
        (0..40).for_each(|_| evidence.on_whole(OTHER, true));
        assert_eq!(evidence.fails(now, A, GUILTY), 0);
    }

    #[test]
    fn a_trial_counts_if_its_client_never_failed_and_not_if_it_fails_everywhere() {
        let (mut evidence, now) = (Evidence::default(), observe::now());
        let trial = |evidence: &mut Evidence, client| {
            evidence.on_failure(now, A, client, State::HalfOpen, false, true)
        };
        assert_eq!(trial(&mut evidence, GUILTY), 1);
        evidence.on_opened(A);
        (0..9).for_each(|_| assert_eq!(trial(&mut evidence, GUILTY), 0));
        // A second client speaks against the worker.
        assert!(trial(&mut evidence, OTHER) > 0);
    }

    #[test]
    fn nothing_but_its_trial_counts_against_a_half_open_breaker() {
        for (is_unhealthy, is_trial, expected) in [
            (false, false, 0),
            (true, false, 0),
            (false, true, 1),
            (true, true, 1),
        ] {
            let (mut evidence, now) = (Evidence::default(), observe::now());
            for client in [GUILTY, OTHER] {
                let breaker = State::HalfOpen;
                let counted = evidence.on_failure(now, A, client, breaker, is_unhealthy, is_trial);
                let case = (client, is_unhealthy, is_trial);
                assert_eq!(counted, expected, "{case:?}");
                evidence.on_opened(A);
            }
        }
    }

    #[test]
    fn what_fails_while_the_breaker_is_open_makes_no_trial_count() {
        let (mut evidence, now) = (Evidence::default(), observe::now());
        for client in [GUILTY, OTHER, ClientKey(3)] {
            let counted = evidence.on_failure(now, A, client, State::Open, false, false);
            assert_eq!(counted, 0);
        }
        assert_eq!(
            evidence.on_failure(now, A, GUILTY, State::HalfOpen, false, true),
            0
        );
    }

    #[test]
    fn evidence_is_forgotten_after_a_minute() {
        let (mut evidence, now) = (Evidence::default(), observe::now());
        assert_eq!(evidence.fails(now, A, GUILTY), 0);
        let later = now + WINDOW;
        assert_eq!(evidence.fails(later, A, OTHER), 0);
        assert_eq!((evidence.rows.len(), evidence.suspects.len()), (1, 1));
    }

    #[test]
    fn requests_of_others_take_no_lock() {
        let shared = SharedEvidence::default();
        let now = observe::now();
        shared.on_failure(now, A, GUILTY, State::Closed, false, false);
        let _held = shared.evidence.lock();
        // It would wait for ever.
        shared.on_success(now, WorkerId(5), ClientKey(6), now);
    }

    proptest! {
        /// Whatever one client does among others whose requests all succeed, and however its own requests are spread:
        /// if they fail alike everywhere, no worker is blamed.
        #[test]
        fn a_client_that_fails_everywhere_blames_nobody(
            steps in proptest::collection::vec((0u32..6, any::<bool>()), 0..200),
        ) {
            let (mut evidence, now) = (Evidence::default(), observe::now());
            for (worker, is_guilty) in steps {
                let worker = WorkerId(worker);
                if is_guilty {
                    prop_assert_eq!(evidence.fails(now, worker, GUILTY), 0);
                } else {
                    evidence.succeeds(now, worker, OTHER);
                }
            }
        }
    }
}
