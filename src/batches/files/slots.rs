//! How many uploads run at a time: each has a part of its file in memory. Pure but for a lock.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::ids::Tenant;

/// 8 MiB each, and as much again while such a part grows: 256 MiB at the most.
const MAX_UPLOADS: usize = 16;
/// So that two tenants at least have their turn.
pub(super) const MAX_UPLOADS_PER_TENANT: usize = 8;

/// Whose uploads run on this replica.
#[derive(Debug, Default)]
pub(super) struct UploadSlots(Mutex<Vec<Tenant>>);

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
        let mut running = self.0.lock();
        let own = running.iter().filter(|other| **other == tenant).count();
        if own >= MAX_UPLOADS_PER_TENANT {
            return Err(NoSlot::TenantFull);
        }
        if running.len() >= MAX_UPLOADS {
            return Err(NoSlot::Full);
        }
        running.push(tenant);
        let slots = self.clone();
        Ok(UploadSlot { slots, tenant })
    }
}

impl Drop for UploadSlot {
    fn drop(&mut self) {
        let mut running = self.slots.0.lock();
        if let Some(own) = running.iter().position(|other| *other == self.tenant) {
            running.swap_remove(own);
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
        assert!(slots.0.lock().is_empty());
    }
}
