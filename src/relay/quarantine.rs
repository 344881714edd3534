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

use super::settings::Retries;
use crate::observe::metrics;

/// A request is not sent any more once this many connections were cut after it had been sent over them.
pub(super) const CUTS_MAX: u32 = 2;

/// A request's body, by length and hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Fingerprint {
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
    cuts: FxHashMap<Fingerprint, u32>,
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

    /// How many connections this request's body has cost.
    fn cuts(&mut self, now: Instant, fingerprint: Fingerprint) -> u32 {
        self.forget_old(now);
        self.cuts.get(&fingerprint).copied().unwrap_or(0)
    }

    fn on_cuts(&mut self, now: Instant, fingerprint: Fingerprint, cuts: u32) {
        self.forget_old(now);
        if self.max_requests == 0 || self.duration.is_zero() {
            return;
        }
        if let Some(known) = self.cuts.get_mut(&fingerprint) {
            *known = known.saturating_add(cuts);
            return;
        }
        while self.cuts.len() >= self.max_requests {
            self.forget_oldest();
        }
        self.cuts.insert(fingerprint, cuts);
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

/// The quarantine that concurrent requests share.
#[derive(Debug)]
pub(super) struct SharedQuarantine {
    /// A bit for each remembered body, by its length modulo 64. Other bodies are not hashed.
    filter: AtomicU64,
    quarantine: Mutex<Quarantine>,
    remembered: IntGauge,
    refused: IntCounter,
}

impl SharedQuarantine {
    pub(super) fn new(settings: &Retries, registry: &metrics::Registry) -> Self {
        let quarantine = Quarantine::new(
            settings.quarantine_duration,
            settings.max_quarantined_requests as usize,
        );
        Self {
            filter: AtomicU64::new(0),
            quarantine: Mutex::new(quarantine),
            remembered: registry.gauge(
                "warmroute_quarantined_requests",
                "Request bodies that are remembered because engines cut the connection when they got them.",
            ),
            refused: registry.counter(
                "warmroute_quarantine_refusals_total",
                "Requests refused because engines had cut the connection twice when they got the same body.",
            ),
        }
    }

    /// For requests that are remembered from now on.
    pub(super) fn set_bounds(&self, settings: &Retries) {
        let mut quarantine = self.quarantine.lock();
        quarantine.duration = settings.quarantine_duration;
        quarantine.max_requests = settings.max_quarantined_requests as usize;
        while quarantine.cuts.len() > quarantine.max_requests {
            quarantine.forget_oldest();
        }
        self.publish(&quarantine);
    }

    /// How many connections a request with this body has cost. Counts a request that must not be sent because these
    /// are [`CUTS_MAX`].
    pub(super) fn cuts(&self, now: Instant, body: &[u8]) -> u32 {
        if !self.may_know(body) {
            return 0;
        }
        let mut quarantine = self.quarantine.lock();
        let cuts = quarantine.cuts(now, Fingerprint::of(body));
        self.publish(&quarantine);
        if cuts >= CUTS_MAX {
            self.refused.inc();
        }
        cuts
    }

    /// Connections were cut after the request had been sent over them.
    pub(super) fn on_cuts(&self, now: Instant, body: &[u8], cuts: u32) {
        let fingerprint = Fingerprint::of(body);
        let mut quarantine = self.quarantine.lock();
        quarantine.on_cuts(now, fingerprint, cuts);
        self.publish(&quarantine);
    }

    /// An engine answered.
    pub(super) fn on_answer(&self, body: &[u8]) {
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
        let lengths = quarantine.cuts.keys().map(|it| bit(it.bytes));
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

    use super::*;
    use crate::observe;

    const MINUTE: Duration = Duration::from_secs(60);

    fn of(body: &str) -> Fingerprint {
        Fingerprint::of(body.as_bytes())
    }

    #[test]
    fn cuts_of_one_body_add_up_until_they_are_forgotten() {
        let (mut quarantine, now) = (Quarantine::new(MINUTE, 10), observe::now());
        quarantine.on_cuts(now, of("x"), 1);
        quarantine.on_cuts(now + MINUTE / 2, of("x"), 1);
        assert_eq!(quarantine.cuts(now + MINUTE / 2, of("x")), 2);
        assert_eq!(quarantine.cuts(now + MINUTE / 2, of("y")), 0);
        assert_eq!(quarantine.cuts(now + MINUTE, of("x")), 0);
    }

    #[test]
    fn an_answer_clears_a_body() {
        let (mut quarantine, now) = (Quarantine::new(MINUTE, 10), observe::now());
        quarantine.on_cuts(now, of("x"), 1);
        quarantine.on_answer(of("x"));
        quarantine.on_cuts(now + MINUTE / 2, of("x"), 1);
        // The expiry of the first cut must not take away the second one.
        assert_eq!(quarantine.cuts(now + MINUTE, of("x")), 1);
    }

    #[test]
    fn a_request_is_refused_after_its_second_cut_and_no_other_is() {
        let registry = metrics::Registry::default();
        let shared = SharedQuarantine::new(&Retries::default(), &registry);
        let now = observe::now();
        assert_eq!(shared.cuts(now, b"x"), 0);
        shared.on_cuts(now, b"x", 1);
        assert_eq!(shared.cuts(now, b"x"), 1);
        shared.on_cuts(now, b"x", 1);
        assert_eq!(shared.cuts(now, b"x"), CUTS_MAX);
        assert_eq!(shared.cuts(now, b"y"), 0);
        assert!(
            registry
                .text()
                .contains("warmroute_quarantine_refusals_total 1")
        );
        let later = now + Retries::default().quarantine_duration;
        assert_eq!(shared.cuts(later, b"x"), 0);
        assert_eq!(shared.filter.load(Relaxed), 0);
    }

    proptest! {
        #[test]
        fn it_never_holds_more_than_its_bound(steps in proptest::collection::vec((0u64..30, 0u8..3), 0..200)) {
            let (mut quarantine, mut now) = (Quarantine::new(MINUTE, 5), observe::now());
            for (number, step) in steps {
                let fingerprint = of(&number.to_string());
                match step {
                    0 => quarantine.on_cuts(now, fingerprint, 1),
                    1 => quarantine.on_answer(fingerprint),
                    _ => now += Duration::from_secs(number),
                }
                prop_assert!(quarantine.cuts.len() <= 5);
                prop_assert_eq!(quarantine.cuts.len(), quarantine.expiries.len());
            }
        }
    }
}
