//! What would be chosen, and why not the others.

mod why;

use bytes::Bytes;
use hyper::HeaderMap;
use serde::Serialize;

use super::cached_prefix::{self, PrefixSource};
use super::choice::{Failed, Unsplit};
use super::plan::Plan;
use super::prefill_decode::PrefillDecode;
use super::prompt_blocks::TokenBlocks;
use super::tokens::Found;
use super::view::{LiveView, Task};
use super::{Error, Relay};
use crate::fleet::health::Health;
use crate::fleet::{Role, Status};
use crate::http::circuit_breaker;
use crate::kv::index::RankPrefix;
use crate::kv::subscriber::TreeState;
use crate::observe;
use crate::prompt::{Api, Peek};
use crate::routing::cost::{self, Terms};
use crate::routing::{self, Cached, Decision, View};

/// What `explain` answers.
#[derive(Debug, Serialize)]
pub struct Explanation {
    pub model: String,
    pub policy: routing::Policy,
    pub prompt_tokens: u32,
    pub prompt_blocks: usize,
    /// Whether the prompt's tokens are known; else it is looked up by its text.
    pub tokens_known: bool,
    /// The tokens themselves, where they were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<Tokens>,
    pub chosen: Option<String>,
    pub reason: Option<routing::Reason>,
    /// The same in words.
    pub why: Option<String>,
    pub workers: Vec<Score>,
    /// Whether another worker would compute the prompt, where requests are split.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split: Option<SplitOrNot>,
    /// Workers of the model that are not looked at, and why.
    pub left_out: Vec<LeftOut>,
}

/// Who would compute the prompt for the worker that was chosen, or why nobody would.
#[derive(Debug, Serialize)]
pub struct SplitOrNot {
    pub is_split: bool,
    pub why_not: Option<&'static str>,
    pub prefill: Option<String>,
    pub reason: Option<routing::Reason>,
    /// The same in words.
    pub why: String,
    /// The workers that compute prompts for others.
    pub workers: Vec<Score>,
}

/// A prompt as the router tokenises it, to be compared with an engine's.
#[derive(Debug, Serialize)]
pub struct Tokens {
    pub ids: Vec<u32>,
    /// The text they stand for, where the model's tokenizer is at hand.
    pub text: Option<String>,
    /// Bytes of text after them whose ids are not known, since an image is before.
    pub unknown_bytes: usize,
}

/// One worker, as a decision sees it.
#[derive(Debug, Serialize)]
pub struct Score {
    pub worker: String,
    pub is_usable: bool,
    pub unusable_because: Option<String>,
    pub breaker: circuit_breaker::State,
    pub requests: u32,
    pub queued_tokens: u64,
    pub decode_tokens: u64,
    /// Of the prompt, from its start; by tier, and all together.
    pub cached: Cached,
    pub cached_tokens: u32,
    /// How that is known.
    pub known_by: PrefixSource,
    /// What it tells of each rank's cache, and how far that can be relied on. None for a worker without events.
    pub trees: Vec<Tree>,
    /// False while its engine is seen to have other tokens than this router: then its events do not count.
    pub is_trusted: bool,
    /// To compute; what is in a lower tier counts in part.
    pub new_tokens: u32,
    pub cost: f64,
    pub cost_terms: Terms,
}

/// What is known of one rank by its events.
#[derive(Debug, Serialize)]
pub struct Tree {
    #[serde(flatten)]
    pub state: TreeState,
    /// Whether it counts: a partial or a live one does.
    pub scores: bool,
    pub cached: Cached,
}

#[derive(Debug, Serialize)]
pub struct LeftOut {
    pub worker: String,
    pub why: &'static str,
}

impl Relay {
    /// What would be chosen for a request now, and what every worker would cost. Changes nothing.
    pub async fn explain(
        &self,
        api: Api,
        headers: &HeaderMap,
        mut peek: Peek<'_>,
        body: &Bytes,
        shows_tokens: bool,
    ) -> Result<Explanation, Error> {
        let given = peek.token_ids.clone();
        let plan = self.plan(api, headers, &mut peek, body).await?;
        let now = observe::now();
        let held = self.held(&plan, now, usize::MAX);
        let view = LiveView::new(&plan.group, &held, Task::Decode, now, &[]);
        let chosen = self.choose_once(&plan, &held, now, &Failed::default());
        let decision = chosen.as_ref().map(|(decision, _)| *decision);
        let prefill = chosen.and_then(|(_, prefill)| prefill);
        let exact = plan.prompt.exact.as_ref();
        let depths = exact.map(TokenBlocks::rank_prefixes).unwrap_or_default();
        let workers = self.scores(&plan, &view, &depths);
        let split = match (&self.prefill_decode, prefill) {
            (Some(it), Some(prefill)) => {
                let task = Task::Prefill(it.connector, plan.api);
                let view = LiveView::new(&plan.group, &held, task, now, &[]);
                let workers = self.scores(&plan, &view, &depths);
                Some(self.split_or_not(&plan, it, prefill, view.in_group(0), workers))
            }
            _ => None,
        };
        let why = decision.map(|decision| {
            let chosen = &workers[decision.worker_index];
            why::why(
                decision.reason,
                chosen,
                &workers,
                plan.request.prompt_tokens,
            )
        });
        let tokens = match (shows_tokens, given) {
            (false, _) => None,
            (true, Some(ids)) => Some(Found::whole(ids)),
            (true, None) => self.tokens.of(api, &plan.group, headers, body).await,
        };
        Ok(Explanation {
            model: plan.group.model.to_string(),
            policy: plan.model.routing.policy,
            prompt_tokens: plan.request.prompt_tokens,
            prompt_blocks: match exact {
                Some(exact) => exact.blocks(),
                None => plan.prompt.blocks.len(),
            },
            tokens_known: exact.is_some(),
            tokens: tokens.map(|found| Tokens {
                text: self.tokens.text(&plan.group, &found.ids),
                ids: found.ids.to_vec(),
                unknown_bytes: found.unknown_bytes,
            }),
            chosen: decision
                .map(|decision| plan.group.workers[decision.worker_index].name.to_string()),
            reason: decision.map(|decision| decision.reason),
            why,
            workers,
            split,
            left_out: self.left_out(&plan),
        })
    }

    fn split_or_not(
        &self,
        plan: &Plan,
        it: &PrefillDecode,
        prefill: Result<Decision, Unsplit>,
        first: usize,
        workers: Vec<Score>,
    ) -> SplitOrNot {
        match prefill {
            Ok(decision) => {
                let score = &workers[decision.worker_index - first];
                let tokens = plan.request.prompt_tokens;
                SplitOrNot {
                    is_split: true,
                    why_not: None,
                    prefill: Some(score.worker.clone()),
                    reason: Some(decision.reason),
                    why: why::why(decision.reason, score, &workers, tokens),
                    workers,
                }
            }
            Err(unsplit) => SplitOrNot {
                is_split: false,
                why_not: Some(unsplit.as_str()),
                prefill: None,
                reason: None,
                why: why::not_split(unsplit, it.pair.remote_prefill_min_tokens),
                workers,
            },
        }
    }

    fn scores(&self, plan: &Plan, view: &LiveView<'_>, depths: &[(RankPrefix, u32)]) -> Vec<Score> {
        (0..view.len())
            .map(|place| self.score(plan, view, depths, place))
            .collect()
    }

    fn score(
        &self,
        plan: &Plan,
        view: &LiveView<'_>,
        depths: &[(RankPrefix, u32)],
        place: usize,
    ) -> Score {
        let in_group = view.in_group(place);
        let worker = &plan.group.workers[in_group];
        let state = view.state(place);
        let cached = view.cached(place);
        let settings = &plan.model.routing;
        let new_tokens = cost::new_tokens(settings, &plan.request, &cached);
        let terms = cost::terms(settings, &state, new_tokens);
        let breaker = worker.breaker.state();
        let because = || match breaker {
            _ if !view.is_met(place) => "it is not known where what it computes is to be fetched",
            circuit_breaker::State::Closed if !view.hands_over(place) => {
                "what it computed could not be fetched several times in a row"
            }
            circuit_breaker::State::Closed => "it asked to be left alone for a moment",
            circuit_breaker::State::Open => "its last requests failed, so its breaker is open",
            circuit_breaker::State::HalfOpen => "one request is trying whether it answers again",
        };
        let now = observe::now();
        let trees = self.caches.board.trees(now, worker.id).into_iter();
        let tree = |state: TreeState| {
            let mut own = depths.iter();
            let own = own.find(|(it, _)| it.worker == worker.id && it.rank == state.rank);
            Tree {
                scores: matches!(state.state, "partial" | "live"),
                cached: own.map_or_else(Cached::default, |(depth, size)| {
                    cached_prefix::cached(depth, *size)
                }),
                state,
            }
        };
        Score {
            worker: worker.name.to_string(),
            is_usable: state.is_usable,
            unusable_because: (!state.is_usable).then(|| because().to_owned()),
            breaker,
            requests: state.requests,
            queued_tokens: state.queued_tokens,
            decode_tokens: state.decode_tokens,
            cached,
            cached_tokens: cached.tokens(),
            known_by: view.held().source(in_group),
            trees: trees.map(tree).collect(),
            is_trusted: view.held().is_trusted(in_group),
            new_tokens,
            cost: terms.sum(),
            cost_terms: terms,
        }
    }

    /// Workers that serve the model and are not among those to choose from.
    fn left_out(&self, plan: &Plan) -> Vec<LeftOut> {
        let snapshot = self.fleet.snapshot();
        let is_left_out = |status: &&Status| {
            let place = plan.group.place.get(&status.worker.id);
            status.facts.models.contains_key(&plan.group.model)
                && place.is_none_or(|place| !plan.group.decode().contains(place))
        };
        let why = |status: &Status| match status.health {
            Health::Down => "it is down",
            Health::Unknown => "it was not seen to be well yet",
            Health::Up if status.draining => "it is draining",
            Health::Up if status.worker.role == Role::Prefill => "it takes prompts only",
            Health::Up => "it has just joined",
        };
        let left_out = snapshot.workers.iter().filter(is_left_out);
        left_out
            .map(|status| LeftOut {
                worker: status.worker.name.to_string(),
                why: why(status),
            })
            .collect()
    }
}
