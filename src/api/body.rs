//! Reads request bodies, within a size, a time and one memory budget for all clients.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Body as _;

use super::settings::Settings;
use crate::http::server::RequestBody;
use crate::observe;
use crate::openai::body_budget::{BodyBudget, Claim, Reservation};
use crate::openai::error::ApiError;

/// A whole body may take this many times the time-out between two of its pieces, so that a client cannot
/// keep a request open with a byte now and then.
const TOTAL_TIMEOUTS: u32 = 10;

/// Bytes that come in a second at least, while a client is waited for: a byte now and then would keep what came before in
/// memory. Slower than any connection that a prompt is typed over.
const LEAST_RATE: u64 = 1 << 10;

/// Reads the whole body: a decision needs the prompt, and a retry all of it.
pub(super) async fn read<'a>(
    mut body: RequestBody,
    settings: &Settings,
    budget: &'a BodyBudget,
    claim: Claim<'a>,
) -> Result<(Bytes, Reservation<'a>), ApiError> {
    let (max, limit) = (settings.max_body, settings.body_timeout);
    let announced = body.size_hint().lower();
    if announced > max {
        return Err(ApiError::too_large(max));
    }
    let starting =
        budget.start_unread(claim, announced, |has_memory| body.leave_unread(has_memory));
    let mut reserved = starting.await?;
    // A client may announce a length and send nothing: no more than this is allocated before bytes come.
    const MAX_RESERVED: u64 = 1 << 20;
    let mut whole = BytesMut::new();
    let mut first = Bytes::new();
    let total = limit.saturating_mul(TOTAL_TIMEOUTS);
    // When the body first had to be waited for. A body that is complete at once needs no clock.
    let mut started = None;
    let mut pace = Pace::new(limit);
    let mut bytes = 0;
    loop {
        // A body that is complete already needs no timer.
        let polled = poll_fn(|cx| Poll::Ready(Pin::new(&mut body).poll_frame(cx))).await;
        let frame = match polled {
            Poll::Ready(frame) => frame,
            Poll::Pending => {
                let now = observe::now();
                let left = total.saturating_sub(now - *started.get_or_insert(now));
                let pause = pace.pause(now, bytes);
                tokio::time::timeout(pause.min(left), body.frame())
                    .await
                    .map_err(|_| {
                        if left < pause {
                            ApiError::endless_body(total)
                        } else {
                            ApiError::slow_body(pace.least, limit)
                        }
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
        bytes = (whole.len() + first.len() + data.len()) as u64;
        if bytes > max {
            return Err(ApiError::too_large(max));
        }
        let growing = reserved.grow_unread(bytes, |has_memory| body.leave_unread(has_memory));
        if growing.await? {
            // The client had to wait, and not the router.
            pace = Pace::new(limit);
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

/// Whether a client sends fast enough: [`LEAST_RATE`] in each `limit` in which it is waited for. Pure.
struct Pace {
    limit: Duration,
    /// Bytes that must come in each.
    least: u64,
    /// When the current one began, and what had come before.
    began: Option<(Instant, u64)>,
}

impl Pace {
    fn new(limit: Duration) -> Self {
        let least = u128::from(LEAST_RATE) * limit.as_millis() / 1_000;
        Self {
            limit,
            least: u64::try_from(least).unwrap_or(u64::MAX).max(1),
            began: None,
        }
    }

    /// How long the next piece may be waited for, when so many bytes have come.
    fn pause(&mut self, now: Instant, bytes: u64) -> Duration {
        let (began, before) = *self.began.get_or_insert((now, bytes));
        if bytes - before >= self.least {
            self.began = Some((now, bytes));
            return self.limit;
        }
        self.limit.saturating_sub(now - began)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    #[test]
    fn a_byte_now_and_then_does_not_keep_a_body_open() {
        let now = observe::now();
        let after = |seconds| now + Duration::from_secs(seconds);
        let mut pace = Pace::new(LIMIT);
        // Fast at first.
        assert_eq!(pace.pause(now, 8 << 20), LIMIT);
        for (number, second) in (8..30).step_by(8).enumerate() {
            let left = pace.pause(after(second), (8 << 20) + number as u64);
            assert_eq!(left, LIMIT - Duration::from_secs(second));
        }
        assert!(pace.pause(after(30), (8 << 20) + 9).is_zero());
    }

    #[test]
    fn a_slow_client_has_as_long_as_it_takes() {
        let now = observe::now();
        let mut pace = Pace::new(LIMIT);
        for second in 0..1_000_u32 {
            let at = now + Duration::from_secs(second.into());
            assert!(!pace.pause(at, u64::from(second) * LEAST_RATE).is_zero());
        }
    }
}
