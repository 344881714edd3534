//! The retry budget.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tower::retry::budget::{Budget, TpsBudget};

use crate::relay::settings::Settings;

/// Limits retries to a share of the requests, so that retries do not multiply the load of a failing fleet.
#[derive(Debug)]
pub(in crate::relay) struct RetryBudget {
    budget: TpsBudget,
    requests: AtomicU64,
}

impl RetryBudget {
    /// The budget takes a lock for each deposit, so requests are deposited in batches.
    const BATCH: u64 = 16;

    pub(in crate::relay) fn new(settings: &Settings) -> Self {
        let percent =
            f32::from(u16::try_from(settings.advanced.retry_budget_percent).unwrap_or(u16::MAX));
        let share = (percent / 100.0 * Self::BATCH as f32).min(1_000.0);
        let budget = TpsBudget::new(
            Duration::from_secs(10),
            settings.advanced.min_retries_per_second,
            share,
        );
        Self {
            budget,
            requests: AtomicU64::new(0),
        }
    }

    /// Whether both settings make the same budget.
    pub(in crate::relay) fn is_same(old: &Settings, new: &Settings) -> bool {
        let of = |settings: &Settings| {
            let retries = &settings.advanced;
            (retries.retry_budget_percent, retries.min_retries_per_second)
        };
        of(old) == of(new)
    }

    pub(in crate::relay) fn on_request(&self) {
        if self
            .requests
            .fetch_add(1, Relaxed)
            .is_multiple_of(Self::BATCH)
        {
            self.budget.deposit();
        }
    }

    pub(in crate::relay) fn may_retry(&self) -> bool {
        self.budget.withdraw()
    }
}
