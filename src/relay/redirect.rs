//! Sends a request for a configured name to the model that the name leads to, and to its fallbacks if that model has no
//! worker that can answer.

use std::borrow::Cow;
use std::time::Instant;

use bytes::Bytes;
use hyper::{HeaderMap, Response};
use tracing::info;

use super::core::Relay;
use super::job::{Error, Job, RequestedName};
use super::model_field;
use super::plan::NO_WORKER_RETRY_AFTER;
use super::session_key::session_key;
use super::target::{Candidate, Candidates, Name, Names};
use crate::http::Body;
use crate::ids::Model;
use crate::observe;
use crate::prompt::PeekedBody;

impl Relay {
    /// Sends a request to an engine and returns the engine's answer, whatever its status.
    pub async fn run(&self, job: &Job<'_>, peek: PeekedBody<'_>) -> Result<Response<Body>, Error> {
        let name = peek.model.as_deref().and_then(|it| self.names.get(it));
        match name {
            None => self.carry(job, peek).await,
            // Boxed, so that other requests do not carry its state.
            Some(name) => Box::pin(self.redirect(job, peek, name)).await,
        }
    }

    /// The names of this configuration.
    pub fn names(&self) -> &Names {
        &self.names
    }

    async fn redirect(
        &self,
        job: &Job<'_>,
        peek: PeekedBody<'_>,
        name: &Name,
    ) -> Result<Response<Body>, Error> {
        let session = session_key(name.key_sources(), job.headers, &peek).or(job.session);
        let candidates = self.names.candidates(name, session, fastrand::u64(..));
        let model_json = peek.model_json;
        let mut peek = Some(peek);
        let last = candidates.len() - 1;
        for (index, candidate) in candidates.iter().enumerate() {
            let Candidate { model, reason } = candidate;
            if index < last && !self.has_usable_worker(model, observe::now()) {
                info!(id = %job.id, requested = %name.requested, %model, "the model has no worker that can take requests; trying the fallback");
                continue;
            }
            let labels = [&*name.requested, &**model, reason.as_str()];
            self.metrics.model_targets.with_label_values(&labels).inc();
            let named = Job {
                body: of_model(&job.body, model_json, name, model),
                target: job.target.clone(),
                requested: Some(RequestedName {
                    name: name.requested.clone(),
                    reason: *reason,
                }),
                summary: job.summary.clone(),
                ..*job
            };
            if let Some(summary) = &job.summary {
                summary.update(|it| it.requested_model = Some(name.requested.clone()));
            }
            // Read once more only after a failure, or if it points into the body.
            let own = match peek.take().filter(|peek| peek.vllm_xargs.is_none()) {
                Some(peek) => PeekedBody {
                    model: Some(Cow::Borrowed(&**model)),
                    ..peek
                },
                None => model_field::read_again(job.api, &named.body, self.block_bytes(), model),
            };
            match self.carry(&named, own).await {
                Err(error) if index < last && error.is_lack_of_workers() => {
                    info!(id = %job.id, requested = %name.requested, %model, %error, "no worker of the model answered; trying the fallback");
                }
                // The configuration knows the name, so that it exists, whether or not a worker serves it now.
                Err(Error::UnknownModel { .. } | Error::NoWorker { .. }) => {
                    return Err(Error::NoWorker {
                        model: name.requested.to_string(),
                        retry_after: NO_WORKER_RETRY_AFTER,
                    });
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
        now: Instant,
    ) -> Option<(&Name, Candidate, Bytes)> {
        let name = self.names.get(peek.model.as_deref()?)?;
        let session = session_key(name.key_sources(), headers, peek);
        let candidates = self.names.candidates(name, session, fastrand::u64(..));
        let candidate = self.first_usable(candidates, now);
        let body = of_model(body, peek.model_json, name, &candidate.model);
        Some((name, candidate, body))
    }

    /// The first candidate with a worker that can take requests; if none has, the first.
    fn first_usable(&self, mut candidates: Candidates, now: Instant) -> Candidate {
        let is_usable = |it: &Candidate| self.has_usable_worker(&it.model, now);
        let usable = candidates.iter().position(is_usable);
        candidates.swap_remove(usable.unwrap_or(0))
    }

    /// Whether a worker of the model may be sent a request now.
    pub(super) fn has_usable_worker(&self, model: &Model, now: Instant) -> bool {
        let snapshot = self.fleet.snapshot();
        snapshot.models.get(model).is_some_and(|group| {
            let mut workers = group.workers[group.decode()].iter();
            workers.any(|worker| worker.breaker.may_admit(now))
        })
    }
}

/// The body with the model's name, unless it has that name already.
fn of_model(body: &Bytes, model_json: Option<&str>, name: &Name, model: &Model) -> Bytes {
    if name.requested == *model {
        return body.clone();
    }
    let replaced = model_json.and_then(|json| model_field::replaced(body, json, model));
    replaced.unwrap_or_else(|| body.clone())
}
