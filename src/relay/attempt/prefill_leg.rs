//! The prefill leg: one worker computes the prompt and says where its KV blocks are.

use std::time::Instant;

use tracing::warn;

use super::exchange::{self, Sending};
use super::leg_context::LegContext;
use super::offers::Offers;
use super::outcome::{AttemptAnswer, AttemptOutcome, FailedAttempt};
use super::running::{OptimisticInsert, Running, count_prompt};
use crate::observe;
use crate::relay::choose::chosen::Split;
use crate::relay::course::reuse::Reuse;
use crate::relay::failure::failure_owner::FailureOwner;
use crate::relay::failure::fault::{Fault, Part};
use crate::relay::failure::types::Stage;
use crate::relay::kv_transfer::{Legs, PrefillResult, Transfer, TransferError};
use crate::relay::traced;
use crate::traces::{Event, Leg, TrySpan};

impl LegContext<'_> {
    /// The prompt's blocks, or the outcome of an attempt that ends with its prefill leg.
    pub(in crate::relay) async fn run_prefill_leg(
        &self,
        legs: &Legs,
        now: Instant,
    ) -> Result<PrefillResult, Box<AttemptOutcome>> {
        let Self {
            relay,
            settings,
            job,
            plan,
            choice,
            prefill,
            ..
        } = *self;
        let worker = &prefill.worker;
        // Before the request counts at the worker.
        let rank = self.prefill_rank();
        let mut span = self.begin_try(now, Leg::Prefill, rank);
        let insert = OptimisticInsert::new(&relay.caches, now, (worker, rank), plan);
        let in_flight = count_prompt(plan, worker, &prefill.decision)
            .at_rank(rank)
            .sent_at(now, true);
        let mut running = Running::computing(&relay.caches, plan, now, in_flight);
        let transfer = Transfer::begin(
            settings.connector,
            job.api,
            // Unique for each attempt: the blocks of one must not be found by another.
            format!("{}-{}", job.context.id, self.course.count),
            worker.host(),
            prefill.bootstrap_info.clone(),
            rank,
            plan.request.seed,
        );
        let transfer = transfer.map_err(|error| self.no_transfer(error))?;
        let body = legs.prefill(&transfer);
        // An id that the router makes may be sent once only; an id that the engine makes is new each time.
        let reuse = if settings.connector.needs_bootstrap() {
            self.course.reuse().without_replacement()
        } else {
            self.course.reuse()
        };
        if let Some(span) = &mut span {
            span.update(|tried| tried.rank = transfer.rank());
        }
        let sending = Sending {
            rank: transfer.rank(),
            reuse,
            carried: None,
            span: span.as_deref(),
        };
        // The answer to a prefill leg is one token.
        let limit = relay.settings.first_byte_timeout;
        let timer = tokio::time::sleep_until((now + limit).min(self.course.deadline()).into());
        let timer = Box::pin(timer);
        // The decode leg need not name the rank.
        let mut offers = Offers::new(&body, sending.rank).keeping_rank(reuse != Reuse::Replaced);
        let sent = relay
            .send(job, &mut offers, sending, plan, worker, timer)
            .await;
        let mut answer = match sent {
            Ok(answer) => answer,
            Err(error) => return Err(self.exchange_failed(&error, span.as_deref_mut())),
        };
        if let Some(span) = &mut span {
            span.update(|tried| tried.rank = worker.pinned_to(tried.rank));
        }
        if !answer.head.status.is_success() {
            let status = answer.head.status;
            let is_trial = choice.is_trial_of(worker);
            let sign = relay.on_status(job, worker, &answer, now, is_trial);
            running.on_refusal();
            running.span = span;
            let answer = Box::new(AttemptAnswer {
                is_converted: job.is_converted,
                answer,
                running,
                decision: prefill.decision,
                attempts: self.course.count,
                split: Split::Pair(prefill.leg(None)),
            });
            let Some(fault) = Fault::of_answer(Part::PrefillLeg, status, sign) else {
                // The engine's error is the client's answer: the decode worker would answer the same.
                return Err(Box::new(Ok(answer)));
            };
            self.metrics.count_transfer("prefill_failed");
            return Err(Box::new(Err(FailedAttempt::answered(fault, answer))));
        }
        let whole = match answer.read_whole().await {
            Ok(whole) => whole,
            Err(error) => return Err(self.exchange_failed(&error, span.as_deref_mut())),
        };
        if let (Some(trace), Some(span)) = (job.context.trace(), &mut span) {
            let computed = observe::now();
            traced::end_prefill(span, computed, answer.head.status, &whole);
            let took = computed.saturating_duration_since(now);
            let worker = worker.name.clone();
            trace.event(computed, Event::PrefillLeg { worker, took });
        }
        // The meter sees only the answer of the decode leg.
        let (client, is_trial) = (job.context.client, choice.is_trial_of(worker));
        plan.model.report_success(worker, client, is_trial, now);
        worker.on_taken(now);
        job.on_no_refusal_of_key(worker, now);
        insert.confirm();
        running.on_first_token(observe::now());
        let result = transfer.end(&whole);
        match &result {
            Ok(_) => worker.returned_params.on_returned(),
            Err(error) => self.on_no_result(*error),
        }
        result.map_err(|error| self.no_transfer(error))
    }

    /// The prefill leg was answered, and there is nothing to transfer.
    fn on_no_result(&self, error: TransferError) {
        let worker = &self.prefill.worker;
        if error == TransferError::NoParams && worker.returned_params.on_missing(observe::now()) {
            warn!(
                worker = %worker.name,
                connector = %self.settings.connector,
                "a prefill leg returned no kv_transfer_params, so its prompt is computed again: the engine has no KV \
                 connector, or another one than prefill_decode.connector; start it with --kv-transfer-config (simulated \
                 engines: --kv-connector)"
            );
        }
    }

    /// The worker may have computed the prompt, but its blocks cannot be fetched.
    fn no_transfer(&self, error: TransferError) -> Box<AttemptOutcome> {
        self.metrics.count_transfer(error.as_str());
        Box::new(Err(self.no_prefill(FailureOwner::KvTransfer, &error)))
    }

    fn exchange_failed(
        &self,
        error: &exchange::Error,
        span: Option<&mut TrySpan>,
    ) -> Box<AttemptOutcome> {
        self.metrics.count_transfer("prefill_failed");
        let name = &self.prefill.worker.name;
        let deadline = self.course.deadline();
        let failed = FailedAttempt::unanswered(Stage::Prefill, name, error, deadline);
        failed.end_try(span);
        Box::new(Err(failed))
    }
}
