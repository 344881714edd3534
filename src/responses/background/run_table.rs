//! The runs of one replica, its lease and its limits. Pure.
//!
//! The replica owns its runs under an [`Owner`] id that holds a lease in the store. A lease that was not renewed in
//! time stops nothing: a run stops when the store says that its fencing token is outdated. Without a valid lease the
//! replica takes nothing over.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::run_step::StopReason;
use crate::observe::metrics::words;
use crate::store::lease::{self, Lease, Step};
use crate::store::{self, FencingToken, Orphan, Owner, OwnershipLoss, ResponseKey, Takeover};

words! {
    /// Why a response is not admitted.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum RunRefusal {
        /// Its fencing token belongs to another owner id, or the lease is not held.
        NotOwner = "not_owner",
        /// It runs here already.
        AlreadyRunning = "already_running",
        ReplicaFull = "replica_full",
        TenantFull = "tenant_full",
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
    pub owner: Owner,
    lease: Lease,
    /// Whether the store has had a lease of this owner, so that responses may be created for it.
    pub is_registered: bool,
    /// Owners without a lease, and since when this replica sees that without having lost its own.
    suspects: BTreeMap<Owner, Instant>,
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
            is_registered: false,
            suspects: BTreeMap::new(),
            runs: BTreeMap::new(),
            unconfirmed: BTreeMap::new(),
            to_hand_back: BTreeMap::new(),
        }
    }

    /// Whether the lease is held, so that orphans may be taken over.
    pub fn holds_lease(&self, now: Instant) -> bool {
        self.lease.is_held(now)
    }

    pub fn next_timeout(&self) -> Instant {
        self.lease.next_timeout()
    }

    /// Passes a timeout to the lease.
    pub fn on_timeout(&mut self, now: Instant) -> Step {
        let step = self.lease.on_timeout(now);
        self.after(step)
    }

    /// The store answered a heartbeat of owner `by`. An owner that the store has never accepted becomes `next`: in a
    /// cluster its lease then lies on another node.
    pub fn on_heartbeat(&mut self, now: Instant, by: Owner, is_done: bool, next: Owner) -> Step {
        if by != self.owner {
            // The answer to an owner id that was given up.
            return Step::Wait;
        }
        let step = if is_done {
            self.lease.on_heartbeat(now)
        } else {
            self.lease.on_failure(now)
        };
        self.is_registered |= is_done;
        if !self.is_registered {
            self.owner = next;
        }
        self.after(step)
    }

    fn after(&mut self, step: Step) -> Step {
        if step == Step::Expired {
            // The store may have been away for the others too: they get the time to renew.
            self.suspects.clear();
        }
        step
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
        let is_owned = self.owner == fence.owner && self.is_registered;
        match self.runs.get(&key) {
            Some(entry) if entry.fence == fence => return Err(RunRefusal::AlreadyRunning),
            None if is_owned => {}
            Some(_) | None => return Err(RunRefusal::NotOwner),
        }
        if let Some(refusal) = self.is_full_for(key) {
            return Err(refusal);
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

    pub fn max_per_tenant(&self) -> u64 {
        self.bounds.running_per_tenant_max
    }

    /// From the next response on. What runs goes on.
    pub fn set_max_per_tenant(&mut self, max: u64) {
        self.bounds.running_per_tenant_max = max;
    }

    /// Why a response of this tenant has no room here, if it has none.
    fn is_full_for(&self, key: ResponseKey) -> Option<RunRefusal> {
        if !self.has_room() {
            return Some(RunRefusal::ReplicaFull);
        }
        let of_tenant = self
            .runs
            .keys()
            .filter(|running| running.tenant == key.tenant);
        let is_full = of_tenant.count() as u64 >= self.bounds.running_per_tenant_max;
        is_full.then_some(RunRefusal::TenantFull)
    }

    /// A scan found these orphans; `is_whole`: there are no others.
    pub fn on_orphans(&mut self, now: Instant, orphans: &[Orphan], is_whole: bool) {
        let dead: BTreeSet<Owner> = orphans.iter().filter_map(|orphan| orphan.owner).collect();
        if is_whole {
            self.suspects.retain(|owner, _| dead.contains(owner));
        }
        for owner in dead {
            self.suspects.entry(owner).or_insert(now);
        }
    }

    /// Whether to take this orphan over now. Its owner must have been without a lease for a heartbeat interval, so
    /// that after an outage of the store living owners do not take each other's runs over. The limits are asked
    /// before the store is: an orphan that is taken over and given back has no run.
    pub fn may_take_over(&self, now: Instant, orphan: &Orphan) -> bool {
        if self.runs.contains_key(&orphan.key) {
            return false;
        }
        if self.is_unconfirmed(orphan.key) {
            // What has no room is handed back.
            return true;
        }
        let is_dead = orphan.owner.is_none_or(|owner| {
            let since = self.suspects.get(&owner);
            since.is_some_and(|since| *since + self.leases.heartbeat_interval() <= now)
        });
        is_dead && self.lease.is_held(now) && self.is_full_for(orphan.key).is_none()
    }

    /// Whether a take-over of this orphan was not answered: it may be this owner's already, and then no other takes it.
    pub fn is_unconfirmed(&self, key: ResponseKey) -> bool {
        self.unconfirmed.contains_key(&key)
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
        assert_eq!(table.on_timeout(now), Step::SendHeartbeat);
        assert_eq!(table.on_heartbeat(now, OWNER, true, Owner(2)), Step::Wait);
        table
    }

    fn orphan(of: ResponseKey, owner: Option<Owner>) -> Orphan {
        Orphan {
            key: of,
            owner,
            fencing_number: 1,
        }
    }

    #[test]
    fn an_expired_lease_stops_no_run_and_takes_nothing_over() {
        let now = observe::now();
        let mut table = table(now);
        let fence = FencingToken::first(OWNER);
        assert_eq!(table.insert(now, key(1, 1), fence, ()), Ok(()));
        let late = now + Duration::from_secs(10);
        let released = orphan(key(2, 2), None);
        assert!(table.may_take_over(now, &released));
        assert_eq!(table.on_timeout(late), Step::Expired);
        assert_eq!((table.owner, table.len()), (OWNER, 1));
        assert!(!table.holds_lease(late) && !table.may_take_over(late, &released));
        assert_eq!(table.on_timeout(late), Step::SendHeartbeat);
        assert_eq!(table.on_heartbeat(late, OWNER, true, Owner(3)), Step::Wait);
        assert!(table.holds_lease(late) && table.may_take_over(late, &released));
    }

    #[test]
    fn an_owner_that_the_store_never_accepted_tries_another_id() {
        let now = observe::now();
        let bounds = table(now).bounds;
        let mut table = RunTable::new(now, bounds, &lease::Settings::default(), OWNER);
        assert_eq!(table.on_timeout(now), Step::SendHeartbeat);
        let _ = table.on_heartbeat(now, OWNER, false, Owner(2));
        assert_eq!((table.owner, table.is_registered), (Owner(2), false));
        let fence = FencingToken::first(Owner(2));
        let refused = Err(RunRefusal::NotOwner);
        assert_eq!(table.insert(now, key(1, 1), fence, ()), refused);
        let now = now + Duration::from_secs(1);
        assert_eq!(table.on_timeout(now), Step::SendHeartbeat);
        let _ = table.on_heartbeat(now, Owner(2), true, Owner(3));
        assert_eq!(table.insert(now, key(1, 1), fence, ()), Ok(()));
        let _ = table.on_heartbeat(now, Owner(2), false, Owner(4));
        assert_eq!(table.owner, Owner(2));
    }

    #[test]
    fn after_an_outage_living_owners_have_time_to_renew() {
        let now = observe::now();
        let mut table = table(now);
        let at = |ms| now + Duration::from_millis(ms);
        let dead = orphan(key(1, 1), Some(Owner(9)));
        table.on_orphans(at(0), &[dead], true);
        assert!(!table.may_take_over(at(2_000), &dead));
        // It was seen alive in between.
        table.on_orphans(at(2_500), &[], true);
        table.on_orphans(at(3_500), &[dead], true);
        assert!(!table.may_take_over(at(4_000), &dead));
        assert!(table.may_take_over(at(6_500), &dead));
        // While this replica could not see it, anything may have happened.
        assert_eq!(table.on_timeout(at(10_000)), Step::Expired);
        assert_eq!(table.on_timeout(at(10_000)), Step::SendHeartbeat);
        let _ = table.on_heartbeat(at(10_000), OWNER, true, Owner(3));
        assert!(!table.may_take_over(at(10_000), &dead));
    }

    #[test]
    fn an_orphan_whose_tenant_has_no_room_here_is_left_to_others() {
        let now = observe::now();
        let mut table = table(now);
        let fence = FencingToken::first(OWNER);
        assert_eq!(table.insert(now, key(1, 1), fence, ()), Ok(()));
        assert_eq!(table.insert(now, key(1, 2), fence, ()), Ok(()));
        assert!(!table.may_take_over(now, &orphan(key(1, 3), None)));
        assert!(table.may_take_over(now, &orphan(key(2, 3), None)));
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
    fn another_bound_of_a_tenant_holds_for_its_next_run_and_ends_none() {
        let now = observe::now();
        let mut table = table(now);
        let fence = FencingToken::first(OWNER);
        assert_eq!(table.insert(now, key(1, 1), fence, ()), Ok(()));
        table.set_max_per_tenant(1);
        let refused = Err(RunRefusal::TenantFull);
        assert_eq!(table.insert(now, key(1, 2), fence, ()), refused);
        assert_eq!((table.max_per_tenant(), table.len()), (1, 1));
        table.set_max_per_tenant(2);
        assert_eq!(table.insert(now, key(1, 2), fence, ()), Ok(()));
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
