//! One memory limit for several indexes.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use prometheus::IntGauge;

#[derive(Debug)]
pub(in crate::kv) struct MemoryBudget {
    max_bytes: u64,
    bytes: AtomicU64,
    accounts: AtomicU64,
    gauge: IntGauge,
}

impl MemoryBudget {
    pub(in crate::kv) fn new(max_bytes: u64, gauge: IntGauge) -> Arc<Self> {
        Arc::new(Self {
            max_bytes,
            bytes: AtomicU64::new(0),
            accounts: AtomicU64::new(0),
            gauge,
        })
    }

    pub(super) fn max_bytes(&self) -> u64 {
        self.max_bytes
    }
}

/// The memory of one index; given back when dropped.
#[derive(Debug)]
pub(super) struct MemoryAccount {
    budget: Arc<MemoryBudget>,
    charged: AtomicU64,
}

impl MemoryAccount {
    pub(super) fn new(budget: Arc<MemoryBudget>) -> Self {
        budget.accounts.fetch_add(1, Relaxed);
        Self {
            budget,
            charged: AtomicU64::new(0),
        }
    }

    #[inline]
    pub(super) fn is_over_limit(&self) -> bool {
        self.budget.bytes.load(Relaxed) > self.budget.max_bytes
    }

    /// Of all indexes together.
    pub(super) fn bytes_over_limit(&self) -> usize {
        let bytes = self.budget.bytes.load(Relaxed);
        bytes.saturating_sub(self.budget.max_bytes) as usize
    }

    /// An index gives no pages back while it lives, so the first one could leave nothing to later ones:
    /// an eighth of the budget is only for indexes that have less than an equal part.
    pub(super) fn has_room_for(&self, bytes: usize) -> bool {
        let bytes = bytes as u64;
        let max_bytes = self.budget.max_bytes;
        let equal_part = max_bytes / self.budget.accounts.load(Relaxed).max(2);
        let max_bytes = if self.charged.load(Relaxed) + bytes <= equal_part {
            max_bytes
        } else {
            max_bytes - max_bytes / 8
        };
        self.budget.bytes.load(Relaxed) + bytes <= max_bytes
    }

    /// Sets the index's total. Called with its lock held.
    #[inline]
    pub(super) fn charge(&self, bytes: usize) {
        let bytes = bytes as u64;
        let before = self.charged.load(Relaxed);
        if bytes != before {
            self.charged.store(bytes, Relaxed);
            let more = bytes.wrapping_sub(before);
            self.budget.bytes.fetch_add(more, Relaxed);
            self.budget.gauge.add(more as i64);
        }
    }
}

impl Drop for MemoryAccount {
    fn drop(&mut self) {
        self.charge(0);
        self.budget.accounts.fetch_sub(1, Relaxed);
    }
}
