//! The circuit breakers of Redis: one for a server, and for a cluster one for each range of slots, so that a node that is
//! down refuses only what lies on it.

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
    /// The worst state.
    state_gauge: IntGauge,
}

impl Breakers {
    pub(super) fn new(
        settings: &settings::CircuitBreaker,
        is_cluster: bool,
        state_gauge: IntGauge,
    ) -> Self {
        let count = if is_cluster { RANGES } else { 1 };
        Self {
            breakers: (0..count).map(|_| RedisBreaker::new(settings)).collect(),
            state_gauge,
        }
    }

    fn of(&self, request: &Request) -> &RedisBreaker {
        let index = match self.breakers.len() {
            1 => 0,
            count => slot(request.first_key()) * count / SLOTS,
        };
        &self.breakers[index]
    }

    pub(super) fn is_healthy(&self) -> bool {
        self.breakers.iter().all(RedisBreaker::is_healthy)
    }

    /// Open if all are.
    pub(super) fn state(&self) -> State {
        let states = self.breakers.iter().map(RedisBreaker::state);
        states
            .min_by_key(|state| state.number())
            .unwrap_or(State::Closed)
    }

    /// Whether an operation may be sent; if not, when to retry.
    pub(super) fn admit(&self, request: &Request, now: Instant) -> Result<(), Duration> {
        self.of(request).admit(now)
    }

    /// Returns true if this closed its breaker.
    pub(super) fn on_success(&self, request: &Request) -> bool {
        let has_closed = self.of(request).on_success();
        if has_closed {
            self.publish();
        }
        has_closed
    }

    /// As [`RedisBreaker::on_failure`].
    pub(super) fn on_failure(&self, request: &Request, now: Instant) -> Option<State> {
        let opened_from = self.of(request).on_failure(now);
        if opened_from.is_some() {
            self.publish();
        }
        opened_from
    }

    fn publish(&self) {
        let states = self.breakers.iter().map(|breaker| breaker.state().number());
        self.state_gauge.set(states.max().unwrap_or(0).into());
    }
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
    fn a_node_that_is_down_refuses_only_its_keys() {
        let now = observe::now();
        let settings = settings::CircuitBreaker {
            failure_threshold: 1,
            open_duration: Duration::from_secs(1),
        };
        let gauge = IntGauge::new("state", "of the test").unwrap();
        let breakers = Breakers::new(&settings, true, gauge.clone());
        let get = |key: &str| Request::command("GET", key);
        let (down, up) = (get("foo"), get("bar"));
        assert_eq!(breakers.on_failure(&down, now), Some(State::Closed));
        assert!(breakers.admit(&down, now).is_err() && breakers.admit(&up, now).is_ok());
        assert_eq!((breakers.state(), gauge.get()), (State::Closed, 2));
        assert!(!breakers.on_success(&up) && breakers.on_success(&down));
        assert_eq!((breakers.admit(&down, now), gauge.get()), (Ok(()), 0));
    }
}
