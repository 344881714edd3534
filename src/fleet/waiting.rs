//! Requests that wait in routers for workers with room: in this one, and in the other replicas.

use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use arc_swap::{ArcSwapOption, Guard};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::load::LoadShare;
use crate::ids::WorkerId;

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

/// When the first requests in lines for one worker are due: for each priority at most one.
pub type FirstInLine = SmallVec<[DueTime; 2]>;

/// The earliest one of each priority among the first ones in several lines.
pub fn earliest(firsts: impl IntoIterator<Item = DueTime>) -> FirstInLine {
    let mut earliest = FirstInLine::new();
    for first in firsts {
        let is_same = |other: &&mut DueTime| other.priority == first.priority;
        match earliest.iter_mut().find(is_same) {
            Some(known) => known.at = known.at.min(first.at),
            None => earliest.push(first),
        }
    }
    earliest
}

/// What waits for a worker, or for one of its dp ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WaitingAt {
    pub load: LoadShare,
    /// In this router of the highest class that waits there, the one that is due the earliest. In the other replicas
    /// for each priority that any of these reports, the earliest.
    pub first: FirstInLine,
}

/// What waits, by cache owner: for a worker as a whole, and for each of its dp ranks that requests are pinned to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WaitingByOwner {
    by_owner: FxHashMap<WorkerId, WaitingAt>,
}

impl WaitingByOwner {
    #[inline]
    pub fn get(&self, owner: &WorkerId) -> Option<&LoadShare> {
        Some(&self.by_owner.get(owner)?.load)
    }

    pub fn at(&self, owner: WorkerId) -> Option<&WaitingAt> {
        self.by_owner.get(&owner)
    }

    /// The first ones in line.
    pub fn first(&self, owner: WorkerId) -> &[DueTime] {
        let waiting = self.by_owner.get(&owner);
        waiting.map_or(&[][..], |waiting| &waiting.first[..])
    }

    /// True if it has changed.
    pub fn set(&mut self, owner: WorkerId, new: WaitingAt) -> bool {
        if new.load.requests == 0 && new.first.is_empty() {
            return self.by_owner.remove(&owner).is_some();
        }
        if self.by_owner.get(&owner) == Some(&new) {
            return false;
        }
        self.by_owner.insert(owner, new);
        true
    }

    /// Adds the first one in a line here. Where several queues have a line, one counts: of the highest class, and there
    /// the one that is due the earliest.
    pub fn add_first(&mut self, owner: WorkerId, first: DueTime) {
        let known = &mut self.by_owner.entry(owner).or_default().first;
        let order = |due: &DueTime| (Reverse(due.priority), due.at);
        if known.iter().all(|known| order(&first) < order(known)) {
            known.clear();
            known.push(first);
        }
    }
}

impl FromIterator<(WorkerId, LoadShare)> for WaitingByOwner {
    fn from_iter<I: IntoIterator<Item = (WorkerId, LoadShare)>>(loads: I) -> Self {
        let waiting = loads.into_iter().map(|(owner, load)| {
            let first = FirstInLine::new();
            (owner, WaitingAt { load, first })
        });
        Self {
            by_owner: waiting.collect(),
        }
    }
}

/// Written by who lets requests wait and by who hears of other replicas; read by both.
#[derive(Debug, Default)]
pub struct Waiting {
    /// `None`: none waits.
    own: ArcSwapOption<WaitingByOwner>,
    peers: ArcSwapOption<WaitingByOwner>,
    is_shared: AtomicBool,
    is_heard: AtomicBool,
}

impl Waiting {
    pub fn set_own(&self, own: WaitingByOwner) {
        set(&self.own, own);
    }

    pub fn set_peers(&self, peers: WaitingByOwner) {
        set(&self.peers, peers);
    }

    /// There may be other replicas. Said before any request waits.
    pub fn set_shared(&self) {
        self.is_shared.store(true, Relaxed);
    }

    /// Whether there may be other replicas: else nobody asks when requests are due.
    pub fn is_shared(&self) -> bool {
        self.is_shared.load(Relaxed)
    }

    /// Whether another replica is connected.
    pub fn set_heard(&self, is_heard: bool) {
        self.is_heard.store(is_heard, Relaxed);
    }

    /// Whether another replica hears when the first ones here are due.
    pub fn is_heard(&self) -> bool {
        self.is_heard.load(Relaxed)
    }

    pub fn own(&self) -> Guard<Option<Arc<WaitingByOwner>>> {
        self.own.load()
    }

    /// In all other replicas together, as they last reported.
    #[inline]
    pub fn peers(&self) -> Guard<Option<Arc<WaitingByOwner>>> {
        self.peers.load()
    }
}

fn set(published: &ArcSwapOption<WaitingByOwner>, new: WaitingByOwner) {
    if !new.by_owner.is_empty() {
        published.store(Some(Arc::new(new)));
    } else if published.load().is_some() {
        published.store(None);
    }
}
