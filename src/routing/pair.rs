//! The choice of two workers for a disaggregated request: one computes the prompt (prefill), the other generates
//! the answer (decode). Or of one worker for both. Pure.
//!
//! Both are chosen at once, because their costs add up: whether a decode worker is worth its queue depends on
//! whether a prefill worker is free to compute what the decode worker lacks. In seconds, as every cost here:
//!
//! - Prefill worker: the cost of a request without an answer.
//! - Decode worker: the cost of the answer, without a prompt to compute. It receives the tokens that it does not have cached.
//!   Receiving a token over the network costs no compute time, but link time and memory, like loading a token from CPU
//!   memory; so it is counted with `tier_credit.cpu`. A cached prefix therefore still counts, at a fifth.
//! - A decode worker that lacks fewer than `min_remote_tokens` computes them itself at full cost. It does not lack what it
//!   has in CPU memory or on disk: another worker cannot save it the loading.

use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use super::cost::{Costs, Terms};
use super::policy::{self, SortKey};
use super::types::{
    Backlog, Cached, Decision, Expected, Policy, Reason, Request, SharedPrefix, State, View,
};
use crate::ids::ViewIndex;
use crate::observe::metrics::words;

/// When requests are disaggregated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// A decode worker that lacks fewer tokens of a prompt than this computes them itself.
    pub min_remote_tokens: u32,
}

impl Default for Settings {
    fn default() -> Self {
        // 256 tokens are 20 ms at 12,000 tokens/s: about one step of a busy decode worker, into which
        // chunked prefill fits them, and about what a second request and a transfer take.
        Self {
            min_remote_tokens: 256,
        }
    }
}

words! {
    /// Why the decode worker computes the prompt itself.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    #[serde(rename_all = "snake_case")]
    pub enum LocalReason {
        /// Its cached prefix is so long that the rest is not worth a second worker.
        PrefixCached = "prefix_cached",
        /// Nothing of the prompt is cached there, and the whole of it is not worth a second worker.
        ShortPrompt = "short_prompt",
        /// No prefill worker is usable now.
        NoPrefillWorker = "no_prefill_worker",
        /// None of the usable prefill workers is a pair with this decode worker.
        NoPair = "no_pair",
    }
}

impl LocalReason {
    /// True if the request would have a prefill leg if a prefill worker were there for it.
    pub fn is_lack_of_prefill(self) -> bool {
        match self {
            Self::NoPrefillWorker | Self::NoPair => true,
            Self::PrefixCached | Self::ShortPrompt => false,
        }
    }
}

/// Two workers, by their indices in their views, or the decode worker alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pair {
    /// With remote prefill, `new_tokens` is what receiving the missing tokens takes, in tokens to compute, and
    /// `cost` is the decode worker's own share of the pair's.
    pub decode: Decision<ViewIndex>,
    pub prefill: Result<Decision<ViewIndex>, LocalReason>,
}

/// Chooses a decode worker and, if that lacks enough of the prompt, a prefill worker. `may_pair(prefill, decode)`
/// is true if KV can be transferred between the two, whatever their ranks. `computes_alone(decode)` is true if the
/// worker may compute the prompt where no prefill worker can; one that may not comes after all that can be sent the
/// request. `None` if no decode worker is usable. Policies other than `cache_aware` choose the decode worker first and on its own.
pub fn decide(
    settings: &Settings,
    routing: &super::Settings,
    request: &Request,
    prefill: &impl View,
    decode: &impl View,
    may_pair: impl Fn(ViewIndex, ViewIndex) -> bool,
    computes_alone: impl Fn(ViewIndex) -> bool,
) -> Option<Pair> {
    let pair = decide_among(settings, routing, request, prefill, decode, &may_pair)?;
    let lacks_prefill = pair
        .prefill
        .err()
        .is_some_and(LocalReason::is_lack_of_prefill);
    if !lacks_prefill || computes_alone(pair.decode.index) {
        return Some(pair);
    }
    let usable = |index: &ViewIndex| prefill.state(*index).is_usable;
    let mut usable: SmallVec<[ViewIndex; 32]> = prefill.indices().filter(usable).collect();
    // Whether two workers are a pair is the same for all their ranks.
    usable.dedup_by_key(|index| prefill.owner(*index));
    let costs = Costs::new(routing, request, decode);
    // They have a prefill worker for the request, need none, or may do without.
    let can_be_sent = |index: ViewIndex| {
        let mut partners = usable.iter();
        computes_alone(index)
            || partners.any(|from| may_pair(*from, index))
            || costs.uncached_tokens(&decode.cached(index)) < settings.min_remote_tokens
    };
    let provided = Fit {
        view: decode,
        is_fit: can_be_sent,
    };
    decide_among(settings, routing, request, prefill, &provided, &may_pair).or(Some(pair))
}

/// The choice among the usable workers of `decode`, also of one that lacks a prefill worker.
fn decide_among(
    settings: &Settings,
    routing: &super::Settings,
    request: &Request,
    prefill: &impl View,
    decode: &impl View,
    may_pair: impl Fn(ViewIndex, ViewIndex) -> bool,
) -> Option<Pair> {
    let decode_workers = decode.len().max(1) as u64;
    let leg = Request {
        answer_tokens: 0.0,
        // The leg has a turn and draws of its own. With the decode leg's, a prefill worker whose number comes up together with
        // those of the decode workers in its zone would get more requests than others there.
        ticket: request.ticket / decode_workers + request.ticket % decode_workers,
        seed: !request.seed,
        ..*request
    };
    let chooser = Chooser {
        min_remote_tokens: settings.min_remote_tokens,
        routing,
        request,
        leg: &leg,
        costs: Costs::new(routing, request, decode),
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
        | Policy::ConsistentHash => chooser.decode_first(),
    }
}

/// What a request costs a decode worker as part of a pair, as [`decide`] counts it: the tokens to compute, the terms, and
/// when tokens are expected, behind the `prefill` leg. A worker that lacks few tokens computes them itself.
pub fn explain_decode(
    settings: &Settings,
    costs: &Costs<'_>,
    state: &State,
    cached: &Cached,
    prefill: &Expected,
) -> (u32, Terms, Expected) {
    if costs.uncached_tokens(cached) < settings.min_remote_tokens {
        let new_tokens = costs.new_tokens(cached);
        let terms = costs.terms(state, new_tokens);
        return (new_tokens, terms, costs.expected(state, &terms));
    }
    let (received_as, terms) = costs.terms_receiving(state, cached);
    let mut expected = costs.expected(state, &terms);
    expected.first_token += prefill.first_token;
    (received_as, terms, expected)
}

struct Chooser<'a, P, D, F> {
    min_remote_tokens: u32,
    routing: &'a super::Settings,
    request: &'a Request,
    /// The request of the prefill leg.
    leg: &'a Request,
    costs: Costs<'a>,
    prefill: &'a P,
    decode: &'a D,
    may_pair: F,
}

/// A decode worker that may be chosen.
#[derive(Clone, Copy)]
struct Candidate {
    index: ViewIndex,
    requests: u32,
    /// Of the request.
    seed: u64,
    cached_tokens: u32,
    shared: Option<NonZeroU64>,
    /// If it computes the missing tokens itself.
    local: Share,
    /// If it receives them; none if they are too few for a KV transfer.
    remote: Option<Share>,
}

/// One worker's share of a request's cost.
#[derive(Clone, Copy)]
struct Share {
    new_tokens: u32,
    cost: f64,
    expected: Expected,
}

impl Share {
    fn new(costs: &Costs<'_>, state: &State, new_tokens: u32, terms: &Terms) -> Self {
        Self {
            new_tokens,
            cost: terms.sum(),
            expected: costs.expected(state, terms),
        }
    }
}

impl Candidate {
    /// The order of pairs with this decode worker.
    fn sort_key(&self, cost: f64) -> SortKey {
        SortKey {
            cost,
            requests: self.requests,
            seed: self.seed,
            index: self.index,
        }
    }

    fn decision(&self, share: &Share, reason: Reason) -> Decision<ViewIndex> {
        Decision {
            index: self.index,
            rank: None,
            reason,
            cached_tokens: self.cached_tokens,
            shared: self.shared,
            new_tokens: share.new_tokens,
            cost: share.cost,
            expected: share.expected,
        }
    }
}

impl<P: View, D: View, F: Fn(ViewIndex, ViewIndex) -> bool> Chooser<'_, P, D, F> {
    fn cheapest(&self) -> Option<Pair> {
        let candidates = self.candidates();
        // The cheapest prefill worker; nearly always it is a pair with every decode worker.
        let needs_prefill = candidates
            .iter()
            .any(|candidate| candidate.remote.is_some());
        let decide = || policy::decide(self.routing, self.leg, self.prefill);
        let first = needs_prefill.then(decide).flatten();
        let min_new_tokens = candidates
            .iter()
            .map(|candidate| candidate.local.new_tokens)
            .min()?;
        // A lower bound of the cost of any pair with this decode worker.
        let lower_bound = |candidate: &Candidate| match (&candidate.remote, &first) {
            (Some(remote), Some(first)) => (remote.cost + first.cost).min(candidate.local.cost),
            _ => candidate.local.cost,
        };
        let mut ordered: SmallVec<[(SortKey, Candidate); 32]> = candidates
            .into_iter()
            .map(|candidate| (candidate.sort_key(lower_bound(&candidate)), candidate))
            .collect();
        ordered.sort_unstable_by(|(left, _), (right, _)| left.cmp(right));
        let mut best: Option<(SortKey, Candidate, Result<Decision<ViewIndex>, LocalReason>)> = None;
        for (bound, candidate) in ordered {
            if best
                .as_ref()
                .is_some_and(|(best, ..)| best.cmp(&bound).is_lt())
            {
                break;
            }
            let prefill = self.prefill_for(&candidate, first.as_ref());
            let cost = match (&prefill, &candidate.remote) {
                (Ok(prefill), Some(remote)) => remote.cost + prefill.cost,
                _ => candidate.local.cost,
            };
            let key = candidate.sort_key(cost);
            if best.as_ref().is_none_or(|(best, ..)| key.cmp(best).is_lt()) {
                best = Some((key, candidate, prefill));
            }
        }
        let (_, candidate, prefill) = best?;
        let new_tokens = candidate.local.new_tokens;
        let reason = policy::cache_aware_reason(self.request, new_tokens, min_new_tokens);
        Some(self.pair(&candidate, reason, prefill))
    }

    fn decode_first(&self) -> Option<Pair> {
        let chosen = policy::decide(self.routing, self.request, self.decode)?;
        let candidate = self.candidate(chosen.index, &self.decode.state(chosen.index));
        let first = policy::decide(self.routing, self.leg, self.prefill);
        let prefill = self.prefill_for(&candidate, first.as_ref());
        Some(self.pair(&candidate, chosen.reason, prefill))
    }

    fn pair(
        &self,
        decode: &Candidate,
        reason: Reason,
        prefill: Result<Decision<ViewIndex>, LocalReason>,
    ) -> Pair {
        let share = match (&prefill, &decode.remote) {
            (Ok(_), Some(remote)) => remote,
            _ => &decode.local,
        };
        let mut decode = decode.decision(share, reason);
        if let Ok(prefill) = &prefill {
            // The decode leg goes on where the prefill leg has ended.
            decode.expected.first_token += prefill.expected.first_token;
        }
        Pair { decode, prefill }
    }

    /// `first` is the cheapest prefill worker, whether or not it is a pair with `decode`.
    fn prefill_for(
        &self,
        decode: &Candidate,
        first: Option<&Decision<ViewIndex>>,
    ) -> Result<Decision<ViewIndex>, LocalReason> {
        if decode.remote.is_none() {
            return Err(match decode.cached_tokens {
                0 => LocalReason::ShortPrompt,
                _ => LocalReason::PrefixCached,
            });
        }
        let first = first.ok_or(LocalReason::NoPrefillWorker)?;
        if (self.may_pair)(first.index, decode.index) {
            return Ok(*first);
        }
        let paired = Fit {
            view: self.prefill,
            is_fit: |index: ViewIndex| (self.may_pair)(index, decode.index),
        };
        policy::decide(self.routing, self.leg, &paired).ok_or(LocalReason::NoPair)
    }

    fn candidates(&self) -> SmallVec<[Candidate; 32]> {
        let usable = |index| {
            let state = self.decode.state(index);
            state.is_usable.then(|| self.candidate(index, &state))
        };
        let candidates = policy::candidates(self.request, self.decode);
        let found: SmallVec<[Candidate; 32]> = candidates.into_iter().filter_map(usable).collect();
        if !found.is_empty() {
            return found;
        }
        // Prefix owners and sample may all be unusable; then all workers are compared.
        self.decode.indices().filter_map(usable).collect()
    }

    fn candidate(&self, index: ViewIndex, state: &State) -> Candidate {
        let cached = self.decode.cached(index);
        let new_tokens = self.costs.new_tokens(&cached);
        let terms = self.costs.terms(state, new_tokens);
        let local = Share::new(&self.costs, state, new_tokens, &terms);
        let remote = || {
            let (received_as, terms) = self.costs.terms_receiving(state, &cached);
            Share::new(&self.costs, state, received_as, &terms)
        };
        let is_remote = self.costs.uncached_tokens(&cached) >= self.min_remote_tokens;
        Candidate {
            index,
            requests: state.requests,
            seed: self.request.seed,
            cached_tokens: cached.tokens(),
            shared: self.costs.shared,
            local,
            remote: is_remote.then(remote),
        }
    }
}

/// A view in which only workers that are fit for the request are usable.
struct Fit<'a, V, F> {
    view: &'a V,
    is_fit: F,
}

impl<V: View, F: Fn(ViewIndex) -> bool> View for Fit<'_, V, F> {
    fn len(&self) -> usize {
        self.view.len()
    }

    fn state(&self, index: ViewIndex) -> State {
        let state = self.view.state(index);
        State {
            is_usable: state.is_usable && (self.is_fit)(index),
            ..state
        }
    }

    fn backlog(&self, index: ViewIndex) -> Backlog {
        self.view.backlog(index)
    }

    fn mean_prompt_token(&self) -> f64 {
        self.view.mean_prompt_token()
    }

    fn waiting_prompts(&self) -> f64 {
        self.view.waiting_prompts()
    }

    fn min_prompt_token(&self) -> f64 {
        self.view.min_prompt_token()
    }

    fn identity(&self, index: ViewIndex) -> u64 {
        self.view.identity(index)
    }

    fn owner(&self, index: ViewIndex) -> usize {
        self.view.owner(index)
    }

    fn prefix_owners(&self) -> &[ViewIndex] {
        self.view.prefix_owners()
    }

    fn adapter_owners(&self) -> &[ViewIndex] {
        self.view.adapter_owners()
    }

    fn max_cached_elsewhere(&self) -> u32 {
        self.view.max_cached_elsewhere()
    }

    fn shared_prefix(&self) -> SharedPrefix {
        self.view.shared_prefix()
    }

    fn cached(&self, index: ViewIndex) -> Cached {
        self.view.cached(index)
    }
}

#[cfg(test)]
mod tests;
