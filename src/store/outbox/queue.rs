//! The queue of one endpoint: which events wait, which are claimed and until when, which make room. Pure; times are
//! milliseconds of any clock. `redis/outbox_*.lua` does the same in Redis.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use super::event_key::EventKey;
use super::subscriptions::Bounds;
use super::types::{Claim, Claimed, ClaimedEvent, EndEvent, Settlement};

/// Events that one claim drops because of their age, so that no claim takes long.
pub(in crate::store) const MAX_EXPIRED: usize = 100;

/// An address of an endpoint for which no replica has claimed in so long is configured no more. Replicas claim every
/// ten seconds, and every half minute where the endpoint fails.
pub(in crate::store) const IN_USE: Duration = Duration::from_secs(600);

/// Addresses of an endpoint that are remembered. There are two while replicas read a new configuration.
pub(in crate::store) const MAX_ADDRESSES: usize = 8;

/// What became of an event that is added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::store) enum Add {
    Done {
        /// Older events that made room.
        dropped: u64,
    },
    /// It is in the queue already.
    Again,
    /// The endpoint takes no events.
    Disabled,
}

#[derive(Debug, Default)]
pub(in crate::store) struct EventQueue {
    entries: HashMap<EventKey, Entry>,
    /// By when an event can be claimed: at once, after a pause, or when its claim ends.
    due: BTreeSet<(u64, EventKey)>,
    added: BTreeSet<(u64, EventKey)>,
    /// The fingerprint of the endpoint that takes no events.
    disabled: Option<Arc<str>>,
    addresses: Addresses,
}

/// The fingerprints that an endpoint's events were claimed with. A replica whose configuration is older than that of
/// others claims with one that is not the newest.
#[derive(Debug, Default)]
struct Addresses {
    /// In the order in which they became the newest.
    known: Vec<Address>,
    /// The last claim with the newest one. Without claims for [`IN_USE`] all are forgotten.
    newest_at_ms: u64,
}

#[derive(Debug)]
struct Address {
    fingerprint: String,
    /// It was disabled while another one was the newest: claims with it get no events.
    is_disabled: bool,
}

impl Addresses {
    fn on_claim(&mut self, now_ms: u64, claim: &Claim) {
        let fingerprint = &*claim.fingerprint;
        if !self.are_in_use(now_ms) {
            self.known.clear();
        }
        if claim.is_new_address {
            self.known.retain(|known| known.fingerprint != fingerprint);
        }
        if !self
            .known
            .iter()
            .any(|known| known.fingerprint == fingerprint)
        {
            self.known.push(Address {
                fingerprint: fingerprint.to_owned(),
                is_disabled: false,
            });
            let surplus = self.known.len().saturating_sub(MAX_ADDRESSES);
            self.known.drain(..surplus);
        }
        if self.newest() == Some(fingerprint) {
            self.newest_at_ms = now_ms;
        }
    }

    /// Disables an address if others have a newer one; false if they have not.
    fn disable_former(&mut self, now_ms: u64, fingerprint: &str) -> bool {
        if !self.has_newer(now_ms, fingerprint) {
            return false;
        }
        for known in &mut self.known {
            known.is_disabled |= known.fingerprint == fingerprint;
        }
        true
    }

    /// False if none was disabled while another one was the newest.
    fn enable_all(&mut self) -> bool {
        let mut was_disabled = false;
        for known in &mut self.known {
            was_disabled |= std::mem::take(&mut known.is_disabled);
        }
        was_disabled
    }

    fn is_disabled(&self, fingerprint: &str) -> bool {
        let mut known = self.known.iter();
        known.any(|known| known.is_disabled && known.fingerprint == fingerprint)
    }

    /// Whether other replicas have a newer address than this one.
    fn has_newer(&self, now_ms: u64, fingerprint: &str) -> bool {
        let newest = self.newest().filter(|_| self.are_in_use(now_ms));
        newest.is_some_and(|newest| newest != fingerprint)
    }

    fn newest(&self) -> Option<&str> {
        self.known.last().map(|newest| &*newest.fingerprint)
    }

    fn are_in_use(&self, now_ms: u64) -> bool {
        now_ms.saturating_sub(self.newest_at_ms) < millis(IN_USE)
    }
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    event: EndEvent,
    attempt: u32,
    due_ms: u64,
    added_ms: u64,
}

impl EventQueue {
    pub(in crate::store) fn add(
        &mut self,
        now_ms: u64,
        event: EndEvent,
        fingerprint: &str,
        bounds: &Bounds,
    ) -> Add {
        if self.is_disabled(fingerprint) && !self.addresses.has_newer(now_ms, fingerprint) {
            return Add::Disabled;
        }
        if self.entries.contains_key(&event.key) {
            return Add::Again;
        }
        let mut dropped = 0;
        while self.entries.len() as u64 >= bounds.max_events.max(1)
            && let Some((_, oldest)) = self.added.first().copied()
        {
            self.remove(oldest);
            dropped += 1;
        }
        let entry = Entry {
            event,
            attempt: 0,
            due_ms: now_ms,
            added_ms: now_ms,
        };
        self.entries.insert(event.key, entry);
        self.due.insert((now_ms, event.key));
        self.added.insert((now_ms, event.key));
        Add::Done { dropped }
    }

    pub(in crate::store) fn claim(
        &mut self,
        now_ms: u64,
        claim: &Claim,
        bounds: &Bounds,
    ) -> Claimed {
        self.addresses.on_claim(now_ms, claim);
        let fingerprint = &*claim.fingerprint;
        if self.is_disabled(fingerprint) || self.addresses.is_disabled(fingerprint) {
            // What waits may be for a newer address. Else it came while there was one, and nobody takes it any more.
            let is_former = self.addresses.has_newer(now_ms, fingerprint);
            return Claimed {
                dropped_disabled: if is_former { 0 } else { self.clear() },
                is_disabled: true,
                ..Claimed::default()
            };
        }
        let expired = self.drop_expired(now_ms, bounds);
        let mut events = Vec::new();
        while events.len() < claim.max
            && let Some((due_ms, key)) = self.due.first().copied()
            && due_ms <= now_ms
            && let Some(entry) = self.entries.get_mut(&key)
        {
            self.due.remove(&(due_ms, key));
            entry.attempt += 1;
            // Not due at once, so that one claim has no event twice.
            entry.due_ms = now_ms + millis(claim.lease).max(1);
            self.due.insert((entry.due_ms, key));
            events.push(ClaimedEvent {
                event: entry.event,
                attempt: entry.attempt,
                age: Duration::from_millis(now_ms.saturating_sub(entry.added_ms)),
            });
        }
        let until =
            |(due_ms, _): &(u64, EventKey)| Duration::from_millis(due_ms.saturating_sub(now_ms));
        let since = |(added_ms, _): &(u64, EventKey)| {
            Duration::from_millis(now_ms.saturating_sub(*added_ms))
        };
        Claimed {
            events,
            next_due: self.due.first().map(until),
            waiting: self.entries.len() as u64,
            oldest: self.added.first().map(since),
            expired,
            dropped_disabled: 0,
            is_disabled: false,
        }
    }

    pub(in crate::store) fn settle(&mut self, now_ms: u64, settlement: Settlement) -> bool {
        let key = settlement.key;
        let Some(entry) = self.entries.get_mut(&key) else {
            return false;
        };
        if entry.attempt != settlement.attempt {
            return false;
        }
        let Some(pause) = settlement.retry_in else {
            self.remove(key);
            return true;
        };
        self.due.remove(&(entry.due_ms, key));
        entry.due_ms = now_ms + millis(pause);
        self.due.insert((entry.due_ms, key));
        true
    }

    /// Returns how many events were dropped: none if another replica has a newer address of the endpoint.
    pub(in crate::store) fn disable(&mut self, now_ms: u64, fingerprint: &str) -> u64 {
        if self.addresses.disable_former(now_ms, fingerprint) {
            return 0;
        }
        self.disabled = Some(fingerprint.into());
        self.clear()
    }

    pub(in crate::store) fn enable(&mut self) -> bool {
        let was_former_disabled = self.addresses.enable_all();
        self.disabled.take().is_some() || was_former_disabled
    }

    fn is_disabled(&self, fingerprint: &str) -> bool {
        self.disabled.as_deref() == Some(fingerprint)
    }

    /// Returns how many events there were.
    fn clear(&mut self) -> u64 {
        let dropped = self.entries.len() as u64;
        self.entries.clear();
        self.due.clear();
        self.added.clear();
        dropped
    }

    fn drop_expired(&mut self, now_ms: u64, bounds: &Bounds) -> u64 {
        let mut expired = 0;
        while expired < MAX_EXPIRED
            && let Some((added_ms, key)) = self.added.first().copied()
            && added_ms + millis(bounds.max_age) <= now_ms
        {
            self.remove(key);
            expired += 1;
        }
        expired as u64
    }

    fn remove(&mut self, key: EventKey) {
        if let Some(entry) = self.entries.remove(&key) {
            self.due.remove(&(entry.due_ms, key));
            self.added.remove(&(entry.added_ms, key));
        }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX / 2)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ids::{ResponseId, Root, Tenant};
    use crate::store::keys::ResponseKey;
    use crate::store::outbox::{BatchKey, EventType};

    const BOUNDS: Bounds = Bounds {
        max_events: 4,
        max_age: Duration::from_millis(1_000),
    };

    /// Every second one is of a batch.
    fn event(own: u8) -> EndEvent {
        let (tenant, number) = (Tenant::tagged(1), own.into());
        let (key, event_type) = if own.is_multiple_of(2) {
            let id = ResponseId::new(Root(1), number);
            let key = EventKey::Response(ResponseKey { tenant, id });
            (key, EventType::ResponseCompleted)
        } else {
            let key = EventKey::Batch(BatchKey { tenant, number });
            (key, EventType::BatchCompleted)
        };
        EndEvent {
            key,
            event_type,
            created_at: 7,
        }
    }

    fn own(event: &EndEvent) -> u8 {
        match event.key {
            EventKey::Response(key) => key.id.own() as u8,
            EventKey::Batch(key) => key.number as u8,
        }
    }

    fn claim(max: usize, lease_ms: u64) -> Claim {
        Claim {
            max,
            lease: Duration::from_millis(lease_ms),
            fingerprint: "f".to_owned(),
            is_new_address: false,
        }
    }

    /// A claim with a fingerprint, of no events.
    fn look(fingerprint: &str, is_new_address: bool) -> Claim {
        Claim {
            fingerprint: fingerprint.to_owned(),
            is_new_address,
            ..claim(0, 30)
        }
    }

    fn settlement(own: u8, attempt: u32, retry_ms: Option<u64>) -> Settlement {
        Settlement {
            key: event(own).key,
            attempt,
            retry_in: retry_ms.map(Duration::from_millis),
        }
    }

    #[test]
    fn a_claim_that_is_not_settled_ends_with_its_lease() {
        let mut queue = EventQueue::default();
        assert_eq!(
            queue.add(0, event(1), "f", &BOUNDS),
            Add::Done { dropped: 0 }
        );
        assert_eq!(queue.add(1, event(1), "f", &BOUNDS), Add::Again);
        let first = queue.claim(5, &claim(9, 30), &BOUNDS);
        assert_eq!(first.events.len(), 1);
        assert_eq!(first.events[0].age, Duration::from_millis(5));
        assert_eq!(first.next_due, Some(Duration::from_millis(30)));
        assert!(queue.claim(34, &claim(9, 30), &BOUNDS).events.is_empty());
        let second = queue.claim(35, &claim(9, 30), &BOUNDS);
        assert_eq!(second.events[0].attempt, 2);
        // The first replica is late.
        assert!(!queue.settle(36, settlement(1, 1, None)));
        assert!(queue.settle(36, settlement(1, 2, None)));
        assert_eq!(
            queue.claim(37, &claim(9, 30), &BOUNDS),
            Claimed {
                ..Claimed::default()
            }
        );
    }

    #[test]
    fn a_retry_waits_for_its_pause() {
        let mut queue = EventQueue::default();
        let _ = queue.add(0, event(1), "f", &BOUNDS);
        let _ = queue.claim(0, &claim(1, 30), &BOUNDS);
        assert!(queue.settle(10, settlement(1, 1, Some(100))));
        assert!(queue.claim(109, &claim(1, 30), &BOUNDS).events.is_empty());
        assert_eq!(
            queue.claim(110, &claim(1, 30), &BOUNDS).events[0].attempt,
            2
        );
    }

    #[test]
    fn the_oldest_make_room_and_old_ones_are_dropped() {
        let mut queue = EventQueue::default();
        for own in 0..6 {
            let dropped = u64::from(own >= 4);
            assert_eq!(
                queue.add(own.into(), event(own), "f", &BOUNDS),
                Add::Done { dropped }
            );
        }
        let claimed = queue.claim(10, &claim(9, 30), &BOUNDS);
        let kept: Vec<EndEvent> = claimed.events.iter().map(|claimed| claimed.event).collect();
        assert_eq!(kept, [2, 3, 4, 5].map(event));
        let late = queue.claim(1_003, &claim(9, 30), &BOUNDS);
        assert_eq!((late.expired, late.waiting), (2, 2));
    }

    #[test]
    fn a_disabled_endpoint_takes_no_events_until_its_address_changes() {
        let mut queue = EventQueue::default();
        let _ = queue.add(0, event(1), "f", &BOUNDS);
        assert_eq!(queue.disable(0, "f"), 1);
        assert_eq!(queue.add(0, event(2), "f", &BOUNDS), Add::Disabled);
        assert!(queue.claim(0, &claim(9, 30), &BOUNDS).is_disabled);
        assert_eq!(
            queue.add(0, event(3), "g", &BOUNDS),
            Add::Done { dropped: 0 }
        );
        assert!(queue.enable() && !queue.enable());
        assert_eq!(queue.claim(0, &claim(9, 30), &BOUNDS).waiting, 1);
    }

    #[test]
    fn a_disabled_address_drops_nothing_while_a_newer_one_is_in_use() {
        let lapse = millis(IN_USE);
        for (claims, at_ms, dropped) in [
            (vec![(0, "f")], 5, 1),
            (vec![(0, "f"), (1, "g")], 5, 0),
            // A replica that is late claims again.
            (vec![(0, "f"), (1, "g"), (2, "f")], 5, 0),
            (vec![(0, "g"), (1, "f")], 5, 1),
            (vec![(0, "f"), (1, "g")], lapse, 0),
            // Nobody has the newer one any more.
            (vec![(0, "f"), (1, "g")], lapse + 1, 1),
            (vec![(0, "f"), (1, "g"), (lapse + 1, "f")], lapse + 2, 1),
            (vec![(0, "f"), (1, "g"), (lapse, "g")], lapse + 6, 0),
        ] {
            let mut queue = EventQueue::default();
            for &(now_ms, fingerprint) in &claims {
                let _ = queue.claim(now_ms, &look(fingerprint, false), &BOUNDS);
            }
            let _ = queue.add(at_ms, event(1), "f", &BOUNDS);
            assert_eq!(queue.disable(at_ms, "f"), dropped, "{claims:?} {at_ms}");
            let expected = if dropped == 0 {
                Add::Done { dropped: 0 }
            } else {
                Add::Disabled
            };
            let added = queue.add(at_ms, event(2), "f", &BOUNDS);
            assert_eq!(added, expected, "{claims:?} {at_ms}");
        }
    }

    #[test]
    fn an_endpoint_that_moves_back_has_its_former_address_as_the_newest() {
        let mut queue = EventQueue::default();
        for (number, moved) in ["f", "g", "f"].into_iter().enumerate() {
            let claimed = queue.claim(number as u64, &look(moved, true), &BOUNDS);
            assert!(!claimed.is_disabled);
        }
        // A replica that is late: what ends there is for the newest, too.
        let _ = queue.claim(5, &look("g", false), &BOUNDS);
        let _ = queue.add(5, event(1), "g", &BOUNDS);
        assert_eq!(queue.disable(6, "g"), 0);
        assert_eq!(queue.disable(6, "f"), 1);
        assert_eq!(queue.add(7, event(2), "f", &BOUNDS), Add::Disabled);
    }

    #[test]
    fn a_disabled_address_that_is_the_newest_again_drops_what_waits() {
        let mut queue = EventQueue::default();
        let _ = queue.claim(0, &look("f", false), &BOUNDS);
        assert_eq!(queue.disable(1, "f"), 0);
        let _ = queue.claim(2, &look("g", true), &BOUNDS);
        let _ = queue.add(3, event(1), "g", &BOUNDS);
        let late = queue.claim(4, &look("f", false), &BOUNDS);
        assert_eq!((late.is_disabled, late.dropped_disabled), (true, 0));
        let back = queue.claim(5, &look("f", true), &BOUNDS);
        assert_eq!((back.is_disabled, back.dropped_disabled), (true, 1));
        assert_eq!(queue.add(6, event(1), "f", &BOUNDS), Add::Disabled);
    }

    #[test]
    fn a_former_address_that_is_disabled_does_not_enable_the_newest() {
        let mut queue = EventQueue::default();
        let _ = queue.claim(0, &look("f", false), &BOUNDS);
        let _ = queue.claim(1, &look("g", true), &BOUNDS);
        assert_eq!(queue.disable(2, "g"), 0);
        let added = queue.add(3, event(1), "f", &BOUNDS);
        assert_eq!(added, Add::Done { dropped: 0 });
        assert!(!queue.claim(4, &look("f", false), &BOUNDS).is_disabled);
        assert_eq!(queue.disable(5, "f"), 0);
        assert!(queue.claim(6, &look("f", false), &BOUNDS).is_disabled);
        let newest = queue.claim(7, &look("g", false), &BOUNDS);
        assert_eq!((newest.is_disabled, newest.dropped_disabled), (true, 1));
        // An endpoint that moves takes events again.
        assert!(!queue.claim(8, &look("f", true), &BOUNDS).is_disabled);
    }

    /// This is so after a restart with the former configuration: nobody says that its address is a new one.
    #[test]
    fn a_former_address_that_is_enabled_has_events_again_and_is_no_newer_than_before() {
        let mut queue = EventQueue::default();
        let _ = queue.claim(0, &look("f", false), &BOUNDS);
        let _ = queue.claim(1, &look("g", true), &BOUNDS);
        assert_eq!(queue.disable(2, "f"), 0);
        let _ = queue.add(3, event(1), "f", &BOUNDS);
        assert!(queue.claim(4, &look("f", false), &BOUNDS).is_disabled);
        assert!(queue.enable() && !queue.enable());
        let claimed = queue.claim(5, &look("f", false), &BOUNDS);
        assert_eq!((claimed.is_disabled, claimed.waiting), (false, 1));
        // Others still have the newer one.
        assert_eq!(queue.disable(6, "f"), 0);
        assert_eq!(queue.claim(7, &look("g", false), &BOUNDS).waiting, 1);
    }

    #[test]
    fn few_addresses_of_an_endpoint_are_remembered() {
        let mut addresses = Addresses::default();
        for number in 0..100 {
            addresses.on_claim(number, &look(&number.to_string(), false));
        }
        assert_eq!(addresses.known.len(), MAX_ADDRESSES);
        assert!(addresses.has_newer(100, "98") && !addresses.has_newer(100, "99"));
    }

    #[derive(Clone, Debug)]
    enum Step {
        Wait(u64),
        Add(u8),
        Claim(usize),
        /// Settles the claim at this place among the claims so far.
        Settle(prop::sample::Index, Option<u64>),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0_u64..400).prop_map(Step::Wait),
            (0_u8..12).prop_map(Step::Add),
            (0_usize..4).prop_map(Step::Claim),
            (any::<prop::sample::Index>(), prop::option::of(0_u64..200))
                .prop_map(|(index, retry)| Step::Settle(index, retry)),
        ]
    }

    proptest! {
        /// Against a list of events: each is claimed by one caller at a time, never before it is due, and leaves the
        /// queue only when it is settled, too old, or makes room.
        #[test]
        fn an_event_has_one_claim_at_a_time(steps in prop::collection::vec(step(), 1..80)) {
            const LEASE: u64 = 50;
            let (mut queue, mut now) = (EventQueue::default(), 0);
            // Event, when it was added, when it is due, attempts.
            let mut model: Vec<(EndEvent, u64, u64, u32)> = Vec::new();
            let mut claims: Vec<(u8, u32)> = Vec::new();
            for step in steps {
                match step {
                    Step::Wait(ms) => now += ms,
                    Step::Add(number) => {
                        let added = queue.add(now, event(number), "f", &BOUNDS);
                        let is_known = model.iter().any(|(known, ..)| own(known) == number);
                        prop_assert_eq!(added == Add::Again, is_known);
                        if !is_known {
                            if model.len() == 4 {
                                let oldest = model.iter().enumerate();
                                let oldest = oldest.min_by_key(|(_, entry)| (entry.1, entry.0.key)).unwrap().0;
                                model.remove(oldest);
                            }
                            model.push((event(number), now, now, 0));
                        }
                    }
                    Step::Claim(max) => {
                        let claimed = queue.claim(now, &claim(max, LEASE), &BOUNDS);
                        let before = model.len();
                        model.retain(|entry| entry.1 + 1_000 > now);
                        prop_assert_eq!(claimed.expired as usize, before - model.len());
                        let due = model.iter().filter(|entry| entry.2 <= now).count();
                        prop_assert_eq!(claimed.events.len(), due.min(max));
                        prop_assert_eq!(claimed.waiting as usize, model.len());
                        for event in claimed.events {
                            let entry = model.iter_mut().find(|entry| entry.0 == event.event);
                            let entry = entry.expect("it was added");
                            prop_assert!(entry.2 <= now);
                            prop_assert_eq!(event.attempt, entry.3 + 1);
                            (entry.2, entry.3) = (now + LEASE, event.attempt);
                            claims.push((own(&event.event), event.attempt));
                        }
                    }
                    Step::Settle(index, retry) => {
                        if claims.is_empty() {
                            continue;
                        }
                        let (number, attempt) = claims[index.index(claims.len())];
                        let settled = queue.settle(now, settlement(number, attempt, retry));
                        let place = model.iter().position(|entry| own(&entry.0) == number && entry.3 == attempt);
                        prop_assert_eq!(settled, place.is_some());
                        if let Some(place) = place {
                            match retry {
                                Some(ms) => model[place].2 = now + ms,
                                None => drop(model.remove(place)),
                            }
                        }
                    }
                }
            }
        }
    }
}
