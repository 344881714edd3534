//! The orphans that would run here and found no memory for their requests. The sizes of those are known from then on,
//! so that this replica asks for memory before it reads them again. Pure.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::store::{Orphan, ResponseKey};

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
    /// When it was last taken over, and handed back.
    handed_back: Instant,
}

impl WaitingOrphans {
    /// There was no memory for the request of an orphan that would run. True if it is the first time.
    pub(super) fn on_no_memory(&mut self, now: Instant, key: ResponseKey, bytes: u64) -> bool {
        if self.orphans.len() >= ORPHANS_MAX && !self.orphans.contains_key(&key) {
            self.orphans.pop_first();
        }
        let orphan = WaitingOrphan {
            bytes,
            handed_back: now,
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

    /// It runs here now.
    pub(super) fn on_taken_over(&mut self, key: ResponseKey) {
        self.orphans.remove(&key);
    }

    /// A scan found these orphans, and there are no others.
    pub(super) fn on_scan(&mut self, found: &[Orphan]) {
        self.orphans
            .retain(|key, _| found.iter().any(|orphan| orphan.key == *key));
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
        assert!(!waiting.on_no_memory(later, key(1), 7));
        assert!(!waiting.may_look(later, key(1)));
        waiting.on_taken_over(key(1));
        assert_eq!(waiting.bytes(key(1)), None);
    }

    #[test]
    fn what_is_no_orphan_any_more_is_forgotten() {
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
        waiting.on_scan(&found);
        assert_eq!(waiting.bytes(key(9)), Some(7));
        assert_eq!(waiting.orphans.len(), 1);
    }
}
