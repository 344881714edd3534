//! What attempts at one and at two workers share: time limits, retryable answers, and requests that ask the engine
//! to report cached blocks.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::StatusCode;
use tokio::time::Sleep;
use tracing::warn;

use super::core::Relay;
use super::exchange::{self, Sending};
use super::failure::retries::Failure;
use super::headers;
use super::job::Job;
use super::plan::Plan;
use super::request::kv_report_request;
use crate::fleet::Worker;
use crate::http::circuit_breaker::State;
use crate::observe;

/// An engine may ask for a pause (Retry-After), but not for a longer one than this.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// After a trial request that a busy or starting worker refused: as often as a health check asks.
const REFUSED_TRIAL_PAUSE: Duration = Duration::from_secs(2);

/// Whether an engine may have refused a request because of the dp rank that it was pinned to.
pub(super) fn may_refuse_rank(answer: &exchange::Answer) -> bool {
    let names_rank = |first: &Bytes| {
        let first = first.to_ascii_lowercase();
        ["data_parallel_rank", "dp_rank", "data-parallel-rank"]
            .iter()
            .any(|name| memchr::memmem::find(&first, name.as_bytes()).is_some())
    };
    answer.head.status == StatusCode::BAD_REQUEST && answer.first.as_ref().is_some_and(names_rank)
}

impl Relay {
    /// Sends `asking`, a request that asks the engine to report cached blocks. An engine that refuses it gets
    /// the `plain` request, and is not asked again.
    pub(super) async fn send_asking(
        &self,
        job: &Job<'_>,
        (asking, plain): (&Bytes, &Bytes),
        sending: Sending<'_>,
        plan: &Plan,
        worker: &Arc<Worker>,
        timer: Pin<Box<Sleep>>,
    ) -> Result<exchange::Answer, exchange::Error> {
        let count = |outcome| {
            let labels = [&*plan.group.model, outcome];
            self.metrics.reports.with_label_values(&labels).inc();
        };
        let answer = exchange::attempt(job, asking, sending, worker, timer).await?;
        if !kv_report_request::may_be_refused(answer.head.status) {
            count("asked");
            return Ok(answer);
        }
        let plain = exchange::attempt(job, plain, sending, worker, answer.timer).await?;
        // Otherwise the engine refuses the client's own request.
        if plain.head.status.is_success() {
            count("refused");
            worker.refuses_reports.store(true, Relaxed);
            warn!(
                worker = %worker.name,
                "engine refuses requests with kv_cache_report_mode; it is not asked to report cached blocks any more"
            );
        }
        Ok(plain)
    }

    /// Sends a request once more that an engine refused, without the dp rank that it was pinned to. An engine that then takes
    /// it has fewer ranks than it reports KV events of, and gets no pinned requests any more.
    pub(super) async fn send_unpinned(
        &self,
        job: &Job<'_>,
        body: &Bytes,
        sending: Sending<'_>,
        worker: &Arc<Worker>,
        refused: exchange::Answer,
    ) -> Result<exchange::Answer, exchange::Error> {
        let answer = exchange::attempt(job, body, sending, worker, refused.timer).await?;
        if answer.head.status.is_success() {
            self.on_rank_refused(worker);
        }
        Ok(answer)
    }

    /// The engine took a request that it had refused for a rank.
    pub(super) fn on_rank_refused(&self, worker: &Worker) {
        if self.fleet.on_ranks_refused(worker.id) {
            warn!(
                worker = %worker.name,
                "engine refuses requests for a data-parallel rank that has KV events; requests are pinned to none of its ranks any more (does events.ranks agree with its --data-parallel-size?)"
            );
        }
    }

    /// Whether a request that a gateway carries may be pinned to a rank: the gateway sends what it got for one worker to another
    /// one, too, and nobody sends it again without the rank. Not with two legs: of both, only one would be meant.
    pub(super) fn may_pin_carried(&self, plan: &Plan) -> bool {
        let is_alike = |api| plan.group.has_alike_ranks(api);
        self.prefill_decode.is_none() && plan.pinned.is_some_and(is_alike)
    }

    /// The same for a request that asks for token ids, so that its stream can go on on another worker.
    pub(super) async fn send_asking_ids(
        &self,
        job: &Job<'_>,
        (asking, plain): (&Bytes, &Bytes),
        sending: Sending<'_>,
        worker: &Arc<Worker>,
        timer: Pin<Box<Sleep>>,
    ) -> Result<exchange::Answer, exchange::Error> {
        let answer = exchange::attempt(job, asking, sending, worker, timer).await?;
        if !kv_report_request::may_be_refused(answer.head.status) {
            return Ok(answer);
        }
        let plain = exchange::attempt(job, plain, sending, worker, answer.timer).await?;
        if plain.head.status.is_success() && !worker.refuses_token_ids.swap(true, Relaxed) {
            warn!(
                worker = %worker.name,
                "engine refuses streamed requests for token ids; its streams are not continued on other workers"
            );
        }
        Ok(plain)
    }

    /// When an attempt that begins now times out.
    pub(super) fn attempt_deadline(&self, plan: &Plan, now: Instant) -> Instant {
        now + match plan.is_stream {
            true => self.settings.first_byte_timeout,
            false => self.settings.response_timeout,
        }
    }

    /// The failure that a retryable answer means. A Retry-After pauses the worker.
    pub(super) fn refusal(&self, worker: &Worker, answer: &exchange::Answer) -> Option<Failure> {
        let statuses = &self.settings.advanced.retry_statuses;
        if !statuses.contains(&answer.head.status.as_u16()) {
            return None;
        }
        let asked = headers::retry_after(&answer.head.headers);
        // A trial that is refused says nothing of the worker. The next one must not be the next request.
        let is_trial = worker.breaker.state() == State::HalfOpen;
        if let Some(pause) = asked.or_else(|| is_trial.then_some(REFUSED_TRIAL_PAUSE)) {
            worker.breaker.pause(observe::now() + pause.min(PAUSE_MAX));
        }
        Some(Failure::Refused)
    }
}
