//! What attempts at one and at two workers share: how a request is sent, time limits, retryable answers.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use tokio::time::Sleep;
use tracing::warn;

use super::exchange::{self, Sending};
use super::offers::{Extra, Offers};
use crate::fleet::Worker;
use crate::http::circuit_breaker::State;
use crate::observe;
use crate::relay::core::Relay;
use crate::relay::failure::evidence::NEXT_TRIAL_PAUSE;
use crate::relay::failure::fault::Sign;
use crate::relay::headers;
use crate::relay::job::Job;
use crate::relay::plan::Plan;

/// An engine may ask for a pause (Retry-After), but not for a longer one than this.
const PAUSE_MAX: Duration = Duration::from_secs(30);

impl Relay {
    /// Sends one form of a request after the other, until the worker takes one.
    pub(in crate::relay) async fn send(
        &self,
        job: &Job<'_>,
        offers: &mut Offers<'_>,
        sending: Sending<'_>,
        plan: &Plan,
        worker: &Arc<Worker>,
        mut timer: Pin<Box<Sleep>>,
    ) -> Result<exchange::Answer, exchange::Error> {
        let mut left_out = None;
        loop {
            let sending = Sending {
                rank: offers.rank(),
                ..sending
            };
            let answer = exchange::attempt(job, offers.body(), sending, worker, timer).await?;
            let status = answer.head.status;
            if let Some(extra) = left_out
                && status.is_success()
            {
                // Otherwise the engine refuses the client's own request.
                self.on_extra_refused(extra, plan, worker);
            }
            left_out = offers.leave_out(status, answer.first.as_ref());
            if left_out.is_none() {
                return Ok(answer);
            }
            timer = answer.timer;
        }
    }

    /// The engine took a request without what it had refused: it is not asked for that any more.
    fn on_extra_refused(&self, extra: Extra, plan: &Plan, worker: &Worker) {
        match extra {
            Extra::TokenIds => {
                if !plan.refuses_token_ids(worker).swap(true, Relaxed) {
                    warn!(
                        worker = %worker.name,
                        api = plan.api.as_str(),
                        "engine refuses streamed requests for token ids; its streams of this API are not continued on other workers"
                    );
                }
            }
            Extra::Rank => self.on_rank_refused(worker),
        }
    }

    /// The engine has fewer ranks than it reports KV events of.
    pub(in crate::relay) fn on_rank_refused(&self, worker: &Worker) {
        if self.fleet().on_ranks_refused(worker.id) {
            warn!(
                worker = %worker.name,
                "engine refuses requests for a data-parallel rank that has KV events; requests are pinned to none of its ranks any more (does events.ranks agree with its --data-parallel-size?)"
            );
        }
    }

    /// Whether a request that a gateway carries may be pinned to a rank: the gateway sends what it got for one worker to another
    /// one, too, and nobody sends it again without the rank. Not with two legs: of both, only one would be meant.
    pub(in crate::relay) fn may_pin_carried(&self, plan: &Plan) -> bool {
        let is_alike = |api| plan.group.has_alike_ranks(api);
        self.prefill_decode.is_none() && plan.pinned.is_some_and(is_alike)
    }

    /// When an attempt that begins now times out.
    pub(in crate::relay) fn attempt_deadline(&self, plan: &Plan, now: Instant) -> Instant {
        now + if plan.is_stream {
            self.settings.first_byte_timeout
        } else {
            self.settings.response_timeout
        }
    }

    /// What the status of an answer to a request that was sent at `sent` says: whether another worker is to be asked. A
    /// Retry-After pauses this one. `is_trial`: the request is the trial of the worker's circuit breaker.
    pub(in crate::relay) fn on_status(
        &self,
        job: &Job<'_>,
        worker: &Worker,
        answer: &exchange::Answer,
        sent: Instant,
        is_trial: bool,
    ) -> Sign {
        let statuses = &self.settings.advanced.retry_statuses;
        let has_own_key = job.sends_own_key(worker);
        let sign = Sign::of_status(answer.head.status, job.api, has_own_key, statuses);
        if sign == Sign::Nothing {
            return sign;
        }
        let asked = headers::retry_after(&answer.head.headers);
        // Once another request has closed the breaker, none is kept back.
        let is_trial = is_trial && worker.breaker.state() == State::HalfOpen;
        let is_late = worker.has_taken_since(sent);
        if let Some(pause) = pause(asked, is_trial, is_late) {
            worker.breaker.pause(observe::now() + pause);
        }
        sign
    }
}

/// For how long a worker gets no requests that has refused one. `asked`: its Retry-After. `is_late`: it has taken a
/// request that was sent after this one.
fn pause(asked: Option<Duration>, is_trial: bool, is_late: bool) -> Option<Duration> {
    // A trial that is refused says nothing of the worker. The next one must not be the next request.
    let pause = asked.or_else(|| is_trial.then_some(NEXT_TRIAL_PAUSE));
    pause.filter(|_| !is_late).map(|pause| pause.min(PAUSE_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_gets_the_pause_that_it_asks_for_unless_it_has_taken_later_requests() {
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        for (asked, is_trial, is_late, expected) in [
            (None, false, false, None),
            (None, true, false, Some(NEXT_TRIAL_PAUSE)),
            (None, true, true, None),
            (seconds(5), false, false, seconds(5)),
            (seconds(5), true, false, seconds(5)),
            (seconds(5), false, true, None),
            (seconds(3_600), false, false, Some(PAUSE_MAX)),
        ] {
            let case = (asked, is_trial, is_late);
            assert_eq!(pause(asked, is_trial, is_late), expected, "{case:?}");
        }
    }
}
