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
    /// The part of `bytes` that ranks' pages take, and how many ranks have some.
    page_bytes: AtomicU64,
    page_accounts: AtomicU64,
    gauge: IntGauge,
}

impl MemoryBudget {
    pub(in crate::kv) fn new(max_bytes: u64, gauge: IntGauge) -> Arc<Self> {
        Arc::new(Self {
            max_bytes,
            bytes: AtomicU64::new(0),
            accounts: AtomicU64::new(0),
            page_bytes: AtomicU64::new(0),
            page_accounts: AtomicU64::new(0),
            gauge,
        })
    }

    fn add(&self, more: u64) {
        self.bytes.fetch_add(more, Relaxed);
        self.gauge.add(more as i64);
    }
}

/// The memory of one rank's pages, where they are smaller than blocks; given back when dropped. It counts within the limit
/// of the indexes, of which all pages may take a half: they are kept for the blocks, not the other way round.
#[derive(Debug)]
pub struct PageMemory {
    budget: Arc<MemoryBudget>,
    charged: u64,
}

impl PageMemory {
    pub(in crate::kv) fn new(budget: Arc<MemoryBudget>) -> Self {
        budget.page_accounts.fetch_add(1, Relaxed);
        Self { budget, charged: 0 }
    }

    /// Whether the rank's pages may take `bytes`. As between indexes, an eighth is only for ranks that have less than an
    /// equal part.
    pub fn has_room_for(&self, bytes: usize) -> bool {
        let bytes = bytes as u64;
        let max_bytes = self.budget.max_bytes / 2;
        let ranks = self.budget.page_accounts.load(Relaxed).max(1);
        let max_bytes = match bytes <= max_bytes / ranks {
            true => max_bytes,
            false if ranks == 1 => max_bytes,
            false => max_bytes - max_bytes / 8,
        };
        let others = self.budget.page_bytes.load(Relaxed);
        others.saturating_sub(self.charged).saturating_add(bytes) <= max_bytes
    }

    /// Sets the rank's total.
    pub fn charge(&mut self, bytes: usize) {
        let more = (bytes as u64).wrapping_sub(self.charged);
        if more != 0 {
            self.charged = bytes as u64;
            self.budget.page_bytes.fetch_add(more, Relaxed);
            self.budget.add(more);
        }
    }
}

impl Drop for PageMemory {
    fn drop(&mut self) {
        self.charge(0);
        self.budget.page_accounts.fetch_sub(1, Relaxed);
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

    /// An index drops blocks only where it stores some itself, so the first one could leave nothing to later ones:
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
            self.budget.add(more);
        }
    }
}

impl Drop for MemoryAccount {
    fn drop(&mut self) {
        self.charge(0);
        self.budget.accounts.fetch_sub(1, Relaxed);
    }
}
