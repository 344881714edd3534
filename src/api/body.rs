//! Reads request bodies, within a size, a time and one memory budget for all clients.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body as _, Incoming};
use prometheus::IntCounter;

use crate::observe;
use crate::observe::metrics::Registry;
use crate::openai::error::ApiError;

/// A whole body may take this many times the time-out between two of its pieces, so that a client cannot
/// keep a request open with a byte now and then.
const TOTAL_TIMEOUTS: u32 = 10;

/// Bodies up to this size are always read: most prompts are shorter, and as many of them as there are connections
/// need less than the budget.
const SMALL_BYTES: u64 = 64 << 10;
/// The budget is used in steps of this size.
const STEP_BYTES: u64 = 256 << 10;

/// The memory that bodies take, from the first byte until an engine has started to answer.
#[derive(Debug)]
pub(super) struct BodyBudget {
    max: u64,
    used: Arc<AtomicU64>,
    refused: IntCounter,
}

impl BodyBudget {
    pub(super) fn new(max: u64, registry: &Registry) -> Self {
        let used = Arc::new(AtomicU64::new(0));
        let gauge = registry.gauge(
            "warmroute_request_body_bytes",
            "Memory of request bodies larger than 64 KiB that no engine has started to answer.",
        );
        let read = used.clone();
        registry.on_scrape(move || gauge.set(read.load(Relaxed) as i64));
        Self {
            max,
            used,
            refused: registry.counter(
                "warmroute_request_bodies_refused_total",
                "Requests refused because the bodies of all clients together had used up their memory budget.",
            ),
        }
    }

    fn reserve(&self) -> Reservation<'_> {
        Reservation {
            budget: self,
            bytes: 0,
        }
    }

    fn refuse(&self) -> ApiError {
        self.refused.inc();
        ApiError::bodies_full()
    }

    /// True if a body of this size would fit now.
    fn fits(&self, bytes: u64) -> bool {
        bytes <= SMALL_BYTES || self.used.load(Relaxed).saturating_add(bytes) <= self.max
    }
}

/// One body's part of the budget, given back when dropped.
#[derive(Debug)]
pub(super) struct Reservation<'a> {
    budget: &'a BodyBudget,
    bytes: u64,
}

impl Reservation<'_> {
    /// Makes it large enough for a body of this size. False if the budget is used up.
    fn grow(&mut self, bytes: u64) -> bool {
        if bytes <= SMALL_BYTES || bytes <= self.bytes {
            return true;
        }
        let more = bytes.next_multiple_of(STEP_BYTES) - self.bytes;
        let used = &self.budget.used;
        if used.fetch_add(more, Relaxed).saturating_add(more) > self.budget.max {
            used.fetch_sub(more, Relaxed);
            return false;
        }
        self.bytes += more;
        true
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.budget.used.fetch_sub(self.bytes, Relaxed);
        }
    }
}

/// The limits of one body.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Its size in bytes.
    pub(super) max: u64,
    /// The time between two of its pieces.
    pub(super) timeout: Duration,
}

/// Reads the whole body: a decision needs the prompt, and a retry all of it.
pub(super) async fn read<'a>(
    mut body: Incoming,
    limits: Limits,
    budget: &'a BodyBudget,
) -> Result<(Bytes, Reservation<'a>), ApiError> {
    let Limits {
        max,
        timeout: limit,
    } = limits;
    let announced = body.size_hint().lower();
    if announced > max {
        return Err(ApiError::too_large(max));
    }
    // What does not fit is refused before it is sent. Nothing is reserved for bytes that may never come.
    if !budget.fits(announced) {
        return Err(budget.refuse());
    }
    let mut reserved = budget.reserve();
    // A client may announce a length and send nothing: no more than this is allocated before bytes come.
    const MAX_RESERVED: u64 = 1 << 20;
    let mut whole = BytesMut::new();
    let mut first = Bytes::new();
    let total = limit.saturating_mul(TOTAL_TIMEOUTS);
    // When the body first had to be waited for. A body that is complete at once needs no clock.
    let mut started = None;
    loop {
        let frame = match poll_once(body.frame()).await {
            Ok(ready) => ready,
            Err(_) => {
                let now = observe::now();
                let left = total.saturating_sub(now - *started.get_or_insert(now));
                tokio::time::timeout(limit.min(left), body.frame())
                    .await
                    .map_err(|_| match left < limit {
                        true => ApiError::endless_body(total),
                        false => ApiError::slow_body(limit.as_millis() as u64),
                    })?
            }
        };
        let Some(frame) = frame else { break };
        let data = match frame
            .map_err(|error| ApiError::broken_body(&error))?
            .into_data()
        {
            Ok(data) => data,
            Err(_) => continue,
        };
        let bytes = (whole.len() + first.len() + data.len()) as u64;
        if bytes > max {
            return Err(ApiError::too_large(max));
        }
        if !reserved.grow(bytes) {
            return Err(budget.refuse());
        }
        // Most bodies are one piece, which is not copied.
        if first.is_empty() && whole.is_empty() {
            first = data;
            if body.is_end_stream() {
                break;
            }
            continue;
        }
        if whole.is_empty() {
            whole.reserve(announced.min(MAX_RESERVED) as usize);
            whole.extend_from_slice(&first);
            first = Bytes::new();
        } else if bytes as usize > whole.capacity() {
            // Once as much has come as was allocated, the announced rest is believed. Doubling would allocate up to
            // twice the body.
            let rest = announced.saturating_sub(whole.len() as u64) as usize;
            whole.reserve(rest.max(data.len()));
        }
        whole.extend_from_slice(&data);
    }
    let whole = if whole.is_empty() {
        first
    } else {
        whole.freeze()
    };
    Ok((whole, reserved))
}

/// Polls a future once: a body that is complete already needs no timer.
async fn poll_once<F: Future + Unpin>(mut future: F) -> Result<F::Output, ()> {
    std::future::poll_fn(|cx| match std::pin::Pin::new(&mut future).poll(cx) {
        std::task::Poll::Ready(ready) => std::task::Poll::Ready(Ok(ready)),
        std::task::Poll::Pending => std::task::Poll::Ready(Err(())),
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(max: u64) -> BodyBudget {
        BodyBudget::new(max, &Registry::default())
    }

    #[test]
    fn large_bodies_share_a_budget_and_small_ones_always_fit() {
        let budget = budget(1 << 20);
        let mut large = budget.reserve();
        assert!(large.grow(700 << 10));
        assert_eq!(budget.used.load(Relaxed), 768 << 10);
        let mut other = budget.reserve();
        assert!(other.grow(200 << 10));
        assert!(!other.grow(300 << 10));
        assert!(!budget.fits(65 << 10));
        assert!(budget.fits(SMALL_BYTES));
        let mut small = budget.reserve();
        assert!(small.grow(SMALL_BYTES));
        drop((large, other));
        assert_eq!(budget.used.load(Relaxed), 0);
        assert!(budget.fits(1 << 20));
    }
}
