//! The first thing that happens to a request: whether its tenant may use the model, what engines are asked for beside what the
//! client asks for, and what is counted if nothing was sent.

use std::sync::Arc;

use hyper::Response;
use smallvec::SmallVec;

use super::core::Relay;
use super::failure::types::Outcome;
use super::job::{Error, FailedRequest, Job};
use super::request::body_edit::{self, Edit};
use super::request::context::RequestKind;
use super::request::usage_option::{self, UnaskedUsage};
use super::request::{output_cap, priority_cap};
use crate::http::Body;
use crate::prompt::PeekedBody;

/// How much is logged of the model's name in a refused request, which a client can make as long as a body.
const MAX_LOGGED_NAME_BYTES: usize = 256;

impl Relay {
    /// Sends a request to an engine and returns the engine's answer, whatever its status. `peek` is boxed, so that no future on the
    /// way has a place for it.
    pub async fn run(
        self: &Arc<Self>,
        job: &Job<'_>,
        peek: Box<PeekedBody<'_>>,
    ) -> Result<Response<Body>, Error> {
        let asked = peek.model.clone();
        let answer = match self.check_right(job.context.tenant, peek.model.as_deref()) {
            Ok(()) => self.run_permitted(job, peek).await,
            Err(error) => Err(error.into()),
        };
        answer.map_err(|failed| {
            let FailedRequest { error, model } = failed;
            if let (Some(summary), Some(asked)) = (&job.context.summary, asked) {
                let name = &asked[..asked.floor_char_boundary(MAX_LOGGED_NAME_BYTES)];
                summary.update(|summary| {
                    if summary.model.is_none() {
                        summary.requested_model.get_or_insert_with(|| name.into());
                    }
                });
            }
            let api = job.asked_api().as_str();
            self.models
                .count_unanswered(model.as_ref(), api, error.outcome());
            self.without_others(job.context.tenant, error)
        })
    }

    /// Counts a request that the router answered with an error before it came here. `api`: [`crate::prompt::Api::as_str`], or `none`.
    /// `is_refused`: the fault is the client's, or a line of a batch waits for another configuration.
    pub fn count_unsent(&self, api: &'static str, is_refused: bool) {
        let outcome = if is_refused {
            Outcome::Refused
        } else {
            Outcome::RouterFailed
        };
        self.models.count_unanswered(None, api, outcome);
    }

    async fn run_permitted(
        self: &Arc<Self>,
        job: &Job<'_>,
        mut peek: Box<PeekedBody<'_>>,
    ) -> Result<Response<Body>, FailedRequest> {
        let name = peek
            .model
            .as_deref()
            .and_then(|model| self.names().get(model));
        let asking = if self.needs_usage() {
            usage_option::asking(job.api, &job.body, &peek)
        } else {
            None
        };
        if let Some(name) = name {
            // Boxed, so that other requests do not carry its state.
            return Box::pin(self.redirect(job, *peek, name, asking)).await;
        }
        let edited = self.edited(job, &mut peek, asking);
        self.carry(edited.as_deref().unwrap_or(job), peek).await
    }

    /// The request with what engines are asked for beside what the client asks for, if that is anything.
    fn edited<'a>(
        &self,
        job: &Job<'a>,
        peek: &mut PeekedBody<'_>,
        asking: Option<(Edit, UnaskedUsage)>,
    ) -> Option<Box<Job<'a>>> {
        let (asking, unasked_usage) = asking.unzip();
        let (max_tokens, cap) = self.capped(job, peek, None).unzip();
        let priority = self.capped_priority(job, peek);
        let asked = asking.into_iter().chain(cap);
        let mut edits: SmallVec<[Edit; 2]> = asked.chain(priority).collect();
        if edits.is_empty() {
            return None;
        }
        peek.max_tokens = peek.max_tokens.or(max_tokens);
        // Boxed, so that other requests do not carry the place of a second job.
        Some(Box::new(Job {
            body: body_edit::applied(&job.body, &mut edits),
            unasked_usage: unasked_usage.unwrap_or_default(),
            ..job.clone()
        }))
    }

    /// The output tokens that a request gets whose tenant may not have any number of them, if it asks for none, with the
    /// edit of its body. `target`: the model that its name stands for.
    pub(super) fn capped(
        &self,
        job: &Job<'_>,
        peek: &PeekedBody<'_>,
        target: Option<&str>,
    ) -> Option<(u64, Edit)> {
        let limits = self.tenants().of(job.context.tenant).limits.as_ref()?;
        let asked = peek.model.as_deref();
        let max = limits.max_tokens(asked.or(target)?, target)?;
        output_cap::cap(job.api, &job.body, peek, max)
    }

    /// The edit of a body that asks its engine for an earlier place than its tenant may have, once tenants have priorities.
    pub(super) fn capped_priority(&self, job: &Job<'_>, peek: &PeekedBody<'_>) -> Option<Edit> {
        if !self.tenants().has_priorities {
            return None;
        }
        let max = match job.context.kind {
            // It comes after all others, whatever it says.
            RequestKind::Batch(_) => 0,
            RequestKind::Interactive | RequestKind::Background => {
                self.tenants().of(job.context.tenant).max_priority
            }
        };
        priority_cap::cap(&job.body, peek, max)
    }

    /// Whether the usage of streams is counted for a tenant or written down.
    fn needs_usage(&self) -> bool {
        let is_counted = self.usage.has_log() || self.tenants().listed().next().is_some();
        self.settings.stream_usage && is_counted
    }
}
