//! What an engine reports of its load. Pure.

use std::time::Instant;

/// Load as the engine reports it: in its metrics, or together with its KV events.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoadReport {
    pub at: Instant,
    pub running: u32,
    /// Requests that wait inside the engine, for whatever.
    pub waiting: u32,
    /// The part of `waiting` that the engine has deferred: for a LoRA adapter, or for blocks from another engine. A
    /// full engine does not look whether they still wait for that. 0 for an engine that does not report it.
    pub deferred: u32,
    /// Used part of its KV cache, 0 to 1.
    pub kv_usage: f64,
}

impl LoadReport {
    /// Requests that wait inside the engine for a slot or for memory. vLLM looks at what it has deferred only while a
    /// slot is free: where all `slots` are taken, these requests may wait for nothing but a slot, and all of them
    /// count.
    pub fn waiting_for_capacity(&self, slots: Option<u32>) -> u32 {
        if self.has_all_taken(slots) {
            self.waiting
        } else {
            self.waiting.saturating_sub(self.deferred)
        }
    }

    pub(super) fn has_all_taken(&self, slots: Option<u32>) -> bool {
        slots.is_some_and(|slots| self.running >= slots)
    }
}
