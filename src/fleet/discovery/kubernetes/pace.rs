//! The pace of requests to the Kubernetes API. kube's watcher opens a watch that has ended again at once, however soon it
//! ended, and nobody else sees that. Here those that end at once wait, longer each time; and a server that names a time
//! (Retry-After) is asked nothing before.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use hyper::header::RETRY_AFTER;
use hyper::{HeaderMap, Request, Response};
use parking_lot::Mutex;
use tower::Service;
use tracing::warn;

use super::metrics::EntryMetrics;
use crate::observe;

/// A watch that lasted for less has ended at once. Servers end them after minutes.
const SHORT: Duration = Duration::from_secs(5);
/// So many may in a row without a pause: connections break, and a watch that is behind is begun anew.
const FREE: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// A longer Retry-After is not believed: the workers would be those of long ago.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

/// When watches of one path were started.
#[derive(Debug)]
struct Starts {
    last: Instant,
    /// How many watches in a row have ended at once.
    short: u32,
}

/// Decides how long a request waits. Pure.
#[derive(Debug, Default)]
struct Pace {
    /// By path: an entry of `discovery` watches up to three.
    watches: BTreeMap<String, Starts>,
    not_before: Option<Instant>,
}

/// How long a request waits.
#[derive(Debug, PartialEq)]
struct Wait {
    pause: Duration,
    /// How many watches of a row have waited, with this one; 0 if it does not wait for those before it.
    in_row: u32,
}

impl Pace {
    /// A request is to be sent; a watch of this path, or another one.
    fn on_request(&mut self, now: Instant, watched: Option<&str>) -> Wait {
        let asked = self.not_before.map(|at| at.saturating_duration_since(now));
        let asked = asked.unwrap_or_default();
        let Some(path) = watched else {
            return Wait {
                pause: asked,
                in_row: 0,
            };
        };
        let short = match self.watches.get(path) {
            Some(starts) if now < starts.last + SHORT => starts.short.saturating_add(1),
            _ => 0,
        };
        let doublings = short.saturating_sub(FREE);
        let own = match doublings {
            0 => Duration::ZERO,
            _ => FIRST_PAUSE.saturating_mul(1 << (doublings - 1).min(20)),
        };
        let pause = own.min(PAUSE_MAX).max(asked);
        let last = now + pause;
        self.watches.insert(path.to_owned(), Starts { last, short });
        Wait {
            pause,
            in_row: doublings,
        }
    }

    /// The server asked for no requests for a time.
    fn on_answer(&mut self, now: Instant, headers: &HeaderMap) {
        let seconds = headers
            .get(RETRY_AFTER)
            .and_then(|value| value.to_str().ok());
        if let Some(seconds) = seconds.and_then(|seconds| seconds.trim().parse().ok()) {
            let pause = Duration::from_secs(seconds).min(RETRY_AFTER_MAX);
            self.not_before = Some(now + pause);
        }
    }
}

/// Keeps the requests of a client to the pace.
#[derive(Debug)]
pub(super) struct Paced<S> {
    inner: S,
    pace: Arc<Mutex<Pace>>,
    metrics: EntryMetrics,
}

impl<S> Paced<S> {
    pub(super) fn new(inner: S, metrics: EntryMetrics) -> Self {
        Self {
            inner,
            pace: Arc::default(),
            metrics,
        }
    }

    fn wait(&self, path: &str, query: &str) -> Duration {
        let is_watch = query.split('&').any(|part| part == "watch=true");
        let watched = is_watch.then_some(path);
        let wait = self.pace.lock().on_request(observe::now(), watched);
        if wait.in_row > 0 {
            self.metrics.failed("watch", "ended_at_once");
        }
        if wait.in_row == 1 {
            warn!(
                path,
                "watches of the Kubernetes API end at once; the next ones wait before they start"
            );
        }
        wait.pause
    }
}

impl<S, B, A> Service<Request<B>> for Paced<S>
where
    S: Service<Request<B>, Response = Response<A>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let uri = request.uri();
        let pause = self.wait(uri.path(), uri.query().unwrap_or_default());
        // Nothing is sent before this is polled.
        let answer = self.inner.call(request);
        let pace = self.pace.clone();
        Box::pin(async move {
            if !pause.is_zero() {
                tokio::time::sleep(pause).await;
            }
            let answer = answer.await?;
            pace.lock().on_answer(observe::now(), answer.headers());
            Ok(answer)
        })
    }
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    #[test]
    fn watches_that_end_at_once_wait_longer_each_time_and_no_longer_once_one_lasts() {
        let (mut pace, mut now) = (Pace::default(), observe::now());
        let mut waits = |now: &mut Instant, lasted: Duration| {
            *now += lasted;
            let wait = pace.on_request(*now, Some("/pods"));
            *now += wait.pause;
            assert_eq!(wait.in_row == 1, wait.pause == FIRST_PAUSE);
            wait.pause.as_millis()
        };
        let found = [(); 8].map(|()| waits(&mut now, Duration::ZERO));
        assert_eq!(found, [0, 0, 0, 0, 200, 400, 800, 1_600]);
        for _ in 0..50 {
            assert!(waits(&mut now, Duration::ZERO) <= PAUSE_MAX.as_millis());
        }
        assert_eq!(waits(&mut now, Duration::ZERO), PAUSE_MAX.as_millis());
        assert_eq!(waits(&mut now, SHORT), 0);
    }

    #[test]
    fn other_requests_and_other_watches_do_not_wait() {
        let (mut pace, now) = (Pace::default(), observe::now());
        (0..9).for_each(|_| _ = pace.on_request(now, Some("/pods")));
        for other in [None, Some("/slices")] {
            assert_eq!(pace.on_request(now, other).pause, Duration::ZERO);
        }
    }

    #[test]
    fn a_server_that_names_a_time_is_asked_nothing_before() {
        let (mut pace, now) = (Pace::default(), observe::now());
        let mut headers = HeaderMap::new();
        headers.insert(RETRY_AFTER, HeaderValue::from_static("7"));
        pace.on_answer(now, &headers);
        // It waits, and not because watches end at once.
        assert_eq!(pace.on_request(now, Some("/slices")).in_row, 0);
        for (value, expected) in [("7", 7), ("100000", 60), ("soon", 60), ("0", 0)] {
            let mut headers = HeaderMap::new();
            headers.insert(RETRY_AFTER, HeaderValue::from_static(value));
            pace.on_answer(now, &headers);
            for watched in [None, Some("/pods")] {
                let pause = pace.on_request(now, watched).pause;
                assert!(pause >= Duration::from_secs(expected), "{value} {pause:?}");
            }
            let late = now + Duration::from_secs(expected);
            assert_eq!(pace.on_request(late, None).pause, Duration::ZERO);
        }
    }
}
