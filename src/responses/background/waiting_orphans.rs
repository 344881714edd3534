//! The orphans that would run here and found no memory for their requests. The sizes of those are known from then on,
//! so that this replica asks for memory before it reads them again. Pure.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::store::{Orphan, ResponseKey};

/// A scan finds a part of the orphans if there are many, or none while the store is away. What no scan has found for so
/// long runs elsewhere or has ended.
const FORGET_AFTER: Duration = Duration::from_secs(600);

/// Several times what one scan takes over. Beyond it one is forgotten: its request is read once more, and it counts
/// again.
const ORPHANS_MAX: usize = 1_024;
/// One that was cancelled meanwhile needs no memory, which its take-over shows. Until then its request is not read.
const LOOK_AGAIN: Duration = Duration::from_secs(60);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct WaitingOrphans {
    orphans: BTreeMap<ResponseKey, WaitingOrphan>,
}

#[derive(Debug)]
struct WaitingOrphan {
    /// The size of its request.
    bytes: u64,
    /// When there was no memory for it the first time.
    since: Instant,
    /// When it was last handed back, or could not be taken over.
    handed_back: Instant,
    /// When a scan last found it.
    found: Instant,
}

impl WaitingOrphans {
    /// There was no memory for the request of an orphan that would run. True if it is the first time.
    pub(super) fn on_no_memory(&mut self, now: Instant, key: ResponseKey, bytes: u64) -> bool {
        if self.orphans.len() >= ORPHANS_MAX && !self.orphans.contains_key(&key) {
            self.orphans.pop_first();
        }
        let before = self.orphans.get(&key);
        let orphan = WaitingOrphan {
            bytes,
            since: before.map_or(now, |before| before.since),
            handed_back: now,
            found: now,
        };
        self.orphans.insert(key, orphan).is_none()
    }

    /// The size of its request, if there was no memory for it.
    pub(super) fn bytes(&self, key: ResponseKey) -> Option<u64> {
        self.orphans.get(&key).map(|orphan| orphan.bytes)
    }

    /// Whether its request may be read although there is no memory for it: it may need none.
    pub(super) fn may_look(&self, now: Instant, key: ResponseKey) -> bool {
        self.orphans
            .get(&key)
            .is_none_or(|orphan| now.saturating_duration_since(orphan.handed_back) >= LOOK_AGAIN)
    }

    /// Whether there has been no memory for it for so long that its owner would have renewed its lease if it still ran it.
    pub(super) fn is_lost(&self, now: Instant, key: ResponseKey) -> bool {
        let orphan = self.orphans.get(&key);
        orphan.is_some_and(|orphan| now.saturating_duration_since(orphan.since) >= LOOK_AGAIN)
    }

    /// The store did not let it be taken over, or did not answer.
    pub(super) fn on_not_taken_over(&mut self, now: Instant, key: ResponseKey) {
        if let Some(orphan) = self.orphans.get_mut(&key) {
            orphan.handed_back = now;
        }
    }

    /// It runs here now.
    pub(super) fn on_taken_over(&mut self, key: ResponseKey) {
        self.orphans.remove(&key);
    }

    /// A scan found these orphans. There may be others.
    pub(super) fn on_scan(&mut self, now: Instant, found: &[Orphan]) {
        for Orphan { key, .. } in found {
            if let Some(orphan) = self.orphans.get_mut(key) {
                orphan.found = now;
            }
        }
        self.orphans
            .retain(|_, orphan| now.saturating_duration_since(orphan.found) < FORGET_AFTER);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{ResponseId, Root, Tenant};
    use crate::observe;

    fn key(own: u128) -> ResponseKey {
        ResponseKey {
            tenant: Tenant::tagged(1),
            id: ResponseId::new(Root(1), own),
        }
    }

    #[test]
    fn an_orphan_without_memory_counts_once_and_is_looked_at_once_a_minute() {
        let now = observe::now();
        let mut waiting = WaitingOrphans::default();
        assert_eq!(waiting.bytes(key(1)), None);
        assert!(waiting.may_look(now, key(1)));
        assert!(waiting.on_no_memory(now, key(1), 7));
        assert_eq!(waiting.bytes(key(1)), Some(7));
        let later = now + LOOK_AGAIN;
        assert!(!waiting.may_look(now, key(1)) && waiting.may_look(later, key(1)));
        assert!(!waiting.is_lost(now, key(1)) && waiting.is_lost(later, key(1)));
        assert!(!waiting.on_no_memory(later, key(1), 7));
        assert!(!waiting.may_look(later, key(1)));
        assert!(waiting.is_lost(later, key(1)));
        let later = later + LOOK_AGAIN;
        assert!(waiting.may_look(later, key(1)));
        waiting.on_not_taken_over(later, key(1));
        assert!(!waiting.may_look(later, key(1)));
        waiting.on_taken_over(key(1));
        assert_eq!(waiting.bytes(key(1)), None);
    }

    #[test]
    fn what_no_scan_finds_any_more_is_forgotten_in_the_end() {
        let now = observe::now();
        let mut waiting = WaitingOrphans::default();
        for own in 0..ORPHANS_MAX as u128 + 5 {
            waiting.on_no_memory(now, key(own), 7);
        }
        assert_eq!(waiting.orphans.len(), ORPHANS_MAX);
        let found = [9, 10_000].map(|own| Orphan {
            key: key(own),
            owner: None,
            fencing_number: 1,
        });
        let later = now + FORGET_AFTER / 2;
        waiting.on_scan(later, &found);
        assert_eq!(waiting.orphans.len(), ORPHANS_MAX);
        waiting.on_scan(now + FORGET_AFTER, &[]);
        assert_eq!(waiting.bytes(key(9)), Some(7));
        assert_eq!(waiting.orphans.len(), 1);
        waiting.on_scan(later + FORGET_AFTER, &[]);
        assert!(waiting.orphans.is_empty());
    }
}
