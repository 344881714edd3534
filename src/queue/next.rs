//! Who is next over all classes: looks ahead without changing anything.

use super::class::{Class, Walk};
use super::floors::{self, Floor};
use super::types::EntryId;

/// The requests of all classes in their order, if all that come before are sent. It keeps only what is next, so it can go
/// on after others have come and left. Whoever waits from its beginning to its end is next once.
#[derive(Debug)]
pub(super) struct Next {
    walks: Vec<Walk>,
    floors: Vec<Floor>,
}

impl Next {
    pub(super) fn new(classes: &[Class], floors: &[Floor]) -> Self {
        Self {
            walks: classes.iter().map(Class::walk).collect(),
            floors: floors.to_vec(),
        }
    }

    /// The next request, its class, and the tokens that it costs. It may have left since the last call.
    pub(super) fn peek(&self) -> Option<(EntryId, usize, u64)> {
        let class = floors::next(&self.floors, &self.heads())?;
        let (id, tokens) = self.walks[class].peek()?;
        Some((id, class, tokens))
    }

    /// Goes on to the one after it, as if it were sent.
    pub(super) fn advance(&mut self, classes: &[Class], class: usize, tokens: u64) {
        let heads = self.heads();
        floors::on_sent(&mut self.floors, &heads, class, tokens);
        self.walks[class].advance(&classes[class]);
    }

    fn heads(&self) -> Vec<Option<u64>> {
        let heads = self.walks.iter().map(Walk::peek);
        heads.map(|head| head.map(|(_, tokens)| tokens)).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::ids::ClientKey;
    use crate::observe;
    use crate::queue::class::Place;

    #[derive(Clone, Debug)]
    enum Change {
        Enter {
            class: usize,
            client: u64,
            tokens: u64,
            due: u64,
        },
        Leave(prop::sample::Index),
        Send(prop::sample::Index),
        Step(usize),
    }

    fn change() -> impl Strategy<Value = Change> {
        let index = any::<prop::sample::Index>;
        prop_oneof![
            3 => (0usize..3, 0u64..6, 1u64..500, 0u64..50).prop_map(|(class, client, tokens, due)| {
                Change::Enter { class, client, tokens, due }
            }),
            2 => index().prop_map(Change::Leave),
            2 => index().prop_map(Change::Send),
            4 => (1usize..5).prop_map(Change::Step),
        ]
    }

    proptest! {
        /// Against the plainest model: the set of those who have waited since the walk began.
        #[test]
        fn whoever_waits_from_the_beginning_of_a_walk_to_its_end_is_next_once(
            changes in prop::collection::vec(change(), 1..300),
        ) {
            let start = observe::now();
            let mut classes = [Class::default(), Class::default(), Class::default()];
            let floors = [0.0, 0.2, 0.1].map(Floor::new);
            let mut waiting = Vec::new();
            let mut next = Next::new(&classes, &floors);
            let (mut unseen, mut seen) = (BTreeSet::new(), BTreeSet::new());
            for (number, change) in changes.into_iter().enumerate() {
                match change {
                    Change::Enter { class, client, tokens, due } => {
                        let id = EntryId(number as u64);
                        let due = start + Duration::from_millis(due);
                        let place = Place { has_no_target: true, due, id };
                        classes[class].insert(ClientKey(client), place, tokens, 1);
                        waiting.push((class, ClientKey(client), place, tokens));
                    }
                    Change::Leave(index) | Change::Send(index) if !waiting.is_empty() => {
                        let (class, client, place, tokens) = waiting.swap_remove(index.index(waiting.len()));
                        if matches!(change, Change::Send(_)) {
                            classes[class].take(client, place, tokens, 1);
                        } else {
                            classes[class].remove(client, place, tokens, 1);
                        }
                        unseen.remove(&place.id);
                    }
                    Change::Leave(_) | Change::Send(_) => {}
                    Change::Step(steps) => for _ in 0..steps {
                        if let Some((id, class, tokens)) = next.peek() {
                            prop_assert!(seen.insert(id), "{id:?} was next twice");
                            unseen.remove(&id);
                            next.advance(&classes, class, tokens);
                            continue;
                        }
                        prop_assert!(unseen.is_empty(), "{unseen:?} were forgotten");
                        next = Next::new(&classes, &floors);
                        seen.clear();
                        unseen = waiting.iter().map(|(_, _, place, _)| place.id).collect();
                    }
                }
            }
        }
    }
}
