//! What a replica runs, under which name, until when and how much: the owner's side of the store's
//! fences. Pure.

use std::collections::BTreeMap;
use std::time::Instant;

use super::course::Stop;
use crate::store::lease::{self, Lease, Step};
use crate::store::{self, Adoption, Fence, Key, Lost, Orphan, Owner};

/// Why a response is not begun here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// Its fence is not this replica's, or no longer; or the lease does not hold.
    NotOwned,
    /// It runs here already.
    Seated,
    Full,
    TenantFull,
}

impl Refused {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::NotOwned => "stopping",
            Self::Seated => "seated",
            Self::Full => "replica_full",
            Self::TenantFull => "tenant_full",
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) running_max: u64,
    pub(crate) running_per_tenant_max: u64,
}

/// See the module. `R` is what a run is driven by.
#[derive(Debug)]
pub(crate) struct Table<R> {
    bounds: Bounds,
    leases: lease::Settings,
    /// This life's name. One that lost its lease goes on under another.
    owner: Owner,
    lease: Lease,
    places: BTreeMap<Key, Place<R>>,
    /// Taken over, or not: the store did not say. Nobody else would look, since their owner lives.
    doubtful: BTreeMap<Key, Orphan>,
    /// Ours, and not run here: to be handed back.
    unseated: BTreeMap<Key, Fence>,
}

#[derive(Debug)]
struct Place<R> {
    fence: Fence,
    /// Whether its record is known to have been there.
    is_stored: bool,
    run: R,
}

impl<R> Table<R> {
    pub(crate) fn new(
        now: Instant,
        bounds: Bounds,
        leases: &lease::Settings,
        owner: Owner,
    ) -> Self {
        Self {
            bounds,
            leases: leases.clone(),
            owner,
            lease: Lease::new(now, leases),
            places: BTreeMap::new(),
            doubtful: BTreeMap::new(),
            unseated: BTreeMap::new(),
        }
    }

    /// Whether anything may begin here.
    pub(crate) fn is_held(&self, now: Instant) -> bool {
        self.lease.is_held(now)
    }

    pub(crate) fn next_timeout(&self) -> Instant {
        self.lease.next_timeout()
    }

    /// As the lease says. At `Stop` it is lost, all that runs must stop, and what comes next is `next`'s.
    pub(crate) fn on_timeout(&mut self, now: Instant, next: Owner) -> Step {
        let step = self.lease.on_timeout(now);
        self.after(step, now, next)
    }

    /// What the store said to a beat of `by`.
    pub(crate) fn on_beat(&mut self, now: Instant, by: Owner, is_done: bool, next: Owner) -> Step {
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
            self.doubtful.clear();
            self.unseated.clear();
        }
        step
    }

    pub(crate) fn owner(&self) -> Owner {
        self.owner
    }

    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    pub(crate) fn find(&self, key: Key) -> Option<&R> {
        self.places.get(&key).map(|place| &place.run)
    }

    pub(crate) fn find_mut(&mut self, key: Key) -> Option<&mut R> {
        self.places.get_mut(&key).map(|place| &mut place.run)
    }

    pub(crate) fn keys(&self) -> Vec<Key> {
        self.places.keys().copied().collect()
    }

    pub(crate) fn runs(&self) -> impl Iterator<Item = &R> {
        self.places.values().map(|place| &place.run)
    }

    /// Takes a place for a response, whose record need not be there yet.
    pub(crate) fn sit(
        &mut self,
        now: Instant,
        key: Key,
        fence: Fence,
        run: R,
    ) -> Result<(), Refused> {
        let is_owned = self.owner == fence.owner && self.lease.is_held(now);
        match self.places.get(&key) {
            Some(place) if place.fence == fence => return Err(Refused::Seated),
            None if is_owned => {}
            Some(_) | None => return Err(Refused::NotOwned),
        }
        if self.places.len() as u64 >= self.bounds.running_max {
            return Err(Refused::Full);
        }
        let own = self.places.keys().filter(|it| it.tenant == key.tenant);
        if own.count() as u64 >= self.bounds.running_per_tenant_max {
            return Err(Refused::TenantFull);
        }
        let is_stored = false;
        let place = Place {
            fence,
            is_stored,
            run,
        };
        self.places.insert(key, place);
        self.lease.hasten(now);
        Ok(())
    }

    /// Its record is there.
    pub(crate) fn on_stored(&mut self, key: Key) {
        if let Some(place) = self.places.get_mut(&key) {
            place.is_stored = true;
        }
    }

    pub(crate) fn leave(&mut self, key: Key) -> Option<R> {
        self.places.remove(&key).map(|place| place.run)
    }

    /// What the store is asked about.
    pub(crate) fn to_check(&self) -> Vec<(Key, Fence)> {
        let places = self.places.iter();
        let stored = places.filter(|(_, place)| place.is_stored);
        stored.map(|(key, place)| (*key, place.fence)).collect()
    }

    /// What follows of what the store said of one that it was asked about. It may have been lost and taken over
    /// again since; then it is not what was asked about.
    pub(crate) fn on_checked(&self, asked: &[(Key, Fence)], key: Key, lost: Lost) -> Option<Stop> {
        let fence = self.places.get(&key)?.fence;
        let is_same = asked.contains(&(key, fence));
        is_same.then_some(match lost {
            Lost::Fenced => Stop::Lost,
            Lost::Gone | Lost::Terminal(_) => Stop::Ended,
        })
    }

    pub(crate) fn has_room(&self) -> bool {
        (self.places.len() as u64) < self.bounds.running_max
    }

    /// Whether there is room for what another replica lost.
    pub(crate) fn may_adopt(&self, orphan: &Orphan) -> bool {
        self.has_room() && !self.places.contains_key(&orphan.key)
    }

    /// Adoptions to be asked for again before any other, until the store says what became of them.
    pub(crate) fn doubtful(&self) -> Vec<Orphan> {
        self.doubtful.values().copied().collect()
    }

    /// What the store said to an adoption by `by`.
    pub(crate) fn on_adoption(
        &mut self,
        by: Owner,
        orphan: Orphan,
        said: &Result<Adoption, store::Error>,
    ) {
        if by != self.owner {
            return;
        }
        match said {
            Err(store::Error::Unknown { .. }) => {
                self.doubtful.insert(orphan.key, orphan);
            }
            // Not done now; an earlier try may have been.
            Err(store::Error::Unavailable { .. }) => {}
            _ => {
                self.doubtful.remove(&orphan.key);
            }
        }
    }

    /// It is this owner's, and cannot be run here.
    pub(crate) fn on_unseated(&mut self, key: Key, fence: Fence) {
        if fence.owner == self.owner {
            self.unseated.insert(key, fence);
        }
    }

    /// What the store has as `by`'s and was not among `keys` when it was asked: the run of it is over, and its
    /// end is not stored.
    pub(crate) fn on_strays(&mut self, by: Owner, strays: &[(Key, Fence)]) {
        for (key, fence) in strays {
            let is_known = self.places.contains_key(key) || self.doubtful.contains_key(key);
            if by == self.owner && !is_known {
                self.on_unseated(*key, *fence);
            }
        }
    }

    /// What is to be handed back.
    pub(crate) fn unseated(&self) -> Vec<(Key, Fence)> {
        self.unseated
            .iter()
            .map(|(key, fence)| (*key, *fence))
            .collect()
    }

    /// The store said what became of it.
    pub(crate) fn on_released(&mut self, key: Key) {
        self.unseated.remove(&key);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::ids::{ResponseId, Root, Tenant};
    use crate::observe;

    const OWNER: Owner = Owner(1);

    fn key(tenant: u64, own: u128) -> Key {
        Key {
            tenant: Tenant::tagged(tenant),
            id: ResponseId::new(Root(1), own),
        }
    }

    /// One whose lease holds from `now`.
    fn table(now: Instant) -> Table<()> {
        let bounds = Bounds {
            running_max: 3,
            running_per_tenant_max: 2,
        };
        let mut table = Table::new(now, bounds, &lease::Settings::default(), OWNER);
        assert_eq!(table.on_timeout(now, Owner(2)), Step::Beat);
        assert_eq!(table.on_beat(now, OWNER, true, Owner(2)), Step::Wait);
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
        assert_eq!(table.on_beat(late, OWNER, true, Owner(3)), Step::Wait);
        assert!(!table.is_held(late));
        let fence = Fence::first(Owner(2));
        assert_eq!(
            table.sit(late, key(1, 1), fence, ()),
            Err(Refused::NotOwned)
        );
        assert_eq!(table.on_beat(late, Owner(2), true, Owner(3)), Step::Wait);
        assert_eq!(table.sit(late, key(1, 1), fence, ()), Ok(()));
    }

    #[test]
    fn places_are_bounded_in_all_and_for_a_tenant() {
        let now = observe::now();
        let mut table = table(now);
        let fence = Fence::first(OWNER);
        let mut sit = |tenant, own| table.sit(now, key(tenant, own), fence, ());
        assert_eq!((sit(1, 1), sit(1, 2)), (Ok(()), Ok(())));
        assert_eq!(sit(1, 3), Err(Refused::TenantFull));
        assert_eq!(sit(2, 4), Ok(()));
        assert_eq!(sit(3, 5), Err(Refused::Full));
        assert!(table.leave(key(1, 1)).is_some());
        assert_eq!(table.sit(now, key(3, 5), fence, ()), Ok(()));
        assert_eq!(table.sit(now, key(3, 5), fence, ()), Err(Refused::Seated));
        assert_eq!(
            table.sit(now, key(3, 5), Fence::first(Owner(2)), ()),
            Err(Refused::NotOwned)
        );
    }

    #[test]
    fn only_what_is_known_to_be_stored_is_asked_about() {
        let now = observe::now();
        let mut table = table(now);
        let fence = Fence::first(OWNER);
        let _ = table.sit(now, key(1, 1), fence, ());
        assert_eq!(table.to_check(), []);
        table.on_stored(key(1, 1));
        assert_eq!(table.to_check(), [(key(1, 1), fence)]);
        let asked = |epoch| [(key(1, 1), Fence { epoch, ..fence })];
        let lost = Lost::Fenced;
        assert_eq!(
            table.on_checked(&asked(1), key(1, 1), lost),
            Some(Stop::Lost)
        );
        assert_eq!(table.on_checked(&asked(0), key(1, 1), lost), None);
    }

    #[test]
    fn what_is_its_own_in_the_store_and_has_no_place_is_handed_back() {
        let now = observe::now();
        let mut table = table(now);
        let fence = Fence::first(OWNER);
        let _ = table.sit(now, key(1, 1), fence, ());
        let orphan = Orphan {
            key: key(1, 2),
            owner: None,
            epoch: 0,
        };
        let retry_after = Duration::from_secs(1);
        let why = "slow".into();
        let unknown = Err(store::Error::Unknown { retry_after, why });
        table.on_adoption(OWNER, orphan, &unknown);
        let strays = [key(1, 1), key(1, 2), key(1, 3)].map(|key| (key, fence));
        table.on_strays(Owner(2), &strays);
        assert_eq!(table.unseated(), []);
        table.on_strays(OWNER, &strays);
        assert_eq!(table.unseated(), [(key(1, 3), fence)]);
    }

    #[test]
    fn an_adoption_of_unknown_outcome_is_asked_for_again_until_it_is_known() {
        let mut table = table(observe::now());
        let orphan = Orphan {
            key: key(1, 1),
            owner: None,
            epoch: 1,
        };
        let (retry_after, why) = (Duration::from_secs(1), "down".into());
        table.on_adoption(
            OWNER,
            orphan,
            &Err(store::Error::Unknown { retry_after, why }),
        );
        assert_eq!(table.doubtful(), [orphan]);
        let why = "down".into();
        table.on_adoption(
            OWNER,
            orphan,
            &Err(store::Error::Unavailable { retry_after, why }),
        );
        assert_eq!(table.doubtful(), [orphan]);
        table.on_adoption(OWNER, orphan, &Ok(Adoption::Raced));
        assert_eq!(table.doubtful(), []);
    }
}
