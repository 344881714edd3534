//! The circuit breakers of Redis: one for a server, and for a cluster one for each range of slots, so that a node that is
//! down refuses only what lies on it.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::{Duration, Instant};

use prometheus::IntGauge;

use super::breaker::RedisBreaker;
use super::request::Request;
use super::settings;
use crate::http::circuit_breaker::State;

const SLOTS: usize = 16_384;
/// Ranges of slots with a breaker each. Nodes have thousands of slots in a row, so few ranges lie on two nodes.
const RANGES: usize = 64;

#[derive(Debug)]
pub(super) struct Breakers {
    breakers: Vec<RedisBreaker>,
    /// The breakers of a cluster's probes; none for a server.
    probes: Vec<usize>,
    /// True from when no probe is answered until any node of the cluster replies. The other ranges say little: nothing
    /// is admitted meanwhile that could open their breakers.
    is_down: AtomicBool,
    /// How often ranges were asked.
    turns: AtomicUsize,
    /// The worst state.
    state_gauge: IntGauge,
}

impl Breakers {
    /// `probes`: the keys of which a cluster is asked whether any of its nodes replies; none for a server.
    pub(super) fn new(
        settings: &settings::CircuitBreaker,
        probes: &[String],
        state_gauge: IntGauge,
    ) -> Self {
        let count = if probes.is_empty() { 1 } else { RANGES };
        Self {
            breakers: (0..count).map(|_| RedisBreaker::new(settings)).collect(),
            probes: probes.iter().map(|key| range(key.as_bytes())).collect(),
            is_down: AtomicBool::new(false),
            turns: AtomicUsize::new(0),
            state_gauge,
        }
    }

    fn of(&self, request: &Request) -> &RedisBreaker {
        match &*self.breakers {
            [only] => only,
            breakers => &breakers[range(request.first_key())],
        }
    }

    /// Whether nodes have breakers of their own, as those of a cluster.
    pub(super) fn is_of_cluster(&self) -> bool {
        !self.probes.is_empty()
    }

    pub(super) fn is_healthy(&self) -> bool {
        self.breakers.iter().all(RedisBreaker::is_healthy)
    }

    /// Open if all are, or no node of a cluster replies.
    pub(super) fn state(&self) -> State {
        if self.is_down.load(Relaxed) {
            return State::Open;
        }
        let states = self.breakers.iter().map(RedisBreaker::state);
        states
            .min_by_key(|state| state.number())
            .unwrap_or(State::Closed)
    }

    /// The ranges whose nodes are asked next whether they reply: all in which something has failed since the last
    /// reply, and one more by turns, whose node may be down without a request that shows it.
    pub(super) fn next_ranges(&self) -> Vec<usize> {
        let count = self.breakers.len();
        let turn = self.turns.fetch_add(1, Relaxed) % count;
        let is_asked = |range: &usize| *range == turn || !self.breakers[*range].is_healthy();
        (0..count).filter(is_asked).collect()
    }

    /// Whether an operation may be sent; if not, when to retry.
    pub(super) fn admit(&self, request: &Request, now: Instant) -> Result<(), Duration> {
        self.of(request).admit(now)
    }

    /// Returns true if this closed its breaker.
    pub(super) fn on_success(&self, request: &Request) -> bool {
        // Read first, so that nothing is written in the normal case.
        if self.is_down.load(Relaxed) {
            self.is_down.store(false, Relaxed);
        }
        let has_closed = self.of(request).on_success();
        if has_closed {
            self.publish();
        }
        has_closed
    }

    /// As [`RedisBreaker::on_failure`].
    pub(super) fn on_failure(
        &self,
        request: &Request,
        waiting: usize,
        now: Instant,
    ) -> Option<State> {
        let opened_from = self.of(request).on_failure(waiting, now);
        if opened_from.is_some() {
            let is_refused = |index: &usize| self.breakers[*index].state() != State::Closed;
            if !self.probes.is_empty() && self.probes.iter().all(is_refused) {
                self.is_down.store(true, Relaxed);
            }
            self.publish();
        }
        opened_from
    }

    fn publish(&self) {
        let states = self.breakers.iter().map(|breaker| breaker.state().number());
        self.state_gauge.set(states.max().unwrap_or(0).into());
    }
}

/// A key of each range, in their order, of those that `numbered` makes of numbers. The first 344 are enough.
pub(super) fn key_of_each_range(numbered: impl Fn(usize) -> String) -> Vec<String> {
    let mut keys = BTreeMap::new();
    let mut numbers = 0..SLOTS;
    while keys.len() < RANGES
        && let Some(number) = numbers.next()
    {
        let key = numbered(number);
        keys.entry(range(key.as_bytes())).or_insert(key);
    }
    keys.into_values().collect()
}

fn range(key: &[u8]) -> usize {
    slot(key) * RANGES / SLOTS
}

/// The slot of a key, by the part in braces if there is one.
pub(super) fn slot(key: &[u8]) -> usize {
    let tag = memchr::memchr(b'{', key).and_then(|open| {
        let rest = &key[open + 1..];
        let close = memchr::memchr(b'}', rest)?;
        (close > 0).then(|| &rest[..close])
    });
    usize::from(crc16(tag.unwrap_or(key))) % SLOTS
}

/// CRC-16/XMODEM, as the Redis cluster specification has it.
fn crc16(bytes: &[u8]) -> u16 {
    const POLYNOMIAL: u16 = 0x1021;
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(crc ^ (u16::from(*byte) << 8), |crc, _| match crc & 0x8000 {
            0 => crc << 1,
            _ => (crc << 1) ^ POLYNOMIAL,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe;
    use crate::store::redis::keys::Keys;

    #[test]
    fn slots_are_those_of_redis() {
        // As `CLUSTER KEYSLOT` replies.
        for (key, expected) in [
            ("foo", 12_182),
            ("bar", 5_061),
            ("x{foo}y", 12_182),
            ("123456789", 12_739),
        ] {
            assert_eq!(slot(key.as_bytes()), expected, "{key}");
        }
    }

    #[test]
    fn each_probe_of_a_cluster_lies_in_another_quarter_of_its_slots() {
        let probes = Keys::new("wr:").probes();
        let quarters = probes.map(|key| slot(key.as_bytes()) * 4 / SLOTS);
        assert_eq!(quarters, [3, 2, 1, 0]);
    }

    #[test]
    fn each_range_of_a_cluster_has_a_key_of_its_own() {
        for prefix in ["wr:", ""] {
            let keys = Keys::new(prefix);
            let of_ranges = key_of_each_range(|number| keys.probe(number));
            let ranges = of_ranges.iter().map(|key| range(key.as_bytes()));
            assert!(ranges.eq(0..RANGES), "{prefix}: {of_ranges:?}");
        }
    }

    #[test]
    fn ranges_are_asked_by_turns_and_those_that_failed_each_time() {
        let now = observe::now();
        let settings = settings::CircuitBreaker {
            failure_threshold: 1,
            open_duration: Duration::from_secs(1),
        };
        let gauge = IntGauge::new("state", "of the test").unwrap();
        let keys = Keys::new("wr:");
        let breakers = Breakers::new(&settings, &keys.probes(), gauge);
        for turn in (0..RANGES).chain([0, 1]) {
            assert_eq!(breakers.next_ranges(), [turn]);
        }
        let of_ranges = key_of_each_range(|number| keys.probe(number));
        let of = |range: usize| Request::command("GET", &*of_ranges[range]);
        for failed in [1, 9] {
            breakers.on_failure(&of(failed), 1, now);
        }
        assert_eq!(breakers.next_ranges(), [1, 2, 9]);
        assert_eq!(breakers.next_ranges(), [1, 3, 9]);
        breakers.on_success(&of(1));
        assert_eq!(breakers.next_ranges(), [4, 9]);
        breakers.on_success(&of(9));
        assert_eq!(breakers.next_ranges(), [5]);
    }

    #[test]
    fn a_node_that_is_down_refuses_only_its_keys() {
        let now = observe::now();
        let settings = settings::CircuitBreaker {
            failure_threshold: 1,
            open_duration: Duration::from_secs(1),
        };
        let gauge = IntGauge::new("state", "of the test").unwrap();
        let probes = Keys::new("wr:").probes();
        let breakers = Breakers::new(&settings, &probes, gauge.clone());
        let get = |key: &str| Request::command("GET", key);
        let (down, up) = (get("foo"), get("bar"));
        assert_eq!(breakers.on_failure(&down, 1, now), Some(State::Closed));
        assert!(breakers.admit(&down, now).is_err() && breakers.admit(&up, now).is_ok());
        assert_eq!((breakers.state(), gauge.get()), (State::Closed, 2));
        assert!(!breakers.on_success(&up) && breakers.on_success(&down));
        assert_eq!((breakers.admit(&down, now), gauge.get()), (Ok(()), 0));
    }

    #[test]
    fn a_cluster_is_down_when_no_probe_is_answered_until_any_node_replies() {
        let now = observe::now();
        let settings = settings::CircuitBreaker {
            failure_threshold: 1,
            open_duration: Duration::from_secs(1),
        };
        let gauge = IntGauge::new("state", "of the test").unwrap();
        let probes = Keys::new("wr:").probes();
        let breakers = Breakers::new(&settings, &probes, gauge);
        let probes = probes.map(|key| Request::command("ZADD", key));
        for reply in [&probes[0], &Request::command("GET", "foo")] {
            for probe in &probes {
                assert_eq!(breakers.state(), State::Closed);
                breakers.on_failure(probe, 1, now);
            }
            assert_eq!(breakers.state(), State::Open);
            breakers.on_success(reply);
            assert_eq!(breakers.state(), State::Closed);
            for probe in &probes {
                breakers.on_success(probe);
            }
        }
    }
}
