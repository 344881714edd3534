use proptest::prelude::*;

use super::*;
use crate::fleet::speed::Speed;
use crate::routing::{SharedPrefix, State};

/// A view with a table of workers.
#[derive(Clone, Debug, Default)]
pub(in crate::routing) struct Table {
    pub(in crate::routing) states: Vec<State>,
    pub(in crate::routing) cached: Vec<Cached>,
    pub(in crate::routing) prefix_owners: Vec<ViewIndex>,
    /// True if `max_cached_elsewhere` is implemented.
    pub(in crate::routing) bounds: bool,
    pub(in crate::routing) waiting_prompts: f64,
    pub(in crate::routing) shared: SharedPrefix,
}

impl Table {
    pub(in crate::routing) fn new(rows: &[(bool, u32, u64, u32)]) -> Self {
        let mut table = Table::default();
        for (index, &(is_usable, requests, queued_tokens, cached)) in rows.iter().enumerate() {
            table.states.push(State {
                is_usable,
                requests,
                delayed: f64::from(requests),
                queued_tokens,
                ..State::default()
            });
            table.cached.push(Cached::in_gpu(cached));
            if cached > 0 {
                table.prefix_owners.push(ViewIndex::new(index));
            }
        }
        table
    }
}

impl Table {
    fn with_times(mut self, times: &[f64]) -> Self {
        for (state, time) in self.states.iter_mut().zip(times) {
            state.speed.prompt_token = *time * Speed::default().prompt_token;
        }
        self
    }
}

impl View for Table {
    fn len(&self) -> usize {
        self.states.len()
    }
    fn state(&self, index: ViewIndex) -> State {
        self.states[index.get()]
    }
    fn identity(&self, index: ViewIndex) -> u64 {
        mix(index.get() as u64)
    }
    fn mean_prompt_token(&self) -> f64 {
        let rates = self.states.iter().map(|state| state.speed.rate());
        match self.states.len() {
            0 => Speed::default().prompt_token,
            len => len as f64 / rates.sum::<f64>(),
        }
    }
    fn waiting_prompts(&self) -> f64 {
        self.waiting_prompts
    }
    fn min_prompt_token(&self) -> f64 {
        let times = self.states.iter().map(|state| state.speed.prompt_token);
        times.fold(1.0, f64::min)
    }
    fn prefix_owners(&self) -> &[ViewIndex] {
        &self.prefix_owners
    }
    fn cached(&self, index: ViewIndex) -> Cached {
        self.cached[index.get()]
    }
    fn shared_prefix(&self) -> SharedPrefix {
        self.shared
    }
    fn max_cached_elsewhere(&self) -> u32 {
        let others = self
            .indices()
            .filter(|index| self.bounds && !self.prefix_owners.contains(index));
        let credit = Settings::default().advanced.tier_credit;
        let most = others.map(|index| self.cached(index).credit(&credit)).max();
        most.unwrap_or(if self.bounds { 0 } else { u32::MAX })
    }
}

fn with(policy: Policy) -> Settings {
    Settings {
        policy,
        ..Settings::default()
    }
}

fn chosen(policy: Policy, request: &Request, table: &Table) -> Option<(usize, Reason)> {
    decide(&with(policy), request, table).map(|decision| (decision.index.get(), decision.reason))
}

#[test]
fn cache_aware_weighs_the_cached_prefix_against_the_load() {
    let request = Request {
        prompt_tokens: 1_000,
        ..Request::default()
    };
    let check = |rows: &[(bool, u32, u64, u32)], expected| {
        assert_eq!(
            chosen(Policy::CacheAware, &request, &Table::new(rows)),
            expected,
            "{rows:?}"
        );
    };
    check(
        &[(true, 0, 0, 0), (true, 3, 1_100, 900)],
        Some((1, Reason::LongestPrefix)),
    );
    check(
        &[(true, 0, 0, 0), (true, 3, 1_300, 900)],
        Some((0, Reason::LowerCost)),
    );
    // Each of twenty answers stands still while a hundred tokens are computed.
    check(
        &[(true, 0, 0, 0), (true, 20, 0, 900)],
        Some((0, Reason::LowerCost)),
    );
    check(
        &[(true, 0, 0, 500), (true, 9, 5_000, 900)],
        Some((0, Reason::LowerCost)),
    );
    check(
        &[(true, 1, 50, 0), (true, 0, 10, 0)],
        Some((1, Reason::Cold)),
    );
    check(
        &[(true, 1, 10, 0), (true, 0, 10, 0)],
        Some((1, Reason::Cold)),
    );
    check(
        &[(true, 0, 0, 0), (false, 0, 0, 900)],
        Some((0, Reason::Cold)),
    );
    check(&[(false, 0, 0, 0)], None);
    check(&[], None);
}

#[test]
fn an_idle_fleet_is_used_evenly() {
    let table = Table::new(&[(true, 0, 0, 0); 4]);
    for policy in [Policy::CacheAware, Policy::LeastLoad, Policy::PowerOfTwo] {
        let mut counts = [0; 4];
        for seed in 0..400 {
            let request = Request {
                prompt_tokens: 10,
                seed,
                ..Request::default()
            };
            counts[chosen(policy, &request, &table).unwrap().0] += 1;
        }
        assert!(
            counts.iter().all(|count| *count > 60),
            "{policy:?} {counts:?}"
        );
    }
}

#[test]
fn power_of_two_compares_two_workers_and_not_one_with_itself() {
    let of_seed = |seed, table: &Table| {
        let request = Request {
            seed,
            ..Request::default()
        };
        chosen(Policy::PowerOfTwo, &request, table).unwrap().0
    };
    let two = Table::new(&[(true, 9, 0, 0), (true, 1, 0, 0)]);
    let two_of_three = Table::new(&[(true, 9, 0, 0), (false, 0, 0, 0), (true, 1, 0, 0)]);
    let one = Table::new(&[(true, 9, 0, 0)]);
    for seed in 0..200 {
        assert_eq!(of_seed(seed, &two), 1, "{seed}");
        assert_eq!(of_seed(seed, &two_of_three), 2, "{seed}");
        assert_eq!(of_seed(seed, &one), 0, "{seed}");
    }
}

#[test]
fn round_robin_takes_turns_and_skips_unusable_workers() {
    let table = Table::new(&[(true, 0, 0, 0), (false, 0, 0, 0), (true, 0, 0, 0)]);
    let turns: Vec<usize> = (0..6)
        .map(|ticket| {
            chosen(
                Policy::RoundRobin,
                &Request {
                    ticket,
                    ..Request::default()
                },
                &table,
            )
            .unwrap()
            .0
        })
        .collect();
    assert_eq!(turns, [0, 2, 2, 0, 0, 2]);
}

#[test]
fn what_workers_that_are_down_would_get_is_spread_over_all_others() {
    // Half of the fleet is down, all of it side by side.
    let rows: Vec<_> = (0..16).map(|index| (index < 8, 0, 0, 0)).collect();
    let table = Table::new(&rows);
    for policy in [Policy::RoundRobin, Policy::Random, Policy::PowerOfTwo] {
        let mut counts = [0; 16];
        for ticket in 0..800 {
            let request = Request {
                ticket,
                seed: ticket,
                ..Request::default()
            };
            counts[chosen(policy, &request, &table).unwrap().0] += 1;
        }
        let usable = &counts[..8];
        assert!(
            usable.iter().all(|count| (60..=140).contains(count)),
            "{policy:?} {counts:?}"
        );
        if policy == Policy::RoundRobin {
            assert_eq!(usable, [100; 8]);
        }
    }
}

#[test]
fn a_random_worker_is_found_without_a_look_at_all_of_a_large_fleet() {
    let rows: Vec<_> = (0..1_000).map(|index| (index % 2 == 0, 0, 0, 0)).collect();
    let table = Table::new(&rows);
    let looks = std::cell::Cell::new(0);
    let is_fit = |index: ViewIndex| {
        looks.set(looks.get() + 1);
        table.state(index).is_usable
    };
    for seed in 0..100 {
        assert!(any_of(&table, is_fit, &mut Draw(seed)).is_some());
    }
    assert!(looks.get() < 5_000, "{}", looks.get());
}

#[test]
fn a_sample_has_no_worker_twice_and_has_each_as_often_as_any_other() {
    const SEEDS: u64 = 10_000;
    for len in [1_usize, 16, 17, 40, 64, 65, 1_000] {
        let table = Table::new(&vec![(true, 0, 0, 0); len]);
        let mut counts = vec![0_u64; len];
        for seed in 0..SEEDS {
            let mut draw = Draw(seed);
            let mut sampled: Vec<ViewIndex> = sample::<16, _>(&table, &mut draw).collect();
            assert_eq!(sampled.len(), len.min(16));
            sampled.iter().for_each(|index| counts[index.get()] += 1);
            sampled.sort_unstable();
            sampled.dedup();
            assert_eq!(sampled.len(), len.min(16), "{len} {seed}");
        }
        let mean = SEEDS * len.min(16) as u64 / len as u64;
        let even = mean * 2 / 3..=mean * 4 / 3;
        assert!(
            counts.iter().all(|count| even.contains(count)),
            "{len}: {mean} {counts:?}"
        );
    }
}

#[test]
fn least_load_takes_the_fewest_requests() {
    let table = Table::new(&[(true, 3, 0, 0), (true, 1, 0, 0), (false, 0, 0, 0)]);
    assert_eq!(
        chosen(Policy::LeastLoad, &Request::default(), &table),
        Some((1, Reason::LeastLoad))
    );
}

#[test]
fn a_key_keeps_its_worker_and_without_a_key_the_load_decides() {
    let table = Table::new(&[(true, 0, 0, 0); 5]);
    let of_key = |seed| {
        chosen(
            Policy::ConsistentHash,
            &Request {
                affinity: Some(7),
                seed,
                ..Request::default()
            },
            &table,
        )
    };
    assert_eq!(of_key(1), of_key(2));
    assert_eq!(of_key(1).unwrap().1, Reason::Affinity);
    assert_eq!(
        chosen(Policy::ConsistentHash, &Request::default(), &table)
            .unwrap()
            .1,
        Reason::LeastLoad
    );
}

#[test]
fn a_prefix_in_gpu_memory_is_preferred_to_one_in_a_slower_tier() {
    let request = Request {
        prompt_tokens: 1_000,
        ..Request::default()
    };
    let mut table = Table::new(&[(true, 0, 0, 0), (true, 0, 0, 900), (true, 0, 0, 900)]);
    let cached = |gpu, cpu, disk| Cached { gpu, cpu, disk };
    for (one, other, expected) in [
        (cached(0, 900, 0), cached(900, 0, 0), 2),
        (cached(0, 900, 0), cached(0, 0, 900), 1),
        (cached(800, 0, 100), cached(0, 900, 0), 1),
        // Little in the GPU is worth less than much below it.
        (cached(300, 0, 0), cached(0, 900, 0), 2),
        (cached(0, 0, 992), cached(496, 0, 0), 2),
    ] {
        table.cached[1..].copy_from_slice(&[one, other]);
        let found = chosen(Policy::CacheAware, &request, &table);
        assert_eq!(
            found,
            Some((expected, Reason::LongestPrefix)),
            "{one:?} {other:?}"
        );
    }
}

#[test]
fn in_a_large_fleet_prefix_owners_are_compared_without_being_sampled() {
    let mut rows = vec![(true, 0, 0, 0); 1_000];
    rows[777].3 = 900;
    let request = Request {
        prompt_tokens: 1_000,
        ..Request::default()
    };
    assert_eq!(
        chosen(Policy::CacheAware, &request, &Table::new(&rows)),
        Some((777, Reason::LongestPrefix))
    );
}

/// A replica that knows of no cache and sees loads of its own only.
fn alone(prefix_key: u64, seed: u64) -> Request {
    Request {
        prompt_tokens: 1_000,
        prefix_key: Some(prefix_key),
        is_alone: true,
        seed,
        ..Request::default()
    }
}

#[test]
fn replicas_that_hear_of_no_other_send_a_prefix_to_the_same_worker() {
    for prefix_key in 0..50 {
        let idle = Table::new(&[(true, 0, 0, 0); 8]);
        let busy = Table::new(&[(true, 3, 450, 0); 8]);
        let of_seed =
            |seed, table: &Table| chosen(Policy::CacheAware, &alone(prefix_key, seed), table);
        let (worker, _) = of_seed(1, &idle).unwrap();
        for seed in 0..20 {
            assert_eq!(of_seed(seed, &idle).unwrap().0, worker);
            assert_eq!(of_seed(seed, &busy).unwrap().0, worker);
        }
        // Beyond the slack of half the prompt's tokens the cost decides.
        let mut table = idle;
        table.states[worker].queued_tokens = 499;
        assert_eq!(of_seed(1, &table), Some((worker, Reason::PrefixHash)));
        table.states[worker].queued_tokens = 501;
        assert_ne!(of_seed(1, &table).unwrap().0, worker);
    }
}

#[test]
fn a_cached_prefix_beyond_the_slack_is_preferred_to_the_hash_of_the_first_blocks() {
    for prefix_key in 0..50 {
        let mut rows = [(true, 0, 0, 0); 40];
        rows[33] = (true, 0, 1_000, 900);
        let request = alone(prefix_key, prefix_key);
        let found = chosen(Policy::CacheAware, &request, &Table::new(&rows));
        assert_eq!(found, Some((33, Reason::LongestPrefix)));
    }
}

#[test]
fn a_replica_that_hears_of_others_takes_the_lowest_cost() {
    let mut table = Table::new(&[(true, 0, 1, 0); 8]);
    table.states[5].queued_tokens = 0;
    for prefix_key in 0..50 {
        let request = Request {
            is_alone: false,
            ..alone(prefix_key, prefix_key)
        };
        assert_eq!(
            chosen(Policy::CacheAware, &request, &table),
            Some((5, Reason::Cold))
        );
    }
}

/// Of each worker: tokens of contexts, slots, requests that wait inside the engine, whether it lacks the adapter, times of a
/// step and of a batch, and the part of the time of prompts in which answers go on.
type Other = (u64, u32, u32, bool, f64, f64, f64);

fn others() -> impl Strategy<Value = Vec<Other>> {
    let few = |most: u32| prop_oneof![Just(0), 0..most];
    let row = (
        0u64..200_000,
        1u32..12,
        few(5),
        any::<bool>(),
        0.0f64..0.1,
        0.0f64..9.0,
        0.0f64..=1.0,
    );
    proptest::collection::vec(row, 40)
}

impl Table {
    fn with_others(mut self, others: &[Other]) -> Self {
        for (state, other) in self.states.iter_mut().zip(others) {
            let &(context_tokens, slots, waiting, lacks_adapter, step, batch, overlap) = other;
            *state = State {
                context_tokens,
                slots,
                waiting,
                lacks_adapter,
                speed: Speed {
                    step,
                    batch,
                    overlap,
                    ..state.speed
                },
                ..*state
            };
        }
        self
    }
}

/// Workers of one speed, or of several.
fn time_weights() -> impl Strategy<Value = Vec<f64>> {
    let speeds = proptest::sample::select(vec![0.125, 0.5, 1.0, 2.5, 8.0]);
    prop_oneof![Just(vec![1.0; 40]), proptest::collection::vec(speeds, 40)]
}

#[test]
fn a_fast_worker_gets_the_longer_queue_and_a_cached_prefix_is_worth_the_same_work() {
    let settings = with(Policy::CacheAware);
    let request = Request {
        prompt_tokens: 1_000,
        ..Request::default()
    };
    let chosen = |queued: u64, cached: u32| {
        // The second worker is four times as fast, the first has the prefix.
        let rows = [(true, 1, 0, cached), (true, 1, queued, 0)];
        let table = Table::new(&rows).with_times(&[2.5, 0.625]);
        decide(&settings, &request, &table).unwrap().index.get()
    };
    // At the slow worker the prompt, and the delay of the one that is there and of one behind it, count 2.5 each, at the fast one
    // 0.625, and that of one that comes later counts 1 at both.
    assert_eq!((chosen(8_999, 0), chosen(9_001, 0)), (1, 0));
    assert_eq!(chosen(0, 700), 0);
    assert_eq!(chosen(0, 600), 1);
}

/// The choice among the candidates if the cost at each of them is computed.
fn looked_at_closely(
    settings: &Settings,
    request: &Request,
    table: &Table,
) -> Option<Decision<ViewIndex>> {
    let is_usable = |index: &ViewIndex| table.state(*index).is_usable;
    let all = candidates(request, table).into_iter();
    let mut usable: Vec<ViewIndex> = all.filter(is_usable).collect();
    if usable.is_empty() {
        usable = table.indices().filter(is_usable).collect();
    }
    let costs = Costs::new(settings, request, table);
    let new_tokens = |index: ViewIndex| costs.new_tokens(&table.cached(index));
    let key = |index: ViewIndex| {
        let state = table.state(index);
        SortKey {
            cost: costs.cost(&state, new_tokens(index)),
            requests: state.requests,
            seed: request.seed,
            index,
        }
    };
    let least_new = usable.iter().map(|index| new_tokens(*index)).min()?;
    let best = usable
        .into_iter()
        .min_by(|one, other| key(*one).cmp(&key(*other)))?;
    let reason = cache_aware_reason(request, new_tokens(best), least_new);
    let (state, cached) = (table.state(best), table.cached(best));
    Some(decision(&costs, best, &state, &cached, reason))
}

proptest! {
    /// Alone, the chosen worker's cost is within the slack of the lowest.
    #[test]
    fn alone_the_cost_is_within_the_slack(
        rows in proptest::collection::vec((any::<bool>(), 0u32..9, 0u64..9_000, 0u32..900), 1..16), seed in any::<u64>(), key in any::<u64>(),
    ) {
        let table = Table::new(&rows);
        let settings = with(Policy::CacheAware);
        let request = alone(key, seed);
        let lowest = decide(&settings, &Request { is_alone: false, ..request }, &table);
        let decision = decide(&settings, &request, &table);
        prop_assert_eq!(decision.is_some(), lowest.is_some());
        if let (Some(decision), Some(lowest)) = (decision, lowest) {
            prop_assert!(decision.cost <= lowest.cost + 500.0 / 12_000.0);
        }
    }

    #[test]
    fn a_worker_is_chosen_if_any_can_be_used_and_never_one_that_cannot(
        rows in proptest::collection::vec((any::<bool>(), 0u32..9, 0u64..9_000, 0u32..900), 0..100),
        policy in 0usize..6, seed in any::<u64>(), ticket in any::<u64>(), affinity in any::<Option<u64>>(),
    ) {
        let table = Table::new(&rows);
        let request = Request {
            prompt_tokens: 1_000, answer_tokens: 100.0, affinity, prefix_key: affinity, is_alone: seed % 2 == 0, ticket, seed,
        };
        let decision = decide(&with(Policy::ALL[policy]), &request, &table);
        prop_assert_eq!(decision, decide(&with(Policy::ALL[policy]), &request, &table));
        prop_assert_eq!(decision.is_some(), rows.iter().any(|row| row.0));
        if let Some(decision) = decision {
            prop_assert!(rows[decision.index.get()].0);
            prop_assert_eq!(decision.cached_tokens, rows[decision.index.get()].3);
        }
    }

    /// Workers skipped because of their load would change neither the decision nor its reason.
    #[test]
    fn the_choice_is_as_if_all_were_looked_at_closely(
        rows in proptest::collection::vec((0u32..8, 0u32..3, 0u64..6, 0u32..6), 1..40), prefix_owners in 0usize..6,
        others in others(), answer_tokens in 0.0f64..500.0, times in time_weights(), waiting_prompts in 0.0f64..9.0,
        tokens in 0u32..1_000, requests in 0.0f64..50.0, seed in any::<u64>(),
    ) {
        let rows: Vec<(bool, u32, u64, u32)> = rows
            .into_iter()
            .map(|(out, requests, pending, cached)| (out > 0, requests, pending * 500, cached * 160))
            .collect();
        let mut table = Table { waiting_prompts, shared: SharedPrefix { tokens, requests, key: None }, ..Table::new(&rows).with_times(&times).with_others(&others) };
        table.prefix_owners.sort_by_key(|index| std::cmp::Reverse(rows[index.get()].3));
        table.prefix_owners.truncate(prefix_owners);
        let request = Request { prompt_tokens: 1_000, answer_tokens, seed, ..Request::default() };
        let settings = with(Policy::CacheAware);
        let closely = looked_at_closely(&settings, &request, &table);
        for bounds in [false, true] {
            table.bounds = bounds;
            prop_assert_eq!(decide(&settings, &request, &table), closely);
        }
    }

    /// In a fleet of which all workers are compared, the chosen one is the cheapest, and the reason is that of the longest prefix.
    #[test]
    fn cache_aware_takes_the_least_cost(
        rows in proptest::collection::vec((any::<bool>(), 0u32..9, 0u64..9_000, 0u32..900), 1..16),
        others in others(), answer_tokens in 0.0f64..500.0, times in time_weights(), waiting_prompts in 0.0f64..9.0,
        tokens in 0u32..1_000, requests in 0.0f64..50.0, seed in any::<u64>(),
    ) {
        let table = Table { bounds: true, waiting_prompts, shared: SharedPrefix { tokens, requests, key: None }, ..Table::new(&rows).with_times(&times).with_others(&others) };
        let settings = with(Policy::CacheAware);
        let request = Request { prompt_tokens: 1_000, answer_tokens, seed, ..Request::default() };
        let costs = Costs::new(&settings, &request, &table);
        if let Some(decision) = decide(&settings, &request, &table) {
            let mut least_new = u32::MAX;
            for index in table.indices().filter(|index| table.state(*index).is_usable) {
                let new_tokens = costs.new_tokens(&table.cached(index));
                least_new = least_new.min(new_tokens);
                prop_assert!(decision.cost <= costs.cost(&table.state(index), new_tokens));
            }
            let reason = cache_aware_reason(&request, decision.new_tokens, least_new);
            prop_assert_eq!(decision.reason, reason);
        }
    }
}
