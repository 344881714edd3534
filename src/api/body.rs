//! Reads request bodies, within a size, a time and one memory budget for all clients.

use std::future::Future;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Body as _;

use super::body_budget::{BodyBudget, Reservation};
use crate::http::server::RequestBody;
use crate::observe;
use crate::openai::error::ApiError;

/// A whole body may take this many times the time-out between two of its pieces, so that a client cannot
/// keep a request open with a byte now and then.
const TOTAL_TIMEOUTS: u32 = 10;

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
    mut body: RequestBody,
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
    let mut reserved = budget.start(announced).await?;
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
        reserved.grow(bytes).await?;
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
