//! How busy one worker is: the requests of this router, counted immediately, and the engine's last load report.

pub mod ranks;

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64};
use std::time::Instant;

use parking_lot::Mutex;

/// One worker's load. Everything that a routing decision reads is in one cache line, because with a thousand
/// workers each line is a cache miss. Nothing else that is written often shares the line.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Load {
    requests: AtomicU32,
    /// Requests that the engine reports beyond ours, as of its last report.
    foreign_requests: AtomicU32,
    /// Uncached prompt tokens of requests without a first token yet. Signed, because two threads may add and
    /// subtract in either order.
    queued_tokens: AtomicI64,
    /// Prompt tokens of the requests that are decoding.
    decode_tokens: AtomicI64,
    total: AtomicU64,
    reported: Mutex<Option<LoadReport>>,
}

/// Load as the engine reports it: in its metrics, or together with its KV events.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoadReport {
    pub at: Instant,
    pub running: u32,
    pub waiting: u32,
    /// Used part of its KV cache, 0 to 1.
    pub kv_usage: f64,
}

impl Load {
    /// Requests in flight: those of this router, and others that the engine reported.
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

    /// Requests sent to the worker since it joined.
    pub fn total(&self) -> u64 {
        self.total.load(Relaxed)
    }

    pub fn reported(&self) -> Option<LoadReport> {
        *self.reported.lock()
    }

    /// Stores an engine's report. Requests beyond our own came from other clients of the engine.
    pub fn report(&self, reported: LoadReport) {
        let all = reported.running.saturating_add(reported.waiting);
        self.foreign_requests
            .store(all.saturating_sub(self.own_requests()), Relaxed);
        *self.reported.lock() = Some(reported);
    }

    /// Discards the report if it is older than `then`.
    pub fn expire_report_before(&self, then: Instant) {
        if self.reported().is_some_and(|reported| reported.at < then) {
            self.expire_report();
        }
    }

    /// Discards the report.
    pub fn expire_report(&self) {
        self.foreign_requests.store(0, Relaxed);
        *self.reported.lock() = None;
    }

    pub(super) fn begin_request(&self, uncached_tokens: u32) {
        self.requests.fetch_add(1, Relaxed);
        self.total.fetch_add(1, Relaxed);
        self.queued_tokens
            .fetch_add(i64::from(uncached_tokens), Relaxed);
    }

    pub(super) fn begin_decoding(&self, uncached_tokens: u32, prompt_tokens: u32) {
        self.queued_tokens
            .fetch_sub(i64::from(uncached_tokens), Relaxed);
        self.decode_tokens
            .fetch_add(i64::from(prompt_tokens), Relaxed);
    }

    pub(super) fn end_queued_request(&self, uncached_tokens: u32) {
        self.queued_tokens
            .fetch_sub(i64::from(uncached_tokens), Relaxed);
        self.requests.fetch_sub(1, Relaxed);
    }

    pub(super) fn end_decoding_request(&self, prompt_tokens: u32) {
        self.decode_tokens
            .fetch_sub(i64::from(prompt_tokens), Relaxed);
        self.requests.fetch_sub(1, Relaxed);
    }
}
