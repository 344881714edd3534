//! Who has how much of the memory of all clients' bodies, and which body that waits for memory is next. Pure.
//!
//! An owner (a tenant, or a client's address) gets no more than it leaves to all others. So there is always room for one that
//! has little, and who has much waits for its own bodies to end. Bodies that are kept after their requests have ended
//! get at most half as much on top, and leave their owner its share.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

use rustc_hash::FxHashMap;

use crate::ids::ClientKey;

/// How far a body has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    /// It has bytes that count for its owner, and needs more.
    Growing,
    /// The first of its bytes have come that must count.
    Beginning,
    /// It is announced. Its bytes are not counted yet: they may never come.
    New,
    /// It is kept, and no client waits for it: it takes what the bodies that wait leave.
    Kept,
}

/// A body's place among those that wait: those that have memory come first, since they end and give it back; then those of a
/// higher priority, then older ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) stage: Stage,
    pub(super) priority: Reverse<i32>,
    pub(super) number: u64,
}

/// What a body needs next.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ask {
    pub(super) place: Place,
    pub(super) owner: ClientKey,
    /// Bytes that it needs.
    pub(super) more: u64,
    /// Bytes that it has.
    pub(super) has: u64,
    /// Short bodies may still come once their owner has its share of long ones.
    pub(super) is_small: bool,
}

impl Ask {
    /// It has bytes that count for its owner.
    fn is_holder(&self) -> bool {
        self.place.stage == Stage::Growing
    }

    fn is_new(&self) -> bool {
        self.place.stage == Stage::New
    }

    /// Bytes that it has and that do not count for its owner yet.
    fn unowned(&self) -> u64 {
        if self.is_holder() { 0 } else { self.has }
    }
}

/// Everybody's part of the memory, and the bodies that wait, each with a `T` to tell it by.
#[derive(Debug)]
pub(super) struct Shares<T> {
    pub(super) max: u64,
    /// All bytes, also those without an owner, which come and go without this.
    used: Arc<AtomicU64>,
    owners: FxHashMap<ClientKey, Owner<T>>,
    /// The first waiting body of each owner.
    heads: BTreeSet<(Place, ClientKey)>,
    /// Bodies whose bytes count for their owner, without those that are kept, and how many of them wait.
    holders: usize,
    waiting_holders: usize,
    pub(super) waiting: usize,
    /// Bytes that all owners keep after their requests have ended.
    kept: u64,
    /// Bytes that were asked for of requests in the queue and have not come back yet.
    expected: u64,
}

#[derive(Debug)]
struct Owner<T> {
    bytes: u64,
    /// Those of them that are kept after their requests have ended.
    kept: u64,
    waiting: BTreeMap<Place, (Ask, T)>,
}

impl<T> Default for Owner<T> {
    fn default() -> Self {
        Self {
            bytes: 0,
            kept: 0,
            waiting: BTreeMap::new(),
        }
    }
}

impl<T> Owner<T> {
    fn head(&self) -> Option<Place> {
        self.waiting.keys().next().copied()
    }
}

impl<T> Shares<T> {
    pub(super) fn new(max: u64, used: Arc<AtomicU64>) -> Self {
        Self {
            max,
            used,
            owners: FxHashMap::default(),
            heads: BTreeSet::new(),
            holders: 0,
            waiting_holders: 0,
            waiting: 0,
            kept: 0,
            expected: 0,
        }
    }

    /// Gives a body what it needs, if it would not have to wait: the owners of all bodies before it have more. None waits
    /// for another owner's body to which only kept ones can give room, and one that is kept does not wait for bytes of
    /// another owner that may never come.
    pub(super) fn try_now(&mut self, ask: &Ask) -> bool {
        let bytes = self.bytes_before_others(&ask.place, ask.owner);
        let passes = |place: &Place, owner: ClientKey| {
            let is_only_announced = place.stage == Stage::New && owner != ask.owner;
            ask.place.stage == Stage::Kept && is_only_announced
        };
        let mut before = self.heads.range(..(ask.place, ask.owner));
        let is_next = before.all(|(place, owner)| {
            passes(place, *owner)
                || bytes < self.bytes_before_others(place, *owner)
                || (*owner != ask.owner && !self.may_fit_at_last(place, *owner))
        });
        is_next && self.grant(ask)
    }

    /// Gives memory to a body that is kept, if it would not have to wait and its owner may keep so much.
    pub(super) fn try_keep(&mut self, ask: &Ask) -> bool {
        let is_granted = self.may_keep(ask.owner, ask.more, 0) && self.try_now(ask);
        if is_granted {
            self.on_kept(ask.owner, ask.more);
        }
        is_granted
    }

    /// Adds a body to those that wait, and settles.
    pub(super) fn enter(&mut self, ask: Ask, waker: T) -> Vec<(T, bool)> {
        let owner = self.owners.entry(ask.owner).or_default();
        if let Some(head) = owner.head() {
            self.heads.remove(&(head, ask.owner));
        }
        owner.waiting.insert(ask.place, (ask, waker));
        if let Some(head) = owner.head() {
            self.heads.insert((head, ask.owner));
        }
        self.waiting += 1;
        self.waiting_holders += usize::from(ask.is_holder());
        self.settle()
    }

    /// A body that waits gives up. False if its wait has ended before.
    pub(super) fn leave(&mut self, ask: &Ask) -> bool {
        let has_left = self.remove(ask.place, ask.owner).is_some();
        self.forget(ask.owner);
        has_left
    }

    /// Takes back what a body was given that does not want it any more.
    pub(super) fn take_back(&mut self, ask: &Ask) {
        if ask.is_new() {
            return;
        }
        self.used.fetch_sub(ask.more, SeqCst);
        if let Some(owner) = self.owners.get_mut(&ask.owner) {
            owner.bytes -= ask.more + ask.unowned();
        }
        self.holders -= usize::from(!ask.is_holder());
        self.forget(ask.owner);
    }

    /// A body has ended whose bytes counted for its owner.
    pub(super) fn give_back(&mut self, owner: ClientKey, bytes: u64) {
        self.holders -= 1;
        self.give(owner, bytes);
    }

    /// A body is kept for long from now on, if its owner may keep so much: then its bytes count for its owner.
    /// `is_owned`: they did so before. Those that wait do not wait for its end.
    pub(super) fn keep(&mut self, owner: ClientKey, bytes: u64, is_owned: bool) -> bool {
        if bytes == 0 {
            return true;
        }
        let unowned = if is_owned { 0 } else { bytes };
        if !self.may_keep(owner, bytes, unowned) {
            return false;
        }
        if !is_owned {
            self.owners.entry(owner).or_default().bytes += bytes;
            self.holders += 1;
        }
        self.on_kept(owner, bytes);
        true
    }

    fn may_keep(&self, owner: ClientKey, bytes: u64, unowned: u64) -> bool {
        self.may_keep_of(owner, bytes, self.free() + self.bytes_of(owner) + unowned)
    }

    /// Whether an owner may keep a body of this size once all bodies have ended but those that are kept.
    pub(super) fn may_keep_at_last(&self, owner: ClientKey, bytes: u64) -> bool {
        let free = self.max.saturating_sub(self.kept);
        self.may_keep_of(owner, bytes, free + self.kept_of(owner))
    }

    /// Without this, one after the other, what runs for long could take all memory: its owner's share does not count
    /// what is kept. One body is kept whatever its size: it would never find more room. `room`: what is free, and what
    /// its owner has.
    fn may_keep_of(&self, owner: ClientKey, bytes: u64, room: u64) -> bool {
        let kept = self.kept_of(owner);
        let share = room / 2;
        kept == 0 || kept + bytes <= share / 2
    }

    fn on_kept(&mut self, owner: ClientKey, bytes: u64) {
        self.holders -= 1;
        self.kept += bytes;
        if let Some(owner) = self.owners.get_mut(&owner) {
            owner.kept += bytes;
        }
    }

    /// A body has ended that was kept.
    pub(super) fn give_back_kept(&mut self, owner: ClientKey, bytes: u64) {
        self.kept -= bytes;
        if let Some(owner) = self.owners.get_mut(&owner) {
            owner.kept -= bytes;
        }
        self.give(owner, bytes);
    }

    fn give(&mut self, owner: ClientKey, bytes: u64) {
        self.used.fetch_sub(bytes, SeqCst);
        self.expected = self.expected.saturating_sub(bytes);
        if let Some(owner) = self.owners.get_mut(&owner) {
            owner.bytes -= bytes;
        }
        self.forget(owner);
    }

    /// Bytes that have to come back before a body that waits can have what it needs, beyond those that are expected. 0 if
    /// they would not help.
    pub(super) fn lacks(&self, ask: &Ask) -> u64 {
        if !self.fits_at_last(ask) {
            return 0;
        }
        let own = self.live_bytes_of(ask.owner) + ask.unowned() + ask.more;
        let needs = ask.more + if ask.is_small { own.div_ceil(2) } else { own };
        let needs = needs.min(self.max);
        needs.saturating_sub(self.free() + self.expected)
    }

    pub(super) fn expect(&mut self, bytes: u64) {
        self.expected += bytes;
    }

    /// Takes the bodies that wait no longer out, each with whether it gets what it needs. Called whenever memory has come back.
    pub(super) fn settle(&mut self) -> Vec<(T, bool)> {
        let mut ended = Vec::new();
        // Who waits for memory is passed by bodies of owners that have less, and by all if only kept bodies can give it
        // room.
        let mut least = u64::MAX;
        let mut passed: Option<(Place, ClientKey)> = None;
        while least > 0 {
            let from = passed.map_or(Bound::Unbounded, Bound::Excluded);
            let Some((place, owner)) = self.heads.range((from, Bound::Unbounded)).next().copied()
            else {
                break;
            };
            let bytes = self.bytes_before_others(&place, owner);
            let waiting = &self.owners[&owner].waiting;
            let ask = waiting.get(&place).map(|(ask, _)| *ask);
            if bytes < least
                && ask.is_some_and(|ask| self.grant(&ask))
                && let Some((_, waker)) = self.remove(place, owner)
            {
                ended.push((waker, true));
                continue;
            }
            if self.may_fit_at_last(&place, owner) {
                least = least.min(bytes);
            }
            passed = Some((place, owner));
        }
        if self.holders > 1
            && self.waiting_holders == self.holders
            && let Some((place, owner)) = self.last_holder()
            && let Some((_, waker)) = self.remove(place, owner)
        {
            // All that have memory wait for more. The last one gives its part back.
            ended.push((waker, false));
        }
        ended
    }

    fn last_holder(&self) -> Option<(Place, ClientKey)> {
        let last = self.owners.iter().filter_map(|(key, owner)| {
            let mut holders = owner.waiting.iter().rev();
            let (place, _) = holders.find(|(_, (ask, _))| ask.is_holder())?;
            Some((*place, *key))
        });
        last.max()
    }

    fn grant(&mut self, ask: &Ask) -> bool {
        if !self.fits(ask) {
            return false;
        }
        if ask.is_new() {
            return true;
        }
        let max = self.max;
        let add = |used: u64| used.checked_add(ask.more).filter(|sum| *sum <= max);
        // Bytes without an owner may have come meanwhile.
        if self.used.fetch_update(SeqCst, SeqCst, add).is_err() {
            return false;
        }
        self.owners.entry(ask.owner).or_default().bytes += ask.more + ask.unowned();
        self.holders += usize::from(!ask.is_holder());
        true
    }

    fn fits(&self, ask: &Ask) -> bool {
        let own = self.live_bytes_of(ask.owner) + ask.unowned() + ask.more;
        let is_alone = self.holders == usize::from(ask.is_holder());
        self.fits_into(ask, self.free(), own, is_alone)
    }

    /// Whether it would fit once all other bodies have ended but those that are kept, which may take an hour.
    fn fits_at_last(&self, ask: &Ask) -> bool {
        let free = self.max.saturating_sub(self.kept + ask.has);
        self.fits_into(ask, free, ask.has + ask.more, true)
    }

    /// As [`Shares::fits_at_last`], for a body that waits.
    fn may_fit_at_last(&self, place: &Place, owner: ClientKey) -> bool {
        let waiting = self.owners.get(&owner).map(|owner| &owner.waiting);
        let asked = waiting.and_then(|waiting| waiting.get(place));
        asked.is_some_and(|(ask, _)| self.fits_at_last(ask))
    }

    /// Whether a body fits into so much free memory, of which its owner would have `own` then.
    fn fits_into(&self, ask: &Ask, free: u64, own: u64, is_alone: bool) -> bool {
        let Some(left) = free.checked_sub(ask.more) else {
            return false;
        };
        let share = if ask.is_small { 2 * left } else { left };
        // Alone it may have all there is, unless its owner keeps some: one after the other, those could take all of it.
        own <= share || (is_alone && self.kept_of(ask.owner) == 0)
    }

    fn kept_of(&self, owner: ClientKey) -> u64 {
        self.owners.get(&owner).map_or(0, |owner| owner.kept)
    }

    fn free(&self) -> u64 {
        self.max.saturating_sub(self.used.load(SeqCst))
    }

    fn bytes_of(&self, owner: ClientKey) -> u64 {
        self.owners.get(&owner).map_or(0, |owner| owner.bytes)
    }

    /// Bytes that come back once clients have their answers: without those that are kept, which may take an hour.
    fn live_bytes_of(&self, owner: ClientKey) -> u64 {
        self.owners
            .get(&owner)
            .map_or(0, |owner| owner.bytes - owner.kept)
    }

    /// Bytes for which a waiting body of this owner stands behind owners that have less. What an owner keeps does not
    /// count against those of its bodies whose clients wait.
    fn bytes_before_others(&self, place: &Place, owner: ClientKey) -> u64 {
        match place.stage {
            Stage::Kept => self.bytes_of(owner),
            Stage::Growing | Stage::Beginning | Stage::New => self.live_bytes_of(owner),
        }
    }

    fn remove(&mut self, place: Place, key: ClientKey) -> Option<(Ask, T)> {
        let owner = self.owners.get_mut(&key)?;
        let head = owner.head()?;
        let removed = owner.waiting.remove(&place)?;
        self.heads.remove(&(head, key));
        if let Some(head) = owner.head() {
            self.heads.insert((head, key));
        }
        self.waiting -= 1;
        self.waiting_holders -= usize::from(removed.0.is_holder());
        Some(removed)
    }

    fn forget(&mut self, key: ClientKey) {
        let owner = self.owners.get(&key);
        if owner.is_some_and(|owner| owner.bytes == 0 && owner.waiting.is_empty()) {
            self.owners.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shares(max: u64) -> Shares<u64> {
        Shares::new(max, Arc::default())
    }

    fn ask(number: u64, owner: u64, more: u64, is_holder: bool) -> Ask {
        Ask {
            place: Place {
                stage: if is_holder {
                    Stage::Growing
                } else {
                    Stage::Beginning
                },
                priority: Reverse(0),
                number,
            },
            owner: ClientKey(owner),
            more,
            has: 0,
            is_small: false,
        }
    }

    fn to_keep(owner: u64, bytes: u64) -> Ask {
        Ask {
            place: Place {
                stage: Stage::Kept,
                priority: Reverse(i32::MIN),
                number: 0,
            },
            ..ask(0, owner, bytes, false)
        }
    }

    fn announced(number: u64, owner: u64, bytes: u64) -> Ask {
        let mut announced = ask(number, owner, bytes, false);
        announced.place.stage = Stage::New;
        announced
    }

    fn used(shares: &Shares<u64>) -> u64 {
        shares.used.load(SeqCst)
    }

    #[test]
    fn an_owner_gets_no_more_than_it_leaves_to_all_others() {
        let mut shares = shares(16);
        assert!(shares.try_now(&ask(1, 1, 4, false)));
        assert!(shares.try_now(&ask(2, 1, 4, false)));
        assert!(!shares.try_now(&ask(3, 1, 1, false)));
        // Others have what is left, each as much as it leaves again.
        assert!(!shares.try_now(&ask(4, 2, 5, false)));
        assert!(shares.try_now(&ask(4, 2, 4, false)));
        assert!(shares.try_now(&ask(5, 3, 2, false)));
        assert!(!shares.try_now(&ask(6, 4, 2, false)));
        assert!(shares.try_now(&ask(6, 4, 1, false)));
        // Short bodies of one with its share still come.
        let small = |number| Ask {
            is_small: true,
            ..ask(number, 2, 1, false)
        };
        shares.give_back(ClientKey(3), 2);
        shares.give_back(ClientKey(4), 1);
        assert!(!shares.try_now(&ask(7, 2, 1, false)));
        assert!(shares.try_now(&small(7)));
    }

    #[test]
    fn a_body_alone_may_have_all_memory() {
        let mut shares = shares(16);
        assert!(shares.try_now(&ask(1, 1, 8, false)));
        assert!(shares.try_now(&ask(1, 1, 8, true)));
        assert!(!shares.try_now(&ask(2, 2, 1, false)));
        shares.give_back(ClientKey(1), 16);
        assert_eq!((used(&shares), shares.owners.len()), (0, 0));
    }

    #[test]
    fn one_that_keeps_bodies_gets_no_more_than_it_leaves_even_alone() {
        let mut shares = shares(16);
        // The first may be larger than a share.
        assert!(shares.try_now(&ask(1, 1, 10, false)));
        assert!(shares.keep(ClientKey(1), 10, true));
        assert!(!shares.try_now(&ask(2, 1, 4, false)));
        // What is kept takes nothing of its owner's share.
        assert!(shares.try_now(&ask(2, 1, 3, false)));
        shares.give_back(ClientKey(1), 3);
        // For another owner it is as if it were alone.
        assert!(shares.try_now(&ask(3, 2, 5, false)));
        shares.give_back(ClientKey(2), 5);
        shares.give_back_kept(ClientKey(1), 10);
        assert!(shares.try_now(&ask(4, 1, 10, false)));
        shares.give_back(ClientKey(1), 10);
        assert_eq!((used(&shares), shares.owners.len()), (0, 0));
        assert_eq!(shares.holders, 0);
    }

    #[test]
    fn an_owner_keeps_half_as_much_as_it_gets() {
        let mut shares = shares(16);
        assert!(shares.try_keep(&to_keep(1, 2)));
        assert!(shares.try_keep(&to_keep(1, 2)));
        assert!(!shares.try_keep(&to_keep(1, 1)));
        // Its share is for bodies whose clients wait.
        assert!(shares.try_now(&ask(1, 1, 4, false)));
        assert!(!shares.keep(ClientKey(1), 4, true));
        // One body is kept whatever its size.
        assert!(shares.try_keep(&to_keep(2, 4)));
        assert!(!shares.try_keep(&to_keep(2, 1)));
        // Bytes that came without an owner count for it from then on.
        shares.used.fetch_add(1, SeqCst);
        assert!(shares.keep(ClientKey(3), 1, false));
        assert_eq!((used(&shares), shares.bytes_of(ClientKey(3))), (13, 1));
        shares.give_back(ClientKey(1), 4);
        for (owner, bytes) in [(1, 2), (1, 2), (2, 4), (3, 1)] {
            shares.give_back_kept(ClientKey(owner), bytes);
        }
        assert_eq!((used(&shares), shares.owners.len()), (0, 0));
        assert_eq!(shares.holders, 0);
    }

    #[test]
    fn a_body_that_waits_keeps_no_memory_from_owners_that_have_less() {
        let mut shares = shares(16);
        assert!(shares.try_now(&ask(1, 1, 8, false)));
        assert!(shares.enter(ask(2, 1, 4, false), 2).is_empty());
        assert!(!shares.try_now(&ask(3, 1, 1, false)));
        assert!(!shares.try_keep(&to_keep(1, 1)));
        assert!(shares.try_now(&ask(4, 2, 2, false)));
        assert!(shares.try_keep(&to_keep(3, 1)));
        // One that has nothing comes before all that have no less.
        assert!(shares.enter(ask(5, 4, 6, false), 5).is_empty());
        assert!(!shares.try_now(&ask(6, 5, 1, false)));
        assert!(!shares.try_keep(&to_keep(3, 1)));
        // A body that has memory ends and gives it back: it goes on before those that have none.
        assert!(shares.try_now(&ask(4, 2, 1, true)));
    }

    #[test]
    fn what_is_kept_passes_the_bodies_of_others_that_are_only_announced() {
        let mut shares = shares(16);
        assert!(shares.try_now(&ask(1, 1, 8, false)));
        assert!(shares.enter(announced(2, 2, 6), 2).is_empty());
        assert!(!shares.try_keep(&to_keep(2, 1)));
        assert!(shares.try_keep(&to_keep(4, 1)));
    }

    #[test]
    fn what_an_owner_keeps_costs_its_other_bodies_no_turn() {
        let mut shares = shares(32);
        assert!(shares.try_keep(&to_keep(1, 8)));
        assert!(shares.try_now(&ask(1, 2, 4, false)));
        assert!(shares.try_now(&ask(2, 3, 8, false)));
        assert!(shares.try_now(&ask(6, 3, 2, false)));
        // The second owner has 4 bytes of clients that wait, the first none.
        assert!(shares.enter(ask(3, 2, 5, false), 3).is_empty());
        assert!(shares.try_now(&ask(4, 1, 1, false)));
        shares.give_back(ClientKey(1), 1);
        assert!(shares.enter(ask(5, 1, 6, false), 5).is_empty());
        shares.give_back(ClientKey(3), 2);
        assert_eq!(shares.settle(), [(5, true)]);
    }

    #[test]
    fn nobody_waits_for_a_body_to_which_only_kept_ones_can_give_room() {
        for (keeper, kept, needed) in [(1, 8, 5), (2, 12, 5)] {
            let mut shares = shares(16);
            assert!(shares.try_keep(&to_keep(keeper, kept)));
            let without_room = announced(1, 1, needed);
            assert!(shares.enter(without_room, 1).is_empty());
            // What others give up would not help it.
            assert_eq!(shares.lacks(&without_room), 0);
            assert!(shares.try_now(&announced(2, 3, 1)));
            assert_eq!(shares.enter(announced(3, 4, 2), 3), [(3, true)]);
            // Those of its own owner keep their order.
            assert!(!shares.try_now(&announced(4, 1, 1)));
            shares.give_back_kept(ClientKey(keeper), kept);
            assert_eq!(shares.settle(), [(1, true)]);
            assert_eq!(used(&shares), 0);
        }
    }

    #[test]
    fn a_growing_body_to_which_only_kept_ones_can_give_room_is_passed_by_all() {
        let mut shares = shares(32);
        assert!(shares.try_keep(&to_keep(1, 16)));
        assert!(shares.try_now(&ask(1, 1, 3, false)));
        assert!(shares.try_now(&ask(2, 2, 3, false)));
        let growing = Ask {
            has: 3,
            ..ask(1, 1, 6, true)
        };
        assert!(shares.enter(growing, 1).is_empty());
        // The second owner has no less.
        assert!(shares.try_now(&ask(3, 2, 1, false)));
    }

    #[test]
    fn a_body_that_fits_once_clients_bodies_have_ended_is_waited_for() {
        let mut shares = shares(16);
        assert!(shares.try_keep(&to_keep(1, 8)));
        assert!(shares.try_now(&ask(1, 2, 2, false)));
        assert!(shares.enter(announced(2, 1, 4), 2).is_empty());
        assert!(!shares.try_now(&announced(3, 3, 1)));
        assert!(shares.enter(announced(4, 4, 1), 4).is_empty());
        shares.give_back(ClientKey(2), 2);
        assert_eq!(shares.settle(), [(2, true), (4, true)]);
    }

    #[test]
    fn who_has_much_waits_alone() {
        let mut shares = shares(16);
        assert!(shares.try_now(&ask(1, 1, 8, false)));
        assert!(shares.enter(ask(2, 1, 4, false), 2).is_empty());
        // Another owner is not behind it.
        assert_eq!(shares.enter(ask(3, 2, 4, false), 3), [(3, true)]);
        assert_eq!(shares.waiting, 1);
        shares.give_back(ClientKey(1), 8);
        assert_eq!(shares.settle(), [(2, true)]);
    }

    #[test]
    fn bodies_being_read_come_first_then_a_higher_priority_then_the_older() {
        let mut shares = shares(16);
        assert!(shares.try_now(&ask(1, 1, 16, false)));
        let new = |number, priority| Ask {
            place: Place {
                stage: Stage::New,
                priority: Reverse(priority),
                number,
            },
            ..ask(number, number, 2, false)
        };
        for (number, priority) in [(2, 0), (3, 5), (4, 5)] {
            assert!(shares.enter(new(number, priority), number).is_empty());
        }
        assert!(shares.enter(ask(5, 5, 2, false), 5).is_empty());
        shares.give_back(ClientKey(1), 16);
        let order: Vec<u64> = shares
            .settle()
            .into_iter()
            .map(|(number, _)| number)
            .collect();
        assert_eq!(order, [5, 3, 4, 2]);
    }

    #[test]
    fn of_bodies_that_wait_for_each_other_the_newest_is_refused() {
        let mut shares = shares(16);
        assert!(shares.try_now(&ask(1, 1, 4, false)));
        assert!(shares.try_now(&ask(2, 2, 4, false)));
        assert!(shares.enter(ask(2, 2, 4, true), 2).is_empty());
        assert_eq!(shares.enter(ask(1, 1, 4, true), 1), [(2, false)]);
        assert!(shares.settle().is_empty(), "its memory has not come back");
        shares.give_back(ClientKey(2), 4);
        assert_eq!(shares.settle(), [(1, true)]);
    }

    #[test]
    fn what_is_lacking_is_asked_for_once() {
        let mut shares = shares(16);
        assert!(shares.try_now(&ask(1, 1, 8, false)));
        assert!(shares.try_now(&ask(2, 2, 4, false)));
        let third = ask(3, 3, 3, false);
        assert!(shares.enter(third, 3).is_empty());
        // It has to leave as much as it takes.
        assert_eq!(shares.lacks(&third), 2);
        shares.expect(2);
        assert_eq!(shares.lacks(&third), 0);
        shares.give_back(ClientKey(2), 4);
        assert_eq!(shares.settle(), [(3, true)]);
    }

    /// A body that comes in steps.
    #[derive(Debug)]
    struct Upload {
        owner: u64,
        steps: u64,
        started: bool,
        has: u64,
        is_waiting: bool,
        ended: bool,
    }

    proptest! {
        /// Whatever is read, kept and given back: an owner keeps one body, or half as much as its share at most.
        #[test]
        fn an_owner_keeps_no_more_than_half_of_a_share(
            steps in proptest::collection::vec((0_u8..4, 0_u64..3, 1_u64..8), 1..100),
        ) {
            let mut shares = shares(32);
            // Owner, bytes, and whether it is kept.
            let mut bodies: Vec<(u64, u64, bool)> = Vec::new();
            for (step, owner, bytes) in steps {
                let key = ClientKey(owner);
                let read = bodies.iter().position(|body| body.0 == owner && !body.2);
                let any = bodies.iter().position(|body| body.0 == owner);
                let before = bodies.iter().filter(|body| body.2).count();
                match (step, read, any) {
                    (0, ..) if shares.try_now(&ask(0, owner, bytes, false)) => {
                        bodies.push((owner, bytes, false));
                    }
                    (1, Some(index), _) => {
                        bodies[index].2 = shares.keep(key, bodies[index].1, true);
                    }
                    (2, ..) if shares.try_keep(&to_keep(owner, bytes)) => {
                        bodies.push((owner, bytes, true));
                    }
                    (3, _, Some(index)) => {
                        let (_, bytes, is_kept) = bodies.remove(index);
                        if is_kept {
                            shares.give_back_kept(key, bytes);
                        } else {
                            shares.give_back(key, bytes);
                        }
                    }
                    _ => {}
                }
                let total: u64 = bodies.iter().map(|body| body.1).sum();
                prop_assert!(used(&shares) == total && total <= 32);
                let own: u64 = bodies.iter().filter(|body| body.0 == owner).map(|body| body.1).sum();
                let kept = bodies.iter().filter(|body| body.0 == owner && body.2);
                let kept: Vec<u64> = kept.map(|body| body.1).collect();
                let has_kept = bodies.iter().filter(|body| body.2).count() > before;
                let half = (32 - total + own) / 4;
                prop_assert!(!has_kept || kept.len() == 1 || kept.iter().sum::<u64>() <= half);
            }
            let read = bodies.iter().filter(|body| !body.2).count();
            prop_assert_eq!(shares.holders, read);
            let kept = bodies.iter().filter(|body| body.2);
            prop_assert_eq!(shares.kept, kept.map(|body| body.1).sum::<u64>());
        }

        /// Whatever the order in which bodies go on: never more than the memory, and all of them end without a time-out.
        #[test]
        fn bodies_together_never_exceed_the_memory_or_wait_for_ever(
            bodies in proptest::collection::vec((0_u64..4, 1_u64..12), 1..20),
            mut order in proptest::collection::vec(any::<prop::sample::Index>(), 0..200),
        ) {
            let mut shares = shares(12);
            let mut uploads: Vec<Upload> = bodies.iter().map(|&(owner, steps)| Upload {
                owner, steps, started: false, has: 0, is_waiting: false, ended: false,
            }).collect();
            loop {
                let random = order.pop().map(|index| index.index(uploads.len()));
                let turns = random.map_or(0..uploads.len(), |index| index..index + 1);
                let mut moved = false;
                for index in turns {
                    let upload = &mut uploads[index];
                    if upload.ended || upload.is_waiting {
                        continue;
                    }
                    moved = true;
                    let ended = if upload.started && upload.has == upload.steps {
                        upload.ended = true;
                        shares.give_back(ClientKey(upload.owner), upload.has);
                        upload.has = 0;
                        shares.settle()
                    } else {
                        let more = if upload.started { 1 } else { upload.steps };
                        let mut ask = ask(index as u64, upload.owner, more, upload.has > 0);
                        if !upload.started {
                            ask.place.stage = Stage::New;
                        }
                        upload.is_waiting = true;
                        shares.enter(ask, index as u64)
                    };
                    let mut ended = std::collections::VecDeque::from(ended);
                    while let Some((index, is_granted)) = ended.pop_front() {
                        let upload = &mut uploads[index as usize];
                        upload.is_waiting = false;
                        if is_granted {
                            upload.has += u64::from(upload.started);
                            upload.started = true;
                            continue;
                        }
                        upload.ended = true;
                        shares.give_back(ClientKey(upload.owner), upload.has);
                        upload.has = 0;
                        ended.extend(shares.settle());
                    }
                }
                let sum: u64 = uploads.iter().map(|upload| upload.has).sum();
                prop_assert!(used(&shares) == sum && sum <= 12);
                if uploads.iter().all(|upload| upload.ended) {
                    break;
                }
                prop_assert!(moved || random.is_some(), "all wait for each other");
            }
            prop_assert!(shares.waiting == 0 && shares.owners.is_empty());
            prop_assert!(shares.heads.is_empty() && shares.holders == 0);
        }
    }
}
