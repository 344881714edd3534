//! Limits and what is used of them, for operators.

use serde::Serialize;

use super::compiled::{Kind, Limit};
use super::tenant_limits::TenantLimits;

/// What one tenant may use and uses.
#[derive(Debug, Serialize)]
pub struct Report {
    pub limits: Vec<LimitRow>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_concurrent_requests: Option<u32>,
    /// Over all replicas, as far as this one knows.
    pub running_requests: u64,
    pub running_requests_here: usize,
    /// Ended requests whose charges Redis does not know yet.
    pub unsettled: usize,
    /// Whether this replica counts alone.
    pub is_alone: bool,
}

#[derive(Clone, Debug, Serialize)]
pub struct LimitRow {
    pub limit: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    pub per_minute: u64,
    pub burst: u64,
    pub remaining: u64,
    /// Time until all of it may be used again.
    pub reset_ms: u64,
}

impl LimitRow {
    /// The part of it that may be used now.
    pub fn left(&self) -> f64 {
        self.remaining as f64 / self.burst.max(1) as f64
    }
}

impl Report {
    /// The limit of which the smallest part is left. Not that of batches, whose lines wait by design.
    pub fn tightest(&self) -> Option<&LimitRow> {
        let batches = Kind::BatchTokens.as_str();
        let rows = self.limits.iter().filter(|row| row.limit != batches);
        rows.min_by(|a, b| a.left().total_cmp(&b.left()))
    }
}

impl TenantLimits {
    pub fn report(&self) -> Report {
        let now = self.limiter.now();
        let usage = self.usage.lock();
        let row = |limit: &Limit| {
            let used = usage.of(&limit.name, now);
            LimitRow {
                limit: limit.kind.as_str(),
                model: limit.model.as_deref().map(str::to_owned),
                per_minute: limit.rate.per_minute(),
                burst: limit.rate.capacity(),
                remaining: limit.rate.remaining(used),
                reset_ms: used / 1_000,
            }
        };
        let max_concurrent = self.limits.max_concurrent;
        Report {
            limits: self.limits.every().map(row).collect(),
            max_concurrent_requests: (max_concurrent > 0).then_some(max_concurrent),
            running_requests: usage.running_everywhere(),
            running_requests_here: usage.running_here(),
            unsettled: usage.unsettled.len(),
            is_alone: !self.limiter.is_shared() || usage.is_apart,
        }
    }
}
