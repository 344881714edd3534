//! Requests that wait in routers for workers with room: in this one, and in the other replicas.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use arc_swap::{ArcSwapOption, Guard};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::load::LoadShare;
use crate::ids::WorkerId;

/// What waits, by cache owner: for a worker as a whole, and for each of its dp ranks that requests are pinned to.
pub type WaitingByOwner = FxHashMap<WorkerId, LoadShare>;

/// When a waiting request is due, to compare it with others of its class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DueTime {
    /// That of its class.
    pub priority: i32,
    pub at: Instant,
}

/// Replicas say when a request is due in whole milliseconds from a report on, which takes some to arrive.
const SAID_WITHIN: Duration = Duration::from_millis(5);

impl DueTime {
    /// Whether another report may have meant the same request.
    pub fn is_about(self, other: Self) -> bool {
        self.is_within(SAID_WITHIN, other)
    }

    /// Whether the other is of the same class, and due at nearly the same time.
    pub fn is_within(self, time: Duration, other: Self) -> bool {
        let later = self.at.saturating_duration_since(other.at);
        let earlier = other.at.saturating_duration_since(self.at);
        self.priority == other.priority && later.max(earlier) < time
    }
}

/// When the first request in each line of this router is due, by cache owner: of the highest class that waits there,
/// the one that is due the earliest.
pub type FirstInLine = FxHashMap<WorkerId, DueTime>;

/// When the first requests in the lines of other routers are due: for each priority that any of them has, the earliest.
pub type FirstOfPeers = SmallVec<[DueTime; 2]>;

/// The earliest one of each priority among the first ones in several lines.
pub fn earliest(firsts: impl IntoIterator<Item = DueTime>) -> FirstOfPeers {
    let mut earliest = FirstOfPeers::new();
    for first in firsts {
        let is_same = |other: &&mut DueTime| other.priority == first.priority;
        match earliest.iter_mut().find(is_same) {
            Some(known) => known.at = known.at.min(first.at),
            None => earliest.push(first),
        }
    }
    earliest
}

/// Written by who lets requests wait and by who hears of other replicas; read by both.
#[derive(Debug, Default)]
pub struct Waiting {
    /// `None`: none waits.
    own: ArcSwapOption<WaitingByOwner>,
    peers: ArcSwapOption<WaitingByOwner>,
    own_first: ArcSwapOption<FirstInLine>,
    peers_first: ArcSwapOption<FxHashMap<WorkerId, FirstOfPeers>>,
    is_heard: AtomicBool,
}

impl Waiting {
    pub fn set_own(&self, own: WaitingByOwner) {
        set(&self.own, own);
    }

    pub fn set_peers(&self, peers: WaitingByOwner) {
        set(&self.peers, peers);
    }

    pub fn set_own_first(&self, first: FirstInLine) {
        set(&self.own_first, first);
    }

    pub fn set_peers_first(&self, first: FxHashMap<WorkerId, FirstOfPeers>) {
        set(&self.peers_first, first);
    }

    /// Whether another replica is connected.
    pub fn set_heard(&self, is_heard: bool) {
        self.is_heard.store(is_heard, Relaxed);
    }

    /// Whether another replica hears when the first ones here are due.
    pub fn is_heard(&self) -> bool {
        self.is_heard.load(Relaxed)
    }

    /// In this router.
    pub fn own(&self) -> Guard<Option<Arc<WaitingByOwner>>> {
        self.own.load()
    }

    /// In all other replicas together, as they last reported.
    #[inline]
    pub fn peers(&self) -> Guard<Option<Arc<WaitingByOwner>>> {
        self.peers.load()
    }

    pub fn own_first(&self) -> Guard<Option<Arc<FirstInLine>>> {
        self.own_first.load()
    }

    pub fn peers_first(&self) -> Guard<Option<Arc<FxHashMap<WorkerId, FirstOfPeers>>>> {
        self.peers_first.load()
    }
}

fn set<T>(published: &ArcSwapOption<FxHashMap<WorkerId, T>>, new: FxHashMap<WorkerId, T>) {
    if !new.is_empty() {
        published.store(Some(Arc::new(new)));
    } else if published.load().is_some() {
        published.store(None);
    }
}
