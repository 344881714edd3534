//! The waiting requests of one priority class. Clients take turns by start-time fair queueing: next is the client that was
//! sent the fewest tokens so far, and one that begins to wait starts level with those who wait already. So clients that all
//! wait get the same number of tokens, whatever the number and the size of their requests. Within a client the order is that
//! of [`Place`].

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::ops::Bound;
use std::time::Instant;

use rustc_hash::{FxHashMap, FxHashSet};

use super::types::EntryId;
use crate::ids::ClientKey;

/// Clients that have left are remembered at least until there are so many of them.
const REMEMBERED: usize = 64;
/// And no more than so many: clients that each come once must not take memory without a bound.
const REMEMBERED_MAX: usize = 1 << 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    /// Requests with a target for their first token are before those without.
    pub(super) has_no_target: bool,
    /// When its first token should come: by its target, or by its length and how long it waits.
    pub(super) due: Instant,
    pub(super) id: EntryId,
}

/// A request in its client's order, with the tokens that it costs.
type Costed = (Place, u64);

/// Whose turn it is: who was sent the fewest tokens, then who was last sent something the longest ago.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Turn {
    sent: u64,
    number: u64,
    client: ClientKey,
}

#[derive(Debug)]
struct Waiting {
    entries: BTreeSet<Costed>,
    tokens: u64,
    bytes: u64,
    turn: Turn,
}

#[derive(Debug, Default)]
pub(super) struct Class {
    clients: FxHashMap<ClientKey, Waiting>,
    /// The turns of all clients with a waiting request.
    turns: BTreeSet<Turn>,
    /// The tokens of the client whose turn it was last: where a client starts that was not here.
    level: u64,
    /// What clients were sent that have nothing waiting, where it is more than `level`.
    left: FxHashMap<ClientKey, u64>,
    /// When `left` has so many, those that are at `level` now are forgotten.
    forget_at: usize,
    turns_taken: u64,
    pub(super) requests: u32,
    pub(super) tokens: u64,
    pub(super) bytes: u64,
}

impl Class {
    pub(super) fn is_empty(&self) -> bool {
        self.requests == 0
    }

    pub(super) fn insert(&mut self, client: ClientKey, place: Place, tokens: u64, bytes: u64) {
        if !self.clients.contains_key(&client) {
            let before = self.left.remove(&client).unwrap_or_default();
            let turn = self.next_turn(client, before.max(self.level));
            self.turns.insert(turn);
            let waiting = Waiting {
                entries: BTreeSet::new(),
                tokens: 0,
                bytes: 0,
                turn,
            };
            self.clients.insert(client, waiting);
        }
        if let Some(waiting) = self.clients.get_mut(&client) {
            waiting.entries.insert((place, tokens));
            waiting.tokens += tokens;
            waiting.bytes += bytes;
        }
        self.requests += 1;
        self.tokens += tokens;
        self.bytes += bytes;
    }

    /// Removes a request that is not sent.
    pub(super) fn remove(&mut self, client: ClientKey, place: Place, tokens: u64, bytes: u64) {
        let Some(waiting) = self.clients.get_mut(&client) else {
            return;
        };
        if !waiting.entries.remove(&(place, tokens)) {
            return;
        }
        waiting.tokens -= tokens;
        waiting.bytes -= bytes;
        self.requests -= 1;
        self.tokens -= tokens;
        self.bytes -= bytes;
        if waiting.entries.is_empty() {
            let turn = waiting.turn;
            self.turns.remove(&turn);
            self.clients.remove(&client);
            self.remember(client, turn.sent);
        }
    }

    /// Removes a request that is sent; its client pays for it.
    pub(super) fn take(&mut self, client: ClientKey, place: Place, tokens: u64, bytes: u64) {
        if let Some(before) = self.clients.get(&client).map(|waiting| waiting.turn) {
            self.turns.remove(&before);
            let turn = self.next_turn(client, before.sent.saturating_add(tokens));
            self.turns.insert(turn);
            if let Some(waiting) = self.clients.get_mut(&client) {
                waiting.turn = turn;
            }
        }
        self.remove(client, place, tokens, bytes);
        let least = self.turns.first().map_or(0, |turn| turn.sent);
        self.level = self.level.max(least);
    }

    /// The requests in their order, if all that come before are sent.
    pub(super) fn walk(&self) -> Walk {
        let mut walk = Walk {
            heads: BinaryHeap::new(),
            begun: FxHashSet::default(),
            number: self.turns_taken,
        };
        walk.add_client(self, Bound::Unbounded);
        walk
    }

    /// The tokens that are sent before a request of so many tokens that a client adds now, if all go on taking turns:
    /// those that the client has waiting, and of each other client no more than these and the new ones.
    pub(super) fn tokens_before(&self, client: ClientKey, tokens: u64) -> u64 {
        let own = self
            .clients
            .get(&client)
            .map_or(0, |waiting| waiting.tokens);
        let others = self.clients.iter().filter(|(other, _)| **other != client);
        let others = others.map(|(_, waiting)| waiting.tokens.min(own + tokens));
        own + others.sum::<u64>()
    }

    /// The newest request of the client that has the most `of` something waiting, if that is more than `client` would have
    /// with `more`: what makes place for it in a class that is full.
    pub(super) fn newest_of_heaviest(
        &self,
        client: ClientKey,
        of: Share,
        more: u64,
    ) -> Option<EntryId> {
        let share = |waiting: &Waiting| match of {
            Share::Requests => waiting.entries.len() as u64,
            Share::Bytes => waiting.bytes,
        };
        let own = self.clients.get(&client).map_or(0, share) + more;
        let others = self.clients.iter().filter(|(other, _)| **other != client);
        let (most, heaviest) = others
            .map(|(_, waiting)| (share(waiting), waiting))
            .max_by_key(|(share, waiting)| (*share, waiting.turn.client))?;
        if most <= own {
            return None;
        }
        let ids = heaviest.entries.iter().map(|(place, _)| place.id);
        ids.max()
    }

    fn next_turn(&mut self, client: ClientKey, sent: u64) -> Turn {
        self.turns_taken += 1;
        Turn {
            sent,
            number: self.turns_taken,
            client,
        }
    }

    /// A client that comes back goes on where it was, or it would be first each time.
    fn remember(&mut self, client: ClientKey, sent: u64) {
        if self.clients.is_empty() {
            // No client waits that could be passed.
            self.left.clear();
            return;
        }
        self.left.insert(client, sent);
        if self.left.len() > self.forget_at {
            let level = self.level;
            self.left.retain(|_, sent| *sent > level);
            if self.left.len() > REMEMBERED_MAX / 2 {
                self.left.clear();
            }
            self.forget_at = 2 * self.left.len() + REMEMBERED;
        }
    }
}

/// What a client can have the most of.
#[derive(Clone, Copy, Debug)]
pub(super) enum Share {
    Requests,
    Bytes,
}

/// A walk over the requests of a class, which may change meanwhile. It comes once to whoever waits from its beginning to
/// its end, and also to some who have left since. See [`Class::walk`].
#[derive(Debug)]
pub(super) struct Walk {
    /// The next request of each client whose turn has come, and of the one whose turn is the next to come.
    heads: BinaryHeap<Reverse<(Turn, Costed)>>,
    /// The clients whose turn has come. It comes again in the class when a request of theirs is sent, but not here.
    begun: FxHashSet<ClientKey>,
    number: u64,
}

impl Walk {
    /// The next request, and the tokens that it costs.
    pub(super) fn peek(&self) -> Option<(EntryId, u64)> {
        let Reverse((_, (place, tokens))) = self.heads.peek()?;
        Some((place.id, *tokens))
    }

    /// Goes on to the one after it.
    pub(super) fn advance(&mut self, class: &Class) {
        let Some(Reverse((turn, last))) = self.heads.pop() else {
            return;
        };
        if self.begun.insert(turn.client) {
            self.add_client(class, Bound::Excluded(turn));
        }
        let waiting = class.clients.get(&turn.client);
        let rest = (Bound::Excluded(last), Bound::Unbounded);
        if let Some(next) = waiting.and_then(|waiting| waiting.entries.range(rest).next()) {
            self.number += 1;
            let turn = Turn {
                sent: turn.sent.saturating_add(last.1),
                number: self.number,
                ..turn
            };
            self.heads.push(Reverse((turn, *next)));
        }
    }

    /// Adds the client whose turn is next after that of the last one.
    fn add_client(&mut self, class: &Class, after: Bound<Turn>) {
        let mut turns = class.turns.range((after, Bound::Unbounded));
        let next = turns.find(|turn| !self.begun.contains(&turn.client));
        let head = next.and_then(|turn| {
            let waiting = class.clients.get(&turn.client)?;
            Some((*turn, *waiting.entries.first()?))
        });
        self.heads.extend(head.map(Reverse));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::observe;

    struct Rig {
        class: Class,
        entries: FxHashMap<EntryId, (ClientKey, Place, u64)>,
        now: Instant,
    }

    impl Rig {
        fn new() -> Self {
            Self {
                class: Class::default(),
                entries: FxHashMap::default(),
                now: observe::now(),
            }
        }

        fn add(&mut self, client: u64, tokens: u64) -> EntryId {
            let id = EntryId(self.entries.len() as u64);
            let place = place(self.now, id);
            let client = ClientKey(client);
            self.class.insert(client, place, tokens, 1);
            self.entries.insert(id, (client, place, tokens));
            id
        }

        /// The client and the tokens of the next one.
        fn take(&mut self) -> Option<(u64, u64)> {
            let (id, cost) = self.class.walk().peek()?;
            let (client, place, tokens) = self.entries[&id];
            assert_eq!(tokens, cost);
            self.class.take(client, place, tokens, 1);
            Some((client.0, tokens))
        }
    }

    fn place(due: Instant, id: EntryId) -> Place {
        Place {
            has_no_target: true,
            due,
            id,
        }
    }

    #[test]
    fn clients_take_turns() {
        let mut rig = Rig::new();
        for (client, tokens) in [(1, 100), (1, 100), (1, 100), (2, 100), (3, 50), (3, 50)] {
            rig.add(client, tokens);
        }
        let order: Vec<u64> = std::iter::from_fn(|| rig.take())
            .map(|(client, _)| client)
            .collect();
        assert_eq!(order, [1, 2, 3, 3, 1, 1]);
        assert_eq!(
            (rig.class.requests, rig.class.tokens, rig.class.bytes),
            (0, 0, 0)
        );
    }

    #[test]
    fn a_client_pays_for_a_large_request_before_its_next_one() {
        let mut rig = Rig::new();
        rig.add(1, 1_000);
        rig.add(1, 1_000);
        for _ in 0..20 {
            rig.add(2, 100);
        }
        assert_eq!(rig.take(), Some((1, 1_000)));
        let before = (0..).take_while(|_| rig.take() == Some((2, 100))).count();
        assert_eq!(before, 10);
    }

    #[test]
    fn a_client_that_comes_back_each_time_is_not_first_each_time() {
        let mut rig = Rig::new();
        for _ in 0..10 {
            rig.add(1, 100);
        }
        let mut order = Vec::new();
        for _ in 0..6 {
            // Two clients with one request at a time, beside one that has many.
            for client in [2, 3] {
                if !rig.class.clients.contains_key(&ClientKey(client)) {
                    rig.add(client, 100);
                }
            }
            order.push(rig.take().unwrap().0);
        }
        order.sort_unstable();
        assert_eq!(order, [1, 1, 2, 2, 3, 3]);
    }

    #[test]
    fn of_clients_that_come_once_no_more_than_the_bound_are_remembered() {
        let mut rig = Rig::new();
        // While its turn does not come, the others are ahead of it.
        rig.add(0, 100);
        for client in 1..2 * REMEMBERED_MAX as u64 {
            let (id, client) = (EntryId(client), ClientKey(client));
            rig.class.insert(client, place(rig.now, id), 100, 1);
            rig.class.take(client, place(rig.now, id), 100, 1);
            assert!(rig.class.left.len() <= REMEMBERED_MAX + REMEMBERED);
        }
    }

    #[test]
    fn what_is_sent_out_of_turn_counts_too() {
        let mut rig = Rig::new();
        let ids: Vec<EntryId> = [(1, 100), (1, 100), (2, 100), (2, 100), (2, 100)]
            .map(|(client, tokens)| rig.add(client, tokens))
            .into();
        for id in &ids[2..4] {
            let (client, place, tokens) = rig.entries[id];
            rig.class.take(client, place, tokens, 1);
        }
        let order: Vec<u64> = std::iter::from_fn(|| rig.take())
            .map(|(client, _)| client)
            .collect();
        assert_eq!(order, [1, 1, 2]);
    }

    #[test]
    fn the_heaviest_client_makes_place_with_its_newest_request() {
        let mut rig = Rig::new();
        for client in [1, 2, 1, 1, 2] {
            rig.add(client, 10);
        }
        let newest = |client| {
            let client = ClientKey(client);
            rig.class.newest_of_heaviest(client, Share::Requests, 1)
        };
        assert_eq!(newest(3), Some(EntryId(3)));
        // The second would have as many as the first.
        assert_eq!(newest(2), None);
        assert_eq!(newest(1), None);
        let of_bytes = rig.class.newest_of_heaviest(ClientKey(3), Share::Bytes, 2);
        assert_eq!(of_bytes, Some(EntryId(3)));
        assert_eq!(
            rig.class.newest_of_heaviest(ClientKey(3), Share::Bytes, 3),
            None
        );
    }

    #[test]
    fn one_huge_request_alone_is_next_at_once() {
        let mut rig = Rig::new();
        rig.add(1, u64::from(u32::MAX) * 1_000);
        assert!(rig.take().is_some());
    }

    #[test]
    fn within_a_client_the_earliest_deadline_is_first() {
        let mut rig = Rig::new();
        let (client, now) = (ClientKey(1), rig.now);
        let at = |ms, id| place(now + Duration::from_millis(ms), EntryId(id));
        rig.class.insert(client, at(20, 0), 1, 1);
        rig.class.insert(client, at(10, 1), 1, 1);
        rig.class.insert(client, at(10, 2), 1, 1);
        assert_eq!(rig.class.walk().peek(), Some((EntryId(1), 1)));
        rig.class.remove(client, at(10, 1), 1, 1);
        assert_eq!(rig.class.walk().peek(), Some((EntryId(2), 1)));
        // A target comes before all that have none.
        let target = Place {
            has_no_target: false,
            ..at(90, 3)
        };
        rig.class.insert(client, target, 1, 1);
        assert_eq!(rig.class.walk().peek(), Some((EntryId(3), 1)));
    }

    #[test]
    fn what_is_before_a_request_is_a_fair_share_of_the_others() {
        let mut rig = Rig::new();
        for _ in 0..100 {
            rig.add(1, 100);
        }
        assert_eq!(rig.class.tokens_before(ClientKey(2), 50), 50);
        assert_eq!(rig.class.tokens_before(ClientKey(1), 50), 10_000);
        rig.add(2, 30);
        assert_eq!(rig.class.tokens_before(ClientKey(2), 50), 110);
    }

    proptest! {
        /// The bound of start-time fair queueing: two clients that wait all the time differ by at most the largest request of
        /// each.
        #[test]
        fn clients_that_wait_all_the_time_get_the_same(
            sizes in prop::collection::vec((1u64..400, 1u64..400, 1u64..400), 50..150),
            taken in 30usize..120,
            leaves in prop::collection::vec(any::<prop::sample::Index>(), 0..10),
        ) {
            let mut rig = Rig::new();
            let largest = sizes.iter().map(|size| size.0.max(size.1).max(size.2)).max().unwrap();
            for (a, b, c) in &sizes {
                rig.add(1, *a);
                rig.add(2, *b);
                rig.add(3, *c);
            }
            // Requests of the third client leave at any time; it is not compared.
            let mut served = [0u64; 4];
            for step in 0..taken {
                if rig.class.clients.len() < 3 { break; }
                if let Some(index) = leaves.get(step) {
                    let third: Vec<_> = rig.entries.values().filter(|entry| entry.0 == ClientKey(3)).collect();
                    let (client, place, tokens) = *third[index.index(third.len())];
                    rig.class.remove(client, place, tokens, 1);
                }
                let Some((client, tokens)) = rig.take() else { break };
                served[client as usize] += tokens;
                if rig.class.clients.len() < 3 { break; }
                let apart = served[1].abs_diff(served[2]);
                prop_assert!(apart <= 2 * largest, "{served:?}");
            }
        }

        #[test]
        fn every_request_is_next_once(sizes in prop::collection::vec((0u64..5, 0u64..1_000), 0..100)) {
            let mut rig = Rig::new();
            for (client, tokens) in &sizes {
                rig.add(*client, *tokens);
            }
            let served = std::iter::from_fn(|| rig.take()).count();
            prop_assert_eq!(served, sizes.len());
            prop_assert!(rig.class.turns.is_empty() && rig.class.clients.is_empty());
        }

        /// What is looked at ahead comes in the order in which it is sent.
        #[test]
        fn a_walk_is_the_order_of_what_is_sent(
            sizes in prop::collection::vec((0u64..5, 1u64..1_000), 1..60),
            taken in 0usize..30,
        ) {
            let mut rig = Rig::new();
            for (client, tokens) in &sizes {
                rig.add(*client, *tokens);
            }
            for _ in 0..taken {
                rig.take();
            }
            let mut walk = rig.class.walk();
            let mut ahead = Vec::new();
            while let Some((id, tokens)) = walk.peek() {
                ahead.push((rig.entries[&id].0.0, tokens));
                walk.advance(&rig.class);
            }
            let sent: Vec<(u64, u64)> = std::iter::from_fn(|| rig.take()).collect();
            prop_assert_eq!(ahead, sent);
        }
    }
}
