//! How many uploads run at a time: each has a part of its file in memory. Pure but for a lock.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::ids::Tenant;

/// 8 MiB each, and as much again while such a part grows: 256 MiB at the most.
pub(super) const MAX_UPLOADS: u32 = 16;
/// So that two tenants at least have their turn.
pub(super) const MAX_UPLOADS_PER_TENANT: u32 = 8;

/// Uploads that run on this replica.
#[derive(Debug, Default)]
pub(super) struct UploadSlots {
    running: Mutex<BTreeMap<Tenant, u32>>,
}

/// Why an upload cannot begin now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoSlot {
    TenantFull,
    Full,
}

/// Lets one upload run until it is dropped.
#[must_use = "dropping the guard gives the slot back"]
#[derive(Debug)]
pub(super) struct UploadSlot {
    slots: Arc<UploadSlots>,
    tenant: Tenant,
}

impl UploadSlots {
    pub(super) fn enter(self: &Arc<Self>, tenant: Tenant) -> Result<UploadSlot, NoSlot> {
        let mut running = self.running.lock();
        let all: u32 = running.values().sum();
        let own = running.get(&tenant).copied().unwrap_or_default();
        if own >= MAX_UPLOADS_PER_TENANT {
            return Err(NoSlot::TenantFull);
        }
        if all >= MAX_UPLOADS {
            return Err(NoSlot::Full);
        }
        running.insert(tenant, own + 1);
        Ok(UploadSlot {
            slots: self.clone(),
            tenant,
        })
    }
}

impl Drop for UploadSlot {
    fn drop(&mut self) {
        let mut running = self.slots.running.lock();
        let left = running
            .get(&self.tenant)
            .map_or(0, |own| own.saturating_sub(1));
        if left == 0 {
            running.remove(&self.tenant);
        } else {
            running.insert(self.tenant, left);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_leaves_room_for_others_and_slots_come_back() {
        let slots = Arc::new(UploadSlots::default());
        let enter = |name: &str| slots.enter(Tenant::of(name));
        let take = |name: &str| -> Vec<UploadSlot> {
            let taken = (0..MAX_UPLOADS_PER_TENANT).map(|_| enter(name));
            taken.collect::<Result<_, _>>().unwrap()
        };
        let mut of_a = take("a");
        assert_eq!(enter("a").err(), Some(NoSlot::TenantFull));
        let of_b = take("b");
        assert_eq!(enter("c").err(), Some(NoSlot::Full));
        drop(of_a.pop());
        let of_c = enter("c");
        assert!(of_c.is_ok());
        assert_eq!(enter("c").err(), Some(NoSlot::Full));
        drop((of_a, of_b, of_c));
        assert!(slots.running.lock().is_empty());
    }
}
