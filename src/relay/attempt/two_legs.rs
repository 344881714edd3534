//! One attempt of a disaggregated request: prefill leg, KV transfer, decode leg.
//!
//! The result of a prefill leg is used once, by the decode leg of the same attempt and with the same prompt: an
//! engine would not notice anything else, and answer wrong text. So every further attempt begins with a new prefill
//! leg. Nothing of the decode leg's answer goes to the client before its first token, because until then the KV
//! transfer may still fail.

use super::leg_context::{LegContext, PendingTransfer};
use super::outcome::{AttemptOutcome, FailedAttempt};
use crate::fleet::kv_transfer::Connector;
use crate::observe;
use crate::relay::choose::chosen::{Choice, Prefill};
use crate::relay::core::Relay;
use crate::relay::course::Course;
use crate::relay::failure::failure_owner::FailureOwner;
use crate::relay::failure::fault::Fault;
use crate::relay::failure::types::{Failure, Stage};
use crate::relay::job::Job;
use crate::relay::kv_transfer::Legs;
use crate::relay::plan::Plan;
use crate::traces::Leg;

impl Relay {
    pub(in crate::relay) async fn attempt_disaggregated(
        &self,
        job: &Job<'_>,
        plan: &Plan,
        choice: &Choice,
        prefill: &Prefill,
        course: &Course,
    ) -> AttemptOutcome {
        let (Some(settings), Some(Ok(legs)), Some(metrics)) =
            (&self.prefill_decode, &plan.legs, &plan.model.disaggregated)
        else {
            // A choice has a prefill worker only if all of these exist.
            let fault = Fault::new(
                Stage::Prefill,
                Failure::KvTransfer,
                FailureOwner::Unattributed,
            );
            let error = "not disaggregated".to_owned();
            return Err(FailedAttempt::new(fault, error));
        };
        let context = LegContext {
            relay: self,
            settings,
            metrics,
            job,
            plan,
            choice,
            prefill,
            course,
        };
        match settings.connector {
            Connector::Sglang => context.run_together(legs).await,
            Connector::Nixl | Connector::Mooncake | Connector::Moriio => context.run(legs).await,
        }
    }
}

impl LegContext<'_> {
    async fn run(&self, legs: &Legs) -> AttemptOutcome {
        let Self {
            settings,
            metrics,
            plan,
            prefill,
            ..
        } = *self;
        let started = observe::now();
        metrics.disaggregated.inc();
        // The decode worker receives the prompt, so the prefill worker's cached prefix is the one that counts.
        plan.model
            .on_decision(plan.request.prompt_tokens, &prefill.decision);
        // The request counts at both workers at once.
        let running = self.begin(started, self.prefill_rank());
        let result = match self.run_prefill_leg(legs, started).await {
            Ok(result) => result,
            Err(outcome) => return *outcome,
        };
        if self.is_prefill_gone() {
            metrics.count_transfer("prefill_failed");
            let why = "its engine was restarted";
            return Err(self.no_prefill(FailureOwner::Unattributed, &why));
        }
        let computed = observe::now();
        let tokens = u32::try_from(result.prompt_tokens).unwrap_or(u32::MAX);
        let pinned = settings
            .pinned
            .pin(computed, settings.lease, prefill.worker.id, tokens);
        if pinned.has_displaced {
            settings.families.pinned_forgotten.inc();
        }
        // From here on the blocks are pinned, even if the client disconnects.
        let transfer = PendingTransfer {
            metrics,
            pinned: Some(pinned),
        };
        let tokens = (result.prompt_tokens, result.cached_tokens);
        let body = legs.decode(result.params);
        let sent = observe::now();
        let span = self.begin_try(sent, Leg::Decode, self.decode_rank());
        let decoded = self.run_decode_leg(body, sent, span.as_deref()).await;
        let has_prompt = decoded.as_ref().is_ok_and(|decoded| decoded.has_prompt);
        let answer = self.decode_ended(decoded, running, span, transfer, Some(tokens), sent)?;
        if has_prompt {
            self.on_transferred(observe::now(), started, sent);
            let prefill = computed.saturating_duration_since(started);
            let dispatch = sent.saturating_duration_since(computed);
            metrics.prefill.observe(prefill.as_secs_f64());
            metrics.dispatch.observe(dispatch.as_secs_f64());
        }
        Ok(answer)
    }
}
