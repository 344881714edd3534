//! Quarantine: requests that made engines cut the connection are remembered by a hash of their body, so that the
//! retries of a client do not end one engine after the other. The machine is pure; [`SharedQuarantine`] lets requests
//! pass without a lock and without hashing them while nothing is remembered.

use std::collections::VecDeque;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use prometheus::{IntCounter, IntGauge};
use rustc_hash::FxHashMap;
use xxhash_rust::xxh3::xxh3_64;

use super::cuts::Cuts;
use crate::observe::metrics;

/// A request whose body made two engines cut the connection, or the only one twice, and nothing else in the same moment, is
/// refused for this long. An engine needs minutes to start again; SDKs retry within seconds.
const QUARANTINE: Duration = Duration::from_secs(300);
/// Bodies that are remembered, at 100 bytes each; with more the oldest is forgotten. A day brings fewer that end engines.
const MAX_REQUESTS: usize = 1_000;

/// A request's body, by length and hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::relay) struct Fingerprint {
    bytes: u64,
    hash: u64,
}

impl Fingerprint {
    fn of(body: &[u8]) -> Self {
        Self {
            bytes: body.len() as u64,
            hash: xxh3_64(body),
        }
    }
}

/// The requests that are remembered, each for the same time.
#[derive(Debug)]
struct Quarantine {
    duration: Duration,
    max_requests: usize,
    cuts: FxHashMap<Fingerprint, Cuts>,
    /// In the order in which they are forgotten.
    expiries: VecDeque<(Instant, Fingerprint)>,
}

impl Quarantine {
    fn new(duration: Duration, max_requests: usize) -> Self {
        Self {
            duration,
            max_requests,
            cuts: FxHashMap::default(),
            expiries: VecDeque::new(),
        }
    }

    /// What this request's body has cost.
    fn cuts(&mut self, now: Instant, fingerprint: Fingerprint) -> Cuts {
        self.forget_old(now);
        self.cuts.get(&fingerprint).cloned().unwrap_or_default()
    }

    /// `cuts`: those that the request knows of.
    fn on_cuts(&mut self, now: Instant, fingerprint: Fingerprint, cuts: &Cuts) {
        self.forget_old(now);
        if let Some(known) = self.cuts.get_mut(&fingerprint) {
            known.merge(cuts);
            return;
        }
        while self.cuts.len() >= self.max_requests {
            self.forget_oldest();
        }
        self.cuts.insert(fingerprint, cuts.clone());
        self.expiries.push_back((now + self.duration, fingerprint));
    }

    /// An engine answered the request, so it is harmless.
    fn on_answer(&mut self, fingerprint: Fingerprint) {
        if self.cuts.remove(&fingerprint).is_some() {
            self.expiries.retain(|(_, other)| *other != fingerprint);
        }
    }

    fn forget_old(&mut self, now: Instant) {
        while self.expiries.front().is_some_and(|(at, _)| *at <= now) {
            self.forget_oldest();
        }
    }

    fn forget_oldest(&mut self) {
        if let Some((_, fingerprint)) = self.expiries.pop_front() {
            self.cuts.remove(&fingerprint);
        }
    }
}

#[derive(Debug)]
pub(in crate::relay) struct SharedQuarantine {
    /// A bit for each remembered body, by its length modulo 64. Other bodies are not hashed.
    filter: AtomicU64,
    quarantine: Mutex<Quarantine>,
    remembered: IntGauge,
    refused: IntCounter,
}

impl SharedQuarantine {
    pub(in crate::relay) fn new(registry: &metrics::Registry) -> Self {
        Self {
            filter: AtomicU64::new(0),
            quarantine: Mutex::new(Quarantine::new(QUARANTINE, MAX_REQUESTS)),
            remembered: registry.gauge(
                "warmroute_quarantined_requests",
                "Request bodies that are remembered because engines cut the connection when they got them.",
            ),
            refused: registry.counter(
                "warmroute_quarantine_refusals_total",
                "Requests refused because two engines, or twice the only one, had cut the connection when they got the same body, and nothing \
                 else that they had; or five times with others, of which none was cut each time.",
            ),
        }
    }

    /// The connections that requests with this body have cost.
    pub(in crate::relay) fn cuts(&self, now: Instant, body: &[u8]) -> Cuts {
        if !self.may_know(body) {
            return Cuts::default();
        }
        let mut quarantine = self.quarantine.lock();
        let cuts = quarantine.cuts(now, Fingerprint::of(body));
        self.publish(&quarantine);
        cuts
    }

    /// A request is not sent because of what [`SharedQuarantine::cuts`] says of it.
    pub(in crate::relay) fn on_refused(&self) {
        self.refused.inc();
    }

    /// Connections were cut after the request had been sent over them. `cuts` has those that were known before, too.
    pub(in crate::relay) fn on_cuts(&self, now: Instant, body: &[u8], cuts: &Cuts) {
        let fingerprint = Fingerprint::of(body);
        let mut quarantine = self.quarantine.lock();
        quarantine.on_cuts(now, fingerprint, cuts);
        self.publish(&quarantine);
    }

    pub(in crate::relay) fn on_answer(&self, body: &[u8]) {
        if self.may_know(body) {
            let mut quarantine = self.quarantine.lock();
            quarantine.on_answer(Fingerprint::of(body));
            self.publish(&quarantine);
        }
    }

    fn may_know(&self, body: &[u8]) -> bool {
        self.filter.load(Relaxed) & bit(body.len() as u64) != 0
    }

    fn publish(&self, quarantine: &Quarantine) {
        let lengths = quarantine
            .cuts
            .keys()
            .map(|fingerprint| bit(fingerprint.bytes));
        let filter = lengths.fold(0, |bits, bit| bits | bit);
        self.filter.store(filter, Relaxed);
        self.remembered.set(quarantine.cuts.len() as i64);
    }
}

fn bit(bytes: u64) -> u64 {
    1 << (bytes % 64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::cuts::tests::cut;
    use super::*;
    use crate::ids::WorkerId;
    use crate::observe;

    const MINUTE: Duration = Duration::from_secs(60);

    fn of(body: &str) -> Fingerprint {
        Fingerprint::of(body.as_bytes())
    }

    fn cuts(workers: &[u32]) -> Cuts {
        let mut cuts = Cuts::default();
        let workers = workers.iter().map(|number| WorkerId(*number));
        workers.for_each(|worker| cuts.add(&cut(worker, &[0])));
        cuts
    }

    fn check(found: &Cuts, expected: &[u32]) {
        let workers: Vec<WorkerId> = expected.iter().map(|number| WorkerId(*number)).collect();
        assert_eq!(found.workers(), workers);
    }

    #[test]
    fn workers_that_cut_one_body_add_up_until_they_are_forgotten() {
        let (mut quarantine, now) = (Quarantine::new(MINUTE, 10), observe::now());
        quarantine.on_cuts(now, of("x"), &cuts(&[0]));
        quarantine.on_cuts(now + MINUTE / 2, of("x"), &cuts(&[1]));
        check(&quarantine.cuts(now + MINUTE / 2, of("x")), &[0, 1]);
        check(&quarantine.cuts(now + MINUTE / 2, of("y")), &[]);
        check(&quarantine.cuts(now + MINUTE, of("x")), &[]);
    }

    #[test]
    fn clients_that_sent_the_same_to_a_worker_when_it_ended_may_send_it_again() {
        let (mut quarantine, now) = (Quarantine::new(MINUTE, 10), observe::now());
        let same = cuts(&[0]);
        (0..5).for_each(|_| quarantine.on_cuts(now, of("x"), &same));
        check(&quarantine.cuts(now, of("x")), &[0]);
        assert!(!quarantine.cuts(now, of("x")).excludes(WorkerId(0)));
        // One of them does.
        quarantine.on_cuts(now, of("x"), &cuts(&[0]));
        assert!(quarantine.cuts(now, of("x")).excludes(WorkerId(0)));
    }

    #[test]
    fn an_answer_clears_a_body() {
        let (mut quarantine, now) = (Quarantine::new(MINUTE, 10), observe::now());
        quarantine.on_cuts(now, of("x"), &cuts(&[0]));
        quarantine.on_answer(of("x"));
        quarantine.on_cuts(now + MINUTE / 2, of("x"), &cuts(&[1]));
        // The expiry of the first cut must not take away the second one.
        check(&quarantine.cuts(now + MINUTE, of("x")), &[1]);
    }

    #[test]
    fn what_requests_share_is_known_of_one_body_and_no_other_until_it_is_forgotten() {
        let registry = metrics::Registry::default();
        let shared = SharedQuarantine::new(&registry);
        let now = observe::now();
        assert!(shared.cuts(now, b"x").is_empty());
        shared.on_cuts(now, b"x", &cuts(&[0]));
        check(&shared.cuts(now, b"x"), &[0]);
        shared.on_cuts(now, b"x", &cuts(&[1]));
        assert!(shared.cuts(now, b"x").are_of_the_request());
        assert!(shared.cuts(now, b"y").is_empty());
        shared.on_refused();
        assert!(
            registry
                .text()
                .contains("warmroute_quarantine_refusals_total 1")
        );
        assert!(shared.cuts(now + QUARANTINE, b"x").is_empty());
        assert_eq!(shared.filter.load(Relaxed), 0);
    }

    proptest! {
        #[test]
        fn it_never_holds_more_than_its_bound(steps in proptest::collection::vec((0u64..30, 0u8..3), 0..200)) {
            let (mut quarantine, mut now) = (Quarantine::new(MINUTE, 5), observe::now());
            for (number, step) in steps {
                let fingerprint = of(&number.to_string());
                match step {
                    0 => quarantine.on_cuts(now, fingerprint, &cuts(&[step.into(), number as u32])),
                    1 => quarantine.on_answer(fingerprint),
                    _ => now += Duration::from_secs(number),
                }
                prop_assert!(quarantine.cuts.len() <= 5);
                prop_assert_eq!(quarantine.cuts.len(), quarantine.expiries.len());
            }
        }
    }
}
