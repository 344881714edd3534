//! The LoRA adapters that an engine has in its GPU: it has room for a few of those that it serves, and keeps the ones used last.
//! Pure.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use arc_swap::ArcSwap;

use crate::ids::Model;

/// What engines of either kind have unless they report another number: vLLM's `--max-loras`.
const ASSUMED_SLOTS: u32 = 1;
/// More are not remembered.
const MAX_SLOTS: u32 = 64;

/// Learnt from the requests that were sent to the engine and from what it reports of running ones.
#[derive(Debug, Default)]
pub struct AdapterSlots {
    /// 0: not reported.
    slots: AtomicU32,
    /// The one that was used last first; at most as many as there are slots.
    used: ArcSwap<Vec<Model>>,
}

impl AdapterSlots {
    /// Whether the adapter is in the GPU, as far as known.
    pub fn has(&self, adapter: &Model) -> bool {
        self.used.load().contains(adapter)
    }

    pub fn used(&self) -> Arc<Vec<Model>> {
        self.used.load_full()
    }

    /// A request for the adapter is sent to the engine.
    pub fn on_used(&self, adapter: &Model) {
        if self.used.load().first() == Some(adapter) {
            return;
        }
        self.put(std::slice::from_ref(adapter));
    }

    pub fn set_slots(&self, slots: u32) {
        self.slots.store(slots.min(MAX_SLOTS), Relaxed);
    }

    /// The engine reports the adapters of the requests that it computes.
    pub fn on_running(&self, running: &[Model]) {
        let used = self.used.load();
        let has_all = running.iter().all(|adapter| used.contains(adapter));
        // The order of those that are known says more than this.
        if !has_all {
            self.put(running);
        }
    }

    /// The engine has started again.
    pub(super) fn clear(&self) {
        self.used.store(Arc::default());
    }

    fn put(&self, latest: &[Model]) {
        let slots = match self.slots.load(Relaxed) {
            0 => ASSUMED_SLOTS,
            slots => slots,
        };
        self.used.rcu(|used| {
            let older = used.iter().filter(|adapter| !latest.contains(adapter));
            let all = latest.iter().chain(older).take(slots as usize);
            all.cloned().collect::<Vec<_>>()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn models(names: &[&str]) -> Vec<Model> {
        names.iter().map(|name| (*name).into()).collect()
    }

    fn check(slots: u32, used: &[&str], running: &[&str], expected: &[&str]) {
        let found = AdapterSlots::default();
        found.set_slots(slots);
        models(used)
            .iter()
            .for_each(|adapter| found.on_used(adapter));
        found.on_running(&models(running));
        assert_eq!(*found.used(), models(expected));
    }

    #[test]
    fn the_adapters_used_last_are_in_the_slots() {
        check(0, &["a", "b"], &[], &["b"]);
        check(2, &["a", "b", "c"], &[], &["c", "b"]);
        check(2, &["a", "b", "a", "c"], &[], &["c", "a"]);
    }

    #[test]
    fn what_the_engine_computes_is_in_a_slot_whoever_sent_it() {
        check(2, &["a", "b"], &["c"], &["c", "b"]);
        check(2, &["a", "b"], &["a"], &["b", "a"]);
        check(1, &["a"], &["b", "c"], &["b"]);
        check(1_000, &["a"], &["b", "c"], &["b", "c", "a"]);
    }

    #[test]
    fn an_engine_that_starts_again_has_none() {
        let found = AdapterSlots::default();
        found.on_used(&"a".into());
        assert!(found.has(&"a".into()));
        found.clear();
        assert!(!found.has(&"a".into()));
    }
}
