//! What a request counts in the limits of its tenant: reserved once its prompt is known, and corrected when it ends.

use super::core::Relay;
use super::job::{Error, Job};
use super::plan::Plan;
use super::prompt::cached_prefix::ViewRange;
use crate::limits::{Charge, Known, Request};

/// Workers whose caches are looked at for the longest cached prefix.
const OWNERS_MAX: usize = 4;

impl Relay {
    /// Reserves what a request may use, if its tenant has limits. `wanted`: what its body says of the answer's length. Dropping
    /// the charge before an engine was sent the request gives everything back.
    pub(super) async fn reserve(
        &self,
        job: &Job<'_>,
        plan: &Plan,
        wanted: Known,
    ) -> Result<Option<Charge>, Error> {
        let Some(limits) = &self.tenants().of(job.context.tenant).limits else {
            return Ok(None);
        };
        let cached_tokens = if limits.weighs_cached() {
            self.longest_cached(plan)
        } else {
            0
        };
        let model = &plan.group.model;
        let request = Request {
            id: job.context.charge,
            model: job
                .requested
                .as_ref()
                .map_or(model, |requested| &requested.name),
            target: model,
            known: if job.api.computes_prompt() {
                Known {
                    prompt_tokens: plan.request.prompt_tokens.into(),
                    cached_tokens,
                    generates: job.api.generates(),
                    ..wanted
                }
            } else {
                Known::default()
            },
        };
        let (admitted, standing) = limits.admit(request).await;
        if let Some(cell) = job.standing {
            cell.set(standing);
        }
        match admitted {
            Ok(charge) => Ok(Some(charge)),
            Err(refusal) => Err(Error::Limited(Box::new(refusal))),
        }
    }

    /// Tokens of the prompt that some worker has cached.
    fn longest_cached(&self, plan: &Plan) -> u64 {
        let prefixes = self.chooser().cached_prefixes(plan, OWNERS_MAX);
        let everywhere = ViewRange::everywhere(prefixes.places);
        // Which of several it is that have the longest does not matter here.
        let owners = prefixes.owners(&everywhere, |_| true);
        let cached = owners.indices.iter().map(|index| {
            let cached = prefixes.cached(everywhere.place(*index));
            cached.tokens()
        });
        cached.max().unwrap_or(0).into()
    }
}
