//! The decode leg: the other worker fetches the KV blocks and generates the answer.

use std::pin::pin;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tracing::warn;

use super::exchange::{self, Sending};
use super::first_token;
use super::leg_context::{LegContext, PendingTransfer};
use super::offers::may_refuse_rank;
use super::outcome::{AttemptAnswer, AttemptOutcome, FailedAttempt};
use super::running::{OptimisticInsert, Running};
use crate::fleet::Worker;
use crate::observe;
use crate::prompt::Api;
use crate::relay::answer::first_token_gate::Verdict;
use crate::relay::choose::chosen::Split;
use crate::relay::failure::failure_owner::FailureOwner;
use crate::relay::failure::fault::{Fault, Part, Sign};
use crate::relay::failure::types::Stage;
use crate::traces::{Event, TrySpan};

/// How often a waiting decode leg checks whether the prefill worker's engine process is still the same.
pub(super) const CHECK_EVERY: Duration = Duration::from_secs(1);

const ENDED: &str = "the stream ended before its first token";
pub(super) const PREFILL_GONE: &str = "the engine process that computed the prompt is gone";

pub(super) struct Decoded {
    answer: exchange::Answer,
    /// The decode worker has the prompt's blocks. Otherwise it refuses the request, by its status or within a stream.
    pub(super) has_prompt: bool,
}

/// Why a decode leg has no first token.
pub(super) enum DecodeFailure {
    /// The prefill leg, which runs at the same time, has failed.
    Prefill(FailedAttempt),
    /// The worker did not answer, or its answer broke off.
    Exchange(exchange::Error),
    /// The engine reports a failure before its first token, or ends its stream as engines do then; or the prefill worker's engine
    /// process is gone, and the KV blocks with it.
    BeforeFirstToken(&'static str),
    /// No token for `transfer_timeout`: it may wait for KV blocks that never come, or in the engine's queue.
    Silent,
}

/// For how long a decode leg without an answer is watched. After that a prefill worker is taken to have handed the
/// blocks over.
struct Watch {
    until: Instant,
    is_stream: bool,
    /// Whether the prefill worker's process is checked meanwhile.
    checks_prefill: bool,
}

impl Watch {
    /// When the leg is looked at again; `None` once that is over. `may_wait`: an answer that is not streamed may not
    /// have begun, since requests wait at the decode worker.
    fn next_check(&self, now: Instant, may_wait: bool) -> Option<Instant> {
        if now >= self.until {
            let goes_on = may_wait && !self.is_stream;
            goes_on.then(|| now + CHECK_EVERY)
        } else if self.checks_prefill {
            Some((now + CHECK_EVERY).min(self.until))
        } else {
            Some(self.until)
        }
    }
}

/// True if requests wait in the decode engine. One whose leg has no answer may be among them, and its blocks not
/// fetched yet.
fn has_waiting(decode: &Worker) -> bool {
    let reported = decode.load.reported();
    reported.is_some_and(|report| report.waiting > 0)
}

impl LegContext<'_> {
    /// Sends the decode leg at `now`, and waits for its first token; for an answer that is not streamed, for its first byte.
    pub(super) async fn decode_leg(
        &self,
        body: &Bytes,
        now: Instant,
        span: Option<&TrySpan>,
    ) -> Result<Decoded, DecodeFailure> {
        let timer = Box::pin(tokio::time::sleep_until(self.attempt_deadline(now).into()));
        let sending = Sending {
            rank: self.decode_rank(),
            // Once fetched, the blocks are freed and may be others' when the leg is sent again; a room may be used already.
            reuse: self.course.reuse().without_replacement(),
            carried: None,
            span,
        };
        let mut answer = exchange::attempt(self.job, body, sending, &self.choice.worker, timer)
            .await
            .map_err(DecodeFailure::Exchange)?;
        // What comes before the first token stays in the answer, for the client.
        let why = match first_token::wait(self.job, &mut answer).await {
            Ok(verdict @ (Verdict::Token | Verdict::Refusal)) => {
                let has_prompt = verdict == Verdict::Token && answer.head.status.is_success();
                return Ok(Decoded { answer, has_prompt });
            }
            Ok(Verdict::Error) => "the engine reported an error before its first token",
            Ok(Verdict::GivenUp | Verdict::Undecided) => ENDED,
            // vLLM cuts a Responses stream when it could not fetch the blocks; other streams break only with the engine.
            Err(error) if self.job.api == Api::Responses && error.is_cut() => ENDED,
            Err(error) => return Err(DecodeFailure::Exchange(error)),
        };
        Err(DecodeFailure::BeforeFirstToken(why))
    }

    /// Sends the decode leg after a prefill leg, and watches the prefill worker meanwhile.
    pub(super) async fn run_decode_leg(
        &self,
        body: Bytes,
        now: Instant,
        span: Option<&TrySpan>,
    ) -> Result<Decoded, DecodeFailure> {
        let Self { plan, settings, .. } = *self;
        let mut answer = pin!(self.decode_leg(&body, now, span));
        // Otherwise the decode engine itself reports a failed transfer.
        let is_watched = settings.connector.needs_bootstrap();
        if plan.is_stream && !is_watched {
            return answer.await;
        }
        let patience = if plan.is_stream {
            settings.transfer_timeout
        } else {
            // Silent until its end. The loss of a process is noticed late, long after the blocks have come.
            2 * settings.transfer_timeout
        };
        let watch = Watch {
            until: now + patience,
            is_stream: plan.is_stream,
            checks_prefill: is_watched,
        };
        loop {
            if is_watched && self.is_prefill_gone() {
                return Err(DecodeFailure::BeforeFirstToken(PREFILL_GONE));
            }
            let next_check = watch.next_check(observe::now(), has_waiting(&self.choice.worker));
            let Some(next_check) = next_check else {
                break;
            };
            tokio::select! {
                biased;
                answer = &mut answer => return answer,
                () = tokio::time::sleep_until(next_check.into()) => {}
            }
        }
        if plan.is_stream {
            Err(DecodeFailure::Silent)
        } else {
            self.prefill.set_done(observe::now());
            answer.await
        }
    }

    /// What the end of the decode leg that was sent at `sent` means for the attempt. `tokens`: the prompt's, and
    /// those that the prefill worker had cached, if it says so.
    pub(super) fn decode_ended(
        &self,
        decoded: Result<Decoded, DecodeFailure>,
        mut running: Running,
        mut span: Option<Box<TrySpan>>,
        transfer: PendingTransfer<'_>,
        tokens: Option<(u64, u64)>,
        sent: Instant,
    ) -> AttemptOutcome {
        let Decoded { answer, has_prompt } = match decoded {
            Ok(decoded) => decoded,
            Err(failure) => {
                let failed = self.decode_failed(failure, transfer);
                failed.end_try(span.as_deref_mut());
                return Err(failed);
            }
        };
        running.span = span;
        let status = answer.head.status;
        let worker = &self.choice.worker;
        let is_trial = self.choice.is_trial_of(worker);
        let of_status = self
            .relay
            .on_status(self.job, worker, &answer, sent, is_trial);
        let is_rank_refused =
            self.decode_rank().is_some() && may_refuse_rank(status, answer.first.as_ref());
        let sign = if is_rank_refused {
            Sign::RankRefused
        } else {
            of_status
        };
        let answer = Box::new(AttemptAnswer {
            is_converted: self.job.is_converted,
            answer,
            running,
            decision: self.choice.decision,
            attempts: self.course.count,
            split: Split::Pair(self.prefill.leg(tokens.filter(|_| has_prompt))),
        });
        let fault = Fault::of_answer(Part::DecodeLeg, status, sign);
        if matches!(sign, Sign::Retryable | Sign::KeyRefused) {
            // The decode worker takes no request; the transfer is dropped, since only it could fetch the blocks.
            drop(transfer);
        } else if fault.is_some_and(|fault| fault.stage == Stage::Transfer) {
            self.transfer_failed(transfer, &format!("it answered {status}"));
        } else {
            // A decode engine that refuses the request itself, or its rank, makes the prefill engine free the blocks.
            transfer.release();
            if !has_prompt {
                self.metrics.count_transfer("refused");
            }
        }
        match fault {
            Some(fault) => Err(FailedAttempt::answered(fault, answer)),
            None => Ok(answer),
        }
    }

    /// The decode worker has the prompt's blocks at `now`. The attempt began at `started`, and the decode leg was sent at `sent`.
    pub(in crate::relay) fn on_transferred(&self, now: Instant, started: Instant, sent: Instant) {
        let Self {
            relay,
            metrics,
            job,
            plan,
            choice,
            prefill,
            ..
        } = *self;
        let queued = started.saturating_duration_since(job.context.started);
        let took = now.saturating_duration_since(sent);
        metrics.queue.observe(queued.as_secs_f64());
        metrics.decode.observe(took.as_secs_f64());
        metrics.completed.inc();
        let (client, is_trial) = (job.context.client, prefill.is_transfer_trial());
        plan.model
            .report_transferred(&prefill.worker, client, is_trial, started);
        let (worker, rank) = (&choice.worker, self.decode_rank());
        if plan.rank_refused_by == Some(worker.id) {
            relay.on_rank_refused(worker);
        }
        OptimisticInsert::new(&relay.caches, now, (worker, rank), plan).confirm();
        for coming in plan.expect(&relay.caches, worker, rank) {
            coming.on_first_token(now);
        }
        if let Some(trace) = job.context.trace() {
            let worker = worker.name.clone();
            trace.event(now, Event::KvTransfer { worker, took });
        }
    }

    /// The attempt of a decode leg without a first token.
    fn decode_failed(
        &self,
        failure: DecodeFailure,
        transfer: PendingTransfer<'_>,
    ) -> FailedAttempt {
        let name = &self.choice.worker.name;
        let (why, owner) = match failure {
            DecodeFailure::Prefill(failed) => {
                self.metrics.count_transfer("prefill_failed");
                return failed;
            }
            DecodeFailure::Exchange(error) => {
                let deadline = self.course.deadline();
                return FailedAttempt::unanswered(Stage::Worker, name, &error, deadline);
            }
            DecodeFailure::BeforeFirstToken(why) => (why, FailureOwner::KvTransfer),
            // It may wait in the engine's queue, which is no fault.
            DecodeFailure::Silent => (
                "no first token in time after a prefill leg",
                FailureOwner::Unattributed,
            ),
        };
        self.transfer_failed(transfer, why);
        FailedAttempt::new(Fault::of_transfer(owner), format!("{name}: {why}"))
    }

    /// Which of the two workers is at fault is not known. If transfers from one prefill worker fail for one request
    /// after another, it gets no prefill legs for a while, and decode workers compute the prompts.
    /// `reason`: what was seen of it.
    fn transfer_failed(&self, transfer: PendingTransfer<'_>, reason: &str) {
        transfer.fail();
        warn!(
            id = %self.job.context.id,
            prefill = %self.prefill.worker.name,
            decode = %self.choice.worker.name,
            reason,
            "KV transfer failed"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::load::LoadReport;
    use crate::fleet::registry::tests::worker;

    #[test]
    fn an_answer_that_may_wait_at_the_decode_worker_is_watched_on() {
        let now = observe::now();
        let second = Duration::from_secs(1);
        let until = now + 10 * second;
        for (is_stream, checks_prefill, after, may_wait, expected) in [
            (true, true, 0_u32, true, Some(1)),
            (true, true, 10, true, None),
            (false, true, 0, false, Some(1)),
            (false, true, 10, false, None),
            (false, true, 10, true, Some(11)),
            // There is nothing to check before the end.
            (false, false, 0, true, Some(10)),
            (false, false, 12, true, Some(13)),
            (false, false, 12, false, None),
        ] {
            let watch = Watch {
                until,
                is_stream,
                checks_prefill,
            };
            let next = watch.next_check(now + after * second, may_wait);
            let expected = expected.map(|seconds: u32| now + seconds * second);
            assert_eq!(
                next, expected,
                "{is_stream} {checks_prefill} {after} {may_wait}"
            );
        }
    }

    #[test]
    fn requests_wait_at_a_decode_worker_while_its_engine_says_so() {
        let worker = worker("d");
        assert!(!has_waiting(&worker), "it has reported nothing");
        for (running, waiting, expected) in [(3, 0, false), (3, 1, true), (0, 0, false)] {
            worker.load.report(LoadReport {
                at: observe::now(),
                running,
                waiting,
                deferred: 0,
                kv_usage: 0.5,
            });
            assert_eq!(has_waiting(&worker), expected, "{running} {waiting}");
        }
    }
}
