//! What would be chosen, and why not the others.

use bytes::Bytes;
use hyper::HeaderMap;
use serde::Serialize;

use super::Error;
use super::Relay;
use super::held::KnownBy;
use crate::fleet::breaker;
use crate::observe;
use crate::prompt::Api;
use crate::prompt::Peek;
use crate::routing;

/// What `explain` answers.
#[derive(Debug, Serialize)]
pub struct Explanation {
    pub model: String,
    pub policy: routing::Policy,
    pub prompt_tokens: u32,
    pub prompt_blocks: usize,
    pub chosen: Option<String>,
    pub reason: Option<routing::Reason>,
    pub workers: Vec<Score>,
}

/// One worker, as a decision sees it.
#[derive(Debug, Serialize)]
pub struct Score {
    pub worker: String,
    pub is_usable: bool,
    pub breaker: breaker::State,
    pub requests: u32,
    pub pending_tokens: u64,
    pub decode_tokens: u64,
    pub cached_tokens: u32,
    /// How that is known.
    pub known_by: KnownBy,
    pub cost: f64,
}

impl Relay {
    /// What would be chosen for a request now, and what every worker would cost. Changes nothing.
    pub async fn explain(
        &self,
        api: Api,
        headers: &HeaderMap,
        mut peek: Peek<'_>,
        body: &Bytes,
    ) -> Result<Explanation, Error> {
        let plan = self.plan(api, headers, &mut peek, body).await?;
        let view = self.view(&plan, observe::now(), &[], usize::MAX);
        let decision = routing::decide(&plan.model.routing, &plan.request, &view);
        let scores = plan
            .group
            .workers
            .iter()
            .enumerate()
            .map(|(place, worker)| {
                let state = routing::View::state(&view, place);
                let cached_tokens = routing::View::cached_tokens(&view, place);
                Score {
                    worker: worker.name.to_string(),
                    is_usable: state.is_usable,
                    breaker: worker.breaker.state(),
                    requests: state.requests,
                    pending_tokens: state.pending_tokens,
                    decode_tokens: state.decode_tokens,
                    cached_tokens,
                    known_by: view.held().known_by(place),
                    cost: routing::cost::cost(
                        &plan.model.routing,
                        &plan.request,
                        &state,
                        cached_tokens,
                    ),
                }
            });
        Ok(Explanation {
            model: plan.group.model.to_string(),
            policy: plan.model.routing.policy,
            prompt_tokens: plan.request.prompt_tokens,
            prompt_blocks: match &plan.prompt.exact {
                Some(exact) => exact.blocks(),
                None => plan.prompt.blocks.len(),
            },
            chosen: decision.map(|decision| plan.group.workers[decision.place].name.to_string()),
            reason: decision.map(|decision| decision.reason),
            workers: scores.collect(),
        })
    }
}
