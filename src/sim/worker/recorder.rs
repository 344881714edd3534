//! Records requests and counts their outcomes, for tests.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use hyper::HeaderMap;
use hyper::http::request::Parts;
use parking_lot::Mutex;
use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64;

/// Requests that are remembered.
const MAX_RECORDED: usize = 100;

/// Counters of requests, and the last requests.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RequestStats {
    /// All recorded requests. Health checks, metrics and the routes of tests are not recorded; `/v1/models` and
    /// `/version` are.
    pub requests: u64,
    /// Inference requests that were answered completely.
    pub finished: u64,
    /// Inference requests that ended early: the client disconnected, or a fault ended them.
    pub aborted: u64,
    /// Inference requests that were answered with an error.
    pub refused: u64,
    pub running: u64,
    /// The oldest first.
    pub last: VecDeque<ReceivedRequest>,
}

#[derive(Clone, Debug, Serialize)]
pub struct ReceivedRequest {
    pub method: String,
    pub path: String,
    /// By lower-case name; the values of a repeated header are joined by ", ".
    pub headers: BTreeMap<String, String>,
    pub body_bytes: usize,
    /// XXH3-64 of the body as it came, in hex.
    pub body_xxh3: String,
    /// The body, for tests that run the worker in their own process.
    #[serde(skip)]
    pub body: Bytes,
    /// The number of the connection, starting at 1.
    pub connection: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Recorder {
    stats: Mutex<RequestStats>,
}

impl Recorder {
    pub(crate) fn stats(&self) -> RequestStats {
        self.stats.lock().clone()
    }

    pub(crate) fn record(&self, request: &Parts, body: &Bytes, connection: u64) {
        let path = request.uri.path_and_query();
        let received = ReceivedRequest {
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
        if stats.last.len() == MAX_RECORDED {
            stats.last.pop_front();
        }
        stats.last.push_back(received);
    }

    pub(crate) fn count(&self, count: impl FnOnce(&mut RequestStats)) {
        count(&mut self.stats.lock());
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
