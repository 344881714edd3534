//! How busy one worker is: what this router has given it and not got back, counted at once, and what
//! the engine itself reported last.

pub mod ranks;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64};
use std::time::Instant;

use parking_lot::Mutex;

use super::Worker;

/// One worker's load. What decisions read stands in one line of memory, and nothing else that is
/// written does: of a thousand workers, each line is a miss.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Load {
    requests: AtomicU32,
    /// Requests that the engine reports beyond ours, as of its last report.
    foreign_requests: AtomicU32,
    /// Uncached prompt tokens of requests that have not answered yet. Signed: two threads may
    /// add and take in either order.
    queued_tokens: AtomicI64,
    /// Prompt tokens of requests that are answering.
    decode_tokens: AtomicI64,
    total: AtomicU64,
    reported: Mutex<Option<Reported>>,
}

/// What an engine's own metrics said, or its ranks beside their cache events.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reported {
    pub at: Instant,
    pub running: u32,
    pub waiting: u32,
    /// Share of its KV cache in use, 0 to 1.
    pub kv_usage: f64,
}

impl Load {
    /// Requests in flight, ours and what the engine reported beyond them.
    pub fn requests(&self) -> u32 {
        self.own_requests()
            .saturating_add(self.foreign_requests.load(Relaxed))
    }

    pub fn own_requests(&self) -> u32 {
        self.requests.load(Relaxed)
    }

    pub fn queued_tokens(&self) -> u64 {
        self.queued_tokens.load(Relaxed).max(0) as u64
    }

    pub fn decode_tokens(&self) -> u64 {
        self.decode_tokens.load(Relaxed).max(0) as u64
    }

    /// Requests ever sent to it.
    pub fn total(&self) -> u64 {
        self.total.load(Relaxed)
    }

    pub fn reported(&self) -> Option<Reported> {
        *self.reported.lock()
    }

    /// Takes an engine's report. What it counts beyond our own requests is somebody else's.
    pub fn report(&self, reported: Reported) {
        let theirs = reported.running.saturating_add(reported.waiting);
        self.foreign_requests
            .store(theirs.saturating_sub(self.own_requests()), Relaxed);
        *self.reported.lock() = Some(reported);
    }

    /// Forgets a report that was made before then.
    pub fn expire_report_before(&self, then: Instant) {
        if self.reported().is_some_and(|reported| reported.at < then) {
            self.expire_report();
        }
    }

    /// Forgets a report that has grown too old to act on.
    pub fn expire_report(&self) {
        self.foreign_requests.store(0, Relaxed);
        *self.reported.lock() = None;
    }
}

/// One request on one worker, counted for as long as this lives, however it ends.
#[must_use = "dropping the guard ends the request"]
#[derive(Debug)]
pub struct InFlight {
    worker: Arc<Worker>,
    prompt_tokens: u32,
    uncached_tokens: u32,
    answering: bool,
}

impl InFlight {
    /// Counts a request at once, before it is sent: the next decision must see this one.
    pub fn new(worker: Arc<Worker>, prompt_tokens: u32, cached_tokens: u32) -> Self {
        let uncached_tokens = prompt_tokens.saturating_sub(cached_tokens);
        worker.load.requests.fetch_add(1, Relaxed);
        worker.load.total.fetch_add(1, Relaxed);
        worker
            .load
            .queued_tokens
            .fetch_add(i64::from(uncached_tokens), Relaxed);
        Self {
            worker,
            prompt_tokens,
            uncached_tokens,
            answering: false,
        }
    }

    /// Counts a request that goes on from where another worker is still computing its prompt. It counts as
    /// decoding from the start, or a burst would all choose one worker before the first of them is heard of;
    /// and none of its prompt as pending, since this worker does not compute it: to receive it takes the
    /// network's time and nobody's turn.
    pub fn decoding(worker: Arc<Worker>, prompt_tokens: u32) -> Self {
        let mut counted = Self::new(worker, prompt_tokens, prompt_tokens);
        counted.on_first_token();
        counted
    }

    pub fn worker(&self) -> &Arc<Worker> {
        &self.worker
    }

    /// The first token has come: the prompt is computed, and decoding has begun.
    pub fn on_first_token(&mut self) {
        if !self.answering {
            self.answering = true;
            self.worker
                .load
                .queued_tokens
                .fetch_sub(i64::from(self.uncached_tokens), Relaxed);
            self.worker
                .load
                .decode_tokens
                .fetch_add(i64::from(self.prompt_tokens), Relaxed);
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let load = &self.worker.load;
        match self.answering {
            false => load
                .queued_tokens
                .fetch_sub(i64::from(self.uncached_tokens), Relaxed),
            true => load
                .decode_tokens
                .fetch_sub(i64::from(self.prompt_tokens), Relaxed),
        };
        load.requests.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::registry::tests::worker;
    use crate::observe;

    fn load_of(worker: &Worker) -> (u32, u64, u64) {
        (
            worker.load.requests(),
            worker.load.queued_tokens(),
            worker.load.decode_tokens(),
        )
    }

    #[test]
    fn a_request_is_pending_then_decoding_then_gone() {
        let worker = worker("a");
        let mut request = InFlight::new(worker.clone(), 100, 60);
        assert_eq!(load_of(&worker), (1, 40, 0));
        request.on_first_token();
        request.on_first_token();
        assert_eq!(load_of(&worker), (1, 0, 100));
        drop(request);
        assert_eq!(load_of(&worker), (0, 0, 0));
    }

    #[test]
    fn a_request_whose_prompt_another_computes_counts_as_decoding_from_the_start() {
        let worker = worker("a");
        let mut request = InFlight::decoding(worker.clone(), 100);
        assert_eq!(load_of(&worker), (1, 0, 100));
        request.on_first_token();
        assert_eq!(load_of(&worker), (1, 0, 100));
        drop(request);
        assert_eq!(load_of(&worker), (0, 0, 0));
    }

    #[test]
    fn a_request_that_never_answered_leaves_nothing_behind() {
        let worker = worker("a");
        drop(InFlight::new(worker.clone(), 100, 0));
        assert_eq!(load_of(&worker), (0, 0, 0));
    }

    #[test]
    fn what_the_engine_reports_beyond_ours_counts_until_it_expires() {
        let worker = worker("a");
        let _ours = InFlight::new(worker.clone(), 10, 0);
        let at = observe::now();
        worker.load.report(Reported {
            at,
            running: 3,
            waiting: 2,
            kv_usage: 0.5,
        });
        assert_eq!(worker.load.requests(), 5);
        worker.load.expire_report_before(at);
        assert_eq!(worker.load.requests(), 5);
        worker
            .load
            .expire_report_before(at + std::time::Duration::from_millis(1));
        assert_eq!(worker.load.requests(), 1);
    }
}
