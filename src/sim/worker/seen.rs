//! What the worker remembers of its requests, for tests to look at.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use hyper::HeaderMap;
use hyper::http::request::Parts;
use parking_lot::Mutex;
use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64;

const LAST_MAX: usize = 100;

/// Counts of requests, and the last of them.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Stats {
    /// All that is listed in `last`, and what was pushed out of it. Probes of health and load do not
    /// count; asking for models or the version does.
    pub requests: u64,
    /// Requests for model work that were answered to the end.
    pub finished: u64,
    /// Those that ended early: the client left, or a fault switch did it.
    pub aborted: u64,
    /// Those that were answered with an error instead.
    pub refused: u64,
    pub running: u64,
    /// The oldest first.
    pub last: VecDeque<Arrival>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Arrival {
    pub method: String,
    pub path: String,
    /// By lower-case name; the values of a repeated header are joined by ", ".
    pub headers: BTreeMap<String, String>,
    pub body_bytes: usize,
    /// XXH3-64 of the body as it came, in hex.
    pub body_xxh3: String,
    /// The body itself, for who runs the worker in its own process.
    #[serde(skip)]
    pub body: Bytes,
    /// Counts connections from 1; requests with the same number shared one.
    pub connection: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Seen {
    stats: Mutex<Stats>,
}

/// One request for model work. It counts as running for as long as this lives, and as aborted if it
/// is dropped without another word.
#[must_use = "dropping the guard counts the request as aborted"]
#[derive(Debug)]
pub(crate) struct InFlight {
    seen: Arc<Seen>,
    outcome: Outcome,
    /// What is done as well if it is aborted.
    on_abort: Option<OnAbort>,
}

struct OnAbort(Box<dyn FnOnce() + Send + Sync>);

#[derive(Clone, Copy, Debug)]
enum Outcome {
    Finished,
    Refused,
    Aborted,
}

impl Seen {
    pub(crate) fn stats(&self) -> Stats {
        self.stats.lock().clone()
    }

    pub(crate) fn record(&self, request: &Parts, body: &Bytes, connection: u64) {
        let path = request.uri.path_and_query();
        let arrival = Arrival {
            method: request.method.to_string(),
            path: path.map_or_else(String::new, ToString::to_string),
            headers: headers_of(&request.headers),
            body_bytes: body.len(),
            body_xxh3: format!("{:016x}", xxh3_64(body)),
            body: body.clone(),
            connection,
        };
        let mut stats = self.stats.lock();
        stats.requests += 1;
        if stats.last.len() == LAST_MAX {
            stats.last.pop_front();
        }
        stats.last.push_back(arrival);
    }

    pub(crate) fn begin(self: &Arc<Self>) -> InFlight {
        self.stats.lock().running += 1;
        InFlight {
            seen: Arc::clone(self),
            outcome: Outcome::Aborted,
            on_abort: None,
        }
    }
}

impl fmt::Debug for OnAbort {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("OnAbort").finish_non_exhaustive()
    }
}

impl InFlight {
    pub(crate) fn on_abort(mut self, action: impl FnOnce() + Send + Sync + 'static) -> Self {
        self.on_abort = Some(OnAbort(Box::new(action)));
        self
    }

    pub(crate) fn finish(mut self) {
        self.outcome = Outcome::Finished;
    }

    pub(crate) fn refuse(mut self) {
        self.outcome = Outcome::Refused;
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let mut stats = self.seen.stats.lock();
        stats.running -= 1;
        match self.outcome {
            Outcome::Finished => stats.finished += 1,
            Outcome::Refused => stats.refused += 1,
            Outcome::Aborted => {
                stats.aborted += 1;
                drop(stats);
                if let Some(OnAbort(action)) = self.on_abort.take() {
                    action();
                }
            }
        }
    }
}

fn headers_of(headers: &HeaderMap) -> BTreeMap<String, String> {
    let mut map: BTreeMap<String, String> = BTreeMap::new();
    for (name, value) in headers {
        let value = String::from_utf8_lossy(value.as_bytes());
        map.entry(name.as_str().to_owned())
            .and_modify(|values| {
                values.push_str(", ");
                values.push_str(&value);
            })
            .or_insert_with(|| value.into_owned());
    }
    map
}
