//! One memory limit for several indexes, and a part of it for the pages of all ranks.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use prometheus::IntGauge;

#[derive(Debug)]
pub(in crate::kv) struct MemoryBudget {
    max_bytes: u64,
    bytes: AtomicU64,
    accounts: AtomicU64,
    /// An account's equal part is never larger than among so many.
    min_accounts: u64,
    /// What is charged here is charged there, too.
    whole: Option<Arc<MemoryBudget>>,
    gauge: IntGauge,
}

impl MemoryBudget {
    /// For indexes. The first one leaves something to a second one.
    pub(in crate::kv) fn new(max_bytes: u64, gauge: IntGauge) -> Arc<Self> {
        Arc::new(Self {
            max_bytes,
            bytes: AtomicU64::new(0),
            accounts: AtomicU64::new(0),
            min_accounts: 2,
            whole: None,
            gauge,
        })
    }

    /// A half of this one, for ranks' pages where they are smaller than blocks: they are kept for the blocks, not the other
    /// way round.
    pub(in crate::kv) fn for_pages(self: &Arc<Self>) -> Arc<Self> {
        Arc::new(Self {
            max_bytes: self.max_bytes / 2,
            bytes: AtomicU64::new(0),
            accounts: AtomicU64::new(0),
            min_accounts: 1,
            whole: Some(self.clone()),
            gauge: self.gauge.clone(),
        })
    }

    fn add(&self, more: u64) {
        self.bytes.fetch_add(more, Relaxed);
        match &self.whole {
            Some(whole) => whole.add(more),
            None => self.gauge.add(more as i64),
        }
    }
}

/// The memory of one index, or of one rank's pages; given back when dropped.
#[derive(Debug)]
pub struct MemoryAccount {
    budget: Arc<MemoryBudget>,
    charged: AtomicU64,
}

impl MemoryAccount {
    pub(in crate::kv) fn new(budget: Arc<MemoryBudget>) -> Self {
        budget.accounts.fetch_add(1, Relaxed);
        Self {
            budget,
            charged: AtomicU64::new(0),
        }
    }

    /// Whether the account may have `bytes` in all. Each one forgets only where it stores something itself, so the first
    /// one could leave nothing to later ones: an eighth of the budget is only for those that have less than an equal part.
    pub fn has_room_for(&self, bytes: usize) -> bool {
        let bytes = bytes as u64;
        let budget = &*self.budget;
        let accounts = budget.accounts.load(Relaxed).max(budget.min_accounts);
        let max_bytes = if bytes <= budget.max_bytes / accounts {
            budget.max_bytes
        } else {
            budget.max_bytes - budget.max_bytes / 8
        };
        let others = budget.bytes.load(Relaxed);
        let others = others.saturating_sub(self.charged.load(Relaxed));
        others.saturating_add(bytes) <= max_bytes
    }

    /// Whether the account may have `bytes` more than it was charged with.
    pub(super) fn has_room_for_more(&self, bytes: usize) -> bool {
        self.has_room_for(self.charged.load(Relaxed) as usize + bytes)
    }

    /// Sets the account's total. Called by one thread at a time.
    #[inline]
    pub fn charge(&self, bytes: usize) {
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
