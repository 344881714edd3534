//! The decode leg: the other worker fetches the KV blocks and generates the answer.

use std::pin::pin;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tracing::warn;

use super::context::{LegContext, PendingTransfer};
use super::leg_answers::{DecodeFailure, wait_for_first_token};
use crate::observe;
use crate::relay::exchange::{self, Sending};
use crate::relay::failure::failure_owner::FailureOwner;
use crate::relay::failure::retries::Failure;
use crate::relay::outcome::{FailedAttempt, Stage};
use crate::relay::send::may_refuse_rank;
use crate::traces::TrySpan;

/// How often a waiting decode leg checks whether the prefill worker's engine process is still the same.
const CHECK_EVERY: Duration = Duration::from_secs(1);

impl LegContext<'_> {
    /// Sends the decode leg, and waits for its first token; for an answer that is not streamed, for its first byte.
    pub(super) async fn run_decode_leg(
        &self,
        body: Bytes,
        now: Instant,
        span: Option<&TrySpan>,
    ) -> Result<exchange::Answer, DecodeFailure> {
        let Self {
            job,
            choice,
            plan,
            settings,
            ..
        } = *self;
        let limit = self.relay.attempt_deadline(plan, now).min(self.deadline);
        let timer = Box::pin(tokio::time::sleep_until(limit.into()));
        // Once fetched, the blocks are freed and may be others' when the leg is sent again.
        let sending = Sending {
            rank: self.decode_rank(),
            reuse: self.attempts.reuse().without_replacement(),
            carried: None,
            span,
        };
        let mut answer = pin!(async {
            let mut answer = exchange::attempt(job, &body, sending, &choice.worker, timer)
                .await
                .map_err(DecodeFailure::Exchange)?;
            wait_for_first_token(job.api, &mut answer).await?;
            Ok(answer)
        });
        if !settings.connector.needs_bootstrap() {
            // The decode engine itself reports a failed transfer.
            return answer.await;
        }
        let patience = match plan.is_stream {
            true => settings.transfer_timeout,
            // Silent until its end. The loss of a process is noticed late, long after the blocks have come.
            false => 2 * settings.transfer_timeout,
        };
        let watched_until = now + patience;
        loop {
            if self.is_prefill_gone() {
                return Err(DecodeFailure::PrefillGone);
            }
            let now = observe::now();
            if now >= watched_until {
                break;
            }
            let next_check = (now + CHECK_EVERY).min(watched_until);
            tokio::select! {
                biased;
                answer = &mut answer => return answer,
                () = tokio::time::sleep_until(next_check.into()) => {}
            }
        }
        match plan.is_stream {
            true => Err(DecodeFailure::Silent),
            false => answer.await,
        }
    }

    /// Whether the decode engine may have refused the leg for the rank that it was pinned to.
    pub(super) fn refuses_rank(&self, answer: &exchange::Answer) -> bool {
        self.decode_rank().is_some() && may_refuse_rank(answer)
    }

    /// The attempt of a decode leg without a first token.
    pub(super) fn decode_failed(
        &self,
        failure: DecodeFailure,
        transfer: PendingTransfer<'_>,
    ) -> FailedAttempt {
        let name = &self.choice.worker.name;
        let (why, owner) = match failure {
            DecodeFailure::Exchange(error) => {
                return FailedAttempt::unanswered(Stage::Worker, name, &error, self.deadline);
            }
            DecodeFailure::BeforeFirstToken(why) => (why, FailureOwner::KvTransfer),
            DecodeFailure::PrefillGone => (
                "the engine process that computed the prompt is gone",
                FailureOwner::KvTransfer,
            ),
            // It may wait in the engine's queue, which is no fault.
            DecodeFailure::Silent => (
                "no first token in time after a prefill leg",
                FailureOwner::Unattributed,
            ),
        };
        self.transfer_failed(transfer);
        FailedAttempt {
            stage: Stage::Transfer,
            failure: Failure::KvTransfer,
            error: format!("{name}: {why}"),
            answer: None,
            owner,
            is_cut: false,
            is_rank_refused: false,
        }
    }

    /// Which of the two workers is at fault is not known. If transfers from one prefill worker fail for one request
    /// after another, it gets no prefill legs for a while, and decode workers compute the prompts.
    pub(super) fn transfer_failed(&self, transfer: PendingTransfer<'_>) {
        transfer.fail();
        warn!(
            id = %self.job.id,
            prefill = %self.prefill.worker.name,
            decode = %self.choice.worker.name,
            "KV transfer failed"
        );
    }
}
