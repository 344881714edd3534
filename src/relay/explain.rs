//! Explains the decision for a request: every worker's cost, and why the others were not chosen. A dry run.

mod missing;
mod text;

use std::time::Instant;

use bytes::Bytes;
use hyper::HeaderMap;

use super::account::explanation::{
    CandidateModel, DisaggregationExplained, Excluded, LoadShares, NameExplained, QueueExplained,
    SpeedExplained, Tokens, Tree,
};
pub use super::account::explanation::{Explanation, Score};
use super::choose::chosen::{Chosen, Split};
use super::choose::failed_workers::FailedWorkers;
use super::choose::fleet_view::{FleetView, Task};
use super::choose::promised::Promised;
use super::core::Relay;
use super::job::Error;
use super::plan::Plan;
use super::prefill_decode::Disaggregation;
use super::prompt::cached_prefix::{self, CachedPrefixes, PrefixSource};
use super::prompt::prompt_blocks::TokenBlocks;
use super::prompt::tokens::PromptTokens;
use super::request::body_edit;
use super::wait::Standing;
use crate::fleet::health::Health;
use crate::fleet::{Role, Status};
use crate::http::circuit_breaker::State;
use crate::ids::{Model, Tenant, ViewIndex};
use crate::kv::block::BlockShape;
use crate::kv::index::RankPrefix;
use crate::kv::subscriber::TreeState;
use crate::observe;
use crate::prompt::{Api, PeekedBody};
use crate::routing::cost::{self, Costs, Terms};
use crate::routing::{self, Cached, Decision, Expected, View, pair};

impl Relay {
    /// The decision for a request as the fleet is now. Changes nothing.
    pub async fn explain(
        &self,
        api: Api,
        headers: &HeaderMap,
        peek: PeekedBody<'_>,
        body: &Bytes,
        shows_tokens: bool,
        tenant: Tenant,
    ) -> Result<Explanation, Error> {
        let now = observe::now();
        let redirected = self.redirected(headers, &peek, body, tenant, now);
        let Some((name, candidate, body)) = redirected else {
            return self
                .explain_model(api, headers, peek, body, shows_tokens, tenant)
                .await;
        };
        drop(peek);
        let peek = body_edit::read_again(api, &body, self.block_bytes(), &candidate.model);
        let explained = self.explain_model(api, headers, peek, &body, shows_tokens, tenant);
        let mut explanation = explained.await?;
        let candidate_of = |model: &Model, weight| CandidateModel {
            model: model.to_string(),
            weight,
            is_usable: self.has_usable_worker(model, now),
        };
        let targets = name.targets();
        let fallback = name.fallback().iter();
        explanation.name = Some(NameExplained {
            requested: name.requested.to_string(),
            reason: candidate.reason,
            targets: targets
                .map(|(model, weight)| candidate_of(model, Some(weight)))
                .collect(),
            fallback: fallback.map(|model| candidate_of(model, None)).collect(),
        });
        Ok(explanation)
    }

    async fn explain_model(
        &self,
        api: Api,
        headers: &HeaderMap,
        mut peek: PeekedBody<'_>,
        body: &Bytes,
        shows_tokens: bool,
        tenant: Tenant,
    ) -> Result<Explanation, Error> {
        let given = peek.token_ids.clone();
        let is_given = given.is_some();
        let queue = self.queue.as_ref();
        let standing = queue.map(|queue| {
            let tenant = self.tenants().of(tenant);
            Standing::of(headers, &peek, tenant, queue)
        });
        let standing = standing.transpose()?;
        let plan = match self.plan(api, headers, &mut peek, body).await {
            Ok(plan) => plan,
            Err(error) => {
                return self.explain_missing(peek.model.as_deref(), body, standing, error);
            }
        };
        let now = observe::now();
        let prefixes = self.chooser().cached_prefixes(&plan, usize::MAX);
        // As a new request would be chosen for: without a queue it is behind nothing.
        let promised = queue.and_then(|_| self.queues().promised());
        let before = promised.as_deref();
        let failed = FailedWorkers::default();
        let chosen = self
            .chooser()
            .choose_once(&plan, &prefixes, now, &failed, before);
        let mut explanation = self.explain_choice(&plan, &prefixes, now, chosen, before, None);
        let tokens = match (shows_tokens, given) {
            (false, _) => None,
            (true, Some(ids)) => Some(PromptTokens::complete(ids)),
            (true, None) => self.tokens.of(api, &plan.group, headers, body).await,
        };
        if !explanation.tokens_known && !is_given {
            explanation.tokens_unknown_reason =
                self.tokens.why_untokenizable(api, &plan.group, body);
        }
        explanation.tokens = tokens.map(|found| Tokens {
            text: self.tokens.text(&plan.group, &found.ids),
            ids: found.ids.to_vec(),
            unknown_bytes: found.untokenized_bytes,
        });
        explanation.queue = standing.and_then(|standing| self.explain_queue(&plan, standing));
        explanation.excluded = self.excluded(&plan);
        Ok(explanation)
    }

    /// A decision with its candidates as they are now, behind what they were promised `before`. With `each_end`, only that
    /// many of the cheapest and of the most expensive candidates of each role, the chosen one, and the one with the
    /// longest cached prefix. Without the workers that take no requests.
    pub(super) fn explain_choice(
        &self,
        plan: &Plan,
        prefixes: &CachedPrefixes<'_>,
        now: Instant,
        choice: Option<Chosen>,
        before: Option<&Promised>,
        each_end: Option<usize>,
    ) -> Explanation {
        let (decision, split) = match choice {
            Some((decision, split)) => (Some(decision), split),
            // Then there is no leg to explain either.
            None => (None, Split::Off),
        };
        let view = FleetView::new(prefixes, Task::Decode, now, &[]).behind(before);
        let exact = plan.prompt.exact.as_ref();
        let depths = exact.map(TokenBlocks::rank_prefixes).unwrap_or_default();
        let name = |decision: Decision| {
            let worker = plan.group.worker(decision.index);
            (&*worker.name, decision.rank)
        };
        let chosen = decision.map(name);
        let pairs = self.prefill_decode.as_ref().map(|settings| &settings.pair);
        let leg = pairs.zip(split.prefill().map(|prefill| &prefill.expected));
        let workers = self.scores(plan, &view, &depths, each_end, chosen, leg);
        let mut waiting_prompts = view.waiting_prompts();
        let mut shared_requests = view.shared_prefix().requests;
        let disaggregation = self.prefill_decode.as_ref().and_then(|settings| {
            let task = Task::Prefill(settings.connector, plan.api);
            let view = FleetView::new(prefixes, task, now, &[]).behind(before);
            let of_prefill = split.prefill().copied().map(name);
            let workers = self.scores(plan, &view, &depths, each_end, of_prefill, None);
            let of_view = (view.len(), workers);
            if view.len() > 0 {
                waiting_prompts = view.waiting_prompts();
                shared_requests = view.shared_prefix().requests;
            }
            explain_disaggregation(plan, settings, split, of_prefill, of_view)
        });
        let explanation = decision.and_then(|decision| {
            let chosen = find(&workers, chosen)?;
            let tokens = plan.request.prompt_tokens;
            Some(text::chosen(decision.reason, chosen, &workers, tokens))
        });
        Explanation {
            model: plan.group.model.to_string(),
            policy: plan.model.routing.policy,
            prompt_tokens: plan.request.prompt_tokens,
            answer_tokens: plan.request.answer_tokens.round() as u64,
            waiting_prompts: (10.0 * waiting_prompts).round() / 10.0,
            shared_requests: (10.0 * shared_requests).round() / 10.0,
            prompt_blocks: match exact {
                Some(exact) => exact.blocks(),
                None => plan.prompt.blocks.len(),
            },
            tokens_known: exact.is_some(),
            chosen: chosen.map(|(worker, _)| worker.to_owned()),
            chosen_rank: chosen.and_then(|(_, rank)| rank),
            reason: decision.map(|decision| decision.reason),
            explanation,
            candidates: view.len(),
            workers,
            disaggregation,
            ..Explanation::default()
        }
    }

    pub(super) fn explain_queue(&self, plan: &Plan, standing: Standing) -> Option<QueueExplained> {
        let settings = self.queue.as_ref()?;
        let class = settings.class_of(standing.priority);
        let queue = self.queues().get(&plan.group.model);
        let is_free = self.has_room(plan, settings);
        let has_worker = self.queues().has_worker(&plan.group.model, observe::now());
        let own_wait = settings.classes[class].max_wait;
        let (waits_for, max_wait) = if has_worker {
            (missing::ROOM, own_wait.unwrap_or(settings.max_wait))
        } else {
            (missing::WORKER, settings.no_worker_timeout)
        };
        Some(QueueExplained {
            would_wait: !is_free,
            waits_for: (!is_free).then_some(waits_for),
            max_wait_ms: max_wait.as_millis(),
            priority: standing.priority,
            class: settings.classes[class].name.clone(),
            waiting: queue.map_or(0, |queue| queue.waiting()),
            max_worker_queued_tokens: settings.max_worker_queued_tokens,
        })
    }

    /// The candidates of a view that are shown, in the view's order. `leg`: of the decode workers of a pair.
    fn scores(
        &self,
        plan: &Plan,
        view: &FleetView<'_>,
        depths: &[(RankPrefix, BlockShape)],
        each_end: Option<usize>,
        chosen: Option<PlaceName<'_>>,
        leg: Option<DecodeLeg<'_>>,
    ) -> Vec<Score> {
        let score = |index| self.score(plan, view, depths, index, leg);
        let Some(each_end) = each_end.filter(|count| view.len() > 2 * count) else {
            return view.indices().map(score).collect();
        };
        let request = view.request(&plan.request);
        let of = Costs::new(&plan.model.routing, &request, view);
        let mut costs: Vec<(bool, f64, ViewIndex)> = view
            .indices()
            .map(|index| {
                let state = view.state(index);
                let (_, terms, _) = counted(&of, &state, &view.cached(index), leg);
                (!state.is_usable, terms.sum(), index)
            })
            .collect();
        // Workers that cannot take the request are last.
        costs.sort_unstable_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let is_chosen = |index: ViewIndex| {
            let worker = view.worker(index);
            chosen == Some((&*worker.name, view.rank(index)))
        };
        let costs: Vec<ViewIndex> = costs.iter().map(|(_, _, index)| *index).collect();
        let (cheapest, others) = costs.split_at(each_end);
        let (between, most_expensive) = others.split_at(others.len() - each_end);
        let mut shown = [cheapest, most_expensive].concat();
        let longest = costs
            .iter()
            .rev()
            .max_by_key(|index| view.cached(**index).tokens());
        let is_shown = |index: &&ViewIndex| is_chosen(**index) || longest == Some(*index);
        shown.extend(between.iter().filter(is_shown));
        shown.sort_unstable();
        shown.into_iter().map(score).collect()
    }

    fn score(
        &self,
        plan: &Plan,
        view: &FleetView<'_>,
        depths: &[(RankPrefix, BlockShape)],
        index: ViewIndex,
        leg: Option<DecodeLeg<'_>>,
    ) -> Score {
        let (place, rank) = (view.place(index), view.rank(index));
        let worker = view.worker(index);
        let state = view.state(index);
        let cached = view.cached(index);
        let request = view.request(&plan.request);
        let costs = Costs::new(&plan.model.routing, &request, view);
        let (new_tokens, terms, mut expected) = counted(&costs, &state, &cached, leg);
        expected.first_token += view.overhead(index);
        let breaker = worker.breaker.state();
        let because = || match breaker {
            _ if !view.is_bootstrap_known(index) => "its bootstrap server has not answered yet",
            State::Closed if !view.may_transfer(index) => "its KV transfer circuit breaker is open",
            State::Closed => "it asked for a pause (Retry-After)",
            State::Open => "its circuit breaker is open",
            State::HalfOpen => "its circuit breaker is half-open, with a trial request under way",
        };
        let now = observe::now();
        let trees = self.caches.board.trees(now, worker.id).into_iter();
        let tree = |state: TreeState| {
            let mut own = depths.iter();
            let own = own.find(|(depth, _)| depth.worker == worker.id && depth.rank == state.rank);
            Tree {
                scores: matches!(state.state, "partial" | "live"),
                cached: own.map_or_else(Cached::default, |(depth, shape)| {
                    cached_prefix::cached(depth, shape.size.get())
                }),
                state,
            }
        };
        let trees = trees.filter(|tree| rank.is_none_or(|rank| tree.rank == rank));
        let trees: Vec<Tree> = trees.map(tree).collect();
        let is_cold = !trees.is_empty() && trees.iter().all(|tree| tree.state.state == "cold");
        let known_by = match view.prefixes.source(place) {
            PrefixSource::Exact if is_cold => PrefixSource::Unknown,
            source => source,
        };
        let (own, peers) = match rank {
            Some(rank) => (worker.pinned.own(rank), worker.pinned.peers(rank)),
            None => (worker.load.own(), worker.load.peers()),
        };
        Score {
            worker: worker.name.to_string(),
            client_name: (worker.client_name != worker.name)
                .then(|| worker.client_name.to_string()),
            rank,
            is_usable: state.is_usable,
            unusable_reason: (!state.is_usable).then(|| because().to_owned()),
            circuit_breaker: breaker,
            requests: state.requests,
            usual_requests: (10.0 * worker.load.usual_requests()).round() / 10.0,
            queued_tokens: state.queued_tokens,
            load: LoadShares {
                own,
                peers,
                foreign_requests: worker.load.foreign_requests(),
            },
            context_tokens: state.context_tokens,
            slots: state.slots,
            waiting: state.waiting,
            speed: SpeedExplained {
                prompt_tokens_per_second: state.speed.rate() as u64,
                step_ms: milliseconds(cost::step_seconds(&state)),
                samples: worker.speed_samples(),
            },
            cached,
            cached_tokens: cached.tokens(),
            known_by,
            trees,
            is_trusted: view.prefixes.is_trusted(place),
            new_tokens,
            cost_ms: milliseconds(terms.sum()),
            cost_terms_ms: terms.map(milliseconds),
            expected_first_token_ms: milliseconds(expected.first_token),
            expected_end_ms: milliseconds(expected.end(request.answer_tokens)),
        }
    }

    /// Workers of the model that take no requests now.
    fn excluded(&self, plan: &Plan) -> Vec<Excluded> {
        let snapshot = self.fleet().snapshot();
        let is_excluded = |status: &&Status| {
            let index = plan.group.index_of(status.worker.id);
            status.facts.models.contains_key(&plan.group.model)
                && index.is_none_or(|index| !plan.group.decode().contains(&index))
        };
        let reason = |status: &Status| match status.health {
            Health::Down => "down",
            Health::Unknown => "no health check yet",
            Health::Up if status.draining => "draining",
            Health::Up if status.worker.role == Role::Prefill => "takes prefill legs only",
            Health::Up => "just joined",
        };
        let excluded = snapshot.workers.iter().filter(is_excluded);
        excluded
            .map(|status| Excluded {
                worker: status.worker.name.to_string(),
                reason: reason(status),
            })
            .collect()
    }
}

/// How a pair is chosen, and when its prefill leg is expected to end.
type DecodeLeg<'a> = (&'a pair::Settings, &'a Expected);

/// What a request costs a worker: the tokens to compute, the terms, and when tokens are expected.
fn counted(
    costs: &Costs<'_>,
    state: &routing::State,
    cached: &Cached,
    leg: Option<DecodeLeg<'_>>,
) -> (u32, Terms, Expected) {
    if let Some((settings, prefill)) = leg {
        return pair::explain_decode(settings, costs, state, cached, prefill);
    }
    let new_tokens = costs.new_tokens(cached);
    let terms = costs.terms(state, new_tokens);
    (new_tokens, terms, costs.expected(state, &terms))
}

/// Rounded to a microsecond.
fn milliseconds(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e3
}

/// A worker's name, and the rank that the request is pinned to.
type PlaceName<'a> = (&'a str, Option<u32>);

fn find<'a>(workers: &'a [Score], name: Option<PlaceName<'_>>) -> Option<&'a Score> {
    let mut workers = workers.iter();
    workers.find(|score| Some((&*score.worker, score.rank)) == name)
}

fn explain_disaggregation(
    plan: &Plan,
    settings: &Disaggregation,
    split: Split<Decision>,
    chosen: Option<PlaceName<'_>>,
    (candidates, workers): (usize, Vec<Score>),
) -> Option<DisaggregationExplained> {
    Some(match split {
        Split::Off => return None,
        Split::Pair(decision) => {
            let score = find(&workers, chosen)?;
            let tokens = plan.request.prompt_tokens;
            DisaggregationExplained {
                is_disaggregated: true,
                not_disaggregated_reason: None,
                prefill: Some(score.worker.clone()),
                prefill_rank: score.rank,
                reason: Some(decision.reason),
                explanation: text::chosen(decision.reason, score, &workers, tokens),
                candidates,
                workers,
            }
        }
        Split::Whole(reason) => DisaggregationExplained {
            is_disaggregated: false,
            not_disaggregated_reason: Some(reason.as_str()),
            prefill: None,
            prefill_rank: None,
            reason: None,
            explanation: text::not_disaggregated(reason, settings.pair.min_remote_tokens),
            candidates,
            workers,
        },
    })
}
