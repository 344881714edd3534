//! Session affinity with bounded loads: the worker that a key prefers, unless it has many more requests than the mean;
//! then the next one in the key's order. Pure, and the same on every replica that sees the same loads.

use smallvec::SmallVec;

use super::rendezvous;
use super::types::{Reason, View};
use crate::ids::ViewIndex;

/// A worker with this many times the mean number of requests gets no more. Bounded loads have a quarter above the mean as a
/// rule: less moves sessions for chance, and more leaves workers that are far busier than others.
const LOAD_FACTOR: f64 = 1.25;

/// A worker with fewer requests is never too busy for its sessions: engines batch more than these, and with a few
/// requests in the fleet the mean says nothing.
const MIN_CAPACITY: f64 = 8.0;

/// The worker of a session affinity key. `None` if no worker is usable.
pub(super) fn choose(key: u64, view: &impl View) -> Option<(ViewIndex, Reason)> {
    let usable: SmallVec<[(ViewIndex, u32); 64]> = view
        .indices()
        .map(|index| (index, view.state(index)))
        .filter(|(_, state)| state.is_usable)
        .map(|(index, state)| (index, state.requests))
        .collect();
    let identities = |found: &(ViewIndex, u32)| (found.0, view.identity(found.0));
    let preferred = rendezvous::choose(key, usable.iter().map(identities))?;
    let capacity = capacity(
        usable
            .iter()
            .map(|(_, requests)| u64::from(*requests))
            .sum(),
        usable.len(),
    );
    let free = usable
        .iter()
        .filter(|(_, requests)| f64::from(*requests) < capacity);
    match rendezvous::choose(key, free.map(identities)) {
        Some(chosen) if chosen != preferred => Some((chosen, Reason::AffinityOverflow)),
        _ => Some((preferred, Reason::Affinity)),
    }
}

/// Requests that make a worker full, with `total` requests at `workers` workers and one more to come.
fn capacity(total: u64, workers: usize) -> f64 {
    (LOAD_FACTOR * (total + 1) as f64 / workers as f64)
        .ceil()
        .max(MIN_CAPACITY)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fleet::speed::Speed;
    use crate::routing::types::{Cached, State};

    /// Workers with a name, as each replica lists them in an order of its own.
    #[derive(Clone, Debug)]
    struct Listed(Vec<(u32, State)>);

    impl View for Listed {
        fn len(&self) -> usize {
            self.0.len()
        }
        fn state(&self, index: ViewIndex) -> State {
            self.0[index.get()].1
        }
        fn identity(&self, index: ViewIndex) -> u64 {
            rendezvous::key(&self.0[index.get()].0.to_le_bytes())
        }
        fn mean_prompt_token(&self) -> f64 {
            Speed::default().prompt_token
        }
        fn waiting_prompts(&self) -> f64 {
            0.0
        }
        fn min_prompt_token(&self) -> f64 {
            Speed::default().prompt_token
        }
        fn prefix_owners(&self) -> &[ViewIndex] {
            &[]
        }
        fn cached(&self, _: ViewIndex) -> Cached {
            Cached::default()
        }
    }

    fn listed(requests: &[u32]) -> Listed {
        let state = |requests| State {
            is_usable: true,
            requests,
            ..State::default()
        };
        let states = requests.iter().map(|requests| state(*requests));
        Listed((0..).zip(states).collect())
    }

    fn name_of(view: &Listed, key: u64) -> Option<(u32, Reason)> {
        choose(key, view).map(|(index, reason)| (view.0[index.get()].0, reason))
    }

    #[test]
    fn a_few_requests_make_no_worker_full() {
        let key = 5;
        let preferred = name_of(&listed(&[0; 8]), key).unwrap().0;
        let mut requests = [0; 8];
        requests[preferred as usize] = 7;
        assert_eq!(
            name_of(&listed(&requests), key),
            Some((preferred, Reason::Affinity))
        );
        requests[preferred as usize] = 8;
        let (next, reason) = name_of(&listed(&requests), key).unwrap();
        assert_ne!(next, preferred);
        assert_eq!(reason, Reason::AffinityOverflow);
    }

    #[test]
    fn ten_thousand_sessions_leave_no_worker_a_quarter_above_the_mean() {
        let mut view = listed(&[0; 10]);
        for session in 0u32..10_000 {
            let key = rendezvous::key(&session.to_le_bytes());
            let (index, _) = choose(key, &view).unwrap();
            view.0[index.get()].1.requests += 1;
        }
        let most = view.0.iter().map(|(_, state)| state.requests).max();
        assert!(most <= Some(1_250), "{most:?}");
    }

    proptest! {
        /// Replicas that see the same loads, each as its own and its peers', choose the same worker, in whatever order
        /// they learnt of the workers.
        #[test]
        fn every_replica_chooses_the_same_worker(
            workers in proptest::collection::vec((any::<bool>(), 0u32..40, 0u32..40), 1..20),
            order in any::<u64>(), key in any::<u64>(),
        ) {
            let states = workers.iter().map(|(is_usable, own, peers)| State {
                is_usable: *is_usable,
                requests: own + peers,
                ..State::default()
            });
            let one = Listed((0..).zip(states).collect());
            let mut other = one.clone();
            fastrand::Rng::with_seed(order).shuffle(&mut other.0);
            let chosen = name_of(&one, key);
            prop_assert_eq!(chosen, name_of(&other, key));
            prop_assert_eq!(chosen.is_some(), workers.iter().any(|(is_usable, ..)| *is_usable));
        }

        /// The chosen worker is below the bound, and every worker that the key prefers to it is not.
        #[test]
        fn only_full_workers_are_passed_over(requests in proptest::collection::vec(0u32..60, 1..20), key in any::<u64>()) {
            let view = listed(&requests);
            let total: u64 = requests.iter().map(|count| u64::from(*count)).sum();
            let full = capacity(total, requests.len());
            let (chosen, _) = name_of(&view, key).unwrap();
            let order = rendezvous::order(key, view.indices().map(|index| (index, view.identity(index))));
            let before = order.iter().take_while(|index| index.get() != chosen as usize);
            prop_assert!(f64::from(requests[chosen as usize]) < full);
            for index in before {
                prop_assert!(f64::from(requests[index.get()]) >= full);
            }
        }
    }
}
