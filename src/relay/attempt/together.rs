//! One attempt of a disaggregated request at SGLang: a prefill and a decode leg at the same time.
//!
//! If one leg fails, the other waits for it in its engine, and holds a place there, for up to 300 s. So whenever the attempt
//! ends without an answer, also because the client left, both legs are dropped, and with them their connections. The
//! prefill worker answers once the decode worker has the blocks; its answer is read to know of its failure only.

use std::pin::{Pin, pin};
use std::time::{Duration, Instant};

use super::decode_leg::{CHECK_EVERY, DecodeFailure, Decoded, PREFILL_GONE};
use super::exchange::{self, Sending};
use super::leg_context::{LegContext, PendingTransfer};
use super::outcome::{AttemptOutcome, FailedAttempt};
use super::running::{OptimisticInsert, Running, count_prompt};
use crate::observe;
use crate::relay::course::reuse::Reuse;
use crate::relay::failure::failure_owner::FailureOwner;
use crate::relay::failure::fault::{Fault, Part, Sign};
use crate::relay::failure::types::Stage;
use crate::relay::kv_transfer::{Legs, Rendezvous, TransferError};
use crate::traces::{Leg, TrySpan};

/// A request that the prefill engine refuses, the decode engine refuses too, and says why.
const SAME_REFUSAL_TIMEOUT: Duration = Duration::from_secs(1);

enum PrefillEnd {
    /// The decode worker has the blocks.
    Taken,
    /// An error that the decode worker will answer, too.
    Refused,
    Failed(FailedAttempt),
}

/// A prefill leg, which nothing but its owner keeps open.
type OpenLeg = Pin<Box<dyn Future<Output = PrefillEnd> + Send>>;

impl LegContext<'_> {
    pub(in crate::relay) async fn run_together(&self, legs: &Legs) -> AttemptOutcome {
        let Self {
            relay,
            metrics,
            job,
            plan,
            choice,
            prefill,
            ..
        } = *self;
        let started = observe::now();
        let tokens = plan.request.prompt_tokens;
        metrics.disaggregated.inc();
        plan.model.on_decision(tokens, &prefill.decision);
        let bootstrap_info = prefill.bootstrap_info.as_deref();
        let room = bootstrap_info
            .and_then(|info| Rendezvous::new(info, fastrand::u64(..), self.prefill_rank()));
        let Some(room) = room else {
            let error = TransferError::NoBootstrap;
            metrics.count_transfer(error.as_str());
            return Err(self.no_prefill(FailureOwner::Unattributed, &error));
        };
        let running = self.begin(started, room.rank());
        let rank = self.prefill_rank();
        let insert = OptimisticInsert::new(&relay.caches, started, (&prefill.worker, rank), plan);
        let mut counted = count_prompt(plan, &prefill.worker, &prefill.decision).at_rank(rank);
        if plan.is_stream {
            // An answer that is not streamed comes at its end, and says nothing of the prefill worker's speed.
            counted = counted.sent_at(started, true);
        }
        let computing = Running::computing(&relay.caches, plan, started, counted);
        let mut computing = Some(computing);
        let mut prefill_span = self.begin_try(started, Leg::Prefill, room.rank());
        let span = self.begin_try(started, Leg::Decode, self.decode_rank());
        let transfer = PendingTransfer {
            metrics,
            pinned: None,
        };

        let limit = self.attempt_deadline(started);
        let mut prefill_leg =
            self.prefill_leg_together(legs, &room, limit, prefill_span.as_deref());
        let decoded = {
            let body = legs.meeting(&room);
            let decode_leg = self.decode_leg(&body, started, span.as_deref());
            let prefill_leg = (&mut prefill_leg, prefill_span.as_deref_mut());
            self.wait_for_both(decode_leg, prefill_leg, &mut computing)
                .await
        };
        let has_prompt = decoded.as_ref().is_ok_and(|decoded| decoded.has_prompt);
        // What the prefill worker had cached is in the decode worker's own usage.
        let mut answer = self.decode_ended(decoded, running, span, transfer, None, started)?;
        if !has_prompt {
            return Ok(answer);
        }
        let now = observe::now();
        if let Some(span) = &mut prefill_span {
            // Unless its answer was there first.
            span.end(now);
        }
        insert.confirm();
        end_prefill(&mut computing, now);
        let (client, is_trial) = (job.context.client, choice.is_trial_of(&prefill.worker));
        plan.model
            .report_success(&prefill.worker, client, is_trial, started);
        prefill.worker.on_taken(started);
        job.on_no_refusal_of_key(&prefill.worker, started);
        self.on_transferred(now, started, started);
        // Closing it now could cancel it in the engine, which may not have noticed yet that the blocks were taken.
        answer.running.prefill_leg = Some(Box::new(prefill_leg));
        Ok(answer)
    }

    fn prefill_leg_together(
        &self,
        legs: &Legs,
        room: &Rendezvous,
        limit: Instant,
        span: Option<&TrySpan>,
    ) -> OpenLeg {
        let sending = Sending {
            rank: room.rank(),
            reuse: Reuse::Never,
            carried: None,
            span,
        };
        let worker = self.prefill.worker.clone();
        let body = legs.meeting(room);
        let request = exchange::request(self.job, &body, sending, &worker);
        let retry_statuses = self.relay.settings.advanced.retry_statuses.clone();
        let (api, has_own_key) = (self.job.api, self.job.sends_own_key(&worker));
        let deadline = self.course.deadline();
        Box::pin(async move {
            let timer = Box::pin(tokio::time::sleep_until(limit.into()));
            let read = pin!(async {
                // Over a connection of its own: an idle one that the engine has closed would leave the decode leg waiting.
                let mut answer = exchange::attempt_anew(&worker, request, timer).await?;
                answer.read_whole().await?;
                Ok::<_, exchange::Error>(answer.head.status)
            });
            let status = match read.await {
                Ok(status) => status,
                Err(error) => {
                    let name = &worker.name;
                    let failed = FailedAttempt::unanswered(Stage::Prefill, name, &error, deadline);
                    return PrefillEnd::Failed(failed);
                }
            };
            if status.is_success() {
                return PrefillEnd::Taken;
            }
            let sign = Sign::of_status(status, api, has_own_key, &retry_statuses);
            let Some(fault) = Fault::of_answer(Part::PrefillLeg, status, sign) else {
                return PrefillEnd::Refused;
            };
            let error = format!("{} answered {status}", worker.name);
            PrefillEnd::Failed(FailedAttempt::new(fault, error))
        })
    }

    /// Waits for the decode leg's first token, and for as long for a failure of the prefill leg. `computing`: what counts at the
    /// prefill worker, until the decode worker has the blocks.
    async fn wait_for_both(
        &self,
        decode_leg: impl Future<Output = Result<Decoded, DecodeFailure>>,
        (prefill_leg, mut span): (&mut OpenLeg, Option<&mut TrySpan>),
        computing: &mut Option<Running>,
    ) -> Result<Decoded, DecodeFailure> {
        let mut decode_leg = pin!(decode_leg);
        let mut is_prefill_open = true;
        // Until when the decode worker must have its first token, or its answer.
        let mut silent_at: Option<Instant> = None;
        loop {
            let now = observe::now();
            if silent_at.is_some_and(|until| now >= until) {
                return Err(DecodeFailure::Silent);
            }
            if self.is_prefill_gone() && is_prefill_open {
                return Err(DecodeFailure::BeforeFirstToken(PREFILL_GONE));
            }
            let next_check = now + CHECK_EVERY;
            let next_check = silent_at.map_or(next_check, |until| until.min(next_check));
            tokio::select! {
                biased;
                answer = &mut decode_leg => return answer,
                end = &mut *prefill_leg, if is_prefill_open => {
                    is_prefill_open = false;
                    let now = observe::now();
                    let span = span.take();
                    match end {
                        PrefillEnd::Failed(failed) => {
                            failed.end_try(span);
                            return Err(DecodeFailure::Prefill(failed));
                        }
                        PrefillEnd::Refused => {
                            if let Some(span) = span {
                                span.fail(now, "client_error", "the engine refused it".to_owned());
                            }
                            silent_at = Some(now + SAME_REFUSAL_TIMEOUT);
                        }
                        PrefillEnd::Taken => {
                            if let Some(span) = span {
                                span.end(now);
                            }
                            end_prefill(computing, now);
                            self.prefill.set_done(now);
                            // An answer that is not streamed comes at its end.
                            if self.plan.is_stream {
                                silent_at = Some(now + self.settings.transfer_timeout);
                            }
                        }
                    }
                }
                () = tokio::time::sleep_until(next_check.into()) => {}
            }
        }
    }
}

/// The prefill worker has computed the prompt, and has no more to do for the request.
fn end_prefill(computing: &mut Option<Running>, now: Instant) {
    if let Some(mut computing) = computing.take() {
        computing.on_first_token(now);
    }
}
