//! The model that a request's name leads to, and fallbacks if that model has no worker that can answer.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use hyper::{HeaderMap, Response};
use smallvec::smallvec;
use tracing::debug;

use super::core::Relay;
use super::job::{Error, FailedRequest, Job, RequestedName};
use super::planner::NO_WORKER_RETRY_AFTER;
use super::request::body_edit::{self, Edit};
use super::request::session_key::session_key;
use super::request::target::{Candidate, Name};
use super::request::usage_option::UnaskedUsage;
use crate::http::Body;
use crate::ids::{Model, Tenant};
use crate::observe;
use crate::prompt::PeekedBody;

impl Relay {
    pub(super) async fn redirect(
        self: &Arc<Self>,
        job: &Job<'_>,
        peek: PeekedBody<'_>,
        name: &Name,
        asking: Option<(Edit, UnaskedUsage)>,
    ) -> Result<Response<Body>, FailedRequest> {
        let session = session_key(name.key_sources(), job.headers, &peek);
        let session = session.or(job.context.response.map(|response| response.root().0));
        let may_use = |model: &str| self.may_use_for(job.context.tenant, name, model);
        let random = fastrand::u64(..);
        let mut candidates = self.names().candidates(name, session, random, may_use);
        // Another model could not go on with an answer that this one began, however a new request would be drawn.
        if let Some(resume) = job.resume
            && let Some(began) = self.names().model_that(name, |model| resume.is_of(model))
        {
            candidates = smallvec![began];
        }
        let model_json = peek.model_json;
        let caps: Vec<_> = candidates
            .iter()
            .map(|candidate| self.capped(job, &peek, Some(&candidate.model)))
            .collect();
        let priority = self.capped_priority(job, &peek);
        let mut peek = Some(peek);
        let unasked_usage = asking.as_ref().map(|(_, unasked)| *unasked);
        let last = candidates.len() - 1;
        // The last one whose workers have failed.
        let mut failed = None;
        for (index, candidate) in candidates.iter().enumerate() {
            let Candidate { model, reason } = candidate;
            if index < last && !self.has_usable_worker(model, observe::now()) {
                debug!(id = %job.context.id, requested = %name.requested, %model, "the model has no worker that can take requests; trying the fallback");
                continue;
            }
            let labels = [&*name.requested, &**model, reason.as_str()];
            self.metrics.model_targets.with_label_values(&labels).inc();
            let cap = caps[index].clone();
            let max_tokens = cap.as_ref().map(|(max_tokens, _)| *max_tokens);
            let asked = asking.iter().map(|(edit, _)| edit.clone());
            let capped = cap.map(|(_, edit)| edit).into_iter();
            let more = asked.chain(capped.chain(priority.clone()));
            let named = Job {
                body: edited(&job.body, model_json, name, model, more),
                target: job.target.clone(),
                requested: Some(RequestedName {
                    name: name.requested.clone(),
                    reason: *reason,
                }),
                unasked_usage: unasked_usage.unwrap_or_default(),
                context: job.context.clone(),
                ..*job
            };
            if let Some(summary) = &job.context.summary {
                summary.update(|summary| summary.requested_model = Some(name.requested.clone()));
            }
            // Read once more only after a failure.
            let own = match peek.take() {
                Some(peek) => PeekedBody {
                    model: Some(Cow::Borrowed(&**model)),
                    max_tokens: peek.max_tokens.or(max_tokens),
                    ..peek
                },
                None => body_edit::read_again(job.api, &named.body, self.block_bytes(), model),
            };
            match self.carry(&named, Box::new(own)).await {
                Err(attempted) if index < last && attempted.error.is_lack_of_workers() => {
                    debug!(id = %job.context.id, requested = %name.requested, %model, error = %attempted.error, "no worker of the model answered; trying the fallback");
                    failed = attempted.model.or(failed);
                    if let Some(summary) = &job.context.summary {
                        // The request goes on.
                        summary.update(|summary| summary.outcome = None);
                    }
                }
                Err(attempted) => {
                    // Clients read the name that they asked for, and may not know the model.
                    let asked = name.requested.to_string();
                    let error = match attempted.error {
                        // The configuration knows the name, so that it exists, whether or not a worker serves it now.
                        Error::UnknownModel { .. } | Error::NoWorker { .. } => Error::NoWorker {
                            model: asked,
                            is_known: true,
                            retry_after: NO_WORKER_RETRY_AFTER,
                        },
                        Error::NoPrefill { retry_after, .. } => Error::NoPrefill {
                            model: asked,
                            retry_after,
                        },
                        Error::NotSplit { reason, .. } => Error::NotSplit {
                            model: asked,
                            reason,
                        },
                        Error::NotServed { .. } => Error::NotServed { model: asked },
                        other => other,
                    };
                    if let (Some(_), None, Some(summary)) =
                        (&failed, &attempted.model, &job.context.summary)
                    {
                        summary.update(|summary| summary.outcome = Some(error.outcome().as_str()));
                    }
                    let model = attempted.model.or(failed);
                    return Err(FailedRequest { error, model });
                }
                answer => return answer,
            }
        }
        unreachable!("the last candidate's answer is returned")
    }

    /// For a dry run: the name that a body asks for, the model that would get it now, and the body for that model.
    /// `None` if the configuration says nothing of the name.
    pub(super) fn redirected(
        &self,
        headers: &HeaderMap,
        peek: &PeekedBody<'_>,
        body: &Bytes,
        tenant: Tenant,
        now: Instant,
    ) -> Option<(&Name, Candidate, Bytes)> {
        let name = self.names().get(peek.model.as_deref()?)?;
        let session = session_key(name.key_sources(), headers, peek);
        let may_use = |model: &str| self.may_use_for(tenant, name, model);
        let random = fastrand::u64(..);
        let mut candidates = self.names().candidates(name, session, random, may_use);
        // The first one with a worker that can take requests; if none has, the first.
        let is_usable = |candidate: &Candidate| self.has_usable_worker(&candidate.model, now);
        let usable = candidates.iter().position(is_usable);
        let candidate = candidates.swap_remove(usable.unwrap_or(0));
        let body = edited(body, peek.model_json, name, &candidate.model, None);
        Some((name, candidate, body))
    }

    /// Whether a worker of the model may be sent a request now.
    pub(super) fn has_usable_worker(&self, model: &Model, now: Instant) -> bool {
        let snapshot = self.fleet().snapshot();
        snapshot.models.get(model).is_some_and(|group| {
            let mut workers = group.decode_workers().iter();
            workers.any(|worker| worker.breaker.may_admit(now))
        })
    }
}

/// The body with the model's name, unless it has that name already, and with `more`.
fn edited(
    body: &Bytes,
    model_json: Option<&str>,
    name: &Name,
    model: &Model,
    more: impl IntoIterator<Item = Edit>,
) -> Bytes {
    let renames = name.requested != *model;
    let model_json = model_json.filter(|_| renames);
    // In a form the name stands without quotes.
    let is_bare = model_json.is_some_and(|json| !json.starts_with('"'));
    let text = if is_bare {
        model.to_string()
    } else {
        serde_json::Value::from(&**model).to_string()
    };
    let rename = model_json.and_then(|json| Edit::of_value(body, json, text));
    let mut edits: Vec<Edit> = rename.into_iter().chain(more).collect();
    body_edit::applied(body, &mut edits)
}
