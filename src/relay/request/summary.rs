//! What a request tells its caller: what it came to at the workers, for an access log, and what is left of its tenant's limits.
//! Pure.

use std::sync::Arc;
use std::time::Duration;

use hyper::StatusCode;
use parking_lot::Mutex;

use crate::ids::Model;
use crate::limits::Standing;
use crate::traces::RequestTrace;

/// The figures of one client request. Of several attempts and several jobs of one client request, tokens, bytes,
/// attempts and waits add up; the rest is the last one's.
#[derive(Clone, Debug, Default)]
pub struct RequestSummary {
    pub model: Option<Model>,
    /// The name that the client asked for, if the configuration leads it to a model, or if the request was refused before it had
    /// one.
    pub requested_model: Option<Model>,
    /// The worker whose answer was passed on, or the last one that was tried.
    pub worker: Option<Arc<str>>,
    /// The dp rank of that worker that the request was pinned to.
    pub rank: Option<u32>,
    /// The worker that computed the prompt of a disaggregated request.
    pub prefill_worker: Option<Arc<str>>,
    /// The dp rank of that worker that its leg was pinned to.
    pub prefill_rank: Option<u32>,
    /// Why that worker was chosen.
    pub reason: Option<&'static str>,
    /// Of the worker's answer.
    pub status: Option<StatusCode>,
    /// How the answer ended, once it has: `complete`, `client_disconnected`, ...
    pub outcome: Option<&'static str>,
    /// As the engine reports them, like the next two.
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub generation_tokens: u64,
    /// How long it waited for a worker with room, if it did.
    pub queued: Option<Duration>,
    /// Of a streamed answer: from the request's head to the first token.
    pub time_to_first_token: Option<Duration>,
    /// Bytes of the worker's answer.
    pub bytes: u64,
    /// Attempts at workers; one less are retries.
    pub attempts: u32,
    /// How often its stream went on on another worker.
    pub continued: u32,
}

impl RequestSummary {
    /// The request has waited for a worker of a model: of the model that it asked for, or of a fallback.
    pub(in crate::relay) fn on_waited(&mut self, model: &Model, waited: Duration) {
        self.model = Some(model.clone());
        self.queued = Some(self.queued.unwrap_or_default() + waited);
    }
}

/// A summary that the relay fills while its request runs. Complete once the answer's body has ended or was dropped.
#[derive(Clone, Debug, Default)]
pub struct SummaryCell {
    summary: Arc<Mutex<RequestSummary>>,
    trace: Option<Arc<RequestTrace>>,
}

impl SummaryCell {
    /// The cell of a request that is traced, if there is a trace.
    pub fn traced(trace: Option<Arc<RequestTrace>>) -> Self {
        Self {
            summary: Arc::default(),
            trace,
        }
    }

    pub fn trace(&self) -> Option<&Arc<RequestTrace>> {
        self.trace.as_ref()
    }

    pub fn read(&self) -> RequestSummary {
        self.summary.lock().clone()
    }

    /// How the answer ended, once it has.
    pub fn outcome(&self) -> Option<&'static str> {
        self.summary.lock().outcome
    }

    pub(in crate::relay) fn update(&self, change: impl FnOnce(&mut RequestSummary)) {
        change(&mut self.summary.lock());
    }
}

/// Receives what the tenant of a request has left of its limits, for the headers of the answer.
#[derive(Clone, Debug, Default)]
pub struct StandingCell(Arc<Mutex<Option<Standing>>>);

impl StandingCell {
    pub fn read(&self) -> Option<Standing> {
        *self.0.lock()
    }

    pub(in crate::relay) fn set(&self, standing: Standing) {
        *self.0.lock() = Some(standing);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_waits_for_a_model_and_for_its_fallback_add_up_and_the_last_one_has_the_request() {
        let mut summary = RequestSummary::default();
        for (model, waited, queued) in [("a", 30, 30), ("a", 5, 35), ("b", 2, 37)] {
            summary.on_waited(&Model::from(model), Duration::from_secs(waited));
            let found = (summary.model.as_deref(), summary.queued);
            let expected = (Some(model), Some(Duration::from_secs(queued)));
            assert_eq!(found, expected);
        }
    }
}
