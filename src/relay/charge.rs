//! What a request counts in the limits of its tenant: reserved once its prompt is known, and corrected when it ends.

use super::core::Relay;
use super::job::{Error, Job};
use super::plan::Plan;
use super::prompt::cached_prefix::ViewRange;
use crate::limits::{Charge, Known, Request};
use crate::prompt::PeekedBody;

/// Workers whose caches are looked at for the longest cached prefix.
const OWNERS_MAX: usize = 4;

/// What the body says of the answer's length.
#[derive(Clone, Copy, Debug)]
pub(super) struct WantedOutput {
    max_tokens: Option<u64>,
    choices: u64,
    odd_value: Option<&'static str>,
}

impl WantedOutput {
    pub(super) fn of(peek: &PeekedBody<'_>) -> Self {
        Self {
            max_tokens: peek.max_tokens,
            choices: peek.choices.unwrap_or(1),
            odd_value: peek.odd_value,
        }
    }

    /// The most tokens of the answer, if it has one choice.
    pub(super) fn of_only_choice(&self) -> Option<u64> {
        self.max_tokens.filter(|_| self.choices == 1)
    }
}

impl Relay {
    /// Reserves what a request may use, if its tenant has limits. Dropping the charge before an engine was sent the
    /// request gives everything back.
    pub(super) async fn reserve(
        &self,
        job: &Job<'_>,
        plan: &Plan,
        wanted: WantedOutput,
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
                    max_tokens: wanted.max_tokens,
                    choices: wanted.choices,
                    odd_value: wanted.odd_value,
                    generates: job.api.generates(),
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
        let everywhere = ViewRange::everywhere(prefixes.places());
        let owners = prefixes.owners(&everywhere);
        let cached = owners.indices.iter().map(|index| {
            let cached = prefixes.cached(everywhere.place(*index));
            cached.tokens()
        });
        cached.max().unwrap_or(0).into()
    }
}
