//! The policies, one arm each.

use std::iter;

use serde::Deserialize;
use serde::Serialize;

use super::Cached;
use super::Decision;
use super::Reason;
use super::Request;
use super::Settings;
use super::View;
use super::cost;
use super::sticky;

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
    let drawn = sample(view, settings.sampled, draw);
    let (best, fewest_new) = cheapest(
        settings,
        request,
        view,
        view.holders().iter().copied().chain(drawn),
    );
    // Holders and sample may all be out; somebody else may still be there.
    let best = best.or_else(|| cheapest(settings, request, view, 0..view.len()).0)?;
    let reason = match best.new_tokens {
        _ if fewest_new >= request.prompt_tokens => Reason::Cold,
        new if new == fewest_new => Reason::Warmest,
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

/// The cheapest usable worker of `places`, and the fewest tokens that any of them would compute.
fn cheapest(
    settings: &Settings,
    request: &Request,
    view: &impl View,
    places: impl Iterator<Item = usize>,
) -> (Option<Candidate>, u32) {
    let mut best: Option<Candidate> = None;
    let mut fewest_new = u32::MAX;
    for place in places {
        let state = view.state(place);
        if !state.is_usable {
            continue;
        }
        let cached = view.cached(place);
        let new_tokens = cost::new_tokens(settings, request, &cached);
        fewest_new = fewest_new.min(new_tokens);
        let candidate = Candidate {
            place,
            cost: cost::terms(settings, &state, new_tokens).sum(),
            requests: state.requests,
            tie: tie(request, place),
            cached,
            new_tokens,
        };
        if best
            .as_ref()
            .is_none_or(|best| candidate.is_better_than(best))
        {
            best = Some(candidate);
        }
    }
    (best, fewest_new)
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
fn tie(request: &Request, place: usize) -> u64 {
    mix(request.seed ^ mix(place as u64 + 1))
}

/// Numbers from the request's seed.
struct Draw(u64);

impl Draw {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        if end == 0 {
            0
        } else {
            (mix(self.0) % end as u64) as usize
        }
    }
}

/// SplitMix64's finaliser.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests;
