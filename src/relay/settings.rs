//! Time-outs and retries of requests.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::DurationText;

/// Time-outs and retries of requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Attempts of one request, each at another worker if there is one. Attempts that ended with their worker's process are not counted,
    /// two at most, nor are those whose worker refused the router's key for it, 16 at most. A request is never retried
    /// after its client got the first byte of the response.
    #[schemars(range(min = 1))]
    pub max_attempts: u32,
    /// Streamed requests: from sending the request to a worker to the first token of the response, or to its first byte where no
    /// tokens are looked for: Responses of engines that have them, and gateways.
    #[serde(with = "DurationText")]
    pub first_byte_timeout: Duration,
    /// Other requests: from sending the request to a worker to its response. Longer than the longest response
    /// takes to compute, since the request is retried elsewhere after it. 10 minutes is the time-out of OpenAI's
    /// clients.
    #[serde(with = "DurationText")]
    pub response_timeout: Duration,
    /// A response without a byte for this long ends with an error; comments do not count. An engine that shuts down can leave
    /// a stream open for ever. Longer than an engine is silent within the call of a tool.
    #[serde(with = "DurationText")]
    pub stream_idle_timeout: Duration,
    /// A stream that the client gets nothing of for this long gets a comment, so that no proxy between takes it for dead.
    /// `0s`: none.
    #[serde(with = "DurationText")]
    #[schemars(extend("min" = "0s", "max" = "1h"))]
    pub keep_alive: Duration,
    /// From the header of the client's request to the end of the response, all attempts together.
    #[serde(with = "DurationText")]
    pub request_timeout: Duration,
    /// Requests with the header `x-warmroute-decision` get the worker, the cached tokens and the cost of their decision
    /// in the same header of the response.
    pub decision_header: bool,
    /// Where usage is counted for tenants or written to the usage log, engines are asked for that of each stream
    /// (`stream_options.include_usage`). Clients that did not ask for it do not get it.
    pub stream_usage: bool,
    /// Whether requests for a worker with several data-parallel ranks are sent to the rank that has most of the prompt
    /// cached, by the header `x-data-parallel-rank`.
    pub pin_ranks: PinRanks,
    /// Settings for experts.
    pub advanced: Retries,
}

/// Whether requests name the data-parallel rank that is to compute them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PinRanks {
    /// Where the ranks are known by their KV events, and the engine's version takes the header with the request's API.
    #[default]
    Auto,
    /// The engine chooses: for one whose own balancing must see all requests. Only what every rank has cached counts then.
    Never,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_attempts: 3,
            // Longer than any queue that anyone waits in.
            first_byte_timeout: Duration::from_secs(120),
            response_timeout: Duration::from_secs(600),
            // Users of agents report silences of more than 5 minutes.
            stream_idle_timeout: Duration::from_secs(600),
            // A quarter of the usual time-out of proxies and load balancers.
            keep_alive: Duration::from_secs(15),
            request_timeout: Duration::from_secs(1_800),
            decision_header: true,
            stream_usage: true,
            pin_ranks: PinRanks::Auto,
            advanced: Retries::default(),
        }
    }
}

/// When a failed request is retried.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Retries {
    /// Statuses of a worker that send the request to another one. Not 500: a request that breaks one engine
    /// would break the next.
    pub retry_statuses: Vec<u16>,
    /// Wait before the second attempt; doubles with each further one, less a random part.
    #[serde(skip)]
    pub backoff: Duration,
    /// The longest wait between two attempts.
    #[serde(skip)]
    pub max_backoff: Duration,
    /// Retries that are allowed for each 100 requests, so that retries do not overload a fleet that fails.
    pub retry_budget_percent: u32,
    /// Retries that are allowed each second in any case.
    #[schemars(range(max = 1000000))]
    pub min_retries_per_second: u32,
}

impl Default for Retries {
    fn default() -> Self {
        Self {
            retry_statuses: vec![502, 503, 504],
            // The next worker is another one, so a wait gives only the fleet time, not the worker.
            backoff: Duration::from_millis(25),
            max_backoff: Duration::from_secs(1),
            retry_budget_percent: 20,
            min_retries_per_second: 10,
        }
    }
}
