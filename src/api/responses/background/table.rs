//! What a replica runs, under which name, and how many it may: the owner's side of the store's fences.
//! Pure.

use std::collections::BTreeMap;

use crate::store;
use crate::store::Adoption;
use crate::store::Fence;
use crate::store::Key;
use crate::store::Lost;
use crate::store::Orphan;
use crate::store::Owner;

use super::course::Stop;

/// Why a response is not begun here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// Its fence is not this replica's, or no longer.
    NotOwned,
    Full,
    TenantFull,
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
    /// This life's name. One that lost its lease goes on under another.
    owner: Owner,
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
    pub(crate) fn new(bounds: Bounds, owner: Owner) -> Self {
        Self {
            bounds,
            owner,
            places: BTreeMap::new(),
            doubtful: BTreeMap::new(),
            unseated: BTreeMap::new(),
        }
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

    pub(crate) fn runs(&self) -> impl Iterator<Item = &R> {
        self.places.values().map(|place| &place.run)
    }

    /// Takes a place for a response, whose record need not be there yet.
    pub(crate) fn sit(&mut self, key: Key, fence: Fence, run: R) -> Result<(), Refused> {
        if self.owner != fence.owner || self.places.contains_key(&key) {
            return Err(Refused::NotOwned);
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
        Ok(())
    }

    /// Its record is there.
    pub(crate) fn on_stored(&mut self, key: Key) {
        if let Some(place) = self.places.get_mut(&key) {
            place.is_stored = true;
        }
    }

    pub(crate) fn leave(&mut self, key: Key) {
        self.places.remove(&key);
    }

    /// The lease is lost: all that runs must stop, and what comes next is another owner's.
    pub(crate) fn lose(&mut self, next: Owner) {
        self.owner = next;
        // The lease that they were taken under ends by itself.
        self.doubtful.clear();
        self.unseated.clear();
    }

    /// What the store is asked about.
    pub(crate) fn to_check(&self) -> Vec<(Key, Fence)> {
        let places = self.places.iter();
        let stored = places.filter(|(_, place)| place.is_stored);
        stored.map(|(key, place)| (*key, place.fence)).collect()
    }

    /// What follows of what the store said.
    pub(crate) fn on_checked(&self, lost: Lost) -> Stop {
        match lost {
            Lost::Fenced => Stop::Lost,
            Lost::Gone | Lost::Terminal(_) => Stop::Ended,
        }
    }

    /// Whether there is room for what another replica lost.
    pub(crate) fn may_adopt(&self, orphan: &Orphan) -> bool {
        (self.places.len() as u64) < self.bounds.running_max
            && !self.places.contains_key(&orphan.key)
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
    use crate::ids::ResponseId;
    use crate::ids::Root;
    use crate::ids::Tenant;

    const OWNER: Owner = Owner(1);

    fn key(tenant: u64, own: u128) -> Key {
        Key {
            tenant: Tenant::tagged(tenant),
            id: ResponseId::new(Root(1), own),
        }
    }

    fn table() -> Table<()> {
        let bounds = Bounds {
            running_max: 3,
            running_per_tenant_max: 2,
        };
        Table::new(bounds, OWNER)
    }

    #[test]
    fn places_are_bounded_in_all_and_for_a_tenant() {
        let mut table = table();
        let fence = Fence::first(OWNER);
        let mut sit = |tenant, own| table.sit(key(tenant, own), fence, ());
        assert_eq!((sit(1, 1), sit(1, 2)), (Ok(()), Ok(())));
        assert_eq!(sit(1, 3), Err(Refused::TenantFull));
        assert_eq!(sit(2, 4), Ok(()));
        assert_eq!(sit(3, 5), Err(Refused::Full));
        table.leave(key(1, 1));
        assert_eq!(table.sit(key(3, 5), fence, ()), Ok(()));
        assert_eq!(
            table.sit(key(3, 5), Fence::first(Owner(2)), ()),
            Err(Refused::NotOwned)
        );
    }

    #[test]
    fn only_what_is_known_to_be_stored_is_asked_about() {
        let mut table = table();
        let fence = Fence::first(OWNER);
        let _ = table.sit(key(1, 1), fence, ());
        assert_eq!(table.to_check(), []);
        table.on_stored(key(1, 1));
        assert_eq!(table.to_check(), [(key(1, 1), fence)]);
    }

    #[test]
    fn an_adoption_of_unknown_outcome_is_asked_for_again_until_it_is_known() {
        let mut table = table();
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
