//! The choice of two workers for one request: one that computes its prompt, and one that goes on from
//! there. Or one alone. Pure.
//!
//! Both are chosen at once, for their costs add up: whether a decode worker is worth its queue depends on
//! whether a prefill worker is free to compute what it lacks. In tokens, as every cost here:
//!
//! - A prefill worker computes what it does not hold: `pending + (1 + lambda) * new + mu * decode`, as a
//!   worker that takes whole requests, since for its queue it is one.
//! - A decode worker receives what it does not hold. A token that comes over the network takes room and a
//!   link, but none of the time in which others' tokens are computed; it counts as one that is brought from
//!   the CPU's memory does (`tier_credit.cpu`), which is the same work over a link of the same kind. So what it
//!   holds still counts, at a fifth; what it is decoding counts in full, and decides among equals.
//! - A decode worker that lacks fewer than `remote_prefill_min_tokens` computes them itself, at their full
//!   price, and there is no second worker to wait for.

use std::cmp::Ordering;

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use super::{Cached, Decision, Policy, Reason, Request, State, View, cost, policy};

/// When requests are split over two workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// Fewer tokens of a prompt than this that the decode worker does not hold: it computes them itself.
    pub remote_prefill_min_tokens: u32,
}

impl Default for Settings {
    fn default() -> Self {
        // 256 tokens are 20 ms at 12,000 tokens/s: about one step of a busy decode worker, into which
        // chunked prefill fits them, and about what a second request and a transfer take.
        Self {
            remote_prefill_min_tokens: 256,
        }
    }
}

/// Why a request stays with its decode worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Whole {
    /// It holds so much of the prompt that the rest is not worth a second worker.
    DecodeIsWarm,
    /// No prefill worker can be used now.
    NoPrefill,
    /// Those that can be used are no pair with it.
    NoPair,
}

impl Whole {
    pub const ALL: [Whole; 3] = [Whole::DecodeIsWarm, Whole::NoPrefill, Whole::NoPair];

    pub fn as_str(self) -> &'static str {
        match self {
            Whole::DecodeIsWarm => "decode_is_warm",
            Whole::NoPrefill => "no_prefill",
            Whole::NoPair => "no_pair",
        }
    }
}

/// Two workers, by their places in their views, or one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pair {
    /// `cached_tokens` is what it holds. Where the request is split, `new_tokens` is what receiving the
    /// rest is worth in tokens to compute, and `cost` its own part of the pair's.
    pub decode: Decision,
    pub prefill: Result<Decision, Whole>,
}

/// Chooses a decode worker and, where that lacks enough of the prompt, a prefill worker. `may_pair` says of two
/// places, prefill's first, whether the one can hand over to the other. None where no decode worker can be
/// used. With other policies than the cache-aware one, the decode worker is chosen first and by itself.
pub fn decide(
    settings: &Settings,
    routing: &super::Settings,
    request: &Request,
    prefill: &impl View,
    decode: &impl View,
    may_pair: impl Fn(usize, usize) -> bool,
) -> Option<Pair> {
    let chooser = Chooser {
        min: settings.remote_prefill_min_tokens,
        routing,
        request,
        prefill,
        decode,
        may_pair,
    };
    match routing.policy {
        Policy::CacheAware => chooser.cheapest(),
        Policy::RoundRobin
        | Policy::Random
        | Policy::LeastLoad
        | Policy::PowerOfTwo
        | Policy::ConsistentHash => chooser.one_after_the_other(),
    }
}

struct Chooser<'a, P, D, F> {
    min: u32,
    routing: &'a super::Settings,
    request: &'a Request,
    prefill: &'a P,
    decode: &'a D,
    may_pair: F,
}

/// A decode worker that may be chosen.
#[derive(Clone, Copy)]
struct Candidate {
    place: usize,
    requests: u32,
    tie: u64,
    cached_tokens: u32,
    /// To compute all that it lacks.
    whole: Part,
    /// To receive it; none where it lacks too little.
    split: Option<Part>,
}

/// One worker's share of a request.
#[derive(Clone, Copy)]
struct Part {
    new_tokens: u32,
    cost: f64,
}

/// What pairs are ordered by: the least cost, then the fewest requests at the decode worker, then chance.
#[derive(Clone, Copy)]
struct Rank {
    cost: f64,
    requests: u32,
    tie: u64,
}

impl Rank {
    fn cmp(&self, other: &Self) -> Ordering {
        self.cost
            .total_cmp(&other.cost)
            .then(self.requests.cmp(&other.requests))
            .then(self.tie.cmp(&other.tie))
    }
}

impl Candidate {
    fn rank(&self, cost: f64) -> Rank {
        Rank {
            cost,
            requests: self.requests,
            tie: self.tie,
        }
    }

    fn decision(&self, part: &Part, reason: Reason) -> Decision {
        Decision {
            place: self.place,
            reason,
            cached_tokens: self.cached_tokens,
            new_tokens: part.new_tokens,
            cost: part.cost,
        }
    }
}

impl<P: View, D: View, F: Fn(usize, usize) -> bool> Chooser<'_, P, D, F> {
    fn cheapest(&self) -> Option<Pair> {
        let candidates = self.candidates();
        // The best that any decode worker could have; as a rule each may have it.
        let is_asked = candidates.iter().any(|it| it.split.is_some());
        let decide = || policy::decide(self.routing, self.request, self.prefill);
        let first = is_asked.then(decide).flatten();
        let fewest_new = candidates.iter().map(|it| it.whole.new_tokens).min()?;
        // No pair of a decode worker costs less than this.
        let bound = |it: &Candidate| match (&it.split, &first) {
            (Some(split), Some(first)) => (split.cost + first.cost).min(it.whole.cost),
            _ => it.whole.cost,
        };
        let mut ordered: SmallVec<[(Rank, Candidate); 32]> = candidates
            .into_iter()
            .map(|it| (it.rank(bound(&it)), it))
            .collect();
        ordered.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        let mut best: Option<(Rank, Candidate, Result<Decision, Whole>)> = None;
        for (bound, candidate) in ordered {
            if best
                .as_ref()
                .is_some_and(|(best, ..)| best.cmp(&bound).is_lt())
            {
                break;
            }
            let prefill = self.prefill_for(&candidate, first.as_ref());
            let cost = match (&prefill, &candidate.split) {
                (Ok(prefill), Some(split)) => split.cost + prefill.cost,
                _ => candidate.whole.cost,
            };
            let rank = candidate.rank(cost);
            if best
                .as_ref()
                .is_none_or(|(best, ..)| rank.cmp(best).is_lt())
            {
                best = Some((rank, candidate, prefill));
            }
        }
        let (_, candidate, prefill) = best?;
        let reason = match candidate.whole.new_tokens {
            _ if fewest_new >= self.request.prompt_tokens => Reason::Cold,
            new if new == fewest_new => Reason::Warmest,
            _ => Reason::LessBusy,
        };
        Some(self.pair(&candidate, reason, prefill))
    }

    fn one_after_the_other(&self) -> Option<Pair> {
        let chosen = policy::decide(self.routing, self.request, self.decode)?;
        let candidate = self.candidate(chosen.place, &self.decode.state(chosen.place));
        let first = policy::decide(self.routing, self.request, self.prefill);
        let prefill = self.prefill_for(&candidate, first.as_ref());
        Some(self.pair(&candidate, chosen.reason, prefill))
    }

    fn pair(&self, decode: &Candidate, reason: Reason, prefill: Result<Decision, Whole>) -> Pair {
        let part = match (&prefill, &decode.split) {
            (Ok(_), Some(split)) => split,
            _ => &decode.whole,
        };
        Pair {
            decode: decode.decision(part, reason),
            prefill,
        }
    }

    /// `first` is the prefill worker that is best of all.
    fn prefill_for(&self, decode: &Candidate, first: Option<&Decision>) -> Result<Decision, Whole> {
        if decode.split.is_none() {
            return Err(Whole::DecodeIsWarm);
        }
        let first = first.ok_or(Whole::NoPrefill)?;
        if (self.may_pair)(first.place, decode.place) {
            return Ok(*first);
        }
        let paired = Paired {
            prefill: self.prefill,
            decode: decode.place,
            may_pair: &self.may_pair,
        };
        policy::decide(self.routing, self.request, &paired).ok_or(Whole::NoPair)
    }

    fn candidates(&self) -> SmallVec<[Candidate; 32]> {
        let usable = |place| {
            let state = self.decode.state(place);
            state.is_usable.then(|| self.candidate(place, &state))
        };
        let looked_at = policy::looked_at(self.routing, self.request, self.decode);
        let found: SmallVec<[Candidate; 32]> = looked_at.into_iter().filter_map(usable).collect();
        if !found.is_empty() {
            return found;
        }
        // Holders and sample may all be out; somebody else may still be there.
        (0..self.decode.len()).filter_map(usable).collect()
    }

    fn candidate(&self, place: usize, state: &State) -> Candidate {
        let held = self.decode.cached(place);
        let part = |held: &Cached| {
            let new_tokens = cost::new_tokens(self.routing, self.request, held);
            Part {
                new_tokens,
                cost: cost::terms(self.routing, state, new_tokens).sum(),
            }
        };
        let whole = part(&held);
        let lacks = self.request.prompt_tokens.saturating_sub(held.tokens());
        let received = Cached {
            cpu: held.cpu + lacks,
            ..held
        };
        Candidate {
            place,
            requests: state.requests,
            tie: policy::tie(self.request, place),
            cached_tokens: held.tokens(),
            whole,
            split: (whole.new_tokens >= self.min).then(|| part(&received)),
        }
    }
}

/// The prefill workers that can hand over to one decode worker.
struct Paired<'a, P, F> {
    prefill: &'a P,
    decode: usize,
    may_pair: &'a F,
}

impl<P: View, F: Fn(usize, usize) -> bool> View for Paired<'_, P, F> {
    fn len(&self) -> usize {
        self.prefill.len()
    }

    fn state(&self, place: usize) -> State {
        let state = self.prefill.state(place);
        State {
            is_usable: state.is_usable && (self.may_pair)(place, self.decode),
            ..state
        }
    }

    fn pending_tokens(&self, place: usize) -> u64 {
        self.prefill.pending_tokens(place)
    }

    fn identity(&self, place: usize) -> u64 {
        self.prefill.identity(place)
    }

    fn holders(&self) -> &[usize] {
        self.prefill.holders()
    }

    fn others_max(&self) -> u32 {
        self.prefill.others_max()
    }

    fn cached(&self, place: usize) -> Cached {
        self.prefill.cached(place)
    }
}

#[cfg(test)]
mod tests;
