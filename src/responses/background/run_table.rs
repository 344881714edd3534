//! What a replica runs, under which name, until when and how much: the owner's side of the store's
//! fences. Pure.

use std::collections::BTreeMap;
use std::time::Instant;

use super::run_state::StopReason;
use crate::store::lease::{self, Lease, Step};
use crate::store::{self, FencingToken, Orphan, Owner, OwnershipLoss, ResponseKey, Takeover};

/// Why a response is not begun here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunRefusal {
    /// Its fence is not this replica's, or no longer; or the lease does not hold.
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

/// See the module. `R` is what a run is driven by.
#[derive(Debug)]
pub struct RunTable<R> {
    bounds: Bounds,
    leases: lease::Settings,
    /// This life's name. One that lost its lease goes on under another.
    owner: Owner,
    lease: Lease,
    runs: BTreeMap<ResponseKey, RunEntry<R>>,
    /// Taken over, or not: the store did not say. Nobody else would look, since their owner lives.
    unconfirmed: BTreeMap<ResponseKey, Orphan>,
    /// Ours, and not run here: to be handed back.
    to_hand_back: BTreeMap<ResponseKey, FencingToken>,
}

#[derive(Debug)]
struct RunEntry<R> {
    fence: FencingToken,
    /// Whether its record is known to have been there.
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

    /// Whether anything may begin here.
    pub fn is_held(&self, now: Instant) -> bool {
        self.lease.is_held(now)
    }

    pub fn next_timeout(&self) -> Instant {
        self.lease.next_timeout()
    }

    /// As the lease says. At `Stop` it is lost, all that runs must stop, and what comes next is `next`'s.
    pub fn on_timeout(&mut self, now: Instant, next: Owner) -> Step {
        let step = self.lease.on_timeout(now);
        self.after(step, now, next)
    }

    /// What the store said to a beat of `by`.
    pub fn on_heartbeat(&mut self, now: Instant, by: Owner, is_done: bool, next: Owner) -> Step {
        if by != self.owner {
            // Of a life that is over.
            return Step::Wait;
        }
        let step = match is_done {
            true => self.lease.on_beat(now),
            false => self.lease.on_failure(now),
        };
        self.after(step, now, next)
    }

    fn after(&mut self, step: Step, now: Instant, next: Owner) -> Step {
        if step == Step::Stop {
            self.owner = next;
            self.lease = Lease::new(now, &self.leases);
            // The lease that they were taken under ends by itself.
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

    /// Takes a entry for a response, whose record need not be there yet.
    pub fn sit(
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
        let own = self.runs.keys().filter(|it| it.tenant == key.tenant);
        if own.count() as u64 >= self.bounds.running_per_tenant_max {
            return Err(RunRefusal::TenantFull);
        }
        let is_stored = false;
        let entry = RunEntry {
            fence,
            is_stored,
            run,
        };
        self.runs.insert(key, entry);
        self.lease.hasten(now);
        Ok(())
    }

    /// Its record is there.
    pub fn on_stored(&mut self, key: ResponseKey) {
        if let Some(entry) = self.runs.get_mut(&key) {
            entry.is_stored = true;
        }
    }

    pub fn leave(&mut self, key: ResponseKey) -> Option<R> {
        self.runs.remove(&key).map(|entry| entry.run)
    }

    /// What the store is asked about.
    pub fn to_check(&self) -> Vec<(ResponseKey, FencingToken)> {
        let runs = self.runs.iter();
        let stored = runs.filter(|(_, entry)| entry.is_stored);
        stored.map(|(key, entry)| (*key, entry.fence)).collect()
    }

    /// What follows of what the store said of one that it was asked about. It may have been lost and taken over
    /// again since; then it is not what was asked about.
    pub fn on_checked(
        &self,
        asked: &[(ResponseKey, FencingToken)],
        key: ResponseKey,
        lost: OwnershipLoss,
    ) -> Option<StopReason> {
        let fence = self.runs.get(&key)?.fence;
        let is_same = asked.contains(&(key, fence));
        is_same.then_some(match lost {
            OwnershipLoss::Fenced => StopReason::LeaseLost,
            OwnershipLoss::Gone | OwnershipLoss::Terminal(_) => StopReason::Cancelled,
        })
    }

    pub fn has_room(&self) -> bool {
        (self.runs.len() as u64) < self.bounds.running_max
    }

    /// Whether there is room for what another replica lost.
    pub fn may_take_over(&self, orphan: &Orphan) -> bool {
        self.has_room() && !self.runs.contains_key(&orphan.key)
    }

    /// Adoptions to be asked for again before any other, until the store says what became of them.
    pub fn unconfirmed(&self) -> Vec<Orphan> {
        self.unconfirmed.values().copied().collect()
    }

    /// What the store said to an adoption by `by`.
    pub fn on_take_over(
        &mut self,
        by: Owner,
        orphan: Orphan,
        said: &Result<Takeover, store::Error>,
    ) {
        if by != self.owner {
            return;
        }
        match said {
            Err(store::Error::Unknown { .. }) => {
                self.unconfirmed.insert(orphan.key, orphan);
            }
            // Not done now; an earlier try may have been.
            Err(store::Error::Unavailable { .. }) => {}
            _ => {
                self.unconfirmed.remove(&orphan.key);
            }
        }
    }

    /// It is this owner's, and cannot be run here.
    pub fn hand_back(&mut self, key: ResponseKey, fence: FencingToken) {
        if fence.owner == self.owner {
            self.to_hand_back.insert(key, fence);
        }
    }

    /// What the store has as `by`'s and was not among `keys` when it was asked: the run of it is over, and its
    /// end is not stored.
    pub fn on_strays(&mut self, by: Owner, strays: &[(ResponseKey, FencingToken)]) {
        for (key, fence) in strays {
            let is_known = self.runs.contains_key(key) || self.unconfirmed.contains_key(key);
            if by == self.owner && !is_known {
                self.hand_back(*key, *fence);
            }
        }
    }

    /// What is to be handed back.
    pub fn to_hand_back(&self) -> Vec<(ResponseKey, FencingToken)> {
        self.to_hand_back
            .iter()
            .map(|(key, fence)| (*key, *fence))
            .collect()
    }

    /// The store said what became of it.
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

    /// One whose lease holds from `now`.
    fn table(now: Instant) -> RunTable<()> {
        let bounds = Bounds {
            running_max: 3,
            running_per_tenant_max: 2,
        };
        let mut table = RunTable::new(now, bounds, &lease::Settings::default(), OWNER);
        assert_eq!(table.on_timeout(now, Owner(2)), Step::Beat);
        assert_eq!(table.on_heartbeat(now, OWNER, true, Owner(2)), Step::Wait);
        table
    }

    #[test]
    fn who_loses_the_lease_goes_on_as_another_owner() {
        let now = observe::now();
        let mut table = table(now);
        let late = now + Duration::from_secs(10);
        assert_eq!(table.on_timeout(late, Owner(2)), Step::Stop);
        assert_eq!((table.owner(), table.is_held(late)), (Owner(2), false));
        assert_eq!(table.on_timeout(late, Owner(3)), Step::Beat);
        assert_eq!(table.on_heartbeat(late, OWNER, true, Owner(3)), Step::Wait);
        assert!(!table.is_held(late));
        let fence = FencingToken::first(Owner(2));
        assert_eq!(
            table.sit(late, key(1, 1), fence, ()),
            Err(RunRefusal::NotOwner)
        );
        assert_eq!(
            table.on_heartbeat(late, Owner(2), true, Owner(3)),
            Step::Wait
        );
        assert_eq!(table.sit(late, key(1, 1), fence, ()), Ok(()));
    }

    #[test]
    fn places_are_bounded_in_all_and_for_a_tenant() {
        let now = observe::now();
        let mut table = table(now);
        let fence = FencingToken::first(OWNER);
        let mut sit = |tenant, own| table.sit(now, key(tenant, own), fence, ());
        assert_eq!((sit(1, 1), sit(1, 2)), (Ok(()), Ok(())));
        assert_eq!(sit(1, 3), Err(RunRefusal::TenantFull));
        assert_eq!(sit(2, 4), Ok(()));
        assert_eq!(sit(3, 5), Err(RunRefusal::ReplicaFull));
        assert!(table.leave(key(1, 1)).is_some());
        assert_eq!(table.sit(now, key(3, 5), fence, ()), Ok(()));
        assert_eq!(
            table.sit(now, key(3, 5), fence, ()),
            Err(RunRefusal::AlreadyRunning)
        );
        assert_eq!(
            table.sit(now, key(3, 5), FencingToken::first(Owner(2)), ()),
            Err(RunRefusal::NotOwner)
        );
    }

    #[test]
    fn only_what_is_known_to_be_stored_is_asked_about() {
        let now = observe::now();
        let mut table = table(now);
        let fence = FencingToken::first(OWNER);
        let _ = table.sit(now, key(1, 1), fence, ());
        assert_eq!(table.to_check(), []);
        table.on_stored(key(1, 1));
        assert_eq!(table.to_check(), [(key(1, 1), fence)]);
        let asked = |fencing_number| {
            [(
                key(1, 1),
                FencingToken {
                    number: fencing_number,
                    ..fence
                },
            )]
        };
        let lost = OwnershipLoss::Fenced;
        assert_eq!(
            table.on_checked(&asked(1), key(1, 1), lost),
            Some(StopReason::LeaseLost)
        );
        assert_eq!(table.on_checked(&asked(0), key(1, 1), lost), None);
    }

    #[test]
    fn what_is_its_own_in_the_store_and_has_no_place_is_handed_back() {
        let now = observe::now();
        let mut table = table(now);
        let fence = FencingToken::first(OWNER);
        let _ = table.sit(now, key(1, 1), fence, ());
        let orphan = Orphan {
            key: key(1, 2),
            owner: None,
            fencing_number: 0,
        };
        let retry_after = Duration::from_secs(1);
        let why = "slow".into();
        let unknown = Err(store::Error::Unknown {
            retry_after,
            reason: why,
        });
        table.on_take_over(OWNER, orphan, &unknown);
        let strays = [key(1, 1), key(1, 2), key(1, 3)].map(|key| (key, fence));
        table.on_strays(Owner(2), &strays);
        assert_eq!(table.to_hand_back(), []);
        table.on_strays(OWNER, &strays);
        assert_eq!(table.to_hand_back(), [(key(1, 3), fence)]);
    }

    #[test]
    fn an_adoption_of_unknown_outcome_is_asked_for_again_until_it_is_known() {
        let mut table = table(observe::now());
        let orphan = Orphan {
            key: key(1, 1),
            owner: None,
            fencing_number: 1,
        };
        let (retry_after, why) = (Duration::from_secs(1), "down".into());
        table.on_take_over(
            OWNER,
            orphan,
            &Err(store::Error::Unknown {
                retry_after,
                reason: why,
            }),
        );
        assert_eq!(table.unconfirmed(), [orphan]);
        let why = "down".into();
        table.on_take_over(
            OWNER,
            orphan,
            &Err(store::Error::Unavailable {
                retry_after,
                reason: why,
            }),
        );
        assert_eq!(table.unconfirmed(), [orphan]);
        table.on_take_over(OWNER, orphan, &Ok(Takeover::Raced));
        assert_eq!(table.unconfirmed(), []);
    }
}
