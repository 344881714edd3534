//! The other replicas that are connected, each by one stream: which of two streams stays, and who has been silent for too
//! long. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::gauges::Condition;
use super::handshake::{InstanceId, PeerIdentity, Side, is_preferred};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(u64);

#[derive(Clone, Debug)]
pub struct Peer {
    pub identity: PeerIdentity,
    /// `HOST:PORT` where it accepts streams, as far as is known.
    pub address: Option<Arc<str>>,
    pub stream: StreamId,
    pub side: Side,
    pub received_at: Instant,
    pub condition: Condition,
}

/// How a connected replica is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freshness {
    Connected,
    /// Silent for a while; what it reported last still counts.
    Stale,
}

/// What becomes of a new stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    First(StreamId),
    /// The replica's former stream ends.
    Replaces {
        stream: StreamId,
        former: StreamId,
    },
    /// The replica is connected by another stream, which stays.
    Duplicate,
    /// As many replicas are connected as may be.
    Full,
}

#[derive(Debug)]
pub struct Roster {
    own: InstanceId,
    stale_after: Duration,
    dead_after: Duration,
    max_peers: usize,
    peers: BTreeMap<InstanceId, Peer>,
    streams: u64,
}

impl Roster {
    pub fn new(
        own: InstanceId,
        stale_after: Duration,
        dead_after: Duration,
        max_peers: usize,
    ) -> Self {
        Self {
            own,
            stale_after,
            dead_after,
            max_peers,
            peers: BTreeMap::new(),
            streams: 0,
        }
    }

    /// A stream whose other side has proved who it is.
    pub fn admit(
        &mut self,
        now: Instant,
        identity: &PeerIdentity,
        side: Side,
        address: Option<Arc<str>>,
    ) -> Admission {
        let former = self.peers.get(&identity.id);
        let stays = former.is_some_and(|former| {
            let is_worse = is_preferred(self.own, identity.id, former.side)
                && !is_preferred(self.own, identity.id, side);
            // One that fell silent may be gone without this side knowing.
            is_worse && self.freshness(now, former) == Freshness::Connected
        });
        if stays {
            return Admission::Duplicate;
        }
        if former.is_none() && self.peers.len() >= self.max_peers {
            return Admission::Full;
        }
        let stream = StreamId(self.streams);
        self.streams += 1;
        let peer = Peer {
            identity: identity.clone(),
            address: address.or_else(|| former?.address.clone()),
            stream,
            side,
            received_at: now,
            condition: former.map_or_else(Condition::default, |former| former.condition),
        };
        match self.peers.insert(identity.id, peer) {
            None => Admission::First(stream),
            Some(former) => Admission::Replaces {
                stream,
                former: former.stream,
            },
        }
    }

    /// A message has arrived. False if its stream is not the replica's any more.
    pub fn on_message(&mut self, now: Instant, peer: InstanceId, stream: StreamId) -> bool {
        match self.peers.get_mut(&peer) {
            Some(peer) if peer.stream == stream => {
                peer.received_at = now;
                true
            }
            _ => false,
        }
    }

    pub fn set_condition(&mut self, peer: InstanceId, condition: Condition) {
        if let Some(peer) = self.peers.get_mut(&peer) {
            peer.condition = condition;
        }
    }

    /// A stream has ended. Returns the replica if it is not connected any more.
    pub fn on_end(&mut self, peer: InstanceId, stream: StreamId) -> Option<Peer> {
        match self.peers.get(&peer) {
            Some(current) if current.stream == stream => self.peers.remove(&peer),
            _ => None,
        }
    }

    /// The streams of replicas that have been silent for too long: they are to be ended.
    pub fn dead(&self, now: Instant) -> Vec<StreamId> {
        let silent = |peer: &&Peer| now.saturating_duration_since(peer.received_at);
        let peers = self.peers.values();
        let dead = peers.filter(|peer| silent(peer) >= self.dead_after);
        dead.map(|peer| peer.stream).collect()
    }

    pub fn is_connected(&self, peer: InstanceId) -> bool {
        self.peers.contains_key(&peer)
    }

    pub fn freshness(&self, now: Instant, peer: &Peer) -> Freshness {
        if now.saturating_duration_since(peer.received_at) >= self.stale_after {
            Freshness::Stale
        } else {
            Freshness::Connected
        }
    }

    pub fn peers(&self) -> impl Iterator<Item = &Peer> {
        self.peers.values()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe;

    const OWN: u128 = 5;

    fn roster() -> Roster {
        let own = InstanceId::new(OWN);
        Roster::new(own, Duration::from_secs(1), Duration::from_secs(3), 2)
    }

    fn identity(id: u128) -> PeerIdentity {
        PeerIdentity {
            id: InstanceId::new(id),
            name: "r".into(),
            release: "1".into(),
            port: 1,
        }
    }

    #[test]
    fn the_stream_that_the_smaller_id_dialed_stays_in_any_order() {
        let now = observe::now();
        // 9 is larger than this replica's id, so the stream that this side dials stays.
        for sides in [
            [Side::Dialer, Side::Acceptor],
            [Side::Acceptor, Side::Dialer],
        ] {
            let mut roster = roster();
            let peer = identity(9);
            assert_eq!(
                roster.admit(now, &peer, sides[0], None),
                Admission::First(StreamId(0))
            );
            let second = roster.admit(now, &peer, sides[1], None);
            let expected = match sides[0] {
                Side::Dialer => Admission::Duplicate,
                Side::Acceptor => Admission::Replaces {
                    stream: StreamId(1),
                    former: StreamId(0),
                },
            };
            assert_eq!(second, expected);
            assert_eq!(roster.peers[&peer.id].side, Side::Dialer);
        }
    }

    #[test]
    fn the_end_of_a_replaced_stream_loses_no_replica() {
        let (mut roster, now) = (roster(), observe::now());
        let peer = identity(9);
        let _ = roster.admit(now, &peer, Side::Acceptor, None);
        let _ = roster.admit(now, &peer, Side::Dialer, None);
        assert!(roster.on_end(peer.id, StreamId(0)).is_none());
        assert!(!roster.on_message(now, peer.id, StreamId(0)));
        assert!(roster.on_message(now, peer.id, StreamId(1)));
        assert!(roster.on_end(peer.id, StreamId(1)).is_some());
        assert!(!roster.is_connected(peer.id));
    }

    #[test]
    fn a_silent_stream_does_not_keep_a_new_one_out() {
        let (mut roster, now) = (roster(), observe::now());
        let peer = identity(9);
        let _ = roster.admit(now, &peer, Side::Dialer, None);
        let later = now + Duration::from_secs(1);
        let admission = roster.admit(later, &peer, Side::Acceptor, None);
        assert!(matches!(admission, Admission::Replaces { .. }));
    }

    #[test]
    fn more_replicas_than_may_be_are_refused() {
        let (mut roster, now) = (roster(), observe::now());
        for (id, expected) in [(1, true), (2, true), (3, false), (1, true)] {
            let admission = roster.admit(now, &identity(id), Side::Acceptor, None);
            assert_eq!(admission != Admission::Full, expected, "{id}");
        }
    }

    #[test]
    fn a_silent_replica_is_stale_then_dead() {
        let (mut roster, now) = (roster(), observe::now());
        let id = identity(1).id;
        let _ = roster.admit(now, &identity(1), Side::Acceptor, None);
        let after = |ms| now + Duration::from_millis(ms);
        let check = |roster: &Roster, ms, freshness, is_dead: bool| {
            let peer = &roster.peers[&id];
            let found = roster.freshness(after(ms), peer);
            let dead = roster.dead(after(ms));
            assert_eq!(
                (found, dead.len()),
                (freshness, usize::from(is_dead)),
                "{ms}"
            );
        };
        check(&roster, 999, Freshness::Connected, false);
        check(&roster, 1_000, Freshness::Stale, false);
        check(&roster, 2_999, Freshness::Stale, false);
        roster.on_message(after(2_999), id, StreamId(0));
        check(&roster, 3_000, Freshness::Connected, false);
        check(&roster, 5_999, Freshness::Stale, true);
    }
}
