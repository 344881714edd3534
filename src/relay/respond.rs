//! Makes the client's response of an engine's answer: headers, the decision header, and a body that is metered.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use hyper::Response;
use hyper::header::{self, HeaderValue};

use super::account::usage::UsageEntry;
use super::account::usage_line::UsageLine;
use super::answer::engine_answer::Usage;
use super::answer::usage_rewriter::UsageRewriter;
use super::attempt::exchange;
use super::attempt::outcome::AttemptAnswer;
use super::choose::chosen::Split;
use super::continuation::{Reader, Refusal};
use super::core::Relay;
use super::job::{AnsweredAsChat, DECISION, Job, ServedBy};
use super::meter::Meter;
use super::next_answer::NextAnswer;
use super::plan::Plan;
use super::request::summary::StandingCell;
use super::request_count::RequestCount;
use super::stream::Continuing;
use super::{headers, stream};
use crate::http::Body;
use crate::prompt::Api;

impl Relay {
    pub(super) fn respond(
        self: &Arc<Self>,
        job: &Job<'_>,
        mut plan: Arc<Plan>,
        answer: Box<AttemptAnswer>,
        mut count: RequestCount,
        deadline: Instant,
    ) -> Response<Body> {
        let is_asked = self.settings.decision_header && job.headers.contains_key(DECISION);
        let decision = is_asked.then(|| decision_header(job, &plan, &answer));
        if let Some(summary) = &job.context.summary {
            summary.update(|summary| {
                summary.model = Some(plan.group.model.clone());
                summary.worker = Some(answer.running.worker().name.clone());
                summary.rank = answer.running.rank();
                summary.reason = Some(answer.decision.reason.as_str());
                summary.status = Some(answer.answer.head.status);
                summary.attempts += answer.attempts;
                let prefill = answer.split.prefill();
                summary.prefill_worker = prefill.map(|prefill| prefill.worker.name.clone());
                summary.prefill_rank = prefill.and_then(|prefill| prefill.rank);
            });
        }
        let status = answer.answer.head.status;
        let entry = self.usage_entry(job, &plan, &answer);
        let AttemptAnswer {
            answer,
            mut running,
            split,
            is_converted,
            decision: chosen,
            ..
        } = *answer;
        let wire = if is_converted { Api::Chat } else { job.api };
        let exchange::Answer {
            head,
            body,
            first,
            has_begun,
            timer,
            ..
        } = answer;
        if !status.is_success() {
            running.on_refusal();
        }
        let mut response = Response::new(());
        *response.status_mut() = status;
        *response.headers_mut() = headers::to_client(head.headers);
        if let Some(Ok(value)) = decision
            .map(Bytes::from)
            .map(HeaderValue::from_maybe_shared)
        {
            response.headers_mut().insert(DECISION, value);
        }
        // Nobody else asks which worker it was.
        if job.asked_api() == Api::Responses || job.gateway.is_some() {
            let served_by = ServedBy(running.worker().name.clone());
            response.extensions_mut().insert(served_by);
        }
        if is_converted {
            response.extensions_mut().insert(AnsweredAsChat);
        }
        count.wire = wire;
        let is_events = headers::is_event_stream(response.headers());
        let prompt = split.prefill().and_then(|prefill| prefill.tokens);
        let is_stream = is_events && status.is_success();
        let unasked_usage = Some(job.unasked_usage).filter(|usage| is_stream && usage.is_any());
        if unasked_usage.is_some() {
            response.headers_mut().remove(header::CONTENT_LENGTH);
        }
        let usage = prompt.map(|(prompt_tokens, cached_tokens)| {
            // The rewriter puts the prefill worker's cached tokens into `usage`, which changes the length.
            response.headers_mut().remove(header::CONTENT_LENGTH);
            Box::new(match wire {
                Api::Messages => {
                    UsageRewriter::of_messages(prompt_tokens, cached_tokens, is_events)
                }
                _ => UsageRewriter::new(cached_tokens, is_events),
            })
        });
        let own = Plan::own(&mut plan);
        let (continuation, resumed) = (own.continuation.take(), own.resumed.take());
        let settings = plan.model.stream_continuation.unwrap_or_default();
        let cached = prompt.map_or(chosen.cached_tokens.into(), |(_, cached)| cached);
        let reader = match (resumed, continuation.map(|request| *request)) {
            (Some(reader), _) => Some(Ok(*reader)),
            // Not a form of the request that was made for one worker only.
            (None, Some(Ok(_))) if plan.api != wire || job.api != wire => Some(Err(Refusal::Api)),
            (None, request) => {
                request.map(|request| request.map(|read| Reader::new(settings, read, cached)))
            }
        };
        let continuing = reader.filter(|_| is_stream).map(|reader| {
            response.headers_mut().remove(header::CONTENT_LENGTH);
            Box::new(self.continuing(job, plan, reader, deadline))
        });
        let interval = self.settings.keep_alive;
        // Streams of the Responses API get comments of their own.
        let gets_comments = is_events && wire != Api::Responses && !interval.is_zero();
        let limits = stream::Limits {
            idle: self.settings.stream_idle_timeout,
            keep_alive: gets_comments.then_some(interval),
            deadline,
            last_part: self.last_part(&job.context.kind).cloned(),
        };
        let mut meter = Meter::new(count, status, running, is_events, &job.context, entry);
        // A gateway's answer has the decode worker's own usage, which counts all that it received as cached.
        let prefill = split.prefill().filter(|_| job.gateway.is_none());
        meter.computed_by = prefill.map(|prefill| prefill.worker.clone());
        response.map(|()| {
            stream::relay(
                body,
                first,
                timer,
                limits,
                wire,
                status,
                is_events,
                is_converted,
                has_begun,
                meter,
                usage,
                unasked_usage,
                continuing,
                job.context.id,
            )
        })
    }

    /// What goes on with a stream on another worker, if the request allows it.
    fn continuing(
        self: &Arc<Self>,
        job: &Job<'_>,
        plan: Arc<Plan>,
        reader: Result<Reader, Refusal>,
        deadline: Instant,
    ) -> Continuing {
        let model = plan.group.model.clone();
        let counts = plan.model.families.continuations.clone();
        if let (Some(progress), Err(refusal)) = (job.progress, &reader) {
            progress.refuse(*refusal);
        }
        let allowed = reader.map(|mut reader| {
            if let Some(progress) = job.progress {
                reader.report_to(progress.clone(), &model);
            }
            (reader, NextAnswer::new(self.clone(), job, plan, deadline))
        });
        Continuing::new(allowed, job.context.id, model, counts)
    }

    /// Counts what an answer of success uses; `None` for other answers, and for APIs that compute nothing.
    fn usage_entry(
        &self,
        job: &Job<'_>,
        plan: &Plan,
        answer: &AttemptAnswer,
    ) -> Option<UsageEntry> {
        if !job.api.computes_prompt() || !answer.answer.head.status.is_success() {
            return None;
        }
        let profile = self.tenants().of(job.context.tenant);
        let tenant = &profile.name;
        let model = &plan.group.model;
        // Tenants that are not listed have the series of the one whose profile they share.
        let by_tenant = &plan.model.counts.usage;
        let counters = by_tenant.of(&self.usage, profile.id, tenant, model);
        let prefill = answer.split.prefill();
        let decision = prefill.map_or(&answer.decision, |prefill| &prefill.decision);
        let expected = Usage {
            prompt_tokens: plan.request.prompt_tokens.into(),
            cached_tokens: decision.cached_tokens.into(),
            ..Usage::default()
        };
        let line = || UsageLine {
            id: job.context.id,
            response: job.context.response,
            tenant: tenant.clone(),
            requested: job
                .requested
                .as_ref()
                .map(|requested| requested.name.clone()),
            model: model.clone(),
            api: job.asked_api(),
            worker: answer.running.worker().name.clone(),
            batch: job.context.kind.batch_line().map(|line| line.batch.clone()),
            started: job.context.started,
        };
        Some(UsageEntry::new(&self.usage, counters, expected, line))
    }
}

fn decision_header(job: &Job<'_>, plan: &Plan, answer: &AttemptAnswer) -> String {
    let decision = &answer.decision;
    let mut text = format!("worker={}; ", answer.running.worker().client_name);
    // Writing to memory cannot fail, here and below.
    if let Some(rank) = answer.running.rank() {
        let _ = write!(text, "rank={rank}; ");
    }
    let _ = write!(
        text,
        "reason={}; prompt_tokens={}; cached_tokens={}; cost_ms={:.0}; attempts={}",
        decision.reason.as_str(),
        plan.request.prompt_tokens,
        decision.cached_tokens,
        decision.cost * 1e3,
        answer.attempts,
    );
    if let Some(requested) = &job.requested {
        let (name, reason) = (&requested.name, requested.reason.as_str());
        let _ = write!(
            text,
            "; requested_model={name}; model={}; model_reason={reason}",
            plan.group.model
        );
    }
    if let Some(left) = job.standing.and_then(StandingCell::read) {
        let kinds = [("requests", left.requests), ("tokens", left.tokens)];
        for (kind, left) in kinds {
            let Some(left) = left else { continue };
            let _ = write!(text, "; remaining_{kind}={}/{}", left.remaining, left.limit);
        }
    }
    if !plan.queued.is_zero() {
        let _ = write!(text, "; queue_ms={}", plan.queued.as_millis());
    }
    match &answer.split {
        Split::Off => {}
        Split::Whole(reason) => {
            let _ = write!(text, "; disaggregated={}", reason.as_str());
        }
        Split::Pair(prefill) => {
            let _ = write!(
                text,
                "; disaggregated=yes; prefill={}",
                prefill.worker.client_name
            );
            if let Some(rank) = prefill.rank {
                let _ = write!(text, "; prefill_rank={rank}");
            }
            let decision = &prefill.decision;
            let _ = write!(
                text,
                "; prefill_reason={}; prefill_cached_tokens={}; prefill_cost_ms={:.0}",
                decision.reason.as_str(),
                decision.cached_tokens,
                decision.cost * 1e3,
            );
        }
    }
    text
}
