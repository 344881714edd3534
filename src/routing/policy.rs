//! The policies, one arm each.

use std::iter;

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use super::{Cached, Decision, Reason, Request, Settings, State, View, cost, sticky};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// The least cost of waiting and computing, given what each worker's cache holds.
    CacheAware,
    RoundRobin,
    Random,
    /// The fewest requests in flight.
    LeastLoad,
    /// The fewer requests of two workers drawn.
    PowerOfTwo,
    /// The key's own worker.
    ConsistentHash,
}

impl Policy {
    /// As the configuration and metrics name it.
    pub fn as_str(self) -> &'static str {
        match self {
            Policy::CacheAware => "cache_aware",
            Policy::RoundRobin => "round_robin",
            Policy::Random => "random",
            Policy::LeastLoad => "least_load",
            Policy::PowerOfTwo => "power_of_two",
            Policy::ConsistentHash => "consistent_hash",
        }
    }
}

/// Chooses a worker. `None` if none can be used.
pub fn decide(settings: &Settings, request: &Request, view: &impl View) -> Option<Decision> {
    let mut draw = Draw(request.seed);
    let chosen = match settings.policy {
        Policy::CacheAware => return cache_aware(settings, request, view, &mut draw),
        Policy::RoundRobin => {
            let start = if view.is_empty() {
                0
            } else {
                (request.ticket % view.len() as u64) as usize
            };
            next_usable(view, start).map(|place| (place, Reason::Turn))
        }
        Policy::Random => {
            let start = draw.below(view.len());
            next_usable(view, start).map(|place| (place, Reason::Drawn))
        }
        Policy::LeastLoad => {
            let places = sample(view, settings.sampled.max(64), &mut draw);
            least_load(request, view, places).map(|place| (place, Reason::LeastLoad))
        }
        Policy::PowerOfTwo => less_loaded_of_two(request, view, &mut draw),
        Policy::ConsistentHash => match request.affinity {
            Some(key) => {
                sticky::choose(key, usable(view).map(|place| (place, view.identity(place))))
                    .map(|place| (place, Reason::Affinity))
            }
            // Nothing to hold on to.
            None => less_loaded_of_two(request, view, &mut draw),
        },
    };
    // A sample may have met only workers that are out; somebody else may still be there.
    let (place, reason) = chosen.or_else(|| {
        least_load(request, view, 0..view.len()).map(|place| (place, Reason::LeastLoad))
    })?;
    let cached = view.cached(place);
    let new_tokens = cost::new_tokens(settings, request, &cached);
    Some(Decision {
        place,
        reason,
        cached_tokens: cached.tokens(),
        new_tokens,
        cost: cost::terms(settings, &view.state(place), new_tokens).sum(),
    })
}

fn cache_aware(
    settings: &Settings,
    request: &Request,
    view: &impl View,
    draw: &mut Draw,
) -> Option<Decision> {
    let mut search = Search::new(settings, request, view);
    for place in view.holders() {
        search.look_at(*place);
    }
    if !search.is_settled() {
        // What is waited for at all of them is asked for at once: each is another line of memory.
        let drawn: SmallVec<[(usize, u64); 16]> = sample(view, settings.sampled, draw)
            .map(|place| (place, view.pending_tokens(place)))
            .collect();
        for (place, pending_tokens) in drawn {
            if !search.is_too_busy(pending_tokens) {
                search.look_at(place);
            }
        }
    }
    // Holders and sample may all be out; somebody else may still be there.
    if search.best.is_none() {
        (0..view.len()).for_each(|place| search.look_at(place));
    }
    let best = search.best?;
    let reason = match best.new_tokens {
        _ if search.fewest_new >= request.prompt_tokens => Reason::Cold,
        new if new == search.fewest_new => Reason::Warmest,
        _ => Reason::LessBusy,
    };
    Some(Decision {
        place: best.place,
        reason,
        cached_tokens: best.cached.tokens(),
        new_tokens: best.new_tokens,
        cost: best.cost,
    })
}

/// The workers that a cache-aware decision looks at: those that hold the most, and some drawn.
pub(super) fn looked_at(
    settings: &Settings,
    request: &Request,
    view: &impl View,
) -> SmallVec<[usize; 32]> {
    let mut draw = Draw(request.seed);
    let drawn = sample(view, settings.sampled, &mut draw);
    view.holders().iter().copied().chain(drawn).collect()
}

/// The cheapest usable worker so far, and the fewest tokens that any would compute.
struct Search<'a, V> {
    settings: &'a Settings,
    request: &'a Request,
    view: &'a V,
    best: Option<Candidate>,
    /// What waits where a worker that is no holder cannot win, whatever it holds.
    busy_from: f64,
    fewest_new: u32,
    /// Workers that are no holders would compute at least so many, which costs so much.
    others_new_min: u32,
    others_cost_min: f64,
}

impl<'a, V: View> Search<'a, V> {
    fn new(settings: &'a Settings, request: &'a Request, view: &'a V) -> Self {
        let others_new_min = request.prompt_tokens.saturating_sub(view.others_max());
        Self {
            settings,
            request,
            view,
            best: None,
            busy_from: f64::INFINITY,
            fewest_new: u32::MAX,
            others_new_min,
            others_cost_min: cost::terms(settings, &State::default(), others_new_min).sum(),
        }
    }

    /// Whether no worker that is no holder could win, were it idle: as a rule, where one is warm.
    fn is_settled(&self) -> bool {
        self.busy_from < 0.0
    }

    /// Whether what waits at a worker that is no holder makes it dearer than the best, whatever it holds.
    #[inline]
    fn is_too_busy(&self, pending_tokens: u64) -> bool {
        pending_tokens as f64 > self.busy_from
    }

    #[inline]
    fn look_at(&mut self, place: usize) {
        let state = self.view.state(place);
        if !state.is_usable {
            return;
        }
        let cached = self.view.cached(place);
        let new_tokens = cost::new_tokens(self.settings, self.request, &cached);
        self.fewest_new = self.fewest_new.min(new_tokens);
        let candidate = Candidate {
            place,
            cost: cost::terms(self.settings, &state, new_tokens).sum(),
            requests: state.requests,
            tie: tie(self.request, place),
            cached,
            new_tokens,
        };
        let is_better = |best: &Candidate| candidate.is_better_than(best);
        if self.best.as_ref().is_none_or(is_better) {
            // And only if the best holds as much as it may: then nothing is to be learnt of it.
            self.busy_from = match candidate.new_tokens <= self.others_new_min {
                true => candidate.cost - self.others_cost_min,
                false => f64::INFINITY,
            };
            self.best = Some(candidate);
        }
    }
}

struct Candidate {
    place: usize,
    cost: f64,
    requests: u32,
    tie: u64,
    cached: Cached,
    new_tokens: u32,
}

impl Candidate {
    fn is_better_than(&self, other: &Self) -> bool {
        self.cost
            .total_cmp(&other.cost)
            .then(self.requests.cmp(&other.requests))
            .then(self.tie.cmp(&other.tie))
            .is_lt()
    }
}

/// Every place in a small fleet, `count` drawn ones (some perhaps twice) in a large one.
fn sample<'a, V: View>(
    view: &V,
    count: u32,
    draw: &'a mut Draw,
) -> impl Iterator<Item = usize> + use<'a, V> {
    let len = view.len();
    let draws_all = len <= count as usize;
    let count = if draws_all { len } else { count as usize };
    (0..count).map(move |place| if draws_all { place } else { draw.below(len) })
}

fn usable(view: &impl View) -> impl Iterator<Item = usize> {
    (0..view.len()).filter(|place| view.state(*place).is_usable)
}

fn next_usable(view: &impl View, start: usize) -> Option<usize> {
    (start..view.len())
        .chain(0..start)
        .find(|place| view.state(*place).is_usable)
}

fn less_loaded_of_two(
    request: &Request,
    view: &impl View,
    draw: &mut Draw,
) -> Option<(usize, Reason)> {
    let first = next_usable(view, draw.below(view.len()))?;
    // Of the others, counted on from the first, or the first could be compared with itself.
    let others = view.len() - 1;
    let start = draw.below(others);
    let second = (start..others)
        .chain(0..start)
        .map(|ahead| (first + 1 + ahead) % view.len())
        .find(|place| view.state(*place).is_usable);
    least_load(request, view, iter::once(first).chain(second))
        .map(|place| (place, Reason::LeastLoad))
}

fn least_load(
    request: &Request,
    view: &impl View,
    places: impl Iterator<Item = usize>,
) -> Option<usize> {
    places
        .map(|place| (place, view.state(place)))
        .filter(|(_, state)| state.is_usable)
        .min_by_key(|(place, state)| (state.requests, tie(request, *place)))
        .map(|(place, _)| place)
}

/// Among equals the seed decides, or an idle fleet would use its first worker only.
pub(super) fn tie(request: &Request, place: usize) -> u64 {
    mix(request.seed ^ mix(place as u64 + 1))
}

/// Numbers from the request's seed.
struct Draw(u64);

impl Draw {
    #[inline]
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        // The high half of the product is as even as a remainder, and takes no division.
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
