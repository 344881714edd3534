//! The routing policies.

use std::cmp::Ordering;
use std::iter;

use smallvec::SmallVec;

use super::cost::{Costs, Terms};
use super::types::{Backlog, Cached, Decision, Policy, Reason, Request, State, View};
use super::{Settings, affinity, prefix_hash};
use crate::ids::ViewIndex;

/// Workers that are compared besides those with the prefix, drawn for each request; of a fleet of up to this many all are. The
/// best of 16 is among the least busy 6 %, at a cost that does not grow with the fleet.
const RANDOM_CANDIDATES: usize = 16;

/// Draws of a random worker before all of a fleet are looked at, which takes long in a large one. Where half of the workers fit,
/// that is needed once in 256 times.
const RANDOM_DRAWS: usize = 8;

/// Chooses a worker. `None` if no worker is usable.
pub fn decide(
    settings: &Settings,
    request: &Request,
    view: &impl View,
) -> Option<Decision<ViewIndex>> {
    let mut draw = Draw(request.seed);
    let chosen = match settings.policy {
        Policy::CacheAware => return cache_aware(settings, request, view, &mut draw),
        Policy::RoundRobin => in_turn(request, view).map(|index| (index, Reason::RoundRobin)),
        Policy::Random => {
            let is_usable = |index| view.state(index).is_usable;
            any_of(view, is_usable, &mut draw).map(|index| (index, Reason::Random))
        }
        Policy::LeastLoad => {
            let indices = sample::<64, _>(view, &mut draw);
            least_load(request, view, indices).map(|index| (index, Reason::LeastLoad))
        }
        Policy::PowerOfTwo => less_loaded_of_two(request, view, &mut draw),
        Policy::ConsistentHash => match request.affinity {
            Some(key) => affinity::choose(key, view),
            None => less_loaded_of_two(request, view, &mut draw),
        },
    };
    // The sample may contain unusable workers only; then all workers are compared.
    let (index, reason) = chosen.or_else(|| {
        least_load(request, view, view.indices()).map(|index| (index, Reason::LeastLoad))
    })?;
    let costs = Costs::new(settings, request, view);
    let (state, cached) = (view.state(index), view.cached(index));
    Some(decision(&costs, index, &state, &cached, reason))
}

/// The choice of a worker, with what the request costs there.
fn decision(
    costs: &Costs<'_>,
    index: ViewIndex,
    state: &State,
    cached: &Cached,
    reason: Reason,
) -> Decision<ViewIndex> {
    let new_tokens = costs.new_tokens(cached);
    let terms = costs.terms(state, new_tokens);
    decision_at(costs, index, state, cached, (new_tokens, terms), reason)
}

fn decision_at(
    costs: &Costs<'_>,
    index: ViewIndex,
    state: &State,
    cached: &Cached,
    (new_tokens, terms): (u32, Terms),
    reason: Reason,
) -> Decision<ViewIndex> {
    Decision {
        index,
        rank: None,
        reason,
        cached_tokens: cached.tokens(),
        shared: costs.shared,
        new_tokens,
        cost: terms.sum(),
        expected: costs.expected(state, &terms),
    }
}

fn cache_aware(
    settings: &Settings,
    request: &Request,
    view: &impl View,
    draw: &mut Draw,
) -> Option<Decision<ViewIndex>> {
    let mut search = CandidateSearch::new(settings, request, view);
    for index in view.prefix_owners().iter().chain(view.adapter_owners()) {
        search.consider_owner(*index);
    }
    if !search.can_skip_sample() {
        let drawn = sample::<RANDOM_CANDIDATES, _>(view, draw);
        // All backlogs are loaded at once, since each is in another cache line.
        let mut sampled: SmallVec<[(ViewIndex, f64); RANDOM_CANDIDATES]> = drawn
            .map(|index| (index, search.at_least(&view.backlog(index))))
            .collect();
        // The one that is likely to be the best comes first: it rules most of the others out.
        let likely = (0..sampled.len()).min_by(|a, b| sampled[*a].1.total_cmp(&sampled[*b].1));
        if let Some(likely) = likely {
            sampled.swap(0, likely);
        }
        for (index, at_least) in sampled {
            if at_least <= search.max_competitive_cost {
                search.consider(index);
            }
        }
    }
    // Prefix owners and sample may all be unusable; then all workers are compared.
    if search.best.is_none() {
        view.indices().for_each(|index| search.consider(index));
    }
    let best = search.best.as_ref()?;
    let preferred = prefix_hash::preferred(&search.costs, view, best.key.cost);
    let costs = &search.costs;
    if let Some((index, cached)) = preferred.filter(|(index, _)| *index != best.key.index) {
        let state = view.state(index);
        return Some(decision(costs, index, &state, &cached, Reason::PrefixHash));
    }
    let reason = cache_aware_reason(request, best.new_tokens, search.min_new_tokens);
    Some(decision_at(
        costs,
        best.key.index,
        &best.state,
        &best.cached,
        (best.new_tokens, best.terms),
        reason,
    ))
}

/// Why the cheapest worker was chosen, which would compute `new_tokens`; the worker with the longest cached
/// prefix would compute `min_new_tokens`.
pub(super) fn cache_aware_reason(
    request: &Request,
    new_tokens: u32,
    min_new_tokens: u32,
) -> Reason {
    match new_tokens {
        _ if min_new_tokens >= request.prompt_tokens => Reason::Cold,
        new if new == min_new_tokens => Reason::LongestPrefix,
        _ => Reason::LowerCost,
    }
}

/// The workers that a cache-aware decision compares: the prefix owners and a random sample.
pub(super) fn candidates(request: &Request, view: &impl View) -> SmallVec<[ViewIndex; 32]> {
    let mut draw = Draw(request.seed);
    let sampled = sample::<RANDOM_CANDIDATES, _>(view, &mut draw);
    view.prefix_owners()
        .iter()
        .chain(view.adapter_owners())
        .copied()
        .chain(sampled)
        .collect()
}

/// Finds the cheapest usable worker: prefix owners first, then a random sample of the others.
struct CandidateSearch<'a, V> {
    costs: Costs<'a>,
    view: &'a V,
    best: Option<Candidate>,
    /// A worker without the prefix that costs more than this cannot beat the best candidate.
    max_competitive_cost: f64,
    /// The fewest tokens that any worker considered would compute.
    min_new_tokens: u32,
    /// A worker that is no prefix owner computes at least this many tokens.
    min_new_tokens_elsewhere: u32,
}

impl<'a, V: View> CandidateSearch<'a, V> {
    fn new(settings: &'a Settings, request: &'a Request, view: &'a V) -> Self {
        Self {
            costs: Costs::new(settings, request, view),
            view,
            best: None,
            max_competitive_cost: f64::INFINITY,
            min_new_tokens: u32::MAX,
            min_new_tokens_elsewhere: request
                .prompt_tokens
                .saturating_sub(view.max_cached_elsewhere()),
        }
    }

    /// True if even an idle worker without the prefix would cost more than the best candidate.
    fn can_skip_sample(&self) -> bool {
        let idle = Backlog {
            queued_tokens: 0,
            prompt_token: self.view.min_prompt_token(),
            delayed: 0.0,
        };
        self.at_least(&idle) > self.max_competitive_cost
    }

    /// A lower bound of the cost at a worker that is no prefix owner.
    #[inline]
    fn at_least(&self, backlog: &Backlog) -> f64 {
        let new_tokens = self.min_new_tokens_elsewhere;
        self.costs.at_least(backlog, new_tokens)
    }

    /// Considers a prefix owner, closely only if it may be the best or has the longest prefix so far.
    #[inline]
    fn consider_owner(&mut self, index: ViewIndex) {
        let cached = self.view.cached(index);
        let new_tokens = self.costs.new_tokens(&cached);
        let is_beaten = |best: &Candidate| {
            let at_least = || self.costs.at_least(&self.view.backlog(index), new_tokens);
            new_tokens >= self.min_new_tokens && at_least() > best.max_competitive_cost()
        };
        if !self.best.as_ref().is_some_and(is_beaten) {
            self.consider_closely(index, cached, new_tokens);
        }
    }

    fn consider(&mut self, index: ViewIndex) {
        let cached = self.view.cached(index);
        let new_tokens = self.costs.new_tokens(&cached);
        self.consider_closely(index, cached, new_tokens);
    }

    fn consider_closely(&mut self, index: ViewIndex, cached: Cached, new_tokens: u32) {
        let state = self.view.state(index);
        if !state.is_usable {
            return;
        }
        self.min_new_tokens = self.min_new_tokens.min(new_tokens);
        let terms = self.costs.terms(&state, new_tokens);
        let key = SortKey {
            cost: terms.sum(),
            requests: state.requests,
            seed: self.costs.request.seed,
            index,
        };
        let is_better = |best: &Candidate| key.cmp(&best.key).is_lt();
        if self.best.as_ref().is_none_or(is_better) {
            let best = Candidate {
                key,
                state,
                cached,
                new_tokens,
                terms,
            };
            // While another worker may have a longer prefix, the sample must be searched: the reason depends on it.
            self.max_competitive_cost = if new_tokens <= self.min_new_tokens_elsewhere {
                best.max_competitive_cost()
            } else {
                f64::INFINITY
            };
            self.best = Some(best);
        }
    }
}

struct Candidate {
    key: SortKey,
    state: State,
    cached: Cached,
    new_tokens: u32,
    terms: Terms,
}

impl Candidate {
    /// Rounding must not rule out another one that costs the same.
    #[inline]
    fn max_competitive_cost(&self) -> f64 {
        self.key.cost * (1.0 + 1e-9)
    }
}

/// Orders workers: lowest cost, then fewest requests, then at random.
#[derive(Clone, Copy)]
pub(super) struct SortKey {
    pub(super) cost: f64,
    pub(super) requests: u32,
    /// Of the request.
    pub(super) seed: u64,
    pub(super) index: ViewIndex,
}

impl SortKey {
    #[inline]
    pub(super) fn cmp(&self, other: &Self) -> Ordering {
        self.cost
            .total_cmp(&other.cost)
            .then_with(|| self.requests.cmp(&other.requests))
            .then_with(|| self.tie().cmp(&other.tie()))
    }

    fn tie(&self) -> u64 {
        tie(self.seed, self.index)
    }
}

/// Every worker of a small fleet, `COUNT` different ones of a large one: a random one of each of as many parts, which lie side by
/// side. Some parts are smaller than others by one worker, so the first one begins at a random worker.
fn sample<'a, const COUNT: usize, V: View>(
    view: &V,
    draw: &'a mut Draw,
) -> impl Iterator<Item = ViewIndex> + use<'a, COUNT, V> {
    let len = view.len();
    let takes_all = len <= COUNT;
    let first = if takes_all { 0 } else { draw.below(len) };
    (0..len.min(COUNT)).map(move |part| {
        if takes_all {
            return ViewIndex::new(part);
        }
        let (from, to) = (part * len / COUNT, (part + 1) * len / COUNT);
        let number = first + from + draw.below(to - from);
        ViewIndex::new(if number < len { number } else { number - len })
    })
}

/// The worker whose turn it is. The turns of one that is unusable go to the usable ones, in turn.
fn in_turn(request: &Request, view: &impl View) -> Option<ViewIndex> {
    let workers = view.len() as u64;
    let turn = request.ticket.checked_rem(workers)?;
    let is_usable = |index| view.state(index).is_usable;
    let index = ViewIndex::new(turn as usize);
    if is_usable(index) {
        return Some(index);
    }
    let round = request.ticket / workers;
    chosen_fit(view, is_usable, |count| ((round + turn) % count) as usize)
}

/// A random one of the workers that fit.
fn any_of(
    view: &impl View,
    is_fit: impl Fn(ViewIndex) -> bool,
    draw: &mut Draw,
) -> Option<ViewIndex> {
    for _ in 0..RANDOM_DRAWS.min(view.len()) {
        let index = ViewIndex::new(draw.below(view.len()));
        if is_fit(index) {
            return Some(index);
        }
    }
    chosen_fit(view, is_fit, |count| draw.below(count as usize))
}

/// The worker that `choose` takes of so many that fit. Not just the next one after an unusable worker: it would get the requests
/// of all before it that are down, or that are no pair with a decode worker.
fn chosen_fit(
    view: &impl View,
    is_fit: impl Fn(ViewIndex) -> bool,
    choose: impl FnOnce(u64) -> usize,
) -> Option<ViewIndex> {
    let fit: SmallVec<[ViewIndex; 64]> = view.indices().filter(|index| is_fit(*index)).collect();
    if fit.is_empty() {
        return None;
    }
    fit.get(choose(fit.len() as u64)).copied()
}

fn less_loaded_of_two(
    request: &Request,
    view: &impl View,
    draw: &mut Draw,
) -> Option<(ViewIndex, Reason)> {
    let is_usable = |index| view.state(index).is_usable;
    let first = any_of(view, is_usable, draw)?;
    // Not compared with itself.
    let second = any_of(view, |index| index != first && is_usable(index), draw);
    least_load(request, view, iter::once(first).chain(second))
        .map(|index| (index, Reason::LeastLoad))
}

fn least_load(
    request: &Request,
    view: &impl View,
    indices: impl Iterator<Item = ViewIndex>,
) -> Option<ViewIndex> {
    indices
        .map(|index| (index, view.state(index)))
        .filter(|(_, state)| state.is_usable)
        .min_by_key(|(index, state)| (state.requests, tie(request.seed, *index)))
        .map(|(index, _)| index)
}

/// Breaks ties by the request's seed; otherwise an idle fleet would use only its first worker.
fn tie(seed: u64, index: ViewIndex) -> u64 {
    mix(seed ^ mix(index.get() as u64 + 1))
}

/// Random numbers from the request's seed.
struct Draw(u64);

impl Draw {
    #[inline]
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        // The high half of the product is as uniform as a remainder, without a division.
        ((u128::from(mix(self.0)) * end as u128) >> 64) as usize
    }
}

/// SplitMix64's finaliser.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
pub(super) mod tests;
