//! The waiting requests of one priority class: deficit round robin over clients, and within a client the earliest
//! deadline first.
//!
//! In its turn a client may send a quantum of tokens, and what it could not use of it (its request was larger) counts
//! for its next turn. So clients that all wait get the same number of tokens, whatever the size of their requests.

use std::collections::{BTreeSet, VecDeque};
use std::time::Instant;

use rustc_hash::FxHashMap;

use super::types::EntryId;
use crate::ids::ClientKey;

/// A request's place within its client: the instant by which it should have its first token, then who came first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) due: Instant,
    pub(super) id: EntryId,
}

#[derive(Debug, Default)]
struct Waiting {
    /// With the tokens that each costs.
    entries: BTreeSet<(Place, u64)>,
    /// Tokens that it may send in its turn.
    deficit: u64,
    tokens: u64,
}

#[derive(Debug, Default)]
pub(super) struct Class {
    clients: FxHashMap<ClientKey, Waiting>,
    /// Whose turn it is, then who is next. Every client with a waiting request stands here once.
    turns: VecDeque<ClientKey>,
    /// The first of `turns` got its quantum of this turn.
    has_quantum: bool,
    pub(super) requests: u32,
    pub(super) tokens: u64,
    pub(super) bytes: u64,
}

impl Class {
    pub(super) fn is_empty(&self) -> bool {
        self.requests == 0
    }

    pub(super) fn clients(&self) -> usize {
        self.clients.len()
    }

    pub(super) fn insert(&mut self, client: ClientKey, place: Place, tokens: u64, bytes: u64) {
        let turns = &mut self.turns;
        let waiting = self.clients.entry(client).or_insert_with(|| {
            turns.push_back(client);
            Waiting::default()
        });
        waiting.entries.insert((place, tokens));
        waiting.tokens += tokens;
        self.requests += 1;
        self.tokens += tokens;
        self.bytes += bytes;
    }

    pub(super) fn remove(&mut self, client: ClientKey, place: Place, tokens: u64, bytes: u64) {
        let Some(waiting) = self.clients.get_mut(&client) else {
            return;
        };
        if !waiting.entries.remove(&(place, tokens)) {
            return;
        }
        waiting.tokens -= tokens;
        if waiting.entries.is_empty() {
            self.clients.remove(&client);
            if self.turns.front() == Some(&client) {
                self.has_quantum = false;
            }
            self.turns.retain(|other| *other != client);
        }
        self.requests -= 1;
        self.tokens -= tokens;
        self.bytes -= bytes;
    }

    /// The next request and the tokens that it costs. It stays until it is [removed](Self::remove) or
    /// [taken](Self::take).
    pub(super) fn next(&mut self, quantum: u64) -> Option<(EntryId, u64)> {
        self.skip_rounds(quantum);
        // Now one of the clients can send in this round.
        loop {
            let client = *self.turns.front()?;
            let waiting = self.clients.get_mut(&client)?;
            if !std::mem::replace(&mut self.has_quantum, true) {
                waiting.deficit += quantum;
            }
            let (place, tokens) = *waiting.entries.first()?;
            if tokens <= waiting.deficit {
                return Some((place.id, tokens));
            }
            self.turns.rotate_left(1);
            self.has_quantum = false;
        }
    }

    /// Removes the request that [`Self::next`] has returned; its client pays for it.
    pub(super) fn take(&mut self, client: ClientKey, place: Place, tokens: u64, bytes: u64) {
        if let Some(waiting) = self.clients.get_mut(&client) {
            waiting.deficit = waiting.deficit.saturating_sub(tokens);
        }
        self.remove(client, place, tokens, bytes);
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

    /// Gives everyone the quanta of the rounds in which no client could send anything.
    fn skip_rounds(&mut self, quantum: u64) {
        let rounds = |waiting: &Waiting, has_quantum: bool| {
            let first = waiting.entries.first();
            let missing = first.map_or(0, |(_, tokens)| tokens.saturating_sub(waiting.deficit));
            // Its quantum of the current round is part of its deficit already.
            missing.div_ceil(quantum) + u64::from(has_quantum)
        };
        let mut fewest = u64::MAX;
        for (index, client) in self.turns.iter().enumerate() {
            let Some(waiting) = self.clients.get(client) else {
                continue;
            };
            fewest = fewest.min(rounds(waiting, index == 0 && self.has_quantum));
            if fewest <= 1 {
                return;
            }
        }
        if fewest == u64::MAX {
            return;
        }
        // All but the last of these rounds.
        for (index, client) in self.turns.iter().enumerate() {
            if let Some(waiting) = self.clients.get_mut(client) {
                let has_had = u64::from(index == 0 && self.has_quantum);
                waiting.deficit += (fewest - 1 - has_had) * quantum;
            }
        }
        self.has_quantum = false;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::observe;

    const QUANTUM: u64 = 100;

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
            let place = Place { due: self.now, id };
            let client = ClientKey(client);
            self.class.insert(client, place, tokens, 1);
            self.entries.insert(id, (client, place, tokens));
            id
        }

        /// The client and the tokens of the next one.
        fn take(&mut self) -> Option<(u64, u64)> {
            let (id, cost) = self.class.next(QUANTUM)?;
            let (client, place, tokens) = self.entries[&id];
            assert_eq!(tokens, cost);
            self.class.take(client, place, tokens, 1);
            Some((client.0, tokens))
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
    fn a_large_request_waits_until_its_client_has_saved_enough() {
        let mut rig = Rig::new();
        rig.add(1, 1_000);
        for _ in 0..20 {
            rig.add(2, 100);
        }
        let before = (0..).take_while(|_| rig.take() == Some((2, 100))).count();
        assert!((9..=10).contains(&before), "{before}");
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
        let place = |ms, id| Place {
            due: now + Duration::from_millis(ms),
            id: EntryId(id),
        };
        rig.class.insert(client, place(20, 0), 1, 1);
        rig.class.insert(client, place(10, 1), 1, 1);
        rig.class.insert(client, place(10, 2), 1, 1);
        assert_eq!(rig.class.next(QUANTUM), Some((EntryId(1), 1)));
        rig.class.remove(client, place(10, 1), 1, 1);
        assert_eq!(rig.class.next(QUANTUM), Some((EntryId(2), 1)));
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
        /// Deficit round robin's bound: two clients that wait all the time differ by at most a quantum and the largest
        /// request each.
        #[test]
        fn clients_that_wait_all_the_time_get_the_same(
            sizes in prop::collection::vec((1u64..400, 1u64..400, 1u64..400), 50..150),
            taken in 30usize..120,
            leaves in prop::collection::vec(any::<prop::sample::Index>(), 0..10),
        ) {
            let mut rig = Rig::new();
            let largest = sizes.iter().map(|it| it.0.max(it.1).max(it.2)).max().unwrap();
            for (a, b, c) in &sizes {
                rig.add(1, *a);
                rig.add(2, *b);
                rig.add(3, *c);
            }
            // Requests of the third client leave at any time; it is not compared.
            let mut served = [0u64; 4];
            for step in 0..taken {
                if rig.class.clients() < 3 { break; }
                if let Some(index) = leaves.get(step) {
                    let third: Vec<_> = rig.entries.values().filter(|it| it.0 == ClientKey(3)).collect();
                    let (client, place, tokens) = *third[index.index(third.len())];
                    rig.class.remove(client, place, tokens, 1);
                }
                let Some((client, tokens)) = rig.take() else { break };
                served[client as usize] += tokens;
                if rig.class.clients() < 3 { break; }
                let apart = served[1].abs_diff(served[2]);
                prop_assert!(apart <= 2 * (QUANTUM + largest), "{served:?}");
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
    }
}
