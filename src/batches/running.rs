//! The batches that run on this replica, as operators see them. Pure.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use serde::Serialize;

use super::batch::{BatchRecord, RequestCounts};
use crate::store::documents::DocumentKey;

/// Tenants that are shown, those with the most lines left first.
const MAX_TENANTS: usize = 5;

/// What was last read of each batch of which something runs here.
#[derive(Debug, Default)]
pub(super) struct Running(BTreeMap<DocumentKey, (String, RequestCounts)>);

/// What runs on this replica.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RunningBatches {
    pub batches: u32,
    /// Not all of them, if they are many.
    pub tenants: Vec<TenantBatches>,
}

/// The batches of one tenant, with what all replicas have done of their lines.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TenantBatches {
    pub tenant: String,
    pub batches: u32,
    pub completed: u64,
    pub failed: u64,
    pub left: u64,
}

impl Running {
    pub(super) fn set(&mut self, key: &DocumentKey, record: &BatchRecord) {
        let value = (record.tenant_name.clone(), record.counts);
        self.0.insert(key.clone(), value);
    }

    /// Forgets what runs no more.
    pub(super) fn keep(&mut self, running: &[DocumentKey]) {
        self.0.retain(|key, _| running.contains(key));
    }

    pub(super) fn report(&self) -> RunningBatches {
        let mut tenants: BTreeMap<&str, TenantBatches> = BTreeMap::new();
        let mut batches = 0;
        for (name, counts) in self.0.values() {
            let tenant = tenants.entry(name).or_default();
            batches += 1;
            tenant.batches += 1;
            tenant.completed += u64::from(counts.completed);
            tenant.failed += u64::from(counts.failed);
            let ended = [counts.completed, counts.failed, counts.not_run];
            let ended = ended.into_iter().fold(0, u32::saturating_add);
            tenant.left += u64::from(counts.total.saturating_sub(ended));
        }
        let tenants = tenants.into_iter().map(|(name, tenant)| TenantBatches {
            tenant: name.to_owned(),
            ..tenant
        });
        let mut tenants: Vec<TenantBatches> = tenants.collect();
        tenants.sort_by_key(|tenant| Reverse(tenant.left));
        tenants.truncate(MAX_TENANTS);
        RunningBatches { batches, tenants }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batches::service::batch_key;

    fn record(tenant: &str, total: u32) -> BatchRecord {
        BatchRecord {
            tenant_name: tenant.to_owned(),
            counts: RequestCounts {
                total,
                completed: 2,
                failed: 1,
                not_run: 0,
            },
            ..BatchRecord::default()
        }
    }

    #[test]
    fn tenants_with_the_most_lines_left_come_first() {
        let mut running = Running::default();
        assert_eq!(running.report(), RunningBatches::default());
        for (id, tenant, total) in [
            ("1", "a", 10),
            ("2", "b", 30),
            ("3", "a", 9),
            ("4", "a", 10),
        ] {
            running.set(&batch_key(id), &record(tenant, total));
        }
        running.keep(&["1", "2", "3"].map(batch_key));
        let report = running.report();
        let tenant = |name: &str, batches: u32, left: u64| TenantBatches {
            tenant: name.to_owned(),
            batches,
            completed: 2 * u64::from(batches),
            failed: batches.into(),
            left,
        };
        assert_eq!(report.batches, 3);
        assert_eq!(report.tenants, [tenant("b", 1, 27), tenant("a", 2, 13)]);
        for number in 0..2 * MAX_TENANTS {
            let name = number.to_string();
            running.set(&batch_key(&name), &record(&name, 9));
        }
        assert_eq!(running.report().tenants.len(), MAX_TENANTS);
    }
}
