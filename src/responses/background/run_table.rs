//! The runs of one replica, its lease and its limits. Pure.
//!
//! The replica owns its runs under an [`Owner`] id that holds a lease in the store. After the lease is lost it
//! continues under a new owner id, so that writes of the old one are fenced off.

use std::collections::BTreeMap;
use std::time::Instant;

use super::run_step::StopReason;
use crate::store::lease::{self, Lease, Step};
use crate::store::{self, FencingToken, Orphan, Owner, OwnershipLoss, ResponseKey, Takeover};

/// Why a response is not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunRefusal {
    /// Its fencing token belongs to another owner id, or the lease is not held.
    NotOwner,
    /// It runs here already.
    AlreadyRunning,
    ReplicaFull,
    TenantFull,
}

impl RunRefusal {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotOwner => "not_owner",
            Self::AlreadyRunning => "already_running",
            Self::ReplicaFull => "replica_full",
            Self::TenantFull => "tenant_full",
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    pub running_max: u64,
    pub running_per_tenant_max: u64,
}

/// See the module. `R` is the handle of a run.
#[derive(Debug)]
pub struct RunTable<R> {
    bounds: Bounds,
    leases: lease::Settings,
    /// The current owner id. It changes when the lease is lost.
    owner: Owner,
    lease: Lease,
    runs: BTreeMap<ResponseKey, RunEntry<R>>,
    /// Orphans whose take-over the store did not confirm. Other replicas do not scan for them while this one lives.
    unconfirmed: BTreeMap<ResponseKey, Orphan>,
    /// Responses owned by this replica that it does not run: to be released.
    to_hand_back: BTreeMap<ResponseKey, FencingToken>,
}

#[derive(Debug)]
struct RunEntry<R> {
    fence: FencingToken,
    /// Whether its record is known to be stored.
    is_stored: bool,
    run: R,
}

impl<R> RunTable<R> {
    pub fn new(now: Instant, bounds: Bounds, leases: &lease::Settings, owner: Owner) -> Self {
        Self {
            bounds,
            leases: leases.clone(),
            owner,
            lease: Lease::new(now, leases),
            runs: BTreeMap::new(),
            unconfirmed: BTreeMap::new(),
            to_hand_back: BTreeMap::new(),
        }
    }

    /// Whether the lease is held, so that runs may start.
    pub fn holds_lease(&self, now: Instant) -> bool {
        self.lease.is_held(now)
    }

    pub fn next_timeout(&self) -> Instant {
        self.lease.next_timeout()
    }

    /// Passes a timeout to the lease. On `Step::StopRuns` the lease is lost: all runs must stop, and the owner id
    /// becomes `next`.
    pub fn on_timeout(&mut self, now: Instant, next: Owner) -> Step {
        let step = self.lease.on_timeout(now);
        self.after(step, now, next)
    }

    /// The store answered a heartbeat of owner `by`.
    pub fn on_heartbeat(&mut self, now: Instant, by: Owner, is_done: bool, next: Owner) -> Step {
        if by != self.owner {
            // The answer to an owner id that was given up.
            return Step::Wait;
        }
        let step = match is_done {
            true => self.lease.on_heartbeat(now),
            false => self.lease.on_failure(now),
        };
        self.after(step, now, next)
    }

    fn after(&mut self, step: Step, now: Instant, next: Owner) -> Step {
        if step == Step::StopRuns {
            self.owner = next;
            self.lease = Lease::new(now, &self.leases);
            // They belong to the old owner id, whose lease expires.
            self.unconfirmed.clear();
            self.to_hand_back.clear();
        }
        step
    }

    pub fn owner(&self) -> Owner {
        self.owner
    }

    pub fn len(&self) -> usize {
        self.runs.len()
    }

    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    pub fn find(&self, key: ResponseKey) -> Option<&R> {
        self.runs.get(&key).map(|entry| &entry.run)
    }

    pub fn find_mut(&mut self, key: ResponseKey) -> Option<&mut R> {
        self.runs.get_mut(&key).map(|entry| &mut entry.run)
    }

    pub fn keys(&self) -> Vec<ResponseKey> {
        self.runs.keys().copied().collect()
    }

    pub fn runs(&self) -> impl Iterator<Item = &R> {
        self.runs.values().map(|entry| &entry.run)
    }

    /// Adds a run. Its record need not be stored yet.
    pub fn insert(
        &mut self,
        now: Instant,
        key: ResponseKey,
        fence: FencingToken,
        run: R,
    ) -> Result<(), RunRefusal> {
        let is_owned = self.owner == fence.owner && self.lease.is_held(now);
        match self.runs.get(&key) {
            Some(entry) if entry.fence == fence => return Err(RunRefusal::AlreadyRunning),
            None if is_owned => {}
            Some(_) | None => return Err(RunRefusal::NotOwner),
        }
        if self.runs.len() as u64 >= self.bounds.running_max {
            return Err(RunRefusal::ReplicaFull);
        }
        let of_tenant = self.runs.keys().filter(|it| it.tenant == key.tenant);
        if of_tenant.count() as u64 >= self.bounds.running_per_tenant_max {
            return Err(RunRefusal::TenantFull);
        }
        let is_stored = false;
        let entry = RunEntry {
            fence,
            is_stored,
            run,
        };
        self.runs.insert(key, entry);
        self.lease.expedite_heartbeat(now);
        Ok(())
    }

    /// The record of a run is stored.
    pub fn on_stored(&mut self, key: ResponseKey) {
        if let Some(entry) = self.runs.get_mut(&key) {
            entry.is_stored = true;
        }
    }

    pub fn remove(&mut self, key: ResponseKey) -> Option<R> {
        self.runs.remove(&key).map(|entry| entry.run)
    }

    /// The runs to check against the store.
    pub fn to_check(&self) -> Vec<(ResponseKey, FencingToken)> {
        let runs = self.runs.iter();
        let stored = runs.filter(|(_, entry)| entry.is_stored);
        stored.map(|(key, entry)| (*key, entry.fence)).collect()
    }

    /// Why a run must stop that the store reports as lost. `None` if it was taken over again since the check.
    pub fn on_checked(
        &self,
        checked: &[(ResponseKey, FencingToken)],
        key: ResponseKey,
        lost: OwnershipLoss,
    ) -> Option<StopReason> {
        let fence = self.runs.get(&key)?.fence;
        let is_same = checked.contains(&(key, fence));
        is_same.then_some(match lost {
            OwnershipLoss::Fenced => StopReason::LeaseLost,
            OwnershipLoss::Gone | OwnershipLoss::Terminal(_) => StopReason::Cancelled,
        })
    }

    pub fn has_room(&self) -> bool {
        (self.runs.len() as u64) < self.bounds.running_max
    }

    /// Whether this orphan may run here.
    pub fn may_take_over(&self, orphan: &Orphan) -> bool {
        self.has_room() && !self.runs.contains_key(&orphan.key)
    }

    /// Take-overs to repeat, before any new one, until the store confirms or denies them.
    pub fn unconfirmed(&self) -> Vec<Orphan> {
        self.unconfirmed.values().copied().collect()
    }

    /// The store answered a take-over by owner `by`.
    pub fn on_take_over(
        &mut self,
        by: Owner,
        orphan: Orphan,
        result: &Result<Takeover, store::Error>,
    ) {
        if by != self.owner {
            return;
        }
        match result {
            Err(store::Error::Unknown { .. }) => {
                self.unconfirmed.insert(orphan.key, orphan);
            }
            // This attempt did nothing, but an earlier one may have succeeded.
            Err(store::Error::Unavailable { .. }) => {}
            _ => {
                self.unconfirmed.remove(&orphan.key);
            }
        }
    }

    /// This owner has the response and cannot run it.
    pub fn hand_back(&mut self, key: ResponseKey, fence: FencingToken) {
        if fence.owner == self.owner {
            self.to_hand_back.insert(key, fence);
        }
    }

    /// Responses that the store lists under owner `by` and that did not run here: their run ended without
    /// storing an end.
    pub fn on_strays(&mut self, by: Owner, strays: &[(ResponseKey, FencingToken)]) {
        for (key, fence) in strays {
            let is_known = self.runs.contains_key(key) || self.unconfirmed.contains_key(key);
            if by == self.owner && !is_known {
                self.hand_back(*key, *fence);
            }
        }
    }

    /// Responses to release.
    pub fn to_hand_back(&self) -> Vec<(ResponseKey, FencingToken)> {
        self.to_hand_back
            .iter()
            .map(|(key, fence)| (*key, *fence))
            .collect()
    }

    /// The store answered the release.
    pub fn on_released(&mut self, key: ResponseKey) {
        self.to_hand_back.remove(&key);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::ids::{ResponseId, Root, Tenant};
    use crate::observe;

    const OWNER: Owner = Owner(1);

    fn key(tenant: u64, own: u128) -> ResponseKey {
        ResponseKey {
            tenant: Tenant::tagged(tenant),
            id: ResponseId::new(Root(1), own),
        }
    }

    /// A table that holds its lease from `now` on.
    fn table(now: Instant) -> RunTable<()> {
        let bounds = Bounds {
            running_max: 3,
            running_per_tenant_max: 2,
        };
        let mut table = RunTable::new(now, bounds, &lease::Settings::default(), OWNER);
        assert_eq!(table.on_timeout(now, Owner(2)), Step::SendHeartbeat);
        assert_eq!(table.on_heartbeat(now, OWNER, true, Owner(2)), Step::Wait);
        table
    }

    #[test]
    fn after_losing_the_lease_the_replica_gets_a_new_owner_id() {
        let now = observe::now();
        let mut table = table(now);
        let late = now + Duration::from_secs(10);
        assert_eq!(table.on_timeout(late, Owner(2)), Step::StopRuns);
        assert_eq!((table.owner(), table.holds_lease(late)), (Owner(2), false));
        assert_eq!(table.on_timeout(late, Owner(3)), Step::SendHeartbeat);
        assert_eq!(table.on_heartbeat(late, OWNER, true, Owner(3)), Step::Wait);
        assert!(!table.holds_lease(late));
        let fence = FencingToken::first(Owner(2));
        assert_eq!(
            table.insert(late, key(1, 1), fence, ()),
            Err(RunRefusal::NotOwner)
        );
        assert_eq!(
            table.on_heartbeat(late, Owner(2), true, Owner(3)),
            Step::Wait
        );
        assert_eq!(table.insert(late, key(1, 1), fence, ()), Ok(()));
    }

    #[test]
    fn runs_are_limited_in_total_and_per_tenant() {
        let now = observe::now();
        let mut table = table(now);
        let fence = FencingToken::first(OWNER);
        let mut insert = |tenant, own| table.insert(now, key(tenant, own), fence, ());
        assert_eq!((insert(1, 1), insert(1, 2)), (Ok(()), Ok(())));
        assert_eq!(insert(1, 3), Err(RunRefusal::TenantFull));
        assert_eq!(insert(2, 4), Ok(()));
        assert_eq!(insert(3, 5), Err(RunRefusal::ReplicaFull));
        assert!(table.remove(key(1, 1)).is_some());
        assert_eq!(table.insert(now, key(3, 5), fence, ()), Ok(()));
        assert_eq!(
            table.insert(now, key(3, 5), fence, ()),
            Err(RunRefusal::AlreadyRunning)
        );
        assert_eq!(
            table.insert(now, key(3, 5), FencingToken::first(Owner(2)), ()),
            Err(RunRefusal::NotOwner)
        );
    }

    #[test]
    fn only_stored_runs_are_checked() {
        let now = observe::now();
        let mut table = table(now);
        let fence = FencingToken::first(OWNER);
        let _ = table.insert(now, key(1, 1), fence, ());
        assert_eq!(table.to_check(), []);
        table.on_stored(key(1, 1));
        assert_eq!(table.to_check(), [(key(1, 1), fence)]);
        let checked = |number| [(key(1, 1), FencingToken { number, ..fence })];
        let lost = OwnershipLoss::Fenced;
        assert_eq!(
            table.on_checked(&checked(1), key(1, 1), lost),
            Some(StopReason::LeaseLost)
        );
        assert_eq!(table.on_checked(&checked(0), key(1, 1), lost), None);
    }

    #[test]
    fn stored_responses_of_this_owner_without_a_run_are_handed_back() {
        let now = observe::now();
        let mut table = table(now);
        let fence = FencingToken::first(OWNER);
        let _ = table.insert(now, key(1, 1), fence, ());
        let orphan = Orphan {
            key: key(1, 2),
            owner: None,
            fencing_number: 0,
        };
        let retry_after = Duration::from_secs(1);
        let reason = "slow".into();
        let unknown = Err(store::Error::Unknown {
            retry_after,
            reason,
        });
        table.on_take_over(OWNER, orphan, &unknown);
        let strays = [key(1, 1), key(1, 2), key(1, 3)].map(|key| (key, fence));
        table.on_strays(Owner(2), &strays);
        assert_eq!(table.to_hand_back(), []);
        table.on_strays(OWNER, &strays);
        assert_eq!(table.to_hand_back(), [(key(1, 3), fence)]);
    }

    #[test]
    fn an_unconfirmed_take_over_is_repeated_until_it_is_confirmed() {
        let mut table = table(observe::now());
        let orphan = Orphan {
            key: key(1, 1),
            owner: None,
            fencing_number: 1,
        };
        let (retry_after, reason) = (Duration::from_secs(1), "down".into());
        table.on_take_over(
            OWNER,
            orphan,
            &Err(store::Error::Unknown {
                retry_after,
                reason,
            }),
        );
        assert_eq!(table.unconfirmed(), [orphan]);
        let reason = "down".into();
        table.on_take_over(
            OWNER,
            orphan,
            &Err(store::Error::Unavailable {
                retry_after,
                reason,
            }),
        );
        assert_eq!(table.unconfirmed(), [orphan]);
        table.on_take_over(OWNER, orphan, &Ok(Takeover::Raced));
        assert_eq!(table.unconfirmed(), []);
    }
}
