//! One bound on the memory of several indexes.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use prometheus::IntGauge;

#[derive(Debug)]
pub(in crate::kv) struct Budget {
    bytes_max: u64,
    bytes: AtomicU64,
    /// Indexes that share it.
    accounts: AtomicU64,
    gauge: IntGauge,
}

impl Budget {
    pub(in crate::kv) fn new(bytes_max: u64, gauge: IntGauge) -> Arc<Self> {
        Arc::new(Self {
            bytes_max,
            bytes: AtomicU64::new(0),
            accounts: AtomicU64::new(0),
            gauge,
        })
    }

    pub(in crate::kv) fn bytes_max(&self) -> u64 {
        self.bytes_max
    }
}

/// One index's part of it; given back when dropped.
#[derive(Debug)]
pub(in crate::kv) struct Account {
    budget: Arc<Budget>,
    charged: AtomicU64,
}

impl Account {
    pub(in crate::kv) fn new(budget: Arc<Budget>) -> Self {
        budget.accounts.fetch_add(1, Relaxed);
        Self {
            budget,
            charged: AtomicU64::new(0),
        }
    }

    #[inline]
    pub(super) fn is_over(&self) -> bool {
        self.budget.bytes.load(Relaxed) > self.budget.bytes_max
    }

    /// An index gives no pages back while it lives, so the first could leave none to those that come
    /// later: an eighth is only for those that have less than their equal part.
    pub(super) fn has_room_for(&self, bytes: usize) -> bool {
        let bytes = bytes as u64;
        let bytes_max = self.budget.bytes_max;
        let equal_part = bytes_max / self.budget.accounts.load(Relaxed).max(2);
        let bytes_max = if self.charged.load(Relaxed) + bytes <= equal_part {
            bytes_max
        } else {
            bytes_max - bytes_max / 8
        };
        self.budget.bytes.load(Relaxed) + bytes <= bytes_max
    }

    /// What the index takes in all. Called with its lock held.
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

impl Drop for Account {
    fn drop(&mut self) {
        self.charge(0);
        self.budget.accounts.fetch_sub(1, Relaxed);
    }
}
